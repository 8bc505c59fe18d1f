"""Tables and the plot of the attention results: prefill, its variants, decode over KV caches, appends to them, errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.moe import best_of
from bench.report.summary import Row, by_suite_and_peer
from bench.report.tables import (
    facts,
    geomean_and_min,
    grouped,
    losses,
    overview,
    peer_name,
    table,
)

MASKS = ("causal", "full")
COMPARED = ("prefill", "chunks", "decode")  # suites with peers
COLOURS = {"ours": "#1f6fb4", "cudnn": "#3a8f4d", "fa3": "#d1622b", "fa4": "#8a4fb0", "flashinfer": "#b0964f"}
QUANTISED = {"fp8_e4m3": "#63a6dd", "int8": "#3aa6a0", "int4": "#7a3fb0"}  # formats of caches, and their colours
READ_RATE = 4.45  # TB/s of the floors
APPEND_US = 4.0  # of an append of one token of 64 sequences
VARIANT_TOKENS = 16384
VARIANT_TEXTS = {
    "ours:causal": "FLOP/s relative to plain causal attention of one sequence (1: the option costs nothing).",
    "ours:even": "FLOP/s relative to the same number of sequences, all of the mean length.",
    "fa3": "how many times as fast as FlashAttention-3 with the same lengths and options.",
}
VARIANT_NAMES = {
    "varlen": "64 sequences of lognormal lengths",
    "window": "a window of 4096 keys",
    "softcap": "softcap",
    "sinks": "sinks",
}


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By element, heads, mask or batch and length, whatever the order of the runs."""

    def key(row: Row) -> tuple:
        s = row["shape"]
        batch = s["batch"] if row["suite"] == "decode" else 0
        return row["dtype"], s["head_dim"], -s["heads_kv"], s["heads_q"], batch, s["model"], s["m"]

    return sorted(rows, key=key)


def suites_of(results: dict[str, Any]) -> dict[str, dict[str, list[Row]]]:
    """suite -> peer -> rows; of prefill and decode with the best peer of each cell."""
    suites = by_suite_and_peer(in_order(results["rows"]))
    for suite, peers in suites.items():
        # best_of() tells cells apart by their text, which the element is no part of
        best = [
            row for dtype in ("bf16", "f16") for row in best_of({p: [r for r in rows if r["dtype"] == dtype] for p, rows in peers.items()})
        ]
        if suite in COMPARED and best:
            peers["best"] = in_order(best)
    return suites


def rate(row: Row) -> float:
    """TFLOP/s of ours; prefill's sequences have as many keys as queries."""
    s = row["shape"]
    pairs = s["m"] * (s["m"] + 1) / 2 if s["causal"] else s["m"] ** 2
    return 4.0 * s["batch"] * s["heads_q"] * s["head_dim"] * pairs / row["us"] / 1e6


def _prefill(best: Sequence[Row]) -> str:
    lengths = sorted(grouped(best, "m"))
    lines = []
    for dtype in ("bf16", "f16"):
        own = [row for row in best if row["dtype"] == dtype]
        for (head_dim, heads_q, heads_kv, mask), rows in grouped(own, "head_dim", "heads_q", "heads_kv", "model").items():
            by_m = {row["shape"]["m"]: row for row in rows}
            cells = [f"{rate(r):.0f}: {r['ratio']:.2f}" if (r := by_m.get(m)) else "-" for m in lengths]
            lines.append([f"{dtype}, {head_dim}, {heads_q}/{heads_kv}, {mask}", *cells])
    by_m = grouped(best, "m")
    lines.append(["all", *(geomean_and_min(by_m[m]) for m in lengths)])
    text = (
        "`prefill`, 16384 tokens in sequences of the given length (at 32768: one sequence): TFLOP/s: how many times as fast as the best"
        " peer.\n\n"
    )
    return text + table(["element, head_dim, heads, mask", *map(str, lengths)], lines)


