"""Fused GEMMs: what ``minfer.fuse.gemm`` and ``minfer.fuse.gemm_epilogue`` make of a Python function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import operators
from .artifact import Artifact
from .compiler import Kernel, compile_all
from .errors import FuseError
from .function import FusedFunction
from .gemm_config import GATES, GemmConfig
from .gemm_interface import GemmInterface, GemmSpace, GemmSpecialisation, signature_of
from .gemm_kernels import configure_gemm, kernel_of, rows_kernel_of
from .gemm_plan import GemmPlan
from .gemm_reference import evaluated
from .gemm_tracing import GemmTracing, Traced
from .graph import FULL, Graph
from .launch import architecture
from .row_config import RowConfig

_SMS = 132  # of an H100 or H200, for which tiles are chosen
_LIMIT = 1 << 31
_EXAMPLE_ROWS = (*range(1, 16385, 32), 1 << 15, 1 << 17, 1 << 20)  # for which tiles are chosen ahead of calls
_EXAMPLE_SUMS = (1, 64, 4096, 1 << 20)  # rows for which kernels that put partial reductions together are made


class GemmFunction(FusedFunction):
    """A GEMM with a fused epilogue: ``function(a, b, ...)`` with the operands that the epilogue and the prologue have."""

    def __init__(
        self, epilogue: Callable[..., Any], *, prologue: Callable[..., Any] | None, gate: str, mutates: Sequence[str], returns: int
    ):  # fmt: skip
        functools.update_wrapper(self, epilogue)
        self.function, self.prologue = epilogue, prologue
        if gate not in GATES:
            raise FuseError(f"{epilogue.__qualname__}: gate must be one of {', '.join(map(repr, GATES))}, got {gate!r}")
        name = epilogue.__name__ if epilogue.__name__.isidentifier() else "function"
        operator = f"{epilogue.__module__}_{epilogue.__qualname__}_gemm".replace("<locals>", "").replace("<lambda>", "lambda")
        interface = GemmInterface(name, signature_of(epilogue, prologue, mutates), gate, prologue is not None)
        self._define_gemm(operator, interface, returns if mutates else None)

    def _define_gemm(self, operator: str, interface: GemmInterface, returns: int | None) -> None:
        self.interface, self.gate = interface, interface.gate
        self._define(operator, interface.name, interface.signature, returns)

    def __call__(self, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        return operators.unwrapped(self.op(a, b, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<minfer.fuse GEMM with the epilogue {self.name}>"

    # What a call is.

    def _called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], GemmSpace, GemmSpecialisation, Traced]:
        arguments = self.signature.bind(args, kwargs)
        space = self.interface.space(arguments)
        specialisation = self.interface.specialise(arguments, space)
        traced = self.traced(specialisation)
        self.interface.check_operands(traced.graph, traced.prologue, arguments, space)
        return arguments, space, specialisation, traced

    def _trace(self, specialisation: GemmSpecialisation) -> Traced:
        return GemmTracing(self.interface, self.function, self.prologue, self.returns).trace(specialisation)

    def _graph(self, traced: Traced) -> Graph:
        return traced.graph

    def _like(self, arguments: dict[str, Any]) -> Tensor:
        return arguments["a"]

    # Results.

    def _shape(self, extent: str, squeezed: bool, space: GemmSpace) -> tuple[int, ...]:
        return (space.m, space.columns) if extent == FULL else (space.m,) if squeezed else (space.m, 1)

    def _evaluated(self, traced: Traced, arguments: dict[str, Any], space: GemmSpace, precision: torch.dtype) -> list[Tensor]:
        return evaluated(traced, self.gate, arguments, space, self.results_of(traced.graph, space), precision)

    # On a GPU.

    def _plan(self, arguments: dict[str, Any]) -> GemmPlan:
        _, space, specialisation, traced = self._called((), arguments)
        a = arguments["a"]
        self._check_devices(arguments, "a is")
        if max(space.m, space.n, space.k) >= _LIMIT - 512:
            raise FuseError(f"{self.name}: m, n and k must be below 2^31 - 512, got {space.m}, {space.n}, {space.k}")
        arch = architecture(a.device.index)
        sms = torch.cuda.get_device_properties(a.device).multi_processor_count
        return GemmPlan(self, arguments, space, specialisation, traced, arch, sms)

    def artifact_of(self, kernel: Kernel) -> tuple[str, Artifact]:
        """A kernel and what it is known by."""
        return kernel.key(), compile_all([kernel])[0]

    def config(
        self, traced: Traced, specialisation: GemmSpecialisation, space: GemmSpace, arguments: dict[str, Any], sms: int,
        arch: str = "sm_90a",
    ) -> GemmConfig:  # fmt: skip
        return configure_gemm(self.interface, traced, specialisation, space, arguments, sms, arch)

    def choose_config(self, traced: Traced, config: GemmConfig, space: GemmSpace, arch: str) -> GemmConfig:
        """The configuration, or another one that there is a kernel for."""
        return config

    def rows_kernel(self, traced: Traced, m: int, tiles: int, arch: str) -> tuple[Kernel, RowConfig]:
        return rows_kernel_of(self.name, traced, m, tiles, arch)

    def kernels_of(self, *args: Any, arch: str = "sm_90a", **kwargs: Any) -> list[Kernel]:
        """What one call launches."""
        arguments, space, specialisation, traced = self._called(args, kwargs)
        config = self.config(traced, specialisation, space, arguments, _SMS, arch)
        kernels = [kernel_of(self.name, traced, config, arch)]
        if traced.last is not None:
            kernels.append(self.rows_kernel(traced, space.m, -(-space.columns // config.columns), arch)[0])
        return kernels

    def needed(self, examples: Iterable[Sequence[Any]], arch: str) -> list[tuple[GemmSpecialisation, Traced, list[Kernel]]]:
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

    def _kernels(self, examples: Iterable[Sequence[Any]], arch: str) -> list[Kernel]:
        return [kernel for _, _, kernels in self.needed(examples, arch) for kernel in kernels]


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
