"""How a fused GEMM is launched: what the template takes, and what is chosen for a problem."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

from .dtypes import bytes_of
from .graph import COLUMN, FULL, REDUCTIONS, Builder, Graph, Input, Node

TILE_K_BYTES = 128  # of a row of a tile in shared memory: one swizzle
SHARED_BYTES = 227 * 1024
_HEAD_BYTES = 1024 + 512  # what alignment and barriers take
GATES = ("", "halves", "alternating", "blocks")
GATE_BLOCK = 8  # columns


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Of kernels/gemm.py. ``prologue`` is the text of its graph; ``per_expert`` numbers the inputs of the graph that have experts."""

    tile_m: int
    tile_n: int
    pingpong: bool
    stages: int
    cluster: int  # CTAs along m, which share tiles of B
    a: str  # storage that tensor cores multiply
    b_major: str  # "k" or "n"
    gate: str
    vector: int  # numbers of a tensor of rows that lie at a multiple of as many
    grouped: bool
    per_expert: tuple[int, ...] = ()
    prologue: str = ""
    prologue_per_expert: tuple[int, ...] = ()
    prologue_vector: int = 1  # numbers along k that lie at a multiple of as many
    a_stored: str = ""  # of A in memory, where a prologue makes ``a`` of it
    portable: bool = False  # of kernels/gemm_portable.py, for architectures without WGMMA

    @property
    def moves_registers(self) -> bool:
        """From the producer to the warpgroups that multiply, whose threads have 128 accumulators. Kernels of fewer leave room on an SM for
        the CTAs of the next launch."""
        return self.groups == 2 and self.tile_m * self.tile_n > 64 * 128 * self.sharing

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return self.tile_m // 64 if self.portable else 2 if self.pingpong or self.tile_m >= 128 else 1

    @property
    def block(self) -> int:
        return 128 * (self.groups if self.portable else 1 + self.groups)

    @property
    def rows(self) -> int:
        """Rows of a tile that a thread has numbers of."""
        return self.tile_m // (32 * self.sharing)

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.pingpong else self.groups

    @property
    def tile_k(self) -> int:
        return TILE_K_BYTES // bytes_of(self.a)

    @property
    def a_box(self) -> int:
        """Numbers of a row of A in a tile of shared memory."""
        return self.tile_k

    @property
    def a_swizzle(self) -> int:
        """Of a tile of A, in bytes."""
        return self.a_box * bytes_of(self.a_stored or self.a)

    @property
    def columns(self) -> int:
        """Of the output, in a tile."""
        return self.tile_n // (2 if self.gate else 1)

    @property
    def boxes(self) -> int:
        """TMA boxes that a tile of B is made of."""
        if self.b_major == "n":
            return self.tile_n // self.tile_k
        return max(self.cluster, 2 if self.gate == "halves" else 1)

    @property
    def a_bytes(self) -> int:
        """Of A in a stage."""
        return self.tile_m * self.a_swizzle

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.tile_n * TILE_K_BYTES

    def prologue_graph(self) -> Graph | None:
        return Graph.from_plain(json.loads(self.prologue)) if self.prologue else None

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.stages * (self.stage_bytes + 16)


