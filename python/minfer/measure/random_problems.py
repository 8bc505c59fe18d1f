"""Seeded random problems: what speed is judged on where no table helps, and what the plan's cost model is fitted to.

Every problem has a generator of its own, seeded by its list's seed and its place, so that a part of a list is drawn without the rest.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..planning.plan import DTYPE_NAMES, LAYOUTS, NARROW_NAMES, Problem, ScaledProblem, W4A8Problem, W4Problem

MOST_BYTES = 10**9  # of A, B, C and D of a 16-bit problem together
MOST_FLOPS = 1.5e12  # some 2 ms on an H200
MOST_M = 8192
_C_SHARE = _F16_SHARE = 0.25


def log_uniform(rng: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """A multiple of ``multiple`` in [low, high], which are multiples of it, whose logarithm is spread evenly."""
    return multiple * round(math.exp(rng.uniform(math.log(low), math.log(high))) / multiple)


def _feasible(m: int, n: int, k: int, c: bool) -> bool:
    return 2 * (m * k + n * k + m * n * (2 if c else 1)) <= MOST_BYTES and 2 * m * n * k <= MOST_FLOPS


def _first_feasible(rng: random.Random, c: bool, draw: Callable[[], tuple[int, int, int]]) -> tuple[int, int, int]:
    while True:
        m, n, k = draw()
        if _feasible(m, n, k, c):
            return m, n, k


def _dense(suite: str, seed: int, index: int, low: int, high: int, multiple: int) -> Problem:
    rng = random.Random(f"{suite}/{seed}/{index}")
    c, f16 = rng.random() < _C_SHARE, rng.random() < _F16_SHARE

    def draw() -> tuple[int, int, int]:
        return log_uniform(rng, 1, MOST_M), log_uniform(rng, low, high, multiple), log_uniform(rng, low, high, multiple)

    m, n, k = _first_feasible(rng, c, draw)
    return Problem(m, n, k, dtype=torch.float16 if f16 else torch.bfloat16, layout=LAYOUTS[index % len(LAYOUTS)], c=c)


def aligned(seed: int, index: int) -> Problem:
    """m in 1 to 8192; n, k multiples of 64 in 256 to 32768; all log-uniform. The layouts come by turns, C and float16 one time in four."""
    return _dense("aligned", seed, index, 256, 32768, 64)


def unaligned(seed: int, index: int) -> Problem:
    """Like :func:`aligned` with any n, k in 1 to 8192."""
    return _dense("unaligned", seed, index, 1, 8192, 1)


def w4a16(seed: int, index: int) -> W4Problem:
    """m in 1 to 8192; n, k multiples of 128, what every peer's format takes, in 256 to 32768; groups of 128; float16 one time in two."""
    return _quantised("w4a16", seed, index, "int4", 128)


def _quantised(suite: str, seed: int, index: int, w4_format: str, group_size: int) -> W4Problem:
    rng = random.Random(f"{suite}/{seed}/{index}")
    f16 = rng.random() < 0.5

    def draw() -> tuple[int, int, int]:
        return log_uniform(rng, 1, MOST_M), log_uniform(rng, 256, 32768, 128), log_uniform(rng, 256, 32768, 128)

    m, n, k = _first_feasible(rng, False, draw)
    return W4Problem(m, n, k, dtype=torch.float16 if f16 else torch.bfloat16, group_size=group_size, w4_format=w4_format)


def scaled(seed: int, index: int, dtype: torch.dtype) -> tuple[ScaledProblem, str]:
    """Of 8-bit operands: m in 1 to 8192; n, k multiples of 64, shards of blocks among them, in 256 to 32768. And the scales: of e4m3 by
    turns of blocks, of rows, one number; of int8 of rows."""
    rng = random.Random(f"scaled/{seed}/{index}")

    def draw() -> tuple[int, int, int]:
        return log_uniform(rng, 1, MOST_M), log_uniform(rng, 256, 32768, 64), log_uniform(rng, 256, 32768, 64)

    m, n, k = _first_feasible(rng, False, draw)
    mode = "row" if dtype == torch.int8 else ("block", "row", "tensor")[index % 3]
    return ScaledProblem(m, n, k, dtype=dtype, block_scaled=mode == "block"), mode


_CALIBRATED = (("int4", 128), ("int4", 32), ("int4", 128), ("nf4", 64), ("int4", 128), ("mxfp4", 32), ("int4", 128), ("nvfp4", 16))


def scaled_calibration(seed: int) -> Iterator[ScaledProblem]:
    """Endless problems of 8-bit operands for the fit: of twelve, five with scales of blocks, four of rows, one of rows and fast, two int8;
    one of seven is gated."""
    for index in itertools.count():
        kind = index % 12
        e4m3 = kind not in (5, 11)
        p, _ = scaled(seed, index, torch.float8_e4m3fn if e4m3 else torch.int8)
        options = {"block_scaled": e4m3 and kind % 2 == 0, "fast_accum": kind == 7, "gated": index % 7 == 3}
        yield ScaledProblem(p.m, p.n, p.k, dtype=p.dtype, **options)


