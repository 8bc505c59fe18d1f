"""Argument checks of the operators between the GEMMs, as in :mod:`minfer.checks.common`, in the order of ``cpp/torch/fused.cpp``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats.gate_up import GATE_BLOCK
from .common import (
    ACTIVATIONS,
    DTYPES,
    INDICES,
    QUANTS,
    Checker,
    Result,
    check_activation,
    check_apart,
    check_dense,
    check_device,
    check_eps,
    check_kernel,
    check_operand,
    check_rotary_table,
    check_scalar,
)

FLOATS = (*DTYPES, torch.float32)
MOST_HADAMARD_BLOCK = 32768
QUANT_BLOCK = 128  # columns that share a scale
GATE_LAYOUTS = ("halves", "alternating", "blocks")
SWIGLUOAI = "swigluoai"
LAUNCH_KEYS = ("threads", "rows", "cluster", "parts")
LAUNCH_MOST = 4096


# ---- arguments -----------------------------------------------------------------------------------------------------------------------


def _check_rows(check: Checker, x: Tensor, float32: bool = False) -> None:
    check_dense(check, "x", x)
    must = "float16, bfloat16 or float32" if float32 else "float16 or bfloat16"
    check(x.dtype in (FLOATS if float32 else DTYPES), "x must be {}, got {}", must, x.dtype)
    check(x.dim() >= 1, "x must have at least one mode, got {}", x.shape)


def _check_factors(check: Checker, name: str, factors: Tensor | None, x: Tensor) -> None:
    """[width], of x's dtype."""
    if factors is not None:
        check_operand(check, name, factors, x.dtype, (x.shape[-1],), "x", x)


def _check_quant(check: Checker, quant: str) -> None:
    check(quant in QUANTS, "quant must be one of {}, got '{}'", ", ".join(QUANTS), quant)


def _check_scale(check: Checker, quant: str, scale: Tensor | None, x: Tensor) -> None:
    if quant != "fp8_tensor":
        got = "" if scale is None else scale.shape
        check(scale is None, "scale must be None for {}, whose scales are computed, got {}", quant, got)
        return
    check(scale is not None, "scale must be given for fp8_tensor")
    check_operand(check, "scale", scale, torch.float32, (1,), "x", x)


def _check_launch(check: Checker, launch: str) -> None:
    given = set()
    for item in launch.split(","):
        key, _, value = item.partition("=")
        check(key in LAUNCH_KEYS, "kernel option '{}' is not known; expected threads, rows, cluster or parts", key)
        check(key not in given, "kernel option {} is given twice", key)
        given.add(key)
        check(re.fullmatch(r"-?[0-9]+", value) is not None, "kernel option {} must be an integer, got '{}'", key, value)
        check(1 <= int(value) <= LAUNCH_MOST, "kernel option {} must be 1 to {}, got {}", key, LAUNCH_MOST, value)


def _check_kernel(check: Checker, kernel: str | None) -> None:
    check_kernel(check, kernel, "fused", _check_launch)


def _check_written(check: Checker, name: str, to: Tensor, dtype: torch.dtype, shape: Sequence[Any], other: str, like: Tensor) -> None:
    check_operand(check, name, to, dtype, shape, other, like)
    check_apart(check, name, to)


# ---- results -------------------------------------------------------------------------------------------------------------------------


