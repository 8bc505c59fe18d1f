"""Tuned tables: rows saying which kernel and launch configuration measured fastest for one problem on one device.

A table that ships is compiled into the library (``cpp/configs/tuned/<device>.csv``). A user's own is
``<cache>/<version>/<device>.csv`` with the same columns, is consulted first, and is loaded when CUDA is first used: of several devices
each has its own. <cache> is ``MINFER_CACHE_DIR`` or ``~/.cache/minfer``. A device's calibrated cost model, ``<device>.csv`` in the
folder ``models`` there, is loaded at the same time.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from .._core.namespace import ops
from .._core.registry import build_info
from .._core.torch_private import when_cuda_is_first_used
from .plan import DTYPE_NAMES, Plan


@dataclass(frozen=True, order=True)
class TunedRow:
    """One measured row; the fields are the CSV's columns, in order."""

    op: str
    m: int
    n: int
    k: int
    batch: int
    ab_type: str  # f16, bf16
    a_major: str  # k, mn
    b_major: str
    b_format: str  # dense, int4
    group_size: int  # of 4-bit weights: -1 is all of k; 0 where B is dense
    has_zeros: int  # 0, 1
    has_c: int
    gated: int
    kernel: str  # registry name
    decomposition: str
    splits: int
    swizzle: int
    raster: str
    columns: int
    us: float

    @property
    def key(self) -> tuple:
        """The problem; sorted by it, one layout's table reads by weight shape, then m."""
        return (
            self.op, self.ab_type, self.a_major, self.b_major, self.b_format, self.group_size, self.has_zeros, self.has_c, self.gated,
            self.batch, self.n, self.k, self.m,
        )  # fmt: skip

    @classmethod
    def of(cls, plan: Plan, us: float) -> TunedRow:
        p = plan.problem
        return cls(
            plan.op, p.m, p.n, p.k, p.batch, DTYPE_NAMES[p.dtype], p.a_major, p.b_major, p.b_format, p.group_size, int(p.zeros),
            int(p.c), int(p.gated), plan.kernel, plan.decomposition, plan.splits, plan.swizzle, plan.raster, plan.columns, round(us, 2),
        )  # fmt: skip


COLUMNS = tuple(field.name for field in fields(TunedRow))
_TYPES = {"int": int, "float": float, "str": str}


def parse_rows(text: str) -> list[TunedRow]:
    """Rows of a CSV text; lines that start with # are skipped.

    Raises:
      ValueError: the header is not COLUMNS (a table of another version), or a row has too few cells or a malformed number; names the line.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line and not line.startswith("#")]
    if not lines:
        return []
    reader = csv.reader([line for _, line in lines])
    header = next(reader)
    if tuple(header) != COLUMNS:
        raise ValueError(
            f"the header must be {','.join(COLUMNS)}, got {','.join(header)}; this table is of another version: remove it and tune again"
        )
    rows = []
    for (number, _), cells in zip(lines[1:], reader, strict=False):
        if len(cells) != len(COLUMNS):
            raise ValueError(f"line {number}: expected {len(COLUMNS)} cells, got {len(cells)}")
        try:
            rows.append(TunedRow(*(_TYPES[field.type](cell) for field, cell in zip(fields(TunedRow), cells, strict=True))))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows


def format_rows(rows: Iterable[TunedRow]) -> str:
    """CSV text with header, sorted by problem: equal rows give equal text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=lambda row: row.key):
        writer.writerow([f"{value:.2f}" if isinstance(value, float) else value for value in astuple(row)])
    return text.getvalue()


def read_table(path: str | Path) -> list[TunedRow]:
    """Rows of a table; none when there is no such file.

    Raises:
      ValueError: see :func:`parse_rows`; names the file too.
    """
    path = Path(path)
    try:
        return parse_rows(path.read_text()) if path.exists() else []
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """For one process at a time, where the file system has locks."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def merge_into(path: str | Path, rows: Iterable[TunedRow]) -> int:
    """Adds rows to a table, replacing those of the same problems; comment lines on top stay. Returns the table's number of rows.

    Processes may do so at once, tuning on several devices of one name.

    Raises:
      ValueError: see :func:`read_table`; the file is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        merged = {row.key: row for row in (*read_table(path), *rows)}
        comments = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.exists() else []
        fresh = path.with_suffix(f".{os.getpid()}.part")
        fresh.write_text("".join(line + "\n" for line in comments) + format_rows(merged.values()))
        fresh.replace(path)  # a process that is starting up never reads half a table
    return len(merged)


