"""CPU kernels of grouped GEMM: ATen compositions over the experts. In float64 the same functions are the truth that tests measure by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..checks import grouped_gemm as checks_moe
from ..checks.common import output_dtype
from ..formats.gate_up import split_gate_up
from .codes import stored
from .epilogue import ACTIVATION, compute_dtype
from .products import product


def epilogue(y: Tensor, row_scale: Tensor | None, activation: str, gated: bool, gate_layout: str) -> Tensor:
    """row_scale * activation(y), or of a gated y its halves' product."""
    if not gated:
        y = ACTIVATION[activation](y)
    else:
        gate, up = split_gate_up(y, gate_layout)
        if activation == checks_moe.SWIGLUOAI:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            y = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
        else:
            y = ACTIVATION[activation](gate) * up
    return y if row_scale is None else y * row_scale.to(y.dtype).unsqueeze(-1)


def ranges_of_offsets(offsets: Tensor, rows: int) -> list[tuple[int, int]]:
    """Each expert's rows, as far as there are any."""
    ends = offsets.tolist()
    return [(min(max(begin, 0), rows), min(end, rows)) for begin, end in zip([0, *ends], ends, strict=False)]


def fill_rows(
    out: Tensor,
    ranges: Iterable[tuple[int, int]],
    product: Callable[[int, int, int], Tensor],
    store: Callable[[Tensor], Tensor],
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
) -> Tensor:
    """``out``, with the rows of every expert filled in. ``ranges``: of each expert's rows; ``product``: (expert, begin, end) -> its product
    of these rows, asked of experts that have some; ``store``: a result as it is stored."""
    for expert, (begin, end) in enumerate(ranges):
        if end > begin:
            y = product(expert, begin, end)
            y = y if bias is None else y + bias[expert].to(y.dtype)
            d = epilogue(y, None if row_scale is None else row_scale[begin:end], activation, gated, gate_layout)
            out[begin:end] = store(d)
    return out


def rows_of(x: Tensor, gather: Tensor | None, begin: int, end: int) -> Tensor:
    return x[begin:end] if gather is None else x.index_select(0, gather[begin:end].long())


def by_expert(
    a: Tensor,
    weight: Callable[[int], Tensor],
    n: int,
    offsets: Tensor,
    *,
    alpha: Tensor | None = None,
    gather: Tensor | None = None,
    gated: bool = False,
    quant: str | None = None,
    scale: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Grouped GEMM; ``weight`` returns an expert's [k, n] and is called only for experts with rows; alpha[e] multiplies it."""
    dtype = compute_dtype(a)

    def product_of(expert: int, begin: int, end: int) -> Tensor:
        y = product(rows_of(a, gather, begin, end).to(dtype), weight(expert).to(dtype))
        return y if alpha is None else y * alpha[expert].to(dtype)

    rows = (a if gather is None else gather).shape[0]
    out = torch.zeros((rows, n // 2 if gated else n), dtype=output_dtype(quant, a.dtype), device=a.device)
    ranges = ranges_of_offsets(offsets, rows)
    return fill_rows(out, ranges, product_of, lambda d: stored(d, a.dtype, quant, scale), gated=gated, **others)


def grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, **arguments) -> Tensor:
    """What :func:`minfer.grouped_gemm` computes, in a's type (16-bit: in float32, rounded once)."""
    return by_expert(a, lambda expert: b[expert], b.shape[2], offsets, **arguments)


def grouped_gemm_masked(a: Tensor, b: Tensor, counts: Tensor, *, bias=None, row_scale=None, **arguments) -> Tensor:
    """What :func:`minfer.grouped_gemm_masked` computes, in a's type (16-bit: in float32, rounded once)."""
    experts, max_rows, _ = a.shape
    outs = []
    for expert in range(experts):
        count = min(max(int(counts[expert]), 0), max_rows)
        end = torch.tensor([count], dtype=torch.int32)
        own = dict(bias=None if bias is None else bias[expert : expert + 1], row_scale=None if row_scale is None else row_scale[expert])
        outs.append(grouped_gemm(a[expert], b[expert : expert + 1], end, **own, **arguments))
    return torch.stack(outs)


def sum_of_experts(out: Tensor, experts: int, weights: Tensor, ids: Tensor, ffn: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``out`` [tokens, hidden] plus every token's experts, weighed; ``ffn``: (expert, its tokens) -> what it returns for them."""
    for expert in range(experts):
        tokens, slot = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            out.index_add_(0, tokens, ffn(expert, tokens) * weights[tokens, slot].to(out.dtype).unsqueeze(-1))
    return out


def layer_by_expert(
    x: Tensor,
    w13: Callable[[int], Tensor],
    w2: Callable[[int], Tensor],
    experts: int,
    hidden: int,
    weights: Tensor,
    ids: Tensor,
    *,
    alpha13: Tensor | None = None,
    alpha2: Tensor | None = None,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
) -> Tensor:
    """A layer whose ``w13`` and ``w2`` give an expert's [2 * inter, hidden] and [hidden, inter]."""
    dtype = compute_dtype(x)

    def scaled(a: Tensor, weight: Tensor, alpha: Tensor | None, bias: Tensor | None, expert: int) -> Tensor:
        y = product(a.to(dtype), weight.to(dtype).mT)
        y = y if alpha is None else y * alpha[expert].to(dtype)
        return y if bias is None else y + bias[expert].to(dtype)

    def ffn(expert: int, tokens: Tensor) -> Tensor:
        h = scaled(x[tokens], w13(expert), alpha13, b13, expert)
        h = epilogue(h, None, activation, True, gate_layout).to(x.dtype)
        return scaled(h, w2(expert), alpha2, b2, expert)

    out = torch.zeros(x.shape[0], hidden, dtype=dtype, device=x.device)
    return sum_of_experts(out, experts, weights, ids, ffn).to(x.dtype)


def moe_ffn(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, **arguments) -> Tensor:
    """What :func:`minfer.moe_ffn` computes, expert by expert, in x's type (16-bit: in float32 but for the inner activations)."""
    return layer_by_expert(x, lambda e: w13[e], lambda e: w2[e], w13.shape[0], w2.shape[1], weights, ids, **arguments)
