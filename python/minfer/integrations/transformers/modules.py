"""What the modules of a model are, as :mod:`minfer.integrations.decoder` has it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from ...nn import Fp8Linear, Int8Linear, W4Linear, W8Linear
from ..decoder import Dense, Norm
from ..decoder.weights import Weight


class Unsupported(Exception):
    """A part of a model that minfer does not take over; the message says why."""


def weight_of(linear: torch.nn.Module) -> Weight:
    """The weight and bias of a linear layer, sharing its tensors."""
    if type(linear) is torch.nn.Linear:
        bias = None if linear.bias is None else linear.bias.detach()
        return Dense(linear.weight.detach(), bias)
    if type(linear) is Conv1D:
        return Dense(linear.weight.detach().t(), linear.bias.detach())
    if isinstance(linear, W4Linear | W8Linear):
        return linear.weight()
    if isinstance(linear, Fp8Linear | Int8Linear):
        return linear.quantized_weight()
    raise Unsupported(f"its {type(linear).__name__} is none of the linear layers that minfer reads")


_ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "linear": "none",
}


def activation_of(name: str) -> str:
    """minfer's name of an activation that a config names."""
    if name not in _ACTIVATIONS:
        known = "an activation of transformers" if name in ACT2FN else "unknown"
        raise Unsupported(f"its activation {name!r}, {known}, is none that minfer's epilogues have")
    return _ACTIVATIONS[name]


def rms_norm_of(module: torch.nn.Module, dtype: torch.dtype, weight_offset: float) -> Norm:
    """An RMS norm of any model, whose weight is what the name says, and whose eps is ``variance_epsilon`` or ``eps``."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or not isinstance(getattr(module, "weight", None), Tensor):
        raise Unsupported(f"its {type(module).__name__} has no weight and eps")
    return Norm(norm_weight(module.weight, dtype), float(eps), weight_offset=weight_offset)


def layer_norm_of(module: torch.nn.Module, dtype: torch.dtype) -> Norm:
    if type(module) is not torch.nn.LayerNorm or module.weight is None:
        raise Unsupported(f"its {type(module).__name__} is no torch.nn.LayerNorm with a weight")
    bias = None if module.bias is None else norm_weight(module.bias, dtype)
    weight = norm_weight(module.weight, dtype)
    return Norm(weight, module.eps, bias=torch.zeros_like(weight) if bias is None else bias, centered=True)


def norm_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm's weight in the activations' type. Those that a model keeps in float32 came from 16 bits; where not, they are rounded."""
    return weight.detach() if weight.dtype == dtype else weight.detach().to(dtype)