def parameters(graph: Graph, config: GemmConfig) -> list[tuple[str, int]]:
    """The kernel's, in order: ("map", 0) of A, ("map", 1) of B, or portable their addresses and strides; as rows have them ("address",
    input), ("number", input), ("stride", input), ("expert_stride", input), ("out", output), ("out_stride", output), ("limit", output), the
    rows of what is scattered into; the prologue's inputs in the same way with an a_ in front; ("partial", reduction); then sizes."""
    result: list[tuple[str, int]] = [("map", 0), ("map", 1)]
    if config.portable:
        result = [("a", 0), ("lda", 0), ("b", 0), ("ldb", 0), *([("ldb_expert", 0)] if config.grouped else [])]
    for i, x in enumerate(graph.inputs):
        result.append(("number" if x.by_value else "address", i))
        if x.extent in (FULL, COLUMN):
            result.append(("stride", i))
        if i in config.per_expert:
            result.append(("expert_stride", i))
    for i, y in enumerate(graph.outputs):
        if y.into < 0:
            result.append(("out", i))
            if y.extent == FULL:
                result.append(("out_stride", i))
        if y.index >= 0:
            result.append(("limit", i))
    prologue = config.prologue_graph()
    for i, x in enumerate(prologue.inputs if prologue is not None else ()):
        result.append(("a_number" if x.by_value else "a_address", i))
        if x.extent in (FULL, COLUMN):
            result.append(("a_stride", i))
        if i in config.prologue_per_expert:
            result.append(("a_expert_stride", i))
    if prologue is not None or config.portable:
        result.append(("k", 0))
    result += [("partial", i) for i, node in enumerate(graph.nodes) if node.op in REDUCTIONS]
    if config.grouped:
        result += [("offsets", 0), ("experts", 0)]
    return [*result, *((name, 0) for name in ("m", "n", "k_tiles", "m_tiles", "n_tiles", "band"))]


def epilogue_vector(graph: Graph, columns: int, alignments: list[int]) -> int:
    """Numbers of tensors of rows that are loaded and stored at once: at most 8. ``alignments``: in numbers, of each tensor."""
    return math.gcd(8, columns, *alignments)


# Splitting a graph at its reductions.

_PARTIAL = "partial of "  # no name of an operand


def split(graph: Graph) -> tuple[Graph, Graph | None, list[int]]:
    """The part that the GEMM's kernel computes, the part that follows from a row's partial reductions, and which outputs the second has.

    The first keeps every node; its outputs are those that depend on no reduction. The second is a graph of rows: each reduction of the
    first is an input of [m, tiles], which it reduces.
    """
    after = [False] * len(graph.nodes)
    for i, node in enumerate(graph.nodes):
        after[i] = node.op in REDUCTIONS or any(after[j] for j in node.inputs)
    late = [i for i, y in enumerate(graph.outputs) if after[y.node]]
    first = dataclasses.replace(graph, outputs=tuple(y for i, y in enumerate(graph.outputs) if i not in late))
    if not late:
        return first, None, []
    builder = Builder()
    known: dict[int, int] = {}
    inputs: dict[int, int] = {}

    def add(number: int) -> int:
        if number not in known:
            known[number] = made(number, graph.nodes[number])
        return known[number]

    def made(number: int, node: Node) -> int:
        if node.op in REDUCTIONS:
            builder.inputs.append(Input(f"{_PARTIAL}{number}", node.dtype, FULL))
            value = builder.add(Node("input", (), node.dtype, FULL, (len(builder.inputs) - 1,)))
            return builder.add(Node(node.op, (value,), node.dtype, COLUMN))
        if node.op == "input":
            (i,) = node.attrs
            if i not in inputs:
                inputs[i] = len(builder.inputs)
                builder.inputs.append(graph.inputs[i])
            return builder.add(dataclasses.replace(node, attrs=(inputs[i],)))
        return builder.add(dataclasses.replace(node, inputs=tuple(add(j) for j in node.inputs)))

    for i in late:
        builder.outputs.append(dataclasses.replace(graph.outputs[i], node=add(graph.outputs[i].node)))
    return first, builder.build(), late


def partials_of(last: Graph) -> list[int | None]:
    """For each input of the second part, the node of the first whose partial reductions it is."""
    return [int(x.name.removeprefix(_PARTIAL)) if x.name.startswith(_PARTIAL) else None for x in last.inputs]


# Choices.


@dataclasses.dataclass(frozen=True)
class Tile:
    m: int
    n: int
    pingpong: bool
    cluster: int = 1


# In the order in which ties are broken.
TILES = (
    Tile(128, 256, False),
    Tile(256, 128, False),
    Tile(128, 128, True),
    Tile(64, 256, True),
    Tile(64, 128, True),
    Tile(64, 128, True, 2),
    Tile(64, 64, True),
    Tile(64, 32, True),
)

