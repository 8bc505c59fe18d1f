"""minfer.allocate_kv_cache: the tensors of each format, and sizes that no operator would take."""

from __future__ import annotations

from typing import Any

import minfer
import torch
from torch import Tensor

from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Contents, Family, Parameters
from .attention import DTYPES, HALVES
from .kv_caches import FORMATS

UNITS = {"16bit": 8, "fp8_e4m3": 16, "int8": 16, "int4": 32}
CODES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


class AllocateKvCache(Family):
    name = "allocate_kv_cache"
    share = 0.4
    traced = False  # no operator: tensors are made by torch
    error = ValueError

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        form = draw.choice(FORMATS)
        unit = UNITS[form]
        head_dim = unit * draw.randint(1, 256 // unit)
        head_dim_v = None if draw.chance(0.6) else unit * draw.randint(1, head_dim // unit)
        group = draw.pick(32, 64)
        paged = form != "16bit" or draw.chance(0.7)
        page_size = (group if form == "int4" else 8) * draw.randint(1, 4) if paged else draw.randint(0, 70)
        p: Parameters = {"pages": draw.pick(0, 1, 3, 7), "page_size": page_size, "heads_kv": draw.pick(0, 1, 2, 3), "head_dim": head_dim}
        p |= {"head_dim_v": head_dim_v, "kv_format": form, "dtype": name_of(draw.choice(HALVES)), "paged": paged}
        width = head_dim_v or head_dim
        channels = [c for c in range(32, width + 1, 32) if width % c == 0]
        p |= {"group_tokens": group, "group_channels": draw.pick(None, draw.choice(channels)) if channels else None}
        return p | {"batch": draw.pick(None, 1, 5)}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        return Contents({}, {"device": data.device})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: p[name] for name in ("head_dim_v", "kv_format", "paged", "group_tokens", "group_channels", "batch")}
        options |= {"dtype": DTYPES[p["dtype"]]} | {name: p[name] for name in ("pages", "page_size", "heads_kv", "head_dim")}
        cache = minfer.allocate_kv_cache(**(options | p.get("extra", {})))
        assert cache.kv_format == p["kv_format"]
        return {name: x for name, x in cache._asdict().items() if isinstance(x, Tensor)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        form, dtype, pages, size, heads = p["kv_format"], DTYPES[p["dtype"]], p["pages"], p["page_size"], p["heads_kv"]
        head_dim, head_dim_v = p["head_dim"], p["head_dim_v"] or p["head_dim"]
        per_byte = 2 if form == "int4" else 1
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype, float]] = {}
        for name, d in (("k", head_dim), ("v", head_dim_v)):
            shapes[name] = ((pages, size, heads, d // per_byte), CODES.get(form, dtype), 0.0)
            if form == "fp8_e4m3":
                shapes[f"{name}_scale"] = ((heads,), torch.float32, 1.0)
            if form == "int8":
                shapes[f"{name}_scale"] = ((pages, heads, size), torch.float32, 0.0)
            if form == "int4":
                sequences = pages if p["batch"] is None else p["batch"]
                shapes[f"{name}_residual"] = ((sequences, p["group_tokens"], heads, d), dtype, 0.0)
        if form == "int4":
            channels = p["group_channels"] or (64 if head_dim_v % 64 == 0 else 32)
            shapes["k_scale"] = ((pages, heads, size // p["group_tokens"], 2, head_dim), torch.float16, 0.0)
            shapes["v_scale"] = ((pages, heads, 2 * (head_dim_v // channels), size), torch.float16, 0.0)
        found = []
        for name, (shape, of, value) in shapes.items():
            found.append(Expected(name, of, torch.full(shape, value, dtype=torch.float64), contiguous=False))
        return found

    def operator_names(self) -> tuple[str, ...]:
        return ("allocate_kv_cache:",)

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        form, unit = p["kv_format"], UNITS[p["kv_format"]]
        found: list[tuple[str, Any, str]] = [("kv_format", x, "kv_format") for x in ("auto", "int3", "")]
        found += [("dtype", x, "dtype") for x in (torch.float32, torch.int8)]
        found += [("head_dim", x, "head_dim") for x in (0, -unit, 256 + unit, unit // 2, 8.0)]
        found += [("head_dim_v", x, "head_dim_v") for x in (0, p["head_dim"] + unit, unit + 4)]
        found += [(name, -1, name) for name in ("pages", "page_size", "heads_kv", "batch")]
        if p["paged"] or form != "16bit":
            found += [("page_size", x, "page_size") for x in (12, 20)]
        if form == "int4":
            found += [("group_tokens", x, "group_tokens") for x in (0, 16, 128)]
            found += [("group_channels", x, "group_channels") for x in (16, 33, 512)]
        return found
