"""Timing, error and results files, shared by the tuner and the suites under ``bench/``.

Protocol: CUDA-graph replays; operands rotated through more than three times the L2, so that every launch finds its inputs cold;
candidates replayed in turn (A B A B) in one process; median, p10 and p90 over the rounds. A host-timed loop would measure the
host for anything under 10 us, and separate runs differ by the GPU's power state more than two good kernels do.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROTOCOL = "CUDA-graph replays, inputs rotated through > 3x L2, peers interleaved, median of rounds"
L2_MULTIPLE = 3


# ---- error -----------------------------------------------------------------------------------------------------------------


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """||out - truth|| / ||truth|| in float64; ||out|| when truth is zero; inf when out is not finite where truth is."""
    out, truth = out.double(), truth.double()
    if out.numel() == 0:
        return 0.0
    difference = torch.linalg.vector_norm(out - truth).item()
    norm = torch.linalg.vector_norm(truth).item()
    if math.isnan(difference):
        return math.inf
    return difference / norm if norm > 0 else difference


def rounding_unit(dtype: torch.dtype) -> float:
    """Half the spacing of numbers at 1: what rounding once to ``dtype`` may cost, relatively."""
    return torch.finfo(dtype).eps / 2


# ---- rotated operands ------------------------------------------------------------------------------------------------------


def bytes_of(operands: Any) -> int:
    """Bytes of all tensors in a tensor, tuple, list, dict or dataclass, such as a quantised weight."""
    if isinstance(operands, torch.Tensor):
        return operands.numel() * operands.element_size()
    if isinstance(operands, dict):
        return sum(bytes_of(v) for v in operands.values())
    if isinstance(operands, (tuple, list)):
        return sum(bytes_of(v) for v in operands)
    if dataclasses.is_dataclass(operands):
        return sum(bytes_of(getattr(operands, f.name)) for f in dataclasses.fields(operands))
    return 0


def copies_to_flush(bytes_per_set: int, l2_bytes: int, *, most: int = 512) -> int:
    """How many sets of operands pass through the caches before one is used again: their bytes exceed three times the L2."""
    return max(1, min(most, math.ceil(L2_MULTIPLE * l2_bytes / max(bytes_per_set, 1)) + 1))


def rotation(make: Callable[[], Any], *, device: int | None = None, most: int = 512) -> list[Any]:
    """Sets of operands, ``make()`` called once for each, enough of them that a launch never finds its inputs in L2."""
    first = make()
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).L2_cache_size
    return [first] + [make() for _ in range(copies_to_flush(bytes_of(first), l2_bytes, most=most) - 1)]


# ---- time ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch over the rounds."""

    us: float  # median
    p10: float
    p90: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], tuple(samples))


