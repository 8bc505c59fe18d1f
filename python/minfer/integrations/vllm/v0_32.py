"""How vLLM 0.32 is hooked into. What it registers is in the modules beside this one, which take vLLM's classes from where 0.32 has them."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any


def _put_first(kernels: dict[Any, list[type]], platform: Any, kernel: type) -> None:
    """vLLM takes the first kernel that applies; its own function registers behind all others."""
    own = kernels.setdefault(platform, [])
    if kernel not in own:
        own.insert(0, kernel)


def follow_mode() -> None:
    """The process computes in the batch-invariant mode where vLLM does."""
    from vllm import envs

    from ..._core.batch_invariance import set_batch_invariant

    if envs.VLLM_BATCH_INVARIANT:
        set_batch_invariant(True)


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


def _prefer_experts(oracle: Any, backend: Any, experts: type) -> None:
    """In an oracle, which is a module of functions: ``experts`` are asked before the backend's own."""
    own = oracle.backend_to_kernel_cls
    if getattr(own, "minfer", None) is not None:
        return

    @functools.wraps(own)
    def backend_to_kernel_cls(asked: Any) -> list[type]:
        return [experts, *own(asked)] if asked == backend else own(asked)

    backend_to_kernel_cls.minfer = experts
    oracle.backend_to_kernel_cls = backend_to_kernel_cls


def _prefer_fp8_backend(oracle: Any, backend: Any, experts: type) -> None:
    """The backend is asked before all others where ``experts`` apply."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat

    own = oracle._get_priority_backends
    if getattr(own, "minfer", None) is not None:
        return

    @functools.wraps(own)
    def priorities(config: Any, weight_key: Any, activation_key: Any) -> list[Any]:
        found = own(config, weight_key, activation_key)
        if experts.is_supported_config(experts, config, weight_key, activation_key, FusedMoEActivationFormat.Standard)[0]:
            found = [backend, *(other for other in found if other != backend)]
        return found

    priorities.minfer = experts
    oracle._get_priority_backends = priorities


def _replace_everywhere(module: Any, name: str, function: Any) -> None:
    """In its module and in those of vLLM that have imported it by name. What they hold is looked up, not asked for: some load on demand."""
    own = getattr(module, name)
    modules = [x for key, x in sys.modules.items() if key.startswith("vllm.") and isinstance(x, ModuleType)]
    for other in [x for x in modules if vars(x).get(name) is own]:
        setattr(other, name, function)


def _prefer_packed_experts(oracle: Any) -> None:
    """The three functions of an oracle of 4-bit weights answer for minfer's experts where they apply. Those are imported by the first layer
    that asks."""
    if getattr(oracle.select_wna16_moe_backend, "minfer", False):
        return
    select, convert, make = oracle.select_wna16_moe_backend, oracle.convert_to_wna16_moe_kernel_format, oracle.make_wna16_moe_kernel

    @functools.wraps(select)
    def select_backend(config: Any, weight_key: Any, quant_config: Any, *args: Any, **options: Any) -> tuple[Any, type]:
        from . import packed_experts as packed

        why = packed.why_not(config, weight_key, quant_config)
        if why is None:
            oracle.logger.info_once("Using minfer's experts of 4-bit weights.", scope="local")
            return packed.BACKEND, packed.MinferPackedExperts
        oracle.logger.debug_once("minfer's experts are not used: %s", why, scope="local")
        return select(config, weight_key, quant_config, *args, **options)

    @functools.wraps(convert)
    def convert_tensors(backend: Any, layer: Any, quant_config: Any, input_dtype: Any, *args: Any, **options: Any) -> Any:
        from . import packed_experts as packed

        if backend is packed.BACKEND:
            return packed.converted(layer, quant_config, *args, **options)
        return convert(backend, layer, quant_config, input_dtype, *args, **options)

    @functools.wraps(make)
    def make_kernel(
        moe_quant_config: Any,
        moe_config: Any,
        experts_cls: type,
        backend: Any = oracle.WNA16MoEBackend.MARLIN,
        routing_tables: Any = None,
    ) -> Any:
        from . import packed_experts as packed

        if experts_cls is packed.MinferPackedExperts:
            return packed.kernel_of(moe_quant_config, moe_config, routing_tables)
        return make(moe_quant_config, moe_config, experts_cls, backend, routing_tables)

    select_backend.minfer = True
    for function in (select_backend, convert_tensors, make_kernel):
        _replace_everywhere(oracle, function.__name__, function)


def register_experts() -> str:
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, unquantized

    from . import experts
    from .linear import why_not_here

    _prefer_experts(unquantized, unquantized.UnquantizedMoeBackend.TRITON, experts.MinferExperts)
    _prefer_experts(fp8, fp8.Fp8MoeBackend.TRITON, experts.MinferFp8Experts)
    _prefer_fp8_backend(fp8, fp8.Fp8MoeBackend.TRITON, experts.MinferFp8Experts)
    _prefer_packed_experts(int_wna16)
    return why_not_here() or "16-bit and FP8 experts, under vLLM's name TRITON; W4A16 experts"


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
