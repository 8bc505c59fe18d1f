"""What a cell of `bench.suites.fused` times, and its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Call:
    """What a cell times: ours and the peers by name, each a function of the number of a set of operands; the bytes that a call must move;
    and the largest error of ours, relative to the rows' largest magnitude."""

    ours: Callable[[int], Any]
    peers: dict[str, Callable[[int], Any]]
    bytes: float
    error: Callable[[], float]
    kernel: str
    sets: int = 2


def deviation(have: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    return float((have.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))
