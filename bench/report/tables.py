"""What the report of every family is made of: Markdown tables, the overview of suites and peers, the losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench.report.summary import Row, geomean, shape_text, verdict

PEER_NAMES = {
    "cublas": "cuBLAS",
    "cublaslt_best": "cuBLASLt best of 32",
    "quack": "quack",
    "deepgemm": "DeepGEMM",
    "torch_compile": "torch.compile",
    "flashinfer": "FlashInfer",
    "marlin": "Marlin",
    "machete": "Machete",
    "fbgemm": "FBGEMM",
    "ours:best": "own best, tuned",
    "ours:plain": "own, groups of 128, no zero points",
    "ours:gemm+silu_and_mul": "own GEMM, then silu and multiply",
    "best": "the best of them",
    "torch_grouped": "torch._grouped_mm",
    "vllm_triton": "vLLM Triton",
    "vllm": "vLLM's kernels",
    "torch": "torch's operators",
    "liger": "Liger",
    "copy": "a copy of as many bytes",
    "ours:separate": "own operators one by one",
    "cublaslt": "cuBLASLt",
    "cublaslt_fast": "cuBLASLt (fast sums)",
    "int_mm": "torch._int_mm (sums alone)",
    "vllm_deepgemm": "vLLM with DeepGEMM",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "ours:causal": "own, causal, by flops",
    "ours:gather": "own, with the gather",
    "ours:with its GEMM": "own, with the router's GEMM",
    "ours:16bit": "own, 16-bit weights",
    "ours:mxfp4": "own, mxfp4",
    "ours:fast": "own, fast sums",
    "ours:w4a16": "own, 16-bit activations",
    "ours:fp8": "own, e4m3 weights",
    "transformers": "transformers",
    "transformers_compiled": "transformers, compiled",
    "vllm_ops": "vLLM's operators",
    "vllm_marlin": "vLLM's Marlin",
    "ours:bf16": "own, 16 bits",
    "ours:default": "own, outside of the mode",
    "torch_autotune": "torch.compile (max-autotune)",
    "cublas_then_compile": "cuBLAS + torch.compile",
    "flex_attention": "flex_attention",
    "ours:ahead_of_time": "own operator",
    "ours:no_epilogue": "own product without the epilogue",
    "ours:attention": "own attention, by pairs",
    "ours:soft_cap": "own attention with a soft cap",
    "triton_persistent": "a persistent Triton product",
}
MODEL_NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.1-70b": "Llama-3.1-70B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "mixtral-8x22b": "Mixtral-8x22B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "deepseek-v3": "DeepSeek-V3",
    "gpt-oss-120b": "gpt-oss-120b",
    "gemma-2-9b": "Gemma-2-9B",
    "gpt2": "GPT-2",
}
LAYER_NAMES = ("qkv", "out", "gate+up", "down")  # the order of a model's layers in the suites
LAYER_LINES = ("-", "--", "-.", ":")
MODEL_COLOURS = {
    "llama-3.1-8b": "#1f6fb4",
    "llama-3.1-70b": "#d1622b",
    "qwen2.5-7b": "#3a8f4d",
    "mixtral-8x7b": "#1f6fb4",
    "mixtral-8x22b": "#3aa6a0",
    "qwen3-30b-a3b": "#3a8f4d",
    "deepseek-v3": "#d1622b",
    "gpt-oss-120b": "#8a4fb0",
}
LOSSES = 12


def peer_name(peer: str) -> str:
    return PEER_NAMES.get(peer, peer)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Rows by fields of their shape, in order of first appearance; a single key is not wrapped in a tuple."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row["shape"].get(k) for k in keys)
        found.setdefault(key if len(keys) > 1 else key[0], []).append(row)
    return found


def geomean_and_min(rows: Sequence[Row] | None) -> str:
    return f"{geomean(rows):.2f} ({min(row['ratio'] for row in rows):.2f})" if rows else "-"


def facts(results: dict[str, Any]) -> str:
    """Where, with what and when the results were measured."""
    commits: dict[str, set[str]] = {}
    for row in results["rows"]:
        commits.setdefault(row.get("commit", results["commit"]), set()).add(f"`{row['suite']}`")
    others = "".join(f" ({', '.join(sorted(suites))}: {commit})" for commit, suites in commits.items() if commit != results["commit"])
    return (
        f"{results['device']}, driver {results['driver']}, torch {results['torch']}, CUDA {results['cuda']}, commit {results['commit']}"
        f"{others}, {results['date']}."
    )


def against(peers: dict[str, list[Row]], base: str, peer: str) -> dict[tuple, float]:
    """How many times faster than ``base`` a peer is on the cells that both were measured on, through our own time."""
    ratios = {(shape_text(row), row["dtype"]): row["ratio"] for row in peers.get(base, [])}
    found = {}
    for row in peers.get(peer, []):
        key = (shape_text(row), row["dtype"])
        if key in ratios:
            found[key] = ratios[key] / row["ratio"]
    return found


def overview(suites: dict[str, dict[str, list[Row]]]) -> str:
    """A line for each suite and peer; a column of goals where there are any."""
    rows = []
    for suite, peers in suites.items():
        for peer, of_peer in peers.items():
            worst = min(of_peer, key=lambda row: row["ratio"])
            slower = sum(row["ratio"] < 1 for row in of_peer)
            goal = verdict(suite, peer, of_peer)
            rows.append(
                [f"`{suite}`", peer_name(peer), str(len(of_peer)), f"**{geomean(of_peer):.3f}**",
                 f"{worst['ratio']:.2f} at {shape_text(worst)}", str(slower), goal or "-"]
            )  # fmt: skip
    header = ["suite", "peer", "cells", "geomean", "worst cell", "lost", "goals"]
    shown = len(header) if any(row[-1] != "-" for row in rows) else len(header) - 1
    return table(header[:shown], [row[:shown] for row in rows])


def losses(rows: Sequence[Row], cell: str = "m x n x k") -> str:
    """The worst cells where a peer is faster; ``cell``: what shape_text() says."""
    lost = sorted((row for row in rows if row["ratio"] < 1 and not row["peer"].startswith("ours:")), key=lambda row: row["ratio"])
    if not lost:
        return "No cell was slower than a peer's."
    shown = [
        [f"`{r['suite']}`", shape_text(r), r["dtype"], f"{r['us']:.2f}", f"{peer_name(r['peer'])} {r['peer_us']:.2f}", f"{r['ratio']:.2f}"]
        for r in lost[:LOSSES]
    ]
    head = f"Where a peer is faster: {len(lost)} of {len(rows)} comparisons"
    head += f", the worst {LOSSES} (the others are in the results file):" if len(lost) > LOSSES else ":"
    return head + "\n\n" + table(["suite", cell, "dtype", "us", "peer, us", "ratio"], shown)
