"""Parts of weights: rows and columns, in whatever format they are, and what a rank computes with them.

A part has the numbers that the whole has. Where a format cannot begin at a border (a block of scales, the order of columns of act-order),
the part is dequantised to 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checks.scaled_gemm import BLOCK
from ...distributed.tensor_parallel import TensorParallel
from ...formats import weight_layout
from ...formats.weight_formats import legal_group_size
from ...quantize.experts import W4Experts
from ...quantize.scaled_experts import ScaledExperts
from ...quantize.scaled_weight import aligned_rows
from ...quantize.weight import W8Weight
from .mlp import DenseExperts, Experts, Router
from .partial_sum import PartialSum
from .projection import Projection
from .weights import Dense, ScaledWeight, Weight, codes_of, format_of, packed_like, rows_of

Range = tuple[int, int]


@dataclass(frozen=True)
class Heads:
    """A rank's heads of queries and of keys and values: from, to."""

    q: Range
    kv: Range


def heads_of(parallel: TensorParallel, heads: int, heads_kv: int) -> Heads | None:
    """This rank's heads, or None where they cannot be divided among so many ranks. Queries stay with their keys; where there are more ranks
    than heads of keys, several ranks have the same one."""
    group, ranks, rank = heads // heads_kv, parallel.ranks, parallel.rank
    if heads_kv >= ranks:
        begin, end = parallel.part(heads_kv)
        return Heads((begin * group, end * group), (begin, end))
    sharing = ranks // heads_kv
    if ranks % heads_kv or group % sharing:
        return None
    each, kv = group // sharing, rank // sharing
    begin = kv * group + rank % sharing * each
    return Heads((begin, begin + each), (kv, kv + 1))


def part_of_rows(weight: Weight, part: Range, dtype: torch.dtype) -> Weight:
    """Rows of a weight and of its bias, which may share its memory. dtype: of what has to be dequantised."""
    found = rows_of(weight, *part)
    if found is not None:
        return found
    own = slice(*part)
    return Dense(_dequantized(weight, dtype)[own], None if weight.bias is None else weight.bias[own])


def part_of_columns(weight: Weight, part: Range, dtype: torch.dtype, with_bias: bool) -> Weight:
    """Columns of a weight, which may share its memory. with_bias: whether this part of the sum has the bias, which one has."""
    begin, end = part
    own = slice(begin, end)
    bias = weight.bias if with_bias else None
    if isinstance(weight, Dense):
        return Dense(weight.weight[:, own], bias)
    if isinstance(weight, ScaledWeight):
        if weight.mode != "block128":
            return replace(weight, weight=aligned_rows(weight.weight[:, own]), bias=bias)
        if begin % BLOCK:
            return Dense(_dequantized(weight, dtype)[:, own], bias)
        scale = weight.scale[:, begin // BLOCK : -(-end // BLOCK)]
        return replace(weight, weight=aligned_rows(weight.weight[:, own]), scale=scale, bias=bias)
    group = weight_layout.group_columns(weight.k, weight.group_size)
    step = group if begin % group == 0 else math.gcd(begin, group)  # groups that begin with the part
    whole = group == weight.k
    fits = whole or legal_group_size(format_of(weight), step)
    if weight.perm is not None or (end - begin) % weight_layout.MULTIPLE or not fits:
        return Dense(_dequantized(weight, dtype)[:, own], bias)

    def of_groups(x: Tensor | None) -> Tensor | None:
        if x is None or whole:
            return x
        return x.repeat_interleave(group // step, 0)[begin // step : -(-end // step)].contiguous()

    return replace(
        weight,
        qweight=packed_like(weight, codes_of(weight)[:, own]),
        scales=of_groups(weight.scales),
        zeros=of_groups(weight.zeros),
        bias=bias,
        group_size=-1 if whole else step,
        k=end - begin,
    )


def _dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """[n, k] in 16 bits; of the scales' type where these have 16 bits."""
    return weight.dequantize() if isinstance(weight, W8Weight) else weight.dequantize(dtype)


def owned(weight: Weight, device: torch.device) -> Weight:
    """The same weight in memory of its own on a device, contiguous but for rows that begin where kernels want them."""
    tensors = {name: x.to(device).clone(memory_format=torch.contiguous_format) for name, x in vars(weight).items() if isinstance(x, Tensor)}
    if isinstance(weight, ScaledWeight):
        tensors["weight"] = aligned_rows(tensors["weight"])
    return replace(weight, **tensors)


def experts_of(
    experts: DenseExperts | tuple[W4Experts, W4Experts] | tuple[ScaledExperts, ScaledExperts], part: Range, device: torch.device
) -> DenseExperts | tuple[W4Experts, W4Experts] | tuple[ScaledExperts, ScaledExperts]:
    """Some of a layer's experts, as copies on a device."""

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[part[0] : part[1]].to(device, copy=True)

    if isinstance(experts, DenseExperts):
        w13, w2 = (own(x) if x.stride(-1) == 1 else x[part[0] : part[1]].to(device).contiguous() for x in (experts.w13, experts.w2))
        return DenseExperts(w13, w2, own(experts.b13), own(experts.b2), experts.gate_layout)
    parts = []
    for whole in experts:
        count = whole.experts if isinstance(whole, ScaledExperts) else whole.qweight.shape[0]
        tensors = {
            name: x.to(device) if x.shape[0] != count or name == "input_scale" else own(x)
            for name, x in vars(whole).items()
            if isinstance(x, Tensor)
        }
        parts.append(replace(whole, **tensors))
    return tuple(parts)


class ReducedProjection(Projection):
    """The sum over the ranks of each one's product of its columns, and the residual."""

    def __init__(self, own: Projection, parallel: TensorParallel):
        super().__init__(own.in_features, own.out_features, False, "none")
        self.own, self.parallel = own, parallel

    @property
    def weight_format(self) -> str:
        return self.own.weight_format

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.parallel.all_reduce(self.own(x, residual if self.parallel.rank == 0 else None))

    def partial_sum(self, x: Tensor) -> PartialSum | None:
        if not self.parallel.leaves_sums_to_norms(x.shape[0], self.out_features, x.dtype):
            return None
        return PartialSum(self.own(x), self.parallel)


class SharedExperts(Experts):
    """This rank's experts, for all tokens, and the sum over the ranks.

    Args:
      router, experts, activation: as of :class:`Experts`; experts are those from ``first`` on.
    """

    def __init__(self, router: Router, experts, activation: str, first: int, parallel: TensorParallel):
        super().__init__(router, experts, activation)
        self.first, self.parallel = first, parallel

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.parallel.all_reduce(self._part(x, weights, ids))

    def partial_sum(self, x: Tensor) -> PartialSum | None:
        if not self.parallel.leaves_sums_to_norms(*x.shape, x.dtype):
            return None
        return PartialSum(self._part(x, *self.router(x)), self.parallel)

    def _part(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return super().apply(x, weights, ids - self.first)
