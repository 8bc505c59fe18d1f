"""Products of 8-bit activations and int4 weights: our own with 16-bit activations, e4m3 weights, vLLM's and FBGEMM's kernels beside them.

`python -m bench.suites w4a8 --out bench/results/<device>/w4a8.json`; a run may be divided, as of scaled_gemm. The layers are those of the
W4A16 suites; the random problems are those of :func:`minfer.measure.random_problems.w4a8`.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from minfer.measure import random_problems, shapes
from minfer.planning.plan import NARROW_NAMES, W4A8Problem

from bench.suites import contest, drawn

FP8 = torch.float8_e4m3fn
MS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TYPES = {"w4a8_fp8": FP8, "w4a8_int8": torch.int8, "w4a8_fp8_random": FP8, "w4a8_int8_random": torch.int8}
RANDOM = {"w4a8_fp8_random": 60, "w4a8_int8_random": 30}
PEERS = "ours:w4a16,ours:fp8,cublaslt,vllm,fbgemm"
ROUNDING = 0.03  # relative, that a peer's operands may be rounded by: e4m3 weights, 16-bit activations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(TYPES), help=f"of {', '.join(TYPES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/w4a8.json")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--rounds", type=int, default=9, help="timed replays of each contestant")
    parser.add_argument("--graph-us", type=float, default=500.0, help="work in one replay")
    drawn.add_arguments(parser)


@functools.cache
def cells_of(suite: str) -> tuple[W4A8Problem, ...]:
    layers = (*shapes.LLAMA_8B, *shapes.LLAMA_70B)
    return tuple(W4A8Problem(m, n, k, dtype=TYPES[suite]) for n, k in dict.fromkeys(layers) for m in MS)


def cell_of(seed: int, suite: str, index: int) -> W4A8Problem:
    return random_problems.w4a8(seed, index, TYPES[suite]) if suite in RANDOM else cells_of(suite)[index]


def counts_of(args: argparse.Namespace) -> dict[str, int]:
    """Suite -> its number of problems.

    Raises:
      ValueError: there is no such suite.
    """
    names = args.suite.split(",")
    for name in names:
        if name not in TYPES:
            raise ValueError(f"--suite must be of {', '.join(TYPES)}, got {name!r}")
    counts = {name: RANDOM[name] if name in RANDOM else len(cells_of(name)) for name in names}
    return {name: min(count, args.limit or count) for name, count in counts.items()}


def describe(seed: int, suite: str, index: int) -> dict[str, Any]:
    """op, shape and dtype of a problem's rows."""
    problem = cell_of(seed, suite, index)
    return {
        "op": "w4a8_gemm",
        "shape": {"m": problem.m, "n": problem.n, "k": problem.k, "group": 128},
        "dtype": NARROW_NAMES[problem.dtype],
    }


class Run(contest.Inviter):
    """One process's worth of problems."""

    def __call__(self, suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        try:
            return self.cell(cell_of(self.args.seed, suite, index), {"suite": suite, **describe(self.args.seed, suite, index)})
        finally:
            contest.free()

    def cell(self, problem: W4A8Problem, described: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        from minfer.measure import benchmarking
        from minfer.planning.plan import plan_problem

        from bench.peers import w4a8 as peers

        o = peers.Operands.draw(problem)
        truth = o.truth()
        limit = 2 * benchmarking.relative_error(truth.bfloat16(), truth) + 2.0**-12

        def error_of(variant: Any) -> float:
            o.d[0].fill_(float("nan"))
            out = variant.fn(0)
            torch.cuda.synchronize()
            return benchmarking.relative_error(o.d[0] if variant.into_d else out, truth)

        most = lambda key: limit + (ROUNDING if key.partition("/")[0] in peers.ROUNDED else 0.0)  # noqa: E731
        variants = self.invite({contest.OURS: peers.ours(o)}, self.peers, peers, o, problem.dtype)
        held, plan = contest.hold(variants, error_of, most, o.sets, self.args), plan_problem(problem)
        rows = held.rows(described, kernel=plan.kernel, floor_us=plan.floor_us, launch=plan.launch, source=plan.source)
        times = f"{held.mine.us:.2f} us, {plan.floor_us / held.mine.us:.0%} of the floor"
        return rows, f"{described['suite']} {problem.m}x{problem.n}x{problem.k}: {times}; {contest.summary(rows)}  [{plan.override}]"


def main(args: argparse.Namespace) -> int:
    counts = counts_of(args)
    if args.dry_run:
        for suite, count in counts.items():
            for index in drawn.part_of(args.part, count):
                print(suite, index, cell_of(args.seed, suite, index))
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the problems")
        return 2
    from minfer.measure import benchmarking

    facts = benchmarking.run_facts() | ({"commit": args.commit} if args.commit else {})
    results = drawn.DrawnResults(args.out, facts, args.seed, counts)
    return drawn.run(results, args, Run(args), lambda suite, index: describe(args.seed, suite, index))
