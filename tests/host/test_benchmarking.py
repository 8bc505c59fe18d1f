"""Timing, errors, results files, and the tuner on one small problem."""

import json
import math

import minfer
import pytest
import torch
from minfer.measure import benchmarking, workloads
from minfer.measure.benchmarking import Timing
from minfer.planning import plan as planning, tune, tuned
from minfer.planning.plan import Problem, ScaledProblem, W4Problem


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
    weight = minfer.quantize.quantize_w4(torch.randn(64, 128).half())
    assert benchmarking.bytes_of({"weight": weight}) == 64 * 128 // 2 + 64 * 2, "a dataclass of tensors"
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
    facts = benchmarking.run_facts() | {"commit": "abc"}
    assert list(facts) == ["device", "driver", "torch", "cuda", "commit", "date", "protocol"]
    benchmarking.write_results(path, [row("square", 1), row("llm", 1)], facts)
    benchmarking.write_results(path, [row("square", 2), row("square", 2, "cublaslt_best", 9.0)], facts | {"date": "2000-01-01"})
    content = json.loads(path.read_text())
    assert not any("commit" in r for r in content["rows"]), "the head's"
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

    benchmarking.write_results(path, [row("square", 3)], facts | {"commit": "def"})
    content = json.loads(path.read_text())
    assert content["commit"] == "def" and [(r["suite"], r["shape"]["m"], r.get("commit")) for r in content["rows"]] == [
        ("llm", 1, "abc"),
        ("square", 2, "abc"),
        ("square", 3, None),
    ]
    benchmarking.write_results(path, [row("odd", 1)], facts)
    assert [r.get("commit") for r in json.loads(path.read_text())["rows"]] == [None, None, "def", None]


def test_results_without_peers(tmp_path):
    """Rows that compare nothing have no peer; those of their suite are replaced."""
    path, facts = tmp_path / "bits.json", benchmarking.run_facts() | {"commit": "abc"}
    benchmarking.write_results(path, [{"suite": "bits", "wrong": 1}, row("square", 1)], facts)
    benchmarking.write_results(path, [{"suite": "bits", "wrong": 0}], facts)
    assert [(r["suite"], r.get("wrong")) for r in json.loads(path.read_text())["rows"]] == [("square", None), ("bits", 0)]


def test_tuner_operands():
    for layout in ("tn", "tt", "nn", "nt"):
        for batch in (1, 3):
            problem = Problem(8, 16, 24, batch, layout=layout, c=True)
            work = workloads.workload(problem, "cpu")
            x = work.operands()
            assert x["a"].shape[-2:] == (8, 24) and x["b"].shape[-2:] == (24, 16)
            assert x["a"].stride(-1 if problem.a_major == "k" else -2) == 1
            assert x["b"].stride(-2 if problem.b_major == "k" else -1) == 1
            error, most = work.check(None, x)
            assert error <= most
    work = workloads.workload(Problem(8, 32, 24, gated=True), "cpu")
    error, most = work.check(None, work.operands())
    assert error <= most


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("zeros", [False, True])
def test_tuner_operands_of_4_bit_weights(group_size, zeros, monkeypatch):
    for options in ({}, {"c": True}, {"gated": True}):
        problem = W4Problem(5, 144, 264, group_size=group_size, zeros=zeros, **options)
        work = workloads.workload(problem, "cpu")
        x = work.operands()
        assert x["qweight"].shape == (3, 5, 512) and x["scales"].shape == ({32: 9, 128: 3, -1: 1}[group_size], 144)
        assert (x["zeros"] is None) != zeros and (x["c"] is None) != problem.c
        error, most = work.check(None, x)
        assert error <= most
        out = work.launcher()(x)
        assert 0.3 < out.float().std() < 3, "results have deviation about 1"
        wrong = work.launcher()(x | {"scales": x["scales"] * 1.02}).clone()
        monkeypatch.setattr(work, "launcher", lambda kernel, wrong=wrong: lambda _: wrong)
        error, most = work.check(None, x)
        assert error > most, "scales that are 2 % off are seen"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("options", [{}, {"c": True}, {"gated": True}, {"block_scaled": True}, {"block_scaled": True, "gated": True}])
def test_tuner_operands_of_8_bits(dtype, options, monkeypatch):
    if dtype == torch.int8 and "block_scaled" in options:
        with pytest.raises(ValueError, match="block_scaled must be False"):
            ScaledProblem(5, 288, 264, dtype=dtype, **options)
        return
    work = workloads.workload(ScaledProblem(5, 288, 264, dtype=dtype, **options), "cpu")
    x = work.operands()
    assert x["d"].shape == (5, 144 if work.problem.gated else 288) and work.torch_contestant([x]) is None
    error, most = work.check(None, x)
    assert error <= most
    wrong = work.launcher()(x | {"b_scale": x["b_scale"] * 1.02}).clone()
    monkeypatch.setattr(work, "launcher", lambda kernel: lambda _: wrong)
    error, most = work.check(None, x)
    assert error > most, "scales that are 2 % off are seen"


