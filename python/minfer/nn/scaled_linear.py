"""Linear layers of 8-bit weights whose activations are quantised too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks.common import DTYPES, ValueChecker, is_integer
from ..checks.scaled_gemm import FP8, blocks_of
from ..ops.fused import Codes
from ..quantize.scaled_weight import MODES, Fp8Weight, Int8Weight, aligned_rows, quantize_fp8_weight, quantize_int8_weight
from .constant_weights import ConstantWeights


class _ScaledLinear(torch.nn.Module):
    """What Fp8Linear and Int8Linear have in common."""

    _kind: type[Fp8Weight] | type[Int8Weight]
    _dtype: torch.dtype
    _others: tuple[str, ...] = ()  # buffers beside those of both

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        mode: str,
        static: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ):
        super().__init__()
        check, modes = ValueChecker(type(self).__name__), MODES[self._dtype]
        for argument, extent in (("in_features", in_features), ("out_features", out_features)):
            check(is_integer(extent) and extent > 0, "{} must be a positive integer, got {}", argument, extent)
        check(mode in modes, "mode must be one of {}, got '{}'", ", ".join(modes), mode)
        check(dtype in DTYPES, "dtype must be float16 or bfloat16, got {}", dtype)
        n, k = int(out_features), int(in_features)
        self.in_features, self.out_features, self.dtype = k, n, dtype
        shape = {"block128": (blocks_of(n), blocks_of(k)), "channel": (n,), "tensor": (1,)}[mode]
        self.register_buffer("weight", aligned_rows(torch.empty(n, k, dtype=self._dtype, device=device)))
        self.register_buffer("weight_scale", torch.empty(shape, dtype=torch.float32, device=device))
        self.register_buffer("input_scale", torch.empty(1, dtype=torch.float32, device=device) if static else None)
        self.register_buffer("bias", torch.empty(n, dtype=dtype, device=device) if bias else None)
        self.constant_weights: bool | None = False
        self._known = ConstantWeights()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: x for name, x in self._buffers.items() if x is not None and name != "bias"}
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        super()._apply(fn, recurse)
        for name, x in kept.items():  # codes and scales have types of their own, which .half() or .to(dtype) does not mean
            if getattr(self, name).dtype != x.dtype:
                setattr(self, name, x.to(getattr(self, name).device))
        self.weight = aligned_rows(self.weight)  # a copy to another device has no gaps
        if dtype in DTYPES:
            self.dtype = dtype
        return self

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        check, state = ValueChecker(type(self).__name__), dict(state_dict)
        weight, own = state.get(prefix + "weight"), prefix + "weight_scale"
        good = not isinstance(weight, Tensor) or weight.dtype == self._dtype
        check(good, "{} must be {}, got {}", prefix + "weight", self._dtype, getattr(weight, "dtype", None))
        if prefix + "weight_scale_inv" in state and own not in state:  # as DeepSeek's and Qwen3's files call it
            state[own] = state.pop(prefix + "weight_scale_inv")
        scale = state.get(own)
        if isinstance(scale, Tensor):
            blocks = self.weight_scale.dim() == 2
            if scale.dtype == torch.float8_e8m0fnu:
                scale = scale.view(torch.uint8) if blocks else scale.float()
            check(scale.dtype != torch.uint8 or blocks, "{} must be floating-point, got {}", own, scale.dtype)
            if (scale.dtype == torch.uint8) != (self.weight_scale.dtype == torch.uint8):  # exponents of two, or numbers
                self.weight_scale = torch.empty_like(self.weight_scale, dtype=torch.uint8 if scale.dtype == torch.uint8 else torch.float32)
            state[own] = scale if blocks or scale.numel() != self.weight_scale.numel() else scale.reshape(self.weight_scale.shape)
        given = state.get(prefix + "input_scale")
        if isinstance(given, Tensor) and given.numel() == 1:
            state[prefix + "input_scale"] = given.reshape(1)
        super()._load_from_state_dict(state, prefix, *arguments)

    @classmethod
    def _from_weight(cls, weight: Any, dtype: torch.dtype | None) -> Any:
        check = ValueChecker(cls.__name__)
        check(isinstance(weight, cls._kind), "weight must be a {}, got {}", cls._kind.__name__, type(weight).__name__)
        check(not weight.gated, "weight must not be gated: a linear layer has no gate")
        bias = weight.bias
        if dtype is None:
            dtype = bias.dtype if bias is not None and bias.dtype in DTYPES else torch.bfloat16
        static = weight.input_scale is not None
        module = cls(weight.k, weight.n, bias is not None, mode=weight.mode, static=static, dtype=dtype, device="meta")
        module.weight, module.weight_scale = weight.weight, weight.scale
        module.input_scale, module.bias = weight.input_scale, bias
        for name in cls._others:
            setattr(module, name, getattr(weight, name))
        return module

    def _arguments(self) -> dict[str, Any]:
        arguments = {"weight": self.weight, "scale": self.weight_scale, "input_scale": self.input_scale, "bias": self.bias}
        return arguments | {name: getattr(self, name) for name in self._others}

    def quantized_weight(self) -> Any:
        """The weight with its scales, sharing the module's tensors."""
        return self._kind(**self._arguments())

    @property
    def input_quant(self) -> str | None:
        """The ``quant`` that the operator in front should have, so that :meth:`forward` gets its codes."""
        return self.quantized_weight().input_quant

    def forward(self, x: Tensor | Codes) -> Tensor:
        """[.., in_features] -> [.., out_features]. x: float16 or bfloat16, as the result then is; or codes and scales, of which the result
        has ``dtype``."""
        rows, dtype = (x, x.dtype) if isinstance(x, Tensor) else (x[0], self.dtype)
        try:
            constant = self._known.promised(self.constant_weights, rows, self.weight, self.weight_scale)
            return self.quantized_weight().gemm(x, out_dtype=dtype, constant_weights=constant)
        except BaseException:
            self._known.reset()  # no kernel has read the weight
            raise

    def extra_repr(self) -> str:
        weight = self.quantized_weight()
        input_quant = "static" if self.input_scale is not None else "dynamic"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, mode={weight.mode}, "
            f"activations={input_quant}, dtype={self.dtype}"
        )


