"""Kernels in the folder of an export: a file for each, as the cache has them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from . import cache
from .artifact import Artifact
from .errors import FuseError


def key_of(*what: Any) -> str:
    """By what a kernel computes and how, as plain data: without the versions that it was compiled by."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def write(folder: Path, kernels: dict[str, Artifact]) -> None:
    """By their keys, into a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, artifact in kernels.items():
        _path(folder, key).write_bytes(cache.pack(key, artifact))


def read(function: str, folder: Path, key: str) -> Artifact:
    path = _path(folder, key)
    try:
        return cache.unpack(key, path.read_bytes())
    except (OSError, ValueError) as error:
        raise FuseError(f"{function}: {path} cannot be loaded: {error}") from None


def remove_others(folder: Path, keys: set[str]) -> None:
    """What an earlier export has left."""
    for path in folder.glob("*.kernel"):
        if path.stem not in keys:
            path.unlink()


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.kernel"
