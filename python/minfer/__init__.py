"""minfer: the operators an LLM inference stack is built on.

    import torch, minfer
    y = minfer.gemm(x, weight.t(), bias=bias, activation="silu")    # or torch.ops.minfer.gemm(...)

Loading registers ``torch.ops.minfer.*`` for CUDA (ahead-of-time kernels), CPU (ATen compositions) and meta tensors.
"""

from ._core.library import check_environment as _check_environment, load_library as _load_library

_check_environment()
_load_library(__path__)

# ruff: noqa: E402  what follows looks the operators up in the library
from . import distributed, nn, quantize, reference
from ._core import tracing as _tracing  # noqa: F401  registers its rules with torch
from ._core.registry import build_info, kernels
from .formats.gate_up import pack_gate_up, unpack_gate_up
from .ops.attention import attention, attention_paged, attention_varlen, merge_attention_states
from .ops.gemm import gemm, gemm_gated
from .ops.grouped_gemm import grouped_gemm, grouped_gemm_masked, moe_ffn
from .ops.grouped_quantized_gemm import grouped_w4a16_gemm, moe_ffn_w4a16
from .ops.kv_cache import KvCache, allocate_kv_cache, kv_cache_append
from .ops.moe_routing import moe_combine, moe_router, moe_router_gemm, moe_sort
from .ops.quantized_gemm import (
    w4a16_dequantize,
    w4a16_gemm,
    w4a16_gemm_gated,
    w4a16_pack,
    w8a16_dequantize,
    w8a16_gemm,
    w8a16_gemm_gated,
    w8a16_pack,
)
from .planning import tuned as _tuned
from .planning.plan import Plan, plan
from .reference import (  # noqa: F401
    attention as _a,
    grouped_gemm as _c,
    grouped_quantized_gemm as _e,
    kv_cache as _b,
    moe_routing as _d,
    quantized_gemm as _f,
)

__version__: str = build_info()["version"]
_tuned.load_at_first_use()

__all__ = [
    "KvCache",
    "Plan",
    "__version__",
    "allocate_kv_cache",
    "attention",
    "attention_paged",
    "attention_varlen",
    "build_info",
    "distributed",
    "gemm",
    "gemm_gated",
    "grouped_gemm",
    "grouped_gemm_masked",
    "grouped_w4a16_gemm",
    "kernels",
    "kv_cache_append",
    "merge_attention_states",
    "moe_combine",
    "moe_ffn",
    "moe_ffn_w4a16",
    "moe_router",
    "moe_router_gemm",
    "moe_sort",
    "nn",
    "pack_gate_up",
    "plan",
    "quantize",
    "reference",
    "unpack_gate_up",
    "w4a16_dequantize",
    "w4a16_gemm",
    "w4a16_gemm_gated",
    "w4a16_pack",
    "w8a16_dequantize",
    "w8a16_gemm",
    "w8a16_gemm_gated",
    "w8a16_pack",
]
