"""D of gemm and gemm_gated in e4m3 codes, on a GPU.

A float32 D leaves by the same loop as codes do, so that the codes of one kernel must be those of its own float32 D, bit by bit. Gated
products have no float32 D: their codes are held against the 16-bit D of the same kernel and against float64.
"""

import itertools

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.contracts import numerics_cases as numerics
from tests.gemm.cases import DTYPES, LAYOUTS, name_of, operands
from tests.gemm.output_codes_cases import (
    QUANT,
    SPECIAL_SCALES,
    codes_in_memory,
    codes_mismatch,
    codes_of,
    same_codes,
    scale_for,
    special_operands,
    untouched_around,
)
from tests.gemm.test_output_codes_cpu import bad_calls

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
LETTERS_A, LETTERS_B = {"k": "t", "mn": "n"}, {"k": "n", "mn": "t"}
KERNELS = {k["name"]: k for k in minfer.kernels("gemm") if k["compiled"]} or {k["name"]: k for k in minfer.kernels("gemm")}
DECOMPOSITIONS = ("persistent", "stream_k", "split_k,splits=3")
SHAPES = ((200, 392, 1096), (24, 520, 4104), (136, 16, 264))
ODD_SHAPES = ((131, 257, 77), (7, 1001, 513), (1, 33, 3), (1, 1, 1000), (33, 1, 129))  # for kernels that take any alignment


def layout_of(kernel):
    return LETTERS_A[kernel["a_major"]] + LETTERS_B[kernel["b_major"]]


def overrides_of(kernel):
    """Of every decomposition that it has; where launches choose the tiles' columns, in the widest and a narrow tile."""
    decompositions = [d for d in DECOMPOSITIONS if not (kernel["invariant_only"] and d.startswith("split_k"))]
    widths = ("", f",columns={5 * kernel['column_step']}") if kernel["column_step"] else ("",)
    return [f"{kernel['name']}@decomposition={d}{width}" for d in decompositions for width in widths]


def epilogues(m, n, dtype):
    c, bias = torch.randn(m, n, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE)
    return (
        {},
        {"bias": bias, "activation": "silu", "alpha": -0.5},
        {"c": c, "beta": 2.0, "bias": bias.to(dtype), "activation": "gelu"},
        {"c": c.float(), "beta": 1.0},
        {"c": c[0], "beta": -1.0, "activation": "relu"},
        {"c": c[:, :1], "beta": 1.0},
    )