def _variants(rows: Sequence[Row], text: str) -> str:
    """Ratios to one peer; ``text`` says what they are."""
    names = [name for name in VARIANT_NAMES if any(row["shape"]["model"] == name for row in rows)]
    columns = [(name, m) for name in names for m in sorted({row["shape"]["m"] for row in rows if row["shape"]["model"] == name})]
    lines = []
    for dtype in ("bf16", "f16"):
        for (heads_q, heads_kv), own in grouped([row for row in rows if row["dtype"] == dtype], "heads_q", "heads_kv").items():
            by_column = {(row["shape"]["model"], row["shape"]["m"]): f"{row['ratio']:.2f}" for row in own}
            lines.append([f"{dtype}, {heads_q}/{heads_kv}", *(by_column.get(column, "-") for column in columns)])
    header = [VARIANT_NAMES[name] + (f", {m} tokens" if m != VARIANT_TOKENS else "") for name, m in columns]
    return f"`variants`, {VARIANT_TOKENS} tokens, head_dim 128: {text}\n\n" + table(["element, heads", *header], lines)


def _decode(best: Sequence[Row]) -> str:
    contexts = sorted(grouped(best, "m"))
    lines = []
    for dtype in ("bf16", "f16"):
        own = [row for row in best if row["dtype"] == dtype]
        for (heads_q, heads_kv, batch), rows in grouped(own, "heads_q", "heads_kv", "batch").items():
            by_m = {row["shape"]["m"]: row for row in rows}
            cells = [f"{r['us']:.1f}, {r['fraction']:.0%}: {r['ratio']:.2f}" if (r := by_m.get(m)) else "-" for m in contexts]
            lines.append([f"{dtype}, {heads_q}/{heads_kv}, {batch}", *cells])
    by_m = grouped(best, "m")
    lines.append(["all", *(geomean_and_min(by_m[m]) for m in contexts)])
    text = (
        "`decode`, one query a sequence, head_dim 128, by context: us over the 16-bit cache that the best peer reads (contiguous for"
        f" cuDNN, otherwise pages of 64 tokens in random order), share of the read bandwidth ({READ_RATE} TB/s): how many times as fast as"
        " that peer.\n\n"
    )
    return text + table(["element, heads, batch", *map(str, contexts)], lines)


def _quantised(rows: Sequence[Row]) -> str:
    contexts = sorted(grouped(rows, "m"))
    lines = []
    for (heads_q, heads_kv, batch), own in grouped(rows, "heads_q", "heads_kv", "batch").items():
        ratios = {(row["shape"]["m"], row["shape"]["format"]): f"{row['ratio']:.2f}" for row in own}
        cells = [[ratios.get((m, kv_format), "-") for kv_format in QUANTISED] for m in contexts]
        lines.append([f"{heads_q}/{heads_kv}, {batch}", *("-" if set(x) == {"-"} else " / ".join(x) for x in cells)])
    by_format = grouped(rows, "format")
    reached = ", ".join(
        f"{name} {geomean_and_min(by_format[name])}, {max(row['fraction'] for row in by_format[name]):.0%} of the bandwidth at most"
        for name in QUANTISED
        if name in by_format
    )
    text = (
        f"`decode` over {' / '.join(QUANTISED)} caches: how many times as fast as over 16-bit caches. Geometric mean (worst cell):"
        f" {reached}.\n\n"
    )
    return text + table(["heads, batch", *map(str, contexts)], lines)


