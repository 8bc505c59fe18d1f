"""Tables and the plot of the mixture-of-experts results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.report.summary import Row, by_suite_and_peer, geomean, shape_text
from bench.report.tables import (
    MODEL_COLOURS,
    MODEL_NAMES,
    facts,
    geomean_and_min,
    grouped,
    losses,
    overview,
    peer_name,
    table,
)

ROUTINGS = {"": "uniform", "_zipf": "zipf", "_one_hot": "one-hot"}  # suffix of a suite -> its name
# suite -> what it measures, its routing; of others the overview alone speaks
SUITES = {kind + suffix: (kind, routing) for kind in ("router", "grouped", "layer", "stages") for suffix, routing in ROUTINGS.items()}
STAGES = {"router": "router", "sort": "sort", "gemm1": "GEMM 1", "gemm2": "GEMM 2", "combine": "combine"}
STAGE_COLOURS = {"router": "#8a4fb0", "sort": "#b08a1e", "gemm1": "#1f6fb4", "gemm2": "#6baed6", "combine": "#3a8f4d"}
STEP_LINES = {"w13": "-", "w2": "--"}

# Goals that are not of a suite and its peer.
MANY_EXPERTS, MANY_TOKENS, MANY_RATIO = 128, (512, 4096), 1.25
STREAM_SHARE, STREAM_FRACTION = 0.9, 0.94  # weights of the bytes; of the floor
MATRIX_RATE = 750  # TFLOP/s of the floors
TILED_ROWS = 256  # tokens an expert
ROUTER_TOKENS, ROUTER_US = 256, 8.0


def best_of(peers: dict[str, list[Row]]) -> list[Row]:
    """The row of each cell's fastest peer; a form of ours is none."""
    best: dict[str, Row] = {}
    for peer, rows in peers.items():
        for row in rows if not peer.startswith("ours:") else ():
            key = shape_text(row)
            if key not in best or row["ratio"] < best[key]["ratio"]:
                best[key] = row
    return [row | {"peer": "best", "of": row["peer"]} for row in best.values()]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By model, matrix and tokens, whatever the order of the runs."""
    models = list(MODEL_NAMES)

    def key(row: Row) -> tuple:
        shape = row["shape"]
        model = shape.get("model", "")
        return models.index(model) if model in models else len(models), model, shape.get("step", ""), shape["m"]

    return sorted(rows, key=key)


def suites_of(results: dict[str, Any]) -> dict[str, dict[str, list[Row]]]:
    """suite -> peer -> rows, both in an order that is always the same; of the grouped suites with the best peer of each cell."""
    found = by_suite_and_peer(in_order(results["rows"]))
    order = list(SUITES)
    suites = {suite: found[suite] for suite in sorted(found, key=lambda s: (order.index(s) if s in order else len(order), s))}
    for suite, peers in suites.items():
        best = best_of(peers) if SUITES.get(suite, ("",))[0] == "grouped" else []
        names = sorted(peers, key=lambda peer: (not peer.startswith("ours:"), peer))
        suites[suite] = {peer: peers[peer] for peer in names} | ({"best": best} if best else {})
    return suites


def time_text(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def model_name(model: str) -> str:
    return MODEL_NAMES.get(model, model)


# ---- the page's section --------------------------------------------------------------------------------------------------------


def _grouped(suite: str, routing: str, best: Sequence[Row]) -> str:
    tokens = sorted(grouped(best, "m"))
    lines = []
    for (model, step), rows in grouped(best, "model", "step").items():
        by_m = {row["shape"]["m"]: row for row in rows}
        shape = rows[0]["shape"]
        cells = [f"{time_text(r['us'])} us, {r['fraction']:.0%}: {r['ratio']:.2f}" if (r := by_m.get(m)) else "-" for m in tokens]
        lines.append([f"{model_name(model)} {step}: {shape['experts']} x {shape['n']} x {shape['k']}", *cells])
    by_m = grouped(best, "m")
    lines.append(["all", *(geomean_and_min(by_m[m]) for m in tokens)])
    text = f"`{suite}`, {routing} routing, by tokens: our time, share of the floor: how many times as fast as the best peer.\n\n"
    return text + table(["experts x n x k", *map(str, tokens)], lines)


def _weights_share(row: Row) -> float:
    """Of the bytes that a product must move."""
    s = row["shape"]
    rows, weights = s["m"] * s["top_k"], s["active"] * s["n"] * s["k"]
    return weights / (weights + rows * (s["k"] + s["n"]))


def _rate(row: Row) -> float:
    """TFLOP/s."""
    s = row["shape"]
    return 2.0 * s["m"] * s["top_k"] * s["n"] * s["k"] / row["us"] / 1e6


def _grouped_goals(best: Sequence[Row]) -> str:
    """The goals for parts of the cells."""
    lines = []
    many = [r for r in best if r["shape"]["experts"] >= MANY_EXPERTS and MANY_TOKENS[0] <= r["shape"]["m"] <= MANY_TOKENS[1]]
    if many:
        reached = "yes" if geomean(many) >= MANY_RATIO else "no"
        lines.append(
            f"* {MANY_EXPERTS} experts and more, {MANY_TOKENS[0]} to {MANY_TOKENS[1]} tokens: {geomean_and_min(many)} over"
            f" {len(many)} cells; geomean >= {MANY_RATIO}: {reached}."
        )
    streams = [r for r in best if _weights_share(r) >= STREAM_SHARE and _rate(r) / r["fraction"] < MATRIX_RATE / 2]
    if streams:
        fractions = sorted(row["fraction"] for row in streams)
        lines.append(
            f"* Weight streams (at least {STREAM_SHARE:.0%} of the bytes are weights, and the flops alone would take less than half the"
            f" time): {sum(f >= STREAM_FRACTION for f in fractions)} of {len(streams)} cells reach {STREAM_FRACTION:.0%} of the read"
            f" bandwidth; minimum {fractions[0]:.0%}, median {statistics.median(fractions):.0%}."
        )
    tiled = [_rate(r) for r in best if r["shape"]["m"] * r["shape"]["top_k"] >= TILED_ROWS * r["shape"]["active"]]
    if tiled:
        lines.append(
            f"* {TILED_ROWS} tokens an expert and more: {min(tiled):.0f} to {max(tiled):.0f} TFLOP/s,"
            f" median {statistics.median(tiled):.0f}."
        )
    return "\n".join(lines)


def _by_tokens_and_model(rows: Sequence[Row], cell) -> str:
    """A table with a line for each number of tokens and a column for each model; ``cell`` makes text of a cell's rows by peer."""
    models = list(grouped(rows, "model"))
    of: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        of.setdefault((row["shape"]["m"], row["shape"]["model"]), {})[row["peer"]] = row
    lines = [[str(m), *(cell(of[m, model]) if (m, model) in of else "-" for model in models)] for m in sorted(grouped(rows, "m"))]
    return table(["tokens", *map(model_name, models)], lines)


