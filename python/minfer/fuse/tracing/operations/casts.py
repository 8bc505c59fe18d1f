"""Casts: values of another dtype, and the bits of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import dtypes
from ...errors import at_user_line
from ...graph import F32, I32
from ..handlers import HANDLERS, handles
from ..proxy import Proxy
from ..tracer import Tracer


@handles("to", "type")
def _to(t: Tracer, func: Any, x: Proxy, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Proxy:
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, Proxy):
            dtype = argument.dtype
    return as_dtype(t, x, dtype if dtype is not None else x.dtype)


def as_dtype(t: Tracer, x: Proxy, dtype: torch.dtype) -> Proxy:
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
    HANDLERS[getattr(Tensor, _name)] = lambda t, func, x, dtype=_dtype, **options: as_dtype(t, x, dtype)


@handles("type_as")
def _type_as(t: Tracer, func: Any, x: Proxy, other: Any) -> Proxy:
    return as_dtype(t, x, other.dtype)


def retyped(t: Tracer, x: Any, dtype: torch.dtype) -> Any:
    """With the dtype that torch gives, unrounded: it is rounded where it is stored."""
    return Proxy(t, x.node, x.meta.to(dtype))


def bits(t: Tracer, x: Proxy, dtype: torch.dtype) -> Proxy:
    """x.view(dtype)."""
    op = {(torch.float32, torch.int32): "bits", (torch.int32, torch.float32): "from_bits"}.get((x.dtype, dtype))
    if op is None:
        raise at_user_line(f"Tensor.view: bits are taken of float32 as int32 and the other way, got {x.dtype} as {dtype}")
    register = dtypes.register_of(dtype)
    return Proxy(t, t.add(op, (x.node,), register, t.extent_of(x.node)), x.meta.view(dtype))
