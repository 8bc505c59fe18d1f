"""D of grouped GEMMs in e4m3 codes, on a GPU: every kernel by name, held against its own 16-bit D, whose sums are the same."""

import functools
import itertools
import math

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.gemm.cases import DTYPES, name_of
from tests.gemm.output_codes_cases import POISON, QUANT, codes_in_memory, codes_mismatch, same_codes, scale_for, untouched_around
from tests.moe.grouped_cases import LAYOUTS, SHAPES, make_case
from tests.moe.grouped_quantized_cases import COUNTS, make_call, make_experts, require_kernels
from tests.moe.test_output_codes_cpu import bad_calls, grouped_calls

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
KERNELS = {k["name"]: k for k in minfer.kernels("moe") if k["compiled"]} or {k["name"]: k for k in minfer.kernels("moe")}
KERNELS_W4 = {k["name"]: k for k in minfer.kernels("moe_w4a16") if k["compiled"]}
# gather, row_scale, bias, and how the epilogue goes on
VARIANTS = (
    (False, False, False, {}),
    (True, True, True, {"activation": "gelu"}),
    *((i % 2 == 0, True, i != 1, {"gated": True, "activation": "silu", "gate_layout": layout}) for i, layout in enumerate(LAYOUTS)),
    (True, False, True, {"gated": True, "activation": "swigluoai"}),
)


def mismatch(call, args, kwargs) -> str | None:
    """Of the codes with the 16-bit D of the same call; out= with rows on and off 8 bytes, and the bits of a second run."""
    d = call(*args, **kwargs)
    scale = scale_for(d)
    q, given = call(*args, **kwargs, quant=QUANT, scale=scale)
    assert given is scale
    problem = codes_mismatch(q, d, scale)
    if problem is not None:
        return problem
    if not torch.equal(call(*args, **kwargs, quant=QUANT, scale=scale)[0].view(torch.uint8), q.view(torch.uint8)):
        return "two runs differ"
    for left, right in ((8, -(8 + d.shape[1]) % 8), (3, 2)):
        out, memory = codes_in_memory(tuple(d.shape), DEVICE, left=left, right=right)
        call(*args, **kwargs, quant=QUANT, scale=scale, out=out)
        if not same_codes(out, q):
            return f"out= with {left} codes in front of a row differs"
        if not untouched_around(out, memory):
            return "memory around the output was written"
    return None


def report(failures):
    assert not failures, "\n".join([f"{len(failures)} wrong", *failures[:8]])


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    dtype, failures = DTYPE_OF[KERNELS[name]["ab_type"]], []
    odd = ((3, 20, 41, 77), (4, 33, 46, 64)) if "sm80" in name else ()  # n that is no multiple of 8, k that TMA does not address
    for (experts, rows, n, k), (gather, row_scale, bias, epilogue) in itertools.product(SHAPES + odd, VARIANTS):
        if epilogue.get("gated") and n % (16 if epilogue.get("gate_layout") == "blocks" else 2):
            continue
        args, kwargs = make_case(experts, rows, n, k, dtype, DEVICE, gather=gather, row_scale=row_scale, bias=bias)
        problem = mismatch(minfer.grouped_gemm, args, kwargs | epilogue | {"kernel": name})
        if problem is not None:
            failures.append(f"{(experts, rows, n, k)} {list(kwargs)} {epilogue}: {problem}")
    report(failures)


@functools.lru_cache(maxsize=16)
def experts_of(form, group_size, dtype, n, k):
    torch.manual_seed(n + k)
    return make_experts(form, len(COUNTS), n, k, group_size, "none", dtype, DEVICE, alpha=form != "int4")


@pytest.mark.parametrize("name", KERNELS_W4)
def test_kernels_of_4_bit_experts(name):
    kernel, failures = KERNELS_W4[name], []
    group_size = {"mxfp4": 32, "nvfp4": 16}.get(kernel["b_format"]) or max(32, kernel["group_multiple"])
    for (n, k), (gather, row_scale, bias, epilogue) in itertools.product(((336, 1152), (64, 384)), VARIANTS):
        experts = experts_of(kernel["b_format"], group_size, DTYPE_OF[kernel["ab_type"]], n, k)
        args, kwargs = make_call(experts, COUNTS, gather=gather, row_scale=row_scale, bias=bias, behind=0 if gather else 5)
        epilogue = {key: value for key, value in epilogue.items() if key != "gate_layout"}
        problem = mismatch(experts.gemm, args, kwargs | epilogue | {"kernel": name})
        if problem is not None:
            failures.append(f"{(n, k)} {list(kwargs)} {epilogue}: {problem}")
    report(failures)


