"""Functions of rows: what ``minfer.fuse.pointwise`` and ``minfer.fuse.rowwise`` make of a Python function."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dtypes, operators
from .compiler import Kernel, compile_all
from .errors import FuseError
from .evaluate import evaluate
from .graph import COLUMN, FULL, ROW, SCALAR, Graph
from .launch import ADDRESS, INT32, INT64, Loaded, architecture, loaded
from .row_config import RingConfig, RowConfig, configure, configure_ring, parameters, resident_clusters, vector_width
from .signature import Signature
from .tracing import Tracer

Config = RowConfig | RingConfig
_MOST_PLANS = 4096
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
class Specialisation:
    """What a graph depends on: of each tensor, its dtype and extent, or None where it is missing; the constants; the columns."""

    tensors: tuple[tuple[torch.dtype, str, bool] | None, ...]
    constants: tuple[Any, ...]
    columns: int


class RowFunction:
    """A fused function of rows, which is called as the Python function is.

    Tensors are [*lead, columns], or broadcast against it: [columns] is the same in every row, [*lead, 1] in every column, [] and [1]
    everywhere. Rows may be strided, their numbers must be neighbours. 0-dim CPU tensors are handed to the kernel by value; Python numbers
    are constants that it is compiled for.
    """

    def __init__(self, function: Callable[..., Any], *, reductions: bool, mutates: Sequence[str], returns: int):
        functools.update_wrapper(self, function)
        self.function = function
        self._define(
            f"{function.__module__}_{function.__qualname__}".replace("<locals>", ""),
            function.__name__ if function.__name__.isidentifier() else "function",
            Signature.of(function, mutates),
            reductions,
            returns if mutates else None,
        )

    def _define(self, operator: str, name: str, signature: Signature, reductions: bool, returns: int | None) -> None:
        """The operator. ``returns``: of how many tensors it returns, where that is fixed."""
        self.operator, self.name, self.signature, self.reductions, self.returns = operator, name, signature, reductions, returns
        self.mutates = tuple(x.name for x in signature.parameters if x.written)
        self._graphs: dict[Specialisation, Graph] = {}
        self._plans: dict[Any, _Plan] = {}
        self.op = operators.define(operator, signature.schema, returns, cuda=self._cuda, cpu=self._cpu, fake=self._fake)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return operators.unwrapped(self.op(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<minfer.fuse function {self.name}>"

    # What a call is.

    def _space(self, tensors: dict[str, Tensor | None]) -> RowSpace:
        shapes = [tuple(x.shape) for x in tensors.values() if x is not None]
        if not shapes:
            raise FuseError(f"{self.name}: needs a tensor")
        try:
            shape = torch.broadcast_shapes(*shapes)
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

    def _specialise(self, arguments: dict[str, Any], space: RowSpace) -> Specialisation:
        tensors = []
        for name in self.signature.tensors:
            x = arguments[name]
            if x is None:
                tensors.append(None)
                continue
            if not dtypes.is_supported(x.dtype):
                raise FuseError(f"{self.name}: {name} must not be {str(x.dtype).removeprefix('torch.')}, which fused functions do not take")
            by_value = x.ndim == 0 and x.device.type == "cpu" and any(
                y is not None and y.device.type != "cpu" for y in (arguments[other] for other in self.signature.tensors)
            )  # fmt: skip
            tensors.append((x.dtype, self._extent(name, x, space), by_value))
        return Specialisation(tuple(tensors), tuple(arguments[name] for name in self.signature.constants), space.columns)

    def graph(self, specialisation: Specialisation) -> Graph:
        """Traced once."""
        graph = self._graphs.get(specialisation)
        if graph is None:
            graph = self._graphs[specialisation] = self._trace(specialisation)
        return graph

    def _trace(self, specialisation: Specialisation) -> Graph:
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
        if not graph.outputs:
            raise FuseError(f"{self.name}: returns nothing and writes into no argument")
        made = sum(y.into < 0 for y in graph.outputs)
        if self.returns is not None and made != self.returns:
            raise FuseError(f"{self.name}: returns {made} tensors: a function that writes arguments says so with returns={made}")
        if graph.has_reductions() and not self.reductions:
            raise FuseError(f"{self.name}: reduces over rows: make it with minfer.fuse.rowwise")
        for y in graph.outputs:
            if y.extent == SCALAR and y.into >= 0:
                raise FuseError(f"{self.name}: an argument of one number cannot be written")
        return graph

    def _called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], RowSpace, Specialisation, Graph]:
        arguments = self.signature.bind(args, kwargs)
        space = self._space({name: arguments[name] for name in self.signature.tensors})
        specialisation = self._specialise(arguments, space)
        return arguments, space, specialisation, self.graph(specialisation)

    # Results.

    @staticmethod
    def _shape(extent: str, squeezed: bool, space: RowSpace) -> tuple[int, ...]:
        return {
            FULL: (*space.lead, space.columns),
            COLUMN: space.lead if squeezed else (*space.lead, 1),
            ROW: (space.columns,),
            SCALAR: (),
        }[extent]

    def _results(self, graph: Graph, space: RowSpace, like: Tensor) -> list[Tensor]:
        return [
            like.new_empty(self._shape(y.extent, y.squeezed, space), dtype=dtypes.dtype_of(y.storage)) for y in graph.outputs if y.into < 0
        ]

    def _like(self, arguments: dict[str, Any]) -> Tensor:
        tensors = [arguments[name] for name in self.signature.tensors if arguments[name] is not None]
        return next((x for x in tensors if x.device.type != "cpu"), tensors[0])

    def _fake(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arguments, space, _, graph = self._called(args, kwargs)
        return self._results(graph, space, self._like(arguments))

    def _cpu(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arguments, space, _, graph = self._called(args, kwargs)
        return self._evaluated(graph, arguments, space, torch.float32)

    def reference(self, *args: Any, precision: torch.dtype = torch.float64, **kwargs: Any) -> Any:
        """The results by torch, on the tensors' device, with floating-point numbers of ``precision`` within; arguments are not written."""
        arguments, space, _, graph = self._called(args, kwargs)
        copies = {name: x.clone() if isinstance(x, Tensor) and name in self.mutates else x for name, x in arguments.items()}
        results = self._evaluated(graph, copies, space, precision)
        return operators.unwrapped([*results, *(copies[name] for name in self.mutates if copies[name] is not None)])

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

    def _plan(self, arguments: dict[str, Any]) -> _Plan:
        _, space, specialisation, graph = self._called((), arguments)
        given = {name: arguments[name] for name in self.signature.tensors if arguments[name] is not None}
        like = self._like(arguments)
        for name, x in given.items():
            if x.device != like.device and not (x.device.type == "cpu" and x.ndim == 0):
                raise FuseError(f"{self.name}: {name} must be on {like.device}, as other tensors are, got {x.device}")
        strides = {name: self._row_stride(name, x, self._extent(name, x, space), space) for name, x in given.items()}
        if space.rows >= _LIMIT or space.columns >= _LIMIT:
            raise FuseError(f"{self.name}: rows and columns must be fewer than 2^31, got {space.rows} of {space.columns}")
        config = self._config(graph, space, given, strides, architecture(like.device.index))
        config, kernel = self._loaded(graph, config, architecture(like.device.index))
        return _Plan(self, graph, space, config, kernel, strides, like)

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
        capability = int(arch[3:].rstrip("a"))
        ring = configure_ring(graph, space.rows, space.columns, width, _SMS) if 90 <= capability < 120 else None
        return ring or configure(graph, space.rows, space.columns, width, clusters=capability >= 90)

    def _kernel(self, graph: Graph, config: Config, arch: str) -> Kernel:
        template = "ring" if isinstance(config, RingConfig) else "rows"
        return Kernel(template, graph, tuple(sorted(dataclasses.asdict(config).items())), arch, self.name)

    def specialisations(self, examples: Iterable[Any], arch: str) -> list[tuple[Specialisation, Graph, Config]]:
        """What calls like the examples need, with any number of rows."""
        found = []
        for example in examples:
            arguments, space, specialisation, graph = self._called(tuple(example), {})
            given = {name: arguments[name] for name in self.signature.tensors if arguments[name] is not None}
            strides = {name: self._row_stride(name, x, self._extent(name, x, space), space) for name, x in given.items()}
            for rows in _EXAMPLE_ROWS:
                found.append((specialisation, graph, self._config(graph, RowSpace((rows,), space.columns), given, strides, arch)))
        return found

    def precompile(self, *examples: Iterable[Any], arch: str | None = None) -> None:
        """Compiles for calls with arguments like those of ``examples``, tuples that are bound as calls are, in parallel; tensors may be on
        the meta device. Every number of rows is covered: kernels for few and for many are compiled.

        Args:
          arch: sm_90a and so on; None: of the current device.
        """
        arch = arch or architecture(torch.cuda.current_device())
        compile_all([self._kernel(graph, config, arch) for _, graph, config in self.specialisations(examples, arch)])


