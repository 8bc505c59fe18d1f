"""Weights of every format and their truth, which the tests of 4-bit and 8-bit weights beyond int4 share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import minfer
import torch
from minfer.formats import weight_formats

from tests.gemm.cases import Expected, gemm_expected
from tests.quantized_gemm.cases import gated_expected, make_zeros, slack

# What the tests know of a format: its name, its group sizes, the error of quantised normal weights and, below, what its codes stand for.
NEW = ("nf4", "mxfp4", "nvfp4", "int8", "fp8_e4m3")
BITS = {name: form.bits for name, form in weight_formats.FORMATS.items()}  # test_weight_layout.py holds them against the layouts
GROUPS = {"nf4": (32, 64, 128, -1), "mxfp4": (32,), "nvfp4": (16,), "int8": (32, 128, -1), "fp8_e4m3": (32, 128, -1)}
QUANTISED_ERROR = {"nf4": 0.10, "mxfp4": 0.14, "nvfp4": 0.11, "int8": 0.012, "fp8_e4m3": 0.03}  # relative, at most
ZEROS = {"int8": ("none", "integer", "fractional")}  # the others: none
CASES = [(name, group_size) for name in NEW for group_size in GROUPS[name]]


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float64 2^exponent of integers from -1022 to 1023, exactly; torch's power is off by a bit on CUDA."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float64 of float8_e4m3fn bits: bias 7, subnormals, 0x7f and 0xff are NaN."""
    codes = codes.long()
    exponent, mantissa = codes >> 3 & 15, (codes & 7).double()
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * power_of_two(exponent - 10))
    value = torch.where(codes & 127 == 127, torch.nan, value)
    return torch.where(codes >= 128, -value, value)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float64 of FP4 bits: bias 1, one bit of mantissa."""
    codes = codes.long()
    exponent, mantissa = codes >> 1 & 3, (codes & 1).double()
    value = torch.where(exponent == 0, mantissa / 2, (2 + mantissa) * power_of_two(exponent - 2))
    return torch.where(codes >= 8, -value, value)


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """float64 of a shared exponent: bias 127, 255 is NaN."""
    return torch.where(codes == 255, torch.nan, power_of_two(codes.long() - 127))


def values(name: str, codes: torch.Tensor) -> torch.Tensor:
    if name == "nf4":
        return torch.tensor(weight_formats.NF4, dtype=torch.float64, device=codes.device)[codes.long()]
    return {"mxfp4": e2m1, "nvfp4": e2m1, "fp8_e4m3": e4m3}.get(name, torch.Tensor.double)(codes)


@dataclass
class Weight:
    """Codes and what they stand for, kept beside the packed form."""

    name: str
    codes: torch.Tensor  # uint8 [n, k]
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    dtype: torch.dtype  # of activations
    alpha: float
    qweight: torch.Tensor

    @property
    def packed(self):
        """The arguments of the operators that the weight fills, positional and keywords."""
        keywords = {"group_size": self.group_size, "alpha": self.alpha, f"w{BITS[self.name]}_format": self.name}
        return (self.qweight, self.scales, self.zeros), keywords

    def dense(self, dtype=None) -> torch.Tensor:
        """[n, k] without alpha: the formula, column by column, rounded once to 16 bits."""
        k = self.codes.shape[1]
        group = torch.arange(k, device=self.codes.device) // (k if self.group_size == -1 else self.group_size)
        scale = {"mxfp4": e8m0, "nvfp4": e4m3}.get(self.name, torch.Tensor.double)(self.scales)[group].t()
        w = values(self.name, self.codes)
        if self.name.startswith("int"):
            w = w - (2.0 ** (BITS[self.name] - 1) if self.zeros is None else self.zeros.double()[group].t())
        return (w * scale).to(dtype or self.dtype)

    def op(self, name: str):
        """minfer.w4a16_gemm and its like."""
        return getattr(minfer, f"w{BITS[self.name]}a16_{name}")

    def gemm(self, a, **arguments):
        args, kwargs = self.packed
        return self.op("gemm")(a, *args, **kwargs, **arguments)

    def gemm_gated(self, a, **arguments):
        args, kwargs = self.packed
        return self.op("gemm_gated")(a, *args, **kwargs, **arguments)

    def dequantize(self, **arguments):
        args, kwargs = self.packed
        return self.op("dequantize")(*args, **kwargs, n=self.codes.shape[0], k=self.codes.shape[1], **arguments)

    def to(self, device) -> Weight:
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **moved)


def pack(name: str, codes: torch.Tensor) -> torch.Tensor:
    return minfer.w4a16_pack(codes, w4_format=name) if BITS[name] == 4 else minfer.w8a16_pack(codes)


def random_codes(name, shape, device="cpu"):
    """Any but NaN."""
    codes = torch.randint(0, 2 ** BITS[name], shape, device=device).to(torch.uint8)
    return torch.where(codes & 127 == 127, codes - 1, codes) if name == "fp8_e4m3" else codes


def random_scales(name, shape, dtype, device="cpu"):
    """Of language models' weights in size; for bytes a few binades."""
    if name == "mxfp4":
        return torch.randint(117, 124, shape, device=device).to(torch.uint8)
    if name == "nvfp4":
        return torch.randint(0x20, 0x60, shape, device=device).to(torch.uint8)  # 0.125 to 30
    usual = {"int8": 0.001, "fp8_e4m3": 0.0005}.get(name, 0.05)
    return torch.rand(shape, device=device).add_(0.5).mul_(usual).to(dtype)


