"""The decoder block on the CPU: against float64, against the other operators, errors, registration, torch.compile."""

import itertools

import minfer
import pytest
import torch

from tests.contracts.test_registration import check_op
from tests.decoder_block.cases import DTYPES, EPS, Case, bad, by_operators, good
from tests.gemm.cases import ACTIVATIONS, name_of


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_values(dtype):
    sizes = ((1, 256, 512, 1024, 136), (2, 520, 256, 264, 8), (3, 64, 264, 72, 200), (17, 8, 128, 128, 64), (40, 128, 8, 16, 40))
    for i, ((m, k, h, inter, n), group) in enumerate(itertools.product(sizes, (128, -1, 32, 256))):
        bias = (None, dtype, torch.float32)[i % 3]
        activation = ACTIVATIONS[1:][i % (len(ACTIVATIONS) - 1)]
        t = Case(m, k, h, inter, n, dtype, bias, group, activation, (0.0, 1.0)[i % 2], loud=i % 4 == 3).make()
        t.check(t.call(), "separate")


def test_the_bound_can_fail():
    """Another step's norm, weight, bias or activation; a residual that is not stored or is stored too early."""
    t = Case(3, bias=torch.bfloat16).make()
    have = t.call()
    t.check(have, "separate")
    right = t.residual.clone()
    early = minfer.w4a16_gemm(t.a, t.weights["o"].qweight, t.weights["o"].scales, c=t.before, bias=t.biases["o"])
    for wrong in (t.before, early, right.roll(1, 1), right * (1 + 2.0**-6)):
        with pytest.raises(AssertionError, match="residual"):
            t.check(have, "separate", residual=wrong)
    for wrong in (have.roll(1, 1), have + have.abs().max() * 2.0**-6):
        with pytest.raises(AssertionError):
            t.check(wrong, "separate")
    swapped = dict(mlp_norm=t.norms["next"], next_norm=t.norms["mlp"])
    for change in (
        swapped,
        dict(activation="gelu"),
        dict(weight_offset=0.1),
        dict(o_bias=None),
        dict(down_bias=None),
        dict(next_bias=None),
    ):
        with pytest.raises(AssertionError):
            t.check(t.call(**change), "separate")


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2), (0,)], ids=str)
def test_it_is_the_operators(lead):
    """Bit by bit on the CPU, for rows of any modes."""
    m = torch.Size(lead).numel()
    for i, dtype in enumerate(DTYPES):
        t = Case(m, 136, 128, 96, 40, dtype, (dtype, None)[i], (32, -1)[i], ("gelu_tanh", "silu")[i], (1.0, 0.0)[i]).make()
        want, residual = by_operators(t)
        own = t.before.clone().view(*lead, 128)
        have = minfer.w4a16_decoder_block(**(t.arguments() | {"a": t.a.view(*lead, 136), "residual": own}))
        assert have.shape == (*lead, 40) and torch.equal(have.view(m, 40), want) and torch.equal(own.view(m, 128), residual)


def test_float64():
    """The reference of float64 rounds weights alone."""
    t = Case(3, 64, 128, 72, 40, torch.float16).make()
    args = t.arguments() | {"a": t.a.double(), "residual": t.before.double()}
    w = {name: weight.dense().double() for name, weight in t.weights.items()}

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    x = args["residual"] + args["a"] @ w["o"].t()
    gate, up = (norm(x, t.norms["mlp"]) @ w["gate_up"].t()).unflatten(-1, (-1, 2, 8)).unbind(-2)
    x = x + (torch.nn.functional.silu(gate) * up).flatten(-2) @ w["down"].t()
    have = minfer.reference.decoder_block.w4a16_decoder_block(**args)
    torch.testing.assert_close(args["residual"], x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(have, norm(x, t.norms["next"]) @ w["next"].t(), rtol=1e-12, atol=1e-12)


def test_a_view_of_a():
    """Rows of any strides; the residual alone is contiguous."""
    t = Case(3, 64, 128, 72, 40).make()
    want = t.call()
    for view in (torch.empty(64, 3).bfloat16().t(), torch.empty(3, 65).bfloat16()[:, 1:]):
        view.copy_(t.a)
        assert torch.equal(t.call(a=view), want)


def filled(device):
    """The good call with numbers."""
    call = {name: x for name, x in good(device).items()}
    for name, x in call.items():
        if isinstance(x, torch.Tensor):
            call[name] = (
                torch.randint_like(x, 2**31 - 1) if x.dtype == torch.int32 else torch.rand_like(x) * (0.1 if "scales" in name else 1)
            )
    return call


def test_opcheck():
    overload = torch.ops.minfer.w4a16_decoder_block.default
    call = filled("cpu")
    schema = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only and argument.name != "eps"]
    operands = tuple(call.pop(name) for name in schema)
    check_op(overload, operands, call)
    check_op(overload, operands, call | {"o_bias": torch.rand(128), "next_bias": torch.rand(40).half(), "activation": "gelu"})


