"""What the codes and scales of a quantised weight stand for; the facts are those of cpp/configs/formats.toml (:mod:`.table`).

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
from . import table

MIN_GROUP = 32  # where group_size is free
_MAX_GROUP = 2**62  # the largest power of two that an operator's int argument holds


class WeightFormat(NamedTuple):
    """w = (decode(code) - zero) * scale."""

    bits: int
    decode: Callable[[torch.Tensor], torch.Tensor]  # uint8 codes -> float32 values
    zero: float | None = None  # where zeros is None; None: a format without zero points
    group_size: int | None = None  # prescribed
    scale_type: torch.dtype | None = None  # of which the scales are the bytes, in uint8; None: 16-bit scales
    order: str = "plain"  # of the codes' bits in the packed layout (weight_layout)
    values: str = "integer"  # what a code stands for, a key of table.VALUES
    book: tuple[float, ...] | None = None  # the value of each code, where a table has it
    usual_group_size: int = -1


def _decoder(values: str, book: tuple[float, ...] | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if book is not None:
        return lambda codes: torch.tensor(book, device=codes.device)[codes.int()]
    if values == "e4m3":
        return lambda codes: codes.view(torch.float8_e4m3fn).float()
    return lambda codes: codes.float()


def _format(bits: int, values: str, scales: str, **facts) -> WeightFormat:
    order, book = table.VALUES[values]
    scale_type = None if scales == "operand" else getattr(torch, table.ELEMENTS[scales])
    return WeightFormat(bits, _decoder(values, book), scale_type=scale_type, order=order, values=values, book=book, **facts)


FORMATS = {name: _format(**facts) for name, facts in table.FORMATS.items()}
NF4, E2M1 = FORMATS["nf4"].book, FORMATS["mxfp4"].book


def names(bits: int) -> tuple[str, ...]:
    """The formats whose codes have ``bits`` bits."""
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
