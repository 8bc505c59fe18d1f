"""The decoder block of e4m3 weights on the CPU: against float64, against the other operators, errors, registration, torch.compile."""

import minfer
import pytest
import torch

from tests.decoder_block.cases import DTYPES
from tests.decoder_block.fp8_cases import FP8, MODES, Fp8Case, by_operators, check_op, good
from tests.gemm.cases import ACTIVATIONS, name_of


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mode", MODES)
def test_values(mode, dtype):
    for i, (m, k, h, inter, n) in enumerate(
        ((1, 256, 512, 1024, 136), (2, 520, 256, 264, 8), (3, 64, 264, 72, 200), (17, 8, 128, 128, 64))
    ):
        bias = (None, dtype, torch.float32)[i % 3]
        activation = ACTIVATIONS[1:][(i + MODES.index(mode)) % (len(ACTIVATIONS) - 1)]
        t = Fp8Case(m, k, h, inter, n, dtype, bias, 128, activation, (0.0, 1.0)[i % 2], loud=i == 3, mode=mode).make()
        t.check(t.call(), "separate")


def test_the_bound_can_fail():
    """Another step's norm, weight, scale, bias or activation; a residual that is not stored or is stored too early."""
    t = Fp8Case(3, bias=torch.bfloat16, mode="channel").make()
    have = t.call()
    t.check(have, "separate")
    right = t.residual.clone()
    for wrong in (t.before, right.roll(1, 1), right * (1 + 2.0**-2)):
        with pytest.raises(AssertionError, match="residual"):
            t.check(have, "separate", residual=wrong)
    with pytest.raises(AssertionError):
        t.check(have.roll(1, 1), "separate")
    swapped = dict(mlp_norm=t.norms["next"], next_norm=t.norms["mlp"])
    scales = dict(down_scale=t.scales["down"].roll(1))
    for change in (swapped, scales, dict(activation="relu2"), dict(o_bias=None), dict(down_bias=None), dict(next_bias=None)):
        with pytest.raises(AssertionError):
            t.check(t.call(**change), "separate")


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2), (0,)], ids=str)
def test_it_is_the_operators(lead):
    """Bit by bit on the CPU, for rows of any modes."""
    m = torch.Size(lead).numel()
    for i, mode in enumerate(MODES):
        t = Fp8Case(m, 136, 128, 96, 40, DTYPES[i % 2], (torch.float32, None)[i % 2], 128, ("gelu_tanh", "silu")[i % 2], mode=mode).make()
        want, residual = by_operators(t)
        own = t.before.clone().view(*lead, 128)
        have = minfer.fp8_decoder_block(**(t.arguments() | {"a": t.a.view(*lead, 136), "residual": own}))
        assert have.shape == (*lead, 40) and torch.equal(have.view(m, 40), want) and torch.equal(own.view(m, 128), residual)


def test_mixed_scales():
    """Each weight's scales are of what they are of, exponents of two among them."""
    t = Fp8Case(2, 136, 256, 96, 40).make()
    exponents = torch.randint(118, 122, t.scales["down"].shape, dtype=torch.uint8)
    t.scales |= {"o": torch.rand(256) * 0.1, "next": torch.tensor([0.1])}
    have = t.call(down_scale=exponents)
    residual = t.residual.clone()
    t.scales["down"] = torch.exp2(exponents.float() - 127)
    assert torch.equal(t.call(), have) and torch.equal(t.residual, residual)


def test_opcheck():
    overload = torch.ops.minfer.fp8_decoder_block.default
    call = good("cpu")
    for name, x in call.items():
        if isinstance(x, torch.Tensor):
            call[name] = torch.randn(x.shape).to(FP8) if x.dtype == FP8 else torch.rand_like(x) * (0.1 if "scale" in name else 1)
    schema = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only and argument.name != "eps"]
    operands = tuple(call.pop(name) for name in schema)
    check_op(overload, operands, call | {"o_bias": torch.rand(128), "next_bias": torch.rand(40).half(), "activation": "gelu"})


def test_plan():
    """Of the H200 as measured: one and two tokens are one launch, three are not, nor scales that it does not read."""
    sizes = dict(n=6144, k=4096, inter=14336)
    for m in (1, 2):
        plan = minfer.plan("fp8_decoder_block", m=m, device=-1, **sizes)
        assert plan.one_launch and plan.ctas == 132 and "1 launch" in str(plan)
    for options in (dict(m=3), dict(m=1, batch_invariant=True), dict(m=1, kernel="separate"), dict(m=1, n=6144, k=4096, inter=14400)):
        assert not minfer.plan("fp8_decoder_block", device=-1, **(sizes | options)).one_launch
