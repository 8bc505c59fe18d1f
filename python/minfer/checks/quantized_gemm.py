"""Argument checks of the W4A16 and W8A16 operators, as in :mod:`minfer.checks.common`: the CPU kernels and the fakes share them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..formats import weight_formats, weight_layout
from ..formats.gate_up import GATE_BLOCK
from ..formats.weight_formats import FORMATS, WeightFormat
from .common import (
    DTYPES,
    Checker,
    Result,
    check_activation,
    check_bias,
    check_c,
    check_dense,
    check_device,
    check_dtype,
    check_kernel,
    check_named_shape,
    check_out,
    check_out_dtype,
    check_output_codes,
    check_scalar,
    check_tensor,
    output_dtype,
)

DEQUANTIZE_FIRST = "dequantize"  # the ``kernel=`` that writes the weight out in 16 bits and runs the dense operator's plan


class GemmShape(NamedTuple):
    """What the checks found: A flattened is [m, k], the weight [n, k], D is ``out`` (gated: of n / 2 columns) of ``dtype``."""

    m: int
    n: int
    k: int
    out: tuple[int, ...]
    dtype: torch.dtype


def check_format(check: Checker, bits: int, name: str) -> WeightFormat:
    """``w4_format`` or ``w8_format``, by bits."""
    names = weight_formats.names(bits)
    check(name in names, "w{}_format must be one of {}, got '{}'", bits, ", ".join(names), name)
    return FORMATS[name]


def check_group_size(check: Checker, group_size: int, name: str) -> None:
    legal = weight_formats.legal_group_size(name, group_size)
    check(legal, "group_size must be {}, got {}", weight_formats.group_size_rule(name), group_size)


def _check_byte_scales(check: Checker, scales: torch.Tensor, name: str, argument: str = "scales") -> None:
    scale_type = FORMATS[name].scale_type
    text = "{} must be viewed as uint8 for torch.ops.minfer, which minfer's own functions do, got {}"
    check(scales.dtype != scale_type, text, argument, scales.dtype)
    check(scales.dtype == torch.uint8, "{} must be uint8 or {} for {}, got {}", argument, scale_type, name, scales.dtype)


def check_scales(check: Checker, a: torch.Tensor, scales: torch.Tensor, name: str, argument: str = "scales", a_name: str = "a") -> None:
    """Type and device, which must fit the activations'."""
    check_dense(check, argument, scales)
    if FORMATS[name].scale_type is None:
        check(scales.dtype == a.dtype, "{} must have {}'s dtype {}, got {}", argument, a_name, a.dtype, scales.dtype)
    else:
        _check_byte_scales(check, scales, name, argument)
    check_device(check, argument, scales, a_name, a)


def check_weight(
    check: Checker,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    name: str,
    group_size: int,
    n: Any,
    k: Any,
    experts: tuple[Any, ...] = (),
    arguments: tuple[str, str, str] = ("qweight", "scales", "zeros"),
) -> None:
    """Shapes, types and devices of a packed weight [n, k], or of one for each of ``experts``, (number,); of scales only the shape."""
    q, s, z = arguments
    lead = "experts, " if experts else ""
    check(k % weight_layout.MULTIPLE == 0, "k must be a multiple of {}, got {}", weight_layout.MULTIPLE, k)
    groups = (*experts, weight_layout.groups(k, group_size), n)
    check_named_shape(check, s, scales, f"[{lead}ceil(k / group_size), n]", groups)
    multiple = weight_layout.MULTIPLE
    check(n % multiple == 0, "{} must have n = {} columns, a multiple of {}, got {}", s, n, multiple, scales.shape)
    check_dense(check, q, qweight)
    check_dtype(check, q, qweight, torch.int32)
    check(qweight.device == scales.device, "{} must be on the device of {}, {}, got {}", q, s, scales.device, qweight.device)
    shape = (*experts, *weight_layout.packed_shape(n, k, FORMATS[name].bits))
    check_named_shape(check, q, qweight, f"[{lead}ceil(n / 64), ceil(k / 64), {shape[-1]}]", shape)
    if zeros is not None:
        check(FORMATS[name].zero is not None, "{} must be None for {}, got {}", z, name, zeros.shape)
        check_dense(check, z, zeros)
        check(zeros.dtype == scales.dtype, "{} must have the dtype of {}, {}, got {}", z, s, scales.dtype, zeros.dtype)
        check(zeros.device == scales.device, "{} must be on the device of {}, {}, got {}", z, s, scales.device, zeros.device)
        check_named_shape(check, z, zeros, f"[{lead}ceil(k / group_size), n]", groups)


