"""Grouped GEMM of 8-bit operands and their scales: mixture-of-experts layers in e4m3 (W8A8 in FP8) and int8.

w13 = minfer.quantize.stack_scaled_experts(gates, ups)         # of from_fp8, from_int8; or quantize_fp8_experts
w2 = minfer.quantize.stack_scaled_experts(downs)
out = w13.ffn(x, w2, weights, ids)                             # moe_ffn_fp8 with all that is in the two; or, step by step:

token_index, offsets, inverse, scale = minfer.moe_sort(ids, num_experts, weights=weights)
h = w13.gemm(*minfer.rms_norm(x, quant="fp8_block128"), offsets, gather=token_index, activation="silu")
y = w2.gemm(h, None, offsets, row_scale=scale)
out = minfer.moe_combine(y, inverse)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operator import OutForm, operator
from ..checks import grouped_scaled_gemm as checks
from ..reference import grouped_scaled_gemm as reference
from .grouped_gemm import behind_counts

__all__ = [
    "grouped_gemm_fp8",
    "grouped_gemm_fp8_masked",
    "grouped_gemm_int8",
    "grouped_gemm_int8_masked",
    "moe_ffn_fp8",
    "moe_ffn_int8",
]


@operator(
    check=checks.check_grouped_gemm_fp8,
    reference=reference.grouped_gemm_fp8,
    values=checks.check_grouped_gemm_fp8_values,
)
def grouped_gemm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    fast_accum: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """D[r] = row_scale[r] * activation((a[r] * a_scale).(b[e] * b_scale) + bias[e]) for the rows r of expert e, of e4m3 operands.

    Gated: D[r] = row_scale[r] * activation(gate) * up, of the gate and up columns of the sum.

    Args:
      a: [rows, k], float8_e4m3fn; with ``gather`` any number of rows. What :func:`minfer.quantize_fp8` and operators with ``quant`` write.
      b: [experts, k, n], float8_e4m3fn: the transposed view ``weight.mT`` of weights [experts, n, k]. 1 to 512 experts. An operand that is
        not contiguous along k, or whose rows do not begin at multiples of 16 bytes, is copied first; so is a gated b whose n / 2 is no
        multiple of 8, in every call.
      a_scale: float32 on a's device: one number; [a_rows] or [a_rows, 1], one for each row of a, also where ``gather`` picks them; or
        [a_rows, ceil(k / g)], one for each g of k of a row, in any strides. g is 128, 64 or 32, the largest of them that gives this number
        of columns. Scales of blocks may also be uint8, exponents of two (e8m0, 255 is NaN).
      b_scale: likewise: one number; [experts] or [experts, 1], one for each expert; [experts, n] or [experts, n, 1], one for each column
        as b has them; or [experts, ceil(n / 128), ceil(k / 128)], one for each block of 128 x 128. Those of a gated b are
        [experts, 2 * ceil(n / 2 / 128), ceil(k / 128)]: of the gate's blocks, 128 of its columns each, then of up's, whatever
        ``gate_layout`` is.
      offsets: int32 [experts], as in :func:`minfer.grouped_gemm`.
      bias: [experts, n], of D's 16-bit dtype or float32; where D is codes float16, bfloat16 or float32.
      gather: int32 [rows]: row r of the product is a[gather[r]], as in :func:`minfer.grouped_gemm`.
      row_scale: float32 [rows], after the activation and before the division by ``out_scale``: the routing weights.
      activation, gated, gate_layout: as in :func:`minfer.grouped_gemm`.
      out_dtype: bfloat16 (default), float16, or float8_e4m3fn, which ``out_scale`` implies.
      out_scale: float32 [1], for a D of e4m3 codes, round(D / out_scale).
      fast_accum: leave the sums to the tensor core, whose accumulator keeps about 14 bits, rather than add them up in float32 every 128 of
        k. Where scales are of blocks, sums are always added up in float32.
      kernel: for measurements: NAME[@gather_first=0|1] with a name of ``minfer.kernels("moe_scaled")``; with 1, a launch of its own gathers
        the rows. On CPU it is checked and otherwise ignored.
      out: D itself, rows contiguous (any leading dimension); without ``out_dtype`` D has its dtype. It must not overlap itself or another
        argument.

    Returns:
      D, [rows, n] (gated: n / 2), contiguous, or ``out``. Rows behind the last offset are zero.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched. On CUDA
        also where no kernel of this build computes the problem on this device.

    Numerics: products are exact; the tensor core's sums of 128 of k, or of as much as a scale is of where that is less, are added up in
    float32, as are scales and epilogue; D or its code is rounded once. The same inputs, shapes and kernel give the same bits in every run.
    There is no backward.
    """


@operator(
    check=checks.check_grouped_gemm_fp8_masked,
    reference=reference.grouped_gemm_fp8_masked,
    out=OutForm(written=behind_counts),
)
def grouped_gemm_fp8_masked(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    fast_accum: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`grouped_gemm_fp8` of slabs: expert e's rows are the first counts[e] of a[e], as in :func:`minfer.grouped_gemm_masked`.

    Args:
      a: [experts, max_rows, k], float8_e4m3fn.
      a_scale: one number; [experts, max_rows] or [experts, max_rows, 1]; or [experts, max_rows, ceil(k / g)], with g as there.
      counts: int32 [experts], read on the device and clamped to 0 .. max_rows.
      row_scale: float32 [experts, max_rows].
      b, b_scale, bias, activation, gated, gate_layout, out_dtype, out_scale, fast_accum, kernel: as in :func:`grouped_gemm_fp8`.
      out: [experts, max_rows, n] (gated: n / 2), one run of rows.

    Returns:
      D, [experts, max_rows, n] (gated: n / 2). Rows behind an expert's count are zero; in ``out`` they are left as they are.

    Raises:
      RuntimeError: as :func:`grouped_gemm_fp8`.

    Numerics: as :func:`grouped_gemm_fp8`.
    """


