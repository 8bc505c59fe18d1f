"""w4a8_gemm and w4a8_gemm_gated on a GPU: every kernel by name under every width and decomposition, the plan's choice, every code,
epilogues, the path of other devices, graphs."""

import itertools

import minfer
import pytest
import torch

from tests.quantized_gemm import w4a8_cases as cases
from tests.quantized_gemm.test_w4a8_cpu import bad_calls
from tests.quantized_gemm.w4a8_cases import DTYPES, FP8

DEVICE = "cuda"
ALL = minfer.kernels("w4a8")
KERNELS = {k["name"]: k for k in ALL if k["compiled"]} or {k["name"]: k for k in ALL}
DECOMPOSITIONS = ("persistent", "stream_k", "split_k,splits=2", "split_k,splits=3")
pytestmark = pytest.mark.gpu
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="kernels are for compute capability 9.0"
)


def dtype_of(kernel):
    return FP8 if kernel["ab_type"] == "e4m3" else torch.int8


def mismatch(have, want, magnitude, bound):
    """Of results in 16 bits."""
    if not have.isfinite().all():
        return f"{int((~have.isfinite()).sum())} results are not finite"
    rounding = 2.0**-11 if have.dtype == torch.float16 else 2.0**-8
    off = (have.double() - want).abs() - rounding * want.abs() - bound * magnitude - 1e-30
    if (off > 0).any():
        at = tuple((off > 0).nonzero()[0].tolist())
        return f"{int((off > 0).sum())} of {off.numel()} off, first at {at}: {have[at].item()} instead of {want[at].item()}"
    return None


