"""The regret of grouped GEMM's and attention's plans: the problems, their operands and values on the CPU, and rows of made-up times."""

from __future__ import annotations

import argparse
import collections
import hashlib
import json

import minfer
import pytest
import torch
from minfer.checks import grouped_scaled_gemm as checks
from minfer.measure import random_problems
from minfer.measure.random_problems import AttentionProblem, GroupedProblem

from bench import harness
from bench.report import __main__ as report, regret as report_regret
from bench.suites import drawn, regret, regret_attention, regret_contest, regret_grouped
from bench.suites.regret_contest import Choice, Contest

FACTS = dict(device="NVIDIA H200", driver="1", torch="2", cuda="13", commit="abc", date="2000-01-01", protocol="p")


# ---- the problems ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generator", [random_problems.grouped, random_problems.grouped_scaled, random_problems.attention])
def test_problems_are_their_seeds(generator):
    some = [generator(1, i) for i in range(60)]
    assert [generator(1, i) for i in reversed(range(60))][::-1] == some
    assert len(set(some)) == 60
    assert sum(a != generator(2, i) for i, a in enumerate(some)) == 60


def test_grouped_problems():
    problems = [random_problems.grouped(1, i) for i in range(900)]
    for p in problems:
        multiple = 64 if p.weights == "dense" else 128
        assert 4 <= p.experts <= 256 and 1 <= p.top_k <= min(8, p.experts) and 1 <= p.tokens <= 16384
        assert all(256 <= x <= 16384 and x % multiple == 0 for x in (p.n, p.k))
        assert p.experts * p.expert_bytes <= 8e9 and 2 * p.rows * max(p.k, p.columns) <= 2e9 and p.flops <= 1.5e12
    assert collections.Counter(p.routing for p in problems) == dict.fromkeys(random_problems.ROUTINGS, 300)
    assert collections.Counter((p.routing, p.weights) for p in problems if p.weights == "int4") == {
        (routing, "int4"): 100 for routing in random_problems.ROUTINGS
    }
    for name in ("gathered", "gated"):
        assert 380 < sum(getattr(p, name) for p in problems) < 520
    assert sum(p.tokens > 1024 for p in problems) > 150 and sum(p.tokens < 16 for p in problems) > 150


def test_grouped_problems_stay_what_they_were():
    """Published results are of these problems."""
    assert str(random_problems.grouped(1000, 0)) == "2057 tokens to 3 of 251 experts, 1216 x 5376 bf16 dense, uniform, gathered, gated"
    text = "".join(f"{random_problems.grouped(seed, i)}\n" for seed in (1, 1000, 2000) for i in range(300))
    assert hashlib.md5(text.encode()).hexdigest() == "7cd831374c886a7526b903589105a4a1"


def test_grouped_problems_of_8_bits():
    problems = [random_problems.grouped_scaled(1, i) for i in range(900)]
    for p in problems:
        assert 4 <= p.experts <= 256 and 1 <= p.top_k <= min(8, p.experts) and 1 <= p.tokens <= 16384
        assert all(256 <= x <= 16384 and x % 64 == 0 for x in (p.n, p.k)) and p.weights == "dense"
        assert p.experts * p.expert_bytes <= 4e9 and p.rows * max(p.k, 2 * p.columns) <= 2e9 and p.flops <= 1.5e12
        assert (p.op, p.family) == ("grouped_gemm_int8" if p.dtype == torch.int8 else "grouped_gemm_fp8", "moe_scaled")
        assert p.a_group in (0, 128) or not (p.gated or p.gathered)
    kinds = [(p.dtype_name, p.a_group > 0) for p in problems]
    assert collections.Counter(kinds) == {("e4m3", True): 600, ("e4m3", False): 150, ("s8", False): 150}
    assert set(collections.Counter(zip((p.routing for p in problems), kinds, strict=True)).values()) == {200, 50}
    ungated = collections.Counter(p.a_group for p in problems if p.a_group and not p.gated)
    assert sum(ungated.values()) > 250 and 0.25 < (ungated[64] + ungated[32]) / sum(ungated.values()) < 0.42 and min(ungated.values()) > 30
    assert 380 < sum(p.gated for p in problems) < 520 and 300 < sum(p.gathered for p in problems) < 480


