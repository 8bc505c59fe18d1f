"""The W4A16 operators on CPU against float64; their errors, fakes, opcheck and torch.compile."""

import itertools
import math

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
from tests.quantized_gemm.cases import (
    ACTIVATION,
    BAD_DEQUANTIZE,
    BAD_GEMM,
    BAD_GEMM_ONLY,
    BAD_PACK,
    BAD_PACK_FORMATS,
    GROUPS,
    ZEROS,
    bad_call,
    make_weight,
    w4a16_gated_mismatch,
    w4a16_mismatch,
)

SHAPES = [(1, 64, 128), (3, 8, 8), (5, 72, 136), (17, 128, 1032)]


@pytest.fixture
def kernel(monkeypatch):
    """A name that the registry has, whatever this build holds."""
    monkeypatch.setattr("minfer.checks.common.kernel_names", lambda family: frozenset({f"{family}_kernel"}))
    return "w4a16_kernel@decomposition=split_k,splits=3"


def activations(*shape, dtype=torch.float16):
    return torch.randn(shape).to(dtype)


# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dequantize(dtype, zeros, group_size):
    for _, n, k in SHAPES:
        weight = make_weight(n, k, group_size, zeros, dtype)
        args, kwargs = weight.packed
        w = minfer.w4a16_dequantize(*args, **kwargs, n=n, k=k)
        assert w.dtype == dtype and w.is_contiguous()
        assert torch.equal(w, weight.dense())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dequantize_rounds_once(dtype):
    """Integers times 16-bit scales are exact in float64; one rounding of that is the weight."""
    weight = make_weight(64, 256, 64, "integer", dtype)
    args, kwargs = weight.packed
    group = torch.arange(256) // 64
    exact = (weight.codes.double() - weight.zeros.double()[group].t()) * weight.scales.double()[group].t()
    w = minfer.w4a16_dequantize(*args, **kwargs, n=64, k=256).double()
    unit = torch.finfo(dtype).eps / 2
    assert ((w - exact).abs() <= unit * exact.abs()).all()
    assert (w[exact == 0] == 0).all()


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gemm(dtype, zeros, group_size):
    for number, (m, n, k) in enumerate(SHAPES):
        weight = make_weight(n, k, group_size, zeros, dtype)
        args, kwargs = weight.packed
        a = activations(m, k, dtype=dtype)
        out = minfer.w4a16_gemm(a, *args, **kwargs)
        assert out.shape == (m, n) and out.dtype == dtype and out.is_contiguous()
        assert w4a16_mismatch(out, a, weight) is None
        epilogue = {
            "c": torch.randn(m, n, dtype=torch.float32 if number % 2 else dtype),
            "bias": torch.randn(n, dtype=dtype if number % 2 else torch.float32),
            "activation": ACTIVATIONS[number % len(ACTIVATIONS)],
            "perm": torch.randperm(k).int(),
        }
        assert w4a16_mismatch(minfer.w4a16_gemm(a, *args, **kwargs, **epilogue), a, weight, **epilogue) is None
        wide = minfer.w4a16_gemm(a, *args, **kwargs, **epilogue, out_dtype=torch.float32)
        assert wide.dtype == torch.float32 and w4a16_mismatch(wide, a, weight, **epilogue) is None
        assert torch.equal(minfer.w4a16_gemm(a, *args, **kwargs, **epilogue, out=torch.empty(m, n)), wide)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float64_reference(activation):
    """reference_w4a16 in float64 is the formula on the 16-bit weights."""
    weight = make_weight(24, 96, 32, "fractional")
    args, kwargs = weight.packed
    a, c, bias = torch.randn(5, 96).double(), torch.randn(5, 24).double(), torch.randn(24).double()
    out = reference_w4a16.w4a16_gemm(a, *args, **kwargs, c=c, bias=bias, activation=activation)
    torch.testing.assert_close(out, ACTIVATION[activation](a @ weight.dense().double().t() + c + bias), rtol=1e-12, atol=1e-12)


