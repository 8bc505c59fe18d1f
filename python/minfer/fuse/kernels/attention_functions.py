"""The function of scores and the mask of an attention kernel: what is known of them while it is traced, and their values.

Ways of their own: a positive factor at the end is left to the exponent, a line over the keys' positions that is added is what products are
accumulated onto (attention_scores.py), and a soft cap is a polynomial where scores are small (attention_soft_cap.py).
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64

from ..attention_config import AttentionConfig, dependent, looked_up_by_key, outer_factor, soft_cap
from ..graph import F32, I32, Graph, Node
from .attention_grid import Columns, Grid, GridEvaluator, lines_of
from .attention_tiles import Place
from .numbers import cast, from_storage, load_vector

_LOG2_E = math.log2(math.e)


class AttentionFunctions:
    """``values`` are the kernel's parameters."""

    def __init__(self, graph: Graph, config: AttentionConfig, values: dict[tuple[str, int, int], Any]):
        self.graph, self.config, self.values = graph, config, values
        self.score = graph.outputs[0].node if config.scores else -1
        self.mask = graph.outputs[-1].node if config.masks else -1
        self.outer, self.inner = outer_factor(graph, self.score) if config.scores else (1.0, -1)
        self.cap = soft_cap(graph, config)
        self.of_columns = dependent(graph, "kv", "score")
        self.line, self.line_sign = self._added_line()
        self.of_rows = dependent(graph, "q", *(["h"] if config.packed else []))
        self.key_places = self._key_places()

    def _key_places(self) -> dict[int, int]:
        """Values that the producer looks up for each key of a tile, with the words of a key in front of each."""
        places, words = {}, 0
        if self.config.key_words:
            for number, its in looked_up_by_key(self.graph, self.config.packed).items():
                places[number] = words
                words += its
        return places

    def by_key(self, number: int) -> list[int]:
        """Those of key_places that a value needs."""
        found, seen = [], set()
        left = [number] if number >= 0 else []
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            if number in self.key_places:
                found.append(number)
            else:
                left += self.graph.nodes[number].inputs
        return sorted(found)

    def _added_line(self) -> tuple[int, int]:
        """A value that is linear in the key's position and all that the function adds to the score, with its sign, or -1."""
        if self.inner < 0:
            return -1, 0
        node = self.graph.nodes[self.inner]
        if node.op not in ("add", "sub") or self.config.portable:
            return -1, 0
        lines = lines_of(self.graph, self.of_columns)
        for score, line in ((0, 1), (1, 0)) if node.op == "add" else ((0, 1),):
            other, number = self.graph.nodes[node.inputs[score]], node.inputs[line]
            is_line = self.of_columns[number] and lines[number] and self.graph.nodes[number].dtype == F32
            if other.op == "value" and other.attrs[0] == "score" and is_line:
                return number, 1 if node.op == "add" else -1
        return -1, 0

    def get(self, name: str, i: int = 0, mode: int = 0) -> Any:
        return self.values[name, i, mode]

    def evaluator(self, where: Place, queries: Any, columns: Columns | None, scores: Any) -> GridEvaluator:
        """``queries``: of the two rows: position and head; ``scores``: column by column, of each column row by row."""

        def leaf(node: Node) -> Grid:
            name = node.attrs[0]
            if name == "score":
                return Grid(scores, True, True)
            if name == "b":
                grid = Grid([where.batch], False, False)
            elif name == "h":
                grid = Grid([head for _, head in queries], True, False) if self.config.packed else Grid([where.head], False, False)
            elif name == "q":
                grid = Grid([position for position, _ in queries], True, False)
            else:
                grid = Grid([columns.position(i) for i in range(len(columns))], False, True)
            return Grid([cast(x, I32, node.dtype) for x in grid.values], grid.rows, grid.columns)

        return GridEvaluator(self.graph, self.of_columns, columns, leaf, self.gather)

    def gather(self, node: Node, indices: list[Any]) -> Any:
        """A number of a captured tensor: indices count from the end where they are negative, and are clamped to what there is."""
        i = node.attrs[0]
        storage = self.graph.inputs[i].storage
        place = Int64(0)
        for mode, index in enumerate(indices):
            size = self.get("captured_size", i, mode)
            index = index.to(Int32)
            index = cutlass.select_(index < 0, index + size, index)
            index = cutlass.min(cutlass.max(index, Int32(0)), size - 1)
            place = place + Int64(index) * self.get("captured_stride", i, mode)
        return from_storage(load_vector(self.get("captured", i), place, 1, storage), 1, node.dtype, storage)[0]

    def known_of_rows(self, where: Place, queries: Any) -> dict[int, Grid]:
        """Values that do not depend on the column, and that others need which do."""
        evaluator = self.evaluator(where, queries, None, None)
        needed = {i for number, node in enumerate(self.graph.nodes) if self.of_columns[number] for i in node.inputs}
        for number in sorted(needed):
            if not self.of_columns[number] and self.graph.nodes[number].op != "constant":
                evaluator.value(number)
        return evaluator.known

    def line_of(self, where: Place, queries: Any, known: dict[int, Grid], tile: Any) -> tuple[list[Any], list[Any]]:
        """Of the two rows, base and step."""
        evaluator = self.evaluator(where, queries, Columns(tile * self.config.keys, [0]), None)
        evaluator.known.update(known)
        base, step = evaluator.line(self.line)
        if self.line_sign < 0:
            base, step = (Grid([-y for y in x.values], x.rows, x.columns) for x in (base, step))
        return tuple([x.at(row, 0) for row in range(2)] for x in (base, step))

    def scores_are_products(self) -> bool:
        """Whether the function multiplies scores by a constant, if it does anything but what was added before."""
        if self.score < 0 or self.line >= 0:
            return True
        node = self.graph.nodes[self.inner]
        return node.op == "value" and node.attrs[0] == "score"

    def factor(self) -> Any:
        """What scores are multiplied by before they are exponents of two: with a positive factor at the end of the function in it."""
        factor = Float32(_LOG2_E * self.outer)
        return self.get("scale") * factor if self.scores_are_products() else factor
