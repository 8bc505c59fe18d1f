"""Packed weights in safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch

from .. import weight_formats, weight_layout
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
    """
    package = _safetensors()
    tensors = {f"{name}.{part}": x.contiguous() for name, weight in weights.items() for part, x in weight.tensors().items()}
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
      ValueError: the file holds no packed weights, or some in a layout that this version does not read.
    """
    with _safetensors().safe_open(path, framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        if not any(key in metadata for key in _KINDS):
            raise ValueError(f"from_safetensors: {os.fspath(path)} was not written by minfer: its metadata have no '{next(iter(_KINDS))}'")
        names, layout = set(file.keys()), int(metadata.get(_LAYOUT, "1"))
        if layout > weight_layout.VERSION:
            raise ValueError(
                f"from_safetensors: {os.fspath(path)} has packed layout {layout}, this version reads up to {weight_layout.VERSION}"
            )

        def tensor(name: str) -> torch.Tensor | None:
            return file.get_tensor(name) if name in names else None

        weights = {}
        for key, (kind, tensors, fields) in _KINDS.items():
            form = fields[-1]
            for name, rest in json.loads(metadata.get(key, "{}")).items():
                if not weight_layout.readable(weight_formats.FORMATS[rest[form]].order, layout):
                    raise ValueError(
                        f"from_safetensors: {os.fspath(path)} has {name} in an earlier packed layout of {rest[form]}: quantise it again"
                    )
                parts = {part: tensor(f"{name}.{part}") for part in tensors}
                weights[name] = kind(**parts, **rest)
        return weights
