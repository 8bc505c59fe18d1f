"""The packed layouts of weights, from the table of minfer.formats.weight_layout: which code lies in which bits of which word."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
ORDERS = {"int4": "plain", "nf4": "book", "mxfp4": "e2m1", "nvfp4": "e2m1"}


def _blocks(codes: Tensor) -> Tensor:
    """[n, k] -> [row blocks, column blocks, 64, 64], zeros where a block is larger than the weight."""
    n, k = codes.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    whole = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.int64, device=codes.device)
    whole[:n, :k] = codes.long()
    return whole.view(rows, BLOCK, columns, BLOCK).transpose(1, 2)


def pack4(codes: Tensor, order: str) -> Tensor:
    """Word 4 t + s of thread t and slab s, its nibbles p from the lowest on."""
    t, s, p = torch.meshgrid(*(torch.arange(n, device=codes.device) for n in (128, 4, 8)), indexing="ij")
    if order == "book":
        row, column = 16 * (t // 32) + 8 * (p // 2 % 2) + t % 32 // 4, 16 * s + 8 * (p // 4) + 2 * (t % 4) + p % 2
    else:
        row, column = 16 * (t // 32) + 8 * (p % 2) + t % 32 // 4, 16 * s + 8 * (p // 2 % 2) + 2 * (t % 4) + p // 4
    nibbles = _blocks(codes)[:, :, row, column] & 15  # [.., 128, 4, 8]
    if order == "e2m1":
        half, i = p // 4 * 16, p % 4
        magnitude_at = torch.tensor([6, 3, 0, 9], device=codes.device)[i] + half
        sign_at = torch.tensor([15, 12, 14, 13], device=codes.device)[i] + half
        words = ((nibbles & 7) << magnitude_at) | (nibbles >> 3 << sign_at)
    else:
        words = nibbles << 4 * p
    return _int32(words.sum(-1).flatten(2))


def pack8(codes: Tensor) -> Tensor:
    """Word 512 h + 4 t + 2 s + j of half h, thread t, slab 2 h + s and eight j, its bytes p from the lowest on."""
    h, t, s, j, p = torch.meshgrid(*(torch.arange(n, device=codes.device) for n in (2, 128, 2, 2, 4)), indexing="ij")
    row, column = 16 * (t // 32) + 8 * (p % 2) + t % 32 // 4, 16 * (2 * h + s) + 8 * j + 2 * (t % 4) + p // 2
    words = (_blocks(codes)[:, :, row, column] << 8 * p).sum(-1)
    return _int32(words.flatten(2))


def _int32(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).int()
