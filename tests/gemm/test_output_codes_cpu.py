"""D of gemm and gemm_gated in e4m3 codes, on a CPU: values against float64, special numbers, out=, errors, fakes, torch.compile."""

import itertools

import minfer
import pytest
import torch

from tests.contracts import numerics_cases as numerics
from tests.gemm.cases import ACTIVATIONS, DTYPES, LAYOUTS, name_of, operands
from tests.gemm.output_codes_cases import (
    QUANT,
    SPECIAL_SCALES,
    codes_in_memory,
    codes_mismatch,
    codes_of,
    same_codes,
    scale_for,
    special_operands,
    untouched_around,
)

SHAPES = ((0, 8, 8), (3, 0, 16), (1, 1, 1), (5, 33, 24), (17, 48, 0), (64, 130, 264))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gemm_is_within_its_bound(dtype):
    """The nearest code of the float64 result, but where a tie is as near as float32 sums are exact."""
    for (m, n, k), layout in itertools.product(SHAPES, LAYOUTS):
        a, b = operands(m, n, k, dtype, layout)
        bias, c = torch.randn(n), torch.randn(m, n).to(dtype)
        exact = numerics.gemm_bound(a, b.mT, alpha=-0.5, c=c, bias=bias, out_dtype=torch.float32)
        scale = scale_for(exact[0])
        q, given = minfer.gemm(a, b, c=c, beta=1.0, alpha=-0.5, bias=bias, quant=QUANT, scale=scale)
        assert given is scale
        numerics.check_codes(q, None, exact, QUANT, f"{m} x {n} x {k} {layout}", scale)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gated_is_within_its_bound(dtype, activation):
    for m, half, k in ((0, 8, 8), (1, 8, 16), (7, 72, 40), (33, 136, 264)):
        a, b = operands(m, 2 * half, k, dtype, "tn", scale=0.5)
        bias = torch.randn(2 * half)
        exact = numerics.gated_bound(a, b.mT, bias=bias, activation=activation, out_dtype=torch.float32)
        scale = scale_for(exact[0])
        q, _ = minfer.gemm_gated(a, b, bias=bias, activation=activation, quant=QUANT, scale=scale)
        numerics.check_codes(q, None, exact, QUANT, f"{m} x 2*{half} x {k}", scale)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_codes_are_those_of_float32(activation):
    """Bit by bit those of the float32 D, which no rounding to 16 bits comes before: of numbers next to a tie those would be others."""
    a, b = operands(64, 96, 128, torch.bfloat16, "tn")
    wide = minfer.gemm(a, b, activation=activation, out_dtype=torch.float32)
    scale = scale_for(wide)
    q, _ = minfer.gemm(a, b, activation=activation, quant=QUANT, scale=scale)
    assert same_codes(q, codes_of(wide, scale))
    narrow = minfer.gemm(a, b, activation=activation)
    assert codes_mismatch(q, narrow, scale) is None
    assert not same_codes(q, codes_of(narrow.float(), scale)), "rounded twice, some codes are others"


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_special_numbers(dtype):
    a, b = special_operands(dtype, "cpu")
    wide = minfer.gemm(a, b, out_dtype=torch.float32)
    for value in SPECIAL_SCALES:
        scale = torch.tensor([value])
        q, _ = minfer.gemm(a, b, quant=QUANT, scale=scale)
        assert same_codes(q, codes_of(wide, scale)), value
    q = minfer.gemm(a, b, quant=QUANT, scale=torch.tensor([0.3]))[0].float()
    assert q[0].isnan().all() and q[1].abs().eq(448).all() and q[2].eq(-q[1].sign() * b[7].sign().float() * b[6].sign().float() * 448).all()
    assert q[3].eq(0).all()
    finite = slice(3, None)
    assert minfer.gemm(a[finite], b, quant=QUANT, scale=torch.zeros(1))[0].float().eq(0).all(), "of a scale of 0"
    assert minfer.gemm(a[finite], b, quant=QUANT, scale=torch.full((1,), float("nan")))[0].float().isnan().all()


def test_batches_and_views():
    a, b = operands(9, 40, 64, torch.float16, "tn", batch=(3,))
    scale = torch.tensor([9.0, 0.07, 9.0])[1:2]
    for x, y in ((a, b), (a, b[0]), (a[0], b)):
        q, _ = minfer.gemm(x, y, quant=QUANT, scale=scale)
        assert same_codes(q, codes_of(minfer.gemm(x, y, out_dtype=torch.float32), scale))
    for left, right in ((8, 8), (3, 5), (0, 0)):
        out, memory = codes_in_memory((3, 9, 40), "cpu", left=left, right=right)
        q, given = minfer.gemm(a, b, quant=QUANT, scale=scale, out=out)
        assert q is out and given is scale and untouched_around(out, memory)
        assert same_codes(out, minfer.gemm(a, b, quant=QUANT, scale=scale)[0])


