"""Products of 8-bit activations and int4 weights: our own with 16-bit activations, e4m3 weights, vLLM's and FBGEMM's kernels beside them.

`python -m bench.suites w4a8 --out bench/results/<device>/w4a8.json`; a run may be divided, as of scaled_gemm. The layers are those of the
W4A16 suites; the random problems are those of :func:`minfer.measure.random_problems.w4a8`.
"""

from __future__ import annotations

import argparse
import functools
import gc
from pathlib import Path
from typing import Any

import torch
from minfer.measure import random_problems, shapes
from minfer.planning.plan import NARROW_NAMES, W4A8Problem

from bench.suites import drawn

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


class Run:
    """One process's worth of problems."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.peers = [peer for peer in args.peers.split(",") if peer]
        self.said: set[str] = set()

    def __call__(self, suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        try:
            return self.cell(suite, cell_of(self.args.seed, suite, index), describe(self.args.seed, suite, index))
        finally:
            gc.collect()  # graphs and their memory pools go before the next problem's operands come
            torch.cuda.empty_cache()

    def contestants(self, o) -> dict[str, Any]:
        from bench.peers import w4a8 as peers

        found = {"ours/default": peers.ours(o)}
        for name in self.peers:
            try:
                found |= {f"{name}/{variant.name}": variant for variant in peers.PEERS[name](o)}
            except peers.Unavailable as why:
                if f"{name}{o.problem.dtype}" not in self.said:
                    self.said.add(f"{name}{o.problem.dtype}")
                    print(f"{name} is left out of {o.problem.dtype}: {str(why)[-300:]}", flush=True)
        return found

    def cell(self, suite: str, problem: W4A8Problem, described: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        from minfer.measure import benchmarking
        from minfer.planning.plan import plan_problem

        from bench import harness
        from bench.peers import w4a8 as peers

        o = peers.Operands.draw(problem)
        truth = o.truth()
        limit = 2 * benchmarking.relative_error(truth.bfloat16(), truth) + 2.0**-12
        errors, failed, fns = {}, {}, {}
        for key, variant in self.contestants(o).items():
            name = key.partition("/")[0]
            o.d[0].fill_(float("nan"))
            try:
                out = variant.fn(0)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  a peer's library may raise anything; a lost context raises again at once
                if name == "ours":
                    raise
                harness.forget_error()
                failed[key] = f"{type(error).__name__}: {error}"
                continue
            errors[key] = benchmarking.relative_error(o.d[0] if variant.into_d else out, truth)
            most = limit + (ROUNDING if name in peers.ROUNDED else 0.0)
            if errors[key] <= most:
                fns[key] = variant.fn
            elif name == "ours":
                raise ArithmeticError(f"{key}: relative error {errors[key]:.3g}, at most {most:.3g}")
            else:
                failed[key] = f"relative error {errors[key]:.3g}, at most {most:.3g}"
        del truth

        timings, not_captured = harness.measure(fns, o.sets, rounds=self.args.rounds, graph_us=self.args.graph_us)
        failed |= not_captured
        if "ours/default" not in timings:
            raise RuntimeError(failed["ours/default"])
        plan, mine = plan_problem(problem), timings["ours/default"]
        rows, beside = [], {"launch": plan.launch, "source": plan.source}
        for name in dict.fromkeys(key.partition("/")[0] for key in (*timings, *failed)):
            keys = [key for key in timings if key.partition("/")[0] == name]
            if name == "ours":
                continue
            if not keys:
                why = next(text for key, text in failed.items() if key.partition("/")[0] == name)
                rows.append({"suite": suite, **described, "peer": name, "error": why[:300]})
                continue
            key = min(keys, key=lambda key: timings[key].us)
            row = benchmarking.result_row(
                suite=suite, kernel=plan.kernel, timing=mine, peer=name, peer_us=timings[key].us, floor_us=plan.floor_us,
                rel_err=errors["ours/default"], **described,
            )  # fmt: skip
            rows.append(row | beside | {"peer_variant": key.partition("/")[2], "peer_rel_err": float(f"{errors[key]:.3e}")})
        ratios = ", ".join(f"{row['peer']} {row['ratio']:.3f}" for row in rows if "ratio" in row)
        wrong = "; ".join(f"{row['peer']}: {row['error'][:80]}" for row in rows if "error" in row)
        text = f"{suite} {problem.m}x{problem.n}x{problem.k}: {mine.us:.2f} us, {plan.floor_us / mine.us:.0%} of the floor"
        return rows, f"{text}; {ratios}  [{plan.override}] {wrong}"


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
