"""CPU kernels of the W4A16 and W8A16 operators; with a float64 ``a`` the same functions are the truth that tests measure against.

The weight without alpha is rounded to 16 bits first, whatever ``a`` is: to the dtype of 16-bit scales, otherwise to that of a 16-bit ``a``,
otherwise to bfloat16, which holds every mxfp4 and nvfp4 weight. That rounding is part of the operators' definition.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..checks import common as checks
from ..formats import weight_formats, weight_layout
from .gemm import gemm, gemm_gated


def _dequantize(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    name: str,
    group_size: int,
    *,
    n: int,
    k: int,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    form = weight_formats.FORMATS[name]
    rows = weight_layout.groups(k, group_size)
    size = weight_layout.group_columns(k, group_size)
    w = form.decode(weight_layout.unpack(qweight, n, k, form.order))
    w = torch.nn.functional.pad(w, (0, rows * size - k)).view(n, rows, size)
    if form.zero is not None:
        w = w.sub_(form.zero if zeros is None else zeros.float().t().unsqueeze(2))
    w = w.mul_((weight_formats.scale_values(scales, form) * alpha).t().unsqueeze(2))
    dtype = out_dtype or (scales.dtype if form.scale_type is None else torch.bfloat16)
    return w.view(n, rows * size)[:, :k].to(dtype).contiguous()


def weight_beside(
    a: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, name: str, group_size: int
) -> torch.Tensor:
    """W [n, k] without alpha, in the 16-bit type in which it is multiplied by an ``a`` [..., k]."""
    own = weight_formats.FORMATS[name].scale_type is None  # its scales have the weight's dtype
    dtype = None if own or a.dtype not in checks.DTYPES else a.dtype
    return _dequantize(qweight, scales, zeros, name, group_size, n=scales.shape[1], k=a.shape[-1], out_dtype=dtype)


def _operands(
    a: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    name: str,
    group_size: int,
    perm: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A as the matrix [m, k], its columns in the order of the packed weight's, and B = W^T [k, n] in 16 bits."""
    matrix = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    return matrix if perm is None else matrix.index_select(1, perm), weight_beside(a, qweight, scales, zeros, name, group_size).t()


def _gemm(a, qweight, scales, zeros, name, group_size, *, perm=None, c=None, **epilogue) -> torch.Tensor:
    matrix, b = _operands(a, qweight, scales, zeros, name, group_size, perm)
    shape = (*a.shape[:-1], b.shape[1])
    if c is not None:
        c = c.expand(shape).reshape(matrix.shape[0], b.shape[1])
    return gemm(matrix, b, c=c, beta=0.0 if c is None else 1.0, **epilogue).view(shape)


def _gemm_gated(a, qweight, scales, zeros, name, group_size, *, perm=None, **epilogue) -> torch.Tensor:
    matrix, b = _operands(a, qweight, scales, zeros, name, group_size, perm)
    return gemm_gated(matrix, b, **epilogue).view(*a.shape[:-1], b.shape[1] // 2)


def w4a16_gemm(a, qweight, scales, zeros=None, *, group_size=128, w4_format="int4", **arguments: Any) -> torch.Tensor:
    """activation(alpha * A.W^T + c + bias) with the 16-bit W, one rounding at the end; ``a`` also float32 or float64."""
    return _gemm(a, qweight, scales, zeros, w4_format, group_size, **arguments)


def w4a16_gemm_gated(a, qweight, scales, zeros=None, *, group_size=128, w4_format="int4", **arguments: Any) -> torch.Tensor:
    """act(gate) * up, gate and up interleaved in the weight's rows; otherwise as :func:`w4a16_gemm`."""
    return _gemm_gated(a, qweight, scales, zeros, w4_format, group_size, **arguments)


def w4a16_dequantize(qweight, scales, zeros=None, *, group_size=128, w4_format="int4", **arguments: Any) -> torch.Tensor:
    """(value - zero) * (scale * alpha) [n, k], computed in float32 and rounded once; any device."""
    return _dequantize(qweight, scales, zeros, w4_format, group_size, **arguments)


def w4a16_pack(codes, *, w4_format="int4") -> torch.Tensor:
    """Codes [n, k] in the packed order of their format; any device."""
    return weight_layout.pack(codes, 4, weight_formats.FORMATS[w4_format].order)


def w8a16_gemm(a, qweight, scales, zeros=None, *, group_size=-1, w8_format="int8", **arguments: Any) -> torch.Tensor:
    """As :func:`w4a16_gemm`, of 8-bit codes."""
    return _gemm(a, qweight, scales, zeros, w8_format, group_size, **arguments)


def w8a16_gemm_gated(a, qweight, scales, zeros=None, *, group_size=-1, w8_format="int8", **arguments: Any) -> torch.Tensor:
    """As :func:`w4a16_gemm_gated`, of 8-bit codes."""
    return _gemm_gated(a, qweight, scales, zeros, w8_format, group_size, **arguments)


def w8a16_dequantize(qweight, scales, zeros=None, *, group_size=-1, w8_format="int8", **arguments: Any) -> torch.Tensor:
    """As :func:`w4a16_dequantize`, of 8-bit codes."""
    return _dequantize(qweight, scales, zeros, w8_format, group_size, **arguments)


def w8a16_pack(codes) -> torch.Tensor:
    """As :func:`w4a16_pack`; all 8-bit formats have one order."""
    return weight_layout.pack(codes, 8)
