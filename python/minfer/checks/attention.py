"""Argument checks of attention, shared by its CPU kernels and its fakes; messages as in :mod:`minfer.checks.common`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._core.batch_invariance import is_batch_invariant
from .common import DTYPES, Checker, Result, check_dense, check_device, check_kernel, check_scalar, check_shape, check_tensor
from .kv_cache import (
    PAGE_MULTIPLE,
    SCALES,
    check_ascending,
    check_cache,
    check_format,
    check_head_dims,
    check_scales,
    check_strides,
)

FAMILY = "attention"  # of the kernels
MAX_SPLITS = 256
MERGED_DTYPES = (*DTYPES, torch.float32)
LAYOUTS = {4: "[batch, seqlen, heads, head_dim]", 3: "[tokens, heads, head_dim]"}


def _check_sizes(check: Checker, heads_q: Any, heads_kv: Any, head_dim: Any, head_dim_v: Any) -> None:
    divides = heads_q == 0 if heads_kv == 0 else heads_q % heads_kv == 0
    check(divides, "q's heads must be a multiple of k's, got {} and {}", heads_q, heads_kv)
    check_head_dims(check, "q", head_dim, head_dim_v)


def _check_operands(check: Checker, q: Tensor, k: Tensor, v: Tensor, modes: int) -> tuple[Any, Any]:
    """q, k and v of ``modes`` modes; returns (heads_q, head_dim_v)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(check, name, x)
        check(x.dim() == modes, "{} must be {}, got {}", name, LAYOUTS[modes], x.shape)
        check(q.dtype in DTYPES, "q must be float16 or bfloat16, got {}", q.dtype)
        check(x.dtype == q.dtype, "{} must be float16 or bfloat16 like q, got {} beside {}", name, x.dtype, q.dtype)
        check_device(check, name, x, "q", q)
    for of_k, of_v in zip(k.shape[:-1], v.shape[:-1], strict=True):
        check(of_k == of_v, "v must have k's modes but the last, got k {} and v {}", k.shape, v.shape)
    heads_q, head_dim, heads_kv, head_dim_v = *q.shape[-2:], k.shape[-2], v.shape[-1]
    check(k.shape[-1] == head_dim, "k must have q's head_dim = {}, got k {}", head_dim, k.shape)
    _check_sizes(check, heads_q, heads_kv, head_dim, head_dim_v)
    return heads_q, head_dim_v


def _check_options(
    check: Checker,
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
        check_shape(check, "sinks", sinks, (q.shape[-2],))
        check_tensor(check, "sinks", sinks, q.dtype, "q", q)
    if kernel is not None:
        check("@" not in kernel, "kernel '{}' is not in the registry: attention kernels have no launch options", kernel)
        check_kernel(check, kernel, FAMILY)


def _states(like: Tensor, out: Sequence[Any], lse: Sequence[Any]) -> tuple[Result, Result]:
    return Result(like, out, like.dtype), Result(like, lse, torch.float32)


def check_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Result, Result]:
    """All arguments of minfer::attention."""
    check = Checker("attention")
    heads, head_dim_v = _check_operands(check, q, k, v, 4)
    _check_options(check, q, **options)
    batch, seqlen_q = q.shape[:2]
    check(k.shape[0] == batch, "k and v must have q's batch {}, got k {}", batch, k.shape)
    return _states(q, (batch, seqlen_q, heads, head_dim_v), (batch, heads, seqlen_q))


def check_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, **options: Any
) -> tuple[Result, Result]:
    """All arguments of minfer::attention_varlen but the values of cu_seqlens."""
    check = Checker("attention_varlen")
    heads, head_dim_v = _check_operands(check, q, k, v, 3)
    text = "cu_seqlens_q must be [batch + 1], got {}"
    check(cu_seqlens_q.dim() == 1, text, cu_seqlens_q.shape)
    check(cu_seqlens_q.shape[0] >= 1, text, cu_seqlens_q.shape)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_shape(check, name, x, cu_seqlens_q.shape)
        check_tensor(check, name, x, torch.int32, "q", q)
    for value in (max_seqlen_q, max_seqlen_k):
        check(value >= 0, "max_seqlen_q and max_seqlen_k must not be negative, got {} and {}", max_seqlen_q, max_seqlen_k)
    _check_options(check, q, **options)
    return _states(q, (q.shape[0], heads, head_dim_v), (heads, q.shape[0]))


