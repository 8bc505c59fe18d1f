"""Weights of 8 bits of all experts of a layer, for products whose activations have 8 bits too, and where they come from.

w13 = minfer.quantize.stack_scaled_experts(gates, ups)     # a weight for each expert, of from_fp8, from_int8 or the quantisers
w2 = minfer.quantize.stack_scaled_experts(downs)
w13 = minfer.quantize.quantize_fp8_experts(w13, gated=True)
out = w13.ffn(x, w2, weights, ids)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..checks.grouped_gemm import GATE_LAYOUTS
from ..checks.grouped_scaled_gemm import kind_of_scale
from ..checks.scaled_gemm import BLOCK, FP8
from ..formats.gate_up import GATE_BLOCK, join_gate_up, split_gate_up
from ..ops.fused import Codes, quantize_fp8, quantize_int8
from ..ops.grouped_scaled_gemm import (
    grouped_gemm_fp8,
    grouped_gemm_fp8_masked,
    grouped_gemm_int8,
    grouped_gemm_int8_masked,
    moe_ffn_fp8,
    moe_ffn_int8,
)
from ..reference.grouped_scaled_gemm import ExpertScale
from .experts import _check_number, _require
from .scaled_weight import Fp8Weight, Int8Weight, aligned_rows, empty_rows, kept_bias, quantized, static_int8

_MODES = {"all": "tensor", "expert": "tensor", "column": "channel", "block": "block128"}


@dataclass(frozen=True, eq=False)
class ScaledExperts:
    """Weights [experts, n, k] of e4m3 or int8 codes, as :func:`minfer.grouped_gemm_fp8` and :func:`minfer.grouped_gemm_int8` take them.

    Attributes:
      weight: float8_e4m3fn or int8 [experts, n, k], rows at multiples of 16 bytes.
      scale: W = weight * scale; float32 [1], [experts], [experts, n], or, of e4m3, of blocks [experts, ceil(n / 128), ceil(k / 128)], these
        also uint8 (e8m0). Blocks of gated weights are [experts, 2 * ceil(n / 256), ceil(k / 128)], the gate's first.
      input_scale: float32 [1], of activations that are quantised with one given scale ("static"); None: each token, or each 128 of a token,
        gets its own.
      bias: [experts, n], in the order of the weight's rows, or None.
      gated: the rows are n / 2 gate and n / 2 up rows, and products are act(gate) * up.
      gate_layout: their order: "halves" (all gate, then all up), "alternating" or "blocks" (8 and 8).
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None = None
    bias: Tensor | None = None
    gated: bool = False
    gate_layout: str = "halves"

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @property
    def n(self) -> int:
        return self.weight.shape[1]

    @property
    def k(self) -> int:
        return self.weight.shape[2]

    @property
    def mode(self) -> str:
        """ "tensor", "channel" or "block128": what of an expert's weight has a scale."""
        return _MODES[kind_of_scale(self.scale, *self.weight.shape, self.gated)]

    @property
    def input_quant(self) -> str | None:
        """The ``quant`` that an operator in front of this product should have; None: none has what this weight wants."""
        if self.weight.dtype == torch.int8:
            return "int8_token" if self.input_scale is None else None
        if self.input_scale is not None:
            return "fp8_tensor"
        return "fp8_block128" if self.mode == "block128" else "fp8_token"

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str | int) -> ScaledExperts:
        """The same weights on a device."""
        moved = {name: x.to(device) for name, x in self.tensors().items()}
        return replace(self, **(moved | {"weight": aligned_rows(moved["weight"])}))

    def dequantize(self, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """W [experts, n, k], rows in their order, rounded once."""
        scale = ExpertScale(self.scale, self.weight.shape, self.gate_layout if self.gated else None)
        return torch.stack([(codes.float() * scale.of(expert)).to(out_dtype) for expert, codes in enumerate(self.weight)])

    def quantize_input(self, x: Tensor) -> Codes:
        """Activations [.., k] of 16 bits as codes and scales, as these weights want them."""
        if self.weight.dtype == torch.int8:
            return quantize_int8(x) if self.input_scale is None else static_int8(x, self.input_scale)
        return quantize_fp8(x, self.input_quant.removeprefix("fp8_"), self.input_scale)

    def _multiply(self, gemm: Callable[..., Tensor], a: Tensor, a_scale: Tensor | None, rows: Tensor, arguments: dict[str, Any]) -> Tensor:
        """D has a's type where nothing says another."""
        if a_scale is None:
            if all(arguments.get(name) is None for name in ("out_dtype", "out_scale", "out")):
                arguments["out_dtype"] = a.dtype
            lead = a.shape[:-1]
            a, a_scale = self.quantize_input(a)
            if len(lead) == 2 and a_scale.dim() == 2:  # of blocks, whose rows are counted through
                a_scale = a_scale.unflatten(0, lead)
        gate = dict(gated=self.gated, gate_layout=self.gate_layout)
        return gemm(a, self.weight.mT, a_scale, self.scale, rows, bias=self.bias, **gate, **arguments)

    def gemm(self, a: Tensor, a_scale: Tensor | None, offsets: Tensor, **arguments: Any) -> Tensor:
        """:func:`minfer.grouped_gemm_fp8` or :func:`minfer.grouped_gemm_int8` with these weights and biases, gated where they are.

        Args:
          a: [rows, k], codes; or float16 or bfloat16, which is quantised first.
          a_scale: of codes; None: a is of 16 bits.
          offsets: as there.
          arguments: the operator's other ones. ``out_dtype``: default: that of a 16-bit a; of codes bfloat16.
        """
        call = grouped_gemm_int8 if self.weight.dtype == torch.int8 else grouped_gemm_fp8
        return self._multiply(call, a, a_scale, offsets, arguments)

    def gemm_masked(self, a: Tensor, a_scale: Tensor | None, counts: Tensor, **arguments: Any) -> Tensor:
        """The same of slabs: :func:`minfer.grouped_gemm_fp8_masked` or :func:`minfer.grouped_gemm_int8_masked`."""
        call = grouped_gemm_int8_masked if self.weight.dtype == torch.int8 else grouped_gemm_fp8_masked
        return self._multiply(call, a, a_scale, counts, arguments)

    def ffn(
        self,
        x: Tensor,
        down: ScaledExperts,
        weights: Tensor,
        ids: Tensor,
        *,
        x_scale: Tensor | None = None,
        activation: str = "silu",
        **options: Any,
    ) -> Tensor:
        """A layer: :func:`minfer.moe_ffn_fp8` or :func:`minfer.moe_ffn_int8` with these weights for w13 and ``down`` for w2, and the biases
        of both. ``down.input_scale`` is not read: what is between the products gets scales of its own.

        Args:
          x, weights, ids, x_scale, activation: as there; a 16-bit x is quantised with ``input_scale``, where there is one.
          down: of the same type of codes, not gated; these are gated.
          options: out_dtype, and of e4m3 fast_accum.

        Raises:
          ValueError: the two are no gate-and-up and down projections of one type. RuntimeError: as there.
        """
        _require("ffn", self.gated and not down.gated, f"w13 must be gated and down must not be, got {self.gated} and {down.gated}")
        own, other = self.weight.dtype, down.weight.dtype
        _require("ffn", own == other, f"down must have codes of the type of w13, {own}, got {other}")
        if x_scale is None and self.input_scale is not None:
            options["out_dtype"] = options.get("out_dtype") or x.dtype
            x, x_scale = self.quantize_input(x)
        call = moe_ffn_int8 if own == torch.int8 else moe_ffn_fp8
        scales, biases = (self.scale, down.scale), dict(b13=self.bias, b2=down.bias)
        more = dict(x_scale=x_scale, activation=activation, gate_layout=self.gate_layout)
        return call(x, self.weight, down.weight, *scales, weights, ids, **biases, **more, **options)


def _check_gate(function: str, n: int, gated: bool, gate_layout: str) -> None:
    _require(function, gate_layout in GATE_LAYOUTS, f"gate_layout must be one of {', '.join(GATE_LAYOUTS)}, got '{gate_layout}'")
    _require(function, gated or gate_layout == "halves", f"gate_layout {gate_layout} needs gated = True")
    unit = 2 * GATE_BLOCK if gate_layout == "blocks" else 2
    _require(function, not gated or n % unit == 0, f"gate and up rows must be a multiple of {unit} together, got {n}")


# ---- from weights of single experts --------------------------------------------------------------------------------------------------


def stack_scaled_experts(
    weights: Sequence[Fp8Weight] | Sequence[Int8Weight],
    up: Sequence[Fp8Weight] | Sequence[Int8Weight] | None = None,
    *,
    gated: bool = False,
    gate_layout: str = "halves",
) -> ScaledExperts:
    """The weights of a layer's experts, each loaded or quantised on its own, as one. Codes and scales stay what they were.

    Args:
      weights: one for each expert, in order, all of one kind, shape, mode of scales and device: of :func:`from_fp8` (DeepSeek, Qwen3,
        compressed-tensors, ModelOpt), :func:`from_int8` or the quantisers. Those of :func:`gate_up_weight` give gated experts.
      up: the up projections of the same experts, where ``weights`` are their gate projections. The result is gated, in halves.
      gated: ``weights`` hold gate and up rows, in ``gate_layout``'s order. Where their scales are of blocks, only "halves" of multiples of
        128 rows have blocks of their own for gate and up.
      gate_layout: "halves", "alternating" or "blocks".

    Returns:
      The weights, on their device. Of static activations the largest scale counts for all, as tokens are quantised once for all their
      experts. Where every gate and up has one scale, and they differ, the result has a scale for each row.

    Raises:
      ValueError: the weights do not agree, cannot be gated, or have zero points of activations.
    """
    function = "stack_scaled_experts"
    weights, ups = list(weights), list(up or [])
    _check_number(function, len(weights))
    _agree(function, weights + ups)
    like = weights[0]
    packed = like.gated  # by gate_up_weight
    if up is not None:
        _require(function, len(ups) == len(weights), f"up must have as many experts as weights, {len(weights)}, got {len(ups)}")
        _require(function, not packed, "weights must not be gated where up is given")
    if up is not None or packed:
        what = "up is given: weights have gate rows alone" if up is not None else "weights are gated themselves"
        _require(function, not gated, f"gated must be False where {what}")
        _require(function, gate_layout == "halves", f"gate_layout must be halves where {what}, got '{gate_layout}'")
    experts = [list(pair) for pair in zip(weights, ups, strict=True)] if up is not None else [[weight] for weight in weights]
    n = sum(part.n for part in experts[0])
    _check_gate(function, n, gated, gate_layout)
    if gated and like.mode == "block128":
        good = gate_layout == "halves" and n // 2 % BLOCK == 0
        text = f"scales of blocks need gate_layout halves, with a multiple of {BLOCK} rows in each, got {gate_layout} of {n // 2}"
        _require(function, good, text)
    rows = empty_rows(like.weight, len(experts), n, like.k)
    for own, parts in zip(rows, experts, strict=True):
        for at, part in enumerate(parts):
            own[at * like.n : (at + 1) * like.n] = part.weight
    return ScaledExperts(
        weight=rows,
        scale=_stacked_scales(experts),
        input_scale=None if like.input_scale is None else torch.cat([part.input_scale for part in weights + ups]).amax().reshape(1),
        bias=None if like.bias is None else _stacked_biases(experts),
        gated=gated or packed or up is not None,
        gate_layout="blocks" if packed else gate_layout,
    )


def _agree(function: str, weights: list[Any]) -> None:
    def facts(weight: Fp8Weight | Int8Weight) -> dict[str, Any]:
        shared = {name: getattr(weight, name) for name in ("n", "k", "mode", "gated")}
        there = {name: getattr(weight, name) is not None for name in ("bias", "input_scale")}
        return {"kind": type(weight).__name__} | shared | there | {"type of scales": weight.scale.dtype, "device": weight.weight.device}

    for i, weight in enumerate(weights):
        good = isinstance(weight, Fp8Weight | Int8Weight)
        _require(function, good, f"weights must be Fp8Weights or Int8Weights, got {type(weight).__name__} as weight {i}")
        _require(function, getattr(weight, "input_zero", None) is None, f"weight {i} has a zero point of activations: experts share none")
    first = facts(weights[0])
    for i, weight in enumerate(weights):
        for name, value in facts(weight).items():
            _require(function, value == first[name], f"weights must have the same {name}, got {first[name]} and, of weight {i}, {value}")


def _stacked_scales(experts: list[list[Any]]) -> Tensor:
    """[experts], [experts, n] or of blocks [experts, blocks of n, blocks of k]."""
    like = experts[0][0]
    if like.mode == "block128":  # those of gates and ups, [2, ..], one below the other
        return torch.stack([torch.cat([part.scale.reshape(-1, part.scale.shape[-1]) for part in parts]) for parts in experts])
    if like.mode == "channel":
        return torch.stack([torch.cat([part.scale.reshape(-1) for part in parts]) for parts in experts])
    scales = torch.stack([torch.cat([part.scale.reshape(1) for part in parts]) for parts in experts])  # [experts, parts]
    same = bool((scales == scales[:, :1]).all())
    return scales[:, 0].contiguous() if same else scales.repeat_interleave(like.n, 1)


def _stacked_biases(experts: list[list[Any]]) -> Tensor:
    dtype = experts[0][0].bias.dtype
    for part in (part for parts in experts for part in parts):
        dtype = torch.promote_types(dtype, part.bias.dtype)
    return torch.stack([torch.cat([part.bias.to(dtype) for part in parts]) for parts in experts])


# ---- round to nearest ----------------------------------------------------------------------------------------------------------------


def _quantize(
    function: str, dtype: torch.dtype, weight: Tensor, mode: str, gated: bool, gate_layout: str, bias: Tensor | None
) -> ScaledExperts:
    good = weight.dim() == 3 and weight.numel() > 0
    _require(function, good, f"weight must be [experts, n, k] and not empty, got {list(weight.shape)}")
    experts, n, k = weight.shape
    _check_number(function, experts)
    _check_gate(function, n, gated, gate_layout)
    bias = kept_bias(function, bias, (experts, n), weight.device)
    rows, scales = empty_rows(weight.new_empty(0, dtype=dtype), experts, n, k), []
    for codes, own in zip(rows, weight, strict=True):
        if gated and mode == "block128":  # gate and up have blocks of their own
            halves = [quantized(function, dtype, half, mode) for half in split_gate_up(own, gate_layout, 0)]
            found, scale = join_gate_up(*(half[0] for half in halves), gate_layout), torch.cat([half[1] for half in halves])
        else:
            found, scale = quantized(function, dtype, own, mode)
        codes.copy_(found)
        scales.append(scale)
    scale = torch.stack(scales)
    return ScaledExperts(rows, scale.reshape(-1) if mode == "tensor" else scale, bias=bias, gated=gated, gate_layout=gate_layout)


def quantize_fp8_experts(
    weight: Tensor, mode: str = "block128", *, gated: bool = False, gate_layout: str = "halves", bias: Tensor | None = None
) -> ScaledExperts:
    """:func:`quantize_fp8_weight` of each expert.

    Args:
      weight: [experts, n, k], float16, bfloat16, float32 or float64, finite in float32; any device.
      mode: what has a scale: "block128", 128 x 128 elements, those of gate and up apart; "channel", a row; "tensor", an expert.
      gated: the rows are n / 2 gate and n / 2 up rows, and stay in their order.
      gate_layout: their order: "halves" (all gate, then all up), "alternating" or "blocks" (8 and 8).
      bias: [experts, n], kept beside the weight; float64 is rounded to float32.

    Returns:
      The codes and scales, on the weight's device.

    Raises:
      ValueError: an argument cannot be right, or the weight has a NaN or infinity.
    """
    return _quantize("quantize_fp8_experts", FP8, weight, mode, gated, gate_layout, bias)


def quantize_int8_experts(
    weight: Tensor, mode: str = "channel", *, gated: bool = False, gate_layout: str = "halves", bias: Tensor | None = None
) -> ScaledExperts:
    """:func:`quantize_int8_weight` of each expert; otherwise as :func:`quantize_fp8_experts`.

    Args:
      weight, gated, gate_layout, bias: as there.
      mode: what has a scale: "channel", a row; "tensor", an expert.

    Raises:
      ValueError: as there.
    """
    return _quantize("quantize_int8_experts", torch.int8, weight, mode, gated, gate_layout, bias)