def check_gemm(
    op: str,
    bits: int,
    a: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    name: str,
    group_size: int,
    *,
    alpha: float = 1.0,
    perm: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    constant_weights: bool = False,  # either is right
    out_dtype: torch.dtype | None = None,
    quant: str | None = None,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
    out: torch.Tensor | None = None,
    a_name: str = "a",  # in messages
) -> GemmShape:
    """All arguments of a GEMM or gated GEMM but for what only one of them asks; D is the GEMM's."""
    check = Checker(op)
    check_format(check, bits, name)
    check_group_size(check, group_size, name)
    check_scalar(check, "alpha", alpha)
    check_dense(check, a_name, a)
    check(a.dim() >= 1, "{} must be [..., k], got {} {}", a_name, a_name, a.shape)
    check(a.dtype in DTYPES, "{} must be float16 or bfloat16, got {}", a_name, a.dtype)
    k = a.shape[-1]
    check_scales(check, a, scales, name, a_name=a_name)
    check(scales.dim() == 2, "scales must be [ceil(k / group_size), n], got {}", scales.shape)
    n = scales.shape[1]
    check_weight(check, qweight, scales, zeros, name, group_size, n, k)
    if perm is not None:
        check_tensor(check, "perm", perm, torch.int32, a_name, a)
        check_named_shape(check, "perm", perm, "[k]", (k,))
    check_out_dtype(check, out_dtype, quant, a)
    if out is not None and out_dtype is None and quant is None and out.dtype == torch.float32:
        out_dtype = torch.float32
    shape = GemmShape(math.prod(a.shape[:-1]), n, k, (*a.shape[:-1], n), output_dtype(quant, out_dtype or a.dtype))
    if c is not None:
        check_c(check, c, a, shape.out)
    if bias is not None:
        check_bias(check, bias, a, n, a_name)
    check_activation(check, activation)
    check_output_codes(check, quant, scale, a)
    if kernel != DEQUANTIZE_FIRST:
        check_kernel(check, kernel, "w4a16")
    if out is not None:
        check(out.dtype == shape.dtype, "out must be {}, got {}", shape.dtype, out.dtype)
        check_out(check, out, a, shape.out, None, quant)
    return shape


