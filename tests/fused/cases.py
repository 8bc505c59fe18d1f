"""Calls of the operators between the GEMMs, with their truth, and the views that they are made with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import minfer
import torch
from torch import Tensor

from tests.contracts import numerics_cases as numerics
from tests.fuzz.truth import rows as truth

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
QUANTS = ("fp8_tensor", "fp8_token", "fp8_block128", "int8_token")
WIDTHS = (1, 7, 8, 96, 128, 896, 1000, 4096, 5120, 16384, 50257, 262144)
ROWS = (0, 1, 3, 129)
SCALES = (0.02, 1.0, 8.0)
EPS = 1e-5


@dataclass
class Case:
    """An operator on rows with some of its options.

    call(x, factors, **more) calls it; quantized(x, factors, quant=, scale=, ..), where its results may be codes. exact(x, factors,
    threads) gives float64 results and the bound of float32 ones. factors: names of tensors [width of x]. columns: of x for each of y.
    """

    name: str
    operation: str
    call: Callable[..., Tensor]
    exact: Callable[..., numerics.Rows]
    quantized: Callable[..., tuple[Tensor, Tensor]] | None = None
    factors: tuple[str, ...] = ()
    float32: bool = False
    columns: int = 1
    unit: int = 1  # outputs of a row are a multiple of this
    row_wise: bool = True  # each row needs all of its elements
    shifted: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return FLOATS if self.float32 else HALVES

    def make(self, rows: int, width: int, dtype: torch.dtype, device: str = "cpu", scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Contents of ``rows`` rows of ``width`` outputs, of any magnitudes: some rows are zeros."""
        x = torch.randn(rows, width * self.columns, device=device) * scale
        if rows > 2:
            x[1] *= 2.0**-6
            x[2] = 0.0
        return x.to(dtype), {name: (torch.randn(width, device=device) * 0.5 + self.shifted).to(dtype) for name in self.factors}


def _gated(activation: str, layout: str) -> Case:
    return Case(
        f"gated_{activation}_{layout}",
        "gated_activation",
        lambda x, f, **more: minfer.gated_activation(x, activation, gate_layout=layout, **more),
        lambda x, f, threads=512: numerics.gated_rows(x, activation, layout),
        lambda x, f, **more: minfer.gated_activation_quantized(x, activation=activation, gate_layout=layout, **more),
        columns=2,
        unit=8 if layout == "blocks" else 1,
        row_wise=False,
    )


def _activation(activation: str, bias: bool) -> Case:
    return Case(
        f"activation_{activation}{'_bias' if bias else ''}",
        "activation",
        lambda x, f, **more: minfer.activation(x, activation, bias=f.get("bias"), **more),
        lambda x, f, threads=512: numerics.activation_rows(x, activation, f.get("bias")),
        factors=("bias",) if bias else (),
        float32=True,
        row_wise=False,
    )


def _rms_norm(name: str, offset: float, weighted: bool) -> Case:
    own = {"weight_offset": offset} if offset else {}
    return Case(
        name,
        "rms_norm",
        lambda x, f, **more: minfer.rms_norm(x, f.get("weight"), EPS, **own, **more),
        lambda x, f, threads=512: numerics.rms_norm_rows(x, f.get("weight"), EPS, offset, threads),
        lambda x, f, **more: minfer.rms_norm(x, f.get("weight"), EPS, **own, **more),
        factors=("weight",) if weighted else (),
        shifted=0.0 if offset else 1.0,
    )