def test_leading_dimensions():
    weight = make_weight(16, 64, 32, "integer")
    args, kwargs = weight.packed
    a = activations(2, 3, 5, 64)
    matrix = minfer.w4a16_gemm(a.reshape(30, 64), *args, **kwargs)
    assert torch.equal(minfer.w4a16_gemm(a, *args, **kwargs), matrix.view(2, 3, 5, 16))
    assert torch.equal(minfer.w4a16_gemm(a[0, 0, 0], *args, **kwargs), minfer.w4a16_gemm(a[0, 0, :1], *args, **kwargs)[0])
    assert minfer.w4a16_gemm(a[0, 0, 0], *args, **kwargs).shape == (16,)
    assert minfer.w4a16_gemm(a[:0], *args, **kwargs).shape == (0, 3, 5, 16)
    assert minfer.w4a16_gemm(a[0, 0, :0], *args, **kwargs).shape == (0, 16)
    gated = minfer.w4a16_gemm_gated(a, *args, **kwargs)
    assert torch.equal(gated, minfer.w4a16_gemm_gated(a.reshape(30, 64), *args, **kwargs).view(2, 3, 5, 8))
    assert minfer.w4a16_gemm_gated(a[0, 0, 0], *args, **kwargs).shape == (8,)


def test_views_of_a():
    weight = make_weight(72, 64, 32)
    args, kwargs = weight.packed
    base = torch.randn(200, 200).half()
    for a in (base[1:65:2, 3:67], base[:32, :128:2], base[:64, 5:37].t(), base[:1, :64].expand(7, 64)):
        assert torch.equal(minfer.w4a16_gemm(a, *args, **kwargs), minfer.w4a16_gemm(a.contiguous(), *args, **kwargs))


@pytest.mark.parametrize("c_dtype", [torch.float16, torch.float32], ids=name_of)
@pytest.mark.parametrize("shape", [(2, 3, 16), (3, 16), (16,), (1, 16), (3, 1), (2, 1, 1), (), (1,), (1, 1, 1)], ids=str)
def test_c_broadcasts(shape, c_dtype):
    weight = make_weight(16, 32, 32)
    args, kwargs = weight.packed
    a, c = activations(2, 3, 32), torch.randn(shape, dtype=c_dtype)
    truth = a.double() @ weight.dense().double().t() + c.double()
    torch.testing.assert_close(minfer.w4a16_gemm(a, *args, **kwargs, c=c).double(), truth, rtol=2e-3, atol=2e-3)


def test_perm_is_a_gather():
    """Packing W[:, perm] and passing perm multiplies by W."""
    weight, perm = make_weight(16, 128, -1), torch.randperm(128)
    packed = minfer.w4a16_pack(weight.codes[:, perm].contiguous())
    a = activations(4, 128)
    out = minfer.w4a16_gemm(a, packed, weight.scales, group_size=-1, perm=perm.int())
    assert w4a16_mismatch(out, a, weight) is None
    assert w4a16_mismatch(minfer.w4a16_gemm(a, packed, weight.scales, group_size=-1), a, weight) is not None


def test_out():
    weight = make_weight(16, 64, 32, "integer")
    args, kwargs = weight.packed
    a, c = activations(6, 64), activations(6, 16)
    expected = minfer.w4a16_gemm(a, *args, **kwargs, c=c, activation="relu")
    out, whole = padded((6, 16), torch.float16, "cpu")
    before = out._version
    returned = minfer.w4a16_gemm(a, *args, **kwargs, c=c, activation="relu", out=out)
    assert returned.data_ptr() == out.data_ptr() and out._version > before
    assert torch.equal(out, expected) and untouched_outside(out, whole)
    minfer.w4a16_gemm(a, *args, **kwargs, c=c, activation="relu", out=c)
    assert torch.equal(c, expected), "out may be c"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gated(dtype, activation):
    for (m, half, k), zeros in itertools.product(((1, 8, 64), (5, 40, 136)), ZEROS):
        weight = make_weight(2 * half, k, 32, zeros, dtype)
        args, kwargs = weight.packed
        a = activations(m, k, dtype=dtype)
        for bias in (None, torch.randn(2 * half), torch.randn(2 * half).to(dtype)):
            out = minfer.w4a16_gemm_gated(a, *args, **kwargs, bias=bias, activation=activation)
            assert out.shape == (m, half) and out.dtype == dtype and out.is_contiguous()
            assert w4a16_gated_mismatch(out, a, weight, bias=bias, activation=activation) is None


def test_gated_is_the_mlp():
    """pack_gate_up of codes and scales in front of w4a16_gemm_gated computes silu(x.G^T) * (x.U^T)."""
    gate, up, perm = make_weight(40, 128, 32, "integer"), make_weight(40, 128, 32, "integer"), torch.randperm(128)
    packed = minfer.w4a16_pack(minfer.pack_gate_up(gate.codes[:, perm], up.codes[:, perm]))
    scales, zeros = (minfer.pack_gate_up(getattr(gate, name).t(), getattr(up, name).t()).t().contiguous() for name in ("scales", "zeros"))
    a = activations(7, 128)
    out = minfer.w4a16_gemm_gated(a, packed, scales, zeros, group_size=32, perm=perm.int())

    def side(weight):
        group = torch.arange(128) // 32
        w = (weight.codes[:, perm].float() - weight.zeros.float()[group].t()) * weight.scales.float()[group].t()
        return a[:, perm].double() @ w.half().double().t()

    truth = torch.nn.functional.silu(side(gate)) * side(up)
    assert (out.double() - truth).norm() / truth.norm() < 2.0**-11


