"""The operators between the GEMMs on a GPU against float64.

Outputs lie in memory that held NaN before; every call is repeated and has to give the same bits.
"""

import functools
import math
import re

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES, runs_here

from tests.contracts import numerics_cases as numerics
from tests.contracts.test_registration import check_op
from tests.fused.cases import (
    BAD,
    BAD_CASES,
    BAD_HADAMARD,
    CASES,
    EPS,
    HADAMARD_BLOCKS,
    HALVES,
    QUANTIZED,
    QUANTS,
    ROWS,
    SCALES,
    bad_call,
    check_hadamard,
    check_stored,
    function,
    given_scale,
    good_call,
    views_of,
    widths_of,
)
from tests.fuzz.modes import poison_free_memory
from tests.gemm.cases import name_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LARGEST = 1 << 24  # elements of x
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
KERNELS = {k["name"]: k for k in minfer.kernels("fused") if k["compiled"] or not runs_here()}
# Threads of a row: parts of a warp, warps, all; clusters; parts of a row that is not reduced. What a kernel cannot is refused.
LAUNCHES = (
    "",
    "@threads=1,rows=128",
    "@threads=8,rows=16",
    "@threads=16,rows=2",
    "@threads=32",
    "@threads=32,rows=16",
    "@threads=64",
    "@threads=64,rows=4",
    "@threads=96",
    "@threads=512",
    "@threads=64,cluster=2",
    "@threads=128,cluster=4",
    "@threads=96,cluster=8",
    "@threads=64,parts=2",
    "@threads=16,rows=8,parts=5",
    "@threads=128,parts=9",
    "@threads=128,rows=2,parts=3",
)
NAMES_IN_CPP = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "int8": "Char", "float8_e4m3fn": "Float8_e4m3fn"}
REFUSED = re.compile("cannot be launched with")


def bits(x):
    """Of all elements, in order."""
    x = x.contiguous()
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def same(a, b) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def poison() -> None:
    """What is allocated next held NaN."""
    poison_free_memory(torch.device(DEVICE, torch.cuda.current_device()))


def problems(case, dtype):
    """x and factors of many shapes."""
    for i, width in enumerate(widths_of(case, LARGEST)):
        for rows in ROWS:
            if rows * width * case.columns <= LARGEST:
                yield (f"{rows} rows of {width}", *case.make(rows, width, dtype, DEVICE, SCALES[i % len(SCALES)]))


def cases_of(table):
    return [pytest.param(case, dtype, id=f"{name}-{name_of(dtype)}") for name, case in table.items() for dtype in case.dtypes()]


# ---- values --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, dtype", cases_of(CASES))
def test_rows(case, dtype):
    for what, x, factors in problems(case, dtype):
        before = x.clone()
        poison()
        out = case.call(x, factors)
        check_stored(case, x, factors, out, what)
        assert same(case.call(x, factors), out) and same(x, before), what


