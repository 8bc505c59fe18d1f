"""Whole models end to end: `python -m bench.suites e2e --out bench/results/<device>/e2e.json`.

Models of published shapes with random weights (``minfer.measure.models``), so that no checkpoint is needed. Suites:

  decode     milliseconds of a step in which each sequence of a batch gets a token, beside transformers' ``generate`` with its growing cache
             ("transformers"), with its static cache and torch.compile ("transformers_compiled"), and beside our own 16-bit weights and
             cache ("ours:bf16"), and beside the same step by vLLM's operators in a CUDA graph ("vllm_ops", of dense models in 16 bits
             and with 4-bit weights by Marlin). Times of generate are (time of n + 1 tokens - time of one) / n.
  prefill    milliseconds from a prompt to its first token, beside transformers' forward of the same tokens with the best attention of torch
  serving    requests that arrive as a Poisson process: first tokens, and times between tokens
  start      seconds from the start of a process to tokens of a 4-bit checkpoint on local disk, beside transformers and it in 16 bits

The first step's logits are held against transformers' before anything is timed. Floors are bytes at the device's read bandwidth
(decode), or flops of matrices and attention at its matrix rate (prefill).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from minfer._core.registry import device_properties
from minfer.cli.models import load
from minfer.generation import Engine, engine_of
from minfer.integrations.decoder.scheme import WeightScheme
from minfer.integrations.transformers import optimize
from minfer.measure import benchmarking, models
from minfer.measure.benchmarking import Timing, result_row

from bench.suites.moe import chosen_of

SUITES = ("decode", "prefill", "serving", "start")
SERVED = {"prompt": (64, 1024), "new": (32, 256)}  # tokens of a request, from and to
PEERS = ("transformers", "transformers_compiled", "vllm_ops")
DENSE = ("llama-3.1-8b", "qwen2.5-7b")  # what vllm_ops has


class Form(NamedTuple):
    """What ``optimize`` is given. ``head``: of the weights of the last product, which are in 16 bits otherwise."""

    weights: WeightScheme | None = None
    kv_cache: str | None = None
    head: str | None = None


FORMATS = {
    "bf16": Form(),
    "bf16-kv8": Form(kv_cache="int8"),
    "w4a16": Form(WeightScheme("w4a16")),
    "w4a16-head": Form(WeightScheme("w4a16"), head="w4a16"),
    "w4a16-kv4": Form(WeightScheme("w4a16"), "int4"),
    "fp8": Form(WeightScheme("fp8")),
    "fp8-head": Form(WeightScheme("fp8"), head="fp8"),
    "fp8-rows": Form(WeightScheme("fp8", -1)),
    "int8": Form(WeightScheme("int8")),
    "mxfp4-experts": Form(WeightScheme("mxfp4", parts="experts")),
}
PREFILLS = (512, 2048, 8192, 32768)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/e2e.json")
    parser.add_argument("--models", default="llama-3.1-8b", help=f"of {', '.join(models.MODELS)}")
    parser.add_argument("--formats", default="bf16,w4a16,fp8", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--batch", default="1,16,64,256", help="comma separated")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", default=",".join(map(str, PREFILLS)), help="comma separated")
    parser.add_argument("--peers", default=PEERS[0], help=f"of {', '.join(PEERS)}, or none")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, help="only so many layers: to try the suite")
    parser.add_argument("--rate", type=float, default=8.0, help="serving: requests a second")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def cells(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(model, format): a model is made for each, 16 bits first."""
    formats = chosen_of(args.formats, "formats", tuple(FORMATS))
    return [(m, f) for m in chosen_of(args.models, "models", tuple(models.MODELS)) for f in sorted(formats, key=lambda f: f != "bf16")]


