"""minfer.kv_cache_append: what is stored where, in every format, and that nothing else changes."""

from __future__ import annotations

import math
from itertools import accumulate

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of, smallest, unit
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Hostile, Parameters, WrongTensors
from ..truth.kv_formats import e4m3, nibbles
from .attention import DTYPES, HALVES, draw_head_dims, hostile_ends
from .kv_caches import (
    FORMATS,
    HEAD_DIM_UNITS,
    SCALES,
    as_operands,
    dense_rows,
    draw_format,
    kv_format_option,
    random_cache,
    shape_of,
    wrong_caches,
)

FP32 = 2.0**-20  # of a quotient: a few float32 roundings
LARGEST_E4M3 = 448.0


class KvCacheAppend(Family):
    name = "kv_cache_append"
    share = 3.0
    views = {name: arena.TMA for name in ("k_cache", "v_cache")}
    in_place = ("k_cache", "v_cache", *SCALES)

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        if name in SCALES:
            return arena.DENSE if p["kv_format"] != "fp8_e4m3" else arena.VIEW
        return super().rule(p, name)

    def written(self, p: Parameters) -> tuple[str, ...]:
        own = {"16bit": (), "fp8_e4m3": (), "int8": SCALES[:2], "int4": SCALES}[p["kv_format"]]
        return ("k_cache", "v_cache", *own)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        while True:
            kv_format = draw.weighted({"16bit": 2, "fp8_e4m3": 2, "int8": 2, "int4": 4})
            heads, dims = draw.weighted({1: 3, 2: 3, 3: 1, 8: 1, 0: 0.1}), draw_head_dims(draw, HEAD_DIM_UNITS[kv_format])
            unit_of_pages = 32 if kv_format == "int4" else 8
            paged = draw.chance(0.85)
            page_size = unit_of_pages * draw.randint(1, 256 // unit_of_pages)
            if draw.chance(0.6):
                page_size = draw.weighted({32: 3, 64: 3, 128: 3, 256: 3, 512: 1, 1024: 1})
            if kv_format == "16bit" and draw.chance(0.2):
                page_size = draw.randint(1, 100)
            sequences = draw.weighted({1: 3, 2: 2, 5: 1, 40: 1, 200: 0.5, 0: 0.1})
            decode = draw.chance(0.4)
            most = 1 if decode else max(1, draw.extent(150 if limits.small else 2000, tiles=(32, 64)))
            columns = -(-(most + page_size) // page_size) + draw.pick(0, 1)
            pages = sequences * columns + draw.pick(0, 1, 3)
            if not paged:
                page_size, columns, pages = columns * page_size, 1, sequences
            if pages * page_size * heads * dims[0] <= limits.elements and sequences * most * heads * dims[0] <= limits.elements // 2:
                break
        p: Parameters = {"dtype": name_of(draw.choice(HALVES)), "kv_format": kv_format, "heads": heads, "dims": dims, "paged": paged}
        p |= {"page_size": page_size, "pages": pages, "columns": columns, "batch": sequences, "most": most}
        # int4 needs to know whose tokens they are; without, token i is of sequence i.
        p["ends"] = not decode or draw.chance(0.3)
        p |= {"spare": (draw.pick(0, 0, 2), draw.pick(0, 0, 5)) if p["ends"] else (0, 0), "explicit": draw.chance(0.3)}
        p |= {
            "negative": draw.pick(0.0, 0.0, 0.1, 0.6),
            "kind": draw.weighted({"normal": 4, "outliers": 1, "constant": 1, "zero": 0.5, "tiny": 1, "huge": 2.5}),
        }
        # Numbers of kind "huge": beyond what fp8 holds; bfloat16 ones also beyond what int4's minima, and then its scales, hold.
        p["huge"] = draw.pick(1e3, 1e5, 1e7, 1e7, 1e30) if p["dtype"] == "bfloat16" else 1e3
        p["tokens"] = sequences * most + sum(p["spare"])
        return p | draw_format(draw, p)

    def _values(self, p: Parameters, data: Data, d: int, *lead: int) -> Tensor:
        x = data.normal(*lead, p["heads"], d)
        if p["kind"] == "outliers":
            x[..., ::7] *= 30
        elif p["kind"] == "constant":
            x[:] = 1.25
        elif p["kind"] == "zero":
            x[:] = 0.0
        elif p["kind"] == "tiny":
            x *= 1e-4
        elif p["kind"] == "huge":
            x *= p["huge"]
        return x.to(DTYPES[p["dtype"]])

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        shape = shape_of(p, DTYPES[p["dtype"]])
        size, group = p["page_size"], p["group_tokens"]
        cache = random_cache(shape, data)
        pages = data.permutation(p["pages"]).tolist() if p["paged"] else list(range(p["pages"]))
        if p["kv_format"] in ("int8", "int4"):  # what is stored already may be anything; residuals are filled below
            for name in ("k_scale", "v_scale"):
                cache[name][data.uniform(*cache[name].shape) < 0.3] = math.nan
        counts = [1] * p["batch"] if not p["ends"] else [draw.pick(p["most"], 0, 1, draw.randint(0, p["most"])) for _ in range(p["batch"])]
        before, behind = p["spare"]
        ends = list(accumulate(counts, initial=before))
        slots = [-1] * p["tokens"]
        stored: list[list[tuple[int, int]]] = []  # of each sequence: (token, slot), one behind the other
        firsts = []
        for b, n in enumerate(counts):
            room = p["columns"] * size - n
            position = draw.pick(0, draw.randint(0, max(0, min(room, 2 * group))), group - 1) if room >= 0 else 0
            position = max(0, min(position, room))
            own = pages[b * p["columns"] : (b + 1) * p["columns"]] if p["paged"] else [b]
            firsts.append(position)
            places = []
            for token in range(ends[b], ends[b] + n):
                if draw.chance(p["negative"]):
                    slots[token] = draw.pick(-1, -1, -7, -(2**63), -(2**31))
                    continue
                slots[token] = own[position // size] * size + position % size
                places.append((token, slots[token]))
                position += 1
            stored.append(places)
        outside = [i for i in range(p["tokens"]) if not ends[0] <= i < ends[-1]]
        if p["kv_format"] != "int4" or not p["ends"]:
            outside = []  # only int4 leaves tokens of no sequence out
        elif p["paged"] and p["batch"]:  # a slot, but no sequence
            free = pages[p["batch"] * p["columns"] :]
            for i in outside:
                if free and draw.chance(0.5):
                    slots[i] = free[0] * size
        k, v = (self._values(p, data, d, p["tokens"]) for d in p["dims"])
        nowhere = sorted({i for i, slot in enumerate(slots) if slot < 0}.union(outside))
        for x in (k, v):
            x[torch.tensor(nowhere, dtype=torch.long, device=data.device)] = draw.pick(math.nan, math.inf)
        if p["kv_format"] == "int4":
            for name, d in zip(SCALES[2:], p["dims"], strict=True):
                residual = self._values(p, data, d, p["batch"], group)
                for b, first in enumerate(firsts):
                    residual[b, first % group :] = math.nan
                cache[name] = residual
        tensors = {"k": k, "v": v, "slot_mapping": data.tensor(slots, torch.int64), "cu_seqlens": None}
        if p["ends"]:
            tensors["cu_seqlens"] = data.tensor(ends, torch.int32)
        return Contents(tensors | as_operands(cache, shape), {"stored": stored, "slots": slots, "firsts": firsts})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        shape = shape_of(p, DTYPES[p["dtype"]])
        options = {name: t[name] for name in (*SCALES, "cu_seqlens")} | {"kv_format": kv_format_option(shape, p["explicit"])}
        result = minfer.kv_cache_append(t["k"], t["v"], t["k_cache"], t["v_cache"], t["slot_mapping"], **(options | p.get("extra", {})))
        assert result is None
        return {name: t[name] for name in self.written(p)}

    # ---- truth -------------------------------------------------------------------------------------------------------------------------

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        if p["kv_format"] == "int4":
            return self._groups(p, contents, before, have)
        t, slots = contents.tensors, contents.facts["slots"]
        capacity = p["pages"] * p["page_size"]
        tokens = [i for i, slot in enumerate(slots) if 0 <= slot < capacity]
        device = t["k"].device
        token = torch.tensor(tokens, dtype=torch.long, device=device)
        slot = torch.tensor([slots[i] for i in tokens], dtype=torch.long, device=device)
        page, row = slot // p["page_size"], slot % p["page_size"]
        found = []
        for name in ("k", "v"):
            x, old = t[name][token].double(), before[f"{name}_cache"]
            if p["kv_format"] == "16bit":
                truth = old.clone(memory_format=torch.contiguous_format)
                truth[page, row] = t[name][token].to(truth.dtype)
                found.append(Expected(f"{name}_cache", old.dtype, truth, contiguous=False))
                continue
            if p["kv_format"] == "fp8_e4m3":
                quotient = (x / t[f"{name}_scale"].double().view(-1, 1)).clamp(-LARGEST_E4M3, LARGEST_E4M3)
                exponent = torch.frexp(quotient.abs().clamp(min=2.0**-6)).exponent.double() - 1
                half_step = torch.exp2(exponent - 4)
                found.append(codes_expected(f"{name}_cache", old, (page, row), quotient, half_step * (1 + 2.0**-16), e4m3))
                continue
            scale = x.abs().amax(-1) / 127.0 if x.numel() else x.new_zeros(x.shape[:-1])
            whole = before[f"{name}_scale"].double()
            bound = torch.zeros_like(whole)
            whole[page, :, row], bound[page, :, row] = scale, 2.0**-22 * scale + smallest(torch.float32)
            found.append(Expected(f"{name}_scale", torch.float32, whole, bound))
            stored = have[f"{name}_scale"][page, :, row].double()
            quotient = torch.where(stored[..., None] == 0, 0.0, x / stored[..., None].clamp(min=1e-300))
            found.append(codes_expected(f"{name}_cache", old, (page, row), quotient, torch.full_like(quotient, 0.5 + 127 * FP32)))
        return found

    def _groups(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        """int4: groups that become whole are stored, the tokens behind them are in the residual."""
        t, facts = contents.tensors, contents.facts
        size, group, channels = p["page_size"], p["group_tokens"], p["group_channels"]
        old = {name: before[name].clone(memory_format=torch.contiguous_format) for name in self.written(p)}
        # Of the residual only rows of tokens that wait are defined; of pages everything, most of it as it was.
        waiting = {name: torch.zeros_like(old[name], dtype=torch.bool) for name in SCALES[2:]}
        truth = {name: old[name].clone() for name in SCALES[2:]}
        whole: list[tuple[int, int, list[Tensor]]] = []  # page, first row, [K, V]: [group, heads, d]
        for b, places in enumerate(facts["stored"]):
            rows = {name: [old[f"{name}_residual"][b, i] for i in range(facts["firsts"][b] % group)] for name in ("k", "v")}
            for token, slot in places:
                for name in ("k", "v"):
                    rows[name].append(t[name][token])
                if len(rows["k"]) == group:
                    whole.append((slot // size, slot % size - group + 1, [torch.stack(rows[name]) for name in ("k", "v")]))
                    rows = {"k": [], "v": []}
            for name in ("k", "v"):
                for i, x in enumerate(rows[name]):
                    truth[f"{name}_residual"][b, i] = x
                    waiting[f"{name}_residual"][b, i] = True
        found = [Expected(name, DTYPES[p["dtype"]], truth[name], defined=waiting[name]) for name in SCALES[2:]]
        for i, name in enumerate(("k", "v")):
            cache, scales = f"{name}_cache", f"{name}_scale"
            codes = nibbles(old[cache]).double()
            bound = torch.zeros_like(codes)
            factors, factor_bound = old[scales].double(), torch.zeros_like(old[scales], dtype=torch.float64)
            for page, row, values in whole:
                x, at = values[i].double(), slice(row, row + group)
                if name == "k":
                    low, high, own = x.amin(0), x.amax(0), have[scales][page, :, row // group].double()
                    minimum = rounded_to_half(low)
                    step, have_step, have_low = steps(high, minimum), own[:, 0], own[:, 1]
                    factors[page, :, row // group, 0], factors[page, :, row // group, 1] = step, minimum
                    factor_bound[page, :, row // group, 0] = step_bound(step)
                    quotient = (x - have_low) / torch.where(have_step == 0, 1.0, have_step)
                else:
                    parts = x.shape[-1] // channels
                    of_parts = x.unflatten(-1, (parts, channels))  # [group, heads, parts, channels]
                    own = have[scales][page, :, :, at].double().permute(2, 0, 1)
                    low, high = of_parts.amin(-1), of_parts.amax(-1)
                    minimum = rounded_to_half(low)
                    step, have_step, have_low = steps(high, minimum), own[..., :parts], own[..., parts:]
                    factors[page, :, :parts, at], factors[page, :, parts:, at] = step.permute(1, 2, 0), minimum.permute(1, 2, 0)
                    factor_bound[page, :, :parts, at] = step_bound(step).permute(1, 2, 0)
                    divisor = torch.where(have_step == 0, 1.0, have_step)
                    quotient = ((of_parts - have_low[..., None]) / divisor[..., None]).flatten(-2)
                quotient = quotient.clamp(0.0, 15.0)
                codes[page, at] = quotient
                bound[page, at] = 0.5 + 16 * FP32
            found.append(Expected(scales, torch.float16, factors, factor_bound))
            found.append(Expected(cache, torch.uint8, codes, bound, contiguous=False, decode=nibbles))
        return found

    def dense(self, p: Parameters) -> bool:
        return dense_rows(p)

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype, form = DTYPES[p["dtype"]], p["kv_format"]
        stored = {"16bit": (dtype,), "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8), "int8": (torch.int8,), "int4": (torch.uint8,)}[form]
        found = {
            "k": Argument(HALVES, ("tokens", "heads", "head_dim"), ("v", "k_cache", "slot_mapping", "head_dim", "kv_format")),
            "v": Argument((dtype,), ("tokens", "heads", "head_dim_v"), ("k", "v_cache", "head_dim")),
            "k_cache": Argument(stored, ("pages", "page_size", "heads", "head_dim"), ("v_cache", "cache", "kv_format", "page", "scale")),
            "v_cache": Argument(stored, ("pages", "page_size", "heads", "head_dim_v"), ("k_cache", "cache", "kv_format", "head_dim")),
            "slot_mapping": Argument((torch.int64,), ("tokens",)),
        }
        if p["ends"]:
            found["cu_seqlens"] = Argument((torch.int32,), (), ("k_residual",), ranks=(1,))
        if form == "int8":
            for name in SCALES[:2]:
                found[name] = Argument((torch.float32,), ("pages", "heads", "page_size"), ("k_cache",))
        if form == "int4":
            found["k_scale"] = Argument((torch.float16,), ("pages", "heads", "", "two", "head_dim"), ("v_scale",))
            found["v_scale"] = Argument((torch.float16,), ("pages", "heads", "", "page_size"), ("k_scale",))
            found["k_residual"] = Argument((dtype,), ("batch", "group", "heads", "head_dim"))
            found["v_residual"] = Argument((dtype,), ("batch", "group", "heads", "head_dim_v"))
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        found = wrong_caches(p, tensors)
        for name in SCALES:
            x = tensors[name]
            if x is not None and p["kv_format"] != "fp8_e4m3" and x.numel() and min(x.shape[-2:]) > 1:
                found.append((f"{name} is strided", {name: x.mT.contiguous().mT}, (name,)))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found: list[tuple[str, object, str]] = [("kv_format", "int3", "kv_format"), ("kv_format", "", "kv_format")]
        for other in FORMATS:
            if other != p["kv_format"] and {other, p["kv_format"]} != {"fp8_e4m3", "int4"}:
                found.append(("kv_format", other, "kv_format"))
        return found

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        t, facts = contents.tensors, contents.facts
        stored = [i for i, slot in enumerate(facts["slots"]) if slot >= 0]
        if p["ends"] and p["kv_format"] == "int4" and (draw.chance(0.4) or not stored):
            return hostile_ends(contents, draw, [("cu_seqlens", p["tokens"])])
        if not stored:
            return None
        capacity = p["pages"] * p["page_size"]
        at = draw.choice(stored)
        value = draw.pick(capacity, capacity + 1, capacity + p["page_size"], 10**9, 2**31, 2**40, 2**63 - 1)
        t["slot_mapping"][at] = value
        facts["slots"][at] = value  # beyond the cache: stored nowhere
        what = f"slot_mapping[{at}] = {value}, the cache has {capacity} slots"
        known = p["kv_format"] != "int4"
        return Hostile(what, (lambda before, have: self.expect(p, contents, before, have)) if known else None)


def codes_expected(name: str, old: Tensor, at: tuple[Tensor, Tensor], quotient: Tensor, half_step: Tensor, decode=None) -> Expected:
    """Codes that stand for a quotient within half a step; others keep their bits (of fp8 NaN, any NaN)."""
    raw = old.view(torch.uint8) if old.dtype == torch.float8_e4m3fn else old
    truth = decode(raw) if decode is not None else raw.double()
    bound = torch.zeros_like(truth)
    truth[at], bound[at] = quotient, half_step
    unpack = None if decode is None else lambda x: decode(x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x)
    return Expected(name, old.dtype, truth, bound, contiguous=False, decode=unpack)


def rounded_to_half(x: Tensor) -> Tensor:
    """To float16, saturated. x holds 16-bit numbers, so that float32 in between changes nothing."""
    return x.float().clamp(-65504.0, 65504.0).half().double()


def steps(high: Tensor, minimum: Tensor) -> Tensor:
    return ((high - minimum) / 15.0).clamp(0.0, 65504.0)


def step_bound(step: Tensor) -> Tensor:
    """One rounding to float16, and so little that a step which is saturated must not be infinite, as a number from 65520 on would be."""
    bound = unit(torch.float16) * step * (1 + 2.0**-9) + 2.0**-25 * (1 + 2.0**-9)
    return torch.minimum(bound, 65519.0 - step)
