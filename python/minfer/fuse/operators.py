"""Operators of torch that fused functions become, in the namespace ``minfer_fuse``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core import autograd
from .._core.torch_private import Overload

NAMESPACE = "minfer_fuse"
_library: torch.library.Library | None = None
_names: dict[str, int] = {}


def _lib() -> torch.library.Library:
    global _library
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")
    return _library


def define(name: str, schema: str, returns: int | None, *, cuda: Callable[..., Any], cpu: Callable[..., Any],
           fake: Callable[..., Any]) -> Overload:  # fmt: skip
    """An operator that returns a list of tensors, or as many as `returns` says: the functions give lists in any case. A name that was there
    gets a number: a function may be defined again."""
    name = re.sub(r"\W", "_", name)
    count = _names[name] = _names.get(name, 0) + 1
    if count > 1:
        name = f"{name}_{count}"
    library = _lib()
    result = "Tensor[]" if returns is None else "Tensor" if returns == 1 else f"({', '.join(['Tensor'] * returns)})"
    if returns is not None:
        cuda, cpu, fake = (_counted(function, returns) for function in (cuda, cpu, fake))
    library.define(f"{name}({schema}) -> {result}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    library.impl(name, cuda, "CUDA")
    library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    autograd.register(library, op)
    return op


def _counted(function: Callable[..., list[Tensor]], returns: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        return None if returns == 0 else results[0] if returns == 1 else tuple(results)

    return call


def unwrapped(results: Any) -> Any:
    """As the function returned them."""
    if not isinstance(results, list):
        return results
    return None if not results else results[0] if len(results) == 1 else tuple(results)
