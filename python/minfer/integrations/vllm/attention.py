"""The attention backend ``MINFER`` of vLLM: :func:`minfer.attention_paged` over vLLM's own pages, for decode, speculative decode,
chunks of prompts, and batches of all three.

Caches. vLLM gives a layer's pages as [blocks, heads_kv, block_size, content], the content of a token and head being K, then V. 16-bit and
``fp8`` caches are read and written there, as views. Of ``int8_per_token_head``, whose content has a scale beside K and V, the layer's
memory is divided otherwise: codes of K, codes of V, scales of K, scales of V, each for all blocks; that is as many bytes, but a block is in
four places, so that a KV connector, which moves blocks, cannot be used with it. ``int4_per_token_head`` is a format that minfer does not
have, and minfer's int4 cache keeps the newest tokens of each sequence apart, where vLLM has no place for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..._core.batch_invariance import computes_batch_invariant
from ..._core.namespace import ops
from ...ops.attention import attention_paged
from ...ops.kv_cache import kv_cache_append, qk_norm_rope_append
from .linear import why_not_here

_SCALE_BYTES = 4
_FORMATS = {
    KVQuantMode.NONE: "16bit",
    KVQuantMode.FP8_PER_TENSOR: "fp8_e4m3",
    KVQuantMode.INT8_PER_TOKEN_HEAD: "int8",
}


_rotations: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}  # by the address of vLLM's: that one, and the same in float32


def _rotations_of(cos_sin: Tensor) -> Tensor:
    """Cosines and sines in float32, which all layers of a model share."""
    if cos_sin.dtype == torch.float32:
        return cos_sin
    key = (cos_sin.device, cos_sin.data_ptr())
    if key not in _rotations or _rotations[key][0].shape != cos_sin.shape:
        _rotations[key] = (cos_sin, cos_sin.float())
    return _rotations[key][1]


class _Pages(NamedTuple):
    """A layer's cache as minfer's operators take it."""

    k: Tensor  # [blocks, block_size, heads_kv, head_size]
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


class MinferAttentionBackend(AttentionBackend):
    """What the backend takes; vLLM asks before it chooses it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "int8_per_token_head"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "MINFER"

    @staticmethod
    def get_impl_cls() -> type[MinferAttentionImpl]:
        return MinferAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MinferAttentionMetadataBuilder]:
        return MinferAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and 0 < head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return computes_batch_invariant("attention_paged")

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major >= 8 and why_not_here() is None

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """int8: a scale of K and one of V for each token and head."""
        if spec.state_content_bytes is not None or spec.kv_quant_mode != KVQuantMode.INT8_PER_TOKEN_HEAD:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * _SCALE_BYTES)


@dataclass
class MinferAttentionMetadata(AttentionMetadata):
    """Of a batch. Tensors are vLLM's own, on the device, and are read there: a captured graph follows them."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [requests + 1]
    seq_lens: Tensor  # int32 [requests]
    block_table: Tensor  # int32 [requests, n]
    slot_mapping: Tensor  # int64 [tokens]
    causal: bool


class MinferAttentionMetadataBuilder(AttentionMetadataBuilder[MinferAttentionMetadata]):
    """Takes what vLLM has: the operator plans on the host by sizes alone."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        int8 = getattr(kv_cache_spec, "kv_quant_mode", None) == KVQuantMode.INT8_PER_TOKEN_HEAD
        if int8 and getattr(vllm_config, "kv_transfer_config", None) is not None:
            raise ValueError("attention backend MINFER: a KV connector cannot be used with --kv-cache-dtype int8_per_token_head")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MinferAttentionMetadata:
        c = common_attn_metadata
        if isinstance(c.causal, Tensor):
            raise ValueError("attention backend MINFER: requests of one batch are all causal, or none is")
        return MinferAttentionMetadata(
            c.num_actual_tokens, c.max_query_len, c.query_start_loc, c.seq_lens, c.block_table_tensor, c.slot_mapping, bool(c.causal)
        )

    def update_block_table(self, metadata: MinferAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor) -> MinferAttentionMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: MinferAttentionMetadata) -> None:
        """Nothing: the metadata are vLLM's own buffers."""


