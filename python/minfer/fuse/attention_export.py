"""Attention with its functions as files; see export.py. Tensors that the functions look up in are arguments of what is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from . import kernel_files
from .attention_config import AttentionConfig
from .attention_function import AttentionFunction, Call, Traced, kernel_of, load_compiled, loaders, registered
from .compiler import compile_all
from .errors import FuseError
from .graph import Graph
from .launch import Loaded, loaded


def write(function: AttentionFunction, folder: Path, examples: Sequence[Any], archs: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """The kernels, and what the manifest says of them; the names of their files."""
    known = function.traced()
    needed = [(config, arch) for arch in archs for config in function.configurations(examples, arch)]
    artifacts = compile_all([kernel_of(known, config, arch) for config, arch in needed])
    keys = [kernel_files.key_of(known.key, dataclasses.asdict(config), arch) for config, arch in needed]
    kernel_files.write(folder, dict(zip(keys, artifacts, strict=True)))
    files = {key: {"config": dataclasses.asdict(config), "arch": arch} for key, (config, arch) in zip(keys, needed, strict=True)}
    manifest = {
        "kind": "attention", "name": function.name, "graph": known.graph.plain(), "scores": known.scores, "masks": known.masks,
        "kernels": files,
    }  # fmt: skip
    return manifest, set(files)


class LoadedAttention(AttentionFunction):
    """What :func:`write` wrote: called with the tensors that the functions look up in, by their names."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.name = folder, manifest["name"]
        self._known = registered(Graph.from_plain(manifest["graph"]), manifest["scores"], manifest["masks"])
        self._kernels = {(AttentionConfig(**x["config"]), x["arch"]): key for key, x in manifest["kernels"].items()}
        loaders[self._known.key] = self._load

    def traced(self) -> Traced:
        return self._known

    def _functions(self, captured: dict[str, Tensor]) -> tuple[Any, list[Tensor]]:
        if sorted(captured) != sorted(self._known.names):
            raise FuseError(f"{self.name}: its functions look up in {self._known.names}, got {sorted(captured)}")
        tensors = [captured[name] for name in self._known.names]
        return Call(self._known, tensors, None), tensors

    def _load(self, known: Traced, config: AttentionConfig, arch: str) -> Loaded:
        key = self._kernels.get((config, arch))
        if key is None:
            try:
                return load_compiled(known, config, arch)
            except ImportError:
                archs = sorted({its for _, its in self._kernels})
                raise FuseError(
                    f"{self.name}: no exported kernel serves {arch} with {dataclasses.asdict(config)}; exported are kernels for "
                    f"{', '.join(archs)} and calls like the examples"
                ) from None
        return loaded(key, kernel_files.read(self.name, self.folder, key))
