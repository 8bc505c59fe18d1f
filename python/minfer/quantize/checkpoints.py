"""Loaders of checkpoints with 4-bit and 8-bit weights: the codes, scales and zero points as they are, in another order of bits. Nothing is
requantised; float32 scales are rounded to the 16-bit type of the activations, but for a weight's only scale, which becomes its alpha.

Each takes the tensors of one linear layer by their names in the file, without the layer's prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import weight_formats, weight_layout
from ..checks import DTYPES
from .weight import W4Weight, W8Weight, weight_of_codes

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds the word's column _AWQ_COLUMNS[i]


def _unpacked(words: Tensor, dim: int, bits: int = 4, nibbles: Sequence[int] | None = None) -> Tensor:
    """int32 words -> uint8 codes, 32 / bits for one along ``dim``, the first in the low bits; ``nibbles``: where a word keeps its first,
    second, ... code."""
    # A clone, for contiguous() keeps the odd strides that a dimension of one element may have.
    codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).unflatten(-1, (words.shape[-1], 4))
    if bits == 4:
        codes = _nibbles(codes)
    if nibbles is not None:
        codes = codes[..., list(nibbles)]
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _nibbles(octets: Tensor, high_first: bool = False) -> Tensor:
    """uint8 [..., x] -> codes [..., 2 x], the low four bits first or the high ones."""
    low, high = octets & 15, octets >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


class _Loader:
    """Reads tensors of one checkpoint format; every complaint begins with the loader's name."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]):
        self.name, self.tensors = name, tensors

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.name}: {message}")

    def get(self, name: str, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> Tensor:
        self.require(name in self.tensors, f"tensor '{name}' is missing, got {', '.join(sorted(self.tensors)) or 'none'}")
        x = self.tensors[name]
        self.require(dtype is None or x.dtype == dtype, f"{name} must be {dtype}, got {x.dtype}")
        self.require(shape is None or list(x.shape) == list(shape), f"{name} must be {list(shape or ())}, got {list(x.shape)}")
        return x

    def words(self, name: str) -> Tensor:
        x = self.get(name, torch.int32)
        self.require(x.dim() == 2, f"{name} must have two dimensions, got {list(x.shape)}")
        return x

    def scales(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        dtype = dtype or x.dtype
        self.require(dtype in DTYPES, f"scales must be float16 or bfloat16, got {dtype}; pass dtype= to round them")
        return x.to(dtype)

    def group_size(self, group_size: int, name: str = "int4") -> None:
        rule = weight_formats.group_size_rule(name)
        self.require(weight_formats.legal_group_size(name, group_size), f"group_size must be {rule}, got {group_size}")

    def octets(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """A uint8 tensor, or one of an 8-bit float as uint8."""
        x = self.get(name, shape=shape)
        self.require(x.element_size() == 1 and x.dtype != torch.int8, f"{name} must be torch.uint8 or an 8-bit float, got {x.dtype}")
        return x.view(torch.uint8)

    def bias(self, dtype: torch.dtype | None) -> Tensor | None:
        bias = self.tensors.get("bias")
        return bias if bias is None or dtype is None or bias.dtype == torch.float32 else bias.to(dtype)

    def order(self, g_idx: Tensor, k: int, group_size: int) -> Tensor | None:
        """The columns sorted by their group, as perm; None where they are sorted already."""
        size = weight_layout.group_columns(k, group_size)
        sorted_groups = torch.arange(k, device=g_idx.device) // size
        if bool((g_idx == sorted_groups).all()):
            return None
        order = torch.argsort(g_idx, stable=True)
        full = bool((g_idx[order] == sorted_groups).all())
        self.require(full, f"the group index must give each group {size} columns")
        return order.to(torch.int32)


def from_gptq(
    tensors: Mapping[str, Tensor],
    *,
    group_size: int = 128,
    bits: int = 4,
    sym: bool | None = None,
    desc_act: bool | None = None,
    checkpoint_format: str = "gptq",
    dtype: torch.dtype | None = None,
) -> W4Weight | W8Weight:
    """A layer of a GPTQ checkpoint (AutoGPTQ, GPTQModel); W[i, j] = scales[g_idx[j], i] * (code - zero).

    Args:
      tensors: ``qweight`` int32 [k * bits / 32, n], packed along k; ``qzeros`` int32 [G, n * bits / 32], packed along n; ``scales``
        [G, n]; optionally ``g_idx`` [k], the group of each column, and ``bias`` [n]. A word's first code is in its low bits.
      group_size, bits, sym, desc_act: of the checkpoint's quantization config; bits must be 4 or 8. sym and desc_act are only held
        against the tensors, which say the same: zero points, and columns out of their groups' order.
      checkpoint_format: "gptq" stores zero - 1 (in so many bits, so zero 0 is stored as 15 or 255), "gptq_v2" stores zero.
      dtype: rounds the scales to float16 or bfloat16; default: as stored.

    Returns:
      The packed weight, on the tensors' device, ``perm`` set where columns are out of order.

    Raises:
      ValueError: a tensor is missing, or it or an argument cannot be right.
    """
    load = _Loader("from_gptq", tensors)
    load.require(bits in (4, 8), f"bits must be 4 or 8, got {bits}")
    load.require(checkpoint_format in ("gptq", "gptq_v2"), f"checkpoint_format must be gptq or gptq_v2, got '{checkpoint_format}'")
    load.group_size(group_size)
    words, in_a_word = load.words("qweight"), 32 // bits
    k, n = in_a_word * words.shape[0], words.shape[1]
    rows = weight_layout.groups(k, group_size)
    scales = load.scales(load.get("scales", shape=(rows, n)), dtype)
    zeros = _unpacked(load.get("qzeros", torch.int32, (rows, n // in_a_word)), 1, bits)
    if checkpoint_format == "gptq":
        zeros = (zeros + 1) & (2**bits - 1)  # the byte wraps too
    usual = 2 ** (bits - 1)
    load.require(not sym or bool((zeros == usual).all()), f"sym is set, but not all zero points are {usual}; is checkpoint_format right?")
    codes = _unpacked(words, 0, bits).t()
    perm = None
    if tensors.get("g_idx") is not None and tensors["g_idx"].numel() > 0:
        perm = load.order(load.get("g_idx", shape=(k,)), k, group_size)
    load.require(desc_act is not False or perm is None, "desc_act is not set, but g_idx is out of order")
    if perm is not None:
        codes = codes.index_select(1, perm)
    return weight_of_codes(codes, scales, zeros, group_size=group_size, format=f"int{bits}", perm=perm, bias=load.bias(scales.dtype))


def from_awq(
    tensors: Mapping[str, Tensor], *, group_size: int = 128, bits: int = 4, version: str = "gemm", dtype: torch.dtype | None = None
) -> W4Weight:
    """A layer of an AutoAWQ checkpoint ("gemm" version); W[i, j] = scales[j // group_size, i] * (code - zero).

    Args:
      tensors: ``qweight`` int32 [k, n / 8] and ``qzeros`` int32 [G, n / 8], both packed along n, a word's columns in the order 0, 2,
        4, 6, 1, 3, 5, 7; ``scales`` [G, n]; optionally ``bias`` [n].
      group_size, bits, version: of the checkpoint's quantization config; bits must be 4, version "gemm".
      dtype: rounds the scales to float16 or bfloat16; default: as stored.

    Returns:
      The packed weight, on the tensors' device.

    Raises:
      ValueError: a tensor is missing, or it or an argument cannot be right.
    """
    load = _Loader("from_awq", tensors)
    load.require(bits == 4, f"bits must be 4, got {bits}")
    load.require(version.lower() == "gemm", f"version must be gemm, got '{version}'")
    load.group_size(group_size)
    words = load.words("qweight")
    k, n = words.shape[0], 8 * words.shape[1]
    rows = weight_layout.groups(k, group_size)
    scales = load.scales(load.get("scales", shape=(rows, n)), dtype)
    nibbles = [_AWQ_COLUMNS.index(column) for column in range(8)]
    zeros = _unpacked(load.get("qzeros", torch.int32, (rows, n // 8)), 1, nibbles=nibbles)
    codes = _unpacked(words, 1, nibbles=nibbles).t()
    return weight_of_codes(codes, scales, zeros, group_size=group_size, bias=load.bias(scales.dtype))


_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


def from_compressed_tensors(
    tensors: Mapping[str, Tensor],
    *,
    format: str = "pack-quantized",
    group_size: int | None = None,
    num_bits: int | None = None,
    dtype: torch.dtype | None = None,
) -> W4Weight | W8Weight:
    """A layer of a compressed-tensors checkpoint.

    Args:
      tensors: and optionally ``bias`` [n]; by format
        "pack-quantized": W[i, j] = weight_scale[i, group of j] * (value - zero point). ``weight_packed`` int32 [n, ceil(k * bits / 32)],
        packed along k, codes being value + 2^(bits - 1); ``weight_scale`` [n, G]; ``weight_shape``, n and k; optionally
        ``weight_zero_point`` int32 [ceil(n * bits / 32), G], packed along n like the values; ``weight_g_idx`` [k], the group of each
        column (all -1: not used).
        "int-quantized": ``weight`` int8 [n, k]; ``weight_scale`` [n, G], [n], or one number; optionally ``weight_zero_point``, int8 of
        that shape. "float-quantized": ``weight`` float8_e4m3fn [n, k] and ``weight_scale``. "naive-quantized": one of these two.
        "nvfp4-pack-quantized": W = e2m1(weight_packed) * weight_scale / weight_global_scale. ``weight_packed`` uint8 [n, k / 2], the
        even column in the low four bits; ``weight_scale`` float8_e4m3fn [n, k / 16]; ``weight_global_scale``, one number.
        "mxfp4-pack-quantized": likewise with ``weight_scale`` uint8 [n, k / 32], E8M0, and no global scale.
      format: of the checkpoint's quantization config.
      group_size: of the checkpoint's weights config; None: -1 where G is 1, otherwise k / G.
      num_bits: of the weights config: 4 (default) or 8 for "pack-quantized", else only held against the format.
      dtype: rounds 16-bit scales to float16 or bfloat16; default: as stored. A scale that is one number goes into alpha as it is, and
        dtype says what the activations will be.

    Returns:
      The packed weight, on the tensors' device, ``perm`` set where columns are out of order.

    Raises:
      ValueError: a tensor is missing, or it or an argument cannot be right.
    """
    load = _Loader("from_compressed_tensors", tensors)
    load.require(format in _COMPRESSED, f"format must be one of {', '.join(_COMPRESSED)}, got '{format}'")
    if format == "pack-quantized":
        return _pack_quantized(load, group_size, 4 if num_bits is None else num_bits, dtype)
    bits = 4 if "fp4" in format else 8
    load.require(num_bits in (None, bits), f"num_bits must be {bits} for {format}, got {num_bits}")
    if bits == 8:
        return _byte_quantized(load, group_size, format, dtype)
    name = format.partition("-")[0]
    wanted = weight_formats.FORMATS[name].group_size
    load.group_size(wanted if group_size is None else group_size, name)
    packed = load.octets("weight_packed")
    load.require(packed.dim() == 2, f"weight_packed must have two dimensions, got {list(packed.shape)}")
    n, k = packed.shape[0], 2 * packed.shape[1]
    scales = load.octets("weight_scale", (n, weight_layout.groups(k, wanted))).t()
    alpha = 1.0
    if name == "nvfp4":
        whole = load.get("weight_global_scale")
        load.require(whole.numel() == 1, f"weight_global_scale must be one number, got {list(whole.shape)}")
        alpha = 1.0 / float(whole)
    return weight_of_codes(_nibbles(packed), scales, group_size=wanted, format=name, bias=load.bias(dtype), alpha=alpha)


def _group_size_of(load: _Loader, group_size: int | None, count: int, k: int) -> int:
    """What was given, or what follows from the number of groups."""
    if group_size is None:
        load.require(count == 1 or (count > 1 and k % count == 0), f"group_size must be given: weight_scale has {count} groups for k = {k}")
        group_size = -1 if count == 1 else k // count
    load.group_size(group_size)
    return group_size


def _pack_quantized(load: _Loader, group_size: int | None, bits: int, dtype: torch.dtype | None) -> W4Weight | W8Weight:
    load.require(bits in (4, 8), f"num_bits must be 4 or 8, got {bits}")
    n, k = (int(x) for x in load.get("weight_shape", shape=(2,)))
    in_a_word = 32 // bits
    words = load.get("weight_packed", torch.int32, (n, -(-k // in_a_word)))
    scale = load.get("weight_scale")
    load.require(scale.dim() == 2 and scale.shape[0] == n, f"weight_scale must be [{n}, groups], got {list(scale.shape)}")
    group_size = _group_size_of(load, group_size, scale.shape[1], k)
    rows = weight_layout.groups(k, group_size)
    scales = load.scales(load.get("weight_scale", shape=(n, rows)).t(), dtype)
    codes = _unpacked(words, 1, bits)[:, :k]
    zeros = None
    if load.tensors.get("weight_zero_point") is not None:
        zeros = _unpacked(load.get("weight_zero_point", torch.int32, (-(-n // in_a_word), rows)), 0, bits)[:n].t()
    perm = None
    g_idx = load.tensors.get("weight_g_idx")
    if g_idx is not None and not bool((g_idx == -1).all()):
        perm = load.order(load.get("weight_g_idx", shape=(k,)), k, group_size)
        if perm is not None:
            codes = codes.index_select(1, perm)
    return weight_of_codes(codes, scales, zeros, group_size=group_size, format=f"int{bits}", perm=perm, bias=load.bias(scales.dtype))


def _byte_quantized(load: _Loader, group_size: int | None, format: str, dtype: torch.dtype | None) -> W8Weight:
    legal = {"int-quantized": (torch.int8,), "float-quantized": (torch.float8_e4m3fn,)}.get(format, (torch.int8, torch.float8_e4m3fn))
    weight, scale, zero = load.get("weight"), load.get("weight_scale"), load.tensors.get("weight_zero_point")
    load.require(weight.dtype in legal, f"weight must be {' or '.join(map(str, legal))}, got {weight.dtype}")
    load.require(weight.dim() == 2, f"weight must have two dimensions, got {list(weight.shape)}")
    n, k = weight.shape
    codes = weight.view(torch.uint8)
    name, alpha = "fp8_e4m3", 1.0
    if weight.dtype == torch.int8:
        name, codes = "int8", codes ^ 128  # value + 128
        if zero is not None:
            load.require(zero.shape == scale.shape, f"weight_zero_point must be {list(scale.shape)}, got {list(zero.shape)}")
            zero = zero.to(torch.int16) + 128
    else:
        load.require(zero is None or not bool(zero.any()), "weight_zero_point must be 0 for float8_e4m3fn weights")
        zero = None
    if scale.numel() == 1 and n > 1:  # of the whole weight: alpha keeps it in full
        alpha = float(scale)
        scale = load.scales(scale, dtype).new_ones(n, 1)
        zero = None if zero is None else zero.expand(n).unsqueeze(1) if zero.dim() == 0 else zero.reshape(1, 1).expand(n, 1)
    elif scale.dim() == 1:
        scale, zero = scale.unsqueeze(1), None if zero is None else zero.unsqueeze(1)
    load.require(scale.dim() == 2 and scale.shape[0] == n, f"weight_scale must be [{n}, groups], got {list(scale.shape)}")
    group_size = _group_size_of(load, group_size if scale.shape[1] > 1 else None, scale.shape[1], k)
    rows = weight_layout.groups(k, group_size)
    load.require(scale.shape[1] == rows, f"weight_scale must be [{n}, {rows}], got {list(scale.shape)}")
    scales = load.scales(scale.t(), dtype)
    zeros = None if zero is None else zero.t()
    return weight_of_codes(codes, scales, zeros, group_size=group_size, format=name, bias=load.bias(scales.dtype), alpha=alpha)


def from_bitsandbytes(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> W4Weight:
    """A layer of a bitsandbytes NF4 checkpoint; W.flatten()[i] = NF4[code] * absmax[i // blocksize].

    Args:
      tensors: ``weight``, the codes of W.flatten(), two to a byte, the first in the high four bits, in a tensor of any dtype;
        ``weight.quant_state.bitsandbytes__nf4``, uint8, a JSON text with quant_type, blocksize, shape, dtype and, where absmax is
        quantised too, nested_blocksize and nested_offset; ``weight.absmax``, float32 [n * k / blocksize], or uint8 with
        absmax = nested_quant_map[code] * nested_absmax[i // nested_blocksize] + nested_offset; then ``weight.nested_quant_map`` and
        ``weight.nested_absmax``; ``weight.quant_map``, the code book, which is held against NF4's; optionally ``bias`` [n].
      dtype: of the scales, which are float32 in the file and are rounded; default: the dtype in the JSON text.

    Returns:
      The packed weight, on the tensors' device.

    Raises:
      ValueError: a tensor is missing, or it or an argument cannot be right; fp4; rows that are not whole blocks.
    """
    load = _Loader("from_bitsandbytes", tensors)
    text = load.get("weight.quant_state.bitsandbytes__nf4", torch.uint8)
    state = json.loads(bytes(text.tolist()).decode())
    load.require(state.get("quant_type") == "nf4", f"quant_type must be nf4, got {state.get('quant_type')}")
    shape, size = state["shape"], state["blocksize"]
    load.require(len(shape) == 2, f"shape must be [n, k], got {shape}")
    n, k = shape
    load.group_size(size, "nf4")
    load.require(k % size == 0 and n * k > 0, f"k must be a multiple of the blocksize {size}, got shape {shape}")
    book = load.tensors.get("weight.quant_map")
    fits = book is None or (book.numel() == 16 and torch.allclose(book.float().cpu(), torch.tensor(weight_formats.NF4), rtol=0, atol=1e-6))
    load.require(fits, "weight.quant_map must be the code book of NF4")
    packed = load.get("weight").contiguous().view(torch.uint8).flatten()
    load.require(2 * packed.numel() == n * k, f"weight must have {n * k // 2} bytes for shape {shape}, got {packed.numel()}")
    absmax = load.get("weight.absmax").flatten()
    load.require(absmax.numel() == n * k // size, f"weight.absmax must have {n * k // size} elements, got {absmax.numel()}")
    if absmax.dtype == torch.uint8:
        nested, offset = state["nested_blocksize"], torch.tensor(state["nested_offset"], dtype=torch.float32, device=absmax.device)
        outer = load.get("weight.nested_absmax", torch.float32, (-(-absmax.numel() // nested),)).repeat_interleave(nested)
        inner = load.get("weight.nested_quant_map", torch.float32, (256,))[absmax.int()]
        absmax = inner * outer[: absmax.numel()] + offset
    default = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(state.get("dtype"), absmax.dtype)
    scales = load.scales(absmax.view(n, k // size).t(), dtype or default)
    codes = _nibbles(packed, high_first=True).view(n, k)
    return weight_of_codes(codes, scales, group_size=size, format="nf4", bias=load.bias(scales.dtype))


def from_mxfp4(tensors: Mapping[str, Tensor]) -> W4Weight | list[W4Weight]:
    """OCP MXFP4 weights as gpt-oss stores them; W[i, 32 b + j] = e2m1(code j of block b) * 2^(scale - 127).

    Args:
      tensors: ``blocks`` uint8 [..., n, k / 32, 16], the even column in the low four bits; ``scales`` [..., n, k / 32], uint8 or
        float8_e8m0fnu; optionally ``bias`` [..., n]. In gpt-oss's files the names begin with "gate_up_proj_" or "down_proj_".

    Returns:
      The packed weight, on the tensors' device; a list of them, in order, where there are leading dimensions (experts).

    Raises:
      ValueError: a tensor is missing, or cannot be right.
    """
    load = _Loader("from_mxfp4", tensors)
    blocks = load.octets("blocks")
    good = blocks.dim() >= 3 and blocks.shape[-1] == 16
    load.require(good, f"blocks must be [..., n, k / 32, 16], got {list(blocks.shape)}")
    scales = load.octets("scales", blocks.shape[:-1])
    bias = load.get("bias", shape=blocks.shape[:-2]) if load.tensors.get("bias") is not None else None
    codes = _nibbles(blocks.flatten(-2))
    if blocks.dim() == 3:
        return weight_of_codes(codes, scales.t(), group_size=32, format="mxfp4", bias=bias)
    experts = zip(codes.flatten(0, -3), scales.flatten(0, -3), strict=True)
    biases = [None] * codes.flatten(0, -3).shape[0] if bias is None else bias.flatten(0, -2)
    return [
        weight_of_codes(code, scale.t(), group_size=32, format="mxfp4", bias=own)
        for (code, scale), own in zip(experts, biases, strict=True)
    ]
