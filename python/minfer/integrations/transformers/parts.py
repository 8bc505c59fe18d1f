"""What is replaced of a model whose layers are not taken over as wholes: norms, gated MLPs, experts, linear layers."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decoder import Norm
from ..decoder.scheme import WeightScheme
from . import experts
from .modules import Unsupported, rms_norm_of
from .replace import Replacements
from .share import attach


def replace_parts(
    model: PreTrainedModel,
    scheme: WeightScheme | None,
    replacements: Replacements,
    taken: set[torch.nn.Module],
    done: Counter[str],
    left: Counter[str],
) -> None:
    """Replaces what applies outside of the modules ``taken``; counts what was replaced, and what was not and why."""
    inside = {id(module) for layer in taken for module in layer.modules()}
    modules = [(name, module) for name, module in model.named_modules() if id(module) not in inside and "forward" not in vars(module)]
    head = model.get_output_embeddings()
    for name, module in modules:
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            own = _proven_norm(module, model.dtype)
            if own is None:
                left[f"{kind}: its forward computes something else, or could not be called"] += 1
            else:
                replacements.set_forward(module, own.forward)
                attach(replacements, module, own)
                done[f"{kind}: one launch"] += 1
        elif (
            scheme is not None and scheme.parts == "all" and type(module) is torch.nn.Linear and module is not head and _is_in_a_layer(name)
        ):
            refused = scheme.refuses(module.out_features, module.in_features)
            if refused is not None:
                left[f"Linear {module.out_features} x {module.in_features}: {refused}"] += 1
            else:
                replacements.replace_module(model, name, scheme.module(module))
                done[f"Linear: {scheme.kind}"] += 1
    if any(hasattr(type(module), "_apply_gate") and hasattr(module, "has_gate") for _, module in modules):
        experts.use(model, replacements, done, left)


def _is_in_a_layer(name: str) -> bool:
    """Whether a linear layer is one of a numbered layer's, and no router."""
    parts = name.split(".")
    return any(part.isdigit() for part in parts) and parts[-1] not in ("gate", "router")


def _proven_norm(module: torch.nn.Module, dtype: torch.dtype) -> Norm | None:
    """The norm that computes what the module does, of those with weights as they are and less 1; seen on random rows."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, weight.shape[0], generator=generator).to(weight.device, dtype)
    try:
        wanted = module(x).float()
    except Exception:  # whatever a forward that is not known wants more
        return None
    for offset in (0.0, 1.0):
        try:
            norm = rms_norm_of(module, dtype, offset)
        except Unsupported:
            return None
        limit = 2.0 * torch.finfo(dtype).eps * (1.0 + wanted.abs())
        if wanted.shape == x.shape and bool(((norm(x).float() - wanted).abs() <= limit).all()):
            return norm
    return None
