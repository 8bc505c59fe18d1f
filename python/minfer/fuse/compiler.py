"""Kernels by what they compute: of this process, else of the disk, else compiled, by several processes where there are several."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cache
from .artifact import Artifact
from .graph import Graph

log = logging.getLogger("minfer.fuse")
_OLDEST, _BEFORE = (4, 8), (5,)
_PROGRESS_AFTER = 1.0  # seconds


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is compiled: a template, its configuration as plain data, and the graph."""

    template: str
    graph: Graph
    config: tuple[tuple[str, Any], ...]
    architecture: str
    name: str

    @staticmethod
    def of(template: str, graph: Graph, config: Any, architecture: str, name: str) -> Kernel:
        """``config`` is the template's dataclass."""
        return Kernel(template, graph, tuple(sorted(dataclasses.asdict(config).items())), architecture, name)

    def key(self) -> str:
        """By which it is found: all that its code depends on."""
        what = [self.template, self.graph.text(), list(self.config), self.architecture, self.name, dsl_version(), _templates()]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


@functools.cache
def dsl_version() -> str:
    """@raise ImportError where the DSL is missing or has another version than the templates are for."""
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "minfer.fuse: kernels are compiled by the CuTe DSL, which is not installed: pip install minfer[dsl]. "
            "Functions that minfer.fuse.export has written are loaded without it, and on CPU tensors nothing is compiled"
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not _OLDEST <= numbers < _BEFORE:
        raise ImportError(f"minfer.fuse: needs nvidia-cutlass-dsl >= {'.'.join(map(str, _OLDEST))}, < {_BEFORE[0]}, got {version}")
    return version


@functools.cache
def _templates() -> str:
    """The sources that kernels and the order of their parameters follow from: all of the package, so that none is forgotten."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


_known: dict[Kernel, Artifact] = {}
_lock = threading.Lock()


def compiled(kernel: Kernel) -> Artifact:
    """Of one kernel."""
    return compile_all([kernel])[0]


def compile_all(kernels: Sequence[Kernel], processes: int | None = None) -> list[Artifact]:
    """Of several, in parallel where more than one is not known yet. What takes longer than a second shows its progress.

    Args:
      processes: that compile; None: as many as this process has cores.
    """
    with _lock:
        missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in _known]
        rest = []
        for kernel in missing:
            artifact = cache.load(kernel.key())
            if artifact is None:
                rest.append(kernel)
            else:
                _known[kernel] = artifact
        if rest:
            _compile(rest, processes)
        return [_known[kernel] for kernel in kernels]


def _compile(kernels: list[Kernel], processes: int | None) -> None:
    started = time.perf_counter()
    cores = processes or len(os.sched_getaffinity(0))
    with _Progress(len(kernels)) as progress:
        if len(kernels) < 4 or cores == 1:  # a process takes a second to start
            for kernel in kernels:
                _keep(kernel, build(kernel))
                progress.advance()
        else:
            import concurrent.futures
            import multiprocessing

            with concurrent.futures.ProcessPoolExecutor(min(cores, len(kernels)), multiprocessing.get_context("spawn")) as pool:
                futures = {pool.submit(build, kernel): kernel for kernel in kernels}
                for future in concurrent.futures.as_completed(futures):
                    _keep(futures[future], future.result())
                    progress.advance()
    log.info("compiled %d kernels in %.2f s", len(kernels), time.perf_counter() - started)


def _keep(kernel: Kernel, artifact: Artifact) -> None:
    cache.store(kernel.key(), artifact)
    _known[kernel] = artifact


def build(kernel: Kernel) -> Artifact:
    """Compiles, whatever is known."""
    dsl_version()
    import importlib

    started = time.perf_counter()
    template = importlib.import_module(f"{__package__}.kernels.{kernel.template}")
    artifact = template.build(kernel.graph, dict(kernel.config), name=kernel.name, architecture=kernel.architecture)
    log.info("%s for %s: %s, compiled in %.2f s", kernel.name, kernel.architecture, dict(kernel.config), time.perf_counter() - started)
    return artifact


class _Progress:
    """A bar that appears when a second has gone by."""

    def __init__(self, total: int):
        self.total, self.done, self.bar, self.task = total, 0, None, None
        self.timer = threading.Timer(_PROGRESS_AFTER, self._show)
        self.timer.daemon = True

    def _show(self) -> None:
        import sys

        from rich.console import Console
        from rich.progress import Progress

        if sys.stderr.isatty():
            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("minfer.fuse: compiling", total=self.total, completed=self.done)
            self.bar.start()

    def advance(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)

    def __enter__(self) -> _Progress:
        self.timer.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.timer.cancel()
        if self.bar is not None:
            self.bar.stop()
