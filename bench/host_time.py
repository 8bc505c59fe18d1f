"""What an eager call costs the host: `python -m bench.host_time --out bench/results/<device>/host.json`.

Needs the installed package and a GPU. Problems are so small that the GPU is done before the next call arrives: a burst of calls is timed on
the host's clock, then the device is waited for, outside of the time. Ours, torch's own operator and an allocation with one launch
(`torch.zeros`, the floor) take turns; medians of the bursts. A burst that the GPU was behind is said so: its time is not the host's alone.
Values come first: each result is compared with that of the same operator on the CPU.

`--profile` prints where the time goes: the wrapper in Python, the operator called directly, the operator on an empty problem (all but plan,
workspace and launches), and the wrapper under `no_grad`, where the autograd rule is passed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from minfer.measure import benchmarking
from minfer.measure.benchmarking import Timing, relative_error, result_row
from torch import Tensor

from bench.harness import order_of

PROTOCOL = (
    "host clock around bursts of eager calls under inference_mode, the device waited for in between, peers interleaved, median of bursts"
)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
BEHIND = 0.5  # of a burst's time, waiting for the GPU behind it: then calls may have waited for room in its queue


@dataclass
class Case:
    """An operator on one problem, and what a torch user calls instead."""

    op: str
    shape: dict[str, Any]
    wrapper: Callable[..., Any]
    arguments: tuple  # of the wrapper and of the operator alike
    options: dict[str, Any] = field(default_factory=dict)
    empty: tuple | None = None  # arguments of a problem without a row
    written: Sequence[int] = ()  # positions of arguments that hold the result; else it is returned
    peer: str = ""
    peer_call: Callable[[], Any] | None = None
    limit: float = 2e-2  # of the relative error

    @property
    def operator(self) -> Callable[..., Any]:
        return getattr(torch.ops.minfer, self.op).default

    def ours(self) -> Any:
        return self.wrapper(*self.arguments, **self.options)

    def result(self, arguments: tuple, options: dict[str, Any]) -> Tensor:
        out = self.wrapper(*arguments, **options)
        tensors = [arguments[i] for i in self.written] if self.written else list(out) if isinstance(out, tuple) else [out]
        return torch.cat([x.double().flatten() for x in tensors])

    def error(self) -> float:
        """Against the operator on the CPU."""

        def on_cpu(x: Any) -> Any:
            return x.cpu() if isinstance(x, Tensor) else x

        truth = self.result(tuple(map(on_cpu, self.arguments)), {name: on_cpu(x) for name, x in self.options.items()})
        return relative_error(self.result(self.arguments, self.options).cpu(), truth)


def cases(dtype: torch.dtype, device: str) -> list[Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def integers(*values: int, of: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=of, device=device)

    found = []

    def mm(m: int, n: int, k: int) -> None:
        a, weight = randn(m, k), randn(n, k) / k**0.5
        b, shape = weight.t(), dict(m=m, n=n, k=k)
        call = dict(peer="cublas", peer_call=lambda: torch.mm(a, b))
        found.append(Case("gemm", shape, minfer.gemm, (a, b), empty=(a[:0], b), **call))
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        packed, scales = minfer.w4a16_pack(codes), torch.rand(k // 128, n, device=device).to(dtype) / k**0.5
        arguments = (packed, scales)
        found.append(Case("w4a16_gemm", shape | dict(group=128), minfer.w4a16_gemm, (a, *arguments), empty=(a[:0], *arguments), **call))

    mm(16, 512, 512)
    mm(16, 4096, 4096)  # a plan with a workspace

    heads, heads_kv, d = 32, 8, 128
    q, k, v = randn(1, 128, heads, d), randn(1, 128, heads_kv, d), randn(1, 128, heads_kv, d)
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    shape = dict(batch=1, m=128, head_dim=d, heads_q=heads, heads_kv=heads_kv)
    sdpa = dict(peer="sdpa", peer_call=lambda: F.scaled_dot_product_attention(*by_heads, is_causal=True, enable_gqa=True))
    found.append(Case("attention", shape, minfer.attention, (q, k, v), dict(causal=True), (q[:0], k[:0], v[:0]), **sdpa))
    tokens = [x[0] for x in (q, k, v)]
    ends = integers(0, 48, 128)
    varlen = (*tokens, ends, ends, 80, 80)
    nothing = (*(x[:0] for x in tokens), integers(0, 0, 0), integers(0, 0, 0), 0, 0)
    found.append(Case("attention_varlen", shape | dict(batch=2), minfer.attention_varlen, varlen, dict(causal=True), nothing, **sdpa))

    batch, page, pages = 8, 64, 4
    cache = minfer.allocate_kv_cache(batch * pages, page, heads_kv, d, dtype=dtype, device=device)
    for x in (cache.k, cache.v):
        x.normal_()
    lengths = integers(*(17 + 31 * i for i in range(batch)))
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    few = randn(batch, 1, heads, d)
    by_heads_few, gathered = few.transpose(1, 2), [x.view(batch, pages * page, heads_kv, d).transpose(1, 2) for x in (cache.k, cache.v)]
    found.append(
        Case(
            "attention_paged", dict(batch=batch, m=1, head_dim=d, heads_q=heads, heads_kv=heads_kv, page=page), minfer.attention_paged,
            (few, cache.k, cache.v, lengths), dict(block_table=table), (few[:, :0], cache.k, cache.v, lengths), peer="sdpa",
            peer_call=lambda: F.scaled_dot_product_attention(by_heads_few, *gathered, enable_gqa=True),
        )
    )  # fmt: skip
    new_k, new_v, slots = randn(batch, heads_kv, d), randn(batch, heads_kv, d), torch.arange(batch, device=device) * pages * page
    flat = [x.view(-1, heads_kv, d) for x in (cache.k, cache.v)]

    def put() -> None:
        flat[0][slots] = new_k
        flat[1][slots] = new_v

    found.append(
        Case(
            "kv_cache_append", dict(m=batch, batch=batch, head_dim=d, heads_kv=heads_kv, page=page), minfer.kv_cache_append,
            (new_k, new_v, cache.k, cache.v, slots), empty=(new_k[:0], new_v[:0], cache.k, cache.v, slots[:0]), written=(2, 3),
            peer="torch", peer_call=put, limit=0.0,
        )
    )  # fmt: skip

    experts, top_k, hidden, inter, count = 8, 2, 512, 256, 32
    x, gate = randn(count, hidden), randn(experts, hidden) / hidden**0.5
    w13, w2 = randn(experts, 2 * inter, hidden) / hidden**0.5, randn(experts, hidden, inter) / inter**0.5
    weights, ids = minfer.moe_router_gemm(x, gate, top_k)
    token_index, offsets, inverse, scale = minfer.moe_sort(ids, experts, weights=weights)
    rows, b13, b2 = x[token_index.long()], w13.mT, w2.mT
    shape = dict(m=count, experts=experts, top_k=top_k, n=2 * inter, k=hidden)

    def route() -> tuple[Tensor, Tensor]:
        w, i = torch.topk(torch.softmax(x.float() @ gate.float().t(), -1), top_k)
        return w / w.sum(-1, keepdim=True), i

    def experts_of_torch() -> Tensor:
        order = ids.flatten().argsort(stable=True)
        h = torch._grouped_mm(x[order // top_k], b13, offs=offsets)
        y = torch._grouped_mm(F.silu(h[:, :inter]) * h[:, inter:], b2, offs=offsets) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, order // top_k, y.to(x.dtype))

    found.append(
        Case("moe_router_gemm", shape, minfer.moe_router_gemm, (x, gate, top_k), empty=(x[:0], gate, top_k), peer="torch", peer_call=route)
    )
    grouped = dict(peer="torch_grouped", peer_call=lambda: torch._grouped_mm(rows, b13, offs=offsets))
    found.append(Case("grouped_gemm", shape, minfer.grouped_gemm, (rows, b13, offsets), empty=(rows[:0], b13, offsets), **grouped))
    layer = (w13, w2, weights, ids)
    nobody = (x[:0], w13, w2, weights[:0], ids[:0])
    found.append(
        Case("moe_ffn", shape | dict(n=inter), minfer.moe_ffn, (x, *layer), empty=nobody, peer="torch_grouped", peer_call=experts_of_torch)
    )
    return found


# ---- time --------------------------------------------------------------------------------------------------------------------


@dataclass
class HostTime:
    """Microseconds of the host a call, and those that the GPU was behind a burst of calls."""

    calls: Timing
    behind_us: float
    burst: int

    @property
    def waited(self) -> bool:
        return self.behind_us > BEHIND * self.calls.us * self.burst


def measure(contestants: dict[str, Callable[[], Any]], rounds: int, burst: int, synchronize: Callable[[], None]) -> dict[str, HostTime]:
    """Bursts by turns, each round in another order; the first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    behind: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    gc.collect()
    gc.disable()
    try:
        for i in range(-1, rounds):
            for name in order_of(names, i + 1):
                call = contestants[name]
                synchronize()
                begin = time.perf_counter_ns()
                for _ in range(burst):
                    call()
                end = time.perf_counter_ns()
                synchronize()
                drained = time.perf_counter_ns()
                if i >= 0:
                    samples[name].append((end - begin) * 1e-3 / burst)
                    behind[name].append((drained - end) * 1e-3)
    finally:
        gc.enable()
    return {name: HostTime(Timing.of(samples[name]), Timing.of(behind[name]).us, burst) for name in names}


