"""Weights of several linear layers as one: q, k and v, gate and up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checks.scaled_gemm import BLOCK
from ...formats import weight_layout
from ...formats.gate_up import GATE_BLOCK, pack_gate_up
from ...formats.weight_formats import FORMATS
from ...quantize.scaled_weight import Fp8Weight, Int8Weight, aligned_rows, gate_up_weight
from ...quantize.weight import W4Weight, W8Weight


@dataclass(frozen=True, eq=False)
class Dense:
    """A 16-bit weight.

    Attributes:
      weight: [n, k] of any strides: an ``nn.Linear``'s, or the transpose of a GPT-2 ``Conv1D``'s.
      bias: [n], or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    def to(self, device: torch.device | str) -> Dense:
        return Dense(self.weight.to(device), None if self.bias is None else self.bias.to(device))


PackedWeight = W4Weight | W8Weight
ScaledWeight = Fp8Weight | Int8Weight
Weight = Dense | PackedWeight | ScaledWeight


def concatenate(weights: Sequence[Weight]) -> Weight | None:
    """One weight with the rows of all, or None where their formats do not fit together.

    Codes, scales and zero points keep their values. Where 8-bit weights have one scale each, the rows get it; where static activations have
    several scales, the largest is used for all, as in :func:`minfer.quantize.gate_up_weight`.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(type(x) is not type(first) or x.k != first.k for x in weights):
        return None
    if isinstance(first, Dense):
        if any(x.weight.dtype != first.weight.dtype for x in weights):
            return None
        return Dense(torch.cat([x.weight for x in weights]), _biases(weights))
    return _concatenate_packed(weights) if isinstance(first, PackedWeight) else _concatenate_scaled(weights)


def gate_up(gate: Weight, up: Weight) -> Weight | None:
    """Gate and up of a gated MLP as one weight for the gated products, or None where that cannot be."""
    if type(gate) is not type(up) or (gate.n, gate.k) != (up.n, up.k) or gate.n % GATE_BLOCK:
        return None
    if isinstance(gate, Dense):
        bias = _biases((gate, up))
        return Dense(pack_gate_up(gate.weight, up.weight), None if bias is None else pack_gate_up(*bias.chunk(2)))
    if isinstance(gate, ScaledWeight):
        try:
            return gate_up_weight(gate, up)
        except ValueError:
            return None
    if not _alike((gate, up)):
        return None
    codes = pack_gate_up(codes_of(gate), codes_of(up))
    scales = pack_gate_up(gate.scales.t(), up.scales.t()).t().contiguous()
    zeros = None if gate.zeros is None and up.zeros is None else pack_gate_up(_zeros(gate).t(), _zeros(up).t()).t().contiguous()
    bias = _biases((gate, up))
    return replace(
        gate,
        qweight=packed_like(gate, codes),
        scales=scales,
        zeros=zeros,
        bias=None if bias is None else pack_gate_up(*bias.chunk(2)),
        n=gate.n + up.n,
    )


def split_rows(weight: Weight, parts: int) -> list[Weight] | None:
    """The inverse of :func:`concatenate` for parts of one size, or None where scales cross their borders."""
    rows = weight.n // parts
    if weight.n % parts:
        return None
    found = [rows_of(weight, begin, begin + rows) for begin in range(0, weight.n, rows)]
    return None if any(part is None for part in found) else found


def rows_of(weight: Weight, begin: int, end: int) -> Weight | None:
    """Some rows of a weight, which may share its memory, or None where its format cannot begin or end there."""
    own = slice(begin, end)
    bias = None if weight.bias is None else weight.bias[own]
    if isinstance(weight, Dense):
        return Dense(weight.weight[own], bias)
    if isinstance(weight, ScaledWeight):
        if weight.gated or (weight.mode == "block128" and begin % BLOCK):
            return None
        places = {"channel": own, "block128": slice(begin // BLOCK, -(-end // BLOCK))}
        scale = weight.scale if weight.mode == "tensor" else weight.scale[places[weight.mode]]
        return replace(weight, weight=aligned_rows(weight.weight[own]), scale=scale, bias=bias)
    if (end - begin) % weight_layout.MULTIPLE:
        return None
    scales, zeros = (None if x is None else x[:, own].contiguous() for x in (weight.scales, weight.zeros))
    return replace(weight, qweight=packed_like(weight, codes_of(weight)[own]), scales=scales, zeros=zeros, bias=bias, n=end - begin)


def _biases(weights: Sequence[Weight]) -> Tensor | None:
    """All biases as one, zeros where a weight has none, or None where none has one."""
    present = [x.bias for x in weights if x.bias is not None]
    if not present:
        return None
    dtype = present[0].dtype
    for bias in present:
        dtype = torch.promote_types(dtype, bias.dtype)
    return torch.cat([present[0].new_zeros(x.n, dtype=dtype) if x.bias is None else x.bias.to(dtype) for x in weights])


# ---- 4 and 8-bit weights, 16-bit activations -----------------------------------------------------------------------------------------


def format_of(weight: PackedWeight) -> str:
    return weight.w4_format if isinstance(weight, W4Weight) else weight.w8_format


def _bits(weight: PackedWeight) -> int:
    return 4 if isinstance(weight, W4Weight) else 8


def _order(weight: PackedWeight) -> str:
    return FORMATS[format_of(weight)].order


def codes_of(weight: PackedWeight) -> Tensor:
    return weight_layout.unpack(weight.qweight, weight.n, weight.k, _order(weight))


def packed_like(like: PackedWeight, codes: Tensor) -> Tensor:
    return weight_layout.pack(codes, _bits(like), _order(like))


def _zeros(weight: PackedWeight) -> Tensor:
    usual = FORMATS[format_of(weight)].zero
    return torch.full_like(weight.scales, usual) if weight.zeros is None else weight.zeros


def _alike(weights: Sequence[PackedWeight]) -> bool:
    """Whether their products are one product: format, groups, factor and order of columns are the same."""
    first = weights[0]

    def same(other: PackedWeight) -> bool:
        if (format_of(other), other.group_size, other.alpha) != (format_of(first), first.group_size, first.alpha):
            return False
        if other.scales.dtype != first.scales.dtype or other.scales.shape[0] != first.scales.shape[0]:
            return False
        if first.perm is None or other.perm is None:
            return first.perm is other.perm
        return torch.equal(first.perm, other.perm)

    return all(same(x) for x in weights[1:])


def _concatenate_packed(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    if not _alike(weights):
        return None
    first, block = weights[0], weight_layout.BLOCK
    if all(x.n % block == 0 for x in weights[:-1]):
        qweight = torch.cat([x.qweight for x in weights])
    else:
        qweight = packed_like(first, torch.cat([codes_of(x) for x in weights]))
    zeros = None if all(x.zeros is None for x in weights) else torch.cat([_zeros(x) for x in weights], 1)
    scales = torch.cat([x.scales for x in weights], 1)
    return replace(first, qweight=qweight, scales=scales, zeros=zeros, bias=_biases(weights), n=sum(x.n for x in weights))


# ---- 8-bit weights and activations ---------------------------------------------------------------------------------------------------


def _concatenate_scaled(weights: Sequence[ScaledWeight]) -> ScaledWeight | None:
    first, mode = weights[0], weights[0].mode
    if any(x.gated or (x.input_scale is None) != (first.input_scale is None) for x in weights):
        return None
    if any(x.mode != mode or x.scale.dtype != first.scale.dtype for x in weights):
        return None
    other = {}
    if isinstance(first, Int8Weight):
        zeros = [x.input_zero for x in weights]
        if any(zero is not None for zero in zeros):  # these are in the biases
            fit = all(zero is not None and torch.equal(zero, zeros[0]) for zero in zeros)
            if not fit or any(not torch.equal(x.input_scale, first.input_scale) for x in weights):
                return None
            other["input_zero"] = zeros[0]
    if mode == "block128":
        if any(x.n % BLOCK for x in weights[:-1]):
            return None
        scale = torch.cat([x.scale for x in weights])
    elif mode == "tensor" and all(torch.equal(x.scale, first.scale) for x in weights):
        scale = first.scale
    else:
        scale = torch.cat([x.scale.reshape(-1).expand(x.n) if x.scale.numel() == 1 else x.scale.reshape(-1) for x in weights])
    input_scale = None if first.input_scale is None else torch.stack([x.input_scale for x in weights]).amax(0)
    weight = aligned_rows(torch.cat([x.weight for x in weights]))
    return replace(first, weight=weight, scale=scale, input_scale=input_scale, bias=_biases(weights), **other)
