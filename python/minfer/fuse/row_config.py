"""How a kernel of rows is launched: what the template takes, and what is chosen for a graph and a width."""

from __future__ import annotations

import dataclasses
import math

from .dtypes import bytes_of
from .graph import COLUMN, FULL, ROW, Graph


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """``columns`` is 0 where it is a parameter of the kernel. ``down``: a thread's vectors are of as many rows, at the same columns."""

    columns: int
    width: int
    vectors: int
    threads: int  # of a row, in each CTA
    rows: int  # of a CTA
    cluster: int
    down: bool = False

    @property
    def block(self) -> int:
        return self.threads * self.rows


TILE = 1024  # numbers in a stage of a ring
_RING_WARPS = 16
_RING_BYTES = 13 * 1024 + 512  # of a warp
_REGISTER_COLUMNS = 32768  # of rows up to which registers are as fast


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """Of kernels/ring.py: ``tiles`` of a row for each warp, in a ring of ``stages``."""

    columns: int
    warps: int
    tiles: int
    stages: int
    cluster: int

    @property
    def block(self) -> int:
        return 32 * self.warps


def configure_ring(graph: Graph, rows: int, columns: int, width: int, resident: int) -> RingConfig | None:
    """None where rows pass through registers: there are too few or too narrow ones, or they are not made of 16-byte pieces; or a row is
    one of several inputs, which leave fewer of its numbers in a ring, so that it needs more CTAs: clusters' registers were faster.

    Args:
      resident: SMs, which each hold one CTA.
    """
    streams = [x for x in graph.inputs if x.extent == FULL and x.rank < 0]
    if not graph.has_reductions() or columns <= _REGISTER_COLUMNS or width != 8 or len(streams) != 1:
        return None
    number_bytes = bytes_of(streams[0].storage)
    if number_bytes not in (2, 4):
        return None
    stages = _RING_BYTES // (TILE * number_bytes)
    for cluster in (1, 2, 4, 8):
        tiles = -(-columns // (TILE * _RING_WARPS * cluster))
        if tiles <= stages * 2 // 3:
            return RingConfig(columns, _RING_WARPS, tiles, stages, cluster) if rows >= resident // cluster else None
    return None


def resident_clusters(cluster: int, sms: int) -> int:
    """Of so many CTAs, one an SM: a cluster lies within a GPC, of which some SMs remain."""
    return max(sms // cluster if cluster < 4 else sms // cluster - sms // (8 * cluster), 1)


def parameters(graph: Graph) -> list[tuple[str, int]]:
    """The kernel's, in order: ("address", input), ("number", input), ("stride", input), ("out", output), ("out_stride", output), then
    ("rows", 0) and ("columns", 0)."""
    result: list[tuple[str, int]] = []
    for i, x in enumerate(graph.inputs):
        result.append(("number" if x.by_value else "address", i))
        if x.extent in (FULL, COLUMN):
            result.append(("stride", i))
    for i, y in enumerate(graph.outputs):
        if y.into < 0:
            result.append(("out", i))
            if y.extent in (FULL, COLUMN):
                result.append(("out_stride", i))
    return [*result, ("rows", 0), ("columns", 0)]


_VECTOR_BYTES = 16
_FEW_ROWS = 264  # two for each SM of an H100
_MANY_VECTORS = 160_000


def vector_width(graph: Graph, columns: int, alignments: list[int]) -> int:
    """Numbers of a vector: 16 bytes of the narrowest tensor of rows, at most 8 numbers, so many that the columns, and in bytes all
    addresses and strides, are multiples. ``alignments``: in numbers, of each tensor."""
    wide = [bytes_of(x.storage) for x in graph.inputs if x.extent in (FULL, ROW) and x.rank < 0]
    wide += [bytes_of(y.storage) for y in graph.outputs if y.extent in (FULL, ROW)]
    most = min(8, _VECTOR_BYTES // min(wide, default=4))
    return math.gcd(most, columns, *alignments)


def configure(graph: Graph, rows: int, columns: int, width: int, clusters: bool) -> RowConfig:
    """As the library's own kernels of rows: many rows take the least time with four vectors a thread, few with one or two and more
    threads; a row that is wider than a CTA's threads take has the CTAs of a cluster."""
    vectors = -(-columns // width)
    if not graph.has_reductions():
        many = rows * vectors >= _MANY_VECTORS
        if vectors <= 32:
            threads = _power_of_two(vectors)
            return RowConfig(0, width, 1, threads, (256 if many else 128) // threads, 1)
        down = _rows_below(graph)
        while down > 1 and rows * vectors < down * _MANY_VECTORS:
            down //= 2
        threads = _threads_for(vectors, 256 if many and down == 1 else 128)
        # Many CTAs of 128 threads with a vector each would start slower than memory takes their bytes.
        together = 256 // threads if many and down == 1 else 1
        return RowConfig(0, width, down, threads, together, 1, down > 1)
    if vectors <= 32:
        threads = _power_of_two(vectors)
        return RowConfig(columns, width, 1, threads, 128 // threads, 1)
    each = 2 if vectors <= 64 else 4 if rows > _FEW_ROWS or vectors > 2048 else 1 if vectors <= 1024 else 2
    cluster = 1
    while clusters and cluster < 8 and vectors > each * 1024 * cluster:
        cluster *= 2
    while vectors > each * 1024 * cluster:
        each *= 2
    threads = -(-vectors // (each * cluster * 32)) * 32
    together = 4 if threads == 32 and rows > _FEW_ROWS else 1  # CTAs of one warp would not fill an SM's warps
    return RowConfig(columns, width, each, threads, together, cluster)


def _rows_below(graph: Graph) -> int:
    """Rows that a thread takes at the same columns, so that it reads tensors of one row once: where these have as many bytes a column as
    what belongs to each row, their way from L2 would take longer than that from memory. What has one number a row is not for this."""
    tensors = [*(x for x in graph.inputs if not x.by_value and x.rank < 0), *graph.outputs]
    if any(x.extent not in (FULL, ROW) for x in tensors) or any(node.extent == COLUMN for node in graph.nodes):
        return 1
    if any(x.rank >= 0 for x in graph.inputs) or any(y.extent != FULL for y in graph.outputs):
        return 1
    shared = sum(bytes_of(x.storage) for x in graph.inputs if x.extent == ROW and not x.by_value)
    own = sum(bytes_of(x.storage) for x in tensors if x.extent == FULL)
    return 4 if shared >= own > 0 else 1


def _threads_for(vectors: int, most: int) -> int:
    """Up to `most`, of which in the last CTA of a row few have no vector: they would compute all the same. Few numbers of threads, since
    each is a kernel of its own."""
    unused = {threads: -vectors % threads / vectors for threads in (256, 128, 64) if threads <= most}
    return next((threads for threads, share in unused.items() if share <= 1 / 8), min(unused, key=unused.__getitem__))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
