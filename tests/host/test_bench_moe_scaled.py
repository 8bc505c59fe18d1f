"""bench.suites.moe_scaled without a GPU: its cells, what is compared with what, and whole runs of small cells on the CPU."""

import argparse
import contextlib
import re
import sys
import types

import pytest
import torch
from minfer.measure.benchmarking import Timing, relative_error
from minfer.reference import grouped_scaled_gemm as reference

from bench import harness
from bench.peers import moe_scaled as peers
from bench.suites import moe_scaled as suites, moe_scaled_cells as cells
from bench.suites.moe_scaled_cells import FP8, Grouped, Layer

TINY = {"tiny": (8, 2, 256, 128)}  # experts, top_k, hidden, inter


def arguments(*words):
    parser = argparse.ArgumentParser()
    suites.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Two sets of everything, and made-up times: every contestant runs on every set once, and takes as long as its name has letters."""

    def measure(fns, sets, **_):
        for fn in fns.values():
            for i in range(sets):
                fn(i)
        return {name: Timing.of([float(len(name))]) for name in fns}, {}

    monkeypatch.setattr(harness, "sets_for", lambda *_, **__: 2)
    monkeypatch.setattr(harness, "measure", measure)
    monkeypatch.setattr(harness, "forget_error", lambda: None)
    monkeypatch.setattr(peers, "device_of_runs", lambda: "cpu")
    for module in (peers, cells):
        monkeypatch.setitem(module.MODELS, "tiny", TINY["tiny"])
    torch.manual_seed(0)


# ---- the cells -------------------------------------------------------------------------------------------------------------------


def test_suites_have_what_they_are_named_after():
    for suite in suites.SUITES:
        kind, _, what = suite.partition("_")
        found = cells.cells_of(suite)
        assert len(set(found)) == len(found) and {cell.dtype for cell in found} == {FP8 if kind == "fp8" else torch.int8}
        assert all(isinstance(cell, Layer) == (what == "layer") for cell in found)
        for cell in found:
            if what == "layer":
                continue
            assert cell.masked == (what == "masked") and cell.n % 128 == cell.k % 128 == 0
            assert cell.max_rows >= cell.m if cell.masked else cell.m % 128 == 0, "DeepGEMM wants multiples of 128 rows"
    masked = {(cell.experts, cell.m) for cell in cells.cells_of("fp8_masked")}
    assert masked == {(8, 16), (16, 16), (8, 1), (8, 64), (16, 128)}
    layers = cells.cells_of("fp8_layer")
    changes = sum(a.model != b.model for a, b in zip(layers, layers[1:], strict=False))
    assert changes + 1 == len(cells.LAYERS), "weights are made once"
    with pytest.raises(ValueError, match="--suite must be of"):
        suites.counts_of(arguments("--suite", "fp8_dense"))


def test_what_is_chosen(capsys):
    chosen = suites.choice_of(arguments("--models", "deepseek-v3", "--tokens", "1,4096"))
    found = [cell for i, cell in enumerate(cells.cells_of("int8_layer")) if chosen("int8_layer", i)]
    assert [(cell.model, cell.tokens) for cell in found] == [("deepseek-v3", 1), ("deepseek-v3", 4096)]
    assert all(chosen("fp8_masked", i) for i in range(len(cells.cells_of("fp8_masked")))), "products are of no model"
    for option, value in (("--models", "x"), ("--tokens", "3")):
        with pytest.raises(ValueError, match=f"{option} must be of .*, got '{value}'"):
            suites.choice_of(arguments(option, value))
    assert suites.main(arguments("--suite", "fp8_masked,fp8_layer", "--tokens", "16", "--dry-run", "--part", "1/2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "fp8_masked 0 8 experts x 16, 4096 x 7168", "fp8_masked 2 8 experts x 1, 4096 x 7168", "fp8_masked 4 16 experts x 128, 4096 x 7168",
        "fp8_layer 2 qwen3-30b-a3b, 16 tokens",
    ]  # fmt: skip


def test_rows_say_what_was_measured():
    assert cells.describe(cells.cells_of("fp8_masked")[0]) == {
        "op": "grouped_gemm_fp8_masked", "dtype": "e4m3",
        "shape": {"m": 16, "n": 4096, "k": 7168, "experts": 8, "layout": "masked", "max_rows": 128},
    }  # fmt: skip
    assert cells.describe(cells.cells_of("int8_layer")[0]) == {
        "op": "moe_ffn_int8", "dtype": "s8",
        "shape": {"model": "qwen3-30b-a3b", "m": 1, "n": 768, "k": 2048, "experts": 128, "top_k": 8},
    }  # fmt: skip


# ---- operands --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_quantised_weights(dtype):
    """Codes times scales are the weight to a rounding of the codes, and what the 16-bit operator gets is the codes' values."""
    w = torch.randn(3, 256, 384)
    codes, scale, values = peers.quantised_weight(w, dtype)
    assert codes.dtype == dtype and scale.shape == ((3, 2, 3) if dtype == FP8 else (3, 256))
    assert relative_error(values, w) < (0.04 if dtype == FP8 else 0.01)
    assert codes.float().abs().max() == peers.LARGEST_CODE[dtype]
    assert relative_error(peers.in_bf16(codes, scale), values) < 2.0**-8
    rows = (5, 384) if dtype == FP8 else (5,)
    of_rows = torch.rand(5, 3) + 1 if dtype == FP8 else torch.rand(rows) + 1
    whole = codes[0, :5].float() * (of_rows.repeat_interleave(128, 1) if dtype == FP8 else of_rows[:, None])
    assert relative_error(peers.in_bf16(codes[0, :5], of_rows, part=800), whole) < 2.0**-8, "two rows at a time"


