"""Suites of drawn problems: the generators, parts and their merging, and the pages that are made of their results."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math

import pytest
import torch
from minfer.measure import benchmarking, random_problems
from minfer.planning.calibrate import Candidate, Measured
from minfer.planning.plan import LAYOUTS, Problem, ScaledProblem, W4A8Problem, W4Problem, enumerate_plans

from bench.peers import cublaslt
from bench.report import (
    __main__ as report,
    random as report_random,
    regret as report_regret,
)
from bench.suites import drawn, random_suites, regret

FACTS = dict(device="NVIDIA H200", driver="1", torch="2", cuda="13", commit="abc", date="2000-01-01", protocol="p")


# ---- the generators -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generator", random_suites.GENERATORS.values())
def test_problems_are_their_seeds(generator):
    some = [generator(1, i) for i in range(40)]
    assert [generator(1, i) for i in reversed(range(40))][::-1] == some  # a part is drawn without the rest
    assert sum(a != b for a, b in zip(some, (generator(2, i) for i in range(40)), strict=True)) > 35
    assert len(set(some)) == 40


def log_mean(values):
    return math.log(benchmarking.geomean(values))


@pytest.mark.parametrize(("name", "low", "high", "multiple"), [("random", 256, 32768, 64), ("random_unaligned", 1, 8192, 1)])
def test_bounds_and_mix_of_dense_problems(name, low, high, multiple):
    problems = [random_suites.GENERATORS[name](1, i) for i in range(600)]
    for p in problems:
        assert 1 <= p.m <= 8192
        assert low <= p.n <= high and p.n % multiple == 0
        assert low <= p.k <= high and p.k % multiple == 0
        assert 2 * (p.m * p.k + p.n * p.k + p.m * p.n * (1 + p.c)) <= random_problems.MOST_BYTES
        assert p.flops <= random_problems.MOST_FLOPS
    assert collections.Counter(p.layout for p in problems) == dict.fromkeys(LAYOUTS, 150)
    assert 0.19 < sum(p.c for p in problems) / 600 < 0.31
    assert 0.19 < sum(p.dtype == torch.float16 for p in problems) / 600 < 0.31
    assert abs(log_mean(p.m for p in problems) - math.log(8192) / 2) < 0.6  # log-uniform, but for the problems that are too large
    bands = collections.Counter(report_random.band_of({"shape": {"m": p.m}}) for p in problems)
    assert all(bands[report_random.band_name(band)] > 40 for band in report_random.BANDS)
    assert len({p.m % 8 for p in problems}) == 8


def test_unaligned_problems_are_of_every_alignment():
    problems = [random_problems.unaligned(1, i) for i in range(150)]
    assert {p.n % 8 for p in problems} == {p.k % 8 for p in problems} == set(range(8))


def test_quantised_problems():
    problems = [random_problems.w4a16(1, i) for i in range(200)]
    assert all(p.n % 128 == 0 and p.k % 128 == 0 and 256 <= p.n <= 32768 and 256 <= p.k <= 32768 for p in problems)
    assert all(p.group_size == (128 if p.k > 128 else -1) for p in problems)
    assert 60 < sum(p.dtype == torch.float16 for p in problems) < 140


def test_calibration_problems_have_every_kind():
    drawn_problems = list(itertools.islice(random_problems.calibration(1), 112))
    assert drawn_problems == list(itertools.islice(random_problems.calibration(1), 112))
    of_8_bits = [p for p in drawn_problems if isinstance(p, ScaledProblem)]
    assert len(of_8_bits) == 24 and {p.dtype for p in of_8_bits} == {torch.float8_e4m3fn, torch.int8}
    assert any(p.block_scaled for p in of_8_bits) and any(p.fast_accum for p in of_8_bits) and any(p.gated for p in of_8_bits)
    quantised = [p for p in drawn_problems if isinstance(p, W4A8Problem)]
    assert len(quantised) == 8 and {p.dtype for p in quantised} == {torch.float8_e4m3fn, torch.int8} and any(p.gated for p in quantised)
    problems = [p for p in drawn_problems if isinstance(p, Problem)]
    formats = [p.w4_format for p in drawn_problems if isinstance(p, W4Problem)]
    assert len(formats) == 16 and formats.count("int4") == 10 and set(formats) == {"int4", "nf4", "mxfp4", "nvfp4"}
    assert sum(p.gated for p in problems) == sum(p.out_dtype == torch.float32 for p in problems) == 4
    assert {p.layout for p in problems if p.gated} == set(LAYOUTS)
    assert sum(p.k % 8 != 0 for p in problems) >= 4
    assert {p.layout for p in problems if p.n % 64 == 0 and p.k % 64 == 0} == set(LAYOUTS)


# ---- parts ----------------------------------------------------------------------------------------------------------------------------


def test_parts_are_all():
    assert sorted(i for n in range(1, 5) for i in drawn.part_of(f"{n}/4", 11)) == list(range(11))
    for text in ("0/4", "5/4", "2", "a/b", "1/", "-1/4"):
        with pytest.raises(ValueError, match="--part must be i/n"):
            drawn.part_of(text, 11)


def row(suite, index, ratio=1.1, peer="cublas", **changes):
    described = random_suites.describe(1, suite, index)
    return {
        "suite": suite, **described, "kernel": "gemm_x", "us": 10.0, "p10": 9.9, "p90": 10.1, "peer": peer, "peer_us": round(10 * ratio, 3),
        "ratio": ratio, "floor_us": 6.0, "fraction": 0.6, "rel_err": 1e-3, **changes,
    }  # fmt: skip


def arguments(**changes):
    return argparse.Namespace(**{"part": "1/1", "resume": False, "time_limit": 100.0, **changes})


def results_in(path, counts, seed=1, commit="abc"):
    return drawn.DrawnResults(path, FACTS | {"commit": commit}, seed, counts)


def run(path, counts, ratio=1.1, seed=1, commit="abc", **changes):
    """Runs without a GPU: problem 2 of each suite fails."""
    measured = []

    def measure(suite, index):
        measured.append((suite, index))
        if index == 2:
            raise ArithmeticError("relative error 2")
        return [row(suite, index, ratio), row(suite, index, ratio + 1, "cublaslt_best")], "line"

    describe = lambda suite, index: random_suites.describe(seed, suite, index)  # noqa: E731
    failed = drawn.run(results_in(path, counts, seed, commit), arguments(**changes), measure, describe)
    return measured, failed


@pytest.fixture
def no_synchronize(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("no_synchronize")
def test_parts_are_merged(tmp_path):
    path, counts = tmp_path / "random.json", {"random": 6, "random_unaligned": 3}
    measured, failed = run(path, counts, part="1/2")
    assert measured == [("random", 0), ("random", 2), ("random", 4), ("random_unaligned", 0), ("random_unaligned", 2)]
    assert failed == 1  # and the problems after it were measured
    found = json.loads(path.read_text())
    assert found["suites"]["random"] == {"seed": 1, "problems": 6, "done": 3, "complete": False}
    assert not found["complete"]
    run(path, counts, part="2/2", commit="def")
    found = json.loads(path.read_text())
    assert found["complete"]
    assert found["commit"] == "def"
    assert found["suites"]["random"] == {"seed": 1, "problems": 6, "done": 6, "complete": True}
    assert sorted((r["suite"], r["index"]) for r in found["rows"] if r["peer"] == "cublaslt_best") == [
        ("random", 0), ("random", 1), ("random", 3), ("random", 4), ("random", 5), ("random_unaligned", 0), ("random_unaligned", 1)
    ]  # fmt: skip
    errors = [r for r in found["rows"] if "error" in r]
    assert [(r["suite"], r["index"], r["error"]) for r in errors] == [
        ("random", 2, "ArithmeticError: relative error 2"),
        ("random_unaligned", 2, "ArithmeticError: relative error 2"),
    ]
    assert {r["index"] for r in found["rows"] if r.get("commit") == "abc"} == {0, 2, 4}
    assert all(r["seed"] == 1 for r in found["rows"])

    run(path, {"random": 6}, ratio=1.5, part="1/3")  # replaces problems 0 and 3
    again = json.loads(path.read_text())
    assert len(again["rows"]) == len(found["rows"])
    assert {r["index"]: r["ratio"] for r in again["rows"] if r["suite"] == "random" and r["peer"] == "cublas"} == {
        0: 1.5, 1: 1.1, 3: 1.5, 4: 1.1, 5: 1.1
    }  # fmt: skip
    assert again["complete"]
    run(path, {"random": 6}, seed=2, part="1/6")  # of another seed: the rows of the first are no part of it
    other = json.loads(path.read_text())
    assert [r["index"] for r in other["rows"] if r["suite"] == "random"] == [0, 0]
    assert not other["complete"]
    assert other["suites"]["random_unaligned"]["complete"]


@pytest.mark.usefixtures("no_synchronize")
def test_a_run_goes_on_where_it_ended(tmp_path):
    path, counts = tmp_path / "random.json", {"random": 6}
    measured, failed = run(path, counts, time_limit=-1.0)
    assert (measured, failed, path.exists()) == ([], 0, False)
    run(path, counts, part="1/3")
    measured, _ = run(path, counts, resume=True)
    assert measured == [("random", i) for i in (1, 2, 4, 5)]
    assert json.loads(path.read_text())["complete"]
    assert run(path, counts, resume=True)[0] == []


def test_a_lost_device_ends_the_run_and_keeps_the_rows(tmp_path, monkeypatch):
    def lost():
        raise RuntimeError("context")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    path = tmp_path / "random.json"
    with pytest.raises(RuntimeError, match="context"):
        run(path, {"random": 6})
    found = json.loads(path.read_text())
    assert [r["index"] for r in found["rows"]] == [0, 0, 1, 1, 2]
    assert found["rows"][-1]["error"] == "ArithmeticError: relative error 2"


def test_the_arguments_choose_the_problems(capsys):
    parser = argparse.ArgumentParser()
    random_suites.add_arguments(parser)
    assert random_suites.main(parser.parse_args(["--suite", "random", "--limit", "7", "--part", "2/3", "--seed", "5", "--dry-run"])) == 0
    assert capsys.readouterr().out.splitlines() == [f"random {i} {random_problems.aligned(5, i)}" for i in (1, 4)]
    with pytest.raises(ValueError, match="--suite must be of"):
        random_suites.main(parser.parse_args(["--suite", "square", "--dry-run"]))
    parser = argparse.ArgumentParser()
    regret.add_arguments(parser)
    args = parser.parse_args(["--suite", "regret_unaligned", "--limit", "2", "--dry-run"])
    assert regret.main(args) == 0
    assert capsys.readouterr().out.splitlines() == [f"regret_unaligned {i} {random_problems.unaligned(args.seed, i)}" for i in (0, 1)]


@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (5, 1), (1, 1), (5, 7)])
def test_leading_dimensions_that_cublaslt_takes(rows, columns):
    """A mode of one element has strides that say nothing of the other mode's extent."""
    row_major, column_major = torch.empty(rows, columns), torch.empty(columns, rows).t()
    leading, major = cublaslt._matrix(row_major, rows_first=True)
    assert leading >= (columns if major == 0 else rows)
    leading, major = cublaslt._matrix(column_major, rows_first=True)
    assert leading >= (columns if major == 0 else rows)
    assert cublaslt._matrix(torch.empty(5, 16)[:, :7], rows_first=True) == (16, 0)


