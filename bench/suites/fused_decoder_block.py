"""What lies between two attentions, of int4 weights: as the plan chooses, by the operators one after the other, and in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.suites.fused_call import Call, deviation

TOKENS = (1, 2)
GROUP, EPS = 128, 1e-5
# Columns of attention's output, of the residual, of the MLP's activations, and of the next layer's q, k and v.
MODELS = {
    "Llama-3.2-1B": (2048, 2048, 8192, 3072),
    "Llama-3.2-3B": (3072, 3072, 8192, 5120),
    "Qwen2.5-7B": (3584, 3584, 18944, 4608),
    "Llama-3.1-8B": (4096, 4096, 14336, 6144),
    "Mistral-Small-24B": (4096, 5120, 32768, 6144),
    "Llama-3.1-70B": (8192, 8192, 28672, 10240),
}
NAMES = ("o", "gate_up", "down", "next")


def _weights(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    attended, hidden, inter, n = sizes
    found = {name: (1 + 0.1 * torch.randn(hidden, device=device)).to(dtype) for name in ("mlp_norm", "next_norm")}
    for name, rows, k in zip(NAMES, (hidden, 2 * inter, hidden, n), (attended, hidden, inter, hidden), strict=True):
        found[f"{name}_qweight"] = minfer.w4a16_pack(torch.randint(0, 16, (rows, k), dtype=torch.uint8, device=device))
        found[f"{name}_scales"] = ((torch.rand(k // GROUP, rows, device=device) + 0.5) / (5 * k**0.5)).to(dtype)
    return found


def _truth(a: Tensor, residual: Tensor, w: dict[str, Tensor]) -> Tensor:
    """In float64; x and the activations of the MLP are rounded where minfer rounds them."""
    dtype = a.dtype

    def product(x: Tensor, name: str) -> Tensor:
        scales = w[f"{name}_scales"]
        return x.double() @ minfer.w4a16_dequantize(w[f"{name}_qweight"], scales, n=scales.shape[1], k=x.shape[-1]).double().t()

    def norm(x: Tensor, name: str) -> Tensor:
        return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * w[name].double()

    x = (residual.double() + product(a, "o")).to(dtype)
    blocks = product(norm(x, "mlp_norm"), "gate_up").unflatten(-1, (-1, 2, 8))
    h = (F.silu(blocks[..., 0, :]) * blocks[..., 1, :]).flatten(-2).to(dtype)
    return product(norm((x.double() + product(h, "down")).to(dtype), "next_norm"), "next")


def block(sizes: tuple[int, int, int, int]) -> Callable[..., Call]:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        attended, hidden, inter, n = sizes
        weights = hidden * attended + 3 * hidden * inter + n * hidden
        moved = weights * (0.5 + 2.0 / GROUP) + 2.0 * rows * (attended + 2 * hidden + n)
        sets = harness.sets_for(int(moved)) if device == "cuda" else 1
        data = [
            (torch.randn(rows, attended, device=device).to(dtype), torch.randn(rows, hidden, device=device).to(dtype))
            + (_weights(sizes, dtype, device),)
            for _ in range(sets)
        ]

        def ours(i: int, residual: Tensor | None = None, **options: Any) -> Tensor:
            a, own, w = data[i]
            return minfer.w4a16_decoder_block(a, own if residual is None else residual, **w, eps=EPS, constant_weights=True, **options)

        def error() -> float:
            a, residual, w = data[0]
            return deviation(ours(0, residual.clone()), _truth(a, residual, w))

        peers: dict[str, Callable[[int], Any]] = {
            "ours:separate": lambda i: ours(i, kernel="separate"),
            "ours:one_launch": lambda i: ours(i, kernel="one_launch"),
        }
        plan = minfer.plan("w4a16_decoder_block", m=rows, n=n, k=hidden, inter=inter, attention=attended, dtype=dtype, group_size=GROUP)
        return Call(ours, peers, moved, error, "one_launch" if plan.one_launch else "separate", sets)

    return make


def cells() -> list[tuple[str, int, int, Callable[..., Call]]]:
    """(what, rows, columns of the result, call)."""
    return [(f"w4a16_decoder_block, {name}", rows, sizes[3], block(sizes)) for name, sizes in MODELS.items() for rows in TOKENS]
