"""torch.ops.minfer.grouped_gemm* on a GPU: the planner's choice and every compiled kernel by name, over ragged, even and one-sided routing.

Outputs lie in NaN-filled memory; the truth is float64, the yardstick torch's own 16-bit products.
"""

import itertools
import json
import math

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.gemm.cases import DTYPES, name_of
from tests.moe.grouped_cases import (
    LAYOUTS,
    SHAPES,
    bad_calls,
    counts_of,
    expected,
    layer_mismatch,
    make_case,
    make_layer,
    nan_filled,
    offsets_of,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
KERNELS = {k["name"]: k for k in minfer.kernels("moe") if k["compiled"]} or {k["name"]: k for k in minfer.kernels("moe")}
# gather, row_scale, bias, gated, gate_layout
VARIANTS = [
    (gather, row_scale, bias, gated, layout)
    for gather, row_scale, bias, gated in itertools.product((False, True), repeat=4)
    for layout in (LAYOUTS if gated and row_scale and bias else LAYOUTS[:1])
]


@pytest.fixture(autouse=True)
def seed():
    """These tests' own seed, in place of the one in conftest.py."""
    torch.manual_seed(0)


def run_and_judge(args, kwargs):
    """Why a call into NaN-filled memory is wrong, or None; twice, for equal bits."""
    truth = expected(args, kwargs)
    rows, columns = truth.truth.shape
    out, whole = nan_filled(rows, columns, args[0].dtype, DEVICE, padding=8)
    minfer.grouped_gemm(*args, **kwargs, out=out)
    problem = truth.mismatch(out)
    if problem is not None:
        return problem
    if int(whole.isnan().sum()) != whole.numel() - out.numel():
        return "memory around the output was written"
    if not torch.equal(minfer.grouped_gemm(*args, **kwargs), out):
        return "two runs differ"
    return None


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel by name: all shapes with all that an epilogue and a loader can be asked for."""
    dtype = DTYPE_OF[KERNELS[name]["ab_type"]]
    failures = []
    for (experts, rows, n, k), (gather, row_scale, bias, gated, layout) in itertools.product(SHAPES, VARIANTS):
        args, kwargs = make_case(experts, rows, n, k, dtype, DEVICE, gather=gather, row_scale=row_scale, bias=bias)
        kwargs |= dict(gated=gated, gate_layout=layout, activation="silu" if gated else "none", kernel=name)
        problem = run_and_judge(args, kwargs)
        if problem is not None:
            failures.append(f"{(experts, rows, n, k)} {kwargs.keys()} {layout if gated else ''}: {problem}")
    assert not failures, "\n".join([f"{len(failures)} wrong", *failures[:8]])


@pytest.mark.parametrize("kind", ("ragged", "even", "one"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_routing(dtype, kind):
    """The planner's choice from one row to thousands, whatever the routing."""
    for (experts, n, k), rows in itertools.product(((8, 256, 512), (128, 192, 256)), (1, 2, 17, 64, 129, 1000, 5000)):
        args, kwargs = make_case(experts, rows, n, k, dtype, DEVICE, kind=kind)
        problem = run_and_judge(args, kwargs)
        assert problem is None, (experts, n, k, rows, problem)


@pytest.mark.parametrize("activation", ("relu", "gelu", "gelu_tanh", "silu", "relu2", "swigluoai"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations(activation, layout):
    gated = activation != "relu" or layout != "halves"
    args, kwargs = make_case(6, 90, 160, 256, torch.bfloat16, DEVICE, bias=True, row_scale=True)
    args[0].mul_(4)  # reaches swigluoai's limits
    problem = run_and_judge(args, kwargs | dict(activation=activation, gated=gated, gate_layout=layout))
    assert problem is None, problem


@pytest.mark.parametrize(
    "experts, rows, n, k", ((3, 20, 40, 77), (4, 33, 31, 64), (2, 10, 20, 9), (5, 70, 100, 40), (2, 9, 16, 0), (2, 3, 8, 8))
)
def test_odd_shapes(experts, rows, n, k):
    """k and n that TMA does not address, gated halves that are no multiple of 8, and k = 0."""
    for gated in (False, True):
        if gated and n % 2:
            continue
        args, kwargs = make_case(experts, rows, n, k, torch.float16, DEVICE, bias=True)
        problem = run_and_judge(args, kwargs | dict(gated=gated, activation="silu"))
        assert problem is None, (gated, problem)


def test_views():
    """Strided and offset operands; b as [experts, k, n] in memory."""
    (a, b, offsets), _ = make_case(4, 50, 96, 128, torch.float16, DEVICE)
    want = minfer.grouped_gemm(a, b, offsets)
    wide = torch.full((50, 300), math.nan, device=DEVICE, dtype=torch.float16)
    for shift in (0, 8, 3):  # 16-byte aligned or not
        view = wide[:, shift : shift + 128]
        view.copy_(a)
        assert expected((a, b, offsets), {}).mismatch(minfer.grouped_gemm(view, b, offsets)) is None, shift
    big = torch.full((4, 100, 136), math.nan, device=DEVICE, dtype=torch.float16)
    big[:, :96, :128] = b.mT
    assert torch.equal(minfer.grouped_gemm(a, big[:, :96, :128].mT, offsets), want)
    assert torch.equal(minfer.grouped_gemm(a, b.contiguous(), offsets), want)
    tall = torch.zeros(50, 99, device=DEVICE, dtype=torch.float16)
    minfer.grouped_gemm(a, b, offsets, out=tall[:, 1:97])  # rows that are not 16-byte aligned
    assert torch.equal(tall[:, 1:97], want) and not tall[:, 0].any() and not tall[:, 97:].any()


@pytest.mark.skipif(not any("sm90" in name and k["compiled"] for name, k in KERNELS.items()), reason="portable kernels gather as they load")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gather_by_a_launch_of_its_own(dtype):
    """Many rows are gathered before the product: the bits are the loader's."""
    experts, rows, n, k = 4, 8000, 4096, 1032
    plan = json.loads(torch.ops.minfer._plan_grouped([rows, experts, n, k], DTYPE_NAMES[dtype], False, True, None, True, 0))
    assert plan["gather_first"] and "sm90" in plan["kernel"], plan
    args, kwargs = make_case(experts, rows, n, k, dtype, DEVICE, gather=True, source_rows=3000)
    assert run_and_judge(args, kwargs) is None
    wide = torch.full((3000, 1100), math.nan, device=DEVICE, dtype=dtype)[:, 40:1072]  # rows that are not k apart
    wide.copy_(args[0])
    out = minfer.grouped_gemm(wide, *args[1:], **kwargs)
    assert torch.equal(out, minfer.grouped_gemm(*args, **kwargs, kernel=plan["kernel"]))
    assert torch.equal(out, minfer.grouped_gemm(*args, **kwargs, kernel=f"{plan['kernel']}@gather_first=1"))


def test_rows_behind_the_last_offset_are_zero():
    for rows, n in ((40, 64), (700, 4104)):
        (a, b, offsets), _ = make_case(5, rows, n, 64, torch.float16, DEVICE)
        short = (offsets - rows // 3).clamp(min=0)
        out, whole = nan_filled(rows, n, torch.float16, DEVICE)
        minfer.grouped_gemm(a, b, short, out=out)
        end = int(short[-1])
        assert not out[end:].any() and expected((a[:end], b, short), {}).mismatch(out[:end]) is None
        assert int(whole.isnan().sum()) == whole.numel() - out.numel()
        nothing = torch.zeros_like(offsets)
        assert not minfer.grouped_gemm(a, b, nothing).any()


def test_offsets_out_of_range_stay_in_memory():
    """Offsets that do not ascend, or reach behind the rows, are the caller's mistake; no other memory is touched."""
    (a, b, _), _ = make_case(4, 40, 64, 64, torch.float16, DEVICE)
    for ends in ([-5, 10, 1000, 2000], [30, 10, 40, 40], [50, 60, 70, 80]):
        out, whole = nan_filled(40, 64, torch.float16, DEVICE)
        minfer.grouped_gemm(a, b, torch.tensor(ends, device=DEVICE, dtype=torch.int32), out=out)
        whole[2:42, :64] = math.nan
        assert bool(whole.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_masked(dtype):
    for experts, max_rows, n, k in ((4, 7, 32, 24), (8, 130, 256, 512), (64, 16, 192, 256)):
        counts = torch.randint(0, max_rows + 1, (experts,), device=DEVICE, dtype=torch.int32)
        counts[0], counts[-1] = 0, max_rows
        a, b = torch.randn(experts, max_rows, k, device=DEVICE).to(dtype), (torch.randn(experts, n, k, device=DEVICE) / k**0.5).to(dtype).mT
        bias, scale = torch.randn(experts, n, device=DEVICE).to(dtype), torch.rand(experts, max_rows, device=DEVICE)
        inside = torch.arange(max_rows, device=DEVICE)[None, :] < counts[:, None]
        for gated in (False, True):
            kwargs = dict(bias=bias, activation="silu", gated=gated)
            truth = expected((a[inside], b, offsets_of(counts)), kwargs | dict(row_scale=scale[inside]))
            out = minfer.grouped_gemm_masked(a, b, counts, row_scale=scale, **kwargs)
            assert truth.mismatch(out[inside]) is None and not out[~inside].any()
            left = torch.full_like(out, math.nan)
            minfer.grouped_gemm_masked(a, b, counts, row_scale=scale, out=left, **kwargs)
            assert torch.equal(left[inside], out[inside]) and bool(left[~inside].isnan().all())


def test_nan_stays():
    """A NaN in a token or a weight reaches exactly the outputs it belongs to, through the gate's limits too."""
    args, kwargs = make_case(4, 60, 64, 64, torch.float16, DEVICE, kind="even")
    a, b, offsets = args
    a[7] = math.nan
    for extra in ({}, dict(gated=True, activation="silu"), dict(gated=True, activation="swigluoai")):
        out = minfer.grouped_gemm(a, b, offsets, **extra)
        assert bool(out[7].isnan().all()) and not bool(out[:7].isnan().any()) and not bool(out[8:].isnan().any()), extra


def test_graphs_follow_their_routing():
    """One captured call, replayed with other tokens, offsets and indices; on a side stream, behind another kernel."""
    experts, rows, n, k = 16, 200, 256, 256
    (a, b, offsets), kwargs = make_case(experts, rows, n, k, torch.bfloat16, DEVICE, gather=True, row_scale=True)
    kwargs |= dict(gated=True, activation="silu")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        minfer.grouped_gemm(a * 1, b, offsets, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = minfer.grouped_gemm(a * 1, b, offsets, **kwargs)
    for kind in ("ragged", "one", "even", "ragged"):
        (a_new, _, offsets_new), new = make_case(experts, rows, n, k, torch.bfloat16, DEVICE, kind=kind, gather=True, row_scale=True)
        a.copy_(a_new)
        offsets.copy_(offsets_new)
        kwargs["gather"].copy_(new["gather"])
        kwargs["row_scale"].copy_(new["row_scale"])
        graph.replay()
        assert expected((a, b, offsets), kwargs).mismatch(out) is None, kind


def test_chain():
    """Two grouped GEMMs in a row, the second reading what the first wrote, launched to overlap; always the same bits."""
    (a, b, offsets), _ = make_case(8, 300, 512, 512, torch.bfloat16, DEVICE)
    first = minfer.grouped_gemm(minfer.grouped_gemm(a, b, offsets), b, offsets)
    torch.cuda.synchronize()
    for _ in range(40):
        x = a
        for _ in range(2):
            x = minfer.grouped_gemm(x, b, offsets)
        assert torch.equal(x, first)


def test_large_offsets():
    """Weights and outputs beyond 2^31 elements."""
    experts, n, k = 20, 16384, 7168  # 2.3e9 weights
    b = torch.empty(experts, n, k, device=DEVICE, dtype=torch.bfloat16)
    b.view(torch.int16).random_(-0x4200, -0x4100)
    counts = torch.zeros(experts, dtype=torch.int64)
    counts[0], counts[-1] = 3, 5
    a = torch.randn(8, k, device=DEVICE).bfloat16()
    out = minfer.grouped_gemm(a, b.mT, offsets_of(counts, DEVICE))
    want = torch.cat([a[:3] @ b[0].T, a[3:] @ b[-1].T])
    assert torch.linalg.vector_norm(out.float() - want.float()) <= 4e-3 * torch.linalg.vector_norm(want.float())
    del b
    rows = 140_000
    a, b = torch.randn(rows, 64, device=DEVICE).bfloat16(), torch.randn(2, n, 64, device=DEVICE).bfloat16()
    out = minfer.grouped_gemm(a, b.mT, torch.tensor([5, rows], device=DEVICE, dtype=torch.int32))
    want = a[-4:] @ b[1].T
    assert torch.linalg.vector_norm(out[-4:].float() - want.float()) <= 4e-3 * torch.linalg.vector_norm(want.float())


@pytest.mark.parametrize("name", bad_calls())
def test_calls_that_cannot_be_right(name):
    message, args, kwargs = bad_calls(DEVICE)[name]
    with pytest.raises(RuntimeError, match=message):
        minfer.grouped_gemm(*args, **kwargs)


def test_compile():
    args, kwargs = make_case(4, 30, 32, 64, torch.bfloat16, DEVICE, bias=True)

    def f(a, b, offsets, bias):
        return minfer.grouped_gemm(a * 2, b, offsets, bias=bias, activation="silu") + 1

    want = f(*args, kwargs["bias"])
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(f, fullgraph=True, dynamic=True)(*args, kwargs["bias"]), want)


def test_counts_are_used():
    """The test's own routing has empty experts."""
    assert int((counts_of(64, 300) == 0).sum()) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layer(dtype):
    """Mixtral's, Qwen's and gpt-oss's forms of a layer, small; twice, for equal bits."""
    for (experts, top_k, hidden, inter), tokens in itertools.product(
        ((8, 2, 256, 512), (64, 8, 128, 96), (16, 4, 192, 192)), (0, 1, 7, 64, 500)
    ):
        for activation, biases in (("silu", False), ("swigluoai", True)):
            args, kwargs = make_layer(experts, tokens, top_k, hidden, inter, dtype, DEVICE, biases=biases)
            kwargs |= dict(activation=activation)
            out = minfer.moe_ffn(*args, **kwargs)
            problem = layer_mismatch(out, args, kwargs)
            assert problem is None, (experts, tokens, activation, problem)
            assert torch.equal(minfer.moe_ffn(*args, **kwargs), out)


def test_whole_layer_in_a_graph():
    """Router to combine in one graph, replayed with other tokens: the routing changes between replays."""
    experts, top_k, hidden, inter, tokens = 32, 4, 256, 192, 48
    (x, w13, w2, _, _), _ = make_layer(experts, tokens, top_k, hidden, inter, torch.bfloat16, DEVICE)
    gate = torch.randn(experts, hidden, device=DEVICE).bfloat16()

    def layer():
        weights, ids = minfer.moe_router_gemm(x, gate, top_k)
        return minfer.moe_ffn(x, w13, w2, weights, ids), weights, ids

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, weights, ids = layer()
    seen = set()
    for i in range(6):
        x.copy_(torch.randn_like(x, dtype=torch.float32) + (gate[i] if i % 2 else 0))  # every other time most tokens agree
        graph.replay()
        assert layer_mismatch(out, (x, w13, w2, weights, ids), {}) is None
        seen.add(tuple(ids.flatten().tolist()))
    assert len(seen) == 6
