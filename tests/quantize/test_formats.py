"""Quantisers, checkpoint loaders and files of nf4, mxfp4, nvfp4, int8 and fp8_e4m3.

Checkpoints are built here bit by bit from their documented layouts; where a format's own package is installed, by that too.
"""

import json
from dataclasses import replace

import minfer
import numpy
import pytest
import torch
from minfer import quantize
from minfer.formats import weight_formats

from tests.gemm.cases import DTYPES, gemm_mismatch, name_of
from tests.quantize.test_quantize import check_product, formula, same_weights
from tests.quantized_gemm.weight_format_cases import (
    BITS,
    GROUPS,
    NEW,
    QUANTISED_ERROR,
    e2m1,
    e4m3,
    e8m0,
    values,
)

N, K = 48, 256


def quantizer(name):
    return quantize.quantize_w4 if BITS[name] == 4 else quantize.quantize_w8


def codes_of(weight):
    name = weight.w4_format if isinstance(weight, quantize.W4Weight) else weight.w8_format
    return minfer.formats.weight_layout.unpack(weight.qweight, weight.n, weight.k, weight_formats.FORMATS[name].order)


def relative(weight, dense):
    return ((weight.dequantize().double() - dense.double()).norm() / dense.double().norm()).item()


# ---- round to nearest ----------------------------------------------------------------------------------------------------------


def nearest(x, book):
    """Index of the nearest value, by looking at all of them."""
    return (x[..., None] - book).abs().argmin(-1)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_quantize(name, dtype):
    """The search beats the whole range (or the OCP rule), and both are near what the format can do on normal weights."""
    limit = QUANTISED_ERROR[name]
    dense = torch.randn(64, 1024).to(dtype)
    for group_size in (None, *GROUPS[name]):
        searched, plain = (quantizer(name)(dense, group_size, format=name, clip=clip) for clip in (True, False))
        assert searched.zeros is None and (searched.n, searched.k) == (64, 1024)
        assert group_size is None or searched.group_size == group_size
        assert relative(searched, dense) <= relative(plain, dense) < limit * (1.3 if group_size == -1 and name in ("nf4", "int8") else 1)


@pytest.mark.parametrize("name", NEW)
def test_codes_are_the_nearest(name):
    """With the scales that were chosen, no other code is nearer; 16-bit scales are those of the largest magnitude."""
    dense = torch.randn(16, 256).half()
    weight = quantizer(name)(dense, format=name, clip=False)
    size = 256 if weight.group_size == -1 else weight.group_size
    group = torch.arange(256) // size
    form = weight_formats.FORMATS[name]
    scale = weight_formats.scale_values(weight.scales, form).double() * weight.alpha
    largest = dense.double().unflatten(1, (-1, size)).abs().amax(2).t()
    codes = torch.arange(2**form.bits, dtype=torch.uint8)
    book = values(name, codes) - (form.zero or 0)
    if form.scale_type is None:  # both signs reach it: 127 of int8, 1 of nf4, 448 of fp8_e4m3
        assert torch.equal(scale, (largest / book.nan_to_num(0).max()).half().double())
    in_units = dense.double() / scale[group].t()
    chosen = book[codes_of(weight).long()]
    best = book.nan_to_num(1e9)[nearest(in_units, book.nan_to_num(1e9))]
    assert torch.allclose((chosen - in_units).abs(), (best - in_units).abs(), rtol=0, atol=1e-5)


def test_mxfp4_is_the_ocp_rule():
    """Without a search the shared exponent is floor(log2(largest)) - 2."""
    dense = torch.randn(16, 320) * 2.0 ** torch.randint(-20, 20, (16, 1))
    weight = quantize.quantize_w4(dense, format="mxfp4", clip=False)
    largest = dense.double().unflatten(1, (-1, 32)).abs().amax(2).t()
    assert torch.equal(weight.scales.long(), largest.log2().floor().long() - 2 + 127)
    searched = quantize.quantize_w4(dense, format="mxfp4")
    steps = searched.scales.int() - weight.scales.int()
    assert steps.abs().max() == 1 and steps.ne(0).any()


