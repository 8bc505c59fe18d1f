"""The table of vLLM's layers with minfer's plug-in."""

from __future__ import annotations

from typing import Any

from bench.report.tables import MODEL_NAMES, facts, grouped, table


def section(results: dict[str, Any]) -> str:
    """Markdown of a results file."""
    lines = []
    for (model, form, batch, context), (row, *_) in grouped(results["rows"], "model", "format", "batch", "context").items():
        peer = row["peer"] != "none"
        line = [MODEL_NAMES.get(model, model), form, str(batch), str(context), f"{row['us'] / 1e3:.2f}"]
        lines.append([*line, f"{row['peer_us'] / 1e3:.2f}" if peer else "-", f"{row['ratio']:.2f}" if peer else "-"])
    header = ["model", "weights and cache", "batch", "context", "ms", "ms by vLLM's kernels", "times as fast"]
    return f"{facts(results)} A decode step as a CUDA graph, without vLLM's scheduler.\n\n" + table(header, lines)
