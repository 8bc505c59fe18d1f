"""The attention family: which rows of attention.toml are legal, the shared memory they need, the struct a shard instantiates.

The kernels' tile is [queries, keys, head_dim].
"""

from __future__ import annotations

from codegen import gemm
from codegen.kernel import ELEMENTS, ConfigError, Kernel, cpp_bool

TEMPLATES = {90: ("attention/prefill_sm90.cuh", "launch_prefill_sm90")}
LAUNCH_HEADER = "attention/launch.h"
ARGUMENTS = "attention::AttentionLaunchArguments"

TABLE_BYTES = 3072  # what the tile table and barriers need: tile_scheduler.cuh, prefill_sm90.cuh
REGISTERS = {1: 240, 2: 240, 3: 160}  # of a consumer thread, by warpgroups
SPARE_REGISTERS = 24  # beside scores, probabilities and output
FIELDS = {"sm90": {"arch", "elements", "variant", "head_dim", "head_dim_v", "tile", "schedule", "stages", "own_output", "note"}}


def expand(row: dict, where: str) -> list[Kernel]:
    """One table row -> its kernels, elements outermost. `where` is how errors name the row."""

    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{where}, {field} = {row.get(field)!r}: {rule}")

    arch = row.get("arch")
    require(arch in FIELDS, "arch", f"must be one of {', '.join(FIELDS)}")
    for field in row:
        require(field in FIELDS[arch], field, f"no such field for {arch}; known: {', '.join(sorted(FIELDS[arch]))}")
    elements = row.get("elements")
    ok = isinstance(elements, list) and elements and all(e in ELEMENTS for e in elements) and len(set(elements)) == len(elements)
    require(ok, "elements", f"must be a list of different values from {', '.join(ELEMENTS)}")
    require(row.get("variant") == "prefill", "variant", "must be prefill")
    head_dim = row.get("head_dim")
    head_dim_v = row.get("head_dim_v", head_dim)
    for field, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        require(type(value) is int and 0 < value <= 256 and value % 64 == 0, field, "must be 64, 128, 192 or 256: whole 128-byte rows")
    require(head_dim_v <= head_dim, "head_dim_v", "must be at most head_dim")
    tile = row.get("tile")
    ok = isinstance(tile, list) and len(tile) == 2 and all(type(v) is int and v > 0 for v in tile)
    require(ok, "tile", "must be 2 positive integers")
    tile_m, tile_n = tile
    warpgroups = tile_m // 64
    require(tile_m % 64 == 0 and warpgroups in REGISTERS, "tile", "must have 64, 128 or 192 queries: a warpgroup has 64")
    require(tile_n % 16 == 0 and tile_n <= 256, "tile", "keys must be a multiple of 16 up to 256")
    # Scores and output in fp32, probabilities in 16 bits.
    used = tile_n // 2 + tile_n // 4 + head_dim_v // 2
    limit = REGISTERS[warpgroups] - SPARE_REGISTERS
    require(used <= limit, "tile", f"scores, probabilities and output take {used} registers of a thread, the limit is {limit}")
    schedule = row.get("schedule")
    require(schedule in ("cooperative", "pingpong"), "schedule", "sm90 has cooperative and pingpong")
    require(schedule != "pingpong" or warpgroups > 1, "schedule", "pingpong takes two warpgroups or three")
    stages = row.get("stages", 2)
    require(type(stages) is int and stages >= 2, "stages", "must be 2 or more")
    own_output = row.get("own_output", False)
    require(type(own_output) is bool, "own_output", "must be true or false")
    note = row.get("note", "")
    require(isinstance(note, str), "note", "must be a string")
    smem = 2 * (tile_m * head_dim + stages * tile_n * (head_dim + head_dim_v) + own_output * tile_m * head_dim_v) + TABLE_BYTES
    require(smem <= gemm.SM90_SMEM_LIMIT, "tile", f"takes {smem} bytes of shared memory, the limit is {gemm.SM90_SMEM_LIMIT}")
    smem = min(-(-smem // gemm.SM90_SMEM_ALIGNMENT) * gemm.SM90_SMEM_ALIGNMENT, gemm.SM90_SMEM_LIMIT)

    shared = dict(family="attention", arch=90, layout="tn", tile=(tile_m, tile_n, head_dim), cluster=(1, 1, 1), schedule=schedule)
    shared |= dict(swap=False, unaligned=False, stages=stages, epilogue_chunks=0, warps=(0, 0), threads=128 * (warpgroups + 1))
    shared |= dict(smem_bytes=smem, note=note, variant=row["variant"], head_dim_v=head_dim_v, own_output=own_output)
    return [Kernel(element=element, **shared) for element in elements]


def definition(kernel: Kernel) -> str:
    """The struct and the launch function of one kernel."""
    lines = [
        f"static constexpr DataType kType = {ELEMENTS[kernel.element]};",
        f"static constexpr int kTileM = {kernel.tile[0]}, kTileN = {kernel.tile[1]};",
        f"static constexpr int kHeadDim = {kernel.tile[2]}, kHeadDimV = {kernel.head_dim_v};",
        f"static constexpr int kStages = {kernel.stages};",
        f"static constexpr int kSmemBytes = {kernel.smem_bytes};",
        f"static constexpr bool kPingpong = {cpp_bool(kernel.schedule == 'pingpong')};",
        f"static constexpr bool kOwnOutput = {cpp_bool(kernel.own_output)};",
    ]
    return gemm.struct(kernel, lines, TEMPLATES[kernel.arch][1], ARGUMENTS)
