"""The README's one table: every family against the best peer of each cell, the losses counted.

A cell is one shape, variant and element type of a suite. Its best peer is the fastest of the other libraries that were timed on it;
forms of our own are no peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bench.report.summary import Row, geomean, shape_text
from bench.report.tables import geomean_and_min, grouped, peer_name, table


class Headline(NamedTuple):
    """A line of the table: what is compared, the results file and the suites whose cells it sums up; where they are given, of what format
    alone, for a peer is compared on what it computes itself, and beside which peer alone."""

    what: str
    shapes: str
    family: str
    suites: tuple[str, ...]
    format: str | None = None
    peer: str | None = None


HEADLINES = (
    Headline("dense GEMM", "linear layers of three models, m = 1 to 8192", "gemm", ("llm",)),
    Headline("dense GEMM", "squares, four pairs of (alpha, beta)", "gemm", ("square",)),
    Headline("dense GEMM", "fused epilogues and gated products", "gemm", ("epilogue",)),
    Headline("dense GEMM", "shapes that no tuned table holds", "gemm", ("heldout", "untuned")),
    Headline("dense GEMM", "random odd shapes, any alignment", "gemm", ("odd",)),
    Headline("dense GEMM", "random problems, all layouts, multiples of 64", "random", ("random",)),
    Headline("dense GEMM", "random problems, all layouts, any n and k", "random", ("random_unaligned",)),
    Headline("GEMM, 4-bit weights", "linear layers of two models, m = 1 to 8192", "w4a16", ("w4a16", "w4a16_bf16")),
    Headline("GEMM, 8-bit weights", "four linear layers, int8 and fp8, m = 1 to 1024", "w4a16", ("w8a16",)),
    Headline("GEMM, 4-bit weights", "random problems", "random", ("random_w4a16",)),
    Headline("GEMM, 4-bit weights, FP8 activations", "linear layers of two models, m = 16 to 8192", "w4a8", ("w4a8_fp8",)),
    Headline("GEMM, FP8", "layers of three models, m = 1 to 8192", "fp8", ("fp8_small", "fp8_middle", "fp8_large")),
    Headline("GEMM, FP8", "random problems", "fp8", ("fp8_random",)),
    Headline("GEMM, INT8", "layers of three models, random problems", "int8", ("int8_small", "int8_middle", "int8_large", "int8_random")),
    Headline("grouped GEMM", "five models, uniform routing", "moe", ("grouped",)),
    Headline("grouped GEMM", "five models, Zipf routing", "moe", ("grouped_zipf",)),
    Headline("grouped GEMM", "five models, every token to the same experts", "moe", ("grouped_one_hot",)),
    Headline("grouped GEMM, 4-bit weights", "five models, uniform routing", "moe", ("w4a16",)),
    Headline("MoE layer, 4-bit weights, inside vLLM", "two models, 1 to 4096 tokens", "vllm_experts", ("vllm_experts",)),
    Headline("MoE router and sort", "five models, 1 to 16384 tokens", "moe", ("router",)),
    Headline("MoE layer", "five models, 1 to 16384 tokens", "moe", ("layer",)),
    Headline("grouped GEMM, FP8", "4 to 32 experts of 1 to 8192 rows", "moe_scaled", ("fp8_masked", "fp8_contiguous")),
    Headline("MoE layer, FP8", "two models, 1 to 4096 tokens", "moe_scaled", ("fp8_layer",)),
    Headline(
        "grouped GEMM and MoE layer, INT8",
        "three products; two models, 1 to 4096 tokens",
        "moe_scaled",
        ("int8_masked", "int8_contiguous", "int8_layer"),
    ),
    Headline("attention, prefill", "head_dim 64, 128, 256, causal and full", "attention", ("prefill",)),
    Headline("attention, prefill", "varlen, windows, softcap, sinks", "attention", ("variants",)),
    Headline("attention, chunks of prompts", "16 to 1024 queries over 2048 to 65536 keys in pages", "attention", ("chunks",)),
    Headline("attention, decode", "16-bit caches, batch 1 to 256", "attention", ("decode",)),
    Headline("KV-cache append", "16-bit cache, 64 sequences", "attention", ("append",)),
    Headline("norms, activations, embeddings", "256 MB, widths 896 to 262144", "fused", ("rows",)),
    Headline("norms, activations, embeddings", "1 to 64 rows", "fused", ("small",)),
    Headline("norms and gates with 8-bit results", "4096 x 4096, 16384 x 8192", "fused", ("quant",)),
    Headline("norms, rotation and append in one", "16-bit cache, batch 1 to 256", "fused", ("append",)),
    Headline("norm and product in one operator", "three models, m = 1 to 64", "fused", ("norm_gemm",)),
    Headline("sampling", "five vocabularies, batch 1 to 512", "fused", ("sample",)),
    Headline("decode step of a layer", "Llama-3.1-8B, batch 1 to 64", "fused", ("decode_layer",)),
    Headline("functions that users fuse", "rows, GEMM epilogues, scores and masks of attention", "fuse", ("rows", "gemm", "attention")),
    Headline("dense GEMM in the batch-invariant mode", "layers of three models, m = 1 to 4096", "batch_invariance", ("dense",)),
    Headline("whole models in 16 bits, decode", "two dense models, batch 1 to 256", "e2e", ("decode",), "bf16", "vllm_ops"),
    Headline("whole models, 4-bit weights, decode", "two dense models, batch 1 to 256", "e2e", ("decode",), "w4a16", "vllm_ops"),
    Headline("whole models in 16 bits, decode", "six models, batch 1 to 64", "e2e", ("decode",), "bf16", "transformers"),
    Headline("whole models in 16 bits, prompts", "six models, 512 to 32768 tokens", "e2e", ("prefill",), "bf16", "transformers"),
)


def cell_of(row: Row) -> tuple:
    """What tells two cells apart; a peer that reads no pages is compared on the same keys stored contiguously."""
    return (row["suite"], row["dtype"], *sorted((key, str(value)) for key, value in row["shape"].items() if key != "page"))


def best_of_cells(rows: Iterable[Row]) -> list[Row]:
    """The row of each cell's fastest peer, in order of first appearance."""
    best: dict[tuple, Row] = {}
    for row in rows:
        if row["peer"].startswith("ours:") or row["peer"] in ("copy", "none") or "error" in row:
            continue
        key = cell_of(row)
        if key not in best or row["ratio"] < best[key]["ratio"]:
            best[key] = row
    return list(best.values())


