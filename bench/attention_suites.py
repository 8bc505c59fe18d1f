"""The evidence of attention: prefill against cuDNN, FlashAttention-3 and -4, what masks, lengths and caps cost, and decode over KV caches
against cuDNN, FlashAttention-3 and FlashInfer. Values first, then ours and the peers timed in turn on random data."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import minfer
import torch
from minfer import reference_kv_cache
from minfer.benchmarking import result_row
from moe_suites import MATRIX_RATE, READ_RATE, CellResults, chosen_of, relative_error

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
HEADS = {64: ((32, 32), (32, 8)), 128: ((32, 32), (32, 8)), 256: ((16, 16),)}
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384  # of all sequences together, or one sequence that is longer
SUITES = ("prefill", "variants", "decode")
VARIANTS = ("varlen", "window", "softcap", "sinks")
PEERS = ("cudnn", "fa3", "flashinfer", "fa4")
OF_SUITE = {"prefill": ("cudnn", "fa3", "fa4"), "variants": (), "decode": ("cudnn", "fa3", "flashinfer")}

# Decode: one query of each sequence, head_dim 128. Cells are measured in this order.
DECODE_HEADS = ((32, 8), (64, 8), (32, 32))
BATCHES = (1, 4, 8, 16, 64, 256)
CONTEXTS = (512, 1024, 4096, 8192, 32768, 131072)
PAGE = 64
KV_BYTES = 1 << 33  # of 16-bit keys and values, at most
QUANTISED = ("fp8_e4m3", "int8", "int4")
QUANTISED_BYTES = 128e6  # of 16-bit keys and values, from which on codes are measured, too; and with one sequence
LAYOUTS = (16, 256, None)  # page sizes against PAGE; None: contiguous
LAYOUT_CELLS = ((1, 32768), (8, 4096), (16, 8192), (64, 1024))  # batch, context
F16_CELLS = ((1, 8192), (8, 4096), (16, 1024), (64, 4096), (256, 1024))
PEER_ERROR = 0.02  # of a peer against ours: that it computes the same
DECODE_SECONDS = 200.0  # after which no decode cell is started


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/attention.json")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--head-dims", default=",".join(map(str, HEADS)), help=f"of {', '.join(map(str, HEADS))}")
    parser.add_argument("--seqlens", default=",".join(map(str, SEQLENS)), help="comma separated; of prefill")
    parser.add_argument("--peers", default=",".join(PEERS[:3]), help=f"of {', '.join(PEERS)}")
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
    return found + (decode_cells(dtypes) if "decode" in suites and 128 in head_dims else [])


def decode_cells(dtypes: list[str]) -> list[dict[str, Any]]:
    """What says most first: all sizes of the first heads, layouts, float16, then the other heads. ``m`` is the context."""

    def cell(dtype: str, heads: tuple[int, int], batch: int, context: int, **more: Any) -> dict[str, Any]:
        name = dict(suite="decode", model=f"batch {batch}", m=context, batch=batch, dtype=dtype)
        return name | dict(head_dim=128, heads_q=heads[0], heads_kv=heads[1]) | more

    found = []
    for heads in DECODE_HEADS if "bf16" in dtypes else ():
        sizes = [(b, n) for n in CONTEXTS for b in BATCHES if kv_bytes(b, n, heads[1], 128) <= KV_BYTES]
        found += [cell("bf16", heads, *size) for size in sizes]
        if heads == DECODE_HEADS[0]:
            found += [cell("bf16", heads, *size, layouts=LAYOUTS) for size in LAYOUT_CELLS]
            found += [cell("f16", heads, *size) for size in F16_CELLS if "f16" in dtypes]
    if "bf16" not in dtypes:
        found += [cell("f16", DECODE_HEADS[0], *size) for size in F16_CELLS]
    return found


def kv_bytes(batch: int, context: int, heads_kv: int, head_dim: int) -> int:
    """Of 16-bit keys and values."""
    return 4 * batch * context * heads_kv * head_dim


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


# ---- decode ------------------------------------------------------------------------------------------------------------------------


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

    @staticmethod
    def _fill(cache: minfer.KvCache) -> None:
        for codes in (cache.k, cache.v):
            if cache.kv_format == "16bit":
                codes.normal_()
            elif cache.kv_format == "fp8_e4m3":
                for part in codes.view(torch.uint8).view(-1).split(1 << 28):
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


def checked_error(caches: Caches, q: torch.Tensor, out: torch.Tensor, cell: dict[str, Any]) -> float:
    """Of the first and the last sequence against float64; at most twice that of torch in 16 bits, plus one rounding."""
    errors = []
    for b in {0, cell["batch"] - 1}:
        k, v = reference_kv_cache.gather(caches.sets[0], b, 0, cell["m"], caches.table, torch.float64)
        row = torch.zeros(1, dtype=torch.long, device="cuda")
        truth, yardstick = (truth_of(q[b : b + 1], k, v, row, dict(causal=True), dtype) for dtype in (torch.float64, q.dtype))
        error = relative_error(out[b : b + 1], truth)
        limit = 2 * relative_error(yardstick, truth) + torch.finfo(q.dtype).eps / 2
        if not error <= limit:
            raise ArithmeticError(f"{caches.sets[0].kv_format}, sequence {b}: relative error {error:.3g}, at most {limit:.3g}")
        errors.append(error)
    return max(errors)


def decode_peers(caches: Caches, q: list[torch.Tensor], seq_lens: torch.Tensor, cell: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """name -> function of a set, or the error of getting ready."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, context, heads_q, heads_kv, head_dim = (cell[name] for name in ("batch", "m", "heads_q", "heads_kv", "head_dim"))

    def contiguous(i: int):  # the same memory, its pages taken as they lie
        return (x.view(batch, context, heads_kv, head_dim) for x in (caches.sets[i].k, caches.sets[i].v))

    def cudnn(i: int):
        k, v = (x.transpose(1, 2) for x in contiguous(i))
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
                ours = minfer.attention_paged(q[0], *contiguous(0), seq_lens)[0] if name == "cudnn" else caches.run(q[0], seq_lens, 0)
                error = relative_error(found[name](0).reshape(ours.shape), ours)
                if not error <= PEER_ERROR:
                    found[name] = f"it differs from ours by {error:.3g}"
            except Exception as error:  # noqa: BLE001  a peer's library may raise anything
                torch.cuda.synchronize()
                found[name] = f"{type(error).__name__}: {error}"
    return found


