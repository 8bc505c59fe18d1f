"""Functions of rows as files; see export.py, which writes the folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import kernel_files
from .artifact import Artifact
from .compiler import compile_all
from .errors import FuseError
from .graph import Graph
from .launch import Loaded, loaded
from .row_config import RingConfig, RowConfig
from .row_function import RowFunction, RowSpecialisation
from .row_plan import Config
from .signature import Signature
from .specialisation import plain, shown, shown_columns, shown_constants


def write(function: RowFunction, folder: Path, examples: Iterable[Any], archs: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """The manifest, without what all have, and the names of the kernels' files."""
    needed = [(arch, *entry) for arch in archs for entry in function.specialisations(examples, arch)]
    artifacts = compile_all([function._kernel(graph, config, arch) for arch, _, graph, config in needed])
    made: dict[str, Artifact] = {}
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
            and function.traced(dataclasses.replace(specialisation, columns=specialisation.columns + 16)).text() == text
        ):
            entry["columns"] = None  # any
        if entry not in traced:
            traced.append(entry)
        key = kernel_files.key_of(text, dataclasses.asdict(config), arch)
        made[key] = artifact
        files[key] = {"graph": number, "ring": isinstance(config, RingConfig), "config": dataclasses.asdict(config), "arch": arch}
    kernel_files.write(folder, made)
    manifest = {
        "name": function.name,
        "operator": function.operator,
        "parameters": function.signature.plain(),
        "reductions": function.reductions,
        "returns": function.returns,
        "graphs": [json.loads(text) for text in graphs],
        "specialisations": traced,
        "kernels": files,
    }
    return manifest, set(files)


def _plain(specialisation: RowSpecialisation) -> dict[str, Any]:
    tensors = plain(specialisation.tensors)
    return {"tensors": tensors, "constants": list(specialisation.constants), "columns": specialisation.columns}


class LoadedRowFunction(RowFunction):
    """What :func:`write` wrote."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.reductions = folder, manifest["reductions"]
        graphs = [Graph.from_plain(x) for x in manifest["graphs"]]
        self._exported = [({k: v for k, v in x.items() if k != "graph"}, graphs[x["graph"]]) for x in manifest["specialisations"]]
        self._kernels = [
            (key, graphs[x["graph"]], (RingConfig if x["ring"] else RowConfig)(**x["config"]), x["arch"])
            for key, x in manifest["kernels"].items()
        ]
        signature = Signature.from_plain(manifest["parameters"])
        self._define(f"{manifest['operator']}_exported", manifest["name"], signature, manifest["returns"])
        self.__name__ = self.__qualname__ = manifest["name"]

    def _trace(self, specialisation: RowSpecialisation) -> Graph:
        wanted = _plain(specialisation)
        for exported, graph in self._exported:
            if exported == wanted or exported == {**wanted, "columns": None}:
                return graph
        raise FuseError(
            f"{self.name}: a call with {self._shown(wanted)} was not exported; exported were "
            + "; ".join(self._shown(exported) for exported, _ in self._exported)
        )

    def _shown(self, what: dict[str, Any]) -> str:
        tensors = shown(self.signature.tensors, what["tensors"])
        return ", ".join([*tensors, *shown_constants(self.signature.constants, what["constants"]), shown_columns(what["columns"])])

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
        return chosen, loaded(key, kernel_files.read(self.name, self.folder, key))
