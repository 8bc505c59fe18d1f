"""minfer.fuse.attention beside flex_attention and minfer.attention: `python -m bench.suites fuse --suite attention`.

Functions of scores without a mask, and masks without one, with head_dim 64 and 128 over 1024 to 32768 keys. flex_attention is compiled by
torch.compile for each cell, with the same functions and the same block mask. "ours:plain" is minfer.attention with as many flops: with the
same mask where it has it, else its time without one times the part of the tiles of 128 x 128 that the mask leaves; "ours:softcap" is the
same with its own soft cap. Values of some queries are checked against float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import minfer
import torch
from minfer import fuse
from minfer.fuse import attention_function
from minfer.measure.benchmarking import result_row
from torch.nn.attention import flex_attention as flex

from bench import harness
from bench.suites.fused import DTYPES, FusedResults
from bench.suites.fused_call import deviation
from bench.suites.moe import MATRIX_RATE

PEERS = ("flex_attention", "ours:plain", "ours:softcap")
HEADS, TOKENS = 16, 16384
LENGTHS = (1024, 4096, 16384, 32768)
WINDOW, PREFIX, CAP, DOCUMENTS = 1024, 777, 20.0, 12
DEVICE = "cuda"
ROWS = 96  # queries that are checked


def functions(length: int) -> dict[str, tuple[Any, Any, bool]]:
    """A function of scores, a mask, and whether the mask comes with a block mask."""
    slopes = torch.exp2(-8.0 * (torch.arange(HEADS, device=DEVICE) + 1) / HEADS)
    table = torch.randn(2 * length, device=DEVICE)
    generator = torch.Generator().manual_seed(length)
    ends = torch.randint(0, length, (DOCUMENTS - 1,), generator=generator).sort().values
    document = torch.bucketize(torch.arange(length), ends, right=True).to(torch.int32).to(DEVICE)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + length]

    def soft_cap(score, b, h, q_idx, kv_idx):
        return CAP * torch.tanh(score / CAP)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)

    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < PREFIX) | (q_idx >= kv_idx)

    def documents(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    return {
        "alibi": (alibi, None, False), "relative": (relative, None, False), "soft_cap": (soft_cap, None, False),
        "causal": (None, causal, False), "alibi, causal": (alibi, causal, False), "window": (None, window, False),
        "prefix_lm": (None, prefix_lm, False), "documents": (None, documents, True),
    }  # fmt: skip


def cells(only: str) -> list[dict[str, Any]]:
    found = []
    for length in LENGTHS:
        for dim in (128, 64):
            for what in ("alibi", "relative", "soft_cap", "causal", "alibi, causal", "window", "prefix_lm", "documents"):
                if only in what and (length in (4096, 16384) or what in ("alibi", "causal", "documents")):
                    found.append(dict(suite="attention", what=what, m=length, width=dim, dtype="bf16"))
    return sorted(found, key=lambda cell: cell["m"] not in (4096, 16384))


def _plain(what: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    options = {"causal": "causal" in what or what == "window"}
    if what == "window":
        options["window_left"] = WINDOW
    return lambda: minfer.attention(q, k, v, **options)


def measure(cell: dict[str, Any], args: argparse.Namespace, results: FusedResults, peers: list[str], budget: harness.Budget) -> str:
    torch.compiler.reset()
    what, length, dim = cell["what"], cell["m"], cell["width"]
    score_mod, mask_mod, listed = functions(length)[what]
    batch = max(TOKENS // length, 1)
    rows = [torch.randn(batch, length, HEADS, dim, device=DEVICE).to(DTYPES[cell["dtype"]]) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in rows)
    mask = None if mask_mod is None else flex.create_block_mask(mask_mod, None, None, length, length, device=DEVICE)
    given = (score_mod, None, mask) if listed else (score_mod, mask_mod, None)
    part = 1.0
    if mask is not None:
        part = float((mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) / math.ceil(length / 128) ** 2)

    def ours(i: int) -> Any:
        return fuse.attention(q, k, v, *given)

    queries = torch.randint(0, length, (ROWS,), device=DEVICE).sort().values
    error = deviation(ours(0)[:1, :1, queries], _some(q, k, v, score_mod, mask_mod, queries))
    if not error <= 0.02:
        raise ArithmeticError(f"relative error {error:.3g}")
    contestants: dict[str, Callable[[int], Any]] = {"minfer": ours}
    scaled = 1.0
    if "ours:plain" in peers:
        plain = _plain(what, *rows)
        contestants["ours:plain"] = lambda i: plain()
        scaled = part if what in ("prefix_lm", "documents") else 1.0
    if "ours:softcap" in peers and what == "soft_cap":
        contestants["ours:softcap"] = lambda i: minfer.attention(*rows, softcap=CAP)
    if "flex_attention" in peers and not budget.spent("flex_attention"):
        begin = time.monotonic()
        compiled = torch.compile(flex.flex_attention, dynamic=False)
        compiled(q, k, v, score_mod, mask)
        torch.cuda.synchronize()
        budget.charge("flex_attention", time.monotonic() - begin)
        contestants["flex_attention"] = lambda i: compiled(q, k, v, score_mod, mask)
    timings, failed = harness.measure(contestants, 1, rounds=args.rounds, graph_us=args.graph_us)
    if "minfer" not in timings:
        raise RuntimeError(failed["minfer"])
    own = timings["minfer"]
    flops = 4.0 * batch * HEADS * length * length * dim * part
    line = [f"minfer {own.us:.1f} ({flops / own.us * 1e-6:.0f} TFLOP/s)"]
    for name, timing in timings.items():
        if name != "minfer":
            us = timing.us * (scaled if name == "ours:plain" else 1.0)
            line.append(f"{name} {us:.1f} ({us / own.us:.2f}x)")
            results.add(
                result_row(
                    suite="attention", op=what.split(",")[0], kernel="fuse_attention", dtype=cell["dtype"], timing=own,
                    shape=dict(what=what, m=length, width=dim, batch=batch, heads=HEADS), peer=name, peer_us=us,
                    floor_us=flops / MATRIX_RATE, rel_err=error,
                )
            )  # fmt: skip
    line += [f"{name} failed: {why[:80]}" for name, why in failed.items()]
    return f"attention {what} {length} d{dim}, us: {', '.join(line)}"


def _some(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, queries: Any) -> torch.Tensor:
    """Of the first batch and head, some queries in float64."""
    call = attention_function.traced(score_mod, mask_mod)
    scores = q[0, 0, queries].double() @ k[0, 0].double().T * q.shape[-1] ** -0.5
    one = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    positions = {"q": queries.view(-1, 1), "kv": torch.arange(k.shape[2], device=DEVICE).view(1, -1), "b": one, "h": one, "score": scores}
    found = attention_function._modified(call.traced, call.captured, positions, k.shape[2], torch.float64)
    scores = found[0].double().expand_as(scores) if score_mod is not None else scores
    if mask_mod is not None:
        scores = torch.where(found[-1].expand_as(scores), scores, -math.inf)
    return (torch.softmax(scores, -1) @ v[0, 0].double())[None, None]


def precompile() -> None:
    """All kernels at once, by all cores."""
    from minfer.fuse import compiler

    kernels, arch = [], attention_function.architecture(torch.cuda.current_device())
    for length in LENGTHS:
        for score_mod, mask_mod, listed in functions(length).values():
            for dim in (64, 128):
                function = fuse.AttentionFunction(score_mod, mask_mod)
                size = [128, 128] if listed else []
                sizes = attention_function._Sizes(max(TOKENS // length, 1), HEADS, HEADS, length, length, dim, dim, False)
                config, _ = attention_function.configure(function.traced(), sizes, "bf16", 0, size, 132, arch)
                kernels.append(attention_function.kernel_of(function.traced(), config, arch))
    compiler.compile_all(kernels)
