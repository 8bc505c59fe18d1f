"""Plans, read without a GPU: the library plans for the built-in H200 with every kernel of the table, compiled or not."""

import itertools

import minfer
import pytest
import torch
from minfer._core.registry import device_index, device_properties
from minfer.formats.weight_formats import FORMATS
from minfer.planning.plan import (
    DTYPE_NAMES,
    MAX_EXTENT,
    NARROW_NAMES,
    Problem,
    ScaledProblem,
    enumerate_plans,
    plan_problem,
    runs_here,
)

from tests.gemm.cases import DTYPES, LAYOUTS, name_of

H200 = -1
KERNELS = {kernel["name"]: kernel for kernel in minfer.kernels()}
ODD = [
    (0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0), (1, 1, 1), (1, 4096, 4096), (3, 7, 5), (17, 31, 33), (64, 28672, 4096), (127, 6143, 4097),
    (131, 257, 1021), (4096, 4096, 4096), (8192, 57344, 8192), (100003, 16, 24), (16, 100003, 64), (5, 9, 100003), (1, 1, 1 << 22),
]  # fmt: skip
FAMILIES = ("attention", "fused", "gemm", "moe", "moe_scaled", "moe_w4a16", "norm_gemm", "scaled_gemm", "w4a16", "w4a8")


def plan(m, n, k, **options):
    return minfer.plan("gemm", m=m, n=n, k=k, device=H200, **options)


def check_legal(p):
    """The plan's kernel can compute the plan's problem on an H200."""
    problem, kernel = p.problem, KERNELS[p.kernel]
    _, ab_type, _, a_major, b_major, (a_alignment, b_alignment, *_), _, _ = problem.arguments()
    read = ("k" if p.realign_a else a_major, "k" if p.realign_b else b_major)
    assert (kernel["ab_type"], kernel["a_major"], kernel["b_major"]) == (ab_type, *read)
    assert kernel["arch"] in (80, 90)
    for realigned, alignment in ((p.realign_a, a_alignment), (p.realign_b, b_alignment)):
        assert problem.k == 0 or kernel["alignment"] <= (16 if realigned else alignment)
    assert not (p.realign_a or p.realign_b) or kernel["alignment"] == 16
    assert kernel["smem_bytes"] <= device_properties(H200)["smem_per_block"]
    assert p.decomposition in ("persistent", "stream_k", "split_k")
    assert p.splits >= 1 and (p.splits == 1 or p.decomposition == "split_k")
    assert 1 <= p.swizzle <= 16 and p.raster in ("along_m", "along_n")
    assert p.workspace_bytes >= 0
    assert p.compiled == kernel["compiled"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_always_answers(dtype, layout):
    for (m, n, k), c, batch in itertools.product(ODD, (False, True), (1, 3)):
        p = plan(m, n, k, dtype=dtype, layout=layout, c=c, batch=batch)
        check_legal(p)
        assert p.source in ("tuned", "analytic") and p.reason
        assert p.floor_us >= 0 and p.predicted_us >= 0


@pytest.mark.parametrize(
    "options", [{}, {"gated": True}, {"gated": True, "out_dtype": torch.bfloat16}, {"out_dtype": torch.float32}], ids=str
)
def test_gated_and_float32(options):
    for m, n, k in ((1, 28672, 4096), (512, 4096, 96), (77, 160, 35)):
        check_legal(plan(m, n, k, **options))


def test_largest_extents():
    """planning.MAX_EXTENT is the library's: one more is refused by it, too."""
    for name, sizes in {"m": (0, 8, 8, 1), "n": (1, 0, 8, 1), "k": (1, 8, 0, 1), "batch": (1, 8, 8, 0)}.items():
        most = dict(zip(("m", "n", "k", "batch"), (size or MAX_EXTENT for size in sizes), strict=True))
        p = plan(**most)
        check_legal(p)
        arguments = p.problem.arguments()
        above = [size or MAX_EXTENT + 1 for size in sizes]
        with pytest.raises(RuntimeError, match=f"an extent above {MAX_EXTENT} is not supported"):
            torch.ops.minfer._plan_gemm(above, *arguments[1:], None, False, False, H200)
        with pytest.raises(ValueError, match=f"gemm: {name} must be at most {MAX_EXTENT}, got {MAX_EXTENT + 1}"):
            plan(**most | {name: MAX_EXTENT + 1})


def test_floor():
    properties = device_properties(H200)
    assert properties["name"] == "NVIDIA H200" and properties["sm_count"] == 132
    decode = plan(1, 4096, 4096)
    moved = 2 * (4096 * 4096 + 4096 + 4096)
    assert decode.floor_us == pytest.approx(moved / properties["read_bandwidth"], rel=1e-3)
    square = plan(8192, 8192, 8192)
    assert square.floor_us == pytest.approx(2 * 8192**3 / properties["matrix_rate"], rel=1e-3)
    assert plan(8, 4096, 4096, c=True).floor_us > plan(8, 4096, 4096).floor_us
    assert plan(4096, 4096, 4096, batch=4).floor_us == pytest.approx(4 * plan(4096, 4096, 4096).floor_us, rel=1e-3)


@pytest.mark.parametrize("m, n, k", [s for s in ODD if min(s) >= 16] + [(1, 4096, 4096), (16, 6144, 4096), (1, 57344, 8192)])
def test_prediction_is_sane(m, n, k):
    """Not below the floor, and for shapes that fill the machine not far above it."""
    p = plan(m, n, k, use_tuned=False)
    assert p.source == "analytic"
    assert p.predicted_us >= 0.9 * p.floor_us
    if p.floor_us > 20:
        assert p.predicted_us < 4 * p.floor_us
    assert p.predicted_us < 40 * p.floor_us + 60


def test_larger_problems_take_longer():
    """Roughly monotone: doubling m may fill a half-empty wave, but never makes a plan much faster."""
    for n, k in ((6144, 4096), (4096, 14336), (8192, 8192)):
        times = [plan(m, n, k, use_tuned=False).predicted_us for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)]
        for before, after in itertools.pairwise(times):
            assert after >= 0.95 * before
        assert times[-1] > 8 * times[0]


