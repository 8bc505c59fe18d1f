"""The table of what quantisation costs."""

from __future__ import annotations

from typing import Any

from bench.report.tables import facts, table


def section(results: dict[str, Any]) -> str:
    """Markdown of a results file."""
    lines = [
        [row["format"], f"{row['perplexity']:.4f}", f"{row['agreement']:.2%}", f"{row['kl']:.1e}"]
        for row in results["rows"]
        if row["suite"] == "accuracy"
    ]
    header = ["weights or cache", "perplexity", "same next token as 16 bits", "KL divergence from 16 bits"]
    return "\n\n".join([facts(results), f"Held-out text: {results['protocol']}.", table(header, lines)])
