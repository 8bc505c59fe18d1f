"""Fits the cost models of grouped GEMM's and attention's planners to measurements of `bench.suites regret`, on any machine.

    python -m bench.suites regret --suite regret_grouped,regret_attention --seed 2000 --measurements measured.jsonl      # on the GPU
    python -m bench.fit_plans grouped measured.jsonl
    python -m bench.fit_plans attention measured.jsonl

Grouped products of 8-bit operands are a suite of their own, regret_grouped_scaled; `--only` leaves the constants of the others as they are.

The formulas are the library's alone: ``minfer::_predict_grouped`` and ``_predict_attention`` evaluate them for many models at once. First
a damped Gauss-Newton search over the logarithms of the constants (Levenberg 1944, Marquardt 1963) makes predictions right, then a random
search lowers the regret that is expected where predictions are off by a few percent. Some problems are held out: what a fit gains on these
is what it is worth. The constants that are printed go into cpp/src/moe/grouped/cost_model.h and cpp/src/attention/cost_model.h by hand.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Constants = dict[str, float]
_STEP = 1e-4  # of a logarithm, for slopes
H200 = -1
GROUPED_OPS = ("grouped_gemm", "grouped_w4a16_gemm", "grouped_gemm_fp8", "grouped_gemm_int8")
ROUTINGS = ("even_weight", "zipf_weight", "same_weight")

# ---- measurements ---------------------------------------------------------------------------------------------------------------


def _grouped_lines(found: dict[str, Any], kernel: str, launch: str) -> list[str]:
    sizes = [found["tokens"] * found["top_k"], found["experts"], found["n"], found["k"]]
    weights = found["weights"]
    form = (weights, found.get("a_group", 0) if weights == "dense" else 128, 0)  # of 8-bit operands: how much of k a row's scale is of
    override = f"{kernel}@{launch}" if launch else kernel
    cells = [*sizes, found["dtype"], int(found["gated"]), int(found["gathered"]), *form]
    routings = ((found["routing"], found["top_k"]), ("uniform", 0), ("zipf", 0), ("one_hot", 0))
    return [" ".join(map(str, [*cells, *routing, override])) for routing in routings]


def _attention_lines(found: dict[str, Any], kernel: str, launch: str) -> list[str]:
    sizes = [found[name] for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim")]
    form = (found["dtype"], found["window_left"], 0 if found["causal"] else -1, 0, found["kv_format"] or "tensors", found["page_size"])
    return [" ".join(map(str, [*sizes, *form, keys, kernel])) for keys in (found["seqlen_k"], 0, -1)]


@dataclass(frozen=True)
class Family:
    ops: tuple[str, ...]
    lines: Callable[[dict[str, Any], str, str], list[str]]  # of the problem as it was, then as plans expect that it may be
    weights: tuple[str, ...]  # constants that say how likely these expectations are; none: equally
    model: Callable[[], str]
    predict: Callable[..., None]


def families() -> dict[str, Family]:
    ops = torch.ops.minfer
    return {
        "grouped": Family(GROUPED_OPS, _grouped_lines, ROUTINGS, ops._grouped_model, ops._predict_grouped),
        "attention": Family(("attention", "attention_paged"), _attention_lines, (), ops._attention_model, ops._predict_attention),
    }


def read(paths: Iterable[Path], family: Family) -> list[dict[str, Any]]:
    """Problems of the family, those that are in several files once.

    Raises:
      ValueError: there is none.
    """
    found: dict[tuple, dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            problem = json.loads(line)
            if problem["op"] in family.ops and len(problem["plans"]) > 1:
                found[problem["op"], problem["seed"], problem["index"]] = problem
    if not found:
        raise ValueError(f"there are no problems of {', '.join(family.ops)} with times of several kernels")
    return list(found.values())


@dataclass
class Data:
    """A row for each timed kernel."""

    family: Family
    problems: list[dict[str, Any]]
    device: int = H200
    lines: str = field(init=False)  # of the problems as they were
    expected: list[str] = field(init=False)  # as plans expect that they may be
    us: torch.Tensor = field(init=False)  # [rows]
    problem: torch.Tensor = field(init=False)  # [rows], of problems
    floor_us: torch.Tensor = field(init=False)  # [rows]
    best_us: torch.Tensor = field(init=False)  # [problems], of all kernels that were timed

    def __post_init__(self):
        plans = [(i, found, plan) for i, found in enumerate(self.problems) for plan in found["plans"]]
        rows = [(i, self.family.lines(found, kernel, launch), us) for i, found, (kernel, launch, _, us) in plans]
        self.lines, *self.expected = ("\n".join(lines) for lines in zip(*(lines for _, lines, _ in rows), strict=True))
        self.us = torch.tensor([us for *_, us in rows], dtype=torch.float64)
        self.problem = torch.tensor([i for i, *_ in rows])
        self.best_us = torch.tensor([min(us for *_, us in found["plans"]) for found in self.problems], dtype=torch.float64)
        self.floor_us = torch.zeros_like(self.us)
        self.raw([{}])

    def raw(self, models: Sequence[Constants]) -> torch.Tensor:
        """Predicted us without regard to the floor, of the problems as they were, [models, rows]."""
        return self._predicted(models, self.lines)

    def picked(self, models: Sequence[Constants]) -> torch.Tensor:
        """What plans compare, the least being chosen: the mean over expectations of times against the fastest; [models, rows]."""
        predicted = [self._predicted(models, lines) for lines in self.expected]
        weights = torch.tensor([[model[name] for name in self.family.weights] or [1.0] * len(predicted) for model in models]).double()
        losses = (us / _least(us, self)[..., self.problem] for us in predicted)
        return sum(weight[:, None] * loss for weight, loss in zip(weights.t(), losses, strict=True)) / weights.sum(1, keepdim=True)

    def _predicted(self, models: Sequence[Constants], lines: str) -> torch.Tensor:
        texts = ["".join(f"{name},{value!r}\n" for name, value in model.items()) or "\n" for model in models]
        us = torch.empty(len(models), len(self.us), dtype=torch.float64)
        self.family.predict("\n".join(texts), lines, self.device, us, self.floor_us)
        return us

    def regret_of_rows(self) -> torch.Tensor:
        return self.us / self.best_us[self.problem] - 1


def _least(x: torch.Tensor, data: Data) -> torch.Tensor:
    """Of each problem's rows, the least; [.., rows] to [.., problems]."""
    index = data.problem.expand(x.shape)
    return torch.full((*x.shape[:-1], len(data.problems)), math.inf, dtype=x.dtype).scatter_reduce(-1, index, x, "amin")


