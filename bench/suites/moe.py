"""The evidence of mixtures of experts: routing, grouped GEMM, the whole layer and its stages, values first, then ours and the peers timed
in turn. Rows are merged cell by cell: a sweep of all models and routings may take several commands (``--resume``)."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import minfer
import torch
from minfer.measure import benchmarking
from minfer.measure.benchmarking import result_row

from bench import harness

DTYPE = torch.bfloat16
# experts, top_k, hidden, inter
MODELS = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "mixtral-8x22b": (8, 2, 6144, 16384),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3": (256, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
ROUTINGS = ("uniform", "zipf", "one_hot")
SUITES = ("router", "grouped", "layer", "stages")
STAGES = {"router": "moe_router_gemm", "sort": "moe_sort", "gemm1": "grouped_gemm", "gemm2": "grouped_gemm", "combine": "moe_combine"}
PEERS = ("torch_grouped", "vllm_triton", "fbgemm", "quack")
PEER_LIBRARIES = {"vllm_triton": ("_moe_C_stable_libtorch", "_C_stable_libtorch"), "fbgemm": ("fbgemm_genai",)}
FBGEMM_TOKENS = 256  # far behind from there on; its time is spent better


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/moe.json")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma separated")
    parser.add_argument("--routing", default="uniform", help=f"of {', '.join(ROUTINGS)}; the router suite has none")
    parser.add_argument("--peers", default=",".join(PEERS[:3]), help=f"of {', '.join(PEERS)}; of the grouped and the layer suite")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph-us", type=float, default=500.0)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--resume", action="store_true", help="leave out cells of which --out has a row of this commit")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def chosen_of(text: str, option: str, known: Sequence[str]) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            raise ValueError(f"--{option} must be of {', '.join(known)}, got {name!r}")
    return chosen


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Cells of the same weights follow each other."""
    tokens = [int(t) for t in args.tokens.split(",")]
    routings = chosen_of(args.routing, "routing", ROUTINGS)
    return [
        dict(suite=suite, model=model, step=step, routing=routing, tokens=t)
        for suite in chosen_of(args.suite, "suite", SUITES)
        for model in chosen_of(args.models, "models", tuple(MODELS))
        for step in (("w13", "w2") if suite == "grouped" else ("",))
        for routing in (routings if suite != "router" else ROUTINGS[:1])
        for t in tokens
    ]


def suite_of(cell: dict[str, Any]) -> str:
    """Of a row."""
    return cell["suite"] if cell["routing"] == "uniform" else f"{cell['suite']}_{cell['routing']}"


def cell_key(cell: dict[str, Any]) -> tuple:
    return suite_of(cell), cell["model"], cell["step"], cell["tokens"]


def row_key(row: dict[str, Any]) -> tuple:
    """The cell_key() of the cell that it is a row of."""
    shape = row["shape"]
    return row["suite"], shape.get("model", ""), shape.get("step", ""), shape["m"]


class CellResults(harness.Results):
    """Rows of cells that the run does not measure stay, also those of the same suite and peer."""

    def __init__(self, path: Path | None, commit: str | None = None):
        super().__init__(path, commit)
        before = json.loads(path.read_text()) if path is not None and path.exists() else {"rows": []}
        self._before = [row | {"commit": row.get("commit", before["commit"])} for row in before["rows"]]

    @staticmethod
    def key(row: dict[str, Any]) -> tuple:
        """Rows of one key replace each other."""
        return row["peer"], *row_key(row)

    def measured(self) -> set[tuple]:
        """Keys of the cells that the file had at this commit."""
        return {row_key(row) for row in self._before if row["commit"] == self.facts["commit"]}

    def write(self) -> None:
        if self.path is None or not self.rows:
            return
        fresh, pairs = {self.key(row) for row in self.rows}, {(row["suite"], row["peer"]) for row in self.rows}
        kept = [row for row in self._before if (row["suite"], row["peer"]) in pairs and self.key(row) not in fresh]
        own = [{name: x for name, x in row.items() if name != "commit" or x != self.facts["commit"]} for row in kept]
        self._written = time.monotonic()
        benchmarking.write_results(self.path, [*own, *self.rows], self.facts)


def routed(experts: int, top_k: int, tokens: int, routing: str) -> torch.Tensor:
    """ids int32 [tokens, top_k], different experts for each token."""
    if routing == "one_hot":
        return torch.arange(top_k, device="cuda", dtype=torch.int32).expand(tokens, top_k).contiguous()
    weight = torch.ones(experts, device="cuda") if routing == "uniform" else 1.0 / torch.arange(1, experts + 1, device="cuda")
    return torch.multinomial(weight.expand(tokens, experts), top_k).to(torch.int32)


