"""The README's table, the pages of docs/results and the plots: made of results files alone, losses included."""

import json
from pathlib import Path

import pytest

from bench.report import (
    __main__ as report,
    expert_parallel as report_expert_parallel,
    headlines,
    w4a16 as report_w4a16,
)
from bench.report.summary import shape_text

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), "llama-3.1-70b": ((10240, 8192), (8192, 8192))}
MS = (1, 16, 64, 256)
README = "# x\n<!-- results:nvidia-h200 -->\nolder\n<!-- /results -->\nend\n"


def row(suite, m, n, k, peer, ratio, us=10.0, fraction=0.6, **shape):
    return {
        "suite": suite, "op": "w4a16_gemm", "kernel": "w4a16_x", "shape": {"m": m, "n": n, "k": k, "group": 128, **shape}, "dtype": "f16",
        "us": us, "p10": us, "p90": us, "peer": peer, "peer_us": round(us * ratio, 3), "ratio": ratio, "floor_us": us * fraction,
        "fraction": fraction, "rel_err": 3e-4,
    }  # fmt: skip


def made_up():
    """Not measurements: Machete wins at 256 tokens, Marlin nowhere; Marlin was not measured on one layer."""
    rows = []
    for peer, ratios in {"cublas": (2.5, 2.0, 1.5, 0.9), "marlin": (1.3, 1.2, 1.1, 1.05), "machete": (1.4, 1.1, 1.2, 0.8)}.items():
        for model, layers in LAYERS.items():
            for n, k in layers:
                if peer != "marlin" or n != 8192:
                    rows += [row("w4a16", m, n, k, peer, ratio, us=5.0 + m, model=model) for m, ratio in zip(MS, ratios, strict=True)]
    rows += [row("variants", m, 4096, 4096, "ours:plain", r, variant=v) for v, r in (("g32", 0.8), ("zeros", 0.97)) for m in (1, 16)]
    rows += [row("gated", 16, 28672, 4096, "ours:gemm+silu_and_mul", 1.2, variant="gated")]
    head = dict(device="NVIDIA H200", driver="1.2", torch="2.11", cuda="13.0", commit="abc", date="2000-01-01", protocol="p")
    return head | {"rows": rows}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results" / "nvidia-h200").mkdir(parents=True)
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def run(folder, *arguments):
    folders = ["--results", str(folder / "results"), "--pages", str(folder / "pages"), "--readme", str(folder / "README.md")]
    return report.main([*folders, *arguments])


def test_own_pages():
    """What is committed is what the results files say."""
    assert report.main(["--check"]) == 0


def test_section():
    text = report_w4a16.section(made_up())
    assert "NVIDIA H200, driver 1.2" in text and "f16, int4 in groups of 128" in text
    lines = text.splitlines()
    # Overview, with the losses counted; no column of goals, as there are none.
    assert "| `w4a16` | cuBLAS | 24 | **1.612** | 0.90 at 256 x 6144 x 4096 | 6 |" in lines
    assert "| `w4a16` | Marlin | 20 |" in text and "goals" not in text
    # Every cell: time, share of the floor, against cuBLAS and the best 4-bit peer.
    cells = next(line for line in lines if line.startswith("| m | qkv 6144 x 4096 | out 4096 x 4096"))
    assert "gate+up 28672 x 4096 | down 4096 x 14336" in cells and "Llama-3.1-8B: our time" in text
    assert "| 1 | " + " | ".join(["6.0 us, 60%: 2.50 / 1.30"] * 4) + " |" in lines
    assert "| 256 | " + " | ".join(["261.0 us, 60%: 0.90 / 0.80"] * 4) + " |" in lines
    assert "| m | 10240 x 8192 | 8192 x 8192 |" in lines, "a model with other than four layers goes by their sizes"
    assert "| 1 | 6.0 us, 60%: 2.50 / 1.30 | 6.0 us, 60%: 2.50 / 1.40 |" in lines, "Machete alone on the last layer"
    # Over the layers.
    assert "| m | cuBLAS | Marlin | Machete | the best of them | of the floor |" in lines
    assert "| 16 | 2.00 (2.00) | 1.20 (1.20) | 1.10 (1.10) | 1.10 (1.10) | 60% |" in lines
    assert any(line.startswith("| up to 64 | ") for line in lines) and any(line.startswith("| above 64 | 0.90 (0.90)") for line in lines)
    assert "| m | groups of 32 | zero points |" in lines and "| 1 | 0.80 (0.80) | 0.97 (0.97) |" in lines
    assert "| m | as own GEMM, then silu and multiply |" in lines and "| 16 | 1.20 (1.20) |" in lines
    assert (
        "Where a peer is faster: 12 of 73 comparisons:" in text
        and "| `w4a16` | 256 x 8192 x 8192 | f16 | 261.00 | Machete 208.80 | 0.80 |" in lines
    )


def test_section_of_a_part():
    """A run of some suites and peers still makes a section."""
    results = made_up()
    results["rows"] = [r for r in results["rows"] if r["peer"] == "machete" and r["shape"]["m"] == 16]
    text = report_w4a16.section(results)
    assert "| 16 | 21.0 us, 60%: - / 1.10 |" in text and "the best of them" not in text and "up to 64" not in text
    assert "No cell was slower than a peer's." in text
    results["rows"] = [row("gated", 16, 28672, 4096, "ours:gemm+silu_and_mul", 1.2, variant="gated")]
    assert "`gated`" in report_w4a16.section(results)
    assert shape_text(results["rows"][0]) == "16 x 28672 x 4096 gated"


