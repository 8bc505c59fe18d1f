"""docs/numerics.md on a GPU: every path that a kernel takes, element by element against float64 of the unrounded operands.

Kernels are forced by name, so that each path is seen; the planner's own choice and "dequantize" beside them. Sections are that page's. The
checks are numerics_cases.py's, which test_numerics_cpu.py runs with the CPU kernels.
"""

import functools
import itertools
import re

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES, runs_here

from tests.attention.cases import kernels_here
from tests.attention.kv_cache_cases import KV_FORMATS, make_cache
from tests.contracts import numerics_cases as cases
from tests.contracts.numerics_cases import (
    PATHS,
    TINY,
    UNIT,
    ZEROS,
    path_of,
)
from tests.gemm.cases import ACTIVATIONS, DTYPES, name_of
from tests.moe.grouped_cases import offsets_of
from tests.moe.grouped_quantized_cases import require_kernels
from tests.quantized_gemm.weight_format_cases import BITS, GROUPS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DECOMPOSITIONS = ("persistent", "stream_k", "split_k,splits=3")
WEIGHTS = [(name, zeros) for name in BITS for zeros in ZEROS.get(name, ("none",))]


def compiled(family):
    """Kernels of a family that are in this build; where nothing runs, and tests are skipped, all of the table."""
    everything = not runs_here()
    return {k["name"]: k for k in minfer.kernels(family) if k["compiled"] or everything}


QUANTISED, GROUPED, DENSE = compiled("w4a16"), compiled("moe_w4a16"), compiled("gemm")
ATTENTION = {k["name"]: k for k in kernels_here()}


def groups_of(kernel) -> tuple[int, ...]:
    """Group sizes that a kernel reads: the least, and all of k where it may."""
    fixed = {"mxfp4": (32,), "nvfp4": (16,)}.get(kernel["b_format"])
    return fixed or (kernel["group_multiple"], -1)


def randn(*shape, dtype):
    return torch.randn(shape, device=DEVICE).to(dtype)


# ---- section 4: quantised weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", QUANTISED)
def test_weights_of_kernels(kernel):
    """Sections 4.2 and 4.3: every element, seen alone: within its bound of the unrounded weight, and what the model of the path says.

    Tails of tiles, blocks and groups in n and k; as many tokens as k, so that each tile of tokens meets each column.
    """
    row = QUANTISED[kernel]
    dtype, name, path = DTYPE_OF[row["ab_type"]], row["b_format"], path_of(kernel)
    for zeros, group_size in itertools.product(ZEROS.get(name, ("none",)), groups_of(row)):
        weight = cases.make_weight(name, 200, 584, group_size, zeros, dtype, DEVICE)
        what = f"{kernel}, zeros {zeros}, groups of {group_size}"
        cases.check_weight(functools.partial(weight.gemm, kernel=kernel), weight, path, torch.arange(584, device=DEVICE), what)


