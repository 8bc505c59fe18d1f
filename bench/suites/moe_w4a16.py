"""The evidence of experts in 4-bit codes: a layer's products, values first, then ours in two formats, ours in 16 bits and vLLM's Marlin
timed in turn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minfer
import torch
from minfer.formats import weight_formats, weight_layout
from minfer.measure.benchmarking import bytes_of, relative_error, result_row, rounding_unit

from bench import harness
from bench.suites.moe import (
    DTYPE,
    MATRIX_RATE,
    MODELS,
    READ_RATE,
    ROUTINGS,
    TOKENS,
    CellResults,
    Weights,
    cell_key,
    chosen_of,
    routed,
    some_rows,
    suite_of,
)

SUITES = ("w4a16",)
PEERS = ("marlin",)
FORMATS = {"int4": 128, "mxfp4": 32}  # format: group size
MARLIN_BLOCKS = (8, 16, 32, 48, 64)  # tokens of a tile; vLLM takes the first that an expert's do not fill to nine tenths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/moe.json")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma separated")
    parser.add_argument("--routing", default="uniform", help=f"of {', '.join(ROUTINGS)}")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; empty: none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph-us", type=float, default=500.0)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--resume", action="store_true", help="leave out cells of which --out has a row of this commit")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Cells of the same weights follow each other."""
    return [
        dict(suite=suite, model=model, step=step, routing=routing, tokens=int(tokens))
        for suite in chosen_of(args.suite, "suite", SUITES)
        for model in chosen_of(args.models, "models", tuple(MODELS))
        for step in ("w13", "w2")
        for routing in chosen_of(args.routing, "routing", ROUTINGS)
        for tokens in args.tokens.split(",")
    ]


def matrix_of(cell: dict[str, Any]) -> tuple[int, int, int]:
    """experts, n and k of the cell's weights."""
    experts, _, hidden, inter = MODELS[cell["model"]]
    return (experts, 2 * inter, hidden) if cell["step"] == "w13" else (experts, hidden, inter)


def copies_of(first: tuple, share: float) -> list[tuple]:
    """Enough copies of a contestant's tensors to flush the L2s, where a launch reads ``share`` of them."""
    sets = harness.sets_for(int(bytes_of(first) * share))
    return [first, *(tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in first) for _ in range(sets - 1))]


class ExpertWeights:
    """One matrix of a model's experts in every contestant's form. Any bits are codes, so they are drawn packed."""

    def __init__(self, experts: int, n: int, k: int, read: int, peers: list[str]):
        self.experts, self.n, self.k = experts, n, k
        self.forms: dict[str, list[tuple]] = {}
        share = read / experts
        for name, group in FORMATS.items():
            shape = (experts, *weight_layout.packed_shape(n, k))
            qweight = torch.empty(shape, dtype=torch.int32, device="cuda").random_(-(2**31), 2**31 - 1)
            unit = 1 / (4.6 if name == "int4" else 2.9) * k**-0.5  # the weights' deviation is then 1 / sqrt(k)
            scales = torch.rand(experts, weight_layout.groups(k, group), n, device="cuda").add_(0.5).mul_(unit)
            stored = scales.log2().round().add_(127).to(torch.uint8) if name == "mxfp4" else scales.to(DTYPE)
            self.forms[name] = copies_of((qweight, stored), share)
        self.dense = Weights(experts, n, k, read)
        self.missing: dict[str, str] = {}
        if "marlin" in peers:
            try:
                self.forms["marlin"] = copies_of(self._marlin(), share)
            except Exception as error:  # noqa: BLE001  a shape that it does not take
                self.missing["marlin"] = str(error)

    def _marlin(self) -> tuple:
        import peer_ops

        group = FORMATS["int4"]
        if self.k % group:
            raise ValueError(f"Marlin takes groups that divide k = {self.k}, not {group}")
        qweight, scales = self.forms["int4"][0]
        codes = (weight_layout.unpack(q, self.n, self.k).t().contiguous() for q in qweight)
        return peer_ops.marlin_moe_prepare(codes, scales, group)

    def dequantized(self, name: str, expert: int) -> torch.Tensor:
        qweight, scales = self.forms[name][0]
        form = {"group_size": FORMATS[name], "w4_format": name, "out_dtype": DTYPE}
        return minfer.w4a16_dequantize(qweight[expert], scales[expert], **form, n=self.n, k=self.k)

    @property
    def sets(self) -> int:
        return max(2, len(self.dense.copies), *(len(copies) for copies in self.forms.values()))


