"""The evidence of the operators between the GEMMs: `python -m bench.suites fused --out bench/results/<device>/fused.json`.

rows: working sets of 256 MB; small: up to 64 rows, launch-bound; quant: 8-bit results; append: q, k and v of a decode step into every
cache; sample: draws; norm_gemm: a norm and the product behind it as one operator; decoder_block: what lies between two attentions, of
one or two tokens and int4 or e4m3 weights; decoder_layer: the same with one token's attention in front; origins: the tables of the systems
that this package descends from; decode_layer: a step of a Llama-3.1-8B layer.

Each cell: values against float64 (append and decode_layer: against the same operators one by one, and torch's), then CUDA-graph replays
of ours, of the peers and of a copy of the same bytes, in turn over rotated operands. The floor of a cell is its bytes at the device's read
bandwidth; the peer "copy" says what the device reaches on as many bytes, half read, half written.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from minfer._core.registry import device_properties
from minfer.measure.benchmarking import result_row
from minfer.reference import kv_cache as reference_kv_cache
from torch import Tensor

from bench import harness
from bench.suites import fused_decoder_block, fused_layer, fused_norm_gemm, fused_peers as peers_of
from bench.suites.fused_call import Call, deviation
from bench.suites.moe import CellResults, chosen_of

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
SUITES = ("rows", "small", "quant", "append", "sample", "norm_gemm", "decoder_block", "decoder_layer", "origins", "decode_layer")
COMPILING = ("torch_compile", "flashinfer", "quack")  # their kernels where they are first called
PEERS = ("copy", "torch", "torch_compile", "vllm", "flashinfer", "liger", "quack", "ours:separate", "ours:one_launch", "ours:two_launches")
WORKING_SET = 256 << 20  # bytes that a call of `rows` reads and writes
WIDTHS = (896, 4096, 8192, 16384, 65536, 262144)
SMALL_WIDTHS, SMALL_ROWS = (2048, 4096, 8192, 16384), (1, 8, 64)
QUANT_SHAPES = ((4096, 4096), (16384, 8192))
QUANTS = ("fp8_tensor", "fp8_token", "fp8_block128", "int8_token")
VOCABULARIES, BATCHES = (32000, 128256, 131072, 151936, 262144), (1, 8, 64, 128, 512)
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
EPS = 1e-6
CHECKED_ROWS = 8


# ---- rows ----------------------------------------------------------------------------------------------------------------------------


def _tensors(rows: int, width: int, dtype: torch.dtype, sets: int, device: str) -> list[Tensor]:
    return [torch.randn(rows, width, device=device).to(dtype) for _ in range(sets)]


def _sets(bytes_of_set: float, device: str) -> int:
    return harness.sets_for(int(bytes_of_set)) if device == "cuda" else 1


def _norm(add: bool) -> Callable[..., Call]:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        moved = (4 if add else 2) * 2.0 * rows * width
        sets = _sets(moved, device)
        xs, residuals = _tensors(rows, width, dtype, sets, device), _tensors(rows, width, dtype, sets, device) if add else []
        weight = torch.randn(width, device=device).to(dtype)

        def ours(i: int) -> Tensor:
            return minfer.add_rms_norm(xs[i], residuals[i], weight, EPS) if add else minfer.rms_norm(xs[i], weight, EPS)

        def error() -> float:
            x = xs[0][:CHECKED_ROWS].double()
            if add:
                x = (x + residuals[0][:CHECKED_ROWS].double()).to(dtype).double()
            want = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
            return deviation(ours(0)[:CHECKED_ROWS], want)

        peers = peers_of.add_rms_norm(xs, residuals, weight, EPS) if add else peers_of.rms_norm(xs, weight, EPS)
        return Call(ours, peers, moved, error, "rms_norm", sets)

    return make


def _layer_norm(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
    moved = 4.0 * rows * width
    sets = _sets(moved, device)
    xs, (weight, bias) = _tensors(rows, width, dtype, sets, device), torch.randn(2, width, device=device).to(dtype)

    def error() -> float:
        want = F.layer_norm(xs[0][:CHECKED_ROWS].double(), (width,), weight.double(), bias.double(), EPS)
        return deviation(minfer.layer_norm(xs[0], weight, bias, EPS)[:CHECKED_ROWS], want)

    peers = peers_of.of_torch(lambda x: F.layer_norm(x, (width,), weight, bias, EPS), xs)
    return Call(lambda i: minfer.layer_norm(xs[i], weight, bias, EPS), peers, moved, error, "layer_norm", sets)


def _elementwise(ours: Callable[[Tensor], Tensor], torch_form: Callable[[Tensor], Tensor], kernel: str, *, gated: bool = False):
    """An operator of one tensor: gated ones have rows of twice the width."""

    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        moved = (6.0 if gated else 4.0) * rows * width
        sets = _sets(moved, device)
        xs = _tensors(rows, width * (2 if gated else 1), dtype, sets, device)

        def error() -> float:
            return deviation(ours(xs[0])[:CHECKED_ROWS], torch_form(xs[0][:CHECKED_ROWS].double()))

        peers = peers_of.of_torch(torch_form, xs) | (peers_of.silu_and_mul(xs) if gated else {})
        return Call(lambda i: ours(xs[i]), peers, moved, error, kernel, sets)

    return make


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _embedding(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
    moved = 4.0 * rows * width
    sets = _sets(moved, device)
    tables = _tensors(rows, width, dtype, sets, device)
    ids = torch.randperm(rows, device=device)
    peers = peers_of.of_torch(lambda table: F.embedding(ids, table), tables)
    return Call(
        lambda i: minfer.embedding(ids, tables[i]),
        peers,
        moved,
        lambda: deviation(minfer.embedding(ids, tables[0]), tables[0][ids]),
        "embedding",
        sets,
    )


def _rope(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
    """``rows`` tokens of width / 128 heads of queries and a quarter as many of keys."""
    heads = width // HEAD_DIM
    heads_kv = max(heads // 4, 1)
    moved = 4.0 * rows * (heads + heads_kv) * HEAD_DIM
    sets = _sets(moved, device)
    qs = [torch.randn(rows, heads, HEAD_DIM, device=device).to(dtype) for _ in range(sets)]
    ks = [torch.randn(rows, heads_kv, HEAD_DIM, device=device).to(dtype) for _ in range(sets)]
    table, positions = minfer.rope_cache(500000.0, HEAD_DIM, max(rows, 2), device=device), torch.arange(rows, device=device)

    def error() -> float:
        q, own = qs[0][:CHECKED_ROWS].double(), qs[0].clone()
        minfer.rope(own, None, table, positions)
        cos, sin = table[: len(q)].double()[:, None].chunk(2, -1)
        a, b = q.chunk(2, -1)
        return deviation(own[: len(q)], torch.cat([a * cos - b * sin, b * cos + a * sin], -1))

    peers = peers_of.rope(qs, ks, table, positions)
    return Call(lambda i: minfer.rope(qs[i], ks[i], table, positions), peers, moved, error, "rope", sets)


def _hadamard(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
    block = min(width & -width, 32768)
    make = _elementwise(lambda x: minfer.hadamard(x, block), lambda x: minfer.reference.fused.hadamard(x, block), "hadamard")
    call = make(rows, width, dtype, device)
    call.peers = {}
    return call


OPERATORS: dict[str, Callable[..., Call]] = {
    "rms_norm": _norm(False),
    "add_rms_norm": _norm(True),
    "layer_norm": _layer_norm,
    "softmax": _elementwise(minfer.softmax, lambda x: x.softmax(-1), "softmax"),
    "silu_and_mul": _elementwise(minfer.silu_and_mul, _silu_and_mul, "gated_activation", gated=True),
    "gelu": _elementwise(minfer.gelu, F.gelu, "activation"),
    "embedding": _embedding,
    "rope": _rope,
    "hadamard": _hadamard,
}
BYTES_OF_ELEMENT = {"add_rms_norm": 8, "silu_and_mul": 6, "rope": 5}  # of a row's element, reads and writes; the others 4


# ---- 8-bit results -------------------------------------------------------------------------------------------------------------------


def _quantised(op: str, quant: str) -> Callable[..., Call]:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        gated = op == "silu_and_mul"
        moved = ((4.0 if gated else 2.0) + 1.0) * rows * width
        if quant == "fp8_block128":
            moved += 4.0 * rows * math.ceil(width / 128)
        sets = _sets(moved, device)
        xs = _tensors(rows, width * (2 if gated else 1), dtype, sets, device)
        weight = torch.randn(width, device=device).to(dtype)
        options: dict[str, Any] = {"quant": quant}
        if quant == "fp8_tensor":
            options["scale"] = torch.full((1,), 0.08, device=device)  # 448 of them are more than any result

        def ours(i: int) -> tuple[Tensor, Tensor]:
            return minfer.silu_and_mul(xs[i], **options) if gated else minfer.rms_norm(xs[i], weight, EPS, **options)

        def error() -> float:
            q, scales = ours(0)
            x = xs[0].double()
            want = _silu_and_mul(x) if gated else x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
            back = minfer.dequantize(q, scales, quant, dtype=torch.float32)
            return deviation(back, want)

        return Call(ours, peers_of.quantised(op, quant, xs, weight, EPS, options.get("scale")), moved, error, f"{op}_quantized", sets)

    return make


# ---- decode: between the GEMM of q, k and v and attention ----------------------------------------------------------------------------


def values_at(cache: minfer.KvCache, keys: bool, slots: Tensor) -> Tensor:
    """What the slots of a cache stand for, float32 [slots, heads_kv, head_dim]."""
    codes, scale = (cache.k, cache.k_scale) if keys else (cache.v, cache.v_scale)
    values = reference_kv_cache.dequantize(codes.contiguous(), scale, cache.kv_format, keys, torch.float32)
    return values[slots // codes.shape[1], slots % codes.shape[1]]


def _append(kv_format: str) -> Callable[..., Call]:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        page, sets = 64, 8 if device == "cuda" else 1
        table = minfer.rope_cache(500000.0, HEAD_DIM, 8192, device=device)
        weights = torch.randn(2, HEAD_DIM, device=device).to(dtype)
        qkvs = [torch.randn(rows, HEADS + 2 * HEADS_KV, HEAD_DIM, device=device).to(dtype) for _ in range(sets)]
        caches = [
            minfer.allocate_kv_cache(rows, page, HEADS_KV, HEAD_DIM, kv_format=kv_format, dtype=dtype, device=device, batch=rows)
            for _ in range(sets)
        ]
        slots = torch.arange(rows, device=device) * page + 5
        positions = torch.randint(0, 8192, (rows,), device=device)

        def ours(i: int) -> Tensor:
            cache = caches[i]
            return minfer.qk_norm_rope_append(qkvs[i], *weights, table, positions, cache.k, cache.v, slots, eps=EPS, **cache.scales())

        def separate(i: int) -> Tensor:
            q, k, v = qkvs[i].split([HEADS, HEADS_KV, HEADS_KV], 1)
            q, k = minfer.rms_norm(q, weights[0], EPS), minfer.rms_norm(k, weights[1], EPS)
            minfer.rope(q, k, table, positions)
            minfer.kv_cache_append(k, v, caches[i].k, caches[i].v, slots, **caches[i].scales())
            return q

        def error() -> float:
            """Of the queries, and of the keys and values that are stored: against our own operators, one after the other."""

            def stored(run: Callable[[int], Tensor]) -> list[Tensor]:
                for x in caches[0]:
                    if isinstance(x, Tensor) and not (kv_format == "fp8_e4m3" and x.dim() == 1):
                        x.view(torch.uint8).zero_()
                q = run(0)
                if kv_format == "int4":  # the tokens wait in 16 bits
                    return [q, caches[0].k_residual[:, 5].clone(), caches[0].v_residual[:, 5].clone()]
                return [q, *(values_at(caches[0], keys, slots) for keys in (True, False))]

            return max(deviation(have, want) for have, want in zip(stored(ours), stored(separate), strict=True))

        codes = {"16bit": 2.0, "fp8_e4m3": 1.0, "int8": 1.0, "int4": 2.0}[kv_format]  # int4's tokens wait in 16 bits
        moved = rows * HEAD_DIM * (2.0 * (HEADS + 2 * HEADS_KV) + 2.0 * HEADS + 2 * codes * HEADS_KV)
        peers = {"ours:separate": separate}
        if kv_format == "16bit":
            peers |= peers_of.norm_rope_append(qkvs, weights, table, positions, slots, caches, HEADS, HEADS_KV, EPS)
        return Call(ours, peers, moved, error, "qk_norm_rope_append", sets)

    return make


# ---- draws ---------------------------------------------------------------------------------------------------------------------------


def _sample(kind: str) -> Callable[..., Call]:
    options = {
        "argmax": dict(temperature=0.0),
        "all": dict(temperature=0.8),
        "top-k 50, top-p 0.9": dict(temperature=0.8, top_k=50, top_p=0.9),
        "top-p 0.9": dict(temperature=0.8, top_p=0.9),
    }[kind]

    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        moved = 2.0 * rows * width
        sets = _sets(moved, device)
        xs = [2 * x for x in _tensors(rows, width, dtype, sets, device)]

        def error() -> float:
            """Of the logprob of the token, which is among those that are kept."""
            ids, logprobs, _, _ = minfer.sample(xs[0], **options)
            x = xs[0].double()
            before = x > x.gather(1, ids[:, None])
            most = 1 if options["temperature"] == 0 else options.get("top_k", width)
            good = before.sum(1) < most
            if "top_p" in options:
                p = (x / options["temperature"]).masked_fill(x < x.topk(most).values[:, -1:], -math.inf).softmax(-1)
                good &= (p * before).sum(1) < options["top_p"] + 1e-3
            if not bool(good.all()):
                raise ArithmeticError("a token was drawn that is not kept")
            return deviation(logprobs, x.log_softmax(-1).gather(1, ids[:, None])[:, 0])

        return Call(lambda i: minfer.sample(xs[i], **options), peers_of.sample(kind, xs, options), moved, error, "sample", sets)

    return make


# ---- the tables of the systems that this package descends from -----------------------------------------------------------------------


def origins() -> list[tuple[str, int, int, Callable[..., Call]]]:
    """(what, rows, width, call)."""
    found = [("rms_norm", 2048, width, _norm(False)) for width in (896, 1536, 2048, 3584, 4096)]
    found += [("rope", tokens, 32 * HEAD_DIM, _rope) for tokens in (512, 1024, 2048, 4096, 8192)]
    found += [("silu_and_mul", 2048, width, OPERATORS["silu_and_mul"]) for width in (4096, 8960, 11008, 14336, 18944)]
    found += [("gelu", rows, 3072, OPERATORS["gelu"]) for rows in (128, 1024, 8192)]
    return found + fused_norm_gemm.origins()


# ---- cells ---------------------------------------------------------------------------------------------------------------------------


def cells(suites: list[str], dtypes: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(suite: str, what: str, rows: int, width: int, make: Callable[..., Call], dtype: str) -> None:
        found.append(dict(suite=suite, what=what, m=rows, width=width, make=make, dtype=dtype))

    for dtype in dtypes:
        for what, make in OPERATORS.items():
            for width in WIDTHS if what != "rope" else (4096,):
                if "rows" in suites:
                    add("rows", what, WORKING_SET // (BYTES_OF_ELEMENT.get(what, 4) * width), width, make, dtype)
            for width in SMALL_WIDTHS:
                for rows in SMALL_ROWS:
                    if "small" in suites:
                        add("small", what, rows, width, make, dtype)
        for rows, width in QUANT_SHAPES if "quant" in suites else ():
            for what in ("rms_norm", "silu_and_mul"):
                for quant in QUANTS:
                    add("quant", f"{what} {quant}", rows, width, _quantised(what, quant), dtype)
        for kv_format in ("16bit", "fp8_e4m3", "int8", "int4") if "append" in suites else ():
            for batch in (1, 8, 64, 256):
                add("append", f"qk_norm_rope_append {kv_format}", batch, (HEADS + 2 * HEADS_KV) * HEAD_DIM, _append(kv_format), dtype)
        for kind in ("argmax", "all", "top-k 50, top-p 0.9", "top-p 0.9") if "sample" in suites else ():
            for vocabulary in VOCABULARIES:
                for batch in BATCHES:
                    add("sample", f"sample, {kind}", batch, vocabulary, _sample(kind), dtype)
        for what, rows, width, make in fused_norm_gemm.cells() if "norm_gemm" in suites else ():
            add("norm_gemm", what, rows, width, make, dtype)
        for what, rows, width, make in fused_decoder_block.cells() if "decoder_block" in suites else ():
            add("decoder_block", what, rows, width, make, dtype)
        for what, rows, width, make in fused_decoder_block.layer_cells() if "decoder_layer" in suites else ():
            add("decoder_layer", what, rows, width, make, dtype)
        for what, rows, width, make in origins() if "origins" in suites else ():
            add("origins", what, rows, width, make, dtype)
        if "decode_layer" in suites:
            for batch in fused_layer.BATCHES:
                add("decode_layer", "decode step of a Llama-3.1-8B layer", batch, 4096, fused_layer.make, dtype)
    return found


class FusedResults(CellResults):
    @staticmethod
    def key(row: dict[str, Any]) -> tuple:
        shape = row["shape"]
        return row["suite"], row["peer"], row["dtype"], shape["what"], shape["m"], shape["width"]


def copy_of(moved: float, sets: int) -> Callable[[int], Any]:
    """A copy that moves as many bytes."""
    sources = [torch.empty(max(int(moved / 2), 16), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    to = [torch.empty_like(x) for x in sources]
    return lambda i: to[i].copy_(sources[i])


# Of errors; else two roundings.
LIMITS = {
    "quant": 0.08,
    "append": 0.08,
    "sample": 1e-4,
    "norm_gemm": 0.03,
    "decoder_block": 0.05,
    "decoder_layer": 0.05,
    "decode_layer": 0.05,
}


def is_product(what: str) -> bool:
    """Whether an operator reads weights, beside which its rows are few bytes."""
    return what.startswith("rms_norm") and "gemm" in what


def limit_of(cell: dict[str, Any], dtype: torch.dtype) -> float:
    """Of a cell's error."""
    return LIMITS["norm_gemm"] if is_product(cell["what"]) else LIMITS.get(cell["suite"], 2 * torch.finfo(dtype).eps)