class Weights:
    """One matrix of a model's experts, and enough copies to flush the L2s where only ``read`` experts of each are (default: all)."""

    def __init__(self, experts: int, n: int, k: int, read: int | None = None):
        first = torch.empty(experts, n, k, device="cuda", dtype=DTYPE).normal_(std=k**-0.5)
        self.copies = [first, *(first.clone() for _ in range(harness.sets_for((read or experts) * n * k * 2) - 1))]

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.copies[i % len(self.copies)]


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(out.float() - want.float()) / torch.linalg.vector_norm(want.float()).clamp(min=1e-30))


READ_RATE, MATRIX_RATE = 4.45e6, 750e6  # bytes and flops a microsecond: an H200's


def floor_us(active: int, rows: int, n: int, k: int, columns: int, a_rows: int | None = None) -> float:
    """``a_rows``: of the matrix that rows are gathered from."""
    numbers = active * n * k + (rows if a_rows is None else a_rows) * k + rows * columns
    return max(2.0 * numbers / READ_RATE, 2.0 * rows * n * k / MATRIX_RATE)


def layer_floors(cell: dict[str, Any], active: int) -> tuple[float, float]:
    """Of the two products of a layer."""
    _, top_k, hidden, inter = MODELS[cell["model"]]
    rows = cell["tokens"] * top_k
    return floor_us(active, rows, 2 * inter, hidden, inter, cell["tokens"]), floor_us(active, rows, hidden, inter, hidden)


def plan_of(rows: int, experts: int, n: int, k: int, gated: bool = False, gathered: bool = False) -> str:
    """The kernel that is planned."""
    return json.loads(torch.ops.minfer._plan_grouped([rows, experts, n, k], "bf16", gated, gathered, None, True, 0))["kernel"]


def some_rows(rows: int, count: int = 256) -> torch.Tensor:
    return torch.linspace(0, rows - 1, min(count, rows), device="cuda").round().long()


def grouped_truth(a: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 products of some rows, and torch's in 16 bits."""
    expert = torch.searchsorted(offsets.long(), rows, right=True)
    truth = torch.empty(len(rows), weight.shape[1], device="cuda", dtype=torch.float64)
    yardstick = torch.empty(len(rows), weight.shape[1], device="cuda", dtype=DTYPE)
    for e in expert.unique().tolist():
        own = expert == e
        truth[own] = a[rows[own]].double() @ weight[e].double().T
        yardstick[own] = a[rows[own]] @ weight[e].T
    return truth, yardstick


def measure_grouped(cell: dict, args: argparse.Namespace, results, weights: Weights, peers: list[str]) -> str:
    """One of the layer's products without an epilogue: what every peer computes."""
    experts, top_k, hidden, inter = MODELS[cell["model"]]
    n, k = (2 * inter, hidden) if cell["step"] == "w13" else (hidden, inter)
    tokens = cell["tokens"]
    ids = routed(experts, top_k, tokens, cell["routing"])
    token_index, offsets, _, _ = minfer.moe_sort(ids, experts)
    counts = torch.diff(offsets, prepend=offsets[:1] * 0)
    rows, active = tokens * top_k, int((counts > 0).sum())
    x = torch.randn(tokens, k, device="cuda").to(DTYPE)
    a = x.index_select(0, token_index.long())
    picked = some_rows(rows)
    truth, yardstick = grouped_truth(a, weights[0], offsets, picked)
    limit = 2 * relative_error(yardstick, truth) + torch.finfo(DTYPE).eps / 2
    fns: dict[str, Callable[[int], Any]] = {"ours": lambda i: minfer.grouped_gemm(a, weights[i].mT, offsets)}
    fns["ours:gather"] = lambda i: minfer.grouped_gemm(x, weights[i].mT, offsets, gather=token_index)
    errors = {name: relative_error(fn(0)[picked], truth) for name, fn in fns.items()}
    for name, error in errors.items():
        if not error <= limit:
            raise ArithmeticError(f"{name}: relative error {error:.3g}, at most {limit:.3g}")
    if "torch_grouped" in peers:
        fns["torch_grouped"] = lambda i: torch._grouped_mm(a, weights[i].transpose(-2, -1), offs=offsets)
    if "vllm_triton" in peers:
        import peer_ops

        tiles = dict(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, GROUP_SIZE_M=8, num_warps=8, num_stages=4)
        config = peer_ops.vllm_moe_config(experts, inter, tokens) or tiles
        align = peer_ops.moe_align(ids, config["BLOCK_SIZE_M"], experts)
        fns["vllm_triton"] = lambda i: peer_ops.vllm_moe_triton(x, weights[i], ids, config, align=align)
    if "fbgemm" in peers and tokens <= FBGEMM_TOKENS:
        import peer_ops

        fns["fbgemm"] = lambda i: peer_ops.fbgemm_grouped(a, weights[i], counts)
    if "quack" in peers and rows > 0:
        from quack.gemm_interface import gemm

        ends = torch.nn.functional.pad(offsets, (1, 0))
        fns["quack"] = lambda i: gemm(a, weights[i].mT, cu_seqlens_m=ends, tuned=True)  # tunes and compiles at the first call
    timings, failed = harness.measure(fns, max(2, len(weights.copies)), rounds=args.rounds, graph_us=args.graph_us)
    kernel = plan_of(rows, experts, n, k)
    ours, line = timings["ours"], []
    floor = floor_us(active, rows, n, k, n)
    shape = dict(
        model=cell["model"], step=cell["step"], routing=cell["routing"], m=tokens, experts=experts, top_k=top_k, n=n, k=k, active=active
    )
    for name, timing in timings.items():
        if name == "ours":
            continue
        row = result_row(
            suite=suite_of(cell), op="grouped_gemm", kernel=kernel, shape=shape, dtype="bf16", timing=ours, peer=name,
            peer_us=timing.us, floor_us=floor, rel_err=errors["ours"],
        )  # fmt: skip
        results.add(row)
        line.append(f"{name} {timing.us:.1f} ({timing.us / ours.us:.2f}x)")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    head = f"grouped {cell['model']} {cell['step']} {cell['routing']} {tokens}: {ours.us:.1f} us, {floor / ours.us:.0%} of the floor"
    return f"{head}; {', '.join(line)}  [{kernel.partition('_tn_')[2].partition('_1x1')[0]}]"


def sort_by_torch(ids: torch.Tensor, experts: int, top_k: int):
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, device=ids.device, dtype=torch.int32).index_add_(0, flat, torch.ones_like(flat))
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    return counts.cumsum(0).to(torch.int32), order // top_k, inverse.view(ids.shape)


