"""CPU kernels of the W4A16 operators; with a float64 ``a`` the same functions are the truth that tests measure against.

The weight is rounded to the dtype of ``scales`` first, whatever ``a`` is: that rounding is part of the operators' definition.
"""

from __future__ import annotations

import math

import torch

from . import checks_w4a16, reference, w4_layout


def dequantize(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    n: int,
    k: int,
    w4_format: str = "int4",
) -> torch.Tensor:
    """(code - zero) * scale [n, k], computed in float32 and rounded once to the dtype of ``scales``; any device."""
    form = w4_layout.FORMATS[w4_format]
    rows = w4_layout.groups(k, group_size)
    size = k if group_size == -1 else group_size
    w = form.decode(w4_layout.unpack(qweight, n, k))
    w = torch.nn.functional.pad(w, (0, rows * size - k)).view(n, rows, size)
    w = w.sub_(form.zero if zeros is None else zeros.float().t().unsqueeze(2)).mul_(scales.float().t().unsqueeze(2))
    return w.view(n, rows * size)[:, :k].to(scales.dtype).contiguous()


def _gathered(a: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """A as the matrix [m, k], its columns in the order of the packed weight's."""
    a = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    return a if perm is None else a.index_select(1, perm)


def w4a16_gemm(
    a: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    perm: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    w4_format: str = "int4",
) -> torch.Tensor:
    """activation(A.W^T + c + bias) with the 16-bit dequantised W, one rounding at the end; ``a`` also float32 or float64."""
    n, k, shape = scales.shape[1], a.shape[-1], (*a.shape[:-1], scales.shape[1])
    weight = dequantize(qweight, scales, zeros, group_size=group_size, n=n, k=k, w4_format=w4_format)
    matrix = _gathered(a, perm)
    if c is not None:
        c = c.expand(shape).reshape(matrix.shape[0], n)
    d = reference.gemm(matrix, weight.t(), c=c, beta=0.0 if c is None else 1.0, bias=bias, activation=activation)
    return d.view(shape)


def w4a16_gemm_gated(
    a: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    perm: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    w4_format: str = "int4",
) -> torch.Tensor:
    """act(gate) * up, gate and up interleaved in the weight's rows; otherwise as :func:`w4a16_gemm`."""
    n, k = scales.shape[1], a.shape[-1]
    weight = dequantize(qweight, scales, zeros, group_size=group_size, n=n, k=k, w4_format=w4_format)
    d = reference.gemm_gated(_gathered(a, perm), weight.t(), bias=bias, activation=activation)
    return d.view(*a.shape[:-1], n // 2)


# ---- CPU kernels -------------------------------------------------------------------------------------------------------------

_library = torch.library.Library("minfer", "IMPL")


def _gemm_cpu(a, qweight, scales, zeros=None, *, perm=None, kernel=None, **arguments):
    shape = checks_w4a16.check_w4a16_gemm(a, qweight, scales, zeros, perm=perm, kernel=kernel, **arguments)
    checks_w4a16.check_perm_values("w4a16_gemm", perm, shape.k)
    return w4a16_gemm(a, qweight, scales, zeros, perm=perm, **arguments)


def _gemm_out_cpu(a, qweight, scales, zeros=None, *, perm=None, kernel=None, out, **arguments):
    shape = checks_w4a16.check_w4a16_gemm(a, qweight, scales, zeros, perm=perm, kernel=kernel, out=out, **arguments)
    checks_w4a16.check_perm_values("w4a16_gemm", perm, shape.k)
    return out.copy_(w4a16_gemm(a, qweight, scales, zeros, perm=perm, **arguments))


def _gemm_gated_cpu(a, qweight, scales, zeros=None, *, perm=None, kernel=None, **arguments):
    shape = checks_w4a16.check_w4a16_gemm_gated(a, qweight, scales, zeros, perm=perm, kernel=kernel, **arguments)
    checks_w4a16.check_perm_values("w4a16_gemm_gated", perm, shape.k)
    return w4a16_gemm_gated(a, qweight, scales, zeros, perm=perm, **arguments)


def _pack_cpu(codes):
    checks_w4a16.check_w4a16_pack(codes)
    checks_w4a16.check_codes(codes)
    return w4_layout.pack(codes)


def _dequantize_cpu(qweight, scales, zeros=None, **arguments):
    checks_w4a16.check_w4a16_dequantize(qweight, scales, zeros, **arguments)
    return dequantize(qweight, scales, zeros, **arguments)


_library.impl("w4a16_gemm", _gemm_cpu, "CPU")
_library.impl("w4a16_gemm.out", _gemm_out_cpu, "CPU")
_library.impl("w4a16_gemm_gated", _gemm_gated_cpu, "CPU")
_library.impl("w4a16_pack", _pack_cpu, "CPU")
_library.impl("w4a16_dequantize", _dequantize_cpu, "CPU")
