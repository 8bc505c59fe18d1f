"""GEMMs whose operands are copied first, into K-major rows that TMA addresses: forced on kernels of every kind, and as the planner chooses.

Operands lie in NaN-filled memory, so that an element beside them would show in the sums; D lies in NaN-filled memory, too. The bits are
those of the same kernel on copies that torch made.
"""

import itertools
import math

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES, Problem, plan_problem

from tests.gemm.cases import (
    DTYPES,
    LAYOUTS,
    gated_mismatch,
    gemm_mismatch,
    name_of,
    padded,
    placed,
    untouched_outside,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
READ_ROWS = [k for k in minfer.kernels() if (k["a_major"], k["b_major"], k["alignment"]) == ("k", "k", 16)]
COMPILED = [k for k in READ_ROWS if k["compiled"]] or READ_ROWS
# One kernel of each kind that reads K-major operands.
KINDS = {(k["arch"], k["schedule"], k["swap"], bool(k["column_step"]), k["ab_type"]): k["name"] for k in COMPILED}
KERNELS = {name: next(k for k in COMPILED if k["name"] == name) for name in KINDS.values()}
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SHAPES = ((1, 2, 1), (3, 17, 9), (33, 57, 40), (65, 131, 127), (130, 255, 129), (257, 520, 1031), (7, 1033, 4099), (1000, 31, 264))
OFFSETS = (0, 1, 2, 3, 5)
# An operand's places: elements from a 16-byte boundary to its first one, and elements between its lines.
PLACES = [(offset, gap) for offset in OFFSETS for gap in (0, 1, 6)]


def aligned(x, portable):
    """A copy of [.., lines, k] in rows that begin on multiples of 16 bytes. ``portable``: with k rounded up, over zeros."""
    extent = -(-x.shape[-1] // 8) * 8
    rows = torch.full((*x.shape[:-1], extent), 0.0 if portable else math.nan, dtype=x.dtype, device=DEVICE)
    rows[..., : x.shape[-1]] = x
    return rows if portable else rows[..., : x.shape[-1]]


def check_forced(name, a, b, launch, flags, epilogue=None):
    """The forced launch: values, what is around D, and the bits of the kernel alone on copies. None, or what is wrong."""
    epilogue = epilogue or {}
    portable = KERNELS[name]["arch"] < 90
    shape = (*(a.shape[:-2] if a.dim() == 3 else b.shape[:-2]), a.shape[-2], b.shape[-1])
    out, whole = padded(shape, a.dtype, DEVICE)
    minfer.gemm(a, b, **epilogue, out=out, kernel=f"{name}@{launch},{flags}")
    problem = gemm_mismatch(out, a, b, **epilogue)
    if problem is None and not untouched_outside(out, whole):
        problem = "wrote outside of D"
    if problem is None:
        a_rows, b_rows = aligned(a, portable), aligned(b.transpose(-1, -2), portable)
        other, _ = padded(shape, a.dtype, DEVICE)
        minfer.gemm(a_rows, b_rows.transpose(-1, -2), **epilogue, out=other, kernel=f"{name}@{launch}")
        if not torch.equal(out, other):
            problem = "other bits than those of the kernel on copies"
    return problem


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KERNELS)
def test_both(name, layout):
    """Both operands copied, from every layout, shape and place, with C, bias and activation in turn."""
    dtype = DTYPE_OF[KERNELS[name]["ab_type"]]
    failures = []
    places = itertools.cycle(PLACES)
    launches = itertools.cycle(("decomposition=persistent", "decomposition=split_k,splits=2", "decomposition=stream_k"))
    for number, (m, n, k) in enumerate(SHAPES * 2):
        at_a, at_b = next(places), PLACES[(7 * number + 3) % len(PLACES)]
        a = placed(m, k, layout[0] == "t", dtype, offset=at_a[0], gap=at_a[1])
        b = placed(k, n, layout[1] == "t", dtype, offset=at_b[0], gap=at_b[1])
        c, bias = torch.randn(m, n, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE)
        epilogue = ({}, {"c": c, "beta": 0.5}, {"bias": bias, "activation": "silu"}, {"c": c, "beta": 1.0, "bias": bias})[number % 4]
        problem = check_forced(name, a, b, next(launches), "realign_a=1,realign_b=1", epilogue)
        if problem is not None:
            failures.append(f"{m} x {n} x {k}, A at {at_a}, B at {at_b}, {sorted(epilogue)}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("row_major", [True, False], ids=["row-major", "column-major"])
@pytest.mark.parametrize("name", KERNELS)
def test_one(name, row_major, which):
    """One operand copied from every place; the other one is read as it is."""
    dtype, portable = DTYPE_OF[KERNELS[name]["ab_type"]], KERNELS[name]["arch"] < 90
    failures = []
    for (m, n, k), (offset, gap) in itertools.product(((1, 8, 8), (100, 264, 136), (129, 72, 1027)), PLACES):
        if portable and k % 8 != 0:
            continue  # vectors have no tail: both are copied
        extra = -k % 8 + 8
        a = placed(m, k, row_major, dtype, offset=offset, gap=gap) if which == "a" else placed(m, k, True, dtype, gap=extra)
        b = placed(k, n, row_major, dtype, offset=offset, gap=gap) if which == "b" else placed(k, n, False, dtype, gap=extra)
        problem = check_forced(name, a, b, "decomposition=persistent", f"realign_{which}=1")
        if problem is not None:
            failures.append(f"{m} x {n} x {k} at {(offset, gap)}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KERNELS)
def test_batches(name, layout):
    """Batches, one after the other and interleaved."""
    dtype = DTYPE_OF[KERNELS[name]["ab_type"]]
    failures = []
    for (m, n, k), (offset, gap) in itertools.product(((1, 5, 3), (33, 65, 70), (130, 72, 259)), ((0, 0), (3, 1), (5, 2))):
        a = placed(m, k, layout[0] == "t", dtype, offset=offset, gap=gap, batch=(3,))
        b = placed(k, n, layout[1] == "t", dtype, offset=7 - offset, gap=gap, batch=(3,))
        lines, extent = (m, k) if layout[0] == "t" else (k, m)
        interleaved = placed(lines, 3 * extent, True, dtype, offset=offset).view(lines, 3, extent).transpose(0, 1)
        interleaved = interleaved if layout[0] == "t" else interleaved.transpose(1, 2)
        for x in (a, interleaved):
            problem = check_forced(name, x, b, "decomposition=persistent", "realign_a=1,realign_b=1")
            if problem is not None:
                failures.append(f"{m} x {n} x {k} at {(offset, gap)}, strides {x.stride()}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_planned(dtype, layout):
    """What the planner chooses for sizes that are no multiples of 8: it copies the larger ones."""
    for m, n, k in ((5, 4099, 4097), (129, 1001, 2055), (1023, 2047, 1025), (2049, 4095, 513)):
        a, b = placed(m, k, layout[0] == "t", dtype, offset=1), placed(k, n, layout[1] == "t", dtype, offset=5)
        out, whole = padded((m, n), dtype, DEVICE)
        minfer.gemm(a, b, out=out)
        assert gemm_mismatch(out, a, b) is None, (m, n, k)
        assert untouched_outside(out, whole)
        for _ in range(3):
            again, _ = padded((m, n), dtype, DEVICE)
            minfer.gemm(a, b, out=again)
            assert torch.equal(again, out), "two runs differ"
        gated = placed(k, n // 16 * 16, layout[1] == "t", dtype, offset=3).mul_(k**-0.5)
        assert gated_mismatch(minfer.gemm_gated(a, gated), a, gated) is None
    if any(kernel["arch"] == 90 and DTYPE_OF[kernel["ab_type"]] == dtype for kernel in KERNELS.values()):
        plan = plan_problem(Problem(2049, 4095, 513, dtype=dtype, layout=layout), use_tuned=False)
        assert plan.realign_a and plan.realign_b


def test_operands_and_workspaces_of_successive_launches():
    """Launches overlap: each writes its operand and its copy into memory that the launches before it still read."""
    m, n, k = 129, 1025, 2049
    weights = [placed(k, n, row_major, torch.bfloat16, offset=1) for row_major in (True, False)]
    inputs = [torch.randn(m, k, device=DEVICE).bfloat16() for _ in range(40)]
    expected = [minfer.gemm(x, weights[i % 2]) for i, x in enumerate(inputs)]
    torch.cuda.synchronize()
    a = torch.full((m * k + 1,), math.nan, device=DEVICE, dtype=torch.bfloat16)[1:].view(m, k)
    outs = []
    for i, x in enumerate(inputs):
        a.copy_(x)
        outs.append(minfer.gemm(a, weights[i % 2]))
    for i, (out, x) in enumerate(zip(outs, inputs, strict=True)):
        # `a` is offset from 16 bytes and x is not, but both are copied, as k is odd
        assert torch.equal(out, expected[i]), f"launch {i}"
        if i % 10 == 0:
            assert gemm_mismatch(out, x, weights[i % 2]) is None


def test_cuda_graph():
    m, n, k = 257, 1031, 1025
    a, b = placed(m, k, False, torch.float16, offset=3), placed(k, n, True, torch.float16, offset=1)
    minfer.gemm(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = minfer.gemm(a, b)
        second = minfer.gemm(first[:, :k], b)
    for _ in range(4):
        a.copy_(torch.randn(a.shape, device=DEVICE))
        first.fill_(math.nan)
        second.fill_(math.nan)
        graph.replay()
        graph.replay()
        assert torch.equal(first, minfer.gemm(a, b))
        assert torch.equal(second, minfer.gemm(first[:, :k], b))
        assert gemm_mismatch(first, a, b) is None


def test_strides_beyond_2_to_31():
    """Lines of a view that are 2^25 elements apart, as rows and as columns along k."""
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("requires 10 GiB of free GPU memory")
    pitch, lines = (1 << 25) + 1, 72
    memory = torch.empty(lines * pitch, dtype=torch.float16, device=DEVICE)
    view = memory.view(lines, pitch)[:, 1000003:][:, :523]
    view.copy_(torch.randn(view.shape, device=DEVICE))
    name = next(name for name, kernel in KERNELS.items() if kernel["ab_type"] == "f16")
    for a, b in ((view, placed(523, 40, False, torch.float16)), (view.t(), placed(72, 40, True, torch.float16))):
        for x, y in ((a, b), (b.t(), a.t())):
            out = minfer.gemm(x, y, kernel=f"{name}@decomposition=persistent,realign_a=1,realign_b=1")
            assert gemm_mismatch(out, x, y) is None
