"""Modules that hold packed weights."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from ..checks.common import DTYPES, ValueChecker, check_scalar, is_integer
from ..checks.quantized_gemm import check_format, check_group_size, check_permutation
from ..checks.quantized_scaled_gemm import check_usable
from ..formats import weight_formats, weight_layout
from ..ops.output_codes import Codes
from ..ops.quantized_gemm import w4a16_gemm, w8a16_gemm
from ..ops.quantized_scaled_gemm import w4a8_gemm
from ..quantize import W4Weight, W8Weight, quantize_w4, quantize_w8
from .constant_weights import ConstantWeights

_BUFFERS = ("qweight", "scales", "zeros", "perm", "bias")


class _PackedLinear(torch.nn.Module):
    """What W4Linear and W8Linear have in common. ``alpha`` is a number, and in the state dict one of float64."""

    _kind: type[W4Weight] | type[W8Weight]
    _bits: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group_size: int,
        zeros: bool,
        perm: bool,
        form: str,
        alpha: float,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ):
        super().__init__()
        check, unit = self._checker(), weight_layout.MULTIPLE
        for argument, extent in (("in_features", in_features), ("out_features", out_features)):
            good = is_integer(extent) and extent > 0 and extent % unit == 0
            check(good, "{} must be a positive multiple of {}, got {}", argument, unit, extent)
        check_format(check, self._bits, form)
        check_group_size(check, group_size, form)
        check(not zeros or weight_formats.FORMATS[form].zero is not None, "zeros must be False for {}, which has no zero points", form)
        check(dtype in DTYPES, "dtype must be float16 or bfloat16, got {}", dtype)
        check(isinstance(alpha, numbers.Real), "alpha must be a number, got {}", type(alpha).__name__)
        check_scalar(check, "alpha", alpha)
        scales_dtype = dtype if weight_formats.FORMATS[form].scale_type is None else torch.uint8
        in_features, out_features, group_size = int(in_features), int(out_features), int(group_size)
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.alpha = group_size, float(alpha)
        setattr(self, self._form, form)

        def buffer(name: str, wanted: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device) if wanted else None)

        rows = weight_layout.groups(in_features, group_size)
        buffer("qweight", True, weight_layout.packed_shape(out_features, in_features, self._bits), torch.int32)
        buffer("scales", True, (rows, out_features), scales_dtype)
        buffer("zeros", zeros, (rows, out_features), scales_dtype)
        buffer("perm", perm, (in_features,), torch.int32)
        buffer("bias", bias, (out_features,), dtype)
        self.constant_weights: bool | None = False
        self._known = ConstantWeights()

    @classmethod
    def _checker(cls) -> ValueChecker:
        return ValueChecker(cls.__name__)

    @property
    def _form(self) -> str:
        return f"w{self._bits}_format"

    @classmethod
    def _from_weight(cls, weight: Any) -> Any:
        check = cls._checker()
        check(isinstance(weight, cls._kind), "weight must be a {}, got {}", cls._kind.__name__, type(weight).__name__)
        form = f"w{cls._bits}_format"
        cls._check_perm("perm", weight.perm, weight.k)
        module = cls(
            weight.k,
            weight.n,
            weight.bias is not None,
            group_size=weight.group_size,
            zeros=weight.zeros is not None,
            perm=weight.perm is not None,
            alpha=weight.alpha,
            device="meta",
            **{form: getattr(weight, form)},
        )
        for name, x in weight.tensors().items():
            setattr(module, name, x)
        return module

    def weight(self) -> Any:
        """The packed weight, sharing the module's tensors."""
        tensors = {name: getattr(self, name) for name in _BUFFERS}
        sizes = {"group_size": self.group_size, "n": self.out_features, "k": self.in_features, "alpha": self.alpha}
        return self._kind(**tensors, **sizes, **{self._form: getattr(self, self._form)})

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "alpha"] = torch.tensor(self.alpha, dtype=torch.float64)

    @classmethod
    def _check_perm(cls, name: str, perm: Tensor | None, k: int) -> None:
        """That k numbers are a permutation. It is checked when they are loaded, since the operators do not read values."""
        if not isinstance(perm, Tensor) or perm.is_meta or tuple(perm.shape) != (k,):
            return
        check = cls._checker()
        whole = not (perm.is_floating_point() or perm.is_complex() or perm.dtype == torch.bool)
        check(whole, "{} must be a permutation of 0 to {}, got numbers of {}", name, k - 1, perm.dtype)
        check_permutation(check, name, perm, k)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *arguments):
        # Before anything is copied: a state dict that cannot be right changes nothing here. What torch sees by itself is left to it.
        if self.perm is not None:
            self._check_perm(prefix + "perm", state_dict.get(prefix + "perm"), self.in_features)
        own = prefix + "alpha"
        if own in state_dict:
            check, alpha = self._checker(), state_dict[own]
            check(isinstance(alpha, Tensor | numbers.Real), "{} must be one number, got {}", own, type(alpha).__name__)
            alpha = torch.as_tensor(alpha)
            good = alpha.numel() == 1 and not alpha.is_complex()
            check(good, "{} must be one number, got {}", own, alpha.shape)
            if not alpha.is_meta:  # a number without a value stays away, as the values of buffers do
                check_scalar(check, own, float(alpha))
                self.alpha = float(alpha)
            state_dict = {key: x for key, x in state_dict.items() if key != own}
        elif prefix + "qweight" in state_dict and self.alpha != 1.0:
            # Another part of a checkpoint may have it. One from before it was always written has none where it is 1.
            missing_keys.append(own)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *arguments)

    def _tensors(self) -> tuple[Tensor | None, ...]:
        buffers = self._buffers
        try:
            return tuple([buffers[name] for name in _BUFFERS])  # as attributes they cost 0.5 us each
        except KeyError:  # somebody has made parameters of them
            return tuple([getattr(self, name) for name in _BUFFERS])

    def extra_repr(self) -> str:
        present = ", ".join(f"{name}={getattr(self, name) is not None}" for name in ("bias", "zeros", "perm"))
        alpha = "" if self.alpha == 1.0 else f", alpha={self.alpha:g}"
        dtype = "" if self.scales.dtype == torch.uint8 else f", dtype={self.scales.dtype}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {present}, group_size={self.group_size}, "
            f"{self._form}={getattr(self, self._form)}{alpha}{dtype}"
        )