@operator(
    check=checks.check_grouped_gemm_int8,
    reference=reference.grouped_gemm_int8,
    values=checks.check_grouped_gemm_int8_values,
)
def grouped_gemm_int8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`grouped_gemm_fp8` of int8 operands.

    Args:
      a: [rows, k], int8; what :func:`minfer.quantize_int8` writes.
      b: [experts, k, n], int8.
      a_scale: float32, in the shapes of :func:`grouped_gemm_fp8`.
      b_scale: float32: one number; [experts] or [experts, 1]; or [experts, n] or [experts, n, 1].
      out_dtype: bfloat16 (default) or float16.
      offsets, bias, gather, row_scale, activation, gated, gate_layout, kernel, out: as in :func:`grouped_gemm_fp8`.

    Returns:
      D, [rows, n] (gated: n / 2), contiguous, or ``out``. Rows behind the last offset are zero.

    Raises:
      RuntimeError: as :func:`grouped_gemm_fp8`.

    Numerics: sums are int32 and exact (k below 2^17); where ``a_scale`` is of blocks, the int32 sums of each g of k, times their scale, are
    added up in float32. The rest is float32, D is rounded once. The same inputs, shapes and kernel give the same bits in every run. There
    is no backward.
    """


@operator(
    check=checks.check_grouped_gemm_int8_masked,
    reference=reference.grouped_gemm_int8_masked,
    out=OutForm(written=behind_counts),
)
def grouped_gemm_int8_masked(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`grouped_gemm_fp8_masked` of int8 operands.

    Args:
      a: [experts, max_rows, k], int8.
      b, b_scale, out_dtype: as in :func:`grouped_gemm_int8`.
      a_scale: float32, in the shapes of :func:`grouped_gemm_fp8_masked`.
      counts, bias, row_scale, activation, gated, gate_layout, kernel, out: as in :func:`grouped_gemm_fp8_masked`.

    Returns:
      D, [experts, max_rows, n] (gated: n / 2). Rows behind an expert's count are zero; in ``out`` they are left as they are.

    Raises:
      RuntimeError: as :func:`grouped_gemm_fp8`.

    Numerics: as :func:`grouped_gemm_int8`.
    """


