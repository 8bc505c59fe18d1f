"""Results files, ``bench/results/<device>/<family>.json``, as one page with filters, pictures and every row.

The page holds the rows themselves, without what a reader does not look at, and draws in the browser what is asked for; so each point and
each line of its tables names the file and the number of the row that it is of. Pictures are Vega-Lite's, whose JavaScript
vl-convert-python brings along.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

_FACTS = ("device", "driver", "torch", "cuda", "commit", "date", "protocol")
# Of a row, in this order: numbers as they are, texts as places in the list of texts.
_TEXTS = ("suite", "op", "kernel", "dtype", "peer")
_NUMBERS = ("us", "peer_us", "ratio", "floor_us", "fraction")
# What rows of whole models and of accuracy have beside times.
_MORE = (
    "tokens_per_second",
    "launches",
    "peak_gb",
    "peer_peak_gb",
    "peer_launches",
    *("first_ms_p50", "first_ms_p99", "next_ms_p50", "next_ms_p99"),
    *("seconds", "peer_seconds"),
    *("perplexity", "agreement", "kl"),
    "error",
    "collectives_share",
)
_DIGITS = 5


@dataclass
class Report:
    """What the page shows.

    Attributes:
      files: of each results file its path, device, family, versions, commit, date and protocol.
      texts: all texts, once each.
      rows: [file, number of the row in it, suite, op, kernel, dtype, peer, shape, us, peer_us, ratio, floor_us, fraction, more]; texts are
        places in ``texts``, ``more`` what the row has beside these, or None.
    """

    files: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = {text: place for place, text in enumerate(self.texts)}

    def _text(self, text: str) -> int:
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place

    def add(self, path: str, family: str, results: dict[str, Any]) -> None:
        """A results file's rows."""
        number = len(self.files)
        self.files.append({"path": path, "family": family, **{name: results.get(name, "") for name in _FACTS}})
        for index, row in enumerate(results.get("rows", [])):
            shape = row.get("shape") or {"format": row["format"]} if "format" in row else row.get("shape") or {}
            own = [number, index, *(self._text(str(row.get(name, ""))) for name in _TEXTS), self._text(_words(shape))]
            own += [_rounded(row.get(name)) for name in _NUMBERS]
            more = {name: _rounded(row[name]) for name in _MORE if row.get(name) is not None}
            if row.get("commit"):
                more["commit"] = row["commit"]
            self.rows.append([*own, more or None])


def _words(shape: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in shape.items())


def _rounded(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def read_report(folders: Iterable[Path]) -> Report:
    """All results files below the folders, in the order of their paths.

    Raises:
      ValueError: there is none.
    """
    report = Report()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.json")):
            results = json.loads(path.read_text())
            if isinstance(results, dict) and isinstance(results.get("rows"), list):
                report.add(path.relative_to(folder).as_posix(), path.stem, results)
    if not report.files:
        raise ValueError(f"report: no results file is below {', '.join(map(str, folders))}")
    return report


def library() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed.

    Raises:
      ImportError: vl-convert-python is not there; the message says what brings it.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise ImportError("minfer report needs vl-convert-python: pip install 'minfer[report]'") from error
    return vl_convert.javascript_bundle()


def page(report: Report) -> str:
    """The page's text."""
    own = resources(__package__)
    data = json.dumps({"files": report.files, "texts": report.texts, "rows": report.rows}, separators=(",", ":"), ensure_ascii=False)
    parts = {
        "/*style*/": own.joinpath("report.css").read_text(),
        "/*library*/": library(),
        "/*script*/": own.joinpath("report.js").read_text(),
        "/*data*/": data,
    }
    text = own.joinpath("report.html").read_text()
    for mark, value in parts.items():
        text = text.replace(mark, value.replace("</script", "<\\/script"), 1)
    return text


def write_page(folders: Iterable[Path], out: Path) -> Report:
    """Writes the page of all results files below the folders.

    Raises:
      ValueError, ImportError: as :func:`read_report` and :func:`library`.
    """
    report = read_report(list(folders))
    out.write_text(page(report), encoding="utf-8")
    return report
