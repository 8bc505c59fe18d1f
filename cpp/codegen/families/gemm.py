"""The GEMM family: which rows of gemm.toml are legal, the shared memory they need, the struct a shard instantiates."""

from __future__ import annotations

from codegen.kernel import (
    ELEMENTS,
    FORMATS,
    MAJORS,
    SCHEDULES,
    ConfigError,
    Kernel,
    cpp_bool,
)

# Headers that a shard includes, and the template its launch functions call.
TEMPLATES = {90: ("gemm/gemm_sm90.cuh", "launch_gemm_sm90"), 80: ("gemm/gemm_sm80.cuh", "launch_gemm_sm80")}
LAUNCH_HEADER = "gemm/launch.h"
ARGUMENTS = "gemm::GemmLaunchArguments"

ELEMENT_BYTES = 2
SM90_SMEM_LIMIT = 232448  # 227 KiB: what one block can opt in to on compute capability 9.0
SM80_SMEM_LIMIT = 101376  # 99 KiB: the smallest opt-in limit from sm_80 on (8.6, 8.9 and 12.0 have it)
SM90_BARRIER_BYTES = 512
SM90_SMEM_ALIGNMENT = 1024  # of the whole: swizzle patterns count from here
SM90_THREADS = 384  # one producer warpgroup, two consumers
MIN_STAGES_SM90, MAX_STAGES_SM90 = 3, 16
MAX_ACCUMULATORS = 176  # fp32 registers per consumer thread, of 232; beyond it the epilogue spills

COMMON_FIELDS = {"arch", "elements", "layouts", "tile", "schedule", "stages", "note"}
FIELDS = {
    "sm90": COMMON_FIELDS | {"cluster", "swap", "epilogue_chunks"},
    "sm80": COMMON_FIELDS | {"warps", "unaligned"},
}


def expand(row: dict, where: str) -> list[Kernel]:
    """One table row -> its kernels, elements outermost. `where` is how errors name the row."""

    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{where}, {field} = {row.get(field)!r}: {rule}")

    def integers(field: str, count: int) -> tuple[int, ...]:
        value = row.get(field)
        ok = isinstance(value, list) and len(value) == count and all(type(v) is int and v > 0 for v in value)
        require(ok, field, f"must be {count} positive integers")
        return tuple(value)

    def names(field: str, allowed: list[str]) -> list[str]:
        value = row.get(field)
        ok = isinstance(value, list) and value and all(v in allowed for v in value) and len(set(value)) == len(value)
        require(ok, field, f"must be a list of different values from {', '.join(allowed)}")
        return value

    def flag(field: str) -> bool:
        require(type(row.get(field, False)) is bool, field, "must be true or false")
        return row.get(field, False)

    def optional_integer(field: str) -> int | None:
        value = row.get(field)
        require(value is None or (type(value) is int and value > 0), field, "must be a positive integer")
        return value

    arch = row.get("arch")
    require(arch in FIELDS, "arch", f"must be one of {', '.join(FIELDS)}")
    for field in row:
        require(field in FIELDS[arch], field, f"no such field for {arch}; known: {', '.join(sorted(FIELDS[arch]))}")
    elements = names("elements", list(ELEMENTS))
    layouts = names("layouts", ["tn", "tt", "nn", "nt"])
    tile = integers("tile", 3)
    stages = optional_integer("stages")
    note = row.get("note", "")
    require(isinstance(note, str), "note", "must be a string")

    if arch == "sm90":
        cluster = integers("cluster", 3)
        swap, chunks = flag("swap"), optional_integer("epilogue_chunks")
        check_sm90(row, tile, cluster, require)
        chunks, staging_bytes = staging(tile, row["schedule"], swap, chunks, require)
        stages = stages_sm90(tile, staging_bytes, stages, require)
        smem = smem_sm90(tile, staging_bytes, stages)
        fields = dict(arch=90, cluster=cluster, swap=swap, unaligned=False, stages=stages, epilogue_chunks=chunks)
        fields.update(warps=(0, 0), threads=SM90_THREADS, smem_bytes=smem)
    else:
        warps, unaligned = integers("warps", 2), flag("unaligned")
        check_sm80(row, tile, warps, stages, require)
        # The ring, reused as [tile_m, tile_n + 8] of fp32 by the epilogue.
        smem = max(stages * stage_bytes(tile), tile[0] * (tile[1] + 8) * 4)
        require(smem <= SM80_SMEM_LIMIT, "stages", f"{stages} stages need {smem} bytes of shared memory, the limit is {SM80_SMEM_LIMIT}")
        fields = dict(arch=80, cluster=(1, 1, 1), swap=False, unaligned=unaligned, stages=stages, epilogue_chunks=0)
        fields.update(warps=warps, threads=32 * warps[0] * warps[1], smem_bytes=smem)

    shared = dict(family="gemm", tile=tile, schedule=row["schedule"], note=note, **fields)
    return [Kernel(element=element, layout=layout, **shared) for element in elements for layout in layouts]


