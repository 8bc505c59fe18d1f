"""The decoder block on a GPU: one launch and the operators one after the other, against float64.

Outputs, and workspaces, lie in memory that held NaN before; calls are repeated and have to give the same bits.
"""

import itertools
import math

import minfer
import pytest
import torch

from tests.contracts.test_registration import check_op
from tests.decoder_block.cases import DTYPES, Case, bad, by_operators, good
from tests.decoder_block.launches import DEVICE, SIZES, run, same
from tests.gemm.cases import ACTIVATIONS, name_of

pytestmark = pytest.mark.gpu

# ---- one launch ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(hopper, size, m, dtype):
    run(Case(m, *size, dtype).make(DEVICE), "one_launch")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m", [1, 2])
def test_options(hopper, m, dtype):
    """Biases of each type, activations, offsets of norms, columns that are large in every row."""
    for i, (bias, activation) in enumerate(itertools.product((None, dtype, torch.float32), ACTIVATIONS[1:])):
        case = Case(m, 512, 512, 1024, 272, dtype, bias, 128, activation, (0.0, 1.0)[i % 2], loud=i % 3 == 1)
        run(case.make(DEVICE), "one_launch")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("group_size", [128, 256, -1])
def test_groups(hopper, group_size, dtype):
    for m, loud in itertools.product((1, 2), (False, True)):
        run(Case(m, 1024, 512, 1536, 200, dtype, dtype, group_size, loud=loud).make(DEVICE), "one_launch")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_row_is_its_own(hopper, dtype):
    """A row does not change with what the row beside it holds, nor with its place."""
    t = Case(2, 512, 512, 1024, 272, dtype, dtype).make(DEVICE)
    want, residual = run(t, "one_launch")
    other = Case(2, 512, 512, 1024, 272, dtype).make(DEVICE)
    a, own = t.a.clone(), t.before.clone()
    a[1], own[1] = other.a[1], other.before[1]
    have = t.again(a=a, residual=own, kernel="one_launch")
    assert same(have[0], want[0]) and same(own[0], residual[0])
    own = t.before.flip(0).contiguous()
    have = t.again(a=t.a.flip(0).contiguous(), residual=own, kernel="one_launch")
    assert same(have.flip(0), want) and same(own.flip(0), residual)


def test_special_numbers(hopper):
    """A row with a NaN or an infinity is wrong alone."""
    t = Case(2, 512, 512, 1024, 272).make(DEVICE)
    want, residual = run(t, "one_launch")
    for name, number in itertools.product(("a", "residual"), (math.nan, math.inf)):
        x = {"a": t.a.clone(), "residual": t.before.clone()}
        x[name][1, 5] = number
        have = t.again(**x, kernel="one_launch")
        assert not have[1].isfinite().any() and same(have[0], want[0]) and same(x["residual"][0], residual[0]), (name, number)


def test_rows_of_zeros(hopper):
    """No largest number to hold the others by: what comes out is the biases'."""
    t = Case(2, 512, 512, 1024, 272, torch.float16, torch.float32).make(DEVICE)
    t.a.zero_()
    t.before.zero_()
    run(t, "one_launch")
    for name, bias in t.biases.items():
        t.biases[name] = torch.zeros_like(bias)
    have, residual = run(t, "one_launch")
    assert not have.any() and not residual.any()


def test_views(hopper):
    """Rows of a, weights and norms that are not aligned or not contiguous have the same answer."""
    t = Case(2, 512, 512, 1024, 272, bias=torch.float32).make(DEVICE)
    want, residual = run(t, "one_launch")

    def moved(x):
        view = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
        return view.copy_(x)

    args = t.arguments()
    wide = torch.empty(2, 520, device=DEVICE).bfloat16()[:, 3:515].copy_(t.a)
    changes = [dict(a=moved(t.a)), dict(a=wide), dict(residual=moved(t.before))]
    changes += [{name: moved(args[name])} for name in args if name.endswith(("qweight", "scales", "norm", "bias"))]
    for change in changes:
        own = change.get("residual", t.before.clone())
        have = t.again(**({"residual": own} | change))
        t.check(have, residual=own)
        own = change["residual"].copy_(t.before) if "residual" in change else t.before.clone()
        try:
            have = t.again(**({"residual": own} | change), kernel="one_launch")
        except RuntimeError as error:  # it may want them aligned; then it has to say so and write nothing
            assert "minfer::w4a16_decoder_block: " in str(error) and same(own, t.before)
        else:
            assert same(have, want) and same(own, residual)


