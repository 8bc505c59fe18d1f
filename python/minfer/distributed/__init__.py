"""Operators over several GPUs through ``torch.distributed``."""

from .expert_parallel import expert_parallel_moe, local_experts

__all__ = ["expert_parallel_moe", "local_experts"]
