"""Where a process is in its group."""

from __future__ import annotations

import torch.distributed as dist

from ..checks.common import Checker


def place_in(check: Checker, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(ranks, this rank) of the group."""
    up = dist.is_available() and dist.is_initialized()
    check(up, "a process group must be initialised first: torch.distributed.init_process_group")
    rank = dist.get_rank(group)
    check(rank >= 0, "group must have this process as a rank, and it has not")
    return dist.get_world_size(group), rank
