"""How the weights of a model are quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...formats import weight_layout
from ...nn import Fp8Linear, Int8Linear, W4Linear, W8Linear
from ...quantize.experts import W4Experts, quantize_w4_experts
from ...quantize.round_to_nearest import quantize_w4, quantize_w8
from ...quantize.scaled_experts import ScaledExperts, quantize_fp8_experts, quantize_int8_experts
from ...quantize.scaled_weight import quantize_fp8_weight, quantize_int8_weight
from .mlp import DenseExperts
from .weights import Dense, Weight

KINDS = ("w4a16", "nf4", "mxfp4", "w8a16", "fp8", "int8")
PARTS = ("all", "experts")


@dataclass(frozen=True)
class WeightScheme:
    """What linear layers and experts become.

    Attributes:
      kind: "w4a16": int4 codes, symmetric; "nf4", "mxfp4": 4-bit floating-point codes; "w8a16": int8 codes beside 16-bit activations;
        "fp8": e4m3, activations too; "int8": int8 with a scale for each row, activations too.
      group_size: columns of a scale, of "w4a16" (128), "nf4" (64), "w8a16" (-1: all columns) and "fp8" (128: blocks of 128 x 128, and 128
        of a token; or -1: rows, and tokens); None: the one that stands first. The others have no choice.
      parts: "all", or "experts": linear layers keep their 16 bits.
    """

    kind: str
    group_size: int | None = None
    parts: str = "all"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"weights must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.group_size is not None and self.kind not in _GROUPS:
            raise ValueError(f"group_size must be None for {self.kind}, got {self.group_size}")
        if self.kind == "fp8" and self.groups not in (128, -1):
            raise ValueError(f"group_size must be 128 or -1 for fp8, got {self.group_size}")
        if self.parts not in PARTS:
            raise ValueError(f"parts must be one of {', '.join(PARTS)}, got {self.parts!r}")

    @property
    def groups(self) -> int | None:
        """The group size that is used."""
        return self.group_size if self.group_size is not None else _GROUPS.get(self.kind)

    def refuses(self, n: int, k: int) -> str | None:
        """Why a weight [n, k] cannot be quantised so, or None."""
        unit = weight_layout.MULTIPLE
        if self.kind in ("fp8", "int8"):
            return None
        return None if n % unit == 0 and k % unit == 0 else f"its {n} x {k} weight is not of multiples of {unit}"

    def quantize(self, weight: Dense) -> Weight:
        """A 16-bit weight, by rounding to nearest."""
        options: dict[str, Any] = {"bias": weight.bias}
        if self.kind in ("w4a16", "nf4", "mxfp4"):
            form = "int4" if self.kind == "w4a16" else self.kind
            return quantize_w4(weight.weight, self.groups, True, form, **options)
        if self.kind == "w8a16":
            return quantize_w8(weight.weight, self.groups, **options)
        if self.kind == "fp8":
            return quantize_fp8_weight(weight.weight, self._fp8_mode, **options)
        return quantize_int8_weight(weight.weight, **options)

    @property
    def _fp8_mode(self) -> str:
        return "block128" if self.groups == 128 else "channel"

    def refuses_experts(self, device: torch.device) -> str | None:
        """Why experts cannot be quantised so, or None."""
        if self.kind == "w8a16":
            return "there is no product of experts with 8-bit weights and 16-bit activations"
        if self.kind == "nf4" and device.type == "cuda":
            return "no kernel multiplies experts of nf4"
        return None

    def quantize_weight_of_experts(self, weight: Tensor, bias: Tensor | None, gate_layout: str | None) -> W4Experts | ScaledExperts:
        """A 16-bit weight [experts, n, k] and its bias [experts, n], by rounding to nearest. gate_layout: of gate and up rows, or None."""
        options: dict[str, Any] = {"bias": bias}
        if gate_layout is not None:
            options |= {"gated": True, "gate_layout": gate_layout}
        if self.kind in ("w4a16", "nf4", "mxfp4"):
            form = "int4" if self.kind == "w4a16" else self.kind
            return quantize_w4_experts(weight.contiguous(), self.groups, format=form, **options)
        if self.kind == "fp8":
            return quantize_fp8_experts(weight.contiguous(), self._fp8_mode, **options)
        return quantize_int8_experts(weight.contiguous(), **options)

    def quantize_experts(self, experts: DenseExperts) -> tuple[W4Experts, W4Experts] | tuple[ScaledExperts, ScaledExperts]:
        """16-bit experts, by rounding to nearest."""
        first = self.quantize_weight_of_experts(experts.w13, experts.b13, experts.gate_layout)
        return first, self.quantize_weight_of_experts(experts.w2, experts.b2, None)

    def module(self, linear: torch.nn.Linear) -> torch.nn.Module:
        """A linear layer as a module of :mod:`minfer.nn`."""
        return module_of(
            self.quantize(Dense(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())), linear.weight.dtype
        )


_GROUPS = {"w4a16": 128, "nf4": 64, "w8a16": -1, "fp8": 128}


def module_of(weight: Weight, dtype: torch.dtype) -> torch.nn.Module:
    """The module of :mod:`minfer.nn` that holds a quantised weight; dtype: of the output of 8-bit products."""
    for kind in (W4Linear, W8Linear):
        if isinstance(weight, kind._kind):
            return kind.from_weight(weight)
    kind = Fp8Linear if isinstance(weight, Fp8Linear._kind) else Int8Linear
    return kind.from_weight(weight, dtype=dtype)
