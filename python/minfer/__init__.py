"""minfer: the operators an LLM inference stack is built on.

    import torch, minfer
    y = minfer.gemm(x, weight.t(), bias=bias, activation="silu")    # or torch.ops.minfer.gemm(...)

Loading registers ``torch.ops.minfer.*`` for CUDA (ahead-of-time kernels), CPU (ATen compositions) and meta tensors.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._core.library import (
    check_environment as _check_environment,
    load_library as _load_library,
    without_collections as _without_collections,
)

_check_environment()
_load_library(__path__)

# ruff: noqa: F403, F405  what follows looks the operators up in the library
with _without_collections():
    from . import distributed, nn, ops as _ops, quantize, reference
    from ._core.batch_invariance import batch_invariant, is_batch_invariant, set_batch_invariant
    from ._core.registry import build_info, kernels
    from .formats.gate_up import pack_gate_up, unpack_gate_up
    from .ops import *
    from .planning import tuned as _tuned
    from .planning.plan import DecoderBlockPlan, NormPlan, Plan, plan

if _TYPE_CHECKING:
    from .generation import Completion, SamplingParams, generate


def __getattr__(name: str):
    """minfer.fuse and minfer.generation, and what comes from them, are imported where they are first used: nothing else needs them."""
    import importlib

    if name in ("fuse", "generation"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in ("Completion", "SamplingParams", "generate"):
        return getattr(importlib.import_module(f"{__name__}.generation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "fuse", "generation"})


__version__: str = build_info()["version"]
_tuned.load_at_first_use()

__all__ = [
    "Completion",
    "DecoderBlockPlan",
    "NormPlan",
    "Plan",
    "SamplingParams",
    "__version__",
    "batch_invariant",
    "build_info",
    "distributed",
    "generate",
    "is_batch_invariant",
    "kernels",
    "nn",
    "pack_gate_up",
    "plan",
    "quantize",
    "reference",
    "set_batch_invariant",
    "unpack_gate_up",
    *_ops.__all__,
]
