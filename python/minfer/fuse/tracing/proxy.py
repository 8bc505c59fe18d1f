"""A value of a traced function: what stands for a torch tensor while the function runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import at_user_line

if TYPE_CHECKING:
    from .tracer import Tracer


class _RowCount(int):
    """The number of rows: it may be compared, as shapes are, and not computed with."""

    def _refuse(self, *_: Any) -> Any:
        raise at_user_line("the number of rows is not known where a function is fused: a kernel is for any number of them")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __float__ = _refuse


class Proxy:
    """A value of the function. ``meta`` has the dtype and shape that torch gives it."""

    def __init__(self, tracer: Tracer, node: int, meta: Tensor):
        self.tracer, self.node, self.meta = tracer, node, meta

    # What a tensor tells of itself.
    dtype = property(lambda self: self.meta.dtype)
    device = property(lambda self: self.tracer.device)
    ndim = property(lambda self: self.meta.ndim)
    is_cuda = property(lambda self: self.tracer.device.type == "cuda")
    requires_grad = property(lambda self: False)

    @property
    def shape(self) -> torch.Size | tuple[int, ...]:
        rows = self.tracer.rows
        return tuple(_RowCount(n) if n == rows and i == 0 and self.meta.ndim == 2 else n for i, n in enumerate(self.meta.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.meta.ndim

    def is_floating_point(self) -> bool:
        return self.meta.is_floating_point()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in (*args, *(kwargs or {}).values()):
            for y in x if isinstance(x, list | tuple) else (x,):
                if isinstance(y, Proxy):
                    return y.tracer.call(func, args, kwargs or {})
        return NotImplemented

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if method is None or not callable(method):
            raise at_user_line(f"a tensor of a fused function has no {name!r}")
        return lambda *args, **kwargs: self.tracer.call(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.call(Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise at_user_line("elements cannot be assigned to: take torch.where, or copy_() into an argument")

    def __bool__(self) -> bool:
        raise at_user_line("Python cannot branch on a tensor's value: take torch.where")

    def __iter__(self) -> Any:
        raise at_user_line("a tensor cannot be iterated over")

    def _no_number(self, *_: Any) -> Any:
        raise at_user_line("a tensor's value is not known where a function is fused")

    __float__ = __int__ = __index__ = item = tolist = _no_number
    __hash__ = object.__hash__


def _binary_method(function: Any, swapped: bool = False) -> Any:
    def method(self: Proxy, other: Any) -> Any:
        return self.tracer.call(function, (other, self) if swapped else (self, other), {})

    return method


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "floordiv": torch.floor_divide, "mod": torch.remainder,
    "pow": torch.pow, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}.items():  # fmt: skip
    setattr(Proxy, f"__{_name}__", _binary_method(_function))
    setattr(Proxy, f"__r{_name}__", _binary_method(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Proxy, f"__{_name}__", _binary_method(getattr(torch, _name)))
for _name, _function in {"neg": torch.neg, "abs": torch.abs, "invert": torch.bitwise_not}.items():
    setattr(Proxy, f"__{_name}__", lambda self, function=_function: self.tracer.call(function, (self,), {}))


def _refuse_in_place(self: Proxy, other: Any) -> Any:
    raise at_user_line("values are not changed in place: write x = x + y, or copy_() into an argument that `mutates` names")


for _name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor"):
    setattr(Proxy, f"__i{_name}__", _refuse_in_place)
