"""CPU kernels of attention, as ATen compositions; in float64 the same functions are the truth that the GPU tests measure by.

``merge_attention_states`` is the same composition on every device but CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .._core.batch_invariance import is_batch_invariant
from ..checks import attention as checks_attention, kv_cache as checks_kv_cache
from ..checks.common import Checker
from ..formats.kv_cache import KvCache
from . import kv_cache as reference_kv_cache
from .epilogue import compute_dtype

# Scores that are in memory at a time, 64 MiB of float32: queries of a KV head are taken in blocks of so many.
_SCORES = 1 << 24


def window_of(keys: int) -> int:
    """A window, -1 where it limits nothing: negative, or wider than any sequence."""
    return keys if 0 <= keys < 1 << 30 else -1


def visible(begin: int, end: int, seqlen_q: int, seqlen_k: int, causal: bool, left: int, right: int, device=None) -> Tensor | None:
    """[end - begin, seqlen_k]: which keys the queries begin .. end - 1 see, the last query aligned to the last key; None: all of them."""
    left, right = window_of(left), 0 if causal else window_of(right)
    if left < 0 and right < 0:
        return None
    aligned = torch.arange(begin, end, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(end - begin, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= aligned - left
    if right >= 0:
        seen &= key <= aligned + right
    return seen


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None, softcap: float, sink: Tensor | None) -> tuple:
    """Heads that share a KV head: q [group, rows, head_dim], k and v [seqlen_k, ..], sink [group] -> out [group, rows, ..], lse."""
    scores = (q @ k.mT).mul_(scale)
    if softcap > 0:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if seen is not None:
        scores.masked_fill_(~seen, -math.inf)
    highest = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    if sink is not None:
        highest = torch.maximum(highest, sink[:, None])
    # A query without a key or a sink has a maximum of -inf, and -inf - -inf would be NaN.
    base = highest.masked_fill(highest == -math.inf, 0.0)
    p = scores.sub_(base[..., None]).exp_()
    total = p.sum(-1)
    if sink is not None:
        total = total + (sink[:, None] - base).exp()
    out = (p @ v) / torch.where(total == 0, 1.0, total)[..., None]
    return out, base + total.log()


def _sequence(q, k, v, out, lse, *, causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0, sinks=None) -> None:
    """One sequence: q [seqlen_q, heads_q, head_dim], k and v likewise; writes out [seqlen_q, heads_q, head_dim_v], lse [heads_q, seqlen_q].

    Heads of one KV head are computed together, in blocks of queries, so that memory does not grow with seqlen_q * seqlen_k.
    """
    (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, _) = q.shape, k.shape
    if seqlen_q == 0 or heads_q == 0:
        return
    first = _first_key(seqlen_q, seqlen_k, window_left)  # what lies before all windows may be anything
    k, v, seqlen_k = k[first:], v[first:], seqlen_k - first
    dtype, group = compute_dtype(q), heads_q // heads_kv
    scale = head_dim**-0.5 if scale is None else scale
    alone = is_batch_invariant() and dtype != torch.float64
    block = 1 if alone else max(1, _SCORES // (group * max(seqlen_k, 1)))
    for head in range(heads_kv):
        heads = slice(head * group, (head + 1) * group)
        keys, values = k[:, head].to(dtype), v[:, head].to(dtype)
        sink = None if sinks is None else sinks[heads].to(dtype)
        for begin in range(0, seqlen_q, block):
            end = min(begin + block, seqlen_q)
            seen = visible(begin, end, seqlen_q, seqlen_k, causal, window_left, window_right, q.device)
            queries = q[begin:end, heads].transpose(0, 1).to(dtype)
            own_keys, own_values = keys, values
            if alone:  # a query and the keys that it sees, in memory of their own: their sums do not follow from what else there is
                places = slice(None) if seen is None else seen[0].nonzero()[:, 0]
                own_keys, own_values, queries, seen = keys[places].clone(), values[places].clone(), queries.clone(), None
            result, denominator = _attend(queries, own_keys, own_values, scale, seen, softcap, sink)
            out[begin:end, heads] = result.transpose(0, 1)
            lse[heads, begin:end] = denominator


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def attention(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """What :func:`minfer.attention` computes, in q's type (16-bit: in float32, out rounded once); any device."""
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads_q, v.shape[-1]))
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=_lse_dtype(q))
    for b in range(batch):
        _sequence(q[b], k[b], v[b], out[b], lse[b], **options)
    return out, lse


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int = 0, max_seqlen_k: int = 0, **options
) -> tuple[Tensor, Tensor]:
    """What :func:`minfer.attention_varlen` computes, as :func:`attention`; cu_seqlens are lists or tensors, and what no sequence is longer
    than does not matter here."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=_lse_dtype(q))
    q_ends, k_ends = (x.tolist() if isinstance(x, Tensor) else x for x in (cu_seqlens_q, cu_seqlens_k))
    for b in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        _sequence(q[rows], k[keys], v[keys], out[rows], lse[:, rows], **options)
    return out, lse


def _query_ends(q: Tensor, batch: int, cu_seqlens_q: Sequence[int] | Tensor | None, max_seqlen_q: int) -> list[int]:
    """As cu_seqlens_q has them, of a q without it, too."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q.tolist() if isinstance(cu_seqlens_q, Tensor) else list(cu_seqlens_q)
    seqlen_q = q.shape[1] if q.dim() == 4 else max_seqlen_q
    return [b * seqlen_q for b in range(batch + 1)]


