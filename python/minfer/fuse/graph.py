"""What a traced function computes: a graph of elementwise operations, reductions over a row and look-ups, in a few types of numbers.

It knows nothing of torch's operators, of shapes other than "how far a value extends", or of the kernel that evaluates it. It is plain data:
its canonical text is what compiled kernels are found by, and it goes into exported artefacts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

# Types that values have in registers. Floating-point numbers are float32 whatever the tensors hold.
F32, I32, I64, BOOL = "f32", "i32", "i64", "bool"

# How far a value extends: over nothing, over the columns (the same in every row), over the rows (the same in every column), over both.
SCALAR, ROW, COLUMN, FULL = "scalar", "row", "column", "full"
_DOWN = {SCALAR: False, ROW: False, COLUMN: True, FULL: True}
_ACROSS = {SCALAR: False, ROW: True, COLUMN: False, FULL: True}

UNARY = frozenset(
    "neg abs exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tanh erf floor ceil round_even trunc isnan not"
    " bits from_bits".split()
)
BINARY = frozenset("add sub mul div floor_div mod pow maximum minimum and or xor shl shr lt le gt ge eq ne".split())
TERNARY = frozenset(["where", "fma"])
REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])
COMPARISONS = frozenset("lt le gt ge eq ne".split())
# Elementwise operations that cost more than reading a number again: worth a register from one pass over a row to the next.
COSTLY = frozenset("exp exp2 expm1 log log2 log1p sin cos tanh erf pow div rsqrt sqrt reciprocal philox mod floor_div".split())
# What keeps the relative error of one operand, or adds that of a rounding to it; and tensors whose rounding is coarse, by units of 2^-8 and
# more.
_SCALING = frozenset(["neg", "abs", "mul", "div", "round"])
_COARSE = frozenset(["bf16", "e4m3", "e5m2"])


def joined(extents: Iterable[str]) -> str:
    """The extent of an elementwise result."""
    down = across = False
    for extent in extents:
        down, across = down or _DOWN[extent], across or _ACROSS[extent]
    return {(False, False): SCALAR, (False, True): ROW, (True, False): COLUMN, (True, True): FULL}[down, across]


@dataclasses.dataclass(frozen=True)
class Node:
    """A value. ``op`` is a name of the sets above, or

    ``input``     attrs (number,): an argument's element
    ``value``     attrs (name,): a value that the kernel has, an accumulator or an index
    ``constant``  attrs (number,)
    ``cast``      to ``dtype``
    ``round``     attrs (storage,): to what a tensor of that type would hold, and back
    ``gather``    attrs (number,): an argument's element at the indices that the inputs are
    ``bits``      of an f32, as an i32; ``from_bits`` the other way
    ``philox``    attrs (word,): a word of the generator for (seed, row, column), as i32
    """

    op: str
    inputs: tuple[int, ...]
    dtype: str
    extent: str
    attrs: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument: ``storage`` is its torch dtype's name. A ``rank`` of -1 is a tensor that extends as ``extent`` says; others are looked
    up in by so many indices. ``by_value``: the number itself is a parameter of the kernel, from a 0-dim CPU tensor."""

    name: str
    storage: str
    extent: str
    rank: int = -1
    by_value: bool = False


@dataclasses.dataclass(frozen=True)
class Output:
    """A result: of ``node``, as ``storage``. ``squeezed``: a column without its last mode. ``into``: the argument that it is stored in, or
    -1. ``index``: the node that says in which row it is stored, or -1: the row that it was computed in."""

    node: int
    storage: str
    extent: str
    squeezed: bool = False
    into: int = -1
    index: int = -1


@dataclasses.dataclass(frozen=True)
class Graph:
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def text(self) -> str:
        """Canonical: equal functions have equal texts."""
        return json.dumps(self.plain(), separators=(",", ":"), sort_keys=True)

    def plain(self) -> dict[str, Any]:
        def number(value: Any) -> Any:
            return {"float": value.hex() if math.isfinite(value) else str(value)} if isinstance(value, float) else value

        return {
            "inputs": [dataclasses.asdict(x) for x in self.inputs],
            "nodes": [[x.op, list(x.inputs), x.dtype, x.extent, [number(value) for value in x.attrs]] for x in self.nodes],
            "outputs": [dataclasses.asdict(x) for x in self.outputs],
        }

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Graph:
        def number(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            text = value["float"]
            return float.fromhex(text) if "x" in text else float(text)

        nodes = tuple(
            Node(op, tuple(inputs), dtype, extent, tuple(map(number, attrs))) for op, inputs, dtype, extent, attrs in plain["nodes"]
        )
        return Graph(tuple(Input(**x) for x in plain["inputs"]), nodes, tuple(Output(**x) for x in plain["outputs"]))

    def has_reductions(self) -> bool:
        return any(node.op in REDUCTIONS for node in self.nodes)

    def depths(self) -> list[int]:
        """For each node, after how many reductions in a row it is known."""
        depths: list[int] = []
        for node in self.nodes:
            depth = max((depths[i] for i in node.inputs), default=0)
            depths.append(depth + (node.op in REDUCTIONS))
        return depths

    def coarse_tanhs(self) -> frozenset[int]:
        """The tanh nodes of which a relative error of 2^-11 is little beside the rounding that follows: they are only multiplied or divided
        by what has none of them, and are then stored with 8 bits of mantissa or fewer."""
        fine = {x.node for x in self.outputs if x.storage not in _COARSE} | {x.index for x in self.outputs}
        scaled: list[bool] = []  # whether a node is a multiple of a tanh
        for node in self.nodes:
            factors = sum(scaled[i] for i in node.inputs)
            scaled.append(node.op == "tanh" or (node.op in _SCALING and factors == 1))
        for i in reversed(range(len(self.nodes))):  # users come behind what they use
            node = self.nodes[i]
            if i in fine or not scaled[i] or node.op == "tanh":
                fine.update(node.inputs)
        return frozenset(i for i, node in enumerate(self.nodes) if node.op == "tanh" and i not in fine)


class Builder:
    """A graph that grows. Equal nodes are one node, and operations on constants are done at once by the caller."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self._known: dict[Node, int] = {}

    def add(self, node: Node) -> int:
        key = node
        if any(isinstance(value, float) for value in node.attrs):  # 0.0 == -0.0, nan != nan
            key = dataclasses.replace(node, attrs=tuple(value.hex() if isinstance(value, float) else value for value in node.attrs))
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]

    def build(self) -> Graph:
        """Without the nodes that no result needs."""
        needed: set[int] = set()
        stack = [x.node for x in self.outputs] + [x.index for x in self.outputs if x.index >= 0]
        while stack:
            i = stack.pop()
            if i not in needed:
                needed.add(i)
                stack += self.nodes[i].inputs
        place = {old: new for new, old in enumerate(sorted(needed))}
        nodes = tuple(dataclasses.replace(self.nodes[i], inputs=tuple(place[j] for j in self.nodes[i].inputs)) for i in sorted(needed))
        outputs = tuple(dataclasses.replace(x, node=place[x.node], index=place.get(x.index, -1)) for x in self.outputs)
        return Graph(tuple(self.inputs), nodes, outputs)
