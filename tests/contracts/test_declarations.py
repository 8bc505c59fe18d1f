"""Every operator has one declaration, and it says what the schema says: names, order, kinds, types and defaults of arguments."""

import ast
import inspect
import textwrap

import minfer
import pytest
import torch
from minfer._core.operator import HOW, OPERATORS, _with_out, _wrapper_of
from minfer._core.tracing import override_schema

from tests.contracts import operator_cases

NAMES = sorted(operator_cases.names())
# What wrappers take beside their schema's arguments: with it they call another operator.
MORE = {name: ("quant", "scale", "norm") for name in ("rms_norm", "add_rms_norm")}
# Operators without a name in the package itself: that of minfer.quantize is taken.
INSIDE = {"quantize"}
TYPES = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor | None",
    "List[Tensor]": "Sequence[Tensor]",
    "int": "int",
    "Optional[int]": "int | None",
    "float": "float",
    "Optional[float]": "float | None",
    "bool": "bool",
    "str": "str",
    "Optional[str]": "str | None",
}


def wrapper(name):
    return OPERATORS[name].wrapper


def facts(argument):
    return argument.name, str(argument.type), argument.kwarg_only, argument.default_value


@pytest.mark.parametrize("name", NAMES)
def test_wrapper_and_schema(name):
    parameters = dict(inspect.signature(wrapper(name)).parameters)
    for more in MORE.get(name, ()):
        parameter = parameters.pop(more)
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None, more
    packet = getattr(torch.ops.minfer, name)
    out = parameters.pop("out", None)
    assert ("out" in packet.overloads()) == (out is not None)
    if out is not None:
        *others, last = map(facts, packet.out._schema.arguments)
        assert out.default is None and others == list(map(facts, packet.default._schema.arguments))
        assert last[:3] == ("out", "Tensor", True)
    arguments = packet.default._schema.arguments
    assert list(parameters) == [argument.name for argument in arguments]
    for argument, parameter in zip(arguments, parameters.values(), strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        assert (parameter.default is not parameter.empty) == argument.has_default_value(), argument.name
        if argument.has_default_value():
            default = argument.default_value
            assert parameter.default == default and type(parameter.default) is type(default), argument.name
        kind = str(argument.type)
        if "ScalarType" not in str(argument.real_type):
            assert parameter.annotation == TYPES[kind], argument.name
        else:
            assert parameter.annotation == "torch.dtype" + " | None" * argument.has_default_value(), argument.name
    assert wrapper(name).__doc__ and wrapper(name).__name__ == name


def test_every_operator_is_declared():
    assert sorted(OPERATORS) == NAMES
    for name, declared in OPERATORS.items():
        assert getattr(minfer.ops if name in INSIDE else minfer, name) is declared.wrapper, name


@pytest.mark.parametrize("name", NAMES)
def test_declarations_have_no_body(name):
    """A body would never run: what a function does before the operator is its declaration's ``before``."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(wrapper(name))))).body
    (documentation,) = function.body
    assert isinstance(documentation, ast.Expr) and isinstance(documentation.value, ast.Constant)


def test_what_references_do_not_take_is_in_a_schema():
    taken = {a.name for name in NAMES for a in getattr(torch.ops.minfer, name).default._schema.arguments}
    assert HOW <= taken


@pytest.mark.parametrize("name", [name for name in NAMES if "kernel" in inspect.signature(wrapper(name)).parameters])
def test_overrides_have_the_arguments_of_their_operators(name):
    """And defaults of all keywords: a graph in torch.compile's cache on disk lacks those that the operator got later."""
    operator, override = getattr(torch.ops.minfer, name).default, getattr(torch.ops.minfer, f"_{name}_override").default
    own = [argument for argument in operator._schema.arguments if argument.name != "kernel"]
    others = list(override._schema.arguments)
    (kernel,) = [argument for argument in others if argument.name == "override"]
    assert str(kernel.type) == "str" and not kernel.kwarg_only
    others.remove(kernel)
    assert [facts(a)[:3] for a in own] == [facts(a)[:3] for a in others]
    assert [a.default_value for a in own if a.kwarg_only] == [a.default_value for a in others if a.kwarg_only]
    assert all(a.has_default_value() == b.has_default_value() for a, b in zip(own, others, strict=True) if a.kwarg_only)
    assert str(operator._schema).partition(" -> ")[2] == str(override._schema).partition(" -> ")[2]
    assert torch.Tag.needs_fixed_stride_order in operator.tags and torch.Tag.needs_fixed_stride_order in override.tags


def test_override_schema():
    assert (
        override_schema('minfer::f(Tensor a, Tensor? b=None, *, str s="x", str? kernel=None, int n=2) -> (Tensor, Tensor)')
        == '_f_override(Tensor a, Tensor? b, str override, *, str s="x", int n=2) -> (Tensor, Tensor)'
    )
    assert override_schema("minfer::f(Tensor a, *, str? kernel=None) -> Tensor") == "_f_override(Tensor a, str override) -> Tensor"


def test_only_what_is_given_is_handed_on():
    given = []

    def documented(a, b=1, *, c=2, d=3):
        """What it is."""

    call = _wrapper_of(documented, lambda *args, **options: given.append((args, options)))
    call(5)
    call(5, 6, d=None)
    assert given == [((5,), {}), ((5, 6), {"d": None})]
    assert call.__doc__ == "What it is." and list(inspect.signature(call).parameters) == ["a", "b", "c", "d"]


def test_out_chooses_the_overload():
    call = _with_out(lambda *args, **options: ("default", args, options), lambda *args, **options: ("out", args, options))
    assert call(1, k=2) == call(1, k=2, out=None) == ("default", (1,), {"k": 2})
    assert call(1, k=2, out="x") == ("out", (1,), {"k": 2, "out": "x"})


def test_arguments_that_no_operator_takes():
    a, b = torch.ones(2, 16).half(), torch.ones(16, 8).half()
    for call in (lambda: minfer.gemm(a), lambda: minfer.gemm(a, b, gamma=1.0), lambda: minfer.gemm(a, b, None)):
        with pytest.raises(RuntimeError, match="minfer::gemm"):
            call()
