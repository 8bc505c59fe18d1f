"""The tuner of every operator: measures legal kernels x launch configurations on the present GPU, operands cold in L2.

Search: every (kernel, decomposition, splits) once with the raster and swizzle that the model likes best, timed briefly, best predicted
first; then all rasters and swizzles of the fastest few; then the finalists and the analytic plan interleaved, at length. The winner's
numbers are checked against a float32 product before its row is accepted. What runs is :mod:`minfer.measure.workloads`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..measure import benchmarking
from ..measure.benchmarking import GraphTimer, Timing
from ..measure.workloads import GemmWorkload, W4Workload, workload
from . import tuned
from .plan import (
    DTYPE_NAMES,
    Plan,
    Problem,
    W4Problem,
    enumerate_plans,
    plan_problem,
)

# ---- the search -----------------------------------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """One candidate: a brief time, and a long one if it was a finalist."""

    plan: Plan
    screen_us: float
    final: Timing | None = None

    def fields(self) -> dict[str, Any]:
        p = self.plan
        launch = ("decomposition", "splits", "swizzle", "raster", "columns", "realign_a", "realign_b")
        names = ("kernel", *launch, "workspace_bytes", "predicted_us")
        return {name: getattr(p, name) for name in names} | {
            "screen_us": round(self.screen_us, 3),
            "us": round(self.final.us, 3) if self.final else None,
        }


@dataclass
class Tuning:
    """What was found for one problem."""

    problem: Problem | W4Problem
    best: Measurement
    analytic: Measurement
    measurements: list[Measurement]
    rejected: list[str] = field(default_factory=list)  # why faster candidates were not accepted
    torch_us: float | None = None

    @property
    def regret(self) -> float:
        """How much slower the analytic plan is than the best found (1 = the same)."""
        return self.analytic.final.us / self.best.final.us

    def row(self) -> tuned.TunedRow:
        return tuned.TunedRow.of(self.best.plan, self.best.final.us)

    def fields(self) -> dict[str, Any]:
        p = self.problem
        return {
            "op": p.op,
            "m": p.m,
            "n": p.n,
            "k": p.k,
            "batch": p.batch,
            "ab_type": DTYPE_NAMES[p.dtype],
            "a_major": p.a_major,
            "b_major": p.b_major,
            "b_format": p.b_format,
            "group_size": p.group_size,
            "has_zeros": p.zeros,
            "has_c": p.c,
            "gated": p.gated,
            "floor_us": self.best.plan.floor_us,
            "torch_us": self.torch_us,
            "regret": round(self.regret, 4),
            "rejected": self.rejected,
            "best": self.best.fields(),
            "analytic": self.analytic.fields(),
            "measurements": [m.fields() for m in self.measurements],
        }


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    top: int = 48  # (kernel, decomposition, splits) tried in the first pass
    everything: bool = False  # every candidate instead
    refine: int = 4  # of them, how many get all their rasters and swizzles
    finalists: int = 8
    finalists_of_arithmetic: int = 12  # for problems that the matrix rate limits: their brief times are taken at the card's power limit
    rest_ms: float = 4.0  # between the long replays of such problems
    screen_us: float = 300.0  # length of one brief replay
    final_us: float = 800.0
    rounds: int = 15


class _Screen:
    """Brief times of candidates, each measured once; a candidate that is far behind is dropped after one replay."""

    def __init__(self, work: GemmWorkload | W4Workload, sets: list[Any], effort: Effort):
        self.work, self.sets, self.effort = work, sets, effort
        self.seen: dict[str, Measurement] = {}
        self.failed: list[str] = []

    def timer(self, plan: Plan, estimate_us: float, target_us: float) -> GraphTimer:
        return GraphTimer(self.work.launcher(plan.override), self.sets, estimate_us=estimate_us, target_us=target_us)

    def measure(self, plans: Iterable[Plan]) -> None:
        best = min((m.screen_us for m in self.seen.values()), default=float("inf"))
        for plan in plans:
            if plan.override in self.seen:
                continue
            try:
                timer = self.timer(plan, plan.predicted_us, self.effort.screen_us)
                timer.replay_us()
                us = timer.replay_us()
                if us < 1.3 * best:
                    us = min(us, timer.replay_us(), timer.replay_us())
            except RuntimeError as error:
                torch.cuda.synchronize()  # raises again where the context is lost: then nothing more can be measured
                self.failed.append(f"{plan.override}: {error}")
                continue
            best = min(best, us)
            self.seen[plan.override] = Measurement(plan, us)

    def ranking(self) -> list[Measurement]:
        return sorted(self.seen.values(), key=lambda m: m.screen_us)


def _work(plan: Plan) -> tuple[str, str, int, int, bool, bool]:
    return plan.kernel, plan.decomposition, plan.splits, plan.columns, plan.realign_a, plan.realign_b


def tune_problem(
    problem: Problem | W4Problem,
    effort: Effort = Effort(),  # noqa: B008  frozen
    *,
    with_torch: bool = False,
) -> Tuning:
    """Searches one problem on the current device.

    Raises:
      RuntimeError: no candidate ran, or none gave right numbers.
    """
    work = workload(problem)
    sets = benchmarking.rotation(work.operands)
    candidates = enumerate_plans(problem)
    analytic_plan = plan_problem(problem, use_tuned=False)
    screen = _Screen(work, sets, effort)
    screen.measure([analytic_plan])
    if effort.everything:
        screen.measure(candidates)
    else:
        by_work: dict[tuple, list[Plan]] = {}
        for plan in candidates:  # best predicted first, so each list's first is its best
            by_work.setdefault(_work(plan), []).append(plan)
        screen.measure([plans[0] for plans in list(by_work.values())[: effort.top]])
        leaders = list(dict.fromkeys(_work(m.plan) for m in screen.ranking()))[: effort.refine]
        for leader in leaders:
            screen.measure(by_work.get(leader, []))
    if not screen.seen:
        raise RuntimeError(f"minfer tune: no candidate ran for {problem}: " + "; ".join(screen.failed[:3]))

    arithmetic = problem.flops / analytic_plan.floor_us > 600e6 and analytic_plan.floor_us > 20
    finalists = screen.ranking()[: effort.finalists_of_arithmetic if arithmetic else effort.finalists]
    analytic = screen.seen.get(analytic_plan.override)
    if analytic is None:
        raise RuntimeError(f"minfer tune: the analytic plan of {problem} does not run: " + "; ".join(screen.failed[:1]))
    if analytic not in finalists:
        finalists.append(analytic)
    timers = [screen.timer(m.plan, m.screen_us, effort.final_us) for m in finalists]
    peer = work.torch_contestant(sets) if with_torch else None
    if peer is not None:
        timers.append(GraphTimer(*peer, estimate_us=finalists[0].screen_us, target_us=effort.final_us))
    timings = benchmarking.interleave(timers, effort.rounds, rest_ms=effort.rest_ms if arithmetic else 0.0)
    for measurement, timing in zip(finalists, timings, strict=False):
        measurement.final = timing

    rejected = list(screen.failed)
    for best in sorted(finalists, key=lambda m: m.final.us):
        error, most = work.check(best.plan.override, sets[0])
        if error <= most:
            torch_us = timings[-1].us if peer is not None else None
            return Tuning(problem, best, analytic, screen.ranking(), rejected, torch_us)
        rejected.append(f"{best.plan.override}: wrong numbers, relative error {error:.3g}, at most {most:.3g}")
    raise RuntimeError(f"minfer tune: no candidate gave right numbers for {problem}: " + "; ".join(rejected[-3:]))


# ---- many problems ----------------------------------------------------------------------------------------------------------------


def tune(
    problems: Iterable[Problem | W4Problem],
    *,
    out: Path | None,
    effort: Effort = Effort(),  # noqa: B008  frozen
    dump: Path | None = None,
    skip_known: bool = False,
    minutes: float | None = None,
    with_torch: bool = False,
    say: Callable[[Tuning], None] = lambda tuning: None,
) -> list[Tuning]:
    """Tunes problems one after the other; tables and dumps are written after each, so that an interrupted run keeps what it found.

    Args:
      out: CSV to merge rows into; None writes none (measuring the regret on shapes that must stay out of the tables).
      dump: JSON of every measurement, for fitting the model; problems are added to those of an existing file.
      skip_known: leave out problems that ``out`` has rows for.
      minutes: start no further problem after so long.

    Raises:
      ValueError: ``out`` is a table that cannot be merged into; nothing was measured. RuntimeError: see :func:`tune_problem`.
    """
    known = {row.key for row in tuned.read_table(out)} if out is not None else set()
    facts = benchmarking.run_facts()
    dumped = json.loads(dump.read_text())["problems"] if dump is not None and dump.exists() else []
    found: list[Tuning] = []
    begin = time.monotonic()
    for problem in problems:
        if minutes is not None and time.monotonic() - begin > 60 * minutes:
            break
        if skip_known and tuned.TunedRow.of(plan_problem(problem, use_tuned=False), 0.0).key in known:
            continue
        tuning = tune_problem(problem, effort, with_torch=with_torch)
        found.append(tuning)
        if out is not None:
            tuned.merge_into(out, [tuning.row()])
        if dump is not None:
            dump.parent.mkdir(parents=True, exist_ok=True)
            dump.write_text(json.dumps({**facts, "problems": [*dumped, *(t.fields() for t in found)]}) + "\n")
        say(tuning)
        torch.cuda.empty_cache()
    return found


def regret_summary(found: list[Tuning]) -> dict[str, Any]:
    """Geomean and worst of analytic time / best time, and the problem that it is worst for."""
    worst = max(found, key=lambda t: t.regret)
    return {
        "problems": len(found),
        "geomean": benchmarking.geomean(t.regret for t in found),
        "worst": worst.regret,
        "worst_problem": str(worst.problem),
    }
