"""Chunks: the last queries of prompts over the keys before them in a paged cache, as chunked prefill, a cached prefix and the verification
of drafted tokens have them; 16-bit caches against FlashAttention-3, and every cache against the kernels that do not divide the keys of a
tile.

Shapes are drawn, so that no plan was made for them."""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import minfer
import torch
from minfer.measure.benchmarking import result_row
from minfer.reference import kv_cache as reference_kv_cache

from bench import harness
from bench.suites.attention_common import DTYPES, PEER_ERROR, checked_error
from bench.suites.attention_decode import PAGE, Caches, kv_bytes
from bench.suites.moe import MATRIX_RATE, READ_RATE, relative_error

PEERS = ("fa3",)
UNDIVIDED = "ours:undivided"  # the fastest of the kernels that leave a tile's keys to one CTA, or divide those of decode
SEED = 20  # of the shapes
COUNTS = {"16bit": 24, "fp8_e4m3": 6, "int8": 6, "int4": 6}
HEADS = ((32, 8), (64, 8), (28, 4), (16, 16), (8, 1))
QUERIES, KEYS, BATCHES = (16, 1024), (2048, 65536), (1, 1, 1, 2, 4)
MAX_BYTES = 1 << 32  # of 16-bit keys and values
CHECKED = 8  # queries of a sequence


