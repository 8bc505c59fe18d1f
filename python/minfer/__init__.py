"""minfer: the operators an LLM inference stack is built on.

    import torch, minfer
    y = minfer.gemm(x, weight.t(), bias=bias, activation="silu")    # or torch.ops.minfer.gemm(...)

Loading registers ``torch.ops.minfer.*`` for CUDA (ahead-of-time kernels), CPU (ATen compositions) and meta tensors.
"""

import os as _os
from pathlib import Path as _Path

import torch as _torch


def _check_environment() -> None:
    """The library reads these once and takes what it does not know for the default, which nobody would notice."""
    for name, legal in {"MINFER_TUNED": ("0", "1"), "MINFER_PDL": ("0", "1"), "MINFER_FORCE_ARCH": ("80", "90")}.items():
        value = _os.environ.get(name, "")
        if value and value not in legal:
            raise ImportError(f"minfer: the environment variable {name} must be {' or '.join(legal)}, got {value!r}")


def _load_library() -> None:
    release = tuple(int(part) for part in _torch.__version__.split(".")[:2])
    if release < (2, 10):
        raise ImportError(f"minfer needs torch >= 2.10 (its library is built for that stable ABI), found torch {_torch.__version__}")
    for folder in __path__:  # an editable install has two: the sources and the place of what was compiled
        library = _Path(folder) / "_C.so"
        if library.is_file():
            _torch.ops.load_library(library)
            return
    raise ImportError(f"minfer: _C.so is not in {', '.join(__path__)}: the package was not built; run `pip install .` in its repository")


_check_environment()
_load_library()

from . import (  # noqa: E402, F401  some register kernels and rules with torch
    distributed,
    nn,
    quantize,
    reference,
    reference_attention,
    reference_kv_cache,
    reference_moe,
    reference_moe_routing,
    reference_moe_w4a16,
    reference_w4a16,
    tracing,
    tuned,
)
from .attention import attention, attention_paged, attention_varlen, merge_attention_states  # noqa: E402
from .kv_cache import KvCache, allocate_kv_cache, kv_cache_append  # noqa: E402
from .moe import grouped_gemm, grouped_gemm_masked, moe_ffn  # noqa: E402
from .moe_routing import moe_combine, moe_router, moe_router_gemm, moe_sort  # noqa: E402
from .moe_w4a16 import grouped_w4a16_gemm, moe_ffn_w4a16  # noqa: E402
from .ops import gemm, gemm_gated  # noqa: E402
from .packing import pack_gate_up, unpack_gate_up  # noqa: E402
from .planning import Plan, plan  # noqa: E402
from .registry import build_info, kernels  # noqa: E402
from .w4a16 import w4a16_dequantize, w4a16_gemm, w4a16_gemm_gated, w4a16_pack  # noqa: E402
from .w8a16 import w8a16_dequantize, w8a16_gemm, w8a16_gemm_gated, w8a16_pack  # noqa: E402

__version__: str = build_info()["version"]
tuned.load_at_first_use()

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