def test_scales_lie_column_by_column():
    scale = torch.rand(2, 6, 3)
    moved = peers.column_by_column(scale)
    assert torch.equal(moved, scale) and moved.stride() == (24, 1, 8), "each column at a multiple of 16 bytes"


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("max_rows", [0, 80])
def test_truth(dtype, max_rows):
    """The checked rows are those of the whole product, and rows behind a count are none of them."""
    cell = Grouped(3, 70, 128, 256, dtype, max_rows)
    o = peers.GroupedOperands.draw(cell)
    rows, truth = o.checked(), o.truth()
    assert len(rows) == 3 * peers.CHECKED_ROWS and rows.unique().numel() == len(rows)
    behind = rows % (max_rows or 70)
    assert int(behind.max()) == 69
    arguments_ = (o.a[0].double(), o.w[0].mT, o.a_scale.double(), o.w_scale.double())
    if max_rows:
        whole = reference.grouped_gemm_fp8_masked(*arguments_, o.counts, out_dtype=torch.float64)
    else:
        whole = reference.grouped_gemm_fp8(*arguments_, o.offsets, out_dtype=torch.float64)
    assert relative_error(truth, whole.view(-1, 128)[rows]) < 1e-14


# ---- whole runs --------------------------------------------------------------------------------------------------------------------