def errors_of(weights: ExpertWeights, name: str, out: torch.Tensor, a: torch.Tensor, offsets: torch.Tensor) -> tuple[float, float]:
    """Relative error of some rows, in the order of the experts, and the most it may be: twice torch's in 16 bits and a rounding."""
    rows = some_rows(a.shape[0])
    expert = torch.searchsorted(offsets.long(), rows, right=True)
    truth = torch.empty(len(rows), weights.n, device="cuda", dtype=torch.float64)
    yardstick = torch.empty(len(rows), weights.n, device="cuda", dtype=DTYPE)
    for e in expert.unique().tolist():
        own, dense = expert == e, weights.dequantized(name, e)
        truth[own] = a[rows[own]].double() @ dense.double().T
        yardstick[own] = a[rows[own]] @ dense.T
    return relative_error(out[rows], truth), 2 * relative_error(yardstick, truth) + rounding_unit(DTYPE)


def floor_us(name: str, active: int, rows: int, a_rows: int, n: int, k: int) -> float:
    """Codes and scales of the experts that have rows, tokens in and out."""
    form = weight_formats.FORMATS[name]
    scale_bytes = 2 if form.scale_type is None else 1
    weight_bytes = n * (k * form.bits / 8 + weight_layout.groups(k, FORMATS[name]) * scale_bytes)
    return max((active * weight_bytes + 2.0 * (a_rows * k + rows * n)) / READ_RATE, 2.0 * rows * n * k / MATRIX_RATE)


