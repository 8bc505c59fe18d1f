"""Functions that are fused in the tests, and how results are judged."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from minfer import fuse
from torch import Tensor

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# How far apart neighbours of each storage are, at most, as a part of the number; below the smallest normal number they are TINY apart.
SPACING = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7, E4M3: 2.0**-3, torch.float8_e5m2: 2.0**-2}
TINY = {F32: 0.0, F16: 2.0**-24, BF16: 0.0, E4M3: 2.0**-9, torch.float8_e5m2: 2.0**-16}


def check(result: Tensor, exact: Tensor, single: Tensor, what: str = "", magnitude: float = 0.0) -> None:
    """Against float64, rounded to the same storage: at most twice the error of the same operations in float32, one step between neighbours
    of the storage (where a number lies between them, both are right), and errors of approximations within 2 ulp of values of the order
    of the results, or of ``magnitude`` where values within the function are larger than those."""
    assert result.shape == exact.shape and result.dtype == exact.dtype, (what, result.shape, exact.shape, result.dtype, exact.dtype)
    if not result.is_floating_point():
        far = (result.to(torch.int64) - exact.to(torch.int64)).abs()
        assert far.max() <= (0 if result.dtype in (torch.bool, torch.int32, torch.int64) else 1), (what, far.max())
        return
    a, b, c = result.double(), exact.double(), single.double()
    assert torch.equal(a.isnan(), b.isnan()), (what, "nan")
    finite = b.isfinite()
    assert torch.equal(a[~finite & ~b.isnan()], b[~finite & ~b.isnan()]), (what, "inf")
    a, b, c = a[finite], b[finite], c[finite]
    if not a.numel():
        return
    typical = b.abs().mean().clamp(min=magnitude)
    allowed = 2 * (c - b).abs().max() + SPACING[result.dtype] * b.abs() + TINY[result.dtype] + 2.0**-18 * (b.abs() + typical)
    worst = ((a - b).abs() - allowed).max()
    assert worst <= 0, (what, f"{(a - b).abs().max().item():.3e} away, {worst.item():.3e} beyond what is allowed")


def judged(function: fuse.RowFunction, *args, magnitude: float = 0.0, **kwargs) -> None:
    """One call against float64; arguments that are written are compared as well, and a second call gives the same bits."""

    def copies() -> list:
        return [x.clone() if isinstance(x, Tensor) else x for x in args]

    def listed(results) -> list[Tensor]:
        return [] if results is None else list(results) if isinstance(results, tuple) else [results]

    exact = listed(function.reference(*copies(), precision=torch.float64, **kwargs))
    single = listed(function.reference(*copies(), precision=torch.float32, **kwargs))
    runs = []
    for _ in range(2):
        given = args_like(args)
        results = listed(function(*given, **kwargs))
        written = [given[i] for i, x in enumerate(function.signature.parameters) if x.written and given[i] is not None]
        runs.append([*results, *written])
    assert len(runs[0]) == len(exact)
    for i, (result, again, want, near) in enumerate(zip(*runs, exact, single, strict=True)):
        shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
        check(result, want, near, f"{function.name}, result {i}, {shapes}", magnitude)
        assert torch.equal(result.view(torch.uint8) if result.numel() else result, again.view(torch.uint8) if again.numel() else again)


def args_like(args) -> list:
    """Copies with the same strides."""
    made = []
    for x in args:
        if not isinstance(x, Tensor):
            made.append(x)
            continue
        whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        made.append(whole.copy_(x))
    return made


@fuse.pointwise
def gated(x, y):
    return torch.nn.functional.silu(x) * y


@fuse.pointwise
def scaled(x, row, column, number):
    return x * row + column - number


@fuse.pointwise(mutates=("kept",), returns=2)
def rational(x, kept, a, b, c):
    """Tensors of one row that are as many bytes as those of rows: a thread takes several rows."""
    y = (a + x * (b + x * c)) / (1 + (x * b).abs())
    kept.copy_(kept + y)
    return y.to(x.dtype), y > 0


@fuse.pointwise
def saturated(x, scale):
    return (x / scale).to(E4M3), (x * 100).to(torch.int8), x > 0


@fuse.pointwise
def activations(x):
    f = torch.nn.functional
    return f.gelu(x) + f.gelu(x, approximate="tanh") + f.softplus(x) + f.elu(x) + f.mish(x) + f.hardswish(x) + torch.sigmoid(x)


@fuse.pointwise
def integers(i, j):
    return i // j + i % j, (i & 7) | (j << 2), torch.where(i > j, i, -j)


@fuse.rowwise
def rms_norm(x, weight, *, eps: float = 1e-6):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


@fuse.rowwise(mutates=("residual",))
def add_rms_norm(x, residual, weight=None, *, eps: float = 1e-6):
    h = residual.float() + x
    residual.copy_(h)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h if weight is None else h * weight).to(x.dtype)


@fuse.rowwise
def softmax(x, temperature):
    return torch.softmax(x.float() / temperature, -1)


@fuse.rowwise
def layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)


@fuse.rowwise
def quantized(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(E4M3), scale


@fuse.rowwise
def statistics(x):
    x = x.float()
    return x.amax(-1), x.amin(-1, keepdim=True), x.var(-1), torch.logsumexp(x, -1), (x > 0).sum(-1), (x > 3).any(-1)


@fuse.rowwise
def four_passes(x):
    x = x.float()
    y = x - x.mean(-1, keepdim=True)
    z = y / (y.abs().amax(-1, keepdim=True) + 1e-3)
    w = z * z / (z.square().sum(-1, keepdim=True) + 1.0)
    return (w - w.amin(-1, keepdim=True)).to(BF16)


@fuse.rowwise
def numbered(x):
    place = torch.arange(x.shape[-1], device=x.device)
    return torch.where(place % 2 == 0, x.float(), 0.0).sum(-1, keepdim=True), x.float() * place


Drawn = tuple[Callable, int]


def drawn(seed: int) -> tuple[Callable[..., Tensor], bool]:
    """A random composition of operations over (x, y, row, column), all float; whether it reduces over rows. Its values stay of the order
    of 1, so that a deviation is one of the kernel."""
    draw = random.Random(seed)
    reduces = draw.random() < 0.6
    steps = [
        (draw.randrange(15), draw.randrange(1 << 30), draw.randrange(1 << 30), draw.uniform(-1.5, 1.5)) for _ in range(draw.randint(3, 12))
    ]
    casts = draw.random() < 0.3
    results = draw.randint(1, 3)

    def function(x, y, row, column):
        values = [x.float(), y.float(), row.float() * torch.ones_like(x, dtype=F32), column.float() * torch.ones_like(x, dtype=F32)]
        for kind, first, second, number in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind == 0:
                c = a + b
            elif kind == 1:
                c = a - number * b
            elif kind == 2:
                c = a * torch.tanh(b)
            elif kind == 3:
                c = torch.where(a > b, a, b * number)
            elif kind == 4:
                c = torch.maximum(a, b) - torch.minimum(a, b)
            elif kind == 5:
                c = torch.sigmoid(a) * b
            elif kind == 6:
                c = a / (1.0 + b.abs())
            elif kind == 7:
                c = torch.exp(-a.abs()) + number
            elif kind == 8:
                c = torch.log1p(a.abs()) - torch.sqrt(b.abs() + 1.0)
            elif kind == 9:
                c = a.clamp(-1.0, 1.0) * b
            elif kind == 10:
                c = a.to(BF16).float() if casts else torch.erf(a)
            elif kind == 11 and reduces:
                c = a - b.mean(-1, keepdim=True)
            elif kind == 12 and reduces:
                c = a * torch.rsqrt(b.square().mean(-1, keepdim=True) + 1.0)
            elif kind == 13 and reduces:
                c = torch.softmax(a, -1) * b
            elif kind == 14 and reduces:
                c = a / (b.abs().amax(-1, keepdim=True) + 1.0)
            else:
                c = torch.rsqrt(a.square() + 1.0)
            values.append(c)
        made = [values[-1].to(x.dtype), *(values[-1 - i].to(F32) for i in range(1, results))]
        if reduces:
            made.append(values[-1].sum(-1, keepdim=True) * (1 / x.shape[-1]))  # as near as its elements are
        return tuple(made)

    function.__name__ = f"drawn_{seed}"
    function.__qualname__ = function.__name__
    return function, reduces
