"""Fused functions without a GPU: what is traced and refused, the operators, and what torch computes."""

import math
import random

import pytest
import torch
from minfer import fuse
from minfer.fuse.graph import Graph
from minfer.fuse.row_config import configure
from minfer.fuse.row_function import _broadcast

from tests.fuse.cases import (
    BF16,
    E4M3,
    F16,
    F32,
    activations,
    add_rms_norm,
    check,
    drawn,
    four_passes,
    gated,
    integers,
    judged,
    layer_norm,
    numbered,
    quantized,
    rational,
    rms_norm,
    saturated,
    scaled,
    softmax,
    statistics,
)


def rows(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_results(dtype):
    x, y = rows(3, 5, 64, dtype=dtype), rows(3, 5, 64, dtype=dtype)
    weight, bias = rows(64, dtype=dtype), rows(64, dtype=dtype)
    judged(gated, x, y)
    judged(scaled, x, weight, rows(3, 5, 1, dtype=dtype), torch.tensor(0.5))
    judged(activations, x)
    judged(rational, x, y, weight, bias, weight)
    judged(rms_norm, x, weight)
    judged(add_rms_norm, x, y, weight)
    judged(add_rms_norm, x, y, None, eps=1e-3)
    judged(layer_norm, x, weight, bias)
    judged(softmax, x, torch.tensor(2.0))
    judged(quantized, x)
    judged(statistics, x)
    judged(four_passes, x)
    judged(numbered, x)
    judged(saturated, x * 200, torch.tensor(0.3))


def test_functions_are_torchs():
    """The graph against the Python function itself in float64."""
    x, y, weight, bias = (rows(7, 96).double() for _ in range(4))
    weight, bias = weight[0], bias[0]
    for function, args in (
        (gated, (x, y)),
        (activations, (x,)),
        (rms_norm, (x, weight)),
        (layer_norm, (x, weight, bias)),
        (four_passes, (x,)),
    ):
        have = function.reference(*(a.to(F32) for a in args), precision=torch.float64)
        want = function.function(*(a.to(F32).double() for a in args))
        torch.testing.assert_close(
            have.double(), want.double(), rtol=1e-2 if have.dtype == BF16 else 1e-6, atol=1e-2 if have.dtype == BF16 else 1e-6
        )
    for have, want in zip(statistics.reference(x.to(F32)), statistics.function(x.to(F32).double()), strict=True):
        torch.testing.assert_close(have.double(), want.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_drawn(seed):
    function, reduces = drawn(seed)
    fused = (fuse.rowwise if reduces else fuse.pointwise)(function)
    args = rows(6, 80), rows(6, 80), rows(80, dtype=F32), rows(6, 1)
    judged(fused, *args)
    exact = fused.reference(*args, precision=torch.float64)
    single = fused.reference(*args, precision=torch.float32)
    direct = function(*args)  # rounds nowhere else: all is cast to float32 first
    for want, near, have in zip(*(x if isinstance(x, tuple) else (x,) for x in (exact, single, direct)), strict=True):
        check(have, want, near, f"seed {seed}", magnitude=1.0)


def test_integers():
    i, j = torch.randint(-100, 100, (4, 33), dtype=torch.int32), torch.randint(1, 9, (4, 33), dtype=torch.int32)
    for have, want in zip(integers(i, j), integers.function(i, j), strict=True):
        assert torch.equal(have, want)


def test_casts_saturate():
    codes, numbers, positive = saturated(torch.tensor([[1e6, -1e6, math.nan, 3.0]]), torch.tensor(1.0))
    assert codes.float().tolist()[0][:2] == [448.0, -448.0] and codes.float()[0, 2].isnan() and codes.float()[0, 3] == 3.0
    assert numbers.tolist() == [[127, -128, 0, 127]] and positive.tolist() == [[True, False, False, True]]


def test_shapes():
    x = rows(2, 3, 16)
    assert statistics(x)[0].shape == (2, 3) and statistics(x)[1].shape == (2, 3, 1)
    assert rms_norm(rows(16), rows(16)).shape == (16,)
    assert gated(rows(0, 16), rows(0, 16)).shape == (0, 16)
    assert scaled(rows(16), rows(16), torch.tensor(1.0), torch.tensor(1.0)).shape == (16,)
    halves = rows(6, 64)
    assert torch.equal(gated(halves[:, :32], halves[:, 32:]), gated(halves[:, :32].clone(), halves[:, 32:].clone()))


def test_operators():
    x, y, weight = rows(4, 32), rows(4, 32), rows(32)
    torch.library.opcheck(gated.op, (x, y))
    torch.library.opcheck(rms_norm.op, (x, weight), {"eps": 1e-5})
    torch.library.opcheck(add_rms_norm.op, (x, y, weight))
    torch.library.opcheck(quantized.op, (x,))
    torch.library.opcheck(statistics.op, (x,))


def test_compiled_graphs():
    calls = torch.compile(lambda x, y, w: rms_norm(gated(x, y), w) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = rows(32)
    for count in (4, 7, 1):
        x, y = rows(count, 32), rows(count, 32)
        assert torch.equal(calls(x, y, weight), rms_norm(gated(x, y), weight) * 2)


def test_gradients_are_refused():
    with pytest.raises(RuntimeError, match="has no backward"):
        gated(rows(2, 8).requires_grad_(), rows(2, 8)).sum().backward()


def fused(function, kind=fuse.rowwise, **options):
    return kind(function, **options)


REFUSED = {
    "cumsum": (lambda x: x.cumsum(-1), r"test_cpu.py:\d+: torch.cumsum is not among"),
    "branch": (lambda x: x if x.sum() > 0 else -x, "dim must be -1"),
    "branch on a value": (lambda x: x if x.amax(-1) > 0 else -x, "cannot branch on"),
    "rows": (lambda x: x / x.shape[0], "number of rows is not known"),
    "dim": (lambda x: x.sum(0), "dim must be -1"),
    "part": (lambda x: x[:, :4], "pass the parts as arguments"),
    "outside": (lambda x: x + torch.ones(8), "tensors cannot be made|is not an argument"),
    "in place": (lambda x: x.add_(1), "is not among"),
    "in place operator": (lambda x: x.__iadd__(1), "not changed in place"),
    "assignment": (lambda x: x.__setitem__(0, 1.0), "cannot be assigned"),
    "double": (lambda x: x.double(), "is not among|float64"),
    "double cast": (lambda x: x.to(torch.float64), "do not take float64"),
    "matmul": (lambda x: x @ x, "unsupported operand|is not among|__matmul__"),
    "attribute": (lambda x: x.grad, "has no 'grad'"),
    "nothing": (lambda x: None, "returns nothing"),
    "number": (lambda x: 3, "returns tensors that it computed"),
    "copy": (lambda x: x.copy_(x + 1), "that `mutates` names"),
    "argmax": (lambda x: x.max(-1)[1], "place of a row's maximum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fused_names_the_line(case):
    function, message = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError), match=message):
        fused(function)(rows(4, 8))


def test_wrong_calls():
    with pytest.raises(RuntimeError, match="do not broadcast"):
        gated(rows(4, 8), rows(4, 9))
    with pytest.raises(RuntimeError, match=r"y must be \[2, 4, 8\]"):
        gated(rows(2, 4, 8), rows(2, 1, 8))
    with pytest.raises(RuntimeError, match="x must not be complex64"):
        gated(torch.zeros(2, 8, dtype=torch.complex64), rows(2, 8))
    with pytest.raises(RuntimeError, match="make it with minfer.fuse.rowwise"):
        fuse.pointwise(lambda x: x.amax(-1))(rows(2, 8))
    with pytest.raises(RuntimeError, match=r"abs has no signature.*lambda x: "):
        fuse.pointwise(torch.abs)
    with pytest.raises(RuntimeError, match="mutates names 'z'"):
        fuse.pointwise(lambda x: x, mutates=("z",))
    with pytest.raises(RuntimeError, match="returns=2"):
        fuse.rowwise(lambda x, y: (x.copy_(y), x.amax(-1), x.amin(-1))[1:], mutates=("x",))(rows(2, 8), rows(2, 8))
    with pytest.raises(RuntimeError, match="named parameters"):
        fuse.pointwise(lambda *x: x[0])
    with pytest.raises(RuntimeError, match="must be a tensor, a number"):
        fuse.pointwise(lambda x, y=(1, 2): x)


def test_graphs_are_data():
    gated(rows(2, 8), rows(2, 8))
    add_rms_norm(rows(2, 8), rows(2, 8))
    seen = [graph for function in (gated, quantized, add_rms_norm, saturated, numbered) for graph in function._traces.values()]
    assert len(seen) >= 2
    for graph in seen:
        again = Graph.from_plain(graph.plain())
        assert again == graph and again.text() == graph.text()


def test_constants_make_graphs():
    x, y = rows(2, 8), rows(2, 8)
    assert not torch.equal(add_rms_norm(x, y.clone(), eps=1e-6), add_rms_norm(x, y.clone(), eps=1.0))


def test_infinite_constants():
    masked = fuse.rowwise(lambda x: torch.softmax(torch.where(x > 0, x.float(), -math.inf), -1))
    x = rows(4, 32)
    torch.testing.assert_close(masked(x), torch.softmax(torch.where(x > 0, x.float(), -math.inf), -1))
    graph = next(iter(masked._traces.values()))
    assert Graph.from_plain(graph.plain()) == graph


def test_e4m3_inputs():
    x = rows(4, 32).to(E4M3)
    assert torch.equal(fuse.pointwise(lambda x: x.float() * 2)(x), x.float() * 2)


@pytest.mark.parametrize("shape", [(1, 8), (3, 1), (1, 1), (2, 1, 1), (1,)], ids=lambda shape: "x".join(map(str, shape)))
def test_few(shape):
    """Where rows, columns and single numbers have the same shapes."""
    x, column = rows(*shape), rows(*shape[:-1], 1)
    judged(gated, x, x)
    judged(rms_norm, x, rows(shape[-1]))
    judged(scaled, x, rows(shape[-1]), column, torch.tensor(0.5))

    def both(x, column):
        return x + column, column * 2

    shifted, doubled = fuse.pointwise(both)(x, column)
    assert shifted.shape == x.shape and (doubled.shape == column.shape or shape == (1,))
    torch.testing.assert_close(doubled.reshape(column.shape), column * 2)


def test_shapes_broadcast_as_torch_has_it():
    draw = random.Random(0)
    for _ in range(500):
        shapes = [tuple(draw.choice((0, 1, 1, 2, 3)) for _ in range(draw.randrange(4))) for _ in range(draw.randint(1, 3))]
        try:
            want = tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            with pytest.raises(RuntimeError):
                _broadcast(shapes)
        else:
            assert _broadcast(shapes) == want, shapes


@pytest.mark.parametrize("vectors", [33, 48, 64, 96, 100, 128, 160, 192, 200, 257, 300, 512, 513, 1000, 16384])
def test_elementwise_functions_leave_few_threads_without_work(vectors):
    graph = Graph((), (), ())
    for rows in (1, 100, 1 << 20):
        config = configure(graph, rows, vectors * 8, 8, clusters=True)
        parts = -(-vectors // config.threads)
        assert config.threads * parts <= max(vectors * 9 // 8, -(-vectors // 64) * 64), config


@pytest.mark.parametrize("columns", [8, 64, 256, 384, 512, 1024, 1536, 2048, 8192])
def test_many_short_rows_share_a_cta(columns):
    """CTAs with a vector of 128 threads each start slower than memory takes their bytes."""
    config = configure(Graph((), (), ()), 1 << 22, columns, 8, clusters=True)
    assert config.block == 256 and config.vectors == 1
    assert configure(Graph((), (), ()), 100, columns, 8, clusters=True).block <= 128
