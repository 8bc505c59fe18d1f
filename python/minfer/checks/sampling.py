"""Argument checks of sampling, as in :mod:`minfer.checks.common`, in the order of ``cpp/torch/sampling.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import DTYPES, FLOAT32_MAX, Checker, Result, check_dense, check_operand, check_scalar

MOST_TOP_LOGPROBS = 128
MOST_TOKENS = 2**24 - 1
MOST_TOP_K = 2**31 - 1
LEAST_NORMAL = torch.finfo(torch.float32).tiny


def _check_operand(check: Checker, name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[Any, ...], logits: Tensor) -> None:
    if x is not None:
        check_operand(check, name, x, dtype, shape, "logits", logits)


def _check_number(check: Checker, name: str, value: float, least: float, most: float, must: str) -> None:
    if not isinstance(value, torch.SymFloat):  # a symbolic one is checked when the compiled graph runs
        check(least <= value <= most, f"{{}} must be {must}, got {{}}", name, value)


def _check_of_tokens(check: Checker, name: str, x: Tensor, dtype: torch.dtype, columns: Any, logits: Tensor) -> None:
    """[rows, columns], or one row for all."""
    one = x.dim() == 2 and x.shape[0] == 1
    check_operand(check, name, x, dtype, (1 if one else logits.shape[0], columns), "logits", logits)


def check_sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    temperatures: Tensor | None = None,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    repetition_penalties: Tensor | None = None,
    presence_penalties: Tensor | None = None,
    frequency_penalties: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    top_logprobs: int = 0,
) -> tuple[Result, Result, Result, Result]:
    check = Checker("sample")
    check_dense(check, "logits", logits)
    check(logits.dim() == 2, "logits must be [rows, vocabulary], got {}", logits.shape)
    check(logits.dtype in (*DTYPES, torch.float32), "logits must be float16, bfloat16 or float32, got {}", logits.dtype)
    rows, vocabulary = logits.shape
    for good in (vocabulary >= 1, vocabulary <= MOST_TOKENS):
        check(good, "logits must have 1 to 2^24 - 1 columns, got {}", logits.shape)
    _check_number(check, "temperature", temperature, 0, FLOAT32_MAX, "finite in float32 and not negative")
    check(-1 <= top_k <= MOST_TOP_K, "top_k must be -1 to 2^31 - 1, got {}", top_k)
    _check_number(check, "top_p", top_p, 0, 1, "0 to 1")
    _check_number(check, "min_p", min_p, 0, 1, "0 to 1")
    _check_number(check, "repetition_penalty", repetition_penalty, LEAST_NORMAL, FLOAT32_MAX, "a normal float32 above 0")
    check_scalar(check, "presence_penalty", presence_penalty)
    check_scalar(check, "frequency_penalty", frequency_penalty)
    numbers = (
        ("temperatures", temperatures, torch.float32),
        ("top_ks", top_ks, torch.int32),
        ("top_ps", top_ps, torch.float32),
        ("min_ps", min_ps, torch.float32),
        ("repetition_penalties", repetition_penalties, torch.float32),
        ("presence_penalties", presence_penalties, torch.float32),
        ("frequency_penalties", frequency_penalties, torch.float32),
        ("seeds", seeds, torch.int64),
        ("offsets", offsets, torch.int64),
    )
    for name, x, dtype in numbers:
        _check_operand(check, name, x, dtype, (rows,), logits)
    if counts is not None:
        check_operand(check, "counts", counts, torch.int32, (rows, vocabulary), "logits", logits)
    else:
        none = repetition_penalty == 1 and presence_penalty == 0 and frequency_penalty == 0
        none = none and repetition_penalties is None and presence_penalties is None and frequency_penalties is None
        check(none, "counts must be given for penalties")
    if bias is not None:
        _check_of_tokens(check, "bias", bias, torch.float32, vocabulary, logits)
    if allowed is not None:
        check(allowed.dtype in (torch.bool, torch.int32), "allowed must be bool or int32, got {}", allowed.dtype)
        columns = vocabulary if allowed.dtype == torch.bool else (vocabulary + 31) // 32
        _check_of_tokens(check, "allowed", allowed, allowed.dtype, columns, logits)
    text = "top_logprobs must be 0 to {}, got {}"
    check(0 <= top_logprobs <= MOST_TOP_LOGPROBS, text, MOST_TOP_LOGPROBS, top_logprobs)
    check(top_logprobs <= vocabulary, text, vocabulary, top_logprobs)
    ids, values = torch.int64, torch.float32
    n = top_logprobs
    return (
        Result(logits, (rows,), ids),
        Result(logits, (rows,), values),
        Result(logits, (rows, n), ids),
        Result(logits, (rows, n), values),
    )
