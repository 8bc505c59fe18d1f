"""Reductions over a row, and what is computed from them: softmax, variances, norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import dtypes
from ...errors import at_user_line
from ...graph import COLUMN, F32, I32, ROW, SCALAR
from ..handlers import handles, name_of
from ..proxy import Proxy
from ..table import Table
from ..tracer import Tracer
from .casts import as_dtype, retyped


def _reduced(t: Tracer, op: str, func: Any, x: Proxy, dim: Any, keepdim: bool, dtype: torch.dtype | None, **meta_options: Any) -> Proxy:
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    if not t.rows:
        raise at_user_line(f"{name_of(func)}: nothing is reduced over here")
    if dim is None or [d % x.meta.ndim for d in dims] != [x.meta.ndim - 1]:
        raise at_user_line(f"{name_of(func)}: rows are reduced along themselves: dim must be -1, got {dim}")
    if t.builder.nodes[x.node].extent in (SCALAR, COLUMN):
        raise at_user_line(f"{name_of(func)}: a value of shape {t.shown(x.meta)} has no columns to reduce over")
    if dtype is not None:
        meta_options["dtype"] = dtype
    meta = t.meta_of(func, x, dim=dim, keepdim=keepdim, **meta_options)
    register = dtypes.register_of(meta.dtype)
    inner = F32 if register == F32 else I32
    node = t.node_of(x, inner)
    extent = SCALAR if t.builder.nodes[node].extent == ROW else COLUMN
    return Proxy(t, t.cast(t.add(op, (node,), inner, extent), register), meta)


@handles("sum")
def _sum(t: Tracer, func: Any, x: Proxy, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Proxy:
    return _reduced(t, "reduce_sum", torch.sum, x, dim, keepdim, dtype)


@handles("mean")
def _mean(t: Tracer, func: Any, x: Proxy, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    meta = t.meta_of(torch.mean, x, dim=dim, keepdim=keepdim, **({"dtype": dtype} if dtype else {}))
    x = as_dtype(t, x, torch.float32) if x.dtype.is_floating_point else x
    total = _reduced(t, "reduce_sum", torch.sum, x, dim, keepdim, torch.float32)
    return Proxy(t, t.call(torch.mul, (total, 1.0 / t.columns), {}).node, meta)


def _extremum(op: str, function: Any, *names: str) -> None:
    @handles(*names)
    def handler(t: Tracer, func: Any, x: Proxy, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        if isinstance(dim, Proxy | Table):  # torch.max(a, b)
            return t.call(torch.maximum if op == "reduce_max" else torch.minimum, (x, dim), {})
        result = _reduced(t, op, function, x, dim, keepdim, None)
        return result if func in (torch.amax, torch.amin, Tensor.amax, Tensor.amin) else _Values(result)


class _Values:
    """What torch.max(x, -1) returns, without indices."""

    def __init__(self, values: Proxy):
        self.values = values

    @property
    def indices(self) -> Any:
        raise at_user_line("the place of a row's maximum is not among what can be fused")

    def __iter__(self) -> Any:
        return iter((self.values, None))

    def __getitem__(self, place: int) -> Any:
        return self.values if place == 0 else self.indices


_extremum("reduce_max", torch.amax, "amax", "max")
_extremum("reduce_min", torch.amin, "amin", "min")


@handles("any")
def _any(t: Tracer, func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(t, "reduce_max", torch.amax, x.bool().to(torch.int32), dim, keepdim, None).bool()


@handles("all")
def _all(t: Tracer, func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(t, "reduce_min", torch.amin, x.bool().to(torch.int32), dim, keepdim, None).bool()


@handles("logsumexp")
def _logsumexp(t: Tracer, func: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
    most = x.amax(dim, keepdim=True)
    total = (x - most).exp().sum(dim, keepdim=True).log() + most
    return total if keepdim else total.squeeze(-1)


@handles("softmax")
def _softmax(t: Tracer, func: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    e = (x - x.amax(dim, keepdim=True)).exp()
    result = e * (1.0 / e.float().sum(dim, keepdim=True))
    return retyped(t, result, dtype or x.dtype)


@handles("log_softmax")
def _log_softmax(t: Tracer, func: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    y = x - x.amax(dim, keepdim=True)
    return retyped(t, y - y.exp().float().sum(dim, keepdim=True).log(), dtype or x.dtype)


@handles("var")
def _var(
    t: Tracer, func: Any, x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: int | None = None
) -> Any:
    fewer = int(unbiased) if correction is None else correction
    y = x - x.float().mean(dim, keepdim=True)
    total = (y * y).sum(dim, keepdim=keepdim) / (t.columns - fewer)
    return retyped(t, total, x.dtype)


@handles("std")
def _std(t: Tracer, func: Any, *args: Any, **kwargs: Any) -> Any:
    return t.call(torch.var, args, kwargs).sqrt()


@handles("norm")
def _norm(t: Tracer, func: Any, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    if p in (2, "fro", None):
        y = x.float()
        return retyped(t, (y * y).sum(dim, keepdim=keepdim).sqrt(), dtype or x.dtype)
    if p == 1:
        return retyped(t, x.float().abs().sum(dim, keepdim=keepdim), dtype or x.dtype)
    if p == math.inf:
        return x.abs().amax(dim, keepdim=keepdim)
    raise at_user_line("torch.norm: p must be 1, 2 or inf")


@handles("rms_norm")
def _rms_norm(t: Tracer, func: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    h = x.float()
    y = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return retyped(t, y if weight is None else y * weight, x.dtype)


@handles("layer_norm")
def _layer_norm(t: Tracer, func: Any, x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    h = x.float()
    y = h - h.mean(-1, keepdim=True)
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return retyped(t, y if bias is None else y + bias, x.dtype)