def measure(cell: dict[str, Any], args: argparse.Namespace, results: FusedResults, peers: list[str], budget: harness.Budget) -> str:
    dtype = DTYPES[cell["dtype"]]
    torch.compiler.reset()  # it compiles a function for eight shapes, and calls torch's operators for the next ones
    call: Call = cell["make"](cell["m"], cell["width"], dtype, "cuda")
    error = call.error()
    if not error <= limit_of(cell, dtype):
        raise ArithmeticError(f"relative error {error:.3g}")
    contestants: dict[str, Callable[[int], Any]] = {"minfer": call.ours}
    failed: dict[str, str] = {}
    if "copy" in peers and cell["suite"] in ("rows", "small", "quant", "origins") and not is_product(cell["what"]):
        contestants["copy"] = copy_of(call.bytes, call.sets)
    for name, fn in call.peers.items():
        if name not in peers or budget.spent(name):
            continue
        begin = time.monotonic()
        try:
            fn(0)
            torch.cuda.synchronize()
            contestants[name] = fn
        except Exception as why:  # noqa: BLE001  a peer's library may raise anything
            harness.forget_error()
            failed[name] = f"{type(why).__name__}: {why}"
        budget.charge(name, time.monotonic() - begin)
    timings, not_captured = harness.measure(contestants, call.sets, rounds=args.rounds, graph_us=args.graph_us)
    failed |= not_captured
    if "minfer" not in timings:
        raise RuntimeError(failed["minfer"])
    own = timings["minfer"]
    for name, timing in timings.items():
        if name != "minfer":
            results.add(
                result_row(
                    suite=cell["suite"], op=cell["what"].split(",")[0].split()[0], kernel=call.kernel, dtype=cell["dtype"], timing=own,
                    shape=dict(what=cell["what"], m=cell["m"], width=cell["width"]), peer=name, peer_us=timing.us,
                    floor_us=call.bytes / device_properties()["read_bandwidth"], rel_err=error,
                )
            )  # fmt: skip
    line = [f"{name} {timing.us:.2f}" for name, timing in timings.items()]
    line += [f"{name} failed: {why[:80]}" for name, why in failed.items()]
    return f"{cell['suite']} {cell['what']} {cell['m']} x {cell['width']} {cell['dtype']}, us: {', '.join(line)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/fused.json")
    parser.add_argument("--dtypes", default="bf16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--only", default="", help="cells whose operator has this in its name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph-us", type=float, default=400.0)
    parser.add_argument("--compile-seconds", type=float, default=240.0, help="that a peer may take to compile over the whole run")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def main(args: argparse.Namespace) -> int:
    suites, dtypes = chosen_of(args.suite, "suite", SUITES), chosen_of(args.dtypes, "dtypes", tuple(DTYPES))
    chosen = [cell for cell in cells(suites, dtypes) if args.only in cell["what"]]
    if args.dry_run:
        for cell in chosen:
            print({name: value for name, value in cell.items() if name != "make"})
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    peers = chosen_of(args.peers, "peers", PEERS) if args.peers else []
    results, budget = FusedResults(args.out, args.commit), harness.Budget(dict.fromkeys(COMPILING, args.compile_seconds))
    begin, wrong = time.monotonic(), []
    for cell in chosen:
        if time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            print(measure(cell, args, results, peers, budget), flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            torch.cuda.synchronize()
            wrong.append(f"{cell['what']}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s; not measured for time: {budget.left_out}")
    return 1 if wrong else 0
