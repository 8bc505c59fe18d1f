"""What is measured of grouped products and layers of 8-bit operands: sizes of published models, rows of experts from one to thousands."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from minfer.planning.plan import NARROW_NAMES

from bench.suites.moe import MODELS

FP8 = torch.float8_e4m3fn
DTYPES = {"fp8": FP8, "int8": torch.int8}
SUITES = tuple(f"{kind}_{what}" for kind in DTYPES for what in ("masked", "contiguous", "layer"))
SLAB_ROWS = 128  # of an expert's slab, of which so many as a cell says are used

# experts, rows of each, n, k
MASKED = {
    "fp8": ((8, 16, 4096, 7168), (16, 16, 4096, 7168), (8, 1, 4096, 7168), (8, 64, 4096, 7168), (16, 128, 4096, 7168)),
    "int8": ((8, 16, 4096, 7168), (16, 16, 4096, 7168)),
}
CONTIGUOUS = {
    "fp8": (
        (4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 4096, 7168), (8, 4096, 7168, 2048), (32, 256, 4096, 7168),
        (32, 256, 7168, 2048),
    ),
    "int8": ((4, 8192, 4096, 7168),),
}  # fmt: skip
LAYERS = ("qwen3-30b-a3b", "deepseek-v3")  # whole: all experts on one GPU
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Grouped:
    """A grouped product in which every expert has as many rows."""

    experts: int
    m: int  # rows of an expert
    n: int
    k: int
    dtype: torch.dtype  # e4m3 with scales of 1 x 128 and 128 x 128 blocks, or int8 with scales of rows and columns
    max_rows: int = 0  # of an expert's slab; 0: the experts' rows lie behind each other

    @property
    def masked(self) -> bool:
        return self.max_rows > 0

    @property
    def op(self) -> str:
        return f"grouped_gemm_{'fp8' if self.dtype == FP8 else 'int8'}" + ("_masked" if self.masked else "")

    @property
    def shape(self) -> dict[str, Any]:
        sizes = {"m": self.m, "n": self.n, "k": self.k, "experts": self.experts}
        return sizes | ({"layout": "masked", "max_rows": self.max_rows} if self.masked else {"layout": "contiguous"})

    def __str__(self) -> str:
        return f"{self.experts} experts x {self.m}, {self.n} x {self.k}"


@dataclass(frozen=True)
class Layer:
    """A mixture-of-experts layer of a model: bf16 tokens in and out, weights of 8 bits."""

    model: str
    tokens: int
    dtype: torch.dtype

    @property
    def op(self) -> str:
        return f"moe_ffn_{'fp8' if self.dtype == FP8 else 'int8'}"

    @property
    def shape(self) -> dict[str, Any]:
        experts, top_k, hidden, inter = MODELS[self.model]
        return {"model": self.model, "m": self.tokens, "n": inter, "k": hidden, "experts": experts, "top_k": top_k}

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens"


Cell = Grouped | Layer


@functools.cache
def cells_of(suite: str) -> tuple[Cell, ...]:
    """The cells of a suite; layers of the same weights follow each other.

    Raises:
      ValueError: there is no such suite.
    """
    kind, _, what = suite.partition("_")
    if suite not in SUITES:
        raise ValueError(f"--suite must be of {', '.join(SUITES)}, got {suite!r}")
    dtype = DTYPES[kind]
    if what == "layer":
        return tuple(Layer(model, tokens, dtype) for model in LAYERS for tokens in TOKENS)
    if what == "masked":
        return tuple(Grouped(*sizes, dtype, max(sizes[1], SLAB_ROWS)) for sizes in MASKED[kind])
    return tuple(Grouped(*sizes, dtype) for sizes in CONTIGUOUS[kind])


def describe(cell: Cell) -> dict[str, Any]:
    """op, shape and dtype of a cell's rows."""
    return {"op": cell.op, "shape": cell.shape, "dtype": NARROW_NAMES[cell.dtype]}
