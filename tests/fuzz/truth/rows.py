"""Operators on rows, from their docstrings: float64, each with a bound on its float32 result (docs/numerics.md, section 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contracts import numerics_cases as numerics

from ..compare import Expected
from .epilogue import Bounded, gated

QUANTS = ("fp8_tensor", "fp8_token", "fp8_block128", "int8_token")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Bounded:
    return Bounded(*numerics.rms_norm_rows(x, weight, eps, weight_offset))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Bounded:
    return Bounded(*numerics.layer_norm_rows(x, weight, bias, eps))


def softmax(x: Tensor, logarithm: bool) -> Bounded:
    return Bounded(*numerics.softmax_rows(x, logarithm))


def activation(x: Tensor, name: str, bias: Tensor | None) -> Bounded:
    return Bounded(*numerics.activation_rows(x, name, bias))


def gated_activation(x: Tensor, name: str, layout: str) -> Bounded:
    x = x.double()
    y = gated(Bounded(x, torch.zeros_like(x)), name, layout)
    return Bounded(y.value, y.error + 2.0**-22 * y.value.abs())


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Bounded:
    return Bounded(*numerics.rope_rows(x, cos_sin, positions, interleaved))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return numerics.rounded(x, dtype).to(dtype)


def expected(name: str, y: Bounded, dtype: torch.dtype) -> Expected:
    """Rounded once."""
    y = y.rounded(dtype) if dtype != torch.float32 else y
    return Expected(name, dtype, y.value, y.error + 2.0**-126)


def expected_codes(y: Bounded, quant: str, given: Tensor | None, have: dict[str, Tensor]) -> list[Expected]:
    """Scales are those of the exact results; codes are the nearest of exact results in units of the scales that there are."""
    most, is_int8, shape = numerics.LARGEST_CODE[quant], quant == "int8_token", y.value.shape
    exact, off = numerics.by_groups(y.value, quant), numerics.by_groups(y.error, quant)
    dtype = torch.int8 if is_int8 else torch.float8_e4m3fn
    found, device = [], exact.device
    if quant == "fp8_tensor":
        own = given.double().view(1, 1)
        found.append(Expected("scales", torch.float32, torch.zeros(0, dtype=torch.float64, device=device)))
    else:
        own_shape = exact.shape[:2] if quant == "fp8_block128" else (*shape[:-1], 1)
        size = exact.abs().amax(-1) if exact.shape[-1] else exact.new_zeros(exact.shape[:2])
        size_off = off.amax(-1) if exact.shape[-1] else size
        bound = (size_off + 2.0**-23 * size) / most + 2.0**-148
        found.append(
            Expected(
                "scales", torch.float32, (size / most).reshape(own_shape), bound.reshape(own_shape), contiguous=quant != "fp8_block128"
            )
        )
        scales = have["scales"]
        own = scales.double().reshape(exact.shape[:2]) if scales.numel() == size.numel() else size / most
    own = own.unsqueeze(-1)
    z = torch.where(own == 0, 0.0, exact / own)
    doubt = torch.where(own == 0, 0.0, off / own) + 2.0**-22 * z.abs()
    z = z.clamp(-most, most)
    near = z.round() if is_int8 else numerics.e4m3_near(z)
    bound = (near - z).abs() + 2 * doubt

    def of_columns(x: Tensor) -> Tensor:
        rows = exact.shape[0]
        return x.reshape(rows, exact.shape[1] * exact.shape[2])[:, : shape[-1]].reshape(shape)

    found.append(Expected("q", dtype, of_columns(z), of_columns(bound), decode=torch.Tensor.double if is_int8 else torch.Tensor.float))
    return found


def hadamard(x: Tensor, block: int, transpose: bool) -> Bounded:
    """float64, with matrices of order 12, 20 and 28 from the definition of Paley's, a block being [outer, 2^bits]."""
    outer = next((order for order in (12, 20, 28) if block % order == 0 and (block // order).bit_count() == 1), 1)
    inner = block // outer
    y = x.double().reshape(-1, outer, inner)
    magnitude = y.abs().sum((1, 2), keepdim=True).expand_as(y)
    step = 1
    while step < inner:
        pairs = y.reshape(-1, outer, inner // (2 * step), 2, step)
        y = torch.cat([pairs[..., :1, :] + pairs[..., 1:, :], pairs[..., :1, :] - pairs[..., 1:, :]], -2).reshape(-1, outer, inner)
        step *= 2
    if outer > 1:
        matrix = paley(outer).to(y.device)
        y = torch.einsum("kj,bji->bki", matrix.T if transpose else matrix, y)
    levels = math.log2(inner) + outer + 2
    return Bounded((y / math.sqrt(block)).reshape(x.shape), (magnitude * levels * 2.0**-24 / math.sqrt(block)).reshape(x.shape))


def paley(order: int) -> Tensor:
    prime = {12: 11, 20: 19, 28: 13}[order]

    def character(i: int) -> int:
        power = pow(i % prime, (prime - 1) // 2, prime)  # Euler's criterion
        return -1 if power == prime - 1 else power

    def core(j: int, k: int) -> int:
        if j and k:
            return character(j - k)
        return 0 if j == k else 1 if k == 0 or order == 28 else -1

    rows = [[core(j, k) for k in range(prime + 1)] for j in range(prime + 1)]
    c, one = torch.tensor(rows, dtype=torch.float64), torch.eye(prime + 1, dtype=torch.float64)
    return c + one if order != 28 else torch.cat([torch.cat([c + one, c - one], 1), torch.cat([c - one, -c - one], 1)])
