"""grouped_gemm_fp8, grouped_gemm_int8, their masked forms and layers on a GPU: every kernel by name, the plan's choice, scales of every
kind and at any strides, epilogues, types of D, routing of every kind, adversarial magnitudes, graphs.

Outputs lie in NaN-filled memory; the truth is that of the dequantised operands in float64, with the bounds of docs/numerics.md.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import minfer
import pytest
import torch

from tests.moe import grouped_scaled_cases as cases
from tests.moe.grouped_cases import counts_of, offsets_of
from tests.moe.grouped_scaled_cases import EXPERT_KINDS, LAYOUTS, ROW_KINDS, SHAPES, same_bits
from tests.moe.test_grouped_scaled_cpu import every_bad_call
from tests.scaled_gemm.cases import DTYPES, FP8

DEVICE = "cuda"
ALL = minfer.kernels("moe_scaled")
KERNELS = {k["name"]: k for k in ALL if k["compiled"]} or {k["name"]: k for k in ALL}
TYPES_OF_D = {FP8: (torch.bfloat16, torch.float16, FP8), torch.int8: (torch.bfloat16, torch.float16)}
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "relu2", "swigluoai")
# Pairs of kinds of scales that test every mainloop, and options that test every epilogue and both gathers; each kernel has all of both.
PAIRS = {
    FP8: (
        *(("rows", "columns"), ("one", "one"), ("blocks128", "blocks"), ("blocks64", "columns"), ("blocks32", "experts")),
        *(("e8m0", "e8m0"), ("rows", "blocks"), ("blocks32", "blocks")),
    ),
    torch.int8: (("rows", "columns"), ("one", "one"), ("blocks128", "experts"), ("blocks64", "columns"), ("blocks32", "one")),
}
OPTIONS = (
    {},
    {"gather": True, "row_scale": True, "bias": torch.float32, "activation": "gelu"},
    *({"layout": layout, "activation": "silu", "bias": torch.bfloat16, "gather": layout != "halves"} for layout in LAYOUTS),
    {"layout": "halves", "activation": "swigluoai", "row_scale": True, "behind": 3},
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and not cases.has_kernels(DEVICE), reason="no kernels for this GPU in the build"),
]


def fits(shape, options):
    """Whether b's columns can be gate and up in the layout."""
    return shape[2] % {"blocks": 16, "halves": 2, "alternating": 2}.get(options.get("layout"), 1) == 0


def judge(case, *, fast=False, **more):
    """Why a call into poisoned memory is wrong, or None; functional and into ``out``, whose rows begin at vectors or do not."""
    fast_accum = dict(fast_accum=True) if fast else {}
    have = case.call(**fast_accum, **more)
    problem = cases.problem_of(case, have, fast=fast)
    if problem is not None:
        return problem
    if not same_bits(case.call(**fast_accum, **more), have):
        return "two runs differ"
    rows, columns = have.shape
    for padding in (-columns % 16 + 16, 3):
        out, memory = cases.poisoned(rows, columns, have.dtype, DEVICE, padding=padding)
        case.call(out=out, **fast_accum, **more)
        if not same_bits(out.contiguous(), have):
            return f"out= with rows {columns + padding} apart has other bits"
        if not cases.untouched_around(out, memory):
            return f"memory around out= with rows {columns + padding} apart was written"
    return None


def report(failures):
    assert not failures, "\n".join([f"{len(failures)} wrong", *failures[:12]])


def takes(name, group):
    """Whether a kernel takes scales of rows of ``group`` of k."""
    return group is None or group >= KERNELS[name]["group_multiple"]


