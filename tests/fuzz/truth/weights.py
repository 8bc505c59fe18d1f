"""What the codes and scales of a quantised weight stand for, from the docstrings of minfer.w4a16_gemm and w8a16_gemm, in float64.

    int4, int8   (code - zero) * scale; without zeros 8 and 128         scales and zeros 16-bit
    nf4          NF4[code] * scale                                      scales 16-bit
    mxfp4        E2M1[code] * 2^(byte - 127), for 32 columns            bytes
    nvfp4        E2M1[code] * e4m3(byte), for 16 columns                bytes
    fp8_e4m3     e4m3(code) * scale                                     scales 16-bit

Error model (docs/numerics.md, section 4): a weight is rounded once to a's dtype; fractional zero points cost a second rounding and, in
float16, 2^-16 of the scale; nf4's code book is off by half a rounding more; E2M1 times a byte scale is exact. Small float16 weights are
subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..compare import of_roundings, smallest, unit
from .kv_formats import e4m3

BITS = {"int4": 4, "nf4": 4, "mxfp4": 4, "nvfp4": 4, "int8": 8, "fp8_e4m3": 8}
ZERO = {"int4": 8.0, "int8": 128.0}
BYTE_SCALES = {"mxfp4": 32, "nvfp4": 16}  # with the group that each prescribes
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # code = sign << 3 | magnitude


@cache
def nf4() -> tuple[float, ...]:
    """4-bit NormalFloat (QLoRA, Dettmers et al., 2023): quantiles of the normal distribution, eight above zero, zero, seven below, the
    largest being 1."""
    offset = 0.9677083
    quantiles = lambda n: torch.special.ndtri(torch.linspace(offset, 0.5, n, dtype=torch.float64))[:-1]  # noqa: E731
    values = torch.cat([quantiles(9), torch.zeros(1, dtype=torch.float64), -quantiles(8)]).sort().values
    return tuple((values / values.max()).tolist())


@dataclass
class Weight:
    """W [n, k] in packed column order without alpha, and what roundings may take it off by."""

    value: Tensor
    rounding: Tensor  # magnitude of what is rounded, all roundings added up


def groups_of(k: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-k // group_size)


def scale_values(scales: Tensor, form: str) -> Tensor:
    if form == "mxfp4":
        return torch.exp2(scales.view(torch.uint8).double() - 127)
    if form == "nvfp4":
        return e4m3(scales.view(torch.uint8))
    return scales.double()


def decode(codes: Tensor, form: str) -> Tensor:
    if form == "nf4":
        return torch.tensor(nf4(), dtype=torch.float64, device=codes.device)[codes.long()]
    if form in BYTE_SCALES:
        magnitude = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)[(codes & 7).long()]
        return torch.where(codes >= 8, -magnitude, magnitude)
    return e4m3(codes) if form == "fp8_e4m3" else codes.double()


def weight(codes: Tensor, scales: Tensor, zeros: Tensor | None, form: str, group_size: int) -> Weight:
    """codes uint8 [n, k]; scales and zeros [groups, n] as they are passed."""
    n, k = codes.shape
    size = max(k, 1) if group_size == -1 else group_size
    group = (torch.arange(k, device=codes.device) // size).clamp(max=max(scales.shape[0] - 1, 0))
    of_columns = lambda x: x.t()[:, group]  # noqa: E731  [groups, n] -> [n, k]
    factor = of_columns(scale_values(scales, form))
    value = decode(codes, form)
    subnormal = smallest(scales.dtype) / unit(scales.dtype) if scales.dtype.is_floating_point and scales.dtype.itemsize == 2 else 0.0
    if form not in ZERO:
        rounds = {"nf4": 1.55, "fp8_e4m3": 1.0}.get(form, 0.0)
        w = value * factor
        return Weight(w, rounds * (w.abs() + subnormal))
    if zeros is None:
        w = (value - ZERO[form]) * factor
        return Weight(w, w.abs() + subnormal)
    zero = of_columns(zeros.double())
    w = (value - zero) * factor
    small = 2.0**-16 / unit(torch.float16) if scales.dtype == torch.float16 else 0.0
    fractional = torch.where(zero != zero.round(), w.abs() + small * factor.abs(), 0.0)
    return Weight(w, 1.001 * (w.abs() + fractional) + subnormal)


def error_of_sum(a: Tensor, w: Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the roundings of a weight do to a.W^T: a bound, and what they amount to on average (their standard deviation). a [m, k]."""
    sizes = a.abs() @ w.rounding.t()
    squares = a.square() @ w.rounding.square().t()
    return of_roundings(unit(dtype), sizes, squares), 0.58 * unit(dtype) * squares.sqrt()