@pytest.mark.parametrize("kernel", [None, "separate"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, kernel):
    """In one graph, with the residual that it writes, and a kernel by name."""
    torch._dynamo.reset()
    call = filled("cpu")
    a, residual = call.pop("a"), call.pop("residual")

    def step(a, residual):
        return minfer.w4a16_decoder_block(a, residual, **call, kernel=kernel) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 2):
        own, traced = residual[:m].clone(), residual[:m].clone()
        want = step(a[:m], own)
        assert torch.equal(compiled(a[:m], traced), want) and torch.equal(traced, own) and not torch.equal(own, residual[:m])


def test_compiled_errors():
    torch._dynamo.reset()
    call = good("cpu")
    with pytest.raises(Exception, match="minfer::w4a16_decoder_block: mlp_norm must be"):
        torch.compile(lambda: minfer.w4a16_decoder_block(**(call | {"mlp_norm": torch.zeros(127).half()})), backend="aot_eager")()


def test_autograd():
    """As of every operator that writes an argument."""
    call = good("cpu")
    call["a"].requires_grad_()
    with pytest.raises(RuntimeError, match="cannot be differentiated, but an argument requires grad"):
        minfer.w4a16_decoder_block(**call)
    with torch.no_grad():
        assert minfer.w4a16_decoder_block(**call).shape == (3, 40)


def test_meta_errors():
    """The same words without contents, but for what memory tells."""
    for change, message in bad("cpu"):
        if "overlap" in message:
            continue
        call = {name: x.to("meta") if torch.is_tensor(x) and x.is_contiguous() else x for name, x in (good("cpu") | change).items()}
        if any(torch.is_tensor(x) and x.device.type == "cpu" for x in call.values()):
            continue
        with pytest.raises(RuntimeError, match=f"^minfer::w4a16_decoder_block: {message}"):
            minfer.w4a16_decoder_block(**call)


def test_plan():
    """Of the H200 as measured: one token of a model of 8 billion parameters is one launch, two are not, by name they are."""
    sizes = dict(n=6144, k=4096, inter=14336)
    one = minfer.plan("w4a16_decoder_block", m=1, device=-1, **sizes)
    assert one.one_launch and one.ctas == 132 and "1 launch" in str(one) and one.problem.attention == 4096
    assert not minfer.plan("w4a16_decoder_block", m=2, device=-1, **sizes).one_launch
    assert minfer.plan("w4a16_decoder_block", m=2, kernel="one_launch", device=-1, **sizes).one_launch
    for options in (dict(kernel="separate"), dict(group_size=32)):
        other = minfer.plan("w4a16_decoder_block", m=1, device=-1, **sizes, **options)
        assert not other.one_launch and "separate" in str(other) and other.workspace_bytes == 0
    assert minfer.plan("w4a16_decoder_block", m=1, device=-1, batch_invariant=True, **sizes).one_launch
    wide = dict(n=6144, k=5120, attention=4096, inter=32768, batch_invariant=True)
    assert not minfer.plan("w4a16_decoder_block", m=1, device=-1, **wide).one_launch
    assert minfer.plan("w4a16_decoder_block", m=1, kernel="one_launch", device=-1, **wide).one_launch
    with pytest.raises(RuntimeError, match="in one launch: it takes 1 or 2 tokens"):
        minfer.plan("w4a16_decoder_block", m=3, kernel="one_launch", device=-1, **sizes)
    with pytest.raises(RuntimeError, match="in one launch: in the batch-invariant mode it takes 1 token"):
        minfer.plan("w4a16_decoder_block", m=2, kernel="one_launch", device=-1, batch_invariant=True, **sizes)
    for options, message in (
        (dict(inter=12), "inter must be a multiple of 8"),
        (dict(group_size=48), "group_size"),
        (dict(kernel="x"), "x"),
    ):
        with pytest.raises(ValueError, match=message):
            minfer.plan("w4a16_decoder_block", m=1, device=-1, **(sizes | options))