@pytest.mark.parametrize("m, n, k", [(1, 4096, 4096), (128, 6144, 4096), (4096, 4096, 4096), (131, 257, 1021)])
def test_enumeration(m, n, k):
    problem = Problem(m, n, k)
    plans = enumerate_plans(problem, device=H200)
    times = [p.predicted_us for p in plans]
    assert times == sorted(times)
    assert len({p.override for p in plans}) == len(plans), "no candidate twice"
    for p in plans:
        check_legal(p)
    best = plan_problem(problem, use_tuned=False, device=H200)
    assert best.override in {p.override for p in plans}
    assert best.predicted_us == pytest.approx(times[0], rel=1e-4)
    assert [p.override for p in enumerate_plans(problem, limit=3, device=H200)] == [p.override for p in plans[:3]]


def test_every_kernel_is_a_candidate_somewhere():
    """A row of the table that no problem can choose is a mistake."""
    seen = set()
    for dtype, layout, (m, n, k) in itertools.product(DTYPES, LAYOUTS, ((8, 4096, 4096), (512, 4096, 4096), (4096, 4096, 4096))):
        seen |= {p.kernel for p in enumerate_plans(Problem(m, n, k, dtype=dtype, layout=layout), device=H200)}
    only = {name for name, kernel in KERNELS.items() if kernel["invariant_only"]}
    assert seen == set(KERNELS) - only
    for dtype in DTYPES:
        seen |= {p.kernel for p in enumerate_plans(Problem(16, 6144, 4096, dtype=dtype), device=H200, batch_invariant=True)}
    assert seen == set(KERNELS)


def test_every_kernel_of_8_bits_is_a_candidate_somewhere():
    seen = set()
    for dtype, (m, n, k) in itertools.product(NARROW_NAMES, ((8, 4096, 4096), (512, 4096, 4096), (4096, 4096, 4096))):
        plans = enumerate_plans(ScaledProblem(m, n, k, dtype=dtype), device=H200)
        assert plans[0].kernel == minfer.plan("scaled_gemm", m=m, n=n, k=k, dtype=dtype, device=H200, use_tuned=False).kernel
        seen |= {p.kernel for p in plans}
    # Portable kernels are candidates only where none of Hopper computes the problem.
    assert seen == {kernel["name"] for kernel in minfer.kernels("scaled_gemm") if "_sm90_" in kernel["name"]}


