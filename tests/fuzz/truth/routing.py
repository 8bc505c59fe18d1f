"""The choice of experts, from the docstring of minfer.moe_router, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """float64 logits without NaN. In a softmax logits of +inf, and logits that are all -inf, share the weight equally."""
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    top = logits.amax(1, keepdim=True)
    return torch.where(logits == top, 0.0, logits - top).exp() / torch.where(logits == top, 0.0, logits - top).exp().sum(1, keepdim=True)


def exact_choice(choice: Tensor, top_k: int, n_group: int, topk_group: int, biased: bool) -> Tensor:
    """ids [tokens, top_k] by descending choice, the lower index first among equals, of the best groups."""
    eligible = _eligible(choice, n_group, topk_group, biased)
    order = choice.argsort(dim=1, descending=True, stable=True)
    behind = (~eligible).gather(1, order).int().argsort(dim=1, stable=True)
    return order.gather(1, behind)[:, :top_k]


def _group_values(choice: Tensor, n_group: int, biased: bool) -> Tensor:
    """How good a group is: its best choice, with a correction bias the sum of its two best."""
    grouped = choice.unflatten(1, (n_group, -1))
    return grouped.topk(min(2 if biased else 1, grouped.shape[2]), dim=2).values.sum(2)


def _eligible(choice: Tensor, n_group: int, topk_group: int, biased: bool) -> Tensor:
    values = _group_values(choice, n_group, biased)
    stay = values.argsort(dim=1, descending=True, stable=True)[:, :topk_group]
    kept = torch.zeros_like(values, dtype=torch.bool).scatter(1, stay, True)
    return kept.repeat_interleave(choice.shape[1] // n_group, 1)


def also_a_choice(ids: list[int], choice: Tensor, error: Tensor, n_group: int, topk_group: int, biased: bool) -> bool:
    """Whether one token's ids are the choice of some numbers that are each within ``error`` of ``choice`` [experts]; both on the CPU."""
    experts = choice.shape[0]
    if len(set(ids)) != len(ids) or not all(0 <= i < experts for i in ids):
        return False
    size = experts // n_group
    low, high = choice - error, choice + error
    if topk_group < n_group:
        most, least = (_group_values(x[None], n_group, biased)[0] for x in (high, low))
        # A group may stay unless as many others are surely better; it surely stays unless as many others may be.
        may = torch.tensor([int((least > most[g]).sum()) < topk_group for g in range(n_group)])
        must = torch.tensor([int((most >= least[g]).sum()) - 1 < topk_group for g in range(n_group)])
    else:
        may = must = torch.ones(n_group, dtype=torch.bool)
    if not all(bool(may[i // size]) for i in ids):
        return False
    for first, second in zip(ids, ids[1:], strict=False):
        if low[second] > high[first]:
            return False
    left_out = torch.ones(experts, dtype=torch.bool)
    left_out[ids] = False
    left_out &= must.repeat_interleave(size)
    worst = min((float(high[i]) for i in ids), default=math.inf)
    return not bool((low[left_out] > worst).any())
