"""The portable attention kernels, sm_80 onward: which rows of attention.toml are legal and the shared memory they need.

They fit into 99 KiB, what a block of 8.6, 8.9 and 12.0 may have, and twice on an SM of 8.0 where that leaves them two stages.
"""

from __future__ import annotations

from codegen.families import gemm
from codegen.kernel import BITS, Kernel

FIELDS = {
    "prefill": {"arch", "elements", "variant", "head_dim", "tile", "note"},
    "decode": {"arch", "elements", "variant", "head_dim", "caches", "slices", "warps", "note"},
}
TWO_CTAS_SMEM = (164 - 2) * 1024 // 2  # 8.0 has 164 KiB an SM, of which each block costs 1 KiB more than it has
TABLE_BYTES = 2304  # the table of sequences, 2180 bytes, and what alignment costs
DECODE_MERGED = 64  # elements of head_dim of the warps' parts that are merged at a time: decode_sm80.cuh
DECODE_MAX_STAGES = 8
PREFILL_STAGES = 2


def decode(row: dict, require, shared: dict) -> list[Kernel]:
    """Rows of caches, slices and warps, which attention.py has checked but for the warps."""
    caches, head_dim, warps = row["caches"], row["head_dim"], row.get("warps")
    ok = isinstance(warps, list) and len(warps) == len(caches) and all(type(w) is int and w in (1, 2, 4) for w in warps)
    require(ok, "warps", "must be 1, 2 or 4 for each cache")
    kernels = []
    for cache, tokens, count in zip(caches, row["slices"], warps, strict=True):
        rows = 16 if head_dim <= 128 and cache != "int4" else 8  # as on sm90
        merge = count * (32 * (min(head_dim, DECODE_MERGED) + 4) + 8 * rows)
        fixed = merge + 2 * rows * head_dim + 4 * rows + 64 + TABLE_BYTES
        codes = 2 * tokens * head_dim * BITS.get(cache, 16) // 8
        stage = count * (codes + scale_bytes(cache, tokens, head_dim))
        limit = TWO_CTAS_SMEM if fixed + 2 * stage <= TWO_CTAS_SMEM else gemm.SM80_SMEM_LIMIT
        stages = min((limit - fixed) // stage, DECODE_MAX_STAGES)
        require(stages >= 2, "slices", f"{tokens} keys of {cache} leave {stages} stages in {gemm.SM80_SMEM_LIMIT} bytes of shared memory")
        smem = fixed + stages * stage
        geometry = dict(tile=(rows, tokens, head_dim), schedule="split_kv", stages=stages, threads=32 * count, smem_bytes=smem)
        geometry |= dict(ctas_per_sm=2 if smem <= TWO_CTAS_SMEM else 1)
        kernels += [Kernel(element=e, b_format=cache, head_dim_v=head_dim, **shared, **geometry) for e in row["elements"]]
    return kernels


def scale_bytes(cache: str, tokens: int, head_dim: int) -> int:
    """Of a slice: decode_traits.cuh's kScaleBytes."""
    if cache == "int8":
        return 8 * tokens
    return max(tokens // 32, 1) * 4 * head_dim + head_dim // 8 * tokens if cache == "int4" else 16


def prefill(row: dict, require, shared: dict) -> list[Kernel]:
    head_dim, tile = row["head_dim"], row.get("tile")
    ok = isinstance(tile, list) and len(tile) == 2 and all(type(v) is int and v > 0 for v in tile)
    require(ok and tile[0] in (64, 128) and tile[1] in (32, 64, 128), "tile", "must be 64 or 128 queries and 32, 64 or 128 keys")
    tile_m, tile_n = tile
    smem = 2 * head_dim * (tile_m + 2 * PREFILL_STAGES * tile_n) + TABLE_BYTES
    require(smem <= gemm.SM80_SMEM_LIMIT, "tile", f"takes {smem} bytes of shared memory, the limit is {gemm.SM80_SMEM_LIMIT}")
    geometry = dict(tile=(tile_m, tile_n, head_dim), schedule="multistage", stages=PREFILL_STAGES, threads=2 * tile_m, smem_bytes=smem)
    return [Kernel(element=e, head_dim_v=head_dim, **shared, **geometry) for e in row["elements"]]
