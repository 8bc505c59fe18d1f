"""CPU kernel of the decoder block: the references of its products and norms, one after the other. x, the norms, h and what is returned are
rounded to a's type; of float64 nothing but the weights is rounded."""

from __future__ import annotations

from torch import Tensor

from ..checks.common import check_no_overlap
from .fused import rms_norm
from .quantized_gemm import w4a16_gemm, w4a16_gemm_gated


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
