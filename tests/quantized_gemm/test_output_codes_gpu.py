"""D of the W4A16 and W8A16 GEMMs in e4m3 codes, on a GPU: every kernel by name, the planner's choice, the dequantising path.

Codes are held against the 16-bit D of the same kernel, whose sums are the same.
"""

import functools
import itertools

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.gemm.cases import DTYPES, name_of
from tests.gemm.output_codes_cases import QUANT, codes_in_memory, codes_mismatch, same_codes, scale_for, untouched_around
from tests.quantized_gemm.test_output_codes_cpu import FORMATS, group_of
from tests.quantized_gemm.weight_format_cases import make_weight

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
FAMILY = minfer.kernels("w4a16")
KERNELS = {k["name"]: k for k in FAMILY if k["compiled"]} or {k["name"]: k for k in FAMILY}
DECOMPOSITIONS = ("persistent", "stream_k", "split_k,splits=3")


@functools.lru_cache(maxsize=16)
def weight_of(name, n, k, group_size, dtype):
    torch.manual_seed(n + k)
    return make_weight(name, n, k, group_size, dtype=dtype, device=DEVICE)


def group_size_of(kernel):
    """The least that the kernel reads."""
    fixed = {"mxfp4": 32, "nvfp4": 16}.get(kernel["b_format"])
    return fixed or max(32, kernel["group_multiple"])


def mismatch(call, a, *, out_shape=None, of_d=None, **options) -> str | None:
    """Of the codes with the 16-bit D of the same call, or of one with the options ``of_d`` beside; what lies around D, and the bits of a
    second run."""
    d = call(a, **options, **(of_d or {}))
    scale = scale_for(d)
    q, given = call(a, **options, quant=QUANT, scale=scale)
    assert given is scale
    problem = codes_mismatch(q, d, scale, other_sums=of_d is not None)
    if problem is None and not torch.equal(call(a, **options, quant=QUANT, scale=scale)[0].view(torch.uint8), q.view(torch.uint8)):
        problem = "two runs differ"
    if problem is None and out_shape is not None:
        out, memory = codes_in_memory(out_shape, DEVICE, left=0, right=0)  # one run of rows, which the kernel writes itself
        call(a, **options, quant=QUANT, scale=scale, out=out)
        if not same_codes(out, q) or not untouched_around(out, memory):
            problem = "out= differs, or what is around it"
    return problem


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    kernel, failures = KERNELS[name], []
    dtype = DTYPE_OF[kernel["ab_type"]]
    for (m, n, k), decomposition in itertools.product(((5, 336, 1152), (48, 136, 2304), (200, 528, 384)), DECOMPOSITIONS):
        weight = weight_of(kernel["b_format"], n, k, group_size_of(kernel), dtype)
        a = torch.randn(m, k, device=DEVICE).to(dtype)
        override = f"{name}@decomposition={decomposition}"
        c, bias = torch.randn(m, n, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE)
        for options in ({"bias": bias, "activation": "silu"}, {"c": c, "activation": "gelu"}, {"c": c.float()}):
            problem = mismatch(weight.gemm, a, out_shape=(m, n), kernel=override, **options)
            if problem is not None:
                failures.append(f"{override} on {(m, n, k)}, {list(options)}: {problem}")
        if n % 16 == 0:
            problem = mismatch(weight.gemm_gated, a, kernel=override, bias=bias)
            if problem is not None:
                failures.append(f"{override} on {(m, n, k)}, gated: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_as_planned(dtype, name):
    """And dequantised first, by name and for many tokens; act-order; weights that are constant."""
    reads = [
        k["name"]
        for k in KERNELS.values()
        if (k["b_format"], DTYPE_OF[k["ab_type"]]) == (name, dtype) and (group_of(name) or 128) % max(k["group_multiple"], 1) == 0
    ]
    for m, (n, k) in itertools.product((1, 3, 17, 65, 300, 2050), ((256, 512), (336, 1032), (16, 8))):
        weight = weight_of(name, n, k, group_of(name), dtype)
        a = torch.randn(m, k, device=DEVICE).to(dtype)
        for call in (weight.gemm, weight.gemm_gated):
            problems = [mismatch(call, a)]
            if m == 2050:  # the plan may dequantise first for one kind of D and not for the other
                problems += [mismatch(call, a, of_d={"kernel": kernel}) for kernel in ("dequantize", reads[0])]
            assert None in problems, ((m, n, k), problems)
        assert mismatch(weight.gemm, a, kernel="dequantize", bias=torch.randn(n, device=DEVICE)) is None, (m, n, k)
    perm = torch.randperm(512, device=DEVICE).int()
    a, weight = torch.randn(33, 512, device=DEVICE).to(dtype), weight_of(name, 256, 512, group_of(name), dtype)
    torch.cuda.synchronize()
    assert mismatch(weight.gemm, a, perm=perm) is None and mismatch(weight.gemm, a, constant_weights=True) is None


def test_a_graph_follows_its_scale():
    weight, scale = weight_of("int4", 256, 512, 32, torch.bfloat16), torch.full((1,), 0.02, device=DEVICE)
    a = torch.randn(9, 512, device=DEVICE).bfloat16()
    weight.gemm(a, quant=QUANT, scale=scale)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        q, _ = weight.gemm(a, quant=QUANT, scale=scale)
    for value in (0.02, 0.5, 0.003):
        scale.fill_(value)
        q.view(torch.uint8).fill_(0x7F)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(q.view(torch.uint8), weight.gemm(a, quant=QUANT, scale=scale)[0].view(torch.uint8)), value


def test_calls_that_cannot_be_right():
    weight, a = weight_of("int4", 256, 512, 32, torch.float16), torch.randn(3, 512, device=DEVICE).half()
    for options, message in (
        (dict(quant="fp8_token"), "then minfer.quantize_fp8"),
        (dict(quant=QUANT), "scale must be given for fp8_tensor"),
        (dict(scale=torch.ones(1, device=DEVICE)), "scale must be None where quant is"),
        (dict(quant=QUANT, scale=torch.ones(1)), "scale must be on a's device"),
    ):
        with pytest.raises(RuntimeError, match=message):
            weight.gemm(a, **options)