def regrets(picked: torch.Tensor, data: Data) -> torch.Tensor:
    """Of each model and problem, the regret of the first kernel of least prediction; NaN where no kernel was timed that plans consider."""
    rows = torch.arange(len(data.us)).expand(picked.shape)
    candidates = torch.where(picked <= _least(picked, data)[..., data.problem], rows, len(data.us))
    first = torch.full((*picked.shape[:-1], len(data.problems)), len(data.us)).scatter_reduce(
        -1, data.problem.expand(picked.shape), candidates, "amin"
    )
    return torch.cat([data.regret_of_rows(), torch.tensor([math.nan], dtype=torch.float64)])[first]


def expected_regret(picked: torch.Tensor, data: Data, noise: float) -> torch.Tensor:
    """The mean regret of picks by predictions whose logarithms are off by ``noise``, [models]."""
    weight = torch.exp(-(picked.log() - _least(picked, data)[..., data.problem].log()) / noise)
    index = data.problem.expand(weight.shape)
    zeros = torch.zeros(*weight.shape[:-1], len(data.problems), dtype=torch.float64)
    total = zeros.scatter_add(-1, index, weight)
    of_problem = zeros.scatter_add(-1, index, weight * data.regret_of_rows().clamp(max=1.0)) / total.clamp(min=1e-300)
    return of_problem.mean(-1)


def quality(model: Constants, data: Data) -> str:
    picked = data.picked([model])
    error = (data.raw([model])[0] / data.us).log().abs().median().item()
    found = regrets(picked, data)[0]
    found = found[~found.isnan()]
    numbers = [found.mean(), found.median(), found.quantile(0.95), found.max()]
    texts = (f"{what} {value.item():.1%}" for what, value in zip(("mean", "median", "p95", "worst"), numbers, strict=True))
    return f"error {error:.1%}; regret {', '.join(texts)} of {len(found)} problems"


