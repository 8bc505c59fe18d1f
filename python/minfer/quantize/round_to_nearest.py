"""Round-to-nearest quantisation with clipping chosen by the squared error of each group."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import weight_layout
from ..checks import DTYPES
from .weight import W4Weight, weight_of_codes

_SHRINKS = 41  # candidates from the whole range down to half of it
_CHUNK = 1 << 20  # elements searched at a time: 4 MiB a float32 temporary


def _groups_of(weight: Tensor, group_size: int) -> Tensor:
    """float32 [rows, G, size], zeros behind a short last group."""
    size = weight.shape[1] if group_size == -1 else group_size
    tail = -weight.shape[1] % size
    return torch.nn.functional.pad(weight.float(), (0, tail)).unflatten(1, (-1, size))


def _rounded(groups: Tensor, scale: Tensor, zero: Tensor | float) -> Tensor:
    """Codes, as float32."""
    return (groups / scale).add_(zero).round_().clamp_(0, 15)


def _search(groups: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scales [rows, G], zeros [rows, G] or None and float32 codes with the least squared error among the shrunk ranges."""
    low = groups.amin(2, keepdim=True).clamp_(max=0)
    high = groups.amax(2, keepdim=True).clamp_(min=0)
    smallest = torch.finfo(dtype).smallest_normal
    best_error = best_scale = best_zero = None
    for shrink in torch.linspace(1.0, 0.5, _SHRINKS).tolist():
        # -8 * scale to 7 * scale, or 15 steps from low to high; rounded to what will be stored, so that the error is the real one.
        scale = torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15
        scale = (shrink * scale).clamp_(min=smallest, max=torch.finfo(dtype).max).to(dtype).float()
        zero = torch.full_like(scale, 8) if symmetric else (-shrink * low / scale).round_().clamp_(0, 15)
        error = _rounded(groups, scale, zero).sub_(zero).mul_(scale).sub_(groups).square_().sum(2, keepdim=True)
        if best_error is None:
            best_error, best_scale, best_zero = error, scale, zero
        else:
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
    codes = _rounded(groups, best_scale, best_zero)
    return best_scale[..., 0], None if symmetric else best_zero[..., 0], codes


def quantize_w4(
    weight: Tensor,
    group_size: int = 128,
    symmetric: bool = True,
    format: str = "int4",
    *,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
) -> W4Weight:
    """Rounds a weight to 4-bit codes; the range of each group is shrunk to where the squared error of the weights is least.

    Args:
      weight: [n, k], an ``nn.Linear`` weight; finite, any floating-point dtype and device. n and k are multiples of 8.
      group_size: columns that share a scale: -1 (all) or a power of two >= 32.
      symmetric: zero points of 8 (none are stored); otherwise an integer zero point for each group.
      format: "int4".
      dtype: of the scales and so of the activations: float16 or bfloat16. Default: the weight's, which then must be one of them.
      bias: [n], kept beside the weight.

    Returns:
      The packed weight, on the weight's device.

    Raises:
      ValueError: an argument cannot be right, or the weight has a NaN or infinity.

    Numerics: searched in float32 with the scales rounded to ``dtype``.
    """
    if format != "int4":
        raise ValueError(f"quantize_w4: format must be one of int4, got '{format}'")
    if weight.dim() != 2 or any(extent % weight_layout.MULTIPLE or extent == 0 for extent in weight.shape):
        raise ValueError(f"quantize_w4: weight must be [n, k] in multiples of {weight_layout.MULTIPLE}, got {list(weight.shape)}")
    if not weight.is_floating_point():
        raise ValueError(f"quantize_w4: weight must be a floating-point tensor, got {weight.dtype}")
    if group_size != -1 and (group_size < weight_layout.MIN_GROUP or group_size & (group_size - 1)):
        raise ValueError(f"quantize_w4: group_size must be -1 or a power of two >= {weight_layout.MIN_GROUP}, got {group_size}")
    dtype = dtype or weight.dtype
    if dtype not in DTYPES:
        raise ValueError(f"quantize_w4: dtype must be torch.float16 or torch.bfloat16 (default: the weight's), got {dtype}")
    weight = weight.detach()
    n, k = weight.shape
    count = weight_layout.groups(k, group_size)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(count, n, dtype=dtype, device=weight.device)
    zeros = None if symmetric else torch.empty_like(scales)
    rows = max(1, _CHUNK // k)
    for begin in range(0, n, rows):
        part = slice(begin, begin + rows)
        groups = _groups_of(weight[part], group_size)
        if not bool(groups.isfinite().all()):
            raise ValueError("quantize_w4: weight must be finite, got a NaN or infinity")
        scale, zero, code = _search(groups, symmetric, dtype)
        codes[part] = code.flatten(1)[:, :k]
        scales[:, part] = scale.t()
        if zeros is not None:
            zeros[:, part] = zero.t()
    return weight_of_codes(codes, scales, zeros, group_size=group_size, bias=None if bias is None else bias.detach())
