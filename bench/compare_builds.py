"""Two builds of minfer against each other: ``python -m bench.compare_builds OLD NEW [--families ..] [--seed N] [--out FILE]``.

OLD and NEW are folders that hold a package ``minfer`` each. A process runs each build, for two cannot be loaded into one; the processes
prepare the same cell and replay it in turn (A B A B), one at a time, as :mod:`minfer.measure.benchmarking` says: CUDA graphs, operands
rotated through three L2s. Cells are drawn by a seeded generator, so they are on no table. The ratio is old / new: above 1, the new build is
faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = 21


@dataclass(frozen=True)
class Cell:
    family: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options.items())


# ---- which cells -------------------------------------------------------------------------------------------------------------------


def multiple(rng: random.Random, low: int, high: int, of: int) -> int:
    """Uniform in the logarithm."""
    return max(of, round(math.exp(rng.uniform(math.log(low), math.log(high))) / of) * of)


def gemm_cells(rng: random.Random) -> Iterator[Cell]:
    for m in (1, 7, 16, 48, 96, 200, 384, 1000, 3000):
        yield Cell("gemm", {"m": m, "n": multiple(rng, 1024, 20000, 64), "k": multiple(rng, 1024, 12000, 64), "dtype": "bfloat16"})
    for m in (24, 700, 2000):
        yield Cell("gemm", {"m": m, "n": multiple(rng, 1024, 8000, 2), "k": multiple(rng, 1024, 8000, 2), "dtype": "float16", "c": True})
    yield Cell("gemm", {"m": 33, "n": 8192, "k": multiple(rng, 1024, 8000, 64), "dtype": "bfloat16", "gated": True})


def w4a16_cells(rng: random.Random) -> Iterator[Cell]:
    for m in (1, 2, 5, 8, 12, 16, 24, 40, 64, 130, 300, 1200):
        sizes = {"n": multiple(rng, 2048, 30000, 128), "k": multiple(rng, 2048, 16000, 128)}
        yield Cell("w4a16", {"m": m, **sizes, "w_format": "int4", "dtype": rng.choice(["bfloat16", "float16"])})
    for w_format in ("int4_zeros", "int4_perm", "int4_g32", "nf4", "mxfp4", "nvfp4", "int8", "fp8_e4m3"):
        for m in (1, 16):
            sizes = {"n": multiple(rng, 4096, 16000, 128), "k": multiple(rng, 4096, 9000, 128)}
            yield Cell("w4a16", {"m": m, **sizes, "w_format": w_format, "dtype": "bfloat16"})


def constant_cells(rng: random.Random) -> Iterator[Cell]:
    """Weights that the caller says are constant; a build that does not know the word is not told."""
    for w_format in ("int4", "int4_zeros", "int8"):
        for m in (1, 3, 8, 16, 32, 100):
            sizes = {"n": multiple(rng, 2048, 20000, 128), "k": multiple(rng, 2048, 12000, 128)}
            yield Cell("constant", {"m": m, **sizes, "w_format": w_format, "dtype": "bfloat16"})


def moe_cells(rng: random.Random) -> Iterator[Cell]:
    for tokens in (1, 4, 30, 200, 1000, 6000):
        sizes = {"hidden": multiple(rng, 1024, 5000, 128), "inter": multiple(rng, 512, 4000, 128)}
        experts, top_k = rng.choice([(8, 2), (32, 4), (64, 6), (128, 8)])
        for weights in ("bf16", "int4"):
            yield Cell("moe", {"tokens": tokens, **sizes, "experts": experts, "top_k": top_k, "weights": weights})


def routing_cells(rng: random.Random) -> Iterator[Cell]:
    for tokens in (1, 13, 300, 5000):
        experts, top_k = rng.choice([(8, 2), (64, 6), (128, 8), (256, 8)])
        sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": multiple(rng, 1024, 7000, 128)}
        for op in ("router_gemm", "sort", "combine"):
            yield Cell("routing", {"op": op, **sizes})


def prefill_cells(rng: random.Random) -> Iterator[Cell]:
    for head_dim in (64, 128, 192, 256):
        for options in ({}, {"causal": True}):
            length = multiple(rng, 500, 9000, 4)
            yield Cell("prefill", {"batch": max(1, 16384 // length), "q": length, "k": length, "head_dim": head_dim, **options})
    heads = {"head_dim": 128}
    yield Cell("prefill", {"batch": 1, "q": 8192, "k": 8192, **heads, "causal": True, "window_left": 1000})
    yield Cell("prefill", {"batch": 1, "q": 6000, "k": 6000, **heads, "causal": True, "softcap": 30.0})
    for kind in ("varlen", "paged", "paged_window", "fp8_e4m3", "int8", "int4"):
        for length in (multiple(rng, 300, 900, 4), multiple(rng, 2000, 6000, 4)):
            yield Cell("prefill", {"batch": max(1, 8192 // length), "q": length, "k": 2 * length, **heads, "causal": True, "kind": kind})


def decode_cells(rng: random.Random) -> Iterator[Cell]:
    for kv_format in ("16bit", "fp8_e4m3", "int8", "int4"):
        for batch, length in ((1, 1500), (1, 9000), (8, 3000), (16, 20000), (40, 700), (64, 4000)):
            heads_q, heads_kv = rng.choice([(32, 8), (64, 8), (28, 4), (40, 8)])
            sizes = {"batch": batch, "k": length, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": rng.choice([64, 128, 128, 256])}
            yield Cell("decode", {"kv_format": kv_format, **sizes, "page": rng.choice([0, 64, 64, 256])})
        usual = {"kv_format": kv_format, "batch": 16, "k": 6000, "heads_q": 32, "heads_kv": 8, "head_dim": 128}
        yield Cell("decode", {**usual, "page": 64, "window_left": 4000})
        if kv_format != "int4":  # whose pages are whole groups of 64 tokens
            yield Cell("decode", {**usual, "page": 16})


def cache_cells(rng: random.Random) -> Iterator[Cell]:
    for kv_format in ("16bit", "fp8_e4m3", "int8", "int4"):
        for tokens in (8, 64, 3000):
            yield Cell("cache", {"op": "append", "kv_format": kv_format, "tokens": tokens})
    for tokens in (16, 2000):
        yield Cell("cache", {"op": "merge", "tokens": tokens})


CELLS: dict[str, Callable[[random.Random], Iterator[Cell]]] = {
    "gemm": gemm_cells,
    "w4a16": w4a16_cells,
    "constant": constant_cells,
    "moe": moe_cells,
    "routing": routing_cells,
    "prefill": prefill_cells,
    "decode": decode_cells,
    "cache": cache_cells,
}


def cells_of(families: list[str], seed: int) -> list[Cell]:
    return [cell for family in families for cell in CELLS[family](random.Random(f"{seed}/{family}"))]


# ---- a cell in the process of a build ----------------------------------------------------------------------------------------------


def contest(cell: Cell) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """The call of a cell, on operands that the second function makes."""
    import minfer
    import torch

    o = cell.options
    torch.manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", dtype=torch.float32) * scale).to(dtype)

    if cell.family == "gemm":
        dtype = getattr(torch, o["dtype"])
        make = lambda: (normal(o["m"], o["k"], dtype=dtype), normal(o["n"], o["k"], dtype=dtype, scale=0.02))  # noqa: E731
        if o.get("gated"):
            return lambda x: minfer.gemm_gated(x[0], x[1].t()), make
        if o.get("c"):
            c = normal(o["m"], o["n"], dtype=dtype)
            return lambda x: minfer.gemm(x[0], x[1].t(), c=c, alpha=2.0, beta=3.0), make
        return lambda x: minfer.gemm(x[0], x[1].t()), make
    if cell.family in ("w4a16", "constant"):
        return quantised(o, normal, cell.family == "constant")
    if cell.family == "moe":
        return experts_of(o, normal)
    if cell.family == "routing":
        return routing(o, normal)
    if cell.family == "cache":
        return caches(o, normal)
    return attention(cell.family, o, normal)


def quantised(o: dict[str, Any], normal: Callable[..., Any], constant: bool) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    import inspect

    import minfer
    import torch

    dtype, (name, _, variant) = getattr(torch, o["dtype"]), o["w_format"].partition("_")
    w_format = "fp8_e4m3" if name == "fp8" else name
    bits = 8 if w_format in ("int8", "fp8_e4m3") else 4
    quantise, call = (minfer.quantize.quantize_w8, minfer.w8a16_gemm) if bits == 8 else (minfer.quantize.quantize_w4, minfer.w4a16_gemm)
    group = None if w_format in ("mxfp4", "nvfp4") else 32 if variant == "g32" else 128
    weight = quantise(normal(o["n"], o["k"], dtype=dtype, scale=0.02), group, format=w_format, clip=False)
    options = {"group_size": weight.group_size, f"w{bits}_format": w_format, "alpha": weight.alpha}
    if constant and "constant_weights" in inspect.signature(call).parameters:
        options["constant_weights"] = True
    if variant == "perm":
        options["perm"] = torch.randperm(o["k"], device="cuda").int()
    zeros = torch.full_like(weight.scales, 7) if variant == "zeros" else None

    def make() -> Any:
        return normal(o["m"], o["k"], dtype=dtype), weight.qweight.clone(), weight.scales.clone()

    return lambda x: call(*x, zeros, **options), make


def experts_of(o: dict[str, Any], normal: Callable[..., Any]) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    import minfer
    import torch

    tokens, hidden, inter, experts, top_k = (o[name] for name in ("tokens", "hidden", "inter", "experts", "top_k"))
    ids = torch.stack([torch.randperm(experts, device="cuda")[:top_k] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, top_k, device="cuda")
    if o["weights"] == "bf16":
        make = lambda: (  # noqa: E731
            normal(tokens, hidden),
            normal(experts, 2 * inter, hidden, scale=0.02),
            normal(experts, hidden, inter, scale=0.02),
        )
        return lambda x: minfer.moe_ffn(x[0], x[1], x[2], weights, ids), make

    def packed(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(-(2**31), 2**31 - 1, (experts, -(-n // 64), -(-k // 64), 512), device="cuda", dtype=torch.int32)
        return words, (torch.rand(experts, k // 128, n, device="cuda") * 0.01).bfloat16()

    def make() -> Any:
        return normal(tokens, hidden), *packed(2 * inter, hidden), *packed(hidden, inter)

    return lambda x: minfer.moe_ffn_w4a16(x[0], x[1], x[2], None, x[3], x[4], None, weights, ids, group_size=128), make


def routing(o: dict[str, Any], normal: Callable[..., Any]) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    import minfer
    import torch

    tokens, experts, top_k, hidden = (o[name] for name in ("tokens", "experts", "top_k", "hidden"))
    ids = torch.randint(0, experts, (tokens, top_k), device="cuda", dtype=torch.int32)
    weights = torch.rand(tokens, top_k, device="cuda")
    if o["op"] == "router_gemm":
        return lambda x: minfer.moe_router_gemm(x[0], x[1], top_k), lambda: (normal(tokens, hidden), normal(experts, hidden))
    if o["op"] == "sort":
        return lambda x: minfer.moe_sort(x[0], experts, weights=x[1]), lambda: (ids.clone(), weights.clone())
    inverse = minfer.moe_sort(ids, experts)[2]
    return lambda x: minfer.moe_combine(x[0], inverse, weights), lambda: (normal(tokens * top_k, hidden),)


def caches(o: dict[str, Any], normal: Callable[..., Any]) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    import minfer
    import torch

    tokens, heads, head_dim = o["tokens"], 8, 128
    if o["op"] == "merge":
        make = lambda: (  # noqa: E731
            [normal(tokens, 32, head_dim) for _ in range(3)],
            [normal(32, tokens, dtype=torch.float32) for _ in range(3)],
        )
        return lambda x: minfer.merge_attention_states(*x), make
    prompt = tokens > 64  # of one sequence; else a token each
    sequences = 1 if prompt else tokens
    cache = minfer.allocate_kv_cache(
        max(64, tokens // 64 + 1), 64, heads, head_dim, kv_format=o["kv_format"], device="cuda", batch=sequences
    )
    tokens_at = torch.arange(tokens, device="cuda")
    slots = tokens_at if prompt else tokens_at * 64 + tokens_at
    ends = torch.tensor([0, tokens], device="cuda", dtype=torch.int32) if prompt else None

    def append(x: Any) -> None:
        minfer.kv_cache_append(*x, cache.k, cache.v, slots, cu_seqlens=ends, **cache.scales())

    return append, lambda: (normal(tokens, heads, head_dim), normal(tokens, heads, head_dim))


def attention(family: str, o: dict[str, Any], normal: Callable[..., Any]) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    import minfer
    import torch

    heads_q, heads_kv, d, batch = o.get("heads_q", 32), o.get("heads_kv", 8), o["head_dim"], o["batch"]
    options = {name: o[name] for name in ("causal", "window_left", "softcap") if name in o}
    kind = o.get("kind", "")
    integers = dict(device="cuda", dtype=torch.int32)
    if family == "prefill" and kind == "":
        shapes = [(batch, o["q"], heads_q, d), *[(batch, o["k"], heads_kv, d)] * 2]
        return lambda x: minfer.attention(*x, **options), lambda: tuple(normal(*shape) for shape in shapes)
    lengths = (
        [max(1, round(o["k"] * (0.5 + i / batch))) for i in range(batch)] if family == "decode" or kind == "varlen" else [o["k"]] * batch
    )
    if kind == "varlen":
        ends = torch.tensor([0, *lengths], **integers).cumsum(0).int()
        total, longest = sum(lengths), max(lengths)
        make = lambda: (normal(total, heads_q, d), normal(total, heads_kv, d), normal(total, heads_kv, d))  # noqa: E731
        return lambda x: minfer.attention_varlen(*x, ends, ends, longest, longest, **options), make
    kv_format = o.get("kv_format", kind if not kind.startswith("paged") else "16bit")
    if kind == "paged_window":
        options["window_left"] = o["k"] // 3
    page, queries = o.get("page", 64), o.get("q", 1)
    longest = max(lengths)
    rows = page if page else -(-longest // 64) * 64
    columns = -(-longest // rows)
    table = torch.randperm(batch * columns, device="cuda").view(batch, columns).int() if page else None

    def make() -> Any:
        cache = minfer.allocate_kv_cache(batch * columns, rows, heads_kv, d, kv_format=kv_format, device="cuda", batch=batch)
        if kv_format == "16bit":
            for x in (cache.k, cache.v):
                x.normal_()
        elif kv_format == "fp8_e4m3":
            for x in (cache.k, cache.v):
                x.copy_(torch.randn(x.shape, device="cuda").to(x.dtype))
        else:
            low, high = (-127, 127) if kv_format == "int8" else (0, 255)
            for x in (cache.k, cache.v):
                x.copy_(torch.randint(low, high, x.shape, device="cuda", dtype=x.dtype))
            for x in (cache.k_scale, cache.v_scale):
                x.uniform_(0.001, 0.02)
        return normal(batch, queries, heads_q, d), cache.k, cache.v, cache.scales()

    seq_lens = torch.tensor(lengths, **integers)
    options = {"causal": True, **options}
    return lambda x: minfer.attention_paged(x[0], x[1], x[2], seq_lens, block_table=table, **x[3], **options), make


def serve() -> None:
    """A build's process: prepares the cells it is told to, replays them when it is told to."""
    import torch

    try:
        from minfer.measure.benchmarking import GraphTimer, estimate_us, rotation
    except ModuleNotFoundError:  # a build from before the package had folders
        from minfer.benchmarking import GraphTimer, estimate_us, rotation

    answer = lambda **x: print(json.dumps(x), file=sys.stdout, flush=True)  # noqa: E731
    timer = fn = sets = None
    for line in sys.stdin:
        told = json.loads(line)
        try:
            if told["what"] == "where":
                import minfer

                answer(file=minfer.__file__, cuda=minfer.build_info()["archs"])
            elif told["what"] == "prepare":
                timer = fn = sets = None
                torch.cuda.empty_cache()
                with torch.inference_mode():
                    fn, make = contest(Cell(told["family"], told["options"]))
                    sets = rotation(make, most=64)
                    timer = GraphTimer(fn, sets, estimate_us=estimate_us(fn, sets), target_us=600.0)
                    timer.replay_us()
                answer(ok=True)
            else:
                answer(us=timer.replay_us())
        except Exception as error:  # noqa: BLE001
            answer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())


