"""What lies between the attention of a layer and that of the next one, as one operator, for few tokens and weights in 4, 8 or 16 bits. Of
one token that operator can be one launch, attention a part of it, and a launch that of several layers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._core.batch_invariance import is_batch_invariant
from ...distributed.layer_exchange import LayerExchange
from ...ops.decoder_block import decoder_block, fp8_decoder_block, w4a16_decoder_block
from ...planning.plan import DTYPE_NAMES
from .attention import Attention
from .layer import DecoderLayer
from .mlp import Mlp
from .norm import Norm
from .projection import Projection, is_dense, packed_int4, scaled_fp8
from .shard import ReducedProjection

# Up to which the operators may be planned as one launch.
MOST_TOKENS_OF_INT4, MOST_TOKENS_OF_FP8, MOST_TOKENS_OF_DENSE = 1, 2, 2
MOST_TOKENS = max(MOST_TOKENS_OF_INT4, MOST_TOKENS_OF_FP8)


_HEAD_DIM = 128  # of an attention that is part of the launch


class OneToken(NamedTuple):
    """What an engine has for the attention of one token: a paged cache of 16 bits, in the words of :func:`minfer.attention_paged` and
    :func:`minfer.qk_norm_rope_append`.

    While the token is computed, nothing may still be written of it but the rows that the token's layers store: a launch reads it before
    the one in front has finished. The first layer's does not: what an engine enqueues in front of a step may still be on its way there.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    positions: Tensor
    cos_sin: Tensor


def parts_of(layer: DecoderLayer) -> tuple:
    """What decides how a layer is launched."""
    attention, mlp = layer.attention, layer.mlp
    products = [attention.qkv, attention.output] + ([mlp.first, mlp.down] if isinstance(mlp, Mlp) else [])
    sizes = [(x.in_features, x.out_features, x.weight_format) for x in (getattr(y, "own", y) for y in products)]
    return (attention.heads, attention.heads_kv, *sizes)


class AttendsToOne(ABC):
    """An ``Attend`` whose attention of one token can be part of a launch."""

    @abstractmethod
    def one_token(self, attention: Attention) -> OneToken | None:
        """Of the step at hand; None: it is not like that."""


