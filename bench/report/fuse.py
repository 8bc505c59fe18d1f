"""Tables and the picture of the functions that users fuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.fused import cells
from bench.report.summary import Row, by_suite_and_peer, geomean
from bench.report.tables import facts, grouped, losses, overview, peer_name, table

COPY = "copy"
OWN = {"ours:dense": "ours:no_epilogue", "ours:plain": "ours:attention", "ours:softcap": "ours:soft_cap"}  # as the page names them
TEXTS = {
    "rows": "Functions of rows over 256 MB, by width: our time, as a share of the speed of a copy of as many bytes, times the best peer.",
    "gemm": "GEMMs with an epilogue, m x n x k: our time, times torch.compile with max-autotune, and times our own product without "
    "the epilogue.",
    "attention": "Attention with a function of scores or a mask, 16384 tokens of 16 heads, head dimension and keys: our time, times "
    "flex_attention, and times our own operator by the pairs that are computed.",
    "examples": "The examples of the guide: our time, times torch.compile, of attention times flex_attention.",
    "start": "How long a first call of each example takes, by the host's clock.",
}
RIVALS = {"rows": "torch_compile", "gemm": "torch_autotune", "attention": "flex_attention"}  # of the picture


def prepared(results: dict[str, Any]) -> dict[str, Any]:
    rows = [row | {"peer": OWN.get(row["peer"], row["peer"])} for row in results["rows"]]
    return results | {"rows": rows}


def _by_peer(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["peer"]: row for row in rows}


def _size(row: Row) -> str:
    """Of a product, whose n and k are in its name."""
    n, k = (part.partition("=")[2] for part in row["shape"]["what"].split()[1:])
    return f"{row['shape']['m']} x {n} x {k}"


def _gemm(rows: Sequence[Row]) -> str:
    kinds = list(dict.fromkeys(row["shape"]["what"].split()[0] for row in rows))
    sizes: dict[str, list[Row]] = {}
    for row in rows:
        sizes.setdefault(_size(row), []).append(row)
    lines = []
    for size, of_size in sizes.items():
        line = [size]
        for kind in kinds:
            found = _by_peer([row for row in of_size if row["shape"]["what"].split()[0] == kind])
            line.append(_cell(found, "torch_autotune", "ours:no_epilogue"))
        lines.append(line)
    return table(["m x n x k", *(kind.replace("_", " ") for kind in kinds)], lines)


def _cell(found: dict[str, Row], rival: str, own: str) -> str:
    if not found:
        return "-"
    text = f"{next(iter(found.values()))['us']:.1f} us"
    text += f", {found[rival]['ratio']:.2f}" if rival in found else ""
    return text + (f", {found[own]['ratio']:.2f} own" if own in found else "")


def _attention(rows: Sequence[Row]) -> str:
    columns = sorted({(row["shape"]["width"], row["shape"]["m"]) for row in rows})
    lines = []
    for what, of_what in grouped(rows, "what").items():
        found = grouped(of_what, "width", "m")
        own = "ours:soft_cap" if what == "soft_cap" else "ours:attention"
        lines.append([what, *(_cell(_by_peer(found.get(column, [])), "flex_attention", own) for column in columns)])
    return table(["function", *(f"d{dim}, {keys}" for dim, keys in columns)], lines)


def _examples(rows: Sequence[Row]) -> str:
    lines = []
    for what, of_what in grouped(rows, "what").items():
        shape = of_what[0]["shape"]
        times = ", ".join(f"{row['ratio']:.2f} {peer_name(row['peer'])}" for row in of_what)
        lines.append([what, f"{shape['m']} x {shape['width']}", f"{of_what[0]['us']:.1f} us", times])
    return table(["example", "rows x width (attention: sequences x keys)", "time", "times"], lines)


def _start(rows: Sequence[Row]) -> str:
    lines = []
    for what, of_what in grouped(rows, "what").items():
        found = _by_peer(of_what)
        first, disk = (f"{found[peer]['peer_us'] / 1000:.0f} ms" for peer in ("ours:first_call", "ours:from_disk"))
        lines.append([what, first, disk, f"{of_what[0]['us'] / 1000:.1f} ms"])
    return table(["example", "compiled", "from the disk", "exported and loaded"], lines)


TABLES = {"rows": lambda rows: cells(rows, True), "gemm": _gemm, "attention": _attention, "examples": _examples, "start": _start}


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family, of results that are :func:`prepared`."""
    suites = by_suite_and_peer(results["rows"])
    compared = [row for row in results["rows"] if row["peer"] != COPY]
    timed = {suite: peers for suite, peers in suites.items() if suite != "start"}
    parts = [f"{facts(results)} Ratios above 1: ours is faster.", overview(timed)]
    for suite, peers in suites.items():
        rows = [row for of_peer in peers.values() for row in of_peer]
        parts.append(f"`{suite}`. {TEXTS[suite]}\n\n{TABLES[suite](rows)}")
    parts.append(losses(compared, "what, rows x width"))
    return "\n\n".join(parts)


def plot(results: dict[str, Any], path: Path) -> None:
    """A gallery: for each function its speed beside what a user would take instead, over all its sizes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    suites = by_suite_and_peer(results["rows"])
    panels = {suite: suites[suite][rival] for suite, rival in RIVALS.items() if rival in suites.get(suite, {})}
    if not panels:
        raise ValueError("the results have nothing beside torch.compile or flex_attention to plot")
    of_panel = {suite: _spans(rows) for suite, rows in panels.items()}
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 5.2), squeeze=False)
    for axis, (suite, spans) in zip(axes[0], of_panel.items(), strict=True):
        names = list(spans)
        for y, (low, middle, high) in enumerate(spans.values()):
            axis.barh(y, middle, height=0.7, color="#1f6fb4" if middle >= 1 else "#d1622b", zorder=2)
            axis.plot([low, high], [y, y], color="#222222", lw=1.2, zorder=3)
        axis.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1.0, color="#222222", lw=1.0, zorder=2.5)
        axis.grid(axis="x", color="#dddddd", lw=0.6, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel(f"times as fast as {peer_name(RIVALS[suite])}", fontsize=9)
        axis.set_title({"rows": "functions of rows", "gemm": "GEMM epilogues", "attention": "scores and masks"}[suite], fontsize=10)
    figure.suptitle(f"minfer.fuse on {results['device']}, {results['date']}: geometric mean, line from least to largest", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _spans(rows: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """By function: the least, the mean and the largest ratio."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        what = row["shape"]["what"]
        found.setdefault(what.split(" n=")[0], []).append(row)
    return {name: (min(r["ratio"] for r in of), geomean(of), max(r["ratio"] for r in of)) for name, of in found.items()}
