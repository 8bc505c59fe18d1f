"""Argument checks of a norm and the GEMM behind it, as in :mod:`minfer.checks.common`, in the order of ``cpp/torch/norm_gemm.cpp``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._core.registry import kernel_names
from . import quantized_gemm
from .common import (
    DTYPES,
    Checker,
    Result,
    check_activation,
    check_apart,
    check_bias,
    check_dense,
    check_device,
    check_eps,
    check_launch_text,
    check_operand,
    check_scalar,
)
from .gemm import check_gated_columns

ONE_LAUNCH, TWO_LAUNCHES = "one_launch", "two_launches"  # the ``kernel=`` that says how many, and leaves the kernels to the plan


def _check_norm(check: Checker, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, residual: Tensor | None) -> None:
    check_dense(check, "x", x)
    check(x.dtype in DTYPES, "x must be float16 or bfloat16, got {}", x.dtype)
    check(x.dim() >= 1, "x must have at least one mode, got {}", x.shape)
    if weight is not None:
        check_operand(check, "norm_weight", weight, x.dtype, (x.shape[-1],), "x", x)
    check_eps(check, eps)
    check_scalar(check, "weight_offset", weight_offset)
    if residual is not None:
        check_operand(check, "residual", residual, x.dtype, x.shape, "x", x)
        check_apart(check, "residual", residual)


def _check_kernel(check: Checker, kernel: str | None) -> None:
    if kernel is None or kernel in (ONE_LAUNCH, TWO_LAUNCHES) or kernel in kernel_names("norm_gemm"):
        return
    name, at, launch = kernel.partition("@")
    known = name in kernel_names("gemm")
    check(known, "kernel must be {}, {}, or a kernel of norm_gemm or gemm, got '{}'", ONE_LAUNCH, TWO_LAUNCHES, kernel)
    if at:
        check_launch_text(check, launch)


def _check_dense(
    op: str,
    gated: bool,
    x: Tensor,
    norm_weight: Tensor | None,
    b: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    bias: Tensor | None = None,
    activation: str = "none",
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Result:
    check = Checker(op)
    _check_norm(check, x, norm_weight, eps, weight_offset, residual)
    k = x.shape[-1]
    check_dense(check, "b", b)
    check(b.dim() == 2, "b must be [k, n], got b {}", b.shape)
    check(b.dtype == x.dtype, "b must have x's dtype {}, got {}", x.dtype, b.dtype)
    check_device(check, "b", b, "x", x)
    check(b.shape[0] == k, "b must have k = {} rows to match x {}, got b {}", k, x.shape, b.shape)
    n = b.shape[1]
    if gated:
        check_gated_columns(check, b)
    if bias is not None:
        check_bias(check, bias, x, n, "x")
    check_activation(check, activation)
    _check_kernel(check, kernel)
    return Result(x, (*x.shape[:-1], n // 2 if gated else n), x.dtype)


def check_rms_norm_gemm(x: Tensor, norm_weight: Tensor | None, b: Tensor, eps: float = 1e-6, **options: Any) -> Result:
    return _check_dense("rms_norm_gemm", False, x, norm_weight, b, eps, **options)


def check_rms_norm_gemm_gated(x: Tensor, norm_weight: Tensor | None, b: Tensor, eps: float = 1e-6, **options: Any) -> Result:
    return _check_dense("rms_norm_gemm_gated", True, x, norm_weight, b, eps, **options)


# ---- quantised weights ---------------------------------------------------------------------------------------------------------------


def _check_quantized(
    op: str,
    bits: int,
    gated: bool,
    x: Tensor,
    norm_weight: Tensor | None,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    eps: float,
    name: str,
    group_size: int,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    kernel: str | None = None,
    **options: Any,
) -> Result:
    _check_norm(Checker(op), x, norm_weight, eps, weight_offset, residual)
    check = quantized_gemm.check_gated if gated else quantized_gemm.check_gemm
    own = None if kernel == TWO_LAUNCHES else kernel
    shape = check(op, bits, x, qweight, scales, zeros, name, group_size, kernel=own, a_name="x", **options)
    return Result(x, shape.out, x.dtype)


def check_rms_norm_w4a16_gemm(x, norm_weight, qweight, scales, zeros=None, eps=1e-6, *, group_size=128, w4_format="int4", **options):
    weight = (qweight, scales, zeros, eps, w4_format, group_size)
    return _check_quantized("rms_norm_w4a16_gemm", 4, False, x, norm_weight, *weight, **options)


def check_rms_norm_w4a16_gemm_gated(x, norm_weight, qweight, scales, zeros=None, eps=1e-6, *, group_size=128, w4_format="int4", **options):
    weight = (qweight, scales, zeros, eps, w4_format, group_size)
    return _check_quantized("rms_norm_w4a16_gemm_gated", 4, True, x, norm_weight, *weight, **options)


def check_rms_norm_w8a16_gemm(x, norm_weight, qweight, scales, zeros=None, eps=1e-6, *, group_size=-1, w8_format="int8", **options):
    weight = (qweight, scales, zeros, eps, w8_format, group_size)
    return _check_quantized("rms_norm_w8a16_gemm", 8, False, x, norm_weight, *weight, **options)


def check_rms_norm_w8a16_gemm_gated(x, norm_weight, qweight, scales, zeros=None, eps=1e-6, *, group_size=-1, w8_format="int8", **options):
    weight = (qweight, scales, zeros, eps, w8_format, group_size)
    return _check_quantized("rms_norm_w8a16_gemm_gated", 8, True, x, norm_weight, *weight, **options)
