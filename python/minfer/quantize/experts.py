"""4-bit weights of all experts of a layer, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks.grouped_gemm import GATE_LAYOUTS, MAX_EXPERTS
from ..formats import weight_layout
from ..formats.gate_up import GATE_BLOCK
from ..formats.weight_formats import FORMATS
from ..ops.grouped_quantized_gemm import grouped_w4a16_gemm, moe_ffn_w4a16
from ..ops.quantized_gemm import w4a16_dequantize, w4a16_pack
from .checkpoints import mxfp4_tensors, mxfp4_weight
from .loader import Loader
from .round_to_nearest import parts_at_once, quantize_parts
from .weight import W4Weight, _Weight


@dataclass(frozen=True, eq=False)
class W4Experts(_Weight):
    """Weights [experts, n, k] of 4-bit codes, as :func:`minfer.grouped_w4a16_gemm` takes them:
    ``minfer.grouped_w4a16_gemm(a, offsets=offsets, **weight.arguments())``.

    Attributes:
      qweight: int32 [experts, ceil(n / 64), ceil(k / 64), 512].
      scales: [experts, G, n], G = ceil(k / group_size), or 1; float16 or bfloat16, of mxfp4 and nvfp4 the bytes in uint8.
      zeros: [experts, G, n] of the dtype of scales, or None: 8 everywhere, or a format without zero points.
      group_size: as the format asks (:func:`minfer.grouped_w4a16_gemm`).
      n, k: rows (output features) and columns (input features) of an expert.
      w4_format: "int4", "nf4", "mxfp4" or "nvfp4".
      gated: the rows are n / 2 gate and n / 2 up rows in the order of ``minfer.pack_gate_up``.
      bias: [experts, n], or None.
      alpha: float32 [experts], factors of whole experts, nvfp4's global scales; None is 1.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    n: int
    k: int
    w4_format: str = "int4"
    gated: bool = False
    bias: Tensor | None = None
    alpha: Tensor | None = None

    _arguments = ("qweight", "scales", "zeros", "group_size", "w4_format", "alpha", "bias", "gated")

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """qweight, scales and zeros: not all that a product needs, which is :meth:`arguments`."""
        return self._packed()

    def dequantize(self, out_dtype: torch.dtype | None = None) -> Tensor:
        """W [experts, n, k], rows in their packed order; of the dtype of 16-bit scales, otherwise of ``out_dtype`` (None: bfloat16)."""

        def own(expert: int) -> Tensor:
            weight = [None if x is None else x[expert] for x in self.packed]
            alpha = 1.0 if self.alpha is None else float(self.alpha[expert])
            form = {"group_size": self.group_size, "alpha": alpha, "w4_format": self.w4_format}
            return w4a16_dequantize(*weight, **form, n=self.n, k=self.k, out_dtype=out_dtype)

        return torch.stack([own(expert) for expert in range(self.qweight.shape[0])])

    def gemm(self, a: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """:func:`minfer.grouped_w4a16_gemm` with these weights and biases, gated where they are; gather, row_scale, activation, kernel and
        out as there."""
        return grouped_w4a16_gemm(a, offsets=offsets, **self.arguments(), **arguments)

    def ffn(self, x: Tensor, down: W4Experts, weights: Tensor, ids: Tensor, *, activation: str = "silu") -> Tensor:
        """A layer: :func:`minfer.moe_ffn_w4a16` with these weights for w13 and ``down`` for w2, with the alphas and biases of both.

        Args:
          x, weights, ids, activation: as there.
          down: of the same format and group size, not gated; these are gated.

        Raises:
          ValueError: the two are no gate-and-up and down projections, or differ in format or group size. RuntimeError: as there.
        """
        _require("ffn", self.gated and not down.gated, f"w13 must be gated and down must not be, got {self.gated} and {down.gated}")
        for name in ("w4_format", "group_size"):
            own, other = getattr(self, name), getattr(down, name)
            _require("ffn", own == other, f"down must have the {name} of w13, {own}, got {other}")
        return moe_ffn_w4a16(
            x,
            *self.packed,
            *down.packed,
            weights,
            ids,
            group_size=self.group_size,
            w4_format=self.w4_format,
            alpha13=self.alpha,
            alpha2=down.alpha,
            activation=activation,
            b13=self.bias,
            b2=down.bias,
        )


def _require(function: str, condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"{function}: {message}")


# ---- gate and up rows ------------------------------------------------------------------------------------------------------------


def _check_number(function: str, experts: int) -> None:
    _require(function, 1 <= experts <= MAX_EXPERTS, f"there must be 1 to {MAX_EXPERTS} experts, got {experts}")


def _check_gate(function: str, n: int, gated: bool, gate_layout: str) -> None:
    _require(function, gate_layout in GATE_LAYOUTS, f"gate_layout must be one of {', '.join(GATE_LAYOUTS)}, got '{gate_layout}'")
    _require(function, gated or gate_layout == "halves", f"gate_layout {gate_layout} needs gated = True")
    good = not gated or n % (2 * GATE_BLOCK) == 0
    _require(function, good, f"gate and up rows must be a multiple of {2 * GATE_BLOCK} together, got {n}")


def _rows_of_blocks(n: int, gate_layout: str, device: torch.device) -> Tensor:
    """Which row of ``gate_layout`` each row of pack_gate_up's order is."""
    gate = torch.arange(n // 2, device=device)
    gate, up = {"halves": (gate, gate + n // 2), "alternating": (2 * gate, 2 * gate + 1)}[gate_layout]
    return torch.stack((gate.view(-1, GATE_BLOCK), up.view(-1, GATE_BLOCK)), dim=1).flatten()


def in_blocks(x: Tensor, dim: int, gate_layout: str) -> Tensor:
    """x with the gate and up rows along ``dim`` in pack_gate_up's order."""
    return x if gate_layout == "blocks" else x.index_select(dim, _rows_of_blocks(x.shape[dim], gate_layout, x.device))


# ---- sources -----------------------------------------------------------------------------------------------------------------------


def stack_experts(
    weights: Sequence[W4Weight], up: Sequence[W4Weight] | None = None, *, gated: bool = False, gate_layout: str = "halves"
) -> W4Experts:
    """The weights of a layer's experts, each loaded or quantised on its own, as one.

    Args:
      weights: one for each expert, in order, all of one shape, format, group size, dtype and device; without perm.
      up: the up projections of the same experts, where ``weights`` are their gate projections (w3 beside w1 in Mixtral's checkpoints). The
        result is gated.
      gated: ``weights`` hold gate and up rows, in ``gate_layout``'s order.
      gate_layout: "halves" (all gate rows, then all up rows), "alternating" (gate, up, gate, up, ..) or "blocks" (the result's order).

    Returns:
      The weights, on their device. Where some have zero points, those without get 8. A bias is rounded to the dtype of 16-bit scales.

    Raises:
      ValueError: the weights do not agree, have a perm, or cannot be gated.

    Reordering rows unpacks the codes of an expert and packs them again; nothing is requantised.
    """
    function = "stack_experts"
    weights, ups = list(weights), list(up or [])
    _check_number(function, len(weights))
    _agree(function, weights + ups)
    if up is None:
        experts = [[weight] for weight in weights]
    else:
        _require(function, len(ups) == len(weights), f"up must have as many experts as weights, {len(weights)}, got {len(ups)}")
        _require(function, not gated, "gated must be False where up is given: weights have gate rows alone")
        for expert, (gate, other) in enumerate(zip(weights, ups, strict=True)):
            same = gate.alpha == other.alpha
            _require(function, same, f"gate and up of an expert must have the same alpha, got {gate.alpha} and {other.alpha} of {expert}")
        experts = [list(pair) for pair in zip(weights, ups, strict=True)]
        _require(function, gate_layout == "halves", f"gate_layout must be halves where up is given, got '{gate_layout}'")
        gated = True
    n = sum(part.n for part in experts[0])
    _check_gate(function, n, gated, gate_layout)
    return _stacked(experts, n, gate_layout if gated else None)


def _agree(function: str, weights: list[W4Weight]) -> None:
    def facts(weight: W4Weight) -> dict[str, Any]:
        shared = {name: getattr(weight, name) for name in ("n", "k", "w4_format", "group_size")}
        bias = None if weight.bias is None else weight.bias.dtype
        return shared | {"dtype": weight.scales.dtype, "device": weight.qweight.device, "bias": bias}

    for i, weight in enumerate(weights):
        _require(function, isinstance(weight, W4Weight), f"weights must be W4Weights, got {type(weight).__name__} as weight {i}")
    first = facts(weights[0])
    for i, weight in enumerate(weights):
        _require(function, weight.perm is None, f"weight {i} has a perm: grouped products take no act-order")
        for name, value in facts(weight).items():
            _require(function, value == first[name], f"weights must have the same {name}, got {first[name]} and, of weight {i}, {value}")


def _stacked(experts: list[list[W4Weight]], n: int, gate_layout: str | None) -> W4Experts:
    """Each expert's parts below each other, and where there is a ``gate_layout``, their rows out of its order into pack_gate_up's."""
    like = experts[0][0]
    form = FORMATS[like.w4_format]
    moved = gate_layout not in (None, "blocks")

    def rows(parts: list[Tensor], dim: int) -> Tensor:
        x = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        return in_blocks(x, dim, gate_layout) if moved else x

    def codes(parts: list[W4Weight]) -> Tensor:
        if not moved and len(parts) == 1:
            return parts[0].qweight
        unpacked = [weight_layout.unpack(w.qweight, w.n, w.k, form.order) for w in parts]
        return w4a16_pack(rows(unpacked, 0), w4_format=like.w4_format)

    def zeros(weight: W4Weight) -> Tensor:
        return torch.full_like(weight.scales, form.zero) if weight.zeros is None else weight.zeros

    def stack_rows(own: Callable[[W4Weight], Tensor], dim: int, dtype: torch.dtype | None = None) -> Tensor:
        stacked = torch.stack([rows([own(part) for part in parts], dim) for parts in experts])
        return stacked if dtype is None else stacked.to(dtype)

    has_zeros = any(part.zeros is not None for parts in experts for part in parts)
    has_alpha = any(parts[0].alpha != 1.0 for parts in experts)
    bias_type = like.scales.dtype if form.scale_type is None else None
    device = like.qweight.device
    return W4Experts(
        qweight=torch.stack([codes(parts) for parts in experts]),
        scales=stack_rows(lambda w: w.scales, 1),
        zeros=stack_rows(zeros, 1) if has_zeros else None,
        group_size=like.group_size,
        n=n,
        k=like.k,
        w4_format=like.w4_format,
        gated=gate_layout is not None,
        bias=None if like.bias is None else stack_rows(lambda w: w.bias, 0, bias_type),
        alpha=torch.tensor([parts[0].alpha for parts in experts], dtype=torch.float32, device=device) if has_alpha else None,
    )


def quantize_w4_experts(
    weight: Tensor,
    group_size: int | None = None,
    symmetric: bool = True,
    format: str = "int4",
    *,
    gated: bool = False,
    gate_layout: str = "halves",
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    clip: bool = True,
) -> W4Experts:
    """:func:`quantize_w4` of each expert.

    Args:
      weight: [experts, n, k]; n and k are multiples of 8.
      gated: the rows are n / 2 gate and n / 2 up rows; they are put in the order of ``minfer.pack_gate_up``. n is a multiple of 16.
      gate_layout: their order: "halves" (all gate, then all up), "alternating" (gate, up, gate, up, ..: gpt-oss) or "blocks" (already).
      bias: [experts, n], in the order of the weight's rows.
      group_size, symmetric, format, dtype, clip: as in :func:`quantize_w4`.

    Returns:
      The packed weights, on the weight's device.

    Raises:
      ValueError: an argument cannot be right, or the weight has a NaN or infinity.
    """
    function = "quantize_w4_experts"
    _require(function, weight.dim() == 3, f"weight must be [experts, n, k], got {list(weight.shape)}")
    experts, n, _ = weight.shape
    _check_number(function, experts)
    good = bias is None or tuple(bias.shape) == (experts, n)
    _require(function, good, f"bias must be {[experts, n]}, got {None if bias is None else list(bias.shape)}")
    _check_gate(function, n, gated, gate_layout)

    found: list[list[W4Weight]] = []
    at_once = parts_at_once(format, max(n, 1), max(weight.shape[2], 1), weight.device)
    for own in (slice(begin, min(begin + at_once, experts)) for begin in range(0, experts, at_once)):
        rows, of_rows = weight[own], None if bias is None else bias[own]
        if gated:
            rows = in_blocks(rows, 1, gate_layout)
            of_rows = None if of_rows is None else in_blocks(of_rows, 1, gate_layout)
        of_rows = None if of_rows is None else of_rows.flatten()
        several = quantize_parts(function, 4, rows.flatten(0, 1), len(rows), group_size, symmetric, format, dtype, of_rows, clip)
        found += [[expert] for expert in several]
    return _stacked(found, n, "blocks" if gated else None)


def from_gpt_oss(tensors: Mapping[str, Tensor]) -> tuple[W4Experts, W4Experts]:
    """The experts of a gpt-oss layer in MXFP4, bit for bit; their activation is "swigluoai".

    Args:
      tensors: by their names in the file, without ``model.layers.N.mlp.experts.``: ``gate_up_proj_blocks`` uint8 [experts, 2 * inter,
        hidden / 32, 16], the even column in the low four bits, gate and up rows alternating; ``gate_up_proj_scales`` uint8 or
        float8_e8m0fnu [experts, 2 * inter, hidden / 32]; ``gate_up_proj_bias`` [experts, 2 * inter]; ``down_proj_blocks`` [experts,
        hidden, inter / 32, 16], ``down_proj_scales`` and ``down_proj_bias`` likewise. The biases may be absent.

    Returns:
      gate_up, gated, its rows in the order of ``minfer.pack_gate_up``, and down; on the tensors' device.

    Raises:
      ValueError: a tensor is missing, or cannot be right.
    """
    load = Loader("from_gpt_oss", tensors)

    def projection(name: str, gated: bool) -> W4Experts:
        parts = mxfp4_tensors(load, f"{name}_", "experts")
        experts, n = parts[0].shape[:2]
        _check_number(load.function, experts)
        if gated:
            _check_gate(load.function, n, True, "alternating")

        def weight(expert: int) -> W4Weight:
            own = [None if x is None else x[expert] for x in parts]
            return mxfp4_weight(*(x if x is None or not gated else in_blocks(x, 0, "alternating") for x in own))

        return _stacked([[weight(expert)] for expert in range(experts)], n, "blocks" if gated else None)

    gate_up, down = projection("gate_up_proj", True), projection("down_proj", False)
    shapes = (gate_up.qweight.shape[0], gate_up.k, gate_up.n // 2), (down.qweight.shape[0], down.n, down.k)
    same = shapes[0] == shapes[1]
    load.require(same, f"the projections must have the same experts, hidden and inter, got {shapes[0]} and {shapes[1]}")
    return gate_up, down
