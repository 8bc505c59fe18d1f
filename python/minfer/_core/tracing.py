"""What torch.compile needs of the operators beyond their fakes; all of it follows from the schemas.

* Layout: an operand keeps the stride order that it has in eager mode, so a compiled graph runs the kernel that eager mode would.
* ``minfer::gemm.out`` and its like return their output argument, which functionalisation refuses of operators outside ATen: they are
  traced as the functional form and a copy into ``out``; Inductor drops the copy unless ``out`` is an input of the graph.
* Inductor's code for calling an operator has a parameter named ``kernel`` of its own, so a node must not carry that keyword. A call
  with an override is traced as ``minfer::_gemm_override`` or its like, which call the operator; a call without one leaves it out. Of an
  operator that writes its arguments torch names every keyword in the graph, so that it is always traced as its override, the empty one if
  need be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .namespace import NAMESPACE, ops
from .torch_private import Overload, functionalized_by, is_written, keep_strides, mode_of, schema_of

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def override_schema(schema: str) -> str:
    """The schema of an operator's override: positional arguments, then the kernel as ``str override``, then the keywords.

    Keywords keep their defaults: a graph in torch.compile's cache on disk does not have a keyword that the operator got later. Positional
    ones lose theirs, because an argument without a default follows.
    """
    name, _, rest = schema.partition("(")
    arguments, arrow, returns = rest.rpartition(") -> ")
    positional, star, keywords = arguments.partition(", *, ")
    positional = ", ".join(argument.partition("=")[0] for argument in positional.split(", "))
    others = ", ".join(keyword for keyword in keywords.split(", ") if keyword != "str? kernel=None")
    keywords = f"{star}{others}" if others else ""
    return f"_{name.removeprefix(f'{NAMESPACE}::')}_override({positional}, str override{keywords}{arrow}{returns}"


def _functional(context: Any, operator: Overload, override: Overload | None, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls ``operator`` below functionalisation, without the keyword ``kernel``; arguments and result are plain tensors."""
    kernel = kwargs.pop("kernel", None)
    if kernel is not None:
        args, kwargs = _arguments_of_override(operator, args, kwargs, kernel)
        operator = override
    with context.redispatch_to_next():
        return operator(*args, **kwargs)


def _arguments_of_override(operator: Overload, args: tuple, kwargs: dict[str, Any], kernel: str) -> tuple[tuple, dict[str, Any]]:
    schema = schema_of(operator).arguments
    positional = [x for x in schema if not x.kwarg_only]
    args = (*args, *(kwargs.pop(x.name, x.default_value) for x in positional[len(args) :]), kernel)
    defaults = {x.name: x.default_value for x in schema if x.kwarg_only and x.name != "kernel"}
    return args, {**defaults, **kwargs}


def register(operator: Overload) -> Overload | None:
    """The functional form of an operator, or one that writes its arguments; returns its override, where it takes ``kernel``."""
    keep_strides(operator)
    schema = schema_of(operator)
    if not any(argument.name == "kernel" for argument in schema.arguments):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args[:-1], kernel=args[-1] or None, **kwargs)

    text = override_schema(str(schema))
    name = text.partition("(")[0]
    _library.define(text, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", call, lib=_library)
    override = getattr(ops, name).default

    writes = any(map(is_written, schema.arguments))

    @functionalized_by(operator)
    def functional(context: Any, *args: Any, **kwargs: Any) -> Any:
        if writes:  # torch makes new values of what the override writes
            args, kwargs = _arguments_of_override(operator, args, kwargs, kwargs.pop("kernel", None) or "")
            with mode_of(context):
                return override(*args, **kwargs)
        args, kwargs = context.unwrap_tensors(args), context.unwrap_tensors(kwargs)
        return context.wrap_tensors(_functional(context, operator, override, args, kwargs))

    return override


def register_out(
    operator: Overload,
    out_form: Overload,
    override: Overload | None,
    check: Callable[..., Any],
    written: Callable[..., torch.Tensor] | None,
) -> None:
    """The out form: the functional one and a copy; ``written`` as in :class:`minfer._core.operator.OutForm`."""
    takes_dtype = any(argument.name == "out_dtype" for argument in schema_of(operator).arguments)

    @functionalized_by(out_form)
    def functional_out(context: Any, *args: Any, out: Any, **kwargs: Any) -> Any:
        args, kwargs, plain_out = context.unwrap_tensors(args), context.unwrap_tensors(kwargs), context.unwrap_tensors(out)
        check(*args, **kwargs, out=plain_out)  # the functional form does not see `out`
        if takes_dtype:
            kwargs["out_dtype"] = out.dtype
        result = _functional(context, operator, override, args, kwargs)
        if written is not None:
            with context.redispatch_to_next():
                result = written(result, plain_out, *args)
        context.replace(out, result)
        context.commit_update(out)
        context.sync(out)
        return out
