"""Elementwise operations: arithmetic, comparisons, logic, selection."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor

from ...._core.torch_private import without_torch_functions
from ... import dtypes
from ...errors import at_user_line
from ...graph import BOOL, F32
from ..handlers import HANDLERS, handles, name_of
from ..proxy import Proxy
from ..tracer import Tracer

# Python's operators, which take a number on either side, for metas.
_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne, "floor_div": operator.floordiv, "mod": operator.mod,
}  # fmt: skip


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
HANDLERS.pop(Tensor.__rpow__, None)
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
            raise at_user_line(f"{name_of(func)} takes no options in a fused function")
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
