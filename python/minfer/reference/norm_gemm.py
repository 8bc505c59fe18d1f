"""CPU kernels of a norm and the GEMM behind it: the references of the two, one after the other. The norm is rounded to x's type between
them; of float64 nothing is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..checks.common import check_no_overlap
from ..checks.quantized_gemm import check_perm_values
from . import fused, quantized_gemm
from .gemm import gemm, gemm_gated


def normalized(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, weight_offset: float) -> Tensor:
    if residual is None:
        return fused.rms_norm(x, weight, eps, weight_offset=weight_offset)
    return fused.add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset)


def _dense(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        x: Tensor,
        norm_weight: Tensor | None,
        b: Tensor,
        eps: float = 1e-6,
        *,
        residual: Tensor | None = None,
        weight_offset: float = 0.0,
        **epilogue: Any,
    ) -> Tensor:
        a = normalized(x, norm_weight, eps, residual, weight_offset)
        d = product(a.reshape(x.shape[:-1].numel(), x.shape[-1]), b, **epilogue)
        return d.view(*x.shape[:-1], d.shape[-1])

    return run


rms_norm_gemm = _dense(gemm)
rms_norm_gemm_gated = _dense(gemm_gated)


def _quantized(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        x: Tensor,
        norm_weight: Tensor | None,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        eps: float = 1e-6,
        *,
        residual: Tensor | None = None,
        weight_offset: float = 0.0,
        **options: Any,
    ) -> Tensor:
        return product(normalized(x, norm_weight, eps, residual, weight_offset), qweight, scales, zeros, **options)

    return run


rms_norm_w4a16_gemm = _quantized(quantized_gemm.w4a16_gemm)
rms_norm_w4a16_gemm_gated = _quantized(quantized_gemm.w4a16_gemm_gated)
rms_norm_w8a16_gemm = _quantized(quantized_gemm.w8a16_gemm)
rms_norm_w8a16_gemm_gated = _quantized(quantized_gemm.w8a16_gemm_gated)


def check_dense_values(op: str, x: Tensor, norm_weight: Tensor | None, b: Tensor, *_: Any, residual=None, bias=None, **__: Any) -> None:
    """That the residual shares no memory with another argument."""
    if residual is not None:
        check_no_overlap(op, residual, "residual", x=x, norm_weight=norm_weight, b=b, bias=bias)


def check_quantized_values(op: str, x, norm_weight, qweight, scales, zeros=None, *_, residual=None, perm=None, bias=None, **__) -> None:
    """The same, and that perm holds column numbers; reads it."""
    if residual is not None:
        others = dict(norm_weight=norm_weight, qweight=qweight, scales=scales, zeros=zeros, perm=perm, bias=bias)
        check_no_overlap(op, residual, "residual", x=x, **others)
    check_perm_values(op, x, perm=perm)
