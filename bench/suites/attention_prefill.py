"""Attention of whole prompts: `prefill` against cuDNN, FlashAttention-3 and -4; `variants`, what lengths, masks, caps and sinks cost."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import minfer
import torch
from minfer.measure.benchmarking import result_row

from bench import harness
from bench.suites.attention_common import (
    DTYPES,
    PEER_ERROR,
    checked_error,
    planned_kernel,
    seen_by,
)
from bench.suites.moe import MATRIX_RATE, READ_RATE, relative_error

HEADS = {64: ((32, 32), (32, 8)), 128: ((32, 32), (32, 8)), 256: ((16, 16),)}
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384  # of all sequences together, or one sequence that is longer
PEERS = {"prefill": ("cudnn", "fa3", "fa4"), "variants": ("fa3",)}
# Tokens of each variant's cells; head_dim 128.
VARIANTS = {"varlen": (TOKENS, 4 * TOKENS), "window": (TOKENS,), "softcap": (TOKENS,), "sinks": (TOKENS,)}
SEQUENCES = 64  # of varlen
READY_SECONDS = {"fa4": 200.0}  # that compile when they are first called: over the whole run


def cells(suite: str, dtypes: list[str], head_dims: list[int], seqlens: list[int]) -> list[dict[str, Any]]:
    """``m``: queries of a sequence; of variants, of all sequences."""
    found = []
    for dtype in dtypes:
        for head_dim in head_dims:
            for heads_q, heads_kv in HEADS[head_dim]:
                shape = dict(dtype=dtype, head_dim=head_dim, heads_q=heads_q, heads_kv=heads_kv)
                if suite == "prefill":
                    found += [dict(suite=suite, model=mask, m=m, **shape) for m in seqlens for mask in ("causal", "full")]
                elif head_dim == 128:
                    found += [dict(suite=suite, model=variant, m=m, **shape) for variant, tokens in VARIANTS.items() for m in tokens]
    return found


def lognormal_lengths(count: int, total: int) -> list[int]:
    """Lengths of ``count`` sequences, lognormal with a deviation of 1, that add up to ``total``."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.exp(torch.randn(count, generator=generator))
    lengths = (weights / weights.sum() * total).long().clamp(min=1)
    lengths[lengths.argmax()] += total - int(lengths.sum())
    return lengths.tolist()


def options_of(cell: dict[str, Any]) -> dict[str, Any]:
    """What the call has beside its operands; sinks are drawn."""
    if cell["model"] == "full":
        return dict(causal=False)
    own: dict[str, Any] = {"window": dict(window_left=4096), "softcap": dict(softcap=30.0)}.get(cell["model"], {})
    if cell["model"] == "sinks":
        own = dict(sinks=torch.randn(cell["heads_q"], device="cuda").to(DTYPES[cell["dtype"]]))
    return dict(causal=True) | own


class Prompts:
    """Sets of q, k and v [tokens, heads, head_dim] of sequences that lie end to end."""

    def __init__(self, cell: dict[str, Any], lengths: list[int], sets: int | None = None):
        self.lengths, self.tokens = lengths, sum(lengths)
        self.heads, self.head_dim, dtype = (cell["heads_q"], cell["heads_kv"]), cell["head_dim"], DTYPES[cell["dtype"]]
        self.bytes = 2 * self.tokens * 2 * sum(self.heads) * self.head_dim  # with the outputs
        self.count = harness.sets_for(self.bytes) if sets is None else sets
        heads_q, heads_kv = self.heads
        self.q, self.k, self.v = (
            [torch.randn(self.tokens, heads, self.head_dim, device="cuda").to(dtype) for _ in range(self.count)]
            for heads in (heads_q, heads_kv, heads_kv)
        )
        self.ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)

    def set(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        i %= self.count
        return self.q[i], self.k[i], self.v[i]

    def batched(self, i: int) -> list[torch.Tensor]:
        """[batch, seqlen, heads, head_dim]; of equal lengths."""
        return [x.view(len(self.lengths), -1, *x.shape[1:]) for x in self.set(i)]

    def ours(self, i: int, ragged: bool, options: dict[str, Any]) -> torch.Tensor:
        """[tokens, heads, head_dim]"""
        if not ragged:
            return minfer.attention(*self.batched(i), **options)[0].flatten(0, 1)
        longest = max(self.lengths)
        return minfer.attention_varlen(*self.set(i), self.ends, self.ends, longest, longest, **options)[0]

    def seen(self, options: dict[str, Any]) -> float:
        return seen_by(self.lengths, options["causal"], options.get("window_left", -1))


def cudnn(prompts: Prompts, i: int, options: dict[str, Any]) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in prompts.batched(i))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=options["causal"], enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def fa3(prompts: Prompts, i: int, options: dict[str, Any]) -> torch.Tensor:
    """The operator itself: peer_ops' entry has no window, cap or sinks, and makes the sequences' ends in every call."""
    import peer_ops

    peer_ops.load("_vllm_fa3_C")
    sinks, longest = options.get("sinks"), max(prompts.lengths)
    window = options.get("window_left", -1), 0 if "window_left" in options else -1
    sinks = None if sinks is None else sinks.to(torch.bfloat16)  # all that it takes
    return torch.ops._vllm_fa3_C.fwd(
        *prompts.set(i), None, None, None, None, prompts.ends, prompts.ends, None, None, None, longest, longest, None, None, None,
        None, None, None, None, None, None, prompts.head_dim**-0.5, options["causal"], *window, options.get("softcap", 0.0), True,
        None, 1, None, 0, sinks, 1, 0, None,
    )[0]  # fmt: skip


