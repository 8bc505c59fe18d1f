"""Problem lists that the tuner and the benchmarks share.

The lists of the ``llm`` suite are (n, k) of a model's linear layers: qkv, attention output, gate and up, down.
"""

from __future__ import annotations

import torch

from .planning import Problem

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
QWEN_7B = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
LLM_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SQUARES = (512, 1024, 2048, 4096, 8192)
EPILOGUE_M = (16, 512, 4096)

# Held out: models, and values of m, that no tuned table is made from.
_GEMMA_9B = ((8192, 3584), (3584, 4096), (28672, 3584), (3584, 14336))
_MISTRAL_12B = ((6144, 5120), (5120, 4096), (28672, 5120), (5120, 14336))
_PHI_14B = ((7680, 5120), (5120, 5120), (35840, 5120), (5120, 17920))
_HELDOUT_M = (1, 3, 6, 12, 24, 48, 96, 192, 384, 768, 1536, 3072)
_HELDOUT_SQUARES = (768, 1536, 3072, 6144)


def _square() -> list[Problem]:
    return [Problem(s, s, s, dtype=torch.float16, c=c) for s in SQUARES for c in (False, True)]


def _llm() -> list[Problem]:
    return [Problem(m, n, k) for n, k in (*LLAMA_8B, *LLAMA_70B, *QWEN_7B) for m in LLM_M]


def _epilogue() -> list[Problem]:
    return [Problem(m, n, k, c=c, gated=not c) for n, k in LLAMA_8B for m in EPILOGUE_M for c in (True, False)]


def _heldout() -> list[Problem]:
    """Every (n, k) with four values of m spread over the range, every m equally often; and squares."""
    problems = []
    for i, (n, k) in enumerate((*_GEMMA_9B, *_MISTRAL_12B, *_PHI_14B)):
        problems += [Problem(_HELDOUT_M[(i + 3 * j) % len(_HELDOUT_M)], n, k) for j in range(4)]
    return problems + [Problem(s, s, s, dtype=torch.float16) for s in _HELDOUT_SQUARES]


SUITES = {"square": _square, "llm": _llm, "epilogue": _epilogue, "heldout": _heldout}


def suite(name: str) -> list[Problem]:
    """The problems of a suite.

    Raises:
      ValueError: there is no such suite.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    return SUITES[name]()


def parse_shape(text: str, **options) -> Problem:
    """ "MxNxK" or "MxNxKxBATCH" -> Problem; the options are its other fields.

    Raises:
      ValueError: the text is something else, or an option cannot be right.
    """
    parts = text.strip().lower().split("x")
    if len(parts) not in (3, 4) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"a shape must be MxNxK or MxNxKxBATCH, got {text!r}")
    m, n, k, *batch = map(int, parts)
    return Problem(m, n, k, batch[0] if batch else 1, **options)
