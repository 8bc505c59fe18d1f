"""The regret of attention's plans on random problems: all kernels that compute one, prefill and over a cache also split-KV."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import minfer
import torch
from minfer._core.registry import device_index
from minfer.measure.random_problems import AttentionProblem
from minfer.planning.plan import DTYPE_NAMES

from bench import harness
from bench.suites import regret_contest
from bench.suites.regret_contest import Choice

NUMBER_BYTES, CODE_BYTES = 6 << 30, 3 << 30  # that all problems' operands are views of


def describe(problem: AttentionProblem) -> dict[str, Any]:
    """op, shape and dtype of a problem's row."""
    names = ("batch", "seqlen_k", "heads_q", "heads_kv", "head_dim", "causal", "window_left", "kv_format", "page_size")
    shape = {"m": problem.seqlen_q} | {name: getattr(problem, name) for name in names}
    return {"op": problem.op, "shape": shape, "dtype": DTYPE_NAMES[problem.dtype]}


def planned(problem: AttentionProblem, kernel: str | None = None) -> Choice:
    """What runs, the plan's choice or an override.

    Raises:
      RuntimeError: the override cannot compute the problem.
    """
    p, device = problem, device_index(None)
    sizes = [p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_kv, p.head_dim, p.head_dim]
    windows = (p.window_left, 0 if p.causal else -1)
    cache = () if p.kv_format is None else (p.kv_format, p.page_size)
    arguments = (sizes, DTYPE_NAMES[p.dtype], *windows, False, kernel, device >= 0, device, *cache)
    found = json.loads(torch.ops.minfer._plan_attention(*arguments))
    launch = f"split_count={found['split_count']}" if found["split_count"] else ""  # which the plan alone chooses
    return Choice(found["kernel"], found["predicted_us"], found["floor_us"], launch)


def choices_of(problem: AttentionProblem) -> tuple[Choice, list[Choice]]:
    """The plan's choice, and all legal ones of its kernel's architecture, but for the batch-invariant mode's kernels, which an override
    launches as the mode does."""
    own = planned(problem)
    kernels = {kernel["name"]: kernel for kernel in minfer.kernels("attention")}
    found = []
    for name, kernel in kernels.items():
        if (kernel["arch"], kernel["operation"]) != (kernels[own.kernel]["arch"], "attention"):
            continue
        try:
            found.append(planned(problem, name))
        except RuntimeError:  # illegal, or not compiled
            continue
    return own, found


