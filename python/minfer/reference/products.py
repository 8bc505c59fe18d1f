"""Matrix products of the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.batch_invariance import is_batch_invariant


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b. In the batch-invariant mode one row of a after the other, because what adds up k follows from the number of rows."""
    if not is_batch_invariant() or a.dtype == torch.float64 or a.shape[-1] == 0:
        return a @ b
    rows = a.reshape(-1, a.shape[-1]) if b.dim() == 2 else a
    if b.dim() == 3:
        planes = a if a.dim() == 3 else a.expand(b.shape[0], *a.shape)
        return torch.stack([product(plane, own) for plane, own in zip(planes, b, strict=True)])
    # A row of its own memory begins where torch aligns it, and B lies as it always does.
    b, out = b.contiguous(), a.new_empty(rows.shape[0], b.shape[1])
    for i, row in enumerate(rows):
        out[i] = (row.clone()[None] @ b)[0]
    return out.reshape(*a.shape[:-1], b.shape[1])
