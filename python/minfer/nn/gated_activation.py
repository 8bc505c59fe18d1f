"""The activations of gated MLPs, which have no parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.fused import Codes, gelu_and_mul, silu_and_mul


class SwiGLU(torch.nn.Module):
    """:func:`minfer.silu_and_mul`: silu(gate) * up of rows that are a gate and then its up."""

    def forward(self, x: Tensor, *, quant: str | None = None, scale: Tensor | None = None) -> Tensor | Codes:
        return silu_and_mul(x, quant=quant, scale=scale)


class GeGLU(torch.nn.Module):
    """:func:`minfer.gelu_and_mul`: gelu(gate) * up of rows that are a gate and then its up.

    Args:
      approximate: "none", the gelu with erf, or "tanh".
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GeGLU: approximate must be none or tanh, got '{approximate}'")
        self.approximate = approximate

    def forward(self, x: Tensor, *, quant: str | None = None, scale: Tensor | None = None) -> Tensor | Codes:
        return gelu_and_mul(x, self.approximate, quant=quant, scale=scale)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
