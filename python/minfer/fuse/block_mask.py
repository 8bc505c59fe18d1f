"""Which blocks of queries and keys a mask lets through: FlexAttention's lists, of torch's making or ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention_config import BLOCK
from .errors import FuseError

_ELEMENTS = 1 << 24  # of a mask that are evaluated at once


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Lists of blocks of keys, for each batch and head (or one for all of them) and each block of queries. A block that neither list
    names is not computed; of a full one every key is seen; of the others, ``mask_mod`` decides.

    Attributes:
      kv_num_blocks, full_kv_num_blocks: int32 [batch, heads, blocks of queries].
      kv_indices, full_kv_indices: int32 [batch, heads, blocks of queries, blocks of keys], the first of each row.
      BLOCK_SIZE: queries and keys of a block, multiples of 128.
      mask_mod: the function it was made of.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Callable[..., Any] | None = None

    def to(self, device: torch.device | str) -> BlockMask:
        moved = [x if x is None else x.to(device) for x in lists_of(self)]
        return BlockMask(*moved, self.BLOCK_SIZE, self.mask_mod)

    def sparsity(self) -> float:
        """The part of the blocks that are not computed, in percent."""
        computed = self.kv_num_blocks.sum() + (0 if self.full_kv_num_blocks is None else self.full_kv_num_blocks.sum())
        return 100.0 * (1.0 - float(computed) / max(self.kv_indices.numel(), 1))


def lists_of(mask: Any) -> list[Tensor | None]:
    return [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]


def block_size_of(mask: Any) -> tuple[int, int]:
    size = mask.BLOCK_SIZE
    q, kv = (size, size) if isinstance(size, int) else size
    if q % BLOCK or kv % BLOCK or q <= 0 or kv <= 0:
        raise FuseError(f"attention: block_mask's BLOCK_SIZE must be multiples of {BLOCK}, got {(q, kv)}")
    return int(q), int(kv)


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cuda",
    BLOCK_SIZE: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """Evaluates a mask for all queries and keys, a part at a time, and lists the blocks. As torch's function of this name, whose results
    :func:`minfer.fuse.attention` takes as well.

    Args:
      mask_mod: of (b, h, q_idx, kv_idx), as in :func:`minfer.fuse.attention`.
      B, H: batches and query heads; None: the mask is the same for all of them.
      Q_LEN, KV_LEN: queries and keys.
      device: of the lists and of the tensors that mask_mod reads.
      BLOCK_SIZE: of queries and keys, multiples of 128.

    Raises:
      FuseError: for a block size that is none, or a function that cannot be traced; it names the line.
    """
    from .attention_function import evaluate_mask, traced

    q_size, kv_size = block_size_of(BlockMask(*[None] * 4, BLOCK_SIZE))  # type: ignore[arg-type]
    function = traced(None, mask_mod)
    device = torch.device(device)
    q_blocks, kv_blocks = -(-Q_LEN // q_size), -(-KV_LEN // kv_size)
    states = torch.zeros(B or 1, H or 1, q_blocks, kv_blocks, dtype=torch.int8, device=device)
    together = max(_ELEMENTS // (q_size * max(kv_blocks, 1) * kv_size), 1)
    for b in range(B or 1):
        for h in range(H or 1):
            for first in range(0, q_blocks, together):
                last = min(first + together, q_blocks)
                queries = torch.arange(first * q_size, last * q_size, device=device)
                seen = torch.zeros(len(queries), kv_blocks * kv_size, dtype=torch.bool, device=device)
                inside = min(len(queries), Q_LEN - first * q_size)
                seen[:inside, :KV_LEN] = evaluate_mask(function, b, h, queries[:inside], torch.arange(KV_LEN, device=device))
                blocks = seen.view(last - first, q_size, kv_blocks, kv_size)
                states[b, h, first:last] = blocks.amax((1, 3)).to(torch.int8) + blocks.amin((1, 3)).to(torch.int8)
    return BlockMask(*_listed(states == 1), *_listed(states == 2), (q_size, kv_size), mask_mod)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts, and the chosen blocks in front."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def states_of(lists: list[Tensor]) -> Tensor:
    """[batch, heads, blocks of queries, blocks of keys]: 0: not computed, 1: masked, 2: full."""
    counts, indices, full_counts, full_indices = lists
    states = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.int8, device=indices.device)
    for kind, (count, index) in enumerate(((counts, indices), (full_counts, full_indices)), 1):
        listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
        place = torch.where(listed, index, indices.shape[-1]).long()
        states.scatter_(-1, place, kind)
    return states[..., :-1]
