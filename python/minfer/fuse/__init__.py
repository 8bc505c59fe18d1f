"""Fusions that users write, in Python: one kernel from one function over torch tensors.

    @minfer.fuse.rowwise
    def gated_norm(x, gate, weight, *, eps: float = 1e-6):
        h = x.float() * torch.sigmoid(gate)
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    y = gated_norm(x, gate, weight)     # reads x and gate once, writes y once

The function is written in torch; kernels are made from it by the CuTe DSL, of the optional extra ``minfer[dsl]``, at the first call with
new dtypes or widths, and are kept on disk. Floating-point numbers are float32 within a function and are rounded where it casts and where
results are stored; casts to FP8 saturate.
"""

from __future__ import annotations

from .attention_function import AttentionFunction, attention
from .block_mask import BlockMask, create_block_mask
from .errors import FuseError
from .export import export, load
from .gemm_function import GemmFunction, gemm, gemm_epilogue
from .random import random_bits, stochastic_round
from .row_function import RowFunction, pointwise, rowwise

__all__ = [
    "AttentionFunction",
    "BlockMask",
    "FuseError",
    "GemmFunction",
    "RowFunction",
    "attention",
    "create_block_mask",
    "export",
    "gemm",
    "gemm_epilogue",
    "load",
    "pointwise",
    "random_bits",
    "rowwise",
    "stochastic_round",
]
