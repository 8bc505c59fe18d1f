"""Plans of the products of a model's layers, timed in place: in CUDA graphs of whole decode steps, where each launch begins under the end
of the one in front of it. The factors of `factor_in_place` in cpp/src/gemm/plan.cpp come from it.

    python -m bench.plans_in_place --models llama-3.1-8b,qwen2.5-7b --formats w4a16,fp8 --batch 1,16 --out in_place.json

For each product (qkv, output, gate and up, down), one after the other, all layers take one candidate after the other, the others their
plans. What is shown is by how much a layer becomes shorter than with all plans; "least predicted" is the candidate that would be planned
if launches were by themselves. Weights are random; formats are those of `bench.suites e2e` with 4-bit or 8-bit weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from minfer.generation import engine_of
from minfer.generation.engine import PAGE_SIZE
from minfer.generation.params import SamplingParams
from minfer.generation.runner import Chunk
from minfer.integrations.decoder.projection import Projection
from minfer.integrations.transformers import optimize
from minfer.measure import models
from minfer.planning.plan import Plan, ScaledProblem, W4Problem, enumerate_plans, plan_problem

from bench.suites.e2e import FORMATS

WEIGHTS = ("w4a16", "fp8", "fp8-rows", "int8")
ROUNDS, REPLAYS = 5, 8


class _Named:
    """A weight of 8 bits whose products are by a kernel of the caller's."""

    def __init__(self, weight: Any, kernel: str):
        self._weight, self._kernel = weight, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)

    def gemm(self, x: Any, **arguments: Any) -> torch.Tensor:
        return self._weight.gemm(x, kernel=self._kernel, **arguments)


def name_kernel(projection: Projection, kernel: str | None) -> None:
    """The projection's products are by this kernel from now on; None: by their plans."""
    for name in ("_arguments", "_weight"):
        projection.__dict__.pop(name, None)
    if kernel is None:
        return
    if hasattr(projection, "_arguments"):
        own = projection._arguments
        projection.__dict__["_arguments"] = lambda: own() | {"kernel": kernel}
    else:
        weight = projection._weight
        projection.__dict__["_weight"] = lambda: _Named(weight(), kernel)


def problem_of(form: str, rows: int, projection: Projection, has_c: bool) -> W4Problem | ScaledProblem:
    sizes = dict(m=rows, n=projection.out_features * (2 if projection.gated else 1), k=projection.in_features, gated=projection.gated)
    if form == "w4a16":
        return W4Problem(**sizes, c=has_c)
    dtype = torch.int8 if form == "int8" else torch.float8_e4m3fn
    return ScaledProblem(**sizes, c=has_c, dtype=dtype, block_scaled=form == "fp8")


def candidates(problem: W4Problem | ScaledProblem, most: int, invariant: bool) -> list[Plan]:
    """The best predicted, one of each kernel, decomposition, number of splits and width."""
    found: dict[tuple, Plan] = {}
    for plan in enumerate_plans(problem, batch_invariant=invariant):
        if plan.compiled:
            found.setdefault((plan.kernel, plan.decomposition, plan.splits, plan.columns), plan)
    return list(found.values())[:most]


def described(plan: Plan) -> str:
    return f"{plan.kernel} {plan.decomposition} {plan.splits}"


class Steps:
    """Decode steps of an engine, as they are with the kernels that its projections name at the time."""

    def __init__(self, engine: Any, rows: int, context: int):
        self._runner, self._rows, self._context = engine.runner, rows, context
        self._params = SamplingParams(max_new_tokens=64, temperature=0.0)
        self._pages = [engine.pool.allocate(-(-(context + 64) // PAGE_SIZE)) for _ in range(rows)]
        for row in range(rows):
            self._runner.begin(row, self._params, row, [0], [])

    def us(self) -> float:
        """Of a step: replays of the graph that is captured anew."""
        runner = self._runner
        runner._captured.clear()
        for _ in range(2):
            chunks = [Chunk(row, None, self._context, self._pages[row], True, 1) for row in range(self._rows)]
            runner.run(chunks, [self._params] * self._rows).wait()
        graph = next(iter(runner._captured.values())).graph
        begin, end, times = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
        for _ in range(ROUNDS):
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000.0 / REPLAYS)
        return statistics.median(times)


@torch.inference_mode()
def measure(model: str, form: str, rows: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    handle = optimize(models.random_model(model, num_hidden_layers=args.layers), restorable=False, weights=FORMATS[form].weights)
    engine = engine_of(handle, max_rows=rows, max_length=args.context + 128, batch_invariant=args.batch_invariant)
    models.fill_cache(engine)
    steps, layers = Steps(engine, rows, args.context), engine.model.layers
    planned = min(steps.us() for _ in range(2))
    print(f"{model} {form}, {rows} rows, {args.layers} layers: {planned:.1f} us a step", flush=True)
    parts = {
        "qkv": lambda layer: layer.attention.qkv,
        "output": lambda layer: layer.attention.output,
        "gate_up": lambda layer: layer.mlp.first,
        "down": lambda layer: layer.mlp.down,
    }
    found = []
    for part, of_layer in parts.items():
        problem = problem_of(form, rows, of_layer(layers[0]), part in ("output", "down"))
        plan, timed = plan_problem(problem, batch_invariant=args.batch_invariant), []
        for candidate in candidates(problem, args.most, args.batch_invariant):
            for layer in layers:
                name_kernel(of_layer(layer), candidate.override)
            timed.append((steps.us(), candidate))
        for layer in layers:
            name_kernel(of_layer(layer), None)
        gain = {id(candidate): (planned - us) / args.layers for us, candidate in timed}
        print(f"  {part}: planned {described(plan)}; least predicted {gain[id(timed[0][1])]:+.2f} us")
        for _, candidate in sorted(timed, key=lambda x: x[0])[:4]:
            print(f"    {gain[id(candidate)]:+6.2f} us  {described(candidate)}, predicted {candidate.predicted_us:.1f}")
        found += [
            dict(
                model=model, format=form, rows=rows, layers=args.layers, part=part, n=problem.n, k=problem.k, kernel=candidate.override,
                predicted_us=candidate.predicted_us, step_us=us, planned_step_us=planned, planned=plan.override,
                batch_invariant=args.batch_invariant,
            )
            for us, candidate in timed
        ]  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", default="llama-3.1-8b", help=f"dense ones of {', '.join(models.MODELS)}, comma separated")
    parser.add_argument("--formats", default="w4a16,fp8", help=f"of {', '.join(WEIGHTS)}")
    parser.add_argument("--batch", default="1,16", help="comma separated")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--most", type=int, default=16, help="candidates of a product")
    parser.add_argument("--batch-invariant", action="store_true", help="steps and candidates of the mode")
    parser.add_argument("--out", type=Path, help="file for all times, JSON")
    args = parser.parse_args()
    formats = args.formats.split(",")
    if unknown := [form for form in formats if form not in WEIGHTS]:
        parser.error(f"--formats must be of {', '.join(WEIGHTS)}, got {unknown[0]!r}")
    if not torch.cuda.is_available():
        print("bench.plans_in_place needs a GPU")
        return 2
    found = []
    for model in args.models.split(","):
        for form in formats:
            for rows in (int(n) for n in args.batch.split(",")):
                found += measure(model, form, rows, args)
                gc.collect()
                torch.cuda.empty_cache()
    if args.out is not None:
        args.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
