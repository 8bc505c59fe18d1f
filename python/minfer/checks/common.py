"""What the argument checks of all families stand on.

Every message starts with "minfer::<op>: " and names the argument, what it must be and what it is; all are RuntimeErrors, like
those of the compiled CUDA bindings. Sizes may be symbolic: conditions on them go through ``torch._check``, which guards on a
size with a hint and leaves a run-time assertion for one without.
"""

from __future__ import annotations

import ctypes
import difflib
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._core.registry import kernel_names
from .._core.torch_private import is_certain

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "relu2")
DTYPES = (torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)
QUANTS = ("fp8_tensor", "fp8_token", "fp8_block128", "int8_token")  # 8-bit codes that a result may be stored as
FLOAT32_MAX = torch.finfo(torch.float32).max

DECOMPOSITIONS = ("persistent", "stream_k", "split_k", "ranges")
RASTERS = ("along_m", "along_n")


class Result(NamedTuple):
    """A tensor that an operator returns, on the device of ``like``; contiguous, unless it has ``strides`` of its own."""

    like: torch.Tensor
    shape: Sequence[Any]
    dtype: torch.dtype
    strides: Sequence[Any] | None = None

    def empty(self) -> torch.Tensor:
        if self.strides is not None:
            return self.like.new_empty_strided(tuple(self.shape), tuple(self.strides), dtype=self.dtype)
        return self.like.new_empty(tuple(self.shape), dtype=self.dtype)


class Checker:
    """Raises for one op: ``check(condition, text)``, where text is completed only on failure."""

    def __init__(self, op: str):
        self.op = op

    def __call__(self, condition: Any, template: str, *values: Any) -> None:
        torch._check(condition, lambda: f"minfer::{self.op}: " + template.format(*map(_text, values)))


class ValueChecker(Checker):
    """The same for a function that is no operator: ValueErrors with its name in front."""

    def __call__(self, condition: Any, template: str, *values: Any) -> None:
        if not condition:
            raise ValueError(f"{self.op}: " + template.format(*map(_text, values)))


def is_integer(value: Any) -> bool:
    """Whether it can be a size: an int, of any kind but bool, or a symbolic one."""
    return isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def allocation_error(function: str, size: int, what: str, error: RuntimeError) -> RuntimeError:
    """What to raise where torch could not allocate: an error of torch's type, which callers catch to free memory and try again."""
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
    return kind(f"{function}: could not allocate {size / 2**30:.1f} GiB for {what}: {error}")


def _text(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Size):
        return str(list(value))
    return str(value)


def check_dense(check: Checker, name: str, x: torch.Tensor) -> None:
    check(x.layout == torch.strided, "{} must be a dense tensor, got layout {}", name, x.layout)


