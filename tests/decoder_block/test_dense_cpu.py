"""The decoder block of 16-bit weights on the CPU: against float64, against the other operators, errors, registration, torch.compile."""

import minfer
import pytest
import torch

from tests.decoder_block.cases import DTYPES
from tests.decoder_block.dense_cases import DenseCase, by_operators, good
from tests.gemm.cases import ACTIVATIONS, name_of


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_values(dtype):
    for i, (m, k, h, inter, n) in enumerate(
        ((1, 256, 512, 1024, 136), (2, 520, 256, 264, 8), (3, 64, 264, 72, 200), (17, 8, 128, 128, 64))
    ):
        bias, activation = (None, dtype, torch.float32)[i % 3], ACTIVATIONS[1:][i % (len(ACTIVATIONS) - 1)]
        t = DenseCase(m, k, h, inter, n, dtype, bias, 128, activation, (0.0, 1.0)[i % 2], loud=i == 3).make()
        t.check(t.call(), "separate")


def test_the_bound_can_fail():
    """Another step's norm, weight, activation or bias; a residual that is not stored or is stored too early."""
    t = DenseCase(3, bias=torch.bfloat16).make()
    have = t.call()
    t.check(have, "separate")
    right = t.residual.clone()
    for wrong in (t.before, right.roll(1, 1), right * (1 + 2.0**-5)):
        with pytest.raises(AssertionError, match="residual"):
            t.check(have, "separate", residual=wrong)
    with pytest.raises(AssertionError):
        t.check(have.roll(1, 1), "separate")
    swapped = dict(mlp_norm=t.norms["next"], next_norm=t.norms["mlp"])
    weights = dict(down_weight=t.dense["down"].roll(1, 0))
    for change in (swapped, weights, dict(activation="relu2"), dict(o_bias=None), dict(down_bias=None), dict(next_bias=None)):
        with pytest.raises(AssertionError):
            t.check(t.call(**change), "separate")


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2), (0,)], ids=str)
def test_it_is_the_operators(lead):
    """Bit by bit on the CPU, for rows of any modes."""
    m = torch.Size(lead).numel()
    for dtype, bias, activation in zip(DTYPES, (torch.float32, None), ("gelu_tanh", "silu"), strict=True):
        t = DenseCase(m, 136, 128, 96, 40, dtype, bias, 128, activation).make()
        want, residual = by_operators(t)
        own = t.before.clone().view(*lead, 128)
        have = minfer.decoder_block(**(t.arguments() | {"a": t.a.view(*lead, 136), "residual": own}))
        assert have.shape == (*lead, 40) and torch.equal(have.view(m, 40), want) and torch.equal(own.view(m, 128), residual)


def test_opcheck():
    overload = torch.ops.minfer.decoder_block.default
    call = {name: torch.randn_like(x) for name, x in good("cpu").items()}
    schema = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only and argument.name != "eps"]
    operands = tuple(call.pop(name) for name in schema)
    result = torch.library.opcheck(overload, operands, call | {"o_bias": torch.rand(128), "activation": "gelu"})
    assert set(result.values()) == {"SUCCESS"}, result


def test_plan():
    """Of the H200 as measured: one and two tokens of a small model are one launch, three are not, nor a large model's."""
    sizes = dict(n=3072, k=2048, inter=8192)
    for m in (1, 2):
        plan = minfer.plan("decoder_block", m=m, device=-1, **sizes)
        assert plan.one_launch and plan.ctas == 128 and "1 launch" in str(plan)
    large = dict(n=6144, k=4096, inter=14336)
    assert not minfer.plan("decoder_block", m=1, device=-1, **large).one_launch
    assert minfer.plan("decoder_block", m=2, device=-1, kernel="one_launch", **large).one_launch
    for options in (dict(m=3), dict(m=1, batch_invariant=True), dict(m=1, kernel="separate"), dict(m=1, inter=8200)):
        assert not minfer.plan("decoder_block", device=-1, **(sizes | options)).one_launch
