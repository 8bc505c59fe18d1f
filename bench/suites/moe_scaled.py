"""Grouped products and mixture-of-experts layers of 8-bit operands, FP8 and INT8: values first, then ours, DeepGEMM, vLLM's fused experts,
torch._int_mm and our own 16-bit operators timed in turn.

`python -m bench.suites moe_scaled --suite fp8_masked,fp8_contiguous --out bench/results/<device>/moe_scaled.json`, and likewise fp8_layer,
int8_masked, int8_contiguous and int8_layer. A run may be divided: by suites, `--part 1/2` and `--part 2/2`, or `--models` and `--tokens` of
the layers, all into the same file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from minfer.planning.plan import NARROW_NAMES

from bench.suites import contest, drawn
from bench.suites.moe_scaled_cells import LAYERS, SUITES, TOKENS, Cell, Grouped, Layer, cells_of, describe

PEERS = "ours:16bit,deepgemm,int_mm,vllm_triton,vllm_deepgemm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/moe_scaled.json")
    parser.add_argument("--peers", default=PEERS, help="which, where they compute a cell at all; empty: none")
    parser.add_argument("--models", default=",".join(LAYERS), help="of the layers that are measured")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of the layers that are measured")
    parser.add_argument("--experts", type=int, help="of a layer, where not all of a model's: another problem, whose rows say so")
    parser.add_argument("--rounds", type=int, default=9, help="timed replays of each contestant")
    parser.add_argument("--graph-us", type=float, default=500.0, help="work in one replay")
    drawn.add_arguments(parser)


def counts_of(args: argparse.Namespace) -> dict[str, int]:
    """Suite -> its number of cells.

    Raises:
      ValueError: there is no such suite.
    """
    counts = {name: len(cells_of(name)) for name in args.suite.split(",")}
    return {name: min(count, args.limit or count) for name, count in counts.items()}


def choice_of(args: argparse.Namespace) -> Callable[[str, int], bool]:
    """Which cells the arguments ask for.

    Raises:
      ValueError: a model or a number of tokens is none of the layers'.
    """
    models, tokens = args.models.split(","), args.tokens.split(",")
    for option, given, known in (("models", models, LAYERS), ("tokens", tokens, tuple(map(str, TOKENS)))):
        for value in given:
            if value not in known:
                raise ValueError(f"--{option} must be of {', '.join(known)}, got {value!r}")

    def chosen(suite: str, index: int) -> bool:
        cell = cells_of(suite)[index]
        return isinstance(cell, Grouped) or (cell.model in models and str(cell.tokens) in tokens)

    return chosen


def kernel_of(cell: Cell) -> str:
    """The kernel that is planned for a grouped product; of layers, and where the library does not say, "". A layer's two products have one
    each."""
    if isinstance(cell, Layer):
        return ""
    sizes = [cell.experts * cell.m, cell.experts, cell.n, cell.k]
    try:
        return json.loads(torch.ops.minfer._plan_grouped(sizes, NARROW_NAMES[cell.dtype], False, False, None, True, 0))["kernel"]
    except RuntimeError:
        return ""


class Run(contest.Inviter):
    """One process's worth of cells."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.held: tuple[str, torch.dtype] | None = None  # the model and the codes whose weights are at hand
        self.weights: Any = None

    def __call__(self, suite: str, index: int) -> tuple[list[dict[str, Any]], str]:
        try:
            return self.cell(suite, cells_of(suite)[index])
        finally:
            contest.free()

    def operands(self, cell: Cell) -> Any:
        from bench.peers import moe_scaled as peers

        wanted = (cell.model, cell.dtype) if isinstance(cell, Layer) else None
        if wanted != self.held:
            self.held, self.weights = None, None
            torch.cuda.empty_cache()
            if wanted is not None:
                self.weights = peers.LayerWeights(*wanted, self.args.experts)
            self.held = wanted
        return peers.GroupedOperands.draw(cell) if wanted is None else peers.LayerOperands.draw(cell, self.weights)

    def hold(self, cell: Cell, o: Any) -> contest.Contest:
        from minfer.measure.benchmarking import relative_error

        from bench.peers import moe_scaled as peers

        truth = o.truth()
        limit, own = o.limits(truth), peers.ours(o)

        def error_of(variant: Any) -> float:
            o.poison()
            return relative_error(o.result(variant, variant.fn(0)), truth)

        names = peers.OF_GROUPED if isinstance(cell, Grouped) else peers.OF_LAYERS
        variants = self.invite({f"ours/{own.name}": own}, names, peers, o, cell.op)
        return contest.hold(variants, error_of, lambda key: limit(key.partition("/")[0]), o.sets, self.args)

    def cell(self, suite: str, cell: Cell) -> tuple[list[dict[str, Any]], str]:
        from minfer._core.registry import device_properties

        from bench.peers import moe_scaled as peers

        o = self.operands(cell)
        held, described, rates = self.hold(cell, o), {"suite": suite, **describe(cell)}, device_properties()
        if isinstance(cell, Layer):
            described["shape"] |= {"experts": o.weights.experts, "active": o.active}
            floor = peers.layer_floor_us(o, rates)
        else:
            floor = peers.grouped_floor_us(cell, rates)
        kernel = kernel_of(cell)
        rows = held.rows(described, kernel=kernel, floor_us=floor)
        times = f"{held.mine.us:.2f} us, {floor / held.mine.us:.0%} of the floor, error {held.errors[contest.OURS]:.2e}"
        return rows, f"{suite} {cell}: {times}; {contest.summary(rows)}" + (f"  [{kernel}]" if kernel else "")


def main(args: argparse.Namespace) -> int:
    counts, chosen = counts_of(args), choice_of(args)
    if args.dry_run:
        for suite, count in counts.items():
            for index in drawn.part_of(args.part, count):
                if chosen(suite, index):
                    print(suite, index, cells_of(suite)[index])
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    from minfer.measure import benchmarking

    from bench.suites.w4a16 import warm_up

    facts = benchmarking.run_facts() | ({"commit": args.commit} if args.commit else {})
    results = drawn.DrawnResults(args.out, facts, args.seed, counts)
    warm_up()
    return drawn.run(results, args, Run(args), lambda suite, index: describe(cells_of(suite)[index]), chosen=chosen)
