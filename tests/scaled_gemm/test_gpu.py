"""gemm_fp8, gemm_int8 and their gated forms on a GPU: every kernel by name under every width and decomposition, the plan's choice, scales
of every kind and at any strides, adversarial magnitudes, graphs."""

import itertools

import minfer
import pytest
import torch

from tests.scaled_gemm import cases
from tests.scaled_gemm.cases import DTYPES, FP8
from tests.scaled_gemm.test_cpu import bad_calls, gated_blocks, kinds_of, leading_modes, zero_points

DEVICE = "cuda"
ALL = minfer.kernels("scaled_gemm")
KERNELS = {k["name"]: k for k in ALL if k["compiled"]} or {k["name"]: k for k in ALL}
DECOMPOSITIONS = ("persistent", "stream_k", "split_k,splits=2", "split_k,splits=3")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and not cases.has_kernels(DEVICE), reason="kernels are for compute capability 9.0"),
]


def mismatch(have, want, magnitude, bound):
    """Of float32 results."""
    if not have.isfinite().all():
        return f"{int((~have.isfinite()).sum())} results are not finite"
    off = (have.double() - want).abs() - bound * magnitude - 1e-30
    if (off > 0).any():
        at = tuple((off > 0).nonzero()[0].tolist())
        return f"{int((off > 0).sum())} of {off.numel()} off, first at {at}: {have[at].item()} instead of {want[at].item()}"
    return None


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel in tiles of every width."""
    kernel, failures = KERNELS[name], []
    dtype = FP8 if kernel["ab_type"] == "e4m3" else torch.int8
    step = kernel["column_step"]
    widths = range(step, kernel["tile_n"] + 1, step) if step else [0]
    for m, n, k in ((200, 392, 1104), (24, 520, 4112), (1300, 1032, 528)):
        torch.manual_seed(m)
        a, w = cases.operands(m, n, k, dtype, DEVICE)
        scales = {
            kind: (cases.scale_of(kind, m, k, weight=False, device=DEVICE), cases.scale_of(kind, n, k, weight=True, device=DEVICE))
            for kind in (("lines", "blocks") if dtype == FP8 else ("lines",))
        }
        for kind, pair in scales.items():
            want, magnitude = cases.truth(a, w, *pair)
            for width, decomposition in itertools.product(widths, DECOMPOSITIONS):
                override = f"{name}@{f'columns={width},' if width else ''}decomposition={decomposition}"
                for fast in (False, True) if (dtype, kind) == (FP8, "lines") else (False,):
                    options = dict(fast_accum=fast) if dtype == FP8 else {}
                    have = cases.call(dtype)(a, w.t(), *pair, kernel=override, out_dtype=torch.float32, **options)
                    problem = mismatch(have, want, magnitude, cases.relative_bound(dtype, k, fast=fast))
                    if problem is not None:
                        failures.append(f"{override} on {(m, n, k)}, {kind}, fast {fast}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel["arch"] == 90])
def test_splits(name):
    """Every number of splits, whether the splits of a tile are the CTAs of a cluster, which those of few tiles can be, or their partials go
    through the workspace: of one tile, of several, and of more than a cluster's shared memory has room for."""
    kernel, failures = KERNELS[name], []
    dtype = FP8 if kernel["ab_type"] == "e4m3" else torch.int8
    step, most = kernel["column_step"], kernel["tile_n"]
    for (m, n, k), width in itertools.product(
        ((1, 136, 4112), (40, 520, 2064), (130, 2000, 1040)), {step, most // 2 // step * step, most} - {0}
    ):
        torch.manual_seed(n)
        a, w = cases.operands(m, n, k, dtype, DEVICE)
        kind = "blocks" if dtype == FP8 else "lines"
        pair = cases.scale_of(kind, m, k, weight=False, device=DEVICE), cases.scale_of(kind, n, k, weight=True, device=DEVICE)
        want, magnitude = cases.truth(a, w, *pair)
        for splits in range(2, 10):
            override = f"{name}@columns={width},decomposition=split_k,splits={splits}"
            have = [cases.call(dtype)(a, w.t(), *pair, kernel=override, out_dtype=torch.float32) for _ in range(3)]
            problem = mismatch(have[0], want, magnitude, cases.relative_bound(dtype, k))
            if problem is None and not (torch.equal(have[0], have[1]) and torch.equal(have[0], have[2])):
                problem = "runs differ"
            if problem is not None:
                failures.append(f"{override} on {(m, n, k)}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_as_planned(dtype, shape):
    """All pairs of kinds of scales, two runs, out=, a D of 16 bits."""
    torch.manual_seed(sum(shape))
    m, n, k = shape
    a, w = cases.operands(*shape, dtype, DEVICE)
    for a_kind, b_kind in itertools.product(kinds_of(dtype), kinds_of(dtype)):
        a_scale = cases.scale_of(a_kind, m, k, weight=False, device=DEVICE)
        b_scale = cases.scale_of(b_kind, n, k, weight=True, device=DEVICE)
        want, magnitude = cases.truth(a, w, a_scale, b_scale)
        have = cases.call(dtype)(a, w.t(), a_scale, b_scale, out_dtype=torch.float32)
        problem = mismatch(have, want, magnitude, cases.relative_bound(dtype, k))
        assert problem is None, (a_kind, b_kind, problem)
        half = cases.call(dtype)(a, w.t(), a_scale, b_scale)
        assert torch.equal(half, cases.call(dtype)(a, w.t(), a_scale, b_scale))
        assert ((half.double() - want).abs() <= 2.0**-8 * want.abs() + cases.relative_bound(dtype, k) * magnitude + 1e-30).all()
        out = torch.full((m, n + 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        cases.call(dtype)(a, w.t(), a_scale, b_scale, out=out[:, :n])
        assert torch.equal(out[:, :n], half) and out[:, n:].isnan().all()


@pytest.mark.parametrize("out_dtype", (torch.float16, torch.bfloat16, torch.float32, FP8), ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_epilogue(dtype, out_dtype):
    """c of any shape and type, bias, every activation, gates, codes: by TMA and by threads."""
    if out_dtype == FP8 and dtype == torch.int8:
        return
    torch.manual_seed(5)
    for (m, n, k), activation in itertools.product(((40, 256, 512), (3, 80, 272), (300, 1008, 384)), ("none", "relu", "gelu", "silu")):
        a, w = cases.operands(m, n, k, dtype, DEVICE)
        a_scale = cases.scale_of("lines", m, k, weight=False, device=DEVICE, size=0.02)
        b_scale = cases.scale_of("lines", n, k, weight=True, device=DEVICE, size=0.02)
        narrow = out_dtype if out_dtype.itemsize == 2 else torch.float16
        scale = torch.full((1,), 0.05, device=DEVICE)
        codes = dict(out_scale=scale) if out_dtype == FP8 else {}
        for c, bias in (
            (torch.randn(m, n, device=DEVICE).to(narrow), torch.randn(n, device=DEVICE).to(narrow)),
            (torch.randn(n, device=DEVICE), None),
            (None, torch.randn(n, device=DEVICE)),
        ):
            options = dict(bias=bias, activation=activation, c=c, beta=0.0 if c is None else 0.5)
            have = cases.call(dtype)(a, w.t(), a_scale, b_scale, out_dtype=out_dtype, **options, **codes)
            want = cases.call(dtype)(*(x.cpu() for x in (a, w.t(), a_scale, b_scale)), out_dtype=torch.float32, **{
                name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()
            }).to(DEVICE)  # fmt: skip
            _, magnitude = cases.truth(a, w, a_scale, b_scale)
            slack = 2.0**-10 * magnitude + 1e-5
            if out_dtype == FP8:
                have, want = have.float() * scale, want.clamp(-448 * 0.05, 448 * 0.05)
                slack = slack + 0.0626 * want.abs() + 0.001
            assert ((have.double() - want.double()).abs() <= slack + 2.0**-8 * want.abs()).all(), (m, n, k, activation)
        gated = cases.call(dtype, gated=True)(a, w.t(), a_scale, b_scale, activation="silu", out_dtype=out_dtype, **codes)
        blocks = cases.truth(a, w, a_scale, b_scale)[0].unflatten(1, (-1, 2, 8))
        want = (torch.nn.functional.silu(blocks[:, :, 0]) * blocks[:, :, 1]).flatten(1)
        got = gated.double() * (0.05 if out_dtype == FP8 else 1.0)
        if out_dtype == FP8:
            want = want.clamp(-448 * 0.05, 448 * 0.05)
        assert (got - want).norm() <= (0.05 if out_dtype == FP8 else 0.01) * want.norm()


def test_sums_of_int32_are_exact():
    for m, n, k in ((1, 64, 16), (40, 200, 5008), (300, 520, 16400)):
        a, w = cases.operands(m, n, k, torch.int8, DEVICE)
        one = torch.ones(1, device=DEVICE)
        have = minfer.gemm_int8(a, w.t(), one, one, out_dtype=torch.int32)
        assert torch.equal(have.double(), a.double() @ w.double().t())


def test_operands_and_scales_at_any_stride():
    """Operands that TMA cannot read are copied; scales are read where they are."""
    torch.manual_seed(7)
    m, n, k = 70, 264, 1000
    a, w = cases.operands(m, n, k, FP8, DEVICE)
    a_scale = cases.scale_of("blocks", m, k, weight=False, device=DEVICE)
    b_scale = cases.scale_of("blocks", n, k, weight=True, device=DEVICE)
    want = minfer.gemm_fp8(a, w.t(), a_scale, b_scale)
    wide = torch.full((m + 3, k + 5), 240.0, device=DEVICE).to(FP8)
    wide[2:-1, 3:-2] = a
    by_columns = torch.full((8, 3 * m), torch.nan, device=DEVICE).t()[::3]
    by_columns[:, : a_scale.shape[1]] = a_scale
    for x, y, sa, sb in (
        (wide[2:-1, 3:-2], w.t(), a_scale, b_scale),
        (a.t().contiguous().t(), w.t().contiguous(), a_scale, b_scale),
        (a, w.t(), by_columns[:, : a_scale.shape[1]], b_scale.t().contiguous().t()),
    ):
        assert torch.equal(minfer.gemm_fp8(x, y, sa, sb), want)


def test_unread_scales_and_rows_do_not_matter():
    """What is behind the last row, or a scale of no row, may be NaN."""
    torch.manual_seed(8)
    m, n, k = 13, 136, 400
    memory = torch.full((m + 130, k), torch.nan, device=DEVICE).to(FP8)
    a, w = cases.operands(m, n, k, FP8, DEVICE)
    memory[:m] = a
    scales = torch.full((m + 130, 4), torch.nan, device=DEVICE)
    scales[:m] = cases.scale_of("blocks", m, k, weight=False, device=DEVICE)
    b_scale = cases.scale_of("blocks", n, k, weight=True, device=DEVICE)
    have = minfer.gemm_fp8(memory[:m], w.t(), scales[:m], b_scale)
    assert have.isfinite().all() and torch.equal(have, minfer.gemm_fp8(a, w.t(), scales[:m].clone(), b_scale))


def test_promotion_keeps_what_fast_accumulation_loses():
    """A large product at the start, small ones behind it: the tensor core's accumulator drops them, sums of 128 of k do not."""
    m, n, k = 64, 128, 8192
    a = torch.full((m, k), 1.0, device=DEVICE).to(FP8)
    w = torch.full((n, k), 0.0625, device=DEVICE).to(FP8)
    a[:, 0], w[:, 0] = 448.0, 448.0
    one = torch.ones(1, device=DEVICE)
    exact = 448.0**2 + (k - 1) * 0.0625
    for m_used in (1, m):
        kept = minfer.gemm_fp8(a[:m_used], w.t(), one, one, out_dtype=torch.float32)
        lost = minfer.gemm_fp8(a[:m_used], w.t(), one, one, out_dtype=torch.float32, fast_accum=True)
        assert (kept - exact).abs().max() <= 16.0  # of the first 128 alone
        assert (lost - exact).abs().min() > 4 * (kept - exact).abs().max()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_leading_modes(dtype):
    leading_modes(dtype, DEVICE)


@pytest.mark.parametrize("shape", [(1, 64, 256), (20, 200, 400), (3, 520, 1040), (300, 1152, 2048), (33, 96, 7168)], ids=str)
def test_gated_blocks(shape):
    torch.manual_seed(7)
    gated_blocks(*shape, DEVICE)


def test_a_step_of_a_model_over_and_over():
    """The products of layers in a CUDA graph, thousands of times: as often as it takes for warps to fall behind each other."""
    torch.manual_seed(8)
    layers, tokens, sizes = 8, 64, {"qkv": (6144, 4096), "out": (4096, 4096), "gate": (14336, 4096), "down": (4096, 14336)}

    def weight(name):
        parts = [
            minfer.quantize.quantize_fp8_weight(torch.randn(sizes[name], dtype=torch.bfloat16, device=DEVICE))
            for _ in range(2 if name == "gate" else 1)
        ]
        return minfer.quantize.gate_up_weight(*parts) if name == "gate" else parts[0]

    weights = [{name: weight(name) for name in sizes} for _ in range(layers)]
    x = {k: torch.randn(tokens, k, dtype=torch.bfloat16, device=DEVICE) for k in (4096, 14336)}
    options = {"out": {"c": x[4096], "beta": 1.0}, "down": {"c": x[4096], "beta": 1.0}, "gate": {"activation": "silu"}}

    def step():
        return [w.gemm(x[sizes[name][1]], **options.get(name, {})) for layer in weights for name, w in layer.items()]

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = step()
    for _ in range(20):
        for _ in range(100):
            graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(have, want, strict=True))


E4M3_KERNELS = [name for name, kernel in KERNELS.items() if kernel["ab_type"] == "e4m3"]


@pytest.mark.parametrize("name", E4M3_KERNELS)
def test_every_code(name):
    """A product with 1 is the number of the code; NaN's code is NaN in its row or column alone."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)
    one, k = torch.ones(1, device=DEVICE), 144
    every, single = (torch.zeros(lines, k, dtype=FP8, device=DEVICE) for lines in (256, 64))
    every[:, 17], single[5, 17] = codes, 1.0
    want = torch.zeros(256, 64, device=DEVICE)
    want[:, 5] = codes.float()
    want[codes.isnan()] = torch.nan
    for a, w, expected in ((every, single, want), (single, every, want.t())):
        have = minfer.gemm_fp8(a, w.t(), one, one, out_dtype=torch.float32, kernel=name)
        torch.testing.assert_close(have, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in E4M3_KERNELS if KERNELS[name]["arch"] == 80])
def test_portable_tails(name):
    """k of any length, few rows, blocks of gates and ups: the kernels of other devices, by name."""
    for m, n, k in ((1, 24, 16), (37, 200, 77), (130, 96, 1000), (64, 520, 2049)):
        torch.manual_seed(m)
        a, w = cases.operands(m, n, k, FP8, DEVICE)
        for kinds in (("blocks", "blocks"), ("lines", "blocks"), ("exponents", "one")):
            pair = [
                cases.scale_of(kind, lines, k, weight=i == 1, device=DEVICE)
                for i, (kind, lines) in enumerate(zip(kinds, (m, n), strict=True))
            ]
            want, magnitude = cases.truth(a, w, *pair)
            have = minfer.gemm_fp8(a, w.t(), *pair, out_dtype=torch.float32, kernel=name)
            assert mismatch(have, want, magnitude, cases.relative_bound(FP8, k)) is None, (m, n, k, kinds)
    half, k = 520, 1040
    gate, up = (cases.operands(1, half, k, FP8, DEVICE)[1] for _ in range(2))
    a = cases.operands(33, 8, k, FP8, DEVICE)[0]
    scales = [cases.scale_of("blocks", half, k, weight=True, device=DEVICE, size=2e-4) for _ in range(2)]
    of_a = cases.scale_of("blocks", 33, k, weight=False, device=DEVICE)
    gates, ups = (cases.truth(a, w, of_a, scale)[0] for w, scale in zip((gate, up), scales, strict=True))
    have = minfer.gemm_fp8_gated(a, minfer.pack_gate_up(gate, up).t(), of_a, torch.stack(scales), out_dtype=torch.float32, kernel=name)
    torch.testing.assert_close(have.double(), torch.nn.functional.silu(gates) * ups, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 64, 128), (20, 208, 400), (70, 96, 1040), (500, 1040, 4096)], ids=str)
def test_zero_points(shape):
    torch.manual_seed(8)
    zero_points(*shape, DEVICE)


def test_a_graph_follows_its_operands():
    torch.manual_seed(9)
    a, w = cases.operands(9, 512, 512, FP8, DEVICE)
    a_scale = cases.scale_of("blocks", 9, 512, weight=False, device=DEVICE)
    b_scale = cases.scale_of("blocks", 512, 512, weight=True, device=DEVICE)
    minfer.gemm_fp8(a, w.t(), a_scale, b_scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = minfer.gemm_fp8(a, w.t(), a_scale, b_scale)
    for _ in range(3):
        a.copy_(cases.operands(9, 8, 512, FP8, DEVICE)[0])
        a_scale.copy_(torch.rand_like(a_scale))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, minfer.gemm_fp8(a, w.t(), a_scale, b_scale))


@pytest.mark.parametrize("case", range(len(list(bad_calls()))))
def test_calls_that_cannot_be_right(case):
    """The library's own checks name the same."""
    operator, arguments, options, message = list(bad_calls(DEVICE))[case]
    with pytest.raises(RuntimeError) as raised:
        getattr(minfer, operator)(*arguments, **options)
    subject = message.split()[0]  # types have other names there
    assert f"minfer::{operator}: " in str(raised.value) and subject in str(raised.value)