def scaled_layers(seed: int) -> Iterator[ScaledProblem]:
    """Endless problems of layers' sizes, which the others seldom have: m in 32 to 4096; n, k multiples of 64 in 1024 to 24576. Of four, two
    have scales of blocks, one of rows, one is int8."""
    for index in itertools.count():
        rng = random.Random(f"scaled_layers/{seed}/{index}")
        sizes = log_uniform(rng, 32, 4096), log_uniform(rng, 1024, 24576, 64), log_uniform(rng, 1024, 24576, 64)
        dtype = torch.int8 if index % 4 == 3 else torch.float8_e4m3fn
        yield ScaledProblem(*sizes, dtype=dtype, block_scaled=index % 2 == 0)


def w4a8(seed: int, index: int, dtype: torch.dtype) -> W4A8Problem:
    """m in 16 to 8192; n, k multiples of 128 in 256 to 32768; groups of 128."""
    rng = random.Random(f"w4a8/{seed}/{index}")

    def draw() -> tuple[int, int, int]:
        return log_uniform(rng, 16, MOST_M), log_uniform(rng, 256, 32768, 128), log_uniform(rng, 256, 32768, 128)

    return W4A8Problem(*_first_feasible(rng, False, draw), dtype=dtype)


def w4a8_calibration(seed: int) -> Iterator[W4A8Problem]:
    """Endless problems of 8-bit activations and int4 weights for the fit: of three, one of int8; one of seven is gated."""
    for index in itertools.count():
        p = w4a8(seed, index, torch.int8 if index % 3 == 2 else torch.float8_e4m3fn)
        yield replace(p, gated=index % 7 == 3)


