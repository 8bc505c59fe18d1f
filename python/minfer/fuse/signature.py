"""From a Python function's signature to an operator's schema."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .errors import FuseError

_SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}


class Signature:
    """``tensors``: the names of the parameters that are tensors, in order; ``constants``: those that are not, which functions are compiled
    for, value by value."""

    def __init__(self, function: Callable[..., Any], mutates: Sequence[str] = ()):
        self.parameters = inspect.signature(function).parameters
        self.tensors: list[str] = []
        self.constants: list[str] = []
        hints = _hints(function)
        parts, keyword_only = [], False
        for name, parameter in self.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise FuseError(f"{function.__qualname__}: a fused function has named parameters, got *{name}")
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
                parts.append("*")
                keyword_only = True
            parts.append(self._parameter(function, name, parameter, hints.get(name), name in mutates))
        unknown = [name for name in mutates if name not in self.tensors]
        if unknown:
            raise FuseError(f"{function.__qualname__}: mutates names {unknown[0]!r}, which is none of its tensors")
        self.schema = ", ".join(parts)

    def _parameter(self, function: Callable[..., Any], name: str, parameter: inspect.Parameter, hint: Any, written: bool) -> str:
        default = parameter.default
        kind = hint if hint in _SCALARS else type(default) if type(default) in _SCALARS else None
        if kind is None:
            if default not in (parameter.empty, None):
                raise FuseError(f"{function.__qualname__}: {name} must be a tensor, a number, a bool or a str, its default is {default!r}")
            self.tensors.append(name)
            alias = f"({chr(ord('a') + len(self.tensors) - 1)}!)" if written else ""
            return f"Tensor{alias}{'?' if default is None else ''} {name}" + ("=None" if default is None else "")
        self.constants.append(name)
        text = f"{_SCALARS[kind]} {name}"
        return text if default is parameter.empty else f"{text}={_literal(default)}"

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, defaults too."""
        names = list(self.parameters)
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        return {name: given[name] if name in given else self.parameters[name].default for name in names}


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
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
