"""Problem lists that the tuner and the benchmarks share.

The lists of the ``llm`` suite are (n, k) of a model's linear layers: qkv, attention output, gate and up, down.
"""

from __future__ import annotations

import torch

from ..planning.plan import Problem, W4Problem

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


def _heldout_layers() -> list[Problem]:
    """Every (n, k) with four values of m spread over the range, every m equally often."""
    problems = []
    for i, (n, k) in enumerate((*_GEMMA_9B, *_MISTRAL_12B, *_PHI_14B)):
        problems += [Problem(_HELDOUT_M[(i + 3 * j) % len(_HELDOUT_M)], n, k) for j in range(4)]
    return problems


def _heldout() -> list[Problem]:
    return _heldout_layers() + [Problem(s, s, s, dtype=torch.float16) for s in _HELDOUT_SQUARES]


SUITES = {"square": _square, "llm": _llm, "epilogue": _epilogue, "heldout": _heldout}
W4_SUITES = {"llm": _llm, "heldout": _heldout_layers}


def suite(name: str) -> list[Problem]:
    """The problems of a suite.

    Raises:
      ValueError: there is no such suite.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    return SUITES[name]()


def w4_suite(name: str, **options) -> list[W4Problem]:
    """The problems of a suite of 4-bit weights: the dense suite's layers and values of m; the options are W4Problem's other fields.

    Raises:
      ValueError: there is no such suite, or an option cannot be right.
    """
    if name not in W4_SUITES:
        raise ValueError(f"suite must be one of {', '.join(W4_SUITES)}, got {name!r}")
    return [W4Problem(p.m, p.n, p.k, **options) for p in W4_SUITES[name]()]


def parse_shape(text: str, **options) -> Problem:
    """ "MxNxK" or "MxNxKxBATCH" -> Problem; the options are its other fields.

    Raises:
      ValueError: the text is something else, or an option cannot be right.
    """
    m, n, k, *batch = _extents(text, "MxNxK or MxNxKxBATCH", (3, 4))
    return Problem(m, n, k, batch[0] if batch else 1, **options)


def parse_w4_shape(text: str, **options) -> W4Problem:
    """ "MxNxK" -> W4Problem; the options are its other fields.

    Raises:
      ValueError: the text is something else, or an option cannot be right.
    """
    return W4Problem(*_extents(text, "MxNxK", (3,)), **options)


def _extents(text: str, form: str, counts: tuple[int, ...]) -> list[int]:
    parts = text.strip().lower().split("x")
    if len(parts) not in counts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"a shape must be {form}, got {text!r}")
    return [int(part) for part in parts]