def check_gated(
    op: str, bits: int, a: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor, *weight: Any, **epilogue: Any
) -> GemmShape:
    shape = check_gemm(op, bits, a, qweight, scales, *weight, **epilogue)
    Checker(op)(
        shape.n % (2 * GATE_BLOCK) == 0,
        "scales must have a multiple of {} columns (blocks of {} gate and {} up rows, see pack_gate_up), got {}",
        2 * GATE_BLOCK,
        GATE_BLOCK,
        GATE_BLOCK,
        scales.shape,
    )
    return shape._replace(out=(*a.shape[:-1], shape.n // 2))


def _check_pack(op: str, bits: int, codes: torch.Tensor, name: str) -> Result:
    check = Checker(op)
    check_format(check, bits, name)
    check_dense(check, "codes", codes)
    check_dtype(check, "codes", codes, torch.uint8)
    check(codes.dim() == 2, "codes must be [n, k], got {}", codes.shape)
    for extent in codes.shape:
        check(extent % weight_layout.MULTIPLE == 0, "codes must be [n, k] in multiples of {}, got {}", weight_layout.MULTIPLE, codes.shape)
    return Result(codes, weight_layout.packed_shape(*codes.shape, bits), torch.int32)


def _check_dequantize(
    op: str,
    bits: int,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    name: str,
    group_size: int,
    *,
    n: int,
    k: int,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Result:
    """All arguments of a dequantisation."""
    check = Checker(op)
    form = check_format(check, bits, name)
    check_group_size(check, group_size, name)
    check_scalar(check, "alpha", alpha)
    for extent in (n, k):
        check(extent >= 0, "n and k must not be negative, got {} and {}", n, k)
    check_dense(check, "scales", scales)
    if form.scale_type is None:
        check(scales.dtype in DTYPES, "scales must be float16 or bfloat16, got {}", scales.dtype)
        natural = scales.dtype
    else:
        _check_byte_scales(check, scales, name)
        natural = torch.bfloat16
    if out_dtype is not None:
        check(out_dtype in DTYPES, "out_dtype must be float16 or bfloat16, got {}", out_dtype)
        check(form.scale_type is not None or out_dtype == natural, "out_dtype must be the dtype of scales, {}, got {}", natural, out_dtype)
    check_weight(check, qweight, scales, zeros, name, group_size, n, k)
    return Result(scales, (n, k), out_dtype or natural)


def check_codes(codes: torch.Tensor, **_: Any) -> None:
    """That codes have four bits; reads them."""
    if codes.numel() > 0:
        max_code = int(codes.max())
        Checker("w4a16_pack")(max_code <= 15, "codes must be 0 to 15, got {}", max_code)


def check_permutation(check: Checker, name: str, perm: torch.Tensor, k: int) -> None:
    """That an integer tensor [k] holds every column once; reads it on its device, and waits for that."""
    ordered = perm.sort().values
    if not torch.equal(ordered.long(), torch.arange(k, device=perm.device)):
        got = (int(ordered[0]), int(ordered[-1]), ordered.unique_consecutive().numel())
        check(False, "{} must be a permutation of 0 to {}, got {} to {}, {} different numbers", name, k - 1, *got)


def check_perm_values(op: str, a: torch.Tensor, *weight: Any, perm: torch.Tensor | None = None, **_: Any) -> None:
    """That perm, among the operator's arguments, holds column numbers; reads it."""
    if perm is not None and perm.numel() > 0:
        k, (low, high) = a.shape[-1], (int(x) for x in perm.aminmax())
        Checker(op)(0 <= low and high < k, "perm must be column numbers from 0 to {}, got {} to {}", k - 1, low, high)


# ---- whole operators: arguments and defaults are the schemas', all raise RuntimeError -------------------------------------------
#
# The shape of a gated operator counts the weight's rows in n; D has half of them.


def _result(a: torch.Tensor, shape: GemmShape) -> Result:
    return Result(a, shape.out, shape.dtype)


def check_w4a16_gemm(a, qweight, scales, zeros=None, *, group_size=128, w4_format="int4", **epilogue) -> Result:
    return _result(a, check_gemm("w4a16_gemm", 4, a, qweight, scales, zeros, w4_format, group_size, **epilogue))


def check_w4a16_gemm_gated(a, qweight, scales, zeros=None, *, group_size=128, w4_format="int4", **epilogue) -> Result:
    return _result(a, check_gated("w4a16_gemm_gated", 4, a, qweight, scales, zeros, w4_format, group_size, **epilogue))


def check_w4a16_pack(codes, *, w4_format="int4") -> Result:
    """All that can be checked without reading codes."""
    return _check_pack("w4a16_pack", 4, codes, w4_format)


def check_w4a16_dequantize(qweight, scales, zeros=None, *, group_size=128, w4_format="int4", **arguments) -> Result:
    return _check_dequantize("w4a16_dequantize", 4, qweight, scales, zeros, w4_format, group_size, **arguments)


def check_w8a16_gemm(a, qweight, scales, zeros=None, *, group_size=-1, w8_format="int8", **epilogue) -> Result:
    return _result(a, check_gemm("w8a16_gemm", 8, a, qweight, scales, zeros, w8_format, group_size, **epilogue))


def check_w8a16_gemm_gated(a, qweight, scales, zeros=None, *, group_size=-1, w8_format="int8", **epilogue) -> Result:
    return _result(a, check_gated("w8a16_gemm_gated", 8, a, qweight, scales, zeros, w8_format, group_size, **epilogue))


def check_w8a16_pack(codes) -> Result:
    return _check_pack("w8a16_pack", 8, codes, "int8")


def check_w8a16_dequantize(qweight, scales, zeros=None, *, group_size=-1, w8_format="int8", **arguments) -> Result:
    return _check_dequantize("w8a16_dequantize", 8, qweight, scales, zeros, w8_format, group_size, **arguments)
