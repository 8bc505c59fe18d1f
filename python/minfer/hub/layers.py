"""Layers whose forwards replace those of a model's own: ``kernels.kernelize`` puts them onto modules that keep their parameters.

They follow the hub's rules: nothing but a forward, no constructor, no state. Whatever a module has that the operators do not take, another
type of its weight for instance, is an error that names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.fused import rms_norm, silu_and_mul
from ..ops.gemm import gemm


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
        return gemm(input.flatten(0, -2), self.weight.t(), bias=self.bias).unflatten(0, input.shape[:-1])


class SwiGLUMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)) of a module with three linear layers, as Llama's MLP is: silu in the gate's product."""

    has_backward = False
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        rows, gate, up, down = x.flatten(0, -2), self.gate_proj, self.up_proj, self.down_proj
        hidden = gemm(rows, gate.weight.t(), bias=gate.bias, activation="silu") * gemm(rows, up.weight.t(), bias=up.bias)
        return gemm(hidden, down.weight.t(), bias=down.bias).unflatten(0, x.shape[:-1])