def make_weight(name, n, k, group_size, zeros="none", dtype=torch.float16, device="cpu") -> Weight:
    shape = (1 if group_size == -1 else -(-k // group_size), n)
    codes, scales = random_codes(name, (n, k), device), random_scales(name, shape, dtype, device)
    if zeros != "none":
        zeros = make_zeros(zeros, shape, dtype, device) * 8 + 60  # about the middle of 8 bits
    else:
        zeros = None
    alpha = 0.0123 if name == "nvfp4" else 1.0
    return Weight(name, codes, scales, zeros, group_size, dtype, alpha, pack(name, codes))


def expected(a, weight, *, perm=None, c=None, bias=None, activation="none") -> Expected:
    """What the GEMM should give for a matrix A: float64 on the 16-bit weights, beside torch's error on the same weights."""
    gathered = a if perm is None else a[:, perm.long()]
    beta = 0.0 if c is None else 1.0
    result = gemm_expected(gathered, weight.dense().t(), c=c, alpha=weight.alpha, beta=beta, bias=bias, activation=activation)
    result.magnitude *= slack(a.dtype)
    result.least_unit = torch.finfo(a.dtype).eps / 2
    return result


def mismatch(out, a, weight, **arguments) -> str | None:
    """Why ``out`` is not the GEMM of these arguments, or None."""
    return expected(a, weight, **arguments).mismatch(out)


def gated_mismatch(out, a, weight, *, bias=None, activation="silu") -> str | None:
    """Why ``out`` is not the gated GEMM of these arguments, or None."""
    return gated_expected(a, weight.dense().t(), bias=bias, alpha=weight.alpha, activation=activation).mismatch(out)


def good_call(name, op, device):
    """Keywords of a call that is right: A [3, 64] and W [16, 64] of zeros."""

    def t(*shape, dtype=torch.float16):
        return torch.zeros(shape, dtype=dtype, device=device)

    group_size = GROUPS.get(name, (32,))[0]
    scales = t(64 // group_size, 16, dtype=torch.uint8 if name in ("mxfp4", "nvfp4") else torch.float16)
    call = {"qweight": t(1, 1, 128 * BITS[name], dtype=torch.int32), "scales": scales, "group_size": group_size}
    call[f"w{BITS[name]}_format"] = name
    return call | ({"n": 16, "k": 64} if op == "dequantize" else {"a": t(3, 64)}), t


# id: (format, operators, arguments given a maker of tensors, how the message goes on)
GEMMS, ALL = ("gemm", "gemm_gated"), ("gemm", "gemm_gated", "dequantize")
BAD = {
    "mxfp4 group_size": ("mxfp4", ALL, lambda t: {"group_size": 64}, "group_size must be 32 for mxfp4, got 64"),
    "mxfp4 one group": ("mxfp4", ALL, lambda t: {"group_size": -1}, "group_size must be 32 for mxfp4, got -1"),
    "nvfp4 group_size": ("nvfp4", ALL, lambda t: {"group_size": 32}, "group_size must be 16 for nvfp4, got 32"),
    "nf4 group_size": ("nf4", ALL, lambda t: {"group_size": 16}, "group_size must be -1 or a power of two >= 32, got 16"),
    "int8 group_size": ("int8", ALL, lambda t: {"group_size": 48}, "group_size must be -1 or a power of two >= 32, got 48"),
    "nf4 zeros": ("nf4", ALL, lambda t: {"zeros": t(2, 16)}, r"zeros must be None for nf4, got \[2, 16\]"),
    "mxfp4 zeros": ("mxfp4", ALL, lambda t: {"zeros": t(2, 16)}, r"zeros must be None for mxfp4, got \[2, 16\]"),
    "nvfp4 zeros": ("nvfp4", ALL, lambda t: {"zeros": t(4, 16)}, r"zeros must be None for nvfp4, got \[4, 16\]"),
    "fp8 zeros": ("fp8_e4m3", ALL, lambda t: {"zeros": t(2, 16)}, r"zeros must be None for fp8_e4m3, got \[2, 16\]"),
    "int8 zeros": ("int8", ALL, lambda t: {"zeros": t(2, 8)}, r"zeros must be .* = \[2, 16\], got \[2, 8\]"),
    "mxfp4 scales": ("mxfp4", ALL, lambda t: {"scales": t(2, 16)}, "scales must be uint8 or float8_e8m0fnu for mxfp4, got float16"),
    "nvfp4 scales": ("nvfp4", ALL, lambda t: {"scales": t(4, 16)}, "scales must be uint8 or float8_e4m3fn for nvfp4, got float16"),
    "nvfp4 rows": ("nvfp4", ALL, lambda t: {"scales": t(2, 16, dtype=torch.uint8)}, r"scales must be .* = \[4, 16\].*, got \[2, 16\]"),
    "nf4 scales": ("nf4", GEMMS, lambda t: {"scales": t(2, 16, dtype=torch.uint8)}, "scales must have a's dtype float16, got uint8"),
    "fp8 scales": (
        "fp8_e4m3",
        GEMMS,
        lambda t: {"scales": t(2, 16, dtype=torch.bfloat16)},
        "scales must have a's dtype float16, got bfloat16",
    ),
    "int8 scales": ("int8", ("dequantize",), lambda t: {"scales": t(2, 16).float()}, "scales must be float16 or bfloat16, got float32"),
    "alpha infinite": ("nvfp4", ALL, lambda t: {"alpha": float("inf")}, "alpha must be finite.*, got inf"),
    "alpha NaN": ("int8", ALL, lambda t: {"alpha": float("nan")}, "alpha must be finite.*, got nan"),
    "int8 as w4": ("nf4", ALL, lambda t: {"w4_format": "int8"}, "w4_format must be one of int4, nf4, mxfp4, nvfp4, got 'int8'"),
    "int4 as w8": ("int8", ALL, lambda t: {"w8_format": "int4"}, "w8_format must be one of int8, fp8_e4m3, got 'int4'"),
    "4-bit qweight": (
        "int8",
        ALL,
        lambda t: {"qweight": t(1, 1, 512, dtype=torch.int32)},
        r"qweight must be \[ceil\(n / 64\), ceil\(k / 64\), 1024\] = \[1, 1, 1024\].*, got \[1, 1, 512\]",
    ),
    "8-bit qweight": ("nf4", ALL, lambda t: {"qweight": t(1, 1, 1024, dtype=torch.int32)}, r"qweight must be .*, got \[1, 1, 1024\]"),
    "w8 k": ("int8", GEMMS, lambda t: {"a": t(3, 60)}, "k must be a multiple of 8, got 60"),
    "w8 n": ("int8", ALL, lambda t: {"scales": t(2, 12), "n": 12}, r"scales must have n = 12 columns, a multiple of 8, got \[2, 12\]"),
    "w8 rows of a gate": ("int8", ("gemm_gated",), lambda t: {"scales": t(2, 24)}, r"(scales|qweight) must "),
    "w8 perm": ("int8", GEMMS, lambda t: {"perm": t(63, dtype=torch.int32)}, r"perm must be \[k\] = \[64\], got \[63\]"),
    "w8 bias": ("int8", GEMMS, lambda t: {"bias": t(8)}, r"bias must be \[n\] = \[16\], got \[8\]"),
    "w8 activation": (
        "int8",
        GEMMS,
        lambda t: {"activation": "swish"},
        "activation must be one of none, relu, gelu, gelu_tanh, silu, relu2,",
    ),
    "w8 kernel": ("int8", GEMMS, lambda t: {"kernel": "w8a16_nothing"}, "kernel 'w8a16_nothing' is not in the registry"),
    "w8 c": ("int8", ("gemm",), lambda t: {"c": t(4, 16)}, r"c must broadcast to \[3, 16\], got c \[4, 16\]"),
    "w8 out": ("int8", ("gemm",), lambda t: {"out": t(3, 8)}, r"out must be \[3, 16\], got \[3, 8\]"),
    "out_dtype": ("mxfp4", ("dequantize",), lambda t: {"out_dtype": torch.float32}, "out_dtype must be float16 or bfloat16, got float32"),
    "out_dtype of 16-bit scales": (
        "nf4",
        ("dequantize",),
        lambda t: {"out_dtype": torch.bfloat16},
        "out_dtype must be the dtype of scales, float16, got bfloat16",
    ),
}
BAD_CALLS = [(case, op) for case, (_, ops, _, _) in BAD.items() for op in ops]
BAD_PACK8 = {
    "dtype": (lambda t: t(16, 64, dtype=torch.int32), "codes must be uint8, got int32"),
    "rank": (lambda t: t(16, dtype=torch.uint8), r"codes must be \[n, k\], got \[16\]"),
    "n": (lambda t: t(12, 64, dtype=torch.int8), r"codes must be \[n, k\] in multiples of 8, got \[12, 64\]"),
}


def bad_call(case, op, device):
    """The operator, its name in messages, keywords and message of a case of BAD."""
    name, _, arguments, message = BAD[case]
    call, t = good_call(name, op, device)
    changes = arguments(t)
    if op != "dequantize":
        changes.pop("n", None)
    return getattr(minfer, f"w{BITS[name]}a16_{op}"), f"minfer::w{BITS[name]}a16_{op}: ", call | changes, message
