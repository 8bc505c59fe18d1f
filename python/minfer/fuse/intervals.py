"""What a function of positions can be within a tile of queries and keys: integers between bounds, truth values that are known or not.

A mask that is known to be true in a whole tile needs no evaluation there, and one where it is known to be false is not visited. Bounds come
from interval arithmetic on the graph: comparisons, sums, products, quotients and remainders of positions, as causal and sliding windows,
prefixes and chunks have them. What is looked up by a position, and floating-point numbers, are not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .graph import BOOL, F32, Graph, Node

_LARGEST = 1 << 32  # bounds have 64 bits: integers beyond 32 bits, which a kernel's may wrap around at, are not known


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Of bounds, which are integers of 64 bits and truth values: Python's, or a kernel's."""

    least: Callable[[Any, Any], Any]
    most: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]
    integer: Callable[[int], Any]
    truth: Callable[[bool], Any]
    both: Callable[[Any, Any], Any]
    either: Callable[[Any, Any], Any]
    negate: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """low <= value <= high, and |value| <= size; of a truth value, low: it is true everywhere, high: it may be true somewhere."""

    low: Any
    high: Any
    size: int = 1


class Intervals:
    """Bounds of a graph's nodes. ``leaf`` gives those of values, by name, and ``exact`` those of a node that is one integer or truth value
    in the whole tile, or None."""

    def __init__(self, graph: Graph, arithmetic: Arithmetic, leaf: Callable[[str], Bounds | None], exact: Callable[[int], Bounds | None]):
        self.graph, self.a, self.leaf, self.exact = graph, arithmetic, leaf, exact
        self.known: dict[int, Bounds | None] = {}

    def of(self, number: int) -> Bounds | None:
        """None: anything."""
        if number not in self.known:
            node = self.graph.nodes[number]
            bounds = None if node.dtype == F32 else self.exact(number) or self._bounds(node)
            self.known[number] = None if bounds is None or bounds.size > _LARGEST else bounds
        return self.known[number]

    def _bounds(self, node: Node) -> Bounds | None:
        if node.op == "value":
            return self.leaf(node.attrs[0])
        if node.op == "constant":
            value = node.attrs[0]
            bound = self.a.truth(value) if node.dtype == BOOL else self.a.integer(value)
            return Bounds(bound, bound, abs(int(value)))
        if node.op in ("where", "and", "or", "xor", "not") and node.dtype == BOOL:
            return self._logic(node)
        operands = [self.of(i) for i in node.inputs]
        if node.op == "where":
            return self._where(operands)
        if any(x is None for x in operands):
            return None
        rule = getattr(self, f"_{node.op}", None)
        return None if rule is None else rule(node, *operands)

    # Truth values.

    def _logic(self, node: Node) -> Bounds | None:
        """Also where one operand is not known."""
        operands = [self.of(i) for i in node.inputs]
        unknown = Bounds(self.a.truth(False), self.a.truth(True))
        x = [unknown if bounds is None else bounds for bounds in operands]
        if all(bounds is None for bounds in operands):
            return None
        if node.op == "and":
            return Bounds(self.a.both(x[0].low, x[1].low), self.a.both(x[0].high, x[1].high))
        if node.op == "or":
            return Bounds(self.a.either(x[0].low, x[1].low), self.a.either(x[0].high, x[1].high))
        if node.op == "not":
            return Bounds(self.a.negate(x[0].high), self.a.negate(x[0].low))
        if node.op == "where":
            true = Bounds(self.a.both(x[0].low, x[1].low), self.a.both(x[0].high, x[1].high))
            opposite = Bounds(self.a.negate(x[0].high), self.a.negate(x[0].low))
            false = Bounds(self.a.both(opposite.low, x[2].low), self.a.both(opposite.high, x[2].high))
            low = self.a.either(self.a.either(true.low, false.low), self.a.both(x[1].low, x[2].low))
            return Bounds(low, self.a.either(true.high, false.high))
        return None

    def _lt(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return Bounds(x.high < y.low, x.low < y.high)

    def _le(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return Bounds(x.high <= y.low, x.low <= y.high)

    def _gt(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return self._lt(node, y, x)

    def _ge(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return self._le(node, y, x)

    def _eq(self, node: Node, x: Bounds, y: Bounds) -> Bounds | None:
        if self._is_truth(node):
            return None
        same = self.a.both(x.high <= y.low, y.high <= x.low)
        return Bounds(same, self.a.both(x.low <= y.high, y.low <= x.high))

    def _ne(self, node: Node, x: Bounds, y: Bounds) -> Bounds | None:
        equal = self._eq(node, x, y)
        return None if equal is None else Bounds(self.a.negate(equal.high), self.a.negate(equal.low))

    def _is_truth(self, node: Node) -> bool:
        return self.graph.nodes[node.inputs[0]].dtype == BOOL

    # Integers.

    def _add(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return Bounds(x.low + y.low, x.high + y.high, x.size + y.size)

    def _sub(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return Bounds(x.low - y.high, x.high - y.low, x.size + y.size)

    def _neg(self, node: Node, x: Bounds) -> Bounds:
        return Bounds(-x.high, -x.low, x.size)

    def _mul(self, node: Node, x: Bounds, y: Bounds) -> Bounds | None:
        if x.size * y.size > _LARGEST:
            return None
        products = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
        return Bounds(self._least(*products), self._most(*products), x.size * y.size)

    def _maximum(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return Bounds(self._most(x.low, y.low), self._most(x.high, y.high), max(x.size, y.size))

    def _minimum(self, node: Node, x: Bounds, y: Bounds) -> Bounds:
        return Bounds(self._least(x.low, y.low), self._least(x.high, y.high), max(x.size, y.size))

    def _abs(self, node: Node, x: Bounds) -> Bounds:
        return Bounds(self._most(x.low, -x.high, self.a.integer(0)), self._most(x.high, -x.low), x.size)

    def _floor_div(self, node: Node, x: Bounds, y: Bounds) -> Bounds | None:
        return None if self._divisor(node) is None else Bounds(x.low // y.low, x.high // y.low, x.size + 1)

    def _mod(self, node: Node, x: Bounds, y: Bounds) -> Bounds | None:
        divisor = self._divisor(node)
        if divisor is None:
            return None
        begin = x.low // y.low
        together = begin == x.high // y.low  # no multiple lies between
        start = begin * y.low
        low = self.a.choose(together, x.low - start, self.a.integer(0))
        return Bounds(low, self.a.choose(together, x.high - start, self.a.integer(divisor - 1)), divisor)

    def _divisor(self, node: Node) -> int | None:
        """A positive constant."""
        divisor = self.graph.nodes[node.inputs[1]]
        return divisor.attrs[0] if divisor.op == "constant" and divisor.attrs[0] > 0 else None

    def _cast(self, node: Node, x: Bounds) -> Bounds | None:
        return None if BOOL in (self.graph.nodes[node.inputs[0]].dtype, node.dtype) else x

    def _where(self, operands: list[Bounds | None]) -> Bounds | None:
        condition, x, y = operands
        if x is None or y is None:
            return None
        size = max(x.size, y.size)
        if condition is None:
            return Bounds(self._least(x.low, y.low), self._most(x.high, y.high), size)
        never = self.a.negate(condition.high)
        low = self.a.choose(condition.low, x.low, self.a.choose(never, y.low, self._least(x.low, y.low)))
        high = self.a.choose(condition.low, x.high, self.a.choose(never, y.high, self._most(x.high, y.high)))
        return Bounds(low, high, size)

    def _least(self, first: Any, *others: Any) -> Any:
        for x in others:
            first = self.a.least(first, x)
        return first

    def _most(self, first: Any, *others: Any) -> Any:
        for x in others:
            first = self.a.most(first, x)
        return first


PYTHON = Arithmetic(
    least=min,
    most=max,
    choose=lambda condition, x, y: x if condition else y,
    integer=int,
    truth=bool,
    both=lambda x, y: x and y,
    either=lambda x, y: x or y,
    negate=lambda x: not x,
)
