"""The decoder block of 16-bit weights on a GPU: one launch and the operators one after the other, against float64.

Outputs, and workspaces, lie in memory that held NaN before; calls are repeated and have to give the same bits.
"""

import dataclasses
import itertools
import math

import minfer
import pytest
import torch

from tests.decoder_block.cases import DTYPES
from tests.decoder_block.dense_cases import DenseCase, bad, by_operators, good
from tests.decoder_block.launches import DEVICE, SIZES, run, same
from tests.gemm.cases import ACTIVATIONS, name_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("size", [*SIZES, (3584, 3584, 18944, 4608), (64, 192, 320, 40), (3072, 3072, 8192, 5120)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sizes(hopper, size, m, dtype):
    run(DenseCase(m, *size, dtype).make(DEVICE), "one_launch")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m", [1, 2])
def test_options(hopper, m, dtype):
    """Biases of each type, activations, offsets of norms, columns that are large in every row."""
    for i, (bias, activation) in enumerate(itertools.product((None, dtype, torch.float32), ACTIVATIONS[1:])):
        run(DenseCase(m, 512, 512, 1024, 272, dtype, bias, 128, activation, (0.0, 1.0)[i % 2], loud=i % 3 == 1).make(DEVICE), "one_launch")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows(hopper, dtype):
    """A row is wrong alone that has a NaN or an infinity, and does not change with its place."""
    t = DenseCase(2, 512, 512, 1024, 272, dtype, dtype).make(DEVICE)
    want, residual = run(t, "one_launch")
    for name, number in itertools.product(("a", "residual"), (math.nan, math.inf)):
        x = {"a": t.a.clone(), "residual": t.before.clone()}
        x[name][1, 5] = number
        have = t.again(**x, kernel="one_launch")
        assert not have[1].isfinite().any() and same(have[0], want[0]) and same(x["residual"][0], residual[0]), (name, number)
    own = t.before.flip(0).contiguous()
    have = t.again(a=t.a.flip(0).contiguous(), residual=own, kernel="one_launch")
    assert same(have.flip(0), want) and same(own.flip(0), residual)


def test_large_numbers_of_half_precision(hopper):
    """What a norm's weight makes of the residual is beyond float16's range, as long as the norm's factor is not there."""
    t = DenseCase(1, 512, 512, 1024, 272, torch.float16).make(DEVICE)
    t.before *= 10000
    t.norms["mlp"] *= 50
    t.dense["gate_up"] *= 0.02
    run(t, "one_launch")


def test_views(hopper):
    """Rows of a, weights and norms that are not aligned or not contiguous have the same answer."""
    t = DenseCase(2, 512, 512, 1024, 272, bias=torch.float32).make(DEVICE)
    want, residual = run(t, "one_launch")

    def moved(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)

    def with_gaps(x):
        return torch.empty(x.shape[0], x.shape[1] + 40, dtype=x.dtype, device=DEVICE)[:, : x.shape[1]].copy_(x)

    args = t.arguments()
    changes = [dict(a=moved(t.a)), dict(a=with_gaps(t.a)), dict(residual=moved(t.before))]
    changes += [{name: moved(args[name])} for name in args if name.endswith(("weight", "norm", "bias"))]
    changes += [
        {name: view(args[name])} for name in args if name.endswith("_weight") for view in (with_gaps, lambda x: x.t().contiguous().t())
    ]
    for change in changes:
        own = change.get("residual", t.before.clone())
        have = t.again(**({"residual": own} | change), kernel="one_launch")
        assert same(have, want) and same(own, residual)


@pytest.mark.parametrize("change", [dict(m=3), dict(k=520), dict(h=544), dict(inter=1040)], ids=str)
def test_what_one_launch_cannot(change):
    """Refused where it is asked for, and the residual is as it was; otherwise computed by the operators."""
    t = DenseCase(2, 512, 512, 1024, 272).change(**change).make(DEVICE)
    with pytest.raises(RuntimeError, match="minfer::decoder_block: .*one.launch"):
        t.call(kernel="one_launch")
    assert same(t.residual, t.before)
    run(t)


@pytest.mark.parametrize("kernel", [None, "separate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_both_paths(dtype, kernel):
    """Any number of rows and any sizes that the operators take."""
    sizes = ((512, 512, 1024, 272), (256, 512, 14336, 136), (520, 264, 1032, 72), (8, 16, 8, 8), (4096, 4096, 14336, 6144))
    for i, (m, size) in enumerate(itertools.product((1, 2, 3, 17), sizes)):
        bias = (None, dtype, torch.float32)[i % 3]
        activation, offset = ("silu", "gelu_tanh", "gelu")[i % 3], (0.0, 1.0)[i % 2]
        run(DenseCase(m, *size, dtype, bias, 128, activation, offset, loud=i % 4 == 1).make(DEVICE), kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_separate_is_the_operators(dtype):
    """Bit by bit; in the batch-invariant mode that is what the plan takes, and one launch is refused."""
    for m in (1, 2, 3, 17, 130):
        t = DenseCase(m, 512, 512, 1024, 272, dtype, dtype).make(DEVICE)
        want, residual = by_operators(t)
        assert same(t.call(kernel="separate"), want) and same(t.residual, residual), m
        with minfer.batch_invariant():
            want, residual = by_operators(t)
            assert same(t.call(), want) and same(t.residual, residual), m
            with pytest.raises(RuntimeError, match="minfer::decoder_block: "):
                t.call(kernel="one_launch")


@pytest.mark.parametrize("kernel", ["one_launch", "separate"])
@pytest.mark.parametrize("m", [1, 2])
def test_graph(hopper, m, kernel):
    """Captured and replayed: each replay adds to the residual anew, and what CTAs tell each other in one run must not reach the next."""
    t = DenseCase(m, 512, 512, 1024, 272, bias=torch.bfloat16).make(DEVICE)
    t.call(kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, again = t.again(kernel=kernel), t.again(kernel=kernel)
    for i in range(20):
        fresh = DenseCase(m, 512, 512, 1024, 272).make(DEVICE)
        t.a.copy_(fresh.a)
        if i % 4 == 0:
            t.residual.copy_(fresh.before)
        own = t.residual.clone()
        eager, middle = t.again(residual=own, kernel=kernel), own.clone()
        eager_again = t.again(residual=own, kernel=kernel)
        out.fill_(math.nan)
        again.fill_(math.nan)
        graph.replay()
        assert same(out, eager) and same(again, eager_again) and same(t.residual, own), i
        t.check(again, kernel, middle, t.residual)


def test_chain(hopper):
    """Layer after layer in dependent launches, each of what the one before wrote: the same bits each time, and the numbers of float64."""
    layers = [DenseCase(1, 512, 512, 1024, 512).make(DEVICE) for _ in range(6)]

    def chain(constant):
        x, own = layers[0].a, layers[0].before.clone()
        for layer in layers:
            x = layer.again(a=x, residual=own, kernel="one_launch", constant_weights=constant)
        return x, own

    x, own = layers[0].a, layers[0].before
    for layer in layers:
        truth = dataclasses.replace(layer.truth(layer.steps("one_launch"), own), a=x)
        own = truth.of_residual().value.to(own.dtype)
        x = truth.returned(own)[0].to(own.dtype)
    torch.cuda.synchronize()
    first = chain(False)
    for have, right in zip(first, (x, own), strict=True):
        assert (have.double() - right.double()).norm() <= 0.02 * right.double().norm()
    for constant in (False, True):
        for _ in range(10):
            assert all(same(x, y) for x, y in zip(chain(constant), first, strict=True))


def test_errors():
    """The words of the CPU, but for names of dtypes; nothing is written."""
    for change, message in bad(DEVICE):
        call = good(DEVICE) | change
        before = call["residual"].clone()
        with pytest.raises(RuntimeError, match=f"minfer::decoder_block: {message}"):
            minfer.decoder_block(**call)
        assert torch.equal(call["residual"], before), message
    assert minfer.decoder_block(**good(DEVICE)).shape == (3, 40)


@pytest.mark.parametrize("kernel", [None, "separate"])
def test_opcheck(kernel):
    t = DenseCase(2, 512, 512, 1024, 272, bias=torch.float32).make(DEVICE)
    call = t.arguments() | {"residual": t.before.clone(), "kernel": kernel}
    overload = torch.ops.minfer.decoder_block.default
    operands = tuple(call.pop(argument.name) for argument in overload._schema.arguments if not argument.kwarg_only)
    result = torch.library.opcheck(overload, operands, call)
    assert set(result.values()) == {"SUCCESS"}, result


def test_compiled():
    """In one graph of torch.compile, with the residual that it writes."""
    torch._dynamo.reset()
    t = DenseCase(1, 512, 512, 1024, 272).make(DEVICE)
    want = t.call() * 2
    own = t.before.clone()
    compiled = torch.compile(lambda a, residual: t.again(a=a, residual=residual) * 2, fullgraph=True, backend="aot_eager")
    assert same(compiled(t.a, own), want) and same(own, t.residual)
