"""GEMM with int4 weights and activations of 8 bits (W4A8)."""

from __future__ import annotations

from torch import Tensor

from .._core.operator import OutForm, operator
from ..checks import quantized_scaled_gemm as checks
from ..reference import quantized_scaled_gemm as reference
from .output_codes import Codes, with_scale

__all__ = ["w4a8_gemm", "w4a8_gemm_gated"]


@operator(check=checks.check_w4a8_gemm, reference=reference.w4a8_gemm, out=OutForm(may_be=("c",)), before=with_scale)
def w4a8_gemm(
    a: Tensor,
    a_scale: Tensor,
    qweight: Tensor,
    scales: Tensor,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """D = activation(alpha * (A * a_scale).W^T + C + bias) in one kernel, with A of e4m3 or int8 and W [n, k] in int4 codes.

    The weight is one that :func:`minfer.w4a16_gemm` takes, packed the same: a server can read it there for few tokens, where bytes are the
    cost and 16-bit activations are free, and here for many, where tensor cores are and those of 8 bits are twice as fast.

    Args:
      a: [..., k], float8_e4m3fn or int8; what :func:`minfer.quantize_fp8`, :func:`minfer.quantize_int8` and the operators with ``quant``
        write. k is a multiple of 16.
      a_scale: float32 on a's device: one number; [...] or [..., 1], one for each row; all rows may be numbered through.
      qweight: int32 [ceil(n / 64), ceil(k / 64), 512], int4 codes packed by :func:`minfer.w4a16_pack`.
      scales: [G, n], G = ceil(k / group_size), float16 or bfloat16. n is a multiple of 8. W is (code - 8) * scale.
      group_size: columns of W that share a scale: -1 (all of them, G = 1) or a power of two from 128 on.
      alpha: of the whole weight, finite in float32.
      c: broadcastable to D, of the dtype of ``scales`` or float32.
      bias: [n], of the dtype of ``scales`` or float32.
      activation, quant, scale: as in :func:`minfer.w4a16_gemm`.
      kernel: for measurements, as in :func:`minfer.gemm`, with a name of ``minfer.kernels("w4a8")``; or "w4a16", which writes the
        activations in 16 bits and multiplies as :func:`minfer.w4a16_gemm` does.
      out: D itself, as in :func:`minfer.w4a16_gemm`.

    Returns:
      D, [..., n] of the dtype of ``scales``, contiguous (or ``out``). Any m >= 0. With ``quant``: (q, scale), q of D's shape,
      float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: of int8 the sums of 128 of k are exact; of e4m3 they are the tensor core's, of exact products. They are multiplied by their
    scale and added up in float32, as is the epilogue; D is rounded once. On devices other than of compute capability 9.0 the activations
    times their scales are rounded to 16 bits first (``kernel="w4a16"``). The same inputs, shapes and kernel give the same bits in every
    run. There is no backward.
    """


@operator(check=checks.check_w4a8_gemm_gated, reference=reference.w4a8_gemm_gated, before=with_scale)
def w4a8_gemm_gated(
    a: Tensor,
    a_scale: Tensor,
    qweight: Tensor,
    scales: Tensor,
    *,
    group_size: int = 128,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    activation: str = "silu",
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor | Codes:
    """D = activation(gate) * up of alpha * (A * a_scale).W^T + bias in one kernel: the first half of a SwiGLU (GeGLU, ...) MLP.

    Args:
      a, a_scale, group_size, alpha, quant, scale, kernel: as in :func:`w4a8_gemm`.
      qweight, scales, bias: as in :func:`w4a8_gemm`, of n = 2 * n_half interleaved rows, as in :func:`minfer.w4a16_gemm_gated`. n is a
        multiple of 16.
      activation: of the gate.

    Returns:
      D, [..., n / 2] of the dtype of ``scales``, contiguous. With ``quant``: (q, scale), q of D's shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`w4a8_gemm`), or n is not a multiple of 16.

    Numerics: as in :func:`w4a8_gemm`; gate and up stay in float32 until D is rounded.
    """