def test_nan_reaches_its_row_only():
    weight = make_weight(16, 64, 32)
    args, kwargs = weight.packed
    a = activations(4, 64)
    a[1, 3] = math.nan
    for activation in ACTIVATIONS:
        rows = minfer.w4a16_gemm(a, *args, **kwargs, activation=activation).isnan()
        assert rows[1].all() and not rows[[0, 2, 3]].any()


def test_kernel_is_checked_then_ignored(kernel):
    weight = make_weight(16, 64, 32)
    args, kwargs = weight.packed
    a = activations(4, 64)
    assert torch.equal(minfer.w4a16_gemm(a, *args, **kwargs, kernel=kernel), minfer.w4a16_gemm(a, *args, **kwargs))
    assert torch.equal(minfer.w4a16_gemm_gated(a, *args, **kwargs, kernel=kernel), minfer.w4a16_gemm_gated(a, *args, **kwargs))
    with pytest.raises(RuntimeError, match="nearest: w4a16_kernel"):
        minfer.w4a16_gemm(a, *args, **kwargs, kernel="w4a16_kernels")
    with pytest.raises(RuntimeError, match="kernel option splits must be"):
        minfer.w4a16_gemm(a, *args, **kwargs, kernel="w4a16_kernel@splits=0")


# ---- errors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD_GEMM | BAD_GEMM_ONLY)
def test_bad_gemm(case, device):
    arguments, message = (BAD_GEMM | BAD_GEMM_ONLY)[case]
    call = bad_call(arguments, device)
    with pytest.raises(RuntimeError, match="minfer::w4a16_gemm: " + message):
        minfer.w4a16_gemm(**call)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD_GEMM)
def test_bad_gated(case, device):
    arguments, message = BAD_GEMM[case]
    call = bad_call(arguments, device)
    with pytest.raises(RuntimeError, match="minfer::w4a16_gemm_gated: " + message):
        minfer.w4a16_gemm_gated(**call)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_gated_rows(device):
    call = bad_call(lambda t: {"scales": t(2, 24)}, device)
    with pytest.raises(RuntimeError, match=r"minfer::w4a16_gemm_gated: scales must have a multiple of 16 columns .*, got \[2, 24\]"):
        minfer.w4a16_gemm_gated(**call)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD_DEQUANTIZE)
def test_bad_dequantize(case, device):
    arguments, message = BAD_DEQUANTIZE[case]
    call = {"n": 16, "k": 64} | bad_call(arguments, device)
    del call["a"]
    with pytest.raises(RuntimeError, match="minfer::w4a16_dequantize: " + message):
        minfer.w4a16_dequantize(**call)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD_PACK)
def test_bad_pack(case, device):
    make, message = BAD_PACK[case]
    codes = make(lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=device))
    for name in weight_formats.names(4):
        with pytest.raises(RuntimeError, match="minfer::w4a16_pack: " + message):
            minfer.w4a16_pack(codes, w4_format=name)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BAD_PACK_FORMATS)
def test_bad_pack_format(name, device):
    codes = torch.zeros(16, 64, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match=f"minfer::w4a16_pack: w4_format must be one of int4, nf4, mxfp4, nvfp4, got '{name}'"):
        minfer.w4a16_pack(codes, w4_format=name)


def test_bad_values():
    """What only a look at the values finds; on CPU."""
    codes = torch.zeros(8, 64, dtype=torch.uint8)
    codes[7, 63] = 16
    for name in weight_formats.names(4):
        with pytest.raises(RuntimeError, match="minfer::w4a16_pack: codes must be 0 to 15, got 16"):
            minfer.w4a16_pack(codes, w4_format=name)
    for value, text in ((64, "got 0 to 64"), (-1, "got -1 to 0")):
        perm = torch.zeros(64, dtype=torch.int32)
        perm[5] = value
        call = bad_call(lambda t, perm=perm: {"perm": perm}, "cpu")
        for op in (minfer.w4a16_gemm, minfer.w4a16_gemm_gated):
            with pytest.raises(RuntimeError, match="perm must be column numbers from 0 to 63, " + text):
                op(**call)


