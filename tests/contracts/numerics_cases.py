"""The error model of docs/numerics.md as functions, which its tests hold results to. Section numbers are that page's.

Everything here is float64 on the operands as they are given: no weight, key or value is rounded before a result is judged. A bound is a
tensor like the result; ``judge`` compares element by element and, where one is off, says which is worst and by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import minfer
import torch

from tests.quantized_gemm.weight_format_cases import (
    BITS,
    Weight,
    e4m3,
    e8m0,
    pack,
    power_of_two,
    random_codes,
    values,
)

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 0.0}  # section 1: u
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-149, torch.float64: 0.0}  # t, half of the least number


# ---- rounding and judging --------------------------------------------------------------------------------------------------------


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 -> the nearest number of ``dtype``, ties to even, as float64: one rounding. ``x.to(dtype)`` goes by way of float32."""
    info, bits = torch.finfo(dtype), {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}[dtype]
    least = round(math.log2(info.smallest_normal))
    exponent = (torch.frexp(x.nan_to_num(0.0, 0.0, 0.0)).exponent - 1).clamp(min=least)
    quantum = power_of_two(exponent - (bits - 1))
    result = torch.where(x.isfinite(), (x / quantum).round() * quantum, x)
    return torch.where(result.abs() > info.max, torch.copysign(torch.full_like(x, math.inf), x), result)


def judge(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, what: str) -> float:
    """Asserts |got - exact| <= bound in every element, NaN where ``exact`` is, infinite where it is; returns the largest error / bound."""
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    if got.numel() == 0:
        return 0.0
    got, bound = got.double(), bound.double().broadcast_to(exact.shape)
    same = (got == exact) | (got.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (got - exact).abs())
    ratio = torch.where(same, 0.0, error / bound).nan_to_num(math.inf, math.inf)  # of a NaN that should be none, or the other way round
    bad = ~(error <= bound)
    worst = int(ratio.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))
    figures = [float(x.flatten()[worst]) for x in (exact, got, error, bound)]
    message = "{} of {} elements off, worst at {}: exact {:.9g}, got {:.9g}, error {:.4g}, bound {:.4g}, ratio {:.4g}"
    assert not bool(bad.any()), f"{what}: " + message.format(int(bad.sum()), bad.numel(), at, *figures, float(ratio.flatten()[worst]))
    return float(ratio.flatten()[worst])


# ---- section 2: sums -------------------------------------------------------------------------------------------------------------


def gamma(k: int) -> float:
    """Section 2: of a sum of k products in float32, of tensor cores and in pieces, in units of the sum of magnitudes."""
    return (1.125 * k + 64) * 2.0**-23


