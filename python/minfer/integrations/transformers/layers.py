"""The forward of transformers' decoder layers by :class:`minfer.integrations.decoder.DecoderLayer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from ...ops.attention import attention as attention_of, attention_paged
from ...ops.fused import rms_norm, rope
from ...ops.kv_cache import qk_norm_rope_append
from ..decoder import Attention, DecoderLayer
from .attention import attention_forward
from .cache import PagedLayer, Pages
from .rotary import Rotations, rotations_of


class _Attend:
    """What lies between a layer's projections in one call: rotation, the cache of transformers, attention."""

    def __init__(
        self,
        module: torch.nn.Module,
        batch: int,
        tokens: int,
        position_embeddings: Any,
        mask: Tensor | None,
        cache: Cache | None,
        layer_idx: int,
        kv_format: str,
    ):
        self.module, self.batch, self.tokens, self.mask = module, batch, tokens, mask
        self.position_embeddings, self.cache, self.layer_idx, self.kv_format = position_embeddings, cache, layer_idx, kv_format

    def __call__(self, attention: Attention, qkv: Tensor) -> Tensor:
        qkv = qkv.view(self.batch * self.tokens, attention.heads + 2 * attention.heads_kv, attention.head_dim)
        rotations = None
        if attention.rotary is not None:
            rotary_dim = attention.rotary_dim or attention.head_dim
            rotations = rotations_of(self.position_embeddings, self.batch, rotary_dim)
        layer = None if self.cache is None else self._layer(attention, qkv)
        if isinstance(layer, PagedLayer) and (self.mask is None or self.mask.dim() == 2):
            return self._paged(attention, qkv, rotations, layer).flatten(1)
        q, k, v = self._prepared(attention, qkv, rotations)
        if layer is None and self.mask is None:
            return self._plain(attention, q, k, v).flatten(1)
        return self._theirs(attention, q, k, v).reshape(qkv.shape[0], -1)

    def _layer(self, attention: Attention, qkv: Tensor) -> Any:
        """The cache's layer; one of transformers' growing ones that is empty yet becomes minfer's."""
        cache, index = self.cache, self.layer_idx
        if cache.layer_class_to_replicate is not None:
            while len(cache.layers) <= index:
                cache.layers.append(cache.layer_class_to_replicate())
        layer = cache.layers[index]
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and not layer.is_initialized and not cache.offloading:
            layer = cache.layers[index] = PagedLayer(self.kv_format, is_sliding=layer.is_sliding)
        if isinstance(layer, PagedLayer) and not layer.is_initialized:
            layer.start(self._pages(qkv.device), attention.heads_kv, attention.head_dim, qkv.dtype)
        return layer

    def _pages(self, device: torch.device) -> Pages:
        """Those of the cache's layers that have begun, or new ones."""
        for layer in self.cache.layers:
            if isinstance(layer, PagedLayer) and layer.pages is not None and layer.pages.device == device:
                return layer.pages
        return Pages(self.batch, device)

    def _paged(self, attention: Attention, qkv: Tensor, rotations: Rotations | None, layer: PagedLayer) -> Tensor:
        step, heads, heads_kv = layer.advance(self.tokens, self.mask), attention.heads, attention.heads_kv
        cache = layer.cache
        if rotations is None:
            q, k, v = qkv.split([heads, heads_kv, heads_kv], 1)
            layer.append(k, v, step)
        else:
            norm = attention.q_norm
            q = qk_norm_rope_append(
                qkv,
                None if norm is None else norm.weight,
                None if norm is None else attention.k_norm.weight,
                rotations.table,
                rotations.positions,
                cache.k,
                cache.v,
                step.slots,
                rotary_dim=attention.rotary_dim,
                cu_seqlens=step.cu_seqlens,
                **({} if norm is None else {"eps": norm.eps, "weight_offset": norm.weight_offset}),
                **cache.scales(),
            )
        options = dict(block_table=layer.pages.table, causal=attention.causal, **attention.scores(), **cache.scales())
        if step.order is None:
            q = q.unflatten(0, (self.batch, self.tokens))
            return attention_paged(q, cache.k, cache.v, step.seq_lens, **options)[0].flatten(0, 1)
        rows = dict(cu_seqlens_q=step.cu_ordered, max_seqlen_q=self.tokens)
        y, _ = attention_paged(q[step.order], cache.k, cache.v, step.seq_lens, **rows, **options)
        return torch.empty_like(y).index_copy_(0, step.order, y)

    def _prepared(self, attention: Attention, qkv: Tensor, rotations: Rotations | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [batch * tokens, heads, head_dim], normalised, and rotated in place."""
        heads, heads_kv = attention.heads, attention.heads_kv
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + heads_kv], qkv[:, heads + heads_kv :]
        if attention.q_norm is not None:
            q, k = (
                rms_norm(x, norm.weight, norm.eps, weight_offset=norm.weight_offset)
                for x, norm in ((q, attention.q_norm), (k, attention.k_norm))
            )
        if rotations is not None:
            rope(q, k, rotations.table, rotations.positions, rotary_dim=attention.rotary_dim)
        return q, k, v

    def _plain(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention among the call's own tokens."""
        q, k, v = (x.unflatten(0, (self.batch, self.tokens)) for x in (q, k, v))
        return attention_of(q, k, v, causal=attention.causal, **attention.scores())[0].flatten(0, 1)

    def _theirs(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A cache of another kind, or a mask without one: keys and values as tensors."""
        q, k, v = (x.unflatten(0, (self.batch, self.tokens)).transpose(1, 2) for x in (q, k, v))
        if self.cache is not None:
            k, v = self.cache.update(k, v, self.layer_idx)
        window = None if attention.window < 0 else attention.window + 1
        options = dict(scaling=attention.scale, sliding_window=window, softcap=attention.softcap, s_aux=attention.sinks)
        return attention_forward(self.module, q, k, v, self.mask, **options, is_causal=attention.causal)[0]


def _own_cache(past_key_values: Any, cache: Any, use_cache: bool | None) -> Cache | None:
    """The layer's cache, which transformers calls ``cache`` from 5.24 on. By a name of a later version it would be overlooked, and every
    token would see itself alone."""
    given = past_key_values if cache is None else cache
    if use_cache and given is None:
        raise RuntimeError(
            "minfer layer: use_cache is True, but neither past_key_values nor cache was given; "
            "this version of transformers may not be one that minfer knows"
        )
    return given.self_attention_cache if isinstance(given, EncoderDecoderCache) else given


def _run(
    decoder: DecoderLayer,
    module: torch.nn.Module,
    layer_idx: int,
    kv_format: str,
    hidden_states: Tensor,
    position_embeddings: Any,
    mask: Tensor | None,
    cache: Cache | None,
) -> Tensor:
    batch, tokens, _ = hidden_states.shape
    attend = _Attend(module, batch, tokens, position_embeddings, mask, cache, layer_idx, kv_format)
    return decoder(hidden_states.flatten(0, 1), attend).view(hidden_states.shape)


def decoder_forward(decoder: DecoderLayer, attention: torch.nn.Module, layer_idx: int, kv_format: str) -> Callable[..., Tensor]:
    """A forward for layers with Llama's signature. The cache is ``past_key_values``, or ``cache``, as it is called from transformers 5.24
    on."""

    def forward(
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        position_embeddings: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        parts = (hidden_states, position_embeddings, attention_mask, _own_cache(past_key_values, cache, use_cache))
        return _run(decoder, attention, layer_idx, kv_format, *parts)

    return forward


def gpt2_forward(decoder: DecoderLayer, attention: torch.nn.Module, layer_idx: int, kv_format: str) -> Callable[..., Tensor]:
    """A forward for GPT-2's blocks."""

    def forward(
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if encoder_hidden_states is not None:
            raise RuntimeError("minfer GPT-2 block: encoder_hidden_states must be None: the block has no cross-attention")
        own = _own_cache(past_key_values, cache, use_cache)
        return _run(decoder, attention, layer_idx, kv_format, hidden_states, None, attention_mask, own)

    return forward
