"""Autograd rules of operators for inference: the forward works, what would differentiate it raises, whatever the device.

Without a rule the dispatcher lets gradients stop at a CUDA kernel with only a warning, and follows the ATen calls of a CPU kernel. With
these rules every device says the same. They cost 2 to 3 us of host time per eager call under ``no_grad``, and nothing under
``inference_mode``, in a compiled graph or in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .torch_private import (
    AFTER_AUTOGRAD,
    AFTER_INPLACE_OR_VIEW,
    Overload,
    forward_mode_is_active,
    is_written,
    redispatcher,
    schema_of,
    transforms_are_active,
)


def _no_backward(name: str) -> str:
    return f"{name}: has no backward, it is an inference operator; call it under torch.inference_mode() or no_grad()"


class _InferenceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, call, keys, args, kwargs, *_tensors):
        ctx.name = name
        result = call(keys, *args, **kwargs)
        return tuple(result) if isinstance(result, list) else result  # autograd follows no lists

    @staticmethod
    def backward(ctx, *_grads):
        raise RuntimeError(_no_backward(ctx.name))


def _has_tangent(x: Tensor) -> bool:
    return forward_mode_is_active() and forward_ad.unpack_dual(x).tangent is not None


def differentiated(args, kwargs) -> list[Tensor]:
    """The arguments that autograd follows: those that require grad where it is enabled, and those with a tangent, which no_grad() keeps."""
    grad = torch.is_grad_enabled()
    if not grad and not forward_mode_is_active():
        return []
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, list | tuple):  # a schema's Tensor[]
            tensors += [y for y in x if isinstance(y, Tensor)]
    return [x for x in tensors if (grad and x.requires_grad) or _has_tangent(x)]


def _refuse_tangents(name: str, tensors: list[Tensor]) -> None:
    """Without this rule a tangent is followed through the ATen calls of a CPU kernel, and is lost at a CUDA kernel."""
    torch._check(
        not any(map(_has_tangent, tensors)),
        lambda: (
            f"{name}: has no derivative, it is an inference operator; its arguments must have no tangent of forward-mode "
            "differentiation, got one that has"
        ),
    )


def register(library: torch.library.Library, op: Overload) -> None:
    """The rule of a functional form, of an out form or of an operator that writes its arguments, as the schema says."""
    schema = schema_of(op)
    if schema.overload_name == "out":
        _register_out(library, op, schema.name)
    elif any(map(is_written, schema.arguments)):
        _register_in_place(library, op, schema)
    else:
        _register_functional(library, op, schema)


def _register_functional(library: torch.library.Library, op: Overload, schema: torch.FunctionSchema) -> None:
    call, name = redispatcher(op), schema.name
    lists = str(schema.returns[0].type) == "List[Tensor]" if schema.returns else False

    def functional(keyset, *args, **kwargs):
        tensors = differentiated(args, kwargs)
        if tensors:
            _refuse_tangents(name, tensors)
            # A transform of torch.func (grad, vjp, jacrev) takes no autograd.Function of this kind, and would call its backward at once.
            torch._check(not transforms_are_active(), lambda: _no_backward(name))
            results = _InferenceOnly.apply(name, call, keyset & AFTER_AUTOGRAD, args, kwargs, *tensors)
            return list(results) if lists else results
        return call(keyset & AFTER_AUTOGRAD, *args, **kwargs)

    library.impl(op, functional, "Autograd", with_keyset=True)


def _register_out(library: torch.library.Library, op: Overload, name: str) -> None:
    call = redispatcher(op)

    def out_form(keyset, *args, **kwargs):
        tensors = differentiated(args, kwargs)
        _refuse_tangents(name, tensors)
        torch._check(
            not tensors, lambda: f"{name}: out= cannot be differentiated, but an argument requires grad; call it under torch.no_grad()"
        )
        return counted(keyset, *args, **kwargs)

    def counted(keyset, *args, **kwargs):
        """Under inference_mode, too, where a tensor that was not made there keeps its count of writes."""
        out = kwargs["out"]
        if out.is_inference() and not torch.is_inference_mode_enabled():  # torch would refuse to count the write when it is done
            raise RuntimeError(
                f"{name}: out must not be an inference tensor outside of torch.inference_mode(), got one of {list(out.shape)}"
            )
        call(keyset & AFTER_INPLACE_OR_VIEW, *args, **kwargs)
        torch.autograd.graph.increment_version(out)
        return out

    library.impl(op, out_form, "Autograd", with_keyset=True)
    library.impl(op, counted, "ADInplaceOrView", with_keyset=True)


def _register_in_place(library: torch.library.Library, op: Overload, schema: torch.FunctionSchema) -> None:
    """What is stored has no history: nothing that requires grad is taken. Tells autograd which tensors changed."""
    call = redispatcher(op)
    places = [(i, argument.name) for i, argument in enumerate(schema.arguments) if is_written(argument)]

    def in_place(keyset, *args, **kwargs):
        torch._check(
            not differentiated(args, kwargs),
            lambda: f"{schema.name}: cannot be differentiated, but an argument requires grad; call it under torch.no_grad()",
        )
        result = call(keyset & AFTER_AUTOGRAD, *args, **kwargs)
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
        torch.autograd.graph.increment_version([x for x in written if x is not None and not x.is_inference()])
        return result

    library.impl(op, in_place, "Autograd", with_keyset=True)
