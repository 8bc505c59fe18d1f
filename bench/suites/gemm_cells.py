"""The cells of the GEMM suites: which problems are evidence."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from minfer.measure import shapes
from minfer.planning.plan import DTYPE_NAMES, Problem

ALPHA_BETA = ((1.0, 0.0), (1.0, 1.0), (2.0, 3.0), (0.5, 2.0))
MODELS = {"llama-3.1-8b": shapes.LLAMA_8B, "llama-3.1-70b": shapes.LLAMA_70B, "qwen2.5-7b": shapes.QWEN_7B}
EPILOGUES = ("bias_gelu", "bias_silu_residual", "gated")
SUITES = ("square", "llm", "odd", "epilogue", "heldout", "untuned")


@dataclass(frozen=True)
class Cell:
    """One row of a suite: alpha * A.B + beta * C with A [m, k], B [k, n] = weight.t(), or an epilogue around it."""

    suite: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    alpha: float = 1.0
    beta: float = 0.0
    epilogue: str = ""  # of EPILOGUES; n counts gate and up of a gated one
    model: str = ""

    def __str__(self) -> str:
        text = f"{self.suite} {self.m}x{self.n}x{self.k} {DTYPE_NAMES[self.dtype]}"
        if self.suite == "square":
            text += f" ({self.alpha:g}, {self.beta:g})"
        return text + (f" {self.epilogue}" if self.epilogue else "")

    @property
    def gated(self) -> bool:
        return self.epilogue == "gated"

    @property
    def has_c(self) -> bool:
        return self.beta != 0 or self.epilogue == "bias_silu_residual"

    @property
    def aligned(self) -> bool:
        """Whether TMA can address the operands (16-byte rows)."""
        return self.k % 8 == 0 and self.n % 8 == 0

    @property
    def problem(self) -> Problem:
        return Problem(self.m, self.n, self.k, dtype=self.dtype, c=self.has_c, gated=self.gated)

    def shape(self) -> dict[str, Any]:
        """The ``shape`` of a results row."""
        shape: dict[str, Any] = {"m": self.m, "n": self.n, "k": self.k}
        if self.suite in ("square", "untuned"):
            shape |= {"alpha": self.alpha, "beta": self.beta}
        if self.model:
            shape["model"] = self.model
        if self.epilogue:
            shape["epilogue"] = self.epilogue
        if self.suite == "odd":
            shape["aligned"] = self.aligned
        return shape


# ---- the suites ----------------------------------------------------------------------------------------------------------------


def _square(quick: bool) -> list[Cell]:
    sizes = (512, 2048) if quick else shapes.SQUARES
    pairs = ALPHA_BETA[:2] if quick else ALPHA_BETA
    return [Cell("square", s, s, s, torch.float16, alpha, beta) for s in sizes for alpha, beta in pairs]


def _llm(quick: bool) -> list[Cell]:
    models = {"llama-3.1-8b": MODELS["llama-3.1-8b"]} if quick else MODELS
    ms = (1, 16, 128, 1024) if quick else shapes.LLM_M
    return [Cell("llm", m, n, k, torch.bfloat16, model=model) for model, layers in models.items() for n, k in layers for m in ms]


def _is_prime(x: int) -> bool:
    return x > 1 and all(x % d for d in range(2, int(x**0.5) + 1))


def _odd(quick: bool) -> list[Cell]:
    """50 random shapes, sizes log-uniform: by turns primes, tails of 1 to 7 past a tile, two aligned ones with tile tails, anything."""
    rng = random.Random(2026)

    def size(least: int = 1, most: int = 6000) -> int:
        return max(least, round(2 ** rng.uniform(0, 12.55))) if rng.random() < 0.3 else rng.randint(max(least, 64), most)

    def prime() -> int:
        x = size()
        while not _is_prime(x):
            x += 1
        return x

    cells = []
    for i in range(50):
        kind = i % 5
        if kind == 0:
            m, n, k = prime(), prime(), prime()
        elif kind == 1:
            m, n, k = (128 * rng.randint(1, 32) + rng.randint(1, 7) for _ in range(3))
        elif kind in (2, 3):
            m, n, k = size(), 8 * max(1, size() // 8), 8 * max(1, size() // 8)
        else:
            m, n, k = size(), size(), size()
        cells.append(Cell("odd", m, n, k, (torch.float16, torch.bfloat16)[i % 2]))
    return cells[:10] if quick else cells


def _epilogue(quick: bool) -> list[Cell]:
    # m outermost: a compiler's budget that runs out has then covered the small m of every layer.
    layers = shapes.LLAMA_8B[:2] if quick else shapes.LLAMA_8B
    ms = shapes.EPILOGUE_M[:2] if quick else shapes.EPILOGUE_M
    return [
        Cell("epilogue", m, n, k, torch.bfloat16, beta=float(e == "bias_silu_residual"), epilogue=e, model="llama-3.1-8b")
        for m in ms
        for n, k in layers
        for e in EPILOGUES
    ]


def _heldout(quick: bool) -> list[Cell]:
    problems = shapes.suite("heldout")
    return [Cell("heldout", p.m, p.n, p.k, p.dtype) for p in (problems[::6] if quick else problems)]


UNTUNED_LAYERS = ((5120, 5120), (27648, 5120), (7168, 2048), (3584, 18944), (2816, 3072))  # n, k
UNTUNED_M = (1, 5, 24, 48, 96, 200, 384, 768, 1536, 3000)


def _untuned(quick: bool) -> list[Cell]:
    """Layers of models that no table was tuned for, at numbers of tokens that are no powers of two, and squares of no whole tiles."""
    layers, ms = (UNTUNED_LAYERS[::2], UNTUNED_M[::3]) if quick else (UNTUNED_LAYERS, UNTUNED_M)
    cells = [Cell("untuned", m, n, k, torch.bfloat16) for n, k in layers for m in ms]
    return cells + [Cell("untuned", s, s, s, torch.float16, *pair) for s in (700, 1500, 3000) for pair in ((1.0, 0.0), (2.0, 3.0))]


def cells_of(suite: str, quick: bool = False) -> list[Cell]:
    """The cells of a suite; ``quick`` keeps a few of each kind.

    Raises:
      ValueError: there is no such suite.
    """
    makers = {"square": _square, "llm": _llm, "odd": _odd, "epilogue": _epilogue, "heldout": _heldout, "untuned": _untuned}
    if suite not in makers:
        raise ValueError(f"suite must be one of {', '.join(makers)}, got {suite!r}")
    return makers[suite](quick)


def custom_cells(texts: list[str], dtype: torch.dtype) -> list[Cell]:
    """Cells of shapes "MxNxK" outside the suites."""
    problems = [shapes.parse_shape(text, dtype=dtype) for text in texts]
    return [Cell("custom", p.m, p.n, p.k, dtype) for p in problems]
