"""Runs the cases: values first, then time by the protocol of :mod:`minfer.measure.benchmarking`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..._core.registry import device_properties
from ...measure import benchmarking
from ...planning.plan import runs_here
from . import families, picture, sizes
from .case import Case, Operands, Outcome, allowed_error, worst_row_error

Say = Callable[[str], None]


def _peer_operands(case: Case, operands: Operands) -> Operands:
    return operands if case.peer_operands is None else case.peer_operands(operands)


def verify(case: Case, operands: Operands) -> tuple[Outcome, torch.Tensor]:
    """The outcome without times, and the float64 truth."""
    truth = case.truth(operands)
    error = worst_row_error(case.read(operands, case.ours(operands)), truth)
    if case.yardstick is not None:
        by_torch = case.yardstick(operands)
    else:
        own, first = _peer_operands(case, operands), case.peers[0]
        by_torch = first.read(own, first.call(own))
    return Outcome(case, error, worst_row_error(by_torch, truth)), truth


def _can_compile() -> bool:
    """torch.compile makes its GPU kernels with Triton, which not every torch brings along."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _contestants(case: Case) -> list[tuple[str, Callable[[Operands], Any], Any]]:
    """(name, call, read) of the PyTorch expressions: eager mode and, where there is something to fuse, torch.compile."""
    found = []
    for peer in case.peers:
        found.append((peer.name, peer.call, peer.read))
        if peer.compiled and _can_compile():
            found.append((f"{peer.name}, compiled", torch.compile(peer.call, dynamic=False), peer.read))
    return found


def _timer(call: Callable[[Operands], Any], sets: list[Operands]) -> benchmarking.GraphTimer:
    return benchmarking.GraphTimer(call, sets, estimate_us=benchmarking.estimate_us(call, sets))


def run_case(case: Case, *, timed: bool, rounds: int = 15, say: Say = lambda text: None) -> Outcome:
    """Verifies a case and, if ``timed`` and right, times it.

    A PyTorch expression that this torch cannot run or capture, or whose values are not those of the case, is left out, which ``say`` is
    told; an error of the operator itself is raised.
    """
    sets = benchmarking.rotation(case.make) if timed else [case.make()]
    outcome, truth = verify(case, sets[0])
    if not timed or not outcome.verified:
        return outcome
    peer_sets = sets
    if case.peer_operands is not None:
        # As many as flush the L2 with what the peers read, made of ours in turn: 16-bit weights take fewer sets than codes.
        following = itertools.cycle(sets)
        peer_sets = benchmarking.rotation(lambda: case.peer_operands(next(following)))
    torch.compiler.reset()  # no recompilation for what another case has compiled
    timers = {"minfer": _timer(case.ours, sets)}
    for name, call, read in _contestants(case):
        try:
            error = worst_row_error(read(peer_sets[0], call(peer_sets[0])), truth)
            if not error <= 2 * allowed_error(outcome.yardstick_error, case.dtype):  # that it computes the same, not how well
                raise ArithmeticError(f"its values are off by {error:.1e}")
            timers[name] = _timer(call, peer_sets)
        except Exception as error:  # noqa: BLE001  a compiler or a library behind PyTorch may raise anything
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            reason = str(error).strip().splitlines() or [""]
            say(f"{outcome.label}: {name} is left out: {type(error).__name__}: {reason[0][:100]}")
    del truth
    us = {name: timing.us for name, timing in zip(timers, benchmarking.interleave(timers.values(), rounds), strict=True)}
    floor_us = case.work(sets[0]).floor_us(device_properties())
    return Outcome(case, outcome.error, outcome.yardstick_error, us.pop("minfer"), us, floor_us)


def run(path: Path, say: Say, progress: Say = lambda text: None) -> list[Outcome]:
    """Runs all cases and writes the picture; returns the outcomes, in order.

    Args:
      path: of the picture.
      say: called with a line of text when there is something to report.
      progress: called with the name of a case when it begins.
    """
    on_gpu = runs_here()
    outcomes = []
    with torch.inference_mode():
        for case in families.cases(sizes.GPU if on_gpu else sizes.CPU):
            progress(f"{case.family}: {case.name}")
            torch.manual_seed(0)  # for each case, so that a new one changes no other's numbers
            outcomes.append(run_case(case, timed=on_gpu, say=say))
            if on_gpu:
                torch.cuda.empty_cache()
    if not picture.draw(outcomes, path):
        say("matplotlib is not installed: no picture (pip install matplotlib)")
    else:
        say(f"picture: {path}")
    return outcomes