def test_cublas_beside_the_tuner(monkeypatch):
    """The 16-bit contestant multiplies the weight that the codes stand for, over sets of its own."""
    monkeypatch.setattr(benchmarking, "rotation", lambda make: [make(), make()])
    for c in (False, True):
        work = workloads.workload(W4Problem(5, 144, 264, zeros=True, c=c), "cpu")
        sets = [work.operands(), work.operands()]
        expected = work.launcher()(sets[0]).clone()
        fn, dense = work.torch_contestant(sets)
        assert len(dense) == 2 and dense[0]["w"].data_ptr() != dense[1]["w"].data_ptr()
        for x in dense:
            assert benchmarking.relative_error(fn(x), expected) < 0.01
    gated = workloads.workload(W4Problem(5, 144, 264, gated=True), "cpu")
    assert gated.torch_contestant([gated.operands()]) is None
    work = workloads.workload(Problem(5, 16, 24, c=True), "cpu")
    sets = [work.operands()]
    fn, same = work.torch_contestant(sets)
    assert same is sets and benchmarking.relative_error(fn(sets[0]).clone(), work.launcher()(sets[0])) < 0.01


class FakeTimer:
    """A timer of the search's own estimates; the operator is called once, with the kernel that it would time."""

    def __init__(self, fn, sets, *, estimate_us, target_us):
        fn(sets[0])
        self.estimate_us = estimate_us

    def replay_us(self):
        return self.estimate_us


@pytest.mark.parametrize(
    "problem",
    [
        Problem(16, 512, 1024),
        Problem(8, 512, 256, gated=True),
        W4Problem(16, 512, 1024),
        W4Problem(8, 512, 256, dtype=torch.float16, group_size=32, zeros=True, gated=True),
        W4Problem(24, 512, 256, group_size=-1, c=True),
    ],
    ids=str,
)
def test_search(tmp_path, monkeypatch, problem):
    """The search and its files, with made-up times: the model's order is then the right one."""
    monkeypatch.setattr(tune, "GraphTimer", FakeTimer)
    monkeypatch.setattr(benchmarking, "rotation", lambda make: [make()])
    monkeypatch.setattr(tune, "workload", lambda problem: workloads.workload(problem, "cpu"))
    monkeypatch.setattr(tune, "enumerate_plans", lambda problem: planning.enumerate_plans(problem, device=-1))
    monkeypatch.setattr(tune, "plan_problem", lambda problem, **options: planning.plan_problem(problem, device=-1, **options))
    out, dump = tmp_path / "table.csv", tmp_path / "dump.json"
    effort = tune.Effort(top=5, refine=2, finalists=3, rounds=3)
    (found,) = tune.tune([problem], out=out, effort=effort, dump=dump, with_torch=True)
    assert not found.rejected and found.regret == pytest.approx(1.0)
    assert found.best.plan.override == planning.plan_problem(problem, use_tuned=False, device=-1).override
    (row,) = tuned.parse_rows(out.read_text())
    assert row == found.row() and (row.op, row.kernel) == (problem.op, found.best.plan.kernel)
    (fields,) = json.loads(dump.read_text())["problems"]
    assert (fields["op"], fields["b_format"], fields["group_size"]) == (problem.op, problem.b_format, problem.group_size)
    assert len(fields["measurements"]) >= 3 and (fields["torch_us"] is None) == problem.gated
    assert tune.tune([problem], out=out, effort=effort, skip_known=True) == []
    try:  # the row that was found is the one that planning takes
        tuned.load_rows(out.read_text())
        taken = planning.plan_problem(problem, device=-1)
        assert (taken.source, taken.override) == ("tuned", found.best.plan.override)
    finally:
        tuned.load_rows("")


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
    problems += [W4Problem(16, 512, 1024), W4Problem(8, 512, 256, group_size=32, zeros=True, gated=True)]
    effort = tune.Effort(top=6, refine=1, finalists=3, screen_us=50.0, final_us=100.0, rounds=3)
    found = tune.tune(problems, out=out, effort=effort, dump=dump, with_torch=True)
    rows = tuned.parse_rows(out.read_text())
    assert {(r.op, r.m, r.n, r.k, r.group_size, r.has_c, r.gated) for r in rows} == {
        ("gemm", 16, 512, 1024, 0, 0, 0),
        ("gemm", 130, 256, 512, 0, 1, 0),
        ("gemm", 8, 512, 256, 0, 0, 1),
        ("w4a16_gemm", 16, 512, 1024, 128, 0, 0),
        ("w4a16_gemm", 8, 512, 256, 32, 0, 1),
    }
    for tuning in found:
        assert tuning.regret >= 1.0 and not tuning.rejected
        assert tuning.best.final.us <= tuning.analytic.final.us
    content = json.loads(dump.read_text())
    assert [p["m"] for p in content["problems"]] == [16, 130, 8, 16, 8]
    assert content["problems"][3]["torch_us"] > 0 and content["problems"][4]["torch_us"] is None
    assert content["problems"][0]["torch_us"] > 0 and len(content["problems"][0]["measurements"]) >= 3
    assert tune.tune(problems, out=out, effort=effort, skip_known=True) == []
    assert tune.regret_summary(found)["problems"] == 5
