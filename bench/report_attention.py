"""Tables and the plot of the attention results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report_moe import best_of
from report_tables import facts, geomean_and_min, grouped, losses, overview, peer_name, table
from summary import Row, by_suite_and_peer

MASKS = ("causal", "full")
COLOURS = {"ours": "#1f6fb4", "cudnn": "#3a8f4d", "fa3": "#d1622b", "fa4": "#8a4fb0"}
VARIANT_NAMES = {
    "varlen": "64 sequences of lognormal lengths",
    "window": "a window of 4096 keys",
    "softcap": "softcap",
    "sinks": "sinks",
}


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By element, heads, mask and length, whatever the order of the runs."""

    def key(row: Row) -> tuple:
        s = row["shape"]
        return row["dtype"], s["head_dim"], -s["heads_kv"], s["model"], s["m"]

    return sorted(rows, key=key)


def suites_of(results: dict[str, Any]) -> dict[str, dict[str, list[Row]]]:
    """suite -> peer -> rows; of prefill with the best peer of each cell."""
    suites = by_suite_and_peer(in_order(results["rows"]))
    for suite, peers in suites.items():
        # best_of() tells cells apart by their text, which the element is no part of
        best = [
            row for dtype in ("bf16", "f16") for row in best_of({p: [r for r in rows if r["dtype"] == dtype] for p, rows in peers.items()})
        ]
        if suite == "prefill" and best:
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
    text = "`prefill`, 16384 tokens in sequences of so many (32768: one): TFLOP/s: times faster than the best peer.\n\n"
    return text + table(["element, head_dim, heads, mask", *map(str, lengths)], lines)


def _variants(rows: Sequence[Row]) -> str:
    names = [name for name in VARIANT_NAMES if any(row["shape"]["model"] == name for row in rows)]
    lines = []
    for dtype in ("bf16", "f16"):
        for (heads_q, heads_kv), own in grouped([row for row in rows if row["dtype"] == dtype], "heads_q", "heads_kv").items():
            by_name = {row["shape"]["model"]: row for row in own}
            lines.append([f"{dtype}, {heads_q}/{heads_kv}", *(f"{by_name[n]['ratio']:.2f}" if n in by_name else "-" for n in names)])
    text = (
        "`variants`, 16384 tokens, head_dim 128: speed by flops against plain causal attention of one sequence (1: they cost nothing).\n\n"
    )
    return text + table(["element, heads", *(VARIANT_NAMES[n] for n in names)], lines)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    suites = suites_of(results)
    protocol = (
        " Queries were checked against float64 first; times are medians of CUDA-graph replays on random data, ours and the peers in turn."
        " cuDNN is torch's scaled_dot_product_attention. A ratio above 1 means that minfer is faster; flops count keys that are seen."
    )
    parts = [facts(results) + protocol, overview({suite: peers for suite, peers in suites.items() if suite == "prefill"})]
    if best := suites.get("prefill", {}).get("best"):
        parts.append(_prefill(best))
    if plain := suites.get("variants", {}).get("ours:causal"):
        parts.append(_variants(plain))
    parts.append(losses(results["rows"], "cell"))
    return "\n\n".join(parts)


def plot(results: dict[str, Any], path: Path) -> None:
    """TFLOP/s over the length, bf16, a panel for each head dimension and mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    peers = suites_of(results).get("prefill", {})
    rows = [
        row for rows in peers.values() for row in rows if row["dtype"] == "bf16" and row["shape"]["heads_kv"] == row["shape"]["heads_q"]
    ]
    if not rows:
        raise ValueError("the results have no prefill rows to plot")
    head_dims = sorted(grouped(rows, "head_dim"))
    figure, axes = plt.subplots(
        len(MASKS), len(head_dims), figsize=(3.6 * len(head_dims) + 1, 5.8), sharex=True, sharey=True, squeeze=False
    )
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
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", color="#dddddd", lw=0.6, zorder=0)
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1][j].set_xlabel("keys and queries of a sequence")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][-1].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"minfer attention, bf16, on {results['device']}, {results['date']}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
