"""Functions of rows: what ``minfer.fuse.pointwise`` and ``minfer.fuse.rowwise`` make of a Python function."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dtypes
from .compiler import Kernel, compile_all
from .errors import FuseError
from .evaluate import evaluate
from .function import FusedFunction, check_results
from .graph import COLUMN, FULL, ROW, SCALAR, Graph
from .launch import Loaded, architecture, capability_of, loaded
from .row_config import RingConfig, configure, configure_ring, vector_width
from .row_plan import Config, RowLaunch, RowPlan
from .signature import Signature
from .specialisation import Described, described
from .tracing import Tracer

_SMS = 132  # of an H100 or H200, which choices are made for
_LIMIT = 1 << 31
_EXAMPLE_ROWS = (1, 64, 4096, 1 << 20)  # for which kernels are made ahead of calls: all choices by the number of rows


@dataclasses.dataclass(frozen=True)
class RowSpace:
    """What a call's tensors have in common: [*lead, columns]."""

    lead: tuple[int, ...]
    columns: int

    @property
    def rows(self) -> int:
        return math.prod(self.lead)


@dataclasses.dataclass(frozen=True)
class RowSpecialisation:
    """What a graph depends on: the tensors, the constants, the columns."""

    tensors: tuple[Described | None, ...]
    constants: tuple[Any, ...]
    columns: int


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """torch.broadcast_shapes without its import of sympy, which took nearly all of the first call of an exported function."""
    if not all(type(size) is int for shape in shapes for size in shape):
        return torch.broadcast_shapes(*shapes)
    found = []
    for sizes in itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise RuntimeError("shapes do not broadcast")
        found.append(wide.pop() if wide else 1)
    return tuple(reversed(found))


