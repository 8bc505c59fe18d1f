"""The regret of grouped GEMM's plans on random problems: all kernels, with their own gather and with the rows gathered first."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import minfer
import torch
from minfer._core.registry import device_index
from minfer.formats import weight_layout
from minfer.measure.random_problems import D_GROUPS, GROUP_SIZE, GroupedProblem
from minfer.planning.plan import NARROW_NAMES

from bench import harness
from bench.suites import regret_contest
from bench.suites.regret_contest import Choice

FP8 = torch.float8_e4m3fn
GATHER_FIRST = "gather_first=1"
# Bytes that all problems' operands are views of. One problem's weights may be the whole.
DENSE_BYTES, CODE_BYTES, SCALE_BYTES, ROW_BYTES = 8 << 30, 4 << 30, 1 << 29, 4 << 30
NARROW_BYTES, NARROW_ROW_BYTES, FLOAT_SCALE_BYTES = 4 << 30, 2 << 30, 1 << 29  # of 8-bit operands, the first two of e4m3 and of int8 each
DRAWN_AT_ONCE = 1 << 27


def describe(problem: GroupedProblem) -> dict[str, Any]:
    """op, shape and dtype of a problem's row."""
    names = ("experts", "top_k", "n", "k", "routing", "gathered", "gated", "weights")
    shape = {"m": problem.tokens} | {name: getattr(problem, name) for name in names}
    shape |= {"a_group": problem.a_group} if problem.narrow else {}
    return {"op": problem.op, "shape": shape, "dtype": problem.dtype_name}


def planned(problem: GroupedProblem, kernel: str | None = None) -> Choice:
    """What runs, the plan's choice or an override.

    Raises:
      RuntimeError: the override cannot compute the problem, or the library does not know it.
    """
    device = device_index(None)
    form = (None, problem.a_group) if problem.narrow else ("int4", GROUP_SIZE) if problem.weights == "int4" else ()
    sizes = [problem.rows, problem.experts, problem.n, problem.k]
    arguments = (sizes, problem.dtype_name, problem.gated, problem.gathered, kernel, device >= 0, device, *form)
    found = json.loads(torch.ops.minfer._plan_grouped(*arguments))
    launch = GATHER_FIRST if found["gather_first"] else ""
    return Choice(found["kernel"], found["predicted_us"], found["floor_us"], launch)


def choices_of(problem: GroupedProblem) -> tuple[Choice, list[Choice]]:
    """The plan's choice, and all legal ones of its kernel's architecture that it may take: portable kernels only run where there are no
    others, and some are for batch-invariant plans alone."""
    own = planned(problem)
    kernels = {kernel["name"]: kernel for kernel in minfer.kernels(problem.family)}
    found = []
    for name, kernel in kernels.items():
        if kernel["arch"] != kernels[own.kernel]["arch"] or kernel["invariant_only"]:
            continue
        for override in (name, f"{name}@{GATHER_FIRST}") if problem.gathered else (name,):
            try:
                found.append(planned(problem, override))
            except RuntimeError:  # illegal, or not compiled
                continue
    return own, found


def routed(problem: GroupedProblem, seed: str, device: str) -> torch.Tensor:
    """ids int32 [tokens, top_k], different experts for each token."""
    tokens, top_k, experts = problem.tokens, problem.top_k, problem.experts
    if problem.routing == "one_hot":
        return torch.arange(top_k, device=device, dtype=torch.int32).expand(tokens, top_k).contiguous()
    weight = torch.ones(experts, device=device)
    if problem.routing == "zipf":
        weight /= torch.arange(1, experts + 1, device=device)
    generator = torch.Generator(device).manual_seed(sum(map(ord, seed)) * 7919 + problem.tokens)
    return torch.multinomial(weight.expand(tokens, experts), top_k, generator=generator).to(torch.int32)