def stage_bytes(tile: tuple[int, ...]) -> int:
    """One pipeline stage: the A tile [tile_m, tile_k] and the B tile [tile_n, tile_k]."""
    return (tile[0] + tile[1]) * tile[2] * ELEMENT_BYTES


def check_sm90(row: dict, tile: tuple[int, ...], cluster: tuple[int, ...], require) -> None:
    tile_m, tile_n, tile_k = tile
    schedule = row.get("schedule")
    require(schedule in ("cooperative", "pingpong"), "schedule", "sm90 has cooperative and pingpong")
    allowed = (128, 256) if schedule == "cooperative" else (64, 128)
    require(tile_m in allowed, "tile", f"{schedule} takes tile_m {allowed[0]} or {allowed[1]} (64 rows per warpgroup instruction)")
    require(tile_n % 8 == 0 and 8 <= tile_n <= 256, "tile", "tile_n must be a multiple of 8 from 8 to 256 (the WGMMA shapes)")
    require(tile_k * ELEMENT_BYTES % 128 == 0, "tile", "tile_k must fill whole 128-byte swizzle rows: a multiple of 64")
    accumulators = tile_m * tile_n // (256 if schedule == "cooperative" else 128)
    rule = f"{accumulators} accumulators per consumer thread spill, the limit is {MAX_ACCUMULATORS}"
    require(accumulators <= MAX_ACCUMULATORS, "tile", rule)
    require(all(c in (1, 2, 4) for c in cluster[:2]) and cluster[2] == 1, "cluster", "must be [1|2|4, 1|2|4, 1]")
    require(cluster[0] * cluster[1] <= 8, "cluster", "at most 8 CTAs are portable")
    # Multicast cuts the A tile over the cluster's columns and the B tile over its rows, in whole 8-row swizzle atoms.
    require(tile_m % (8 * cluster[1]) == 0 and tile_n % (8 * cluster[0]) == 0, "cluster", "multicast slices must be multiples of 8 rows")