def measure_decode(cell: dict[str, Any], args: argparse.Namespace, results, peers: list[str]) -> str:
    """Ours in 16 bits against the peers; codes and other layouts against ours in 16 bits and pages of PAGE."""
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
    errors, fns = {}, {}
    for name, caches in contestants.items():
        errors[name] = checked_error(caches, q[0], caches.run(q[0], seq_lens, 0), cell)
        fns[name] = lambda i, caches=caches: caches.run(q[i], seq_lens, i)
    others = {} if layouts else decode_peers(contestants["ours"], q, seq_lens, cell, peers)
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
            suite="decode", op="attention_paged", kernel=decode_kernel(cell, kv_format), dtype=cell["dtype"], timing=timing, peer=peer,
            peer_us=peer_us, floor_us=floor, rel_err=errors[name], shape=shape | model | dict(format=kv_format, page=page),
        )  # fmt: skip
        results.add(row)
        shown, us = (peer, peer_us) if name == "ours" else (name, timing.us)
        line.append(f"{shown} {us:.1f} ({row['ratio']:.2f}x)")

    for name, timing in timings.items():
        if name in others:
            add("ours", base, name, timing.us, "16bit", PAGE)
        elif name in quantised:
            add(name, timing, "ours:16bit", base.us, name, PAGE, model=f"{cell['model']}, {name}")
        elif name != "ours":
            page = next(page for page in layouts if layout_name(page) == name)
            add(name, timing, f"ours:{layout_name(PAGE)}", base.us, "16bit", page, model=f"{cell['model']}, {name}")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    head = f"decode {cell['dtype']} {heads_q}/{heads_kv} {cell['model']} x {context}"
    return f"{head}: {base.us:.1f} us, {contestants['ours'].bytes / base.us / 1e6:.2f} TB/s; {', '.join(line)}"


def decode_kernel(cell: dict[str, Any], kv_format: str) -> str:
    b_format = "dense" if kv_format == "16bit" else kv_format
    own = dict(ab_type=cell["dtype"], b_format=b_format, tile_k=cell["head_dim"], schedule="split_kv")
    return next(kernel["name"] for kernel in minfer.kernels("attention") if own.items() <= kernel.items())


class AttentionResults(CellResults):
    """Rows are kept cell by cell: the dtype and the heads tell cells apart, too; decode's models name batch, format and layout."""

    @staticmethod
    def key(row: dict[str, Any]) -> tuple:
        shape = row["shape"]
        return row["suite"], row["peer"], row["dtype"], *(shape[n] for n in ("model", "m", "head_dim", "heads_q", "heads_kv"))


def with_modules(peers: list[str], suites: set[str]) -> list[str]:
    """Those whose modules are here; says which are not."""
    for needed, module in (({"fa3", "fa4", "flashinfer"}, "peer_ops"), ({"flashinfer"}, "flashinfer")):
        wanted = needed & set(peers) & {peer for suite in suites for peer in OF_SUITE[suite]}
        if not wanted:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  flashinfer's own imports may raise anything
            print(f"{', '.join(sorted(wanted))}: left out, {type(error).__name__}: {error}")
            peers = [peer for peer in peers if peer not in wanted]
    return peers


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
    peers = with_modules(peers, {cell["suite"] for cell in chosen})
    results = AttentionResults(args.out, args.commit)
    begin, decode_begin, wrong = time.monotonic(), None, []
    for cell in chosen:
        if cell["suite"] == "decode" and decode_begin is None:
            decode_begin = time.monotonic()
        late = decode_begin is not None and time.monotonic() - decode_begin > DECODE_SECONDS
        if late or time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            own = [peer for peer in peers if peer in OF_SUITE[cell["suite"]]]
            print((measure_decode if cell["suite"] == "decode" else measure)(cell, args, results, own), flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            torch.cuda.synchronize()
            wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0
