"""Experts of 4-bit codes (GPTQ, AWQ, compressed-tensors) in vLLM's mixture-of-experts layers, by :func:`minfer.moe_ffn_w4a16`.

vLLM's quantisation methods ask three functions: which backend a layer gets, what its tensors are made into when they are loaded, and the
kernel over them. The adapters let each of the three answer for the backend of this module, and otherwise as before.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.scalar_type import scalar_types

from ...formats.weight_formats import legal_group_size
from ...ops.grouped_quantized_gemm import moe_ffn_w4a16
from ...quantize import from_awq, from_compressed_tensors, stack_experts
from ...quantize.experts import W4Experts, in_blocks
from .experts import ACTIVATIONS, Experts


class _Backend:
    """Stands where vLLM has a member of its enumeration of backends, and equals none of them."""

    value = "MINFER"


BACKEND = _Backend()


class MinferPackedExperts(Experts):
    """int4 weights, with or without zero points, beside 16-bit activations. Their layer's tensors are what :func:`converted` makes."""

    hopper, multiple = True, 8

    @classmethod
    def _supports_quant_scheme(cls, weight_key: keys.QuantKey | None, activation_key: keys.QuantKey | None) -> bool:
        return weight_key is not None and weight_key.dtype in (scalar_types.uint4b8, scalar_types.uint4) and activation_key is None

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Experts, tokens, rows of w13, hidden, top_k: vLLM reads them from weights that are not packed."""
        return w1.shape[0], a1.shape[0], self.w1_scale.shape[-1], a1.shape[-1], topk_ids.shape[1]

    def _ffn(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, options: dict[str, Any]) -> Tensor:
        scales = self.w1_scale, self.w2_scale
        sizes = x.shape[-1], scales[0].shape[-1] // 2  # columns of w13, and of w2
        groups = [scale.shape[1] for scale in scales]
        # A weight whose columns are one group does not say how many there are in one.
        group_size = next((k // count for k, count in zip(sizes, groups, strict=True) if count > 1), -1)
        del options["gate_layout"]  # rows are in minfer's order
        first, down = (w13, scales[0], self.w1_zp), (w2, scales[1], self.w2_zp)
        return moe_ffn_w4a16(x, *first, *down, weights, ids, group_size=group_size, **options)


def _facts_of(quant_config: Any) -> tuple[int, int, bool] | None:
    """Bits, group size and whether there are zero points, of a checkpoint whose tensors :func:`converted` reads; else None."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig

    if isinstance(quant_config, AutoAWQConfig):
        return quant_config.weight_bits, quant_config.group_size, quant_config.zero_point
    if isinstance(quant_config, AutoGPTQConfig):
        # vLLM has no order of columns for experts, and of zero points the versions of the format differ.
        plain = quant_config.is_sym and not quant_config.desc_act
        return (quant_config.quant_type.size_bits, quant_config.group_size, False) if plain else None
    if isinstance(quant_config, QuantizationArgs):
        # By channel: vLLM's method has that for Marlin alone.
        plain = quant_config.strategy == QuantizationStrategy.GROUP and quant_config.actorder != "group"
        return (quant_config.num_bits, quant_config.group_size, not quant_config.symmetric) if plain else None
    return None


def why_not(config: FusedMoEConfig, weight_key: keys.QuantKey, quant_config: Any) -> str | None:
    """Why a layer's experts stay vLLM's, or None."""
    if config.moe_backend != "auto":
        return f"moe_backend is {config.moe_backend}"
    if envs.VLLM_MARLIN_INPUT_DTYPE is not None:
        return f"VLLM_MARLIN_INPUT_DTYPE asks Marlin for activations in {envs.VLLM_MARLIN_INPUT_DTYPE}"
    facts = _facts_of(quant_config)
    if facts is None or facts[0] != 4:
        return f"a checkpoint of {type(quant_config).__name__}"
    group_size = facts[1]
    if not legal_group_size("int4", group_size):
        return f"groups of {group_size}"
    sizes = config.hidden_dim, config.intermediate_size_per_partition
    if group_size > 0 and any(size % group_size for size in sizes):
        return f"sizes of {sizes}, which end within a group of {group_size}"
    if config.is_lora_enabled:
        return "LoRA"
    batched = config.moe_parallel_config.use_batched_activation_format
    form = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
    able, reason = MinferPackedExperts.is_supported_config(MinferPackedExperts, config, weight_key, None, form)
    return None if able else reason