@pytest.mark.parametrize("width", (48, 1000, 8192))
@pytest.mark.parametrize("case, dtype", cases_of(CASES))
def test_views_and_out(case, dtype, width):
    """Any view gives the same bits, and so does any out, x itself among them where it may be; nothing beside out is written."""
    x, factors = case.make(129, width, dtype, DEVICE)
    want = case.call(x, factors)
    for what, view in views_of(x):
        assert same(case.call(view, factors).reshape(want.shape), want), what
    for what, out in views_of(torch.full_like(want, math.nan)):
        whole = out.as_strided((out.untyped_storage().nbytes() // out.element_size(),), (1,), 0)
        result = case.call(x.view(*out.shape[:-1], -1), factors, out=out)
        assert result is out and same(out.reshape(want.shape), want), what
        assert int(whole.isnan().sum()) - int(out.isnan().sum()) == whole.numel() - out.numel(), what
        assert same(case.call(x, factors, out=torch.full_like(want, math.nan)), want)
    moved = {name: torch.cat([y[:1], y])[1:] for name, y in factors.items()}  # factors at odd addresses
    assert same(case.call(x, moved), want)
    if case.columns == 1:
        assert case.call(x, factors, out=x) is x and same(x, want)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("case, dtype", cases_of(QUANTIZED))
def test_quantized(case, dtype, quant):
    scale = given_scale(quant, DEVICE)
    for what, x, factors in problems(case, dtype):
        poison()
        q, scales = case.quantized(x, factors, quant=quant, **scale)
        numerics.check_codes(q, scales, case.exact(x, factors), quant, f"{case.name}, {what}", **scale)
        again, again_scales = case.quantized(x, factors, quant=quant, **scale)
        assert same(q, again) and same(scales, again_scales), what


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("case, dtype", cases_of(QUANTIZED))
def test_views_quantized(case, dtype, quant):
    x, factors = case.make(129, 264, dtype, DEVICE)
    scale = given_scale(quant, DEVICE)
    q, scales = case.quantized(x, factors, quant=quant, **scale)
    for what, view in views_of(x):
        view_q, view_scales = case.quantized(view, factors, quant=quant, **scale)
        assert same(view_q.reshape(q.shape), q) and same(view_scales.reshape(scales.shape), scales), what


@pytest.mark.parametrize("quant", (None, *QUANTS))
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_add_rms_norm(dtype, quant):
    """The sum is rounded and stored, and the norm, of 8 and of 16 bits, is that of the rounded sum: to the bit as of rms_norm."""
    for rows, width in ((0, 8), (1, 7), (129, 896), (3, 50257), (129, 5120), (3, 262144)):
        x, residual = (torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(2))
        weight = torch.randn(width, device=DEVICE).to(dtype)
        total = numerics.rounded(x.double() + residual.double(), dtype).to(dtype)
        for what, view in list(views_of(residual.clone())):
            own = x.view(view.shape)
            whole = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
            gaps = int(whole.isnan().sum())
            if quant is None:
                y = minfer.add_rms_norm(own, view, weight, weight_offset=1.0)
                assert same(y.reshape(total.shape), minfer.rms_norm(total, weight, weight_offset=1.0)), what
            else:
                options = given_scale(quant, DEVICE) | {"quant": quant, "weight_offset": 1.0}
                norm = torch.full_like(own, math.nan)
                q, scales = minfer.add_rms_norm(own, view, weight, norm=norm, **options)
                want, want_scales = minfer.rms_norm(total, weight, **options)
                assert same(q.reshape(total.shape), want) and same(scales.reshape(want_scales.shape), want_scales), what
                assert same(norm.reshape(total.shape), minfer.rms_norm(total, weight, weight_offset=1.0)), what
            assert same(view.reshape(total.shape), total) and int(whole.isnan().sum()) == gaps, what


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=name_of)
def test_dequantize(dtype, quant):
    scale = given_scale(quant, DEVICE)
    for shape in ((0, 8), (3, 200), (2, 5, 128), (7,), (1, 1), (129, 1000), (3, 50257)):
        q, scales = minfer.ops.quantize(torch.randn(shape, device=DEVICE).half(), quant, **scale)
        scales = scale.get("scale", scales)
        poison()
        y = minfer.dequantize(q, scales, quant, dtype=dtype)
        columns = scales if quant != "fp8_block128" else scales.repeat_interleave(128, 1)[:, : shape[-1]].reshape(shape)
        exact = q.float().double() * columns.double()
        numerics.judge(y, *numerics.stored((exact, 2.0**-24 * exact.abs()), dtype), f"{quant} of {shape}")
        moved = torch.empty(q.numel() + 3, dtype=torch.uint8, device=DEVICE)[3:].view(q.dtype).view(q.shape)
        moved.view(torch.uint8).copy_(q.view(torch.uint8))
        assert same(minfer.dequantize(moved, scales, quant, dtype=dtype), y)
        if quant == "fp8_block128":
            assert same(minfer.dequantize(q, scales.contiguous(), quant, dtype=dtype), y)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_rope(dtype, interleaved):
    """In place, in views of a fused qkv; what lies beyond rotary_dim or outside of the heads keeps its bits."""
    sizes = ((0, 2, 1, 16, 16), (1, 1, 1, 2, 2), (7, 4, 2, 64, 64), (129, 5, 1, 96, 32), (3, 2, 0, 18, 10), (70, 32, 8, 128, 128))
    for tokens, heads, heads_kv, head_dim, rotated in (*sizes, (600, 64, 8, 128, 64), (1, 128, 8, 256, 256), (5, 3, 1, 512, 512)):
        table = minfer.rope_cache(10000.0, rotated, 4096, device=DEVICE)
        for shift in (0, 1):  # elements behind a multiple of 16 bytes
            memory = torch.randn(tokens * (heads + 2 * heads_kv) * head_dim + shift, device=DEVICE).to(dtype)
            qkv = memory[shift:].view(tokens, heads + 2 * heads_kv, head_dim)
            before = qkv.clone()
            q, k = qkv[:, :heads], qkv[:, heads : heads + heads_kv] if heads_kv else None
            for kind in (torch.int64, torch.int32):
                positions = torch.randint(0, 4096, (tokens,), device=DEVICE).to(kind)
                qkv.copy_(before)
                minfer.rope(q, k, table, positions, interleaved=interleaved)
                for have, old in ((q, before[:, :heads]), (k, before[:, heads : heads + heads_kv])):
                    if have is not None:
                        rows = numerics.rope_rows(old, table, positions, interleaved)
                        numerics.judge(have, *numerics.stored(rows, dtype), f"{tokens} tokens, {head_dim}")
                        assert same(have[..., rotated:], old[..., rotated:])
                assert same(qkv[:, heads + heads_kv :], before[:, heads + heads_kv :])
                once = qkv.clone()
                qkv.copy_(before)
                minfer.rope(q, k, table, positions, interleaved=interleaved)
                assert same(qkv, once)


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=name_of)
def test_embedding(dtype):
    for width in (1, 7, 8, 896, 5120, 16384):
        weight = torch.randn(300, width, device=DEVICE).to(dtype)
        wide = torch.full((300, width + 9), math.nan, device=DEVICE).to(dtype)
        wide[:, 3 : 3 + width] = weight
        for shape in ((), (0,), (129,), (2, 3)):
            for kind in (torch.int64, torch.int32):
                ids = torch.randint(0, 300, shape, device=DEVICE).to(kind)
                want = weight[ids.long()]
                poison()
                for table in (weight, wide[:, 3 : 3 + width], weight.t().contiguous().t()):
                    assert same(minfer.embedding(ids, table), want)
                exact = want.double() * numerics.single(math.sqrt(width))
                rows = numerics.stored((exact, 2.0**-24 * exact.abs()), dtype)
                numerics.judge(minfer.embedding(ids, weight, scale=math.sqrt(width)), *rows, f"scaled, {width}")
                for out in (
                    torch.full((*shape, 2 * width), math.nan, device=DEVICE).to(dtype)[..., ::2],
                    wide[:1, :width].expand(1, width),
                ):
                    if out.shape == want.shape:
                        assert minfer.embedding(ids, weight, out=out) is out and same(out, want)


