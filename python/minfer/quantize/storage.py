"""Packed weights in safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch

from .weight import W4Weight

_KEY = "minfer.w4a16"  # of the file's metadata: {weight: {field: value}}
_FIELDS = ("group_size", "n", "k", "w4_format")


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("minfer.quantize needs the package safetensors to read and write files: pip install safetensors") from error
    return safetensors


def to_safetensors(weights: Mapping[str, W4Weight], path: str | os.PathLike[str]) -> None:
    """Writes packed weights to one file: tensors NAME.qweight, NAME.scales, ..., and their sizes in the metadata key "minfer.w4a16".

    Args:
      weights: by name, for example the module's. Any device.
      path: of the file; an existing one is replaced.

    Raises:
      ImportError: the package safetensors is not installed.
    """
    package = _safetensors()
    tensors = {f"{name}.{part}": x.contiguous() for name, weight in weights.items() for part, x in weight.tensors().items()}
    sizes = {name: {field: getattr(weight, field) for field in _FIELDS} for name, weight in weights.items()}
    package.torch.save_file(tensors, path, metadata={"format": "pt", _KEY: json.dumps(sizes)})


def from_safetensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, W4Weight]:
    """Reads what :func:`to_safetensors` wrote, on a device.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: the file holds no packed weights.
    """
    with _safetensors().safe_open(path, framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        if _KEY not in metadata:
            raise ValueError(f"from_safetensors: {os.fspath(path)} was not written by minfer: its metadata have no '{_KEY}'")
        names = set(file.keys())

        def tensor(name: str) -> torch.Tensor | None:
            return file.get_tensor(name) if name in names else None

        return {
            name: W4Weight(
                **{part: tensor(f"{name}.{part}") for part in ("qweight", "scales", "zeros", "perm", "bias")},
                **{field: sizes[field] for field in _FIELDS},
            )
            for name, sizes in json.loads(metadata[_KEY]).items()
        }
