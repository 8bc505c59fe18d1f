"""RMS norm and the product behind it as one operator: the norm in front of a projection, of dense and of quantised weights.

    qkv = minfer.rms_norm_gemm(x, norm_weight, w_qkv.t(), eps, residual=residual)         # residual += x, then the norm of the sum

A dense product of one token is one launch where that is expected to be faster, and otherwise two: the norm's, whose rows are written and
read once more, and the product's, which begins under its tail. ``minfer.plan("rms_norm_gemm", ...)`` says which, and why. Products with
quantised weights are two launches. Either way the norm is rounded to x's dtype in between, as :func:`minfer.rms_norm` rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .._core.operator import operator
from ..checks import norm_gemm as checks
from ..formats.weight_formats import stored_scales
from ..reference import norm_gemm as reference

__all__ = [
    "rms_norm_gemm",
    "rms_norm_gemm_gated",
    "rms_norm_w4a16_gemm",
    "rms_norm_w4a16_gemm_gated",
    "rms_norm_w8a16_gemm",
    "rms_norm_w8a16_gemm_gated",
]


def _declared(name: str, values: Callable[..., None]) -> dict[str, Any]:
    """What all declarations have in common."""
    return dict(check=getattr(checks, f"check_{name}"), reference=getattr(reference, name), values=partial(values, name))


def _with_stored_scales(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Scales of a byte may come in their own type; the operators take them as uint8."""

    def run(
        x: Tensor, norm_weight: Tensor | None, qweight: Tensor, scales: Tensor, *more: Any, w4_format: str = "int4", **options: Any
    ) -> Tensor:
        if w4_format != "int4":
            scales, options["w4_format"] = stored_scales(scales, w4_format), w4_format
        return call(x, norm_weight, qweight, scales, *more, **options)

    return run


