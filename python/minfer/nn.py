"""Modules that hold packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from . import weight_layout
from .quantize import W4Weight, quantize_w4
from .w4a16 import w4a16_gemm


class W4Linear(torch.nn.Module):
    """``torch.nn.Linear`` with a 4-bit weight, for inference: y = x.W^T + bias by :func:`minfer.w4a16_gemm`.

    The constructor leaves the buffers uninitialised, for ``load_state_dict``; :meth:`from_weight` and :meth:`from_linear` fill them.

    Args:
      in_features, out_features: k and n, multiples of 8.
      bias, zeros, perm: which of the optional buffers there are.
      group_size: -1 or a power of two >= 32.
      w4_format: "int4".
      dtype: of scales, zeros, bias, input and output: float16 or bfloat16.
      device: of the buffers.

    Raises:
      ValueError: a size cannot be right.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_size: int = 128,
        zeros: bool = False,
        perm: bool = False,
        w4_format: str = "int4",
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        for name, extent in (("in_features", in_features), ("out_features", out_features)):
            if extent <= 0 or extent % weight_layout.MULTIPLE:
                raise ValueError(f"W4Linear: {name} must be a positive multiple of {weight_layout.MULTIPLE}, got {extent}")
        if group_size != -1 and (group_size < weight_layout.MIN_GROUP or group_size & (group_size - 1)):
            raise ValueError(f"W4Linear: group_size must be -1 or a power of two >= {weight_layout.MIN_GROUP}, got {group_size}")
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.w4_format = group_size, w4_format

        def buffer(name: str, wanted: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device) if wanted else None)

        rows = weight_layout.groups(in_features, group_size)
        buffer("qweight", True, weight_layout.packed_shape(out_features, in_features), torch.int32)
        buffer("scales", True, (rows, out_features), dtype)
        buffer("zeros", zeros, (rows, out_features), dtype)
        buffer("perm", perm, (in_features,), torch.int32)
        buffer("bias", bias, (out_features,), dtype)

    @classmethod
    def from_weight(cls, weight: W4Weight) -> W4Linear:
        """A module that holds the tensors of a packed weight (no copies)."""
        module = cls(
            weight.k,
            weight.n,
            weight.bias is not None,
            group_size=weight.group_size,
            zeros=weight.zeros is not None,
            perm=weight.perm is not None,
            w4_format=weight.w4_format,
            dtype=weight.scales.dtype,
            device="meta",
        )
        for name, x in weight.tensors().items():
            setattr(module, name, x)
        return module

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, group_size: int = 128, symmetric: bool = True, *, dtype: torch.dtype | None = None
    ) -> W4Linear:
        """Quantises a linear layer; arguments and errors as in :func:`minfer.quantize.quantize_w4`."""
        return cls.from_weight(quantize_w4(linear.weight, group_size, symmetric, dtype=dtype, bias=linear.bias))

    def weight(self) -> W4Weight:
        """The packed weight, sharing the module's tensors."""
        return W4Weight(
            self.qweight,
            self.scales,
            self.zeros,
            self.perm,
            self.group_size,
            self.out_features,
            self.in_features,
            self.w4_format,
            self.bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] of the dtype of scales -> [..., out_features]."""
        return w4a16_gemm(
            x,
            self.qweight,
            self.scales,
            self.zeros,
            group_size=self.group_size,
            perm=self.perm,
            bias=self.bias,
            w4_format=self.w4_format,
        )

    def extra_repr(self) -> str:
        present = ", ".join(f"{name}={getattr(self, name) is not None}" for name in ("bias", "zeros", "perm"))
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {present}, group_size={self.group_size}, "
            f"w4_format={self.w4_format}, dtype={self.scales.dtype}"
        )
