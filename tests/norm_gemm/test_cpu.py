"""A norm and the GEMM behind it on the CPU: against float64, against the two operators, errors, registration; plans."""

import itertools

import minfer
import pytest
import torch
from minfer._core.registry import H200

from tests.contracts.test_registration import check_op
from tests.gemm.cases import ACTIVATIONS, name_of
from tests.norm_gemm.cases import DTYPES, EPS, FORMATS, OPERATORS, Case, bad, good, quantized, run
from tests.quantized_gemm.weight_format_cases import make_weight


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_values(dtype, gated):
    unit = 16 if gated else 1
    for m, n, k in ((1, 3, 40), (5, 33, 1), (3, 17, 1000), (40, 7, 64)):
        for i, (residual, weighted, bias) in enumerate(itertools.product((False, True), (False, True), (None, dtype, torch.float32))):
            activation, offset = ACTIVATIONS[i % len(ACTIVATIONS)], (0.0, 1.0)[i % 2]
            case = Case(m, n * unit, k, dtype, gated, residual, weighted, bias, activation, offset, (0.02, 1.0, 8.0)[i % 3], pad=i % 3)
            run(case, "cpu")


def test_the_bound_can_fail():
    """A norm of x alone, weights that are shifted, a sum that is left out."""
    case = Case(3, 32, 256)
    t = case.make()
    before = t["residual"].clone()
    have = case.call(t)
    case.check(have, t, before)
    alone = case.change(residual=False).call(t | {"residual": None})
    for wrong in (alone, have.roll(1, 1), have + have.abs().max() * 2.0**-6):
        with pytest.raises(AssertionError):
            case.check(wrong, t, before)
    with pytest.raises(AssertionError, match="residual"):
        case.check(have, t | {"residual": before}, before)


@pytest.mark.parametrize("op", OPERATORS)
def test_it_is_the_two_operators(op):
    """Bit by bit on the CPU, for x of any modes."""
    gated, bits = op.endswith("_gated"), 4 if "w4a16" in op else 8 if "w8a16" in op else 0
    for lead in ((), (3,), (2, 3), (2, 1, 2), (0,)):
        x, residual, weight = torch.randn(*lead, 64).half(), torch.randn(*lead, 64).half(), torch.randn(64).half()
        own, options = residual.clone(), dict(activation="gelu", bias=torch.randn(48))
        y = minfer.add_rms_norm(x, own, weight, EPS, weight_offset=0.5)
        if bits == 0:
            b = torch.randn(48, 64).half().t()
            have = getattr(minfer, op)(x, weight, b, EPS, residual=residual, weight_offset=0.5, **options)
            want = (minfer.gemm_gated if gated else minfer.gemm)(y.reshape(y.shape[:-1].numel(), 64), b, **options)
            want = want.view(*lead, want.shape[1])
        else:
            codes = torch.randint(0, 2**bits, (48, 64), dtype=torch.uint8)
            packed = minfer.w4a16_pack(codes) if bits == 4 else minfer.w8a16_pack(codes)
            scales, zeros = torch.rand(2, 48).half() * 0.1, torch.randint(0, 2**bits, (2, 48)).half()
            options |= dict(group_size=32, alpha=0.5, perm=torch.randperm(64).int())
            have = getattr(minfer, op)(x, weight, packed, scales, zeros, EPS, residual=residual, weight_offset=0.5, **options)
            want = getattr(minfer, op.removeprefix("rms_norm_"))(y, packed, scales, zeros, **options)
        assert torch.equal(have, want) and have.shape == (*lead, 24 if gated else 48) and torch.equal(residual, own)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    """Every format of both widths; scales of a byte in their own type."""
    weight = make_weight(name, 32, 128, {"mxfp4": 32, "nvfp4": 16}.get(name, 64))
    x, (packed, options) = torch.randn(5, 128).half(), weight.packed
    have = quantized(FORMATS[name], False)(x, None, *packed, EPS, **options)
    assert torch.equal(have, weight.gemm(minfer.rms_norm(x, None, EPS)))
    if name in ("mxfp4", "nvfp4"):
        typed = weight.scales.view(torch.float8_e8m0fnu if name == "mxfp4" else torch.float8_e4m3fn)
        assert torch.equal(quantized(4, False)(x, None, packed[0], typed, eps=EPS, **options), have)


def test_no_extents():
    """Without columns the residual is added to all the same; without k there is the bias."""
    x, residual = torch.randn(3, 16).half(), torch.randn(3, 16).half()
    want = (x.float() + residual.float()).half()
    assert minfer.rms_norm_gemm(x, None, torch.zeros(16, 0).half(), residual=residual).shape == (3, 0)
    assert torch.equal(residual, want)
    bias = torch.randn(5).half()
    assert torch.equal(minfer.rms_norm_gemm(x[:, :0], None, torch.zeros(0, 5).half(), bias=bias), bias.expand(3, 5))
    assert minfer.rms_norm_gemm(x[:0], None, torch.zeros(16, 5).half()).shape == (0, 5)