class _Plan:
    """A call with tensors of known shapes, strides and alignments."""

    def __init__(
        self, function: RowFunction, graph: Graph, space: RowSpace, config: Config, kernel: Loaded, strides: dict[str, int], like: Tensor
    ):  # fmt: skip
        self.kernel, self.like = kernel, function.signature.tensors.index(self._first_of(function, graph, strides, like))
        places = {name: i for i, name in enumerate(function.signature.tensors)}
        self.outputs = [(function._shape(y.extent, y.squeezed, space), dtypes.dtype_of(y.storage)) for y in graph.outputs if y.into < 0]
        self.inputs = [places[x.name] for x in graph.inputs if not x.by_value]
        self.numbers: list[tuple[int, int, str]] = []  # word, argument, storage
        tensor_of = {i: n for n, i in enumerate(i for i, x in enumerate(graph.inputs) if not x.by_value)}
        words: list[int] = []
        made = 0
        for kind, i in parameters(graph):
            if kind == "address":
                words += [ADDRESS, tensor_of[i]]
            elif kind == "number":
                storage = graph.inputs[i].storage
                words += [INT64 if storage == "i64" else INT32, 0]
                self.numbers.append((len(words) - 1, places[graph.inputs[i].name], storage))
            elif kind == "stride":
                words += [INT64, strides[graph.inputs[i].name]]
            elif kind == "out":
                words += [ADDRESS, len(self.inputs) + made]
                made += 1
            elif kind == "out_stride":
                words += [INT64, space.columns if graph.outputs[i].extent == FULL else 1]
            else:
                words += [INT32, space.rows if kind == "rows" else space.columns]
        self.words = words
        self.grid = self._grid(config, space, torch.cuda.get_device_properties(like.device).multi_processor_count)
        if self.grid[0] >= _LIMIT:
            raise FuseError(f"{function.name}: {space.rows} rows of {space.columns} columns are more than a launch takes")

    @staticmethod
    def _grid(config: Config, space: RowSpace, sms: int) -> list[int]:
        if not space.rows or not space.columns:
            return [0, 1, 1]
        if isinstance(config, RingConfig):
            return [min(space.rows, resident_clusters(config.cluster, sms)) * config.cluster, 1, 1]
        groups = -(-space.rows // config.rows)
        parts = config.cluster if config.columns else -(-space.columns // (config.width * config.threads))
        return [groups * parts, 1, 1]

    @staticmethod
    def _first_of(function: RowFunction, graph: Graph, strides: dict[str, int], like: Tensor) -> str:
        return next(x.name for x in graph.inputs if not x.by_value)

    def run(self, tensors: list[Tensor | None]) -> list[Tensor]:
        like = tensors[self.like]
        results = [torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in self.outputs]
        words = self.words
        if self.numbers:
            words = list(words)
            for word, argument, storage in self.numbers:
                words[word] = bits_of(tensors[argument], storage)
        self.kernel.launch([*(tensors[i] for i in self.inputs), *results], words, self.grid)
        return results


def bits_of(x: Tensor, storage: str) -> int:
    """A number as a parameter of the kernel."""
    value = x.item()
    if dtypes.register_of(x.dtype) != "f32":
        return int(value)
    return struct.unpack("<i", struct.pack("<f", value))[0]


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
