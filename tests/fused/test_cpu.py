"""The operators between the GEMMs on CPU against float64; their errors, fakes, opcheck and torch.compile."""

import math
import re

import minfer
import pytest
import torch
from minfer.checks import fused as checks_fused
from torch.overrides import TorchFunctionMode

from tests.contracts import numerics_cases as numerics
from tests.contracts.test_registration import check_op, need
from tests.fused.cases import (
    BAD,
    BAD_CASES,
    BAD_HADAMARD,
    CASES,
    HADAMARD_BLOCKS,
    HALVES,
    QUANTIZED,
    QUANTS,
    ROWS,
    SCALES,
    bad_call,
    check_hadamard,
    check_stored,
    function,
    given_scale,
    good_call,
    views_of,
    widths_of,
)
from tests.gemm.cases import name_of

LARGEST = 1 << 19  # elements of x


def problems(case, dtype):
    """x and factors of many shapes."""
    for i, width in enumerate(widths_of(case, LARGEST)):
        for rows in ROWS:
            if rows * width * case.columns <= LARGEST:
                yield (f"{rows} rows of {width}", *case.make(rows, width, dtype, scale=SCALES[i % len(SCALES)]))


ROW_CASES = [pytest.param(case, dtype, id=f"{name}-{name_of(dtype)}") for name, case in CASES.items() for dtype in case.dtypes()]
QUANTIZED_CASES = [pytest.param(case, dtype, id=f"{name}-{name_of(dtype)}") for name, case in QUANTIZED.items() for dtype in case.dtypes()]


# ---- values --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, dtype", ROW_CASES)
def test_rows(case, dtype):
    for what, x, factors in problems(case, dtype):
        out = case.call(x, factors)
        assert out.is_contiguous()
        check_stored(case, x, factors, out, what)


@pytest.mark.parametrize("case, dtype", ROW_CASES)
def test_views_and_out(case, dtype):
    """Any view gives the same bits, and so does any out, x itself among them where it may be."""
    x, factors = case.make(6, 48, dtype)
    want = case.call(x, factors)
    for what, view in views_of(x):
        assert torch.equal(case.call(view, factors).reshape(want.shape), want), what
    for what, out in views_of(torch.full_like(want, math.nan)):
        result = case.call(x.view(*out.shape[:-1], -1), factors, out=out)
        assert result is out and torch.equal(out.reshape(want.shape), want), what
    if case.columns == 1:
        assert torch.equal(case.call(x, factors, out=x), want)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("case, dtype", QUANTIZED_CASES)
def test_quantized(case, dtype, quant):
    for what, x, factors in problems(case, dtype):
        scale = given_scale(quant)
        q, scales = case.quantized(x, factors, quant=quant, **scale)
        numerics.check_codes(q, scales, case.exact(x, factors), quant, f"{case.name}, {what}", **scale)
    for what, view in views_of(x := case.make(6, 136, dtype)[0]):
        factors = case.make(1, 136, dtype)[1]
        scale = given_scale(quant)
        (q, scales), (view_q, view_scales) = (case.quantized(y, factors, quant=quant, **scale) for y in (x, view))
        assert torch.equal(view_q.reshape(q.shape).view(torch.int8), q.view(torch.int8)), what
        assert torch.equal(view_scales.reshape(scales.shape), scales), what


@pytest.mark.parametrize("quant", (None, *QUANTS))
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_add_rms_norm(dtype, quant):
    """The sum is rounded and stored, and the norm, of 8 and of 16 bits, is that of the rounded sum: to the bit as of rms_norm."""
    for rows, width in ((0, 8), (1, 7), (6, 896), (129, 200)):
        x, residual = (torch.randn(rows, width).to(dtype) for _ in range(2))
        weight = torch.randn(width).to(dtype)
        total = numerics.rounded(x.double() + residual.double(), dtype).to(dtype)
        for what, view in list(views_of(residual.clone())):
            own = x.view(view.shape)
            if quant is None:
                y = minfer.add_rms_norm(own, view, weight, weight_offset=1.0)
                assert torch.equal(y, minfer.rms_norm(view, weight, weight_offset=1.0)), what
            else:
                options = given_scale(quant) | {"quant": quant, "weight_offset": 1.0}
                norm = torch.full_like(own, math.nan)
                q, scales = minfer.add_rms_norm(own, view, weight, norm=norm, **options)
                want, want_scales = minfer.rms_norm(view, weight, **options)
                assert torch.equal(q.view(torch.int8), want.view(torch.int8)) and torch.equal(scales, want_scales), what
                assert torch.equal(norm, minfer.rms_norm(view, weight, weight_offset=1.0)), what
            assert torch.equal(view.reshape(total.shape), total), what


