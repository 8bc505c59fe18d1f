"""Tables of the operators between the GEMMs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.report.summary import Row, by_suite_and_peer
from bench.report.tables import facts, grouped, losses, overview, peer_name, table

COPY = "copy"  # a yardstick, not a peer: as many bytes, half read, half written


def _best(rows: Sequence[Row]) -> Row | None:
    """Of a cell's rows that of the fastest peer."""
    others = [row for row in rows if row["peer"] != COPY and not row["peer"].startswith("ours:")]
    return min(others, key=lambda row: row["peer_us"], default=None)


OWN = {"ours:separate": "own, separate", "ours:one_launch": "one launch", "ours:two_launches": "two launches"}


def _is_product(row: Row) -> bool:
    """Of a norm and a weight, whose sizes are in the operator's name."""
    return row["op"].startswith("rms_norm") and "gemm" in row["op"]


def cells(rows: Sequence[Row], of_copy: bool) -> str:
    """A line for each operator, a column for each size: our time, the share of a copy's speed or of the floor, against the best peer.
    Products have a table of their own, with a column for each number of tokens."""
    products = [row for row in rows if _is_product(row)]
    others = [row for row in rows if not _is_product(row)]
    return "\n\n".join(part for part in (_lines(others, of_copy), _lines(products, of_copy, True)) if part)


def _lines(rows: Sequence[Row], of_copy: bool, by_tokens: bool = False) -> str:
    if not rows:
        return ""
    sizes = sorted({(row["shape"]["m"], row["shape"]["width"]) for row in rows}, key=lambda size: (size[1], size[0]))
    by_width = len({width for _, width in sizes}) > 1 and all(
        len({row["shape"]["m"] for row in of_what if row["shape"]["width"] == width}) <= 1
        for of_what in grouped(rows, "what").values()
        for _, width in sizes
    )
    by_width = by_width and not by_tokens
    columns = sorted({width for _, width in sizes}) if by_width else sorted({m for m, _ in sizes}) if by_tokens else sizes
    lines = []
    for what, of_what in grouped(rows, "what").items():
        of_size = grouped(of_what, "width") if by_width else grouped(of_what, "m") if by_tokens else grouped(of_what, "m", "width")
        line = [what]
        for column in columns:
            own = of_size.get(column)
            if not own:
                line.append("-")
                continue
            text = f"{own[0]['us']:.1f} us"
            copy = next((row for row in own if row["peer"] == COPY), None)
            if of_copy and copy is not None:
                text += f", {copy['ratio']:.0%}"
            best = _best(own)
            if best is not None:
                text += f", {best['ratio']:.2f} {peer_name(best['peer'])}"
            for row in own:
                if row["peer"] in OWN:
                    text += f", {row['ratio']:.2f} {OWN[row['peer']]}"
            line.append(text)
        lines.append(line)
    header = ["operator", *(str(column) if by_width or by_tokens else f"{column[0]} x {column[1]}" for column in columns)]
    return table(header, lines)


TITLES = {
    "rows": ("Working sets of 256 MB, by width: our time, as a share of the speed of a copy of as many bytes, times the best peer.", True),
    "small": ("Few rows in a CUDA graph, rows x width: our time, times the best peer.", False),
    "quant": ("8-bit results, rows x width: our time, as a share of the speed of a copy of as many bytes, times the best peer.", True),
    "append": (
        "q, k and v of a decode step into a cache, sequences x width of the GEMM's output, times the best peer and our own operators.",
        False,
    ),
    "sample": ("Draws, rows x vocabulary: our time, times the best peer.", False),
    "norm_gemm": (
        "A norm with a residual and the product behind it, by tokens: our time as planned, times the best peer, our two operators, and one "
        "launch or two by name.",
        False,
    ),
    "decoder_block": (
        "What lies between two attentions, of int4 weights in groups of 128, e4m3 or 16-bit weights, tokens x columns of the result: our "
        "time as planned, times our operators one after the other, and one launch by name.",
        False,
    ),
    "decoder_layer": (
        "One token's attention over a 16-bit cache, and what lies between it and the next one, in one launch as engines run it: our time, "
        "times our three operators (qk_norm_rope_append, attention_paged, the decoder block).",
        False,
    ),
    "origins": ("The tables of the systems that this package descends from, rows x width.", True),
    "decode_layer": ("A decode step of a Llama-3.1-8B layer over 1024 tokens of each sequence, in one CUDA graph.", False),
}


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    suites = by_suite_and_peer(results["rows"])
    compared = [row for row in results["rows"] if row["peer"] != COPY]
    parts = [f"{facts(results)} Ratios above 1: ours is faster.", overview(suites)]
    for suite, peers in suites.items():
        rows = [row for of_peer in peers.values() for row in of_peer]
        text, of_copy = TITLES[suite]
        if of_copy:
            shares = [row["ratio"] for row in peers.get(COPY, [])]
            text += f" Median share of a copy's speed: {statistics.median(shares):.0%}." if shares else ""
        parts.append(f"`{suite}`. {text}\n\n{cells(rows, of_copy)}")
    parts.append(losses(compared, "operator, rows x width"))
    return "\n\n".join(parts)
