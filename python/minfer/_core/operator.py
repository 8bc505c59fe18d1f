"""The declaration of an operator, from which everything that torch asks for beside the CUDA kernel is derived.

    @operator(check=check_gemm, reference=reference.gemm)
    def gemm(a: Tensor, b: Tensor, *, bias: Tensor | None = None, ...) -> Tensor:
        '''What it computes.'''

The function has no body: it is what users call, typed and documented. The schema, with the same arguments and defaults, stands in C++
beside the CUDA implementation (``cpp/torch/<family>.cpp``). From the schema that the dispatcher holds, the check and the reference follow

* the fakes, for meta tensors and torch.compile: the check, then empty results;
* the CPU kernels: the check, what only reading memory can check, then the reference;
* the autograd rules (:mod:`minfer._core.autograd`);
* functionalisation of ``out`` and ``kernel``, and the stride order of operands (:mod:`minfer._core.tracing`).

``tests/contracts/test_declarations.py`` holds every declaration against its schema.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..checks.common import Result, check_no_overlap, is_same_view
from . import autograd, batch_invariance, tracing
from .namespace import NAMESPACE, ops
from .torch_private import Overload, is_written, overloads_of, schema_of

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
Call = Callable[..., Any]

# Arguments that say how a result is computed, not which: they are checked, and no reference takes them.
HOW = frozenset({"constant_weights", "fast_accum", "kernel", "num_splits"})

_library = torch.library.Library(NAMESPACE, "IMPL")


class OutForm(NamedTuple):
    """What is special about an operator's out form."""

    may_be: Collection[str] = ()  # arguments that may be `out` itself, the same view
    unread: Callable[..., Collection[str]] | None = None  # of the call's arguments: those that it does not read
    written: Callable[..., Tensor] | None = None  # (result, out, *arguments): what `out` holds then, where not all of it is written


class Operator(NamedTuple):
    """A declaration.

    ``check`` takes the schema's arguments, and ``out``; it raises, or returns what the operator returns, as a Result or a tuple of them.
    ``reference`` takes the arguments without those in HOW. ``values`` takes the same and checks what only reading memory can tell.
    """

    name: str
    wrapper: Call
    check: Call
    reference: Call
    values: Call | None
    out: OutForm


OPERATORS: dict[str, Operator] = {}


def operator(
    *,
    check: Call,
    reference: Call,
    values: Call | None = None,
    out: OutForm = OutForm(),  # noqa: B008  it is immutable
    before: Callable[[Call], Call] | None = None,
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Declares the operator of the decorated function's name, see :class:`Operator`; ``before`` wraps its call where the function takes
    more than the schema does.

    What the caller does not give is not handed on: the schema has the same defaults, and each one would cost 0.3 us of host time on its way
    into the dispatcher, which looks its name up and makes a value of it.
    """

    def declare(signature: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        packet = getattr(ops, signature.__name__)
        default, into = overloads_of(packet)
        call = default if into is None else _with_out(default, into)
        wrapper = _wrapper_of(signature, call if before is None else before(call))
        declared = OPERATORS[signature.__name__] = Operator(signature.__name__, wrapper, check, reference, values, out)
        _register(default, declared)
        override = tracing.register(default)
        if into is not None:
            _register_out(into, declared)
            tracing.register_out(default, into, override, check, out.written)
        return wrapper

    return declare


def _with_out(default: Overload, into: Overload) -> Call:
    """The functional form, or with ``out`` the other one."""

    def call(*args: Any, out: Tensor | None = None, **options: Any) -> Any:
        return default(*args, **options) if out is None else into(*args, out=out, **options)

    return call


def _wrapper_of(signature: Callable[Parameters, Returned], call: Call) -> Callable[Parameters, Returned]:
    """``call`` under the name, the signature and the documentation of a function without a body."""

    @functools.wraps(signature)
    def run(*args: Any, **options: Any) -> Any:
        return call(*args, **options)

    return run


# ---- kernels that follow from check and reference -----------------------------------------------------------------------------------


def _empty(results: Any) -> Any:
    if results is None or isinstance(results, Result):
        return None if results is None else results.empty()
    return tuple(result.empty() for result in results)


def _fix_layout(x: Tensor) -> None:
    """Makes constants of the sizes that a view's layout depends on: of one at a symbolic offset, Inductor writes at offset 0 (torch 2.13,
    pytorch#198068)."""
    if isinstance(x.storage_offset(), torch.SymInt):
        for size in (*x.shape, *x.stride(), x.storage_offset()):
            int(size)


def _computed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in HOW}


def _register(overload: Overload, declared: Operator) -> None:
    """The fake and the CPU kernel of a functional form, or of an operator that writes its arguments."""
    schema = schema_of(overload)
    written = [(i, argument.name) for i, argument in enumerate(schema.arguments) if is_written(argument)]

    def fake(*args: Any, **options: Any) -> Any:
        batch_invariance.guard()
        for i, name in written:
            x = args[i] if i < len(args) else options.get(name)
            if x is not None:
                _fix_layout(x)
        return _empty(declared.check(*args, **options))

    def cpu(*args: Any, **options: Any) -> Any:
        batch_invariance.check(declared.name)
        declared.check(*args, **options)
        if declared.values is not None:
            declared.values(*args, **_computed(options))
        return declared.reference(*args, **_computed(options))

    # Of an empty list of tensors no device can be told: such operators have one kernel for all devices but those that have their own.
    lists_alone = all(str(argument.type) != "Tensor" for argument in schema.arguments)
    torch.library.register_fake(schema.name, fake, lib=_library)
    _library.impl(overload, cpu, "CompositeExplicitAutograd" if lists_alone else "CPU")
    autograd.register(_library, overload)


def _register_out(overload: Overload, declared: Operator) -> None:
    """The fake and the CPU kernel of an out form."""
    schema, form = schema_of(overload), declared.out
    names = [argument.name for argument in schema.arguments]
    takes_dtype = "out_dtype" in names

    def fake(*args: Any, out: Tensor, **options: Any) -> Tensor:
        batch_invariance.guard()
        declared.check(*args, **options, out=out)
        return out

    def cpu(*args: Any, out: Tensor, **options: Any) -> Tensor:
        batch_invariance.check(declared.name)
        declared.check(*args, **options, out=out)
        given = dict(zip(names, args, strict=False)) | options
        unread = form.unread(**given) if form.unread else ()
        same = [name for name in form.may_be if given.get(name) is not None and is_same_view(out, given[name])]
        others = {name: x for name, x in given.items() if isinstance(x, Tensor) and name not in unread and name not in same}
        check_no_overlap(declared.name, out, **others)
        options = _computed(options) | ({"out_dtype": out.dtype} if takes_dtype else {})
        if declared.values is not None:
            declared.values(*args, **options)
        result = declared.reference(*args, **options)
        return out.copy_(result if form.written is None else form.written(result, out, *args))

    torch.library.register_fake(f"{schema.name}.out", fake, lib=_library)
    _library.impl(overload, cpu, "CPU")
    autograd.register(_library, overload)
