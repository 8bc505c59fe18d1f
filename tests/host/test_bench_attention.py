"""The attention suites and their report: which cells a command has, what does not need a GPU to be measured, tables from made-up rows."""

import argparse

import minfer
import pytest
import torch
from minfer.formats.kv_cache import KV_FORMATS
from minfer.measure import benchmarking
from minfer.measure.benchmarking import Timing
from minfer.reference import kv_cache as reference_kv_cache

from bench.report import attention as report_attention
from bench.suites import (
    attention as attention_suites,
    attention_accuracy,
    attention_append,
    attention_chunks,
    attention_prefill,
)
from bench.suites.attention_common import AttentionResults, checked_error, decode_kernel


def arguments(*words):
    parser = argparse.ArgumentParser()
    attention_suites.add_arguments(parser)
    return parser.parse_args(words)


def cell_of(suite, **wanted):
    return next(cell for cell in attention_suites.cells(arguments("--suite", suite)) if wanted.items() <= cell.items())


def row(suite, model, m, peer, ratio, us=100.0, heads=(32, 32), dtype="bf16", **shape):
    shape = dict(model=model, batch=1, m=m, heads_q=heads[0], heads_kv=heads[1], head_dim=128, **shape)
    return benchmarking.result_row(
        suite=suite, op="attention", kernel="attention_x", shape=shape, dtype=dtype, timing=Timing.of([us]), peer=peer,
        peer_us=us * ratio, floor_us=us / 2, rel_err=1e-3,
    )  # fmt: skip


def test_cells():
    cells = attention_suites.cells(arguments())
    assert {cell["suite"] for cell in cells} == set(attention_suites.SUITES) == set(attention_suites.OF_SUITE)
    names = [AttentionResults.key(dict(suite=c["suite"], peer="x", dtype=c["dtype"], shape=c)) + (c.get("layouts"),) for c in cells]
    assert len(set(names)) == len(names), "rows of two cells would replace each other"
    varlen = [c["m"] for c in cells if c["model"] == "varlen" and c["dtype"] == "f16" and c["heads_kv"] == 8]
    assert varlen == [16384, 65536]
    assert {c["head_dim"] for c in attention_suites.cells(arguments("--head-dims", "64"))} <= {64, 128}
    assert {c["dtype"] for c in attention_suites.cells(arguments("--dtypes", "bf16"))} == {"bf16"}
    with pytest.raises(ValueError, match="--suite must be of"):
        attention_suites.cells(arguments("--suite", "speed"))


def test_chunks():
    """Drawn shapes, the same in each run; every format; queries are the last of the keys."""
    cells = attention_chunks.cells(["bf16"])
    assert cells == attention_chunks.cells(["bf16"]) and attention_chunks.cells(["f16"]) == []
    assert {cell["format"] for cell in cells} == set(KV_FORMATS) and len(cells) == sum(attention_chunks.COUNTS.values())
    low, high = attention_chunks.QUERIES
    assert all(low <= cell["queries"] <= high and cell["m"] >= cell["queries"] for cell in cells)
    assert attention_chunks.pairs(3, 5) == 3 + 4 + 5


def test_lengths_and_pairs():
    lengths = attention_prefill.lognormal_lengths(64, 16384)
    assert len(lengths) == 64 and sum(lengths) == 16384 and min(lengths) >= 1 and max(lengths) > 3 * 256
    assert attention_prefill.seen_by([3, 5], True, -1) == 6 + 15 and attention_prefill.seen_by([3, 5], False, -1) == 9 + 25
    assert attention_prefill.seen_by([5], True, 1) == 1 + 2 * 4


def test_values_are_checked():
    """Against float64; heads that are off by one are seen."""
    q, k, v = (torch.randn(16, heads, 32).bfloat16() for heads in (4, 2, 2))
    rows, options = torch.arange(16), dict(causal=True, window_left=5)
    out = minfer.attention(q[None], k[None], v[None], **options)[0][0]
    assert 0 < checked_error(out, q, k, v, rows, options) < 0.01
    with pytest.raises(ArithmeticError, match="relative error"):
        checked_error(out.roll(1, 1), q, k, v, rows, options)


def test_decode_kernel():
    for kv_format in KV_FORMATS:
        assert decode_kernel("bf16", 128, kv_format).startswith("attention_")


class Rows(list):
    def add(self, row):
        self.append(row)


CHUNKS = [f"chunk of {attention_accuracy.CHUNK}, {f}" for f in attention_accuracy.FORMATS]


