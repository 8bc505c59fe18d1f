"""grouped_gemm_fp8, grouped_gemm_int8, their masked forms and layers on a CPU: values against float64, every kind of scale, epilogues,
types of D, what is refused, fakes, torch.compile."""

import itertools

import minfer
import pytest
import torch
from minfer.checks import grouped_scaled_gemm as checks
from minfer.reference import grouped_scaled_gemm as reference
from torch.library import opcheck

from tests.contracts.test_registration import need
from tests.gemm.cases import padded, untouched_outside
from tests.moe import grouped_scaled_cases as cases
from tests.moe.grouped_cases import offsets_of
from tests.moe.grouped_scaled_cases import EXPERT_KINDS, LAYOUTS, ROW_KINDS, SHAPES, same_bits
from tests.scaled_gemm.cases import DTYPES, FP8, call as dense_call

SMALL = SHAPES[:5]
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "relu2")
OPERATORS = [f"grouped_gemm_{name}{masked}" for name in DTYPES for masked in ("", "_masked")] + [f"moe_ffn_{name}" for name in DTYPES]


@pytest.fixture
def kernel(monkeypatch):
    """A name that the registry has, whatever this build holds."""
    monkeypatch.setattr("minfer.checks.common.kernel_names", lambda family: frozenset({f"{family}_kernel"}))
    return "moe_scaled_kernel"