class Memory:
    """Random numbers, drawn once, that operands are views of."""

    def __init__(self, device: str = "cuda", share: float = 1.0):
        self.device, self.share = device, share

    def _empty(self, bytes_: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(int(bytes_ * self.share) // dtype.itemsize, dtype=dtype, device=self.device)

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        return self._empty(DENSE_BYTES, torch.bfloat16).normal_(std=0.02)

    @functools.cached_property
    def codes(self) -> torch.Tensor:
        return self._empty(CODE_BYTES, torch.int32).random_(-(2**31), 2**31 - 1)  # any bits are codes

    @functools.cached_property
    def scales(self) -> torch.Tensor:
        return self._empty(SCALE_BYTES, torch.bfloat16).uniform_(0.002, 0.006)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        return self._empty(ROW_BYTES, torch.bfloat16).normal_()

    def _narrow(self, bytes_: int, dtype: torch.dtype) -> torch.Tensor:
        """Codes as quantised normal numbers have them, none of which is NaN; int8: uniform ones."""
        codes = self._empty(bytes_, dtype)
        for part in codes.split(DRAWN_AT_ONCE):
            drawn = torch.randn(part.shape, device=self.device) * 64 if dtype == FP8 else None
            part.random_(-127, 128) if drawn is None else part.copy_(drawn.clamp_(-448, 448))
        return codes

    @functools.cached_property
    def float_scales(self) -> torch.Tensor:
        return self._empty(FLOAT_SCALE_BYTES, torch.float32).uniform_(0.005, 0.015)

    @functools.cached_property
    def narrow_weights(self) -> dict[torch.dtype, torch.Tensor]:
        return {dtype: self._narrow(NARROW_BYTES, dtype) for dtype in NARROW_NAMES}

    @functools.cached_property
    def narrow_rows(self) -> dict[torch.dtype, torch.Tensor]:
        return {dtype: self._narrow(NARROW_ROW_BYTES, dtype) for dtype in NARROW_NAMES}


@dataclasses.dataclass
class Routing:
    offsets: torch.Tensor
    gather: torch.Tensor | None


class Operands:
    """Sets of a problem's operands, enough of them that a launch finds none in the L2s, and one output."""

    def __init__(self, problem: GroupedProblem, memory: Memory, seed: str):
        self.problem = problem
        ids = routed(problem, seed, memory.device)
        rows_of_expert = torch.bincount(ids.flatten().long(), minlength=problem.experts)
        self.active, self.largest = int((rows_of_expert > 0).sum()), int(rows_of_expert.max())
        self.count = harness.sets_for(self.active * problem.expert_bytes + problem.a_bytes)
        self.weights = self._weights(memory)
        rows = memory.narrow_rows[problem.dtype] if problem.narrow else memory.rows
        self.rows = harness.windows(rows, (problem.a_rows, problem.k), self.count)
        self.row_scales = self._row_scales(memory) if problem.narrow else []
        # Where there is no room for so many weights, the tokens go to other experts when the first weights are read again.
        rounds = -(-self.count // len(self.weights))
        self.routings = []
        for i in range(rounds):
            shift = i * max(1, problem.experts // rounds)
            token_index, offsets, _, _ = minfer.moe_sort(((ids + shift) % problem.experts).to(torch.int32), problem.experts)
            self.routings.append(Routing(offsets, token_index if problem.gathered else None))
        self.out = torch.empty(problem.rows, problem.columns, dtype=problem.out_dtype, device=memory.device)

    def _row_scales(self, memory: Memory) -> list[torch.Tensor]:
        """Those of 128 of k lie column by column, each at a multiple of 16 bytes, as operators with ``quant`` write them; those of less lie
        row by row, as the first product of a layer writes them."""
        p = self.problem
        if p.a_group == 0:
            return harness.windows(memory.float_scales, (p.a_rows,), self.count)
        if p.a_group in D_GROUPS:
            return harness.windows(memory.float_scales, (p.a_rows, -(-p.k // p.a_group)), self.count)
        shape = (-(-p.k // p.a_group), -(-p.a_rows // 4) * 4)
        return [view.mT[: p.a_rows] for view in harness.windows(memory.float_scales, shape, self.count)]

    def _weights(self, memory: Memory) -> list[tuple[torch.Tensor, ...]]:
        p = self.problem
        if p.narrow:
            codes, shape = memory.narrow_weights[p.dtype], (p.experts, p.n, p.k)
            count = min(self.count, max(1, codes.numel() // (p.experts * p.n * p.k)))
            scales = harness.windows(memory.float_scales, (p.experts, *p.b_scales), count)
            return [(view.mT, scale) for view, scale in zip(harness.windows(codes, shape, count), scales, strict=True)]
        if p.weights == "dense":
            shape = (p.experts, p.n, p.k)
            most = max(1, memory.dense.numel() // (p.experts * p.n * p.k))
            return [(view.mT,) for view in harness.windows(memory.dense, shape, min(self.count, most))]
        codes = (p.experts, *weight_layout.packed_shape(p.n, p.k))
        most = max(1, memory.codes.numel() // (codes[0] * codes[1] * codes[2] * codes[3]))
        count = min(self.count, most)
        scales = (p.experts, weight_layout.groups(p.k, GROUP_SIZE), p.n)
        return list(zip(harness.windows(memory.codes, codes, count), harness.windows(memory.scales, scales, count), strict=True))

    def run(self, i: int, kernel: str | None) -> torch.Tensor:
        p, weights, routing = self.problem, self.weights[i % len(self.weights)], self.routings[i // len(self.weights)]
        options = {
            "gather": routing.gather,
            "activation": "silu" if p.gated else "none",
            "gated": p.gated,
            "kernel": kernel,
            "out": self.out,
        }
        if p.narrow:
            op, (b, b_scale) = minfer.grouped_gemm_fp8 if p.dtype == FP8 else minfer.grouped_gemm_int8, weights
            return op(self.rows[i], b, self.row_scales[i], b_scale, routing.offsets, **options)
        if p.weights == "dense":
            return minfer.grouped_gemm(self.rows[i], *weights, routing.offsets, **options)
        return minfer.grouped_w4a16_gemm(self.rows[i], *weights, None, routing.offsets, group_size=GROUP_SIZE, **options)

    def poison(self) -> None:
        self.out.fill_(float("nan"))


@functools.cache
def _memory() -> Memory:
    return Memory()


def measure(
    suite: str, problem: GroupedProblem, seed: int, index: int, memory: Callable[[], Memory] = _memory
) -> tuple[list[dict[str, Any]], str, str]:
    """Rows of a problem, a line to print, and one for the file of measurements."""
    own, choices = choices_of(problem)
    operands = Operands(problem, memory(), f"{seed}/{index}")
    contest = regret_contest.hold(operands.run, operands.poison, choices, operands.count)
    described = describe(problem)
    spread = {"active": operands.active, "largest": operands.largest}
    described["shape"] |= spread
    rows = regret_contest.rows_of(suite, described, own, contest)
    facts = dataclasses.asdict(problem) | {"dtype": problem.dtype_name} | spread
    measured = {"op": problem.op, "seed": seed, "index": index} | facts
    measured |= {
        "own": round(contest.own_us, 3),
        "pick": [own.kernel, own.launch],
        "plans": regret_contest.measurements_of(choices, contest),
    }
    return rows, regret_contest.line_of(suite, problem, rows[0], contest), json.dumps(measured)
