"""GEMM with quantised weights: 16-bit activations and weights in codes of 4 bits (``w4a16_*``) or 8 (``w8a16_*``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._core.operator import OutForm, operator
from ..checks import quantized_gemm as checks
from ..formats.weight_formats import stored_scales
from ..reference import quantized_gemm as reference
from .output_codes import Codes, with_scale

__all__ = [
    "w4a16_gemm",
    "w4a16_gemm_gated",
    "w4a16_pack",
    "w4a16_dequantize",
    "w8a16_gemm",
    "w8a16_gemm_gated",
    "w8a16_pack",
    "w8a16_dequantize",
]


def _with_stored_scales(call: Callable[..., Tensor]) -> Callable[..., Tensor | Codes]:
    """Scales of a byte may come in their own type; the operators take them as uint8. Codes come with their scale."""

    def run(a: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None = None, *, w4_format: str = "int4", **options: Any) -> Tensor:
        if w4_format != "int4":
            scales, options["w4_format"] = stored_scales(scales, w4_format), w4_format
        return call(a, qweight, scales, zeros, **options)

    return with_scale(run)


def _dequantize_stored(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(qweight: Tensor, scales: Tensor, zeros: Tensor | None = None, *, w4_format: str = "int4", **options: Any) -> Tensor:
        return call(qweight, stored_scales(scales, w4_format), zeros, w4_format=w4_format, **options)

    return run


def _of_typed_codes(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Codes may come as numbers of their own type; the operator takes them as uint8."""

    def run(codes: Tensor) -> Tensor:
        if codes.dtype == torch.int8:
            codes = codes.view(torch.uint8) ^ 128  # adding 128 modulo 256 flips the sign bit
        elif codes.dtype == torch.float8_e4m3fn:
            codes = codes.view(torch.uint8)
        return call(codes)

    return run


def _gemm(name: str) -> dict[str, Any]:
    """What the declarations of all GEMMs have in common."""
    return dict(check=getattr(checks, f"check_{name}"), reference=getattr(reference, name), values=partial(checks.check_perm_values, name))


