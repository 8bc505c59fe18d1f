"""The evidence of attention: which cells a command has, and their run. What a cell measures: attention_{prefill,chunks,decode,append,
accuracy}.py.

prefill and variants: whole prompts; chunks: some queries over KV caches; decode: one query over them; append: new tokens into them;
accuracy: errors, no times.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from bench.suites import attention_accuracy, attention_append, attention_chunks, attention_decode, attention_prefill
from bench.suites.attention_common import DTYPES, AttentionResults, with_modules
from bench.suites.moe import chosen_of

MODULES = {
    "accuracy": attention_accuracy,
    "append": attention_append,
    "prefill": attention_prefill,
    "variants": attention_prefill,
    "chunks": attention_chunks,
    "decode": attention_decode,
}
OF_SUITE = attention_prefill.PEERS | {suite: MODULES[suite].PEERS for suite in ("accuracy", "append", "chunks", "decode")}
WITHOUT_GPU = ("accuracy",)  # suites that time nothing
SUITES = ("prefill", "variants", "chunks", "decode", "append", "accuracy")
PEERS = ("cudnn", "fa3", "flashinfer", "torch_compile", "fa4")
DEFAULT_PEERS = PEERS[:4]  # fa4 compiles for minutes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    head_dims, seqlens = attention_prefill.HEADS, attention_prefill.SEQLENS
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/attention.json")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--head-dims", default=",".join(map(str, head_dims)), help=f"of {', '.join(map(str, head_dims))}")
    parser.add_argument("--seqlens", default=",".join(map(str, seqlens)), help="comma separated; of prefill")
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph-us", type=float, default=500.0)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """In the order of their measurement: what takes seconds first."""
    head_dims, seqlens = ([int(x) for x in text.split(",")] for text in (args.head_dims, args.seqlens))
    suites, dtypes = chosen_of(args.suite, "suite", SUITES), chosen_of(args.dtypes, "dtypes", tuple(DTYPES))
    found = []
    if "accuracy" in suites:
        found += attention_accuracy.cells(dtypes, head_dims)
    if "append" in suites:
        found += attention_append.cells(dtypes)
    for suite in ("prefill", "variants"):
        if suite in suites:
            found += attention_prefill.cells(suite, dtypes, head_dims, seqlens)
    if "chunks" in suites and 128 in head_dims:
        found += attention_chunks.cells(dtypes)
    if "decode" in suites and 128 in head_dims:
        found += attention_decode.cells(dtypes)
    return found


def main(args: argparse.Namespace) -> int:
    chosen = cells(args)
    if args.dry_run:
        for cell in chosen:
            print(cell)
        return 0
    if not torch.cuda.is_available() and any(cell["suite"] not in WITHOUT_GPU for cell in chosen):
        print(f"bench.suites measures on a GPU, and there is none; --suite {','.join(WITHOUT_GPU)} needs none, --dry-run lists the cells")
        return 2
    if not torch.cuda.is_available() and args.out is not None and args.out.exists():
        print(f"{args.out} exists, and its rows are a GPU's: rows of a CPU need a file of their own")
        return 2
    peers = chosen_of(args.peers, "peers", PEERS) if args.peers else []
    peers = with_modules(peers, {peer for cell in chosen for peer in OF_SUITE[cell["suite"]]})
    results = AttentionResults(args.out, args.commit)
    begin, decode_begin, wrong = time.monotonic(), None, []
    for cell in chosen:
        if cell["suite"] == "decode" and decode_begin is None:
            decode_begin = time.monotonic()
        late = decode_begin is not None and time.monotonic() - decode_begin > attention_decode.SECONDS
        if late or time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            own = [peer for peer in peers if peer in OF_SUITE[cell["suite"]]]
            print(MODULES[cell["suite"]].measure(cell, args, results, own), flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0
