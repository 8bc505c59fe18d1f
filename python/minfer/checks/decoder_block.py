"""Argument checks of the decoder blocks, as in :mod:`minfer.checks.common`, in the order of ``cpp/torch/decoder_block.cpp``,
``cpp/torch/fp8_decoder_block.cpp`` and ``cpp/torch/dense_decoder_block.cpp``.

The order, each line with what it checks from left to right:

1. int4: group_size: -1 or a power of two >= 32. It comes first, because shapes of scales follow from it.
2. a: dense, at least one mode, float16 or bfloat16.
3. residual: dense, a's dtype, a's device, a's number of modes and leading modes, contiguous.
4. For each of o, gate_up, down and next: <name>_scales dense, of two modes, of a's dtype, on a's device, of h columns for o and down, of a
   multiple of 16 for gate_up; k a multiple of 8 (which only a can break); the shape of <name>_scales; n a multiple of 8; <name>_qweight
   dense, int32, on the device of <name>_scales, its shape.
   e4m3: <name>_weight dense, e4m3, on a's device, of two modes, of k columns, of h rows for o and down, of a multiple of 16 for gate_up;
   <name>_scale as minfer.gemm_fp8 checks b_scale. 16 bits: <name>_weight alone, and of a's dtype.
5. mlp_norm, next_norm: [h], dense, a's dtype, a's device.
6. o_bias, down_bias, next_bias: dense, a's dtype or float32, a's device, [n] of the product that each is added to.
7. eps, weight_offset, activation, kernel.
8. On tensors that have memory: residual shares none with another argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats.gate_up import GATE_BLOCK
from .common import (
    DTYPES,
    Checker,
    Result,
    check_activation,
    check_addend_type,
    check_dense,
    check_device,
    check_eps,
    check_named_shape,
    check_operand,
    check_scalar,
)
from .quantized_gemm import check_group_size, check_scales, check_weight
from .scaled_gemm import FP8, blocks_of, check_scale

FORMAT = "int4"  # of all four weights
ONE_LAUNCH, SEPARATE = "one_launch", "separate"  # what ``kernel=`` may ask for


def _check_residual(check: Checker, residual: Tensor, a: Tensor) -> None:
    check_dense(check, "residual", residual)
    check(residual.dtype == a.dtype, "residual must have a's dtype {}, got {}", a.dtype, residual.dtype)
    check_device(check, "residual", residual, "a", a)
    text = "residual must be [..., hidden] with a's rows, got a {}, residual {}"
    check(residual.dim() == a.dim(), text, a.shape, residual.shape)
    for have, want in zip(residual.shape[:-1], a.shape[:-1], strict=True):
        check(have == want, text, a.shape, residual.shape)
    check(residual.is_contiguous(), "residual must be contiguous, got {} with strides {}", residual.shape, list(residual.stride()))


def _check_weight(check: Checker, name: str, a: Tensor, qweight: Tensor, scales: Tensor, group_size: int, k: Any, n: Any = None) -> Any:
    """A packed weight [n, k], or of as many rows as its scales have columns, gate_up's in blocks; returns n."""
    names = (f"{name}_qweight", f"{name}_scales", f"{name}_zeros")
    check_dense(check, names[1], scales)
    check(scales.dim() == 2, "{} must be [groups, n], got {}", names[1], scales.shape)
    check_scales(check, a, scales, FORMAT, names[1])
    columns = scales.shape[1]
    if n is not None:
        check(columns == n, "{} must have {} columns, got {}", names[1], n, scales.shape)
    if name == "gate_up":
        text = "{} must have a multiple of {} columns (blocks of {} gate and {} up rows), got {}"
        check(columns % (2 * GATE_BLOCK) == 0, text, names[1], 2 * GATE_BLOCK, GATE_BLOCK, GATE_BLOCK, scales.shape)
    check_weight(check, qweight, scales, None, FORMAT, group_size, columns, k, arguments=names)
    return columns


def _check_rows(check: Checker, name: str, a: Tensor, weight: Tensor, dtype: torch.dtype, k: Any, n: Any = None) -> Any:
    """A weight [n, k], or of any rows, gate_up's in blocks; returns n."""
    own = f"{name}_weight"
    check_dense(check, own, weight)
    text = "{} must be {}, got {}" if dtype == FP8 else "{} must have a's dtype {}, got {}"
    check(weight.dtype == dtype, text, own, dtype, weight.dtype)
    check_device(check, own, weight, "a", a)
    check(weight.dim() == 2, "{} must be [n, k], got {}", own, weight.shape)
    rows = weight.shape[0]
    check(weight.shape[1] == k, "{} must have {} columns, got {}", own, k, weight.shape)
    if n is not None:
        check(rows == n, "{} must have {} rows, got {}", own, n, weight.shape)
    if name == "gate_up":
        text = "{} must have a multiple of {} rows (blocks of {} gate and {} up rows), got {}"
        check(rows % (2 * GATE_BLOCK) == 0, text, own, 2 * GATE_BLOCK, GATE_BLOCK, GATE_BLOCK, weight.shape)
    return rows


