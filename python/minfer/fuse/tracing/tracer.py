"""What a function is traced with: it makes nodes of a graph of what the function computes, and asks torch for dtypes and shapes."""

from __future__ import annotations

import builtins
import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._core.torch_private import without_torch_functions
from .. import dtypes
from ..errors import FuseError, at_user_line
from ..graph import BOOL, COLUMN, F32, FULL, ROW, SCALAR, Builder, Graph, Input, Node, Output, joined
from .handlers import HANDLERS, name_of
from .proxy import Proxy
from .table import Table, flat

# Modes of traced rows. The number of rows is not known to a function: it is this one while it is traced.
_ROWS = 97
_OTHER_ROWS = 89  # where rows have _ROWS columns


class Tracer(TorchFunctionMode):
    """Traces one function. ``rows`` is the number of rows that metas have, 0 where values are single numbers, as the
    scores and masks of attention are."""

    def __init__(self, device: torch.device, *, rows: int = 0, columns: int = 0):
        super().__init__()
        self.device, self.rows, self.columns = device, rows, columns
        self.builder = Builder()
        self.captured: list[Tensor] = []  # tensors that the function reads from outside, by the number of their input
        self.tables: dict[int, int] = {}  # id of a captured tensor -> input
        self.may_write: dict[int, int] = {}  # node of an argument -> input that copy_() may write
        self.per_expert: list[int] = []  # inputs
        self.table_names: dict[int, str] = {}  # how the function calls them
        self.takes_outside = False  # whether the function may look up in tensors that are not arguments

    @staticmethod
    def of_rows(columns: int) -> Tracer:
        """Of a function of rows, or of a GEMM's output or operand."""
        return Tracer(torch.device("cuda"), rows=_OTHER_ROWS if columns == _ROWS else _ROWS, columns=columns)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    # Arguments and values.

    def argument(self, name: str, dtype: torch.dtype, extent: str, by_value: bool = False) -> Proxy:
        self.check_dtype(dtype, name)
        number = len(self.builder.inputs)
        self.builder.inputs.append(Input(name, dtypes.storage_of(dtype), extent, by_value=by_value))
        return Proxy(self, self.add("input", (), dtypes.register_of(dtype), extent, (number,)), self.empty(dtype, extent))

    def table(self, name: str, tensor: Tensor) -> Table:
        """A tensor that the function indexes."""
        key = id(tensor)
        if key not in self.tables:
            self.check_dtype(tensor.dtype, name)
            name = self.table_names.get(key, f"{name}{len(self.captured)}" if self.captured else name)
            self.tables[key] = len(self.builder.inputs)
            self.builder.inputs.append(Input(name, dtypes.storage_of(tensor.dtype), SCALAR, rank=tensor.ndim))
            self.captured.append(tensor)
        return Table(self, self.tables[key], tensor)

    def value(self, name: str, dtype: torch.dtype, extent: str = SCALAR) -> Proxy:
        return Proxy(self, self.add("value", (), dtypes.register_of(dtype), extent, (name,)), self.empty(dtype, extent))

    def stored(self, name: str, dtype: torch.dtype) -> Proxy:
        """A value of all elements that is in memory as ``dtype``."""
        self.check_dtype(dtype, name)
        return self.value(name, dtype, FULL)

    def empty(self, dtype: torch.dtype, extent: str) -> Tensor:
        """The meta tensor of a value."""
        shapes = {SCALAR: (), ROW: (self.columns,), COLUMN: (self.rows, 1), FULL: (self.rows, self.columns)}
        return torch.empty(shapes[extent] if self.rows else (), dtype=dtype, device="meta")

    def check_dtype(self, dtype: torch.dtype, name: str) -> None:
        if not dtypes.is_supported(dtype):
            raise at_user_line(f"{name}: fused functions do not take {str(dtype).removeprefix('torch.')}")

    # Nodes.

    def add(self, op: str, inputs: Sequence[int], dtype: str, extent: str, attrs: tuple[Any, ...] = ()) -> int:
        return self.builder.add(Node(op, tuple(inputs), dtype, extent, attrs))

    def type_of(self, node: int) -> str:
        return self.builder.nodes[node].dtype

    def extent_of(self, *nodes: int) -> str:
        return joined(self.builder.nodes[i].extent for i in nodes)

    def constant(self, number: Any, dtype: str) -> int:
        value = float(number) if dtype == F32 else builtins.bool(number) if dtype == BOOL else int(number)
        return self.add("constant", (), dtype, SCALAR, (value,))

    def cast(self, node: int, dtype: str) -> int:
        now = self.builder.nodes[node]
        if now.dtype == dtype:
            return node
        if now.op == "constant":
            return self.constant(now.attrs[0], dtype)
        return self.add("cast", (node,), dtype, now.extent)

    def node_of(self, x: Any, dtype: str) -> int:
        """A proxy, a number or a 0-dim tensor of the CPU, as ``dtype``."""
        if isinstance(x, Proxy):
            return self.cast(x.node, dtype)
        if isinstance(x, numbers.Number) and not isinstance(x, complex):
            return self.constant(x, dtype)
        if isinstance(x, Table):
            return self.node_of(x.element(()), dtype)
        if isinstance(x, Tensor):
            if x.ndim == 0 and x.device.type == "cpu" and not x.is_meta:
                return self.constant(x.item(), dtype)
            if self.takes_outside and x.ndim == 0:
                return self.node_of(self.table("captured", x).element(()), dtype)
            raise at_user_line(f"a tensor of shape {list(x.shape)} is not an argument of the function: pass it as one")
        raise at_user_line(f"a {type(x).__name__} cannot be computed with")

    def proxy(self, node: int, meta: Tensor) -> Proxy:
        if self.rows and self.builder.nodes[node].extent not in self.extents(meta):
            # Values of one number each: torch may give any number of modes of extent 1.
            raise at_user_line(f"the shape {self.shown(meta)} is neither of rows, of a row, nor of a column")
        return Proxy(self, node, meta)

    def extents(self, meta: Tensor) -> tuple[str, ...]:
        """What a tensor of this shape may be; rows of one number are also a column."""
        shape = tuple(meta.shape)
        while len(shape) > 2 and shape[0] == 1:
            shape = shape[1:]
        if self.rows == 0:
            return (SCALAR,)
        one = (SCALAR,) if math.prod(shape) == 1 else ()
        known = {
            FULL: ((self.rows, self.columns),),
            COLUMN: ((self.rows, 1), (self.rows,)),
            ROW: ((1, self.columns), (self.columns,)),
        }
        return one + tuple(extent for extent, shapes in known.items() if shape in shapes)

    def classify(self, meta: Tensor) -> str:
        return next(iter(self.extents(meta)), "other")

    def shown(self, meta: Tensor) -> str:
        return "[" + ", ".join("rows" if n == self.rows and i == 0 else str(n) for i, n in enumerate(meta.shape)) + "]"

    # Calls.

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        handler = HANDLERS.get(func)
        if func is not torch.arange and not any(isinstance(x, Proxy | Table) for x in flat((*args, *kwargs.values()))):
            with without_torch_functions():  # on metas, on other tensors, or a property of one
                result = func(*args, **kwargs)
            if isinstance(result, Tensor) and not result.is_meta and not self.takes_outside and result.ndim:
                raise at_user_line("tensors cannot be made within a fused function: pass them as arguments")
            return result
        if handler is None:
            raise at_user_line(f"{name_of(func)} is not among the operations that can be fused")
        try:
            return handler(self, func, *args, **kwargs)
        except FuseError:
            raise
        except (TypeError, RuntimeError, IndexError, ValueError) as error:
            raise at_user_line(f"{name_of(func)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error

    def meta_of(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch gives for the metas of the arguments."""

        def meta(x: Any) -> Any:
            if isinstance(x, Proxy):
                return x.meta
            if isinstance(x, Table):
                return x.element(()).meta
            if isinstance(x, Tensor) and not x.is_meta:
                return x if x.ndim == 0 and x.device.type == "cpu" else torch.empty_like(x, device="meta")
            return [meta(y) for y in x] if isinstance(x, list | tuple) else x

        with without_torch_functions():
            return func(*[meta(x) for x in args], **{name: meta(x) for name, x in kwargs.items()})

    def finish(self, results: Any) -> Graph:
        """The graph of a function that returned ``results``; stores into arguments are among its outputs already."""
        if results is None:
            results = ()
        for x in results if isinstance(results, tuple | list) else (results,):
            if not isinstance(x, Proxy):
                raise FuseError(f"a fused function returns tensors that it computed, got a {type(x).__name__}")
            extent = self.builder.nodes[x.node].extent
            storage = dtypes.storage_of(x.meta.dtype)
            last = self.builder.nodes[x.node]
            node = last.inputs[0] if last.op == "round" and last.attrs == (storage,) and last.dtype == F32 else x.node  # stores round
            self.builder.outputs.append(Output(node, storage, extent, squeezed=extent == COLUMN and x.meta.ndim == 1))
        return self.builder.build()
