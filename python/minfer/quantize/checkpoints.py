"""Loaders of checkpoints with 4-bit and 8-bit weights: the codes, scales and zero points as they are, in another order of bits. Nothing is
requantised; float32 scales are rounded to the 16-bit type of the activations, but for a weight's only scale, which becomes its alpha.

Each takes the tensors of one linear layer by their names in the file, without the layer's prefix; those that are optional may be None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks.common import FLOAT32_MAX, is_integer
from ..formats import weight_formats, weight_layout
from .loader import FLOATS, INTEGERS, Loader
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
    load = Loader("from_gptq", tensors)
    load.choice("bits", bits, (4, 8))
    load.choice("checkpoint_format", checkpoint_format, ("gptq", "gptq_v2"))
    load.group_size(group_size)
    load.flag("sym", sym)
    load.flag("desc_act", desc_act)
    words, in_a_word = load.get("qweight", (torch.int32,), dims=2), 32 // bits
    k, n = in_a_word * words.shape[0], words.shape[1]
    load.extents("qweight", n, k)
    rows = weight_layout.groups(k, group_size)
    scales = load.scales("scales", load.get("scales", FLOATS, (rows, n)), dtype)
    zeros = _unpacked(load.get("qzeros", (torch.int32,), (rows, n // in_a_word)), 1, bits)
    if checkpoint_format == "gptq":
        zeros = (zeros + 1) & (2**bits - 1)  # the byte wraps too
    usual = 2 ** (bits - 1)
    load.require(not sym or bool((zeros == usual).all()), f"sym is set, but not all zero points are {usual}; is checkpoint_format right?")
    codes = _unpacked(words, 0, bits).t()
    ordered = load.has("g_idx") and load.get("g_idx").numel() > 0
    load.require(ordered or not desc_act or rows == 1, "desc_act is set, but there is no g_idx, which says the columns' groups")
    perm = load.order("g_idx", k, group_size) if ordered else None
    load.require(desc_act is not False or perm is None, "desc_act is not set, but g_idx is out of order")
    if perm is not None:
        codes = codes.index_select(1, perm)
    bias = load.bias((n,), scales.dtype)
    return weight_of_codes(codes, scales, zeros, group_size=group_size, format=f"int{bits}", perm=perm, bias=bias)


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
    load = Loader("from_awq", tensors)
    load.choice("bits", bits, (4,))
    load.require(isinstance(version, str) and version.lower() == "gemm", f"version must be gemm, got {version!r}")
    load.group_size(group_size)
    words = load.get("qweight", (torch.int32,), dims=2)
    k, n = words.shape[0], 8 * words.shape[1]
    load.extents("qweight", n, k)
    rows = weight_layout.groups(k, group_size)
    scales = load.scales("scales", load.get("scales", FLOATS, (rows, n)), dtype)
    nibbles = [_AWQ_COLUMNS.index(column) for column in range(8)]
    zeros = _unpacked(load.get("qzeros", (torch.int32,), (rows, n // 8)), 1, nibbles=nibbles)
    codes = _unpacked(words, 1, nibbles=nibbles).t()
    return weight_of_codes(codes, scales, zeros, group_size=group_size, bias=load.bias((n,), scales.dtype))


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
    load = Loader("from_compressed_tensors", tensors)
    load.choice("format", format, _COMPRESSED)
    if format == "pack-quantized":
        return _pack_quantized(load, group_size, 4 if num_bits is None else num_bits, dtype)
    bits = 4 if "fp4" in format else 8
    load.require(num_bits is None or (is_integer(num_bits) and num_bits == bits), f"num_bits must be {bits} for {format}, got {num_bits}")
    if bits == 8:
        return _byte_quantized(load, group_size, format, dtype)
    name = format.partition("-")[0]
    form = weight_formats.FORMATS[name]
    load.group_size(form.group_size if group_size is None else group_size, name)
    load.activations(dtype)
    packed = load.octets("weight_packed", torch.uint8, dims=2)
    n, k = packed.shape[0], 2 * packed.shape[1]
    load.extents("weight_packed", n, k)
    scales = load.octets("weight_scale", form.scale_type, (n, weight_layout.groups(k, form.group_size))).t()
    alpha = 1.0
    if name == "nvfp4":
        whole = load.number("weight_global_scale")
        load.require(whole > 0 and 1.0 / whole <= FLOAT32_MAX, f"weight_global_scale must be positive and its inverse finite, got {whole}")
        alpha = 1.0 / whole
    return weight_of_codes(_nibbles(packed), scales, group_size=form.group_size, format=name, bias=load.bias((n,), dtype), alpha=alpha)


def _group_size_of(load: Loader, group_size: int | None, count: int, k: int) -> int:
    """What was given, or what follows from the number of groups."""
    if group_size is not None:
        load.group_size(group_size)
        return group_size
    derived = -1 if count == 1 else k // count if count > 0 and k % count == 0 else 0
    good = weight_formats.legal_group_size("int4", derived)
    text = f"weight_scale must have one group, or one for 32, 64, .. columns, unless group_size is given; got {count} for k = {k}"
    load.require(good, text)
    return derived


def _pack_quantized(load: Loader, group_size: int | None, bits: int, dtype: torch.dtype | None) -> W4Weight | W8Weight:
    load.choice("num_bits", bits, (4, 8))
    n, k = (int(x) for x in load.get("weight_shape", INTEGERS, (2,)))
    load.extents("weight_shape", n, k)
    in_a_word = 32 // bits
    words = load.get("weight_packed", (torch.int32,), (n, k // in_a_word))
    scale = load.get("weight_scale", FLOATS, dims=2)
    group_size = _group_size_of(load, group_size, scale.shape[1], k)
    rows = weight_layout.groups(k, group_size)
    scales = load.scales("weight_scale", load.get("weight_scale", shape=(n, rows)).t(), dtype)
    codes = _unpacked(words, 1, bits)
    zeros = None
    if load.has("weight_zero_point"):
        zeros = _unpacked(load.get("weight_zero_point", (torch.int32,), (n // in_a_word, rows)), 0, bits).t()
    codes, perm = _sorted_columns(load, codes, k, group_size)
    bias = load.bias((n,), scales.dtype)
    return weight_of_codes(codes, scales, zeros, group_size=group_size, format=f"int{bits}", perm=perm, bias=bias)


def _sorted_columns(load: Loader, codes: Tensor, k: int, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Codes with the columns in the order of their groups, which weight_g_idx says where it is used, and that order."""
    if not load.has("weight_g_idx") or bool((load.get("weight_g_idx", INTEGERS, (k,)) == -1).all()):
        return codes, None
    perm = load.order("weight_g_idx", k, group_size)
    return (codes if perm is None else codes.index_select(1, perm)), perm


