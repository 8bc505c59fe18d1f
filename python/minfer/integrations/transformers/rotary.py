"""Cosines and sines of a call's positions, in float32, in the place of the model's own, which are rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rotations(NamedTuple):
    """table: float32 [rows, rotary_dim], cosines and then sines; positions: int64 [batch * tokens], rows of the table."""

    table: Tensor
    positions: Tensor


_UPDATED = ("dynamic", "longrope")  # frequencies follow the longest sequence so far


def rotations_of(position_embeddings: Rotations | tuple[Tensor, Tensor], batch: int, rotary_dim: int) -> Rotations:
    """What the model hands to its layers: :class:`Rotations`, or cosines and sines, [1 or batch, tokens, rotary_dim or half of it] each."""
    if isinstance(position_embeddings, Rotations):
        return position_embeddings
    cos, sin = (x[..., : rotary_dim // 2] for x in position_embeddings)
    return Rotations(torch.cat([cos, sin], -1).float().flatten(0, -2), _rows(cos.shape[0], cos.shape[1], batch, cos.device))


def _rows(rows: int, tokens: int, batch: int, device: torch.device) -> Tensor:
    """Rows of a table [rows * tokens] for batch * tokens tokens."""
    index = torch.arange(rows * tokens, device=device)
    return index if rows == batch else index.expand(batch, tokens).reshape(-1)


def rotary_forward(module: torch.nn.Module, original: Callable[..., Any]) -> Callable[..., Rotations]:
    """A forward for a model's rotary embedding whose result :func:`rotations_of` takes: (x, position_ids, layer_type=None)."""

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotations:
        more = () if layer_type is None else (layer_type,)
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if any(name in kind for name in _UPDATED):
            original(x, position_ids, *more)
        prefix = "" if layer_type is None else f"{layer_type}_"
        frequencies, factor = getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")
        with torch.no_grad():
            angles = position_ids.to(x.device)[..., None].float() * frequencies.to(x.device, torch.float32)
            table = torch.cat([angles.cos() * factor, angles.sin() * factor], -1).flatten(0, -2)
        return Rotations(table, _rows(*position_ids.shape, x.shape[0], x.device))

    return forward