@pytest.mark.parametrize(
    "change",
    [dict(m=3), dict(m=17), dict(group_size=32), dict(k=520), dict(h=520), dict(inter=1032)],
    ids=str,
)
def test_what_one_launch_cannot(change):
    """Refused where it is asked for, and the residual is as it was; otherwise computed by the operators."""
    t = Case(2, 512, 512, 1024, 272).change(**change).make(DEVICE)
    try:
        have = t.call(kernel="one_launch")
    except RuntimeError as error:
        assert "minfer::w4a16_decoder_block: " in str(error)
        assert same(t.residual, t.before)
    else:
        assert t.case.m <= 2  # a size that it has learnt
        t.check(have, "one_launch")
    run(t)


def test_more_rows_than_one_launch_takes():
    t = Case(3, 512, 512, 1024, 272).make(DEVICE)
    with pytest.raises(RuntimeError, match="minfer::w4a16_decoder_block: .*one.launch"):
        t.call(kernel="one_launch")
    assert same(t.residual, t.before)


# ---- the operators, and what the plan chooses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [None, "separate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_both_paths(dtype, kernel):
    """Any number of rows and any sizes that the operators take."""
    sizes = ((512, 512, 1024, 272), (256, 512, 14336, 136), (520, 264, 1032, 72), (8, 16, 8, 8), (4096, 4096, 14336, 6144))
    for i, (m, size) in enumerate(itertools.product((1, 2, 3, 17), sizes)):
        bias = (None, dtype, torch.float32)[i % 3]
        group, activation, offset = (128, 256, -1, 32)[i % 4], ("silu", "gelu_tanh", "gelu")[i % 3], (0.0, 1.0)[i % 2]
        run(Case(m, *size, dtype, bias, group, activation, offset, loud=i % 4 == 1).make(DEVICE), kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_separate_is_the_operators(dtype):
    """Bit by bit; in the batch-invariant mode that is what the plan takes."""
    for m in (1, 2, 3, 17, 130):
        t = Case(m, 512, 512, 1024, 272, dtype, dtype).make(DEVICE)
        want, residual = by_operators(t)
        assert same(t.call(kernel="separate"), want) and same(t.residual, residual), m
        with minfer.batch_invariant():
            want, residual = by_operators(t)
            assert same(t.call(), want) and same(t.residual, residual), m


# ---- one launch in the batch-invariant mode: the operators' bits ----------------------------------------------------------------------


MODELS = (
    *((2048, 2048, 8192, 3072), (3072, 3072, 8192, 5120), (3584, 3584, 18944, 4608)),
    *((8192, 8192, 28672, 10240), (4096, 5120, 32768, 6144)),
)


def in_order(case: Case) -> None:
    """One launch, whether or not weights may be read early, and a second time in the same memory."""
    t = case.make(DEVICE)
    with minfer.batch_invariant():
        want, residual = by_operators(t)
        for constant in (True, False, True):
            have = t.call(kernel="one_launch", constant_weights=constant)
            assert same(have, want) and same(t.residual, residual), f"{case}: constant weights {constant}"


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", [*SIZES, *MODELS], ids=str)
def test_in_order_sizes(hopper, size, dtype):
    """Rows in one, two and four ranges of k; products of one round and of several; CTAs with slabs of the third product alone."""
    in_order(Case(1, *size, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("group_size", [128, 256, 512, -1])
def test_in_order_groups(hopper, group_size, dtype):
    """Strips of 512 k begin within groups, and have one to five of them."""
    for size in ((512, 512, 1024, 768), (4096, 4096, 14336, 6144), (3584, 3584, 18944, 4608)):
        in_order(Case(1, *size, dtype, dtype, group_size))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_in_order_options(hopper, dtype):
    for i, (bias, activation) in enumerate(itertools.product((None, dtype, torch.float32), ACTIVATIONS[1:])):
        in_order(Case(1, 4096, 4096, 2048, 6144, dtype, bias, 128, activation, (0.0, 1.0)[i % 2], loud=i % 3 == 1))


def test_in_order_last_layer(hopper):
    """Nothing is multiplied behind the residual."""
    t = Case(1, 4096, 4096, 2048, 0).make(DEVICE)
    with minfer.batch_invariant():
        t.call(kernel="separate")
        want = t.residual.clone()
        assert t.call(kernel="one_launch").shape == (1, 0) and same(t.residual, want)


def test_in_order_special_numbers(hopper):
    """Signed zeros, infinities and NaN go through both alike."""
    t = Case(1, 4096, 4096, 2048, 768).make(DEVICE)
    for number in (0.0, -0.0, math.inf, math.nan):
        for name in ("a", "before"):
            x = getattr(t, name)
            kept = x.clone()
            if number == 0.0:
                x.fill_(number)
            else:
                x[0, 5] = number
            with minfer.batch_invariant():
                want, residual = by_operators(t)
                have = t.call(kernel="one_launch")
            assert torch.equal(have.isnan(), want.isnan()) and torch.equal(t.residual.isnan(), residual.isnan()), (name, number)
            assert same(have.nan_to_num(1.0), want.nan_to_num(1.0)) and same(t.residual.nan_to_num(1.0), residual.nan_to_num(1.0)), name
            x.copy_(kept)


def test_in_order_graph(hopper):
    """Replays, one behind the other: no packet of one is found by the next."""
    t = Case(1, 4096, 4096, 14336, 6144).make(DEVICE)
    with minfer.batch_invariant():
        want, residual = by_operators(t)
        t.call(kernel="one_launch")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            t.residual.copy_(t.before)
            out = t.again(kernel="one_launch", constant_weights=True)
    for _ in range(50):
        graph.replay()
    assert same(out, want) and same(t.residual, residual)


def test_in_order_refusals(hopper):
    for case in (Case(2, 512, 512, 1024, 272), Case(1, 512, 512, 1088, 272), Case(1, 128, 128, 512, 272)):
        t = case.make(DEVICE)
        with minfer.batch_invariant(), pytest.raises(RuntimeError, match="minfer::w4a16_decoder_block: "):
            t.call(kernel="one_launch")
        assert same(t.residual, t.before)


# --------------------------------------------------------------------------------------------------------------------------------------


def test_no_rows():
    t = Case(0).make(DEVICE)
    for kernel in (None, "separate"):
        assert t.call(kernel=kernel).shape == (0, 136)


@pytest.mark.parametrize("lead", [(), (1,), (2, 1), (1, 1, 2)], ids=str)
def test_modes(lead):
    m = torch.Size(lead).numel()
    t = Case(m, 512, 512, 1024, 272).make(DEVICE)
    want = t.call()
    own = t.before.clone().view(*lead, 512)
    have = t.again(a=t.a.view(*lead, 512), residual=own)
    assert have.shape == (*lead, 272) and same(have.reshape(m, 272), want) and same(own.view(m, 512), t.residual)


# ---- streams, graphs, errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["one_launch", "separate"])
@pytest.mark.parametrize("m", [1, 2])
def test_graph(hopper, m, kernel):
    """Captured and replayed many times: each replay adds to the residual anew, and what CTAs tell each other in one run must not reach the
    next."""
    t = Case(m, 512, 512, 1024, 272, bias=torch.bfloat16).make(DEVICE)
    t.call(kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = t.again(kernel=kernel)
        again = t.again(kernel=kernel)
    for i in range(20):
        fresh = Case(m, 512, 512, 1024, 272).make(DEVICE)
        t.a.copy_(fresh.a)
        if i % 4 == 0:
            t.residual.copy_(fresh.before)
        before = t.residual.clone()
        own = before.clone()
        eager = t.again(residual=own, kernel=kernel)
        middle = own.clone()
        eager_again = t.again(residual=own, kernel=kernel)
        out.fill_(math.nan)
        again.fill_(math.nan)
        graph.replay()
        assert same(out, eager) and same(again, eager_again) and same(t.residual, own), i
        t.check(out, kernel, before, middle)
        t.check(again, kernel, middle, t.residual)


@pytest.mark.parametrize("kernel", ["one_launch", "separate"])
def test_replays_add_up(hopper, kernel):
    """A graph of one call, replayed: the residual is that of as many eager calls."""
    t = Case(1, 512, 512, 1024, 272).make(DEVICE)
    want = []
    t.residual.copy_(t.before)
    for _ in range(5):
        want.append((t.again(kernel=kernel), t.residual.clone()))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = t.again(kernel=kernel)
    t.residual.copy_(t.before)
    for have, residual in want:
        graph.replay()
        assert same(out, have) and same(t.residual, residual)


@pytest.mark.parametrize("kernel", ["one_launch", "separate"])
def test_streams(hopper, kernel):
    """On two streams at once, behind what they still do."""
    t = Case(2, 1024, 1024, 4096, 1552).make(DEVICE)
    want = t.call(kernel=kernel)
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            own = t.before.clone()
            torch.cuda._sleep(10_000_000)
            for _ in range(30):
                own.copy_(t.before)
                have = t.again(residual=own, kernel=kernel)
            found.append((have, own))
    torch.cuda.synchronize()
    for have, own in found:
        assert same(have, want) and same(own, t.residual)


def test_chain(hopper):
    """Layer after layer in dependent launches, each of what the one before wrote: the same bits each time, and the operators' numbers."""
    layers = [Case(1, 512, 512, 1024, 512).make(DEVICE) for _ in range(6)]

    def chain(kernel, constant):
        x, own = layers[0].a, layers[0].before.clone()
        for layer in layers:
            x = layer.again(a=x, residual=own, kernel=kernel, constant_weights=constant)
        return x, own

    torch.cuda.synchronize()
    want = chain("separate", False)
    first = chain("one_launch", False)
    for have, right in zip(first, want, strict=True):
        assert (have.double() - right.double()).norm() <= 0.03 * right.double().norm()
    for constant in (False, True):
        for _ in range(10):
            assert all(same(x, y) for x, y in zip(chain("one_launch", constant), first, strict=True))


def test_errors():
    """The words of the CPU, but for names of dtypes; nothing is written."""
    for change, message in bad(DEVICE):
        call = good(DEVICE) | change
        before = call["residual"].clone()
        with pytest.raises(RuntimeError, match=f"minfer::w4a16_decoder_block: {message}"):
            minfer.w4a16_decoder_block(**call)
        assert torch.equal(call["residual"], before), message
    assert minfer.w4a16_decoder_block(**good(DEVICE)).shape == (3, 40)


@pytest.mark.parametrize("kernel", [None, "separate"])
def test_opcheck(kernel):
    t = Case(2, 512, 512, 1024, 272, bias=torch.float32).make(DEVICE)
    call = t.arguments() | {"residual": t.before.clone(), "kernel": kernel}
    overload = torch.ops.minfer.w4a16_decoder_block.default
    names = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    check_op(overload, tuple(call.pop(name) for name in names), call)


def test_compiled():
    """In one graph of torch.compile, with the residual that it writes."""
    torch._dynamo.reset()
    t = Case(1, 512, 512, 1024, 272).make(DEVICE)
    want = t.call() * 2
    own = t.before.clone()
    compiled = torch.compile(lambda a, residual: t.again(a=a, residual=residual) * 2, fullgraph=True, backend="aot_eager")
    assert same(compiled(t.a, own), want) and same(own, t.residual)
