"""CPU kernels of grouped GEMM: ATen compositions over the experts. In float64 the same functions are the truth that tests measure by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checks import grouped_gemm as checks_moe
from ..checks.common import output_dtype
from ..formats.gate_up import GATE_BLOCK
from .codes import stored
from .epilogue import ACTIVATION, compute_dtype


def _gate_and_up(y: Tensor, gate_layout: str) -> tuple[Tensor, Tensor]:
    if gate_layout == "halves":
        return y.chunk(2, dim=-1)
    if gate_layout == "alternating":
        return y[..., 0::2], y[..., 1::2]
    blocks = y.unflatten(-1, (-1, 2, GATE_BLOCK))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def epilogue(y: Tensor, row_scale: Tensor | None, activation: str, gated: bool, gate_layout: str) -> Tensor:
    """row_scale * activation(y), or of a gated y its halves' product."""
    if not gated:
        y = ACTIVATION[activation](y)
    else:
        gate, up = _gate_and_up(y, gate_layout)
        if activation == checks_moe.SWIGLUOAI:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            y = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
        else:
            y = ACTIVATION[activation](gate) * up
    return y if row_scale is None else y * row_scale.to(y.dtype).unsqueeze(-1)


def by_expert(
    a: Tensor,
    weight: Callable[[int], Tensor],
    n: int,
    offsets: Tensor,
    *,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    gather: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    gate_layout: str = "halves",
    quant: str | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Grouped GEMM; ``weight`` returns an expert's [k, n] and is called only for experts with rows; alpha[e] multiplies it."""
    dtype = compute_dtype(a)
    rows = (a if gather is None else gather).shape[0]
    out = torch.zeros((rows, n // 2 if gated else n), dtype=output_dtype(quant, a.dtype), device=a.device)
    ends = offsets.tolist()
    for expert, end in enumerate(ends):
        begin, end = min(max(ends[expert - 1] if expert else 0, 0), rows), min(end, rows)
        if end > begin:
            of_expert = a[begin:end] if gather is None else a.index_select(0, gather[begin:end].long())
            y = of_expert.to(dtype) @ weight(expert).to(dtype)
            if alpha is not None:
                y = y * alpha[expert].to(dtype)
            if bias is not None:
                y = y + bias[expert].to(dtype)
            d = epilogue(y, None if row_scale is None else row_scale[begin:end], activation, gated, gate_layout)
            out[begin:end] = stored(d, a.dtype, quant, scale)
    return out


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

    def product(a: Tensor, weight: Tensor, alpha: Tensor | None, bias: Tensor | None, expert: int) -> Tensor:
        y = a.to(dtype) @ weight.to(dtype).mT
        y = y if alpha is None else y * alpha[expert].to(dtype)
        return y if bias is None else y + bias[expert].to(dtype)

    out = torch.zeros(x.shape[0], hidden, dtype=dtype, device=x.device)
    for expert in range(experts):
        tokens, slot = (ids == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        h = product(x[tokens], w13(expert), alpha13, b13, expert)
        h = epilogue(h, None, activation, True, gate_layout).to(x.dtype)
        y = product(h, w2(expert), alpha2, b2, expert)
        out.index_add_(0, tokens, y * weights[tokens, slot].to(dtype).unsqueeze(-1))
    return out.to(x.dtype)


def moe_ffn(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, **arguments) -> Tensor:
    """What :func:`minfer.moe_ffn` computes, expert by expert, in x's type (16-bit: in float32 but for the inner activations)."""
    return layer_by_expert(x, lambda e: w13[e], lambda e: w2[e], w13.shape[0], w2.shape[1], weights, ids, **arguments)