class Build:
    def __init__(self, folder: str):
        self.folder = folder
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
            "MINFER_CACHE_DIR": "/nonexistent",
        }
        command = [sys.executable, __file__, "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        found = self.ask(what="where")
        if not Path(found.get("file", "")).is_relative_to(Path(folder).resolve()):
            sys.exit(f"compare_builds: {folder} holds no package minfer that can be imported: {found}")

    def ask(self, **told: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"compare_builds: the process of {self.folder} has ended")
        return json.loads(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs="*", help="two folders that hold a package minfer each")
    parser.add_argument("--families", default=",".join(CELLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the cells and their times")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    builds = [Build(folder) for folder in options.builds]
    rows = []
    for cell in cells_of(options.families.split(","), options.seed):
        answers = [build.ask(what="prepare", family=cell.family, options=cell.options) for build in builds]
        if any("error" in answer for answer in answers):
            print(f"{cell.family} {cell}: " + "; ".join(answer.get("error", "ran") for answer in answers), flush=True)
            continue
        samples = [[] for _ in builds]
        for i in range(ROUNDS):
            for j in (0, 1) if i % 2 == 0 else (1, 0):
                samples[j].append(builds[j].ask(what="replay")["us"])
        old, new = (sorted(x)[len(x) // 2] for x in samples)
        rows.append({"family": cell.family, "cell": cell.options, "old_us": old, "new_us": new, "ratio": old / new})
        print(f"{cell.family:8} {old:9.2f} {new:9.2f} {old / new:6.3f}  {cell}", flush=True)
    print()
    for family in dict.fromkeys(row["family"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["family"] == family]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{family:8} {len(ratios):3} cells, old / new: geomean {mean:.4f}, least {min(ratios):.3f}, most {max(ratios):.3f}")
    if options.out:
        Path(options.out).write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