@pytest.mark.parametrize("kind", ("ragged", "even", "one"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_as_planned(dtype, kind):
    """From one row to thousands, which are gathered first."""
    for (experts, n, k), rows in itertools.product(((8, 256, 512), (128, 192, 256), (4, 31, 40)), (1, 2, 17, 129, 1000, 5000)):
        args, kwargs = make_case(experts, rows, n, k, dtype, DEVICE, kind=kind, gather=True)
        assert mismatch(minfer.grouped_gemm, args, kwargs) is None, (experts, n, k, rows)
    args, kwargs = make_case(4, 8000, 4096, 1032, dtype, DEVICE, kind=kind, gather=True, source_rows=3000)
    assert mismatch(minfer.grouped_gemm, args, kwargs) is None


@pytest.mark.parametrize("value", (0.1, math.nan, 0.0, 2.0**-149))
def test_rows_of_nobody_and_special_scales(value):
    a, b = torch.randn(3, 40, 64, device=DEVICE).half(), torch.randn(3, 96, 64, device=DEVICE).half().mT
    scale = torch.tensor([value], device=DEVICE)
    offsets = torch.tensor([20, 20, 70], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([10, 0, 99], dtype=torch.int32, device=DEVICE)
    q, _ = minfer.grouped_gemm(a.view(120, 64), b, offsets, quant=QUANT, scale=scale)
    assert q[70:].view(torch.uint8).eq(0).all()
    numbers = q[:70].float()
    if math.isnan(value):
        assert numbers.isnan().all()
    elif value == 0.0:
        assert numbers.eq(0).all()
    elif value < 1e-30:
        assert numbers.abs().eq(448).double().mean() > 0.99
    q, _ = minfer.grouped_gemm_masked(a, b, counts, quant=QUANT, scale=scale)
    assert q[0, 10:].view(torch.uint8).eq(0).all() and q[1].view(torch.uint8).eq(0).all()
    out, memory = codes_in_memory((3, 40, 96), DEVICE, left=0, right=0, margin=0)
    minfer.grouped_gemm_masked(a, b, counts, quant=QUANT, scale=scale, out=out)
    assert same_codes(out[2], q[2]) and same_codes(out[0, :10], q[0, :10])
    assert memory[0, 10:].eq(POISON).all() and memory[1].eq(POISON).all()


def test_special_numbers():
    """NaN stays NaN, infinities are saturated, in kernels of every kind."""
    (a, b, offsets), _ = make_case(3, 60, 96, 64, torch.bfloat16, DEVICE)
    a[0, 3], a[1, 4], a[2] = math.nan, math.inf, 0.0
    for kernel in (None, *KERNELS):
        if kernel is not None and KERNELS[kernel]["ab_type"] != "bf16":
            continue
        q, _ = minfer.grouped_gemm(a, b, offsets, quant=QUANT, scale=torch.full((1,), 0.01, device=DEVICE), kernel=kernel)
        have = q.float()
        assert have[0].isnan().all() and have[1].abs().eq(448).all() and have[2].eq(0).all(), kernel
        assert not have[3:].isnan().any(), kernel


def test_a_graph_follows_its_scale():
    args, kwargs = make_case(6, 90, 160, 256, torch.bfloat16, DEVICE, gather=True)
    scale = torch.full((1,), 0.02, device=DEVICE)
    minfer.grouped_gemm(*args, **kwargs, quant=QUANT, scale=scale)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        q, _ = minfer.grouped_gemm(*args, **kwargs, quant=QUANT, scale=scale)
    for value in (0.02, 0.5, 0.003):
        scale.fill_(value)
        q.view(torch.uint8).fill_(0x7F)
        graph.replay()
        torch.cuda.synchronize()
        want = minfer.grouped_gemm(*args, **kwargs, quant=QUANT, scale=scale)[0]
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8)), value


@pytest.mark.parametrize("name", bad_calls())
@pytest.mark.parametrize("op", ("grouped_gemm", "grouped_gemm_masked", "grouped_w4a16_gemm"))
def test_calls_that_cannot_be_right(op, name):
    if op == "grouped_w4a16_gemm":
        require_kernels(DEVICE)
    options, message = bad_calls(DEVICE)[name]
    with pytest.raises(RuntimeError, match=f"minfer::{op}: .*{message}"):
        grouped_calls(DEVICE)[op](**options)
