"""What every loader of a checkpoint asks of its tensors and options, so that each mistake reads alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks.common import DTYPES, FLOAT32_MAX
from ..formats import weight_formats, weight_layout

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _names(options: Sequence[Any]) -> str:
    """a, b or c"""
    return " or ".join(", ".join(map(str, options)).rsplit(", ", 1))


def rounded(function: str, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another type; ValueError of ``function`` where a finite number would become infinite."""
    y = x.to(dtype)
    if x.dtype != dtype and not bool((y.isfinite() | ~x.isfinite()).all()):
        raise ValueError(f"{function}: {name} must be within the range of {dtype}, got {float(x.abs().max()):g}")
    return y


class Loader:
    """Reads tensors of one checkpoint; every complaint is a ValueError that begins with the loader's name.

    Args:
      function: the loader's name.
      tensors: of a layer.
    """

    def __init__(self, function: str, tensors: Mapping[str, Tensor]):
        self.function, self.tensors = function, tensors
        self._first: tuple[str, Tensor] | None = None
        self.require(isinstance(tensors, Mapping), f"tensors must be a mapping of names to tensors, got {type(tensors).__name__}")

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.function}: {message}")

    # ---- options -------------------------------------------------------------------------------------------------------------

    def choice(self, name: str, value: Any, options: Sequence[Any]) -> None:
        """That an option is one of some names or numbers."""
        kind = type(options[0])
        good = isinstance(value, kind) and not isinstance(value, bool) and value in options
        self.require(good, f"{name} must be {_names(options)}, got {value!r}")

    def flag(self, name: str, value: Any) -> None:
        self.require(value is None or isinstance(value, bool), f"{name} must be a bool or None, got {value!r}")

    def group_size(self, group_size: Any, form: str = "int4") -> None:
        rule = weight_formats.group_size_rule(form)
        self.require(weight_formats.legal_group_size(form, group_size), f"group_size must be {rule}, got {group_size}")

    def activations(self, dtype: torch.dtype | None) -> None:
        self.require(dtype is None or dtype in DTYPES, f"dtype must be {_names(DTYPES)}, got {dtype}")

    # ---- tensors -------------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether an optional tensor is there; None is as good as absent."""
        return self.tensors.get(name) is not None

    def get(
        self,
        name: str,
        dtypes: Sequence[torch.dtype] = (),
        shape: Sequence[int] | None = None,
        dims: int | None = None,
    ) -> Tensor:
        """The tensor, of one of some dtypes, of a shape or a number of dimensions, with values, on the device of the others."""
        there = ", ".join(sorted(map(str, self.tensors))) or "none"
        self.require(name in self.tensors, f"tensor '{name}' is missing, got {there}")
        x = self.tensors[name]
        self.require(isinstance(x, Tensor), f"{name} must be a tensor, got {type(x).__name__}")
        self.require(x.layout == torch.strided and not x.is_quantized, f"{name} must be a dense tensor, got {x.layout}, {x.dtype}")
        self.require(not x.is_meta, f"{name} must have values, got a tensor on the meta device")
        self._first = self._first or (name, x)
        of, other = self._first
        self.require(x.device == other.device, f"{name} must be on {of}'s device {other.device}, got {x.device}")
        self.require(not dtypes or x.dtype in dtypes, f"{name} must be {_names(dtypes)}, got {x.dtype}")
        self.require(dims is None or x.dim() == dims, f"{name} must have {dims} dimensions, got {list(x.shape)}")
        self.require(shape is None or list(x.shape) == list(shape), f"{name} must be {list(shape or ())}, got {list(x.shape)}")
        return x.detach()

    def octets(self, name: str, own: torch.dtype, shape: Sequence[int] | None = None, dims: int | None = None) -> Tensor:
        """Bytes, or what they are the bits of, as uint8."""
        x = self.get(name, (torch.uint8, own) if own != torch.uint8 else (own,), shape, dims)
        return x.view(torch.uint8)

    def number(self, name: str) -> float:
        """A tensor of one floating-point number, finite in float32."""
        x = self.get(name, FLOATS)
        self.require(x.numel() == 1, f"{name} must be one number, got {list(x.shape)}")
        value = float(x)
        self.require(abs(value) <= FLOAT32_MAX, f"{name} must be finite in float32, got {value}")
        return value

    def extents(self, name: str, n: int, k: int) -> None:
        """That a weight can have these sizes, which tensor ``name`` says."""
        unit = weight_layout.MULTIPLE
        good = n > 0 and k > 0 and n % unit == 0 and k % unit == 0
        self.require(good, f"{name} must be of n and k that are positive multiples of {unit}, got n = {n} and k = {k}")

    def scales_dtype(self, name: str, stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
        """The 16-bit type that scales, and activations, will have."""
        self.activations(dtype)
        dtype = stored if dtype is None else dtype
        self.require(dtype in DTYPES, f"{name} must be {_names(DTYPES)}, got {dtype}; pass dtype= to round them")
        return dtype

    def scales(self, name: str, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Tensor ``name``, or what was made of it, in 16 bits."""
        y = rounded(self.function, name, x, self.scales_dtype(name, x.dtype, dtype))
        gone = bool((x != 0).any()) and not bool((y != 0).any())
        self.require(not gone, f"{name} must not all round to 0 in {y.dtype}, got magnitudes up to {float(x.abs().max()):g}")
        return y

    def bias(self, shape: Sequence[int], dtype: torch.dtype | None, name: str = "bias") -> Tensor | None:
        """float32 or rounded to ``dtype``; None where there is none."""
        if not self.has(name):
            return None
        bias = self.get(name, FLOATS[:3], shape)
        return bias if dtype is None or bias.dtype == torch.float32 else rounded(self.function, name, bias, dtype)

    def order(self, name: str, k: int, group_size: int) -> Tensor | None:
        """The columns sorted by their group, which tensor ``name`` says, as perm; None where they are sorted already."""
        g_idx = self.get(name, INTEGERS, (k,))
        size = weight_layout.group_columns(k, group_size)
        sorted_groups = torch.arange(k, device=g_idx.device) // size
        if bool((g_idx == sorted_groups).all()):
            return None
        order = torch.argsort(g_idx, stable=True)
        low, high = (int(x) for x in g_idx.aminmax())
        whole = bool((g_idx[order] == sorted_groups).all())
        text = f"must give each of the groups 0 to {int(sorted_groups[-1])} its {size} columns, the last one the rest"
        self.require(whole, f"{name} {text}, got groups {low} to {high}")
        return order.to(torch.int32)
