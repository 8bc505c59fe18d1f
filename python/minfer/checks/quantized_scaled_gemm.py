"""Argument checks of the W4A8 operators; messages as in :mod:`minfer.checks.common`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..formats.gate_up import GATE_BLOCK
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
    check_dtype,
    check_kernel,
    check_operand,
    check_output_codes,
    check_scalar,
    output_dtype,
)
from .quantized_gemm import check_weight

ACTIVATION_DTYPES = (torch.float8_e4m3fn, torch.int8)
LEAST_GROUP = 128  # of k: a k tile's sums are multiplied by one scale
K_MULTIPLE = 16
WIDEN_FIRST = "w4a16"  # the ``kernel=`` that writes the activations in 16 bits and runs w4a16_gemm's plan


def legal_group_size(group_size: int) -> bool:
    return group_size == -1 or (group_size >= LEAST_GROUP and group_size & (group_size - 1) == 0)


def is_of_rows(scale: torch.Tensor, a: torch.Tensor) -> Any:
    """Whether a scale is one number, or one for each row of a [..., k]: [...] or [..., 1], or numbered through."""
    if scale.numel() == 1:
        return True
    shapes = (tuple(a.shape[:-1]), (math.prod(a.shape[:-1]),))
    shape = tuple(scale.shape)
    return shape in shapes or (len(shape) > 0 and shape[-1] == 1 and shape[:-1] in shapes)


def _check(
    op: str,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    quant: str | None = None,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
    out: torch.Tensor | None = None,
    gated: bool = False,
) -> Result:
    check = Checker(op)
    text = "group_size must be -1 (all of k) or a power of two from {} on, got {}"
    check(legal_group_size(group_size), text, LEAST_GROUP, group_size)
    check_scalar(check, "alpha", alpha)
    for name, x in (("a", a), ("a_scale", a_scale), ("scales", scales)):
        check_dense(check, name, x)
    check(a.dim() >= 1, "a must be [..., k], got a {}", a.shape)
    check(a.dtype in ACTIVATION_DTYPES, "a must be float8_e4m3fn or int8, got {}", a.dtype)
    k = a.shape[-1]
    check(k % K_MULTIPLE == 0, "k must be a multiple of {}, got {}", K_MULTIPLE, k)
    check(scales.dtype in DTYPES, "scales must be float16 or bfloat16, got {}", scales.dtype)
    check_device(check, "scales", scales, "a", a)
    check(scales.dim() == 2, "scales must be [ceil(k / group_size), n], got {}", scales.shape)
    n = scales.shape[1]
    check_weight(check, qweight, scales, None, "int4", group_size, n, k)
    check_dtype(check, "a_scale", a_scale, torch.float32)
    check_device(check, "a_scale", a_scale, "a", a)
    text = "a_scale must be one number, or one for each row, [...] or [..., 1] beside a [..., k], or numbered through, got a {}, a_scale {}"
    check(is_of_rows(a_scale, a), text, a.shape, a_scale.shape)
    if gated:
        text = "scales must have a multiple of {} columns (blocks of {} gate and {} up rows, see pack_gate_up), got {}"
        check(n % (2 * GATE_BLOCK) == 0, text, 2 * GATE_BLOCK, GATE_BLOCK, GATE_BLOCK, scales.shape)
    shape = (*a.shape[:-1], n // 2 if gated else n)
    if c is not None:
        check_c(check, c, a, shape, scales.dtype)
    if bias is not None:
        check_bias(check, bias, a, n, dtype=scales.dtype)
    check_activation(check, activation)
    check_output_codes(check, quant, scale, a)
    dtype = output_dtype(quant, scales.dtype)
    if kernel != WIDEN_FIRST:
        check_kernel(check, kernel, "w4a8")
    if out is not None:
        check_operand(check, "out", out, dtype, shape, "a", a)
        check_apart(check, "out", out)
    return Result(a, shape, dtype)


def check_w4a8_gemm(a, a_scale, qweight, scales, **options) -> Result:
    """All arguments of minfer::w4a8_gemm and its out form; raises RuntimeError."""
    return _check("w4a8_gemm", a, a_scale, qweight, scales, **options)


def check_w4a8_gemm_gated(a, a_scale, qweight, scales, *, activation="silu", **options) -> Result:
    """All arguments of minfer::w4a8_gemm_gated; raises RuntimeError."""
    return _check("w4a8_gemm_gated", a, a_scale, qweight, scales, activation=activation, gated=True, **options)


def check_usable(what: str, *, zeros: torch.Tensor | None, perm: torch.Tensor | None, w4_format: str, group_size: int) -> None:
    """That a weight of 4 bits can be multiplied by activations of 8; ValueError."""
    if zeros is not None or perm is not None or w4_format != "int4" or not legal_group_size(group_size):
        has = ", ".join(
            text
            for there, text in (
                (w4_format != "int4", w4_format),
                (zeros is not None, "zero points"),
                (perm is not None, "act-order"),
                (not legal_group_size(group_size), f"groups of {group_size}"),
            )
            if there
        )
        raise ValueError(
            f"{what}: takes int4 weights without zero points and act-order in groups of {LEAST_GROUP} or more, this one has {has}"
        )
