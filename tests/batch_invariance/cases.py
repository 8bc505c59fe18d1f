"""Operators as functions of some rows of one input: what a row gives must not depend on which other rows there are, nor on its place.

A case draws a weight and ``rows`` rows of input once. ``call(take)`` runs the operator on the rows that the index tensor names, in its
order, and returns tensors whose first mode is theirs. Bits are compared as integers, so that NaN and signs of zero count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import minfer
import torch
from minfer.formats import weight_formats, weight_layout
from minfer.planning.plan import PROBLEMS, plan_problem
from torch import Tensor

Call = Callable[[Tensor], tuple[Tensor, ...]]

ROWS = (1, 2, 3, 8, 16, 17, 33, 64, 128, 257, 512, 1024, 4096)
FP8, INT8 = torch.float8_e4m3fn, torch.int8


class Draw:
    """Random operands on a device, the same for the same seed."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int):
        self.device, self.dtype, self.seed = device, dtype, seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return x.to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=torch.int32).to(dtype)

    def choice(self, *options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=self.generator, device=self.device))]


@dataclass(frozen=True)
class Case:
    """``make(draw, rows, n, k)`` gives the call. ``planned``: the problem that :func:`minfer.plan` knows, less its m, n and k."""

    operator: str
    format: str
    make: Callable[[Draw, int, int, int], Call]
    planned: tuple[str, dict[str, Any]] | None = None
    most_rows: int = 4096
    n_unit: int = 16
    k_unit: int = 128

    @property
    def name(self) -> str:
        return f"{self.operator}-{self.format}"

    def plan(self, m: int, n: int, k: int, dtype: torch.dtype) -> str:
        """What runs, for a failure's message."""
        if self.planned is None:
            return "no plan"
        op, options = self.planned
        kind = PROBLEMS[op]
        own = options if "dtype" in options else options | {"dtype": dtype}
        plan = plan_problem(kind(m=m, n=n, k=k, **own), batch_invariant=True, device=None if torch.cuda.is_available() else -1)
        return plan.override


CASES: dict[str, Case] = {}


def case(operator: str, format: str = "16bit", **options: Any) -> Callable[[Callable], Callable]:
    def add(make: Callable) -> Callable:
        found = Case(operator, format, make, **options)
        CASES[found.name] = found
        return make

    return add


def operator_of(name: str) -> Callable:
    from minfer._core.operator import OPERATORS

    return OPERATORS[name].wrapper


