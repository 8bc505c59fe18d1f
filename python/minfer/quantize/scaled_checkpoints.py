"""Loaders of checkpoints whose weights and activations have 8 bits: e4m3 of DeepSeek, Qwen3, compressed-tensors, ModelOpt and FBGEMM, int8
of compressed-tensors. Codes and scales stay as they are; each takes the tensors of one linear layer by their names in the file, without the
layer's prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..checks.common import is_integer
from ..checks.scaled_gemm import BLOCK, FP8, blocks_of
from .loader import FLOATS, INTEGERS, Loader
from .scaled_weight import Fp8Weight, Int8Weight, aligned_rows, bias_with_zero


def _finite_scale(load: Loader, name: str, scale: Tensor) -> Tensor:
    """In float32."""
    scale = scale.float().contiguous()
    good = bool((scale.isfinite() & (scale >= 0)).all())
    load.require(good, f"{name} must be finite in float32 and not negative, got {float(scale.min()):g} to {float(scale.max()):g}")
    return scale


def _input_scale(load: Loader) -> Tensor | None:
    """Of static activations."""
    if not load.has("input_scale"):
        return None
    scale = load.get("input_scale", FLOATS)
    load.require(scale.numel() == 1, f"input_scale must be one number, got {list(scale.shape)}")
    scale = _finite_scale(load, "input_scale", scale).reshape(1)
    load.require(bool(scale > 0), "input_scale must be positive, got 0")
    return scale


def _bias(load: Loader, n: int) -> Tensor | None:
    bias = load.bias((n,), None)
    return bias.contiguous() if bias is not None else None


def from_fp8(tensors: Mapping[str, Tensor], *, weight_block_size: Sequence[int] | None = None) -> Fp8Weight:
    """A layer of a checkpoint with e4m3 weights, for :func:`minfer.gemm_fp8`; W = weight * scale.

    Args:
      tensors: ``weight`` float8_e4m3fn [n, k], and its scale by one of these names:
        ``weight_scale_inv`` [ceil(n / 128), ceil(k / 128)] (DeepSeek, Qwen3), a float type or float8_e8m0fnu. It multiplies, in spite of
        its name.
        ``weight_scale``: one number, [n] or [n, 1] (compressed-tensors, FBGEMM, ModelOpt), or of blocks as above, also as
        [ceil(n / 128), 1, ceil(k / 128), 1] (ModelOpt).
        Optionally ``input_scale``, one number, for activations that are quantised with it ("static"), and ``bias`` [n]. None is as good as
        absent.
      weight_block_size: of the checkpoint's quantization config, held against what there are kernels for: [128, 128].

    Returns:
      The weight, on the tensors' device. Scales are float32, which bfloat16 and float16 are exactly; e8m0 stays bytes.

    Raises:
      ValueError: a tensor is missing, or it or an argument cannot be right.
    """
    load = Loader("from_fp8", tensors)
    if weight_block_size is not None:
        size = tuple(weight_block_size) if isinstance(weight_block_size, list | tuple) else ()
        good = len(size) == 2 and all(is_integer(x) and x == BLOCK for x in size)
        load.require(good, f"weight_block_size must be [{BLOCK}, {BLOCK}], got {weight_block_size}")
    weight = load.get("weight", (FP8,), dims=2)
    n, k = weight.shape
    load.require(n > 0 and k > 0, f"weight must not be empty, got {[n, k]}")
    blocks = [blocks_of(n), blocks_of(k)]
    load.require(not (load.has("weight_scale_inv") and load.has("weight_scale")), "weight_scale and weight_scale_inv are both there")
    name = "weight_scale_inv" if load.has("weight_scale_inv") else "weight_scale"
    of_blocks = name == "weight_scale_inv" or weight_block_size is not None
    scale = load.get(name, (*FLOATS, torch.float8_e8m0fnu))
    shape = list(scale.shape)
    if shape == [blocks[0], 1, blocks[1], 1]:
        scale = scale.reshape(blocks)
    legal = [blocks] if of_blocks else [[n, 1], [n], blocks]
    good = list(scale.shape) in legal or (scale.numel() == 1 and not of_blocks)
    text = f"{blocks}, a scale for each {BLOCK} x {BLOCK}" if of_blocks else f"one number, {[n]}, {[n, 1]} or, of blocks, {blocks}"
    load.require(good, f"{name} must be {text}, got {shape}")
    if scale.numel() == 1:
        scale = scale.reshape(1, 1) if of_blocks else scale.reshape(1)
    elif list(scale.shape) == [n, 1] and not of_blocks:
        scale = scale.reshape(n)
    if scale.dtype == torch.float8_e8m0fnu and scale.dim() == 2 and scale.numel() > 1 and list(scale.shape) != [n, 1]:
        scale = scale.contiguous().view(torch.uint8)
        load.require(bool((scale != 255).all()), f"{name} must be numbers, got 255, the NaN of e8m0")
    else:
        scale = _finite_scale(load, name, scale)
    return Fp8Weight(aligned_rows(weight), scale, _input_scale(load), _bias(load, n))


def from_int8(tensors: Mapping[str, Tensor]) -> Int8Weight:
    """A layer of a compressed-tensors checkpoint with int8 weights and activations ("int-quantized"), for :func:`minfer.gemm_int8`.

    Args:
      tensors: ``weight`` int8 [n, k]; ``weight_scale``: one number, [n] or [n, 1]; optionally ``input_scale``, one number, of static
        activations, with ``input_zero_point``, an integer; ``weight_zero_point``, which must be 0; ``bias`` [n]. Weights with groups or
        zero points are for 16-bit activations: :func:`from_compressed_tensors`.

    Returns:
      The weight, on the tensors' device.

    Raises:
      ValueError: a tensor is missing, or it cannot be right.
    """
    load = Loader("from_int8", tensors)
    weight = load.get("weight", (torch.int8,), dims=2)
    n, k = weight.shape
    load.require(n > 0 and k > 0, f"weight must not be empty, got {[n, k]}")
    scale = load.get("weight_scale", FLOATS)
    good = scale.numel() == 1 or list(scale.shape) in ([n], [n, 1])
    load.require(good, f"weight_scale must be one number, {[n]} or {[n, 1]}, got {list(scale.shape)}")
    scale = _finite_scale(load, "weight_scale", scale).reshape(-1)
    if load.has("weight_zero_point"):
        zero = load.get("weight_zero_point", (*INTEGERS, *FLOATS))
        load.require(not bool((zero != 0).any()), "weight_zero_point must be 0, got others: see from_compressed_tensors")
    weight, input_scale, bias, zero = aligned_rows(weight), _input_scale(load), _bias(load, n), 0
    if load.has("input_zero_point"):
        x = load.get("input_zero_point", INTEGERS)
        load.require(x.numel() == 1, f"input_zero_point must be one number, got {list(x.shape)}")
        zero = int(x)
        load.require(-128 <= zero <= 127, f"input_zero_point must be -128 to 127, got {zero}")
        load.require(zero == 0 or input_scale is not None, "input_zero_point is there, but no input_scale")
    if zero == 0:
        return Int8Weight(weight, scale, input_scale, bias)
    bias = bias_with_zero(weight, scale, input_scale, zero, bias)
    input_zero = torch.full((1,), zero, dtype=torch.int8, device=weight.device)
    return Int8Weight(weight, scale, input_scale, bias, input_zero=input_zero)
