"""CPU kernels of the decoder blocks: the references of their products and norms, one after the other. x, the norms, h and what is returned
are rounded to a's type; of float64 nothing but the weights is rounded."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..checks.common import check_no_overlap
from ..checks.scaled_gemm import blocks_of, is_of_blocks
from .fused import quantize, rms_norm, rms_norm_quantized
from .gemm import gemm, gemm_gated
from .quantized_gemm import w4a16_gemm, w4a16_gemm_gated
from .scaled_gemm import gemm_fp8, gemm_fp8_gated


def w4a16_decoder_block(
    a: Tensor,
    residual: Tensor,
    o_qweight: Tensor,
    o_scales: Tensor,
    mlp_norm: Tensor,
    gate_up_qweight: Tensor,
    gate_up_scales: Tensor,
    down_qweight: Tensor,
    down_scales: Tensor,
    next_norm: Tensor,
    next_qweight: Tensor,
    next_scales: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    group_size: int = 128,
    activation: str = "silu",
) -> Tensor:
    x = w4a16_gemm(a, o_qweight, o_scales, group_size=group_size, c=residual, bias=o_bias)
    y = rms_norm(x, mlp_norm, eps, weight_offset=weight_offset)
    h = w4a16_gemm_gated(y, gate_up_qweight, gate_up_scales, group_size=group_size, activation=activation)
    x = w4a16_gemm(h, down_qweight, down_scales, group_size=group_size, c=x, bias=down_bias)
    residual.copy_(x)
    y = rms_norm(x, next_norm, eps, weight_offset=weight_offset)
    return w4a16_gemm(y, next_qweight, next_scales, group_size=group_size, bias=next_bias)


def fp8_decoder_block(
    a: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    o_scale: Tensor,
    mlp_norm: Tensor,
    gate_up_weight: Tensor,
    gate_up_scale: Tensor,
    down_weight: Tensor,
    down_scale: Tensor,
    next_norm: Tensor,
    next_weight: Tensor,
    next_scale: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Activations are quantised as the scales of the weight behind them are: by tokens, or by blocks of 128."""

    def product(x: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor, **more: Any) -> Tensor:
        return gemm_fp8(x[0], weight.t(), x[1], scale, out_dtype=a.dtype, **more)

    def quant(weight: Tensor, scale: Tensor, gated: bool = False) -> str:
        n, k = weight.shape
        return "fp8_block128" if is_of_blocks(scale, n, blocks_of(n // 2 if gated else n), k, gated) else "fp8_token"

    m = math.prod(a.shape[:-1])
    rows, before = a.reshape(m, a.shape[-1]), residual.view(m, residual.shape[-1])
    norm = {"eps": eps, "weight_offset": weight_offset}
    x = product(quantize(rows, quant(o_weight, o_scale)), o_weight, o_scale, c=before, beta=1.0, bias=o_bias)
    y = rms_norm_quantized(x, quant(gate_up_weight, gate_up_scale, True), mlp_norm, **norm)
    h = gemm_fp8_gated(y[0], gate_up_weight.t(), y[1], gate_up_scale, activation=activation, out_dtype=a.dtype)
    x = product(quantize(h, quant(down_weight, down_scale)), down_weight, down_scale, c=x, beta=1.0, bias=down_bias)
    residual.copy_(x.view(residual.shape))
    y = rms_norm_quantized(x, quant(next_weight, next_scale), next_norm, **norm)
    d = product(y, next_weight, next_scale, bias=next_bias)
    return d.view(*a.shape[:-1], d.shape[-1])


def check_fp8_values(
    a: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    o_scale: Tensor,
    mlp_norm: Tensor,
    gate_up_weight: Tensor,
    gate_up_scale: Tensor,
    down_weight: Tensor,
    down_scale: Tensor,
    next_norm: Tensor,
    next_weight: Tensor,
    next_scale: Tensor,
    eps: float = 1e-6,
    *,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    **_: object,
) -> None:
    """That the residual shares no memory with another argument."""
    others = dict(a=a, o_weight=o_weight, o_scale=o_scale, mlp_norm=mlp_norm, gate_up_weight=gate_up_weight, gate_up_scale=gate_up_scale)
    others |= dict(down_weight=down_weight, down_scale=down_scale, next_norm=next_norm, next_weight=next_weight, next_scale=next_scale)
    others |= dict(o_bias=o_bias, down_bias=down_bias, next_bias=next_bias)
    check_no_overlap("fp8_decoder_block", residual, "residual", **others)


def check_values(
    a: Tensor,
    residual: Tensor,
    o_qweight: Tensor,
    o_scales: Tensor,
    mlp_norm: Tensor,
    gate_up_qweight: Tensor,
    gate_up_scales: Tensor,
    down_qweight: Tensor,
    down_scales: Tensor,
    next_norm: Tensor,
    next_qweight: Tensor,
    next_scales: Tensor,
    eps: float = 1e-6,
    *,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    **_: object,
) -> None:
    """That the residual shares no memory with another argument."""
    others = dict(a=a, o_qweight=o_qweight, o_scales=o_scales, mlp_norm=mlp_norm)
    others |= dict(gate_up_qweight=gate_up_qweight, gate_up_scales=gate_up_scales, down_qweight=down_qweight, down_scales=down_scales)
    others |= dict(next_norm=next_norm, next_qweight=next_qweight, next_scales=next_scales)
    others |= dict(o_bias=o_bias, down_bias=down_bias, next_bias=next_bias)
    check_no_overlap("w4a16_decoder_block", residual, "residual", **others)


def decoder_block(
    a: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    mlp_norm: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    next_norm: Tensor,
    next_weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    m = math.prod(a.shape[:-1])
    rows, before = a.reshape(m, a.shape[-1]), residual.view(m, residual.shape[-1])
    x = gemm(rows, o_weight.t(), c=before, beta=1.0, bias=o_bias)
    y = rms_norm(x, mlp_norm, eps, weight_offset=weight_offset)
    h = gemm_gated(y, gate_up_weight.t(), activation=activation)
    x = gemm(h, down_weight.t(), c=x, beta=1.0, bias=down_bias)
    residual.copy_(x.view(residual.shape))
    y = rms_norm(x, next_norm, eps, weight_offset=weight_offset)
    d = gemm(y, next_weight.t(), bias=next_bias)
    return d.view(*a.shape[:-1], d.shape[-1])


def check_dense_values(
    a: Tensor,
    residual: Tensor,
    o_weight: Tensor,
    mlp_norm: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    next_norm: Tensor,
    next_weight: Tensor,
    eps: float = 1e-6,
    *,
    o_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    next_bias: Tensor | None = None,
    **_: object,
) -> None:
    """That the residual shares no memory with another argument."""
    others = dict(a=a, o_weight=o_weight, mlp_norm=mlp_norm, gate_up_weight=gate_up_weight, down_weight=down_weight, next_norm=next_norm)
    others |= dict(next_weight=next_weight, o_bias=o_bias, down_bias=down_bias, next_bias=next_bias)
    check_no_overlap("decoder_block", residual, "residual", **others)
