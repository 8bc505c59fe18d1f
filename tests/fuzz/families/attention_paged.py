"""minfer.attention_paged: caches of every format, paged and contiguous, with garbage in whatever the documentation says nobody looks at."""

from __future__ import annotations

import math

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Hostile, Parameters, WrongTensors
from ..truth.attention import Codes, attend, expected_of, expected_rows, visible
from .attention import (
    CROWD_SHARE,
    DTYPES,
    HALVES,
    MASK_OPTIONS,
    draw_crowd,
    draw_head_dims,
    draw_heads,
    draw_options,
    draw_sinks,
    draw_slack,
    first_key,
    hostile_ends,
    softmax_options,
    wrong_attention_options,
)
from .kv_caches import (
    FORMATS,
    HEAD_DIM_UNITS,
    NO_PAGE,
    SCALES,
    Shape,
    as_operands,
    dense_rows,
    draw_format,
    kv_format_option,
    poison_of,
    random_cache,
    shape_of,
    spoil,
    values_at,
    wrong_caches,
)


def draw_splits(draw: Draw, p: Parameters) -> int:
    """num_splits. On CUDA each part takes 8.5 bytes for each of q's elements, rows of a KV head's group rounded up to 64: many parts only
    where that is not gigabytes."""
    group = p["heads"][0] // max(p["heads"][1], 1)
    rows = p["batch"] * p["heads"][1] * (-(-p["queries"] * group // 64) * 64)
    part = 8.5 * rows * (-(-p["dims"][0] // 64) * 64)
    return draw.choice([1, 2, 3, 8, 16, 33] + [splits for splits in (64, 200, 256) if splits * part <= 1 << 30])


class AttentionPaged(Family):
    name = "attention_paged"
    share = 8.0
    kernels = "attention"
    views = {"k_cache": arena.TMA, "v_cache": arena.TMA}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        """Four kinds of cases: anything; many short sequences, of which most have less than a group of tokens; windows that leave pages
        behind; crowds, more sequences than kernels keep apart."""
        kind = draw.weighted({"any": 4, "many": 3, "window": 3})
        kind = "crowd" if draw.chance(CROWD_SHARE) else kind
        small = limits.small
        # int4's pages and residuals have room for 32 tokens at least.
        elements = 16 * limits.elements if small and kind == "crowd" else limits.elements
        while True:
            kv_format = draw.weighted({"16bit": 2, "fp8_e4m3": 1, "int8": 1, "int4": 1.5 if kind in ("any", "window") else 3})
            heads = draw_heads(draw)
            dims = draw_head_dims(draw, HEAD_DIM_UNITS[kv_format])
            if kind == "many" and draw.chance(0.6):
                dims = (64, 64)
            paged = draw.chance(0.85)
            page_units = 32 if kv_format == "int4" else 8
            page_size = page_units * draw.randint(1, 256 // page_units)
            if draw.chance(0.5):
                page_size = draw.weighted({32: 3, 64: 3, 128: 3, 256: 3, 512: 1.5, 1024: 1.5})
            page_size = 32 if kind == "many" and draw.chance(0.5) else page_size
            if kind == "many":
                batch = draw.pick(40, 40, 17, 64, 100, 200)
                longest = draw.pick(200, 50, 31) if small else draw.pick(200, 2000, 2000, 63)
                queries = draw.weighted({1: 6, 2: 1, 5: 1})
            elif kind == "crowd":
                crowd = draw_crowd(draw, limits, HEAD_DIM_UNITS[kv_format])
                batch, heads, dims = crowd["batch"], crowd["heads"], crowd["dims"]
                page_size = page_units * draw.pick(1, 1, 1, 2)
                longest = draw.pick(1, 3, 7, 20, 40)
                queries = draw.weighted({1: 6, 2: 1, 3: 1})
            else:
                batch = draw.weighted({1: 4, 2: 3, 3: 2, 8: 1, 40: 0.5, 0: 0.1})
                longest = max(1, draw.extent(500 if small else 5000, tiles=(8, 32, 64, 128, 256, 512)))
                queries = draw.weighted({1: 4, 2: 1, 3: 1, 8: 1, 17: 1, 64: 1, draw.extent(100 if small else 700): 2})
            if kind == "window" and draw.chance(0.7):
                longest = max(longest, 3 * page_size)
            columns = -(-longest // page_size)
            length = columns * page_size if paged or kv_format != "16bit" else longest
            keys = batch * (columns * page_size if paged else length) * heads[1] * dims[0]
            work = batch * max(heads[0], 1) * queries * longest
            if keys <= elements and work <= limits.scores and batch * queries * heads[0] * dims[0] <= limits.elements:
                break
        p: Parameters = {"dtype": name_of(draw.choice(HALVES)), "kv_format": kv_format, "heads": heads, "dims": dims, "batch": batch}
        p |= {"paged": paged, "page_size": page_size if paged else length, "longest": longest, "queries": queries}
        p |= {"layout": draw.weighted({"4d": 3, "3d": 1, "cu": 2}), "spare": (draw.pick(0, 0, 1, 5), draw.pick(0, 0, 1, 70))}
        p |= {"slack": draw_slack(draw, limits, queries), "columns": columns + draw.pick(0, 1, 3, 17) if paged else 0}
        # Fewer pages than sequences want: lengths are cut to what is there, or pages are shared.
        p["pages"] = max(1, int(batch * columns * draw.pick(1.0, 1.0, 0.7)) + draw.pick(0, 1, 3)) if paged else batch
        p |= {"shared": paged and draw.chance(0.2), "explicit": draw.chance(0.3)}
        p |= draw_format(draw, p)
        p |= draw_options(draw, dims[0], longest)
        p["causal"] = draw.chance(0.8)
        if kind == "window":
            p["window_left"] = draw.pick(0, 1, 7, 31, 64, 200)
        p["num_splits"] = draw_splits(draw, p) if draw.chance(0.35) else None
        return p

    # ---- contents ------------------------------------------------------------------------------------------------------------------

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        dtype = DTYPES[p["dtype"]]
        shape, batch = shape_of(p, dtype), p["batch"]
        queries, starts, rows = self._queries(p, draw)
        lengths = self._lengths(p, draw, queries)
        device = data.device
        keys = max(lengths, default=0)
        first = [first_key(n, length, p["window_left"]) if n else length for n, length in zip(queries, lengths, strict=True)]
        t = torch.arange(keys, device=device)[None]
        as_column = lambda x: torch.tensor(x, dtype=torch.long, device=device).view(-1, 1)  # noqa: E731
        wanted = (t >= as_column(first)) & (t < as_column(lengths))
        in_pages = wanted & (t < as_column([shape.in_codes(length) for length in lengths]))
        table, page, facts = self._table(p, shape, draw, data, in_pages)
        row = (t % shape.page_size).expand(batch, keys)
        used = torch.zeros(shape.pages, shape.page_size, dtype=torch.bool, device=device)
        used[page[in_pages], row[in_pages]] = True
        residual_used = None
        if shape.kv_format == "int4":
            residual_used = torch.zeros(batch, shape.group_tokens, dtype=torch.bool, device=device)
            late = wanted & ~in_pages
            sequence = torch.arange(batch, device=device).view(-1, 1).expand(batch, keys)
            residual_used[sequence[late], (t % shape.group_tokens).expand(batch, keys)[late]] = True
        cache = random_cache(shape, data)
        spoil(cache, shape, used, residual_used, poison_of(draw))
        q = data.normal(rows, *(p["heads"][0], p["dims"][0]), dtype=dtype, scale=p["sharpness"])
        own = torch.zeros(rows, dtype=torch.bool, device=device)
        for start, n in zip(starts, queries, strict=True):
            own[start : start + n] = True
        q[~own] = math.nan
        if p["layout"] == "4d":
            q = q.view(batch, p["queries"], *q.shape[1:])
        tensors = {
            "q": q,
            "seq_lens": data.tensor(lengths, torch.int32),
            "block_table": table,
            "cu_seqlens_q": None,
            "sinks": draw_sinks(p, data),
        }
        if p["layout"] == "cu":
            ends = [*starts, starts[-1] + queries[-1] if batch else p["spare"][0]]
            tensors["cu_seqlens_q"] = data.tensor(ends, torch.int32)
        facts |= {
            "lengths": lengths,
            "queries": queries,
            "starts": starts,
            "wanted": wanted,
            "in_pages": in_pages,
            "page": page,
            "row": row,
        }
        return Contents(tensors | as_operands(cache, shape), facts)

    def _queries(self, p: Parameters, draw: Draw) -> tuple[list[int], list[int], int]:
        """Queries of each sequence, their first rows in q, and q's rows."""
        batch, most = p["batch"], p["queries"]
        if p["layout"] != "cu":
            return [most] * batch, [b * most for b in range(batch)], batch * most
        before, behind = p["spare"]
        queries = [draw.pick(most, most, most, 0, 1, draw.randint(0, most)) if most else 0 for _ in range(batch)]
        starts, at = [], before
        for n in queries:
            starts.append(at)
            at += n
        return queries, starts, before + batch * most + behind

    def _lengths(self, p: Parameters, draw: Draw, queries: list[int]) -> list[int]:
        """Keys of each sequence: edges of pages and groups, a length and those beside it, fewer keys than queries."""
        longest, size, found = p["longest"], p["page_size"], []
        group = p["group_tokens"] if p["kv_format"] == "int4" else 32
        for n in queries:
            kind = draw.weighted({"any": 4, "full": 1, "zero": 0.5, "short": 2, "page": 1, "group": 1, "few": 0.7})
            if kind == "any":
                length = draw.randint(1, longest)
            elif kind == "full":
                length = longest
            elif kind == "short":
                length = draw.randint(1, group)
            elif kind == "page":
                length = size * draw.randint(1, max(1, longest // size)) + draw.pick(-1, 0, 1)
            elif kind == "group":
                length = group * draw.randint(1, max(1, longest // group)) + draw.pick(-1, 0, 1)
            elif kind == "few":
                length = draw.randint(0, max(n, 1))
            else:
                length = 0
            found.append(max(0, min(length, longest)))
        return found

    def _table(self, p: Parameters, shape: Shape, draw: Draw, data: Data, in_pages: Tensor) -> tuple[Tensor | None, Tensor, dict]:
        """block_table, the page of each key [batch, keys], and which entries are needed. Where pages run out, sequences share those there
        are."""
        batch, keys = in_pages.shape
        device = data.device
        if not p["paged"]:
            return None, torch.arange(batch, device=device).view(-1, 1).expand(batch, keys), {"needed": None}
        columns = p["columns"]
        of_column = (
            torch.nn.functional.pad(in_pages, (0, columns * shape.page_size - keys)) if columns * shape.page_size >= keys else in_pages
        )
        needed = of_column.view(batch, columns, shape.page_size).any(-1) if columns else in_pages.new_zeros(batch, 0)
        count = int(needed.sum())
        pages = data.permutation(shape.pages)
        if count > shape.pages:
            pages = pages.repeat(-(-count // shape.pages))
        table = torch.empty(batch, columns, dtype=torch.int32, device=device)
        fillings = draw.sample(NO_PAGE, 2) if draw.chance(0.8) else [draw.choice(NO_PAGE)]
        table.copy_(torch.tensor(fillings, dtype=torch.int32, device=device)[data.integers(0, len(fillings), batch, columns)])
        if draw.chance(0.3):  # pages of sequences that are gone; what they hold belongs to others or is garbage
            stale = data.uniform(batch, columns) < 0.5
            table[stale] = data.integers(0, shape.pages, batch, columns, dtype=torch.int32)[stale]
        table[needed] = pages[:count].int()
        if p["shared"]:
            for b in range(1, batch):
                both = needed[b] & needed[b - 1]
                if draw.chance(0.5) and columns:
                    both[draw.randrange(columns) :] = False
                    table[b] = torch.where(both, table[b - 1], table[b])
        page = table.long().repeat_interleave(shape.page_size, 1)[:, :keys]
        return table, page, {"needed": needed}

    # ---- call and truth --------------------------------------------------------------------------------------------------------------

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        shape = shape_of(p, DTYPES[p["dtype"]])
        options = {name: p[name] for name in (*MASK_OPTIONS, "num_splits")} | softmax_options(p, t)
        options |= {name: t[name] for name in (*SCALES, "block_table", "cu_seqlens_q")}
        options["kv_format"] = kv_format_option(shape, p["explicit"])
        if p["layout"] != "4d":
            options["max_seqlen_q"] = p["queries"] + (p["slack"] if p["layout"] == "cu" else 0)
        out, lse = minfer.attention_paged(t["q"], t["k_cache"], t["v_cache"], t["seq_lens"], **(options | p.get("extra", {})))
        return {"out": out, "lse": lse}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, facts, dtype = contents.tensors, contents.facts, DTYPES[p["dtype"]]
        shape, batch = shape_of(p, dtype), p["batch"]
        k, v = (values_at(t, shape, name, facts["page"], facts["row"], facts["in_pages"]) for name in ("k", "v"))
        if shape.kv_format == "int4":
            late = facts["wanted"] & ~facts["in_pages"]
            sequence, token = late.nonzero(as_tuple=True)
            for found, name in ((k, "k"), (v, "v")):
                own = t[f"{name}_residual"][sequence, token % shape.group_tokens].double()
                found.value[late], found.magnitude[late], found.floor[late] = own, own.abs(), own.abs()
        device = t["q"].device
        queries, lengths = (torch.tensor(facts[x], dtype=torch.long, device=device) for x in ("queries", "lengths"))
        q = t["q"].flatten(0, 1) if p["layout"] == "4d" else t["q"]
        most = p["queries"] if p["layout"] == "4d" else max(facts["queries"], default=0)
        padded = q.new_zeros((batch, most, *q.shape[1:]), dtype=torch.float64)
        for b, (start, n) in enumerate(zip(facts["starts"], facts["queries"], strict=True)):
            padded[b, :n] = q[start : start + n].double()
        seen = visible(queries, lengths, most, facts["wanted"].shape[1], p["causal"], p["window_left"], -1) & facts["wanted"][:, None]
        form = shape.kv_format
        codes = None if form == "16bit" else Codes(k.magnitude, v.magnitude, v.floor, form != "fp8_e4m3", form == "int4")
        attended = attend(padded, k.value, v.value, seen, dtype=dtype, codes=codes, **softmax_options(p, t))
        if p["layout"] == "4d":
            return expected_of(attended, dtype)
        return expected_rows(attended, facts["queries"], facts["starts"], q.shape[0], dtype)

    def dense(self, p: Parameters) -> bool:
        return dense_rows(p)

    # ---- calls that cannot be right ----------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype, form = DTYPES[p["dtype"]], p["kv_format"]
        stored = {"16bit": (dtype,), "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8), "int8": (torch.int8,), "int4": (torch.uint8,)}[form]
        pages = "batch" if not p["paged"] else "pages"
        heads_q = "heads_q" if p["sinks"] else ""
        lead = {"4d": ("batch", ""), "3d": ("tokens",), "cu": ("",)}[p["layout"]]
        ranks = (3, 4) if p["layout"] == "3d" and p["batch"] == 1 else ()  # a batch of one sequence has both forms
        found = {
            "q": Argument(HALVES, (*lead, heads_q, "head_dim"), ("k_cache", "cache", "heads", "sinks", "seq_lens"), ranks=ranks),
            "k_cache": Argument(
                stored, (pages, "page_size", "heads_kv", "row"), ("v_cache", "cache", "kv_format", "page", "scale", "heads")
            ),
            "v_cache": Argument(
                stored, (pages, "page_size", "heads_kv", ""), ("k_cache", "cache", "kv_format", "head_dim", "v_scale", "v_residual")
            ),
            "seq_lens": Argument((torch.int32,), ("batch",), ("q", "k_cache", "block_table", "cu_seqlens_q", "k_residual")),
        }
        if form == "16bit":
            found["q"].beside += ("kv_format",)
        if p["paged"]:
            found["block_table"] = Argument((torch.int32,), ("batch", ""), ("seq_lens",))
        if p["layout"] == "cu":
            found["cu_seqlens_q"] = Argument((torch.int32,), ("ends",), ("seq_lens", "q"), ranks=(1,))
        if p["sinks"]:
            found["sinks"] = Argument((dtype,), ("heads_q",), ("q",))
        if form == "int8":
            for name in ("k_scale", "v_scale"):
                found[name] = Argument((torch.float32,), (pages, "heads_kv", "page_size"), ("k_cache",))
        if form == "int4":
            found["k_scale"] = Argument((torch.float16,), (pages, "heads_kv", "", "two", "head_dim"), ("v_scale",))
            found["v_scale"] = Argument((torch.float16,), (pages, "heads_kv", "", "page_size"), ("k_scale",))
            found["k_residual"] = Argument((dtype,), ("batch", "group", "heads_kv", "head_dim"), ())
            found["v_residual"] = Argument((dtype,), ("batch", "group", "heads_kv", ""), ())
        if form == "fp8_e4m3":
            for name in ("k_scale", "v_scale"):
                found[name] = Argument((torch.float32,), (), ("v_scale", "k_scale"), ranks=(0, 1))
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        found = wrong_caches(p, tensors)
        if p["paged"] and p["kv_format"] == "16bit" and p["page_size"] > 4:
            narrow = {name: tensors[name][:, : p["page_size"] - 4] for name in ("k_cache", "v_cache")}
            found.append((f"pages have {p['page_size'] - 4} rows", narrow, ("page", "k_cache")))
        if not p["paged"] and p["batch"] > 1:
            narrow = {name: tensors[name][:-1] for name in ("k_cache", "v_cache")}
            found.append(("a contiguous cache lacks a sequence", narrow, ("k_cache", "k_scale")))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [
            *wrong_attention_options(),
            ("num_splits", 0, "num_splits"),
            ("num_splits", 257, "num_splits"),
            ("num_splits", -3, "num_splits"),
        ]
        found += [("kv_format", "int3", "kv_format"), ("max_seqlen_q", -1, "max_seqlen_q")]
        for other in FORMATS:
            if other != p["kv_format"] and {other, p["kv_format"]} != {"fp8_e4m3", "int4"}:
                found.append(("kv_format", other, "kv_format"))
        return found

    # ---- values that lead outside --------------------------------------------------------------------------------------------------------

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        t, facts = contents.tensors, contents.facts
        kinds = ["seq_lens"] if p["batch"] else []
        if p["paged"] and bool(facts["needed"].any()):
            kinds += ["block_table"] * 2
        if p["layout"] == "cu" and p["batch"]:
            kinds.append("cu_seqlens_q")
        if not kinds:
            return None
        kind = draw.choice(kinds)
        if kind == "cu_seqlens_q":
            return hostile_ends(contents, draw, [("cu_seqlens_q", t["q"].shape[0])])
        if kind == "seq_lens":
            capacity = p["columns"] * p["page_size"] if p["paged"] else p["page_size"]
            b = draw.randrange(p["batch"])
            value = draw.pick(-1, -(2**31), 2**31 - 1, capacity + 1, capacity + 10**5, -1000)
            t["seq_lens"][b] = value
            what = f"seq_lens[{b}] = {value}, the cache holds {capacity}"
            if value > 0:
                return Hostile(what)
            facts["lengths"][b] = 0  # no keys
            for name in ("wanted", "in_pages"):
                facts[name][b] = False
            return Hostile(what, lambda before, have: self.expect(p, contents, before, have))
        entries = facts["needed"].nonzero().tolist()
        chosen = draw.sample(entries, min(len(entries), draw.pick(1, 1, 3, len(entries))))
        value = draw.pick(p["pages"], 10**6, 2**31 - 1, -1, -(2**31))
        for b, column in chosen:
            t["block_table"][b, column] = value
        what = f"block_table = {value} in {len(chosen)} needed entries, first {chosen[0]}"
        return Hostile(what, lambda before, have: self._zeros(p, contents, chosen))

    def _zeros(self, p: Parameters, contents: Contents, entries: list[list[int]]) -> list[Expected]:
        """A needed page that does not exist reads as zeros: keys, values and scales, so that a key's score is 0 and its value nothing."""
        facts, size = contents.facts, p["page_size"]
        gone = torch.zeros_like(facts["in_pages"])
        for b, column in entries:
            gone[b, column * size : (column + 1) * size] = True
        # A page of zeros at the end of every cache: codes and scales.
        tensors = dict(contents.tensors)
        paged = [name for name in ("k_cache", "v_cache", "k_scale", "v_scale") if tensors[name] is not None]
        for name in paged:
            x = tensors[name]
            if name.endswith("scale") and p["kv_format"] == "fp8_e4m3":
                continue
            raw = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
            tensors[name] = torch.cat([raw, raw.new_zeros(1, *raw.shape[1:])])
        page = torch.where(gone, torch.full_like(facts["page"], p["pages"]), facts["page"])
        return self.expect(p, Contents(tensors, facts | {"page": page}), {}, {})