def block_scales_strides(rows: Any) -> tuple[Any, Any]:
    """Of the scales [rows, blocks] of fp8_block128: columns follow each other at a multiple of 16 bytes, as TMA takes them."""
    return 1, torch.sym_max((rows + 3) // 4 * 4, 4)


def _result(check: Checker, x: Tensor, shape: Sequence[Any], kernel: str | None, out: Tensor | None) -> Result:
    if out is not None:
        _check_written(check, "out", out, x.dtype, shape, "x", x)
    _check_kernel(check, kernel)
    return Result(x, shape, x.dtype)


def _quantized(check: Checker, x: Tensor, shape: Sequence[Any], quant: str, kernel: str | None) -> tuple[Result, Result]:
    _check_kernel(check, kernel)
    q = Result(x, shape, torch.int8 if quant == "int8_token" else torch.float8_e4m3fn)
    if quant == "fp8_tensor":
        return q, Result(x, (0,), torch.float32)
    if quant == "fp8_block128":
        rows, blocks = math.prod(shape[:-1]), (shape[-1] + QUANT_BLOCK - 1) // QUANT_BLOCK
        return q, Result(x, (rows, blocks), torch.float32, block_scales_strides(rows))
    return q, Result(x, (*shape[:-1], 1), torch.float32)


# ---- whole operators: arguments and defaults are the schemas', all raise RuntimeError ------------------------------------------------


def _check_norm_arguments(check: Checker, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> None:
    _check_rows(check, x)
    _check_factors(check, "weight", weight, x)
    check_eps(check, eps)
    check_scalar(check, "weight_offset", weight_offset)


def _check_residual(check: Checker, residual: Tensor, x: Tensor) -> None:
    _check_written(check, "residual", residual, x.dtype, x.shape, "x", x)


def _check_quantization(check: Checker, quant: str, scale: Tensor | None, x: Tensor, norm: Tensor | None = None) -> None:
    _check_quant(check, quant)
    _check_scale(check, quant, scale, x)
    if norm is not None:
        _check_written(check, "norm", norm, x.dtype, x.shape, "x", x)


def check_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    check = Checker("rms_norm")
    _check_norm_arguments(check, x, weight, eps, weight_offset)
    return _result(check, x, x.shape, kernel, out)


def check_rms_norm_quantized(
    x: Tensor,
    quant: str,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Result, Result]:
    check = Checker("rms_norm_quantized")
    _check_norm_arguments(check, x, weight, eps, weight_offset)
    _check_quantization(check, quant, scale, x, norm)
    return _quantized(check, x, x.shape, quant, kernel)


def check_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    kernel: str | None = None,
) -> Result:
    check = Checker("add_rms_norm")
    _check_norm_arguments(check, x, weight, eps, weight_offset)
    _check_residual(check, residual, x)
    return _result(check, x, x.shape, kernel, None)


def check_add_rms_norm_quantized(
    x: Tensor,
    residual: Tensor,
    quant: str,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Result, Result]:
    check = Checker("add_rms_norm_quantized")
    _check_norm_arguments(check, x, weight, eps, weight_offset)
    _check_residual(check, residual, x)
    _check_quantization(check, quant, scale, x, norm)
    return _quantized(check, x, x.shape, quant, kernel)


def check_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Result:
    check = Checker("layer_norm")
    _check_rows(check, x)
    _check_factors(check, "weight", weight, x)
    _check_factors(check, "bias", bias, x)
    check_eps(check, eps)
    return _result(check, x, x.shape, kernel, out)


def _check_softmax(op: str, x: Tensor, kernel: str | None, out: Tensor | None) -> Result:
    check = Checker(op)
    _check_rows(check, x, float32=True)
    return _result(check, x, x.shape, kernel, out)


def check_softmax(x: Tensor, *, kernel: str | None = None, out: Tensor | None = None) -> Result:
    return _check_softmax("softmax", x, kernel, out)


def check_log_softmax(x: Tensor, *, kernel: str | None = None, out: Tensor | None = None) -> Result:
    return _check_softmax("log_softmax", x, kernel, out)


def check_activation_of_rows(
    x: Tensor, activation: str, *, bias: Tensor | None = None, kernel: str | None = None, out: Tensor | None = None
) -> Result:
    """All arguments of minfer::activation and minfer::activation.out."""
    check = Checker("activation")
    _check_rows(check, x, float32=True)
    check_activation(check, activation)
    _check_factors(check, "bias", bias, x)
    return _result(check, x, x.shape, kernel, out)


def _check_gated(check: Checker, x: Tensor, activation: str, gate_layout: str) -> tuple[Any, ...]:
    """The shape of the results."""
    _check_rows(check, x)
    known = (*ACTIVATIONS, SWIGLUOAI)
    check(activation in known, "activation must be one of {}, got '{}'", ", ".join(known), activation)
    check(gate_layout in GATE_LAYOUTS, "gate_layout must be halves, alternating or blocks, got '{}'", gate_layout)
    multiple = 2 * GATE_BLOCK if gate_layout == "blocks" else 2
    check(x.shape[-1] % multiple == 0, "x must have a multiple of {} columns, gate and up, got {}", multiple, x.shape)
    return (*x.shape[:-1], x.shape[-1] // 2)


def check_gated_activation(
    x: Tensor, activation: str = "silu", *, gate_layout: str = "halves", kernel: str | None = None, out: Tensor | None = None
) -> Result:
    check = Checker("gated_activation")
    shape = _check_gated(check, x, activation, gate_layout)
    return _result(check, x, shape, kernel, out)


def check_gated_activation_quantized(
    x: Tensor,
    quant: str,
    activation: str = "silu",
    *,
    gate_layout: str = "halves",
    scale: Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Result, Result]:
    check = Checker("gated_activation_quantized")
    shape = _check_gated(check, x, activation, gate_layout)
    _check_quantization(check, quant, scale, x)
    return _quantized(check, x, shape, quant, kernel)


def check_quantize(x: Tensor, quant: str, *, scale: Tensor | None = None, kernel: str | None = None) -> tuple[Result, Result]:
    check = Checker("quantize")
    _check_rows(check, x)
    _check_quantization(check, quant, scale, x)
    return _quantized(check, x, x.shape, quant, kernel)


def check_dequantize(q: Tensor, scales: Tensor, quant: str, *, dtype: torch.dtype) -> Result:
    check = Checker("dequantize")
    _check_quant(check, quant)
    check_dense(check, "q", q)
    want = torch.int8 if quant == "int8_token" else torch.float8_e4m3fn
    check(q.dtype == want, "q must be {} for {}, got {}", want, quant, q.dtype)
    check(q.dim() >= 1, "q must have at least one mode, got {}", q.shape)
    check(dtype in FLOATS, "dtype must be float16, bfloat16 or float32, got {}", dtype)
    shape: tuple[Any, ...] = (*q.shape[:-1], 1)
    if quant == "fp8_tensor":
        shape = (1,)
    elif quant == "fp8_block128":
        shape = (math.prod(q.shape[:-1]), (q.shape[-1] + QUANT_BLOCK - 1) // QUANT_BLOCK)
    check_operand(check, "scales", scales, torch.float32, shape, "q", q)
    return Result(q, q.shape, dtype)


# ---- rotary embedding ----------------------------------------------------------------------------------------------------------------


def _check_heads(check: Checker, name: str, x: Tensor) -> None:
    check_dense(check, name, x)
    check(x.dim() == 3, "{} must be [tokens, heads, head_dim], got {}", name, x.shape)
    check(x.dtype in DTYPES, "{} must be float16 or bfloat16, got {}", name, x.dtype)
    text = "{} must be contiguous along head_dim, got strides {}"
    if x.shape[2] != 1:
        check(x.stride(2) == 1, text, name, list(x.stride()))
    check_apart(check, name, x)


def check_rope(
    q: Tensor, k: Tensor | None, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False, rotary_dim: int | None = None
) -> None:
    check = Checker("rope")
    _check_heads(check, "q", q)
    tokens, _, head_dim = q.shape
    if k is not None:
        _check_heads(check, "k", k)
        check(k.dtype == q.dtype, "k must have q's dtype {}, got {}", q.dtype, k.dtype)
        text = "k must be [tokens = {}, heads_kv, head_dim = {}], got {}"
        for good in (k.shape[0] == tokens, k.shape[2] == head_dim):
            check(good, text, tokens, head_dim, k.shape)
        check_device(check, "k", k, "q", q)
    check_rotary_table(check, cos_sin, positions, rotary_dim, tokens, head_dim, "q", q)


# ---- Hadamard transform --------------------------------------------------------------------------------------------------------------


def hadamard_shape(block: int) -> tuple[int, int] | None:
    """(outer, bits) with block = outer * 2^bits, of blocks that there is a transform for."""
    if not 1 <= block <= MOST_HADAMARD_BLOCK:
        return None
    bits = (block & -block).bit_length() - 1
    odd = block >> bits
    if odd == 1:
        return 1, bits
    return (4 * odd, bits - 2) if bits >= 2 and odd in (3, 5, 7) else None


def check_hadamard(x: Tensor, block: int, *, transpose: bool = False, out: Tensor | None = None) -> Result:
    check = Checker("hadamard")
    _check_rows(check, x, float32=True)
    text = "block must be a power of two, or 12, 20 or 28 times one, up to {}, got {}"
    check(hadamard_shape(int(block)) is not None, text, MOST_HADAMARD_BLOCK, block)
    check(x.shape[-1] % block == 0, "x must have whole blocks of {} columns, got {}", block, x.shape)
    if out is not None:
        _check_written(check, "out", out, x.dtype, x.shape, "x", x)
    return Result(x, x.shape, x.dtype)


# ---- embedding -----------------------------------------------------------------------------------------------------------------------


def check_embedding(ids: Tensor, weight: Tensor, *, scale: float | None = None, out: Tensor | None = None) -> Result:
    check = Checker("embedding")
    check(ids.dtype in INDICES, "ids must be int64 or int32, got {}", ids.dtype)
    check_dense(check, "ids", ids)
    check_dense(check, "weight", weight)
    check(weight.dim() == 2, "weight must be [vocabulary, width], got {}", weight.shape)
    check(weight.dtype in FLOATS, "weight must be float16, bfloat16 or float32, got {}", weight.dtype)
    check_device(check, "ids", ids, "weight", weight)
    if scale is not None:
        check_scalar(check, "scale", scale)
    shape = (*ids.shape, weight.shape[1])
    if out is not None:
        _check_written(check, "out", out, weight.dtype, shape, "weight", weight)
    return Result(weight, shape, weight.dtype)
