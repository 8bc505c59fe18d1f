"""GEMM with weights of 4 and 8 bits.

The truth is the float64 product with the weight that codes and scales stand for. PyTorch multiplies by that weight rounded to 16 bits: the
product that these operators replace, with two or four times the bytes of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....quantize import W4Weight, W8Weight, quantize_w4, quantize_w8
from ....reference import quantized_gemm as reference_quantized_gemm
from ..case import Case, Operands, Peer
from ..sizes import Sizes
from .gemm import gemm_work

FAMILY = "quantised weights"


def exact_weight(weight: W4Weight | W8Weight) -> Tensor:
    """W [n, k] in float64, exact: the product of a code and a scale has at most 19 bits, and float32, in which it is computed, has 24."""
    tensors = (weight.qweight, weight.scales, weight.zeros)
    sizes: dict[str, Any] = {"group_size": weight.group_size, "n": weight.n, "k": weight.k, "alpha": weight.alpha}
    if isinstance(weight, W4Weight):
        return reference_quantized_gemm.w4a16_dequantize(*tensors, **sizes, w4_format=weight.w4_format, out_dtype=torch.float64)
    return reference_quantized_gemm.w8a16_dequantize(*tensors, **sizes, w8_format=weight.w8_format, out_dtype=torch.float64)


def cases(sizes: Sizes) -> list[Case]:
    n, k = sizes.intermediate, sizes.hidden

    def case(name: str, m: int, quantize: Callable[[Tensor], W4Weight | W8Weight]) -> Case:
        def make() -> Operands:
            return {"x": sizes.normal(m, k), "weight": quantize(sizes.normal(n, k, scale=k**-0.5))}

        return Case(
            FAMILY,
            name,
            f"{m} x {n} x {k}",
            make,
            lambda s: s["weight"].gemm(s["x"]),
            lambda s: s["x"].double() @ exact_weight(s["weight"]).T,
            (Peer("F.linear, 16-bit", lambda s: F.linear(s["x"], s["w"])),),
            lambda s: gemm_work(s, m, n, k),
            sizes.dtype,
            peer_operands=lambda s: {"x": s["x"], "w": s["weight"].dequantize()},
        )

    # clip=False: scales cover the whole range of their group, instead of being searched for.
    return [
        case("int4 weight", sizes.decode_tokens, lambda w: quantize_w4(w, clip=False)),
        case("mxfp4 weight", sizes.decode_tokens, lambda w: quantize_w4(w, format="mxfp4", clip=False)),
        case("int8 weight", sizes.decode_tokens, lambda w: quantize_w8(w, clip=False)),
        case("fp8_e4m3 weight", sizes.decode_tokens, lambda w: quantize_w8(w, format="fp8_e4m3", clip=False)),
        case("int4 weight", sizes.tokens, lambda w: quantize_w4(w, clip=False)),
    ]
