"""nf4, mxfp4, nvfp4, int8 and fp8_e4m3 weights on CPU against float64; what a code is, errors, fakes, opcheck and torch.compile."""

import itertools

import minfer
import pytest
import torch
from minfer.checks import quantized_gemm as checks_w4a16
from minfer.formats import weight_formats
from minfer.reference import quantized_gemm as reference_w4a16

from tests.contracts.test_registration import check_op, need
from tests.gemm.cases import (
    ACTIVATIONS,
    DTYPES,
    name_of,
    padded,
    untouched_outside,
)
from tests.quantized_gemm.weight_format_cases import (
    BAD_CALLS,
    BAD_PACK8,
    BITS,
    CASES,
    GROUPS,
    NEW,
    ZEROS,
    bad_call,
    e2m1,
    e4m3,
    e8m0,
    gated_mismatch,
    good_call,
    make_weight,
    mismatch,
    pack,
)

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
    assert weight_formats.names(4) + weight_formats.names(8) == ("int4", *NEW)
    assert weight_formats.names(4)[:4] == ("int4", "nf4", "mxfp4", "nvfp4") and weight_formats.names(8)[:2] == ("int8", "fp8_e4m3")


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
            "activation": ACTIVATIONS[number % len(ACTIVATIONS)],
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
    monkeypatch.setattr("minfer.checks.common.kernel_names", lambda family: frozenset({f"{family}_kernel"}))
    for name in NEW:
        weight = make_weight(name, 16, 64, GROUPS[name][0])
        a = activations(2, 64)
        for kernel in ("w4a16_kernel@decomposition=split_k,splits=2", "dequantize"):
            assert torch.equal(weight.gemm(a, kernel=kernel), weight.gemm(a))
            assert torch.equal(weight.gemm_gated(a, kernel=kernel), weight.gemm_gated(a))
        with pytest.raises(RuntimeError, match="kernel 'dequantise' is not in the registry"):
            weight.gemm(a, kernel="dequantise")


# ---- errors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case, op", BAD_CALLS)
def test_bad_calls(case, op, device):
    call, start, arguments, message = bad_call(case, op, device)
    with pytest.raises(RuntimeError, match=start + message):
        call(**arguments)


@pytest.mark.parametrize("name", NEW)
def test_good_calls(name):
    """What the bad calls differ from is right."""
    for op in ("gemm", "gemm_gated", "dequantize"):
        assert getattr(minfer, f"w{BITS[name]}a16_{op}")(**good_call(name, op, "cpu")[0]).shape[0] in (3, 16)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD_PACK8)
def test_bad_pack(case, device):
    make, message = BAD_PACK8[case]
    with pytest.raises(RuntimeError, match="minfer::w8a16_pack: " + message):
        minfer.w8a16_pack(make(lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=device)))


def test_bad_perm_values():
    call, _ = good_call("int8", "gemm", "cpu")
    for op in (minfer.w8a16_gemm, minfer.w8a16_gemm_gated):
        with pytest.raises(RuntimeError, match="perm must be column numbers from 0 to 63, got 0 to 64"):
            op(**call, perm=torch.full((64,), 64, dtype=torch.int32).index_fill_(0, torch.tensor([3]), 0))


def test_devices_must_agree():
    for name in ("qweight", "scales", "zeros", "perm", "c", "bias", "out"):
        call, t = good_call("int8", "gemm", "cpu")
        call |= {"zeros": t(2, 16), "c": t(3, 16), "bias": t(16), "out": t(3, 16), "perm": torch.arange(64, dtype=torch.int32)}
        minfer.w8a16_gemm(**call)
        call[name] = call[name].to("meta")
        with pytest.raises(RuntimeError, match=f"minfer::w8a16_gemm: {name} must be on .*cpu, got meta"):
            checks_w4a16.check_w8a16_gemm(**call)


# ---- registration --------------------------------------------------------------------------------------------------------------


def test_schemas():
    weight = "Tensor qweight, Tensor scales, Tensor? zeros=None"
    common = "*, int group_size=-1, float alpha=1., Tensor? perm=None"
    ops = torch.ops.minfer
    last = 'str w8_format="int8", bool constant_weights=False, str? quant=None, Tensor? scale=None, str? kernel=None'
    wide = last.replace("str? quant", "ScalarType? out_dtype=None, str? quant")
    gemm = f'(Tensor a, {weight}, {common}, Tensor? c=None, Tensor? bias=None, str activation="none", {wide}'
    assert str(ops.w8a16_gemm.default._schema) == f"minfer::w8a16_gemm{gemm}) -> Tensor"
    assert str(ops.w8a16_gemm.out._schema) == f"minfer::w8a16_gemm.out{gemm}, Tensor(a!) out) -> Tensor(a!)"
    assert str(ops.w8a16_gemm_gated.default._schema) == (
        f'minfer::w8a16_gemm_gated(Tensor a, {weight}, {common}, Tensor? bias=None, str activation="silu", {last}) -> Tensor'
    )
    assert str(ops.w8a16_pack.default._schema) == "minfer::w8a16_pack(Tensor codes) -> Tensor"
    assert str(ops.w8a16_dequantize.default._schema) == (
        f'minfer::w8a16_dequantize({weight}, *, int group_size=-1, float alpha=1., int n, int k, str w8_format="int8") -> Tensor'
    )