def test_given_scales():
    """fp8_tensor returns the caller's scale; the operators themselves have none to return."""
    x, scale = torch.randn(3, 32).half(), torch.tensor([0.5])
    for codes in (
        minfer.rms_norm(x, quant="fp8_tensor", scale=scale),
        minfer.add_rms_norm(x, x.clone(), quant="fp8_tensor", scale=scale),
        minfer.silu_and_mul(x, quant="fp8_tensor", scale=scale),
        minfer.quantize_fp8(x, "tensor", scale),
    ):
        assert codes[1] is scale
    assert minfer.rms_norm_quantized(x, "fp8_tensor", scale=scale)[1].shape == (0,)


def test_functions():
    """The functions on top say which operator they are."""
    x, bias, up = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16(), torch.empty(5, 32).bfloat16()
    gated = minfer.gated_activation
    pairs = [
        (minfer.silu_and_mul(x), gated(x)),
        (minfer.silu_and_mul(x, out=up), gated(x)),
        (minfer.gelu_and_mul(x), gated(x, "gelu")),
        (minfer.gelu_and_mul(x, "tanh"), gated(x, "gelu_tanh")),
        (minfer.swigluoai_and_mul(x), gated(x, "swigluoai", gate_layout="alternating")),
        (minfer.swigluoai_and_mul(x, gate_layout="halves"), gated(x, "swigluoai")),
        (minfer.gelu(x), minfer.activation(x, "gelu")),
        (minfer.gelu(x, "tanh", out=torch.empty_like(x)), minfer.activation(x, "gelu_tanh")),
        (minfer.bias_gelu(x, bias), minfer.activation(x, "gelu", bias=bias)),
        (minfer.bias_gelu(x, bias, "tanh"), minfer.activation(x, "gelu_tanh", bias=bias)),
        (minfer.relu2(x), minfer.activation(x, "relu2")),
        (minfer.silu(x), minfer.activation(x, "silu")),
    ]
    for i, (have, want) in enumerate(pairs):
        assert torch.equal(have, want), i
    for have, quant in (
        (minfer.quantize_fp8(x), "fp8_token"),
        (minfer.quantize_fp8(x, "block128"), "fp8_block128"),
        (minfer.quantize_int8(x), "int8_token"),
    ):
        want = torch.ops.minfer.quantize(x, quant)
        assert torch.equal(have[0].view(torch.int8), want[0].view(torch.int8)) and torch.equal(have[1], want[1])
    for have, activation in ((minfer.silu_and_mul(x, quant="int8_token"), "silu"), (minfer.gelu_and_mul(x, quant="int8_token"), "gelu")):
        assert torch.equal(have[0], minfer.gated_activation_quantized(x, "int8_token", activation)[0])


