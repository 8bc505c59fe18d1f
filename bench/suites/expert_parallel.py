"""Expert parallelism on this machine's GPUs: `python -m bench.suites.expert_parallel --out bench/results/<device>/expert_parallel.json`.

Starts a process for each GPU. The same tokens, divided among the ranks, against `moe_ffn` over all experts on one of the GPUs; values
first. Three modes: "exchange", through mapped memory, and "capacity", through collectives, for every token of a rank, in CUDA-graph
replays; "needed", which reads sizes on the host and is timed eagerly. A round's time is that of the slowest rank; the floor is that of the
busiest rank's products, without the exchange.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minfer
import torch
import torch.distributed as dist
from minfer.measure.benchmarking import Timing, result_row

from bench import harness
from bench.suites import moe as moe_suites

LEAST_LAUNCHES = 8  # in a sample: ranks do not start together, and that is shared among them


def cells(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(model, tokens of all ranks)."""
    found = []
    for model in args.models.split(","):
        if model not in moe_suites.MODELS:
            raise ValueError(f"--models must be of {', '.join(moe_suites.MODELS)}, got {model!r}")
        for count in (moe_suites.MODELS[model][0], *(int(t) for t in args.tokens.split(","))):
            if count % args.ranks:
                raise ValueError(f"experts and tokens must be multiples of the {args.ranks} ranks, got {count}")
        found += [(model, int(t)) for t in args.tokens.split(",")]
    return found


class Eager:
    """Calls between two events, with the interface of harness.Graph."""

    def __init__(self, fn: Callable[[int], Any], sets: int, launches: int):
        self._fn, self._sets, self._launches = fn, sets, launches
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(self) -> None:
        self._begin.record()
        for i in range(self._launches):
            self._fn(i % self._sets)
        self._end.record()

    def elapsed_us(self) -> float:
        return self._begin.elapsed_time(self._end) * 1000.0 / self._launches


def measure(contestants: dict[str, Any], rounds: int) -> dict[str, Timing]:
    """Timing by name, in turn; a contestant that a rank has None for is another rank's alone."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(-2, rounds):
        for name, contestant in contestants.items():
            torch.cuda.synchronize()
            dist.barrier()
            if contestant is not None:
                contestant.replay()
            torch.cuda.synchronize()
            if i >= 0:
                samples[name].append(0.0 if contestant is None else contestant.elapsed_us())
    slowest = torch.tensor(list(samples.values()), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {name: Timing.of(times) for name, times in zip(samples, slowest.tolist(), strict=True)}


def copies(experts: int, top_k: int, n: int, k: int) -> list[torch.Tensor]:
    """One matrix of the experts as often as it takes to flush the L2s where one token's experts are read of each."""
    first = torch.empty(experts, n, k, device="cuda", dtype=moe_suites.DTYPE).normal_(std=k**-0.5)
    return [first, *(first.clone() for _ in range(harness.sets_for(top_k * n * k * 2) - 1))]


