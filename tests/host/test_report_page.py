"""minfer report: one page with every row of every results file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from minfer.cli import main as cli
from minfer.measure import report
from typer.testing import CliRunner

pytest.importorskip("vl_convert")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    result = CliRunner().invoke(cli.app, ["report", str(RESULTS), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.stat().st_size <= 3e6
    return out.read_text(encoding="utf-8")


class _Loads(HTMLParser):
    """What a page would fetch, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched, self.scripts, self._script = [], [], False

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.fetched += [given[name] for name in ("src", "href") if given.get(name)]
        if tag == "script":
            self._script = True
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = self._script and tag != "script"

    def handle_data(self, text):
        if self._script:
            self.scripts[-1] += text


def test_the_page_has_all_and_fetches_nothing(written):
    loads = _Loads()
    loads.feed(written)
    assert loads.fetched == [] and "@import" not in written.partition("</style>")[0]
    data, library, script = loads.scripts
    assert "vegaEmbed" in library and "vegaEmbed(" in script
    assert not re.search(r"/\*(style|library|script|data)\*/", script + data)
    wanted = {name for name in re.findall(r'element\("([\w-]+)"\)', script)} | set(re.findall(r'draw\("([\w-]+)"', script))
    assert wanted and wanted <= set(re.findall(r'id="([\w-]+)"', written.partition("<script")[0]))


def test_every_number_is_its_row_s(written):
    loads = _Loads()
    loads.feed(written)
    data = json.loads(loads.scripts[0])
    count = 0
    for number, file in enumerate(data["files"]):
        results = json.loads((RESULTS / file["path"]).read_text())
        assert (file["commit"], file["device"], file["date"]) == (results["commit"], results["device"], results["date"])
        own = [row for row in data["rows"] if row[0] == number]
        assert [row[1] for row in own] == list(range(len(results["rows"])))
        for shown, row in zip(own, results["rows"], strict=True):
            suite, op, kernel, dtype, peer, shape = (data["texts"][place] for place in shown[2:8])
            assert (suite, op, kernel, dtype, peer) == tuple(str(row.get(x, "")) for x in ("suite", "op", "kernel", "dtype", "peer"))
            assert shape == " ".join(f"{k}={v}" for k, v in (row.get("shape") or {"format": row.get("format")}).items())
            for value, name in zip(shown[8:13], ("us", "peer_us", "ratio", "floor_us", "fraction"), strict=True):
                assert value == row.get(name) or value == pytest.approx(row[name], rel=1e-4)
            count += 1
    assert count == len(data["rows"]) > 10_000


def test_texts_that_look_like_markup(tmp_path):
    row = {
        "suite": "</script><b>",
        "op": "gemm",
        "shape": {"m": 1},
        "dtype": "bf16",
        "us": 1.0,
        "peer": "x",
        "peer_us": 2.0,
        "ratio": float("nan"),
    }
    (tmp_path / "gemm.json").write_text(json.dumps({"device": "d", "commit": "c", "date": "t", "rows": [row]}))
    loads = _Loads()
    report.write_page([tmp_path], tmp_path / "page.html")
    loads.feed((tmp_path / "page.html").read_text())
    data = json.loads(loads.scripts[0])
    assert len(loads.scripts) == 3 and "</script><b>" in data["texts"] and data["rows"][0][10] is None


def test_what_cannot_be(tmp_path):
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 1 and "no results file is below" in result.output and not (tmp_path / "page.html").exists()