# ---- the user's table ---------------------------------------------------------------------------------------------------------


def device_file_name(device_name: str) -> str:
    """A device's name as a file name, by the library's rule for the tables that ship: NVIDIA H200 is nvidia-h200."""
    return ops._device_file_name(device_name)


def cache_folder() -> Path:
    """Folder of this version's user tables."""
    base = os.environ.get("MINFER_CACHE_DIR") or Path.home() / ".cache" / "minfer"
    return Path(base) / build_info()["version"]


def user_table(device_name: str) -> Path:
    return cache_folder() / f"{device_file_name(device_name)}.csv"


def user_model(device_name: str) -> Path:
    """The table of a device's calibrated cost model."""
    return cache_folder() / "models" / f"{device_file_name(device_name)}.csv"


_ALL_DEVICES = -1  # as _load_tuned has it
_user_rows: dict[int, int] = {}  # by device


def user_rows(device: int | None = None) -> int:
    """Rows of users' tables that planning now uses for every device, and with its index those for one of them."""
    return sum(_user_rows.get(index, 0) for index in {_ALL_DEVICES, _ALL_DEVICES if device is None else device})


def load_rows(text: str, device: int | None = None) -> int:
    """Replaces the user rows that planning uses by those of a CSV text; an empty text removes them. Returns how many there are.

    Args:
      device: CUDA index of the device that they are for; the rows of others stay. None: of all devices, and no other rows stay.

    Raises:
      RuntimeError: the text is malformed (the line is named); there are no user rows, of that device, then.
    """
    index = _ALL_DEVICES if device is None else device
    ops._load_tuned("", index)
    if device is None:
        _user_rows.clear()
    _user_rows[index] = 0
    if text:
        _user_rows[index] = ops._load_tuned(text, index)
    return _user_rows[index]


def load_user_table(device: int) -> int:
    """Loads the user's table of one CUDA device, if there is one, in place of the rows that it had; returns the number of rows.

    Raises:
      ValueError: the table cannot be used; names the file. OSError: it cannot be read.
    """
    path = user_table(torch.cuda.get_device_name(device))
    try:
        return load_rows(path.read_text() if path.exists() else "", device)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_user_model(device_name: str, text: str) -> Path:
    """Stores a calibrated cost model where :func:`load_user_model` finds it."""
    path = user_model(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        fresh = path.with_suffix(f".{os.getpid()}.part")
        fresh.write_text(text)
        fresh.replace(path)
    return path


def load_user_model(device: int) -> bool:
    """Loads the calibrated cost model of one CUDA device; where there is none, plans use the one that ships. Returns whether there is one.

    Raises:
      ValueError: the table cannot be used, and the model that ships is; names the file. OSError: it cannot be read.
    """
    path = user_model(torch.cuda.get_device_name(device))
    try:
        ops._load_model("", device)
        if path.exists():
            ops._load_model(path.read_text(), device)
        return path.exists()
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def load_at_first_use() -> None:
    """Arranges for each device's own table to be loaded when CUDA is initialised: asking for the devices' names now would initialise it."""
    try:
        present = build_info()["cuda"] and any(any(cache_folder().glob(pattern)) for pattern in ("*.csv", "models/*.csv"))
    except (OSError, RuntimeError):  # no home folder, or one that cannot be read
        return
    if present:
        when_cuda_is_first_used(load_user_tables)


def load_user_tables() -> None:
    """:func:`load_user_table` and :func:`load_user_model` of every CUDA device of the process. One that cannot be loaded is a warning,
    and the others are loaded: an exception while CUDA is initialised would make it unusable."""
    for device in range(torch.cuda.device_count()):
        for what, load in (("tuned table", load_user_table), ("cost model", load_user_model)):
            try:
                load(device)
            except (OSError, ValueError) as error:
                warnings.warn(f"minfer: a {what} of device {device} was not loaded: {error}", stacklevel=2)
