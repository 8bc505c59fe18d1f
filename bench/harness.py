"""What the evidence suites share: operands carved from arenas, interleaved timing behind a full queue, results written as they come.

The protocol is that of ``minfer.measure.benchmarking`` (CUDA-graph replays, operands rotated through three L2s, contestants in turn). A
suite of hundreds of cells has to fit in minutes, so operands are carved from arenas that are filled once, and every replay of a round is
enqueued before the first starts: none is charged the launch latency of a graph on an idle GPU, and the host stays out of the way.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from minfer.measure import benchmarking
from minfer.measure.benchmarking import Timing

CARVE_BYTES = 256  # alignment of a carved tensor: what an allocation of its own would have
LEAST_ROUNDS = 7
SPIN_CYCLES_PER_US = 2000  # torch._sleep counts SM clocks; a little over the H200's 1.98 GHz


# ---- operands ----------------------------------------------------------------------------------------------------------------


class Arena:
    """One allocation of random normal numbers (or of nothing in particular), carved afresh for every cell."""

    def __init__(self, dtype: torch.dtype, elements: int, deviation: float | None, device: str = "cuda"):
        self._data = torch.empty(elements, dtype=dtype, device=device)
        if deviation is not None:
            self._data.normal_(0.0, deviation)
        self._step = CARVE_BYTES // dtype.itemsize
        self._used = 0

    @staticmethod
    def footprint(elements: int, dtype: torch.dtype) -> int:
        """Elements that a tensor takes with its padding."""
        step = CARVE_BYTES // dtype.itemsize
        return -(-elements // step) * step

    def reset(self) -> None:
        self._used = 0

    def take(self, *shape: int) -> torch.Tensor:
        count = 1
        for extent in shape:
            count *= extent
        if self._used + count > self._data.numel():
            raise MemoryError(f"arena of {self._data.numel()} elements has no room for {list(shape)} after {self._used}")
        taken = self._data[self._used : self._used + count].view(shape)
        self._used += self.footprint(count, self._data.dtype)
        return taken


def windows(data: torch.Tensor, shape: Sequence[int], count: int) -> list[torch.Tensor]:
    """``count`` views of ``shape`` of a long vector: behind each other as long as it has room, then again from its begin on, at other
    places. Views of more bytes than the L2s hold may overlap and still find none of their numbers there."""
    numbers = math.prod(shape)
    step = CARVE_BYTES // data.element_size()
    size = -(-numbers // step) * step
    if numbers > data.numel():
        raise MemoryError(f"a vector of {data.numel()} elements has no room for {list(shape)}")
    starts = (data.numel() - numbers) // step * step + step
    return [data[begin : begin + numbers].view(shape) for begin in (i * size % starts for i in range(count))]


def sets_for(bytes_per_set: int, *, least: int = 2) -> int:
    """Sets of operands to rotate through: three L2s' worth of bytes, and never only one."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(least, benchmarking.copies_to_flush(bytes_per_set, l2_bytes))


# ---- time --------------------------------------------------------------------------------------------------------------------


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One stream for every capture: cuBLAS keeps a workspace of 32 MB for each stream it has seen."""
    return torch.cuda.Stream()


class Graph:
    """A CUDA graph of ``launches`` calls ``fn(set)`` that walk the sets, and the events around its replays."""

    def __init__(self, fn: Callable[[int], Any], sets: int, launches: int, stream: torch.cuda.Stream, pool: Any):
        self.launches = launches
        self._graph = torch.cuda.CUDAGraph()
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            # torch.cuda.graph() would empty the allocator's cache each time.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for i in range(launches):
                    fn(i % sets)
            except BaseException:
                try:
                    self._graph.capture_end()
                except RuntimeError:
                    pass  # a capture that failed says so again when it ends; the first error is the one that matters
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        self._begin.record()
        self._graph.replay()
        self._end.record()

    def elapsed_us(self) -> float:
        return self._begin.elapsed_time(self._end) * 1000.0 / self.launches


def capture(fn: Callable[[int], Any], sets: int, graph_us: float, stream: torch.cuda.Stream, pool: Any) -> tuple[Graph, float]:
    """A graph of about ``graph_us`` of work, a whole number of rotations, and a first estimate of one launch's time."""
    with torch.cuda.stream(stream):
        fn(0)
        stream.synchronize()
        once = Graph(fn, sets, sets, stream, pool)
        once.replay()
        once.replay()
        stream.synchronize()
        estimate = once.elapsed_us()
    rotations = round(graph_us / max(estimate * sets, 0.5))
    return (once if rotations <= 1 else Graph(fn, sets, sets * rotations, stream, pool)), estimate


def order_of(names: Sequence[str], turn: int) -> list[str]:
    """The contestants in the order of a turn. In as many turns as there are contestants (twice as many, where their number is odd) each
    follows each other one equally often, and is equally often in each place (Williams, 1949). In a rotation each would always follow the
    same one, whose heat and clocks, near the power limit, it may be left with."""
    count = len(names)
    places = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]  # 0, 1, -1, 2, -2, ..
    if count % 2 and turn // count % 2:
        places.reverse()
    return [names[(place + turn) % count] for place in places]


