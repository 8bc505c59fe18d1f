"""torch.ops.minfer.gemm and gemm_gated on a GPU, as a caller meets them: the planner chooses the kernel.

Random inputs at several scales, outputs in NaN-filled memory, odd shapes, views, broadcasts, streams, CUDA graphs, torch.compile; the
truth is float64. test_kernels_gpu.py forces every kernel instead.
"""

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import minfer
import pytest
import torch

from tests.gemm.cases import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    gated_mismatch,
    gemm_mismatch,
    name_of,
    operands,
    padded,
    untouched_outside,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS = (0, 1, 2, 3, 7, 8, 16, 17, 31, 33, 64, 65, 128, 257, 1000)
# n and k: aligned, tails of 8 below every tile, primes, and sizes that are not multiples of 8
COLUMNS_AND_DEPTHS = (
    (8, 8), (16, 64), (128, 128), (136, 72), (264, 1096), (504, 40), (1032, 520), (2048, 256), (384, 2056),
    (1, 1), (5, 3), (13, 127), (97, 513), (131, 66), (257, 1021), (1022, 260), (640, 31), (31, 640),
)  # fmt: skip
SCALES = (1.0, 2.0**-6, 16.0)


def poison(shape, dtype):
    """Leaves NaN in the memory that torch's allocator hands out next for this size."""
    for _ in range(2):
        torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def epilogues(m, n, dtype):
    """Endless epilogues: every activation with every kind of C and bias comes up in turn."""

    def randn(*shape, dtype=dtype):
        return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)

    c_makers = (
        lambda: None,
        lambda: randn(m, n),
        lambda: randn(m, n, dtype=torch.float32),
        lambda: randn(n),
        lambda: randn(m, 1),
        lambda: randn(dtype=torch.float32),
        lambda: randn(n, m).t(),
    )
    bias_makers = (lambda: None, lambda: randn(n), lambda: randn(n, dtype=torch.float32))
    scalars = ((1.0, 1.0), (2.0, 3.0), (0.5, 2.0), (-1.0, 0.25))
    out_dtypes = (dtype, dtype, torch.float32)
    cycles = itertools.cycle(ACTIVATIONS), itertools.cycle(c_makers), itertools.cycle(bias_makers), itertools.cycle(scalars)
    for activation, c, bias, (alpha, beta), out_dtype in zip(*cycles, itertools.cycle(out_dtypes), strict=False):
        c = c()
        yield {"activation": activation, "c": c, "bias": bias(), "alpha": alpha, "beta": 0.0 if c is None else beta}, out_dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sweep(dtype, layout):
    """Every m with every (n, k), three of the epilogues each; D is a view inside NaN-filled memory, with and without 16-byte rows."""
    failures = []
    number = 0
    for m, (n, k) in itertools.product(ROWS, COLUMNS_AND_DEPTHS):
        a, b = operands(m, n, k, dtype, layout, DEVICE, scale=SCALES[number % len(SCALES)])
        for epilogue, out_dtype in itertools.islice(epilogues(m, n, dtype), number % 7, number % 7 + 3):
            left = 8 if number % 3 else 3
            out, whole = padded((m, n), out_dtype, DEVICE, left=left, right=(-left - n) % 8 if number % 3 else 5)
            minfer.gemm(a, b, **epilogue, out=out)
            problem = gemm_mismatch(out, a, b, **epilogue)
            if problem is None and not untouched_outside(out, whole):
                problem = "wrote outside of D"
            if problem is None and number % 5 == 0:
                poison((m, n), out_dtype)
                again = minfer.gemm(a, b, **epilogue, out_dtype=out_dtype)
                # A fresh D may be aligned where the view is not, and then another kernel runs: compare values, not bits.
                problem = gemm_mismatch(again, a, b, **epilogue)
            if problem is not None:
                kinds = {key: tuple(v.shape) if isinstance(v, torch.Tensor) else v for key, v in epilogue.items()}
                failures.append(f"{m} x {n} x {k} {out_dtype} {kinds}: {problem}")
            number += 1
    assert not failures, f"{len(failures)} of {number} cases:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gated_sweep(dtype, layout):
    failures = []
    number = 0
    for m, (half, k) in itertools.product(ROWS, ((8, 16), (64, 64), (72, 31), (264, 520), (1000, 136), (2048, 260))):
        a, b = operands(m, 2 * half, k, dtype, layout, DEVICE, scale=k**-0.25)
        bias = (None, torch.randn(2 * half, device=DEVICE), torch.randn(2 * half, device=DEVICE).to(dtype))[number % 3]
        activation = ACTIVATIONS[number % len(ACTIVATIONS)]
        poison((m, half), dtype)
        out = minfer.gemm_gated(a, b, bias=bias, activation=activation)
        problem = gated_mismatch(out, a, b, bias=bias, activation=activation)
        if problem is None and not torch.equal(out, minfer.gemm_gated(a, b, bias=bias, activation=activation)):
            problem = "two runs differ"
        if problem is not None:
            failures.append(f"{m} x 2*{half} x {k} {activation} bias {None if bias is None else bias.dtype}: {problem}")
        number += 1
    assert not failures, f"{len(failures)} of {number} cases:\n" + "\n".join(failures[:20])


