"""The operators between the GEMMs: normalisation, softmax, activations, 8-bit quantisation of rows; rotary and token embeddings.

    q, scales = minfer.add_rms_norm(x, residual, weight, quant="fp8_token")     # one launch reads x and residual and writes both and q
    h = minfer.silu_and_mul(gate_up)

Every operator is one launch that reads and writes its bytes once, can be captured in a CUDA graph, and gives the same bits in every run. On
CUDA few rows and many are computed by different kernels, so that a row's last bit may depend on how many rows there are.

The modes of 8-bit quantisation, ``quant``. Codes are round(y / scale); y is the unrounded float32 result, and the float32 scales are

    fp8_tensor    float8_e4m3fn; one scale, which the caller has: float32 [1]
    fp8_token     float8_e4m3fn; a row's scale is max |y| / 448: [..., 1]
    fp8_block128  float8_e4m3fn; the same of each 128 columns of a row, from column 0 on: [rows, ceil(width / 128)], rows being the product
                  of all modes but the last. They lie column by column, at strides (1, max(4, rows rounded up to a multiple of 4)), as
                  block-scaled GEMMs read them with TMA
    int8_token    int8, -127 to 127; a row's scale is max |y| / 127: [..., 1]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.namespace import ops
from .._core.operator import OutForm, operator
from ..checks import fused as checks
from ..formats.rope import rope_cache
from ..reference import fused as reference

# `quantize` is not among them: minfer.quantize is the package that quantises weights. Its modes are quantize_fp8 and quantize_int8.
__all__ = [
    "activation",
    "add_rms_norm",
    "add_rms_norm_quantized",
    "bias_gelu",
    "dequantize",
    "embedding",
    "gated_activation",
    "gated_activation_quantized",
    "gelu",
    "gelu_and_mul",
    "hadamard",
    "layer_norm",
    "log_softmax",
    "quantize_fp8",
    "quantize_int8",
    "relu2",
    "rms_norm",
    "rms_norm_quantized",
    "rope",
    "rope_cache",
    "silu",
    "silu_and_mul",
    "softmax",
    "swigluoai_and_mul",
]

Codes = tuple[Tensor, Tensor]


def _with_scale(codes: Codes, quant: str, scale: Tensor | None) -> Codes:
    """With the caller's scale in place of none."""
    return (codes[0], scale) if quant == "fp8_tensor" else codes


def _refuse(name: str, must: str, **given: Tensor | None) -> None:
    """Of arguments beside the operator's own; torch.compile follows it."""
    for argument, x in given.items():
        if x is not None:
            raise RuntimeError(f"minfer::{name}: {argument} {must}, got {list(x.shape)}")


def _or_quantized(name: str, at: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor | Codes]]:
    """An operator that with ``quant`` is another one, in which ``quant`` is the argument number ``at``."""

    def before(call: Callable[..., Tensor]) -> Callable[..., Tensor | Codes]:
        quantized = getattr(ops, f"{name}_quantized").default

        def run(
            *args: Any, quant: str | None = None, scale: Tensor | None = None, norm: Tensor | None = None, **options: Any
        ) -> Tensor | Codes:
            if quant is None:
                _refuse(name, "must be None where quant is", scale=scale, norm=norm)
                return call(*args, **options)
            _refuse(name, "must be None where quant is given", out=options.pop("out", None))
            if scale is not None:
                options["scale"] = scale
            if norm is not None:
                options["norm"] = norm
            if len(args) < at:
                options["quant"] = quant
            else:
                args = (*args[:at], quant, *args[at:])
            return _with_scale(quantized(*args, **options), quant, scale)

        return run

    return before


# ---- normalisation -------------------------------------------------------------------------------------------------------------------


