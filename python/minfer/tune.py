"""The tuner: measures legal kernels x launch configurations on the present GPU.

Search: every (kernel, decomposition, splits) once with the raster and swizzle that the model likes best, timed briefly, best predicted
first; then all rasters and swizzles of the fastest few; then the finalists and the analytic plan interleaved, at length. The winner's
numbers are checked against a float32 product before its row is accepted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import benchmarking, reference, tuned
from .benchmarking import GraphTimer, Timing
from .planning import DTYPE_NAMES, Plan, Problem, enumerate_plans, plan_problem

BETA = 0.5  # of problems with a C


# ---- one problem's operands and launches --------------------------------------------------------------------------------------


def make_operands(problem: Problem, device: str = "cuda") -> dict[str, torch.Tensor | None]:
    """Random normal a, b, c and an output d for :func:`launcher`, in the problem's layout."""
    batch = () if problem.batch == 1 else (problem.batch,)

    def matrix(rows: int, columns: int, row_major: bool, dtype: torch.dtype = problem.dtype) -> torch.Tensor:
        if row_major:
            return torch.randn(*batch, rows, columns, device=device, dtype=dtype)
        return torch.randn(*batch, columns, rows, device=device, dtype=dtype).transpose(-1, -2)

    out_dtype = problem.out_dtype or problem.dtype
    return {
        "a": matrix(problem.m, problem.k, problem.a_major == "k"),
        "b": matrix(problem.k, problem.n, problem.b_major == "mn").div_(max(problem.k, 1) ** 0.5),
        "c": matrix(problem.m, problem.n, True, out_dtype) if problem.c else None,
        "d": torch.empty(*batch, problem.m, problem.n_out, device=device, dtype=out_dtype),
    }


