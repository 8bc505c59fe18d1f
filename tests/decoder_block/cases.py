"""Calls of the decoder block, with their truth in float64 and its errors; calls that cannot be right.

The residual comes out of a chain of three products. Its bound adds up what the documented roundings amount to, as independent errors, and
allows ten of their standard deviations. The returned value is held to the bound of docs/numerics.md, section 7.9, of the stored residual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import minfer
import torch
from torch import Tensor

from tests.contracts import numerics_cases as numerics
from tests.quantized_gemm.weight_format_cases import Weight, pack

DTYPES = (torch.float16, torch.bfloat16)
EPS = 1e-5
FIXED, FIXED_COLUMNS = 2.0**-22, 128  # of one launch: what an activation may be off by, in units of the largest of so many columns
SIGMAS = 10.0
WEIGHTS = ("o", "gate_up", "down", "next")


# ---- the truth -------------------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Numbers in float64, and the standard deviations of what they are off by."""

    value: Tensor
    deviation: Tensor


@dataclass
class Steps:
    """What is rounded in a call. ``separate``: norms and weights are rounded to ``dtype``; ``fixed``: activations are of 23 bits."""

    dtype: torch.dtype
    separate: bool = True
    fixed: bool = True

    @property
    def rounding(self) -> float:
        """The standard deviation of a rounding, relative."""
        return 0.58 * numerics.UNIT[self.dtype]

    def fixed_error(self, x: Tensor) -> Tensor | float:
        """What a 23-bit activation may be off by, for each element of x [m, k]."""
        if not self.fixed or x.shape[-1] == 0:
            return 0.0
        k = x.shape[-1]
        blocks = torch.nn.functional.pad(x.abs(), (0, -k % FIXED_COLUMNS)).unflatten(-1, (-1, FIXED_COLUMNS))
        return FIXED * blocks.amax(-1).repeat_interleave(FIXED_COLUMNS, -1)[:, :k]

    def fixed_deviation(self, x: Tensor) -> Tensor | float:
        """The standard deviation of that; what it may be at most is as good where it is small."""
        return self.fixed_error(x)

    def weight_error(self, w: Tensor) -> Tensor | None:
        """Of docs/numerics.md, section 4: None where a weight is exact."""
        return w.abs() * (numerics.UNIT[self.dtype] + 2.0**-22) + numerics.TINY[self.dtype] if self.separate else None

    def product(self, x: Rows, w: Tensor, *addends: Tensor | None) -> Rows:
        """x.W^T + the addends, not rounded."""
        variance = (x.deviation**2 + self.fixed_deviation(x.value) ** 2) @ (w**2).t()
        if self.separate:
            variance = variance + (x.value**2) @ (self.rounding * w).square().t()
        value, magnitude = x.value @ w.t(), x.value.abs() @ w.abs().t()
        for addend in addends:
            if addend is not None:
                value, magnitude = value + addend.double(), magnitude + addend.double().abs()
        single = 2.0**-23 * (2.0 + math.sqrt(max(w.shape[1], 1)) / 4) * magnitude
        return Rows(value, (variance + single**2).sqrt())

    def rounded(self, x: Rows) -> Rows:
        return Rows(x.value, (x.deviation**2 + (self.rounding * x.value) ** 2).sqrt() + numerics.TINY[self.dtype])

    def norm(self, x: Rows, weight: Tensor, eps: float, offset: float) -> Rows:
        """As it is multiplied."""
        value, off = numerics.rms_norm_rows(x.value, weight, eps, offset)
        inverse = (x.value.square().mean(-1, keepdim=True) + eps).rsqrt()
        of_inverse = (x.value * x.deviation).square().sum(-1, keepdim=True).sqrt() / max(x.value.shape[-1], 1) * inverse**2
        factor = (weight.double() + offset).abs() * inverse
        y = Rows(value, ((factor * x.deviation) ** 2 + (value * of_inverse) ** 2 + off**2).sqrt())
        return self.rounded(y) if self.separate else y

    def gated(self, x: Rows, activation: str) -> Rows:
        """activation(gate) * up of blocks of 8 gate and 8 up columns, not rounded."""
        (gate, up), (gate_off, up_off) = (y.unflatten(-1, (-1, 2, 8)).unbind(-2) for y in x)
        act, own = numerics.activated(gate, activation, "cuda")
        act_off = numerics.slope(gate.abs() + SIGMAS * gate_off, activation) * gate_off + own
        deviation = ((act_off * (up.abs() + up_off)) ** 2 + (act * up_off) ** 2).sqrt() + 2.0**-23 * (act * up).abs()
        return Rows((act * up).flatten(-2), deviation.flatten(-2))