def _chunks(peers: dict[str, list[Row]]) -> str:
    """A line for each cell: ours, the peer, and our kernels that divide no tile's keys."""
    rows = {(row["shape"]["model"], row["shape"]["m"], row["shape"]["heads_q"]): row for own in peers.values() for row in own}
    ratios = {peer: {(r["shape"]["model"], r["shape"]["m"], r["shape"]["heads_q"]): r["ratio"] for r in own} for peer, own in peers.items()}
    lines = []
    for key, row in sorted(rows.items(), key=lambda item: (item[1]["shape"]["format"], item[1]["shape"]["queries"])):
        s = row["shape"]
        size = [s["format"], f"{s['heads_q']}/{s['heads_kv']}", f"{s['batch']} x {s['queries']}", str(s["m"]), f"{row['us']:.1f}"]
        lines.append([*size, f"{row['fraction']:.2f}", *(f"{of[key]:.2f}" if key in of else "-" for of in ratios.values())])
    lines.append(["all", "", "", "", "", "", *(geomean_and_min(own) for own in peers.values())])
    text = (
        "`chunks`, the last queries of sequences over all their keys in pages of 64, head_dim 128, bf16; drawn shapes, for which no plan"
        " was made: us, the share of the floor, and how many times as fast as the peer, and as the fastest of our kernels that do not"
        " divide the keys of a tile of many queries.\n\n"
    )
    return text + table(["cache", "heads", "sequences x queries", "keys", "us", "of the floor", *map(peer_name, peers)], lines)


def _layouts(rows: Sequence[Row]) -> str:
    """Of a page size, or contiguous, against the page size of the other tables."""
    pages = sorted({row["shape"]["page"] or 0 for row in rows}, key=lambda page: page or 1 << 30)
    lines = []
    for (batch, context), own in grouped(rows, "batch", "m").items():
        ratios = {row["shape"]["page"] or 0: f"{row['ratio']:.2f}" for row in own}
        lines.append([f"{batch} x {context}", f"{own[0]['peer_us']:.1f}", *(ratios.get(page, "-") for page in pages)])
    header = ["batch x context", "pages of 64, us", *(f"pages of {page}" if page else "contiguous" for page in pages)]
    return "`decode` by layout, 16-bit caches: how many times as fast as with pages of 64.\n\n" + table(header, lines)


def _append(peers: dict[str, list[Row]]) -> str:
    """us of every format, and of the peer in 16 bits."""
    formats = [f for f in ("16bit", *QUANTISED) if any(row["shape"]["format"] == f for rows in peers.values() for row in rows)]
    others = [peer for peer in peers if not peer.startswith("ours:")]
    lines, shape = [], next(iter(peers.values()))[0]["shape"]
    for dtype in ("bf16", "f16"):
        own = {peer: [row for row in rows if row["dtype"] == dtype] for peer, rows in peers.items()}
        us = {row["shape"]["format"]: row["us"] for rows in own.values() for row in rows}
        theirs = {peer: f"{own[peer][0]['peer_us']:.2f}" for peer in others if own[peer]}
        if us:
            lines.append([dtype, *(f"{us[f]:.2f}" if f in us else "-" for f in formats), *(theirs.get(peer, "-") for peer in others)])
    text = (
        f"`append`, `kv_cache_append` of one token of each of {shape['batch']} sequences, {shape['heads_kv']} KV heads of"
        f" {shape['head_dim']}, in a CUDA graph, by format: us (goal: {APPEND_US:g}).\n\n"
    )
    return text + table(["element", *formats, *(f"{peer_name(peer)}, 16bit" for peer in others)], lines)


def _accuracy(rows: Sequence[Row]) -> str:
    formats = ["", "16bit", *QUANTISED]  # prefill has none
    models = list(
        dict.fromkeys(row["shape"]["model"] for row in sorted(rows, key=lambda row: formats.index(row["shape"].get("format", ""))))
    )
    lines = []
    for dtype in ("bf16", "f16"):
        for head_dim, own in grouped([row for row in rows if row["dtype"] == dtype], "head_dim").items():
            cells = {row["shape"]["model"]: f"{row['rel_err']:.1e}: {row['rel_err'] / row['peer_err']:.2f}" for row in own}
            lines.append([f"{dtype}, {head_dim}", *(cells.get(model, "-") for model in models)])
    worst = max(row["rel_err"] / row["peer_err"] for row in rows)
    text = (
        "`accuracy`: our error against float64 (over codes, against float64 over the values that the codes stand for), and its ratio to the"
        f" error of torch's scaled_dot_product_attention in 16 bits (at most {worst:.2f}).\n\n"
    )
    return text + table(["element, head_dim", *models], lines)


