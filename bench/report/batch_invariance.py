"""Tables of the batch-invariant mode: bits that were compared, and what the mode costs."""

from __future__ import annotations

from typing import Any

from bench.report.summary import Row, by_suite_and_peer, geomean, shape_text
from bench.report.tables import facts, peer_name, table

GOALS = {"dense": "3 % (10 %)", "w4a16": "3 % (10 %)", "fp8": "3 % (10 %)", "moe": "3 % (10 %)"}
GOALS |= {"decode_attention": "3 % (10 %)", "prefill_attention": "3 % (10 %)", "model": "5 % (5 %)"}
DEFAULT = "ours:default"


def _bits(rows: list[Row]) -> str:
    """A line for each operator; formats that differ are named."""
    operators: dict[str, list[Row]] = {}
    for row in rows:
        operators.setdefault(row["op"], []).append(row)
    lines = []
    for operator, own in operators.items():
        wrong = [row for row in own if row["wrong_problems"]]
        formats = ", ".join(f"{row['shape']['format']}: {row['wrong_problems']} of {row['problems']} problems" for row in wrong)
        numbers, problems = (sum(row[name] for row in own) for name in ("numbers", "problems"))
        lines.append([f"`{operator}`", str(len(own)), str(problems), f"{numbers:,}", formats or "none"])
    return table(["operator", "formats", "problems", "numbers compared", "differ"], lines)


def _kernels(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        what = ", ".join(f"{name} {value}" for name, value in row["shape"].items() if name != "kernels")
        lines.append([f"`{row['op']}`", what, str(row["kernels"]), ", ".join(f"`{name}`" for name in row["wrong"]) or "none"])
    return table(["kernels", "problem", "compared", "differ"], lines)


def _cost(ratio: float) -> str:
    """In percent of the time outside of the mode."""
    return f"{100 * (1 / ratio - 1):.1f} %"


def _costs(rows: list[Row]) -> str:
    lines = []
    for suite, peers in by_suite_and_peer(rows).items():
        own = peers.get(DEFAULT, [])
        if own:
            worst = min(own, key=lambda row: row["ratio"])
            where = f"{_cost(worst['ratio'])} at {shape_text(worst)}"
            lines.append([f"`{suite}`", str(len(own)), f"**{_cost(geomean(own))}**", where, GOALS.get(suite, "-")])
    return table(["suite", "cells", "cost, geomean", "worst cell", "goal, geomean (worst)"], lines)


def _against(rows: list[Row]) -> str:
    lines = []
    for suite, peers in by_suite_and_peer(rows).items():
        for peer, own in peers.items():
            if peer != DEFAULT:
                worst = min(own, key=lambda row: row["ratio"])
                slower = sum(row["ratio"] < 1 for row in own)
                where = f"{worst['ratio']:.2f} at {shape_text(worst)}"
                lines.append([f"`{suite}`", peer_name(peer), str(len(own)), f"**{geomean(own):.3f}**", where, str(slower)])
    return table(["suite", "against", "cells", "geomean", "worst cell", "slower"], lines) if lines else ""


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    rows = results["rows"]
    of = {suite: [row for row in rows if row["suite"] == suite] for suite in ("bits", "kernels", "arrivals")}
    timed = [row for row in rows if "ratio" in row]
    parts = [facts(results)]
    if of["bits"]:
        parts.append(
            "Bits of rows in random company, 1 to 4096 of them at random places, against the same rows among all.\n\n" + _bits(of["bits"])
        )
    if of["kernels"]:
        parts.append("Kernels that add up k alike, over one problem.\n\n" + _kernels(of["kernels"]))
    if timed:
        parts.append("What the mode costs: the time in it over the time outside of it.\n\n" + _costs(timed))
        parts.append(_against(timed))
    for row in of["arrivals"]:
        text = f"{row['requests']} requests that arrived at random, twice with different arrivals: tokens or logprobs of"
        parts.append(f"{text} {row['wrong']} differ.")
    failed = [row for row in rows if "error" in row]
    if failed:
        lines = [[f"`{row['suite']}`", str(row["shape"].get("cell", "")), row["error"].replace("|", "\\|")] for row in failed]
        parts.append("Not measured.\n\n" + table(["suite", "cell", "why"], lines))
    return "\n\n".join(filter(None, parts))
