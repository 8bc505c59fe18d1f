"""CPU kernels of the W4A8 operators; with a float64 ``a`` the same functions are the truth that tests measure against.

The weight is not rounded: products of a code and its 16-bit scale are exact in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import weight_formats, weight_layout
from ..formats.gate_up import split_gate_up
from .codes import stored
from .epilogue import ACTIVATION
from .products import product


def _weight(qweight: Tensor, scales: Tensor, group_size: int, k: int, dtype: torch.dtype) -> Tensor:
    """(code - 8) * scale [n, k]."""
    form, n = weight_formats.FORMATS["int4"], scales.shape[1]
    codes = form.decode(weight_layout.unpack(qweight, n, k, form.order)).to(dtype) - form.zero
    columns = weight_layout.group_columns(k, group_size)
    return codes * scales.to(dtype).t().repeat_interleave(columns, 1)[:, :k]


def _product(a, a_scale, qweight, scales, *, group_size, alpha, bias) -> Tensor:
    """alpha * (A * a_scale).W^T + bias [m, n]."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    m, k = math.prod(a.shape[:-1]), a.shape[-1]
    x = a.reshape(m, k).to(dtype)
    y = product(x, _weight(qweight, scales, group_size, k, dtype).t())
    y = y * (a_scale.reshape(-1, 1).to(dtype) if a_scale.numel() != 1 else a_scale.reshape(()).to(dtype)) * alpha
    return y if bias is None else y + bias.to(dtype)


def w4a8_gemm(
    a: Tensor,
    a_scale: Tensor,
    qweight: Tensor,
    scales: Tensor,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    quant: str | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """activation(alpha * (A * a_scale).W^T + c + bias), rounded once; shapes as in :func:`minfer.w4a8_gemm`."""
    y = _product(a, a_scale, qweight, scales, group_size=group_size, alpha=alpha, bias=bias).view(*a.shape[:-1], scales.shape[1])
    y = y if c is None else y + c.to(y.dtype)
    dtype = torch.float64 if a.dtype == torch.float64 else scales.dtype
    return stored(ACTIVATION[activation](y), dtype, quant, scale).contiguous()


def w4a8_gemm_gated(
    a: Tensor,
    a_scale: Tensor,
    qweight: Tensor,
    scales: Tensor,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    activation: str = "silu",
    quant: str | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """act(gate) * up of alpha * (A * a_scale).W^T + bias, rounded once; shapes as in :func:`minfer.w4a8_gemm_gated`."""
    y = _product(a, a_scale, qweight, scales, group_size=group_size, alpha=alpha, bias=bias)
    gate, up = split_gate_up(y, "blocks")
    dtype = torch.float64 if a.dtype == torch.float64 else scales.dtype
    y = stored(ACTIVATION[activation](gate) * up, dtype, quant, scale)
    return y.view(*a.shape[:-1], scales.shape[1] // 2).contiguous()
