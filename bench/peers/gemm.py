"""Operands of a GEMM cell, and every contestant as functions ``fn(set)`` over them: ours and the peers.

A peer is a list of variants (layouts, compile modes); the fastest one is the peer's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from minfer import reference

from bench.harness import Arena, sets_for
from bench.peers.cublaslt import CublasLtBest
from bench.suites.gemm_cells import Cell

WEIGHT_DEVIATION = 0.02  # of a language model's weights; results have deviation about 1


class Unavailable(Exception):
    """A peer that cannot be measured on this cell, and why."""


# ---- operands ------------------------------------------------------------------------------------------------------------------


class Arenas:
    """Arenas of one element type, large enough for every cell that will be measured."""

    def __init__(self, cells: list[Cell], dtype: torch.dtype):
        needs = [footprints(cell) for cell in cells if cell.dtype == dtype]
        self.activations = Arena(dtype, max(n[0] for n in needs), 1.0)
        self.weights = Arena(dtype, max(n[1] for n in needs), WEIGHT_DEVIATION)
        self.outputs = Arena(dtype, max(n[2] for n in needs), None)

    def reset(self) -> None:
        for arena in (self.activations, self.weights, self.outputs):
            arena.reset()


def sets_of(cell: Cell) -> int:
    d = cell.m * cell.problem.n_out
    return sets_for(2 * (cell.m * cell.k + cell.n * cell.k + d * (2 if cell.has_c else 1)))


def footprints(cell: Cell) -> tuple[int, int, int]:
    """Elements of activations, weights (K-major and N-major) and outputs that a cell carves."""
    d = cell.m * cell.problem.n_out
    activations = [cell.m * cell.k, d if cell.has_c else 0, cell.n if cell.epilogue else 0]
    sets = sets_of(cell)
    return tuple(sets * sum(Arena.footprint(count, cell.dtype) for count in counts) for counts in (activations, [cell.n * cell.k] * 2, [d]))


@dataclass
class Operands:
    """``sets`` sets of a cell's tensors. Of set 0 alone, ``w_kn`` holds the same matrix as ``w``; the others are only timed."""

    cell: Cell
    sets: int
    a: list[torch.Tensor]  # [m, k]
    w: list[torch.Tensor]  # [n, k], an nn.Linear weight; of a gated cell gate and up packed
    w_kn: list[torch.Tensor]  # [k, n], contiguous
    c: list[torch.Tensor] | None  # [m, n]
    bias: list[torch.Tensor] | None  # [n]
    d: list[torch.Tensor]  # [m, n], of a gated cell [m, n / 2]

    @classmethod
    def carve(cls, cell: Cell, arenas: Arenas) -> Operands:
        arenas.reset()
        sets = sets_of(cell)
        n_out = cell.problem.n_out
        operands = cls(
            cell,
            sets,
            a=[arenas.activations.take(cell.m, cell.k) for _ in range(sets)],
            w=[arenas.weights.take(cell.n, cell.k) for _ in range(sets)],
            w_kn=[arenas.weights.take(cell.k, cell.n) for _ in range(sets)],
            c=[arenas.activations.take(cell.m, n_out) for _ in range(sets)] if cell.has_c else None,
            bias=[arenas.activations.take(cell.n) for _ in range(sets)] if cell.epilogue in ("bias_gelu", "bias_silu_residual") else None,
            d=[arenas.outputs.take(cell.m, n_out) for _ in range(sets)],
        )
        operands.w_kn[0].copy_(operands.w[0].t())
        return operands

    def truth(self) -> torch.Tensor:
        """The result on set 0 in float64, or in float32 where that would not fit."""
        cell = self.cell
        bytes_needed = 8 * (cell.m * cell.k + cell.n * cell.k + 4 * cell.m * cell.n)
        wide = torch.float64 if bytes_needed < 0.8 * torch.cuda.mem_get_info()[0] else torch.float32
        a, b = self.a[0].to(wide), self.w[0].to(wide).t()
        if cell.gated:
            return reference.gemm_gated(a, b, activation="silu")
        activation = {"bias_gelu": "gelu", "bias_silu_residual": "silu"}.get(cell.epilogue, "none")
        c, bias = (None if x is None else x[0].to(wide) for x in (self.c, self.bias))
        return reference.gemm(a, b, c=c, bias=bias, alpha=cell.alpha, beta=cell.beta, activation=activation)


# ---- contestants -----------------------------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """One way of a contestant: ``fn(set)`` launches, and returns D where it does not write ``operands.d[set]``."""

    name: str
    fn: Callable[[int], Any]
    into_d: bool = True


def ours(o: Operands, kernel: str | None = None) -> Variant:
    cell = o.cell
    b = [w.t() for w in o.w]
    if cell.gated:
        return Variant("tn", lambda i: torch.ops.minfer.gemm_gated.default(o.a[i], b[i], activation="silu", kernel=kernel), into_d=False)
    activation = {"bias_gelu": "gelu", "bias_silu_residual": "silu"}.get(cell.epilogue, "none")
    options = {"alpha": cell.alpha, "beta": cell.beta, "activation": activation, "kernel": kernel}
    c, bias, gemm = o.c or [None] * o.sets, o.bias or [None] * o.sets, torch.ops.minfer.gemm.out
    return Variant("tn", lambda i: gemm(o.a[i], b[i], c=c[i], bias=bias[i], out=o.d[i], **options))


