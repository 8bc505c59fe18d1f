"""Weights of 8 bits for products whose activations have 8 bits too: e4m3 and int8, as their checkpoints store them.

weight = minfer.quantize.quantize_fp8_weight(linear.weight, "block128", bias=linear.bias)
weight = minfer.quantize.from_fp8({"weight": ..., "weight_scale_inv": ...})
y = weight.gemm(x)                                               # quantises x, as the weight's scales want it
y = weight.gemm(minfer.rms_norm(x, quant="fp8_block128"))        # or takes what the preceding operator wrote
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks.common import DTYPES
from ..checks.scaled_gemm import BLOCK, FP8, blocks_of
from ..formats.gate_up import GATE_BLOCK, pack_gate_up
from ..ops.fused import Codes, quantize_fp8, quantize_int8
from ..ops.scaled_gemm import gemm_fp8, gemm_fp8_gated, gemm_int8, gemm_int8_gated
from ..reference.codes import LARGEST_CODE
from ..reference.scaled_gemm import numbers_of
from .loader import FLOATS, rounded

_Self = TypeVar("_Self", bound="_ScaledWeight")
_ALIGNMENT = 16  # bytes: where kernels want rows to begin
MODES = {FP8: ("block128", "channel", "tensor"), torch.int8: ("channel", "tensor")}


def empty_rows(like: Tensor, *shape: int) -> Tensor:
    """Zeros [.., n, k] of like's type and on its device, with rows that begin at multiples of 16 bytes; k's end is followed by a gap."""
    *rows, k = shape
    return like.new_zeros(*rows, -(-k // _ALIGNMENT) * _ALIGNMENT)[..., :k]


def aligned_rows(weight: Tensor) -> Tensor:
    """The same [.., n, k] with rows that begin at multiples of 16 bytes, so that no call has to copy it; k's end is followed by a gap."""
    strides = empty_rows(weight.new_empty(0, device="meta"), *weight.shape).stride()
    if weight.stride() == strides and (weight.is_meta or weight.data_ptr() % _ALIGNMENT == 0):
        return weight
    return empty_rows(weight, *weight.shape).copy_(weight)


