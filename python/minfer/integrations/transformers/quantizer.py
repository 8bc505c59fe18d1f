"""Quantised models through ``from_pretrained`` and ``save_pretrained``.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MinferConfig("w4a16", group_size=128), dtype=torch.bfloat16)
    model.save_pretrained(folder)                           # packed, and loaded by from_pretrained(folder) as it is
    model = load_quantized(path_of_a_gptq_model)            # also AWQ, compressed-tensors, bitsandbytes, mxfp4, FP8

A weight is quantised as soon as it is read, on the device where it will be: of the 16-bit model there is one tensor at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...nn import Fp8Linear, Int8Linear, W4Linear, W8Linear
from ...quantize.experts import W4Experts, in_blocks
from ...quantize.scaled_weight import aligned_rows
from ..decoder import Dense
from ..decoder.scheme import WeightScheme, module_of
from . import foreign
from .experts import activation_of_experts
from .modules import Unsupported
from .quantized_experts import QuantizedExperts

METHOD = "minfer"
LINEARS = {kind.__name__: kind for kind in (W4Linear, W8Linear, Fp8Linear, Int8Linear)}


@register_quantization_config(METHOD)
class MinferConfig(QuantizationConfigMixin):
    """How a model is quantised while it is loaded, and what it was saved as.

    Args:
      weights: "w4a16", "nf4", "mxfp4", "w8a16", "fp8" or "int8", see :class:`minfer.integrations.decoder.scheme.WeightScheme`.
      group_size, parts: as there.
      modules_to_not_convert: names of modules, or parts of names, that keep their bits; the head and what is tied to embeddings always do.
      modules: of a saved model: what each quantised module is, by its name.
      source: of a checkpoint of another tool: its quantisation config. :func:`load_quantized` sets it.

    Raises:
      ValueError: an argument cannot be right.
    """

    def __init__(
        self,
        weights: str = "w4a16",
        *,
        group_size: int | None = None,
        parts: str = "all",
        modules_to_not_convert: list[str] | None = None,
        modules: dict[str, dict[str, Any]] | None = None,
        source: dict[str, Any] | None = None,
        quant_method: str = METHOD,
    ):
        WeightScheme(weights, group_size, parts)
        self.quant_method = METHOD
        self.weights, self.group_size, self.parts = weights, group_size, parts
        self.modules_to_not_convert, self.modules, self.source = modules_to_not_convert, modules, source

    @property
    def scheme(self) -> WeightScheme:
        return WeightScheme(self.weights, self.group_size, self.parts)


@register_quantizer(METHOD)
class MinferQuantizer(HfQuantizer):
    """transformers' hooks."""

    requires_calibration = False
    quantization_config: MinferConfig

    @property
    def _foreign(self) -> bool:
        return self.quantization_config.source is not None and self.quantization_config.modules is None

    def _process_model_before_weight_loading(self, model: PreTrainedModel, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config = self.quantization_config
        keep = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        self._keep = [name for name in keep if name]
        if config.modules is not None:
            for name, facts in config.modules.items():
                _put(model, name, module_of_facts(facts))
        elif self._foreign:
            foreign.prepare(model, checkpoint_files, config.source)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        if self._foreign:
            return False
        name, _, tensor = param_name.rpartition(".")
        if not should_convert_module(name, self._keep):
            return False
        module, scheme = model.get_submodule(name), self.quantization_config.scheme
        if type(module) in (torch.nn.Linear, Conv1D):
            n, k = reversed(module.weight.shape) if type(module) is Conv1D else module.weight.shape
            return scheme.parts == "all" and tensor == "weight" and scheme.refuses(n, k) is None
        return tensor in ("gate_up_proj", "down_proj") and _experts_fit(module, scheme)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.quantization_config.scheme)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel | None = None) -> list[Any]:
        """Experts that are loaded one by one are not to be merged by transformers, whose later versions give the model, too."""
        if self._foreign:
            return [entry for entry in weight_conversions if not getattr(entry, "operations", None)]
        return weight_conversions

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self._foreign:
            foreign.convert(model, self.quantization_config.source)
        for name, module in list(model.named_modules()):
            if isinstance(module, _PendingExperts):
                model.set_submodule(name, _finished(name, module))
        found = {}
        for name, module in model.named_modules():
            if isinstance(module, W4Linear | W8Linear):
                _alpha_in_config(module)
                module._check_perm(f"{name}.perm", module.perm, module.in_features)
            elif isinstance(module, Fp8Linear | Int8Linear):
                module.weight = aligned_rows(module.weight)
            if isinstance(module, (QuantizedExperts, *LINEARS.values())):
                found[name] = facts_of(module)
        if not found:
            raise ValueError("MinferConfig: the model has no module that could be quantised so")
        self.quantization_config.modules = found
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        return {name: x.contiguous() for name, x in model.state_dict().items()}, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        for name, module in list(model.named_modules()):
            if isinstance(module, tuple(LINEARS.values())):
                weight = module.weight() if isinstance(module, W4Linear | W8Linear) else module.quantized_weight()
                linear = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
                linear.weight = torch.nn.Parameter(weight.dequantize().to(dtype), requires_grad=False)
                if module.bias is not None:
                    linear.bias = torch.nn.Parameter(module.bias.to(dtype), requires_grad=False)
                model.set_submodule(name, linear)
            elif isinstance(module, QuantizedExperts):
                raise ValueError(f"dequantize: {name} are experts, which stay quantised")
        return model


