"""Fused functions as files: kernels and what they compute, for processes without the DSL and without the Python function.

A folder holds ``manifest.json`` and a file for each kernel, as the cache has them, with checksums.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import attention_export, gemm_export, kernel_files, row_export
from .attention_function import AttentionFunction
from .compiler import dsl_version
from .errors import FuseError
from .gemm_function import GemmFunction
from .launch import architecture
from .row_function import RowFunction

_FORMAT = 1
_MANIFEST = "manifest.json"
_FAMILIES: dict[type, Any] = {RowFunction: row_export, GemmFunction: gemm_export, AttentionFunction: attention_export}


def export(
    function: RowFunction | GemmFunction | AttentionFunction, folder: str | Path, examples: Iterable[Any], *,
    archs: Sequence[str] | None = None,
) -> Path:  # fmt: skip
    """Writes what calls like the examples need, with any number of rows.

    Args:
      function: of :func:`minfer.fuse.pointwise`, :func:`minfer.fuse.rowwise` or :func:`minfer.fuse.gemm_epilogue`, or a
        :class:`minfer.fuse.AttentionFunction`.
      folder: is made, and must be empty or hold an earlier export.
      examples: tuples of arguments, bound as calls are; their tensors may be on the meta device. Dtypes, which tensors broadcast, the
        constants and, with reductions, the width are those that the loaded function takes. Of attention, as in precompile().
      archs: "sm_90a" and so on; None: of the current device.

    Returns:
      The folder.

    Raises:
      FuseError: where the folder holds other files, or no example is given.
      ImportError: without the DSL.
    """
    folder, examples = Path(folder), list(examples)
    if not examples:
        raise FuseError("export: needs an example of a call")
    if folder.exists() and any(folder.iterdir()) and not (folder / _MANIFEST).exists():
        raise FuseError(f"export: {folder} must be empty or hold an export, it has other files")
    if archs is None:
        archs = [architecture(torch.cuda.current_device())]
    family = next(family for kind, family in _FAMILIES.items() if isinstance(function, kind))
    manifest, kernels = family.write(function, folder, examples, archs)
    manifest = {"format": _FORMAT, **manifest, "dsl": dsl_version()}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    kernel_files.remove_others(folder, kernels)
    return folder


def load(folder: str | Path) -> RowFunction | GemmFunction | AttentionFunction:
    """The function that :func:`export` wrote: called in the same way, on any torch that minfer runs on, without the DSL.

    Raises:
      FuseError: for a folder without an export, or of another format; at a call, for what was not exported.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise FuseError(f"load: {folder} holds no export of minfer.fuse: {error}") from None
    if manifest.get("format") != _FORMAT:
        raise FuseError(f"load: {folder} has the format {manifest.get('format')}, this version reads {_FORMAT}")
    if manifest.get("kind") == "gemm":
        return gemm_export.LoadedGemmFunction(folder, manifest)
    if manifest.get("kind") == "attention":
        return attention_export.LoadedAttention(folder, manifest)
    return row_export.LoadedRowFunction(folder, manifest)