def _layouts(o: Operands) -> list[tuple[str, list[torch.Tensor]]]:
    return [("tn", [w.t() for w in o.w]), ("nn", o.w_kn)]


def _plain(o: Operands, peer: str) -> None:
    if o.cell.epilogue:
        raise Unavailable(f"{peer} has no such epilogue")


def cublas(o: Operands) -> list[Variant]:
    """torch.mm and torch.addmm, weights K-major and N-major."""
    _plain(o, "torch.mm")
    cell = o.cell

    def variant(name: str, b: list[torch.Tensor]) -> Variant:
        if cell.beta == 0 and cell.alpha == 1:
            return Variant(name, lambda i: torch.mm(o.a[i], b[i], out=o.d[i]))
        c = o.c or o.d
        return Variant(name, lambda i: torch.addmm(c[i], o.a[i], b[i], alpha=cell.alpha, beta=cell.beta, out=o.d[i]))

    return [variant(name, b) for name, b in _layouts(o)]


def cublaslt_best(o: Operands) -> list[Variant]:
    """cuBLASLt, the fastest of 32 heuristics for each layout."""
    _plain(o, "this cuBLASLt peer")
    cell = o.cell
    try:
        return [Variant(name, CublasLtBest(o.a, b, o.d, c=o.c, alpha=cell.alpha, beta=cell.beta)) for name, b in _layouts(o)]
    except (FileNotFoundError, OSError, RuntimeError) as error:
        raise Unavailable(str(error)) from error


def _peer_module(name: str):
    try:
        import peer_ops

        __import__(name)
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error
    return peer_ops


def quack(o: Operands) -> list[Variant]:
    """quack (CuTe DSL), autotuned."""
    _plain(o, "this quack peer")
    peer_ops, cell = _peer_module("quack"), o.cell
    if cell.beta == 0 and cell.alpha == 1:
        variant = Variant("tn", lambda i: peer_ops.quack_gemm(o.a[i], o.w[i], out=o.d[i]))
    else:
        from quack.gemm_interface import gemm_add

        c = o.c or o.d
        variant = Variant("tn", lambda i: gemm_add(o.a[i], o.w[i].t(), c[i], out=o.d[i], alpha=cell.alpha, beta=cell.beta))
    return [variant]


def deepgemm(o: Operands) -> list[Variant]:
    """DeepGEMM's bf16 kernel."""
    cell = o.cell
    if cell.dtype != torch.bfloat16 or cell.epilogue or cell.beta != 0 or cell.alpha != 1:
        raise Unavailable("DeepGEMM computes plain bf16 products")
    peer_ops = _peer_module("deep_gemm")
    return [Variant("tn", lambda i: peer_ops.deepgemm(o.a[i], o.w[i], out=o.d[i]))]


def _bias_gelu(x, w, bias):
    return F.gelu(F.linear(x, w, bias))


def _bias_silu_residual(x, w, bias, residual):
    return F.silu(F.linear(x, w, bias) + residual)


def _gated(x, w):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def torch_compile(o: Operands, modes: tuple[str, ...] = ("default",)) -> list[Variant]:
    """torch.compile of the same layer, one variant for each mode; a gated layer's weight is gate and up stacked, one product."""
    cell = o.cell
    if not cell.epilogue:
        raise Unavailable("a plain product is torch.mm")
    functions = {"bias_gelu": _bias_gelu, "bias_silu_residual": _bias_silu_residual, "gated": _gated}
    if cell.gated:
        stacked = torch.cat(minfer.unpack_gate_up(o.w[0]))
        inputs = [(a, w) for a, w in zip(o.a, [stacked, *o.w[1:]], strict=True)]
    else:
        columns = [o.a, o.w, o.bias] + ([o.c] if o.c else [])
        inputs = list(zip(*columns, strict=True))
    torch._dynamo.reset()  # every cell compiles anew: no recompilation limit, no dynamic shapes
    variants = []
    for mode in modes:
        compiled = torch.compile(functions[cell.epilogue], mode=None if mode == "default" else mode, dynamic=False, fullgraph=True)
        with torch.no_grad():
            compiled(*inputs[0])
        variants.append(Variant(mode, lambda i, compiled=compiled: compiled(*inputs[i]), into_d=False))
    return variants


def eager(o: Operands) -> torch.Tensor:
    """Set 0 by PyTorch in the cell's own type: the yardstick of the error rule, not of speed."""
    cell = o.cell
    if cell.gated:
        return _gated(o.a[0], torch.cat(minfer.unpack_gate_up(o.w[0])))
    if cell.epilogue == "bias_gelu":
        return _bias_gelu(o.a[0], o.w[0], o.bias[0])
    if cell.epilogue == "bias_silu_residual":
        return _bias_silu_residual(o.a[0], o.w[0], o.bias[0], o.c[0])
    if cell.beta == 0 and cell.alpha == 1:
        return torch.mm(o.a[0], o.w[0].t())
    c = (o.c or o.d)[0]
    return torch.addmm(c, o.a[0], o.w[0].t(), alpha=cell.alpha, beta=cell.beta)


PEERS: dict[str, Callable[..., list[Variant]]] = {
    "cublas": cublas,
    "cublaslt_best": cublaslt_best,
    "quack": quack,
    "deepgemm": deepgemm,
    "torch_compile": torch_compile,
}
