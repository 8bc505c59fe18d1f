"""Experts in 4-bit codes, their truth and the calls that cannot be right, of the tests of grouped GEMM with quantised weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import minfer
import pytest
import torch

from tests.gemm.cases import Expected, rms
from tests.moe.grouped_cases import expected as grouped_expected, offsets_of
from tests.quantized_gemm import weight_format_cases
from tests.quantized_gemm.cases import make_zeros, slack

# format, group_size, zeros: all that are legal
FORMS = [
    *(("int4", group_size, zeros) for group_size in (32, 64, 128, -1) for zeros in ("none", "integer", "fractional")),
    *(("nf4", group_size, "none") for group_size in (32, 64, 128, -1)),
    ("mxfp4", 32, "none"),
    ("nvfp4", 16, "none"),
]
COUNTS = (65, 0, 1, 3, 8, 0, 9, 16, 17, 33, 200, 64)  # rows of each of twelve experts, around every tile's edge
_DEVIATION = {"int4": 4.6, "nf4": 0.5, "mxfp4": 2.9, "nvfp4": 2.9}  # of what a code stands for


def has_kernels(device: str) -> bool:
    """Whether experts in 4-bit codes can be computed: on a CPU always; on a GPU only by kernels for sm_90a."""
    return not device.startswith("cuda") or any(kernel["compiled"] for kernel in minfer.kernels("moe_w4a16"))


def require_kernels(device: str) -> None:
    """Skips the test on a GPU where the build has none of them."""
    if not has_kernels(device):
        pytest.skip("not in this build")


@dataclass
class Experts:
    """Codes and what they stand for, kept beside the packed form."""

    name: str
    codes: torch.Tensor  # uint8 [experts, n, k]
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    dtype: torch.dtype  # of activations
    alpha: torch.Tensor | None
    qweight: torch.Tensor

    @property
    def packed(self):
        return self.qweight, self.scales, self.zeros

    @property
    def form(self):
        return {"group_size": self.group_size, "w4_format": self.name, "alpha": self.alpha}

    def dense(self) -> torch.Tensor:
        """[experts, n, k] without alpha: the formula, expert by expert, rounded once to 16 bits."""

        def own(e):
            zeros = None if self.zeros is None else self.zeros[e]
            parts = (self.codes[e], self.scales[e], zeros, self.group_size, self.dtype, 1.0, self.qweight[e])
            return weight_format_cases.Weight(self.name, *parts).dense()

        return torch.stack([own(e) for e in range(self.codes.shape[0])])

    def gemm(self, a, offsets, **arguments):
        return minfer.grouped_w4a16_gemm(a, *self.packed, offsets, **self.form, **arguments)

    def to(self, device) -> Experts:
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **moved)


def make_experts(name, experts, n, k, group_size=128, zeros="none", dtype=torch.float16, device="cpu", *, alpha=False) -> Experts:
    """Random weights of a deviation of about 1 / sqrt(k), alpha included."""
    shape = (experts, 1 if group_size == -1 else -(-k // group_size), n)
    codes = torch.randint(0, 16, (experts, n, k), dtype=torch.uint8, device=device)
    factor = torch.rand(experts, device=device).add_(0.5).mul_(0.125) if alpha else None
    unit = 1 / (_DEVIATION[name] * max(k, 1) ** 0.5) / (0.125 if alpha else 1.0)
    scales = torch.rand(shape, device=device).add_(0.5).mul_(unit)
    if name == "mxfp4":
        scales = scales.log2().round_().add_(127).to(torch.uint8)
    elif name == "nvfp4":
        scales = scales.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        scales = scales.to(dtype)
    qweight = torch.stack([minfer.w4a16_pack(c, w4_format=name) for c in codes])
    return Experts(name, codes, scales, make_zeros(zeros, shape, dtype, device), group_size, dtype, factor, qweight)


def make_call(experts: Experts, counts, *, gather=False, row_scale=False, bias=False, behind=0, source_rows=77):
    """(a, offsets) and keywords of a call with so many rows an expert, and ``behind`` rows that are nobody's."""
    number, n, k = experts.codes.shape
    device, dtype = experts.codes.device, experts.dtype
    counts = torch.as_tensor(counts)
    rows = int(counts.sum()) + behind
    kwargs = {}
    if gather:
        kwargs["gather"] = torch.randint(0, source_rows, (rows,), device=device, dtype=torch.int32)
    if row_scale:
        kwargs["row_scale"] = torch.rand(rows, device=device)
    if bias:
        kwargs["bias"] = torch.randn(number, n, device=device).to(dtype)
    a = torch.randn(source_rows if gather else rows, k, device=device).to(dtype)
    return (a, offsets_of(counts, device)), kwargs


