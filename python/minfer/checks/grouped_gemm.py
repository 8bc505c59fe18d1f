"""Argument checks of grouped GEMM, shared by its CPU kernels and its fakes; messages as in :mod:`minfer.checks.common`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .common import (
    ACTIVATIONS,
    DTYPES,
    Checker,
    Result,
    check_device,
    check_dtype,
    check_kernel,
    check_output_codes,
    check_shape,
    output_dtype,
    overlaps_itself,
)

MAX_EXPERTS = 512
SWIGLUOAI = "swigluoai"
GATE_LAYOUTS = ("halves", "alternating", "blocks")


def _check_operand(check: Checker, name: str, x: Tensor, like: Tensor, dtype: torch.dtype, shape: tuple, other: str = "a") -> None:
    """Shape, dtype, and that it is on the device of ``like``, the operand called ``other``."""
    check_shape(check, name, x, shape)
    check_dtype(check, name, x, dtype)
    check_device(check, name, x, other, like)


def _check_experts(check: Checker, name: str, weight: Tensor, experts) -> None:
    for good in (experts >= 1, experts <= MAX_EXPERTS):
        check(good, "{} must have 1 to {} experts, got {}", name, MAX_EXPERTS, weight.shape)


def _check_activation(check: Checker, activation: str, gated: bool) -> None:
    if activation == SWIGLUOAI:
        check(gated, "activation swigluoai needs gated = True")
    else:
        names = ", ".join((*ACTIVATIONS, SWIGLUOAI) if gated else ACTIVATIONS)
        check(activation in ACTIVATIONS, "activation must be one of {}, got '{}'", names, activation)


def _check_gate(check: Checker, name: str, extent: str, weight: Tensor, n, gate_layout: str) -> None:
    """Of a gated weight with n gate and up rows, which ``extent`` calls columns or rows."""
    check(gate_layout in GATE_LAYOUTS, "gate_layout must be halves, alternating or blocks, got '{}'", gate_layout)
    check(n % 2 == 0, "{} must have an even number of {} when gated, got {}", name, extent, weight.shape)
    if gate_layout == "blocks":
        rule = f"{{}} must have a multiple of 16 {extent} in blocks of 8 gate and 8 up {extent}, got {{}}"
        check(n % 16 == 0, rule, name, weight.shape)


def _check_grouped_kernel(check: Checker, kernel: str | None, family: str) -> None:
    if kernel is not None:
        name, at, option = kernel.partition("@")
        check_kernel(check, name, family)
        key, _, value = option.partition("=")
        check(not at or key == "gather_first", "kernel option '{}' is not known; expected gather_first", key)
        check(not at or value in ("0", "1"), "kernel option gather_first must be 0 or 1, got '{}'", value)


def _check_activations(check: Checker, name: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
    """That they are codes of ``dtype``; None: 16-bit."""
    if dtype is None:
        check(x.dtype in DTYPES, "{} must be float16 or bfloat16, got {}", name, x.dtype)
    else:
        check_dtype(check, name, x, dtype)


def _check_sorted(check: Checker, a: Tensor, gather: Tensor | None, dtype: torch.dtype | None = None):
    """a [rows, k], 16-bit or of ``dtype``, and its gather; returns the product's rows."""
    check(a.dim() == 2, "a must be [rows, k], got a {}", a.shape)
    _check_activations(check, "a", a, dtype)
    if gather is None:
        return a.shape[0]
    check(gather.dim() == 1, "gather must be [rows], got {}", gather.shape)
    _check_operand(check, "gather", gather, a, torch.int32, (gather.shape[0],))
    return gather.shape[0]