def test_best_peer():
    rows = [row("w4a16", 1, 8, 8, "marlin", 1.3), row("w4a16", 2, 8, 8, "marlin", 0.7)]
    peers = {"marlin": rows, "machete": [row("w4a16", 1, 8, 8, "machete", 1.1)]}
    assert [r["peer"] for r in report_w4a16.best_peer(peers).values()] == ["machete", "marlin"]


def test_headline():
    """The best peer of each cell; who is slower than the best counts as a loss once, and forms of our own are no peers."""
    results = made_up()
    (line,) = [line for line in headlines.HEADLINES if line.family == "w4a16" and "w4a16" in line.suites]
    cells = headlines.headline(results["rows"], line)
    assert cells[2:] == ["cuBLAS, Marlin, Machete", "24", "**1.07**", "6", "0.80: 256 x 6144 x 4096, Machete"]
    text = headlines.section({"w4a16": results})
    assert "| " + " | ".join(cells) + " |" in text.splitlines() and "2000-01-01." in text
    assert headlines.headline([r for r in results["rows"] if r["peer"].startswith("ours:")], line) is None
    behind = headlines.section({"w4a16": results}, [{"w4a16": results}])
    assert cells[0] not in behind and "left out" in behind and headlines.section({"w4a16": results}, [{}]).count(cells[4]) == 1
    paged = [row("decode", 1, 8, 8, peer, ratio, page=page) for peer, ratio, page in (("cudnn", 0.9, None), ("fa3", 1.2, 64))]
    assert [r["peer"] for r in headlines.best_of_cells(paged)] == ["cudnn"], "a layout of the keys makes no cell of its own"
    assert len(headlines.best_of_cells([row("w8a16", 1, 8, 8, "cublas", 1.0, variant=v) for v in ("int8", "fp8_e4m3")])) == 2


def test_every_compared_suite_has_a_headline():
    """No suite with peers is left out of the README, whatever it says."""
    shown = {(line.family, suite) for line in headlines.HEADLINES for suite in line.suites}
    for family, results in report.read_results(ROOT / "bench" / "results" / "nvidia-h200").items():
        beside = [r for r in results["rows"] if r.get("peer", "none") != "none" and not r["peer"].startswith("ours:")]
        rows = [r for r in beside if "us" in r and r["suite"] != "accuracy"]  # whole processes take seconds
        assert {(family, r["suite"]) for r in rows} <= shown


def test_expert_parallel():
    shape = dict(model="mixtral-8x7b", ranks=2, top_k=2)
    rows = [row("expert_parallel", m, 8, 8, "ours:moe_ffn on one GPU", r, us=100.0, mode=mode, **shape)
            for mode, m, r in (("capacity", 16, 1.5), ("needed", 16, 0.5))]  # fmt: skip
    lines = report_expert_parallel.section(made_up() | {"rows": rows}).splitlines()
    assert "| tokens of all 2 ranks | Mixtral-8x7B |" in lines
    assert (
        "| 16, with `capacity`, in a CUDA graph | 100 us: 1.50 |" in lines and "| 16, without `capacity`, eager | 100 us: 0.50 |" in lines
    )


def test_files_are_written(folder):
    pytest.importorskip("matplotlib")
    (folder / "results" / "nvidia-h200" / "w4a16.json").write_text(json.dumps(made_up()))
    before = README
    assert run(folder, "--check") == 1
    assert (folder / "README.md").read_text() == before and not (folder / "pages").exists()
    assert run(folder) == 0
    text = (folder / "README.md").read_text()
    assert text.startswith("# x\n<!-- results:nvidia-h200 -->\nNVIDIA H200") and text.endswith("<!-- /results -->\nend\n")
    assert "older" not in text and "| GEMM, 4-bit weights |" in text
    page = (folder / "pages" / "nvidia-h200.md").read_text()
    assert page.startswith("# Results on NVIDIA H200\n") and "## GEMM with 4-bit and 8-bit weights" in page and "## Attention" not in page
    assert "](../results/nvidia-h200/w4a16.png)" in page, "from the page's folder"
    picture = folder / "results" / "nvidia-h200" / "w4a16.png"
    assert picture.stat().st_size > 10_000 and picture.read_bytes()[:4] == b"\x89PNG"
    assert run(folder, "--check") == 0
    (folder / "pages" / "nvidia-h200.md").write_text(page.replace("1.612", "1.712"))
    assert run(folder, "--check") == 1, "a number that was typed"


def test_no_results(folder, capsys):
    with pytest.raises(SystemExit):
        run(folder, "--check")
    assert "has no folder with one of gemm.json" in capsys.readouterr().err
    (folder / "results" / "nvidia-h100").mkdir()
    (folder / "results" / "nvidia-h100" / "w4a16.json").write_text(json.dumps(made_up()))
    assert run(folder, "--stdout") == 0
    assert "int4" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(folder, "--check")
    assert "a table of nvidia-h200, but" in capsys.readouterr().err


def test_plot_needs_cublas(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no w4a16 rows against cublas"):
        report_w4a16.plot(made_up() | {"rows": []}, tmp_path / "x.png")
