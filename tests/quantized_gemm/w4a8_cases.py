"""What the tests of the GEMM with int4 weights and activations of 8 bits share: operands, the truth in float64 and its bound."""

from __future__ import annotations

import minfer
import torch
from torch import Tensor

from tests.scaled_gemm.cases import DTYPES, FP8, relative_bound

__all__ = ["DTYPES", "FP8", "SHAPES", "Weight", "activations", "relative_bound", "truth", "weight"]

# (m, n, k): few and many tokens, tails in every mode, a last group that is not whole, k of an odd number of blocks of 64.
SHAPES = (
    (1, 64, 128),
    (3, 192, 512),
    (17, 1000, 272),
    (64, 4096, 1024),
    (100, 24, 2000),
    (129, 264, 448),
    (500, 520, 1040),
    (1025, 1152, 640),
)


class Weight:
    """codes uint8 [n, k], scales [groups, n], and the packed codes."""

    def __init__(self, n: int, k: int, group_size: int, dtype: torch.dtype, device: str):
        groups = 1 if group_size == -1 else -(-k // group_size)
        self.codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        self.scales = ((0.5 + torch.rand(groups, n, device=device)) * 0.02).to(dtype)
        self.packed, self.group_size = minfer.w4a16_pack(self.codes), group_size

    def arguments(self) -> tuple[Tensor, Tensor]:
        return self.packed, self.scales

    def values(self) -> Tensor:
        """[n, k] in float64."""
        k = self.codes.shape[1]
        columns = k if self.group_size == -1 else self.group_size
        return (self.codes.double() - 8) * self.scales.double().t().repeat_interleave(columns, 1)[:, :k]


def weight(n: int, k: int, group_size: int = 128, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Weight:
    return Weight(n, k, group_size, dtype, device)


def activations(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A [m, k] and its scales [m, 1]."""
    if dtype == torch.int8:
        a = torch.randint(-128, 128, (m, k), device=device).to(dtype)
    else:
        a = (torch.randn(m, k, device=device) * 16).to(dtype)
    return a, (0.5 + torch.rand(m, 1, device=device)) * 0.02


def truth(a: Tensor, a_scale: Tensor, w: Weight) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sum of its terms' magnitudes."""
    x, values = a.double() * a_scale.double(), w.values()
    return x @ values.t(), x.abs() @ values.abs().t()
