"""Tables and the picture of the random problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.report.summary import (
    Row,
    by_suite_and_peer,
    geomean,
    shape_text,
)
from bench.report.tables import (
    facts,
    geomean_and_min,
    grouped,
    losses,
    peer_name,
    table,
)

BANDS = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, None))  # of m
SHARES = (0.93, 0.95)
WHAT = {
    "random": "m log-uniform in 1 to 8192, n and k multiples of 64 in 256 to 32768, layouts by turns, one in four with C",
    "random_unaligned": "m log-uniform in 1 to 8192, any n and k in 1 to 8192, layouts by turns, one in four with C",
    "random_w4a16": "int4 weights in groups of 128, m log-uniform in 1 to 8192, n and k multiples of 128 in 256 to 32768",
}
COLOURS = {"cublas": "#1f6fb4", "cublaslt_best": "#d1622b", "marlin": "#3a8f4d", "machete": "#8a4fb0"}


def band_name(band: tuple[int, int | None]) -> str:
    low, high = band
    return f"{low}-{high}" if high is not None else f"from {low}"


def band_of(row: Row) -> str:
    m = row["shape"]["m"]
    return next(band_name(band) for band in BANDS if band[1] is None or m <= band[1])


def by_band(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by band of m, the bands in order; those that have none are there, empty."""
    found: dict[str, list[Row]] = {band_name(band): [] for band in BANDS}
    for row in rows:
        found[band_of(row)].append(row)
    return found


def seeds(results: dict[str, Any]) -> str:
    """What was drawn, and whether all of it was measured."""
    parts = []
    for name, suite in results["suites"].items():
        what = f"{suite['problems']} problems" if suite["complete"] else f"{suite['done']} of {suite['problems']} problems so far"
        parts.append(f"`{name}`: {what}, seed {suite['seed']}")
    return "; ".join(parts) + "."


def errors(rows: Iterable[Row], cell: str = "m x n x k") -> str:
    """What was not measured; ``cell``: what shape_text() says."""
    failed = [row for row in rows if "error" in row]
    if not failed:
        return ""
    lines = [[f"`{r['suite']}`", shape_text(r), r["dtype"], peer_name(r["peer"]) or "all", r["error"].replace("|", "/")] for r in failed]
    return f"Not measured, {len(failed)}:\n\n" + table(["suite", cell, "dtype", "who", "error"], lines)


def _overview(peers: dict[str, list[Row]]) -> str:
    lines = []
    for peer, rows in peers.items():
        worst = min(rows, key=lambda row: row["ratio"])
        shares = [f"{sum(row['ratio'] < share for row in rows) / len(rows):.1%}" for share in SHARES]
        layout = f" {worst['shape']['layout']}" if "layout" in worst["shape"] else ""
        where = f"{worst['ratio']:.2f} at {shape_text(worst)}{layout}, {worst['us']:.2f} us"
        lines.append([peer_name(peer), str(len(rows)), f"**{geomean(rows):.3f}**", *shares, where])
    return table(["peer", "problems", "geomean", *(f"under {share}" for share in SHARES), "worst"], lines)


def _breakdown(what: str, peers: dict[str, list[Row]], split: Callable[[list[Row]], dict[str, list[Row]]]) -> str:
    of_peers = {peer: split(rows) for peer, rows in peers.items()}
    names = list(dict.fromkeys(name for of_peer in of_peers.values() for name in of_peer))
    lines = [[name, *(geomean_and_min(of_peer.get(name)) for of_peer in of_peers.values())] for name in names]
    return table([what, *map(peer_name, peers)], lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    rows = [row for row in results["rows"] if "ratio" in row]
    parts = [
        facts(results) + " " + seeds(results) + " Every problem was checked against float64 before it was timed. A ratio above 1 means that"
        " minfer is faster. By band of m and by layout: geometric mean (worst problem)."
    ]
    for suite, peers in by_suite_and_peer(rows).items():
        parts += [f"`{suite}`: {WHAT[suite]}.", _overview(peers), _breakdown("m", peers, by_band)]
        if "layout" in next(iter(peers.values()))[0]["shape"]:
            parts.append(_breakdown("layout", peers, lambda rows: grouped(rows, "layout")))
    parts.append(losses(rows))
    return "\n\n".join(filter(None, [*parts, errors(results["rows"])]))


def plot(results: dict[str, Any], path: Path) -> None:
    """The ratio over m, a point for each problem and peer; the line at 1 divides wins and losses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    suites = by_suite_and_peer(row for row in results["rows"] if "ratio" in row)
    if not suites:
        raise ValueError("the results have no random problem that was measured")
    figure, axes = plt.subplots(1, len(suites), figsize=(5.2 * len(suites), 4.4), squeeze=False)
    for axis, (suite, peers) in zip(axes[0], suites.items(), strict=True):
        for peer, rows in peers.items():
            xs, ys = [row["shape"]["m"] for row in rows], [row["ratio"] for row in rows]
            axis.plot(
                xs, ys, "o", ms=3, alpha=0.6, color=COLOURS.get(peer, "#777777"), label=f"{peer_name(peer)}, geomean {geomean(rows):.3f}"
            )
        axis.axhline(1.0, color="#222222", lw=1.0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = [t for t in (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0) if axis.get_ylim()[0] <= t <= axis.get_ylim()[1]]
        axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.grid(axis="y", color="#dddddd", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("m")
        axis.set_title(suite)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("times faster than the peer")
    figure.suptitle(f"minfer, random problems on {results['device']}, {results['date']}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