class W4Linear(_PackedLinear):
    """``torch.nn.Linear`` with a 4-bit weight, for inference: y = x.W^T + bias by :func:`minfer.w4a16_gemm`.

    The constructor leaves the buffers uninitialised, for ``load_state_dict``; :meth:`from_weight` and :meth:`from_linear` fill them.

    Args:
      in_features, out_features: k and n, multiples of 8.
      bias, zeros, perm: which of the optional buffers there are.
      group_size: as the format asks: -1 or a power of two >= 32; 32 for mxfp4, 16 for nvfp4.
      w4_format: "int4", "nf4", "mxfp4" or "nvfp4".
      alpha: factor of the whole weight, nvfp4's global scale; loading a state dict replaces it.
      dtype: of scales, zeros, bias, input and output: float16 or bfloat16. Scales of mxfp4 and nvfp4 are uint8.
      device: of the buffers.

    Attributes:
      constant_weights: the operator's argument of that name. False (the default): never. None: True in calls where it is proven that the
        work which wrote the weights has finished (:mod:`minfer.nn.constant_weights` says how); False in graphs that are traced, by
        torch.compile and others, and for weights made under inference_mode. True: your promise, for all calls from now on.

    Raises:
      ValueError: an argument cannot be right; in ``load_state_dict``, perm is no permutation of the columns or alpha no finite number: this
        is looked at once, when they are loaded, and nothing of the module has changed then.
    """

    _kind, _bits = W4Weight, 4

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_size: int = 128,
        zeros: bool = False,
        perm: bool = False,
        w4_format: str = "int4",
        alpha: float = 1.0,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ):
        super().__init__(in_features, out_features, bias, group_size, zeros, perm, w4_format, alpha, dtype, device)

    @classmethod
    def from_weight(cls, weight: W4Weight) -> W4Linear:
        """A module that holds the tensors of a packed weight (no copies)."""
        return cls._from_weight(weight)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        group_size: int | None = None,
        symmetric: bool = True,
        format: str = "int4",
        *,
        dtype: torch.dtype | None = None,
    ) -> W4Linear:
        """Quantises a linear layer; arguments and errors as in :func:`minfer.quantize.quantize_w4`."""
        return cls.from_weight(quantize_w4(linear.weight, group_size, symmetric, format, dtype=dtype, bias=linear.bias))

    def forward(self, x: Tensor | Codes) -> Tensor:
        """[..., in_features], float16 or bfloat16 and of the dtype of 16-bit scales -> [..., out_features]. Or codes of 8 bits and their
        scales, as :func:`minfer.quantize_fp8` and norms with ``quant`` return, for :func:`minfer.w4a8_gemm`; ValueError where the weight
        is none that it takes."""
        qweight, scales, zeros, perm, bias = self._tensors()
        if isinstance(x, tuple):
            check_usable("W4Linear of codes", zeros=zeros, perm=perm, w4_format=self.w4_format, group_size=self.group_size)
            return w4a8_gemm(*x, qweight, scales, group_size=self.group_size, alpha=self.alpha, bias=bias)
        try:
            return w4a16_gemm(
                x,
                qweight,
                scales,
                zeros,
                group_size=self.group_size,
                alpha=self.alpha,
                perm=perm,
                bias=bias,
                w4_format=self.w4_format,
                constant_weights=self._known.promised(self.constant_weights, x, qweight, scales, zeros),
            )
        except BaseException:
            self._known.reset()  # no kernel has read the weights
            raise


