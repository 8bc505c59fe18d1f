"""Fused functions as files: kernels and what they compute, for processes without the DSL and without the Python function.

A folder holds ``manifest.json`` and a file for each kernel, as the cache has them, with checksums.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import attention_export, cache, dtypes, gemm_export
from .attention_function import AttentionFunction
from .compiler import compile_all, dsl_version
from .errors import FuseError
from .gemms import GemmFunction
from .graph import Graph
from .launch import Loaded, loaded
from .row_config import RingConfig, RowConfig
from .rows import Config, RowFunction, Specialisation
from .signature import Parameter, Signature

_FORMAT = 1
_MANIFEST = "manifest.json"


def export(
    function: RowFunction | GemmFunction | AttentionFunction, folder: str | Path, examples: Iterable[Any], *,
    archs: Sequence[str] | None = None,
) -> Path:  # fmt: skip
    """Writes what calls like the examples need, with any number of rows.

    Args:
      function: of :func:`minfer.fuse.pointwise`, :func:`minfer.fuse.rowwise` or :func:`minfer.fuse.gemm_epilogue`, or a
        :class:`minfer.fuse.AttentionFunction`.
      folder: is made, and must be empty or hold an earlier export.
      examples: tuples of arguments, bound as calls are; their tensors may be on the meta device. Dtypes, which tensors broadcast, the
        constants and, with reductions, the width are those that the loaded function takes. Of attention, as in precompile().
      archs: "sm_90a" and so on; None: of the current device.

    Returns:
      The folder.

    Raises:
      FuseError: where the folder holds other files, or no example is given.
      ImportError: without the DSL.
    """
    folder, examples = Path(folder), list(examples)
    if not examples:
        raise FuseError("export: needs an example of a call")
    if folder.exists() and any(folder.iterdir()) and not (folder / _MANIFEST).exists():
        raise FuseError(f"export: {folder} must be empty or hold an export, it has other files")
    if archs is None:
        from .launch import architecture

        archs = [architecture(torch.cuda.current_device())]
    if isinstance(function, GemmFunction):
        manifest, names = gemm_export.write(function, folder, examples, archs)
        return _finish(folder, {"format": _FORMAT, **manifest, "dsl": dsl_version()}, names)
    if isinstance(function, AttentionFunction):
        manifest, names = attention_export.write(function, folder, examples, archs)
        return _finish(folder, {"format": _FORMAT, **manifest, "dsl": dsl_version()}, names)
    needed = [(arch, *entry) for arch in archs for entry in function.specialisations(examples, arch)]
    kernels = [function._kernel(graph, config, arch) for arch, _, graph, config in needed]
    artifacts = compile_all(kernels)
    folder.mkdir(parents=True, exist_ok=True)
    graphs: list[str] = []
    traced: list[dict[str, Any]] = []
    files: dict[str, dict[str, Any]] = {}
    for (arch, specialisation, graph, config), artifact in zip(needed, artifacts, strict=True):
        text = graph.text()
        if text not in graphs:
            graphs.append(text)
        number = graphs.index(text)
        entry = {**_plain(specialisation), "graph": number}
        if (
            not function.reductions
            and function.graph(dataclasses.replace(specialisation, columns=specialisation.columns + 16)).text() == text
        ):
            entry["columns"] = None  # any
        if entry not in traced:
            traced.append(entry)
        key = hashlib.sha256(json.dumps([text, dataclasses.asdict(config), arch]).encode()).hexdigest()
        (folder / f"{key}.kernel").write_bytes(cache.pack(key, artifact))
        files[key] = {"graph": number, "ring": isinstance(config, RingConfig), "config": dataclasses.asdict(config), "arch": arch}
    manifest = {
        "format": _FORMAT,
        "name": function.name,
        "operator": function.operator,
        "parameters": [dataclasses.asdict(x) for x in function.signature.parameters],
        "reductions": function.reductions,
        "returns": function.returns,
        "graphs": [json.loads(text) for text in graphs],
        "specialisations": traced,
        "kernels": files,
        "dsl": dsl_version(),
    }
    return _finish(folder, manifest, set(files))


def _finish(folder: Path, manifest: dict[str, Any], names: set[str]) -> Path:
    """Writes the manifest; kernels of an earlier export go."""
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in folder.glob("*.kernel"):
        if path.stem not in names:
            path.unlink()
    return folder


def load(folder: str | Path) -> RowFunction | GemmFunction | AttentionFunction:
    """The function that :func:`export` wrote: called in the same way, on any torch that minfer runs on, without the DSL.

    Raises:
      FuseError: for a folder without an export, or of another format; at a call, for what was not exported.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise FuseError(f"load: {folder} holds no export of minfer.fuse: {error}") from None
    if manifest.get("format") != _FORMAT:
        raise FuseError(f"load: {folder} has the format {manifest.get('format')}, this version reads {_FORMAT}")
    if manifest.get("kind") == "gemm":
        return gemm_export.LoadedGemmFunction(folder, manifest)
    if manifest.get("kind") == "attention":
        return attention_export.LoadedAttention(folder, manifest)
    return _LoadedRowFunction(folder, manifest)