def without_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    """Under no_grad in place of inference_mode: autograd's keys are looked at."""

    def run() -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return call()

    return run


def profile(case: Case) -> dict[str, Callable[[], Any]]:
    parts = {
        "operator": lambda: case.operator(*case.arguments, **case.options),
        "no_grad": without_grad(case.ours),
        "modes alone": without_grad(lambda: None),
    }
    if case.empty is not None:
        parts["empty"] = lambda: case.operator(*case.empty, **case.options)
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/host.json")
    parser.add_argument("--ops", help="comma separated; default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=50, help="bursts of each contestant")
    parser.add_argument("--burst", type=int, default=100, help="calls timed together; a call of several launches must not fill the queue")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--device", default="cuda", help="cpu: try the script out")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "bench.host_time: there is no GPU\n")
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    torch.manual_seed(1)
    facts = benchmarking.run_facts() | {"protocol": PROTOCOL}
    if args.commit:
        facts["commit"] = args.commit
    rows, waited = [], []
    chosen = cases(DTYPES[args.dtype], args.device)  # no inference tensors: a cache is written under no_grad too
    with torch.inference_mode():
        known = list(dict.fromkeys(case.op for case in chosen))
        wanted = args.ops.split(",") if args.ops else known
        if unknown := set(wanted) - set(known):
            parser.error(f"--ops must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
        print(f"{facts['device']}, torch {facts['torch']}, {facts['commit']}: us of the host a call, median (p10 to p90) of {args.rounds}")
        for case in chosen:
            if case.op not in wanted:
                continue
            error = case.error()
            if not error <= case.limit:
                raise ArithmeticError(f"{case.op}: relative error {error:.3g}, at most {case.limit:g}")
            zeros = case.arguments[0].shape
            contestants: dict[str, Callable[[], Any]] = {
                "ours": case.ours,
                case.peer: case.peer_call,
                "zeros": lambda zeros=zeros: torch.zeros(zeros, dtype=DTYPES[args.dtype], device=args.device),
            }
            if args.profile:
                contestants |= profile(case)
            times = measure(contestants, args.rounds, args.burst, synchronize)
            ours, peer, floor = times["ours"].calls, times[case.peer].calls, times["zeros"].calls
            rows.append(
                result_row(
                    suite="host", op=case.op, kernel=case.op, shape=case.shape, dtype=args.dtype, timing=ours, peer=case.peer,
                    peer_us=peer.us, floor_us=floor.us, rel_err=error,
                )
            )  # fmt: skip
            waited += [f"{case.op}: {name}" for name, x in times.items() if x.waited]
            text = f"{case.op:17} {ours.us:6.1f} ({ours.p10:.1f} to {ours.p90:.1f})  {case.peer} {peer.us:.1f}  zeros {floor.us:.1f}"
            if args.profile:
                call = times["operator"].calls.us
                text += f"  | wrapper {ours.us - call:+.1f}, operator {call:.1f}"
                text += f" of which {times['empty'].calls.us:.1f} without plan and launch" if "empty" in times else ""
                text += f", no_grad {times['no_grad'].calls.us - times['modes alone'].calls.us - ours.us:+.1f}"
            print(text, flush=True)
    if waited:
        print("the GPU was behind, these times are not the host's alone:", "; ".join(waited))
    if args.out is not None:
        benchmarking.write_results(args.out, rows, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
