"""C++ functions and the schemas that they implement: the compiler compares the types of arguments, this test their names and order."""

import re
from pathlib import Path

import minfer  # noqa: F401  loads the operators
import pytest
import torch

SOURCES = {path.name: path.read_text() for path in sorted((Path(__file__).parents[2] / "cpp" / "torch").glob("*.cpp"))}
BOXED = r"boxed<&(\w+)(?:<\d>)?>"
# A row of a table: {"schema " MACRO "in pieces", boxed<&function>} or {.., boxed<&function>, boxed<&out_function>}.
ROW = re.compile(r'\{((?:\s*(?:"[^"]*"|[A-Z_]+))+),\s*' + BOXED + r"(?:,\s*" + BOXED + r")?\s*\}")


def rows():
    for file, source in SOURCES.items():
        for literals, function, out_function in ROW.findall(source):
            name = "".join(re.findall(r'"([^"]*)"', literals)).partition("(")[0]
            yield pytest.param(file, function, name, "default", id=name)
            if out_function:
                yield pytest.param(file, out_function, name, "out", id=f"{name}.out")


def parameters(source, function):
    """The names of a C++ function's parameters, and in place of one that is an ArgumentGroup (cpp/torch/core/schema.h) its members'."""
    (text,) = re.findall(rf"^[\w:<>, ]+ {function}\(([^(){{}};]*)\) \{{", source, re.MULTILINE)
    while (plain := re.sub(r"<[^<>]*>", "", text)) != text:
        text = plain
    groups = {
        group: re.findall(rf"&{group}::(\w+)", members)
        for group, members in re.findall(r"^struct (\w+) \{[^}]*kMembers = std::tuple\{([^}]*)\}", source, re.MULTILINE)
    }
    found = []
    for parameter in text.split(","):
        if words := re.findall(r"\w+", parameter):
            found += groups.get(words[0], words[-1:])
    return found


def test_every_function_is_in_a_row():
    named = sum(len(re.findall(BOXED, source)) for source in SOURCES.values())
    assert len(list(rows())) == named > 40


@pytest.mark.parametrize("file, function, name, overload", list(rows()))
def test_parameters_are_named_as_in_the_schema(file, function, name, overload):
    schema = getattr(getattr(torch.ops.minfer, name), overload)._schema

    def comparable(names):
        # One function implements an operator of 4-bit weights, with w4_format, and its twin of 8-bit weights, with w8_format.
        return [re.sub("^w[48]_format$", "format", name) for name in names]

    assert comparable(parameters(SOURCES[file], function)) == comparable(argument.name for argument in schema.arguments)
