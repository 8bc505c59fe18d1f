"""Which tiles of keys a tile of queries visits, and what they are to its rows: by a block mask's lists, or by bounds of the mask's
positions (intervals.py)."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..graph import BOOL
from ..intervals import Arithmetic, Bounds, Intervals
from .attention_functions import AttentionFunctions
from .attention_tiles import Place, TileScheduler

# What a tile of keys is to a warpgroup's rows.
NOTHING, PARTIAL, FULL, EMPTY = 0, 1, 2, 3

_BOUNDS = Arithmetic(
    least=lambda x, y: cutlass.select_(x < y, x, y),
    most=lambda x, y: cutlass.select_(x > y, x, y),
    choose=cutlass.select_,
    integer=Int64,
    truth=Boolean,
    both=lambda x, y: x & y,
    either=lambda x, y: x | y,
    negate=lambda x: x ^ Boolean(True),
)


class KeyTiles:
    def __init__(self, functions: AttentionFunctions, tiles: TileScheduler):
        self.functions, self.tiles, self.config = functions, tiles, functions.config

    def kind_of(self, where: Place, tile: Any, end: Any, first_row: int = 0, rows: int | None = None) -> Any:
        """What a tile of keys is to some rows of a tile of queries."""
        c = self.config
        first = tile * c.keys
        inside = first + c.keys <= where.sk
        begin, last = self.tiles.queries_of(where, first_row, rows or c.rows)
        valid = (tile < end) & (begin <= last)
        if self.functions.mask < 0 or c.listed:
            return cutlass.select_(valid, cutlass.select_(inside, Int32(FULL), Int32(PARTIAL)), Int32(EMPTY))
        bounds = {
            "q": Bounds(Int64(begin), Int64(last), 1 << 24),
            "kv": Bounds(Int64(first), Int64(cutlass.min(first + (c.keys - 1), where.sk - 1)), 1 << 24),
        }
        numbers = self.functions.evaluator(where, None, None, None)

        def exact(number: int) -> Bounds | None:
            node = self.functions.graph.nodes[number]
            if self.functions.of_columns[number] or self.functions.of_rows[number] or node.op == "constant":
                return None
            value = numbers.value(number).values[0]
            return Bounds(value, value) if node.dtype == BOOL else Bounds(Int64(value), Int64(value), 1 << 31)

        if c.packed:
            group = self.tiles.get("group")
            head = Int64(where.head * group)
            bounds["h"] = Bounds(head, head + Int64(group - 1), 1 << 24)
        found = Intervals(self.functions.graph, _BOUNDS, bounds.get, exact).of(self.functions.mask)
        if found is None:
            return cutlass.select_(valid, Int32(PARTIAL), Int32(EMPTY))
        kind = cutlass.select_(found.low & inside, Int32(FULL), Int32(PARTIAL))
        return cutlass.select_(valid & found.high, kind, Int32(EMPTY))

    def kinds_of(self, where: Place, tile: Any, end: Any) -> tuple[Any, Any]:
        """What a tile of keys is to each warpgroup, two bits each, and to all together: full where it is full to all that have queries."""
        kinds, partial, visited = Int32(0), Boolean(False), Boolean(False)
        for group in range(self.config.consumers):
            kind = self.kind_of(where, tile, end, 64 * group, 64)
            begin, last = self.tiles.queries_of(where, 64 * group, 64)
            kinds = kinds | (kind << (2 * group))
            partial = partial | ((kind != FULL) & (begin <= last))
            visited = visited | (kind != EMPTY)
        together = cutlass.select_(partial, Int32(PARTIAL), Int32(FULL))
        return kinds, cutlass.select_(visited, together, Int32(EMPTY))

    def listed_tile(self, where: Place, place: Any, some: Any, count: Any) -> tuple[Any, Any]:
        """Of a block mask's lists, of ``some`` partial blocks and then of full ones, ``count`` together: the tile of keys at a place, and
        its kind as above."""
        c = self.config
        entry = place if c.listed_k == 1 else place // c.listed_k
        whole = entry >= some
        inside = cutlass.min(cutlass.select_(whole, entry - some, entry), self.tiles.get("list_length") - 1)
        start = Int64(self.list_row(where)) * Int64(self.tiles.get("list_length"))
        index = self.listed(whole, "index", start + Int64(cutlass.max(inside, Int32(0))))
        tiles = (where.sk + (c.keys - 1)) // c.keys
        tile = index if c.listed_k == 1 else index * c.listed_k + (place - entry * c.listed_k)
        valid = (entry < count) & (index >= 0) & (index < tiles) & (tile < tiles)
        kind = cutlass.select_(whole & (tile * c.keys + c.keys <= where.sk), Int32(FULL), Int32(PARTIAL))
        return tile, cutlass.select_(valid, kind, Int32(EMPTY))

    def listed(self, whole: Any, what: str, place: Any) -> Any:
        """A number of the list of full or of partial blocks."""
        address = cutlass.select_(whole, self.tiles.get(f"all_{what}").toint(), self.tiles.get(f"some_{what}").toint()) + place * 4
        return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(1))[0]

    def list_row(self, where: Place) -> Any:
        """The row of a block mask's lists: of the batch, the head and the block of queries."""
        block = where.block if self.config.listed_q == 1 else where.block // self.config.listed_q
        row = where.batch * self.tiles.get("list_batch") + where.head * self.tiles.get("list_head")
        return row + cutlass.min(block, self.tiles.get("list_rows") - 1)

    def list_counts(self, where: Place) -> tuple[Any, Any]:
        """How many partial blocks are listed, and how many of both kinds."""
        row, most = Int64(self.list_row(where)), self.tiles.get("list_length")
        some, whole = (self.listed(Boolean(kind), "count", row) for kind in (False, True))
        some, whole = (cutlass.max(cutlass.min(count, most), Int32(0)) for count in (some, whole))
        return some, some + whole
