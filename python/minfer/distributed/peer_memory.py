"""Memory of the GPUs of one host that the processes of a group map from each other."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._core.namespace import ops

_log = logging.getLogger(__name__)

_MOST_RANKS = 8


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


class PeerMemory:
    """As many bytes of every rank's GPU, first zeros, where this process has mapped them. Every rank calls all of it at the same time.

    Attributes:
      addresses: by rank, while it is open.
      rank: this one.
      device: where this rank's own bytes are.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, rank: int, addresses: list[int]):
        self.addresses, self.rank, self.device, self._group = addresses, rank, device, group

    @classmethod
    def among(cls, group: dist.ProcessGroup | None, device: torch.device, rank: int, ranks: int, size: int, what: str) -> PeerMemory | None:
        """``size`` bytes for ``what``; None where the GPUs do not reach each other's memory, with the reason in the log, or where
        ``MINFER_PEER_MEMORY`` is 0."""
        asked = os.environ.get("MINFER_PEER_MEMORY", "1")
        if asked not in ("0", "1"):
            raise ValueError(f"MINFER_PEER_MEMORY must be 0 or 1, got {asked!r}")
        wanted = device.type == "cuda" and 2 <= ranks <= _MOST_RANKS and asked == "1"
        like = torch.empty(0, device=device)

        def gathered(x: Any) -> list[Any]:
            found = [None] * ranks
            dist.all_gather_object(found, x, group=group)
            return found

        own: dict[str, Any] = {}
        why = "" if wanted else "not asked for"
        if wanted:
            try:
                own = json.loads(ops._allocate_peer_memory(like, size))
            except RuntimeError as error:
                why = str(error)
        places = gathered((_host(), own.get("handle"), size, why))
        reasons = [of_rank for *_, of_rank in places if of_rank]
        if len({host for host, *_ in places}) > 1:
            reasons.append("the ranks are on several hosts")
        if len({bytes_of_rank for _, _, bytes_of_rank, _ in places}) > 1:
            reasons.append(f"the ranks want different sizes: {[bytes_of_rank for _, _, bytes_of_rank, _ in places]} bytes")
        addresses = [0] * ranks
        if not reasons:
            try:
                for other, (_, handle, *_) in enumerate(places):
                    addresses[other] = own["address"] if other == rank else ops._open_peer_memory(like, handle)
            except RuntimeError as error:
                why = str(error)
            reasons = [x for x in gathered(why) if x]
        if not reasons:
            return cls(group, device, rank, addresses)
        for other, address in enumerate(addresses):
            if address and other != rank:
                ops._release_peer_memory(like, address, True)
        gathered(None)  # nobody has mapped it any more
        if own:
            ops._release_peer_memory(like, own["address"], False)
        if wanted:
            _log.info("%s go through collectives alone: %s", what, reasons[0])
        return None

    def close(self) -> None:
        """Gives the memory back when every rank is here."""
        like = torch.empty(0, device=self.device)
        torch.cuda.synchronize(self.device)
        for other, address in enumerate(self.addresses):
            if other != self.rank:
                ops._release_peer_memory(like, address, True)
        dist.barrier(self._group)
        ops._release_peer_memory(like, self.addresses[self.rank], False)
        self.addresses = []