def fa4(prompts: Prompts, i: int, options: dict[str, Any]) -> torch.Tensor:
    import peer_ops

    return peer_ops.fa4(*prompts.batched(i), options["causal"])


FUNCTIONS: dict[str, Callable[[Prompts, int, dict[str, Any]], torch.Tensor]] = {"cudnn": cudnn, "fa3": fa3, "fa4": fa4}
_budget = harness.Budget(READY_SECONDS)


def ready(name: str, prompts: Prompts, options: dict[str, Any], out: torch.Tensor) -> Callable[[int], Any] | str:
    """The peer as a function of a set, once its values are ours; or why it is left out."""
    if _budget.spent(name):
        return f"its {READY_SECONDS[name]:.0f} s of getting ready are spent"
    begin = time.monotonic()
    try:
        error = relative_error(FUNCTIONS[name](prompts, 0, options).reshape(out.shape), out)
    except Exception as error:  # noqa: BLE001  a peer's library may raise anything
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {error}"
    finally:
        _budget.charge(name, time.monotonic() - begin)
    if not error <= PEER_ERROR:
        return f"it differs from ours by {error:.3g}"
    return lambda i: FUNCTIONS[name](prompts, i, options)


def own_forms(cell: dict[str, Any], prompts: Prompts, options: dict[str, Any]) -> dict[str, tuple[Callable[[int], Any], float]]:
    """What a variant's cost shows against: ours of another kind, and the pairs of a query and a key that it sees."""
    plain = Prompts(cell, [TOKENS], 1)
    causal = dict(causal=True)
    found = {"ours:causal": (lambda i: plain.ours(i, False, causal), plain.seen(causal))}
    if cell["model"] == "varlen":
        even = Prompts(cell, [prompts.tokens // SEQUENCES] * SEQUENCES)
        found["ours:even"] = (lambda i: even.ours(i, True, causal), even.seen(causal))
    return found


def measure(cell: dict[str, Any], args: argparse.Namespace, results, peers: list[str]) -> str:
    head_dim, heads_q, heads_kv = cell["head_dim"], cell["heads_q"], cell["heads_kv"]
    options, ragged = options_of(cell), cell["model"] == "varlen"
    if ragged:
        lengths = lognormal_lengths(SEQUENCES, cell["m"])
    else:
        lengths = [cell["m"]] * max(1, TOKENS // cell["m"])
    prompts = Prompts(cell, lengths)
    out, length = prompts.ours(0, ragged, options), max(lengths)
    begin = int(prompts.ends[lengths.index(length)])
    rows = torch.linspace(0, length - 1, min(64, length), device="cuda").round().long()
    own = (x[begin : begin + length] for x in prompts.set(0))
    error = checked_error(out[begin + rows], *own, rows, options)

    fns: dict[str, Callable[[int], Any]] = {"ours": lambda i: prompts.ours(i, ragged, options)}
    pairs, seen, failed = prompts.seen(options), {}, {}
    for name in peers:
        fn = ready(name, prompts, options, out)
        (failed if isinstance(fn, str) else fns)[name] = fn
    if cell["suite"] == "variants":
        forms = own_forms(cell, prompts, options)
        fns |= {name: fn for name, (fn, _) in forms.items()}
        seen = {name: count for name, (_, count) in forms.items()}
    timings, not_captured = harness.measure(fns, prompts.count, rounds=args.rounds, graph_us=args.graph_us)
    failed |= not_captured
    if "ours" not in timings:
        raise RuntimeError(failed["ours"])
    flops = 4.0 * pairs * heads_q * head_dim
    floor = max(flops / MATRIX_RATE, prompts.bytes / READ_RATE)
    kernel = planned_kernel([len(lengths), length, length, heads_q, heads_kv, head_dim, head_dim], cell["dtype"], options, ragged)
    line, mine = [], timings.pop("ours")
    shape = dict(batch=len(lengths), causal=options["causal"])
    shape |= {name: cell[name] for name in ("model", "m", "heads_q", "heads_kv", "head_dim")}
    for name, timing in timings.items():
        peer_us = timing.us * (pairs / seen[name] if name in seen else 1.0)  # of as many flops
        results.add(
            result_row(
                suite=cell["suite"], op="attention", kernel=kernel, shape=shape, dtype=cell["dtype"], timing=mine, peer=name,
                peer_us=peer_us, floor_us=floor, rel_err=error,
            )
        )  # fmt: skip
        line.append(f"{name} {peer_us:.0f} ({peer_us / mine.us:.2f}x)")
    line += [f"{name} failed: {why[:60]}" for name, why in failed.items()]
    head = f"{cell['suite']} {cell['dtype']} d{head_dim} {heads_q}/{heads_kv} {cell['model']} {cell['m']}"
    return f"{head}: {mine.us:.0f} us, {flops / mine.us / 1e6:.0f} TFLOP/s; {', '.join(line)}  [{kernel.split('_', 3)[3]}]"