@pytest.mark.parametrize("model", ["prefill, causal", *(f"decode, {f}" for f in KV_FORMATS), *CHUNKS])
def test_accuracy(model, monkeypatch):
    """Ours is not worse than twice torch's; on CPU it computes in float32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = Rows()
    cell = cell_of("accuracy", model=model, dtype="bf16", head_dim=64) | dict(m=256)
    text = attention_accuracy.measure(cell, None, rows, [])
    assert model in text and rows[0]["peer"] == "torch_sdpa" and 0 < rows[0]["rel_err"] < 2 * rows[0]["peer_err"]
    assert rows[0]["ratio"] == pytest.approx(rows[0]["peer_err"] / rows[0]["rel_err"], rel=1e-2)


def test_a_wrong_result_is_not_accurate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention_accuracy.minfer, "attention_paged", lambda q, *args, **options: (torch.zeros_like(q), None))
    with pytest.raises(ArithmeticError, match="relative error 1, at most"):
        attention_accuracy.measure(cell_of("accuracy", model="decode, int8", dtype="bf16", head_dim=64) | dict(m=128), None, Rows(), [])


def test_what_caches_cost():
    """8 bits less than 4; with outlier channels, scales of channels less than scales of tokens."""
    errors = {}
    for keys in attention_accuracy.KEYS:
        for kv_format in attention_accuracy.FORMATS:
            cell = cell_of("accuracy", format=kv_format, keys=keys, dtype="bf16") | dict(m=512)
            *_, errors[kv_format, keys], errors["int4 per token", keys] = attention_accuracy.cache_error(cell, "cpu")
    plain, outliers = attention_accuracy.KEYS
    for keys in attention_accuracy.KEYS:
        assert 0 < errors["int8", keys] < errors["fp8_e4m3", keys] < errors["int4", keys]
    assert errors["int4", plain] == pytest.approx(errors["int4 per token", plain], rel=0.2)
    assert errors["int4", outliers] < 0.6 * errors["int4 per token", outliers]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_append(kv_format, monkeypatch):
    """The first token of a page, and the last, with which a group of int4 is whole."""
    monkeypatch.setattr(attention_append, "BATCH", 3)
    appends = attention_append.Appends(kv_format, torch.bfloat16, (0, attention_append.PAGE - 1), "cpu")
    assert appends.error() == 0
    k, _ = reference_kv_cache.gather(appends.caches[0], 1, 0, 1, None, torch.float64)
    stored = (k - appends.k[0][1].double()).abs().max()
    assert stored <= {"fp8_e4m3": 0.2, "int8": 0.03}.get(kv_format, 0), "what was appended is there"
    assert appends.bytes() > 4 * appends.k[0].numel()
    monkeypatch.setattr(minfer, "kv_cache_append", lambda *args, **options: None)
    assert attention_append.Appends(kv_format, torch.bfloat16, (0,), "cpu").error() > 0.5


def test_report():
    """Each suite alone and all together; peers of variants beside plain causal attention."""
    head = dict(device="NVIDIA H200", driver="1.2", torch="2.11", cuda="13.0", commit="abc", date="2000-01-01", protocol="p")
    variants = [row("variants", "varlen", m, peer, r, causal=True) for m, peer, r in
                ((16384, "ours:causal", 0.5), (65536, "ours:causal", 0.7), (65536, "ours:even", 0.9), (16384, "fa3", 0.95))]  # fmt: skip
    appends = [row("append", f"batch 64, {f}", 64, "ours:16bit", 1.0, us=us, heads=(8, 8), format=f, page=64)
               for f, us in (("16bit", 2.0), ("int4", 2.5))]  # fmt: skip
    appends.append(row("append", "batch 64, 16bit", 64, "torch_compile", 1.5, us=2.0, heads=(8, 8), format="16bit", page=64))
    chunks = [
        row("chunks", "1 x 64, 16bit", 8192, peer, ratio, us=40.0, heads=(32, 8), format="16bit", queries=64)
        for peer, ratio in (("fa3", 1.25), (attention_chunks.UNDIVIDED, 2.5))
    ]
    errors = dict(suite="accuracy", op="attention", kernel="x", dtype="bf16", ratio=0.9)
    shape = dict(m=1024, head_dim=64, heads_q=4, heads_kv=2)
    accuracy = [
        errors | dict(shape=shape | dict(model="prefill, causal", kind="prefill"), peer="torch_sdpa", rel_err=2e-3, peer_err=1.8e-3),
        errors | dict(shape=shape | dict(model="int4 cache, Gaussian K", kind="cache", format="int4", keys="Gaussian"),
                      peer="int4 per token", rel_err=0.12, peer_err=0.13),
    ]  # fmt: skip
    text = report_attention.section(head | {"rows": variants})
    assert "| element, heads | 64 sequences of lognormal lengths | 64 sequences of lognormal lengths, 65536 tokens |" in text
    assert "| bf16, 32/32 | 0.50 | 0.70 |" in text and "| bf16, 32/32 | 0.90 |" in text and "| bf16, 32/32 | 0.95 |" in text
    assert "Where a peer is faster: 1 of" in text, "forms of ours are no peers"
    text = report_attention.section(head | {"rows": appends})
    assert "| element | 16bit | int4 | torch.compile, 16bit |" in text and "| bf16 | 2.00 | 2.50 | 3.00 |" in text
    text = report_attention.section(head | {"rows": chunks})
    assert "| 16bit | 32/8 | 1 x 64 | 8192 | 40.0 | 0.50 | 1.25 | 2.50 |" in text and "No cell was slower" in text
    text = report_attention.section(head | {"rows": accuracy})
    assert "| bf16, 64 | 2.0e-03: 1.11 |" in text and "(at most 1.11)" in text and "| int4 (KIVI: K by channels) | 12.0% |" in text
    assert "| int4, K by tokens (not a format of ours) | 13.0% |" in text and "No cell was slower" in text
    whole = report_attention.section(head | {"rows": [*variants, *appends, *accuracy]})
    assert all(f"`{suite}`" in whole for suite in ("variants", "append", "accuracy"))
    nothing = report_attention.section(head | {"rows": []})
    assert not any(f"`{suite}`" in nothing for suite in ("variants", "append", "accuracy"))
