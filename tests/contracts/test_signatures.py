"""What a wrapper says and what its operator's schema says are the same: names, order, kinds and defaults of arguments."""

import inspect

import minfer
import pytest
import torch
from minfer._core.signatures import signature_of, with_out

from tests.contracts import operator_cases

NAMES = sorted(operator_cases.names())
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


def facts(argument):
    return argument.name, str(argument.type), argument.kwarg_only, argument.default_value


@pytest.mark.parametrize("name", NAMES)
def test_wrapper_and_schema(name):
    parameters = dict(inspect.signature(getattr(minfer, name)).parameters)
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
            assert parameter.annotation == "torch.dtype | None", argument.name
    assert getattr(minfer, name).__doc__ and getattr(minfer, name).__name__ == name


def test_only_what_is_given_is_handed_on():
    given = []

    @signature_of(lambda *args, **options: given.append((args, options)))
    def documented(a, b=1, *, c=2, d=3):
        """What it is."""

    documented(5)
    documented(5, 6, d=None)
    assert given == [((5,), {}), ((5, 6), {"d": None})]
    assert documented.__doc__ == "What it is." and list(inspect.signature(documented).parameters) == ["a", "b", "c", "d"]


def test_out_chooses_the_overload():
    class Packet:
        default = staticmethod(lambda *args, **options: ("default", args, options))
        out = staticmethod(lambda *args, **options: ("out", args, options))

    call = with_out(Packet)
    assert call(1, k=2) == call(1, k=2, out=None) == ("default", (1,), {"k": 2})
    assert call(1, k=2, out="x") == ("out", (1,), {"k": 2, "out": "x"})


def test_arguments_that_no_operator_takes():
    a, b = torch.ones(2, 16).half(), torch.ones(16, 8).half()
    for call in (lambda: minfer.gemm(a), lambda: minfer.gemm(a, b, gamma=1.0), lambda: minfer.gemm(a, b, None)):
        with pytest.raises(RuntimeError, match="minfer::gemm"):
            call()
