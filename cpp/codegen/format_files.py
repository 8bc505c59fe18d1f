"""formats.toml -> formats.h and table.py, the two committed files that state its facts to C++ and to Python."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from codegen.formats import ORDERS, Formats
from codegen.toml import ConfigError

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "cpp" / "include" / "minfer" / "formats.h"
PYTHON = ROOT / "python" / "minfer" / "formats" / "table.py"
COMMAND = "python cpp/codegen/generate.py --formats"
ORIGIN = f"Generated from cpp/configs/formats.toml: edit that file, then run {COMMAND}."


def texts(formats: Formats) -> dict[Path, str]:
    """Each of the two files, and what it must hold."""
    return {HEADER: header_text(formats), PYTHON: python_text(formats)}


def check(formats: Formats) -> None:
    """ConfigError where a committed file is not what formats.toml says."""
    for path, text in texts(formats).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{path.relative_to(ROOT)} is not what cpp/configs/formats.toml says: run {COMMAND}")


def _enum(name: str, enumerators: Iterable[str]) -> str:
    lines = "".join(f"  {enumerator} = {value},\n" for value, enumerator in enumerate(enumerators))
    return f"enum class {name} : int32_t {{\n{lines}}};\n"


def _list(kind: str, name: str, enumerators: Iterable[str]) -> str:
    lines = "".join(f"    {kind}::{enumerator},\n" for enumerator in enumerators)
    return f"constexpr {kind} {name}[] = {{\n{lines}}};\n"


def _function(result: str, name: str, kind: str, values: dict[str, str], default: str) -> str:
    """A constexpr function of an enumeration; ``values`` by enumerator, those that are the default may be left out.

    A switch and not a table, which device code could not read at run time.
    """
    lines = [f"    case {kind}::{enumerator}: return {value};" for enumerator, value in values.items() if value != default]
    lines.append(f"    default: return {default};")
    return f"constexpr {result} {name}({kind} of) {{\n  switch (of) {{\n" + "\n".join(lines) + "\n  }\n}\n"


def header_text(formats: Formats) -> str:
    """cpp/include/minfer/formats.h."""
    head = (
        f"// {ORIGIN}\n// Number types, and how weights and caches of keys and values are stored.\n#pragma once\n\n#include <cstdint>\n\n"
    )
    body = "\n".join((_number_types(formats), _weight_formats(formats), _codes(formats), _code_books(formats)))
    return f"{head}// clang-format off\nnamespace minfer {{\n\n{body}\n}}  // namespace minfer\n"


def _number_types(formats: Formats) -> str:
    def function(result: str, name: str, value, default: str) -> str:
        return _function(result, name, "DataType", {e.enumerator: value(e) for e in formats.elements.values()}, default)

    return "".join([
        "/// A number type of operands, results or scales.\n",
        _enum("DataType", (element.enumerator for element in formats.elements.values())),
        function("int", "bits_of", lambda element: str(element.bits), "0"),
        "/// Bytes of a number.\nconstexpr int size_of(DataType of) { return bits_of(of) / 8; }\n",
        function("char const*", "name_of", lambda element: f'"{element.name}"', '"?"'),
    ])  # fmt: skip


def _of_formats(formats: Formats, result: str, name: str, value, default: str) -> str:
    return _function(result, name, "WeightFormat", {form.enumerator: value(form) for form in formats.formats.values()}, default)


def _weight_formats(formats: Formats) -> str:
    return "".join([
        "/// How B is stored. kDense: as numbers of A's type. Otherwise as codes in the packed layout of quantized_gemm/w4_layout.h,\n"
        "/// with scales for groups of consecutive k: (value of the code - zero point) * scale. kCodes is of attention kernels alone: a\n"
        "/// cache of keys and values as kFp8E4M3, kInt8 or kInt4, whichever a call has.\n",
        _enum("WeightFormat", (form.enumerator for form in formats.formats.values())),
        "/// Those of quantised weights.\n",
        _list("WeightFormat", "kWeightFormats", (form.enumerator for form in formats.weights.values())),
        _of_formats(formats, "char const*", "name_of", lambda form: f'"{form.name}"', '"?"'),
        "/// Of a code; of kCodes 0.\n",
        _of_formats(formats, "int", "bits_of", lambda form: str(form.bits), "0"),
        "/// Bytes of a stored scale.\n",
        _of_formats(formats, "int", "scale_bytes_of", lambda form: str(formats.scale_bytes(form.name)), "2"),
        "/// k of a scale where the format prescribes it, else 0.\n",
        _of_formats(formats, "int", "fixed_group_of", lambda form: str(form.group), "0"),
        _of_formats(formats, "bool", "has_zero_points", lambda form: "false" if form.zero is None else "true", "false"),
        "/// The zero point where none are stored.\n",
        _of_formats(formats, "float", "symmetric_zero_of", lambda form: f"{form.zero or 0.0!r}f", "0.0f"),
    ])  # fmt: skip


def _codes(formats: Formats) -> str:
    def values_of(form) -> str:
        return f"CodeValues::{formats.values[form.values].enumerator if form.values else 'kNone'}"

    def order_of(form) -> str:
        return f"CodeOrder::{ORDERS[formats.order(form.name)]}"

    return "".join([
        "/// What a code stands for, before zero point and scale. kInteger: itself, unsigned.\n",
        _enum("CodeValues", ["kNone", *(values.enumerator for values in formats.values.values())]),
        _of_formats(formats, "CodeValues", "values_of", values_of, "CodeValues::kNone"),
        "/// Where the bits of a code are in the packed layout.\n",
        _enum("CodeOrder", ORDERS.values()),
        _of_formats(formats, "CodeOrder", "order_of", order_of, "CodeOrder::kPlain"),
    ])  # fmt: skip


def _code_books(formats: Formats) -> str:
    books = [values for values in formats.values.values() if values.order == "book"]

    def book_of(form) -> str:
        values = formats.values.get(form.values)
        return str(books.index(values)) if values in books else "-1"

    tables = factors = ""
    for book in books:
        rows = (", ".join(f"{value!r}f" for value in book.table[first : first + 4]) for first in range(0, 16, 4))
        tables += "    {\n" + "".join(f"      {row},\n" for row in rows) + "    },\n"
    for form in formats.weights.values():
        for element, factor in formats.values[form.values].factor.items():
            factors += f"  if (format == {form.cpp} && type == {formats.elements[element].cpp}) return {factor!r}f;\n"
    return "".join([
        "/// The code books, and which of them a format has; -1 for none.\n",
        f"struct CodeBooks {{\n  float values[{len(books)}][16];\n}};\n",
        f"constexpr CodeBooks kCodeBooks = {{{{\n{tables}}}}};\n",
        _of_formats(formats, "int", "code_book_of", book_of, "-1"),
        "/// What kernels multiply a code book by, so that its values lie nearer to numbers of the type; the sums make up for it.\n",
        f"constexpr float book_factor_of(WeightFormat format, DataType type) {{\n{factors}  return 1.0f;\n}}\n",
    ])  # fmt: skip


def python_text(formats: Formats) -> str:
    """python/minfer/formats/table.py."""
    lines = [f'"""{ORIGIN}"""', ""]
    lines.append("# Number types -> torch dtypes.")
    lines.append("ELEMENTS = {")
    lines += [f'    "{element.name}": "{element.torch}",' for element in formats.elements.values()]
    lines += [
        "}",
        "",
        "# What codes stand for -> the order of their bits in the packed layout, and each code's value where a table has it.",
    ]
    lines.append("VALUES = {")
    for values in formats.values.values():
        if not values.table:
            lines.append(f'    "{values.name}": ("{values.order}", None),')
            continue
        lines += [f'    "{values.name}": (', f'        "{values.order}",', "        ("]
        lines += [f"            {value!r}," for value in values.table]
        lines += ["        ),", "    ),"]
    lines += ["}", "", "# Formats of quantised weights; None: as many columns of a scale as a call says, or no zero points."]
    lines.append("FORMATS = {")
    for form in formats.weights.values():
        group = form.group or None
        lines.append(f'    "{form.name}": {{')
        lines.append(f'        "bits": {form.bits},')
        lines.append(f'        "values": "{form.values}",')
        lines.append(f'        "scales": "{form.scales}",')
        lines.append(f'        "group_size": {group},')
        lines.append(f'        "zero": {form.zero!r},')
        lines.append(f'        "usual_group_size": {form.group or form.usual_group},')
        lines.append("    },")
    lines += ["}", "", "# kv_format -> dtypes of the codes, and what head dimensions are multiples of."]
    lines.append("CACHES = {")
    for cache in formats.caches.values():
        storage = ", ".join(f'"{dtype}"' for dtype in cache.storage) + ("," if len(cache.storage) == 1 else "")
        lines.append(f'    "{cache.name}": (({storage}), {cache.head_dim_multiple}),')
    return "\n".join([*lines, "}", ""])
