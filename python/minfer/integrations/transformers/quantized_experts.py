"""Quantised experts in the place of transformers' module of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...quantize.experts import W4Experts
from ...quantize.scaled_experts import ScaledExperts

ExpertsPair = tuple[W4Experts, W4Experts] | tuple[ScaledExperts, ScaledExperts]
_KINDS = {"w4": W4Experts, "scaled": ScaledExperts}
_DTYPES = {str(x): x for x in (torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32)}


class QuantizedExperts(torch.nn.Module):
    """Both products' weights of all experts of a layer; called as transformers calls its experts.

    The buffers, which the state dict has, are ``w13_<name>`` and ``w2_<name>`` of the tensors of :class:`minfer.quantize.W4Experts` or
    :class:`minfer.quantize.ScaledExperts`; what these have beside tensors are :meth:`facts`.

    Args:
      w13, w2: gate and up, gated, and down.
      activation: of the gate, as in :func:`minfer.moe_ffn`.
    """

    def __init__(self, w13: W4Experts | ScaledExperts, w2: W4Experts | ScaledExperts, activation: str):
        super().__init__()
        self.activation = activation
        self._kind, self._numbers = type(w13), {}
        for place, part in (("w13", w13), ("w2", w2)):
            tensors = part.tensors()
            for name, x in tensors.items():
                self.register_buffer(f"{place}_{name}", x)
            self._numbers[place] = {name: value for name, value in vars(part).items() if name not in tensors and value is not None}

    def parts(self) -> ExpertsPair:
        """(w13, w2), sharing the module's tensors."""
        fields = self._kind.__dataclass_fields__
        found = []
        for place, numbers in self._numbers.items():
            tensors = {name.removeprefix(f"{place}_"): x for name, x in self._buffers.items() if name.startswith(f"{place}_")}
            absent = {name: None for name in ("zeros", "bias", "alpha", "input_scale") if name in fields}
            found.append(self._kind(**(absent | numbers | tensors)))
        return tuple(found)

    def facts(self) -> dict[str, Any]:
        """What :meth:`empty` makes a module of, for a config file."""
        shapes = {name: [list(x.shape), str(x.dtype)] for name, x in self._buffers.items()}
        kind = next(name for name, of in _KINDS.items() if of is self._kind)
        return {"kind": kind, "activation": self.activation, "numbers": self._numbers, "tensors": shapes}

    @classmethod
    def empty(cls, facts: dict[str, Any], device: torch.device | str = "meta") -> QuantizedExperts:
        """A module of :meth:`facts`, whose buffers are to be loaded."""
        parts = []
        for place in ("w13", "w2"):
            tensors = {
                name.removeprefix(f"{place}_"): torch.empty(shape, dtype=_DTYPES[dtype], device=device)
                for name, (shape, dtype) in facts["tensors"].items()
                if name.startswith(f"{place}_")
            }
            kind = _KINDS[facts["kind"]]
            absent = {name: None for name in ("zeros", "bias", "alpha", "input_scale") if name in kind.__dataclass_fields__}
            parts.append(kind(**(absent | facts["numbers"][place] | tensors)))
        return cls(*parts, facts["activation"])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], the other two [tokens, top_k]: the weighted sum over each token's experts."""
        w13, w2 = self.parts()
        return w13.ffn(hidden_states, w2, top_k_weights.float(), top_k_index.to(torch.int32), activation=self.activation)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, x in kept.items():  # codes and scales have types of their own, which .half() or .to(dtype) does not mean
            if self._buffers[name].dtype != x.dtype and not name.endswith("_bias"):
                self._buffers[name] = x.to(self._buffers[name].device)
        return self

    def extra_repr(self) -> str:
        shape = list(self._buffers["w13_qweight" if self._kind is W4Experts else "w13_weight"].shape)
        return f"{self._kind.__name__} {shape}, activation={self.activation}"
