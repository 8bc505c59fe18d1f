"""From a Python function's signature to an operator's schema."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .errors import FuseError

_SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """``kind``: Tensor, Tensor?, bool, int, float or str. What has no default is ``required``."""

    name: str
    kind: str
    keyword_only: bool = False
    required: bool = True
    default: Any = None
    written: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.kind.startswith("Tensor")


class Signature:
    """``tensors``: the names of the parameters that are tensors, in order; ``constants``: those that are not, which kernels are compiled
    for, value by value."""

    def __init__(self, parameters: Sequence[Parameter]):
        self.parameters = tuple(parameters)
        self.tensors = [x.name for x in parameters if x.is_tensor]
        self.constants = [x.name for x in parameters if not x.is_tensor]

    @staticmethod
    def of(function: Callable[..., Any], mutates: Sequence[str] = ()) -> Signature:
        try:
            of_python = inspect.signature(function).parameters.values()
        except ValueError:
            name = getattr(function, "__qualname__", repr(function))
            raise FuseError(f"{name} has no signature, as functions of Python have: wrap it in one, lambda x: {name}(x)") from None
        hints = _hints(function)
        parameters = [_parameter(function.__qualname__, x, hints.get(x.name), x.name in mutates) for x in of_python]
        signature = Signature(parameters)
        unknown = [name for name in mutates if name not in signature.tensors]
        if unknown:
            raise FuseError(f"{function.__qualname__}: mutates names {unknown[0]!r}, which is none of its tensors")
        return signature

    def plain(self) -> list[dict[str, Any]]:
        """For a manifest."""
        return [dataclasses.asdict(x) for x in self.parameters]

    @staticmethod
    def from_plain(parameters: Sequence[dict[str, Any]]) -> Signature:
        return Signature([Parameter(**x) for x in parameters])

    @property
    def schema(self) -> str:
        """The arguments of torch's schema."""
        parts: list[str] = []
        for i, x in enumerate(self.parameters):
            if x.keyword_only and (i == 0 or not self.parameters[i - 1].keyword_only):
                parts.append("*")
            kind = x.kind if not x.written else x.kind.replace("Tensor", f"Tensor({chr(ord('a') + i)}!)")
            parts.append(f"{kind} {x.name}" + ("" if x.required else f"={_literal(x.default)}"))
        return ", ".join(parts)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, defaults too."""
        given = dict(zip((x.name for x in self.parameters), args, strict=False))
        given.update(kwargs)
        return {x.name: given[x.name] if x.name in given else x.default for x in self.parameters}


def _parameter(function: str, parameter: inspect.Parameter, hint: Any, written: bool) -> Parameter:
    name, default = parameter.name, parameter.default
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise FuseError(f"{function}: a fused function has named parameters, got *{name}")
    keyword_only, required = parameter.kind is parameter.KEYWORD_ONLY, default is parameter.empty
    kind = hint if hint in _SCALARS else type(default) if type(default) in _SCALARS else None
    if kind is not None:
        return Parameter(name, _SCALARS[kind], keyword_only, required, None if required else default)
    if not required and default is not None:
        raise FuseError(f"{function}: {name} must be a tensor, a number, a bool or a str, its default is {default!r}")
    return Parameter(name, "Tensor" if required else "Tensor?", keyword_only, required, written=written)


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # names that only the type checker knows
        hints = dict(getattr(function, "__annotations__", {}))
    named = {"bool": bool, "int": int, "float": float, "str": str}
    return {name: _of_union(named.get(hint, hint) if isinstance(hint, str) else hint) for name, hint in hints.items()}


def _of_union(hint: Any) -> Any:
    """The type of an optional one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [x for x in typing.get_args(hint) if x is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint
