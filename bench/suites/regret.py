"""The plan's regret: on random problems, the analytic plan's time over the best of all candidates near the prediction.

`python -m bench.suites regret --out bench/results/<device>/regret.json --measurements measured.jsonl`; the measurements are what
`minfer tune --device --from-measurements` fits the cost model to. Tuned rows take no part. `--suite regret_grouped`,
`--suite regret_grouped_scaled` (of 8-bit operands) and `--suite regret_attention` time all kernels of grouped GEMM and of attention; their
measurements go to a file of their own.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from minfer.measure import random_problems
from minfer.planning import calibrate
from minfer.planning.plan import (
    DTYPE_NAMES,
    W4Problem,
    enumerate_plans,
    plan_problem,
)

from bench.suites import drawn, regret_attention, regret_grouped

GEMMS = {"regret": 200, "regret_unaligned": 100, "regret_w4a16": 200}
COUNTS = GEMMS | {"regret_grouped": 150, "regret_grouped_scaled": 150, "regret_attention": 150}
GENERATORS: dict[str, Callable[[int, int], Any]] = {
    "regret": random_problems.aligned,
    "regret_unaligned": random_problems.unaligned,
    "regret_w4a16": random_problems.w4a16,
    "regret_grouped": random_problems.grouped,
    "regret_grouped_scaled": random_problems.grouped_scaled,
    "regret_attention": random_problems.attention,
}
MOST_RESERVED = 48 << 30  # bytes; above it, memory of graphs and outputs that are gone is given back


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(GEMMS), help=f"of {', '.join(COUNTS)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/regret.json")
    parser.add_argument("--measurements", type=Path, help="file that all times are appended to, a problem a line")
    parser.add_argument("--near", type=float, default=calibrate.NEAR, help="dense: candidates predicted within so many times the best")
    parser.add_argument("--most", type=int, default=70, help="dense: candidates of a problem")
    drawn.add_arguments(parser)
    parser.set_defaults(seed=1000)  # not the seed of the tables' measurements


def problem_of(seed: int, suite: str, index: int) -> Any:
    return GENERATORS[suite](seed, index)


def describe(problem: Any) -> dict[str, Any]:
    """op, shape and dtype of a problem's row."""
    if isinstance(problem, random_problems.GroupedProblem):
        return regret_grouped.describe(problem)
    if isinstance(problem, random_problems.AttentionProblem):
        return regret_attention.describe(problem)
    shape: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k}
    shape |= {"group": problem.group_size} if isinstance(problem, W4Problem) else {"layout": problem.layout, "c": problem.c}
    return {"op": problem.op, "shape": shape, "dtype": DTYPE_NAMES[problem.dtype]}


def row_of(suite: str, measured: calibrate.Measured, kernel: str, launch: str, floor_us: float) -> dict[str, Any]:
    """Like a comparison with our own best candidate, which the pick may be: ratio = best / pick, so regret = 1 / ratio - 1."""
    best = min(measured.candidates, key=lambda c: c.us)
    best_us, best_plan = min((measured.own_us, f"{kernel}@{launch}"), (best.us, best.override))
    return {
        "suite": suite, **describe(measured.problem), "kernel": kernel, "launch": launch, "us": measured.own_us, "peer": "ours:best",
        "peer_us": best_us, "ratio": round(best_us / measured.own_us, 4), "regret": round(measured.own_us / best_us - 1, 4),
        "best": best_plan, "candidates": len(measured.candidates), "floor_us": round(floor_us, 3),
        "fraction": round(floor_us / measured.own_us, 4),
    }  # fmt: skip


def main(args: argparse.Namespace) -> int:
    names = args.suite.split(",")
    for name in names:
        if name not in COUNTS:
            raise ValueError(f"--suite must be of {', '.join(COUNTS)}, got {name!r}")
    counts = {name: min(COUNTS[name], args.limit) if args.limit else COUNTS[name] for name in names}
    if args.dry_run:
        for suite, count in counts.items():
            for index in drawn.part_of(args.part, count):
                print(suite, index, problem_of(args.seed, suite, index))
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the problems")
        return 2
    from minfer.measure import benchmarking

    os.environ["MINFER_TUNED"] = "0"  # read when the first plan is made: the operator runs the analytic one

    def keep(line: str) -> None:
        if args.measurements is not None:
            args.measurements.parent.mkdir(parents=True, exist_ok=True)
            with args.measurements.open("a") as file:
                file.write(line + "\n")

    def of_few_kernels(suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        family = regret_attention if suite == "regret_attention" else regret_grouped
        try:
            rows, line, measured = family.measure(suite, problem_of(args.seed, suite, index), args.seed, index)
        except Exception:
            gc.collect()  # the error's frames hold operands and graphs
            raise
        finally:
            if torch.cuda.memory_reserved() > MOST_RESERVED:
                torch.cuda.empty_cache()
        keep(measured)
        return rows, line

    def measure(suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        if suite not in GEMMS:
            return of_few_kernels(suite, index)
        problem = problem_of(args.seed, suite, index)
        plan = plan_problem(problem, use_tuned=False)
        measured = calibrate.measure(problem, calibrate.choose(enumerate_plans(problem), args.near, args.most), own=True)
        if not measured.candidates:
            raise RuntimeError("no candidate could be timed")
        keep(measured.line())
        row = row_of(suite, measured, plan.kernel, plan.launch, plan.floor_us)
        return [row], f"{suite} {problem}: {row['us']:.2f} us, regret {row['regret']:.1%} of {row['candidates']} [{plan.override}]"

    facts = benchmarking.run_facts() | ({"commit": args.commit} if args.commit else {})
    facts["protocol"] = "CUDA-graph replays, inputs rotated through > 3x L2, candidates in turn, least of a few brief replays"
    results = drawn.DrawnResults(args.out, facts, args.seed, counts)
    return drawn.run(results, args, measure, lambda suite, index: describe(problem_of(args.seed, suite, index)))
