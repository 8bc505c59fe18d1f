"""The portable attention kernels, sm_80 onward: which rows of attention.toml are legal and the shared memory they need.

They fit into 99 KiB, what a block of 8.6, 8.9 and 12.0 may have, and twice on an SM of 8.0 where that leaves them two stages.
"""

from __future__ import annotations

from codegen.families import attention_caches
from codegen.hardware import SM80_SMEM_LIMIT
from codegen.row import Row

FIELDS = {
    "prefill": {"arch", "elements", "variant", "head_dim", "tile", "note"},
    "decode": {"arch", "elements", "variant", "head_dim", "caches", "slices", "warps", "note"},
}
TWO_CTAS_SMEM = (164 - 2) * 1024 // 2  # 8.0 has 164 KiB an SM, of which each block costs 1 KiB more than it has
TABLE_BYTES = 2304  # the table of sequences, 2180 bytes, and what alignment costs
DECODE_MERGED = 64  # elements of head_dim of the warps' parts that are merged at a time: decode_sm80.cuh
DECODE_MAX_STAGES = 8
PREFILL_STAGES = 2


def decode(row: Row) -> list[dict]:
    """The fields of each cache's kernel."""
    head_dim, caches = row.get("head_dim"), attention_caches.formats_of(row)
    slices = attention_caches.slices_of(row, caches, 16)
    warps = row.integers_for_each("warps", len(caches), lambda count: count in (1, 2, 4), "must be 1, 2 or 4 for each cache")
    kernels = []
    for cache, tokens, count in zip(caches, slices, warps, strict=True):
        rows = attention_caches.rows_of(cache, head_dim)
        merge = count * (32 * (min(head_dim, DECODE_MERGED) + 4) + 8 * rows)
        fixed = merge + 2 * rows * head_dim + 4 * rows + 64 + TABLE_BYTES
        slice_bytes = attention_caches.code_bytes(cache, tokens, head_dim) + attention_caches.scale_bytes(cache, tokens, head_dim)
        stage = count * slice_bytes
        limit = TWO_CTAS_SMEM if fixed + 2 * stage <= TWO_CTAS_SMEM else SM80_SMEM_LIMIT
        stages = min((limit - fixed) // stage, DECODE_MAX_STAGES)
        row.require(stages >= 2, "slices", f"{tokens} keys of {cache} leave {stages} stages in {SM80_SMEM_LIMIT} bytes of shared memory")
        smem = fixed + stages * stage
        fields = dict(tile=(rows, tokens, head_dim), b_format=cache, schedule="split_kv", stages=stages)
        kernels.append(fields | dict(threads=32 * count, smem_bytes=smem, ctas_per_sm=2 if smem <= TWO_CTAS_SMEM else 1))
    return kernels


def prefill(row: Row) -> list[dict]:
    """The fields of the kernel."""
    head_dim, (tile_m, tile_n) = row.get("head_dim"), row.integers("tile", 2)
    row.require(tile_m in (64, 128) and tile_n in (32, 64, 128), "tile", "must be 64 or 128 queries and 32, 64 or 128 keys")
    smem = 2 * head_dim * (tile_m + 2 * PREFILL_STAGES * tile_n) + TABLE_BYTES
    row.require(smem <= SM80_SMEM_LIMIT, "tile", f"takes {smem} bytes of shared memory, the limit is {SM80_SMEM_LIMIT}")
    return [dict(tile=(tile_m, tile_n, head_dim), schedule="multistage", stages=PREFILL_STAGES, threads=2 * tile_m, smem_bytes=smem)]