def headline(rows: Iterable[Row], line: Headline) -> list[str] | None:
    """The cells of one line of the table; None where nothing was measured."""
    own = [row for row in rows if row["suite"] in line.suites and line.format in (None, row["shape"].get("format"))]
    own = [row for row in own if line.peer in (None, row["peer"])]
    best = best_of_cells(own)
    if not best:
        return None
    worst = min(best, key=lambda row: row["ratio"])
    timed = [row["peer"] for row in own if "error" not in row and row["peer"] != "none"]
    peers = dict.fromkeys(peer_name(peer) for peer in timed if not peer.startswith("ours:"))
    return [
        line.what,
        line.shapes,
        ", ".join(peers),
        str(len(best)),
        f"**{geomean(best):.2f}**",
        str(sum(row["ratio"] < 1 for row in best)),
        f"{worst['ratio']:.2f}: {shape_text(worst)}, {peer_name(worst['peer'])}",
    ]


def section(results: dict[str, dict[str, Any]], others: Sequence[dict[str, dict[str, Any]]] = ()) -> str:
    """Markdown of the table; ``results``: of each family's file. ``others``: of devices whose tables stand in front of it; what they have a
    line of is left out."""
    lines = []
    for line in HEADLINES:
        if line.family in results and not any(line.family in o and headline(o[line.family]["rows"], line) for o in others):
            lines.append(headline(results[line.family]["rows"], line))
    dates = sorted({family["date"] for family in results.values()})
    first = next(iter(results.values()))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    text = (
        f"{first['device']}, CUDA {first['cuda']}, torch {first['torch']}, {when}. The geometric mean is over all cells of (time of the"
        " fastest peer that was timed on it) / (time of minfer); a cell is lost where that is below 1. Not every peer was timed on every"
        " cell."
    )
    text += " Lines of the table above are left out.\n\n" if others else "\n\n"
    header = ["operator", "measured on", "peers", "cells", "geomean over the best peer", "lost", "worst cell"]
    text += table(header, [line for line in lines if line])
    codes = [row for row in results.get("attention", {"rows": []})["rows"] if row["suite"] == "decode" and row["peer"] == "ours:16bit"]
    if codes:
        of_format = [f"{name} {geomean_and_min(rows)}" for name, rows in grouped(codes, "format").items()]
        text += (
            "\n\nNo peer was timed on quantised caches. Decode over them, relative to decode over our own 16-bit cache, geometric mean"
            f" (worst cell): {', '.join(of_format)}."
        )
    return text
