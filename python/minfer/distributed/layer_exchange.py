"""Where the ranks of a divided model exchange what their parts of a decoder layer add up to, within the layer's launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._core.namespace import ops
from .peer_memory import PeerMemory


class LayerExchange(NamedTuple):
    """What a launch takes: where this process has mapped the ranks' buffers, in their order, and which rank this is."""

    addresses: Sequence[int]
    rank: int


def open_layer_exchange(
    group: dist.ProcessGroup | None, device: torch.device, rank: int, ranks: int, hidden: int, parts: Any
) -> PeerMemory | None:
    """Memory for layers of ``hidden`` columns. Every rank calls it at the same time.

    Args:
      parts: what a rank's layers look like: sizes, formats; anything that can be compared and pickled. Ranks whose layers differ may
        plan them differently, and would wait for each other's launches for ever.

    Returns:
      None where ``parts`` are not the same on all ranks, and where :meth:`PeerMemory.among` finds none.
    """
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, parts, group=group)
    if any(other != parts for other in of_ranks):
        return None
    return PeerMemory.among(group, device, rank, ranks, ops._decoder_exchange_bytes(hidden, ranks), "sums within layers")
