"""Weights, truth and bad arguments that the W4A16 tests share."""

from __future__ import annotations

from dataclasses import dataclass

import minfer
import torch
import torch.nn.functional as F
from minfer import reference

from tests.gemm.cases import Expected, gated_magnitude, gemm_expected

ACTIVATION = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: torch.relu(x).square(),
}
ZEROS = ("none", "integer", "fractional")
GROUPS = (32, 64, 128, -1)


@dataclass
class Weight:
    """Codes and what they stand for, kept beside the packed form."""

    codes: torch.Tensor  # uint8 [n, k]
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    qweight: torch.Tensor

    @property
    def packed(self):
        """The arguments of the operators that the weight fills, positional and keywords."""
        return (self.qweight, self.scales, self.zeros), {"group_size": self.group_size}

    def dense(self) -> torch.Tensor:
        """[n, k]: the formula, column by column, rounded once to 16 bits."""
        k = self.codes.shape[1]
        group = torch.arange(k, device=self.codes.device) // (k if self.group_size == -1 else self.group_size)
        zero = 8.0 if self.zeros is None else self.zeros.float()[group].t()
        return ((self.codes.float() - zero) * self.scales.float()[group].t()).to(self.scales.dtype)


def make_zeros(kind, shape, dtype, device="cpu"):
    if kind == "none":
        return None
    if kind == "integer":
        return torch.randint(0, 16, shape, device=device).to(dtype)
    return torch.randn(shape, device=device).mul_(2).add_(7.5).clamp_(0, 15).to(dtype)