class Results:
    """Rows, written as they come."""

    def __init__(self, args: argparse.Namespace):
        self.path, self.rows = args.out, []
        self.facts = benchmarking.run_facts() | {
            "protocol": "steps of the engine by the host's clock, one step ahead; see bench/suites/e2e.py"
        }
        if args.commit:
            self.facts["commit"] = args.commit

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        shown = {
            key: row[key]
            for key in ("suite", "shape", "us", "seconds", "peer", "peer_us", "peer_seconds", "ratio", "fraction")
            if key in row
        }
        print("  " + ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        if self.path is not None:
            fresh = {(r["suite"], str(r["shape"]), r["peer"]) for r in self.rows}
            benchmarking.write_results(
                self.path, self.rows, self.facts, keeps=lambda r: (r["suite"], str(r["shape"]), r["peer"]) not in fresh
            )


# ---- peers: transformers ---------------------------------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """What another program takes: milliseconds of a step or a prompt; and, where they are its own, the most memory that torch had allocated
    and the kernels of a step."""

    ms: float
    peak_gb: float | None = None
    launches: int | None = None


def tried(what: str, measure: Callable[[], Peer]) -> Peer | None:
    """None, and why, where a peer cannot do it: its library raises what it likes."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001
        torch.cuda.empty_cache()
        print(f"  {what} is left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        return None


@torch.inference_mode()
def generate_times(model: Any, batch: int, context: int, steps: int, **options: Any) -> Peer:
    """Of a token by ``generate``: the time of steps + 1 tokens less that of one, over steps; the better of two."""
    ids = torch.randint(5, 1000, (batch, context), device=model.device)
    fixed = dict(do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True, **options)

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **fixed)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    torch.cuda.reset_peak_memory_stats()
    seconds(4)
    ms = min((seconds(steps + 1) - seconds(1)) / steps for _ in range(2)) * 1e3
    peak = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    if options:  # compiled
        return Peer(ms, peak)
    cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    return Peer(ms, peak, models.launches_of(lambda: model(ids[:, -1:], past_key_values=cache, use_cache=True)))


@torch.inference_mode()
def forward_times(model: Any, length: int) -> Peer:
    """Of transformers' forward of one prompt, its head for the last token alone."""
    ids, times = torch.randint(5, 1000, (1, length), device=model.device), []
    for turn in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).cpu()
        if turn:
            times.append(time.perf_counter() - start)
    return Peer(sorted(times)[1] * 1e3)


def vllm_times(config: Any, batch: int, context: int, form: str) -> Peer:
    """Of a step by vLLM's operators."""
    from bench.peers.vllm_step import VllmStep

    step = VllmStep(config, batch, context, form)
    ms = step.ms()
    del step
    gc.collect()
    torch.cuda.empty_cache()
    return Peer(ms)


# ---- floors ------------------------------------------------------------------------------------------------------------------------------


def prefill_floor_us(engine: Engine, length: int) -> float:
    """flops of the products and of causal attention at the device's 16-bit matrix rate."""
    total = 0.0
    for layer in engine.model.layers:
        attention, mlp = layer.attention, layer.mlp
        projections = [attention.qkv, attention.output]
        if hasattr(mlp, "first"):
            projections += [mlp.first, mlp.down]
        for projection in projections:
            total += 2.0 * length * projection.in_features * projection.out_features * (2 if projection.gated else 1)
        if hasattr(mlp, "router"):
            hidden = mlp.router.weight.shape[1]
            total += 2.0 * length * mlp.router.top_k * 3 * hidden * mlp.inter
        seen = length if attention.window < 0 else min(length, 2 * (attention.window + 1))
        total += 4.0 * attention.heads * attention.head_dim * length * seen / 2
    return total / device_properties()["matrix_rate"]


# ---- cells -------------------------------------------------------------------------------------------------------------------------------


