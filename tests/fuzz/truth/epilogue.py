"""What happens to a sum of products: alpha, addends, activations, gates. Values in float64, each with a bound on its error.

Epilogues are float32 (docs/numerics.md, sections 2 and 3). Activations are off by the error of what they are given, times their steepest
slope, and by their own: x sigmoid(y) of float32, whose exponent y is rounded, is off by (4 + max(0, -y)) 2^-22 of itself; gelu, below 0, by
(6 + x^2 / 2) 2^-22.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.contracts import numerics_cases as numerics

from ..compare import Expected, accumulation, smallest, unit

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "relu2")
SLOPE = 1.13  # the steepest of all activations: gelu's is 1.129
CLAMP = 7.0  # swigluoai


@dataclass
class Bounded:
    """A value and what it may be off by."""

    value: Tensor
    error: Tensor

    def rounded(self, dtype: torch.dtype) -> Bounded:
        return Bounded(self.value, self.error + unit(dtype) * (self.value.abs() + self.error) + smallest(dtype))

    def times(self, other: Bounded | Tensor | float) -> Bounded:
        if not isinstance(other, Bounded):
            factor = other if isinstance(other, Tensor) else torch.tensor(other, dtype=torch.float64, device=self.value.device)
            return Bounded(self.value * factor, self.error * factor.abs())
        error = self.error * other.value.abs() + other.error * self.value.abs() + self.error * other.error
        return Bounded(self.value * other.value, error)

    def columns(self, index: Tensor) -> Bounded:
        return Bounded(self.value[..., index], self.error[..., index])


def product(a: Tensor, b: Tensor, extra: Tensor | float = 0.0) -> tuple[Bounded, Tensor]:
    """a.b of float64 matrices, summed in float32, and the sum of magnitudes; ``extra``: further errors of the sum."""
    magnitude = a.abs() @ b.abs()
    return Bounded(a @ b, accumulation(a.shape[-1]) * magnitude + extra), magnitude


def affine(x: Bounded, magnitude: Tensor, alpha: float, *addends: Tensor | None) -> Bounded:
    """alpha * x + the addends, which are rounded with the sum."""
    value, error, size = alpha * x.value, abs(alpha) * x.error, abs(alpha) * magnitude
    for addend in addends:
        if addend is not None:
            value, size = value + addend, size + addend.abs()
    return Bounded(value, error + 2.0**-22 * size)


def activate(x: Bounded, activation: str) -> Bounded:
    v, slack = x.value, SLOPE * x.error
    if activation == "none":
        return x
    if activation == "relu":
        return Bounded(v.clamp(min=0.0), x.error)
    if activation == "relu2":
        y = v.clamp(min=0.0) ** 2
        return Bounded(y, (2 * v.abs() + x.error) * x.error + 2.0**-24 * (y + x.error**2))
    if activation == "gelu":
        y = 0.5 * v * torch.erfc(-v / math.sqrt(2.0))
        return Bounded(y, slack + (7.0 + (v.clamp(max=0.0) ** 2 / 2).clamp(max=128.0)) * 2.0**-22 * y.abs() + 2.0**-119)
    exponent = v if activation == "silu" else 2.0 * math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3)
    y = v * torch.sigmoid(exponent)
    own = (5.0 + (-exponent).clamp(min=0.0)) * 2.0**-22 * y.abs() + 2.0**-119
    return Bounded(y, slack + own)


def gated(x: Bounded, activation: str, layout: str) -> Bounded:
    """activation(gate) * up of columns in an order: "halves", "alternating", or "blocks" of 8 and 8."""
    gate, up = split_gate(x.value.shape[-1], layout, x.value.device)
    g, u = x.columns(gate), x.columns(up)
    if activation != "swigluoai":
        return activate(g, activation).times(u)
    # gate * sigmoid(1.702 gate) * (up + 1) of gate <= 7 and -7 <= up <= 7
    g = Bounded(g.value.clamp(max=CLAMP), g.error)
    value = g.value * torch.sigmoid(1.702 * g.value)
    own = (5.0 + (-1.702 * g.value).clamp(min=0.0)) * 2.0**-22 * value.abs() + 2.0**-119
    swish = Bounded(value, SLOPE * g.error + own)
    return swish.times(Bounded(u.value.clamp(-CLAMP, CLAMP) + 1.0, u.error + 2.0**-22 * 8))


def split_gate(columns: int, layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the gate's and of up's columns."""
    index = torch.arange(columns, device=device)
    if layout == "halves":
        return index[: columns // 2], index[columns // 2 :]
    if layout == "alternating":
        return index[0::2], index[1::2]
    blocks = index.view(-1, 2, 8)
    return blocks[:, 0].flatten(), blocks[:, 1].flatten()


def result(name: str, x: Bounded, dtype: torch.dtype, peer: Tensor | None, usual: Tensor | None = None) -> Expected:
    """Rounded once to ``dtype``. ``usual``: what each element is off by on average; None: that of the float32 sum, which is its bound."""
    average = torch.linalg.vector_norm(x.error if usual is None else usual)
    bound = x.rounded(dtype)
    return Expected(name, dtype, bound.value, bound.error, peer, usual=float(average))


def codes(name: str, x: Bounded, scale: Tensor) -> Expected:
    """Rounded once to e4m3 codes of ``scale``: the nearest ones, but where a tie is within what the float32 result may be off by."""
    own = scale.double()
    z, doubt = x.value / own, x.error / own.abs()
    doubt = doubt + 2.0**-22 * z.abs()
    z = z.clamp(-448.0, 448.0)
    return Expected(name, torch.float8_e4m3fn, z, (numerics.e4m3_near(z) - z).abs() + 2 * doubt, decode=torch.Tensor.float)


def activate_float32(x: Tensor, activation: str) -> Tensor:
    """By torch, for its own error."""
    functions = {
        "none": lambda y: y,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "silu": torch.nn.functional.silu,
        "relu2": lambda y: torch.relu(y).square(),
    }
    return functions[activation](x)


def gated_float32(x: Tensor, activation: str, layout: str) -> Tensor:
    gate, up = (x[..., index] for index in split_gate(x.shape[-1], layout, x.device))
    if activation != "swigluoai":
        return activate_float32(gate, activation) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