class Block:
    """(attention's output [tokens, heads * head_dim], x [tokens, hidden], which is written) -> what the next attention takes; of the last
    layer nothing, in no columns.

    Args:
      call: the operator; layers: the one of several layers, with their attention; parts: what they take of a product, by the names of the
        product's tensors.
      products: the output projection, the MLP's two, and the next layer's first one; of the last layer no more than three.
      mlp_norm, next_norm: in front of the second and of the fourth, or of the last layer twice the same.
      most_tokens: for which it is worth calling.
      options: of both operators.
      exchange: of a layer that is divided among ranks, what they exchange their parts of sums through; None: it is whole.
    """

    def __init__(
        self,
        call: Callable[..., Tensor],
        layers: Callable[..., Tensor],
        parts: tuple[str, ...],
        products: list[Projection],
        mlp_norm: Norm,
        next_norm: Norm,
        most_tokens: int,
        options: dict[str, Any],
        exchange: LayerExchange | None = None,
    ):
        self._call, self._layers, self._parts, self._options = call, layers, parts, options
        self._products, self._norms = products, (mlp_norm, next_norm)
        self.most_tokens, self._exchange = most_tokens, exchange

    @property
    def needs_attention(self) -> bool:
        """Whether it is computed with attention in front or not at all."""
        return self._exchange is not None

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        return self._call(y, x, **self.tensors(), **self._options, constant_weights=True)

    def run(self, *args: Any, **more: Any) -> Tensor:
        """The operator with attention in front, of several layers' tensors."""
        exchange = {} if self._exchange is None else {"exchange": self._exchange.addresses, "rank": self._exchange.rank}
        return self._layers(*args, **more, **self._options, **exchange)

    @property
    def has_following(self) -> bool:
        return len(self._products) == 4

    def following_bias(self) -> bool:
        """Whether the product behind the layer has a bias."""
        return self.has_following and self._products[3].bias is not None

    def tensors(self) -> dict[str, Tensor | None]:
        """Of both operators. The modules' tensors are looked up at every call: moving a module replaces them."""
        found: dict[str, Tensor | None] = {"next_bias": None}
        for name, product in zip(("o", "gate_up", "down", "next"), self._products, strict=False):
            found |= {f"{name}_{part}": getattr(product, part) for part in self._parts}
            if name != "gate_up":
                found[f"{name}_bias"] = product.bias
        if len(self._products) < 4:
            found |= {f"next_{part}": _without_rows(part, getattr(self._products[1], part)) for part in self._parts}
        return found | {"mlp_norm": self._norms[0].weight, "next_norm": self._norms[1].weight}

    def includes(self, attention: Attention, step: OneToken) -> bool:
        """Whether :func:`launch` computes the layer of a token, and should."""
        return self.most_layers(attention, step) > 0

    def most_layers(self, attention: Attention, step: OneToken) -> int:
        """Of a launch; 0: attention and block have launches of their own."""
        cache, table = step.k_cache, step.cos_sin
        if not cache.is_cuda or cache.dtype != self._norms[0].weight.dtype or attention.head_dim != _HEAD_DIM:
            return 0
        if attention.softcap or attention.sinks is not None or not attention.causal or table.shape[1] != _HEAD_DIM:
            return 0
        if (
            cache.stride() != step.v_cache.stride()
            or attention.rotary_dim not in (None, _HEAD_DIM)
            or cache.shape[1] & (cache.shape[1] - 1)
        ):
            return 0
        sizes = _sizes(self._products)
        sizes += (attention.heads, attention.heads_kv, step.block_table.shape[1] * cache.shape[1])
        weights = self._weights()
        return 0 if weights is None else _most_layers(sizes, cache.dtype, *weights, cache.device.index, is_batch_invariant())

    def _weights(self) -> tuple[str, int] | None:
        """What ``_plan_decoder_block`` takes of them."""
        if "group_size" in self._options:
            return "int4", self._options["group_size"]
        if self._parts == ("weight",):
            return "dense", -1
        of_blocks = {scaled_fp8(product) == "block128" for product in self._products}
        if len(of_blocks) > 1 or any(product.scale.dtype != torch.float32 for product in self._products):
            return None
        return ("blocks" if of_blocks.pop() else "rows"), -1

    def key(self, attention: Attention) -> tuple:
        """What layers of one launch have in common."""
        norm = attention.q_norm
        biases = [product.bias is None or product.bias.dtype for product in self._products if product is not self._products[1]]
        heads = (attention.heads, attention.heads_kv, attention.scale, None if norm is None else (norm.eps, norm.weight_offset))
        # The last product is another layer's, and there may be none.
        return self._layers, _sizes(self._products)[:4], self._weights(), sorted(self._options.items()), heads, biases[:2], self._exchange


class Part(NamedTuple):
    """A layer of a launch."""

    block: Block
    attention: Attention
    step: OneToken


def continues(part: Part, first: Part) -> bool:
    """Whether a layer can be in a launch with another one in front of it, ``first`` or layers behind that one."""
    mine, theirs = part.step, first.step
    shared = all(x is y or x.data_ptr() == y.data_ptr() for x, y in zip(mine[2:], theirs[2:], strict=True))
    same_cache = mine.k_cache.shape == theirs.k_cache.shape and mine.k_cache.stride() == theirs.k_cache.stride()
    following = first.block.following_bias() == part.block.following_bias() or not part.block.has_following
    return shared and same_cache and following and part.block.key(part.attention) == first.block.key(first.attention)


def launch(parts: list[Part], qkv: Tensor, x: Tensor, settled: bool) -> Tensor:
    """Layers, one behind the other, of one token, in one launch.

    Args:
      parts: of layers that continue each other, no more than ``first.block.most_layers`` says.
      qkv: [1, (heads + 2 * heads_kv) * head_dim], of the first; x: [1, hidden], which is written.
      settled: the steps keep their promise although the launch in front has not finished.

    Returns:
      The qkv of the layer behind the last.
    """
    block, attention, step = parts[0]
    norms = [(part.attention.q_norm, part.attention.k_norm) for part in parts if part.attention.q_norm is not None]
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.block.tensors().items():
            found.setdefault(name, []).append(value)
    # Layers alike have a tensor each, or none; a last layer without a product behind it has no bias of that.
    lists = {name: [] if values[0] is None else values for name, values in found.items()}
    if lists["next_bias"] and lists["next_bias"][-1] is None:
        lists["next_bias"] = lists["next_bias"][:-1] + [lists["next_bias"][0][:0]]
    return block.run(
        qkv.view(1, -1, attention.head_dim),
        x,
        [part.step.k_cache for part in parts],
        [part.step.v_cache for part in parts],
        *step[2:],
        q_weight=[q.weight for q, _ in norms],
        k_weight=[k.weight for _, k in norms],
        scale=attention.scale,
        windows=[part.attention.window for part in parts],
        qk_eps=norms[0][0].eps if norms else 0.0,
        qk_weight_offset=norms[0][0].weight_offset if norms else 0.0,
        constant=settled,
        **lists,
    )