def _check_fp8_weight(check: Checker, name: str, a: Tensor, weight: Tensor, scale: Tensor, k: Any, n: Any = None) -> Any:
    """An e4m3 weight as :func:`_check_rows` has it, and its scale."""
    rows, gated = _check_rows(check, name, a, weight, FP8, k, n), name == "gate_up"
    check_scale(check, f"{name}_scale", scale, rows, blocks_of(rows // 2 if gated else rows), k, True, a, gated)
    return rows


def _check_bias(check: Checker, name: str, bias: Tensor | None, a: Tensor, n: Any) -> None:
    if bias is not None:
        check_addend_type(check, name, bias, a)
        check_named_shape(check, name, bias, "[n]", (n,))


def _check_tokens(check: Checker, a: Tensor, residual: Tensor) -> Any:
    """Returns the columns of the residual."""
    check_dense(check, "a", a)
    check(a.dim() >= 1, "a must have at least one mode, got {}", a.shape)
    check(a.dtype in DTYPES, "a must be float16 or bfloat16, got {}", a.dtype)
    _check_residual(check, residual, a)
    return residual.shape[-1]


def _check_norms_and_biases(
    check: Checker,
    a: Tensor,
    h: Any,
    n: Any,
    mlp_norm: Tensor,
    next_norm: Tensor,
    o_bias: Tensor | None,
    down_bias: Tensor | None,
    next_bias: Tensor | None,
) -> None:
    check_operand(check, "mlp_norm", mlp_norm, a.dtype, (h,), "a", a)
    check_operand(check, "next_norm", next_norm, a.dtype, (h,), "a", a)
    _check_bias(check, "o_bias", o_bias, a, h)
    _check_bias(check, "down_bias", down_bias, a, h)
    _check_bias(check, "next_bias", next_bias, a, n)


def _check_options(check: Checker, eps: float, weight_offset: float, activation: str, kernel: str | None) -> None:
    check_eps(check, eps)
    check_scalar(check, "weight_offset", weight_offset)
    check_activation(check, activation)
    check(kernel is None or kernel in (ONE_LAUNCH, SEPARATE), "kernel must be {} or {}, got '{}'", ONE_LAUNCH, SEPARATE, kernel)


def check_w4a16_decoder_block(
    a: Tensor,
    residual: Tensor,
    o_qweight: Tensor,
    o_scales: Tensor,
    mlp_norm: Tensor,
    gate_up_qweight: Tensor,
    gate_up_scales: Tensor,
    down_qweight: Tensor,
    down_scales: Tensor,
    next_norm: Tensor,
    next_qweight: Tensor,
    next_scales: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    group_size: int = 128,
    activation: str = "silu",
    constant_weights: bool = False,  # either is right
    kernel: str | None = None,
) -> Result:
    check = Checker("w4a16_decoder_block")
    check_group_size(check, group_size, FORMAT)
    h = _check_tokens(check, a, residual)
    _check_weight(check, "o", a, o_qweight, o_scales, group_size, a.shape[-1], h)
    rows = _check_weight(check, "gate_up", a, gate_up_qweight, gate_up_scales, group_size, h)
    _check_weight(check, "down", a, down_qweight, down_scales, group_size, rows // 2, h)
    n = _check_weight(check, "next", a, next_qweight, next_scales, group_size, h)
    _check_norms_and_biases(check, a, h, n, mlp_norm, next_norm, o_bias, down_bias, next_bias)
    _check_options(check, eps, weight_offset, activation, kernel)
    return Result(a, (*a.shape[:-1], n), a.dtype)


def check_fp8_decoder_block(
    a: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    o_scale: Tensor,
    mlp_norm: Tensor,
    gate_up_weight: Tensor,
    gate_up_scale: Tensor,
    down_weight: Tensor,
    down_scale: Tensor,
    next_norm: Tensor,
    next_weight: Tensor,
    next_scale: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    activation: str = "silu",
    constant_weights: bool = False,  # either is right
    kernel: str | None = None,
) -> Result:
    check = Checker("fp8_decoder_block")
    h = _check_tokens(check, a, residual)
    _check_fp8_weight(check, "o", a, o_weight, o_scale, a.shape[-1], h)
    rows = _check_fp8_weight(check, "gate_up", a, gate_up_weight, gate_up_scale, h)
    _check_fp8_weight(check, "down", a, down_weight, down_scale, rows // 2, h)
    n = _check_fp8_weight(check, "next", a, next_weight, next_scale, h)
    _check_norms_and_biases(check, a, h, n, mlp_norm, next_norm, o_bias, down_bias, next_bias)
    _check_options(check, eps, weight_offset, activation, kernel)
    return Result(a, (*a.shape[:-1], n), a.dtype)


def check_decoder_block(
    a: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    mlp_norm: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    next_norm: Tensor,
    next_weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    activation: str = "silu",
    constant_weights: bool = False,  # either is right
    kernel: str | None = None,
) -> Result:
    check = Checker("decoder_block")
    h = _check_tokens(check, a, residual)
    _check_rows(check, "o", a, o_weight, a.dtype, a.shape[-1], h)
    rows = _check_rows(check, "gate_up", a, gate_up_weight, a.dtype, h)
    _check_rows(check, "down", a, down_weight, a.dtype, rows // 2, h)
    n = _check_rows(check, "next", a, next_weight, a.dtype, h)
    _check_norms_and_biases(check, a, h, n, mlp_norm, next_norm, o_bias, down_bias, next_bias)
    _check_options(check, eps, weight_offset, activation, kernel)
    return Result(a, (*a.shape[:-1], n), a.dtype)
