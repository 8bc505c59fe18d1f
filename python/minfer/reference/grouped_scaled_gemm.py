"""CPU kernels of grouped GEMM of 8-bit operands: ATen compositions over the experts. Of operands in float64 they are the truth that tests
measure by, with the type of the result given as ``out_dtype``; a layer of x in float64 then quantises neither x nor what is between its
products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks.grouped_scaled_gemm import group_of_scale, kind_of_scale, layer_dtype
from ..checks.scaled_gemm import BLOCK, fp8_output
from ..formats.gate_up import join_gate_up
from .fused import quantize, quantized_in_groups
from .grouped_gemm import epilogue, fill_rows, ranges_of_offsets, rows_of, sum_of_experts
from .scaled_gemm import finished, of_elements, product_of_scaled

LAYER_GROUP = 64  # columns of a layer's inner activations to a scale; kernels take 32 or 64


class RowScale:
    """Scales of activations [.., k], whose rows are counted through."""

    def __init__(self, scale: Tensor, rows: Sequence[int], k: int):
        self.group, self.k = group_of_scale(scale, rows, k), k
        self.one = self.group is None and scale.numel() == 1
        self.scale = scale.reshape(1, 1) if self.one else scale.flatten(0, len(rows) - 1)

    def of(self, begin: int, end: int, gather: Tensor | None = None) -> Tensor:
        """[rows, k] of some rows, of scales that are not of blocks [rows, 1] or [1, 1]."""
        if self.one:
            return self.scale
        own = rows_of(self.scale, gather, begin, end)
        return own.reshape(-1, 1) if self.group is None else of_elements(own, len(own), 1, self.k, self.group)


class ExpertScale:
    """Scales of weights [experts, n, k], gated ones in ``gate_layout``."""

    def __init__(self, scale: Tensor, shape: tuple[int, int, int], gate_layout: str | None):
        experts, self.n, self.k = shape
        self.scale, self.gate_layout = scale, gate_layout
        self.kind = kind_of_scale(scale, *shape, gate_layout is not None)

    def of(self, expert: int) -> Tensor:
        """[n, k] of an expert, of scales that are not of blocks [n, 1] or [1, 1]."""
        if self.kind == "all":
            return self.scale.reshape(1, 1)
        own = self.scale[expert]
        if self.kind != "block":
            return own.reshape(-1, 1)
        if self.gate_layout is None:
            return of_elements(own, self.n, BLOCK, self.k)
        gate, up = (of_elements(half, self.n // 2, BLOCK, self.k) for half in own.chunk(2))
        return join_gate_up(gate, up, self.gate_layout)


def _grouped(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ranges: Sequence[tuple[int, int]],
    rows: int,
    out_dtype: torch.dtype,
    out_scale: Tensor | None,
    *,
    gather: Tensor | None = None,
    gated: bool = False,
    gate_layout: str = "halves",
    **others,
) -> Tensor:
    """``rows`` of the product, of a [.., k]; ``ranges``: of each expert."""
    experts, k, n = b.shape
    of_rows = RowScale(a_scale, a.shape[:-1], k)
    of_experts = ExpertScale(b_scale, (experts, n, k), gate_layout if gated else None)
    a = a.flatten(0, -2)

    def product(expert: int, begin: int, end: int) -> Tensor:
        own = rows_of(a, gather, begin, end)
        return product_of_scaled(own, b[expert], of_rows.of(begin, end, gather), of_experts.of(expert))

    out = torch.zeros((rows, n // 2 if gated else n), dtype=out_dtype, device=a.device)
    gate = dict(gated=gated, gate_layout=gate_layout)
    return fill_rows(out, ranges, product, lambda d: finished(d, out_dtype, out_scale), **gate, **others)


def grouped_gemm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    gather: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    **others,
) -> Tensor:
    """What :func:`minfer.grouped_gemm_fp8` computes, in float32, rounded once; of float64 in float64."""
    rows = (a if gather is None else gather).shape[0]
    result = fp8_output(out_dtype, out_scale), out_scale
    return _grouped(a, b, a_scale, b_scale, ranges_of_offsets(offsets, rows), rows, *result, gather=gather, **others)


def grouped_gemm_fp8_masked(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    counts: Tensor,
    *,
    row_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    **others,
) -> Tensor:
    """What :func:`minfer.grouped_gemm_fp8_masked` computes, in float32, rounded once; of float64 in float64."""
    experts, max_rows, _ = a.shape
    ranges = [(e * max_rows, e * max_rows + min(max(count, 0), max_rows)) for e, count in enumerate(counts.tolist())]
    row_scale = None if row_scale is None else row_scale.flatten()
    result = fp8_output(out_dtype, out_scale), out_scale
    d = _grouped(a, b, a_scale, b_scale, ranges, experts * max_rows, *result, row_scale=row_scale, **others)
    return d.view(experts, max_rows, d.shape[1])


def grouped_gemm_int8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, **others) -> Tensor:
    """As :func:`grouped_gemm_fp8`, of int8."""
    return grouped_gemm_fp8(a, b, a_scale, b_scale, offsets, **others)


def grouped_gemm_int8_masked(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, counts: Tensor, **others) -> Tensor:
    """As :func:`grouped_gemm_fp8_masked`, of int8."""
    return grouped_gemm_fp8_masked(a, b, a_scale, b_scale, counts, **others)


# ---- layers --------------------------------------------------------------------------------------------------------------------------


def _layer(
    x: Tensor,
    x_scale: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    out_dtype: torch.dtype,
    *,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
) -> Tensor:
    experts, codes = w13.shape[0], x.dtype
    rows = RowScale(x_scale, x.shape[:1], x.shape[1])
    of_w13, of_w2 = ExpertScale(w13_scale, w13.shape, gate_layout), ExpertScale(w2_scale, w2.shape, None)

    def product(a: Tensor, of_a: Tensor, weight: Tensor, of_weight: Tensor, bias: Tensor | None) -> Tensor:
        y = product_of_scaled(a, weight.mT, of_a, of_weight)
        return y if bias is None else y + bias.to(y.dtype)

    def ffn(expert: int, tokens: Tensor) -> Tensor:
        b13_own, b2_own = (None if bias is None else bias[expert] for bias in (b13, b2))
        y = product(x[tokens], rows.of(0, len(tokens), tokens), w13[expert], of_w13.of(expert), b13_own)
        h, scale = epilogue(y, None, activation, True, gate_layout), torch.ones(1, 1, device=x.device)
        if codes != torch.float64:
            h, scale = quantized_in_groups(h, LAYER_GROUP, codes)
        of_h = RowScale(scale, h.shape[:1], h.shape[1]).of(0, len(h))
        return product(h, of_h, w2[expert], of_w2.of(expert), b2_own)

    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64 if codes == torch.float64 else torch.float32, device=x.device)
    return sum_of_experts(out, experts, weights, ids, ffn).to(out_dtype)


def _as_codes(x: Tensor, x_scale: Tensor | None, quant: str) -> tuple[Tensor, Tensor]:
    """x and its scales; a float64 x stays what it is."""
    if x_scale is not None:
        return x, x_scale
    return (x, torch.ones(1, device=x.device)) if x.dtype == torch.float64 else quantize(x, quant)


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
    out_dtype: torch.dtype | None = None,
    **others,
) -> Tensor:
    """What :func:`minfer.moe_ffn_fp8` computes, expert by expert, in float32; of float64 in float64."""
    of_blocks = kind_of_scale(w13_scale, *w13.shape, True) == "block"
    codes = _as_codes(x, x_scale, "fp8_block128" if of_blocks else "fp8_token")
    return _layer(*codes, w13, w2, w13_scale, w2_scale, weights, ids, layer_dtype(x, out_dtype), **others)


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
    out_dtype: torch.dtype | None = None,
    **others,
) -> Tensor:
    """As :func:`moe_ffn_fp8`, of int8."""
    codes = _as_codes(x, x_scale, "int8_token")
    return _layer(*codes, w13, w2, w13_scale, w2_scale, weights, ids, layer_dtype(x, out_dtype), **others)
