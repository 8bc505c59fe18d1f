"""The grouped (mixture of experts) family: which rows of moe.toml are legal, the shared memory they need, the struct a shard instantiates.

The kernels' tile is [rows of the weight, most tokens, k]: the operands are swapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.formats import project_formats
from codegen.hardware import (
    MAX_STAGES_SM90,
    MIN_STAGES_SM90,
    SM80_SMEM_LIMIT,
    SM90_SMEM_ALIGNMENT,
    SM90_SMEM_LIMITS,
    SWIZZLE_ROW_BYTES,
    round_up,
)
from codegen.kernel import SCHEDULES, Kernel, shape_name
from codegen.row import Row

TILES_BYTES = 8192  # what experts and barriers need: expert_tiles.cuh, 512 experts
OUTPUT_BYTES = 2
STAGED_TOKENS = 32  # that are staged together
MAX_ACCUMULATORS_SM90, MAX_ACCUMULATORS_SM80 = 128, 64  # fp32 a thread
COMMON_FIELDS = {"arch", "elements", "tile", "schedule", "stages", "ctas_per_sm", "note"}
FIELDS = {"sm90": COMMON_FIELDS | {"consumers"}, "sm80": COMMON_FIELDS}


@dataclass(frozen=True, kw_only=True)
class GroupedGemmKernel(Kernel):
    FAMILY = "moe"
    LAUNCH_HEADER = "moe/grouped/launch.h"
    ARGUMENTS = "moe::GroupedLaunchArguments"

    swap: bool = True

    @property
    def name(self) -> str:
        return f"moe_sm{self.arch}_{self.element}_tn_{shape_name(self.tile)}_{shape_name(self.cluster)}_{self.schedule}_swap"

    @property
    def sums(self) -> str:
        return "wgmma16" if self.arch == 90 else "mma16"

    @property
    def shard_group(self) -> str:
        return f"moe_sm{self.arch}_{self.schedule}"

    @property
    def template(self) -> tuple[str, str]:
        return f"moe/grouped/grouped_sm{self.arch}.cuh", f"launch_grouped_sm{self.arch}"

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        arch = row.one_of("arch", FIELDS)
        row.known(FIELDS[arch], arch)
        expand = _expand_sm90 if arch == "sm90" else _expand_sm80
        kernels = []
        for element in row.names("elements", cls.OPERANDS):
            fields = expand(row, project_formats().elements[element].bytes)
            kernels.append(cls(element=element, schedule=row.get("schedule"), note=row.text("note"), **fields))
        return kernels

    def constants(self) -> list[str]:
        return self.type_constants() + [
            "static constexpr int kTileM = {}, kTileN = {}, kTileK = {};".format(*self.tile),
            f"static constexpr Schedule kSchedule = {SCHEDULES[self.schedule]};",
            f"static constexpr int kStages = {self.stages};",
            f"static constexpr int kThreads = {self.threads};",
            f"static constexpr int kSmemBytes = {self.smem_bytes};",
            f"static constexpr int kCtasPerSm = {self.ctas_per_sm};",
        ]


def _expand_sm90(row: Row, operand_bytes: int) -> dict:
    tile, ctas_per_sm = row.integers("tile", 3), row.one_of("ctas_per_sm", (1, 2), 1)
    tile_m, tile_n, tile_k = tile
    schedule = row.get("schedule")
    row.require(schedule in ("cooperative", "pingpong"), "schedule", "sm90 has cooperative and pingpong")
    consumers = row.one_of("consumers", (1, 2), 2)
    row.require(schedule == "cooperative" or consumers == 2, "consumers", "pingpong takes two")
    shared_by = 1 if schedule == "pingpong" else consumers  # warpgroups with rows of one tile
    row.require(tile_m % (64 * shared_by) == 0, "tile", "tile_m must be a multiple of 64 rows a warpgroup")
    whole = tile_k * operand_bytes % SWIZZLE_ROW_BYTES == 0
    row.require(whole, "tile", f"tile_k must fill whole 128-byte swizzle rows: a multiple of {SWIZZLE_ROW_BYTES // operand_bytes}")
    box = 64 if tile_n >= 64 else 8
    row.require(tile_n % box == 0 and tile_n <= 256, "tile", "tile_n must be a multiple of 8 up to 56, or of 64 up to 256")
    rows = tile_m // shared_by
    accumulators = rows * tile_n // 128
    rule = f"{accumulators} accumulators per consumer thread spill, the limit is {MAX_ACCUMULATORS_SM90}"
    row.require(accumulators <= MAX_ACCUMULATORS_SM90, "tile", rule)
    stage = (tile_m + tile_n) * tile_k * operand_bytes
    fixed = consumers * round_up(min(tile_n, STAGED_TOKENS) * rows * OUTPUT_BYTES, 1024) + TILES_BYTES
    limit = SM90_SMEM_LIMITS[ctas_per_sm]
    fits = min((limit - fixed) // stage, MAX_STAGES_SM90)
    stages = row.get("stages", fits)
    good = type(stages) is int and MIN_STAGES_SM90 <= stages <= fits
    row.require(good, "stages", f"{fits} stages of {stage} bytes fit, {MIN_STAGES_SM90} are needed")
    smem = min(round_up(stages * stage + fixed, SM90_SMEM_ALIGNMENT), limit)
    return dict(arch=90, tile=tile, stages=stages, threads=128 * (consumers + 1), smem_bytes=smem, ctas_per_sm=ctas_per_sm)


def _expand_sm80(row: Row, operand_bytes: int) -> dict:
    tile, ctas_per_sm = row.integers("tile", 3), row.one_of("ctas_per_sm", (1, 2), 1)
    tile_m, tile_n, tile_k = tile
    row.require(row.get("schedule") == "multistage", "schedule", "sm80 has multistage")
    row.require(tile_m % 64 == 0 and tile_n % 16 == 0 and tile_k == 64, "tile", "must be [multiple of 64, multiple of 16, 64]")
    accumulators = tile_m * tile_n // 128
    rule = f"{accumulators} accumulators per thread leave too few registers for the fragments, the limit is {MAX_ACCUMULATORS_SM80}"
    row.require(accumulators <= MAX_ACCUMULATORS_SM80, "tile", rule)
    stages = row.get("stages")
    row.require(type(stages) is int and stages >= 2, "stages", "must be given, 2 or more")
    smem = stages * (tile_m + tile_n) * tile_k * operand_bytes + min(tile_n, STAGED_TOKENS) * tile_m * OUTPUT_BYTES + TILES_BYTES
    limit = SM80_SMEM_LIMIT // ctas_per_sm
    row.require(smem <= limit, "stages", f"{stages} stages need {smem} bytes of shared memory, the limit is {limit}")
    return dict(arch=80, tile=tile, stages=stages, threads=128, smem_bytes=smem, ctas_per_sm=ctas_per_sm)
