"""Calls of a norm and the GEMM behind it, with their truth and bounds; calls that cannot be right."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import minfer
import torch
from torch import Tensor

from tests.contracts import numerics_cases as numerics

DTYPES = (torch.float16, torch.bfloat16)
EPS = 1e-5
FORMATS = {"int4": 4, "nf4": 4, "mxfp4": 4, "nvfp4": 4, "int8": 8, "fp8_e4m3": 8}


@dataclass
class Case:
    """A call of rms_norm_gemm or rms_norm_gemm_gated with dense operands. ``pad``: elements between rows of x and of the residual."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    gated: bool = False
    residual: bool = True
    weighted: bool = True
    bias: torch.dtype | None = None
    activation: str = "none"
    weight_offset: float = 0.0
    scale: float = 1.0
    pad: int = 0

    def make(self, device: str = "cpu") -> dict[str, Tensor | None]:
        """Operands of numbers of any size; rows of x of different magnitudes. W is [n, k]."""

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=device) * scale

        rows = randn(self.m, self.k, scale=self.scale) * torch.exp2(-torch.arange(self.m, device=device) % 5.0)[:, None]
        padded = [torch.full((self.m, self.k + self.pad), math.nan, dtype=self.dtype, device=device) for _ in range(2)]
        x, residual = (whole[:, : self.k] for whole in padded)
        x.copy_(rows)
        residual.copy_(randn(self.m, self.k))
        return {
            "x": x,
            "residual": residual if self.residual else None,
            "norm_weight": (1 + randn(self.k, scale=0.3)).to(self.dtype) if self.weighted else None,
            "w": randn(self.n, self.k, scale=1.5 / math.sqrt(max(self.k, 1))).to(self.dtype),
            "bias": randn(self.n).to(self.bias) if self.bias is not None else None,
        }

    @property
    def operator(self):
        return minfer.rms_norm_gemm_gated if self.gated else minfer.rms_norm_gemm

    def options(self) -> dict[str, Any]:
        return dict(eps=EPS, weight_offset=self.weight_offset, activation=self.activation)

    def call(self, t: dict[str, Tensor | None], **more: Any) -> Tensor:
        return self.operator(t["x"], t["norm_weight"], t["w"].t(), residual=t["residual"], bias=t["bias"], **self.options(), **more)

    def check(self, have: Tensor, t: dict[str, Tensor | None], before: Tensor | None, what: str = "") -> None:
        """``before``: the residual as it was. Every element of D within its bound, and the residual exactly the rounded sum."""
        what = f"{what} {self}"
        assert have.dtype == self.dtype and have.is_contiguous() and have.shape == (self.m, self.n // 2 if self.gated else self.n), what
        if self.residual:
            want = numerics.rounded(t["x"].double() + before.double(), self.dtype).to(self.dtype)
            assert torch.equal(t["residual"], want), f"{what}: residual"
        bound = numerics.norm_gemm_bound(
            *(t["x"], t["w"], t["norm_weight"]), **self.options(), residual=before, gated=self.gated, bias=t["bias"]
        )
        numerics.judge(have, *bound, what)

    def change(self, **fields: Any) -> Case:
        return replace(self, **fields)


def run(case: Case, device: str, **more: Any) -> tuple[Tensor, Tensor | None]:
    """Calls and checks; D and the residual."""
    t = case.make(device)
    before = None if t["residual"] is None else t["residual"].clone()
    have = case.call(t, **more)
    case.check(have, t, before, str(more.get("kernel", "")))
    return have, t["residual"]


# ---- quantised weights ---------------------------------------------------------------------------------------------------------------


def quantized(bits: int, gated: bool):
    return getattr(minfer, f"rms_norm_w{bits}a16_gemm" + ("_gated" if gated else ""))


# ---- calls that cannot be right ------------------------------------------------------------------------------------------------------


def good(op: str, device: str) -> dict[str, Any]:
    """Keywords of a call that is right, of m = 3, n = 32, k = 64."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    common = {"x": zeros(3, 64), "norm_weight": zeros(64)}
    if "a16" not in op:
        return common | {"b": zeros(64, 32)}
    words = 512 if "w4a16" in op else 1024
    options = {"group_size": 32} if "w4a16" in op else {}
    return common | {"qweight": zeros(1, 1, words, dtype=torch.int32), "scales": zeros(2 if options else 1, 32)} | options


OPERATORS = tuple(f"rms_norm_{kind}gemm{gated}" for kind in ("", "w4a16_", "w8a16_") for gated in ("", "_gated"))


def bad(op: str, device: str) -> list[tuple[dict[str, Any], str]]:
    """(Changes of the good call, message): shared by all, then the family's own."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    found = [
        (dict(x=zeros(3, 64, dtype=torch.float32)), "x must be float16 or bfloat16, got "),
        (dict(x=torch.tensor(1.0, device=device).half()), r"x must have at least one mode, got \[\]"),
        (dict(norm_weight=zeros(63)), r"norm_weight must be \[64\], got \[63\]"),
        (dict(norm_weight=zeros(64, dtype=torch.float32)), "norm_weight must be "),
        (dict(eps=-1.0), "eps must be finite in float32 and not negative, got -1"),
        (dict(weight_offset=math.inf), "weight_offset must be finite in float32, got inf"),
        (dict(residual=zeros(3, 63)), r"residual must be \[3, 64\], got \[3, 63\]"),
        (dict(residual=zeros(3, 64, dtype=torch.bfloat16)), "residual must be "),
        (dict(residual=zeros(1, 64).expand(3, 64)), "residual must not overlap itself"),
        (dict(bias=zeros(31)), r"bias must be \[n\] = \[32\], got \[31\]"),
        (dict(activation="swish"), "activation must be one of .*, got 'swish'"),
        (dict(kernel="nothing"), "kernel "),
    ]
    memory = zeros(4, 64)
    found.append((dict(x=memory[:3], residual=memory[:3]), "residual must not overlap x"))
    found.append((dict(residual=memory[:3], norm_weight=memory[1]), "residual must not overlap norm_weight"))
    if "a16" not in op:
        found += [
            (dict(b=zeros(64)), r"b must be \[k, n\], got b \[64\]"),
            (dict(b=zeros(64, 32, dtype=torch.bfloat16)), "b must have x's dtype "),
            (dict(b=zeros(63, 32)), r"b must have k = 64 rows to match x \[3, 64\], got b \[63, 32\]"),
            (dict(x=zeros(64, 64), residual=memory.new_zeros(64, 64), kernel="gemm_nothing@splits=2"), "kernel"),
            (dict(kernel="one_launch@threads=2"), "kernel"),
        ]
        whole = zeros(64, 64)
        found.append((dict(x=zeros(64, 64), residual=whole, b=whole[:, :32]), "residual must not overlap b"))
        if op.endswith("_gated"):
            found.append((dict(b=zeros(64, 24)), r"b must have a multiple of 16 columns .*, got b \[64, 24\]"))
    else:
        name = "w4_format" if "w4a16" in op else "w8_format"
        found += [
            (dict(scales=zeros(32)), r"scales must be \[.*, n\], got \[32\]"),
            (dict(scales=zeros(2 if "w4" in op else 1, 32, dtype=torch.bfloat16)), "scales must have x's dtype "),
            (dict(group_size=48), "group_size must be "),
            (dict(alpha=math.nan), "alpha must be finite in float32, got nan"),
            (dict(perm=zeros(63, dtype=torch.int32)), r"perm must be \[k\] = \[64\], got \[63\]"),
            (dict([(name, "int3")]), f"{name} must be one of "),
            (dict(kernel="one_launch"), "kernel"),
        ]
        if op.endswith("_gated"):
            words = 512 if "w4a16" in op else 1024
            change = dict(scales=zeros(2 if "w4" in op else 1, 24), qweight=zeros(1, 1, words, dtype=torch.int32))
            found.append((change, "scales must have a multiple of 16 columns"))
    return found
