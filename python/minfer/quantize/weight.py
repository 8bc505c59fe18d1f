"""Quantised weights and everything that reading them takes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..checks.quantized_scaled_gemm import check_usable
from ..formats.weight_formats import FORMATS
from ..ops.output_codes import Codes
from ..ops.quantized_gemm import w4a16_dequantize, w4a16_gemm, w4a16_pack, w8a16_dequantize, w8a16_gemm, w8a16_pack
from ..ops.quantized_scaled_gemm import w4a8_gemm

_Self = TypeVar("_Self", bound="_Weight")


class _Weight:
    """What weights of 4 and of 8 bits have in common."""

    _arguments: ClassVar[tuple[str, ...]]  # the fields that operators take, by the same names

    def arguments(self) -> dict[str, Any]:
        """All that the operators take of the weight, by keyword: what is left out of a call would be left out of the product."""
        return {name: getattr(self, name) for name in self._arguments}

    def _packed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.qweight, self.scales, self.zeros

    def _original_order(self, packed: Tensor) -> Tensor:
        return packed if self.perm is None else packed.index_select(1, self.perm.argsort())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self: _Self, device: torch.device | str | int) -> _Self:
        """The same weight on a device."""
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})


@dataclass(frozen=True, eq=False)
class W4Weight(_Weight):
    """A weight [n, k] of 4-bit codes, as :func:`minfer.w4a16_gemm` takes it: ``minfer.w4a16_gemm(a, **weight.arguments())``.

    Attributes:
      qweight: int32 [ceil(n / 64), ceil(k / 64), 512], see :func:`minfer.w4a16_pack`.
      scales: [G, n], G = ceil(k / group_size), or 1; float16 or bfloat16, of mxfp4 and nvfp4 the bytes in uint8.
      zeros: [G, n] of the dtype of scales, or None: 8 everywhere, or a format without zero points.
      perm: int32 [k], or None; the packed columns are W[:, perm].
      group_size: as the format asks (:func:`minfer.w4a16_gemm`), counted in packed columns.
      n, k: rows (output features) and columns (input features).
      w4_format: "int4", "nf4", "mxfp4" or "nvfp4".
      bias: [n], or None.
      alpha: factor of the whole weight; nvfp4's global scale.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    group_size: int
    n: int
    k: int
    w4_format: str = "int4"
    bias: Tensor | None = None
    alpha: float = 1.0

    _arguments = ("qweight", "scales", "zeros", "group_size", "alpha", "perm", "bias", "w4_format")

    def dequantize(self, out_dtype: torch.dtype | None = None) -> Tensor:
        """W [n, k], columns in their original order; of the dtype of 16-bit scales, otherwise of ``out_dtype`` (None: bfloat16)."""
        form = {"group_size": self.group_size, "alpha": self.alpha, "w4_format": self.w4_format}
        return self._original_order(w4a16_dequantize(*self._packed(), **form, n=self.n, k=self.k, out_dtype=out_dtype))

    def gemm(self, a: Tensor | Codes, **arguments: Any) -> Tensor:
        """activation(A.W^T + C + bias): :func:`minfer.w4a16_gemm` with this weight and bias, or of codes of 8 bits and their scales, which
        :func:`minfer.quantize_fp8` returns, :func:`minfer.w4a8_gemm`; the other arguments as there.

        Raises:
          ValueError: the weight is none that w4a8_gemm takes.
        """
        if not isinstance(a, tuple):
            return w4a16_gemm(a, **self.arguments(), **arguments)
        form = {"zeros": self.zeros, "perm": self.perm, "w4_format": self.w4_format, "group_size": self.group_size}
        check_usable("W4Weight.gemm of codes", **form)
        options = {"group_size": self.group_size, "alpha": self.alpha, "bias": self.bias}
        return w4a8_gemm(*a, self.qweight, self.scales, **options, **arguments)


@dataclass(frozen=True, eq=False)
class W8Weight(_Weight):
    """A weight [n, k] of 8-bit codes, as :func:`minfer.w8a16_gemm` takes it: ``minfer.w8a16_gemm(a, **weight.arguments())``.

    Attributes:
      qweight: int32 [ceil(n / 64), ceil(k / 64), 1024], see :func:`minfer.w8a16_pack`.
      scales: [G, n], float16 or bfloat16; G = ceil(k / group_size), or 1.
      zeros: [G, n] of the dtype of scales, or None: 128 everywhere, or a format without zero points.
      w8_format: "int8" or "fp8_e4m3".
      perm, group_size, n, k, bias, alpha: as in :class:`W4Weight`; alpha is the scale of weights that have only one.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    group_size: int
    n: int
    k: int
    w8_format: str = "int8"
    bias: Tensor | None = None
    alpha: float = 1.0

    _arguments = ("qweight", "scales", "zeros", "group_size", "alpha", "perm", "bias", "w8_format")

    def dequantize(self) -> Tensor:
        """W [n, k] of the dtype of scales, columns in their original order."""
        form = {"group_size": self.group_size, "alpha": self.alpha, "w8_format": self.w8_format}
        return self._original_order(w8a16_dequantize(*self._packed(), **form, n=self.n, k=self.k))

    def gemm(self, a: Tensor, **arguments: Any) -> Tensor:
        """activation(A.W^T + C + bias): :func:`minfer.w8a16_gemm` with this weight and bias; the other arguments as there."""
        return w8a16_gemm(a, **self.arguments(), **arguments)


def weight_of_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int,
    format: str = "int4",
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
) -> W4Weight | W8Weight:
    """The weight of uint8 codes [n, k] and zeros in code units, both in packed column order; zeros that are all the usual are left out."""
    (n, k), form = codes.shape, FORMATS[format]
    if zeros is not None:
        zeros = None if bool((zeros == form.zero).all()) else zeros.to(scales.dtype).contiguous()
    if form.bits == 4:
        kind, qweight = W4Weight, w4a16_pack(codes, w4_format=format)
    else:
        kind, qweight = W8Weight, w8a16_pack(codes)
    return kind(qweight, scales.contiguous(), zeros, perm, int(group_size), n, k, format, bias, alpha)
