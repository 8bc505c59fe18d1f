"""No line of a source is wider than the formatters' limit: clang-format leaves comments as they are, and nothing else would notice."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 140
FOLDERS = ("bench", "cpp", "python", "tests", ".ci", "third_party")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".py"}
PRAGMA = re.compile(r"\s+# noqa: \w+$")  # ruff does not count it either


def sources():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def too_wide(text: str) -> list[int]:
    """Numbers of the lines that are wider than the limit."""
    return [number for number, line in enumerate(text.splitlines(), 1) if len(PRAGMA.sub("", line)) > LIMIT]


def test_width_of_a_line():
    assert too_wide("// " + "x" * (LIMIT - 3)) == []
    assert too_wide("\n// " + "x" * (LIMIT - 2)) == [2]
    assert too_wide("x" * LIMIT + "  # noqa: E731") == []


def test_sources():
    paths = list(sources())
    assert len(paths) > 300
    found = {path.relative_to(ROOT).as_posix(): too_wide(path.read_text(encoding="utf-8")) for path in paths}
    wide = {name: lines for name, lines in found.items() if lines}
    assert not wide
