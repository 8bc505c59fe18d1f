"""From an epilogue and a prologue to the graphs that kernels are made of, and what such functions may not be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .errors import FuseError
from .function import check_results
from .gemm_config import split
from .gemm_interface import EXPERT_NUMBER, EXPERT_ROW, EXTENTS, ONE, VECTOR, GemmInterface, GemmSpecialisation, parameters_of
from .graph import COLUMN, FULL, ROW, SCALAR, Graph
from .tracing import Operand, Tracer


@dataclasses.dataclass(frozen=True)
class Traced:
    """``graph``: of the epilogue; ``first`` and ``last``: its parts before and after a row's reductions; ``late``: the outputs that the
    second has."""

    graph: Graph
    first: Graph
    last: Graph | None
    late: tuple[int, ...]
    per_expert: tuple[int, ...]
    prologue: Graph | None
    prologue_per_expert: tuple[int, ...] = ()


class GemmTracing:
    """Of a fused GEMM's Python functions. ``returns``: how many tensors the epilogue returns, where that is fixed."""

    def __init__(self, interface: GemmInterface, epilogue: Callable[..., Any], prologue: Callable[..., Any] | None, returns: int | None):
        self.interface, self.epilogue, self.prologue, self.returns = interface, epilogue, prologue, returns

    def trace(self, s: GemmSpecialisation) -> Traced:
        columns = max(s.columns, 2)  # one column would not differ from a number
        tracer, arguments = self._arguments(s, columns, written=True)
        values = [tracer.value("acc", torch.float32, FULL)]
        if self.interface.gate:
            values = [(values[0], tracer.value("acc1", torch.float32, FULL))]
        values += [tracer.value("row", torch.int32, COLUMN), tracer.value("col", torch.int32, ROW)]
        own = [x.name for x in parameters_of(self.epilogue)[3:]]
        with tracer:
            results = self.epilogue(*values, **{name: arguments[name] for name in own})
        graph = tracer.finish(results)
        self._check(graph, s)
        first, last, late = split(graph)
        prologue, of_experts = None, ()
        if self.prologue is not None:
            prologue, of_experts = self._trace_prologue(s)
        return Traced(graph, first, last, tuple(late), tuple(tracer.per_expert), prologue, of_experts)

    def _arguments(self, s: GemmSpecialisation, columns: int, written: bool) -> tuple[Tracer, dict[str, Any]]:
        tracer = Tracer.of_rows(columns)
        arguments: dict[str, Any] = dict(zip(self.interface.signature.constants, s.constants, strict=True))
        for name, what in zip(self.interface.operands, s.operands, strict=True):
            if what is None:
                arguments[name] = None
                continue
            dtype, kind, by_value = what
            arguments[name] = Operand(
                tracer, name, dtype, EXTENTS[kind], by_value=by_value, vector=kind in (VECTOR, ONE),
                experts=kind in (EXPERT_ROW, EXPERT_NUMBER),
                written=written and name in self.interface.mutates,
            )  # fmt: skip
        return tracer, arguments

    def _trace_prologue(self, s: GemmSpecialisation) -> tuple[Graph, tuple[int, ...]]:
        assert self.prologue is not None
        tracer, arguments = self._arguments(s, max(s.k, 2), written=False)
        a = tracer.stored("a", s.a)
        values = [a, tracer.value("row", torch.int32, COLUMN), tracer.value("col", torch.int32, ROW)]
        own = [x.name for x in parameters_of(self.prologue)[3:]]
        with tracer:
            result = self.prologue(*values, **{name: arguments[name] for name in own})
            if isinstance(result, tuple | list):
                raise FuseError(f"{self.interface.name}: a prologue returns what A becomes, got {len(result)} results")
            graph = tracer.finish(result.to(s.b))
        if graph.has_reductions():
            raise FuseError(f"{self.interface.name}: a prologue is elementwise: reductions over k come before the GEMM")
        return graph, tuple(tracer.per_expert)

    def _check(self, graph: Graph, s: GemmSpecialisation) -> None:
        check_results(self.interface.name, graph, self.returns)
        depths = graph.depths()
        for i, y in enumerate(graph.outputs):
            if y.extent in (ROW, SCALAR):
                raise FuseError(f"{self.interface.name}: result {i} is the same in all rows: it does not depend on the product")
            if y.extent == FULL and (depths[y.node] or y.index >= 0 and depths[y.index]):
                raise FuseError(
                    f"{self.interface.name}: result {i} needs a reduction over a whole row, which is known only after the GEMM: return the "
                    "reduction, and go on with a function of rows"
                )
            if y.into >= 0 and y.extent == COLUMN and depths[y.node]:
                raise FuseError(f"{self.interface.name}: a reduction is returned, it cannot be written into an argument")
        if max(depths, default=0) > 1:
            raise FuseError(
                f"{self.interface.name}: a reduction of what depends on another one needs the whole row, which is known only after the GEMM"
            )
        if graph.has_reductions() and s.columns == 1:
            raise FuseError(f"{self.interface.name}: a row of one column has nothing to reduce over")