def test_plans_of_8_bits():
    """Half the bytes and half the time of 16 bits, any sizes, and what only e4m3 has."""
    wide, narrow = (
        plan(8192, 8192, 8192),
        minfer.plan("scaled_gemm", m=8192, n=8192, k=8192, dtype=torch.int8, device=H200),
    )
    assert narrow.floor_us == pytest.approx(wide.floor_us / 2, rel=1e-3) and narrow.predicted_us < 0.7 * wide.predicted_us
    for m, n, k in ((1, 8, 16), (3, 72, 40), (0, 64, 64), (4, 64, 0), (100, 576, 7168)):
        for out_dtype in (torch.float16, torch.bfloat16, torch.float32):
            p = minfer.plan("scaled_gemm", m=m, n=n, k=k, dtype=torch.float8_e4m3fn, out_dtype=out_dtype, block_scaled=True, device=H200)
            assert "block scales" in str(p)
    for options, message in (
        (dict(dtype=torch.bfloat16), "dtype must be float8_e4m3fn or int8"),
        (dict(dtype=torch.int8, block_scaled=True), "block_scaled must be False for int8"),
        (dict(dtype=torch.int8, out_dtype=torch.int32), "out_dtype must be float16, bfloat16 or float32"),
    ):
        with pytest.raises(ValueError, match=message):
            minfer.plan("scaled_gemm", m=4, n=64, k=64, device=H200, **options)


def test_override():
    chosen = plan(64, 4096, 4096)
    for p in enumerate_plans(chosen.problem, device=H200)[:20]:
        forced = plan(64, 4096, 4096, kernel=p.override)
        assert forced.source == "override"
        assert forced.override == p.override
        assert forced.predicted_us == pytest.approx(p.predicted_us, rel=1e-4)
        assert plan(64, 4096, 4096, kernel=p.kernel).kernel == p.kernel


def test_realigned_override():
    """What is copied first can be read from a plan, and forced."""
    chosen = plan(4096, 4096, 4095)
    assert (chosen.realign_a, chosen.realign_b) == (True, True)
    assert chosen.launch.endswith(",realign_a=1,realign_b=1")
    assert chosen.workspace_bytes >= 2 * 4096 * 4096 * 2
    # a row-major B: some candidates read it as it is, the others copy it alone
    plans = enumerate_plans(Problem(4096, 4096, 4096, layout="tt"), device=H200)
    assert {(p.realign_a, p.realign_b) for p in plans} == {(False, False), (False, True)}
    assert not any(p.realign_a or p.realign_b for p in enumerate_plans(Problem(4096, 4096, 4096), device=H200))
    for layout in LAYOUTS:
        problem = Problem(500, 510, 515, layout=layout)
        plans = enumerate_plans(problem, device=H200)
        assert {(p.realign_a, p.realign_b) for p in plans} == {(False, False), (True, True)}, "no operand is aligned"
        for p in [next(p for p in plans if p.realign_a), next(p for p in plans if not p.realign_a)]:
            forced = plan_problem(problem, kernel=p.override, device=H200)
            assert (forced.source, forced.override) == ("override", p.override)
            assert forced.predicted_us == pytest.approx(p.predicted_us, rel=1e-4)
            assert forced.workspace_bytes == p.workspace_bytes


