"""What lies between the attention of a layer and that of the next one, as one operator, for few tokens and weights in 4 bits."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ...ops.decoder_block import w4a16_decoder_block
from .layer import DecoderLayer
from .mlp import Mlp
from .norm import Norm
from .projection import Projection, packed_int4

MOST_TOKENS = 1  # for which :func:`minfer.w4a16_decoder_block` may be planned as one launch


class Block:
    """(attention's output [tokens, heads * head_dim], x [tokens, hidden], which is written) -> what the next attention takes.

    Args:
      products: the output projection, the MLP's two, and the next layer's first one.
      mlp_norm, next_norm: in front of the second and of the last.
      options: of :func:`minfer.w4a16_decoder_block`.
    """

    def __init__(self, products: list[Projection], mlp_norm: Norm, next_norm: Norm, options: dict[str, Any]):
        self._products, self._norms = products, (mlp_norm, next_norm)
        self._call = partial(w4a16_decoder_block, **options)

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        # The modules' tensors are looked up at every call: moving a module replaces them.
        output, first, down, following = self._products
        mlp_norm, next_norm = self._norms
        return self._call(
            y,
            x,
            output.qweight,
            output.scales,
            mlp_norm.weight,
            first.qweight,
            first.scales,
            down.qweight,
            down.scales,
            next_norm.weight,
            following.qweight,
            following.scales,
            o_bias=output.bias,
            down_bias=down.bias,
            next_bias=following.bias,
        )


def between(layer: DecoderLayer, following: DecoderLayer | None) -> Block | None:
    """The block behind a layer's attention; None where its parts are not those of :func:`minfer.w4a16_decoder_block`."""
    if following is None or not isinstance(layer.mlp, Mlp) or layer.attention_output_norm is not None:
        return None
    first, down = layer.mlp.first, layer.mlp.down
    products = [layer.attention.output, first, down, following.attention.qkv]
    formats = [packed_int4(product) for product in products]
    if None in formats or len(set(formats)) != 1 or not first.gated or first.bias is not None:
        return None
    if down.gated or any(product.activation != "none" for product in (products[0], down, products[3])):
        return None
    mlp_norm, next_norm = layer.mlp_norm, following.input_norm
    if mlp_norm.centered or next_norm.centered or (mlp_norm.eps, mlp_norm.weight_offset) != (next_norm.eps, next_norm.weight_offset):
        return None
    options = dict(eps=mlp_norm.eps, weight_offset=mlp_norm.weight_offset, group_size=formats[0], activation=first.activation)
    return Block(products, mlp_norm, next_norm, options | {"constant_weights": True})