def torch_layer(x, w13, w2, weights, ids):
    """The layer from torch's own operators."""
    offsets, order, inverse = sort_by_torch(ids, w13.shape[0], ids.shape[1])
    h = torch._grouped_mm(x[order], w13.transpose(-2, -1), offs=offsets)
    gate, up = h.chunk(2, dim=-1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(-2, -1), offs=offsets)
    return (y[inverse] * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def checked_error(out: torch.Tensor, *operands: torch.Tensor) -> float:
    """The relative difference from torch's layer. Raises ArithmeticError where it is too large."""
    error = relative_error(out, torch_layer(*operands))
    if not error <= 0.008:  # two roundings between the products of torch's, one of ours: 0.0052 was measured
        raise ArithmeticError(f"relative difference from torch's layer {error:.3g}")
    return error


def measure_layer(cell: dict, args: argparse.Namespace, results, w13: Weights, w2: Weights, peers: list[str]) -> str:
    experts, top_k, hidden, inter = MODELS[cell["model"]]
    tokens = cell["tokens"]
    ids = routed(experts, top_k, tokens, cell["routing"])
    weights = torch.rand(tokens, top_k, device="cuda")
    x = torch.randn(tokens, hidden, device="cuda").to(DTYPE)

    torch.compiler.reset()  # a cell is a shape, and Dynamo compiles a function for eight of them
    compiled = torch.compile(torch_layer, fullgraph=True, dynamic=False)
    fns: dict[str, Callable[[int], Any]] = {"ours": lambda i: minfer.moe_ffn(x, w13[i], w2[i], weights, ids)}
    error = checked_error(fns["ours"](0), x, w13[0], w2[0], weights, ids)
    fns["torch_compile"] = lambda i: compiled(x, w13[i], w2[i], weights, ids)
    if "vllm_triton" in peers:
        import peer_ops

        tiles = dict(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, GROUP_SIZE_M=8, num_warps=8, num_stages=4)
        config = peer_ops.vllm_moe_config(experts, inter, tokens) or tiles
        flat = ids.view(-1, 1)

        def vllm(i):
            align = peer_ops.moe_align(ids, config["BLOCK_SIZE_M"], experts)
            h = peer_ops.vllm_moe_triton(x, w13[i], ids, config, align=align).view(tokens * top_k, -1)
            h = peer_ops.vllm_silu_mul(h)
            y = peer_ops.vllm_moe_triton(h, w2[i], flat, config, weights.view(-1, 1), align=align)
            return y.view(tokens, top_k, -1).sum(1)

        fns["vllm"] = vllm
    sets = max(2, len(w13.copies), len(w2.copies))
    timings, failed = harness.measure(fns, sets, rounds=args.rounds, graph_us=args.graph_us)
    active = int(ids.unique().numel())
    floor = sum(layer_floors(cell, active))
    shape = dict(model=cell["model"], routing=cell["routing"], m=tokens, experts=experts, top_k=top_k, n=inter, k=hidden, active=active)
    ours, line = timings["ours"], []
    for name, timing in timings.items():
        if name == "ours":
            continue
        row = result_row(
            suite=suite_of(cell), op="moe_ffn", kernel="", shape=shape, dtype="bf16", timing=ours, peer=name, peer_us=timing.us,
            floor_us=floor, rel_err=error,
        )  # fmt: skip
        results.add(row)
        line.append(f"{name} {timing.us:.1f} ({timing.us / ours.us:.2f}x)")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    return f"layer {cell['model']} {cell['routing']} {tokens}: {ours.us:.1f} us, {floor / ours.us:.0%} of the floor; {', '.join(line)}"


def measure_stages(cell: dict, args: argparse.Namespace, results, w13: Weights, w2: Weights) -> str:
    """The launches of a layer on their own, and all of them. Weights are cold, activations as warm as their size leaves them.

    The experts follow the cell's routing: the router's own choice is timed and dropped.
    """
    experts, top_k, hidden, inter = MODELS[cell["model"]]
    tokens = cell["tokens"]
    rows = tokens * top_k
    x = torch.randn(tokens, hidden, device="cuda").to(DTYPE)
    gate = (torch.randn(experts, hidden, device="cuda") * hidden**-0.5).to(DTYPE)
    gates = [gate, *(gate.clone() for _ in range(harness.sets_for(gate.numel() * 2) - 1))]
    ids = routed(experts, top_k, tokens, cell["routing"])
    weights = torch.rand(tokens, top_k, device="cuda")
    token_index, offsets, inverse, scale = minfer.moe_sort(ids, experts, weights=weights)
    active = int(ids.unique().numel())

    def router(i):
        return minfer.moe_router_gemm(x, gates[i % len(gates)], top_k)

    def gemm1(i):
        return minfer.grouped_gemm(x, w13[i].mT, offsets, gather=token_index, activation="silu", gated=True)

    def layer(i):
        router(i)
        return minfer.moe_ffn(x, w13[i], w2[i], weights, ids)

    h = gemm1(0)
    y = minfer.grouped_gemm(h, w2[0].mT, offsets, row_scale=scale)
    error = checked_error(layer(0), x, w13[0], w2[0], weights, ids)
    small = {
        "router": router,
        "sort": lambda _: minfer.moe_sort(ids, experts, weights=weights),
        "combine": lambda _: minfer.moe_combine(y, inverse),
    }
    large = {"layer": layer, "gemm1": gemm1, "gemm2": lambda i: minfer.grouped_gemm(h, w2[i].mT, offsets, row_scale=scale)}
    timings, failed = harness.measure(small, len(gates), rounds=args.rounds, graph_us=args.graph_us)
    sets = max(2, len(w13.copies), len(w2.copies))
    for found, into in zip(harness.measure(large, sets, rounds=args.rounds, graph_us=args.graph_us), (timings, failed), strict=True):
        into |= found
    if failed:
        raise RuntimeError("; ".join(f"{name} failed: {why[:100]}" for name, why in failed.items()))
    floors = dict(zip(("gemm1", "gemm2"), layer_floors(cell, active), strict=True))
    floors |= {"router": floor_us(1, tokens, experts, hidden, 0), "combine": 2.0 * (rows + tokens) * hidden / READ_RATE}
    kernels = {
        "gemm1": plan_of(rows, experts, 2 * inter, hidden, True, True),
        "gemm2": plan_of(rows, experts, hidden, inter),
    }
    shape = dict(model=cell["model"], routing=cell["routing"], m=tokens, experts=experts, top_k=top_k, n=inter, k=hidden, active=active)
    whole, total = timings["layer"].us, sum(timings[stage].us for stage in STAGES)
    for stage in (*STAGES, "layer"):
        peer, peer_us = ("ours:stages", total) if stage == "layer" else ("ours:layer", whole)
        floor = sum(floors.values()) if stage == "layer" else floors.get(stage, 0.0)
        row = result_row(
            suite=suite_of(cell), op=STAGES.get(stage, "moe_router_gemm+moe_ffn"), kernel=kernels.get(stage, ""),
            shape=shape | {"stage": stage}, dtype="bf16", timing=timings[stage], peer=peer, peer_us=peer_us, floor_us=floor, rel_err=error,
        )  # fmt: skip
        results.add(row)
    parts = ", ".join(f"{stage} {timings[stage].us:.1f}" for stage in STAGES)
    return f"stages {cell['model']} {cell['routing']} {tokens}: {whole:.1f} us; {parts}, together {total:.1f}"


def measure_router(cell: dict, args: argparse.Namespace, results) -> str:
    experts, top_k, hidden, _ = MODELS[cell["model"]]
    tokens = cell["tokens"]
    x = torch.randn(tokens, hidden, device="cuda").to(DTYPE)
    gate = (torch.randn(experts, hidden, device="cuda") * hidden**-0.5).to(DTYPE)
    logits = x.float() @ gate.float().T

    def both(_):
        weights, ids = minfer.moe_router(logits, top_k)
        return minfer.moe_sort(ids, experts, weights=weights)

    def whole(_):
        weights, ids = minfer.moe_router_gemm(x, gate, top_k)
        return minfer.moe_sort(ids, experts, weights=weights)

    def by_torch(_):
        weights, ids = torch.topk(torch.softmax(logits, -1), top_k)
        return weights / weights.sum(-1, keepdim=True), *sort_by_torch(ids.to(torch.int32), experts, top_k)

    weights, ids = minfer.moe_router(logits, top_k)
    error = relative_error(weights, by_torch(0)[0])
    if not error <= 1e-5:
        raise ArithmeticError(f"weights differ from torch's by {error:.3g}")
    token_index, offsets, inverse, _ = minfer.moe_sort(ids, experts)
    for have, want in zip((offsets, token_index, inverse), sort_by_torch(ids, experts, top_k), strict=True):
        if not torch.equal(have.long(), want.long()):
            raise ArithmeticError("rows are in another order than torch's")
    fns = {"ours": both, "ours:with its GEMM": whole, "torch": by_torch}
    timings, failed = harness.measure(fns, 2, rounds=args.rounds, graph_us=args.graph_us)
    shape = dict(model=cell["model"], m=tokens, experts=experts, top_k=top_k, n=experts, k=hidden)
    ours, line = timings["ours"], []
    for name, timing in timings.items():
        if name != "ours":
            row = result_row(
                suite="router", op="moe_router+moe_sort", kernel="", shape=shape, dtype="f32", timing=ours, peer=name, peer_us=timing.us,
                floor_us=0.0, rel_err=error,
            )  # fmt: skip
            results.add(row)
            line.append(f"{name} {timing.us:.2f} ({timing.us / ours.us:.2f}x)")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    return f"router {cell['model']} {tokens}: {ours.us:.2f} us; {', '.join(line)}"


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
    for peer in args.peers.split(","):
        try:
            if peer in PEER_LIBRARIES:
                import peer_ops

                for library in PEER_LIBRARIES[peer]:
                    peer_ops.load(library)
            elif peer == "quack":
                import quack  # noqa: F401
            peers.append(peer)
        except (ImportError, OSError) as error:
            print(f"{peer} is left out: {error}")
    begin, wrong = time.monotonic(), []
    held: tuple | None = None
    weights: list[Weights] = []
    for cell in chosen:
        if time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            experts, top_k, hidden, inter = MODELS[cell["model"]]
            wanted = (cell["suite"], cell["model"], cell["step"])
            if held != wanted:
                weights, held = [], wanted
                torch.cuda.empty_cache()
                if cell["suite"] != "router":
                    sizes = {"w13": (2 * inter, hidden), "w2": (hidden, inter)}
                    weights = [Weights(experts, *sizes[step], read=top_k) for step in ([cell["step"]] if cell["step"] else sizes)]
                    warm_up()
            if cell["suite"] == "grouped":
                text = measure_grouped(cell, args, results, weights[0], peers)
            elif cell["suite"] == "layer":
                text = measure_layer(cell, args, results, weights[0], weights[1], peers)
            elif cell["suite"] == "stages":
                text = measure_stages(cell, args, results, weights[0], weights[1])
            else:
                text = measure_router(cell, args, results)
            print(text, flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            torch.cuda.synchronize()
            wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0
