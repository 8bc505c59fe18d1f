"""GEMM with an epilogue, and gated GEMM, of 16-bit operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._core.operator import OutForm, operator
from ..checks.common import in_float32
from ..checks.gemm import check_gemm, check_gemm_gated
from .output_codes import Codes, with_scale

__all__ = [
    "gemm",
    "gemm_gated",
]


def _unread(*, beta: float = 0.0, **_: Any) -> tuple[str, ...]:
    """BLAS: a zero beta reads no C, and so ``out`` may overlap it."""
    return ("c",) if in_float32(beta) == 0 else ()


@operator(check=check_gemm, reference=reference.gemm, out=OutForm(may_be=("c",), unread=_unread), before=with_scale)
def gemm(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    quant: str | None = None,
    scale: Tensor | None = None,
    constant_weights: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor | Codes:
    """D = activation(alpha * A.B + beta * C + bias) in one kernel.

    Args:
      a: [m, k] or [batch, m, k], float16 or bfloat16.
      b: [k, n] or [batch, k, n], a's dtype and device. An ``nn.Linear`` weight [n, k] goes in as ``weight.t()``.
        Row- and column-major, strided and offset views of both are taken as they are; a view without a contiguous mode is
        copied first. A 2-D operand is used for every matrix of a 3-D other.
      c: broadcastable to D ([m, n], [n], [m, 1], a scalar, ...), a's dtype or float32. Not read when beta = 0, so a NaN in it
        does not reach D then; mind that beta = 0 is the default. Required when beta is not 0.
      bias: [n], a's dtype or float32.
      alpha, beta: finite in float32. With alpha = 0 or k = 0, A and B are not read.
      activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu2" (relu squared).
      out_dtype: a's dtype (default) or float32; with ``quant`` None or float8_e4m3fn.
      quant: None, or "fp8_tensor": D is stored in 8-bit codes, round(D / scale). The other modes of :mod:`minfer.ops.fused` need whole
        rows: they are for what follows, :func:`minfer.quantize_fp8` or a norm or gated activation with ``quant``.
      scale: float32 [1], with ``quant`` alone.
      constant_weights: a promise that whatever wrote b has finished before this call is launched, as after loading and a
        synchronisation; while a CUDA graph is captured, that no kernel of the graph in front of this one writes it. On compute capability
        9.0 products of few rows then read it while the work in front of them still runs. It changes no bit of the result; where the promise
        is broken, D is of an old b, a new one or a mixture. A copy of b that the operator makes itself is exempt.
      kernel: for measurements: NAME[@decomposition=persistent|stream_k|split_k|ranges,splits=N,swizzle=N,raster=along_m|along_n,columns=N,
        realign_a=0|1,realign_b=0|1], of :func:`minfer.kernels`. On CPU it is checked and otherwise ignored.
      out: D itself, a's dtype or float32, with ``quant`` float8_e4m3fn. Written in place where its rows are contiguous (any leading
        dimension), otherwise through a copy. It may be ``c``, but must not overlap itself, a, b, bias or scale, which is an error where
        their first and last addresses show it. Not under ``torch.compile(fullgraph=True)`` unless contiguous. A tensor made under
        ``torch.inference_mode()`` only there.

    Returns:
      D, [m, n] or [batch, m, n], contiguous (or ``out``). Any m, n, k >= 0. With ``quant``: (q, scale), q of D's shape, float8_e4m3fn.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: products are accumulated in float32, the epilogue is float32, D or its code is rounded once. Reductions across thread blocks
    are ordered: the same inputs, shapes and kernel give the same bits in every run. For inference: there is no backward, and calling it
    raises; forward-mode differentiation and ``torch.func.grad`` raise in the forward pass.
    """


@operator(check=check_gemm_gated, reference=reference.gemm_gated, before=with_scale)
def gemm_gated(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "silu",
    quant: str | None = None,
    scale: Tensor | None = None,
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor | Codes:
    """D = activation(A.B_gate + bias_gate) * (A.B_up + bias_up) in one kernel: the first half of a SwiGLU (GeGLU, ...) MLP.

    Args:
      a: [m, k] or [batch, m, k], float16 or bfloat16.
      b: [k, 2 * n_half] or [batch, k, 2 * n_half], a's dtype: ``minfer.pack_gate_up(gate.weight, up.weight).t()``, blocks of 8 gate
        columns and 8 up columns. Views and batches as in :func:`gemm`.
      bias: [2 * n_half], ``minfer.pack_gate_up(gate.bias, up.bias)``, a's dtype or float32.
      activation: of the gate; as in :func:`gemm`.
      quant, scale, constant_weights, kernel: as in :func:`gemm`.

    Returns:
      D, [m, n_half] or [batch, m, n_half], a's dtype, contiguous. With ``quant``: (q, scale), as :func:`gemm`.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`gemm`), or b's columns are not a multiple of 16.

    Numerics: as in :func:`gemm`; gate and up stay in float32 until D is rounded.
    """
