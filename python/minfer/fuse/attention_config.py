"""How a kernel of attention is made and launched: what the template takes, and what is chosen for a call."""

from __future__ import annotations

import dataclasses
import math

from .graph import F32, I64, Graph

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
    warpgroups that there are. ``key_words``: of each key, what looked_up_by_key() finds, in 32 bits each."""

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
    key_words: int = 0

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def block(self) -> int:
        return 128 * (self.consumers + (0 if self.portable else 1))

    @property
    def query_stages(self) -> int:
        """Of packed heads, consumers load the queries themselves; TMA brings others while the tile before them is computed."""
        return 1 if self.packed or self.portable else 2

    @property
    def counted(self) -> bool:
        """Whether CTAs may take tiles of queries by a counter: where these differ in their keys."""
        return (self.masks or self.listed) and not self.portable

    @property
    def shared_bytes(self) -> int:
        tiles = 2 * self.head_dim * (self.query_stages * self.rows + 2 * self.stages * self.keys)
        return tiles + self.key_bytes * 2 * self.stages + 1024  # 1024: of alignment

    @property
    def key_bytes(self) -> int:
        """Of a tile's numbers by key."""
        return 4 * self.key_words * self.keys


def dependent(graph: Graph, *names: str) -> list[bool]:
    """Which values depend on any of the function's arguments of these names."""
    result: list[bool] = []
    for node in graph.nodes:
        result.append(node.op == "value" and node.attrs[0] in names or any(result[i] for i in node.inputs))
    return result


_MOST_KEY_WORDS = 2


def looked_up_by_key(graph: Graph, packed: bool) -> dict[int, int]:
    """Values that are looked up by a key's position and are the same for all rows of a tile of queries, as the document that a key belongs
    to, and that others need which are not: as many as have 2 words of 32 bits, with their words."""
    by_key = dependent(graph, "kv")
    by_others = dependent(graph, "q", "score", *(["h"] if packed else []))
    alone = [x and not y for x, y in zip(by_key, by_others, strict=True)]
    looked_up: list[bool] = []
    for number, node in enumerate(graph.nodes):
        here = node.op == "gather" and alone[number]
        looked_up.append(here or alone[number] and any(looked_up[i] for i in node.inputs))
    needed = {y.node for y in graph.outputs}
    needed |= {i for number, node in enumerate(graph.nodes) if not alone[number] for i in node.inputs}
    found: dict[int, int] = {}
    for number in sorted(needed):
        words = 2 if graph.nodes[number].dtype == I64 else 1
        if looked_up[number] and sum(found.values()) + words <= _MOST_KEY_WORDS:
            found[number] = words
    return found


def outer_factor(graph: Graph, number: int) -> tuple[float, int]:
    """A value as a positive constant times another value."""
    factor = 1.0
    while True:
        node = graph.nodes[number]
        if node.dtype != F32 or node.op not in ("mul", "div"):
            return factor, number
        places = [(1, 0), (0, 1)] if node.op == "mul" else [(1, 0)]
        constants = [(graph.nodes[node.inputs[i]], node.inputs[j]) for i, j in places]
        found = [(x.attrs[0], rest) for x, rest in constants if x.op == "constant" and x.dtype == F32 and 0 < x.attrs[0] < math.inf]
        if not found:
            return factor, number
        step = found[0][0] if node.op == "mul" else 1 / found[0][0]
        if not 1e-30 < factor * step < 1e30:  # far from where float32 ends
            return factor, number
        factor, number = factor * step, found[0][1]


def soft_cap(graph: Graph, config: AttentionConfig) -> tuple[float, float] | None:
    """(outer, inner) where the function of scores is outer * tanh(inner * score), which has a way of its own on sm_90a."""
    if not config.scores or config.portable:
        return None
    outer, number = outer_factor(graph, graph.outputs[0].node)
    if graph.nodes[number].op != "tanh":
        return None
    inner, number = outer_factor(graph, graph.nodes[number].inputs[0])
    node = graph.nodes[number]
    return (outer, inner) if node.op == "value" and node.attrs[0] == "score" else None


CAP_NUMBERS = ("cap_inner", "cap_limit", "cap_root", "cap_middle", "cap_rest", "cap_negligible")


def cap_numbers(cap: tuple[float, float], scale: float) -> tuple[float, ...]:
    """CAP_NUMBERS, as cpp/src/attention/shared/softmax.cuh: tanh(x) is x (0.9997852 - 0.3262967 x^2 + 0.09735545 x^4) up to 3 / 4, 2^-12.2
    of itself away, and rises with x everywhere. Of a product p = score / scale, in units of log2, it is
    p (((root p)^2 + middle)^2 + rest). From the maximum ``negligible`` of a row on, scores below the limit weigh less than 2^-24 of its
    largest."""
    outer, inner = cap[0] * math.log2(math.e), cap[1] * scale
    limit, first, third, fifth = 0.75, 0.9997852, -0.3262967, 0.09735545
    unit = outer * inner
    middle = third / (2 * math.sqrt(fifth)) * math.sqrt(unit)
    root = (fifth * unit) ** 0.25 * inner
    return inner, limit / inner, root, middle, first * unit - middle * middle, 24 - outer * math.tanh(limit)


def parameters(graph: Graph, config: AttentionConfig) -> list[tuple[str, int, int]]:
    """The kernel's, in order: names with numbers. Strides are of batches (or pages), heads and rows."""
    keys = ("k", "v") if config.portable else ("k_map", "v_map")
    by_threads = config.packed or config.portable
    names: list[tuple[str, int, int]] = [(name, 0, 0) for name in (*keys, "q" if by_threads else "q_map", "out", "lse")]
    strided = (*(("k_stride", "v_stride") if config.portable else ()), *(("q_stride",) if by_threads else ()), "out_stride")
    names += [(name, i, 0) for name in strided for i in range(3)]
    numbers = ("scale", "tiles", "section", "walk_heads", "batch", "parts", "group", "sq", "sk", "head_dim", "head_dim_v")
    names += [(name, 0, 0) for name in numbers]
    if soft_cap(graph, config) is not None:
        names += [(name, 0, 0) for name in CAP_NUMBERS]
    if config.counted:
        names += [(name, 0, 0) for name in ("counter", "claims")]
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