class Memory:
    """Random numbers, drawn once, that operands are views of."""

    def __init__(self, device: str = "cuda", share: float = 1.0):
        self.device, self.share = device, share

    @functools.cache  # noqa: B019  as long as the process
    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(int(NUMBER_BYTES * self.share) // 2, dtype=dtype, device=self.device).normal_()

    @functools.cached_property
    def codes(self) -> torch.Tensor:
        """Bytes, of which none is a NaN of fp8_e4m3."""
        found = torch.empty(int(CODE_BYTES * self.share), dtype=torch.uint8, device=self.device).random_(0, 256)
        for part in found.split(1 << 28):
            part.masked_fill_((part & 127) == 127, 0)
        return found


def _cache_of(problem: AttentionProblem, codes: torch.Tensor, residuals: torch.Tensor) -> minfer.KvCache:
    """A cache of codes. ``codes``: bytes of K and of V; ``residuals``: 16-bit numbers of both."""
    p, device = problem, codes.device
    shapes = minfer.allocate_kv_cache(
        p.batch * p.pages, p.page_size, p.heads_kv, p.head_dim, kv_format=p.kv_format, dtype=p.dtype, device="meta", batch=p.batch
    )
    tensors: dict[str, Any] = {}
    for i, name in enumerate(("k", "v")):
        like = getattr(shapes, name)
        part = codes.chunk(2)[i][: like.numel()].view(like.dtype)
        tensors[name] = part.as_strided(like.shape, like.stride())
        if (residual := getattr(shapes, f"{name}_residual")) is not None:
            tensors[f"{name}_residual"] = residuals.chunk(2)[i][: residual.numel()].view(residual.shape)
        scale = torch.empty(getattr(shapes, f"{name}_scale").shape, dtype=getattr(shapes, f"{name}_scale").dtype, device=device)
        if p.kv_format == "fp8_e4m3":
            scale.fill_(1 / 128)  # bytes at random are numbers up to 448
        elif p.kv_format == "int8":
            scale.uniform_(0.5 / 64, 1.5 / 64)
        else:  # values of about 1: scales, and minima behind them
            scales, minima = scale.unbind(3) if name == "k" else scale.chunk(2, 2)
            scales.uniform_(0.06, 0.19)
            minima.uniform_(-1.9, -0.1)
        tensors[f"{name}_scale"] = scale
    return minfer.KvCache(p.kv_format, **tensors)


class Operands:
    """Sets of a problem's operands, enough of them that a launch finds none in the L2s."""

    def __init__(self, problem: AttentionProblem, memory: Memory):
        p = self.problem = problem
        self.count = harness.sets_for(p.query_bytes + p.kv_bytes)
        queries = (p.batch, p.seqlen_q, p.heads_q, p.head_dim)
        rows = (p.batch * p.pages, p.page_size or p.seqlen_k, p.heads_kv, p.head_dim)  # without a cache: batch and keys
        sizes = [math.prod(queries), *(math.prod(rows),) * 2]
        numbers = memory.numbers(p.dtype)
        self.shape = queries
        self.sets: list[tuple[Any, ...]] = []
        self.scales: list[dict[str, Any]] = []
        if p.kv_format in (None, "16bit"):
            for whole in harness.windows(numbers, (sum(sizes),), self.count):
                q, k, v = whole.split(sizes)
                self.sets.append((q.view(queries), k.view(rows), v.view(rows)))
            self.scales = [{"kv_format": "16bit"} if p.kv_format else {}] * self.count
        else:
            residuals = 2 * p.batch * 64 * p.heads_kv * p.head_dim if p.kv_format == "int4" else 0
            whole = harness.windows(numbers, (sizes[0] + residuals,), self.count)
            for own, codes in zip(whole, harness.windows(memory.codes, (p.kv_bytes,), self.count), strict=True):
                cache = _cache_of(p, codes, own[sizes[0] :])
                self.sets.append((own[: sizes[0]].view(queries), cache.k, cache.v))
                self.scales.append(cache.scales())
        self.seq_lens = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32, device=memory.device)
        self.table = None
        if p.page_size:
            self.table = torch.randperm(p.batch * p.pages, device=memory.device).to(torch.int32).view(p.batch, -1)

    def run(self, i: int, kernel: str | None) -> torch.Tensor:
        p = self.problem
        options = {"causal": p.causal, "window_left": p.window_left, "kernel": kernel}
        if p.kv_format is None:
            return minfer.attention(*self.sets[i], **options)[0]
        return minfer.attention_paged(*self.sets[i], self.seq_lens, block_table=self.table, **self.scales[i], **options)[0]

    def poison(self) -> None:
        """The allocator gives the next output of this size the memory that is freed here."""
        q = self.sets[0][0]
        torch.full(self.shape, float("nan"), dtype=q.dtype, device=q.device)


@functools.cache
def _memory() -> Memory:
    return Memory()


def measure(
    suite: str, problem: AttentionProblem, seed: int, index: int, memory: Callable[[], Memory] = _memory
) -> tuple[list[dict[str, Any]], str, str]:
    """Rows of a problem, a line to print, and one for the file of measurements."""
    own, choices = choices_of(problem)
    operands = Operands(problem, memory())
    contest = regret_contest.hold(operands.run, operands.poison, choices, operands.count)
    rows = regret_contest.rows_of(suite, describe(problem), own, contest)
    facts = dataclasses.asdict(problem) | {"dtype": DTYPE_NAMES[problem.dtype]}
    measured = {"op": problem.op, "seed": seed, "index": index} | facts
    measured |= {
        "own": round(contest.own_us, 3),
        "pick": [own.kernel, own.launch],
        "plans": regret_contest.measurements_of(choices, contest),
    }
    return rows, regret_contest.line_of(suite, problem, rows[0], contest), json.dumps(measured)
