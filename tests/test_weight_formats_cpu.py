"""nf4, mxfp4, nvfp4, int8 and fp8_e4m3 weights on CPU against float64; what a code is, errors, fakes, opcheck and torch.compile."""

import itertools

import minfer
import pytest
import torch
from gemm_cases import ACTIVATIONS, DTYPES, name_of, padded, untouched_outside
from minfer import reference_w4a16, weight_formats
from weight_format_cases import BITS, CASES, GROUPS, NEW, ZEROS, e2m1, e4m3, e8m0, gated_mismatch, make_weight, mismatch

SHAPES = [(1, 64, 128), (3, 8, 8), (5, 72, 136), (17, 128, 1032)]
OWN_TYPE = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}


def activations(*shape, dtype=torch.float16):
    return torch.randn(shape).to(dtype)


# ---- what a code is ------------------------------------------------------------------------------------------------------------


def test_nf4_is_qloras_code_book():
    """Quantiles of the normal distribution, eight on either side of zero, as the paper's appendix and bitsandbytes derive them."""
    offset = 0.9677083
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    book = torch.cat((positive, negative, torch.zeros(1, dtype=torch.float64))).sort().values
    torch.testing.assert_close(torch.tensor(weight_formats.NF4, dtype=torch.float64), book / book.max(), rtol=0, atol=2e-7)