# Of an H100, as measured with these kernels. Operations of an SM in a microsecond, and bytes of its copies, where few SMs work and where
# all do (power is the limit then); bytes that device memory gives in a microsecond, and what reading A again for other columns costs beside
# it; microseconds of a launch, more for each 64 x 128 of a tile and for clusters, and of a further turn.
_MULTIPLY = (7.2e6, 5.8e6)
_COPY = (130e3, 85e3)
_MEMORY, _AGAIN = 2.7e6, 400e6
_START, _START_TILE, _START_CLUSTER, _NEXT = 1.3, 0.4, 1.0, 0.5


def stages_of(tile: Tile) -> int:
    return min((SHARED_BYTES - _HEAD_BYTES) // ((tile.m + tile.n) * TILE_K_BYTES + 16), 12)


def legal(tile: Tile, b_major: str, gate: str, grouped: bool, prologue: bool) -> bool:
    box = tile.n // max(tile.cluster, 2 if gate == "halves" else 1)
    if b_major == "n" and box % 64:
        return False
    box = tile.n // (2 if gate == "halves" else 1)
    if gate and box % 32 or gate == "blocks" and tile.n % 64:
        return False
    if prologue and (tile.m != 64 and tile.pingpong or tile.m == 256):
        return False
    return not (grouped and (tile.pingpong or tile.cluster > 1))


def microseconds(tile: Tile, m: int, n: int, k_tiles: int, sms: int) -> float:
    """Of the model that tiles are chosen by: what the busiest SM multiplies or copies, what comes from memory, and the ends of tiles."""
    tiles = -(-m // (tile.m * tile.cluster)) * -(-n // tile.n)
    clusters = max(sms // tile.cluster, 1)
    turns = -(-tiles // clusters)
    busy = min(tiles * tile.cluster / sms, 1.0)
    share = min(max((busy - 0.5) / 0.4, 0.0), 1.0)  # of the way from few SMs to all
    multiply = 2.0 * tile.m * tile.n * 64 / (_MULTIPLY[0] + share * (_MULTIPLY[1] - _MULTIPLY[0]))
    copied = (tile.m + tile.n * (1.0 if tile.cluster == 1 else 0.75)) * TILE_K_BYTES
    copy = copied / (_COPY[0] + share * (_COPY[1] - _COPY[0]))
    memory = (m + n) * k_tiles * TILE_K_BYTES / _MEMORY + tiles * tile.m * k_tiles * TILE_K_BYTES / _AGAIN
    start = _START + _START_TILE * tile.m * tile.n / (64 * 128) + (_START_CLUSTER if tile.cluster > 1 else 0.0)
    return max(turns * k_tiles * max(multiply, copy), memory) + start + (turns - 1) * (0.0 if tile.pingpong else _NEXT)


GROUPED_TILES = (Tile(128, 256, False), Tile(128, 128, False), Tile(64, 128, False), Tile(64, 256, False))


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k_tiles: int, b_major: str, gate: str, experts: int, prologue: bool, sms: int) -> Tile:
    """The tile for a problem; ``n`` counts B's columns."""
    if experts:
        per_expert = max(m // experts, 1)
        fitting = [x for x in GROUPED_TILES if legal(x, b_major, gate, True, prologue)]
        rows = 64 if per_expert <= 64 else 128
        return next((x for x in fitting if x.m == rows), fitting[0])
    fitting = [x for x in TILES if legal(x, b_major, gate, False, prologue)]
    return min(fitting, key=lambda x: microseconds(x, max(m, 1), n, k_tiles, sms))


def choose_portable(m: int, n: int, sms: int) -> tuple[Tile, int]:
    """The tile of mma.sync's kernel, and its stages: 96 KB, which every architecture has."""
    large = -(-m // 128) * -(-n // 128) >= sms
    tile = Tile(128, 128, False) if large else Tile(64, 128 if -(-m // 64) * -(-n // 128) >= sms else 64, False)
    return tile, 3 if large else 4


def band_of(tile: Tile, m_tiles: int) -> int:
    """Tiles along m, in clusters, that are taken together: SMs then load what others have just loaded."""
    return min(max(1024 // (tile.m * tile.cluster), 4), max(m_tiles, 1))
