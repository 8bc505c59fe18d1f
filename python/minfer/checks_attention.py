"""Argument checks of attention, shared by its CPU kernels and its fakes; messages as in :mod:`minfer.checks`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checks import DTYPES, _Checker, check_kernel, check_scalar

FAMILY = "attention"  # of the kernels
MAX_HEAD_DIM = 256
MERGED_DTYPES = (*DTYPES, torch.float32)
LAYOUTS = {4: "[batch, seqlen, heads, head_dim]", 3: "[tokens, heads, head_dim]"}


def _check_tensor(check: _Checker, name: str, x: Tensor, dtype: torch.dtype, other: str, like: Tensor) -> None:
    check(x.layout == torch.strided, "{} must be a dense tensor, got layout {}", name, x.layout)
    check(x.dtype == dtype, "{} must be {}, got {}", name, dtype, x.dtype)
    check(x.device == like.device, "{} must be on {}'s device {}, got {}", name, other, like.device, x.device)


def _check_shape(check: _Checker, name: str, x: Tensor, shape: Sequence[Any]) -> None:
    text, expected = "{} must be [{}], got {}", ", ".join(str(size) for size in shape)
    check(x.dim() == len(shape), text, name, expected, x.shape)
    for have, want in zip(x.shape, shape, strict=True):
        check(have == want, text, name, expected, x.shape)


def _check_operands(check: _Checker, q: Tensor, k: Tensor, v: Tensor, modes: int) -> tuple[Any, Any]:
    """q, k and v of ``modes`` modes; returns (heads_q, head_dim_v)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check(x.layout == torch.strided, "{} must be a dense tensor, got layout {}", name, x.layout)
        check(x.dim() == modes, "{} must be {}, got {}", name, LAYOUTS[modes], x.shape)
        check(q.dtype in DTYPES, "q must be float16 or bfloat16, got {}", q.dtype)
        check(x.dtype == q.dtype, "{} must be float16 or bfloat16 like q, got {} beside {}", name, x.dtype, q.dtype)
        check(x.device == q.device, "{} must be on q's device {}, got {}", name, q.device, x.device)
    for of_k, of_v in zip(k.shape[:-1], v.shape[:-1], strict=True):
        check(of_k == of_v, "v must have k's modes but the last, got k {} and v {}", k.shape, v.shape)
    heads_q, head_dim, heads_kv, head_dim_v = *q.shape[-2:], k.shape[-2], v.shape[-1]
    check(k.shape[-1] == head_dim, "k must have q's head_dim = {}, got k {}", head_dim, k.shape)
    divides = heads_q == 0 if heads_kv == 0 else heads_q % heads_kv == 0
    check(divides, "q's heads must be a multiple of k's, got {} and {}", heads_q, heads_kv)
    for good in (head_dim > 0, head_dim % 8 == 0, head_dim <= MAX_HEAD_DIM):
        check(good, "head_dim must be a multiple of 8 up to {}, got {}", MAX_HEAD_DIM, head_dim)
    for good in (head_dim_v > 0, head_dim_v % 8 == 0, head_dim_v <= head_dim):
        check(good, "v's head_dim must be a multiple of 8 up to q's {}, got {}", head_dim, head_dim_v)
    return heads_q, head_dim_v


def _check_options(
    check: _Checker,
    q: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kernel: str | None = None,
) -> None:
    # A symbolic float is checked when the compiled graph runs and its value is known.
    if scale is not None and not isinstance(scale, torch.SymFloat):
        check(scale > 0, "scale must be positive, got {}", scale)
        check_scalar(check, "scale", scale)
    if not isinstance(softcap, torch.SymFloat):
        check(softcap >= 0, "softcap must be 0 (none) or positive, got {}", softcap)
    check_scalar(check, "softcap", softcap)
    if sinks is not None:
        _check_shape(check, "sinks", sinks, (q.shape[-2],))
        _check_tensor(check, "sinks", sinks, q.dtype, "q", q)
    if kernel is not None:
        check("@" not in kernel, "kernel '{}' is not in the registry: attention kernels have no launch options", kernel)
        check_kernel(check, kernel, FAMILY)


def check_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[tuple, tuple]:
    """All arguments of minfer::attention; returns the shapes of out and lse."""
    check = _Checker("attention")
    heads, head_dim_v = _check_operands(check, q, k, v, 4)
    _check_options(check, q, **options)
    batch, seqlen_q = q.shape[:2]
    check(k.shape[0] == batch, "k and v must have q's batch {}, got k {}", batch, k.shape)
    return (batch, seqlen_q, heads, head_dim_v), (batch, heads, seqlen_q)


def check_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, **options: Any
) -> tuple[tuple, tuple]:
    """All arguments of minfer::attention_varlen but the values of cu_seqlens; returns the shapes of out and lse."""
    check = _Checker("attention_varlen")
    heads, head_dim_v = _check_operands(check, q, k, v, 3)
    text = "cu_seqlens_q must be [batch + 1], got {}"
    check(cu_seqlens_q.dim() == 1, text, cu_seqlens_q.shape)
    check(cu_seqlens_q.shape[0] >= 1, text, cu_seqlens_q.shape)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_shape(check, name, x, cu_seqlens_q.shape)
        _check_tensor(check, name, x, torch.int32, "q", q)
    for value in (max_seqlen_q, max_seqlen_k):
        check(value >= 0, "max_seqlen_q and max_seqlen_k must not be negative, got {} and {}", max_seqlen_q, max_seqlen_k)
    _check_options(check, q, **options)
    return (q.shape[0], heads, head_dim_v), (heads, q.shape[0])


def check_cu_seqlens(name: str, cu_seqlens: list[int], side: str, tokens: int, max_seqlen: int) -> None:
    """The values, which only the CPU kernel knows: they ascend within the rows, and no sequence is longer than was said."""
    check = _Checker("attention_varlen")
    inside = cu_seqlens[0] >= 0 and cu_seqlens[-1] <= tokens
    check(inside, "{} must lie in 0 to tokens_{} = {}, got {} to {}", name, side, tokens, cu_seqlens[0], cu_seqlens[-1])
    for b, (begin, end) in enumerate(pairwise(cu_seqlens)):
        check(begin <= end, "{} must ascend, got {} before {}", name, begin, end)
        text = "max_seqlen_{} must be at least the {} rows of sequence {}, got {}"
        check(end - begin <= max_seqlen, text, side, end - begin, b, max_seqlen)


def check_merge_attention_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Any, ...]:
    """All arguments of minfer::merge_attention_states; returns the shape of lse."""
    check = _Checker("merge_attention_states")
    check(len(outs) >= 1, "outs must have at least one part, got none")
    check(len(lses) == len(outs), "lses must have as many parts as outs, {}, got {}", len(outs), len(lses))
    first = outs[0]
    layouts = "outs[0] must be [batch, seqlen, heads, head_dim_v] or [tokens, heads, head_dim_v], got {}"
    check(first.dim() in (3, 4), layouts, first.shape)
    check(first.dtype in MERGED_DTYPES, "outs[0] must be float16, bfloat16 or float32, got {}", first.dtype)
    lse_shape = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _check_shape(check, f"outs[{i}]", out, first.shape)
        _check_tensor(check, f"outs[{i}]", out, first.dtype, "outs[0]", first)
        _check_shape(check, f"lses[{i}]", lse, lse_shape)
        _check_tensor(check, f"lses[{i}]", lse, torch.float32, "outs[0]", first)
    return lse_shape