def cells(dtypes: list[str]) -> list[dict[str, Any]]:
    """``m``: keys of each sequence, of which the last are the queries' own."""
    rnd, found = random.Random(SEED), []

    def between(low: int, high: int) -> int:
        return round(math.exp(rnd.uniform(math.log(low), math.log(high))))

    for kv_format, count in COUNTS.items():
        for number in range(count):
            heads_q, heads_kv = HEADS[number % len(HEADS)]
            queries, keys, batch = between(*QUERIES), between(*KEYS), rnd.choice(BATCHES)
            keys = min(max(keys, queries), MAX_BYTES // kv_bytes(batch, 1, heads_kv, 128))
            shape = dict(batch=batch, queries=queries, m=keys, heads_q=heads_q, heads_kv=heads_kv, head_dim=128, format=kv_format)
            found.append(dict(suite="chunks", model=f"{batch} x {queries}, {kv_format}", dtype="bf16") | shape)
    return found if "bf16" in dtypes else []


def pairs(queries: int, keys: int) -> float:
    """Of a query and a key that it sees, in a sequence."""
    return queries * (keys - queries) + queries * (queries + 1) / 2


class Chunks:
    """Sets of queries and caches."""

    def __init__(self, cell: dict[str, Any]):
        self.cell, self.dtype = cell, DTYPES[cell["dtype"]]
        batch, keys = cell["batch"], cell["m"]
        padded = cell | dict(m=-(-keys // PAGE) * PAGE)
        self.sets = harness.sets_for(kv_bytes(batch, keys, cell["heads_kv"], cell["head_dim"]))
        self.caches = Caches(padded, cell["format"], self.sets, PAGE)
        shape = (self.sets, batch, cell["queries"], cell["heads_q"], cell["head_dim"])
        self.q = torch.randn(shape, device="cuda").to(self.dtype)
        self.lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")

    def ours(self, i: int, kernel: str | None = None) -> torch.Tensor:
        cache = self.caches.sets[i]
        return minfer.attention_paged(
            self.q[i], cache.k, cache.v, self.lengths, block_table=self.caches.table, kernel=kernel, **cache.scales()
        )[0]

    def error(self) -> float:
        """Of some queries of the first sequence and of the last one, checked."""
        cell, out = self.cell, self.ours(0)
        queries, keys, worst = cell["queries"], cell["m"], 0.0
        rows = torch.linspace(0, queries - 1, min(CHECKED, queries), device="cuda").long()
        for b in {0, cell["batch"] - 1}:
            k, v = reference_kv_cache.gather(self.caches.sets[0], b, 0, keys, self.caches.table, torch.float64)
            what = f"{cell['format']}, sequence {b}: "
            worst = max(worst, checked_error(out[b][rows], self.q[0][b], k, v, rows, dict(causal=True), what))
        return worst

    def undivided(self) -> list[str]:
        """Kernels of the same types that take the call; those of the batch-invariant mode divide a tile's keys."""
        head_dim, kv_format = self.cell["head_dim"], self.cell["format"]
        reads = {"16bit": ("dense",), "int8": ("int8", "codes")}.get(kv_format, (kv_format, "codes"))
        own = [
            kernel["name"]
            for kernel in minfer.kernels("attention")
            if kernel["operation"] == "attention" and kernel["compiled"] and kernel["tile_k"] == head_dim and kernel["b_format"] in reads
            and kernel["ab_type"] == self.cell["dtype"] and kernel["arch_exact"]
        ]  # fmt: skip
        return [name for name in own if self._takes(name)]

    def _takes(self, kernel: str) -> bool:
        try:
            self.ours(0, kernel)
        except RuntimeError:
            return False
        return True

    def fa3(self) -> Any:
        import peer_ops

        peer_ops.load("_vllm_fa3_C")
        cell = self.cell
        batch, queries = cell["batch"], cell["queries"]
        ends = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device="cuda")
        rest = (ends, None, self.lengths, queries, cell["m"], self.caches.table, True, None, 0, None, None, None)
        return lambda i: peer_ops._fa3(self.q[i].flatten(0, 1), self.caches.sets[i].k, self.caches.sets[i].v, *rest)


def measure(cell: dict[str, Any], args: argparse.Namespace, results: Any, peers: list[str]) -> str:
    chunks = Chunks(cell)
    error = chunks.error()
    fns: dict[str, Any] = {"ours": chunks.ours}
    fns |= {name: lambda i, name=name: chunks.ours(i, name) for name in chunks.undivided()}
    failed: dict[str, str] = {}
    if "fa3" in peers and cell["format"] == "16bit":
        fns["fa3"] = chunks.fa3()
        ours = chunks.ours(0)
        if not (apart := relative_error(fns["fa3"](0).view_as(ours), ours)) <= PEER_ERROR:
            failed["fa3"] = f"it differs from ours by {apart:.3g}"
            del fns["fa3"]
    timings, not_captured = harness.measure(fns, chunks.sets, rounds=args.rounds, graph_us=args.graph_us)
    failed |= not_captured
    if "ours" not in timings:
        raise RuntimeError(failed["ours"])
    ours, own = timings["ours"], [t.us for name, t in timings.items() if name.startswith("attention_")]
    others = ({"fa3": timings["fa3"].us} if "fa3" in timings else {}) | ({UNDIVIDED: min(own)} if own else {})
    shape = {name: cell[name] for name in ("model", "batch", "queries", "m", "heads_q", "heads_kv", "head_dim", "format")}
    moved = 2 * cell["batch"] * cell["queries"] * cell["heads_q"] * (2 * cell["head_dim"] + 2)  # queries, outputs and lse
    flops = 4.0 * cell["batch"] * pairs(cell["queries"], cell["m"]) * cell["heads_q"] * cell["head_dim"]
    line = []
    for name, us in others.items():
        row = result_row(
            suite="chunks", op="attention_paged", kernel="", shape=shape, dtype=cell["dtype"], timing=ours, peer=name, peer_us=us,
            floor_us=max((chunks.caches.bytes + moved) / READ_RATE, flops / MATRIX_RATE), rel_err=error,
        )  # fmt: skip
        results.add(row)
        line.append(f"{name} {us:.1f} ({row['ratio']:.2f}x)")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    return f"chunks {cell['heads_q']}/{cell['heads_kv']} {cell['model']} of {cell['m']} keys: {ours.us:.1f} us; {', '.join(line)}"
