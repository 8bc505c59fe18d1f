"""An optimised model as :class:`minfer.integrations.decoder.model.DecoderModel`, for engines that are not transformers'."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoder.model import DecoderModel
from ..decoder.projection import projection_of
from ..decoder.weights import Dense
from .modules import norm_weight
from .optimize import OptimizedModel


def decoder_model(handle: OptimizedModel, max_length: int | None = None) -> DecoderModel:
    """The decoder of an optimised model, sharing its tensors.

    Args:
      handle: of :func:`minfer.integrations.transformers.optimize`, with ``fuse``.
      max_length: tokens of the longest sequence, for which tables of rotations are made; frequencies that follow the length ("longrope",
        "dynamic") are those of that length. None: the model's own.

    Raises:
      ValueError: the model has layers that were not taken over, or is no decoder of text alone; the message says which and why.
    """
    model, config = handle.model, handle.model.config.get_text_config(decoder=True)
    if not handle.layers or any(layer is None for layer in handle.layers):
        raise ValueError(f"generate: {type(model).__name__} has layers that minfer does not run as wholes:\n{handle}")
    if handle.norm is None:
        raise ValueError(f"generate: {type(model).__name__} has a norm behind its layers that minfer does not read:\n{handle}")
    devices = {x.device for x in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        raise ValueError(f"generate: the model must be on one device, is on {', '.join(sorted(map(str, devices)))}")
    head, tokens = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        raise ValueError(f"generate: {type(model).__name__} has no head")
    length, parallel = max_length or config.max_position_embeddings, handle.parallel
    projection, vocabulary = handle.head, head.out_features
    if projection is None:
        rows = slice(None) if parallel is None else slice(*parallel.part(vocabulary))
        bias = None if head.bias is None else norm_weight(head.bias, model.dtype)[rows]
        projection = projection_of(Dense(head.weight.detach()[rows], bias))
    scale = getattr(tokens, "embed_scale", None)
    positions = getattr(handle.base, "wpe", None)
    return DecoderModel(
        tokens.weight.detach(),
        handle.layers,
        handle.norm,
        projection,
        _rotations(handle.base, length),
        config.max_position_embeddings,
        embedding_scale=None if scale is None else float(scale.to(tokens.weight.dtype)),
        position_embedding=None if positions is None else positions.weight.detach(),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        vocabulary=vocabulary,
        parallel=parallel,
    )


def _rotations(base: torch.nn.Module, length: int) -> dict[str, Tensor]:
    """Tables by what the model's own rotary embedding computes for a sequence of that length."""
    module = getattr(base, "rotary_emb", None)
    if module is None:
        return {}
    device = next(base.parameters()).device
    positions, like = torch.arange(length, device=device)[None], torch.empty(1, 1, 1, device=device)
    if isinstance(module.rope_type, dict):
        return {kind: module.forward(like, positions, kind).table for kind in module.rope_type}
    table = module.forward(like, positions).table
    return {"full_attention": table, "sliding_attention": table}