def _stack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, awq: bool, group_size: int, dtype: torch.dtype, gate_layout: str | None
) -> W4Experts:
    """As vLLM has them: of AWQ's experts [k, n / 8] words, else [n, k / 8] words and scales and zeros likewise."""
    weights = []
    for expert in range(codes.shape[0]):
        own, scale = codes[expert], scales[expert]
        if awq:
            tensors = {"qweight": own, "scales": scale, "qzeros": _usual_zeros(scale) if zeros is None else zeros[expert]}
            weights.append(from_awq(tensors, group_size=group_size, dtype=dtype))
            continue
        shape = torch.tensor([own.shape[0], 8 * own.shape[1]], device=own.device)
        tensors = {"weight_packed": own, "weight_scale": scale, "weight_shape": shape}
        if zeros is not None:
            tensors["weight_zero_point"] = zeros[expert]
        weights.append(from_compressed_tensors(tensors, num_bits=4, group_size=group_size, dtype=dtype))
    return stack_experts(weights, gated=gate_layout is not None, gate_layout=gate_layout or "halves")


def _usual_zeros(scale: Tensor) -> Tensor:
    """Words of eight 8s, which AWQ's symmetric weights have."""
    return torch.full((scale.shape[0], scale.shape[1] // 8), -0x77777778, dtype=torch.int32, device=scale.device)


def converted(
    layer: torch.nn.Module,
    quant_config: Any,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_qzeros: Tensor | None = None,
    w2_qzeros: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """A layer's loaded tensors in minfer's form, in the order in which vLLM's methods take them back: both weights, scales and zero points,
    two scales of activations that there are not, and both biases."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

    _, group_size, has_zeros = _facts_of(quant_config)
    config = layer.moe_config
    _, gate_layout = ACTIVATIONS[config.activation]
    options = {"awq": isinstance(quant_config, AutoAWQConfig), "group_size": group_size, "dtype": config.in_dtype}
    zeros = (w13_qzeros, w2_qzeros) if has_zeros else (None, None)
    first = _stack(w13.data, w13_scale.data, zeros[0], gate_layout=gate_layout, **options)
    down = _stack(w2.data, w2_scale.data, zeros[1], gate_layout=None, **options)
    points = [_zeros_of(experts) if has_zeros else None for experts in (first, down)]
    if w13_bias is not None:
        w13_bias = in_blocks(w13_bias.data.to(config.in_dtype), 1, gate_layout)
    if w2_bias is not None:
        w2_bias = w2_bias.data.to(config.in_dtype)
    return first.qweight, down.qweight, first.scales, down.scales, *points, None, None, w13_bias, w2_bias


def _zeros_of(experts: W4Experts) -> Tensor:
    """Also where all of them are 8, which the loaders leave out: vLLM's methods want tensors."""
    return torch.full_like(experts.scales, 8) if experts.zeros is None else experts.zeros


def kernel_of(moe_quant_config: Any, moe_config: FusedMoEConfig, routing_tables: Any) -> mk.FusedMoEKernel:
    """vLLM's modular kernel around these experts."""
    prepare = maybe_make_prepare_finalize(
        moe=moe_config,
        quant_config=moe_quant_config,
        routing_tables=routing_tables,
        allow_new_interface=True,
        use_monolithic=False,
    )
    return mk.FusedMoEKernel(prepare, MinferPackedExperts(moe_config=moe_config, quant_config=moe_quant_config))