@operator(check=checks.check_rms_norm, reference=reference.rms_norm, out=OutForm(may_be=("x",)), before=_or_quantized("rms_norm", 1))
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    quant: str | None = None,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) of each row, in 16 bits or in 8-bit codes.

    Args:
      x: [..., width], float16 or bfloat16, of one mode or more. Views of two strides and contiguous rows are taken as they are, such as
        the heads [tokens, heads, head_dim] of q in a fused qkv; others are copied first.
      weight: [width], x's dtype. None is ones, without an offset.
      eps: finite in float32 and not negative.
      weight_offset: finite in float32; 1.0 for Gemma's weights, which are stored less 1.
      quant: None, or "fp8_tensor", "fp8_token", "fp8_block128" or "int8_token": the modes of :mod:`minfer.ops.fused`.
      scale: float32 [1], for "fp8_tensor" alone.
      norm: with ``quant``: a tensor like x, which receives the norm in 16 bits as well. It must not overlap itself, x or weight.
      kernel: for measurements: NAME[@threads=N,rows=N,cluster=N,parts=N] of ``minfer.kernels("fused")``. On CPU it is checked and
        otherwise ignored.
      out: y itself, x's dtype and shape, any strides that keep its elements apart. It may be x, but must not overlap it otherwise, nor
        weight. Not with ``quant``.

    Returns:
      y like x, contiguous (or ``out``). With ``quant``: (q, scales), q of x's shape, float8_e4m3fn or int8, contiguous; of "fp8_tensor" the
      scales are ``scale``.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: squares are added in float32, in an order that depends on the kernel and the width; y is float32 and rounded once. Codes
    are those of y before it is rounded. docs/numerics.md has the bounds. There is no backward.

    Source: Zhang and Sennrich, 2019.
    """


@operator(
    check=checks.check_rms_norm_quantized,
    reference=reference.rms_norm_quantized,
    values=reference.check_rms_norm_quantized_values,
)
def rms_norm_quantized(
    x: Tensor,
    quant: str,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    kernel: str | None = None,
) -> Codes:
    """:func:`rms_norm` with ``quant``, as an operator of its own.

    Args:
      x, quant, weight, eps, weight_offset, scale, norm, kernel: as in :func:`rms_norm`.

    Returns:
      (q, scales); of "fp8_tensor" the scales are [0].

    Raises:
      RuntimeError: an argument cannot be right, see :func:`rms_norm`.
    """


@operator(
    check=checks.check_add_rms_norm,
    reference=reference.add_rms_norm,
    values=reference.check_add_rms_norm_values,
    before=_or_quantized("add_rms_norm", 2),
)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    quant: str | None = None,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor | Codes:
    """residual += x, in place, and :func:`rms_norm` of the sum: what stands between two blocks of a transformer.

    Args:
      x: [..., width], float16 or bfloat16, views as in :func:`rms_norm`.
      residual: like x, written; it must not overlap itself, x or weight.
      weight, eps, weight_offset, quant, scale, norm, kernel: as in :func:`rms_norm`; ``norm`` must not overlap ``residual`` either.

    Returns:
      y like x, contiguous, or with ``quant`` (q, scales), as :func:`rms_norm`.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched. Also where
        an argument requires grad.

    Numerics: the sum is rounded once to x's dtype and stored, and the norm is that of the rounded sum, so that it is what a later
    :func:`rms_norm` of ``residual`` would give. Otherwise as :func:`rms_norm`.
    """


@operator(
    check=checks.check_add_rms_norm_quantized,
    reference=reference.add_rms_norm_quantized,
    values=reference.check_add_rms_norm_quantized_values,
)
def add_rms_norm_quantized(
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
) -> Codes:
    """:func:`add_rms_norm` with ``quant``, as an operator of its own.

    Args:
      x, residual, quant, weight, eps, weight_offset, scale, norm, kernel: as in :func:`add_rms_norm`.

    Returns:
      (q, scales); of "fp8_tensor" the scales are [0].

    Raises:
      RuntimeError: an argument cannot be right, see :func:`add_rms_norm`.
    """


@operator(check=checks.check_layer_norm, reference=reference.layer_norm, out=OutForm(may_be=("x",)))
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias of each row.

    Args:
      x: [..., width], float16 or bfloat16, views as in :func:`rms_norm`.
      weight: [width], x's dtype. None is ones.
      bias: [width], x's dtype. None is zeros.
      eps, kernel, out: as in :func:`rms_norm`; ``out`` must not overlap bias either.

    Returns:
      y like x, contiguous (or ``out``).

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: the variance is the mean of squared deviations, which are computed from the row once more, so that no digits cancel. All of it
    is float32, y is rounded once. There is no backward.
    """


# ---- softmax -------------------------------------------------------------------------------------------------------------------------