@pytest.mark.parametrize("name, zeros", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_weights_written_out(dtype, name, zeros):
    """Section 4.4: kernel="dequantize", the operator that dequantises, and the planner's choice for one and for few tokens."""
    for group_size in GROUPS.get(name, (32, 128, -1)):
        weight = cases.make_weight(name, 200, 584, group_size, zeros, dtype, DEVICE)
        what, columns = f"{name}, zeros {zeros}, groups of {group_size}", torch.arange(584, device=DEVICE)
        cases.check_weight(functools.partial(weight.gemm, kernel="dequantize"), weight, "dequantize", columns, what)
        got = weight.dequantize(**({"out_dtype": dtype} if name in ("mxfp4", "nvfp4") else {}))
        exact = cases.parts_of(weight).exact
        cases.judge(got, exact, cases.weight_bound(weight, "dequantize"), f"{what}, dequantised")
        for tokens in (1, 5, 40):
            form = dict(group_size=group_size, zeros=weight.zeros is not None, w4_format=name)
            plan = minfer.plan("w4a16_gemm", m=tokens, n=200, k=584, dtype=dtype, c=True, **form)
            chosen = torch.randperm(584, device=DEVICE)[:tokens]
            cases.check_weight(weight.gemm, weight, path_of(plan.kernel), chosen, f"{what}, {tokens} tokens, planned {plan.kernel}")


@pytest.mark.parametrize("kernel", QUANTISED)
def test_sums_of_kernels(kernel):
    """Section 2 with section 4.2's errors: random sums under every decomposition, with a whole epilogue."""
    row = QUANTISED[kernel]
    dtype, name, path = DTYPE_OF[row["ab_type"]], row["b_format"], path_of(kernel)
    kinds = ZEROS.get(name, ("none",))
    for number, (decomposition, m) in enumerate(itertools.product(DECOMPOSITIONS, (3, 70, 300))):
        sizes = groups_of(row)
        weight = cases.make_weight(name, 392, 2056, sizes[number % len(sizes)], kinds[number % len(kinds)], dtype, DEVICE)
        weight.alpha = (1.0, -0.37)[number % 2]
        a = randn(m, 2056, dtype=dtype) / 16
        epilogue = {} if number % 3 == 0 else dict(c=randn(m, 392, dtype=(dtype, torch.float32)[number % 2]), bias=randn(392, dtype=dtype))
        override = f"{kernel}@decomposition={decomposition}"
        cases.check_sums(functools.partial(weight.gemm, kernel=override), weight, path, a, f"{override}, {m} tokens", **epilogue)


@pytest.mark.parametrize("name, zeros", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sums_as_planned(dtype, name, zeros):
    """Few and many tokens, whatever path the planner takes: within the widest of the paths' bounds."""
    weight = cases.make_weight(name, 1024, 1024, GROUPS.get(name, (128,))[-1], zeros, dtype, DEVICE)
    error = torch.stack([cases.weight_bound(weight, path) for path in PATHS]).amax(0)
    for m in (1, 16, 128, 2048):
        a = randn(m, 1024, dtype=dtype) / 16
        exact, bound = cases.gemm_bound(a, cases.parts_of(weight).exact, error=error, out_dtype=dtype)
        cases.judge(weight.gemm(a), exact, bound, f"{name}, zeros {zeros}, {m} tokens")


@pytest.mark.parametrize("kernel", [k for k, row in QUANTISED.items() if row["b_format"] == "mxfp4"])
def test_scales_of_e8m0(kernel):
    """Section 4.3: the scales for which weights are exact, all E2M1 values each; D is the weight, rounded once."""
    row = QUANTISED[kernel]
    dtype = DTYPE_OF[row["ab_type"]]
    exponents = torch.arange(59, 193) if dtype == torch.bfloat16 else torch.arange(104, 141)
    weight = cases.make_weight("mxfp4", 64, 32 * len(exponents), 32, "none", dtype, DEVICE)
    weight.scales = exponents.to(torch.uint8)[:, None].expand(-1, 64).contiguous().to(DEVICE)
    k = weight.codes.shape[1]
    columns = torch.arange(0, k, 2, device=DEVICE)
    a = torch.zeros(len(columns), k, dtype=dtype, device=DEVICE)
    a[torch.arange(len(columns)), columns] = 1.0
    want = cases.rounded(cases.parts_of(weight).exact, dtype)[:, columns].mT
    cases.judge(weight.gemm(a, kernel=kernel), want, torch.zeros_like(want), kernel)


@pytest.mark.parametrize("kernel", GROUPED)
def test_weights_of_grouped_kernels(kernel):
    """Section 4: an expert's rows all see one column of its weight, whose rounded value the expert's bias takes away; D is what is left."""
    row = GROUPED[kernel]
    dtype, name, path = DTYPE_OF[row["ab_type"]], row["b_format"], path_of(kernel)
    u, experts, n, k = UNIT[dtype], 24, 192, 520
    for zeros, group_size in itertools.product(ZEROS.get(name, ("none",)), groups_of(row)):
        weights = [cases.make_weight(name, n, k, group_size, zeros, dtype, DEVICE) for _ in range(experts)]
        stacked = [torch.stack([getattr(w, part) for w in weights]) for part in ("qweight", "scales")]
        offsets_zero = None if weights[0].zeros is None else torch.stack([w.zeros for w in weights])
        counts = [(1, 3, 8, 17, 40, 130)[e % 6] for e in range(experts)]
        columns = [int(x) for x in torch.randint(0, k, (experts,))]
        columns[0], columns[1] = 0, k - 1
        lift = 2.0**8
        exact = torch.stack([lift * cases.parts_of(w).exact[:, c] for w, c in zip(weights, columns, strict=True)])
        bias = (-exact).to(dtype)
        a = torch.zeros(sum(counts), k, dtype=dtype, device=DEVICE)
        expert = torch.arange(experts).repeat_interleave(torch.tensor(counts)).to(DEVICE)
        a[torch.arange(sum(counts)), torch.tensor(columns, device=DEVICE)[expert]] = 1.0
        alpha = torch.full((experts,), lift, device=DEVICE)
        form = dict(group_size=group_size, w4_format=name, alpha=alpha, bias=bias, kernel=kernel)
        got = minfer.grouped_w4a16_gemm(a, *stacked, offsets_zero, offsets_of(torch.tensor(counts), DEVICE), **form)
        left = (exact + bias.double())[expert]
        error = torch.stack([lift * cases.weight_bound(w, path)[:, c] for w, c in zip(weights, columns, strict=True)])[expert]
        bound = u * left.abs() + (1 + u) * (error + 2.0**-22 * exact[expert].abs()) + TINY[dtype]
        cases.judge(got, left, bound, f"{kernel}, zeros {zeros}, groups of {group_size}")


@pytest.mark.parametrize("kernel", GROUPED)
def test_sums_of_grouped_kernels(kernel):
    """Section 2 with section 4.2's errors."""
    row = GROUPED[kernel]
    dtype, name, path = DTYPE_OF[row["ab_type"]], row["b_format"], path_of(kernel)
    zeros, n, k, counts = ZEROS.get(name, ("none",))[-1], 192, 1032, (5, 0, 70, 1)
    weights = [cases.make_weight(name, n, k, groups_of(row)[0], zeros, dtype, DEVICE) for _ in counts]
    stacked = [torch.stack([getattr(w, part) for w in weights]) for part in ("qweight", "scales")]
    own_zeros = None if weights[0].zeros is None else torch.stack([w.zeros for w in weights])
    a = randn(sum(counts), k, dtype=dtype) / 16
    got = minfer.grouped_w4a16_gemm(
        a, *stacked, own_zeros, offsets_of(torch.tensor(counts), DEVICE), group_size=groups_of(row)[0], w4_format=name, kernel=kernel
    )
    for part, out, weight in zip(a.split(counts), got.split(counts), weights, strict=True):
        exact, bound = cases.gemm_bound(part, cases.parts_of(weight).exact, error=cases.weight_bound(weight, path), out_dtype=dtype)
        cases.judge(out, exact, bound, f"{kernel}, {len(part)} rows")


# ---- sections 2 and 3: sums and activations ------------------------------------------------------------------------------------------


def dense_operands(row, m, n, k):
    dtype = DTYPE_OF[row["ab_type"]]
    a = randn(m, k, dtype=dtype) if row["a_major"] == "k" else randn(k, m, dtype=dtype).mT
    b = randn(n, k, dtype=dtype).mT if row["b_major"] == "k" else randn(k, n, dtype=dtype)
    return a, b


@pytest.mark.parametrize("kernel", DENSE)
def test_dense_sums(kernel):
    """Section 2: persistent, split-K and stream-K; D in 16 bits (the fast epilogue), in 32 and in codes (the general one); gated."""
    row = DENSE[kernel]
    dtype = DTYPE_OF[row["ab_type"]]
    a, b = dense_operands(row, 200, 272, 1096)
    c, bias = randn(200, 272, dtype=dtype), randn(272, dtype=dtype)
    for decomposition, out_dtype in itertools.product(DECOMPOSITIONS, (dtype, torch.float32)):
        override = f"{kernel}@decomposition={decomposition}"
        exact, bound = cases.gemm_bound(a, b.mT, alpha=-0.37, c=c, bias=bias, out_dtype=out_dtype)
        got = minfer.gemm(a, b, c=c, beta=1.0, bias=bias, alpha=-0.37, out_dtype=out_dtype, kernel=override)
        cases.judge(got, exact, bound, f"{override}, D {out_dtype}")
        scale = torch.full((1,), 0.1, device=DEVICE)
        q, _ = minfer.gemm(a, b, c=c, beta=1.0, bias=bias, alpha=-0.37, quant="fp8_tensor", scale=scale, kernel=override)
        exact = cases.gemm_bound(a, b.mT, alpha=-0.37, c=c, bias=bias, out_dtype=torch.float32)
        cases.check_codes(q, None, exact, "fp8_tensor", f"{override}, codes", scale)
    if row["tile_n"] == 1:  # no tile of it has a gate and its up
        return
    a = a / 16
    for activation in ACTIVATIONS:
        exact, bound = cases.gated_bound(a, b.mT, activation=activation, bias=bias, out_dtype=dtype)
        cases.judge(minfer.gemm_gated(a, b, activation=activation, bias=bias, kernel=kernel), exact, bound, f"{kernel}, gated {activation}")


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_activations_of_every_16_bit_number(dtype, activation):
    """Section 3: act(0 + C) of all 65536 values: by the fast epilogue, the general one, portable kernels and those of quantised weights."""
    x = cases.patterns(dtype, DEVICE).view(256, 256)
    a, b = torch.zeros(256, 64, dtype=dtype, device=DEVICE), torch.zeros(256, 64, dtype=dtype, device=DEVICE).mT
    short = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    wanted = lambda k: k["ab_type"] == short and k["a_major"] == k["b_major"] == "k"  # noqa: E731
    for kernel in (None, *(name for name, row in DENSE.items() if wanted(row))):
        for out_dtype in (dtype, torch.float32):
            exact, bound = cases.activation_bound(x, activation, "cuda", out_dtype)
            got = minfer.gemm(a, b, c=x, beta=1.0, activation=activation, out_dtype=out_dtype, kernel=kernel)
            cases.judge(got, exact, bound, f"{activation} of {dtype}, D {out_dtype}, {kernel}")
    exact, bound = cases.activation_bound(x, activation, "cuda", dtype)
    weight = cases.make_weight("int4", 256, 64, -1, "none", dtype, DEVICE)
    for kernel, row in QUANTISED.items():
        if row["ab_type"] == short and row["b_format"] == "int4":
            cases.judge(weight.gemm(a, c=x, activation=activation, kernel=kernel), exact, bound, f"{activation} of {dtype}, {kernel}")


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_over_float32(activation):
    """Section 3: over the whole range of float32."""
    x = cases.floats(2**22, DEVICE).view(2048, 2048)
    a, b = (torch.zeros(2048, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    got = minfer.gemm(a, b.mT, c=x, beta=1.0, activation=activation, out_dtype=torch.float32)
    cases.judge(got, *cases.activation_bound(x, activation, "cuda", torch.float32), activation)


def one_row_of_experts(dtype):
    """All values of a dtype as biases of 16 experts, a row of zeros for each of them, and the rows' ends."""
    x = cases.patterns(dtype, DEVICE).view(16, 4096)
    return x, torch.zeros(16, 64, dtype=dtype, device=DEVICE), torch.arange(1, 17, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_activations_of_grouped_kernels(dtype, activation):
    """Section 3: act(0 + bias) of all 65536 values, by the grouped epilogue of 16-bit experts."""
    x, a, offsets = one_row_of_experts(dtype)
    exact, bound = cases.activation_bound(x, activation, "cuda", dtype)
    w = torch.zeros(16, 4096, 64, dtype=dtype, device=DEVICE).mT
    cases.judge(minfer.grouped_gemm(a, w, offsets, bias=x, activation=activation), exact, bound, f"{activation} of {dtype}, 16-bit")


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_activations_of_grouped_kernels_of_4_bit_weights(dtype, activation):
    """The same by the grouped epilogue of 4-bit experts."""
    require_kernels(DEVICE)
    x, a, offsets = one_row_of_experts(dtype)
    exact, bound = cases.activation_bound(x, activation, "cuda", dtype)
    weight = cases.make_weight("int4", 4096, 64, 32, "none", dtype, DEVICE)
    packed = [t.expand(16, *t.shape).contiguous() for t in (weight.qweight, weight.scales)]
    got = minfer.grouped_w4a16_gemm(a, *packed, None, offsets, group_size=32, bias=x, activation=activation)
    cases.judge(got, exact, bound, f"{activation} of {dtype}, int4")


# ---- section 5: attention ----------------------------------------------------------------------------------------------------------------


def dims_of(kernel: str) -> tuple[int, int]:
    """head_dim and head_dim_v: .._d192x128_.. or, the same for both, .._d128_.."""
    dims = re.search(r"_d(\d+)(?:x(\d+))?_", kernel)
    return int(dims[1]), int(dims[2] or dims[1])


def formats_of(kernel: str) -> tuple[str, ...]:
    """kv_format of what a kernel reads."""
    b_format, element = ATTENTION[kernel]["b_format"], ATTENTION[kernel]["ab_type"]
    codes = ("fp8_e4m3", "int8", "int4") if element == "f16" else ("fp8_e4m3", "int4")  # float16 cannot hold bfloat16's scales of int8
    return {"dense": ("16bit",), "codes": codes}.get(b_format, (b_format,))


PREFILL = [name for name, row in ATTENTION.items() if row["b_format"] == "dense" and not name.endswith("_decode")]
_CONVERTING = [name for name, row in ATTENTION.items() if row["b_format"] in ("codes", "int8") and row["tile_m"] >= 64]
_DECODING = [name for name in ATTENTION if name.endswith("_decode")]
CACHED = [(name, kv_format) for name in dict.fromkeys(_DECODING + _CONVERTING) for kv_format in formats_of(name)]


@pytest.mark.parametrize("softcap", (0.0, 3.0))
@pytest.mark.parametrize("kernel", PREFILL)
def test_prefill(kernel, softcap):
    """Section 5.1: 16-bit keys and values; few keys and several blocks, flat and sharp softmaxes, a diagonal."""
    dtype, (head_dim, head_dim_v) = DTYPE_OF[ATTENTION[kernel]["ab_type"]], dims_of(kernel)
    for (rows, length), sharpness, causal in itertools.product(((130, 200), (70, 1100)), (1.0, 4.0), (False, True)):
        q, k, v = (
            randn(1, rows, 4, head_dim, dtype=torch.float32),
            randn(1, length, 2, head_dim, dtype=dtype),
            randn(1, length, 2, head_dim_v, dtype=dtype),
        )
        q = (q * sharpness).to(dtype)

        def call(**options):
            out, lse = minfer.attention(q, k, v, kernel=kernel, **options)  # noqa: B023
            return out[0], lse[0]

        options = dict(scale=head_dim**-0.5, softcap=softcap, causal=causal)
        what = f"{kernel}, {rows} x {length}, sharpness {sharpness}, causal {causal}"
        cases.check_attention(call, q[0], cases.dense_keys(k[0], v[0]), what, **options)


@pytest.mark.parametrize("softcap", (0.0, 3.0))
@pytest.mark.parametrize("kernel, kv_format", CACHED)
def test_caches(kernel, kv_format, softcap):
    """Sections 5.4 and 5.5: decode and prefill over caches of every format; decode also with a number of splits."""
    dtype, (dim, _) = DTYPE_OF[ATTENTION[kernel]["ab_type"]], dims_of(kernel)
    decodes = kernel.endswith("_decode")
    for length, rows, sharpness in itertools.product((128, 1088), (1, 3) if decodes else (70,), (1.0, 4.0)):
        cache, seq_lens, _ = make_cache([length], kv_format, 2, (dim, dim), dtype, DEVICE, page_size=64, paged=False)
        q = (randn(1, rows, 8, dim, dtype=torch.float32) * sharpness).to(dtype)
        keys = cases.cached_keys(cache, 0, length, "decode" if decodes else "prefill", dtype)
        for splits in (None, 3) if decodes else (None,):

            def call(**options):
                own = cache.scales() | options | dict(kernel=kernel, num_splits=splits)  # noqa: B023
                out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, **own)  # noqa: B023
                return out[0], lse[0]

            what = f"{kernel}, {kv_format}, {rows} x {length}, sharpness {sharpness}, splits {splits}"
            cases.check_attention(call, q[0], keys, what, scale=dim**-0.5, softcap=softcap, causal=True)


def cap_cache(k0: list[float], kv_format: str, batch: int, dim: int, dtype):
    """A contiguous cache whose keys are k0 times the first unit vector, exactly, in every sequence; values are 0."""
    length = len(k0)
    room = -(-length // 64) * 64
    cache = minfer.allocate_kv_cache(batch, room, 1, dim, kv_format=kv_format, dtype=dtype, device=DEVICE)
    signs = torch.tensor(k0, device=DEVICE)
    if kv_format == "16bit":
        cache.k[:, :length, 0, 0] = signs.to(dtype)
    elif kv_format == "fp8_e4m3":
        cache.k.view(torch.uint8)[:, :length, 0, 0] = signs.to(torch.float8_e4m3fn).view(torch.uint8)
    elif kv_format == "int8":
        cache.k[:, :length, 0, 0] = signs.to(torch.int8)
        cache.k_scale.fill_(1.0)
    elif length % 64:  # no whole group
        cache.k_residual[:, :length, 0, 0] = signs.to(dtype)
    else:
        cache.k[:, :length, 0, 0] = (signs + 1).to(torch.uint8)  # code - 1
        cache.k_scale[..., 0, 0], cache.k_scale[..., 1, 0] = 1.0, -1.0
    return cache, torch.full((batch,), length, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("keys", cases.CAP_KEYS)
@pytest.mark.parametrize("kernel", PREFILL)
def test_softcap_of_prefill(kernel, keys):
    """Section 5.2: both of the softcap's formulas, by the lse of keys that are known."""
    dtype, (dim, dim_v) = DTYPE_OF[ATTENTION[kernel]["ab_type"]], dims_of(kernel)

    def lse_of(q0, k0, **options):
        q, k = (torch.zeros(1, n, 1, dim, dtype=dtype, device=DEVICE) for n in (len(q0), len(k0)))
        q[0, :, 0, 0], k[0, :, 0, 0] = q0, torch.tensor(k0, device=DEVICE).to(dtype)
        return minfer.attention(q, k, k[..., :dim_v], kernel=kernel, **options)[1][0, 0]

    for softcap, scale in cases.CAPS:
        cases.check_softcap(lse_of, dtype, keys, softcap, scale, 8192, DEVICE, kernel)


@pytest.mark.parametrize("keys", cases.CAP_KEYS)
@pytest.mark.parametrize("kernel, kv_format", CACHED)
def test_softcap_over_caches(kernel, kv_format, keys):
    """Section 5.2: decode and prefill over codes."""
    dtype, (dim, _) = DTYPE_OF[ATTENTION[kernel]["ab_type"]], dims_of(kernel)
    decodes = kernel.endswith("_decode")

    def lse_of(q0, k0, **options):
        batch = len(q0) // 64 if decodes else 1
        cache, seq_lens = cap_cache(k0, kv_format, batch, dim, dtype)
        q = torch.zeros(batch, *((1, 64) if decodes else (len(q0), 1)), dim, dtype=dtype, device=DEVICE)
        q[..., 0] = q0.view(batch, 1, 64) if decodes else q0.view(1, -1, 1)
        own = cache.scales() | options | dict(kernel=kernel, causal=False)
        return minfer.attention_paged(q, cache.k, cache.v, seq_lens, **own)[1].flatten()  # [batch, heads, rows]

    for softcap, scale in cases.CAPS:
        cases.check_softcap(lse_of, dtype, keys, softcap, scale, 4096, DEVICE, f"{kernel}, {kv_format}")


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_append(dtype, kv_format):
    """Section 5.6."""
    if kv_format == "16bit":
        pytest.skip("a copy")
    cases.check_append(kv_format, dtype, DEVICE, kv_format)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=name_of)
def test_merge(dtype):
    """Section 5.7: up to 16 states are one launch, more are several."""
    for count in (2, 5, 16, 40):
        outs = [randn(2, 65, 3, 64, dtype=dtype) for _ in range(count)]
        lses = [torch.randn(2, 3, 65, device=DEVICE) * 8 for _ in range(count)]
        lses[1][0], outs[1][0] = -torch.inf, torch.nan
        cases.check_merge(outs, lses, f"{count} states")


# ---- section 6: experts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring, renormalize", list(itertools.product(("softmax", "sigmoid"), (False, True))))
def test_router(scoring, renormalize):
    """Section 6.1."""
    for experts in (8, 128, 1024):
        logits = torch.randn(500, experts, device=DEVICE) * 6
        weights, ids = minfer.moe_router(logits, 8, scoring=scoring, renormalize=renormalize)
        cases.judge(weights, *cases.router_bound(logits, ids, scoring=scoring, renormalize=renormalize), f"{scoring} of {experts}")


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=name_of)
def test_combine(dtype):
    """Section 6.2."""
    y, weights = randn(900, 136, dtype=dtype), torch.rand(100, 9, device=DEVICE)
    inverse = torch.randperm(900, device=DEVICE).int().view(100, 9)
    for own in (weights, None):
        cases.judge(minfer.moe_combine(y, inverse, own), *cases.combine_bound(y, own, inverse, dtype), "combine")


# ---- section 7: rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", (1, 96, 1000, 16384, 50257, 262144, 1 << 20))
def test_sums_over_rows(width):
    """Sections 7.1 and 7.2: numbers that are far from 0, of which a mean has many digits."""
    for dtype, middle in ((torch.float16, 3.0), (torch.bfloat16, 100.0)):
        x = (torch.randn(5, width, device=DEVICE) + middle).to(dtype)
        cases.judge(minfer.rms_norm(x, eps=0.0), *cases.stored(cases.rms_norm_rows(x, eps=0.0), dtype), "rms_norm")
        cases.judge(minfer.layer_norm(x), *cases.stored(cases.layer_norm_rows(x), dtype), "layer_norm")
    x = torch.randn(5, width, device=DEVICE) * 20
    cases.judge(minfer.softmax(x), *cases.stored(cases.softmax_rows(x), torch.float32), "softmax")
    cases.judge(minfer.log_softmax(x), *cases.stored(cases.softmax_rows(x, True), torch.float32), "log_softmax")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_rows(activation):
    """Section 7.4: every number of both types, and float32 of every exponent."""
    for x in (*(cases.patterns(dtype, DEVICE) for dtype in DTYPES), cases.floats(1 << 20, DEVICE)):
        cases.judge(minfer.activation(x, activation), *cases.activation_bound(x, activation, "cuda", x.dtype), activation)


@pytest.mark.parametrize("quant", cases.LARGEST_CODE)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_codes(dtype, quant):
    """Section 7.5: of numbers of all sizes, and of normalised ones."""
    x = (torch.randn(20, 5000, device=DEVICE) * torch.exp2(torch.arange(20, device=DEVICE) - 14.0)[:, None]).to(dtype)
    own = {"scale": torch.full((1,), 0.03, device=DEVICE)} if quant == "fp8_tensor" else {}
    exact = (x.double(), torch.zeros_like(x, dtype=torch.float64))
    cases.check_codes(*minfer.ops.quantize(x, quant, **own), exact, quant, "quantize", **own)
    q, scales = minfer.rms_norm(x, quant=quant, **own)
    cases.check_codes(q, scales, cases.rms_norm_rows(x), quant, "rms_norm", **own)


@pytest.mark.parametrize("kernel", (*compiled("norm_gemm"), "two_launches"))
def test_norm_and_product(kernel):
    """Section 7.9: rows of many magnitudes, and columns of W that are long or cancel."""
    row = compiled("norm_gemm").get(kernel, {"tile_m": 24, "ab_type": "bf16", "threads": 512})
    dtype, m, threads = DTYPE_OF[row["ab_type"]], row["tile_m"], row["threads"]
    for k, gated in itertools.product((8, 96, 1000, 6144 if m <= 8 else 5120), (False, True)):
        x, residual = (randn(m, k, dtype=torch.float32) * torch.exp2(-torch.arange(m, device=DEVICE) % 9.0)[:, None] for _ in range(2))
        x, residual, norm_weight = x.to(dtype), residual.to(dtype), randn(k, dtype=dtype)
        w = randn(272, k, dtype=torch.float32) / k**0.5
        w[::3, 1::2] = -w[::3, 0::2]  # sums of little beside their terms
        w, before, bias = w.to(dtype), residual.clone(), randn(272, dtype=torch.float32)
        operator = minfer.rms_norm_gemm_gated if gated else minfer.rms_norm_gemm
        options = dict(weight_offset=0.5, bias=bias, activation="gelu")
        have = operator(x, norm_weight, w.t(), 1e-5, residual=residual, kernel=kernel, **options)
        bound = cases.norm_gemm_bound(x, w, norm_weight, 1e-5, residual=before, gated=gated, **options)
        cases.judge(have, *bound, f"{kernel}, {threads} threads, k {k}")
