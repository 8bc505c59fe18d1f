"""What suites of drawn problems share: their list and its parts, and a results file that parts of it are merged into."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the generator")
    parser.add_argument("--limit", type=int, help="problems of each suite; default: all")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th problem from the i-th; parts are merged in --out")
    parser.add_argument("--resume", action="store_true", help="leave out problems that --out has rows of")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no problem is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the problems")


def part_of(text: str, count: int) -> range:
    """The places of the part "i/n" of ``count`` problems.

    Raises:
      ValueError: it is no such text, or i is not in 1 to n.
    """
    i, slash, n = text.partition("/")
    if not (slash and i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise ValueError(f"--part must be i/n with 1 <= i <= n, got {text!r}")
    return range(int(i) - 1, count, int(n))


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path is not None and path.exists() else []


@dataclass
class DrawnResults:
    """Rows of drawn suites. A row's ``seed`` and ``index`` say which problem it is of.

    Rows of the same suite and seed stay in the file until their problem is measured again; rows of another seed go. The head's ``suites``
    has each suite's seed, problems, how many of them the file has, and whether these are all.
    """

    path: Path | None
    facts: dict[str, Any]
    seed: int
    counts: dict[str, int]  # problems of each suite
    rows: list[dict[str, Any]] = field(default_factory=list)
    _written: float = field(default_factory=time.monotonic)

    def _is_ours(self, row: dict[str, Any]) -> bool:
        return row["suite"] not in self.counts or (row["seed"] == self.seed and row["index"] < self.counts[row["suite"]])

    def done(self) -> set[tuple[str, int]]:
        """(suite, index) of the problems that the file has rows of and that are not measured again."""
        return {(row["suite"], row["index"]) for row in read_rows(self.path) if self._is_ours(row)}

    def add(self, suite: str, index: int, rows: list[dict[str, Any]]) -> None:
        self.rows += [row | {"seed": self.seed, "index": index} for row in rows]
        if time.monotonic() - self._written > 5.0:
            self.write()

    def write(self) -> None:
        from minfer.measure import benchmarking

        self._written = time.monotonic()
        if self.path is None or not self.rows:
            return
        fresh = {(row["suite"], row["index"]) for row in self.rows}
        before = json.loads(self.path.read_text()).get("suites", {}) if self.path.exists() else {}
        done = self.done() | fresh
        suites = {}
        for name, count in self.counts.items():
            have = sum(suite == name for suite, _ in done)
            if have:
                suites[name] = {"seed": self.seed, "problems": count, "done": have, "complete": have == count}
        suites = {name: suite for name, suite in before.items() if name not in self.counts} | suites
        head = self.facts | {"suites": suites, "complete": all(suite["complete"] for suite in suites.values())}
        keeps = lambda row: self._is_ours(row) and (row["suite"], row["index"]) not in fresh  # noqa: E731
        benchmarking.write_results(self.path, self.rows, head, keeps=keeps)


def run(
    results: DrawnResults,
    args: argparse.Namespace,
    measure: Callable[[str, int], tuple[list[dict[str, Any]], str]],
    describe: Callable[[str, int], dict[str, Any]],
    chosen: Callable[[str, int], bool] = lambda suite, index: True,
) -> int:
    """Measures the part of every suite that the arguments ask for.

    Args:
      measure: rows of a problem, by suite and index, and a line to print.
      describe: fields of the row of a problem that failed: op, shape, dtype.
      chosen: which problems are measured.
    """
    import torch

    done = results.done() if args.resume else set()
    todo = [(s, i) for s, count in results.counts.items() for i in part_of(args.part, count) if (s, i) not in done and chosen(s, i)]
    begin, failed, started = time.monotonic(), 0, 0
    try:
        for suite, index in todo:
            if time.monotonic() - begin > args.time_limit:
                print(f"time limit: {len(todo) - started} problems were not started", flush=True)
                break
            started += 1
            try:
                rows, line = measure(suite, index)
            except Exception as error:  # noqa: BLE001  one problem's failure is a row, the others go on
                failed += 1
                what = f"{type(error).__name__}: {str(error)[:300]}"
                rows, line = [{"suite": suite, **describe(suite, index), "peer": "", "error": what}], f"FAILED {suite} {index}: {what}"
                results.add(suite, index, rows)
                torch.cuda.synchronize()  # raises again where the context is lost
            else:
                results.add(suite, index, rows)
            print(line, flush=True)
    finally:
        results.write()
    print(f"{started} problems in {time.monotonic() - begin:.0f} s, {failed} failed")
    return 1 if failed else 0