def test_indices_that_lead_outside():
    """Zeros, and nothing is read or written for them."""
    weight, table = torch.randn(8, 40, device=DEVICE).half(), torch.randn(8, 16, device=DEVICE)
    for value in (-1, 8, 2**31, 2**40, -(2**62)):
        ids = torch.tensor([0, value, 7], device=DEVICE)
        out = minfer.embedding(ids, weight, scale=2.0)
        assert same(out[[0, 2]], (weight[[0, 7]] * 2)) and out[1].eq(0).all()
        q = torch.randn(3, 2, 24, device=DEVICE).half()
        before = q.clone()
        minfer.rope(q, None, table, ids)
        assert q[1, :, :16].eq(0).all() and same(q[..., 16:], before[..., 16:])
        rows = numerics.rope_rows(before[[0, 2]], table, torch.tensor([0, 7], device=DEVICE))
        numerics.judge(q[[0, 2]], *numerics.stored(rows, torch.float16), "others")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_special_values(dtype):
    """NaN, infinities and zeros, as the CPU has them."""
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1.0, nan, 3, 2], [-inf, 0, 1, -inf], [inf, 0, 0, 0], [-inf] * 4, [0.0] * 4, [nan] * 4]).to(dtype)
    for call in (
        minfer.softmax,
        minfer.log_softmax,
        minfer.layer_norm,
        minfer.rms_norm,
        lambda y: minfer.rms_norm(y, eps=0.0),
        lambda y: minfer.swigluoai_and_mul(y, gate_layout="halves"),
        minfer.silu_and_mul,
        minfer.gelu,
    ):
        torch.testing.assert_close(call(x.to(DEVICE)).cpu(), call(x), equal_nan=True, rtol=2.0**-7, atol=1e-6)
    for quant in QUANTS:
        q, scales = minfer.ops.quantize(x.to(DEVICE), quant, **given_scale(quant, DEVICE))
        want, want_scales = minfer.ops.quantize(x, quant, **given_scale(quant))
        assert torch.equal(scales.cpu(), want_scales), quant
        torch.testing.assert_close(q.float().cpu(), want.float(), equal_nan=True, rtol=0, atol=0)
    zero = torch.zeros(1, device=DEVICE)
    assert minfer.quantize_fp8(torch.ones(2, 40, device=DEVICE).to(dtype), "tensor", zero)[0].float().eq(0).all()
    tiny = torch.full((2, 40), 2.0**-24, device=DEVICE).to(dtype)
    for quant in QUANTS[1:]:  # a scale whose inverse may be no number
        q, scales = minfer.ops.quantize(tiny, quant)
        numerics.check_codes(q, scales, (tiny.double(), torch.zeros_like(tiny, dtype=torch.float64)), quant, quant)


