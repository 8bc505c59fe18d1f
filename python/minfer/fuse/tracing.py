"""From a Python function over torch tensors to a graph.

The function runs once, on proxies. What torch functions give, in which dtype and shape, is asked of torch itself, with meta tensors; what
they compute becomes nodes. Floating-point numbers are float32 within a function, whatever dtype torch says: they are rounded where the
function casts, and where results are stored.
"""

from __future__ import annotations

import builtins
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._core.torch_private import without_torch_functions
from . import dtypes
from .errors import FuseError, at_user_line
from .graph import BOOL, COLUMN, F32, FULL, I32, I64, ROW, SCALAR, Builder, Graph, Input, Node, Output, joined

# Modes of traced rows. The number of rows is not known to a function: it is this one while it is traced.
TRACED_ROWS = 97
OTHER_ROWS = 89  # where rows have TRACED_ROWS columns

Handler = Callable[..., Any]
_HANDLERS: dict[Any, Handler] = {}
# Python's operators, which take a number on either side, for metas.
_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne, "floor_div": operator.floordiv, "mod": operator.mod,
}  # fmt: skip


def traced_rows(columns: int) -> int:
    return OTHER_ROWS if columns == TRACED_ROWS else TRACED_ROWS


class _RowCount(int):
    """The number of rows: it may be compared, as shapes are, and not computed with."""

    def _refuse(self, *_: Any) -> Any:
        raise at_user_line("the number of rows is not known where a function is fused: a kernel is for any number of them")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __float__ = _refuse


