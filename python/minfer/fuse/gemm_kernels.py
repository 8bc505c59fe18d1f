"""The kernels of a fused GEMM: which configuration a call takes, and what is compiled for it."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import dtypes
from .compiler import Kernel
from .errors import FuseError
from .gemm_config import GemmConfig, Tile, choose, choose_portable, epilogue_vector, stages_of
from .gemm_interface import MULTIPLIED, GemmInterface, GemmSpace, GemmSpecialisation
from .gemm_matrices import b_major, misalignment
from .gemm_tracing import Traced
from .graph import FULL, ROW, Graph
from .launch import capability_of
from .row_config import RowConfig, configure, vector_width


def configure_gemm(
    interface: GemmInterface, traced: Traced, specialisation: GemmSpecialisation, space: GemmSpace, arguments: dict[str, Any], sms: int,
    arch: str,
) -> GemmConfig:  # fmt: skip
    """The kernel for a call on a GPU with ``sms`` SMs."""
    b = arguments["b"]
    major = b_major(b, MULTIPLIED[b.dtype])
    tile_k = 128 // b.element_size()
    k_tiles = -(-space.k // tile_k)
    if portable(arch):
        if b.dtype.itemsize != 2:
            raise FuseError(f"{interface.name}: for {arch} b must be bfloat16 or float16, got {b.dtype}")
        tile, stages = choose_portable(space.m, space.n, sms)
    else:
        tile = choose(space.m, space.n, k_tiles, major, interface.gate, space.experts, interface.has_prologue, sms)
        stages = stages_of(tile)
    config = _config(tile, major, interface.gate, traced, specialisation, space, arguments)
    return dataclasses.replace(config, stages=stages, portable=portable(arch))


def _config(
    tile: Tile, major: str, gate: str, traced: Traced, s: GemmSpecialisation, space: GemmSpace, arguments: dict[str, Any]
) -> GemmConfig:  # fmt: skip
    alignments = [space.columns] if any(y.extent == FULL and y.into < 0 for y in traced.graph.outputs) else []
    alignments += _alignments(traced.graph, traced.per_expert, arguments)
    return GemmConfig(
        tile.m, tile.n, tile.pingpong, stages_of(tile), tile.cluster, MULTIPLIED[s.b], major, gate,
        epilogue_vector(traced.graph, space.columns, alignments), space.experts > 0, traced.per_expert,
        **_prologue_config(traced, space, arguments, dtypes.storage_of(s.a)),
    )  # fmt: skip


def _prologue_config(traced: Traced, space: GemmSpace, arguments: dict[str, Any], stored: str) -> dict[str, Any]:
    if traced.prologue is None:
        return {}
    alignments = [space.k, *_alignments(traced.prologue, traced.prologue_per_expert, arguments)]
    return {
        "prologue": traced.prologue.text(), "prologue_per_expert": traced.prologue_per_expert,
        "prologue_vector": epilogue_vector(traced.prologue, 2, alignments), "a_stored": stored,
    }  # fmt: skip


def _alignments(graph: Graph, per_expert: tuple[int, ...], arguments: dict[str, Any]) -> list[int]:
    """Numbers that vectors of tensors of rows must divide."""
    alignments = []
    for i, x in enumerate(graph.inputs):
        if x.extent in (FULL, ROW):
            given = arguments[x.name]
            alignments.append(misalignment(given))
            if x.extent == FULL or i in per_expert:
                alignments.append(given.stride(0))
    return alignments


def portable(arch: str) -> bool:
    """Whether an architecture has the kernel of mma.sync."""
    return not arch.startswith("sm_90")


def kernel_of(name: str, traced: Traced, config: GemmConfig, arch: str) -> Kernel:
    _check_architecture(name, traced, arch)
    return Kernel.of("gemm_portable" if config.portable else "gemm", traced.first, config, arch, name)


def _check_architecture(name: str, traced: Traced, arch: str) -> None:
    number = capability_of(arch)
    if number < 80 or arch == "sm_90":
        raise FuseError(f"{name}: fused GEMMs are for sm_80 and later, and for compute capability 9.0 as sm_90a, got {arch}")
    graphs = [graph for graph in (traced.graph, traced.prologue) if graph is not None]
    storages = {x.storage for graph in graphs for x in (*graph.inputs, *graph.outputs)}
    storages |= {node.attrs[0] for graph in graphs for node in graph.nodes if node.op == "round"}
    if number < 89 and storages & {"e4m3", "e5m2"}:
        raise FuseError(f"{name}: FP8 needs sm_89 or later, got {arch}")


def rows_kernel_of(name: str, traced: Traced, m: int, tiles: int, arch: str) -> tuple[Kernel, RowConfig]:
    """What puts a row's partial reductions together."""
    assert traced.last is not None
    config = configure(traced.last, m, tiles, vector_width(traced.last, tiles, [tiles]), clusters=False)
    return Kernel.of("rows", traced.last, config, arch, f"{name}_rows"), config
