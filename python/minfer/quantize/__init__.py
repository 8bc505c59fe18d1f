"""Weights for the W4A16 and W8A16 operators, and for products of 8-bit operands (W8A8): quantised here, or loaded from checkpoints of other
tools, bit for bit.

weight = minfer.quantize.quantize_w4(linear.weight)
weight = minfer.quantize.from_gptq({"qweight": ..., "qzeros": ..., "scales": ..., "g_idx": ...}, group_size=128)
y = weight.gemm(x)

weight = minfer.quantize.from_fp8({"weight": ..., "weight_scale_inv": ...})       # activations in e4m3 too; or from_int8
y = weight.gemm(x)

experts = minfer.quantize.quantize_w4_experts(w13, gated=True)    # of a mixture of experts; or stack_experts, from_gpt_oss
experts = minfer.quantize.quantize_fp8_experts(w13, gated=True)   # activations in e4m3 too; or stack_scaled_experts
"""

from .checkpoints import (
    from_awq,
    from_bitsandbytes,
    from_compressed_tensors,
    from_gptq,
    from_mxfp4,
)
from .experts import W4Experts, from_gpt_oss, quantize_w4_experts, stack_experts
from .round_to_nearest import quantize_w4, quantize_w8
from .scaled_checkpoints import from_fp8, from_int8
from .scaled_experts import ScaledExperts, quantize_fp8_experts, quantize_int8_experts, stack_scaled_experts
from .scaled_weight import Fp8Weight, Int8Weight, gate_up_weight, quantize_fp8_weight, quantize_int8_weight
from .smooth import migrate_scales, smoothquant_scales
from .storage import from_safetensors, to_safetensors
from .weight import W4Weight, W8Weight

__all__ = [
    "Fp8Weight",
    "Int8Weight",
    "ScaledExperts",
    "W4Experts",
    "W4Weight",
    "W8Weight",
    "from_awq",
    "from_bitsandbytes",
    "from_compressed_tensors",
    "from_fp8",
    "from_gpt_oss",
    "from_gptq",
    "from_int8",
    "from_mxfp4",
    "from_safetensors",
    "gate_up_weight",
    "migrate_scales",
    "quantize_fp8_experts",
    "quantize_fp8_weight",
    "quantize_int8_experts",
    "quantize_int8_weight",
    "quantize_w4",
    "quantize_w4_experts",
    "quantize_w8",
    "smoothquant_scales",
    "stack_experts",
    "stack_scaled_experts",
    "to_safetensors",
]