def expected(experts: Experts, args, kwargs, dense=None) -> Expected:
    """Float64 truth on the 16-bit weights, with torch's products of the same weights as the yardstick."""
    a, offsets = args
    dense = experts.dense() if dense is None else dense
    kwargs = {name: x for name, x in kwargs.items() if name != "kernel"}
    layout = {"gate_layout": "blocks"} if kwargs.get("gated") else {}
    result = grouped_expected((a, dense.mT, offsets), kwargs | layout | {"alpha": experts.alpha})
    side = math.sqrt(a.shape[1]) * rms(a) * rms(dense) * (1.0 if experts.alpha is None else rms(experts.alpha)) + 1.0
    result.magnitude = max(result.magnitude, side, side * side if layout else 0.0) * slack(a.dtype)
    return result


def make_layer(name, number, tokens, top_k, hidden, inter, dtype, device, *, group_size=32, zeros="none", alpha=False, biases=False):
    """x, weights, ids, the experts of both products and the biases."""
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    ids = torch.rand(tokens, number, device=device).argsort(dim=-1)[:, :top_k].to(torch.int32).contiguous()
    weights = torch.rand(tokens, top_k, device=device)
    weights /= weights.sum(-1, keepdim=True)
    w13 = make_experts(name, number, 2 * inter, hidden, group_size, zeros, dtype, device, alpha=alpha)
    w2 = make_experts(name, number, hidden, inter, group_size, zeros, dtype, device, alpha=alpha)
    kwargs = {}
    if biases:
        kwargs = {
            "b13": torch.randn(number, 2 * inter, device=device).to(dtype),
            "b2": torch.randn(number, hidden, device=device).to(dtype),
        }
    return (x, w13, w2, weights, ids), kwargs


def layer(x, w13, w2, weights, ids, **kwargs):
    form = {"group_size": w13.group_size, "w4_format": w13.name, "alpha13": w13.alpha, "alpha2": w2.alpha}
    return minfer.moe_ffn_w4a16(x, *w13.packed, *w2.packed, weights, ids, **form, **kwargs)


def dense_layer(args, kwargs):
    """The arguments of reference_moe.moe_ffn that say the same."""
    x, w13, w2, weights, ids = args
    return (x, w13.dense(), w2.dense(), weights, ids), kwargs | {"gate_layout": "blocks", "alpha13": w13.alpha, "alpha2": w2.alpha}


