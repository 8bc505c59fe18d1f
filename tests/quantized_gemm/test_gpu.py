"""torch.ops.minfer.w4a16_* on a GPU: the planner's choice over shapes, groups and zero points, then every compiled kernel by name.

Outputs lie in NaN-filled memory; the truth is float64 on the dequantised 16-bit weights, the yardstick torch's own 16-bit product of them.
"""

import functools
import importlib.util
import itertools
import math

import minfer
import pytest
import torch
from minfer.formats import weight_layout
from minfer.planning.plan import DTYPE_NAMES
from minfer.reference import quantized_gemm as reference_w4a16

from tests.contracts.test_registration import check_op
from tests.gemm.cases import (
    ACTIVATIONS,
    DTYPES,
    name_of,
    padded,
    untouched_outside,
)
from tests.quantized_gemm.cases import (
    BAD_DEQUANTIZE,
    BAD_GEMM,
    BAD_GEMM_ONLY,
    BAD_PACK,
    BAD_PACK_FORMATS,
    GROUPS,
    ZEROS,
    bad_call,
    make_weight,
    w4a16_expected,
    w4a16_gated_mismatch,
    w4a16_mismatch,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS = (0, 1, 3, 16, 17, 64, 65, 256, 1000)
# n and k: aligned, tails in both, a language model's, fewer than a tile, k far over n and the other way round
SIZES = ((256, 512), (328, 1032), (4096, 4096), (8, 8), (24, 4096), (2056, 72))

INT4 = [k for k in minfer.kernels("w4a16") if k["b_format"] == "int4"]  # the other formats' are in test_weight_formats_gpu.py
KERNELS = {k["name"]: k for k in INT4 if k["compiled"]} or {k["name"]: k for k in INT4}
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DECOMPOSITIONS = ("persistent", "stream_k", "split_k,splits=3")


def randn(*shape, dtype=torch.float16):
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def poison(shape, dtype):
    """Leaves NaN in the memory that torch's allocator hands out next for this size."""
    for _ in range(2):
        torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def report(failures, number):
    assert not failures, f"{len(failures)} of {number} cases:\n" + "\n".join(failures[:20])


# ---- packing -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (8, 8), (72, 136), (328, 1032), (4096, 4096), (0, 64), (64, 0)], ids=str)
def test_pack_is_like_cpu(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = minfer.w4a16_pack(codes.cuda())
    assert packed.is_contiguous() and torch.equal(packed.cpu(), minfer.w4a16_pack(codes))
    assert torch.equal(weight_layout.unpack(packed, *shape).cpu(), codes)


def test_pack_of_views_and_high_bits():
    base = torch.randint(0, 256, (300, 300), dtype=torch.uint8)
    on_gpu = base.cuda()
    slices = (lambda x: x[:128, :192].t(), lambda x: x[3:131:2, 5:133], lambda x: x[:64, :256:2], lambda x: x[:1, :64].expand(64, 64))
    for view in slices:
        assert torch.equal(minfer.w4a16_pack(view(on_gpu)).cpu(), minfer.w4a16_pack(view(base) & 15))


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dequantize_is_like_cpu(dtype, zeros, group_size):
    for n, k in SIZES:
        weight = make_weight(n, k, group_size, zeros, dtype)
        args, kwargs = weight.packed
        poison((n, k), dtype)
        w = minfer.w4a16_dequantize(*(None if x is None else x.cuda() for x in args), **kwargs, n=n, k=k)
        assert w.is_contiguous() and torch.equal(w.cpu(), minfer.w4a16_dequantize(*args, **kwargs, n=n, k=k)), (n, k)


# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sweep(dtype, group_size):
    """Every m with every (n, k) and kind of zero; D inside NaN-filled memory; a second run gives the same bits."""
    failures, number = [], 0
    for (n, k), zeros in itertools.product(SIZES, ZEROS):
        weight = make_weight(n, k, group_size, zeros, dtype, DEVICE)
        args, kwargs = weight.packed
        for m in ROWS:
            a = randn(m, k, dtype=dtype) * (1.0, 2.0**-6, 16.0)[number % 3]
            out, whole = padded((m, n), dtype, DEVICE)
            minfer.w4a16_gemm(a, *args, **kwargs, out=out)
            problem = w4a16_mismatch(out, a, weight)
            if problem is None and not untouched_outside(out, whole):
                problem = "wrote outside of D"
            poison((m, n), dtype)
            first = minfer.w4a16_gemm(a, *args, **kwargs)
            problem = problem or w4a16_mismatch(first, a, weight)
            if problem is None and not all(torch.equal(minfer.w4a16_gemm(a, *args, **kwargs), first) for _ in range(2)):
                problem = "two runs differ"
            if problem is not None:
                failures.append(f"{m} x {n} x {k}, zeros {zeros}: {problem}")
            number += 1
    report(failures, number)


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_epilogues_and_perm(dtype, group_size):
    """Every activation with every kind of C and bias in turn, with and without a gather of A's columns."""
    failures, number = [], 0
    for (n, k), m in itertools.product(((256, 512), (328, 1032), (24, 4096)), ROWS):
        weight = make_weight(n, k, group_size, ZEROS[number % 3], dtype, DEVICE)
        args, kwargs = weight.packed
        c_makers = (
            lambda m, n: randn(m, n, dtype=dtype),
            lambda m, n: None,
            lambda m, n: randn(m, n, dtype=torch.float32),
            lambda m, n: randn(n, dtype=dtype),
            lambda m, n: randn(m, 1, dtype=dtype),
            lambda m, n: randn(dtype=torch.float32),
            lambda m, n: randn(n, m, dtype=dtype).t(),
        )
        for _ in range(3):
            a = randn(m, k, dtype=dtype)
            epilogue = {
                "activation": ACTIVATIONS[number % len(ACTIVATIONS)],
                "c": c_makers[number % 7](m, n),
                "bias": (None, randn(n, dtype=dtype), randn(n, dtype=torch.float32))[number % 3],
                "perm": torch.randperm(k, device=DEVICE).int() if number % 2 else None,
            }
            left = 8 if number % 4 else 3
            out, whole = padded((m, n), torch.float32 if number % 5 == 4 else dtype, DEVICE, left=left, right=8 if number % 4 else 2)
            minfer.w4a16_gemm(a, *args, **kwargs, **epilogue, out=out)
            problem = w4a16_mismatch(out, a, weight, **epilogue)
            if problem is None and not untouched_outside(out, whole):
                problem = "wrote outside of D"
            if problem is not None:
                kinds = {key: tuple(v.shape) if isinstance(v, torch.Tensor) else v for key, v in epilogue.items()}
                failures.append(f"{m} x {n} x {k} {kinds}: {problem}")
            number += 1
    report(failures, number)


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gated_sweep(dtype, group_size):
    failures, number = [], 0
    for (half, k), m in itertools.product(((24, 64), (264, 520), (1000, 136), (2048, 4096)), ROWS):
        weight = make_weight(2 * half, k, group_size, ZEROS[number % 3], dtype, DEVICE)
        args, kwargs = weight.packed
        a = randn(m, k, dtype=dtype) * k**-0.25
        bias = (None, randn(2 * half, dtype=torch.float32), randn(2 * half, dtype=dtype))[number // 3 % 3]
        activation = ACTIVATIONS[number % len(ACTIVATIONS)]
        poison((m, half), dtype)
        out = minfer.w4a16_gemm_gated(a, *args, **kwargs, bias=bias, activation=activation)
        problem = w4a16_gated_mismatch(out, a, weight, bias=bias, activation=activation)
        if problem is None and not torch.equal(out, minfer.w4a16_gemm_gated(a, *args, **kwargs, bias=bias, activation=activation)):
            problem = "two runs differ"
        if problem is not None:
            failures.append(f"{m} x 2*{half} x {k} {activation} bias {None if bias is None else bias.dtype}: {problem}")
        number += 1
    report(failures, number)


def test_act_order():
    """W packed as W[:, perm] with perm multiplies by W, plain and gated."""
    for m, (n, k) in itertools.product((1, 17, 300), ((256, 512), (336, 1032))):
        weight, perm = make_weight(n, k, -1, "integer", torch.float16, DEVICE), torch.randperm(k, device=DEVICE)
        _, scales, zeros = weight.packed[0]
        packed, a = minfer.w4a16_pack(weight.codes[:, perm]), randn(m, k)
        arguments = (a, packed, scales, zeros)
        out = minfer.w4a16_gemm(*arguments, group_size=-1, perm=perm.int())
        assert w4a16_mismatch(out, a, weight) is None, (m, n, k)
        assert w4a16_gated_mismatch(minfer.w4a16_gemm_gated(*arguments, group_size=-1, perm=perm.int()), a, weight) is None, (m, n, k)


def test_leading_dimensions():
    weight = make_weight(328, 1032, 64, "integer", torch.bfloat16, DEVICE)
    args, kwargs = weight.packed
    a = randn(2, 3, 5, 1032, dtype=torch.bfloat16)
    matrix = minfer.w4a16_gemm(a.view(30, 1032), *args, **kwargs)
    assert torch.equal(minfer.w4a16_gemm(a, *args, **kwargs), matrix.view(2, 3, 5, 328))
    assert minfer.w4a16_gemm(a[:0], *args, **kwargs).shape == (0, 3, 5, 328)
    row = minfer.w4a16_gemm(a[0, 0, 0], *args, **kwargs)
    assert row.shape == (328,) and torch.equal(row, minfer.w4a16_gemm(a[0, 0, :1], *args, **kwargs)[0])
    c = randn(2, 1, 5, 328, dtype=torch.bfloat16)
    out = minfer.w4a16_gemm(a, *args, **kwargs, c=c).view(30, 328)
    assert w4a16_mismatch(out, a.view(30, 1032), weight, c=c.expand(2, 3, 5, 328).reshape(30, 328)) is None
    gated = make_weight(336, 1032, 64, "integer", torch.bfloat16, DEVICE)
    out = minfer.w4a16_gemm_gated(a, *gated.packed[0], **gated.packed[1])
    assert torch.equal(out.view(30, 168), minfer.w4a16_gemm_gated(a.view(30, 1032), *gated.packed[0], **gated.packed[1]))


def test_views():
    """Strided, offset, expanded and misaligned views of A; scales, zeros, bias and D too."""
    weight = make_weight(136, 128, 32, "fractional", torch.float16, DEVICE)
    (qweight, scales, zeros), kwargs = weight.packed
    base = randn(300, 400)
    views = {
        "rows": base[1:257:2, 8:136],
        "offset": base[3:131, 5:133],
        "every second column": base[:128, :256:2],
        "transposed": base[3:131, 8:136].t(),
        "expanded row": base[4:5, :128].expand(64, 128),
        "expanded column": base[:64, 7:8].expand(64, 128),
        "overlapping": base.flatten().as_strided((64, 128), (1, 1), 11),
    }
    for name, a in views.items():
        assert w4a16_mismatch(minfer.w4a16_gemm(a, qweight, scales, zeros, **kwargs), a, weight) is None, name
        perm = torch.randperm(128, device=DEVICE).int()
        assert w4a16_mismatch(minfer.w4a16_gemm(a, qweight, scales, zeros, **kwargs, perm=perm), a, weight, perm=perm) is None, name
    a = base[:64, :128].contiguous()
    expected = minfer.w4a16_gemm(a, qweight, scales, zeros, **kwargs)

    def strided(x):
        whole = torch.zeros(x.shape[0], 2 * x.shape[1] + 3, dtype=x.dtype, device=DEVICE)
        view = whole[:, 3 : 3 + x.shape[1]]
        return view.copy_(x)

    def transposed(x):
        return x.t().contiguous().t()

    for change in (strided, transposed):
        assert torch.equal(minfer.w4a16_gemm(a, qweight, change(scales), change(zeros), **kwargs), expected), change.__name__
    packed = torch.zeros(*qweight.shape[:2], 1024, dtype=torch.int32, device=DEVICE)[..., :512].copy_(qweight)
    assert torch.equal(minfer.w4a16_gemm(a, packed, scales, zeros, **kwargs), expected)
    for out in (torch.empty(136, 64, device=DEVICE).half().t(), torch.empty(64, 272, device=DEVICE).half()[:, ::2]):
        assert torch.equal(minfer.w4a16_gemm(a, qweight, scales, zeros, **kwargs, out=out), expected)
    c = randn(64, 136)
    expected = minfer.w4a16_gemm(a, qweight, scales, zeros, **kwargs, c=c)
    assert torch.equal(minfer.w4a16_gemm(a, qweight, scales, zeros, **kwargs, c=c, out=c), expected), "out may be c"


def test_inputs_are_left_alone():
    weight = make_weight(136, 520, 64, "integer", torch.float16, DEVICE)
    (qweight, scales, zeros), kwargs = weight.packed
    a, c, bias, perm = randn(70, 520), randn(70, 136), randn(136), torch.randperm(520, device=DEVICE).int()
    inputs = (a, qweight, scales, zeros, c, bias, perm)
    before = [x.clone() for x in inputs]
    minfer.w4a16_gemm(a, qweight, scales, zeros, **kwargs, c=c, bias=bias, perm=perm)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_nan_reaches_its_row_only():
    weight = make_weight(328, 1032, 64, "none", torch.float16, DEVICE)
    args, kwargs = weight.packed
    for m in (3, 70):
        a = randn(m, 1032)
        a[1, 3] = math.nan
        for activation in ACTIVATIONS:
            rows = minfer.w4a16_gemm(a, *args, **kwargs, activation=activation).isnan()
            assert rows[1].all() and int(rows.sum()) == 328


def test_extreme_codes():
    """Only 0, only 15, zero points at and beyond the ends."""
    for dtype, code, zero in itertools.product(DTYPES, (0, 15), (0.0, 15.0, -3.5, 20.0)):
        weight = make_weight(72, 136, 32, "integer", dtype, DEVICE)
        weight.codes.fill_(code)
        weight.zeros.fill_(zero)
        weight.qweight = minfer.w4a16_pack(weight.codes)
        args, kwargs = weight.packed
        a = randn(5, 136, dtype=dtype)
        assert w4a16_mismatch(minfer.w4a16_gemm(a, *args, **kwargs), a, weight) is None, (dtype, code, zero)


# ---- streams and graphs --------------------------------------------------------------------------------------------------------


def test_other_stream():
    """Work is ordered on the current stream: a long kernel before it delays the activations."""
    weight = make_weight(512, 512, 128, "integer", torch.float16, DEVICE)
    args, kwargs = weight.packed
    a, perm = randn(64, 512), torch.randperm(512, device=DEVICE).int()
    expected = minfer.w4a16_gemm(a, *args, **kwargs), minfer.w4a16_gemm(a, *args, **kwargs, perm=perm)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(a)
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        outs = minfer.w4a16_gemm(late, *args, **kwargs), minfer.w4a16_gemm(late, *args, **kwargs, perm=perm)
    stream.synchronize()
    for out, want in zip(outs, expected, strict=True):
        assert torch.equal(out, want)


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 4096, 14336), (65, 328, 1032), (300, 1024, 2048)], ids=str)
def test_cuda_graph(shape):
    """Capture, then replay with other inputs; every replay has eager mode's bits."""
    m, n, k = shape
    weight, gated = (make_weight(rows, k, 128, "integer", torch.bfloat16, DEVICE) for rows in (n, 256))
    args, kwargs = weight.packed
    a, c, bias = randn(m, k, dtype=torch.bfloat16), randn(m, n, dtype=torch.bfloat16), randn(n, dtype=torch.float32)
    perm = torch.randperm(k, device=DEVICE).int()

    def step():
        y = minfer.w4a16_gemm(a, *args, **kwargs, c=c, bias=bias, activation="gelu")
        return y, minfer.w4a16_gemm(a, *args, **kwargs, perm=perm), minfer.w4a16_gemm_gated(a, *gated.packed[0], **gated.packed[1])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(4):
        for x in (a, c, bias):
            x.copy_(torch.randn_like(x))
        for y in captured:
            y.fill_(math.nan)
        graph.replay()
        graph.replay()
        for have, want in zip(captured, step(), strict=True):
            assert torch.equal(have, want)
    assert w4a16_mismatch(captured[0], a, weight, c=c, bias=bias, activation="gelu") is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")
