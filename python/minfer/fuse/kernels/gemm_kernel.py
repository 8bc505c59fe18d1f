"""What the GEMM kernels have in common, whichever instructions multiply: operands, tiles, and what is around the products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from ..gemm_config import GemmConfig, parameters
from ..graph import REDUCTIONS, Graph
from .build import Type, parameter_types
from .gemm_accumulators import Accumulators
from .gemm_epilogue import Epilogue
from .gemm_tiles import TileScheduler
from .numbers import REGISTERS, STORAGES


def gemm_parameter_types(graph: Graph, config: GemmConfig) -> list[Type]:
    prologue: Any = config.prologue_graph()
    own = {
        "map": ("tensor_map", cutlass.BFloat16), "a": ("pointer", STORAGES[config.a_stored or config.a]),
        "b": ("pointer", STORAGES[config.a]), "lda": ("scalar", Int64), "ldb": ("scalar", Int64), "ldb_expert": ("scalar", Int64),
        "offsets": ("pointer", Int32),
    }  # fmt: skip
    types: list[Type] = []
    for kind, i in parameters(graph, config):
        if kind in own:
            types.append(own[kind])
        elif kind == "partial":
            types.append(("pointer", REGISTERS[graph.nodes[i].dtype]))
        elif kind.startswith("a_"):  # of the prologue
            types += parameter_types(prologue, [(kind.removeprefix("a_"), i)])
        else:
            types += parameter_types(graph, [(kind, i)])
    return types


class GemmKernel(ABC):
    """A kernel while it is traced. ``values`` are its parameters, by gemm_config.parameters()."""

    def __init__(self, graph: Graph, config: GemmConfig, values: dict[tuple[str, int], Any]):
        self.graph, self.config, self.values = graph, config, values
        self.prologue = config.prologue_graph()
        self.operand = STORAGES[config.a]
        self.m, self.n, self.k_tiles, self.n_tiles = (values[name, 0] for name in ("m", "n", "k_tiles", "n_tiles"))
        self.reductions = [i for i, node in enumerate(graph.nodes) if node.op in REDUCTIONS]

    def enter(self, lane: Any, warp: Any, group: Any, rank: Any) -> None:
        """Of this thread: its lane, its warp of a warpgroup and its warpgroup of those that multiply; its CTA of the cluster."""
        self.lane, self.warp, self.group = lane, warp, group
        self.tiles = TileScheduler(self.config, self.values, rank)

    def accumulate_in(self, acc: cute.Tensor) -> None:
        """``acc`` is ((2, 2, tile_n / 8), MMA_M, 1)."""
        self.acc, self.accumulators = acc, Accumulators(self.config, acc, self.lane)

    def first_row(self) -> Any:
        """Of a thread, in the tile; others are 8 behind it, and behind the 64 rows of each warpgroup that shares the tile."""
        return self.warp * 16 + self.lane // 4 + (self.group * 64 if self.config.sharing == 2 else 0)

    @abstractmethod
    def a_place(self, stage: Any) -> Any:
        """The address of A's tile in a stage of the ring."""

    @cute.jit
    def store_zeros(self, row: Int32, n_tile: Int32, limit: Int32):
        """Of a tile behind the experts' rows."""
        Epilogue(self, row, n_tile, limit, Int32(0)).run_zeros()


def swizzled(row: Any, piece: Any, row_bytes: int) -> Any:
    """Where a row's piece of 16 bytes lies in shared memory, in pieces from the row's start, with TMA's swizzles of 128 and of 64 bytes."""
    return piece ^ (row % 8 if row_bytes == 128 else row // 2 % 4)
