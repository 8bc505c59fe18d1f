"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.rope import Scaling, rope_cache
from ..ops.fused import rope


class RotaryEmbedding(torch.nn.Module):
    """A table of rotations, :func:`minfer.rope_cache`, and :func:`minfer.rope` by it.

    Args:
      dim: elements of a head that are rotated, even.
      max_position_embeddings: positions of the table.
      base: theta.
      scaling: as in :func:`minfer.rope_cache`, ``config.rope_scaling`` for instance.
      interleaved: as in :func:`minfer.rope`.
      device: of the table, which is a buffer that is not saved; it stays float32 whatever the module is converted to.
    """

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000.0,
        scaling: Scaling | None = None,
        *,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.register_buffer("cos_sin", rope_cache(base, dim, max_position_embeddings, scaling, device), persistent=False)
        self.interleaved = interleaved

    def _apply(self, fn, recurse: bool = True):
        """Moves the table, and keeps its type: it would lose positions in 16 bits."""
        table = self.cos_sin
        super()._apply(fn, recurse)
        if self.cos_sin.dtype != table.dtype:
            self.cos_sin = table.to(self.cos_sin.device)
        return self

    def forward(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rotates q and k in place, and returns them.

        Args:
          q: [..., heads, head_dim], views as in :func:`minfer.rope` once all modes but the last two are one.
          k: [..., heads_kv, head_dim], or None.
          positions: int64 or int32, the shape of q without its last two modes.
        """
        tokens = positions.numel()
        rope(
            q.view(tokens, *q.shape[-2:]),
            None if k is None else k.view(tokens, *k.shape[-2:]),
            self.cos_sin,
            positions.reshape(-1),
            interleaved=self.interleaved,
        )
        return q, k

    def extra_repr(self) -> str:
        length, dim = self.cos_sin.shape
        return f"{dim}, max_position_embeddings={length}, interleaved={self.interleaved}"
