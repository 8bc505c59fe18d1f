"""The tile scheduler of GEMM kernels: which rows and columns of the output a tile's number stands for.

Without experts, tiles lie in bands of rows, and in these column after column, so that CTAs that run at a time load nearly a square. The
tiles of experts follow each other, expert after expert; the rows behind the last expert's are an expert without a matrix.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from ..gemm_config import GemmConfig


class TileScheduler:
    """``values`` are the kernel's parameters, ``rank`` the CTA's number in its cluster, whose CTAs have tiles below each other."""

    def __init__(self, config: GemmConfig, values: dict[tuple[str, int], Any], rank: Any):
        self.config, self.values, self.rank = config, values, rank
        self.m, self.m_tiles, self.n_tiles = (values[name, 0] for name in ("m", "m_tiles", "n_tiles"))

    @cute.jit
    def count(self):
        """Of tiles."""
        total = self.m_tiles * self.n_tiles
        if cutlass.const_expr(self.config.grouped):
            total, first = Int32(0), Int32(0)
            for expert in cutlass.range(self.values["experts", 0] + 1, unroll=1):  # each has its own
                last = cutlass.max(self.end_of(expert), first)
                total = total + self.tiles_of(first, last)
                first = last
        return total

    def begin(self) -> tuple[Any, Any, Any, Any]:
        """The first expert: the tiles in front of it, its number, its first row and the row behind its last one."""
        if not self.config.grouped:
            return Int32(0), Int32(0), Int32(0), Int32(0)
        return Int32(0), Int32(0), Int32(0), self.end_of(Int32(0))

    @cute.jit
    def place(self, tile: Int32, before: Int32, expert: Int32, first: Int32, last: Int32):
        """A tile's first row, its number along n and the row behind its last one; and its expert, as begin() has it, which is looked for
        from the one of an earlier tile on."""
        c = self.config
        row, n_tile, limit = Int32(0), Int32(0), self.m
        if cutlass.const_expr(c.grouped):
            while tile >= before + self.tiles_of(first, last):
                before = before + self.tiles_of(first, last)
                expert = expert + 1
                first = last
                last = cutlass.max(self.end_of(expert), first)
            row, n_tile = self.place_in_expert(tile - before, first, last)
            limit = last
        else:
            m_tile, n_tile = self.place_in_band(tile)
            row = (m_tile * c.cluster + self.rank) * c.tile_m
        return row, n_tile, limit, before, expert, first, last

    def place_in_band(self, tile: Any) -> tuple[Any, Any]:
        """A tile's number along m and n."""
        band = self.values["band", 0]
        per_band = band * self.n_tiles
        number = tile // per_band
        first = number * band
        height = cutlass.min(self.m_tiles - first, band)
        rest = tile - number * per_band
        n_tile = rest // height
        return first + (rest - n_tile * height), n_tile

    def end_of(self, expert: Any) -> Any:
        """The row behind an expert's, in 0 .. m; m behind all of them."""
        experts = self.values["experts", 0]
        value = cute.make_tensor(self.values["offsets", 0] + cutlass.min(expert, experts - 1), cute.make_layout(1))[0]
        return cutlass.select_(expert < experts, cutlass.min(cutlass.max(value, Int32(0)), self.m), self.m)

    def tiles_of(self, first: Any, last: Any) -> Any:
        c = self.config
        return (last - first + (c.tile_m - 1)) // c.tile_m * self.n_tiles

    def place_in_expert(self, tile: Any, first: Any, last: Any) -> tuple[Any, Any]:
        c = self.config
        height = (last - first + (c.tile_m - 1)) // c.tile_m
        n_tile = tile // height
        return first + (tile - n_tile * height) * c.tile_m, n_tile

    def has_matrix(self, expert: Any) -> Any:
        return expert < self.values["experts", 0]
