"""The packed layout of 4-bit weights and what a code means; the Python twin of cpp/src/w4a16/w4_layout.h.

A weight [n, k] is cut in blocks of 64 x 64, both extents rounded up, and stored as int32 [ceil(n / 64), ceil(k / 64), 512]. Word
4 * t + s of a block belongs to thread t of 128 and k-slab s; nibble p of it is

    row     16 * (t // 32) + 8 * (p % 2) + (t % 32) // 4
    column  16 * s + 8 * (p // 2 % 2) + 2 * (t % 4) + p // 4

In mixed radix a row is (warp 4, half 2, lane 8) and a column (slab 4, eight 2, pair 4, odd 2): a block is the bytes
[warp, lane, pair, slab, odd, eight], a byte being the codes of half 0 and, four bits up, of half 1. Words are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BLOCK = 64
BLOCK_WORDS = BLOCK * BLOCK // 8
MULTIPLE = 8  # n and k: 16-byte rows of scales and of activations
MIN_GROUP = 32

_ROW = (4, 2, 8)  # warp, half, lane
_COLUMN = (4, 2, 4, 2)  # slab, eight, pair, odd


class W4Format(NamedTuple):
    """w = (decode(code) - zero) * scale."""

    decode: Callable[[torch.Tensor], torch.Tensor]  # uint8 codes -> float32 values
    zero: float  # where zeros is None


FORMATS = {"int4": W4Format(decode=lambda codes: codes.float(), zero=8.0)}


def blocks(extent: Any) -> Any:
    """Blocks along an extent, which may be symbolic."""
    return (extent + (BLOCK - 1)) // BLOCK


def packed_shape(n: Any, k: Any) -> tuple[Any, Any, int]:
    """qweight's shape for W [n, k]."""
    return blocks(n), blocks(k), BLOCK_WORDS


def groups(k: Any, group_size: int) -> Any:
    """Rows of scales: ceil(k / group_size), or 1 for group_size -1."""
    return 1 if group_size == -1 else (k + (group_size - 1)) // group_size


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [n, k], 0 to 15, of any strides -> int32 [ceil(n / 64), ceil(k / 64), 512]. Padding is 0."""
    n, k = codes.shape
    rows, columns = blocks(n), blocks(k)
    if n % BLOCK or k % BLOCK:
        codes = torch.nn.functional.pad(codes, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    halves = codes.view(rows, *_ROW, columns * BLOCK) if codes.is_contiguous() else codes.unflatten(0, (rows, *_ROW))
    pairs = halves[:, :, 1].bitwise_and(15).bitwise_left_shift_(4).bitwise_or_(halves[:, :, 0].bitwise_and(15))
    # [row block, warp, lane, column block, slab, eight, pair, odd] -> [row block, column block, warp, lane, pair, slab, odd, eight]
    packed = pairs.unflatten(3, (columns, *_COLUMN)).permute(0, 3, 1, 2, 6, 4, 7, 5).contiguous()
    return packed.view(rows, columns, 4 * BLOCK_WORDS).view(torch.int32)


def unpack(qweight: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of :func:`pack`: uint8 [n, k], a view where n or k are not multiples of 64."""
    rows, columns, _ = qweight.shape
    warp, half, lane = _ROW
    slab, eight, pair, odd = _COLUMN
    pairs = qweight.contiguous().view(torch.uint8).view(rows, columns, warp, lane, pair, slab, odd, eight)
    pairs = pairs.permute(0, 2, 3, 1, 5, 7, 4, 6).reshape(rows, warp, lane, columns * BLOCK)
    codes = pairs.new_empty(rows, warp, half, lane, columns * BLOCK)
    torch.bitwise_and(pairs, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(pairs, 4, out=codes[:, :, 1])
    return codes.view(rows * BLOCK, columns * BLOCK)[:n, :k]