@operator(check=checks.check_softmax, reference=reference.softmax, out=OutForm(may_be=("x",)))
def softmax(x: Tensor, *, kernel: str | None = None, out: Tensor | None = None) -> Tensor:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) of each row.

    Args:
      x: [..., width], float16, bfloat16 or float32, views as in :func:`rms_norm`.
      kernel, out: as in :func:`rms_norm`.

    Returns:
      y like x, contiguous (or ``out``).

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: float32, rounded once. A row that has a NaN or +inf, or that is -inf everywhere, is NaN everywhere, as torch's is. There is no
    backward.
    """


@operator(check=checks.check_log_softmax, reference=reference.log_softmax, out=OutForm(may_be=("x",)))
def log_softmax(x: Tensor, *, kernel: str | None = None, out: Tensor | None = None) -> Tensor:
    """y = x - max(x) - log(sum(exp(x - max(x)))) of each row: the logarithm of :func:`softmax`, without its underflow.

    Args:
      x, kernel, out: as in :func:`softmax`.

    Returns:
      y like x, contiguous (or ``out``).

    Raises:
      RuntimeError: an argument cannot be right, see :func:`softmax`.

    Numerics: as :func:`softmax`.
    """


# ---- activation ----------------------------------------------------------------------------------------------------------------------


@operator(check=checks.check_activation_of_rows, reference=reference.activation, out=OutForm(may_be=("x",)))
def activation(x: Tensor, activation: str, *, bias: Tensor | None = None, kernel: str | None = None, out: Tensor | None = None) -> Tensor:
    """y = activation(x + bias), element by element.

    Args:
      x: [..., width], float16, bfloat16 or float32, views as in :func:`rms_norm`.
      activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu2" (relu squared).
      bias: [width], x's dtype.
      kernel, out: as in :func:`rms_norm`; ``out`` must not overlap bias either.

    Returns:
      y like x, contiguous (or ``out``).

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: float32, x + bias is not rounded in between, y is rounded once. There is no backward.
    """


@operator(check=checks.check_gated_activation, reference=reference.gated_activation)
def gated_activation(
    x: Tensor, activation: str = "silu", *, gate_layout: str = "halves", kernel: str | None = None, out: Tensor | None = None
) -> Tensor:
    """y = activation(gate) * up of each row's gate and up: what follows the first GEMM of a SwiGLU (GeGLU, ...) MLP, where that is not done
    in it (:func:`minfer.gemm_gated`).

    Args:
      x: [..., 2 * width], float16 or bfloat16, views as in :func:`rms_norm`.
      activation: of the gate, as in :func:`activation`; or "swigluoai": gate * sigmoid(1.702 gate) * (up + 1), of a gate that is cut off at
        7 and an up that is within +-7.
      gate_layout: where gate i and up i are. "halves": at i and width + i; "alternating": at 2 i and 2 i + 1; "blocks": blocks of 8 gates
        and their 8 ups (:func:`minfer.pack_gate_up`), of a width that is a multiple of 8.
      kernel: as in :func:`rms_norm`.
      out: y itself, [..., width] of x's dtype, any strides that keep its elements apart. It must not overlap x.

    Returns:
      y, [..., width] of x's dtype, contiguous (or ``out``).

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: float32, rounded once. NaN stays NaN, cut off or not. There is no backward.
    """


@operator(check=checks.check_gated_activation_quantized, reference=reference.gated_activation_quantized)
def gated_activation_quantized(
    x: Tensor,
    quant: str,
    activation: str = "silu",
    *,
    gate_layout: str = "halves",
    scale: Tensor | None = None,
    kernel: str | None = None,
) -> Codes:
    """:func:`gated_activation` in 8-bit codes of the unrounded results.

    Args:
      x, activation, gate_layout, kernel: as in :func:`gated_activation`.
      quant, scale: as in :func:`rms_norm`.

    Returns:
      (q, scales): q [..., width], float8_e4m3fn or int8, contiguous; of "fp8_tensor" the scales are [0].

    Raises:
      RuntimeError: an argument cannot be right, see :func:`gated_activation`.
    """


def _gated(x: Tensor, activation: str, gate_layout: str, quant: str | None, scale: Tensor | None, out: Tensor | None) -> Tensor | Codes:
    if quant is None:
        _refuse("gated_activation", "must be None where quant is", scale=scale)
        return gated_activation(x, activation, gate_layout=gate_layout, out=out)
    _refuse("gated_activation_quantized", "must be None where quant is given", out=out)
    return _with_scale(gated_activation_quantized(x, quant, activation, gate_layout=gate_layout, scale=scale), quant, scale)


def silu_and_mul(x: Tensor, *, quant: str | None = None, scale: Tensor | None = None, out: Tensor | None = None) -> Tensor | Codes:
    """silu(gate) * up of x [..., 2 * width], whose rows are a gate and then its up: SwiGLU.

    Args:
      x, out: as in :func:`gated_activation`.
      quant, scale: as in :func:`rms_norm`; then without ``out``.

    Returns:
      [..., width] of x's dtype, or with ``quant`` (q, scales).
    """
    return _gated(x, "silu", "halves", quant, scale, out)


def gelu_and_mul(
    x: Tensor, approximate: str = "none", *, quant: str | None = None, scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor | Codes:
    """gelu(gate) * up of x [..., 2 * width], whose rows are a gate and then its up: GeGLU.

    Args:
      approximate: "none", the one with erf, or "tanh".
      x, quant, scale, out: as in :func:`silu_and_mul`.

    Returns:
      [..., width] of x's dtype, or with ``quant`` (q, scales).
    """
    return _gated(x, _gelu("gelu_and_mul", approximate), "halves", quant, scale, out)


def swigluoai_and_mul(
    x: Tensor,
    *,
    gate_layout: str = "alternating",
    quant: str | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """gate * sigmoid(1.702 gate) * (up + 1) of x [..., 2 * width], the gate at most 7 and up within +-7: gpt-oss' SwiGLU.

    Args:
      gate_layout: as in :func:`gated_activation`; gpt-oss' weights have "alternating".
      x, quant, scale, out: as in :func:`silu_and_mul`.

    Returns:
      [..., width] of x's dtype, or with ``quant`` (q, scales).
    """
    return _gated(x, "swigluoai", gate_layout, quant, scale, out)


def _gelu(function: str, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"minfer::{function}: approximate must be none or tanh, got '{approximate}'")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def gelu(x: Tensor, approximate: str = "none", *, out: Tensor | None = None) -> Tensor:
    """:func:`activation` "gelu", x * Phi(x), or of ``approximate`` "tanh" "gelu_tanh".

    Args:
      x, out: as in :func:`activation`.
    """
    return activation(x, _gelu("gelu", approximate), out=out)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """:func:`gelu` of x + bias, which is not rounded in between.

    Args:
      x, bias: as in :func:`activation`.
    """
    return activation(x, _gelu("bias_gelu", approximate), bias=bias)


def relu2(x: Tensor) -> Tensor:
    """:func:`activation` "relu2": max(x, 0)^2."""
    return activation(x, "relu2")


def silu(x: Tensor) -> Tensor:
    """:func:`activation` "silu": x * sigmoid(x)."""
    return activation(x, "silu")


# ---- quantisation --------------------------------------------------------------------------------------------------------------------


@operator(check=checks.check_quantize, reference=reference.quantize)
def quantize(x: Tensor, quant: str, *, scale: Tensor | None = None, kernel: str | None = None) -> Codes:
    """8-bit codes of 16-bit numbers, and their float32 scales: ``torch.ops.minfer.quantize``. :func:`quantize_fp8` and
    :func:`quantize_int8` call it.

    Args:
      x: [..., width], float16 or bfloat16, views as in :func:`rms_norm`.
      quant, scale, kernel: as in :func:`rms_norm`.

    Returns:
      (q, scales): q of x's shape, float8_e4m3fn or int8, contiguous; of "fp8_tensor" the scales are [0].

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: scale = max |x| / 448 (int8: / 127) and 1 / scale are rounded once each in float32, code = round(x * (1 / scale)), to nearest,
    ties to even, saturated. Codes are 0 where the scale is. NaN is left out of the largest magnitude, and its code is NaN; of int8 it is 0.
    """


def quantize_fp8(x: Tensor, mode: str = "token", scale: Tensor | None = None) -> Codes:
    """x in float8_e4m3fn, and the scales that it must be multiplied with.

    Args:
      x: [..., width], float16 or bfloat16.
      mode: "token", a scale for each row; "block128", one for each 128 columns of a row; or "tensor", with the given ``scale``.
      scale: float32 [1], for "tensor" alone.

    Returns:
      (q, scales) with scales [..., 1]; of "block128" [rows, ceil(width / 128)], column by column (:mod:`minfer.ops.fused`); of "tensor"
      ``scale``.

    Raises:
      RuntimeError: an argument cannot be right.
    """
    if mode not in ("tensor", "token", "block128"):
        raise RuntimeError(f"minfer::quantize_fp8: mode must be tensor, token or block128, got '{mode}'")
    return _with_scale(quantize(x, f"fp8_{mode}", scale=scale), f"fp8_{mode}", scale)


def quantize_int8(x: Tensor) -> Codes:
    """x in int8, -127 to 127, and a float32 scale [..., 1] for each row, that it must be multiplied with.

    Args:
      x: [..., width], float16 or bfloat16.

    Raises:
      RuntimeError: an argument cannot be right.
    """
    return quantize(x, "int8_token")


@operator(check=checks.check_dequantize, reference=reference.dequantize)
def dequantize(q: Tensor, scales: Tensor, quant: str, *, dtype: torch.dtype) -> Tensor:
    """y = q * scale, which 8-bit codes stand for.

    Args:
      q: [..., width], float8_e4m3fn, or int8 for "int8_token".
      scales: float32, as quantisation gives them: [..., 1]; of "fp8_block128" [rows, ceil(width / 128)], any strides; of "fp8_tensor" [1].
      quant: "fp8_tensor", "fp8_token", "fp8_block128" or "int8_token": the modes of :mod:`minfer.ops.fused`.
      dtype: float16, bfloat16 or float32.

    Returns:
      q's shape, of ``dtype``, contiguous.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: float32, rounded once.
    """


# ---- Hadamard transform --------------------------------------------------------------------------------------------------------------


@operator(check=checks.check_hadamard, reference=reference.hadamard, out=OutForm(may_be=("x",)))
def hadamard(x: Tensor, block: int, *, transpose: bool = False, out: Tensor | None = None) -> Tensor:
    """y = H x / sqrt(block) of each block of a row: a rotation that spreads outliers over a block, before it is quantised.

    Args:
      x: [..., width], float16, bfloat16 or float32, views as in :func:`rms_norm`; width is a multiple of block.
      block: a power of two up to 32768, or 12, 20 or 28 times one up to 28672. H is Sylvester's Hadamard matrix, or the Kronecker product
        of Paley's matrix of order 12, 20 or 28 with that of the power of two. These are QuaRot's rotations, so that weights which it has
        rotated fit.
      transpose: H^T in place of H, which is the inverse. They differ for 12 and 20 only.
      out: y itself, x's dtype and shape, any strides that keep its elements apart. It may be x, but must not overlap it otherwise.

    Returns:
      y like x, contiguous (or ``out``).

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: sums in float32, a tree of log2(block) levels; y is rounded once. There is no backward.

    Source: QuaRot (Ashkboos et al., 2024); Paley, 1933.
    """


# ---- rotary embedding, embedding -----------------------------------------------------------------------------------------------------


@operator(check=checks.check_rope, reference=reference.rope, values=reference.check_rope_values)
def rope(
    q: Tensor, k: Tensor | None, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False, rotary_dim: int | None = None
) -> None:
    """Rotates queries and keys by their positions, in place: pairs (a, b) of a head become (a cos - b sin, b cos + a sin).

    Args:
      q: [tokens, heads, head_dim], float16 or bfloat16, written. Heads are contiguous, tokens and heads may be strided: views of a fused
        qkv are taken as they are.
      k: [tokens, heads_kv, head_dim], q's dtype, written; it must not overlap q. None: q alone.
      cos_sin: float32 [length, rotary_dim], rotary_dim / 2 cosines and then as many sines for each position: :func:`minfer.rope_cache`.
      positions: int64 or int32 [tokens].
      interleaved: pairs are (2 i, 2 i + 1), as in GPT-J; otherwise (i, i + rotary_dim / 2), as in GPT-NeoX and Llama.
      rotary_dim: the width of cos_sin, even, up to head_dim. Elements of a head beyond it keep their bits.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched. A position
        outside of 0 to length - 1 is an error on CPU; on CUDA its token's rotated elements become 0, and nothing outside of cos_sin is
        read. Also where an argument requires grad.

    Numerics: float32, rounded once.

    Source: RoFormer (Su et al., 2021).
    """


@operator(check=checks.check_embedding, reference=reference.embedding, values=reference.check_embedding_values)
def embedding(ids: Tensor, weight: Tensor, *, scale: float | None = None, out: Tensor | None = None) -> Tensor:
    """out[..., :] = weight[ids[...]] * scale: rows of a table.

    Args:
      ids: int64 or int32, any shape.
      weight: [vocabulary, width], float16, bfloat16 or float32. Rows may be strided.
      scale: finite in float32; Gemma's is the square root of the width. None: rows are copied bit by bit.
      out: the result itself, ids' shape and then width, of weight's dtype, any strides that keep its elements apart. It must not overlap
        ids or weight.

    Returns:
      [..., width] of weight's dtype, contiguous (or ``out``).

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched. An id
        outside of 0 to vocabulary - 1 is an error on CPU; on CUDA its row is zeros, and nothing outside of weight is read.

    Numerics: the product is float32, rounded once. There is no backward.
    """
