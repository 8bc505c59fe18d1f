"""docs/numerics.md on the CPU: its models of roundings within its bounds, and the CPU kernels within them. Sections are that page's.

The CPU kernels write weights out in 16 bits ("dequantize") and compute the rest in float32, so every statement about results holds for
them; what only CUDA kernels do is checked by the models here and by test_numerics_gpu.py.
"""

import itertools
import math

import minfer
import pytest
import torch

from tests.attention.kv_cache_cases import KV_FORMATS, make_cache
from tests.contracts import numerics_cases as cases
from tests.contracts.numerics_cases import PATHS, UNIT, ZEROS, rounded
from tests.gemm.cases import ACTIVATIONS, DTYPES, name_of
from tests.quantized_gemm.weight_format_cases import BITS, GROUPS

FORMATS = tuple(BITS)
WEIGHTS = [(name, zeros) for name in FORMATS for zeros in ZEROS.get(name, ("none",))]
GROUP = {name: GROUPS.get(name, (32,))[0] for name in FORMATS}


# ---- the tools -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=name_of)
def test_rounding_is_torch_s(dtype):
    """Where float32 holds the number, torch rounds once too; ties, subnormals, overflow and infinities among them."""
    x = torch.cat([cases.floats(200000), torch.tensor([65519.996, 65520.0, 2.0**-25, 3 * 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11])])
    have, want = rounded(x.double(), dtype), x.to(dtype).double()
    assert torch.equal(have.isnan(), want.isnan()) and torch.equal(have.nan_to_num(), want.nan_to_num())


def test_judge_says_which_element_is_worst():
    exact, bound = torch.tensor([[1.0, 2.0], [3.0, math.inf]]).double(), torch.full((2, 2), 0.5).double()
    assert cases.judge(torch.tensor([[1.25, 2.0], [3.0, math.inf]]), exact, bound, "x") == 0.5
    with pytest.raises(AssertionError, match=r"x: 1 of 4 elements off, worst at \(1, 0\): exact 3, got 4, error 1, bound 0.5, ratio 2"):
        cases.judge(torch.tensor([[1.25, 2.0], [4.0, math.inf]]), exact, bound, "x")
    for wrong in (math.nan, -math.inf, 1.0):
        with pytest.raises(AssertionError, match=r"worst at \(1, 1\)"):
            cases.judge(torch.tensor([[1.0, 2.0], [3.0, wrong]]), exact, bound, "x")
    with pytest.raises(AssertionError, match="NaN|nan"):
        cases.judge(torch.tensor([math.nan]), torch.tensor([1.0]).double(), torch.tensor([1.0]), "x")


# ---- section 4: quantised weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name, zeros", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_models_are_within_their_bounds(dtype, name, zeros, path):
    """Section 4.2's table, which is sharp: over 2^17 weights the worst comes near it, and exact formats are exact."""
    weight = cases.make_weight(name, 128, 1024, GROUP[name], zeros, dtype)
    parts, bound = cases.parts_of(weight), cases.weight_bound(weight, path)
    exact = parts.exact
    ratio = cases.judge(cases.model(weight, path), exact, bound, f"{name}, zeros {zeros}, {path}")
    exact_path = name in ("mxfp4", "nvfp4") or (
        path == "accumulators" and (name == "fp8_e4m3" or zeros in ("none", "integer")) and name != "nf4"
    )
    assert ratio == 0 if exact_path else ratio > 0.6
    if not exact_path:  # in roundings of the weight: halves of its last place
        last_place = cases.power_of_two(torch.frexp(exact).exponent - 1) * UNIT[dtype]
        normal = (exact.abs() > 2.0**-10) & ((parts.value - parts.zero).abs() > 2.0**-5)  # elsewhere the absolute terms count
        roundings = ((cases.model(weight, path) - exact).abs() / last_place)[normal].max().item()
        most = {"accumulators": 2.0, "fragments": 3.0, "dequantize": 1.001}[path]
        if path == "fragments" and name != "nf4" and zeros != "fractional":
            most = 1.001
        assert roundings <= most


