"""Tables of the plan's regret: how much slower the analytic plan is than the best candidate that was timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from bench.report.random import by_band, errors, seeds
from bench.report.summary import Row, shape_text
from bench.report.tables import facts, grouped, table

WORST = 12
GROUPED, GROUPED_SCALED, ATTENTION = "regret_grouped", "regret_grouped_scaled", "regret_attention"
ROUTINGS = {"uniform": "uniform routing", "zipf": "Zipf routing", "one_hot": "all tokens to the same experts"}


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


def _by(rows: Iterable[Row], name_of: Callable[[dict[str, Any]], str], order: Iterable[str] = ()) -> dict[str, list[Row]]:
    """Rows by what ``name_of`` makes of their shape, names of ``order`` first; those that have none are left out."""
    found: dict[str, list[Row]] = {name: [] for name in order}
    for row in rows:
        found.setdefault(name_of(row["shape"]), []).append(row)
    return {name: of_name for name, of_name in found.items() if of_name}


def _keys_of(shape: dict[str, Any]) -> str:
    """Where keys and values lie."""
    cache = shape["kv_format"]
    return "tensors" if cache is None else "16-bit cache" if cache == "16bit" else "cache of codes"


def _operands_of(shape: dict[str, Any]) -> str:
    if "a_group" in shape:  # of 8 bits
        return f"scales of {shape['a_group']} of k" if shape["a_group"] else "scales of rows"
    return "16-bit weights" if shape["weights"] == "dense" else f"{shape['weights']} weights"


def _breakdowns(suite: str, rows: list[Row]) -> list[dict[str, list[Row]]]:
    """Rows of a suite by name, divided in several ways."""
    if suite in (GROUPED, GROUPED_SCALED):
        weights = _by(rows, _operands_of, ["16-bit weights"])
        gathers = _by(rows, lambda s: "gathered" if s["gathered"] else "in order", ["in order", "gathered"])
        routings = _by(rows, lambda s: ROUTINGS.get(s["routing"], s["routing"]), ROUTINGS.values())
        return [weights, routings, gathers, {f"tokens {band}": of_band for band, of_band in by_band(rows).items()}]
    if suite == ATTENTION:
        keys = _by(rows, _keys_of, ["tensors", "16-bit cache", "cache of codes"])
        heads = _by(rows, lambda s: f"head_dim {s['head_dim']}", ["head_dim 64", "head_dim 128", "head_dim 256"])
        return [keys, heads, {f"queries {band}": of_band for band, of_band in by_band(rows).items()}]
    dense = [row for row in rows if "layout" in row["shape"]]
    layouts = {f"layout {layout}": of_layout for layout, of_layout in grouped(dense, "layout").items()}
    return [layouts, {f"m {band}": of_band for band, of_band in by_band(rows).items()}]


def _tables(suite: str, rows: list[Row]) -> str:
    lines = [_line(f"`{suite}`", rows)]
    lines += [_line(name, of_name) for breakdown in _breakdowns(suite, rows) for name, of_name in breakdown.items()]
    return table(["problems of", "problems", "mean", "median", "p95", "worst"], lines)


def _worst(rows: list[Row], cell: str) -> str:
    lines = []
    for r in sorted(rows, key=lambda row: -row["regret"])[:WORST]:
        layout = f" {r['shape']['layout']}" if "layout" in r["shape"] else ""
        pick, best = r["kernel"], r["best"].partition("@")[0]
        if r["suite"] in (GROUPED, GROUPED_SCALED):  # whose overrides say only whether rows are gathered first
            pick, best = (f"{r['kernel']}@{r['launch']}" if r["launch"] else r["kernel"]), r["best"]
        numbers = [f"{r['us']:.2f}", f"{r['peer_us']:.2f}", f"{r['regret']:.1%}"]
        lines.append([shape_text(r) + layout, r["dtype"], *numbers, pick, best])
    return "The worst:\n\n" + table([cell, "dtype", "plan, us", "best, us", "regret", "plan", "best"], lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    by_suite = _by_suite(row for row in results["rows"] if "regret" in row)
    dense = {suite: rows for suite, rows in by_suite.items() if suite not in (GROUPED, GROUPED_SCALED, ATTENTION)}
    parts = [
        facts(results) + " " + seeds(results) + " Regret: the time of the analytic plan over the least time of all candidates near its"
        " prediction, less 1. No tuned rows take part, and the model was not fitted to these problems."
    ]
    parts += [_tables(suite, rows) for suite, rows in dense.items()]
    if dense:
        parts.append(_worst([row for rows in dense.values() for row in rows], "m x n x k"))
    of_experts = {suite: by_suite[suite] for suite in (GROUPED, GROUPED_SCALED) if suite in by_suite}
    if of_experts:
        parts.append(
            "Grouped GEMM: the candidates are all kernels, and where rows are gathered each also with a launch of its own that gathers them"
            " first. The plan does not know the routing: it takes the kernel that is expected to lose least over three of them."
        )
    for suite, rows in of_experts.items():
        parts += [_tables(suite, rows), _worst(rows, "problem")]
    if rows := by_suite.get(ATTENTION, []):
        parts.append(
            "Attention: the candidates are all prefill kernels that have the head dimension, larger ones included, and over a cache the"
            " split-KV kernels, too. A problem is batch x queries x keys."
        )
        parts += [_tables(ATTENTION, rows), _worst(rows, "problem")]
    return "\n\n".join(filter(None, [*parts, errors(results["rows"], "m x n x k" if len(dense) == len(by_suite) else "problem")]))


def _by_suite(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["suite"], []).append(row)
    return found
