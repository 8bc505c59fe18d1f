"""The GEMM evidence: every cell checked, then ours and the peers timed in turn."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bench.report import summary
from bench.suites.gemm_cells import SUITES, Cell, cells_of, custom_cells

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default="square,llm,odd,epilogue", help=f"of {', '.join(SUITES)}, custom (with --shapes)")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/gemm.json")
    parser.add_argument("--peers", default="cublas,cublaslt_best,torch_compile", help="also quack, deepgemm")
    parser.add_argument("--quick", action="store_true", help="a few cells of each suite")
    parser.add_argument("--shapes", help="only these cells, MxNxK,...; with --suite custom: exactly these")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of custom cells")
    parser.add_argument("--rounds", type=int, default=15, help="timed replays of each contestant")
    parser.add_argument("--graph-us", type=float, default=800.0, help="work in one replay")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--peer-budget", default="quack=60,deepgemm=60,max_autotune=90", help="seconds to tune and compile in, by peer")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def select(args: argparse.Namespace) -> list[Cell]:
    """The cells that the arguments ask for.

    Raises:
      ValueError: an unknown suite, a malformed shape, or shapes that no chosen suite has.
    """
    shapes = args.shapes.split(",") if args.shapes else []
    cells: list[Cell] = []
    for suite in args.suite.split(","):
        if suite == "custom":
            cells += custom_cells(shapes, DTYPES[args.dtype])
        else:
            found = cells_of(suite, args.quick)
            cells += [c for c in found if not shapes or f"{c.m}x{c.n}x{c.k}" in shapes]
    if not cells:
        raise ValueError(f"no cell of {args.suite} has one of the shapes {args.shapes}")
    return cells


def _budget(text: str) -> dict[str, float]:
    return {name: float(seconds) for name, _, seconds in (item.partition("=") for item in text.split(",") if item)}


class Run:
    """One process's worth of cells."""

    def __init__(self, args: argparse.Namespace, cells: list[Cell]):
        # Everything that needs the compiled package and a GPU is imported here: --dry-run does without.
        from bench import harness

        self.args, self.cells = args, cells
        self.peers = args.peers.split(",") if args.peers else []
        self.results = harness.Results(args.out, args.commit)
        self.budget = harness.Budget(_budget(args.peer_budget))
        self.said: set[str] = set()
        self.wrong: list[str] = []
        self.arenas: dict[torch.dtype, Any] = {}

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            print(text, flush=True)

    # ---- contestants --------------------------------------------------------------------------------------------------------

    def _variants_of(self, peer: str, o) -> list:
        from bench.peers import gemm as gemm_peers

        if peer == "torch_compile":
            modes = COMPILE_MODES[:1] if self.budget.spent("max_autotune") else COMPILE_MODES
            begin = time.monotonic()
            variants = gemm_peers.torch_compile(o, modes)
            if len(modes) > 1:
                self.budget.charge("max_autotune", time.monotonic() - begin)
            return variants
        return gemm_peers.PEERS[peer](o)

    def contestants(self, o) -> dict[str, list]:
        """Peer -> its variants, for those peers that can compute the cell."""
        from bench.peers import gemm as gemm_peers

        found: dict[str, list] = {}
        for peer in self.peers:
            if self.budget.spent(peer):
                continue
            begin = time.monotonic()
            try:
                found[peer] = self._variants_of(peer, o)
                if peer in ("quack", "deepgemm"):  # they tune and compile at the first call
                    found[peer][0].fn(0)
                    torch.cuda.synchronize()
            except gemm_peers.Unavailable as why:
                if not o.cell.epilogue or peer == "torch_compile":
                    self.say_once(f"{peer} is left out of {o.cell.suite}: {str(why)[-400:]}")
            except Exception as error:  # noqa: BLE001  a peer's library may raise anything; the others go on
                found.pop(peer, None)
                self.say_once(f"{peer} fails on {o.cell}: {type(error).__name__}: {str(error)[:200]}")
            self.budget.charge(peer, time.monotonic() - begin)
        return found

    def _our_kernel(self, cell: Cell) -> tuple[str | None, Any]:
        """The override to run, and the plan: on held-out shapes the analytic model's, whatever the tables say."""
        from minfer.planning.plan import plan_problem

        plan = plan_problem(cell.problem, use_tuned=cell.suite != "heldout")
        return (plan.override if cell.suite == "heldout" else None), plan

    def _best_of_ours(self, o) -> list:
        """What the tuner finds for a held-out shape: the yardstick of the analytic plan."""
        from minfer.planning import tune

        from bench.peers import gemm as gemm_peers

        variant = gemm_peers.ours(o, tune.tune_problem(o.cell.problem).best.plan.override)
        return [variant]

    # ---- a cell ---------------------------------------------------------------------------------------------------------------

    def _error(self, o, variant, truth: torch.Tensor) -> float:
        from minfer.measure.benchmarking import relative_error

        if variant.into_d:
            o.d[0].fill_(float("nan"))
        with torch.no_grad():
            out = variant.fn(0)
        return relative_error(o.d[0] if variant.into_d else out, truth)

    def cell(self, cell: Cell) -> None:
        from minfer.measure.benchmarking import relative_error, result_row, rounding_unit
        from minfer.planning.plan import DTYPE_NAMES

        from bench import harness
        from bench.peers import gemm as gemm_peers

        if cell.dtype not in self.arenas:
            self.arenas[cell.dtype] = gemm_peers.Arenas(self.cells, cell.dtype)
        o = gemm_peers.Operands.carve(cell, self.arenas[cell.dtype])
        kernel, plan = self._our_kernel(cell)
        variants = {"ours": [gemm_peers.ours(o, kernel)]} | self.contestants(o)
        if cell.suite == "heldout":
            variants["ours:best"] = self._best_of_ours(o)

        truth = o.truth()
        limit = 2 * relative_error(gemm_peers.eager(o), truth) + rounding_unit(cell.dtype)
        errors: dict[str, float] = {}
        fns: dict[str, Any] = {}
        for name, of_name in variants.items():
            for variant in of_name:
                key = f"{name}/{variant.name}"
                errors[key] = self._error(o, variant, truth)
                if errors[key] <= limit:
                    fns[key] = variant.fn
                elif name == "ours":
                    raise ArithmeticError(f"relative error {errors[key]:.3g}, at most {limit:.3g} ({plan.override})")
                else:
                    self.say_once(f"{key} is left out of {cell}: relative error {errors[key]:.3g}, at most {limit:.3g}")
        del truth

        with torch.no_grad():
            timings, failed = harness.measure(fns, o.sets, rounds=self.args.rounds, graph_us=self.args.graph_us)
        for key, why in failed.items():
            self.say_once(f"{key} cannot be captured on {cell}: {why[:200]}")
        ours_key = f"ours/{variants['ours'][0].name}"
        if ours_key not in timings:
            raise RuntimeError(failed.get(ours_key, "not timed"))
        ours = timings[ours_key]
        line = []
        for name in variants:
            mine = {key: t for key, t in timings.items() if key.startswith(f"{name}/")}
            if name == "ours" or not mine:
                continue
            key = min(mine, key=lambda key: mine[key].us)
            row = result_row(
                suite=cell.suite, op="gemm_gated" if cell.gated else "gemm", kernel=plan.kernel, shape=cell.shape(),
                dtype=DTYPE_NAMES[cell.dtype], timing=ours, peer=name, peer_us=mine[key].us,
                floor_us=plan.floor_us, rel_err=errors[ours_key],
            )  # fmt: skip
            row |= {
                "launch": plan.launch,
                "source": plan.source,
                "peer_variant": key.partition("/")[2],
                "peer_p10": round(mine[key].p10, 3),
                "peer_p90": round(mine[key].p90, 3),
                "peer_rel_err": float(f"{errors[key]:.3e}"),
            }
            self.results.add(row)
            line.append(f"{name} {row['ratio']:.3f}")
        print(f"{cell}: {ours.us:.2f} us, {plan.floor_us / ours.us:.0%} of the floor; {', '.join(line)}", flush=True)

    def all(self) -> int:
        begin = time.monotonic()
        done = 0
        try:
            for cell in self.cells:
                if time.monotonic() - begin > self.args.time_limit:
                    print(f"time limit: {len(self.cells) - done} cells were not started", flush=True)
                    break
                try:
                    self.cell(cell)
                except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
                    torch.cuda.synchronize()  # raises again where the context is lost
                    self.wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
                    print(f"FAILED {self.wrong[-1]}", flush=True)
                done += 1
                if done % 8 == 0:
                    torch.cuda.empty_cache()
        finally:
            self.results.write()
        print(f"{done} cells in {time.monotonic() - begin:.0f} s\n")
        for peer, count in self.budget.left_out.items():
            print(f"{peer}: its budget was spent, {count} cells went without")
        if self.results.rows:
            print(summary.text(self.results.rows))
        for failure in self.wrong:
            print(f"FAILED {failure}")
        return 1 if self.wrong else 0


def expected_seconds(cells: Iterable[Cell], contestants: int = 5) -> float:
    """A guess of the run's length on an H200: 0.35 s of setup a cell, the timed work, and a margin for tuning cuBLASLt."""
    total = 0.0
    for cell in cells:
        flops = 2 * cell.m * cell.n * cell.k / 700e6
        floor = max(flops, 2 * (cell.m * cell.k + cell.n * cell.k + cell.m * cell.n) / 4.4e6)
        total += 0.35 + contestants * max(15 * 800, 7 * 2 * floor) * 1e-6 + 100 * floor * 1e-6
        total += 4.0 if cell.epilogue else 0.0
        total += 3.0 if cell.suite == "heldout" else 0.0
    return total


def main(args: argparse.Namespace) -> int:
    cells = select(args)
    if args.dry_run:
        for cell in cells:
            print(cell)
        minutes = expected_seconds(cells) / 60
        print(f"{len(cells)} cells, about {math.ceil(minutes)} minutes on an H200 (quack's and DeepGEMM's tuning not counted)")
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    return Run(args, cells).all()