def test_what_is_next_reads_them():
    """The codes and the scale are an operand as minfer.dequantize and fp8 GEMMs take it."""
    a, b = operands(16, 64, 32, torch.bfloat16, "tn")
    d = minfer.gemm(a, b, out_dtype=torch.float32)
    scale = d.abs().max().reshape(1) / 448
    q, scales = minfer.gemm(a, b, quant=QUANT, scale=scale)
    back = minfer.dequantize(q, scales, QUANT, dtype=torch.float32)
    assert (back - d).abs().le(2.0**-4 * d.abs() + 2.0**-10 * scale).all()


def bad_calls(device="cpu"):
    """name -> (options, how the message goes on)"""
    scale = torch.ones(1, device=device)
    codes = dict(quant=QUANT, scale=scale)
    whole = "quant must be fp8_tensor, whose scale is given, got '{}', whose scales follow from whole rows: call it without quant, then "
    whole += "minfer.{}"
    return {
        "of rows": (dict(quant="fp8_token"), whole.format("fp8_token", "quantize_fp8")),
        "of blocks": (dict(quant="fp8_block128", scale=scale), whole.format("fp8_block128", "quantize_fp8")),
        "int8": (dict(quant="int8_token"), whole.format("int8_token", "quantize_int8")),
        "unknown": (dict(quant="fp8", scale=scale), "quant must be fp8_tensor, got 'fp8'"),
        "no scale": (dict(quant=QUANT), "scale must be given for fp8_tensor"),
        "scale alone": (dict(scale=scale), "scale must be None where quant is, got [1]"),
        "scale shape": (dict(quant=QUANT, scale=torch.ones(2, device=device)), "scale must be [1], got [2]"),
        "scale rank": (dict(quant=QUANT, scale=scale[0]), "scale must be [1], got []"),
        "scale dtype": (dict(quant=QUANT, scale=scale.half()), "scale must be"),
        "out_dtype": (codes | dict(out_dtype=torch.float16), "out_dtype must be"),
        "out dtype": (codes | dict(out=torch.empty(4, 48, dtype=torch.float16, device=device)), "out must be"),
        "out shape": (codes | dict(out=torch.empty(4, 47, dtype=torch.float8_e4m3fn, device=device)), "out must be [4, 48], got [4, 47]"),
        "out without quant": (dict(out=torch.empty(4, 48, dtype=torch.float8_e4m3fn, device=device)), "must be"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_calls_that_cannot_be_right(name):
    options, message = bad_calls()[name]
    a, b = operands(4, 48, 32, torch.float16, "tn")
    calls = [minfer.gemm] if {"out", "out_dtype"} & set(options) else [minfer.gemm, minfer.gemm_gated]
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call(a, b, **options)
        assert str(raised.value).startswith(f"minfer::{call.__name__}: ") and message in str(raised.value)


def test_out_overlaps_the_scale():
    memory = torch.zeros(4 * 48, dtype=torch.uint8)
    scale = memory[4:8].view(torch.float32)
    a, b = operands(4, 48, 32, torch.float16, "tn")
    with pytest.raises(RuntimeError, match="out must not overlap scale"):
        minfer.gemm(a, b, quant=QUANT, scale=scale, out=memory.view(torch.float8_e4m3fn).view(4, 48))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_and_fakes(dynamic):
    a, b = operands(5, 48, 64, torch.bfloat16, "tn")
    scale = torch.tensor([0.1])

    def call(a, b, scale, out):
        q, given = minfer.gemm(a, b, quant=QUANT, scale=scale)
        gated, _ = minfer.gemm_gated(a, b, quant=QUANT, scale=given)
        minfer.gemm(a, b, activation="relu", quant=QUANT, scale=scale, out=out)
        return q, gated, out

    want = call(a, b, scale, torch.empty(5, 48, dtype=torch.float8_e4m3fn))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    have = compiled(a, b, scale, torch.empty(5, 48, dtype=torch.float8_e4m3fn))
    assert all(same_codes(x, y) for x, y in zip(have, want, strict=True))
    meta = minfer.gemm(a.to("meta"), b.to("meta"), quant=QUANT, scale=scale.to("meta"))[0]
    assert meta.shape == (5, 48) and meta.dtype == torch.float8_e4m3fn


def test_opcheck():
    a, b = operands(5, 48, 64, torch.float16, "tn")
    options = dict(quant=QUANT, scale=torch.tensor([0.1]))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for op in (torch.ops.minfer.gemm.default, torch.ops.minfer.gemm_gated.default):
        torch.library.opcheck(op, (a, b), options, test_utils=tests)
