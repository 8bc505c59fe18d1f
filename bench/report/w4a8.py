"""Tables of the products of 8-bit activations and int4 weights."""

from __future__ import annotations

from typing import Any

from bench.report.random import BANDS, band_name, by_band, seeds
from bench.report.scaled_gemm import errors_of_peers
from bench.report.summary import Row, by_suite_and_peer, geomean, shape_text
from bench.report.tables import facts, geomean_and_min, losses, peer_name, table


def _overview(rows: list[Row]) -> str:
    lines = []
    for suite, of_suite in by_suite_and_peer(rows).items():
        for name, of_peer in of_suite.items():
            worst = min(of_peer, key=lambda row: row["ratio"])
            where = f"{worst['ratio']:.2f} at {shape_text(worst)}"
            slower = sum(row["ratio"] < 1 for row in of_peer)
            lines.append([f"`{suite}`", peer_name(name), str(len(of_peer)), f"**{geomean(of_peer):.3f}**", where, str(slower)])
    return table(["suite", "against", "cells", "geomean", "worst cell", "slower"], lines)


def _by_tokens(rows: list[Row]) -> str:
    """A line for each band of m, a column for each peer; our own share of the floor."""
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    split = {peer: by_band(row for row in rows if row["peer"] == peer) for peer in peers}
    every = by_band(rows)
    lines = []
    for name in map(band_name, BANDS):
        if every[name]:
            shares = sorted(row["fraction"] for row in every[name])
            lines.append([name, *(geomean_and_min(split[peer][name]) for peer in peers), f"{shares[len(shares) // 2]:.0%}"])
    return table(["m", *map(peer_name, peers), "of the floor, median"], lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    rows = [row for row in results["rows"] if "ratio" in row]
    text = (
        " Every cell was checked against float64 before it was timed. A ratio above 1 means that `w4a8_gemm` is faster. Beside kernels of"
        " other libraries stand our own products of the same weight with 16-bit activations, and of e4m3 weights, twice as many bytes."
    )
    parts = [facts(results) + " " + seeds(results) + text, _overview(rows)]
    for dtype, what in (("e4m3", "e4m3"), ("s8", "int8")):
        own = [row for row in rows if row["dtype"] == dtype]
        if own:
            parts.append(f"Activations of {what}, by m: geometric mean (worst cell).\n\n" + _by_tokens(own))
    parts += [losses([row for row in rows if not row["peer"].startswith("ours:")]), errors_of_peers(results["rows"])]
    return "\n\n".join(filter(None, parts))
