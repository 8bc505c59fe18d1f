"""torch.ops.minfer.grouped_w4a16_gemm and moe_ffn_w4a16 on a GPU: the planner's choice and every compiled kernel by name.

Outputs lie in NaN-filled memory; the truth is float64 on the dequantised 16-bit weights, the yardstick torch's own 16-bit product of them.
"""

import functools
import importlib.util
import itertools
import json
import math
from dataclasses import replace

import minfer
import pytest
import torch
from minfer import quantize
from minfer.planning.plan import DTYPE_NAMES

from tests.contracts.test_registration import check_op
from tests.gemm.cases import DTYPES, name_of
from tests.moe.grouped_cases import layer_mismatch, nan_filled, offsets_of
from tests.moe.grouped_quantized_cases import (
    BAD,
    BAD_LAYER,
    COUNTS,
    FORMS,
    bad_call,
    bad_layer,
    dense_layer,
    expected,
    gpt_oss,
    layer,
    make_call,
    make_experts,
    make_layer,
)
from tests.quantize.test_quantize import same_weights

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
FAMILY = minfer.kernels("moe_w4a16")
NONE_BUILT = minfer.build_info()["cuda"] and not any(k["compiled"] for k in FAMILY)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NONE_BUILT, reason="no kernel of this build multiplies 4-bit experts")]
KERNELS = {k["name"]: k for k in FAMILY if k["compiled"]} or {k["name"]: k for k in FAMILY}
# n and k: a block, tails in both, k far over n, n over k, fewer than a tile
SIZES = ((64, 64), (336, 1032), (16, 4096), (1040, 72), (16, 8))
ONE = (0,) * 10 + (300, 0)  # everything to one expert
SINGLE = (1,) * 12
# gather, row_scale, bias, rows that are nobody's, and how the epilogue goes on
VARIANTS = (
    (False, False, False, 0, {}),
    (True, False, True, 0, {"gated": True, "activation": "silu"}),
    (False, True, True, 5, {"activation": "gelu"}),
    (True, True, False, 0, {"gated": True, "activation": "swigluoai"}),
    (False, False, True, 70, {"gated": True, "activation": "gelu_tanh"}),
    (True, True, True, 0, {"activation": "relu"}),
)


def plan(rows, experts, *, gathered=False, gated=False, kernel=None):
    """The plan for so many rows of these experts; RuntimeError where there is none."""
    number, n, k = experts.codes.shape
    form = (experts.name, experts.group_size, experts.zeros is not None)
    found = torch.ops.minfer._plan_grouped([rows, number, n, k], DTYPE_NAMES[experts.dtype], gated, gathered, kernel, True, 0, *form)
    return json.loads(found)


def planned(experts, **how):
    try:
        return plan(64, experts, **how)
    except RuntimeError:
        return None


@functools.lru_cache(maxsize=24)
def case(form, dtype, size, alpha):
    """Twelve experts and their dense weights."""
    torch.manual_seed(sum(size))
    experts = make_experts(form[0], len(COUNTS), *size, *form[1:], dtype, DEVICE, alpha=alpha)
    return experts, experts.dense()


def run_and_judge(experts, args, kwargs, dense=None):
    """Why a call into NaN-filled memory is wrong, or None; twice, for equal bits."""
    truth = expected(experts, args, kwargs, dense)
    rows, columns = truth.truth.shape
    out, whole = nan_filled(rows, columns, experts.dtype, DEVICE, padding=8)
    experts.gemm(*args, **kwargs, out=out)
    problem = truth.mismatch(out)
    if problem is not None:
        return problem
    if int(whole.isnan().sum()) != whole.numel() - out.numel():
        return "memory around the output was written"
    torch.full((rows, columns), math.nan, dtype=experts.dtype, device=DEVICE)  # what the allocator hands out next
    if not torch.equal(experts.gemm(*args, **kwargs), out):
        return "two runs differ"
    return None


def described(kwargs):
    return {name: tuple(x.shape) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}


def report(failures, number):
    assert not failures, "\n".join([f"{len(failures)} of {number} wrong", *failures[:8]])


# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_formats(dtype, form):
    """Every format, group size and kind of zeros, over numbers of rows, sizes and epilogues; what no kernel reads is refused in words."""
    failures, number = [], 0
    for size_number, size in enumerate(SIZES):
        experts, dense = case(form, dtype, size, size_number % 2 == 1)
        if planned(experts) is None:
            has_kernels = any(k["b_format"] == form[0] and k["compiled"] for k in FAMILY)
            assert not has_kernels or torch.cuda.get_device_capability() != (9, 0), (form, size)
            args, kwargs = make_call(experts, COUNTS)
            with pytest.raises(RuntimeError, match="minfer::grouped_w4a16_gemm: "):
                experts.gemm(*args, **kwargs)
            continue
        for gather, row_scale, bias, behind, epilogue in VARIANTS:
            counts = COUNTS if number % 3 else (ONE, SINGLE)[number // 3 % 2]
            args, kwargs = make_call(experts, counts, gather=gather, row_scale=row_scale, bias=bias, behind=behind)
            problem = run_and_judge(experts, args, kwargs | epilogue, dense)
            if problem is not None:
                failures.append(f"{size}, rows {counts}, {described(kwargs | epilogue)}: {problem}")
            number += 1
    report(failures, number)


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] in ("int4", "mxfp4", "nvfp4")], ids=str)
@pytest.mark.parametrize("n", [8, 24, 72, 1048])
def test_rows_of_scales_that_are_no_multiple_of_16(form, n):
    failures, number = [], 0
    experts, dense = case(form, torch.bfloat16, (n, 136), True)
    for gather, row_scale, bias, behind, epilogue in VARIANTS:
        if "gated" not in epilogue:
            args, kwargs = make_call(experts, COUNTS, gather=gather, row_scale=row_scale, bias=bias, behind=behind)
            problem = run_and_judge(experts, args, kwargs | epilogue, dense)
            failures += [] if problem is None else [f"{described(kwargs | epilogue)}: {problem}"]
            number += 1
    report(failures, number)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel by name: all that an epilogue and a loader can be asked for, each group size that it takes, all kinds of zeros."""
    kernel = KERNELS[name]
    if not kernel["compiled"]:
        pytest.skip("not in this build")
    dtype, format = DTYPE_OF[kernel["ab_type"]], kernel["b_format"]
    failures, number = [], 0
    for i, (form, size) in enumerate(itertools.product([form for form in FORMS if form[0] == format], ((336, 1032), (144, 72)))):
        experts, dense = case(form, dtype, size, i % 2 == 1)
        if planned(experts, kernel=name) is None:
            continue
        for gather, row_scale, bias, behind, epilogue in VARIANTS:
            counts = COUNTS if number % 5 else ONE
            args, kwargs = make_call(experts, counts, gather=gather, row_scale=row_scale, bias=bias, behind=behind)
            problem = run_and_judge(experts, args, kwargs | epilogue | {"kernel": name}, dense)
            if problem is not None:
                failures.append(f"{form} {size}, rows {counts}, {described(kwargs | epilogue)}: {problem}")
            number += 1
    assert number > 0
    report(failures, number)


@pytest.mark.parametrize("name", KERNELS)
def test_cold_runs_repeat(name):
    """Weights out of L2, several tiles to a CTA: stages fill late and one by one, and the warps that wait for them drift apart."""
    kernel = KERNELS[name]
    if not kernel["compiled"]:
        pytest.skip("not in this build")
    group_size = {"mxfp4": 32, "nvfp4": 16}.get(kernel["b_format"], 128)
    form = (kernel["b_format"], group_size, "integer" if kernel["b_format"] == "int4" else "none")
    experts, dense = case(form, DTYPE_OF[kernel["ab_type"]], (1040, 2056), False)
    args, kwargs = make_call(experts, COUNTS, bias=True)
    run = lambda: experts.gemm(*args, **kwargs, kernel=name)  # noqa: E731
    truth = expected(experts, args, kwargs, dense)
    flush = torch.empty(80 << 20, dtype=torch.uint8, device=DEVICE)
    first = run()
    assert truth.mismatch(first) is None
    for i in range(8):
        flush.fill_(i)
        out = run()
        assert torch.equal(out, first), (i, truth.mismatch(out))


@pytest.mark.parametrize("form", [("int4", 128, "none"), ("int4", 32, "integer"), ("mxfp4", 32, "none"), ("nvfp4", 16, "none")], ids=str)
def test_rows(form):
    """The planner's choice from no row to thousands, many experts and few, uneven ones too."""
    for number, n, k in ((8, 256, 512), (128, 192, 256)):
        experts = make_experts(form[0], number, n, k, *form[1:], torch.bfloat16, DEVICE)
        if planned(experts) is None:
            pytest.skip(f"no kernel of this build reads {form[0]}")
        dense = experts.dense()
        for rows in (0, 1, 2, 17, 64, 129, 1000, 5000):
            counts = torch.bincount(torch.randint(0, number, (rows,)).pow(2) // number, minlength=number)
            args, kwargs = make_call(experts, counts, gather=rows % 2 == 0, row_scale=True)
            problem = run_and_judge(experts, args, kwargs, dense)
            assert problem is None, (number, rows, problem)


def test_extreme_codes():
    """Only 0, only 15, zero points at and beyond the ends."""
    for dtype, code, zero in itertools.product(DTYPES, (0, 15), (0.0, 15.0, -3.5, 20.0)):
        experts = make_experts("int4", 3, 72, 136, 32, "integer", dtype, DEVICE)
        experts.codes.fill_(code)
        experts.zeros.fill_(zero)
        experts.qweight = torch.stack([minfer.w4a16_pack(c) for c in experts.codes])
        args, kwargs = make_call(experts, (5, 0, 40))
        problem = run_and_judge(experts, args, kwargs)
        assert problem is None, (dtype, code, zero, problem)


def test_swigluoai_reaches_its_limits():
    experts = make_experts("int4", 6, 160, 256, 32, "integer", torch.bfloat16, DEVICE)
    (a, offsets), kwargs = make_call(experts, (40, 0, 9, 1, 64, 3), bias=True, row_scale=True)
    problem = run_and_judge(experts, (a * 4, offsets), kwargs | {"gated": True, "activation": "swigluoai"})
    assert problem is None, problem


def test_without_k():
    """The epilogue is left; a kernel by name says that it cannot."""
    for name, group_size in (("int4", 32), ("nf4", -1), ("mxfp4", 32)):
        experts = make_experts(name, 3, 48, 0, group_size, device=DEVICE)
        (a, offsets), kwargs = make_call(experts, (4, 0, 7), bias=True)
        out = experts.gemm(a, offsets, **kwargs, activation="relu")
        e = torch.repeat_interleave(torch.arange(3, device=DEVICE), torch.tensor([4, 0, 7], device=DEVICE))
        assert torch.equal(out, kwargs["bias"][e].relu())
    for kernel in list(KERNELS)[:1]:
        with pytest.raises(RuntimeError, match="it needs k > 0"):
            make_experts("int4", 3, 48, 0, 32, device=DEVICE).gemm(a, offsets, kernel=kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_many_gathered_rows(dtype):
    """Where the plan gathers by a launch of its own, the bits are the loader's."""
    experts = make_experts("int4", 4, 1024, 1032, 128, "integer", dtype, DEVICE)
    args, kwargs = make_call(experts, (2000, 0, 5000, 1000), gather=True, source_rows=3000)
    assert run_and_judge(experts, args, kwargs) is None
    found = plan(8000, experts, gathered=True)
    assert torch.equal(experts.gemm(*args, **kwargs), experts.gemm(*args, **kwargs, kernel=found["kernel"])), found


def test_views():
    """Strided and offset tokens and outputs, packed tensors anywhere in memory."""
    for form in (("int4", 32, "integer"), ("mxfp4", 32, "none")):
        experts = make_experts(form[0], 4, 96, 128, *form[1:], torch.float16, DEVICE)
        if planned(experts) is None:
            continue
        (a, offsets), _ = make_call(experts, (13, 0, 30, 7))
        want = experts.gemm(a, offsets)
        wide = torch.full((50, 304), math.nan, device=DEVICE, dtype=torch.float16)
        for shift in (0, 8, 3):  # 16-byte aligned or not
            view = wide[:, shift : shift + 128]
            view.copy_(a)
            assert torch.equal(experts.gemm(view, offsets), want), shift
            rows = torch.arange(50, device=DEVICE, dtype=torch.int32)
            assert torch.equal(experts.gemm(view, offsets, gather=rows), want), shift
        tall = torch.zeros(50, 99, device=DEVICE, dtype=torch.float16)
        experts.gemm(a, offsets, out=tall[:, 1:97])  # rows that are not 16-byte aligned
        assert torch.equal(tall[:, 1:97], want) and not tall[:, 0].any() and not tall[:, 97:].any()

        def shifted(x, elements):
            """The same tensor, contiguous, behind so many others."""
            flat = torch.zeros(x.numel() + elements, dtype=x.dtype, device=DEVICE)[elements:]
            return flat.view(x.shape).copy_(x)

        moved = {name: shifted(x, 8) for name, x in vars(experts).items() if name in ("scales", "zeros") and x is not None}
        for by in (4, 1):  # 16-byte aligned or not: copied then
            assert torch.equal(replace(experts, qweight=shifted(experts.qweight, by), **moved).gemm(a, offsets), want), by


def test_inputs_are_left_alone():
    experts = make_experts("int4", 4, 96, 136, 64, "integer", torch.float16, DEVICE, alpha=True)
    args, kwargs = make_call(experts, (13, 0, 30, 7), gather=True, row_scale=True, bias=True)
    inputs = (*args, *kwargs.values(), *experts.packed, experts.alpha)
    before = [x.clone() for x in inputs]
    experts.gemm(*args, **kwargs, gated=True, activation="silu")
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


# ---- rows and memory -------------------------------------------------------------------------------------------------------------


def test_rows_behind_the_last_offset_are_zero():
    for counts, n in (((9, 0, 15, 3), 64), ((200, 150, 0, 31), 4096)):
        experts = make_experts("int4", 4, n, 64, 32, "integer", torch.float16, DEVICE)
        (a, offsets), _ = make_call(experts, counts, behind=40)
        end = sum(counts)
        out, whole = nan_filled(end + 40, n, torch.float16, DEVICE)
        experts.gemm(a, offsets, out=out)
        assert not out[end:].any() and expected(experts, (a[:end], offsets), {}).mismatch(out[:end]) is None
        assert int(whole.isnan().sum()) == whole.numel() - out.numel()
        assert not experts.gemm(a, torch.zeros_like(offsets)).any()


def test_offsets_out_of_range_stay_in_memory():
    """Offsets that do not ascend, or reach behind the rows, are the caller's mistake; no other memory is touched."""
    experts = make_experts("int4", 4, 64, 64, 32, "none", torch.float16, DEVICE)
    a = torch.randn(40, 64, device=DEVICE).half()
    for ends in ([-5, 10, 1000, 2000], [30, 10, 40, 40], [50, 60, 70, 80]):
        out, whole = nan_filled(40, 64, torch.float16, DEVICE)
        experts.gemm(a, torch.tensor(ends, device=DEVICE, dtype=torch.int32), out=out)
        whole[2:42, :64] = math.nan
        assert bool(whole.isnan().all())


def test_nan_stays():
    """A NaN in a token reaches exactly its row, through the gate's limits too."""
    experts = make_experts("int4", 4, 64, 64, 32, "integer", torch.float16, DEVICE)
    (a, offsets), _ = make_call(experts, (15, 15, 15, 15))
    a[7] = math.nan
    for extra in ({}, {"gated": True, "activation": "silu"}, {"gated": True, "activation": "swigluoai"}):
        out = experts.gemm(a, offsets, **extra)
        assert bool(out[7].isnan().all()) and not bool(out[:7].isnan().any()) and not bool(out[8:].isnan().any()), extra


def test_large_offsets():
    """Weights beyond 2^32 bytes, outputs beyond 2^31 elements."""
    number, n, k = 80, 16384, 7168
    qweight = torch.empty(number, n // 64, k // 64, 512, dtype=torch.int32, device=DEVICE).random_(-(2**31), 2**31 - 1)
    scales = torch.rand(number, k // 128, n, device=DEVICE).add_(0.5).mul_(0.01).bfloat16()
    counts = torch.zeros(number, dtype=torch.int64)
    counts[0], counts[-1] = 3, 5
    a = torch.randn(8, k, device=DEVICE).bfloat16()
    out = minfer.grouped_w4a16_gemm(a, qweight, scales, None, offsets_of(counts, DEVICE))
    first, last = (minfer.w4a16_dequantize(qweight[e], scales[e], n=n, k=k) for e in (0, number - 1))
    want = torch.cat([a[:3] @ first.T, a[3:] @ last.T])
    assert torch.linalg.vector_norm(out.float() - want.float()) <= 8e-3 * torch.linalg.vector_norm(want.float())
    del qweight, scales, first, last
    rows = 140_000
    experts = make_experts("int4", 2, n, 64, 32, "none", torch.bfloat16, DEVICE)
    a = torch.randn(rows, 64, device=DEVICE).bfloat16()
    out = experts.gemm(a, torch.tensor([5, rows], device=DEVICE, dtype=torch.int32))
    want = a[-4:] @ experts.dense()[1].T
    assert torch.linalg.vector_norm(out[-4:].float() - want.float()) <= 8e-3 * torch.linalg.vector_norm(want.float())


# ---- streams and graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [("int4", 128, "none"), ("int4", 32, "integer"), ("mxfp4", 32, "none")], ids=str)
def test_graphs_follow_their_routing(form):
    """One captured call, replayed with other tokens, offsets and indices; on a side stream, behind another kernel."""
    experts = make_experts(form[0], 16, 256, 256, *form[1:], torch.bfloat16, DEVICE, alpha=True)
    if planned(experts) is None:
        pytest.skip(f"no kernel of this build reads {form[0]}")
    dense = experts.dense()

    def routed(kind):
        counts = {"one": [0] * 14 + [200, 0], "even": [12] * 15 + [20], "ragged": [0, 1, 3, 8, 9, 16, 17, 33, 64, 0, 40, 0, 0, 5, 4, 0]}[
            kind
        ]
        return make_call(experts, counts, gather=True, row_scale=True)

    (a, offsets), kwargs = routed("even")
    epilogue = {"gated": True, "activation": "silu"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        experts.gemm(a * 1, offsets, **kwargs, **epilogue)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.gemm(a * 1, offsets, **kwargs, **epilogue)
    for kind in ("ragged", "one", "even", "ragged"):
        (a_new, offsets_new), new = routed(kind)
        a.copy_(a_new)
        offsets.copy_(offsets_new)
        for name in ("gather", "row_scale"):
            kwargs[name].copy_(new[name])
        out.fill_(math.nan)
        graph.replay()
        assert expected(experts, (a, offsets), kwargs | epilogue, dense).mismatch(out) is None, kind
        assert torch.equal(out, experts.gemm(a, offsets, **kwargs, **epilogue)), kind


def test_chain():
    """Grouped GEMMs in a row, each reading what the one before wrote, launched to overlap; always the same bits."""
    experts = make_experts("int4", 8, 512, 512, 128, "none", torch.bfloat16, DEVICE)
    (a, offsets), _ = make_call(experts, (65, 0, 1, 3, 100, 9, 40, 82))
    first = experts.gemm(experts.gemm(a, offsets), offsets)
    torch.cuda.synchronize()
    for _ in range(40):
        x = a
        for _ in range(2):
            x = experts.gemm(x, offsets)
        assert torch.equal(x, first)


# ---- the layer -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [("int4", 128, "none"), ("int4", 32, "integer"), ("mxfp4", 32, "none"), ("nvfp4", 16, "none")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layer(dtype, form):
    """Mixtral's, Qwen's and gpt-oss's forms of a layer, small; twice, for equal bits."""
    name, group_size, zeros = form
    if planned(make_experts(name, 4, 64, 64, group_size, zeros, dtype, DEVICE)) is None:
        pytest.skip(f"no kernel of this build reads {name}")
    for experts, top_k, hidden, inter in ((8, 2, 256, 512), (64, 8, 128, 96), (16, 4, 192, 192)):
        for tokens, (activation, extras) in itertools.product((0, 1, 7, 64, 500), (("silu", False), ("swigluoai", True))):
            how = {"group_size": group_size, "zeros": zeros, "alpha": extras, "biases": extras}
            args, kwargs = make_layer(name, experts, tokens, top_k, hidden, inter, dtype, DEVICE, **how)
            kwargs["activation"] = activation
            out = layer(*args, **kwargs)
            problem = layer_mismatch(out, *dense_layer(args, kwargs))
            assert problem is None, (experts, tokens, activation, problem)
            assert torch.equal(layer(*args, **kwargs), out)


def test_layer_drops_foreign_experts():
    args, kwargs = make_layer("int4", 8, 40, 4, 128, 64, torch.bfloat16, DEVICE)
    *rest, ids = args
    args = (*rest, torch.where(ids >= 3, -1, ids).int())
    assert layer_mismatch(layer(*args, **kwargs), *dense_layer(args, kwargs)) is None


@pytest.mark.parametrize("name", ("int4", "mxfp4"))
def test_whole_layer_in_a_graph(name):
    """Router to combine in one graph, replayed with other tokens: the routing changes between replays."""
    experts, top_k, hidden, inter, tokens = 32, 4, 256, 192, 48
    (x, w13, w2, _, _), _ = make_layer(name, experts, tokens, top_k, hidden, inter, torch.bfloat16, DEVICE)
    if planned(w13) is None:
        pytest.skip(f"no kernel of this build reads {name}")
    gate = torch.randn(experts, hidden, device=DEVICE).bfloat16()

    def whole():
        weights, ids = minfer.moe_router_gemm(x, gate, top_k)
        return layer(x, w13, w2, weights, ids), weights, ids

    whole()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, weights, ids = whole()
    seen = set()
    for i in range(6):
        x.copy_(torch.randn_like(x, dtype=torch.float32) + (gate[i] if i % 2 else 0))  # every other time most tokens agree
        out.fill_(math.nan)
        graph.replay()
        assert layer_mismatch(out, *dense_layer((x, w13, w2, weights, ids), {})) is None
        seen.add(tuple(ids.flatten().tolist()))
    assert len(seen) == 6


# ---- above the operators -----------------------------------------------------------------------------------------------------------


def test_gpt_oss():
    """Loaded on the GPU, the same bits as on the CPU; run as gpt-oss does."""
    tensors, (gate_up, down) = gpt_oss(experts=8, hidden=128, inter=96)
    on_gpu = quantize.from_gpt_oss({name: x.to(DEVICE) for name, x in tensors.items()})
    for ours, theirs in zip(on_gpu, quantize.from_gpt_oss(tensors), strict=True):
        same_weights(ours.to("cpu"), theirs)
    first, second = on_gpu
    if not any(k["b_format"] == "mxfp4" and k["compiled"] for k in FAMILY):
        return
    (x, _, _, weights, ids), _ = make_layer("int4", 8, 40, 4, 128, 96, torch.bfloat16, DEVICE)
    form = {"group_size": 32, "w4_format": "mxfp4", "activation": "swigluoai"}
    out = minfer.moe_ffn_w4a16(x, *first.packed, *second.packed, weights, ids, **form, b13=first.bias, b2=second.bias)
    dense = (x, gate_up.to(DEVICE, torch.bfloat16), down.to(DEVICE, torch.bfloat16), weights, ids)
    biases = {"b13": tensors["gate_up_proj_bias"].to(DEVICE), "b2": tensors["down_proj_bias"].to(DEVICE)}
    assert layer_mismatch(out, dense, biases | {"activation": "swigluoai", "gate_layout": "alternating"}) is None


def test_quantised_experts():
    """Quantised on the GPU and multiplied; gate and up rows of a checkpoint's order."""
    weight = torch.randn(4, 128, 256, device=DEVICE).bfloat16() / 16
    experts = quantize.quantize_w4_experts(weight, 64, symmetric=False, gated=True)
    (x, _, _, weights, ids), _ = make_layer("int4", 4, 30, 2, 256, 64, torch.bfloat16, DEVICE)
    token_index, offsets, _, _ = minfer.moe_sort(ids, 4, weights=weights)
    out = experts.gemm(x, offsets, gather=token_index, activation="silu")
    want = minfer.grouped_gemm(x, weight.mT, offsets, gather=token_index, activation="silu", gated=True)
    assert (out.float() - want.float()).norm() / want.float().norm() < 0.2


# ---- registration and errors -------------------------------------------------------------------------------------------------------


def test_opcheck():
    experts = make_experts("int4", 4, 32, 64, 32, "integer", torch.float16, DEVICE, alpha=True)
    (a, offsets), kwargs = make_call(experts, (3, 0, 20, 7), gather=True, row_scale=True, bias=True)
    operands = (a, *experts.packed, offsets)
    check_op(torch.ops.minfer.grouped_w4a16_gemm.default, operands, experts.form | kwargs | {"activation": "silu", "gated": True})
    out = torch.empty(30, 32, device=DEVICE, dtype=torch.float16)
    check_op(torch.ops.minfer.grouped_w4a16_gemm.out, operands, experts.form | kwargs | {"out": out})
    (x, w13, w2, weights, ids), kwargs = make_layer("int4", 4, 9, 2, 64, 32, torch.bfloat16, DEVICE, biases=True)
    check_op(torch.ops.minfer.moe_ffn_w4a16.default, (x, *w13.packed, *w2.packed, weights, ids), kwargs | {"group_size": 32})


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="requires Triton")
def test_compile():
    torch._dynamo.reset()
    (_, w13, w2, _, _), _ = make_layer("int4", 8, 1, 2, 128, 64, torch.bfloat16, DEVICE)
    packed = (*w13.packed, *w2.packed)

    def step(x, weights, ids):
        token_index, offsets, inverse, scale = minfer.moe_sort(ids, 8, weights=weights)
        h = minfer.grouped_w4a16_gemm(x * 2, *packed[:3], offsets, group_size=32, gather=token_index, activation="silu", gated=True)
        y = minfer.grouped_w4a16_gemm(h, *packed[3:], offsets, group_size=32, row_scale=scale)
        return minfer.moe_combine(y, inverse) + minfer.moe_ffn_w4a16(x, *packed, weights, ids, group_size=32)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for tokens in (3, 40, 7):
            (x, _, _, weights, ids), _ = make_layer("int4", 8, tokens, 2, 128, 64, torch.bfloat16, DEVICE)
            torch.testing.assert_close(compiled(x, weights, ids), step(x, weights, ids))


def subject(message):
    """The argument that a message begins with; the compiled checks may put the rest in other words."""
    return message.split()[0]


@pytest.mark.parametrize("case", BAD)
def test_bad_calls(case):
    arguments, message = BAD[case]
    with pytest.raises(RuntimeError, match=r"minfer::grouped_w4a16_gemm(\.out)?: " + subject(message)):
        minfer.grouped_w4a16_gemm(**bad_call(arguments, DEVICE))


@pytest.mark.parametrize("case", BAD_LAYER)
def test_bad_layers(case):
    arguments, message = BAD_LAYER[case]
    with pytest.raises(RuntimeError, match="minfer::moe_ffn_w4a16: " + subject(message)):
        minfer.moe_ffn_w4a16(**bad_layer(arguments, DEVICE))


def test_devices_must_agree():
    def optional(t):
        more = {"zeros": t(4, 2, 32), "alpha": t(4, dtype=torch.float32), "bias": t(4, 32), "gather": t(10, dtype=torch.int32)}
        return more | {"row_scale": t(10, dtype=torch.float32)}

    for name in ("qweight", "scales", "zeros", "offsets", "alpha", "bias", "gather", "row_scale"):
        call = bad_call(optional, DEVICE)
        call[name] = call[name].cpu()
        with pytest.raises(RuntimeError, match=f"minfer::grouped_w4a16_gemm: {name} must be"):
            minfer.grouped_w4a16_gemm(**call)


def test_a_kernel_of_another_format():
    """It is refused, in words."""
    names = {k["b_format"]: k["name"] for k in FAMILY if k["compiled"] and k["ab_type"] == "f16"}
    if len(names) < 2:
        pytest.skip("this build has kernels of one format")
    experts = make_experts("int4", 4, 64, 64, 32, "none", torch.float16, DEVICE)
    args, _ = make_call(experts, (4, 0, 7, 1))
    for name in [name for format, name in names.items() if format != "int4"]:
        with pytest.raises(RuntimeError, match=f"minfer::grouped_w4a16_gemm: kernel {name} cannot compute this problem"):
            experts.gemm(*args, kernel=name)
