"""The table of whole models among GPUs."""

from __future__ import annotations

from typing import Any

from bench.report.tables import MODEL_NAMES, facts, table


def section(results: dict[str, Any]) -> str:
    """Markdown of a results file."""
    lines = []
    for row in results["rows"]:
        shape, ms = row["shape"], row["us"] / 1e3
        what = f"decode, batch {shape['batch']}" if row["op"] == "decode" else f"prompt of {shape['tokens']} tokens"
        alone = row["peer"] == "ours:one_gpu"
        line = [MODEL_NAMES.get(shape["model"], shape["model"]), shape["format"], what, str(shape["ranks"]), f"{ms:.2f}"]
        line += [
            f"{row['collectives_share']:.0%}",
            f"{row['peer_us'] / 1e3:.2f}" if alone else "-",
            f"{row['ratio']:.2f}" if alone else "-",
        ]
        lines.append(line)
    header = ["model", "weights", "what", "GPUs", "ms", "of which collectives", "ms on one GPU", "times as fast"]
    same = results["same_greedy_tokens"]
    return "\n\n".join(
        [
            f"{facts(results)} Decode at 1024 tokens of context. What collectives take is the difference from the same run with collectives"
            f" that do nothing. Of a model of two layers, {same:.0%} of the greedy tokens in front of the first other one are those of one"
            " GPU: random weights have many near ties.",
            table(header, lines),
        ]
    )