# ---- the pages ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path):
    """Not measurements: ratios 0.9 and 1.2 by turns, and one problem that failed."""
    folder = tmp_path / "nvidia-h200"
    counts = {"random": 40, "random_unaligned": 8, "random_w4a16": 8}
    found = results_in(folder / "random.json", counts)
    for suite, count in counts.items():
        for i in range(count - (suite == "random_w4a16")):
            if (suite, i) == ("random", 3):
                found.add(suite, i, [{"suite": suite, **random_suites.describe(1, suite, i), "peer": "", "error": "RuntimeError: a | b"}])
            else:
                found.add(suite, i, [row(suite, i, 0.9 if i % 2 else 1.2), row(suite, i, 0.94, "cublaslt_best")])
    found.write()
    picked = drawn.DrawnResults(folder / "regret.json", FACTS, 1000, {"regret": 20})
    for i in range(20):
        problem = random_problems.aligned(1000, i)
        plans = enumerate_plans(problem, device=-1, limit=3)
        measured = Measured(problem, tuple(Candidate.of(p, 10.0 + j) for j, p in enumerate(plans)), 10.0 + 0.1 * i)
        picked.add("regret", i, [regret.row_of("regret", measured, plans[0].kernel, plans[0].launch, 5.0)])
    picked.write()
    return report.read_results(folder)


