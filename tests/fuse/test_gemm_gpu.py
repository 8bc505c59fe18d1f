"""Fused GEMMs on a GPU against float64, in graphs, on views, with NaN where nobody reads."""

import threading

import pytest
import torch
from minfer import fuse
from minfer.fuse import gemm_kernels

from tests.fuse import gemm_cases as cases
from tests.fuse.gemm_cases import BF16, E4M3, F16, F32, KINDS, bias_gelu, columns_unit, expert_bias, expert_statistics, judged, norms

pytest.importorskip("cutlass.cute", reason="the CuTe DSL is not installed")
pytestmark = pytest.mark.gpu
SHAPES = [
    (1, 16, 1),
    (3, 48, 7),
    (64, 256, 64),
    (65, 528, 72),
    (129, 80, 200),
    (127, 4096, 512),
    (300, 1008, 1000),
    (512, 512, 512),
    (1000, 1040, 328),
    (2049, 2064, 136),
    (4100, 4096, 264),
]


@pytest.fixture(autouse=True)
def poisoned():
    """What torch hands out next held NaN before."""
    for _ in range(2):
        torch.full((16 << 20,), float("nan"), device="cuda")


def matrices(m, n, k, dtype=BF16, b_major="k", device="cuda"):
    a = torch.randn(m, k, device=device).to(dtype)
    b = (torch.randn(n, k, device=device) / k**0.5).to(dtype).t()
    return a, b if b_major == "k" else b.contiguous()


def close_to(kind):
    """How far a result may lie from another order of sums where one rounding decides."""
    return 2.0**-7 if kind == "stochastic" else 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_results(shape, kind):
    m, n, k = shape
    n = -(-n // columns_unit(kind)) * columns_unit(kind)
    for b_major in ("k", "n"):
        function, operands = cases.operands_of(kind, m, n)
        judged(function, *matrices(m, n, k, b_major=b_major), operands, near=close_to(kind))


@pytest.mark.parametrize("n", [1, 2, 7, 12, 100, 1001])
def test_odd_widths(n):
    for kind in ("biases", "residual", "scattered", *(("norms", "accumulated") if n > 1 else ())):
        function, operands = cases.operands_of(kind, 70, n)
        judged(function, *matrices(70, n, 48), operands)


@pytest.mark.parametrize("dtype", [F16, E4M3])
@pytest.mark.parametrize("shape", [(64, 256, 64), (65, 528, 72), (1000, 1040, 336), (300, 1008, 1001)], ids=str)
def test_dtypes(shape, dtype):
    m, n, k = shape
    for kind in ("plain", "bias_gelu", "swiglu", "norms"):
        function, operands = cases.operands_of(kind, m, n)
        # Tensor cores add FP8 products with 13 bits behind the point of the largest; a gated result is a product of two such sums.
        near = 0.0 if dtype != E4M3 else 2.0**-7 if kind == "swiglu" else 2.0**-8
        judged(function, *matrices(m, n, k, dtype), operands, near=near)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_scales(scale):
    a, b = matrices(200, 512, 320)
    for kind in ("plain", "norms", "codes", "residual"):
        function, operands = cases.operands_of(kind, 200, 512)
        judged(function, (a * scale).to(BF16), b, operands)


@pytest.mark.parametrize("seed", range(100))
def test_drawn(seed):
    function, operands = cases.drawn(seed)
    m, n, k = [(6, 32, 24), (200, 512, 128), (333, 1040, 96), (64, 2048, 64)][seed % 4]
    judged(function, *matrices(m, n, k), operands(m, n, "cuda"))


@pytest.mark.parametrize("stored", [BF16, F16, E4M3, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 1), (64, 256, 64), (130, 96, 200), (300, 528, 1001), (2049, 4096, 264)], ids=str)
def test_prologues(shape, stored):
    m, n, k = shape
    _, b = matrices(m, n, k)
    a = torch.randn(m, k, device="cuda") * (20 if stored == torch.int8 else 1)
    a = a.to(stored)
    factor, weight = torch.rand(m, 1, device="cuda"), torch.randn(k, device="cuda").to(BF16)
    for layout in (b, b.contiguous()):
        # A rounding to bfloat16 may fall the other way where float32 decides it: one in k products changes by 2^-8.
        near = 2.0**-8 / k**0.5
        judged(cases.normalised, a, layout, [torch.randn(n, device="cuda").to(BF16)], factor=factor, weight=weight, near=near)
        judged(cases.dequantised, a, layout, [], scale=factor[:, 0], near=near)
        judged(cases.mixed, a, layout, [], other=torch.randn(m, k, device="cuda").to(BF16), near=near)


