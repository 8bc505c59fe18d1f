"""Fused GEMMs: what ``minfer.fuse.gemm`` and ``minfer.fuse.gemm_epilogue`` make of a Python function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dtypes, operators
from .artifact import Artifact
from .compiler import Kernel, compile_all
from .errors import FuseError
from .evaluate import evaluate
from .gemm_config import (
    GATES,
    GemmConfig,
    Tile,
    band_of,
    choose,
    choose_portable,
    epilogue_vector,
    parameters,
    partials_of,
    split,
    stages_of,
)
from .graph import COLUMN, FULL, REDUCTIONS, ROW, SCALAR, Graph
from .launch import ADDRESS, INT32, INT64, TENSOR_MAP, Loaded, architecture, loaded
from .row_config import RowConfig, configure, parameters as row_parameters, vector_width
from .rows import bits_of
from .signature import Parameter, Signature
from .tracing import Operand, Tracer

_SMS = 132  # of an H100 or H200, for which tiles are chosen
_MOST_PLANS = 4096
_LIMIT = 1 << 31
_STORED = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_MULTIPLIED = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
_EXAMPLE_ROWS = (*range(1, 16385, 32), 1 << 15, 1 << 17, 1 << 20)  # for which tiles are chosen ahead of calls
_EXAMPLE_SUMS = (1, 64, 4096, 1 << 20)  # rows for which kernels that put partial reductions together are made
# What an operand is, by its shape; a "vector" is of the columns or of the rows, as it is used.
VECTOR, ONE, EXPERT_ROW, EXPERT_NUMBER = "vector", "vector of one", "expert row", "expert number"
_EXTENTS = {FULL: FULL, ROW: ROW, COLUMN: COLUMN, SCALAR: SCALAR, VECTOR: ROW, ONE: SCALAR, EXPERT_ROW: ROW, EXPERT_NUMBER: SCALAR}


@dataclasses.dataclass(frozen=True)
class GemmSpace:
    """A call's sizes. ``columns`` are those of the output: n, or n / 2 where columns are gated."""

    m: int
    n: int
    k: int
    columns: int
    experts: int = 0  # 0: one matrix


@dataclasses.dataclass(frozen=True)
class Specialisation:
    """What graphs depend on: the dtypes of A and B, of each operand its dtype, what it is and whether it is handed over by value, or None
    where it is missing; the constants; the columns, and k where there is a prologue."""

    a: torch.dtype
    b: torch.dtype
    operands: tuple[tuple[torch.dtype, str, bool] | None, ...]
    constants: tuple[Any, ...]
    columns: int
    k: int
    grouped: bool


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


