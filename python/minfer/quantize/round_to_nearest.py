"""Round-to-nearest quantisation, scales chosen by the squared error of each group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..checks.common import DTYPES
from ..formats import weight_formats, weight_layout
from ..formats.weight_formats import FORMATS, WeightFormat
from .loader import FLOATS, rounded
from .weight import W4Weight, W8Weight, weight_of_codes

# Elements that are searched at a time. On a CPU a float32 temporary of 4 MiB stays in a cache; elsewhere 64 MiB keep launches few.
_CHUNK_CPU, _CHUNK = 1 << 20, 1 << 24
_E4M3_SMALLEST, _E4M3_MAX = 2.0**-9, 448.0

# Candidates: factors of the scale that covers a group's whole range, the whole range first.
_SHRINKS = {
    "int4": torch.linspace(1.0, 0.5, 41).tolist(),
    "nvfp4": [1.0, *torch.linspace(0.95, 0.6, 8).tolist(), *torch.linspace(1.05, 1.5, 10).tolist()],  # up to 4 as the largest code
    "fp8_e4m3": torch.linspace(1.0, 0.5, 9).tolist(),
}
_USUAL_SHRINKS = torch.linspace(1.0, 0.7, 13).tolist()


def _max_of_group(form: WeightFormat) -> float:
    """The value that a group's largest magnitude is scaled to, before the range is shrunk: codes of both signs reach it."""
    if form.book is not None:
        return min(max(form.book), -min(form.book))
    return _E4M3_MAX if form.values == "e4m3" else 2.0 ** (form.bits - 1) - 1


def _middles(values: tuple[float, ...]) -> list[float]:
    return [(low + high) / 2 for low, high in zip(values, values[1:], strict=False)]


# Magnitudes of E2M1, ties to the even code: a bound belongs to the code below it, so those whose lower code is odd are moved down a bit.
_E2M1_BOUNDS = [bound * (1.0 - 2.0**-23 * (i % 2)) for i, bound in enumerate(_middles(weight_formats.E2M1[:8]))]


def _encode(x: Tensor, form: WeightFormat) -> Tensor:
    """The codes nearest to values in units of the scale, plus the zero point; uint8 or, of integers, float32."""
    if form.values == "integer":
        return x.round_().clamp_(0, 2.0**form.bits - 1)
    if form.values == "e4m3":
        return x.clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    if form.values == "e2m1":
        magnitude = torch.bucketize(x.abs(), torch.tensor(_E2M1_BOUNDS, device=x.device), out_int32=True)
        return (magnitude + 8 * torch.signbit(x)).to(torch.uint8)
    return torch.bucketize(x.contiguous(), torch.tensor(_middles(form.book), device=x.device), out_int32=True).to(torch.uint8)


