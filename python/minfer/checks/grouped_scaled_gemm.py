"""Argument checks of grouped GEMM of 8-bit operands, messages as in :mod:`minfer.checks.common`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .common import DTYPES, Checker, Result, check_addend_type, check_dense, check_device, check_shape
from .grouped_gemm import (
    _check_activation,
    _check_epilogue,
    _check_gate,
    _check_layer_weights,
    _check_masked,
    _check_masked_out,
    _check_operand,
    _check_routes,
    _check_sorted,
    _check_sorted_out,
    _check_weight,
    check_rows_of_experts,
)
from .scaled_gemm import FP8, blocks_of, check_fp8_output, fp8_output, narrow_dtype

FAMILY = "moe_scaled"  # of the kernels
GROUPS = (128, 64, 32)  # of k, that a scale of activations may be of


# ---- scales --------------------------------------------------------------------------------------------------------------------------


def _groups_of(k: Any, group: int) -> Any:
    return (k + group - 1) // group


def _is_of_rows(scale: Tensor, rows: Sequence[Any]) -> bool:
    """Whether it is one number, or has ``rows`` for its shape, or [*rows, 1]."""
    if scale.dim() <= len(rows) + 1 and scale.numel() == 1:
        return True
    return list(scale.shape) in (list(rows), [*rows, 1])


def group_of_scale(scale: Tensor, rows: Sequence[Any], k: Any) -> int | None:
    """How much of k a scale of activations is of, the largest of 128, 64 and 32 that gives its number of columns; None: it is one number,
    one for each row, or of another shape. ``rows``: the activations' shape without k."""
    if scale.dim() != len(rows) + 1 or list(scale.shape[:-1]) != list(rows):
        return None
    if scale.shape[-1] == 1 and scale.dtype != torch.uint8:  # a number for each row; exponents are of blocks
        return None
    return next((group for group in GROUPS if scale.shape[-1] == _groups_of(k, group)), None)