@operator(check=checks.check_moe_ffn_fp8, reference=reference.moe_ffn_fp8)
def moe_ffn_fp8(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    x_scale: Tensor | None = None,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """:func:`minfer.moe_ffn` with e4m3 experts: out[t] = sum over j of weights[t, j] * FFN of expert ids[t, j] of x[t].

    x is quantised, unless it is codes already. The epilogue of the first grouped GEMM quantises the activated product, which the second one
    reads; no number in 16 bits lies between them.

    Args:
      x: [tokens, hidden]: float16 or bfloat16; or with ``x_scale`` float8_e4m3fn. 16-bit x gets a scale for each 128 of a token
        ("fp8_block128" of :func:`minfer.quantize_fp8`) where ``w13_scale`` is of blocks, otherwise one for each token ("fp8_token").
      w13: [experts, 2 * inter, hidden], float8_e4m3fn: gate and up rows in ``gate_layout``'s order.
      w2: [experts, hidden, inter], float8_e4m3fn.
      w13_scale, w2_scale: those of :func:`grouped_gemm_fp8`'s ``b_scale``, with rows of the weights for b's columns: one number; [experts];
        [experts, 2 * inter] and [experts, hidden]; or of blocks [experts, 2 * ceil(inter / 128), ceil(hidden / 128)], the gate's, then
        up's, and [experts, ceil(hidden / 128), ceil(inter / 128)].
      weights, ids: float32 and int32 [tokens, top_k], of :func:`minfer.moe_router`. An id outside 0 .. experts - 1 adds nothing.
      x_scale: of codes x: one number; [tokens] or [tokens, 1]; or [tokens, ceil(hidden / g)], as ``a_scale`` there.
      activation: of the gate, as in :func:`minfer.grouped_gemm`.
      b13, b2: [experts, 2 * inter] and [experts, hidden], of the result's dtype or float32.
      gate_layout: as in :func:`minfer.grouped_gemm`.
      out_dtype: float16 or bfloat16; None: that of a 16-bit x, otherwise bfloat16.
      fast_accum: of both products, as in :func:`grouped_gemm_fp8`. The second one's sums are always added up in float32.

    Returns:
      [tokens, hidden], contiguous.

    Raises:
      RuntimeError: as :func:`grouped_gemm_fp8`.

    Numerics: as :func:`grouped_gemm_fp8`. The activated product h, in float32, becomes codes with a scale max |h| / 448 for each 32 or 64
    of its columns; which of the two, the plan says (on CPU 64). What an expert returns, weighed, is rounded to the result's dtype before
    the sum over a token's experts, which is float32 and in the order of j. The same inputs give the same bits in every run. There is no
    backward.
    """


@operator(check=checks.check_moe_ffn_int8, reference=reference.moe_ffn_int8)
def moe_ffn_int8(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    x_scale: Tensor | None = None,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`moe_ffn_fp8` with int8 experts.

    Args:
      x: [tokens, hidden]: float16 or bfloat16, which gets a scale for each token ("int8_token"); or with ``x_scale`` int8.
      w13, w2: int8, in the shapes of :func:`moe_ffn_fp8`.
      w13_scale, w2_scale: as ``b_scale`` of :func:`grouped_gemm_int8`, with rows of the weights for b's columns.
      weights, ids, x_scale, activation, b13, b2, gate_layout, out_dtype: as in :func:`moe_ffn_fp8`.

    Returns:
      [tokens, hidden], contiguous.

    Raises:
      RuntimeError: as :func:`grouped_gemm_fp8`.

    Numerics: as :func:`grouped_gemm_int8`. h becomes codes of -127 to 127, the nearest, with a scale max |h| / 127 for each 32 or 64 of its
    columns; otherwise as :func:`moe_ffn_fp8`.
    """