def check_attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 1,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_residual: Tensor | None = None,
    v_residual: Tensor | None = None,
    kv_format: str = "auto",
    num_splits: int | None = None,
    **options: Any,
) -> tuple[Result, Result]:
    """All arguments of minfer::attention_paged but values."""
    check = Checker("attention_paged")
    layouts = "[batch, seqlen_q, heads, head_dim] or [tokens, heads, head_dim]"
    check_dense(check, "q", q)
    check(q.dim() in (3, 4), "q must be {}, got {}", layouts, q.shape)
    check(q.dtype in DTYPES, "q must be float16 or bfloat16, got {}", q.dtype)
    kv_format = check_format(check, kv_format, k_cache.dtype, "q", q.dtype)
    check_cache(check, k_cache, v_cache, "q", q)
    (*lead, heads_q, head_dim), per_byte = q.shape, 2 if kv_format == "int4" else 1
    pages, page_size, heads_kv, row = k_cache.shape
    head_dim_v, packed = v_cache.shape[3] * per_byte, ", two to a byte" if per_byte == 2 else ""
    check(row * per_byte == head_dim, "k_cache must have q's head_dim = {}{}, got {}", head_dim, packed, k_cache.shape)
    _check_sizes(check, heads_q, heads_kv, head_dim, head_dim_v)
    check(seq_lens.dim() == 1, "seq_lens must be [batch], got {}", seq_lens.shape)
    batch = seq_lens.shape[0]
    check_tensor(check, "seq_lens", seq_lens, torch.int32, "q", q)
    check(max_seqlen_q >= 0, "max_seqlen_q must not be negative, got {}", max_seqlen_q)
    if cu_seqlens_q is not None:
        check(q.dim() == 3, "with cu_seqlens_q, q must be [tokens, heads, head_dim], got {}", q.shape)
        check_shape(check, "cu_seqlens_q", cu_seqlens_q, (batch + 1,))
        check_tensor(check, "cu_seqlens_q", cu_seqlens_q, torch.int32, "q", q)
    elif q.dim() == 4:
        check(lead[0] == batch, "q must have seq_lens' batch {}, got {}", batch, q.shape)
    else:
        text = "without cu_seqlens_q, q must have batch * max_seqlen_q = {} tokens, got {}"
        check(lead[0] == batch * max_seqlen_q, text, batch * max_seqlen_q, q.shape)
    if block_table is not None:
        check(block_table.dim() == 2, "block_table must be [batch, pages], got {}", block_table.shape)
        check_shape(check, "block_table", block_table, (batch, block_table.shape[1]))
        check_tensor(check, "block_table", block_table, torch.int32, "q", q)
        for good in (page_size > 0, page_size % PAGE_MULTIPLE == 0):
            check(good, "the page size must be a multiple of {}, got {}", PAGE_MULTIPLE, page_size)
    else:
        check(pages == batch, "without a block_table, k_cache must have seq_lens' batch {}, got {}", batch, k_cache.shape)
    if num_splits is not None:
        check(1 <= num_splits <= MAX_SPLITS, "num_splits must be 1 to {}, got {}", MAX_SPLITS, num_splits)
        check(not is_batch_invariant(), "num_splits must be None in the batch-invariant mode, got {}", num_splits)
    scales = dict(zip(SCALES, (k_scale, v_scale, k_residual, v_residual), strict=True))
    check_scales(check, kv_format, k_cache, scales, (head_dim, head_dim_v), batch, "q", q)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_strides(check, name, x)
    _check_options(check, q, **options)
    return _states(q, (*lead, heads_q, head_dim_v), (*lead[:-1], heads_q, lead[-1]))


def check_cu_seqlens(op: str, name: str, cu_seqlens: list[int], side: str, tokens: int, max_seqlen: int) -> None:
    """The values, which only the CPU kernel knows: they ascend within the rows, and no sequence is longer than was said."""
    check = Checker(op)
    check_ascending(check, name, cu_seqlens, f"tokens_{side}", tokens)
    for b, (begin, end) in enumerate(pairwise(cu_seqlens)):
        text = "max_seqlen_{} must be at least the {} rows of sequence {}, got {}"
        check(end - begin <= max_seqlen, text, side, end - begin, b, max_seqlen)


def check_seq_lens(seq_lens: list[int], rows: int) -> None:
    """The values, which only the CPU kernel knows; ``rows``: that the cache can have for a sequence."""
    check = Checker("attention_paged")
    for b, length in enumerate(seq_lens):
        check(length >= 0, "seq_lens must not be negative, got {} of sequence {}", length, b)
        check(length <= rows, "seq_lens must be at most the {} rows of a sequence, got {} of sequence {}", rows, length, b)


def check_pages(block_table: list[int], pages: int, b: int) -> None:
    """The entries that sequence ``b`` needs, which only the CPU kernel knows."""
    check = Checker("attention_paged")
    for page in block_table:
        check(0 <= page < pages, "block_table must name one of the {} pages, got {} of sequence {}", pages, page, b)


def check_merge_attention_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Result, Result]:
    """All arguments of minfer::merge_attention_states."""
    check = Checker("merge_attention_states")
    check(len(outs) >= 1, "outs must have at least one part, got none")
    check(len(lses) == len(outs), "lses must have as many parts as outs, {}, got {}", len(outs), len(lses))
    first = outs[0]
    layouts = "outs[0] must be [batch, seqlen, heads, head_dim_v] or [tokens, heads, head_dim_v], got {}"
    check(first.dim() in (3, 4), layouts, first.shape)
    check(first.dtype in MERGED_DTYPES, "outs[0] must be float16, bfloat16 or float32, got {}", first.dtype)
    lse_shape = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_shape(check, f"outs[{i}]", out, first.shape)
        check_tensor(check, f"outs[{i}]", out, first.dtype, "outs[0]", first)
        check_shape(check, f"lses[{i}]", lse, lse_shape)
        check_tensor(check, f"lses[{i}]", lse, torch.float32, "outs[0]", first)
    return _states(first, first.shape, lse_shape)
