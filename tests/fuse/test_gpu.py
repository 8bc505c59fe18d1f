"""Fused functions on a GPU against float64, in graphs, on views, with NaN where nobody reads."""

import threading

import pytest
import torch
from minfer import fuse

from tests.fuse.cases import (
    BF16,
    E4M3,
    F16,
    F32,
    activations,
    add_rms_norm,
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

pytest.importorskip("cutlass.cute", reason="the CuTe DSL is not installed")
pytestmark = pytest.mark.gpu
SHAPES = [
    (1, 8),
    (3, 1),
    (5, 7),
    (2, 3, 64),
    (129, 96),
    (1, 1000),
    (300, 1024),
    (7, 4096),
    (1000, 4096),
    (33, 5120),
    (5, 16384),
    (3, 50257),
    (9, 131072),
]


def rows(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_results(shape, dtype):
    x, y = rows(*shape, dtype=dtype), rows(*shape, dtype=dtype)
    weight, bias = rows(shape[-1], dtype=dtype), rows(shape[-1], dtype=dtype)
    number = torch.tensor(0.5)
    judged(gated, x, y)
    judged(scaled, x, weight, rows(*shape[:-1], 1, dtype=dtype), number)
    judged(scaled, x, weight, rows(*shape[:-1], 1, dtype=dtype), number.cuda())
    judged(activations, x)
    judged(rms_norm, x, weight)
    judged(add_rms_norm, x, y, weight)
    judged(add_rms_norm, x, y, None, eps=1e-3)
    judged(layer_norm, x, weight, bias)
    judged(softmax, x, torch.tensor(2.0))
    judged(quantized, x)
    judged(four_passes, x)
    judged(numbered, x.float())
    judged(saturated, x * 200, torch.tensor(0.3))
    if shape[-1] > 1:
        judged(statistics, x)


@pytest.mark.parametrize("seed", range(200))
def test_drawn(seed):
    function, reduces = drawn(seed)
    fused = (fuse.rowwise if reduces else fuse.pointwise)(function)
    shape = [(6, 80), (64, 1024), (17, 333), (2, 20000)][seed % 4]
    judged(fused, rows(*shape), rows(*shape), rows(shape[1], dtype=F32), rows(shape[0], 1), magnitude=1.0)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(
    "shape", [(140, 32776), (300, 40000), (133, 65536), (70, 131072), (40, 262144)], ids=lambda shape: "x".join(map(str, shape))
)
def test_rings(shape, dtype):
    """Rows that pass through shared memory, more than CTAs stay."""
    x = rows(*shape, dtype=dtype)
    weight = rows(shape[1], dtype=dtype)
    judged(rms_norm, x, weight)
    judged(layer_norm, x, weight, rows(shape[1], dtype=dtype))
    judged(softmax, x, torch.tensor(2.0))
    judged(statistics, x)
    judged(quantized, x)
    judged(four_passes, x)
    judged(add_rms_norm, x, rows(*shape, dtype=dtype), weight)


@pytest.mark.parametrize("shape", [(1283, 2056), (2047, 4096), (2046, 2568), (5, 4096)], ids=lambda shape: "x".join(map(str, shape)))
def test_rows_below_each_other(shape):
    """A thread's vectors are of two or four rows, of which the last ones may not exist, and of columns that end within a CTA's."""
    whole = rows(shape[0], shape[1] + 8)
    coefficients = [rows(shape[1], dtype=F32) for _ in range(3)]
    judged(rational, whole[:, 8:], rows(*shape), *coefficients)
    judged(rational, rows(*shape), whole[:, :-8], *coefficients)


def test_views():
    whole = torch.full((40, 3, 200), float("nan"), device="cuda", dtype=BF16)
    whole[:, 1, 8:136] = rows(40, 128)
    view = whole[:, 1, 8:136]
    judged(rms_norm, view, rows(128))
    judged(gated, view, rows(40, 128))
    odd = torch.full((40, 131), float("nan"), device="cuda", dtype=BF16)
    odd[:, 1:130] = rows(40, 129)
    judged(softmax, odd[:, 1:130], torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="must be neighbours"):
        gated(rows(64, 32).t(), rows(32, 64))
    with pytest.raises(RuntimeError, match="one stride"):
        gated(rows(4, 6, 32)[:, :5], rows(4, 5, 32))


def test_integers_and_codes():
    i, j = torch.randint(-100, 100, (40, 333), dtype=torch.int32), torch.randint(1, 9, (40, 333), dtype=torch.int32)
    for have, want in zip(integers(i.cuda(), j.cuda()), integers(i, j), strict=True):
        assert torch.equal(have.cpu(), want)
    x = rows(30, 64).to(E4M3)
    assert torch.equal(fuse.pointwise(lambda x: x.float() * 2)(x), x.float() * 2)
    assert saturated(torch.tensor([[1e6, -1e6, float("nan"), 3.0]], device="cuda"), torch.tensor(1.0))[1].tolist() == [[127, -128, 0, 127]]


def test_special_numbers():
    x = rows(16, 256, dtype=F32)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), -float("inf")
    judged(softmax, x, torch.tensor(1.0))
    judged(fuse.rowwise(lambda x: (x.amax(-1), torch.maximum(x, -x))), x)


def test_quotients():
    """By one number a row, whose reciprocal may be too large or too small for float32, and by a row of them: 2 ulp."""
    inf, nan = float("inf"), float("nan")
    special = [0.0, -0.0, inf, -inf, nan, 1.0, -3.0, 2.0**-149, 3e-42, 2.0**-128, 2.0**-126, -1.5e-38, 2.0**126, 2.0**127, -3e38, 7e37]
    divisors = torch.tensor(special, device="cuda")[:, None]
    x = torch.cat([rows(16, 32, dtype=F32), torch.tensor(special, device="cuda").expand(16, 16), divisors * rows(16, 16, dtype=F32)], 1)
    quotient = fuse.pointwise(lambda x, y: x / y)
    for have, want in (
        (quotient(x, divisors), x.double() / divisors.double()),
        (quotient(x, x.flip(0).contiguous()), x.double() / x.flip(0).double()),
    ):
        want = want.float()
        ordinary = want.isfinite() & (want.abs() >= 2.0**-126)
        assert torch.equal(have.isnan(), want.isnan()) and torch.equal(have.isinf() & ~want.isinf(), torch.zeros_like(ordinary))
        assert ((have - want).abs()[ordinary] <= 2.5 * 2.0**-23 * want.abs()[ordinary]).all()
        assert ((have - want).abs()[want.abs() < 2.0**-126] <= 2.0**-126).all()


def test_operators():
    x, y, weight = rows(4, 32), rows(4, 32), rows(32)
    torch.library.opcheck(gated.op, (x, y))
    torch.library.opcheck(add_rms_norm.op, (x, y, weight))
    torch.library.opcheck(quantized.op, (x,))


def test_compiled_and_captured():
    def both(x, y, w):
        return rms_norm(gated(x, y), w) * 2

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    weight = rows(512)
    for count in (4, 70, 1):
        x, y = rows(count, 512), rows(count, 512)
        torch.testing.assert_close(compiled(x, y, weight), both(x, y, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both(x, y, weight)
    x.copy_(rows(1, 512))
    graph.replay()
    assert torch.equal(out, both(x, y, weight))


def test_many_rows_and_none():
    x = rows(70000, 64)
    judged(rms_norm, x, rows(64))
    judged(gated, x, x)
    assert gated(x[:0], x[:0]).shape == (0, 64) and rms_norm(x[:0], rows(64)).shape == (0, 64)


def test_threads_and_streams():
    x, weight = rows(64, 2048), rows(2048)
    want = rms_norm(x, weight)
    torch.cuda.synchronize()
    failures = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    assert torch.equal(rms_norm(x, weight), want)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_export(tmp_path):
    x, weight = rows(64, 2048), rows(2048)
    exported = fuse.load(fuse.export(rms_norm, tmp_path / "norm", [(x, weight)]))
    assert torch.equal(exported(x, weight), rms_norm(x, weight))
    exported = fuse.load(fuse.export(gated, tmp_path / "gated", [(x, x)]))
    for columns in (64, 2048, 96):
        part = x[:5, :columns]
        assert torch.equal(exported(part, part), gated(part, part))
