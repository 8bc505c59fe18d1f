"""The report of products and layers of 8-bit operands: like is compared with like, and what lost or did not run is there."""

from minfer.measure import benchmarking
from minfer.measure.benchmarking import Timing

from bench.report import headlines, moe_scaled as report_moe_scaled, scaled_gemm as report_scaled_gemm
from bench.report.summary import shape_text

SUITES = {"fp8_small": {"seed": 1, "problems": 60, "done": 20, "complete": False}}
MODELS = {"qwen3-30b-a3b": (128, 8, 2048, 768), "deepseek-v3": (256, 8, 7168, 2048)}


def head(rows):
    facts = dict(device="NVIDIA H100", driver="1.2", torch="2.11", cuda="13.0", commit="abc", date="2000-01-01", protocol="p")
    return facts | {"suites": SUITES, "rows": rows}


def row(suite, shape, peer, ratio, us=10.0, dtype="e4m3", peer_rel_err=0.0016):
    found = benchmarking.result_row(
        suite=suite, op="gemm_fp8", kernel="x", shape=shape, dtype=dtype, timing=Timing.of([us]), peer=peer, peer_us=us * ratio,
        floor_us=0.8 * us, rel_err=0.0016,
    )  # fmt: skip
    return found | {"peer_variant": "a", "peer_rel_err": peer_rel_err}


def dense():
    """Not measurements. Our fast sums take 8 us where the promoted ones take 10; cuBLASLt's fast ones 9, vLLM's 7.2."""
    rows = []
    for m in (1, 300):
        by_row = {"m": m, "n": 4096, "k": 7168, "scales": "row"}
        rows += [row("fp8_small", by_row, "ours:fast", 0.8, peer_rel_err=0.0022)]
        rows += [row("fp8_small", by_row, "cublaslt", 1.2), row("fp8_small", by_row, "cublaslt_fast", 0.9, peer_rel_err=0.0023)]
        rows += [row("fp8_small", by_row, "vllm", 0.72)]
        by_block = {"m": m, "n": 4096, "k": 7168, "scales": "block"}
        rows += [row("fp8_small", by_block, "deepgemm", 0.95), row("fp8_small", by_block, "vllm", 1.5)]
    for m, why in ((1, "relative error 0.8, at most 0.0055"), (2, "relative error 0.7, at most 0.0055"), (3, "E: a | b when calling `x`")):
        shape = {"m": m, "n": 4096, "k": 7168, "scales": "block"}
        rows.append({"suite": "fp8_small", "op": "gemm_fp8", "shape": shape, "dtype": "e4m3", "peer": "vllm", "error": why})
    return head(rows)


def test_fast_sums_are_compared_with_fast_sums():
    rows = report_scaled_gemm.prepared(dense())["rows"]
    fast = {row["peer"]: row for row in rows if row["shape"].get("sums") == "fast" and row["shape"]["m"] == 1}
    assert {peer: (row["us"], row["ratio"], row["fraction"]) for peer, row in fast.items()} == {
        "cublaslt_fast": (8.0, 1.125, 1.0), "vllm": (8.0, 0.9, 1.0),
    }  # fmt: skip
    assert fast["vllm"]["rel_err"] == 0.0022 and "p10" not in fast["vllm"]
    promoted = {row["peer"] for row in rows if "sums" not in row["shape"] and row["shape"]["scales"] == "row"}
    assert promoted == {"ours:fast", "cublaslt"}
    assert all("sums" not in row["shape"] for row in rows if row["shape"]["scales"] == "block"), "vLLM's are promoted there"
    assert report_scaled_gemm.prepared(dense() | {"rows": dense()["rows"][1:4]})["rows"][1]["us"] == 10.0, "where ours was not measured"
    int8 = [row("int8_small", {"m": 1, "n": 8, "k": 8, "scales": "row"}, "vllm", 0.9, dtype="s8")]
    assert report_scaled_gemm.prepared(head(int8))["rows"] == int8, "all sums of int8 are exact"
    # A cell of the README's table for each kind of scales and sums.
    line = headlines.Headline("GEMM, FP8", "", "fp8", ("fp8_small",))
    cells = headlines.headline(rows, line)
    assert cells[3] == "6" and cells[5] == "4" and cells[6].startswith("0.90: 1 x 4096 x 7168 row-scaled, fast sums, vLLM")


