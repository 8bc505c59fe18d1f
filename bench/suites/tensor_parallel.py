"""Whole models divided among GPUs.

`torchrun --nproc-per-node 2 -m bench.suites.tensor_parallel --out bench/results/<device>/tensor_parallel.json`

Models of published shapes with random weights. Rank 0 first runs the model alone, then all ranks run it together; afterwards the same with
collectives that do nothing, which shows what NCCL takes. Layers are copies of a few, each in memory of its own, so that a model of 70B is
never there in 16 bits. A cell is `model:format`, with formats as in the suite e2e; experts are divided by expert.

Values come first: greedy tokens of one model with few layers, alone and together.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minfer
import torch
import torch.distributed as dist
from minfer.distributed import TensorParallel
from minfer.distributed.layer_exchange import LayerExchange
from minfer.generation import SamplingParams
from minfer.generation.engine import Engine
from minfer.integrations.decoder.model import DecoderModel
from minfer.integrations.transformers import optimize
from minfer.integrations.transformers.model import decoder_model
from minfer.measure import benchmarking, models

from bench.suites.e2e import FORMATS

CELLS = "llama-3.1-8b:bf16,llama-3.1-8b:w4a16,llama-3.1-70b:w4a16,qwen3-30b-a3b:bf16"
PROTOCOL = "decode in CUDA graphs, medians of steps; prompts to their first tokens; one rank alone, then all; layers are copies of two"
_LAYERS = 2  # that are made


@contextlib.contextmanager
def silent(model: DecoderModel) -> Iterator[None]:
    """Collectives of activations that do nothing, those within layers' launches among them; what is behind a sum in the same launch is a
    launch of its own."""

    def norm(self, x, residual, weight, eps=1e-6, weight_offset=0.0):
        if residual is None:
            return minfer.rms_norm(x, weight, eps, weight_offset=weight_offset)
        return minfer.add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset)

    names = ("all_reduce", "all_reduce_rms_norm", "gather_columns")
    kept = {name: getattr(TensorParallel, name) for name in names}
    exchange = model.layer_exchange
    if exchange is not None:
        model.layer_exchange = LayerExchange((), 0)
    TensorParallel.all_reduce, TensorParallel.all_reduce_rms_norm = lambda self, x: x, norm
    TensorParallel.gather_columns = lambda self, x, widths: x.repeat(1, self.ranks)[:, : sum(widths)]
    try:
        yield
    finally:
        model.layer_exchange = exchange
        for name, method in kept.items():
            setattr(TensorParallel, name, method)


def engine_of(name: str, form: str, parallel: TensorParallel | None, rows: int, longest: int, layers: int | None) -> Engine:
    """The whole model, or this rank's part."""
    given = FORMATS[form]
    model = models.random_model(name, num_hidden_layers=_LAYERS)
    handle = optimize(model, **given._asdict(), restorable=False, parallel=parallel)
    decoder = decoder_model(handle, longest)
    whole = models.MODELS[name]["num_hidden_layers"] if layers is None else layers
    decoder = models.repeated(decoder, whole)
    engine = Engine(
        decoder, kv_format=handle.kv_format, max_length=longest, max_rows=rows, cache_tokens=max(rows * 1280, longest), share_prefixes=False
    )
    models.fill_cache(engine)
    return engine


def times(engine: Engine, args: argparse.Namespace) -> dict[tuple[str, int], float]:
    """Milliseconds by ("decode", batch) and ("prefill", tokens)."""
    found = {}
    for batch in args.batches:
        found["decode", batch] = models.decode_times(engine, batch, args.context, steps=args.steps).ms
    for length in args.prefills:
        found["prefill", length] = models.prefill_ms(engine, length, rounds=3)
    return found


def tokens_of(engine: Engine) -> list[list[int]]:
    requests = [engine.submit([7 * i + 1, 11, 13 + i], SamplingParams(max_new_tokens=24, ignore_eos=True)) for i in range(8)]
    engine.run()
    return [request.completion.tokens for request in requests]


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def compared_tokens(parallel: TensorParallel, longest: int) -> float:
    """The share of greedy tokens that are one GPU's, in front of the first that is not: of random weights there are many near ties."""
    alone = tokens_of(engine_of("llama-3.1-8b", "bf16", None, 8, longest, _LAYERS))
    free()
    together = tokens_of(engine_of("llama-3.1-8b", "bf16", parallel, 8, longest, _LAYERS))
    free()
    same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in zip(alone, together, strict=True)]
    return sum(same) / sum(map(len, alone))


def cell(name: str, form: str, parallel: TensorParallel, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, longest = max([*args.batches, 1]), max(args.context + args.steps + 64, *args.prefills, 64) + 64
    alone: dict[tuple[str, int], float] = {}
    if parallel.rank == 0 and not args.together:
        alone = times(engine_of(name, form, None, rows, longest, args.layers), args)
    free()
    dist.barrier()
    engine = engine_of(name, form, parallel, rows, longest, args.layers)
    together = times(engine, args)
    with silent(engine.model):
        engine.runner._captured.clear()
        engine.runner._captured_chunks.clear()
        quiet = times(engine, args)
    del engine
    free()
    found = []
    for (what, size), ms in together.items():
        shape = {"model": name, "format": form, "ranks": parallel.ranks, "batch" if what == "decode" else "tokens": size}
        one = alone.get((what, size))
        found.append(
            benchmarking.result_row(
                suite=what, op=what, kernel="", shape=shape, dtype=form, timing=benchmarking.Timing(ms * 1e3, ms * 1e3, ms * 1e3, ()),
                peer="ours:one_gpu" if one else "none", peer_us=(one or 0.0) * 1e3, floor_us=0.0, rel_err=0.0,
            )
            | {"without_collectives_us": round(quiet[what, size] * 1e3, 2), "collectives_share": round(1 - quiet[what, size] / ms, 4)}
        )  # fmt: skip
        if parallel.rank == 0:
            ratio = f", one GPU {one:.3f} ms: {one / ms:.2f}x" if one else ""
            share = f"collectives {found[-1]['collectives_share']:.0%}"
            print(f"{name} {form} {what} {size}: {ms:.3f} ms on {parallel.ranks}, {share}{ratio}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", default=CELLS, help="model:format, comma separated")
    parser.add_argument("--batch", default="1,16,64", help="comma separated")
    parser.add_argument("--prefill", default="4096", help="tokens of prompts, comma separated")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, help="of each model; default: all")
    parser.add_argument("--together", action="store_true", help="leave one GPU alone out")
    parser.add_argument("--out", type=Path, help="results file, bench/results/<device>/tensor_parallel.json")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        parser.exit(2, "bench.suites.tensor_parallel: needs GPUs, and torchrun to start a process for each\n")
    args.batches, args.prefills = ([int(x) for x in text.split(",") if x] for text in (args.batch, args.prefill))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    parallel = TensorParallel()
    facts = benchmarking.run_facts() | {"protocol": PROTOCOL} | ({"commit": args.commit} if args.commit else {})
    with torch.no_grad():
        same = compared_tokens(parallel, 512)
        facts["same_greedy_tokens"] = round(same, 4)
        if parallel.rank == 0:
            print(f"greedy tokens of {_LAYERS} layers that are one GPU's: {same:.1%}", flush=True)
        rows = []
        for text in args.cells.split(","):
            name, _, form = text.partition(":")
            rows += cell(name, form, parallel, args)
            if parallel.rank == 0 and args.out is not None:
                benchmarking.write_results(args.out, rows, facts)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