def test_errors_of_functions():
    x, scale = torch.randn(4, 32).half(), torch.ones(1)
    wrong = {
        r"rms_norm: scale must be None where quant is, got \[1\]": lambda: minfer.rms_norm(x, scale=scale),
        r"rms_norm: norm must be None where quant is, got \[4, 32\]": lambda: minfer.rms_norm(x, norm=x),
        r"rms_norm: out must be None where quant is given, got \[4, 32\]": lambda: minfer.rms_norm(x, quant="fp8_token", out=x),
        r"add_rms_norm: scale must be None where quant is, got \[1\]": lambda: minfer.add_rms_norm(x, x.clone(), scale=scale),
        r"gated_activation: scale must be None where quant is, got \[1\]": lambda: minfer.silu_and_mul(x, scale=scale),
        r"gated_activation_quantized: out must be None where quant is given, got \[4, 32\]": lambda: minfer.silu_and_mul(
            x, quant="fp8_token", out=x
        ),
        "gelu: approximate must be none or tanh, got 'erf'": lambda: minfer.gelu(x, "erf"),
        "gelu_and_mul: approximate must be none or tanh, got 'erf'": lambda: minfer.gelu_and_mul(x, "erf"),
        "bias_gelu: approximate must be none or tanh, got 'erf'": lambda: minfer.bias_gelu(x, x[0], "erf"),
        "quantize_fp8: mode must be tensor, token or block128, got 'row'": lambda: minfer.quantize_fp8(x, "row"),
        "quantize: scale must be given for fp8_tensor": lambda: minfer.quantize_fp8(x, "tensor"),
        r"quantize: scale must be None for fp8_token, whose scales are computed, got \[1\]": lambda: minfer.quantize_fp8(x, scale=scale),
    }
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^minfer::{message}"):
            call()


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_special_values(dtype):
    """NaN, infinities and zeros, as torch has them."""
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1.0, nan, 3, 2], [-inf, 0, 1, -inf], [inf, 0, 0, 0], [-inf] * 4, [0.0] * 4]).to(dtype)
    for have, want in (
        (minfer.softmax(x), torch.softmax(x.float(), -1)),
        (minfer.log_softmax(x), torch.log_softmax(x.float(), -1)),
        (minfer.layer_norm(x), torch.nn.functional.layer_norm(x.float(), (4,))),
        (minfer.rms_norm(x), torch.nn.functional.rms_norm(x.float(), (4,), eps=1e-6)),
    ):
        torch.testing.assert_close(have, want.to(dtype), equal_nan=True)
    gate = torch.tensor([[nan, 9.0, 1.0, -inf, 1.0, nan, 9.0, 0.0]]).to(dtype)
    y = minfer.swigluoai_and_mul(gate, gate_layout="halves")
    assert y[0, :2].isnan().all() and y[0, 2] == (torch.tensor(1.0) * torch.sigmoid(torch.tensor(1.702)) * 8).to(dtype)
    for quant in QUANTS[1:]:
        q, scales = torch.ops.minfer.quantize(x, quant)
        most = 127.0 if quant == "int8_token" else 448.0
        assert scales.flatten().tolist() == [pytest.approx(3 / most), inf, inf, inf, 0.0]
        assert q[4].float().eq(0).all() and (q.float()[0, [0, 2, 3]] / most).tolist() == pytest.approx([1 / 3, 1, 2 / 3], rel=0.04)
        assert q[0, 1].float().isnan() if quant != "int8_token" else q[0, 1] == 0
    codes, _ = minfer.quantize_fp8(torch.tensor([[1e4, -1e4, inf, -inf, nan, 0.0]]).to(dtype), "tensor", torch.ones(1))
    assert codes[0, :4].tolist() == [448.0, -448.0, 448.0, -448.0] and codes[0, 4].float().isnan() and codes[0, 5] == 0
    codes, _ = minfer.quantize_fp8(torch.ones(1, 4).to(dtype), "tensor", torch.zeros(1))
    assert codes.float().eq(0).all(), "of a scale of 0"


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=name_of)
def test_dequantize(dtype, quant):
    for shape in ((0, 8), (3, 200), (2, 5, 128), (7,), (1, 1), (4, 1000)):
        q, scales = torch.ops.minfer.quantize(torch.randn(shape).half(), quant, **given_scale(quant))
        scales = given_scale(quant).get("scale", scales)
        y = minfer.dequantize(q, scales, quant, dtype=dtype)
        assert y.shape == shape and y.is_contiguous()
        columns = scales if quant != "fp8_block128" else scales.repeat_interleave(128, 1)[:, : shape[-1]].reshape(shape)
        exact = q.float().double() * columns.double()
        numerics.judge(y, *numerics.stored((exact, 2.0**-24 * exact.abs()), dtype), f"{quant} of {shape}")
        if quant == "fp8_block128":  # in any strides
            assert torch.equal(minfer.dequantize(q, scales.contiguous(), quant, dtype=dtype), y)


