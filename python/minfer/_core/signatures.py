"""Wrappers that are signatures: a function that says, typed and documented, what an operator takes, and hands on what its caller gives.

Nothing else is handed on. Every default costs 0.3 us of host time on its way into the dispatcher, which looks its name up and makes a value
of it; the seven of ``gemm`` would cost more than all that the operator itself does before its launch. The schema has the same defaults,
which a test compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def signature_of(call: Callable[..., Any]) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """For a function without a body: its name, signature and documentation are those of ``call``, which runs in its place."""

    def declare(signature: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(signature)
        def run(*args: Any, **options: Any) -> Any:
            return call(*args, **options)

        return run

    return declare


def with_out(operator: torch._ops.OpOverloadPacket) -> Callable[..., Any]:
    """The operator, or with ``out`` its overload of that name."""
    default, into = operator.default, operator.out

    def call(*args: Any, out: torch.Tensor | None = None, **options: Any) -> Any:
        return default(*args, **options) if out is None else into(*args, out=out, **options)

    return call
