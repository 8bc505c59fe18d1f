"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.fused import embedding


class Embedding(torch.nn.Module):
    """:func:`minfer.embedding` of a table; the parameter is named as torch's.

    Args:
      num_embeddings: rows of the table.
      embedding_dim: its width.
      scale: what rows are multiplied with: Gemma's is the square root of the width. None: rows are copied.
      dtype, device: of the table, which begins with random numbers, as torch's does.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        table = torch.empty(num_embeddings, embedding_dim, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(torch.nn.init.normal_(table), requires_grad=False)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight, scale=self.scale)

    def extra_repr(self) -> str:
        scale = f", scale={self.scale}" if self.scale is not None else ""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}{scale}"
