"""KV caches with contents: which rows the operators may look at, and garbage in all others. Layouts are the table's of minfer.kv_cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..draw import Data, Draw
from ..family import Parameters, WrongTensors
from ..truth.kv_formats import E4M3_NAN, e4m3, nibbles

FORMATS = ("16bit", "fp8_e4m3", "int8", "int4")
HEAD_DIM_UNITS = {"16bit": 8, "fp8_e4m3": 8, "int8": 8, "int4": 32}
# Pages that no cache has, and -1 and 0, with which engines pad their tables.
NO_PAGE = (10**6, 2**31 - 1, -1, -(2**31), 0)
SCALES = ("k_scale", "v_scale", "k_residual", "v_residual")


@dataclass
class Shape:
    """Of a cache; contiguous ones have a page for each sequence. group_tokens, group_channels: int4."""

    kv_format: str
    dtype: torch.dtype
    pages: int
    page_size: int
    heads: int
    head_dim: int
    head_dim_v: int
    batch: int
    group_tokens: int = 32
    group_channels: int = 32
    scale_per_head: bool = True
    fp8_as_bytes: bool = False

    def in_codes(self, length: int) -> int:
        """Tokens that are in pages: the newest of int4 are in the residual."""
        return length // self.group_tokens * self.group_tokens if self.kv_format == "int4" else length


def shape_of(p: Parameters, dtype: torch.dtype) -> Shape:
    heads = p["heads"][1] if isinstance(p["heads"], tuple) else p["heads"]
    own = {name: p[name] for name in ("kv_format", "pages", "page_size", "batch", "group_tokens", "group_channels")}
    return Shape(
        dtype=dtype,
        heads=heads,
        head_dim=p["dims"][0],
        head_dim_v=p["dims"][1],
        scale_per_head=p["scale_per_head"],
        fp8_as_bytes=p["fp8_as_bytes"],
        **own,
    )


def draw_format(draw: Draw, p: Parameters) -> Parameters:
    """What a cache of p's dims and page size has beside them. page_size must be a multiple of 32 for int4."""
    head_dim_v = p["dims"][1]
    page = p["page_size"]
    groups = [g for g in (32, 64) if page % g == 0] or [32]
    channels = [c for c in range(32, head_dim_v + 1, 32) if head_dim_v % c == 0] or [32]
    return {
        "group_tokens": draw.choice(groups),
        "group_channels": draw.choice(channels),
        "scale_per_head": draw.chance(0.7),
        "fp8_as_bytes": draw.chance(0.3),
    }


def dense_rows(p: Parameters) -> bool:
    """Whether rows of a contiguous cache are whole 16 bytes, as TMA wants them."""
    bits = {"16bit": 16, "int4": 4}.get(p["kv_format"], 8)
    return all(d * bits % 128 == 0 for d in p["dims"])


def kv_format_option(shape: Shape, draw_explicit: bool) -> str:
    """auto, where that is told by the dtype, or the name."""
    needed = shape.kv_format == "fp8_e4m3" and shape.fp8_as_bytes
    return shape.kv_format if needed or draw_explicit else "auto"


