"""Stores into arguments."""

from __future__ import annotations

from typing import Any

from ... import dtypes
from ...errors import at_user_line
from ...graph import COLUMN, FULL, I32, I64, Output, joined
from ..handlers import handles
from ..operand import Operand
from ..proxy import Proxy
from ..tracer import Tracer


@handles("copy_")
def _copy(t: Tracer, func: Any, into: Proxy, value: Any, non_blocking: bool = False) -> Proxy:
    number = t.may_write.get(into.node)
    if number is None:
        raise at_user_line("copy_() is into an argument that `mutates` names")
    storage = t.builder.inputs[number].storage
    node = t.node_of(value, dtypes.register_of(into.dtype))
    extent = t.builder.inputs[number].extent
    if joined((t.extent_of(node), extent)) != extent:
        raise at_user_line(f"copy_(): a value of a larger shape than {t.shown(into.meta)}")
    t.builder.outputs = [x for x in t.builder.outputs if x.into != number]
    t.builder.outputs.append(Output(node, storage, extent, into=number))
    return Proxy(t, node, into.meta)


@handles("index_copy_")
def _index_copy(t: Tracer, func: Any, into: Proxy, dim: int, index: Any, value: Any) -> Proxy:
    if not isinstance(into, Operand) or not into.written or into.extent != FULL:
        raise at_user_line("index_copy_() is into an argument of an epilogue, [rows, n], that `mutates` names")
    if dim != 0:
        raise at_user_line(f"index_copy_(): whole rows are written where the index says: dim must be 0, got {dim}")
    rows = index.element(COLUMN) if isinstance(index, Operand) and index.vector else index.node if isinstance(index, Proxy) else None
    if rows is None or t.extent_of(rows) != COLUMN or t.type_of(rows) not in (I32, I64):
        raise at_user_line("index_copy_(): the index is an argument of integers, one for each row")
    number = into.input_of(FULL)
    storage = t.builder.inputs[number].storage
    node = t.node_of(value, dtypes.register_of(into.dtype))
    t.builder.outputs = [x for x in t.builder.outputs if x.into != number]
    t.builder.outputs.append(Output(node, storage, FULL, into=number, index=rows))
    return into
