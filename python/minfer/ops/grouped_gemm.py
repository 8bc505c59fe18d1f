"""Grouped GEMM, the products of mixture-of-experts layers.

    out = minfer.moe_ffn(x, w13, w2, weights, ids)                 # or, step by step:

    token_index, offsets, inverse, scale = minfer.moe_sort(ids, num_experts, weights=weights)
    h = minfer.grouped_gemm(x, w13.mT, offsets, gather=token_index, activation="silu", gated=True)
    y = minfer.grouped_gemm(h, w2.mT, offsets, row_scale=scale)
    out = minfer.moe_combine(y, inverse)

How many rows an expert has is read on the device: no host synchronises, nothing is padded, and a captured graph follows its routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operator import OutForm, operator
from ..checks import grouped_gemm as checks
from ..reference import grouped_gemm as reference
from .output_codes import Codes, with_scale

__all__ = [
    "grouped_gemm",
    "grouped_gemm_masked",
    "moe_ffn",
]


def behind_counts(result: Tensor, out: Tensor, *operands: Tensor) -> Tensor:
    """Masked forms, whose last operand is counts, write no row behind an expert's count."""
    inside = torch.arange(result.shape[1], device=result.device)[None, :, None] < operands[-1][:, None, None]
    return torch.where(inside, result, out)


@operator(
    check=checks.check_grouped_gemm,
    reference=reference.grouped_gemm,
    values=checks.check_grouped_gemm_values,
    before=with_scale,
)
def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """D[r] = row_scale[r] * activation(a[r].b[e] + bias[e]) for the rows r of expert e, which lie together.

    Gated: D[r] = row_scale[r] * activation(gate) * up, of the two halves of a[r].b[e] + bias[e].

    Args:
      a: [rows, k], float16 or bfloat16; with ``gather`` any number of rows.
      b: [experts, k, n], a's dtype: the transposed view ``weight.mT`` of weights [experts, n, k] is taken as it is, another layout is
        copied first. 1 to 512 experts.
      offsets: int32 [experts]: expert e's rows are offsets[e - 1] to offsets[e] (from 0 for the first), as :func:`moe_sort` returns them
        and ``torch._grouped_mm`` takes them. They must ascend; read on the device, and clamped to the rows there are.
      bias: [experts, n], a's dtype.
      gather: int32 [rows]: row r of the product is a[gather[r]]. Up to some 64 rows an expert the kernel loads them from a
        itself, so that no permuted copy of a is made; where the tensor cores are the limit, a launch of its own gathers them first. A row
        that a does not have is an error on CPU; on CUDA it counts as a row of zeros. Entries behind the last offset may be anything.
      row_scale: float32 [rows], after the activation: the routing weights.
      activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu2" (relu squared); gated, of the gate, and "swigluoai" as
        well, gpt-oss's clamped form gate * sigmoid(1.702 * gate) * (up + 1) of gate <= 7 and -7 <= up <= 7.
      gated: b's n columns are n / 2 gate and n / 2 up columns.
      gate_layout: their order: "halves" (all gate, then all up, the checkpoints' w13), "alternating" (gpt-oss) or "blocks" (8 and 8,
        ``minfer.pack_gate_up``). ``bias`` has the same order.
      quant, scale: None, or "fp8_tensor" and its scale, float32 [1]: D in 8-bit codes, as in :func:`minfer.gemm`.
      kernel: for measurements: NAME[@gather_first=0|1] with a name of ``minfer.kernels("moe")``; with 1, a launch of its own gathers
        the rows. On CPU it is checked and otherwise ignored.
      out: D itself, a's dtype, with ``quant`` float8_e4m3fn, rows contiguous (any leading dimension). It must not overlap itself or another
        argument.

    Returns:
      D, [rows, n] (gated: n / 2), contiguous, or ``out``. Rows behind the last offset are zero. With ``quant``: (q, scale), q of D's
      shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: products are accumulated in float32 in k's order, the epilogue is float32, D or its code is rounded once. The same inputs,
    shapes and kernel give the same bits in every run. There is no backward.
    """


@operator(
    check=checks.check_grouped_gemm_masked, reference=reference.grouped_gemm_masked, out=OutForm(written=behind_counts), before=with_scale
)
def grouped_gemm_masked(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    quant: str | None = None,
    scale: Tensor | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """:func:`grouped_gemm` of slabs: expert e's rows are the first counts[e] of a[e]. The layout of expert parallelism in CUDA graphs.

    Args:
      a: [experts, max_rows, k].
      counts: int32 [experts], read on the device and clamped to 0 .. max_rows.
      row_scale: float32 [experts, max_rows].
      b, bias, activation, gated, gate_layout, quant, scale, kernel: as in :func:`grouped_gemm`.
      out: [experts, max_rows, n] (gated: n / 2), one run of rows.

    Returns:
      D, [experts, max_rows, n] (gated: n / 2). Rows behind an expert's count are zero; in ``out`` they are left as they are, and a caller
      that reads none of them saves writing them. With ``quant``: (q, scale), as :func:`grouped_gemm`.

    Raises:
      RuntimeError: as :func:`grouped_gemm`.

    Numerics: as :func:`grouped_gemm`.
    """


@operator(check=checks.check_moe_ffn, reference=reference.moe_ffn)
def moe_ffn(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
) -> Tensor:
    """The experts of a mixture-of-experts layer: out[t] = sum over j of weights[t, j] * FFN of expert ids[t, j] of x[t].

    The FFN of an expert is (activation(gate) * up).w2[e]^T + b2[e], with gate and up the halves of x.w13[e]^T + b13[e]. Four launches:
    sort, grouped GEMM with gather and gated epilogue, grouped GEMM with the routing weights in its epilogue, sum; with many tokens the
    gather is a fifth.

    Args:
      x: [tokens, hidden], float16 or bfloat16.
      w13: [experts, 2 * inter, hidden], x's dtype: gate and up rows in ``gate_layout``'s order.
      w2: [experts, hidden, inter], x's dtype.
      weights, ids: float32 and int32 [tokens, top_k], of :func:`moe_router`. An id outside 0 .. experts - 1 adds nothing.
      activation: of the gate, as in :func:`grouped_gemm`.
      b13, b2: [experts, 2 * inter] and [experts, hidden], x's dtype.
      gate_layout: as in :func:`grouped_gemm`.

    Returns:
      [tokens, hidden], x's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: as :func:`grouped_gemm`; what an expert returns, weighed, is rounded to x's dtype before the sum over a token's experts, which
    is float32 and in the order of j. The same inputs give the same bits in every run. There is no backward.
    """
