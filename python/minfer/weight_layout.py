"""The packed layout of 4-bit and 8-bit weights; the Python twin of cpp/src/w4a16/w4_layout.h.

A weight [n, k] is cut in blocks of 64 x 64, both extents rounded up, and stored as int32 [ceil(n / 64), ceil(k / 64), 512 or 1024]. Its
words, little-endian, belong to the 128 threads t that read them and to k-slabs s of 16 columns:

    4-bit   word 4 * t + s, nibble p           row 16 * (t // 32) + 8 * (p % 2) + (t % 32) // 4
                                               column 16 * s + 8 * (p // 2 % 2) + 2 * (t % 4) + p // 4
    8-bit   word 512 * h + 4 * t + 2 * s + j,  row as above
            half h, slab 2 * h + s, byte p     column 16 * (2 * h + s) + 8 * j + 2 * (t % 4) + p // 2

In mixed radix a row is (warp 4, half 2, lane 8) and a column (slab 2 x 2, eight 2, pair 4, odd 2). A block then is the bytes

    4-bit   [warp, lane, pair, slab, odd, eight], a byte being the codes of half 0 and, four bits up, of half 1
    8-bit   [slab / 2, warp, lane, pair, slab % 2, eight, odd, half]
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 64
MULTIPLE = 8  # n and k: 16-byte rows of scales and of activations

_ROW = (4, 2, 8)  # warp, half, lane
_COLUMN = (2, 2, 2, 4, 2)  # slab / 2, slab % 2, eight, pair, odd

# From [row block, warp, half, lane, column block, slab / 2, slab % 2, eight, pair, odd] to bytes; without the half in 4-bit codes.
_ORDER = {4: (0, 3, 1, 2, 7, 4, 5, 8, 6), 8: (0, 4, 5, 1, 3, 8, 6, 7, 9, 2)}
_INVERSE = {bits: tuple(order.index(i) for i in range(len(order))) for bits, order in _ORDER.items()}


def block_words(bits: int) -> int:
    """int32 words of a block: 512 for 4-bit codes, 1024 for 8-bit ones."""
    return BLOCK * BLOCK * bits // 32


def blocks(extent: Any) -> Any:
    """Blocks along an extent, which may be symbolic."""
    return (extent + (BLOCK - 1)) // BLOCK


def packed_shape(n: Any, k: Any, bits: int = 4) -> tuple[Any, Any, int]:
    """qweight's shape for W [n, k]."""
    return blocks(n), blocks(k), block_words(bits)


def groups(k: Any, group_size: int) -> Any:
    """Rows of scales: ceil(k / group_size), or 1 for group_size -1."""
    return 1 if group_size == -1 else (k + (group_size - 1)) // group_size


def pack(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """uint8 codes [n, k] of any strides -> int32 [ceil(n / 64), ceil(k / 64), 512 or 1024]. Padding is 0; the low ``bits`` count."""
    n, k = codes.shape
    rows, columns = blocks(n), blocks(k)
    if n % BLOCK or k % BLOCK:
        codes = torch.nn.functional.pad(codes, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    halves = codes.view(rows, *_ROW, columns * BLOCK) if codes.is_contiguous() else codes.unflatten(0, (rows, *_ROW))
    if bits == 4:
        halves = halves[:, :, 1].bitwise_and(15).bitwise_left_shift_(4).bitwise_or_(halves[:, :, 0].bitwise_and(15))
    # A clone, for the permutation may leave the strides in order where some extents are 0 or 1.
    packed = halves.unflatten(-1, (columns, *_COLUMN)).permute(_ORDER[bits]).clone(memory_format=torch.contiguous_format)
    return packed.view(rows, columns, 4 * block_words(bits)).view(torch.int32)


def unpack(qweight: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of :func:`pack`, whose bits it knows from the shape: uint8 [n, k], a view where n or k are not multiples of 64."""
    rows, columns, words = qweight.shape
    bits = words * 32 // (BLOCK * BLOCK)
    warp, half, lane = _ROW
    shape = (rows, warp, lane, columns, *_COLUMN) if bits == 4 else (rows, *_ROW, columns, *_COLUMN)
    octets = qweight.contiguous().view(torch.uint8).view([shape[i] for i in _ORDER[bits]]).permute(_INVERSE[bits])
    if bits == 4:
        pairs = octets.reshape(rows, warp, lane, columns * BLOCK)
        codes = pairs.new_empty(rows, warp, half, lane, columns * BLOCK)
        torch.bitwise_and(pairs, 15, out=codes[:, :, 0])
        torch.bitwise_right_shift(pairs, 4, out=codes[:, :, 1])
    else:
        codes = octets.clone(memory_format=torch.contiguous_format)
    return codes.view(rows * BLOCK, columns * BLOCK)[:n, :k]
