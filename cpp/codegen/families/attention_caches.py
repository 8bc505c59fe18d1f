"""What decode kernels of every architecture ask of a row, and need for a slice of a cache."""

from __future__ import annotations

from codegen.formats import project_formats
from codegen.row import Row


def formats_of(row: Row) -> list[str]:
    """The caches of a row: a kernel for each."""
    return row.names("caches", [cache.format for cache in project_formats().caches.values()])


def slices_of(row: Row, caches: list[str], at_once: int) -> list[int]:
    """Keys of a slice, for each cache."""
    rule = f"must be keys for each cache, a multiple of the {at_once} that are in registers at a time up to 64"
    return row.integers_for_each("slices", len(caches), lambda keys: keys % at_once == 0 and keys <= 64, rule)


def rows_of(cache: str, head_dim: int) -> int:
    """Rows of queries that a warp takes; more would be spilled."""
    return 16 if head_dim <= 128 and cache != "int4" else 8


def code_bytes(cache: str, tokens: int, head_dim: int) -> int:
    """Of a slice's keys and values."""
    return 2 * tokens * head_dim * project_formats().formats[cache].bits // 8


def scale_bytes(cache: str, tokens: int, head_dim: int) -> int:
    """Of a slice: decode/traits.cuh's kScaleBytes."""
    if cache == "int8":
        return 8 * tokens
    return max(tokens // 32, 1) * 4 * head_dim + head_dim // 8 * tokens if cache == "int4" else 16
