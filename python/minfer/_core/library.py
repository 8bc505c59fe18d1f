"""Loading the compiled library, which registers the schemas and the CUDA kernels of ``torch.ops.minfer``."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)


def check_environment() -> None:
    """The library reads these once and takes what it does not know for the default, which nobody would notice."""
    flag = ("0", "1")
    names = {"MINFER_TUNED": flag, "MINFER_PDL": flag, "MINFER_BATCH_INVARIANT": flag, "MINFER_FORCE_ARCH": ("80", "90")}
    for name, legal in names.items():
        value = os.environ.get(name, "")
        if value and value not in legal:
            raise ImportError(f"minfer: the environment variable {name} must be {' or '.join(legal)}, got {value!r}")


def load_library(folders: Iterable[str]) -> None:
    """Loads ``_C.so`` from the first of the package's ``folders`` that holds it.

    Raises:
      ImportError: torch is older than the stable ABI that the library was built for, or the package was not built.
    """
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"minfer needs torch >= {oldest} (its library is built for that stable ABI), found torch {torch.__version__}")
    folders = list(folders)  # an editable install has two: the sources, and the place of what was compiled
    for folder in folders:
        library = Path(folder) / "_C.so"
        if library.is_file():
            torch.ops.load_library(library)
            return
    raise ImportError(f"minfer: _C.so is not in {', '.join(folders)}: the package was not built; run `pip install .` in its repository")


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Leaves the garbage collector out. What an import makes stays, but there is enough of it for a collection of all objects, torch's
    included: with Python 3.10 that took 0.15 s of the 0.34 s that importing minfer took."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
