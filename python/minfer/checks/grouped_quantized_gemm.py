"""Argument checks of grouped GEMM with 4-bit weights, messages as in :mod:`minfer.checks.common`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import Checker, Result, check_output_codes, output_dtype
from .grouped_gemm import (
    _check_activation,
    _check_experts,
    _check_gate,
    _check_grouped_kernel,
    _check_layer,
    _check_operand,
    _check_sorted,
    _check_sorted_out,
    _check_tokens,
    check_rows_of_experts,
)
from .quantized_gemm import check_format, check_group_size, check_scales, check_weight

FAMILY = "moe_w4a16"  # of the kernels


def _check_expert_weights(
    check: Checker,
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    alpha: Tensor | None,
    name: str,
    group_size: int,
    shape: tuple,
    arguments: tuple[str, str, str, str] = ("qweight", "scales", "zeros", "alpha"),
) -> None:
    """All of one argument's tensors, for ``shape`` (experts, n, k)."""
    experts, n, k = shape
    check_scales(check, a, scales, name, arguments[1])
    check_weight(check, qweight, scales, zeros, name, group_size, n, k, (experts,), arguments[:3])
    if alpha is not None:
        _check_operand(check, arguments[3], alpha, a, torch.float32, (experts,))
    for argument, x in zip(arguments, (qweight, scales, zeros), strict=False):
        check(x is None or x.is_contiguous(), "{} must be contiguous, got a view of {}", argument, None if x is None else x.shape)


def _experts_and_rows(check: Checker, argument: str, scales: Tensor) -> tuple:
    """(experts, n), which scales say."""
    check(scales.dim() == 3, "{} must be [experts, ceil(k / group_size), n], got {}", argument, scales.shape)
    _check_experts(check, argument, scales, scales.shape[0])
    return scales.shape[0], scales.shape[2]


def check_grouped_w4a16_gemm(
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor,
    *,
    group_size: int = 128,
    w4_format: str = "int4",
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """All arguments but values; raises RuntimeError."""
    check = Checker("grouped_w4a16_gemm")
    check_format(check, 4, w4_format)
    check_group_size(check, group_size, w4_format)
    rows = _check_sorted(check, a, gather)
    experts, n = _experts_and_rows(check, "scales", scales)
    _check_expert_weights(check, a, qweight, scales, zeros, alpha, w4_format, group_size, (experts, n, a.shape[1]))
    if bias is not None:
        _check_operand(check, "bias", bias, a, a.dtype, (experts, n))
    _check_activation(check, activation, gated)
    if gated:
        _check_gate(check, "scales", "columns", scales, n, "blocks")
    if row_scale is not None:
        _check_operand(check, "row_scale", row_scale, a, torch.float32, (rows,))
    _check_operand(check, "offsets", offsets, a, torch.int32, (experts,))
    check_output_codes(check, quant, scale, a)
    _check_grouped_kernel(check, kernel, FAMILY)
    columns = n // 2 if gated else n
    if out is not None:
        _check_sorted_out(check, out, a, rows, columns, output_dtype(quant, a.dtype))
    return Result(a, (rows, columns), output_dtype(quant, a.dtype))


def check_grouped_w4a16_gemm_values(
    a: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, offsets: Tensor, *, gather: Tensor | None = None, **_: Any
) -> None:
    check_rows_of_experts("grouped_w4a16_gemm", a, offsets, gather)


def check_moe_ffn_w4a16(
    x: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w13_zeros: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor,
    w2_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    *,
    group_size: int = 128,
    w4_format: str = "int4",
    alpha13: Tensor | None = None,
    alpha2: Tensor | None = None,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Result:
    """All arguments but values; raises RuntimeError."""
    check = Checker("moe_ffn_w4a16")
    check_format(check, 4, w4_format)
    check_group_size(check, group_size, w4_format)
    _check_tokens(check, x)
    tokens, hidden = x.shape
    experts, n = _experts_and_rows(check, "w13_scales", w13_scales)
    _check_gate(check, "w13_scales", "columns", w13_scales, n, "blocks")
    form = (w4_format, group_size)
    names13, names2 = (("w13", "w13_scales", "w13_zeros", "alpha13"), ("w2", "w2_scales", "w2_zeros", "alpha2"))
    _check_expert_weights(check, x, w13, w13_scales, w13_zeros, alpha13, *form, (experts, n, hidden), names13)
    _check_expert_weights(check, x, w2, w2_scales, w2_zeros, alpha2, *form, (experts, hidden, n // 2), names2)
    _check_layer(check, x, experts, n, weights, ids, b13, b2)
    _check_activation(check, activation, gated=True)
    return Result(x, (tokens, hidden), x.dtype)
