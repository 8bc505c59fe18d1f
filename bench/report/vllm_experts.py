"""The table of 4-bit experts in vLLM's layer."""

from __future__ import annotations

from typing import Any

from bench.report.tables import MODEL_NAMES, facts, grouped, table


def section(results: dict[str, Any]) -> str:
    """Markdown of a results file."""
    lines = []
    for (model, form, m), (row, *_) in grouped(results["rows"], "model", "format", "m").items():
        peer = row["peer"] != "none"
        line = [MODEL_NAMES.get(model, model), form, str(m), f"{row['us']:.1f}", f"{row['floor_us']:.1f}"]
        lines.append([*line, f"{row['peer_us']:.1f}" if peer else "-", f"{row['ratio']:.2f}" if peer else "-"])
    header = ["model", "checkpoint", "tokens", "us", "floor", "us by vLLM's Marlin", "times as fast"]
    return f"{facts(results)} Both by vLLM's quantisation method, and what follows the router.\n\n" + table(header, lines)
