"""A and B as TMA can address them: which strides and bases it takes, and copies that have these."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(x: Tensor, inner: int, outer: int) -> bool:
    """Whether the mode ``inner`` has unit stride and ``outer`` one of 16 bytes."""
    unit = 16 // x.element_size()
    whole = x.is_meta or x.data_ptr() % 16 == 0
    strides = [x.stride(i) for i in range(x.ndim) if i - x.ndim != inner and (x.shape[i] > 1 or i - x.ndim == outer)]
    fits = x.stride(inner) == 1 or x.shape[inner] == 1
    return whole and fits and all(stride % unit == 0 for stride in strides) and x.stride(outer) > 0


def misalignment(x: Tensor) -> int:
    """How many numbers lie between a multiple of 16 bytes and the first."""
    return 0 if x.is_meta else x.data_ptr() % 16 // x.element_size()


def b_major(b: Tensor, storage: str) -> str:
    """Which of B's modes has unit stride in the operand that TMA gets: "k" or "n"."""
    if storage == "e4m3" or aligned(b, -2, -1):
        return "k"
    return "n" if b.stride(-1) == 1 and b.shape[-1] > 1 else "k"


def padded(x: Tensor, inner: int) -> Tensor:
    """A copy with the mode ``inner`` of unit stride and the others at multiples of 16 bytes."""
    y = x.transpose(-1, -2) if inner == -2 else x
    unit = 16 // x.element_size()
    made = torch.empty(*y.shape[:-1], -(-y.shape[-1] // unit) * unit, dtype=x.dtype, device=x.device)[..., : y.shape[-1]]
    made.copy_(y)
    return made.transpose(-1, -2) if inner == -2 else made