@dataclass
class Truth:
    """A call's operands: a [m, k], residual [m, h] as it was, weights in float64 [rows, columns]."""

    steps: Steps
    a: Tensor
    residual: Tensor
    weights: dict[str, Tensor]
    norms: dict[str, Tensor]
    biases: dict[str, Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)  # eps, weight_offset, activation
    a_deviation: Tensor | None = None  # what a is off by where it is not given, but computed

    def of_residual(self) -> Rows:
        """Of the residual that is stored, with its last rounding."""
        steps, w, bias, eps, offset = self.steps, self.weights, self.biases, self.options["eps"], self.options["weight_offset"]
        deviation = torch.zeros_like(self.a, dtype=torch.float64) if self.a_deviation is None else self.a_deviation
        a = Rows(self.a.double(), deviation)
        x = steps.rounded(steps.product(a, w["o"], self.residual, bias["o"]))
        y = steps.norm(x, self.norms["mlp"], eps, offset)
        h = steps.rounded(steps.gated(steps.product(y, w["gate_up"]), self.options["activation"]))
        x2 = steps.product(h, w["down"], x.value, bias["down"])
        return steps.rounded(Rows(x2.value, (x2.deviation**2 + x.deviation**2).sqrt()))

    def residual_bound(self, found: Rows) -> Tensor:
        return SIGMAS * found.deviation + numerics.UNIT[self.steps.dtype] * found.value.abs() + numerics.TINY[self.steps.dtype]

    def returned(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Section 7.9 of the residual as it was stored: exact and bound."""
        steps = self.steps
        rows = numerics.rms_norm_rows(stored, self.norms["next"], self.options["eps"], self.options["weight_offset"])
        y, off = numerics.stored(rows, steps.dtype) if steps.separate else rows
        w, bias = self.weights["next"], self.biases["next"]
        error = off + steps.fixed_error(y)
        return numerics.activated_bound(y, w, a_error=error, error=steps.weight_error(w), bias=bias, out_dtype=steps.dtype)


# ---- calls -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A call. Biases of a's dtype or float32, or none; ``loud``: a column of a and of the residual is 1000 times the others."""

    m: int
    k: int = 256
    h: int = 512
    inter: int = 1024
    n: int = 136
    dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    group_size: int = 128
    activation: str = "silu"
    weight_offset: float = 0.0
    loud: bool = False

    def make(self, device: str = "cpu") -> Operands:
        return Operands(self, device)

    def options(self) -> dict[str, Any]:
        return dict(eps=EPS, weight_offset=self.weight_offset, group_size=self.group_size, activation=self.activation)

    def change(self, **fields: Any) -> Case:
        return replace(self, **fields)


def make_weight(n: int, k: int, group_size: int, dtype: torch.dtype, device: str) -> Weight:
    """Weights of about 1 / sqrt(k), their scales of two binades."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    shape = (1 if group_size == -1 else -(-k // group_size), n)
    scales = (torch.exp2(torch.rand(shape, device=device) * 2 - 1) / (5 * math.sqrt(max(k, 1)))).to(dtype)
    return Weight("int4", codes, scales, None, group_size, dtype, 1.0, pack("int4", codes))


class Operands:
    """A call's tensors: a [m, k], the residual, four weights, norms and biases. ``a_deviation``: of Truth."""

    a_deviation: Tensor | None = None

    def __init__(self, case: Case, device: str):
        m, k, h, inter, n, dtype = case.m, case.k, case.h, case.inter, case.n, case.dtype

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=device) * scale

        self.case = case
        a, residual = randn(m, k), randn(m, h)
        if case.loud:
            a[:, k // 3] *= 1000
            residual[:, h // 3] *= 1000
        self.a, self.residual = a.to(dtype), residual.to(dtype)
        self.before = self.residual.clone()
        sizes = {"o": (h, k), "gate_up": (2 * inter, h), "down": (h, inter), "next": (n, h)}
        self.make_weights(sizes, device)
        offset = 1.0 - case.weight_offset
        self.norms = {name: (offset + randn(h, scale=0.3)).to(dtype) for name in ("mlp", "next")}
        lengths = {"o": h, "down": h, "next": n}
        self.biases = {name: None if case.bias is None else randn(size).to(case.bias) for name, size in lengths.items()}

    def make_weights(self, sizes: dict[str, tuple[int, int]], device: str) -> None:
        """By their names, of [rows, columns]."""
        case = self.case
        self.weights = {name: make_weight(*size, case.group_size, case.dtype, device) for name, size in sizes.items()}

    def arguments(self) -> dict[str, Any]:
        """By the names of the schema, but for the residual's."""
        found: dict[str, Any] = {"a": self.a, "mlp_norm": self.norms["mlp"], "next_norm": self.norms["next"]}
        for name, weight in self.weights.items():
            found |= {f"{name}_qweight": weight.qweight, f"{name}_scales": weight.scales}
        return found | {f"{name}_bias": bias for name, bias in self.biases.items()} | self.case.options()

    def call(self, **more: Any) -> Tensor:
        """On the residual as it was."""
        self.residual.copy_(self.before)
        return self.again(**more)

    def again(self, **more: Any) -> Tensor:
        """On the residual as it is."""
        return minfer.w4a16_decoder_block(**(self.arguments() | {"residual": self.residual} | more))

    def truth(self, steps: Steps, before: Tensor | None = None) -> Truth:
        weights = {name: numerics.parts_of(weight).exact for name, weight in self.weights.items()}
        before = self.before if before is None else before
        return Truth(steps, self.a, before, weights, self.norms, self.biases, self.case.options(), self.a_deviation)

    def steps(self, kernel: str | None) -> Steps:
        """What is rounded by a kernel; None: by either."""
        return Steps(self.case.dtype, kernel != "one_launch", kernel != "separate")

    def check(self, have: Tensor, kernel: str | None = None, before: Tensor | None = None, residual: Tensor | None = None) -> None:
        """``kernel``: as it was asked for; None: either. Every element within its bound, and all of the residual together."""
        case, what = self.case, f"{kernel} {self.case}"
        residual = self.residual if residual is None else residual
        assert have.dtype == case.dtype and have.shape == (case.m, case.n) and have.is_contiguous(), what
        truth = self.truth(self.steps(kernel), before)
        found = truth.of_residual()
        numerics.judge(residual, found.value, truth.residual_bound(found), f"{what}: residual")
        if residual.numel() >= 256:
            off = ((residual.double() - found.value) / found.deviation).square().mean().sqrt()
            assert off <= 2, f"{what}: the residual is off by {off:.3g} standard deviations over all"
        if case.n > 0:
            numerics.judge(have, *truth.returned(residual), what)


def by_operators(t: Operands) -> tuple[Tensor, Tensor]:
    """D and the residual by the package's other operators."""
    case, args = t.case, t.arguments()

    def product(name: str, x: Tensor, **more: Any) -> Tensor:
        op = minfer.w4a16_gemm_gated if name == "gate_up" else minfer.w4a16_gemm
        return op(x, args[f"{name}_qweight"], args[f"{name}_scales"], group_size=case.group_size, **more)

    def norm(name: str, x: Tensor) -> Tensor:
        return minfer.rms_norm(x, args[name], EPS, weight_offset=case.weight_offset)

    x = product("o", t.a, c=t.before, bias=args["o_bias"])
    h = product("gate_up", norm("mlp_norm", x), activation=case.activation)
    x = product("down", h, c=x, bias=args["down_bias"])
    return product("next", norm("next_norm", x), bias=args["next_bias"]), x


# ---- calls that cannot be right ------------------------------------------------------------------------------------------------------


def good(device: str) -> dict[str, Any]:
    """Keywords of a call that is right: 3 rows, k = 64, h = 128, inter = 72, n = 40, groups of 32."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    found: dict[str, Any] = {"a": zeros(3, 64), "residual": zeros(3, 128), "mlp_norm": zeros(128), "next_norm": zeros(128)}
    for name, n, k in (("o", 128, 64), ("gate_up", 144, 128), ("down", 128, 72), ("next", 40, 128)):
        found[f"{name}_qweight"] = zeros(-(-n // 64), -(-k // 64), 512, dtype=torch.int32)
        found[f"{name}_scales"] = zeros(-(-k // 32), n)
    return found | {"group_size": 32}


def bad(device: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(Changes of the good call, message)."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    single = torch.float32
    yield dict(group_size=48), r"group_size must be -1 .*power of two .*32.*, got 48"
    yield dict(group_size=0), r"group_size must be -1 .*power of two .*32.*, got 0"
    yield dict(a=torch.tensor(1.0, device=device).half()), r"a must have at least one mode, got \[\]"
    yield dict(a=zeros(3, 64, dtype=single)), "a must be float16 or bfloat16, got "
    yield dict(residual=zeros(3, 128, dtype=torch.bfloat16)), "residual must have a's dtype "
    yield dict(residual=zeros(4, 128)), r"residual must be \[..., hidden\] with a's rows, got a \[3, 64\], residual \[4, 128\]"
    yield dict(residual=zeros(1, 3, 128)), r"residual must be \[..., hidden\] with a's rows, got a \[3, 64\], residual \[1, 3, 128\]"
    yield dict(residual=zeros(3, 136)[:, :128]), r"residual must be contiguous, got \[3, 128\]"
    yield dict(residual=zeros(1, 128).expand(3, 128)), r"residual must be contiguous, got \[3, 128\]"
    yield dict(residual=zeros(3, 120)), r"o_scales must have 120 columns, got \[2, 128\]"
    yield dict(a=zeros(3, 60)), "k must be a multiple of 8, got 60"
    yield dict(residual=zeros(3, 124), o_scales=zeros(2, 124)), r"o_scales must have n = 124 columns, a multiple of 8, got \[2, 124\]"
    for name, groups, n in (("o", 2, 128), ("gate_up", 4, 144), ("down", 3, 128), ("next", 4, 40)):
        words = (-(-n // 64), -(-groups // 2), 512)
        yield {f"{name}_scales": zeros(groups, n, dtype=single)}, f"{name}_scales must have a's dtype "
        yield {f"{name}_scales": zeros(n)}, rf"{name}_scales must be \[groups, n\], got \[{n}\]"
        yield {f"{name}_scales": zeros(groups + 1, n)}, rf"{name}_scales must be .*\[{groups}, {n}\].*, got \[{groups + 1}, {n}\]"
        yield {f"{name}_qweight": zeros(*words)}, f"{name}_qweight must be "
        text = rf"{name}_qweight must be .*\[{words[0]}, {words[1]}, 512\].*, got \[{words[0]}, {words[1]}, 1024\]"
        yield {f"{name}_qweight": zeros(*words[:2], 1024, dtype=torch.int32)}, text
    yield dict(gate_up_scales=zeros(4, 152)), r"gate_up_scales must have a multiple of 16 columns .*, got \[4, 152\]"
    wrong_gate = dict(gate_up_qweight=zeros(3, 2, 512, dtype=torch.int32), gate_up_scales=zeros(4, 136))
    yield wrong_gate, r"gate_up_scales must have a multiple of 16 columns .*, got \[4, 136\]"
    yield dict(down_scales=zeros(3, 120)), r"down_scales must have 128 columns, got \[3, 120\]"
    yield dict(next_scales=zeros(4, 36)), r"next_scales must have n = 36 columns, a multiple of 8, got \[4, 36\]"
    for name in ("mlp_norm", "next_norm"):
        yield {name: zeros(127)}, rf"{name} must be \[128\], got \[127\]"
        yield {name: zeros(128, dtype=single)}, f"{name} must be "
    for name, size in (("o_bias", 128), ("down_bias", 128), ("next_bias", 40)):
        yield {name: zeros(size - 1)}, rf"{name} must be \[n\] = \[{size}\], got \[{size - 1}\]"
        yield {name: zeros(size, dtype=torch.bfloat16)}, f"{name} must be .* or .*, got "
    yield dict(eps=-1.0), "eps must be finite in float32 and not negative, got -1"
    yield dict(weight_offset=math.inf), "weight_offset must be finite in float32, got inf"
    yield dict(activation="swish"), "activation must be one of .*, got 'swish'"
    yield dict(kernel="two_launches"), "kernel must be one_launch or separate, got 'two_launches'"
    memory = zeros(6, 128)
    yield dict(residual=memory[:3], a=memory.view(-1)[256:448].view(3, 64)), "residual must not overlap a, got "
    yield dict(residual=memory[:3], mlp_norm=memory[1]), "residual must not overlap mlp_norm, got "
    yield dict(residual=memory[:3], next_norm=memory[2]), "residual must not overlap next_norm, got "
    yield dict(residual=memory[:3], o_scales=memory[2:4]), "residual must not overlap o_scales, got "
    yield dict(residual=memory[:3], down_scales=memory[2:5]), "residual must not overlap down_scales, got "
    yield dict(residual=memory[:3], o_bias=memory[0]), "residual must not overlap o_bias, got "
    yield dict(residual=memory[:3], down_bias=memory[0]), "residual must not overlap down_bias, got "
    yield dict(residual=memory[:3], next_bias=memory[0, :40]), "residual must not overlap next_bias, got "
