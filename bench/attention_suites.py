"""The evidence of attention: prefill against cuDNN, FlashAttention-3 and -4, and what masks, lengths and caps cost. Values first, then ours
and the peers timed in turn on random data."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import minfer
import torch
from minfer.benchmarking import result_row
from moe_suites import MATRIX_RATE, READ_RATE, CellResults, chosen_of, relative_error

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
HEADS = {64: ((32, 32), (32, 8)), 128: ((32, 32), (32, 8)), 256: ((16, 16),)}
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384  # of all sequences together, or one sequence that is longer
SUITES = ("prefill", "variants")
VARIANTS = ("varlen", "window", "softcap", "sinks")
PEERS = ("cudnn", "fa3", "fa4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/attention.json")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--head-dims", default=",".join(map(str, HEADS)), help=f"of {', '.join(map(str, HEADS))}")
    parser.add_argument("--seqlens", default=",".join(map(str, SEQLENS)), help="comma separated; of prefill")
    parser.add_argument("--peers", default=",".join(PEERS[:2]), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph-us", type=float, default=500.0)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    head_dims = [int(d) for d in args.head_dims.split(",")]
    suites, dtypes = chosen_of(args.suite, "suite", SUITES), chosen_of(args.dtypes, "dtypes", tuple(DTYPES))
    found = []
    for dtype in dtypes:
        for head_dim in head_dims:
            for heads_q, heads_kv in HEADS[head_dim]:
                shape = dict(dtype=dtype, head_dim=head_dim, heads_q=heads_q, heads_kv=heads_kv)
                if "prefill" in suites:
                    for seqlen in map(int, args.seqlens.split(",")):
                        found += [dict(suite="prefill", model=mask, m=seqlen, **shape) for mask in ("causal", "full")]
                if "variants" in suites and head_dim == 128:
                    found += [dict(suite="variants", model=variant, m=TOKENS, **shape) for variant in VARIANTS]
    return found


def key_range(query: torch.Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window_left: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First key, and the one behind the last, that queries see."""
    aligned = query + seqlen_k - seqlen_q
    end = (aligned + 1).clamp(0, seqlen_k) if causal else torch.full_like(query, seqlen_k)
    begin = (aligned - window_left).clamp(0) if window_left >= 0 else torch.zeros_like(query)
    return begin, end


