"""The operators: one object for each, by its public name."""

from __future__ import annotations

from ..family import Family
from .attention import Attention, AttentionVarlen, MergeAttentionStates
from .attention_paged import AttentionPaged
from .kv_cache_append import KvCacheAppend

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Attention(),
        AttentionVarlen(),
        AttentionPaged(),
        KvCacheAppend(),
        MergeAttentionStates(),
    )
}