def _check_masked(check: Checker, a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> None:
    """a [experts, max_rows, k], 16-bit or of ``dtype``, beside b."""
    text = "a must be [experts, max_rows, k] and b [experts, k, n], got a {} and b {}"
    check(a.dim() == 3 and b.dim() == 3, text, a.shape, b.shape)
    check(a.shape[0] == b.shape[0], text, a.shape, b.shape)
    _check_activations(check, "a", a, dtype)


def _check_sorted_out(check: Checker, out: Tensor, a: Tensor, rows, columns, dtype: torch.dtype) -> None:
    _check_operand(check, "out", out, a, dtype, (rows, columns))
    contiguous = out.stride(1) == 1 or columns <= 1
    check(contiguous, "out must have unit stride along its rows, got strides {} and {}", out.stride(0), out.stride(1))
    check(rows <= 1 or out.stride(0) >= columns, "out's rows must not overlap, got a row stride of {}", out.stride(0))


def _check_masked_out(check: Checker, out: Tensor, a: Tensor, columns, dtype: torch.dtype) -> None:
    experts, max_rows = a.shape[:2]
    _check_operand(check, "out", out, a, dtype, (experts, max_rows, columns))
    row = out.stride(1) if max_rows > 1 else out.stride(0) if experts > 1 else columns  # of slabs of one row, an expert's
    walks = (out.stride(2) == 1 or columns <= 1) and row >= columns
    walks = walks and (experts <= 1 or max_rows == 0 or out.stride(0) == max_rows * row)
    check(walks, "out must be one run of rows with unit stride along them, got strides {}", list(out.stride()))
    check(not overlaps_itself(out), "out must not overlap itself, got {} with strides {}", out.shape, list(out.stride()))


def _check_weight(check: Checker, a: Tensor, b: Tensor, k) -> tuple:
    """b beside a; returns (experts, n)."""
    check(b.dim() == 3, "b must be [experts, k, n] with k = {} to match a {}, got b {}", k, a.shape, b.shape)
    check(b.shape[1] == k, "b must be [experts, k, n] with k = {} to match a {}, got b {}", k, a.shape, b.shape)
    experts, n = b.shape[0], b.shape[2]
    _check_experts(check, "b", b, experts)
    _check_operand(check, "b", b, a, a.dtype, (experts, k, n))
    return experts, n


def _check_epilogue(check: Checker, b: Tensor, activation: str, gated: bool, gate_layout: str, kernel: str | None, family: str):
    """Returns the columns of the output."""
    n = b.shape[2]
    _check_activation(check, activation, gated)
    if gated:
        _check_gate(check, "b", "columns", b, n, gate_layout)
    else:
        check(gate_layout in GATE_LAYOUTS, "gate_layout must be halves, alternating or blocks, got '{}'", gate_layout)
        check(gate_layout == "halves", "gate_layout {} needs gated = True", gate_layout)
    _check_grouped_kernel(check, kernel, family)
    return n // 2 if gated else n


def _check_common(check: Checker, a: Tensor, b: Tensor, k, bias, activation: str, gated: bool, gate_layout: str, kernel) -> tuple:
    """Returns (experts, columns of the output)."""
    experts, n = _check_weight(check, a, b, k)
    if bias is not None:
        _check_operand(check, "bias", bias, a, a.dtype, (experts, n))
    return experts, _check_epilogue(check, b, activation, gated, gate_layout, kernel, "moe")


def _check_tokens(check: Checker, x: Tensor, dtype: torch.dtype | None = None) -> None:
    check(x.dim() == 2, "x must be [tokens, hidden], got {}", x.shape)
    _check_activations(check, "x", x, dtype)


def _check_layer_weights(check: Checker, x: Tensor, w13: Tensor, w2: Tensor, dtype: torch.dtype) -> tuple:
    """Returns (experts, gate and up rows)."""
    hidden = x.shape[1]
    check(w13.dim() == 3, "w13 must be [experts, 2 * inter, hidden], got {}", w13.shape)
    experts, n = w13.shape[0], w13.shape[1]
    check(n % 2 == 0, "w13 must be [experts, 2 * inter, hidden], got {}", w13.shape)
    _check_experts(check, "w13", w13, experts)
    _check_operand(check, "w13", w13, x, dtype, (experts, n, hidden), "x")
    _check_operand(check, "w2", w2, x, dtype, (experts, hidden, n // 2), "x")
    return experts, n


def _check_routes(check: Checker, x: Tensor, weights: Tensor, ids: Tensor) -> None:
    tokens = x.shape[0]
    check(ids.dim() == 2, "ids must be [tokens, top_k], got {}", ids.shape)
    top_k = ids.shape[1]
    _check_operand(check, "ids", ids, x, torch.int32, (tokens, top_k), "x")
    _check_operand(check, "weights", weights, x, torch.float32, (tokens, top_k), "x")


def check_tokens_and_routes(check: Checker, x: Tensor, weights: Tensor, ids: Tensor) -> None:
    """What a layer's tokens and their experts must be, whatever its weights are."""
    _check_tokens(check, x)
    _check_routes(check, x, weights, ids)


def _check_layer(check: Checker, x: Tensor, experts, n, weights: Tensor, ids: Tensor, b13: Tensor | None, b2: Tensor | None) -> None:
    """A layer's arguments beside its weights, which have n gate and up rows."""
    _check_routes(check, x, weights, ids)
    hidden = x.shape[1]
    for name, bias, columns in (("b13", b13, n), ("b2", b2, hidden)):
        if bias is not None:
            _check_operand(check, name, bias, x, x.dtype, (experts, columns), "x")


def check_rows_of_experts(op: str, a: Tensor, offsets: Tensor, gather: Tensor | None = None) -> None:
    """The rows that experts have, which only CPU kernels know, ascend, and what is gathered for them are rows of a; reads both."""
    ends = offsets.tolist()
    for before, end in pairwise([0, *ends]):
        Checker(op)(end >= before, "offsets must not descend or be negative, got {} behind {}", end, before)
    if gather is None or offsets.numel() == 0:
        return
    needed = gather[: ends[-1]]
    if needed.numel() > 0:
        low, high = (int(x) for x in needed.aminmax())
        text = "gather must be rows of a, 0 to {}, where an expert has them, got {} to {}"
        Checker(op)(0 <= low and high < a.shape[0], text, a.shape[0] - 1, low, high)


def check_grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """All arguments but values; raises RuntimeError."""
    check = Checker("grouped_gemm")
    rows = _check_sorted(check, a, gather)
    experts, columns = _check_common(check, a, b, a.shape[1], bias, activation, gated, gate_layout, kernel)
    if row_scale is not None:
        _check_operand(check, "row_scale", row_scale, a, torch.float32, (rows,))
    _check_operand(check, "offsets", offsets, a, torch.int32, (experts,))
    check_output_codes(check, quant, scale, a)
    if out is not None:
        _check_sorted_out(check, out, a, rows, columns, output_dtype(quant, a.dtype))
    return Result(a, (rows, columns), output_dtype(quant, a.dtype))


def check_grouped_gemm_values(a: Tensor, b: Tensor, offsets: Tensor, *, gather: Tensor | None = None, **_: Any) -> None:
    check_rows_of_experts("grouped_gemm", a, offsets, gather)


def check_grouped_gemm_masked(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """All arguments but values; raises RuntimeError."""
    check = Checker("grouped_gemm_masked")
    _check_masked(check, a, b)
    max_rows = a.shape[1]
    experts, columns = _check_common(check, a, b, a.shape[2], bias, activation, gated, gate_layout, kernel)
    if row_scale is not None:
        _check_operand(check, "row_scale", row_scale, a, torch.float32, (experts, max_rows))
    _check_operand(check, "counts", counts, a, torch.int32, (experts,))
    check_output_codes(check, quant, scale, a)
    if out is not None:
        _check_masked_out(check, out, a, columns, output_dtype(quant, a.dtype))
    return Result(a, (experts, max_rows, columns), output_dtype(quant, a.dtype))


def check_moe_ffn(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
    op: str = "moe_ffn",
) -> Result:
    """All arguments, in the name of ``op``; raises RuntimeError."""
    check = Checker(op)
    _check_tokens(check, x)
    experts, n = _check_layer_weights(check, x, w13, w2, x.dtype)
    _check_layer(check, x, experts, n, weights, ids, b13, b2)
    _check_activation(check, activation, gated=True)
    _check_gate(check, "w13", "rows", w13, n, gate_layout)
    return Result(x, x.shape, x.dtype)
