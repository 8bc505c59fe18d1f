"""On a GPU: bits of a row among 1 to 4096, in random company and at random places, for every operator and format.

Each case draws MINFER_BATCH_INVARIANCE_PROBLEMS random problems (3 unless given; the bench suite counts 200): a weight, its size, rows.
"""

import os

import minfer
import pytest
import torch

from . import cases, sums

pytestmark = pytest.mark.gpu

PROBLEMS = int(os.environ.get("MINFER_BATCH_INVARIANCE_PROBLEMS", "3"))
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", cases.CASES.values(), ids=lambda case: case.name)
def test_rows_have_the_same_bits(case):
    for seed in range(PROBLEMS):
        cases.check(case, "cuda", DTYPES[seed % 2], seed)


@pytest.mark.parametrize(
    "name", ["gemm-c_bias", "w4a16_gemm-int4_128", "gemm_fp8-blocks", "moe_ffn-16bit", "rms_norm-16bit", "sample-truncated"]
)
def test_in_a_graph_and_on_another_stream(name):
    case = cases.CASES[name]
    draw = cases.Draw("cuda", torch.bfloat16, 11)
    n, k = cases.sizes(case, draw)
    with minfer.batch_invariant():
        call = case.make(draw, 257, n, k)
        take = torch.randperm(257, device="cuda")[:33]
        eager = call(take)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(take)
            on_stream = call(take)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(take)
    graph.replay()  # in the mode that it was captured in
    torch.cuda.synchronize()
    assert cases.differing(eager, on_stream) == 0 and cases.differing(eager, captured) == 0


def assert_equal(found: dict[str, int], least: int) -> None:
    assert len(found) >= least
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wgmma_adds_up_k_alike_whatever_its_shape(dtype, splits):
    """The assumption behind all plans: m and n of an instruction, and which operand is which, do not change the sum over k."""
    assert_equal(sums.dense(dtype, splits), 20)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("dtype, mode", [(cases.FP8, "rows"), (cases.FP8, "blocks"), (cases.FP8, "fast"), (cases.INT8, "rows")])
def test_wgmma_of_8_bits_adds_up_k_alike_whatever_its_shape(dtype, mode, splits):
    assert_equal(sums.scaled(dtype, mode, splits), 3)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("form, group_size", sums.FORMS)
def test_scaled_fragments_have_the_same_bits_in_all_kernels(form, group_size, splits):
    assert_equal(sums.fragments(form, group_size, splits), 2)


@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_experts_have_the_same_bits_in_all_kernels(element):
    assert_equal(sums.experts(element), 5)
