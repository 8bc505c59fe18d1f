"""What the codes and scales of a quantised weight stand for; the Python twin of WeightFormat in cpp/include/minfer/types.h.

    int4, int8       (code - zero) * scale, unsigned codes; scales and zeros are 16-bit
    nf4              NF4[code] * scale (QLoRA's 4-bit NormalFloat); scales are 16-bit
    mxfp4, nvfp4     E2M1[code] * scale, code = sign << 3 | magnitude; scales are bytes: E8M0 for 32 columns, E4M3 for 16
    fp8_e4m3         e4m3(code) * scale; scales are 16-bit

Sources: Dettmers et al., QLoRA (2023), values as bitsandbytes lists them; OCP Microscaling Formats (MX) 1.0; NVIDIA's NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..checks.common import is_integer

MIN_GROUP = 32  # where group_size is free
_MAX_GROUP = 2**62  # the largest power of two that an operator's int argument holds

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class WeightFormat(NamedTuple):
    """w = (decode(code) - zero) * scale."""

    bits: int
    decode: Callable[[torch.Tensor], torch.Tensor]  # uint8 codes -> float32 values
    zero: float | None = None  # where zeros is None; None: a format without zero points
    group_size: int | None = None  # prescribed
    scale_type: torch.dtype | None = None  # of which the scales are the bytes, in uint8; None: 16-bit scales
    order: str = "plain"  # of the codes' bits in the packed layout (weight_layout)


def _book(values: tuple[float, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda codes: torch.tensor(values, device=codes.device)[codes.int()]


def _e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


FORMATS = {
    "int4": WeightFormat(4, lambda codes: codes.float(), zero=8.0),
    "nf4": WeightFormat(4, _book(NF4), order="book"),
    "mxfp4": WeightFormat(4, _book(E2M1), group_size=32, scale_type=torch.float8_e8m0fnu, order="e2m1"),
    "nvfp4": WeightFormat(4, _book(E2M1), group_size=16, scale_type=torch.float8_e4m3fn, order="e2m1"),
    "int8": WeightFormat(8, lambda codes: codes.float(), zero=128.0),
    "fp8_e4m3": WeightFormat(8, _e4m3),
}


def names(bits: int) -> tuple[str, ...]:
    """The formats of so many bits a code."""
    return tuple(name for name, form in FORMATS.items() if form.bits == bits)


def group_size_rule(name: str) -> str:
    """What group_size must be, in words."""
    wanted = FORMATS[name].group_size
    return f"-1 or a power of two >= {MIN_GROUP}" if wanted is None else f"{wanted} for {name}"


def legal_group_size(name: str, group_size: int) -> bool:
    wanted = FORMATS[name].group_size
    if not is_integer(group_size):
        return False
    if wanted is not None:
        return group_size == wanted
    return group_size == -1 or (MIN_GROUP <= group_size <= _MAX_GROUP and group_size & (group_size - 1) == 0)


def scale_values(scales: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Stored scales -> float32."""
    return (scales if form.scale_type is None else scales.view(form.scale_type)).float()


def stored_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """Scales as the operators take them: those of a byte format in their own type become uint8, others stay what they are."""
    form = FORMATS.get(name)
    own = form is not None and form.scale_type is not None and scales.dtype == form.scale_type
    return scales.view(torch.uint8) if own else scales
