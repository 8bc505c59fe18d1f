"""vLLM's custom ops by minfer's operators: on a GPU; elsewhere, and of what the operators do not take, they are vLLM's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import rotary_embedding as rotations
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from ...ops.fused import add_rms_norm, rms_norm, rope, silu_and_mul

_DTYPES = (torch.bfloat16, torch.float16)


def _normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
) -> Tensor | tuple[Tensor, Tensor]:
    """As vLLM's norms: with a residual the sum comes back beside the norm, in the residual's memory."""
    if residual is None:
        return rms_norm(x, weight, eps, weight_offset=weight_offset)
    return add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset), residual


class MinferRMSNorm(RMSNorm):
    """:func:`minfer.rms_norm` and :func:`minfer.add_rms_norm`."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight = self.weight.data if self.has_weight else None
        usual = self.variance_size_override is None and x.dtype in _DTYPES and (weight is None or weight.dtype == x.dtype)
        if not usual:
            return super().forward_cuda(x, residual)
        return _normalise(x, residual, weight, self.variance_epsilon, 0.0)


class MinferGemmaRMSNorm(GemmaRMSNorm):
    """The same of weights that are stored less 1."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if x.dtype not in _DTYPES or self.weight.dtype != x.dtype:
            return super().forward_cuda(x, residual)
        return _normalise(x, residual, self.weight.data, self.variance_epsilon, 1.0)


class MinferSiluAndMul(SiluAndMul):
    """:func:`minfer.silu_and_mul`."""

    def forward_cuda(self, x: Tensor) -> Tensor:
        return silu_and_mul(x) if x.dtype in _DTYPES else super().forward_cuda(x)


class _Rope:
    """:func:`minfer.rope`, in place, for vLLM's rotations that differ in their cosines and sines alone; these are float32 here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("cos_sin_float", self._compute_cos_sin_cache().float().contiguous(), persistent=False)

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if query.dtype not in _DTYPES:
            return super().forward_cuda(positions, query, key)
        heads = [None if x is None else x.view(positions.numel(), -1, self.head_size) for x in (query, key)]
        options = {"interleaved": not self.is_neox_style, "rotary_dim": self.rotary_dim}
        rope(*heads, self.cos_sin_float, positions.flatten(), **options)
        return query, key


_ROTATIONS = (
    rotations.RotaryEmbedding,
    rotations.DynamicNTKAlphaRotaryEmbedding,
    rotations.DynamicNTKScalingRotaryEmbedding,
    rotations.LinearScalingRotaryEmbedding,
    rotations.Llama3RotaryEmbedding,
    rotations.NTKScalingRotaryEmbedding,
    rotations.YaRNScalingRotaryEmbedding,
)

# By the name of vLLM's class.
LAYERS = {
    "RMSNorm": MinferRMSNorm,
    "GemmaRMSNorm": MinferGemmaRMSNorm,
    "SiluAndMul": MinferSiluAndMul,
    **{kind.__name__: type(f"Minfer{kind.__name__}", (_Rope, kind), {}) for kind in _ROTATIONS},
}
