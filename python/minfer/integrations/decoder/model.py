"""A decoder-only model over tokens that lie end to end: what an engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...distributed.tensor_parallel import TensorParallel, borders
from ...ops.fused import embedding
from .block import MOST_TOKENS, AttendsToOne, Block, Part, between, continues, launch, parts_of
from .layer import Attend, DecoderLayer, Pending
from .norm import Norm
from .projection import Projection


class DecoderModel:
    """Token embedding, layers, norm and head; the tensors are those of the model that it was made of.

    Args:
      embedding: [vocabulary, hidden], and embedding_scale: what rows are multiplied with, or None.
      position_embedding: [positions, hidden], added to tokens', or None (GPT-2).
      layers, norm: in order.
      head: from hidden to the vocabulary; logit_softcap: logits become cap * tanh(logits / cap), 0 is none.
      rotations: for each name that ``Attention.rotary`` has float32 [length, rotary_dim], cosines and then sines, as
        :func:`minfer.rope_cache` lays them out.
      max_positions: tokens of the longest sequence that the model was made for.
      vocabulary: of the whole head; None: of ``head``.
      parallel: the ranks that have a part of the layers, and of the vocabulary each, or None.
    """

    def __init__(
        self,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Projection,
        rotations: Mapping[str, Tensor],
        max_positions: int,
        *,
        embedding_scale: float | None = None,
        position_embedding: Tensor | None = None,
        logit_softcap: float = 0.0,
        vocabulary: int | None = None,
        parallel: TensorParallel | None = None,
    ):
        self.embedding, self.embedding_scale, self.position_embedding = embedding, embedding_scale, position_embedding
        self.layers, self.norm, self.head = list(layers), norm, head
        self.rotations, self.max_positions, self.logit_softcap = dict(rotations), max_positions, logit_softcap
        self.vocabulary, self.parallel = head.out_features if vocabulary is None else vocabulary, parallel
        self.layer_exchange = None
        if parallel is not None:
            self.layer_exchange = parallel.layer_exchange(embedding.shape[1], [parts_of(layer) for layer in self.layers])

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def hidden(self, ids: Tensor, positions: Tensor, attend: Sequence[Attend]) -> tuple[Tensor, Pending]:
        """int64 [tokens], int64 [tokens], and what attends in each layer -> [tokens, hidden], and what is still to be added to it, or None:
        together what the last norm is of."""
        x = embedding(ids, self.embedding, scale=self.embedding_scale)
        if self.position_embedding is not None:
            x = x + embedding(positions, self.position_embedding)
        tokens = x.shape[0]
        pending = qkv = None
        index = 0
        while index < len(self.layers):
            layer, own = self.layers[index], attend[index]
            if qkv is None:
                qkv = layer.in_front_of_attention(x, pending)
            if parts := self._launch_of(index, attend, tokens):
                qkv, pending = launch(parts, qkv, x, settled=index > 0), None
                index += len(parts)
                continue
            index += 1
            block = self._block_of(index - 1, tokens)
            if block is not None and not block.needs_attention:
                qkv, pending = block(own(layer.attention, qkv), x), None
                continue
            x, pending = layer.behind_attention(x, own(layer.attention, qkv))
            qkv = None
        return x, pending

    def _block_of(self, index: int, tokens: int) -> Block | None:
        following = self.layers[index + 1] if index + 1 < len(self.layers) else None
        block = between(self.layers[index], following, self.layer_exchange) if tokens <= MOST_TOKENS else None
        return block if block is not None and tokens <= block.most_tokens else None

    def _part_of(self, index: int, attend: Sequence[Attend], tokens: int) -> Part | None:
        """The layer as one of a launch."""
        attention, own = self.layers[index].attention, attend[index]
        block = self._block_of(index, tokens) if tokens == 1 and isinstance(own, AttendsToOne) else None
        step = None if block is None else own.one_token(attention)
        return Part(block, attention, step) if step is not None and block.includes(attention, step) else None

    def _launch_of(self, index: int, attend: Sequence[Attend], tokens: int) -> list[Part]:
        """The layers from one on that are one launch: as many as are alike, in launches of about as many each."""
        first = self._part_of(index, attend, tokens)
        if first is None:
            return []
        parts, most = [first], first.block.most_layers(first.attention, first.step)
        for behind in range(index + 1, len(self.layers) if most > 1 else 0):
            part = self._part_of(behind, attend, tokens)
            if part is None or not continues(part, first) or part.block.most_layers(part.attention, part.step) < 2:
                break
            parts.append(part)
        launches = -(-len(parts) // most)
        return parts[: -(-len(parts) // launches)]

    def logits(self, x: Tensor, pending: Pending = None) -> Tensor:
        """[rows, hidden] of :meth:`hidden`, which may be written -> float32 [rows, vocabulary]."""
        normed = self.norm(x) if pending is None else self.norm(pending, residual=x)
        logits = self.head(normed, out_dtype=torch.float32)
        if self.parallel is not None:
            parts = borders(self.vocabulary, self.parallel.ranks)
            logits = self.parallel.gather_columns(logits, [end - begin for begin, end in zip(parts, parts[1:], strict=False)])
        if self.logit_softcap:
            logits = logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits
