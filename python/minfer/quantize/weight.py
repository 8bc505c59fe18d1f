"""A quantised weight and everything that reading it takes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..w4a16 import w4a16_dequantize, w4a16_gemm, w4a16_pack


@dataclass(frozen=True, eq=False)
class W4Weight:
    """A weight [n, k] of 4-bit codes, as :func:`minfer.w4a16_gemm` takes it.

    Attributes:
      qweight: int32 [ceil(n / 64), ceil(k / 64), 512], see :func:`minfer.w4a16_pack`.
      scales: [G, n], float16 or bfloat16; G = ceil(k / group_size), or 1.
      zeros: [G, n] of the dtype of scales, or None: 8 everywhere.
      perm: int32 [k], or None; the packed columns are W[:, perm].
      group_size: -1 or a power of two >= 32, counted in packed columns.
      n, k: rows (output features) and columns (input features).
      w4_format: "int4".
      bias: [n], or None.
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

    def dequantize(self) -> Tensor:
        """W [n, k] of the dtype of scales, columns in their original order."""
        packed = w4a16_dequantize(
            self.qweight, self.scales, self.zeros, group_size=self.group_size, n=self.n, k=self.k, w4_format=self.w4_format
        )
        return packed if self.perm is None else packed.index_select(1, self.perm.argsort())

    def gemm(self, a: Tensor, **arguments: Any) -> Tensor:
        """activation(A.W^T + C + bias): :func:`minfer.w4a16_gemm` with this weight and bias; c, activation, kernel, out as there."""
        return w4a16_gemm(
            a,
            self.qweight,
            self.scales,
            self.zeros,
            group_size=self.group_size,
            perm=self.perm,
            bias=self.bias,
            w4_format=self.w4_format,
            **arguments,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str | int) -> W4Weight:
        """The same weight on a device."""
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})


def weight_of_codes(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, group_size: int, perm: Tensor | None = None, bias: Tensor | None = None
) -> W4Weight:
    """A W4Weight of uint8 codes [n, k] and zeros in code units, both in packed column order; zeros that are all 8 are left out."""
    n, k = codes.shape
    if zeros is not None:
        zeros = None if bool((zeros == 8).all()) else zeros.to(scales.dtype).contiguous()
    return W4Weight(w4a16_pack(codes), scales.contiguous(), zeros, perm, group_size, n, k, "int4", bias)
