"""Argument checks of the W4A16 operators, as in :mod:`minfer.checks`: the CPU kernels and the fakes share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import w4_layout
from .checks import (
    DTYPES,
    _Checker,
    check_activation,
    check_bias,
    check_c,
    check_kernel,
    check_out,
)
from .packing import GATE_BLOCK


class W4Shape(NamedTuple):
    """What the checks found: A flattened is [m, k], the weight [n, k], D is ``out`` (gated: of n / 2 columns)."""

    m: int
    n: int
    k: int
    out: tuple[int, ...]


def _check_dense(check: _Checker, name: str, x: torch.Tensor) -> None:
    check(x.layout == torch.strided, "{} must be a dense tensor, got layout {}", name, x.layout)


def check_format(check: _Checker, w4_format: str) -> None:
    check(w4_format in w4_layout.FORMATS, "w4_format must be one of {}, got '{}'", ", ".join(w4_layout.FORMATS), w4_format)


def check_group_size(check: _Checker, group_size: int) -> None:
    power_of_two = group_size >= w4_layout.MIN_GROUP and group_size & (group_size - 1) == 0
    check(group_size == -1 or power_of_two, "group_size must be -1 or a power of two >= {}, got {}", w4_layout.MIN_GROUP, group_size)


def _check_shape(check: _Checker, name: str, x: torch.Tensor, what: str, shape: Sequence[Any]) -> None:
    text = "{} must be {} = {}, got {}"
    check(x.dim() == len(shape), text, name, what, list(shape), x.shape)
    for have, want in zip(x.shape, shape, strict=True):
        check(have == want, text, name, what, list(shape), x.shape)


def check_weight(
    check: _Checker, qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, n: Any, k: Any
) -> None:
    """Shapes, types and devices of a packed weight [n, k]; of scales only the shape."""
    check(k % w4_layout.MULTIPLE == 0, "k must be a multiple of {}, got {}", w4_layout.MULTIPLE, k)
    rows = w4_layout.groups(k, group_size)
    _check_shape(check, "scales", scales, "[ceil(k / group_size), n]", (rows, n))
    check(n % w4_layout.MULTIPLE == 0, "scales must have n = {} columns, a multiple of {}, got {}", n, w4_layout.MULTIPLE, scales.shape)
    _check_dense(check, "qweight", qweight)
    check(qweight.dtype == torch.int32, "qweight must be int32, got {}", qweight.dtype)
    check(qweight.device == scales.device, "qweight must be on the device of scales, {}, got {}", scales.device, qweight.device)
    _check_shape(check, "qweight", qweight, "[ceil(n / 64), ceil(k / 64), 512]", w4_layout.packed_shape(n, k))
    if zeros is not None:
        _check_dense(check, "zeros", zeros)
        check(zeros.dtype == scales.dtype, "zeros must have the dtype of scales, {}, got {}", scales.dtype, zeros.dtype)
        check(zeros.device == scales.device, "zeros must be on the device of scales, {}, got {}", scales.device, zeros.device)
        _check_shape(check, "zeros", zeros, "[ceil(k / group_size), n]", (rows, n))


def _check_operands(
    check: _Checker,
    a: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    perm: torch.Tensor | None,
    w4_format: str,
) -> tuple[Any, Any]:
    """A, the weight and perm; returns (n, k)."""
    check_format(check, w4_format)
    check_group_size(check, group_size)
    _check_dense(check, "a", a)
    check(a.dim() >= 1, "a must be [..., k], got a {}", a.shape)
    check(a.dtype in DTYPES, "a must be float16 or bfloat16, got {}", a.dtype)
    k = a.shape[-1]
    _check_dense(check, "scales", scales)
    check(scales.dtype == a.dtype, "scales must have a's dtype {}, got {}", a.dtype, scales.dtype)
    check(scales.device == a.device, "scales must be on a's device {}, got {}", a.device, scales.device)
    check(scales.dim() == 2, "scales must be [ceil(k / group_size), n], got {}", scales.shape)
    n = scales.shape[1]
    check_weight(check, qweight, scales, zeros, group_size, n, k)
    if perm is not None:
        _check_dense(check, "perm", perm)
        check(perm.dtype == torch.int32, "perm must be int32, got {}", perm.dtype)
        check(perm.device == a.device, "perm must be on a's device {}, got {}", a.device, perm.device)
        _check_shape(check, "perm", perm, "[k]", (k,))
    return n, k


def check_w4a16_gemm(
    a: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    perm: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    w4_format: str = "int4",
    kernel: str | None = None,
    out: torch.Tensor | None = None,
) -> W4Shape:
    """All arguments of minfer::w4a16_gemm and minfer::w4a16_gemm.out; raises RuntimeError."""
    check = _Checker("w4a16_gemm")
    n, k = _check_operands(check, a, qweight, scales, zeros, group_size, perm, w4_format)
    shape = W4Shape(math.prod(a.shape[:-1]), n, k, (*a.shape[:-1], n))
    if c is not None:
        check_c(check, c, a, shape.out)
    if bias is not None:
        check_bias(check, bias, a, n)
    check_activation(check, activation)
    check_kernel(check, kernel, "w4a16")
    if out is not None:
        check(out.dtype == a.dtype, "out must be {}, got {}", a.dtype, out.dtype)
        check_out(check, out, a, shape.out, None)
    return shape


def check_w4a16_gemm_gated(
    a: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    perm: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    w4_format: str = "int4",
    kernel: str | None = None,
) -> W4Shape:
    """All arguments of minfer::w4a16_gemm_gated; raises RuntimeError. The shape's n counts the weight's rows, D has half of them."""
    check = _Checker("w4a16_gemm_gated")
    n, k = _check_operands(check, a, qweight, scales, zeros, group_size, perm, w4_format)
    check(
        n % (2 * GATE_BLOCK) == 0,
        "scales must have a multiple of {} columns (blocks of {} gate and {} up rows, see pack_gate_up), got {}",
        2 * GATE_BLOCK,
        GATE_BLOCK,
        GATE_BLOCK,
        scales.shape,
    )
    if bias is not None:
        check_bias(check, bias, a, n)
    check_activation(check, activation)
    check_kernel(check, kernel, "w4a16")
    return W4Shape(math.prod(a.shape[:-1]), n, k, (*a.shape[:-1], n // 2))


def check_w4a16_pack(codes: torch.Tensor) -> tuple[Any, Any, int]:
    """All that minfer::w4a16_pack can check without reading codes; returns qweight's shape."""
    check = _Checker("w4a16_pack")
    _check_dense(check, "codes", codes)
    check(codes.dtype == torch.uint8, "codes must be uint8, got {}", codes.dtype)
    check(codes.dim() == 2, "codes must be [n, k], got {}", codes.shape)
    for extent in codes.shape:
        check(extent % w4_layout.MULTIPLE == 0, "codes must be [n, k] in multiples of {}, got {}", w4_layout.MULTIPLE, codes.shape)
    return w4_layout.packed_shape(*codes.shape)


def check_codes(codes: torch.Tensor) -> None:
    """That codes have four bits; reads them."""
    if codes.numel() > 0:
        largest = int(codes.max())
        _Checker("w4a16_pack")(largest <= 15, "codes must be 0 to 15, got {}", largest)


def check_perm_values(op: str, perm: torch.Tensor | None, k: int) -> None:
    """That perm holds column numbers; reads it."""
    if perm is not None and perm.numel() > 0:
        low, high = (int(x) for x in perm.aminmax())
        _Checker(op)(0 <= low and high < k, "perm must be column numbers from 0 to {}, got {} to {}", k - 1, low, high)


def check_w4a16_dequantize(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int = 128,
    n: int,
    k: int,
    w4_format: str = "int4",
) -> None:
    """All arguments of minfer::w4a16_dequantize; raises RuntimeError."""
    check = _Checker("w4a16_dequantize")
    check_format(check, w4_format)
    check_group_size(check, group_size)
    for extent in (n, k):
        check(extent >= 0, "n and k must not be negative, got {} and {}", n, k)
    _check_dense(check, "scales", scales)
    check(scales.dtype in DTYPES, "scales must be float16 or bfloat16, got {}", scales.dtype)
    check_weight(check, qweight, scales, zeros, group_size, n, k)
