"""Plans that are batch invariant: the order in which a row of D is summed follows from n, k and the types, so that a row has the same bits
in problems of every m."""

import minfer
import pytest
import torch
from minfer.planning.plan import Problem, W4Problem, plan_problem

from tests.gemm.cases import DTYPES, name_of

H200 = -1
ROWS = (1, 7, 16, 33, 64, 100, 200, 384, 768, 1536, 3000)
WEIGHTS = ((4096, 4096), (5120, 5120), (3584, 18944), (1024, 8192), (512, 7168), (200, 30720), (4096, 1000))
KERNELS = {kernel["name"]: kernel for kernel in minfer.kernels()}


def ranges(plan):
    """Where the ranges of k begin that a launch adds one after the other."""
    tile_k = KERNELS[plan.kernel]["tile_k"]
    k_tiles, splits = -(-plan.problem.k // tile_k), plan.splits
    return [(k_tiles // splits * i + min(i, k_tiles % splits)) * tile_k for i in range(splits)]


@pytest.mark.parametrize("n, k", WEIGHTS)
def test_all_m_have_the_same_ranges(n, k):
    plans = [plan_problem(Problem(m, n, k, c=c), device=H200, batch_invariant=True) for m in ROWS for c in (False, True)]
    assert {tuple(ranges(plan)) for plan in plans} == {tuple(ranges(plans[0]))}
    assert {KERNELS[plan.kernel]["arch"] for plan in plans} == {KERNELS[plans[0].kernel]["arch"]}
    assert all(plan.decomposition == ("split_k" if plan.splits > 1 else "persistent") and plan.source == "analytic" for plan in plans)


def test_long_sums_are_split():
    assert plan_problem(Problem(1, 512, 7168), device=H200, batch_invariant=True).splits > 1


def test_only_dense_weights():
    with pytest.raises(ValueError, match="batch_invariant is for gemm"):
        plan_problem(W4Problem(1, 512, 7168), device=H200, batch_invariant=True)


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
