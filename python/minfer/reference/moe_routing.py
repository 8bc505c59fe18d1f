"""CPU kernels of the routing operators, as ATen compositions; in float64 the same functions are the exact rules.

Scores are float32 of 16-bit and float32 logits, as in the CUDA kernels, and float64 of float64 ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .products import product

# ---- routers -----------------------------------------------------------------------------------------------------------------


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    row_max = logits.amax(1, keepdim=True)
    # inf - inf would be NaN: logits equal to the largest one are at a distance of 0.
    e = torch.where(logits == row_max, torch.zeros_like(logits), logits - row_max).exp()
    return e / e.sum(1, keepdim=True)


def _in_order(choice: torch.Tensor, eligible: torch.Tensor) -> torch.Tensor:
    """Column numbers by descending choice, the lower one first among equals, all eligible ones before the others."""
    order = choice.argsort(dim=1, descending=True, stable=True)
    behind = (~eligible).gather(1, order).to(torch.int8).argsort(dim=1, stable=True)
    return order.gather(1, behind)


def moe_router(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and int32 ids [tokens, top_k], as :func:`minfer.moe_router` describes them; any device."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    tokens, experts = logits.shape
    nan = logits.isnan()
    known = logits.masked_fill(nan, -math.inf)
    scores = _scores(known, scoring)
    choice = known if correction_bias is None else (scores + correction_bias).masked_fill(nan, -math.inf)
    choice = choice.masked_fill(choice.isnan(), -math.inf)
    eligible = torch.ones_like(nan)
    if topk_group < n_group:
        grouped = choice.view(tokens, n_group, experts // n_group)
        best = 1 if correction_bias is None else min(2, experts // n_group)
        groups = grouped.topk(best, dim=2).values.sum(2)
        groups = groups.masked_fill(groups.isnan(), -math.inf)
        stay = groups.argsort(dim=1, descending=True, stable=True)[:, :topk_group]
        eligible = torch.zeros_like(groups, dtype=torch.bool).scatter(1, stay, True).repeat_interleave(experts // n_group, 1)
    ids = _in_order(choice, eligible)[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights.sum(1, keepdim=True)
        weights = torch.where(total > 0, weights / total, torch.zeros_like(weights))
    weights = (weights * scale).masked_fill(nan.any(1, keepdim=True), math.nan)
    return weights, ids.new_empty(ids.shape, dtype=torch.int32).copy_(ids)


def moe_router_gemm(x: torch.Tensor, w_gate: torch.Tensor, top_k: int, **rules: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_router` of x.w_gate^T, in float32 or in float64 if x is that; any device."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return moe_router(product(x.to(dtype), w_gate.to(dtype).t()), top_k, **rules)


# ---- sort and combine --------------------------------------------------------------------------------------------------------


def moe_sort(
    ids: torch.Tensor, num_experts: int, *, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """token_index, offsets, inverse and sorted_weights of :func:`minfer.moe_sort`; any device."""
    pairs = ids.reshape(-1).long()
    valid = (pairs >= 0) & (pairs < num_experts)
    bins = pairs.masked_fill(~valid, num_experts)
    order = bins.argsort(stable=True)
    in_use = valid[order]
    token_index = (order // max(ids.shape[1], 1)).masked_fill(~in_use, 0)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    inverse = place.masked_fill(~valid, -1).view(ids.shape)
    offsets = torch.bincount(bins, minlength=num_experts + 1)[:num_experts].cumsum(0)
    if weights is None:
        sorted_weights = ids.new_empty(0, dtype=torch.float32)
    else:
        sorted_weights = weights.reshape(-1)[order].masked_fill(~in_use, 0)
    return token_index.int(), offsets.int(), inverse.int(), sorted_weights


def moe_combine(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """out[t] = sum over j of weights[t, j] * y[inverse[t, j]], in float32 (float64 of float64), rounded once; any device."""
    dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    out = torch.zeros(inverse.shape[0], y.shape[1], dtype=dtype, device=y.device)
    if y.shape[0] == 0:
        return out.to(y.dtype)
    valid = (inverse >= 0) & (inverse < y.shape[0])
    rows = inverse.masked_fill(~valid, 0).long()
    for j in range(inverse.shape[1]):
        part = y[rows[:, j]].to(dtype)
        if weights is not None:
            part = part * weights[:, j : j + 1].to(dtype)
        out += part.masked_fill(~valid[:, j : j + 1], 0)
    return out.to(y.dtype)
