"""Random problems that no table holds: dense GEMM of every layout, aligned and not, and GEMM with 4-bit weights, against the peers.

`python -m bench.suites random --suite random,random_unaligned,random_w4a16 --out bench/results/<device>/random.json`; a run may be
divided: `--part 1/4` to `--part 4/4` into the same file. The problems are those of :mod:`minfer.measure.random_problems`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from minfer.measure import random_problems
from minfer.planning.plan import DTYPE_NAMES, Problem, W4Problem

from bench.suites import drawn

COUNTS = {"random": 300, "random_unaligned": 150, "random_w4a16": 200}
GENERATORS: dict[str, Callable[[int, int], Problem | W4Problem]] = {
    "random": random_problems.aligned,
    "random_unaligned": random_problems.unaligned,
    "random_w4a16": random_problems.w4a16,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(COUNTS), help=f"of {', '.join(COUNTS)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/random.json")
    parser.add_argument("--peers", default="cublas,cublaslt_best", help="of dense problems")
    parser.add_argument("--w4-peers", default="cublas,marlin,machete", help="of problems with 4-bit weights")
    parser.add_argument("--rounds", type=int, default=11, help="timed replays of each contestant")
    parser.add_argument("--graph-us", type=float, default=600.0, help="work in one replay")
    drawn.add_arguments(parser)


def counts_of(args: argparse.Namespace) -> dict[str, int]:
    """Suite -> its number of problems.

    Raises:
      ValueError: there is no such suite.
    """
    names = args.suite.split(",")
    for name in names:
        if name not in COUNTS:
            raise ValueError(f"--suite must be of {', '.join(COUNTS)}, got {name!r}")
    return {name: min(COUNTS[name], args.limit or COUNTS[name]) for name in names}


def describe(seed: int, suite: str, index: int) -> dict[str, Any]:
    """op, shape and dtype of a problem's rows."""
    problem = GENERATORS[suite](seed, index)
    shape: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k}
    shape |= {"group": problem.group_size} if isinstance(problem, W4Problem) else {"layout": problem.layout, "c": problem.c}
    return {"op": problem.op, "shape": shape, "dtype": DTYPE_NAMES[problem.dtype]}


class Run:
    """One process's worth of problems."""

    def __init__(self, args: argparse.Namespace, counts: dict[str, int]):
        from bench.suites import w4a16

        self.args = args
        self.peers = [peer for peer in args.peers.split(",") if peer]
        self.w4_peers = w4a16.available_peers(args.w4_peers) if "random_w4a16" in counts else []

    def __call__(self, suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        problem = GENERATORS[suite](self.args.seed, index)
        try:
            if isinstance(problem, W4Problem):
                return self.quantised(suite, problem)
            return self.dense(suite, problem, describe(self.args.seed, suite, index))
        finally:
            gc.collect()  # graphs and their memory pools go before the next problem's operands come
            torch.cuda.empty_cache()

    def dense(self, suite: str, problem: Problem, described: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        from minfer.measure import benchmarking
        from minfer.measure.workloads import BETA, GemmWorkload
        from minfer.planning.plan import plan_problem

        from bench import harness
        from bench.peers.cublaslt import CublasLtBest

        work = GemmWorkload(problem)
        first = work.operands()
        sets = [first, *(work.operands() for _ in range(harness.sets_for(benchmarking.bytes_of(first)) - 1))]
        ours, (torch_fn, _) = work.launcher(), work.torch_contestant(sets)
        fns: dict[str, Callable[[int], Any]] = {"ours": lambda i: ours(sets[i])}
        failed: dict[str, str] = {}
        if "cublas" in self.peers:
            fns["cublas"] = lambda i: torch_fn(sets[i])
        if "cublaslt_best" in self.peers:
            try:
                a, b, c, d = ([x[name] for x in sets] for name in "abcd")
                fns["cublaslt_best"] = CublasLtBest(a, b, d, c=c if problem.c else None, beta=BETA if problem.c else 0.0)
            except (OSError, RuntimeError) as error:
                failed["cublaslt_best"] = str(error)

        wide = {name: first[name].double() for name in ("a", "b")}
        truth = wide["a"] @ wide["b"]
        if problem.c:
            truth += BETA * first["c"].double()
        del wide
        errors = {}
        for name, fn in fns.items():
            first["d"].fill_(float("nan"))
            try:
                fn(0)
            except RuntimeError as error:
                torch.cuda.synchronize()  # raises again where the context is lost
                if name == "ours":
                    raise
                failed[name] = str(error)
                continue
            errors[name] = benchmarking.relative_error(first["d"], truth)
        torch_fn(first)
        limit = 2 * benchmarking.relative_error(first["d"], truth) + benchmarking.rounding_unit(problem.dtype)
        del truth
        if errors["ours"] > limit:
            raise ArithmeticError(f"relative error {errors['ours']:.3g}, at most {limit:.3g}")
        failed |= {name: f"relative error {error:.3g}, at most {limit:.3g}" for name, error in errors.items() if error > limit}
        fns = {name: fn for name, fn in fns.items() if name not in failed}

        timings, not_captured = harness.measure(fns, len(sets), rounds=self.args.rounds, graph_us=self.args.graph_us)
        failed |= not_captured
        if "ours" not in timings:
            raise RuntimeError(failed["ours"])
        plan, mine = plan_problem(problem), timings["ours"]
        rows = []
        for name, timing in timings.items():
            if name == "ours":
                continue
            row = benchmarking.result_row(
                suite=suite, kernel=plan.kernel, timing=mine, peer=name, peer_us=timing.us, floor_us=plan.floor_us,
                rel_err=errors["ours"], **described,
            )  # fmt: skip
            rows.append(row | {"launch": plan.launch, "source": plan.source, "peer_rel_err": float(f"{errors[name]:.3e}")})
        rows += [{"suite": suite, **described, "peer": name, "error": why[:300]} for name, why in failed.items()]
        ratios = ", ".join(f"{row['peer']} {row['ratio']:.3f}" for row in rows if "ratio" in row)
        return rows, f"{suite} {problem}: {mine.us:.2f} us, {plan.floor_us / mine.us:.0%} of the floor; {ratios}  [{plan.override}]"

    def quantised(self, suite: str, problem: W4Problem) -> tuple[list[dict[str, Any]], str]:
        from bench.suites import w4a16

        class Rows(list):
            add = list.append

        cell = dict(suite=suite, m=problem.m, n=problem.n, k=problem.k, variant="")
        layer, rows = w4a16.Layer(problem.n, problem.k, problem.dtype), Rows()
        w4a16.contestants(cell, layer, torch.randn(problem.m, problem.k, device="cuda").to(problem.dtype), self.w4_peers)  # packs
        w4a16.warm_up(0.1)
        line = w4a16.measure_cell(cell, layer, self.args, rows, {"peers": self.w4_peers})
        return list(rows), line


def main(args: argparse.Namespace) -> int:
    counts = counts_of(args)
    if args.dry_run:
        for suite, count in counts.items():
            for index in drawn.part_of(args.part, count):
                print(suite, index, GENERATORS[suite](args.seed, index))
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the problems")
        return 2
    from minfer.measure import benchmarking

    facts = benchmarking.run_facts() | ({"commit": args.commit} if args.commit else {})
    results = drawn.DrawnResults(args.out, facts, args.seed, counts)
    return drawn.run(results, args, Run(args, counts), lambda suite, index: describe(args.seed, suite, index))
