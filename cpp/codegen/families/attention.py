"""The attention family: which rows of attention.toml are legal, the shared memory they need, the struct a shard instantiates.

The kernels' tile is [queries, keys, head_dim]; of decode kernels: rows of a unit at most, keys of a slice, head_dim.
"""

from __future__ import annotations

from codegen.families import attention_sm80, gemm
from codegen.kernel import (
    BITS,
    ELEMENTS,
    FORMATS,
    ConfigError,
    Kernel,
    cpp_bool,
)

TEMPLATES = {
    (variant, arch): (f"attention/{variant}/{variant}_sm{arch}.cuh", f"launch_{variant}_sm{arch}")
    for variant in ("prefill", "decode")
    for arch in (90, 80)
}
LAUNCH_HEADER = "attention/shared/launch.h"
ARGUMENTS = "attention::AttentionLaunchArguments"

TABLE_BYTES = 3072  # what the tile table and barriers need: tile_scheduler.cuh, prefill_traits.cuh
REGISTERS = {1: 240, 2: 232, 3: 160}  # of a consumer thread, at least, by warpgroups: prefill_traits.cuh
CODES_REGISTERS = {128: 192, 256: 208}  # beside a converter, by head_dim
SPARE_REGISTERS = 24  # beside scores, probabilities and output
FIELDS = {
    "prefill": {"arch", "elements", "variant", "head_dim", "head_dim_v", "tile", "schedule", "stages", "own_output", "codes", "note"},
    "decode": {"arch", "elements", "variant", "head_dim", "caches", "slices", "note"},
}
CACHES = ("dense", "fp8_e4m3", "int8", "int4")
DECODE_WARPS, DECODE_THREADS, DECODE_MAX_STAGES = 8, 384, 32


def _check_caches(row: dict, require) -> None:
    caches = row.get("caches")
    ok = isinstance(caches, list) and caches and all(c in CACHES for c in caches) and len(set(caches)) == len(caches)
    require(ok, "caches", f"must be a list of different values from {', '.join(CACHES)}")
    slices, head_dim = row.get("slices"), row["head_dim"]
    at_once = 32 if head_dim <= 128 and row["arch"] == "sm90" else 16
    ok = isinstance(slices, list) and len(slices) == len(caches) and all(type(s) is int and s % at_once == 0 and s <= 64 for s in slices)
    require(ok, "slices", f"must be keys for each cache, a multiple of the {at_once} that are in registers at a time up to 64")


