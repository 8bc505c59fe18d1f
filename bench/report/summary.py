"""What rows of a results file add up to: geometric means, worst ratios, goals. Needs nothing but the rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

# suite -> peer -> (geomean that is the goal, ratio that is the goal of every cell); None: no such goal.
GOALS: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "square": {"cublas": (1.10, 0.98), "cublaslt_best": (1.02, None)},
    "llm": {"cublas": (1.08, 0.95)},
    "odd": {"cublas": (None, 0.90)},  # where aligned
    "epilogue": {"torch_compile": (None, 1.0)},  # 1.25 at m = 16
    "heldout": {"ours:best": (1 / 1.08, None)},
    **{f"grouped{routing}": {"best": (1.10, 0.98)} for routing in ("", "_zipf", "_one_hot")},
    "layer": {"torch_compile": (1.5, 1.5), "vllm": (1.15, 1.15)},
    "prefill": {"best": (1.0, 0.93)},
    "decode": {"best": (1.0, 1.0)},
}
ANY_SUITE = {"quack": (1.0, None), "deepgemm": (1.0, None)}
EPILOGUE_SMALL_M = (16, 1.25)
STREAM_FRACTION = 0.85  # of the floor, for weight streams


def geomean(rows: Iterable[Row]) -> float:
    return statistics.geometric_mean(row["ratio"] for row in rows)


def is_stream(row: Row) -> bool:
    """A weight stream: m <= 16 and 64 MB of weights or more, so that reading them is all the time there is."""
    shape = row["shape"]
    return shape["m"] <= 16 and shape["n"] * shape["k"] * 2 >= 64e6


def required_ratio(row: Row) -> float | None:
    """The ratio that a cell must reach, if its suite and peer have such a goal."""
    required = GOALS.get(row["suite"], {}).get(row["peer"], (None, None))[1]
    if required is None or (row["suite"] == "odd" and not row["shape"].get("aligned", True)):
        return None
    if row["suite"] == "epilogue" and row["shape"]["m"] <= EPILOGUE_SMALL_M[0]:
        return EPILOGUE_SMALL_M[1]
    return required


def shape_text(row: Row) -> str:
    s = row["shape"]
    if "what" in s:
        return f"{s['what']}, {s['m']} x {s['width']}"
    if "format" in s and "model" in s and "heads_q" not in s and "experts" not in s:  # a whole model
        size = f"batch {s['batch']} at {s['context']}" if "batch" in s else f"{s['tokens']} tokens"
        return f"{s['model']} {s['format']}, {size}"
    if "block" in s:  # a decoder block in the batch-invariant mode
        return f"{s['block']} ({s['k']}, {s['h']}, {s['inter']}, {s['n']})"
    if {"batch", "queries", "keys", "format"} <= s.keys():  # attention in the batch-invariant mode
        return f"{s['batch']} x {s['queries']} queries on {s['keys']} keys, {s['format']} cache"
    if "top_k" in s and "routing" in s and "model" not in s:  # a random problem
        scales = (f"scales of {s['a_group']}" if s["a_group"] else "scales of rows") if "a_group" in s else ""
        what = ", ".join([s["routing"], *(name for name in ("gathered", "gated") if s[name])])
        return f"{s['m']} tokens to {s['top_k']} of {s['experts']} experts, {s['n']} x {s['k']} {scales or s['weights']}, {what}"
    if "heads_q" in s and "model" not in s:
        mask = ("causal" if s["causal"] else "full") + (f", window {s['window_left']}" if s["window_left"] >= 0 else "")
        cache = f", {s['kv_format']} cache" if s["kv_format"] else ""
        return f"{s['batch']} x {s['m']} x {s['seqlen_k']}, {s['heads_q']}/{s['heads_kv']} heads of {s['head_dim']}, {mask}{cache}"
    if "heads_q" in s:
        return f"{s['model']}, {s['m']}, {s['heads_q']}/{s['heads_kv']} heads of {s['head_dim']}"
    if "experts" in s and "model" not in s:
        return f"{s['experts']} experts x {s['m']}, {s['n']} x {s['k']}" + (", masked" if s["layout"] == "masked" else "")
    if "experts" in s:
        return " ".join(filter(None, (f"m = {s['m']}, {s['model']}", s.get("step"), s.get("stage"))))
    text = f"{s['m']} x {s['n']} x {s['k']}"
    if "alpha" in s:
        text += f" ({s['alpha']:g}, {s['beta']:g})"
    text += f" {s['epilogue'].replace('_', '+')}" if "epilogue" in s else ""
    text += f" {s['scales']}-scaled" if "scales" in s else ""
    text += ", fast sums" if s.get("sums") == "fast" else ""
    return text + (f" {s['variant'].replace('_', '-')}" if "variant" in s else "")


def by_suite_and_peer(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows in order of first appearance: suite -> peer -> rows."""
    grouped: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        grouped.setdefault(row["suite"], {}).setdefault(row["peer"], []).append(row)
    return grouped