def calibration(seed: int) -> Iterator[Problem | W4Problem | ScaledProblem | W4A8Problem]:
    """Endless problems for the fit: of ten, five aligned, one of n and k in multiples of 8, one of any n and k, one gated or float32, two
    with 4-bit weights, every other one of these int4 in groups of 128. After each ten come three of 8-bit operands, one of them of a
    layer's sizes, and one of 8-bit activations and int4 weights."""
    of_8_bits, layers, quantised = scaled_calibration(seed), scaled_layers(seed), w4a8_calibration(seed)
    for index in itertools.count():
        kind, turn = index % 10, index // 10
        if kind == 0 and index > 0:
            yield from itertools.islice(of_8_bits, 2)
            yield next(layers)
            yield next(quantised)
        if kind < 5:
            yield aligned(seed, index)
        elif kind == 5:
            yield _dense("eight", seed, turn, 256, 32768, 8)
        elif kind == 6:
            yield _dense("any", seed, turn, 16, 8192, 1)
        elif kind == 7:
            p = _dense("special", seed, turn // 2, 256, 32768, 64)
            special = {"gated": True} if turn % 2 == 0 else {"out_dtype": torch.float32, "c": p.c}
            yield Problem(p.m, p.n, p.k, dtype=p.dtype, layout=p.layout, **special)
        else:
            yield _quantised("quantised", seed, index, *_CALIBRATED[(2 * turn + kind) % len(_CALIBRATED)])


# ---- grouped GEMM ----------------------------------------------------------------------------------------------------------------

ROUTINGS = ("uniform", "zipf", "one_hot")  # one_hot: all tokens have the same experts
GROUP_SIZE = 128  # of int4 weights
BLOCK = 128  # of n and of k, that a scale of e4m3 weights is of where scales are of blocks
D_GROUPS = (64, 32)  # of k of the codes that a gated product of 8-bit operands writes, and that the next product reads
MOST_WEIGHT_BYTES = {"dense": 8 * 10**9, "int4": 4 * 10**9}  # of all experts
MOST_NARROW_BYTES = 4 * 10**9  # the same of 8-bit weights
MOST_ROW_BYTES = 2 * 10**9  # of the rows that are read, were they gathered, and of those that are written


@dataclass(frozen=True)
class GroupedProblem:
    """A product of experts' weights [experts, n, k] and of tokens, each of which has ``top_k`` experts.

    ``n`` counts the weights' rows, so a gated output has n / 2 columns. ``gathered``: rows are read from the tokens by an index; otherwise
    they lie in the order of the experts. Operands of 8 bits have float32 scales and a result in bfloat16. Scales of e4m3 are of ``a_group``
    of k of a row, and of blocks of 128 x 128 of the weights; with an ``a_group`` of 0, and of int8, they are of rows and of columns.
    """

    experts: int
    top_k: int
    tokens: int
    n: int
    k: int
    routing: str = "uniform"
    gathered: bool = False
    gated: bool = False
    weights: str = "dense"  # of dtype, or int4 in groups of 128
    dtype: torch.dtype = torch.bfloat16
    a_group: int = 0

    @property
    def narrow(self) -> bool:
        """Whether both operands have 8 bits."""
        return self.dtype in NARROW_NAMES

    @property
    def dtype_name(self) -> str:
        return (DTYPE_NAMES | NARROW_NAMES)[self.dtype]

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.narrow else self.dtype

    @property
    def op(self) -> str:
        if self.narrow:
            return "grouped_gemm_int8" if self.dtype == torch.int8 else "grouped_gemm_fp8"
        return "grouped_gemm" if self.weights == "dense" else "grouped_w4a16_gemm"

    @property
    def family(self) -> str:
        """Of its kernels."""
        return "moe_scaled" if self.narrow else "moe" if self.weights == "dense" else "moe_w4a16"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def a_rows(self) -> int:
        return self.tokens if self.gathered else self.rows

    @property
    def columns(self) -> int:
        return self.n // 2 if self.gated else self.n

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.n * self.k

    @property
    def a_bytes(self) -> int:
        """Of the rows as they are read, without scales."""
        return self.dtype.itemsize * self.a_rows * self.k

    @property
    def b_scales(self) -> tuple[int, ...]:
        """The shape of one expert's scales, of 8-bit operands."""
        if self.a_group == 0:
            return (self.n,)
        rows = 2 * -(-self.n // 2 // BLOCK) if self.gated else -(-self.n // BLOCK)
        return rows, -(-self.k // BLOCK)

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights, with their scales."""
        if self.narrow:
            return self.n * self.k + 4 * math.prod(self.b_scales)
        return 2 * self.n * self.k if self.weights == "dense" else self.n * self.k // 2 + 2 * self.n * (self.k // GROUP_SIZE)

    def __str__(self) -> str:
        text = f"{self.tokens} tokens to {self.top_k} of {self.experts} experts, {self.n} x {self.k} {self.dtype_name}"
        scales = f"scales of {self.a_group}" if self.a_group else "scales of rows"
        text += f" {scales if self.narrow else self.weights}, {self.routing}"
        return text + (", gathered" if self.gathered else "") + (", gated" if self.gated else "")


def grouped(seed: int, index: int) -> GroupedProblem:
    """Experts 4 to 256, tokens 1 to 16384, n and k multiples of 64 (int4: 128) in 256 to 16384, all log-uniform; top_k 1 to 8.

    Routings come by turns, and of nine problems three have int4 weights. Bytes and flops are bounded so that a launch takes a few
    milliseconds on an H200.
    """
    rng = random.Random(f"grouped/{seed}/{index}")
    weights = "int4" if index // 3 % 3 == 2 else "dense"
    gathered, gated = rng.random() < 0.5, rng.random() < 0.5
    return _first_feasible_grouped(rng, 64 if weights == "dense" else 128, ROUTINGS[index % 3], gathered, gated, weights)


def _first_feasible_grouped(rng: random.Random, multiple: int, *rest: Any) -> GroupedProblem:
    """``multiple``: of n and k. ``rest``: what follows the sizes."""
    while True:
        experts = log_uniform(rng, 4, 256)
        problem = GroupedProblem(
            experts,
            rng.randint(1, min(8, experts)),
            log_uniform(rng, 1, 16384),
            log_uniform(rng, 256, 16384, multiple),
            log_uniform(rng, 256, 16384, multiple),
            *rest,
        )
        row_bytes = problem.dtype.itemsize * problem.rows * problem.k, 2 * problem.rows * problem.columns
        most_weight_bytes = MOST_NARROW_BYTES if problem.narrow else MOST_WEIGHT_BYTES[problem.weights]
        few_bytes = experts * problem.expert_bytes <= most_weight_bytes and max(row_bytes) <= MOST_ROW_BYTES
        if few_bytes and problem.flops <= MOST_FLOPS:
            return problem


_BLOCKS, _ROWS, _INT8 = (torch.float8_e4m3fn, BLOCK), (torch.float8_e4m3fn, 0), (torch.int8, 0)  # types and a_group
_NARROW = (_BLOCKS, _ROWS, _BLOCKS, _BLOCKS, _INT8, _BLOCKS)


def grouped_scaled(seed: int, index: int) -> GroupedProblem:
    """Like :func:`grouped` of 8-bit operands, n and k multiples of 64: of eighteen problems twelve are e4m3 with scales of blocks, three
    e4m3 and three int8 with scales of rows and columns.

    A third of the ungated ones with blocks are what the second product of a layer is: scales of 64 or 32 of k, and rows in order.
    """
    rng = random.Random(f"grouped_scaled/{seed}/{index}")
    dtype, a_group = _NARROW[index // 3 % len(_NARROW)]
    gathered, gated = rng.random() < 0.5, rng.random() < 0.5
    second, group = rng.random() < 1 / 3, rng.choice(D_GROUPS)
    if second and a_group > 0 and not gated:
        gathered, a_group = False, group
    return _first_feasible_grouped(rng, 64, ROUTINGS[index % 3], gathered, gated, "dense", dtype, a_group)


# ---- attention -------------------------------------------------------------------------------------------------------------------

HEAD_DIMS = (64, 128, 256, 128)
PAGE_SIZES = (16, 64, 256)
MOST_ATTENTION_BYTES = 3 * 10**9  # of queries, keys, values and outputs
_CODES = ("fp8_e4m3", "int8", "int4")


@dataclass(frozen=True)
class AttentionProblem:
    """Attention of ``batch`` sequences of one length.

    ``kv_format``: None where keys and values are tensors, else that of the cache they lie in. ``page_size``: of a paged cache; 0: each
    sequence has a part of its own. ``window_left``: as of ``minfer.attention``.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool = True
    window_left: int = -1
    kv_format: str | None = None
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def op(self) -> str:
        return "attention" if self.kv_format is None else "attention_paged"

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one sequence and head; seqlen_k >= seqlen_q."""
        shift = self.seqlen_k - self.seqlen_q

        def up_to(x: int) -> int:  # 1 + .. + x
            return x * (x + 1) // 2 if x > 0 else 0

        ends = up_to(self.seqlen_k) - up_to(shift) if self.causal else self.seqlen_q * self.seqlen_k
        if self.window_left < 0:
            return ends
        first = shift - self.window_left  # the first query's first key
        return ends - (up_to(first + self.seqlen_q - 1) - up_to(first - 1))

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads_q * self.head_dim * self.pairs

    @property
    def query_bytes(self) -> int:
        return 2 * self.batch * self.seqlen_q * self.heads_q * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of keys and values, without scales."""
        bits = {None: 16, "16bit": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}[self.kv_format]
        return 2 * self.batch * self.pages * (self.page_size or self.seqlen_k) * self.heads_kv * self.head_dim * bits // 8

    @property
    def pages(self) -> int:
        """Of a sequence."""
        return -(-self.seqlen_k // self.page_size) if self.page_size else 1

    def __str__(self) -> str:
        text = f"{self.batch} x {self.seqlen_q} x {self.seqlen_k} d{self.head_dim} {self.heads_q}/{self.heads_kv} {DTYPE_NAMES[self.dtype]}"
        text += ", causal" if self.causal else ", full"
        text += f", window {self.window_left}" if self.window_left >= 0 else ""
        if self.kv_format is not None:
            text += f", {self.kv_format} cache" + (f", pages of {self.page_size}" if self.page_size else "")
        return text


def attention(seed: int, index: int) -> AttentionProblem:
    """Queries 1 to 16384 of 1 to 128 sequences and up to 65536 keys, at least as many as queries, all log-uniform.

    Head dimensions come by turns, and of eight problems four have a cache, a third of them of codes. Of the others half have as many keys
    as queries. One KV head has 1 to 8 query heads; one problem in four is not causal, one in six has a window, one in four is float16.
    """
    rng = random.Random(f"attention/{seed}/{index}")
    cached = index // 4 % 2 == 1
    kv_format, page_size = None, 0
    if cached:
        kv_format = rng.choice(_CODES) if rng.random() < 1 / 3 else "16bit"
        page_size = rng.choice((0, *PAGE_SIZES)) if kv_format == "16bit" else 64
    whole = not cached and rng.random() < 0.5
    causal, windowed = rng.random() < 0.75, rng.random() < 1 / 6
    dtype = torch.float16 if rng.random() < _F16_SHARE else torch.bfloat16
    while True:
        seqlen_q = log_uniform(rng, 1, 16384)
        seqlen_k = seqlen_q if whole else log_uniform(rng, seqlen_q, 65536)
        heads_kv = 2 ** rng.randint(0, 5)
        group = rng.choice((1, 2, 4, 8)) if rng.random() < 0.75 else rng.randint(1, 8)
        problem = AttentionProblem(
            log_uniform(rng, 1, 128),
            seqlen_q,
            seqlen_k,
            heads_kv * group,
            heads_kv,
            HEAD_DIMS[index % 4],
            causal,
            log_uniform(rng, 128, 8192) if windowed else -1,
            kv_format,
            page_size,
            dtype,
        )
        if problem.flops <= MOST_FLOPS and 2 * problem.query_bytes + problem.kv_bytes <= MOST_ATTENTION_BYTES:
            return problem
