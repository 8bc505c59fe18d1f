"""Argument checks of the GEMMs of 8-bit operands; messages as in :mod:`minfer.checks.common`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .common import (
    DTYPES,
    Checker,
    Result,
    check_activation,
    check_apart,
    check_bias,
    check_c,
    check_dense,
    check_device,
    check_kernel,
    check_operand,
    check_scalar,
    check_tensor,
    in_float32,
)
from .gemm import check_gated_columns

BLOCK = 128  # of k, and of a weight's columns, to a scale
FP8 = torch.float8_e4m3fn


def blocks_of(extent: Any) -> Any:
    return (extent + BLOCK - 1) // BLOCK


def _check_operands(check: Checker, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Returns (rows of A, n, k)."""
    for name, x in (("a", a), ("b", b)):
        check_dense(check, name, x)
    check(a.dim() >= 2, "a must be [.., m, k], got {}", a.shape)
    check(b.dim() == 2, "b must be [k, n], got {}", b.shape)
    check(a.dtype == dtype, "a must be {}, got {}", dtype, a.dtype)
    check(b.dtype == dtype, "b must have a's dtype {}, got {}", dtype, b.dtype)
    check_device(check, "b", b, "a", a)
    k = a.shape[-1]
    check(b.shape[0] == k, "b must have k = {} rows to match a {}, got b {}", k, a.shape, b.shape)
    return math.prod(a.shape[:-1]), b.shape[1], k