def _router(peers: dict[str, list[Row]]) -> str:
    rows = [row for of_peer in peers.values() for row in of_peer]

    def cell(by_peer: dict[str, Row]) -> str:
        own, whole, torch = next(iter(by_peer.values())), by_peer.get("ours:with its GEMM"), by_peer.get("torch")
        together = f" / {whole['peer_us']:.1f}" if whole else ""
        return f"{own['us']:.1f}{together} us" + (f": {torch['ratio']:.1f}" if torch else "")

    text = (
        "`router`: the time of router and sort together, from logits / from x, and from logits how many times as fast as torch's"
        " operators.\n\n"
    )
    text += _by_tokens_and_model(rows, cell)
    bound = [row for row in rows if row["shape"]["experts"] == MANY_EXPERTS and row["shape"]["m"] <= ROUTER_TOKENS]
    if bound:
        worst = max(row["us"] for row in bound)
        text += (
            f"\n\n{MANY_EXPERTS} experts, up to {ROUTER_TOKENS} tokens: at most {worst:.1f} us from logits;"
            f" <= {ROUTER_US:g} us: {'yes' if worst <= ROUTER_US else 'no'}."
        )
    return text


def _layer(suite: str, routing: str, peers: dict[str, list[Row]]) -> str:
    def cell(by_peer: dict[str, Row]) -> str:
        own = next(iter(by_peer.values()))
        ratios = " / ".join(f"{by_peer[peer]['ratio']:.2f}" if peer in by_peer else "-" for peer in peers)
        return f"{time_text(own['us'])} us, {own['fraction']:.0%}: {ratios}"

    names = " / ".join(map(peer_name, peers))
    text = f"`{suite}`, `moe_ffn`, {routing} routing: our time, share of the floor: how many times as fast as {names}.\n\n"
    return text + _by_tokens_and_model([row for rows in peers.values() for row in rows], cell)