@on_hopper
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel in tiles of every width."""
    kernel, failures = KERNELS[name], []
    dtype, step = dtype_of(kernel), kernel["column_step"]
    for (m, n, k), scales in itertools.product(((230, 392, 1104), (24, 520, 4112), (1300, 1032, 528)), (torch.bfloat16, torch.float16)):
        torch.manual_seed(m)
        w, (a, a_scale) = cases.weight(n, k, 128, scales, DEVICE), cases.activations(m, k, dtype, DEVICE)
        want, magnitude = cases.truth(a, a_scale, w)
        for width, decomposition in itertools.product(range(step, kernel["tile_n"] + 1, step), DECOMPOSITIONS):
            override = f"{name}@columns={width},decomposition={decomposition}"
            have = minfer.w4a8_gemm(a, a_scale, *w.arguments(), kernel=override)
            problem = mismatch(have, want, magnitude, cases.relative_bound(dtype, k))
            if problem is None and not torch.equal(have, minfer.w4a8_gemm(a, a_scale, *w.arguments(), kernel=override)):
                problem = "two runs differ"
            if problem is not None:
                failures.append(f"{override} on {(m, n, k)}, {scales}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@on_hopper
@pytest.mark.parametrize("name", KERNELS)
def test_splits(name):
    """Every number of splits, whether the splits of a tile are the CTAs of a cluster or their partials go through the workspace."""
    kernel, failures = KERNELS[name], []
    dtype, step, most = dtype_of(kernel), kernel["column_step"], kernel["tile_n"]
    for (m, n, k), width in itertools.product(((1, 136, 4112), (40, 520, 2064), (130, 2000, 1040)), (step, most // 64 * 32, most)):
        torch.manual_seed(n)
        w, (a, a_scale) = cases.weight(n, k, 256, device=DEVICE), cases.activations(m, k, dtype, DEVICE)
        want, magnitude = cases.truth(a, a_scale, w)
        for splits in range(2, 10):
            override = f"{name}@columns={width},decomposition=split_k,splits={splits}"
            have = [minfer.w4a8_gemm(a, a_scale, *w.arguments(), group_size=256, kernel=override) for _ in range(3)]
            problem = mismatch(have[0], want, magnitude, cases.relative_bound(dtype, k))
            if problem is None and not (torch.equal(have[0], have[1]) and torch.equal(have[0], have[2])):
                problem = "runs differ"
            if problem is not None:
                failures.append(f"{override} on {(m, n, k)}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@on_hopper
@pytest.mark.parametrize("name", KERNELS)
def test_every_code(name):
    """A product with 1 is the code's number, in every column of a block and of the last one, which may be half of a k tile."""
    kernel = KERNELS[name]
    n, k = 136, 320
    codes = (torch.arange(n, device=DEVICE)[:, None] * 7 + torch.arange(k, device=DEVICE) * 5 + torch.arange(k, device=DEVICE) // 16) % 16
    packed, scales = minfer.w4a16_pack(codes.to(torch.uint8)), torch.ones(3, n, dtype=torch.bfloat16, device=DEVICE)
    a = torch.eye(k, device=DEVICE).to(dtype_of(kernel))
    have = minfer.w4a8_gemm(a, torch.ones(1, device=DEVICE), packed, scales, kernel=name)
    assert torch.equal(have.t().float(), codes.float() - 8)


@pytest.mark.parametrize("group_size", (-1, 128, 512))
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_as_planned(dtype, shape, group_size):
    """The plan's choice, two runs, out=, and the path of devices without such kernels."""
    torch.manual_seed(sum(shape))
    m, n, k = shape
    w, (a, a_scale) = cases.weight(n, k, group_size, device=DEVICE), cases.activations(m, k, dtype, DEVICE)
    want, magnitude = cases.truth(a, a_scale, w)
    call = lambda **o: minfer.w4a8_gemm(a, a_scale, *w.arguments(), group_size=group_size, **o)  # noqa: E731
    have, wide = call(), call(kernel="w4a16")
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for result, bound in ((have, cases.relative_bound(dtype, k) if hopper else 2.0**-7), (wide, 2.0**-7)):
        assert mismatch(result, want, magnitude, bound) is None
    assert torch.equal(have, call())
    out = torch.full((m, n + 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    call(out=out[:, :n])
    assert torch.equal(out[:, :n], have) and out[:, n:].isnan().all()


@pytest.mark.parametrize("scales", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_epilogue(dtype, scales):
    """alpha, c of any shape and type, bias, activations, gates, codes: by TMA and by threads."""
    torch.manual_seed(5)
    for (m, n, k), activation in itertools.product(((40, 256, 512), (3, 80, 272), (300, 1008, 384)), ("none", "relu", "gelu", "silu")):
        w, (a, a_scale) = cases.weight(n, k, 128, scales, DEVICE), cases.activations(m, k, dtype, DEVICE)
        magnitude = cases.truth(a, a_scale, w)[1]
        cpu = lambda x: x.cpu() if isinstance(x, torch.Tensor) else x  # noqa: E731
        for c, bias, alpha in (
            (torch.randn(m, n, device=DEVICE).to(scales), torch.randn(n, device=DEVICE).to(scales), 1.0),
            (torch.randn(n, device=DEVICE), None, -0.5),
            (None, torch.randn(n, device=DEVICE), 2.0),
        ):
            options = dict(bias=bias, activation=activation, c=c, alpha=alpha)
            have = minfer.w4a8_gemm(a, a_scale, *w.arguments(), **options)
            want = minfer.w4a8_gemm(*map(cpu, (a, a_scale, *w.arguments())), **{x: cpu(y) for x, y in options.items()}).to(DEVICE)
            slack = 2.0**-9 * abs(alpha) * magnitude + 1e-5 + 2.0**-6 * want.abs().double()
            assert ((have.double() - want.double()).abs() <= slack).all(), (m, n, k, activation)
        gated = minfer.w4a8_gemm_gated(a, a_scale, *w.arguments(), activation=activation)
        want = minfer.w4a8_gemm_gated(*map(cpu, (a, a_scale, *w.arguments())), activation=activation).to(DEVICE)
        assert (gated.double() - want.double()).norm() <= 0.01 * want.double().norm()
        scale = torch.full((1,), 0.05, device=DEVICE)
        codes, _ = minfer.w4a8_gemm(a, a_scale, *w.arguments(), quant="fp8_tensor", scale=scale, activation=activation)
        plain = minfer.w4a8_gemm(a, a_scale, *w.arguments(), activation=activation).double().clamp(-22.4, 22.4)
        assert ((codes.double() * 0.05 - plain).abs() <= 0.07 * plain.abs() + 0.002).all()


def test_operands_at_any_stride():
    """Activations that TMA cannot read are copied; scales of rows may have strides."""
    torch.manual_seed(7)
    m, n, k = 70, 264, 1008
    w, (a, a_scale) = cases.weight(n, k, device=DEVICE), cases.activations(m, k, FP8, DEVICE)
    want = minfer.w4a8_gemm(a, a_scale, *w.arguments())
    wide = torch.full((m + 3, k + 5), 240.0, device=DEVICE).to(FP8)
    wide[2:-1, 3:-2] = a
    spread = torch.full((m, 3), torch.nan, device=DEVICE)
    spread[:, 1:2] = a_scale
    for x, s in ((wide[2:-1, 3:-2], a_scale), (a.t().contiguous().t(), a_scale), (a, spread[:, 1:2]), (a, spread[:, 1])):
        assert torch.equal(minfer.w4a8_gemm(x, s, *w.arguments()), want)


def test_unread_memory_does_not_matter():
    """What is behind the last row may be NaN, as may be its scale."""
    torch.manual_seed(8)
    m, n, k = 13, 136, 400
    w, (a, a_scale) = cases.weight(n, k, device=DEVICE), cases.activations(m, k, FP8, DEVICE)
    memory, scales = torch.full((m + 130, k), torch.nan, device=DEVICE).to(FP8), torch.full((m + 130, 1), torch.nan, device=DEVICE)
    memory[:m], scales[:m] = a, a_scale
    have = minfer.w4a8_gemm(memory[:m], scales[:m], *w.arguments())
    assert have.isfinite().all() and torch.equal(have, minfer.w4a8_gemm(a, a_scale, *w.arguments()))


@pytest.mark.parametrize("name", bad_calls()[1])
def test_errors(name):
    good, wrong = bad_calls(DEVICE)
    changed, message = wrong[name]
    with pytest.raises(RuntimeError, match=f"minfer::w4a8_gemm: .*{message}"):
        minfer.w4a8_gemm(**(good | changed))


@on_hopper
def test_graph_and_late_operands():
    """In a CUDA graph, behind the kernels that write its activations."""
    torch.manual_seed(9)
    w, x = cases.weight(512, 1024, device=DEVICE), torch.randn(300, 1024, device=DEVICE).bfloat16()

    def layer():
        q, scale = minfer.quantize_fp8(x, "token")
        return minfer.w4a8_gemm(q, scale, *w.arguments(), activation="silu")

    want = layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = layer()
    x.mul_(0)
    graph.replay()
    assert have.eq(0).all()
    torch.manual_seed(9)
    _ = cases.weight(512, 1024, device=DEVICE)
    x.copy_(torch.randn(300, 1024, device=DEVICE))
    graph.replay()
    assert torch.equal(have, want)