def measure_cell(cell: dict[str, Any], args: argparse.Namespace, results: CellResults, weights: ExpertWeights) -> str:
    """One of the layer's products without an epilogue: w13 gathers its rows from the tokens, w2 reads them in order."""
    experts, top_k, _, _ = MODELS[cell["model"]]
    n, k, tokens = weights.n, weights.k, cell["tokens"]
    rows = tokens * top_k
    ids = routed(experts, top_k, tokens, cell["routing"])
    token_index, offsets, inverse, _ = minfer.moe_sort(ids, experts)
    active = int(ids.unique().numel())
    pairs = inverse.flatten().long()  # the row of each (token, slot)
    if cell["step"] == "w13":
        x = torch.randn(tokens, k, device="cuda").to(DTYPE)
        a, gather, sorted_rows = x, token_index, x.index_select(0, token_index.long())
    else:
        x = torch.randn(rows, k, device="cuda").to(DTYPE)  # in the order of pairs
        a, gather = torch.empty_like(x).index_copy_(0, pairs, x), None
        sorted_rows = a
    fns: dict[str, Callable[[int], Any]] = {}

    def quantised(name: str) -> Callable[[int], Any]:
        copies, form = weights.forms[name], {"group_size": FORMATS[name], "w4_format": name}
        op = torch.ops.minfer.grouped_w4a16_gemm.default

        def call(i: int):
            qweight, scales = copies[i % len(copies)]
            return op(a, qweight, scales, None, offsets, **form, gather=gather)

        return call

    fns["ours"], fns["ours:mxfp4"] = quantised("int4"), quantised("mxfp4")
    fns["ours:16bit"] = lambda i: minfer.grouped_gemm(a, weights.dense[i].mT, offsets, gather=gather)
    if "marlin" in weights.forms:
        import peer_ops

        forms = weights.forms["marlin"]
        routes = ids if cell["step"] == "w13" else ids.view(-1, 1)
        ones = torch.ones(routes.shape, device="cuda")
        block = next((b for b in MARLIN_BLOCKS if rows / experts / b < 0.9), MARLIN_BLOCKS[-1])
        align = peer_ops.moe_align(routes, block, experts)
        fns["marlin"] = lambda i: peer_ops.marlin_moe(x, forms[i % len(forms)], routes, ones, block=block, align=align)
    errors = {}
    for name in ("ours", "ours:mxfp4", "marlin"):
        if name in fns:
            out = fns[name](0)
            out = out if name != "marlin" else torch.empty_like(out).index_copy_(0, pairs, out)
            errors[name], limit = errors_of(weights, "mxfp4" if name == "ours:mxfp4" else "int4", out, sorted_rows, offsets)
            if name != "marlin" and not errors[name] <= limit:
                raise ArithmeticError(f"{name}: relative error {errors[name]:.3g}, at most {limit:.3g}")
    timings, failed = harness.measure(fns, weights.sets, rounds=args.rounds, graph_us=args.graph_us)
    if "ours" not in timings:
        raise RuntimeError(failed["ours"])
    problem = ([rows, experts, n, k], "bf16", False, gather is not None)
    kernel = json.loads(torch.ops.minfer._plan_grouped(*problem, None, True, 0, "int4", FORMATS["int4"]))["kernel"]
    floor = floor_us("int4", active, rows, a.shape[0], n, k)
    shape = {name: cell[name] for name in ("model", "step", "routing")} | dict(
        m=tokens, experts=experts, top_k=top_k, n=n, k=k, active=active
    )
    ours, line = timings["ours"], []
    for name, timing in timings.items():
        if name == "ours":
            continue
        row = result_row(
            suite=suite_of(cell), op="grouped_w4a16_gemm", kernel=kernel, shape=shape, dtype="bf16", timing=ours, peer=name,
            peer_us=timing.us, floor_us=floor, rel_err=errors["ours"],
        )  # fmt: skip
        if name in errors:
            row["peer_rel_err"] = float(f"{errors[name]:.3e}")
        results.add(row)
        line.append(f"{name} {timing.us:.1f} ({timing.us / ours.us:.2f}x)")
    line += [f"{name} failed: {why[:80]}" for name, why in (weights.missing | failed).items()]
    head = f"{suite_of(cell)} {cell['model']} {cell['step']} {tokens}: {ours.us:.1f} us, {floor / ours.us:.0%} of the floor"
    return f"{head}; {', '.join(line)}  [{kernel.partition('_int4_')[2]}]"


def main(args: argparse.Namespace) -> int:
    chosen = cells(args)
    if args.dry_run:
        for cell in chosen:
            print(cell)
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    from bench.suites.w4a16 import warm_up

    results = CellResults(args.out, args.commit)
    if args.resume:
        done = results.measured()
        chosen = [cell for cell in chosen if cell_key(cell) not in done]
    peers = []
    for peer in chosen_of(args.peers, "peers", PEERS) if args.peers else []:
        try:
            import peer_ops

            for library in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
                peer_ops.load(library)
            peers.append(peer)
        except (ImportError, OSError) as error:
            print(f"{peer} is left out: {error}")
    begin, wrong = time.monotonic(), []
    held: tuple | None = None
    weights: ExpertWeights | None = None
    for cell in chosen:
        if time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            wanted = (cell["model"], cell["step"])
            if held != wanted:
                weights, held = None, None
                torch.cuda.empty_cache()
                experts, n, k = matrix_of(cell)
                fewest = min(other["tokens"] for other in chosen if (other["model"], other["step"]) == wanted)
                weights = ExpertWeights(experts, n, k, min(experts, max(fewest, 1) * MODELS[cell["model"]][1]), peers)
                held = wanted
                warm_up()
            print(measure_cell(cell, args, results, weights), flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            torch.cuda.synchronize()
            wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0