# ---- kernels and launches ------------------------------------------------------------------------------------------------------------


def case_of_kernel(kernel):
    """A case of the kernel's operation."""
    table = QUANTIZED if "_quantized" in kernel["name"] else CASES
    usual = {"activation": "activation_gelu_bias", "gated_activation": "gated_silu_halves"}
    return table[usual.get(kernel["operation"], kernel["operation"])]


def quants_of(kernel):
    """What the kernel stores: numbers, or codes of those modes that it is for."""
    if "_quantized" not in kernel["name"]:
        return (None,)
    if kernel["operation"] == "rms_norm":
        return QUANTS
    of_rows = ("fp8_token", "int8_token")
    return [quant for quant in QUANTS if (quant in of_rows) == ("_rows_" in kernel["name"])]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel under every launch that it has: values, the gaps between rows, bits of a second run."""
    kernel = KERNELS[name]
    case, dtype = case_of_kernel(kernel), DTYPE_OF[kernel["ab_type"]]
    quantized, launched = "_quantized" in name, 0
    for rows, width in ((1, 8), (5, 104), (131, 1000), (3, 4096), (2, 20000)):
        x, factors = case.make(rows, width, dtype, DEVICE)
        for launch in LAUNCHES:
            threads = re.search(r"threads=(\d+)", launch)
            threads = 512 if threads is None else int(threads[1])
            for quant in quants_of(kernel):
                scale = {} if quant is None else given_scale(quant, DEVICE) | {"quant": quant}
                what = f"{name}{launch} on {rows} rows of {width}, {quant}"
                call = functools.partial(case.quantized if quantized else case.call, x, factors, kernel=f"{name}{launch}", **scale)
                poison()
                try:
                    result = call()
                except RuntimeError as error:
                    assert launch and REFUSED.search(str(error)), f"{what}: {error}"
                    continue
                launched += bool(launch)
                again = call()
                exact = case.exact(x, factors, threads)
                if quantized:
                    numerics.check_codes(*result, exact, quant, what, scale.get("scale"))
                    assert all(same(a, b) for a, b in zip(result, again, strict=True)), what
                else:
                    numerics.judge(result, *numerics.stored(exact, dtype), what)
                    assert same(result, again), what
    assert launched >= 20, "most launches are legal"


@pytest.mark.parametrize("name", [name for name in KERNELS if "_ring_" in name])
def test_rings(name):
    """Rows that CTAs, or clusters, take by turns: more rows than these, rings that are filled anew within a row, rows of any width."""
    kernel = KERNELS[name]
    case, dtype = case_of_kernel(kernel), DTYPE_OF[kernel["ab_type"]]
    for rows, width, launch in (
        (700, 1000, ""),
        (5, 20480, ""),
        (300, 8192, "@threads=128"),
        (1000, 2048, "@threads=64,cluster=2"),
        (270, 65536, ""),
        (150, 65544, ""),
        (70, 262144, ""),
    ):
        what = f"{name}{launch} on {rows} rows of {width}"
        x, factors = case.make(rows, width, dtype, DEVICE)
        poison()
        result = case.call(x, factors, kernel=f"{name}{launch}")
        numerics.judge(result, *numerics.stored(case.exact(x, factors, 64), dtype), what)
        assert same(result, case.call(x, factors, kernel=f"{name}{launch}")), what
        padded = torch.full((rows, width + 24), math.nan, dtype=dtype, device=DEVICE)[:, 8:-16].copy_(x)
        assert same(result, case.call(padded, factors, kernel=f"{name}{launch}")), f"{what}, strided"
        odd = torch.full((rows, width + 3), math.nan, dtype=dtype, device=DEVICE)[:, 1:-2].copy_(x)  # the kernel beside it, without a ring
        numerics.judge(case.call(odd, factors, kernel=f"{name}{launch}"), *numerics.stored(case.exact(x, factors, 64), dtype), what)
        if kernel["operation"] == "rms_norm" and width <= 8 * 4096:  # half as wide
            residual = torch.randn_like(x)
            total = (x.double() + residual.double()).to(dtype)
            sums, again = residual.clone(), residual.clone()
            y = minfer.add_rms_norm(x, sums, factors["weight"], EPS, kernel=f"{name}{launch}")
            assert same(sums, total), f"{what}, residual"
            numerics.judge(y, *numerics.stored(case.exact(total, factors, 64), dtype), f"{what}, with a residual")
            assert same(y, minfer.add_rms_norm(x, again, factors["weight"], EPS, kernel=f"{name}{launch}")) and same(sums, again)


def test_kernels_of_others_are_refused():
    """A kernel of another operation or type says so."""
    x = torch.randn(4, 64, device=DEVICE).half()
    for name, message in (
        ("fused_sm80_bf16_rms_norm_rows_x8", "does not compute rms_norm of f16"),
        ("fused_sm80_f16_layer_norm_rows_x8", "does not compute rms_norm of f16"),
        ("fused_sm80_f16_activation_x8", "does not compute rms_norm of f16"),
        ("fused_sm80_f16_rms_norm_quantized_rows_x8", "does not compute rms_norm of f16"),
        ("fused_sm80_f16_rms_norm_rows_x8@threads=48", "threads must be a power of two up to 32, or a multiple of 32"),
        ("fused_sm80_f16_rms_norm_rows_x8@threads=1024", "threads must be 1 to the kernel's"),
        ("fused_sm80_f16_rms_norm_rows_x8@threads=64,rows=2", "a CTA has several whole rows only of up to 32 threads each"),
        ("fused_sm80_f16_rms_norm_rows_x8@threads=64,cluster=3", "cluster must be 1, 2, 4 or 8"),
        ("fused_sm80_f16_rms_norm_rows_x8@parts=2", "a row that is taken whole has one part"),
    ):
        with pytest.raises(RuntimeError, match=f"minfer::rms_norm: x .*{message}"):
            minfer.rms_norm(x, kernel=name)
    rows, elements = "fused_sm80_f16_quantize_quantized_rows_x8", "fused_sm80_f16_quantize_quantized_x8"
    for name, quant in ((rows, "fp8_block128"), (elements, "int8_token")):
        with pytest.raises(RuntimeError, match=f"minfer::quantize: x .*does not compute quantize of f16 as {quant}"):
            minfer.ops.quantize(x, quant, kernel=name)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if "rms_norm_rows" in name])
def test_batch_invariance(kernel):
    """With one kernel a row's bits do not depend on the rows beside it, nor on its place among them."""
    dtype = DTYPE_OF[KERNELS[kernel]["ab_type"]]
    for width in (8, 96, 1000, 5120):
        x, weight = torch.randn(1031, width, device=DEVICE).to(dtype), torch.randn(width, device=DEVICE).to(dtype)
        want = minfer.rms_norm(x, weight, kernel=kernel)
        for rows in (slice(0, 1), slice(3, 4), slice(1030, 1031), slice(7, 40)):
            assert same(minfer.rms_norm(x[rows], weight, kernel=kernel), want[rows]), (width, rows)
        assert same(minfer.rms_norm(x.flip(0), weight, kernel=kernel), want.flip(0)), width