def test_override_errors():
    name = plan(64, 4096, 4096).kernel
    with pytest.raises(RuntimeError, match="is not in the registry; nearest: .*gemm_sm90_bf16"):
        plan(64, 4096, 4096, kernel="gemm_sm90_bf16_tn_1x1x1")
    with pytest.raises(RuntimeError, match="cannot compute this problem"):
        plan(64, 4096, 4096, dtype=torch.float16, kernel=name)
    with pytest.raises(RuntimeError, match="cannot compute this problem"):
        plan(64, 4096, 4097, kernel=next(k["name"] for k in minfer.kernels() if k["alignment"] == 16 and k["ab_type"] == "bf16"))
    with pytest.raises(RuntimeError, match="decomposition must be"):
        plan(64, 4096, 4096, kernel=name + "@decomposition=x")
    with pytest.raises(RuntimeError, match="realign_a must be"):
        plan(64, 4096, 4096, kernel=name + "@realign_a=2")
    with pytest.raises(RuntimeError, match="realign_c' is not known"):
        plan(64, 4096, 4096, kernel=name + "@realign_c=1")
    with pytest.raises(RuntimeError, match="cannot compute this problem: an operand's pointer or stride"):
        plan(64, 4096, 4097, kernel=name + "@realign_b=1")
    weight = minfer.plan("w4a16_gemm", m=64, n=4096, k=4096, device=H200).kernel
    with pytest.raises(RuntimeError, match="realign_a=1,realign_b=0: operands of a quantised GEMM are not realigned"):
        minfer.plan("w4a16_gemm", m=64, n=4096, k=4096, device=H200, kernel=weight + "@realign_a=1")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"op": "conv"},
            "op must be one of gemm, .*, rms_norm_gemm, decoder_block, w4a16_decoder_block, fp8_decoder_block, got 'conv'",
        ),
        ({"group_size": 64}, "gemm has no group_size; its options are m, n, k, batch"),
        ({"m": -1}, "m must be an integer >= 0, got -1"),
        ({"k": 1.5}, "k must be an integer >= 0, got 1.5"),
        ({"dtype": torch.float32}, "gemm: dtype must be float16 or bfloat16, got float32"),
        ({"out_dtype": torch.float16}, "out_dtype must be bfloat16, float32 or None, got float16"),
        ({"layout": "rr"}, "layout must be one of tn, tt, nn, nt, got 'rr'"),
        ({"gated": True, "n": 24}, "n must be a multiple of 16 for a gated GEMM, got 24"),
        ({"gated": True, "c": True}, "gemm: c must be False for a gated GEMM, which has no C, got True"),
        ({"gated": True, "out_dtype": torch.float32}, "gemm: out_dtype must be bfloat16 or None for a gated GEMM, got float32"),
        ({"op": "w4a16_gemm", "gated": True, "c": True}, "w4a16_gemm: c must be False for a gated GEMM, which has no C, got True"),
        ({"m": 2**31}, "gemm: m must be at most 2147483136, got 2147483648"),
        ({"batch": 2**31}, "gemm: batch must be at most 2147483136, got 2147483648"),
        ({"op": "w4a16_gemm", "k": 2**31}, "w4a16_gemm: k must be at most 2147483136, got 2147483648"),
        ({"device": "cpu"}, "device must be a CUDA device, its index, -1 .* or None, got 'cpu'"),
        ({"device": "banana"}, "device must be .* got 'banana'"),
        ({"device": -7}, "device must be .* got -7"),
        ({"device": True}, "device must be .* got True"),
        ({"device": 1.5}, "device must be .* got 1.5"),
        ({"device": 2**40}, "device must be .* got 1099511627776"),
        ({"device": "cuda:100"}, "device must be .* got 'cuda:100'"),
        ({"op": "w4a16_gemm", "layout": "tn"}, "w4a16_gemm has no layout; its options are m, n, k, dtype, group_size"),
        ({"op": "w4a16_gemm", "m": -1}, "w4a16_gemm: m must be an integer >= 0, got -1"),
        ({"m": True}, "gemm: m must be an integer >= 0, got True"),
        ({"n": 2**63}, "gemm: n must be at most 2147483136, got 9223372036854775808"),
        ({"op": "w4a16_gemm", "group_size": 2**63}, "group_size must be -1 or a power of two >= 32, got 9223372036854775808"),
        ({"op": "w4a16_gemm", "n": 20}, "n must be a multiple of 8, got 20"),
        ({"op": "w4a16_gemm", "k": 12}, "k must be a multiple of 8, got 12"),
        ({"op": "w4a16_gemm", "n": 24, "gated": True}, "n must be a multiple of 16 for a gated GEMM, got 24"),
        ({"op": "w4a16_gemm", "group_size": 96}, "group_size must be -1 or a power of two >= 32, got 96"),
        ({"op": "w4a16_gemm", "group_size": 16}, "group_size must be -1 or a power of two >= 32, got 16"),
        ({"op": "w4a16_gemm", "w4_format": "int5"}, "w4_format must be one of int4, nf4, mxfp4, nvfp4, int8, fp8_e4m3, got 'int5'"),
    ],
    ids=str,
)
def test_bad_arguments(options, message):
    arguments = {"op": "gemm", "m": 8, "n": 16, "k": 8} | options
    with pytest.raises(ValueError, match=message):
        minfer.plan(arguments.pop("op"), **arguments)