def test_nvfp4_has_two_levels():
    dense = torch.randn(32, 320)
    weight = quantize.quantize_w4(dense, format="nvfp4", clip=False)
    assert weight.alpha == (dense.abs().max() / (6 * 448)).item()
    blocks = dense.unflatten(1, (-1, 16)).abs().amax(2).t() / 6 / weight.alpha
    assert torch.equal(weight.scales, blocks.to(torch.float8_e4m3fn).view(torch.uint8))
    assert weight.scales.max() == 0x7E
    scaled = quantize.quantize_w4(dense * 1024, format="nvfp4", clip=False)
    assert scaled.alpha == 1024 * weight.alpha and torch.equal(scaled.qweight, weight.qweight)


@pytest.mark.parametrize("name", ["int4", "nf4", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("group_size", [128, 2**31, 2**62])
def test_a_group_that_covers_k(name, group_size):
    """Any group size from k on is one group: the bits of -1, and no tensor of that size."""
    dense, a = torch.randn(16, 72).half(), torch.randn(3, 72).half()
    for symmetric in (True, False) if name in ("int4", "int8") else (True,):
        whole, same = (quantizer(name)(dense, size, symmetric, name) for size in (-1, group_size))
        assert same.group_size == group_size and same.scales.shape == (1, 16)
        for of_whole, of_same in ((whole, same), (whole.dequantize(), same.dequantize()), (whole.gemm(a), same.gemm(a))):
            if isinstance(of_whole, torch.Tensor):
                assert torch.equal(of_whole, of_same)
            else:
                same_weights(of_whole, replace(of_same, group_size=-1))
        module = (minfer.nn.W4Linear if BITS[name] == 4 else minfer.nn.W8Linear).from_weight(same)
        assert torch.equal(module(a), whole.gemm(a))
    for size in (2**63, 2**100, 128.0, "128", True):
        with pytest.raises(ValueError, match="group_size must be -1 or a power of two >= 32, got"):
            quantizer(name)(dense, size, format=name)


def test_e2m1_ties_go_to_the_even_code():
    magnitudes = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    dense = torch.tensor(magnitudes + [-x for x in magnitudes]).repeat(8, 2)
    weight = quantize.quantize_w4(dense, format="mxfp4", clip=False)
    assert (weight.scales == 127).all()
    even = [0, 2, 2, 4, 4, 6, 6, 7]
    assert codes_of(weight)[0].tolist() == (even + [8 + c for c in even]) * 2


def test_int8_zero_points():
    dense = torch.rand(16, 256).half() + 0.25  # far from symmetric
    weight = quantize.quantize_w8(dense, 64, symmetric=False)
    assert weight.zeros.shape == (4, 16) and (weight.zeros == 0).all()
    assert relative(weight, dense) < 0.6 * relative(quantize.quantize_w8(dense, 64), dense)
    shifted = torch.randint(-100, 156, (8, 256))
    shifted[:, :2] = torch.tensor([-100, 155])
    assert torch.equal(quantize.quantize_w8(shifted.half(), symmetric=False).dequantize(), shifted.half())


@pytest.mark.parametrize("name", NEW)
def test_extreme_weights(name):
    """Rows of zeros, an outlier, tiny and tail groups."""
    dense = torch.randn(24, 200).half()
    dense[3] = 0
    dense[4] *= 2.0**-12
    dense[5, 10] = 60000.0
    weight = quantizer(name)(dense, format=name)
    back = weight.dequantize()
    assert back.isfinite().all() and (back[3] == 0).all()
    assert abs(back[5, 10].item() / 60000 - 1) < 0.1
    ordinary = [row for row in range(24) if row not in (3, 4, 5)]
    if name != "nvfp4":  # its global scale makes way for the outlier
        assert (back[ordinary] - dense[ordinary]).float().norm() / dense[ordinary].float().norm() < 0.15
    zero = quantizer(name)(torch.zeros(8, 64).half(), format=name)
    assert (zero.dequantize() == 0).all() and zero.alpha == 1.0


BAD = {
    "w8 format": (quantize.quantize_w8, {"format": "int4"}, "quantize_w8: format must be one of int8, fp8_e4m3, got 'int4'"),
    "w8 group_size": (quantize.quantize_w8, {"group_size": 16}, "quantize_w8: group_size must be -1 or a power of two >= 32, got 16"),
    "mxfp4 group_size": (quantize.quantize_w4, {"format": "mxfp4", "group_size": 64}, "group_size must be 32 for mxfp4, got 64"),
    "nvfp4 group_size": (quantize.quantize_w4, {"format": "nvfp4", "group_size": 32}, "group_size must be 16 for nvfp4, got 32"),
    "nf4 zeros": (quantize.quantize_w4, {"format": "nf4", "symmetric": False}, "symmetric must be True for nf4, which has no zero points"),
    "fp8 zeros": (quantize.quantize_w8, {"format": "fp8_e4m3", "symmetric": False}, "symmetric must be True for fp8_e4m3"),
    "dtype": (quantize.quantize_w8, {"dtype": torch.float32}, "dtype must be torch.float16 or torch.bfloat16"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_quantize(case):
    function, arguments, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(8, 64).half(), **arguments)


def test_not_finite():
    for value in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="weight must be finite"):
            quantize.quantize_w4(torch.full((8, 64), value), format="nvfp4")


# ---- GPTQ, 8 bits --------------------------------------------------------------------------------------------------------------


def bytes_along(codes, dim):
    """int32 words of four codes along ``dim``, the first in the low byte."""
    codes = codes.movedim(dim, -1).to(torch.int64)
    words = sum(codes[..., i::4] << (8 * i) for i in range(4))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


def layer8(groups, dtype=torch.float16):
    return torch.randint(0, 256, (N, K)), torch.rand(groups, N).add_(0.5).mul_(0.002).to(dtype), torch.randint(0, 256, (groups, N))


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_8_bits(version, group_size):
    size = K if group_size == -1 else group_size
    codes, scales, zeros = layer8(K // size)
    zeros[0, :2] = torch.tensor([0, 255])
    g_idx = (torch.arange(K) // size)[torch.randperm(K)] if group_size == 32 else torch.arange(K) // size
    stored = (zeros - 1) % 256 if version == 1 else zeros
    tensors = {"qweight": bytes_along(codes.t(), 0), "qzeros": bytes_along(stored, 1), "scales": scales, "g_idx": g_idx.int()}
    arguments = {"group_size": group_size, "bits": 8, "checkpoint_format": ("gptq", "gptq_v2")[version - 1]}
    weight = quantize.from_gptq(tensors, **arguments)
    dense = formula(codes, scales, zeros, g_idx)
    assert isinstance(weight, quantize.W8Weight) and (weight.perm is None) == (group_size != 32)
    assert torch.equal(weight.dequantize(), dense)
    check_product(weight, dense)
    with pytest.raises(ValueError, match="sym is set, but not all zero points are 128"):
        quantize.from_gptq(tensors, **arguments, sym=True)
    tensors["qzeros"] = bytes_along(torch.full_like(zeros, 127 if version == 1 else 128), 1)
    assert quantize.from_gptq(tensors, **arguments, sym=True).zeros is None


# ---- compressed-tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [8, 1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_pack_quantized_8_bits(symmetric, groups):
    codes, scales, zeros = layer8(groups)
    zeros = torch.full_like(zeros, 128) if symmetric else zeros
    tensors = {"weight_packed": bytes_along(codes, 1), "weight_scale": scales.t().contiguous(), "weight_shape": torch.tensor([N, K])}
    if not symmetric:
        tensors["weight_zero_point"] = bytes_along(zeros.t(), 0)
    weight = quantize.from_compressed_tensors(tensors, num_bits=8)
    assert (weight.zeros is None) == symmetric and weight.w8_format == "int8"
    assert torch.equal(weight.dequantize(), formula(codes, scales, zeros, torch.arange(K) // (K // groups)))


@pytest.mark.parametrize("shape", [(N, 8), (N, 1), (N,), (1,), ()], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
def test_compressed_tensors_int_quantized(format, symmetric, shape):
    quantized = torch.randint(-128, 128, (N, K)).to(torch.int8)
    scale = torch.rand(shape).add_(0.5).mul_(0.002).bfloat16()
    tensors = {"weight": quantized, "weight_scale": scale, "bias": torch.randn(N)}
    zero = torch.zeros(shape) if symmetric else torch.randint(-128, 128, shape)
    if not symmetric:
        tensors["weight_zero_point"] = zero.to(torch.int8)
    weight = quantize.from_compressed_tensors(tensors, format=format)
    assert (weight.zeros is None) == symmetric and weight.w8_format == "int8" and torch.equal(weight.bias, tensors["bias"])
    assert weight.group_size == (32 if shape == (N, 8) else -1)

    def column(x):
        return (x.double().reshape(N, -1) if x.numel() > 1 else x.double().reshape(1, 1)).repeat_interleave(K // max(1, x.numel() // N), 1)

    exact = (quantized.double() - column(zero)) * column(scale)
    assert torch.equal(weight.dequantize(), exact.bfloat16())


@pytest.mark.parametrize("shape", [(N, 1), (N,), (1,), ()], ids=str)
def test_compressed_tensors_float_quantized(shape):
    quantized = torch.randn(N, K).mul_(100).to(torch.float8_e4m3fn)
    scale = torch.rand(shape).add_(0.5).mul_(0.002)
    tensors = {"weight": quantized, "weight_scale": scale}
    with pytest.raises(ValueError, match="weight_scale must be .*float16 or .*bfloat16, got torch.float32; pass dtype= to round them"):
        quantize.from_compressed_tensors(tensors, format="float-quantized")
    weight = quantize.from_compressed_tensors(tensors, format="float-quantized", dtype=torch.bfloat16)
    assert weight.w8_format == "fp8_e4m3" and weight.group_size == -1
    if len(shape) == 0 or shape == (1,):  # one number keeps its 24 bits
        assert weight.alpha == scale.item() and (weight.scales == 1).all()
        assert torch.equal(weight.dequantize(), (quantized.float() * scale).bfloat16())
    else:
        rounded = scale.bfloat16().float().reshape(N, 1)
        assert torch.equal(weight.dequantize(), (quantized.float() * rounded).bfloat16())
    bits = quantized.view(torch.uint8)
    assert torch.equal(codes_of(weight), bits) and torch.equal(e4m3(bits), quantized.double())


def fp4_bytes(codes, high_first=False):
    """uint8 [..., k / 2] of codes [..., k], two to a byte."""
    first, second = codes[..., ::2].long(), codes[..., 1::2].long()
    return ((first << 4 | second) if high_first else (first | second << 4)).to(torch.uint8)


def test_compressed_tensors_nvfp4():
    codes, scale = torch.randint(0, 16, (N, K)), torch.rand(N, K // 16).mul_(400).to(torch.float8_e4m3fn)
    tensors = {"weight_packed": fp4_bytes(codes), "weight_scale": scale, "weight_global_scale": torch.tensor([4096.0])}
    weight = quantize.from_compressed_tensors(tensors, format="nvfp4-pack-quantized")
    assert (weight.w4_format, weight.group_size, weight.alpha) == ("nvfp4", 16, 1 / 4096)
    exact = e2m1(codes) * scale.double().repeat_interleave(16, 1) / 4096
    assert torch.equal(weight.dequantize(), exact.bfloat16()) and torch.equal(weight.dequantize(torch.float16), exact.half())
    by_bits = e4m3(scale.view(torch.uint8)).repeat_interleave(16, 1)
    assert torch.equal(exact, e2m1(codes) * by_bits / 4096)
    check_product(weight, exact.bfloat16())


def test_compressed_tensors_mxfp4():
    codes, scale = torch.randint(0, 16, (N, K)), torch.randint(115, 130, (N, K // 32)).to(torch.uint8)
    weight = quantize.from_compressed_tensors({"weight_packed": fp4_bytes(codes), "weight_scale": scale}, format="mxfp4-pack-quantized")
    assert torch.equal(weight.dequantize().double(), e2m1(codes) * e8m0(scale).repeat_interleave(32, 1))


def test_bad_compressed_formats():
    good = {
        "weight_packed": torch.zeros(N, K // 2).byte(),
        "weight_scale": torch.zeros(N, K // 16).byte(),
        "weight_global_scale": torch.ones(1),
    }
    quantize.from_compressed_tensors(good, format="nvfp4-pack-quantized", num_bits=4, group_size=16)
    bad = [
        ({}, {"format": "marlin-24"}, "format must be pack-quantized, .* or mxfp4-pack-quantized, got 'marlin-24'"),
        ({}, {"num_bits": 8}, "num_bits must be 4 for nvfp4-pack-quantized, got 8"),
        ({}, {"group_size": 32}, "group_size must be 16 for nvfp4, got 32"),
        ({"weight_scale": torch.zeros(N, 8).byte()}, {}, r"weight_scale must be \[48, 16\], got \[48, 8\]"),
        ({"weight_scale": torch.zeros(N, 16)}, {}, "weight_scale must be torch.uint8 or torch.float8_e4m3fn, got torch.float32"),
        ({"weight_global_scale": torch.ones(2)}, {}, r"weight_global_scale must be one number, got \[2\]"),
        ({"weight": torch.zeros(N, K)}, {"format": "int-quantized"}, "weight must be torch.int8, got torch.float32"),
        ({"weight": torch.zeros(N, K).char()}, {"format": "float-quantized"}, "weight must be torch.float8_e4m3fn, got torch.int8"),
        (
            {"weight": torch.zeros(N, K).char(), "weight_scale": torch.ones(N, 3).half()},
            {"format": "int-quantized"},
            "weight_scale must have one group, or one for 32, 64, .. columns, unless group_size is given; got 3 for k = 256",
        ),
    ]
    for change, arguments, message in bad:
        with pytest.raises(ValueError, match="from_compressed_tensors: " + message):
            quantize.from_compressed_tensors(good | change, **{"format": "nvfp4-pack-quantized"} | arguments)


# ---- MXFP4 as gpt-oss has it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [(), (3,), (2, 2)], ids=str)
def test_mxfp4_blocks(experts):
    codes = torch.randint(0, 16, (*experts, N, K // 32, 32))
    tensors = {
        "blocks": fp4_bytes(codes),
        "scales": torch.randint(110, 128, (*experts, N, K // 32)).to(torch.uint8),
        "bias": torch.randn(*experts, N).bfloat16(),
    }
    exact = (e2m1(codes) * e8m0(tensors["scales"])[..., None]).flatten(-2)
    loaded = quantize.from_mxfp4(tensors)
    weights = loaded if experts else [loaded]
    for weight, dense, bias in zip(weights, exact.view(-1, N, K), tensors["bias"].view(-1, N), strict=True):
        assert (weight.w4_format, weight.group_size, weight.alpha) == ("mxfp4", 32, 1.0)
        assert torch.equal(weight.dequantize().double(), dense) and torch.equal(weight.bias, bias)
        without_bias = replace(weight, bias=None)
        check_product(without_bias, dense.bfloat16())
    own_type = tensors | {"scales": tensors["scales"].view(torch.float8_e8m0fnu)}
    again = quantize.from_mxfp4(own_type)
    same_weights(again[-1] if experts else again, weights[-1])


def test_mxfp4_bits_of_a_block():
    """A layer written out by hand: byte 0x72 is 1 (code 2), then 6 (code 7); scale 128 doubles."""
    blocks = torch.full((8, 1, 16), 0x72, dtype=torch.uint8)
    weight = quantize.from_mxfp4({"blocks": blocks, "scales": torch.full((8, 1), 128, dtype=torch.uint8)})
    assert torch.equal(weight.dequantize(), torch.tensor([2.0, 12.0]).repeat(8, 16).bfloat16())


def test_bad_mxfp4():
    with pytest.raises(ValueError, match=r"from_mxfp4: blocks must be \[..., n, k / 32, 16\], got \[8, 32\]"):
        quantize.from_mxfp4({"blocks": torch.zeros(8, 32).byte(), "scales": torch.zeros(8, 1).byte()})
    with pytest.raises(ValueError, match=r"from_mxfp4: scales must be \[8, 2\], got \[8, 1\]"):
        quantize.from_mxfp4({"blocks": torch.zeros(8, 2, 16).byte(), "scales": torch.zeros(8, 1).byte()})
    with pytest.raises(ValueError, match="from_mxfp4: tensor 'scales' is missing, got blocks"):
        quantize.from_mxfp4({"blocks": torch.zeros(8, 2, 16).byte()})


# ---- bitsandbytes --------------------------------------------------------------------------------------------------------------


def json_tensor(state):
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def bitsandbytes_tensors(nested, size=64, dtype="bfloat16"):
    """A layer, and its weights in float64."""
    codes, absmax = torch.randint(0, 16, (N, K)), torch.rand(N * K // size).add_(0.5)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": dtype, "shape": [N, K]}
    tensors = {"weight": fp4_bytes(codes.flatten(), high_first=True)[:, None], "weight.quant_map": torch.tensor(weight_formats.NF4)}
    if nested:
        quantized, table = torch.randint(0, 256, absmax.shape), torch.rand(256).sub_(0.5)
        outer, offset = torch.rand(-(-len(absmax) // 256)).add_(0.1), 0.875
        absmax = table[quantized] * outer[torch.arange(len(absmax)) // 256] + offset
        tensors |= {"weight.absmax": quantized.byte(), "weight.nested_quant_map": table, "weight.nested_absmax": outer}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors["weight.absmax"] = absmax
    tensors["weight.quant_state.bitsandbytes__nf4"] = json_tensor(state)
    rounded = absmax.to(getattr(torch, dtype) if dtype != "float32" else torch.float16).double()
    dense = torch.tensor(weight_formats.NF4, dtype=torch.float64)[codes] * rounded.repeat_interleave(size).view(N, K)
    return tensors, dense


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [32, 64, 256])
def test_bitsandbytes(size, nested):
    tensors, dense = bitsandbytes_tensors(nested, size)
    weight = quantize.from_bitsandbytes(tensors)
    assert (weight.w4_format, weight.group_size, weight.scales.dtype) == ("nf4", size, torch.bfloat16)
    assert torch.equal(weight.dequantize(), dense.bfloat16())
    check_product(weight, dense.bfloat16())
    # FSDP's storage types hold the same bytes.
    stored = tensors | {"weight": tensors["weight"].view(-1).view(torch.bfloat16)[:, None], "bias": torch.randn(N).half()}
    again = quantize.from_bitsandbytes(stored)
    assert torch.equal(again.qweight, weight.qweight) and again.bias.dtype == torch.bfloat16


def test_bitsandbytes_first_code_is_high():
    tensors, _ = bitsandbytes_tensors(False)
    tensors["weight"] = torch.full((N * K // 2, 1), 0xF7, dtype=torch.uint8)  # 1.0, then 0.0
    tensors["weight.absmax"] = torch.ones(N * K // 64)
    assert torch.equal(quantize.from_bitsandbytes(tensors).dequantize(), torch.tensor([1.0, 0.0]).repeat(N, K // 2).bfloat16())


def test_bad_bitsandbytes():
    tensors, _ = bitsandbytes_tensors(False, dtype="float32")
    key = "weight.quant_state.bitsandbytes__nf4"
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [N, K]}
    bad = [
        ({}, "weight.absmax must be torch.float16 or torch.bfloat16, got torch.float32; pass dtype= to round them"),
        ({key: json_tensor(state | {"quant_type": "fp4"})}, "quant_type must be nf4, got fp4"),
        ({key: json_tensor(state | {"shape": [2 * N, K // 2], "blocksize": 256})}, "k must be a multiple of the blocksize 256, got shape"),
        ({key: json_tensor(state), "weight.quant_map": torch.linspace(-1, 1, 16)}, "weight.quant_map must be the code book of NF4"),
        ({key: json_tensor(state), "weight.absmax": torch.ones(5)}, "weight.absmax must have 192 elements, got 5"),
        ({key: json_tensor(state), "weight": torch.zeros(8, 1).byte()}, "weight must have 6144 bytes for shape .*, got 8"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match="from_bitsandbytes: " + message):
            quantize.from_bitsandbytes(tensors | change)
    with pytest.raises(ValueError, match="from_bitsandbytes: tensor 'weight.quant_state.bitsandbytes__nf4' is missing"):
        quantize.from_bitsandbytes({"weight": tensors["weight"]})
    assert quantize.from_bitsandbytes(tensors, dtype=torch.float16).scales.dtype == torch.float16


# ---- the formats' own packages, where they are installed -----------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_against_bitsandbytes(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    dense = torch.randn(N, K, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(dense, blocksize=64, quant_type="nf4", compress_statistics=nested)
    tensors = {"weight": packed} | {f"weight.{key}": x for key, x in state.as_dict(packed=True).items()}
    weight = quantize.from_bitsandbytes(tensors)
    theirs = functional.dequantize_4bit(packed, state).double()
    unit = 2.0**-8  # the absmax is rounded here, the weight in both
    assert ((weight.dequantize().double() - theirs).abs() <= 2.1 * unit * theirs.abs()).all()
    if not nested:  # and the quantiser without a search finds the same codes
        ours = quantize.quantize_w4(dense, 64, format="nf4", clip=False)
        assert (codes_of(ours) != codes_of(weight)).double().mean() < 2e-3, "only ties may differ"
        assert torch.equal(ours.scales, weight.scales)


def scheme(**arguments):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    return quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_against_compressed_tensors_integers(symmetric, bits):
    how = scheme(num_bits=bits, type="int", strategy="group", group_size=64, symmetric=symmetric)
    packer = pytest.importorskip("compressed_tensors.compressors.pack_quantized").PackedQuantizationCompressor
    dense, scale = torch.randn(N, K).bfloat16(), torch.full((N, K // 64), 8 / 2**bits).bfloat16()
    half = 2 ** (bits - 1)
    zero = torch.zeros(N, K // 64) if symmetric else torch.randint(-half // 2, half // 2, (N, K // 64))
    state = {"weight": dense, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    compressed = packer.compress(state, how)
    weight = quantize.from_compressed_tensors(compressed, num_bits=bits)
    assert torch.equal(weight.dequantize(), packer.decompress(compressed, how)["weight"])


def test_against_compressed_tensors_nvfp4():
    how = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    packer = pytest.importorskip("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor
    dense = torch.randn(N, K)
    whole = 6 * 448 / dense.abs().max().reshape(1)
    scale = (dense.unflatten(1, (-1, 16)).abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn).float()
    compressed = packer.compress({"weight": dense, "weight_scale": scale, "weight_global_scale": whole}, how)
    weight = quantize.from_compressed_tensors(compressed, format="nvfp4-pack-quantized")
    theirs = packer.decompress(compressed, how)["weight"].double()
    assert ((weight.dequantize().double() - theirs).abs() <= 1.01 * 2.0**-8 * theirs.abs()).all()
    ours = quantize.quantize_w4(dense, format="nvfp4", clip=False)
    assert (codes_of(ours) != codes_of(weight)).double().mean() < 2e-3, "only ties may differ"


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_against_compressed_tensors_bytes(strategy, kind):
    how = scheme(num_bits=8, type=kind, strategy=strategy, symmetric=True)
    package = pytest.importorskip("compressed_tensors.compressors.naive_quantized")
    packer = package.IntQuantizationCompressor if kind == "int" else package.FloatQuantizationCompressor
    dense = torch.randn(N, K).bfloat16()
    largest = dense.abs().amax(1, keepdim=True) if strategy == "channel" else dense.abs().max().reshape(1)
    compressed = packer.compress({"weight": dense, "weight_scale": largest / (127 if kind == "int" else 448)}, how)
    weight = quantize.from_compressed_tensors(compressed, format=f"{kind}-quantized")
    theirs = packer.decompress(compressed, how)["weight"]
    assert ((weight.dequantize().double() - theirs.double()).abs() <= 2.01 * 2.0**-8 * theirs.double().abs()).all()


# ---- weights and files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_weight(name):
    weight = quantizer(name)(torch.randn(N, K).bfloat16(), format=name, bias=torch.randn(N))
    a, c = torch.randn(2, 3, K).bfloat16(), torch.randn(N)
    out = weight.gemm(a, activation="relu", c=c)
    assert out.shape == (2, 3, N) and (weight.alpha != 1) == (name == "nvfp4")
    # The weight is rounded to 16 bits without alpha, which is a factor of the float32 sums.
    w, epilogue = replace(weight, alpha=1.0).dequantize().t(), {"alpha": weight.alpha, "bias": weight.bias, "activation": "relu"}
    assert gemm_mismatch(out.view(6, N), a.view(6, K), w, c=c, beta=1.0, **epilogue) is None
    operator = minfer.w4a16_gemm if BITS[name] == 4 else minfer.w8a16_gemm
    assert torch.equal(operator(a, **weight.arguments(), activation="relu", c=c), out)
    assert weight.to("meta").dequantize().shape == (N, K) and weight.to("meta").alpha == weight.alpha
    same_weights(weight, weight.to("cpu"))


def test_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    dense = torch.randn(N, K).half()
    weights = {f"layer.{name}": quantizer(name)(dense, format=name, bias=torch.randn(N)) for name in ("int4", *NEW)}
    quantize.to_safetensors(weights, tmp_path / "weights.safetensors")
    loaded = quantize.from_safetensors(tmp_path / "weights.safetensors")
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert type(loaded[name]) is type(weight)
        same_weights(loaded[name], weight)
        assert torch.equal(loaded[name].dequantize(), weight.dequantize())


def test_safetensors_of_tied_weights(tmp_path):
    """One weight under two names is written twice; so are tensors that two weights share."""
    pytest.importorskip("safetensors")
    weight = quantize.quantize_w4(torch.randn(64, 128).half())
    path = tmp_path / "weights.safetensors"
    quantize.to_safetensors({"embedding": weight, "head": weight}, path)
    loaded = quantize.from_safetensors(path)
    assert loaded.keys() == {"embedding", "head"}
    for x in loaded.values():
        same_weights(x, weight)


def test_safetensors_without_experts(tmp_path):
    pytest.importorskip("safetensors")
    one = quantize.quantize_w4(torch.randn(64, 128).half())
    none = quantize.W4Experts(one.qweight[None][:0], one.scales[None][:0], None, one.group_size, 64, 128)
    with pytest.raises(ValueError, match="to_safetensors: experts: scales must have 1 to 512 experts"):
        quantize.to_safetensors({"experts": none}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="there must be 1 to 512 experts, got 513"):
        quantize.quantize_w4_experts(torch.zeros(513, 8, 32).half(), 32)


def test_what_is_not_written(tmp_path):
    pytest.importorskip("safetensors")
    path, linear = tmp_path / "weights.safetensors", minfer.nn.W4Linear(64, 64, group_size=32)
    weight = quantize.quantize_w4(torch.randn(64, 64), numpy.int64(32), dtype=torch.float16)
    quantize.to_safetensors({"a": weight}, path)  # numpy's integers are sizes, too
    same_weights(quantize.from_safetensors(path)["a"], weight)
    for wrong, message in (
        (linear, "a must be a W4Weight, W8Weight or W4Experts .*, got W4Linear"),
        (linear.to("meta").weight(), "a must have values"),
        (replace(weight, alpha=float("nan")), "a: alpha must be a number that is finite in float32"),
    ):
        with pytest.raises(ValueError, match=f"to_safetensors: {message}"):
            quantize.to_safetensors({"a": wrong}, path)
    with pytest.raises(ValueError, match="device must be one that holds values, got meta"):
        quantize.from_safetensors(path, "meta")
    for dtype in (torch.float8_e4m3fn, torch.int32):
        with pytest.raises(ValueError, match="quantize_w4: weight must be float16, bfloat16, float32 or float64"):
            quantize.quantize_w4(torch.zeros(8, 32).to(dtype), 32, dtype=torch.float16)
    with pytest.raises(ValueError, match="quantize_w4: weight must have values"):
        quantize.quantize_w4(torch.zeros(8, 32, device="meta"), 32, dtype=torch.float16)


def test_safetensors_of_other_layouts(tmp_path):
    """nf4 and the fp4s were packed like int4 once, the fp4s like nf4 after that: such a file is refused, and so is one from the future."""
    safetensors = pytest.importorskip("safetensors")
    dense = torch.randn(N, K).half()
    path = tmp_path / "weights.safetensors"

    def written(layout, *formats):
        quantize.to_safetensors({f"layer.{name}": quantizer(name)(dense, format=name) for name in formats}, path)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        assert metadata.pop("minfer.layout") == "3"
        if layout is not None:
            metadata["minfer.layout"] = layout
        safetensors.torch.save_file(tensors, path, metadata=metadata)
        return path

    assert set(quantize.from_safetensors(written(None, "int4", "int8"))) == {"layer.int4", "layer.int8"}
    for name in ("nf4", "mxfp4", "nvfp4"):
        with pytest.raises(ValueError, match=f"layer.{name} in an earlier packed layout of {name}: quantise it again"):
            quantize.from_safetensors(written(None, "int4", name))
    assert set(quantize.from_safetensors(written("2", "int4", "nf4"))) == {"layer.int4", "layer.nf4"}
    for name in ("mxfp4", "nvfp4"):
        with pytest.raises(ValueError, match=f"layer.{name} in an earlier packed layout of {name}: quantise it again"):
            quantize.from_safetensors(written("2", "int4", name))
    with pytest.raises(ValueError, match="has packed layout 4, this version reads up to 3"):
        quantize.from_safetensors(written("4", "int4"))


def test_safetensors_without_alpha(tmp_path):
    """A file from before there was one."""
    safetensors = pytest.importorskip("safetensors.torch")
    weight = quantize.quantize_w4(torch.randn(16, 64).half(), 32)
    sizes = {"w": {"group_size": 32, "n": 16, "k": 64, "w4_format": "int4"}}
    tensors = {f"w.{name}": x for name, x in weight.tensors().items()}
    safetensors.save_file(tensors, tmp_path / "old.safetensors", metadata={"format": "pt", "minfer.w4a16": json.dumps(sizes)})
    same_weights(quantize.from_safetensors(tmp_path / "old.safetensors")["w"], weight)
