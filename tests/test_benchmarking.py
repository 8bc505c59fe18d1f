"""Timing, errors, results files, and the tuner on one small problem."""

import json
import math

import pytest
import torch
from minfer import benchmarking, tune, tuned
from minfer.benchmarking import Timing
from minfer.planning import Problem


def test_relative_error():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert benchmarking.relative_error(truth.float(), truth) == 0
    assert benchmarking.relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert benchmarking.relative_error(torch.tensor([3.0, math.nan]), truth) == math.inf
    assert benchmarking.relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert benchmarking.relative_error(torch.ones(4), torch.zeros(4)) == 2
    assert benchmarking.rounding_unit(torch.float16) == 2**-11
    assert benchmarking.rounding_unit(torch.bfloat16) == 2**-8


def test_rotation_size():
    l2 = 60 << 20
    operands = {"a": torch.empty(512, 512).half(), "rest": [torch.empty(512, 512).half(), None], "number": 3}
    size = benchmarking.bytes_of(operands)
    assert size == 2 * 512 * 512 * 2
    copies = benchmarking.copies_to_flush(size, l2)
    assert (copies - 1) * size >= 3 * l2, "between two uses of a set, more than three times the L2 is touched"
    assert benchmarking.copies_to_flush(1 << 30, l2) == 2
    assert benchmarking.copies_to_flush(16, l2, most=100) == 100


def test_timing():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (timing.us, timing.p10, timing.p90) == (6.0, 2.0, 10.0)
    assert benchmarking.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(benchmarking.geomean([]))


def row(suite, m, peer="cublas", peer_us=12.0):
    return benchmarking.result_row(
        suite=suite,
        op="gemm",
        kernel="gemm_x",
        shape={"m": m, "n": 8, "k": 8},
        dtype="fp16",
        timing=Timing.of([10.0]),
        peer=peer,
        peer_us=peer_us,
        floor_us=7.5,
        rel_err=3.14159e-4,
    )


def test_results_file(tmp_path):
    path = tmp_path / "nvidia-h200" / "gemm.json"
    facts = benchmarking.run_facts()
    assert list(facts) == ["device", "driver", "torch", "cuda", "commit", "date", "protocol"]
    benchmarking.write_results(path, [row("square", 1), row("llm", 1)], facts)
    benchmarking.write_results(path, [row("square", 2), row("square", 2, "cublaslt_best", 9.0)], facts | {"date": "2000-01-01"})
    content = json.loads(path.read_text())
    assert content["date"] == "2000-01-01" and content["device"] == facts["device"]
    assert [(r["suite"], r["shape"]["m"], r["peer"]) for r in content["rows"]] == [
        ("llm", 1, "cublas"),
        ("square", 2, "cublas"),
        ("square", 2, "cublaslt_best"),
    ]
    first = content["rows"][1]
    assert list(first) == [
        "suite", "op", "kernel", "shape", "dtype", "us", "p10", "p90", "peer", "peer_us", "ratio", "floor_us", "fraction", "rel_err",
    ]  # fmt: skip
    assert (first["ratio"], first["fraction"], first["rel_err"]) == (1.2, 0.75, 3.142e-4)
    assert path.read_text().count("\n") == 7 + len(content["rows"]) + 4, "one row a line"


def test_tuner_operands():
    for layout in ("tn", "tt", "nn", "nt"):
        for batch in (1, 3):
            problem = Problem(8, 16, 24, batch, layout=layout, c=True)
            x = tune.make_operands(problem, "cpu")
            assert x["a"].shape[-2:] == (8, 24) and x["b"].shape[-2:] == (24, 16)
            assert x["a"].stride(-1 if problem.a_major == "k" else -2) == 1
            assert x["b"].stride(-2 if problem.b_major == "k" else -1) == 1
            error, most = tune.check_result(problem, None, x)
            assert error <= most
    gated = Problem(8, 32, 24, gated=True)
    error, most = tune.check_result(gated, None, tune.make_operands(gated, "cpu"))
    assert error <= most


@pytest.mark.gpu
def test_graph_timer():
    """Long work takes longer than short work, and every set of operands is launched equally often."""
    sets = [torch.zeros(1, device="cuda") for _ in range(5)]

    def bump(x):
        x.add_(1)

    timer = benchmarking.GraphTimer(bump, sets, launches=12)
    assert timer.launches == 15
    timer.replay_us()
    torch.cuda.synchronize()
    assert [x.item() for x in sets] == [4.0, 3.0, 3.0, 3.0, 3.0]  # three rounds, and one call before the capture
    square = [torch.randn(2048, 2048, device="cuda").half() for _ in range(2)]
    short, long = benchmarking.compare([lambda x: x[:256] @ x, lambda x: x @ x], square, rounds=5)
    assert 0 < short.p10 <= short.us <= short.p90 < long.us


@pytest.mark.gpu
def test_tune_one_problem(tmp_path):
    out, dump = tmp_path / "table.csv", tmp_path / "dump.json"
    problems = [Problem(16, 512, 1024), Problem(130, 256, 512, dtype=torch.float16, c=True), Problem(8, 512, 256, gated=True)]
    effort = tune.Effort(top=6, refine=1, finalists=3, screen_us=50.0, final_us=100.0, rounds=3)
    found = tune.tune(problems, out=out, effort=effort, dump=dump, with_torch=True)
    rows = tuned.parse_rows(out.read_text())
    assert {(r.m, r.n, r.k, r.has_c, r.gated) for r in rows} == {(16, 512, 1024, 0, 0), (130, 256, 512, 1, 0), (8, 512, 256, 0, 1)}
    for tuning in found:
        assert tuning.regret >= 1.0 and not tuning.rejected
        assert tuning.best.final.us <= tuning.analytic.final.us
    content = json.loads(dump.read_text())
    assert [p["m"] for p in content["problems"]] == [16, 130, 8]
    assert content["problems"][0]["torch_us"] > 0 and len(content["problems"][0]["measurements"]) >= 3
    assert tune.tune(problems, out=out, effort=effort, skip_known=True) == []
    assert tune.regret_summary(found)["problems"] == 3
