"""How a kernel of attention is made and launched: what the template takes, and what is chosen for a call."""

from __future__ import annotations

import dataclasses

from .graph import Graph

HEAD_DIMS = (64, 128)  # smaller ones are filled up with zeros
BLOCK = 128  # of block masks: the tiles' rows and keys where there is one
MOST_POSITIONS = 1 << 24  # positions are numbers that float32 holds
MOST_BOXES = 16


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """``head_dim``: of the tiles. ``consumers``: warpgroups, of 64 rows each. ``keys``: of a tile. ``box``: keys that one TMA copy brings.
    ``packed``: rows are the query heads of one KV head next to each other. ``listed``: tiles are those that a block mask names, of blocks
    of ``listed_q`` x ``listed_k`` tiles. ``split``: results are parts in float32, of which ``parts`` there are. ``scores`` and ``masks``:
    whether the graph has an output of each kind, in this order. ``portable``: of kernels/attention_portable.py, where consumers are all
    warpgroups that there are."""

    element: str
    head_dim: int
    consumers: int
    keys: int
    stages: int
    box: int
    packed: bool = False
    paged: bool = False
    listed: bool = False
    listed_q: int = 1
    listed_k: int = 1
    split: bool = False
    scores: bool = False
    masks: bool = False
    portable: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def block(self) -> int:
        return 128 * (self.consumers + (0 if self.portable else 1))

    @property
    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (self.rows + 2 * self.stages * self.keys) + 1024  # 1024: of alignment


def parameters(graph: Graph, config: AttentionConfig) -> list[tuple[str, int, int]]:
    """The kernel's, in order: names with numbers. Strides are of batches (or pages), heads and rows."""
    keys = ("k", "v") if config.portable else ("k_map", "v_map")
    names: list[tuple[str, int, int]] = [(name, 0, 0) for name in (*keys, "q", "out", "lse")]
    strided = ("k_stride", "v_stride") if config.portable else ()
    names += [(name, i, 0) for name in (*strided, "q_stride", "out_stride") for i in range(3)]
    numbers = ("scale", "tiles", "section", "walk_heads", "batch", "parts", "group", "sq", "sk", "head_dim", "head_dim_v")
    names += [(name, 0, 0) for name in numbers]
    if config.listed:
        names += [(name, 0, 0) for name in ("some_count", "some_index", "all_count", "all_index")]
        names += [(name, 0, 0) for name in ("list_rows", "list_length", "list_batch", "list_head")]
    if config.paged:
        names += [(name, 0, 0) for name in ("table", "lengths", "table_stride", "table_columns", "pages", "page_size")]
    for i, x in enumerate(graph.inputs):
        names.append(("captured", i, 0))
        names += [("captured_size", i, mode) for mode in range(x.rank)]
        names += [("captured_stride", i, mode) for mode in range(x.rank)]
    return names
