"""Weights for the W4A16 and W8A16 operators: quantised here, or loaded from checkpoints of other tools, bit for bit.

weight = minfer.quantize.quantize_w4(linear.weight)
weight = minfer.quantize.from_gptq({"qweight": ..., "qzeros": ..., "scales": ..., "g_idx": ...}, group_size=128)
y = weight.gemm(x)

experts = minfer.quantize.quantize_w4_experts(w13, gated=True)    # of a mixture of experts; or stack_experts, from_gpt_oss
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
from .storage import from_safetensors, to_safetensors
from .weight import W4Weight, W8Weight

__all__ = [
    "W4Experts",
    "W4Weight",
    "W8Weight",
    "from_awq",
    "from_bitsandbytes",
    "from_compressed_tensors",
    "from_gpt_oss",
    "from_gptq",
    "from_mxfp4",
    "from_safetensors",
    "quantize_w4",
    "quantize_w4_experts",
    "quantize_w8",
    "stack_experts",
    "to_safetensors",
]
