"""CPU kernels of attention, as ATen compositions; in float64 the same functions are the truth that the GPU tests measure by.

``merge_attention_states`` is the same composition on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks_attention
from .reference import _compute_dtype

# Scores that are in memory at a time, 64 MiB of float32: queries of a KV head are taken in blocks of so many.
_SCORES = 1 << 24


def visible(begin: int, end: int, seqlen_q: int, seqlen_k: int, causal: bool, left: int, right: int, device=None) -> Tensor | None:
    """[end - begin, seqlen_k]: which keys the queries begin .. end - 1 see, the last query aligned to the last key; None: all of them."""
    right = 0 if causal else right
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
    dtype, group = _compute_dtype(q), heads_q // heads_kv
    scale = head_dim**-0.5 if scale is None else scale
    block = max(1, _SCORES // (group * max(seqlen_k, 1)))
    for head in range(heads_kv):
        heads = slice(head * group, (head + 1) * group)
        keys, values = k[:, head].to(dtype), v[:, head].to(dtype)
        sink = None if sinks is None else sinks[heads].to(dtype)
        for begin in range(0, seqlen_q, block):
            end = min(begin + block, seqlen_q)
            seen = visible(begin, end, seqlen_q, seqlen_k, causal, window_left, window_right, q.device)
            queries = q[begin:end, heads].transpose(0, 1).to(dtype)
            result, denominator = _attend(queries, keys, values, scale, seen, softcap, sink)
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


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q, cu_seqlens_k, **options) -> tuple[Tensor, Tensor]:
    """What :func:`minfer.attention_varlen` computes, as :func:`attention`; cu_seqlens are lists or tensors."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=_lse_dtype(q))
    q_ends, k_ends = (x.tolist() if isinstance(x, Tensor) else x for x in (cu_seqlens_q, cu_seqlens_k))
    for b in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        _sequence(q[rows], k[keys], v[keys], out[rows], lse[:, rows], **options)
    return out, lse


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
    dtype = _compute_dtype(outs[0])
    out = torch.zeros(outs[0].shape, dtype=dtype, device=outs[0].device)
    for part, lse in zip(outs, lses, strict=True):
        weight = (lse - base).exp().transpose(-1, -2).unsqueeze(-1).to(dtype)
        # A part without a key has weight 0, and what its `out` holds must not matter: 0 * NaN is NaN.
        out += torch.where(weight == 0, 0.0, part.to(dtype) * weight)
    return out.to(outs[0].dtype), merged


# ---- kernels -----------------------------------------------------------------------------------------------------------------

_library = torch.library.Library("minfer", "IMPL")


def _without_kernel(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "kernel"}


def _attention_cpu(q, k, v, **options):
    checks_attention.check_attention(q, k, v, **options)
    return attention(q, k, v, **_without_kernel(options))


def _attention_varlen_cpu(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    checks_attention.check_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    checks_attention.check_cu_seqlens("cu_seqlens_q", q_ends, "q", q.shape[0], max_seqlen_q)
    checks_attention.check_cu_seqlens("cu_seqlens_k", k_ends, "k", k.shape[0], max_seqlen_k)
    return attention_varlen(q, k, v, q_ends, k_ends, **_without_kernel(options))


def _merge_attention_states(outs, lses):
    checks_attention.check_merge_attention_states(outs, lses)
    return merge_attention_states(outs, lses)


_library.impl("attention", _attention_cpu, "CPU")
_library.impl("attention_varlen", _attention_varlen_cpu, "CPU")
_library.impl("merge_attention_states", _merge_attention_states, "CompositeExplicitAutograd")
