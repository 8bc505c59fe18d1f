"""How vLLM 0.33 is hooked into: where 0.32 is.

What is new there and concerns the modules beside this one: a model may take the sum over a token's experts into its own hands
(``post_gemm2_hook``, which :mod:`.experts` calls), and in the batch-invariant mode compressed-tensors' W4A16 layers choose no kernel, which
leaves them to vLLM.
"""

from __future__ import annotations

from .v0_32 import follow_mode, register_attention, register_experts, register_layers, register_linear

__all__ = ["follow_mode", "register_attention", "register_experts", "register_layers", "register_linear"]