def _decode(row: dict, shared: dict) -> list[Kernel]:
    kernels, head_dim = [], row["head_dim"]
    for cache, tokens in zip(row["caches"], row["slices"], strict=True):
        rows = 16 if head_dim <= 128 and cache != "int4" else 8  # more would be spilled
        # Queries of two pieces, outputs and states of the warps, the table of sequences: decode_sm90.cuh's SharedStorage.
        fixed = 2 * (2 * rows * head_dim + 4 * rows + 64) + DECODE_WARPS * (32 * (min(head_dim, 128) + 4) + 8 * rows) + TABLE_BYTES
        codes = 2 * tokens * head_dim * BITS.get(cache, 16) // 8
        scales = attention_sm80.scale_bytes(cache, tokens, head_dim)
        stages = min((gemm.SM90_SMEM_LIMIT - fixed) // (codes + scales + 16), DECODE_MAX_STAGES)
        smem = fixed + stages * (codes + scales + 16)
        smem = min(-(-smem // gemm.SM90_SMEM_ALIGNMENT) * gemm.SM90_SMEM_ALIGNMENT, gemm.SM90_SMEM_LIMIT)
        geometry = dict(tile=(rows, tokens, head_dim), schedule="split_kv", stages=stages, threads=DECODE_THREADS, smem_bytes=smem)
        kernels += [Kernel(element=e, b_format=cache, head_dim_v=head_dim, **shared, **geometry) for e in row["elements"]]
    return kernels


def expand(row: dict, where: str) -> list[Kernel]:
    """One table row -> its kernels, elements outermost. `where` is how errors name the row."""

    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{where}, {field} = {row.get(field)!r}: {rule}")

    arch = row.get("arch")
    require(arch in ("sm90", "sm80"), "arch", "must be sm90 or sm80")
    variant = row.get("variant")
    require(variant in FIELDS, "variant", f"must be one of {', '.join(FIELDS)}")
    fields = FIELDS[variant] if arch == "sm90" else attention_sm80.FIELDS[variant]
    for field in row:
        require(field in fields, field, f"no such field for {variant} on {arch}; known: {', '.join(sorted(fields))}")
    elements = row.get("elements")
    ok = isinstance(elements, list) and elements and all(e in ELEMENTS for e in elements) and len(set(elements)) == len(elements)
    require(ok, "elements", f"must be a list of different values from {', '.join(ELEMENTS)}")
    head_dim = row.get("head_dim")
    head_dim_v = row.get("head_dim_v", head_dim)
    for field, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        require(type(value) is int and 0 < value <= 256 and value % 64 == 0, field, "must be 64, 128, 192 or 256: whole 128-byte rows")
    require(head_dim_v <= head_dim, "head_dim_v", "must be at most head_dim")
    note = row.get("note", "")
    require(isinstance(note, str), "note", "must be a string")
    shared = dict(
        family="attention", arch=int(arch[2:]), layout="tn", cluster=(1, 1, 1), swap=False, unaligned=False, epilogue_chunks=0, warps=(0, 0)
    )
    shared |= dict(note=note, variant=variant)
    if variant == "decode":
        _check_caches(row, require)
        return attention_sm80.decode(row, require, shared) if arch == "sm80" else _decode(row, shared)
    if arch == "sm80":
        return attention_sm80.prefill(row, require, shared)
    tile = row.get("tile")
    ok = isinstance(tile, list) and len(tile) == 2 and all(type(v) is int and v > 0 for v in tile)
    require(ok, "tile", "must be 2 positive integers")
    tile_m, tile_n = tile
    warpgroups = tile_m // 64
    require(tile_m % 64 == 0 and warpgroups in REGISTERS, "tile", "must have 64, 128 or 192 queries: a warpgroup has 64")
    require(tile_n % 16 == 0 and tile_n <= 256, "tile", "keys must be a multiple of 16 up to 256")
    codes = row.get("codes", False)
    require(type(codes) is bool, "codes", "must be true or false")
    # Of the converter: two consumer warpgroups leave it enough registers, each of its warps has 8, 16 or 32 rows of a block.
    ok = head_dim in CODES_REGISTERS and head_dim_v == head_dim and warpgroups == 2 and tile_n in (64, 128)
    require(not codes or ok, "codes", "is for equal head dimensions of 128 or 256 and tiles of 128 queries and 64 or 128 keys")
    # Scores and output in fp32, probabilities in 16 bits.
    used = tile_n // 2 + tile_n // 4 + head_dim_v // 2
    limit = (CODES_REGISTERS[head_dim] if codes else REGISTERS[warpgroups]) - SPARE_REGISTERS
    require(used <= limit, "tile", f"scores, probabilities and output take {used} registers of a thread, the limit is {limit}")
    schedule = row.get("schedule")
    require(schedule in ("cooperative", "pingpong"), "schedule", "sm90 has cooperative and pingpong")
    require(schedule != "pingpong" or warpgroups > 1, "schedule", "pingpong takes two warpgroups or three")
    stages = row.get("stages", 2)
    require(type(stages) is int and stages >= 2, "stages", "must be 2 or more")
    own_output = row.get("own_output", False)
    require(type(own_output) is bool, "own_output", "must be true or false")
    # With output of its own, queries have a second stage.
    smem = 2 * ((1 + own_output) * tile_m * head_dim + stages * tile_n * (head_dim + head_dim_v) + own_output * tile_m * head_dim_v)
    smem += TABLE_BYTES
    require(smem <= gemm.SM90_SMEM_LIMIT, "tile", f"takes {smem} bytes of shared memory, the limit is {gemm.SM90_SMEM_LIMIT}")
    smem = min(-(-smem // gemm.SM90_SMEM_ALIGNMENT) * gemm.SM90_SMEM_ALIGNMENT, gemm.SM90_SMEM_LIMIT)

    shared |= dict(tile=(tile_m, tile_n, head_dim), schedule=schedule, stages=stages, threads=128 * (warpgroups + 1), smem_bytes=smem)
    shared |= dict(head_dim_v=head_dim_v, own_output=own_output, b_format="codes" if codes else "dense")
    return [Kernel(element=element, **shared) for element in elements]


def definition(kernel: Kernel) -> str:
    """The struct and the launch function of one kernel."""
    if kernel.variant == "decode":
        lines = [
            f"static constexpr DataType kType = {ELEMENTS[kernel.element]};",
            f"static constexpr WeightFormat kFormat = {FORMATS[kernel.b_format]};",
            f"static constexpr int kRows = {kernel.tile[0]}, kSlice = {kernel.tile[1]}, kHeadDim = {kernel.tile[2]};",
            f"static constexpr int kStages = {kernel.stages};",
            f"static constexpr int kSmemBytes = {kernel.smem_bytes};",
        ]
        if kernel.arch == 80:
            lines.append(f"static constexpr int kThreads = {kernel.threads}, kCtasPerSm = {kernel.ctas_per_sm};")
        return gemm.struct(kernel, lines, TEMPLATES[kernel.variant, kernel.arch][1], ARGUMENTS)
    lines = [
        f"static constexpr DataType kType = {ELEMENTS[kernel.element]};",
        f"static constexpr int kTileM = {kernel.tile[0]}, kTileN = {kernel.tile[1]};",
        f"static constexpr int kHeadDim = {kernel.tile[2]}, kHeadDimV = {kernel.head_dim_v};",
        f"static constexpr int kStages = {kernel.stages};",
        f"static constexpr int kSmemBytes = {kernel.smem_bytes};",
    ]
    if kernel.arch == 80:
        lines.append(f"static constexpr int kCtasPerSm = {kernel.ctas_per_sm};")
        return gemm.struct(kernel, lines, TEMPLATES[kernel.variant, kernel.arch][1], ARGUMENTS)
    lines += [
        f"static constexpr bool kPingpong = {cpp_bool(kernel.schedule == 'pingpong')};",
        f"static constexpr bool kOwnOutput = {cpp_bool(kernel.own_output)};",
        f"static constexpr bool kConverts = {cpp_bool(kernel.b_format == 'codes')};",
    ]
    return gemm.struct(kernel, lines, TEMPLATES[kernel.variant, kernel.arch][1], ARGUMENTS)
