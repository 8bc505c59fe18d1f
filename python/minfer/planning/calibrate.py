"""Calibration of the cost model of GEMM plans, dense, with 4-bit weights and of 8-bit operands: candidates are timed on random problems,
and the constants of the model are fitted to them.

The formulas themselves are the library's alone (cpp/src/gemm/cost_model.cpp, cpp/src/quantized_gemm/cost_model.cpp);
``minfer::_predict_gemm`` evaluates them for many models and candidates at once, and the fit differentiates them numerically. A table
holds rates of the device and factors of each kernel, by name: names that the library adds are fitted without a change here. The fit is a
damped Gauss-Newton search over the logarithms of all constants (Levenberg 1944, Marquardt 1963), with Huber's loss and a normal prior
around a table that is already known; the prior is what shrinks the factors of kernels that were seldom measured.
"""

from __future__ import annotations

import gc
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .._core.namespace import ops
from ..measure import benchmarking, random_problems
from ..measure.workloads import workload
from .plan import (
    DTYPE_NAMES,
    NARROW_NAMES,
    Plan,
    Problem,
    ScaledProblem,
    W4A8Problem,
    W4Problem,
    enumerate_plans,
    plan_problem,
)

_LONGEST_US = 1000.0  # of a problem for calibration
NEAR = 1.6  # candidates predicted to take up to this times the best are measured
DEQUANTIZE = "dequantize"  # the override that writes the weight out in 16 bits, in front of a dense product
_DEQUANTIZED_M = 192  # from so many tokens on that is measured, too
KINDS = {"gated": {"gated": True}, "f32": {"out_dtype": torch.float32}}  # of measured problems; any other kind is a plain product
_DTYPES = {name: dtype for dtype, name in (*DTYPE_NAMES.items(), *NARROW_NAMES.items())}
AnyProblem = Problem | W4Problem | ScaledProblem | W4A8Problem
_ELEMENTS = ("f16", "bf16", "f32", "e4m3", "s8")  # in kernels' names

# ---- the model's table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostModel:
    """A table of constants: what ``_load_model`` takes, and ``cpp/configs/models/<device>.csv`` has."""

    rates: dict[str, float]
    kernels: dict[str, tuple[float, ...]]  # a kernel's factors, by its name in tables

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """Lines that start with # are skipped; the library checks the names when the table is used."""
        rates: dict[str, float] = {}
        kernels: dict[str, tuple[float, ...]] = {}
        for line in text.splitlines():
            kind, _, rest = line.strip().partition(",")
            name, _, cells = rest.partition(",")
            if kind == "rate":
                rates[name] = float(cells)
            elif kind == "kernel":
                kernels[name] = tuple(map(float, cells.split(",")))
        return cls(rates, kernels)

    @classmethod
    def of_device(cls, device: int) -> CostModel:
        """The model that plans for a device use: loaded, shipped, or the H200's with its rates scaled; -1 is the H200 as measured."""
        return cls.parse(ops._gemm_model(device))

    def text(self, digits: int = 5) -> str:
        lines = [f"rate,{name},{value:.{digits}g}" for name, value in self.rates.items()]
        lines += [",".join(["kernel", name, *(f"{value:.{digits}g}" for value in values)]) for name, values in self.kernels.items()]
        return "\n".join(lines) + "\n"


def table_name(kernel: str) -> str:
    """A kernel's name in tables: without the family and the element type (minfer::model_name_of)."""
    rest = kernel.split("_", 1)[1]
    return re.sub(rf"_({'|'.join(_ELEMENTS)})_", "_", rest, count=1)


