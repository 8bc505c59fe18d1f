"""The changes to a model that can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Gone(RuntimeError):
    """Weights that were quantised and not kept."""

    def __init__(self) -> None:
        super().__init__("optimize: the original weights are gone: restorable was False")


def gone() -> None:
    raise Gone


class Replacements:
    """Changes in the order in which they were made; :meth:`undo` takes them back in the reverse order.

    Attributes:
      restorable: whether weights whose numbers change are kept.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.restorable = True

    def on_undo(self, call: Callable[[], None]) -> None:
        self._undo.append(call)

    def undo(self, as_far_as_possible: bool = False) -> None:
        """Takes all changes back; as_far_as_possible: also where weights are gone, which stay so."""
        while self._undo:
            try:
                self._undo.pop()()
            except Gone:
                if not as_far_as_possible:
                    raise

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """An attribute of an instance, which it has not of its own yet."""
        object.__setattr__(owner, name, value)
        self.on_undo(lambda: object.__delattr__(owner, name))

    def set_forward(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        """Another forward for one instance."""
        if "forward" in vars(module):
            before = vars(module)["forward"]
            self.on_undo(lambda: vars(module).__setitem__("forward", before))
        else:
            self.on_undo(lambda: vars(module).pop("forward"))
        vars(module)["forward"] = forward

    def add_child(self, module: torch.nn.Module, child: torch.nn.Module) -> None:
        module.add_module("minfer", child)
        self.on_undo(lambda: module._modules.pop("minfer"))

    def replace_module(self, model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        """Another module in a place of the model. The one that was there is kept in the CPU's memory, or not at all."""
        parent, _, own = name.rpartition(".")
        owner = model.get_submodule(parent)
        before = owner._modules[own]
        device = next(before.parameters()).device
        owner._modules[own] = module
        if self.restorable:
            kept = before.to("cpu")
            self.on_undo(lambda: owner._modules.__setitem__(own, kept.to(device)))
        else:
            self.on_undo(gone)
