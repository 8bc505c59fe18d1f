"""One row of a table: reads its fields, and names the row, the field and the value where one cannot be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from codegen.toml import ConfigError


class Row:
    def __init__(self, fields: dict, where: str):
        """``where``: how errors name the row, such as "gemm.toml: kernel row 7"."""
        self.fields, self.where = fields, where

    def get(self, field: str, default=None):
        return self.fields.get(field, default)

    def with_fields(self, **fields) -> Row:
        """The same row with fields that its family implies."""
        return Row(self.fields | fields, self.where)

    def require(self, condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{self.where}, {field} = {self.fields.get(field)!r}: {rule}")

    def known(self, fields: Iterable[str], of: str) -> None:
        """No other fields than these may be given; ``of`` says whose they are."""
        for field in self.fields:
            self.require(field in fields, field, f"no such field for {of}; known: {', '.join(sorted(fields))}")

    def one_of(self, field: str, allowed: Iterable, default=None):
        """A value from a list, of the type of its members."""
        value, allowed = self.fields.get(field, default), tuple(allowed)
        good = value in allowed and type(value) is type(allowed[0])
        self.require(good, field, f"must be one of {', '.join(map(str, allowed))}")
        return value

    def names(self, field: str, allowed: Iterable[str]) -> list[str]:
        """A list of different names."""
        value, allowed = self.fields.get(field), tuple(allowed)
        good = isinstance(value, list) and value and all(v in allowed for v in value) and len(set(value)) == len(value)
        self.require(good, field, f"must be a list of different values from {', '.join(allowed)}")
        return value

    def integers(self, field: str, count: int) -> tuple[int, ...]:
        """So many positive integers."""
        value = self.fields.get(field)
        good = isinstance(value, list) and len(value) == count and all(type(v) is int and v > 0 for v in value)
        self.require(good, field, f"must be {count} positive integers")
        return tuple(value)

    def integers_for_each(self, field: str, count: int, good: Callable[[int], bool], rule: str) -> list[int]:
        """An integer for each of so many things."""
        value = self.fields.get(field)
        self.require(isinstance(value, list) and len(value) == count and all(type(v) is int and good(v) for v in value), field, rule)
        return value

    def optional_integer(self, field: str) -> int | None:
        value = self.fields.get(field)
        self.require(value is None or (type(value) is int and value > 0), field, "must be a positive integer")
        return value

    def flag(self, field: str) -> bool:
        """False unless given."""
        value = self.fields.get(field, False)
        self.require(type(value) is bool, field, "must be true or false")
        return value

    def text(self, field: str) -> str:
        """Empty unless given."""
        value = self.fields.get(field, "")
        self.require(isinstance(value, str), field, "must be a string")
        return value