class W8Linear(_PackedLinear):
    """``torch.nn.Linear`` with an 8-bit weight, for inference: y = x.W^T + bias by :func:`minfer.w8a16_gemm`.

    Args:
      group_size: -1 or a power of two >= 32.
      w8_format: "int8" or "fp8_e4m3".
      alpha: factor of the whole weight; loading a state dict replaces it.
      in_features, out_features, bias, zeros, perm, dtype, device: as in :class:`W4Linear`.

    Attributes:
      constant_weights: as in :class:`W4Linear`.

    Raises:
      ValueError: as :class:`W4Linear`.
    """

    _kind, _bits = W8Weight, 8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_size: int = -1,
        zeros: bool = False,
        perm: bool = False,
        w8_format: str = "int8",
        alpha: float = 1.0,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ):
        super().__init__(in_features, out_features, bias, group_size, zeros, perm, w8_format, alpha, dtype, device)

    @classmethod
    def from_weight(cls, weight: W8Weight) -> W8Linear:
        """A module that holds the tensors of a packed weight (no copies)."""
        return cls._from_weight(weight)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        group_size: int | None = None,
        symmetric: bool = True,
        format: str = "int8",
        *,
        dtype: torch.dtype | None = None,
    ) -> W8Linear:
        """Quantises a linear layer; arguments and errors as in :func:`minfer.quantize.quantize_w8`."""
        return cls.from_weight(quantize_w8(linear.weight, group_size, symmetric, format, dtype=dtype, bias=linear.bias))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features], float16 or bfloat16 and of the dtype of 16-bit scales -> [..., out_features]."""
        qweight, scales, zeros, perm, bias = self._tensors()
        try:
            return w8a16_gemm(
                x,
                qweight,
                scales,
                zeros,
                group_size=self.group_size,
                alpha=self.alpha,
                perm=perm,
                bias=bias,
                w8_format=self.w8_format,
                constant_weights=self._known.promised(self.constant_weights, x, qweight, scales, zeros),
            )
        except BaseException:
            self._known.reset()  # no kernel has read the weights
            raise
