"""Checkpoints of other quantisation tools, read module by module into minfer's layouts while transformers loads the rest of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ...quantize import (
    from_awq,
    from_bitsandbytes,
    from_compressed_tensors,
    from_fp8,
    from_gpt_oss,
    from_gptq,
    from_int8,
    stack_experts,
    stack_scaled_experts,
)
from ..decoder.scheme import module_of
from ..decoder.weights import ScaledWeight, Weight
from .experts import activation_of_experts
from .quantized_experts import QuantizedExperts

Tensors = dict[str, Tensor]
_EXPERT_LINEARS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_PLAIN = {"weight", "bias"}


class RawModule(torch.nn.Module):
    """The place of a module whose tensors minfer reads itself.

    Attributes:
      keys: for each of its linear layers, () or (expert, "gate" | "up" | "down"), the keys of its tensors by their names in the layer.
      original: the module that was here.
    """

    def __init__(self, original: torch.nn.Module, keys: dict[tuple, dict[str, str]]):
        super().__init__()
        self.keys = keys
        object.__setattr__(self, "original", original)  # no child: nobody is to load its weights


class Files:
    """The tensors of a checkpoint's files, read one by one."""

    def __init__(self, paths: Sequence[str]):
        self._place = {}
        self._open = [safe_open(path, framework="pt") for path in paths]
        for file in self._open:
            for key in file.keys():  # noqa: SIM118  not a dictionary
                self._place[key] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def dtype(self, key: str) -> str:
        return self._place[key].get_slice(key).get_dtype()

    def read(self, keys: dict[str, str]) -> Tensors:
        return {name: self._place[key].get_tensor(key) for name, key in keys.items()}


def check(source: dict[str, Any]) -> None:
    """ValueError where a quantisation config is of a method that minfer does not read."""
    method = source.get("quant_method")
    if method == "bitsandbytes" and not source.get("load_in_4bit", False):
        raise ValueError("load_quantized: of bitsandbytes minfer reads 4 bits (load_in_4bit), not 8")
    if method not in _READERS:
        raise ValueError(f"load_quantized: quant_method must be one of {', '.join(_READERS)}, got {method!r}")


def prepare(model: PreTrainedModel, checkpoint_files: Sequence[str] | None, source: dict[str, Any]) -> None:
    """Puts :class:`RawModule` in the places of quantised linear layers and experts, before transformers reads the other tensors."""
    if not checkpoint_files or not all(str(path).endswith(".safetensors") for path in checkpoint_files):
        raise ValueError("load_quantized: the checkpoint must be of safetensors files")
    files = Files([str(path) for path in checkpoint_files])
    names = {_canonical(name, model): name for name, _ in model.named_modules()}
    found: dict[str, dict[tuple, dict[str, str]]] = {}
    for key in files:
        own = _canonical(key, model)
        for module, layer, tensor in _owners(own):
            if module in names:
                found.setdefault(module, {}).setdefault(layer, {})[tensor] = key
                break
    ignored = []
    for module, layers in found.items():
        name, original = names[module], model.get_submodule(names[module])
        is_experts = hasattr(original, "has_gate") and hasattr(original, "gate_up_proj")
        if not is_experts and type(original) is not torch.nn.Linear:
            continue
        if all(
            set(tensors) <= _PLAIN and files.dtype(tensors["weight"]) in ("F16", "BF16", "F32") for tensors in layers.values() if tensors
        ):
            continue
        if is_experts and layers.keys() == {()} and set(layers[()]) <= {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}:
            continue
        model.set_submodule(name, RawModule(original, layers))
        ignored += [re.escape(key) for layer in layers.values() for key in layer.values()]
    if not ignored:
        raise ValueError(f"load_quantized: no layer of the checkpoint is quantised, though its config says {source.get('quant_method')}")
    model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | set(ignored)
    model._minfer_files = files


def _canonical(name: str, model: PreTrainedModel) -> str:
    """Names without the base model's prefix, which files may lack, and with Mixtral's experts where transformers has them."""
    return name.removeprefix(f"{model.base_model_prefix}.").replace("block_sparse_moe.", "mlp.")


def _owners(key: str) -> Iterator[tuple[str, tuple, str]]:
    """(module, layer in it, tensor) that a key may be of."""
    match = re.match(r"(.*\.experts)\.(\d+)\.(\w+)\.(.+)$", key)
    if match and match[3] in _EXPERT_LINEARS:
        yield match[1], (int(match[2]), _EXPERT_LINEARS[match[3]]), match[4]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:end]), (), ".".join(parts[end:])


