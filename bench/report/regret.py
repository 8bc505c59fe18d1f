"""Tables of the plan's regret: how much slower the analytic plan is than the best candidate that was timed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from bench.report.random import by_band, errors, seeds
from bench.report.summary import Row, shape_text
from bench.report.tables import facts, grouped, table

WORST = 12


def quantile(values: Iterable[float], share: float) -> float:
    """The value that a share of the sorted values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


def _line(name: str, rows: list[Row]) -> list[str]:
    regrets = [row["regret"] for row in rows]
    if not regrets:
        return [name, "0", "-", "-", "-", "-"]
    median, p95 = statistics.median(regrets), quantile(regrets, 0.95)
    return [name, str(len(rows)), f"{statistics.mean(regrets):.1%}", f"{median:.1%}", f"{p95:.1%}", f"{max(regrets):.1%}"]


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    rows = [row for row in results["rows"] if "regret" in row]
    parts = [
        facts(results) + " " + seeds(results) + " Regret: the time of the analytic plan over the least time of all candidates near its"
        " prediction, less 1. No tuned rows take part, and the model was not fitted to these problems."
    ]
    header = ["problems of", "problems", "mean", "median", "p95", "worst"]
    for suite, of_suite in _by_suite(rows).items():
        lines = [_line(f"`{suite}`", of_suite)]
        lines += [_line(f"layout {layout}", of_layout) for layout, of_layout in grouped(of_suite, "layout").items()]
        lines += [_line(f"m {band}", of_band) for band, of_band in by_band(of_suite).items()]
        parts.append(table(header, lines))
    worst = sorted(rows, key=lambda row: -row["regret"])[:WORST]
    lines = [
        [f"{shape_text(r)} {r['shape']['layout']}", r["dtype"], f"{r['us']:.2f}", f"{r['peer_us']:.2f}", f"{r['regret']:.1%}", r["kernel"],
         r["best"].partition("@")[0]]
        for r in worst
    ]  # fmt: skip
    parts.append("The worst:\n\n" + table(["m x n x k", "dtype", "plan, us", "best, us", "regret", "plan", "best"], lines))
    return "\n\n".join(filter(None, [*parts, errors(results["rows"])]))


def _by_suite(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["suite"], []).append(row)
    return found
