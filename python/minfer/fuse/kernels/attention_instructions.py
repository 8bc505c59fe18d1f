"""Single instructions of the attention kernels, and ways to tell the compiler when to compute a number."""

from __future__ import annotations

import struct
from typing import Any

from cutlass import Float32, Int32, cute

from .numbers import approximate


def exp2(x: Any) -> Float32:
    return approximate("ex2.approx.ftz", x)


def opaque(x: Any) -> Int32:
    """The same number, which the compiler takes for another."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def held(x: Any) -> Int32:
    """The same number, of the whole warp, which the compiler keeps instead of computing it anew in each step of a loop."""
    return cute.arch.make_warp_uniform(opaque(x))


def packed(values: list[Any], element: Any) -> Int32:
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = values
    narrow = cute.make_rmem_tensor(2, element)
    narrow.store(pair.load().to(element))
    return cute.recast_tensor(narrow, Int32)[0]


def packed_here(values: list[Any], element: str) -> Int32:
    """Two numbers rounded, next to the instructions that compute them: the compiler would move conversions behind the branch that follows,
    where no other instruction hides them."""
    kind = "bf16x2" if element == "bf16" else "f16x2"
    return cute.arch.inline_ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=values[::-1])


def again(steps: list[tuple[Any, Any]] | None) -> list[tuple[Any, Any]] | None:
    """The same numbers, which the compiler takes for others: it would keep what follows from them until it is needed once more."""
    if steps is None:
        return None
    found = [tuple(cute.arch.shuffle_sync_bfly(x, offset=0) for x in row) for row in steps[: 1 if steps[0] is steps[1] else 2]]
    return [found[0], found[-1]]


def multiply_add_here(x: Any, number: int, y: Any) -> Float32:
    """x * number + y, in a loop where it does not change but would take a register for each number."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    code = f"fma.rn.f32 {{$w0}}, {{$r0}}, 0f{bits:08X}, {{$r1}};"
    return cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[x, y])
