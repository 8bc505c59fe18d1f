"""What the tests of the GEMMs of 8-bit operands share: operands, scales of every kind, the truth in float64 and its bound."""

from __future__ import annotations

import minfer
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
DTYPES = {"fp8": FP8, "int8": torch.int8}
BLOCK = 128
KINDS = ("one", "lines", "lines_1", "blocks", "exponents")
# (m, n, k): few and many tokens, tails in every mode, partial blocks, shards of checkpoints.
SHAPES = (
    (1, 64, 128),
    (3, 192, 512),
    (8, 576, 7168),
    (17, 1000, 272),
    (64, 4096, 1024),
    (100, 24, 2000),
    (129, 264, 384),
    (500, 520, 1040),
    (1025, 1152, 640),
)


def has_kernels(device: str) -> bool:
    """Whether the operators run there: on a CPU they do, on a GPU kernels are for compute capability 9.0."""
    return device != "cuda" or torch.cuda.get_device_capability() == (9, 0)


def blocks_of(extent: int) -> int:
    return (extent + BLOCK - 1) // BLOCK


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: str = "cpu", size: float = 16.0) -> tuple[Tensor, Tensor]:
    """A [m, k] and a weight [n, k]."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, (m, k), device=device).to(dtype), torch.randint(-128, 128, (n, k), device=device).to(dtype)
    return (torch.randn(m, k, device=device) * size).to(dtype), (torch.randn(n, k, device=device) * size).to(dtype)


def scale_of(kind: str, lines: int, k: int, *, weight: bool, device: str = "cpu", size: float = 0.05) -> Tensor:
    """A scale of A's rows or of a weight's."""
    rows = blocks_of(lines) if weight else lines
    shape = {"one": (1,), "lines": (lines,), "lines_1": (lines, 1)}.get(kind, (rows, blocks_of(k)))
    if kind == "exponents" and rows * blocks_of(k) > 1 and not (blocks_of(k) == 1 and rows == lines):
        return torch.randint(120, 126, shape, device=device).to(torch.uint8)
    return (0.5 + torch.rand(shape, device=device)) * size


def numbers(scale: Tensor, lines: int, k: int, *, weight: bool) -> Tensor:
    """The scale of each element, [lines, k] in float64."""
    scale = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(lines, k)
    if scale.dim() == 1 or (scale.shape[1] == 1 and scale.shape[0] == lines):
        return scale.reshape(lines, 1).expand(lines, k)
    by_k = scale.repeat_interleave(BLOCK, 1)[:, :k]
    return by_k.repeat_interleave(BLOCK, 0)[:lines] if weight else by_k


def truth(a: Tensor, weight: Tensor, a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sum of its terms' magnitudes."""
    x = a.double() * numbers(a_scale, *a.shape, weight=False)
    w = weight.double() * numbers(b_scale, *weight.shape, weight=True)
    return x @ w.t(), x.abs() @ w.abs().t()


def relative_bound(dtype: torch.dtype, k: int, *, fast: bool = False) -> float:
    """Of a sum, relative to the sum of magnitudes. The tensor core aligns 32 products of e4m3 with their sum so far, and keeps 13 bits
    behind the first of the largest: that is an error of each addition, of 4 in 128 of k where sums are promoted."""
    if dtype == torch.int8:
        return 2.0**-22
    additions = k / 32 if fast else 4
    return additions * 2.0**-13 + k / 128 * 2.0**-24 + 2.0**-22


def call(dtype: torch.dtype, gated: bool = False):
    return getattr(minfer, f"gemm_{'int8' if dtype == torch.int8 else 'fp8'}{'_gated' if gated else ''}")