def test_gated_is_the_mlp():
    """pack_gate_up in front of gemm_gated computes silu(x.G^T) * (x.U^T)."""
    gate, up = (torch.nn.Linear(256, 520, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(37, 256, device=DEVICE).bfloat16()
    with torch.inference_mode():
        out = minfer.gemm_gated(x, minfer.pack_gate_up(gate.weight, up.weight).t(), bias=minfer.pack_gate_up(gate.bias, up.bias))
        truth = torch.nn.functional.silu(gate.double()(x.double())) * up.double()(x.double())
    assert (out.double() - truth).norm() / truth.norm() < 2.0**-8


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 6144, 4096), (300, 1000, 14336), (2048, 4096, 4096), (4000, 8200, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_real_sizes(dtype, shape):
    a, b = operands(*shape, dtype, "tn", DEVICE)
    poison(shape[:2], dtype)
    out = minfer.gemm(a, b)
    assert gemm_mismatch(out, a, b) is None
    for _ in range(5):
        assert torch.equal(minfer.gemm(a, b), out), "two runs differ"
    bias, c = torch.randn(shape[1], device=DEVICE), torch.randn(shape[:2], device=DEVICE).to(dtype)
    epilogue = {"bias": bias, "c": c, "beta": 2.0, "alpha": 0.5, "activation": "silu"}
    assert gemm_mismatch(minfer.gemm(a, b, **epilogue), a, b, **epilogue) is None


def test_views():
    """Strided, offset, expanded, overlapping and misaligned views of A, B, C and bias."""
    base = torch.randn(300, 400, device=DEVICE).half()
    views = {
        "rows": base[1:257:2, 8:136],
        "offset": base[3:131, 5:133],
        "every second column": base[:128, :256:2],
        "transposed": base[3:131, 8:136].t(),
        "transposed offset": base[3:131, 5:133].t(),
        "expanded row": base[4:5, :128].expand(128, 128),
        "expanded column": base[:128, 7:8].expand(128, 128),
        "overlapping": base.flatten().as_strided((128, 128), (1, 1), 11),
        "hankel": base.flatten().as_strided((128, 128), (8, 1), 16),
    }
    other = torch.randn(128, 96, device=DEVICE).half()
    for name, view in views.items():
        for a, b in ((view, other), (other.t(), view)):
            assert gemm_mismatch(minfer.gemm(a, b), a, b) is None, name
        epilogue = {"c": view[:96, :128], "beta": 1.0, "bias": view[2]}
        assert gemm_mismatch(minfer.gemm(other.t(), base[:128, :128], **epilogue), other.t(), base[:128, :128], **epilogue) is None, name


@pytest.mark.parametrize("offset", range(8))
def test_misaligned_pointers(offset):
    """Every element offset from a 16-byte boundary of A, B, C, bias and D in turn."""
    m, n, k = 72, 136, 200

    def shifted(rows, columns, by):
        return torch.randn(rows * columns + 8, device=DEVICE).bfloat16()[by : by + rows * columns].view(rows, columns)

    for which in range(5):
        by = [offset if i == which else 0 for i in range(5)]
        a, b, c, bias = shifted(m, k, by[0]), shifted(n, k, by[1]).t(), shifted(m, n, by[2]), shifted(1, n, by[3])[0]
        memory = torch.full((m * n + 16,), math.nan, device=DEVICE, dtype=torch.bfloat16)
        out = memory[by[4] : by[4] + m * n].view(m, n)
        epilogue = {"c": c, "beta": 1.0, "bias": bias}
        minfer.gemm(a, b, **epilogue, out=out)
        assert gemm_mismatch(out, a, b, **epilogue) is None
        assert int(memory.isnan().sum()) == 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches(layout):
    for m, n, k in ((1, 64, 64), (5, 24, 40), (65, 130, 33), (128, 256, 512), (1, 7, 9)):
        a, b = operands(m, n, k, torch.float16, layout, DEVICE, batch=(3,))
        strided = torch.randn(6, m, k, device=DEVICE).half()[::2]
        interleaved = torch.randn(m, 3, k, device=DEVICE).half().transpose(0, 1)
        repeated = a[:1].expand(3, m, k)
        c_values = (
            None,
            torch.randn(3, m, n, device=DEVICE).half(),
            torch.randn(m, n, device=DEVICE),
            torch.randn(3, 1, n, device=DEVICE).half(),
        )
        for (x, y), c in itertools.product(((a, b), (a, b[0]), (a[0], b), (strided, b), (interleaved, b[0]), (repeated, b)), c_values):
            epilogue = {"c": c, "beta": 0.0 if c is None else 0.5, "activation": "relu"}
            out, whole = padded((3, m, n), torch.float16, DEVICE)
            minfer.gemm(x, y, **epilogue, out=out)
            assert gemm_mismatch(out, x, y, **epilogue) is None
            assert untouched_outside(out, whole)
            assert gemm_mismatch(minfer.gemm(x, y, **epilogue), x, y, **epilogue) is None
        gated_b = torch.randn(3, k, 32, device=DEVICE).half()
        for x, y in ((a, gated_b), (a, gated_b[0]), (a[0], gated_b)):
            assert gated_mismatch(minfer.gemm_gated(x, y), x, y) is None
    assert minfer.gemm(a[:0], b[:0]).shape == (0, m, n)


def test_out_forms():
    a, b = operands(40, 72, 64, torch.bfloat16, "tn", DEVICE)
    expected = minfer.gemm(a, b)
    for out in (torch.empty(72, 40, device=DEVICE).bfloat16().t(), torch.empty(40, 144, device=DEVICE).bfloat16()[:, ::2]):
        assert torch.equal(minfer.gemm(a, b, out=out), expected)
    c = torch.randn(40, 72, device=DEVICE).bfloat16()
    expected = minfer.gemm(a, b, c=c, beta=1.0)
    assert torch.equal(minfer.gemm(a, b, c=c, beta=1.0, out=c), expected), "out may be c"


@pytest.mark.parametrize("shape", [(5, 24, 40), (5, 23, 39), (300, 520, 264)], ids=str)
def test_nan_rules(shape):
    m, n, k = shape
    a, b = operands(m, n, k, torch.float16, "tn", DEVICE)
    plain = minfer.gemm(a, b)
    for nan_c in (torch.full((m, n), math.nan, device=DEVICE).half(), torch.full((n,), math.nan, device=DEVICE)):
        assert torch.equal(minfer.gemm(a, b, c=nan_c), plain), "beta = 0: C is not read"
    c, nan_a = torch.randn(m, n, device=DEVICE).half(), torch.full_like(a, math.nan)
    assert torch.equal(minfer.gemm(nan_a, b, c=c, alpha=0.0, beta=1.0), c), "alpha = 0: A and B are not read"
    assert torch.equal(minfer.gemm(nan_a, b, alpha=0.0), torch.zeros_like(c))
    a[1, 3] = math.nan
    for activation in ACTIVATIONS:
        rows = minfer.gemm(a, b, activation=activation).isnan()
        assert rows[1].all() and int(rows.sum()) == n, f"{activation}: a NaN in A reaches its row, and no other"


@pytest.mark.parametrize("m, n, k", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (33, 57, 0)])
def test_empty_sizes(m, n, k):
    a, b = operands(m, n, k, torch.float16, "tn", DEVICE)
    bias, c = torch.randn(n, device=DEVICE).half(), torch.randn(m, n, device=DEVICE).half()
    epilogue = {"c": c, "beta": 2.0, "bias": bias, "activation": "silu"}
    poison((m, n), torch.float16)
    out = minfer.gemm(a, b, **epilogue)
    assert out.shape == (m, n)
    assert gemm_mismatch(out, a, b, **epilogue) is None
    assert torch.equal(minfer.gemm(a, b), torch.zeros(m, n, device=DEVICE).half())
    if n % 16 == 0:
        assert torch.equal(minfer.gemm_gated(a, b), torch.zeros(m, n // 2, device=DEVICE).half())


def test_other_stream():
    """Work is ordered on the current stream: a long kernel before it delays the operands."""
    a, b = operands(256, 512, 512, torch.float16, "tn", DEVICE)
    expected = minfer.gemm(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late_a = torch.zeros_like(a)
        torch.cuda._sleep(20_000_000)
        late_a.copy_(a)
        out = minfer.gemm(late_a, b)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")
def test_other_device():
    a, b = operands(64, 128, 256, torch.float16, "tn", "cuda:1")
    assert torch.cuda.current_device() == 0
    out = minfer.gemm(a, b, bias=torch.randn(128, device="cuda:1"), activation="silu")
    assert out.device == a.device
    assert gemm_mismatch(minfer.gemm(a, b), a, b) is None


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 4096, 14336), (100, 1000, 2048), (129, 257, 515), (2048, 2048, 2048)], ids=str)
def test_cuda_graph(shape):
    """Capture, then replay with other inputs; every replay has eager mode's bits."""
    m, n, k = shape
    a, b = operands(m, n, k, torch.bfloat16, "tn", DEVICE)
    c, bias = torch.randn(m, n, device=DEVICE).bfloat16(), torch.randn(n, device=DEVICE)

    def step():
        y = minfer.gemm(a, b, c=c, beta=1.0, bias=bias, activation="gelu")
        return y, minfer.gemm(y, b[:n], out_dtype=torch.float32)

    minfer.gemm(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(4):
        for x in (a, b, c, bias):
            x.copy_(torch.randn_like(x))
        for y in captured:
            y.fill_(math.nan)
        graph.replay()
        graph.replay()
        for have, want in zip(captured, step(), strict=True):
            assert torch.equal(have, want)
    assert gemm_mismatch(captured[0], a, b, c=c, beta=1.0, bias=bias, activation="gelu") is None


def test_inputs_are_left_alone():
    a, b = operands(70, 90, 110, torch.float16, "nt", DEVICE)
    c, bias = torch.randn(70, 90, device=DEVICE).half(), torch.randn(90, device=DEVICE)
    before = [x.clone() for x in (a, b, c, bias)]
    minfer.gemm(a, b, c=c, beta=1.0, bias=bias)
    assert all(torch.equal(x, y) for x, y in zip((a, b, c, bias), before, strict=True))


def need_memory(gigabytes):
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 2**30:
        pytest.skip(f"requires {gigabytes} GiB of free GPU memory")


def check_slices(out, a, b, rows, columns):
    for r, s in itertools.product(rows, columns):
        assert gemm_mismatch(out[r, s], a[r], b[:, s]) is None, (r, s)


def test_more_than_2_to_31_elements_of_d():
    need_memory(12)
    m, n, k = (1 << 17) + 24, (1 << 14) + 8, 16
    a, b = operands(m, n, k, torch.float16, "tn", DEVICE)
    out = torch.full((m, n), math.nan, dtype=torch.float16, device=DEVICE)
    assert out.numel() > 2**31
    minfer.gemm(a, b, out=out)
    ends = [slice(0, 256), slice(m // 2, m // 2 + 256), slice(m - 256, m)]
    check_slices(out, a, b, ends, [slice(0, 256), slice(n - 256, n)])
    assert not torch.stack([part.isnan().any() for part in out.split(1 << 14)]).any()


@pytest.mark.parametrize("which", ["a", "b"])
def test_more_than_2_to_31_elements_of_an_operand(which):
    """The operand's last rows are 4 GB behind its first."""
    need_memory(8)
    rows, k = (1 << 17) + 40, 1 << 14
    long = torch.zeros(rows, k, device=DEVICE, dtype=torch.bfloat16)
    short = torch.randn(16, k, device=DEVICE).bfloat16()
    assert long.numel() > 2**31
    ends = [slice(0, 64), slice(rows // 2, rows // 2 + 64), slice(rows - 64, rows)]
    for end in ends:
        long[end] = torch.randn(64, k, device=DEVICE).bfloat16()
    everything = [slice(None)]
    if which == "a":
        check_slices(minfer.gemm(long, short.t()), long, short.t(), ends, everything)
    else:
        check_slices(minfer.gemm(short, long.t()), short, long.t(), everything, ends)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="requires Triton")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    """fullgraph, and with Inductor's CUDA graphs. What it fuses between the calls is exact here: the bits are eager mode's."""
    torch._dynamo.reset()
    weight, packed = torch.randn(512, 512, device=DEVICE).bfloat16() / 23, torch.randn(1024, 512, device=DEVICE).bfloat16() / 23

    def layer(x, residual):
        y = minfer.gemm(x.relu(), weight.t(), c=residual, beta=1.0, activation="silu")
        return minfer.gemm_gated(y * 2, packed.t()), minfer.gemm(y, weight, out_dtype=torch.float32)

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for m in (1, 16, 16, 16, 200):
            x, residual = torch.randn(m, 512, device=DEVICE).bfloat16(), torch.randn(m, 512, device=DEVICE).bfloat16()
            for have, want in zip(compiled(x, residual), layer(x, residual), strict=True):
                torch.testing.assert_close(have, want, rtol=0, atol=0)


FORCED = """
import sys, torch, minfer
sys.path.insert(0, sys.argv[1])
from tests.gemm.cases import gemm_mismatch, operands
for m, n, k in ((1, 4096, 4096), (17, 264, 520), (300, 515, 77), (1024, 2048, 512)):
    p = minfer.plan("gemm", m=m, n=n, k=k, dtype=torch.float16)
    assert "_sm80_" in p.kernel, p.kernel
    a, b = operands(m, n, k, torch.float16, "tn", "cuda")
    problem = gemm_mismatch(minfer.gemm(a, b, activation="relu"), a, b, activation="relu")
    assert problem is None, problem
print("portable")
"""


def test_portable_kernels_by_environment():
    """MINFER_FORCE_ARCH=80 takes the path of GPUs other than Hopper."""
    command = [sys.executable, "-c", FORCED, str(Path(__file__).parents[2])]
    done = subprocess.run(command, env=os.environ | {"MINFER_FORCE_ARCH": "80"}, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "portable", done.stderr


CHAIN = """
import torch, minfer
torch.manual_seed(1)
y, b = (torch.randn(rows, 4096, device="cuda").half() for rows in (64, 4096))
for _ in range(20):
    y = minfer.gemm(y, b, alpha=1 / 64, activation="relu")
print(y.double().sum().item(), y.isnan().any().item())
"""


def test_no_programmatic_launch_by_environment():
    """MINFER_PDL=0 computes the same bits."""

    def output(value):
        command = [sys.executable, "-c", CHAIN]
        return subprocess.run(command, env=os.environ | {"MINFER_PDL": value}, capture_output=True, text=True, check=True).stdout

    assert output("0") == output("1") and "False" in output("1")
