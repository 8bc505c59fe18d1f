"""The CPU kernels in the mode: a row has the same bits whatever the other rows are."""

import minfer
import pytest
import torch
from minfer._core.operator import OPERATORS

from . import cases

SMALL = (1, 2, 3, 8, 17)


@pytest.mark.parametrize("case", cases.CASES.values(), ids=lambda case: case.name)
def test_rows_have_the_same_bits(case):
    assert cases.check(case, "cpu", torch.bfloat16, 3, SMALL, most_n=256, most_k=512) > 0


def test_every_operator_computes_in_the_mode_or_refuses():
    computing = {name for name in OPERATORS if torch.ops.minfer._computes_batch_invariant(name)}
    assert set(OPERATORS) == computing
    assert not torch.ops.minfer._computes_batch_invariant("minfer::_launch_kernel")
    assert torch.ops.minfer._computes_batch_invariant("minfer::gemm")


# Those that are of whole products, and what has no rows; the rest is compared above.
WITHOUT_A_CASE = {"w4a16_pack", "w8a16_pack", "w4a16_dequantize", "w8a16_dequantize", "moe_sort", "merge_attention_states", "dequantize"}
WITHIN_ANOTHER = {"moe_combine", "kv_cache_append", "add_rms_norm_quantized", "gated_activation_quantized"}
GROUPED = {name for name in OPERATORS if name.startswith("grouped_")}


def test_every_operator_has_a_case():
    covered = {case.operator for case in cases.CASES.values()}
    assert set(OPERATORS) - covered == WITHOUT_A_CASE | WITHIN_ANOTHER | GROUPED


def test_the_comparison_sees_a_bit():
    x = torch.zeros(3, 4)
    assert cases.differing((x,), (x.clone(),)) == 0 and cases.differing((x,), (-x,)) == 12
    nan = torch.full((2,), float("nan"))
    assert cases.differing((nan,), (nan.clone(),)) == 0


def test_a_failure_names_the_problem():
    case = cases.Case("gemm", "by_m", lambda draw, rows, n, k: lambda take: (torch.full((len(take), 1), float(len(take))),), ("gemm", {}))
    with pytest.raises(AssertionError, match=r"gemm-by_m torch.bfloat16, seed 5, n = \d+, k = \d+, m = 1 of 17: 1 numbers differ; plans: "):
        cases.check(case, "cpu", torch.bfloat16, 5, SMALL)


def test_what_refuses_says_so(monkeypatch):
    from minfer._core import batch_invariance

    monkeypatch.setattr(batch_invariance, "computes_batch_invariant", lambda op: False)
    a, b = torch.ones(2, 16).half(), torch.ones(16, 8).half()
    minfer.gemm(a, b)
    with minfer.batch_invariant(), pytest.raises(RuntimeError, match="minfer::gemm: cannot compute in the batch-invariant mode"):
        minfer.gemm(a, b)
