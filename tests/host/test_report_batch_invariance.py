"""The report of the batch-invariant mode: what differs and what was not measured is in it."""

from minfer.measure import benchmarking
from minfer.measure.benchmarking import Timing

from bench.report import batch_invariance as report

FACTS = dict(device="NVIDIA H100", driver="1.2", torch="2.11", cuda="13.0", commit="abc", date="2000-01-01", protocol="p")


def timed(suite, m, peer, ratio):
    return benchmarking.result_row(
        suite=suite, op="gemm", kernel="x", shape={"m": m, "n": 4096, "k": 4096}, dtype="bf16", timing=Timing.of([10.0]), peer=peer,
        peer_us=10.0 * ratio, floor_us=8.0, rel_err=0.001,
    )  # fmt: skip


def bits(operator, form, problems, wrong):
    shape = {"operator": operator, "format": form}
    return {"suite": "bits", "op": operator, "shape": shape, "problems": problems, "wrong_problems": wrong, "numbers": 1000 * problems}


def test_section():
    rows = [bits("gemm", "plain", 200, 0), bits("gemm", "codes", 200, 0), bits("moe_ffn", "16bit", 100, 3)]
    rows += [{"suite": "kernels", "op": "gemm", "shape": {"kernels": "gemm", "splits": 2}, "kernels": 47, "wrong": {"gemm_x": 5}}]
    rows += [timed("dense", 1, report.DEFAULT, 0.8), timed("dense", 64, report.DEFAULT, 1.25), timed("dense", 1, "cublas", 1.5)]
    rows += [{"suite": "arrivals", "op": "generate", "shape": {}, "requests": 10000, "wrong": 0}]
    rows += [{"suite": "fp8", "op": "fp8", "shape": {"cell": "1x2x3"}, "peer": "", "error": "a | b"}]
    text = report.section(FACTS | {"rows": rows})
    assert "| `gemm` | 2 | 400 | 400,000 | none |" in text
    assert "| `moe_ffn` | 1 | 100 | 100,000 | 16bit: 3 of 100 problems |" in text
    assert "| `gemm` | splits 2 | 47 | `gemm_x` |" in text
    assert "| `dense` | 2 | **0.0 %** | 25.0 % at 1 x 4096 x 4096 | 3 % (10 %) |" in text
    assert "| `dense` | cuBLAS | 1 | **1.500** | 1.50 at 1 x 4096 x 4096 | 0 |" in text
    assert "10000 requests that arrived at random, twice with different arrivals: tokens or logprobs of 0 differ." in text
    assert "| `fp8` | 1x2x3 | a \\| b |" in text


def test_what_there_is_not_is_left_out():
    assert "Bits" not in report.section(FACTS | {"rows": [timed("dense", 1, report.DEFAULT, 1.0)]})


def test_cells_of_attention():
    rows = [timed("decode_attention", 1, report.DEFAULT, ratio) for ratio in (0.5, 0.8)]
    for row, keys in zip(rows, (512, 8192), strict=True):
        row["shape"] = {"format": "int8", "batch": 8, "queries": 1, "keys": keys}
    assert "100.0 % at 8 x 1 queries on 512 keys, int8 cache" in report.section(FACTS | {"rows": rows})
