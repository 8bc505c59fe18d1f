"""CPU kernels of grouped GEMM with 4-bit weights; with a float64 ``a`` the same functions are the truth that tests measure by.

An expert's weight without alpha is rounded to 16 bits first, as in :mod:`minfer.reference.quantized_gemm`.
"""

from __future__ import annotations

from torch import Tensor

from . import grouped_gemm as reference_moe, quantized_gemm as reference_w4a16


def _weight(a: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, name: str, group_size: int, expert: int) -> Tensor:
    own = (None if zeros is None else zeros[expert], name, group_size)
    return reference_w4a16.weight_beside(a, qweight[expert], scales[expert], *own)


def grouped_w4a16_gemm(
    a: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor,
    *,
    group_size: int = 128,
    w4_format: str = "int4",
    gated: bool = False,
    **arguments,
) -> Tensor:
    """What :func:`minfer.grouped_w4a16_gemm` computes, in a's type (16-bit: in float32, rounded once)."""

    def weight(expert: int) -> Tensor:
        return _weight(a, qweight, scales, zeros, w4_format, group_size, expert).t()

    layout = "blocks" if gated else "halves"
    return reference_moe.by_expert(a, weight, scales.shape[2], offsets, gated=gated, gate_layout=layout, **arguments)


def moe_ffn_w4a16(
    x: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w13_zeros: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor,
    w2_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    *,
    group_size: int = 128,
    w4_format: str = "int4",
    **arguments,
) -> Tensor:
    """What :func:`minfer.moe_ffn_w4a16` computes, expert by expert, in x's type (16-bit: in float32 but for the inner activations)."""
    experts, hidden, inter = w13.shape[0], x.shape[1], w13_scales.shape[2] // 2

    def first(expert: int) -> Tensor:
        return _weight(x, w13, w13_scales, w13_zeros, w4_format, group_size, expert)

    def second(expert: int) -> Tensor:
        return _weight(x.new_empty(0, inter), w2, w2_scales, w2_zeros, w4_format, group_size, expert)

    return reference_moe.layer_by_expert(x, first, second, experts, hidden, weights, ids, gate_layout="blocks", **arguments)
