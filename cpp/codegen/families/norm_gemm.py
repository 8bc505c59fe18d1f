"""The norm_gemm family: RMS norm and a dense GEMM of few tokens in one launch."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.hardware import SM80_SMEM_LIMIT, SM_REGISTERS, round_up
from codegen.kernel import Kernel, shape_name
from codegen.row import Row

FIELDS = {"elements", "tokens", "warps", "ahead", "ctas_per_sm", "note"}
TILE_COLUMNS, UNIT = 16, 32  # norm_gemm_params.h: kTileColumns, kUnit
SUM_PITCH = 20  # norm_gemm_sm80.cuh: kSumPitch
RING_REGISTERS = 8  # of a unit, in a thread


@dataclass(frozen=True, kw_only=True)
class NormGemmKernel(Kernel):
    FAMILY = "norm_gemm"
    LAUNCH_HEADER = "norm_gemm/norm_gemm_params.h"
    ARGUMENTS = "norm_gemm::NormGemmLaunchArguments"

    arch: int = 80
    schedule: str = "registers"

    @property
    def name(self) -> str:
        return f"norm_gemm_sm{self.arch}_{self.element}_{shape_name(self.tile)}_warps{self.warps}_ahead{self.stages}"

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def sums(self) -> str:
        return f"mma16_warps{self.warps}"

    @property
    def shard_group(self) -> str:
        return f"norm_gemm_sm{self.arch}"

    @property
    def template(self) -> tuple[str, str]:
        return ("norm_gemm/norm_gemm_sm80.cuh", "launch_norm_gemm_sm80")

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        row.known(FIELDS, "norm and GEMM in one launch")
        elements = row.names("elements", cls.OPERANDS)
        tokens, warps, ahead = (row.optional_integer(field) for field in ("tokens", "warps", "ahead"))
        ctas = row.optional_integer("ctas_per_sm") or 1
        row.require(tokens in (8, 16), "tokens", "must be 8 or 16: blocks of MMA columns")
        row.require(warps in (8, 16, 32), "warps", "must be 8, 16 or 32")
        row.require(ahead is not None and 2 <= ahead <= 8, "ahead", "must be 2 to 8 units of weights")
        # Beside the ring a thread has some 64 registers.
        registers = SM_REGISTERS // (32 * warps * ctas)
        rule = f"{ahead} units take {RING_REGISTERS * ahead} of the {registers} registers that a thread has, 64 of which are for the rest"
        row.require(RING_REGISTERS * ahead + 64 <= registers, "ahead", rule)
        # Sums of a tile in two buffers, squares of each warp, scales; the rows of activations follow, as many as a launch has.
        smem = round_up(4 * (2 * warps * tokens * SUM_PITCH + tokens * warps + tokens), 16)
        row.require(smem <= SM80_SMEM_LIMIT // 2, "warps", f"sums take {smem} bytes of shared memory, which leaves no room for rows")
        shared = dict(tile=(tokens, TILE_COLUMNS, UNIT), stages=ahead, threads=32 * warps, smem_bytes=smem)
        return [cls(element=element, ctas_per_sm=ctas, note=row.text("note"), **shared) for element in elements]

    def constants(self) -> list[str]:
        return self.type_constants() + [
            f"static constexpr int kTokens = {self.tile[0]}, kWarps = {self.warps}, kAhead = {self.stages};",
            f"static constexpr int kSmemBytes = {self.smem_bytes};  // in front of the activations",
            f"static constexpr int kCtasPerSm = {self.ctas_per_sm};",
        ]