def measure(
    contestants: Mapping[str, Callable[[int], Any]], sets: int, *, rounds: int = 15, graph_us: float = 800.0
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times the contestants against each other.

    Args:
      contestants: name -> ``fn(set)``; each must be capturable.
      sets: sets of operands that they walk.
      rounds: replays of each, at least as many as there are contestants; fewer where one replay takes much longer than ``graph_us``.
      graph_us: work in one replay.

    Returns:
      Timing of one launch by name, and by name the error of those that could not be captured.
    """
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[str, Graph] = {}
    failed: dict[str, str] = {}
    longest = 0.0
    for name, fn in contestants.items():
        try:
            graphs[name], estimate = capture(fn, sets, graph_us, stream, pool)
            longest = max(longest, estimate * sets)
        except Exception as error:  # a peer's library may raise anything; a lost context raises again at once
            forget_error()
            failed[name] = f"{type(error).__name__}: {error}"
    if longest > graph_us:
        rounds = max(min(rounds, LEAST_ROUNDS), round(rounds * graph_us / longest))
    rounds = max(rounds, len(graphs))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    with torch.cuda.stream(stream):
        for i in range(-1, rounds):  # the first round warms up
            torch.cuda._sleep((20 + 40 * len(names)) * SPIN_CYCLES_PER_US)
            for name in order_of(names, i + 1):
                graphs[name].replay()
            stream.synchronize()
            if i >= 0:
                for name in names:
                    samples[name].append(graphs[name].elapsed_us())
    torch.cuda.current_stream().wait_stream(stream)
    return {name: Timing.of(s) for name, s in samples.items()}, failed


def forget_error() -> None:
    """After a launch that failed, which CUDA reports once more to whoever launches next. Raises where the context is lost."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def _eager_us(fn: Callable[[int], Any], sets: int, stream: torch.cuda.Stream) -> float:
    """Of one call, host included, after one that is not timed."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        fn(0)
        begin.record()
        fn(1 % sets)
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000.0


def brief_times(
    contestants: Mapping[str, Callable[[int], Any]], sets: int, *, rounds: int = 4, graph_us: float = 200.0, slow: float = 3.0
) -> tuple[dict[str, float], dict[str, str]]:
    """Times of many contestants, in turn: the least of a few brief replays each, which tells better from worse by a few percent.

    Args:
      contestants: name -> ``fn(set)``; each must be capturable.
      sets: sets of operands that they walk.
      rounds: replays of each.
      graph_us: work in one replay.
      slow: contestants whose first call takes this many times as long as the best one before are not captured: their time is that call's.

    Returns:
      Microseconds of one launch by name, and by name the error of those that did not run.
    """
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[str, Graph] = {}
    us: dict[str, float] = {}
    failed: dict[str, str] = {}
    best = math.inf
    for name, fn in contestants.items():
        try:
            once = _eager_us(fn, sets, stream)
            if once > max(slow * best, 500.0):  # the host takes up to some 100 us of it
                us[name] = once
                continue
            graphs[name], estimate = capture(fn, sets, graph_us, stream, pool)
            best = min(best, estimate)
        except Exception as error:  # noqa: BLE001  whatever it is; a lost context raises again at once
            forget_error()
            failed[name] = f"{type(error).__name__}: {error}"
    names = list(graphs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with torch.cuda.stream(stream):
        for i in range(rounds):
            torch.cuda._sleep((20 + 40 * len(names)) * SPIN_CYCLES_PER_US)
            for name in order_of(names, i):
                graphs[name].replay()
            stream.synchronize()
            for name in names:
                samples[name].append(graphs[name].elapsed_us())
    torch.cuda.current_stream().wait_stream(stream)
    return us | {name: min(of_name) for name, of_name in samples.items()}, failed


# ---- results -----------------------------------------------------------------------------------------------------------------


class Results:
    """Rows of a run, merged into a results file seconds after they are measured (:func:`minfer.measure.benchmarking.write_results`)."""

    def __init__(self, path: Path | None, commit: str | None = None):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.facts = benchmarking.run_facts()
        if commit:
            self.facts["commit"] = commit
        self._written = time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if time.monotonic() - self._written > 5.0:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        if self.path is None or not self.rows:
            return
        benchmarking.write_results(self.path, self.rows, self.facts)


class Budget:
    """Seconds that a peer may spend on getting ready (autotuning, compiling) over the whole run; then its other cells go unmeasured."""

    def __init__(self, seconds: Mapping[str, float]):
        self._left = dict(seconds)
        self.left_out: dict[str, int] = {}

    def spent(self, peer: str) -> bool:
        if self._left.get(peer, 1.0) > 0:
            return False
        self.left_out[peer] = self.left_out.get(peer, 0) + 1
        return True

    def charge(self, peer: str, seconds: float) -> None:
        if peer in self._left:
            self._left[peer] -= seconds
