"""The evidence of mixtures of experts: routing, grouped GEMM and the whole layer, values first, then ours and the peers timed in turn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
SUITES = ("router", "grouped", "layer")
PEERS = ("torch_grouped", "vllm_triton", "fbgemm")
FBGEMM_TOKENS = 256  # far behind from there on; its time is spent better


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/moe.json")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma separated")
    parser.add_argument("--routing", default="uniform", help=f"of {', '.join(ROUTINGS)}")
    parser.add_argument("--peers", default=",".join(PEERS), help="of the grouped suite")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph-us", type=float, default=500.0)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokens = [int(t) for t in args.tokens.split(",")]
    found: list[dict[str, Any]] = []
    for suite in args.suite.split(","):
        if suite not in SUITES:
            raise ValueError(f"--suite must be of {', '.join(SUITES)}, got {suite!r}")
        for model in args.models.split(","):
            if model not in MODELS:
                raise ValueError(f"--models must be of {', '.join(MODELS)}, got {model!r}")
            for routing in args.routing.split(","):
                if routing not in ROUTINGS:
                    raise ValueError(f"--routing must be of {', '.join(ROUTINGS)}, got {routing!r}")
                for step in ("w13", "w2") if suite == "grouped" else ("",):
                    found += [dict(suite=suite, model=model, tokens=t, routing=routing, step=step) for t in tokens]
    return found


def suite_of(cell: dict[str, Any]) -> str:
    """Of a row: rows are replaced by suite and peer."""
    return cell["suite"] if cell["routing"] == "uniform" else f"{cell['suite']}_{cell['routing']}"


def routed(experts: int, top_k: int, tokens: int, routing: str) -> torch.Tensor:
    """ids int32 [tokens, top_k], different experts for each token."""
    if routing == "one_hot":
        return torch.arange(top_k, device="cuda", dtype=torch.int32).expand(tokens, top_k).contiguous()
    weight = torch.ones(experts, device="cuda") if routing == "uniform" else 1.0 / torch.arange(1, experts + 1, device="cuda")
    return torch.multinomial(weight.expand(tokens, experts), top_k).to(torch.int32)


class Weights:
    """One matrix of a model's experts, and enough copies to flush the L2s."""

    def __init__(self, experts: int, n: int, k: int):
        from harness import sets_for

        first = torch.empty(experts, n, k, device="cuda", dtype=DTYPE).normal_(std=k**-0.5)
        self.copies = [first, *(first.clone() for _ in range(sets_for(first.numel() * 2) - 1))]

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.copies[i % len(self.copies)]


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(out.float() - want.float()) / torch.linalg.vector_norm(want.float()).clamp(min=1e-30))


def floor_us(active: int, rows: int, n: int, k: int, columns: int) -> float:
    return max(2.0 * (active * n * k + rows * k + rows * columns) / 4.45e6, 2.0 * rows * n * k / 750e6)


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
    import harness
    import minfer
    from minfer.benchmarking import result_row

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
    timings, failed = harness.measure(fns, max(2, len(weights.copies)), rounds=args.rounds, graph_us=args.graph_us)
    plan = json.loads(torch.ops.minfer._plan_grouped([rows, experts, n, k], "bf16", False, False, None, True, 0))
    ours, line = timings["ours"], []
    floor = floor_us(active, rows, n, k, n)
    shape = dict(
        model=cell["model"], step=cell["step"], routing=cell["routing"], m=tokens, experts=experts, top_k=top_k, n=n, k=k, active=active
    )
    for name, timing in timings.items():
        if name == "ours":
            continue
        row = result_row(
            suite=suite_of(cell), op="grouped_gemm", kernel=plan["kernel"], shape=shape, dtype="bf16", timing=ours, peer=name,
            peer_us=timing.us, floor_us=floor, rel_err=errors["ours"],
        )  # fmt: skip
        results.add(row)
        line.append(f"{name} {timing.us:.1f} ({timing.us / ours.us:.2f}x)")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    head = f"grouped {cell['model']} {cell['step']} {cell['routing']} {tokens}: {ours.us:.1f} us, {floor / ours.us:.0%} of the floor"
    return f"{head}; {', '.join(line)}  [{plan['kernel'].partition('_tn_')[2].partition('_1x1')[0]}]"


