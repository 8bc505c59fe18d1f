"""The family of GEMMs whose operands have 8 bits and scales: rows of scaled_gemm.toml are those of gemm.toml."""

from __future__ import annotations

from dataclasses import dataclass, replace

from codegen.families.gemm import GemmKernel
from codegen.hardware import SM80_SMEM_LIMIT, round_up
from codegen.kernel import Kernel, cpp_bool
from codegen.row import Row

SCALE_BLOCK = 128  # of k, and of a weight's rows


@dataclass(frozen=True, kw_only=True)
class ScaledGemmKernel(GemmKernel):
    FAMILY = "scaled_gemm"
    OPERANDS = ("e4m3", "s8")

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        if row.get("arch") == "sm80" and "e4m3" in row.get("elements", ()):
            row.require(row.get("elements") == ["e4m3"], "elements", "must be e4m3 alone: its kernels are of another template")
            _check_fp8_sm80(row)
            return [_with_scales(row, kernel) for kernel in super().expand(row)]
        return [replace(kernel, in_place_ranges=_has_ranges(kernel)) for kernel in super().expand(row)]

    @property
    def template(self) -> tuple[str, str]:
        if self.arch == 80 and self.element == "e4m3":
            return "gemm/gemm_fp8_sm80.cuh", "gemm::launch_gemm_fp8_sm80"
        return super().template

    @property
    def shard_group(self) -> str:
        return f"{self.FAMILY}_sm{self.arch}_{self.schedule}_{self.element}"

    def constants(self) -> list[str]:
        lines = super().constants()
        if self.arch == 90:
            lines.append(f"static constexpr bool kInPlaceRanges = {cpp_bool(self.in_place_ranges)};")
        return lines


def _has_ranges(kernel: GemmKernel) -> bool:
    """Whether a CTA may compute all ranges of k of a tile: the threads that leave a range's sums must be those that add the next one's. In
    clusters, tiles of 256 tokens have no register for it."""
    spills = kernel.tile[0] == 256 and kernel.cluster != (1, 1, 1)
    return kernel.arch == 90 and kernel.element == "e4m3" and kernel.schedule == "cooperative" and not spills


def _check_fp8_sm80(row: Row) -> None:
    _, tile_n, tile_k = row.integers("tile", 3)
    warps = row.integers("warps", 2)
    row.require(warps[1] % 2 == 0, "warps", "must be even along n: a warp has columns of gates or of ups")
    row.require(tile_k == SCALE_BLOCK, "tile", f"tile_k must be the {SCALE_BLOCK} of k that share a scale")
    rule = "tile_n must be whole pairs of 8 columns for each warp, and divide the 128 that share a scale"
    row.require(tile_n % (16 * warps[1]) == 0 and SCALE_BLOCK % tile_n == 0, "tile", rule)


def _with_scales(row: Row, kernel: GemmKernel) -> GemmKernel:
    """The kernel with room for the scales of its stages: of the rows of a tile, and two of the weight."""
    tile_m, tile_n, tile_k = kernel.tile
    ring = kernel.stages * ((tile_m + tile_n) * tile_k + (tile_m + 4) * 4)
    smem = max(kernel.smem_bytes, round_up(ring, 128))
    row.require(smem <= SM80_SMEM_LIMIT, "stages", f"{kernel.stages} stages need {smem} bytes of shared memory with their scales")
    return replace(kernel, smem_bytes=smem)
