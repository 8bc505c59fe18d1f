"""Argument checks of grouped GEMM, shared by its CPU kernels and its fakes; messages as in :mod:`minfer.checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import ACTIVATIONS, DTYPES, _Checker, check_kernel

MAX_EXPERTS = 512
SWIGLUOAI = "swigluoai"
GATE_LAYOUTS = ("halves", "alternating", "blocks")


def _check_operand(check: _Checker, name: str, x: Tensor, like: Tensor, dtype: torch.dtype, shape: tuple) -> None:
    expected = "[" + ", ".join(str(s) for s in shape) + "]"
    check(x.dim() == len(shape), "{} must be {}, got {}", name, expected, x.shape)
    for size, wanted in zip(x.shape, shape, strict=True):
        check(size == wanted, "{} must be {}, got {}", name, expected, x.shape)
    check(x.dtype == dtype, "{} must be {}, got {}", name, dtype, x.dtype)
    check(x.device == like.device, "{} must be on a's device {}, got {}", name, like.device, x.device)


def _check_common(check: _Checker, a: Tensor, b: Tensor, k, bias, activation: str, gated: bool, gate_layout: str, kernel) -> tuple:
    """Returns (experts, columns of the output)."""
    check(a.dtype in DTYPES, "a must be float16 or bfloat16, got {}", a.dtype)
    check(b.dim() == 3, "b must be [experts, k, n] with k = {} to match a {}, got b {}", k, a.shape, b.shape)
    check(b.shape[1] == k, "b must be [experts, k, n] with k = {} to match a {}, got b {}", k, a.shape, b.shape)
    experts, n = b.shape[0], b.shape[2]
    check(experts >= 1, "b must have 1 to {} experts, got b {}", MAX_EXPERTS, b.shape)
    check(experts <= MAX_EXPERTS, "b must have 1 to {} experts, got b {}", MAX_EXPERTS, b.shape)
    _check_operand(check, "b", b, a, a.dtype, (experts, k, n))
    if gated:
        check(n % 2 == 0, "b must have an even number of columns when gated, got {}", b.shape)
    if bias is not None:
        _check_operand(check, "bias", bias, a, a.dtype, (experts, n))
    if activation == SWIGLUOAI:
        check(gated, "activation swigluoai needs gated = True")
    else:
        check(activation in ACTIVATIONS, "activation must be one of none, relu, gelu, gelu_tanh, silu, got '{}'", activation)
    check(gate_layout in GATE_LAYOUTS, "gate_layout must be halves, alternating or blocks, got '{}'", gate_layout)
    check(gated or gate_layout == "halves", "gate_layout {} needs gated = True", gate_layout)
    if gate_layout == "blocks":
        check(n % 16 == 0, "b must have a multiple of 16 columns in blocks of 8 gate and 8 up columns, got {}", b.shape)
    if kernel is not None:
        check("@" not in kernel, "kernel '{}' is not in the registry: grouped kernels have no launch options", kernel)
        check_kernel(check, kernel, "moe")
    return experts, n // 2 if gated else n


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
    kernel: str | None = None,
    out: Tensor | None = None,
) -> tuple:
    """Raises for arguments that cannot be right; returns the output's shape."""
    check = _Checker("grouped_gemm" if out is None else "grouped_gemm.out")
    check(a.dim() == 2, "a must be [rows, k], got a {}", a.shape)
    rows = a.shape[0]
    if gather is not None:
        check(gather.dim() == 1, "gather must be [rows], got {}", gather.shape)
        rows = gather.shape[0]
        _check_operand(check, "gather", gather, a, torch.int32, (rows,))
    experts, columns = _check_common(check, a, b, a.shape[1], bias, activation, gated, gate_layout, kernel)
    if row_scale is not None:
        _check_operand(check, "row_scale", row_scale, a, torch.float32, (rows,))
    _check_operand(check, "offsets", offsets, a, torch.int32, (experts,))
    if out is not None:
        _check_operand(check, "out", out, a, a.dtype, (rows, columns))
        contiguous = out.stride(1) == 1 or columns <= 1
        check(contiguous, "out must have unit stride along its rows, got strides {} and {}", out.stride(0), out.stride(1))
        check(rows <= 1 or out.stride(0) >= columns, "out's rows must not overlap, got a row stride of {}", out.stride(0))
    return rows, columns


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
    kernel: str | None = None,
    out: Tensor | None = None,
) -> tuple:
    """Raises for arguments that cannot be right; returns the output's shape."""
    check = _Checker("grouped_gemm_masked" if out is None else "grouped_gemm_masked.out")
    text = "a must be [experts, max_rows, k] and b [experts, k, n], got a {} and b {}"
    check(a.dim() == 3 and b.dim() == 3, text, a.shape, b.shape)
    check(a.shape[0] == b.shape[0], text, a.shape, b.shape)
    max_rows = a.shape[1]
    experts, columns = _check_common(check, a, b, a.shape[2], bias, activation, gated, gate_layout, kernel)
    if row_scale is not None:
        _check_operand(check, "row_scale", row_scale, a, torch.float32, (experts, max_rows))
    _check_operand(check, "counts", counts, a, torch.int32, (experts,))
    if out is not None:
        _check_operand(check, "out", out, a, a.dtype, (experts, max_rows, columns))
        walks = (out.stride(2) == 1 or columns <= 1) and (max_rows <= 1 or out.stride(1) >= columns)
        walks = walks and (experts <= 1 or max_rows == 0 or out.stride(0) == max_rows * out.stride(1))
        check(walks, "out must be one run of rows with unit stride along them, got strides {}", tuple(out.stride()))
    return experts, max_rows, columns


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
) -> tuple:
    """Raises for arguments that cannot be right; returns the output's shape."""
    check = _Checker("moe_ffn")
    check(x.dim() == 2, "x must be [tokens, hidden], got {}", x.shape)
    tokens, hidden = x.shape
    check(x.dtype in DTYPES, "x must be float16 or bfloat16, got {}", x.dtype)
    check(w13.dim() == 3, "w13 must be [experts, 2 * inter, hidden], got {}", w13.shape)
    experts, n = w13.shape[0], w13.shape[1]
    check(n % 2 == 0, "w13 must be [experts, 2 * inter, hidden], got {}", w13.shape)
    check(experts >= 1, "w13 must have 1 to {} experts, got {}", MAX_EXPERTS, w13.shape)
    check(experts <= MAX_EXPERTS, "w13 must have 1 to {} experts, got {}", MAX_EXPERTS, w13.shape)
    _check_operand(check, "w13", w13, x, x.dtype, (experts, n, hidden))
    _check_operand(check, "w2", w2, x, x.dtype, (experts, hidden, n // 2))
    check(ids.dim() == 2, "ids must be [tokens, top_k], got {}", ids.shape)
    top_k = ids.shape[1]
    _check_operand(check, "ids", ids, x, torch.int32, (tokens, top_k))
    _check_operand(check, "weights", weights, x, torch.float32, (tokens, top_k))
    for name, bias, columns in (("b13", b13, n), ("b2", b2, hidden)):
        if bias is not None:
            _check_operand(check, name, bias, x, x.dtype, (experts, columns))
    if activation != SWIGLUOAI:
        check(activation in ACTIVATIONS, "activation must be one of none, relu, gelu, gelu_tanh, silu, got '{}'", activation)
    check(gate_layout in GATE_LAYOUTS, "gate_layout must be halves, alternating or blocks, got '{}'", gate_layout)
    if gate_layout == "blocks":
        check(n % 16 == 0, "w13 must have a multiple of 16 rows in blocks of 8 gate and 8 up rows, got {}", w13.shape)
    return tokens, hidden
