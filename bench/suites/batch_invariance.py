"""The evidence of the batch-invariant mode: `python -m bench.suites batch_invariance --out bench/results/<device>/batch_invariance.json`.

  bits       random problems of every operator and format: numbers of a row among 1 to 4096 that differ in a bit from those of the row among
             all, which must be none; a digest of all results says whether another device has the same bits
  kernels    what plans assume: all kernels of one way to add up k, over one problem
  dense, w4a16, fp8, moe, decoder_block, decode_attention, prefill_attention
             the time of an operator in the mode beside that outside of it ("ours:default"); dense products also beside cuBLAS and beside a
             Triton product of our own writing after Thinking Machines' description ("triton_persistent"); decoder blocks, of models and of
             sizes drawn at random, also beside both ways to compute them in the mode
  model      steps of decoding of a whole model in the mode and outside of it
  arrivals   requests that arrive at random, twice with different seeds of the arrivals: requests whose tokens or logprobs differ

Ratios are the peer's time over ours in the mode: 0.97 of "ours:default" is a cost of 3 %.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import minfer
import torch
from minfer._core.registry import device_properties
from minfer.measure import benchmarking, models, shapes
from minfer.measure.benchmarking import result_row
from minfer.planning.plan import Problem, ScaledProblem, W4Problem, plan_problem
from torch import Tensor

from bench import harness
from bench.peers import triton_persistent
from bench.suites import fused_decoder_block
from bench.suites.e2e import FORMATS
from bench.suites.moe import chosen_of

OPERATORS = ("dense", "w4a16", "fp8", "moe", "decoder_block", "decode_attention", "prefill_attention")
SUITES = ("bits", "kernels", *OPERATORS, "model", "arrivals")
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
LAYERS = (*shapes.LLAMA_8B, *shapes.LLAMA_70B, *shapes.QWEN_7B)
EXPERTS = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336)}  # experts, top_k, hidden, inter
CACHES = ("16bit", "fp8_e4m3", "int8", "int4")
HEADS, HEADS_KV, HEAD_DIM, PAGE = 32, 8, 128, 64
DEFAULT = "ours:default"
DRAWN_BLOCKS = 10
DIGESTED = 50  # problems of a digest, so that processes that take some problems each have the digests of one that takes all
Fn = Callable[[int], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/batch_invariance.json")
    parser.add_argument("--problems", type=int, default=200, help="bits: random problems of each operator and format")
    parser.add_argument("--first", type=int, default=0, help="bits: the seed of the first of them")
    parser.add_argument("--operators", default="*", help='bits: patterns of "operator-format", comma separated')
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma separated")
    parser.add_argument("--model", default="llama-3.1-8b", help=f"model, arrivals: of {', '.join(models.MODELS)}")
    parser.add_argument("--formats", default="bf16,w4a16,fp8,bf16-kv8,w4a16-kv4", help=f"model: of {', '.join(FORMATS)}")
    parser.add_argument("--batch", default="1,16,64,256", help="model: comma separated")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, help="model, arrivals: only so many layers")
    parser.add_argument("--requests", type=int, default=10000, help="arrivals")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--graph-us", type=float, default=400.0)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


class Results:
    """Rows, written as they come."""

    def __init__(self, args: argparse.Namespace):
        self.path, self.rows = args.out, []
        self.facts = benchmarking.run_facts() | {
            "protocol": "CUDA-graph replays in both modes by turns; see bench/suites/batch_invariance.py"
        }
        if args.commit:
            self.facts["commit"] = args.commit

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            fresh = {(r["suite"], str(r["shape"]), r.get("peer")) for r in self.rows}
            benchmarking.write_results(
                self.path, self.rows, self.facts, keeps=lambda r: (r["suite"], str(r["shape"]), r.get("peer")) not in fresh
            )


def in_mode(enabled: bool, fn: Fn) -> Fn:
    def call(i: int) -> Any:
        with minfer.batch_invariant(enabled):
            return fn(i)

    return call


# ---- bits ----------------------------------------------------------------------------------------------------------------------------


def measure_bits(args: argparse.Namespace, results: Results, late: Callable[[], bool]) -> None:
    from tests.batch_invariance import cases

    for case in cases.CASES.values():
        if not any(fnmatch(case.name, pattern) for pattern in args.operators.split(",")):
            continue
        compared, wrong, done, digests, failures = 0, 0, 0, [], []
        for seed in range(args.first, args.first + args.problems):
            if late():
                break
            if done % DIGESTED == 0:
                digest = hashlib.sha256()
                digests.append(digest)
            try:
                compared += cases.check(case, "cuda", (torch.bfloat16, torch.float16)[seed % 2], seed, digest=digest)
            except AssertionError as error:
                wrong += 1
                failures.append(str(error).splitlines()[0][:500])
            done += 1
        shape = {"operator": case.operator, "format": case.format}
        row = {"suite": "bits", "op": case.operator, "shape": shape, "problems": done, "wrong_problems": wrong, "numbers": compared}
        results.add(row | {"digest": [x.hexdigest() for x in digests], "failures": failures[:5]})
        print(f"bits {case.name}: {done} problems, {compared} numbers, {wrong} problems with differences", flush=True)


def measure_kernels(args: argparse.Namespace, results: Results, late: Callable[[], bool]) -> None:
    from tests.batch_invariance import cases, sums

    runs: list[tuple[dict[str, Any], Callable[[], dict[str, int]]]] = []
    for dtype in (torch.bfloat16, torch.float16):
        for splits in (1, 2, 4, 8):
            runs.append(({"kernels": "gemm", "dtype": str(dtype), "splits": splits}, lambda d=dtype, s=splits: sums.dense(d, s)))
    for dtype, mode in ((cases.FP8, "rows"), (cases.FP8, "blocks"), (cases.FP8, "fast"), (cases.INT8, "rows")):
        for splits in (1, 2):
            shape = {"kernels": "scaled_gemm", "dtype": str(dtype), "scales": mode, "splits": splits}
            runs.append((shape, lambda d=dtype, m=mode, s=splits: sums.scaled(d, m, s)))
    for form, group in sums.FORMS:
        for splits in (1, 4):
            shape = {"kernels": "w4a16", "format": form, "group": group, "splits": splits}
            runs.append((shape, lambda f=form, g=group, s=splits: sums.fragments(f, g, s)))
    for element in ("bf16", "f16"):
        runs.append(({"kernels": "moe", "dtype": element}, lambda e=element: sums.experts(e)))
    for shape, run in runs:
        if late():
            return
        found = run()
        wrong = {name: count for name, count in found.items() if count}
        results.add({"suite": "kernels", "op": shape["kernels"], "shape": shape, "kernels": len(found), "wrong": wrong})
        print(f"kernels {shape}: {len(found)}, of which {len(wrong)} differ {wrong or ''}", flush=True)


# ---- operators -----------------------------------------------------------------------------------------------------------------------


def add_cell(
    args: argparse.Namespace, results: Results, *, suite: str, op: str, shape: dict[str, Any], dtype: str, fn: Fn, sets: int,
    peers: dict[str, Fn], floor_us: float = 0.0, plan: Any = None, truth: Callable[[], Tensor] | None = None,
    error: float | None = None,
) -> None:  # fmt: skip
    """One operator in both modes, and peers. error: relative, of the mode's; None: from the truth, or from what it is outside."""
    fns = {"ours": in_mode(True, fn), DEFAULT: in_mode(False, fn), **peers}
    if error is None:
        own = fns["ours"](0)
        first = own[0] if isinstance(own, tuple) else own
        other = fns[DEFAULT](0)
        yardstick = truth() if truth is not None else (other[0] if isinstance(other, tuple) else other)
        error = benchmarking.relative_error(first.float(), yardstick.float())
    if not error < 0.05:
        raise ArithmeticError(f"{suite} {shape}: relative error {error:.3g}")
    timings, failed = harness.measure(fns, sets, rounds=args.rounds, graph_us=args.graph_us)
    if "ours" not in timings:
        raise RuntimeError(failed["ours"])
    ours, line = timings["ours"], []
    for name, timing in timings.items():
        if name != "ours":
            row = result_row(
                suite=suite, op=op, kernel="" if plan is None else plan.kernel, shape=shape, dtype=dtype, timing=ours, peer=name,
                peer_us=timing.us, floor_us=floor_us or ours.us, rel_err=error,
            )  # fmt: skip
            results.add(row if plan is None else row | {"launch": plan.launch})
            line.append(f"{name} {timing.us:.2f} ({timing.us / ours.us:.3f}x)")
    line += [f"{name} failed: {why[:80]}" for name, why in failed.items()]
    print(f"{suite} {shape}: {ours.us:.2f} us; {', '.join(line)}", flush=True)