def scale_blocks(n: Any, gated: bool) -> Any:
    """How many blocks of 128 an expert's n columns have; gated, those of the gate and those of up."""
    return 2 * blocks_of(n // 2) if gated else blocks_of(n)


def kind_of_scale(scale: Tensor, experts: Any, n: Any, k: Any, gated: bool, blocks: bool = True) -> str | None:
    """Of what a scale of experts' weights is: "all", "expert", "column" or, where there may be such, "block"; None: of nothing known."""
    shape = list(scale.shape)
    if len(shape) <= 1 and scale.numel() == 1:
        return "all"
    if shape in ([experts], [experts, 1]):
        return "expert"
    if shape in ([experts, n], [experts, n, 1]):
        return "column"
    return "block" if blocks and shape == [experts, scale_blocks(n, gated), blocks_of(k)] else None


def _check_scale_type(check: Checker, name: str, scale: Tensor, exponents: bool, of_blocks: bool) -> None:
    """exponents: those of blocks may be such."""
    legal = (torch.float32, torch.uint8) if exponents and of_blocks else (torch.float32,)
    text = "{} must be float32" + (" (of blocks also uint8, exponents of two)" if exponents else "") + ", got {}"
    check(scale.dtype in legal, text, name, scale.dtype)


def _check_row_scale(check: Checker, name: str, scale: Tensor, x: Tensor, x_name: str) -> None:
    """A scale of activations x [.., k]."""
    check_dense(check, name, scale)
    check_device(check, name, scale, x_name, x)
    *rows, k = x.shape
    group = group_of_scale(scale, rows, k)
    forms = [[*rows, _groups_of(k, group)] for group in GROUPS]
    text = "{} must be one number, {}, {} or, of blocks of k, {}, {} or {}, got {}"
    check(_is_of_rows(scale, rows) or group is not None, text, name, rows, [*rows, 1], *forms, scale.shape)
    _check_scale_type(check, name, scale, x.dtype == FP8, group is not None)


def _check_expert_scale(
    check: Checker, name: str, scale: Tensor, like: Tensor, other: str, shape: tuple[Any, Any, Any], dtype: torch.dtype, gated: bool
) -> None:
    """A scale of weights of ``dtype`` and ``shape`` (experts, n, k)."""
    experts, n, k = shape
    check_dense(check, name, scale)
    check_device(check, name, scale, other, like)
    kind = kind_of_scale(scale, experts, n, k, gated, dtype == FP8)
    text = "{} must be one number, [{}], [{}, 1], [{}, {}] or [{}, {}, 1]"
    names = (name, experts, experts, experts, n, experts, n)
    if dtype == FP8:
        text, names = text + " or, of blocks, [{}, {}, {}]", (*names, experts, scale_blocks(n, gated), blocks_of(k))
    check(kind is not None, text + ", got {}", *names, scale.shape)
    _check_scale_type(check, name, scale, dtype == FP8, kind == "block")


# ---- products ------------------------------------------------------------------------------------------------------------------------


def _check_bias(check: Checker, name: str, bias: Tensor | None, shape: tuple[Any, Any], d: torch.dtype, like: Tensor, other: str) -> None:
    if bias is not None:
        check_shape(check, name, bias, shape)
        check_addend_type(check, name, bias, like, other, narrow_dtype(d, bias, None))


def _check_product(
    check: Checker,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    gated: bool,
    gate_layout: str,
    kernel: str | None,
    d: torch.dtype,
) -> tuple[Any, Any]:
    """What sorted and masked rows have in common; returns (experts, columns of the output)."""
    experts, n = _check_weight(check, a, b, a.shape[-1])
    columns = _check_epilogue(check, b, activation, gated, gate_layout, kernel, FAMILY)
    _check_row_scale(check, "a_scale", a_scale, a, "a")
    _check_expert_scale(check, "b_scale", b_scale, a, "a", (experts, n, a.shape[-1]), a.dtype, gated)
    _check_bias(check, "bias", bias, (experts, n), d, a, "a")
    return experts, columns


def _check_sorted_product(
    op: str,
    own: torch.dtype,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    d: torch.dtype,
    bias: Tensor | None,
    gather: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    gated: bool,
    gate_layout: str,
    kernel: str | None,
    out: Tensor | None,
) -> Result:
    """Of codes of the type ``own``, with results of the type ``d``."""
    check = Checker(op)
    rows = _check_sorted(check, a, gather, own)
    experts, columns = _check_product(check, a, b, a_scale, b_scale, bias, activation, gated, gate_layout, kernel, d)
    if row_scale is not None:
        _check_operand(check, "row_scale", row_scale, a, torch.float32, (rows,))
    _check_operand(check, "offsets", offsets, a, torch.int32, (experts,))
    if out is not None:
        _check_sorted_out(check, out, a, rows, columns, d)
    return Result(a, (rows, columns), d)


def _check_masked_product(
    op: str,
    own: torch.dtype,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    counts: Tensor,
    d: torch.dtype,
    bias: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    gated: bool,
    gate_layout: str,
    kernel: str | None,
    out: Tensor | None,
) -> Result:
    check = Checker(op)
    _check_masked(check, a, b, own)
    experts, columns = _check_product(check, a, b, a_scale, b_scale, bias, activation, gated, gate_layout, kernel, d)
    if row_scale is not None:
        _check_operand(check, "row_scale", row_scale, a, torch.float32, (experts, a.shape[1]))
    _check_operand(check, "counts", counts, a, torch.int32, (experts,))
    if out is not None:
        _check_masked_out(check, out, a, columns, d)
    return Result(a, (experts, a.shape[1], columns), d)


def _fp8_result(op: str, a: Tensor, out_dtype: torch.dtype | None, out_scale: Tensor | None, out: Tensor | None) -> torch.dtype:
    d = fp8_output(out.dtype if out is not None and out_dtype is None else out_dtype, out_scale)
    check_fp8_output(Checker(op), d, out_scale, a, takes_float32=False)
    return d


def _check_16bit_result(check: Checker, d: torch.dtype) -> None:
    check(d in DTYPES, "out_dtype must be float16 or bfloat16, got {}", d)


def _int8_result(op: str, out_dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    d = out_dtype or (torch.bfloat16 if out is None else out.dtype)
    _check_16bit_result(Checker(op), d)
    return d


def check_grouped_gemm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    fast_accum: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """All arguments but values; raises RuntimeError."""
    op = "grouped_gemm_fp8"
    d = _fp8_result(op, a, out_dtype, out_scale, out)
    rest = (bias, gather, row_scale, activation, gated, gate_layout, kernel, out)
    return _check_sorted_product(op, FP8, a, b, a_scale, b_scale, offsets, d, *rest)


def check_grouped_gemm_int8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """All arguments but values; raises RuntimeError."""
    op = "grouped_gemm_int8"
    d = _int8_result(op, out_dtype, out)
    rest = (bias, gather, row_scale, activation, gated, gate_layout, kernel, out)
    return _check_sorted_product(op, torch.int8, a, b, a_scale, b_scale, offsets, d, *rest)


def check_grouped_gemm_fp8_values(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, *, gather: Tensor | None = None, **_: Any
) -> None:
    check_rows_of_experts("grouped_gemm_fp8", a, offsets, gather)


def check_grouped_gemm_int8_values(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, *, gather: Tensor | None = None, **_: Any
) -> None:
    check_rows_of_experts("grouped_gemm_int8", a, offsets, gather)


def check_grouped_gemm_fp8_masked(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    fast_accum: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """All arguments; raises RuntimeError."""
    op = "grouped_gemm_fp8_masked"
    d = _fp8_result(op, a, out_dtype, out_scale, out)
    rest = (bias, row_scale, activation, gated, gate_layout, kernel, out)
    return _check_masked_product(op, FP8, a, b, a_scale, b_scale, counts, d, *rest)


def check_grouped_gemm_int8_masked(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """All arguments; raises RuntimeError."""
    op = "grouped_gemm_int8_masked"
    d = _int8_result(op, out_dtype, out)
    rest = (bias, row_scale, activation, gated, gate_layout, kernel, out)
    return _check_masked_product(op, torch.int8, a, b, a_scale, b_scale, counts, d, *rest)


# ---- layers --------------------------------------------------------------------------------------------------------------------------


def layer_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Of a layer's result: where nothing says another that of x, of codes bfloat16."""
    return out_dtype or (torch.bfloat16 if x.dtype in (FP8, torch.int8) else x.dtype)


def _check_layer(
    op: str,
    own: torch.dtype,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    x_scale: Tensor | None,
    activation: str,
    b13: Tensor | None,
    b2: Tensor | None,
    gate_layout: str,
    out_dtype: torch.dtype | None,
) -> Result:
    check = Checker(op)
    check(x.dim() == 2, "x must be [tokens, hidden], got {}", x.shape)
    if x_scale is None:
        check(x.dtype in DTYPES, "x must be float16 or bfloat16 where x_scale is None, got {}", x.dtype)
    else:
        check(x.dtype == own, "x must be {} where x_scale is given, got {}", own, x.dtype)
    hidden = x.shape[1]
    experts, n = _check_layer_weights(check, x, w13, w2, own)
    _check_activation(check, activation, gated=True)
    _check_gate(check, "w13", "rows", w13, n, gate_layout)
    if x_scale is not None:
        _check_row_scale(check, "x_scale", x_scale, x, "x")
    _check_expert_scale(check, "w13_scale", w13_scale, x, "x", (experts, n, hidden), own, True)
    _check_expert_scale(check, "w2_scale", w2_scale, x, "x", (experts, hidden, n // 2), own, False)
    _check_routes(check, x, weights, ids)
    d = layer_dtype(x, out_dtype)
    _check_16bit_result(check, d)
    _check_bias(check, "b13", b13, (experts, n), d, x, "x")
    _check_bias(check, "b2", b2, (experts, hidden), d, x, "x")
    return Result(x, x.shape, d)


def check_moe_ffn_fp8(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    x_scale: Tensor | None = None,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> Result:
    """All arguments; raises RuntimeError."""
    rest = (x_scale, activation, b13, b2, gate_layout, out_dtype)
    return _check_layer("moe_ffn_fp8", FP8, x, w13, w2, w13_scale, w2_scale, weights, ids, *rest)


def check_moe_ffn_int8(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    x_scale: Tensor | None = None,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
) -> Result:
    """All arguments; raises RuntimeError."""
    rest = (x_scale, activation, b13, b2, gate_layout, out_dtype)
    return _check_layer("moe_ffn_int8", torch.int8, x, w13, w2, w13_scale, w2_scale, weights, ids, *rest)
