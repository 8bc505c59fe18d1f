"""Decode: one query of each sequence over KV caches, 16-bit ones against cuDNN, FlashAttention-3 and FlashInfer, codes against 16 bits."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import minfer
import torch
from minfer.measure.benchmarking import result_row
from minfer.reference import kv_cache as reference_kv_cache

from bench import harness
from bench.suites.attention_common import DTYPES, PEER_ERROR, checked_error, decode_kernel
from bench.suites.moe import MATRIX_RATE, READ_RATE, relative_error

PEERS = ("cudnn", "fa3", "flashinfer")
# head_dim 128. Cells are measured in this order.
HEADS = ((32, 8), (64, 8), (32, 32))
BATCHES = (1, 4, 8, 16, 64, 256)
CONTEXTS = (512, 1024, 4096, 8192, 32768, 131072)
PAGE = 64
KV_BYTES = 1 << 33  # of 16-bit keys and values, at most
QUANTISED = ("fp8_e4m3", "int8", "int4")
QUANTISED_BYTES = 128e6  # of 16-bit keys and values, from which on codes are measured, too; and with one sequence
LAYOUTS = (16, 256, None)  # page sizes against PAGE; None: contiguous
LAYOUT_CELLS = ((1, 32768), (8, 4096), (16, 8192), (64, 1024))  # batch, context
F16_CELLS = ((1, 8192), (8, 4096), (16, 1024), (64, 4096), (256, 1024))
AS_THEY_LIE = "as they lie"  # what cuDNN, which reads no pages, is compared with
SECONDS = 200.0  # after which no cell is started


def cells(dtypes: list[str]) -> list[dict[str, Any]]:
    """What says most first: all sizes of the first heads, layouts, float16, then the other heads. ``m`` is the context."""

    def cell(dtype: str, heads: tuple[int, int], batch: int, context: int, **more: Any) -> dict[str, Any]:
        name = dict(suite="decode", model=f"batch {batch}", m=context, batch=batch, dtype=dtype)
        return name | dict(head_dim=128, heads_q=heads[0], heads_kv=heads[1]) | more

    found = []
    for heads in HEADS if "bf16" in dtypes else ():
        sizes = [(b, n) for n in CONTEXTS for b in BATCHES if kv_bytes(b, n, heads[1], 128) <= KV_BYTES]
        found += [cell("bf16", heads, *size) for size in sizes]
        if heads == HEADS[0]:
            found += [cell("bf16", heads, *size, layouts=LAYOUTS) for size in LAYOUT_CELLS]
            found += [cell("f16", heads, *size) for size in F16_CELLS if "f16" in dtypes]
    if "bf16" not in dtypes:
        found += [cell("f16", HEADS[0], *size) for size in F16_CELLS]
    return found


def kv_bytes(batch: int, context: int, heads_kv: int, head_dim: int) -> int:
    """Of 16-bit keys and values."""
    return 4 * batch * context * heads_kv * head_dim


def layout_name(page: int | None) -> str:
    return "contiguous" if page is None else f"pages of {page}"


class Caches:
    """Sets of caches of one format and size, filled with random numbers, and a table of their pages in random order; one for all sets."""

    def __init__(self, cell: dict[str, Any], kv_format: str, sets: int, page: int | None):
        batch, context, heads_kv, head_dim = cell["batch"], cell["m"], cell["heads_kv"], cell["head_dim"]
        self.rows = context if page is None else page
        self.pages = batch * context // self.rows
        options = dict(kv_format=kv_format, dtype=DTYPES[cell["dtype"]], device="cuda", batch=sets * batch)
        whole = minfer.allocate_kv_cache(sets * self.pages, self.rows, heads_kv, head_dim, **options)
        self._fill(whole)
        self.table = None if page is None else torch.randperm(self.pages, device="cuda").to(torch.int32).view(batch, -1)

        def own(name: str, x: Any, i: int) -> Any:
            if not isinstance(x, torch.Tensor) or x.dim() == 1:  # the format's name, scales of heads
                return x
            count = batch if name.endswith("residual") else self.pages
            return x[i * count : (i + 1) * count]

        self.sets = [type(whole)(**{name: own(name, x, i) for name, x in whole._asdict().items()}) for i in range(sets)]
        one = self.sets[0]
        self.bytes = sum(x.numel() * x.element_size() for x in (one.k, one.v, one.k_scale, one.v_scale) if x is not None)

    def as_they_lie(self) -> Caches:
        """The same memory, its pages taken for a contiguous cache; of 16 bits."""
        other = copy.copy(self)
        other.table = None

        def whole(x: torch.Tensor) -> torch.Tensor:
            return x.view(self.table.shape[0], -1, *x.shape[2:])

        other.sets = [one._replace(k=whole(one.k), v=whole(one.v)) for one in self.sets]
        return other

    @staticmethod
    def _fill(cache: minfer.KvCache) -> None:
        for codes in (cache.k, cache.v):
            if cache.kv_format == "16bit":
                codes.normal_()
            elif cache.kv_format == "fp8_e4m3":
                for part in codes.view(torch.uint8).as_strided((codes.numel(),), (1,)).split(1 << 28):  # whatever their order
                    part.copy_(torch.randn(part.numel(), dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8))
            else:
                codes.view(torch.uint8).random_(0, 256)
        if cache.kv_format == "int4":  # values of about 1: scales, and minima behind them
            for scales, minima in (cache.k_scale.unbind(3), cache.v_scale.chunk(2, 2)):
                scales.uniform_(0.06, 0.19)
                minima.normal_(-1.0, 0.5)
        elif cache.kv_format == "int8":
            for scale in (cache.k_scale, cache.v_scale):
                scale.uniform_(0.5 / 64, 1.5 / 64)

    def run(self, q: torch.Tensor, seq_lens: torch.Tensor, i: int) -> torch.Tensor:
        cache = self.sets[i]
        return minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=self.table, **cache.scales())[0]


def worst_error(caches: Caches, q: torch.Tensor, out: torch.Tensor, cell: dict[str, Any]) -> float:
    """Of the first and the last sequence, checked."""
    errors = []
    for b in {0, cell["batch"] - 1}:
        k, v = reference_kv_cache.gather(caches.sets[0], b, 0, cell["m"], caches.table, torch.float64)
        row, what = torch.zeros(1, dtype=torch.long, device="cuda"), f"{caches.sets[0].kv_format}, sequence {b}: "
        errors.append(checked_error(out[b : b + 1], q[b : b + 1], k, v, row, dict(causal=True), what))
    return max(errors)


def ready_peers(caches: Caches, q: list[torch.Tensor], seq_lens: torch.Tensor, cell: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """name -> function of a set, or the error of getting ready."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, context, heads_q, heads_kv, head_dim = (cell[name] for name in ("batch", "m", "heads_q", "heads_kv", "head_dim"))

    contiguous = caches.as_they_lie()

    def cudnn(i: int):
        k, v = (x.transpose(1, 2) for x in (contiguous.sets[i].k, contiguous.sets[i].v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q[i].view(batch, 1, heads_q, head_dim).transpose(1, 2), k, v, enable_gqa=heads_q != heads_kv
            )

    def make_fa3():
        import peer_ops

        sizes = (batch, heads_q, heads_kv, head_dim)
        plan = peer_ops.fa3_decode_plan(*sizes, seq_lens, context, caches.rows, q[0].dtype)
        # fa3_decode() makes these in every call, a launch that is none of the peer's.
        ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        rest = (ends, None, seq_lens, 1, context, caches.table, True, None, 0, plan, None, None)
        return lambda i: peer_ops._fa3(q[i], caches.sets[i].k, caches.sets[i].v, *rest)

    def make_flashinfer():
        import peer_ops

        sizes = (batch, heads_q, heads_kv, head_dim)
        plan = peer_ops.flashinfer_decode_plan(*sizes, caches.rows, caches.table, seq_lens, q[0].dtype)
        return lambda i: peer_ops.flashinfer_decode(plan, q[i], caches.sets[i].k, caches.sets[i].v)

    found: dict[str, Any] = {}
    for name, ready in (("cudnn", lambda: cudnn), ("fa3", make_fa3), ("flashinfer", make_flashinfer)):
        if name in peers:
            try:
                found[name] = ready()
                ours = (contiguous if name == "cudnn" else caches).run(q[0], seq_lens, 0)
                error = relative_error(found[name](0).reshape(ours.shape), ours)
                if not error <= PEER_ERROR:
                    found[name] = f"it differs from ours by {error:.3g}"
            except Exception as error:  # noqa: BLE001  a peer's library may raise anything
                torch.cuda.synchronize()
                found[name] = f"{type(error).__name__}: {error}"
    return found


def measure(cell: dict[str, Any], args: argparse.Namespace, results, peers: list[str]) -> str:
    """Ours in 16 bits against the peers, over what they read; codes and other layouts against ours in 16 bits and pages of PAGE."""
    batch, context, heads_q, heads_kv, head_dim = (cell[name] for name in ("batch", "m", "heads_q", "heads_kv", "head_dim"))
    dtype, kv = DTYPES[cell["dtype"]], kv_bytes(batch, context, heads_kv, head_dim)
    layouts = cell.get("layouts", ())
    quantised = QUANTISED if cell["dtype"] == "bf16" and not layouts and (kv >= QUANTISED_BYTES or batch == 1) else ()
    sets = harness.sets_for(kv // 4 if quantised else kv)  # int4 is a little more than a quarter
    q = list(torch.randn(sets, batch, heads_q, head_dim, device="cuda").to(dtype))
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    contestants = {"ours": Caches(cell, "16bit", sets, PAGE)}
    contestants |= {layout_name(page): Caches(cell, "16bit", sets, page) for page in layouts}
    contestants |= {kv_format: Caches(cell, kv_format, sets, PAGE) for kv_format in quantised}
    if "cudnn" in peers and not layouts:
        contestants[AS_THEY_LIE] = contestants["ours"].as_they_lie()
    errors, fns = {}, {}
    for name, caches in contestants.items():
        errors[name] = worst_error(caches, q[0], caches.run(q[0], seq_lens, 0), cell)
        fns[name] = lambda i, caches=caches: caches.run(q[i], seq_lens, i)
    others = {} if layouts else ready_peers(contestants["ours"], q, seq_lens, cell, peers)
    failed = {name: fn for name, fn in others.items() if isinstance(fn, str)}
    fns |= {name: fn for name, fn in others.items() if name not in failed}
    timings, not_captured = harness.measure(fns, sets, rounds=args.rounds, graph_us=args.graph_us)
    failed |= not_captured
    if "ours" not in timings:
        raise RuntimeError(failed["ours"])
    line, base = [], timings["ours"]
    shape = {name: cell[name] for name in ("model", "batch", "m", "heads_q", "heads_kv", "head_dim")}
    outside = 2 * batch * heads_q * (2 * head_dim + 2)  # queries, outputs and lse

    def add(name: str, timing, peer: str, peer_us: float, kv_format: str, page: int | None, **model: str) -> None:
        floor = max((contestants[name].bytes + outside) / READ_RATE, 4.0 * batch * context * heads_q * head_dim / MATRIX_RATE)
        row = result_row(
            suite="decode", op="attention_paged", kernel=decode_kernel(cell["dtype"], head_dim, kv_format), dtype=cell["dtype"],
            timing=timing, peer=peer, peer_us=peer_us, floor_us=floor, rel_err=errors[name],
            shape=shape | model | dict(format=kv_format, page=page),
        )  # fmt: skip
        results.add(row)
        shown, us = (name, timing.us) if peer.startswith("ours:") else (peer, peer_us)
        line.append(f"{shown} {us:.1f} ({row['ratio']:.2f}x)")

    for name, timing in timings.items():
        if name == "cudnn":
            add(AS_THEY_LIE, timings[AS_THEY_LIE], name, timing.us, "16bit", None)
        elif name in others:
            add("ours", base, name, timing.us, "16bit", PAGE)
        elif name in quantised:
            add(name, timing, "ours:16bit", base.us, name, PAGE, model=f"{cell['model']}, {name}")
        elif name in map(layout_name, layouts):
            page = next(page for page in layouts if layout_name(page) == name)
            add(name, timing, f"ours:{layout_name(PAGE)}", base.us, "16bit", page, model=f"{cell['model']}, {name}")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    head = f"decode {cell['dtype']} {heads_q}/{heads_kv} {cell['model']} x {context}"
    return f"{head}: {base.us:.1f} us, {contestants['ours'].bytes / base.us / 1e6:.2f} TB/s; {', '.join(line)}"