# ---- products ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_values(dtype, shape):
    """Every pair of kinds of scales; gathered and gated ones in turn."""
    for number, (a_kind, b_kind) in enumerate(itertools.product(ROW_KINDS[dtype], EXPERT_KINDS[dtype])):
        layout = (None, *LAYOUTS)[number % 4]
        if layout == "blocks" and shape[2] % 16:
            layout = None
        case = cases.make_case(dtype, shape, a_kind, b_kind, gather=number % 3 == 1, layout=layout, behind=number % 5, row_scale=number % 2)
        for out_dtype in (torch.bfloat16, torch.float16):
            have = case.call(out_dtype=out_dtype)
            assert have.dtype == out_dtype and have.is_contiguous()
            problem = cases.problem_of(case, have)
            assert problem is None, (a_kind, b_kind, layout, problem)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_epilogues(dtype):
    for number, (layout, activation) in enumerate(itertools.product((None, *LAYOUTS), (*ACTIVATIONS, "swigluoai"))):
        if activation == "swigluoai" and layout is None:
            continue
        how = dict(layout=layout, activation=activation, row_scale=True, bias=(torch.float32, torch.bfloat16)[number % 2], size=0.008)
        case = cases.make_case(dtype, (5, 30, 96, 160), "rows", "columns", **how)
        assert cases.problem_of(case, case.call()) is None, (layout, activation)
        if dtype == FP8:
            for bias in (torch.float16, torch.bfloat16, torch.float32):
                own = case.with_options(bias=case.options["bias"].to(bias), out_scale=torch.full((1,), 0.02))
                q = own.call()
                assert q.dtype == FP8 and cases.problem_of(own, q) is None, (layout, activation)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_each_expert_is_the_dense_operator(dtype):
    """Rows of one expert are those of gemm_fp8 and gemm_int8 with that expert's weight, and gated blocks those of the gated operators."""
    for layout, (a_kind, b_kind) in itertools.product((None, "blocks"), (("rows", "columns"), ("one", "one"), ("blocks128", "blocks"))):
        if dtype == torch.int8 and a_kind == "blocks128":
            continue
        case = cases.make_case(dtype, (4, 30, 416, 272), a_kind, b_kind, layout=layout)
        have = case.call()
        for expert, (begin, end) in enumerate(cases.ranges_of(case)):
            a_scale = case.a_scale if a_kind == "one" else case.a_scale[begin:end]
            b_scale = case.b_scale if b_kind == "one" else case.b_scale[expert]
            if layout and b_kind == "blocks":
                b_scale = b_scale.unflatten(0, (2, -1))
            gate = dict(activation="none") if layout else {}
            want = dense_call(dtype, gated=layout is not None)(case.a[begin:end], case.weight[expert].t(), a_scale, b_scale, **gate)
            assert torch.equal(have[begin:end], want), (layout, a_kind)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layouts_of_gates_are_orders_of_columns(dtype):
    """One problem in three orders; blocks of scales stay where they are, scales of columns and biases move."""
    case = cases.make_case(dtype, (3, 20, 288, 200), "rows", "columns", layout="halves", bias=torch.float32, activation="silu")
    kinds = {"columns": case.b_scale} | ({"blocks": cases.scale_of_experts("blocks", 3, 288, 200, is_gated=True)} if dtype == FP8 else {})
    for b_kind, b_scale in kinds.items():
        case.b_scale, case.b_kind = b_scale, b_kind
        want = case.call()
        for layout in LAYOUTS[1:]:
            order = cases.join_gate_up(*torch.arange(288).chunk(2), layout)
            moved = case.with_options(gate_layout=layout, bias=case.options["bias"][:, order])
            moved.weight, moved.b_scale = case.weight[:, order], b_scale[:, order] if b_kind == "columns" else b_scale
            assert torch.equal(moved.call(), want), (b_kind, layout)
            assert cases.problem_of(moved, want) is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_masked_is_the_sorted_form_of_its_rows(dtype):
    for a_kind, b_kind, layout in itertools.product(ROW_KINDS[dtype], EXPERT_KINDS[dtype][:3], (None, "alternating")):
        how = dict(layout=layout, activation="gelu", row_scale=True, bias=torch.bfloat16)
        case = cases.masked_case(cases.make_case(dtype, (5, 30, 96, 160), a_kind, b_kind, **how), 7)
        out = case.call()
        assert out.shape == (5, 7, 48 if layout else 96) and cases.problem_of(case, out) is None, (a_kind, b_kind, layout)
        inside = torch.arange(7)[None, :] < case.ends[:, None]
        options = case.options | {"row_scale": case.options["row_scale"][inside]}
        a_scale = case.a_scale if a_kind == "one" else case.a_scale[inside]
        a = case.a.view(torch.uint8)[inside].view(dtype)
        want = cases.operator(dtype)(a, case.weight.mT, a_scale, case.b_scale, offsets_of(case.ends), **options)
        assert torch.equal(out[inside], want) and not out[~inside].any()
        left = torch.full_like(out, 9.0)
        assert case.call(out=left) is left
        assert torch.equal(left[inside], want) and (left[~inside] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_out(dtype):
    """Any leading dimension; D has out's type where nothing says another."""
    case = cases.make_case(dtype, (4, 33, 48, 64), "rows", "experts", behind=5, gather=True)
    for d in (torch.bfloat16, torch.float16):
        want = case.call(out_dtype=d)
        out, whole = padded((33, 48), d, "cpu")
        before = out._version
        assert case.call(out=out) is out and out._version > before
        assert torch.equal(out, want) and untouched_outside(out, whole) and not out[28:].any()
    if dtype == FP8:
        coded = case.with_options(out_scale=torch.full((1,), 0.3))
        out = torch.empty(33, 48, dtype=FP8)
        assert coded.call(out=out) is out and same_bits(out, coded.call())
    for name in ("a", "weight"):
        memory = getattr(case, name).view(torch.uint8).flatten()
        if memory.numel() >= 33 * 48 * 2:
            with pytest.raises(RuntimeError, match="out must not overlap"):
                case.call(out=memory[: 33 * 48 * 2].view(torch.bfloat16).view(33, 48))


def test_unread_rows_do_not_matter():
    """Rows and scales of nobody, and weights of experts without rows, may be NaN."""
    case = cases.make_case(FP8, (5, 20, 48, 160), "blocks64", "blocks")
    case.ends = torch.tensor([4, 4, 11, 11, 15], dtype=torch.int32)
    want = case.call()
    case.a.view(torch.uint8)[15:] = 0x7F
    case.a_scale[15:] = torch.nan
    case.weight.view(torch.uint8)[[1, 3]] = 0x7F
    case.b_scale[[1, 3]] = torch.nan
    have = case.call()
    assert torch.equal(have, want) and not have[15:].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_ends(dtype):
    """No rows, no columns, no k."""
    for experts, rows, n, k in ((3, 0, 16, 32), (3, 4, 0, 32), (3, 4, 16, 0)):
        for a_kind, b_kind in (("one", "one"), ("rows", "columns"), ("blocks128", "experts")):
            case = cases.make_case(dtype, (experts, rows, n, k), a_kind, b_kind, bias=torch.float32, activation="relu")
            out = case.call()
            assert out.shape == (rows, n) and cases.problem_of(case, out) is None


def test_groups_of_scales():
    """The largest of 128, 64 and 32 that gives the number of columns; one column is a number for each row."""
    for k, columns, group in ((300, 3, 128), (300, 5, 64), (300, 10, 32), (300, 4, None), (64, 2, 32), (96, 1, None), (128, 1, None)):
        assert checks.group_of_scale(torch.ones(6, columns), (6,), k) == group
    assert checks.group_of_scale(torch.ones(2, 3, 5), (2, 3), 300) == 64 and checks.group_of_scale(torch.ones(1, 3), (1,), 300) == 128
    for k, group in ((100, 128), (128, 128), (300, None)):  # bytes are of blocks alone
        assert checks.group_of_scale(torch.ones(6, 1, dtype=torch.uint8), (6,), k) == group


def test_what_scales_of_experts_are_of():
    ones, kind = torch.ones, checks.kind_of_scale
    assert [kind(ones(shape), 4, 32, 64, False) for shape in ((), (1,), (4,), (4, 1), (4, 32), (4, 32, 1), (4, 1, 1), (1, 1), (32,))] == [
        *("all", "all", "expert", "expert", "column", "column", "block", None, None)
    ]
    assert kind(ones(1, 1, 1), 1, 32, 64, False) == "block" and kind(ones(1, 1), 1, 32, 64, False) == "expert"
    assert kind(ones(4, 4, 2), 4, 300, 200, True) == "block" and kind(ones(4, 3, 2), 4, 300, 200, True) is None
    assert kind(ones(4, 3, 2), 4, 300, 200, False) == "block" and kind(ones(4, 3, 2), 4, 300, 200, False, blocks=False) is None


def test_float64_reference():
    """Nothing is rounded in it."""
    case = cases.make_case(FP8, (4, 25, 96, 200), "blocks32", "blocks", layout="alternating", activation="silu", gather=True)
    a, b = case.a.double(), case.weight.double().mT
    have = reference.grouped_gemm_fp8(a, b, case.a_scale, case.b_scale, case.ends, out_dtype=torch.float64, **case.options)
    torch.testing.assert_close(have, cases.bounded(case).value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ends", [[5, 3, 10], [-1, 3, 10]])
@pytest.mark.parametrize("name", DTYPES)
def test_offsets_ascend(name, ends):
    a, b = cases.operand(DTYPES[name], 10, 16), cases.operand(DTYPES[name], 3, 8, 16).mT
    with pytest.raises(RuntimeError, match=f"minfer::grouped_gemm_{name}: offsets must not descend or be negative, got"):
        cases.operator(DTYPES[name])(a, b, torch.ones(1), torch.ones(1), torch.tensor(ends).int())


def test_gather_leads_outside():
    a, b = cases.operand(FP8, 6, 16), cases.operand(FP8, 2, 8, 16).mT
    gather, one = torch.tensor([5, 0, 6, 2], dtype=torch.int32), torch.ones(1)
    with pytest.raises(
        RuntimeError, match="minfer::grouped_gemm_fp8: gather must be rows of a, 0 to 5, where an expert has them, got 0 to 6"
    ):
        minfer.grouped_gemm_fp8(a, b, one, one, torch.tensor([1, 4]).int(), gather=gather)
    assert not minfer.grouped_gemm_fp8(a, b, one, one, torch.tensor([1, 2]).int(), gather=gather)[2:].any()


# ---- layers --------------------------------------------------------------------------------------------------------------------------

LAYERS = [(dtype, kind) for dtype in DTYPES.values() for kind in EXPERT_KINDS[dtype]]


@pytest.mark.parametrize("dtype, kind", LAYERS, ids=str)
def test_layer(dtype, kind):
    """What is lost is what the codes of x and of h lose: of the numbers that x's codes are, half of it."""
    for number, activation in enumerate(("silu", "swigluoai", "gelu")):
        options = dict(activation=activation, gate_layout=LAYOUTS[number], biases=(None, torch.float32, torch.bfloat16)[number])
        layer = cases.make_layer(dtype, (6, 40, 3, 320, 208), kind, **options)
        out = layer.call()
        assert out.shape == layer.x.shape and out.dtype == torch.bfloat16 and out.is_contiguous()
        x, x_scale = layer.codes()
        assert cases.off_by_norm(out, layer.truth(x)) <= (0.04 if dtype == FP8 else 0.015), activation
        assert cases.off_by_norm(out, layer.truth(layer.x.double())) <= (0.06 if dtype == FP8 else 0.025), activation
        assert torch.equal(layer.call(layer.quantized_x()[0], x_scale=x_scale), out), "quantised by the caller"
        for d in (torch.float16, torch.bfloat16):
            wide = layer.call(out_dtype=d, **{name: y.float() for name, y in layer.options.items() if name in ("b13", "b2")})
            assert wide.dtype == d and cases.off_by_norm(wide, out.double()) <= 2.0**-7


@pytest.mark.parametrize("name", DTYPES)
def test_layer_is_its_steps(name):
    """Sort, product into codes of groups, product, sum; here by the reference's own quantisation of groups."""
    dtype = DTYPES[name]
    layer = cases.make_layer(dtype, (6, 11, 3, 256, 160), "columns", x_dtype=torch.float16)
    q, x_scale = layer.quantized_x()
    token_index, offsets, inverse, scale = minfer.moe_sort(layer.ids, 6, weights=layer.weights)
    grouped = cases.operator(dtype)
    h = grouped(q, layer.w13.mT, x_scale, layer.w13_scale, offsets, gather=token_index, activation="silu", gated=True)
    codes, scales = reference.quantized_in_groups(h.float(), reference.LAYER_GROUP, dtype)
    y = grouped(codes, layer.w2.mT, scales, layer.w2_scale, offsets, row_scale=scale, out_dtype=torch.float16)
    steps = minfer.moe_combine(y, inverse)
    assert cases.off_by_norm(layer.call(), steps.double()) <= (0.02 if dtype == FP8 else 0.01)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layer_drops_foreign_experts(dtype):
    layer = cases.make_layer(dtype, (6, 11, 3, 64, 32), "experts")
    layer.ids = torch.where(layer.ids >= 3, -1, layer.ids)
    have = layer.call()
    layer.w13, layer.w2, layer.w13_scale, layer.w2_scale = (x[:3] for x in (layer.w13, layer.w2, layer.w13_scale, layer.w2_scale))
    assert torch.equal(layer.call(), have)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layer_of_any_size(dtype):
    for shape in ((2, 0, 2, 64, 32), (2, 3, 2, 64, 0), (2, 3, 2, 0, 32), (2, 3, 0, 64, 32), (1, 1, 1, 16, 8), (3, 4, 2, 40, 24)):
        for kind in EXPERT_KINDS[dtype][:2]:
            out = cases.make_layer(dtype, shape, kind).call()
            assert out.shape == (shape[1], shape[3]) and out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layer_in_float64(dtype):
    """The reference of x in float64 is the truth: nothing is quantised in it."""
    layer = cases.make_layer(dtype, (4, 9, 2, 64, 40), "columns", biases=torch.float32, gate_layout="blocks")
    call = reference.moe_ffn_int8 if dtype == torch.int8 else reference.moe_ffn_fp8
    weights = (layer.w13.double(), layer.w2.double(), layer.w13_scale, layer.w2_scale)
    have = call(layer.x.double(), *weights, layer.weights.double(), layer.ids, **layer.options)
    torch.testing.assert_close(have, layer.truth(layer.x.double()), rtol=1e-12, atol=1e-12)


# ---- what is refused -----------------------------------------------------------------------------------------------------------------


def every_bad_call(device):
    return [*cases.bad_calls(device), *cases.bad_layers(device)]


def name_of_bad_call(number):
    operator, _, _, message = every_bad_call("cpu")[number]
    return f"{operator}-{message[:40]}"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("number", range(len(every_bad_call("cpu"))), ids=name_of_bad_call)
def test_calls_that_cannot_be_right(number, device):
    operator, arguments, options, message = every_bad_call(device)[number]
    with pytest.raises(RuntimeError) as raised:
        getattr(minfer, operator)(*arguments, **options)
    text = str(raised.value)
    assert text.startswith(f"minfer::{operator}: ") and message in text, text


def test_devices_must_agree():
    case = cases.make_case(FP8, (3, 10, 32, 64), "rows", "columns", gather=True, row_scale=True, bias=torch.float32)
    arguments = dict(a=case.a, b=case.weight.mT, a_scale=case.a_scale, b_scale=case.b_scale, offsets=case.ends)
    arguments |= case.options | {"out": torch.empty(10, 32, dtype=FP8), "out_scale": torch.ones(1)}
    checks.check_grouped_gemm_fp8(**arguments)
    for name in ("b", "a_scale", "b_scale", "offsets", "bias", "gather", "row_scale", "out_scale", "out"):
        with pytest.raises(RuntimeError, match=f"minfer::grouped_gemm_fp8: {name} must be on .*cpu, got meta"):
            checks.check_grouped_gemm_fp8(**(arguments | {name: arguments[name].to("meta")}))


def test_kernel_is_checked_then_ignored(kernel):
    for dtype in DTYPES.values():
        case = cases.make_case(dtype, (2, 5, 16, 64), "one", "one", gather=True)
        assert torch.equal(case.call(kernel=f"{kernel}@gather_first=1"), case.call())
        for text, message in (
            ("moe_scaled_kernels", "nearest: moe_scaled_kernel"),
            (f"{kernel}@splits=2", "kernel option 'splits' is not known; expected gather_first"),
            (f"{kernel}@gather_first=2", "kernel option gather_first must be 0 or 1, got '2'"),
        ):
            with pytest.raises(RuntimeError, match=message):
                case.call(kernel=text)


# ---- registration --------------------------------------------------------------------------------------------------------------------


def test_schemas():
    ops = torch.ops.minfer
    epilogue = 'str activation="none", bool gated=False, str gate_layout="halves", ScalarType? out_dtype=None'
    fp8, int8 = f"{epilogue}, Tensor? out_scale=None, bool fast_accum=False, str? kernel=None", f"{epilogue}, str? kernel=None"
    operands = "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale"
    for name, rest in (("fp8", fp8), ("int8", int8)):
        for form, rows in (
            ("", f"{operands}, Tensor offsets, *, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None"),
            ("_masked", f"{operands}, Tensor counts, *, Tensor? bias=None, Tensor? row_scale=None"),
        ):
            packet = getattr(ops, f"grouped_gemm_{name}{form}")
            assert str(packet.default._schema) == f"minfer::grouped_gemm_{name}{form}({rows}, {rest}) -> Tensor"
            out = f"minfer::grouped_gemm_{name}{form}.out({rows}, {rest}, Tensor(a!) out) -> Tensor(a!)"
            assert str(packet.out._schema) == out
    layer = (
        "(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor weights, Tensor ids, *, Tensor? x_scale=None, "
        'str activation="silu", Tensor? b13=None, Tensor? b2=None, str gate_layout="halves", ScalarType? out_dtype=None'
    )
    assert str(ops.moe_ffn_fp8.default._schema) == f"minfer::moe_ffn_fp8{layer}, bool fast_accum=False) -> Tensor"
    assert str(ops.moe_ffn_int8.default._schema) == f"minfer::moe_ffn_int8{layer}) -> Tensor"


def check_op(op, args, kwargs):
    """Of e4m3 without the test of the schema, which compares operands by functions that torch does not have for it."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    tests = tests if any(x.dtype == FP8 for x in args) else ("test_schema", *tests)
    assert set(opcheck(op, args, kwargs, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", DTYPES)
def test_opcheck(name, device):
    if not cases.has_kernels(device):
        pytest.skip("kernels are for compute capability 9.0")
    how = dict(gather=True, row_scale=True, bias=torch.bfloat16, layout="halves", activation="silu", device=device)
    case = cases.make_case(DTYPES[name], (4, 30, 32, 160), "blocks64", "columns", **how)
    ops, operands = torch.ops.minfer, (case.a, case.weight.mT, case.a_scale, case.b_scale, case.ends)
    check_op(getattr(ops, f"grouped_gemm_{name}").default, operands, case.options)
    out = torch.empty(30, 16, device=device, dtype=torch.bfloat16)
    check_op(getattr(ops, f"grouped_gemm_{name}").out, operands, case.options | dict(out=out))
    case = cases.masked_case(case, 7)
    operands = (case.a, case.weight.mT, case.a_scale, case.b_scale, case.ends)
    check_op(getattr(ops, f"grouped_gemm_{name}_masked").default, operands, case.options)
    out = torch.zeros(4, 7, 16, device=device, dtype=torch.bfloat16)
    check_op(getattr(ops, f"grouped_gemm_{name}_masked").out, operands, case.options | dict(out=out))
    layer = cases.make_layer(DTYPES[name], (4, 9, 2, 64, 32), "experts", device=device, biases=torch.float32)
    operands = (layer.x, layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, layer.weights, layer.ids)
    check_op(getattr(ops, f"moe_ffn_{name}").default, operands, layer.options)


def test_no_backward():
    for dtype in DTYPES.values():
        layer = cases.make_layer(dtype, (4, 5, 2, 64, 32), "one")
        layer.x.requires_grad_()
        with pytest.raises(RuntimeError, match="no backward"):
            layer.call().sum().backward()


def test_meta_is_like_cpu():
    for dtype, gather, layout in itertools.product(DTYPES.values(), (False, True), (None, "halves")):
        case = cases.make_case(dtype, (3, 12, 32, 64), "rows", "columns", gather=gather, layout=layout, row_scale=True)
        real = case.call(out_dtype=torch.float16)
        on_meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in case.options.items()}
        arguments = (x.to("meta") for x in (case.a, case.weight.mT, case.a_scale, case.b_scale, case.ends))
        fake = cases.operator(dtype)(*arguments, **on_meta, out_dtype=torch.float16)
        assert (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", DTYPES)
def test_compile(name, backend, dynamic, kernel):
    """A layer's steps with a forced kernel and an ``out``, slabs, and a whole layer, over numbers of tokens."""
    need(backend)
    dtype = DTYPES[name]
    weights = cases.make_layer(dtype, (4, 1, 2, 256, 64), "columns")
    grouped, masked, ffn = cases.operator(dtype), cases.operator(dtype, True), getattr(minfer, f"moe_ffn_{name}")
    quantize = minfer.quantize_int8 if name == "int8" else lambda x: minfer.quantize_fp8(x, "block128")
    counts = torch.tensor([1, 0, 2, 1], dtype=torch.int32)

    def step(x, routes, ids):
        token_index, offsets, inverse, scale = minfer.moe_sort(ids, 4, weights=routes)
        how = dict(gather=token_index, activation="silu", gated=True, out_dtype=x.dtype, kernel=kernel)
        h = grouped(*[y for pair in zip(quantize(x * 2), (weights.w13.mT, weights.w13_scale), strict=True) for y in pair], offsets, **how)
        q, h_scale = minfer.quantize_int8(h) if name == "int8" else minfer.quantize_fp8(h, "token")
        y = torch.empty(h.shape[0], 256, dtype=x.dtype)
        grouped(q, weights.w2.mT, h_scale, weights.w2_scale, offsets, row_scale=scale, out=y)
        slabs = masked(q[:8].view(4, 2, -1), weights.w2.mT, h_scale[:8].view(4, 2, 1), weights.w2_scale, counts)
        layer = ffn(x, weights.w13, weights.w2, weights.w13_scale, weights.w2_scale, routes, ids)
        return minfer.moe_combine(y, inverse), layer, slabs

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (5, 7, 4):
        layer = cases.make_layer(dtype, (4, tokens, 2, 256, 64), "columns")
        results = (call(layer.x, layer.weights, layer.ids) for call in (compiled, step))
        assert all(torch.equal(have, want) for have, want in zip(*results, strict=True))
