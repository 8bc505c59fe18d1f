"""The attention kernels for sm_90a: which rows of attention.toml are legal and the shared memory they need."""

from __future__ import annotations

from codegen.families import attention_caches
from codegen.hardware import SM90_SMEM_ALIGNMENT, SM90_SMEM_LIMIT, round_up
from codegen.row import Row

FIELDS = {
    "prefill": {
        "arch",
        "elements",
        "variant",
        "head_dim",
        "head_dim_v",
        "tile",
        "schedule",
        "stages",
        "own_output",
        "cache",
        "invariant",
        "divides",
        "ctas_per_sm",
        "note",
    },
    "decode": {"arch", "elements", "variant", "head_dim", "caches", "slices", "note"},
}
TABLE_BYTES = 3072  # what the tile table and barriers need: tile_scheduler.cuh, prefill_traits.cuh
REGISTERS = {1: 240, 2: 232, 3: 160}  # of a consumer thread, at least, by warpgroups: prefill_traits.cuh
CODES_REGISTERS = {128: 192, 256: 208}  # beside a converter, by head_dim
FEW_ROWS = 8  # of a tile whose rows are the MMA's n
SPLIT_KEYS = 512  # at least, in the batch-invariant mode: shared/splits.h
SPARE_REGISTERS = 24  # beside scores, probabilities and output
DECODE_WARPS, DECODE_THREADS, DECODE_MAX_STAGES = 8, 384, 32


def cache_of(row: Row, *more: str) -> str:
    """What a prefill kernel has of keys and values."""
    cache, known = row.get("cache", "dense"), ("codes", "int8", *more)
    row.require(cache in ("dense", *known), "cache", f"must be {' or '.join(known)}, or not there: numbers of 16 bits")
    return cache


