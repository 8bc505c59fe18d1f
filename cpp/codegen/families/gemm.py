"""The GEMM family: which rows of gemm.toml are legal, the shared memory they need, the struct a shard instantiates."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.formats import project_formats
from codegen.hardware import (
    MAX_STAGES_SM90,
    MIN_STAGES_SM90,
    SM80_SMEM_LIMIT,
    SM90_BARRIER_BYTES,
    SM90_SMEM_ALIGNMENT,
    SM90_SMEM_LIMIT,
    SM_REGISTERS,
    SWIZZLE_ROW_BYTES,
    round_up,
)
from codegen.kernel import MAJORS, SCHEDULES, Kernel, cpp_bool, shape_name
from codegen.row import Row

MAX_ACCUMULATORS = 176  # fp32 registers per consumer thread, of 232; beyond it the epilogue spills
MAX_TAGGED_VALUES = 16  # of a thread, cpp/src/gemm/split_reduction.cuh
OUTPUT_BYTES = 2  # of the outputs that are staged for TMA; a D of f32 is stored from registers
LAYOUTS = ("tn", "tt", "nn", "nt")

COMMON_FIELDS = {"arch", "elements", "layouts", "tile", "schedule", "stages", "note"}
FIELDS = {
    "sm90": COMMON_FIELDS | {"cluster", "swap", "epilogue_chunks", "column_step", "continues_sums"},
    "sm80": COMMON_FIELDS | {"warps", "unaligned", "vector"},
}


@dataclass(frozen=True, kw_only=True)
class GemmKernel(Kernel):
    FAMILY = "gemm"
    LAUNCH_HEADER = "gemm/launch.h"
    ARGUMENTS = "gemm::GemmLaunchArguments"

    epilogue_chunks: int = 0  # sm90: buffers of a consumer warpgroup that D goes through
    warps: tuple[int, int] = (0, 0)  # sm80: along the tile's m and n
    ring_bytes: int = 0  # sm90, where a launch chooses the tile's columns: what its stages share
    unaligned: bool = False  # sm80: operands at any address and with any stride
    vector: bool = False  # sm80: the same, a vector and a matrix
    continues_sums: bool = False  # sm90: of stream-K, a CTA goes on with the sums of the one in front

    @property
    def name(self) -> str:
        suffix = ("_swap" if self.swap else "") + ("_vector" if self.vector else "_unaligned" if self.unaligned else "")
        suffix += f"_columns{self.column_step}" if self.column_step else "_continued" if self.continues_sums else ""
        shape = f"{shape_name(self.tile)}_{shape_name(self.cluster)}"
        return f"{self.FAMILY}_sm{self.arch}_{self.element}_{self.layout}_{shape}_{self.schedule}{suffix}"

    @property
    def shard_group(self) -> str:
        """K-major pairs (the layout of weights, most often edited) are kept apart from the rest."""
        layouts = "columns" if self.column_step else "tn" if self.layout == "tn" else "mn"
        return f"gemm_sm{self.arch}_{self.schedule}{'_vector' if self.vector else '_unaligned' if self.unaligned else ''}_{layouts}"

    @property
    def template(self) -> tuple[str, str]:
        variant = "_columns" if self.column_step else "_vector" if self.vector else "_unaligned" if self.unaligned else ""
        name = f"gemm{variant}_sm{self.arch}"
        return f"gemm/{name}.cuh", f"launch_{name}"

    @property
    def sums(self) -> str:
        """WGMMA adds 16 of k (8 bits: 32) at a time to an accumulator, whatever its shape; so does mma.sync, in its own way."""
        bits = "8" if self.element in ("e4m3", "s8") else "16"
        if self.vector:
            return f"lanes{self.tile[2]}_{self.layout}_{'row' if self.tile[0] == 1 else 'column'}"
        return f"{'wgmma' if self.arch == 90 else 'mma'}{bits}{'_unaligned' if self.unaligned else ''}"

    @property
    def alignment(self) -> int:
        return project_formats().elements[self.element].bytes if self.unaligned else super().alignment

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        arch = row.one_of("arch", FIELDS)
        row.known(FIELDS[arch], arch)
        elements = row.names("elements", cls.OPERANDS)
        layouts = row.names("layouts", LAYOUTS)
        expand = _expand_sm90 if arch == "sm90" else _expand_sm80
        kernels = []
        for element in elements:
            operand_bytes = project_formats().elements[element].bytes
            row.require(operand_bytes == 2 or layouts == ["tn"], "layouts", f"must be tn: tensor cores read {element} K-major only")
            fields = dict(expand(row, operand_bytes), schedule=row.get("schedule"), note=row.text("note"))
            kernels += [cls(element=element, layout=layout, **fields) for layout in layouts]
        return kernels

    def constants(self) -> list[str]:
        lines = self.type_constants() + [
            f"static constexpr Major kMajorA = {MAJORS[self.a_major]};",
            f"static constexpr Major kMajorB = {MAJORS[self.b_major]};",
            f"static constexpr bool kSwap = {cpp_bool(self.swap)};",
            f"static constexpr int kColumnStep = {self.column_step};",
            "static constexpr int kTileM = {}, kTileN = {}, kTileK = {};".format(*self.tile),
            f"static constexpr int kClusterM = {self.cluster[0]}, kClusterN = {self.cluster[1]};",
            f"static constexpr Schedule kSchedule = {SCHEDULES[self.schedule]};",
            f"static constexpr int kStages = {self.stages};",
            f"static constexpr int kThreads = {self.threads};",
            f"static constexpr int kSmemBytes = {self.smem_bytes};",
            f"static constexpr int kCtasPerSm = {self.ctas_per_sm};",
            f"static constexpr WeightFormat kFormat = {project_formats().formats[self.b_format].cpp};",
        ]
        if self.arch == 90:
            lines.append(f"static constexpr int kEpilogueChunks = {self.epilogue_chunks};")
            if self.column_step:
                lines.append(f"static constexpr int kRingBytes = {self.ring_bytes};")
            if self.continues_sums:
                lines.append("static constexpr bool kContinuesSums = true;")
        else:
            lines.append(f"static constexpr int kWarpsM = {self.warps[0]}, kWarpsN = {self.warps[1]};")
        return lines


def _expand_sm90(row: Row, operand_bytes: int) -> dict:
    tile, stages, cluster = row.integers("tile", 3), row.optional_integer("stages"), row.integers("cluster", 3)
    swap, chunks = row.flag("swap"), row.optional_integer("epilogue_chunks")
    column_step = row.optional_integer("column_step") or 0
    _check_sm90(row, tile, cluster, operand_bytes)
    row.require(operand_bytes == 2 or column_step > 0, "column_step", "must be given where operands have 8 bits")
    if column_step:
        _check_columns(row, tile, column_step, operand_bytes)
    chunks, staging_bytes = _staging(row, tile, swap, column_step, chunks, operand_bytes)
    stages = _stages_sm90(row, tile, staging_bytes, stages, operand_bytes)
    ring_bytes = stages * _stage_bytes(tile, operand_bytes)
    if column_step:
        ring_bytes = (SM90_SMEM_LIMIT - _smem_sm90(0, staging_bytes)) // SM90_SMEM_ALIGNMENT * SM90_SMEM_ALIGNMENT
    smem = _smem_sm90(ring_bytes, staging_bytes)
    fields = dict(arch=90, tile=tile, cluster=cluster, swap=swap, stages=stages, epilogue_chunks=chunks)
    fields |= dict(column_step=column_step, ring_bytes=ring_bytes if column_step else 0)
    if row.flag("continues_sums"):
        fits = row.get("schedule") == "pingpong" and cluster == (1, 1, 1) and not column_step and operand_bytes == 2
        row.require(fits, "continues_sums", "is for 16-bit pingpong kernels without clusters, whose tiles have columns of their own")
        row.require(tile[0] * tile[1] <= MAX_TAGGED_VALUES * 128, "continues_sums", "sums travel as packets: at most 2048 of a tile")
        fields |= dict(continues_sums=True, invariant_only=True)
    return fields | dict(threads=128 * (1 + _consumers_sm90(tile)), smem_bytes=smem)


def _expand_sm80(row: Row, operand_bytes: int) -> dict:
    tile, stages = row.integers("tile", 3), row.optional_integer("stages")
    warps, unaligned = row.integers("warps", 2), row.flag("unaligned")
    if row.flag("vector"):
        return _expand_vector(row, tile, warps)
    _check_sm80(row, tile, warps, stages, operand_bytes)
    # The ring, reused as [tile_m, tile_n + padding] of fp32 by the epilogue.
    if unaligned:
        _check_unaligned(row, tile, warps)
        smem = max(stages * sum(map(_unaligned_bytes, tile[:2])), tile[0] * (tile[1] + 16) * 4)
    else:
        smem = max(stages * _stage_bytes(tile, operand_bytes), tile[0] * (tile[1] + 8) * 4)
    row.require(smem <= SM80_SMEM_LIMIT, "stages", f"{stages} stages need {smem} bytes of shared memory, the limit is {SM80_SMEM_LIMIT}")
    threads = 32 * warps[0] * warps[1]
    fields = dict(arch=80, tile=tile, unaligned=unaligned, stages=stages, warps=warps, threads=threads, smem_bytes=smem)
    # Unaligned: as many CTAs as have 128 registers a thread.
    return fields | dict(ctas_per_sm=SM_REGISTERS // (128 * threads) if unaligned else 1)


def _expand_vector(row: Row, tile: tuple[int, ...], warps: tuple[int, ...]) -> dict:
    """A row of A by a matrix (tile_m = 1), or a matrix by a column of B (tile_n = 1). The warps share k."""
    row.require(row.get("schedule") == "multistage", "schedule", "sm80 has multistage")
    row.require("stages" not in row.fields, "stages", "are not for vector: its operands go to registers")
    row.require(1 in tile[:2] and tile[:2] != (1, 1), "tile", "must have one row or one column where a vector is multiplied")
    matrix = row.names("layouts", LAYOUTS)
    outputs = max(tile[:2])
    along_k = {name[1] == "n" if tile[0] == 1 else name[0] == "t" for name in matrix}
    row.require(along_k == {outputs == 16}, "tile", "must have 16 outputs where the matrix is contiguous along k, else 32")
    threads = 32 * warps[0] * warps[1]
    row.require(tile[2] == 2 * threads, "tile", "tile_k must be two for each thread")
    row.require(threads <= 512, "warps", "at most 16 warps")
    fields = dict(arch=80, tile=tile, unaligned=True, vector=True, stages=1, warps=warps, threads=threads)
    return fields | dict(smem_bytes=4 * outputs * threads // 32 + 16, ctas_per_sm=SM_REGISTERS // (128 * threads))


def _stage_bytes(tile: tuple[int, ...], operand_bytes: int) -> int:
    """One pipeline stage: the A tile [tile_m, tile_k] and the B tile [tile_n, tile_k]."""
    return (tile[0] + tile[1]) * tile[2] * operand_bytes


def _unaligned_bytes(extent: int) -> int:
    """A stage of an unaligned operand, in the layout that takes more: lines of words and one word more, along k or along the extent.

    Sixteen lines of k are eight words apart from the next sixteen.
    """
    words, tile_k = 4, 64
    return words * max(extent * (tile_k // 2 + 1), tile_k * (extent // 2 + 1) + 8 * (tile_k // 16 - 1))


def _consumers_sm90(tile: tuple[int, ...]) -> int:
    """Consumer warpgroups: three where they share 192 rows, else two."""
    return 3 if tile[0] == 192 else 2


def _check_sm90(row: Row, tile: tuple[int, ...], cluster: tuple[int, ...], operand_bytes: int) -> None:
    tile_m, tile_n, tile_k = tile
    schedule = row.get("schedule")
    row.require(schedule in ("cooperative", "pingpong"), "schedule", "sm90 has cooperative and pingpong")
    three = (192,) if schedule == "cooperative" and "column_step" in row.fields else ()  # consumer warpgroups
    allowed = (128, *three, 256) if schedule == "cooperative" else (64, 128)
    choice = " or ".join(map(str, allowed))
    row.require(tile_m in allowed, "tile", f"{schedule} takes tile_m {choice} (64 rows per warpgroup instruction)")
    row.require(tile_n % 8 == 0 and 8 <= tile_n <= 256, "tile", "tile_n must be a multiple of 8 from 8 to 256 (the WGMMA shapes)")
    whole = tile_k * operand_bytes % SWIZZLE_ROW_BYTES == 0
    row.require(whole, "tile", f"tile_k must fill whole 128-byte swizzle rows: a multiple of {SWIZZLE_ROW_BYTES // operand_bytes}")
    accumulators = tile_m * tile_n // (128 * (_consumers_sm90(tile) if schedule == "cooperative" else 1))
    # ptxas gives an instruction no more registers than a thread is launched with, which with three consumers are 128.
    limit = MAX_ACCUMULATORS if _consumers_sm90(tile) == 2 else 96
    rule = f"{accumulators} accumulators per consumer thread do not fit, the limit is {limit}"
    row.require(accumulators <= limit, "tile", rule)
    row.require(all(c in (1, 2, 4) for c in cluster[:2]) and cluster[2] == 1, "cluster", "must be [1|2|4, 1|2|4, 1]")
    row.require(cluster[0] * cluster[1] <= 8, "cluster", "at most 8 CTAs are portable")
    # Multicast cuts the A tile over the cluster's columns and the B tile over its rows, in whole 8-row swizzle atoms.
    whole = tile_m % (8 * cluster[1]) == 0 and tile_n % (8 * cluster[0]) == 0
    row.require(whole, "cluster", "multicast slices must be multiples of 8 rows")


def _check_columns(row: Row, tile: tuple[int, ...], step: int, operand_bytes: int) -> None:
    """A kernel whose launches choose the columns of a tile."""
    row.require(row.flag("swap") or step in (32, 64), "column_step", "must be 32 or 64 where boxes of D have as many columns")
    tile_k = SWIZZLE_ROW_BYTES // operand_bytes
    row.require(tile[2] == tile_k, "tile", f"tile_k must be {tile_k} where a launch chooses the columns")
    row.require(step % 8 == 0 and tile[1] % step == 0, "column_step", "must be a multiple of 8, a WGMMA's step, that divides tile_n")
    whole = tile[1] % (_chunk_columns(row, step) * _boxes_together(row, tile, step)) == 0
    row.require(whole or _mma_rows(row, tile) == 1, "column_step", "a box of D has as many columns: tile_n must be whole groups of boxes")


def _mma_rows(row: Row, tile: tuple[int, ...]) -> int:
    """Blocks of 64 rows, the MMA's, of a consumer warpgroup."""
    return tile[0] // (64 * (_consumers_sm90(tile) if row.get("schedule") == "cooperative" else 1))


