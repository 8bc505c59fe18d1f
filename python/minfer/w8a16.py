"""The W8A16 operators, 8-bit weights and 16-bit activations: typed wrapper, fake and autograd rule side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks_w4a16
from .ops import register_autograd
from .signatures import signature_of, with_out

_library = torch.library.Library("minfer", "IMPL")


@signature_of(with_out(torch.ops.minfer.w8a16_gemm))
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
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """D = activation(alpha * A.W^T + C + bias) in one kernel, with W [n, k] in 8-bit codes.

    Args:
      qweight: int32 [ceil(n / 64), ceil(k / 64), 1024], codes packed by :func:`w8a16_pack`.
      scales: [G, n], a's dtype; G = ceil(k / group_size). n is a multiple of 8.
      zeros: [G, n], a's dtype, in units of codes, integers or fractions; int8 only. None is 128: symmetric weights.
      group_size: columns of W that share a scale and a zero: -1 (all of them, G = 1) or a power of two >= 32.
      w8_format: what a code stands for. "int8": (code - zero) * scale, a signed q being code q + 128. "fp8_e4m3": the float8_e4m3fn
        of these bits, times scale.
      a, alpha, perm, c, bias, activation, constant_weights, kernel, out: as in :func:`minfer.w4a16_gemm`.

    Returns:
      D, [..., n] of a's dtype, contiguous (or ``out``). Any m >= 0.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: as in :func:`minfer.w4a16_gemm`. There is no backward.
    """


@torch.library.register_fake("minfer::w8a16_gemm", lib=_library)
def _w8a16_gemm_fake(a, qweight, scales, zeros=None, **arguments):
    return a.new_empty(checks_w4a16.check_w8a16_gemm(a, qweight, scales, zeros, **arguments).out)


@torch.library.register_fake("minfer::w8a16_gemm.out", lib=_library)
def _w8a16_gemm_out_fake(a, qweight, scales, zeros=None, **arguments):
    checks_w4a16.check_w8a16_gemm(a, qweight, scales, zeros, **arguments)
    return arguments["out"]


@signature_of(torch.ops.minfer.w8a16_gemm_gated.default)
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
    kernel: str | None = None,
) -> Tensor:
    """D = activation(alpha * A.W_gate^T + bias_gate) * (alpha * A.W_up^T + bias_up) in one kernel: the first half of a SwiGLU
    (GeGLU, ...) MLP.

    Args:
      a, group_size, alpha, perm, w8_format, constant_weights, kernel: as in :func:`w8a16_gemm`.
      qweight, scales, zeros, bias: as in :func:`w8a16_gemm`, of n = 2 * n_half interleaved rows: ``minfer.pack_gate_up`` of the codes
        before :func:`w8a16_pack`, of the transposed scales and zeros, and of the biases. n is a multiple of 16.
      activation: of the gate.

    Returns:
      D, [..., n / 2] of a's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`w8a16_gemm`), or n is not a multiple of 16.

    Numerics: as in :func:`w8a16_gemm`; gate and up stay in float32 until D is rounded.
    """


@torch.library.register_fake("minfer::w8a16_gemm_gated", lib=_library)
def _w8a16_gemm_gated_fake(a, qweight, scales, zeros=None, **arguments):
    return a.new_empty(checks_w4a16.check_w8a16_gemm_gated(a, qweight, scales, zeros, **arguments).out)


def w8a16_pack(codes: Tensor) -> Tensor:
    """Packs 8-bit codes in the order in which the kernels read them (:mod:`minfer.weight_layout`).

    Args:
      codes: [n, k], n and k multiples of 8, any strides. uint8: codes as they are. int8: signed weights q, packed as the codes q + 128 of
        "int8". float8_e4m3fn: packed as the codes of "fp8_e4m3".

    Returns:
      int32 [ceil(n / 64), ceil(k / 64), 1024], contiguous; padding is 0.

    Raises:
      RuntimeError: dtype or shape cannot be right.
    """
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8) ^ 128  # the sign bit is what 128 more or less changes
    elif codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    return torch.ops.minfer.w8a16_pack.default(codes)


@torch.library.register_fake("minfer::w8a16_pack", lib=_library)
def _w8a16_pack_fake(codes):
    return codes.new_empty(checks_w4a16.check_w8a16_pack(codes), dtype=torch.int32)


@signature_of(torch.ops.minfer.w8a16_dequantize.default)
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


@torch.library.register_fake("minfer::w8a16_dequantize", lib=_library)
def _w8a16_dequantize_fake(qweight, scales, zeros=None, *, n, k, **arguments):
    return scales.new_empty((n, k), dtype=checks_w4a16.check_w8a16_dequantize(qweight, scales, zeros, n=n, k=k, **arguments))


for _op in (
    torch.ops.minfer.w8a16_gemm.default,
    torch.ops.minfer.w8a16_gemm.out,
    torch.ops.minfer.w8a16_gemm_gated.default,
    torch.ops.minfer.w8a16_dequantize.default,
):
    register_autograd(_op)