def _caches(rows: Sequence[Row]) -> str:
    """What formats cost, whatever reads them; of one element, for it hardly matters."""
    rows = [row for row in rows if row["dtype"] == rows[0]["dtype"]]
    kinds = list(grouped(rows, "keys"))
    errors = {(row["shape"]["format"], row["shape"]["keys"]): row["rel_err"] for row in rows}
    errors |= {("int4 per token", row["shape"]["keys"]): row["peer_err"] for row in rows}
    formats = [*(f for f in QUANTISED if any(f == own for own, _ in errors)), "int4 per token"]
    names = {"int4": "int4 (KIVI: K by channels)", "int4 per token": "int4, K by tokens (not a format of ours)"}
    lines = [[names.get(f, f), *(f"{errors[f, kind]:.1%}" if (f, kind) in errors else "-" for kind in kinds)] for f in formats]
    shape = rows[0]["shape"]
    text = (
        f"`accuracy`, the error that a cache format adds: attention of one query over {shape['m']} stored keys against attention over the"
        f" original keys, both in float64, head_dim {shape['head_dim']}. Outliers: a few channels of K are ten times as large.\n\n"
    )
    return text + table(["format", *(f"{kind} K" for kind in kinds)], lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    suites = suites_of(results)
    protocol = (
        " Outputs were checked against float64 before they were timed. Times are medians of CUDA-graph replays on random data, ours and the"
        " peers in turn. cuDNN is torch's scaled_dot_product_attention, which reads no pages: in decode it and minfer read the same"
        " contiguous cache. A ratio above 1 means that minfer is faster. Masked keys count no flops."
    )
    compared = {suite: {p: rows for p, rows in suites[suite].items() if not p.startswith("ours:")} for suite in COMPARED if suite in suites}
    parts = [facts(results) + protocol, *([overview(compared)] if compared else [])]
    if best := suites.get("prefill", {}).get("best"):
        parts.append(_prefill(best))
    for peer, text in VARIANT_TEXTS.items():
        if rows := suites.get("variants", {}).get(peer):
            parts.append(_variants(rows, text))
    if chunks := {peer: rows for peer, rows in suites.get("chunks", {}).items() if peer != "best"}:
        parts.append(_chunks(chunks))
    decode = suites.get("decode", {})
    if best := decode.get("best"):
        parts.append(_decode(best))
    if codes := decode.get("ours:16bit"):
        parts.append(_quantised(codes))
    if paged := decode.get("ours:pages of 64"):
        parts.append(_layouts(paged))
    if appends := suites.get("append"):
        parts.append(_append(appends))
    accuracy = suites.get("accuracy", {})
    if beside_torch := accuracy.get("torch_sdpa"):
        parts.append(_accuracy(beside_torch))
    if caches := accuracy.get("int4 per token"):
        parts.append(_caches(caches))
    parts.append(losses([row for row in results["rows"] if row["suite"] != "accuracy"], "cell"))
    return "\n\n".join(parts)


def _plot_prefill(figure, peers: dict[str, list[Row]]) -> None:
    """TFLOP/s over the length, a panel for each head dimension and mask."""
    rows = _plotted(peers)
    head_dims = sorted(grouped(rows, "head_dim"))
    axes = figure.subplots(len(MASKS), len(head_dims), sharex=True, sharey=True, squeeze=False)
    for j, head_dim in enumerate(head_dims):
        for i, mask in enumerate(MASKS):
            axis = axes[i][j]
            for peer, of_peer in peers.items():
                own = [r for r in of_peer if r in rows and r["shape"]["head_dim"] == head_dim and r["shape"]["model"] == mask]
                if own and peer in COLOURS:
                    axis.plot(
                        [r["shape"]["m"] for r in own],
                        [rate(r) / r["ratio"] for r in own],
                        color=COLOURS[peer],
                        lw=1.2,
                        label=peer_name(peer),
                    )
            ours = {r["shape"]["m"]: rate(r) for r in rows if r["shape"]["head_dim"] == head_dim and r["shape"]["model"] == mask}
            axis.plot(list(sorted(ours)), [ours[m] for m in sorted(ours)], color=COLOURS["ours"], lw=2.0, marker="o", ms=3, label="minfer")
            axis.set_title(f"head_dim {head_dim}, {mask}", fontsize=10)
            axis.set_xscale("log", base=2)
        axes[-1][j].set_xlabel("keys and queries of a sequence")
    _tidy(axes.flat)
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][-1].legend(fontsize=8, loc="lower right")


