"""What the tests of grouped GEMM of 8-bit operands share: operands, scales of every kind, the truth in float64 and its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import minfer
import torch
from minfer.formats.gate_up import join_gate_up
from minfer.reference import grouped_gemm as reference_moe
from torch import Tensor

from tests.fuzz.compare import Expected, mismatch
from tests.fuzz.truth.epilogue import Bounded, activate, affine, codes, gated, result
from tests.moe.grouped_cases import counts_of, offsets_of
from tests.scaled_gemm.cases import BLOCK, FP8, blocks_of

# What a scale of rows of a may be of, and one of experts' weights; "e8m0" is of blocks of 128, exponents of two.
ROW_KINDS = {
    FP8: ("one", "rows", "rows_1", "blocks128", "blocks64", "blocks32", "e8m0"),
    torch.int8: ("one", "rows", "rows_1", "blocks128", "blocks64", "blocks32"),
}
EXPERT_KINDS = {
    FP8: ("one", "experts", "experts_1", "columns", "columns_1", "blocks", "e8m0"),
    torch.int8: ("one", "experts", "experts_1", "columns", "columns_1"),
}
LAYOUTS = ("halves", "alternating", "blocks")
# experts, rows, n, k: tails in every mode, k that is no multiple of 16, many experts, the widths of checkpoints.
SHAPES = (
    (1, 5, 64, 64),
    (5, 30, 40, 80),
    (8, 100, 192, 200),
    (3, 70, 96, 77),
    (6, 300, 576, 192),
    (4, 150, 2048, 96),
    (16, 64, 256, 7168),
    (3, 40, 7168, 576),
    (512, 700, 64, 160),
)


def has_kernels(device: str) -> bool:
    """Whether the operators run there: on a CPU they do, on a GPU the build must have kernels for it."""
    if not device.startswith("cuda"):
        return True
    major, minor = torch.cuda.get_device_capability()
    own = 10 * major + minor
    compiled = [kernel for kernel in minfer.kernels("moe_scaled") if kernel["compiled"]]
    return any(kernel["arch"] == own if kernel["arch_exact"] else kernel["arch"] <= own for kernel in compiled)


def operand(dtype: torch.dtype, *shape: int, device: str = "cpu", size: float = 16.0) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, device=device).to(dtype)
    return (torch.randn(shape, device=device) * size).to(dtype)


def _group(kind: str) -> int | None:
    """k of a scale, of those that are of blocks."""
    return {"e8m0": 128, "blocks": 128}.get(kind) or (int(kind[6:]) if kind.startswith("blocks") else None)


def _blocks(kind: str, device: str, size: float, *shape: int) -> Tensor:
    if kind == "e8m0":
        middle = 127 + round(math.log2(size))
        return torch.randint(middle - 2, middle + 3, shape, device=device).to(torch.uint8)
    return (0.5 + torch.rand(shape, device=device)) * size


def scale_of_rows(kind: str, rows: tuple[int, ...], k: int, *, device: str = "cpu", size: float = 0.05) -> Tensor:
    group = _group(kind)
    if group is not None:
        return _blocks(kind, device, size, *rows, -(-k // group))
    shape = {"one": (1,), "rows": rows, "rows_1": (*rows, 1)}[kind]
    return _blocks(kind, device, size, *shape)


def scale_of_experts(kind: str, experts: int, n: int, k: int, *, is_gated: bool = False, device: str = "cpu", size: float = 0.05) -> Tensor:
    if _group(kind) is not None:
        return _blocks(kind, device, size, experts, 2 * blocks_of(n // 2) if is_gated else blocks_of(n), blocks_of(k))
    shapes = {"one": (1,), "experts": (experts,), "experts_1": (experts, 1), "columns": (experts, n), "columns_1": (experts, n, 1)}
    return _blocks(kind, device, size, *shapes[kind])


def _numbers(scale: Tensor) -> Tensor:
    return torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()


def numbers_of_rows(scale: Tensor, kind: str, rows: int, k: int) -> Tensor:
    """Of each element, [rows, k]."""
    scale, group = _numbers(scale), _group(kind)
    if group is None:
        return scale.reshape(-1, 1).expand(rows, k)
    return scale.reshape(rows, -(-k // group)).repeat_interleave(group, 1)[:, :k]


def numbers_of_expert(scale: Tensor, kind: str, expert: int, n: int, k: int, layout: str | None) -> Tensor:
    """Of each element of an expert's weight, [n, k]."""
    scale = _numbers(scale)
    if kind == "one":
        return scale.reshape(1, 1).expand(n, k)
    own = scale[expert]
    if _group(kind) is None:
        return own.reshape(-1, 1).expand(n, k)
    spread = own.repeat_interleave(BLOCK, 1)[:, :k]
    if layout is None:
        return spread.repeat_interleave(BLOCK, 0)[:n]
    gate, up = (half.repeat_interleave(BLOCK, 0)[: n // 2] for half in spread.chunk(2))
    return join_gate_up(gate, up, layout)


@dataclass
class Case:
    """A call, and of what its scales are. ``rows``: of a, in the order in which experts have them; masked: a is [experts, max_rows, k]."""

    a: Tensor
    weight: Tensor  # [experts, n, k]
    a_scale: Tensor
    b_scale: Tensor
    a_kind: str
    b_kind: str
    ends: Tensor  # offsets or counts
    masked: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype

    @property
    def layout(self) -> str | None:
        return self.options.get("gate_layout", "halves") if self.options.get("gated") else None

    def call(self, **more: Any) -> Tensor:
        return operator(self.dtype, self.masked)(self.a, self.weight.mT, self.a_scale, self.b_scale, self.ends, **(self.options | more))

    def with_options(self, **more: Any) -> Case:
        return replace(self, options=self.options | more)


def operator(dtype: torch.dtype, masked: bool = False):
    return getattr(minfer, f"grouped_gemm_{'int8' if dtype == torch.int8 else 'fp8'}{'_masked' if masked else ''}")


def make_case(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    a_kind: str,
    b_kind: str,
    *,
    device: str = "cpu",
    kind: str = "ragged",
    behind: int = 0,
    gather: bool = False,
    row_scale: bool = False,
    bias: torch.dtype | None = None,
    layout: str | None = None,
    activation: str = "none",
    size: float = 0.05,
) -> Case:
    """``behind``: rows that no expert has. Scales are about ``size``, so that a product of k terms is some 100 sqrt(k) ``size``^2 large."""
    experts, rows, n, k = shape
    a_rows = rows // 2 + 3 if gather else rows
    options: dict[str, Any] = {"activation": activation}
    if gather:
        options["gather"] = torch.randint(0, a_rows, (rows,), device=device, dtype=torch.int32)
    if row_scale:
        options["row_scale"] = torch.rand(rows, device=device)
    if bias is not None:
        options["bias"] = torch.randn(experts, n, device=device).to(bias)
    if layout is not None:
        options |= {"gated": True, "gate_layout": layout}
    return Case(
        operand(dtype, a_rows, k, device=device),
        operand(dtype, experts, n, k, device=device),
        scale_of_rows(a_kind, (a_rows,), k, device=device, size=size),
        scale_of_experts(b_kind, experts, n, k, is_gated=layout is not None, device=device, size=size),
        a_kind,
        b_kind,
        offsets_of(counts_of(experts, rows - min(behind, rows), kind), device),
        options=options,
    )


def masked_case(case: Case, max_rows: int) -> Case:
    """Slabs of random rows with the weights and options of a sorted case."""
    experts, _, k = case.weight.shape
    device = case.a.device
    counts = torch.randint(0, max_rows + 1, (experts,), device=device, dtype=torch.int32)
    counts[0], counts[-1] = 0, max_rows
    options = {name: x for name, x in case.options.items() if name not in ("gather", "row_scale")}
    if "row_scale" in case.options:
        options["row_scale"] = torch.rand(experts, max_rows, device=device)
    a = operand(case.dtype, experts, max_rows, k, device=device)
    a_scale = scale_of_rows(case.a_kind, (experts, max_rows), k, device=device)
    return replace(case, a=a, a_scale=a_scale, ends=counts, masked=True, options=options)


# ---- the truth -----------------------------------------------------------------------------------------------------------------------


def relative_bound(dtype: torch.dtype, k: int, group: int | None, *, fast: bool = False) -> float:
    """Of a sum, relative to the sum of magnitudes. ``group``: k of a scale of blocks, or None. Sums of e4m3 are the tensor core's, 32 of k
    and the sum so far at a time with 13 bits behind the first of the largest, until they are added up in float32; those of int8 are exact
    until then."""
    sums = 128 if group is None else group
    in_float32 = -(-k // sums) * 2.0**-24 + 2.0**-22
    if dtype == torch.int8:
        return 2.0**-22 if group is None else in_float32
    additions = k / 32 if fast and group is None else sums / 32
    return additions * 2.0**-13 + in_float32


def ranges_of(case: Case) -> list[tuple[int, int]]:
    """The rows of each expert."""
    ends = case.ends.tolist()
    if case.masked:
        return [(e * case.a.shape[1], e * case.a.shape[1] + count) for e, count in enumerate(ends)]
    return list(zip([0, *ends], ends, strict=False))


def bounded(case: Case, *, fast: bool = False) -> Bounded:
    """D before it is rounded, [rows, columns]; rows of nobody are 0."""
    a, gather = case.a.flatten(0, -2), case.options.get("gather")
    (_, n, k), bias = case.weight.shape, case.options.get("bias")
    rows = len(a) if gather is None else len(gather)
    x = a.double() * numbers_of_rows(case.a_scale, case.a_kind, len(a), k)
    x = x if gather is None else x[gather.long()]
    row_scale = case.options.get("row_scale")
    activation, layout = case.options.get("activation", "none"), case.layout
    groups = [group for group in (_group(case.a_kind), _group(case.b_kind)) if group is not None]
    bound = relative_bound(case.dtype, k, min(groups, default=None), fast=fast)
    value, error = (torch.zeros(rows, n if layout is None else n // 2, dtype=torch.float64, device=a.device) for _ in range(2))
    for expert, (begin, end) in enumerate(ranges_of(case)):
        if end <= begin:
            continue
        w = case.weight[expert].double() * numbers_of_expert(case.b_scale, case.b_kind, expert, n, k, layout)
        sums, magnitude = x[begin:end] @ w.t(), x[begin:end].abs() @ w.abs().t()
        y = affine(Bounded(sums, bound * magnitude), magnitude, 1.0, None if bias is None else bias[expert].double())
        y = activate(y, activation) if layout is None else gated(y, activation, layout)
        y = y if row_scale is None else y.times(row_scale.flatten()[begin:end, None].double())
        value[begin:end], error[begin:end] = y.value, y.error
    return Bounded(value, error)


def problem_of(case: Case, have: Tensor, *, fast: bool = False) -> str | None:
    """Why a result is not the case's, or None."""
    d, scale = bounded(case, fast=fast), case.options.get("out_scale")
    want: Expected = result("out", d, have.dtype, None) if scale is None else codes("out", d, scale)
    return mismatch(have.flatten(0, -2), want, strided=True)


def poisoned(rows: int, columns: int, dtype: torch.dtype, device: str, *, padding: int = 0) -> tuple[Tensor, Tensor]:
    """(view [rows, columns], all bytes) in memory full of 0xff, which is NaN in every type here."""
    memory = torch.full((rows + 4, (columns + padding) * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
    return memory.view(dtype)[2 : 2 + rows, :columns], memory


def untouched_around(view: Tensor, memory: Tensor) -> bool:
    """Whether all bytes but the view's are as :func:`poisoned` left them."""
    around = memory.clone()
    rows, columns = view.shape
    around[2 : 2 + rows, : columns * view.dtype.itemsize] = 0xFF
    return bool((around == 0xFF).all())


def same_bits(have: Tensor, want: Tensor) -> bool:
    return have.dtype == want.dtype and have.shape == want.shape and torch.equal(have.view(torch.uint8), want.view(torch.uint8))


# ---- layers --------------------------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """x in 16 bits, the experts of both products with their scales, and routes."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    kind: str
    weights: Tensor
    ids: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, x: Tensor | None = None, **more: Any) -> Tensor:
        call = minfer.moe_ffn_int8 if self.w13.dtype == torch.int8 else minfer.moe_ffn_fp8
        weights = (self.w13, self.w2, self.w13_scale, self.w2_scale)
        return call(self.x if x is None else x, *weights, self.weights, self.ids, **(self.options | more))

    def quantized_x(self) -> tuple[Tensor, Tensor]:
        if self.w13.dtype == torch.int8:
            return minfer.quantize_int8(self.x)
        return minfer.quantize_fp8(self.x, "block128" if self.kind in ("blocks", "e8m0") else "token")

    def codes(self) -> tuple[Tensor, Tensor]:
        """The numbers that x's codes are, in float64, and their scales as they are passed."""
        q, scale = self.quantized_x()
        group = 1 if scale.shape[1] == 1 else BLOCK
        spread = scale.double().expand(-1, q.shape[1]) if group == 1 else scale.double().repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
        return q.double() * spread, scale

    def dense(self) -> tuple[Tensor, Tensor]:
        """w13 and w2 in float64."""
        found = []
        for w, scale, layout in ((self.w13, self.w13_scale, self.options.get("gate_layout", "halves")), (self.w2, self.w2_scale, None)):
            experts, n, k = w.shape
            found.append(torch.stack([w[e].double() * numbers_of_expert(scale, self.kind, e, n, k, layout) for e in range(experts)]))
        return found[0], found[1]

    def truth(self, x: Tensor) -> Tensor:
        """Of x in float64."""
        names = ("activation", "b13", "b2", "gate_layout")
        options = {name: y.double() if isinstance(y, Tensor) else y for name, y in self.options.items() if name in names}
        return reference_moe.moe_ffn(x, *self.dense(), self.weights.double(), self.ids, **options)


def make_layer(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    kind: str,
    *,
    device: str = "cpu",
    x_dtype: torch.dtype = torch.bfloat16,
    biases: torch.dtype | None = None,
    **options: Any,
) -> Layer:
    """``shape``: experts, tokens, top_k, hidden and inter; weights are about 1 / sqrt(k)."""
    experts, tokens, top_k, hidden, inter = shape
    ids = torch.rand(tokens, experts, device=device).argsort(dim=-1)[:, :top_k].to(torch.int32).contiguous()
    weights = torch.rand(tokens, top_k, device=device)
    weights /= weights.sum(-1, keepdim=True)
    size = 1 / (16.0 if dtype == FP8 else 74.0)
    parts = []
    for n, k, is_gated in ((2 * inter, hidden, True), (hidden, inter, False)):
        scale = scale_of_experts(kind, experts, n, k, is_gated=is_gated, device=device, size=size * max(k, 1) ** -0.5)
        parts.append((operand(dtype, experts, n, k, device=device), scale))
    if biases is not None:
        options["b13"], options["b2"] = (torch.randn(experts, n, device=device).to(biases) for n in (2 * inter, hidden))
    x = torch.randn(tokens, hidden, device=device).to(x_dtype)
    (w13, w13_scale), (w2, w2_scale) = parts
    return Layer(x, w13, w2, w13_scale, w2_scale, kind, weights, ids, options)


def off_by_norm(have: Tensor, want: Tensor) -> float:
    return float((have.double() - want).norm() / want.norm().clamp(min=1e-30))


# ---- calls that cannot be right ------------------------------------------------------------------------------------------------------


def bad_calls(device: str = "cpu"):
    """(operator, arguments, options, message)"""
    a, b = operand(FP8, 6, 300, device=device), operand(FP8, 4, 256, 300, device=device).mT
    ai, bi = operand(torch.int8, 6, 300, device=device), operand(torch.int8, 4, 256, 300, device=device).mT
    one, rows, experts, columns = (torch.ones(shape, device=device) for shape in ((1,), (6,), (4,), (4, 256)))
    offsets, byte = torch.tensor([1, 2, 2, 6], dtype=torch.int32, device=device), torch.uint8
    good, of_int8 = (a, b, one, one, offsets), (ai, bi, one, one, offsets)
    fp8, int8 = "grouped_gemm_fp8", "grouped_gemm_int8"
    of_rows = "a_scale must be one number, [6], [6, 1] or, of blocks of k, [6, 3], [6, 5] or [6, 10], got "
    of_blocks = "b_scale must be one number, [4], [4, 1], [4, 256] or [4, 256, 1] or, of blocks, [4, 2, 3], got "
    yield fp8, (a.half(), *good[1:]), {}, "a must be float8_e4m3fn, got float16"
    yield fp8, (a[0], *good[1:]), {}, "a must be [rows, k]"
    yield fp8, (a, b.half(), one, one, offsets), {}, "b must be float8_e4m3fn, got float16"
    yield fp8, (a, b[0], one, one, offsets), {}, "b must be [experts, k, n] with k = 300"
    yield fp8, (a, b[:, :200], one, one, offsets), {}, "b must be [experts, k, n] with k = 300"
    yield fp8, (a, b, columns[0], one, offsets), {}, of_rows + "[256]"
    yield fp8, (a, b, torch.ones(6, 4, device=device), one, offsets), {}, of_rows + "[6, 4]"
    yield fp8, (a, b, one, rows, offsets), {}, of_blocks + "[6]"
    yield fp8, (a, b, one, torch.ones(4, 3, 2, device=device), offsets), {}, of_blocks + "[4, 3, 2]"
    yield fp8, (a, b, rows.half(), one, offsets), {}, "a_scale must be float32 (of blocks also uint8, exponents of two), got float16"
    yield fp8, (a, b, rows.to(byte), one, offsets), {}, "a_scale must be float32"
    yield fp8, (a, b, one, columns.to(byte), offsets), {}, "b_scale must be float32"
    yield fp8, (a, b, one, one, offsets[:3]), {}, "offsets must be [4], got [3]"
    yield fp8, (a, b, one, one, offsets.long()), {}, "offsets must be int32, got int64"
    gate = dict(gated=True)
    of_gates = "b_scale must be one number, [4], [4, 1], [4, 160] or [4, 160, 1] or, of blocks, [4, 2, 3], got [4, 1, 3]"
    yield fp8, (a, b[..., :160], one, torch.ones(4, 1, 3, device=device), offsets), gate, of_gates
    yield fp8, good, dict(out_dtype=torch.float32), "out_dtype must be float16, bfloat16 or float8_e4m3fn, got float32"
    yield fp8, good, dict(out_dtype=FP8), "out_scale must be given for a D of float8_e4m3fn"
    yield fp8, good, dict(out_scale=one, out_dtype=torch.float16), "out_scale must be given for a D of float8_e4m3fn"
    yield fp8, good, dict(out_scale=rows), "out_scale must be [1], got [6]"
    yield fp8, good, dict(bias=columns.half()), "bias must be bfloat16 or float32, got float16"
    yield fp8, good, dict(bias=columns[:, :3]), "bias must be [4, 256], got [4, 3]"
    yield fp8, good, dict(row_scale=rows[:5]), "row_scale must be [6], got [5]"
    yield fp8, good, dict(gather=offsets.long()), "gather must be int32, got int64"
    yield fp8, good, dict(gather=offsets, row_scale=rows), "row_scale must be [4], got [6]"
    yield fp8, good, dict(activation="swish"), "activation must be one of"
    yield fp8, good, dict(activation="swigluoai"), "activation swigluoai needs gated = True"
    yield fp8, good, dict(gate_layout="alternating"), "gate_layout alternating needs gated = True"
    yield fp8, good, dict(kernel="moe"), "kernel 'moe' is not in the registry"
    yield fp8, good, dict(out=torch.empty(6, 255, device=device, dtype=torch.bfloat16)), "out must be [6, 256], got [6, 255]"
    yield fp8, good, dict(out=torch.empty(6, 256, device=device)), "out_dtype must be float16, bfloat16 or float8_e4m3fn, got float32"
    yield fp8, good, dict(out=torch.empty(6, 256, device=device).half(), out_dtype=torch.bfloat16), "out must be bfloat16, got float16"
    yield fp8, (a, b[..., :24], *good[2:]), dict(gated=True, gate_layout="blocks"), "b must have a multiple of 16 columns"
    yield fp8, (a, b[..., :31], *good[2:]), gate, "b must have an even number of columns when gated"
    yield int8, (a, b, *good[2:]), {}, "a must be int8, got float8_e4m3fn"
    yield int8, (ai, bi, one, torch.ones(4, 2, 3, device=device), offsets), {}, "[4, 256] or [4, 256, 1], got [4, 2, 3]"
    yield int8, (ai, bi, torch.ones(6, 3, device=device).to(byte), one, offsets), {}, "a_scale must be float32, got uint8"
    yield int8, of_int8, dict(out_dtype=torch.int32), "out_dtype must be float16 or bfloat16, got int32"
    yield int8, of_int8, dict(out_dtype=FP8), "out_dtype must be float16 or bfloat16, got float8_e4m3fn"
    slabs, counts = (a[:4, None].expand(4, 2, 300).contiguous(), b), offsets
    for masked in (f"{fp8}_masked", f"{int8}_masked"):
        x, w = slabs if "fp8" in masked else (ai[:4, None].expand(4, 2, 300).contiguous(), bi)
        yield masked, (x[0], w, one, one, counts), {}, "a must be [experts, max_rows, k] and b [experts, k, n]"
        yield masked, (x[:3], w, one, one, counts), {}, "a must be [experts, max_rows, k] and b [experts, k, n]"
        of_slabs = "a_scale must be one number, [4, 2], [4, 2, 1] or, of blocks of k, [4, 2, 3], [4, 2, 5] or [4, 2, 10], got [8, 3]"
        yield masked, (x, w, torch.ones(8, 3, device=device), one, counts), {}, of_slabs
        yield masked, (x, w, one, experts[:3], counts), {}, "b_scale must be one number"
        yield masked, (x, w, one, one, counts[:3]), {}, "counts must be [4], got [3]"
        yield masked, (x, w, one, one, counts), dict(row_scale=rows), "row_scale must be [4, 2], got [6]"
        strided = torch.empty(4, 3, 256, device=device, dtype=torch.bfloat16)[:, :2]
        yield masked, (x, w, one, one, counts), dict(out=strided), "out must be one run of rows"


def bad_layers(device: str = "cpu"):
    """(operator, arguments, options, message)"""
    torch.manual_seed(1)
    for dtype, op in ((FP8, "moe_ffn_fp8"), (torch.int8, "moe_ffn_int8")):
        layer = make_layer(dtype, (4, 5, 2, 160, 96), "one", device=device)
        good = (layer.x, layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, layer.weights, layer.ids)
        ones = lambda *shape: torch.ones(shape, device=device)  # noqa: E731
        name = "float8_e4m3fn" if dtype == FP8 else "int8"
        changed = lambda at, x, good=good: (*good[:at], x, *good[at + 1 :])  # noqa: E731
        yield op, changed(0, layer.x.float()), {}, "x must be float16 or bfloat16 where x_scale is None, got float32"
        yield op, changed(0, layer.x[0]), {}, "x must be [tokens, hidden], got [160]"
        yield op, changed(0, layer.x.to(dtype)), {}, f"x must be float16 or bfloat16 where x_scale is None, got {name}"
        yield op, good, dict(x_scale=ones(5)), f"x must be {name} where x_scale is given, got bfloat16"
        of_x = "x_scale must be one number, [5], [5, 1] or, of blocks of k, [5, 2], [5, 3] or [5, 5], got [4]"
        yield op, changed(0, layer.x.to(dtype)), dict(x_scale=ones(4)), of_x
        yield op, changed(1, layer.w13[:, :191]), {}, "w13 must be [experts, 2 * inter, hidden]"
        yield op, changed(1, layer.w13.half()), {}, f"w13 must be {name}, got float16"
        yield op, changed(2, layer.w2.mT), {}, "w2 must be [4, 160, 96], got [4, 96, 160]"
        of_blocks = " or, of blocks, [4, 2, 2]" if dtype == FP8 else ""
        of_w13 = f"w13_scale must be one number, [4], [4, 1], [4, 192] or [4, 192, 1]{of_blocks}, got [192]"
        yield op, changed(3, ones(192)), {}, of_w13
        yield op, changed(4, ones(4, 96)), {}, "w2_scale must be one number, [4], [4, 1], [4, 160] or [4, 160, 1]"
        yield op, changed(5, layer.weights.half()), {}, "weights must be float32, got float16"
        yield op, changed(6, layer.ids.long()), {}, "ids must be int32, got int64"
        yield op, good, dict(b13=ones(4, 191)), "b13 must be [4, 192], got [4, 191]"
        yield op, good, dict(b2=ones(4, 160).half()), "b2 must be bfloat16 or float32, got float16"
        yield op, good, dict(activation="swish"), "activation must be one of"
        yield op, good, dict(gate_layout="rows"), "gate_layout must be halves, alternating or blocks, got 'rows'"
        yield op, good, dict(out_dtype=torch.float32), "out_dtype must be float16 or bfloat16, got float32"
