"""bench.plans_in_place: what it needs of projections, on a CPU."""

import pytest
import torch
from minfer.integrations.decoder.projection import projection_of
from minfer.quantize import quantize_fp8_weight, quantize_w4

from bench.plans_in_place import name_kernel, problem_of


@pytest.mark.parametrize("form", ("w4a16", "fp8"))
def test_a_kernel_that_is_named_reaches_the_operator(form):
    torch.manual_seed(0)
    weight, x = torch.randn(128, 256).bfloat16(), torch.randn(3, 256).bfloat16()
    projection = projection_of(quantize_w4(weight, 128) if form == "w4a16" else quantize_fp8_weight(weight, "block128"))
    planned, problem = projection(x), problem_of(form, 3, projection, False)
    assert (problem.m, problem.n, problem.k) == (3, 128, 256)
    name_kernel(projection, "no_such_kernel")
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        projection(x)
    name_kernel(projection, None)
    assert torch.equal(projection(x), planned)