def convert(model: PreTrainedModel, source: dict[str, Any]) -> None:
    """Reads and converts what :func:`prepare` left, where the model is now."""
    files, device = model._minfer_files, model.device
    del model._minfer_files
    read = _READERS[source["quant_method"]]
    for name, module in list(model.named_modules()):
        if not isinstance(module, RawModule):
            continue

        def layer(key: tuple, module: RawModule = module, name: str = name) -> Weight:
            tensors = {own: x.to(device) for own, x in files.read(module.keys[key]).items()}
            try:
                return read(tensors, source, model.dtype)
            except ValueError as error:
                raise ValueError(f"load_quantized: {name}: {error}") from error

        if () in module.keys and isinstance(module.original, torch.nn.Linear):
            model.set_submodule(name, module_of(layer(()), model.dtype))
        elif () in module.keys:
            if source["quant_method"] != "mxfp4":
                raise ValueError(f"load_quantized: {name}: experts in one tensor are read of mxfp4 alone")
            tensors = {own: x.to(device) for own, x in files.read(module.keys[()]).items()}
            model.set_submodule(name, QuantizedExperts(*from_gpt_oss(tensors), activation_of_experts(module.original)))
        else:
            model.set_submodule(name, _experts(name, module, layer))


def _experts(name: str, module: RawModule, layer: Callable[[tuple], Weight]) -> QuantizedExperts:
    count = module.original.num_experts
    missing = [key for key in ((e, part) for e in range(count) for part in ("gate", "up", "down")) if key not in module.keys]
    if missing:
        raise ValueError(f"load_quantized: {name}: the checkpoint lacks {missing[0][1]} of expert {missing[0][0]}")
    gates, ups, downs = ([layer((expert, part)) for expert in range(count)] for part in ("gate", "up", "down"))
    stack = stack_scaled_experts if isinstance(gates[0], ScaledWeight) else stack_experts
    return QuantizedExperts(stack(gates, ups), stack(downs), activation_of_experts(module.original))


# ---- readers of one layer --------------------------------------------------------------------------------------------------------------


def _gptq(tensors: Tensors, source: dict[str, Any], dtype: torch.dtype) -> Weight:
    form = source.get("checkpoint_format") or "gptq"
    return from_gptq(tensors, group_size=source["group_size"], bits=source.get("bits", 4), checkpoint_format=form, dtype=dtype)


def _awq(tensors: Tensors, source: dict[str, Any], dtype: torch.dtype) -> Weight:
    size = source.get("group_size", source.get("q_group_size", 128))
    bits = source.get("bits", source.get("w_bit", 4))
    return from_awq(tensors, group_size=size, bits=bits, version=source.get("version", "gemm"), dtype=dtype)


def _compressed(tensors: Tensors, source: dict[str, Any], dtype: torch.dtype) -> Weight:
    """The tensors say which format; the groups of the config whether activations are quantised too, which all of them must agree on."""
    groups = list(source.get("config_groups", {}).values())
    quantised = {bool(group.get("input_activations")) for group in groups}
    weight = tensors.get("weight")
    if weight is not None and True in quantised:
        if len(quantised) != 1:
            raise ValueError("some groups of layers have quantised activations and some have not")
        own = {name: x for name, x in tensors.items() if name not in ("weight_shape",)}
        return from_int8(own) if weight.dtype == torch.int8 else from_fp8(own)
    bits = {group["weights"].get("num_bits", 4) for group in groups if group.get("weights")}
    form = source.get("format", "pack-quantized")
    if "weight_global_scale" in tensors:
        form = "nvfp4-pack-quantized"
    elif weight is not None:
        form = "int-quantized" if weight.dtype == torch.int8 else "float-quantized"
    options = {"num_bits": bits.pop()} if form == "pack-quantized" and len(bits) == 1 else {}
    return from_compressed_tensors(tensors, format=form, dtype=dtype, **options)


def _bitsandbytes(tensors: Tensors, source: dict[str, Any], dtype: torch.dtype) -> Weight:
    return from_bitsandbytes(tensors, dtype=dtype)


def _fp8(tensors: Tensors, source: dict[str, Any], dtype: torch.dtype) -> Weight:
    own = {name: x for name, x in tensors.items() if name not in ("input_scale_ub", "k_scale", "v_scale")}
    return from_fp8(own, weight_block_size=source.get("weight_block_size"))


def _mxfp4(tensors: Tensors, source: dict[str, Any], dtype: torch.dtype) -> Weight:
    raise ValueError("of mxfp4 checkpoints minfer reads experts alone")


_READERS: dict[str, Callable[[Tensors, dict[str, Any], torch.dtype], Weight]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _fp8,
    "mxfp4": _mxfp4,
}
