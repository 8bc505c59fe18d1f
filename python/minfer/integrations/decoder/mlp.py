"""What stands behind attention in a layer: an MLP, or experts and their router."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.gemm import gemm
from ...ops.grouped_gemm import moe_ffn
from ...ops.moe_routing import moe_router, moe_router_gemm
from ...quantize.experts import W4Experts
from ...quantize.scaled_experts import ScaledExperts
from .partial_sum import PartialSum
from .projection import Projection


class Mlp(torch.nn.Module):
    """down(activation(first(x))): gated (SwiGLU, GeGLU) or not (GPT-2), as ``first`` is."""

    def __init__(self, first: Projection, down: Projection):
        super().__init__()
        if down.in_features != first.out_features:
            raise ValueError(
                f"Mlp: down must have the {first.out_features} columns that the first projection makes, got {down.in_features}"
            )
        self.first, self.down = first, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.first(x))


class Router(torch.nn.Module):
    """Each token's experts and their weights, float32 [tokens, top_k] and int32 [tokens, top_k].

    Args:
      weight: [experts, hidden], the activations' dtype.
      bias: [experts] or None, of the logits.
      top_k, scoring, renormalize, scale: as in :func:`minfer.moe_router`.
      correction_bias: float32 [experts] or None, as there.
    """

    def __init__(
        self,
        weight: Tensor,
        top_k: int,
        *,
        bias: Tensor | None = None,
        scoring: str = "softmax",
        renormalize: bool = True,
        correction_bias: Tensor | None = None,
        scale: float = 1.0,
    ):
        super().__init__()
        for name, x in (("weight", weight), ("bias", bias), ("correction_bias", correction_bias)):
            self.register_buffer(name, x, persistent=False)
        self.top_k, self.options = top_k, {"scoring": scoring, "renormalize": renormalize, "scale": scale}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        options = {**self.options, "correction_bias": self.correction_bias}
        if self.bias is None:
            return moe_router_gemm(x, self.weight, self.top_k, **options)
        logits = gemm(x, self.weight.t(), bias=self.bias, out_dtype=torch.float32, constant_weights=True)
        return moe_router(logits, self.top_k, **options)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} experts, top_k={self.top_k}, " + ", ".join(f"{name}={x}" for name, x in self.options.items())


class DenseExperts:
    """16-bit weights of all experts of a layer, for :func:`minfer.moe_ffn`; any strides that :func:`minfer.grouped_gemm` takes.

    Attributes:
      w13: [experts, 2 * inter, hidden]; b13: [experts, 2 * inter] or None. gate_layout: the order of gate and up rows.
      w2: [experts, hidden, inter]; b2: [experts, hidden] or None.
    """

    def __init__(self, w13: Tensor, w2: Tensor, b13: Tensor | None = None, b2: Tensor | None = None, gate_layout: str = "halves"):
        self.w13, self.w2, self.b13, self.b2, self.gate_layout = w13, w2, b13, b2, gate_layout


class Experts(torch.nn.Module):
    """A mixture of experts: router, sort, both products and the weighted sum.

    Args:
      router: of the layer.
      experts: :class:`DenseExperts`, or (w13, w2) of :class:`minfer.quantize.W4Experts` or :class:`minfer.quantize.ScaledExperts`.
      activation: of the gate, as in :func:`minfer.moe_ffn`.
    """

    _DENSE = ("w13", "w2", "b13", "b2")

    def __init__(
        self,
        router: Router,
        experts: DenseExperts | tuple[W4Experts, W4Experts] | tuple[ScaledExperts, ScaledExperts],
        activation: str = "silu",
    ):
        super().__init__()
        self.router, self.activation = router, activation
        self.inter = experts.w2.shape[2] if isinstance(experts, DenseExperts) else experts[1].k
        if isinstance(experts, DenseExperts):
            self._kind, self._layout = None, experts.gate_layout
            for name in self._DENSE:
                self.register_buffer(name, getattr(experts, name), persistent=False)
        else:
            self._kind, self._facts = type(experts[0]), []
            for place, part in zip(("w13", "w2"), experts, strict=True):
                tensors = part.tensors()
                for name, x in tensors.items():
                    self.register_buffer(f"{place}_{name}", x, persistent=False)
                own = {name: value for name, value in vars(part).items() if name not in tensors and value is not None}
                self._facts.append((place, tuple(tensors), own))

    def _parts(self) -> list[W4Experts | ScaledExperts]:
        parts = []
        for place, names, own in self._facts:
            absent = {name: None for name in ("zeros", "bias", "alpha", "input_scale") if name in self._kind.__dataclass_fields__}
            parts.append(self._kind(**(absent | own | {name: self._buffers[f"{place}_{name}"] for name in names})))
        return parts

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The weighted sum over each token's experts; weights and ids as a router returns them."""
        if self._kind is None:
            more = dict(activation=self.activation, b13=self.b13, b2=self.b2, gate_layout=self._layout)
            return moe_ffn(x, self.w13, self.w2, weights, ids, **more)
        first, down = self._parts()
        return first.ffn(x, down, weights, ids, activation=self.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply(x, *self.router(x))

    def partial_sum(self, x: Tensor) -> PartialSum | None:
        """As that of a :class:`Projection`."""
        return None

    @property
    def weight_format(self) -> str:
        if self._kind is None:
            return str(self.w13.dtype).removeprefix("torch.")
        first = self._parts()[0]
        if isinstance(first, W4Experts):
            return first.w4_format + ("" if first.group_size == -1 else f", groups of {first.group_size}")
        return f"{'int8' if first.weight.dtype == torch.int8 else 'fp8'}, scales by {first.mode}"

    def extra_repr(self) -> str:
        return f"{self.weight_format}, activation={self.activation}"
