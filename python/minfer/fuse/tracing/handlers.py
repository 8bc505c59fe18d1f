"""The operations that can be fused: for each function of torch and method of tensors, what traces a call of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Handler = Callable[..., Any]  # of the tracer, the function and its arguments
HANDLERS: dict[Any, Handler] = {}


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func)).removesuffix("_")
    return f"torch.{name}" if hasattr(torch, name) else f"Tensor.{name}"


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Of torch's functions and of tensors' methods with these names."""

    def register(handler: Handler) -> Handler:
        for name in names:
            for place in (torch, Tensor, torch.nn.functional, torch.special):
                func = getattr(place, name, None)
                if callable(func):
                    HANDLERS[func] = handler
            builtin = getattr(operator, name, None)
            if builtin is not None:
                HANDLERS[builtin] = handler
        return handler

    return register