class Fp8Linear(_ScaledLinear):
    """``torch.nn.Linear`` with an e4m3 weight and activations in e4m3, for inference, by :func:`minfer.gemm_fp8`.

    The constructor leaves the buffers uninitialised, for ``load_state_dict``; :meth:`from_weight` and :meth:`from_linear` fill them. They
    are ``weight`` float8_e4m3fn [n, k], ``weight_scale``, ``input_scale`` and ``bias``, named as in compressed-tensors' files.

    Args:
      in_features, out_features: k and n.
      bias: whether there is one.
      mode: what of the weight has a scale: "block128", 128 x 128 elements; "channel", a row; "tensor", all.
      static: activations are quantised with the one given ``input_scale``; otherwise each token, or each 128 of a token beside
        "block128", gets a scale of its own.
      dtype: of the bias, and of the output where the input is codes: float16 or bfloat16.
      device: of the buffers.

    Attributes:
      constant_weights: as in :class:`W4Linear`, of the weight.

    Raises:
      ValueError: an argument cannot be right.
    """

    _kind, _dtype = Fp8Weight, FP8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mode: str = "block128",
        static: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ):
        super().__init__(in_features, out_features, bias, mode, static, dtype, device)

    @classmethod
    def from_weight(cls, weight: Fp8Weight, *, dtype: torch.dtype | None = None) -> Fp8Linear:
        """A module that holds the tensors of a weight (no copies). dtype: default: the bias's, or bfloat16."""
        return cls._from_weight(weight, dtype)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, mode: str = "block128") -> Fp8Linear:
        """Quantises a linear layer; arguments and errors as in :func:`minfer.quantize.quantize_fp8_weight`."""
        own = linear.weight.dtype
        weight = quantize_fp8_weight(linear.weight, mode, bias=linear.bias)
        return cls.from_weight(weight, dtype=own if own in DTYPES else None)


class Int8Linear(_ScaledLinear):
    """``torch.nn.Linear`` with an int8 weight and activations in int8, for inference, by :func:`minfer.gemm_int8`.

    Args:
      mode: what of the weight has a scale: "channel", a row; "tensor", all.
      zero: static activations have a zero point, the buffer ``input_zero``; the bias is then that of
        :class:`minfer.quantize.Int8Weight`, in float32.
      in_features, out_features, bias, static, dtype, device: as in :class:`Fp8Linear`.

    Attributes:
      constant_weights: as in :class:`W4Linear`, of the weight.

    Raises:
      ValueError: an argument cannot be right.
    """

    _kind, _dtype, _others = Int8Weight, torch.int8, ("input_zero",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mode: str = "channel",
        static: bool = False,
        zero: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ):
        super().__init__(in_features, out_features, bias or zero, mode, static, dtype, device)
        ValueChecker(type(self).__name__)(static or not zero, "zero must be False where activations are not static")
        if zero:
            self.bias = torch.empty(self.out_features, device=device)
        self.register_buffer("input_zero", torch.empty(1, dtype=torch.int8, device=device) if zero else None)

    @classmethod
    def from_weight(cls, weight: Int8Weight, *, dtype: torch.dtype | None = None) -> Int8Linear:
        """A module that holds the tensors of a weight (no copies). dtype: default: the bias's, or bfloat16."""
        return cls._from_weight(weight, dtype)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, mode: str = "channel") -> Int8Linear:
        """Quantises a linear layer; arguments and errors as in :func:`minfer.quantize.quantize_int8_weight`."""
        own = linear.weight.dtype
        weight = quantize_int8_weight(linear.weight, mode, bias=linear.bias)
        return cls.from_weight(weight, dtype=own if own in DTYPES else None)