def takes_gates(name):
    """Whether a kernel's tiles may hold gates and ups."""
    return KERNELS[name]["swap"] or KERNELS[name]["tile_n"] % 128 == 0


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel by name over all shapes, with all that a mainloop, an epilogue and a loader can be asked for; D of every type."""
    dtype, failures = FP8 if KERNELS[name]["ab_type"] == "e4m3" else torch.int8, []
    for number, (shape, (a_kind, b_kind)) in enumerate(itertools.product(SHAPES, PAIRS[dtype])):
        torch.manual_seed(number)
        options = OPTIONS[number % len(OPTIONS)]
        if not fits(shape, options) or not takes(name, int(a_kind[6:]) if a_kind.startswith("blocks") else None):
            continue
        if options.get("layout") and not takes_gates(name):
            options = {}
        case = cases.make_case(dtype, shape, a_kind, b_kind, device=DEVICE, **options)
        gathers = ("@gather_first=0", "@gather_first=1") if shape[3] % 16 == 0 else ("@gather_first=0",)
        calls = [({}, {}), ({}, {"out_dtype": torch.float16, "bias": None})]
        if dtype == FP8:
            calls += [({"fast": True}, {}), ({}, {"out_scale": torch.full((1,), 2.0, device=DEVICE)})]
        for how, more in calls:
            for launch in gathers if "gather" in case.options else ("",):
                problem = judge(case.with_options(**more), **how, kernel=f"{name}{launch}")
                if problem is not None:
                    failures.append(f"{shape} {a_kind} {b_kind} {options} {list(how)} {list(more)} {launch}: {problem}")
    report(failures)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_as_planned(dtype, shape):
    """All pairs of kinds of scales; gathered and gated ones in turn."""
    failures = []
    for number, (a_kind, b_kind) in enumerate(itertools.product(ROW_KINDS[dtype], EXPERT_KINDS[dtype])):
        torch.manual_seed(number)
        options = OPTIONS[number % len(OPTIONS)]
        options = options if fits(shape, options) else {}
        case = cases.make_case(dtype, shape, a_kind, b_kind, device=DEVICE, **options)
        problem = judge(case)
        if problem is not None:
            failures.append(f"{a_kind} {b_kind} {options}: {problem}")
    report(failures)


@pytest.mark.parametrize("layout", (None, *LAYOUTS))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_epilogues(dtype, layout):
    """Every activation, with biases of both types, in every type of D."""
    failures = []
    for number, activation in enumerate(ACTIVATIONS):
        if activation == "swigluoai" and layout is None:
            continue
        for bias, out in itertools.product((None, torch.float32, "own"), TYPES_OF_D[dtype]):
            torch.manual_seed(number)
            own = torch.float16 if out == FP8 else out
            how = dict(layout=layout, activation=activation, row_scale=number % 2 == 0, bias=own if bias == "own" else bias, size=0.008)
            case = cases.make_case(dtype, (6, 200, 160, 256), "rows", "columns", device=DEVICE, **how)
            codes = dict(out_scale=torch.full((1,), 0.02, device=DEVICE)) if out == FP8 else {"out_dtype": out}
            problem = judge(case.with_options(**codes))
            if problem is not None:
                failures.append(f"{activation} {bias} {out}: {problem}")
    report(failures)


@pytest.mark.parametrize("kind", ("ragged", "even", "one"))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_routing(dtype, kind):
    """The planner's choice from no row to thousands, whatever the routing: empty experts, all rows with one."""
    pair, failures = ("blocks128", "blocks") if dtype == FP8 else ("rows", "columns"), []
    for (experts, n, k), rows in itertools.product(((8, 256, 512), (128, 192, 256), (1, 512, 1024)), (0, 1, 2, 17, 64, 129, 1000, 5000)):
        for gather in (False, True):
            torch.manual_seed(rows)
            how = dict(kind=kind, gather=gather, row_scale=True, behind=rows // 7)
            problem = judge(cases.make_case(dtype, (experts, rows, n, k), *pair, device=DEVICE, **how))
            if problem is not None:
                failures.append(f"{experts} experts, {rows} rows, {n} x {k}, gather {gather}: {problem}")
    report(failures)


@pytest.mark.parametrize(
    "shape", ((3, 20, 40, 77), (4, 33, 31, 64), (2, 10, 20, 9), (5, 70, 100, 40), (2, 9, 16, 0), (2, 3, 6, 1)), ids=str
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_odd_shapes(dtype, shape):
    """k and n that TMA does not address, halves that are no multiple of 8, and k = 0."""
    for a_kind, b_kind in itertools.product(ROW_KINDS[dtype], EXPERT_KINDS[dtype]):
        for layout in (None, "halves", "alternating"):
            if layout and shape[2] % 2:
                continue
            case = cases.make_case(dtype, shape, a_kind, b_kind, device=DEVICE, layout=layout, bias=torch.float32, activation="silu")
            problem = judge(case)
            assert problem is None, (a_kind, b_kind, layout, problem)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_masked(dtype):
    shapes = ((4, 7, 32, 80), (8, 130, 256, 512), (64, 16, 192, 272), (5, 1, 64, 128), (1, 300, 96, 77))
    for number, (experts, max_rows, n, k) in enumerate(shapes):
        for (a_kind, b_kind), layout in itertools.product(PAIRS[dtype], (None, LAYOUTS[number % 3])):
            how = dict(layout=layout, activation="silu", row_scale=True, bias=torch.bfloat16, device=DEVICE)
            case = cases.masked_case(cases.make_case(dtype, (experts, 10, n, k), a_kind, b_kind, **how), max_rows)
            out = case.call()
            problem = cases.problem_of(case, out)
            assert problem is None, (experts, max_rows, a_kind, b_kind, layout, problem)
            inside = torch.arange(max_rows, device=DEVICE)[None, :] < case.ends[:, None]
            left = torch.full_like(out, math.nan)
            case.call(out=left)
            assert torch.equal(left[inside], out[inside]) and bool(left[~inside].isnan().all()), (a_kind, b_kind, layout)
            case.ends = torch.full_like(case.ends, 10**6)  # clamped
            all_rows = case.call()
            case.ends = torch.full_like(case.ends, max_rows)
            assert torch.equal(all_rows, case.call()) and cases.problem_of(case, all_rows) is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_views(dtype):
    """Operands that TMA cannot read are copied; scales are read where they are, at any strides."""
    pair = ("blocks128", "blocks") if dtype == FP8 else ("blocks64", "columns")
    case = cases.make_case(dtype, (4, 50, 96, 400), *pair, device=DEVICE, gather=True)
    want, a, b = case.call(), case.a, case.weight.mT
    grouped = cases.operator(dtype)
    wide = torch.full((a.shape[0] + 3, 420), 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype)
    for shift in (0, 16, 3):  # aligned to 16 bytes or not
        view = wide[2 : 2 + a.shape[0], shift : shift + 400]
        view.copy_(a)
        assert torch.equal(grouped(view, b, case.a_scale, case.b_scale, case.ends, **case.options), want), shift
    big = torch.full((4, 100, 416), 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype)
    big[:, :96, :400] = case.weight
    columns = torch.full((case.a_scale.shape[1], 3 * a.shape[0]), math.nan, device=DEVICE).t()[::3]
    columns.copy_(case.a_scale)
    reversed_scale = case.b_scale.mT.contiguous().mT if case.b_scale.dim() == 3 else case.b_scale.t().contiguous().t()
    for x, y, x_scale, y_scale in (
        (a, big[:, :96, :400].mT, case.a_scale, case.b_scale),
        (a, b.contiguous(), case.a_scale, case.b_scale),
        (a.t().contiguous().t(), b, case.a_scale, case.b_scale),
        (a, b, columns, case.b_scale),
        (a, b, case.a_scale, reversed_scale),
    ):
        assert torch.equal(grouped(x, y, x_scale, y_scale, case.ends, **case.options), want)
    tall = torch.zeros(50, 99, device=DEVICE, dtype=torch.bfloat16)
    case.call(out=tall[:, 1:97])  # rows that are not 16-byte aligned
    assert torch.equal(tall[:, 1:97], want) and not tall[:, 0].any() and not tall[:, 97:].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_masked_views(dtype):
    """Slabs that do not follow each other, scales by columns."""
    case = cases.masked_case(cases.make_case(dtype, (4, 10, 96, 144), "blocks64", "columns", device=DEVICE), 9)
    want = case.call()
    spaced = torch.full((4, 11, 160), 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype)[:, :9, :144]
    spaced.copy_(case.a)
    columns = torch.full((4, 3, 16), math.nan, device=DEVICE).mT[:, :9]
    columns.copy_(case.a_scale)
    case.a, case.a_scale = spaced, columns
    assert torch.equal(case.call(), want)


def by_columns(scales):
    """The same numbers, those of a group of k next to each other, groups a multiple of 16 bytes apart."""
    rows, groups = scales.shape
    return torch.full((groups, -(-rows // 4) * 4), math.nan, device=scales.device)[:, :rows].copy_(scales.t()).t()


@pytest.mark.parametrize("group", (64, 128))
def test_rows_and_scales_of_nobody_do_not_matter(group):
    """What is behind the last row, a row that nothing gathers, an expert without rows: all may be NaN, codes and scales."""
    case = cases.make_case(FP8, (5, 60, 136, 400), f"blocks{group}", "blocks", device=DEVICE)
    case.ends = torch.tensor([9, 9, 30, 30, 41], dtype=torch.int32, device=DEVICE)
    case.a_scale = by_columns(case.a_scale)
    names = [name for name, kernel in KERNELS.items() if kernel["ab_type"] == "e4m3" and takes(name, group)]
    want = {name: case.call(kernel=name) for name in names}
    case.a.view(torch.uint8)[41:] = 0x7F
    case.a_scale[41:] = math.nan
    case.weight.view(torch.uint8)[[1, 3]] = 0x7F
    case.b_scale[[1, 3]] = math.nan
    inside = torch.arange(41, device=DEVICE, dtype=torch.int32)
    for name in names:
        have = case.call(kernel=name)
        assert torch.equal(have, want[name]) and have.isfinite().all() and not have[41:].any(), name
        for garbage, launch in itertools.product((-1, 60, 2**31 - 1, -(2**31)), ("0", "1")):
            gather = torch.cat([inside, torch.full((19,), garbage, device=DEVICE, dtype=torch.int32)])
            assert torch.equal(case.call(gather=gather, kernel=f"{name}@gather_first={launch}"), want[name]), (name, garbage)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_indices_out_of_range_stay_in_memory(dtype):
    """Offsets that do not ascend or reach behind the rows are the caller's mistake, and gathered rows that are not there count as zeros: no
    other memory is touched."""
    case = cases.make_case(dtype, (4, 40, 64, 128), "blocks128", "columns" if dtype == torch.int8 else "blocks", device=DEVICE)
    case.a_scale = by_columns(case.a_scale)
    names = [name for name, kernel in KERNELS.items() if (kernel["ab_type"] == "e4m3") == (dtype == FP8)]
    for ends in ([-5, 10, 1000, 2000], [30, 10, 40, 40], [50, 60, 70, 80]):
        case.ends = torch.tensor(ends, device=DEVICE, dtype=torch.int32)
        for kernel in (None, *names):
            out, memory = cases.poisoned(40, 64, torch.bfloat16, DEVICE)
            case.call(out=out, kernel=kernel)
            assert cases.untouched_around(out, memory), kernel
    case.ends = torch.tensor([10, 20, 30, 40], device=DEVICE, dtype=torch.int32)
    inside = torch.arange(40, device=DEVICE, dtype=torch.int32)
    outside = torch.arange(40, device=DEVICE) % 3 == 0
    want = torch.where(outside[:, None], 0.0, case.call(gather=inside))
    for value in (-1, 40, 10**6, 2**31 - 1, -(2**31)):
        gather = torch.where(outside, value, inside).int()
        for name, launch in itertools.product(names, ("0", "1")):
            own = torch.where(outside[:, None], 0.0, case.call(gather=inside, kernel=f"{name}@gather_first={launch}"))
            assert torch.equal(case.call(gather=gather, kernel=f"{name}@gather_first={launch}"), own), (name, value)
        assert torch.equal(case.call(gather=gather), want), value


@pytest.mark.parametrize("how", ({}, {"layout": "blocks", "activation": "silu"}), ids=("plain", "gated"))
def test_scales_by_tma(how):
    """Scales that a kernel may load together, from rows and k tiles that begin inside 16 bytes: as by any other way."""
    names = [name for name, kernel in KERNELS.items() if kernel["ab_type"] == "e4m3" and (not how or takes_gates(name))]
    for shape in ((5, 601, 272, 1152), (3, 1030, 512, 640), (2, 300, 1008, 512)):
        case = cases.make_case(FP8, shape, "blocks128", "blocks", device=DEVICE, **how)
        problem = judge(case)
        assert problem is None, problem
        want = {name: case.call(kernel=name) for name in names}
        case.a_scale = by_columns(case.a_scale)
        weight_scales = case.b_scale
        for padding in (0, 3):  # of a line of the weight's scales
            blocks = weight_scales.shape[-1]
            wide = -(-blocks // 4) * 4 + padding
            case.b_scale = torch.full((*weight_scales.shape[:-1], wide), math.nan, device=DEVICE)[..., :blocks].copy_(weight_scales)
            for name in names:
                assert torch.equal(case.call(kernel=name), want[name]), (shape, padding, name)


def test_nan_stays():
    """A NaN in a row, a weight or a scale reaches exactly the outputs that it belongs to."""
    for layout, activation in ((None, "none"), ("halves", "silu"), ("halves", "swigluoai")):
        for spoilt in ("a", "a_scale"):
            case = cases.make_case(
                FP8, (4, 60, 64, 256), "blocks128", "blocks", device=DEVICE, kind="even", layout=layout, activation=activation
            )
            if spoilt == "a":
                case.a.view(torch.uint8)[7, 100] = 0x7F
            else:
                case.a_scale[7, 1] = math.nan
            out = case.call()
            assert bool(out[7].isnan().all()) and not bool(out[:7].isnan().any()) and not bool(out[8:].isnan().any()), (layout, spoilt)
    exponents = cases.make_case(FP8, (4, 60, 64, 256), "e8m0", "e8m0", device=DEVICE)
    exponents.a_scale[7, 1] = 255
    out = exponents.call()
    assert bool(out[7].isnan().all()) and not bool(out[:7].isnan().any()) and not bool(out[8:].isnan().any())


def test_promotion_keeps_what_fast_accumulation_loses():
    """A large product at the start, small ones behind it: the tensor core's accumulator drops them, sums of 128 of k do not."""
    experts, rows, n, k = 2, 64, 128, 8192
    a = torch.full((rows, k), 1.0, device=DEVICE).to(FP8)
    w = torch.full((experts, n, k), 0.0625, device=DEVICE).to(FP8)
    a[:, 0], w[:, :, 0] = 448.0, 448.0
    one = torch.full((1,), 2.0**-8, device=DEVICE)
    exact = (448.0**2 + (k - 1) * 0.0625) * 2.0**-8
    names = [name for name, kernel in KERNELS.items() if kernel["ab_type"] == "e4m3"]
    for used, name in itertools.product((1, rows), names):
        ends = torch.tensor([used // 2, used], dtype=torch.int32, device=DEVICE)
        operands = (a[:used], w.mT, one, torch.ones(1, device=DEVICE), ends)
        kept, lost = (
            minfer.grouped_gemm_fp8(*operands, out_dtype=torch.float16, fast_accum=fast, kernel=name).double() for fast in (False, True)
        )
        assert (kept - exact).abs().max() <= 0.32, name  # a rounding to float16, and what the first 128 lose
        if KERNELS[name]["arch"] == 90:
            assert (lost - exact).abs().min() > 2 * (kept - exact).abs().max(), name
        else:  # mma.sync: sums of 128 of k are added up in any case
            assert torch.equal(lost, kept), name


FORCED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import minfer
from tests.moe import test_grouped_scaled_gpu as tests
from tests.scaled_gemm.cases import DTYPES, FP8

for dtype in DTYPES.values():
    for number, shape in enumerate(tests.SHAPES):
        a_kind, b_kind = tests.PAIRS[dtype][number % len(tests.PAIRS[dtype])]
        case = tests.cases.make_case(dtype, shape, a_kind, b_kind, device="cuda")
        problem = tests.judge(case)
        assert problem is None, (dtype, shape, problem)
    tests.test_layer(dtype)
print("portable")
"""


def test_portable_kernels_by_environment():
    """MINFER_FORCE_ARCH=80 takes the path of GPUs other than Hopper."""
    command = [sys.executable, "-c", FORCED, str(Path(__file__).parents[2])]
    done = subprocess.run(command, env=os.environ | {"MINFER_FORCE_ARCH": "80"}, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "portable", done.stderr


@pytest.mark.parametrize("size", (2.0**-12, 1.0, 2.0**9), ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_magnitudes(dtype, size):
    """Scales of very different sizes along k, and rows of very different sizes."""
    for a_kind, b_kind in PAIRS[dtype]:
        case = cases.make_case(dtype, (4, 90, 128, 1104), a_kind, b_kind, device=DEVICE, size=0.05)
        if case.a_scale.dtype == torch.float32 and case.a_scale.dim() == 2:
            case.a_scale *= torch.logspace(-3, 3, case.a_scale.shape[1], base=2.0, device=DEVICE)
        if case.a_scale.dtype == torch.float32:
            case.a_scale *= size
        problem = judge(case)
        assert problem is None, (a_kind, b_kind, problem)


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel["ab_type"] == "s8"])
def test_sums_of_int8_are_exact(name):
    """Of numbers whose sums are below 2^24: D is the integer, rounded once, also where powers of two scale groups of k."""
    for (experts, rows, n, k), group in itertools.product(((4, 90, 96, 1040), (3, 40, 200, 77), (8, 300, 64, 528)), (None, 128, 64, 32)):
        if not takes(name, group):
            continue
        torch.manual_seed(k)
        a, w = (torch.randint(-128, 128, shape, device=DEVICE).to(torch.int8) for shape in ((rows, k), (experts, n, k)))
        ends = offsets_of(counts_of(experts, rows), DEVICE)
        one = torch.ones(1, device=DEVICE)
        scale, factor = one, torch.ones(rows, k, dtype=torch.float64, device=DEVICE)
        if group is not None:
            scale = torch.exp2(torch.randint(-3, 1, (rows, -(-k // group)), device=DEVICE).float())
            factor = scale.double().repeat_interleave(group, 1)[:, :k]
        exact = torch.zeros(rows, n, dtype=torch.float64, device=DEVICE)
        for expert, (begin, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
            exact[begin:end] = (a.double() * factor)[begin:end] @ w[expert].double().t()
        for out_dtype, size in ((torch.bfloat16, 1.0), (torch.float16, 2.0**-9)):
            have = minfer.grouped_gemm_int8(a, w.mT, scale, one * size, ends, out_dtype=out_dtype, kernel=name)
            assert torch.equal(have, (exact * size).to(out_dtype)), (k, group)
    small = (
        torch.randint(-1, 2, (50, 7168), device=DEVICE).to(torch.int8),
        torch.randint(-1, 2, (2, 40, 7168), device=DEVICE).to(torch.int8),
    )
    ends = torch.tensor([20, 50], dtype=torch.int32, device=DEVICE)
    have = minfer.grouped_gemm_int8(small[0], small[1].mT, one, one, ends, out_dtype=torch.float16, kernel=name)
    exact = torch.cat([small[0][:20].double() @ small[1][0].double().t(), small[0][20:].double() @ small[1][1].double().t()])
    assert torch.equal(have, exact.half()) and torch.equal(have.double(), exact)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_graphs_follow_their_routing(dtype):
    """One captured call, replayed with other tokens, scales, offsets and indices; on a side stream, behind another kernel."""
    pair, shape = ("blocks128", "blocks") if dtype == FP8 else ("rows", "columns"), (16, 200, 256, 256)
    how = dict(device=DEVICE, gather=True, row_scale=True, layout="halves", activation="silu")
    case = cases.make_case(dtype, shape, *pair, **how)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.a_scale.mul_(1.0)
        out = case.call()
    for kind in ("ragged", "one", "even", "ragged"):
        new = cases.make_case(dtype, shape, *pair, kind=kind, **how)
        for old, now in ((case.a.view(torch.uint8), new.a.view(torch.uint8)), (case.a_scale, new.a_scale), (case.ends, new.ends)):
            old.copy_(now)
        for name in ("gather", "row_scale"):
            case.options[name].copy_(new.options[name])
        out.fill_(math.nan)
        graph.replay()
        problem = cases.problem_of(case, out)
        assert problem is None, (kind, problem)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_chain(dtype):
    """Codes and products in turn, launched to overlap; always the same bits."""
    case = cases.make_case(dtype, (8, 300, 512, 512), "rows", "columns", device=DEVICE, size=0.01)
    quantize = minfer.quantize_int8 if dtype == torch.int8 else lambda x: minfer.quantize_fp8(x, "token")
    grouped = cases.operator(dtype)

    def chain():
        x = torch.ones(300, 512, device=DEVICE, dtype=torch.bfloat16) * torch.arange(1, 513, device=DEVICE).bfloat16()
        for _ in range(3):
            x = grouped(*[y for pair in zip(quantize(x), (case.weight.mT, case.b_scale), strict=True) for y in pair], case.ends)
        return x

    first = chain()
    torch.cuda.synchronize()
    for _ in range(40):
        assert torch.equal(chain(), first)


def test_large_offsets():
    """Weights and outputs beyond 2^31 elements."""
    experts, n, k = 20, 16384, 7168  # 2.3e9 weights
    b = torch.randint(-127, 128, (experts, n, k), device=DEVICE, dtype=torch.int8)
    counts = torch.zeros(experts, dtype=torch.int64)
    counts[0], counts[-1] = 3, 5
    a, one = torch.randint(-128, 128, (8, k), device=DEVICE, dtype=torch.int8), torch.full((1,), 2.0**-8, device=DEVICE)
    out = minfer.grouped_gemm_int8(a, b.mT, one, one, offsets_of(counts, DEVICE))
    want = torch.cat([a[:3].double() @ b[0].double().T, a[3:].double() @ b[-1].double().T]) * 2.0**-16
    assert cases.off_by_norm(out, want) <= 4e-3
    del b
    rows = 140_000
    a, b = (torch.randint(-128, 128, shape, device=DEVICE, dtype=torch.int8) for shape in ((rows, 64), (2, n, 64)))
    out = minfer.grouped_gemm_int8(a, b.mT, one, one, torch.tensor([5, rows], device=DEVICE, dtype=torch.int32))
    assert cases.off_by_norm(out[-4:], a[-4:].double() @ b[1].double().T * 2.0**-16) <= 4e-3


# ---- layers --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layer(dtype):
    """DeepSeek's, Qwen's and gpt-oss's forms of a layer, small; twice, for equal bits; x in 16 bits and quantised by the caller. Relative
    to the numbers that x's codes are, what is lost is what h's codes lose."""
    forms = ((8, 2, 256, 512), (64, 8, 128, 96), (16, 4, 192, 208), (4, 2, 1024, 320))
    for number, ((experts, top_k, hidden, inter), tokens) in enumerate(itertools.product(forms, (0, 1, 7, 64, 500))):
        kind = EXPERT_KINDS[dtype][number % len(EXPERT_KINDS[dtype])]
        for activation, biases in (("silu", None), ("swigluoai", torch.float32)):
            options = dict(activation=activation, biases=biases, gate_layout=LAYOUTS[number % 3])
            shape = (experts, tokens, top_k, hidden, inter)
            layer = cases.make_layer(dtype, shape, kind, device=DEVICE, x_dtype=(torch.bfloat16, torch.float16)[number % 2], **options)
            out = layer.call()
            assert out.dtype == layer.x.dtype and out.shape == layer.x.shape
            x, x_scale = layer.codes()
            limit = 0.04 if dtype == FP8 else 0.015
            assert tokens == 0 or cases.off_by_norm(out, layer.truth(x)) <= limit, (shape, kind, activation)
            assert same_bits(layer.call(), out), (shape, kind, activation)
            assert same_bits(layer.call(layer.quantized_x()[0], x_scale=x_scale, out_dtype=layer.x.dtype), out)
            if dtype == FP8:
                assert tokens == 0 or cases.off_by_norm(layer.call(fast_accum=True), layer.truth(x)) <= limit


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layer_of_the_widths_of_checkpoints(dtype):
    for shape in ((8, 33, 4, 7168, 2048), (32, 200, 8, 2048, 768)):
        layer = cases.make_layer(dtype, shape, "blocks" if dtype == FP8 else "columns", device=DEVICE)
        x, _ = layer.codes()
        assert cases.off_by_norm(layer.call(), layer.truth(x)) <= (0.04 if dtype == FP8 else 0.015)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layer_and_cpu(dtype):
    """As near to what the CPU computes as to the truth, and tokens without an expert are zeros."""
    layer = cases.make_layer(dtype, (6, 40, 3, 320, 208), "columns", device=DEVICE, biases=torch.bfloat16)
    layer.ids[::4] = -1
    layer.ids[1::4, 0] = 6
    out = layer.call()
    moved = {name: getattr(layer, name).cpu() for name in ("x", "w13", "w2", "w13_scale", "w2_scale", "weights", "ids")}
    options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in layer.options.items()}
    want = cases.Layer(**moved, kind=layer.kind, options=options).call()
    assert cases.off_by_norm(out.cpu(), want.double()) <= (0.04 if dtype == FP8 else 0.015)
    assert not out[::4].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_whole_layer_in_a_graph(dtype):
    """Router to sum in one graph, replayed with other tokens: the routing changes between replays."""
    experts, top_k, tokens = 32, 4, 48
    layer = cases.make_layer(dtype, (experts, tokens, top_k, 256, 192), "blocks" if dtype == FP8 else "columns", device=DEVICE)
    gate = torch.randn(experts, 256, device=DEVICE).bfloat16()

    def run():
        layer.weights, layer.ids = minfer.moe_router_gemm(layer.x, gate, top_k)
        return layer.call()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    seen = set()
    for i in range(6):
        layer.x.copy_(torch.randn_like(layer.x, dtype=torch.float32) + (gate[i] if i % 2 else 0))  # every other time most tokens agree
        out.fill_(math.nan)
        graph.replay()
        assert cases.off_by_norm(out, layer.truth(layer.codes()[0])) <= (0.04 if dtype == FP8 else 0.015)
        seen.add(tuple(layer.ids.flatten().tolist()))
    assert len(seen) == 6


# ---- what is refused -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(every_bad_call("cpu"))))
def test_calls_that_cannot_be_right(number):
    """The library's own checks name the same."""
    operator, arguments, options, message = every_bad_call(DEVICE)[number]
    with pytest.raises(RuntimeError) as raised:
        getattr(minfer, operator)(*arguments, **options)
    subject = message.split()[0]  # types have other names there
    assert f"minfer::{operator}: " in str(raised.value) and subject in str(raised.value)


def test_compile():
    case = cases.make_case(FP8, (4, 30, 32, 256), "blocks128", "blocks", device=DEVICE)

    def f(x, b, b_scale, ends):
        q, scales = minfer.quantize_fp8(x * 2, "block128")
        return minfer.grouped_gemm_fp8(q, b, scales, b_scale, ends, activation="silu") + 1

    x = torch.randn(30, 256, device=DEVICE).bfloat16()
    arguments = (x, case.weight.mT, case.b_scale, case.ends)
    want = f(*arguments)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(f, fullgraph=True, dynamic=True)(*arguments), want)