def measure(
    args: argparse.Namespace, name: str, form: str, results: Results, own: dict[Any, Peer | None], late: Callable[[], bool]
) -> None:
    suites, batches = chosen_of(args.suite, "suite", SUITES), [int(b) for b in args.batch.split(",")]
    lengths, peers = [int(n) for n in args.prefill.split(",") if n], [] if args.peers == "none" else chosen_of(args.peers, "peers", PEERS)
    changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    given = FORMATS[form]
    model = models.random_model(name, **changes)
    limit = model.config.get_text_config(decoder=True).max_position_embeddings
    lengths = [n for n in lengths if n + 1 < limit and "prefill" in suites]  # else they would have room in the cache
    theirs: dict[Any, Peer | None] = {}
    with torch.inference_mode():
        probe = torch.randint(5, 1000, (2, 48), device=model.device)
        truth = model(probe, use_cache=False).logits.float()
        if form == "bf16":
            for peer in (peer for peer in peers if peer != "vllm_ops"):
                more = {"cache_implementation": "static"} if peer == "transformers_compiled" else {}
                for batch in batches if "decode" in suites else ():
                    if not late():
                        run = functools.partial(generate_times, model, batch, args.context, args.steps, **more)
                        theirs[peer, "decode", batch] = tried(f"{peer} at batch {batch}", run)
                for length in lengths if "prefill" in suites and peer == "transformers" else ():
                    if not late():
                        theirs[peer, "prefill", length] = tried(f"{peer}, {length} tokens", functools.partial(forward_times, model, length))
            gc.collect(), torch.cuda.empty_cache(), torch._dynamo.reset()
            own.update({(name, *key): peer for key, peer in theirs.items()})
        else:
            theirs |= {key[1:]: peer for key, peer in own.items() if key[0] == name and key[1] in PEERS and key[1] != "vllm_ops"}
        if "vllm_ops" in peers and "decode" in suites and name in DENSE and form in ("bf16", "w4a16"):
            for batch in batches:
                if not late():
                    run = functools.partial(vllm_times, model.config, batch, args.context, form)
                    theirs["vllm_ops", "decode", batch] = tried(f"vllm_ops at batch {batch}", run)
        handle = optimize(model, **given._asdict(), restorable=False)
        ours = model(probe, use_cache=True).logits.float()
        error = float((ours - truth).norm() / truth.norm())
        print(f"{name} {form}: relative difference of logits from transformers' {error:.4f}", flush=True)
        if handle.left:
            print(f"  left: {dict(handle.left)}")
        rows = max([*batches, 64] if "serving" in suites else batches)
        each = max(args.context + args.steps + 64, sum(longest for _, longest in SERVED.values()) if "serving" in suites else 0)
        longest = min(max([each, *lengths]) + 64, limit)
        room = max(rows * each, longest)  # not all that there is
        engine = engine_of(handle, kv_cache=given.kv_cache, max_length=longest, max_rows=rows, cache_tokens=room, share_prefixes=False)
        models.fill_cache(engine)
        if "decode" in suites:
            for batch in batches:
                if not late():
                    add_decode(args, name, form, engine, batch, error, theirs, results, own)
        if "prefill" in suites:
            for length in lengths:
                if not late():
                    add_prefill(name, form, engine, length, error, theirs, results, own)
        if "serving" in suites and not late():
            served = models.serving_times(engine, requests=args.requests, rate=args.rate, **SERVED)
            shape = {"model": name, "format": form, "requests": args.requests, "rate": args.rate}
            results.add({"suite": "serving", "op": "serve", "shape": shape, "peer": "none", **served.as_dict()})
    del engine, handle, model


def peers_of(name: str, form: str, suite: str, size: int, theirs: dict[Any, Peer | None], own: dict[Any, Peer | None]) -> dict[str, Peer]:
    """Those that were measured, ours in 16 bits among them; "none" where there are none."""
    found = {peer: times for (peer, of, at), times in theirs.items() if (of, at) == (suite, size) and times is not None}
    mine = own.get((name, "ours:bf16", suite, size)) if form != "bf16" else None
    return found | ({} if mine is None else {"ours:bf16": mine}) or {"none": Peer(0.0)}


