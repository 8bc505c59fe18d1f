"""minfer.grouped_w4a16_gemm and moe_ffn_w4a16 on CPU against plain loops; errors, fakes, opcheck, torch.compile, plans; packed experts."""

import itertools
import json
import math
from dataclasses import replace

import minfer
import pytest
import torch
from minfer import quantize
from minfer.checks import grouped_quantized_gemm as checks_moe_w4a16
from minfer.quantize import round_to_nearest
from minfer.reference import grouped_quantized_gemm as reference_moe_w4a16

from tests.contracts.test_registration import check_op, need
from tests.gemm.cases import (
    ACTIVATIONS,
    DTYPES,
    name_of,
    padded,
    untouched_outside,
)
from tests.moe.grouped_cases import layer_mismatch
from tests.moe.grouped_quantized_cases import (
    BAD,
    BAD_LAYER,
    FORMS,
    bad_call,
    bad_layer,
    dense_layer,
    expected,
    gpt_oss,
    layer,
    make_call,
    make_experts,
    make_layer,
)
from tests.quantize.test_quantize import same_weights
from tests.quantized_gemm.cases import ACTIVATION

SMALL = [form for form in FORMS if form[1] in (16, 32)]


@pytest.fixture
def kernel(monkeypatch):
    """A name that the registry has, whatever this build holds."""
    monkeypatch.setattr("minfer.checks.common.kernel_names", lambda family: frozenset({f"{family}_kernel"}))
    return "moe_w4a16_kernel"


