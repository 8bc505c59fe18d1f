"""Tables of whole models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report.summary import Row
from bench.report.tables import MODEL_NAMES, facts, grouped, peer_name, table


def _ratio(rows: Sequence[Row], peer: str) -> str:
    found = next((row for row in rows if row["peer"] == peer), None)
    return "-" if found is None else f"{found['ratio']:.2f}"


def _peers(rows: Sequence[Row]) -> list[str]:
    return [peer for peer in dict.fromkeys(row["peer"] for row in rows) if peer != "none"]


def _decode(rows: Sequence[Row]) -> str:
    peers, lines = _peers(rows), []
    for (model, form, batch, context), own in grouped(rows, "model", "format", "batch", "context").items():
        first = own[0]
        line = [
            MODEL_NAMES.get(model, model),
            form,
            str(batch),
            str(context),
            f"{first['us'] / 1e3:.2f}",
            f"{first['tokens_per_second']:.0f}",
        ]
        theirs = next((f" ({row['peer_launches']})" for row in own if "peer_launches" in row), "")
        line += [f"{first['fraction']:.0%}", f"{first['launches']}{theirs}", f"{first['peak_gb']:.1f}"]
        line += [_ratio(own, peer) for peer in peers]
        lines.append(line)
    header = [
        "model",
        "weights and cache",
        "batch",
        "context",
        "ms a step",
        "tokens/s",
        "of the floor",
        "launches (of transformers)",
        "GB at most",
    ]
    return table([*header, *(f"over {peer_name(peer)}" for peer in peers)], lines)


def _prefill(rows: Sequence[Row]) -> str:
    peers, lines = _peers(rows), []
    for (model, form, tokens), own in grouped(rows, "model", "format", "tokens").items():
        ms = own[0]["us"] / 1e3
        line = [MODEL_NAMES.get(model, model), form, str(tokens), f"{ms:.1f}", f"{tokens / ms * 1e3:.0f}", f"{own[0]['fraction']:.0%}"]
        lines.append([*line, *(_ratio(own, peer) for peer in peers)])
    header = ["model", "weights and cache", "tokens", "ms to the first token", "tokens/s", "of the floor"]
    return table([*header, *(f"over {peer_name(peer)}" for peer in peers)], lines)


def _serving(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        shape = row["shape"]
        line = [MODEL_NAMES.get(shape["model"], shape["model"]), shape["format"], f"{shape['requests']} at {shape['rate']:g}/s"]
        line += [f"{row['tokens_per_second']:.0f}", f"{row['first_ms_p50']:.0f} / {row['first_ms_p99']:.0f}"]
        lines.append([*line, f"{row['next_ms_p50']:.1f} / {row['next_ms_p99']:.1f}"])
    return table(["model", "weights and cache", "requests", "tokens/s", "first token ms, p50 / p99", "next token ms, p50 / p99"], lines)


def _start(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        shape, steps = row["shape"], ("imported", "loaded", "first", "more")
        line = [MODEL_NAMES.get(shape["model"], shape["model"]), shape["format"], *(f"{row['seconds'][step]:.1f}" for step in steps)]
        lines.append([*line, *(f"{row['peer_seconds'][step]:.1f}" for step in steps)])
    steps = ["imported", "loaded", "first token", "32 more"]
    return table(["model", "weights", *steps, *(f"transformers, 16 bits: {step}" for step in steps)], lines)


SUITES = {
    "decode": (
        "Decode: a step in which each sequence of the batch gets a token, by the host's clock. The floor is the bytes of weights, keys and"
        " values at the device's read bandwidth. Ratios are (time of the peer) / (time of minfer). The memory has a cache for"
        " the largest batch of the run.",
        _decode,
    ),
    "prefill": ("Prompts. The floor is the flops of products and causal attention at the device's 16-bit matrix rate.", _prefill),
    "start": (
        "Seconds from the start of a Python process until packages are imported, weights are on the GPU, a prompt of 64 tokens has its"
        " first token, and 32 more. The checkpoints are on local disk and have just been written.",
        _start,
    ),
    "serving": ("Requests that arrive at random times (Poisson), prompts of 64 to 1024 tokens, 32 to 256 generated.", _serving),
}


def section(results: dict[str, Any]) -> str:
    """Markdown of a results file."""
    parts = [facts(results)]
    for suite, (title, lines) in SUITES.items():
        rows = [row for row in results["rows"] if row["suite"] == suite]
        if rows:
            parts += [title, lines(rows)]
    return "\n\n".join(parts)
