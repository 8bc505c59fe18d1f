"""nf4, mxfp4, nvfp4, int8 and fp8_e4m3 weights on a GPU: the planner's choice, then every compiled kernel of these formats by name.

Outputs lie in NaN-filled memory; the truth is float64 on the dequantised 16-bit weights, the yardstick torch's own 16-bit product of them.
"""

import functools
import importlib.util
import itertools
import math

import minfer
import pytest
import torch
from minfer.formats import weight_formats, weight_layout
from minfer.planning.plan import DTYPE_NAMES

from tests.contracts.test_registration import check_op
from tests.gemm.cases import (
    ACTIVATIONS,
    DTYPES,
    name_of,
    padded,
    untouched_outside,
)
from tests.quantized_gemm.weight_format_cases import (
    BAD_CALLS,
    BAD_PACK8,
    BITS,
    CASES,
    GROUPS,
    NEW,
    ZEROS,
    bad_call,
    expected,
    gated_mismatch,
    good_call,
    make_weight,
    mismatch,
    pack,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS = (0, 1, 3, 17, 64, 65, 300, 2050)
# n and k: aligned, tails in both (rows of byte scales out of 16-byte alignment), fewer than a tile, few rows, few columns
SIZES = ((256, 512), (328, 1032), (8, 8), (24, 4096), (2056, 72))
BYTE_SCALES = ("mxfp4", "nvfp4")
BOOKS = ("nf4", "mxfp4", "nvfp4")

KERNELS = {k["name"]: k for k in minfer.kernels("w4a16") if k["compiled"] and k["b_format"] in NEW}
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


def same_bits(x, y):
    """Equal, or NaN in both; the CPU's and the GPU's NaN may differ in sign."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


# ---- packing and dequantisation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (8, 8), (72, 136), (328, 1032), (2048, 4096), (0, 64), (64, 0)], ids=str)
def test_pack_8_bits_is_like_cpu(shape):
    codes = torch.randint(0, 256, shape).to(torch.uint8)
    packed = minfer.w8a16_pack(codes.cuda())
    assert packed.is_contiguous() and torch.equal(packed.cpu(), minfer.w8a16_pack(codes))
    assert torch.equal(weight_layout.unpack(packed, *shape).cpu(), codes)
    for own_type in (torch.int8, torch.float8_e4m3fn):
        assert torch.equal(minfer.w8a16_pack(codes.cuda().view(own_type)).cpu(), minfer.w8a16_pack(codes.view(own_type)))


def test_pack_8_bits_of_views():
    base = torch.randint(0, 256, (300, 300)).to(torch.uint8)
    on_gpu = base.cuda()
    slices = (lambda x: x[:128, :192].t(), lambda x: x[3:131:2, 5:133], lambda x: x[:64, :256:2], lambda x: x[:1, :64].expand(64, 64))
    for view in slices:
        assert torch.equal(minfer.w8a16_pack(view(on_gpu)).cpu(), minfer.w8a16_pack(view(base)))


@pytest.mark.parametrize("name", BOOKS)
@pytest.mark.parametrize("shape", [(64, 64), (8, 8), (72, 136), (328, 1032), (2048, 4096), (0, 64), (64, 0)], ids=str)
def test_pack_code_books_is_like_cpu(shape, name):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = minfer.w4a16_pack(codes.cuda(), w4_format=name)
    assert packed.is_contiguous() and torch.equal(packed.cpu(), minfer.w4a16_pack(codes, w4_format=name))
    assert torch.equal(weight_layout.unpack(packed, *shape, weight_formats.FORMATS[name].order).cpu(), codes)


def test_pack_code_books_of_views_and_high_bits():
    base = torch.randint(0, 256, (300, 300)).to(torch.uint8)
    on_gpu = base.cuda()
    slices = (lambda x: x[:128, :192].t(), lambda x: x[3:131:2, 5:133], lambda x: x[:64, :256:2], lambda x: x[:1, :64].expand(64, 64))
    for view in slices:
        packed = minfer.w4a16_pack(view(on_gpu), w4_format="nf4")
        assert torch.equal(packed.cpu(), minfer.w4a16_pack(view(base) & 15, w4_format="nf4"))


@pytest.mark.parametrize("name, group_size", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dequantize_is_like_cpu(dtype, name, group_size):
    for (n, k), zeros in itertools.product((*SIZES, (1024, 2048)), ZEROS.get(name, ("none",))):
        weight = make_weight(name, n, k, group_size, zeros, dtype)
        out_dtype = {"out_dtype": dtype} if name in BYTE_SCALES else {}
        for alpha in (1.0, 0.3):
            weight.alpha = alpha
            poison((n, k), dtype)
            w = weight.to(DEVICE).dequantize(**out_dtype)
            assert w.dtype == dtype and w.is_contiguous() and torch.equal(w.cpu(), weight.dequantize(**out_dtype)), (n, k, zeros, alpha)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", BYTE_SCALES)
def test_every_scale_byte(name, dtype):
    """Subnormals, infinities and NaN included."""
    weight = make_weight(name, 256, 64, GROUPS[name][0])
    weight.alpha = 1.0
    weight.scales = torch.arange(256, dtype=torch.uint8).expand(weight.scales.shape).contiguous()
    assert same_bits(weight.to(DEVICE).dequantize(out_dtype=dtype).cpu(), weight.dequantize(out_dtype=dtype))
    assert weight.to(DEVICE).dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_fp8_code(dtype):
    weight = make_weight("fp8_e4m3", 64, 256, -1, dtype=dtype)
    weight.codes = torch.arange(256, dtype=torch.uint8).expand(64, 256).contiguous()
    weight.qweight = minfer.w8a16_pack(weight.codes)
    assert same_bits(weight.to(DEVICE).dequantize().cpu(), weight.dequantize())


# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, group_size", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sweep(dtype, name, group_size):
    """Every m with every (n, k); D inside NaN-filled memory; a second run gives the same bits."""
    failures, number, kinds = [], 0, ZEROS.get(name, ("none",))
    for n, k in SIZES:
        for m in ROWS:
            zeros = kinds[number % len(kinds)]
            weight = make_weight(name, n, k, group_size, zeros, dtype, DEVICE)
            a = randn(m, k, dtype=dtype) * (1.0, 2.0**-6, 4.0)[number % 3]
            out, whole = padded((m, n), dtype, DEVICE)
            weight.gemm(a, out=out)
            problem = mismatch(out, a, weight)
            if problem is None and not untouched_outside(out, whole):
                problem = "wrote outside of D"
            poison((m, n), dtype)
            first = weight.gemm(a)
            problem = problem or mismatch(first, a, weight)
            if problem is None and not torch.equal(weight.gemm(a), first):
                problem = "two runs differ"
            if problem is not None:
                failures.append(f"{m} x {n} x {k}, zeros {zeros}: {problem}")
            number += 1
    report(failures, number)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_epilogues_and_perm(dtype, name):
    """Every activation with kinds of C and bias in turn, with and without a gather, an alpha, and the weight written out first."""
    failures, number, kinds = [], 0, ZEROS.get(name, ("none",))
    c_makers = (
        lambda m, n: randn(m, n, dtype=dtype),
        lambda m, n: None,
        lambda m, n: randn(m, n, dtype=torch.float32),
        lambda m, n: randn(n, dtype=dtype),
        lambda m, n: randn(m, 1, dtype=dtype),
        lambda m, n: randn(n, m, dtype=dtype).t(),
    )
    for (n, k), m in itertools.product(((256, 512), (328, 1032)), (1, 17, 130, 300)):
        for group_size in GROUPS[name]:
            weight = make_weight(name, n, k, group_size, kinds[number % len(kinds)], dtype, DEVICE)
            weight.alpha *= (1.0, -0.37, 2.5)[number % 3]
            a = randn(m, k, dtype=dtype)
            epilogue = {
                "activation": ACTIVATIONS[number % len(ACTIVATIONS)],
                "c": c_makers[number % 6](m, n),
                "bias": (None, randn(n, dtype=dtype), randn(n, dtype=torch.float32))[number % 3],
                "perm": torch.randperm(k, device=DEVICE).int() if number % 2 else None,
            }
            for kernel in (None, "dequantize"):
                aligned = number % 4 > 0
                out, whole = padded((m, n), dtype, DEVICE, left=8 if aligned else 3, right=8 if aligned else 2)
                weight.gemm(a, **epilogue, kernel=kernel, out=out)
                problem = mismatch(out, a, weight, **epilogue)
                if problem is None and not untouched_outside(out, whole):
                    problem = "wrote outside of D"
                if problem is not None:
                    kind = {key: tuple(v.shape) if isinstance(v, torch.Tensor) else v for key, v in epilogue.items()}
                    failures.append(f"{m} x {n} x {k}, groups of {group_size}, kernel {kernel}, {kind}: {problem}")
            number += 1
    report(failures, 2 * number)


@pytest.mark.parametrize("kernel", (None, "dequantize"))
def test_small_alpha(kernel):
    """A global scale that takes the weights themselves below fp16's range, but not the products."""
    weight = make_weight("nvfp4", 256, 512, 16, dtype=torch.float16, device=DEVICE)
    a = randn(20, 512, dtype=torch.float16)
    plain = mismatch(weight.gemm(a, kernel=kernel), a, weight)
    weight.alpha *= 2.0**-18
    shrunk = weight.gemm(a * 64, kernel=kernel)
    assert plain is None and mismatch(shrunk, a * 64, weight) is None and shrunk.count_nonzero() > 0.9 * shrunk.numel()


@pytest.mark.parametrize("name, group_size", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gated_sweep(dtype, name, group_size):
    failures, number, kinds = [], 0, ZEROS.get(name, ("none",))
    for (half, k), m in itertools.product(((24, 64), (264, 520), (1000, 136)), (0, 1, 17, 65, 300, 2050)):
        weight = make_weight(name, 2 * half, k, group_size, kinds[number % len(kinds)], dtype, DEVICE)
        weight.alpha *= (1.0, 0.6)[number % 2]
        a = randn(m, k, dtype=dtype) * k**-0.25
        bias = (None, randn(2 * half, dtype=torch.float32), randn(2 * half, dtype=dtype))[number % 3]
        arguments = {"bias": bias, "activation": ACTIVATIONS[number % len(ACTIVATIONS)]}
        poison((m, half), dtype)
        out = weight.gemm_gated(a, **arguments)
        problem = gated_mismatch(out, a, weight, **arguments)
        if problem is None and not torch.equal(out, weight.gemm_gated(a, **arguments)):
            problem = "two runs differ"
        problem = problem or gated_mismatch(weight.gemm_gated(a, **arguments, kernel="dequantize"), a, weight, **arguments)
        if problem is not None:
            failures.append(f"{m} x 2*{half} x {k} {arguments['activation']} bias {None if bias is None else bias.dtype}: {problem}")
        number += 1
    report(failures, number)


@pytest.mark.parametrize("name", NEW)
def test_large(name):
    """A language model's layer, decode and prefill."""
    weight = make_weight(name, 4096, 4096, GROUPS[name][-1], "none", torch.bfloat16, DEVICE)
    for m in (1, 16, 256, 4096):
        a = randn(m, 4096, dtype=torch.bfloat16)
        assert mismatch(weight.gemm(a), a, weight) is None, m
        assert mismatch(weight.gemm(a, kernel="dequantize"), a, weight) is None, m


@pytest.mark.parametrize("name", NEW)
def test_nothing_to_multiply(name):
    """Without k only the epilogue is left, without alpha too."""
    weight = make_weight(name, 16, 64, GROUPS[name][0], device=DEVICE)
    a, bias = randn(3, 64), randn(16)
    weight.alpha = 0.0
    assert torch.equal(weight.gemm(a, bias=bias, activation="relu"), torch.relu(bias).expand(3, 16))
    scales = weight.scales[: 1 if GROUPS[name][0] == -1 else 0]
    keywords = {"group_size": GROUPS[name][0], f"w{BITS[name]}_format": name}
    qweight = torch.empty(1, 0, 128 * BITS[name], dtype=torch.int32, device=DEVICE)
    assert torch.equal(weight.op("gemm")(a[:, :0], qweight, scales, **keywords, bias=bias), bias.expand(3, 16))


@pytest.mark.parametrize("name", NEW)
def test_leading_dimensions_and_views(name):
    weight = make_weight(name, 328, 1032, GROUPS[name][0], dtype=torch.bfloat16, device=DEVICE)
    a = randn(2, 3, 5, 1032, dtype=torch.bfloat16)
    assert torch.equal(weight.gemm(a), weight.gemm(a.view(30, 1032)).view(2, 3, 5, 328))
    assert weight.gemm(a[:0]).shape == (0, 3, 5, 328)
    assert torch.equal(weight.gemm(a[0, 0, 0]), weight.gemm(a[0, 0, :1])[0])
    base = randn(64, 2100, dtype=torch.bfloat16)
    for view in (base[:32, 5:1037], base[::2, 8:1040], base[:, : 2 * 1032 : 2], base[4:5, :1032].expand(64, 1032)):
        assert mismatch(weight.gemm(view), view, weight) is None
    expected_bits = weight.gemm(base[:, :1032])
    plain = weight.scales
    whole = torch.zeros(plain.shape[0], 2 * plain.shape[1] + 3, dtype=plain.dtype, device=DEVICE)
    for scales in (whole[:, 3 : 3 + plain.shape[1]].copy_(plain), plain.t().contiguous().t()):
        weight.scales = scales
        assert torch.equal(weight.gemm(base[:, :1032]), expected_bits)


@pytest.mark.parametrize("name", BYTE_SCALES)
def test_scales_in_their_own_type(name):
    weight = make_weight(name, 336, 1032, GROUPS[name][0], device=DEVICE)
    a = randn(17, 1032)
    plain = weight.gemm(a), weight.gemm_gated(a), weight.dequantize()
    weight.scales = weight.scales.view({"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}[name])
    for have, want in zip((weight.gemm(a), weight.gemm_gated(a), weight.dequantize()), plain, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_nan_scale_reaches_its_column_only(dtype):
    """E8M0's 255, which the kernels may take for infinity."""
    for m in (3, 70, 300):
        weight = make_weight("mxfp4", 136, 520, 32, dtype=dtype, device=DEVICE)
        weight.scales[5, 11] = 255
        columns = ~weight.gemm(randn(m, 520, dtype=dtype)).isfinite()
        assert columns[:, 11].all() and int(columns.sum()) == m, m


@pytest.mark.parametrize("name", NEW)
def test_nan_reaches_its_row_only(name):
    weight = make_weight(name, 328, 1032, GROUPS[name][0], device=DEVICE)
    for m in (3, 70):
        a = randn(m, 1032)
        a[1, 3] = math.nan
        rows = weight.gemm(a, activation="silu").isnan()
        assert rows[1].all() and int(rows.sum()) == 328


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_one_code_everywhere(dtype, name):
    """Every code alone: a wrong entry of a table hides behind no other."""
    codes = [c for c in range(2 ** BITS[name]) if name != "fp8_e4m3" or c & 127 != 127]
    weight = make_weight(name, 8 * len(codes), 72, GROUPS[name][0], dtype=dtype, device=DEVICE)
    weight.codes = torch.tensor(codes, dtype=torch.uint8, device=DEVICE).repeat_interleave(8)[:, None].expand(-1, 72).contiguous()
    weight.qweight = pack(name, weight.codes)
    eye = torch.eye(72, device=DEVICE, dtype=dtype)
    weight.alpha = 1.0
    w = weight.gemm(eye).t().double()
    exact = weight.dense(torch.float64)
    unit = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).smallest_normal * 2 * unit
    assert ((w - exact).abs() <= 2.02 * unit * exact.abs() + tiny).all()  # two roundings: of the value or the weight, and of D


# ---- streams and graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_other_stream(name):
    """Work is ordered on the current stream: a long kernel before it delays the activations."""
    weight = make_weight(name, 512, 512, GROUPS[name][0], device=DEVICE)
    a, perm = randn(64, 512), torch.randperm(512, device=DEVICE).int()
    wanted = [weight.gemm(a), weight.gemm(a, perm=perm), weight.gemm(a, kernel="dequantize")]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(a)
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        outs = [weight.gemm(late), weight.gemm(late, perm=perm), weight.gemm(late, kernel="dequantize")]
    stream.synchronize()
    for out, want in zip(outs, wanted, strict=True):
        assert torch.equal(out, want)


@pytest.mark.parametrize("m", [1, 65, 2050])
@pytest.mark.parametrize("name", NEW)
def test_cuda_graph(name, m):
    """Capture, then replay with other inputs; every replay has eager mode's bits."""
    n, k = 328, 1032
    weight, gated = (make_weight(name, rows, k, GROUPS[name][0], dtype=torch.bfloat16, device=DEVICE) for rows in (n, 256))
    a, c, bias = randn(m, k, dtype=torch.bfloat16), randn(m, n, dtype=torch.bfloat16), randn(n, dtype=torch.float32)
    perm = torch.randperm(k, device=DEVICE).int()

    def step():
        y = weight.gemm(a, c=c, bias=bias, activation="gelu")
        return y, weight.gemm(a, perm=perm), gated.gemm_gated(a), weight.gemm(a, kernel="dequantize")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        for x in (a, c, bias):
            x.copy_(torch.randn_like(x))
        for y in captured:
            y.fill_(math.nan)
        graph.replay()
        graph.replay()
        for have, want in zip(captured, step(), strict=True):
            assert torch.equal(have, want)
    assert mismatch(captured[0], a, weight, c=c, bias=bias, activation="gelu") is None


# ---- every kernel --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def forced_case(name, dtype, group_size, zeros, shape):
    m, n, k = shape
    torch.manual_seed(sum(shape))
    weight, a = make_weight(name, n, k, group_size, zeros, dtype, DEVICE), randn(m, k, dtype=dtype)
    return weight, a, expected(a, weight)


FORCED_SHAPES = ((1, 328, 1032), (17, 1032, 520), (200, 264, 1096), (530, 520, 520))


def groups_of(kernel):
    return [g for g in GROUPS[kernel["b_format"]] if g == -1 or g % kernel["group_multiple"] == 0]


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_kernels(kernel_name):
    """Values, the memory around D and equal bits in a second run, for every decomposition, group size and kind of zero."""
    kernel = KERNELS[kernel_name]
    name, dtype = kernel["b_format"], DTYPE_OF[kernel["ab_type"]]
    kinds, groups = ZEROS.get(name, ("none",)), groups_of(kernel)
    assert groups
    failures, number = [], 0
    for number, (shape, group_size, decomposition) in enumerate(itertools.product(FORCED_SHAPES, groups, DECOMPOSITIONS)):
        weight, a, truth = forced_case(name, dtype, group_size, kinds[number % len(kinds)], shape)
        override = f"{kernel_name}@decomposition={decomposition}"
        out, whole = padded((shape[0], shape[1]), dtype, DEVICE)
        weight.gemm(a, kernel=override, out=out)
        problem = truth.mismatch(out)
        if problem is None and not untouched_outside(out, whole):
            problem = "wrote outside of D"
        if problem is None and not torch.equal(out, weight.gemm(a, kernel=override)):
            problem = "two runs differ"
        if problem is not None:
            failures.append(f"{override} on {shape}, groups of {group_size}: {problem}")
    report(failures, number + 1)


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_cold_runs_repeat(kernel_name):
    """Weights out of L2, several tiles to a CTA: stages fill late and one by one, and the warps that wait for them drift apart."""
    kernel = KERNELS[kernel_name]
    dtype, group = DTYPE_OF[kernel["ab_type"]], kernel["group_multiple"]
    m, n, k = min(25 * kernel["tile_n"], 1024), 520, 4096
    override = f"{kernel_name}@decomposition=split_k,splits=5"
    weight = make_weight(kernel["b_format"], n, k, group, ZEROS.get(kernel["b_format"], ("none",))[-1], dtype, DEVICE)
    run = lambda: weight.gemm(a, kernel=override)  # noqa: E731
    a = randn(m, k, dtype=dtype)
    truth = expected(a, weight)
    flush = torch.empty(80 << 20, dtype=torch.uint8, device=DEVICE)
    first = run()
    assert truth.mismatch(first) is None
    for i in range(12):
        flush.fill_(i)
        out = run()
        assert torch.equal(out, first), (i, truth.mismatch(out))


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_kernel_epilogues(kernel_name):
    """C, bias, activation, alpha, perm and gated, with whole and with divided tiles."""
    kernel = KERNELS[kernel_name]
    name, dtype = kernel["b_format"], DTYPE_OF[kernel["ab_type"]]
    m, n, k = 136, 272, 520
    weight = make_weight(name, n, k, groups_of(kernel)[0], ZEROS.get(name, ("none",))[-1], dtype, DEVICE)
    weight.alpha *= 0.6
    a, c, bias = randn(m, k, dtype=dtype), randn(m, n, dtype=dtype), randn(n, dtype=torch.float32)
    cases = (
        {"c": c, "bias": bias.to(dtype), "activation": "silu"},
        {"c": c[:, :1], "bias": bias, "activation": "gelu", "perm": torch.randperm(k, device=DEVICE).int()},
    )
    for decomposition in DECOMPOSITIONS:
        override = f"{kernel_name}@decomposition={decomposition}"
        for epilogue in cases:
            out, whole = padded((m, n), dtype, DEVICE)
            weight.gemm(a, **epilogue, kernel=override, out=out)
            assert mismatch(out, a, weight, **epilogue) is None, (override, list(epilogue))
            assert untouched_outside(out, whole), override
            wide = weight.gemm(a, **epilogue, out_dtype=torch.float32, kernel=override)
            assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), out), (override, list(epilogue))
        scaled = a * k**-0.25
        out = weight.gemm_gated(scaled, bias=bias, kernel=override)
        assert gated_mismatch(out, scaled, weight, bias=bias) is None, override


def test_kernel_of_another_format():
    """Refused in words."""
    kernels = [k for k in minfer.kernels("w4a16") if k["compiled"] and k["ab_type"] == "f16"]
    for kernel in kernels[:1]:
        other = next(name for name in NEW if name != kernel["b_format"])
        weight = make_weight(other, 128, 256, GROUPS[other][0], device=DEVICE)
        with pytest.raises(RuntimeError, match=f"minfer::w{BITS[other]}a16_gemm: .*format"):
            weight.gemm(randn(4, 256), kernel=kernel["name"])


# ---- registration and errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_opcheck(name):
    weight = make_weight(name, 64, 128, GROUPS[name][0], ZEROS.get(name, ("none",))[-1], device=DEVICE)
    args, kwargs = weight.packed
    gemm, gated, dequantize, packer = (
        getattr(torch.ops.minfer, f"w{BITS[name]}a16_{op}") for op in ("gemm", "gemm_gated", "dequantize", "pack")
    )
    a, perm = randn(2, 3, 128), torch.randperm(128, device=DEVICE).int()
    for case in ({"bias": randn(64), "activation": "silu"}, {"c": randn(2, 3, 64), "perm": perm}):
        check_op(gemm.default, (a, *args), kwargs | case)
        check_op(gemm.out, (a, *args), kwargs | case | {"out": torch.empty(2, 3, 64, device=DEVICE).half()})
    check_op(gated.default, (a, *args), kwargs | {"bias": randn(64), "perm": perm})
    check_op(dequantize.default, args, kwargs | {"n": 64, "k": 128})
    check_op(packer.default, (weight.codes,), {"w4_format": name} if BITS[name] == 4 else {})


def subject(message):
    """The argument that a message begins with; the compiled checks may put the rest in other words."""
    return message.split()[0]


@pytest.mark.parametrize("case, op", BAD_CALLS)
def test_bad_calls(case, op):
    call, start, arguments, message = bad_call(case, op, DEVICE)
    with pytest.raises(RuntimeError, match=start + subject(message)):
        call(**arguments)


@pytest.mark.parametrize("case", BAD_PACK8)
def test_bad_pack(case):
    make, message = BAD_PACK8[case]
    with pytest.raises(RuntimeError, match="minfer::w8a16_pack: " + subject(message)):
        minfer.w8a16_pack(make(lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=DEVICE)))


@pytest.mark.parametrize("argument", ["qweight", "scales", "zeros", "perm", "c", "bias"])
def test_devices_must_agree(argument):
    call, t = good_call("int8", "gemm", DEVICE)
    call |= {"zeros": t(2, 16), "c": t(3, 16), "bias": t(16), "perm": torch.arange(64, dtype=torch.int32, device=DEVICE)}
    minfer.w8a16_gemm(**call)
    call[argument] = call[argument].cpu()
    with pytest.raises(RuntimeError, match=f"minfer::w8a16_gemm: {argument} must be"):
        minfer.w8a16_gemm(**call)


# ---- above the operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_quantize_and_linear(name):
    """Quantised on the GPU as on the CPU, run as a module; near the original layer."""
    linear = torch.nn.Linear(1024, 520, device=DEVICE, dtype=torch.bfloat16)
    module = (minfer.nn.W4Linear if BITS[name] == 4 else minfer.nn.W8Linear).from_linear(linear, format=name)
    x = randn(2, 9, 1024, dtype=torch.bfloat16)
    out, weight = module(x), module.weight()
    dense = torch.nn.functional.linear(x.double(), weight.dequantize().double(), linear.bias.double())
    assert (out.double() - dense).norm() / dense.norm() < 2.0**-7
    with torch.no_grad():
        original = linear(x).double()
    assert (out.double() - original).norm() / original.norm() < 0.16
    with_cpu = type(module).from_linear(linear.cpu(), format=name).weight().dequantize().double()
    difference = (weight.dequantize().cpu().double() - with_cpu).norm() / with_cpu.norm()
    assert difference < 0.02, "sums in another order may choose another of two scales that are equally good"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="requires Triton")
@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3"])
def test_compile(name):
    """fullgraph, with Inductor's CUDA graphs."""
    torch._dynamo.reset()
    first, second = (make_weight(name, n, 512, GROUPS[name][0], dtype=torch.bfloat16, device=DEVICE) for n in (512, 1024))
    perm = torch.randperm(512, device=DEVICE).int()

    def layer(x, residual):
        y = first.gemm(x.relu() / 64, c=residual, perm=perm, activation="silu")
        return second.gemm_gated(y / 8)

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for m in (1, 16, 16, 16, 200):
            x, residual = randn(m, 512, dtype=torch.bfloat16), randn(m, 512, dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x, residual), layer(x, residual), rtol=2e-2, atol=2e-2)
