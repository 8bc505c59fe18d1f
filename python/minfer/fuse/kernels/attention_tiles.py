"""The tile scheduler of attention kernels: which queries of which head and sequence, and which part of the keys, a number stands for."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from ..attention_config import AttentionConfig
from .numbers import pointer_at

PLACE = 8  # words of a published tile of queries: head, batch, block, part, keys


class Place:
    """Where a tile of queries is, as numbers of the kernel."""

    def __init__(self, **numbers: Any):
        self.__dict__.update(numbers)


class TileScheduler:
    """``values`` are the kernel's parameters."""

    def __init__(self, config: AttentionConfig, values: dict[tuple[str, int, int], Any]):
        self.config, self.values = config, values

    def get(self, name: str) -> Any:
        return self.values[name, 0, 0]

    def count(self) -> Any:
        """Of all tiles."""
        return self.get("tiles") * self.get("walk_heads") * self.get("batch") * self.get("parts")

    def locate(self, tile: Any) -> Place:
        """Sections of heads, whose keys and values the L2 cache holds, follow each other. In a section the last queries of all heads come
        first: with a causal mask they have the most keys."""
        heads, batch, tiles = self.get("walk_heads"), self.get("batch"), self.get("tiles")
        size = self.get("section")
        section = tile // (size * tiles)
        within = tile - section * (size * tiles)
        size = cutlass.min(size, heads * batch * self.get("parts") - section * size)
        block = within // size
        number = section * self.get("section") + (within - block * size)
        rest = number // heads
        head = number - rest * heads
        b, part = rest, Int32(0)
        if self.config.split:
            part = rest // batch
            b = rest - part * batch
        block = tiles - 1 - block
        sk = self.get("sk")
        if self.config.paged:
            length = cute.make_tensor(pointer_at(self.get("lengths"), b, "i32", 4), cute.make_layout(1))[0]
            most = self.get("table_columns") * self.get("page_size")
            sk = cutlass.max(cutlass.min(length, most), Int32(0))
        return self.place_of(head, b, block, part, sk)

    def place_of(self, head: Any, b: Any, block: Any, part: Any, sk: Any) -> Place:
        sq = self.get("sq")
        kv_head = head if self.config.packed else head // self.get("group")
        return Place(
            head=head, batch=b, block=block, part=part, sk=sk, sq=sq, kv_head=kv_head, first=sk - sq if self.config.paged else Int32(0)
        )

    def row_of(self, where: Place, row: Any) -> tuple[Any, Any]:
        """The query and the query head of a row of the tile."""
        row = where.block * self.config.rows + row
        if not self.config.packed:
            return row, where.head
        group = self.get("group")
        query = row // group
        return query, where.head * group + (row - query * group)

    def keys_of(self, where: Place) -> tuple[Any, Any]:
        """The first tile of keys of the part, and the one behind its last."""
        tiles = (where.sk + (self.config.keys - 1)) // self.config.keys
        if not self.config.split:
            return Int32(0), tiles
        parts = self.get("parts")
        return tiles * where.part // parts, tiles * (where.part + 1) // parts

    def queries_of(self, where: Place, first_row: int, rows: int) -> tuple[Any, Any]:
        """The first and last query of rows of a tile, as positions; behind one another where the rows are none of queries."""
        c = self.config
        begin = where.block * c.rows + first_row
        end = begin + (rows - 1)
        if c.packed:
            group = self.get("group")
            begin, end = begin // group, end // group
        return begin + where.first, cutlass.min(end, where.sq - 1) + where.first

    def read(self, record: cute.Tensor) -> Place:
        """A tile as its record has it, which says the same to all lanes."""
        numbers = cute.make_rmem_tensor(PLACE, Int32)
        cute.autovec_copy(record, numbers)
        return self.place_of(*(cute.arch.make_warp_uniform(numbers[i]) for i in range(5)))
