"""Normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.fused import Codes, add_rms_norm, layer_norm, rms_norm


class RMSNorm(torch.nn.Module):
    """:func:`minfer.rms_norm` with a weight; parameters and attributes are named as in Hugging Face's Llama.

    Args:
      hidden_size: the width of a row.
      eps: as in :func:`minfer.rms_norm`; the attribute is ``variance_epsilon``.
      weight_offset: 1.0 for Gemma's weights, which are stored less 1. The weight begins as what makes the factor 1.
      dtype, device: of the weight, as for any module. float16 or bfloat16 in a forward pass.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - weight_offset, dtype=dtype, device=device), requires_grad=False)
        self.variance_epsilon, self.weight_offset = eps, weight_offset

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        *,
        quant: str | None = None,
        scale: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> Tensor | Codes:
        """The norm of ``hidden_states``; with ``residual``, which is written, :func:`minfer.add_rms_norm` of both."""
        options = dict(weight_offset=self.weight_offset, quant=quant, scale=scale, norm=norm)
        if residual is None:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon, **options)
        return add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon, **options)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}{offset}"


class LayerNorm(torch.nn.Module):
    """:func:`minfer.layer_norm` over the last mode; parameters are named as torch's.

    Args:
      hidden_size: the width of a row.
      eps: as in :func:`minfer.layer_norm`.
      bias: whether there is one.
      dtype, device: of the parameters. float16 or bfloat16 in a forward pass.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"
