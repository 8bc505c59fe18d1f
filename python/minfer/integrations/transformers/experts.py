"""minfer's mixture of experts behind transformers' interface: ``experts_implementation="minfer"``."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...ops.grouped_gemm import moe_ffn
from .modules import Unsupported, activation_of
from .replace import Replacements

NAME = "minfer"


def register() -> None:
    """Makes "minfer" an ``experts_implementation``; again does nothing more."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def activation_of_experts(module: torch.nn.Module) -> str:
    """The activation of a module of transformers' experts."""
    if not module.has_gate:
        raise Unsupported("its experts have no gate")
    if hasattr(module, "limit"):
        if (module.alpha, module.limit) == (1.702, 7.0):
            return "swigluoai"
        raise Unsupported(f"its experts' swiglu has alpha {module.alpha} and limit {module.limit}, where minfer's has 1.702 and 7")
    if "default_apply_gate" not in type(module)._apply_gate.__qualname__:
        raise Unsupported("its experts have a gate of their own")
    return activation_of(getattr(module.config, "hidden_act", None) or module.config.hidden_activation)


def experts_forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: hidden_states [tokens, hidden], the other two [tokens, top_k]."""
    w13, w2 = self.gate_up_proj, self.down_proj
    biases = {"b13": self.gate_up_proj_bias, "b2": self.down_proj_bias} if self.has_bias else {}
    if self.is_transposed:
        w13, w2 = w13.mT, w2.mT
    layout = "halves" if self.is_concatenated else "alternating"
    weights, ids = top_k_weights.float(), top_k_index.to(torch.int32)
    return moe_ffn(hidden_states, w13, w2, weights, ids, activation=activation_of_experts(self), gate_layout=layout, **biases)


def use(model: PreTrainedModel, replacements: Replacements, done: Counter[str], left: Counter[str]) -> None:
    """Lets a model's experts be minfer's, if all of them can be."""
    register()
    found = [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "_apply_gate")]
    for module in found:
        try:
            activation_of_experts(module)
        except Unsupported as error:
            left[f"{type(module).__name__}: {error}"] += len(found)
            return
    before = model.config._experts_implementation
    model.set_experts_implementation(NAME)
    replacements.on_undo(lambda: model.set_experts_implementation(before))
    done[f"{type(found[0]).__name__}: minfer.moe_ffn"] += len(found)