# ---- measurements --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One measured plan."""

    kernel: str
    decomposition: str
    splits: int
    swizzle: int
    raster: str
    columns: int
    predicted_us: float  # when it was measured
    us: float
    realign_a: bool = False
    realign_b: bool = False

    @classmethod
    def of(cls, plan: Plan, us: float) -> Candidate:
        launch = (plan.kernel, plan.decomposition, plan.splits, plan.swizzle, plan.raster, plan.columns)
        return cls(*launch, round(plan.predicted_us, 3), round(us, 3), plan.realign_a, plan.realign_b)

    @property
    def override(self) -> str:
        if self.kernel == DEQUANTIZE:
            return DEQUANTIZE
        columns = f",columns={self.columns}" if self.columns else ""
        launch = f"decomposition={self.decomposition},splits={self.splits},swizzle={self.swizzle},raster={self.raster}"
        copies = "".join(f",{name}=1" for name in ("realign_a", "realign_b") if getattr(self, name))
        return f"{self.kernel}@{launch}{columns}{copies}"


@dataclass(frozen=True)
class Measured:
    """A problem with the times of its candidates; ``own_us``: of what the operator itself runs, 0 where it was not timed."""

    problem: AnyProblem
    candidates: tuple[Candidate, ...]
    own_us: float = 0.0

    def line(self) -> str:
        """As one line of JSON."""
        p = self.problem
        head: dict[str, Any] = {"own": round(self.own_us, 3), "m": p.m, "n": p.n, "k": p.k, "c": p.c}
        if isinstance(p, W4Problem):
            head |= {"format": p.w4_format, "group_size": p.group_size, "zeros": p.zeros, "gated": p.gated}
        elif isinstance(p, W4A8Problem):
            head |= {"activations": NARROW_NAMES[p.dtype], "group_size": p.group_size, "gated": p.gated}
        elif isinstance(p, ScaledProblem):
            head |= {"blocks": p.block_scaled, "fast": p.fast_accum, "gated": p.gated, "out_dtype": DTYPE_NAMES[p.out_dtype]}
        else:
            head |= {"kind": "gated" if p.gated else "f32" if p.out_dtype == torch.float32 else "plain", "layout": p.layout}
        plans = [list(vars(candidate).values()) for candidate in self.candidates]
        return json.dumps(head | {"dtype": (DTYPE_NAMES | NARROW_NAMES)[p.dtype], "plans": plans})

    @classmethod
    def parse(cls, line: str) -> Measured:
        found = json.loads(line)
        sizes, options = (found["m"], found["n"], found["k"]), {"dtype": _DTYPES[found["dtype"]], "c": found["c"]}
        if "format" in found:
            quantised = {name: found[name] for name in ("group_size", "zeros", "gated")}
            problem = W4Problem(*sizes, **options, w4_format=found["format"], **quantised)
        elif "activations" in found:
            problem = W4A8Problem(*sizes, **options, **{name: found[name] for name in ("group_size", "gated")})
        elif "blocks" in found:
            flags = {"block_scaled": found["blocks"], "fast_accum": found["fast"], "gated": found["gated"]}
            problem = ScaledProblem(*sizes, **options, out_dtype=_DTYPES[found["out_dtype"]], **flags)
        else:
            problem = Problem(*sizes, **options, layout=found.get("layout", "tn"), **KINDS.get(found.get("kind", "plain"), {}))
        return cls(problem, tuple(Candidate(*plan) for plan in found["plans"]), found.get("own", 0.0))