# ---- streams, graphs, errors ---------------------------------------------------------------------------------------------------------


def layer(x, residual, weight, positions, table, scale):
    """All operators, what is written among them."""
    y = minfer.add_rms_norm(x, residual, weight)
    q = y.view(y.shape[0], -1, 64).clone()
    minfer.rope(q, q[:, :0], table, positions)
    norm = torch.empty_like(x)
    codes, scales = minfer.add_rms_norm(y, residual, weight, quant="fp8_block128", norm=norm)
    whole = minfer.dequantize(codes, scales, "fp8_block128", dtype=x.dtype)
    up = minfer.silu_and_mul(torch.cat([whole, norm], -1), quant="int8_token")
    tensor, _ = minfer.rms_norm(norm, weight, quant="fp8_tensor", scale=scale)
    rows = minfer.embedding(positions, minfer.layer_norm(table.to(x.dtype)), scale=3.0)
    return [y, q, norm, codes, scales, whole, *up, tensor, rows, minfer.softmax(norm), minfer.log_softmax(y.float()), minfer.gelu(y)]


def operands(tokens=37, width=1024):
    x, residual = (torch.randn(tokens, width, device=DEVICE).bfloat16() for _ in range(2))
    positions = torch.randint(0, 256, (tokens,), device=DEVICE)
    table, scale = minfer.rope_cache(10000.0, 64, 256, device=DEVICE), torch.full((1,), 0.02, device=DEVICE)
    return x, residual, torch.randn(width, device=DEVICE).bfloat16(), positions, table, scale


