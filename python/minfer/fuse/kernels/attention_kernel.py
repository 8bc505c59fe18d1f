"""What the attention kernels have in common, whichever instructions multiply: functions, tiles, and queries that threads load."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..attention_config import CAP_NUMBERS, AttentionConfig, parameters
from ..graph import Graph
from .attention_functions import AttentionFunctions
from .attention_key_tiles import KeyTiles
from .attention_tiles import Place, TileScheduler
from .build import Type, parameter_types
from .numbers import STORAGES


def attention_parameter_types(graph: Graph, config: AttentionConfig) -> list[Type]:
    element = STORAGES[config.element]
    kinds = {
        "k_map": ("tensor_map", element), "v_map": ("tensor_map", element), "q": ("pointer", element),
        "q_map": ("tensor_map", element), "counter": ("pointer", Int32),
        "out": ("pointer", Float32 if config.split else element), "lse": ("pointer", Float32), "scale": ("scalar", Float32),
        **{name: ("scalar", Float32) for name in CAP_NUMBERS},
        "k": ("pointer", element), "v": ("pointer", element), "k_stride": ("scalar", Int64), "v_stride": ("scalar", Int64),
        "q_stride": ("scalar", Int64), "out_stride": ("scalar", Int64), "captured_stride": ("scalar", Int64),
        "table_stride": ("scalar", Int64), "table": ("pointer", Int32), "lengths": ("pointer", Int32), "some_count": ("pointer", Int32),
        "some_index": ("pointer", Int32), "all_count": ("pointer", Int32), "all_index": ("pointer", Int32),
    }  # fmt: skip
    return [
        parameter_types(graph, [("address", i)])[0] if name == "captured" else kinds.get(name, ("scalar", Int32))
        for name, i, _ in parameters(graph, config)
    ]


class AttentionKernel:
    """A kernel while it is traced. ``values`` are its parameters, by attention_config.parameters()."""

    def __init__(self, graph: Graph, config: AttentionConfig, values: dict[tuple[str, int, int], Any]):
        self.config = config
        self.element = STORAGES[config.element]
        self.functions = AttentionFunctions(graph, config, values)
        self.tiles = TileScheduler(config, values)
        self.key_tiles = KeyTiles(self.functions, self.tiles)

    def get(self, name: str, i: int = 0) -> Any:
        return self.functions.get(name, i)

    def fetch(self, where: Place, q_base: Any) -> None:
        """Starts copies of a warpgroup's rows of a tile's queries: thread t has the vectors t, t + 128, ..."""
        c = self.config
        vectors = c.head_dim // 8
        column = self.thread % vectors * 8
        start = Int64(where.batch) * self.get("q_stride", 0) + Int64(column)
        inside = column < self.get("head_dim")
        for i in range(64 * vectors // 128):
            row = self.group * 64 + self.thread % 128 // vectors + i * (128 // vectors)
            query, head = self.tiles.row_of(where, row)
            valid = inside & (query < where.sq)
            offset = start + Int64(head) * self.get("q_stride", 1) + Int64(query) * self.get("q_stride", 2)
            source = self.get("q").toint() + cutlass.select_(valid, offset, Int64(0)) * 2
            target = q_base + (column // 64) * (c.rows * 128) + row * 128 + ((column // 8 % 8) ^ (row % 8)) * 16
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[target, source, cutlass.select_(valid, Int32(16), Int32(0))],
            )