class MinferAttentionImpl(AttentionImpl[MinferAttentionMetadata]):
    """The attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError("attention backend MINFER has no ALiBi: choose another --attention-backend for this model")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attention backend MINFER is for decoders, got a layer of type {attn_type}")
        mode = get_kv_quant_mode(kv_cache_dtype)
        if mode not in _FORMATS or kv_cache_dtype == "fp8_e5m2":
            raise ValueError(f"attention backend MINFER has no --kv-cache-dtype {kv_cache_dtype}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.softcap = float(logits_soft_cap or 0.0)
        self.kv_cache_dtype, self.kv_format = kv_cache_dtype, _FORMATS[mode]
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._pages: tuple[int, _Pages] | None = None  # by the cache's address

    def _pages_of(self, layer: Any, kv_cache: Tensor) -> _Pages:
        """Views of a layer's cache, which are made once: vLLM gives the same memory in every step."""
        address = kv_cache.data_ptr()
        if self._pages is None or self._pages[0] != address:
            self._pages = (address, self._int8_pages(kv_cache) if self.kv_format == "int8" else self._plain_pages(layer, kv_cache))
        return self._pages[1]

    def _plain_pages(self, layer: Any, kv_cache: Tensor) -> _Pages:
        by_token = kv_cache.transpose(1, 2)
        k, v = by_token[..., : self.head_size], by_token[..., self.head_size :]
        if self.kv_format == "16bit":
            return _Pages(k, v, None, None)
        scales = (x.reshape(-1)[:1] for x in (layer._k_scale, layer._v_scale))
        return _Pages(k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn), *scales)

    def _int8_pages(self, kv_cache: Tensor) -> _Pages:
        blocks, heads, block_size, content = kv_cache.shape
        if content != 2 * (self.head_size + _SCALE_BYTES) or kv_cache.element_size() != 1:
            raise ValueError(f"attention backend MINFER: int8 cache of {content} bytes a token and head, not {2 * (self.head_size + 4)}")
        memory = kv_cache if kv_cache.is_contiguous() else kv_cache.transpose(1, 2)
        if not memory.is_contiguous():
            raise ValueError("attention backend MINFER: the blocks of a layer's int8 cache must follow each other without gaps")
        memory, cells = memory.reshape(-1).view(torch.int8), blocks * heads * block_size
        codes, scales = cells * self.head_size, cells * _SCALE_BYTES
        k, v, k_scale, v_scale = memory.split([codes, codes, scales, scales])
        shape = (blocks, heads, block_size)
        by_token = (x.view(*shape, self.head_size).transpose(1, 2) for x in (k, v))
        return _Pages(*by_token, *(x.view(torch.float32).view(shape) for x in (k_scale, v_scale)))

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores keys and values of the tokens that have a slot: those behind slot_mapping are a graph's padding."""
        pages, tokens = self._pages_of(layer, kv_cache), slot_mapping.shape[0]
        options = {"k_scale": pages.k_scale, "v_scale": pages.v_scale, "kv_format": self.kv_format}
        kv_cache_append(key[:tokens], value[:tokens], pages.k, pages.v, slot_mapping, **options)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: MinferAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [tokens, heads, head_size] to the cache, into output, which has as many elements."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("attention backend MINFER does not quantise its output")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        tokens, m, pages = attn_metadata.num_actual_tokens, attn_metadata, self._pages_of(layer, kv_cache)
        q, out = query[:tokens], output[:tokens].view(tokens, self.num_heads, self.head_size)
        if q.is_cuda:
            ops._attention_paged_into(
                q,
                pages.k,
                pages.v,
                m.seq_lens,
                m.block_table,
                m.query_start_loc,
                m.max_query_len,
                pages.k_scale,
                pages.v_scale,
                self.kv_format,
                m.causal,
                self.scale,
                self.window_left,
                self.softcap,
                self.sinks,
                out,
            )
            return output
        y, _ = attention_paged(
            q,
            pages.k,
            pages.v,
            m.seq_lens,
            block_table=m.block_table,
            cu_seqlens_q=m.query_start_loc,
            max_seqlen_q=m.max_query_len,
            k_scale=pages.k_scale,
            v_scale=pages.v_scale,
            kv_format=self.kv_format,
            causal=m.causal,
            scale=self.scale,
            window_left=self.window_left,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        out.copy_(y)
        return output

    # ---- what stands in front of attention, in one launch ----------------------------------------------------------------------------

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return self.kv_sharing_target_layer_name is None

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: Tensor,
        q_out: Tensor,
        k_out: Tensor,
        positions: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        rms_norm_eps: float,
        cos_sin_cache: Tensor,
        is_neox: bool,
        kv_cache: Tensor,
        layer_slot_mapping: Tensor,
    ) -> None:
        """Norms of the heads, rotation, and storing. k_out stays as it is: attention reads the cache."""
        pages, tokens = self._pages_of(layer, kv_cache), layer_slot_mapping.shape[0]
        heads = self.num_heads + 2 * self.num_kv_heads
        q = qk_norm_rope_append(
            qkv[:tokens].view(tokens, heads, self.head_size),
            q_weight,
            k_weight,
            _rotations_of(cos_sin_cache),
            positions[:tokens],
            pages.k,
            pages.v,
            layer_slot_mapping,
            eps=rms_norm_eps,
            interleaved=not is_neox,
            rotary_dim=cos_sin_cache.shape[-1],
            k_scale=pages.k_scale,
            v_scale=pages.v_scale,
            kv_format=self.kv_format,
        )
        q_out[:tokens].view(tokens, self.num_heads, self.head_size).copy_(q)