def _byte_quantized(load: Loader, group_size: int | None, format: str, dtype: torch.dtype | None) -> W8Weight:
    legal = {"int-quantized": (torch.int8,), "float-quantized": (torch.float8_e4m3fn,)}.get(format, (torch.int8, torch.float8_e4m3fn))
    weight, scale = load.get("weight", legal, dims=2), load.get("weight_scale", FLOATS)
    n, k = weight.shape
    load.extents("weight", n, k)
    shape = list(scale.shape)
    codes, name, alpha, zero = weight.view(torch.uint8), "fp8_e4m3", 1.0, None
    if weight.dtype == torch.int8:
        name, codes = "int8", codes ^ 128  # value + 128
        if load.has("weight_zero_point"):
            zero = load.get("weight_zero_point", (torch.int8,), scale.shape).to(torch.int16) + 128
    elif load.has("weight_zero_point"):
        absent = bool((load.get("weight_zero_point").float() == 0).all())
        load.require(absent, "weight_zero_point must be 0 for float8_e4m3fn weights, got others")
    if scale.numel() == 1:  # of the whole weight: alpha keeps it in full
        alpha = load.number("weight_scale")
        scale = torch.ones(n, 1, dtype=load.scales_dtype("weight_scale", scale.dtype, dtype), device=scale.device)
        zero = None if zero is None else zero.reshape(1, 1).expand(n, 1)
    elif scale.dim() == 1:
        scale, zero = scale.unsqueeze(1), None if zero is None else zero.unsqueeze(1)
    good = scale.dim() == 2 and scale.shape[0] == n
    load.require(good, f"weight_scale must be [{n}, groups], [{n}] or one number, got {shape}")
    group_size = _group_size_of(load, group_size, scale.shape[1], k)
    rows = weight_layout.groups(k, group_size)
    load.require(scale.shape[1] == rows, f"weight_scale must be [{n}, {rows}] for group_size {group_size}, got {shape}")
    scales = load.scales("weight_scale", scale.t(), dtype)
    zeros, bias = None if zero is None else zero.t(), load.bias((n,), scales.dtype)
    codes, perm = _sorted_columns(load, codes, k, group_size)
    return weight_of_codes(codes, scales, zeros, group_size=group_size, format=name, perm=perm, bias=bias, alpha=alpha)


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
    load = Loader("from_bitsandbytes", tensors)
    state = _BitsAndBytesState(load)
    (n, k), size = state.shape, state.positive("blocksize")
    load.group_size(size, "nf4")
    load.extents(state.name, n, k)
    load.require(k % size == 0, f"k must be a multiple of the blocksize {size}, got shape {[n, k]}")
    if load.has("weight.quant_map"):
        book = load.get("weight.quant_map", FLOATS, (16,)).cpu().float()
        same = torch.allclose(book, torch.tensor(weight_formats.NF4), rtol=0, atol=1e-6)
        load.require(same, f"weight.quant_map must be the code book of NF4, got {book.tolist()}")
    packed = load.get("weight").clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    load.require(2 * packed.numel() == n * k, f"weight must have {n * k // 2} bytes for shape {[n, k]}, got {packed.numel()}")
    blocks = n * k // size
    absmax = load.get("weight.absmax", (torch.float32, torch.uint8)).flatten()
    load.require(absmax.numel() == blocks, f"weight.absmax must have {blocks} elements, got {absmax.numel()}")
    if absmax.dtype == torch.uint8:
        nested, offset = state.positive("nested_blocksize"), state.finite("nested_offset")
        outer = load.get("weight.nested_absmax", (torch.float32,), (-(-blocks // nested),))
        inner = load.get("weight.nested_quant_map", (torch.float32,), (256,))
        absmax = inner[absmax.int()] * outer[torch.arange(blocks, device=outer.device) // nested] + offset
    scales = load.scales("weight.absmax", absmax.view(n, k // size).t(), state.dtype if dtype is None else dtype)
    codes = _nibbles(packed, high_first=True).view(n, k)
    return weight_of_codes(codes, scales, group_size=size, format="nf4", bias=load.bias((n,), scales.dtype))


class _BitsAndBytesState:
    """The JSON text of a layer: an object."""

    name = "weight.quant_state.bitsandbytes__nf4"

    def __init__(self, load: Loader):
        self.load = load
        text = load.get(self.name, (torch.uint8,), dims=1)
        try:
            self.fields = json.loads(bytes(text.tolist()).decode())
        except (ValueError, RecursionError) as error:  # of the encoding, of the syntax
            raise ValueError(f"{load.function}: {self.name} must be a JSON text, got {error}") from None
        load.require(isinstance(self.fields, dict), f"{self.name} must be a JSON object, got {self.fields!r}")
        kind = self.fields.get("quant_type")
        load.require(kind == "nf4", f"quant_type must be nf4, got {kind}")

    def field(self, name: str, good: Callable[[Any], bool], what: str) -> Any:
        value = self.fields.get(name)
        self.load.require(good(value), f"{name} of {self.name} must be {what}, got {value!r}")
        return value

    def positive(self, name: str) -> int:
        return self.field(name, lambda x: is_integer(x) and x > 0, "a positive integer")

    def finite(self, name: str) -> float:
        good = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= FLOAT32_MAX  # noqa: E731
        return float(self.field(name, good, "a number that is finite in float32"))

    @property
    def shape(self) -> list[int]:
        return self.field("shape", lambda x: isinstance(x, list) and len(x) == 2 and all(map(is_integer, x)), "[n, k]")

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the weight before it was quantised, where activations can have it; None: the file's."""
        known = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        return known.get(self.field("dtype", lambda x: x is None or isinstance(x, str), "a name"))


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
    blocks, scales, bias = mxfp4_tensors(Loader("from_mxfp4", tensors))
    if blocks.dim() == 3:
        return mxfp4_weight(blocks, scales, bias)
    blocks, scales = blocks.flatten(0, -4), scales.flatten(0, -3)
    biases = [None] * len(blocks) if bias is None else bias.flatten(0, -2)
    return [mxfp4_weight(*expert) for expert in zip(blocks, scales, biases, strict=True)]


def mxfp4_tensors(load: Loader, prefix: str = "", lead: str = "...") -> tuple[Tensor, Tensor, Tensor | None]:
    """``blocks`` and ``scales`` as uint8, and ``bias``; ``lead``: their leading dimensions, "..." any."""
    name = f"{prefix}blocks"
    blocks = load.octets(name, torch.uint8)
    good = (blocks.dim() >= 3 if lead == "..." else blocks.dim() == 4) and blocks.shape[-1] == 16
    load.require(good, f"{name} must be [{lead}, n, k / 32, 16], got {list(blocks.shape)}")
    load.extents(name, blocks.shape[-3], 32 * blocks.shape[-2])
    scales = load.octets(f"{prefix}scales", weight_formats.FORMATS["mxfp4"].scale_type, blocks.shape[:-1])
    return blocks, scales, load.bias(blocks.shape[:-2], None, f"{prefix}bias")


def mxfp4_weight(blocks: Tensor, scales: Tensor, bias: Tensor | None) -> W4Weight:
    """Of one matrix: uint8 [n, k / 32, 16] and [n, k / 32]."""
    return weight_of_codes(_nibbles(blocks.flatten(-2)), scales.t(), group_size=32, format="mxfp4", bias=bias)
