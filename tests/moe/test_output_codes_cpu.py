"""D of grouped GEMMs in e4m3 codes, on a CPU: 16-bit and 4-bit experts, masked rows, out=, and calls that cannot be right."""

import itertools
import math

import minfer
import pytest
import torch

from tests.gemm.cases import DTYPES, name_of
from tests.gemm.output_codes_cases import POISON, QUANT, codes_in_memory, codes_mismatch, same_codes, scale_for, untouched_around
from tests.moe.grouped_cases import LAYOUTS, make_case
from tests.moe.grouped_quantized_cases import FORMS, make_call, make_experts

VARIANTS = (
    {},
    {"gated": True, "activation": "silu"},
    {"gated": True, "activation": "swigluoai", "gate_layout": "alternating"},
    {"gated": True, "activation": "gelu", "gate_layout": "blocks"},
    {"activation": "relu2"},
)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_grouped(dtype):
    for (experts, rows, n, k), variant in itertools.product(((1, 5, 64, 64), (6, 90, 48, 72), (4, 0, 16, 8)), VARIANTS):
        args, kwargs = make_case(experts, rows, n, k, dtype, "cpu", gather=rows > 5, row_scale=True, bias=True)
        kwargs |= variant
        d = minfer.grouped_gemm(*args, **kwargs)
        scale = scale_for(d.float())
        q, given = minfer.grouped_gemm(*args, **kwargs, quant=QUANT, scale=scale)
        assert given is scale and codes_mismatch(q, d, scale) is None, (experts, variant, codes_mismatch(q, d, scale))


@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_experts_in_4_bits(form):
    name, group_size, zeros = form
    experts = make_experts(name, 4, 96, 128, group_size, zeros, alpha=True)
    for variant in ({}, {"gated": True, "activation": "silu"}):
        args, kwargs = make_call(experts, (3, 0, 20, 9), gather=True, row_scale=True, bias=True, behind=2)
        d = experts.gemm(*args, **kwargs, **variant)
        scale = scale_for(d.float())
        q, _ = experts.gemm(*args, **kwargs, **variant, quant=QUANT, scale=scale)
        assert codes_mismatch(q, d, scale) is None and q[-2:].float().eq(0).all()


@pytest.mark.parametrize("value", (0.1, math.nan, 0.0))
def test_rows_of_nobody(value):
    """They are zeros, whatever the scale is; masked, into ``out``, they are left alone."""
    a, b = torch.randn(3, 4, 32).half(), torch.randn(3, 32, 24).half()
    scale = torch.tensor([value])
    offsets, counts = torch.tensor([2, 2, 7], dtype=torch.int32), torch.tensor([1, 0, 9], dtype=torch.int32)
    q, _ = minfer.grouped_gemm(a.view(12, 32), b, offsets, quant=QUANT, scale=scale)
    assert q[7:].float().eq(0).all() and (q[:7].float().isnan().all() if math.isnan(value) else True)
    q, _ = minfer.grouped_gemm_masked(a, b, counts, quant=QUANT, scale=scale)
    assert q[0, 1:].float().eq(0).all() and q[1].float().eq(0).all()
    out, memory = codes_in_memory((3, 4, 24), "cpu", left=0, right=0, margin=0)
    assert minfer.grouped_gemm_masked(a, b, counts, quant=QUANT, scale=scale, out=out)[0] is out
    assert same_codes(out[2], q[2]) and same_codes(out[0, :1], q[0, :1])
    assert memory[0, 1:].eq(POISON).all() and memory[1].eq(POISON).all()


def test_out():
    (a, b, offsets), kwargs = make_case(4, 50, 40, 64, torch.bfloat16, "cpu", bias=True)
    scale = torch.tensor([0.05])
    want = minfer.grouped_gemm(a, b, offsets, **kwargs, quant=QUANT, scale=scale)[0]
    out, memory = codes_in_memory((50, 40), "cpu", left=3, right=6)
    assert minfer.grouped_gemm(a, b, offsets, **kwargs, quant=QUANT, scale=scale, out=out)[0] is out
    assert same_codes(out, want) and untouched_around(out, memory)
    with pytest.raises(RuntimeError, match="out must be float8_e4m3fn, got bfloat16"):
        minfer.grouped_gemm(a, b, offsets, quant=QUANT, scale=scale, out=a.new_empty(50, 40))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked(layout):
    a, b = torch.randn(3, 9, 64).half(), torch.randn(3, 64, 96).half() / 8
    counts = torch.tensor([9, 0, 4], dtype=torch.int32)
    options = dict(gated=True, gate_layout=layout, activation="gelu_tanh", row_scale=torch.rand(3, 9))
    d = minfer.grouped_gemm_masked(a, b, counts, **options)
    scale = scale_for(d.float())
    q, _ = minfer.grouped_gemm_masked(a, b, counts, **options, quant=QUANT, scale=scale)
    assert codes_mismatch(q, d, scale) is None


def bad_calls(device="cpu"):
    scale = torch.ones(1, device=device)
    return {
        "of rows": (dict(quant="fp8_token"), "whose scales follow from whole rows: call it without quant, then minfer.quantize_fp8"),
        "int8": (dict(quant="int8_token"), "then minfer.quantize_int8"),
        "unknown": (dict(quant="e4m3", scale=scale), "quant must be fp8_tensor, got 'e4m3'"),
        "no scale": (dict(quant=QUANT), "scale must be given for fp8_tensor"),
        "scale alone": (dict(scale=scale), "scale must be None where quant is"),
        "scale shape": (dict(quant=QUANT, scale=torch.ones(3, device=device)), "scale must be \\[1\\], got \\[3\\]"),
    }


def grouped_calls(device="cpu"):
    """The three operators on a small problem."""
    (a, b, offsets), _ = make_case(4, 10, 32, 16, torch.float16, device)
    experts = make_experts("int4", 4, 32, 16, 32, device=device)
    counts = torch.tensor([1, 2, 0, 5], dtype=torch.int32, device=device)
    return {
        "grouped_gemm": lambda **o: minfer.grouped_gemm(a, b, offsets, **o),
        "grouped_gemm_masked": lambda **o: minfer.grouped_gemm_masked(a[:8].view(4, 2, 16), b, counts, **o),
        "grouped_w4a16_gemm": lambda **o: experts.gemm(a, offsets, **o),
    }


@pytest.mark.parametrize("name", bad_calls())
@pytest.mark.parametrize("op", grouped_calls())
def test_calls_that_cannot_be_right(op, name):
    options, message = bad_calls()[name]
    with pytest.raises(RuntimeError, match=f"minfer::{op}: .*{message}"):
        grouped_calls()[op](**options)


@pytest.mark.parametrize("op", grouped_calls())
def test_compile(op):
    call, scale = grouped_calls()[op], torch.tensor([0.3])
    compiled = torch.compile(lambda scale: call(quant=QUANT, scale=scale)[0], fullgraph=True, backend="aot_eager")
    assert same_codes(compiled(scale), call(quant=QUANT, scale=scale)[0])
