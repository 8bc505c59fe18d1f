"""What the tests of vLLM's layers share."""

from __future__ import annotations

import pytest
import torch

vllm = pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe import config as moe_configs  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTER = 8, 3, 256, 384


def packed(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes as int32 words along ``dim``, the first in the low bits."""
    parts = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.int64).where(parts.sum(-1) < 2**31, parts.sum(-1) - 2**32).to(torch.int32).movedim(-1, dim)


def layer_config(activation: MoEActivation = MoEActivation.SILU, intermediate: int = INTER, **more) -> moe_configs.FusedMoEConfig:
    return moe_configs.FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size=intermediate,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=activation,
        device=torch.get_default_device(),
        routing_method=moe_configs.RoutingMethodType.Default,
        moe_parallel_config=moe_configs.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        **more,
    )


def ffn(x, w13, w2, weights, ids, activation, b13=None, b2=None):
    """In float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            if not 0 <= expert < len(w13):
                continue
            both = w13[expert].double() @ x[token].double() + (0 if b13 is None else b13[expert].double())
            if activation == MoEActivation.SWIGLUOAI:
                gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
                h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                gate, up = both.chunk(2)
                h = torch.nn.functional.silu(gate) * up
            out[token] += weight.double() * (w2[expert].double() @ h + (0 if b2 is None else b2[expert].double()))
    return out


def routed(tokens: int):
    weights, ids = torch.rand(tokens, EXPERTS).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True), ids
