"""Epilogues that are fused in the tests, one for each kind, and how GEMMs are judged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from minfer import fuse
from torch import Tensor

from tests.fuse.cases import BF16, E4M3, F16, F32, SPACING, TINY, args_like


@fuse.gemm_epilogue
def plain(acc, row, col):
    return acc.to(BF16)


@fuse.gemm_epilogue
def bias_gelu(acc, row, col, bias, *, alpha: float = 1.0):
    return F.gelu(acc * alpha + bias, approximate="tanh").to(BF16)


@fuse.gemm_epilogue
def biases(acc, row, col, columns, rows, vector, whole, number):
    return ((acc + columns) * rows + vector[row] + whole * number).to(F16)


@fuse.gemm_epilogue
def residual(acc, row, col, stream, gate=None):
    h = stream.float() + (acc if gate is None else acc * torch.sigmoid(gate))
    return h.to(BF16), F.relu(h)


@fuse.gemm_epilogue(gate="halves")
def swiglu(acc, row, col):
    gate, up = acc
    return (F.silu(gate) * up).to(BF16)


@fuse.gemm_epilogue(gate="alternating")
def clamped_swiglu(acc, row, col, bias):
    gate, up = acc[0].clamp(max=7.0), (acc[1] + bias).clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(BF16)


@fuse.gemm_epilogue(gate="blocks")
def geglu(acc, row, col):
    gate, up = acc
    return (F.gelu(gate) * up).to(BF16)


@fuse.gemm_epilogue
def norms(acc, row, col, scale, bias):
    h = acc * scale[row] + bias
    return h.to(BF16), h.square().mean(-1, keepdim=True).sqrt(), h.abs().amax(-1)


@fuse.gemm_epilogue
def ranges(acc, row, col, scale):
    """Reductions of all kinds, returned in another order than they are made."""
    total, most, least, count = acc.sum(-1), acc.amax(-1), acc.amin(-1), (acc > 0).to(torch.int32).sum(-1).to(torch.int32)
    return most - least, acc.to(BF16), count, total * scale[row].squeeze(-1), least


@fuse.gemm_epilogue
def codes(acc, row, col, scale):
    h = acc * scale
    return h.clamp(-448, 448).to(E4M3), (h * 4).to(torch.int8), h > 0


@fuse.gemm_epilogue(mutates=("out",), returns=0)
def scattered(acc, row, col, index, out, weight):
    out.index_copy_(0, index, (acc * weight[row]).to(BF16))


@fuse.gemm_epilogue(mutates=("stream",), returns=1)
def accumulated(acc, row, col, stream):
    h = stream.float() + acc
    stream.copy_(h)
    return h.square().sum(-1)


@fuse.gemm_epilogue
def stochastic(acc, row, col, seed):
    return fuse.stochastic_round(acc, BF16, seed, row, col)


@fuse.gemm_epilogue
def rotated(acc, row, col):
    """Indices of all kinds."""
    return torch.where((row + col) % 2 == 0, acc, -acc).to(BF16), (row * 3).to(torch.int32)


@fuse.gemm_epilogue
def expert_bias(acc, row, col, bias, scale):
    return ((acc + bias) * scale).to(BF16)


@fuse.gemm_epilogue
def expert_statistics(acc, row, col, bias):
    h = acc + bias
    return h.to(BF16), h.amax(-1)


def operands_of(kind: str, m: int, n: int, device: str = "cuda", dtype: torch.dtype = BF16) -> tuple[fuse.GemmFunction, list[Any]]:
    """A function and its operands for a product of [m, n]."""

    def r(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    number = torch.tensor(0.75)
    return {
        "plain": lambda: (plain, []),
        "bias_gelu": lambda: (bias_gelu, [r(n)]),
        "biases": lambda: (biases, [r(n), r(m, 1, dtype=F32), r(m), r(m, n), number]),
        "residual": lambda: (residual, [r(m, n), r(1, n)]),
        "swiglu": lambda: (swiglu, []),
        "clamped_swiglu": lambda: (clamped_swiglu, [r(n // 2)]),
        "geglu": lambda: (geglu, []),
        "norms": lambda: (norms, [r(m, dtype=F32), r(n)]),
        "ranges": lambda: (ranges, [r(m, dtype=F32)]),
        "codes": lambda: (codes, [torch.rand(m, 1, device=device) * 0.1]),
        "scattered": lambda: (
            scattered,
            [(torch.randperm(m + 5, device=device)[:m] - 2).int(), torch.full((m + 1, n), 7.0, device=device).to(BF16), r(m)],
        ),
        "accumulated": lambda: (accumulated, [r(m, n)]),
        "stochastic": lambda: (stochastic, [torch.tensor(123456789012)]),
        "rotated": lambda: (rotated, []),
    }[kind]()


KINDS = (
    "plain", "bias_gelu", "biases", "residual", "swiglu", "clamped_swiglu", "geglu", "norms", "ranges", "codes", "scattered", "accumulated",
    "stochastic", "rotated",
)  # fmt: skip


def columns_unit(kind: str) -> int:
    """What n must be a multiple of."""
    return {"swiglu": 2, "clamped_swiglu": 2, "geglu": 16}.get(kind, 1)


def drawn(seed: int) -> tuple[fuse.GemmFunction, Callable[[int, int, str], list[Any]]]:
    """A random epilogue of random operands, and what makes these."""
    draw = random.Random(seed)
    gate = draw.choice(("", "", "", "halves", "alternating", "blocks"))
    choices = {
        "columns": lambda m, n, device: torch.randn(n, device=device).to(BF16),
        "rows": lambda m, n, device: torch.randn(m, 1, device=device),
        "whole": lambda m, n, device: torch.randn(m, n, device=device).to(F16),
        "number": lambda m, n, device: torch.tensor(0.5),
    }
    taken = [draw.choice(tuple(choices)) for _ in range(3)]
    steps = [(draw.choice(("add", "mul", "max", "gate")), draw.randrange(3)) for _ in range(draw.randrange(1, 5))]
    activation = draw.choice((F.silu, F.relu, torch.tanh, F.gelu, lambda x: x, lambda x: x.clamp(-2, 2)))
    storage = draw.choice((BF16, F16, F32, E4M3))
    reduces = draw.choice(("", "", "sum", "amax", "amin"))
    both = draw.random() < 0.3

    def epilogue(acc, row, col, x, y, z):
        h = acc if not gate else acc[0] * torch.sigmoid(acc[1])
        for step, which in steps:
            other = (x, y, z)[which].float()
            if step == "add":
                h = h + other
            elif step == "mul":
                h = h * other
            elif step == "max":
                h = torch.maximum(h, other)
            else:
                h = h * torch.sigmoid(other)
        h = activation(h)
        results = [h.to(storage)]
        if both:
            results.append((h * 0.5).to(BF16))
        if reduces:
            results.append(getattr(h, reduces)(-1))
        return tuple(results)

    function = fuse.gemm_epilogue(epilogue, gate=gate)
    return function, lambda m, n, device: [choices[name](m, n // 2 if gate else n, device) for name in taken]


def check(result: Tensor, exact: Tensor, single: Tensor, what: str, near: float = 0.0) -> None:
    """Against float64, rounded to the same storage: twice the error of the same in float32, one step between neighbours of the storage, and
    what sums of k products in another order and approximate functions add. ``near``: what roundings within the function may add, as a part
    of the results."""
    assert result.shape == exact.shape and result.dtype == exact.dtype, (what, result.shape, exact.shape, result.dtype, exact.dtype)
    if not result.is_floating_point():
        far = (result.to(torch.int64) - exact.to(torch.int64)).abs()
        assert (far > 1).sum() == 0 and (far > 0).float().mean() <= 0.01, (what, far.max(), (far > 0).float().mean())
        return
    a, b, c = result.double(), exact.double(), single.double()
    assert torch.equal(a.isnan(), b.isnan()), (what, "nan")
    finite = b.isfinite()
    assert torch.equal(a[~finite & ~b.isnan()], b[~finite & ~b.isnan()]), (what, "inf")
    a, b, c = a[finite], b[finite], c[finite]
    if not a.numel():
        return
    typical = b.abs().mean()
    allowed = 2 * (c - b).abs().max() + SPACING[result.dtype] * b.abs() + TINY[result.dtype] + (2.0**-17 + near) * (b.abs() + typical)
    worst = ((a - b).abs() - allowed).max()
    assert worst <= 0, (what, f"{(a - b).abs().max().item():.3e} away, {worst.item():.3e} beyond what is allowed")


def judged(function: fuse.GemmFunction, a: Tensor, b: Tensor, operands: list[Any], near: float = 0.0, **kwargs: Any) -> None:
    """One call against float64; arguments that are written are compared as well, and a second call gives the same bits."""

    def listed(results: Any) -> list[Tensor]:
        return [] if results is None else list(results) if isinstance(results, tuple) else [results]

    def copies() -> list[Any]:
        return [x.clone() if isinstance(x, Tensor) else x for x in operands]

    exact = listed(function.reference(a, b, *copies(), precision=torch.float64, **kwargs))
    single = listed(function.reference(a, b, *copies(), precision=torch.float32, **kwargs))
    runs = []
    names = [x.name for x in function.signature.parameters[2:]]
    for _ in range(2):
        given = args_like(operands)
        results = listed(function(a, b, *given, **kwargs))
        runs.append([*results, *(x for name, x in zip(names, given, strict=False) if name in function.mutates)])
    assert len(runs[0]) == len(exact)
    what = f"{function.name}, {list(a.shape)}, {list(b.shape)}"
    for i, (result, again, want, one) in enumerate(zip(*runs, exact, single, strict=True)):
        check(result, want, one, f"{what}, result {i}", near)
        assert torch.equal(result.contiguous().view(torch.uint8), again.contiguous().view(torch.uint8)), what


@fuse.gemm_epilogue(prologue=lambda a, row, col, factor, weight: a.float() * factor * weight)
def normalised(acc, row, col, bias):
    """A row factor and a column vector, of a norm that is applied while A is loaded."""
    return (acc + bias).to(BF16)


@fuse.gemm_epilogue(prologue=lambda a, row, col, scale: a.float() * scale[row])
def dequantised(acc, row, col):
    return acc.to(BF16)


@fuse.gemm_epilogue(prologue=lambda a, row, col, other: torch.where(col % 3 == row % 3, a.float() + other, F.silu(a.float() - 1)))
def mixed(acc, row, col):
    return acc.to(BF16), acc.amax(-1)


@fuse.gemm_epilogue(prologue=lambda a, row, col, weight: a * weight)
def expert_norm(acc, row, col, bias):
    return (acc + bias).to(BF16)