def gpt_oss(experts=3, hidden=64, inter=32, *, bias=True):
    """A layer's tensors as they are in gpt-oss's files, and its weights in float64."""
    tensors, dense = {}, []
    for name, (n, k) in (("gate_up_proj", (2 * inter, hidden)), ("down_proj", (hidden, inter))):
        codes, scales = torch.randint(0, 16, (experts, n, k)), torch.randint(115, 125, (experts, n, k // 32)).to(torch.uint8)
        tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(experts, n, k // 32, 16)
        tensors[f"{name}_scales"] = scales
        if bias:
            tensors[f"{name}_bias"] = torch.randn(experts, n).bfloat16()
        dense.append(weight_format_cases.e2m1(codes) * weight_format_cases.e8m0(scales).repeat_interleave(32, -1))
    return tensors, dense


# name: (arguments beside a [10, 64], W [4, 32, 64] in groups of 32, given a maker of tensors; how the message goes on)
_I32, _U8, _F32 = torch.int32, torch.uint8, torch.float32
BAD = {
    "a rank": (lambda t: {"a": t(64)}, r"a must be \[rows, k\], got a \[64\]"),
    "a dtype": (lambda t: {"a": t(10, 64, dtype=_F32)}, "a must be float16 or bfloat16, got float32"),
    "k": (lambda t: {"a": t(10, 60)}, "k must be a multiple of 8, got 60"),
    "n": (lambda t: {"scales": t(4, 2, 12)}, r"scales must have n = 12 columns, a multiple of 8, got \[4, 2, 12\]"),
    "scales rank": (lambda t: {"scales": t(2, 32)}, r"scales must be \[experts, .*\], got \[2, 32\]"),
    "scales rows": (lambda t: {"scales": t(4, 3, 32)}, r"scales must be .*\[4, 2, 32\], got \[4, 3, 32\]"),
    "scales dtype": (lambda t: {"scales": t(4, 2, 32, dtype=torch.bfloat16)}, "scales must have a's dtype float16, got bfloat16"),
    "scales view": (lambda t: {"scales": t(4, 32, 2).mT}, r"scales must be contiguous, got a view of \[4, 2, 32\]"),
    "no experts": (lambda t: {"scales": t(0, 2, 32)}, r"scales must have 1 to 512 experts, got \[0, 2, 32\]"),
    "experts": (lambda t: {"scales": t(513, 2, 32)}, r"scales must have 1 to 512 experts, got \[513, 2, 32\]"),
    "qweight rank": (lambda t: {"qweight": t(1, 1, 512, dtype=_I32)}, r"qweight must be .*\[4, 1, 1, 512\], got \[1, 1, 512\]"),
    "qweight experts": (lambda t: {"qweight": t(3, 1, 1, 512, dtype=_I32)}, r"qweight must be .*\[4, 1, 1, 512\], got \[3, 1, 1, 512\]"),
    "qweight dtype": (lambda t: {"qweight": t(4, 1, 1, 512, dtype=_U8)}, "qweight must be int32, got uint8"),
    "qweight view": (lambda t: {"qweight": t(4, 1, 1, 1024, dtype=_I32)[..., ::2]}, "qweight must be contiguous, got a view of"),
    "zeros shape": (lambda t: {"zeros": t(4, 32, 2)}, r"zeros must be .*\[4, 2, 32\], got \[4, 32, 2\]"),
    "zeros dtype": (lambda t: {"zeros": t(4, 2, 32, dtype=_I32)}, "zeros must have the dtype of scales, float16, got int32"),
    "zeros view": (lambda t: {"zeros": t(1, 2, 32).expand(4, 2, 32)}, "zeros must be contiguous, got a view of"),
    "offsets size": (lambda t: {"offsets": t(3, dtype=_I32)}, r"offsets must be \[4\], got \[3\]"),
    "offsets dtype": (lambda t: {"offsets": t(4, dtype=torch.int64)}, "offsets must be int32, got int64"),
    "alpha shape": (lambda t: {"alpha": t(1, dtype=_F32)}, r"alpha must be \[4\], got \[1\]"),
    "alpha dtype": (lambda t: {"alpha": t(4)}, "alpha must be float32, got float16"),
    "bias shape": (lambda t: {"bias": t(4, 31)}, r"bias must be \[4, 32\], got \[4, 31\]"),
    "bias dtype": (lambda t: {"bias": t(4, 32, dtype=_F32)}, "bias must be float16, got float32"),
    "gather rank": (lambda t: {"gather": t(2, 5, dtype=_I32)}, r"gather must be \[rows\], got \[2, 5\]"),
    "gather dtype": (lambda t: {"gather": t(10, dtype=torch.int64)}, "gather must be int32, got int64"),
    "row_scale shape": (lambda t: {"row_scale": t(9, dtype=_F32)}, r"row_scale must be \[10\], got \[9\]"),
    "row_scale dtype": (lambda t: {"row_scale": t(10)}, "row_scale must be float32, got float16"),
    "group_size 16": (lambda t: {"group_size": 16}, "group_size must be -1 or a power of two >= 32, got 16"),
    "group_size 96": (lambda t: {"group_size": 96}, "group_size must be -1 or a power of two >= 32, got 96"),
    "w4_format": (lambda t: {"w4_format": "int8"}, "w4_format must be one of int4, nf4, mxfp4, nvfp4, got 'int8'"),
    "mxfp4 group_size": (lambda t: {"w4_format": "mxfp4", "group_size": 64}, "group_size must be 32 for mxfp4, got 64"),
    "mxfp4 scales": (lambda t: {"w4_format": "mxfp4"}, "scales must be uint8 or float8_e8m0fnu for mxfp4, got float16"),
    "mxfp4 zeros": (
        lambda t: {"w4_format": "mxfp4", "scales": t(4, 2, 32, dtype=_U8), "zeros": t(4, 2, 32, dtype=_U8)},
        r"zeros must be None for mxfp4, got \[4, 2, 32\]",
    ),
    "activation": (lambda t: {"activation": "swish"}, "activation must be one of none, relu, gelu, gelu_tanh, silu, relu2, got 'swish'"),
    "swigluoai": (lambda t: {"activation": "swigluoai"}, "activation swigluoai needs gated = True"),
    "gated n": (
        lambda t: {"gated": True, "scales": t(4, 2, 24), "qweight": t(4, 1, 1, 512, dtype=_I32)},
        "scales must have a multiple of 16 columns in blocks of 8 gate and 8 up columns",
    ),
    "kernel": (lambda t: {"kernel": "moe_w4a16_nothing"}, "kernel 'moe_w4a16_nothing' is not in the registry"),
    "launch options": (lambda t: {"kernel": "moe_w4a16_nothing@splits=2"}, "kernel .* is not in the registry"),
    "out shape": (lambda t: {"out": t(10, 31)}, r"out must be \[10, 32\], got \[10, 31\]"),
    "out dtype": (lambda t: {"out": t(10, 32, dtype=_F32)}, "out must be float16, got float32"),
    "out columns": (lambda t: {"out": t(10, 64)[:, ::2]}, "out must have unit stride along its rows"),
    "out rows": (lambda t: {"out": t(1, 32).expand(10, 32)}, "out's rows must not overlap"),
}
BAD_LAYER = {
    "x rank": (lambda t: {"x": t(64)}, r"x must be \[tokens, hidden\], got \[64\]"),
    "x dtype": (lambda t: {"x": t(5, 64, dtype=_F32)}, "x must be float16 or bfloat16, got float32"),
    "w13 shape": (lambda t: {"w13": t(4, 2, 1, 512, dtype=_I32)}, r"w13 must be .*\[4, 1, 1, 512\], got \[4, 2, 1, 512\]"),
    "w13_scales columns": (lambda t: {"w13_scales": t(4, 2, 40)}, "w13_scales must have a multiple of 16 columns in blocks of 8"),
    "w13_scales dtype": (lambda t: {"w13_scales": t(4, 2, 64, dtype=_F32)}, "w13_scales must have a's dtype float16, got float32"),
    "w13_zeros shape": (lambda t: {"w13_zeros": t(4, 2, 32)}, r"w13_zeros must be .*\[4, 2, 64\], got \[4, 2, 32\]"),
    "w2 shape": (lambda t: {"w2": t(3, 1, 1, 512, dtype=_I32)}, r"w2 must be .*\[4, 1, 1, 512\], got \[3, 1, 1, 512\]"),
    "w2_scales shape": (lambda t: {"w2_scales": t(4, 2, 64)}, r"w2_scales must be .*\[4, 1, 64\], got \[4, 2, 64\]"),
    "w2_scales view": (lambda t: {"w2_scales": t(4, 1, 128)[..., ::2]}, "w2_scales must be contiguous, got a view of"),
    "weights dtype": (lambda t: {"weights": t(5, 2)}, "weights must be float32, got float16"),
    "weights shape": (lambda t: {"weights": t(5, 3, dtype=_F32)}, r"weights must be \[5, 2\], got \[5, 3\]"),
    "ids dtype": (lambda t: {"ids": t(5, 2, dtype=torch.int64)}, "ids must be int32, got int64"),
    "ids rank": (lambda t: {"ids": t(5, dtype=_I32)}, r"ids must be \[tokens, top_k\], got \[5\]"),
    "alpha2": (lambda t: {"alpha2": t(5, dtype=_F32)}, r"alpha2 must be \[4\], got \[5\]"),
    "b13": (lambda t: {"b13": t(4, 32)}, r"b13 must be \[4, 64\], got \[4, 32\]"),
    "b2": (lambda t: {"b2": t(4, 64, dtype=_F32)}, "b2 must be float16, got float32"),
    "activation": (lambda t: {"activation": "swish"}, "activation must be one of none, .* relu2, swigluoai, got 'swish'"),
    "group_size": (lambda t: {"group_size": 48}, "group_size must be -1 or a power of two >= 32, got 48"),
    "w4_format": (lambda t: {"w4_format": ""}, "w4_format must be one of int4, nf4, mxfp4, nvfp4, got ''"),
}


def bad_call(arguments, device):
    """The keywords of a call of grouped_w4a16_gemm with a case of BAD in it."""

    def t(*shape, dtype=torch.float16):
        return torch.zeros(shape, dtype=dtype, device=device)

    good = {"a": t(10, 64), "qweight": t(4, 1, 1, 512, dtype=_I32), "scales": t(4, 2, 32), "zeros": None, "offsets": t(4, dtype=_I32)}
    return good | {"group_size": 32} | arguments(t)


def bad_layer(arguments, device):
    """The keywords of a call of moe_ffn_w4a16, hidden 64 and inter 32, with a case of BAD_LAYER in it."""

    def t(*shape, dtype=torch.float16):
        return torch.zeros(shape, dtype=dtype, device=device)

    good = {"x": t(5, 64), "w13": t(4, 1, 1, 512, dtype=_I32), "w13_scales": t(4, 2, 64), "w13_zeros": None, "group_size": 32}
    good |= {"w2": t(4, 1, 1, 512, dtype=_I32), "w2_scales": t(4, 1, 64), "w2_zeros": None}
    good |= {"weights": t(5, 2, dtype=_F32), "ids": t(5, 2, dtype=_I32)}
    return good | arguments(t)