# ---- quantising what is read -------------------------------------------------------------------------------------------------------------


class _PendingExperts(torch.nn.Module):
    """Experts whose weights are being read."""

    def __init__(self, experts: torch.nn.Module):
        super().__init__()
        object.__setattr__(self, "original", experts)  # no child
        self.done: dict[str, Any] = {}
        for name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(name, parameter)


def _put(model: PreTrainedModel, name: str, module: torch.nn.Module) -> None:
    """Another module in a place of the model. What it is part of is not to draw initial weights for what it does not have any more."""
    model.set_submodule(name, module)
    model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True


def _experts_fit(module: torch.nn.Module, scheme: WeightScheme) -> bool:
    module = module.original if isinstance(module, _PendingExperts) else module
    if not hasattr(module, "has_gate") or not hasattr(module, "gate_up_proj"):
        return False
    try:
        activation_of_experts(module)
    except Unsupported:
        return False
    return scheme.refuses_experts(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is None


class _Quantize(ConversionOps):
    """Quantises the weight of a module, and puts another module in its place: there is nothing left to set."""

    def __init__(self, scheme: WeightScheme):
        self.scheme = scheme

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], full_layer_name: str, model: PreTrainedModel, missing_keys: Any = None, **kwargs: Any):
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        name, _, tensor = full_layer_name.rpartition(".")
        module = model.get_submodule(name)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        if isinstance(module, torch.nn.Linear | Conv1D):
            bias, weight = module.bias, weight.t() if isinstance(module, Conv1D) else weight
            if bias is not None and bias.is_meta:
                raise ValueError(f"MinferConfig: the checkpoint must have {name}.bias in front of {full_layer_name}")
            quantised = self.scheme.quantize(Dense(weight, None if bias is None else bias.detach().to(weight.device)))
            _put(model, name, module_of(quantised, weight.dtype))
            return {}
        return self._experts(model, name, tensor, module, weight)

    def _experts(self, model: PreTrainedModel, name: str, tensor: str, module: torch.nn.Module, weight: Tensor) -> dict[str, Tensor]:
        if not isinstance(module, _PendingExperts):
            pending = _PendingExperts(module)
            model.set_submodule(name, pending)
            module = pending
        original = module.original
        weight = weight.mT if original.is_transposed else weight
        layout = ("halves" if original.is_concatenated else "alternating") if tensor == "gate_up_proj" else None
        module.done[tensor] = self.scheme.quantize_weight_of_experts(weight, None, layout)
        return {}


def _finished(name: str, pending: _PendingExperts) -> QuantizedExperts:
    """The experts, once all of their weights and biases are there."""
    missing = [tensor for tensor in ("gate_up_proj", "down_proj") if tensor not in pending.done]
    if missing:
        raise ValueError(f"MinferConfig: the checkpoint lacks {name}.{missing[0]}")
    w13, w2 = pending.done["gate_up_proj"], pending.done["down_proj"]
    if pending.original.has_bias:
        b13, b2 = pending.gate_up_proj_bias.detach(), pending.down_proj_bias.detach()
        if isinstance(w13, W4Experts):  # whose rows are in blocks
            b13 = in_blocks(b13, 1, "halves" if pending.original.is_concatenated else "alternating")
        w13, w2 = dataclasses.replace(w13, bias=b13), dataclasses.replace(w2, bias=b2)
    return QuantizedExperts(w13, w2, activation_of_experts(pending.original))


