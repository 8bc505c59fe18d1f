"""One row of the demo: an operator call, the same in PyTorch and in float64, and the rule that its values are held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...measure import benchmarking

Operands = dict[str, Any]


def _result_itself(operands: Operands, result: Tensor) -> Tensor:
    return result


def worst_row_error(out: Tensor, truth: Tensor) -> float:
    """The largest ||out - truth|| / ||truth|| of all rows (the last dimension); ||out|| for a row of zeros; inf where out is NaN.

    Over the whole of a large result, a few wrong elements disappear in the average. In their own row they do not: one wrong element of
    4096 is an error of about 2 %, five roundings of bfloat16.
    """
    if out.shape != truth.shape:
        return math.inf
    if out.numel() == 0:
        return 0.0
    out, truth = (x.double().reshape(-1, x.shape[-1]) for x in (out, truth))
    difference, norm = (torch.linalg.vector_norm(x, dim=1) for x in (out - truth, truth))
    errors = torch.where(norm > 0, difference / norm, difference)
    return math.inf if bool(errors.isnan().any()) else errors.max().item()


def allowed_error(yardstick_error: float, dtype: torch.dtype) -> float:
    """Twice the error of PyTorch in the same types, plus one rounding to ``dtype``.

    An operator accumulates in float32 and rounds its result to 16 bits once; PyTorch rounds at the same places and, between the kernels of
    an unfused expression, more often. So the operator's error is about PyTorch's or smaller. The factor leaves room for roundings that fall
    the other way, the additional rounding for results that PyTorch happens to have exactly. docs/numerics.md has bounds for every element.
    """
    return 2 * yardstick_error + benchmarking.rounding_unit(dtype)


@dataclass(frozen=True)
class Peer:
    """A PyTorch expression that a case is timed against."""

    name: str
    call: Callable[[Operands], Any]
    compiled: bool = False  # torch.compile is timed beside eager mode; False where one library call leaves nothing to fuse
    read: Callable[[Operands, Any], Tensor] = _result_itself  # the values of a result, for the comparison with float64


@dataclass(frozen=True)
class Work:
    """What a call cannot do without: bytes moved once, and floating-point operations."""

    bytes: float
    flops: float = 0.0

    def floor_us(self, device: dict[str, Any]) -> float:
        """The least time on a device (:func:`minfer._core.registry.device_properties`): that of its memory or of its tensor cores."""
        return max(self.bytes / device["read_bandwidth"], self.flops / device["matrix_rate"])


@dataclass(frozen=True)
class Case:
    """One use of an operator. ``ours``, ``truth`` and the peers are functions of one set of operands, which ``make`` draws."""

    family: str
    name: str
    shape: str
    make: Callable[[], Operands]
    ours: Callable[[Operands], Any]
    truth: Callable[[Operands], Tensor]  # float64 of the operands as given; codes are the numbers that they stand for
    peers: tuple[Peer, ...]
    work: Callable[[Operands], Work]
    dtype: torch.dtype = torch.bfloat16  # of the values that are compared
    read: Callable[[Operands, Any], Tensor] = _result_itself
    peer_operands: Callable[[Operands], Operands] | None = None  # for peers that take others, such as 16-bit weights; None: the same
    yardstick: Callable[[Operands], Tensor] | None = None  # PyTorch in the same types, whose error sets the limit; None: the first peer
    allowed: Callable[[float, torch.dtype], float] = allowed_error  # of the yardstick's error and `dtype`


@dataclass(frozen=True)
class Outcome:
    """What a case gave: errors of the worst row against float64 and, on a GPU, microseconds."""

    case: Case
    error: float
    yardstick_error: float
    us: float | None = None
    peers_us: dict[str, float] = field(default_factory=dict)  # PyTorch expression -> microseconds
    floor_us: float | None = None

    @property
    def allowed(self) -> float:
        return self.case.allowed(self.yardstick_error, self.case.dtype)

    @property
    def verified(self) -> bool:
        return self.error <= self.allowed

    @property
    def label(self) -> str:
        return f"{self.case.family}: {self.case.name}, {self.case.shape}"

    @property
    def best_peer(self) -> str | None:
        """The fastest PyTorch expression."""
        return min(self.peers_us, key=self.peers_us.__getitem__, default=None)

    @property
    def speed_up(self) -> float | None:
        """Over the fastest PyTorch expression; None where nothing was timed."""
        best = self.best_peer
        return None if best is None or self.us is None else self.peers_us[best] / self.us
