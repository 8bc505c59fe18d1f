"""The demo's cases, a module for each family of operators. A new family is a module with ``cases(sizes)`` and its name in ``FAMILIES``."""

from __future__ import annotations

from ..case import Case
from ..sizes import Sizes
from . import attention, gemm, kv_cache, moe, quantized_gemm

FAMILIES = (gemm, quantized_gemm, moe, attention, kv_cache)  # in the order of the table


def cases(sizes: Sizes) -> list[Case]:
    return [case for family in FAMILIES for case in family.cases(sizes)]