def check_dtype(check: Checker, name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    check(x.dtype == dtype, "{} must be {}, got {}", name, dtype, x.dtype)


def check_device(check: Checker, name: str, x: torch.Tensor, other: str, like: torch.Tensor) -> None:
    """That ``x`` is on the device of ``like``, the operand called ``other``."""
    check(x.device == like.device, "{} must be on {}'s device {}, got {}", name, other, like.device, x.device)


def check_tensor(check: Checker, name: str, x: torch.Tensor, dtype: torch.dtype, other: str, like: torch.Tensor) -> None:
    """A dense tensor of a dtype, on the device of ``like``, the operand called ``other``."""
    check_dense(check, name, x)
    check_dtype(check, name, x, dtype)
    check_device(check, name, x, other, like)


def check_shape(check: Checker, name: str, x: torch.Tensor, shape: Sequence[Any]) -> None:
    _check_extents(check, x, shape, "{} must be [{}], got {}", name, ", ".join(str(size) for size in shape))


def check_named_shape(check: Checker, name: str, x: torch.Tensor, modes: str, shape: Sequence[Any]) -> None:
    """The same with the modes' names in the message, such as "[experts, n]"."""
    _check_extents(check, x, shape, "{} must be {} = {}, got {}", name, modes, list(shape))


def check_operand(
    check: Checker, name: str, x: torch.Tensor, dtype: torch.dtype, shape: Sequence[Any], other: str, like: torch.Tensor
) -> None:
    """A dense tensor of a shape and a dtype, on the device of ``like``, the operand called ``other``."""
    check_shape(check, name, x, shape)
    check_tensor(check, name, x, dtype, other, like)


def _check_extents(check: Checker, x: torch.Tensor, shape: Sequence[Any], text: str, *values: Any) -> None:
    check(x.dim() == len(shape), text, *values, x.shape)
    for have, want in zip(x.shape, shape, strict=True):
        check(have == want, text, *values, x.shape)


def check_addend_type(
    check: Checker, name: str, x: torch.Tensor, a: torch.Tensor, a_name: str = "a", dtype: torch.dtype | None = None
) -> None:
    """dtype: what it may have beside float32, where that is not a's."""
    dtype = a.dtype if dtype is None else dtype
    check_dense(check, name, x)
    check(x.dtype in (dtype, torch.float32), "{} must be {} or float32, got {}", name, dtype, x.dtype)
    check_device(check, name, x, a_name, a)


def check_bias(check: Checker, bias: torch.Tensor, a: torch.Tensor, n: int, a_name: str = "a", dtype: torch.dtype | None = None) -> None:
    check_addend_type(check, "bias", bias, a, a_name, dtype)
    check(bias.dim() == 1, "bias must be [n] = [{}], got {}", n, bias.shape)
    check(bias.shape[0] == n, "bias must be [n] = [{}], got {}", n, bias.shape)


def check_c(check: Checker, c: torch.Tensor, a: torch.Tensor, out: Sequence[int], dtype: torch.dtype | None = None) -> None:
    check_addend_type(check, "c", c, a, dtype=dtype)
    text = "c must broadcast to {}, got c {}"
    check(c.dim() <= len(out), text, list(out), c.shape)
    for have, want in zip(reversed(c.shape), reversed(out), strict=False):
        if not is_certain(have == 1):  # a size without a hint is asserted to match at run time
            check(have == want, text, list(out), c.shape)


def check_scalar(check: Checker, name: str, value: Any) -> None:
    # A symbolic float is checked when the compiled graph runs and its value is known.
    if not isinstance(value, torch.SymFloat):
        check(abs(value) <= FLOAT32_MAX, "{} must be finite in float32, got {}", name, value)


def check_eps(check: Checker, eps: Any) -> None:
    if not isinstance(eps, torch.SymFloat):
        check(0 <= eps <= FLOAT32_MAX, "eps must be finite in float32 and not negative, got {}", eps)


def in_float32(value: Any) -> Any:
    """A number as the operators compute with it; a symbolic one stays what it is."""
    return value if isinstance(value, torch.SymFloat) else ctypes.c_float(value).value


def check_rotary_table(
    check: Checker,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    rotary_dim: int | None,
    tokens: Any,
    head_dim: Any,
    other: str,
    like: Any,
) -> None:
    """A rotary embedding's table and the positions of ``tokens`` tokens, on the device of ``like``, the operand called ``other``."""
    check(cos_sin.dim() == 2, "cos_sin must be [length, rotary_dim], got {}", cos_sin.shape)
    rotated = cos_sin.shape[1] if rotary_dim is None else rotary_dim
    for good in (rotated >= 2, rotated % 2 == 0, rotated <= head_dim):
        check(good, "rotary_dim must be even, 2 to head_dim = {}, got {}", head_dim, rotated)
    check_shape(check, "cos_sin", cos_sin, (cos_sin.shape[0], rotated))
    check_tensor(check, "cos_sin", cos_sin, torch.float32, other, like)
    check(positions.dtype in INDICES, "positions must be int64 or int32, got {}", positions.dtype)
    check_shape(check, "positions", positions, (tokens,))
    check_tensor(check, "positions", positions, positions.dtype, other, like)


def check_activation(check: Checker, activation: str) -> None:
    check(activation in ACTIVATIONS, "activation must be one of {}, got '{}'", ", ".join(ACTIVATIONS), activation)


def check_output_codes(check: Checker, quant: str | None, scale: torch.Tensor | None, a: torch.Tensor) -> None:
    """The arguments ``quant`` and ``scale`` of a GEMM, whose tiles of D do not know what is in the rest of a row."""
    if quant is None:
        check(scale is None, "scale must be None where quant is, got {}", None if scale is None else scale.shape)
        return
    if quant in QUANTS[1:]:
        text = (
            "quant must be {}, whose scale is given, got '{}', whose scales follow from whole rows: call it without quant, then minfer.{}"
        )
        check(False, text, QUANTS[0], quant, "quantize_int8" if quant == "int8_token" else "quantize_fp8")
    check(quant == QUANTS[0], "quant must be {}, got '{}'", QUANTS[0], quant)
    check(scale is not None, "scale must be given for {}", quant)
    check_operand(check, "scale", scale, torch.float32, (1,), "a", a)


def output_dtype(quant: str | None, without: torch.dtype) -> torch.dtype:
    """Of a GEMM's D, which without ``quant`` has a dtype of its own."""
    return without if quant is None else torch.float8_e4m3fn


def check_out_dtype(check: Checker, out_dtype: torch.dtype | None, quant: str | None, a: torch.Tensor) -> None:
    """``out_dtype`` of a GEMM, whose D has a's dtype, float32, or the codes' of ``quant``."""
    if out_dtype is None:
        return
    if quant is not None:
        codes = output_dtype(quant, a.dtype)
        check(out_dtype == codes, "out_dtype must be {} for {}, got {}", codes, quant, out_dtype)
    else:
        check(out_dtype in (a.dtype, torch.float32), "out_dtype must be {} or float32, got {}", a.dtype, out_dtype)


def check_out(
    check: Checker, out: torch.Tensor, a: torch.Tensor, shape: Sequence[int], out_dtype: torch.dtype | None, quant: str | None = None
) -> None:
    """``out`` has D's shape and a dtype that D may have; any strides that keep its elements apart (what no kernel can store to is written
    through a copy)."""
    check_dense(check, "out", out)
    if quant is not None:
        check_dtype(check, "out", out, output_dtype(quant, a.dtype))
    else:
        check(out.dtype in (a.dtype, torch.float32), "out must be {} or float32, got {}", a.dtype, out.dtype)
        if out_dtype is not None:
            check(out.dtype == out_dtype, "out must be {} (out_dtype), got {}", out_dtype, out.dtype)
    check_device(check, "out", out, "a", a)
    check_shape(check, "out", out, shape)
    check_apart(check, "out", out)


def check_apart(check: Checker, name: str, x: torch.Tensor) -> None:
    """That a tensor which is written has no two elements at one address."""
    check(not overlaps_itself(x), "{} must not overlap itself, got {} with strides {}", name, x.shape, list(x.stride()))


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements of a tensor lie at one address. With three modes and more, a tensor counts as overlapping unless each mode, from
    the narrowest to the widest, steps beyond all narrower ones; with a symbolic size or stride, as not overlapping."""
    modes = [(stride, size) for size, stride in zip(x.shape, x.stride(), strict=True)]
    if any(isinstance(number, torch.SymInt) for mode in modes for number in mode) or 0 in x.shape:
        return False
    modes = sorted(mode for mode in modes if mode[1] != 1)
    reach, apart = 0, True
    for stride, size in modes:
        apart = apart and stride > reach
        reach += (size - 1) * stride
    if apart or len(modes) != 2:
        return not apart
    (narrow, width), (wide, height) = modes
    divisor = math.gcd(narrow, wide)
    return divisor == 0 or (wide // divisor < width and narrow // divisor < height)


def check_no_overlap(op: str, out: torch.Tensor, written: str = "out", **others: torch.Tensor | None) -> None:
    """``out`` shares no memory with the others, as far as their first and last addresses show it: no two begin at one address, and where
    neither has gaps they have no byte in common. Interleaved views of one memory pass. For tensors that have memory.

    Raises:
      RuntimeError: it does.
    """
    check = Checker(op)
    begin, end = _span(out)
    for name, x in others.items():
        if x is None or x.numel() == 0 or out.numel() == 0:
            continue
        other, last = _span(x)
        dense = end - begin == out.nbytes and last - other == x.nbytes
        meets = begin < last and other < end and (begin == other or dense)
        check(not meets, "{} must not overlap {}, got {} and {} {} in one memory", written, name, out.shape, name, x.shape)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte, and behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def is_same_view(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether each element of one is the other's."""
    return b is not None and (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


# ---- kernel override ---------------------------------------------------------------------------------------------------------


def check_kernel(
    check: Checker, kernel: str | None, family: str = "gemm", check_launch: Callable[[Checker, str], None] | None = None
) -> None:
    """``kernel=``: NAME[@key=value,...]. The name must be in the registry, compiled or not; the launch keys must parse, as ``check_launch``
    says, or as those of a GEMM."""
    if kernel is None:
        return
    name, at, launch = kernel.partition("@")
    names = kernel_names(family)
    if name not in names:
        nearest = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.0)
        check(False, "kernel '{}' is not in the registry; nearest: {}", name, ", ".join(nearest))
    if at:
        (check_launch or check_launch_text)(check, launch)


def check_launch_text(check: Checker, launch: str) -> None:
    """The part of an override behind the @: decomposition=, splits=, swizzle=, raster=, columns=, realign_a=, realign_b=, separated by
    commas."""
    given: dict[str, str] = {}
    for item in launch.split(","):
        key, equals, value = item.partition("=")
        check(key not in given, "kernel option {} is given twice", key)
        given[key] = value
        if key == "decomposition":
            legal = value in DECOMPOSITIONS
            expected = ", ".join(DECOMPOSITIONS)
        elif key == "raster":
            legal = value in RASTERS
            expected = ", ".join(RASTERS)
        elif key in ("splits", "swizzle", "columns"):
            legal = value.isascii() and value.isdigit() and 1 <= int(value) <= 4096
            expected = "the integers 1 to 4096"
        elif key in ("realign_a", "realign_b"):
            legal = value in ("0", "1")
            expected = "0, 1"
        else:
            expected = "decomposition, splits, swizzle, raster, columns, realign_a or realign_b"
            check(False, "kernel option '{}' is not known; expected {}", key, expected)
        check(legal, "kernel option {} must be one of {}, got '{}'", key, expected, value)
    splits, decomposition = given.get("splits", "1"), given.get("decomposition", DECOMPOSITIONS[0])
    alone = int(splits) == 1 or decomposition in ("split_k", "ranges")
    check(alone, "kernel option splits needs decomposition=split_k or ranges, got splits={} with {}", splits, decomposition)