def _plot_decode(figure, peers: dict[str, list[Row]]) -> None:
    """Bandwidth over the bytes of the cache, a panel for each number of heads: means of the cells of as many bytes."""
    rows = _plotted(peers)
    panels = list(grouped(rows, "heads_q", "heads_kv"))
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axis, heads in zip(axes, panels, strict=True):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            shape, bandwidth = row["shape"], READ_RATE * row["fraction"]
            if (shape["heads_q"], shape["heads_kv"]) == heads:
                size = row["floor_us"] * READ_RATE  # MB
                if row["peer"] in COLOURS:
                    series.setdefault(row["peer"], []).append((size, bandwidth / row["ratio"]))
                if row["peer"] in COLOURS or row["peer"] == "ours:16bit":
                    series.setdefault(shape["format"], []).append((size, bandwidth))
        for name, points in sorted(series.items(), key=lambda item: item[0] in ("16bit", *QUANTISED)):
            by_size: dict[float, list[float]] = {}
            for size, bandwidth in points:
                by_size.setdefault(float(f"{size:.2g}"), []).append(bandwidth)
            label = f"minfer, {name}" if name in ("16bit", *QUANTISED) else peer_name(name)
            colour = COLOURS["ours"] if name == "16bit" else QUANTISED.get(name) or COLOURS[name]
            sizes = sorted(by_size)
            means = [sum(by_size[x]) / len(by_size[x]) for x in sizes]
            axis.plot(sizes, means, color=colour, lw=2.0 if name == "16bit" else 1.2, ls="--" if name in QUANTISED else "-", label=label)
        axis.axhline(READ_RATE, color="#888888", lw=0.8, ls=":")
        axis.set_title(f"decode, {heads[0]}/{heads[1]} heads of 128", fontsize=10)
        axis.set_xscale("log")
        axis.set_xlabel("MB that are read")
    _tidy(axes)
    axes[0].set_ylabel("TB/s")
    axes[-1].legend(fontsize=7, loc="lower right")


def _tidy(axes) -> None:
    """Of one scale, when all is drawn: a limit ends its adapting."""
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", color="#dddddd", lw=0.6, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)


def _plotted(peers: dict[str, list[Row]]) -> list[Row]:
    """bf16; of prefill as many KV heads as query heads."""
    rows = [row for rows in peers.values() for row in rows if row["dtype"] == "bf16"]
    return [row for row in rows if row["suite"] == "decode" or row["shape"]["heads_kv"] == row["shape"]["heads_q"]]


def plot(results: dict[str, Any], path: Path) -> None:
    """Prefill, and decode below it, in bf16."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    suites = suites_of(results)
    draw = {"prefill": (_plot_prefill, 5.4), "decode": (_plot_decode, 3.4)}
    shown = [suite for suite in draw if _plotted(suites.get(suite, {}))]
    if not shown:
        raise ValueError("the results have no prefill or decode rows to plot")
    heights = [draw[suite][1] for suite in shown]
    figure = plt.figure(figsize=(11.8, sum(heights) + 0.4), layout="constrained")
    parts = figure.subfigures(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, suite in zip(parts, shown, strict=True):
        draw[suite][0](part, suites[suite])
    figure.suptitle(f"minfer attention, bf16, on {results['device']}, {results['date']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
