"""Sums of few numbers over the GPUs of one host, through memory that each of them writes in the others."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._core.namespace import ops

_log = logging.getLogger(__name__)
_MOST_RANKS = 8
_TYPES = (torch.bfloat16, torch.float16)


def _most_numbers(ranks: int) -> int:
    """Of 16 bits: 1 MiB between two GPUs. Each GPU sends twice as many bytes to every other one; from there on NCCL's ring is faster."""
    return (1 << 20) // ranks


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


class PeerExchange:
    """Where the ranks of a group have mapped each other's exchange buffers, ``cpp/include/minfer/all_reduce.h``.

    Every rank calls everything here at the same time. Sums are of one stream: two that run at once would meet in the same buffer.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, rank: int, own: int, mapped: dict[int, int], most: int):
        self._group, self._like = group, torch.empty(0, device=device)
        self._own, self._mapped, self._rank, self._most = own, mapped, rank, most
        self._buffers = [own if i == rank else mapped[i] for i in range(len(mapped) + 1)]

    @classmethod
    def among(cls, group: dist.ProcessGroup | None, device: torch.device, rank: int, ranks: int) -> PeerExchange | None:
        """None where the GPUs do not reach each other's memory, with the reason in the log, or where ``MINFER_PEER_MEMORY`` is 0."""
        asked = os.environ.get("MINFER_PEER_MEMORY", "1")
        if asked not in ("0", "1"):
            raise ValueError(f"MINFER_PEER_MEMORY must be 0 or 1, got {asked!r}")
        wanted = device.type == "cuda" and 2 <= ranks <= _MOST_RANKS and asked == "1"
        most, like = _most_numbers(ranks), torch.empty(0, device=device)

        def gathered(x: Any) -> list[Any]:
            found = [None] * ranks
            dist.all_gather_object(found, x, group=group)
            return found

        own: dict[str, Any] = {}
        why = "" if wanted else "not asked for"
        if wanted:
            try:
                own = json.loads(ops._allocate_peer_memory(like, ops._all_reduce_bytes(most, ranks)))
            except RuntimeError as error:
                why = str(error)
        places = gathered((_host(), own.get("handle"), why))
        reasons = [of_rank for *_, of_rank in places if of_rank]
        if len({host for host, *_ in places}) > 1:
            reasons.append("the ranks are on several hosts")
        mapped: dict[int, int] = {}
        if not reasons:
            try:
                for other, (_, handle, _) in enumerate(places):
                    if other != rank:
                        mapped[other] = ops._open_peer_memory(like, handle)
            except RuntimeError as error:
                why = str(error)
            reasons = [x for x in gathered(why) if x]
        if not reasons:
            return cls(group, device, rank, own["address"], mapped, most)
        for address in mapped.values():
            ops._release_peer_memory(like, address, True)
        gathered(None)  # nobody has mapped it any more
        if own:
            ops._release_peer_memory(like, own["address"], False)
        if wanted:
            _log.info("sums over the ranks go through NCCL alone: %s", reasons[0])
        return None

    def takes(self, x: Tensor) -> bool:
        """Whether sums like x are for it: says the same on every rank."""
        return x.is_cuda and x.dtype in _TYPES and 0 < x.numel() <= self._most and x.numel() % 8 == 0

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum of all ranks' x, in the order of the ranks."""
        own = x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
        ops._all_reduce(own, self._buffers, self._rank, self._most)
        if own is not x:
            x.copy_(own)

    def close(self) -> None:
        """Gives the memory back when every rank is here."""
        torch.cuda.synchronize(self._like.device)
        for address in self._mapped.values():
            ops._release_peer_memory(self._like, address, True)
        dist.barrier(self._group)
        ops._release_peer_memory(self._like, self._own, False)
        self._buffers = []
