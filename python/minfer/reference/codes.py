"""Results as 8-bit codes of a scale, which operators on rows and GEMMs share. In float64 e4m3 codes are rounded by way of float32."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
INT8_MAX = 127.0
LARGEST_CODE = {torch.float8_e4m3fn: E4M3_MAX, torch.int8: INT8_MAX}


def inverse_of_scale(scale: Tensor) -> Tensor:
    """Rounded once, finite; 0 of 0."""
    return torch.where(scale == 0, 0.0, scale.reciprocal().clamp(max=torch.finfo(torch.float32).max))


def e4m3(y: Tensor) -> Tensor:
    return y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def int8(y: Tensor) -> Tensor:
    """-127 to 127, 0 of NaN."""
    return y.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0).to(torch.int8)


def codes_of(y: Tensor, dtype: torch.dtype) -> Tensor:
    return int8(y) if dtype == torch.int8 else e4m3(y)


def stored(y: Tensor, dtype: torch.dtype, quant: str | None, scale: Tensor | None) -> Tensor:
    """A GEMM's D of its results: numbers of ``dtype``, or with ``quant`` their codes."""
    return y.to(dtype) if quant is None else e4m3(y * inverse_of_scale(scale))
