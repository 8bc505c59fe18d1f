"""Layers whose forwards replace those of a model's own: ``kernels.kernelize`` puts them onto modules that keep their parameters.

They follow the hub's rules: nothing but a forward, no constructor, no state. Whatever a module has that the operators do not take, another
type of its weight for instance, is an error that names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.fused import rms_norm, silu_and_mul
from ..ops.gemm import gemm


def _product(x: Tensor, linear: torch.nn.Module, activation: str = "none") -> Tensor:
    """activation(x.W^T + bias); x: [.., in_features]."""
    y = gemm(x.reshape(-1, x.shape[-1]), linear.weight.t(), bias=linear.bias, activation=activation)
    return y.view(*x.shape[:-1], y.shape[-1])


class RMSNorm(torch.nn.Module):
    """rms_norm(x) * weight of a module with ``weight`` and ``variance_epsilon`` or ``eps``, as Llama's and its like are."""

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return rms_norm(hidden_states, self.weight, eps)


class SiluAndMul(torch.nn.Module):
    """silu of the first half of the columns times the second half."""

    has_backward = False
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)


class Linear(torch.nn.Module):
    """x.W^T + bias of a 16-bit ``torch.nn.Linear``."""

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return _product(input, self)


class SwiGLUMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)) of a module with three linear layers, as Llama's MLP is: silu in the gate's product."""

    has_backward = False
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return _product(_product(x, self.gate_proj, "silu") * _product(x, self.up_proj), self.down_proj)