@pytest.mark.parametrize("op", OPERATORS)
def test_errors(op):
    """Each names the operator and the argument, and the residual is as it was."""
    for change, message in bad(op, "cpu"):
        call = good(op, "cpu") | change
        before = call["residual"].clone() if "residual" in change else None
        with pytest.raises(RuntimeError, match=f"^minfer::{op}: {message}"):
            getattr(minfer, op)(**call)
        assert before is None or torch.equal(call["residual"], before), message
    getattr(minfer, op)(**good(op, "cpu"))


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck(op):
    call = good(op, "cpu")
    for x in call.values():
        if isinstance(x, torch.Tensor) and x.dtype == torch.float16:
            x.copy_(torch.rand(x.shape) + 0.5)
    overload = getattr(torch.ops.minfer, op).default
    check_op(overload, (), call)
    check_op(overload, (), call | {"residual": torch.rand(3, 64).half(), "bias": torch.rand(32)})


@pytest.mark.parametrize("op", OPERATORS)
def test_compiled(op):
    """In one graph, with the residual that it writes, and a kernel by name."""
    call = {name: torch.rand_like(x) if torch.is_tensor(x) and x.dtype == torch.float16 else x for name, x in good(op, "cpu").items()}
    operator, residual = getattr(minfer, op), torch.rand(3, 64).half()
    own = residual.clone()
    want = operator(**call, residual=own)

    def step(residual):
        return operator(**call, residual=residual, kernel="two_launches") * 2

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(residual), want * 2)
    assert torch.equal(residual, own)


def test_autograd():
    """As of every operator that may write an argument."""
    x, b = torch.randn(4, 32).half().requires_grad_(), torch.randn(32, 8).half()
    with pytest.raises(RuntimeError, match="cannot be differentiated, but an argument requires grad"):
        minfer.rms_norm_gemm(x, None, b)
    with torch.no_grad():
        assert minfer.rms_norm_gemm(x, None, b).shape == (4, 8)


@pytest.mark.parametrize("op", OPERATORS)
def test_meta_is_like_cpu(op):
    call = good(op, "cpu") | {"residual": torch.zeros(3, 64).half()}
    meta = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in call.items()}
    fake, real = getattr(minfer, op)(**meta), getattr(minfer, op)(**call)
    assert (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")


# ---- plans ---------------------------------------------------------------------------------------------------------------------------


def plan(m, n, k, **options):
    return minfer.plan("rms_norm_gemm", m=m, n=n, k=k, device=H200, **options)


def test_plans():
    """Few tokens and a weight that is read soon are one launch; many, or a long weight, two. Either can be forced."""
    one, many, long = plan(1, 6144, 4096), plan(64, 6144, 4096), plan(1, 128256, 8192)
    assert one.launches == 1 and one.kernel in {kernel["name"] for kernel in minfer.kernels("norm_gemm")} and one.product is None
    assert many.launches == long.launches == 2 and many.kernel == "" and many.product.kernel.startswith("gemm_")
    assert many.product.kernel == minfer.plan("gemm", m=64, n=6144, k=4096, device=H200).kernel
    assert plan(1, 6144, 4096, kernel="two_launches").launches == 2 and plan(1, 128256, 8192, kernel="one_launch").launches == 1
    assert plan(1, 6144, 4096, gated=True).problem.gated and plan(1, 6144, 4096, residual=True).workspace_bytes == 8 * one.ctas
    for found in (one, many):
        text = str(found)
        assert "6144 x 4096 bf16" in text and found.reason in text and f"{found.launches} launch" in text
    for kernel in minfer.kernels("norm_gemm"):
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kernel["ab_type"]]
        forced = plan(kernel["tile_m"], 4096, 4096, dtype=dtype, kernel=kernel["name"])
        assert (forced.launches, forced.kernel, forced.source, forced.compiled) == (1, kernel["name"], "override", kernel["compiled"])
        with pytest.raises(RuntimeError, match="cannot compute this problem: it takes fewer tokens"):
            plan(kernel["tile_m"] + 1, 4096, 4096, dtype=dtype, kernel=kernel["name"])
    with pytest.raises(RuntimeError, match="no kernel computes this problem in one launch: k must be a multiple of 8"):
        plan(1, 4096, 4092, kernel="one_launch")
    with pytest.raises(RuntimeError, match="kernel must be one_launch, two_launches"):
        plan(1, 4096, 4096, kernel="nothing")
    for wrong in (dict(m=-1), dict(k=2.5), dict(n=17, gated=True), dict(dtype=torch.float32), dict(layout="tt")):
        with pytest.raises(ValueError, match=next(iter(wrong)) if "gated" not in wrong else "n must be a multiple of 16"):
            minfer.plan("rms_norm_gemm", **(dict(m=1, n=16, k=16) | wrong))