def mismatch(a, b, override=None, *, left=8, **epilogue) -> str | None:
    """Of a call's codes with those of its float32 D; what lies around D, and the bits of a second run."""
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    wide = minfer.gemm(a, b, **epilogue, out_dtype=torch.float32, kernel=override)
    scale = scale_for(wide)
    out, memory = codes_in_memory(shape, DEVICE, left=left, right=-(left + shape[-1]) % 16 if left % 8 == 0 else 5)
    q, _ = minfer.gemm(a, b, **epilogue, kernel=override, quant=QUANT, scale=scale, out=out)
    if not same_codes(q, codes_of(wide, scale)):
        wrong = (q.float() != codes_of(wide, scale).float()).nonzero()
        return f"{len(wrong)} codes of {q.numel()} are not those of the float32 D, first at {wrong[0].tolist()}"
    if not untouched_around(out, memory):
        return "wrote outside of D"
    again = minfer.gemm(a, b, **epilogue, kernel=override, quant=QUANT, scale=scale)[0]
    return None if torch.equal(again.view(torch.uint8), q.contiguous().view(torch.uint8)) else "two runs differ"


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel with whole and with divided tiles, every epilogue, D with rows on and off 16 bytes, batches."""
    kernel, failures = KERNELS[name], []
    dtype, layout = DTYPE_OF[kernel["ab_type"]], layout_of(kernel)
    for number, ((m, n, k), override) in enumerate(
        itertools.product(SHAPES + (ODD_SHAPES if kernel["alignment"] < 16 else ()), overrides_of(kernel))
    ):
        a, b = operands(m, n, k, dtype, layout, DEVICE)
        for turn, epilogue in enumerate(epilogues(m, n, dtype)[number % 3 :: 3]):  # all of them over a few launches
            problem = mismatch(a, b, override, left=(8, 3)[(number // 3 + turn) % 2], **epilogue)
            if problem is not None:
                failures.append(f"{override} on {(m, n, k)}, {list(epilogue)}: {problem}")
    batch_a, batch_b = operands(40, 72, 264, dtype, layout, DEVICE, batch=(3,))
    failures += [
        f"a batch: {x}" for x in [mismatch(batch_a, batch_b, overrides_of(kernel)[0], c=torch.randn(40, 72, device=DEVICE), beta=1.0)] if x
    ]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel["tile_n"] > 1])
def test_gated_kernels(name):
    kernel = KERNELS[name]
    dtype, layout = DTYPE_OF[kernel["ab_type"]], layout_of(kernel)
    for (m, half, k), override in itertools.product(((136, 136, 520), (40, 8, 264)), overrides_of(kernel)):
        a, b = operands(m, 2 * half, k, dtype, layout, DEVICE, scale=k**-0.25)
        for bias, activation in ((None, "silu"), (torch.randn(2 * half, device=DEVICE), "gelu_tanh")):
            options = {"bias": bias, "activation": activation, "kernel": override}
            d = minfer.gemm_gated(a, b, **options)
            scale = scale_for(d)
            q, _ = minfer.gemm_gated(a, b, **options, quant=QUANT, scale=scale)
            assert codes_mismatch(q, d, scale) is None, (override, codes_mismatch(q, d, scale))
            exact = numerics.gated_bound(a, b.mT, bias=bias, activation=activation, out_dtype=torch.float32)
            numerics.check_codes(q, None, exact, QUANT, override, scale)
            again = minfer.gemm_gated(a, b, **options, quant=QUANT, scale=scale)[0]
            assert torch.equal(again.view(torch.uint8), q.view(torch.uint8)), f"{override}: two runs differ"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_as_planned(dtype, layout):
    """The kernel that the plan chooses for codes, which need not be that of a float32 D, against float64. Vectors, odd columns."""
    for m, (n, k) in itertools.product((0, 1, 2, 7, 16, 33, 128, 257), ((1, 1), (1, 4104), (5, 3), (16, 64), (520, 4096), (1031, 264))):
        a, b = operands(m, n, k, dtype, layout, DEVICE)
        bias = torch.randn(n, device=DEVICE)
        exact = numerics.gemm_bound(a, b.mT, bias=bias, out_dtype=torch.float32)
        scale = scale_for(exact[0].float())
        q, given = minfer.gemm(a, b, bias=bias, quant=QUANT, scale=scale)
        assert given is scale
        numerics.check_codes(q, None, exact, QUANT, f"{m} x {n} x {k}", scale)
        assert torch.equal(minfer.gemm(a, b, bias=bias, quant=QUANT, scale=scale)[0].view(torch.uint8), q.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_special_numbers(dtype):
    """NaN, infinities, saturation, and scales whose inverses are not numbers: the rule of minfer.quantize_fp8, in kernels of every kind."""
    a, b = special_operands(dtype, DEVICE)
    layouts = {"tn": (a, b.mT.contiguous().mT), "unaligned": (a, b[:, 1:48])}
    layouts |= {"a row": (a[1:2], b), "a column": (a, b[:, 3:4].contiguous())}
    for what, (x, y) in layouts.items():
        wide = minfer.gemm(x, y, out_dtype=torch.float32)
        for value in SPECIAL_SCALES:
            scale = torch.tensor([value], device=DEVICE)
            q, _ = minfer.gemm(x, y, quant=QUANT, scale=scale)
            # The plan may choose another kernel for a float32 D: a sum's last bit, and with it a code next to a tie.
            want = codes_of(wide, scale)
            if value in (0.3, -0.3):
                same = (q.float() == want.float()) | (q.float().isnan() & want.float().isnan())
                assert same.double().mean() > 0.99, (what, value)
            else:
                assert same_codes(q, want), (what, value)


def test_a_graph_follows_its_scale():
    a, b = operands(37, 264, 520, torch.bfloat16, "tn", DEVICE)
    scale = torch.full((1,), 0.2, device=DEVICE)
    minfer.gemm(a, b, quant=QUANT, scale=scale), minfer.gemm_gated(a, b[:, :256], quant=QUANT, scale=scale)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        q, _ = minfer.gemm(a, b, quant=QUANT, scale=scale)
        gated, _ = minfer.gemm_gated(a, b[:, :256], quant=QUANT, scale=scale)
    for value in (0.2, 3.0, 0.01):
        scale.fill_(value)
        a.copy_(torch.randn_like(a))
        for out in (q, gated):
            out.view(torch.uint8).fill_(0x7F)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(q.view(torch.uint8), minfer.gemm(a, b, quant=QUANT, scale=scale)[0].view(torch.uint8)), value
        assert torch.equal(gated.view(torch.uint8), minfer.gemm_gated(a, b[:, :256], quant=QUANT, scale=scale)[0].view(torch.uint8)), value


def test_another_stream_and_out_of_any_strides():
    a, b = operands(65, 136, 264, torch.float16, "tn", DEVICE)
    scale = torch.full((3,), 0.15, device=DEVICE)[1:2]
    want = minfer.gemm(a, b, quant=QUANT, scale=scale)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        q, _ = minfer.gemm(a, b, quant=QUANT, scale=scale)
    torch.cuda.current_stream().wait_stream(stream)
    assert same_codes(q, want)
    columns = torch.empty(136, 65, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).t()
    spread = torch.empty(65, 272, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)[:, ::2]
    for out in (columns, spread):
        minfer.gemm(a, b, quant=QUANT, scale=scale, out=out)
        assert same_codes(out, want)


def test_the_same_codes_as_minfer_quantize():
    """Of a 16-bit D that is exact, the GEMM gives what minfer.quantize_fp8 of it gives."""
    a = torch.randint(-4, 5, (48, 64), device=DEVICE).half()
    b = torch.eye(64, device=DEVICE).half()
    for value in SPECIAL_SCALES:
        scale = torch.tensor([value], device=DEVICE)
        q, _ = minfer.gemm(a, b, quant=QUANT, scale=scale)
        want, _ = minfer.quantize_fp8(a, "tensor", scale)
        numbers = ~want.float().isnan()
        assert torch.equal(q.float().isnan(), want.float().isnan()) and torch.equal(q.float()[numbers], want.float()[numbers]), value


@pytest.mark.parametrize("name", bad_calls())
def test_calls_that_cannot_be_right(name):
    options, message = bad_calls(DEVICE)[name]
    a, b = operands(4, 48, 32, torch.float16, "tn", DEVICE)
    calls = [minfer.gemm] if {"out", "out_dtype"} & set(options) else [minfer.gemm, minfer.gemm_gated]
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call(a, b, **options)
        assert message in str(raised.value)