def test_prologues_of_experts():
    a = torch.randn(200, 136, device="cuda").to(E4M3)
    b = (torch.randn(3, 96, 136, device="cuda") / 12).to(BF16).mT
    weight, bias = torch.randn(3, 1, 136, device="cuda"), torch.randn(3, 1, 96, device="cuda")
    offsets = torch.tensor([50, 60, 190], dtype=torch.int32, device="cuda")
    judged(cases.expert_norm, a, b, [bias], weight=weight, offsets=offsets, near=2.0**-10)


@pytest.mark.parametrize("m", [1, 5, 130, 700])
def test_experts(m):
    n, k, experts = 528, 136, 5
    a = torch.randn(m, k, device="cuda").to(BF16)
    b = (torch.randn(experts, n, k, device="cuda") / k**0.5).to(BF16).mT
    bias, scale = torch.randn(experts, 1, n, device="cuda").to(BF16), torch.rand(experts, 1, 1, device="cuda")
    for ends in ([m] * 5, [0, 0, m // 3, m // 3, m // 2], [m // 4, m // 4, m // 2, m - 1, m + 100], [0] * 5, [-3, m // 2, 1, m, m]):
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        for layout in (b, b.contiguous()):
            judged(expert_bias, a, layout, [bias, scale], offsets=offsets)
            judged(expert_statistics, a, layout, [bias], offsets=offsets)
            judged(cases.swiglu, a, layout, [], offsets=offsets)


@pytest.mark.parametrize("shape", [(1, 16, 1), (65, 528, 72), (300, 1008, 1000), (1000, 2064, 328), (2049, 2064, 136)], ids=str)
def test_other_architectures_kernel(shape, monkeypatch):
    """What architectures without WGMMA run, which this one runs as well."""
    monkeypatch.setattr(gemm_kernels, "portable", lambda arch: True)
    m, n, k = shape
    for kind in ("plain", "residual", "swiglu", "geglu", "norms", "scattered"):
        function, operands = cases.operands_of(kind, m, n)
        function = fuse.gemm_epilogue(
            function.function, gate=function.gate, mutates=function.mutates, returns=0 if kind == "scattered" else 1
        )
        for b_major in ("k", "n"):
            judged(function, *matrices(m, n, k, b_major=b_major), operands)
            judged(function, *matrices(m, n, k, F16, b_major=b_major), operands)
    _, b = matrices(m, n, k)
    a = torch.randn(m, k, device="cuda").to(E4M3)
    factor, weight = torch.rand(m, 1, device="cuda"), torch.randn(k, device="cuda").to(BF16)
    normalised = fuse.gemm_epilogue(cases.normalised.function, prologue=cases.normalised.prologue)
    judged(normalised, a, b, [torch.randn(n, device="cuda").to(BF16)], factor=factor, weight=weight, near=2.0**-8 / k**0.5)
    experts = (torch.randn(3, n, k, device="cuda") / k**0.5).to(BF16).mT
    offsets = torch.tensor([m // 3, m // 3, m // 2], dtype=torch.int32, device="cuda")
    statistics = fuse.gemm_epilogue(cases.expert_statistics.function)
    judged(statistics, torch.randn(m, k, device="cuda").to(BF16), experts, [torch.randn(3, 1, n, device="cuda")], offsets=offsets)


def test_views():
    """Strided rows as they are; what TMA cannot address through copies; nothing beside the views is read or written."""
    m, n, k = 200, 256, 128

    def inside(rows, columns, offset, dtype=BF16):
        whole = torch.full((rows + 4, columns + 24), float("nan"), device="cuda", dtype=dtype)
        view = whole[2 : 2 + rows, offset : offset + columns]
        view.copy_(torch.randn(rows, columns, device="cuda"))
        return view

    for offset in (8, 3):
        a, b = inside(m, k, offset), inside(n, k, offset).t()
        for other in (b, inside(k, n, offset)):
            judged(bias_gelu, a, other, [torch.randn(2 * n, device="cuda")[::2]])
            judged(cases.residual, a, other, [inside(m, n, offset), None])
            judged(cases.accumulated, a, other, [inside(m, n, offset)])
    judged(cases.plain, torch.randn(k, m, device="cuda").to(BF16).t(), b, [])
    with pytest.raises(RuntimeError, match="must be neighbours"):
        cases.residual(a, b, torch.randn(n, m, device="cuda").t())
    with pytest.raises(RuntimeError, match="must be on cuda"):
        bias_gelu(a, b, torch.zeros(n))


def test_what_is_scattered_into():
    a, b = matrices(300, 128, 64)
    out = torch.full((50, 128), 7.0, device="cuda").to(BF16)
    index = torch.full((300,), -1, dtype=torch.int64, device="cuda")
    index[7], index[200], index[9] = 49, 0, 1 << 40
    cases.scattered(a, b, index, out, torch.ones(300, device="cuda"))
    acc = a.double() @ b.double()
    torch.testing.assert_close(out[49].double(), acc[7], rtol=2.0**-8, atol=1e-3)
    torch.testing.assert_close(out[0].double(), acc[200], rtol=2.0**-8, atol=1e-3)
    assert (out[1:49] == 7).all()


def test_stochastic_rounding():
    """The bits of torch's own evaluation, where the sums are exact."""
    a = torch.randint(-8, 8, (257, 64), device="cuda").to(BF16)
    b = torch.randint(-8, 8, (64, 272), device="cuda").to(BF16)
    a[:, 0] = 0.0078125
    for seed in (0, -5, 1 << 40):
        seed = torch.tensor(seed)
        assert torch.equal(cases.stochastic(a, b, seed), cases.stochastic.reference(a, b, seed, precision=F32))
        assert torch.equal(cases.stochastic(a, b, seed.cuda()), cases.stochastic(a, b, seed))


def test_operators():
    a, b = matrices(4, 32, 16)
    for kind in ("biases", "norms", "accumulated"):
        function, operands = cases.operands_of(kind, 4, 32)
        torch.library.opcheck(function.op, (a, b, *operands))


def test_compiled_and_captured():
    def both(a, b, bias, c):
        return cases.plain(bias_gelu(a, b, bias), c) * 2

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    _, b = matrices(1, 512, 256)
    _, c = matrices(1, 256, 512)
    bias = torch.randn(512, device="cuda").to(BF16)
    for m in (4, 70, 1):
        a = torch.randn(m, 256, device="cuda").to(BF16)
        torch.testing.assert_close(compiled(a, b, bias, c), both(a, b, bias, c))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both(a, b, bias, c)
        statistics = norms(a, b, bias[:1].float(), bias)
    a.copy_(torch.randn(1, 256, device="cuda"))
    graph.replay()
    assert torch.equal(out, both(a, b, bias, c))
    for have, want in zip(statistics, norms(a, b, bias[:1].float(), bias), strict=True):
        assert torch.equal(have, want)


def test_no_rows():
    a, b = matrices(8, 64, 32)
    assert bias_gelu(a[:0], b, torch.zeros(64, device="cuda")).shape == (0, 64)
    assert [x.shape for x in norms(a[:0], b, torch.zeros(0, device="cuda"), torch.zeros(64, device="cuda"))] == [(0, 64), (0, 1), (0,)]


def test_threads_and_streams():
    a, b = matrices(300, 1024, 512)
    bias = torch.randn(1024, device="cuda").to(BF16)
    want = bias_gelu(a, b, bias)
    torch.cuda.synchronize()
    failures = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    assert torch.equal(bias_gelu(a, b, bias), want)
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
    function, operands = cases.operands_of("norms", 64, 512)
    a, b = matrices(64, 512, 256)
    exported = fuse.load(fuse.export(function, tmp_path / "norms", [(a, b, *operands)]))
    for have, want in zip(exported(a, b, *operands), function(a, b, *operands), strict=True):
        assert torch.equal(have, want)
    exported = fuse.load(fuse.export(cases.plain, tmp_path / "plain", [(a, b)]))
    for m, n, k in ((64, 512, 256), (5, 96, 64), (3000, 1024, 512)):
        a, b = matrices(m, n, k)
        assert torch.equal(exported(a, b), cases.plain(a, b))
