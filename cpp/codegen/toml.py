"""Reads the tables of cpp/configs."""

from __future__ import annotations

from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        tomllib = None


class ConfigError(Exception):
    """A table says something illegal. The message names the file, the row, the field and the values."""


def read_toml(path: Path) -> dict:
    if tomllib is None:
        raise ConfigError("Reading the tables on Python 3.10 needs tomli: pip install tomli, or use Python 3.11 or newer")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name}: {error}") from error
