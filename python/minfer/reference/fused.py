"""CPU kernels of the operators between the GEMMs: ATen compositions in float32, rounded once. Of float64 they compute in that."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks.common import check_no_overlap
from ..checks.fused import QUANT_BLOCK, block_scales_strides, hadamard_shape
from .codes import E4M3_MAX, INT8_MAX, LARGEST_CODE, codes_of, e4m3, int8, inverse_of_scale
from .epilogue import ACTIVATION, compute_dtype
from .grouped_gemm import epilogue
from .rotary import check_indices, rotate

# ---- quantisation --------------------------------------------------------------------------------------------------------------------


def _single(x: Tensor) -> Tensor:
    """In the type that is computed in, and contiguous: torch's kernels compute other bits along other strides."""
    return x.contiguous().to(compute_dtype(x))


def _largest(y: Tensor) -> Tensor:
    """The largest magnitude along the last mode, which stays; NaN is left out, and of nothing it is 0."""
    largest = y.new_zeros((*y.shape[:-1], 1))
    return largest.copy_(torch.where(y.isnan(), 0.0, y.abs()).amax(-1, keepdim=True)) if y.numel() else largest


def quantized(y: Tensor, quant: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of float32 numbers, and their scales, in the layouts of :func:`minfer.quantize_fp8` and :func:`minfer.quantize_int8`;
    fp8_tensor: no scales."""
    if quant == "fp8_tensor":
        return e4m3(y * inverse_of_scale(scale)), y.new_empty(0, dtype=torch.float32)
    if quant == "int8_token":
        scales = _largest(y).div_(INT8_MAX)
        return int8(y * inverse_of_scale(scales)), scales
    if quant == "fp8_token":
        scales = _largest(y).div_(E4M3_MAX)
        return e4m3(y * inverse_of_scale(scales)), scales
    rows = math.prod(y.shape[:-1])
    codes, found = quantized_in_groups(y.reshape(rows, y.shape[-1]), QUANT_BLOCK, torch.float8_e4m3fn)
    scales = y.new_empty_strided(found.shape, block_scales_strides(rows), dtype=torch.float32)
    return codes.view(y.shape), scales.copy_(found)


def quantized_in_groups(y: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of rows [rows, width], and scales [rows, ceil(width / group)], one for each ``group`` columns of a row."""
    rows, width = y.shape
    groups = -(-width // group)
    of_groups = F.pad(y, (0, groups * group - width)).view(rows, groups, group)
    scales = (_largest(of_groups) / LARGEST_CODE[dtype]).float()
    codes = (of_groups * inverse_of_scale(scales)).view(rows, groups * group)[:, :width]
    return codes_of(codes.contiguous(), dtype), scales.squeeze(-1)


def quantize(x: Tensor, quant: str, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return quantized(_single(x), quant, scale)


def dequantize(q: Tensor, scales: Tensor, quant: str, *, dtype: torch.dtype) -> Tensor:
    q = q.contiguous()
    if quant == "fp8_block128":
        width = q.shape[-1]
        of_columns = scales.repeat_interleave(QUANT_BLOCK, 1)[:, :width]
        return (q.float() * of_columns.reshape(q.shape)).to(dtype)
    return (q.float() * scales.contiguous()).to(dtype)


# ---- normalisation -------------------------------------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    """Not rounded."""
    x = _single(x)
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * (weight.to(x.dtype) + weight_offset)


def _store(y: Tensor, dtype: torch.dtype, quant: str, scale: Tensor | None, norm: Tensor | None) -> tuple[Tensor, Tensor]:
    if norm is not None:
        norm.copy_(y.to(dtype))
    return quantized(y, quant, scale)


def _add(x: Tensor, residual: Tensor) -> Tensor:
    dtype = compute_dtype(x)
    return residual.copy_((x.to(dtype) + residual.to(dtype)).to(residual.dtype))


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0) -> Tensor:
    return _rms_norm(x, weight, eps, weight_offset).to(x.dtype)


def rms_norm_quantized(
    x: Tensor,
    quant: str,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _store(_rms_norm(x, weight, eps, weight_offset), x.dtype, quant, scale, norm)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0) -> Tensor:
    return rms_norm(_add(x, residual), weight, eps, weight_offset=weight_offset)


def add_rms_norm_quantized(
    x: Tensor,
    residual: Tensor,
    quant: str,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _store(_rms_norm(_add(x, residual), weight, eps, weight_offset), x.dtype, quant, scale, norm)


def check_rms_norm_quantized_values(x: Tensor, quant: str, weight=None, eps=1e-6, *, norm: Tensor | None = None, **_) -> None:
    if norm is not None:
        check_no_overlap("rms_norm_quantized", norm, "norm", x=x, weight=weight)


def check_add_rms_norm_values(x: Tensor, residual: Tensor, weight: Tensor | None = None, *_, **__) -> None:
    check_no_overlap("add_rms_norm", residual, "residual", x=x, weight=weight)


def check_add_rms_norm_quantized_values(
    x: Tensor, residual: Tensor, quant: str, weight: Tensor | None = None, *_, norm: Tensor | None = None, **__
) -> None:
    check_no_overlap("add_rms_norm_quantized", residual, "residual", x=x, weight=weight)
    if norm is not None:
        check_no_overlap("add_rms_norm_quantized", norm, "norm", x=x, residual=residual, weight=weight)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Two passes: the variance is that of deviations, so that no digits cancel."""
    y = _single(x)
    y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight.to(y.dtype)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


# ---- softmax, activation -------------------------------------------------------------------------------------------------------------


def _below_largest(x: Tensor) -> Tensor:
    y = _single(x)
    return y - y.amax(-1, keepdim=True) if x.shape[-1] else y


def softmax(x: Tensor) -> Tensor:
    e = _below_largest(x).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def log_softmax(x: Tensor) -> Tensor:
    y = _below_largest(x)
    return (y - y.exp().sum(-1, keepdim=True).log()).to(x.dtype)


def activation(x: Tensor, activation: str, *, bias: Tensor | None = None) -> Tensor:
    y = _single(x)
    return ACTIVATION[activation](y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def _gated(x: Tensor, activation: str, gate_layout: str) -> Tensor:
    return epilogue(_single(x), None, activation, True, gate_layout)


def gated_activation(x: Tensor, activation: str = "silu", *, gate_layout: str = "halves") -> Tensor:
    return _gated(x, activation, gate_layout).to(x.dtype)


def gated_activation_quantized(
    x: Tensor, quant: str, activation: str = "silu", *, gate_layout: str = "halves", scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return quantized(_gated(x, activation, gate_layout), quant, scale)


# ---- Hadamard transform --------------------------------------------------------------------------------------------------------------


def _character(order: int) -> Tensor:
    """[order, order] of a prime: whether the difference of row and column is a square modulo it, 1 or -1, and 0 of 0."""
    squares = {i * i % order for i in range(1, order)}
    of_difference = torch.tensor([0.0 if i == 0 else 1.0 if i in squares else -1.0 for i in range(order)])
    places = torch.arange(order)
    return of_difference[(places[:, None] - places[None, :]) % order]


def hadamard_outer(order: int) -> Tensor:
    """The matrix of order 1, 12, 20 or 28, float32: of 12 and 20 by Paley's first construction, of 28 by his second (Paley, 1933)."""
    if order == 1:
        return torch.ones(1, 1)
    prime = 13 if order == 28 else order - 1
    core = torch.zeros(prime + 1, prime + 1)
    core[1:, 1:] = _character(prime)
    core[1:, 0] = 1.0
    core[0, 1:] = 1.0 if order == 28 else -1.0
    one = torch.eye(prime + 1)
    if order != 28:
        return core + one
    return torch.cat([torch.cat([core + one, core - one], 1), torch.cat([core - one, -core - one], 1)], 0)


def hadamard(x: Tensor, block: int, *, transpose: bool = False) -> Tensor:
    outer, bits = hadamard_shape(block)
    y = _single(x).reshape(-1, outer, 1 << bits)
    for bit in range(bits):
        a, b = y.reshape(-1, outer, 1 << (bits - 1 - bit), 2, 1 << bit).unbind(3)
        y = torch.stack([a + b, a - b], 3)
    y = y.reshape(-1, outer, 1 << bits)
    if outer > 1:
        matrix = hadamard_outer(outer).to(y.dtype)
        y = (matrix.T if transpose else matrix) @ y
    return (y * block**-0.5).reshape(x.shape).to(x.dtype)


# ---- rotary embedding, embedding -----------------------------------------------------------------------------------------------------


def rope(q: Tensor, k: Tensor | None, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False, rotary_dim=None) -> None:
    for x in (q, k):
        if x is not None:
            rotate(x, cos_sin, positions, interleaved)


def check_rope_values(q: Tensor, k: Tensor | None, cos_sin: Tensor, positions: Tensor, **_) -> None:
    if k is not None:
        check_no_overlap("rope", q, "q", k=k)
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            check_no_overlap("rope", x, name, cos_sin=cos_sin, positions=positions)
    check_indices("rope", "positions", positions, cos_sin.shape[0], "rows of cos_sin")


def embedding(ids: Tensor, weight: Tensor, *, scale: float | None = None) -> Tensor:
    rows = weight.index_select(0, ids.reshape(-1).long()).view(*ids.shape, weight.shape[1])
    return rows if scale is None else (rows.to(compute_dtype(weight)) * scale).to(weight.dtype)


def check_embedding_values(ids: Tensor, weight: Tensor, **_) -> None:
    check_indices("embedding", "ids", ids, weight.shape[0], "rows of weight")
