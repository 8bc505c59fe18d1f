"""The packed layouts of 4-bit and 8-bit weights; the Python twin of cpp/src/quantized_gemm/w4_layout.h.

A weight [n, k] is cut in blocks of 64 x 64, both extents rounded up, and stored as int32 [ceil(n / 64), ceil(k / 64), 512 or 1024]. Its
words, little-endian, belong to the 128 threads t that read them and to k-slabs s of 16 columns:

    4-bit   word 4 * t + s, nibble p           row 16 * (t // 32) + 8 * (p % 2) + (t % 32) // 4
                                               column 16 * s + 8 * (p // 2 % 2) + 2 * (t % 4) + p // 4
    book    word 4 * t + s, nibble p           row 16 * (t // 32) + 8 * (p // 2 % 2) + (t % 32) // 4
                                               column 16 * s + 8 * (p // 4) + 2 * (t % 4) + p % 2
    8-bit   word 512 * h + 4 * t + 2 * s + j,  row 16 * (t // 32) + 8 * (p % 2) + (t % 32) // 4
            half h, slab 2 * h + s, byte p     column 16 * (2 * h + s) + 8 * j + 2 * (t % 4) + p // 2

"book" is the order of nf4, which is looked up in a table: byte b of a word is the pair along k of fragment register b, half b % 2 and eight
b // 2, and the index of a pair of values. "e2m1" is that of mxfp4 and nvfp4: each 16 bits of 4-bit words hold the four codes that "4-bit"
has there, but apart, the magnitude of code i in the three bits from bit (6, 3, 0, 9)[i] on and its sign in bit (15, 12, 14, 13)[i].

In mixed radix a row is (warp 4, half 2, lane 8) and a column (slab 2 x 2, eight 2, pair 4, odd 2). A block then is the bytes

    4-bit   [warp, lane, pair, slab, odd, eight], a byte being the codes of half 0 and, four bits up, of half 1
    book    [warp, lane, pair, slab, eight, half], a byte being the codes of odd 0 and, four bits up, of odd 1
    8-bit   [slab / 2, warp, lane, pair, slab % 2, eight, odd, half]
"""

from __future__ import annotations

from typing import Any

import torch

VERSION = 3  # of the layouts, for files
_SINCE = {"plain": 1, "book": 2, "e2m1": 3}  # the first version with today's layout of each order
BLOCK = 64
MULTIPLE = 8  # n and k: 16-byte rows of scales and of activations

_ROW = (4, 2, 8)  # warp, half, lane
_COLUMN = (2, 2, 2, 4, 2)  # slab / 2, slab % 2, eight, pair, odd

# From [row block, warp, half, lane, column block, slab / 2, slab % 2, eight, pair, odd] to the order of a block. 8-bit codes move one by
# one; of 4-bit ones the four that differ in half and odd move together, 16 bits, and are put in order before or after.
_UNIT = {4: torch.int16, 8: torch.uint8}
_ORDER = {4: (0, 3, 1, 2, 7, 4, 5, 6), 8: (0, 4, 5, 1, 3, 8, 6, 7, 9, 2)}
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


def group_columns(k: int, group_size: int) -> int:
    """Columns of a group: a group_size that is -1 or covers k is all of k, and nothing is ever padded to it."""
    return k if group_size == -1 or group_size >= k else group_size


def _modes_of(rows: int, columns: int, bits: int) -> tuple[int, ...]:
    """The shape of a weight of rows x columns blocks as separate modes, before they are permuted into the packed order."""
    warp, _, lane = _ROW
    return (rows, warp, lane, columns, *_COLUMN[:-1]) if bits == 4 else (rows, *_ROW, columns, *_COLUMN)


def _exchange(x: torch.Tensor, mask: int, distance: int) -> torch.Tensor:
    """The bits of ``mask`` change places with those ``distance`` above them."""
    different = x.bitwise_right_shift(distance).bitwise_xor_(x).bitwise_and_(mask)
    return x.bitwise_xor(different).bitwise_xor_(different.bitwise_left_shift_(distance))


