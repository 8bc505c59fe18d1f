"""An argument of a GEMM's epilogue or prologue: a traced value whose extent follows from how it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import dtypes
from ..errors import at_user_line
from ..graph import COLUMN, FULL, ROW, Input
from .proxy import Proxy

if TYPE_CHECKING:
    from .tracer import Tracer


class Operand(Proxy):
    """An argument of an epilogue or a prologue. What it extends over follows from how it is used: computed with, a vector is of the
    columns; looked up by the row it is of the rows. Whether it has as many numbers is checked at the call.

    Args:
      extent: what it extends over where it is not looked up in; a vector of any length, over the columns.
      vector: whether it has one mode.
      experts: whether there is one for each expert.
    """

    def __init__(self, tracer: Tracer, name: str, dtype: torch.dtype, extent: str, *, by_value: bool = False, vector: bool = False,
                 experts: bool = False, written: bool = False):  # fmt: skip
        tracer.check_dtype(dtype, name)
        self.tracer, self.meta, self.name, self.extent = tracer, tracer.empty(dtype, extent), name, extent
        self.by_value, self.vector, self.experts, self.written = by_value, vector, experts, written
        self.inputs: dict[str, int] = {}

    def input_of(self, extent: str) -> int:
        """The number of the graph's input."""
        if extent not in self.inputs:
            self.inputs[extent] = len(self.tracer.builder.inputs)
            self.tracer.builder.inputs.append(Input(self.name, dtypes.storage_of(self.meta.dtype), extent, by_value=self.by_value))
            if self.experts:
                self.tracer.per_expert.append(self.inputs[extent])
        return self.inputs[extent]

    def element(self, extent: str) -> int:
        number = self.input_of(extent)
        node = self.tracer.add("input", (), dtypes.register_of(self.meta.dtype), extent, (number,))
        if self.written:
            self.tracer.may_write[node] = number
        return node

    @property
    def node(self) -> int:  # type: ignore[override]
        return self.element(self.extent)

    def look_up(self, parts: tuple[Any, ...]) -> Proxy:
        """By the row, the column or both."""
        t = self.tracer
        if all(isinstance(part, Proxy) for part in parts):
            kind = "vector" if self.vector else self.extent
            extents = {("vector", "row"): COLUMN, ("vector", "col"): ROW, (FULL, "row", "col"): FULL, (COLUMN, "row"): COLUMN}
            extent = extents.get((kind, *(_index_name(t, part) for part in parts)))
            if extent is not None:
                return Proxy(t, self.element(extent), t.empty(self.meta.dtype, extent))
        raise at_user_line(f"{self.name}: an operand is looked up by the row, x[row], or by the column, x[col], themselves")


def _index_name(t: Tracer, index: Proxy) -> str | None:
    """Whether an index is "row" or "col"."""
    node = t.builder.nodes[index.node]
    while node.op == "cast":
        node = t.builder.nodes[node.inputs[0]]
    return node.attrs[0] if node.op == "value" else None
