"""Argument checks of the routing operators, as in :mod:`minfer.checks.common`: the CPU kernels and the fakes share them."""

from __future__ import annotations

from typing import Any

import torch

from .common import DTYPES, Checker, Result, check_dense, check_dtype, check_named_shape, check_scalar

MAX_EXPERTS = 1024
MAX_TOP_K = 32
SCORINGS = ("softmax", "sigmoid")
ROUTED_DTYPES = (*DTYPES, torch.float32)


def _check_matrix(check: Checker, name: str, x: torch.Tensor, what: str) -> None:
    check_dense(check, name, x)
    check(x.dim() == 2, "{} must be {}, got {}", name, what, x.shape)


def _check_device(check: Checker, name: str, x: torch.Tensor, other: str, like: torch.Tensor) -> None:
    check(x.device == like.device, "{} must be on the device of {}, {}, got {}", name, other, like.device, x.device)


def _check_experts(check: Checker, text: str, experts: Any, got: Any) -> None:
    check(experts >= 1, text, MAX_EXPERTS, got)
    check(experts <= MAX_EXPERTS, text, MAX_EXPERTS, got)


def _check_rules(
    check: Checker,
    experts: Any,
    other: str,
    like: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> None:
    max_top_k = min(experts, MAX_TOP_K)
    check(1 <= top_k <= max_top_k, "top_k must be 1 to {} for {} experts, got {}", max_top_k, experts, top_k)
    check(scoring in SCORINGS, "scoring must be softmax or sigmoid, got '{}'", scoring)
    divides = 1 <= n_group <= experts and experts % n_group == 0
    check(divides, "n_group must divide the {} experts, got {}", experts, n_group)
    check(1 <= topk_group <= n_group, "topk_group must be 1 to n_group = {}, got {}", n_group, topk_group)
    stay = experts // n_group * topk_group
    check(top_k <= stay, "top_k must not be more than the {} experts of {} groups, got {}", stay, topk_group, top_k)
    check_scalar(check, "scale", scale)
    if correction_bias is not None:
        check_dense(check, "correction_bias", correction_bias)
        check_named_shape(check, "correction_bias", correction_bias, "[experts]", (experts,))
        check_dtype(check, "correction_bias", correction_bias, torch.float32)
        _check_device(check, "correction_bias", correction_bias, other, like)


def _check_weights(check: Checker, weights: torch.Tensor, other: str, pairs: torch.Tensor, like: torch.Tensor) -> None:
    check_dense(check, "weights", weights)
    check_named_shape(check, "weights", weights, "[tokens, top_k]", pairs.shape)
    check_dtype(check, "weights", weights, torch.float32)
    _check_device(check, "weights", weights, other, like)


def _routes(like: torch.Tensor, top_k: int) -> tuple[Result, Result]:
    shape = (like.shape[0], top_k)
    return Result(like, shape, torch.float32), Result(like, shape, torch.int32)


# ---- whole operators: arguments and defaults are the schemas', all raise RuntimeError -------------------------------------------


def check_moe_router(logits: torch.Tensor, top_k: int, **rules: Any) -> tuple[Result, Result]:
    check = Checker("moe_router")
    _check_matrix(check, "logits", logits, "[tokens, experts]")
    check(logits.dtype in ROUTED_DTYPES, "logits must be float16, bfloat16 or float32, got {}", logits.dtype)
    experts = logits.shape[1]
    _check_experts(check, "logits must have 1 to {} experts, got {}", experts, logits.shape)
    _check_rules(check, experts, "logits", logits, top_k, **rules)
    return _routes(logits, top_k)


def check_moe_router_gemm(x: torch.Tensor, w_gate: torch.Tensor, top_k: int, **rules: Any) -> tuple[Result, Result]:
    check = Checker("moe_router_gemm")
    _check_matrix(check, "x", x, "[tokens, hidden]")
    check(x.dtype in DTYPES, "x must be float16 or bfloat16, got {}", x.dtype)
    check_dense(check, "w_gate", w_gate)
    text = "w_gate must be [experts, hidden = {}], got {}"
    check(w_gate.dim() == 2, text, x.shape[1], w_gate.shape)
    check(w_gate.shape[1] == x.shape[1], text, x.shape[1], w_gate.shape)
    experts = w_gate.shape[0]
    _check_experts(check, "w_gate must have 1 to {} experts, got {}", experts, w_gate.shape)
    check(w_gate.dtype == x.dtype, "w_gate must have x's dtype {}, got {}", x.dtype, w_gate.dtype)
    _check_device(check, "w_gate", w_gate, "x", x)
    _check_rules(check, experts, "x", x, top_k, **rules)
    return _routes(x, top_k)


def check_moe_sort(ids: torch.Tensor, num_experts: int, *, weights: torch.Tensor | None = None) -> tuple[Result, ...]:
    check = Checker("moe_sort")
    _check_matrix(check, "ids", ids, "[tokens, top_k]")
    check_dtype(check, "ids", ids, torch.int32)
    _check_experts(check, "num_experts must be 1 to {}, got {}", num_experts, num_experts)
    if weights is not None:
        _check_weights(check, weights, "ids", ids, ids)
    tokens, top_k = ids.shape
    pairs = tokens * top_k
    integers = [Result(ids, shape, torch.int32) for shape in ((pairs,), (num_experts,), (tokens, top_k))]
    return *integers, Result(ids, (0 if weights is None else pairs,), torch.float32)


def check_moe_combine(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None = None) -> Result:
    check = Checker("moe_combine")
    _check_matrix(check, "y", y, "[rows, n]")
    check(y.dtype in ROUTED_DTYPES, "y must be float16, bfloat16 or float32, got {}", y.dtype)
    _check_matrix(check, "inverse", inverse, "[tokens, top_k]")
    check_dtype(check, "inverse", inverse, torch.int32)
    _check_device(check, "inverse", inverse, "y", y)
    if weights is not None:
        _check_weights(check, weights, "y", inverse, y)
    return Result(y, (inverse.shape[0], y.shape[1]), y.dtype)