@pytest.mark.parametrize("name, zeros", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_weights_element_by_element(dtype, name, zeros):
    """Section 4.1: the CPU writes weights out in 16 bits. Every element is seen alone."""
    for group_size in GROUPS.get(name, (32, 128, -1)):
        weight = cases.make_weight(name, 72, 264, group_size, zeros, dtype)
        cases.check_weight(weight.gemm, weight, "dequantize", torch.arange(264), f"{name}, zeros {zeros}, groups of {group_size}")


@pytest.mark.parametrize("name, zeros", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dequantize_rounds_once(dtype, name, zeros):
    """Section 4.4."""
    weight = cases.make_weight(name, 72, 264, GROUP[name], zeros, dtype)
    exact, bound = cases.parts_of(weight).exact, cases.weight_bound(weight, "dequantize")
    got = weight.dequantize(**({"out_dtype": dtype} if name in ("mxfp4", "nvfp4") else {}))
    cases.judge(got, exact, bound, f"{name}, zeros {zeros}")
    weight.alpha = 0.3
    got = weight.dequantize(**({"out_dtype": dtype} if name in ("mxfp4", "nvfp4") else {}))
    bound = 0.3 * (bound + (UNIT[dtype] + 2.0**-22) * exact.abs()) + cases.TINY[dtype]
    cases.judge(got, exact * 0.3, bound, f"{name}, zeros {zeros}, alpha")


@pytest.mark.parametrize("name, zeros", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sums_of_weights(dtype, name, zeros):
    """Section 2 with section 4.2's errors."""
    weight = cases.make_weight(name, 72, 520, GROUP[name], zeros, dtype)
    weight.alpha = 0.37
    a = torch.randn(9, 520).to(dtype)
    epilogue = dict(c=torch.randn(9, 72), bias=torch.randn(72).to(dtype))
    cases.check_sums(weight.gemm, weight, "dequantize", a, f"{name}, zeros {zeros}", **epilogue)


def test_paths_of_kernels():
    """Every kernel of a quantised weight has a path, by its name."""
    for family in ("w4a16", "moe_w4a16"):
        for kernel in minfer.kernels(family):
            path = cases.path_of(kernel["name"])
            assert path in PATHS
            if kernel["b_format"] in ("mxfp4", "nvfp4") and kernel["ab_type"] == "bf16":
                assert path == "fragments"
    assert cases.path_of(None) == cases.path_of("dequantize") == "dequantize"


# ---- sections 2 and 3: sums and activations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gemm(dtype):
    """Section 2: D of 16 bits and of 32, every term of the epilogue."""
    a, b, c, bias = (torch.randn(*shape).to(dtype) for shape in ((33, 500), (500, 48), (33, 48), (48,)))
    for out_dtype in (dtype, torch.float32):
        exact, bound = cases.gemm_bound(a, b.mT, alpha=-0.37, c=c, bias=bias, out_dtype=out_dtype)
        cases.judge(minfer.gemm(a, b, c=c, beta=1.0, bias=bias, alpha=-0.37, out_dtype=out_dtype), exact, bound, f"D {out_dtype}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gated(dtype, activation):
    """Section 3."""
    a, b = (torch.randn(33, 500) / 8).to(dtype), (torch.randn(500, 48) / 4).to(dtype)
    exact, bound = cases.gated_bound(a, b.mT, activation=activation, out_dtype=dtype)
    cases.judge(minfer.gemm_gated(a, b, activation=activation), exact, bound + 2.0**-20 * exact.abs(), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_activations_of_every_16_bit_number(dtype, activation):
    """Section 3: D = act(0 + C) for all 65536 values of C."""
    x = cases.patterns(dtype).view(256, 256)
    a, b = torch.zeros(256, 8, dtype=dtype), torch.zeros(8, 256, dtype=dtype)
    for out_dtype in (dtype, torch.float32):
        got = minfer.gemm(a, b, c=x, beta=1.0, activation=activation, out_dtype=out_dtype)
        cases.judge(got, *cases.activation_bound(x, activation, "cpu", out_dtype), f"{activation} of {dtype}, D {out_dtype}")


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_over_float32(activation):
    """Section 3: over the whole range of float32."""
    x = cases.floats(2**18).view(512, 512)
    a, b = torch.zeros(512, 8, dtype=torch.float16), torch.zeros(8, 512, dtype=torch.float16)
    got = minfer.gemm(a, b, c=x, beta=1.0, activation=activation, out_dtype=torch.float32)
    cases.judge(got, *cases.activation_bound(x, activation, "cpu", torch.float32), activation)


GELU_TAIL = (
    3.572471173e-05,
    1.029389448e-01,
    1.109704166e-01,
    6.021794849e-02,
    1.922050403e-01,
    -1.354646523e-01,
    2.463362827e-01,
    -7.723987340e-02,
)


def emulated(x: torch.Tensor, activation: str, power_error: float, inverse_error: float) -> torch.Tensor:
    """float32 ``x`` as CUDA kernels (cpp/src/common/activation.cuh) activate it, with ex2.approx and rcp.approx off by so much."""
    fma = lambda a, b, c: (a.double() * b + c).float()  # noqa: E731
    f32 = lambda value: float(torch.tensor(value))  # noqa: E731
    flushed = lambda v: torch.where(v.abs() < 2.0**-126, 0.0, v).float()  # noqa: E731
    exp2 = lambda y: flushed(torch.exp2(y.double()) * (1 + power_error))  # noqa: E731
    reciprocal = lambda y: flushed((1 / y.double()) * (1 + inverse_error))  # noqa: E731
    if activation == "gelu":
        first, *others = reversed(GELU_TAIL)
        t = reciprocal(fma(x.abs(), f32(0.26), 1.0))
        tail = torch.full_like(x, first)
        for coefficient in others:
            tail = fma(tail, t.double(), f32(coefficient))
        tail = tail * exp2(x * f32(-0.72134752) * x)
        return x * torch.where(x < 0, tail, 1.0 - tail)
    y = x * f32(-1.4426950409)
    if activation == "gelu_tanh":
        y = x * fma(x * f32(f32(-1.4426950409) * f32(0.0713548163)), x.double(), f32(f32(-1.4426950409) * f32(1.5957691216)))
    return x * reciprocal(1.0 + exp2(y))


@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_tanh"))
def test_bounds_of_activations_hold_for_their_instructions(activation):
    """Section 3's bounds from what PTX says of ex2.approx (2^-22) and rcp.approx (2^-23), each at its worst; room is 2.5 at most."""
    x = cases.floats(2**19)
    exact, bound = cases.activation_bound(x, activation, "cuda", torch.float32)
    ratios = []
    for power, inverse in itertools.product((-(2.0**-22), 0.0, 2.0**-22), (-(2.0**-23), 2.0**-23)):
        ratios.append(cases.judge(emulated(x, activation, power, inverse), exact, bound, f"{activation}, {power}, {inverse}"))
    assert max(ratios) > 0.4


# ---- section 5: attention --------------------------------------------------------------------------------------------------------------


def attend(q, k, v):
    """minfer.attention of one sequence, as ``check_attention`` calls it."""

    def call(**options):
        out, lse = minfer.attention(q[None], k[None], v[None], **options)
        return out[0], lse[0]

    return call


@pytest.mark.parametrize("softcap", (0.0, 3.0))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_attention(dtype, softcap):
    """Section 5.1."""
    for (rows, length), sharpness, causal in itertools.product(((40, 70), (1, 300)), (1.0, 4.0), (False, True)):
        q, k, v = (torch.randn(n, heads, 64) for n, heads in ((rows, 4), (length, 2), (length, 2)))
        q, k, v = (q * sharpness).to(dtype), k.to(dtype), v.to(dtype)
        options = dict(scale=0.125, softcap=softcap, causal=causal)
        cases.check_attention(attend(q, k, v), q, cases.dense_keys(k, v), f"{rows} x {length}, {sharpness}", **options)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_attention_over_caches(dtype, kv_format):
    """Section 5.4's quantities, which the CPU kernel's float32 is within; "decode" and "prefill" allow no less."""
    cache, seq_lens, _ = make_cache([192], kv_format, 2, (64, 64), dtype, page_size=64, paged=False)
    q = torch.randn(1, 5, 4, 64).to(dtype)

    def call(**options):
        out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, **cache.scales(), **options)
        return out[0], lse[0]

    for path in ("cpu", "decode", "prefill"):
        keys = cases.cached_keys(cache, 0, 192, path, dtype)
        cases.check_attention(call, q[0], keys, f"{kv_format} as {path}", scale=0.125, causal=True)


@pytest.mark.parametrize("keys", cases.CAP_KEYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_softcap(dtype, keys):
    """Section 5.2."""

    def lse_of(q0, k0, **options):
        q, k = torch.zeros(len(q0), 1, 16, dtype=dtype), torch.zeros(len(k0), 1, 16, dtype=dtype)
        q[:, 0, 0], k[:, 0, 0] = q0, torch.tensor(k0)
        return attend(q, k, k)(**options)[1][0]

    for softcap, scale in cases.CAPS:
        cases.check_softcap(lse_of, dtype, keys, softcap, scale, 128, "cpu", "cpu")


def test_polynomial_of_softcap():
    """Section 5.2: what softmax.cuh computes, in float32: within TANH up to 3 / 4, rising with the score, and below -limit once settled."""
    middle = -0.3262967 / (2 * math.sqrt(0.09735545))
    for softcap, scale in cases.CAPS:
        unit, inner = scale * math.log2(math.e), scale / softcap
        root, middle_, rest = math.sqrt(math.sqrt(0.09735545 * unit)) * inner, middle * math.sqrt(unit), (0.9997852 - middle**2) * unit
        score = (torch.linspace(0, 0.75, 100001, dtype=torch.float64) / inner).float()
        root, middle_, rest = (torch.tensor(x) for x in (root, middle_, rest))
        inside = ((score * root) ** 2 + middle_) ** 2 + rest
        got = (score * inside).double() / math.log2(math.e)
        exact = softcap * torch.tanh(score.double() * inner)
        cases.judge(got, exact, cases.TANH * exact + 2.0**-140, f"softcap {softcap}, scale {scale}")
        assert bool((got.diff() >= -(2.0**-20) * exact[1:]).all())


@pytest.mark.parametrize("kv_format", ("fp8_e4m3", "int8", "int4"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_append(dtype, kv_format):
    """Section 5.6."""
    assert cases.check_append(kv_format, dtype, "cpu", kv_format) > 0.5


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=name_of)
def test_merge(dtype):
    """Section 5.7."""
    outs = [torch.randn(2, 9, 3, 16).to(dtype) for _ in range(5)]
    lses = [torch.randn(2, 3, 9) * 8 for _ in range(5)]
    lses[1][0], outs[1][0] = -math.inf, math.nan
    cases.check_merge(outs, lses, "five states")


# ---- section 6: experts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring, renormalize", list(itertools.product(("softmax", "sigmoid"), (False, True))))
def test_router(scoring, renormalize):
    """Section 6.1."""
    logits = torch.randn(100, 128) * 6
    weights, ids = minfer.moe_router(logits, 8, scoring=scoring, renormalize=renormalize)
    cases.judge(weights, *cases.router_bound(logits, ids, scoring=scoring, renormalize=renormalize), scoring)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=name_of)
def test_combine(dtype):
    """Section 6.2."""
    y, weights = torch.randn(60, 40).to(dtype), torch.rand(20, 3)
    inverse = torch.randperm(60).int().view(20, 3)
    for own in (weights, None):
        cases.judge(minfer.moe_combine(y, inverse, own), *cases.combine_bound(y, own, inverse, dtype), "combine")


# ---- section 7: rows -----------------------------------------------------------------------------------------------------------------


def test_the_nearest_of_e4m3():
    """Section 7.5: the model of the tests is torch's rounding, saturated."""
    x = torch.cat([torch.randn(4000) * scale for scale in (0.001, 0.1, 10.0, 200.0)])
    x = torch.cat([x, torch.arange(0, 480, 0.5), torch.arange(-20, 20) / 1024.0])
    assert torch.equal(cases.e4m3_near(x.double()), x.clamp(-448, 448).to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("width", (1, 96, 1000, 16384, 262144))
def test_sums_over_rows(width):
    """Sections 7.1 and 7.2: numbers that are far from 0, of which a mean has many digits."""
    for dtype, middle in ((torch.float16, 3.0), (torch.bfloat16, 100.0)):
        x = (torch.randn(3, width) + middle).to(dtype)
        cases.judge(minfer.rms_norm(x, eps=0.0), *cases.stored(cases.rms_norm_rows(x, eps=0.0), dtype), "rms_norm")
        cases.judge(minfer.layer_norm(x), *cases.stored(cases.layer_norm_rows(x), dtype), "layer_norm")
    x = torch.randn(3, width) * 20
    cases.judge(minfer.softmax(x), *cases.stored(cases.softmax_rows(x), torch.float32), "softmax")
    cases.judge(minfer.log_softmax(x), *cases.stored(cases.softmax_rows(x, True), torch.float32), "log_softmax")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_rows(activation):
    """Section 7.4: every number of both types, and float32 of every exponent."""
    for x in (*(cases.patterns(dtype) for dtype in DTYPES), cases.floats(1 << 16)):
        cases.judge(minfer.activation(x, activation), *cases.activation_bound(x, activation, "cpu", x.dtype), activation)


@pytest.mark.parametrize("quant", cases.LARGEST_CODE)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_codes(dtype, quant):
    """Section 7.5: of numbers of all sizes, and of normalised ones."""
    x = (torch.randn(20, 1000) * torch.exp2(torch.arange(20) - 14.0)[:, None]).to(dtype)
    own = {"scale": torch.full((1,), 0.03)} if quant == "fp8_tensor" else {}
    exact = (x.double(), torch.zeros(x.shape, dtype=torch.float64))
    cases.check_codes(*minfer.ops.quantize(x, quant, **own), exact, quant, "quantize", **own)
    q, scales = minfer.rms_norm(x, quant=quant, **own)
    cases.check_codes(q, scales, cases.rms_norm_rows(x), quant, "rms_norm", **own)


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_norm_and_product(dtype, gated):
    """Section 7.9: of x, and of the sum with a residual."""
    operator = minfer.rms_norm_gemm_gated if gated else minfer.rms_norm_gemm
    for k in (1, 96, 1000, 5000):
        x, residual, norm_weight = torch.randn(5, k).to(dtype), torch.randn(5, k).to(dtype), torch.randn(k).to(dtype)
        w, bias = (torch.randn(48, k) / k**0.5).to(dtype), torch.randn(48)
        for before in (None, residual.clone()):
            have = operator(x, norm_weight, w.t(), 1e-5, residual=None if before is None else residual, weight_offset=0.5, bias=bias)
            options = dict(weight_offset=0.5, gated=gated, activation="silu" if gated else "none", bias=bias)
            bound = cases.norm_gemm_bound(x, w, norm_weight, 1e-5, residual=before, **options)
            cases.judge(have, *bound, f"{operator.__name__}, k {k}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_codes_of_products(dtype):
    """Section 2, of D in codes."""
    a, b, c, bias = torch.randn(60, 300).to(dtype), torch.randn(300, 80).to(dtype), torch.randn(60, 80), torch.randn(80)
    scale = torch.tensor([0.1])
    q, _ = minfer.gemm(a, b, c=c, beta=1.0, alpha=-0.37, bias=bias, quant="fp8_tensor", scale=scale)
    exact = cases.gemm_bound(a, b.mT, alpha=-0.37, c=c, bias=bias, out_dtype=torch.float32)
    cases.check_codes(q, None, exact, "fp8_tensor", "gemm", scale)
