"""The CPU kernels against float64: layouts, views, broadcasts, epilogues, empty sizes, NaN rules."""

import math

import minfer
import numpy
import pytest
import torch
from minfer import reference

from tests.gemm.cases import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    gated_mismatch,
    gemm_mismatch,
    matrix,
    name_of,
    operands,
    padded,
    untouched_outside,
)

SHAPES = [(1, 8, 16), (3, 5, 7), (16, 24, 32), (17, 31, 129), (64, 40, 200)]


def numpy_activation(name, x):
    if name == "relu":
        return numpy.maximum(x, 0)
    if name == "gelu":
        return x * 0.5 * (1 + numpy.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x * 0.5 * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "silu":
        return x / (1 + numpy.exp(-x))
    if name == "relu2":
        return numpy.maximum(x, 0) ** 2
    return x


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_is_the_formula(activation):
    """reference.gemm in float64 against numpy, written out."""
    a, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    c, bias = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    out = reference.gemm(a, b, c=c, bias=bias, alpha=0.5, beta=2.0, activation=activation)
    expected = numpy_activation(activation, 0.5 * (a.numpy() @ b.numpy()) + 2.0 * c.numpy() + bias.numpy())
    numpy.testing.assert_allclose(out.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_reference_gated_is_the_formula():
    gate, up = torch.randn(24, 7, dtype=torch.float64), torch.randn(24, 7, dtype=torch.float64)
    a = torch.randn(5, 7, dtype=torch.float64)
    out = reference.gemm_gated(a, minfer.pack_gate_up(gate, up).t())
    expected = numpy_activation("silu", a.numpy() @ gate.numpy().T) * (a.numpy() @ up.numpy().T)
    numpy.testing.assert_allclose(out.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layouts_and_epilogues(dtype, layout):
    for m, n, k in SHAPES:
        a, b = operands(m, n, k, dtype, layout, scale=0.5)
        for i, activation in enumerate(ACTIVATIONS):
            epilogue = {
                "activation": activation,
                "bias": torch.randn(n, dtype=torch.float32 if i % 2 else dtype) if i != 1 else None,
                "c": torch.randn(m, n, dtype=dtype if i % 2 else torch.float32) if i != 2 else None,
                "alpha": (1.0, 0.5, -2.0, 1.5, 0.25, 1.0)[i],
                "beta": (0.0, 1.0, 0.0, -0.5, 2.0, 1.0)[i],
            }
            for out_dtype in (None, torch.float32):
                out = minfer.gemm(a, b, **epilogue, out_dtype=out_dtype)
                assert out.dtype == (out_dtype or dtype)
                assert out.is_contiguous()
                assert gemm_mismatch(out, a, b, **epilogue) is None


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rounded_once(dtype, scale):
    """The result is the float32 computation, rounded once."""
    a, b = operands(33, 40, 65, dtype, "tn", scale=scale)
    bias = torch.randn(40, dtype=dtype)
    expected = torch.relu(a.float() @ b.float() + bias.float()).to(dtype)
    assert torch.equal(minfer.gemm(a, b, bias=bias, activation="relu"), expected)


def test_wrapper_and_op_agree():
    a, b = operands(4, 8, 16, torch.float16, "tn")
    assert torch.equal(minfer.gemm(a, b, activation="silu"), torch.ops.minfer.gemm(a, b, activation="silu"))
    packed = matrix(16, 32, False, torch.float16)
    assert torch.equal(minfer.gemm_gated(a, packed), torch.ops.minfer.gemm_gated(a, packed))


def test_views():
    """Strided, offset, expanded and misaligned views are read as what they show."""
    base = torch.randn(80, 90).to(torch.bfloat16)
    views = {
        "rows": base[1:65:2, 3:35],
        "columns": base[2:34, 1:65:2],
        "transposed": base[3:35, 5:37].t(),
        "expanded row": base[4:5, :32].expand(32, 32),
        "expanded column": base[:32, 7:8].expand(32, 32),
        "overlapping": base.flatten().as_strided((32, 32), (1, 1), 11),
    }
    b = torch.randn(32, 24).to(torch.bfloat16)
    for name, a in views.items():
        assert gemm_mismatch(minfer.gemm(a, b), a, b) is None, name
        assert gemm_mismatch(minfer.gemm(b.t(), a), b.t(), a) is None, name


@pytest.mark.parametrize("shape", [(6, 10), (10,), (1, 10), (6, 1), (), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("c_dtype", [torch.float16, torch.float32], ids=name_of)
def test_c_broadcasts(shape, c_dtype):
    a, b = operands(6, 10, 12, torch.float16, "tn")
    c = torch.randn(shape, dtype=c_dtype)
    epilogue = {"c": c, "alpha": 0.5, "beta": 3.0}
    assert gemm_mismatch(minfer.gemm(a, b, **epilogue), a, b, **epilogue) is None


def test_batches():
    a, b = operands(5, 9, 11, torch.bfloat16, "tn", batch=(3,))
    for x, y in ((a, b), (a, b[0]), (a[0], b)):
        for c in (None, torch.randn(3, 5, 9).bfloat16(), torch.randn(5, 9).bfloat16(), torch.randn(3, 1, 1).bfloat16()):
            epilogue = {"c": c, "beta": 0.0 if c is None else 0.5}
            out = minfer.gemm(x, y, **epilogue)
            assert out.shape == (3, 5, 9) and out.is_contiguous()
            assert gemm_mismatch(out, x, y, **epilogue) is None
    assert minfer.gemm(a[:0], b[0]).shape == (0, 5, 9)


@pytest.mark.parametrize("m, n, k", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (1, 8, 0)])
def test_empty_sizes(m, n, k):
    a, b = operands(m, n, k, torch.float16, "tn")
    bias, c = torch.randn(n).half(), torch.randn(m, n).half()
    out = minfer.gemm(a, b, c=c, beta=2.0, bias=bias, activation="silu")
    assert out.shape == (m, n)
    expected = torch.nn.functional.silu(2.0 * c.float() + bias.float()).half()
    assert torch.equal(out, expected)
    assert torch.equal(minfer.gemm(a, b), torch.zeros(m, n).half())


def test_nan_rules():
    a, b = operands(4, 8, 16, torch.float16, "tn")
    nan_c = torch.full((4, 8), math.nan).half()
    assert torch.equal(minfer.gemm(a, b, c=nan_c), minfer.gemm(a, b)), "beta = 0: C is not read"
    assert minfer.gemm(a, b, c=nan_c, beta=1.0).isnan().all()
    nan_a = torch.full_like(a, math.nan)
    c = torch.randn(4, 8).half()
    assert torch.equal(minfer.gemm(nan_a, b, c=c, alpha=0.0, beta=1.0), c), "alpha = 0: A and B are not read"
    a[1, 3] = math.nan
    for activation in ACTIVATIONS:
        rows = minfer.gemm(a, b, activation=activation).isnan()
        assert rows[1].all() and not rows[[0, 2, 3]].any(), "a NaN in A reaches its row, and no other"


def test_out():
    a, b = operands(6, 10, 12, torch.float16, "tn")
    for dtype in (torch.float16, torch.float32):
        out, whole = padded((6, 10), dtype, "cpu")
        returned = minfer.gemm(a, b, activation="relu", out=out)
        assert returned.data_ptr() == out.data_ptr()
        assert torch.equal(out, minfer.gemm(a, b, activation="relu", out_dtype=dtype))
        assert untouched_outside(out, whole)
    transposed = torch.empty(10, 6).half().t()
    assert torch.equal(minfer.gemm(a, b, out=transposed), minfer.gemm(a, b))
    c = torch.randn(6, 10).half()
    expected = minfer.gemm(a, b, c=c, beta=1.0)
    assert torch.equal(minfer.gemm(a, b, c=c, beta=1.0, out=c), expected), "out may be c"


def test_out_counts_as_a_mutation():
    a, b = operands(2, 8, 8, torch.float16, "tn")
    out = torch.empty(2, 8).half()
    before = out._version
    minfer.gemm(a, b, out=out)
    assert out._version > before


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gated(dtype, activation):
    for m, half, k in ((1, 8, 16), (5, 24, 33), (17, 40, 64)):
        gate, up = (matrix(half, k, True, dtype, scale=0.5) for _ in range(2))
        a = matrix(m, k, True, dtype, scale=0.5)
        for bias_dtype in (None, dtype, torch.float32):
            gate_bias, up_bias = torch.randn(half), torch.randn(half)
            bias = None if bias_dtype is None else minfer.pack_gate_up(gate_bias, up_bias).to(bias_dtype)
            b = minfer.pack_gate_up(gate, up).t()
            out = minfer.gemm_gated(a, b, bias=bias, activation=activation)
            assert out.shape == (m, half) and out.dtype == dtype and out.is_contiguous()
            assert gated_mismatch(out, a, b, bias=bias, activation=activation) is None


def test_gated_batches_and_empty():
    a = torch.randn(3, 5, 16).half()
    b = torch.randn(3, 16, 32).half()
    for x, y in ((a, b), (a, b[0]), (a[0], b)):
        out = minfer.gemm_gated(x, y)
        assert out.shape == (3, 5, 16)
        assert gated_mismatch(out, x, y) is None
    assert torch.equal(minfer.gemm_gated(a[0, :, :0], b[0, :0]), torch.zeros(5, 16).half())
    assert minfer.gemm_gated(a[0], b[0, :, :0]).shape == (5, 0)


def test_kernel_is_checked_then_ignored():
    a, b = operands(4, 8, 16, torch.float16, "tn")
    for kernel in minfer.kernels():
        assert torch.equal(minfer.gemm(a, b, kernel=kernel["name"]), minfer.gemm(a, b))
    name = minfer.kernels()[0]["name"]
    launch = "decomposition=split_k,splits=3,swizzle=2,raster=along_n,realign_a=1,realign_b=0"
    assert torch.equal(minfer.gemm(a, b, kernel=f"{name}@{launch}"), minfer.gemm(a, b))


def test_numbers_that_are_zero_in_float32():
    """Operators compute with float32 numbers: a smaller one is 0, which reads nothing."""
    a, b = activations_of(3, 64), activations_of(64, 8)
    assert torch.equal(minfer.gemm(a, b, beta=1e-50), minfer.gemm(a, b))
    assert torch.equal(minfer.gemm(a * math.nan, b, alpha=1e-50), torch.zeros(3, 8).half())


def activations_of(*shape):
    return torch.randn(shape).half()