def _plain(specialisation: Specialisation) -> dict[str, Any]:
    tensors = [None if x is None else [dtypes.storage_of(x[0]), x[1], x[2]] for x in specialisation.tensors]
    return {"tensors": tensors, "constants": list(specialisation.constants), "columns": specialisation.columns}


class _LoadedRowFunction(RowFunction):
    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        graphs = [Graph.from_plain(plain) for plain in manifest["graphs"]]
        self._exported = [({k: v for k, v in x.items() if k != "graph"}, graphs[x["graph"]]) for x in manifest["specialisations"]]
        self._kernels = [
            (key, graphs[x["graph"]], (RingConfig if x["ring"] else RowConfig)(**x["config"]), x["arch"])
            for key, x in manifest["kernels"].items()
        ]
        signature = Signature([Parameter(**x) for x in manifest["parameters"]])
        self._define(f"{manifest['operator']}_exported", manifest["name"], signature, manifest["reductions"], manifest["returns"])
        self.__name__ = self.__qualname__ = manifest["name"]

    def _trace(self, specialisation: Specialisation) -> Graph:
        wanted = _plain(specialisation)
        for exported, graph in self._exported:
            if exported == wanted or exported == {**wanted, "columns": None}:
                return graph
        raise FuseError(
            f"{self.name}: a call with {self._shown(wanted)} was not exported; exported were "
            + "; ".join(self._shown(exported) for exported, _ in self._exported)
        )

    def _shown(self, what: dict[str, Any]) -> str:
        tensors = [
            f"{name} {'missing' if x is None else ' '.join(x[:2])}" for name, x in zip(self.signature.tensors, what["tensors"], strict=True)
        ]
        constants = [f"{name}={value!r}" for name, value in zip(self.signature.constants, what["constants"], strict=True)]
        columns = "any number of columns" if what["columns"] is None else f"{what['columns']} columns"
        return ", ".join([*tensors, *constants, columns])

    def _loaded(self, graph: Graph, config: Config, arch: str) -> tuple[Config, Loaded]:
        exported = [(key, other) for key, of, other, its_arch in self._kernels if of == graph and its_arch == arch]
        fitting = [(key, other) for key, other in exported if other == config]
        if not fitting and isinstance(config, RowConfig):  # another one that serves as well
            others = [
                (key, x) for key, x in exported if isinstance(x, RowConfig) and x.columns == config.columns and config.width % x.width == 0
            ]
            fitting = sorted(others, key=lambda x: (-x[1].width, abs(x[1].threads * x[1].vectors - config.threads * config.vectors)))
        if not fitting:
            raise FuseError(
                f"{self.name}: no exported kernel serves {arch} with {dataclasses.asdict(config)}; exported are kernels for "
                f"{', '.join(sorted({its_arch for _, _, _, its_arch in self._kernels}))}, with tensors aligned as in the examples"
            )
        key, chosen = fitting[0]
        path = self.folder / f"{key}.kernel"
        try:
            artifact = cache.unpack(key, path.read_bytes())
        except (OSError, ValueError) as error:
            raise FuseError(f"{self.name}: {path} cannot be loaded: {error}") from None
        return chosen, loaded(key, artifact)