def test_small_floats():
    codes = torch.arange(256, dtype=torch.uint8)
    fp8 = weight_formats.FORMATS["fp8_e4m3"].decode(codes).double()
    torch.testing.assert_close(fp8, e4m3(codes), rtol=0, atol=0, equal_nan=True)
    fp4 = weight_formats.FORMATS["mxfp4"].decode(codes[:16])
    assert torch.equal(fp4.double(), e2m1(codes[:16])) and fp4[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    shared = weight_formats.scale_values(codes, weight_formats.FORMATS["mxfp4"]).double()
    torch.testing.assert_close(shared, e8m0(codes), rtol=0, atol=0, equal_nan=True)


def test_names():
    assert weight_formats.names(4) == ("int4", "nf4", "mxfp4", "nvfp4") and weight_formats.names(8) == ("int8", "fp8_e4m3")


# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, group_size", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dequantize(dtype, name, group_size):
    for (_, n, k), zeros in itertools.product(SHAPES, ZEROS.get(name, ("none",))):
        weight = make_weight(name, n, k, group_size, zeros, dtype)
        weight.alpha = 1.0
        out_dtype = {"out_dtype": dtype} if BITS[name] == 4 else {}
        w = weight.dequantize(**out_dtype)
        assert w.dtype == dtype and w.is_contiguous()
        exact = weight.dense(torch.float64)
        unit = torch.finfo(dtype).eps / 2
        # Products in float32 before the one rounding: 2^-23 of it beside the half unit.
        assert ((w.double() - exact).abs() <= (unit + 2.0**-23) * exact.abs() + 2.0**-25).all()
        if name in OWN_TYPE:
            assert torch.equal(w, weight.dense()), "exact in float32"
        weight.alpha = 0.25
        assert torch.equal(weight.dequantize(**out_dtype), (weight.dense(torch.float32) * 0.25).to(dtype))


@pytest.mark.parametrize("name, group_size", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gemm(dtype, name, group_size):
    for number, ((m, n, k), zeros) in enumerate(itertools.product(SHAPES, ZEROS.get(name, ("none",)))):
        weight = make_weight(name, n, k, group_size, zeros, dtype)
        a = activations(m, k, dtype=dtype)
        out = weight.gemm(a)
        assert out.shape == (m, n) and out.dtype == dtype and out.is_contiguous()
        assert mismatch(out, a, weight) is None
        weight.alpha = -0.7 * weight.alpha
        epilogue = {
            "c": torch.randn(m, n, dtype=torch.float32 if number % 2 else dtype),
            "bias": torch.randn(n, dtype=dtype if number % 2 else torch.float32),
            "activation": ACTIVATIONS[number % 5],
            "perm": torch.randperm(k).int(),
        }
        out = weight.gemm(a, **epilogue)
        assert mismatch(out, a, weight, **epilogue) is None
        into, whole = padded((m, n), dtype, "cpu")
        assert torch.equal(weight.gemm(a, **epilogue, out=into), out) and untouched_outside(into, whole)


@pytest.mark.parametrize("name", NEW)
def test_gated(name):
    for (m, half, k), dtype, group_size in itertools.product(((1, 8, 64), (5, 40, 136)), DTYPES, GROUPS[name]):
        weight = make_weight(name, 2 * half, k, group_size, ZEROS.get(name, ("none",))[-1], dtype)
        a = activations(m, k, dtype=dtype)
        for bias, activation in ((None, "silu"), (torch.randn(2 * half), "gelu"), (torch.randn(2 * half).to(dtype), "relu")):
            out = weight.gemm_gated(a, bias=bias, activation=activation)
            assert out.shape == (m, half) and out.dtype == dtype and out.is_contiguous()
            assert gated_mismatch(out, a, weight, bias=bias, activation=activation) is None


def test_alpha():
    """On int4 too; zero leaves the epilogue."""
    for name in ("int4", *NEW):
        weight = make_weight(name, 16, 64, GROUPS.get(name, (32,))[0])
        a, bias = activations(3, 64), torch.randn(16)
        weight.alpha = 0.0
        assert torch.equal(weight.gemm(a, bias=bias, activation="relu"), torch.relu(bias).half().expand(3, 16))
        weight.alpha = 3.5
        truth = 3.5 * (a.double() @ weight.dense().double().t()) + bias.double()
        torch.testing.assert_close(weight.gemm(a, bias=bias).double(), truth, rtol=2e-3, atol=2e-3)
        weight.alpha = 0.0035
        assert gated_mismatch(weight.gemm_gated(a, bias=bias), a, weight, bias=bias) is None


@pytest.mark.parametrize("name", NEW)
def test_float64_reference(name):
    weight = make_weight(name, 24, 96, GROUPS[name][0])
    args, kwargs = weight.packed
    a = torch.randn(5, 96).double()
    dense = weight.dense(torch.bfloat16 if name in OWN_TYPE else None).double()
    out = getattr(reference_w4a16, f"w{BITS[name]}a16_gemm")(a, *args, **kwargs, activation="gelu")
    torch.testing.assert_close(out, torch.nn.functional.gelu(weight.alpha * (a @ dense.t())), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OWN_TYPE)
def test_every_scale_byte(name):
    """Each of the 256 bytes, infinities and NaN included; scales in their own type are the same."""
    weight = make_weight(name, 256, 32, GROUPS[name][0])
    weight.alpha = 1.0
    weight.scales = torch.arange(256, dtype=torch.uint8).expand(weight.scales.shape).contiguous()
    for dtype in DTYPES:
        w = weight.dequantize(out_dtype=dtype)
        torch.testing.assert_close(w, weight.dense(torch.float32).to(dtype), rtol=0, atol=0, equal_nan=True)
        weight.scales = weight.scales.view(OWN_TYPE[name])
        torch.testing.assert_close(weight.dequantize(out_dtype=dtype), w, rtol=0, atol=0, equal_nan=True)
        weight.scales = weight.scales.view(torch.uint8)
    assert weight.dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize("name", OWN_TYPE)
def test_scales_in_their_own_type(name):
    weight = make_weight(name, 32, 64, GROUPS[name][0])
    a = activations(3, 64)
    plain = weight.gemm(a), weight.gemm_gated(a)
    weight.scales = weight.scales.view(OWN_TYPE[name])
    assert torch.equal(weight.gemm(a), plain[0]) and torch.equal(weight.gemm_gated(a), plain[1])
    assert torch.equal(weight.gemm(a, out=torch.empty(3, 32).half()), plain[0])


def test_pack_8_bits_of_any_type():
    signed = torch.randint(-128, 128, (72, 136)).to(torch.int8)
    packed = minfer.w8a16_pack(signed)
    assert torch.equal(packed, minfer.w8a16_pack((signed.int() + 128).to(torch.uint8)))
    assert torch.equal(minfer.w8a16_pack(signed.t()), minfer.w8a16_pack(signed.t().contiguous()))
    ones = torch.ones(1, 72).half()
    assert torch.equal(minfer.w8a16_dequantize(packed, ones, n=72, k=136), signed.half())
    small = torch.randn(72, 136).to(torch.float8_e4m3fn)
    packed = minfer.w8a16_pack(small)
    assert torch.equal(minfer.w8a16_dequantize(packed, ones, n=72, k=136, w8_format="fp8_e4m3"), small.half())


def test_leading_dimensions():
    for name in NEW:
        weight = make_weight(name, 16, 64, GROUPS[name][0])
        a = activations(2, 3, 5, 64)
        assert torch.equal(weight.gemm(a), weight.gemm(a.view(30, 64)).view(2, 3, 5, 16))
        assert torch.equal(weight.gemm(a[0, 0, 0]), weight.gemm(a[0, 0, :1])[0])
        assert weight.gemm(a[:0]).shape == (0, 3, 5, 16)
        assert torch.equal(weight.gemm_gated(a), weight.gemm_gated(a.view(30, 64)).view(2, 3, 5, 8))


def test_kernel_is_checked_then_ignored(monkeypatch):
    monkeypatch.setattr("minfer.checks.kernel_names", lambda family: frozenset({f"{family}_kernel"}))
    for name in NEW:
        weight = make_weight(name, 16, 64, GROUPS[name][0])
        a = activations(2, 64)
        for kernel in ("w4a16_kernel@splits=2", "dequantize"):
            assert torch.equal(weight.gemm(a, kernel=kernel), weight.gemm(a))
            assert torch.equal(weight.gemm_gated(a, kernel=kernel), weight.gemm_gated(a))
        with pytest.raises(RuntimeError, match="kernel 'dequantise' is not in the registry"):
            weight.gemm(a, kernel="dequantise")