# ---- rotary embedding, embedding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_rope(dtype, interleaved):
    """In place, in views of a fused qkv; what lies beyond rotary_dim or outside of the heads keeps its bits."""
    for tokens, heads, heads_kv, head_dim, rotated in (
        (0, 2, 1, 16, 16),
        (1, 1, 1, 2, 2),
        (7, 4, 2, 64, 64),
        (19, 5, 1, 96, 32),
        (3, 2, 0, 18, 10),
    ):
        table = minfer.rope_cache(10000.0, rotated, 64)
        qkv = torch.randn(tokens, heads + 2 * heads_kv, head_dim).to(dtype)
        before = qkv.clone()
        q, k = qkv[:, :heads], qkv[:, heads : heads + heads_kv] if heads_kv else None
        for positions in (torch.randint(0, 64, (tokens,)), torch.randint(0, 64, (tokens,), dtype=torch.int32)):
            qkv.copy_(before)
            assert minfer.rope(q, k, table, positions, interleaved=interleaved, rotary_dim=rotated) is None
            for have, old in ((q, before[:, :heads]), (k, before[:, heads : heads + heads_kv])):
                if have is not None:
                    rows = numerics.rope_rows(old, table, positions, interleaved)
                    numerics.judge(have, *numerics.stored(rows, dtype), f"{tokens} tokens")
                    assert torch.equal(have[..., rotated:], old[..., rotated:])
            assert torch.equal(qkv[:, heads + heads_kv :], before[:, heads + heads_kv :])


def test_rope_by_hand():
    """A quarter turn: halves (a, b) -> (-b, a); interleaved alike, of neighbours."""
    table = torch.tensor([[1.0, 1, 0, 0], [0.0, 0, 1, 1]])
    x = torch.tensor([[[1.0, 2, 3, 4, 5]]]).half()
    for interleaved, want in ((False, [-3, -4, 1, 2, 5]), (True, [-2, 1, -4, 3, 5])):
        y = x.clone()
        minfer.rope(y, None, table, torch.tensor([1]), interleaved=interleaved)
        assert y.flatten().tolist() == want


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=name_of)
def test_embedding(dtype):
    weight = torch.randn(50, 24).to(dtype)
    wide = torch.full((50, 30), math.nan).to(dtype)
    wide[:, 3:27] = weight
    for shape in ((), (0,), (7,), (2, 3), (2, 1, 4)):
        for kind in (torch.int64, torch.int32):
            ids = torch.randint(0, 50, shape).to(kind)
            want = weight[ids.long()]
            for table in (weight, wide[:, 3:27], weight.t().contiguous().t()):
                assert torch.equal(minfer.embedding(ids, table), want)
            for scale in (1.0, 24**0.5, -0.3):
                exact = want.double() * numerics.single(scale)
                rows = numerics.stored((exact, 2.0**-24 * exact.abs()), dtype)
                numerics.judge(minfer.embedding(ids, weight, scale=scale), *rows, f"scale {scale}")
            out = torch.full((*shape, 48), math.nan).to(dtype)[..., ::2]
            assert minfer.embedding(ids, weight, out=out) is out and torch.equal(out, want)
    nan = torch.tensor([[math.nan, -0.0], [math.inf, 1.0]]).to(dtype)
    assert torch.equal(minfer.embedding(torch.tensor([0, 1]), nan).view(torch.uint8), nan.view(torch.uint8)), "bit by bit"


# ---- errors --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op, case", BAD_CASES)
def test_bad_arguments(op, case, device):
    call, message = bad_call(op, case, device)
    with pytest.raises(RuntimeError, match=f"^minfer::{op}: {message}"):
        function(op)(**call)


@pytest.mark.parametrize("op", BAD)
def test_devices_must_agree(op):
    call = good_call(op, "cpu", optional=True)
    first, *others = (name for name, value in call.items() if isinstance(value, torch.Tensor))
    for name in others:
        with pytest.raises(RuntimeError, match=f"minfer::{op}: {name} must be on {first}'s device cpu, got meta"):
            check = "activation_of_rows" if op == "activation" else op
            getattr(checks_fused, f"check_{check}")(**(call | {name: call[name].to("meta")}))


