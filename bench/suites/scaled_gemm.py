"""FP8 and INT8 products against cuBLASLt (torch's scaled_mm), DeepGEMM, vLLM, FBGEMM and torch._int_mm, in every mode of scales.

`python -m bench.suites scaled_gemm --suite fp8_large,fp8_middle,fp8_small,fp8_random --out bench/results/<device>/fp8.json`, and the
suites of int8 into int8.json. A run may be divided: `--part 1/4` to `--part 4/4` into the same file. The layers are those of published
models; the random problems are those of :func:`minfer.measure.random_problems.scaled`.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from minfer.measure import random_problems
from minfer.planning.plan import DTYPE_NAMES, NARROW_NAMES, ScaledProblem

from bench.suites import contest, drawn

FP8 = torch.float8_e4m3fn
# n, k of the weights of a layer, all on one GPU.
LAYERS = {
    "deepseek-v3": ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "qwen3-8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
}
HEADLINES = ((4096, 7168, 16384), (4096, 4096, 7168), (8192, 8192, 8192))  # m, n, k
SMALL = ((24576, 7168), (7168, 16384), (51200, 5120), (4096, 4096))
SUITES = ("fp8_large", "fp8_middle", "fp8_small", "fp8_random", "int8_large", "int8_middle", "int8_small", "int8_random")
RANDOM = {"fp8_random": 200, "int8_random": 100}
PEERS = "cublaslt,cublaslt_fast,int_mm,deepgemm,vllm,fbgemm"
ERRORS_OF_SUMS = 2.0e-3  # relative, that a peer's sums may add to the rounding of D: those of fast accumulation do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default="fp8_large,fp8_middle,fp8_small,fp8_random", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/fp8.json or int8.json")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--modes", default="tensor,row,block", help="scales of one number, of rows, of blocks: which problems are measured")
    parser.add_argument("--rounds", type=int, default=9, help="timed replays of each contestant")
    parser.add_argument("--graph-us", type=float, default=500.0, help="work in one replay")
    drawn.add_arguments(parser)


Cell = tuple[ScaledProblem, str]


def _problem(m: int, n: int, k: int, dtype: torch.dtype, mode: str) -> Cell:
    return ScaledProblem(m, n, k, dtype=dtype, block_scaled=mode == "block"), mode


@functools.cache
def cells_of(suite: str) -> tuple[Cell, ...]:
    """The problems of a suite that is no random one, and their modes of scales.

    Raises:
      ValueError: there is no such suite.
    """
    kind, _, size = suite.partition("_")
    dtype, modes = (FP8, ("block", "row", "tensor")) if kind == "fp8" else (torch.int8, ("row",))
    layers = [layer for model in LAYERS.values() for layer in model]
    if size == "large":
        shapes = [*HEADLINES, *((m, n, k) for n, k in layers for m in (1024, 4096, 8192))]
    elif size == "middle":
        shapes = [(m, n, k) for n, k in layers for m in (64, 128, 256, 512)]
    elif size == "small":
        shapes = [(m, n, k) for n, k in SMALL for m in (1, 4, 16, 32, 64)]
    else:
        raise ValueError(f"--suite must be of {', '.join(SUITES)}, got {suite!r}")
    return tuple(_problem(*shape, dtype, mode) for shape in dict.fromkeys(shapes) for mode in modes)


def cell_of(seed: int, suite: str, index: int) -> Cell:
    if suite not in RANDOM:
        return cells_of(suite)[index]
    return random_problems.scaled(seed, index, FP8 if suite.startswith("fp8") else torch.int8)


def counts_of(args: argparse.Namespace) -> dict[str, int]:
    """Suite -> its number of problems.

    Raises:
      ValueError: there is no such suite.
    """
    counts = {name: RANDOM[name] if name in RANDOM else len(cells_of(name)) for name in args.suite.split(",")}
    return {name: min(count, args.limit or count) for name, count in counts.items()}


def describe(seed: int, suite: str, index: int) -> dict[str, Any]:
    """op, shape and dtype of a problem's rows."""
    problem, mode = cell_of(seed, suite, index)
    shape = {"m": problem.m, "n": problem.n, "k": problem.k, "scales": mode}
    return {"op": f"gemm_{'int8' if problem.dtype == torch.int8 else 'fp8'}", "shape": shape, "dtype": NARROW_NAMES[problem.dtype]}


class Run(contest.Inviter):
    """One process's worth of problems."""

    def __call__(self, suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        problem, mode = cell_of(self.args.seed, suite, index)
        try:
            return self.cell(problem, mode, {"suite": suite, **describe(self.args.seed, suite, index)})
        finally:
            contest.free()

    def cell(self, problem: ScaledProblem, mode: str, described: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        from minfer.measure import benchmarking
        from minfer.planning.plan import plan_problem

        from bench.peers import scaled_gemm as peers

        o = peers.Operands.draw(problem, mode)
        truth = o.truth()
        limit = 2 * benchmarking.relative_error(truth.bfloat16(), truth) + 2.0**-12
        own = {contest.OURS: peers.ours(o)}
        if problem.dtype == FP8 and mode != "block":
            own["ours:fast/fast"] = peers.ours(o, fast=True)

        def error_of(variant: Any) -> float:
            o.d[0].fill_(float("nan"))
            out = variant.fn(0)
            torch.cuda.synchronize()
            out = o.d[0] if variant.into_d else out
            if out.dtype == torch.int32:
                out = out.double() * o.a_scale.double().view(-1, 1) * o.w_scale.double()
            return benchmarking.relative_error(out, truth)

        most = lambda key: limit if key == contest.OURS else limit + ERRORS_OF_SUMS  # noqa: E731
        held = contest.hold(self.invite(own, self.peers, peers, o, mode), error_of, most, o.sets, self.args)
        plan = plan_problem(problem)
        rows = held.rows(described, kernel=plan.kernel, floor_us=plan.floor_us, launch=plan.launch, source=plan.source)
        text = f"{described['suite']} {problem.m}x{problem.n}x{problem.k} {mode} {DTYPE_NAMES[problem.out_dtype]}"
        times = f"{held.mine.us:.2f} us, {plan.floor_us / held.mine.us:.0%} of the floor"
        return rows, f"{text}: {times}; {contest.summary(rows)}  [{plan.override}]"


def main(args: argparse.Namespace) -> int:
    counts, modes = counts_of(args), args.modes.split(",")
    if args.dry_run:
        for suite, count in counts.items():
            for index in drawn.part_of(args.part, count):
                problem, mode = cell_of(args.seed, suite, index)
                if mode in modes:
                    print(suite, index, problem, f"({mode})")
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the problems")
        return 2
    from minfer.measure import benchmarking

    facts = benchmarking.run_facts() | ({"commit": args.commit} if args.commit else {})
    results = drawn.DrawnResults(args.out, facts, args.seed, counts)
    chosen = lambda suite, index: cell_of(args.seed, suite, index)[1] in modes  # noqa: E731
    return drawn.run(results, args, Run(args), lambda suite, index: describe(args.seed, suite, index), chosen=chosen)
