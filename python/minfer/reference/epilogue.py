"""What the references of several families share: activations, and the type that they compute in."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..checks.common import DTYPES


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """x * Phi(x) by erfc: 1 + erf cancels where x is negative, and torch's own is NaN of infinity on a CPU."""
    return torch.special.erfc(x * -math.sqrt(0.5)).mul(x * 0.5)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(y), y = sqrt(8 / pi) (x + 0.044715 x^3), which is 0.5 x (1 + tanh(y / 2)) without the sum that cancels."""
    return x * torch.sigmoid(math.sqrt(8.0 / math.pi) * (x + 0.044715 * x**3))


ACTIVATION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "relu2": lambda x: torch.relu(x).square(),
}


def compute_dtype(a: torch.Tensor) -> torch.dtype:
    return torch.float32 if a.dtype in DTYPES else a.dtype
