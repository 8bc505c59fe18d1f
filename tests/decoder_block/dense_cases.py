"""Calls of the decoder block of 16-bit weights, as :mod:`tests.decoder_block.cases` has those of int4 ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import minfer
import torch
from torch import Tensor

from tests.decoder_block.cases import Case, Operands, Rows, Steps, Truth

UNIT_OF_GROUP = 2.0**-38  # of float16 operands, relative to the largest of 128


@dataclass
class DenseSteps(Steps):
    """Weights are exact. What a norm's weight makes of x is rounded, with or without the norm's factor."""

    def fixed_error(self, x: Tensor) -> Tensor | float:
        if x.shape[-1] == 0:
            return 0.0
        blocks = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
        return UNIT_OF_GROUP * blocks.amax(-1).repeat_interleave(128, -1)[:, : x.shape[-1]]

    def weight_error(self, w: Tensor) -> Tensor | None:
        return None

    def product(self, x: Rows, w: Tensor, *addends: Tensor | None) -> Rows:
        return Steps.product(replace(self, separate=False), x, w, *addends)


@dataclass
class DenseCase(Case):
    def make(self, device: str = "cpu") -> DenseOperands:
        return DenseOperands(self, device)

    def options(self) -> dict[str, Any]:
        options = super().options()
        del options["group_size"]
        return options

    def change(self, **fields: Any) -> DenseCase:
        return replace(self, **fields)


class DenseOperands(Operands):
    """``dense``: the weights, by their names."""

    def make_weights(self, sizes: dict[str, tuple[int, int]], device: str) -> None:
        self.dense = {name: (torch.randn(n, k, device=device) / math.sqrt(max(k, 1))).to(self.case.dtype) for name, (n, k) in sizes.items()}

    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"a": self.a, "mlp_norm": self.norms["mlp"], "next_norm": self.norms["next"]}
        found |= {f"{name}_weight": weight for name, weight in self.dense.items()}
        return found | {f"{name}_bias": bias for name, bias in self.biases.items()} | self.case.options()

    def again(self, **more: Any) -> Tensor:
        return minfer.decoder_block(**(self.arguments() | {"residual": self.residual} | more))

    def truth(self, steps: Steps, before: Tensor | None = None) -> Truth:
        weights = {name: weight.double() for name, weight in self.dense.items()}
        before = self.before if before is None else before
        return Truth(steps, self.a, before, weights, self.norms, self.biases, self.case.options(), self.a_deviation)

    def steps(self, kernel: str | None) -> Steps:
        return DenseSteps(self.case.dtype)


def by_operators(t: DenseOperands) -> tuple[Tensor, Tensor]:
    """D and the residual by the package's other operators."""
    case, args = t.case, t.arguments()

    def norm(name: str, x: Tensor) -> Tensor:
        return minfer.rms_norm(x, args[name], args["eps"], weight_offset=case.weight_offset)

    x = minfer.gemm(t.a, args["o_weight"].t(), c=t.before, beta=1.0, bias=args["o_bias"])
    h = minfer.gemm_gated(norm("mlp_norm", x), args["gate_up_weight"].t(), activation=case.activation)
    x = minfer.gemm(h, args["down_weight"].t(), c=x, beta=1.0, bias=args["down_bias"])
    return minfer.gemm(norm("next_norm", x), args["next_weight"].t(), bias=args["next_bias"]), x


SIZES = (("o", 128, 64), ("gate_up", 144, 128), ("down", 128, 72), ("next", 40, 128))  # of the call that is right: names, n, k


def good(device: str) -> dict[str, Any]:
    """Keywords of a call that is right: 3 rows, k = 64, h = 128, inter = 72, n = 40."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float16, device=device)

    found: dict[str, Any] = {"a": zeros(3, 64), "residual": zeros(3, 128), "mlp_norm": zeros(128), "next_norm": zeros(128)}
    return found | {f"{name}_weight": zeros(n, k) for name, n, k in SIZES}


def bad(device: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(Changes of the good call, message)."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    yield dict(a=torch.tensor(1.0, device=device).half()), r"a must have at least one mode, got \[\]"
    yield dict(a=zeros(3, 64, dtype=torch.float32)), "a must be float16 or bfloat16, got "
    yield dict(residual=zeros(4, 128)), r"residual must be \[..., hidden\] with a's rows, got a \[3, 64\], residual \[4, 128\]"
    yield dict(residual=zeros(3, 136)[:, :128]), r"residual must be contiguous, got \[3, 128\]"
    yield dict(residual=zeros(3, 120)), r"o_weight must have 120 rows, got \[128, 64\]"
    for name, n, k in SIZES:
        yield {f"{name}_weight": zeros(n, k, dtype=torch.bfloat16)}, f"{name}_weight must have a's dtype .*, got "
        yield {f"{name}_weight": zeros(n)}, rf"{name}_weight must be \[n, k\], got \[{n}\]"
        yield {f"{name}_weight": zeros(n, k + 8)}, rf"{name}_weight must have {k} columns, got \[{n}, {k + 8}\]"
    yield dict(gate_up_weight=zeros(136, 128)), r"gate_up_weight must have a multiple of 16 rows .*, got \[136, 128\]"
    for name in ("mlp_norm", "next_norm"):
        yield {name: zeros(127)}, rf"{name} must be \[128\], got \[127\]"
    for name, size in (("o_bias", 128), ("down_bias", 128), ("next_bias", 40)):
        yield {name: zeros(size - 1)}, rf"{name} must be \[n\] = \[{size}\], got \[{size - 1}\]"
        yield {name: zeros(size, dtype=torch.bfloat16)}, f"{name} must be .* or .*, got "
    yield dict(eps=-1.0), "eps must be finite in float32 and not negative, got -1"
    yield dict(weight_offset=math.inf), "weight_offset must be finite in float32, got inf"
    yield dict(activation="swish"), "activation must be one of .*, got 'swish'"
    yield dict(kernel="two_launches"), "kernel must be one_launch or separate, got 'two_launches'"
    memory = zeros(6, 128)
    yield dict(residual=memory[:3], mlp_norm=memory[1]), "residual must not overlap mlp_norm, got "
    wide = zeros(200, 128)
    yield dict(residual=wide[:3], gate_up_weight=wide[2:146]), "residual must not overlap gate_up_weight, got "