def random_cache(shape: Shape, data: Data) -> dict[str, Tensor | None]:
    """A cache without garbage: any tokens anywhere. fp8 codes are bytes here."""
    s, pages, size, heads = shape, shape.pages, shape.page_size, shape.heads
    found: dict[str, Tensor | None] = dict.fromkeys(SCALES)
    for name, d in (("k", s.head_dim), ("v", s.head_dim_v)):
        if s.kv_format == "16bit":
            codes = data.normal(pages, size, heads, d, dtype=s.dtype)
        elif s.kv_format == "fp8_e4m3":
            codes = data.normal(pages, size, heads, d).to(torch.float8_e4m3fn).view(torch.uint8)
            found[f"{name}_scale"] = data.uniform(heads if s.scale_per_head else 1, low=0.5, high=1.5)
        elif s.kv_format == "int8":
            codes = data.integers(-127, 128, pages, size, heads, d, dtype=torch.int8)
            found[f"{name}_scale"] = data.uniform(pages, heads, size, low=0.5 / 64, high=1.5 / 64)
        else:
            codes = data.integers(0, 256, pages, size, heads, d // 2, dtype=torch.uint8)
            found[f"{name}_residual"] = data.normal(s.batch, s.group_tokens, heads, d, dtype=s.dtype)
        found[f"{name}_cache"] = codes
    if s.kv_format == "int4":
        groups, parts = size // s.group_tokens, s.head_dim_v // s.group_channels
        scale = data.uniform(pages, heads, groups, 2, s.head_dim, low=0.5 / 8, high=1.5 / 8)
        scale[:, :, :, 1] = data.normal(pages, heads, groups, s.head_dim, scale=0.5) - 1
        found["k_scale"] = scale.half()
        scale = data.uniform(pages, heads, 2 * parts, size, low=0.5 / 8, high=1.5 / 8)
        scale[:, :, parts:] = data.normal(pages, heads, parts, size, scale=0.5) - 1
        found["v_scale"] = scale.half()
    return found


def spoil(cache: dict[str, Tensor | None], shape: Shape, used: Tensor, residual_used: Tensor | None, poison: float) -> None:
    """Garbage in all rows but ``used`` [pages, page_size] and, of the residuals, [batch, group_tokens]."""
    unused = ~used
    for name in ("k", "v"):
        codes, scale, residual = cache[f"{name}_cache"], cache[f"{name}_scale"], cache[f"{name}_residual"]
        if shape.kv_format == "16bit":
            codes[unused] = poison
        elif shape.kv_format == "fp8_e4m3":
            codes[unused] = E4M3_NAN[poison != poison]
        elif shape.kv_format == "int8":
            scale.mT[unused] = poison
        elif name == "k":
            groups = used.unflatten(1, (-1, shape.group_tokens)).any(-1)
            scale.transpose(1, 2)[~groups] = poison
        else:
            scale.permute(0, 3, 1, 2)[unused] = poison
        if residual is not None:
            residual[~residual_used] = poison


def as_operands(cache: dict[str, Tensor | None], shape: Shape) -> dict[str, Tensor | None]:
    """The codes in the dtype in which they are passed."""
    if shape.kv_format == "fp8_e4m3" and not shape.fp8_as_bytes:
        return cache | {name: cache[name].view(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    return cache


@dataclass
class Values:
    """K or V of padded sequences in float64, [batch, keys, heads, d], with what errors are relative to, see truth.attention.Codes."""

    value: Tensor
    magnitude: Tensor
    floor: Tensor


def values_at(cache: dict[str, Tensor | None], shape: Shape, name: str, page: Tensor, row: Tensor, wanted: Tensor) -> Values:
    """What is stored at page and row [batch, keys], where ``wanted``; zeros elsewhere."""
    codes, scale = cache[f"{name}_cache"], cache[f"{name}_scale"]
    at, row_at = page[wanted], row[wanted]
    raw = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
    raw = raw[at, row_at]  # [wanted, heads, d]
    minimum: Tensor | float = 0.0
    if shape.kv_format == "16bit":
        code, factor = raw.double(), 1.0
    elif shape.kv_format == "fp8_e4m3":
        code, factor = e4m3(raw), scale.double().view(-1, 1)
    elif shape.kv_format == "int8":
        code, factor = raw.double(), scale.mT[at, row_at].double().unsqueeze(-1)
    elif name == "k":
        own = scale.transpose(1, 2)[at, row_at // shape.group_tokens].double()  # [wanted, heads, 2, d]
        code, factor, minimum = nibbles(raw).double(), own[:, :, 0], own[:, :, 1]
    else:
        own = scale.permute(0, 3, 1, 2)[at, row_at].double().repeat_interleave(shape.group_channels, -1)
        code, factor, minimum = nibbles(raw).double(), own[..., : shape.head_dim_v], own[..., shape.head_dim_v :]
    low = minimum if isinstance(minimum, Tensor) else torch.zeros_like(code)
    magnitude = (code * factor).abs() + low.abs()
    floor = magnitude
    if shape.kv_format == "int8":  # exponentials times scales, relative to the largest scale
        floor = code.abs() * (factor.amax() if code.numel() else 1.0)
    elif shape.kv_format == "int4":
        floor = magnitude + code
    found = []
    for x in (code * factor + low, magnitude, floor):
        whole = torch.zeros(*wanted.shape, *x.shape[1:], dtype=torch.float64, device=codes.device)
        whole[wanted] = x
        found.append(whole)
    return Values(*found)


def wrong_caches(p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
    """Scales that a format lacks or has not, and views that TMA does not address."""
    form, k, v = p["kv_format"], tensors["k_cache"], tensors["v_cache"]
    device = k.device
    found: list[WrongTensors] = []
    needed = {"16bit": (), "int4": SCALES}.get(form, SCALES[:2])
    for name in SCALES:
        if name in needed:
            found.append((f"{name} is missing", {name: None}, (name,)))
        else:
            found.append((f"{name} is given", {name: torch.ones(1, device=device)}, (name,)))
    if form == "fp8_e4m3":
        found.append(
            ("k_scale has other elements than heads", {"k_scale": torch.ones(k.shape[2] + 2, device=device)}, ("k_scale", "v_scale"))
        )
    for name, x in (("k_cache", k), ("v_cache", v)):
        if x.numel() == 0 or x.shape[3] < 2:
            continue
        room = torch.zeros((x.numel() * 2 + 8) * x.element_size(), dtype=torch.uint8, device=device).view(x.dtype)
        dense = [x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3], 1]
        found.append((f"{name} begins at an odd address", {name: room.as_strided(x.shape, dense, 1)}, (name,)))
        found.append((f"{name} has steps along head_dim", {name: room.as_strided(x.shape, [2 * s for s in dense], 0)}, (name,)))
        if x.shape[0] > 1:
            found.append((f"{name} repeats a page", {name: room.as_strided(x.shape, [0, *dense[1:]], 0)}, (name,)))
    return found


def poison_of(draw: Draw) -> float:
    return draw.pick(math.nan, math.nan, math.nan, math.inf, -math.inf)
