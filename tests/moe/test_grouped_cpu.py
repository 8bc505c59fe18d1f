"""minfer.grouped_gemm and grouped_gemm_masked without a GPU: the CPU kernels against plain loops, checks, fakes, plans."""

import json
import math

import minfer
import pytest
import torch

from tests.contracts.test_registration import check_op
from tests.gemm.cases import ACTIVATIONS, DTYPES, name_of
from tests.moe.grouped_cases import (
    LAYOUTS,
    bad_calls,
    counts_of,
    expected,
    layer_mismatch,
    make_case,
    make_layer,
    offsets_of,
)


def loop(a, b, offsets, *, bias=None, gather=None, row_scale=None, activation="none", gated=False, gate_layout="halves"):
    """The definition, row by row, in float64."""
    act = {
        "none": lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
        "relu2": lambda x: torch.relu(x).square(),
    }
    rows = offsets[-1].item() if gather is None else gather.shape[0]
    rows = a.shape[0] if gather is None else rows
    n = b.shape[2]
    out = torch.zeros(rows, n // 2 if gated else n, dtype=torch.float64)
    for r in range(rows):
        e = int((offsets <= r).sum())
        if e == len(offsets):
            continue
        y = a[int(gather[r]) if gather is not None else r].double() @ b[e].double()
        y = y if bias is None else y + bias[e].double()
        if gated:
            half, block = n // 2, torch.arange(n // 2)
            up = {"halves": half + block, "alternating": 2 * block + 1, "blocks": block // 8 * 16 + 8 + block % 8}[gate_layout]
            gate = {"halves": block, "alternating": 2 * block, "blocks": block // 8 * 16 + block % 8}[gate_layout]
            if activation == "swigluoai":
                g, u = y[gate].clamp(max=7), y[up].clamp(-7, 7)
                y = g * torch.sigmoid(1.702 * g) * (u + 1)
            else:
                y = act[activation](y[gate]) * y[up]
        else:
            y = act[activation](y)
        out[r] = y if row_scale is None else y * row_scale[r].double()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("gather", (False, True))
def test_against_the_definition(dtype, gather):
    torch.manual_seed(0)
    for activation in (*ACTIVATIONS, "swigluoai"):
        for gated in (False, True):
            for layout in LAYOUTS if gated else ("halves",):
                if activation == "swigluoai" and not gated:
                    continue
                args, kwargs = make_case(6, 40, 32, 24, dtype, "cpu", gather=gather, row_scale=True, bias=True)
                kwargs |= dict(activation=activation, gated=gated, gate_layout=layout)
                out = minfer.grouped_gemm(*args, **kwargs)
                want = loop(*args, **kwargs)
                unit = torch.finfo(dtype).eps
                assert (out.double() - want).abs().max() <= unit * want.abs().max(), (activation, gated, layout)
                assert expected(args, kwargs).mismatch(out) is None


def test_rows_behind_the_last_offset_are_zero():
    (a, b, offsets), _ = make_case(4, 20, 16, 8, torch.float16, "cpu")
    offsets = (offsets - 6).clamp(min=0)
    out = minfer.grouped_gemm(a, b, offsets)
    assert torch.equal(out[14:], torch.zeros(6, 16, dtype=torch.float16)) and out[:14].any()
    whole = torch.full((20, 16), 3.0, dtype=torch.float16)
    assert torch.equal(minfer.grouped_gemm(a, b, offsets, out=whole), out)


def test_masked_is_the_sorted_form_of_its_rows():
    torch.manual_seed(1)
    counts = torch.tensor([3, 0, 7, 5], dtype=torch.int32)
    a, b = torch.randn(4, 7, 24).half(), (torch.randn(4, 32, 24) / 5).half().mT
    bias, scale = torch.randn(4, 32).half(), torch.rand(4, 7)
    inside = torch.arange(7)[None, :] < counts[:, None]
    kwargs = dict(bias=bias, activation="silu", gated=True)
    out = minfer.grouped_gemm_masked(a, b, counts, row_scale=scale, **kwargs)
    want = minfer.grouped_gemm(a[inside], b, offsets_of(counts), row_scale=scale[inside], **kwargs)
    assert torch.equal(out[inside], want) and not out[~inside].any()
    left = torch.full((4, 7, 16), 9.0, dtype=torch.float16)
    minfer.grouped_gemm_masked(a, b, counts, row_scale=scale, out=left, **kwargs)
    assert torch.equal(left[inside], want) and (left[~inside] == 9).all()


@pytest.mark.parametrize("name", bad_calls())
def test_calls_that_cannot_be_right(name):
    message, args, kwargs = bad_calls()[name]
    with pytest.raises(RuntimeError, match=message):
        minfer.grouped_gemm(*args, **kwargs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masked_outputs_with_modes_of_one(device):
    """The stride of a mode of one element is no address."""
    for experts, rows in ((1, 4), (1, 1)):
        a, b = (torch.randn(shape, device=device).half() for shape in ((experts, rows, 64), (experts, 64, 16)))
        counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
        out = torch.zeros(rows, experts, 16, dtype=torch.float16, device=device).transpose(0, 1)
        assert out.is_contiguous() and (rows == 1 or out.stride(0) != rows * out.stride(1))
        minfer.grouped_gemm_masked(a, b, counts, out=out)
        assert torch.equal(out, minfer.grouped_gemm_masked(a, b, counts))


@pytest.mark.parametrize("ends", [[5, 3, 10], [-1, 3, 10]])
def test_offsets_ascend(ends):
    a, b = torch.randn(10, 16).half(), torch.randn(3, 16, 8).half()
    with pytest.raises(RuntimeError, match="minfer::grouped_gemm: offsets must not descend or be negative, got"):
        minfer.grouped_gemm(a, b, torch.tensor(ends).int())


def test_masked_calls_that_cannot_be_right():
    a, b, counts = torch.randn(4, 7, 24).half(), torch.randn(4, 24, 32).half(), torch.zeros(4, dtype=torch.int32)
    for args, kwargs, message in (
        ((a[0], b, counts), {}, "a must be"),
        ((a[:3], b, counts), {}, "a must be"),
        ((a, b, counts[:3]), {}, "counts must be"),
        ((a, b, counts), {"row_scale": torch.ones(28)}, "row_scale must be"),
        ((a, b, counts), {"out": a.new_empty(4, 8, 32)[:, :7]}, "out must be one run of rows"),
    ):
        with pytest.raises(RuntimeError, match=message):
            minfer.grouped_gemm_masked(*args, **kwargs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(device):
    args, kwargs = make_case(4, 30, 32, 16, torch.float16, device, gather=True, row_scale=True, bias=True)
    check_op(torch.ops.minfer.grouped_gemm.default, args, kwargs | dict(activation="silu", gated=True))
    out = torch.empty(30, 32, device=device, dtype=torch.float16)
    check_op(torch.ops.minfer.grouped_gemm.out, args, kwargs | dict(out=out))
    a, b, counts = args[0].new_ones(4, 7, 16), args[1], torch.tensor([0, 7, 3, 1], dtype=torch.int32, device=device)
    check_op(torch.ops.minfer.grouped_gemm_masked.default, (a, b, counts), {})
    check_op(torch.ops.minfer.grouped_gemm_masked.out, (a, b, counts), {"out": a.new_zeros(4, 7, 32)})


def test_no_backward():
    args, _ = make_case(2, 6, 16, 8, torch.float16, "cpu")
    a = args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        minfer.grouped_gemm(a, *args[1:]).sum().backward()


def test_empty():
    for experts, rows, n, k in ((3, 0, 16, 8), (3, 4, 0, 8), (3, 4, 16, 0)):
        args, _ = make_case(experts, rows, n, k, torch.float16, "cpu")
        out = minfer.grouped_gemm(*args)
        assert out.shape == (rows, n) and not out.any()


def plan(rows, experts, n, k, *, gated=False, gathered=False, kernel=None):
    return json.loads(torch.ops.minfer._plan_grouped([rows, experts, n, k], "bf16", gated, gathered, kernel, False, -1))


def test_plans():
    """Small tiles for few tokens an expert, large ones for many; never below the floor; what is asked for by name is taken."""
    few, many = plan(16, 8, 28672, 4096), plan(16384, 8, 28672, 4096)
    area = lambda p: math.prod(int(x) for x in p["kernel"].split("_tn_")[1].split("_")[0].split("x")[:2])  # noqa: E731
    assert area(few) <= 128 * 128 < area(many), (few, many)
    for rows in (0, 1, 8, 64, 512, 4096, 131072):
        for experts, n, k in ((8, 4096, 14336), (128, 1536, 2048), (256, 4096, 7168)):
            p = plan(rows, experts, n, k)
            assert p["predicted_us"] >= p["floor_us"] and "sm90" in p["kernel"], p
    # Rows of a shallow k are gathered by the loader (10.4 us on the H200, 12.9 by a launch before), others by a launch before.
    assert not plan(2604, 10, 448, 320, gated=True, gathered=True)["gather_first"]
    first = plan(8192, 8, 28672, 4096, gathered=True)
    assert first["gather_first"] and first["workspace_bytes"] == 8192 * 4096 * 2
    assert not plan(8192, 8, 28672, 4096)["gather_first"]
    named = few["kernel"]
    assert plan(16384, 8, 28672, 4096, kernel=named)["kernel"] == named
    assert "sm80" in plan(64, 8, 100, 77)["kernel"]  # k of 77 is not 16-byte aligned


def test_forced_gather():
    """A forced kernel gathers its rows itself, or a launch before it does; which one the plan takes is the faster by its prediction."""
    sizes, named = (8192, 8, 28672, 4096), plan(8192, 8, 28672, 4096)["kernel"]
    by_launch = plan(*sizes, gathered=True, kernel=f"{named}@gather_first=1")
    by_loader = plan(*sizes, gathered=True, kernel=named)
    assert by_loader == plan(*sizes, gathered=True, kernel=f"{named}@gather_first=0")
    assert by_launch["gather_first"] and not by_loader["gather_first"] and by_loader["source"] == "override"
    assert by_launch["workspace_bytes"] == 8192 * 4096 * 2 and by_loader["workspace_bytes"] == 0
    assert by_launch["predicted_us"] < by_loader["predicted_us"]
    with pytest.raises(RuntimeError, match="cannot have its rows gathered first: the problem has no gather"):
        plan(*sizes, kernel=f"{named}@gather_first=1")
    args, kwargs = make_case(4, 30, 32, 16, torch.bfloat16, "cpu", gather=True)
    assert torch.equal(minfer.grouped_gemm(*args, **kwargs), minfer.grouped_gemm(*args, **kwargs, kernel=f"{named}@gather_first=1"))
    for option, message in {
        "splits=2": "kernel option 'splits' is not known; expected gather_first",
        "": "kernel option '' is not known; expected gather_first",
        "gather_first=2": "kernel option gather_first must be 0 or 1, got '2'",
    }.items():
        for call in (lambda kernel: plan(*sizes, kernel=kernel), lambda kernel: minfer.grouped_gemm(*args, **kwargs, kernel=kernel)):
            with pytest.raises(RuntimeError, match=message):
                call(f"{named}@{option}")


def test_counts():
    """The cases' own arithmetic: what the tests call ragged is, and all of it adds up."""
    for kind in ("ragged", "even", "one"):
        for experts, rows in ((1, 5), (8, 100), (300, 2000)):
            counts = counts_of(experts, rows, kind)
            assert int(counts.sum()) == rows and int(counts.min()) >= 0


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layer(dtype):
    """moe_ffn is its steps."""
    torch.manual_seed(2)
    for activation, biases in (("silu", False), ("swigluoai", True), ("gelu", True)):
        args, kwargs = make_layer(6, 11, 3, 24, 16, dtype, "cpu", biases=biases)
        out = minfer.moe_ffn(*args, activation=activation, **kwargs)
        assert layer_mismatch(out, args, kwargs | dict(activation=activation)) is None
        x, w13, w2, weights, ids = args
        token_index, offsets, inverse, scale = minfer.moe_sort(ids, 6, weights=weights)
        h = minfer.grouped_gemm(
            x, w13.mT, offsets, gather=token_index, bias=kwargs.get("b13"), activation=activation, gated=True
        )  # fmt: skip
        y = minfer.grouped_gemm(h, w2.mT, offsets, bias=kwargs.get("b2"), row_scale=scale)
        steps = minfer.moe_combine(y, inverse)
        assert layer_mismatch(steps, args, kwargs | dict(activation=activation)) is None


def test_layer_drops_foreign_experts():
    args, _ = make_layer(6, 11, 3, 24, 16, torch.bfloat16, "cpu")
    x, w13, w2, weights, ids = args
    foreign = torch.where(ids >= 3, torch.full_like(ids, -1), ids)
    out = minfer.moe_ffn(x, w13[:3], w2[:3], weights, foreign)
    assert layer_mismatch(out, (x, w13[:3], w2[:3], weights, foreign), {}) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_layer(device):
    args, kwargs = make_layer(4, 9, 2, 32, 16, torch.bfloat16, device, biases=True)
    check_op(torch.ops.minfer.moe_ffn.default, args, kwargs)


def test_layers_that_cannot_be_right():
    (x, w13, w2, weights, ids), _ = make_layer(4, 9, 2, 32, 16, torch.float16, "cpu")
    for args, kwargs, message in (
        ((x.float(), w13, w2, weights, ids), {}, "x must be"),
        ((x, w13[:, :31], w2, weights, ids), {}, "w13 must be"),
        ((x, w13, w2.mT, weights, ids), {}, "w2 must be"),
        ((x, w13, w2, weights.half(), ids), {}, "weights must be"),
        ((x, w13, w2, weights, ids.long()), {}, "ids must be"),
        ((x, w13, w2, weights, ids), {"b2": x.new_zeros(4, 31)}, "b2 must be"),
        ((x, w13, w2, weights, ids), {"activation": "swish"}, "activation must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            minfer.moe_ffn(*args, **kwargs)


@pytest.mark.parametrize("value", (-1, 6, 10**6, 2**31 - 1, -(2**31)))
@pytest.mark.parametrize("out", (False, True))
def test_gather_leads_outside(value, out):
    a, b, gather = torch.randn(6, 16).half(), torch.randn(2, 16, 8).half(), torch.tensor([5, 0, value, 2], dtype=torch.int32)
    options = {"out": torch.empty(4, 8).half()} if out else {}
    with pytest.raises(RuntimeError, match=r"minfer::grouped_gemm: gather must be rows of a, 0 to 5, where an expert has them, got "):
        minfer.grouped_gemm(a, b, torch.tensor([1, 4], dtype=torch.int32), gather=gather, **options)
    # Behind the last offset nobody looks.
    have = minfer.grouped_gemm(a, b, torch.tensor([1, 2], dtype=torch.int32), gather=gather, **options)
    assert torch.equal(have[2:], torch.zeros(2, 8).half()) and torch.equal(have[:1], minfer.gemm(a[5:], b[0]))
