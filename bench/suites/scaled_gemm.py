"""FP8 and INT8 products against cuBLASLt (torch's scaled_mm), DeepGEMM, vLLM, FBGEMM and torch._int_mm, in every mode of scales.

`python -m bench.suites scaled_gemm --suite fp8_large,fp8_middle,fp8_small,fp8_random --out bench/results/<device>/fp8.json`, and the
suites of int8 into int8.json. A run may be divided: `--part 1/4` to `--part 4/4` into the same file. The layers are those of published
models; the random problems are those of :func:`minfer.measure.random_problems.scaled`.
"""

from __future__ import annotations

import argparse
import functools
import gc
from pathlib import Path
from typing import Any

import torch
from minfer.measure import random_problems
from minfer.planning.plan import DTYPE_NAMES, NARROW_NAMES, ScaledProblem

from bench.suites import drawn

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


class Run:
    """One process's worth of problems."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.peers = [peer for peer in args.peers.split(",") if peer]
        self.said: set[str] = set()

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            print(text, flush=True)

    def __call__(self, suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        problem, mode = cell_of(self.args.seed, suite, index)
        try:
            return self.cell(suite, problem, mode, describe(self.args.seed, suite, index))
        finally:
            gc.collect()  # graphs and their memory pools go before the next problem's operands come
            torch.cuda.empty_cache()

    def contestants(self, o) -> dict[str, Any]:
        """ "ours/.." and "peer/variant" -> the variant."""
        from bench.peers import scaled_gemm as peers

        found = {"ours/default": peers.ours(o)}
        if o.problem.dtype == FP8 and o.mode != "block":
            found["ours:fast/fast"] = peers.ours(o, fast=True)
        for name in self.peers:
            try:
                found |= {f"{name}/{variant.name}": variant for variant in peers.PEERS[name](o)}
            except peers.Unavailable as why:
                self.say_once(f"{name} is left out of {o.mode}: {str(why)[-300:]}")
        return found

    def cell(self, suite: str, problem: ScaledProblem, mode: str, described: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        from minfer.measure import benchmarking
        from minfer.planning.plan import plan_problem

        from bench import harness
        from bench.peers import scaled_gemm as peers

        o = peers.Operands.draw(problem, mode)
        truth = o.truth()
        limit = 2 * benchmarking.relative_error(truth.bfloat16(), truth) + 2.0**-12
        errors, failed, fns = {}, {}, {}
        for key, variant in self.contestants(o).items():
            o.d[0].fill_(float("nan"))
            try:
                out = variant.fn(0)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  a peer's library may raise anything; a lost context raises again at once
                if key.startswith("ours"):
                    raise
                harness.forget_error()
                failed[key] = f"{type(error).__name__}: {error}"
                continue
            out = o.d[0] if variant.into_d else out
            if out.dtype == torch.int32:
                out = out.double() * o.a_scale.double().view(-1, 1) * o.w_scale.double()
            errors[key] = benchmarking.relative_error(out, truth)
            most = limit if key == "ours/default" else limit + ERRORS_OF_SUMS
            if errors[key] <= most:
                fns[key] = variant.fn
            elif key.startswith("ours"):
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
        text = f"{suite} {problem.m}x{problem.n}x{problem.k} {mode} {DTYPE_NAMES[problem.out_dtype]}"
        return rows, f"{text}: {mine.us:.2f} us, {plan.floor_us / mine.us:.0%} of the floor; {ratios}  [{plan.override}]"


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
