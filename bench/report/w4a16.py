"""Tables and the plot of the W4A16 results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.summary import Row, by_suite_and_peer, shape_text
from bench.report.tables import (
    LAYER_LINES,
    LAYER_NAMES,
    MODEL_COLOURS,
    MODEL_NAMES,
    against,
    facts,
    geomean_and_min,
    grouped,
    losses,
    overview,
    peer_name,
    table,
)

FOUR_BIT = ("marlin", "machete", "fbgemm")
DECODE_M = 64  # up to here a step of decoding
LAYERS_ACROSS = 4


def _key(row: Row) -> tuple:
    return shape_text(row), row["dtype"]


def best_peer(peers: dict[str, list[Row]]) -> dict[tuple, Row]:
    """Cell -> the row of the 4-bit peer that is fastest on it."""
    best: dict[tuple, Row] = {}
    for peer in FOUR_BIT:
        for row in peers.get(peer, []):
            if _key(row) not in best or row["ratio"] < best[_key(row)]["ratio"]:
                best[_key(row)] = row
    return best


# ---- the page's section --------------------------------------------------------------------------------------------------------


def _by_m(peers: dict[str, list[Row]]) -> str:
    """Geomeans over the layers: up to DECODE_M tokens, above, and for every m."""
    best = list(best_peer(peers).values())
    against_best = {"the best of them": best} if len({row["peer"] for row in best}) > 1 else {}
    columns = {peer_name(peer): rows for peer, rows in peers.items()} | against_best
    first = next(iter(peers.values()))

    def line(name: str, wanted) -> list[str]:
        floors = statistics.median(row["fraction"] for row in first if wanted(row["shape"]["m"]))
        of_peers = [geomean_and_min([row for row in rows if wanted(row["shape"]["m"])]) for rows in columns.values()]
        return [name, *of_peers, f"{floors:.0%}"]

    ms = sorted(grouped(first, "m"))
    lines = []
    if any(m <= DECODE_M for m in ms) and any(m > DECODE_M for m in ms):
        lines += [line(f"up to {DECODE_M}", lambda m: m <= DECODE_M), line(f"above {DECODE_M}", lambda m: m > DECODE_M)]
    lines += [line(str(m), lambda other, m=m: other == m) for m in ms]
    text = "How many times as fast, geometric mean over the layers (worst layer), and the median share of the floor that is reached.\n\n"
    return text + table(["m", *columns, "of the floor"], lines)


def _layers(peers: dict[str, list[Row]]) -> str:
    """Every cell: our time, the share of the floor, times faster than cuBLAS and than the best 4-bit peer."""
    cublas, best = {_key(row): row for row in peers.get("cublas", [])}, best_peer(peers)
    own: dict[tuple, Row] = {}
    for rows in peers.values():
        for row in rows:
            own.setdefault(_key(row), row)

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        ratios = [f"{of[_key(row)]['ratio']:.2f}" if _key(row) in of else "-" for of in (cublas, best)]
        return f"{row['us']:.1f} us, {row['fraction']:.0%}: {' / '.join(ratios)}"

    parts = []
    for model, of_model in grouped(own.values(), "model").items():
        layers = list(grouped(of_model, "n", "k").items())
        for i in range(0, len(layers), LAYERS_ACROSS):
            across = layers[i : i + LAYERS_ACROSS]
            by_cell = {(row["shape"]["m"], n, k): row for (n, k), rows in across for row in rows}
            lines = [[str(m), *(cell(by_cell.get((m, n, k))) for (n, k), _ in across)] for m in sorted(grouped(of_model, "m"))]
            named = model is not None and len(layers) == len(LAYER_NAMES)
            header = [f"{LAYER_NAMES[i + j]} {n} x {k}" if named else f"{n} x {k}" for j, ((n, k), _) in enumerate(across)]
            title = f"{MODEL_NAMES.get(model, model)}: " if model is not None else ""
            parts.append(
                f"{title}our time, share of the floor: how many times as fast as cuBLAS / the best 4-bit peer.\n\n"
                + table(["m", *header], lines)
            )
    return "\n\n".join(parts)


def _variants(suite: str, rows: list[Row]) -> str:
    variants = list(grouped(rows, "variant"))
    names = {"g32": "groups of 32", "zeros": "zero points", "act_order": "act-order"}
    lines = []
    for m, of_m in grouped(rows, "m").items():
        of_variant = grouped(of_m, "variant")
        lines.append([str(m), *(geomean_and_min(of_variant.get(variant)) for variant in variants)])
    text = (
        f"`{suite}`: speed relative to int4 in groups of 128 without zero points, same weight shapes (1: the variant costs nothing),"
        " geometric mean (worst layer).\n\n"
    )
    return text + table(["m", *(names.get(variant, variant) for variant in variants)], lines)


def _gated(peers: dict[str, list[Row]]) -> str:
    by_m = {peer: grouped(rows, "m") for peer, rows in peers.items()}
    lines = [[str(m), *(geomean_and_min(of_peer.get(m)) for of_peer in by_m.values())] for m in next(iter(by_m.values()))]
    text = "`gated`: how many times as fast, geometric mean (worst layer).\n\n"
    return text + table(["m", *(f"as {peer_name(peer)}" for peer in peers)], lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    rows: list[Row] = results["rows"]
    suites = by_suite_and_peer(rows)
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
    protocol = (
        f" {dtypes}, int4 in groups of 128. Every cell was checked against float64 before it was timed, the largest against float32. Times"
        " are medians of CUDA-graph replays whose operands rotate through more than three times the L2 cache, ours and the peers in turn."
        " cuBLAS multiplies the same weights in 16 bits; the floor counts the 4-bit weights and their scales. A ratio above 1 means that"
        " minfer is faster."
    )
    parts = [facts(results) + protocol, overview(suites)]
    if "w4a16" in suites:
        parts += [_by_m(suites["w4a16"]), _layers(suites["w4a16"])]
    for suite in ("variants", "variants_bf16"):
        if "ours:plain" in suites.get(suite, {}):
            parts.append(_variants(suite, suites[suite]["ours:plain"]))
    if "gated" in suites:
        parts.append(_gated(suites["gated"]))
    parts.append(losses(rows))
    return "\n\n".join(parts)


# ---- the plot ----------------------------------------------------------------------------------------------------------------------

PEER_LINES = {"marlin": ("o", "#8a4fb0"), "machete": ("^", "#b08a1e"), "fbgemm": ("s", "#3a8f4d")}


def _geomeans(speeds: dict[int, list[float]]) -> tuple[list[int], list[float]]:
    return sorted(speeds), [statistics.geometric_mean(speeds[m]) for m in sorted(speeds)]


def _plot_peers(axis, peers: dict[str, list[Row]]) -> None:
    """Ours, the 4-bit peers and the floor, geomeans over the layers."""
    rows = peers["cublas"]
    m_of = {_key(row): row["shape"]["m"] for row in rows}
    ours: dict[int, list[float]] = {}
    floor: dict[int, list[float]] = {}
    for row in rows:
        ours.setdefault(row["shape"]["m"], []).append(row["ratio"])
        floor.setdefault(row["shape"]["m"], []).append(row["peer_us"] / row["floor_us"])
    axis.plot(*_geomeans(floor), color="#999999", ls="--", lw=1.0, label="the floor")
    axis.plot(*_geomeans(ours), color="#1f6fb4", lw=2.2, marker="D", ms=4, label="minfer", zorder=3)
    for peer, (mark, colour) in PEER_LINES.items():
        speeds: dict[int, list[float]] = {}
        for key, speed in against(peers, "cublas", peer).items():
            speeds.setdefault(m_of[key], []).append(speed)
        if speeds:
            axis.plot(*_geomeans(speeds), color=colour, lw=1.3, marker=mark, ms=4, label=peer_name(peer), zorder=2)
    axis.set_ylabel("times faster than cuBLAS on 16-bit weights")
    axis.set_title("geomean over the layers")
    axis.legend(fontsize=8)


def _plot_layers(axis, peers: dict[str, list[Row]]) -> None:
    for model, of_model in grouped(peers["cublas"], "model").items():
        for j, ((n, k), layer) in enumerate(grouped(of_model, "n", "k").items()):
            layer = sorted(layer, key=lambda row: row["shape"]["m"])
            xs, ys = [row["shape"]["m"] for row in layer], [row["ratio"] for row in layer]
            name = f"{MODEL_NAMES.get(model, '')} {n}x{k}".strip()
            axis.plot(xs, ys, LAYER_LINES[j % 4], color=MODEL_COLOURS.get(model), lw=1.3, label=name)
    axis.set_title("minfer, by layer")
    axis.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5))


def plot(results: dict[str, Any], path: Path) -> None:
    """Speed against cuBLAS on 16-bit weights over m: beside the peers, and layer by layer; the line at 1 divides wins and losses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    peers = by_suite_and_peer(results["rows"]).get("w4a16", {})
    if "cublas" not in peers:
        raise ValueError("the results have no w4a16 rows against cublas to plot")
    figure, axes = plt.subplots(1, 2, figsize=(13.2, 4.6), width_ratios=(5, 6))
    ticks: Sequence[int] = sorted(grouped(peers["cublas"], "m"))
    for axis, draw in zip(axes, (_plot_peers, _plot_layers), strict=True):
        axis.axhline(1.0, color="#222222", lw=1.0, zorder=1.5)
        axis.grid(axis="y", color="#dddddd", lw=0.6, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
        draw(axis, peers)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(m) for m in ticks], fontsize=8)
        axis.set_xlabel("m (tokens)")
        axis.set_ylim(bottom=0)
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in peers["cublas"]))
    figure.suptitle(f"minfer W4A16 GEMM, {dtypes}, on {results['device']}, {results['date']}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