def launcher(problem: Problem, kernel: str | None = None) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The operator as a function of one set of operands."""
    if problem.gated:
        return lambda x: torch.ops.minfer.gemm_gated.default(x["a"], x["b"], kernel=kernel)
    beta = BETA if problem.c else 0.0
    return lambda x: torch.ops.minfer.gemm.out(x["a"], x["b"], c=x["c"], beta=beta, kernel=kernel, out=x["d"])


def torch_launcher(problem: Problem) -> Callable[[dict[str, Any]], torch.Tensor] | None:
    """cuBLAS through torch for the same operands; None where torch has no one call for it."""
    if problem.gated or problem.out_dtype not in (None, problem.dtype):
        return None
    if problem.c:
        return lambda x: (torch.addmm if problem.batch == 1 else torch.baddbmm)(x["c"], x["a"], x["b"], beta=BETA, out=x["d"])
    return lambda x: torch.matmul(x["a"], x["b"], out=x["d"])


def check_result(problem: Problem, kernel: str | None, x: dict[str, Any]) -> tuple[float, float]:
    """Relative error of one launch into a NaN-filled output against a float32 product, and the most it may be."""
    x["d"].fill_(float("nan"))
    out = launcher(problem, kernel)(x)
    if problem.gated:
        truth = reference.gemm_gated(x["a"].float(), x["b"].float())
        peer = reference.gemm_gated(x["a"], x["b"])
    else:
        beta = BETA if problem.c else 0.0
        truth = reference.gemm(x["a"].float(), x["b"].float(), c=x["c"], beta=beta)
        peer = truth.to(out.dtype)
    return benchmarking.relative_error(out, truth), 2 * benchmarking.relative_error(peer, truth) + benchmarking.rounding_unit(problem.dtype)


# ---- the search -----------------------------------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """One candidate: a brief time, and a long one if it was a finalist."""

    plan: Plan
    screen_us: float
    final: Timing | None = None

    def fields(self) -> dict[str, Any]:
        p = self.plan
        names = ("kernel", "decomposition", "splits", "swizzle", "raster", "workspace_bytes", "predicted_us")
        return {name: getattr(p, name) for name in names} | {
            "screen_us": round(self.screen_us, 3),
            "us": round(self.final.us, 3) if self.final else None,
        }


@dataclass
class Tuning:
    """What was found for one problem."""

    problem: Problem
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
            "m": p.m,
            "n": p.n,
            "k": p.k,
            "batch": p.batch,
            "ab_type": DTYPE_NAMES[p.dtype],
            "layout": p.layout,
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

    def __init__(self, problem: Problem, sets: list[Any], effort: Effort):
        self.problem, self.sets, self.effort = problem, sets, effort
        self.seen: dict[str, Measurement] = {}
        self.failed: list[str] = []

    def timer(self, plan: Plan, estimate_us: float, target_us: float) -> GraphTimer:
        fn = launcher(self.problem, plan.override)
        return GraphTimer(fn, self.sets, estimate_us=estimate_us, target_us=target_us)

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


def _work(plan: Plan) -> tuple[str, str, int]:
    return plan.kernel, plan.decomposition, plan.splits


def tune_problem(problem: Problem, effort: Effort = Effort(), *, with_torch: bool = False) -> Tuning:  # noqa: B008  frozen
    """Searches one problem on the current device.

    Raises:
      RuntimeError: no candidate ran, or none gave right numbers.
    """
    sets = benchmarking.rotation(lambda: make_operands(problem))
    candidates = enumerate_plans(problem)
    analytic_plan = plan_problem(problem, use_tuned=False)
    screen = _Screen(problem, sets, effort)
    screen.measure([analytic_plan])
    if effort.everything:
        screen.measure(candidates)
    else:
        by_work: dict[tuple, list[Plan]] = {}
        for plan in candidates:  # best predicted first, so each list's first is its best
            by_work.setdefault(_work(plan), []).append(plan)
        screen.measure([plans[0] for plans in list(by_work.values())[: effort.top]])
        leaders = list(dict.fromkeys(_work(m.plan) for m in screen.ranking()))[: effort.refine]
        for work in leaders:
            screen.measure(by_work.get(work, []))
    if not screen.seen:
        raise RuntimeError(f"minfer tune: no candidate ran for {problem}: " + "; ".join(screen.failed[:3]))

    arithmetic = 2.0 * problem.m * problem.n * problem.k * problem.batch / analytic_plan.floor_us > 600e6 and analytic_plan.floor_us > 20
    finalists = screen.ranking()[: effort.finalists_of_arithmetic if arithmetic else effort.finalists]
    analytic = screen.seen.get(analytic_plan.override)
    if analytic is None:
        raise RuntimeError(f"minfer tune: the analytic plan of {problem} does not run: " + "; ".join(screen.failed[:1]))
    if analytic not in finalists:
        finalists.append(analytic)
    timers = [screen.timer(m.plan, m.screen_us, effort.final_us) for m in finalists]
    peer = torch_launcher(problem) if with_torch else None
    if peer is not None:
        timers.append(GraphTimer(peer, sets, estimate_us=finalists[0].screen_us, target_us=effort.final_us))
    timings = benchmarking.interleave(timers, effort.rounds, rest_ms=effort.rest_ms if arithmetic else 0.0)
    for measurement, timing in zip(finalists, timings, strict=False):
        measurement.final = timing

    rejected = list(screen.failed)
    for best in sorted(finalists, key=lambda m: m.final.us):
        error, most = check_result(problem, best.plan.override, sets[0])
        if error <= most:
            torch_us = timings[-1].us if peer is not None else None
            return Tuning(problem, best, analytic, screen.ranking(), rejected, torch_us)
        rejected.append(f"{best.plan.override}: wrong numbers, relative error {error:.3g}, at most {most:.3g}")
    raise RuntimeError(f"minfer tune: no candidate gave right numbers for {problem}: " + "; ".join(rejected[-3:]))


# ---- many problems ----------------------------------------------------------------------------------------------------------------


def tune(
    problems: Iterable[Problem],
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
    """
    known = {row.key for row in tuned.parse_rows(out.read_text())} if skip_known and out is not None and out.exists() else set()
    facts = benchmarking.run_facts()
    dumped = json.loads(dump.read_text())["problems"] if dump is not None and dump.exists() else []
    found: list[Tuning] = []
    begin = time.monotonic()
    for problem in problems:
        if minutes is not None and time.monotonic() - begin > 60 * minutes:
            break
        if known and tuned.TunedRow.of(plan_problem(problem, use_tuned=False), 0.0).key in known:
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