@operator(**_declared("rms_norm_gemm", reference.check_dense_values))
def rms_norm_gemm(
    x: Tensor,
    norm_weight: Tensor | None,
    b: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    bias: Tensor | None = None,
    activation: str = "none",
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D = activation(rms_norm(x).B + bias), or with a residual of the norm of residual += x.

    Args:
      x: [..., k], float16 or bfloat16, of one mode or more; the leading ones are m rows. Any strides, as in :func:`minfer.rms_norm`.
      norm_weight: [k], x's dtype. None is ones, without an offset.
      b: [k, n], x's dtype and device. An ``nn.Linear`` weight [n, k] goes in as ``weight.t()``; other views as in :func:`minfer.gemm`.
      eps: finite in float32 and not negative.
      residual: like x; it becomes residual + x, rounded, as in :func:`minfer.add_rms_norm`. It must not overlap itself or another
        argument, which is an error where their first and last addresses show it.
      weight_offset: finite in float32, added to the norm's weight; 1.0 for Gemma's.
      bias: [n], x's dtype or float32.
      activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu2" (relu squared).
      constant_weights: as in :func:`minfer.gemm`, of b. Two launches are planned then, since one reads b in its turn.
      kernel: for measurements: "one_launch" or "two_launches", with the kernels that are planned; a name of
        ``minfer.kernels("norm_gemm")``, which is one launch; or an override of :func:`minfer.gemm`, which is two. On CPU it is checked and
        otherwise ignored. One launch takes up to 16 rows, a weight that is contiguous along k, k in multiples of 8, and rows that begin at
        multiples of 16 bytes; that it cannot be is an error where it is asked for.

    Returns:
      D, [..., n] of x's dtype, contiguous. Any m, n, k >= 0.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: the norm is :func:`minfer.rms_norm`'s: squares are added in float32, y is rounded to x's dtype. Products are accumulated in
    float32, the epilogue is float32, D is rounded once. One launch and two have the same bound and differ in the order of sums; each has
    the same bits in every run. docs/numerics.md has the bounds. There is no backward.
    """


@operator(**_declared("rms_norm_gemm_gated", reference.check_dense_values))
def rms_norm_gemm_gated(
    x: Tensor,
    norm_weight: Tensor | None,
    b: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    bias: Tensor | None = None,
    activation: str = "silu",
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D = activation(y.B_gate + bias_gate) * (y.B_up + bias_up) of y = rms_norm(x), or with a residual of the norm of residual += x: the
    first half of a SwiGLU (GeGLU, ...) MLP with the norm in front of it.

    Args:
      x, norm_weight, eps, residual, weight_offset, constant_weights, kernel: as in :func:`rms_norm_gemm`.
      b: [k, 2 * n_half], x's dtype: ``minfer.pack_gate_up(gate.weight, up.weight).t()``, blocks of 8 gate columns and 8 up columns.
      bias: [2 * n_half], ``minfer.pack_gate_up(gate.bias, up.bias)``, x's dtype or float32.
      activation: of the gate; as in :func:`rms_norm_gemm`.

    Returns:
      D, [..., n_half] of x's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`rms_norm_gemm`), or b's columns are not a multiple of 16.

    Numerics: as in :func:`rms_norm_gemm`; gate and up stay in float32 until D is rounded.
    """


@operator(**_declared("rms_norm_w4a16_gemm", reference.check_quantized_values), before=_with_stored_scales)
def rms_norm_w4a16_gemm(
    x: Tensor,
    norm_weight: Tensor | None,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    group_size: int = 128,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    w4_format: str = "int4",
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D = activation(alpha * rms_norm(x).W^T + bias) with W [n, k] in 4-bit codes, or with a residual of the norm of residual += x. Two
    launches.

    Args:
      x, norm_weight, eps, residual, weight_offset: as in :func:`rms_norm_gemm`; k is a multiple of 8.
      qweight, scales, zeros, group_size, alpha, perm, bias, activation, w4_format, constant_weights: as in :func:`minfer.w4a16_gemm`. perm
        gathers columns of the norm.
      kernel: for measurements: "two_launches", which is what is done anyway, or the product's, as in :func:`minfer.w4a16_gemm`.

    Returns:
      D, [..., n] of x's dtype, contiguous. Any m >= 0.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`rms_norm_gemm`).

    Numerics: the norm is rounded to x's dtype as :func:`minfer.rms_norm` rounds it, then as in :func:`minfer.w4a16_gemm`.
    """


@operator(**_declared("rms_norm_w4a16_gemm_gated", reference.check_quantized_values), before=_with_stored_scales)
def rms_norm_w4a16_gemm_gated(
    x: Tensor,
    norm_weight: Tensor | None,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    group_size: int = 128,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    w4_format: str = "int4",
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """:func:`minfer.w4a16_gemm_gated` of rms_norm(x), or with a residual of the norm of residual += x. Two launches.

    Args:
      x, norm_weight, eps, residual, weight_offset, kernel: as in :func:`rms_norm_w4a16_gemm`.
      qweight, scales, zeros, group_size, alpha, perm, bias, activation, w4_format, constant_weights: as in
        :func:`minfer.w4a16_gemm_gated`.

    Returns:
      D, [..., n / 2] of x's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`rms_norm_gemm`), or n is not a multiple of 16.

    Numerics: as in :func:`rms_norm_w4a16_gemm`; gate and up stay in float32 until D is rounded.
    """


@operator(**_declared("rms_norm_w8a16_gemm", reference.check_quantized_values))
def rms_norm_w8a16_gemm(
    x: Tensor,
    norm_weight: Tensor | None,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    group_size: int = -1,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    w8_format: str = "int8",
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """:func:`rms_norm_w4a16_gemm` with W in 8-bit codes.

    Args:
      x, norm_weight, eps, residual, weight_offset, kernel: as in :func:`rms_norm_w4a16_gemm`.
      qweight, scales, zeros, group_size, alpha, perm, bias, activation, w8_format, constant_weights: as in :func:`minfer.w8a16_gemm`.

    Returns:
      D, [..., n] of x's dtype, contiguous. Any m >= 0.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`rms_norm_gemm`).

    Numerics: as in :func:`rms_norm_w4a16_gemm`.
    """


@operator(**_declared("rms_norm_w8a16_gemm_gated", reference.check_quantized_values))
def rms_norm_w8a16_gemm_gated(
    x: Tensor,
    norm_weight: Tensor | None,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    group_size: int = -1,
    alpha: float = 1.0,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    w8_format: str = "int8",
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """:func:`rms_norm_w4a16_gemm_gated` with W in 8-bit codes.

    Args:
      x, norm_weight, eps, residual, weight_offset, kernel: as in :func:`rms_norm_w4a16_gemm`.
      qweight, scales, zeros, group_size, alpha, perm, bias, activation, w8_format, constant_weights: as in
        :func:`minfer.w8a16_gemm_gated`.

    Returns:
      D, [..., n / 2] of x's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`rms_norm_gemm`), or n is not a multiple of 16.

    Numerics: as in :func:`rms_norm_w4a16_gemm_gated`.
    """