def _distinct_cells(rows: Iterable[Row]) -> list[Row]:
    """One row a cell: ours does not depend on the peer."""
    return list({(shape_text(row), row["dtype"]): row for row in rows}.values())


def verdict(suite: str, peer: str, rows: Sequence[Row]) -> str:
    """The goals of a suite against a peer, and whether the rows reach them."""
    parts = []
    required_geomean = GOALS.get(suite, {}).get(peer, ANY_SUITE.get(peer, (None, None)))[0]
    if required_geomean is not None:
        parts.append(f"geomean >= {required_geomean:.3f}: {'yes' if geomean(rows) >= required_geomean else 'no'}")
    bound = [(row, required) for row in rows if (required := required_ratio(row)) is not None]
    if bound:
        missed = sum(row["ratio"] < required for row, required in bound)
        parts.append(f"cells under their goal: {missed} of {len(bound)}")
    return ", ".join(parts)


def text(rows: Sequence[Row], worst: int = 12) -> str:
    """The closing table of a run: a line for each suite and peer, the weight streams, the worst cells."""
    lines = [f"{'suite':10} {'peer':15} {'cells':>5} {'geomean':>8} {'min':>6} {'median':>7}  goals"]
    grouped = by_suite_and_peer(rows)
    for suite, peers in grouped.items():
        for peer, of_peer in peers.items():
            ratios = [row["ratio"] for row in of_peer]
            lines.append(
                f"{suite:10} {peer:15} {len(ratios):5} {geomean(of_peer):8.3f} {min(ratios):6.3f} {statistics.median(ratios):7.3f}"
                f"  {verdict(suite, peer, of_peer)}"
            )
    streams = _distinct_cells(row for row in rows if row["suite"] == "llm" and is_stream(row))
    if streams:
        fractions = sorted(row["fraction"] for row in streams)
        reached = sum(fraction >= STREAM_FRACTION for fraction in fractions)
        lines.append(
            f"llm, m <= 16 and weights >= 64 MB: {reached} of {len(streams)} cells reach {STREAM_FRACTION:.0%} of the read bandwidth"
            f" (minimum {fractions[0]:.3f}, median {statistics.median(fractions):.3f})"
        )
    # Against the first peer of each suite, the one with the goals; a tuned plan of ours is no peer.
    main = [row for peers in grouped.values() for row in next(iter(peers.values())) if not row["peer"].startswith("ours:")]
    if main:
        lines.append(f"the {min(worst, len(main))} worst of {len(main)} cells:")
    for row in sorted(main, key=lambda row: row["ratio"])[:worst]:
        peer = row["peer"] + (f" ({row['peer_variant']})" if row.get("peer_variant") else "")
        lines.append(
            f"  {row['ratio']:6.3f}  {row['suite']:8} {shape_text(row):32} {row['us']:8.2f} us, {peer} {row['peer_us']:8.2f},"
            f" floor {row['floor_us']:8.2f}  {row['kernel']}@{row.get('launch', '')}"
        )
    return "\n".join(lines)
