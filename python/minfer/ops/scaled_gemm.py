"""GEMMs of 8-bit operands and their scales: e4m3 (W8A8 in FP8) and int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.operator import OutForm, operator
from ..checks import scaled_gemm as checks
from ..checks.common import in_float32
from ..reference import scaled_gemm as reference

__all__ = ["gemm_fp8", "gemm_fp8_gated", "gemm_int8", "gemm_int8_gated"]


def _unread(*, beta: float = 0.0, **_: Any) -> tuple[str, ...]:
    """BLAS: a zero beta reads no C, and so ``out`` may overlap it."""
    return ("c",) if in_float32(beta) == 0 else ()


@operator(check=checks.check_gemm_fp8, reference=reference.gemm_fp8, out=OutForm(may_be=("c",), unread=_unread))
def gemm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    fast_accum: bool = False,
    constant_weights: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """D = activation((A * a_scale).(B * b_scale) + beta * C + bias) of e4m3 operands, in one kernel.

    Args:
      a: [.., m, k], float8_e4m3fn; what :func:`minfer.quantize_fp8` and the operators with ``quant`` write.
      b: [k, n], float8_e4m3fn: a weight [n, k] as ``weight.t()``. Operands that are not contiguous along k, or whose rows do not begin at
        multiples of 16 bytes, are copied first.
      a_scale: float32 on a's device: one number; [.., m] or [.., m, 1], one for each row; or [.., m, ceil(k / 128)], one for each 128 of k
        of a row, in any strides ("fp8_block128" stores them column by column). Those of blocks may also be uint8, exponents of two (e8m0).
        Beside an a of more modes than two, the rows of all may also be numbered through, as the operators with ``quant`` do.
      b_scale: likewise: one number; [n] or [n, 1], one for each column; or [ceil(n / 128), ceil(k / 128)], one for each block of 128 x 128.
      c: broadcastable to [.., m, n], of D's dtype or float32. Not read when beta = 0.
      bias: [n], of D's dtype or float32. Where D has no 16-bit dtype, c and bias may have one, the same.
      beta: finite in float32.
      activation: as in :func:`minfer.gemm`.
      out_dtype: bfloat16 (default), float16, float32, or float8_e4m3fn, which ``out_scale`` implies.
      out_scale: float32 [1], for a D of e4m3 codes, round(D / out_scale).
      fast_accum: leave the sums to the tensor core, whose accumulator keeps about 14 bits, rather than add them up in float32 every 128 of
        k. Blocks of scales are always added up in float32.
      constant_weights, kernel: as in :func:`minfer.gemm`.
      out: D itself, as in :func:`minfer.gemm`.

    Returns:
      D, [.., m, n], contiguous (or ``out``). Any m, n, k >= 0.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched. There are
        kernels for every device from compute capability 8.0 on.

    Numerics: products are exact, sums of 128 of k are the tensor core's, sums of those are float32, as are scales and epilogue; D is
    rounded once. Ordered reductions: the same bits in every run. There is no backward.
    """


@operator(check=checks.check_gemm_fp8_gated, reference=reference.gemm_fp8_gated)
def gemm_fp8_gated(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    fast_accum: bool = False,
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D = activation(gate) * up of (A * a_scale).(B * b_scale) + bias, of e4m3 operands, in one kernel.

    Args:
      a, a_scale, b_scale, out_dtype, out_scale, fast_accum, constant_weights, kernel: as in :func:`gemm_fp8`. b_scale of one number for
        each column is in the order of b's columns. Blocks of 128 x 128 are of gate and up as they were before they were packed:
        [2, ceil(n_half / 128), ceil(k / 128)], those of the gate first.
      b: [k, 2 * n_half], ``minfer.pack_gate_up(gate, up).t()``: blocks of 8 gate columns and 8 up columns.
      bias: [2 * n_half], ``minfer.pack_gate_up`` of both.
      activation: of the gate.

    Returns:
      D, [.., m, n_half], contiguous.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`gemm_fp8`), or b's columns are not a multiple of 16.

    Numerics: as in :func:`gemm_fp8`; gate and up stay in float32 until D is rounded.
    """


@operator(check=checks.check_gemm_int8, reference=reference.gemm_int8, out=OutForm(may_be=("c",), unread=_unread))
def gemm_int8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_zero: Tensor | None = None,
    b_sums: Tensor | None = None,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """D = activation(((A - a_zero) * a_scale).(B * b_scale) + beta * C + bias) of int8 operands, in one kernel.

    Args:
      a: [.., m, k], int8; what :func:`minfer.quantize_int8` writes.
      b: [k, n], int8, as in :func:`gemm_fp8`.
      a_scale: float32 on a's device: one number, or [.., m] or [.., m, 1], one for each row; all rows may be numbered through.
      b_scale: likewise: one number, or [n] or [n, 1], one for each column.
      a_zero: int32, the zero points of asymmetric activations: one number, or [.., m] or [.., m, 1]; None: 0. Beside them D leaves by a
        slower path: one zero point of all rows, known beforehand, is better made part of the bias, with its product with B.
      b_sums: int32 [n], the sums of b's columns, ``b.sum(0, dtype=torch.int32)``; given with a_zero, and not compared with b.
      c, bias, beta, activation, constant_weights, kernel, out: as in :func:`gemm_fp8`.
      out_dtype: bfloat16 (default), float16, float32; or int32, the sums themselves, of which scales are not read.

    Returns:
      D, [.., m, n], contiguous (or ``out``). Any m, n, k >= 0.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`gemm_fp8`). There are kernels for every device from compute capability 8.0 on.

    Numerics: sums are int32 and exact (k below 2^17), and are rounded to float32, where they are split to fill the GPU part by part. The
    rest is float32, D is rounded once. Ordered reductions: the same bits in every run. There is no backward.
    """


@operator(check=checks.check_gemm_int8_gated, reference=reference.gemm_int8_gated)
def gemm_int8_gated(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_zero: Tensor | None = None,
    b_sums: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D = activation(gate) * up of ((A - a_zero) * a_scale).(B * b_scale) + bias, of int8 operands, in one kernel.

    Args:
      a, a_scale, b_scale, a_zero, b_sums, constant_weights, kernel: as in :func:`gemm_int8`.
      b, bias, activation: as in :func:`gemm_fp8_gated`.
      out_dtype: bfloat16 (default), float16 or float32.

    Returns:
      D, [.., m, n_half], contiguous.

    Raises:
      RuntimeError: as :func:`gemm_fp8_gated`.

    Numerics: as in :func:`gemm_int8`.
    """