def torch_layer(x, w13, w2, weights, ids, offsets, order, inverse):
    """The layer from torch's own operators."""
    h = torch._grouped_mm(x[order], w13.transpose(-2, -1), offs=offsets)
    gate, up = h.chunk(2, dim=-1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(-2, -1), offs=offsets)
    return (y[inverse] * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def sort_by_torch(ids: torch.Tensor, experts: int, top_k: int):
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, device=ids.device, dtype=torch.int32).index_add_(0, flat, torch.ones_like(flat))
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    return counts.cumsum(0).to(torch.int32), order // top_k, inverse.view(ids.shape)


def measure_layer(cell: dict, args: argparse.Namespace, results, w13: Weights, w2: Weights, peers: list[str]) -> str:
    import harness
    import minfer
    from minfer.benchmarking import result_row

    experts, top_k, hidden, inter = MODELS[cell["model"]]
    tokens = cell["tokens"]
    ids = routed(experts, top_k, tokens, cell["routing"])
    weights = torch.rand(tokens, top_k, device="cuda")
    x = torch.randn(tokens, hidden, device="cuda").to(DTYPE)

    def from_torch(x, w13, w2, weights, ids):
        offsets, order, inverse = sort_by_torch(ids, experts, top_k)
        return torch_layer(x, w13, w2, weights, ids, offsets, order, inverse)

    compiled = torch.compile(from_torch, fullgraph=True, dynamic=False)
    want = from_torch(x, w13[0], w2[0], weights, ids)
    fns: dict[str, Callable[[int], Any]] = {"ours": lambda i: minfer.moe_ffn(x, w13[i], w2[i], weights, ids)}
    error = relative_error(fns["ours"](0), want)
    if not error <= 0.008:  # two roundings between the products of torch's, one of ours: 0.0052 was measured
        raise ArithmeticError(f"relative difference from torch's layer {error:.3g}")
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
    rows, active = tokens * top_k, int(ids.unique().numel())
    floor = floor_us(active, rows, 2 * inter, hidden, inter) + floor_us(active, rows, hidden, inter, hidden)
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


def measure_router(cell: dict, args: argparse.Namespace, results) -> str:
    import harness
    import minfer
    from minfer.benchmarking import result_row

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

    fns = {"ours": both, "ours:with its GEMM": whole, "torch": by_torch}
    timings, failed = harness.measure(fns, 2, rounds=args.rounds, graph_us=args.graph_us)
    shape = dict(model=cell["model"], m=tokens, experts=experts, top_k=top_k, n=experts, k=hidden)
    ours, line = timings["ours"], []
    for name, timing in timings.items():
        if name != "ours":
            row = result_row(
                suite="router", op="moe_router+moe_sort", kernel="", shape=shape, dtype="f32", timing=ours, peer=name, peer_us=timing.us,
                floor_us=0.0, rel_err=0.0,
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
        print("bench/suites.py measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    import harness
    from w4a16_suites import warm_up

    results = harness.Results(args.out, args.commit)
    peers = []
    for peer in args.peers.split(","):
        try:
            if peer != "torch_grouped":
                import peer_ops

                peer_ops.load("fbgemm_genai" if peer == "fbgemm" else "_moe_C_stable_libtorch")
                if peer == "vllm_triton":
                    peer_ops.load("_C_stable_libtorch")
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
            experts, _, hidden, inter = MODELS[cell["model"]]
            wanted = (cell["suite"], cell["model"], cell["step"])
            if held != wanted:
                weights, held = [], wanted
                torch.cuda.empty_cache()
                if cell["suite"] != "router":
                    steps = ("w13", "w2") if cell["suite"] == "layer" else (cell["step"],)
                    weights = [Weights(experts, 2 * inter, hidden) if s == "w13" else Weights(experts, hidden, inter) for s in steps]
                    warm_up()
            if cell["suite"] == "grouped":
                text = measure_grouped(cell, args, results, weights[0], peers)
            elif cell["suite"] == "layer":
                text = measure_layer(cell, args, results, weights[0], weights[1], peers)
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
