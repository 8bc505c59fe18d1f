"""Calls of decoder blocks on a GPU, in memory that held NaN before; they are repeated and have to give the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.decoder_block.cases import Operands
from tests.fuzz.modes import poison_free_memory

DEVICE = "cuda"
# k, h, inter, n: a square o and others, inter of models, n that is no multiple of 64.
SIZES = (
    *((512, 512, 1024, 768), (256, 512, 1536, 136), (1024, 512, 1024, 80), (2048, 1024, 2816, 1544), (4096, 4096, 14336, 6144)),
    *((512, 1024, 3072, 8), (4096, 2048, 5632, 32008), (640, 896, 4864, 1152)),
)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def run(t: Operands, kernel: str | None = None, **more: Any) -> tuple[Tensor, Tensor]:
    """Calls three times; checks the first and that the others have its bits. Returns D and the residual."""
    results = []
    for _ in range(3):
        poison_free_memory(torch.device(DEVICE, torch.cuda.current_device()))
        results.append((t.call(kernel=kernel, **more), t.residual.clone()))
    have, residual = results[0]
    t.check(have, kernel, residual=residual)
    for other in results[1:]:
        assert same(other[0], have) and same(other[1], residual), f"{kernel} {t.case}: other bits in another run"
    return have, residual
