"""What lies between the attention of a decoder layer and that of the next one, of weights in 4, 8 or 16 bits, as one operator.

    qkv = minfer.w4a16_decoder_block(attended, residual, *o, mlp_norm, *gate_up, *down, next_norm, *next_qkv, eps)

Of one or two tokens on Hopper it can be one launch, in which each product waits for the one before; otherwise it is the package's own
operators, one after the other.
"""

from __future__ import annotations

from torch import Tensor

from .._core.operator import operator
from ..checks import decoder_block as checks
from ..reference import decoder_block as reference

__all__ = ["decoder_block", "fp8_decoder_block", "w4a16_decoder_block"]


@operator(check=checks.check_w4a16_decoder_block, reference=reference.w4a16_decoder_block, values=reference.check_values)
def w4a16_decoder_block(
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
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """The rest of a decoder layer behind its attention, and the first product of the next one:

        x = residual + a.Wo^T + o_bias
        h = activation(gate) * up, gate and up being rms_norm(x, mlp_norm).Wgu^T
        residual = x + h.Wd^T + down_bias
        D = rms_norm(residual, next_norm).Wn^T + next_bias

    Args:
      a: [..., k], float16 or bfloat16, of one mode or more; the leading ones are rows. The output of attention; k is a multiple of 8.
      residual: [..., h], the leading modes and the dtype of a, contiguous. It is written, and must not overlap another argument.
      o_qweight, o_scales: Wo [h, k], in 4 bits without zero points: int32 [ceil(h / 64), ceil(k / 64), 512] of
        :func:`minfer.w4a16_pack`, and a's dtype [ceil(k / group_size), h]. h is a multiple of 8.
      mlp_norm: [h], a's dtype.
      gate_up_qweight, gate_up_scales: Wgu [2 * inter, h], rows interleaved by ``minfer.pack_gate_up`` as :func:`minfer.w4a16_gemm_gated`
        takes them. inter is a multiple of 8.
      down_qweight, down_scales: Wd [h, inter].
      next_norm: [h], a's dtype.
      next_qweight, next_scales: Wn [n, h], what multiplies the norm of the next layer, or of the whole model's end. n is a multiple of 8;
        0 where nothing stands behind the residual, as in a model's last layer: then next_norm is not used.
      eps: of both norms, finite in float32 and not negative.
      weight_offset: of both norms, finite in float32; 1.0 for Gemma's.
      o_bias, down_bias, next_bias: [h], [h] and [n], a's dtype or float32.
      group_size: of all four weights, as in :func:`minfer.w4a16_gemm`.
      activation: of the gate: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu2" (relu squared).
      constant_weights: as in :func:`minfer.w4a16_gemm`, of all four weights.
      kernel: None, the plan decides; "one_launch", which is an error where that cannot be: more than two rows, another GPU than Hopper, k
        or groups that do not fit, in the batch-invariant mode also two rows, k that is no multiple of 128 for each of the ranges it is
        summed in, and h above 16384; or "separate", the operators one after the other. On CPU it is checked and otherwise ignored.

    Returns:
      D, [..., n] of a's dtype, contiguous. Any number of rows >= 0.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: x, h, the residual and D are rounded once each. In one launch a norm is not rounded before it is multiplied: what is
    multiplied is an integer of 23 bits times a power of two for each 128 columns, off by at most 2^-22 of the largest of them; its
    products with codes are summed exactly in int32 and scaled in float32. Separately, norms and weights are rounded to a's dtype, as
    :func:`minfer.rms_norm` and :func:`minfer.w4a16_gemm` do it. Either has the same bits in every run. In the batch-invariant mode both
    have the same bits, those of the operators. docs/numerics.md has the bounds. There is no backward.
    """


@operator(check=checks.check_fp8_decoder_block, reference=reference.fp8_decoder_block, values=reference.check_fp8_values)
def fp8_decoder_block(
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
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """:func:`w4a16_decoder_block` of e4m3 weights.

    Args:
      a, residual, mlp_norm, next_norm, eps, weight_offset, o_bias, down_bias, next_bias, activation, constant_weights: as there, of any
        sizes, but for inter, which is a multiple of 8.
      o_weight, o_scale: Wo [h, k], float8_e4m3fn, and its scale as :func:`minfer.gemm_fp8` takes b_scale: float32 [1], [h], or of blocks
        [ceil(h / 128), ceil(k / 128)], these also uint8.
      gate_up_weight, gate_up_scale: Wgu [2 * inter, h], rows interleaved by ``minfer.pack_gate_up``, and its scale as
        :func:`minfer.gemm_fp8_gated` takes it.
      down_weight, down_scale: Wd [h, inter].
      next_weight, next_scale: Wn [n, h].
      kernel: as there; one launch wants k of all weights in multiples of 128, and scales that are all of blocks, in float32, or none.

    Returns:
      As there.

    Raises:
      RuntimeError: as there.

    Numerics: x, h, the residual and D are rounded once each. Separately, what is multiplied are e4m3 codes of activations, with a scale for
    each token, or for each 128 columns where a weight's scales are of blocks, as :func:`minfer.quantize_fp8` and
    :func:`minfer.rms_norm` make them. In one launch activations are not quantised: they are multiplied as float16 numbers times a power of
    two for each 128 columns, that of a norm without its factor, which is exact but for what is below 2^-28 of the largest of them and, of
    norms, a rounding to 11 bits. docs/numerics.md has the bounds. There is no backward.
    """


@operator(check=checks.check_decoder_block, reference=reference.decoder_block, values=reference.check_dense_values)
def decoder_block(
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
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """:func:`w4a16_decoder_block` of weights in 16 bits.

    Args:
      a, residual, mlp_norm, next_norm, eps, weight_offset, o_bias, down_bias, next_bias, activation, constant_weights: as there, of any
        sizes, but for inter, which is a multiple of 8.
      o_weight: Wo [h, k] of a's dtype, as a model has it: y = x.W^T.
      gate_up_weight: Wgu [2 * inter, h], rows interleaved by ``minfer.pack_gate_up``.
      down_weight: Wd [h, inter].
      next_weight: Wn [n, h].
      kernel: as there; one launch wants k of all weights in multiples of 64.

    Returns:
      As there.

    Raises:
      RuntimeError: as there.

    Numerics: x, h, the residual and D are rounded once each, and so is what a norm's weight makes of x: separately with the norm's factor,
    in one launch before it. In one launch what is multiplied of float16 is times a power of two for each 128 columns, so that it does not
    overflow. docs/numerics.md has the bounds. There is no backward.
    """
