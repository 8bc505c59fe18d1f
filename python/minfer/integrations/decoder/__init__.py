"""Decoder layers of transformers, by minfer's operators: what a layer needs, in one place, whatever engine it hangs in.

A :class:`DecoderLayer` is built of :class:`Projection`, :class:`Norm`, :class:`Attention`, and :class:`Mlp` or :class:`Experts`. It takes
[tokens, hidden_size] and leaves to its caller where keys and values are kept: an engine passes ``attend``, which gets q, k and v of all
tokens as the projection wrote them.
"""

from .attention import Attention
from .layer import DecoderLayer
from .mlp import Experts, Mlp
from .norm import Norm
from .projection import Projection, projection_of
from .weights import Dense, concatenate, gate_up

__all__ = [
    "Attention",
    "DecoderLayer",
    "Dense",
    "Experts",
    "Mlp",
    "Norm",
    "Projection",
    "concatenate",
    "gate_up",
    "projection_of",
]
