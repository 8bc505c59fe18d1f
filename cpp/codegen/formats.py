"""cpp/configs/formats.toml: number types, weight formats and cache formats."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

from codegen.row import Row
from codegen.toml import ConfigError, read_toml

FORMATS_FILE = Path(__file__).resolve().parents[1] / "configs" / "formats.toml"
ORDERS = {"plain": "kPlain", "book": "kBook", "e2m1": "kE2M1"}  # of codes in the packed layout -> enumerator of minfer::CodeOrder
MIN_GROUP = 16  # k of the smallest group: a k block of the packed layout


@dataclass(frozen=True)
class Element:
    """A number type."""

    name: str
    enumerator: str
    bits: int
    torch: str

    @property
    def cpp(self) -> str:
        return f"DataType::{self.enumerator}"

    @property
    def bytes(self) -> int:
        return self.bits // 8


@dataclass(frozen=True)
class Values:
    """What the codes of a format stand for."""

    name: str
    enumerator: str
    order: str
    table: tuple[float, ...] = ()
    element: str | None = None
    factor: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A way in which a weight is stored."""

    name: str
    enumerator: str
    bits: int
    values: str | None = None  # None: not a format of quantised weights
    scales: str = "operand"
    group: int = 0  # 0: free
    zero: float | None = None
    usual_group: int | None = None

    @property
    def cpp(self) -> str:
        return f"WeightFormat::{self.enumerator}"


@dataclass(frozen=True)
class Cache:
    """A way in which keys and values are cached."""

    name: str
    format: str
    storage: tuple[str, ...]
    head_dim_multiple: int


@dataclass(frozen=True)
class Formats:
    """All of them, by name, in the order of the file."""

    elements: dict[str, Element]
    values: dict[str, Values]
    formats: dict[str, Format]
    caches: dict[str, Cache]

    @property
    def weights(self) -> dict[str, Format]:
        """Those of quantised weights."""
        return {name: form for name, form in self.formats.items() if form.values is not None}

    def order(self, name: str) -> str:
        """Of a format's codes in the packed layout."""
        values = self.formats[name].values
        return "plain" if values is None else self.values[values].order

    def scale_bytes(self, name: str) -> int:
        """Of a stored scale; those of the activations' type take two."""
        scales = self.formats[name].scales
        return 2 if scales == "operand" else self.elements[scales].bytes


def read_formats(path: Path) -> Formats:
    """ConfigError where a row cannot be right, is given twice or names another that is not there."""
    table = read_toml(path)
    unknown = set(table) - {"element", "values", "format", "cache"}
    if unknown:
        raise ConfigError(f"{path.name}: knows [[element]], [[values]], [[format]] and [[cache]], got {', '.join(sorted(unknown))}")

    def rows(kind: str, known: set[str], make) -> dict:
        found: dict = {}
        for number, fields in enumerate(table.get(kind, []), start=1):
            row = Row(fields, f"{path.name}: {kind} row {number}")
            row.known(known, kind)
            row.require(re.fullmatch(r"[a-z0-9][a-z0-9_]*", row.text("name")) is not None, "name", "must be of a-z, 0-9 and _")
            row.require(row.text("name") not in found, "name", "is given twice")
            if "enumerator" in known:
                good = re.fullmatch(r"k[A-Z][A-Za-z0-9]*", row.text("enumerator")) is not None
                row.require(good and all(other.enumerator != row.get("enumerator") for other in found.values()), "enumerator",
                            "must be one of its own, such as kInt4")  # fmt: skip
            found[row.get("name")] = make(row)
        return found

    def make_values(row: Row) -> Values:
        order, numbers = row.one_of("order", ORDERS), row.get("table", [])
        good = isinstance(numbers, list) and all(type(v) is float for v in numbers) and len(numbers) in (0, 16)
        row.require(good, "table", "must be 16 floating-point numbers, one for each code")
        row.require(order != "book" or numbers == sorted(set(numbers)) != [], "table", "of a book must rise from code to code")
        element, factor = row.get("element"), row.get("factor", {})
        row.require(element is None or element in elements, "element", f"must be one of {', '.join(elements)}")
        good = isinstance(factor, dict) and all(e in elements and type(f) is float and 0 < f <= 1 for e, f in factor.items())
        row.require(good and (order == "book" or not factor), "factor", "is of a book's element types, above 0 and at most 1")
        return Values(row.get("name"), row.get("enumerator"), order, tuple(numbers), element, factor)

    def make_format(row: Row) -> Format:
        fields = {key: row.get(key) for key in row.fields}
        if row.get("values") is not None:
            kind = values.get(row.one_of("values", values))
            row.one_of("bits", (4, 8))
            row.require(not kind.table or row.get("bits") == 4, "bits", "must be 4 where values are those of a table")
            row.one_of("scales", ["operand", *elements])
            group = row.get("group", 0)
            good = type(group) is int and (group == 0 or (group >= MIN_GROUP and group & (group - 1) == 0))
            row.require(good, "group", f"must be a power of two from {MIN_GROUP} on")
            row.require(row.get("zero") is None or kind.name == "integer", "zero", "is of integers")
            row.require((row.get("usual_group") is None) == (group != 0), "usual_group", "is of formats that prescribe no group")
        return Format(**fields)

    def make_cache(row: Row) -> Cache:
        row.one_of("format", formats)
        return Cache(row.get("name"), row.get("format"), tuple(row.get("storage")), row.get("head_dim_multiple"))

    elements = rows("element", {"name", "enumerator", "bits", "torch"}, lambda row: Element(**row.fields))
    values = rows("values", {"name", "enumerator", "order", "table", "element", "factor"}, make_values)
    formats = rows("format", {"name", "enumerator", "bits", "values", "scales", "group", "zero", "usual_group"}, make_format)
    caches = rows("cache", {"name", "format", "storage", "head_dim_multiple"}, make_cache)
    return Formats(elements, values, formats, caches)


@functools.cache
def project_formats() -> Formats:
    """Those of this project's own file."""
    return read_formats(FORMATS_FILE)