def test_stream():
    """On a stream of its own, behind what that stream still does."""
    x, residual, *others = operands()
    want = layer(x, residual.clone(), *others)
    stream, late = torch.cuda.Stream(), torch.full_like(x, math.nan)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        have = layer(late, residual.clone(), *others)
    stream.synchronize()
    assert all(same(a, b) for a, b in zip(have, want, strict=True))


def test_graph():
    """Captured, replayed, and replayed with other contents."""
    tensors = operands()
    start = tensors[1].clone()
    layer(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    tensors[1].copy_(start)
    with torch.cuda.graph(graph):
        have = layer(*tensors)
    for contents in (None, operands(), operands()):
        if contents is not None:
            for to, source in zip(tensors, contents, strict=True):
                to.copy_(source)
            start = tensors[1].clone()
        want = layer(tensors[0], start.clone(), *tensors[2:])
        for x in have:
            bits(x).fill_(-1 if x.dtype != torch.float8_e4m3fn and x.dtype != torch.int8 else 0x7F)
        tensors[1].copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("op, case", BAD_CASES)
def test_bad_arguments(op, case):
    """In the words of the CPU but for C++'s names of types."""
    call, message = bad_call(op, case, DEVICE)
    head = message.split(", got")[0]
    for name, other in NAMES_IN_CPP.items():
        head = re.sub(rf"\b{name}\b", f"(?:{name}|{other})", head)
    with pytest.raises(RuntimeError, match=f"minfer::{op}: {head}"):
        function(op)(**call)


@pytest.mark.parametrize("op", BAD)
def test_devices_must_agree(op):
    call = good_call(op, DEVICE, optional=True)
    _, *others = (name for name, value in call.items() if isinstance(value, torch.Tensor))
    for name in others:
        with pytest.raises(RuntimeError, match=f"minfer::{op}: {name} must be on"):
            function(op)(**(call | {name: call[name].cpu()}))


@pytest.mark.parametrize("op", BAD)
def test_opcheck(op):
    for optional in (False, True):
        call = good_call(op, DEVICE, optional)
        for x in call.values():
            if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.float32):
                x.copy_(torch.rand(x.shape, device=DEVICE) + 0.5)
        if op == "dequantize" and not optional:
            continue
        overloads = getattr(torch.ops.minfer, op)
        check_op(overloads.default, (), call)
        if "out" in overloads.overloads():
            check_op(overloads.out, (), call | {"out": torch.empty_like(function(op)(**call))})


# ---- Hadamard transform --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=name_of)
@pytest.mark.parametrize("block", HADAMARD_BLOCKS)
def test_hadamard(block, dtype):
    """Few rows and many, blocks that share a tile and its rest, rows at any address, out= and x itself, and there and back."""
    for rows, blocks in ((1, 1), (3, 7), (5, 1), (max((1 << 22) // block, 1), 1)):
        width = block * blocks
        if rows * width > 1 << 22 and rows > 1:
            continue
        x = torch.randn(rows, width + 8, device=DEVICE).to(dtype)
        for view in (x[:, :width], x[:, 1 : 1 + width]):
            poison()
            out = minfer.hadamard(view, block)
            check_hadamard(view, block, out)
            assert torch.equal(minfer.hadamard(view, block, out=torch.empty_like(x)[:, 2 : 2 + width]), out)
        own = view.clone()
        assert minfer.hadamard(own, block, out=own) is own and torch.equal(own, out)
        check_hadamard(out, block, minfer.hadamard(out, block, transpose=True), transpose=True)
    if dtype == torch.float32:
        back = minfer.hadamard(minfer.hadamard(x, block) if x.shape[1] % block == 0 else out, block, transpose=True)
        assert torch.allclose(back, x if x.shape[1] % block == 0 else view, atol=1e-4)


@pytest.mark.parametrize("change, message", BAD_HADAMARD)
def test_hadamard_refuses(change, message):
    given = dict(x=torch.zeros(3, 48), block=16) | change
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(RuntimeError, match=f"minfer::hadamard: {re.escape(message)}"):
        minfer.hadamard(**given)