def test_devices_must_agree():
    for name in ("qweight", "scales", "zeros", "perm", "c", "bias", "out"):
        call = bad_call(lambda t: {"zeros": t(2, 16), "c": t(3, 16), "bias": t(16), "out": t(3, 16)}, "cpu")
        call["perm"] = torch.arange(64, dtype=torch.int32)
        minfer.w4a16_gemm(**call)
        call[name] = call[name].to("meta")
        with pytest.raises(RuntimeError, match=f"minfer::w4a16_gemm: {name} must be on .*cpu, got meta"):
            checks_w4a16.check_w4a16_gemm(**call)


# ---- registration --------------------------------------------------------------------------------------------------------------


def test_schemas():
    weight = "Tensor qweight, Tensor scales, Tensor? zeros=None"
    common = "*, int group_size=128, float alpha=1., Tensor? perm=None"
    ops = torch.ops.minfer
    last = 'str w4_format="int4", bool constant_weights=False, str? quant=None, Tensor? scale=None, str? kernel=None'
    wide = last.replace("str? quant", "ScalarType? out_dtype=None, str? quant")
    gemm = f'(Tensor a, {weight}, {common}, Tensor? c=None, Tensor? bias=None, str activation="none", {wide}'
    assert str(ops.w4a16_gemm.default._schema) == f"minfer::w4a16_gemm{gemm}) -> Tensor"
    assert str(ops.w4a16_gemm.out._schema) == f"minfer::w4a16_gemm.out{gemm}, Tensor(a!) out) -> Tensor(a!)"
    assert str(ops.w4a16_gemm_gated.default._schema) == (
        f'minfer::w4a16_gemm_gated(Tensor a, {weight}, {common}, Tensor? bias=None, str activation="silu", {last}) -> Tensor'
    )
    assert str(ops.w4a16_pack.default._schema) == 'minfer::w4a16_pack(Tensor codes, *, str w4_format="int4") -> Tensor'
    assert str(ops.w4a16_dequantize.default._schema) == (
        f"minfer::w4a16_dequantize({weight}, *, int group_size=128, float alpha=1., int n, int k, "
        'str w4_format="int4", ScalarType? out_dtype=None) -> Tensor'
    )


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("zeros", ZEROS)
def test_opcheck(zeros, rank, kernel):
    weight = make_weight(32, 64, 32, zeros)
    args, kwargs = weight.packed
    a = activations(*(2, 3, 64)[3 - rank :])
    perm, bias = torch.randperm(64).int(), torch.randn(32)
    out_shape = (*a.shape[:-1], 32)
    cases = (
        {},
        {"bias": bias, "activation": "silu"},
        {"c": activations(*out_shape), "perm": perm},
        {"c": torch.randn(32), "constant_weights": True},
        {"kernel": kernel},
    )
    for case in cases:
        check_op(torch.ops.minfer.w4a16_gemm.default, (a, *args), kwargs | case)
        check_op(torch.ops.minfer.w4a16_gemm.out, (a, *args), kwargs | case | {"out": torch.empty(out_shape).half()})
    for case in ({}, {"bias": bias, "perm": perm, "activation": "gelu"}, {"kernel": kernel, "constant_weights": True}):
        check_op(torch.ops.minfer.w4a16_gemm_gated.default, (a, *args), kwargs | case)
    check_op(torch.ops.minfer.w4a16_dequantize.default, args, kwargs | {"n": 32, "k": 64})
    check_op(torch.ops.minfer.w4a16_pack.default, (weight.codes,), {})


def test_autograd():
    """Forward works where an argument requires grad, backward raises, and so does out=."""
    weight = make_weight(16, 64, 32, "integer")
    args, kwargs = weight.packed
    a = activations(2, 64)
    expected = minfer.w4a16_gemm(a, *args, **kwargs), minfer.w4a16_gemm_gated(a, *args, **kwargs)
    a.requires_grad_()
    outs = minfer.w4a16_gemm(a, *args, **kwargs), minfer.w4a16_gemm_gated(a, *args, **kwargs)
    for out, want in zip(outs, expected, strict=True):
        assert torch.equal(out, want)
        with pytest.raises(RuntimeError, match="has no backward"):
            out.sum().backward()
    with pytest.raises(RuntimeError, match="out= cannot be differentiated"):
        minfer.w4a16_gemm(a, *args, **kwargs, out=torch.empty(2, 16).half())
    w = minfer.w4a16_dequantize(args[0], args[1].clone().requires_grad_(), args[2], group_size=32, n=16, k=64)
    with pytest.raises(RuntimeError, match="has no backward"):
        w.sum().backward()


