"""Append: kv_cache_append of one token of each sequence, in every format, in the steady state of decode: many calls in a graph, each into a
cache of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import minfer
import torch
from minfer.formats.kv_cache import KV_FORMATS
from minfer.measure.benchmarking import result_row
from minfer.reference import kv_cache as reference_kv_cache

from bench import harness
from bench.suites.attention_common import DTYPES
from bench.suites.moe import READ_RATE, relative_error

PEERS = ("torch_compile",)
BATCH, HEADS, HEAD_DIM, PAGE = 64, 8, 128, 64
POSITIONS = range(PAGE)  # of the token in its page, one in each cache: one of so many completes a group of int4, as in decode


def cells(dtypes: list[str]) -> list[dict[str, Any]]:
    """``m``: tokens of a call."""
    shape = dict(m=BATCH, batch=BATCH, head_dim=HEAD_DIM, heads_q=HEADS, heads_kv=HEADS)
    return [dict(suite="append", model=f"batch {BATCH}", dtype=dtype, **shape) for dtype in ("bf16", "f16") if dtype in dtypes]


class Appends:
    """Caches of one format with a page for each sequence, tokens for each and their slots."""

    def __init__(self, kv_format: str, dtype: torch.dtype, positions: Sequence[int] = POSITIONS, device: str = "cuda"):
        allocate, sets = dict(kv_format=kv_format, dtype=dtype, device=device, batch=BATCH), len(positions)
        self.positions = positions
        self.caches = [minfer.allocate_kv_cache(BATCH, PAGE, HEADS, HEAD_DIM, **allocate) for _ in range(sets)]
        for cache in self.caches:
            for residual in (cache.k_residual, cache.v_residual):
                if residual is not None:
                    residual.normal_()
        self.k, self.v = (list(torch.randn(sets, BATCH, HEADS, HEAD_DIM, device=device).to(dtype)) for _ in range(2))
        pages = torch.arange(BATCH, device=device) * PAGE
        self.slots = [pages + position for position in positions]

    def run(self, i: int) -> None:
        cache = self.caches[i]
        minfer.kv_cache_append(self.k[i], self.v[i], cache.k, cache.v, self.slots[i], **cache.scales())

    def error(self) -> float:
        """Of what the first cache and the last, where groups of int4 become whole, hold after a call, against the definition."""
        worst = 0.0
        for i in (0, len(self.caches) - 1):
            # On the CPU: torch's CUDA kernels multiply by the reciprocal of 127, and a code may round to another's neighbour.
            want = type(self.caches[i])(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in self.caches[i]))
            if want.k is self.caches[i].k:  # the caches are on the CPU
                want = type(want)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in want))
            reference_kv_cache.append(self.k[i].cpu(), self.v[i].cpu(), want, self.slots[i].cpu())
            self.run(i)
            length = self.positions[i] + 1
            for b in (0, BATCH - 1):
                have = reference_kv_cache.gather(self.caches[i], b, 0, length, None, torch.float64)
                for x, y in zip(have, reference_kv_cache.gather(want, b, 0, length, None, torch.float64), strict=True):
                    worst = max(worst, relative_error(x.cpu(), y))
        return worst

    def bytes(self) -> float:
        """That a call must move: tokens, and what they become; int4's groups are read and written once in PAGE calls."""
        cache, tokens = self.caches[0], 2 * BATCH * HEADS * HEAD_DIM
        codes = sum(x.numel() * x.element_size() for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None and x.dim() > 1)
        residual = 2 * 2 * tokens if cache.k_residual is not None else 0
        return 2 * tokens + codes / PAGE + residual


def compiled_put(appends: Appends) -> Callable[[int], Any]:
    """The same in 16 bits as torch.compile makes it of two indexed assignments.

    Raises:
      ArithmeticError: it stores something else.
    """

    @torch.compile(fullgraph=True)
    def put(k, v, k_cache, v_cache, slots):
        page, row = slots // PAGE, slots % PAGE
        k_cache[page, row] = k
        v_cache[page, row] = v

    def run(i: int) -> None:
        cache = appends.caches[i]
        put(appends.k[i], appends.v[i], cache.k, cache.v, appends.slots[i])

    cache = appends.caches[0]
    appends.run(0)
    want = cache.k.clone(), cache.v.clone()
    cache.k.zero_()
    cache.v.zero_()
    run(0)
    if not (torch.equal(cache.k, want[0]) and torch.equal(cache.v, want[1])):
        raise ArithmeticError("it stores something else")
    return run


def measure(cell: dict[str, Any], args: argparse.Namespace, results, peers: list[str]) -> str:
    """Every format against ours of 16 bits, which the peer is measured against."""
    contestants = {kv_format: Appends(kv_format, DTYPES[cell["dtype"]]) for kv_format in KV_FORMATS}
    errors = {name: appends.error() for name, appends in contestants.items()}
    if not max(errors.values()) <= 1e-6:
        raise ArithmeticError(f"not what the definition stores: {errors}")
    fns: dict[str, Callable[[int], Any]] = {name: appends.run for name, appends in contestants.items()}
    failed = {}
    for peer in peers:
        try:
            fns[peer] = compiled_put(contestants["16bit"])
        except Exception as error:  # noqa: BLE001  a compiler may raise anything
            torch.cuda.synchronize()
            failed[peer] = f"{type(error).__name__}: {error}"
    timings, not_captured = harness.measure(fns, len(POSITIONS), rounds=args.rounds, graph_us=args.graph_us)
    failed |= not_captured
    if "16bit" not in timings:
        raise RuntimeError(failed["16bit"])
    base, line = timings["16bit"], []

    def add(kv_format: str, peer: str, peer_us: float) -> None:
        shape = {name: cell[name] for name in ("m", "batch", "head_dim", "heads_q", "heads_kv")}
        results.add(
            result_row(
                suite="append", op="kv_cache_append", kernel="kv_cache_append", dtype=cell["dtype"], timing=timings[kv_format], peer=peer,
                shape=shape | dict(model=f"{cell['model']}, {kv_format}", format=kv_format, page=PAGE), peer_us=peer_us,
                floor_us=contestants[kv_format].bytes() / READ_RATE, rel_err=errors[kv_format],
            )
        )  # fmt: skip

    for name, timing in timings.items():
        if name in contestants:
            add(name, "ours:16bit", base.us)
        else:
            add("16bit", name, timing.us)
        line.append(f"{name} {timing.us:.2f}")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    return f"append {cell['dtype']} {cell['model']}, {HEADS} heads of {HEAD_DIM}, us: {', '.join(line)}"