def gemm_bound(a, w, *, error=None, a_error=None, alpha=1.0, c=None, bias=None, out_dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 2: exact and bound of alpha * A.W^T + C + bias. ``error``: of the weight's elements, [n, k]; ``a_error``: of A's."""
    a, w = a.double(), w.double()
    y, magnitude = alpha * (a @ w.mT), abs(alpha) * (a.abs() @ w.abs().mT)
    off = torch.zeros_like(magnitude) if error is None else abs(alpha) * (a.abs() @ error.mT)
    if a_error is not None:
        off = off + abs(alpha) * (a_error @ (w.abs() if error is None else w.abs() + error).mT)
    off = off + gamma(a.shape[-1]) * (magnitude + off)
    for term in (c, bias):
        if term is not None:
            y, magnitude = y + term.double(), magnitude + term.double().abs()
    off = off + 2.0**-22 * magnitude
    u = UNIT[out_dtype] if out_dtype != torch.float32 else 0.0
    return y, u * y.abs() + (1 + u) * off + TINY[out_dtype]


def gated_bound(a, w, *, activation="silu", out_dtype, **sums) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 3: of act(gate) * up, blocks of 8 gate and 8 up rows of W; ``sums``: as gemm_bound takes them."""
    y, off = gemm_bound(a, w, **sums, out_dtype=torch.float32)
    (gate, up), (gate_off, up_off) = (x.unflatten(-1, (-1, 2, 8)).unbind(-2) for x in (y, off))
    act, act_off = activated(gate, activation, "cuda")
    act_off = act_off + slope(gate.abs() + gate_off, activation) * gate_off
    exact = act * up
    total = act.abs() * up_off + (up.abs() + up_off) * act_off
    u = UNIT[out_dtype]
    bound = (u + 2.0**-23) * exact.abs() + (1 + u) * total + TINY[out_dtype]
    return exact.flatten(-2), bound.flatten(-2)


def activated_bound(a, w, *, activation="none", out_dtype, **sums) -> tuple[torch.Tensor, torch.Tensor]:
    """Sections 2 and 3: of act(A.W^T + bias); ``sums``: as gemm_bound takes them."""
    y, off = gemm_bound(a, w, **sums, out_dtype=torch.float32)
    exact, own = activated(y, activation, "cuda")
    own = own + slope(y.abs() + off, activation) * off
    u = UNIT[out_dtype]
    return exact, u * exact.abs() + (1 + u) * own + TINY[out_dtype]


# ---- section 3: activations --------------------------------------------------------------------------------------------------------

SLOPE = {"none": 1.0, "relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}  # the largest


def slope(size: torch.Tensor, activation: str) -> torch.Tensor | float:
    """The largest of an activation up to |x| = ``size``."""
    return 2 * size if activation == "relu2" else SLOPE[activation]


def sigmoid_argument(x: torch.Tensor, activation: str) -> torch.Tensor:
    """y of silu(x) or gelu_tanh(x) = x * sigmoid(y)."""
    return x if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def activated(x: torch.Tensor, activation: str, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 3: an activation of float64 numbers, and the bound of its float32 result; ``path``: "cuda" or "cpu" formulas."""
    x = x.double()
    if activation in ("none", "relu"):
        return (x if activation == "none" else torch.where(x < 0, 0.0, x)), torch.zeros_like(x)
    if activation == "relu2":
        exact = torch.where(x < 0, 0.0, x * x)
        return exact, (2.0**-24 * exact).nan_to_num(0.0, 0.0) + TINY[torch.float32]
    if activation == "gelu":  # by erfc: 1 + erf would cancel
        exact = torch.where(x == math.inf, x, x * 0.5 * torch.special.erfc(x * -math.sqrt(0.5)))
        bound = (6 + torch.where(x < 0, x * x / 2, 0.0).clamp(max=128)) * 2.0**-22 * exact.abs() + 2.0**-119
    else:
        y = sigmoid_argument(x, activation)
        exact = x * torch.sigmoid(y)
        bound = (4 + (-y).clamp(0, 128)) * 2.0**-22 * exact.abs() + 2.0**-119
    # Every formula has -inf * 0 there.
    return torch.where(x == -math.inf, math.nan, exact), bound.nan_to_num(0.0, 0.0) + TINY[torch.float32]


def activation_bound(x: torch.Tensor, activation: str, path: str, out_dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 3: of D, which is the activation of the exact float32 numbers ``x`` rounded to ``out_dtype``."""
    exact, off = activated(x, activation, path)
    u = UNIT[out_dtype] if out_dtype != torch.float32 else 0.0
    limit = torch.finfo(out_dtype).max
    exact = torch.where(exact.abs() > limit * (1 + u / 2), torch.copysign(torch.full_like(exact, math.inf), exact), exact)
    return exact, (u * exact.abs() + (1 + u) * off + TINY[out_dtype]).nan_to_num(0.0, 0.0)


def patterns(dtype: torch.dtype, device="cpu") -> torch.Tensor:
    """All 65536 numbers of a 16-bit type: infinities, NaN and subnormals too."""
    return torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)


def floats(count: int, device="cpu") -> torch.Tensor:
    """float32 of every exponent, and as many close together where activations bend; special values first."""
    bits = torch.randint(-(2**31), 2**31, (count // 2,), device=device).to(torch.int32).view(torch.float32)
    close = torch.linspace(-16, 16, count - count // 2, device=device)
    x = torch.cat([torch.where(bits.isfinite(), bits, 1.0), close])
    x[:8] = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 3.4e38, -3.4e38, 2.0**-149, -(2.0**-149)], device=device)
    return x


# ---- section 4: quantised weights --------------------------------------------------------------------------------------------------

# Section 4.3: of the code book in shared memory, as float32 has it.
NF4_FACTOR = {torch.float16: torch.tensor(0.6831).item(), torch.bfloat16: torch.tensor(0.71843).item()}
ZEROS = {"int4": ("none", "integer", "fractional"), "int8": ("none", "integer", "fractional")}
PATHS = ("accumulators", "fragments", "dequantize")


def path_of(kernel: str | None) -> str:
    """Section 4.1: where a kernel of minfer.kernels applies scales, by its name; None and "dequantize": the weight in 16 bits."""
    if kernel is None or kernel == "dequantize":
        return "dequantize"
    variant = kernel.split("@")[0].removesuffix("_ranges").removesuffix("_sync").rsplit("_", 1)[1]
    return {"acc": "accumulators", "fineacc": "accumulators", "frag": "fragments", "fine": "fragments", "multistage": "fragments"}[variant]


def make_weight(name, n, k, group_size, zeros="none", dtype=torch.float16, device="cpu") -> Weight:
    """Random codes; scales of seven binades, zero points about the middle of the codes and some next to 0."""
    shape = (1 if group_size == -1 else -(-k // group_size), n)
    codes = random_codes(name, (n, k), device)
    if name == "mxfp4":
        scales = torch.randint(117, 124, shape, device=device).to(torch.uint8)
    elif name == "nvfp4":
        scales = torch.randint(0x01, 0x7E, shape, device=device).to(torch.uint8)  # subnormals too
    else:
        scales = torch.exp2(torch.rand(shape, device=device) * 7 - 9).to(dtype)
    offsets = None
    if zeros != "none":
        top = 2.0 ** BITS[name]
        offsets = (torch.randn(shape, device=device) * top / 8 + top / 2 - 0.5).clamp(0, top - 1)
        offsets[torch.rand(shape, device=device) < 0.1] = 0.01
        offsets = (offsets.round() if zeros == "integer" else offsets).to(dtype)
    return Weight(name, codes, scales, offsets, group_size, dtype, 1.0, pack(name, codes))


@dataclass
class Parts:
    """A weight's elements [n, k] in float64: (value - zero) * scale."""

    value: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor
    fractional: bool

    @property
    def exact(self) -> torch.Tensor:
        return (self.value - self.zero) * self.scale


def parts_of(weight: Weight) -> Parts:
    k = weight.codes.shape[1]
    group = torch.arange(k, device=weight.codes.device) // (k if weight.group_size == -1 else weight.group_size)
    scale = {"mxfp4": e8m0, "nvfp4": e4m3}.get(weight.name, torch.Tensor.double)(weight.scales)[group].mT
    value = values(weight.name, weight.codes)
    middle = {"int4": 8.0, "int8": 128.0}.get(weight.name, 0.0)
    zero = torch.full_like(value, middle) if weight.zeros is None else weight.zeros.double()[group].mT
    return Parts(value, zero, scale, bool((zero != zero.round()).any()))


def model(weight: Weight, path: str) -> torch.Tensor:
    """Sections 4.2 and 4.3: the very number that stands for each weight on a path, in float64 (float32 where the path has that)."""
    parts, dtype, name = parts_of(weight), weight.dtype, weight.name
    if path == "dequantize":
        single = lambda x: rounded(x, torch.float32)  # noqa: E731
        return rounded(single(single(parts.value - parts.zero) * single(parts.scale)), dtype)
    if name in ("int4", "int8"):
        fp16 = dtype == torch.float16
        row = torch.arange(parts.value.shape[0], device=parts.value.device)[:, None] // 8 % 2 if name == "int4" else torch.zeros(1, 1)
        exponent = (-9 if fp16 else -6) + 4 * row.to(parts.value.device)
        factor = power_of_two(exponent)
        minus_zero = rounded(-parts.zero * factor, dtype)
        left = rounded(parts.value * factor + minus_zero, dtype)
        if path == "accumulators":
            return left / factor * parts.scale
        return rounded(left * rounded(parts.scale / factor, dtype), dtype)
    if name == "nf4":
        factor = NF4_FACTOR[dtype]
        book = rounded(rounded(parts.value * factor, torch.float32), dtype)
        return (book * parts.scale if path == "accumulators" else rounded(book * parts.scale, dtype)) / factor
    if name == "fp8_e4m3" and path == "fragments":
        return rounded(parts.exact, dtype)
    return parts.exact  # E2M1, and e4m3 on accumulators


def book_error(dtype) -> float:
    """Section 4.3: of nf4's code book, relative."""
    return {torch.float16: 0.36, torch.bfloat16: 0.47}[dtype] * UNIT[dtype]


def weight_bound(weight: Weight, path: str) -> torch.Tensor:
    """Section 4.2's table: of a weight's element on a path, [n, k]."""
    parts, dtype = parts_of(weight), weight.dtype
    u, t, size = UNIT[dtype], TINY[dtype], parts.exact.abs()
    relative, absolute = 0.0, 0.0
    if path == "dequantize":
        exact = weight.name in ("mxfp4", "nvfp4")
        return size * (0.0 if exact else u + 2.0**-22) + t
    if weight.name in ("int4", "int8") and parts.fractional:
        relative = u
        absolute = parts.scale * (2.0**-16 if dtype == torch.float16 else 2.0**-120)
    elif weight.name == "nf4":
        relative = book_error(dtype)
    if path == "fragments" and weight.name not in ("mxfp4", "nvfp4"):
        relative = relative + u + relative * u
        absolute = absolute * (1 + u) + t * (1 / NF4_FACTOR[dtype] if weight.name == "nf4" else 1.0)
    return size * (relative + 2.0**-22 * (weight.name == "nf4")) + absolute


def expose(gemm, weight: Weight, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for W[:, columns] on the path that ``gemm`` takes, [n, columns], and how far the reading of it may be off.

    Row i of A is one-hot at columns[i], so that D[i] = lift * w - c with w that path's weight: c, in float32, is the exact one, and D the
    difference of the two, rounded to 16 bits: it shows w to 2^-16 of its own unit and better.
    """
    n, k = weight.codes.shape
    exact = parts_of(weight).exact[:, columns]
    u = UNIT[weight.dtype]
    lift = 2.0 ** -round(math.log2(u * float(exact.abs().max())))
    a = torch.zeros(len(columns), k, dtype=weight.dtype, device=weight.codes.device)
    a[torch.arange(len(columns)), columns] = 1.0
    c = (exact.mT * -lift).float()
    weight.alpha = lift
    difference = gemm(a, c=c).double()
    weight.alpha = 1.0
    doubt = u * difference.abs() + TINY[weight.dtype] + 2.0**-24 * c.double().abs() * (difference != 0)
    return ((difference - c.double()) / lift).mT, (doubt / lift).mT


def check_weight(gemm, weight: Weight, path: str, columns: torch.Tensor, what: str) -> float:
    """Sections 4.2 and 4.3: the elements on a path are within their bound of the unrounded weight, and are the model's."""
    seen, doubt = expose(gemm, weight, columns)
    exact, bound = parts_of(weight).exact[:, columns], weight_bound(weight, path)[:, columns]
    doubt = doubt + exact.abs() * (2.0**-22 if weight.name == "nf4" else 2.0**-24)  # nf4: the sums are divided by the book's factor
    judge(seen, model(weight, path)[:, columns], doubt, f"{what}, against the model of {path}")
    return judge(seen, exact, bound + doubt, f"{what}, weights on {path}")


def check_sums(gemm, weight: Weight, path: str, a: torch.Tensor, what: str, **epilogue) -> float:
    """Section 2 with 4.2's errors of weights: random sums against float64 of the unrounded weight."""
    got = gemm(a, **epilogue)
    exact, bound = gemm_bound(
        a, parts_of(weight).exact, error=weight_bound(weight, path), alpha=weight.alpha, out_dtype=a.dtype, **epilogue
    )
    return judge(got, exact, bound, what)


# ---- section 5: attention -----------------------------------------------------------------------------------------------------------

TANH = 1.02 * 2.0**-11  # section 5.2: of tanh.approx and of the polynomial, relative
UNIT_F16 = UNIT[torch.float16]


@dataclass
class KeysValues:
    """Keys and values [seqlen, heads, head_dim] in float64, and what section 5 says of them on a path.

    ``*_size``: of the terms that add up to an element; ``*_error``: of an element as the path has it; ``floor``: of an exponential of the
    highest score times the value, absolute.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_size: torch.Tensor
    v_size: torch.Tensor
    k_error: torch.Tensor
    v_error: torch.Tensor
    floor: torch.Tensor
    p_unit: float
    q_error: float = 0.0  # of a query's element, in units of its row's largest
    score_error: float = 0.0  # of each product of query and key, in units of the row's largest element


def dense_keys(k: torch.Tensor, v: torch.Tensor) -> KeysValues:
    """Section 5.1: 16-bit keys and values; k and v [seqlen, heads, head_dim]."""
    dtype, k, v = k.dtype, k.double(), v.double()
    none = lambda x: torch.zeros_like(x)  # noqa: E731
    return KeysValues(k, v, k.abs(), v.abs(), none(k), none(v), TINY[dtype] * v.abs(), UNIT[dtype])


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2).double()


def cached_keys(cache, b: int, length: int, path: str, dtype) -> KeysValues:
    """Sections 5.4 and 5.5: sequence ``b`` of a contiguous cache on "decode", "prefill" or "cpu". int4: whole groups only."""
    raw = lambda x: x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x  # noqa: E731
    k_codes, v_codes = (raw(x)[b, :length] for x in (cache.k, cache.v))
    if cache.kv_format == "16bit":
        return dense_keys(k_codes, v_codes)
    least_k = least_v = None
    if cache.kv_format == "fp8_e4m3":
        codes = [e4m3(k_codes), e4m3(v_codes)]
        factors = [x.double().reshape(-1, 1).expand(k_codes.shape[1], 1) for x in (cache.k_scale, cache.v_scale)]
    elif cache.kv_format == "int8":
        codes = [k_codes.double(), v_codes.double()]
        factors = [x[b, :, :length].double().mT.unsqueeze(-1) for x in (cache.k_scale, cache.v_scale)]
    else:
        codes = [nibbles(k_codes), nibbles(v_codes)]
        group = cache.k.shape[1] // cache.k_scale.shape[2]
        of_keys = cache.k_scale[b].double().repeat_interleave(group, 1)[:, :length].transpose(0, 1)  # [length, heads, 2, head_dim]
        groups = cache.v_scale.shape[2] // 2 if cache.v_scale.dim() == 4 else None
        of_values = cache.v_scale[b, :, :, :length].double().permute(2, 0, 1)  # [length, heads, 2 groups]
        wide = of_values.repeat_interleave(codes[1].shape[-1] // groups, -1)
        factors = [of_keys[:, :, 0], wide[..., : codes[1].shape[-1]]]
        least_k, least_v = of_keys[:, :, 1], wide[..., codes[1].shape[-1] :]
    scaled = [c * f for c, f in zip(codes, factors, strict=True)]
    zero = [torch.zeros_like(x) for x in scaled]
    least = [zero[0] if least_k is None else least_k, zero[1] if least_v is None else least_v]
    k, v = (x + y for x, y in zip(scaled, least, strict=True))
    k_size, v_size = (x.abs() + y.abs() for x, y in zip(scaled, least, strict=True))
    if path == "cpu":
        return KeysValues(k, v, k_size, v_size, 2.0**-22 * k_size, 2.0**-22 * v_size, zero[1], 0.0)
    if path == "decode":
        floor, own = 2.0**-25 * v_size, dict(q_error=2.0**-25)
        k_error, v_error = zero
        if cache.kv_format == "int8":
            floor = 2.0**-25 * codes[1].abs() * factors[1].amax(0, keepdim=True)
        elif cache.kv_format == "int4":
            floor = floor + 2.0**-25 * codes[1]
            k_error, v_error = UNIT_F16 * scaled[0].abs(), UNIT_F16 * scaled[1].abs()
            own |= dict(score_error=15 * 2.0**-21)
        return KeysValues(k, v, k_size, v_size, k_error, v_error, floor, UNIT_F16, **own)
    u, t = (0.0, 0.0) if cache.kv_format == "fp8_e4m3" else (UNIT[dtype], TINY[dtype])
    extra = 2.0**-15 if cache.kv_format == "int8" else 0.0
    errors = [(u + extra) * x.abs() + t for x in (k, v)]
    if cache.kv_format == "int4":
        errors = [e + 2.0**-23 * (128 * f.abs() + y.abs()) for e, f, y in zip(errors, factors, least, strict=True)]
    return KeysValues(k, v, k_size, v_size, *errors, TINY[dtype] * v.abs(), UNIT[dtype])


def attention_bound(q, keys: KeysValues, *, scale, softcap=0.0, causal=False, out_dtype):
    """Section 5.1: exact out [rows, heads_q, ..] and lse [heads_q, rows] of one sequence, and the bounds of both."""
    rows, heads_q, head_dim = q.shape
    group, length = heads_q // keys.k.shape[1], keys.k.shape[0]
    of = lambda x: x.repeat_interleave(group, 1).transpose(0, 1)  # noqa: E731  [heads_q, length, ..]
    q = q.double().transpose(0, 1)
    largest = q.abs().amax(-1, keepdim=True)
    score = scale * (q @ of(keys.k).mT)
    off = scale * (
        gamma(head_dim) * (q.abs() @ of(keys.k_size).mT)
        + q.abs() @ of(keys.k_error).mT
        + keys.q_error * largest * of(keys.k).abs().sum(-1)[:, None, :]
        + keys.score_error * largest * head_dim
    )
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
        off = off + TANH * score.abs()
    off = off + 2.0**-21 * score.abs()
    if causal:
        hidden = torch.arange(length, device=q.device) > torch.arange(rows, device=q.device)[:, None] + length - rows
        score, off = score.masked_fill(hidden, -math.inf), off.masked_fill(hidden, 0.0)
    lse = torch.logsumexp(score, -1)
    p = (score - lse[..., None]).exp()
    e = off.amax(-1, keepdim=True)
    counts = (length + 64) * 2.0**-23
    out = p @ of(keys.v)
    relative = torch.expm1(2 * e) + keys.p_unit + counts + 2.0**-20
    seen = (score > -math.inf).double()
    own = relative * (p @ of(keys.v_size)) + p @ of(keys.v_error) * (1 + relative) + seen @ of(keys.floor)
    u = UNIT[out_dtype]
    out_bound = u * out.abs() + (1 + u) * own + TINY[out_dtype]
    lse_bound = e[..., 0] + counts + 2.0**-21 * lse.abs() + 2.0**-20
    return out.transpose(0, 1), lse, out_bound.transpose(0, 1), lse_bound


def check_attention(call, q, keys: KeysValues, what: str, **options) -> float:
    """Section 5.1: ``call(**options)`` gives out [rows, heads_q, head_dim_v] and lse [heads_q, rows] of one sequence."""
    out, lse = call(**options)
    exact, exact_lse, bound, lse_bound = attention_bound(q, keys, out_dtype=q.dtype, **options)
    judge(lse, exact_lse, lse_bound, f"{what}, lse")
    return judge(out, exact, bound, f"{what}, out")


# ---- section 5.2: softcap ------------------------------------------------------------------------------------------------------------

# Keys of +-1 times the first unit vector, scores are +-scale * q[0]: one key; three blocks of equal ones; low ones before high ones.
CAP_KEYS = {"one": [1.0], "equal": [1.0] * 384, "mixed": [-1.0] * 512 + [1.0] * 128}
# softcap, scale: polynomial and tanh.approx meet at |score| = 3 / 4 softcap; Gemma 2's, a small one, one that is never felt
CAPS = ((50.0, 0.0625), (4.0, 0.37), (30.0, 2.0), (1000.0, 1.0), (0.25, 0.001), (65504.0, 0.5))


def cap_values(dtype, softcap: float, scale: float, count: int, device="cpu") -> torch.Tensor:
    """First elements of queries, ascending, so that rows of a warp are alike: scores from 2^-12 to 2^6 of softcap, of both signs."""
    size = torch.exp2(torch.linspace(-12, 6, count // 2, device=device, dtype=torch.float64)) * softcap / scale
    return torch.cat([-size.flip(0), size]).clamp(-60000.0, 60000.0).to(dtype)


def cap_bound(q0: torch.Tensor, keys: list[float], *, softcap: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 5.2: exact lse and bound of queries with first elements ``q0``, the others being 0."""
    score = scale * q0.double()[:, None] * torch.tensor(keys, dtype=torch.float64, device=q0.device)
    capped = softcap * torch.tanh(score / softcap)
    lse = torch.logsumexp(capped, -1)
    bound = TANH * capped.abs().amax(-1) + len(keys) * 2.0**-22 * (len(keys) > 1) + 2.0**-20 * lse.abs() + 2.0**-21
    return lse, bound


def check_softcap(lse_of, dtype, keys: str, softcap: float, scale: float, count: int, device, what: str) -> float:
    """Section 5.2: ``lse_of(q0, k0, **options)`` gives the lse of every query over keys whose first elements are k0."""
    q0 = cap_values(dtype, softcap, scale, count, device)
    got = lse_of(q0, CAP_KEYS[keys], softcap=softcap, scale=scale)
    return judge(got, *cap_bound(q0, CAP_KEYS[keys], softcap=softcap, scale=scale), f"{what}, {keys}, softcap {softcap}, scale {scale}")


# ---- section 5.6: quantisation of a cache ---------------------------------------------------------------------------------------------


def append_bound(x: torch.Tensor, kv_format: str, scale, least=None) -> torch.Tensor:
    """Section 5.6: of what a cache holds of x, float64, whose stored scale (int4: and minimum) are given, broadcast to x."""
    scale, size = scale.double(), x.double().abs()
    if kv_format == "fp8_e4m3":
        return torch.maximum(2.0**-4 * size, 2.0**-10 * scale) * (1 + 2.0**-20)
    if kv_format == "int8":
        return scale * (0.5 + 2.0**-15)
    return torch.maximum(0.5 * scale * (1 + 2.0**-15), 2.0**-11 * least.double().abs()) + 2.0**-21


def check_append(kv_format: str, dtype, device, what: str) -> float:
    """Section 5.6: what kv_cache_append leaves of 128 tokens in a contiguous cache, of keys with large channels and of small ones."""
    tokens, heads, dim = 128, 2, 64
    k, v = (torch.randn(tokens, heads, dim, device=device) for _ in range(2))
    k, v = (k * torch.exp2(torch.arange(dim, device=device) % 12 - 6.0) + 3).to(dtype), (v * 0.01).to(dtype)
    cache = minfer.allocate_kv_cache(1, tokens, heads, dim, kv_format=kv_format, dtype=dtype, device=device)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    own = dict(cu_seqlens=ends) if kv_format == "int4" else {}
    minfer.kv_cache_append(k, v, cache.k, cache.v, torch.arange(tokens, device=device), **cache.scales(), **own)
    keys = cached_keys(cache, 0, tokens, "cpu", dtype)
    factors = [(1.0, None), (1.0, None)]
    if kv_format == "int8":
        factors = [(x[0].mT.unsqueeze(-1), None) for x in (cache.k_scale, cache.v_scale)]
    elif kv_format == "int4":
        of_keys = cache.k_scale[0].repeat_interleave(tokens // cache.k_scale.shape[2], 1).transpose(0, 1)
        of_values = cache.v_scale[0].permute(2, 0, 1)
        groups = of_values.shape[-1] // 2
        wide = of_values.repeat_interleave(dim // groups, -1)
        factors = [(of_keys[:, :, 0], of_keys[:, :, 1]), (wide[..., :dim], wide[..., dim:])]
    ratios = []
    for name, x, stored, (scale, least) in zip("kv", (k, v), (keys.k, keys.v), factors, strict=True):
        scale = torch.as_tensor(scale, device=device)
        ratios.append(judge(stored, x.double(), append_bound(x, kv_format, scale, least), f"{what}, {name}"))
    return max(ratios)


# ---- section 5.7: states -------------------------------------------------------------------------------------------------------------


def check_merge(outs, lses, what: str) -> float:
    """Section 5.7: minfer.merge_attention_states against the sum in float64."""
    got, got_lse = minfer.merge_attention_states(outs, lses)
    stacked = torch.stack([x.double() for x in lses])
    lse = torch.logsumexp(stacked, 0)
    weights = (stacked - lse).nan_to_num(-math.inf).exp()
    relative = 2.0**-22 * (stacked.nan_to_num(0.0, 0.0, 0.0).abs().amax(0) + lse.nan_to_num(0.0, 0.0, 0.0).abs() + len(outs) + 8)
    to_rows = lambda x: x.transpose(-1, -2).unsqueeze(-1)  # noqa: E731
    parts = [torch.where(to_rows(w) == 0, 0.0, x.double() * to_rows(w)) for x, w in zip(outs, weights, strict=True)]
    exact, size = sum(parts), sum(x.abs() for x in parts)
    u = UNIT[got.dtype] if got.dtype != torch.float32 else 0.0
    judge(got_lse, lse, relative, f"{what}, lse")
    return judge(got, exact, u * exact.abs() + (1 + u) * 2 * to_rows(relative) * size + TINY[got.dtype], f"{what}, out")


# ---- section 6: experts ----------------------------------------------------------------------------------------------------------------


def combine_bound(y, weights, inverse, out_dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 6.2: the sum of a token's rows."""
    rows = y.double()[inverse.long()] * (1.0 if weights is None else weights.double()[..., None])  # [tokens, top_k, n]
    exact, u = rows.sum(1), UNIT[out_dtype] if out_dtype != torch.float32 else 0.0
    return exact, u * exact.abs() + (1 + u) * inverse.shape[1] * 2.0**-23 * rows.abs().sum(1) + TINY[out_dtype]


def router_bound(logits, ids, *, scoring: str, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 6.1: weights of the chosen experts, and their bound."""
    x = logits.double()
    exact = (torch.softmax(x, -1) if scoring == "softmax" else torch.sigmoid(x)).gather(-1, ids.long())
    if renormalize:
        exact = exact / exact.sum(-1, keepdim=True)
    spread = x.amax(-1, keepdim=True) - x.gather(-1, ids.long()) if scoring == "softmax" else x.gather(-1, ids.long()).abs()
    return exact, exact * (x.shape[-1] / 32 + 32 + spread) * 2.0**-22 + 2.0**-126


# ---- section 7: rows -----------------------------------------------------------------------------------------------------------------

Rows = tuple[torch.Tensor, torch.Tensor]  # exact, and the bound of the float32 result
LARGEST_CODE = {"fp8_tensor": 448.0, "fp8_token": 448.0, "fp8_block128": 448.0, "int8_token": 127.0}
SINGLE = 2.0**-24


def single(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def row_sum(width: int, threads: int = 512) -> float:
    """Section 7.1: of a sum over a row, relative to the sum of magnitudes; ``threads``: that share the row, where a launch is forced."""
    return (width / threads + 96) * SINGLE


def stored(rows: Rows, dtype) -> Rows:
    """Section 7: rounded once to ``dtype``; float32 is not rounded again."""
    exact, off = rows
    u, limit = UNIT[dtype] if dtype != torch.float32 else 0.0, torch.finfo(dtype).max
    bound = (u * exact.abs() + (1 + u) * off + TINY[dtype]).nan_to_num(0.0, 0.0)
    return torch.where(exact.abs() > limit * (1 + u / 2), torch.copysign(torch.full_like(exact, math.inf), exact), exact), bound


def rms_norm_rows(x, weight=None, eps=1e-6, weight_offset=0.0, threads=512) -> Rows:
    """Section 7.2."""
    x = x.double()
    y = x * (x.square().mean(-1, keepdim=True) + single(eps)).rsqrt()
    if weight is not None:
        y = y * (weight.double() + single(weight_offset))
    return y, row_sum(x.shape[-1], threads) * y.abs()


def norm_gemm_bound(
    x, w, norm_weight=None, eps=1e-6, *, residual=None, weight_offset=0.0, gated=False, activation="none", **sums
) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 7.9: of x [m, k] and W [n, k]; ``residual``: as it is before; ``sums``: bias, and of quantised weights error and alpha."""
    dtype = x.dtype
    if residual is not None:
        x = rounded(x.double() + residual.double(), dtype)
    a, a_error = stored(rms_norm_rows(x, norm_weight, eps, weight_offset), dtype)
    bound = gated_bound if gated else activated_bound
    return bound(a, w, a_error=a_error, activation=activation, out_dtype=dtype, **sums)


def layer_norm_rows(x, weight=None, bias=None, eps=1e-5, threads=512) -> Rows:
    """Section 7.2."""
    x, s = x.double(), row_sum(x.shape[-1], threads)
    if x.shape[-1] == 0:
        return x, x
    deviation = x - x.mean(-1, keepdim=True)
    scale = (deviation.square().mean(-1, keepdim=True) + single(eps)).rsqrt()
    off = s * (x.abs().amax(-1, keepdim=True) + x.abs().mean(-1, keepdim=True)) * scale  # of deviations, in units of their own size
    z = deviation * scale
    w = 1.0 if weight is None else weight.double()
    y = z * w if bias is None else z * w + bias.double()
    size = y.abs() if bias is None else y.abs() + bias.double().abs()
    return y, (off + s * z.abs()) * (1 + z.abs()) * (w.abs() if weight is not None else 1.0) + 2.0**-23 * size


def softmax_rows(x, logarithm=False, threads=512) -> Rows:
    """Section 7.3."""
    x, s = x.double(), row_sum(x.shape[-1], threads)
    if x.shape[-1] == 0:
        return x, x
    below = x - x.amax(-1, keepdim=True)
    if logarithm:
        total = below.exp().sum(-1, keepdim=True).log()
        return below - total, s + (32 + 4 * below.abs() + 4 * total) * SINGLE
    y = torch.softmax(x, -1)
    return y, ((s + (32 + 4 * below.abs().nan_to_num(0.0, 0.0)) * SINGLE) * y).nan_to_num(0.0) + 2.0**-126


def activation_rows(x, activation, bias=None) -> Rows:
    """Section 3 of x + bias."""
    x = x.double() if bias is None else x.double() + bias.double()
    y, off = activated(x, activation, "cuda")
    moved = 0.0 if bias is None else (SINGLE * x.abs() * slope(x.abs(), activation)).nan_to_num(0.0, 0.0)
    return y, off + moved


def gate_and_up(x, gate_layout) -> Rows:
    if gate_layout == "halves":
        return x.chunk(2, -1)
    if gate_layout == "alternating":
        return x[..., 0::2], x[..., 1::2]
    gate, up = x.unflatten(-1, (-1, 2, 8)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def gated_rows(x, activation, gate_layout="halves") -> Rows:
    """Section 7.4."""
    gate, up = gate_and_up(x.double(), gate_layout)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
        inner = single(1.702) * gate
        act = gate * torch.sigmoid(inner)
        off = (4 + (-inner).clamp(0, 128)) * 2.0**-22 * act.abs() + 2.0**-119
        act = torch.where(gate == -math.inf, math.nan, act)
    else:
        act, off = activated(gate, activation, "cuda")
    y = act * up
    return y, up.abs() * off.nan_to_num(0.0) + 2.0**-22 * y.abs()


def e4m3_near(z: torch.Tensor) -> torch.Tensor:
    """The nearest number of e4m3 as float64, saturated."""
    exponent = (torch.frexp(z.nan_to_num(0.0)).exponent - 1).clamp(min=-6)
    quantum = power_of_two(exponent - 3)
    return ((z / quantum).round() * quantum).clamp(-448.0, 448.0)


def by_groups(x: torch.Tensor, quant: str) -> torch.Tensor:
    """[rows, groups, columns], the columns of a group having a scale; missing ones are 0."""
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    x = x.reshape(rows, width)
    if quant != "fp8_block128":
        return x[:, None, :]
    return torch.nn.functional.pad(x, (0, -width % 128)).view(rows, -(-width // 128), 128)


def check_codes(q, scales, rows: Rows, quant: str, what: str, scale=None) -> None:
    """Section 7.5: codes and scales of exact results that are off by a bound; ``scale``: fp8_tensor's."""
    exact, off = rows
    most, is_int8 = LARGEST_CODE[quant], quant == "int8_token"
    assert q.dtype == (torch.int8 if is_int8 else torch.float8_e4m3fn) and q.shape == exact.shape and q.is_contiguous(), what
    exact, off = by_groups(exact, quant), by_groups(off, quant)
    if quant == "fp8_tensor":
        own = scale.double().view(1, 1)
    else:
        count = math.prod(q.shape[:-1])
        if quant == "fp8_block128":
            assert scales.shape == (count, -(-q.shape[-1] // 128)) and scales.stride() == (1, max(4, -(-count // 4) * 4)), what
        else:
            assert scales.shape == (*q.shape[:-1], 1) and scales.is_contiguous(), what
        assert scales.dtype == torch.float32
        own = scales.double().reshape(exact.shape[:2])
        if exact.numel():
            size = torch.where(exact.isnan(), 0.0, exact.abs())
            judge(own * most, size.amax(-1), off.nan_to_num(0.0).amax(-1) + 2.0**-23 * size.amax(-1) + 2.0**-140, f"{what}, scales")
    own = own.unsqueeze(-1)
    z = torch.where(own == 0, 0.0, exact / own)
    z_off = (torch.where(own == 0, 0.0, off / own) + 2.0**-22 * z.abs()).nan_to_num(0.0, 0.0)
    z = z.clamp(-most, most).nan_to_num(0.0) if is_int8 else z.clamp(-most, most)
    near = z.round() if is_int8 else e4m3_near(z)
    have = by_groups(q.double() if is_int8 else q.float().double(), quant)
    judge(have, z, (near - z).abs().nan_to_num(0.0) + 2 * z_off, f"{what}, codes")


def rope_rows(x, cos_sin, positions, interleaved=False) -> Rows:
    """Section 7.6: of heads [tokens, heads, head_dim]."""
    rotated = cos_sin.shape[1]
    cosine, sine = cos_sin.double()[positions.long()].unsqueeze(1).chunk(2, -1)
    exact, off = x.double(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    pairs = (slice(0, rotated, 2), slice(1, rotated, 2)) if interleaved else (slice(0, rotated // 2), slice(rotated // 2, rotated))
    a, b = (exact[..., pair] for pair in pairs)
    exact = exact.clone()
    for pair, own, other in ((pairs[0], a, -b), (pairs[1], b, a)):
        exact[..., pair] = own * cosine + other * sine
        off[..., pair] = 2.0**-23 * ((own * cosine).abs() + (other * sine).abs())
    return exact, off