def staging(tile: tuple[int, ...], schedule: str, swap: bool, chunks: int | None, require) -> tuple[int, int]:
    """D leaves through shared memory in boxes -> (box buffers per consumer warpgroup, bytes of all of them and the bias).

    A box is as many contiguous outputs as TMA's swizzles allow (64, 32 or 16) for the 64 rows of one MMA tile; swapped, 64 contiguous
    outputs (the MMA tile's rows) for tile_n rows of D.
    """
    tile_m, tile_n, _ = tile
    mma_m = tile_m // (128 if schedule == "cooperative" else 64)
    if swap:
        boxes, box_bytes = mma_m, tile_n * 128
    else:
        width = next((w for w in (64, 32, 16) if tile_n % w == 0), 0)
        require(width > 0, "tile", "an unswapped tile_n must be a multiple of 16")
        boxes, box_bytes = mma_m * tile_n // width, 64 * width * ELEMENT_BYTES
    if chunks is None:
        # A 128 x 256 tile that staged D whole would cost a pipeline stage: it goes through half as many buffers.
        chunks = max(boxes // 2, 1) if tile_m * tile_n > 128 * 192 else boxes
    together = 1 if swap else min(64 // width, tile_n // width)  # boxes finished, and stored, as a group
    require(together <= chunks <= boxes, "epilogue_chunks", f"a consumer warpgroup has {boxes} boxes, {together} of them in use together")
    # The general epilogue passes 64 rows x up to 32 columns of fp32 through the same memory.
    general = 64 * (32 if tile_n >= 32 else 16 if tile_n >= 16 else 8) * 4
    bias = 4 * (64 * mma_m if swap else tile_n)  # fp32, of the tile's n
    return chunks, 2 * (-(-max(chunks * box_bytes, general) // 1024) * 1024 + bias)


def smem_sm90(tile: tuple[int, ...], staging_bytes: int, stages: int) -> int:
    bytes_used = stages * stage_bytes(tile) + staging_bytes + SM90_BARRIER_BYTES
    return -(-bytes_used // SM90_SMEM_ALIGNMENT) * SM90_SMEM_ALIGNMENT


def stages_sm90(tile: tuple[int, ...], staging_bytes: int, stages: int | None, require) -> int:
    """The deepest pipeline that fits beside the staging buffers, or the row's own after a check."""
    fits = (SM90_SMEM_LIMIT - smem_sm90(tile, staging_bytes, 0)) // stage_bytes(tile)
    field = "tile" if stages is None else "stages"
    sizes = f"{stage_bytes(tile)} bytes each beside {staging_bytes} of output staging"
    require(fits >= MIN_STAGES_SM90, field, f"{fits} stages of {sizes} fit {SM90_SMEM_LIMIT} bytes, at least {MIN_STAGES_SM90} are needed")
    if stages is None:
        return min(fits, MAX_STAGES_SM90)
    require(MIN_STAGES_SM90 <= stages <= min(fits, MAX_STAGES_SM90), "stages", f"{min(fits, MAX_STAGES_SM90)} stages of {sizes} fit")
    return stages


def check_sm80(row: dict, tile: tuple[int, ...], warps: tuple[int, ...], stages: int | None, require) -> None:
    tile_m, tile_n, tile_k = tile
    require(row.get("schedule") == "multistage", "schedule", "sm80 has multistage")
    require(stages is not None and stages >= 2, "stages", "must be given, 2 or more")
    require(warps[0] * warps[1] <= 8, "warps", "at most 8 warps")
    rule = "must split over the warps into multiples of the 16 x 8 x 16 MMA"
    require(tile_m % (16 * warps[0]) == 0 and tile_n % (8 * warps[1]) == 0 and tile_k % 16 == 0, "tile", rule)
    accumulators = tile_m * tile_n // (32 * warps[0] * warps[1])
    rule = f"{accumulators} accumulators per thread spill, the limit is {MAX_ACCUMULATORS}"
    require(accumulators <= MAX_ACCUMULATORS, "tile", rule)


def definition(kernel: Kernel) -> str:
    """The struct and the launch function of one kernel."""
    lines = [
        f"static constexpr DataType kType = {ELEMENTS[kernel.element]};",
        f"static constexpr Major kMajorA = {MAJORS[kernel.a_major]};",
        f"static constexpr Major kMajorB = {MAJORS[kernel.b_major]};",
        f"static constexpr bool kSwap = {cpp_bool(kernel.swap)};",
        "static constexpr int kTileM = {}, kTileN = {}, kTileK = {};".format(*kernel.tile),
        f"static constexpr int kClusterM = {kernel.cluster[0]}, kClusterN = {kernel.cluster[1]};",
        f"static constexpr Schedule kSchedule = {SCHEDULES[kernel.schedule]};",
        f"static constexpr int kStages = {kernel.stages};",
        f"static constexpr int kThreads = {kernel.threads};",
        f"static constexpr int kSmemBytes = {kernel.smem_bytes};",
        f"static constexpr int kCtasPerSm = {kernel.ctas_per_sm};",
        f"static constexpr WeightFormat kFormat = {FORMATS[kernel.b_format]};",
    ]
    if kernel.arch == 90:
        lines.append(f"static constexpr int kEpilogueChunks = {kernel.epilogue_chunks};")
    else:
        lines.append(f"static constexpr int kWarpsM = {kernel.warps[0]}, kWarpsN = {kernel.warps[1]};")
        lines.append(f"static constexpr bool kUnaligned = {cpp_bool(kernel.unaligned)};")
    return struct(kernel, lines, TEMPLATES[kernel.arch][1])


def struct(kernel: Kernel, lines: list[str], template: str, arguments: str = ARGUMENTS) -> str:
    """A kernel's struct of constants, and its launch function, which instantiates ``template`` with it."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"struct {kernel.name} {{\n{body}\n}};\n"
        f"Status launch_{kernel.name}({arguments} const& arguments) {{\n"
        f"  return {template}<{kernel.name}>(arguments);\n}}\n"
    )
