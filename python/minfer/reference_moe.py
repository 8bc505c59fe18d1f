"""CPU kernels of grouped GEMM: ATen compositions over the experts. In float64 the same functions are the truth that tests measure by."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks_moe
from .packing import GATE_BLOCK
from .reference import _ACTIVATION, _compute_dtype

_library = torch.library.Library("minfer", "IMPL")


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
        y = _ACTIVATION[activation](y)
    else:
        gate, up = _gate_and_up(y, gate_layout)
        if activation == checks_moe.SWIGLUOAI:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            y = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
        else:
            y = _ACTIVATION[activation](gate) * up
    return y if row_scale is None else y * row_scale.to(y.dtype).unsqueeze(-1)


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
) -> Tensor:
    """What :func:`minfer.grouped_gemm` computes, in a's type (16-bit: in float32, rounded once)."""
    dtype = _compute_dtype(a)
    rows = a if gather is None else a.index_select(0, gather.long())
    n = b.shape[2] // 2 if gated else b.shape[2]
    out = torch.zeros((rows.shape[0], n), dtype=dtype, device=a.device)
    ends = offsets.tolist()
    for expert, end in enumerate(ends):
        begin, end = min(max(ends[expert - 1] if expert else 0, 0), rows.shape[0]), min(end, rows.shape[0])
        if end > begin:
            y = rows[begin:end].to(dtype) @ b[expert].to(dtype)
            if bias is not None:
                y = y + bias[expert].to(dtype)
            out[begin:end] = epilogue(y, None if row_scale is None else row_scale[begin:end], activation, gated, gate_layout)
    return out.to(a.dtype)


def grouped_gemm_masked(a: Tensor, b: Tensor, counts: Tensor, *, bias=None, row_scale=None, **arguments) -> Tensor:
    """What :func:`minfer.grouped_gemm_masked` computes, in a's type (16-bit: in float32, rounded once)."""
    experts, max_rows, _ = a.shape
    slabs = []
    for expert in range(experts):
        count = min(max(int(counts[expert]), 0), max_rows)
        end = torch.tensor([count], dtype=torch.int32)
        own = dict(bias=None if bias is None else bias[expert : expert + 1], row_scale=None if row_scale is None else row_scale[expert])
        slabs.append(grouped_gemm(a[expert], b[expert : expert + 1], end, **own, **arguments))
    return torch.stack(slabs)


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
    """What :func:`minfer.moe_ffn` computes, expert by expert, in x's type (16-bit: in float32 but for the inner activations)."""
    dtype = _compute_dtype(x)
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=dtype, device=x.device)
    for expert in range(w13.shape[0]):
        tokens, slot = (ids == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        h = x[tokens].to(dtype) @ w13[expert].to(dtype).mT
        h = epilogue(h if b13 is None else h + b13[expert].to(dtype), None, activation, True, gate_layout).to(x.dtype)
        y = h.to(dtype) @ w2[expert].to(dtype).mT
        y = y if b2 is None else y + b2[expert].to(dtype)
        out.index_add_(0, tokens, y * weights[tokens, slot].to(dtype).unsqueeze(-1))
    return out.to(x.dtype)


def _without_kernel(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if name != "kernel"}


def _grouped_gemm_cpu(a, b, offsets, **arguments):
    checks_moe.check_grouped_gemm(a, b, offsets, **arguments)
    return grouped_gemm(a, b, offsets, **_without_kernel(arguments))


def _grouped_gemm_out_cpu(a, b, offsets, *, out, **arguments):
    checks_moe.check_grouped_gemm(a, b, offsets, out=out, **arguments)
    return out.copy_(grouped_gemm(a, b, offsets, **_without_kernel(arguments)))


def _grouped_gemm_masked_cpu(a, b, counts, **arguments):
    checks_moe.check_grouped_gemm_masked(a, b, counts, **arguments)
    return grouped_gemm_masked(a, b, counts, **_without_kernel(arguments))


def _grouped_gemm_masked_out_cpu(a, b, counts, *, out, **arguments):
    checks_moe.check_grouped_gemm_masked(a, b, counts, out=out, **arguments)
    result = grouped_gemm_masked(a, b, counts, **_without_kernel(arguments))
    for expert, count in enumerate(counts.tolist()):
        count = min(max(count, 0), out.shape[1])
        out[expert, :count] = result[expert, :count]
    return out


def _moe_ffn_cpu(x, w13, w2, weights, ids, **arguments):
    checks_moe.check_moe_ffn(x, w13, w2, weights, ids, **arguments)
    return moe_ffn(x, w13, w2, weights, ids, **arguments)


_library.impl("moe_ffn", _moe_ffn_cpu, "CPU")
_library.impl("grouped_gemm", _grouped_gemm_cpu, "CPU")
_library.impl("grouped_gemm.out", _grouped_gemm_out_cpu, "CPU")
_library.impl("grouped_gemm_masked", _grouped_gemm_masked_cpu, "CPU")
_library.impl("grouped_gemm_masked.out", _grouped_gemm_masked_out_cpu, "CPU")