def flat_scale(scale: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Scales of [.., m], [.., m, 1] or [.., m, blocks] as those of A's rows one by one; others as they are."""
    modes = a.dim() - 1
    if modes == 1 or scale.dim() not in (modes, modes + 1) or scale.shape[:modes] != a.shape[:modes]:
        return scale
    return scale.reshape(math.prod(scale.shape[:modes]), -1 if scale.numel() else math.prod(scale.shape[modes:]))


def is_of_blocks(scale: torch.Tensor, lines: Any, block_lines: Any, k: Any, halves: bool = False) -> bool:
    """Whether a scale of ``lines`` rows or columns is one of blocks, of 128 of k each; not where it is one number, or one for each of the
    lines. halves: those of gates and those of ups, [2, ..]."""
    if halves:
        return scale.dim() == 3 and scale.shape[0] == 2 and scale.shape[1] == block_lines and scale.shape[2] == blocks_of(k)
    if scale.dim() != 2 or scale.numel() == 1 or (scale.shape[1] == 1 and scale.shape[0] == lines):
        return False
    return scale.shape[0] == block_lines and scale.shape[1] == blocks_of(k)


def _is_of_lines(x: torch.Tensor, lines: Any) -> bool:
    """Whether it is one number, or [lines] or [lines, 1]."""
    if x.dim() > 2:
        return False
    return x.numel() == 1 or ((x.dim() == 1 or (x.dim() == 2 and x.shape[1] == 1)) and x.shape[0] == lines)


def check_scale(
    check: Checker,
    name: str,
    scale: torch.Tensor,
    lines: Any,
    block_lines: Any,
    k: Any,
    blocks: bool,
    a: torch.Tensor,
    halves: bool = False,
) -> None:
    """That ``scale`` is one number, one for each of ``lines``, or, where ``blocks`` may be, of blocks."""
    check_dense(check, name, scale)
    check_device(check, name, scale, "a", a)
    of_blocks = blocks and is_of_blocks(scale, lines, block_lines, k, halves)
    form = ", or, of blocks, [2, {1}, {2}]" if halves else ", or, of blocks, [{1}, {2}]"
    text = f"{name} must be one number, [{{0}}] or [{{0}}, 1]" + (form if blocks else "") + ", got {3}"
    check(_is_of_lines(scale, lines) or of_blocks, text, lines, block_lines, blocks_of(k), scale.shape)
    legal = (torch.float32, torch.uint8) if of_blocks else (torch.float32,)
    text = "{} must be float32" + (" (of blocks also uint8, exponents of two)" if blocks else "") + ", got {}"
    check(scale.dtype in legal, text, name, scale.dtype)


def narrow_dtype(d: torch.dtype, bias: torch.Tensor | None, c: torch.Tensor | None) -> torch.dtype:
    """The 16-bit dtype that c and bias may have: D's, else that of the first of bias and c that has 16 bits."""
    for dtype in (d, None if bias is None else bias.dtype, None if c is None else c.dtype):
        if dtype in DTYPES:
            return dtype
    return torch.bfloat16


def _check_addends(
    check: Checker, a: torch.Tensor, shape: Sequence[Any], d: torch.dtype, c: torch.Tensor | None, bias: torch.Tensor | None, beta: Any
) -> None:
    narrow = narrow_dtype(d, bias, c)
    if bias is not None:
        check_bias(check, bias, a, shape[-1], dtype=narrow)
    if c is None:
        check(in_float32(beta) == 0, "c must be given when beta is not 0, got beta = {}", beta)
    else:
        check_c(check, c, a, shape, narrow)


def _check_given(check: Checker, out: torch.Tensor, a: torch.Tensor, shape: Sequence[Any], dtype: torch.dtype) -> None:
    check_operand(check, "out", out, dtype, shape, "a", a)
    check_apart(check, "out", out)


def fp8_output(out_dtype: torch.dtype | None, out_scale: torch.Tensor | None) -> torch.dtype:
    return out_dtype or (torch.bfloat16 if out_scale is None else FP8)


def _check_scaled(
    check: Checker, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, gated: bool = False
):
    """Returns the product's shape, [.., m, n]."""
    m, n, k = _check_operands(check, a, b, dtype)
    if gated:
        check_gated_columns(check, b)
    check_dense(check, "a_scale", a_scale)
    check_scale(check, "a_scale", flat_scale(a_scale, a), m, m, k, dtype == FP8, a)
    check_scale(check, "b_scale", b_scale, n, blocks_of(n // 2 if gated else n), k, dtype == FP8, a, gated)
    return (*a.shape[:-1], n)


def _check_zeros(
    check: Checker, a: torch.Tensor, n: Any, a_zero: torch.Tensor | None, b_sums: torch.Tensor | None, dtype: torch.dtype
) -> None:
    check((a_zero is None) == (b_sums is None), "a_zero and b_sums must be given together")
    if a_zero is None or b_sums is None:
        return
    check(dtype != torch.int32, "a_zero is not for a D of int32, which holds the sums themselves")
    check_tensor(check, "a_zero", a_zero, torch.int32, "a", a)
    m = math.prod(a.shape[:-1])
    check(_is_of_lines(flat_scale(a_zero, a), m), "a_zero must be one number, [{0}] or [{0}, 1], got {1}", m, a_zero.shape)
    check_operand(check, "b_sums", b_sums, torch.int32, (n,), "a", a)


def check_fp8_output(
    check: Checker, dtype: torch.dtype, out_scale: torch.Tensor | None, a: torch.Tensor, *, takes_float32: bool = True
) -> None:
    legal = (*DTYPES, FP8, *((torch.float32,) if takes_float32 else ()))
    names = "float16, bfloat16, float32 or float8_e4m3fn" if takes_float32 else "float16, bfloat16 or float8_e4m3fn"
    check(dtype in legal, "out_dtype must be {}, got {}", names, dtype)
    text = "out_scale must be given for a D of float8_e4m3fn, and for no other, got out_dtype {}"
    check((out_scale is not None) == (dtype == FP8), text, dtype)
    if out_scale is not None:
        check_operand(check, "out_scale", out_scale, torch.float32, (1,), "a", a)


def check_gemm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    out_scale: torch.Tensor | None = None,
    fast_accum: bool = False,
    constant_weights: bool = False,
    kernel: str | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """All arguments of minfer::gemm_fp8 and its out form; raises RuntimeError."""
    check = Checker("gemm_fp8")
    dtype = fp8_output(out.dtype if out is not None and out_dtype is None else out_dtype, out_scale)
    shape = _check_scaled(check, a, b, a_scale, b_scale, FP8)
    check_fp8_output(check, dtype, out_scale, a)
    check_scalar(check, "beta", beta)
    check_activation(check, activation)
    _check_addends(check, a, shape, dtype, c, bias, beta)
    check_kernel(check, kernel, "scaled_gemm")
    if out is not None:
        _check_given(check, out, a, shape, dtype)
    return Result(a, shape, dtype)


def check_gemm_fp8_gated(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    out_scale: torch.Tensor | None = None,
    fast_accum: bool = False,
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Result:
    """All arguments of minfer::gemm_fp8_gated; raises RuntimeError."""
    check = Checker("gemm_fp8_gated")
    dtype = fp8_output(out_dtype, out_scale)
    shape = _check_scaled(check, a, b, a_scale, b_scale, FP8, gated=True)
    check_fp8_output(check, dtype, out_scale, a)
    check_activation(check, activation)
    _check_addends(check, a, shape, dtype, None, bias, 0.0)
    check_kernel(check, kernel, "scaled_gemm")
    return Result(a, (*shape[:-1], shape[-1] // 2), dtype)


def check_gemm_int8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    a_zero: torch.Tensor | None = None,
    b_sums: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    kernel: str | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """All arguments of minfer::gemm_int8 and its out form; raises RuntimeError."""
    check = Checker("gemm_int8")
    dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)
    legal = (*DTYPES, torch.float32, torch.int32)
    check(dtype in legal, "out_dtype must be float16, bfloat16, float32 or int32, got {}", dtype)
    if dtype == torch.int32:
        alone = c is None and bias is None and activation == "none"
        check(alone, "c, bias and activation are not for a D of int32, which holds the sums themselves")
    shape = _check_scaled(check, a, b, a_scale, b_scale, torch.int8)
    _check_zeros(check, a, shape[-1], a_zero, b_sums, dtype)
    check_scalar(check, "beta", beta)
    check_activation(check, activation)
    _check_addends(check, a, shape, dtype, c, bias, beta)
    check_kernel(check, kernel, "scaled_gemm")
    if out is not None:
        _check_given(check, out, a, shape, dtype)
    return Result(a, shape, dtype)


def check_gemm_int8_gated(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    a_zero: torch.Tensor | None = None,
    b_sums: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Result:
    """All arguments of minfer::gemm_int8_gated; raises RuntimeError."""
    check = Checker("gemm_int8_gated")
    dtype = out_dtype or torch.bfloat16
    check(dtype in (*DTYPES, torch.float32), "out_dtype must be float16, bfloat16 or float32, got {}", dtype)
    shape = _check_scaled(check, a, b, a_scale, b_scale, torch.int8, gated=True)
    _check_zeros(check, a, shape[-1], a_zero, b_sums, dtype)
    check_activation(check, activation)
    _check_addends(check, a, shape, dtype, None, bias, 0.0)
    check_kernel(check, kernel, "scaled_gemm")
    return Result(a, (*shape[:-1], shape[-1] // 2), dtype)