def loop(a, offsets, dense, *, alpha=None, bias=None, gather=None, row_scale=None, activation="none", gated=False):
    """The definition, row by row, in float64."""
    rows, n = (a if gather is None else gather).shape[0], dense.shape[1]
    out = torch.zeros(rows, n // 2 if gated else n, dtype=torch.float64)
    for r in range(rows):
        e = int((offsets <= r).sum())
        if e == len(offsets):
            continue
        y = dense[e].double() @ a[int(gather[r]) if gather is not None else r].double()
        y = y if alpha is None else y * alpha[e].double()
        y = y if bias is None else y + bias[e].double()
        if gated:
            gate, up = (side.flatten() for side in y.view(-1, 2, 8).unbind(1))
            if activation == "swigluoai":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
                y = gate * torch.sigmoid(1.702 * gate) * up
            else:
                y = ACTIVATION[activation](gate) * up
        else:
            y = ACTIVATION[activation](y)
        out[r] = y if row_scale is None else y * row_scale[r].double()
    return out


# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_against_the_definition(dtype, form):
    for number, (n, k) in enumerate(((64, 64), (80, 136), (16, 328))):
        experts = make_experts(form[0], 5, n, k, *form[1:], dtype, alpha=number != 1)
        dense = experts.dense()
        for gated, behind in ((False, 0), (True, 3)):
            args, kwargs = make_call(experts, (3, 0, 9, 1, 4), gather=gated, row_scale=number != 2, bias=number != 0, behind=behind)
            count = len(ACTIVATIONS)
            for activation in (ACTIVATIONS[number % count], "swigluoai" if gated else ACTIVATIONS[(number + 2) % count]):
                call = kwargs | {"activation": activation, "gated": gated}
                out = experts.gemm(*args, **call)
                assert out.dtype == dtype and out.is_contiguous() and not out[17:].any()
                want = loop(*args, dense, alpha=experts.alpha, **call)
                assert (out.double() - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max(), (n, k, call.keys())
                assert expected(experts, args, call, dense).mismatch(out) is None


@pytest.mark.parametrize("form", SMALL, ids=str)
def test_float64_reference(form):
    """reference_moe_w4a16 in float64 is the formula on the 16-bit weights."""
    experts = make_experts(form[0], 4, 32, 96, *form[1:], alpha=True)
    (a, offsets), kwargs = make_call(experts, (2, 0, 5, 3), gather=True, row_scale=True, bias=True)
    a, kwargs["bias"] = a.double(), kwargs["bias"].double()
    out = reference_moe_w4a16.grouped_w4a16_gemm(a, *experts.packed, offsets, **experts.form, **kwargs, activation="gelu", gated=True)
    want = loop(a, offsets, experts.dense(), alpha=experts.alpha, **kwargs, activation="gelu", gated=True)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_each_expert_is_the_dense_operator():
    """Rows of one expert are those of w4a16_gemm, and of its gated form, with that expert's weight."""
    for name, group_size, zeros in SMALL:
        experts = make_experts(name, 3, 32, 64, group_size, zeros, torch.bfloat16, alpha=True)
        (a, offsets), _ = make_call(experts, (4, 2, 5))
        out, gated = experts.gemm(a, offsets), experts.gemm(a, offsets, gated=True, activation="silu")
        for e, (begin, end) in enumerate(itertools.pairwise((0, *offsets.tolist()))):
            weight = [None if x is None else x[e] for x in experts.packed]
            form = {"group_size": group_size, "w4_format": name, "alpha": float(experts.alpha[e])}
            assert torch.equal(out[begin:end], minfer.w4a16_gemm(a[begin:end], *weight, **form))
            assert torch.equal(gated[begin:end], minfer.w4a16_gemm_gated(a[begin:end], *weight, **form))


def test_out():
    experts = make_experts("int4", 4, 48, 64, 32, "integer")
    args, kwargs = make_call(experts, (2, 0, 5, 3), row_scale=True, behind=4)
    want = experts.gemm(*args, **kwargs)
    out, whole = padded((14, 48), torch.float16, "cpu")
    before = out._version
    assert experts.gemm(*args, **kwargs, out=out).data_ptr() == out.data_ptr() and out._version > before
    assert torch.equal(out, want) and untouched_outside(out, whole) and not out[10:].any()


def test_empty():
    for name, group_size, zeros in SMALL:
        for n, k, counts in ((16, 64, (0, 0, 0)), (0, 64, (2, 0, 1)), (16, 0, (2, 0, 1))):
            experts = make_experts(name, 3, n, k, group_size, zeros)
            args, kwargs = make_call(experts, counts, bias=True)
            out = experts.gemm(*args, **kwargs, activation="relu")
            assert out.shape == (sum(counts), n)
            if k == 0:  # the epilogue is left
                e = torch.tensor([0, 0, 2])
                assert torch.equal(out, kwargs["bias"][e].relu())


def test_scales_in_their_own_type():
    for name, group_size, own in (("mxfp4", 32, torch.float8_e8m0fnu), ("nvfp4", 16, torch.float8_e4m3fn)):
        experts = make_experts(name, 3, 32, 64, group_size)
        args, _ = make_call(experts, (1, 0, 4))
        assert torch.equal(replace(experts, scales=experts.scales.view(own)).gemm(*args), experts.gemm(*args))
        call, kwargs = make_layer(name, 3, 5, 2, 64, 32, torch.float16, "cpu", group_size=group_size)
        x, w13, w2, *routes = call
        out = layer(x, *(replace(w, scales=w.scales.view(own)) for w in (w13, w2)), *routes)
        assert torch.equal(out, layer(*call, **kwargs))


def test_kernel_is_checked_then_ignored(kernel):
    experts = make_experts("int4", 2, 16, 64, 32)
    args, _ = make_call(experts, (3, 1))
    assert torch.equal(experts.gemm(*args, kernel=kernel), experts.gemm(*args))
    with pytest.raises(RuntimeError, match="nearest: moe_w4a16_kernel"):
        experts.gemm(*args, kernel="moe_w4a16_kernels")


# ---- the layer -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layer(dtype, form):
    """moe_ffn_w4a16 is moe_ffn with the dequantised weights, and its steps."""
    name, group_size, zeros = form
    for activation, extras in (("silu", False), ("swigluoai", True)):
        how = {"group_size": group_size, "zeros": zeros, "alpha": extras, "biases": extras}
        args, kwargs = make_layer(name, 6, 11, 3, 64, 40, dtype, "cpu", **how)
        kwargs["activation"] = activation
        out = layer(*args, **kwargs)
        assert layer_mismatch(out, *dense_layer(args, kwargs)) is None
        x, w13, w2, weights, ids = args
        token_index, offsets, inverse, scale = minfer.moe_sort(ids, 6, weights=weights)
        h = w13.gemm(x, offsets, gather=token_index, bias=kwargs.get("b13"), activation=activation, gated=True)
        y = w2.gemm(h, offsets, bias=kwargs.get("b2"), row_scale=scale)
        assert layer_mismatch(minfer.moe_combine(y, inverse), *dense_layer(args, kwargs)) is None


def test_layer_drops_foreign_experts():
    args, kwargs = make_layer("int4", 6, 11, 3, 64, 32, torch.bfloat16, "cpu")
    *rest, ids = args
    args = (*rest, torch.where(ids >= 3, -1, ids).int())
    assert layer_mismatch(layer(*args, **kwargs), *dense_layer(args, kwargs)) is None


# ---- errors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD)
def test_bad_calls(case, device):
    arguments, message = BAD[case]
    with pytest.raises(RuntimeError, match=r"minfer::grouped_w4a16_gemm(\.out)?: " + message):
        minfer.grouped_w4a16_gemm(**bad_call(arguments, device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD_LAYER)
def test_bad_layers(case, device):
    arguments, message = BAD_LAYER[case]
    with pytest.raises(RuntimeError, match="minfer::moe_ffn_w4a16: " + message):
        minfer.moe_ffn_w4a16(**bad_layer(arguments, device))


def test_good_calls():
    """What the bad calls differ from is right."""
    assert minfer.grouped_w4a16_gemm(**bad_call(lambda t: {}, "cpu")).shape == (10, 32)
    assert minfer.moe_ffn_w4a16(**bad_layer(lambda t: {}, "cpu")).shape == (5, 64)


def test_devices_must_agree():
    def optional(t):
        more = {"zeros": t(4, 2, 32), "alpha": t(4, dtype=torch.float32), "bias": t(4, 32), "gather": t(10, dtype=torch.int32)}
        return more | {"row_scale": t(10, dtype=torch.float32), "out": t(10, 32)}

    for name in ("qweight", "scales", "zeros", "offsets", "alpha", "bias", "gather", "row_scale", "out"):
        call = bad_call(optional, "cpu")
        checks_moe_w4a16.check_grouped_w4a16_gemm(**call)
        call[name] = call[name].to("meta")
        with pytest.raises(RuntimeError, match=f"minfer::grouped_w4a16_gemm: {name} must be on .*cpu, got meta"):
            checks_moe_w4a16.check_grouped_w4a16_gemm(**call)


# ---- registration --------------------------------------------------------------------------------------------------------------


def test_schemas():
    ops = torch.ops.minfer
    grouped = (
        '(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros, Tensor offsets, *, int group_size=128, str w4_format="int4", '
        'Tensor? alpha=None, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None, str activation="none", bool gated=False, '
        "str? quant=None, Tensor? scale=None, str? kernel=None"
    )
    assert str(ops.grouped_w4a16_gemm.default._schema) == f"minfer::grouped_w4a16_gemm{grouped}) -> Tensor"
    assert str(ops.grouped_w4a16_gemm.out._schema) == f"minfer::grouped_w4a16_gemm.out{grouped}, Tensor(a!) out) -> Tensor(a!)"
    assert str(ops.moe_ffn_w4a16.default._schema) == (
        "minfer::moe_ffn_w4a16(Tensor x, Tensor w13, Tensor w13_scales, Tensor? w13_zeros, Tensor w2, Tensor w2_scales, Tensor? w2_zeros, "
        'Tensor weights, Tensor ids, *, int group_size=128, str w4_format="int4", Tensor? alpha13=None, Tensor? alpha2=None, '
        'str activation="silu", Tensor? b13=None, Tensor? b2=None) -> Tensor'
    )


@pytest.mark.parametrize("form", SMALL, ids=str)
def test_opcheck(form, kernel):
    experts = make_experts(form[0], 4, 32, 64, *form[1:], alpha=True)
    (a, offsets), kwargs = make_call(experts, (3, 0, 2, 4), gather=True, row_scale=True, bias=True)
    operands = (a, *experts.packed, offsets)
    for case in ({}, {"activation": "silu", "gated": True}, {"kernel": kernel}):
        check_op(torch.ops.minfer.grouped_w4a16_gemm.default, operands, experts.form | kwargs | case)
        out = torch.empty(9, 16 if "gated" in case else 32).half()
        check_op(torch.ops.minfer.grouped_w4a16_gemm.out, operands, experts.form | kwargs | case | {"out": out})


@pytest.mark.parametrize("form", SMALL, ids=str)
def test_opcheck_layer(form):
    (x, w13, w2, weights, ids), kwargs = make_layer(
        form[0], 4, 7, 2, 64, 32, torch.bfloat16, "cpu", group_size=form[1], zeros=form[2], alpha=True, biases=True
    )
    kwargs |= {"group_size": form[1], "w4_format": form[0], "alpha13": w13.alpha, "alpha2": w2.alpha}
    check_op(torch.ops.minfer.moe_ffn_w4a16.default, (x, *w13.packed, *w2.packed, weights, ids), kwargs)


def test_autograd():
    """Forward works where an argument requires grad, backward raises, and so does out=."""
    experts = make_experts("int4", 3, 16, 64, 32)
    (a, offsets), _ = make_call(experts, (2, 1, 2))
    a.requires_grad_()
    with pytest.raises(RuntimeError, match="has no backward"):
        experts.gemm(a, offsets).sum().backward()
    with pytest.raises(RuntimeError, match="out= cannot be differentiated"):
        experts.gemm(a, offsets, out=torch.empty(5, 16).half())
    args, kwargs = make_layer("int4", 4, 5, 2, 64, 32, torch.float16, "cpu")
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="has no backward"):
        layer(*args, **kwargs).sum().backward()


def test_meta_is_like_cpu():
    for name, group_size, zeros in SMALL:
        experts = make_experts(name, 3, 32, 64, group_size, zeros, torch.bfloat16)
        for gated, gather in itertools.product((False, True), repeat=2):
            (a, offsets), kwargs = make_call(experts, (4, 0, 3), gather=gather, row_scale=True)
            real = experts.gemm(a, offsets, **kwargs, gated=gated)
            on_meta = {key: x.to("meta") for key, x in kwargs.items()}
            fake = experts.to("meta").gemm(a.to("meta"), offsets.to("meta"), **on_meta, gated=gated)
            assert (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend, dynamic, kernel):
    """A layer's steps with a forced kernel, an ``out`` and a whole layer, over numbers of tokens."""
    need(backend)
    (_, w13, w2, _, _), _ = make_layer("int4", 4, 1, 2, 64, 32, torch.float16, "cpu", zeros="integer")
    packed13, packed2, form = w13.packed, w2.packed, {"group_size": 32}

    def step(x, weights, ids):
        token_index, offsets, inverse, scale = minfer.moe_sort(ids, 4, weights=weights)
        how = {"gather": token_index, "activation": "silu", "gated": True, "kernel": kernel}
        h = minfer.grouped_w4a16_gemm(x * 2, *packed13, offsets, **form, **how)
        y = torch.empty(h.shape[0], 64, dtype=x.dtype)
        minfer.grouped_w4a16_gemm(h, *packed2, offsets, **form, row_scale=scale, out=y)
        return minfer.moe_combine(y, inverse) + minfer.moe_ffn_w4a16(x, *packed13, *packed2, weights, ids, **form)

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (3, 7, 2):
        (x, _, _, weights, ids), _ = make_layer("int4", 4, tokens, 2, 64, 32, torch.float16, "cpu")
        assert torch.equal(compiled(x, weights, ids), step(x, weights, ids))


# ---- plans ---------------------------------------------------------------------------------------------------------------------


def plan(rows, experts, n, k, *form, kernel=None):
    return json.loads(torch.ops.minfer._plan_grouped([rows, experts, n, k], "bf16", False, False, kernel, False, -1, *form))


def test_plans():
    """Old calls plan 16-bit weights; the arguments of quantised ones are checked, and their floor counts their bytes."""
    dense = plan(16, 8, 4096, 4096)
    assert dense == plan(16, 8, 4096, 4096, None)
    if not minfer.kernels("moe_w4a16"):
        pytest.skip("the table has no grouped kernels of 4-bit weights")
    few = plan(16, 8, 28672, 4096, "int4", 128)
    assert few["kernel"].startswith("moe_w4a16_sm90_bf16_int4_") and few["predicted_us"] >= few["floor_us"]
    assert few["floor_us"] < 0.35 * plan(16, 8, 28672, 4096)["floor_us"]
    assert plan(16, 8, 28672, 4096, "int4", 128, True)["floor_us"] > few["floor_us"]
    assert "_int4_" in plan(16, 8, 28672, 4096, "int4", 128, kernel=few["kernel"])["kernel"]
    for form, message in (
        (("int8", 128), "w4_format must be one of int4, nf4, mxfp4, nvfp4, got 'int8'"),
        (("int4", 48), "group_size must be -1 .* or a power of two from 32 on, got 48"),
        (("mxfp4", 64), "group_size must be 32 for mxfp4, got 64"),
        (("mxfp4", 32, True), "has_zeros must be False for mxfp4"),
    ):
        with pytest.raises(RuntimeError, match=message):
            plan(16, 8, 4096, 4096, *form)


@pytest.mark.skipif(not minfer.kernels("moe_w4a16"), reason="the table has no grouped kernels of 4-bit weights")
def test_plans_always_answer():
    """int4 with every group size and kind of zeros, mxfp4 and nvfp4, from one row to many."""
    forms = [(name, group_size, zeros != "none") for name, group_size, zeros in FORMS if name != "nf4"]
    for form, rows, (experts, n, k) in itertools.product(
        forms, (0, 1, 64, 4096), ((8, 28672, 4096), (128, 1536, 2048), (3, 48, 136), (2, 24, 72))
    ):
        p = plan(rows, experts, n, k, *form)
        assert f"_{form[0]}_" in p["kernel"] and p["predicted_us"] >= p["floor_us"], (form, rows, p)


# ---- packed experts ------------------------------------------------------------------------------------------------------------


def halves_of(packed, dim=1):
    """Rows in pack_gate_up's order -> all gate, then all up rows."""
    blocks = packed.unflatten(dim, (-1, 2, 8))
    return blocks.movedim(dim + 1, dim).flatten(dim, dim + 2)


FORMATS = ("int4", "nf4", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_quantize(dtype, name):
    """Each expert is what quantize_w4 makes of it, whatever the order of its gate and up rows."""
    weight, bias = torch.randn(3, 48, 128).to(dtype), torch.randn(3, 48).to(dtype)
    for symmetric in (True, False) if name == "int4" else (True,):
        plain = quantize.quantize_w4_experts(weight, None, symmetric, name, bias=bias)
        alone = [quantize.quantize_w4(w, None, symmetric, name, bias=b) for w, b in zip(weight, bias, strict=True)]
        same_weights(plain, quantize.stack_experts(alone))
        assert not plain.gated and (plain.n, plain.k, plain.w4_format) == (48, 128, name)
        assert (plain.zeros is None) == symmetric and (plain.alpha is None) == (name != "nvfp4")
        assert torch.equal(plain.dequantize(dtype), torch.stack([w.dequantize(dtype) for w in alone]))
        assert torch.equal(plain.bias, bias)
        alternating = lambda x: torch.stack(x.chunk(2, 1), 2).flatten(1, 2)  # noqa: E731
        blocks = lambda x: torch.stack([minfer.pack_gate_up(*e.chunk(2)) for e in x])  # noqa: E731
        for layout, order in (("halves", lambda x: x), ("alternating", alternating), ("blocks", blocks)):
            gated = quantize.quantize_w4_experts(
                order(weight), None, symmetric, name, gated=True, gate_layout=layout, bias=order(bias)
            )  # fmt: skip
            assert gated.gated and torch.equal(halves_of(gated.dequantize(dtype)), plain.dequantize(dtype)), layout
            assert torch.equal(halves_of(gated.bias), bias)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_multiply(name):
    """gemm and moe_ffn_w4a16 of quantised experts are those of the weights that they stand for."""
    w13, w2 = torch.randn(4, 64, 64).bfloat16() / 8, torch.randn(4, 64, 32).bfloat16() / 6
    first = quantize.quantize_w4_experts(w13, 16 if name == "nvfp4" else 32, format=name, gated=True, bias=torch.randn(4, 64).bfloat16())
    second = quantize.quantize_w4_experts(w2, first.group_size, format=name)
    (x, _, _, weights, ids), _ = make_layer("int4", 4, 9, 2, 64, 32, torch.bfloat16, "cpu")
    form = {"group_size": first.group_size, "w4_format": name, "alpha13": first.alpha, "alpha2": second.alpha}
    out = minfer.moe_ffn_w4a16(x, *first.packed, *second.packed, weights, ids, **form, b13=first.bias)
    dense = (x, *(replace(w, alpha=None).dequantize() for w in (first, second)), weights, ids)
    how = {"gate_layout": "blocks", "alpha13": first.alpha, "alpha2": second.alpha, "b13": first.bias}
    assert layer_mismatch(out, dense, how) is None
    assert torch.equal(first.ffn(x, second, weights, ids), out), "alphas, biases and all"
    token_index, offsets, inverse, scale = minfer.moe_sort(ids, 4, weights=weights)
    h = first.gemm(x, offsets, gather=token_index, activation="silu")
    assert layer_mismatch(minfer.moe_combine(second.gemm(h, offsets, row_scale=scale), inverse), dense, how) is None
    again = minfer.grouped_w4a16_gemm(x, offsets=offsets, gather=token_index, activation="silu", **first.arguments())
    assert torch.equal(again, h)
    assert first.to("meta").gemm(x.to("meta"), offsets.to("meta")).shape == (9, 32)


def test_layers_that_do_not_fit():
    w13, w2 = torch.randn(2, 64, 64).half(), torch.randn(2, 64, 32).half()
    first, second = quantize.quantize_w4_experts(w13, 32, gated=True), quantize.quantize_w4_experts(w2, 32)
    x, weights, ids = torch.randn(3, 64).half(), torch.rand(3, 1), torch.zeros(3, 1).int()
    for gate_up, down, message in (
        (second, first, "ffn: w13 must be gated and down must not be, got False and True"),
        (first, first, "ffn: w13 must be gated and down must not be, got True and True"),
        (first, quantize.quantize_w4_experts(w2, 64), "ffn: down must have the group_size of w13, 32, got 64"),
        (first, quantize.quantize_w4_experts(w2, 32, format="nf4"), "ffn: down must have the w4_format of w13, int4, got nf4"),
    ):
        with pytest.raises(ValueError, match=message):
            gate_up.ffn(x, down, weights, ids)


def test_stack_of_gate_and_up():
    """w1 and w3 of Mixtral's checkpoints: codes, scales, zeros and biases meet in blocks of 8."""
    for name, symmetric in (("int4", True), ("int4", False), ("nf4", True), ("mxfp4", True)):
        weight, bias = torch.randn(3, 96, 136).half(), torch.randn(3, 96)
        rows = lambda side, x: x[:, :48] if side == 0 else x[:, 48:]  # noqa: E731
        sides = [
            [quantize.quantize_w4(w, None, symmetric, name, bias=b) for w, b in zip(rows(s, weight), rows(s, bias), strict=True)]
            for s in range(2)
        ]
        stacked = quantize.stack_experts(*sides)
        want = quantize.quantize_w4_experts(weight, None, symmetric, name, gated=True, bias=bias.half() if name != "mxfp4" else bias)
        same_weights(stacked, want)
        whole = [quantize.quantize_w4(w, None, symmetric, name, bias=b) for w, b in zip(weight, bias, strict=True)]
        same_weights(quantize.stack_experts(whole, gated=True), want)


def test_stack_with_and_without_zeros():
    """An expert whose zero points are all 8 is loaded without them; beside others it gets them back."""
    asymmetric = quantize.quantize_w4(torch.rand(16, 64).half(), 32, symmetric=False)
    symmetric = quantize.quantize_w4(torch.randn(16, 64).half(), 32)
    stacked = quantize.stack_experts([symmetric, asymmetric])
    assert torch.equal(stacked.zeros[0], torch.full_like(stacked.zeros[0], 8)) and torch.equal(stacked.zeros[1], asymmetric.zeros)
    assert torch.equal(stacked.dequantize(), torch.stack([symmetric.dequantize(), asymmetric.dequantize()]))


def test_stack_of_checkpoints():
    """Mixtral's experts in GPTQ files, w1 and w3 on their own."""
    from tests.quantize.test_quantize import gptq_tensors

    def loaded():
        codes, scales, zeros = torch.randint(0, 16, (48, 256)), torch.rand(2, 48).mul_(0.02).half(), torch.randint(0, 16, (2, 48))
        return quantize.from_gptq(gptq_tensors(codes, scales, zeros))

    w1, w3 = [loaded() for _ in range(3)], [loaded() for _ in range(3)]
    stacked = quantize.stack_experts(w1, w3)
    want = torch.stack([minfer.pack_gate_up(gate.dequantize(), up.dequantize()) for gate, up in zip(w1, w3, strict=True)])
    assert torch.equal(stacked.dequantize(), want) and (stacked.n, stacked.group_size) == (96, 128)


@pytest.mark.parametrize("bias", [False, True])
def test_gpt_oss(bias):
    tensors, (gate_up, down) = gpt_oss(bias=bias)
    first, second = quantize.from_gpt_oss(tensors)
    assert (first.w4_format, first.group_size, first.gated, second.gated, first.alpha) == ("mxfp4", 32, True, False, None)
    alternating = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
    assert torch.equal(halves_of(first.dequantize()).double(), alternating) and torch.equal(second.dequantize().double(), down)
    same_weights(
        first, quantize.from_gpt_oss(tensors | {"gate_up_proj_scales": tensors["gate_up_proj_scales"].view(torch.float8_e8m0fnu)})[0]
    )
    x, weights = torch.randn(5, 64).bfloat16(), torch.rand(5, 2)
    ids = torch.rand(5, 3).argsort(-1)[:, :2].int()
    biases = {"b13": first.bias, "b2": second.bias}
    form = {"group_size": 32, "w4_format": "mxfp4", "activation": "swigluoai"}
    out = minfer.moe_ffn_w4a16(x, *first.packed, *second.packed, weights, ids, **form, **biases)
    on_disk = {"b13": tensors.get("gate_up_proj_bias"), "b2": tensors.get("down_proj_bias")}
    dense = (x, gate_up.bfloat16(), down.bfloat16(), weights, ids)
    assert layer_mismatch(out, dense, on_disk | {"activation": "swigluoai", "gate_layout": "alternating"}) is None


def test_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    dense = torch.randn(3, 48, 128).half()
    bias = torch.randn(3, 48).half()
    weights = {f"experts.{name}": quantize.quantize_w4_experts(dense, format=name, gated=True, bias=bias) for name in FORMATS}
    weights["experts.zeros"] = quantize.quantize_w4_experts(dense, 32, symmetric=False)
    weights["alone"] = quantize.quantize_w4(dense[0])
    quantize.to_safetensors(weights, tmp_path / "weights.safetensors")
    loaded = quantize.from_safetensors(tmp_path / "weights.safetensors")
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert type(loaded[name]) is type(weight)
        same_weights(loaded[name], weight)


def good_weights(**changes):
    weights = [quantize.quantize_w4(torch.randn(16, 64).half(), 32) for _ in range(3)]
    return [*weights[:2], replace(weights[2], **changes)]


def test_bad_stacks():
    good = good_weights()
    other = quantize.quantize_w4(torch.randn(16, 64).half(), 64)
    nvfp4 = [quantize.quantize_w4(torch.randn(16, 64).half() * s, format="nvfp4") for s in (1, 2)]
    for arguments, message in (
        (([],), "there must be 1 to 512 experts, got 0"),
        (([*good, other],), "weights must have the same group_size, got 32 and, of weight 3, 64"),
        ((good_weights(perm=torch.arange(64).int()),), "weight 2 has a perm: grouped products take no act-order"),
        ((good_weights(scales=good[0].scales.bfloat16()),), "weights must have the same dtype, got torch.float16 and, of weight 2"),
        ((good_weights(bias=torch.zeros(16)),), "weights must have the same bias, got None and, of weight 2, torch.float32"),
        ((good, good[:2]), "up must have as many experts as weights, 3, got 2"),
        (([nvfp4[0]], [nvfp4[1]]), "gate and up of an expert must have the same alpha, got .* of 0"),
    ):
        with pytest.raises(ValueError, match="stack_experts: " + message):
            quantize.stack_experts(*arguments)
    for keywords, message in (
        ({"gated": True, "gate_layout": "thirds"}, "gate_layout must be one of halves, alternating, blocks, got 'thirds'"),
        ({"gate_layout": "alternating"}, "gate_layout alternating needs gated = True"),
        ({"up": good, "gated": True}, "gated must be False where up is given"),
        ({"up": good, "gate_layout": "blocks"}, "gate_layout must be halves where up is given, got 'blocks'"),
    ):
        with pytest.raises(ValueError, match="stack_experts: " + message):
            quantize.stack_experts(good, **keywords)
    with pytest.raises(ValueError, match="stack_experts: gate and up rows must be a multiple of 16 together, got 24"):
        quantize.stack_experts([quantize.quantize_w4(torch.randn(24, 64).half(), 32)], gated=True)


def test_bad_quantize():
    for weight, keywords, message in (
        (torch.zeros(16, 64).half(), {}, r"quantize_w4_experts: weight must be \[experts, n, k\], got \[16, 64\]"),
        (torch.zeros(2, 24, 64).half(), {"gated": True}, "quantize_w4_experts: gate and up rows must be a multiple of 16 together, got 24"),
        (torch.zeros(2, 16, 64).half(), {"bias": torch.zeros(16)}, r"quantize_w4_experts: bias must be \[2, 16\], got \[16\]"),
        (torch.zeros(2, 16, 64).half(), {"gate_layout": "blocks"}, "quantize_w4_experts: gate_layout blocks needs gated = True"),
        (torch.zeros(2, 16, 60).half(), {}, r"quantize_w4_experts: weight must be \[n, k\] in multiples of 8, got \[16, 60\]"),
        (torch.full((2, 16, 64), math.nan).half(), {}, "quantize_w4_experts: weight must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize.quantize_w4_experts(weight, **keywords)


def test_bad_gpt_oss():
    tensors, _ = gpt_oss()
    down, _ = gpt_oss(inter=64)
    for changed, message in (
        (
            {name: x for name, x in tensors.items() if name != "down_proj_scales"},
            "tensor 'down_proj_scales' is missing, got down_proj_bias",
        ),
        (tensors | {"gate_up_proj_blocks": tensors["gate_up_proj_blocks"][0]}, r"gate_up_proj_blocks must be \[experts, n, k / 32, 16\]"),
        (tensors | {"gate_up_proj_bias": torch.zeros(3, 8)}, r"gate_up_proj_bias must be \[3, 64\], got \[3, 8\]"),
        (tensors | {"gate_up_proj_scales": torch.zeros(3, 64, 1).byte()}, r"gate_up_proj_scales must be \[3, 64, 2\], got \[3, 64, 1\]"),
        (
            tensors | {name: x for name, x in down.items() if name.startswith("down")},
            r"the projections must have the same experts, hidden and inter, got \(3, 64, 32\) and \(3, 64, 64\)",
        ),
    ):
        with pytest.raises(ValueError, match="from_gpt_oss: " + message):
            quantize.from_gpt_oss(changed)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_quantised_several_at_a_time(name, monkeypatch):
    """The last ones fewer; with the codes of each alone."""
    weight, bias = torch.randn(7, 64, 128).bfloat16(), torch.randn(7, 64).bfloat16()
    want = quantize.quantize_w4_experts(weight, format=name, gated=True, gate_layout="alternating", bias=bias)
    for experts in (1, 3):
        monkeypatch.setattr(round_to_nearest, "_CHUNK_CPU", experts * 64 * 128)
        have = quantize.quantize_w4_experts(weight, format=name, gated=True, gate_layout="alternating", bias=bias)
        same_weights(have, want)