def make_weight(n, k, group_size=128, zeros="none", dtype=torch.float16, device="cpu") -> Weight:
    rows = 1 if group_size == -1 else -(-k // group_size)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scales = torch.rand(rows, n, device=device).add_(0.5).mul_(0.02).to(dtype)
    return Weight(codes, scales, make_zeros(zeros, (rows, n), dtype, device), group_size, minfer.w4a16_pack(codes))


def slack(dtype):
    """Kernels may leave weights unrounded: what that moves one element by, beside Expected's allowance of 2^-12 of the magnitude.

    A rounded weight is off by less than half its unit on average; 5 units of a typical product are some ten standard deviations where
    roundings are independent. With one group for all of k a row of the weight has only 16 different numbers, whose roundings repeat:
    hence 8 units.
    """
    return 1 + 8 * torch.finfo(dtype).eps / 2 * 2.0**12


def w4a16_expected(a, weight, *, perm=None, c=None, bias=None, activation="none") -> Expected:
    """What minfer::w4a16_gemm should give for a matrix A: float64 on the 16-bit weights, beside torch's error on the same weights."""
    gathered = a if perm is None else a[:, perm.long()]
    expected = gemm_expected(gathered, weight.dense().t(), c=c, beta=0.0 if c is None else 1.0, bias=bias, activation=activation)
    expected.magnitude *= slack(a.dtype)
    expected.least_unit = torch.finfo(a.dtype).eps / 2
    return expected


def w4a16_mismatch(out, a, weight, **arguments) -> str | None:
    """Why ``out`` is not the minfer::w4a16_gemm of these arguments, or None."""
    return w4a16_expected(a, weight, **arguments).mismatch(out)


def gated_expected(a, w, *, bias=None, alpha=1.0, activation="silu") -> Expected:
    """What a gated GEMM should give for a matrix A and a 16-bit W^T; torch takes three 16-bit steps."""

    def peer(dtype):
        gate, up = minfer.unpack_gate_up(reference.gemm(a, w, bias=bias, alpha=alpha).t())
        return (ACTIVATION[activation](gate) * up).t()

    arguments = {"bias": bias, "alpha": alpha, "activation": activation}
    truth = reference.gemm_gated(a.double(), w.double(), **arguments)
    return Expected(truth, peer, gated_magnitude(a, w, **arguments) * slack(a.dtype))


def w4a16_gated_mismatch(out, a, weight, *, bias=None, activation="silu") -> str | None:
    """Why ``out`` is not the minfer::w4a16_gemm_gated of these arguments, or None."""
    return gated_expected(a, weight.dense().t(), bias=bias, activation=activation).mismatch(out)


# name: (arguments beside a [3, 64], W [16, 64] in groups of 32, given a maker of tensors; how the message goes on)
BAD_GEMM = {
    "a rank": (lambda t: {"a": t()}, r"a must be \[\.\.\., k\], got a \[\]"),
    "a dtype": (lambda t: {"a": t(3, 64, dtype=torch.float32)}, "a must be float16 or bfloat16, got float32"),
    "k": (lambda t: {"a": t(3, 60)}, "k must be a multiple of 8, got 60"),
    "n": (lambda t: {"scales": t(2, 12)}, r"scales must have n = 12 columns, a multiple of 8, got \[2, 12\]"),
    "scales dtype": (lambda t: {"scales": t(2, 16, dtype=torch.bfloat16)}, "scales must have a's dtype float16, got bfloat16"),
    "scales rank": (lambda t: {"scales": t(16)}, r"scales must be \[ceil\(k / group_size\), n\], got \[16\]"),
    "scales rows": (lambda t: {"scales": t(3, 16)}, r"scales must be \[ceil\(k / group_size\), n\] = \[2, 16\], got \[3, 16\]"),
    "scales of another group size": (lambda t: {"group_size": 64}, r"scales must be .* = \[1, 16\], got \[2, 16\]"),
    "scales of one group": (lambda t: {"group_size": -1}, r"scales must be .* = \[1, 16\], got \[2, 16\]"),
    "zeros dtype": (lambda t: {"zeros": t(2, 16, dtype=torch.int32)}, "zeros must have the dtype of scales, float16, got int32"),
    "zeros shape": (lambda t: {"zeros": t(16, 2)}, r"zeros must be .* = \[2, 16\], got \[16, 2\]"),
    "qweight dtype": (lambda t: {"qweight": t(1, 1, 512, dtype=torch.uint8)}, "qweight must be int32, got uint8"),
    "qweight rank": (lambda t: {"qweight": t(1, 512, dtype=torch.int32)}, r"qweight must be .* = \[1, 1, 512\], got \[1, 512\]"),
    "qweight shape": (
        lambda t: {"qweight": t(2, 1, 512, dtype=torch.int32)},
        r"qweight must be \[ceil\(n / 64\), ceil\(k / 64\), 512\] = \[1, 1, 512\], got \[2, 1, 512\]",
    ),
    "group_size 16": (lambda t: {"group_size": 16}, "group_size must be -1 or a power of two >= 32, got 16"),
    "group_size 96": (lambda t: {"group_size": 96}, "group_size must be -1 or a power of two >= 32, got 96"),
    "group_size 0": (lambda t: {"group_size": 0}, "group_size must be -1 or a power of two >= 32, got 0"),
    "perm dtype": (lambda t: {"perm": t(64, dtype=torch.int64)}, "perm must be int32, got int64"),
    "perm shape": (lambda t: {"perm": t(63, dtype=torch.int32)}, r"perm must be \[k\] = \[64\], got \[63\]"),
    "bias shape": (lambda t: {"bias": t(8)}, r"bias must be \[n\] = \[16\], got \[8\]"),
    "bias dtype": (lambda t: {"bias": t(16, dtype=torch.float64)}, "bias must be float16 or float32, got float64"),
    "activation": (lambda t: {"activation": "swish"}, "activation must be one of none, relu, gelu, gelu_tanh, silu, relu2, got 'swish'"),
    "w4_format": (lambda t: {"w4_format": "int5"}, "w4_format must be one of int4, nf4, mxfp4, nvfp4, got 'int5'"),
    "kernel": (lambda t: {"kernel": "w4a16_nothing"}, "kernel 'w4a16_nothing' is not in the registry"),
}
# Of these the gated operator has no arguments.
BAD_GEMM_ONLY = {
    "c shape": (lambda t: {"c": t(4, 16)}, r"c must broadcast to \[3, 16\], got c \[4, 16\]"),
    "c dtype": (lambda t: {"c": t(3, 16, dtype=torch.bfloat16)}, "c must be float16 or float32, got bfloat16"),
    "out shape": (lambda t: {"out": t(3, 8)}, r"out must be \[3, 16\], got \[3, 8\]"),
    "out dtype": (lambda t: {"out": t(3, 16, dtype=torch.float64)}, "out must be float16, got float64"),
    "out not out_dtype": (lambda t: {"out": t(3, 16), "out_dtype": torch.float32}, "out must be float32, got float16"),
    "out_dtype": (lambda t: {"out_dtype": torch.float64}, "out_dtype must be float16 or float32, got float64"),
    "out_dtype other": (lambda t: {"out_dtype": torch.bfloat16}, "out_dtype must be float16 or float32, got bfloat16"),
    "out_dtype of codes": (
        lambda t: {"out_dtype": torch.float32, "quant": "fp8_tensor", "scale": t(1, dtype=torch.float32)},
        "out_dtype must be float8_e4m3fn for fp8_tensor, got float32",
    ),
}
BAD_DEQUANTIZE = {
    "n": (lambda t: {"n": 12, "scales": t(2, 12)}, r"scales must have n = 12 columns, a multiple of 8, got \[2, 12\]"),
    "n negative": (lambda t: {"n": -8}, "n and k must not be negative, got -8 and 64"),
    "n of another weight": (lambda t: {"n": 72}, r"scales must be .*, got \[2, 16\]"),
    "k": (lambda t: {"k": 60}, "k must be a multiple of 8, got 60"),
    "scales dtype": (lambda t: {"scales": t(2, 16, dtype=torch.float32)}, "scales must be float16 or bfloat16, got float32"),
    "scales shape": (lambda t: {"scales": t(2, 24)}, r"scales must be .* = \[2, 16\], got \[2, 24\]"),
    "zeros shape": (lambda t: {"zeros": t(16)}, r"zeros must be .* = \[2, 16\], got \[16\]"),
    "qweight shape": (lambda t: {"qweight": t(1, 2, 512, dtype=torch.int32)}, r"qweight must be .* = \[1, 1, 512\].*, got \[1, 2, 512\]"),
    "group_size": (lambda t: {"group_size": 48}, "group_size must be -1 or a power of two >= 32, got 48"),
    "w4_format": (lambda t: {"w4_format": ""}, "w4_format must be one of int4, nf4, mxfp4, nvfp4, got ''"),
}
BAD_PACK = {
    "dtype": (lambda t: t(16, 64, dtype=torch.int32), "codes must be uint8, got int32"),
    "rank": (lambda t: t(2, 16, 64, dtype=torch.uint8), r"codes must be \[n, k\], got \[2, 16, 64\]"),
    "n": (lambda t: t(12, 64, dtype=torch.uint8), r"codes must be \[n, k\] in multiples of 8, got \[12, 64\]"),
    "k": (lambda t: t(16, 60, dtype=torch.uint8), r"codes must be \[n, k\] in multiples of 8, got \[16, 60\]"),
}
BAD_PACK_FORMATS = ("int5", "int8", "fp8_e4m3", "")


def bad_call(arguments, device):
    """The keywords of a call of ``w4a16_gemm`` or its gated form, with a case of BAD_GEMM in it."""

    def t(*shape, dtype=torch.float16):
        return torch.zeros(shape, dtype=dtype, device=device)

    good = {"a": t(3, 64), "qweight": t(1, 1, 512, dtype=torch.int32), "scales": t(2, 16), "group_size": 32}
    return good | arguments(t)
