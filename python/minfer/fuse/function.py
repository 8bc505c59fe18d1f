"""What functions of rows and fused GEMMs have in common: an operator of torch, graphs and plans that are kept, the results by torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from . import dtypes, operators
from .compiler import Kernel, compile_all
from .errors import FuseError
from .graph import Graph
from .launch import architecture
from .signature import Signature

_MOST_PLANS = 4096


class Plan(Protocol):
    """The launches of calls with tensors of known shapes, strides and alignments."""

    def run(self, tensors: list[Any]) -> list[Tensor]: ...


class FusedFunction(ABC):
    """A call's arguments have a *space*, the sizes that its tensors share, and a *specialisation*, all that the graph depends on."""

    def _define(self, operator: str, name: str, signature: Signature, returns: int | None) -> None:
        """The operator. ``returns``: of how many tensors it returns, where that is fixed."""
        self.operator, self.name, self.signature, self.returns = operator, name, signature, returns
        self.mutates = tuple(x.name for x in signature.parameters if x.written)
        self._traces: dict[Any, Any] = {}
        self._plans: dict[Any, Plan] = {}
        self.op = operators.define(operator, signature.schema, returns, cuda=self._cuda, cpu=self._cpu, fake=self._fake)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return operators.unwrapped(self.op(*args, **kwargs))

    # What a call is.

    @abstractmethod
    def _called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any, Any, Any]:
        """The arguments by name, the space, the specialisation, and what was traced for it; raises where arguments cannot be right."""

    def traced(self, specialisation: Any) -> Any:
        """Once for each."""
        result = self._traces.get(specialisation)
        if result is None:
            result = self._traces[specialisation] = self._trace(specialisation)
        return result

    @abstractmethod
    def _trace(self, specialisation: Any) -> Any: ...

    @abstractmethod
    def _graph(self, traced: Any) -> Graph:
        """Which has the function's results."""

    @abstractmethod
    def _like(self, arguments: dict[str, Any]) -> Tensor:
        """A tensor on the device of the results."""

    def _check_devices(self, arguments: dict[str, Any], beside: str) -> None:
        device = self._like(arguments).device
        for name in self.signature.tensors:
            x = arguments[name]
            if x is not None and x.device != device and not (x.device.type == "cpu" and x.ndim == 0):
                raise FuseError(f"{self.name}: {name} must be on {device}, as {beside}, got {x.device}")

    # Results.

    @abstractmethod
    def _shape(self, extent: str, squeezed: bool, space: Any) -> tuple[int, ...]: ...

    def results_of(self, graph: Graph, space: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of what is returned."""
        return [(self._shape(y.extent, y.squeezed, space), dtypes.dtype_of(y.storage)) for y in graph.outputs if y.into < 0]

    @abstractmethod
    def _evaluated(self, traced: Any, arguments: dict[str, Any], space: Any, precision: torch.dtype) -> list[Tensor]:
        """By torch; writes into arguments as the function does."""

    def _fake(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arguments, space, _, traced = self._called(args, kwargs)
        like = self._like(arguments)
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in self.results_of(self._graph(traced), space)]

    def _cpu(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arguments, space, _, traced = self._called(args, kwargs)
        return self._evaluated(traced, arguments, space, torch.float32)

    def reference(self, *args: Any, precision: torch.dtype = torch.float64, **kwargs: Any) -> Any:
        """The results by torch, on the tensors' device, with floating-point numbers of ``precision`` within, products of matrices too;
        arguments are not written."""
        arguments, space, _, traced = self._called(args, kwargs)
        copies = {name: x.clone() if isinstance(x, Tensor) and name in self.mutates else x for name, x in arguments.items()}
        results = self._evaluated(traced, copies, space, precision)
        return operators.unwrapped([*results, *(copies[name] for name in self.mutates if copies[name] is not None)])

    # On a GPU.

    def _cuda(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arguments = self.signature.bind(args, kwargs)
        tensors = [arguments[name] for name in self.signature.tensors]
        key = (
            tuple(None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device) for x in tensors),
            tuple(arguments[name] for name in self.signature.constants),
        )
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(arguments)
        return plan.run(tensors)

    @abstractmethod
    def _plan(self, arguments: dict[str, Any]) -> Plan: ...

    @abstractmethod
    def _kernels(self, examples: Iterable[Sequence[Any]], arch: str) -> list[Kernel]:
        """That calls like the examples need, with any number of rows."""

    def precompile(self, *examples: Sequence[Any], arch: str | None = None) -> None:
        """Compiles for calls with arguments like those of ``examples``, tuples that are bound as calls are, in parallel; tensors may be on
        the meta device. Every number of rows is covered: kernels for few and for many are compiled.

        Args:
          arch: "sm_90a" and so on; None: of the current device.
        """
        compile_all(self._kernels(examples, arch or architecture(torch.cuda.current_device())))


def check_results(function: str, graph: Graph, returns: int | None) -> None:
    """That there are results, and as many as the operator returns."""
    if not graph.outputs:
        raise FuseError(f"{function}: returns nothing and writes into no argument")
    made = sum(y.into < 0 for y in graph.outputs)
    if returns is not None and made != returns:
        raise FuseError(f"{function}: returns {made} tensors: a function that writes arguments says so with returns={made}")
