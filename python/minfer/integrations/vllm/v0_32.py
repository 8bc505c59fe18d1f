"""How vLLM 0.32 is hooked into. What it registers is in the modules beside this one, which take vLLM's classes from where 0.32 has them."""

from __future__ import annotations

from typing import Any


def _put_first(kernels: dict[Any, list[type]], platform: Any, kernel: type) -> None:
    """vLLM takes the first kernel that applies; its own function registers behind all others."""
    own = kernels.setdefault(platform, [])
    if kernel not in own:
        own.insert(0, kernel)


def register_linear() -> str:
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms.interface import PlatformEnum

    from . import linear

    for table, kernel in (
        (kernels._POSSIBLE_KERNELS, linear.MinferPackedLinearKernel),
        (kernels._POSSIBLE_FP8_KERNELS, linear.MinferFp8LinearKernel),
        (kernels._POSSIBLE_FP8_BLOCK_KERNELS, linear.MinferFp8BlockLinearKernel),
        (kernels._POSSIBLE_INT8_KERNELS, linear.MinferInt8LinearKernel),
    ):
        _put_first(table, PlatformEnum.CUDA, kernel)
    return linear.why_not_here() or "in front of vLLM's kernels of W4A16, W8A16, FP8 and INT8"


def register_attention() -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{__package__}.attention.MinferAttentionBackend"
    if "MINFER" in AttentionBackendEnum.__members__:
        register_backend(AttentionBackendEnum["MINFER"], path)
    else:
        register_backend("MINFER", path)
    return "--attention-backend MINFER"


def register_layers() -> str:
    from vllm.model_executor.custom_op import op_registry_oot

    from . import layers

    for name, layer in layers.LAYERS.items():
        own = layer.name  # by which a configuration turns the op on and off
        if name not in op_registry_oot:
            layer.register_oot(name=name)(layer)
            layer.name = own
    return '--compilation-config \'{"custom_ops": ["all"]}\', or "+rms_norm" and others'
