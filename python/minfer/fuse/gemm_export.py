"""Fused GEMMs as files; see export.py, which writes the folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import dtypes, kernel_files
from .artifact import Artifact
from .compiler import Kernel, compile_all
from .errors import FuseError
from .gemm_config import GemmConfig
from .gemm_function import GemmFunction
from .gemm_interface import ONE, VECTOR, GemmInterface, GemmSpace, GemmSpecialisation
from .gemm_kernels import kernel_of
from .gemm_tracing import Traced
from .graph import Graph
from .signature import Signature
from .specialisation import plain, shown, shown_columns, shown_constants


def _key(kernel: Kernel) -> str:
    return kernel_files.key_of(kernel.template, kernel.graph.text(), list(kernel.config), kernel.architecture)


def _plain(s: GemmSpecialisation) -> dict[str, Any]:
    return {
        "a": dtypes.storage_of(s.a),
        "b": dtypes.storage_of(s.b),
        "operands": plain(s.operands),
        "constants": list(s.constants),
        "columns": s.columns,
        "k": s.k,
        "grouped": s.grouped,
    }


def _traced(traced: Traced) -> dict[str, Any]:
    return {
        "graph": traced.graph.plain(),
        "first": traced.first.plain(),
        "last": None if traced.last is None else traced.last.plain(),
        "late": list(traced.late),
        "per_expert": list(traced.per_expert),
        "prologue": None if traced.prologue is None else traced.prologue.plain(),
        "prologue_per_expert": list(traced.prologue_per_expert),
    }


def _from_traced(exported: dict[str, Any]) -> Traced:
    def graph(name: str) -> Graph | None:
        return None if exported[name] is None else Graph.from_plain(exported[name])

    whole, first = graph("graph"), graph("first")
    assert whole is not None and first is not None
    late, per_expert, of_prologue = (tuple(exported[name]) for name in ("late", "per_expert", "prologue_per_expert"))
    return Traced(whole, first, graph("last"), late, per_expert, graph("prologue"), of_prologue)


def write(function: GemmFunction, folder: Path, examples: Sequence[Sequence[Any]], archs: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """The manifest, without what all have, and the names of the kernels' files."""
    needed = [(arch, *entry) for arch in archs for entry in function.needed(examples, arch)]
    kernels = list(dict.fromkeys(kernel for *_, of_example in needed for kernel in of_example))
    made = {_key(kernel): artifact for kernel, artifact in zip(kernels, compile_all(kernels), strict=True)}
    kernel_files.write(folder, made)
    files: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        key = _key(kernel)
        files[key] = {"template": kernel.template, "arch": kernel.architecture}
        if kernel.template != "rows":
            files[key]["config"], files[key]["graph"] = dict(kernel.config), kernel.graph.text()
    traces: list[dict[str, Any]] = []
    for _, specialisation, traced, _ in needed:
        entry = {**_plain(specialisation), "traced": _traced(traced)}
        other = dataclasses.replace(specialisation, columns=specialisation.columns + 16, k=specialisation.k and specialisation.k + 16)
        if specialisation.columns > 1 and _traced(function.traced(other)) == entry["traced"]:
            entry["columns"], entry["k"] = None, None  # any
        if entry not in traces:
            traces.append(entry)
    manifest = {
        "kind": "gemm",
        "operator": function.operator,
        "name": function.name,
        "parameters": function.signature.plain(),
        "gate": function.gate,
        "has_prologue": function.interface.has_prologue,
        "returns": function.returns,
        "traces": traces,
        "kernels": files,
    }
    return manifest, set(files)


class LoadedGemmFunction(GemmFunction):
    """What :func:`write` wrote."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self._exported = [({k: v for k, v in x.items() if k != "traced"}, _from_traced(x["traced"])) for x in manifest["traces"]]
        self._kernels = manifest["kernels"]
        signature = Signature.from_plain(manifest["parameters"])
        interface = GemmInterface(manifest["name"], signature, manifest["gate"], manifest["has_prologue"])
        self._define_gemm(f"{manifest['operator']}_exported", interface, manifest["returns"])
        self.__name__ = self.__qualname__ = manifest["name"]

    def _trace(self, specialisation: GemmSpecialisation) -> Traced:
        wanted = _plain(specialisation)
        # A vector of one number may be of one row.
        operands = [[x[0], VECTOR, x[2]] if x is not None and x[1] == ONE else x for x in wanted["operands"]]
        for call in (wanted, {**wanted, "operands": operands}):
            for exported, traced in self._exported:
                if exported in (call, {**call, "columns": None, "k": None}):
                    return traced
        shown = "; ".join(self._shown(exported) for exported, _ in self._exported)
        raise FuseError(f"{self.name}: a call with {self._shown(wanted)} was not exported; exported were {shown}")

    def _shown(self, what: dict[str, Any]) -> str:
        tensors = shown(self.interface.operands, what["operands"])
        constants = shown_constants(self.signature.constants, what["constants"])
        experts = ["experts"] if what["grouped"] else []
        return ", ".join([f"a {what['a']}", f"b {what['b']}", *experts, *tensors, *constants, shown_columns(what["columns"])])

    def choose_config(self, traced: Traced, config: GemmConfig, space: GemmSpace, arch: str) -> GemmConfig:
        """The one for the call, or another one that serves as well."""
        if _key(kernel_of(self.name, traced, config, arch)) in self._kernels:
            return config
        text = traced.first.text()
        others = []
        for x in self._kernels.values():
            if x["template"] != "rows" and x["arch"] == arch and x["graph"] == text:
                other = GemmConfig(**{name: tuple(value) if isinstance(value, list) else value for name, value in x["config"].items()})
                same = dataclasses.replace(
                    other, tile_m=config.tile_m, tile_n=config.tile_n, pingpong=config.pingpong, stages=config.stages,
                    cluster=config.cluster, vector=config.vector,
                )  # fmt: skip
                if same == config and config.vector % other.vector == 0:
                    others.append(other)
        if not others:
            raise FuseError(
                f"{self.name}: no exported kernel serves {arch} with {dataclasses.asdict(config)}: exported are kernels for "
                f"{', '.join(sorted({x['arch'] for x in self._kernels.values()}))}, with tensors aligned as in the examples"
            )
        return min(others, key=lambda x: (abs(x.tile_m - config.tile_m), abs(x.tile_n - config.tile_n), -x.vector))

    def artifact_of(self, kernel: Kernel) -> tuple[str, Artifact]:
        key = _key(kernel)
        if key not in self._kernels:
            raise FuseError(f"{self.name}: what {dict(kernel.config)} needs for {kernel.architecture} was not exported")
        return key, kernel_files.read(self.name, self.folder, key)