def test_device():
    assert device_index(-1) == -1
    for device in (None, "cuda", torch.device("cuda")):
        if runs_here():
            assert device_index(device) == torch.cuda.current_device()
        elif device is None:
            assert device_index(device) == -1
        elif not torch.cuda.is_available():
            with pytest.raises(ValueError, match="got .*cuda.*; this machine or build has no CUDA devices"):
                minfer.plan("gemm", m=8, n=8, k=8, device=device)


def test_unknown_family():
    for family in ("nope", "GEMM", "gemm ", None):
        with pytest.raises(
            ValueError,
            match=rf"family must be one of {', '.join(FAMILIES)}, or '' for all, got",
        ):
            minfer.kernels(family)
    assert {kernel["family"] for kernel in minfer.kernels("")} == set(FAMILIES)


def test_text():
    text = str(plan(1, 4104, 4096))  # no shipped table has it
    assert "1 x 4104 x 4096 bf16 tn" in text and "NVIDIA H200" in text
    for word in ("kernel", "launch", "workspace", "predicted", "floor", "analytic"):
        assert word in text
    assert ("not runnable" in text) == (not plan(1, 4096, 4096).compiled)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_w4a16(dtype, group_size):
    """Every legal problem has a plan, of a kernel that can compute it; the plans of the tuner start with it and can be forced."""
    kernels = {kernel["name"]: kernel for kernel in minfer.kernels("w4a16")}
    for (m, n, k), zeros, gated in itertools.product(((1, 4096, 4096), (17, 8192, 72), (300, 48, 28672)), (False, True), (False, True)):
        options = dict(m=m, n=n, k=k, dtype=dtype, group_size=group_size, zeros=zeros, gated=gated, device=H200)
        p = minfer.plan("w4a16_gemm", **options, use_tuned=False)
        kernel = kernels[p.kernel]
        assert p.op == "w4a16_gemm" and p.source == "analytic"
        assert (kernel["ab_type"], kernel["b_format"]) == (DTYPE_NAMES[dtype], "int4")
        assert group_size == -1 or group_size >= k or group_size % kernel["group_multiple"] == 0
        assert p.predicted_us >= p.floor_us > 0 and p.compiled == kernel["compiled"]
        plans = enumerate_plans(p.problem, device=H200)
        assert plans[0].predicted_us == pytest.approx(p.predicted_us, rel=1e-3)
        forced = minfer.plan("w4a16_gemm", **options, kernel=plans[-1].override)
        assert (forced.source, forced.override) == ("override", plans[-1].override)
    with pytest.raises(RuntimeError, match="it reads B in another format"):
        minfer.plan("w4a16_gemm", **options, kernel=next(iter(KERNELS)))


def test_w4a16_floor():
    """Four bits a weight, scales and zero points a group, A and D."""
    bandwidth = device_properties(H200)["read_bandwidth"]

    def moved(**options):
        return minfer.plan("w4a16_gemm", m=1, n=4096, k=4096, device=H200, **options).floor_us * bandwidth

    least = 4096 * 4096 / 2 + 2 * 2 * 4096
    assert moved() == pytest.approx(least + 32 * 4096 * 2, rel=1e-3)
    assert moved(zeros=True) == pytest.approx(least + 2 * 32 * 4096 * 2, rel=1e-3)
    assert moved(group_size=32) == pytest.approx(least + 128 * 4096 * 2, rel=1e-3)
    assert moved(group_size=-1) == moved(group_size=4096) == pytest.approx(least + 4096 * 2, rel=1e-3)
    assert moved(gated=True) == pytest.approx(least + 32 * 4096 * 2 - 4096, rel=1e-3)


