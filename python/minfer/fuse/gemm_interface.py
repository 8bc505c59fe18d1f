"""What a fused GEMM takes: the parameters of its operator, and the checks of a call's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import FuseError
from .graph import COLUMN, FULL, ROW, SCALAR, Graph
from .signature import Parameter, Signature
from .specialisation import Described, described

_STORED = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
MULTIPLIED = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
# What an operand is, by its shape; a "vector" is of the columns or of the rows, as it is used.
VECTOR, ONE, EXPERT_ROW, EXPERT_NUMBER = "vector", "vector of one", "expert row", "expert number"
EXTENTS = {FULL: FULL, ROW: ROW, COLUMN: COLUMN, SCALAR: SCALAR, VECTOR: ROW, ONE: SCALAR, EXPERT_ROW: ROW, EXPERT_NUMBER: SCALAR}


@dataclasses.dataclass(frozen=True)
class GemmSpace:
    """A call's sizes. ``columns`` are those of the output: n, or n / 2 where columns are gated."""

    m: int
    n: int
    k: int
    columns: int
    experts: int = 0  # 0: one matrix


@dataclasses.dataclass(frozen=True)
class GemmSpecialisation:
    """What graphs depend on: the dtypes of A and B, the operands, the constants, the columns, and k where there is a prologue."""

    a: torch.dtype
    b: torch.dtype
    operands: tuple[Described | None, ...]
    constants: tuple[Any, ...]
    columns: int
    k: int
    grouped: bool


class GemmInterface:
    """``operands``: the names of the tensors that the epilogue and the prologue have."""

    def __init__(self, name: str, signature: Signature, gate: str, has_prologue: bool):
        self.name, self.signature, self.gate, self.has_prologue = name, signature, gate, has_prologue
        self.mutates = tuple(x.name for x in signature.parameters if x.written)
        self.operands = [name for name in signature.tensors if name not in ("a", "b", "offsets")]

    def space(self, arguments: dict[str, Any]) -> GemmSpace:
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

    def specialise(self, arguments: dict[str, Any], space: GemmSpace) -> GemmSpecialisation:
        a, b = arguments["a"], arguments["b"]
        if b.dtype not in MULTIPLIED:
            raise FuseError(f"{self.name}: b must be bfloat16, float16 or float8_e4m3fn, got {b.dtype}")
        if not self.has_prologue and a.dtype != b.dtype:
            raise FuseError(f"{self.name}: a must be {b.dtype}, as b is, got {a.dtype}: another type needs a prologue")
        operands = described(self.name, arguments, self.operands, a.device, lambda name, x: self._what(name, x, space))
        if self.has_prologue and (a.dtype not in _STORED or b.dtype.itemsize != 2):
            raise FuseError(
                f"{self.name}: with a prologue a must be of 16 or 8 bits and b bfloat16 or float16, got {a.dtype} and {b.dtype}"
            )
        return GemmSpecialisation(
            a.dtype, b.dtype, operands, tuple(arguments[name] for name in self.signature.constants), space.columns,
            int(space.k) if self.has_prologue else 0, space.experts > 0,
        )  # fmt: skip

    def check_operands(self, graph: Graph, prologue: Graph | None, arguments: dict[str, Any], space: GemmSpace) -> None:
        """That every operand has the numbers that the graphs of the epilogue and the prologue read or write."""
        self._check_operands(graph, False, arguments, space)
        if prologue is not None:
            self._check_operands(prologue, True, arguments, space)

    def _check_operands(self, graph: Graph, is_prologue: bool, arguments: dict[str, Any], space: GemmSpace) -> None:
        columns = space.k if is_prologue else space.columns
        scattered = {y.into for y in graph.outputs if y.index >= 0}
        read = {node.attrs[0] for node in graph.nodes if node.op == "input"}
        for i, x in enumerate(graph.inputs):
            shape = tuple(arguments[x.name].shape)
            rows = space.m if i not in scattered or i in read else shape[0]
            wanted = {FULL: (rows, columns), ROW: (columns,), COLUMN: (space.m,), SCALAR: ()}[x.extent]
            each = shape[1:] if len(shape) == 3 else shape  # of one expert
            if (each != wanted) if x.extent == FULL else (_without_ones(each) != _without_ones(wanted)):
                named = {FULL: "[m, n]", ROW: "[n]", COLUMN: "[m, 1], or [m] that is looked up by the row", SCALAR: "one number"}[x.extent]
                named = named.replace("n]", "k]" if is_prologue else "n / 2]" if self.gate else "n]")
                raise FuseError(f"{self.name}: {x.name} must be {named}, here {list(wanted)}, got {list(shape)}")


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    return Signature.of(function).parameters


def signature_of(epilogue: Callable[..., Any], prologue: Callable[..., Any] | None, mutates: Sequence[str]) -> Signature:
    """(a, b, what the epilogue has, and by name what the prologue has and the experts' offsets)."""
    own = Signature.of(epilogue, mutates).parameters
    if len(own) < 3:
        raise FuseError(f"{epilogue.__qualname__}: an epilogue is a function of (acc, row, col, ...), got {len(own)} parameters")
    parameters = list(own[3:])
    if prologue is not None:
        others = parameters_of(prologue)
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


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