def static_int8(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Codes:
    """Activations as int8 codes of one given scale, and the scale; x = scale * (code - zero)."""
    codes = (x.float() / scale).round_()
    codes = codes if zero is None else codes.add_(zero)
    return codes.clamp_(-128, 127).to(torch.int8), scale


def scale_mode(scale: Tensor, n: int) -> str:
    """ "tensor", "channel" or "block128": what a weight's scale is of."""
    if scale.dim() == 3:
        return "block128"
    if scale.dim() == 2 and (scale.numel() == 1 or tuple(scale.shape) != (n, 1)):
        return "block128"
    return "tensor" if scale.numel() == 1 else "channel"


@dataclass(frozen=True, eq=False)
class _ScaledWeight:
    """What e4m3 and int8 have in common."""

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None = None
    bias: Tensor | None = None
    gated: bool = False

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    @property
    def mode(self) -> str:
        return scale_mode(self.scale, self.n)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self: _Self, device: torch.device | str | int) -> _Self:
        """The same weight on a device."""
        moved = {name: x.to(device) for name, x in self.tensors().items()}
        return replace(self, **(moved | {"weight": aligned_rows(moved["weight"])}))

    def dequantize(self, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """W [n, k], rounded once."""
        if self.mode != "block128":
            return (self.weight.float() * self.scale.reshape(-1, 1)).to(out_dtype)
        halves = numbers_of(self.scale if self.scale.dim() == 3 else self.scale[None])
        lines = self.n // len(halves)
        scale = halves.repeat_interleave(BLOCK, 1)[:, :lines].repeat_interleave(BLOCK, 2)[..., : self.k]
        return (self.weight.float() * (pack_gate_up(*scale) if len(halves) == 2 else scale[0])).to(out_dtype)

    def _multiply(self, gemm: Callable[..., Tensor], x: Tensor | Codes, arguments: dict[str, Any]) -> Tensor:
        """D has x's type where nothing says another."""
        if isinstance(x, Tensor):
            if all(arguments.get(name) is None for name in ("out_dtype", "out_scale", "out")):
                arguments["out_dtype"] = x.dtype
            x = self.quantize_input(x)
        return gemm(x[0], self.weight.t(), x[1], self.scale, bias=self.bias, **arguments)


@dataclass(frozen=True, eq=False)
class Fp8Weight(_ScaledWeight):
    """A weight [n, k] of float8_e4m3fn codes, as :func:`minfer.gemm_fp8` takes it.

    Attributes:
      weight: float8_e4m3fn [n, k], rows at multiples of 16 bytes.
      scale: W = weight * scale; float32 [1], [n], or of blocks [ceil(n / 128), ceil(k / 128)], these also uint8 (e8m0). Blocks of a gated
        weight are [2, ceil(n / 256), ceil(k / 128)].
      input_scale: float32 [1], of activations that are quantised with one given scale ("static"); None: each token, or each 128 of a token,
        gets its own.
      bias: [n], or None.
      gated: the weight is gate and up, packed (:func:`gate_up_weight`), and :meth:`gemm` multiplies the activated gate by the other.
    """

    @property
    def input_quant(self) -> str:
        """The ``quant`` that an operator in front of this product should have."""
        if self.input_scale is not None:
            return "fp8_tensor"
        return "fp8_block128" if self.mode == "block128" else "fp8_token"

    def quantize_input(self, x: Tensor) -> Codes:
        """Activations [.., k] of 16 bits as codes and scales, as this weight wants them."""
        return quantize_fp8(x, self.input_quant.removeprefix("fp8_"), self.input_scale)

    def gemm(self, x: Tensor | Codes, **arguments: Any) -> Tensor:
        """activation(A.W^T + C + bias) by :func:`minfer.gemm_fp8`; of a gated weight by :func:`minfer.gemm_fp8_gated`.

        Args:
          x: [.., k], float16 or bfloat16, which is quantised first; or codes and their scales, as operators with ``quant`` return them.
          arguments: the operator's other ones. ``out_dtype``: default: x's; of codes bfloat16.
        """
        return self._multiply(gemm_fp8_gated if self.gated else gemm_fp8, x, arguments)


@dataclass(frozen=True, eq=False)
class Int8Weight(_ScaledWeight):
    """A weight [n, k] of int8 codes, as :func:`minfer.gemm_int8` takes it.

    Attributes:
      weight: int8 [n, k], rows at multiples of 16 bytes.
      scale: W = weight * scale; float32 [1] or [n].
      input_scale: float32 [1], of activations that are quantised with one given scale ("static"); None: each token gets its own.
      bias: [n], or None. Beside a zero point it is what the product of codes wants: less input_scale * input_zero * the sums of W's rows,
        which :func:`bias_with_zero` computes.
      gated: as in :class:`Fp8Weight`.
      input_zero: int8 [1], the zero point of static activations, x = input_scale * (code - input_zero); None: 0.
    """

    input_zero: Tensor | None = None

    @property
    def input_quant(self) -> str | None:
        """The ``quant`` that an operator in front of this product should have; None: none has what this weight wants."""
        return "int8_token" if self.input_scale is None else None

    def quantize_input(self, x: Tensor) -> Codes:
        """Activations [.., k] of 16 bits as codes and scales, as this weight wants them."""
        return quantize_int8(x) if self.input_scale is None else static_int8(x, self.input_scale, self.input_zero)

    def gemm(self, x: Tensor | Codes, **arguments: Any) -> Tensor:
        """As :meth:`Fp8Weight.gemm`, by :func:`minfer.gemm_int8` or :func:`minfer.gemm_int8_gated`."""
        return self._multiply(gemm_int8_gated if self.gated else gemm_int8, x, arguments)


def bias_with_zero(weight: Tensor, scale: Tensor, input_scale: Tensor, input_zero: int, bias: Tensor | None) -> Tensor:
    """The bias of a product of int8 codes whose activations have one zero point: its product with the weight is the same for all tokens.

    Args:
      weight, scale, input_scale: as in :class:`Int8Weight`.
      bias: [n] of the layer, or None.

    Returns:
      float32 [n].
    """
    sums = weight.sum(1, dtype=torch.int64).double() * input_zero
    of_zero = sums * scale.reshape(-1).double() * input_scale.double()
    return (-of_zero if bias is None else bias.double() - of_zero).float()


def gate_up_weight(gate: Fp8Weight | Int8Weight, up: Fp8Weight | Int8Weight) -> Fp8Weight | Int8Weight:
    """Gate and up of a gated MLP as one weight, whose product is one kernel: act(gate) * up.

    Args:
      gate, up: [n_half, k] of one kind and one mode of scales, n_half a multiple of 8. Where static activations have two scales, the larger
        one is used for both.

    Returns:
      [2 * n_half, k], packed as :func:`minfer.pack_gate_up` says. Codes and scales stay what they were.

    Raises:
      ValueError: they do not fit together.
    """

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"gate_up_weight: {message}")

    require(type(gate) is type(up), f"up must be a {type(gate).__name__} as gate is, got {type(up).__name__}")
    require(not gate.gated and not up.gated, "gate and up must not be gated themselves")
    shapes = f"{[gate.n, gate.k]} and {[up.n, up.k]}"
    fits = gate.weight.shape == up.weight.shape and gate.n % GATE_BLOCK == 0
    require(fits, f"gate and up must have one shape, of n a multiple of {GATE_BLOCK}, got {shapes}")
    require(gate.mode == up.mode, f"gate and up must have scales of one mode, got {gate.mode} and {up.mode}")
    require(gate.scale.dtype == up.scale.dtype, f"gate and up must have scales of one type, got {gate.scale.dtype} and {up.scale.dtype}")
    for name in ("bias", "input_scale"):
        both = (getattr(gate, name) is None) == (getattr(up, name) is None)
        require(both, f"gate and up must both have {name}, or neither")
    if gate.mode == "block128":
        scale = torch.stack([gate.scale, up.scale])
    elif gate.mode == "channel":
        scale = pack_gate_up(gate.scale.reshape(-1), up.scale.reshape(-1))
    else:
        scale = gate.scale if torch.equal(gate.scale, up.scale) else pack_gate_up(*(x.scale.reshape(1).repeat(x.n) for x in (gate, up)))
    bias = None
    if gate.bias is not None:
        dtype = torch.promote_types(gate.bias.dtype, up.bias.dtype)
        bias = pack_gate_up(gate.bias.to(dtype), up.bias.to(dtype))
    input_scale = None if gate.input_scale is None else torch.maximum(gate.input_scale, up.input_scale)
    other = {}
    zeros = [getattr(x, "input_zero", None) for x in (gate, up)]
    if any(zero is not None for zero in zeros):  # which are in the bias
        same = all(zero is not None for zero in zeros) and torch.equal(*zeros) and torch.equal(gate.input_scale, up.input_scale)
        require(same, "gate and up must have one zero point and one scale of activations")
        other["input_zero"] = zeros[0]
    weight = aligned_rows(pack_gate_up(gate.weight, up.weight))
    return type(gate)(weight, scale, input_scale, bias, True, **other)


