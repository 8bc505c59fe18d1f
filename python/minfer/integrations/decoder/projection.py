"""A linear map of a layer in any weight format, with the norm in front of it and the residual behind it.

    projection = projection_of([Dense(q.weight), Dense(k.weight), Dense(v.weight)])
    qkv = projection.after_norm(x, norm)                     # norm(x).W^T + bias, in the fewest launches that the format allows
    x = output_projection(attention_output, residual=x)      # x + y.W^T + bias, added in the product's epilogue

Which launches those are: the norm of a 16-bit weight's product is part of it where :func:`minfer.rms_norm_gemm` plans that; in front of 4
and 8-bit weights with 16-bit activations it is a launch of its own, whose tail the product overlaps; in front of 8-bit activations it
writes the codes that the product reads. Where x is a sum over ranks that is still to be made, the norm's launch makes it, and the product
follows; codes have a launch for the sum in front.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from ...ops.fused import Codes, activation as activate, gated_activation
from ...ops.gemm import gemm, gemm_gated
from ...ops.norm_gemm import (
    rms_norm_gemm,
    rms_norm_gemm_gated,
    rms_norm_w4a16_gemm,
    rms_norm_w4a16_gemm_gated,
    rms_norm_w8a16_gemm,
    rms_norm_w8a16_gemm_gated,
)
from ...ops.quantized_gemm import w4a16_gemm, w4a16_gemm_gated, w8a16_gemm, w8a16_gemm_gated
from ...quantize.scaled_weight import Fp8Weight, Int8Weight
from ...quantize.weight import W4Weight
from .norm import Norm
from .partial_sum import PartialSum
from .weights import Dense, PackedWeight, Weight, concatenate, gate_up


class Projection(torch.nn.Module, abc.ABC):
    """y = activation(x.W^T + bias); where ``gated``, of gate and up rows: activation(gate) * up.

    The weight's tensors are buffers that are not saved, since the layer's own modules save theirs; moving the module moves them. No kernel
    of minfer writes weights, and torch's do not let kernels overlap them: so products may read their weight early, whatever precedes them
    (:mod:`minfer.nn.constant_weights`).

    Attributes:
      in_features, out_features: of y, without the gate.
      gated, activation: as above; the activation is as in :func:`minfer.gemm`.
    """

    def __init__(self, in_features: int, out_features: int, gated: bool, activation: str):
        super().__init__()
        self.in_features, self.out_features, self.gated, self.activation = in_features, out_features, gated, activation

    @abc.abstractmethod
    def forward(self, x: Tensor, residual: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x: [tokens, in_features], float16 or bfloat16. residual: [tokens, out_features] of x's dtype, added unrounded, not of gated ones.
        out_dtype: x's, or float32 of one weight that is not gated. Returns [tokens, out_features] of it; None: of x's dtype."""

    def after_norm(self, x: Tensor | PartialSum, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """forward of norm(x); or of the norm of residual += x, which is written. A sum over the ranks is made with the norm."""
        return self(norm(x, residual))

    def partial_sum(self, x: Tensor) -> PartialSum | None:
        """This rank's part of forward(x), for the norm behind it to add the ranks' parts up. None: the product is no sum over ranks, or one
        that :meth:`forward` had better make."""
        return None

    @property
    @abc.abstractmethod
    def weight_format(self) -> str:
        """What the weight is stored as, for people."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(x.numel() * x.element_size() for x in self.buffers())

    def extra_repr(self) -> str:
        gate = ", gated" if self.gated else ""
        act = "" if self.activation == "none" else f", activation={self.activation}"
        return f"{self.in_features}, {self.out_features}, {self.weight_format}{gate}{act}"

    def _hold(self, tensors: dict[str, Tensor | None]) -> None:
        for name, x in tensors.items():
            self.register_buffer(name, x, persistent=False)


class _DenseProjection(Projection):
    def __init__(self, weight: Dense, gated: bool, activation: str):
        super().__init__(weight.k, weight.n // (2 if gated else 1), gated, activation)
        self._hold({"weight": weight.weight, "bias": weight.bias})

    @property
    def weight_format(self) -> str:
        return str(self.weight.dtype).removeprefix("torch.")

    def forward(self, x: Tensor, residual: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        options = {"bias": self.bias, "activation": self.activation, "constant_weights": True}
        if self.gated:
            _must_be_own(out_dtype, x)
            return gemm_gated(x, self.weight.t(), **options)
        options["out_dtype"] = out_dtype
        if residual is None:
            return gemm(x, self.weight.t(), **options)
        return gemm(x, self.weight.t(), c=residual, beta=1.0, **options)

    def after_norm(self, x: Tensor | PartialSum, norm: Norm, residual: Tensor | None = None) -> Tensor:
        if norm.centered or isinstance(x, PartialSum):
            return self(norm(x, residual))
        call = rms_norm_gemm_gated if self.gated else rms_norm_gemm
        return call(
            x,
            norm.weight,
            self.weight.t(),
            norm.eps,
            residual=residual,
            weight_offset=norm.weight_offset,
            bias=self.bias,
            activation=self.activation,
            constant_weights=True,
        )


def is_dense(projection: Projection) -> bool:
    """Whether it is one product of a weight in 16 bits."""
    return isinstance(projection, _DenseProjection) and projection.weight.dtype in (torch.float16, torch.bfloat16)


class _PackedProjection(Projection):
    """Weights of 4 or 8 bits beside 16-bit activations."""

    _TENSORS = ("qweight", "scales", "zeros", "perm", "bias")

    def __init__(self, weight: PackedWeight, gated: bool, activation: str):
        super().__init__(weight.k, weight.n // (2 if gated else 1), gated, activation)
        self._hold({name: getattr(weight, name) for name in self._TENSORS})
        self._bits = 4 if isinstance(weight, W4Weight) else 8
        form = f"w{self._bits}_format"
        self._options = {"group_size": weight.group_size, "alpha": weight.alpha, form: getattr(weight, form)}
        self._format = getattr(weight, form)

    @property
    def weight_format(self) -> str:
        size = self._options["group_size"]
        return self._format + ("" if size == -1 else f", groups of {size}")

    def _arguments(self) -> dict:
        tensors = {"perm": self.perm, "bias": self.bias, "activation": self.activation, "constant_weights": True}
        return tensors | self._options

    def forward(self, x: Tensor, residual: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        arguments = self._arguments()
        if self.gated:
            _must_be_own(out_dtype, x)
            call = w4a16_gemm_gated if self._bits == 4 else w8a16_gemm_gated
        else:
            call = w4a16_gemm if self._bits == 4 else w8a16_gemm
            arguments |= {"c": residual, "out_dtype": out_dtype}
        return call(x, self.qweight, self.scales, self.zeros, **arguments)

    def after_norm(self, x: Tensor | PartialSum, norm: Norm, residual: Tensor | None = None) -> Tensor:
        if norm.centered or isinstance(x, PartialSum):
            return self(norm(x, residual))
        if self._bits == 4:
            call = rms_norm_w4a16_gemm_gated if self.gated else rms_norm_w4a16_gemm
        else:
            call = rms_norm_w8a16_gemm_gated if self.gated else rms_norm_w8a16_gemm
        options = {"residual": residual, "weight_offset": norm.weight_offset, **self._arguments()}
        return call(x, norm.weight, self.qweight, self.scales, self.zeros, norm.eps, **options)


def packed_int4(projection: Projection) -> int | None:
    """The group size of a projection by symmetric int4 codes in the order of its activations, or None: it is another one."""
    if not isinstance(projection, _PackedProjection) or projection.weight_format.split(",")[0] != "int4":
        return None
    plain = projection.zeros is None and projection.perm is None and projection._options["alpha"] == 1.0
    return projection._options["group_size"] if plain else None


class _ScaledProjection(Projection):
    """Weights of 8 bits beside activations of 8 bits."""

    def __init__(self, weight: Fp8Weight | Int8Weight, gated: bool, activation: str):
        if gated != weight.gated:
            raise ValueError(f"Projection: a gated projection must have a gated weight, got gated {gated} and {weight.gated}")
        super().__init__(weight.k, weight.n // (2 if gated else 1), gated, activation)
        self._kind = type(weight)
        self._hold({f.name: getattr(weight, f.name) for f in fields(weight) if f.name != "gated"})

    def _weight(self) -> Fp8Weight | Int8Weight:
        return self._kind(gated=self.gated, **self._buffers)

    @property
    def weight_format(self) -> str:
        weight = self._weight()
        kind = "fp8" if isinstance(weight, Fp8Weight) else "int8"
        return f"{kind}, scales by {weight.mode}, {'static' if self.input_scale is not None else 'dynamic'} activations"

    def forward(self, x: Tensor | Codes, residual: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        more = {} if residual is None else {"c": residual, "beta": 1.0}
        if out_dtype is not None:
            more["out_dtype"] = out_dtype
        return self._weight().gemm(x, activation=self.activation, constant_weights=True, **more)

    def after_norm(self, x: Tensor | PartialSum, norm: Norm, residual: Tensor | None = None) -> Tensor:
        weight = self._weight()
        if weight.input_quant is None:
            return self(norm(x, residual))
        return self(norm.quantized(x, weight.input_quant, weight.input_scale, residual), out_dtype=x.dtype)


def scaled_fp8(projection: Projection) -> str | None:
    """What the scales are of ("tensor", "channel" or "block128"), of a projection by e4m3 weights that quantises activations by what it
    sees of them; None: it is another one."""
    if not isinstance(projection, _ScaledProjection) or projection._kind is not Fp8Weight or projection.input_scale is not None:
        return None
    return projection._weight().mode


class _SeparateProjections(Projection):
    """Weights that cannot be one: a product each."""

    def __init__(self, parts: Sequence[Projection], gated: bool, activation: str):
        rows = parts[0].out_features if gated else sum(part.out_features for part in parts)
        super().__init__(parts[0].in_features, rows, gated, activation)
        self.parts = torch.nn.ModuleList(parts)

    @property
    def weight_format(self) -> str:
        return ", ".join(dict.fromkeys(part.weight_format for part in self.parts)) + f", {len(self.parts)} products"

    def forward(self, x: Tensor, residual: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        _must_be_own(out_dtype, x)
        y = torch.cat([part(x) for part in self.parts], -1)
        if self.gated:
            return gated_activation(y, self.activation)
        y = y if self.activation == "none" else activate(y, self.activation)
        return y if residual is None else residual + y


def _must_be_own(out_dtype: torch.dtype | None, x: Tensor) -> None:
    if out_dtype not in (None, x.dtype):
        raise ValueError(f"Projection: out_dtype of gated or several weights must be x's dtype {x.dtype}, got {out_dtype}")


def _single(weight: Weight, gated: bool, activation: str) -> Projection:
    if isinstance(weight, Dense):
        return _DenseProjection(weight, gated, activation)
    kind = _PackedProjection if isinstance(weight, PackedWeight) else _ScaledProjection
    return kind(weight, gated, activation)


def projection_of(weights: Weight | Sequence[Weight], *, gated: bool = False, activation: str = "none") -> Projection:
    """The projection by one weight, or by the rows of several.

    Args:
      weights: one weight; several, whose rows follow each other (q, k and v); with ``gated`` the gate's and the up projection's. Those
        whose formats do not fit together are multiplied one by one.
      gated, activation: as in :class:`Projection`.
    """
    if isinstance(weights, Weight):
        return _single(weights, gated, activation)
    weights = list(weights)
    if gated and len(weights) != 2:
        raise ValueError(f"projection_of: a gated projection has a gate and an up weight, got {len(weights)}")
    joined = gate_up(*weights) if gated else concatenate(weights)
    if joined is not None:
        return _single(joined, gated, activation)
    return _SeparateProjections([_single(x, False, "none") for x in weights], gated, activation)
