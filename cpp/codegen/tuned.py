"""cpp/configs/tuned/<device>.csv -> tuned_table.cpp: the measured rows that ship, sorted by problem."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from codegen.formats import project_formats
from codegen.kernel import MAJORS, Kernel, cpp_bool, cpp_string
from codegen.shards import BANNER
from codegen.toml import ConfigError

COLUMNS = (
    "op,m,n,k,batch,ab_type,a_major,b_major,b_format,group_size,has_zeros,has_c,gated,kernel,decomposition,splits,swizzle,raster,columns,us"
).split(",")
OPS = {"gemm": False, "w4a16_gemm": True}  # whether B is quantised
DECOMPOSITIONS = {
    "persistent": "Decomposition::kDataParallel",
    "stream_k": "Decomposition::kStreamK",
    "split_k": "Decomposition::kSplitK",
}
RASTERS = {"along_m": "RasterOrder::kAlongM", "along_n": "RasterOrder::kAlongN"}
BOOLS = {"0": False, "1": True}
MOST_SWIZZLE = 16


@dataclass(frozen=True)
class TunedRow:
    m: int
    n: int
    k: int
    batch: int
    ab_type: str
    a_major: str
    b_major: str
    b_format: str
    group_size: int  # quantised B: k of a scale; 0: all of k, and where B is dense
    has_zeros: bool
    has_c: bool
    gated: bool
    kernel: str
    decomposition: str
    splits: int
    swizzle: int
    raster: str
    columns: int  # of a tile, where launches choose them; else 0
    us: float

    @property
    def key(self) -> tuple:
        """The problem, in the order of minfer::GemmTunedRow's fields; enumerators compare by their C++ value, as in the sorted table."""
        majors, formats = list(MAJORS), project_formats()
        enums = (list(formats.elements).index(self.ab_type), majors.index(self.a_major), majors.index(self.b_major))
        weights = (list(formats.formats).index(self.b_format), self.group_size, self.has_zeros)
        return (self.m, self.n, self.k, self.batch, *enums, *weights, self.has_c, self.gated)


def read_csv(path: Path, kernels: dict[str, Kernel]) -> list[TunedRow]:
    """A device's rows, sorted by key. ConfigError for a malformed value, an unknown kernel or one of another problem, a repeated key."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", path.stem):
        raise ConfigError(f"tuned/{path.name}: a table must be named as minfer::device_file_name names its device, such as nvidia-h200.csv")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise ConfigError(f"tuned/{path.name}: the header must be {','.join(COLUMNS)}, got {','.join(reader.fieldnames or [])}")
        rows: dict[tuple, TunedRow] = {}
        for fields in reader:
            where = f"tuned/{path.name}: line {reader.line_num}"
            row = _parse(fields, where)
            _check_kernel(row, kernels, where)
            if row.key in rows:
                raise ConfigError(f"{where}: repeats the problem of an earlier line ({', '.join(map(str, row.key))})")
            rows[row.key] = row
    return [rows[key] for key in sorted(rows)]


def _parse(fields: dict, where: str) -> TunedRow:
    def choice(column: str, allowed):
        if fields[column] not in allowed:
            raise ConfigError(f"{where}, {column} = {fields[column]!r}: must be one of {', '.join(allowed)}")
        return fields[column]

    def number(column: str, kind=int, least=1):
        try:
            value = kind(fields[column])
        except (TypeError, ValueError):
            value = None
        if value is None or not least <= value < 2**63:
            raise ConfigError(f"{where}, {column} = {fields[column]!r}: must be a number >= {least}")
        return value

    if None in fields or None in fields.values():
        raise ConfigError(f"{where}: must have {len(COLUMNS)} columns")
    choice("op", OPS)
    swizzle = number("swizzle")
    if not 1 <= swizzle <= MOST_SWIZZLE:
        raise ConfigError(f"{where}, swizzle = {swizzle}: must be 1 to {MOST_SWIZZLE}")
    return TunedRow(
        **{column: number(column) for column in ("m", "n", "k", "batch", "splits")},
        **{column: BOOLS[choice(column, BOOLS)] for column in ("has_zeros", "has_c", "gated")},
        ab_type=choice("ab_type", project_formats().elements),
        a_major=choice("a_major", MAJORS),
        b_major=choice("b_major", MAJORS),
        b_format=choice("b_format", project_formats().weights if OPS[fields["op"]] else ["dense"]),
        group_size=_group_size(fields, where),
        kernel=fields["kernel"],
        decomposition=choice("decomposition", DECOMPOSITIONS),
        swizzle=swizzle,
        raster=choice("raster", RASTERS),
        columns=number("columns", least=0),
        us=number("us", float, 0),
    )


def _group_size(fields: dict, where: str) -> int:
    """Dense: 0. Quantised: what the format prescribes, -1 for all of k, which is 0 here, or a power of two from 32 on and less than k."""
    text, powers = fields["group_size"], [str(1 << i) for i in range(5, 31)]
    if not OPS[fields["op"]]:
        if text != "0" or fields["has_zeros"] != "0":
            raise ConfigError(f"{where}: a dense B has group_size = 0 and has_zeros = 0, got {text!r} and {fields['has_zeros']!r}")
        return 0
    if fields["batch"] != "1":
        raise ConfigError(f"{where}, batch = {fields['batch']}: must be 1 where B is quantised")
    prescribed = project_formats().formats[fields["b_format"]].group
    if prescribed:
        if text != str(prescribed):
            raise ConfigError(f"{where}, group_size = {text!r}: must be {prescribed} for {fields['b_format']}")
        return prescribed
    if text != "-1" and (text not in powers or int(text) >= int(fields["k"])):
        raise ConfigError(f"{where}, group_size = {text!r}: must be -1 (all of k) or a power of two from 32 on that is less than k")
    return max(int(text), 0)


def _check_kernel(row: TunedRow, kernels: dict[str, Kernel], where: str) -> None:
    kernel = kernels.get(row.kernel)
    if kernel is None:
        raise ConfigError(f"{where}: no kernel is named {row.kernel!r}; tune again or remove the row")
    wanted, has = (row.ab_type, row.a_major, row.b_major, row.b_format), (kernel.element, kernel.a_major, kernel.b_major, kernel.b_format)
    # A launch may copy dense operands first, into K-major rows.
    copied = row.b_format == "dense" and all(reads in ("k", major) for reads, major in zip(has[1:3], wanted[1:3], strict=True))
    if wanted != has and not (copied and (wanted[0], wanted[3]) == (has[0], has[3])):
        raise ConfigError(f"{where}: {row.kernel} computes (ab_type, a_major, b_major, b_format) = {has}, the row's problem is {wanted}")
    step = kernel.column_step
    if bool(row.columns) != bool(step) or (step and (row.columns % step or row.columns > kernel.tile[1])):
        allowed = f"a multiple of {step}, at most {kernel.tile[1]}" if step else "0"
        raise ConfigError(f"{where}, columns = {row.columns}: must be {allowed} for {row.kernel}")
    if row.group_size and row.group_size % kernel.group_multiple:
        raise ConfigError(f"{where}: {row.kernel} takes groups of {kernel.group_multiple}, the row's are of {row.group_size}")


def read_folder(folder: Path, kernels: list[Kernel]) -> dict[str, list[TunedRow]]:
    """A device's file name -> rows, for every csv of the folder; empty when there is none."""
    by_name = {kernel.name: kernel for kernel in kernels}
    return {path.stem: read_csv(path, by_name) for path in sorted(folder.glob("*.csv"))}