# ---- round to nearest ------------------------------------------------------------------------------------------------------------


def kept_bias(function: str, bias: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """A bias of ``shape`` as a weight keeps it: float64 becomes float32."""
    if bias is None:
        return None
    if tuple(bias.shape) != shape or bias.dtype not in FLOATS or bias.device != device:
        got = f"{list(bias.shape)}, {bias.dtype}, {bias.device}"
        raise ValueError(f"{function}: bias must be {list(shape)}, floating-point, on the weight's device {device}, got {got}")
    return bias.detach() if bias.dtype in DTYPES else rounded(function, "bias", bias.detach(), torch.float32)


def quantized(function: str, dtype: torch.dtype, weight: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Codes [n, k] and scales."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{function}: {message}")

    modes = MODES[dtype]
    require(mode in modes, f"mode must be {', '.join(modes[:-1])} or {modes[-1]}, got '{mode}'")
    require(weight.dim() == 2 and weight.numel() > 0, f"weight must be [n, k] and not empty, got {list(weight.shape)}")
    require(weight.dtype in FLOATS, f"weight must be float16, bfloat16, float32 or float64, got {weight.dtype}")
    require(not weight.is_meta, "weight must have values, got a tensor on the meta device")
    x, (n, k) = weight.detach(), weight.shape
    require(float(x.abs().amax()) <= torch.finfo(torch.float32).max, "weight must be finite, got a NaN or infinity")
    x = x.float()
    if mode == "block128":
        padded = torch.nn.functional.pad(x, (0, -k % BLOCK, 0, -n % BLOCK))
        largest = padded.view(blocks_of(n), BLOCK, blocks_of(k), BLOCK).abs().amax((1, 3))
    else:
        largest = x.abs().amax(1) if mode == "channel" else x.abs().amax().view(1)
    # Nothing but zeros has any scale; the smallest normal one keeps its inverse finite.
    scale = (largest / LARGEST_CODE[dtype]).clamp_(min=torch.finfo(torch.float32).smallest_normal)
    of_all = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k] if mode == "block128" else scale.view(-1, 1)
    codes = x / of_all
    if dtype == torch.int8:
        codes.round_()
    limit = LARGEST_CODE[dtype]
    return codes.clamp_(-limit, limit).to(dtype), scale


def _quantized_weight(kind: type[_Self], function: str, dtype: torch.dtype, weight: Tensor, mode: str, bias: Tensor | None) -> _Self:
    codes, scale = quantized(function, dtype, weight, mode)
    return kind(aligned_rows(codes), scale, bias=kept_bias(function, bias, weight.shape[:1], weight.device))


def quantize_fp8_weight(weight: Tensor, mode: str = "block128", *, bias: Tensor | None = None) -> Fp8Weight:
    """Rounds a weight to e4m3 codes, each scale covering the whole range of what it is of.

    Args:
      weight: [n, k], an ``nn.Linear`` weight, float16, bfloat16, float32 or float64, finite in float32; any device, any n and k > 0.
      mode: what has a scale: "block128", 128 x 128 elements; "channel", a row; "tensor", all.
      bias: [n], kept beside the weight; float64 is rounded to float32.

    Raises:
      ValueError: an argument cannot be right, or the weight has a NaN or infinity.
    """
    return _quantized_weight(Fp8Weight, "quantize_fp8_weight", FP8, weight, mode, bias)


def quantize_int8_weight(weight: Tensor, mode: str = "channel", *, bias: Tensor | None = None) -> Int8Weight:
    """Rounds a weight to int8 codes, -127 to 127; otherwise as :func:`quantize_fp8_weight`.

    Args:
      weight, bias: as there.
      mode: what has a scale: "channel", a row; "tensor", all.

    Raises:
      ValueError: as there.
    """
    return _quantized_weight(Int8Weight, "quantize_int8_weight", torch.int8, weight, mode, bias)