def fake_deep_gemm():
    """DeepGEMM by our reference: what it is given must be what it documents."""

    def scales(a, w):
        (a, a_scale), (w, w_scale) = a, w
        rows = a.shape[-2]
        assert a_scale.stride(-2) == 1 and a_scale.stride(-1) == -(-rows // 4) * 4, "else a kernel of its own moves them"
        assert a_scale.shape == (*a.shape[:-1], a.shape[-1] // 128) and w_scale.is_contiguous()
        assert w_scale.shape == (w.shape[0], w.shape[1] // 128, w.shape[2] // 128)
        return a, w.mT, a_scale, w_scale

    def masked(a, w, d, counts, expected, disable_ue8m0_cast):
        assert counts.dtype == torch.int32 and expected == int(counts.max()) and disable_ue8m0_cast
        found = reference.grouped_gemm_fp8_masked(*scales(a, w), counts)
        for own, of_expert, count in zip(d, found, counts.tolist(), strict=True):
            own[:count] = of_expert[:count]

    def contiguous(a, w, d, indices, disable_ue8m0_cast):
        assert indices.dtype == torch.int32 and len(indices) == len(d) and disable_ue8m0_cast
        offsets = torch.bincount(indices.long(), minlength=len(w[0])).cumsum(0).to(torch.int32)
        d.copy_(reference.grouped_gemm_fp8(*scales(a, w), offsets))

    return types.SimpleNamespace(
        m_grouped_fp8_gemm_nt_masked=masked, m_grouped_fp8_gemm_nt_contiguous=contiguous, set_pdl=lambda on: None,
        get_mk_alignment_for_contiguous_layout=lambda: 4,
    )  # fmt: skip


def fake_vllm(monkeypatch, wrong=False):
    """vLLM's fused_experts by our reference."""

    def fused_experts_impl(x, w13, w2, weights, ids, *, w1_scale, w2_scale, block_shape=None, **form):
        fp8 = form == {"use_fp8_w8a8": True}
        assert fp8 == (block_shape == [128, 128]) and (fp8 or form == {"use_int8_w8a8": True, "per_channel_quant": True})
        name = "moe_ffn_fp8" if fp8 else "moe_ffn_int8"
        scales = (w1_scale, w2_scale) if fp8 else (w1_scale.squeeze(-1), w2_scale.squeeze(-1))
        return getattr(reference, name)(x, w13, w2, *scales, weights, ids) * (2.0 if wrong else 1.0)

    package, kernels = types.SimpleNamespace(_config=None), types.SimpleNamespace(fused_experts_impl=fused_experts_impl)

    @contextlib.contextmanager
    def override_config(tiles):
        package._config = tiles
        yield
        package._config = None

    package.override_config = override_config
    monkeypatch.setattr(peers, "_fused_experts", lambda: (package, kernels))
    monkeypatch.setattr(peers, "_table_of_h200", lambda *_: {"BLOCK_SIZE_M": 16})


def run_of(*words):
    return suites.Run(arguments(*words))


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("max_rows", [0, 32])
def test_a_grouped_cell(monkeypatch, dtype, max_rows):
    monkeypatch.setitem(sys.modules, "peer_ops", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_deep_gemm())
    rows, line = run_of().cell("a_suite", Grouped(3, 20, 256, 384, dtype, max_rows))
    assert {row["peer"] for row in rows} == {"ours:16bit", "deepgemm" if dtype == FP8 else "int_mm"}
    for row in rows:
        assert row["suite"] == "a_suite" and row["us"] == len("ours/default")
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["us"], 1e-3)
        assert row["rel_err"] < 0.006 and row["peer_rel_err"] < 0.01 and 0 < row["floor_us"] and row["shape"]["experts"] == 3
    (peer,) = (row for row in rows if row["peer"] != "ours:16bit")
    assert peer["peer_variant"] == ("nt" if dtype == FP8 else "sums"), "the faster of its variants"
    assert "3 experts x 20, 256 x 384" in line and "ours:16bit" in line


def test_few_rows_are_not_for_every_peer(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peer_ops", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_deep_gemm())
    run = run_of()
    assert [row["peer"] for row in run.cell("s", Grouped(2, 16, 128, 128, torch.int8, 32))[0]] == ["ours:16bit"]
    assert [row["peer"] for row in run.cell("s", Grouped(2, 6, 128, 256, FP8))[0]] == ["ours:16bit"]
    said = capsys.readouterr().out
    assert "int_mm is left out of grouped_gemm_int8_masked: _int_mm takes more than 16 rows, not 16" in said
    assert "deepgemm is left out of grouped_gemm_fp8: its layout wants multiples of 4 rows, not 6" in said


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_a_layer(monkeypatch, dtype):
    fake_vllm(monkeypatch)
    run = run_of("--peers", "ours:16bit,vllm_triton")
    rows, _ = run.cell("a_suite", Layer("tiny", 5, dtype))
    assert [row["peer"] for row in rows] == ["ours:16bit", "vllm_triton"]
    weights = run.weights
    for row in rows:
        assert row["shape"]["active"] <= 8 and row["shape"]["model"] == "tiny" and row["kernel"] == ""
        # The reference quantises as ours does; 16-bit activations are much nearer to the truth.
        assert 0.001 < row["rel_err"] < 0.06 and row["peer_rel_err"] < (0.01 if row["peer"] == "ours:16bit" else 0.06)
    run.cell("a_suite", Layer("tiny", 3, dtype))
    assert run.weights is weights, "made once for all cells of a model"
    run.cell("a_suite", Grouped(2, 4, 128, 128, dtype))
    assert run.weights is None, "and not kept beside other cells"


def test_wrong_values_are_no_times(monkeypatch):
    fake_vllm(monkeypatch, wrong=True)
    rows, line = run_of("--peers", "vllm_triton").cell("s", Layer("tiny", 4, FP8))
    assert [row["peer"] for row in rows] == ["vllm_triton"] and "ratio" not in rows[0]
    assert re.match(r"relative error \d\S*, at most 0\.0\d+$", rows[0]["error"])
    assert "vllm_triton failed" in line
    monkeypatch.setattr(peers, "ours", lambda o: peers.Variant("default", lambda i: o.x[i] * 0, into_d=False))
    with pytest.raises(ArithmeticError, match="ours/default: relative error 1, at most"):
        run_of("--peers", "").cell("s", Layer("tiny", 4, FP8))


def test_fewer_experts():
    rows, _ = run_of("--peers", "ours:16bit", "--experts", "4").cell("s", Layer("tiny", 4, FP8))
    assert rows[0]["shape"]["experts"] == 4


def test_sets_of_a_layer_read_other_experts():
    o = peers.LayerOperands.draw(Layer("tiny", 1, FP8), peers.LayerWeights("tiny", FP8))
    assert o.sets == 2 and o.active == 2
    assert ((o.ids[1] - o.ids[0]) % 8 == 4).all(), "half of the experts further on"


def test_floors():
    rates = {"read_bandwidth": 1000.0, "matrix_rate": 1e6}
    cell = Grouped(8, 16, 4096, 7168, FP8, 128)
    assert peers.grouped_floor_us(cell, rates) == pytest.approx(8 * (4096 * 7168 + 16 * (7168 + 2 * 4096)) / 1000)
    large = Grouped(4, 8192, 4096, 7168, FP8)
    assert peers.grouped_floor_us(large, {"read_bandwidth": 1e6, "matrix_rate": 1e6}) == pytest.approx(2 * 4 * 8192 * 4096 * 7168 / 2e6)
    o = peers.LayerOperands.draw(Layer("tiny", 3, FP8), peers.LayerWeights("tiny", FP8))
    bytes_ = o.active * 3 * 128 * 256 + 2 * 2 * 3 * 256 + 2 * 3 * 2 * 128
    assert peers.layer_floor_us(o, rates) == pytest.approx(bytes_ / 1000)
