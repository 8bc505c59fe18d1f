"""Every compiled kernel, forced by name, under every decomposition, swizzle and raster order; and what decompositions share: workspaces,
flags, streams. Regression tests for stream-K and split-K hanging or changing bits when launches run together or in CUDA graphs.
"""

import functools
import itertools
import math
import time

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.gemm.cases import (
    gated_mismatch,
    gemm_expected,
    gemm_mismatch,
    operands,
    padded,
    untouched_outside,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
LETTERS_A, LETTERS_B = {"k": "t", "mn": "n"}, {"k": "n", "mn": "t"}

KERNELS = {k["name"]: k for k in minfer.kernels() if k["compiled"]} or {k["name"]: k for k in minfer.kernels()}
# A tail in every mode; a few tiles with a long k; more tiles than SMs with a tail wave. Contiguous extents are multiples of 8.
SHAPES = ((200, 392, 1096), (24, 520, 4104), (2056, 4104, 264))
ODD_SHAPES = ((131, 257, 77), (7, 1001, 513), (1, 33, 3))  # for kernels that take any alignment
DECOMPOSITIONS = ("persistent", "stream_k", "split_k,splits=2", "split_k,splits=3", "split_k,splits=5")
LAUNCHES = [
    f"decomposition={decomposition},swizzle={swizzle},raster={raster}"
    for decomposition in DECOMPOSITIONS
    for swizzle, raster in ((1, "along_m"), (1, "along_n"), (4, "along_m"), (8, "along_n"))
]


def launches_of(kernel):
    """All launches; where they choose the tiles' columns, also every width in every decomposition."""
    step = kernel["column_step"]
    widths = range(step, kernel["tile_n"] + 1, step) if step else ()
    return LAUNCHES + [f"decomposition={decomposition},columns={width}" for width in widths for decomposition in DECOMPOSITIONS[:3]]


def decompositions_of(kernel):
    """The first three; where launches choose the tiles' columns, also in a narrow, a middling and a wide tile."""
    step, tile_n = kernel["column_step"], kernel["tile_n"]
    widths = ["", *(f",columns={width}" for width in (step, 5 * step, tile_n - step))] if step else [""]
    return [f"{decomposition}{width}" for width in widths for decomposition in DECOMPOSITIONS[:3]]


@functools.lru_cache(maxsize=32)
def case(dtype, layout, shape):
    """Operands and what their product should be, shared by all kernels of a layout."""
    torch.manual_seed(sum(shape))
    a, b = operands(*shape, dtype, layout, DEVICE)
    return a, b, gemm_expected(a, b)


def layout_of(kernel):
    return LETTERS_A[kernel["a_major"]] + LETTERS_B[kernel["b_major"]]


def wait(seconds=60.0):
    """Waits for the GPU; a hang ends the whole run with a message, for nothing after it could run."""
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            pytest.exit(f"the GPU did not finish in {seconds} s: a kernel hangs", returncode=1)
        time.sleep(0.0001)


@pytest.mark.parametrize("name", KERNELS)
def test_launches(name):
    """Values, the memory around D, and equal bits in a second run, for every launch configuration and shape."""
    kernel = KERNELS[name]
    dtype, layout = DTYPE_OF[kernel["ab_type"]], layout_of(kernel)
    failures = []
    for shape in SHAPES + (ODD_SHAPES if kernel["alignment"] < 16 else ()):
        a, b, expected = case(dtype, layout, shape)
        out, whole = padded(shape[:2], dtype, DEVICE)
        seen = {}
        for launch in launches_of(kernel):
            override = f"{name}@{launch}"
            whole.fill_(math.nan)
            minfer.gemm(a, b, kernel=override, out=out)
            wait()
            problem = expected.mismatch(out)
            if problem is None and not untouched_outside(out, whole):
                problem = "wrote outside of D"
            if problem is None and not torch.equal(out, minfer.gemm(a, b, kernel=override)):
                problem = "two runs differ"
            # The order in which tiles are walked is no part of the arithmetic, unless stream-K deals out other k-ranges for it.
            decomposition = launch.split(",swizzle")[0]
            if problem is None and "stream_k" not in decomposition and not torch.equal(seen.setdefault(decomposition, out.clone()), out):
                problem = "swizzle or raster changed bits"
            if problem is not None:
                failures.append(f"{override} on {shape}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("name", KERNELS)
def test_epilogues(name):
    """The whole epilogue, a float32 D, broadcast and float32 C, gated, batches: with whole and with divided tiles."""
    kernel = KERNELS[name]
    dtype, layout = DTYPE_OF[kernel["ab_type"]], layout_of(kernel)
    m, n, k = 136, 272, 520
    a, b, _ = case(dtype, layout, (m, n, k))
    c, bias = torch.randn(m, n, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE)
    cases = (
        {"c": c, "beta": 2.0, "alpha": 0.5, "bias": bias.to(dtype), "activation": "silu"},
        {"c": c.float(), "beta": -1.0, "activation": "relu"},
        {"c": c[0], "beta": 1.0, "bias": bias},
        {"c": c[:, :1], "beta": 1.0, "activation": "gelu"},
        {"c": c.t().contiguous().t(), "beta": 1.0, "activation": "gelu_tanh"},
    )
    cases = [(epilogue, gemm_expected(a, b, **epilogue)) for epilogue in cases]
    for decomposition in decompositions_of(kernel):
        override = f"{name}@decomposition={decomposition}"
        for (epilogue, expected), out_dtype in itertools.product(cases, (dtype, torch.float32)):
            out, whole = padded((m, n), out_dtype, DEVICE)
            minfer.gemm(a, b, **epilogue, kernel=override, out=out)
            wait()
            assert expected.mismatch(out) is None, (override, out_dtype, list(epilogue))
            assert untouched_outside(out, whole), override
        odd, whole = padded((m, n), dtype, DEVICE, left=3, right=2)
        minfer.gemm(a, b, c=c, beta=1.0, kernel=override, out=odd)
        assert gemm_mismatch(odd, a, b, c=c, beta=1.0) is None and untouched_outside(odd, whole), f"{override}: rows of D off 16 bytes"
        if kernel["tile_n"] > 1:  # a column has no pairs of gate and up
            assert gated_mismatch(minfer.gemm_gated(a, b, bias=bias, kernel=override), a, b, bias=bias) is None, override
        batch_a, batch_b = operands(40, 72, 264, dtype, layout, DEVICE, batch=(3,))
        batch_c = torch.randn(3, 40, 72, device=DEVICE).to(dtype)
        epilogue = {"c": batch_c, "beta": 1.0}
        out = minfer.gemm(batch_a, batch_b, **epilogue, kernel=override)
        wait()
        assert gemm_mismatch(out, batch_a, batch_b, **epilogue) is None, override


# ---- launches that run together ------------------------------------------------------------------------------------------------

DIVIDED = ("decomposition=stream_k", "decomposition=split_k,splits=4")
TOGETHER = ((1024, 1024, 1024), (64, 4096, 4096), (16, 4096, 4096), (200, 392, 2056))


def divided_overrides():
    """Stream-K and split-K of kernels with different tiles, for float16 "tn" operands."""
    names = [n for n, k in KERNELS.items() if k["ab_type"] == "f16" and layout_of(k) == "tn"]
    picked = names[:: max(1, len(names) // 6)]
    narrow = [f"{n}@columns={5 * KERNELS[n]['column_step']}," for n in names if KERNELS[n]["column_step"]]
    return [f"{start}{launch}" for start in [f"{n}@" for n in picked] + narrow[::4] for launch in DIVIDED]


def alone(override, shape):
    a, b, _ = case(torch.float16, "tn", shape)
    out = minfer.gemm(a, b, kernel=override)
    wait()
    return out


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_many_divided_launches_together(streams):
    """Hundreds in flight, back to back and side by side, on memory that torch's allocator passes from one to the next."""
    work = [(override, shape, alone(override, shape)) for override, shape in itertools.product(divided_overrides(), TOGETHER)]
    lanes = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    for repeat in range(6):
        results = []
        for i, (override, shape, expected) in enumerate(work):
            a, b, _ = case(torch.float16, "tn", shape)
            with torch.cuda.stream(lanes[(i + repeat) % streams]):
                results.append((override, shape, expected, minfer.gemm(a, b, kernel=override)))
        for lane in lanes:
            torch.cuda.current_stream().wait_stream(lane)
        wait()
        for override, shape, expected, out in results:
            assert torch.equal(out, expected), f"{override} on {shape} changed bits beside other launches"


@pytest.mark.parametrize("branches", [1, 3])
def test_divided_launches_in_a_graph(branches):
    """One graph with all of them, on parallel branches, replayed with changed inputs and twice in a row without a pause."""
    work = list(itertools.product(divided_overrides(), TOGETHER))
    inputs = {shape: tuple(x.clone() for x in case(torch.float16, "tn", shape)[:2]) for shape in TOGETHER}
    lanes = [torch.cuda.Stream() for _ in range(branches)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = []
        for lane in lanes:
            lane.wait_stream(torch.cuda.current_stream())
        for i, (override, shape) in enumerate(work):
            with torch.cuda.stream(lanes[i % branches]):
                outs.append(minfer.gemm(*inputs[shape], kernel=override))
        for lane in lanes:
            torch.cuda.current_stream().wait_stream(lane)
    for replay in range(4):
        for a, b in inputs.values():
            a.copy_(torch.randn_like(a) * (replay + 1))
            b.copy_(torch.randn_like(b))
        for out in outs:
            out.fill_(math.nan)
        for _ in range(5):
            graph.replay()
        wait()
        for (override, shape), out in zip(work, outs, strict=True):
            assert torch.equal(out, minfer.gemm(*inputs[shape], kernel=override)), f"{override} on {shape}, replay {replay}"


def test_two_graphs_replayed_at_once():
    """Two graphs of divided launches on two streams: their flags and partial tiles must not meet."""
    overrides = divided_overrides()
    shape = TOGETHER[0]
    a, b, _ = case(torch.float16, "tn", shape)
    expected = {override: alone(override, shape) for override in overrides}
    lanes, graphs, outs = [torch.cuda.Stream() for _ in range(2)], [], []
    for lane in lanes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lane):
            outs.append([minfer.gemm(a, b, kernel=override) for override in overrides])
        graphs.append(graph)
    for _ in range(20):
        for lane, graph in zip(lanes, graphs, strict=True):
            with torch.cuda.stream(lane):
                graph.replay()
    for lane in lanes:
        torch.cuda.current_stream().wait_stream(lane)
    wait()
    for out, override in zip(itertools.chain(*outs), overrides * 2, strict=True):
        assert torch.equal(out, expected[override]), override


def test_workspace_content_does_not_matter():
    """The workspace comes from torch's allocator as the last user left it: try zeros, ones, NaN and what a launch leaves."""
    for override, shape in itertools.product(divided_overrides(), TOGETHER[:2]):
        a, b, _ = case(torch.float16, "tn", shape)
        expected = alone(override, shape)
        for byte in (0x00, 0x01, 0x7F, 0xFF):
            torch.cuda.empty_cache()
            filler = torch.full((256 << 20,), byte, dtype=torch.uint8, device=DEVICE)
            del filler
            assert torch.equal(minfer.gemm(a, b, kernel=override), expected), f"{override} on {shape}, workspace of {byte:#x}"
            wait()
