"""A graph's operations on scalars of the CuTe DSL, and groups of scalars between registers and memory.

Plain Python, which runs while a kernel is traced: a list of scalars is unrolled code. Transcendental functions use the hardware's
approximations where these are within 2 ulp of float32 (exp2, reciprocals, square roots' reciprocals, quotients) and the accurate versions
elsewhere (logarithms, tanh, erf, sin, cos, powers). tanh is the hardware's, within 2^-11, where it is only scaled and then stored as
bf16 or in 8 bits (Graph.coarse_tanhs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from ..dtypes import INTEGERS
from ..graph import BOOL, COMPARISONS, F32, I32, I64, REDUCTIONS, Graph, Node

REGISTERS = {F32: Float32, I32: Int32, I64: Int64, BOOL: Boolean}
STORAGES = {
    "f32": Float32, "bf16": cutlass.BFloat16, "f16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2,
    "i64": Int64, "i32": Int32, "i16": cutlass.Int16, "i8": cutlass.Int8, "u8": cutlass.Uint8, "bool": cutlass.Uint8,
}  # fmt: skip
_LOG2_E = math.log2(math.e)


def approximate(instruction: str, x: Any) -> Float32:
    """An instruction of one float32 operand."""
    options = {"has_side_effects": False, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Float32(llvm.inline_asm(T.f32(), [Float32(x).ir_value()], f"{instruction}.f32 $0, $1;", "=f,f", **options))


def _exp(x: Any) -> Any:
    return cute.math.exp2(x * Float32(_LOG2_E), approx=True)


def _expm1(x: Any) -> Any:
    return cute.math.expm1(x)


def _floor_div(a: Any, b: Any, dtype: str) -> Any:
    if dtype == F32:
        return cute.math.floor(cute.math.div(a, b))
    return a // b


def _mod(a: Any, b: Any, dtype: str) -> Any:
    if dtype == F32:
        return a - cute.math.floor(cute.math.div(a, b)) * b
    return a - (a // b) * b


def _select(condition: Any, a: Any, b: Any, dtype: str) -> Any:
    """A number of its type: what the DSL's select_ returns has none, and cannot be converted."""
    return REGISTERS[dtype](cutlass.select_(condition, a, b))


def _maximum(a: Any, b: Any, dtype: str) -> Any:
    return cute.math.max(a, b, propagate_nan=True) if dtype == F32 else _select(a > b, a, b, dtype)


def _minimum(a: Any, b: Any, dtype: str) -> Any:
    return cute.math.min(a, b, propagate_nan=True) if dtype == F32 else _select(a < b, a, b, dtype)


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda x: -x,
    "exp": _exp,
    "exp2": lambda x: cute.math.exp2(x, approx=True),
    "expm1": _expm1,
    "log": cute.math.log,
    "log2": cute.math.log2,
    "log1p": cute.math.log1p,
    "sqrt": cute.math.sqrt,
    "rsqrt": lambda x: cute.math.rsqrt(x, approx=True),
    "reciprocal": lambda x: cute.math.rcp(x, approx=True),
    "sin": cute.math.sin,
    "cos": cute.math.cos,
    "tanh": cute.math.tanh,
    "erf": cute.math.erf,
    "floor": cute.math.floor,
    "ceil": cute.math.ceil,
    "round_even": cute.math.roundeven,
    "trunc": cute.math.trunc,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
_BINARY: dict[str, Callable[[Any, Any, str], Any]] = {
    "add": lambda a, b, _: a + b,
    "sub": lambda a, b, _: a - b,
    "mul": lambda a, b, _: a * b,
    "div": lambda a, b, _: cute.math.div(a, b, full=True),
    "floor_div": _floor_div,
    "mod": _mod,
    "pow": lambda a, b, _: cute.math.pow(a, b),
    "maximum": _maximum,
    "minimum": _minimum,
    "and": lambda a, b, _: a & b,
    "or": lambda a, b, _: a | b,
    "xor": lambda a, b, _: a ^ b,
    "shl": lambda a, b, _: a << b,
    "shr": lambda a, b, _: a >> b,
}
# What a value that takes no part leaves unchanged.
IDENTITY = {"reduce_sum": 0.0, "reduce_max": -math.inf, "reduce_min": math.inf}
_LEAST, _MOST = INTEGERS["i32"]


