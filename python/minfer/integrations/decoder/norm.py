"""The norm in front of a projection, behind a block, or of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.fused import Codes, add_rms_norm, layer_norm, quantize_fp8, quantize_int8, rms_norm
from .partial_sum import PartialSum, summed


class Norm(torch.nn.Module):
    """RMS norm, or layer norm where ``centered``, of the last mode.

    Args:
      weight: [width], the activations' dtype. The tensor is shared, not copied.
      eps: as in :func:`minfer.rms_norm`.
      weight_offset: 1.0 for Gemma's weights.
      bias: [width] or None, of layer norms alone.
      centered: whether it is a layer norm.
    """

    def __init__(self, weight: Tensor, eps: float, *, weight_offset: float = 0.0, bias: Tensor | None = None, centered: bool = False):
        super().__init__()
        if (bias is not None or weight_offset != 0.0) and (bias is not None) != centered:
            raise ValueError("Norm: an RMS norm has no bias, and a layer norm has no weight_offset")
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.eps, self.weight_offset, self.centered = eps, weight_offset, centered

    def forward(self, x: Tensor | PartialSum, residual: Tensor | None = None) -> Tensor:
        """The norm of x; or of residual += x, which is written. A sum over the ranks is made in the same launch where that is possible."""
        if isinstance(x, PartialSum) and not self.centered:
            return x.parallel.all_reduce_rms_norm(x.own, residual, self.weight, self.eps, self.weight_offset)
        x = summed(x)
        if self.centered:
            x = x if residual is None else residual.add_(x)
            return layer_norm(x, self.weight, self.bias, self.eps)
        if residual is None:
            return rms_norm(x, self.weight, self.eps, weight_offset=self.weight_offset)
        return add_rms_norm(x, residual, self.weight, self.eps, weight_offset=self.weight_offset)

    def quantized(self, x: Tensor | PartialSum, quant: str, scale: Tensor | None, residual: Tensor | None = None) -> Codes:
        """forward in 8-bit codes, ``quant`` and ``scale`` as in :func:`minfer.rms_norm`; of a layer norm in two launches, and behind a
        launch for a sum over the ranks."""
        x = summed(x)
        if not self.centered:
            options = dict(weight_offset=self.weight_offset, quant=quant, scale=scale)
            if residual is None:
                return rms_norm(x, self.weight, self.eps, **options)
            return add_rms_norm(x, residual, self.weight, self.eps, **options)
        y = self(x, residual)
        return quantize_int8(y) if quant == "int8_token" else quantize_fp8(y, quant.removeprefix("fp8_"), scale)

    def extra_repr(self) -> str:
        kind = "layer" if self.centered else "rms"
        return f"{kind}, {self.weight.shape[0]}, eps={self.eps}" + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")
