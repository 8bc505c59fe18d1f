"""Layers of a mixture of experts (router, sort, both products, sum over a token's experts) with weights of 16 and of 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minfer

from ....measure.benchmarking import bytes_of
from ....quantize import W4Experts, quantize_w4_experts
from ....reference import (
    grouped_gemm as reference_grouped_gemm,
    moe_routing as reference_moe_routing,
    quantized_gemm as reference_quantized_gemm,
)
from ..case import Case, Operands, Peer, Work
from ..sizes import Sizes

FAMILY = "mixture of experts"
MARGIN = 1e-3  # between the logits of the last expert that is chosen and of the first that is not


def separated_tokens(sizes: Sizes, tokens: int, router: Tensor) -> Tensor:
    """Tokens x [tokens, hidden] whose choice of experts does not depend on a rounding.

    The order of two logits that differ by less than float32 resolves is a matter of rounding, and with another expert the whole row is a
    different one, although nothing is wrong. Tokens with logits closer than MARGIN are drawn again; float32 sums are off by far less.
    """
    x = sizes.normal(tokens, sizes.expert_hidden)
    while True:
        top = (x.double() @ router.double().T).topk(sizes.top_k + 1).values
        close = top[:, -2] - top[:, -1] < MARGIN
        if not bool(close.any()):
            return x
        x = torch.where(close[:, None], sizes.normal(*x.shape), x)


def _route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and ids [tokens, top_k] by PyTorch. The logits are float32: in bfloat16 they would often be equal."""
    chosen, ids = logits.topk(top_k)
    return torch.softmax(chosen, -1), ids


def _torch_experts(s: Operands, top_k: int) -> Tensor:
    """The layer in 16 bits, expert by expert: the yardstick of errors."""
    x, w13, w2 = s["x"], s["w13"], s["w2"]
    weights, ids = _route(x.float() @ s["router"].float().t(), top_k)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        tokens, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], w13[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w2[expert])
        out.index_add_(0, tokens, y * weights[tokens, slot, None])
    return out.to(x.dtype)


def _torch_grouped(s: Operands, top_k: int) -> Tensor:
    """The layer by grouped products: rows sorted by expert on the device, nothing padded, no host synchronised."""
    x, w13, w2 = s["x"], s["w13"], s["w2"]
    # On a GPU one product of 16-bit operands has a float32 result; on a CPU it takes float32 operands.
    logits = torch.mm(x, s["router"].t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ s["router"].float().t()
    weights, ids = _route(logits, top_k)
    by_expert, order = ids.flatten().sort(stable=True)
    experts = torch.arange(w13.shape[0], device=x.device)
    offsets = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
    gate, up = F.grouped_mm(x[order // top_k], w13.mT, offs=offsets).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=offsets)
    in_order = torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)
    return (in_order * weights.to(y.dtype).unsqueeze(-1)).sum(1)


def _exact_layer(s: Operands, top_k: int, w13: Callable[[int], Tensor], w2: Callable[[int], Tensor], gate_layout: str) -> Tensor:
    x, router = s["x"].double(), s["router"].double()
    routing = reference_moe_routing.moe_router_gemm(x, router, top_k)
    return reference_grouped_gemm.layer_by_expert(x, w13, w2, router.shape[0], x.shape[1], *routing, gate_layout=gate_layout)


def _exact_expert(weight: W4Experts, expert: int) -> Tensor:
    tensors = (None if x is None else x[expert] for x in weight.packed)
    form: dict[str, Any] = {"group_size": weight.group_size, "w4_format": weight.w4_format, "n": weight.n, "k": weight.k}
    return reference_quantized_gemm.w4a16_dequantize(*tensors, **form, out_dtype=torch.float64)


def _halves(blocks: Tensor) -> Tensor:
    """w13 [experts, 2 * inter, hidden] in the order of pack_gate_up -> all gate rows of an expert, then all its up rows."""
    return torch.stack([torch.cat(minfer.unpack_gate_up(expert)) for expert in blocks])


def cases(sizes: Sizes) -> list[Case]:
    experts, top_k, hidden, inter = sizes.experts, sizes.top_k, sizes.expert_hidden, sizes.expert_inter

    def weights() -> tuple[Tensor, Tensor]:
        return sizes.normal(experts, 2 * inter, hidden, scale=hidden**-0.5), sizes.normal(experts, hidden, inter, scale=inter**-0.5)

    def routed(tokens: int, w13: Any, w2: Any) -> Operands:
        router = sizes.normal(experts, hidden, scale=hidden**-0.5)
        return {"x": separated_tokens(sizes, tokens, router), "router": router, "w13": w13, "w2": w2}

    def work(s: Operands) -> Work:
        _, ids = minfer.moe_router_gemm(s["x"], s["router"], top_k)
        used = ids.unique().numel() / experts  # weights of the others are not read
        moved = bytes_of((s["x"], s["router"])) + used * bytes_of((s["w13"], s["w2"])) + bytes_of(s["x"])
        return Work(moved, 2.0 * s["x"].shape[0] * (top_k * 3 * inter + experts) * hidden)

    def dense_layer(s: Operands) -> Tensor:
        return minfer.moe_ffn(s["x"], s["w13"], s["w2"], *minfer.moe_router_gemm(s["x"], s["router"], top_k))

    def quantised_layer(s: Operands) -> Tensor:
        return s["w13"].ffn(s["x"], s["w2"], *minfer.moe_router_gemm(s["x"], s["router"], top_k))

    def quantised_operands() -> Operands:
        w13, w2 = weights()
        return routed(sizes.decode_tokens, quantize_w4_experts(w13, gated=True, clip=False), quantize_w4_experts(w2, clip=False))

    def dense_operands(s: Operands) -> Operands:
        return s | {"w13": _halves(s["w13"].dequantize()), "w2": s["w2"].dequantize()}

    def shape(tokens: int) -> str:
        return f"{tokens} x {hidden} x {inter}, {top_k} of {experts}"

    grouped = lambda s: _torch_grouped(s, top_k)  # noqa: E731
    return [
        Case(
            FAMILY,
            "router, 16-bit experts",
            shape(sizes.tokens),
            lambda: routed(sizes.tokens, *weights()),
            dense_layer,
            lambda s: _exact_layer(s, top_k, lambda e: s["w13"][e], lambda e: s["w2"][e], "halves"),
            (Peer("grouped_mm", grouped, compiled=True),),
            work,
            sizes.dtype,
            yardstick=lambda s: _torch_experts(s, top_k),
        ),
        Case(
            FAMILY,
            "router, int4 experts",
            shape(sizes.decode_tokens),
            quantised_operands,
            quantised_layer,
            lambda s: _exact_layer(s, top_k, lambda e: _exact_expert(s["w13"], e), lambda e: _exact_expert(s["w2"], e), "blocks"),
            (Peer("grouped_mm, 16-bit", grouped, compiled=True),),
            work,
            sizes.dtype,
            peer_operands=dense_operands,
            yardstick=lambda s: _torch_experts(dense_operands(s), top_k),
        ),
    ]