class Proxy:
    """A value of the function. ``meta`` has the dtype and shape that torch gives it."""

    def __init__(self, tracer: Tracer, node: int, meta: Tensor):
        self.tracer, self.node, self.meta = tracer, node, meta

    # What a tensor tells of itself.
    dtype = property(lambda self: self.meta.dtype)
    device = property(lambda self: self.tracer.device)
    ndim = property(lambda self: self.meta.ndim)
    is_cuda = property(lambda self: self.tracer.device.type == "cuda")
    requires_grad = property(lambda self: False)

    @property
    def shape(self) -> torch.Size | tuple[int, ...]:
        rows = self.tracer.rows
        return tuple(_RowCount(n) if n == rows and i == 0 and self.meta.ndim == 2 else n for i, n in enumerate(self.meta.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.meta.ndim

    def is_floating_point(self) -> bool:
        return self.meta.is_floating_point()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in (*args, *(kwargs or {}).values()):
            for y in x if isinstance(x, list | tuple) else (x,):
                if isinstance(y, Proxy):
                    return y.tracer.call(func, args, kwargs or {})
        return NotImplemented

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if method is None or not callable(method):
            raise at_user_line(f"a tensor of a fused function has no {name!r}")
        return lambda *args, **kwargs: self.tracer.call(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.call(Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise at_user_line("elements cannot be assigned to: take torch.where, or copy_() into an argument")

    def __bool__(self) -> bool:
        raise at_user_line("Python cannot branch on a tensor's value: take torch.where")

    def __iter__(self) -> Any:
        raise at_user_line("a tensor cannot be iterated over")

    def _no_number(self, *_: Any) -> Any:
        raise at_user_line("a tensor's value is not known where a function is fused")

    __float__ = __int__ = __index__ = item = tolist = _no_number
    __hash__ = object.__hash__


def _binary_method(function: Any, swapped: bool = False) -> Any:
    def method(self: Proxy, other: Any) -> Any:
        return self.tracer.call(function, (other, self) if swapped else (self, other), {})

    return method


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "floordiv": torch.floor_divide, "mod": torch.remainder,
    "pow": torch.pow, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}.items():  # fmt: skip
    setattr(Proxy, f"__{_name}__", _binary_method(_function))
    setattr(Proxy, f"__r{_name}__", _binary_method(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Proxy, f"__{_name}__", _binary_method(getattr(torch, _name)))
for _name, _function in {"neg": torch.neg, "abs": torch.abs, "invert": torch.bitwise_not}.items():
    setattr(Proxy, f"__{_name}__", lambda self, function=_function: self.tracer.call(function, (self,), {}))


def _refuse_in_place(self: Proxy, other: Any) -> Any:
    raise at_user_line("values are not changed in place: write x = x + y, or copy_() into an argument that `mutates` names")


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor"):
    setattr(Proxy, f"__i{_name}__", _refuse_in_place)


class Tracer(TorchFunctionMode):
    """Traces one function. ``rows`` is the number of rows that metas have, 0 where values are single numbers (epilogues and scores)."""

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    # Arguments and values.

    def argument(self, name: str, meta: Tensor, extent: str, by_value: bool = False) -> Proxy:
        self.check_dtype(meta.dtype, name)
        number = len(self.builder.inputs)
        self.builder.inputs.append(Input(name, dtypes.storage_of(meta.dtype), extent, by_value=by_value))
        return Proxy(self, self.add("input", (), dtypes.register_of(meta.dtype), extent, (number,)), meta)

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
        shape = (
            () if self.rows == 0 else {SCALAR: (), ROW: (self.columns,), COLUMN: (self.rows, 1), FULL: (self.rows, self.columns)}[extent]
        )
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return Proxy(self, self.add("value", (), dtypes.register_of(dtype), extent, (name,)), meta)

    def stored(self, name: str, dtype: torch.dtype) -> Proxy:
        """A value of all elements that is in memory as ``dtype``."""
        self.check_dtype(dtype, name)
        return self.value(name, dtype, FULL)

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
        handler = _HANDLERS.get(func)
        if func is not torch.arange and not any(isinstance(x, Proxy | Table) for x in _flat((*args, *kwargs.values()))):
            with without_torch_functions():  # on metas, on other tensors, or a property of one
                result = func(*args, **kwargs)
            if isinstance(result, Tensor) and not result.is_meta and not self.takes_outside and result.ndim:
                raise at_user_line("tensors cannot be made within a fused function: pass them as arguments")
            return result
        if handler is None:
            raise at_user_line(f"{_name_of(func)} is not among the operations that can be fused")
        try:
            return handler(self, func, *args, **kwargs)
        except FuseError:
            raise
        except (TypeError, RuntimeError, IndexError, ValueError) as error:
            raise at_user_line(f"{_name_of(func)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error

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


class Operand(Proxy):
    """An argument of an epilogue or a prologue. What it extends over follows from how it is used: computed with, a vector is of the
    columns; looked up by the row it is of the rows. Whether it has as many numbers is checked at the call.

    Args:
      meta: [rows, columns], [rows, 1], [columns], [], or a vector of any length as [columns].
      vector: whether it has one mode.
      experts: whether there is one for each expert.
    """

    def __init__(self, tracer: Tracer, name: str, meta: Tensor, extent: str, *, by_value: bool = False, vector: bool = False,
                 experts: bool = False, written: bool = False):  # fmt: skip
        tracer.check_dtype(meta.dtype, name)
        self.tracer, self.meta, self.name, self.extent = tracer, meta, name, extent
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

    def look_up(self, index: Any) -> Proxy:
        """By the row, the column or both."""
        t = self.tracer
        parts = index if isinstance(index, tuple) else (index,)
        if all(part is None or part is Ellipsis or part == slice(None) for part in parts if not isinstance(part, Proxy)):
            names = [_index_name(t, part) for part in parts if isinstance(part, Proxy)]
            if not names:
                return _view(t, lambda meta: meta[index], self)
            kind = "vector" if self.vector else self.extent
            extent = {("vector", "row"): COLUMN, ("vector", "col"): ROW, (FULL, "row", "col"): FULL, (COLUMN, "row"): COLUMN}.get(
                (kind, *names) if len(names) == len(parts) else ()
            )
            if extent is not None:
                shapes = {COLUMN: (t.rows, 1), ROW: (t.columns,), FULL: (t.rows, t.columns)}
                return Proxy(t, self.element(extent), torch.empty(shapes[extent], dtype=self.meta.dtype, device="meta"))
        raise at_user_line(f"{self.name}: an operand is looked up by the row, x[row], or by the column, x[col], themselves")


def _index_name(t: Tracer, index: Proxy) -> str | None:
    """Whether an index is "row" or "col"."""
    node = t.builder.nodes[index.node]
    while node.op == "cast":
        node = t.builder.nodes[node.inputs[0]]
    return node.attrs[0] if node.op == "value" else None


class Table:
    """A tensor from outside that is looked up in, with the indices that are given so far."""

    def __init__(self, tracer: Tracer, number: int, tensor: Tensor, indices: tuple[Any, ...] = ()):
        self.tracer, self.number, self.tensor, self.indices = tracer, number, tensor, indices

    dtype = property(lambda self: self.tensor.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = next(x.tracer for x in _flat((*args, *(kwargs or {}).values())) if isinstance(x, Table | Proxy))
        return tracer.call(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return self.look_up(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.element(()), name)

    def look_up(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        indices = self.indices + index
        if len(indices) < self.tensor.ndim:
            return Table(self.tracer, self.number, self.tensor, indices)
        return self.element(index)

    def element(self, index: tuple[Any, ...]) -> Proxy:
        tracer, indices = self.tracer, self.indices + index
        if len(indices) != self.tensor.ndim:
            raise at_user_line(f"a tensor of {self.tensor.ndim} modes is looked up in by as many indices, got {len(indices)}")
        nodes = []
        for x in indices:
            if isinstance(x, Proxy) and (x.meta.is_floating_point() or x.meta.dtype == torch.bool):
                raise at_user_line(f"an index must be an integer, got {x.meta.dtype}")
            nodes.append(tracer.node_of(x, I32))
        extent = joined(tracer.builder.nodes[i].extent for i in nodes)
        node = tracer.add("gather", nodes, dtypes.register_of(self.tensor.dtype), extent, (self.number,))
        return Proxy(tracer, node, torch.empty((), dtype=self.tensor.dtype, device="meta"))


for _name in [x for x in vars(Proxy) if x.startswith("__") and x.strip("_").lstrip("r") in
              "add sub mul truediv floordiv mod pow and or xor lshift shift lt le gt ge eq ne neg abs invert".split()]:  # fmt: skip
    if _name not in ("__eq__", "__ne__"):
        setattr(Table, _name, lambda self, *others, name=_name: getattr(self.element(()), name)(*others))


def _flat(values: Any) -> Any:
    for x in values:
        if isinstance(x, list | tuple):
            yield from _flat(x)
        else:
            yield x


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func)).removesuffix("_")
    return f"torch.{name}" if hasattr(torch, name) else f"Tensor.{name}"


# Handlers.


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Of torch's functions and of tensors' methods with these names."""

    def register(handler: Handler) -> Handler:
        for name in names:
            for place in (torch, Tensor, torch.nn.functional, torch.special):
                func = getattr(place, name, None)
                if callable(func):
                    _HANDLERS[func] = handler
            builtin = getattr(operator, name, None)
            if builtin is not None:
                _HANDLERS[builtin] = handler
        return handler

    return register


def _unary(op: str, *names: str, only: str | None = None) -> None:
    @handles(*names)
    def handler(t: Tracer, func: Any, x: Any) -> Proxy:
        meta = t.meta_of(func, x)
        dtype = dtypes.register_of(meta.dtype)
        if only is not None and t.type_of(x.node) != only:
            return x if op in ("floor", "ceil", "round_even", "trunc") else t.call(func, (x.to(torch.float32),), {})
        operand = dtype if dtype != BOOL or op == "not" else t.type_of(x.node)
        node = t.node_of(x, operand)
        return t.proxy(t.add(op, (node,), dtype, t.extent_of(node)), meta)


for _op, _names in {
    "neg": "neg negative __neg__", "abs": "abs absolute __abs__", "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log",
    "log2": "log2", "log1p": "log1p", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal __rpow__", "sin": "sin", "cos": "cos",
    "tanh": "tanh", "erf": "erf",
}.items():  # fmt: skip
    _unary(_op, *_names.split())
_HANDLERS.pop(Tensor.__rpow__, None)
for _op, _names in {"floor": "floor", "ceil": "ceil", "round_even": "round", "trunc": "trunc fix"}.items():
    _unary(_op, *_names.split(), only=F32)
_unary("isnan", "isnan", only=F32)


@handles("logical_not", "bitwise_not", "__invert__")
def _not(t: Tracer, func: Any, x: Any) -> Proxy:
    meta = t.meta_of(func, x)
    if meta.dtype != torch.bool:
        node = t.node_of(x, dtypes.register_of(meta.dtype))
        return t.proxy(t.add("xor", (node, t.constant(-1, t.type_of(node))), t.type_of(node), t.extent_of(node)), meta)
    node = t.node_of(x, BOOL)
    return t.proxy(t.add("not", (node,), BOOL, t.extent_of(node)), meta)


def _wider(t: Tracer, *operands: Any) -> str:
    """The type in registers that operands of a comparison are brought to."""
    with without_torch_functions():
        dtype = torch.result_type(*[t.meta_of(lambda x: x, x) for x in operands])
    return dtypes.register_of(dtype) if dtypes.is_supported(dtype) else F32


def _elementwise(op: str, *names: str) -> None:
    @handles(*names)
    def handler(t: Tracer, func: Any, a: Any, b: Any) -> Proxy:
        meta = t.meta_of(_OPERATORS.get(op, func), a, b)
        dtype = dtypes.register_of(meta.dtype)
        operand = _wider(t, a, b) if op in ("lt", "le", "gt", "ge", "eq", "ne") else dtype
        nodes = t.node_of(a, operand), t.node_of(b, operand)
        return t.proxy(t.add(op, nodes, dtype, t.extent_of(*nodes)), meta)


for _op, _names in {
    "maximum": "maximum fmax", "minimum": "minimum fmin", "and": "bitwise_and __and__ __rand__", "or": "bitwise_or __or__ __ror__",
    "xor": "bitwise_xor __xor__ __rxor__", "shl": "bitwise_left_shift __lshift__", "shr": "bitwise_right_shift __rshift__",
    "lt": "lt less __lt__", "le": "le less_equal __le__", "gt": "gt greater __gt__", "ge": "ge greater_equal __ge__", "eq": "eq __eq__",
    "ne": "ne not_equal __ne__", "floor_div": "floor_divide __floordiv__", "mod": "remainder __mod__",
}.items():  # fmt: skip
    _elementwise(_op, *_names.split())


def _logical(op: str, name: str) -> None:
    @handles(name)
    def handler(t: Tracer, func: Any, a: Any, b: Any) -> Proxy:
        meta = t.meta_of(func, a, b)
        nodes = _truth(t, a), _truth(t, b)
        return t.proxy(t.add(op, nodes, BOOL, t.extent_of(*nodes)), meta)


for _op, _name in {"and": "logical_and", "or": "logical_or", "xor": "logical_xor"}.items():
    _logical(_op, _name)


def _truth(t: Tracer, x: Any) -> int:
    return t.cast(x.node, BOOL) if isinstance(x, Proxy) else t.constant(x, BOOL)


def _arithmetic(op: str, *names: str, alpha: bool = False, swapped: bool = False) -> None:
    @handles(*names)
    def handler(t: Tracer, func: Any, a: Any, b: Any, *more: Any, **options: Any) -> Proxy:
        scale = options.pop("alpha", 1) if alpha else 1
        if more or options:
            raise at_user_line(f"{_name_of(func)} takes no options in a fused function")
        if swapped:
            a, b = b, a
        meta = t.meta_of(_OPERATORS[op], a, b)
        dtype = dtypes.register_of(meta.dtype)
        x, y = t.node_of(a, dtype), t.node_of(b, dtype)
        if scale != 1:
            y = t.add("mul", (y, t.constant(scale, dtype)), dtype, t.extent_of(y))
        return t.proxy(t.add(op, (x, y), dtype, t.extent_of(x, y)), meta)


_arithmetic("add", "add", "__add__", "__radd__", alpha=True)
_arithmetic("sub", "sub", "subtract", "__sub__", alpha=True)
_arithmetic("sub", "rsub", "__rsub__", alpha=True, swapped=True)
_arithmetic("mul", "mul", "multiply", "__mul__", "__rmul__")


@handles("div", "divide", "true_divide", "__truediv__")
def _div(t: Tracer, func: Any, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return t.call(torch.floor_divide, (a, b), {})
    if rounding_mode is not None:
        return t.call(torch.trunc, (t.call(torch.div, (a, b), {}),), {})
    meta = t.meta_of(operator.truediv, a, b)
    nodes = t.node_of(a, F32), t.node_of(b, F32)
    if isinstance(b, numbers.Number) and b and math.frexp(b)[0] == 0.5:  # a power of two: the product with its reciprocal is the same
        return t.proxy(t.add("mul", (nodes[0], t.constant(1.0 / b, F32)), F32, t.extent_of(nodes[0])), meta)
    return t.proxy(t.add("div", nodes, F32, t.extent_of(*nodes)), meta)


@handles("__rtruediv__", "__rdiv__")
def _rdiv(t: Tracer, func: Any, a: Any, b: Any) -> Any:
    return t.call(torch.div, (b, a), {})


@handles("pow", "__pow__")
def _pow(t: Tracer, func: Any, a: Any, b: Any) -> Any:
    if isinstance(b, numbers.Number) and b in (0.5, -0.5, -1, 1, 2, 3, 4):
        meta = t.meta_of(torch.pow, a, b)
        dtype = dtypes.register_of(meta.dtype)
        x = t.node_of(a, dtype)
        if dtype == F32 and b in (0.5, -0.5, -1):
            return t.proxy(t.add({0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[b], (x,), F32, t.extent_of(x)), meta)
        if b in (1, 2, 3, 4):
            square = t.add("mul", (x, x), dtype, t.extent_of(x))
            power = {1: x, 2: square}.get(int(b))
            if power is None:
                power = t.add("mul", (square, x if b == 3 else square), dtype, t.extent_of(x))
            return t.proxy(power, meta)
    meta = t.meta_of(operator.pow, a, b)
    if dtypes.register_of(meta.dtype) != F32:
        raise at_user_line("torch.pow: integers have powers of 1 to 4 only")
    nodes = t.node_of(a, F32), t.node_of(b, F32)
    return t.proxy(t.add("pow", nodes, F32, t.extent_of(*nodes)), meta)


@handles("where")
def _where(t: Tracer, func: Any, condition: Any, a: Any, b: Any) -> Proxy:
    if func is Tensor.where:  # x.where(condition, y)
        condition, a = a, condition
    meta = t.meta_of(torch.where, condition, a, b)
    dtype = dtypes.register_of(meta.dtype)
    nodes = t.node_of(condition, BOOL), t.node_of(a, dtype), t.node_of(b, dtype)
    return t.proxy(t.add("where", nodes, dtype, t.extent_of(*nodes)), meta)


@handles("masked_fill")
def _masked_fill(t: Tracer, func: Any, x: Any, mask: Any, value: Any) -> Any:
    meta = t.meta_of(torch.masked_fill, x, mask, value)
    dtype = dtypes.register_of(meta.dtype)
    nodes = t.node_of(mask, BOOL), t.node_of(value, dtype), t.node_of(x, dtype)
    return t.proxy(t.add("where", nodes, dtype, t.extent_of(*nodes)), meta)


@handles("clamp", "clip")
def _clamp(t: Tracer, func: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    meta = t.meta_of(torch.clamp, x, min, max)
    dtype = dtypes.register_of(meta.dtype)
    node = t.node_of(x, dtype)
    for op, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            other = t.node_of(bound, dtype)
            node = t.add(op, (node, other), dtype, t.extent_of(node, other))
    return t.proxy(node, meta)


# Casts and views.


@handles("to", "type")
def _to(t: Tracer, func: Any, x: Proxy, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Proxy:
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, Proxy):
            dtype = argument.dtype
    return _as(t, x, dtype if dtype is not None else x.dtype)


def _as(t: Tracer, x: Proxy, dtype: torch.dtype) -> Proxy:
    t.check_dtype(dtype, "a cast")
    storage, register = dtypes.storage_of(dtype), dtypes.register_of(dtype)
    node = x.node
    if register == F32:
        node = t.cast(node, F32)
        if storage != "f32":
            node = t.add("round", (node,), F32, t.extent_of(node), (storage,))
    elif register == I32 and storage != "i32":
        node = t.add("round", (t.cast(node, I32) if t.type_of(node) != F32 else node,), I32, t.extent_of(node), (storage,))
    else:
        node = t.cast(node, register)
    return t.proxy(node, x.meta.to(dtype))


for _name, _dtype in {
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64, "bool": torch.bool,
    "short": torch.int16, "char": torch.int8,
}.items():  # fmt: skip
    _HANDLERS[getattr(Tensor, _name)] = lambda t, func, x, dtype=_dtype, **options: _as(t, x, dtype)


@handles("type_as")
def _type_as(t: Tracer, func: Any, x: Proxy, other: Any) -> Proxy:
    return _as(t, x, other.dtype)


@handles("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "broadcast_to", "contiguous", "clone", "detach", "flatten")
def _view(t: Tracer, func: Any, x: Proxy, *args: Any, **kwargs: Any) -> Proxy:
    if func is Tensor.view and args and isinstance(args[0], torch.dtype):
        return _bits(t, x, args[0])
    if func is Tensor.expand_as:
        func, args = Tensor.expand, (args[0].meta.shape,)
    meta = t.meta_of(func, x, *args, **kwargs)
    node = x.node
    now, then = t.builder.nodes[node].extent, t.classify(meta)
    if t.rows and now not in t.extents(meta):
        if then == "other" or joined((now, then)) != then:
            raise at_user_line(f"{_name_of(func)}: the shape {t.shown(meta)} is neither of rows, of a row, nor of a column")
        # The same number in more places.
        return Proxy(t, t.add("cast", (node,), t.type_of(node), then), meta)
    return Proxy(t, node, meta)


def _bits(t: Tracer, x: Proxy, dtype: torch.dtype) -> Proxy:
    """x.view(dtype)."""
    op = {(torch.float32, torch.int32): "bits", (torch.int32, torch.float32): "from_bits"}.get((x.dtype, dtype))
    if op is None:
        raise at_user_line(f"Tensor.view: bits are taken of float32 as int32 and the other way, got {x.dtype} as {dtype}")
    register = dtypes.register_of(dtype)
    return Proxy(t, t.add(op, (x.node,), register, t.extent_of(x.node)), x.meta.view(dtype))


@handles("__getitem__")
def _getitem(t: Tracer, func: Any, x: Any, index: Any) -> Any:
    if isinstance(x, Table | Operand):
        return x.look_up(index)
    if isinstance(x, Tensor):
        if not t.takes_outside:
            raise at_user_line("a tensor that is looked up in must be an argument of the function")
        return t.table("captured", x).look_up(index)
    parts = index if isinstance(index, tuple) else (index,)
    if all(part is None or part is Ellipsis or part == slice(None) for part in parts if not isinstance(part, Proxy)):
        if not any(isinstance(part, Proxy) for part in parts):
            return _view(t, lambda meta: meta[index], x)
    raise at_user_line("a part of a tensor cannot be taken within a function: pass the parts as arguments, strided rows cost nothing")


@handles("index_select", "take_along_dim", "gather")
def _no_gather(t: Tracer, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise at_user_line(f"{_name_of(func)} is not among the operations that can be fused")


@handles("copy_")
def _copy(t: Tracer, func: Any, into: Proxy, value: Any, non_blocking: bool = False) -> Proxy:
    number = t.may_write.get(into.node)
    if number is None:
        raise at_user_line("copy_() is into an argument that `mutates` names")
    storage = t.builder.inputs[number].storage
    node = t.node_of(value, dtypes.register_of(into.dtype))
    extent = t.builder.inputs[number].extent
    if joined((t.extent_of(node), extent)) != extent:
        raise at_user_line(f"copy_(): a value of a larger shape than {t.shown(into.meta)}")
    t.builder.outputs = [x for x in t.builder.outputs if x.into != number]
    t.builder.outputs.append(Output(node, storage, extent, into=number))
    return Proxy(t, node, into.meta)


@handles("index_copy_")
def _index_copy(t: Tracer, func: Any, into: Proxy, dim: int, index: Any, value: Any) -> Proxy:
    if not isinstance(into, Operand) or not into.written or into.extent != FULL:
        raise at_user_line("index_copy_() is into an argument of an epilogue, [rows, n], that `mutates` names")
    if dim != 0:
        raise at_user_line(f"index_copy_(): whole rows are written where the index says: dim must be 0, got {dim}")
    rows = index.element(COLUMN) if isinstance(index, Operand) and index.vector else index.node if isinstance(index, Proxy) else None
    if rows is None or t.extent_of(rows) != COLUMN or t.type_of(rows) not in (I32, I64):
        raise at_user_line("index_copy_(): the index is an argument of integers, one for each row")
    number = into.input_of(FULL)
    storage = t.builder.inputs[number].storage
    node = t.node_of(value, dtypes.register_of(into.dtype))
    t.builder.outputs = [x for x in t.builder.outputs if x.into != number]
    t.builder.outputs.append(Output(node, storage, FULL, into=number, index=rows))
    return into


@handles("zeros_like", "ones_like", "full_like")
def _full_like(t: Tracer, func: Any, x: Proxy, value: Any = None, **options: Any) -> Proxy:
    number = {"zeros_like": 0, "ones_like": 1}.get(func.__name__, value)
    dtype = options.get("dtype") or x.dtype
    node = t.constant(number, dtypes.register_of(dtype))
    return Proxy(t, t.add("cast", (node,), t.type_of(node), t.builder.nodes[x.node].extent), x.meta.to(dtype))


@handles("new_zeros", "new_ones", "new_full")
def _new_full(t: Tracer, func: Any, x: Proxy, size: Any = (), fill_value: Any = None, *sizes: Any, **options: Any) -> Proxy:
    if t.rows or sizes or tuple(size if isinstance(size, list | tuple) else (size,)):
        raise at_user_line(f"{_name_of(func)} is fused where values are single numbers, for the size ()")
    number = {"new_zeros": 0, "new_ones": 1}.get(func.__name__, fill_value)
    dtype = options.get("dtype") or x.dtype
    return Proxy(t, t.constant(number, dtypes.register_of(dtype)), torch.empty((), dtype=dtype, device="meta"))


@handles("arange")
def _arange(t: Tracer, func: Any, *args: Any, **options: Any) -> Any:
    start, end = (0, args[0]) if len(args) == 1 else args[:2]
    if not t.rows or end - start != t.columns or len(args) > 2 or options.get("dtype", torch.int64).is_floating_point:
        raise at_user_line("torch.arange is fused where it numbers the columns: torch.arange(x.shape[-1])")
    column = t.value("column", options.get("dtype") or torch.int64, ROW)
    return column if start == 0 else t.call(torch.add, (column, start), {})


# Reductions over a row.


def _reduced(t: Tracer, op: str, func: Any, x: Proxy, dim: Any, keepdim: bool, dtype: torch.dtype | None, **meta_options: Any) -> Proxy:
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    if not t.rows:
        raise at_user_line(f"{_name_of(func)}: nothing is reduced over here")
    if dim is None or [d % x.meta.ndim for d in dims] != [x.meta.ndim - 1]:
        raise at_user_line(f"{_name_of(func)}: rows are reduced along themselves: dim must be -1, got {dim}")
    if t.builder.nodes[x.node].extent in (SCALAR, COLUMN):
        raise at_user_line(f"{_name_of(func)}: a value of shape {t.shown(x.meta)} has no columns to reduce over")
    if dtype is not None:
        meta_options["dtype"] = dtype
    meta = t.meta_of(func, x, dim=dim, keepdim=keepdim, **meta_options)
    register = dtypes.register_of(meta.dtype)
    inner = F32 if register == F32 else I32
    node = t.node_of(x, inner)
    extent = SCALAR if t.builder.nodes[node].extent == ROW else COLUMN
    return Proxy(t, t.cast(t.add(op, (node,), inner, extent), register), meta)


@handles("sum")
def _sum(t: Tracer, func: Any, x: Proxy, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Proxy:
    return _reduced(t, "reduce_sum", torch.sum, x, dim, keepdim, dtype)


@handles("mean")
def _mean(t: Tracer, func: Any, x: Proxy, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    meta = t.meta_of(torch.mean, x, dim=dim, keepdim=keepdim, **({"dtype": dtype} if dtype else {}))
    total = _reduced(t, "reduce_sum", torch.sum, _as(t, x, torch.float32) if x.dtype.is_floating_point else x, dim, keepdim, torch.float32)
    return Proxy(t, t.call(torch.mul, (total, 1.0 / t.columns), {}).node, meta)


def _extremum(op: str, function: Any, *names: str) -> None:
    @handles(*names)
    def handler(t: Tracer, func: Any, x: Proxy, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        if isinstance(dim, Proxy | Table):  # torch.max(a, b)
            return t.call(torch.maximum if op == "reduce_max" else torch.minimum, (x, dim), {})
        result = _reduced(t, op, function, x, dim, keepdim, None)
        return result if func in (torch.amax, torch.amin, Tensor.amax, Tensor.amin) else _Values(result)


class _Values:
    """What torch.max(x, -1) returns, without indices."""

    def __init__(self, values: Proxy):
        self.values = values

    @property
    def indices(self) -> Any:
        raise at_user_line("the place of a row's maximum is not among what can be fused")

    def __iter__(self) -> Any:
        return iter((self.values, None))

    def __getitem__(self, place: int) -> Any:
        return self.values if place == 0 else self.indices


_extremum("reduce_max", torch.amax, "amax", "max")
_extremum("reduce_min", torch.amin, "amin", "min")


@handles("any")
def _any(t: Tracer, func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(t, "reduce_max", torch.amax, x.bool().to(torch.int32), dim, keepdim, None).bool()


@handles("all")
def _all(t: Tracer, func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(t, "reduce_min", torch.amin, x.bool().to(torch.int32), dim, keepdim, None).bool()


@handles("logsumexp")
def _logsumexp(t: Tracer, func: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
    most = x.amax(dim, keepdim=True)
    total = (x - most).exp().sum(dim, keepdim=True).log() + most
    return total if keepdim else total.squeeze(-1)


@handles("softmax")
def _softmax(t: Tracer, func: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    e = (x - x.amax(dim, keepdim=True)).exp()
    result = e * (1.0 / e.float().sum(dim, keepdim=True))
    return _retyped(t, result, dtype or x.dtype)


@handles("log_softmax")
def _log_softmax(t: Tracer, func: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    y = x - x.amax(dim, keepdim=True)
    return _retyped(t, y - y.exp().float().sum(dim, keepdim=True).log(), dtype or x.dtype)


@handles("var")
def _var(
    t: Tracer, func: Any, x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: int | None = None
) -> Any:
    fewer = int(unbiased) if correction is None else correction
    y = x - x.float().mean(dim, keepdim=True)
    total = (y * y).sum(dim, keepdim=keepdim) / (t.columns - fewer)
    return _retyped(t, total, x.dtype)


@handles("std")
def _std(t: Tracer, func: Any, *args: Any, **kwargs: Any) -> Any:
    return t.call(torch.var, args, kwargs).sqrt()


@handles("norm")
def _norm(t: Tracer, func: Any, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    if p in (2, "fro", None):
        y = x.float()
        return _retyped(t, (y * y).sum(dim, keepdim=keepdim).sqrt(), dtype or x.dtype)
    if p == 1:
        return _retyped(t, x.float().abs().sum(dim, keepdim=keepdim), dtype or x.dtype)
    if p == math.inf:
        return x.abs().amax(dim, keepdim=keepdim)
    raise at_user_line("torch.norm: p must be 1, 2 or inf")


@handles("rms_norm")
def _rms_norm(t: Tracer, func: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    h = x.float()
    y = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return _retyped(t, y if weight is None else y * weight, x.dtype)


@handles("layer_norm")
def _layer_norm(t: Tracer, func: Any, x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    h = x.float()
    y = h - h.mean(-1, keepdim=True)
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return _retyped(t, y if bias is None else y + bias, x.dtype)


def _retyped(t: Tracer, x: Any, dtype: torch.dtype) -> Any:
    """With the dtype that torch gives, unrounded: it is rounded where it is stored."""
    return Proxy(t, x.node, x.meta.to(dtype))


# Compositions.


def _composition(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a function of a tensor and options; the result has the tensor's dtype."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        handles(*names)(
            lambda t, func, x, *args, **kwargs: _retyped(
                t, function(x.float() if x.dtype.is_floating_point else x, *args, **kwargs), x.dtype
            )
        )
        return function

    return register


@_composition("square")
def _square(x: Any) -> Any:
    return x * x


@_composition("sigmoid")
def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + (-x).exp())


@_composition("silu")
def _silu(x: Any, inplace: bool = False) -> Any:
    return x / (1.0 + (-x).exp())


@_composition("relu")
def _relu(x: Any, inplace: bool = False) -> Any:
    return x.clamp(min=0)


@_composition("relu6")
def _relu6(x: Any, inplace: bool = False) -> Any:
    return x.clamp(0, 6)


@_composition("hardtanh")
def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return x.clamp(min_val, max_val)


@_composition("hardsigmoid")
def _hardsigmoid(x: Any, inplace: bool = False) -> Any:
    return (x + 3.0).clamp(0, 6) * (1 / 6)


@_composition("hardswish")
def _hardswish(x: Any, inplace: bool = False) -> Any:
    return x * ((x + 3.0).clamp(0, 6) * (1 / 6))


@_composition("gelu")
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return x / (1.0 + (-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).exp())  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


@_composition("softplus")
def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    y = x * beta
    return torch.where(y > threshold, x, y.clamp(max=threshold).exp().log1p() * (1 / beta))


@_composition("logsigmoid")
def _logsigmoid(x: Any) -> Any:
    return x.clamp(max=0) - (-x.abs()).exp().log1p()


@_composition("mish")
def _mish(x: Any, inplace: bool = False) -> Any:
    return x * _softplus(x).tanh()


@_composition("leaky_relu")
def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return torch.where(x > 0, x, x * negative_slope)


@_composition("elu")
def _elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return torch.where(x > 0, x, alpha * x.clamp(max=0).expm1())


@_composition("sign", "sgn")
def _sign(x: Any) -> Any:
    return (
        torch.where(x > 0, 1, 0) - torch.where(x < 0, 1, 0) + x * 0
        if x.dtype.is_floating_point
        else torch.where(x > 0, 1, torch.where(x < 0, -1, 0))
    )


@_composition("softsign")
def _softsign(x: Any) -> Any:
    return x / (1.0 + x.abs())


@_composition("tanhshrink")
def _tanhshrink(x: Any) -> Any:
    return x - x.tanh()


@_composition("nan_to_num")
def _nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    most = torch.finfo(torch.float32).max
    x = torch.where(x.isnan(), 0.0 if nan is None else nan, x)
    x = torch.where(x == math.inf, most if posinf is None else posinf, x)
    return torch.where(x == -math.inf, -most if neginf is None else neginf, x)


@handles("isinf")
def _isinf(t: Tracer, func: Any, x: Any) -> Any:
    return x.abs() == math.inf


@handles("isfinite")
def _isfinite(t: Tracer, func: Any, x: Any) -> Any:
    return x.abs() < math.inf


@handles("lerp")
def _lerp(t: Tracer, func: Any, a: Any, b: Any, weight: Any) -> Any:
    return a + weight * (b - a)


@handles("addcmul")
def _addcmul(t: Tracer, func: Any, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + a * b * value if value != 1 else x + a * b


@handles("addcdiv")
def _addcdiv(t: Tracer, func: Any, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + (a / b) * value if value != 1 else x + a / b