def test_rows_of_the_regret():
    problem = Problem(16, 4096, 4096)
    plans = enumerate_plans(problem, device=-1, limit=2)
    made = regret.row_of("regret", Measured(problem, (Candidate.of(plans[0], 12.0), Candidate.of(plans[1], 10.0)), 12.0), "k", "l", 6.0)
    assert (made["regret"], made["ratio"], made["us"], made["peer_us"]) == (0.2, 0.8333, 12.0, 10.0)
    assert made["best"] == plans[1].override
    made = regret.row_of("regret", Measured(problem, (Candidate.of(plans[1], 10.0),), 9.5), "k", "l", 6.0)  # no candidate is faster
    assert (made["regret"], made["ratio"], made["best"]) == (0.0, 1.0, "k@l")


def test_the_section_of_random_problems(results):
    text = report_random.section(results["random"])
    assert "`random`: 40 problems, seed 1" in text
    assert "`random_w4a16`: 7 of 8 problems so far, seed 1" in text
    geomean = benchmarking.geomean([1.2] * 20 + [0.9] * 19)
    assert f"| cuBLAS | 39 | **{geomean:.3f}** | 48.7% | 48.7% | 0.90 at" in text
    assert "| cuBLASLt best of 32 | 39 | **0.940** | 0.0% | 100.0% | 0.94 at" in text
    assert "| 1-16 |" in text
    assert "| from 1025 |" in text
    assert "| tn | 1.20 (1.20) | 0.94 (0.94) |" in text
    assert "| tt | 0.90 (0.90) | 0.94 (0.94) |" in text
    assert "| `random` | " + " x ".join(str(getattr(random_problems.aligned(1, 3), name)) for name in "mnk") in text
    assert "RuntimeError: a / b" in text


def test_the_section_of_the_regret(results):
    text = report_regret.section(results["regret"])
    assert "| `regret` | 20 | 9.5% | 9.5% | 18.0% | 19.0% |" in text
    assert "| layout nt | 5 | 11.0% | 11.0% | 19.0% | 19.0% |" in text
    assert "seed 1000" in text


def test_the_page_and_the_picture(results, tmp_path):
    page = report.page(results, {"random": "random.png"})
    assert "## Random problems" in page
    assert "## Regret of the plan" in page
    assert "random problems, all layouts, multiples of 64 | cuBLAS, cuBLASLt best of 32 | 39 |" in page
    pytest.importorskip("matplotlib")
    report_random.plot(results["random"], tmp_path / "random.png")
    assert (tmp_path / "random.png").read_bytes()[:4] == b"\x89PNG"
