"""All that minfer uses of torch without torch documenting it.

A new version of torch may move or change any of these; then the import of minfer fails here, with the name that is missing and the versions
that are known to have it, and not later with a wrong result. ``tests/contracts/test_torch_private.py`` calls each of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

TESTED = "2.10 to 2.13"

Overload = torch._ops.OpOverload  # torch.ops.minfer.gemm.default
Packet = torch._ops.OpOverloadPacket  # torch.ops.minfer.gemm


def _find(path: str) -> Any:
    """``torch.<path>``.

    Raises:
      ImportError: this version of torch has no such name.
    """
    try:
        return operator.attrgetter(path)(torch)
    except AttributeError as error:
        message = f"minfer needs torch.{path}, which torch {torch.__version__} does not have; versions {TESTED} have it"
        raise ImportError(message) from error


# ---- the dispatcher --------------------------------------------------------------------------------------------------------------

AFTER_AUTOGRAD = _find("_C._after_autograd_keyset")
AFTER_INPLACE_OR_VIEW = _find("_C._after_ADInplaceOrView_keyset")
_find("_ops.OpOverload.redispatch")
_find("_ops.OpOverload.py_functionalize_impl")


def schema_of(overload: Overload) -> torch.FunctionSchema:
    """Its ``arguments`` and ``returns``: each has name, type, kwarg_only, default_value and alias_info."""
    return overload._schema


def overloads_of(packet: Packet) -> tuple[Overload, Overload | None]:
    """The functional form, and the one that writes to ``out`` where there is one."""
    return packet.default, packet.out if "out" in packet.overloads() else None


def redispatcher(overload: Overload) -> Callable[..., Any]:
    """A function of (keys, *args, **kwargs) that calls the operator's kernel for the first of these dispatch keys."""
    return overload.redispatch


def is_written(argument: Any) -> bool:
    """Whether a schema marks an argument as one that the operator writes, as in ``Tensor(a!) out``."""
    return argument.alias_info is not None and argument.alias_info.is_write


# ---- autograd and functional transforms ------------------------------------------------------------------------------------------

transforms_are_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active")  # of torch.func: grad, vjp, ...
forward_ad._current_level  # noqa: B018  an AttributeError here, not at the first call
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")  # writes that torch has counted


def forward_mode_is_active() -> bool:
    return forward_ad._current_level >= 0


# ---- CUDA ------------------------------------------------------------------------------------------------------------------------

when_cuda_is_first_used: Callable[[Callable[[], Any]], None] = _find("cuda._lazy_call")  # at once, where it has been

# ---- tracing ---------------------------------------------------------------------------------------------------------------------


def constant_in_compiled_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile calls the function where it traces, and takes the result as a constant. As torch.compiler.assume_constant_result, which
    imports the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_set_strategy, _Strategy, _Action = (
    _find(f"_C._dynamo.eval_frame.{name}") for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)


def never_compiled(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torch.compile breaks its graph before the function, or raises with this reason, and never compiles it. As torch.compiler.disable,
    which imports the compiler; functions that it calls are not taken in."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.DEFAULT))
        return function

    return marked


_modes, _modes_before_autograd = _find("_C._len_torch_dispatch_stack"), _find("_ops._len_torch_dispatch_stack_pre_dispatch")


def dispatch_modes_are_active() -> bool:
    """Whether a tracer or another mode sees the operators that are called."""
    return _modes() > 0 or _modes_before_autograd() > 0


def functionalized_by(overload: Overload) -> Callable[[Callable], Callable]:
    """A decorator: the function stands in for the operator where torch.compile replaces writes by new values."""
    return overload.py_functionalize_impl


def mode_of(context: Any) -> Any:
    """Of what such a function is given: the mode in which operators on the same tensors are replaced as well."""
    return context.mode


def keep_strides(overload: Overload) -> None:
    """A compiled graph hands the operator the strides that eager mode would, because the layout chooses the kernel."""
    overload.tags.append(torch.Tag.needs_fixed_stride_order)


def is_certain(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold; one on a symbolic size without a hint is not."""
    if isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(condition)
    return bool(condition)


_DISABLE_TORCH_FUNCTION = _find("_C.DisableTorchFunction")


def without_torch_functions() -> Any:
    """A context in which functions of torch run as themselves, whatever mode or subclass overrides them."""
    return _DISABLE_TORCH_FUNCTION()


# ---- guards ----------------------------------------------------------------------------------------------------------------------

_find("_guards.TracingContext.try_get")
_Guard = _find("_guards.Guard")


def guard_on(value: Callable[[], bool], text: str) -> None:
    """While torch.compile traces a function: what it makes of it runs where value() is what it is now, elsewhere it is traced again.
    ``text``: value() as messages about recompilation name it."""
    tracing = torch._guards.TracingContext.try_get()
    if tracing is None or tracing.guards_context is None:
        return
    from torch._dynamo.source import GlobalStateSource

    guards, create = tracing.guards_context.dynamo_guards, _guard_of(value, value(), text)
    if not any(guard.create_fn is create for guard in guards):  # one is enough, however many operators ask for it
        guards.add(_Guard(GlobalStateSource(), create))


@functools.cache
def _guard_of(value: Callable[[], bool], expected: bool, text: str) -> Callable[[Any, Any], None]:
    def create(builder: Any, guard: Any) -> None:
        root, holds, code = builder.guard_manager.root, lambda _: value() == expected, [f"{text} == {expected}"]
        try:
            root.add_lambda_guard(holds, code, guard.user_stack)
        except (AttributeError, TypeError):  # up to torch 2.11 guards have no user_stack
            root.add_lambda_guard(holds, code)

    return create