def add_decode(
    args: argparse.Namespace,
    name: str,
    form: str,
    engine: Engine,
    batch: int,
    error: float,
    theirs: dict[Any, Peer | None],
    results: Results,
    own: dict[Any, Peer | None],
) -> None:
    times = models.decode_times(engine, batch, args.context, steps=args.steps)
    shape = {"model": name, "format": form, "batch": batch, "context": args.context}
    facts = {
        "tokens_per_second": round(times.tokens_per_second, 1),
        "launches": times.launches,
        "peak_gb": round(times.peak_bytes / 1e9, 2),
    }
    own[name, f"ours:{form}", "decode", batch] = Peer(times.ms, facts["peak_gb"])
    for peer, other in peers_of(name, form, "decode", batch, theirs, own).items():
        timing = Timing(times.ms * 1e3, times.p10 * 1e3, times.p90 * 1e3, ())
        row = result_row(
            suite="decode", op="decode_step", kernel="", shape=shape, dtype=form, timing=timing, peer=peer,
            peer_us=other.ms * 1e3, floor_us=times.floor_ms * 1e3, rel_err=error,
        )  # fmt: skip
        of_peer = {"peer_peak_gb": other.peak_gb, "peer_launches": other.launches}
        results.add(row | facts | {name: value for name, value in of_peer.items() if value is not None})


def add_prefill(
    name: str,
    form: str,
    engine: Engine,
    length: int,
    error: float,
    theirs: dict[Any, Peer | None],
    results: Results,
    own: dict[Any, Peer | None],
) -> None:
    ms = models.prefill_ms(engine, length, rounds=3)
    own[name, f"ours:{form}", "prefill", length] = Peer(ms)
    shape = {"model": name, "format": form, "tokens": length}
    for peer, other in peers_of(name, form, "prefill", length, theirs, own).items():
        row = result_row(
            suite="prefill", op="prefill", kernel="", shape=shape, dtype=form, timing=Timing(ms * 1e3, ms * 1e3, ms * 1e3, ()),
            peer=peer, peer_us=other.ms * 1e3, floor_us=prefill_floor_us(engine, length), rel_err=error,
        )  # fmt: skip
        results.add(row)


def add_start(args: argparse.Namespace, name: str, results: Results) -> None:
    changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as folder:
        whole, packed = f"{folder}/16", f"{folder}/4"
        models.random_model(name, **changes).save_pretrained(whole)
        torch.cuda.empty_cache()
        load(whole, "w4a16", 128, "all", torch.bfloat16, "cuda").save_pretrained(packed)
        gc.collect(), torch.cuda.empty_cache()
        seconds = {}
        for program, path in (("transformers", whole), ("minfer", packed)):
            command = [sys.executable, "-m", "bench.peers.first_token", program, path]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}: {ran.stderr[-500:]}")
            seconds[program] = json.loads(ran.stdout.splitlines()[-1])
    ours, theirs = seconds["minfer"], seconds["transformers"]
    results.add(
        {"suite": "start", "op": "start", "shape": {"model": name, "format": "w4a16"}, "peer": "transformers", "seconds": ours}
        | {"peer_seconds": theirs, "ratio": round(theirs["first"] / ours["first"], 4)}
    )


def main(args: argparse.Namespace) -> int:
    start, wanted = time.monotonic(), cells(args)
    if args.dry_run:
        for name, form in wanted:
            print(name, form, args.suite)
        return 0
    results, own = Results(args), {}

    def late() -> bool:
        return time.monotonic() - start > args.time_limit

    suites = chosen_of(args.suite, "suite", SUITES)
    for name in dict.fromkeys(name for name, _ in wanted if "start" in suites):
        add_start(args, name, results)
    for name, form in wanted if set(suites) != {"start"} else ():
        if late():
            print(f"left out for time: {name} {form}")
            continue
        measure(args, name, form, results, own, late)
        gc.collect()
        torch.cuda.empty_cache()
    return 0
