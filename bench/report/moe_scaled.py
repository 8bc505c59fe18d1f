"""Tables of grouped products and mixture-of-experts layers of 8-bit operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report.moe import best_of, in_order, model_name, time_text
from bench.report.random import seeds
from bench.report.scaled_gemm import errors_of_peers
from bench.report.summary import Row, by_suite_and_peer
from bench.report.tables import facts, grouped, losses, overview, peer_name, table

ORDER = tuple(f"{kind}_{what}" for kind in ("fp8", "int8") for what in ("masked", "contiguous", "layer"))
WHAT = {
    "masked": "experts' slabs of which the first rows are used, as expert parallelism in CUDA graphs has them",
    "contiguous": "experts' rows behind each other, as a prompt has them",
    "layer": "layers, bf16 tokens in and out",
}
SCALES = {"fp8": "e4m3, scales of 1 x 128 and of 128 x 128", "int8": "int8, scales of rows and columns"}


def suites_of(results: dict[str, Any]) -> dict[str, dict[str, list[Row]]]:
    """suite -> peer -> rows, ours first; with the best peer of each cell where there are several."""
    found = by_suite_and_peer(in_order(row for row in results["rows"] if "ratio" in row))
    suites = {}
    for suite in sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        peers = {peer: found[suite][peer] for peer in sorted(found[suite], key=lambda peer: (not peer.startswith("ours:"), peer))}
        best = best_of(peers)
        others = [peer for peer in peers if not peer.startswith("ours:")]
        suites[suite] = peers | ({"best": best} if len(others) > 1 else {})
    return suites


def _rate(row: Row) -> float:
    """TFLOP/s of a grouped product."""
    s = row["shape"]
    return 2.0 * s["experts"] * s["m"] * s["n"] * s["k"] / row["us"] / 1e6


def _products(peers: dict[str, list[Row]]) -> str:
    """A line for each cell: our time, share of the floor and rate, and how many times as fast as each peer."""
    names = [peer for peer in peers if peer != "best"]
    cells = grouped((row for peer in names for row in peers[peer]), "experts", "m", "n", "k")
    lines = []
    for (experts, m, n, k), rows in cells.items():
        by_peer, own = {row["peer"]: row for row in rows}, rows[0]
        ratios = [f"{by_peer[peer]['ratio']:.2f}" if peer in by_peer else "-" for peer in names]
        time = [f"{time_text(own['us'])} us", f"{own['fraction']:.0%}", f"{_rate(own):.0f}"]
        lines.append([f"{experts} x {m}", f"{n} x {k}", *time, *ratios])
    return table(["experts x rows", "n x k", "time", "of the floor", "TFLOP/s", *map(peer_name, names)], lines)


def _layers(peers: dict[str, list[Row]]) -> str:
    """A line for each number of tokens and a column for each model."""
    names = [peer for peer in peers if peer != "best"]
    cells = grouped((row for peer in names for row in peers[peer]), "m", "model")
    models = list(dict.fromkeys(model for _, model in cells))
    experts = {model: next(rows[0] for (_, name), rows in cells.items() if name == model)["shape"]["experts"] for model in models}
    lines = []
    for tokens in sorted({tokens for tokens, _ in cells}):
        line = [str(tokens)]
        for model in models:
            rows = cells.get((tokens, model))
            if rows is None:
                line.append("-")
                continue
            by_peer = {row["peer"]: row for row in rows}
            ratios = " / ".join(f"{by_peer[peer]['ratio']:.2f}" if peer in by_peer else "-" for peer in names)
            line.append(f"{time_text(rows[0]['us'])} us, {rows[0]['fraction']:.0%}: {ratios}")
        lines.append(line)
    header = ["tokens", *(f"{model_name(model)}, {experts[model]} experts" for model in models)]
    return f"Our time, share of the floor: how many times as fast as {' / '.join(map(peer_name, names))}.\n\n" + table(header, lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    suites = suites_of(results)
    protocol = (
        " Every cell was checked before it was timed: products against float64, layers against float64 of the codes of the weights and of"
        " unquantised activations, from which ours and the peers may differ by what codes of activations cost. Our 16-bit operators get the"
        " values of the codes. A ratio above 1 means that 8 bits of minfer are faster."
    )
    parts = [facts(results) + " " + seeds(results) + protocol]
    if suites:
        parts.append(overview(suites))
    for suite, peers in suites.items():
        kind, _, what = suite.partition("_")
        tables: str = _layers(peers) if what == "layer" else _products(peers)
        parts.append(f"`{suite}`: {WHAT[what]}, {SCALES[kind]}.\n\n{tables}")
    rows: Sequence[Row] = [row for row in results["rows"] if "ratio" in row]
    parts += [losses(rows, "cell"), errors_of_peers(results["rows"])]
    return "\n\n".join(filter(None, parts))
