"""Reductions of numbers that are in registers: of a thread, over the lanes of a warp, over the warps of a CTA and the CTAs of a cluster.

Every thread that takes part gets the result. The order of the operations follows from the numbers of threads alone.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from ..graph import F32
from .numbers import combine, identity


def tree(op: str, values: list[Any], dtype: str) -> Any:
    """Neighbours first: short chains of additions. There are 2^n values."""
    while len(values) > 1:
        values = [combine(op, values[j], values[j + 1], dtype) for j in range(0, len(values), 2)]
    return values[0]


def across_lanes(kinds: list[tuple[str, str]], partials: list[Any], width: int) -> list[Any]:
    """Every one of ``width`` neighbouring lanes gets the results; ``kinds`` are reductions' operations and types."""
    results = list(partials)
    for k, (op, dtype) in enumerate(kinds):
        distance = width // 2
        while distance:
            results[k] = combine(op, results[k], cute.arch.shuffle_sync_bfly(results[k], offset=distance), dtype)
            distance //= 2
    return results


def across_warps(
    kinds: list[tuple[str, str]], partials: list[Any], shared: Any, slot: Any, thread: Any, rank: Any, warps: int, cluster: int
) -> list[Any]:
    """Every thread gets the results of all warps of all CTAs of the cluster, through ``shared``, from slot number ``slot`` on: a slot has a
    word for each warp."""
    count = warps * cluster
    warp, lane = thread // 32, thread % 32
    for k, total in enumerate(partials):
        publish(shared, (slot + k) * count + rank * warps + warp, total, lane, cluster)
    if cluster > 1:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    results = []
    for k, (op, dtype) in enumerate(kinds):
        total = None
        for first in range(0, count, 32):
            whole = first + 32 <= count
            place = lane + first if whole else cutlass.min(lane + first, count - 1)
            value = read(shared, (slot + k) * count + place, dtype)
            if not whole:
                value = cutlass.select_(lane + first < count, value, identity(op, dtype))
            total = value if total is None else combine(op, total, value, dtype)
        results.append(total)
    return across_lanes(kinds, results, 32)


@cute.jit
def publish(shared: cute.Pointer, place: Int32, total: Any, lane: Int32, cluster: cutlass.Constexpr):
    """A warp's partial, by one lane for each CTA of the cluster."""
    if lane < cluster:
        bits = total.bitcast(Int32) if cutlass.const_expr(total.dtype is not Int32) else total
        if cutlass.const_expr(cluster > 1):
            cute.arch.inline_ptx(
                "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; st.shared::cluster.b32 [there], {$r2}; }",
                read_only_args=[(shared + place).toint(), lane, bits],
            )
        else:
            cute.make_tensor(shared + place, cute.make_layout(1))[0] = bits


def read(shared: cute.Pointer, place: Any, dtype: str) -> Any:
    bits = cute.make_tensor(shared + place, cute.make_layout(1))[0]
    return bits.bitcast(cutlass.Float32) if dtype == F32 else bits