class GemmFunction:
    """A GEMM with a fused epilogue: ``function(a, b, ...)`` with the operands that the epilogue and the prologue have."""

    def __init__(
        self, epilogue: Callable[..., Any], *, prologue: Callable[..., Any] | None, gate: str, mutates: Sequence[str], returns: int
    ):  # fmt: skip
        functools.update_wrapper(self, epilogue)
        self.function, self.prologue, self.has_prologue = epilogue, prologue, prologue is not None
        if gate not in GATES:
            raise FuseError(f"{epilogue.__qualname__}: gate must be one of {', '.join(map(repr, GATES))}, got {gate!r}")
        self._define(
            f"{epilogue.__module__}_{epilogue.__qualname__}_gemm".replace("<locals>", "").replace("<lambda>", "lambda"),
            epilogue.__name__ if epilogue.__name__.isidentifier() else "function",
            _signature(epilogue, prologue, mutates),
            gate,
            returns if mutates else None,
        )

    def _define(self, operator: str, name: str, signature: Signature, gate: str, returns: int | None) -> None:
        self.operator, self.name, self.signature, self.gate, self.returns = operator, name, signature, gate, returns
        self.mutates = tuple(x.name for x in signature.parameters if x.written)
        self.operands = [name for name in signature.tensors if name not in ("a", "b", "offsets")]
        self._traces: dict[Specialisation, Traced] = {}
        self._plans: dict[Any, _Plan] = {}
        self.op = operators.define(operator, signature.schema, returns, cuda=self._cuda, cpu=self._cpu, fake=self._fake)

    def __call__(self, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        return operators.unwrapped(self.op(a, b, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<minfer.fuse GEMM with the epilogue {self.name}>"

    # What a call is.

    def _space(self, arguments: dict[str, Any]) -> GemmSpace:
        a, b, offsets = arguments["a"], arguments["b"], arguments["offsets"]
        modes = 2 if offsets is None else 3
        if a.ndim != 2:
            raise FuseError(f"{self.name}: a must be [m, k], got {list(a.shape)}")
        if b.ndim != modes or b.shape[-2] != a.shape[1]:
            wanted = f"[{a.shape[1]}, n]" if modes == 2 else f"[experts, {a.shape[1]}, n] with offsets"
            raise FuseError(f"{self.name}: b must be {wanted}, got {list(b.shape)}")
        if offsets is not None and (offsets.dtype != torch.int32 or tuple(offsets.shape) != (b.shape[0],)):
            raise FuseError(
                f"{self.name}: offsets must be int32 [{b.shape[0]}], where experts end, got {offsets.dtype} {list(offsets.shape)}"
            )
        n = int(b.shape[-1])
        if n < 1 or a.shape[1] < 1:
            raise FuseError(f"{self.name}: k and n must be 1 or more, got {a.shape[1]} and {n}")
        unit = {"": 1, "halves": 2, "alternating": 2, "blocks": 16}[self.gate]
        if n % unit:
            raise FuseError(f"{self.name}: n must be a multiple of {unit} with the gate {self.gate!r}, got {n}")
        return GemmSpace(a.shape[0], n, a.shape[1], n // 2 if self.gate else n, 0 if offsets is None else b.shape[0])

    def _what(self, name: str, x: Tensor, space: GemmSpace) -> str:
        """An operand by its shape; the length of a vector, and the rows, are checked where it is known how it is used."""
        shape = tuple(x.shape)
        if x.ndim == 3 and space.experts and shape[0] == space.experts and shape[1] == 1:
            return EXPERT_NUMBER if shape[2] == 1 else EXPERT_ROW
        if x.ndim == 0:
            return SCALAR
        if x.ndim == 1:
            return ONE if shape[0] == 1 else VECTOR
        if x.ndim == 2:
            if name in self.mutates:
                return FULL
            if shape == (1, 1):
                return COLUMN if space.m == 1 else SCALAR
            if shape[1] == 1:
                return COLUMN
            return ROW if shape[0] == 1 and space.m != 1 else FULL
        raise FuseError(
            f"{self.name}: {name} must be [m, n], [n], [m, 1], [m] that is looked up by the row, or one number"
            + (", or [experts, 1, n] or [experts, 1, 1]" if space.experts else "")
            + f", got {list(shape)}"
        )

    def _specialise(self, arguments: dict[str, Any], space: GemmSpace) -> Specialisation:
        a, b = arguments["a"], arguments["b"]
        if b.dtype not in _MULTIPLIED:
            raise FuseError(f"{self.name}: b must be bfloat16, float16 or float8_e4m3fn, got {b.dtype}")
        if not self.has_prologue and a.dtype != b.dtype:
            raise FuseError(f"{self.name}: a must be {b.dtype}, as b is, got {a.dtype}: another type needs a prologue")
        operands: list[tuple[torch.dtype, str, bool] | None] = []
        for name in self.operands:
            x = arguments[name]
            if x is None:
                operands.append(None)
                continue
            if not dtypes.is_supported(x.dtype):
                raise FuseError(f"{self.name}: {name} must not be {str(x.dtype).removeprefix('torch.')}, which fused functions do not take")
            by_value = x.ndim == 0 and x.device.type == "cpu" and a.device.type != "cpu"
            operands.append((x.dtype, self._what(name, x, space), by_value))
        if self.has_prologue and (a.dtype not in _STORED or b.dtype.itemsize != 2):
            raise FuseError(
                f"{self.name}: with a prologue a must be of 16 or 8 bits and b bfloat16 or float16, got {a.dtype} and {b.dtype}"
            )
        return Specialisation(
            a.dtype, b.dtype, tuple(operands), tuple(arguments[name] for name in self.signature.constants), space.columns,
            int(space.k) if self.has_prologue else 0, space.experts > 0,
        )  # fmt: skip

    def traced(self, specialisation: Specialisation) -> Traced:
        """Once for each."""
        result = self._traces.get(specialisation)
        if result is None:
            result = self._traces[specialisation] = self._trace(specialisation)
        return result

    def _trace(self, s: Specialisation) -> Traced:
        columns = max(s.columns, 2)  # one column would not differ from a number
        tracer, arguments = self._arguments(s, columns, written=True)
        values = [tracer.value("acc", torch.float32, FULL)]
        if self.gate:
            values = [(values[0], tracer.value("acc1", torch.float32, FULL))]
        values += [tracer.value("row", torch.int32, COLUMN), tracer.value("col", torch.int32, ROW)]
        own = [x.name for x in _parameters(self.function)[3:]]
        with tracer:
            results = self.function(*values, **{name: arguments[name] for name in own})
        graph = tracer.finish(results)
        self._check_graph(graph, s)
        first, last, late = split(graph)
        prologue, of_experts = None, ()
        if self.has_prologue:
            prologue, of_experts = self._trace_prologue(s)
        return Traced(graph, first, last, tuple(late), tuple(tracer.per_expert), prologue, of_experts)

    def _arguments(self, s: Specialisation, columns: int, written: bool) -> tuple[Tracer, dict[str, Any]]:
        tracer = Tracer.of_rows(columns)
        arguments: dict[str, Any] = dict(zip(self.signature.constants, s.constants, strict=True))
        for name, what in zip(self.operands, s.operands, strict=True):
            if what is None:
                arguments[name] = None
                continue
            dtype, kind, by_value = what
            arguments[name] = Operand(
                tracer, name, dtype, _EXTENTS[kind], by_value=by_value, vector=kind in (VECTOR, ONE),
                experts=kind in (EXPERT_ROW, EXPERT_NUMBER),
                written=written and name in self.mutates,
            )  # fmt: skip
        return tracer, arguments

    def _trace_prologue(self, s: Specialisation) -> tuple[Graph, tuple[int, ...]]:
        assert self.prologue is not None
        tracer, arguments = self._arguments(s, max(s.k, 2), written=False)
        a = tracer.stored("a", s.a)
        values = [a, tracer.value("row", torch.int32, COLUMN), tracer.value("col", torch.int32, ROW)]
        own = [x.name for x in _parameters(self.prologue)[3:]]
        with tracer:
            result = self.prologue(*values, **{name: arguments[name] for name in own})
            if isinstance(result, tuple | list):
                raise FuseError(f"{self.name}: a prologue returns what A becomes, got {len(result)} results")
            graph = tracer.finish(result.to(s.b))
        if graph.has_reductions():
            raise FuseError(f"{self.name}: a prologue is elementwise: reductions over k come before the GEMM")
        return graph, tuple(tracer.per_expert)

    def _check_graph(self, graph: Graph, s: Specialisation) -> None:
        if not graph.outputs:
            raise FuseError(f"{self.name}: returns nothing and writes into no argument")
        made = sum(y.into < 0 for y in graph.outputs)
        if self.returns is not None and made != self.returns:
            raise FuseError(f"{self.name}: returns {made} tensors: a function that writes arguments says so with returns={made}")
        depths = graph.depths()
        for i, y in enumerate(graph.outputs):
            if y.extent in (ROW, SCALAR):
                raise FuseError(f"{self.name}: result {i} is the same in all rows: it does not depend on the product")
            if y.extent == FULL and (depths[y.node] or y.index >= 0 and depths[y.index]):
                raise FuseError(
                    f"{self.name}: result {i} needs a reduction over a whole row, which is known only after the GEMM: return the "
                    "reduction, and go on with a function of rows"
                )
            if y.into >= 0 and y.extent == COLUMN and depths[y.node]:
                raise FuseError(f"{self.name}: a reduction is returned, it cannot be written into an argument")
        if max(depths, default=0) > 1:
            raise FuseError(
                f"{self.name}: a reduction of what depends on another one needs the whole row, which is known only after the GEMM"
            )
        if graph.has_reductions() and s.columns == 1:
            raise FuseError(f"{self.name}: a row of one column has nothing to reduce over")

    def _called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], GemmSpace, Specialisation, Traced]:
        arguments = self.signature.bind(args, kwargs)
        space = self._space(arguments)
        specialisation = self._specialise(arguments, space)
        traced = self.traced(specialisation)
        self._check_operands(traced, arguments, space)
        return arguments, space, specialisation, traced

    def _check_operands(self, traced: Traced, arguments: dict[str, Any], space: GemmSpace) -> None:
        """That every operand has the numbers that the graph reads or writes."""
        for graph, columns in ((traced.graph, space.columns), *(((traced.prologue, space.k),) if traced.prologue is not None else ())):
            scattered = {y.into for y in graph.outputs if y.index >= 0}
            read = {node.attrs[0] for node in graph.nodes if node.op == "input"}
            for i, x in enumerate(graph.inputs):
                shape = tuple(arguments[x.name].shape)
                rows = space.m if i not in scattered or i in read else shape[0]
                wanted = {FULL: (rows, columns), ROW: (columns,), COLUMN: (space.m,), SCALAR: ()}[x.extent]
                each = shape[1:] if len(shape) == 3 else shape  # of one expert
                if (each != wanted) if x.extent == FULL else (_without_ones(each) != _without_ones(wanted)):
                    named = {FULL: "[m, n]", ROW: "[n]", COLUMN: "[m, 1], or [m] that is looked up by the row", SCALAR: "one number"}[
                        x.extent
                    ]
                    if self.gate:
                        named = named.replace("n]", "n / 2]")
                    if columns is not space.columns and graph is traced.prologue:
                        named = named.replace("n]", "k]")
                    raise FuseError(f"{self.name}: {x.name} must be {named}, here {list(wanted)}, got {list(shape)}")

    # Results.

    def _shape(self, extent: str, squeezed: bool, space: GemmSpace) -> tuple[int, ...]:
        return (space.m, space.columns) if extent == FULL else (space.m,) if squeezed else (space.m, 1)

    def _fake(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arguments, space, _, traced = self._called(args, kwargs)
        return [
            arguments["a"].new_empty(self._shape(y.extent, y.squeezed, space), dtype=dtypes.dtype_of(y.storage))
            for y in traced.graph.outputs
            if y.into < 0
        ]

    def _cpu(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        arguments, space, _, traced = self._called(args, kwargs)
        return self._evaluated(traced, arguments, space, torch.float32)

    def reference(self, *args: Any, precision: torch.dtype = torch.float64, **kwargs: Any) -> Any:
        """The results by torch, on the tensors' device, products and epilogue in ``precision``; arguments are not written."""
        arguments, space, _, traced = self._called(args, kwargs)
        copies = {name: x.clone() if isinstance(x, Tensor) and name in self.mutates else x for name, x in arguments.items()}
        results = self._evaluated(traced, copies, space, precision)
        return operators.unwrapped([*results, *(copies[name] for name in self.mutates if copies[name] is not None)])

    def _evaluated(self, traced: Traced, arguments: dict[str, Any], space: GemmSpace, precision: torch.dtype) -> list[Tensor]:
        a, b = arguments["a"], arguments["b"]
        device = a.device
        results = [
            torch.zeros(self._shape(y.extent, y.squeezed, space), dtype=dtypes.dtype_of(y.storage), device=device)
            for y in traced.graph.outputs
            if y.into < 0
        ]
        ends = [space.m] if not space.experts else arguments["offsets"].clamp(0, space.m).tolist()
        first = 0
        for expert, end in enumerate(ends):
            rows = slice(first, max(first, end))
            first = rows.stop
            if rows.start == rows.stop:
                continue
            matrix = (b[expert] if space.experts else b).to(precision)
            left = a[rows]
            row = torch.arange(rows.start, rows.stop, device=device).view(-1, 1)
            count = rows.stop - rows.start

            def inputs(graph: Graph, columns: int, expert: int = expert, rows: slice = rows, count: int = count) -> list[Tensor]:
                return [_part(arguments[x.name].to(device), x.extent, rows, count, columns, expert) for x in graph.inputs]

            if traced.prologue is not None:
                values = {"a": left, "row": row, "col": torch.arange(space.k, device=device).view(1, -1)}
                (left,) = evaluate(
                    traced.prologue, inputs(traced.prologue, space.k), rows=count, columns=space.k, values=values, precision=precision
                )
            acc = left.to(precision) @ matrix
            values = {"row": row, "col": torch.arange(space.columns, device=device).view(1, -1)}
            if not self.gate:
                values["acc"] = acc
            else:
                values["acc"], values["acc1"] = _gated(acc, self.gate)
            outputs = evaluate(
                traced.graph, inputs(traced.graph, space.columns), rows=count, columns=space.columns, values=values, precision=precision,
                indices=True,
            )  # fmt: skip
            made = iter(results)
            for y, (value, index) in zip(traced.graph.outputs, outputs, strict=True):
                if y.into < 0:
                    next(made)[rows] = value.reshape(count, *self._shape(y.extent, y.squeezed, space)[1:])
                    continue
                into = arguments[traced.graph.inputs[y.into].name]
                if index is None:
                    into[rows] = value.reshape(into[rows].shape)
                    continue
                index = index.reshape(-1).long()
                inside = (index >= 0) & (index < into.shape[0])
                into[index[inside]] = value[inside]
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
        _, space, specialisation, traced = self._called((), arguments)
        a = arguments["a"]
        for name in self.signature.tensors:
            x = arguments[name]
            if x is not None and x.device != a.device and not (x.device.type == "cpu" and x.ndim == 0):
                raise FuseError(f"{self.name}: {name} must be on {a.device}, as a is, got {x.device}")
        if max(space.m, space.n, space.k) >= _LIMIT - 512:
            raise FuseError(f"{self.name}: m, n and k must be below 2^31 - 512, got {space.m}, {space.n}, {space.k}")
        arch = architecture(a.device.index)
        sms = torch.cuda.get_device_properties(a.device).multi_processor_count
        return _Plan(self, arguments, space, specialisation, traced, arch, sms)

    def _artifact(self, kernel: Kernel) -> tuple[str, Artifact]:
        """A kernel and what it is known by."""
        return kernel.key(), compile_all([kernel])[0]

    def config(
        self, traced: Traced, specialisation: Specialisation, space: GemmSpace, arguments: dict[str, Any], sms: int, arch: str = "sm_90a"
    ) -> GemmConfig:
        b = arguments["b"]
        b_major = _major(b, _MULTIPLIED[b.dtype])
        tile_k = 128 // b.element_size()
        k_tiles = -(-space.k // tile_k)
        if portable(arch):
            if b.dtype.itemsize != 2:
                raise FuseError(f"{self.name}: for {arch} b must be bfloat16 or float16, got {b.dtype}")
            tile, stages = choose_portable(space.m, space.n, sms)
        else:
            tile = choose(space.m, space.n, k_tiles, b_major, self.gate, space.experts, self.has_prologue, sms)
            stages = stages_of(tile)
        config = self._config(tile, b_major, traced, specialisation, space, arguments)
        return dataclasses.replace(config, stages=stages, portable=portable(arch))

    def _config(
        self, tile: Tile, b_major: str, traced: Traced, s: Specialisation, space: GemmSpace, arguments: dict[str, Any]
    ) -> GemmConfig:  # fmt: skip
        alignments = [space.columns] if any(y.extent == FULL and y.into < 0 for y in traced.graph.outputs) else []
        for i, x in enumerate(traced.graph.inputs):
            if x.extent in (FULL, ROW):
                given = arguments[x.name]
                alignments.append(_first(given))
                if x.extent == FULL or i in traced.per_expert:
                    alignments.append(given.stride(0))
        return GemmConfig(
            tile.m, tile.n, tile.pingpong, stages_of(tile), tile.cluster, _MULTIPLIED[s.b], b_major, self.gate,
            epilogue_vector(traced.graph, space.columns, alignments), space.experts > 0, traced.per_expert,
            **self._prologue_config(traced, space, arguments, dtypes.storage_of(s.a)),
        )  # fmt: skip

    @staticmethod
    def _prologue_config(traced: Traced, space: GemmSpace, arguments: dict[str, Any], stored: str) -> dict[str, Any]:
        if traced.prologue is None:
            return {}
        alignments = [space.k]
        for i, x in enumerate(traced.prologue.inputs):
            if x.extent in (FULL, ROW):
                given = arguments[x.name]
                alignments.append(_first(given))
                if x.extent == FULL or i in traced.prologue_per_expert:
                    alignments.append(given.stride(0))
        return {
            "prologue": traced.prologue.text(), "prologue_per_expert": traced.prologue_per_expert,
            "prologue_vector": epilogue_vector(traced.prologue, 2, alignments), "a_stored": stored,
        }  # fmt: skip

    def choose_config(self, traced: Traced, config: GemmConfig, space: GemmSpace, arch: str) -> GemmConfig:
        """The configuration, or another one that there is a kernel for."""
        return config

    def rows_kernel(self, traced: Traced, m: int, tiles: int, arch: str) -> tuple[Kernel, RowConfig]:
        """What puts a row's partial reductions together."""
        assert traced.last is not None
        config = configure(traced.last, m, tiles, vector_width(traced.last, tiles, [tiles]), clusters=False)
        return Kernel("rows", traced.last, tuple(sorted(dataclasses.asdict(config).items())), arch, f"{self.name}_rows"), config

    def kernels_of(self, *args: Any, arch: str = "sm_90a", **kwargs: Any) -> list[Kernel]:
        """What one call launches."""
        arguments, space, specialisation, traced = self._called(args, kwargs)
        config = self.config(traced, specialisation, space, arguments, _SMS, arch)
        kernels = [kernel_of(self.name, traced, config, arch)]
        if traced.last is not None:
            kernels.append(self.rows_kernel(traced, space.m, -(-space.columns // config.columns), arch)[0])
        return kernels

    def needed(self, examples: Iterable[Sequence[Any]], arch: str) -> list[tuple[Specialisation, Traced, list[Kernel]]]:
        """What calls like the examples need, with any number of rows."""
        found = []
        for example in examples:
            arguments, space, specialisation, traced = self._called(tuple(example), {})
            kernels: dict[Kernel, None] = {}
            spaces = [dataclasses.replace(space, m=m) for m in (space.m, *_EXAMPLE_ROWS)]
            for config in dict.fromkeys(self.config(traced, specialisation, each, arguments, _SMS, arch) for each in spaces):
                kernels[kernel_of(self.name, traced, config, arch)] = None
                if traced.last is not None:
                    for m in _EXAMPLE_SUMS:
                        kernels[self.rows_kernel(traced, m, -(-space.columns // config.columns), arch)[0]] = None
            found.append((specialisation, traced, list(kernels)))
        return found

    def precompile(self, *examples: Sequence[Any], arch: str | None = None) -> None:
        """Compiles for calls with arguments like those of ``examples``, tuples that are bound as calls are, in parallel; tensors may be on
        the meta device. Every number of rows is covered: kernels of all tiles that are chosen for one are compiled.

        Args:
          arch: "sm_90a" and so on; None: of the current device.
        """
        arch = arch or architecture(torch.cuda.current_device())
        compile_all([kernel for _, _, kernels in self.needed(examples, arch) for kernel in kernels])


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def portable(arch: str) -> bool:
    """Whether an architecture has the kernel of mma.sync."""
    return not arch.startswith("sm_90")


def kernel_of(name: str, traced: Traced, config: GemmConfig, arch: str) -> Kernel:
    check_architecture(name, traced, arch)
    return Kernel(
        "gemm_portable" if config.portable else "gemm", traced.first, tuple(sorted(dataclasses.asdict(config).items())), arch, name
    )


def check_architecture(name: str, traced: Traced, arch: str) -> None:
    number = int(arch[3:].rstrip("af"))
    if number < 80 or arch == "sm_90":
        raise FuseError(f"{name}: fused GEMMs are for sm_80 and later, and for compute capability 9.0 as sm_90a, got {arch}")
    graphs = [graph for graph in (traced.graph, traced.prologue) if graph is not None]
    storages = {x.storage for graph in graphs for x in (*graph.inputs, *graph.outputs)}
    storages |= {node.attrs[0] for graph in graphs for node in graph.nodes if node.op == "round"}
    if number < 89 and storages & {"e4m3", "e5m2"}:
        raise FuseError(f"{name}: FP8 needs sm_89 or later, got {arch}")


def _parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    return Signature.of(function).parameters


def _signature(epilogue: Callable[..., Any], prologue: Callable[..., Any] | None, mutates: Sequence[str]) -> Signature:
    """(a, b, what the epilogue has, and by name what the prologue has and the experts' offsets)."""
    own = Signature.of(epilogue, mutates).parameters
    if len(own) < 3:
        raise FuseError(f"{epilogue.__qualname__}: an epilogue is a function of (acc, row, col, ...), got {len(own)} parameters")
    parameters = list(own[3:])
    if prologue is not None:
        others = _parameters(prologue)
        if len(others) < 3:
            raise FuseError(f"{prologue.__qualname__}: a prologue is a function of (a, row, col, ...), got {len(others)} parameters")
        names = [x.name for x in parameters]
        parameters += [dataclasses.replace(x, keyword_only=True) for x in others[3:] if x.name not in names]
    for x in parameters:
        if x.name in ("a", "b", "offsets", "self"):
            raise FuseError(f"{epilogue.__qualname__}: an operand cannot be called {x.name!r}: that is the GEMM's own")
    positional = [x for x in parameters if not x.keyword_only]
    named = [x for x in parameters if x.keyword_only]
    return Signature(
        [Parameter("a", "Tensor"), Parameter("b", "Tensor"), *positional, *named, Parameter("offsets", "Tensor?", True, False)]
    )


def _part(x: Tensor, extent: str, rows: slice, count: int, columns: int, expert: int) -> Tensor:
    """What an expert's rows see of an operand, as evaluate() takes it."""
    if x.ndim == 3:
        x = x[expert]
    if extent == FULL:
        return x[rows] if x.shape[0] >= rows.stop else x.new_zeros(1, 1).expand(count, columns)  # only scattered into
    if extent == COLUMN:
        return x.reshape(-1, 1)[rows]
    return x.reshape(1, -1) if extent == ROW else x.reshape(1, 1)


def _gated(acc: Tensor, gate: str) -> tuple[Tensor, Tensor]:
    half = acc.shape[1] // 2
    if gate == "halves":
        return acc[:, :half], acc[:, half:]
    if gate == "alternating":
        return acc[:, 0::2], acc[:, 1::2]
    blocks = acc.view(acc.shape[0], -1, 2, 8)
    return blocks[:, :, 0].reshape(-1, half), blocks[:, :, 1].reshape(-1, half)


# What TMA can address.


def _aligned(x: Tensor, inner: int, outer: int) -> bool:
    """Whether the mode ``inner`` has unit stride and ``outer`` one of 16 bytes."""
    unit = 16 // x.element_size()
    whole = x.is_meta or x.data_ptr() % 16 == 0
    strides = [x.stride(i) for i in range(x.ndim) if i - x.ndim != inner and (x.shape[i] > 1 or i - x.ndim == outer)]
    fits = x.stride(inner) == 1 or x.shape[inner] == 1
    return whole and fits and all(stride % unit == 0 for stride in strides) and x.stride(outer) > 0


def _first(x: Tensor) -> int:
    """How many numbers lie between a multiple of 16 bytes and the first."""
    return 0 if x.is_meta else x.data_ptr() % 16 // x.element_size()


def _major(b: Tensor, storage: str) -> str:
    """Which of B's modes has unit stride in the operand that TMA gets: "k" or "n"."""
    if storage == "e4m3" or _aligned(b, -2, -1):
        return "k"
    return "n" if b.stride(-1) == 1 and b.shape[-1] > 1 else "k"


def _padded(x: Tensor, inner: int) -> Tensor:
    """A copy with the mode ``inner`` of unit stride and the others at multiples of 16 bytes."""
    y = x.transpose(-1, -2) if inner == -2 else x
    unit = 16 // x.element_size()
    made = torch.empty(*y.shape[:-1], -(-y.shape[-1] // unit) * unit, dtype=x.dtype, device=x.device)[..., : y.shape[-1]]
    made.copy_(y)
    return made.transpose(-1, -2) if inner == -2 else made


class _Plan:
    """A call with tensors of known shapes, strides and alignments."""

    def __init__(
        self, function: GemmFunction, arguments: dict[str, Any], space: GemmSpace, specialisation: Specialisation, traced: Traced,
        arch: str, sms: int,
    ):  # fmt: skip
        names = function.signature.tensors
        self.places = {name: i for i, name in enumerate(names)}
        self.space, self.traced = space, traced
        # A row's numbers are neighbours in what the kernel reads. Vectors of the columns are short, and copied where they are strided.
        self.copied = set()
        given = dict(arguments)
        for graph in (traced.graph, traced.prologue):
            for x in graph.inputs if graph is not None else ():
                y = given[x.name]
                if x.extent in (FULL, ROW) and y.shape[-1] > 1 and y.stride(-1) != 1:
                    if x.extent == FULL:
                        raise FuseError(
                            f"{function.name}: the numbers of a row of {x.name} must be neighbours, got strides {list(y.stride())}"
                        )
                    self.copied.add(self.places[x.name])
                    given[x.name] = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        config = function.config(traced, specialisation, space, given, sms, arch)
        config = self.config = function.choose_config(traced, config, space, arch)
        self.copy_a = not _aligned(given["a"], -1, -2)
        self.inner_b = -2 if config.b_major == "k" else -1
        self.copy_b = not _aligned(given["b"], self.inner_b, -3 - self.inner_b)
        kernel = kernel_of(function.name, traced, config, arch)
        key, artifact = function._artifact(kernel)
        self.kernel = loaded(key, artifact)
        self.outputs = [
            (function._shape(y.extent, y.squeezed, space), dtypes.dtype_of(y.storage)) for y in traced.graph.outputs if y.into < 0
        ]
        made = [i for i, y in enumerate(traced.graph.outputs) if y.into < 0]
        self.early = [made.index(i) for i in range(len(traced.graph.outputs)) if i in made and i not in traced.late]
        self.late = [made.index(i) for i in traced.late]
        self.reductions = [i for i, node in enumerate(traced.first.nodes) if node.op in REDUCTIONS]
        self.tiles = -(-space.columns // config.columns)
        self.partial_types = [dtypes.dtype_of(traced.first.nodes[i].dtype) for i in self.reductions]
        m_tiles = -(-space.m // (config.tile_m * config.cluster))
        self.grid = [self._ctas(m_tiles, sms), 1, 1]
        prologue_inputs = traced.prologue.inputs if traced.prologue is not None else ()
        self.inputs = [self.places[x.name] for x in (*traced.first.inputs, *prologue_inputs) if not x.by_value]
        self.words, self.numbers = self._words(given, m_tiles)
        self.last: _LastPlan | None = None
        if traced.last is not None and space.m:
            rows_kernel, row_config = function.rows_kernel(traced, space.m, self.tiles, arch)
            key, artifact = function._artifact(rows_kernel)
            self.last = _LastPlan(traced.last, row_config, loaded(key, artifact), self.reductions, space.m, self.tiles, given, self.places)

    def _ctas(self, m_tiles: int, sms: int) -> int:
        c, space = self.config, self.space
        if not space.m:
            return 0
        tiles = m_tiles * self.tiles
        if c.grouped:
            tiles = (m_tiles + space.experts + 1) * self.tiles
        return tiles if c.portable else min(tiles, sms // c.cluster) * c.cluster

    def _words(self, given: dict[str, Any], m_tiles: int) -> tuple[list[int], list[tuple[int, int, str]]]:
        space, c, graph = self.space, self.config, self.traced.first
        words: list[int] = []
        numbers: list[tuple[int, int, str]] = []  # word, argument, storage
        tensor_of = {i: n + 2 for n, i in enumerate(i for i, x in enumerate(graph.inputs) if not x.by_value)}
        following = 2 + len(tensor_of)
        before = self.traced.prologue.inputs if self.traced.prologue is not None else ()
        tensor_of_a = {i: n + following for n, i in enumerate(i for i, x in enumerate(before) if not x.by_value)}
        following += len(tensor_of_a)
        outs = {i: following + n for n, i in enumerate(i for i, y in enumerate(graph.outputs) if y.into < 0)}
        following += len(outs)
        partials = {i: following + n for n, i in enumerate(self.reductions)}
        following += len(partials)
        tile = band_of(Tile(c.tile_m, c.tile_n, c.pingpong, c.cluster), m_tiles)
        sizes = {
            "m": space.m, "n": space.columns, "k_tiles": -(-space.k // c.tile_k), "m_tiles": m_tiles, "n_tiles": self.tiles, "band": tile,
            "experts": space.experts, "k": space.k,
        }  # fmt: skip
        for kind, i in parameters(graph, c):
            if kind in ("a", "b"):
                words += [ADDRESS, int(kind == "b")]
            elif kind.startswith("ld"):
                words += [INT64, self._leading(kind, given)]
            elif kind == "a_address":
                words += [ADDRESS, tensor_of_a[i]]
            elif kind in ("a_stride", "a_expert_stride"):
                words += [INT64, given[before[i].name].stride(0)]
            elif kind == "a_number":
                storage = before[i].storage
                words += [INT64 if storage == "i64" else INT32, 0]
                numbers.append((len(words) - 1, self.places[before[i].name], storage))
            elif kind == "map":
                words += self._map_words(i, given)
            elif kind == "address":
                words += [ADDRESS, tensor_of[i]]
            elif kind == "number":
                storage = graph.inputs[i].storage
                words += [INT64 if storage == "i64" else INT32, 0]
                numbers.append((len(words) - 1, self.places[graph.inputs[i].name], storage))
            elif kind == "stride":
                words += [INT64, given[graph.inputs[i].name].stride(0)]
            elif kind == "expert_stride":
                words += [INT64, given[graph.inputs[i].name].stride(0)]
            elif kind == "out":
                words += [ADDRESS, outs[i]]
            elif kind == "out_stride":
                words += [INT64, space.columns]
            elif kind == "partial":
                words += [ADDRESS, partials[i]]
            elif kind == "limit":
                words += [INT32, given[graph.inputs[graph.outputs[i].into].name].shape[0]]
            elif kind == "offsets":
                words += [ADDRESS, following]
            else:
                words += [INT32, sizes[kind]]
        return words, numbers

    def _leading(self, kind: str, given: dict[str, Any]) -> int:
        """The stride of A's rows, of B's columns or rows, or of an expert's matrix, in numbers."""
        words = self._map_words(0 if kind == "lda" else 1, given)
        modes = words[2]
        return words[3 + modes + (kind == "ldb_expert")]

    def _map_words(self, which: int, given: dict[str, Any]) -> list[int]:
        c, space = self.config, self.space
        x = given["b" if which else "a"]
        unit = 16 // x.element_size()

        def stride(mode: int, inner: int, copied: bool) -> int:
            return -(-x.shape[inner] // unit) * unit if copied else x.stride(mode)

        if which == 0:
            return [TENSOR_MAP, 0, 2, space.k, space.m, stride(-2, -1, self.copy_a), c.a_box, c.tile_m, c.a_swizzle]
        inner, outer = self.inner_b, -3 - self.inner_b
        extents = [x.shape[inner], x.shape[outer]]
        strides = [stride(outer, inner, self.copy_b)]
        box = [c.tile_k, c.tile_n // c.boxes] if c.b_major == "k" else [c.tile_n // c.boxes, c.tile_k]
        if space.experts:
            extents.append(space.experts)
            strides.append(strides[0] * x.shape[outer] if self.copy_b or space.experts == 1 else x.stride(0))
            box.append(1)
        return [TENSOR_MAP, 1, len(extents), *extents, *strides, *box, 128]

    def run(self, tensors: list[Tensor | None]) -> list[Tensor]:
        a, b = tensors[0], tensors[1]
        results = [torch.empty(shape, dtype=dtype, device=a.device) for shape, dtype in self.outputs]
        if not self.space.m:
            return results
        if self.copied:
            tensors = [x.contiguous() if i in self.copied else x for i, x in enumerate(tensors)]
        if self.copy_a:
            a = _padded(a, -1)
        if self.copy_b:
            b = _padded(b, self.inner_b)
        partials = [torch.empty((self.space.m, self.tiles), dtype=dtype, device=a.device) for dtype in self.partial_types]
        words = self.words
        if self.numbers:
            words = list(words)
            for word, argument, storage in self.numbers:
                words[word] = bits_of(tensors[argument], storage)
        operands = [a, b, *(tensors[i] for i in self.inputs), *(results[i] for i in self.early), *partials]
        if self.space.experts:
            operands.append(tensors[self.places["offsets"]])
        self.kernel.launch(operands, words, self.grid)
        if self.last is not None:
            self.last.run(tensors, partials, [results[i] for i in self.late])
        return results


class _LastPlan:
    """The launch that puts a row's partial reductions together."""

    def __init__(
        self, graph: Graph, config: RowConfig, kernel: Loaded, reductions: list[int], m: int, tiles: int, given: dict[str, Any],
        places: dict[str, int],
    ):  # fmt: skip
        self.kernel = kernel
        partials = partials_of(graph)
        # Where each tensor comes from: a reduction's number, or an argument.
        self.sources = [
            (partials[i] is not None, reductions.index(partials[i]) if partials[i] is not None else places[x.name])
            for i, x in enumerate(graph.inputs)
            if not x.by_value
        ]
        self.numbers: list[tuple[int, int, str]] = []
        words: list[int] = []
        tensor_of = {i: n for n, i in enumerate(i for i, x in enumerate(graph.inputs) if not x.by_value)}
        made = 0
        for kind, i in row_parameters(graph):
            if kind == "address":
                words += [ADDRESS, tensor_of[i]]
            elif kind == "number":
                storage = graph.inputs[i].storage
                words += [INT64 if storage == "i64" else INT32, 0]
                self.numbers.append((len(words) - 1, places[graph.inputs[i].name], storage))
            elif kind == "stride":
                words += [INT64, tiles if partials[i] is not None else given[graph.inputs[i].name].stride(0)]
            elif kind == "out":
                words += [ADDRESS, len(tensor_of) + made]
                made += 1
            elif kind == "out_stride":
                words += [INT64, 1]
            else:
                words += [INT32, m if kind == "rows" else tiles]
        self.words = words
        self.grid = [-(-m // config.rows) * config.cluster, 1, 1]

    def run(self, tensors: list[Tensor | None], partials: list[Tensor], results: list[Tensor]) -> None:
        words = self.words
        if self.numbers:
            words = list(words)
            for word, argument, storage in self.numbers:
                words[word] = bits_of(tensors[argument], storage)
        operands = [partials[i] if is_partial else tensors[i] for is_partial, i in self.sources]
        self.kernel.launch([*operands, *results], words, self.grid)


# The ways in.


def gemm_epilogue(
    function: Callable[..., Any] | None = None, *, prologue: Callable[..., Any] | None = None, gate: str = "", mutates: Sequence[str] = (),
    returns: int = 1,
) -> Any:  # fmt: skip
    """A GEMM from its epilogue, a function of (acc, row, col, ...) that returns one or several tensors.

    Called as ``function(a, b, ...)`` with a [m, k], b [k, n] and the further operands. ``acc`` is the product, [m, n] in float32, ``row``
    [m, 1] and ``col`` [n] are indices in int32. Operands are [m, n], [n], [m, 1], one number, or a vector [m] that is looked up by the row,
    ``x[row]``. With ``offsets``, int32 [experts], the rows of expert e are those from offsets[e - 1] to offsets[e] and b is
    [experts, k, n]; operands may be [experts, 1, n] and [experts, 1, 1] then, and rows behind the last offset are zero in what is returned.

    Args:
      prologue: a function of (a, row, col, ...) that gives what A is multiplied as, elementwise; ``col`` counts k.
      gate: with "halves", "alternating" or "blocks" (8 and 8), ``acc`` is (gate, up), the two halves of b's columns in that order; results
        and operands have n / 2 columns.
      mutates: names of operands that the function writes, with ``copy_()`` or, whole rows at places of an index,
        ``index_copy_(0, index, x)``. Rows that the tensor does not have are not written; of several rows for one place any may be.
      returns: of how many tensors the function returns; asked for only beside ``mutates``.

    Returns:
      A :class:`GemmFunction`.

    Raises:
      FuseError: at the call, for what cannot be fused; it names the line.

    Numerics: products are accumulated in float32 in k's order, FP8 ones as tensor cores add them; the epilogue is float32; results are
    rounded once. Reductions over a row are of each tile's columns first, then of the tiles in their order: the same bits in every run.
    """

    def decorate(function: Callable[..., Any]) -> GemmFunction:
        return GemmFunction(function, prologue=prologue, gate=gate, mutates=mutates, returns=returns)

    return decorate if function is None else decorate(function)


_functions: dict[Any, GemmFunction] = {}


def _identity(function: Any) -> Any:
    """What a function is known by: its code and the values that it has from outside, so that a lambda in a loop is one function."""
    if not inspect.isfunction(function):
        return function
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        key = (function.__code__, function.__code__.co_filename, id(function.__globals__), *((type(x), x) for x in values))
        hash(key)
    except (TypeError, ValueError):  # something that is not hashable, or not there yet
        return function
    return key


def _operator_of(epilogue: Any, prologue: Any, gate: str) -> Any:
    key = _identity(epilogue), _identity(prologue), gate
    if key not in _functions:
        _functions[key] = GemmFunction(epilogue, prologue=prologue, gate=gate, mutates=(), returns=1)
    return _functions[key].op


def gemm(
    a: Tensor, b: Tensor, epilogue: Callable[..., Any], *, prologue: Callable[..., Any] | None = None, gate: str = "",
    offsets: Tensor | None = None, **operands: Any,
) -> Any:  # fmt: skip
    """One call of :func:`gemm_epilogue`: epilogue(prologue(a).b). Functions of the same code and with the same values from
    outside are one, which is traced once and kept.

    Args:
      a, b: [m, k] and [k, n], or [experts, k, n] with ``offsets``; bfloat16, float16 or float8_e4m3fn. ``weight.t()`` is taken as it is;
        what TMA cannot address (rows at other than multiples of 16 bytes, A column-major) is copied first.
      epilogue: a function of (acc, row, col, ...), or what :func:`gemm_epilogue` returned, which has its prologue and gate.
      prologue, gate: as :func:`gemm_epilogue`.
      operands: those of both functions, by name.
    """
    if isinstance(epilogue, GemmFunction):
        if prologue is not None or gate:
            raise FuseError("gemm: a function of gemm_epilogue has its prologue and gate already")
        return epilogue(a, b, **operands, offsets=offsets)
    if torch.compiler.is_compiling():
        raise FuseError("gemm: torch.compile takes functions that gemm_epilogue has made, outside of what is compiled")
    return operators.unwrapped(_operator_of(epilogue, prologue, gate)(a, b, **operands, offsets=offsets))