def _chunk_columns(row: Row, step: int) -> int:
    """Columns of a box of D where a launch chooses those of a tile. Swapped, a tile may end in the middle of a box."""
    return max(step, 16) if row.flag("swap") else step


def _boxes_together(row: Row, tile: tuple[int, ...], step: int) -> int:
    """Boxes of columns that are finished and stored as a group: 64 columns, or 32 where few registers are left beside the accumulators."""
    columns = 32 if _mma_rows(row, tile) * tile[1] // 2 > 128 or _consumers_sm90(tile) == 3 else 64
    chunk = _chunk_columns(row, step)
    return min(max(columns // chunk, 1), tile[1] // chunk)


def _staging(row: Row, tile: tuple[int, ...], swap: bool, step: int, chunks: int | None, operand_bytes: int) -> tuple[int, int]:
    """D leaves through shared memory in boxes -> (box buffers per consumer warpgroup, bytes of all of them, the bias and scales).

    A box is as many contiguous outputs as TMA's swizzles allow (64, 32 or 16) for the 64 rows of one MMA tile; swapped, 64 contiguous
    outputs (the MMA tile's rows) for tile_n rows of D. Where a launch chooses the columns, a box has `_chunk_columns` of them.
    """
    tile_m, tile_n, _ = tile
    mma_m = _mma_rows(row, tile)
    if swap:
        rows = _chunk_columns(row, step) if step else tile_n
        boxes, box_bytes = mma_m * tile_n // rows, rows * 64 * OUTPUT_BYTES
    else:
        width = step or next((w for w in (64, 32, 16) if tile_n % w == 0), 0)
        row.require(width > 0, "tile", "an unswapped tile_n must be a multiple of 16")
        boxes, box_bytes = mma_m * tile_n // width, 64 * width * OUTPUT_BYTES
    if chunks is None and step and swap:
        chunks = min(boxes, 2 * _boxes_together(row, tile, step))  # a group leaves while the next one is finished
    if chunks is None:
        # A 128 x 256 tile that staged D whole would cost a pipeline stage: it goes through half as many buffers.
        chunks = max(boxes // 2, 1) if tile_m * tile_n > 128 * 192 and not step else boxes
    # Boxes finished, and stored, as a group.
    together = (_boxes_together(row, tile, step) if step else 1) if swap else min(64 // width, tile_n // width)
    row.require(
        together <= chunks <= boxes, "epilogue_chunks", f"a consumer warpgroup has {boxes} boxes, {together} of them in use together"
    )
    # The general epilogue passes 64 rows x up to 32 columns of fp32 through the same memory.
    general = 64 * (32 if tile_n >= 32 else 16 if tile_n >= 16 else 8) * 4
    bias = 4 * (64 * mma_m if swap else tile_n)  # fp32, of the tile's n
    scales = 4 * (tile_n + 64 * mma_m) if operand_bytes == 1 else 0  # fp32, of its columns and rows
    return chunks, _consumers_sm90(tile) * (round_up(max(chunks * box_bytes, general), 1024) + bias + scales)


def _smem_sm90(ring_bytes: int, staging_bytes: int) -> int:
    return round_up(ring_bytes + staging_bytes + SM90_BARRIER_BYTES, SM90_SMEM_ALIGNMENT)


def _stages_sm90(row: Row, tile: tuple[int, ...], staging_bytes: int, stages: int | None, operand_bytes: int) -> int:
    """The deepest pipeline that fits beside the staging buffers, or the row's own after a check."""
    stage = _stage_bytes(tile, operand_bytes)
    fits = (SM90_SMEM_LIMIT - _smem_sm90(0, staging_bytes)) // stage
    field = "tile" if stages is None else "stages"
    sizes = f"{stage} bytes each beside {staging_bytes} of output staging"
    rule = f"{fits} stages of {sizes} fit {SM90_SMEM_LIMIT} bytes, at least {MIN_STAGES_SM90} are needed"
    row.require(fits >= MIN_STAGES_SM90, field, rule)
    most = min(fits, MAX_STAGES_SM90)
    row.require(stages is None or MIN_STAGES_SM90 <= stages <= most, "stages", f"{most} stages of {sizes} fit")
    return most if stages is None else stages


def _check_sm80(row: Row, tile: tuple[int, ...], warps: tuple[int, ...], stages: int | None, operand_bytes: int) -> None:
    tile_m, tile_n, tile_k = tile
    row.require(row.get("schedule") == "multistage", "schedule", "sm80 has multistage")
    row.require(stages is not None and stages >= 2, "stages", "must be given, 2 or more")
    row.require(warps[0] * warps[1] <= 8, "warps", "at most 8 warps")
    mma_k = 32 // operand_bytes
    rule = f"must split over the warps into multiples of the 16 x 8 x {mma_k} MMA"
    row.require(tile_m % (16 * warps[0]) == 0 and tile_n % (8 * warps[1]) == 0 and tile_k % mma_k == 0, "tile", rule)
    accumulators = tile_m * tile_n // (32 * warps[0] * warps[1])
    rule = f"{accumulators} accumulators per thread spill, the limit is {MAX_ACCUMULATORS}"
    row.require(accumulators <= MAX_ACCUMULATORS, "tile", rule)


def _check_unaligned(row: Row, tile: tuple[int, ...], warps: tuple[int, ...]) -> None:
    row.require(tile[2] == 64, "tile", "tile_k must be 64 where operands are unaligned: a lane has 16 neighbours of k")
    row.require(all(t in (16, 32, 64) for t in tile[:2]), "tile", "must be of 16, 32 or 64 rows and columns where operands are unaligned")
    whole = tile[0] % (16 * warps[0]) == 0 and tile[1] % (16 * warps[1]) == 0
    row.require(whole, "warps", "must split the tile into blocks of 16 x 16 outputs where operands are unaligned")
    threads = 32 * warps[0] * warps[1]
    # A word of a line for each thread, and the lines that are copied together divide 16.
    row.require(threads in (64, 128, 256) and threads <= 8 * min(tile[:2]), "warps", "must be 2, 4 or 8, and no more than tile / 4")
