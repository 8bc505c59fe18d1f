"""What the driver needs to know of an operator; ``families/`` has one such object for each.

A case is drawn in three steps, each from the case's own random numbers: ``draw`` decides on everything that a call's shape, dtypes and
options are (one line of text, printed where a case fails), ``fill`` on contents that fit to that (more than once: graphs are replayed with
others), and the runner on the views in which tensors are passed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import arena
from .compare import Expected
from .draw import CPU, CUDA, Data, Draw, Limits

Parameters = dict[str, Any]


@dataclass
class Contents:
    """Tensors by argument name, contiguous, None where an argument is left out; ``facts``: what ``expect`` wants to know beside them."""

    tensors: dict[str, Tensor | None]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Argument:
    """What the documentation says about a tensor argument, for calls that cannot be right.

    dtypes: legal ones. shape: a symbol for each mode, "" where its size is free; one that another argument has, too, cannot be changed
    alone. beside: arguments that a message about this one may name instead. ranks: legal ones, if not only that of ``shape``.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


# What is wrong, tensors instead of those of the call, and what the message may name.
WrongTensors = tuple[str, dict[str, Tensor | None], tuple[str, ...]]


class Family(ABC):
    """An operator: what the driver calls, compares and changes. Only the abstract methods must be given."""

    name = ""
    share = 1.0  # of the cases of a run over all families
    views: Mapping[str, arena.Rule] = {}  # of its tensor arguments; arena.VIEW of those not named
    in_place: tuple[str, ...] = ()  # arguments that the operator writes without being asked to by out=
    error: type[Exception] = RuntimeError  # of calls that cannot be right
    kernels = ""  # the family of minfer.kernels() that kernel= may name
    traced = True  # whether it can be one graph of torch.compile, and has a rule for tensors without contents

    @abstractmethod
    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        """A case: shape, dtypes and options."""

    @abstractmethod
    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        """Contents that fit to a case."""

    @abstractmethod
    def call(self, p: Parameters, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """The operator by its public name, so that what stands under that name is what is tested; its results by name."""

    @abstractmethod
    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        """What ``call`` must give; ``before``: contents of what is written in place; ``have``: its results, for operators where one result
        decides on what another must be."""

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of out=, None for the functional form."""
        return None

    def written(self, p: Parameters) -> tuple[str, ...]:
        return self.in_place + (() if self.out(p) is None else (p.get("out_is") or "out",))

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return self.views.get(name, arena.VIEW)

    def fits(self, kernel: str) -> bool:
        """Whether a kernel of ``kernels`` computes this operator."""
        return True

    def launches(self, p: Parameters) -> tuple[str, ...]:
        """What may stand behind a kernel's name, beside what is drawn for GEMMs."""
        return ()

    def dense(self, p: Parameters) -> bool:
        """Whether all operands may be contiguous."""
        return True

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        return {}

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        """(option, a value that it cannot have, what the message must name)."""
        return []

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        """Beside dtypes, ranks, sizes and devices."""
        return []

    def operator_names(self) -> tuple[str, ...]:
        """How messages may begin."""
        return (f"minfer::{self.name}:", f"minfer::{self.name}.out:")

    # ---- values that lead outside of the tensors -------------------------------------------------------------------------------------

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        """Contents of which an index lies outside, changed in place; None: this case has none."""
        return None


@dataclass
class Hostile:
    """``what``: the change, for the log. ``expected``: (contents before, results) -> values, where they can be stated; None: only memory is
    checked. ``cpu_raises``: whether the CPU refuses the call, as it does where documentation calls it undefined on CUDA; None: it may."""

    what: str
    expected: Callable[[dict[str, Tensor], dict[str, Tensor]], list[Expected]] | None = None
    cpu_raises: bool | None = True


def limits_of(device: torch.device) -> Limits:
    return CUDA if device.type == "cuda" else CPU
