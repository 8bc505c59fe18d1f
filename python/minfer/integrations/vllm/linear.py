"""vLLM's linear layers by minfer's products: kernels in the form that vLLM chooses from.

Each says whether it applies to a layer (``can_implement``), takes the loaded weights over (``process_weights_after_loading``), and
multiplies (``apply_weights``). Weights of 4 and 8 bits beside 16-bit activations are packed anew, in place of the loaded ones, in a module
``minfer`` of the layer. Nothing writes a served model's weights, so that kernels read them before their predecessors have finished.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from ..._core.registry import build_info
from ...formats.weight_formats import legal_group_size
from ...nn import Int8Linear, W4Linear, W8Linear
from ...ops.fused import quantize_fp8
from ...ops.scaled_gemm import gemm_fp8
from ...quantize import from_compressed_tensors
from ...quantize.scaled_weight import Int8Weight, aligned_rows, bias_with_zero

_DTYPES = (torch.bfloat16, torch.float16)
_BLOCK = (128, 128)
_Answer = tuple[bool, str | None]


@functools.cache
def why_not_here(hopper: bool = False) -> str | None:
    """Why no kernel runs on the present device, or None. On a CPU there is the reference. hopper: kernels of compute capability 9.0 are
    asked for."""
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return "minfer's kernels are for CUDA"
    capability = torch.cuda.get_device_capability()
    archs = [arch for arch in build_info()["archs"].split(";") if arch]
    exact = capability == (9, 0) and "90a" in archs
    if hopper and not exact:
        return "these kernels are for compute capability 9.0"
    portable = [int(arch.rstrip("af")) // 10 for arch in archs if not arch.endswith("a")]
    if not exact and capability[0] not in portable:
        major, minor = capability
        return f"this build of minfer has kernels for {', '.join(archs) or 'no GPU'}, not for compute capability {major}.{minor}"
    return None


def _answer(*reasons: str | None) -> _Answer:
    """What can_implement says: the first reason that there is."""
    reason = next((x for x in reasons if x is not None), None)
    return reason is None, reason


def _drop(layer: torch.nn.Module, *names: str | None) -> None:
    """Parameters that nobody reads any more."""
    for name in names:
        if name is not None and name in layer._parameters:
            setattr(layer, name, None)


class MinferPackedLinearKernel(MPLinearKernel):
    """Weights of 4 or 8 bits, with or without zero points, beside 16-bit activations: GPTQ, AWQ, compressed-tensors."""

    BITS = {scalar_types.uint4b8: 4, scalar_types.uint8b128: 8, scalar_types.uint4: 4, scalar_types.uint8: 8}

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> _Answer:
        k, n = c.partition_weight_shape
        whole_group = c.group_size == -1 or c.group_size >= c.full_weight_shape[0]
        bits = cls.BITS.get(c.weight_type)
        return _answer(
            why_not_here(),
            None if bits else f"weights of type {c.weight_type}",
            None if c.zero_points == (not c.weight_type.has_bias()) else "a bias of codes beside zero points",
            None if c.act_type in _DTYPES else f"activations of type {c.act_type}",
            None if c.out_type in (None, c.act_type) else f"an output of type {c.out_type}",
            None if legal_group_size("int4", c.group_size) or whole_group else f"groups of {c.group_size}",
            None if n % 8 == 0 and k % 8 == 0 else f"a weight of {n} x {k}: both must be multiples of 8",
            None if whole_group or k % c.group_size == 0 else f"{k} columns, which end within a group of {c.group_size}",
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        c = self.config
        k, n = c.partition_weight_shape
        words, scales, zeros = self._get_weight_params(layer)
        permute_param_layout_(words, input_dim=1, output_dim=0, packed_dim=1)
        permute_param_layout_(scales, input_dim=1, output_dim=0)
        tensors = {
            "weight_packed": words.data.contiguous(),
            "weight_scale": scales.data,
            "weight_shape": torch.tensor([n, k], device=words.device),
        }
        if c.zero_points:
            permute_param_layout_(zeros, input_dim=1, output_dim=0, packed_dim=0)
            tensors["weight_zero_point"] = zeros.data.contiguous()
        group_size = -1 if scales.shape[1] == 1 else c.group_size
        bits = self.BITS[c.weight_type]
        weight = from_compressed_tensors(tensors, num_bits=bits, group_size=group_size, dtype=c.act_type)
        _drop(layer, self.w_q_name, self.w_s_name, self.w_zp_name)
        layer.minfer = (W4Linear if bits == 4 else W8Linear).from_weight(weight)
        layer.minfer.constant_weights = True

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = layer.minfer(x)
        return y if bias is None else y + bias


class _Quantizer:
    """x [tokens, k] as e4m3 codes and their scales, in place of vLLM's own; of what the operator does not have, vLLM's."""

    def __init__(self, own: Any, mode: str, static: bool):
        self._own, self._mode, self._usual = own, mode, static == (mode == "tensor")

    def __call__(self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
        if not self._usual or scale_ub is not None or x.dtype not in _DTYPES:
            return self._own(x, scale, scale_ub, **more)
        return quantize_fp8(x, self._mode, None if scale is None else scale.float().reshape(1))


class MinferFp8LinearKernel(FP8ScaledMMLinearKernel):
    """e4m3 weights and activations, each with one scale or one for each row."""

    def __init__(self, c: FP8ScaledMMLinearLayerConfig, layer_param_names: Sequence[str]) -> None:
        super().__init__(c, layer_param_names)
        of_tokens = c.activation_quant_key.scale
        self.quant_fp8 = _Quantizer(self.quant_fp8, "tensor" if of_tokens.group_shape.is_per_tensor() else "token", of_tokens.static)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> _Answer:
        return _answer(why_not_here(True))

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> _Answer:
        n, k = c.weight_shape
        of_weight, of_tokens = c.weight_quant_key.scale.group_shape, c.activation_quant_key.scale.group_shape
        return _answer(
            None if not of_weight.is_per_group() and of_weight.col in (-1, 1) else f"weight scales by {of_weight}",
            None if of_tokens.is_per_tensor() or of_tokens.is_per_token() else f"activation scales by {of_tokens}",
            None if c.out_dtype in _DTYPES else f"an output of type {c.out_dtype}",
            None if n % 8 == 0 and k % 16 == 0 else f"a weight of {n} x {k}: multiples of 8 and 16 are needed",
        )

    def apply_scaled_mm(
        self, *, A: Tensor, B: Tensor, out_dtype: torch.dtype, As: Tensor, Bs: Tensor, bias: Tensor | None, output_shape: list
    ) -> Tensor:
        scales = (As.float().reshape(-1), Bs.float().reshape(-1))
        return gemm_fp8(A, B, *scales, bias=bias, out_dtype=out_dtype, constant_weights=True).view(output_shape)


class MinferFp8BlockLinearKernel(Fp8BlockScaledMMLinearKernel):
    """e4m3 weights with scales of blocks of 128 x 128, activations with those of 128 of a token: DeepSeek, Qwen3."""

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        self.quant_fp8 = _Quantizer(self.quant_fp8, "block128", False)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> _Answer:
        return _answer(why_not_here(True))

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> _Answer:
        n, k = config.weight_shape
        of_weight, of_tokens = config.weight_quant_key.scale.group_shape, config.activation_quant_key.scale
        return _answer(
            super().can_implement(config)[1],
            None if tuple(of_weight) == _BLOCK else f"weight scales by {of_weight}",
            None if tuple(of_tokens.group_shape) == (1, 128) else f"activation scales by {of_tokens.group_shape}",
            None if config.out_dtype in _DTYPES else f"an output of type {config.out_dtype}",
            None if n % 8 == 0 and k % 16 == 0 else f"a weight of {n} x {k}: multiples of 8 and 16 are needed",
        )

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        return gemm_fp8(A, B.t(), As, Bs, out_dtype=self.config.out_dtype, constant_weights=True)


class MinferInt8LinearKernel(Int8ScaledMMLinearKernel):
    """int8 weights and activations: tokens with a scale each, or all with one and with a zero point if there is one."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> _Answer:
        return _answer(why_not_here(True))

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> _Answer:
        return _answer(None if c.input_symmetric or c.is_static_input_scheme else "zero points of each token")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scale, input_scale, input_zero, _ = self._get_layer_params(layer)
        codes, scale = aligned_rows(weight.data), scale.data.float().reshape(-1)
        if scale.numel() == len(layer.logical_widths) > 1:  # of each weight that was joined
            scale = scale.repeat_interleave(torch.tensor(layer.logical_widths, device=scale.device))
        bias = getattr(layer, "bias", None)
        bias = None if bias is None or getattr(layer, "skip_bias_add", False) else bias.data
        self._has_bias = bias is not None
        zero = None
        if not self.config.is_static_input_scheme:
            input_scale = None
        elif self.config.input_symmetric:
            input_scale = input_scale.data.float().max().reshape(1)
        else:
            input_scale, number = _joined_range(input_scale.data.float(), input_zero.data)
            if number:
                bias = bias_with_zero(codes, scale, input_scale, number, bias)
                zero = torch.full((1,), number, dtype=torch.int8, device=codes.device)
        _drop(layer, *self.layer_param_names)
        layer.minfer = Int8Linear.from_weight(Int8Weight(codes, scale, input_scale, bias, input_zero=zero))
        layer.minfer.constant_weights = True

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = layer.minfer(x)
        return y if bias is None or self._has_bias else y + bias


def _joined_range(scales: Tensor, zeros: Tensor) -> tuple[Tensor, int]:
    """One scale [1] and zero point for what several of them reach."""
    zeros = zeros.float()
    high, low = (scales * (127 - zeros)).max(), (scales * (-128 - zeros)).min()
    scale = (high - low) / 255
    return scale.reshape(1), int((-128 - low / scale).round().clamp(-128, 127))