def read_measurements(paths: Iterable[Path]) -> list[Measured]:
    """Problems of files of JSON lines.

    Raises:
      ValueError: a line is not what :meth:`Measured.line` writes; names the file and the line.
    """
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                measured = Measured.parse(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: line {number}: {type(error).__name__}: {error}") from None
            if measured.candidates:
                found.append(measured)
    return found


def choose(plans: Sequence[Plan], near: float, most: int, seen: dict[str, int] | None = None, rare: int = 0) -> list[Plan]:
    """Plans to measure: the best predicted of each kernel and division of work, up to ``near`` times the best prediction; and then, of
    kernels that ``seen`` counts least, ``rare`` more that take up to four times as long."""
    distinct: dict[tuple, Plan] = {}
    for plan in plans:  # best predicted first
        copies = (plan.realign_a, plan.realign_b)
        distinct.setdefault((plan.kernel, plan.decomposition, plan.splits, plan.columns, *copies), plan)
    ordered = list(distinct.values())
    chosen = [plan for plan in ordered if plan.predicted_us < near * plans[0].predicted_us][:most]
    if rare and seen is not None:
        rest = [plan for plan in ordered if plan not in chosen and plan.predicted_us < 4 * plans[0].predicted_us]
        chosen += sorted(rest, key=lambda plan: seen.get(table_name(plan.kernel), 0))[:rare]
    return chosen


def measure(problem: AnyProblem, plans: Sequence[Plan], *, own: bool = False, target_us: float = 200.0, rounds: int = 3) -> Measured:
    """Brief times of plans of a problem, in turn, the least of a few graph replays each. Plans that cannot be launched are left out, and a
    warning says so.

    Args:
      plans: best predicted first. Weights that are dequantised first are timed beside them where there are many tokens.
      own: also time what the operator runs by itself, in :attr:`Measured.own_us`.

    Raises:
      RuntimeError: the operator itself does not run, or the device is lost.
    """
    try:
        return _measure(problem, plans, own, target_us, rounds)
    finally:
        gc.collect()  # every capture has memory of its own, which a graph holds until it is collected
        torch.cuda.empty_cache()


def _measure(problem: AnyProblem, plans: Sequence[Plan], own: bool, target_us: float, rounds: int) -> Measured:
    work = workload(problem)
    sets = benchmarking.rotation(work.operands)
    timers: list[benchmarking.GraphTimer] = []
    candidates = [Candidate.of(plan, 0.0) for plan in plans]
    if isinstance(problem, W4Problem) and problem.m >= _DEQUANTIZED_M:
        candidates.append(replace(Candidate.of(plan_problem(problem, kernel=DEQUANTIZE), 0.0), kernel=DEQUANTIZE))
    timed: list[Candidate] = []
    failed: list[str] = []
    if own:
        estimate_us = plans[0].predicted_us if plans else 10.0
        timers.append(benchmarking.GraphTimer(work.launcher(), sets, estimate_us=estimate_us, target_us=target_us))
        timers[0].replay_us()
    for candidate in candidates:
        try:
            timer = benchmarking.GraphTimer(
                work.launcher(candidate.override), sets, estimate_us=candidate.predicted_us, target_us=target_us
            )
            timer.replay_us()
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises again where the context is lost
            failed.append(f"{candidate.override}: {error}")
            continue
        timers.append(timer)
        timed.append(candidate)
    if failed:
        warnings.warn(f"{len(failed)} of {len(candidates)} candidates of {problem} were not timed, the first: {failed[0]}", stacklevel=3)
    samples = [[timer.replay_us() for timer in timers] for _ in range(rounds)]
    best = [min(of_timer) for of_timer in zip(*samples, strict=True)]
    own_us = round(best.pop(0), 3) if own else 0.0
    return Measured(problem, tuple(replace(c, us=round(us, 3)) for c, us in zip(timed, best, strict=True)), own_us)


def measure_device(
    seconds: float, seed: int = 1, say: Callable[[Measured], None] = lambda measured: None, problems: Iterable[AnyProblem] | None = None
) -> list[Measured]:
    """Times candidates of random problems on the present GPU for about so long: always the same problems in the same order, but for
    those that would take too long on it. ``problems``: these in place of the seed's.

    Each problem's best predicted candidates are joined by those of kernels that were timed least so far, so that all constants show.
    """
    begin = time.monotonic()
    seen: dict[str, int] = {}
    found = []
    for problem in problems if problems is not None else random_problems.calibration(seed):
        if time.monotonic() - begin > seconds:
            break
        plans = enumerate_plans(problem)
        if plans[0].predicted_us > _LONGEST_US:
            continue
        measured = measure(problem, choose(plans, 1.35, 12, seen, 6))
        for candidate in measured.candidates:
            if candidate.kernel != DEQUANTIZE:
                name = table_name(candidate.kernel)
                seen[name] = seen.get(name, 0) + 1
        if measured.candidates:
            found.append(measured)
            say(measured)
    return found


# ---- predictions ---------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Measurements as the fit takes them: a row for each candidate whose kernel this build knows."""

    problems: list[Measured]
    names: list[str] = field(init=False)  # kernels in tables
    us: torch.Tensor = field(init=False)  # [rows]
    problem: torch.Tensor = field(init=False)  # [rows], of problems
    kernel: torch.Tensor = field(init=False)  # [rows], of names
    lines: str = field(init=False)

    def __post_init__(self):
        from .._core.registry import kernel_names

        known = frozenset().union(*map(kernel_names, ("gemm", "w4a16", "w4a8", "scaled_gemm")))
        rows = [(i, c) for i, measured in enumerate(self.problems) for c in measured.candidates if c.kernel in known and c.us > 0]
        if not rows:
            raise ValueError("no candidate was measured whose kernel this build knows")
        heads = [_head(measured.problem) for measured in self.problems]
        self.names = sorted({table_name(c.kernel) for _, c in rows})
        index = {name: i for i, name in enumerate(self.names)}
        self.us = torch.tensor([c.us for _, c in rows], dtype=torch.float64)
        self.problem = torch.tensor([i for i, _ in rows])
        self.kernel = torch.tensor([index[table_name(c.kernel)] for _, c in rows])
        self.lines = "\n".join(f"{heads[i]} {c.override}" for i, c in rows)

    def best_us(self) -> torch.Tensor:
        """Of each row, the least time of its problem's candidates."""
        least = torch.full((len(self.problems),), math.inf, dtype=torch.float64)
        return least.scatter_reduce(0, self.problem, self.us, "amin")[self.problem]


def _head(problem: AnyProblem) -> str:
    if isinstance(problem, (W4Problem, W4A8Problem)):
        sizes, ab, w4_format, group_size, *flags = problem.arguments()
        return " ".join(map(str, [*sizes, ab, w4_format, group_size, *map(int, flags)]))
    if isinstance(problem, ScaledProblem):
        sizes, ab, d, alignments, *flags = problem.arguments()
        return " ".join(map(str, [*sizes, ab, d, *alignments, *map(int, flags)]))
    sizes, ab, d, a_major, b_major, alignments, c, gated = problem.arguments()
    return " ".join(map(str, [*sizes, ab, d, a_major, b_major, *alignments, int(c), int(gated)]))


def predict(models: Sequence[CostModel], data: Data, device: int = -1) -> torch.Tensor:
    """Predicted us, [models, rows], for a device of this index; -1: the H200 as measured."""
    us = torch.empty(len(models), len(data.us), dtype=torch.float64)
    ops._predict_gemm("\n\n".join(model.text(9) for model in models), data.lines, device, us)
    return us


@dataclass(frozen=True)
class Quality:
    """How well a model predicts, and what its choices cost: regret is the pick's time over the best measured one's, less 1."""

    error: float  # median |log(predicted / measured)|
    median: float
    p95: float
    worst: float
    mean: float

    def __str__(self) -> str:
        numbers = f"mean {self.mean:.1%}, median {self.median:.1%}, p95 {self.p95:.1%}, worst {self.worst:.0%}"
        return f"error {self.error:.1%}; regret {numbers}"


def regrets(predicted: torch.Tensor, data: Data) -> torch.Tensor:
    """Of each problem that has rows: the time of its first candidate of least prediction over the least time, less 1."""
    rows, problems = torch.arange(len(data.us)), len(data.problems)
    least = torch.full((problems,), math.inf, dtype=torch.float64).scatter_reduce(0, data.problem, predicted, "amin")
    candidates = torch.where(predicted <= least[data.problem], rows, len(rows))
    picks = torch.full((problems,), len(rows)).scatter_reduce(0, data.problem, candidates, "amin")
    picks = picks[picks < len(rows)]
    return data.us[picks] / data.best_us()[picks] - 1


def quality(model: CostModel, data: Data, device: int = -1) -> Quality:
    predicted = predict([model], data, device)[0]
    error = (predicted / data.us).log().abs().median().item()
    r = regrets(predicted, data)
    return Quality(error, r.median().item(), r.quantile(0.95).item(), r.max().item(), r.mean().item())


# ---- the fit -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitOptions:
    """Deviations are of logarithms: 0.1 is 10 %."""

    noise: float = 0.05  # of times; errors beyond Huber's 1.5 times it count linearly
    rate_deviation: float = 0.5  # of the device's rates around the prior's
    factor_deviation: float = 0.15  # of a kernel's factors around the prior's
    new_deviation: float = 0.5  # of the factors of kernels that the prior lacks, around 1
    near: float = 0.12  # a candidate's weight falls by e for each so much that it is slower than its problem's best
    least_weight: float = 0.02
    shared: float = 0.7  # share of an error that all candidates of a problem have in common and that does not count: it changes no pick
    regret: float = 100.0  # weight of each problem's expected regret beside the errors; 0 leaves it out
    softness: float = 0.03  # a candidate is picked with odds that fall by e for each so much that its prediction is above another's
    steps: int = 30
    tolerance: float = 1e-4  # a step that gains a smaller share of the loss is the last


_HUBER = 1.5
_OUTLIER = 10.0  # times the noise: a candidate whose error is more takes no part in the expected regret
_STEP = 0.01  # of numeric derivatives


class _Fit:
    """The loss over the logarithms of a model's constants: rates first, then each kernel's factors."""

    def __init__(self, data: Data, prior: CostModel, options: FitOptions, device: int):
        self.data, self.options, self.device = data, options, device
        self.rates = list(prior.rates)
        count = len(next(iter(prior.kernels.values())))
        self.prior_kernels = prior.kernels
        factors = [prior.kernels.get(name, (1.0,) * count) for name in data.names]
        self.factors = count
        self.prior = torch.tensor([*prior.rates.values(), *(f for of_kernel in factors for f in of_kernel)], dtype=torch.float64).log()
        self.deviation = torch.full_like(self.prior, options.factor_deviation)
        self.deviation[: len(self.rates)] = options.rate_deviation
        for i, name in enumerate(data.names):
            if name not in prior.kernels:
                first = len(self.rates) + i * count
                self.deviation[first : first + count] = options.new_deviation
        relative = data.us / data.best_us()
        self.weight = torch.exp(-(relative - 1) / options.near) + options.least_weight
        self.log_us = data.us.log()
        self.log_relative = relative.log().clamp(max=0.5)  # a time that is an outlier does not decide
        self.weights = self._sum(self.weight)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over each problem's rows, of [rows] or [rows, columns]."""
        return values.new_zeros(len(self.data.problems), *values.shape[1:]).index_add_(0, self.data.problem, values)

    def _centred(self, values: torch.Tensor) -> torch.Tensor:
        """Less the shared part of each problem's weighted mean."""
        shape = (-1, *[1] * (values.dim() - 1))
        mean = self._sum(values * self.weight.view(shape)) / self.weights.clamp(min=1e-12).view(shape)
        return values - self.options.shared * mean[self.data.problem]

    def model(self, theta: torch.Tensor) -> CostModel:
        values = theta.exp().tolist()
        rates = dict(zip(self.rates, values, strict=False))
        rest = values[len(self.rates) :]
        fitted = {name: tuple(rest[i * self.factors : (i + 1) * self.factors]) for i, name in enumerate(self.data.names)}
        return CostModel(rates, {**self.prior_kernels, **fitted})

    def residuals(self, theta: torch.Tensor) -> torch.Tensor:
        return self._centred(predict([self.model(theta)], self.data, self.device)[0].log() - self.log_us)

    def expected_regret(self, residuals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sum over the problems of E + 4 E^2, E the mean log regret of picks at odds that fall with the prediction; its gradient by the
        residuals, and a positive diagonal for its second derivatives. What a problem's residuals have in common changes none of these."""
        rows = self.data.problem
        z = -(residuals + self.log_us) / self.options.softness
        outlier = residuals.abs() > _OUTLIER * self.options.noise
        z = z.masked_fill(outlier & (self._sum((~outlier).double())[rows] > 0), -math.inf)
        largest = z.new_full((len(self.data.problems),), -math.inf).scatter_reduce(0, rows, z, "amax")
        odds = (z - largest[rows]).exp()
        odds = odds / self._sum(odds)[rows]
        expected = self._sum(odds * self.log_relative)
        slope = odds * (self.log_relative - expected[rows]) / self.options.softness
        outer = 1 + 8 * expected[rows]
        return (expected + 4 * expected.square()).sum(), -outer * slope, outer * slope.abs() / self.options.softness

    def loss(self, theta: torch.Tensor, residuals: torch.Tensor) -> float:
        z = residuals.abs() / self.options.noise
        huber = torch.where(z <= _HUBER, 0.5 * z * z, _HUBER * (z - 0.5 * _HUBER))
        prior = 0.5 * ((theta - self.prior) / self.deviation).square().sum()
        return ((self.weight * huber).sum() + self.options.regret * self.expected_regret(residuals)[0] + prior).item()

    def jacobian(self, theta: torch.Tensor) -> torch.Tensor:
        """d residuals / d theta, [rows, constants]. One factor of all kernels is moved at once: a row depends on its own kernel's."""
        rates, factors, kernels = len(self.rates), self.factors, len(self.data.names)
        moved = []
        for i in range(rates):
            moved.append(theta.clone())
            moved[-1][i] += _STEP
        for f in range(factors):
            moved.append(theta.clone())
            moved[-1][rates + f :: factors] += _STEP
        predicted = predict([self.model(theta), *map(self.model, moved)], self.data, self.device).log()
        slopes = ((predicted[1:] - predicted[0]) / _STEP).t()  # [rows, rates + factors]
        full = torch.zeros(len(self.log_us), rates + factors * kernels, dtype=torch.float64)
        full[:, :rates] = slopes[:, :rates]
        columns = rates + self.data.kernel[:, None] * factors + torch.arange(factors)
        full.scatter_(1, columns, slopes[:, rates:])
        return self._centred(full)

    def run(self, say: Callable[[str], None]) -> CostModel:
        theta, damping = self.prior.clone(), 1e-2
        residuals = self.residuals(theta)
        loss = self.loss(theta, residuals)
        noise2 = self.options.noise**2
        for step in range(self.options.steps):
            huber = (_HUBER * self.options.noise / residuals.abs().clamp(min=1e-12)).clamp(max=1.0)
            weight = self.weight * huber / noise2
            slopes = self.jacobian(theta)
            _, of_regret, curvature = self.expected_regret(residuals)
            curvature = weight + self.options.regret * curvature
            normal = slopes.t() @ (slopes * curvature[:, None]) + torch.diag(self.deviation**-2)
            gradient = slopes.t() @ (weight * residuals + self.options.regret * of_regret) + (theta - self.prior) / self.deviation**2
            before = loss
            while damping < 1e6:
                change = torch.linalg.solve(normal + damping * torch.diag(normal.diagonal()), -gradient).clamp(-0.7, 0.7)
                tried = self.residuals(theta + change)
                after = self.loss(theta + change, tried)
                if after < loss:
                    theta, residuals, loss, damping = theta + change, tried, after, damping / 5
                    break
                damping *= 5
            say(f"step {step + 1}: loss {loss:.1f}")
            if before - loss < self.options.tolerance * before:
                break
        return self.model(theta)


def fit(
    data: Data, prior: CostModel, options: FitOptions = FitOptions(), *, device: int = -1, say: Callable[[str], None] = lambda text: None
) -> CostModel:  # noqa: B008  frozen
    """The constants under which the model predicts the measurements best, near a prior's where they do not tell.

    Args:
      prior: every rate by name; kernels that it lacks start from factors of 1.
      device: of the measurements, -1 for the H200 as measured; its number of SMs enters the formula.
    """
    return _Fit(data, prior, options, device).run(say)
