"""minfer.qk_norm_rope_append: kv_cache_append of rotated keys, and the queries.

A key's codes follow from the key as it is rounded behind the rotation. Of most cases that is exact: keys have no norm, and the table turns
by multiples of 90 degrees. Others have any table and norm, and a 16-bit cache, whose keys have a bound.
"""

from __future__ import annotations

import dataclasses

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Parameters
from ..truth import rows as truth
from ..truth.epilogue import Bounded
from .attention import DTYPES, HALVES
from .fused import INDICES, WRONG_EPS
from .gemm import wrong_scalars
from .kv_cache_append import KvCacheAppend
from .kv_caches import SCALES, kv_format_option, shape_of


class QkNormRopeAppend(KvCacheAppend):
    name = "qk_norm_rope_append"
    views = KvCacheAppend.views | {"qkv": arena.VIEW, "positions": arena.VIEW}
    views |= {name: arena.ANY for name in ("q_weight", "k_weight", "cos_sin")}

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return arena.Rule(unit=16, dense=True) if name in SCALES[2:] else super().rule(p, name)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        while True:
            p = super().draw(draw, limits)
            d = p["dims"][0]
            p |= {"heads_q": draw.pick(1, 2, 3, 8, 0), "exact": p["kv_format"] != "16bit" or draw.chance(0.3)}
            if p["dims"][1] == d and p["tokens"] * p["heads_q"] * d <= limits.elements // 2:
                break
        p |= {
            "interleaved": draw.chance(0.4),
            "rotary_dim": d if draw.chance(0.6) else 2 * draw.randint(1, d // 2),
            "say": draw.chance(0.3),
        }
        p |= {"length": draw.pick(1, 17, 300), "places": draw.pick("int64", "int32"), "q_weight": draw.chance(0.6)}
        p |= {"eps": draw.pick(1e-6, 1e-5, 0.1), "weight_offset": draw.pick(0.0, 0.0, 1.0, -0.3)}
        overflows = p["kind"] == "huge" and p["huge"] > 1e7  # squares do
        return p | {"k_weight": not p["exact"] and not overflows and draw.chance(0.6)}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        contents = super().fill(p, draw, data)
        t, d, dtype = contents.tensors, p["dims"][0], DTYPES[p["dtype"]]
        half = p["rotary_dim"] // 2
        if p["exact"]:
            quarter = data.integers(0, 4, p["length"], half, dtype=torch.int64)
            cos, sin = (data.tensor(x, torch.float32)[quarter] for x in ([1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]))
        else:
            angle = data.uniform(p["length"], half, high=6.28)
            cos, sin = angle.cos(), angle.sin()
        t["qkv"] = torch.cat([data.normal(p["tokens"], p["heads_q"], d, dtype=dtype), t.pop("k"), t.pop("v")], 1)
        t |= {"cos_sin": torch.cat([cos, sin], -1)}
        t["positions"] = data.integers(0, p["length"], p["tokens"], dtype=getattr(torch, p["places"]))
        for name in ("q_weight", "k_weight"):
            t[name] = data.normal(d, dtype=dtype) if p[name] else None
        return contents

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        shape = shape_of(p, DTYPES[p["dtype"]])
        options = {name: t[name] for name in (*SCALES, "cu_seqlens")} | {"kv_format": kv_format_option(shape, p["explicit"])}
        options |= {name: p[name] for name in ("eps", "weight_offset", "interleaved")}
        options |= ({"rotary_dim": p["rotary_dim"]} if p["say"] else {}) | p.get("extra", {})
        names = ("qkv", "q_weight", "k_weight", "cos_sin", "positions", "k_cache", "v_cache", "slot_mapping")
        q = minfer.qk_norm_rope_append(*(t[name] for name in names), **options)
        return {"q": q} | {name: t[name] for name in self.written(p)}

    def prepared(self, p: Parameters, t: dict[str, Tensor | None], x: Tensor, weight: Tensor | None) -> Bounded:
        """Heads behind norm and rotation, not rounded."""
        y = Bounded(x.double(), torch.zeros_like(x, dtype=torch.float64))
        if weight is not None:
            y = truth.rms_norm(x, weight, p["eps"], p["weight_offset"])
        turned = truth.rope(y.value, t["cos_sin"], t["positions"].long(), p["interleaved"])
        # A pair's errors are turned, too.
        more = 2 * y.error.amax(-1, keepdim=True) if y.error.numel() else y.error
        return Bounded(turned.value, turned.error + more)

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, dtype = contents.tensors, DTYPES[p["dtype"]]
        q, k, v = t["qkv"].split([p["heads_q"], p["heads"], p["heads"]], 1)
        keys = self.prepared(p, t, k, t["k_weight"])
        of_append = dataclasses.replace(contents, tensors=t | {"k": keys.value.to(dtype), "v": v})
        found = super().expect(p, of_append, before, have)
        if not p["exact"]:  # a 16-bit cache
            rounded = keys.rounded(dtype)
            (cache,) = [want for want in found if want.name == "k_cache"]
            capacity, slots = p["pages"] * p["page_size"], contents.facts["slots"]
            tokens = [i for i, slot in enumerate(slots) if 0 <= slot < capacity]
            token = torch.tensor(tokens, dtype=torch.long, device=k.device)
            slot = torch.tensor([slots[i] for i in tokens], dtype=torch.long, device=k.device)
            at = slot // p["page_size"], slot % p["page_size"]
            cache.truth = cache.truth.double()
            cache.bound = torch.zeros_like(cache.truth)
            cache.truth[at], cache.bound[at] = rounded.value[token], rounded.error[token]
        return [truth.expected("q", self.prepared(p, t, q, t["q_weight"]), dtype), *found]

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        found = {name: argument for name, argument in super().arguments(p).items() if name not in ("k", "v")}
        beside = ("k_cache", "slot_mapping", "head_dim", "kv_format", "positions", "rotary_dim", "q_weight", "k_weight", "cos_sin")
        found["qkv"] = Argument(HALVES, ("tokens", "", "head_dim"), beside)
        found["cos_sin"] = Argument((torch.float32,), ("", ""), ("rotary_dim",))
        found["positions"] = Argument(INDICES, ("tokens",))
        for name in ("q_weight", "k_weight"):
            if p[name]:
                found[name] = Argument((DTYPES[p["dtype"]],), ("head_dim",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        values = (0, -2, 3, p["dims"][0] + 2)
        found = [*super().wrong_options(p), *WRONG_EPS, *wrong_scalars("weight_offset")]
        return found + [("rotary_dim", value, "rotary_dim") for value in values]