def stage_times(peers: dict[str, list[Row]]) -> dict[tuple[str, int], dict[str, float]]:
    """(model, tokens) -> stage, "layer" too -> microseconds; of cells that have them all."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for rows in peers.values():
        for row in rows:
            found.setdefault((row["shape"]["model"], row["shape"]["m"]), {})[row["shape"]["stage"]] = row["us"]
    return {key: times for key, times in found.items() if {*STAGES, "layer"} <= times.keys()}


def _stages(suite: str, routing: str, peers: dict[str, list[Row]]) -> str:
    lines = []
    for (model, tokens), times in stage_times(peers).items():
        total = sum(times[stage] for stage in STAGES)
        parts = [f"{time_text(times[stage])} ({times[stage] / total:.0%})" for stage in STAGES]
        lines.append([model_name(model), str(tokens), *parts, time_text(total), time_text(times["layer"])])
    text = (
        f"`{suite}`, {routing} routing: the layer's time by stage, us (share of the stages' sum). Each stage"
        " is timed on its own; in the whole layer, from the router on, launches start under their predecessors' tails.\n\n"
    )
    return text + table(["model", "tokens", *STAGES.values(), "sum", "the layer"], lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    suites = suites_of(results)
    protocol = (
        " bf16. Before they were timed, products were checked against float64, routers and layers against torch's operators. Times are"
        " medians of CUDA-graph replays with rotated weights, ours and the peers in turn. w13 is an expert's first product without its"
        " epilogue, w2 the second. Each peer gets its rows in the order that it prefers: vLLM's kernel gathers them, the others and ours"
        " read them in expert order. A ratio above 1 means that minfer is faster."
    )
    parts = [facts(results) + protocol]
    if compared := {suite: peers for suite, peers in suites.items() if SUITES.get(suite, ("",))[0] != "stages"}:
        parts.append(overview(compared))
    for suite, peers in suites.items():
        kind, routing = SUITES.get(suite, ("", ""))
        if "best" in peers:
            parts.append(_grouped(suite, routing, peers["best"]))
            if suite == "grouped" and (goals := _grouped_goals(peers["best"])):
                parts.append(goals)
        elif kind == "router":
            parts.append(_router(peers))
        elif kind == "layer":
            parts.append(_layer(suite, routing, peers))
        elif kind == "stages" and stage_times(peers):
            parts.append(_stages(suite, routing, peers))
    parts.append(losses([row for row in results["rows"] if not row["peer"].startswith("ours:")], "cell"))
    return "\n\n".join(parts)


# ---- the plot ----------------------------------------------------------------------------------------------------------------------


def _plot_grouped(axis, best: Sequence[Row]) -> None:
    for (model, step), rows in grouped(best, "model", "step").items():
        xs, ys = [row["shape"]["m"] for row in rows], [row["ratio"] for row in rows]
        style = dict(color=MODEL_COLOURS.get(model, "#888888"), lw=1.3, marker="o", ms=2.5, zorder=2)
        axis.plot(xs, ys, STEP_LINES.get(step, ":"), label=f"{model_name(model)} {step}", **style)
    axis.axhline(1.0, color="#222222", lw=1.0, zorder=1.5)
    axis.set_xscale("log", base=2)
    ticks = sorted(grouped(best, "m"))
    axis.set_xticks(ticks, [str(m) for m in ticks], fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens")


def _plot_stages(axis, times: dict[tuple[str, int], dict[str, float]]) -> None:
    """Bars of the stages' shares, a group for each model; the mark is the layer's time as a share of their sum, the number its time."""
    x, places, names, model_before = 0.0, [], [], None
    for (model, tokens), of in times.items():
        if model != model_before:
            x += 1.0 if model_before else 0.0
            axis.text(x - 0.4, 1.17, model_name(model), fontsize=8)
            model_before = model
        total, bottom = sum(of[stage] for stage in STAGES), 0.0
        for stage, name in STAGES.items():
            share = of[stage] / total
            axis.bar(x, share, 0.85, bottom=bottom, color=STAGE_COLOURS[stage], label=name if not places else None, zorder=2)
            bottom += share
        axis.plot([x - 0.42, x + 0.42], [of["layer"] / total] * 2, color="#222222", lw=1.5, zorder=3, label=None if places else "the layer")
        axis.text(x, 1.02, time_text(of["layer"]), fontsize=6, ha="center", va="bottom", rotation=45)
        places.append(x)
        names.append(str(tokens))
        x += 1.0
    axis.set_xticks(places, names, fontsize=7, rotation=45)
    axis.set_ylim(0, 1.26)
    axis.margins(x=0.01)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_xlabel("tokens; above a bar the layer's time, us")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def plot(results: dict[str, Any], path: Path) -> None:
    """grouped_gemm against the best peer over the tokens, a panel for each routing; below, where they were measured, a layer's stages."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    suites = suites_of(results)
    panels = [suite for suite, peers in suites.items() if "best" in peers]
    if not panels:
        raise ValueError("the results have no grouped rows against a peer to plot")
    stages = stage_times(suites.get("stages", {}))
    figure = plt.figure(figsize=(4.4 * len(panels) + 2.2, 4.6 + (3.6 if stages else 0)))
    grid = figure.add_gridspec(2 if stages else 1, len(panels))
    axes = []
    for i, suite in enumerate(panels):
        axes.append(figure.add_subplot(grid[0, i], sharey=axes[0] if axes else None))
        _plot_grouped(axes[i], suites[suite]["best"])
        axes[i].set_title(f"grouped_gemm, {SUITES[suite][1]} routing", fontsize=10)
    axes[0].set_ylabel("times faster than the best peer")
    fullest = max(axes, key=lambda axis: len(axis.lines))
    axes[-1].legend(handles=fullest.get_legend_handles_labels()[0], fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    if stages:
        axes.append(figure.add_subplot(grid[1, :]))
        _plot_stages(axes[-1], stages)
        axes[-1].set_title("a layer's stages, uniform routing", fontsize=10)
        axes[-1].set_ylabel("share of the stages' sum")
    for axis in axes:
        axis.grid(axis="y", color="#dddddd", lw=0.6, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"minfer mixtures of experts, bf16, on {results['device']}, {results['date']}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
