"""The GEMMs of 8-bit operands as ATen compositions. Of operands in float64 they are the truth that tests measure against.

e4m3 is multiplied in float32, int8 in float64, whose sums are the integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks.scaled_gemm import BLOCK, blocks_of, flat_scale, fp8_output, is_of_blocks
from ..formats.gate_up import join_gate_up, split_gate_up
from .codes import e4m3, inverse_of_scale
from .epilogue import ACTIVATION
from .products import product


def numbers_of(scale: Tensor) -> Tensor:
    """Scales as numbers: bytes are exponents of two, e8m0, whose 255 is NaN."""
    if scale.dtype != torch.uint8:
        return scale
    two = torch.ldexp(torch.ones(scale.shape, device=scale.device), scale.int() - 127)
    return torch.where(scale == 255, torch.nan, two)


def of_elements(scale: Tensor, lines: int, lines_of_block: int, k: int, k_of_block: int = BLOCK) -> Tensor:
    """A scale of blocks of ``lines_of_block`` lines and ``k_of_block`` of k as that of each element, [lines, k]."""
    by_k = numbers_of(scale).repeat_interleave(k_of_block, 1)[:, :k]
    return by_k if lines_of_block == 1 else by_k.repeat_interleave(lines_of_block, 0)[:lines]


def _expanded(scale: Tensor, lines: int, lines_of_block: int, k: int) -> Tensor:
    """A scale as [lines, k], where it is one of blocks, else [lines, 1] or [1, 1]."""
    if scale.dim() == 3:  # of gates and of ups
        return join_gate_up(*(of_elements(half, lines // 2, lines_of_block, k) for half in scale), "blocks")
    if not is_of_blocks(scale, lines, lines if lines_of_block == 1 else blocks_of(lines), k):
        return scale.reshape(-1, 1)
    return of_elements(scale, lines, lines_of_block, k)


def product_of_scaled(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, a_zero: Tensor | None = None, b_sums: Tensor | None = None
) -> Tensor:
    """((A - a_zero) * of_a).(B * of_b^T) of matrices, in float32, of operands in float64 in it. Scales of [lines, k] multiply the elements,
    those of [lines, 1] or [1, 1] the sums, as the kernels have it."""
    dtype = a.dtype if a.dtype == torch.float64 else torch.float32
    x, w = (y.double() if y.dtype == torch.int8 else y.to(dtype) for y in (a, b))
    x = x if of_a.shape[1] == 1 else x * of_a.to(x.dtype)
    w = w if of_b.shape[1] == 1 else w * of_b.t().to(w.dtype)
    y = product(x, w)
    if a_zero is not None and a.shape[1] > 0:
        y = y - a_zero.reshape(-1, 1).to(y.dtype) * b_sums.to(y.dtype)
    y = y.to(dtype)
    y = y * of_a.to(dtype) if of_a.shape[1] == 1 else y
    return y * of_b.t().to(dtype) if of_b.shape[1] == 1 else y


def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor | None = None, b_sums: Tensor | None = None
) -> Tensor:
    """((A - a_zero) * a_scale).(B * b_scale), in float32, of operands in float64 in it. b_sums: of B's columns."""
    if a.dim() > 2:
        zero = None if a_zero is None else flat_scale(a_zero, a)
        y = scaled_product(a.flatten(0, -2), b, flat_scale(a_scale, a), b_scale, zero, b_sums)
        return y.reshape(*a.shape[:-1], b.shape[1])
    (m, k), n = a.shape, b.shape[1]
    return product_of_scaled(a, b, _expanded(a_scale, m, 1, k), _expanded(b_scale, n, BLOCK, k), a_zero, b_sums)


def finished(y: Tensor, dtype: torch.dtype, out_scale: Tensor | None) -> Tensor:
    """D of its results: numbers of ``dtype``, or with a scale their codes."""
    return y.to(dtype).contiguous() if out_scale is None else e4m3(y * inverse_of_scale(out_scale)).contiguous()


def _gated(y: Tensor, activation: str) -> Tensor:
    gate, up = split_gate_up(y, "blocks")
    return ACTIVATION[activation](gate) * up


def _with_addends(y: Tensor, c: Tensor | None, bias: Tensor | None, beta: float) -> Tensor:
    if c is not None and beta != 0:
        y = y + beta * c.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def gemm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
) -> Tensor:
    """activation((A * a_scale).(B * b_scale) + beta * C + bias), rounded once; shapes as in :func:`minfer.gemm_fp8`."""
    y = ACTIVATION[activation](_with_addends(scaled_product(a, b, a_scale, b_scale), c, bias, beta))
    return finished(y, fp8_output(out_dtype, out_scale), out_scale)


def gemm_fp8_gated(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
) -> Tensor:
    """act(gate) * up of (A * a_scale).(B * b_scale) + bias, rounded once; shapes as in :func:`minfer.gemm_fp8_gated`."""
    y = _gated(_with_addends(scaled_product(a, b, a_scale, b_scale), None, bias, 0.0), activation)
    return finished(y, fp8_output(out_dtype, out_scale), out_scale)


def gemm_int8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_zero: Tensor | None = None,
    b_sums: Tensor | None = None,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As :func:`gemm_fp8`, of int8; int32 sums of a D of int32."""
    if out_dtype == torch.int32:
        return (a.double() @ b.double()).to(torch.int32)
    y = ACTIVATION[activation](_with_addends(scaled_product(a, b, a_scale, b_scale, a_zero, b_sums), c, bias, beta))
    return finished(y, out_dtype or torch.bfloat16, None)


def gemm_int8_gated(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_zero: Tensor | None = None,
    b_sums: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As :func:`gemm_fp8_gated`, of int8."""
    y = _gated(_with_addends(scaled_product(a, b, a_scale, b_scale, a_zero, b_sums), None, bias, 0.0), activation)
    return finished(y, out_dtype or torch.bfloat16, None)
