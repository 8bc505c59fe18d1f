"""The examples of docs/guides/fuse.md: their times beside torch.compile (attention: flex_attention), and how long a first call takes.

`python -m bench.suites fuse --suite examples`. Rows of the suite `examples` are times on a stream. Those of `start` are times of the host,
to the end of a function's first call in a process that has made another call: of one that fuse.load() read, beside one that is compiled
("ours:first_call") and one whose kernel is on the disk ("ours:from_disk"). Each of the three has a process of its own for all examples.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from minfer import fuse
from minfer._core.registry import device_properties
from minfer.measure.benchmarking import Timing, result_row
from torch import Tensor

from bench import harness
from bench.suites.fused import FusedResults
from bench.suites.fused_call import deviation

DEVICE = "cuda"
HEADS, HEADS_KV, DIM, PAGE, BATCH, CONTEXT = 32, 8, 128, 16, 16, 4096  # of attention over a paged cache
TOP = 4  # experts
_BF16_ERROR = 2.0**-7
STARTS = {"minfer": "loaded", "ours:first_call": "compiled", "ours:from_disk": "from_disk"}


def group_rational(x, a0, a1, a2, a3, b1, b2):
    x = x.float()
    p = a0 + x * (a1 + x * (a2 + x * a3))
    q = 1 + (x * (b1 + x * b2)).abs()
    return (p / q).to(torch.bfloat16)


def gated_residual_norm(x, stream, gate, weight):
    h = stream.float() + torch.sigmoid(gate) * x
    return h.to(x.dtype), (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def deep_norm(x, branch, weight, bias, *, alpha: float = 2.0):
    return F.layer_norm(x * alpha + branch, (x.shape[-1],), weight, bias)


def router(logits, bias, *, top: int = TOP):
    p = torch.softmax(logits.float(), -1)
    chosen = p + bias
    for _ in range(top - 1):
        most = chosen.amax(-1, keepdim=True)
        chosen = torch.where(chosen >= most, float("-inf"), chosen)
    least = chosen.amax(-1, keepdim=True)
    return p, torch.where(p + bias >= least, p, 0.0).sum(-1, keepdim=True)


def sparse_activation(x, *, threshold: float = 0.0):
    active = x > threshold
    return torch.where(active, x.float().square(), 0.0).to(x.dtype), active, active.to(torch.int32).sum(-1).to(torch.int32)


@dataclass(frozen=True)
class Example:
    """A function of rows: what its arguments are (x: rows, r: a row, f: a row of float32), and bytes written beside each number of x."""

    function: Callable[..., Any]
    arguments: str
    rowwise: bool
    written: float
    m: int
    width: int

    def fused(self) -> fuse.RowFunction:
        return (fuse.rowwise if self.rowwise else fuse.pointwise)(self.function)

    def draw(self, rows: int | None = None) -> list[Tensor]:
        def argument(kind: str) -> Tensor:
            if kind == "x":
                return torch.randn(rows or self.m, self.width, device=DEVICE, dtype=torch.bfloat16)
            return torch.randn(self.width, device=DEVICE, dtype=torch.float32 if kind == "f" else torch.bfloat16)

        return [argument(kind) for kind in self.arguments]

    @property
    def bytes(self) -> float:
        return (2.0 * self.arguments.count("x") + self.written) * self.m * self.width


ROWS = {
    "group_rational": Example(group_rational, "xffffff", False, 2, 8192, 4096),
    "gated_residual_norm": Example(gated_residual_norm, "xxxr", True, 4, 8192, 4096),
    "deep_norm": Example(deep_norm, "xxrr", True, 2, 8192, 4096),
    "router": Example(router, "xf", True, 4, 16384, 128),
    "sparse_activation": Example(sparse_activation, "x", True, 3, 8192, 14336),
}


def alibi_of(slopes: Tensor) -> Callable[..., Any]:
    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def cells(only: str) -> list[dict[str, Any]]:
    found = [dict(suite="examples", what=name, m=x.m, width=x.width, dtype="bf16") for name, x in ROWS.items() if only in name]
    if only in "alibi_paged":
        found.append(dict(suite="examples", what="alibi_paged", m=BATCH, width=CONTEXT, dtype="bf16"))
    return found


def measure(cell: dict[str, Any], args: argparse.Namespace, results: FusedResults, peers: list[str], budget: harness.Budget) -> str:
    torch.compiler.reset()
    make = _attention if cell["what"] == "alibi_paged" else _rows
    contestants, sets, moved, error = make(cell["what"])
    start = {name: Timing.of([us[cell["what"]]]) for name, us in starts().items()}
    if not error <= _BF16_ERROR:
        raise ArithmeticError(f"relative error {error:.3g}")
    chosen = {"minfer": contestants.pop("minfer")}
    for name, fn in contestants.items():
        if name in peers and not budget.spent(name):
            begin = time.monotonic()
            fn(0)
            torch.cuda.synchronize()
            budget.charge(name, time.monotonic() - begin)
            chosen[name] = fn
    timings, failed = harness.measure(chosen, sets, rounds=args.rounds, graph_us=args.graph_us)
    if "minfer" not in timings:
        raise RuntimeError(failed["minfer"])
    floor = moved / device_properties()["read_bandwidth"]
    for suite, own, others in (("examples", timings["minfer"], timings), ("start", start["minfer"], start)):
        for name, timing in others.items():
            if name != "minfer":
                results.add(
                    result_row(
                        suite=suite, op=cell["what"], kernel="fuse", dtype="bf16", timing=own,
                        shape=dict(what=cell["what"], m=cell["m"], width=cell["width"]), peer=name, peer_us=timing.us,
                        floor_us=floor, rel_err=error,
                    )
                )  # fmt: skip
    line = [f"{name} {timing.us:.1f}" for name, timing in timings.items()] + [f"{name} failed: {why[:80]}" for name, why in failed.items()]
    line += [f"start {name} {timing.us / 1000:.1f} ms" for name, timing in start.items()]
    return f"examples {cell['what']} {cell['m']} x {cell['width']}, us: {', '.join(line)}"


def _listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def _rows(name: str) -> tuple[dict[str, Callable[[int], Any]], int, float, float]:
    example = ROWS[name]
    function, sets = example.fused(), harness.sets_for(int(example.bytes))
    operands = [example.draw() for _ in range(sets)]
    few = example.draw(rows=64)
    have, want = _listed(function(*few)), _listed(function.reference(*few, precision=torch.float64))
    error = max(deviation(x, y) for x, y in zip(have, want, strict=True))
    compiled = torch.compile(example.function, dynamic=False)
    contestants = {"minfer": lambda i: function(*operands[i]), "torch_compile": lambda i: compiled(*operands[i])}
    return contestants, sets, example.bytes, error


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of ``batch`` sequences of ``context`` tokens, and the queries of a step of decode."""

    batch: int
    context: int

    def pages(self) -> list[Tensor]:
        shape = (self.batch * self.context // PAGE, PAGE, HEADS_KV, DIM)
        return [torch.randn(shape, device=DEVICE).to(torch.bfloat16) for _ in range(2)]

    def queries(self) -> Tensor:
        return torch.randn(self.batch, HEADS, 1, DIM, device=DEVICE).to(torch.bfloat16)

    def options(self) -> dict[str, Any]:
        pages = self.context // PAGE
        table = torch.randperm(self.batch * pages, device=DEVICE).view(self.batch, pages).to(torch.int32)
        lengths = torch.full((self.batch,), self.context, dtype=torch.int32, device=DEVICE)
        return {"enable_gqa": True, "block_table": table, "seq_lens": lengths}


def slopes_of_heads() -> Tensor:
    return torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device=DEVICE) / HEADS)


