"""Weights of every format and their truth, which the tests of 4-bit and 8-bit weights beyond int4 share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import minfer
import torch
from gemm_cases import Expected, gemm_expected
from minfer import weight_formats
from w4a16_cases import gated_expected, make_zeros, slack

NEW = ("nf4", "mxfp4", "nvfp4", "int8", "fp8_e4m3")
BITS = {"int4": 4, "nf4": 4, "mxfp4": 4, "nvfp4": 4, "int8": 8, "fp8_e4m3": 8}
GROUPS = {"nf4": (32, 64, 128, -1), "mxfp4": (32,), "nvfp4": (16,), "int8": (32, 128, -1), "fp8_e4m3": (32, 128, -1)}
ZEROS = {"int8": ("none", "integer", "fractional")}  # the others: none
CASES = [(name, group_size) for name in NEW for group_size in GROUPS[name]]


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float64 of float8_e4m3fn bits: bias 7, subnormals, 0x7f and 0xff are NaN."""
    codes = codes.long()
    exponent, mantissa = codes >> 3 & 15, (codes & 7).double()
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10).double())
    value = torch.where(codes & 127 == 127, torch.nan, value)
    return torch.where(codes >= 128, -value, value)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float64 of FP4 bits: bias 1, one bit of mantissa."""
    codes = codes.long()
    exponent, mantissa = codes >> 1 & 3, (codes & 1).double()
    value = torch.where(exponent == 0, mantissa / 2, (2 + mantissa) * 2.0 ** (exponent - 2).double())
    return torch.where(codes >= 8, -value, value)


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """float64 of a shared exponent: bias 127, 255 is NaN."""
    return torch.where(codes == 255, torch.nan, 2.0 ** (codes.double() - 127))


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
    return minfer.w4a16_pack(codes) if BITS[name] == 4 else minfer.w8a16_pack(codes)


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
    return result


def mismatch(out, a, weight, **arguments) -> str | None:
    """Why ``out`` is not the GEMM of these arguments, or None."""
    return expected(a, weight, **arguments).mismatch(out)


def gated_mismatch(out, a, weight, *, bias=None, activation="silu") -> str | None:
    """Why ``out`` is not the gated GEMM of these arguments, or None."""
    return gated_expected(a, weight.dense().t(), bias=bias, alpha=weight.alpha, activation=activation).mismatch(out)
