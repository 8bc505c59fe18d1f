"""The grouped family of 8-bit operands: which rows of moe_scaled.toml are legal, the shared memory they need, the struct of a shard.

The kernels' tile is [rows of the weight, most tokens, k] where the operands are swapped, else [most tokens, rows of the weight, k].
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.families.grouped_gemm import MAX_ACCUMULATORS_SM80, OUTPUT_BYTES, STAGED_TOKENS, GroupedGemmKernel
from codegen.hardware import (
    MAX_STAGES_SM90,
    MIN_STAGES_SM90,
    SM80_SMEM_LIMIT,
    SM90_SMEM_ALIGNMENT,
    SM90_SMEM_LIMITS,
    SWIZZLE_ROW_BYTES,
    round_up,
)
from codegen.kernel import Kernel, shape_name
from codegen.row import Row

COMMON_FIELDS = {"arch", "elements", "tile", "schedule", "stages", "ctas_per_sm", "note"}
FIELDS = {"sm90": COMMON_FIELDS | {"swap", "token_step", "consumers", "least_group", "cluster"}, "sm80": COMMON_FIELDS}
MAX_ACCUMULATORS = 128  # fp32 a thread, beside the sums of one block of 64 rows
TILES_BYTES = 6656  # what experts and barriers need: expert_tiles.cuh, 512 experts
SCALE_BLOCK = 128  # of k
WEIGHT_SCALES, TMA_SCALES = 4, 96  # of a line of a stage beside those of its tokens; with padding: TMA writes to whole 128 bytes
WARPS = 4  # of a warpgroup
STAGING_ALIGNMENT = 1024
BLOCK_ROWS, STAGED_COLUMNS = 64, 64  # of an MMA; of a block, staged together


@dataclass(frozen=True, kw_only=True)
class GroupedScaledGemmKernel(GroupedGemmKernel):
    FAMILY = "moe_scaled"
    ARGUMENTS = "moe::GroupedLaunchArguments"
    OPERANDS = ("e4m3", "s8")

    token_step: int
    staged_tokens: int

    @property
    def name(self) -> str:
        tile, cluster = shape_name(self.tile), shape_name(self.cluster)
        return f"moe_scaled_sm{self.arch}_{self.element}_tn_{tile}_{cluster}_{self.schedule}{'_swap' if self.swap else ''}"

    @property
    def sums(self) -> str:
        return "wgmma8" if self.arch == 90 else "mma8"

    @property
    def shard_group(self) -> str:
        return f"moe_scaled_sm{self.arch}_{self.element}"

    @property
    def template(self) -> tuple[str, str]:
        return f"moe/grouped/grouped_scaled_sm{self.arch}.cuh", f"moe::launch_grouped_scaled_sm{self.arch}"

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        arch = row.one_of("arch", FIELDS)
        row.known(FIELDS[arch], arch)
        schedule = row.one_of("schedule", ("cooperative",) if arch == "sm90" else ("multistage",))
        elements = row.names("elements", cls.OPERANDS)
        fields = _expand_sm90(row) if arch == "sm90" else _expand_sm80(row)
        return [cls(element=element, schedule=schedule, note=row.text("note"), **fields) for element in elements]

    def constants(self) -> list[str]:
        swap = f"static constexpr bool kSwap = {'true' if self.swap else 'false'};"
        steps = f"static constexpr int kTokenStep = {self.token_step}, kStagedTokens = {self.staged_tokens}, kCluster = {self.cluster[1]};"
        return super().constants() + [swap, steps, f"static constexpr int kLeastGroup = {self.group_multiple};"]


def _expand_sm90(row: Row) -> dict:
    tile, ctas_per_sm = row.integers("tile", 3), row.one_of("ctas_per_sm", (1, 2), 1)
    tile_m, tile_n, tile_k = tile
    swap = row.one_of("swap", (True, False), False)
    tokens, weight_rows = (tile_n, tile_m) if swap else (tile_m, tile_n)
    consumers, cluster = row.one_of("consumers", (1, 2), 2), row.one_of("cluster", (1, 2), 1)
    row.require(cluster == 1 or (not swap and ctas_per_sm == 1), "cluster", "is of kernels whose rows are tokens, one CTA an SM")
    row.require(tile_m % (64 * consumers) == 0, "tile", "tile_m must be a multiple of 64 rows a warpgroup")
    row.require(tile_k % SWIZZLE_ROW_BYTES == 0, "tile", f"tile_k must fill whole swizzle rows of {SWIZZLE_ROW_BYTES} bytes")
    group = row.one_of("least_group", (32, 64, 128), 32)
    step = row.one_of("token_step", (8, 16, 32, 64))
    row.require(swap or step == BLOCK_ROWS, "token_step", f"is {BLOCK_ROWS}, a block of rows, where rows are tokens")
    box = 64 if tokens >= 64 else 8 if step == 8 else 16
    row.require(tokens % box == 0 and tokens % step == 0 and tokens <= 256, "tile", "tokens must be whole steps and boxes, at most 256")
    rows = tile_m // consumers
    row.require(weight_rows in (64, 128), "tile", "rows of the weight must share the scale of a block: 64 or 128")
    scaled = rows if swap else tile_n  # rows of the weight of a warpgroup
    accumulators = rows * tile_n // 128
    rule = f"{accumulators} accumulators per consumer thread spill, the limit is {MAX_ACCUMULATORS}"
    row.require(accumulators <= MAX_ACCUMULATORS, "tile", rule)
    staged = min(tile_n, STAGED_TOKENS if rows <= 64 else STAGED_TOKENS // 2) if swap else BLOCK_ROWS
    staging = round_up(staged * (scaled if swap else STAGED_COLUMNS) * OUTPUT_BYTES, 1024)
    row.require(cluster == 1 or group == SCALE_BLOCK, "least_group", f"must be {SCALE_BLOCK} in clusters, whose scales come by TMA")
    scales = SCALE_BLOCK // group * tokens + (WEIGHT_SCALES if cluster == 1 else TMA_SCALES)
    stage = (tile_m + tile_n) * tile_k + tile_k // SWIZZLE_ROW_BYTES * scales * 4
    # Scales and bias of a warpgroup's lines; swapped, magnitudes of its outputs.
    lines = 4 * (2 * scaled + (tokens + WARPS * staged if swap else rows))
    fixed = consumers * (staging + lines) + TILES_BYTES + 4 * tokens
    limit = SM90_SMEM_LIMITS[ctas_per_sm]
    fits = min((limit - fixed) // stage, MAX_STAGES_SM90)
    stages = row.get("stages", fits)
    good = type(stages) is int and MIN_STAGES_SM90 <= stages <= fits
    row.require(good, "stages", f"{fits} stages of {stage} bytes fit, {MIN_STAGES_SM90} are needed")
    smem = min(round_up(stages * stage + fixed, SM90_SMEM_ALIGNMENT), limit)
    threads = 128 * (consumers + 1)
    sizes = dict(tile=tile, token_step=step, stages=stages, threads=threads, smem_bytes=smem, ctas_per_sm=ctas_per_sm)
    return dict(arch=90, swap=swap, staged_tokens=staged, group_multiple=group, cluster=(1, cluster, 1), **sizes)


def _expand_sm80(row: Row) -> dict:
    tile, ctas_per_sm, stages = row.integers("tile", 3), row.one_of("ctas_per_sm", (1, 2), 1), row.get("stages")
    tile_m, tile_n, tile_k = tile
    row.require(tile_m in (64, 128), "tile", "rows of the weight must share the scale of a block: 64 or 128")
    row.require(tile_n % 16 == 0 and tile_k == SCALE_BLOCK, "tile", f"must be [64 or 128, multiple of 16, {SCALE_BLOCK}]")
    accumulators = tile_m * tile_n // 128
    rule = f"{accumulators} accumulators per thread, and as many sums, leave too few registers, the limit is {MAX_ACCUMULATORS_SM80}"
    row.require(accumulators <= MAX_ACCUMULATORS_SM80, "tile", rule)
    row.require(type(stages) is int and stages >= 2, "stages", "must be given, 2 or more")
    group = 32
    staged = min(tile_n, STAGED_TOKENS if tile_m <= 64 else STAGED_TOKENS // 2)
    stage = (tile_m + tile_n) * tile_k + (SCALE_BLOCK // group * tile_n + WEIGHT_SCALES) * 4
    lines = 4 * (2 * tile_m + tile_n + WARPS * staged)
    smem = round_up(stages * stage, STAGING_ALIGNMENT) + staged * tile_m * OUTPUT_BYTES
    smem = round_up(smem + lines + TILES_BYTES, STAGING_ALIGNMENT)
    limit = SM80_SMEM_LIMIT // ctas_per_sm
    row.require(smem <= limit, "stages", f"{stages} stages need {smem} bytes of shared memory, the limit is {limit}")
    sizes = dict(tile=tile, token_step=8, stages=stages, threads=128, smem_bytes=smem, ctas_per_sm=ctas_per_sm)
    return dict(arch=80, swap=True, staged_tokens=staged, group_multiple=group, **sizes)
