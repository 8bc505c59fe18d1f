"""A tile's scores: products of queries and keys, to which the function of scores and the mask are applied in their registers."""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ..graph import BOOL, I32
from .attention_functions import AttentionFunctions
from .attention_grid import Columns, Grid
from .attention_instructions import multiply_add_here
from .attention_shared import SharedMemory
from .attention_tiles import Place
from .numbers import REGISTERS, approximate

_LOG2_E = math.log2(math.e)
_INFINITY = float("inf")


class Scores:
    """A thread has two rows of products, r and r + 8, and two neighbouring columns of each eight: element 4 j + 2 row + e is in column
    8 j + 2 (lane % 4) + e."""

    def __init__(self, functions: AttentionFunctions, products: cute.Tensor, lane: Any, shared: SharedMemory | None = None):
        self.functions, self.config, self.products, self.lane, self.shared = functions, functions.config, products, lane, shared

    def modify(self, where: Place, queries: Any, known: dict[int, Grid], tile: Any, masked: bool, numbers: Any = None) -> None:
        """Scores are what the softmax takes; of a partial tile, -inf where a key is not seen. By two columns: values live shortly.
        ``numbers``: where those by key are."""
        c = self.config
        if self.functions.scores_are_products():
            if not masked:
                return
            self.cut(where.sk - tile * c.keys)
            if self.functions.mask < 0:
                return
        first = tile * c.keys + (self.lane % 4) * 2
        scale = self.functions.get("scale")
        by_key = [] if self.functions.scores_are_products() else self.functions.by_key(self.functions.inner)
        by_key = sorted({*by_key, *(self.functions.by_key(self.functions.mask) if masked else [])})
        for i in range(0, c.keys // 2, 4):
            columns = Columns(first, [2 * i, 2 * i + 1])
            scores = None if self.functions.scores_are_products() else [self.products[i + e] * scale for e in (0, 2, 1, 3)]
            evaluator = self.functions.evaluator(where, queries, columns, scores)
            evaluator.known.update(known)
            evaluator.known.update({number: self.pair_by_key(number, numbers, 2 * i) for number in by_key})
            if self.functions.cap is not None:
                capped = [approximate("tanh.approx", self.products[i + e] * self.functions.get("cap_inner")) for e in (0, 2, 1, 3)]
                evaluator.known[self.functions.inner] = Grid(capped, True, True)
            grid = None if self.functions.scores_are_products() else evaluator.value(self.functions.inner)
            seen = evaluator.value(self.functions.mask) if masked and self.functions.mask >= 0 else None
            for column in range(2):
                for row in range(2):
                    e = i + 2 * row + column
                    x = self.products[e] if grid is None else grid.at(row, column)
                    self.products[e] = x if seen is None else cutlass.select_(seen.at(row, column), x, Float32(-_INFINITY))
        if masked and not self.functions.scores_are_products():
            self.cut(where.sk - tile * c.keys)

    def pair_by_key(self, number: int, numbers: Any, column: int) -> Grid:
        """Of the thread's two columns."""
        dtype = self.functions.graph.nodes[number].dtype
        stored = REGISTERS[I32 if dtype == BOOL else dtype]
        pair = cute.make_rmem_tensor(2, stored)
        place = (self.lane % 4) * 2 + column
        cute.autovec_copy(self.shared.key_numbers(numbers, self.functions.key_places[number], stored, place, 2), pair)
        return Grid([pair[i] != 0 if dtype == BOOL else pair[i] for i in range(2)], False, True)

    @cute.jit
    def cut(self, keys: Int32):
        """Leaves ``keys`` keys of a tile."""
        if keys < self.config.keys:
            self.cut_columns(keys - (self.lane % 4) * 2)

    def cut_columns(self, end: Any) -> None:
        for i in range(self.config.keys // 2):
            self.products[i] = cutlass.select_(end > 8 * (i // 4) + i % 2, self.products[i], Float32(-_INFINITY))

    # A line, base + step * (key - first key of the tile), which the function adds to scores, as a bias of distances does: products are
    # accumulated onto what the columns add to the base, which is the same in all tiles, in units of products. No number is computed for a
    # score then, and these are as small as a tile is wide, however far the keys are: each of up to 8 MMAs cuts its sum off within 2^-23 of
    # them, together 2^-20 of what the line changes by over a tile. The base is added to the rows' maxima alone.

    def steps_of(self, where: Place, queries: Any, known: dict[int, Grid]) -> list[tuple[Any, Any]] | None:
        """Of the two rows, what a column and what the thread's first column add to a product."""
        if self.functions.line < 0:
            return None
        unit = cute.math.rcp(self.functions.get("scale"), approx=True)
        lane = Float32((self.lane % 4) * 2)
        _, steps = self.functions.line_of(where, queries, known, Int32(0))
        found = [(step * unit, step * unit * lane) for step in steps[: 1 if steps[0] is steps[1] else 2]]
        return [found[0], found[-1]]

    def bases_of(self, where: Place, queries: Any, known: dict[int, Grid], tile: Any) -> list[Any] | None:
        """Of the two rows, in units of log2."""
        if self.functions.line < 0:
            return None
        return [base * Float32(_LOG2_E * self.functions.outer) for base in self.functions.line_of(where, queries, known, tile)[0]]

    def prepare(self, steps: list[tuple[Any, Any]] | None) -> None:
        """What the next products are added to; scores are not needed any more."""
        if steps is not None:
            for i in range(self.config.keys // 2):
                step, first = steps[i // 2 % 2]
                self.products[i] = multiply_add_here(step, 8 * (i // 4) + i % 2, first)
