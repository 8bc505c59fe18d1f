"""bench.suites.scaled_gemm without a GPU: its problems, and what its rows say of them."""

import argparse
import math

import pytest
import torch
from minfer.measure import benchmarking, random_problems

from bench.suites import scaled_gemm as suites

FP8 = torch.float8_e4m3fn


def arguments(*words):
    parser = argparse.ArgumentParser()
    suites.add_arguments(parser)
    return parser.parse_args(words)


def test_suites_have_what_they_are_named_after():
    """The headline products, layers of models at many and few tokens, every mode of scales; no problem twice."""
    for suite in suites.SUITES:
        if suite in suites.RANDOM:
            continue
        cells = suites.cells_of(suite)
        assert len(set(cells)) == len(cells)
        kind, _, size = suite.partition("_")
        assert {mode for _, mode in cells} == ({"block", "row", "tensor"} if kind == "fp8" else {"row"})
        assert {p.dtype for p, _ in cells} == {FP8 if kind == "fp8" else torch.int8}
        assert all(p.block_scaled == (mode == "block") for p, mode in cells)
        ms = {p.m for p, _ in cells}
        assert ms == {"large": {1024, 4096, 8192}, "middle": {64, 128, 256, 512}, "small": {1, 4, 16, 32, 64}}[size]
    large = {(p.m, p.n, p.k) for p, mode in suites.cells_of("fp8_large") if mode == "block"}
    assert set(suites.HEADLINES) < large
    assert all(n * k >= 50e6 or (n, k) == (4096, 4096) for n, k in suites.SMALL)
    with pytest.raises(ValueError, match="--suite must be of"):
        suites.counts_of(arguments("--suite", "fp8_huge"))
    assert suites.counts_of(arguments("--suite", "fp8_random,int8_small", "--limit", "7")) == {"fp8_random": 7, "int8_small": 7}


def test_random_problems():
    problems = [suites.cell_of(1, "fp8_random", i) for i in range(200)]
    assert problems == [random_problems.scaled(1, i, FP8) for i in reversed(range(200))][::-1]  # a part is drawn without the rest
    assert sum(a != random_problems.scaled(2, i, FP8) for i, a in enumerate(problems)) > 195
    for i, (p, mode) in enumerate(problems):
        assert mode == ("block", "row", "tensor")[i % 3]
        assert 1 <= p.m <= 8192 and all(256 <= x <= 32768 and x % 64 == 0 for x in (p.n, p.k))
        assert p.flops <= random_problems.MOST_FLOPS
    assert abs(math.log(benchmarking.geomean(p.m for p, _ in problems)) - math.log(8192) / 2) < 0.8
    assert any(p.n % 128 for p, _ in problems) and any(p.k % 128 for p, _ in problems)
    assert all(mode == "row" and p.dtype == torch.int8 for p, mode in (suites.cell_of(1, "int8_random", i) for i in range(9)))


def test_rows_say_what_was_measured():
    assert suites.describe(1, "fp8_large", 0) == {
        "op": "gemm_fp8", "shape": {"m": 4096, "n": 7168, "k": 16384, "scales": "block"}, "dtype": "e4m3",
    }  # fmt: skip
    assert suites.describe(1, "int8_small", 0)["op"] == "gemm_int8"


def test_dry_run(capsys):
    assert suites.main(arguments("--suite", "fp8_small,fp8_random", "--modes", "block", "--dry-run", "--part", "1/2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(
        suites.cell_of(1, suite, i)[1] == "block" for suite, n in (("fp8_small", 60), ("fp8_random", 200)) for i in range(0, n, 2)
    )
    assert all("block scales" in line for line in lines)
