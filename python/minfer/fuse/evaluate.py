"""A graph's results by torch: what fused functions are on a CPU, and what kernels are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .dtypes import rounded
from .graph import BOOL, COLUMN, F32, FULL, I32, I64, ROW, Graph, Node

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
    "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos,
    "tanh": torch.tanh, "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil, "round_even": torch.round, "trunc": torch.trunc,
    "isnan": torch.isnan, "not": torch.logical_not,
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floor_div": torch.floor_divide, "mod": torch.remainder,
    "pow": torch.pow, "maximum": torch.maximum, "minimum": torch.minimum, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip
_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "reduce_sum": lambda x: x.sum(-1, keepdim=True, dtype=x.dtype),
    "reduce_max": lambda x: x.amax(-1, keepdim=True),
    "reduce_min": lambda x: x.amin(-1, keepdim=True),
}


def register_dtype(register: str, precision: torch.dtype) -> torch.dtype:
    return {F32: precision, I32: torch.int32, I64: torch.int64, BOOL: torch.bool}[register]


def evaluate(
    graph: Graph, inputs: Sequence[Tensor], *, rows: int, columns: int, values: dict[str, Tensor] | None = None,
    precision: torch.dtype = torch.float32, indices: bool = False,
) -> list[Any]:  # fmt: skip
    """The outputs, in order: [rows, columns], [rows, 1], [1, columns] or [1, 1] by their extent, as their storage.

    Args:
      inputs: in the same shapes; those with a rank are tables, of any shape.
      values: what ``value`` nodes are, by name; "column" is known.
      precision: of floating-point numbers within.
      indices: give pairs of an output and the index at which its rows are stored, or None.
    """
    known = node_values(graph, inputs, columns=columns, values=values, precision=precision)
    shapes = {FULL: (rows, columns), COLUMN: (rows, 1), ROW: (1, columns)}
    results = [rounded(known[y.node].expand(shapes.get(y.extent, (1, 1))), y.storage) for y in graph.outputs]
    if not indices:
        return results
    return [(result, known[y.index].expand(rows, 1) if y.index >= 0 else None) for result, y in zip(results, graph.outputs, strict=True)]


def node_values(
    graph: Graph, inputs: Sequence[Tensor], *, columns: int, values: dict[str, Tensor] | None = None,
    precision: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Of all nodes, unrounded, in shapes that broadcast."""
    known: list[Tensor] = []
    device = inputs[0].device if inputs else next(iter(values.values())).device if values else torch.device("cpu")

    def leaf(node: Node, operands: list[Tensor]) -> Tensor:
        dtype = register_dtype(node.dtype, precision)
        if node.op == "constant":
            return torch.tensor(node.attrs[0], dtype=dtype, device=device).view(1, 1)
        if node.op == "value":
            if values is not None and node.attrs[0] in values:
                return values[node.attrs[0]].to(dtype)
            return torch.arange(columns, device=device).view(1, columns).to(dtype)
        x = inputs[node.attrs[0]]
        if node.op == "gather":
            return x[tuple(i.long() for i in operands)].to(dtype) if operands else x.reshape(1, 1).to(dtype)
        return x.to(dtype)

    for node in graph.nodes:
        operands = [known[i] for i in node.inputs]
        if node.op in ("constant", "value", "input", "gather"):
            result = leaf(node, operands)
        elif node.op in _REDUCE:
            result = _REDUCE[node.op](operands[0].expand(-1, columns))
        elif node.op == "where":
            result = torch.where(*operands)
        elif node.op == "bits":
            result = operands[0].to(torch.float32).contiguous().view(torch.int32)
        elif node.op == "from_bits":
            result = operands[0].contiguous().view(torch.float32).to(precision)
        elif node.op == "cast":
            result = _cast(operands[0], node.dtype, precision)
        elif node.op == "round":
            result = rounded(operands[0], node.attrs[0]).to(register_dtype(node.dtype, precision))
        elif node.op in _UNARY:
            result = _UNARY[node.op](operands[0])
        else:
            result = _BINARY[node.op](*operands)
        known.append(result)
    return known


def _cast(x: Tensor, register: str, precision: torch.dtype) -> Tensor:
    if register in (I32, I64) and x.is_floating_point():
        return rounded(x, register)
    return x.to(register_dtype(register, precision))
