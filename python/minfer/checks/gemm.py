"""Argument checks of gemm and gemm_gated; messages as in :mod:`minfer.checks.common`."""

from __future__ import annotations

import torch

from ..formats.gate_up import GATE_BLOCK
from .common import (
    DTYPES,
    Checker,
    Result,
    check_activation,
    check_bias,
    check_c,
    check_dense,
    check_device,
    check_kernel,
    check_out,
    check_out_dtype,
    check_output_codes,
    check_scalar,
    in_float32,
    output_dtype,
)


def check_operands(check: Checker, a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[int, ...], int, int, int]:
    """Rank, dtype, device, k and batch of A and B; returns (batch, m, n, k)."""
    for name, x in (("a", a), ("b", b)):
        check_dense(check, name, x)
    check(a.dim() in (2, 3), "a must be [m, k] or [batch, m, k], got a {}", a.shape)
    check(b.dim() in (2, 3), "b must be [k, n] or [batch, k, n], got b {}", b.shape)
    check(a.dtype in DTYPES, "a must be float16 or bfloat16, got {}", a.dtype)
    check(b.dtype == a.dtype, "b must have a's dtype {}, got {}", a.dtype, b.dtype)
    check_device(check, "b", b, "a", a)
    k = a.shape[-1]
    check(b.shape[-2] == k, "b must have k = {} rows to match a {}, got b {}", k, a.shape, b.shape)
    batch: tuple[int, ...] = ()
    if a.dim() == 3:
        batch = (a.shape[0],)
        if b.dim() == 3:
            check(b.shape[0] == a.shape[0], "a and b must have the same batch, got a {} and b {}", a.shape, b.shape)
    elif b.dim() == 3:
        batch = (b.shape[0],)
    return batch, a.shape[-2], b.shape[-1], k


def check_gated_columns(check: Checker, b: torch.Tensor) -> None:
    """That B's columns are whole blocks of gate and up."""
    text = "b must have a multiple of {} columns (blocks of {} gate and {} up columns, see pack_gate_up), got b {}"
    check(b.shape[-1] % (2 * GATE_BLOCK) == 0, text, 2 * GATE_BLOCK, GATE_BLOCK, GATE_BLOCK, b.shape)


def check_gemm(
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
    constant_weights: bool = False,
    kernel: str | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """All arguments of minfer::gemm and minfer::gemm.out; raises RuntimeError."""
    check = Checker("gemm")
    batch, m, n, k = check_operands(check, a, b)
    check_scalar(check, "alpha", alpha)
    check_scalar(check, "beta", beta)
    check_activation(check, activation)
    if bias is not None:
        check_bias(check, bias, a, n)
    if c is None:
        check(in_float32(beta) == 0, "c must be given when beta is not 0, got beta = {}", beta)
    else:
        check_c(check, c, a, (*batch, m, n))
    check_output_codes(check, quant, scale, a)
    check_out_dtype(check, out_dtype, quant, a)
    check_kernel(check, kernel)
    if out is not None:
        check_out(check, out, a, (*batch, m, n), out_dtype, quant)
        out_dtype = out.dtype
    return Result(a, (*batch, m, n), output_dtype(quant, out_dtype or a.dtype))


def check_gemm_gated(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    quant: str | None = None,
    scale: torch.Tensor | None = None,
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Result:
    """All arguments of minfer::gemm_gated; raises RuntimeError."""
    check = Checker("gemm_gated")
    batch, m, n, k = check_operands(check, a, b)
    check_gated_columns(check, b)
    check_activation(check, activation)
    if bias is not None:
        check_bias(check, bias, a, n)
    check_output_codes(check, quant, scale, a)
    check_kernel(check, kernel)
    return Result(a, (*batch, m, n // 2), output_dtype(quant, a.dtype))
