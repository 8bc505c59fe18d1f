"""Calls of the decoder block of e4m3 weights, as :mod:`tests.decoder_block.cases` has those of int4 ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import minfer
import torch
from torch import Tensor

from tests.decoder_block.cases import Case, Operands, Steps, Truth

FP8 = torch.float8_e4m3fn
MODES = ("block128", "channel", "tensor")


@dataclass
class Fp8Steps(Steps):
    """Weights are exact, norms are not rounded. What activations are off by is that of codes with a scale for each ``columns``, or for all;
    in one launch (``codes`` is False) that of float16 numbers."""

    codes: bool = True
    columns: int | None = None

    def fixed_error(self, x: Tensor) -> Tensor | float:
        k = x.shape[-1]
        if k == 0:
            return 0.0
        columns = (self.columns or k) if self.codes else 128
        blocks = torch.nn.functional.pad(x.abs(), (0, -k % columns)).unflatten(-1, (-1, columns))
        largest = blocks.amax(-1).repeat_interleave(columns, -1)[:, :k]
        relative, least = (2.0**-4 * (1 + 2.0**-20), 2.0**-10 / 448) if self.codes else (2.0**-11, 2.0**-38)
        return relative * x.abs() + least * largest

    def fixed_deviation(self, x: Tensor) -> Tensor | float:
        """Half of an ulp is evenly spread over, and is half as large for the upper end of a binade."""
        return self.fixed_error(x) * (0.58 * 0.72)


@dataclass
class Fp8Case(Case):
    """``mode``: what the weights' scales are of."""

    mode: str = "block128"

    def make(self, device: str = "cpu") -> Fp8Operands:
        return Fp8Operands(self, device)

    def options(self) -> dict[str, Any]:
        options = super().options()
        del options["group_size"]
        return options

    def change(self, **fields: Any) -> Fp8Case:
        return replace(self, **fields)


