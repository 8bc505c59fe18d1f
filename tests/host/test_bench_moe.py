"""The mixture-of-experts suites and their report: which cells a command has, rows merged cell by cell, stages where they were measured."""

import argparse
import json

import pytest
from minfer.measure import benchmarking
from minfer.measure.benchmarking import Timing

from bench.report import moe as report_moe
from bench.suites import moe as moe_suites

MODELS = {"qwen3-30b-a3b": (128, 8, 2048, 768), "gpt-oss-120b": (128, 4, 2880, 2880), "mixtral-8x7b": (8, 2, 4096, 14336)}
STAGE_US = {"router": 6.0, "sort": 2.0, "gemm1": 60.0, "gemm2": 30.0, "combine": 2.0}


def arguments(*words):
    parser = argparse.ArgumentParser()
    moe_suites.add_arguments(parser)
    return parser.parse_args(words)


def row(suite, model, tokens, peer, ratio, us=100.0, fraction=0.9, **shape):
    experts, top_k, hidden, inter = MODELS[model]
    n, k = {"w13": (2 * inter, hidden), "w2": (hidden, inter)}.get(shape.get("step"), (inter, hidden))
    shape |= dict(model=model, m=tokens, experts=experts, top_k=top_k, n=n, k=k, active=min(experts, tokens * top_k))
    return benchmarking.result_row(
        suite=suite, op="grouped_gemm", kernel="moe_x", shape=shape, dtype="bf16", timing=Timing.of([us]), peer=peer, peer_us=us * ratio,
        floor_us=us * fraction, rel_err=1e-3,
    )  # fmt: skip


def stage_rows(model, tokens, suite="stages"):
    rows = [row(suite, model, tokens, "ours:layer", 90 / us, us=us, stage=stage) for stage, us in STAGE_US.items()]
    return [*rows, row(suite, model, tokens, "ours:stages", 100 / 90, us=90.0, stage="layer")]


def made_up():
    """Not measurements. FBGEMM stops at 8 tokens; the gather is no peer."""
    rows = []
    for model in MODELS:
        for step in ("w13", "w2"):
            for tokens, ratio in ((8, 0.96), (1024, 1.3)):
                rows += [row("grouped", model, tokens, "torch_grouped", ratio, step=step)]
                rows += [row("grouped", model, tokens, "ours:gather", 0.5, step=step)]
            rows += [row("grouped", model, 8, "fbgemm", 0.9, step=step)]
    rows += [row("grouped_zipf", "qwen3-30b-a3b", 8, "vllm_triton", 1.1, step="w13")]
    rows += [row("router", "qwen3-30b-a3b", 8, "ours:with its GEMM", 2.0, us=4.0), row("router", "qwen3-30b-a3b", 8, "torch", 9.0, us=4.0)]
    rows += [row("grouped_w4a16", "qwen3-30b-a3b", 8, "marlin", 1.2, step="w13")]  # a suite that the report has no table for
    rows += [row("layer", "qwen3-30b-a3b", 8, "torch_compile", 1.6), row("layer", "qwen3-30b-a3b", 8, "vllm", 1.1)]
    head = dict(device="NVIDIA H200", driver="1.2", torch="2.11", cuda="13.0", commit="abc", date="2000-01-01", protocol="p")
    return head | {"rows": rows}


def test_cells():
    cells = moe_suites.cells(arguments("--routing", "uniform,zipf,one_hot"))
    count = len(moe_suites.MODELS) * len(moe_suites.TOKENS)
    of_suite = {suite: [c for c in cells if c["suite"] == suite] for suite in moe_suites.SUITES}
    assert {suite: len(found) for suite, found in of_suite.items()} == {
        "router": count, "grouped": 6 * count, "layer": 3 * count, "stages": 3 * count,
    }  # fmt: skip
    assert len({moe_suites.cell_key(cell) for cell in cells}) == len(cells)
    weights = [(cell["model"], cell["step"]) for cell in of_suite["grouped"]]
    changes = sum(a != b for a, b in zip(weights, weights[1:], strict=False))
    assert changes + 1 == len(set(weights)), "weights are made once"
    for option, known in (("--suite", "router"), ("--models", "mixtral"), ("--routing", "zipf")):
        with pytest.raises(ValueError, match=f"{option} must be of .*{known}.*, got 'x'"):
            moe_suites.cells(arguments(option, "x"))