def decode(row: Row) -> list[dict]:
    """The fields of each cache's kernel."""
    head_dim, caches = row.get("head_dim"), attention_caches.formats_of(row)
    kernels = []
    for cache, tokens in zip(caches, attention_caches.slices_of(row, caches, 32 if head_dim <= 128 else 16), strict=True):
        rows = attention_caches.rows_of(cache, head_dim)
        # Queries of two pieces, outputs and states of the warps, the table of sequences: decode_sm90.cuh's SharedStorage.
        fixed = 2 * (2 * rows * head_dim + 4 * rows + 64) + DECODE_WARPS * (32 * (min(head_dim, 128) + 4) + 8 * rows) + TABLE_BYTES
        slice_bytes = attention_caches.code_bytes(cache, tokens, head_dim) + attention_caches.scale_bytes(cache, tokens, head_dim) + 16
        stages = min((SM90_SMEM_LIMIT - fixed) // slice_bytes, DECODE_MAX_STAGES)
        smem = min(round_up(fixed + stages * slice_bytes, SM90_SMEM_ALIGNMENT), SM90_SMEM_LIMIT)
        fields = dict(tile=(rows, tokens, head_dim), b_format=cache, schedule="split_kv", stages=stages)
        kernels.append(fields | dict(threads=DECODE_THREADS, smem_bytes=smem))
    return kernels


def few_rows(row: Row) -> list[dict]:
    """The fields of a kernel whose rows are the MMA's n (few_rows_sm90.cuh)."""
    head_dim, cache, stages = row.get("head_dim"), cache_of(row, "fp8_e4m3", "int4"), row.get("stages")
    codes = cache != "dense"
    row.require(cache != "codes", "cache", "of codes is for tiles of 64 queries and more")
    _, tile_n = row.integers("tile", 2)
    blocks = -(-SPLIT_KEYS // tile_n)
    row.require(row.flag("invariant") and row.get("schedule") == "cooperative", "tile", "of 8 queries is batch-invariant and cooperative")
    row.require(head_dim <= 128 and row.get("head_dim_v", head_dim) == head_dim, "head_dim", "must be that of the values, up to 128")
    row.require(tile_n % 16 == 0 and blocks <= 8, "tile", "keys: a multiple of 16; a split has 8 blocks at most, one for each warp")
    row.require(not codes or (head_dim == 128 and tile_n == 128), "cache", "of codes is for 128 keys of 128 columns here")
    row.require(type(stages) is int and stages >= 2, "stages", "must be 2 or more")
    row.require(not row.flag("own_output"), "own_output", "is for tiles of 64 queries and more")
    warps = 4 if blocks * (2 if codes else 1) <= 4 else 8
    # Queries of two stages, the ring with scales, probabilities, what the softmax of a row leaves.
    smem = 2 * (2 * FEW_ROWS * head_dim + FEW_ROWS * blocks * tile_n)
    smem += stages * tile_n * (attention_caches.code_bytes(cache, 1, head_dim) // 2 + {"int8": 4, "int4": 16}.get(cache, 0))
    smem += 4 * FEW_ROWS * (15 * blocks + 1) + TABLE_BYTES
    ctas = row.get("ctas_per_sm", 2)
    row.require(ctas * (round_up(smem, SM90_SMEM_ALIGNMENT) + 1024) <= SM90_SMEM_LIMIT + 1024, "stages", f"{ctas} CTAs do not fit an SM")
    fields = dict(tile=(FEW_ROWS, tile_n, head_dim), b_format=cache, schedule="cooperative", stages=stages)
    fields |= dict(threads=32 * (warps + 1), ctas_per_sm=ctas, invariant=True)
    return [fields | dict(smem_bytes=round_up(smem, SM90_SMEM_ALIGNMENT))]


def prefill(row: Row) -> list[dict]:
    """The fields of the kernel."""
    head_dim = row.get("head_dim")
    head_dim_v = row.get("head_dim_v", head_dim)
    tile_m, tile_n = row.integers("tile", 2)
    if tile_m == FEW_ROWS:
        return few_rows(row)
    row.require(row.get("ctas_per_sm", 1) == 1, "ctas_per_sm", "is for tiles of 8 queries")
    warpgroups = tile_m // 64
    row.require(tile_m % 64 == 0 and warpgroups in REGISTERS, "tile", "must have 64, 128 or 192 queries: a warpgroup has 64")
    row.require(tile_n % 16 == 0 and tile_n <= 256, "tile", "keys must be a multiple of 16 up to 256")
    cache = cache_of(row)
    codes = cache != "dense"
    # Of the converter: two consumer warpgroups leave it enough registers, each of its warps has 8, 16 or 32 rows of a block.
    good = head_dim in CODES_REGISTERS and head_dim_v == head_dim and warpgroups == 2 and tile_n in (64, 128)
    row.require(
        not codes or good, "cache", "of codes is for equal head dimensions of 128 or 256 and tiles of 128 queries and 64 or 128 keys"
    )
    # Scores and output in fp32, probabilities in 16 bits.
    used = tile_n // 2 + tile_n // 4 + head_dim_v // 2
    limit = (CODES_REGISTERS[head_dim] if codes else REGISTERS[warpgroups]) - SPARE_REGISTERS
    row.require(used <= limit, "tile", f"scores, probabilities and output take {used} registers of a thread, the limit is {limit}")
    schedule = row.get("schedule")
    row.require(schedule in ("cooperative", "pingpong"), "schedule", "sm90 has cooperative and pingpong")
    row.require(schedule != "pingpong" or warpgroups > 1, "schedule", "pingpong takes two warpgroups or three")
    stages = row.get("stages", 2)
    row.require(type(stages) is int and stages >= 2, "stages", "must be 2 or more")
    own_output = row.flag("own_output")
    # The running total of output and of the softmax over the splits of the keys: shared/splits.h. With longer rows it is in the workspace.
    invariant = row.flag("invariant")
    totals = tile_m * head_dim_v * 4 if invariant and head_dim <= 128 else 0
    # With output of its own, queries have a second stage.
    smem = 2 * ((1 + own_output) * tile_m * head_dim + stages * tile_n * (head_dim + head_dim_v) + own_output * tile_m * head_dim_v)
    smem += totals + TABLE_BYTES
    row.require(smem <= SM90_SMEM_LIMIT, "tile", f"takes {smem} bytes of shared memory, the limit is {SM90_SMEM_LIMIT}")
    smem = min(round_up(smem, SM90_SMEM_ALIGNMENT), SM90_SMEM_LIMIT)
    fields = dict(tile=(tile_m, tile_n, head_dim), b_format=cache, schedule=schedule, stages=stages)
    divides = row.flag("divides")
    row.require(not divides or (not invariant and head_dim <= 192), "divides", "is for head_dim up to 192 and no kernel of the mode")
    own = dict(own_output=own_output, invariant=invariant, divides=divides)
    return [fields | own | dict(threads=128 * (warpgroups + 1), smem_bytes=smem)]