@pytest.mark.parametrize("name", NEW)
def test_opcheck(name):
    weight = make_weight(name, 32, 64, GROUPS[name][0], ZEROS.get(name, ("none",))[-1])
    args, kwargs = weight.packed
    ops = torch.ops.minfer
    gemm, gated, dequantize, packer = (getattr(ops, f"w{BITS[name]}a16_{op}") for op in ("gemm", "gemm_gated", "dequantize", "pack"))
    a, perm, bias = activations(2, 3, 64), torch.randperm(64).int(), torch.randn(32)
    forced = {"kernel": "dequantize", "constant_weights": True}
    for case in ({}, {"bias": bias, "activation": "silu"}, {"c": activations(2, 3, 32), "perm": perm}, forced):
        check_op(gemm.default, (a, *args), kwargs | case)
        check_op(gemm.out, (a, *args), kwargs | case | {"out": torch.empty(2, 3, 32).half()})
    for case in ({}, {"bias": bias, "perm": perm, "activation": "gelu"}, forced):
        check_op(gated.default, (a, *args), kwargs | case)
    check_op(dequantize.default, args, kwargs | {"n": 32, "k": 64})
    check_op(packer.default, (weight.codes,), {"w4_format": name} if BITS[name] == 4 else {})


@pytest.mark.parametrize("name", NEW)
def test_autograd(name):
    """Forward works where an argument requires grad, backward raises, and so does out=."""
    weight = make_weight(name, 16, 64, GROUPS[name][0])
    a = activations(2, 64)
    expected = weight.gemm(a), weight.gemm_gated(a)
    a.requires_grad_()
    for out, want in zip((weight.gemm(a), weight.gemm_gated(a)), expected, strict=True):
        assert torch.equal(out, want)
        with pytest.raises(RuntimeError, match="has no backward"):
            out.sum().backward()
    with pytest.raises(RuntimeError, match="out= cannot be differentiated"):
        weight.gemm(a, out=torch.empty(2, 16).half())
    if weight.scales.dtype == torch.float16:
        weight.scales.requires_grad_()
        with pytest.raises(RuntimeError, match="has no backward"):
            weight.dequantize().sum().backward()


@pytest.mark.parametrize("name", NEW)
def test_meta_is_like_cpu(name):
    weight = make_weight(name, 48, 136, GROUPS[name][0], dtype=torch.bfloat16)
    meta = weight.to("meta")

    def same(fake, real):
        return (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")

    for a in (activations(5, 136), activations(136), activations(2, 3, 136), activations(0, 136), activations(136, 5).t()):
        a = a.bfloat16()
        assert same(meta.gemm(a.to("meta")), weight.gemm(a)) and same(meta.gemm_gated(a.to("meta")), weight.gemm_gated(a))
    assert same(meta.dequantize(), weight.dequantize()) and same(pack(name, meta.codes), weight.qweight)
    if name in OWN_TYPE:
        assert same(meta.dequantize(out_dtype=torch.float16), weight.dequantize(out_dtype=torch.float16))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", NEW)
def test_compile(name, backend):
    """Every operator in one graph, scales in their own type, with rows and an alpha that change."""
    need(backend)
    weight, gated = make_weight(name, 64, 64, GROUPS[name][0]), make_weight(name, 128, 64, GROUPS[name][0])
    for x in (weight, gated):
        x.alpha = 0.01 if name == "nvfp4" else 1.0
        x.scales = x.scales.view(OWN_TYPE.get(name, x.scales.dtype))
    (qweight, scales, zeros), keywords = weight.packed
    perm, bias = torch.randperm(64).int(), torch.randn(64)

    def layer(x, residual, codes, alpha):
        arguments = keywords | {"alpha": alpha}
        y = weight.op("gemm")(x, qweight, scales, zeros, **arguments, c=residual, bias=bias, perm=perm, activation="silu")
        z = weight.op("gemm")(torch.relu(y), pack(name, codes), scales, **arguments, kernel="dequantize") / 8
        w = weight.op("dequantize")(qweight, scales, zeros, **keywords, n=64, k=64)
        out = torch.empty_like(z)
        weight.op("gemm")(z @ w.to(z.dtype), qweight, scales, **arguments, out=out)
        return gated.op("gemm_gated")(out, *gated.packed[0], **gated.packed[1])

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for shape, alpha in (((3, 64), weight.alpha), ((7, 64), 0.7 * weight.alpha), ((2, 5, 64), weight.alpha)):
        x, residual = activations(*shape), activations(*shape)
        with torch.no_grad():
            want, out = layer(x, residual, weight.codes, alpha), compiled(x, residual, weight.codes, alpha)
        torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)
