"""w4a8_gemm and w4a8_gemm_gated without a GPU: the reference against the truth, arguments, errors, plans, torch.compile."""

import minfer
import pytest
import torch
from minfer.planning.plan import W4A8Problem

from tests.quantized_gemm import w4a8_cases as cases
from tests.quantized_gemm.w4a8_cases import DTYPES, FP8


@pytest.mark.parametrize("scales", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("group_size", (-1, 128, 256))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_against_float64(dtype, group_size, scales):
    torch.manual_seed(1)
    for m, n, k in cases.SHAPES[:3]:
        w = cases.weight(n, k, group_size, scales)
        a, a_scale = cases.activations(m, k, dtype)
        want, magnitude = cases.truth(a, a_scale, w)
        have = minfer.w4a8_gemm(a, a_scale, *w.arguments(), group_size=group_size)
        assert have.dtype == scales and have.shape == (m, n)
        rounding = 2.0**-11 if scales == torch.float16 else 2.0**-8
        assert ((have.double() - want).abs() <= rounding * want.abs() + cases.relative_bound(dtype, k) * magnitude).all()


def test_a_weight_is_that_of_w4a16_gemm():
    """The same packed codes and scales give the same product of the same numbers."""
    torch.manual_seed(2)
    weight = minfer.quantize.quantize_w4(torch.randn(96, 256).bfloat16(), group_size=128, symmetric=True)
    x = torch.randn(5, 256).bfloat16()
    q, scale = minfer.quantize_fp8(x, "token")
    wide = (q.float() * scale).bfloat16()
    have, want = minfer.w4a8_gemm(q, scale, weight.qweight, weight.scales), minfer.w4a16_gemm(wide, weight.qweight, weight.scales)
    assert (have.double() - want.double()).norm() <= 0.01 * want.double().norm()


def test_scales_of_rows():
    """One number, one for each row in any shape, numbered through."""
    w = cases.weight(32, 128)
    a, a_scale = cases.activations(6, 128, FP8)
    want = minfer.w4a8_gemm(a, a_scale, *w.arguments())
    lead = a.view(2, 3, 128)
    for scale in (a_scale, a_scale.view(6), a_scale.view(2, 3), a_scale.view(2, 3, 1)):
        assert torch.equal(minfer.w4a8_gemm(lead, scale, *w.arguments()).view(6, 32), want)
    one = minfer.w4a8_gemm(a, torch.tensor(0.5), *w.arguments())
    assert torch.equal(one, minfer.w4a8_gemm(a, torch.full((6,), 0.5), *w.arguments()))
    assert torch.equal(minfer.w4a8_gemm(a[0], a_scale[0], *w.arguments()), want[0])
    assert minfer.w4a8_gemm(a[:0], a_scale[:0], *w.arguments()).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_epilogue(dtype):
    torch.manual_seed(3)
    w = cases.weight(48, 256)
    a, a_scale = cases.activations(7, 256, dtype)
    c, bias = torch.randn(7, 48).bfloat16(), torch.randn(48)
    want = torch.relu(0.5 * cases.truth(a, a_scale, w)[0] + c.double() + bias.double())
    have = minfer.w4a8_gemm(a, a_scale, *w.arguments(), alpha=0.5, c=c, bias=bias, activation="relu")
    torch.testing.assert_close(have.double(), want, rtol=2.0**-7, atol=1e-3)
    out = torch.full((7, 56), torch.nan, dtype=torch.bfloat16)
    minfer.w4a8_gemm(a, a_scale, *w.arguments(), alpha=0.5, c=c, bias=bias, activation="relu", out=out[:, :48])
    assert torch.equal(out[:, :48], have) and out[:, 48:].isnan().all()
    blocks = (cases.truth(a, a_scale, w)[0] + bias.double()).unflatten(1, (-1, 2, 8))
    want = (torch.nn.functional.silu(blocks[:, :, 0]) * blocks[:, :, 1]).flatten(1)
    torch.testing.assert_close(minfer.w4a8_gemm_gated(a, a_scale, *w.arguments(), bias=bias).double(), want, rtol=2.0**-7, atol=1e-3)
    scale = torch.tensor([0.05])
    codes, same = minfer.w4a8_gemm(a, a_scale, *w.arguments(), quant="fp8_tensor", scale=scale)
    assert codes.dtype == FP8 and same is scale
    plain = cases.truth(a, a_scale, w)[0]
    assert (codes.double() * 0.05 - plain.clamp(-22.4, 22.4)).abs().max() <= 0.07 * plain.abs().max()


def bad_calls(device="cpu"):
    """name -> (changed arguments, what the message says)"""
    w, (a, a_scale) = cases.weight(32, 256, device=device), cases.activations(4, 256, FP8, device)
    good = dict(a=a, a_scale=a_scale, qweight=w.packed, scales=w.scales)
    wrong = {
        "a of 16 bits": (dict(a=a.float().half()), "a must be"),
        "float32 scales": (dict(scales=w.scales.float()), "scales must be"),
        "scale of 16 bits": (dict(a_scale=a_scale.half()), "a_scale must be"),
        "scales of other rows": (dict(a_scale=a_scale[:3]), "a_scale must be one number"),
        "scales of blocks": (dict(a_scale=a_scale.expand(4, 2)), "a_scale must be one number"),
        "small groups": (dict(group_size=64), "group_size must be"),
        "no power of two": (dict(group_size=192), "group_size must be"),
        "other groups": (dict(group_size=256), "scales must be"),
        "other k": (dict(a=a[:, :128]), "(scales|qweight) must be"),
        "k of 8": (dict(a=a[:, :248]), "k must be a multiple of 16"),
        "codes of 8 bits": (dict(qweight=w.packed.repeat(1, 1, 2)), "qweight must be"),
        "infinite alpha": (dict(alpha=float("inf")), "alpha must be finite"),
        "bias of another type": (dict(bias=torch.zeros(32, device=device).half()), "bias must be"),
        "long bias": (dict(bias=torch.zeros(40, device=device)), "bias must be"),
        "c of another shape": (dict(c=torch.zeros(3, 32, device=device)), "c must broadcast"),
        "unknown activation": (dict(activation="swish"), "activation must be one of"),
        "unknown kernel": (dict(kernel="w4a8_sm91"), "is not in the registry"),
        "codes by rows": (dict(quant="fp8_token"), "quant must be"),
    }
    return good, wrong


@pytest.mark.parametrize("name", bad_calls()[1])
def test_errors(name):
    good, wrong = bad_calls()
    changed, message = wrong[name]
    with pytest.raises(RuntimeError, match=f"minfer::w4a8_gemm: .*{message}"):
        minfer.w4a8_gemm(**(good | changed))


def test_plans():
    """Of every number of tokens there is one, by the kernels of the activations' type, whose tiles fit them."""
    for dtype, name in ((FP8, "e4m3"), (torch.int8, "s8")):
        for m in (1, 64, 200, 4096):
            plan = minfer.plan("w4a8_gemm", m=m, n=4096, k=4096, dtype=dtype, device=-1)
            assert plan.kernel.startswith(f"w4a8_sm90_{name}_int4") and plan.columns % 32 == 0 and plan.columns > 0
            assert plan.predicted_us >= plan.floor_us > 0
    few = minfer.plan("w4a8_gemm", m=8, n=28672, k=8192, device=-1)
    assert few.floor_us == pytest.approx(minfer.plan("w4a16_gemm", m=8, n=28672, k=8192, device=-1).floor_us, rel=0.02)
    assert W4A8Problem(4, 64, 128, group_size=256).group_size == -1
    for options in (dict(group_size=64), dict(n=12), dict(k=72), dict(dtype=torch.bfloat16)):
        with pytest.raises(ValueError):
            minfer.plan("w4a8_gemm", **(dict(m=1, n=64, k=128) | options))
    kernel = minfer.kernels("w4a8")[0]["name"]
    forced = minfer.plan("w4a8_gemm", m=100, n=512, k=1024, kernel=f"{kernel}@columns=64,decomposition=split_k,splits=2", device=-1)
    assert (forced.columns, forced.splits) == (64, 2)
    with pytest.raises(RuntimeError, match="another element type"):
        minfer.plan("w4a8_gemm", m=100, n=512, k=1024, dtype=torch.int8, kernel=kernel, device=-1)


def test_compiles():
    w, (a, a_scale) = cases.weight(32, 256), cases.activations(4, 256, FP8)
    run = torch.compile(lambda a, s: minfer.w4a8_gemm(a, s, *w.arguments(), activation="silu"), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(a, a_scale), minfer.w4a8_gemm(a, a_scale, *w.arguments(), activation="silu"))


def test_weights_and_modules_take_codes():
    """A pair of codes and scales goes to w4a8_gemm; a weight that it does not take is an error."""
    torch.manual_seed(4)
    linear = torch.nn.Linear(256, 48).bfloat16()
    q, scale = minfer.quantize_fp8(torch.randn(5, 256).bfloat16(), "token")
    weight = minfer.quantize.quantize_w4(linear.weight, group_size=128, bias=linear.bias)
    want = minfer.w4a8_gemm(q, scale, weight.qweight, weight.scales, bias=linear.bias)
    assert torch.equal(weight.gemm((q, scale)), want)
    assert torch.equal(minfer.nn.W4Linear.from_linear(linear, group_size=128)((q, scale)), want)
    for options, has in (
        (dict(group_size=32), "groups of 32"),
        (dict(symmetric=False), "zero points"),
        (dict(format="nf4", group_size=128), "nf4"),
    ):
        other = minfer.quantize.quantize_w4(linear.weight, **options)
        with pytest.raises(ValueError, match=f"W4Weight.gemm of codes: .*{has}"):
            other.gemm((q, scale))
        with pytest.raises(ValueError, match=f"W4Linear of codes: .*{has}"):
            minfer.nn.W4Linear.from_weight(other)((q, scale))