CASES = {
    case.name: case
    for case in (
        _rms_norm("rms_norm", 0.0, True),
        _rms_norm("rms_norm_plain", 0.0, False),
        _rms_norm("rms_norm_gemma", 1.0, True),
        Case(
            "layer_norm",
            "layer_norm",
            lambda x, f, **more: minfer.layer_norm(x, f["weight"], f["bias"], EPS, **more),
            lambda x, f, threads=512: numerics.layer_norm_rows(x, f["weight"], f["bias"], EPS, threads),
            factors=("weight", "bias"),
        ),
        Case(
            "layer_norm_plain",
            "layer_norm",
            lambda x, f, **more: minfer.layer_norm(x, eps=EPS, **more),
            lambda x, f, threads=512: numerics.layer_norm_rows(x, None, None, EPS, threads),
        ),
        Case(
            "softmax",
            "softmax",
            lambda x, f, **more: minfer.softmax(x, **more),
            lambda x, f, threads=512: numerics.softmax_rows(x, False, threads),
            float32=True,
        ),
        Case(
            "log_softmax",
            "softmax",
            lambda x, f, **more: minfer.log_softmax(x, **more),
            lambda x, f, threads=512: numerics.softmax_rows(x, True, threads),
            float32=True,
        ),
        *(_activation(name, False) for name in ("none", "relu", "gelu", "gelu_tanh", "silu", "relu2")),
        *(_activation(name, True) for name in ("gelu", "relu2")),
        *(_gated(name, "halves") for name in ("none", "relu", "gelu", "gelu_tanh", "silu", "relu2", "swigluoai")),
        *(_gated(name, layout) for name in ("silu", "swigluoai") for layout in ("alternating", "blocks")),
    )
}
# With results that are codes; the last one has no other results.
QUANTIZED = {name: case for name, case in CASES.items() if case.quantized is not None} | {
    "quantize": Case(
        "quantize",
        "quantize",
        lambda x, f, **more: x,
        lambda x, f, threads=512: (x.double(), torch.zeros_like(x, dtype=torch.float64)),
        lambda x, f, quant, **more: torch.ops.minfer.quantize(x, quant, **more),
        row_wise=False,
    )
}


