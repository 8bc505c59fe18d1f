"""Random numbers that follow from a seed and a place, and stochastic rounding. Torch operations alone: within fused functions they become
part of the kernel, elsewhere they give the same bits."""

from __future__ import annotations

from typing import Any

import torch

_DROPPED = {torch.bfloat16: 16, torch.float16: 13, torch.float8_e4m3fn: 20, torch.float8_e5m2: 21}  # bits of a float32


def _mixed(x: Any) -> Any:
    """A permutation of 32-bit numbers whose every input bit changes each output bit with a probability near 1/2 (C. Wellons, lowbias32)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def random_bits(seed: Any, row: Any, col: Any) -> Any:
    """32 random bits for every element, as int32: a hash of the seed, the row and the column.

    Args:
      seed: an integer, or a tensor of one; as a 0-dim tensor of the CPU it is handed to the kernel by value.
      row, col: integers, which broadcast.
    """
    if isinstance(seed, int):
        low, high = (((seed >> shift) & 0xFFFFFFFF) for shift in (0, 32))
        low, high = (x - (1 << 32) if x >= 1 << 31 else x for x in (low, high))
    else:
        low, high = seed.to(torch.int32), (seed.to(torch.int64) >> 32).to(torch.int32)
    return _mixed(_mixed(_mixed(row.to(torch.int32) ^ low) ^ high) ^ col.to(torch.int32))


def stochastic_round(x: Any, dtype: torch.dtype, seed: Any, row: Any, col: Any) -> Any:
    """x, rounded up or down with the probabilities that make its expectation x, by :func:`random_bits`.

    Args:
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2. Numbers below the least normal one are rounded to nearest.
    """
    if dtype not in _DROPPED:
        raise TypeError(f"stochastic_round: dtype must be one of {', '.join(map(str, _DROPPED))}, got {dtype}")
    x = x.to(torch.float32)
    below = (1 << _DROPPED[dtype]) - 1
    rounded = ((x.view(torch.int32) + (random_bits(seed, row, col) & below)) & ~below).view(torch.float32)
    return torch.where(x.abs() < float("inf"), rounded, x).to(dtype)
