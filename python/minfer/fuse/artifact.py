"""A compiled kernel as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Artifact:
    cubin: bytes
    entry: str  # the kernel's name in it
    shared_bytes: int  # dynamic
    threads: int
    cluster: int
