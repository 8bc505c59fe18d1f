"""When a result is right: the error model that all families share.

The truth is float64 of the mathematical result, without any rounding in between. A result has two rules to pass.

1. Every element: |result - truth| <= bound. A family's bound is the sum of what its documentation admits: one rounding of the result to its
   dtype, that of the float32 accumulation (:func:`accumulation`), and of each documented rounding in between what reaches the element.
   Roundings of many terms are independent, so that their sum hardly exceeds :data:`SIGMAS` roundings of the root of the sum of squares; the
   bound takes that or the sum of magnitudes, whichever is less (:func:`of_roundings`).
2. Over all: ||result - truth|| <= 2 ||torch - truth|| + one rounding of ||truth||, torch being the same computation by plain PyTorch in
   the same dtype on the same device. By luck torch may be nearly exact where a result has few elements; its error therefore counts for at
   least what the documented roundings amount to on average (``usual``).

Rule 1 sees one wrong element among millions, rule 2 an error that is in every element and small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A rounding's relative error is at most u, and uniform within that: 0.58 u is its standard deviation. 8 u is some 14 of these.
SIGMAS = 8.0


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """What a rounding among subnormal numbers may be off by, and a flush of float32's to zero."""
    info = torch.finfo(dtype)
    return max(info.smallest_normal * info.eps, 2.0**-126)


def accumulation(terms: int) -> float:
    """Error of a float32 sum of products, in units of the sum of their magnitudes.

    Tensor cores add 16 products at a time and cut the result off at float32's last bit, up to 2^-23 of the partial sum each time, all in
    one direction; partial sums of random terms are about 1 / sqrt(terms) of the magnitudes' sum. That is 2^-23 sqrt(terms) / 16; four times
    that and a few roundings of the epilogue are allowed.
    """
    return 2.0**-23 * (4.0 + math.sqrt(max(terms, 1)) / 4.0)


def of_roundings(rounding: float, magnitudes: Tensor, squares: Tensor) -> Tensor:
    """What roundings of terms amount to in their sum; ``magnitudes``: the terms' sum, ``squares``: that of their squares."""
    return rounding * torch.minimum(magnitudes, SIGMAS * squares.clamp(min=0).sqrt())


@dataclass
class Expected:
    """What one result must be.

    truth: float64, or integers, which must be equal. bound: float64 of the truth's shape, None of exact ones. peer: torch's result (any
    floating dtype) or None. usual: ||what the documented roundings amount to on average||. defined: where values are compared; None:
    everywhere. decode: what stored codes stand for, which is then what is compared.
    """

    name: str
    dtype: torch.dtype
    truth: Tensor
    bound: Tensor | None = None
    peer: Tensor | None = None
    usual: float = 0.0
    defined: Tensor | None = None
    contiguous: bool = True
    decode: Callable[[Tensor], Tensor] | None = None


def mismatch(have: Tensor, want: Expected, *, strided: bool = False) -> str | None:
    """Why a result is wrong, or None. ``strided``: the result is a caller's ``out=``."""
    what = want.name
    raw = have
    have = have if want.decode is None else want.decode(have)
    if raw.dtype != want.dtype or have.shape != want.truth.shape:
        return f"{what} is {name_of(raw.dtype)} {list(have.shape)}, must be {name_of(want.dtype)} {list(want.truth.shape)}"
    if want.contiguous and not strided and not raw.is_contiguous():
        return f"{what} must be contiguous, has strides {raw.stride()} for {list(raw.shape)}"
    if have.numel() == 0:
        return None
    if want.bound is None:
        return _unequal(have, want)
    truth, value = want.truth, have.double()
    # Equal infinities and NaN where NaN is due have no error; any other NaN or infinity is one of infinity.
    same = (value == truth) | (value.isnan() & truth.isnan())
    if have.dtype.is_floating_point:  # numbers beyond the dtype's largest are infinite; beside it they may be
        largest = torch.finfo(have.dtype).max * (1 + unit(have.dtype) / 2)
        same |= value.isinf() & (value.sign() == truth.sign()) & (truth.abs() + want.bound >= largest)
    error = torch.where(same, 0.0, (value - truth).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    bound = want.bound
    if want.defined is not None:
        error = torch.where(want.defined, error, 0.0)
    wrong = ~(error <= bound)
    numbers = torch.stack([wrong.any().double(), torch.linalg.vector_norm(error), *_norms(want, error)]).tolist()
    any_wrong, total, of_truth, of_peer, size = numbers
    if any_wrong:
        return _worst(what, value, truth, error, bound, wrong)
    if want.peer is not None:
        allowed = 2 * max(of_peer, want.usual) + unit(want.dtype) * of_truth + smallest(want.dtype) * math.sqrt(size)
        if not total <= allowed:
            return (
                f"{what}: error {total:.4g} over all, allowed {allowed:.4g} (torch's is {of_peer:.4g}, the usual {want.usual:.4g}, "
                f"the truth {of_truth:.4g}); {_worst(what, value, truth, error, bound, None)}"
            )
    return None


def _norms(want: Expected, error: Tensor) -> list[Tensor]:
    finite = want.truth.abs() <= torch.finfo(want.dtype).max if want.dtype.is_floating_point else want.truth.isfinite()
    if want.defined is not None:
        finite = finite & want.defined
    truth = torch.where(finite, want.truth, 0.0)
    zero = truth.new_zeros(())
    off = zero if want.peer is None else torch.linalg.vector_norm(torch.where(finite, want.peer.double() - truth, 0.0).nan_to_num(0.0))
    return [torch.linalg.vector_norm(truth), off, finite.sum().double()]


def _unequal(have: Tensor, want: Expected) -> str | None:
    wrong = _bits(have) != _bits(want.truth.to(want.dtype))
    if want.defined is not None:
        wrong &= want.defined
    if not bool(wrong.any()):
        return None
    at = wrong.nonzero()
    first = tuple(at[0].tolist())
    return (
        f"{want.name}: {len(at)} of {wrong.numel()} elements differ, first at {list(first)}: {have[first].item()} instead of "
        f"{want.truth[first].item()}, last at {at[-1].tolist()}"
    )


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.dtype.itemsize]) if x.dtype.is_floating_point else x


def _worst(what: str, value: Tensor, truth: Tensor, error: Tensor, bound: Tensor, wrong: Tensor | None) -> str:
    excess = (error / bound.clamp(min=1e-300)).nan_to_num(nan=math.inf)
    at = int(excess.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), error.shape)]
    number = lambda x: f"{x.flatten()[at].item():.6g}"  # noqa: E731
    text = (
        f"at {place} {number(value)}, must be {number(truth)} within {number(bound)}, is off by {number(error)} ({number(excess)} bounds)"
    )
    if wrong is None:
        return f"most off {text}"
    found = wrong.nonzero()
    return f"{what}: {len(found)} of {wrong.numel()} elements off, first at {found[0].tolist()}, last at {found[-1].tolist()}, worst {text}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
