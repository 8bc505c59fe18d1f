"""The parameters of a launch as words: a plan makes them once, each call fills in the numbers that are handed over by value."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor

from . import dtypes
from .launch import ADDRESS, INT32, INT64, TENSOR_MAP


class Parameters:
    """In the order in which a kernel has them."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.numbers: list[tuple[int, int]] = []  # word, argument

    def address(self, tensor: int) -> None:
        """Of a tensor of the launch, by its number."""
        self.words += [ADDRESS, tensor]

    def tensor_map(self, words: Sequence[int]) -> None:
        """A TMA descriptor: the tensor's number, its rank, extents, strides, the box and the swizzle."""
        self.words += [TENSOR_MAP, *words]

    def size(self, number: int) -> None:
        self.words += [INT32, number]

    def stride(self, number: int) -> None:
        self.words += [INT64, number]

    def number(self, storage: str, argument: int) -> None:
        """That a 0-dim argument of the call holds."""
        self.words += [INT64 if storage == "i64" else INT32, 0]
        self.numbers.append((len(self.words) - 1, argument))

    def filled(self, arguments: Sequence[Tensor | None]) -> list[int]:
        """For a call."""
        if not self.numbers:
            return self.words
        words = list(self.words)
        for word, argument in self.numbers:
            x = arguments[argument]
            assert x is not None
            words[word] = _bits_of(x)
        return words


def _bits_of(x: Tensor) -> int:
    value = x.item()
    if dtypes.register_of(x.dtype) != "f32":
        return int(value)
    return struct.unpack("<i", struct.pack("<f", value))[0]
