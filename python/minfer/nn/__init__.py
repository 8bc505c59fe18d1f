"""Modules: packed weights, and what stands between the linear layers of a transformer."""

from .embedding import Embedding
from .gated_activation import GeGLU, SwiGLU
from .linear import W4Linear, W8Linear
from .norm import LayerNorm, RMSNorm
from .rotary_embedding import RotaryEmbedding
from .scaled_linear import Fp8Linear, Int8Linear

__all__ = [
    "Embedding",
    "Fp8Linear",
    "GeGLU",
    "Int8Linear",
    "LayerNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "W4Linear",
    "W8Linear",
]