def _attention(name: str) -> tuple[dict[str, Callable[[int], Any]], int, float, float]:
    """flex_attention has the same keys and values, one after the other."""
    from torch.nn.attention import flex_attention as flex

    slopes, paged = slopes_of_heads(), PagedCache(BATCH, CONTEXT)
    alibi = alibi_of(slopes)
    moved = 4.0 * BATCH * CONTEXT * HEADS_KV * DIM
    sets = harness.sets_for(int(moved))
    caches, options, q = [paged.pages() for _ in range(sets)], paged.options(), paged.queries()
    table, lengths = options["block_table"], options["seq_lens"]

    def dense(cache: Tensor) -> Tensor:
        return cache[table.long()].view(BATCH, CONTEXT, HEADS_KV, DIM).transpose(1, 2).contiguous()

    dense_caches = [[dense(x) for x in pair] for pair in caches]
    k, v = (x[:1].double().repeat_interleave(HEADS // HEADS_KV, 1) for x in dense_caches[0])
    scores = (q[:1].double() @ k.mT) * DIM**-0.5 + slopes.view(1, -1, 1, 1) * (torch.arange(CONTEXT, device=DEVICE) - (CONTEXT - 1))
    error = deviation(fuse.attention(q, *caches[0], alibi, causal, **options)[:1], torch.softmax(scores, -1) @ v)
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def of_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - (q_idx + CONTEXT - 1))

    contestants: dict[str, Callable[[int], Any]] = {
        "minfer": lambda i: fuse.attention(q, *caches[i], alibi, causal, **options),
        "flex_attention": lambda i: compiled(q, *dense_caches[i], of_position, enable_gqa=True),
        "ours:plain": lambda i: minfer.attention_paged(q.transpose(1, 2), *caches[i], lengths, block_table=table, causal=True),
    }
    return contestants, sets, moved, error


# ---- first calls ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def starts() -> dict[str, dict[str, float]]:
    """Microseconds of first calls by kind and example."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ours:first_call", "ours:from_disk", "minfer"):  # the first writes what the others read
            command = [sys.executable, "-W", "ignore", "-m", __name__, STARTS[name], folder]
            done = subprocess.run(
                command, env=os.environ | {"MINFER_CACHE_DIR": f"{folder}/cache"}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-500:])
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def _time_starts(kind: str, folder: Path) -> dict[str, float]:
    x = torch.randn(64, 256, device=DEVICE)
    if kind == "loaded":
        minfer.relu2(x)
    else:
        fuse.pointwise(_plus_one)(x)
    torch.cuda.synchronize()
    found = {}
    calls = [*((name, example.fused(), tuple(example.draw(rows=64)), {}) for name, example in ROWS.items()), _attention_start()]
    for name, function, arguments, options in calls:
        begin = time.perf_counter()
        if kind == "loaded":
            function = fuse.load(folder / name)
            options = options | ({"slopes": slopes_of_heads()} if name == "alibi_paged" else {})
        function(*arguments, **options)
        torch.cuda.synchronize()
        found[name] = (time.perf_counter() - begin) * 1e6
        if kind == "compiled":
            example = arguments
            if name == "alibi_paged":
                example = dict(zip(("q", "k", "v"), arguments, strict=True)) | {x: options[x] for x in ("block_table", "seq_lens")}
            fuse.export(function, folder / name, [example])
    return found


def _plus_one(x: Tensor) -> Tensor:
    return x + 1


def _attention_start() -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    paged = PagedCache(2, 256)
    return "alibi_paged", fuse.AttentionFunction(alibi_of(slopes_of_heads()), causal), (paged.queries(), *paged.pages()), paged.options()


if __name__ == "__main__":
    print(json.dumps(_time_starts(sys.argv[1], Path(sys.argv[2]))))
