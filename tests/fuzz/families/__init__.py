"""The operators: one object for each, by its public name."""

from __future__ import annotations

from ..family import Family
from .allocate_kv_cache import AllocateKvCache
from .attention import Attention, AttentionVarlen, MergeAttentionStates
from .attention_paged import AttentionPaged
from .decoder_block import DecoderBlock, DenseDecoderBlock, Fp8DecoderBlock
from .fused import FUSED_FAMILIES
from .gemm import Gemm, GemmGated
from .grouped import GROUPED_FAMILIES
from .grouped_scaled import GROUPED_SCALED_FAMILIES
from .kv_cache_append import KvCacheAppend
from .moe_layer import LAYER_FAMILIES
from .moe_routing import ROUTING_FAMILIES
from .norm_gemm import NORM_GEMM_FAMILIES
from .qk_norm_rope_append import QkNormRopeAppend
from .quantized_gemm import QuantizedGemm
from .quantized_scaled_gemm import W4A8_FAMILIES
from .sampling import Sample
from .scaled_gemm import SCALED_GEMM_FAMILIES
from .weights import WEIGHT_FAMILIES

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Attention(),
        AttentionVarlen(),
        AttentionPaged(),
        KvCacheAppend(),
        QkNormRopeAppend(),
        MergeAttentionStates(),
        AllocateKvCache(),
        Gemm(),
        GemmGated(),
        *(QuantizedGemm(bits, gated) for bits in (4, 8) for gated in (False, True)),
        *WEIGHT_FAMILIES,
        *ROUTING_FAMILIES,
        *GROUPED_FAMILIES,
        *LAYER_FAMILIES,
        *FUSED_FAMILIES,
        *NORM_GEMM_FAMILIES,
        DecoderBlock(),
        Fp8DecoderBlock(),
        DenseDecoderBlock(),
        *SCALED_GEMM_FAMILIES,
        *W4A8_FAMILIES,
        *GROUPED_SCALED_FAMILIES,
        Sample(),
    )
}