def identity(op: str, dtype: str) -> Any:
    if dtype == F32:
        return Float32(IDENTITY[op])
    return Int32({"reduce_sum": 0, "reduce_max": _LEAST, "reduce_min": _MOST}[op])


def combine(op: str, a: Any, b: Any, dtype: str) -> Any:
    return a + b if op == "reduce_sum" else _maximum(a, b, dtype) if op == "reduce_max" else _minimum(a, b, dtype)


def _reciprocal(y: Any) -> tuple[Any, Any]:
    """Two factors by which what is multiplied is divided by y: each reciprocal is a normal number, whatever y is."""
    magnitude = cute.math.abs(y)
    scale = _select(magnitude > Float32(2.0**126), Float32(0.25), Float32(1.0), F32)
    scale = _select(magnitude < Float32(2.0**-126), Float32(2.0**24), scale, F32)
    return cute.math.rcp(y * scale, approx=True), scale


def constant(value: Any, dtype: str) -> Any:
    return REGISTERS[dtype](value)


def cast(x: Any, source: str, target: str) -> Any:
    if source == target:
        return x
    if target == BOOL:
        return x != REGISTERS[source](0)
    if source == BOOL:
        return _select(x, REGISTERS[target](1), REGISTERS[target](0), target)
    return x.to(REGISTERS[target])


def as_storage(values: Sequence[Any], register: str, storage: str) -> cute.Tensor:
    """Registers that hold the values as a tensor of ``storage`` does; as many as a conversion takes at once, at least 4."""
    length = max(len(values), 4)
    middle, dtype = REGISTERS[I32 if register == BOOL else register], STORAGES[storage]
    if storage in INTEGERS and register == F32 and storage != "i64":
        low, high = INTEGERS[storage]
        if storage != "i32":  # the hardware saturates to 32 bits
            values = [_minimum(_maximum(x, Float32(low), F32), Float32(high), F32) for x in values]
        values, middle = [cute.math.trunc(x).to(Int32) for x in values], Int32
    elif register == BOOL:
        values = [cast(x, BOOL, I32) for x in values]
    from_registers = cute.make_rmem_tensor(length, middle)
    for i in range(length):
        from_registers[i] = values[i] if i < len(values) else middle(0)
    stored = cute.make_rmem_tensor(length, dtype)
    stored.store(from_registers.load().to(dtype))
    return stored


def from_storage(stored: cute.Tensor, count: int, register: str, storage: str) -> list[Any]:
    """The values that registers of ``storage`` hold."""
    length = cute.size(stored)
    middle = REGISTERS[I32 if register == BOOL else register]
    values = cute.make_rmem_tensor(length, middle)
    values.store(stored.load().to(middle))
    return [values[i] != middle(0) if register == BOOL else values[i] for i in range(count)]


def rounded(values: Sequence[Any], source: str, target: str, storage: str) -> list[Any]:
    """From registers of type ``source`` as tensors of ``storage`` would give them back, in registers of type ``target``."""
    result: list[Any] = []
    for i in range(0, len(values), 8):
        part = values[i : i + 8]
        result += from_storage(as_storage(part, source, storage), len(part), target, storage)
    return result


