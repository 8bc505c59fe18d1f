"""What torch.compile needs of the operators beyond their fakes.

* Layout: an operand keeps the stride order it has in eager mode, so a compiled graph runs the kernel that eager mode would.
* ``minfer::gemm.out`` returns its output argument, which functionalisation refuses of operators outside ATen: it is traced as the
  functional form and a copy into ``out``; Inductor drops the copy unless ``out`` is an input of the graph.
* Inductor's code for calling an operator has a parameter named ``kernel`` of its own, so a node must not carry that keyword. A call
  with an override is traced as ``minfer::_gemm_override`` or ``minfer::_gemm_gated_override``, which call the operator; a call without
  one leaves it out.
"""

from __future__ import annotations

import torch

from . import checks

_gemm = torch.ops.minfer.gemm.default
_gemm_out = torch.ops.minfer.gemm.out
_gemm_gated = torch.ops.minfer.gemm_gated.default

_library = torch.library.Library("minfer", "FRAGMENT")
_library.define(
    "_gemm_override(Tensor a, Tensor b, str override, *, Tensor? c, Tensor? bias, float alpha, float beta, str activation, "
    "ScalarType? out_dtype) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "_gemm_gated_override(Tensor a, Tensor b, str override, *, Tensor? bias, str activation) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _call_gemm(a, b, override, **epilogue):
    return _gemm(a, b, kernel=override, **epilogue)


def _call_gemm_gated(a, b, override, **epilogue):
    return _gemm_gated(a, b, kernel=override, **epilogue)


for _name, _call in (("_gemm_override", _call_gemm), ("_gemm_gated_override", _call_gemm_gated)):
    _library.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"minfer::{_name}", _call, lib=_library)


def _functional(context, operator, override_operator, args, kwargs):
    """Calls ``operator`` below functionalisation, without the keyword ``kernel``; arguments and result are plain tensors."""
    kernel = kwargs.pop("kernel", None)
    if kernel is not None:
        defaults = {x.name: x.default_value for x in operator._schema.arguments if x.kwarg_only and x.name != "kernel"}
        operator, args, kwargs = override_operator, (*args, kernel), {**defaults, **kwargs}
    with context.redispatch_to_next():
        return operator(*args, **kwargs)


@_gemm.py_functionalize_impl
def _functional_gemm(context, *args, **kwargs):
    args, kwargs = context.unwrap_tensors(args), context.unwrap_tensors(kwargs)
    return context.wrap_tensors(_functional(context, _gemm, torch.ops.minfer._gemm_override.default, args, kwargs))


@_gemm_gated.py_functionalize_impl
def _functional_gemm_gated(context, *args, **kwargs):
    args, kwargs = context.unwrap_tensors(args), context.unwrap_tensors(kwargs)
    return context.wrap_tensors(_functional(context, _gemm_gated, torch.ops.minfer._gemm_gated_override.default, args, kwargs))


@_gemm_out.py_functionalize_impl
def _functional_gemm_out(context, *args, out, **kwargs):
    args, kwargs, plain_out = context.unwrap_tensors(args), context.unwrap_tensors(kwargs), context.unwrap_tensors(out)
    checks.check_gemm(*args, **kwargs, out=plain_out)  # the functional form does not see `out`
    kwargs["out_dtype"] = out.dtype
    context.replace(out, _functional(context, _gemm, torch.ops.minfer._gemm_override.default, args, kwargs))
    context.commit_update(out)
    context.sync(out)
    return out


for _op in (_gemm, _gemm_gated):
    _op.tags.append(torch.Tag.needs_fixed_stride_order)