def make_scale(n: int, k: int, mode: str, gated: bool, device: str) -> Tensor:
    """Of two binades, so that weights are of about 1 / sqrt(k)."""
    blocks = (2, -(-n // 256), -(-k // 128)) if gated else (-(-n // 128), -(-k // 128))
    shape = {"block128": blocks, "channel": (n,), "tensor": (1,)}[mode]
    return torch.exp2(torch.rand(shape, device=device) * 2 - 1) / math.sqrt(max(k, 1))


class Fp8Operands(Operands):
    """``codes`` and ``scales`` by the weights' names."""

    def make_weights(self, sizes: dict[str, tuple[int, int]], device: str) -> None:
        self.codes = {name: torch.randn(size, device=device).to(FP8) for name, size in sizes.items()}
        self.scales = {name: make_scale(*size, self.case.mode, name == "gate_up", device) for name, size in sizes.items()}

    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"a": self.a, "mlp_norm": self.norms["mlp"], "next_norm": self.norms["next"]}
        for name, codes in self.codes.items():
            found |= {f"{name}_weight": codes, f"{name}_scale": self.scales[name]}
        return found | {f"{name}_bias": bias for name, bias in self.biases.items()} | self.case.options()

    def again(self, **more: Any) -> Tensor:
        return minfer.fp8_decoder_block(**(self.arguments() | {"residual": self.residual} | more))

    def dense(self, name: str) -> Tensor:
        """A weight in float64."""
        weight = minfer.quantize.Fp8Weight(self.codes[name], self.scales[name], gated=name == "gate_up")
        return weight.dequantize(torch.float64)

    def truth(self, steps: Steps, before: Tensor | None = None) -> Truth:
        weights = {name: self.dense(name) for name in self.codes}
        before = self.before if before is None else before
        return Truth(steps, self.a, before, weights, self.norms, self.biases, self.case.options(), self.a_deviation)

    def steps(self, kernel: str | None) -> Steps:
        columns = 128 if self.case.mode == "block128" else None
        return Fp8Steps(self.case.dtype, separate=False, codes=kernel != "one_launch", columns=columns)


def by_operators(t: Fp8Operands) -> tuple[Tensor, Tensor]:
    """D and the residual by the package's other operators."""
    case, args = t.case, t.arguments()
    quant = "fp8_block128" if case.mode == "block128" else "fp8_token"

    def product(name: str, x: tuple[Tensor, Tensor], **more: Any) -> Tensor:
        op = minfer.gemm_fp8_gated if name == "gate_up" else minfer.gemm_fp8
        return op(x[0], args[f"{name}_weight"].t(), x[1], args[f"{name}_scale"], out_dtype=case.dtype, **more)

    def coded(x: Tensor) -> tuple[Tensor, Tensor]:
        return minfer.quantize_fp8(x, quant.removeprefix("fp8_"))

    def norm(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return minfer.rms_norm(x, args[name], args["eps"], weight_offset=case.weight_offset, quant=quant)

    x = product("o", coded(t.a), c=t.before, beta=1.0, bias=args["o_bias"])
    h = product("gate_up", norm("mlp_norm", x), activation=case.activation)
    x = product("down", coded(h), c=x, beta=1.0, bias=args["down_bias"])
    return product("next", norm("next_norm", x), bias=args["next_bias"]), x


def check_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """All of torch's checks but that of the schema, which multiplies clones of the arguments."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    result = torch.library.opcheck(op, args, kwargs, test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}, result


def good(device: str) -> dict[str, Any]:
    """Keywords of a call that is right: 3 rows, k = 64, h = 128, inter = 72, n = 40, scales of rows."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    found: dict[str, Any] = {"a": zeros(3, 64), "residual": zeros(3, 128), "mlp_norm": zeros(128), "next_norm": zeros(128)}
    for name, n, k in (("o", 128, 64), ("gate_up", 144, 128), ("down", 128, 72), ("next", 40, 128)):
        found |= {f"{name}_weight": zeros(n, k, dtype=FP8), f"{name}_scale": zeros(n, dtype=torch.float32)}
    return found


def bad(device: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(Changes of the good call, message)."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    single = torch.float32
    yield dict(a=torch.tensor(1.0, device=device).half()), r"a must have at least one mode, got \[\]"
    yield dict(a=zeros(3, 64, dtype=single)), "a must be float16 or bfloat16, got "
    yield dict(residual=zeros(4, 128)), r"residual must be \[..., hidden\] with a's rows, got a \[3, 64\], residual \[4, 128\]"
    yield dict(residual=zeros(3, 136)[:, :128]), r"residual must be contiguous, got \[3, 128\]"
    yield dict(residual=zeros(3, 120)), r"o_weight must have 120 rows, got \[128, 64\]"
    for name, n, k in (("o", 128, 64), ("gate_up", 144, 128), ("down", 128, 72), ("next", 40, 128)):
        yield {f"{name}_weight": zeros(n, k)}, f"{name}_weight must be .*, got "
        yield {f"{name}_weight": zeros(n, dtype=FP8)}, rf"{name}_weight must be \[n, k\], got \[{n}\]"
        yield {f"{name}_weight": zeros(n, k + 8, dtype=FP8)}, rf"{name}_weight must have {k} columns, got \[{n}, {k + 8}\]"
        yield {f"{name}_scale": zeros(n + 1, dtype=single)}, rf"{name}_scale must be one number, \[{n}\] or \[{n}, 1\].*, got \[{n + 1}\]"
        yield {f"{name}_scale": zeros(n)}, f"{name}_scale must be .*, got "
    wrong_gate = dict(gate_up_weight=zeros(136, 128, dtype=FP8), gate_up_scale=zeros(136, dtype=single))
    yield wrong_gate, r"gate_up_weight must have a multiple of 16 rows .*, got \[136, 128\]"
    yield dict(gate_up_scale=zeros(2, 1, dtype=single)), r"gate_up_scale must be .*\[2, 1, 1\], got \[2, 1\]"
    for name in ("mlp_norm", "next_norm"):
        yield {name: zeros(127)}, rf"{name} must be \[128\], got \[127\]"
    for name, size in (("o_bias", 128), ("down_bias", 128), ("next_bias", 40)):
        yield {name: zeros(size - 1)}, rf"{name} must be \[n\] = \[{size}\], got \[{size - 1}\]"
        yield {name: zeros(size, dtype=torch.bfloat16)}, f"{name} must be .* or .*, got "
    yield dict(eps=-1.0), "eps must be finite in float32 and not negative, got -1"
    yield dict(weight_offset=math.inf), "weight_offset must be finite in float32, got inf"
    yield dict(activation="swish"), "activation must be one of .*, got 'swish'"
    yield dict(kernel="two_launches"), "kernel must be one_launch or separate, got 'two_launches'"
    memory = zeros(6, 128)
    yield dict(residual=memory[:3], mlp_norm=memory[1]), "residual must not overlap mlp_norm, got "
    yield dict(residual=memory[:3], next_scale=memory.view(-1).view(single)[:40]), "residual must not overlap next_scale, got "