@operator(**_gemm("w4a16_gemm"), out=OutForm(may_be=("c",)), before=_with_stored_scales)
def w4a16_gemm(
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    w4_format: str = "int4",
    constant_weights: bool = False,
    out_dtype: torch.dtype | None = None,
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """D = activation(alpha * A.W^T + C + bias) in one kernel, with W [n, k] in 4-bit codes.

    Args:
      a: [..., k], float16 or bfloat16, of one dimension or more; the leading ones are m rows. k is a multiple of 8.
      qweight: int32 [ceil(n / 64), ceil(k / 64), 512], codes packed by :func:`w4a16_pack` with the same ``w4_format``. A view that is not
        contiguous, or that does not begin at a multiple of 16 bytes, is copied at every call; so are scales and zeros whose rows do not.
      scales: [G, n], G = ceil(k / group_size), of the type that ``w4_format`` says. n is a multiple of 8.
      zeros: [G, n], a's dtype, in units of codes, integers or fractions; int4 only. None is 8: symmetric weights.
      group_size: columns of W that share a scale and a zero: -1 (all of them, G = 1) or a power of two >= 32, unless ``w4_format``
        prescribes it.
      alpha: of the whole weight, finite in float32; nvfp4's global scale.
      perm: int32 [k]: the packed columns are W[:, perm], as act-order quantisation leaves them, and A's columns are gathered to match. A
        column that A does not have is an error on CPU; on CUDA it is one of zeros. Loaders check it once.
      c: broadcastable to D ([..., n], [n], [m, 1], a scalar, ...), a's dtype or float32.
      bias: [n], a's dtype or float32.
      activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu2" (relu squared).
      w4_format: what a code stands for.
        "int4": (code - zero) * scale. scales of a's dtype.
        "nf4": NF4[code] * scale, QLoRA's 4-bit NormalFloat. scales of a's dtype; group_size is usually 64.
        "mxfp4": E2M1[code] * 2^(scale - 127), code = sign << 3 | magnitude. scales float8_e8m0fnu or their bytes in uint8; group_size
        must be 32. The GEMM kernels take byte 255 for infinity and byte 0 for 0; :func:`w4a16_dequantize`, and with it the CPU and
        ``kernel="dequantize"``, for NaN and 2^-127.
        "nvfp4": E2M1[code] * e4m3(scale), times alpha. scales float8_e4m3fn or their bytes in uint8; group_size must be 16.
      constant_weights: a promise that whatever wrote qweight, scales and zeros has finished before this call is launched, as after loading
        and a synchronisation; while a CUDA graph is captured, that no kernel of the graph in front of this one writes them. On compute
        capability 9.0 the kernel then reads them while the work in front of it still runs. It changes no bit of the result; where the
        promise is broken, D is of old weights, new ones or a mixture. Copies that the operator makes of them itself are exempt.
      out_dtype: a's dtype, float32 (as logits are wanted), with ``quant`` float8_e4m3fn; None: that of ``out``, a's dtype or the codes'.
      quant, scale: None, or "fp8_tensor" and its scale, float32 [1]: D in 8-bit codes, as in :func:`minfer.gemm`. ``scale`` is D's,
        ``scales`` are the weight's.
      kernel: for measurements, as in :func:`minfer.gemm`, with a name of ``minfer.kernels("w4a16")`` of the same format; or
        "dequantize", which writes the weight out in 16 bits and multiplies by that.
      out: D itself, of ``out_dtype`` where that is given; as in :func:`minfer.gemm`. It may be ``c``, but must not overlap itself or
        another argument.

    Returns:
      D, [..., n] of ``out_dtype``, contiguous (or ``out``). Any m >= 0. With ``quant``: (q, scale), q of D's shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: a weight is exact or has one or two roundings to a's dtype, as its format and the kernel have it; products are accumulated in
    float32, the epilogue is float32, D or its code is rounded once; docs/numerics.md has the bounds. The same inputs, shapes and kernel
    give the same bits in every run. There is no backward.
    """


@operator(**_gemm("w4a16_gemm_gated"), before=_with_stored_scales)
def w4a16_gemm_gated(
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    w4_format: str = "int4",
    constant_weights: bool = False,
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor | Codes:
    """D = activation(alpha * A.W_gate^T + bias_gate) * (alpha * A.W_up^T + bias_up) in one kernel: the first half of a SwiGLU
    (GeGLU, ...) MLP.

    Args:
      a, group_size, alpha, perm, w4_format, constant_weights, quant, scale, kernel: as in :func:`w4a16_gemm`.
      qweight, scales, zeros, bias: as in :func:`w4a16_gemm`, of n = 2 * n_half interleaved rows: ``minfer.pack_gate_up`` of the codes
        before :func:`w4a16_pack`, of the transposed scales and zeros, and of the biases. n is a multiple of 16.
      activation: of the gate.

    Returns:
      D, [..., n / 2] of a's dtype, contiguous. With ``quant``: (q, scale), q of D's shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`w4a16_gemm`), or n is not a multiple of 16.

    Numerics: as in :func:`w4a16_gemm`; gate and up stay in float32 until D is rounded.
    """


@operator(check=checks.check_w4a16_pack, reference=reference.w4a16_pack, values=checks.check_codes)
def w4a16_pack(codes: Tensor, *, w4_format: str = "int4") -> Tensor:
    """Packs 4-bit codes in the order in which the kernels read them (:mod:`minfer.formats.weight_layout`).

    Args:
      codes: uint8 [n, k], 0 to 15; n and k multiples of 8. Any strides.
      w4_format: of the codes, as in :func:`w4a16_gemm`. int4, nf4 and the two fp4 formats have an order each; a packed
        weight does not say which it has.

    Returns:
      int32 [ceil(n / 64), ceil(k / 64), 512], contiguous; padding is 0.

    Raises:
      RuntimeError: dtype, shape or format cannot be right; on CPU also a code above 15. CUDA packs the low four bits instead of waiting
        to look.
    """


@operator(check=checks.check_w4a16_dequantize, reference=reference.w4a16_dequantize, before=_dequantize_stored)
def w4a16_dequantize(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    n: int,
    k: int,
    w4_format: str = "int4",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The weight that a packed one stands for, columns in their packed order: for int4 alpha * (code - zero) * scale.

    Args:
      qweight, scales, zeros, group_size, alpha, w4_format: as in :func:`w4a16_gemm`; 16-bit scales are float16 or bfloat16.
      n, k: rows and columns of W, multiples of 8.
      out_dtype: float16 or bfloat16; of 16-bit scales their dtype. None: that, or bfloat16 for mxfp4 and nvfp4.

    Returns:
      [n, k] of ``out_dtype``, contiguous.

    Raises:
      RuntimeError: an argument cannot be right.

    Numerics: computed in float32 and rounded once, (code - zero) * (scale * alpha).
    """


@operator(**_gemm("w8a16_gemm"), out=OutForm(may_be=("c",)), before=with_scale)
def w8a16_gemm(
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = -1,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    w8_format: str = "int8",
    constant_weights: bool = False,
    out_dtype: torch.dtype | None = None,
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """D = activation(alpha * A.W^T + C + bias) in one kernel, with W [n, k] in 8-bit codes.

    Args:
      qweight: int32 [ceil(n / 64), ceil(k / 64), 1024], codes packed by :func:`w8a16_pack`.
      scales: [G, n], a's dtype; G = ceil(k / group_size). n is a multiple of 8.
      zeros: [G, n], a's dtype, in units of codes, integers or fractions; int8 only. None is 128: symmetric weights.
      group_size: columns of W that share a scale and a zero: -1 (all of them, G = 1) or a power of two >= 32.
      w8_format: what a code stands for. "int8": (code - zero) * scale, a signed q being code q + 128. "fp8_e4m3": the float8_e4m3fn
        of these bits, times scale.
      a, alpha, perm, c, bias, activation, constant_weights, out_dtype, quant, scale, kernel, out: as in :func:`minfer.w4a16_gemm`.

    Returns:
      D, [..., n] of ``out_dtype``, contiguous (or ``out``). Any m >= 0. With ``quant``: (q, scale), q of D's shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: as in :func:`minfer.w4a16_gemm`. There is no backward.
    """


@operator(**_gemm("w8a16_gemm_gated"), before=with_scale)
def w8a16_gemm_gated(
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = -1,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    w8_format: str = "int8",
    constant_weights: bool = False,
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor | Codes:
    """D = activation(alpha * A.W_gate^T + bias_gate) * (alpha * A.W_up^T + bias_up) in one kernel: the first half of a SwiGLU
    (GeGLU, ...) MLP.

    Args:
      a, group_size, alpha, perm, w8_format, constant_weights, quant, scale, kernel: as in :func:`w8a16_gemm`.
      qweight, scales, zeros, bias: as in :func:`w8a16_gemm`, of n = 2 * n_half interleaved rows: ``minfer.pack_gate_up`` of the codes
        before :func:`w8a16_pack`, of the transposed scales and zeros, and of the biases. n is a multiple of 16.
      activation: of the gate.

    Returns:
      D, [..., n / 2] of a's dtype, contiguous. With ``quant``: (q, scale), q of D's shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`w8a16_gemm`), or n is not a multiple of 16.

    Numerics: as in :func:`w8a16_gemm`; gate and up stay in float32 until D is rounded.
    """


@operator(check=checks.check_w8a16_pack, reference=reference.w8a16_pack, before=_of_typed_codes)
def w8a16_pack(codes: Tensor) -> Tensor:
    """Packs 8-bit codes in the order in which the kernels read them (:mod:`minfer.formats.weight_layout`).

    Args:
      codes: [n, k], n and k multiples of 8, any strides. uint8: codes as they are. int8: signed weights q, packed as the codes q + 128 of
        "int8". float8_e4m3fn: packed as the codes of "fp8_e4m3".

    Returns:
      int32 [ceil(n / 64), ceil(k / 64), 1024], contiguous; padding is 0.

    Raises:
      RuntimeError: dtype or shape cannot be right.
    """


@operator(check=checks.check_w8a16_dequantize, reference=reference.w8a16_dequantize)
def w8a16_dequantize(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = -1,
    alpha: float = 1.0,
    n: int,
    k: int,
    w8_format: str = "int8",
) -> Tensor:
    """The weight that a packed one stands for, columns in their packed order: for int8 alpha * (code - zero) * scale.

    Args:
      qweight, scales, zeros, group_size, alpha, w8_format: as in :func:`w8a16_gemm`; scales are float16 or bfloat16.
      n, k: rows and columns of W, multiples of 8.

    Returns:
      [n, k] of the dtype of ``scales``, contiguous.

    Raises:
      RuntimeError: an argument cannot be right.

    Numerics: computed in float32 and rounded once, (code - zero) * (scale * alpha).
    """
