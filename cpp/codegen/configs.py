"""cpp/configs/*.toml -> every kernel of the project, in table order."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from codegen.families import (
    attention,
    gemm,
    grouped_gemm as moe,
    grouped_quantized_gemm as moe_w4a16,
    quantized_gemm as w4a16,
)
from codegen.kernel import ConfigError, Kernel

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        tomllib = None

FAMILIES = {"attention": attention, "gemm": gemm, "moe": moe, "moe_w4a16": moe_w4a16, "w4a16": w4a16}


def read_table(path: Path) -> list[Kernel]:
    """The kernels of one family's table; ConfigError where a row is illegal or says a kernel twice."""
    if tomllib is None:
        raise ConfigError("Reading the kernel tables on Python 3.10 needs tomli: pip install tomli, or use Python 3.11 or newer")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    family = table.get("family", {}).get("name")
    if family not in FAMILIES:
        raise ConfigError(f"{path.name}, [family] name = {family!r}: must be one of {', '.join(FAMILIES)}")
    rows = table.get("kernel", [])
    if not rows:
        raise ConfigError(f"{path.name}: has no [[kernel]] rows")
    kernels: list[Kernel] = []
    first_row: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        for kernel in FAMILIES[family].expand(row, f"{path.name}: kernel row {number}"):
            first = first_row.setdefault(kernel.name, number)
            if first != number:
                raise ConfigError(f"{path.name}: kernel row {number} repeats {kernel.name} of row {first}")
            kernels.append(kernel)
    return kernels


def read_tables(folder: Path) -> list[Kernel]:
    """The kernels of all tables of `folder`, files in name order."""
    paths = sorted(folder.glob("*.toml"))
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
    """Those that a build for `archs` ("80", "90a", ...) can hold: sm90 kernels need 90a, sm80 ones take any, of attention any but 90a."""

    def has_code(kernel: Kernel) -> bool:
        if kernel.arch == 90:
            return "90a" in archs
        return any(arch != "90a" or not kernel.skips_sm90a for arch in archs)

    return [kernel for kernel in kernels if has_code(kernel)]