def _exchange_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 words of bytes [eight, odd] as [odd, eight], and the other way round."""
    return _exchange(words, 0xFF00, 8)


def _exchange_nibbles(units: torch.Tensor) -> torch.Tensor:
    """int16 units of nibbles [odd, half] as [half, odd], and the other way round."""
    return _exchange(units, 0x00F0, 4)


def _moved(words: torch.Tensor, moves: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """The bits ``mask`` of each half of int32 words from bit ``start`` to bit ``end`` on, for every (mask, start, end)."""
    moved = torch.zeros_like(words)
    for mask, start, end in moves:
        moved |= words.bitwise_right_shift(start).bitwise_and_(mask << 16 | mask).bitwise_left_shift_(end)
    return moved


_SPREAD = tuple(move for i in range(4) for move in ((7, 4 * i, (6, 3, 0, 9)[i]), (1, 4 * i + 3, (15, 12, 14, 13)[i])))
_GATHER = tuple((mask, end, start) for mask, start, end in _SPREAD)


def readable(order: str, version: int) -> bool:
    """Whether a file of that version has the layout of today in this order."""
    return version >= _SINCE[order]


def pack(codes: torch.Tensor, bits: int = 4, order: str = "plain") -> torch.Tensor:
    """uint8 codes [n, k] of any strides -> int32 [ceil(n / 64), ceil(k / 64), 512 or 1024]. Padding is 0; the low ``bits`` count."""
    book = order == "book"
    n, k = codes.shape
    rows, columns = blocks(n), blocks(k)
    if n % BLOCK or k % BLOCK:
        codes = torch.nn.functional.pad(codes, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    if bits == 4:
        halves = codes.contiguous().view(rows, *_ROW, columns * BLOCK)  # a transposed view is faster copied first
        pairs = halves[:, :, 1].bitwise_and(15).bitwise_left_shift_(4).bitwise_or_(halves[:, :, 0].bitwise_and(15))
        units = pairs.reshape(-1).view(_UNIT[4])
        units = (_exchange_nibbles(units) if book else units).view(_modes_of(rows, columns, bits))
    else:
        units = codes.unflatten(0, (rows, *_ROW)).unflatten(-1, (columns, *_COLUMN))
    # A clone, for the permutation may leave the strides in order where some extents are 0 or 1.
    packed = units.permute(_ORDER[bits]).clone(memory_format=torch.contiguous_format)
    words = packed.view(rows, columns, block_words(bits) * 4 // units.element_size()).view(torch.int32)
    words = _exchange_bytes(words) if bits == 4 and not book else words
    return _moved(words, _SPREAD) if order == "e2m1" else words


def unpack(qweight: torch.Tensor, n: int, k: int, order: str = "plain") -> torch.Tensor:
    """The inverse of :func:`pack`, whose bits it knows from the shape: uint8 [n, k], a view where n or k are not multiples of 64."""
    book = order == "book"
    rows, columns, words = qweight.shape
    if rows == 0 or columns == 0:  # any strides are contiguous then, but not all can be viewed as bytes
        return torch.empty(n, k, dtype=torch.uint8, device=qweight.device)
    bits = words * 32 // (BLOCK * BLOCK)
    shape, qweight = _modes_of(rows, columns, bits), qweight.contiguous()
    if order == "e2m1":
        qweight = _moved(qweight, _GATHER)
    if bits == 4 and not book:
        qweight = _exchange_bytes(qweight)
    units = qweight.view(_UNIT[bits]).view([shape[i] for i in _ORDER[bits]]).permute(_INVERSE[bits])
    units = units.clone(memory_format=torch.contiguous_format)
    if bits == 4:
        if book:
            units = _exchange_nibbles(units)
        warp, half, lane = _ROW
        pairs = units.view(rows, warp, lane, columns * BLOCK // 2).view(torch.uint8)
        codes = pairs.new_empty(rows, warp, half, lane, columns * BLOCK)
        torch.bitwise_and(pairs, 15, out=codes[:, :, 0])
        torch.bitwise_right_shift(pairs, 4, out=codes[:, :, 1])
    else:
        codes = units
    return codes.view(rows * BLOCK, columns * BLOCK)[:n, :k]
