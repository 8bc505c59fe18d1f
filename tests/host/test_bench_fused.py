"""bench.suites.fused without a GPU: its cells, what they hold ours against, and the bytes that they count."""

from operator import itemgetter

import pytest
import torch

from bench.report import fused as report
from bench.suites import fused, fused_decoder_block, fused_layer, fused_norm_gemm, fused_peers

EVERY = fused.cells(list(fused.SUITES), ["bf16"])


def test_cells():
    keys = [(cell["suite"], cell["what"], cell["m"], cell["width"]) for cell in EVERY]
    assert len(keys) == len(set(keys)) and {suite for suite, *_ in keys} == set(fused.SUITES)
    for cell in EVERY:
        if cell["suite"] == "rows":  # reads and writes 256 MB, but for a rest of a row
            moved = fused.BYTES_OF_ELEMENT.get(cell["what"], 4) * cell["m"] * cell["width"]
            assert 0.9 * fused.WORKING_SET < moved <= fused.WORKING_SET, cell


@pytest.mark.parametrize(
    "cell", [cell for cell in EVERY if cell["suite"] == "small" and cell["m"] == 8 and cell["width"] == 2048], ids=itemgetter("what")
)
def test_rows(cell):
    call = cell["make"](16, 2048, torch.bfloat16, "cpu")
    assert call.error() <= 2 * torch.finfo(torch.bfloat16).eps
    assert call.bytes == fused.BYTES_OF_ELEMENT.get(cell["what"], 4) * 16 * 2048
    if "torch" in call.peers:
        call.peers["torch"](0)


@pytest.mark.parametrize("what", ["rms_norm", "silu_and_mul"])
@pytest.mark.parametrize("quant", fused.QUANTS)
def test_quantised(what, quant):
    call = fused._quantised(what, quant)(16, 512, torch.bfloat16, "cpu")
    assert call.error() <= fused.LIMITS["quant"]
    codes, _ = call.peers["torch"](0)
    ours, _ = call.ours(0)
    assert codes.dtype == ours.dtype and (codes.float() - ours.float()).abs().max() <= 32


@pytest.mark.parametrize("kv_format", ["16bit", "fp8_e4m3", "int8", "int4"])
def test_append(kv_format):
    call = fused._append(kv_format)(3, 0, torch.float16, "cpu")
    assert call.error() <= fused.LIMITS["append"]


@pytest.mark.parametrize("kind", ["argmax", "all", "top-k 50, top-p 0.9", "top-p 0.9"])
def test_sample(kind):
    call = fused._sample(kind)(4, 3000, torch.bfloat16, "cpu")
    assert call.error() <= fused.LIMITS["sample"]
    assert call.peers["torch"](0).shape == (4,)


def test_peers_rotate_as_ours():
    q, k = torch.randn(5, 4, 128), torch.randn(5, 2, 128)
    table, positions = fused.minfer.rope_cache(10000.0, 128, 9), torch.tensor([0, 3, 8, 1, 1])
    want_q, want_k = q.half(), k.half()
    fused.minfer.rope(want_q, want_k, table, positions)
    for x, want in ((q, want_q), (k, want_k)):
        torch.testing.assert_close(fused_peers.rotated(x.half(), table, positions), want, rtol=2e-3, atol=2e-3)


def test_layer():
    torch.manual_seed(0)
    call = fused_layer.make(2, 0, torch.float16, "cpu", hidden=256, inter=512, length=70)
    assert call.error() <= fused.LIMITS["decode_layer"]


@pytest.mark.parametrize("form", ["int4", "e4m3", "dense"])
def test_decoder_block(form):
    call = fused_decoder_block.block((256, 128, 384, 96), form)(2, 96, torch.bfloat16, "cpu")
    assert call.error() <= fused.LIMITS["decoder_block"]
    assert call.peers["ours:separate"](0).shape == (2, 96)
    assert call.bytes > (128 * 256 + 3 * 128 * 384 + 96 * 128) / 2


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", ["int4", "e4m3", "dense"])
def test_decoder_layer(form, count):
    call = fused_decoder_block.layer((256, 128, 384, 512), (2, 1), 70, form, count)(1, 512, torch.bfloat16, "cpu")
    assert call.error() <= fused.LIMITS["decoder_layer"]
    assert call.ours(0).shape == call.peers["ours:separate"](0).shape == (1, 512)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("make", [fused_norm_gemm.dense, fused_norm_gemm.quantized])
def test_norm_and_product(make, gated):
    call = make(256, 96, gated)(3, 96, torch.bfloat16, "cpu")
    assert call.error() <= fused.LIMITS["norm_gemm"] and call.kernel == "two_launches"
    for name in ("ours:separate", "ours:two_launches", "torch"):
        if name in call.peers:
            assert call.peers[name](0).shape == (3, 48 if gated else 96)
    assert call.bytes > 96 * 256 / 2


def test_products_have_a_table_of_their_own():
    def row(op, m, width, peer, what=None):
        shape = dict(what=what or op, m=m, width=width)
        return dict(suite="origins", op=op, kernel="k", shape=shape, dtype="bf16", us=2.0, peer=peer, peer_us=3.0, ratio=1.5)

    product = [row("rms_norm_gemm", m, 64, peer, "rms_norm_gemm 32 x 64") for m in (1, 8) for peer in ("torch", "ours:one_launch")]
    text = report.cells([row("gelu", 128, 3072, "torch"), *product], False)
    norms, products = text.split("\n\n")
    assert "gelu" in norms and "3072" in norms and "rms_norm_gemm" not in norms
    assert products.count("2.0 us, 1.50 torch's operators, 1.50 one launch") == 2
    header = products.splitlines()[0]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["operator", "1", "8"]
