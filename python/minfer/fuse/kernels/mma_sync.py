"""ldmatrix and mma.sync of 16-bit numbers, of the kernels for architectures without WGMMA."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute


def load_matrices(address: Any, transposed: bool) -> list[Any]:
    """Four 8 x 8 matrices out of shared memory; lane l has the address of row l % 8 of matrix l / 8."""
    turned = ".trans" if transposed else ""
    return list(
        cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def multiply(element: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """The thread's four sums c + a.b of 16 x 8, over 16 of k; ``element``: "bf16" or "f16"."""
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )
