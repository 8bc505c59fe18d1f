"""D in e4m3 codes: what the tests of all GEMMs judge them by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contracts.numerics_cases import TINY, UNIT, e4m3_near

QUANT = "fp8_tensor"
POISON = 0xA5  # a byte that is a number's code, and not 0's
LARGEST = 448.0


def scale_for(d: Tensor, spread: float = 150.0) -> Tensor:
    """A scale that gives the usual number of ``d`` a code of about ``spread``: some are saturated."""
    numbers = d.double()
    usual = numbers[numbers.isfinite()].square().mean().sqrt().item() if d.numel() else 1.0
    return torch.full((1,), max(usual, 2.0**-60) / spread, device=d.device)


def codes_of(d: Tensor, scale: Tensor) -> Tensor:
    """The rule, of float32 numbers: what a kernel must give of the same numbers, bit by bit but for NaN's sign."""
    assert d.dtype == scale.dtype == torch.float32
    inverse = torch.where(scale == 0, 0.0, scale.reciprocal().clamp(max=torch.finfo(torch.float32).max))
    return (d * inverse).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def same_codes(have: Tensor, want: Tensor) -> bool:
    """Equal bits, NaN of either sign and zeros of either sign apart."""
    have, want = have.float(), want.float()
    return have.shape == want.shape and bool(((have == want) | (have.isnan() & want.isnan())).all())


def codes_mismatch(q: Tensor, d: Tensor, scale: Tensor, *, other_sums: bool = False) -> str | None:
    """Why ``q`` are not the codes of results whose 16-bit roundings are ``d``, or None.

    A result lies within one rounding of ``d`` (and 2^-20 of it, where another epilogue adds in another order), so that its code lies
    between the codes of these two ends. Most numbers have one such code only, which is asserted: the test could not fail otherwise.
    other_sums: ``d`` is of another kernel, whose sums differ by as much as their largest ones are rounded by.
    """
    if q.dtype != torch.float8_e4m3fn or q.shape != d.shape:
        return f"{q.dtype} {list(q.shape)}, must be float8_e4m3fn {list(d.shape)}"
    if q.numel() == 0:
        return None
    middle, own = d.double(), scale.double()
    off = (UNIT[d.dtype] + 2.0**-20) * middle.abs() + TINY[d.dtype]
    if other_sums:
        off = off + 2.0**-18 * middle.abs().max()
    ends = [e4m3_near((middle + side * off) / own * (1 + side * middle.sign() * own.sign() * 2.0**-22)) for side in (-1, 1)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    have = q.float().double()
    good = ((have >= low) & (have <= high)) | (have.isnan() & middle.isnan())
    certain = ((low == high) & (low.abs() < LARGEST)).double().mean().item()
    if not bool(good.all()):
        at = tuple((~good).nonzero()[0].tolist())
        return f"{int((~good).sum())} of {good.numel()} codes off, first at {at}: {have[at]} instead of {low[at]} to {high[at]}"
    if q.numel() >= 256 and not certain > 0.6:
        return f"only {certain:.0%} of the codes say anything"
    return None


def codes_in_memory(shape: tuple[int, ...], device, *, left: int = 8, right: int = 8, margin: int = 2) -> tuple[Tensor, Tensor]:
    """(view of ``shape``, all bytes): rows of codes inside of a larger memory, all of it poisoned."""
    *batch, rows, columns = shape
    memory = torch.full((*batch, rows + 2 * margin, left + columns + right), POISON, dtype=torch.uint8, device=device)
    return memory.view(torch.float8_e4m3fn)[..., margin : margin + rows, left : left + columns], memory


def untouched_around(view: Tensor, memory: Tensor) -> bool:
    """Whether all bytes but the view's are as :func:`codes_in_memory` left them."""
    kept = view.view(torch.uint8).clone()
    view.view(torch.uint8).fill_(POISON)
    good = bool((memory == POISON).all())
    view.view(torch.uint8).copy_(kept)
    return good


def special_operands(dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
    """A and B whose product has rows of NaN, of infinities of both signs, of zeros, of large and of small numbers."""
    a, b = torch.randn(40, 64, device=device), torch.randn(64, 48, device=device)
    a[0, 5], a[1, 6], a[2, 7], a[3] = math.nan, math.inf, -math.inf, 0.0
    a[4] *= 1e4 if dtype == torch.bfloat16 else 50.0
    a[5] *= 2.0**-9
    return a.to(dtype), b.to(dtype)


# What a scale may be: usual, negative, 0, subnormal (1 / it is beyond float32), infinite, NaN, the largest and its neighbours.
SPECIAL_SCALES = (0.3, -0.3, 0.0, -0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1e-38, 3.4e38, 2.0**126, 2.0**127, math.inf, -math.inf, math.nan)