def _candidates(
    groups: Tensor, name: str, symmetric: bool, dtype: torch.dtype, alpha: float, clip: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales as they are stored and zeros, both [rows, G, 1]."""
    low = groups.amin(2, keepdim=True).clamp_(max=0)
    high = groups.amax(2, keepdim=True).clamp_(min=0)
    max_magnitude = torch.maximum(-low, high)
    form = FORMATS[name]
    if form.scale_type == torch.float8_e8m0fnu:
        # OCP MX 1.0: floor(log2(largest)) less the exponent of E2M1's largest number; one more loses no range, one less clips more.
        exponent = torch.frexp(max_magnitude).exponent - 1 - 2
        for step in (0, 1, -1) if clip else (0,):
            yield (exponent + (127 + step)).clamp_(0, 254).to(torch.uint8), torch.zeros_like(low)
        return
    levels = 2.0**form.bits - 1
    for shrink in _SHRINKS.get(name, _USUAL_SHRINKS) if clip else [1.0]:
        scale = shrink * (max_magnitude / (_max_of_group(form) * alpha) if symmetric else (high - low) / levels)
        if form.scale_type is not None:
            stored = scale.clamp_(_E4M3_SMALLEST, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            stored = scale.clamp_(min=torch.finfo(dtype).smallest_normal, max=torch.finfo(dtype).max).to(dtype)
        zero = form.zero or 0.0
        yield stored, torch.full_like(low, zero) if symmetric else (-shrink * low / stored.float()).round_().clamp_(0, levels)


def _search(
    groups: Tensor, name: str, form: WeightFormat, symmetric: bool, dtype: torch.dtype, alpha: float, clip: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Stored scales [rows, G], zeros [rows, G] and codes with the least squared error among the candidates."""
    best_error = best_scale = best_zero = None
    for stored, zero in _candidates(groups, name, symmetric, dtype, alpha, clip):
        scale = weight_formats.scale_values(stored, form) * alpha  # what is stored, so that the error is the real one
        if clip:
            value = form.decode(_encode((groups / scale).add_(zero), form))
            error = value.sub_(zero).mul_(scale).sub_(groups).square_().sum(2, keepdim=True)
        else:
            error = torch.zeros_like(scale)
        if best_error is None:
            best_error, best_scale, best_zero = error, stored, zero
        else:
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale = torch.where(better, stored, best_scale)
            best_zero = torch.where(better, zero, best_zero)
    codes = _encode((groups / (weight_formats.scale_values(best_scale, form) * alpha)).add_(best_zero), form)
    return best_scale[..., 0], best_zero[..., 0], codes


def _groups_of(weight: Tensor, group_size: int) -> Tensor:
    """float32 [rows, G, size], zeros behind a short last group."""
    size = weight_layout.group_columns(weight.shape[1], group_size)
    tail = -weight.shape[1] % size
    return torch.nn.functional.pad(weight.float(), (0, tail)).unflatten(1, (-1, size))


def parts_at_once(name: str, n: int, k: int, device: torch.device) -> int:
    """How many weights [n, k] are best given to :func:`quantize_parts` together: one alone is hundreds of launches, however small."""
    if name not in FORMATS or FORMATS[name].scale_type == torch.float8_e4m3fn:  # nvfp4 has a scale for the whole weight
        return 1
    return max(1, (_CHUNK_CPU if device.type == "cpu" else _CHUNK) // (n * k))


def quantize_parts(
    function: str,
    bits: int,
    weight: Tensor,
    parts: int,
    group_size: int | None,
    symmetric: bool,
    name: str,
    dtype: torch.dtype | None,
    bias: Tensor | None,
    clip: bool,
) -> list[W4Weight | W8Weight]:
    """What :func:`quantize_w4` and :func:`quantize_w8` do with each of ``parts`` weights of as many rows, which lie below each other, in
    fewer launches; of nvfp4 one part alone. ``function``: whose name errors begin with."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{function}: {message}")

    require(name in weight_formats.names(bits), f"format must be one of {', '.join(weight_formats.names(bits))}, got '{name}'")
    form, multiple = FORMATS[name], weight_layout.MULTIPLE
    shape = [weight.shape[0] // parts, *weight.shape[1:]] if weight.dim() > 0 else []
    shape_fits = weight.dim() == 2 and not any(extent % multiple or extent == 0 for extent in shape)
    require(shape_fits, f"weight must be [n, k] in multiples of {multiple}, got {shape}")
    require(weight.dtype in FLOATS, f"weight must be float16, bfloat16, float32 or float64, got {weight.dtype}")
    require(not weight.is_meta, "weight must have values, got a tensor on the meta device")
    group_size = form.usual_group_size if group_size is None else group_size
    legal = weight_formats.legal_group_size(name, group_size)
    require(legal, f"group_size must be {weight_formats.group_size_rule(name)}, got {group_size}")
    require(symmetric or form.zero is not None, f"symmetric must be True for {name}, which has no zero points, got False")
    if form.scale_type is None:
        dtype = weight.dtype if dtype is None else dtype
        require(dtype in DTYPES, f"dtype must be torch.float16 or torch.bfloat16 (default: the weight's), got {dtype}")
        stored_dtype = dtype
    else:
        stored_dtype = torch.uint8
    weight = weight.detach()
    n, k = weight.shape
    if bias is not None:
        good = tuple(bias.shape) == (n,) and bias.dtype in FLOATS and bias.device == weight.device
        got = f"{list(bias.shape)}, {bias.dtype}, {bias.device}"
        require(good, f"bias must be {[n]}, floating-point, on the weight's device {weight.device}, got {got}")
        wide = bias.dtype in (torch.float32, torch.float64)
        own = torch.float32 if wide else dtype if form.scale_type is None else bias.dtype
        bias = rounded(function, "bias", bias.detach(), own)
    max_magnitude = float(weight.abs().amax())
    require(max_magnitude <= torch.finfo(torch.float32).max, "weight must be finite, got a NaN or infinity")  # also where NaN
    if form.scale_type is None:
        limit = _max_of_group(form) * torch.finfo(dtype).max
        require(max_magnitude <= limit, f"weight must be at most {limit:g}, for its scales are {dtype}, got {max_magnitude:g}")
    alpha = 1.0
    if form.scale_type == torch.float8_e4m3fn and max_magnitude > 0:  # two levels: the largest block scale is E4M3's largest number
        alpha = float(torch.tensor(max_magnitude) / (_max_of_group(form) * _E4M3_MAX))
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(weight_layout.groups(k, group_size), n, dtype=stored_dtype, device=weight.device)
    zeros = None if symmetric else torch.empty_like(scales)
    rows = max(1, (_CHUNK_CPU if weight.device.type == "cpu" else _CHUNK) // k)
    for begin in range(0, n, rows):
        part = slice(begin, begin + rows)
        scale, zero, code = _search(_groups_of(weight[part], group_size), name, form, symmetric, dtype, alpha, clip)
        codes[part] = code.flatten(1)[:, :k]
        scales[:, part] = scale.t()
        if zeros is not None:
            zeros[:, part] = zero.t()
    rows_of = [slice(begin, begin + n // parts) for begin in range(0, n, n // parts)]
    return [
        weight_of_codes(
            codes[own], scales[:, own], None if zeros is None else zeros[:, own], group_size=group_size, format=name,
            bias=None if bias is None else bias[own], alpha=alpha,
        )
        for own in rows_of
    ]  # fmt: skip


def quantize_w4(
    weight: Tensor,
    group_size: int | None = None,
    symmetric: bool = True,
    format: str = "int4",
    *,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    clip: bool = True,
) -> W4Weight:
    """Rounds a weight to 4-bit codes; the scale of each group is chosen where the squared error of the weights is least.

    Args:
      weight: [n, k], an ``nn.Linear`` weight, float16, bfloat16, float32 or float64, finite in float32; any device. n and k are multiples
        of 8.
      group_size: columns that share a scale: -1 (all) or a power of two >= 32; of mxfp4 32, of nvfp4 16. None: the format's usual,
        128 for int4 and 64 for nf4.
      symmetric: zero points of 8 (none are stored); otherwise, int4 only, an integer zero point for each group.
      format: "int4"; "nf4", scales from the largest magnitude; "mxfp4", the shared exponent of OCP MX or a neighbour; "nvfp4", E4M3
        block scales under a global one, which is W4Weight.alpha = largest magnitude / (6 * 448).
      dtype: of 16-bit scales and so of the activations: float16 or bfloat16. Default: the weight's, which then must be one of them.
        Formats with byte scales do not look at it.
      bias: [n], kept beside the weight: in float32 as it is, in 16 bits rounded to the dtype of 16-bit scales.
      clip: False: no search, a scale covers its group's whole range (mxfp4: the OCP rule), as most other tools do.

    Returns:
      The packed weight, on the weight's device.

    Raises:
      ValueError: an argument cannot be right, or the weight has a NaN or infinity.

    Numerics: searched in float32 with the scales rounded to what is stored.
    """
    return quantize_parts("quantize_w4", 4, weight, 1, group_size, symmetric, format, dtype, bias, clip)[0]


def quantize_w8(
    weight: Tensor,
    group_size: int | None = None,
    symmetric: bool = True,
    format: str = "int8",
    *,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    clip: bool = True,
) -> W8Weight:
    """Rounds a weight to 8-bit codes; otherwise as :func:`quantize_w4`.

    Args:
      group_size: columns that share a scale: -1 (all, the default) or a power of two >= 32.
      symmetric: zero points of 128 (none are stored); otherwise, int8 only, an integer zero point for each group.
      format: "int8" or "fp8_e4m3".
      weight, dtype, bias, clip: as in :func:`quantize_w4`.

    Returns:
      The packed weight, on the weight's device.

    Raises:
      ValueError: an argument cannot be right, or the weight has a NaN or infinity.
    """
    return quantize_parts("quantize_w8", 8, weight, 1, group_size, symmetric, format, dtype, bias, clip)[0]
