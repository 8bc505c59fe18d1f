"""The functions of scores and of masks for a thread's elements: of each row, of each column, or of both, as far as values differ."""

from __future__ import annotations

import math
from typing import Any

from cutlass import Float32

from ..graph import BOOL, F32, I32, Graph, Node
from .attention_instructions import exp2
from .numbers import Evaluator, approximate, cast, constant, rounded

_LOG2_E = math.log2(math.e)


class Grid:
    """A value of the function for a thread's elements: of ``rows`` it has one for both of them or one each, of ``columns`` likewise.
    Values follow each other column by column, of each column row by row."""

    def __init__(self, values: list[Any], rows: bool, columns: bool):
        self.values, self.rows, self.columns = values, rows, columns

    def at(self, row: int, column: int) -> Any:
        return self.values[(column if self.columns else 0) * (2 if self.rows else 1) + (row if self.rows else 0)]


class Columns:
    """Positions of keys: ``first`` and some more, all of which float32 holds."""

    def __init__(self, first: Any, offsets: list[int]):
        self.first, self.offsets = first, offsets

    def __len__(self) -> int:
        return len(self.offsets)

    def position(self, i: int) -> Any:
        return self.first + self.offsets[i]


def lines_of(graph: Graph, of_columns: list[bool]) -> list[bool]:
    """Which values are linear in the key's position, or do not depend on the column at all. What is truncated is no line, and neither are
    products of integers, which may wrap."""
    lines: list[bool] = []
    for number, node in enumerate(graph.nodes):
        types = [graph.nodes[i].dtype for i in node.inputs]
        if not of_columns[number]:
            line = True
        elif node.op == "value":
            line = node.attrs[0] == "kv"
        elif node.op not in ("add", "sub", "mul", "neg", "cast") or node.dtype not in (F32, I32):
            line = False
        elif node.op == "mul":
            line = node.dtype == F32 and not all(of_columns[i] for i in node.inputs)
        else:
            line = BOOL not in types and (node.dtype == F32 or F32 not in types)
        lines.append(line and all(lines[i] for i in node.inputs))
    return lines


class GridEvaluator(Evaluator):
    """A graph's nodes as Grids; ``leaf`` gives those of values, ``gather`` loads of a captured tensor at indices. Floating-point values
    that are linear in the key's position are a product and a sum of each element: a number of the row times the column, plus another."""

    def __init__(self, graph: Graph, of_columns: list[bool], columns: Columns | None, leaf: Any, gather: Any):
        super().__init__(graph, 0, None, None)
        self.of_columns, self.columns, self.leaf_of, self.gather = of_columns, columns, leaf, gather
        self.is_line = lines_of(graph, of_columns)
        self.lines: dict[int, tuple[Grid, Grid | None]] = {}

    def value(self, number: int) -> Grid:
        if number not in self.known:
            self.known[number] = self._grid(number, self.graph.nodes[number])
        return self.known[number]

    def _grid(self, number: int, node: Node) -> Grid:
        if node.op == "constant":
            return Grid([constant(node.attrs[0], node.dtype)], False, False)
        if node.op == "value":
            return self.leaf_of(node)
        if node.dtype == F32 and self.of_columns[number] and self.is_line[number]:
            base, step = self.line(number)
            offsets = Grid([Float32(offset) for offset in self.columns.offsets], False, True)
            return self._each([base, step, offsets], lambda x: x[0] + x[1] * x[2])
        operands = [self.value(i) for i in node.inputs]
        types = [self.graph.nodes[i].dtype for i in node.inputs]
        if node.op == "round":
            return Grid(rounded(operands[0].values, types[0], node.dtype, node.attrs[0]), operands[0].rows, operands[0].columns)
        return self._each(operands, lambda x: self.gather(node, x) if node.op == "gather" else self._number(node, types, x))

    def _each(self, operands: list[Grid], function: Any) -> Grid:
        rows, columns = any(x.rows for x in operands), any(x.columns for x in operands)
        values = [
            function([x.at(row, column) for x in operands])
            for column in range(len(self.columns) if columns else 1)
            for row in range(2 if rows else 1)
        ]
        return Grid(values, rows, columns)

    def line(self, number: int) -> tuple[Grid, Grid | None]:
        """Of one that lines_of() says is a line: its value at the first column, and what each further column adds, or None where that is
        nothing."""
        if number not in self.lines:
            self.lines[number] = self._new_line(number, self.graph.nodes[number])
        return self.lines[number]

    def _new_line(self, number: int, node: Node) -> tuple[Grid, Grid | None]:
        if not self.of_columns[number]:
            return self.value(number), None
        if node.op == "value":
            return Grid([cast(self.columns.first, I32, node.dtype)], False, False), Grid([constant(1, node.dtype)], False, False)
        lines = [self.line(i) for i in node.inputs]
        types = [self.graph.nodes[i].dtype for i in node.inputs]
        if node.op == "mul":
            (base, step), (factor, _) = lines if lines[0][1] is not None else lines[::-1]
            return self._each([base, factor], lambda x: x[0] * x[1]), self._each([step, factor], lambda x: x[0] * x[1])
        bases = self._each([base for base, _ in lines], lambda x: self._number(node, types, x))
        steps = [step for _, step in lines]
        if None in steps:  # of add and sub
            one = steps[0] if steps[1] is None else self._each([steps[1]], lambda x: -x[0] if node.op == "sub" else x[0])
            return bases, one
        return bases, self._each(steps, lambda x: self._number(node, types, x))

    def _number(self, node: Node, types: list[str], x: list[Any]) -> Any:
        if node.op == "tanh":
            return approximate("tanh.approx", x[0])
        if node.op == "exp":
            return exp2(x[0] * Float32(_LOG2_E))
        if node.op == "exp2":
            return exp2(x[0])
        return self._scalar(node, types, x)