class RowFunction(FusedFunction):
    """A fused function of rows, which is called as the Python function is.

    Tensors are [*lead, columns], or broadcast against it: [columns] is the same in every row, [*lead, 1] in every column, [] and [1]
    everywhere. Rows may be strided, their numbers must be neighbours. 0-dim CPU tensors are handed to the kernel by value; Python numbers
    are constants that it is compiled for.
    """

    def __init__(self, function: Callable[..., Any], *, reductions: bool, mutates: Sequence[str], returns: int):
        functools.update_wrapper(self, function)
        self.function = function
        self.reductions = reductions
        self._define(
            f"{function.__module__}_{function.__qualname__}".replace("<locals>", ""),
            function.__name__ if function.__name__.isidentifier() else "function",
            Signature.of(function, mutates),
            returns if mutates else None,
        )

    def __repr__(self) -> str:
        return f"<minfer.fuse function {self.name}>"

    # What a call is.

    def _space(self, tensors: dict[str, Tensor | None]) -> RowSpace:
        shapes = [tuple(x.shape) for x in tensors.values() if x is not None]
        if not shapes:
            raise FuseError(f"{self.name}: needs a tensor")
        try:
            shape = _broadcast(shapes)
        except RuntimeError:
            listed = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items() if x is not None)
            raise FuseError(f"{self.name}: the shapes of its tensors do not broadcast: {listed}") from None
        if not shape:
            shape = (1,)
        return RowSpace(tuple(shape[:-1]), int(shape[-1]))

    def _extent(self, name: str, x: Tensor, space: RowSpace) -> str:
        shape = tuple(x.shape)
        while len(shape) > 1 and shape[0] == 1 and len(shape) > len(space.lead) + 1:
            shape = shape[1:]
        if shape == (*space.lead, space.columns):
            return FULL
        if space.lead and shape == (*space.lead, 1):
            return COLUMN
        if math.prod(shape) == 1:
            return SCALAR
        if shape[-1] == space.columns and math.prod(shape[:-1]) == 1:
            return ROW
        raise FuseError(
            f"{self.name}: {name} must be {[*space.lead, space.columns]}, [..., 1], [{space.columns}] or of one number, got {list(x.shape)}"
        )

    def _specialise(self, arguments: dict[str, Any], space: RowSpace) -> RowSpecialisation:
        device = self._like(arguments).device
        tensors = described(self.name, arguments, self.signature.tensors, device, lambda name, x: self._extent(name, x, space))
        return RowSpecialisation(tensors, tuple(arguments[name] for name in self.signature.constants), space.columns)

    def _trace(self, specialisation: RowSpecialisation) -> Graph:
        tracer = Tracer.of_rows(specialisation.columns)
        arguments: dict[str, Any] = dict(zip(self.signature.constants, specialisation.constants, strict=True))
        for name, what in zip(self.signature.tensors, specialisation.tensors, strict=True):
            if what is None:
                arguments[name] = None
                continue
            dtype, extent, by_value = what
            proxy = tracer.argument(name, dtype, extent, by_value)
            if name in self.mutates:
                tracer.may_write[proxy.node] = len(tracer.builder.inputs) - 1
            arguments[name] = proxy
        with tracer:
            results = self.function(**{x.name: arguments[x.name] for x in self.signature.parameters})
        graph = tracer.finish(results)
        check_results(self.name, graph, self.returns)
        if graph.has_reductions() and not self.reductions:
            raise FuseError(f"{self.name}: reduces over rows: make it with minfer.fuse.rowwise")
        for y in graph.outputs:
            if y.extent == SCALAR and y.into >= 0:
                raise FuseError(f"{self.name}: an argument of one number cannot be written")
        return graph

    def _called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], RowSpace, RowSpecialisation, Graph]:
        arguments = self.signature.bind(args, kwargs)
        space = self._space({name: arguments[name] for name in self.signature.tensors})
        specialisation = self._specialise(arguments, space)
        return arguments, space, specialisation, self.traced(specialisation)

    def _graph(self, traced: Graph) -> Graph:
        return traced

    def _like(self, arguments: dict[str, Any]) -> Tensor:
        tensors = [arguments[name] for name in self.signature.tensors if arguments[name] is not None]
        return next((x for x in tensors if x.device.type != "cpu"), tensors[0])

    # Results.

    def _shape(self, extent: str, squeezed: bool, space: RowSpace) -> tuple[int, ...]:
        return {
            FULL: (*space.lead, space.columns),
            COLUMN: space.lead if squeezed else (*space.lead, 1),
            ROW: (space.columns,),
            SCALAR: (),
        }[extent]

    def _evaluated(self, graph: Graph, arguments: dict[str, Any], space: RowSpace, precision: torch.dtype) -> list[Tensor]:
        like = self._like(arguments)
        shapes = {FULL: (space.rows, space.columns), COLUMN: (space.rows, 1), ROW: (1, space.columns), SCALAR: (1, 1)}
        inputs = []
        for x in graph.inputs:
            given = arguments[x.name].to(like.device)
            whole = given.reshape(()) if x.extent == SCALAR else given.expand(self._shape(x.extent, False, space))
            inputs.append(whole.reshape(shapes[x.extent]))
        values = evaluate(graph, inputs, rows=space.rows, columns=space.columns, precision=precision)
        results = []
        for y, value in zip(graph.outputs, values, strict=True):
            if y.into >= 0:
                into = arguments[graph.inputs[y.into].name]
                into.copy_(value.reshape(into.shape))
            else:
                results.append(value.reshape(self._shape(y.extent, y.squeezed, space)).clone(memory_format=torch.contiguous_format))
        return results

    # On a GPU.

    def _plan(self, arguments: dict[str, Any]) -> RowPlan:
        _, space, specialisation, graph = self._called((), arguments)
        self._check_devices(arguments, "other tensors are")
        given = {name: arguments[name] for name in self.signature.tensors if arguments[name] is not None}
        device = self._like(arguments).device
        strides = {name: self._row_stride(name, x, self._extent(name, x, space), space) for name, x in given.items()}
        if space.rows >= _LIMIT or space.columns >= _LIMIT:
            raise FuseError(f"{self.name}: rows and columns must be fewer than 2^31, got {space.rows} of {space.columns}")
        arch = architecture(device.index)
        config, kernel = self._loaded(graph, self._config(graph, space, given, strides, arch), arch)
        places = {name: i for i, name in enumerate(self.signature.tensors)}
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        launch = RowLaunch(graph, config, kernel, places, strides, space.rows, space.columns, sms)
        if launch.grid[0] >= _LIMIT:
            raise FuseError(f"{self.name}: {space.rows} rows of {space.columns} columns are more than a launch takes")
        return RowPlan(launch, self.results_of(graph, space))

    def _loaded(self, graph: Graph, config: Config, arch: str) -> tuple[Config, Loaded]:
        """A kernel with this configuration, or with another one that serves as well."""
        kernel = self._kernel(graph, config, arch)
        return config, loaded(kernel.key(), compile_all([kernel])[0])

    def _row_stride(self, name: str, x: Tensor, extent: str, space: RowSpace) -> int:
        """In numbers; raises where rows do not follow each other at one stride."""
        if extent in (FULL, ROW) and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise FuseError(f"{self.name}: the numbers of a row of {name} must be neighbours, got strides {list(x.stride())}")
        if extent not in (FULL, COLUMN):
            return 0
        modes = [(n, stride) for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
        for (_, outer), (n, inner) in zip(modes, modes[1:], strict=False):
            if outer != n * inner:
                raise FuseError(
                    f"{self.name}: the rows of {name} must follow each other at one stride, got {list(x.stride())} of {list(x.shape)}"
                )
        return modes[-1][1] if modes else x.shape[-1]

    def _config(self, graph: Graph, space: RowSpace, given: dict[str, Tensor], strides: dict[str, int], arch: str) -> Config:
        alignments = []
        for x in graph.inputs:
            if x.extent in (FULL, ROW):
                start = 0 if given[x.name].is_meta else given[x.name].data_ptr() // dtypes.bytes_of(x.storage)
                alignments += [strides[x.name], start]
        width = vector_width(graph, space.columns, alignments)
        capability = capability_of(arch)
        ring = configure_ring(graph, space.rows, space.columns, width, _SMS) if 90 <= capability < 120 else None
        return ring or configure(graph, space.rows, space.columns, width, clusters=capability >= 90)

    def _kernel(self, graph: Graph, config: Config, arch: str) -> Kernel:
        template = "ring" if isinstance(config, RingConfig) else "rows"
        return Kernel.of(template, graph, config, arch, self.name)

    def specialisations(self, examples: Iterable[Any], arch: str) -> list[tuple[RowSpecialisation, Graph, Config]]:
        """What calls like the examples need, with any number of rows."""
        found = []
        for example in examples:
            arguments, space, specialisation, graph = self._called(tuple(example), {})
            given = {name: arguments[name] for name in self.signature.tensors if arguments[name] is not None}
            strides = {name: self._row_stride(name, x, self._extent(name, x, space), space) for name, x in given.items()}
            for rows in _EXAMPLE_ROWS:
                found.append((specialisation, graph, self._config(graph, RowSpace((rows,), space.columns), given, strides, arch)))
        return found

    def _kernels(self, examples: Iterable[Sequence[Any]], arch: str) -> list[Kernel]:
        return [self._kernel(graph, config, arch) for _, graph, config in self.specialisations(examples, arch)]


def _decorator(
    function: Callable[..., Any] | None, reductions: bool, mutates: Sequence[str], returns: int
) -> RowFunction | Callable[[Callable[..., Any]], RowFunction]:
    def decorate(function: Callable[..., Any]) -> RowFunction:
        return RowFunction(function, reductions=reductions, mutates=mutates, returns=returns)

    return decorate if function is None else decorate(function)


def pointwise(function: Callable[..., Any] | None = None, *, mutates: Sequence[str] = (), returns: int = 1) -> Any:
    """One kernel from a function that is elementwise: it reads and writes every byte once. The number of columns is a parameter of the
    kernel, which serves all shapes of a dtype and alignment.

    Args:
      mutates: names of the tensors that the function writes with copy_().
      returns: of how many tensors the function returns; asked for only beside ``mutates``.

    Returns:
      A :class:`RowFunction`.

    Raises:
      FuseError: at the call, for what cannot be fused; it names the line.
    """
    return _decorator(function, False, mutates, returns)


def rowwise(function: Callable[..., Any] | None = None, *, mutates: Sequence[str] = (), returns: int = 1) -> Any:
    """The same for a function that also reduces over rows: sum, mean, amax, amin, var, norms, softmax and what follows from them, any
    number of them on top of each other.

    A row stays in registers from its load to the last result; rows that are wider than a CTA's have the CTAs of a cluster. Kernels are
    compiled for a number of columns and for any number of rows. Sums are in float32, in an order that follows from the kernel alone.

    Args, Returns, Raises:
      as :func:`pointwise`.
    """
    return _decorator(function, True, mutates, returns)
