"""A decoder layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .attention import Attention
from .mlp import Experts, Mlp
from .norm import Norm
from .partial_sum import PartialSum
from .projection import Projection

Attend = Callable[[Attention, Tensor], Tensor]
"""What an engine does between the projections: (attention, qkv [tokens, (heads + 2 * heads_kv) * head_dim]) -> [tokens, heads * head_dim].
It normalises and rotates q and k as ``attention`` says, keeps k and v, and attends. It may write qkv."""

Pending = Tensor | PartialSum | None
"""What a layer has left to be added by the norm behind it, [tokens, hidden_size]: a tensor, or a sum over the ranks that is still to be
made, too; or nothing."""


class DecoderLayer(torch.nn.Module):
    """x + attention(norm(x)), and then the same of the MLP or the experts.

    Args:
      attention, mlp: of the layer.
      input_norm: in front of attention. mlp_norm: in front of the MLP.
      attention_output_norm, mlp_output_norm: of the blocks' outputs before they are added (Gemma 2 and 3), both or neither.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: Mlp | Experts,
        input_norm: Norm,
        mlp_norm: Norm,
        attention_output_norm: Norm | None = None,
        mlp_output_norm: Norm | None = None,
    ):
        super().__init__()
        if (attention_output_norm is None) != (mlp_output_norm is None):
            raise ValueError("DecoderLayer: both blocks have a norm of their output, or neither")
        self.attention, self.mlp = attention, mlp
        self.input_norm, self.mlp_norm = input_norm, mlp_norm
        self.attention_output_norm, self.mlp_output_norm = attention_output_norm, mlp_output_norm

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x: [tokens, hidden_size], float16 or bfloat16; it is not written. Returns the same of the next layer."""
        attention, mlp = self.attention, self.mlp
        y = attend(attention, attention.qkv.after_norm(x, self.input_norm))
        if self.attention_output_norm is not None:
            x = x + self.attention_output_norm(attention.output(y))
            return x + self.mlp_output_norm(self._block(x))
        x = attention.output(y, residual=x)
        if isinstance(mlp, Mlp):
            return mlp.down(mlp.first.after_norm(x, self.mlp_norm), residual=x)
        return x + self._block(x)

    def _block(self, x: Tensor) -> Tensor:
        if isinstance(self.mlp, Mlp):
            return self.mlp.down(self.mlp.first.after_norm(x, self.mlp_norm))
        return self.mlp(self.mlp_norm(x))

    def step(self, x: Tensor, pending: Pending, attend: Attend) -> tuple[Tensor, Pending]:
        """forward of x + pending, for engines: additions are left to the norms behind them.

        Args:
          x: [tokens, hidden_size], which may be written.
          pending: what the layer in front has left to add.

        Returns:
          x and pending of the next layer.
        """
        return self.behind_attention(x, attend(self.attention, self.in_front_of_attention(x, pending)))

    def in_front_of_attention(self, x: Tensor, pending: Pending) -> Tensor:
        """The first part of :meth:`step`: what attention takes. x becomes x + pending."""
        if pending is None:
            return self.attention.qkv.after_norm(x, self.input_norm)
        return self.attention.qkv.after_norm(pending, self.input_norm, residual=x)

    def behind_attention(self, x: Tensor, y: Tensor) -> tuple[Tensor, Pending]:
        """The last part of :meth:`step`: of attention's output y, [tokens, heads * head_dim]."""
        attention, mlp = self.attention, self.mlp
        if self.attention_output_norm is None:
            x, pending = self._added(x, attention.output, y)
        else:
            pending = self.attention_output_norm(attention.output(y))
        if not isinstance(mlp, Mlp):
            y = self.mlp_norm(x) if pending is None else self.mlp_norm(pending, residual=x)
            part = mlp.partial_sum(y)
            y = mlp(y) if part is None else part
        else:
            if pending is None:
                y = mlp.first.after_norm(x, self.mlp_norm)
            else:
                y = mlp.first.after_norm(pending, self.mlp_norm, residual=x)
            if self.mlp_output_norm is None:
                return self._added(x, mlp.down, y)
            y = mlp.down(y)
        return x, y if self.mlp_output_norm is None else self.mlp_output_norm(y)

    def _added(self, x: Tensor, projection: Projection, y: Tensor) -> tuple[Tensor, Pending]:
        """x + projection(y): added in the product's epilogue, or left to an RMS norm where that also makes the sum over the ranks."""
        part = None if self.mlp_norm.centered else projection.partial_sum(y)
        return (projection(y, residual=x), None) if part is None else (x, part)
