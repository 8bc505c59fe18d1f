"""Packed weights in safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..checks.common import DTYPES, FLOAT32_MAX, ValueChecker, check_shape, check_tensor, is_integer
from ..checks.grouped_gemm import MAX_EXPERTS
from ..checks.quantized_gemm import check_group_size, check_permutation, check_weight
from ..formats import weight_formats, weight_layout
from ..formats.gate_up import GATE_BLOCK
from .experts import W4Experts
from .weight import W4Weight, W8Weight

# Keys of the file's metadata, {weight: {field: value}}, a weight being under the key of its kind: the names of its tensors and of its other
# fields, the format last.
_KINDS = {
    "minfer.w4a16": (W4Weight, ("qweight", "scales", "zeros", "perm", "bias"), ("group_size", "n", "k", "alpha", "w4_format")),
    "minfer.w8a16": (W8Weight, ("qweight", "scales", "zeros", "perm", "bias"), ("group_size", "n", "k", "alpha", "w8_format")),
    "minfer.w4a16_experts": (W4Experts, ("qweight", "scales", "zeros", "bias", "alpha"), ("group_size", "n", "k", "gated", "w4_format")),
}
_LAYOUT = "minfer.layout"  # weight_layout.VERSION; 1 where a file does not say


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("minfer.quantize needs the package safetensors to read and write files: pip install safetensors") from error
    return safetensors


def to_safetensors(weights: Mapping[str, W4Weight | W8Weight | W4Experts], path: str | os.PathLike[str]) -> None:
    """Writes packed weights to one file: tensors NAME.qweight, NAME.scales, ..., and the rest in the metadata keys "minfer.w4a16",
    "minfer.w8a16" and "minfer.w4a16_experts".

    Args:
      weights: by name, for example the module's. Any device.
      path: of the file; an existing one is replaced.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: one is no packed weight, or none that :func:`from_safetensors` would read.
    """
    package = _safetensors()
    tensors, seen = {}, set()
    for name, weight in weights.items():
        if not isinstance(weight, W4Weight | W8Weight | W4Experts):
            kinds = "W4Weight, W8Weight or W4Experts"
            raise ValueError(f"to_safetensors: {name} must be a {kinds} (of a module: module.weight()), got {type(weight).__name__}")
        if any(x.is_meta for x in weight.tensors().values()):
            raise ValueError(f"to_safetensors: {name} must have values, got tensors on the meta device")
        _check(f"to_safetensors: {name}", weight)
        for part, x in weight.tensors().items():
            x = x.contiguous()
            memory = (x.device, x.untyped_storage().data_ptr())
            tensors[f"{name}.{part}"] = x.clone() if memory in seen and x.numel() else x  # weights that are tied are written twice
            seen.add(memory)
    metadata = {"format": "pt", _LAYOUT: str(weight_layout.VERSION)}
    for key, (kind, _, fields) in _KINDS.items():
        of_kind = {name: weight for name, weight in weights.items() if isinstance(weight, kind)}
        rest = {name: {field: getattr(weight, field) for field in fields} for name, weight in of_kind.items()}
        if rest or kind is W4Weight:  # an empty file is one of ours too
            metadata[key] = json.dumps(rest)
    package.torch.save_file(tensors, path, metadata=metadata)


def from_safetensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, W4Weight | W8Weight | W4Experts]:
    """Reads what :func:`to_safetensors` wrote, on a device.

    Raises:
      ImportError: the package safetensors is not installed.
      FileNotFoundError: there is no such file.
      RuntimeError: torch knows no such device.
      ValueError: the file holds no packed weights, some in a layout that this version does not read, or some that no operator would take.
    """
    file_name = os.fspath(path)

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"from_safetensors: {file_name} {message}")

    package, place = _safetensors(), torch.device(device)
    if place.type == "meta":
        raise ValueError("from_safetensors: device must be one that holds values, got meta")
    try:
        opened = package.safe_open(path, framework="pt", device=str(place))
    except package.SafetensorError as error:
        raise ValueError(f"from_safetensors: {file_name} is no safetensors file: {error}") from None
    with opened as file:
        metadata = file.metadata() or {}
        known = any(key in metadata for key in _KINDS)
        require(known, f"was not written by minfer: its metadata have no '{next(iter(_KINDS))}'")
        names, layout = set(file.keys()), metadata.get(_LAYOUT, "1")
        require(layout.isdecimal(), f"has '{layout}' for a {_LAYOUT}, which must be a number")
        require(int(layout) <= weight_layout.VERSION, f"has packed layout {layout}, this version reads up to {weight_layout.VERSION}")
        weights = {}
        for key, (kind, tensors, fields) in _KINDS.items():
            for name, rest in _objects(require, key, metadata.get(key, "{}")).items():
                unknown = sorted(set(rest) - set(fields))
                missing = sorted(set(fields) - set(rest) - {"alpha"})  # there are files from before there was one
                require(not unknown and not missing, f"must have {', '.join(fields)} of {name}; unknown: {unknown}, missing: {missing}")
                form, value = fields[-1], rest[fields[-1]]
                known = isinstance(value, str) and value in weight_formats.FORMATS
                require(known, f"has {name} in a {form} that this version does not know: {value!r}")
                order = weight_formats.FORMATS[value].order
                readable = weight_layout.readable(order, int(layout))
                require(readable, f"has {name} in an earlier packed layout of {value}: quantise it again")
                parts = {part: file.get_tensor(f"{name}.{part}") for part in tensors if f"{name}.{part}" in names}
                for part in ("qweight", "scales"):
                    require(part in parts, f"has no tensor {name}.{part}")
                weights[name] = kind(**dict.fromkeys(tensors) | parts | rest)
                _check(f"from_safetensors: {file_name}: {name}", weights[name])
        return weights


def _objects(require: Callable[[bool, str], None], key: str, text: str) -> dict[str, dict[str, Any]]:
    """The metadata of one kind of weight: a JSON object of JSON objects."""
    try:
        objects = json.loads(text)
    except (ValueError, RecursionError) as error:
        objects = error
    good = isinstance(objects, dict) and all(isinstance(x, dict) for x in objects.values())
    require(good, f"must have a JSON object of objects in its metadata's {key}, got {objects!r}")
    return objects


def _check(where: str, weight: W4Weight | W8Weight | W4Experts) -> None:
    """That the operators take a weight, its perm's values included."""
    check = ValueChecker(where)
    bits = 8 if isinstance(weight, W8Weight) else 4
    name, names = getattr(weight, f"w{bits}_format"), weight_formats.names(bits)
    check(name in names, "w{}_format must be one of {}, got '{}'", bits, ", ".join(names), name)
    for size in ("n", "k"):
        extent = getattr(weight, size)
        check(is_integer(extent) and extent > 0, "{} must be a positive integer, got {}", size, extent)
    n, k, form = weight.n, weight.k, weight_formats.FORMATS[name]
    check_group_size(check, weight.group_size, name)
    types = DTYPES if form.scale_type is None else (torch.uint8,)
    check(weight.scales.dtype in types, "scales must be {}, got {}", " or ".join(map(str, types)), weight.scales.dtype)
    experts = ()
    if isinstance(weight, W4Experts):
        check(weight.scales.dim() == 3, "scales must be [experts, ceil(k / group_size), n], got {}", weight.scales.shape)
        experts = (weight.scales.shape[0],)
        check(1 <= experts[0] <= MAX_EXPERTS, "scales must have 1 to {} experts, got {}", MAX_EXPERTS, weight.scales.shape)
        gates = weight.gated is False or (weight.gated is True and n % (2 * GATE_BLOCK) == 0)
        check(gates, "gated must be False, or True with n a multiple of {}, got {} and {}", 2 * GATE_BLOCK, weight.gated, n)
        if weight.alpha is not None:
            check_tensor(check, "alpha", weight.alpha, torch.float32, "scales", weight.scales)
            check_shape(check, "alpha", weight.alpha, experts)
    else:
        number = isinstance(weight.alpha, int | float) and abs(weight.alpha) <= FLOAT32_MAX
        check(number, "alpha must be a number that is finite in float32, got {}", weight.alpha)
    check_weight(check, weight.qweight, weight.scales, weight.zeros, name, weight.group_size, n, k, experts)
    if weight.bias is not None:
        types = (weight.scales.dtype,) if form.scale_type is None else DTYPES
        types = (*types, torch.float32)
        check(weight.bias.dtype in types, "bias must be {}, got {}", " or ".join(map(str, types)), weight.bias.dtype)
        check_shape(check, "bias", weight.bias, (*experts, n))
    if getattr(weight, "perm", None) is not None:
        check_tensor(check, "perm", weight.perm, torch.int32, "scales", weight.scales)
        check_shape(check, "perm", weight.perm, (k,))
        check_permutation(check, "perm", weight.perm, k)