def test_attention_problems():
    problems = [random_problems.attention(1, i) for i in range(800)]
    for p in problems:
        assert 1 <= p.seqlen_q <= p.seqlen_k <= 65536 and p.heads_q % p.heads_kv == 0 and 1 <= p.heads_q // p.heads_kv <= 8
        assert p.flops <= 1.5e12 and 2 * p.query_bytes + p.kv_bytes <= 3e9
        assert p.kv_format in (None, "16bit") or p.page_size % 64 == 0
    assert collections.Counter(p.head_dim for p in problems) == {64: 200, 128: 400, 256: 200}
    assert sum(p.kv_format is not None for p in problems) == 400
    assert {p.kv_format for p in problems} == {None, "16bit", "fp8_e4m3", "int8", "int4"}
    assert {p.page_size for p in problems} == {0, 16, 64, 256}
    assert 150 < sum(not p.causal for p in problems) < 250 and 90 < sum(p.window_left >= 0 for p in problems) < 180
    assert 100 < sum(p.seqlen_q == p.seqlen_k > 64 for p in problems)
    rows = [p.seqlen_q * p.heads_q // p.heads_kv for p in problems if p.kv_format]
    assert sum(x <= 32 for x in rows) > 50 and sum(x > 512 for x in rows) > 50  # split-KV alone, and mostly prefill


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 3, 40])
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (5, 19), (1, 50)])
def test_pairs(causal, window, lengths):
    q, k = lengths
    query, key = torch.arange(q)[:, None] + k - q, torch.arange(k)[None]
    seen = torch.ones(q, k, dtype=torch.bool)
    if causal:
        seen &= key <= query
    if window >= 0:
        seen &= key >= query - window
    problem = AttentionProblem(3, q, k, 4, 2, 64, causal, window)
    assert problem.pairs == seen.sum()
    assert problem.flops == 4 * 3 * 4 * 64 * problem.pairs