def truth_of(q, k, v, rows, options: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Attention of the queries ``rows`` [n] of a sequence, q [seqlen, heads, d]: [n, heads, d]. In ``dtype``, softmax in float32."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    begin, end = key_range(rows, q.shape[0], k.shape[0], options.get("causal", False), options.get("window_left", -1))
    keys = torch.arange(k.shape[0], device="cuda")
    hidden = (keys < begin[:, None]) | (keys >= end[:, None])
    out = []
    for head in range(q.shape[1]):
        scores = (q[rows, head].to(dtype) @ k[:, head // group].to(dtype).T).to(torch.promote_types(dtype, torch.float32)) * scale
        if cap := options.get("softcap", 0.0):
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(hidden, float("-inf"))
        if (sinks := options.get("sinks")) is not None:
            scores = torch.cat([scores, sinks[head].to(scores).expand(len(rows), 1)], -1)
        weights = torch.softmax(scores, -1)[:, : k.shape[0]].to(dtype)
        out.append(weights @ v[:, head // group].to(dtype))
    return torch.stack(out, 1)


def lognormal_lengths(count: int, total: int) -> list[int]:
    """Lengths of ``count`` sequences, lognormal with a deviation of 1, that add up to ``total``."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.exp(torch.randn(count, generator=generator))
    lengths = (weights / weights.sum() * total).long().clamp(min=1)
    lengths[lengths.argmax()] += total - int(lengths.sum())
    return lengths.tolist()


def seen_by(lengths: list[int], causal: bool, window_left: int) -> float:
    """Pairs of a query and a key that it sees."""
    pairs = 0.0
    for n in lengths:
        begin, end = key_range(torch.arange(n), n, n, causal, window_left)
        pairs += float((end - begin).sum())
    return pairs


def measure(cell: dict[str, Any], args: argparse.Namespace, results, peers: list[str]) -> str:
    dtype, head_dim, heads_q, heads_kv = DTYPES[cell["dtype"]], cell["head_dim"], cell["heads_q"], cell["heads_kv"]
    options: dict[str, Any] = dict(causal=cell["model"] != "full")
    lengths = [cell["m"]] * max(1, TOKENS // cell["m"])
    if cell["suite"] == "variants":
        if cell["model"] == "varlen":
            lengths = lognormal_lengths(64, TOKENS)
        options |= {
            "window": dict(window_left=4096),
            "softcap": dict(softcap=30.0),
            "sinks": dict(sinks=torch.randn(heads_q, device="cuda").to(dtype)),
        }.get(cell["model"], {})
    tokens = sum(lengths)
    sets = harness.sets_for(2 * tokens * (2 * heads_q + 2 * heads_kv) * head_dim)
    q, k, v = (
        [torch.randn(tokens, heads, head_dim, device="cuda").to(dtype) for _ in range(sets)] for heads in (heads_q, heads_kv, heads_kv)
    )
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    ragged = cell["model"] == "varlen"

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.view(len(lengths), -1, *x.shape[1:])

    def ours(i: int):
        if ragged:
            return minfer.attention_varlen(q[i], k[i], v[i], ends, ends, max(lengths), max(lengths), **options)
        return minfer.attention(batched(q[i]), batched(k[i]), batched(v[i]), **options)

    out, longest = ours(0)[0].view(tokens, heads_q, head_dim), lengths.index(max(lengths))
    begin, length = int(ends[longest]), max(lengths)
    rows = torch.linspace(0, length - 1, min(64, length), device="cuda").round().long()
    own = [x[0][begin : begin + length] for x in (q, k, v)]
    truth, yardstick = truth_of(*own, rows, options, torch.float64), truth_of(*own, rows, options, dtype)
    error = relative_error(out[begin + rows], truth)
    limit = 2 * relative_error(yardstick, truth) + torch.finfo(dtype).eps / 2
    if not error <= limit:
        raise ArithmeticError(f"relative error {error:.3g}, at most {limit:.3g}")

    fns: dict[str, Callable[[int], Any]] = {"ours": ours}
    if cell["suite"] == "prefill":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn(i: int):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    *(batched(x[i]).transpose(1, 2) for x in (q, k, v)), is_causal=options["causal"], enable_gqa=heads_q != heads_kv
                )

        if "cudnn" in peers:
            fns["cudnn"] = cudnn
        for name, function in (("fa3", "fa3_prefill"), ("fa4", "fa4")):
            if name in peers:
                import peer_ops

                call = getattr(peer_ops, function)
                fns[name] = lambda i, call=call: call(batched(q[i]), batched(k[i]), batched(v[i]), options["causal"])
    else:  # what the mask, the cap or the lengths cost is told by the plain one
        plain = [torch.randn(1, TOKENS, heads, head_dim, device="cuda").to(dtype) for heads in (heads_q, heads_kv, heads_kv)]
        fns["ours:causal"] = lambda i: minfer.attention(*plain, causal=True)
    timings, failed = harness.measure(fns, sets, rounds=args.rounds, graph_us=args.graph_us)
    pairs = seen_by(lengths, options["causal"], options.get("window_left", -1))
    flops = 4.0 * pairs * heads_q * head_dim
    floor = max(flops / MATRIX_RATE, 2.0 * tokens * (2 * heads_q + 2 * heads_kv) * head_dim / READ_RATE)
    plan_sizes = [len(lengths), length, length, heads_q, heads_kv, head_dim, head_dim]
    planned = torch.ops.minfer._plan_attention(
        plan_sizes, cell["dtype"], options.get("window_left", -1), 0 if options["causal"] else -1, ragged, None, True, 0
    )
    kernel = json.loads(planned)["kernel"]
    line, mine = [], timings["ours"]
    shape = dict(batch=len(lengths), causal=options["causal"])
    shape |= {name: cell[name] for name in ("model", "m", "heads_q", "heads_kv", "head_dim")}
    for name, timing in timings.items():
        if name == "ours":
            continue
        peer_us = timing.us
        if name == "ours:causal":  # of as many flops
            peer_us *= pairs / seen_by([TOKENS], True, -1)
        results.add(
            result_row(
                suite=cell["suite"], op="attention", kernel=kernel, shape=shape, dtype=cell["dtype"], timing=mine, peer=name,
                peer_us=peer_us, floor_us=floor, rel_err=error,
            )
        )  # fmt: skip
        line.append(f"{name} {peer_us:.0f} ({peer_us / mine.us:.2f}x)")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    head = f"{cell['suite']} {cell['dtype']} d{head_dim} {heads_q}/{heads_kv} {cell['model']} {cell['m']}"
    return f"{head}: {mine.us:.0f} us, {flops / mine.us / 1e6:.0f} TFLOP/s; {', '.join(line)}  [{kernel.split('_', 3)[3]}]"


class AttentionResults(CellResults):
    """Rows are kept cell by cell: the dtype and the heads tell cells apart, too."""

    @staticmethod
    def key(row: dict[str, Any]) -> tuple:
        shape = row["shape"]
        return row["suite"], row["peer"], row["dtype"], shape["model"], shape["m"], shape["head_dim"], shape["heads_q"], shape["heads_kv"]


def main(args: argparse.Namespace) -> int:
    chosen = cells(args)
    if args.dry_run:
        for cell in chosen:
            print(cell)
        return 0
    if not torch.cuda.is_available():
        print("bench/suites.py measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    peers = chosen_of(args.peers, "peers", PEERS) if args.peers else []
    if {"fa3", "fa4"} & set(peers):
        try:
            import peer_ops  # noqa: F401
        except ImportError as error:
            print(f"fa3 and fa4 are left out: {error}")
            peers = [peer for peer in peers if peer == "cudnn"]
    results = AttentionResults(args.out, args.commit)
    begin, wrong = time.monotonic(), []
    for cell in chosen:
        if time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            print(measure(cell, args, results, peers), flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            torch.cuda.synchronize()
            wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0