class GraphTimer:
    """A CUDA graph of ``launches`` calls of ``fn``, one set of operands after the other; each replay is timed by events.

    Args:
      fn: called as ``fn(operands)`` for one set; must be capturable.
      sets: sets of operands from :func:`rotation`.
      launches: calls in the graph; rounded up to a whole number of rotations. Default: enough for ``target_us`` at ``estimate_us``.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        sets: Sequence[Any],
        *,
        launches: int | None = None,
        estimate_us: float = 10.0,
        target_us: float = 1000.0,
        most_launches: int = 1024,
    ):
        if not sets:
            raise ValueError("GraphTimer: sets must hold a set of operands or more, got none")
        if launches is None:
            launches = min(most_launches, math.ceil(target_us / max(estimate_us, 1.0)))
        self.launches = math.ceil(max(launches, len(sets)) / len(sets)) * len(sets)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fn(sets[0])  # what is set up on first use, cuBLAS's workspace for one, cannot be captured
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # Not `with torch.cuda.graph(...)`: it collects garbage and empties the allocator's cache, some 50 ms a candidate.
            self._graph.capture_begin()
            try:
                for i in range(self.launches):
                    fn(sets[i % len(sets)])
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def replay_us(self) -> float:
        """Replays once and returns microseconds per launch; waits for the end."""
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1000.0 / self.launches


def interleave(timers: Iterable[GraphTimer], rounds: int = 20, *, warm_up: int = 2, rest_ms: float = 0.0) -> list[Timing]:
    """Replays the timers in turn, ``rounds`` times; the order is reversed every other round, so none always follows the same one.

    ``rest_ms`` idles the card before each replay: many contestants of dense arithmetic in a row run it into its power limit, where other
    kernels win than in a burst of one or two milliseconds.
    """
    timers = list(timers)
    samples: list[list[float]] = [[] for _ in timers]
    for _ in range(warm_up):
        for timer in timers:
            timer.replay_us()
    for i in range(rounds):
        order = range(len(timers)) if i % 2 == 0 else reversed(range(len(timers)))
        for j in order:
            if rest_ms > 0:
                time.sleep(rest_ms / 1000)
            samples[j].append(timers[j].replay_us())
    return [Timing.of(s) for s in samples]


def compare(fns: Sequence[Callable[[Any], Any]], sets: Sequence[Any], *, rounds: int = 20, target_us: float = 1000.0) -> list[Timing]:
    """Times several functions of the same operands against each other: one GraphTimer each, interleaved."""
    return interleave([GraphTimer(fn, sets, estimate_us=estimate_us(fn, sets), target_us=target_us) for fn in fns], rounds)


def estimate_us(fn: Callable[[Any], Any], sets: Sequence[Any]) -> float:
    """A rough time of one eager call, host included; to size a graph."""
    fn(sets[0])
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(4):
        fn(sets[i % len(sets)])
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000.0 / 4


# ---- results files ---------------------------------------------------------------------------------------------------------


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def driver_version() -> str:
    """The NVIDIA driver's version, for example 580.65.06; "unknown" where nvidia-smi does not say."""
    answer = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else "unknown"


def source_commit() -> str:
    """Commit of the working directory's repository, "-dirty" behind it when files differ; "unknown" outside one."""
    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("-dirty" if _output_of("git", "status", "--porcelain", "--untracked-files=no") else "")


def run_facts() -> dict[str, str]:
    """Head of a results file: device, driver, torch, cuda, commit, date, protocol."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": driver_version() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": source_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "protocol": PROTOCOL,
    }


def result_row(
    *,
    suite: str,
    op: str,
    kernel: str,
    shape: dict[str, Any],
    dtype: str,
    timing: Timing,
    peer: str,
    peer_us: float,
    floor_us: float,
    rel_err: float,
) -> dict[str, Any]:
    """One row: one shape, one peer. ratio = peer_us / us (> 1: ours is faster), fraction = floor_us / us."""
    return {
        "suite": suite,
        "op": op,
        "kernel": kernel,
        "shape": shape,
        "dtype": dtype,
        "us": round(timing.us, 3),
        "p10": round(timing.p10, 3),
        "p90": round(timing.p90, 3),
        "peer": peer,
        "peer_us": round(peer_us, 3),
        "ratio": round(peer_us / timing.us, 4),
        "floor_us": round(floor_us, 3),
        "fraction": round(floor_us / timing.us, 4),
        "rel_err": float(f"{rel_err:.3e}"),
    }


def write_results(
    path: str | Path,
    rows: Sequence[dict[str, Any]],
    facts: dict[str, Any] | None = None,
    *,
    keeps: Callable[[dict[str, Any]], bool] | None = None,
) -> None:
    """Writes rows to a results file; (suite, peer) pairs that the rows do not contain keep theirs, the head becomes this run's.

    keeps: which rows of the file stay, where that is another choice.

    A kept row that was measured at another commit than the head's says so in its own "commit". One row per line, so that a diff shows
    which shapes moved.
    """
    path = Path(path)
    head = facts or run_facts()
    fresh = {(row["suite"], row.get("peer")) for row in rows}
    before = json.loads(path.read_text()) if path.exists() else {"rows": []}
    kept = []
    for row in before["rows"]:
        if not (keeps(row) if keeps else (row["suite"], row.get("peer")) not in fresh):
            continue
        commit = row.get("commit", before["commit"])
        own = {} if commit == head["commit"] else {"commit": commit}
        kept.append({key: value for key, value in row.items() if key != "commit"} | own)
    lines = ",\n".join("  " + json.dumps(row) for row in [*kept, *rows])
    fields = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + fields + ' "rows": [\n' + lines + "\n ]\n}\n")


def geomean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else math.nan
