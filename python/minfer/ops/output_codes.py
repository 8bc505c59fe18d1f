"""D of a GEMM as 8-bit codes: the operators return the codes, their wrappers also the scale, as :func:`minfer.rms_norm` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Codes = tuple[Tensor, Tensor]


def with_scale(call: Callable[..., Tensor]) -> Callable[..., Tensor | Codes]:
    """Of a call with ``quant``, the pair of its result and ``scale``."""

    def run(*args: Any, quant: str | None = None, scale: Tensor | None = None, **options: Any) -> Tensor | Codes:
        if quant is None and scale is None:
            return call(*args, **options)
        return call(*args, quant=quant, scale=scale, **options), scale

    return run