def _without_rows(part: str, x: Tensor) -> Tensor:
    """A tensor of a weight of gate and up rows, as a weight with the same columns and no rows has it."""
    if part == "scales":
        return x[:, :0]
    if part == "scale" and x.numel() == 1:
        return x
    return x[0, :0] if part == "scale" and x.dim() == 3 else x[:0]  # of blocks, gates' and ups' apart; of rows


def _sizes(products: list[Projection]) -> tuple[int, ...]:
    """Of one token, as ``_plan_decoder_block`` takes them."""
    output, down, behind = products[0], products[2], products[3:]
    return (1, output.in_features, output.out_features, down.in_features, behind[0].out_features if behind else 0)


@lru_cache(maxsize=1024)
def _most_layers(sizes: tuple[int, ...], dtype: torch.dtype, weights: str, group_size: int, device: int, batch_invariant: bool) -> int:
    """Of one launch; 0: the block is not one."""
    plan = json.loads(torch.ops.minfer._plan_decoder_block(list(sizes), DTYPE_NAMES[dtype], weights, group_size, False, device))
    return plan["most_layers"] if plan["one_launch"] else 0


def between(layer: DecoderLayer, following: DecoderLayer | None, exchange: LayerExchange | None = None) -> Block | None:
    """The block behind a layer's attention, of the last layer without a product behind it; None where its parts are not those of
    :func:`minfer.decoder_block`, :func:`minfer.w4a16_decoder_block` or :func:`minfer.fp8_decoder_block`. exchange: of layers that are
    divided among ranks; without one there is no block of those."""
    if not isinstance(layer.mlp, Mlp) or layer.attention_output_norm is not None:
        return None
    output, first, down = layer.attention.output, layer.mlp.first, layer.mlp.down
    divided = isinstance(output, ReducedProjection)
    if isinstance(down, ReducedProjection) != divided or (divided and exchange is None):
        return None
    if divided:
        output, down = output.own, down.own
    products = [output, first, down]
    if following is not None:
        products.append(following.attention.qkv)
    found = _operator_of(products)
    if found is None or not first.gated or first.bias is not None:
        return None
    if down.gated or any(product.activation != "none" for product in products if product is not first):
        return None
    mlp_norm = layer.mlp_norm
    next_norm = mlp_norm if following is None else following.input_norm
    if mlp_norm.centered or next_norm.centered or (mlp_norm.eps, mlp_norm.weight_offset) != (next_norm.eps, next_norm.weight_offset):
        return None
    if is_dense(down) and not _is_worth_it(products):
        return None
    call, layers_call, parts, most_tokens, options = found
    options |= dict(eps=mlp_norm.eps, weight_offset=mlp_norm.weight_offset, activation=first.activation)
    return Block(call, layers_call, parts, products, mlp_norm, next_norm, most_tokens, options, exchange if divided else None)


def _is_worth_it(products: list[Projection]) -> bool:
    """Whether the block of 16-bit weights is one launch: of its operators, those that a norm and a product have together are faster."""
    weight = products[0].weight
    return not weight.is_cuda or _most_layers(_sizes(products), weight.dtype, "dense", -1, weight.device.index, is_batch_invariant()) > 0


def _operator_of(
    products: list[Projection],
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[str, ...], int, dict[str, Any]] | None:
    """The operators of weights of one format, the names of their tensors, their most tokens, and their options that say more of the
    weights."""
    ops = torch.ops.minfer
    if all(is_dense(product) for product in products):
        return decoder_block, ops._decoder_layers, ("weight",), MOST_TOKENS_OF_DENSE, {}
    if all(scaled_fp8(product) is not None for product in products):
        return fp8_decoder_block, ops._fp8_decoder_layers, ("weight", "scale"), MOST_TOKENS_OF_FP8, {}
    group_sizes = {packed_int4(product) for product in products}
    if len(group_sizes) != 1 or None in group_sizes:
        return None
    options = {"group_size": group_sizes.pop()}
    return w4a16_decoder_block, ops._w4a16_decoder_layers, ("qweight", "scales"), MOST_TOKENS_OF_INT4, options