def tuple_of(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


# ---- dense products -----------------------------------------------------------------------------------------------------------------


def dense(format: str, planned: dict[str, Any] | None = None, **how: Any) -> None:
    @case("gemm", format, planned=("gemm", planned or {}))
    def make(draw: Draw, rows: int, n: int, k: int) -> Call:
        x, w = draw.normal(rows, k), draw.normal(n, k, scale=k**-0.5)
        options = dict(how)
        bias = draw.normal(n) if options.pop("bias", False) else None
        c = draw.normal(rows, n) if options.pop("c", False) else None
        if options.get("quant"):
            options["scale"] = torch.full((1,), 0.02, device=draw.device)
        odd = options.pop("odd", False)

        def call(take: Tensor) -> tuple[Tensor, ...]:
            own = x[take]
            if odd and len(take) % 2:  # rows that TMA does not address
                own = torch.cat([own, own[:, :1]], 1)[:, :-1]
            beta = 0.0 if c is None else 0.5
            return tuple_of(minfer.gemm(own, w.t(), c=None if c is None else c[take], beta=beta, bias=bias, **options))[:1]

        return call


dense("plain")
dense("silu_bias", activation="silu", bias=True)
dense("c_bias", {"c": True}, bias=True, c=True, alpha=0.7)
dense("float32", {"out_dtype": torch.float32}, out_dtype=torch.float32, bias=True, alpha=0.7)
dense("codes", quant="fp8_tensor", bias=True)
dense("rows_at_any_address", odd=True)


@case("gemm", "unaligned_weight", n_unit=1, k_unit=1)
def unaligned(draw: Draw, rows: int, n: int, k: int) -> Call:
    x, w, bias = draw.normal(rows, k - 1), draw.normal(n - 1, k - 1, scale=k**-0.5), draw.normal(n - 1)
    return lambda take: (minfer.gemm(x[take], w.t(), bias=bias, alpha=0.7),)


@case("gemm", "planes")
def planes(draw: Draw, rows: int, n: int, k: int) -> Call:
    """A batch of planes: each row is the first of its own."""
    rows, x, w = min(rows, 257), draw.normal(min(rows, 257), 3, k), draw.normal(n, k, scale=k**-0.5)
    return lambda take: (minfer.gemm(x[take % rows], w.t()),)


@case("gemm_gated", planned=("gemm", {"gated": True}))
def gated(draw: Draw, rows: int, n: int, k: int) -> Call:
    x, w, bias = draw.normal(rows, k), draw.normal(n, k, scale=k**-0.5), draw.normal(n)
    return lambda take: (minfer.gemm_gated(x[take], w.t(), bias=bias),)


def behind_norm(operator: str, format: str, weight: Callable[[Draw, int, int], tuple[tuple[Tensor | None, ...], dict[str, Any]]]) -> None:
    @case(operator, format)
    def make(draw: Draw, rows: int, n: int, k: int) -> Call:
        x, residual, factor = draw.normal(rows, k), draw.normal(rows, k), draw.normal(k)
        operands, options = weight(draw, n, k)

        def call(take: Tensor) -> tuple[Tensor, ...]:
            own = residual[take]
            return operator_of(operator)(x[take], factor, *operands, residual=own, **options), own

        return call


behind_norm("rms_norm_gemm", "16bit", lambda draw, n, k: ((draw.normal(n, k, scale=k**-0.5).t(),), {}))
behind_norm("rms_norm_gemm_gated", "16bit", lambda draw, n, k: ((draw.normal(n, k, scale=k**-0.5).t(),), {}))


# ---- quantised weights --------------------------------------------------------------------------------------------------------------


def quantised_weight(
    draw: Draw, n: int, k: int, name: str, group_size: int, zeros: bool = False
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """(codes, scales, zero points) and the options of their operators."""
    form = weight_formats.FORMATS[name]
    groups = (weight_layout.groups(k, group_size), n)
    unit = 1 / (4.6 * k**0.5) if form.bits == 4 else 1 / (74 * k**0.5)
    unit = max(unit, 0.02) if name == "nvfp4" else unit  # e4m3 has no smaller ones
    scales = draw.uniform(*groups, low=0.5 * unit, high=1.5 * unit)
    scales = scales.to(draw.dtype) if form.scale_type is None else scales.to(form.scale_type).view(torch.uint8)
    codes = draw.integers(0, 2**form.bits, n, k, dtype=torch.uint8)
    if name == "fp8_e4m3":
        codes = torch.where((codes & 0x7F) == 0x7F, codes & 0xFE, codes)  # no NaN
    points = draw.integers(6, 11, *groups).to(draw.dtype) if zeros else None
    if form.bits == 4:
        return (minfer.w4a16_pack(codes, w4_format=name), scales, points), {"group_size": group_size, "w4_format": name}
    return (minfer.w8a16_pack(codes), scales, points), {"group_size": group_size, "w8_format": name}


def quantised(name: str, group_size: int, zeros: bool = False) -> None:
    bits = weight_formats.FORMATS[name].bits
    format = f"{name}_{'row' if group_size < 0 else group_size}" + ("_zeros" if zeros else "")
    known = {"w4_format": name, "group_size": group_size, "zeros": zeros}

    def weight(draw: Draw, n: int, k: int) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        return quantised_weight(draw, n, k, name, group_size, zeros)

    @case(f"w{bits}a16_gemm", format, planned=("w4a16_gemm", known))
    def plain(draw: Draw, rows: int, n: int, k: int) -> Call:
        x, c, bias = draw.normal(rows, k), draw.normal(rows, n), draw.normal(n)
        operands, options = weight(draw, n, k)
        op = operator_of(f"w{bits}a16_gemm")
        return lambda take: (op(x[take], *operands, c=c[take], bias=bias, **options),)

    @case(f"w{bits}a16_gemm_gated", format, planned=("w4a16_gemm", known | {"gated": True}))
    def of_gates(draw: Draw, rows: int, n: int, k: int) -> Call:
        x = draw.normal(rows, k)
        operands, options = weight(draw, n, k)
        op = operator_of(f"w{bits}a16_gemm_gated")
        return lambda take: (op(x[take], *operands, **options),)

    if format in ("int4_128", "int8_row"):
        behind_norm(f"rms_norm_w{bits}a16_gemm", format, weight)
        behind_norm(f"rms_norm_w{bits}a16_gemm_gated", format, weight)


for arguments in (("int4", 128), ("int4", 128, True), ("int4", 32), ("int4", 64, True), ("int4", -1), ("nf4", 64), ("mxfp4", 32)):
    quantised(*arguments)
for arguments in (("nvfp4", 16), ("int8", -1), ("int8", 128, True), ("fp8_e4m3", 128), ("int8", 64)):
    quantised(*arguments)


@case("w4a16_decoder_block", "int4_128")
def decoder_block(draw: Draw, rows: int, n: int, k: int) -> Call:
    """n columns between the MLP's products and behind the next norm, k in the residual and in what attention gives."""
    a, residual = draw.normal(rows, k), draw.normal(rows, k)
    shapes = (("o", k, k), ("gate_up", 2 * n, k), ("down", k, n), ("next", n, k))
    arguments: dict[str, Any] = {"mlp_norm": draw.normal(k), "next_norm": draw.normal(k), "o_bias": draw.normal(k)}
    for name, columns, depth in shapes:
        (arguments[f"{name}_qweight"], arguments[f"{name}_scales"], _), _ = quantised_weight(draw, columns, depth, "int4", 128)

    def call(take: Tensor) -> tuple[Tensor, ...]:
        own = residual[take]
        return minfer.w4a16_decoder_block(a=a[take], residual=own, **arguments), own

    return call


@case("decoder_block", "16bit")
def dense_decoder_block(draw: Draw, rows: int, n: int, k: int) -> Call:
    a, residual = draw.normal(rows, k), draw.normal(rows, k)
    arguments: dict[str, Any] = {"mlp_norm": draw.normal(k), "next_norm": draw.normal(k), "o_bias": draw.normal(k)}
    arguments |= {
        f"{name}_weight": draw.normal(*shape) for name, *shape in (("o", k, k), ("gate_up", 2 * n, k), ("down", k, n), ("next", n, k))
    }

    def call(take: Tensor) -> tuple[Tensor, ...]:
        own = residual[take]
        return minfer.decoder_block(a=a[take], residual=own, **arguments), own

    return call


@case("fp8_decoder_block", "blocks")
def fp8_decoder_block(draw: Draw, rows: int, n: int, k: int) -> Call:
    a, residual = draw.normal(rows, k), draw.normal(rows, k)
    arguments: dict[str, Any] = {"mlp_norm": draw.normal(k), "next_norm": draw.normal(k), "o_bias": draw.normal(k)}
    for name, columns, depth in (("o", k, k), ("gate_up", 2 * n, k), ("down", k, n), ("next", n, k)):
        blocks = (2, -(-n // 128), -(-depth // 128)) if name == "gate_up" else (-(-columns // 128), -(-depth // 128))
        arguments |= {f"{name}_weight": codes_of(draw, FP8, columns, depth), f"{name}_scale": draw.uniform(*blocks, low=1e-4, high=1e-3)}

    def call(take: Tensor) -> tuple[Tensor, ...]:
        own = residual[take]
        return minfer.fp8_decoder_block(a=a[take], residual=own, **arguments), own

    return call


# ---- operands of 8 bits -------------------------------------------------------------------------------------------------------------


def codes_of(draw: Draw, dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == INT8:
        return draw.integers(-127, 128, *shape).to(INT8)
    return draw.normal(*shape, scale=50.0, dtype=torch.float32).clamp(-400, 400).to(FP8)


def scaled(dtype: torch.dtype, format: str, **how: Any) -> None:
    op, blocks = "gemm_fp8" if dtype == FP8 else "gemm_int8", how.get("blocks", False)
    known = {"dtype": dtype, "block_scaled": blocks, "fast_accum": how.get("fast_accum", False)}

    def operands(draw: Draw, rows: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, w = codes_of(draw, dtype, rows, k), codes_of(draw, dtype, n, k)
        number = lambda *shape: draw.uniform(*shape, low=1e-4, high=1e-2)  # noqa: E731
        if blocks:
            return x, w, number(rows, -(-k // 128)), number(-(-n // 128), -(-k // 128))
        return x, w, number(rows if how.get("by_row", True) else 1), number(n)

    @case(op, format, planned=("scaled_gemm", known))
    def plain(draw: Draw, rows: int, n: int, k: int) -> Call:
        x, w, of_x, of_w = operands(draw, rows, n, k)
        bias, c = draw.normal(n), draw.normal(rows, n)
        options = {"fast_accum": True} if how.get("fast_accum") else {}
        zero = draw.integers(-5, 6, rows) if how.get("zero") else None
        sums = w.to(torch.int32).sum(1, dtype=torch.int32) if zero is not None else None

        def call(take: Tensor) -> tuple[Tensor, ...]:
            own = of_x if len(of_x) == 1 and not how.get("by_row", True) else of_x[take]
            more = {} if zero is None else {"a_zero": zero[take], "b_sums": sums}
            return (
                operator_of(op)(x[take], w.t(), own, of_w, bias=bias, c=c[take], beta=0.5, out_dtype=draw.dtype, **options, **more),
                operator_of(op)(x[take], w.t(), own, of_w, out_dtype=torch.float32, **options, **more),
            )

        return call

    if how.get("gated", True):

        @case(f"{op}_gated", format, planned=("scaled_gemm", known | {"gated": True}))
        def of_gates(draw: Draw, rows: int, n: int, k: int) -> Call:
            x, w, of_x, of_w = operands(draw, rows, n, k)
            if blocks:  # scales of gates and of ups
                of_w = draw.uniform(2, -(-n // 256), -(-k // 128), low=1e-4, high=1e-2)

            def call(take: Tensor) -> tuple[Tensor, ...]:
                own = of_x if len(of_x) == 1 and not how.get("by_row", True) else of_x[take]
                return (operator_of(f"{op}_gated")(x[take], w.t(), own, of_w, out_dtype=draw.dtype),)

            return call


scaled(FP8, "rows")
scaled(FP8, "tensor", by_row=False)
scaled(FP8, "blocks", blocks=True)
scaled(FP8, "fast", fast_accum=True, gated=False)
scaled(INT8, "rows")
scaled(INT8, "zero_points", zero=True, gated=False)

for of_x in (FP8, INT8):

    @case("w4a8_gemm", "fp8" if of_x == FP8 else "int8", planned=("w4a8_gemm", {"dtype": of_x}))
    def w4a8(draw: Draw, rows: int, n: int, k: int, dtype: torch.dtype = of_x) -> Call:
        x, scale, bias = codes_of(draw, dtype, rows, k), draw.uniform(rows, 1, low=1e-3, high=1e-2), draw.normal(n)
        (codes, scales, _), _ = quantised_weight(draw, n, k, "int4", 128)
        return lambda take: (minfer.w4a8_gemm(x[take], scale[take], codes, scales, bias=bias),)

    @case("w4a8_gemm_gated", "fp8" if of_x == FP8 else "int8", planned=("w4a8_gemm", {"dtype": of_x, "gated": True}))
    def w4a8_gated(draw: Draw, rows: int, n: int, k: int, dtype: torch.dtype = of_x) -> Call:
        x, scale = codes_of(draw, dtype, rows, k), draw.uniform(rows, 1, low=1e-3, high=1e-2)
        (codes, scales, _), _ = quantised_weight(draw, n, k, "int4", 128)
        return lambda take: (minfer.w4a8_gemm_gated(x[take], scale[take], codes, scales),)


# ---- experts ------------------------------------------------------------------------------------------------------------------------


def routed(draw: Draw, rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and ids: some experts have many tokens, some none."""
    favour = draw.normal(experts, scale=2.0, dtype=torch.float32)
    logits = draw.normal(rows, experts, dtype=torch.float32) + favour
    return minfer.moe_router(logits, top_k)


def layer(format: str, make_weights: Callable[..., Callable[[Tensor, Tensor, Tensor], Tensor]], operator: str) -> None:
    @case(operator, format)
    def make(draw: Draw, rows: int, n: int, k: int) -> Call:
        experts, top_k, inter = draw.choice(8, 32), draw.choice(1, 2, 6), min(n, 1024) // 128 * 128 or 128
        hidden = min(k, 2048)
        x, (weights, ids) = draw.normal(rows, hidden), routed(draw, rows, experts, top_k)
        run = make_weights(draw, experts, inter, hidden)
        return lambda take: (run(x[take], weights[take], ids[take]),)


def of_16_bits(draw: Draw, experts: int, inter: int, hidden: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    w13, w2 = draw.normal(experts, 2 * inter, hidden, scale=hidden**-0.5), draw.normal(experts, hidden, inter, scale=inter**-0.5)
    b13, b2 = draw.normal(experts, 2 * inter), draw.normal(experts, hidden)
    return lambda x, weights, ids: minfer.moe_ffn(x, w13, w2, weights, ids, b13=b13, b2=b2)


def of_4_bits(name: str, group_size: int) -> Callable[..., Callable[[Tensor, Tensor, Tensor], Tensor]]:
    def make(draw: Draw, experts: int, inter: int, hidden: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def stacked(n: int, k: int) -> tuple[Tensor, Tensor]:
            each = [quantised_weight(draw, n, k, name, group_size)[0] for _ in range(experts)]
            return torch.stack([x[0] for x in each]), torch.stack([x[1] for x in each])

        (w13, s13), (w2, s2) = stacked(2 * inter, hidden), stacked(hidden, inter)
        options = {"group_size": group_size, "w4_format": name}
        return lambda x, weights, ids: minfer.moe_ffn_w4a16(x, w13, s13, None, w2, s2, None, weights, ids, **options)

    return make


def of_8_bits(dtype: torch.dtype, blocks: bool) -> Callable[..., Callable[[Tensor, Tensor, Tensor], Tensor]]:
    def make(draw: Draw, experts: int, inter: int, hidden: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        w13, w2 = codes_of(draw, dtype, experts, 2 * inter, hidden), codes_of(draw, dtype, experts, hidden, inter)
        number = lambda *shape: draw.uniform(*shape, low=1e-4, high=1e-3)  # noqa: E731
        if blocks:
            s13, s2 = number(experts, 2 * inter // 128, hidden // 128), number(experts, hidden // 128, inter // 128)
        else:
            s13, s2 = number(experts, 2 * inter), number(experts, hidden)
        op = minfer.moe_ffn_fp8 if dtype == FP8 else minfer.moe_ffn_int8
        return lambda x, weights, ids: op(x, w13, w2, s13, s2, weights, ids)

    return make


layer("16bit", of_16_bits, "moe_ffn")
for arguments in (("int4", 128), ("int4", 32), ("mxfp4", 32), ("nvfp4", 16)):
    layer(f"{arguments[0]}_{arguments[1]}", of_4_bits(*arguments), "moe_ffn_w4a16")
layer("rows", of_8_bits(FP8, False), "moe_ffn_fp8")
layer("blocks", of_8_bits(FP8, True), "moe_ffn_fp8")
layer("rows", of_8_bits(INT8, False), "moe_ffn_int8")


@case("moe_router_gemm")
def router_gemm(draw: Draw, rows: int, n: int, k: int) -> Call:
    experts = draw.choice(8, 60, 128, 256)
    x, gate = draw.normal(rows, k), draw.normal(experts, k, scale=k**-0.5)
    return lambda take: minfer.moe_router_gemm(x[take], gate, 6)


@case("moe_router")
def router(draw: Draw, rows: int, n: int, k: int) -> Call:
    logits = draw.normal(rows, 128, dtype=torch.float32)
    return lambda take: minfer.moe_router(logits[take], 8, scoring="sigmoid")


# ---- rows ---------------------------------------------------------------------------------------------------------------------------


def of_rows(operator: str, run: Callable[[Draw, int, int], Call], format: str = "16bit", **options: Any) -> None:
    @case(operator, format, **options)
    def make(draw: Draw, rows: int, n: int, k: int) -> Call:
        width = draw.choice(128, 1000, 4096, 5120, 8192, 1001, 16384, 40000)
        return run(draw, min(rows, (1 << 25) // width), width)


def norm(draw: Draw, rows: int, width: int) -> Call:
    x, factor = draw.normal(rows, width), draw.normal(width)
    return lambda take: (minfer.rms_norm(x[take % rows], factor),)


def added_norm(draw: Draw, rows: int, width: int) -> Call:
    x, residual, factor = draw.normal(rows, width), draw.normal(rows, width), draw.normal(width)

    def call(take: Tensor) -> tuple[Tensor, ...]:
        own = residual[take % rows]
        return minfer.add_rms_norm(x[take % rows], own, factor), own

    return call


def misaligned_norm(draw: Draw, rows: int, width: int) -> Call:
    """Rows at any address: those of an odd number of them."""
    x, factor = draw.normal(rows, width), draw.normal(width)

    def call(take: Tensor) -> tuple[Tensor, ...]:
        own = x[take % rows]
        return (minfer.rms_norm(torch.cat([own[:, :1], own], 1)[:, 1:] if len(take) % 2 else own, factor),)

    return call


def layer_norm(draw: Draw, rows: int, width: int) -> Call:
    x, factor, bias = draw.normal(rows, width), draw.normal(width), draw.normal(width)
    return lambda take: (minfer.layer_norm(x[take % rows], factor, bias),)


def quantised_norm(quant: str) -> Callable[[Draw, int, int], Call]:
    def run(draw: Draw, rows: int, width: int) -> Call:
        x, factor = draw.normal(rows, width), draw.normal(width)

        def call(take: Tensor) -> tuple[Tensor, ...]:
            codes, scales = minfer.rms_norm(x[take % rows], factor, quant=quant)
            return codes, scales.reshape(len(take), -1)

        return call

    return run


def quantiser(quant: str) -> Callable[[Draw, int, int], Call]:
    def run(draw: Draw, rows: int, width: int) -> Call:
        x = draw.normal(rows, width)

        def call(take: Tensor) -> tuple[Tensor, ...]:
            codes, scales = minfer.ops.quantize(x[take % rows], quant)
            return codes, scales.reshape(len(take), -1)

        return call

    return run


def elementwise(run: Callable[[Tensor, Tensor], Tensor], columns: int = 1) -> Callable[[Draw, int, int], Call]:
    def make(draw: Draw, rows: int, width: int) -> Call:
        x, other = draw.normal(rows, columns * width), draw.normal(columns * width)
        return lambda take: tuple_of(run(x[take % rows], other))

    return make


of_rows("rms_norm", norm)
of_rows("rms_norm", misaligned_norm, "rows_at_any_address")
of_rows("add_rms_norm", added_norm)
of_rows("layer_norm", layer_norm)
of_rows("softmax", elementwise(lambda x, _: minfer.softmax(x)))
of_rows("log_softmax", elementwise(lambda x, _: minfer.log_softmax(x.float())), "float32")
of_rows("activation", elementwise(lambda x, bias: minfer.activation(x, "gelu", bias=bias)))
of_rows("gated_activation", elementwise(lambda x, _: minfer.gated_activation(x), 2))
for mode in ("fp8_token", "fp8_block128", "int8_token"):
    of_rows("rms_norm_quantized", quantised_norm(mode), mode)
    of_rows("quantize", quantiser(mode), mode)


@case("hadamard")
def hadamard(draw: Draw, rows: int, n: int, k: int) -> Call:
    block = draw.choice(8, 128, 512, 1536, 4096)
    x = draw.normal(rows, block * draw.choice(1, 2, 3))
    return lambda take: (minfer.hadamard(x[take], block),)


@case("rope")
def rope(draw: Draw, rows: int, n: int, k: int) -> Call:
    x, turns, places = draw.normal(rows, 12, 128), minfer.rope_cache(10000.0, 128, 4096, device=draw.device), draw.integers(0, 4096, rows)

    def call(take: Tensor) -> tuple[Tensor, ...]:
        own = x[take]
        minfer.rope(own[:, :8], own[:, 8:], turns, places[take].long())
        return (own,)

    return call


@case("embedding")
def embedding(draw: Draw, rows: int, n: int, k: int) -> Call:
    table, ids = draw.normal(1000, 1000), draw.integers(0, 1000, rows)
    return lambda take: (minfer.embedding(ids[take], table, scale=33.3),)


@case("qk_norm_rope_append")
def append(draw: Draw, rows: int, n: int, k: int) -> Call:
    """A token's queries, and its keys and values where they are stored, whatever pages these are in."""
    heads, heads_kv, head_dim, page = 16, 4, 128, 64
    x, turns = draw.normal(rows, heads + 2 * heads_kv, head_dim), minfer.rope_cache(1e4, head_dim, 4096, device=draw.device)
    places, factors = draw.integers(0, 4096, rows).long(), (draw.normal(head_dim), draw.normal(head_dim))
    pages = -(-rows // page)

    def call(take: Tensor) -> tuple[Tensor, ...]:
        found = []
        for kv_format in ("16bit", "fp8_e4m3", "int8"):
            cache = minfer.allocate_kv_cache(pages, page, heads_kv, head_dim, kv_format=kv_format, dtype=draw.dtype, device=draw.device)
            slots = torch.randperm(pages * page, device=take.device)[: len(take)]
            found.append(minfer.qk_norm_rope_append(x[take], *factors, turns, places[take], cache.k, cache.v, slots, **cache.scales()))
            of_tokens = [x for x in cache if isinstance(x, Tensor) and x.shape[:2] == (pages, page)]
            assert len(of_tokens) >= 2
            found += rows_of(tuple(x.flatten(0, 1) for x in of_tokens), slots)
        return tuple(found)

    return call


def draws(format: str, **options: Any) -> None:
    @case("sample", format, most_rows=1024)
    def make(draw: Draw, rows: int, n: int, k: int) -> Call:
        vocabulary = draw.choice(1000, 32000, 128256)
        rows = min(rows, (1 << 27) // vocabulary)
        logits = draw.normal(rows, vocabulary, scale=3.0, dtype=torch.float32)
        of_rows = {"seeds": draw.integers(0, 2**31 - 1, rows).long(), "offsets": draw.integers(0, 1000, rows).long()}
        for name, value in options.items():
            if name == "counts":
                of_rows |= {name: draw.integers(-1, 3, rows, vocabulary), "presence_penalties": draw.uniform(rows)}
            else:
                of_rows[name] = value(draw, rows)

        def call(take: Tensor) -> tuple[Tensor, ...]:
            return minfer.sample(logits[take % rows], top_logprobs=5, **{name: x[take % rows] for name, x in of_rows.items()})

        return call


warm = {"temperatures": lambda draw, rows: draw.uniform(rows, low=0.3, high=1.5)}
cut = {"top_ps": lambda draw, rows: draw.uniform(rows, low=0.5), "top_ks": lambda draw, rows: draw.integers(-1, 200, rows)}
draws("greedy", temperatures=lambda draw, rows: torch.zeros(rows, device=draw.device))
draws("all_tokens", **warm)
draws("truncated", **warm, **cut)
draws("penalised", **warm, **cut, counts=None)


# ---- attention ----------------------------------------------------------------------------------------------------------------------

PAGE, GROUP_TOKENS = 64, 64
LONGEST = 1500  # keys of a sequence


def softmax_options(draw: Draw, heads: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if draw.choice(True, False):
        found["window_left"] = draw.choice(0, 37, 333)
    if draw.choice(True, False):
        found["softcap"] = draw.choice(7.0, 30.0)
    if draw.choice(True, False):
        found["sinks"] = draw.normal(heads, dtype=torch.float32).to(draw.dtype)
    return found


def filled_cache(draw: Draw, kv_format: str, pages: int, heads: int, dim: int, batch: int) -> minfer.KvCache:
    cache = minfer.allocate_kv_cache(
        pages, PAGE, heads, dim, kv_format=kv_format, dtype=draw.dtype, device=draw.device, batch=batch, group_tokens=GROUP_TOKENS
    )
    for codes in (cache.k, cache.v):
        if kv_format == "16bit":
            codes.copy_(draw.normal(*codes.shape))
        elif kv_format == "fp8_e4m3":
            bits(codes).copy_(bits(draw.normal(*codes.shape, dtype=FP8)))
        else:
            codes.copy_(draw.integers(*((-127, 128) if kv_format == "int8" else (0, 256)), *codes.shape))
    low, high = {"int4": (0.06, 0.19), "int8": (0.008, 0.023)}.get(kv_format, (0.5, 1.5))
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None:
            scale.copy_(draw.uniform(*scale.shape, low=low, high=high))
    if kv_format == "int4":
        for minima in (cache.k_scale[:, :, :, 1], cache.v_scale.chunk(2, 2)[1]):
            minima.copy_(draw.uniform(*minima.shape, low=-1.5, high=-0.5))
        for residual in (cache.k_residual, cache.v_residual):
            residual.copy_(draw.normal(*residual.shape))
    return cache


class PagedSequences:
    """Sequences of random lengths, ``tokens`` in all unless ``lengths`` says which, in pages that lie in any order."""

    def __init__(self, draw: Draw, kv_format: str, tokens: int, lengths: list[int] | None = None):
        if lengths is None:
            lengths = []
            while sum(lengths) < tokens:
                lengths.append(min(int(draw.integers(1, LONGEST + 1, 1)), tokens - sum(lengths)))
        self.heads, heads_kv = draw.choice((4, 4), (8, 2), (8, 1), (7, 1))
        self.dim = draw.choice(64, 128)
        self.lengths = torch.tensor(lengths, device=draw.device)
        columns = -(-max(lengths) // PAGE)
        order = torch.randperm(len(lengths) * columns, generator=draw.generator, device=draw.device)
        self.table = order.view(len(lengths), columns).to(torch.int32)
        self.cache = filled_cache(draw, kv_format, order.numel(), heads_kv, self.dim, len(lengths))
        self.options = softmax_options(draw, self.heads)

    def attend(self, q: Tensor, sequences: Tensor, seq_lens: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """Of calls over some of the sequences, any number of times each, with so many of their keys."""
        scales = self.cache.scales()
        for name in ("k_residual", "v_residual"):
            if scales.get(name) is not None:
                scales[name] = scales[name][sequences]
        table = self.table[sequences]
        lengths = seq_lens.to(torch.int32)
        return minfer.attention_paged(q, self.cache.k, self.cache.v, lengths, block_table=table, **scales, **self.options, **more)


def over_cache(kv_format: str) -> None:
    """Rows are the tokens of prompts: all of a prompt in one call, in chunks of several sizes, or token by token, beside others."""

    @case("attention_paged", kv_format)
    def make(draw: Draw, rows: int, n: int, k: int) -> Call:
        prompts = PagedSequences(draw, kv_format, rows)
        q = draw.normal(rows, prompts.heads, prompts.dim)
        places = torch.arange(rows, device=draw.device)
        sequence = torch.repeat_interleave(torch.arange(len(prompts.lengths), device=draw.device), prompts.lengths)
        position = places - (prompts.lengths.cumsum(0) - prompts.lengths)[sequence]
        chunks = itertools.chain((LONGEST,), itertools.cycle((64, 7, 512, 1, 100)))

        def call(take: Tensor) -> tuple[Tensor, ...]:
            order = take.argsort()
            own, chunk = take[order], next(chunks)
            follows = torch.zeros(len(own), dtype=torch.bool, device=own.device)
            follows[1:] = (own[1:] == own[:-1] + 1) & (position[own[1:]] % chunk != 0)
            begins = torch.nonzero(~follows).flatten()
            ends = torch.cat([begins[1:], begins.new_tensor([len(own)])])
            out, lse = prompts.attend(
                q[own],
                sequence[own[begins]],
                position[own[ends - 1]] + 1,
                cu_seqlens_q=torch.cat([begins, ends[-1:]]).to(torch.int32),
                max_seqlen_q=int((ends - begins).max()),
            )
            back = order.argsort()
            return out[back], lse.T[back]

        return call


for of_cache in ("16bit", "fp8_e4m3", "int8"):
    over_cache(of_cache)


@case("attention_paged", "int4", most_rows=512)
def over_int4(draw: Draw, rows: int, n: int, k: int) -> Call:
    """Rows are sequences with the queries of a step: what a key is, code or residual, depends on the sequence's length in the call."""
    few = LONGEST if draw.device != "cpu" else 200
    lengths = draw.integers(1, few + 1, rows).tolist()
    sequences, queries = PagedSequences(draw, "int4", 0, lengths), draw.choice(1, 3)
    lengths = torch.tensor(lengths, device=draw.device).clamp(min=queries)
    q = draw.normal(rows, queries, sequences.heads, sequences.dim)
    return lambda take: sequences.attend(q[take], take, lengths[take])


@case("attention", most_rows=64)
def attends(draw: Draw, rows: int, n: int, k: int) -> Call:
    """Rows are planes of a batch."""
    (heads, heads_kv), dim = draw.choice((4, 4), (8, 2), (7, 1)), draw.choice(40, 64, 128, 192)
    length = int(draw.integers(1, 700 if draw.device != "cpu" else 60, 1))
    q = draw.normal(rows, length, heads, dim)
    keys, values = (draw.normal(rows, length + 5, heads_kv, dim) for _ in range(2))
    options = softmax_options(draw, heads) | {"causal": True}
    return lambda take: minfer.attention(q[take], keys[take], values[take], **options)


@case("attention_varlen", most_rows=64)
def attends_end_to_end(draw: Draw, rows: int, n: int, k: int) -> Call:
    """Rows are sequences, end to end in the order in which they are taken."""
    (heads, heads_kv), dim = draw.choice((4, 4), (8, 2), (8, 1)), draw.choice(64, 128)
    most = 600 if draw.device != "cpu" else 40
    lengths = draw.integers(1, most + 1, rows)
    q = draw.normal(rows, most, heads, dim)
    keys, values = (draw.normal(rows, most, heads_kv, dim) for _ in range(2))
    options = softmax_options(draw, heads) | {"causal": draw.choice(True, False)}
    if not options["causal"]:
        options.pop("window_left", None)

    def call(take: Tensor) -> tuple[Tensor, ...]:
        own = torch.arange(most, device=q.device) < lengths[take][:, None]
        ends = torch.nn.functional.pad(lengths[take].cumsum(0), (1, 0)).to(torch.int32)
        flat = [x[take][own] for x in (q, keys, values)]
        out, lse = minfer.attention_varlen(*flat, ends, ends, most, most, **options)
        padded = out.new_zeros(len(take), most, *out.shape[1:]), lse.new_zeros(len(take), most, heads)
        padded[0][own], padded[1][own] = out, lse.T
        return padded

    return call


# ---- comparisons --------------------------------------------------------------------------------------------------------------------


def bits(x: Tensor) -> Tensor:
    """As integers, so that NaN equals itself and signs of zero count."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def sum_of_bits(x: Tensor) -> int:
    """A number that tells tensors of different bits apart, but for chance: of integers, so that no order of addition matters."""
    flat = bits(x).flatten().long()
    places = torch.arange(1, len(flat) + 1, device=x.device)
    return int(((flat + 1) * (places * 0x9E3779B1 ^ places << 17)).sum())


def differing(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> int:
    """How many numbers differ in a bit."""
    assert [x.shape for x in a] == [x.shape for x in b]
    return sum(int((bits(x) != bits(y)).sum()) for x, y in zip(a, b, strict=True))


def rows_of(x: tuple[Tensor, ...], take: Tensor) -> tuple[Tensor, ...]:
    """Of each of the tensors; not every kernel of torch knows 8-bit numbers."""
    return tuple(bits(one)[take].view(one.dtype) for one in x)


def sizes(case: Case, draw: Draw, most_n: int = 8192, most_k: int = 16384) -> tuple[int, int]:
    """Of a random weight, and now and then of a usual one."""
    usual = ((4096, 4096), (6144, 4096), (4096, 14336), (1024, 8192), (512, 7168), (3584, 18944))
    n, k = draw.choice(*usual)
    if draw.choice(True, False):

        def span(most: int, unit: int) -> int:
            return max(int(2 ** float(draw.uniform(1, low=6, high=math.log2(most))) / unit) * unit, unit)

        n, k = span(most_n, case.n_unit), span(most_k, case.k_unit)
    return min(max(n, 32), most_n), min(max(k, 128), most_k)


def check(case: Case, device: str, dtype: torch.dtype, seed: int, rows: tuple[int, ...] = ROWS, *, digest: Any = None, **most: int) -> int:
    """Compares each number of rows with all rows at once. Rows, neighbours and places are random. Returns how many numbers were compared.
    ``digest``: of hashlib, which is given all results of all rows.

    Raises:
      AssertionError: bits differ; the message names operator, format, n, k, m and the plan.
    """
    draw = Draw(device, dtype, seed)
    n, k = sizes(case, draw, **most)
    rows = tuple(m for m in rows if m <= case.most_rows)
    with minfer.batch_invariant():
        call = case.make(draw, max(rows), n, k)
        everything = torch.arange(max(rows), device=device)
        whole = call(everything)
        if digest is not None:
            for x in whole:
                digest.update(str(sum_of_bits(x)).encode())
        compared = 0
        for m in rows:
            take = torch.randperm(max(rows), generator=draw.generator, device=device)[:m]
            found, expected = call(take), rows_of(whole, take)
            wrong = differing(found, expected)
            compared += sum(x.numel() for x in found)
            plans = "" if not wrong else f"; plans: {case.plan(m, n, k, dtype)} and {case.plan(max(rows), n, k, dtype)}"
            assert not wrong, f"{case.name} {dtype}, seed {seed}, n = {n}, k = {k}, m = {m} of {max(rows)}: {wrong} numbers differ{plans}"
    return compared


# ---- draws beside others that want something else ------------------------------------------------------------------------------------

NEUTRAL = {"repetition_penalties": 1.0, "presence_penalties": 0.0, "frequency_penalties": 0.0}


def neutral(rows: int, vocabulary: int, device: str) -> dict[str, Tensor]:
    """What a request without penalties passes where another has some."""
    numbers = {name: torch.full((rows,), value, device=device) for name, value in NEUTRAL.items()}
    return numbers | {"counts": torch.randint(-1, 3, (rows, vocabulary), dtype=torch.int32, device=device)}


def check_options_of_others(device: str, vocabulary: int) -> None:
    """An engine passes the options of all its requests to one call: what those of others are changes nothing.

    Raises:
      AssertionError: it does.
    """
    rows = 6 if device == "cpu" else 130
    draw = Draw(device, torch.float32, 4)
    logits = draw.normal(rows, vocabulary, scale=3.0)
    seeds, offsets = draw.integers(0, 2**31 - 1, rows).long(), draw.integers(0, 1000, rows).long()
    temperatures = draw.uniform(rows, low=0.3, high=1.5)
    greedy = torch.arange(rows, device=device) % 3 == 0
    temperatures[greedy] = 0.0
    own = {"temperatures": temperatures, "seeds": seeds, "offsets": offsets}
    all_kept = {"top_ps": torch.ones(rows, device=device), "top_ks": torch.zeros(rows, dtype=torch.int32, device=device)}
    with minfer.batch_invariant():
        plain = minfer.sample(logits, top_logprobs=3, **own)
        for others in (all_kept, neutral(rows, vocabulary, device), all_kept | neutral(rows, vocabulary, device)):
            assert differing(minfer.sample(logits, top_logprobs=3, **own, **others), plain) == 0, list(others)
        more = minfer.sample(logits, top_logprobs=7, **own)
        assert differing((*more[:2], more[2][:, :3], more[3][:, :3]), plain) == 0
        alone = minfer.sample(logits[greedy], top_logprobs=3, temperature=0.0)
        assert differing(alone, tuple(x[greedy] for x in plain)) == 0