# ---- modules and their descriptions ------------------------------------------------------------------------------------------------------


def facts_of(module: torch.nn.Module) -> dict[str, Any]:
    """What :func:`module_of_facts` makes the module of, but for its tensors."""
    if isinstance(module, QuantizedExperts):
        return {"module": "QuantizedExperts", **module.facts()}
    facts = {
        "module": type(module).__name__,
        "in_features": module.in_features,
        "out_features": module.out_features,
        "bias": module.bias is not None,
    }
    if isinstance(module, W4Linear | W8Linear):
        form = module._form
        sizes = {"group_size": module.group_size, "alpha": module.alpha, form: getattr(module, form)}
        dtype = module.scales.dtype if module.scales.is_floating_point() else torch.bfloat16
        return facts | sizes | {"zeros": module.zeros is not None, "perm": module.perm is not None, "dtype": _name_of(dtype)}
    weight = module.quantized_weight()
    own = {"mode": weight.mode, "static": module.input_scale is not None, "dtype": _name_of(module.dtype)}
    own["scale_dtype"] = _name_of(module.weight_scale.dtype)
    if isinstance(module, Int8Linear):
        own["zero"] = module.input_zero is not None
    if module.bias is not None:
        own["bias_dtype"] = _name_of(module.bias.dtype)
    return facts | own


def module_of_facts(facts: dict[str, Any]) -> torch.nn.Module:
    """An empty module, on the meta device, of :func:`facts_of`."""
    facts = dict(facts)
    kind = facts.pop("module")
    if kind == "QuantizedExperts":
        return QuantizedExperts.empty(facts)
    if kind not in LINEARS:
        raise ValueError(f"MinferConfig: modules has a {kind!r}, which minfer does not know")
    facts["dtype"] = getattr(torch, facts["dtype"])
    scale, bias = facts.pop("scale_dtype", None), facts.pop("bias_dtype", None)
    module = LINEARS[kind](**facts, device="meta")
    if isinstance(module, W4Linear | W8Linear):
        _alpha_in_config(module)
    if scale is not None:
        module.weight_scale = torch.empty_like(module.weight_scale, dtype=getattr(torch, scale))
    if bias is not None and module.bias is not None:
        module.bias = torch.empty_like(module.bias, dtype=getattr(torch, bias))
    return module


def _alpha_in_config(module: torch.nn.Module) -> None:
    """transformers loads and saves parameters and buffers; the number beside them is among the facts in the config."""
    if _without_alpha not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_without_alpha)


def _without_alpha(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.pop(f"{prefix}alpha", None)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- checkpoints of other tools ----------------------------------------------------------------------------------------------------------


def load_quantized(
    path: str, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device | None = None, **options: Any
) -> PreTrainedModel:
    """A quantised checkpoint of another tool as a model with minfer's layers: codes, scales and zero points keep their values.

    Args:
      path: a folder or a name on the hub, with a ``quantization_config`` of GPTQ, AWQ, compressed-tensors, bitsandbytes (4 bits), mxfp4
        (gpt-oss) or FP8 (fbgemm, DeepSeek's and Qwen3's blocks, ModelOpt). Nothing of these tools is needed. One that was saved by
        minfer, or is not quantised, is loaded as it is.
      dtype: of activations and of what is not quantised.
      device: where to; None: the current GPU, or the CPU where there is none.
      options: of ``from_pretrained``.

    Raises:
      ValueError: the method, or a layer of it, is none that minfer reads; the message names it.
    """
    config = AutoConfig.from_pretrained(path, **{k: v for k, v in options.items() if k in ("revision", "token", "local_files_only")})
    source = getattr(config, "quantization_config", None)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def load(**more: Any) -> PreTrainedModel:
        with torch.device(device):  # read to where it will be
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options, **more).to(device).eval()

    if source is None:
        return load()
    source = source if isinstance(source, dict) else source.to_dict()
    if source.get("quant_method") == METHOD:
        return load()
    foreign.check(source)
    del config.quantization_config
    return load(config=config, quantization_config=MinferConfig(source=source))