# ---- the fit --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitOptions:
    noise: float = 0.06  # of predictions, of logarithms
    deviation: float = 0.4  # of the logarithms of constants around today's
    near: float = 0.25  # a kernel's weight falls by e for each so much that it is slower than its problem's best
    shared: float = 0.5  # share of an error that all kernels of a problem have in common and that does not count: it changes no pick
    steps: int = 12
    searches: int = 300  # rounds of the random search
    batch: int = 24  # models of a round
    pull: float = 0.002  # regret that a constant costs a deviation away from today's


class Fit:
    """Constants that are 0 or that no row depends on stay as they are; so do those of ``frozen``."""

    def __init__(self, data: Data, start: Constants, options: FitOptions, frozen: Sequence[str] = ()):
        self.data, self.start, self.options = data, start, options
        candidates = [name for name, value in start.items() if value > 0 and name not in frozen]
        models = [start, *({**start, name: start[name] * 1.3} for name in candidates)]
        moved = torch.cat([data.raw(models), data.picked(models)], 1)
        self.names = [name for name, row in zip(candidates, moved[1:], strict=True) if not torch.equal(row, moved[0])]
        self.weight = torch.exp(-data.regret_of_rows() / options.near) + 0.02

    def model(self, theta: torch.Tensor) -> Constants:
        return self.start | {name: self.start[name] * math.exp(x) for name, x in zip(self.names, theta.tolist(), strict=True)}

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [rows, ..] without the share of their problem's weighted mean that does not count."""
        weight = self.weight.view(-1, *[1] * (x.dim() - 1))
        zeros = torch.zeros(len(self.data.problems), *x.shape[1:], dtype=x.dtype)
        index = self.data.problem
        mean = zeros.index_add(0, index, x * weight) / zeros.index_add(0, index, weight.expand(x.shape)).clamp(min=1e-12)
        return x - self.options.shared * mean[index]

    def _residuals(self, predicted: torch.Tensor) -> torch.Tensor:
        return self._centred((predicted / self.data.us).log())

    def _loss(self, residuals: torch.Tensor, theta: torch.Tensor) -> float:
        z = residuals.abs() / self.options.noise
        huber = torch.where(z <= 1.5, 0.5 * z * z, 1.5 * (z - 0.75))
        return ((self.weight * huber).sum() + 0.5 * (theta / self.options.deviation).square().sum()).item()

    def least_squares(self, say: Callable[[str], None]) -> torch.Tensor:
        theta, damping = torch.zeros(len(self.names), dtype=torch.float64), 1e-2
        residuals = self._residuals(self.data.raw([self.model(theta)])[0])
        loss = self._loss(residuals, theta)
        for step in range(self.options.steps):
            moved = [self.model(theta + _STEP * row) for row in torch.eye(len(self.names), dtype=torch.float64)]
            predicted = self.data.raw([self.model(theta), *moved]).log()
            slopes = self._centred(((predicted[1:] - predicted[0]) / _STEP).t())  # [rows, constants]
            huber = (1.5 * self.options.noise / residuals.abs().clamp(min=1e-12)).clamp(max=1.0)
            weight = self.weight * huber / self.options.noise**2
            normal = slopes.t() @ (slopes * weight[:, None]) + torch.eye(len(self.names)).double() / self.options.deviation**2
            gradient = slopes.t() @ (weight * residuals) + theta / self.options.deviation**2
            before = loss
            while damping < 1e6:
                change = torch.linalg.solve(normal + damping * torch.diag(normal.diagonal()), -gradient).clamp(-0.5, 0.5)
                tried = self._residuals(self.data.raw([self.model(theta + change)])[0])
                after = self._loss(tried, theta + change)
                if after < loss:
                    theta, residuals, loss, damping = theta + change, tried, after, damping / 5
                    break
                damping *= 5
            say(f"step {step + 1}: loss {loss:.1f}")
            if before - loss < 1e-4 * before:
                break
        return theta

    def goal(self, thetas: torch.Tensor) -> torch.Tensor:
        """Expected regret, of plans and were problems known, and a little for errors and for constants that have moved: [models]."""
        models = [self.model(theta) for theta in thetas]
        predicted = self.data.raw(models)
        errors = ((predicted / self.data.us).log().abs() * self.weight).sum(-1) / self.weight.sum()
        regret = 0.5 * sum(expected_regret(us, self.data, self.options.noise / 2) for us in (predicted, self.data.picked(models)))
        moved = (thetas / self.options.deviation).square().mean(-1)
        return regret + 0.1 * errors + self.options.pull * moved

    def search(self, theta: torch.Tensor, say: Callable[[str], None], seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        best, scale = self.goal(theta[None])[0], 0.1
        for i in range(self.options.searches):
            shape = (self.options.batch, len(self.names))
            some = torch.rand(shape, generator=generator) < 3 / max(len(self.names), 3)
            tried = theta + scale * torch.randn(shape, generator=generator, dtype=torch.float64) * some
            goals = self.goal(tried)
            found = int(goals.argmin())
            if goals[found] < best:
                theta, best, scale = tried[found], goals[found], min(scale * 1.1, 0.3)
            else:
                scale = max(scale * 0.97, 0.01)
            if (i + 1) % 50 == 0:
                say(f"search {i + 1}: goal {best.item():.4f}, scale {scale:.3f}")
        return theta


def frozen_but(only: str, names: Iterable[str]) -> list[str]:
    """The constants whose names begin with none of these patterns of :mod:`fnmatch`, which are comma separated.

    Raises:
      ValueError: no name begins with one of them.
    """
    names, moved = list(names), set()
    for pattern in filter(None, only.split(",")):
        found = fnmatch.filter(names, pattern + "*")
        if not found:
            raise ValueError(f"--only: no constant's name begins with {pattern!r}")
        moved.update(found)
    return [name for name in names if name not in moved]


def default_model(family: Family) -> Constants:
    return {name: float(value) for name, _, value in (line.partition(",") for line in family.model().split())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("family", choices=("grouped", "attention"))
    parser.add_argument("measurements", type=Path, nargs="+", help="files of `bench.suites regret --measurements`")
    parser.add_argument("--hold-out", type=int, default=4, help="every n-th problem is held out; 0: none")
    parser.add_argument("--searches", type=int, default=FitOptions.searches, help="rounds of the random search; 0: least squares alone")
    parser.add_argument("--frozen", default="", help="constants that stay as they are, comma separated")
    parser.add_argument(
        "--only", default="", help="beginnings of the names of the constants that are fitted, as 'scaled_,stage_*x'; default: all"
    )
    parser.add_argument("--device", type=int, default=H200, help="index of the CUDA device of the measurements; -1: the H200 as measured")
    parser.add_argument("--worst", type=int, default=5, help="problems to list, of most regret after the fit")
    args = parser.parse_args(argv)
    import minfer  # noqa: F401  registers the operators

    family = families()[args.family]
    try:
        problems = read(args.measurements, family)
        start = default_model(family)
        frozen = [name for name in args.frozen.split(",") if name] + (frozen_but(args.only, start) if args.only else [])
    except (OSError, ValueError, KeyError) as error:
        parser.exit(2, f"bench.fit_plans: {error}\n")
    held = problems[:: args.hold_out] if args.hold_out > 1 else []
    data = Data(family, [p for p in problems if not any(p is q for q in held)], args.device)
    out = Data(family, held, args.device) if held else None
    say = lambda text: print(text, file=sys.stderr)  # noqa: E731
    fit = Fit(data, start, FitOptions(searches=args.searches), frozen)

    def report(what: str, model: Constants) -> None:
        print(f"{what}: fitted to: {quality(model, data)}" + (f"\n{' ' * len(what)}  held out: {quality(model, out)}" if out else ""))

    report("today", start)
    theta = fit.least_squares(say)
    report("least squares", fit.model(theta))
    if args.searches > 0:
        theta = fit.search(theta, say)
        report("search", fit.model(theta))
    model = fit.model(theta)
    print("\n" + "\n".join(f"{name:24s} {start[name]:12.6g} {value:12.5g}" for name, value in model.items() if value != start[name]))
    of_problem = regrets(data.picked([model]), data)[0].nan_to_num(0.0)
    for i in of_problem.argsort(descending=True)[: args.worst].tolist():
        found = {name: value for name, value in data.problems[i].items() if name not in ("plans", "pick", "own", "op")}
        print(f"{of_problem[i].item():.1%} {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
