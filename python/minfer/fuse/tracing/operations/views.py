"""Views: the same values in another shape, and what is looked up by an index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import at_user_line
from ...graph import joined
from ..handlers import handles, name_of
from ..operand import Operand
from ..proxy import Proxy
from ..table import Table
from ..tracer import Tracer
from .casts import bits


@handles("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "broadcast_to", "contiguous", "clone", "detach", "flatten")
def view(t: Tracer, func: Any, x: Proxy, *args: Any, **kwargs: Any) -> Proxy:
    if func is Tensor.view and args and isinstance(args[0], torch.dtype):
        return bits(t, x, args[0])
    if func is Tensor.expand_as:
        func, args = Tensor.expand, (args[0].meta.shape,)
    meta = t.meta_of(func, x, *args, **kwargs)
    node = x.node
    now, then = t.builder.nodes[node].extent, t.classify(meta)
    if t.rows and now not in t.extents(meta):
        if then == "other" or joined((now, then)) != then:
            raise at_user_line(f"{name_of(func)}: the shape {t.shown(meta)} is neither of rows, of a row, nor of a column")
        # The same number in more places.
        return Proxy(t, t.add("cast", (node,), t.type_of(node), then), meta)
    return Proxy(t, node, meta)


@handles("__getitem__")
def _getitem(t: Tracer, func: Any, x: Any, index: Any) -> Any:
    if isinstance(x, Table):
        return x.look_up(index)
    if isinstance(x, Tensor):
        if not t.takes_outside:
            raise at_user_line("a tensor that is looked up in must be an argument of the function")
        return t.table("captured", x).look_up(index)
    parts = index if isinstance(index, tuple) else (index,)
    if all(part is None or part is Ellipsis or not isinstance(part, Proxy) and part == slice(None) for part in parts):
        return view(t, lambda meta: meta[index], x)
    if isinstance(x, Operand):
        return x.look_up(parts)
    raise at_user_line("a part of a tensor cannot be taken within a function: pass the parts as arguments, strided rows cost nothing")


@handles("index_select", "take_along_dim", "gather")
def _no_gather(t: Tracer, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise at_user_line(f"{name_of(func)} is not among the operations that can be fused")