def pointer_at(pointer: cute.Pointer, elements: Any, storage: str, align: int) -> cute.Pointer:
    """``elements`` further on, with addresses of 64 bits."""
    dtype = STORAGES[storage]
    address = pointer.toint() + Int64(elements) * (dtype.width // 8)
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def load_vector(pointer: cute.Pointer, elements: Any, count: int, storage: str) -> cute.Tensor:
    """``count`` (1, 2, 4, 8 or 16) numbers from a multiple of as many on; padded to the least that conversions take."""
    align = min(count * STORAGES[storage].width // 8, 16)
    there = cute.make_tensor(pointer_at(pointer, elements, storage, align), cute.make_layout(count))
    here = cute.make_rmem_tensor(count, STORAGES[storage])
    cute.autovec_copy(there, here)
    if count >= 4:
        return here
    padded = cute.make_rmem_tensor(4, STORAGES[storage])
    for i in range(4):
        padded[i] = here[min(i, count - 1)]
    return padded


@cute.jit
def store_vector(pointer: cute.Pointer, elements: Int64, stored: cute.Tensor, count: cutlass.Constexpr, storage: cutlass.Constexpr,
                 predicate: Boolean):  # fmt: skip
    if predicate:
        align = min(count * STORAGES[storage].width // 8, 16)
        there = cute.make_tensor(pointer_at(pointer, elements, storage, align), cute.make_layout(count))
        cute.autovec_copy(cute.make_tensor(stored.iterator, cute.make_layout(count)), there)


class Evaluator:
    """The values of a graph's nodes for the elements that a thread has: a list for values that differ from column to column, or one scalar.

    ``leaf`` gives those of ``input``, ``value`` and ``gather`` nodes, ``many``: whether a node has one for each element."""

    def __init__(self, graph: Graph, elements: int, leaf: Callable[[int, Node, list[Any]], Any], many: Callable[[Node], bool]):
        self.graph, self.elements, self.leaf, self.many = graph, elements, leaf, many
        self.coarse = graph.coarse_tanhs()
        self.known: dict[int, Any] = {}

    def each(self, number: int) -> list[Any]:
        """One for each element."""
        value = self.value(number)
        return value if isinstance(value, list) else [value] * self.elements

    def value(self, number: int) -> Any:
        if number not in self.known:
            self.known[number] = self._evaluate(number, self.graph.nodes[number])
        return self.known[number]

    def _evaluate(self, number: int, node: Node) -> Any:
        if node.op in REDUCTIONS:
            raise AssertionError("a reduction is not known yet")
        if node.op == "constant":
            return constant(node.attrs[0], node.dtype)
        operands = [self.value(i) for i in node.inputs]
        if node.op in ("input", "value", "gather"):
            return self.leaf(number, node, operands)
        types = [self.graph.nodes[i].dtype for i in node.inputs]
        many = any(isinstance(x, list) for x in operands)
        if number in self.coarse:
            values = [approximate("tanh.approx", x) for x in (operands[0] if many else operands)]
            return values if many else values[0]
        if node.op == "round":
            values = rounded(operands[0] if many else [operands[0]], types[0], node.dtype, node.attrs[0])
            return values if many else values[0]
        if node.op == "div" and node.dtype == F32 and isinstance(operands[0], list) and not isinstance(operands[1], list):
            factor, scale = _reciprocal(operands[1])
            return [x * factor * scale for x in operands[0]]
        rows = zip(*[x if isinstance(x, list) else [x] * self.elements for x in operands], strict=True) if many else [operands]
        values = [self._scalar(node, types, list(row)) for row in rows]
        return values if many else values[0]

    def _scalar(self, node: Node, types: list[str], x: list[Any]) -> Any:
        op = node.op
        if op in _UNARY:
            return _UNARY[op](x[0])
        if op == "abs":
            return cute.math.abs(x[0]) if node.dtype == F32 else _maximum(x[0], -x[0], node.dtype)
        if op in ("bits", "from_bits"):
            return REGISTERS[types[0]](x[0]).bitcast(REGISTERS[node.dtype])
        if op == "isnan":
            return x[0] != x[0]
        if op == "not":
            return x[0] ^ Boolean(True)
        if op in COMPARISONS:
            return _COMPARE[op](x[0], x[1])
        if op in _BINARY:
            return _BINARY[op](x[0], x[1], node.dtype)
        if op == "where":
            return _select(x[0], x[1], x[2], node.dtype)
        if op == "cast":
            return cast(x[0], types[0], node.dtype)
        raise AssertionError(op)
