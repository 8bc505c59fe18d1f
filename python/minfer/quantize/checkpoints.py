"""Loaders of 4-bit checkpoints: the codes, scales and zero points as they are, in another order of bits. Nothing is requantised.

Each takes the tensors of one linear layer by their names in the file, without the layer's prefix. On disk eight codes share an int32,
the first in its low four bits unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import weight_layout
from ..checks import DTYPES
from .weight import W4Weight, weight_of_codes

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds the word's column _AWQ_COLUMNS[i]


def _unpacked(words: Tensor, dim: int, nibbles: Sequence[int] | None = None) -> Tensor:
    """int32 words -> uint8 codes, eight for one along ``dim``; ``nibbles``: where a word keeps its first, second, ... code."""
    # A clone, for contiguous() keeps the odd strides that a dimension of one element may have.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).unflatten(-1, (words.shape[-1], 4))
    codes = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
    if nibbles is not None:
        codes = codes[..., list(nibbles)]
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


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

    def group_size(self, group_size: int) -> int:
        good = group_size == -1 or (group_size >= weight_layout.MIN_GROUP and group_size & (group_size - 1) == 0)
        self.require(good, f"group_size must be -1 or a power of two >= {weight_layout.MIN_GROUP}, got {group_size}")
        return group_size

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        bias = self.tensors.get("bias")
        return bias if bias is None or bias.dtype == torch.float32 else bias.to(dtype)

    def order(self, g_idx: Tensor, k: int, group_size: int) -> Tensor | None:
        """The columns sorted by their group, as perm; None where they are sorted already."""
        size = k if group_size == -1 else group_size
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
) -> W4Weight:
    """A layer of a GPTQ checkpoint (AutoGPTQ, GPTQModel); W[i, j] = scales[g_idx[j], i] * (code - zero).

    Args:
      tensors: ``qweight`` int32 [k / 8, n], packed along k; ``qzeros`` int32 [G, n / 8], packed along n; ``scales`` [G, n]; optionally
        ``g_idx`` [k], the group of each column, and ``bias`` [n].
      group_size, bits, sym, desc_act: of the checkpoint's quantization config; bits must be 4. sym and desc_act are only held against
        the tensors, which say the same: zero points, and columns out of their groups' order.
      checkpoint_format: "gptq" stores zero - 1 (in four bits, so zero 0 is stored as 15), "gptq_v2" stores zero.
      dtype: rounds the scales to float16 or bfloat16; default: as stored.

    Returns:
      The packed weight, on the tensors' device, ``perm`` set where columns are out of order.

    Raises:
      ValueError: a tensor is missing, or it or an argument cannot be right.
    """
    load = _Loader("from_gptq", tensors)
    load.require(bits == 4, f"bits must be 4, got {bits}")
    load.require(checkpoint_format in ("gptq", "gptq_v2"), f"checkpoint_format must be gptq or gptq_v2, got '{checkpoint_format}'")
    load.group_size(group_size)
    words = load.words("qweight")
    k, n = 8 * words.shape[0], words.shape[1]
    rows = weight_layout.groups(k, group_size)
    scales = load.scales(load.get("scales", shape=(rows, n)), dtype)
    zeros = _unpacked(load.get("qzeros", torch.int32, (rows, n // 8)), 1)
    if checkpoint_format == "gptq":
        zeros = (zeros + 1) & 15
    load.require(not sym or bool((zeros == 8).all()), "sym is set, but not all zero points are 8; is checkpoint_format right?")
    codes = _unpacked(words, 0).t()
    perm = None
    if tensors.get("g_idx") is not None and tensors["g_idx"].numel() > 0:
        perm = load.order(load.get("g_idx", shape=(k,)), k, group_size)
    load.require(desc_act is not False or perm is None, "desc_act is not set, but g_idx is out of order")
    if perm is not None:
        codes = codes.index_select(1, perm)
    return weight_of_codes(codes, scales, zeros, group_size=group_size, perm=perm, bias=load.bias(scales.dtype))


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
    zeros = _unpacked(load.get("qzeros", torch.int32, (rows, n // 8)), 1, nibbles)
    codes = _unpacked(words, 1, nibbles).t()
    return weight_of_codes(codes, scales, zeros, group_size=group_size, bias=load.bias(scales.dtype))


def from_compressed_tensors(
    tensors: Mapping[str, Tensor], *, group_size: int | None = None, num_bits: int = 4, dtype: torch.dtype | None = None
) -> W4Weight:
    """A layer of a compressed-tensors checkpoint ("pack-quantized"); W[i, j] = weight_scale[i, group of j] * (value - zero point).

    Args:
      tensors: ``weight_packed`` int32 [n, ceil(k / 8)], packed along k, codes being value + 8; ``weight_scale`` [n, G]; ``weight_shape``, n
        and k; optionally ``weight_zero_point`` int32 [ceil(n / 8), G], packed along n, zero point + 8; ``weight_g_idx`` [k], the group of
        each column (all -1: not used); and ``bias`` [n].
      group_size: of the checkpoint's weights config; None: -1 where G is 1, otherwise k / G.
      num_bits: of the weights config, must be 4.
      dtype: rounds the scales to float16 or bfloat16; default: as stored.

    Returns:
      The packed weight, on the tensors' device, ``perm`` set where columns are out of order.

    Raises:
      ValueError: a tensor is missing, or it or an argument cannot be right.
    """
    load = _Loader("from_compressed_tensors", tensors)
    load.require(num_bits == 4, f"num_bits must be 4, got {num_bits}")
    n, k = (int(x) for x in load.get("weight_shape", shape=(2,)))
    words = load.get("weight_packed", torch.int32, (n, (k + 7) // 8))
    scale = load.get("weight_scale")
    load.require(scale.dim() == 2 and scale.shape[0] == n, f"weight_scale must be [{n}, groups], got {list(scale.shape)}")
    if group_size is None:
        count = scale.shape[1]
        load.require(count == 1 or (count > 1 and k % count == 0), f"group_size must be given: weight_scale has {count} groups for k = {k}")
        group_size = -1 if count == 1 else k // count
    load.group_size(group_size)
    rows = weight_layout.groups(k, group_size)
    scales = load.scales(load.get("weight_scale", shape=(n, rows)).t(), dtype)
    codes = _unpacked(words, 1)[:, :k]
    zeros = None
    if tensors.get("weight_zero_point") is not None:
        zeros = _unpacked(load.get("weight_zero_point", torch.int32, ((n + 7) // 8, rows)), 0)[:n].t()
    perm = None
    g_idx = tensors.get("weight_g_idx")
    if g_idx is not None and not bool((g_idx == -1).all()):
        perm = load.order(load.get("weight_g_idx", shape=(k,)), k, group_size)
        if perm is not None:
            codes = codes.index_select(1, perm)
    return weight_of_codes(codes, scales, zeros, group_size=group_size, perm=perm, bias=load.bias(scales.dtype))
