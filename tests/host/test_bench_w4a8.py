"""bench.suites.w4a8 and its report without a GPU: its problems, what its rows say of them, the tables."""

import argparse

import pytest
import torch
from minfer.measure import benchmarking, random_problems
from minfer.measure.benchmarking import Timing

from bench.report import w4a8 as report_w4a8
from bench.suites import w4a8 as suites


def arguments(*words):
    parser = argparse.ArgumentParser()
    suites.add_arguments(parser)
    return parser.parse_args(words)


def test_problems():
    cells = suites.cells_of("w4a8_fp8")
    assert len(set(cells)) == len(cells) and {p.m for p in cells} == set(suites.MS)
    assert all(p.group_size == 128 and p.dtype == torch.float8_e4m3fn for p in cells)
    drawn = [suites.cell_of(1, "w4a8_int8_random", i) for i in range(30)]
    assert drawn == [random_problems.w4a8(1, i, torch.int8) for i in range(30)]
    assert drawn != [random_problems.w4a8(2, i, torch.int8) for i in range(30)]
    assert all(16 <= p.m <= 8192 and p.n % 128 == 0 and p.k % 128 == 0 for p in drawn)
    assert suites.counts_of(arguments("--suite", "w4a8_fp8_random", "--limit", "7")) == {"w4a8_fp8_random": 7}
    with pytest.raises(ValueError, match="--suite must be of"):
        suites.counts_of(arguments("--suite", "w4a8"))


def test_rows_say_what_was_measured():
    described = suites.describe(1, "w4a8_int8", 0)
    assert described["op"] == "w4a8_gemm" and described["dtype"] == "s8" and described["shape"]["group"] == 128


def test_dry_run(capsys):
    assert suites.main(arguments("--suite", "w4a8_fp8_random", "--dry-run", "--part", "1/2")) == 0
    assert len(capsys.readouterr().out.splitlines()) == 30


def row(m, peer, ratio, dtype="e4m3"):
    return benchmarking.result_row(
        suite="w4a8_fp8", op="w4a8_gemm", kernel="x", shape={"m": m, "n": 4096, "k": 4096, "group": 128}, dtype=dtype,
        timing=Timing.of([10.0]), peer=peer, peer_us=10.0 * ratio, floor_us=8.0, rel_err=0.002,
    )  # fmt: skip


def test_section():
    rows = [row(256, "ours:w4a16", 0.9), row(4096, "ours:w4a16", 1.3), row(256, "vllm", 1.1), row(4096, "vllm", 0.95)]
    rows.append({"suite": "w4a8_fp8", **suites.describe(1, "w4a8_fp8", 0), "peer": "fbgemm", "error": "RuntimeError: no"})
    head = dict(device="NVIDIA H100", driver="1.2", torch="2.11", cuda="13.0", commit="abc", date="2000-01-01", protocol="p")
    facts = head | {"suites": {"w4a8_fp8": {"seed": 1, "problems": 72, "done": 2, "complete": False}}, "rows": rows}
    lines = report_w4a8.section(facts).splitlines()
    assert "| `w4a8_fp8` | own, 16-bit activations | 2 | **1.082** | 0.90 at 256 x 4096 x 4096 | 1 |" in lines
    assert any(line.startswith("| 17-256 ") or line.startswith("| 65-256 ") for line in lines)
    assert "Where a peer is faster: 1 of 2 comparisons:" in lines, "a form of ours is no peer"
    assert any("FBGEMM" in line and "RuntimeError: no" in line for line in lines)
