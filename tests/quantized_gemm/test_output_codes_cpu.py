"""D of the W4A16 and W8A16 GEMMs in e4m3 codes, on a CPU: every format, what is around it, and calls that cannot be right."""

import itertools

import minfer
import pytest
import torch

from tests.gemm.cases import DTYPES, name_of
from tests.gemm.output_codes_cases import QUANT, codes_in_memory, codes_mismatch, same_codes, scale_for, untouched_around
from tests.quantized_gemm.weight_format_cases import BITS, GROUPS, make_weight

FORMATS = tuple(BITS)


def group_of(name):
    return GROUPS.get(name, (32,))[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_values(dtype, name):
    """Of A with any leading modes, with C, bias, act-order, alpha; gated: the codes of what is rounded to 16 bits without ``quant``."""
    for lead, (n, k) in itertools.product(((1,), (3, 7), (), (0,)), ((64, 128), (48, 72))):
        weight = make_weight(name, n, k, group_of(name), dtype=dtype)
        a = torch.randn(*lead, k).to(dtype)
        options = {"bias": torch.randn(n), "perm": torch.randperm(k).int()}
        for call, more in ((weight.gemm, {"c": torch.randn(*lead, n), "activation": "gelu"}), (weight.gemm_gated, {})):
            d = call(a, **options, **more)
            scale = scale_for(d.float())
            q, given = call(a, **options, **more, quant=QUANT, scale=scale)
            assert given is scale
            assert codes_mismatch(q, d, scale) is None, (lead, n, k, codes_mismatch(q, d, scale))


def test_out():
    weight, a, scale = make_weight("int4", 64, 128, 32), torch.randn(9, 128).half(), torch.tensor([0.02])
    want = weight.gemm(a, quant=QUANT, scale=scale)[0]
    out, memory = codes_in_memory((9, 64), "cpu", left=3, right=5)
    q, _ = weight.gemm(a, quant=QUANT, scale=scale, out=out)
    assert q is out and same_codes(out, want) and untouched_around(out, memory)
    with pytest.raises(RuntimeError, match="out must be float8_e4m3fn, got float16"):
        weight.gemm(a, quant=QUANT, scale=scale, out=torch.empty(9, 64).half())
    with pytest.raises(RuntimeError, match="out must be float16, got float8_e4m3fn"):
        weight.gemm(a, out=out)


def test_classes_hand_them_on():
    """W4Weight.gemm and its like take the arguments of the operator."""
    w = torch.randn(64, 128).bfloat16()
    a, scale = torch.randn(5, 128).bfloat16(), torch.tensor([0.2])
    for weight in (minfer.quantize.quantize_w4(w), minfer.quantize.quantize_w8(w)):
        q, _ = weight.gemm(a, quant=QUANT, scale=scale)
        assert codes_mismatch(q, weight.gemm(a), scale) is None


@pytest.mark.parametrize("name", ("int4", "int8"))
def test_calls_that_cannot_be_right(name):
    weight, a, scale = make_weight(name, 64, 128, 32), torch.randn(3, 128).half(), torch.ones(1)
    for call, op in ((weight.gemm, "gemm"), (weight.gemm_gated, "gemm_gated")):
        for options, message in (
            (dict(quant="fp8_token"), "whose scales follow from whole rows: call it without quant, then minfer.quantize_fp8"),
            (dict(quant="int8_token"), "then minfer.quantize_int8"),
            (dict(quant="e4m3", scale=scale), "quant must be fp8_tensor, got 'e4m3'"),
            (dict(quant=QUANT), "scale must be given for fp8_tensor"),
            (dict(scale=scale), "scale must be None where quant is"),
            (dict(quant=QUANT, scale=torch.ones(3)), "scale must be \\[1\\], got \\[3\\]"),
        ):
            with pytest.raises(RuntimeError, match=f"minfer::w{BITS[name]}a16_{op}: .*{message}"):
                call(a, **options)


@pytest.mark.parametrize("name", ("nvfp4", "int8"))
def test_compile_and_opcheck(name):
    weight, a, scale = make_weight(name, 64, 128, group_of(name)), torch.randn(3, 128).half(), torch.tensor([0.02])
    call = lambda a, scale: (weight.gemm(a, quant=QUANT, scale=scale)[0], weight.gemm_gated(a, quant=QUANT, scale=scale)[0])  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(same_codes(x, y) for x, y in zip(compiled(a, scale), call(a, scale), strict=True))
    args, options = weight.packed
    op = getattr(torch.ops.minfer, f"w{BITS[name]}a16_gemm").default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op, (a, *args), options | dict(quant=QUANT, scale=scale), test_utils=tests)
