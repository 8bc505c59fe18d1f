"""cpp/configs/*.toml -> every kernel of the project, in table order.

[family]
name = "gemm"
[defaults]              fields of every row
elements = ["f16", "bf16"]
[[group]]               fields of the rows below it; they take the place of the defaults
arch = "sm90"
kernels = [             a row is the fields that are its own; they take the place of the group's
  { tile = [64, 8, 128], note = "m <= 8" },
]
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path

from codegen.families import FAMILIES
from codegen.formats import FORMATS_FILE
from codegen.kernel import Kernel
from codegen.row import Row
from codegen.toml import ConfigError, read_toml


def rows_of(table: dict, file: str) -> Iterator[Row]:
    """The rows of a table with all their fields, counted from 1 over all groups."""
    unknown = set(table) - {"family", "defaults", "group"}
    if unknown:
        raise ConfigError(f"{file}: a table of kernels has [family], [defaults] and [[group]], got {', '.join(sorted(unknown))}")
    number = 0
    for position, group in enumerate(table.get("group", []), start=1):
        kernels = group.get("kernels")
        if not isinstance(kernels, list) or not kernels or not all(isinstance(kernel, dict) for kernel in kernels):
            raise ConfigError(f"{file}: group {position}, kernels = {kernels!r}: must be a list of rows, {{ field = value, ... }} each")
        shared = {field: value for field, value in group.items() if field != "kernels"}
        for kernel in kernels:
            number += 1
            yield Row({**table.get("defaults", {}), **shared, **kernel}, f"{file}: kernel row {number}")
    if number == 0:
        raise ConfigError(f"{file}: has no rows")


def read_table(path: Path) -> list[Kernel]:
    """The kernels of one family's table; ConfigError where a row is illegal or says a kernel twice."""
    table = read_toml(path)
    family = table.get("family", {}).get("name")
    if family not in FAMILIES:
        raise ConfigError(f"{path.name}, [family] name = {family!r}: must be one of {', '.join(FAMILIES)}")
    kernels: list[Kernel] = []
    first_row: dict[str, int] = {}
    for number, row in enumerate(rows_of(table, path.name), start=1):
        for kernel in FAMILIES[family].expand(row):
            first = first_row.setdefault(kernel.name, number)
            if first != number:
                raise ConfigError(f"{row.where} repeats {kernel.name} of row {first}")
            kernels.append(kernel)
    return kernels


def read_tables(folder: Path) -> list[Kernel]:
    """The kernels of all tables of `folder`, files in name order."""
    paths = [path for path in sorted(folder.glob("*.toml")) if path.name != FORMATS_FILE.name]
    if not paths:
        raise ConfigError(f"{folder}: holds no kernel table (*.toml)")
    return [kernel for path in paths for kernel in read_table(path)]


def split_list(text: str) -> list[str]:
    """'a;b, c' -> ['a', 'b', 'c']."""
    return [item for item in text.replace(",", ";").replace(" ", ";").split(";") if item]


def select(kernels: list[Kernel], globs: str) -> list[Kernel]:
    """The kernels whose name matches one of the globs of a ';' list; all when it is empty. ConfigError for a glob without a match."""
    patterns = split_list(globs)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(kernel.name, pattern) for kernel in kernels):
            raise ConfigError(f"MINFER_KERNELS: no kernel matches '{pattern}'; list the names with: python cpp/codegen/generate.py --list")
    return [k for k in kernels if not patterns or any(fnmatch.fnmatchcase(k.name, p) for p in patterns)]


def buildable(kernels: list[Kernel], archs: list[str]) -> list[Kernel]:
    """Those that a build for `archs` ("80", "90a", ...) can hold."""
    return [kernel for kernel in kernels if any(kernel.is_built_for(arch) for arch in archs)]
