"""The batch-invariant mode: a row's bits depend on its own inputs, the weights and the mode alone.

A thread computes in the mode where it says so itself (:class:`batch_invariant`), else where the process does (``MINFER_BATCH_INVARIANT=1``,
:func:`set_batch_invariant`). The library keeps the same two values, which this module alone writes: calls of ``torch.ops.minfer`` read them
there, and what torch.compile traces is guarded by :func:`is_batch_invariant`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading

from .namespace import ops
from .torch_private import constant_in_compiled_graphs, guard_on, never_compiled

_of_process = os.environ.get("MINFER_BATCH_INVARIANT", "") == "1"


class _OfThread(threading.local):
    mode: bool | None = None  # None: that of the process


_of_thread = _OfThread()


@never_compiled("minfer.batch_invariant() does not reach into compiled functions")
def _set_of_thread(mode: bool | None) -> None:
    _of_thread.mode = mode
    ops._set_batch_invariant_of_thread(-1 if mode is None else int(mode))


def _current() -> bool:
    mode = _of_thread.mode
    return _of_process if mode is None else mode


@constant_in_compiled_graphs
def is_batch_invariant() -> bool:
    """Whether the calling thread computes in the batch-invariant mode. Within a function that torch.compile traces this is a constant: the
    function is traced again in the other mode."""
    guard()
    return _current()


def guard() -> None:
    """What torch.compile is tracing is traced again where the mode is another."""
    guard_on(_current, "minfer.is_batch_invariant()")


def set_batch_invariant(enabled: bool = True) -> None:
    """The mode of all threads of the process that are not within :class:`batch_invariant`. At the start it is that of the environment
    variable ``MINFER_BATCH_INVARIANT``, 0 or 1.

    CUDA graphs that have been captured stay as they were captured; what torch.compile has compiled is compiled again.

    Raises:
      TypeError: enabled is no bool.
    """
    global _of_process
    _of_process = _checked(enabled)
    ops._set_batch_invariant(enabled)


def _checked(enabled: bool) -> bool:
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {enabled!r}")
    return enabled


class batch_invariant(contextlib.ContextDecorator):
    """The calling thread computes in the batch-invariant mode, or with ``enabled=False`` outside of it, within the block.

        with minfer.batch_invariant():
            y = minfer.gemm(x, weight.t())       # y[i] has the same bits whatever and how many the other rows of x are

    In the mode the bits of a row (a token, a sequence) depend on its own inputs, the weights and the mode alone. They do not depend on the
    number of rows, on its place among them, on what the others hold, on how a prompt is cut in chunks, on pages, on tuned tables or on the
    number of SMs. Operators that cannot compute so raise a RuntimeError. ``docs/guides/batch_invariance.md`` says what is promised and what
    it costs.

    It can be entered again within itself, and used as a decorator. The mode is the thread's: other threads follow their own blocks, else
    :func:`set_batch_invariant`. A CUDA graph replays in the mode that it was captured in. A function compiled by torch.compile is traced
    once in each mode; it cannot enter the block itself (with ``fullgraph=True`` that is an error, else a graph break).

    Args:
      enabled: False: outside of the mode.

    Raises:
      TypeError: enabled is no bool.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = _checked(enabled)
        self._before: list[bool | None] = []  # of the blocks that were entered, the innermost last

    def _recreate_cm(self) -> batch_invariant:
        return batch_invariant(self.enabled)  # for every call of a decorated function, which threads may call together

    @never_compiled("enter minfer.batch_invariant() around the compiled function, not within it")
    def __enter__(self) -> None:
        self._before.append(_of_thread.mode)
        _set_of_thread(self.enabled)

    @never_compiled("enter minfer.batch_invariant() around the compiled function, not within it")
    def __exit__(self, *error: object) -> None:
        _set_of_thread(self._before.pop())


@functools.cache
def computes_batch_invariant(op: str) -> bool:
    """Whether an operator, as "attention_paged", computes in the mode; else it raises there."""
    return ops._computes_batch_invariant(op)


def check(op: str) -> None:
    """What the library checks before it launches a kernel, for kernels of the CPU.

    Raises:
      RuntimeError: the thread computes in the mode, and the operator cannot.
    """
    if _current() and not computes_batch_invariant(op):
        raise RuntimeError(f"minfer::{op}: cannot compute in the batch-invariant mode; leave it with minfer.batch_invariant(False)")
