"""Attention of a layer: the projections, and what an engine has to know of what lies between them."""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import Norm
from .projection import Projection


class Attention(torch.nn.Module):
    """q, k and v of one projection, attention by the engine, and the projection of its output.

    Args:
      qkv: [tokens, hidden] -> [tokens, (heads + 2 * heads_kv) * head_dim]: queries' heads, then keys', then values'.
      output: [tokens, heads * head_dim] -> [tokens, hidden].
      heads, heads_kv, head_dim: heads is a multiple of heads_kv.
      scale: of the scores.
      window: how many keys before its own a query sees at most, or -1: all (a Hugging Face ``sliding_window`` less 1).
      softcap: as in :func:`minfer.attention`, 0 is none.
      sinks: [heads], or None, as there.
      q_norm, k_norm: RMS norms of heads, or None; both or neither, with one eps and one weight_offset.
      rotary: which of the engine's tables of rotations, or None: positions are not rotated into q and k.
      rotary_dim: elements of a head that are rotated, or None: all.
      causal: whether queries see no later keys.
    """

    def __init__(
        self,
        qkv: Projection,
        output: Projection,
        *,
        heads: int,
        heads_kv: int,
        head_dim: int,
        scale: float,
        window: int = -1,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        rotary: str | None = "full_attention",
        rotary_dim: int | None = None,
        causal: bool = True,
    ):
        super().__init__()
        wanted = (heads + 2 * heads_kv) * head_dim
        if qkv.out_features != wanted:
            raise ValueError(
                f"Attention: qkv must have {wanted} rows, of {heads} + 2 * {heads_kv} heads of {head_dim}, got {qkv.out_features}"
            )
        if (q_norm is None) != (k_norm is None):
            raise ValueError("Attention: q and k must both have a norm, or neither")
        if q_norm is not None and (q_norm.eps, q_norm.weight_offset) != (k_norm.eps, k_norm.weight_offset):
            raise ValueError("Attention: the norms of q and k must have one eps and one weight_offset")
        self.qkv, self.output, self.q_norm, self.k_norm = qkv, output, q_norm, k_norm
        self.heads, self.heads_kv, self.head_dim, self.scale = heads, heads_kv, head_dim, scale
        self.window, self.softcap, self.rotary, self.rotary_dim, self.causal = window, softcap, rotary, rotary_dim, causal
        self.register_buffer("sinks", sinks, persistent=False)

    def scores(self) -> dict:
        """What the operators of attention take of the scores, by keyword."""
        return {"scale": self.scale, "window_left": self.window, "softcap": self.softcap, "sinks": self.sinks}

    def extra_repr(self) -> str:
        more = [f"heads={self.heads}, heads_kv={self.heads_kv}, head_dim={self.head_dim}, scale={self.scale:.4g}"]
        for name, usual in (("window", -1), ("softcap", 0.0), ("rotary", "full_attention"), ("rotary_dim", None), ("causal", True)):
            if getattr(self, name) != usual:
                more.append(f"{name}={getattr(self, name)}")
        return ", ".join(more) + (", sinks" if self.sinks is not None else "")
