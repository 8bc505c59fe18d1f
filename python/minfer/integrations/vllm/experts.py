"""Experts of vLLM's mixture-of-experts layers by :func:`minfer.moe_ffn` and :func:`minfer.moe_ffn_fp8`.

vLLM has no list of experts' kernels that a plug-in could add to: the adapters put these in front of the Triton kernels, whose weights are
those of the checkpoint, as minfer's are. Tokens come as they are after vLLM's own exchange between ranks, with ids of all experts; those of
other ranks add nothing here. Experts of 4-bit weights are in :mod:`.packed_experts`.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils import quant_utils as keys

from ...ops.grouped_gemm import moe_ffn
from ...ops.grouped_scaled_gemm import moe_ffn_fp8
from .linear import why_not_here

_DTYPES = (torch.bfloat16, torch.float16)
# vLLM's name: minfer's activation, and where gates are among w13's rows.
ACTIVATIONS = {
    MoEActivation.SILU: ("silu", "halves"),
    MoEActivation.GELU: ("gelu", "halves"),
    MoEActivation.GELU_TANH: ("gelu_tanh", "halves"),
    MoEActivation.SWIGLUOAI: ("swigluoai", "alternating"),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: ("swigluoai", "halves"),
}
_SWIGLUOAI = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "swiglu_beta": 1.0}  # what minfer's has


class Experts(mk.FusedMoEExpertsModular):
    """What 16-bit and FP8 experts have in common."""

    schemes: ClassVar[tuple[tuple[object, object], ...]]
    hopper: ClassVar[bool]
    multiple: ClassVar[int]  # of hidden and intermediate sizes

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: keys.QuantKey | None,
        activation_key: keys.QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        able, reason = mk.FusedMoEExperts.is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)
        if not able:
            return able, reason
        sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        if any(size % cls.multiple for size in sizes):
            return False, f"kernel does not support sizes of {sizes}, which must be multiples of {cls.multiple}"
        if moe_config.in_dtype not in _DTYPES:
            return False, f"kernel does not support {moe_config.in_dtype}"
        kind, _ = ACTIVATIONS[moe_config.activation]
        for name, usual in _SWIGLUOAI.items():
            value = getattr(moe_config, name, None)
            if value is not None and (kind != "swigluoai" or value != usual):
                return False, f"kernel does not support {name} = {value} with {moe_config.activation}"
        return True, None

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @classmethod
    def _supports_current_device(cls) -> bool:
        return why_not_here(cls.hopper) is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @classmethod
    def _supports_quant_scheme(cls, weight_key: keys.QuantKey | None, activation_key: keys.QuantKey | None) -> bool:
        return (weight_key, activation_key) in cls.schemes

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not (moe_parallel_config.use_fi_nvl_two_sided_kernels or moe_parallel_config.use_fi_nvl_one_sided_kernels)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()  # the sum of a token's experts is in the operator

    def workspace_shapes(self, M: int, N: int, K: int, *_: object, **__: object) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """output [tokens, hidden] becomes the weighted sum of each token's experts that are here."""
        if expert_map is not None:
            topk_ids = torch.where(topk_ids >= 0, expert_map[topk_ids.long().clamp(min=0)], -1)
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        kind, layout = ACTIVATIONS[activation]
        options = {"activation": kind, "gate_layout": layout, "b13": self.w1_bias, "b2": self.w2_bias}
        if getattr(self, "post_gemm2_hook", None) is not None and topk_ids.numel() > 0:
            if apply_router_weight_on_input:
                raise ValueError("minfer's experts: a model that sums up experts itself weighs their outputs, not their inputs")
            self._leave_unsummed(output, hidden_states, w1, w2, topk_weights, topk_ids, options)
            return
        output.copy_(self._ffn(hidden_states, w1, w2, weights.float(), topk_ids.to(torch.int32), options))

    def _leave_unsummed(
        self, output: Tensor, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, options: dict[str, object]
    ) -> None:
        """The model's own function makes ``output`` of each pair's row, as if a pair were a token with one expert. ids: -1: not here."""
        from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput

        pairs = ids.reshape(-1, 1).to(torch.int32)
        ones = torch.ones(pairs.shape, dtype=torch.float32, device=x.device)
        rows = self._ffn(x.repeat_interleave(ids.shape[1], 0), w13, w2, ones, pairs, options)
        places = torch.arange(len(pairs), dtype=torch.int32, device=x.device).view(ids.shape)
        self.post_gemm2_hook(UnfinalizedMoEOutput(rows, weights, torch.where(ids >= 0, places, -1), route_major=True), output)

    @abc.abstractmethod
    def _ffn(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, options: dict[str, object]) -> Tensor:
        """The weighted sums by the operator for these weights; options: its keywords, which may be changed."""


class MinferExperts(Experts):
    """Weights of 16 bits."""

    schemes, hopper, multiple = ((None, None),), False, 8

    def _ffn(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, options: dict[str, object]) -> Tensor:
        return moe_ffn(x, w13, w2, weights, ids, **options)


class MinferFp8Experts(Experts):
    """e4m3 weights with scales of blocks, of rows, or of whole experts; activations with their own. The second product's activations are
    quantised in the first one's epilogue."""

    schemes, hopper, multiple = (
        (
            (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym),
            (keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym),
            (keys.kFp8StaticTensorSym, keys.kFp8DynamicTokenSym),
        ),
        True,
        16,
    )

    def _ffn(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, options: dict[str, object]) -> Tensor:
        rows = [weight.shape[1] for weight in (w13, w2)]
        scales = [
            scale.squeeze(-1) if scale.dim() == 3 and scale.shape[1:] == (count, 1) else scale
            for scale, count in zip((self.w1_scale, self.w2_scale), rows, strict=True)
        ]
        return moe_ffn_fp8(x, w13, w2, *scales, weights, ids, **options)
