"""Watches a worker process: a crash, a lost CUDA context or a hang costs one case, is reported with the line that reproduces it, and the
run goes on."""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .worker import Plan, work

START = 300.0  # seconds that a worker may take to be ready


@dataclass
class Tally:
    cases: int = 0
    comparisons: int = 0
    failures: int = 0
    kinds: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def run(
    plan: Plan, *, seconds: float | None, cases: int | None, patience: float, report: Callable[[dict[str, Any]], None]
) -> dict[str, Tally]:
    """Runs cases until time or their number is over; ``report`` is told of each one's result. Returns what each family came to."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    done, deadline = 0, None
    watched = _Watched(plan, patience)
    try:
        for result in watched.results():
            if deadline is None and seconds is not None:
                deadline = time.monotonic() + seconds  # from the first result on: starting is not testing
            tally = tallies[result["name"].partition(":")[0]]
            tally.cases += 1
            tally.comparisons += result["comparisons"]
            tally.failures += bool(result["failures"])
            tally.kinds[result["kind"]] += 1
            report(result)
            done += 1
            if (cases is not None and done >= cases) or (deadline is not None and time.monotonic() >= deadline):
                break
    finally:
        watched.end()
    return dict(tallies)


class _Watched:
    def __init__(self, plan: Plan, patience: float):
        self.plan, self.patience = plan, patience
        self.context = multiprocessing.get_context("spawn")
        self.process: multiprocessing.process.BaseProcess | None = None

    def end(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()
            self.process.join()

    def results(self) -> Iterator[dict[str, Any]]:
        index, lost_starts = self.plan.first, 0
        while True:
            ours, theirs = self.context.Pipe()
            self.process = self.context.Process(target=work, args=(replace(self.plan, first=index), theirs), daemon=True)
            self.process.start()
            theirs.close()
            running: str | None = None
            ready, drawn = False, ""
            while True:
                try:
                    if not ours.poll(self.patience if ready else START):
                        fate = f"hangs: no answer within {self.patience if ready else START:.0f} s"
                        break
                    message = ours.recv()
                except (EOFError, OSError):
                    self.process.join(10)
                    fate = f"ended the process (exit code {self.process.exitcode})"
                    break
                if message[0] == "ready":
                    ready = True
                elif message[0] == "begin":
                    index, running, drawn = message[1], message[2], ""
                elif message[0] == "drawn":
                    drawn = message[1]
                elif message[0] == "end":
                    index, running = message[1] + 1, None
                    lost_starts = 0
                    yield message[2]
                else:
                    return
            self.end()
            ours.close()
            if running is not None:
                index += 1
                yield {
                    "name": running,
                    "kind": "legal",
                    "parameters": drawn,
                    "comparisons": 0,
                    "failures": [fate],
                    "fatal": True,
                    "seconds": 0.0,
                }
            elif not ready:
                lost_starts += 1
                if lost_starts > 2:
                    raise RuntimeError(f"the worker does not start: it {fate}")
