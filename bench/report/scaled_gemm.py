"""Tables of the products of 8-bit operands, FP8 or INT8.

e4m3 sums are promoted, added up in float32 every 128 of k, or left to the tensor core, which is faster and keeps about 14 bits. Peers are
compared with our own form of their kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bench.report.random import BANDS, band_name, by_band, errors, seeds
from bench.report.summary import Row, by_suite_and_peer, geomean, shape_text
from bench.report.tables import facts, geomean_and_min, losses, peer_name, table

OWN_FAST = "ours:fast"
NUMBER = re.compile(r"\d[\d.e+-]*")  # errors that differ in their numbers alone are of one kind
SCALES = {"block": "blocks of 1 x 128 and 128 x 128", "row": "rows and columns", "tensor": "one number each"}


def leaves_sums_to_the_tensor_core(row: Row) -> bool:
    """Whether the peer does. Of vLLM's kernels those without scales of blocks do: their errors are those of cuBLASLt's fast sums."""
    fast = row["peer"] == "cublaslt_fast" or (row["peer"] == "vllm" and row["shape"].get("scales") != "block")
    return fast and row["dtype"] == "e4m3"


def _cell(row: Row) -> tuple[str, str]:
    return row["suite"], json.dumps(row["shape"], sort_keys=True)


def prepared(results: dict[str, Any]) -> dict[str, Any]:
    """The results, with the rows of peers that leave their sums to the tensor core against our own form that does. They are cells of their
    own: their shape says ``sums``, fast."""
    own = {_cell(row): row for row in results["rows"] if row["peer"] == OWN_FAST and "ratio" in row}
    rows = []
    for row in results["rows"]:
        fast = own.get(_cell(row)) if "ratio" in row and leaves_sums_to_the_tensor_core(row) else None
        if fast is not None:
            us = fast["peer_us"]
            row = row | {
                "shape": row["shape"] | {"sums": "fast"}, "us": us, "ratio": round(row["peer_us"] / us, 4),
                "fraction": round(row["floor_us"] / us, 4), "rel_err": fast["peer_rel_err"],
            }  # fmt: skip
            row = {name: value for name, value in row.items() if name not in ("p10", "p90", "kernel", "launch")}
        rows.append(row)
    return results | {"rows": rows}


def best_of(rows: Iterable[Row]) -> list[Row]:
    """The row of each cell's fastest peer; a form of ours is none."""
    best: dict[tuple, Row] = {}
    for row in rows:
        if not row["peer"].startswith("ours:") and (_cell(row) not in best or row["ratio"] < best[_cell(row)]["ratio"]):
            best[_cell(row)] = row
    return list(best.values())


def _groups(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """(suite, scales, sums) -> rows."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        shape = row["shape"]
        found.setdefault((row["suite"], shape["scales"], shape.get("sums", "")), []).append(row)
    return found


def _overview(rows: Sequence[Row]) -> str:
    lines = []
    for (suite, scales, sums), of_group in _groups(rows).items():
        best = best_of(of_group)
        for name, of_peer in (*by_suite_and_peer(of_group)[suite].items(), ("best", best)):
            if not of_peer or (name == "best" and len({row["peer"] for row in best}) == 1):
                continue
            worst = min(of_peer, key=lambda row: row["ratio"])
            where = f"{worst['ratio']:.2f} at {shape_text(worst)}"
            slower = sum(row["ratio"] < 1 for row in of_peer)
            what = f"`{suite}`, {scales}" + (", fast sums" if sums else "")
            lines.append([what, peer_name(name), str(len(of_peer)), f"**{geomean(of_peer):.3f}**", where, str(slower)])
    return table(["suite, scales", "peer", "cells", "geomean", "worst cell", "lost"], lines)


def _by_tokens(rows: Sequence[Row]) -> str:
    """Of one kind of scales and sums: a line for each band of m, a column for each peer; our own share of the floor."""
    peers = list(dict.fromkeys(row["peer"] for row in rows if not row["peer"].startswith("ours:")))
    split = {peer: by_band(row for row in rows if row["peer"] == peer) for peer in peers}
    own = by_band(best_of(rows))
    lines = []
    for band in BANDS:
        name = band_name(band)
        if not own[name]:
            continue
        shares = sorted(row["fraction"] for row in own[name])
        cells = [geomean_and_min(split[peer][name]) for peer in peers]
        lines.append([name, *cells, geomean_and_min(own[name]), f"{shares[len(shares) // 2]:.0%}"])
    return table(["m", *map(peer_name, peers), peer_name("best"), "of the floor, median"], lines)


def _of_layers(rows: Sequence[Row]) -> str:
    """All suites but the random one, by kind of scales and sums."""
    parts = []
    for scales, what in SCALES.items():
        for sums in ("", "fast"):
            own = [row for row in rows if row["shape"]["scales"] == scales and row["shape"].get("sums", "") == sums]
            own = [row for row in own if not row["suite"].endswith("_random")]
            if best_of(own):
                kind = ", fast sums" if sums else ", promoted sums" if own[0]["dtype"] == "e4m3" else ""
                text = f"Layers, scales of {what}{kind}, by m: how many times as fast as a peer, geometric mean (worst cell)."
                parts.append(text + "\n\n" + _by_tokens(own))
    return "\n\n".join(parts)


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family, of results that are :func:`prepared`."""
    rows = [row for row in results["rows"] if "ratio" in row]
    text = " Every cell was checked against float64 before it was timed. A ratio above 1 means that minfer is faster."
    if any(row["shape"].get("sums") for row in rows):
        text += (
            " Sums are promoted, added up in float32 every 128 of k, or fast, left to the tensor core. Peers whose sums are fast are"
            " compared with `fast_accum=True`, in cells of their own: cuBLASLt with fast accumulation, and vLLM's kernels where scales are"
            " not of blocks."
        )
    lost = losses([row for row in rows if not row["peer"].startswith("ours:")])
    parts = [facts(results) + " " + seeds(results) + text, _overview(rows), _of_layers(rows), lost]
    return "\n\n".join(filter(None, [*parts, errors_of_peers(results["rows"])]))


def errors_of_peers(rows: Sequence[Row]) -> str:
    """What was not measured: problems one by one, peers by how many cells and the first of them."""
    failed = [row for row in rows if "error" in row]
    own = errors([row for row in failed if not row["peer"]])
    counts: dict[tuple[str, str, str], list[Row]] = {}
    for row in failed:
        if row["peer"]:
            kind = NUMBER.sub("", row["error"].partition(" when calling")[0])
            counts.setdefault((row["suite"], row["peer"], kind), []).append(row)
    lines = []
    for (suite, peer, _), of_kind in counts.items():
        why = of_kind[0]["error"].partition(" when calling")[0].replace("|", "/")
        lines.append([f"`{suite}`", peer_name(peer), str(len(of_kind)), shape_text(of_kind[0]), why])
    header = ["suite", "peer", "cells", "the first", "what it says there"]
    text = "Peers that did not compute a cell, or not right:\n\n" + table(header, lines) if lines else ""
    return "\n\n".join(filter(None, [own, text]))
