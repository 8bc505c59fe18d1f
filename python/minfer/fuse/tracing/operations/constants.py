"""Values that follow from no argument: constants, and the numbers of columns."""

from __future__ import annotations

from typing import Any

import torch

from ... import dtypes
from ...errors import at_user_line
from ...graph import ROW
from ..handlers import handles, name_of
from ..proxy import Proxy
from ..tracer import Tracer


@handles("zeros_like", "ones_like", "full_like")
def _full_like(t: Tracer, func: Any, x: Proxy, value: Any = None, **options: Any) -> Proxy:
    number = {"zeros_like": 0, "ones_like": 1}.get(func.__name__, value)
    dtype = options.get("dtype") or x.dtype
    node = t.constant(number, dtypes.register_of(dtype))
    return Proxy(t, t.add("cast", (node,), t.type_of(node), t.builder.nodes[x.node].extent), x.meta.to(dtype))


@handles("new_zeros", "new_ones", "new_full")
def _new_full(t: Tracer, func: Any, x: Proxy, size: Any = (), fill_value: Any = None, *sizes: Any, **options: Any) -> Proxy:
    if t.rows or sizes or tuple(size if isinstance(size, list | tuple) else (size,)):
        raise at_user_line(f"{name_of(func)} is fused where values are single numbers, for the size ()")
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
