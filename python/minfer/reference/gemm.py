"""CPU kernels of the operators, as ATen compositions; in float64 the same functions are the truth that tests measure against.

``gemm`` and ``gemm_gated`` here take tensors of any floating-point type and device. 16-bit inputs are computed in float32 and rounded
once, like the CUDA kernels; float32 and float64 inputs are computed in their own type.
"""

from __future__ import annotations

import torch

from ..checks import common as checks
from ..formats.gate_up import GATE_BLOCK
from .codes import stored
from .epilogue import ACTIVATION, compute_dtype
from .products import product


def affine(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, bias: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    """alpha * A.B + beta * C + bias in the compute type. BLAS rules: a zero alpha reads no A and B, a zero beta no C (zero in it)."""
    dtype = compute_dtype(a)
    if dtype == torch.float32:
        alpha, beta = checks.in_float32(alpha), checks.in_float32(beta)
    if alpha == 0 or a.shape[-1] == 0:
        batch = a.shape[:-2] if a.dim() >= b.dim() else b.shape[:-2]
        y = torch.zeros((*batch, a.shape[-2], b.shape[-1]), dtype=dtype, device=a.device)
    else:
        y = product(a.to(dtype), b.to(dtype))
        if alpha != 1:
            y = y * alpha
    if c is not None and beta != 0:
        y = y + beta * c.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return y


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    quant: str | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(alpha * A.B + beta * C + bias), one rounding at the end.

    Shapes are those of :func:`minfer.gemm`. ``gemm(a.double(), b.double(), ...)`` is the float64 truth.
    """
    y = ACTIVATION[activation](affine(a, b, c, bias, alpha, beta))
    return stored(y, out_dtype or a.dtype, quant, scale).contiguous()


def gemm_gated(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    activation: str = "silu",
    quant: str | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(gate) * up of alpha * A.B + bias, gate and up interleaved in B's columns, one rounding at the end; shapes as in
    :func:`minfer.gemm_gated`."""
    y = affine(a, b, None, bias, alpha, 0.0)
    n = y.shape[-1]
    blocks = y.unflatten(-1, (n // (2 * GATE_BLOCK), 2, GATE_BLOCK))
    d = ACTIVATION[activation](blocks[..., 0, :]) * blocks[..., 1, :]
    return stored(d.flatten(-2), a.dtype, quant, scale).contiguous()
