"""A norm and the GEMM behind it on a GPU: every kernel of one launch, and two launches, against float64.

Outputs, and workspaces, lie in memory that held NaN before; calls are repeated and have to give the same bits.
"""

import itertools
import math

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES, runs_here

from tests.contracts import numerics_cases as numerics
from tests.contracts.test_registration import check_op
from tests.fuzz.modes import poison_free_memory
from tests.gemm.cases import ACTIVATIONS, name_of
from tests.norm_gemm.cases import DTYPES, EPS, FORMATS, OPERATORS, Case, bad, good, quantized
from tests.quantized_gemm.weight_format_cases import make_weight

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
KERNELS = {k["name"]: k for k in minfer.kernels("norm_gemm") if k["compiled"] or not runs_here()}
# Columns: less than a tile, tails, more tiles than CTAs. k: a part of a unit, tails of units and of the warps' turns, several turns.
SIZES = ((1, 8), (7, 40), (16, 264), (33, 2056), (520, 1000), (4104, 520), (129, 8192))


def same(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def run(case, **more):
    """Calls twice, in memory that held NaN, and checks both; returns D."""
    t = case.make(DEVICE)
    before = None if t["residual"] is None else t["residual"].clone()
    results = []
    for _ in range(2):
        if before is not None:
            t["residual"].copy_(before)
        poison_free_memory(torch.device(DEVICE, torch.cuda.current_device()))
        results.append(case.call(t, **more))
        case.check(results[-1], t, before, str(more))
    assert same(*results), f"{case} {more}: other bits in a second run"
    if case.pad:
        for name in ("x", "residual") if before is not None else ("x",):
            whole = t[name].as_strided((case.m, case.k + case.pad), t[name].stride())
            assert whole[:, case.k :].isnan().all(), f"{case} {more}: {name} was written beside its rows"
    return results[0]


# ---- one launch ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_sizes(name):
    """Every number of tokens, tails of columns and of k, rows that are padded."""
    kernel = KERNELS[name]
    dtype = DTYPE_OF[kernel["ab_type"]]
    for m in range(1, kernel["tile_m"] + 1):
        for i, (n, k) in enumerate(SIZES):
            bias = (None, dtype, torch.float32)[(m + i) % 3]
            k = k if m <= 8 else min(k, 4096)  # so many rows fit into shared memory
            case = Case(m, n, k, dtype, residual=(m + i) % 2 == 0, weighted=i % 3 != 2, bias=bias, pad=8 * (i % 3))
            run(case, kernel=name)


@pytest.mark.parametrize("name", KERNELS)
def test_epilogues(name):
    """Activations, gates, offsets of the weight, numbers of all sizes."""
    kernel = KERNELS[name]
    dtype = DTYPE_OF[kernel["ab_type"]]
    for i, (activation, gated) in enumerate(itertools.product(ACTIVATIONS, (False, True))):
        bias = (None, dtype, torch.float32)[i % 3]
        scale, offset = (0.02, 1.0, 8.0)[i % 3], (0.0, 1.0, -0.3)[i % 3]
        case = Case(
            kernel["tile_m"] - i % 3, 16 * (3 + 97 * (i % 2)), 1096, dtype, gated, i % 2 == 0, True, bias, activation, offset, scale
        )
        run(case, kernel=name)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_fill_shared_memory(name):
    """The longest rows that fit, and a refusal of the next ones."""
    kernel = KERNELS[name]
    dtype, m = DTYPE_OF[kernel["ab_type"]], kernel["tile_m"]
    free = torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin - kernel["smem_bytes"]
    k = (free // (2 * m) - 32) // 64 * 64
    assert k > 1024
    run(Case(m, 40, k, dtype), kernel=name)
    with pytest.raises(RuntimeError, match="cannot compute this problem: the normalised rows do not fit into shared memory"):
        run(Case(m, 40, k + 64, dtype), kernel=name)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_is_its_own(name):
    """With one kernel a row's bits do not depend on the rows beside it."""
    kernel = KERNELS[name]
    case = Case(kernel["tile_m"], 200, 2056, DTYPE_OF[kernel["ab_type"]], residual=False)
    t = case.make(DEVICE)
    want = case.call(t, kernel=name)
    for m in range(1, kernel["tile_m"]):
        assert same(case.change(m=m).call(t | {"x": t["x"][:m]}, kernel=name), want[:m])
    assert same(case.call(t | {"x": t["x"].flip(0)}, kernel=name), want.flip(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_special_numbers(dtype):
    """A row with a NaN or an infinity is wrong alone; a weight that is infinite, in its column alone."""
    case = Case(4, 64, 512, dtype, residual=False)
    t = case.make(DEVICE)
    want = case.call(t, kernel="one_launch")
    t["x"][1, 5], t["x"][2, 511] = math.nan, math.inf
    have = case.call(t, kernel="one_launch")
    assert have[1:3].isnan().all() and same(have[0], want[0]) and same(have[3], want[3])
    t["w"][17, 8] = math.inf
    again = case.call(t, kernel="one_launch")
    assert not again[0, 17].isfinite() and same(again[0, :17], want[0, :17]) and same(again[0, 18:], want[0, 18:])


# ---- two launches, and what the plan chooses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_wide_rows_with_a_residual(dtype):
    """Rows that the norm holds in rings, where a residual takes half of the room."""
    run(Case(300, 24, 65536, dtype, residual=True))


@pytest.mark.parametrize("kernel", [None, "two_launches"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_both_paths(dtype, kernel):
    """Any shape: what one launch cannot read, or holds too many tokens, is two."""
    for i, (m, n, k) in enumerate(
        (
            *((m, 144, 264) for m in range(1, 18)),
            (1, 4096, 4096),
            (3, 2112, 4096),
            (5, 33, 77),
            (8, 24, 16384),
            (64, 272, 1000),
            (300, 48, 512),
        )
    ):
        gated = n % 16 == 0 and i % 3 == 0
        bias = (None, dtype, torch.float32)[i % 3]
        case = Case(m, n, k, dtype, gated, i % 2 == 0, i % 5 != 0, bias, ACTIVATIONS[i % len(ACTIVATIONS)], pad=(0, 1, 8)[i % 3])
        run(case, kernel=kernel)


def test_views():
    """Views of x, of the residual and of b that no single launch reads, and those that it does, have one answer."""
    case = Case(6, 4128, 512, torch.float16, bias=torch.float32)
    t = case.make(DEVICE)
    before = t["residual"].clone()
    case.check(case.call(t), t, before)
    x = t["x"].clone()
    for view in (
        torch.empty(6, 513, device=DEVICE).half()[:, 1:],
        torch.empty(512, 6, device=DEVICE).half().t(),
        torch.empty(2, 5, 512, device=DEVICE).half()[:, 1:4],
        torch.empty(12, 512, device=DEVICE).half()[::2],
    ):
        view.copy_(x.view(view.shape))
        for own in (before.clone().view(view.shape), torch.empty_like(view).copy_(before.view(view.shape))):
            have = case.call(t | {"x": view, "residual": own})
            assert have.shape == (*view.shape[:-1], 4128) and have.is_contiguous()
            case.check(have.view(6, 4128), t | {"x": x, "residual": own.reshape(6, 512)}, before, str(view.stride()))
    for w in (t["w"].t().contiguous().t(), torch.empty(4128, 513, device=DEVICE).half()[:, 1:]):
        w.copy_(t["w"].clone())
        t["residual"].copy_(before)
        case.check(case.call(t | {"w": w}), t, before, str(w.stride()))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized(name, gated):
    """The norm by the row kernel and the product as planned: bit by bit the two operators."""
    for m, dtype in itertools.product((1, 5, 16, 130), DTYPES):
        weight = make_weight(name, 272, 520, {"mxfp4": 32, "nvfp4": 16}.get(name, 64), dtype=dtype, device=DEVICE)
        x, residual = (torch.randn(m, 520, device=DEVICE).to(dtype) for _ in range(2))
        norm_weight, bias = torch.randn(520, device=DEVICE).to(dtype), torch.randn(272, device=DEVICE)
        perm = torch.randperm(520, device=DEVICE).int() if m == 5 else None
        packed, options = weight.packed
        options |= dict(bias=bias, perm=perm, activation="silu")
        own = residual.clone()
        y = minfer.add_rms_norm(x, own, norm_weight, EPS)
        want = (weight.op("gemm_gated") if gated else weight.op("gemm"))(y, *packed, **options)
        poison_free_memory(torch.device(DEVICE, torch.cuda.current_device()))
        have = quantized(FORMATS[name], gated)(x, norm_weight, *packed, EPS, residual=residual, **options)
        assert same(have, want) and same(residual, own), (name, m)


# ---- streams, graphs, errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["one_launch", "two_launches"])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_graph(residual, kernel):
    """Captured and replayed many times, with other contents: what CTAs tell each other in one run must not reach the next."""
    case = Case(3, 4112, 2048, residual=residual)
    t = case.make(DEVICE)
    case.call(t, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.call(t, kernel=kernel)
        again = case.call(t, kernel=kernel)
    for _ in range(20):
        fresh = case.make(DEVICE)
        for name, x in fresh.items():
            if x is not None:
                t[name].copy_(x)
        before = None if not residual else t["residual"].clone()
        out.fill_(math.nan)
        again.fill_(math.nan)
        graph.replay()
        if residual:
            middle = numerics.rounded(t["x"].double() + before.double(), case.dtype).to(case.dtype)
            last = t["residual"].clone()
            case.check(out, t | {"residual": middle}, before)
            case.check(again, t | {"residual": last}, middle)
        else:
            case.check(out, t, None)
            assert same(out, again)


@pytest.mark.parametrize("kernel", ["one_launch", "two_launches"])
def test_streams(kernel):
    """On two streams at once, behind what they still do."""
    case = Case(4, 2064, 4096)
    t = case.make(DEVICE)
    before = t["residual"].clone()
    want = case.call(t, kernel=kernel)
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            own = before.clone()
            torch.cuda._sleep(10_000_000)
            for _ in range(30):
                own.copy_(before)
                have = case.call(t | {"residual": own}, kernel=kernel)
            found.append((have, own))
    torch.cuda.synchronize()
    for have, own in found:
        assert same(have, want) and same(own, t["residual"])


def test_chain():
    """Layer after layer, each of what the one before wrote, in dependent launches: one launch and two, against the two operators."""
    k, layers = 2048, 6
    weights = [(torch.randn(k, k, device=DEVICE) / k**0.5).bfloat16() for _ in range(layers)]
    norm_weight = (1 + torch.randn(k, device=DEVICE) / 4).bfloat16()
    start, residual = torch.randn(2, k, device=DEVICE).bfloat16(), torch.randn(2, k, device=DEVICE).bfloat16()

    def chain(kernel):
        x, own = start, residual.clone()
        for w in weights:
            x = minfer.rms_norm_gemm(x, norm_weight, w.t(), EPS, residual=own, kernel=kernel)
        return x.double(), own.double()

    x, own = start, residual.clone()
    for w in weights:
        x = minfer.gemm(minfer.add_rms_norm(x, own, norm_weight, EPS), w.t())
    for kernel in ("one_launch", "two_launches", None):
        for have, want in zip(chain(kernel), (x.double(), own.double()), strict=True):
            assert (have - want).norm() <= 0.02 * want.norm(), kernel
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(chain(kernel), chain(kernel), strict=True)), kernel


@pytest.mark.parametrize("op", OPERATORS)
def test_errors(op):
    for change, message in bad(op, DEVICE):
        call = good(op, DEVICE) | change
        before = call["residual"].clone() if "residual" in change else None
        with pytest.raises(RuntimeError, match=f"minfer::{op}: {message}"):
            getattr(minfer, op)(**call)
        assert before is None or torch.equal(call["residual"], before), message
    getattr(minfer, op)(**good(op, DEVICE))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(m=17), "too many tokens"),
        (dict(k=4097), "k must be a multiple of 8"),
        (dict(pad=1), "must begin at multiples of 16 bytes"),
        (dict(k=1 << 18), "rows that do not fit into shared memory"),
    ],
    ids=str,
)
def test_what_one_launch_cannot(change, message):
    """Refused with the reason where it is asked for; the residual is as it was. Otherwise computed in two."""
    case = Case(2, 48, 4096).change(**change)
    t = case.make(DEVICE)
    before = t["residual"].clone()
    with pytest.raises(RuntimeError, match=message):
        case.call(t, kernel="one_launch")
    assert same(t["residual"].contiguous(), before)
    case.check(case.call(t), t, before)


def test_errors_of_kernels():
    """A GEMM's kernel by name is two launches; one that cannot is refused before the residual is written."""
    case = Case(2, 48, 64)
    t = case.make(DEVICE)
    before = t["residual"].clone()
    names = {k["name"]: k for k in minfer.kernels("gemm") if k["compiled"]}
    for name in [*(n for n, k in names.items() if k["ab_type"] == "f16")][:1]:
        with pytest.raises(RuntimeError, match="cannot compute this problem"):
            case.call(t, kernel=name)
        assert same(t["residual"], before)
    name = next(n for n, k in names.items() if (k["ab_type"], k["a_major"], k["b_major"], k["arch"]) == ("bf16", "k", "k", 80))
    case.check(case.call(t, kernel=name), t, before)


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck(op):
    call = good(op, DEVICE)
    for x in call.values():
        if isinstance(x, torch.Tensor) and x.dtype == torch.float16:
            x.copy_(torch.rand(x.shape, device=DEVICE) + 0.5)
    overload = getattr(torch.ops.minfer, op).default
    check_op(overload, (), call | {"residual": torch.rand(3, 64, device=DEVICE).half(), "bias": torch.rand(32, device=DEVICE)})