def _first_key(seqlen_q: int, seqlen_k: int, window_left: int) -> int:
    """That a sequence's queries see."""
    left = window_of(window_left)
    return max(0, seqlen_k - seqlen_q - left) if left >= 0 else 0


def attention_over_cache(
    q: Tensor,
    cache: KvCache,
    seq_lens: Sequence[int] | Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Sequence[int] | Tensor | None = None,
    max_seqlen_q: int = 1,
    *,
    causal: bool = True,
    window_left: int = -1,
    **options,
) -> tuple[Tensor, Tensor]:
    """What :func:`minfer.attention_paged` computes, as :func:`attention`; codes become values of the type that is computed in.

    Keys before the first that is seen, and what else the cache holds beside the sequences' own, are not read.
    """
    batch, heads_q, dtype = len(seq_lens), q.shape[-2], compute_dtype(q)
    head_dim_v = cache.v.shape[-1] * (2 if cache.kv_format == "int4" else 1)
    out = q.new_zeros((*q.shape[:-1], head_dim_v))
    lse = q.new_full((*q.shape[:-3], heads_q, q.shape[-3]), -math.inf, dtype=_lse_dtype(q))
    lengths = seq_lens.tolist() if isinstance(seq_lens, Tensor) else seq_lens
    for b, (first, last) in enumerate(pairwise(_query_ends(q, batch, cu_seqlens_q, max_seqlen_q))):
        if first == last:
            continue
        own = (q[b], out[b], lse[b]) if q.dim() == 4 else (q[first:last], out[first:last], lse[:, first:last])
        begin = _first_key(last - first, lengths[b], window_left)
        k, v = reference_kv_cache.gather(cache, b, begin, lengths[b], block_table, dtype)
        _sequence(own[0], k, v, *own[1:], causal=causal, window_left=window_left, **options)
    return out, lse


def _cache_of(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_format: str, options: dict) -> KvCache:
    """Takes the scales and residuals out of ``options``."""
    kv_format = checks_kv_cache.check_format(Checker("attention_paged"), kv_format, k_cache.dtype, "q", q.dtype)
    return KvCache(kv_format, k_cache, v_cache, **{name: options.pop(name, None) for name in checks_kv_cache.SCALES})


def attention_paged(
    q, k_cache, v_cache, seq_lens, *, block_table=None, cu_seqlens_q=None, max_seqlen_q=1, kv_format="auto", **options
) -> tuple[Tensor, Tensor]:
    """:func:`attention_over_cache` with the operator's arguments."""
    cache = _cache_of(q, k_cache, v_cache, kv_format, options)
    ends = _query_ends(q, len(seq_lens), cu_seqlens_q, max_seqlen_q) if q.dim() == 3 else None
    return attention_over_cache(q, cache, seq_lens.tolist(), block_table, ends, **options)


def merge_attention_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What :func:`minfer.merge_attention_states` computes, in float32 (float64 of float64); any device."""
    highest = lses[0].contiguous()
    for lse in lses[1:]:
        highest = torch.maximum(highest, lse)
    base = highest.masked_fill(highest == -math.inf, 0.0)
    total = torch.zeros_like(base)
    for lse in lses:
        total += (lse - base).exp()
    merged = base + total.log()
    base = merged.masked_fill(merged == -math.inf, 0.0)
    dtype = compute_dtype(outs[0])
    out = torch.zeros(outs[0].shape, dtype=dtype, device=outs[0].device)
    for part, lse in zip(outs, lses, strict=True):
        weight = (lse - base).exp().transpose(-1, -2).unsqueeze(-1).to(dtype)
        # A part without a key has weight 0, and what its `out` holds must not matter: 0 * NaN is NaN.
        out += torch.where(weight == 0, 0.0, part.to(dtype) * weight)
    return out.to(outs[0].dtype), merged


# ---- what only reading memory can check: values of index tensors ----------------------------------------------------------------


def check_varlen_values(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **_) -> None:
    for name, ends, side, x, longest in (
        ("cu_seqlens_q", cu_seqlens_q, "q", q, max_seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, "k", k, max_seqlen_k),
    ):
        checks_attention.check_cu_seqlens("attention_varlen", name, ends.tolist(), side, x.shape[0], longest)


def check_paged_values(
    q, k_cache, v_cache, seq_lens, *, block_table=None, cu_seqlens_q=None, max_seqlen_q=1, kv_format="auto", window_left=-1, **options
) -> None:
    cache, lengths = _cache_of(q, k_cache, v_cache, kv_format, options), seq_lens.tolist()
    checks_attention.check_seq_lens(lengths, k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]))
    ends = _query_ends(q, len(lengths), cu_seqlens_q, max_seqlen_q)
    if cu_seqlens_q is not None:
        checks_attention.check_cu_seqlens("attention_paged", "cu_seqlens_q", ends, "q", q.shape[0], max_seqlen_q)
    for b, (first, last) in enumerate(pairwise(ends)):
        if block_table is not None and first < last:
            pages = reference_kv_cache.pages_of(cache, _first_key(last - first, lengths[b], window_left), lengths[b])
            checks_attention.check_pages(block_table[b, pages.start : pages.stop].tolist(), k_cache.shape[0], b)
