"""Grouped GEMM with 4-bit weights, the products of quantised mixture-of-experts layers.

w13 = minfer.quantize.quantize_w4_experts(w13, gated=True)     # or from_gpt_oss, stack_experts
w2 = minfer.quantize.quantize_w4_experts(w2)
out = w13.ffn(x, w2, weights, ids)          # moe_ffn_w4a16 with all that is in the two; or, step by step:

token_index, offsets, inverse, scale = minfer.moe_sort(ids, num_experts, weights=weights)
h = w13.gemm(x, offsets, gather=token_index, activation="silu")
y = w2.gemm(h, offsets, row_scale=scale)
out = minfer.moe_combine(y, inverse)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._core.operator import operator
from ..checks import grouped_quantized_gemm as checks
from ..formats.weight_formats import stored_scales
from ..reference import grouped_quantized_gemm as reference
from .output_codes import Codes, with_scale

__all__ = [
    "grouped_w4a16_gemm",
    "moe_ffn_w4a16",
]


def _with_stored_scales(call: Callable[..., Tensor]) -> Callable[..., Tensor | Codes]:
    """Scales of a byte may come in their own type; the operators take them as uint8. Codes come with their scale."""

    def run(a, qweight, scales, zeros, offsets, *, w4_format: str = "int4", **options: Any) -> Tensor:
        return call(a, qweight, stored_scales(scales, w4_format), zeros, offsets, w4_format=w4_format, **options)

    return with_scale(run)


def _layer_with_stored_scales(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x, w13, w13_scales, w13_zeros, w2, w2_scales, w2_zeros, weights, ids, *, w4_format: str = "int4", **options: Any) -> Tensor:
        first, second = (w13, stored_scales(w13_scales, w4_format), w13_zeros), (w2, stored_scales(w2_scales, w4_format), w2_zeros)
        return call(x, *first, *second, weights, ids, w4_format=w4_format, **options)

    return run


@operator(
    check=checks.check_grouped_w4a16_gemm,
    reference=reference.grouped_w4a16_gemm,
    values=checks.check_grouped_w4a16_gemm_values,
    before=_with_stored_scales,
)
def grouped_w4a16_gemm(
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor,
    *,
    group_size: int = 128,
    w4_format: str = "int4",
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """D[r] = row_scale[r] * activation(alpha[e] * a[r].W[e]^T + bias[e]) for the rows r of expert e, with W [experts, n, k] in 4-bit codes.

    Gated: D[r] = row_scale[r] * activation(gate) * up, of the gate and up columns of alpha[e] * a[r].W[e]^T + bias[e].

    Args:
      a: [rows, k], float16 or bfloat16; with ``gather`` any number of rows. k is a multiple of 8.
      qweight: int32 [experts, ceil(n / 64), ceil(k / 64), 512], contiguous: each expert's codes, packed by :func:`minfer.w4a16_pack` with
        the same ``w4_format``. 1 to 512 experts. A view that does not begin at a multiple of 16 bytes is copied at every call; so are
        such scales and zeros.
      scales: [experts, G, n], contiguous, G = ceil(k / group_size), of the type that ``w4_format`` says. n is a multiple of 8; on CUDA,
        scales of one byte are copied at every call where it is none of 16.
      zeros: [experts, G, n], contiguous, a's dtype, in units of codes, integers or fractions; int4 only. None is 8: symmetric weights.
      offsets: int32 [experts], as in :func:`minfer.grouped_gemm`.
      group_size: columns of W that share a scale and a zero: -1 (all of them, G = 1) or a power of two >= 32, unless ``w4_format``
        prescribes it.
      w4_format: what a code stands for, as in :func:`minfer.w4a16_gemm`: "int4", "nf4", "mxfp4" (E8M0 scales for 32 columns) or "nvfp4"
        (E4M3 scales for 16), with the same scales.
      alpha: float32 [experts], of each expert's whole weight; nvfp4's global scales. None is 1.
      bias: [experts, n], a's dtype.
      gather, row_scale: as in :func:`minfer.grouped_gemm`.
      activation: as in :func:`minfer.grouped_gemm`, "swigluoai" included.
      gated: W's rows are in the order of ``minfer.pack_gate_up``, 8 gate rows, then their 8 up rows, and so is ``bias``. n is a multiple
        of 16. Checkpoints have another order; :mod:`minfer.quantize` makes this one.
      quant, scale: None, or "fp8_tensor" and its scale, float32 [1]: D in 8-bit codes, as in :func:`minfer.gemm`. ``scale`` is D's,
        ``scales`` are the weights'.
      kernel: for measurements: NAME[@gather_first=0|1] with a name of ``minfer.kernels("moe_w4a16")``; with 1, a launch of its own gathers
        the rows. On CPU it is checked and otherwise ignored.
      out: D itself, a's dtype, with ``quant`` float8_e4m3fn, rows contiguous (any leading dimension). It must not overlap itself or another
        argument.

    Returns:
      D, [rows, n] (gated: n / 2), contiguous, or ``out``. Rows behind the last offset are zero. With ``quant``: (q, scale), q of D's
      shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched. On CUDA
        also a format or a group size that no kernel of this build reads.

    Numerics: a weight is exact or has one or two roundings to a's dtype, as its format and the kernel have it; products are accumulated in
    float32, the epilogue is float32, D or its code is rounded once; docs/numerics.md has the bounds. The same inputs, shapes and kernel
    give the same bits in every run. There is no backward.
    """


@operator(check=checks.check_moe_ffn_w4a16, reference=reference.moe_ffn_w4a16, before=_layer_with_stored_scales)
def moe_ffn_w4a16(
    x: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w13_zeros: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor,
    w2_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    *,
    group_size: int = 128,
    w4_format: str = "int4",
    alpha13: Tensor | None = None,
    alpha2: Tensor | None = None,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> Tensor:
    """:func:`minfer.moe_ffn` with experts in 4-bit codes: out[t] = sum over j of weights[t, j] * FFN of expert ids[t, j] of x[t].

    Four launches: sort, grouped GEMM with gather and gated epilogue, grouped GEMM with the routing weights in its epilogue, sum; with many
    tokens the gather may be a fifth.

    Args:
      x: [tokens, hidden], float16 or bfloat16; hidden is a multiple of 8.
      w13, w13_scales, w13_zeros: weights [experts, 2 * inter, hidden] as :func:`grouped_w4a16_gemm` takes them, rows in the order of
        ``minfer.pack_gate_up``; inter is a multiple of 8.
      w2, w2_scales, w2_zeros: likewise of [experts, hidden, inter].
      weights, ids: float32 and int32 [tokens, top_k], of :func:`minfer.moe_router`. An id outside 0 .. experts - 1 adds nothing.
      group_size, w4_format: of both, as in :func:`grouped_w4a16_gemm`.
      alpha13, alpha2: float32 [experts].
      activation: of the gate, as in :func:`minfer.grouped_gemm`.
      b13, b2: [experts, 2 * inter], in the order of w13's rows, and [experts, hidden], x's dtype.

    Returns:
      [tokens, hidden], x's dtype, contiguous.

    Raises:
      RuntimeError: as :func:`grouped_w4a16_gemm`.

    Numerics: as :func:`grouped_w4a16_gemm`, and between the products as :func:`minfer.moe_ffn`. There is no backward.
    """
