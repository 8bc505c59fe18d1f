"""Operators and models over several GPUs through ``torch.distributed``."""

from .expert_exchange import ExpertExchange
from .expert_parallel import expert_parallel_layer, expert_parallel_moe, local_experts
from .tensor_parallel import TensorParallel

__all__ = ["ExpertExchange", "TensorParallel", "expert_parallel_layer", "expert_parallel_moe", "local_experts"]
