"""What the bytes of a KV cache stand for, by the table of minfer.ops.kv_cache, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_NAN = (0x7F, 0xFF)


def e4m3(codes: Tensor) -> Tensor:
    """uint8 -> float64: sign, four bits of exponent (bias 7), three of mantissa; no infinities, NaN where all of the other bits are set."""
    bits = codes.long()
    exponent, mantissa = bits >> 3 & 15, (bits & 7).double()
    normal = (1 + mantissa / 8) * torch.exp2((exponent - 7).double())
    value = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value = torch.where((exponent == 15) & (bits & 7 == 7), torch.nan, value)
    return torch.where(bits >= 128, -value, value)


def nibbles(codes: Tensor) -> Tensor:
    """uint8 [.., n] -> [.., 2 n]: element 2 i is the low nibble of byte i."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