def test_good_calls():
    """What the bad ones are made of is legal, and changes nothing but what it is documented to write."""
    for op in BAD:
        for optional in (False, True):
            call = good_call(op, "cpu", optional)
            before = {
                name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor) and name not in ("residual", "norm", "q", "k")
            }
            function(op)(**call)
            assert all(torch.equal(call[name].float(), x.float()) for name, x in before.items())


def test_overlaps():
    """What an operator writes beside its result shares no memory with what it reads."""
    memory = torch.zeros(4096).half()
    x, behind = memory[:64].view(4, 16), memory[32:96].view(4, 16)
    far, scale = memory[512:576].view(4, 16), torch.ones(1)
    table = memory[1024:2048].view(torch.float32).view(32, 16)
    q, k = memory[:96].view(3, 2, 16), memory[64:112].view(3, 1, 16)
    positions = torch.zeros(3, dtype=torch.int64)
    shape = r"got \[4, 16\] and {} \[4, 16\] in one memory"
    for message, call in (
        (f"add_rms_norm: residual must not overlap x, {shape.format('x')}", lambda: minfer.add_rms_norm(x, x)),
        ("add_rms_norm: residual must not overlap x", lambda: minfer.add_rms_norm(x, behind)),
        ("add_rms_norm_quantized: residual must not overlap x", lambda: minfer.add_rms_norm(x, behind, quant="fp8_token")),
        ("add_rms_norm: residual must not overlap weight", lambda: minfer.add_rms_norm(x, far, far.flatten()[: x.shape[1]])),
        (
            "rms_norm_quantized: norm must not overlap weight",
            lambda: minfer.rms_norm(x, far.flatten()[: x.shape[1]], quant="fp8_token", norm=far),
        ),
        ("rms_norm_quantized: norm must not overlap x", lambda: minfer.rms_norm(x, quant="fp8_token", norm=behind)),
        ("add_rms_norm_quantized: norm must not overlap x", lambda: minfer.add_rms_norm(x, far, quant="fp8_token", norm=behind)),
        (
            f"add_rms_norm_quantized: norm must not overlap residual, {shape.format('residual')}",
            lambda: minfer.add_rms_norm(x, far, quant="fp8_tensor", scale=scale, norm=far),
        ),
        (r"rope: q must not overlap k, got \[3, 2, 16\] and k \[3, 1, 16\]", lambda: minfer.rope(q, k, table, positions)),
        ("rope: q must not overlap cos_sin", lambda: minfer.rope(memory[1024:1120].view(3, 2, 16), None, table, positions)),
        (
            "rope: k must not overlap positions",
            lambda: minfer.rope(q, memory[512:560].view(3, 1, 16), table, memory[512:524].view(torch.int64)),
        ),
    ):
        before = memory.clone()
        with pytest.raises(RuntimeError, match=f"^minfer::{message}"):
            call()
        assert torch.equal(memory, before), message


def test_indices_that_lead_outside():
    """The CPU looks before it reads, and before it writes."""
    weight, table, q = torch.randn(8, 16).half(), torch.randn(8, 16), torch.randn(3, 2, 16).half()
    before = q.clone()
    for value in (-1, 8, 2**40):
        ids = torch.tensor([0, value, 7])
        with pytest.raises(RuntimeError, match=f"^minfer::embedding: ids must be 0 to 7, rows of weight, got {value}$"):
            minfer.embedding(ids, weight)
        with pytest.raises(RuntimeError, match=f"^minfer::rope: positions must be 0 to 7, rows of cos_sin, got {value}$"):
            minfer.rope(q, None, table, ids)
    assert torch.equal(q, before)
    assert minfer.embedding(torch.empty(0, dtype=torch.int64), weight[:0]).shape == (0, 16)


# ---- registration --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BAD)
def test_opcheck(op):
    for optional in (False, True):
        call = good_call(op, "cpu", optional)
        if op == "dequantize" and not optional:
            continue  # opcheck changes operands a little, and cannot multiply float8_e4m3fn
        for x in call.values():
            if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.float32):
                x.copy_(torch.rand(x.shape) + 0.5)
        overloads = getattr(torch.ops.minfer, op)
        check_op(overloads.default, (), call)
        if "out" in overloads.overloads():
            check_op(overloads.out, (), call | {"out": torch.empty_like(function(op)(**call))})


