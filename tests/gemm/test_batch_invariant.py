"""Plans that are batch invariant: the order in which a row of D is summed follows from n, k and the types, so that a row has the same bits
in problems of every m."""

import minfer
import pytest
import torch
from minfer.measure.workloads import W4Workload
from minfer.planning.plan import Problem, W4Problem, plan_problem

from tests.gemm.cases import DTYPES, name_of

H200 = -1
ROWS = (1, 7, 16, 33, 64, 100, 200, 384, 768, 1536, 3000)
WEIGHTS = ((4096, 4096), (5120, 5120), (3584, 18944), (1024, 8192), (512, 7168), (200, 30720), (4096, 1000))
KERNELS = {kernel["name"]: kernel for family in ("gemm", "w4a16") for kernel in minfer.kernels(family)}


def ranges(plan):
    """Where the ranges of k begin that a launch adds one after the other."""
    tile_k = KERNELS[plan.kernel]["tile_k"]
    k_tiles, splits = -(-plan.problem.k // tile_k), plan.splits
    return [(k_tiles // splits * i + min(i, k_tiles % splits)) * tile_k for i in range(splits)]


@pytest.mark.parametrize("n, k", WEIGHTS)
def test_all_m_have_the_same_ranges(n, k):
    plans = [plan_problem(Problem(m, n, k, c=c), device=H200, batch_invariant=True) for m in ROWS for c in (False, True)]
    assert {tuple(ranges(plan)) for plan in plans} == {tuple(ranges(plans[0]))}
    assert {KERNELS[plan.kernel]["sums"] for plan in plans} == {KERNELS[plans[0].kernel]["sums"]}
    for plan in plans:
        whole = "stream_k" if plan.kernel.endswith("_continued") else "persistent"
        assert plan.decomposition == ("split_k" if plan.splits > 1 else whole) and plan.source == "analytic"


def test_few_rows_are_continued():
    """Where tiles are not as many as SMs, or a few waves: not of less rows than 9, which a step of a model gains nothing by."""
    for n, k in ((6144, 4096), (10240, 8192), (28672, 4096)):
        plans = {m: plan_problem(Problem(m, n, k), device=H200, batch_invariant=True) for m in (1, 8, 9, 16, 17, 64)}
        assert {m for m, plan in plans.items() if plan.decomposition == "stream_k"} == {9, 16}
        assert all(plan.kernel.endswith("_continued") == (plan.decomposition == "stream_k") for plan in plans.values())
        assert all(not KERNELS[plan_problem(Problem(m, n, k), device=H200).kernel]["invariant_only"] for m in plans)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_continued_sums_are_those_of_whole_tiles(dtype):
    """Tiles of one CTA, of two, and of chains of many; several calls behind each other, and replays of a graph."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")
    name = f"gemm_sm90_{'bf16' if dtype == torch.bfloat16 else 'f16'}_tn_64x16x128_1x1x1_pingpong_swap"
    for m, n, k in (
        (1, 8, 16384),
        (16, 200, 8192),
        (7, 4096, 4096),
        (16, 6144, 4096),
        (16, 10240, 1000),
        (33, 5120, 2048),
        (16, 28672, 512),
    ):
        a, w, c = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (n, k), (m, n)))

        def call(kernel, a=a, w=w, c=c):
            return minfer.gemm(a, w.t(), c=c, kernel=kernel).view(torch.int16)

        want = call(f"{name}@decomposition=persistent")
        assert all(torch.equal(call(f"{name}_continued@decomposition=stream_k"), want) for _ in range(3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call(f"{name}_continued@decomposition=stream_k") for _ in range(3)]
        for _ in range(20):
            graph.replay()
        assert all(torch.equal(out, want) for out in outs)


def test_long_sums_are_split():
    assert plan_problem(Problem(1, 512, 7168), device=H200, batch_invariant=True).splits > 1


W4_WEIGHTS = (
    ("int4", 128, 4096, 4096),
    ("int4", 128, 3584, 18944),
    ("int4", 32, 1024, 8192),
    ("nf4", 64, 2048, 4096),
    ("mxfp4", 32, 1024, 7168),
)


@pytest.mark.parametrize("w4_format, group_size, n, k", W4_WEIGHTS)
def test_all_m_of_quantised_weights_have_the_same_ranges(w4_format, group_size, n, k):
    """By kernels whose scales are on the fragments."""
    problems = [W4Problem(m, n, k, group_size=group_size, w4_format=w4_format) for m in ROWS]
    plans = [plan_problem(problem, device=H200, batch_invariant=True) for problem in problems]
    assert {tuple(ranges(plan)) for plan in plans} == {tuple(ranges(plans[0]))}
    assert all(plan.kernel.startswith("w4a16_sm90") for plan in plans)
    assert {KERNELS[plan.kernel]["sums"] for plan in plans} == {"wgmma16"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("n, k", WEIGHTS)
def test_rows_have_the_same_bits(n, k, dtype):
    generator = torch.Generator("cuda").manual_seed(n + k)
    x = torch.randn(max(ROWS), k, device="cuda", dtype=dtype, generator=generator)
    weight = torch.randn(n, k, device="cuda", dtype=dtype, generator=generator)

    def product(m):
        plan = plan_problem(Problem(m, n, k, dtype=dtype), batch_invariant=True)
        return minfer.gemm(x[:m], weight.t(), kernel=plan.override)

    whole = product(max(ROWS))
    for m in ROWS[:-1]:
        assert torch.equal(product(m), whole[:m]), m


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("w4_format, group_size, n, k", W4_WEIGHTS)
def test_rows_by_quantised_weights_have_the_same_bits(w4_format, group_size, n, k, dtype):
    weight = W4Workload(W4Problem(1, n, k, dtype=dtype, group_size=group_size, w4_format=w4_format)).operands()
    x = torch.randn(max(ROWS), k, device="cuda", dtype=dtype)

    def product(m):
        problem = W4Problem(m, n, k, dtype=dtype, group_size=group_size, w4_format=w4_format)
        plan = plan_problem(problem, batch_invariant=True)
        options = {"group_size": problem.group_size, "w4_format": w4_format, "kernel": plan.override}
        return minfer.w4a16_gemm(x[:m], weight["qweight"], weight["scales"], **options)

    whole = product(max(ROWS))
    for m in ROWS[:-1]:
        assert torch.equal(product(m), whole[:m]), m
