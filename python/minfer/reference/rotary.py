"""Rotary embedding of heads in place, and the check of indices that only reading memory can make."""

from __future__ import annotations

from torch import Tensor

from ..checks.common import Checker


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> None:
    """x [tokens, heads, head_dim]: its first elements, as many as the table is for, in float32, rounded once."""
    cosines, sines = cos_sin[positions.long()].unsqueeze(1).chunk(2, -1)  # [tokens, 1, rotary_dim / 2]
    part = x[..., : cos_sin.shape[1]]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    a, b = first.float(), second.float()
    turned = a * cosines - b * sines, b * cosines + a * sines
    first.copy_(turned[0].to(x.dtype))
    second.copy_(turned[1].to(x.dtype))


def check_indices(op: str, name: str, values: Tensor, count: int, of: str) -> None:
    """That values name one of ``count`` things each."""
    check = Checker(op)
    if values.numel():
        low, high = int(values.min()), int(values.max())
        check(low >= 0 and high < count, "{} must be 0 to {}, {}, got {}", name, count - 1, of, low if low < 0 else high)
