"""What a fused function's graph depends on of the tensors of a call: their dtypes, how far they extend, which are handed over by value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dtypes
from .errors import FuseError

Described = tuple[torch.dtype, str, bool]  # dtype, extent, whether the number itself is a parameter of the kernel


def described(
    function: str, arguments: dict[str, Any], names: Iterable[str], device: torch.device, extent_of: Callable[[str, Tensor], str]
) -> tuple[Described | None, ...]:
    """Of each tensor; None where it is missing. ``device``: where the function is computed."""
    result: list[Described | None] = []
    for name in names:
        x = arguments[name]
        if x is None:
            result.append(None)
            continue
        if not dtypes.is_supported(x.dtype):
            raise FuseError(f"{function}: {name} must not be {str(x.dtype).removeprefix('torch.')}, which fused functions do not take")
        by_value = x.ndim == 0 and x.device.type == "cpu" and device.type != "cpu"
        result.append((x.dtype, extent_of(name, x), by_value))
    return tuple(result)


def plain(tensors: Iterable[Described | None]) -> list[list[Any] | None]:
    """For a manifest."""
    return [None if x is None else [dtypes.storage_of(x[0]), x[1], x[2]] for x in tensors]


def shown(names: Sequence[str], tensors: Sequence[list[Any] | None]) -> list[str]:
    """For a message; ``tensors`` as plain() gives them."""
    return [f"{name} {'missing' if x is None else ' '.join(x[:2])}" for name, x in zip(names, tensors, strict=True)]


def shown_constants(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in zip(names, values, strict=True)]


def shown_columns(columns: int | None) -> str:
    return "any number of columns" if columns is None else f"{columns} columns"