def test_w4a16_text():
    text = str(minfer.plan("w4a16_gemm", m=3, n=4104, k=4096, zeros=True, gated=False, device=H200))
    assert "w4a16_gemm  3 x 4104 x 4096 bf16 int4, groups of 128, zero points  on NVIDIA H200" in text
    assert "one group" in str(minfer.plan("w4a16_gemm", m=3, n=4104, k=64, device=H200).problem)


def test_alignment_of_contiguous_operands():
    def alignments(**options):
        return Problem(**options).arguments()[5]

    assert alignments(m=8, n=8, k=8) == [16, 16, 0, 16]
    assert alignments(m=8, n=8, k=12, c=True) == [8, 8, 16, 16]
    assert alignments(m=8, n=7, k=8, c=True) == [16, 16, 0, 2]
    assert alignments(m=1, n=7, k=7) == [16, 2, 0, 16]
    assert alignments(m=5, n=6, k=7, layout="nt") == [2, 4, 0, 4]
    assert alignments(m=5, n=6, k=8, out_dtype=torch.float32) == [16, 16, 0, 8]
    assert alignments(m=5, n=48, k=8, gated=True) == [16, 16, 0, 16]


def test_registry():
    build = minfer.build_info()
    everything = [kernel for family in FAMILIES for kernel in minfer.kernels(family)]
    assert len(KERNELS) == len(minfer.kernels())
    assert build["kernels_total"] == len(everything)
    assert build["kernels_compiled"] == sum(k["compiled"] for k in everything)
    assert build["version"] == minfer.__version__
    for kernel in minfer.kernels():
        tile = f"{kernel['tile_m']}x{kernel['tile_n']}x{kernel['tile_k']}"
        layout = {"k": "t", "mn": "n"}[kernel["a_major"]] + {"k": "n", "mn": "t"}[kernel["b_major"]]
        cluster = f"{kernel['cluster_m']}x{kernel['cluster_n']}x1"
        parts = ["gemm", f"sm{kernel['arch']}", kernel["ab_type"], layout, tile, cluster, kernel["schedule"]]
        assert kernel["name"].startswith("_".join(parts))
    assert {k["ab_type"] for k in minfer.kernels()} == set(DTYPE_NAMES.values()) - {"f32"}
    for kernel in minfer.kernels("moe"):
        tile = f"{kernel['tile_m']}x{kernel['tile_n']}x{kernel['tile_k']}"
        assert kernel["name"] == f"moe_sm{kernel['arch']}_{kernel['ab_type']}_tn_{tile}_1x1x1_{kernel['schedule']}_swap"
    for kernel in (*minfer.kernels("w4a16"), *minfer.kernels("moe_w4a16")):
        tile = f"{kernel['tile_m']}x{kernel['tile_n']}x{kernel['tile_k']}"
        form, grouped = FORMATS[kernel["b_format"]], "moe_" if kernel["family"] == "moe_w4a16" else ""
        assert kernel["name"].startswith(f"{grouped}w{form.bits}a16_sm{kernel['arch']}_{kernel['ab_type']}_{kernel['b_format']}_{tile}_")
        assert kernel["swap"] and kernel["group_multiple"] in (16, 32, 128)
        assert form.group_size is None or form.group_size % kernel["group_multiple"] == 0
    for kernel in minfer.kernels("fused"):
        quantized = "_quantized" if "_quantized" in kernel["name"] else ""
        rows = ("_rows" if "_rows" in kernel["name"] else "") + ("_ring" if kernel["arch"] == 90 else "")
        assert kernel["name"] == f"fused_sm{kernel['arch']}_{kernel['ab_type']}_{kernel['operation']}{quantized}{rows}_x{kernel['tile_n']}"
        assert kernel["schedule"] == "rows" and kernel["tile_n"] % 8 == 0
    for kernel in minfer.kernels("norm_gemm"):
        tile = f"{kernel['tile_m']}x16x32_warps{kernel['threads'] // 32}_ahead{kernel['stages']}"
        assert kernel["name"] == f"norm_gemm_sm80_{kernel['ab_type']}_{tile}" and kernel["schedule"] == "registers"