def test_meta_is_like_cpu():
    weight = make_weight(48, 136, 32, "integer", torch.bfloat16)
    args, kwargs = weight.packed
    meta = tuple(x.to("meta") for x in args)

    def same(fake, real):
        return (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")

    for a in (activations(5, 136), activations(136), activations(2, 3, 136), activations(0, 136), activations(136, 5).t()):
        a = a.bfloat16()
        assert same(minfer.w4a16_gemm(a.to("meta"), *meta, **kwargs), minfer.w4a16_gemm(a, *args, **kwargs))
        assert same(minfer.w4a16_gemm_gated(a.to("meta"), *meta, **kwargs), minfer.w4a16_gemm_gated(a, *args, **kwargs))
    assert same(minfer.w4a16_dequantize(*meta, **kwargs, n=48, k=136), minfer.w4a16_dequantize(*args, **kwargs, n=48, k=136))
    assert same(minfer.w4a16_pack(weight.codes.to("meta")), args[0])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, dynamic):
    """Every operator in one graph, with rows that change; pack and dequantize too."""
    need(backend)
    weight, gated = make_weight(64, 64, 32, "integer"), make_weight(128, 64, 32)
    perm, bias = torch.randperm(64).int(), torch.randn(64)

    def layer(x, residual, codes):
        args, kwargs = weight.packed
        y = minfer.w4a16_gemm(x, *args, **kwargs, c=residual, bias=bias, perm=perm, activation="silu")
        z = minfer.w4a16_gemm(torch.relu(y), minfer.w4a16_pack(codes), *args[1:], **kwargs) / 8
        w = minfer.w4a16_dequantize(*args, **kwargs, n=64, k=64)
        return minfer.w4a16_gemm_gated(z @ w, *gated.packed[0], **gated.packed[1])

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for shape in ((3, 64), (7, 64), (1, 64), (2, 5, 64)):
        x, residual = activations(*shape), activations(*shape)
        with torch.no_grad():
            expected, out = layer(x, residual, weight.codes), compiled(x, residual, weight.codes)
        torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_kernel_and_out(backend, kernel):
    need(backend)
    weight = make_weight(32, 64, 32)
    args, kwargs = weight.packed
    a = activations(5, 64)

    def with_kernel(a):
        y = minfer.w4a16_gemm(a, *args, **kwargs, activation="relu", constant_weights=True, kernel=kernel)
        return y + 1, minfer.w4a16_gemm_gated(a, *args[:2], **kwargs, constant_weights=True, kernel=kernel)

    def with_out(a):
        out = torch.empty(5, 32).half()
        minfer.w4a16_gemm(a, *args, **kwargs, out=out)
        return (out + 1,)

    def into_argument(a, out):
        minfer.w4a16_gemm(a, *args, **kwargs, kernel=kernel, out=out)

    for function in (with_kernel, with_out):
        for have, want in zip(torch.compile(function, fullgraph=True, backend=backend)(a), function(a), strict=True):
            torch.testing.assert_close(have, want)
    out = torch.full((5, 32), torch.nan).half()
    torch.compile(into_argument, fullgraph=True, backend=backend)(a, out)
    assert torch.equal(out, minfer.w4a16_gemm(a, *args, **kwargs))


def test_compile_bad_input():
    torch._dynamo.reset()
    call = bad_call(lambda t: {"scales": t(3, 16)}, "cpu")
    with pytest.raises(Exception, match="minfer::w4a16_gemm: scales must be"):
        torch.compile(lambda a: minfer.w4a16_gemm(**(call | {"a": a})), fullgraph=True, backend="aot_eager")(call["a"])


def test_a_format_is_one_table_entry(monkeypatch):
    """A second format needs no code beside its entry."""
    form = weight_formats.WeightFormat(4, lambda codes: (codes.float() - 8).square(), zero=1.0)
    monkeypatch.setitem(weight_formats.FORMATS, "squares", form)
    weight = make_weight(16, 64, 32)
    args, kwargs = weight.packed
    w = minfer.w4a16_dequantize(*args, **kwargs, n=16, k=64, w4_format="squares")
    group = torch.arange(64) // 32
    assert torch.equal(w, (((weight.codes.float() - 8) ** 2 - 1) * weight.scales.float()[group].t()).half())
    with pytest.raises(RuntimeError, match="w4_format must be one of int4, nf4, mxfp4, nvfp4, squares, got 'cubes'"):
        minfer.w4a16_dequantize(*args, **kwargs, n=16, k=64, w4_format="cubes")