@pytest.mark.parametrize("quant", QUANTS)
def test_opcheck_quantized(quant):
    x = torch.randn(5, 2, 144).bfloat16()
    options = given_scale(quant)
    check_op(torch.ops.minfer.quantize.default, (x, quant), options)
    check_op(torch.ops.minfer.rms_norm_quantized.default, (x, quant), options | {"norm": torch.empty_like(x)})
    check_op(torch.ops.minfer.add_rms_norm_quantized.default, (x, torch.randn_like(x), quant, x[0, 0]), options)
    check_op(torch.ops.minfer.gated_activation_quantized.default, (x, quant), options)


def test_meta_is_like_cpu():
    def same(fake, real):
        fake, real = (torch.utils._pytree.tree_leaves(x) for x in (fake, real))
        assert len(fake) == len(real) > 0
        for f, r in zip(fake, real, strict=True):
            assert (f.shape, f.dtype, f.stride(), f.device.type) == (r.shape, r.dtype, r.stride(), "meta")

    for shape in ((0, 32), (1, 32), (5, 3, 304), (16,), (3, 0)):
        x = torch.randn(shape).half()
        for case in QUANTIZED.values():
            factors = {name: torch.ones(shape[-1] // case.columns).half() for name in case.factors}
            meta = {name: y.to("meta") for name, y in factors.items()}
            if case.name != "quantize":
                same(case.call(x.to("meta"), meta), case.call(x, factors))
            for quant in QUANTS:
                fake = case.quantized(x.to("meta"), meta, quant=quant, **given_scale(quant, "meta"))
                same(fake, case.quantized(x, factors, quant=quant, **given_scale(quant)))


def test_autograd():
    """Forward works where an argument requires grad, backward raises; what writes its arguments refuses."""
    x, weight = torch.randn(4, 32).half().requires_grad_(), torch.randn(32).half()
    for out in (
        minfer.rms_norm(x, weight),
        minfer.layer_norm(x),
        minfer.softmax(x),
        minfer.silu_and_mul(x),
        minfer.gelu(x),
        minfer.embedding(torch.tensor([1]), x),
    ):
        with pytest.raises(RuntimeError, match="has no backward"):
            out.sum().backward()
    for call in (
        lambda: minfer.add_rms_norm(x, torch.zeros_like(x)),
        lambda: minfer.add_rms_norm(x, torch.zeros_like(x), quant="fp8_token"),
        lambda: minfer.rope(x.view(4, 2, 16), None, torch.zeros(4, 16), torch.zeros(4, dtype=torch.int64)),
    ):
        with pytest.raises(RuntimeError, match="cannot be differentiated, but an argument requires grad"):
            call()


def test_writes_are_counted():
    x, residual, norm = (torch.randn(4, 32).half() for _ in range(3))
    counts = residual._version, norm._version
    y = minfer.add_rms_norm(x, residual)
    q, _ = minfer.add_rms_norm(x, residual, quant="int8_token", norm=norm)
    assert residual._version > counts[0] and norm._version > counts[1]
    assert y.shape == q.shape == x.shape
    with torch.inference_mode():
        assert minfer.add_rms_norm(x, residual).shape == x.shape


KERNEL = next(k["name"] for k in minfer.kernels("fused") if k["operation"] == "rms_norm" and "quantized" not in k["name"])


def block(x, residual, weight, positions, table, scale):
    """What lies between the GEMMs of a layer."""
    y = minfer.add_rms_norm(x * 2, residual, weight)
    q = y.view(y.shape[0], -1, 16) * 1
    minfer.rope(q, None, table, positions)
    norm = torch.empty_like(x)
    codes, scales = minfer.add_rms_norm(y, residual, weight, quant="fp8_block128", norm=norm)
    other, _ = minfer.rms_norm(norm, weight, quant="fp8_tensor", scale=scale)
    up = minfer.gelu(minfer.silu_and_mul(torch.cat([norm, y], -1)))
    last = minfer.add_rms_norm(up, residual, weight, kernel=KERNEL)
    return y, q, codes, scales * 2, norm, other, up, last, minfer.softmax(up.float(), kernel=None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, dynamic):
    """Operators that write their arguments and return results, with and without a kernel, in one graph with tokens that change."""
    need(backend)
    weight, table, scale = torch.randn(208).bfloat16(), minfer.rope_cache(10000.0, 16, 32), torch.tensor([0.02])
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (3, 5, 1):
        x, residual = (torch.randn(tokens, 208).bfloat16() for _ in range(2))
        positions, other = torch.arange(tokens), residual.clone()
        with torch.no_grad():
            want, have = block(x, residual, weight, positions, table, scale), compiled(x, other, weight, positions, table, scale)
        assert torch.equal(residual, other)
        for i, (w, h) in enumerate(zip(want, have, strict=True)):
            assert h.stride() == w.stride(), i
            torch.testing.assert_close(h.float(), w.float(), rtol=2.0**-6, atol=2.0**-6)


def test_compiled_graphs_name_no_kernel():
    """Inductor keeps the keyword for itself: a node has an override's name, the empty one where there is none."""
    torch._dynamo.reset()
    from torch._dynamo.backends.common import aot_autograd

    nodes = []

    def record(graph, inputs):
        nodes.extend(n for n in graph.graph.nodes if n.op == "call_function" and "minfer" in f"{n.target}{n.args}{n.kwargs}")
        return graph

    x, residual = (torch.randn(3, 32).half() for _ in range(2))
    with torch.no_grad():
        torch.compile(lambda x, r: minfer.add_rms_norm(x, r), fullgraph=True, backend=aot_autograd(fw_compiler=record))(x, residual)
    (node,) = nodes
    assert "kernel" not in node.kwargs and node.kwargs["override"] == ""


def test_compile_bad_input():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="minfer::rms_norm: eps must be finite"):
        torch.compile(lambda x: minfer.rms_norm(x, eps=-1.0), fullgraph=True, backend="aot_eager")(torch.randn(2, 8).half())


class Calls(TorchFunctionMode):
    """Counts operators of minfer."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += "minfer" in str(func)
        return func(*args, **(kwargs or {}))


def test_one_operator_a_call():
    x = torch.randn(4, 32).half()
    for call in (
        lambda: minfer.rms_norm(x, quant="fp8_token"),
        lambda: minfer.add_rms_norm(x, x.clone(), quant="int8_token", norm=torch.empty_like(x)),
        lambda: minfer.silu_and_mul(x, quant="fp8_block128"),
        lambda: minfer.quantize_fp8(x, "tensor", torch.ones(1)),
    ):
        with Calls() as calls:
            call()
        assert calls.count == 1


# ---- Hadamard transform --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=name_of)
@pytest.mark.parametrize("block", HADAMARD_BLOCKS)
def test_hadamard(block, dtype):
    """Few rows and many, blocks that share a tile and its rest, rows at any address, out= and x itself, and there and back."""
    for rows, blocks in ((1, 1), (3, 7), (5, 1), (max((1 << 16) // block, 1), 1)):
        width = block * blocks
        if rows * width > 1 << 16 and rows > 1:
            continue
        x = torch.randn(rows, width + 8, device="cpu").to(dtype)
        for view in (x[:, :width], x[:, 1 : 1 + width]):
            out = minfer.hadamard(view, block)
            check_hadamard(view, block, out)
            assert torch.equal(minfer.hadamard(view, block, out=torch.empty_like(x)[:, 2 : 2 + width]), out)
        own = view.clone()
        assert minfer.hadamard(own, block, out=own) is own and torch.equal(own, out)
        check_hadamard(out, block, minfer.hadamard(out, block, transpose=True), transpose=True)
    if dtype == torch.float32:
        back = minfer.hadamard(minfer.hadamard(x, block) if x.shape[1] % block == 0 else out, block, transpose=True)
        assert torch.allclose(back, x if x.shape[1] % block == 0 else view, atol=1e-4)


@pytest.mark.parametrize("change, message", BAD_HADAMARD)
def test_hadamard_refuses(change, message):
    given = dict(x=torch.zeros(3, 48), block=16) | change
    given = {name: x.to("cpu") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(RuntimeError, match=f"minfer::hadamard: {re.escape(message)}"):
        minfer.hadamard(**given)