# ---- plans ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(27))
def test_choices_of_grouped_problems(index):
    problem = random_problems.grouped(3, index)
    own, choices = regret_grouped.choices_of(problem)
    assert own.override in [choice.override for choice in choices]
    assert len({choice.override for choice in choices}) == len(choices)
    assert sum(choice.launch == regret_grouped.GATHER_FIRST for choice in choices) == (len(choices) // 2 if problem.gathered else 0)
    # The plan may give up some of the speed with rows that are spread evenly, for that with other routings.
    assert own.predicted_us <= 1.5 * min(choice.predicted_us for choice in choices)


@pytest.mark.parametrize("index", range(54))
def test_choices_of_grouped_problems_of_8_bits(index):
    """Every kernel of the operands' type, but for those that have no such small groups; the plan's choice is one of them."""
    problem = random_problems.grouped_scaled(3, index)
    own, choices = regret_grouped.choices_of(problem)
    overrides = [choice.override for choice in choices]
    assert own.override in overrides
    kernels = [k for k in minfer.kernels("moe_scaled") if k["ab_type"] == problem.dtype_name and k["arch"] == 90]
    legal = [k["name"] for k in kernels if problem.a_group == 0 or k["group_multiple"] <= problem.a_group]
    ways = ("", f"@{regret_grouped.GATHER_FIRST}") if problem.gathered else ("",)
    assert overrides == [name + way for name in legal for way in ways]
    assert (len(legal) < len(kernels)) == (0 < problem.a_group < max(k["group_multiple"] for k in kernels))


@pytest.mark.parametrize("index", range(32))
def test_choices_of_attention_problems(index):
    problem = random_problems.attention(3, index)
    own, choices = regret_attention.choices_of(problem)
    names = [choice.kernel for choice in choices]
    assert (own.kernel in names) != bool(own.launch)  # divided tiles are the plan's alone
    assert any("decode" in name for name in names) == (problem.kv_format is not None)
    # The plan is the choice that is predicted to be the fastest. Over pages it reckons with fewer keys, too.
    least = min(choice.predicted_us for choice in choices)
    assert own.predicted_us <= 1.5 * least if problem.page_size else own.predicted_us == least or (own.launch and own.predicted_us < least)


# ---- operands and values --------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_sets(monkeypatch):
    """Without a GPU: three sets of operands, and times that are made up; every contestant runs on every set."""
    monkeypatch.setattr(harness, "sets_for", lambda bytes_per_set: 3)
    times = {}

    def brief_times(contestants, sets, **options):
        for fn in contestants.values():
            for i in range(sets):
                fn(i)
        times.update({name: 10.0 + i for i, name in enumerate(reversed(contestants))})
        return dict(times), {}

    monkeypatch.setattr(harness, "brief_times", brief_times)


GROUPED = [
    GroupedProblem(5, 2, 9, 128, 256, routing, gathered, gated, weights)
    for routing in random_problems.ROUTINGS
    for gathered, gated in ((False, True), (True, False))
    for weights in (("dense", "int4") if routing == "zipf" else ("dense",))
]


@pytest.mark.usefixtures("three_sets")
@pytest.mark.parametrize("problem", GROUPED, ids=str)
@pytest.mark.parametrize("share", [1e-4, 4.2e-5])  # with room for all sets of weights, and for one or two
def test_grouped_measurements(problem, share):
    memory = regret_grouped.Memory("cpu", share)
    rows, line, measured = regret_grouped.measure("regret_grouped", problem, 1, 0, lambda: memory)
    assert len(rows) == 1 and "FAILED" not in line
    row, found = rows[0], json.loads(measured)
    choices = (6 if problem.weights == "dense" else 11) * (2 if problem.gathered else 1)
    assert row["candidates"] == len(found["plans"]) == choices
    assert row["us"] == found["own"] == 10.0 + choices and row["peer_us"] == 10.0 and row["regret"] == pytest.approx(choices / 10)
    assert row["op"] == problem.op and row["difference"] == 0.0
    assert row["shape"]["active"] == found["active"] == (2 if problem.routing == "one_hot" else found["active"])
    assert found["pick"][0] == row["kernel"] and found["routing"] == problem.routing and found["dtype"] == "bf16"


FP8 = torch.float8_e4m3fn
SCALED = [
    GroupedProblem(5, 2, 9, 192, 320, routing, gathered, gated, "dense", dtype, a_group)
    for routing, gathered, gated, dtype, a_group in (
        ("uniform", True, True, FP8, 128), ("zipf", False, True, FP8, 128), ("one_hot", True, False, FP8, 128),
        ("zipf", False, False, FP8, 64), ("uniform", False, False, FP8, 32), ("uniform", True, True, FP8, 0),
        ("zipf", False, False, FP8, 0), ("one_hot", True, True, torch.int8, 0), ("zipf", False, False, torch.int8, 0),
    )
]  # fmt: skip


@pytest.mark.usefixtures("three_sets")
@pytest.mark.parametrize("problem", SCALED, ids=str)
@pytest.mark.parametrize("share", [3e-4, 1.0e-4])  # with room for all sets of weights, and for one
def test_grouped_measurements_of_8_bits(problem, share):
    memory = regret_grouped.Memory("cpu", share)
    rows, line, measured = regret_grouped.measure("regret_grouped_scaled", problem, 1, 0, lambda: memory)
    assert len(rows) == 1 and "FAILED" not in line and str(problem) in line
    row, found = rows[0], json.loads(measured)
    choices = len(regret_grouped.choices_of(problem)[1])
    assert row["candidates"] == len(found["plans"]) == choices >= 4
    assert row["us"] == found["own"] == 10.0 + choices and row["peer_us"] == 10.0 and row["difference"] == 0.0
    assert row["op"] == found["op"] == problem.op and row["suite"] == "regret_grouped_scaled"
    assert row["shape"]["a_group"] == found["a_group"] == problem.a_group and row["dtype"] == found["dtype"] == problem.dtype_name
    assert (found["weights"], found["routing"], found["gated"]) == ("dense", problem.routing, problem.gated)


@pytest.mark.usefixtures("three_sets")
@pytest.mark.parametrize("problem", SCALED, ids=str)
def test_operands_of_8_bits(problem):
    """Scales are what the operators understand them to be, in the strides of those that write them, and no code is NaN."""
    operands = regret_grouped.Operands(problem, regret_grouped.Memory("cpu", 3e-4), "1/0")
    (b, b_scale), a_scale = operands.weights[0], operands.row_scales[0]
    assert b.shape == (5, 320, 192) and b.stride(1) == 1 and b.dtype == operands.rows[0].dtype == problem.dtype
    assert checks.group_of_scale(a_scale, [problem.a_rows], problem.k) == (problem.a_group or None)
    kind = checks.kind_of_scale(b_scale, 5, 192, 320, problem.gated, problem.dtype == FP8)
    assert kind == ("block" if problem.a_group else "column")
    assert b_scale[0].numel() * 4 + 192 * 320 == problem.expert_bytes
    if problem.a_group:
        assert a_scale.stride(0 if problem.a_group == 128 else 1) == 1
    if problem.a_group == 128:
        assert a_scale.stride(1) % 4 == 0
    out = operands.run(0, None)
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all() and out.float().std() > 0.1
    assert torch.isfinite(b.float()).all()


def test_weights_that_are_read_again_have_other_experts(monkeypatch):
    monkeypatch.setattr(harness, "sets_for", lambda bytes_per_set: 4)
    problem = GroupedProblem(8, 2, 6, 128, 256, "one_hot", True)
    operands = regret_grouped.Operands(problem, regret_grouped.Memory("cpu", 8 * 128 * 256 * 2 / regret_grouped.DENSE_BYTES * 2.5), "1/0")
    assert (len(operands.weights), len(operands.routings), operands.active, operands.largest) == (2, 2, 2, 6)
    assert operands.routings[0].offsets.tolist() == [6, 12, 12, 12, 12, 12, 12, 12]
    assert operands.routings[1].offsets.tolist() == [0, 0, 0, 0, 6, 12, 12, 12]
    whole = [operands.run(i, None).clone() for i in range(4)]
    assert all(torch.isfinite(out).all() for out in whole)
    assert not torch.equal(whole[0], whole[2])


ATTENTION = [
    AttentionProblem(2, 5, 70, 4, 2, 64),
    AttentionProblem(2, 5, 5, 4, 1, 128, False, 2, dtype=torch.float16),
    AttentionProblem(2, 5, 71, 4, 2, 64, True, -1, "16bit"),
    AttentionProblem(3, 1, 71, 4, 2, 64, True, 20, "16bit", 16),
    AttentionProblem(3, 4, 130, 4, 2, 64, True, -1, "fp8_e4m3", 64),
    AttentionProblem(3, 4, 130, 4, 2, 64, False, -1, "int8", 64),
    AttentionProblem(3, 4, 130, 4, 2, 128, True, -1, "int4", 64, torch.float16),
]


@pytest.mark.usefixtures("three_sets")
@pytest.mark.parametrize("problem", ATTENTION, ids=str)
def test_attention_measurements(problem):
    memory = regret_attention.Memory("cpu", 2e-4)
    rows, line, measured = regret_attention.measure("regret_attention", problem, 1, 0, lambda: memory)
    assert len(rows) == 1 and "FAILED" not in line
    row, found = rows[0], json.loads(measured)
    assert row["candidates"] == len(found["plans"]) >= 2
    assert row["us"] == found["own"] and row["peer_us"] == 10.0 and row["difference"] == 0.0
    assert (found["kv_format"], found["page_size"], found["causal"]) == (problem.kv_format, problem.page_size, problem.causal)
    assert {"m", "seqlen_k", "head_dim"} <= row["shape"].keys()


def test_sets_are_apart():
    operands = harness.windows(torch.arange(4096, dtype=torch.int32), (10, 20), 40)
    starts = [int(view[0, 0]) for view in operands]
    assert starts[:16] == list(range(0, 4096, 256)) and max(starts) + 200 <= 4096
    assert all(start % 64 == 0 for start in starts)
    with pytest.raises(MemoryError, match="no room"):
        harness.windows(torch.empty(100), (101,), 1)
    assert len(harness.windows(torch.empty(100), (100,), 3)) == 3


# ---- the contest ----------------------------------------------------------------------------------------------------------------


def choices(*names):
    return [Choice(name, 10.0, 5.0) for name in names]


def contest(values, monkeypatch, times):
    """``values``: name -> output, or an error; None is the own choice."""
    memory = torch.empty(4)

    def run(i, kernel):
        value = values[kernel]
        if isinstance(value, Exception):
            raise value
        return memory if value is None else memory.copy_(value)

    monkeypatch.setattr(harness, "brief_times", lambda fns, sets, **options: ({name: times[name] for name in fns}, {}))
    return regret_contest.hold(run, lambda: memory.fill_(float("nan")), choices(*(name for name in values if name)), 1)


def test_wrong_kernels_are_noticed(monkeypatch):
    right = torch.tensor([1.0, 2.0, 3.0, 4.0])
    values = {None: right, "a": right * 1.001, "wrong": right.flip(0), "silent": None, "broken": RuntimeError("no")}
    found = contest(values, monkeypatch, {"": 12.0, "a": 10.0})
    assert (found.own_us, found.us) == (12.0, {"a": 10.0})
    assert found.difference == pytest.approx(1e-3, rel=1e-3)
    assert set(found.failed) == {"wrong", "silent", "broken"}  # one of them wrote nothing
    assert found.failed["broken"] == "RuntimeError: no" and "differs from the own choice by inf" in found.failed["silent"]
    rows = regret_contest.rows_of("s", {"op": "o", "shape": {"m": 1}, "dtype": "bf16"}, Choice("own", 11.0, 6.0, "x=1"), found)
    assert [row.get("error", "")[:15] for row in rows[1:]] == ["ArithmeticError", "ArithmeticError", "RuntimeError: n"]
    assert (rows[0]["regret"], rows[0]["ratio"], rows[0]["best"], rows[0]["fraction"]) == (0.2, 0.8333, "a", 0.5)
    line = regret_contest.line_of("s", "problem", rows[0], found)
    assert "s problem: 12.00 us, regret 20.0% of 1 [own@x=1], best 10.00 us [a]; FAILED wrong: ArithmeticError" in line
    assert regret_contest.measurements_of(choices("a", "wrong"), found) == [["a", "", 10.0, 10.0]]


def test_an_own_choice_that_is_not_finite_is_an_error(monkeypatch):
    with pytest.raises(ArithmeticError, match="not finite"):
        contest({None: None}, monkeypatch, {})


def test_the_own_choice_may_be_the_best():
    rows = regret_contest.rows_of("s", {}, Choice("own", 11.0, 6.0), Contest(9.0, {"own": 9.1, "b": 10.0}))
    assert (rows[0]["regret"], rows[0]["best"], rows[0]["peer_us"]) == (0.0, "own", 9.0)


def test_differences():
    x = torch.randn(1000)
    assert regret_contest.difference(x, x, chunk=64) == 0.0
    assert regret_contest.difference(x * 1.01, x, chunk=64) == pytest.approx(0.01, rel=1e-4)
    x[3] = float("nan")
    assert regret_contest.difference(x, torch.ones(1000)) == float("inf")


# ---- the suite ------------------------------------------------------------------------------------------------------------------


def arguments(*words):
    parser = argparse.ArgumentParser()
    regret.add_arguments(parser)
    return parser.parse_args(words)


def test_the_arguments_choose_the_problems(capsys):
    args = arguments("--suite", "regret_grouped,regret_attention", "--limit", "4", "--part", "2/2", "--seed", "7", "--dry-run")
    assert regret.main(args) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"regret_grouped {i} {random_problems.grouped(7, i)}" for i in (1, 3)),
        *(f"regret_attention {i} {random_problems.attention(7, i)}" for i in (1, 3)),
    ]
    assert regret.main(arguments("--suite", "regret_grouped_scaled", "--limit", "2", "--dry-run")) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"regret_grouped_scaled {i} {random_problems.grouped_scaled(1000, i)}" for i in range(2)
    ]