def test_rows_of_other_cells_stay(tmp_path):
    path = tmp_path / "moe.json"

    def measure(commit, rows):
        results = moe_suites.CellResults(path, commit)
        done = results.measured()
        for r in rows:
            results.add(r)
        results.write()
        return done

    measure("old", [row("grouped", m, 8, "fbgemm", 1.0, step="w13") for m in MODELS] + stage_rows("gpt-oss-120b", 8))
    assert measure("new", [row("grouped", "gpt-oss-120b", 8, "fbgemm", 2.0, step="w13")]) == set()
    content = json.loads(path.read_text())
    found = {(r["shape"]["model"], r["shape"].get("stage")): (r["ratio"], r.get("commit", content["commit"])) for r in content["rows"]}
    assert len(content["rows"]) == 3 + 6 and content["commit"] == "new"
    assert found["gpt-oss-120b", None] == (2.0, "new") and found["mixtral-8x7b", None] == (1.0, "old")
    assert found["gpt-oss-120b", "sort"][1] == "old"
    cell = dict(suite="grouped", model="gpt-oss-120b", step="w13", routing="uniform", tokens=8)
    assert moe_suites.CellResults(path, "new").measured() == {moe_suites.cell_key(cell)}
    measure("new", [row("grouped", "qwen3-30b-a3b", 8, "fbgemm", 3.0, step="w13")])
    assert len(moe_suites.CellResults(path, "new").measured()) == 2
    assert len(json.loads(path.read_text())["rows"]) == 9


def test_section():
    lines = report_moe.section(made_up()).splitlines()
    # The best peer of a cell: FBGEMM where it was measured.
    assert any(line.startswith("| `grouped_w4a16` | Marlin | 1 |") for line in lines)
    assert "| `grouped` | the best of them | 12 | **1.082** | 0.90 at m = 8, mixtral-8x7b w13 | 6 |" in "\n".join(lines)
    assert "| experts x n x k | 8 | 1024 |" in lines
    assert "| Qwen3-30B-A3B w13: 128 x 1536 x 2048 | 100.0 us, 90%: 0.90 | 100.0 us, 90%: 1.30 |" in lines
    assert "| all | 0.90 (0.90) | 1.30 (1.30) |" in lines
    models = [line.split()[1] for line in lines if " w13: " in line]
    assert models == ["Mixtral-8x7B", "Qwen3-30B-A3B", "gpt-oss-120b", "Qwen3-30B-A3B"], (
        "the same order in every report; the last is zipf's"
    )
    assert any(
        line.startswith("* 128 experts and more, 512 to 4096 tokens: 1.30 (1.30) over 4 cells; geomean >= 1.25: yes") for line in lines
    )
    assert "| 8 | 4.0 / 8.0 us: 9.0 |" in lines and "| 8 | 100.0 us, 90%: 1.60 / 1.10 |" in lines
    assert "Where a peer is faster: 12 of 23 comparisons:" in lines
    assert not any("stage" in line for line in lines), "nothing is said of what was not measured"


def test_stages():
    results = made_up()
    half = stage_rows("gpt-oss-120b", 64)[:3]  # a run that was cut short
    results["rows"] += stage_rows("qwen3-30b-a3b", 8) + stage_rows("qwen3-30b-a3b", 8, "stages_zipf") + half
    text = report_moe.section(results)
    line = "| Qwen3-30B-A3B | 8 | 6.0 (6%) | 2.0 (2%) | 60.0 (60%) | 30.0 (30%) | 2.0 (2%) | 100.0 | 90.0 |"
    assert text.count(line) == 2 and "`stages_zipf`, zipf routing" in text and "| gpt-oss-120b | 64 |" not in text
    assert "| `stages` |" not in text, "no peer is compared"
    assert "Where a peer is faster: 12 of 23 comparisons:" in text


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    results = made_up()
    report_moe.plot(results, tmp_path / "without.png")
    results["rows"] += stage_rows("qwen3-30b-a3b", 8)
    report_moe.plot(results, tmp_path / "with.png")
    sizes = [(tmp_path / name).stat().st_size for name in ("without.png", "with.png")]
    assert 10_000 < sizes[0] < sizes[1]
    with pytest.raises(ValueError, match="no grouped rows against a peer"):
        report_moe.plot(results | {"rows": stage_rows("qwen3-30b-a3b", 8)}, tmp_path / "x.png")