def widths_of(case: Case, most: int) -> list[int]:
    return [width for width in dict.fromkeys(-(-width // case.unit) * case.unit for width in WIDTHS) if width * case.columns <= most]


def views_of(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views [.., width] with the contents of x [rows, width], amid NaN: all that a kernel reads as it is, and some that it cannot."""
    rows, width = x.shape

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=x.dtype, device=x.device)

    yield "contiguous", x
    yield "padded rows", memory(rows, width + 8)[:, :width].copy_(x)
    yield "rows at odd addresses", memory(rows, width + 3)[:, 1 : width + 1].copy_(x)
    yield "behind an element", memory(rows * width + 1)[1:].view(rows, width).copy_(x)
    yield "columns first", memory(width, rows).t().copy_(x)
    yield "every second column", memory(rows, 2 * width)[:, ::2].copy_(x)
    for heads in (3, 43):
        if rows and rows % heads == 0:
            of_heads = x.view(rows // heads, heads, width)
            yield f"{heads} heads of a fused qkv", memory(rows // heads, heads + 2, width)[:, :heads].copy_(of_heads)
            yield f"{heads} heads, transposed", memory(heads, rows // heads, width).transpose(0, 1).copy_(of_heads)
            yield f"{heads} heads, four modes", memory(2, rows // heads, heads + 1, width)[:1, :, :heads].copy_(of_heads[None])


def check_stored(case: Case, x: Tensor, factors: dict[str, Tensor], out: Tensor, what: str, threads: int = 512) -> None:
    """A result against the truth."""
    rows = case.exact(x, factors, threads)
    assert out.dtype == x.dtype
    numerics.judge(out, *numerics.stored(rows, x.dtype), f"{case.name}, {what}")


def given_scale(quant: str, device: str = "cpu", value: float = 0.011) -> dict[str, Tensor]:
    return {"scale": torch.full((1,), value, device=device)} if quant == "fp8_tensor" else {}


# ---- calls that cannot be right: operator -> name -> (arguments instead, given a maker of tensors; how the message goes on) ----------

HALF = torch.float16
KERNEL = next(kernel["name"] for kernel in minfer.kernels("fused"))
BAD_KERNELS = {
    "kernel": (lambda t: {"kernel": "fused_sm80_nothing"}, "kernel 'fused_sm80_nothing' is not in the registry"),
    "kernel of others": (lambda t: {"kernel": minfer.kernels("gemm")[0]["name"]}, "kernel 'gemm_.*' is not in the registry"),
    "launch": (
        lambda t: {"kernel": f"{KERNEL}@warps=3"},
        "kernel option 'warps' is not known; expected threads, rows, cluster or parts",
    ),
    "launch twice": (lambda t: {"kernel": f"{KERNEL}@threads=32,threads=64"}, "kernel option threads is given twice"),
    "launch text": (lambda t: {"kernel": f"{KERNEL}@threads=many"}, "kernel option threads must be an integer, got 'many'"),
    "launch 0": (lambda t: {"kernel": f"{KERNEL}@cluster=0"}, "kernel option cluster must be 1 to 4096, got 0"),
}
BAD_X = {
    "x dtype": (lambda t: {"x": t(3, 16, dtype=torch.float64)}, "x must be float16 or bfloat16, got float64"),
    "x float32": (lambda t: {"x": t(3, 16, dtype=torch.float32)}, "x must be float16 or bfloat16, got float32"),
    "x rank": (lambda t: {"x": t()}, r"x must have at least one mode, got \[\]"),
}
BAD_FLOAT_X = {
    "x dtype": (lambda t: {"x": t(3, 16, dtype=torch.float64)}, "x must be float16, bfloat16 or float32, got float64"),
    "x rank": (lambda t: {"x": t()}, r"x must have at least one mode, got \[\]"),
}
BAD_WEIGHT = {
    "weight shape": (lambda t: {"weight": t(15)}, r"weight must be \[16\], got \[15\]"),
    "weight rank": (lambda t: {"weight": t(1, 16)}, r"weight must be \[16\], got \[1, 16\]"),
    "weight dtype": (lambda t: {"weight": t(16, dtype=torch.float32)}, "weight must be float16, got float32"),
}
BAD_BIAS = {
    "bias shape": (lambda t: {"bias": t(15)}, r"bias must be \[16\], got \[15\]"),
    "bias dtype": (lambda t: {"bias": t(16, dtype=torch.bfloat16)}, "bias must be float16, got bfloat16"),
}
BAD_EPS = {
    "eps": (lambda t: {"eps": -1e-6}, "eps must be finite in float32 and not negative, got -1e-06"),
    "eps inf": (lambda t: {"eps": math.inf}, "eps must be finite in float32 and not negative, got inf"),
    "eps nan": (lambda t: {"eps": math.nan}, "eps must be finite in float32 and not negative, got nan"),
}
BAD_OUT = {
    "out shape": (lambda t: {"out": t(3, 15)}, r"out must be \[3, 16\], got \[3, 15\]"),
    "out dtype": (lambda t: {"out": t(3, 16, dtype=torch.float32)}, "out must be float16, got float32"),
    "out": (lambda t: {"out": t(1, 16).expand(3, 16)}, r"out must not overlap itself, got \[3, 16\] with strides \[0, 1\]"),
}
BAD_QUANT = {
    "quant": (lambda t: {"quant": "fp4"}, "quant must be one of fp8_tensor, fp8_token, fp8_block128, int8_token, got 'fp4'"),
    "no scale": (lambda t: {"quant": "fp8_tensor"}, "scale must be given for fp8_tensor"),
    "scale": (lambda t: {"scale": t(1)}, r"scale must be None for fp8_token, whose scales are computed, got \[1\]"),
    "scale shape": (lambda t: {"quant": "fp8_tensor", "scale": t(dtype=torch.float32)}, r"scale must be \[1\], got \[\]"),
    "scale dtype": (lambda t: {"quant": "fp8_tensor", "scale": t(1)}, "scale must be float32, got float16"),
}
BAD_NORM = {
    "norm shape": (lambda t: {"norm": t(3, 8)}, r"norm must be \[3, 16\], got \[3, 8\]"),
    "norm dtype": (lambda t: {"norm": t(3, 16, dtype=torch.float32)}, "norm must be float16, got float32"),
    "norm": (lambda t: {"norm": t(1, 16).expand(3, 16)}, r"norm must not overlap itself, got \[3, 16\] with strides \[0, 1\]"),
}
BAD_OFFSET = {"weight_offset": (lambda t: {"weight_offset": 1e39}, r"weight_offset must be finite in float32, got 1e\+39")}
BAD_RESIDUAL = {
    "residual shape": (lambda t: {"residual": t(3, 8)}, r"residual must be \[3, 16\], got \[3, 8\]"),
    "residual dtype": (lambda t: {"residual": t(3, 16, dtype=torch.float32)}, "residual must be float16, got float32"),
    "residual": (lambda t: {"residual": t(1, 16).expand(3, 16)}, r"residual must not overlap itself, got \[3, 16\] with strides \[0, 1\]"),
}
BAD_ACTIVATION = {
    "activation": (lambda t: {"activation": "swish"}, "activation must be one of none, relu, gelu, gelu_tanh, silu, relu2, got 'swish'")
}
BAD_GATED = {
    "activation": (
        lambda t: {"activation": "swish"},
        "activation must be one of none, relu, gelu, gelu_tanh, silu, relu2, swigluoai, got 'swish'",
    ),
    "gate_layout": (lambda t: {"gate_layout": "pairs"}, "gate_layout must be halves, alternating or blocks, got 'pairs'"),
    "columns": (lambda t: {"x": t(3, 15)}, r"x must have a multiple of 2 columns, gate and up, got \[3, 15\]"),
    "blocks": (
        lambda t: {"x": t(3, 24), "gate_layout": "blocks"},
        r"x must have a multiple of 16 columns, gate and up, got \[3, 24\]",
    ),
}
BAD_GATED_OUT = {"out shape": (lambda t: {"out": t(3, 16)}, r"out must be \[3, 8\], got \[3, 16\]")}
BAD_NORMS = BAD_X | BAD_WEIGHT | BAD_EPS | BAD_OFFSET
BAD_DEQUANTIZE = {
    "quant": BAD_QUANT["quant"],
    "q dtype": (lambda t: {"q": t(3, 16, dtype=torch.int8)}, "q must be float8_e4m3fn for fp8_token, got int8"),
    "q int8": (lambda t: {"quant": "int8_token"}, "q must be int8 for int8_token, got float8_e4m3fn"),
    "q rank": (lambda t: {"q": t(dtype=torch.float8_e4m3fn)}, r"q must have at least one mode, got \[\]"),
    "dtype": (lambda t: {"dtype": torch.int32}, "dtype must be float16, bfloat16 or float32, got int32"),
    "scales": (lambda t: {"scales": t(3, 16, dtype=torch.float32)}, r"scales must be \[3, 1\], got \[3, 16\]"),
    "scales dtype": (lambda t: {"scales": t(3, 1)}, "scales must be float32, got float16"),
    "scales of a tensor": (lambda t: {"quant": "fp8_tensor"}, r"scales must be \[1\], got \[3, 1\]"),
    "scales of blocks": (
        lambda t: {"quant": "fp8_block128", "q": t(3, 130, dtype=torch.float8_e4m3fn)},
        r"scales must be \[3, 2\], got \[3, 1\]",
    ),
}
BAD_ROPE = {
    "q rank": (lambda t: {"q": t(3, 16)}, r"q must be \[tokens, heads, head_dim\], got \[3, 16\]"),
    "q dtype": (lambda t: {"q": t(3, 2, 16, dtype=torch.float32)}, "q must be float16 or bfloat16, got float32"),
    "q strides": (lambda t: {"q": t(3, 16, 2).mT}, r"q must be contiguous along head_dim, got strides \[32, 1, 2\]"),
    "q": (lambda t: {"q": t(3, 1, 16).expand(3, 2, 16)}, r"q must not overlap itself, got \[3, 2, 16\] with strides \[16, 0, 1\]"),
    "k rank": (lambda t: {"k": t(3, 16)}, r"k must be \[tokens, heads, head_dim\], got \[3, 16\]"),
    "k dtype": (lambda t: {"k": t(3, 1, 16, dtype=torch.bfloat16)}, "k must have q's dtype float16, got bfloat16"),
    "k tokens": (lambda t: {"k": t(4, 1, 16)}, r"k must be \[tokens = 3, heads_kv, head_dim = 16\], got \[4, 1, 16\]"),
    "k head_dim": (lambda t: {"k": t(3, 1, 8)}, r"k must be \[tokens = 3, heads_kv, head_dim = 16\], got \[3, 1, 8\]"),
    "cos_sin rank": (lambda t: {"cos_sin": t(16, dtype=torch.float32)}, r"cos_sin must be \[length, rotary_dim\], got \[16\]"),
    "cos_sin dtype": (lambda t: {"cos_sin": t(32, 16)}, "cos_sin must be float32, got float16"),
    "cos_sin width": (lambda t: {"rotary_dim": 8}, r"cos_sin must be \[32, 8\], got \[32, 16\]"),
    "rotary_dim odd": (lambda t: {"rotary_dim": 7}, "rotary_dim must be even, 2 to head_dim = 16, got 7"),
    "rotary_dim 0": (lambda t: {"cos_sin": t(32, 0, dtype=torch.float32)}, "rotary_dim must be even, 2 to head_dim = 16, got 0"),
    "rotary_dim": (lambda t: {"cos_sin": t(32, 18, dtype=torch.float32)}, "rotary_dim must be even, 2 to head_dim = 16, got 18"),
    "positions dtype": (lambda t: {"positions": t(3, dtype=torch.int16)}, "positions must be int64 or int32, got int16"),
    "positions": (lambda t: {"positions": t(4, dtype=torch.int64)}, r"positions must be \[3\], got \[4\]"),
}
BAD_EMBEDDING = {
    "ids dtype": (lambda t: {"ids": t(3, dtype=torch.float32)}, "ids must be int64 or int32, got float32"),
    "weight rank": (lambda t: {"weight": t(32)}, r"weight must be \[vocabulary, width\], got \[32\]"),
    "weight dtype": (lambda t: {"weight": t(32, 16, dtype=torch.float64)}, "weight must be float16, bfloat16 or float32, got float64"),
    "scale": (lambda t: {"scale": math.inf}, "scale must be finite in float32, got inf"),
    "out shape": (lambda t: {"out": t(3, 15)}, r"out must be \[3, 16\], got \[3, 15\]"),
    "out dtype": (lambda t: {"out": t(3, 16, dtype=torch.float32)}, "out must be float16, got float32"),
    "out": BAD_OUT["out"],
}
BAD = {
    "rms_norm": BAD_NORMS | BAD_OUT | BAD_KERNELS,
    "rms_norm_quantized": BAD_NORMS | BAD_QUANT | BAD_NORM | BAD_KERNELS,
    "add_rms_norm": BAD_NORMS | BAD_RESIDUAL | BAD_KERNELS,
    "add_rms_norm_quantized": BAD_NORMS | BAD_RESIDUAL | BAD_QUANT | BAD_NORM | BAD_KERNELS,
    "layer_norm": BAD_X | BAD_WEIGHT | BAD_BIAS | BAD_EPS | BAD_OUT | BAD_KERNELS,
    "softmax": BAD_FLOAT_X | BAD_OUT | BAD_KERNELS,
    "log_softmax": BAD_FLOAT_X | BAD_OUT | BAD_KERNELS,
    "activation": BAD_FLOAT_X | BAD_ACTIVATION | BAD_BIAS | BAD_OUT | BAD_KERNELS,
    "gated_activation": BAD_X
    | BAD_GATED
    | BAD_KERNELS
    | {"out shape": (lambda t: {"out": t(3, 16)}, r"out must be \[3, 8\], got \[3, 16\]")},
    "gated_activation_quantized": BAD_X | BAD_GATED | BAD_QUANT | BAD_KERNELS,
    "quantize": BAD_X | BAD_QUANT | BAD_KERNELS,
    "dequantize": BAD_DEQUANTIZE,
    "rope": BAD_ROPE,
    "embedding": BAD_EMBEDDING,
}
BAD_CASES = [(op, case) for op, cases in BAD.items() for case in cases]


def maker(device: str) -> Callable[..., Tensor]:
    return lambda *shape, dtype=HALF: torch.zeros(shape, dtype=dtype, device=device)


def good_call(op: str, device: str, optional: bool = False) -> dict[str, Any]:
    """Keywords of a call that every bad case changes; with all tensors where ``optional``."""
    t = maker(device)
    x, weight, bias = {"x": t(3, 16)}, {"weight": t(16)} if optional else {}, {"bias": t(16)} if optional else {}
    quant: dict[str, Any] = {"quant": "fp8_token"}
    codes = {"q": t(3, 16, dtype=torch.int8), "quant": "int8_token"} if optional else {"q": t(3, 16, dtype=torch.float8_e4m3fn)} | quant
    norm = {"norm": t(3, 16)} if optional else {}
    if optional:
        quant = {"quant": "fp8_tensor", "scale": t(1, dtype=torch.float32)}
    residual, single = {"residual": t(3, 16)}, torch.float32
    return {
        "rms_norm": x | weight,
        "rms_norm_quantized": x | quant | weight | norm,
        "add_rms_norm": x | residual | weight,
        "add_rms_norm_quantized": x | residual | quant | weight | norm,
        "layer_norm": x | weight | bias,
        "softmax": x,
        "log_softmax": x,
        "activation": x | {"activation": "silu"} | bias,
        "gated_activation": x,
        "gated_activation_quantized": x | quant,
        "quantize": x | quant,
        "dequantize": codes | {"scales": t(3, 1, dtype=single), "dtype": HALF},
        "rope": {
            "q": t(3, 2, 16),
            "k": t(3, 1, 16) if optional else None,
            "cos_sin": t(32, 16, dtype=single),
            "positions": t(3, dtype=torch.int64),
        },
        "embedding": {"weight": t(32, 16), "ids": t(3, dtype=torch.int64)},
    }[op]


def bad_call(op: str, case: str, device: str) -> tuple[dict[str, Any], str]:
    """Keywords and message of a case of BAD."""
    arguments, message = BAD[op][case]
    return good_call(op, device) | arguments(maker(device)), message


def function(op: str) -> Callable[..., Any]:
    """The operator's wrapper."""
    return minfer.ops.fused.quantize if op == "quantize" else getattr(minfer, op)


# ---- Hadamard transform --------------------------------------------------------------------------------------------------------------

HADAMARD_BLOCKS = (*(1 << bits for bits in range(16)), *(outer << bits for outer in (12, 20, 28) for bits in range(11)))


def check_hadamard(x, block, out, transpose=False, what=""):
    """Against float64."""
    y = truth.hadamard(x, block, transpose)
    y = y.rounded(x.dtype) if x.dtype != torch.float32 else y
    off = (out.double() - y.value).abs()
    assert (off <= y.error + 2.0**-126).all(), f"{what}: {block} of {list(x.shape)}, {float(off.max())}"


BAD_HADAMARD = [
    (dict(block=0), "block must be"),
    (dict(block=36), "block must be a power of two, or 12, 20 or 28 times one, up to 32768, got 36"),
    (dict(block=65536), "block must be"),
    (dict(block=32), "x must have whole blocks of 32 columns"),
    (dict(x=torch.zeros(3, 48, dtype=torch.int8)), "x must be float16, bfloat16 or float32"),
    (dict(x=torch.tensor(1.0)), "x must have at least one mode"),
    (dict(out=torch.zeros(3, 47)), "out must be"),
]