def dense_cell(args: argparse.Namespace, results: Results, m: int, n: int, k: int) -> None:
    sets = harness.sets_for(2 * (m * k + n * k + m * n))
    a, w = torch.randn(sets, m, k, device="cuda").bfloat16(), (torch.randn(sets, n, k, device="cuda") * k**-0.5).bfloat16()
    peers: dict[str, Fn] = {"cublas": lambda i: torch.mm(a[i], w[i].t())}
    if triton_persistent.available():
        triton_persistent.matmul(a[0], w[0])  # compiled before it is captured
        peers["triton_persistent"] = lambda i: triton_persistent.matmul(a[i], w[i])
    plan = plan_problem(Problem(m, n, k), batch_invariant=True)
    add_cell(
        args, results, suite="dense", op="gemm", shape={"m": m, "n": n, "k": k}, dtype="bf16", fn=lambda i: minfer.gemm(a[i], w[i].t()),
        sets=sets, peers=peers, floor_us=plan.floor_us, plan=plan, truth=lambda: a[0].float() @ w[0].float().t(),
    )  # fmt: skip


def w4a16_cell(args: argparse.Namespace, results: Results, m: int, n: int, k: int) -> None:
    sets = harness.sets_for(n * k // 2 + 2 * m * (n + k))
    codes = torch.randint(0, 16, (sets, n, k), device="cuda", dtype=torch.uint8)
    packed = torch.stack([minfer.w4a16_pack(x) for x in codes])
    del codes
    scales = (torch.rand(sets, k // 128, n, device="cuda") * k**-0.5 / 4.6).bfloat16()
    a = torch.randn(m, k, device="cuda").bfloat16()
    plan = plan_problem(W4Problem(m, n, k), batch_invariant=True)
    add_cell(
        args, results, suite="w4a16", op="w4a16_gemm", shape={"m": m, "n": n, "k": k, "group": 128}, dtype="bf16",
        fn=lambda i: minfer.w4a16_gemm(a, packed[i], scales[i]), sets=sets, peers={}, floor_us=plan.floor_us, plan=plan,
    )  # fmt: skip


def fp8_cell(args: argparse.Namespace, results: Results, m: int, n: int, k: int, blocks: bool) -> None:
    sets, e4m3 = harness.sets_for(n * k + m * (2 * n + k)), torch.float8_e4m3fn
    a, w = torch.randn(m, k, device="cuda").to(e4m3), torch.randn(sets, n, k, device="cuda").to(e4m3)
    of_a = torch.rand(m, k // 128 if blocks else 1, device="cuda") + 0.5
    of_w = torch.rand(sets, -(-n // 128), k // 128, device="cuda") if blocks else torch.rand(sets, n, device="cuda")
    of_a = of_a if blocks else of_a[:, 0]
    plan = plan_problem(ScaledProblem(m, n, k, block_scaled=blocks), batch_invariant=True)
    add_cell(
        args, results, suite="fp8", op="gemm_fp8", shape={"m": m, "n": n, "k": k, "scales": "block" if blocks else "row"}, dtype="e4m3",
        fn=lambda i: minfer.gemm_fp8(a, w[i].t(), of_a, of_w[i], out_dtype=torch.bfloat16), sets=sets, peers={}, floor_us=plan.floor_us,
        plan=plan,
    )  # fmt: skip


def moe_cell(args: argparse.Namespace, results: Results, model: str, form: str, tokens: int) -> None:
    experts, top_k, hidden, inter = EXPERTS[model]
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weights, ids = minfer.moe_router(torch.randn(tokens, experts, device="cuda"), top_k)
    if form == "16bit":
        w13 = (torch.randn(experts, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16)).mul_(hidden**-0.5)
        w2 = (torch.randn(experts, hidden, inter, device="cuda", dtype=torch.bfloat16)).mul_(inter**-0.5)
        call = lambda i: minfer.moe_ffn(x, w13, w2, weights, ids)  # noqa: E731
    else:

        def packed(n: int, k: int) -> tuple[Tensor, Tensor]:
            each = [minfer.w4a16_pack(torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)) for _ in range(experts)]
            return torch.stack(each), (torch.rand(experts, k // 128, n, device="cuda") * k**-0.5 / 4.6).bfloat16()

        (w13, s13), (w2, s2) = packed(2 * inter, hidden), packed(hidden, inter)
        call = lambda i: minfer.moe_ffn_w4a16(x, w13, s13, None, w2, s2, None, weights, ids)  # noqa: E731
    shape = {"model": model, "format": form, "tokens": tokens}
    add_cell(args, results, suite="moe", op="moe_ffn", shape=shape, dtype="bf16", fn=call, sets=1, peers={})


def block_sizes() -> dict[str, tuple[int, int, int, int]]:
    """Columns of attention's output, of the residual, of the MLP's activations, and of the next q, k and v: of models, and drawn."""
    rnd, found = random.Random(28), dict(fused_decoder_block.MODELS)
    for i in range(DRAWN_BLOCKS):
        hidden = 256 * rnd.randrange(6, 33)
        attended, inter = (
            128 * max(8, round(hidden * rnd.choice((0.75, 1.0, 1.0, 1.25)) / 128)),
            128 * round(hidden * rnd.uniform(2, 6) / 128),
        )
        found[f"drawn {i}"] = (attended, hidden, inter, attended + 256 * rnd.randrange(1, 9))
    return found


def block_cell(args: argparse.Namespace, results: Results, name: str, sizes: tuple[int, int, int, int]) -> None:
    """One token, weights of int4."""
    call = fused_decoder_block.block(sizes)(1, sizes[3], torch.bfloat16, "cuda")
    with minfer.batch_invariant():
        error = call.error()
    peers = {peer: in_mode(True, fn) for peer, fn in call.peers.items()}
    shape = {"block": name} | dict(zip(("k", "h", "inter", "n"), sizes, strict=True))
    add_cell(
        args, results, suite="decoder_block", op="w4a16_decoder_block", shape=shape, dtype="bf16", fn=call.ours, sets=call.sets,
        peers=peers, floor_us=call.bytes / device_properties()["read_bandwidth"], error=error,
    )  # fmt: skip


def attention_cell(args: argparse.Namespace, results: Results, suite: str, kv_format: str, batch: int, queries: int, keys: int) -> None:
    pages = batch * -(-keys // PAGE)
    options = {"group_tokens": 32} if kv_format == "int4" else {}
    cache = minfer.allocate_kv_cache(
        pages, PAGE, HEADS_KV, HEAD_DIM, kv_format=kv_format, dtype=torch.bfloat16, device="cuda", batch=batch, **options
    )
    tokens = torch.arange(batch * keys, device="cuda")
    slots = tokens // keys * -(-keys // PAGE) * PAGE + tokens % keys
    ends = torch.arange(0, batch * keys + 1, keys, dtype=torch.int32, device="cuda")
    k, v = (torch.randn(batch * keys, HEADS_KV, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    minfer.kv_cache_append(k, v, cache.k, cache.v, slots, **({"cu_seqlens": ends} if kv_format == "int4" else {}), **cache.scales())
    q = torch.randn(batch, queries, HEADS, HEAD_DIM, device="cuda").bfloat16()
    table = torch.arange(pages, dtype=torch.int32, device="cuda").view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    shape = {"format": kv_format, "batch": batch, "queries": queries, "keys": keys}

    def call(i: int) -> tuple[Tensor, Tensor]:
        return minfer.attention_paged(q, cache.k, cache.v, lengths, block_table=table, causal=True, **cache.scales())

    add_cell(args, results, suite=suite, op="attention_paged", shape=shape, dtype="bf16", fn=call, sets=1, peers={})


def operator_cells(args: argparse.Namespace, suite: str) -> list[tuple[str, Callable[[Results], None]]]:
    """(what is shown, what measures it)."""
    rows = [int(m) for m in args.rows.split(",")]
    found: list[tuple[str, Callable[[Results], None]]] = []
    if suite in ("dense", "w4a16", "fp8"):
        for n, k in LAYERS if suite == "dense" else shapes.LLAMA_8B:
            for m in rows:
                if suite == "dense":
                    found.append((f"{m}x{n}x{k}", lambda r, x=(m, n, k): dense_cell(args, r, *x)))
                elif suite == "w4a16":
                    found.append((f"{m}x{n}x{k}", lambda r, x=(m, n, k): w4a16_cell(args, r, *x)))
                else:
                    for blocks in (False, True):
                        found.append((f"{m}x{n}x{k} {blocks}", lambda r, x=(m, n, k, blocks): fp8_cell(args, r, *x)))
    elif suite == "decoder_block":
        for name, sizes in block_sizes().items():
            found.append((name, lambda r, x=(name, sizes): block_cell(args, r, *x)))
    elif suite == "moe":
        for model in EXPERTS:
            for form in ("16bit", "int4"):
                for tokens in rows:
                    found.append((f"{model} {form} {tokens}", lambda r, x=(model, form, tokens): moe_cell(args, r, *x)))
    else:
        if suite == "decode_attention":
            sizes = [(b, 1, keys) for b in (1, 8, 64) for keys in (512, 2048, 8192)]
            sizes += [(b, 1, 1050) for b in (16, 64, 256)]  # no whole splits, nor whole groups of int4's tokens
        else:
            sizes = [(1, n, n) for n in (512, 2048, 8192)] + [(4, 512, 4096)]
        for kv_format in CACHES if suite == "decode_attention" else ("16bit", "fp8_e4m3"):
            for size in sizes:
                found.append((f"{kv_format} {size}", lambda r, x=(suite, kv_format, *size): attention_cell(args, r, *x)))
    return found


# ---- whole models --------------------------------------------------------------------------------------------------------------------


def in_both_modes(args: argparse.Namespace, form: str, rows: int, tokens: int, use: Callable[[bool, Any], None]) -> None:
    """Calls use(mode, engine) with engines over one model, one after the other: there is no memory for the caches of both."""
    from minfer.generation import engine_of
    from minfer.integrations.transformers import optimize

    given = FORMATS[form]
    changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    handle = optimize(models.random_model(args.model, **changes), **given._asdict(), restorable=False)
    for mode in (False, True):
        options = dict(max_length=tokens, max_rows=rows, cache_tokens=rows * tokens, share_prefixes=False, batch_invariant=mode)
        use(mode, engine_of(handle, kv_cache=given.kv_cache, **options))
        gc.collect()
        torch.cuda.empty_cache()


def measure_model(args: argparse.Namespace, results: Results, late: Callable[[], bool]) -> None:
    batches = [int(b) for b in args.batch.split(",")]
    for form in chosen_of(args.formats, "formats", tuple(FORMATS)):
        outside: dict[int, Any] = {}

        def use(mode: bool, engine: Any, form: str = form, outside: dict[int, Any] = outside) -> None:
            models.fill_cache(engine)
            for batch in batches:
                if late():
                    return
                times = models.decode_times(engine, batch, args.context, steps=args.steps)
                if not mode:
                    outside[batch] = times
                elif batch in outside:
                    add_step(args, results, form, batch, times, outside[batch])

        if not late():
            in_both_modes(args, form, max(batches), args.context + args.steps + 64, use)


def add_step(args: argparse.Namespace, results: Results, form: str, batch: int, times: Any, outside: Any) -> None:
    shape = {"model": args.model, "format": form, "batch": batch, "context": args.context}
    row = result_row(
        suite="model", op="decode_step", kernel="", shape=shape, dtype=form, peer=DEFAULT, peer_us=outside.ms * 1e3, rel_err=0.0,
        timing=benchmarking.Timing(times.ms * 1e3, times.p10 * 1e3, times.p90 * 1e3, ()), floor_us=times.floor_ms * 1e3,
    )  # fmt: skip
    results.add(row | {"tokens_per_second": round(times.tokens_per_second, 1)})
    print(f"model {form} batch {batch}: {times.ms:.3f} ms, outside {outside.ms:.3f} ({row['ratio']:.3f}x)", flush=True)


def measure_arrivals(args: argparse.Namespace, results: Results, late: Callable[[], bool]) -> None:
    """The same requests, in another order and at other times."""
    from minfer.generation import SamplingParams, engine_of
    from minfer.integrations.transformers import optimize

    changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    handle = optimize(models.random_model(args.model, **changes), restorable=False)
    rnd = random.Random(0)
    work = []
    for index in range(args.requests):
        prompt = [rnd.randrange(5, 1000) for _ in range(rnd.choice((1, 16, 100, 300, 700)))]
        own = {} if index % 2 else {"temperature": 0.8, "seed": index, "top_p": 0.95}
        work.append((prompt, SamplingParams(max_new_tokens=rnd.randrange(4, 64), ignore_eos=True, logprobs=0, **own)))
    outcomes: list[list[Any]] = []
    for seed in (1, 2):
        rnd = random.Random(seed)
        engine = engine_of(handle, max_length=1024, max_rows=128, batch_invariant=True)
        order, sent = list(range(len(work))), {}
        rnd.shuffle(order)
        while order or engine.busy:
            for _ in range(min(rnd.randrange(4), len(order), max(0, 256 - len(engine.waiting)))):
                index = order.pop()
                sent[index] = engine.submit(*work[index])
            if engine.busy:
                engine.step()
            if late():
                break
        outcomes.append([(sent[i].completion.tokens, sent[i].completion.logprobs) if i in sent else None for i in range(len(work))])
        ended = [sent[i].finished if i in sent else False for i in range(len(work))]
        outcomes[-1] = [x if done else None for x, done in zip(outcomes[-1], ended, strict=True)]
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    both = [(a, b) for a, b in zip(*outcomes, strict=True) if a is not None and b is not None]
    wrong = sum(a != b for a, b in both)
    shape = {"model": args.model, "layers": args.layers}
    results.add({"suite": "arrivals", "op": "generate", "shape": shape, "requests": len(both), "wrong": wrong})
    print(f"arrivals: {len(both)} requests twice, {wrong} of which differ", flush=True)


def main(args: argparse.Namespace) -> int:
    suites = chosen_of(args.suite, "suite", SUITES)
    if args.dry_run:
        for suite in suites:
            for what, _ in operator_cells(args, suite) if suite in OPERATORS else [("", None)]:
                print(suite, what)
        return 0
    start, results = time.monotonic(), Results(args)

    def late() -> bool:
        return time.monotonic() - start > args.time_limit

    whole = {"bits": measure_bits, "kernels": measure_kernels, "model": measure_model, "arrivals": measure_arrivals}
    for suite in suites:
        if suite in whole:
            whole[suite](args, results, late)
            continue
        for what, measure in operator_cells(args, suite):
            if late():
                print(f"left out for time: {suite} from {what} on")
                break
            try:
                measure(results)
            except (ArithmeticError, RuntimeError) as error:
                harness.forget_error()
                print(f"{suite} {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                results.add({"suite": suite, "op": suite, "shape": {"cell": what}, "peer": "", "error": str(error)[:300]})
            torch.cuda.empty_cache()
    return 0
