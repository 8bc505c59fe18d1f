"""Functions of a tensor that are compositions of other operations: activations, and the like."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..handlers import handles
from .casts import retyped


def _composition(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a function of a tensor and options; the result has the tensor's dtype."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        handles(*names)(
            lambda t, func, x, *args, **kwargs: retyped(
                t, function(x.float() if x.dtype.is_floating_point else x, *args, **kwargs), x.dtype
            )
        )
        return function

    return register


@_composition("square")
def _square(x: Any) -> Any:
    return x * x


@_composition("sigmoid")
def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + (-x).exp())


@_composition("silu")
def _silu(x: Any, inplace: bool = False) -> Any:
    return x / (1.0 + (-x).exp())


@_composition("relu")
def _relu(x: Any, inplace: bool = False) -> Any:
    return x.clamp(min=0)


@_composition("relu6")
def _relu6(x: Any, inplace: bool = False) -> Any:
    return x.clamp(0, 6)


@_composition("hardtanh")
def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return x.clamp(min_val, max_val)


@_composition("hardsigmoid")
def _hardsigmoid(x: Any, inplace: bool = False) -> Any:
    return (x + 3.0).clamp(0, 6) * (1 / 6)


@_composition("hardswish")
def _hardswish(x: Any, inplace: bool = False) -> Any:
    return x * ((x + 3.0).clamp(0, 6) * (1 / 6))


@_composition("gelu")
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return x / (1.0 + (-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).exp())  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


@_composition("softplus")
def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    y = x * beta
    return torch.where(y > threshold, x, y.clamp(max=threshold).exp().log1p() * (1 / beta))


@_composition("logsigmoid")
def _logsigmoid(x: Any) -> Any:
    return x.clamp(max=0) - (-x.abs()).exp().log1p()


@_composition("mish")
def _mish(x: Any, inplace: bool = False) -> Any:
    return x * _softplus(x).tanh()


@_composition("leaky_relu")
def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return torch.where(x > 0, x, x * negative_slope)


@_composition("elu")
def _elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return torch.where(x > 0, x, alpha * x.clamp(max=0).expm1())


@_composition("sign", "sgn")
def _sign(x: Any) -> Any:
    return (
        torch.where(x > 0, 1, 0) - torch.where(x < 0, 1, 0) + x * 0
        if x.dtype.is_floating_point
        else torch.where(x > 0, 1, torch.where(x < 0, -1, 0))
    )


@_composition("softsign")
def _softsign(x: Any) -> Any:
    return x / (1.0 + x.abs())


@_composition("tanhshrink")
def _tanhshrink(x: Any) -> Any:
    return x - x.tanh()


@_composition("nan_to_num")
def _nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    most = torch.finfo(torch.float32).max
    x = torch.where(x.isnan(), 0.0 if nan is None else nan, x)
    x = torch.where(x == math.inf, most if posinf is None else posinf, x)
    return torch.where(x == -math.inf, -most if neginf is None else neginf, x)