@pytest.mark.usefixtures("three_sets")
def test_a_run(tmp_path, monkeypatch):
    """As on a GPU, but for the problems, the memory and the times: one problem fails, the others have rows and measurements."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr("minfer.measure.benchmarking.run_facts", lambda: dict(FACTS))
    monkeypatch.setenv("MINFER_TUNED", "1")
    kept_grouped, kept_attention = regret_grouped.Memory("cpu", 1.5e-4), regret_attention.Memory("cpu", 2e-4)
    for family, kept in ((regret_grouped, kept_grouped), (regret_attention, kept_attention)):
        monkeypatch.setattr(family.measure, "__defaults__", (lambda kept=kept: kept,))
    too_large = GroupedProblem(5, 2, 9, 128, 1 << 20)
    monkeypatch.setitem(regret.GENERATORS, "regret_grouped", lambda seed, index: (*GROUPED[2:4], too_large)[index])
    monkeypatch.setitem(regret.GENERATORS, "regret_grouped_scaled", lambda seed, index: SCALED[-3:][index])
    monkeypatch.setitem(regret.GENERATORS, "regret_attention", lambda seed, index: ATTENTION[index])
    out, measured = tmp_path / "regret.json", tmp_path / "folder" / "measured.jsonl"
    words = (
        "--suite",
        "regret_grouped,regret_grouped_scaled,regret_attention",
        "--limit",
        "3",
        "--out",
        str(out),
        "--measurements",
        str(measured),
    )
    assert regret.main(arguments(*words)) == 1
    found = json.loads(out.read_text())
    assert found["complete"] and [row["index"] for row in found["rows"]] == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert found["rows"][2]["error"].startswith("MemoryError") and found["rows"][2]["shape"]["k"] == 1 << 20
    assert [json.loads(line)["op"] for line in measured.read_text().splitlines()] == [
        "grouped_gemm", "grouped_w4a16_gemm", "grouped_gemm_fp8", "grouped_gemm_int8", "grouped_gemm_int8", "attention", "attention",
        "attention_paged",
    ]  # fmt: skip
    assert drawn.read_rows(out) == found["rows"]


# ---- the pages ------------------------------------------------------------------------------------------------------------------


def page_rows(suite, problem, regret_of_pick, launch=""):
    family = regret_attention if suite == "regret_attention" else regret_grouped
    own, choices = family.choices_of(problem)
    other = next(choice for choice in choices if choice.override != own.override)
    found = Contest(
        10.0 * (1 + regret_of_pick), {other.override: 10.0}, {"attention_x": "RuntimeError: a | b"} if regret_of_pick > 0.4 else {}
    )
    return regret_contest.rows_of(suite, family.describe(problem), own, found)


@pytest.fixture
def results(tmp_path):
    """Made-up times of 18 problems of each suite: regrets of 1 to 18 percent, and 50 percent once."""
    generators = {
        "regret_grouped": random_problems.grouped,
        "regret_grouped_scaled": random_problems.grouped_scaled,
        "regret_attention": random_problems.attention,
    }
    made = drawn.DrawnResults(tmp_path / "nvidia-h200" / "regret.json", FACTS, 1000, dict.fromkeys(generators, 18))
    for suite, generator in generators.items():
        for i in range(18):
            problem = generator(1000, i)
            if suite == "regret_attention" and len(regret_attention.choices_of(problem)[1]) < 2:
                problem = ATTENTION[0]
            made.add(suite, i, page_rows(suite, problem, 0.5 if (suite, i) == ("regret_attention", 17) else (i + 1) / 100))
    made.write()
    return report.read_results(tmp_path / "nvidia-h200")


def test_the_section_of_the_regret(results):
    text = report_regret.section(results["regret"])
    assert "`regret_grouped`: 18 problems, seed 1000" in text
    assert "| `regret_grouped` | 18 | 9.5% | 9.5% | 18.0% | 18.0% |" in text
    assert "| int4 weights | 6 |" in text and "| 16-bit weights | 12 |" in text
    assert text.index("| uniform routing | 6 |") < text.index("| Zipf routing | 6 |") < text.index("| all tokens to the same experts | 6 |")
    assert "| tensors |" in text and "| head_dim 64 |" in text and "| queries 1-16 |" in text and "| tokens 1-16 |" in text
    assert "| `regret_grouped_scaled` | 18 | 9.5% | 9.5% | 18.0% | 18.0% |" in text
    assert "| scales of rows | 6 |" in text and "| scales of 128 of k |" in text
    of_8_bits = random_problems.grouped_scaled(1000, 17)
    assert f"{of_8_bits.n} x {of_8_bits.k} scales of {of_8_bits.a_group or 'rows'}, one_hot" in text
    assert text.count("Grouped GEMM: the candidates") == 1
    worst = random_problems.grouped(1000, 17)
    assert f"| {worst.tokens} tokens to {worst.top_k} of {worst.experts} experts, {worst.n} x {worst.k} int4, one_hot" in text
    assert "| 50.0% |" in text and "RuntimeError: a / b" in text
    assert "layout" not in text
    assert "## Regret of the plan" in report.page(results, {})


def test_pages_without_these_suites(results):
    results["regret"]["rows"] = [row for row in results["regret"]["rows"] if row["suite"] == "regret_grouped"]
    text = report_regret.section(results["regret"])
    assert "Grouped GEMM: the candidates" in text and "Attention: the candidates" not in text
