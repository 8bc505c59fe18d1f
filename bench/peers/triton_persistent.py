"""A batch-invariant matrix product in Triton, of our own writing after Thinking Machines' description ("Defeating Nondeterminism in LLM
Inference", 2025): persistent programs walk tiles of one fixed size, each of which adds up all of k by itself, whatever m is."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def persistent(a, b, d, M, N, K, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   GROUP_M: tl.constexpr):  # fmt: skip
        """a [M, K], b [N, K], d [M, N], all contiguous."""
        tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
        in_group = GROUP_M * tiles_n
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
            first = tile // in_group * GROUP_M
            height = min(tiles_m - first, GROUP_M)
            row = (first + tile % in_group % height) * BLOCK_M
            column = tile % in_group // height * BLOCK_N
            rows, columns, ks = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
            of_a = a + (rows % M).to(tl.int64)[:, None] * K
            of_b = b + (columns % N).to(tl.int64)[None, :] * K
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for k in range(0, K, BLOCK_K):
                left = (k + ks) < K
                x = tl.load(of_a + (k + ks)[None, :], mask=left[None, :], other=0.0)
                y = tl.load(of_b + (k + ks)[:, None], mask=left[:, None], other=0.0)
                total = tl.dot(x, y, total)
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            tl.store(d + rows.to(tl.int64)[:, None] * N + columns[None, :], total.to(d.dtype.element_ty), mask=inside)

    return persistent


def available() -> bool:
    try:
        _kernel()
    except ImportError:
        return False
    return True


def matmul(a: Tensor, weight: Tensor) -> Tensor:
    """a . weight^T of contiguous a [m, k] and weight [n, k]."""
    (m, k), n = a.shape, weight.shape[0]
    d = a.new_empty(m, n)
    tiles = -(-m // TILE["BLOCK_M"]) * -(-n // TILE["BLOCK_N"])
    programs = min(torch.cuda.get_device_properties(a.device).multi_processor_count, tiles)
    _kernel()[(programs,)](a, weight, d, m, n, k, PROGRAMS=programs, num_warps=8, num_stages=3, **TILE)
    return d
