"""What lies between the attention of a layer and that of the next one, as one operator, for few tokens and weights in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...ops.decoder_block import fp8_decoder_block, w4a16_decoder_block
from .layer import DecoderLayer
from .mlp import Mlp
from .norm import Norm
from .projection import Projection, packed_int4, scaled_fp8

# Up to which the operators may be planned as one launch.
MOST_TOKENS_OF_INT4, MOST_TOKENS_OF_FP8 = 1, 2
MOST_TOKENS = max(MOST_TOKENS_OF_INT4, MOST_TOKENS_OF_FP8)


class Block:
    """(attention's output [tokens, heads * head_dim], x [tokens, hidden], which is written) -> what the next attention takes.

    Args:
      call: the operator, and ``parts``: what it takes of a product, by the names of the product's tensors.
      products: the output projection, the MLP's two, and the next layer's first one.
      mlp_norm, next_norm: in front of the second and of the last.
      most_tokens: for which it is worth calling.
    """

    def __init__(
        self,
        call: Callable[..., Tensor],
        parts: tuple[str, str],
        products: list[Projection],
        mlp_norm: Norm,
        next_norm: Norm,
        most_tokens: int,
    ):
        self._call, self._parts, self._products, self._norms = call, parts, products, (mlp_norm, next_norm)
        self.most_tokens = most_tokens

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        # The modules' tensors are looked up at every call: moving a module replaces them.
        weights = [[getattr(product, name) for name in self._parts] for product in self._products]
        output, first, down, following = self._products
        mlp_norm, next_norm = self._norms
        return self._call(
            y,
            x,
            *weights[0],
            mlp_norm.weight,
            *weights[1],
            *weights[2],
            next_norm.weight,
            *weights[3],
            o_bias=output.bias,
            down_bias=down.bias,
            next_bias=following.bias,
        )


def between(layer: DecoderLayer, following: DecoderLayer | None) -> Block | None:
    """The block behind a layer's attention; None where its parts are not those of :func:`minfer.w4a16_decoder_block` or
    :func:`minfer.fp8_decoder_block`."""
    if following is None or not isinstance(layer.mlp, Mlp) or layer.attention_output_norm is not None:
        return None
    first, down = layer.mlp.first, layer.mlp.down
    products = [layer.attention.output, first, down, following.attention.qkv]
    found = _operator_of(products)
    if found is None or not first.gated or first.bias is not None:
        return None
    if down.gated or any(product.activation != "none" for product in (products[0], down, products[3])):
        return None
    mlp_norm, next_norm = layer.mlp_norm, following.input_norm
    if mlp_norm.centered or next_norm.centered or (mlp_norm.eps, mlp_norm.weight_offset) != (next_norm.eps, next_norm.weight_offset):
        return None
    call, parts, most_tokens, options = found
    options |= dict(eps=mlp_norm.eps, weight_offset=mlp_norm.weight_offset, activation=first.activation, constant_weights=True)
    return Block(partial(call, **options), parts, products, mlp_norm, next_norm, most_tokens)


def _operator_of(products: list[Projection]) -> tuple[Callable[..., Tensor], tuple[str, str], int, dict[str, Any]] | None:
    """The operator of weights of one format, the names of their tensors, its most tokens, and its options that say more of the weights."""
    if all(scaled_fp8(product) for product in products):
        return fp8_decoder_block, ("weight", "scale"), MOST_TOKENS_OF_FP8, {}
    group_sizes = {packed_int4(product) for product in products}
    if len(group_sizes) != 1 or None in group_sizes:
        return None
    return w4a16_decoder_block, ("qweight", "scales"), MOST_TOKENS_OF_INT4, {"group_size": group_sizes.pop()}