_LOOKUP = """\
struct Table {
  char const* device;  // file name of the table
  GemmTunedRow const* rows;
  int64_t count;
};

%TABLES%
}  // namespace

GemmTunedRow const* shipped_gemm_rows(char const* device_name, int64_t* count) {
  *count = 0;
  if (device_name == nullptr) return nullptr;
  DeviceFileName const file = device_file_name(device_name);
  for (Table const& table : kTables) {
    if (table.device != nullptr && std::strcmp(file.text, table.device) == 0) {
      *count = table.count;
      return table.rows;
    }
  }
  return nullptr;
}

}  // namespace minfer
"""


def tuned_text(tables: dict[str, list[TunedRow]]) -> str:
    """tuned_table.cpp: minfer::shipped_gemm_rows over the tables."""
    parts = [BANNER, '#include <cstring>\n\n#include "minfer/gemm.h"\n\nnamespace minfer {\nnamespace {\n\n']
    entries = []
    for index, (device, rows) in enumerate(tables.items()):
        if not rows:
            continue
        parts.append(f"// {device}\nGemmTunedRow const kRows{index}[] = {{\n")
        parts += [_row(row) for row in rows]
        parts.append("};\n\n")
        entries.append(f"    {{{cpp_string(device)}, kRows{index}, {len(rows)}}},\n")
    listing = "Table const kTables[] = {\n" + "".join(entries or ["    {nullptr, nullptr, 0},\n"]) + "};\n"
    return "".join(parts) + _LOOKUP.replace("%TABLES%", listing)


def _row(row: TunedRow) -> str:
    launch = f"{{{DECOMPOSITIONS[row.decomposition]}, {row.splits}, {row.swizzle}, {RASTERS[row.raster]}, {row.columns}}}"
    formats = project_formats()
    types = f"{formats.elements[row.ab_type].cpp}, {MAJORS[row.a_major]}, {MAJORS[row.b_major]}"
    weights = f"{formats.formats[row.b_format].cpp}, {row.group_size}, {cpp_bool(row.has_zeros)}"
    rest = f"{cpp_bool(row.has_c)}, {cpp_bool(row.gated)}, {cpp_string(row.kernel)}, {launch}, {row.us!r}f"
    return f"    {{{row.m}, {row.n}, {row.k}, {row.batch}, {types}, {weights}, {rest}}},\n"