def test_other_device():
    weight = make_weight(328, 1032, 64, "integer", torch.float16, "cuda:1")
    args, kwargs = weight.packed
    a = torch.randn(17, 1032, device="cuda:1").half()
    assert torch.cuda.current_device() == 0
    out = minfer.w4a16_gemm(a, *args, **kwargs)
    assert out.device == a.device and w4a16_mismatch(out, a, weight) is None


# ---- every kernel --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def forced_case(dtype, group_size, zeros, shape):
    m, n, k = shape
    torch.manual_seed(sum(shape))
    weight, a = make_weight(n, k, group_size, zeros, dtype, DEVICE), randn(m, k, dtype=dtype)
    return weight, a, w4a16_expected(a, weight)


FORCED_SHAPES = ((1, 328, 1032), (17, 4096, 1096), (200, 520, 4104), (1030, 2056, 520))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Values, the memory around D and equal bits in a second run, for every decomposition, group size and kind of zero."""
    kernel = KERNELS[name]
    dtype = DTYPE_OF[kernel["ab_type"]]
    groups = [g for g in GROUPS if g == -1 or g % kernel["group_multiple"] == 0]
    assert groups
    failures, number = [], 0
    for number, (shape, group_size, decomposition) in enumerate(itertools.product(FORCED_SHAPES, groups, DECOMPOSITIONS)):
        weight, a, expected = forced_case(dtype, group_size, ZEROS[number % 3], shape)
        args, kwargs = weight.packed
        override = f"{name}@decomposition={decomposition}"
        out, whole = padded((shape[0], shape[1]), dtype, DEVICE)
        minfer.w4a16_gemm(a, *args, **kwargs, kernel=override, out=out)
        problem = expected.mismatch(out)
        if problem is None and not untouched_outside(out, whole):
            problem = "wrote outside of D"
        if problem is None and not torch.equal(out, minfer.w4a16_gemm(a, *args, **kwargs, kernel=override)):
            problem = "two runs differ"
        if problem is not None:
            failures.append(f"{override} on {shape}, groups of {group_size}: {problem}")
    report(failures, number + 1)


@pytest.mark.parametrize("name", KERNELS)
def test_cold_runs_repeat(name):
    """Weights out of L2, several tiles to a CTA: stages fill late and one by one, and the warps that wait for them drift apart."""
    kernel = KERNELS[name]
    dtype, group = DTYPE_OF[kernel["ab_type"]], kernel["group_multiple"]
    m, n, k = min(25 * kernel["tile_n"], 1024), 520, 4096
    override = f"{name}@decomposition=split_k,splits=5"
    weight = make_weight(n, k, group, "integer", dtype, DEVICE)
    args, kwargs = weight.packed
    run = lambda: minfer.w4a16_gemm(a, *args, **kwargs, kernel=override)  # noqa: E731
    a = randn(m, k, dtype=dtype)
    truth = w4a16_expected(a, weight)
    flush = torch.empty(80 << 20, dtype=torch.uint8, device=DEVICE)
    first = run()
    assert truth.mismatch(first) is None
    for i in range(12):
        flush.fill_(i)
        out = run()
        assert torch.equal(out, first), (i, truth.mismatch(out))


@pytest.mark.parametrize("splits", (2, 3, 4))
@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel["arch"] == 90 and kernel["tile_n"] <= 32])
def test_partials_in_a_cluster(name, splits):
    """With few tiles, partials go through distributed shared memory; with many, through the workspace. The sums have the same bits."""
    kernel = KERNELS[name]
    dtype, tokens, k = DTYPE_OF[kernel["ab_type"]], kernel["tile_n"], 4104
    weight = make_weight(1032, k, kernel["group_multiple"], "integer", dtype, DEVICE)
    args, kwargs = weight.packed
    a, bias = randn(64 * tokens, k, dtype=dtype), randn(1032, dtype=dtype)
    kwargs |= dict(kernel=f"{name}@decomposition=split_k,splits={splits}", bias=bias, activation="relu")
    many = minfer.w4a16_gemm(a, *args, **kwargs)
    for first, last in ((0, tokens), (tokens, 2 * tokens), (0, 1)):
        few = minfer.w4a16_gemm(a[first:last], *args, **kwargs)
        assert w4a16_mismatch(few, a[first:last], weight, bias=bias, activation="relu") is None
        assert torch.equal(few, many[first:last]), (first, last)


def test_partials_in_a_cluster_in_graphs():
    """Replays of launches that overlap through programmatic dependent launch, each with a product that the next one reads."""
    weight = make_weight(2048, 2048, 128, "none", torch.float16, DEVICE)
    weight.scales.mul_(2048**-0.5)
    args, kwargs = weight.packed
    kernels = ("128x8x128_1x1x1_w2x2_acc", "64x8x256_1x1x1_w2k2x2_acc", "64x8x512_1x1x1_w4k4x1_acc", "128x32x256_1x1x1_w4k2x1_acc")
    for name, splits in itertools.product(kernels, (2, 3, 4)):
        override = f"w4a16_sm90_f16_int4_{name}@decomposition=split_k,splits={splits}"

        def chain(x, override=override):
            for _ in range(12):
                x = minfer.w4a16_gemm(x, *args, **kwargs, kernel=override)
                x = x / x.abs().amax()
            return x

        x = randn(5, 2048)
        wanted = chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
        for _ in range(20):
            graph.replay()
        assert torch.equal(out, wanted), (name, splits)


def test_arguments_of_empty_problems():
    """What cannot be right is refused where nothing would be computed, too."""
    weight = make_weight(64, 128, 64, "none", torch.float16, DEVICE)
    args, kwargs = weight.packed
    with pytest.raises(RuntimeError, match="activation"):
        minfer.w4a16_gemm(randn(0, 128), *args, **kwargs, activation="swish")
    a, empty, scales = randn(3, 0), torch.empty(1, 0, 512, dtype=torch.int32, device=DEVICE), randn(0, 64)
    assert minfer.w4a16_gemm(a, empty, scales, group_size=64, kernel="dequantize").eq(0).all()
    with pytest.raises(RuntimeError, match="kernel 'w4a16_sm91' is not in the registry"):
        minfer.w4a16_gemm(a, empty, scales, group_size=64, kernel="w4a16_sm91")
    with pytest.raises(RuntimeError, match="needs k > 0"):
        minfer.w4a16_gemm(a, empty, scales, group_size=64, kernel="w4a16_sm90_f16_int4_128x8x128_1x1x1_w2x2_fineacc")


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_epilogues(name):
    """C, bias, activation, perm and gated, with whole and with divided tiles."""
    dtype = DTYPE_OF[KERNELS[name]["ab_type"]]
    m, n, k = 136, 272, 1032
    weight = make_weight(n, k, 128, "integer", dtype, DEVICE)
    args, kwargs = weight.packed
    a, c, bias = randn(m, k, dtype=dtype), randn(m, n, dtype=dtype), randn(n, dtype=torch.float32)
    cases = (
        {"c": c, "bias": bias.to(dtype), "activation": "silu"},
        {"c": c.float(), "activation": "relu"},
        {"c": c[0], "bias": bias},
        {"c": c[:, :1], "activation": "gelu", "perm": torch.randperm(k, device=DEVICE).int()},
        {"c": c.t().contiguous().t(), "activation": "gelu_tanh"},
    )
    for decomposition in DECOMPOSITIONS:
        override = f"{name}@decomposition={decomposition}"
        for epilogue in cases:
            out, whole = padded((m, n), dtype, DEVICE)
            minfer.w4a16_gemm(a, *args, **kwargs, **epilogue, kernel=override, out=out)
            assert w4a16_mismatch(out, a, weight, **epilogue) is None, (override, list(epilogue))
            assert untouched_outside(out, whole), override
            wide = minfer.w4a16_gemm(a, *args, **kwargs, **epilogue, out_dtype=torch.float32, kernel=override)
            assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), out), (override, list(epilogue))
        out = minfer.w4a16_gemm_gated(a * k**-0.25, *args, **kwargs, bias=bias, kernel=override)
        assert w4a16_gated_mismatch(out, a * k**-0.25, weight, bias=bias) is None, override


def test_kernel_that_cannot_take_the_group():
    """A kernel for groups of 128 refuses groups of 32, in words."""
    names = [name for name, kernel in KERNELS.items() if kernel["group_multiple"] == 128]
    if not names:
        pytest.skip("no kernel of this build needs groups of 128")
    weight = make_weight(128, 256, 32, "none", DTYPE_OF[KERNELS[names[0]]["ab_type"]], DEVICE)
    args, kwargs = weight.packed
    with pytest.raises(RuntimeError, match="minfer::w4a16_gemm: .*group"):
        minfer.w4a16_gemm(randn(4, 256, dtype=weight.scales.dtype), *args, **kwargs, kernel=names[0])


# ---- registration and errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", ZEROS)
def test_opcheck(zeros):
    weight = make_weight(64, 128, 32, zeros, torch.float16, DEVICE)
    args, kwargs = weight.packed
    a, perm = randn(2, 3, 128), torch.randperm(128, device=DEVICE).int()
    for case in ({}, {"bias": randn(64), "activation": "silu"}, {"c": randn(2, 3, 64), "perm": perm}):
        check_op(torch.ops.minfer.w4a16_gemm.default, (a, *args), kwargs | case)
        check_op(torch.ops.minfer.w4a16_gemm.out, (a, *args), kwargs | case | {"out": torch.empty(2, 3, 64, device=DEVICE).half()})
    check_op(torch.ops.minfer.w4a16_gemm_gated.default, (a, *args), kwargs | {"bias": randn(64), "perm": perm})
    check_op(torch.ops.minfer.w4a16_dequantize.default, args, kwargs | {"n": 64, "k": 128})
    check_op(torch.ops.minfer.w4a16_pack.default, (weight.codes,), {})


def subject(message):
    """The argument that a message begins with; the compiled checks may put the rest in other words."""
    return message.split()[0]


@pytest.mark.parametrize("case", BAD_GEMM | BAD_GEMM_ONLY)
def test_bad_gemm(case):
    arguments, message = (BAD_GEMM | BAD_GEMM_ONLY)[case]
    with pytest.raises(RuntimeError, match="minfer::w4a16_gemm: " + subject(message)):
        minfer.w4a16_gemm(**bad_call(arguments, DEVICE))


@pytest.mark.parametrize("case", BAD_GEMM)
def test_bad_gated(case):
    arguments, message = BAD_GEMM[case]
    with pytest.raises(RuntimeError, match="minfer::w4a16_gemm_gated: " + subject(message)):
        minfer.w4a16_gemm_gated(**bad_call(arguments, DEVICE))


@pytest.mark.parametrize("case", BAD_DEQUANTIZE)
def test_bad_dequantize(case):
    arguments, message = BAD_DEQUANTIZE[case]
    call = {"n": 16, "k": 64} | bad_call(arguments, DEVICE)
    del call["a"]
    with pytest.raises(RuntimeError, match="minfer::w4a16_dequantize: " + subject(message)):
        minfer.w4a16_dequantize(**call)


@pytest.mark.parametrize("case", BAD_PACK)
def test_bad_pack(case):
    make, message = BAD_PACK[case]
    with pytest.raises(RuntimeError, match="minfer::w4a16_pack: " + subject(message)):
        minfer.w4a16_pack(make(lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=DEVICE)))


@pytest.mark.parametrize("name", BAD_PACK_FORMATS)
def test_bad_pack_format(name):
    codes = torch.zeros(16, 64, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(RuntimeError, match=f"minfer::w4a16_pack: w4_format must be one of int4, nf4, mxfp4, nvfp4, got '{name}'"):
        minfer.w4a16_pack(codes, w4_format=name)


def test_devices_must_agree():
    for name in ("qweight", "scales", "zeros", "perm", "c", "bias"):
        call = bad_call(lambda t: {"zeros": t(2, 16), "c": t(3, 16), "bias": t(16)}, DEVICE)
        call["perm"] = torch.arange(64, dtype=torch.int32, device=DEVICE)
        call[name] = call[name].cpu()
        with pytest.raises(RuntimeError, match=f"minfer::w4a16_gemm: {name} must be"):
            minfer.w4a16_gemm(**call)


# ---- above the operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantize_and_linear(symmetric):
    """Quantised on the GPU, run as a module; the CPU kernel of the same weight agrees to rounding."""
    linear = torch.nn.Linear(1024, 520, device=DEVICE, dtype=torch.bfloat16)
    module = minfer.nn.W4Linear.from_linear(linear, 128, symmetric)
    x = randn(2, 9, 1024, dtype=torch.bfloat16)
    out = module(x)
    weight = module.weight().to("cpu")
    truth = reference_w4a16.w4a16_gemm(x.cpu().double(), weight.qweight, weight.scales, weight.zeros, bias=weight.bias)
    assert (out.cpu().double() - truth).norm() / truth.norm() < 2.0**-7
    with torch.no_grad():
        original = linear(x).double()
    assert (out.double() - original).norm() / original.norm() < 0.15


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="requires Triton")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    """fullgraph, and with Inductor's CUDA graphs. What it fuses between the calls is exact here: the bits are eager mode's."""
    torch._dynamo.reset()
    first, second = (make_weight(n, 512, 128, "integer", torch.bfloat16, DEVICE) for n in (512, 1024))
    perm = torch.randperm(512, device=DEVICE).int()

    def layer(x, residual):
        y = minfer.w4a16_gemm(x.relu() / 64, *first.packed[0], **first.packed[1], c=residual, perm=perm, activation="silu")
        return minfer.w4a16_gemm_gated(y / 8, *second.packed[0], **second.packed[1])

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for m in (1, 16, 16, 16, 200):
            x, residual = randn(m, 512, dtype=torch.bfloat16), randn(m, 512, dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x, residual), layer(x, residual), rtol=0, atol=0)