def test_section():
    lines = report_scaled_gemm.section(report_scaled_gemm.prepared(dense())).splitlines()
    assert "20 of 60 problems so far, seed 1" in lines[0] and "fast_accum=True" in lines[0]
    assert "| `fp8_small`, row, fast sums | vLLM's kernels | 2 | **0.900** | 0.90 at 1 x 4096 x 7168 row-scaled, fast sums | 2 |" in lines
    assert "the best of them | 2 |" not in "".join(lines), "where it is always the same peer"
    assert "| `fp8_small`, row | cuBLASLt | 2 | **1.200** | 1.20 at 1 x 4096 x 7168 row-scaled | 0 |" in lines
    assert "| m | cuBLASLt (fast sums) | vLLM's kernels | the best of them | of the floor, median |" in lines
    assert "| 1-16 | 1.12 (1.12) | 0.90 (0.90) | 0.90 (0.90) | 100% |" in lines
    assert "| m | DeepGEMM | vLLM's kernels | the best of them | of the floor, median |" in lines
    assert "| 257-1024 | 0.95 (0.95) | 1.50 (1.50) | 0.95 (0.95) | 80% |" in lines
    assert "Where a peer is faster: 4 of 10 comparisons:" in lines, "a form of ours is no peer"
    assert "| `fp8_small` | vLLM's kernels | 2 | 1 x 4096 x 7168 block-scaled | relative error 0.8, at most 0.0055 |" in lines
    assert "| `fp8_small` | vLLM's kernels | 1 | 3 x 4096 x 7168 block-scaled | E: a / b |" in lines
    int8 = [row("int8_small", {"m": 1, "n": 8, "k": 8, "scales": "row"}, "vllm", 0.9, dtype="s8")]
    text = report_scaled_gemm.section(report_scaled_gemm.prepared(head(int8)))
    assert "promoted" not in text and "Layers, scales of rows and columns, by m" in text


def layer(suite, model, tokens, peer, ratio, us=100.0):
    experts, top_k, hidden, inter = MODELS[model]
    shape = dict(model=model, m=tokens, n=inter, k=hidden, experts=experts, top_k=top_k, active=8)
    return row(suite, shape, peer, ratio, us=us)


def product(suite, experts, m, peer, ratio, us=50.0):
    form = {"layout": "masked", "max_rows": 128} if suite.endswith("masked") else {"layout": "contiguous"}
    return row(suite, {"m": m, "n": 4096, "k": 7168, "experts": experts} | form, peer, ratio, us=us)


def experts():
    """Not measurements; in another order than that of the tables."""
    rows = [layer("fp8_layer", model, m, peer, ratio) for model in reversed(MODELS) for m in (64, 1)
            for peer, ratio in (("vllm_triton", 1.3), ("ours:16bit", 1.6))]  # fmt: skip
    rows += [layer("fp8_layer", "deepseek-v3", 64, "vllm_deepgemm", 0.9)]
    rows += [product("fp8_masked", 8, m, peer, ratio) for m in (1, 16) for peer, ratio in (("deepgemm", 1.1), ("ours:16bit", 1.9))]
    rows += [product("fp8_contiguous", 4, 8192, "deepgemm", 0.97, us=2000.0)]
    shape = {"m": 16, "n": 4096, "k": 7168, "experts": 8, "layout": "masked", "max_rows": 128}
    rows += [{"suite": "int8_masked", "op": "x", "shape": shape, "dtype": "s8", "peer": "", "error": "RuntimeError: no kernel"}]
    return head(rows)


def test_section_of_experts():
    text = report_moe_scaled.section(experts())
    lines = text.splitlines()
    order = [text.index(f"`{suite}`: ") for suite in ("fp8_masked", "fp8_contiguous", "fp8_layer")]
    assert order == sorted(order)
    assert "| experts x rows | n x k | time | of the floor | TFLOP/s | own, 16-bit weights | DeepGEMM |" in lines
    assert "| 8 x 16 | 4096 x 7168 | 50.0 us | 80% | 150 | 1.90 | 1.10 |" in lines
    assert "| 4 x 8192 | 4096 x 7168 | 2000 us | 80% | 962 | 0.97 |" in lines
    assert "| tokens | Qwen3-30B-A3B, 128 experts | DeepSeek-V3, 256 experts |" in lines
    assert "how many times as fast as own, 16-bit weights / vLLM with DeepGEMM / vLLM Triton." in text
    assert "| 1 | 100.0 us, 80%: 1.60 / - / 1.30 | 100.0 us, 80%: 1.60 / - / 1.30 |" in lines
    assert "| 64 | 100.0 us, 80%: 1.60 / - / 1.30 | 100.0 us, 80%: 1.60 / 0.90 / 1.30 |" in lines
    assert "| `fp8_layer` | the best of them | 4 |" in text and "| `fp8_masked` | the best of them |" not in text
    assert "| `fp8_contiguous` | 4 experts x 8192, 4096 x 7168 | e4m3 | 2000.00 | DeepGEMM 1940.00 | 0.97 |" in lines
    assert "| `int8_masked` | 8 experts x 16, 4096 x 7168, masked | s8 | all | RuntimeError: no kernel |" in lines
    assert shape_text(layer("fp8_layer", "deepseek-v3", 64, "x", 1.0)) == "m = 64, deepseek-v3"
