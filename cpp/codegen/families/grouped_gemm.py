"""The grouped (mixture of experts) family: which rows of moe.toml are legal, the shared memory they need, the struct a shard instantiates.

The kernels' tile is [rows of the weight, most tokens, k]: the operands are swapped.
"""

from __future__ import annotations

from codegen.families import gemm
from codegen.kernel import ELEMENTS, SCHEDULES, ConfigError, Kernel

TEMPLATES = {90: ("moe/grouped/grouped_sm90.cuh", "launch_grouped_sm90"), 80: ("moe/grouped/grouped_sm80.cuh", "launch_grouped_sm80")}
LAUNCH_HEADER = "moe/grouped/launch.h"
ARGUMENTS = "moe::GroupedLaunchArguments"

SMEM_LIMIT = {1: gemm.SM90_SMEM_LIMIT, 2: 115712}  # 113 KiB: two CTAs and the 1 KiB that the system takes for each share 228
TILES_BYTES = 8192  # what experts and barriers need: expert_tiles.cuh, 512 experts
MAX_ACCUMULATORS = 128
COMMON_FIELDS = {"arch", "elements", "tile", "schedule", "stages", "ctas_per_sm", "note"}
FIELDS = {"sm90": COMMON_FIELDS | {"consumers"}, "sm80": COMMON_FIELDS}


def expand(row: dict, where: str) -> list[Kernel]:
    """One table row -> its kernels, elements outermost. `where` is how errors name the row."""

    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{where}, {field} = {row.get(field)!r}: {rule}")

    def integer(field: str, allowed: tuple[int, ...], default: int) -> int:
        value = row.get(field, default)
        require(type(value) is int and value in allowed, field, f"must be one of {', '.join(map(str, allowed))}")
        return value

    arch = row.get("arch")
    require(arch in FIELDS, "arch", f"must be one of {', '.join(FIELDS)}")
    for field in row:
        require(field in FIELDS[arch], field, f"no such field for {arch}; known: {', '.join(sorted(FIELDS[arch]))}")
    elements = row.get("elements")
    ok = isinstance(elements, list) and elements and all(e in ELEMENTS for e in elements) and len(set(elements)) == len(elements)
    require(ok, "elements", f"must be a list of different values from {', '.join(ELEMENTS)}")
    tile = row.get("tile")
    require(
        isinstance(tile, list) and len(tile) == 3 and all(type(v) is int and v > 0 for v in tile), "tile", "must be 3 positive integers"
    )
    note = row.get("note", "")
    require(isinstance(note, str), "note", "must be a string")
    ctas_per_sm = integer("ctas_per_sm", (1, 2), 1)
    tile_m, tile_n, tile_k = tile
    stage = (tile_m + tile_n) * tile_k * 2
    chunk = min(tile_n, 32)  # tokens that are staged together

    if arch == "sm90":
        schedule = row.get("schedule")
        require(schedule in ("cooperative", "pingpong"), "schedule", "sm90 has cooperative and pingpong")
        consumers = integer("consumers", (1, 2), 2)
        require(schedule == "cooperative" or consumers == 2, "consumers", "pingpong takes two")
        group_m = tile_m if schedule == "pingpong" else tile_m // consumers
        require(
            tile_m % (64 if schedule == "pingpong" else 64 * consumers) == 0, "tile", "tile_m must be a multiple of 64 rows a warpgroup"
        )
        require(tile_k % 64 == 0, "tile", "tile_k must fill whole 128-byte swizzle rows: a multiple of 64")
        box = 64 if tile_n >= 64 else 8
        require(tile_n % box == 0 and tile_n <= 256, "tile", "tile_n must be a multiple of 8 up to 56, or of 64 up to 256")
        accumulators = group_m * tile_n // 128
        rule = f"{accumulators} accumulators per consumer thread spill, the limit is {MAX_ACCUMULATORS}"
        require(accumulators <= MAX_ACCUMULATORS, "tile", rule)
        staged = consumers * -(-chunk * group_m * 2 // 1024) * 1024
        fixed, limit = staged + TILES_BYTES, SMEM_LIMIT[ctas_per_sm]
        fits = min((limit - fixed) // stage, gemm.MAX_STAGES_SM90)
        stages = row.get("stages", fits)
        ok = type(stages) is int and gemm.MIN_STAGES_SM90 <= stages <= fits
        require(ok, "stages", f"{fits} stages of {stage} bytes fit, {gemm.MIN_STAGES_SM90} are needed")
        smem = -(-(stages * stage + fixed) // gemm.SM90_SMEM_ALIGNMENT) * gemm.SM90_SMEM_ALIGNMENT
        fields = dict(arch=90, threads=128 * (consumers + 1), smem_bytes=min(smem, limit), warps=(0, 0), swap=True)
    else:
        schedule = row.get("schedule")
        require(schedule == "multistage", "schedule", "sm80 has multistage")
        require(tile_m % 64 == 0 and tile_n % 16 == 0 and tile_k == 64, "tile", "must be [multiple of 64, multiple of 16, 64]")
        accumulators = tile_m * tile_n // 128
        require(
            accumulators <= 64, "tile", f"{accumulators} accumulators per thread leave too few registers for the fragments, the limit is 64"
        )
        stages = row.get("stages")
        require(type(stages) is int and stages >= 2, "stages", "must be given, 2 or more")
        smem = stages * stage + chunk * tile_m * 2 + TILES_BYTES
        limit = gemm.SM80_SMEM_LIMIT // ctas_per_sm
        require(smem <= limit, "stages", f"{stages} stages need {smem} bytes of shared memory, the limit is {limit}")
        fields = dict(arch=80, threads=128, smem_bytes=smem, warps=(4, 1), swap=True)

    shared = dict(family="moe", layout="tn", tile=tuple(tile), cluster=(1, 1, 1), schedule=schedule, unaligned=False, stages=stages)
    shared |= dict(epilogue_chunks=0, note=note, ctas_per_sm=ctas_per_sm, **fields)
    return [Kernel(element=element, **shared) for element in elements]


def definition(kernel: Kernel) -> str:
    """The struct and the launch function of one kernel."""
    lines = [
        f"static constexpr DataType kType = {ELEMENTS[kernel.element]};",
        "static constexpr int kTileM = {}, kTileN = {}, kTileK = {};".format(*kernel.tile),
        f"static constexpr Schedule kSchedule = {SCHEDULES[kernel.schedule]};",
        f"static constexpr int kStages = {kernel.stages};",
        f"static constexpr int kThreads = {kernel.threads};",
        f"static constexpr int kSmemBytes = {kernel.smem_bytes};",
        f"static constexpr int kCtasPerSm = {kernel.ctas_per_sm};",
    ]
    return gemm.struct(kernel, lines, TEMPLATES[kernel.arch][1], ARGUMENTS)
