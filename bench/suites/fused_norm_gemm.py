"""A norm and the product behind it as one operator, with dense and with 4-bit weights: as the plan chooses, against the two operators, each
number of launches by name, torch and torch.compile. All add a residual first, which is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.suites.fused_call import Call, deviation

TOKENS = (1, 2, 4, 8, 16, 64)
# k, n, gated: qkv, out and gate-up of Llama-3.1-8B, out and gate-up of Qwen2.5-7B, qkv of Llama-3.1-70B.
SHAPES = (
    (4096, 6144, False),
    (4096, 4096, False),
    (4096, 28672, True),
    (3584, 3584, False),
    (3584, 18944, False),
    (8192, 10240, False),
)
ORIGIN_SHAPES, ORIGIN_TOKENS = ((3584, 3584), (3584, 18944)), (1, 8, 64, 256, 1024, 2048)
GROUP = 128
EPS = 1e-6


class Rows:
    """x, residuals and the norm's weight of each set of operands."""

    def __init__(self, rows: int, k: int, dtype: torch.dtype, device: str, sets: int):
        self.xs, self.residuals = ([torch.randn(rows, k, device=device).to(dtype) for _ in range(sets)] for _ in range(2))
        self.weight = (1 + 0.1 * torch.randn(k, device=device)).to(dtype)

    def normed(self) -> Tensor:
        """Of the first set, float64 from the rounded sum on, rounded where minfer rounds."""
        total = (self.xs[0].double() + self.residuals[0].double()).to(self.xs[0].dtype).double()
        y = total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight.double()
        return y.to(self.xs[0].dtype).double()


def _finished(y: Tensor, gated: bool) -> Tensor:
    """Of a product whose columns are blocks of 8 gates and 8 ups where gated."""
    if not gated:
        return y
    blocks = y.unflatten(-1, (-1, 2, 8))
    return (F.silu(blocks[..., 0, :]) * blocks[..., 1, :]).flatten(-2)


def _sets(moved: float, device: str) -> int:
    return harness.sets_for(int(moved)) if device == "cuda" else 1


def dense(k: int, n: int, gated: bool) -> Callable[..., Call]:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        moved = 2.0 * (n * k + 3 * rows * k + rows * n / (2 if gated else 1))
        sets = _sets(moved, device)
        data = Rows(rows, k, dtype, device, sets)
        weights = [(torch.randn(n, k, device=device) / k**0.5).to(dtype) for _ in range(sets)]
        fused = minfer.rms_norm_gemm_gated if gated else minfer.rms_norm_gemm
        product = minfer.gemm_gated if gated else minfer.gemm

        def ours(i: int, residual: Tensor | None = None, **options: Any) -> Tensor:
            own = data.residuals[i] if residual is None else residual
            return fused(data.xs[i], data.weight, weights[i].t(), EPS, residual=own, **options)

        def separate(i: int) -> Tensor:
            return product(minfer.add_rms_norm(data.xs[i], data.residuals[i], data.weight, EPS), weights[i].t())

        def of_torch(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
            residual += x
            y = F.rms_norm(residual, (k,), data.weight, EPS) @ weight.t()
            if not gated:
                return y
            gate, up = y.chunk(2, -1)  # torch has the rows of gates first, which is as many bytes
            return F.silu(gate) * up

        compiled = torch.compile(of_torch, dynamic=False)

        def error() -> float:
            want = _finished(data.normed() @ weights[0].double().t(), gated)
            return deviation(ours(0, data.residuals[0].clone()), want)

        own = minfer.plan("rms_norm_gemm", m=rows, n=n, k=k, dtype=dtype, gated=gated, residual=True)
        peers: dict[str, Callable[[int], Any]] = {
            "ours:separate": separate,
            "ours:one_launch": lambda i: ours(i, kernel="one_launch"),
            "ours:two_launches": lambda i: ours(i, kernel="two_launches"),
            "torch": lambda i: of_torch(data.xs[i], data.residuals[i], weights[i]),
            "torch_compile": lambda i: compiled(data.xs[i], data.residuals[i], weights[i]),
        }
        return Call(ours, peers, moved, error, own.kernel or "two_launches", sets)

    return make


def quantized(k: int, n: int, gated: bool) -> Callable[..., Call]:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        moved = n * k / 2 + 2.0 * (n * k / GROUP + 3 * rows * k + rows * n / (2 if gated else 1))
        sets = _sets(moved, device)
        data = Rows(rows, k, dtype, device, sets)
        packed = [minfer.w4a16_pack(torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)) for _ in range(sets)]
        scales = [((torch.rand(k // GROUP, n, device=device) + 0.5) / (5 * k**0.5)).to(dtype) for _ in range(sets)]
        fused = minfer.rms_norm_w4a16_gemm_gated if gated else minfer.rms_norm_w4a16_gemm
        product = minfer.w4a16_gemm_gated if gated else minfer.w4a16_gemm

        def ours(i: int, residual: Tensor | None = None) -> Tensor:
            own = data.residuals[i] if residual is None else residual
            return fused(data.xs[i], data.weight, packed[i], scales[i], eps=EPS, residual=own)

        def separate(i: int) -> Tensor:
            return product(minfer.add_rms_norm(data.xs[i], data.residuals[i], data.weight, EPS), packed[i], scales[i])

        def error() -> float:
            w = minfer.w4a16_dequantize(packed[0], scales[0], n=n, k=k).double()
            return deviation(ours(0, data.residuals[0].clone()), _finished(data.normed() @ w.t(), gated))

        return Call(ours, {"ours:separate": separate}, moved, error, "two_launches", sets)

    return make


def cells() -> list[tuple[str, int, int, Callable[..., Call]]]:
    """(what, rows, columns of the weight, call)."""
    found = []
    for k, n, gated in SHAPES:
        for operator, make in (("rms_norm_gemm", dense), ("rms_norm_w4a16_gemm", quantized)):
            what = f"{operator}{'_gated' if gated else ''} {k} x {n}"
            found += [(what, rows, n, make(k, n, gated)) for rows in TOKENS]
    return found


def origins() -> list[tuple[str, int, int, Callable[..., Call]]]:
    """A norm and a linear layer, from one token to many."""
    return [(f"rms_norm_gemm {k} x {n}", rows, n, dense(k, n, False)) for k, n in ORIGIN_SHAPES for rows in ORIGIN_TOKENS]
