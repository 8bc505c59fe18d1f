"""Attention of a whole prompt, and of a decode step over paged caches of every format.

PyTorch has no attention over pages or codes. In decode it is timed over the same keys and values, dequantised and contiguous, in 16 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import minfer

from ....measure.benchmarking import bytes_of
from ....reference import attention as reference_attention
from ..case import Case, Operands, Peer, Work
from ..sizes import Sizes
from .kv_cache import KV_FORMATS, filled_cache, gather_all

FAMILY = "attention"


def _sdpa(s: Operands, **options: bool) -> Tensor:
    """q, k and v [batch, seqlen, heads, head_dim]; KV heads are not expanded."""
    q, k, v = (s[name].transpose(1, 2) for name in ("q", "k", "v"))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


def _sdpa_cudnn(s: Operands, **options: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(s, **options)


def _peers(what: str, **options: bool) -> tuple[Peer, ...]:
    """PyTorch's own choice of a backend, and cuDNN's, which it does not always choose where that is faster."""
    return Peer(f"SDPA{what}", lambda s: _sdpa(s, **options)), Peer(f"SDPA by cuDNN{what}", lambda s: _sdpa_cudnn(s, **options))


def _prefill(sizes: Sizes) -> Case:
    tokens, heads_q, heads_kv, dim = sizes.prompt, sizes.heads_q, sizes.heads_kv, sizes.head_dim

    def make() -> Operands:
        return {name: sizes.normal(1, tokens, heads, dim) for name, heads in (("q", heads_q), ("k", heads_kv), ("v", heads_kv))}

    return Case(
        FAMILY,
        "prompt, causal",
        f"1 x {tokens}, {heads_q}/{heads_kv} heads x {dim}",
        make,
        lambda s: minfer.attention(s["q"], s["k"], s["v"], causal=True)[0],
        lambda s: reference_attention.attention(s["q"].double(), s["k"].double(), s["v"].double(), causal=True)[0],
        _peers("", is_causal=True),
        lambda s: Work(bytes_of(s) + bytes_of(s["q"]), 4.0 * heads_q * dim * tokens * (tokens + 1) / 2),
        sizes.dtype,
    )


def _decode(sizes: Sizes, kv_format: str) -> Case:
    batch, context, heads_q, heads_kv, dim = sizes.batch, sizes.context, sizes.heads_q, sizes.heads_kv, sizes.head_dim

    def make() -> Operands:
        own = filled_cache(sizes, kv_format, context)
        seq_lens = torch.full((batch,), context, dtype=torch.int32, device=sizes.device)
        return {"q": sizes.normal(batch, 1, heads_q, dim), "cache": own["cache"], "table": own["table"], "seq_lens": seq_lens}

    def ours(s: Operands) -> Tensor:
        cache = s["cache"]
        return minfer.attention_paged(s["q"], cache.k, cache.v, s["seq_lens"], block_table=s["table"], **cache.scales())[0]

    def truth(s: Operands) -> Tensor:
        return reference_attention.attention(s["q"].double(), *gather_all(s["cache"], s["table"], context, torch.float64), causal=True)[0]

    def pages(cache: minfer.KvCache) -> list[Tensor | None]:
        """The tensors that hold the context; the residual of int4 holds less than a token group of it."""
        return [cache.k, cache.v, cache.k_scale, cache.v_scale]

    def contiguous(s: Operands) -> Operands:
        k, v = gather_all(s["cache"], s["table"], context, sizes.dtype)
        return {"q": s["q"], "k": k, "v": v}

    return Case(
        FAMILY,
        f"decode, {kv_format} cache",
        f"{batch} x {context}, {heads_q}/{heads_kv} heads x {dim}",
        make,
        ours,
        truth,
        _peers(", 16-bit"),
        lambda s: Work(bytes_of((s["q"], s["q"], s["table"], *pages(s["cache"]))), 4.0 * heads_q * dim * batch * context),
        sizes.dtype,
        peer_operands=contiguous,
    )


def cases(sizes: Sizes) -> list[Case]:
    return [_prefill(sizes), *(_decode(sizes, kv_format) for kv_format in KV_FORMATS)]