def capture(fn: Callable[[int], Any], sets: int, launches: int) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn(0)
    stream.synchronize()
    graph = harness.Graph(fn, sets, launches, stream, torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()
    return graph


def floor_us(ids: torch.Tensor, share: tuple[int, int], hidden: int, inter: int) -> float:
    """Of the products of the experts from share[0] to share[1]."""
    own = (ids >= share[0]) & (ids < share[1])
    active, rows, tokens = ids[own].unique().numel(), int(own.sum()), int(own.any(1).sum())
    first = moe_suites.floor_us(active, rows, 2 * inter, hidden, inter, tokens)
    return first + moe_suites.floor_us(active, rows, hidden, inter, hidden)


def measure_cell(model: str, tokens: int, rank: int, args: argparse.Namespace, w13, w2, results) -> None:
    experts, top_k, hidden, inter = moe_suites.MODELS[model]
    torch.cuda.manual_seed(tokens)  # the same tokens on every rank
    x = torch.randn(tokens, hidden, device="cuda").to(moe_suites.DTYPE)
    ids, weights = moe_suites.routed(experts, top_k, tokens, args.routing), torch.rand(tokens, top_k, device="cuda")
    share, own = minfer.distributed.local_experts(experts), tokens // args.ranks
    mine = slice(rank * own, (rank + 1) * own)

    def divided(**options) -> Callable[[int], torch.Tensor]:
        call = minfer.distributed.expert_parallel_moe
        return lambda i: call(x[mine], w13[i % len(w13)][share], w2[i % len(w2)][share], weights[mine], ids[mine], **options)

    def whole(i: int) -> torch.Tensor:
        return minfer.moe_ffn(x, w13[i % len(w13)], w2[i % len(w2)], weights, ids)

    exchange = minfer.distributed.ExpertExchange(own, hidden, top_k)
    if not exchange.mapped:
        raise RuntimeError("the GPUs do not reach each other's memory")
    fns = {"exchange": divided(exchange=exchange), "capacity": divided(capacity=own), "needed": divided()}
    want = whole(0)[mine]
    errors = torch.tensor([moe_suites.relative_error(fn(0), want) for fn in fns.values()], device="cuda")
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    if not bool((errors <= 0.008).all()):  # as the layer's suite allows; on every rank alike
        raise ArithmeticError(f"{model}, {tokens} tokens: relative differences from moe_ffn {errors.tolist()}")
    sets = max(len(w13), len(w2))
    launches = sets * -(-LEAST_LAUNCHES // sets)
    contestants = {
        "exchange": capture(fns["exchange"], sets, launches),
        "capacity": capture(fns["capacity"], sets, launches),
        "needed": Eager(fns["needed"], sets, launches),
        "one GPU": capture(whole, sets, launches) if rank == 0 else None,
    }
    timings = measure(contestants, args.rounds)
    del contestants
    exchange.close()
    if rank > 0:
        return
    floor = max(floor_us(ids, (r * experts // args.ranks, (r + 1) * experts // args.ranks), hidden, inter) for r in range(args.ranks))
    peer = timings["one GPU"]
    for (mode, _), error in zip(fns.items(), errors.tolist(), strict=True):
        shape = dict(
            model=model, routing=args.routing, mode=mode, ranks=args.ranks, m=tokens, experts=experts, top_k=top_k, n=inter, k=hidden
        )
        row = result_row(
            suite="expert_parallel", op="expert_parallel_moe", kernel="", shape=shape, dtype="bf16", timing=timings[mode],
            peer="ours:moe_ffn on one GPU", peer_us=peer.us, floor_us=floor, rel_err=error,
        )  # fmt: skip
        results.add(row)
        print(
            f"{model} {tokens} tokens, {mode}: {row['us']:.1f} us on {args.ranks} GPUs, {peer.us:.1f} us on one ({row['ratio']:.2f}x)",
            flush=True,
        )


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.ranks, device_id=device)
    results = harness.Results(args.out, args.commit) if rank == 0 else None
    held, w13, w2 = None, None, None
    try:
        with torch.inference_mode():
            for model, tokens in cells(args):
                if held != model:
                    w13 = w2 = None
                    torch.cuda.empty_cache()
                    experts, top_k, hidden, inter = moe_suites.MODELS[model]
                    torch.cuda.manual_seed(7)  # the same experts on every rank
                    w13, w2 = (copies(experts, top_k, n, k) for n, k in ((2 * inter, hidden), (hidden, inter)))
                    held = model
                measure_cell(model, tokens, rank, args, w13, w2, results)
    finally:
        if results is not None:
            results.write()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="GPUs to use; default: all")
    parser.add_argument("--models", default="mixtral-8x7b,qwen3-30b-a3b,deepseek-v3", help=f"of {', '.join(moe_suites.MODELS)}")
    parser.add_argument("--tokens", default="16,256,4096,16384", help="of all ranks together, comma separated")
    parser.add_argument("--routing", default="uniform", choices=moe_suites.ROUTINGS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/expert_parallel.json")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")
    args = parser.parse_args()
    if args.ranks < 2:
        print(f"bench.suites.expert_parallel needs two GPUs or more, got {args.ranks}; --dry-run --ranks 2 lists the cells")
        return 2
    try:
        chosen = cells(args)
    except ValueError as error:
        parser.error(str(error))
    if args.dry_run:
        print("\n".join(f"{model}, {tokens} tokens" for model, tokens in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (args, folder), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
