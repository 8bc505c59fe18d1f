"""A tensor from outside that a traced function looks up in, by indices that it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import dtypes
from ..errors import at_user_line
from ..graph import I32, joined
from .proxy import Proxy

if TYPE_CHECKING:
    from .tracer import Tracer


class Table:
    """A tensor from outside that is looked up in, with the indices that are given so far."""

    def __init__(self, tracer: Tracer, number: int, tensor: Tensor, indices: tuple[Any, ...] = ()):
        self.tracer, self.number, self.tensor, self.indices = tracer, number, tensor, indices

    dtype = property(lambda self: self.tensor.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = next(x.tracer for x in flat((*args, *(kwargs or {}).values())) if isinstance(x, Table | Proxy))
        return tracer.call(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return self.look_up(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.element(()), name)

    def look_up(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        indices = self.indices + index
        if len(indices) < self.tensor.ndim:
            return Table(self.tracer, self.number, self.tensor, indices)
        return self.element(index)

    def element(self, index: tuple[Any, ...]) -> Proxy:
        tracer, indices = self.tracer, self.indices + index
        if len(indices) != self.tensor.ndim:
            raise at_user_line(f"a tensor of {self.tensor.ndim} modes is looked up in by as many indices, got {len(indices)}")
        nodes = []
        for x in indices:
            if isinstance(x, Proxy) and (x.meta.is_floating_point() or x.meta.dtype == torch.bool):
                raise at_user_line(f"an index must be an integer, got {x.meta.dtype}")
            nodes.append(tracer.node_of(x, I32))
        extent = joined(tracer.builder.nodes[i].extent for i in nodes)
        node = tracer.add("gather", nodes, dtypes.register_of(self.tensor.dtype), extent, (self.number,))
        return Proxy(tracer, node, torch.empty((), dtype=self.tensor.dtype, device="meta"))


for _name in [x for x in vars(Proxy) if x.startswith("__") and x.strip("_").lstrip("r") in
              "add sub mul truediv floordiv mod pow and or xor lshift shift lt le gt ge eq ne neg abs invert".split()]:  # fmt: skip
    if _name not in ("__eq__", "__ne__"):
        setattr(Table, _name, lambda self, *others, name=_name: getattr(self.element(()), name)(*others))


def flat(values: Any) -> Any:
    for x in values:
        if isinstance(x, list | tuple):
            yield from flat(x)
        else:
            yield x
