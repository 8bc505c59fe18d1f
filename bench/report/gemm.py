"""Tables and the plot of the GEMM results."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.report.summary import (
    STREAM_FRACTION,
    Row,
    by_suite_and_peer,
    is_stream,
    shape_text,
)
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

# ---- the page's section --------------------------------------------------------------------------------------------------------


def _square(peers: dict[str, list[Row]]) -> str:
    first = next(iter(peers.values()))
    pairs = list(grouped(first, "alpha", "beta"))
    by_cell = {peer: {(r["shape"]["m"], r["shape"]["alpha"], r["shape"]["beta"]): r for r in rows} for peer, rows in peers.items()}
    lines = []
    for size in grouped(first, "m"):
        cells = [str(size)]
        for pair in pairs:
            rows = [by_cell[peer].get((size, *pair)) for peer in peers]
            own = next((row for row in rows if row), None)
            ratios = " / ".join(f"{row['ratio']:.2f}" if row else "-" for row in rows)
            cells.append(f"{own['us']:.2f} us: {ratios}" if own else "-")
        lines.append(cells)
    header = ["m = n = k", *(f"({alpha:g}, {beta:g})" for alpha, beta in pairs)]
    names = " / ".join(peer_name(peer) for peer in peers)
    return f"`square`, fp16, by (alpha, beta): our time, then how many times as fast as {names}.\n\n" + table(header, lines)


def _llm(peers: dict[str, list[Row]]) -> str:
    main = next(iter(peers))
    by_m = {peer: grouped(rows, "m") for peer, rows in peers.items()}
    models = list(grouped(peers[main], "model"))
    lines = []
    for m, rows in sorted(by_m[main].items()):
        of_model = grouped(rows, "model")
        others = [geomean_and_min(by_m[peer].get(m)) for peer in peers if peer != main]
        floors = statistics.median(row["fraction"] for row in rows)
        lines.append([str(m), *(geomean_and_min(of_model.get(model)) for model in models), *others, f"{floors:.0%}"])
    header = ["m", *(f"{MODEL_NAMES.get(m, m)} vs {peer_name(main)}" for m in models)]
    header += [f"all vs {peer_name(peer)}" for peer in peers if peer != main] + ["of the floor"]
    text = (
        "`llm`, bf16: how many times as fast as the peers, geometric mean over a model's linear layers (worst layer), and the median share"
        " of the floor that is reached.\n\n"
    )
    text += table(header, lines)
    streams = list({shape_text(row): row for rows in peers.values() for row in rows if is_stream(row)}.values())
    if streams:
        fractions = sorted(row["fraction"] for row in streams)
        reached = sum(fraction >= STREAM_FRACTION for fraction in fractions)
        text += (
            f"\n\nWeight streams (m <= 16, weights of 64 MB or more): {reached} of {len(streams)} cells reach {STREAM_FRACTION:.0%} of the"
            f" read bandwidth; minimum {fractions[0]:.0%}, median {statistics.median(fractions):.0%}."
        )
    return text


def _odd(peers: dict[str, list[Row]]) -> str:
    lines = []
    for peer, rows in peers.items():
        aligned = grouped(rows, "aligned")
        lines.append([peer_name(peer), geomean_and_min(aligned.get(True)), geomean_and_min(aligned.get(False)), str(len(rows))])
    return "`odd`, random shapes, fp16 and bf16: how many times as fast, geometric mean (worst cell).\n\n" + table(
        ["peer", "rows of 16 bytes", "any other alignment", "cells"], lines
    )


def _untuned(peers: dict[str, list[Row]]) -> str:
    parts = []
    for peer, rows in peers.items():
        layers = grouped([row for row in rows if row["dtype"] == "bf16"], "n", "k")
        squares = [row for row in rows if row["dtype"] == "f16"]
        ms = sorted({row["shape"]["m"] for of_layer in layers.values() for row in of_layer})
        lines = []
        for (n, k), of_layer in layers.items():
            of_m = {row["shape"]["m"]: f"{row['ratio']:.2f}" for row in of_layer}
            lines.append([f"{n} x {k}", *(of_m.get(m, "-") for m in ms)])
        text = f"`untuned`, bf16: how many times as fast as {peer_name(peer)}, by n x k and m.\n\n" + table(["n x k", *map(str, ms)], lines)
        cells = [f"{r['shape']['m']} ({r['shape']['alpha']:g}, {r['shape']['beta']:g}) {r['ratio']:.2f}" for r in squares]
        parts.append(text + ("\n\nfp16, m = n = k (alpha, beta): " + ", ".join(cells) + "." if cells else ""))
    return "\n\n".join(parts)


def _epilogue(peers: dict[str, list[Row]]) -> str:
    parts = []
    for peer, rows in peers.items():
        epilogues = list(grouped(rows, "epilogue"))
        lines = []
        for m, of_m in grouped(rows, "m").items():
            of_epilogue = grouped(of_m, "epilogue")
            lines.append([str(m), *(geomean_and_min(of_epilogue.get(e)) for e in epilogues)])
        text = f"`epilogue`, bf16, Llama-3.1-8B's layers: how many times as fast as {peer_name(peer)}, geometric mean (worst layer).\n\n"
        parts.append(text + table(["m", *(e.replace("_", " + ") for e in epilogues)], lines))
    return "\n\n".join(parts)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    rows: list[Row] = results["rows"]
    suites = by_suite_and_peer(rows)
    protocol = (
        " Every cell was checked against float64 before it was timed. Times are medians of CUDA-graph replays whose operands rotate through"
        " more than three times the L2 cache, ours and the peers in turn. cuBLAS is torch.mm or addmm in the faster of its layouts. A ratio"
        " above 1 means that minfer is faster."
    )
    parts = [facts(results) + protocol, overview(suites)]
    described = {"square": _square, "llm": _llm, "untuned": _untuned, "odd": _odd, "epilogue": _epilogue}
    for suite, describe in described.items():
        if suite in suites:
            parts.append(describe(suites[suite]))
    parts.append(losses(rows))
    return "\n\n".join(parts)


# ---- the plot ----------------------------------------------------------------------------------------------------------------------

PEER_MARKS = {"cublaslt_best": ("o", "#555555"), "quack": ("^", "#8a4fb0"), "deepgemm": ("s", "#b08a1e")}


def _plot_square(axis, peers: dict[str, list[Row]]) -> None:
    rows = peers["cublas"]
    pairs = list(grouped(rows, "alpha", "beta"))
    sizes = list(grouped(rows, "m"))
    width = 0.8 / len(pairs)
    shades = ("#9ecae1", "#6baed6", "#3182bd", "#08519c")
    marked: set[str] = set()
    for j, pair in enumerate(pairs):
        for i, size in enumerate(sizes):
            row = next((r for r in rows if (r["shape"]["m"], r["shape"]["alpha"], r["shape"]["beta"]) == (size, *pair)), None)
            if row is None:
                continue
            x = i + (j - (len(pairs) - 1) / 2) * width
            label = f"minfer ({pair[0]:g}, {pair[1]:g})" if i == 0 else None
            axis.bar(x, row["ratio"] - 1, width * 0.92, bottom=1.0, color=shades[j % len(shades)], label=label, zorder=2)
            for peer, (mark, colour) in PEER_MARKS.items():
                speed = against(peers, "cublas", peer).get((shape_text(row), row["dtype"]))
                if speed is not None:
                    axis.plot(x, speed, mark, color=colour, ms=4, zorder=3, label=None if peer in marked else peer_name(peer))
                    marked.add(peer)
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axis.set_xlabel("m = n = k, fp16")
    axis.set_ylabel("times faster than cuBLAS")
    axis.set_title("square, by (alpha, beta)")
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
    axis.legend(fontsize=7, ncols=2, loc="upper right")


def _plot_llm(axis, peers: dict[str, list[Row]]) -> None:
    rows = peers["cublas"]
    for model, of_model in grouped(rows, "model").items():
        for j, ((n, k), layer) in enumerate(grouped(of_model, "n", "k").items()):
            layer = sorted(layer, key=lambda row: row["shape"]["m"])
            name = f"{MODEL_NAMES.get(model, model)} {LAYER_NAMES[j % 4]} {n}x{k}"
            xs, ys = [row["shape"]["m"] for row in layer], [row["ratio"] for row in layer]
            axis.plot(xs, ys, LAYER_LINES[j % 4], color=MODEL_COLOURS.get(model, "#888888"), lw=1.3, label=name, zorder=2)
    dtype_of = {shape_text(row): row["shape"]["m"] for row in rows}
    for peer, (mark, colour) in PEER_MARKS.items():
        by_m: dict[int, list[float]] = {}
        for (shape, _), speed in against(peers, "cublas", peer).items():
            by_m.setdefault(dtype_of[shape], []).append(speed)
        if by_m:
            xs = sorted(by_m)
            axis.plot(
                xs,
                [statistics.geometric_mean(by_m[m]) for m in xs],
                mark,
                color=colour,
                ms=5,
                zorder=3,
                label=f"{peer_name(peer)}, geomean",
            )
    axis.set_xscale("log", base=2)
    ticks = list(grouped(rows, "m"))
    axis.set_xticks(ticks, [str(m) for m in ticks])
    axis.set_xlabel("m (tokens), bf16")
    axis.set_title("llm, by layer")
    axis.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5))


def plot(results: dict[str, Any], path: Path) -> None:
    """Speed against cuBLAS: bars over the square suite, a line for each layer of the llm suite; the line at 1 divides wins and losses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    suites = by_suite_and_peer(results["rows"])
    panels = [(s, draw) for s, draw in (("square", _plot_square), ("llm", _plot_llm)) if "cublas" in suites.get(s, {})]
    if not panels:
        raise ValueError("the results have no square and no llm rows against cublas to plot")
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels) + 1.6, 4.6), width_ratios=(5, 6)[: len(panels)], squeeze=False)
    for axis, (suite, draw) in zip(axes[0], panels, strict=True):
        axis.axhline(1.0, color="#222222", lw=1.0, zorder=2.5)
        axis.grid(axis="y", color="#dddddd", lw=0.6, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
        draw(axis, suites[suite])
    figure.suptitle(f"minfer GEMM on {results['device']}, {results['date']}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
