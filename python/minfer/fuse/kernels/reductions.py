"""Reductions of numbers that are in registers: of a thread, over the lanes of a warp, over the warps of a CTA and the CTAs of a cluster.

Every thread that takes part gets the result. The order of the operations follows from the numbers of threads alone.

Warps of one CTA meet at its barrier. Those of a cluster send their partials to every CTA by st.async, and an mbarrier there counts the
bytes: the cluster's own barrier would first wait until all stores of a thread to global memory are done, and empty L1.
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
    kinds: list[tuple[str, str]],
    partials: list[Any],
    shared: Any,
    slot: Any,
    thread: Any,
    rank: Any,
    warps: int,
    cluster: int,
    arrived: Any = None,
    phase: Any = None,
) -> list[Any]:
    """Every thread gets the results of all warps of all CTAs of the cluster, through ``shared``, from slot number ``slot`` on: a slot has a
    word for each warp.

    Args:
      arrived: with a cluster, the mbarrier of this exchange, which ``init_arrivals`` made; ``phase`` is its parity. Others may use a
        barrier and its slots again once a later exchange, which all warps take part in, is over.
    """
    count = warps * cluster
    warp, lane = thread // 32, thread % 32
    if cluster > 1:
        expect(arrived, thread, 4 * count * len(partials))
    for k, total in enumerate(partials):
        publish(shared, (slot + k) * count + rank * warps + warp, total, lane, cluster, arrived)
    if cluster > 1:
        cute.arch.mbarrier_wait(arrived, phase)
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
def init_arrivals(barriers: cute.Pointer, count: cutlass.Constexpr, thread: Int32):
    """mbarriers for exchanges of a cluster, visible to its other CTAs behind its barrier."""
    if thread == 0:
        for number in cutlass.range_constexpr(count):
            cute.arch.mbarrier_init(barriers + number, 1)
    cute.arch.mbarrier_init_fence()


@cute.jit
def expect(arrived: cute.Pointer, thread: Int32, byte_count: cutlass.Constexpr):
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, byte_count)


@cute.jit
def publish(shared: cute.Pointer, place: Int32, total: Any, lane: Int32, cluster: cutlass.Constexpr, arrived: Any):
    """A warp's partial, by one lane for each CTA of the cluster."""
    if lane < cluster:
        bits = total.bitcast(Int32) if cutlass.const_expr(total.dtype is not Int32) else total
        if cutlass.const_expr(cluster > 1):
            cute.arch.inline_ptx(
                "{ .reg .b32 there, barrier; mapa.shared::cluster.u32 there, {$r0}, {$r1}; mapa.shared::cluster.u32 barrier, {$r3}, {$r1}; "
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], {$r2}, [barrier]; }",
                read_only_args=[(shared + place).toint(), lane, bits, arrived.toint()],
            )
        else:
            cute.make_tensor(shared + place, cute.make_layout(1))[0] = bits


def read(shared: cute.Pointer, place: Any, dtype: str) -> Any:
    bits = cute.make_tensor(shared + place, cute.make_layout(1))[0]
    return bits.bitcast(cutlass.Float32) if dtype == F32 else bits
