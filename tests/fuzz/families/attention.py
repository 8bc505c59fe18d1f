"""minfer.attention, attention_varlen and merge_attention_states."""

from __future__ import annotations

import math
from itertools import accumulate

import minfer
import torch
from torch import Tensor

from tests.attention.options import SOFTMAX_OPTIONS

from .. import arena
from ..compare import Expected, name_of, smallest, unit
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Hostile, Parameters
from ..truth.attention import attend, expected_of, expected_rows, visible

HALVES = (torch.float16, torch.bfloat16)
DTYPES = {name_of(dtype): dtype for dtype in (*HALVES, torch.float32)}
WINDOWS = (0, 1, 7, 31, 64, 200)
# More sequences than a kernel's table of them has entries, which are then groups of two or three.
CROWDS = {513: 4, 600: 3, 1100: 1}  # more of the smaller ones: the CPU takes sequences one by one
CROWD_SHARE = 0.02


def draw_heads(draw: Draw) -> tuple[int, int]:
    """heads_q and heads_kv."""
    if draw.chance(0.01):
        return 0, draw.pick(0, 1, 2)
    kv = draw.weighted({1: 3, 2: 3, 3: 1, 4: 1, 8: 0.5})
    return kv * draw.weighted({1: 3, 2: 2, 3: 1, 4: 2, 5: 0.5, 8: 1, 16: 0.5}), kv


def draw_head_dims(draw: Draw, unit: int = 8) -> tuple[int, int]:
    """head_dim and head_dim_v, multiples of ``unit`` up to 256."""
    head_dim = draw.pick(64, 128, 256, 192) if draw.chance(0.5) else unit * draw.randint(1, 256 // unit)
    head_dim = max(unit, head_dim // unit * unit)
    return head_dim, head_dim if draw.chance(0.7) else unit * draw.randint(1, head_dim // unit)


def draw_crowd(draw: Draw, limits: Limits, unit: int) -> Parameters:
    """A batch of very many short sequences, with heads so few and small that the CPU is quick; ``unit``: of head dimensions."""
    dims = draw.pick((unit, unit), (2 * unit, unit), (32, 32))
    if not limits.small and draw.chance(0.5):
        dims = draw.pick((64, 64), (128, 128))
    batch = draw.weighted(CROWDS if limits.small else dict.fromkeys(CROWDS, 1))
    return {"batch": batch, "heads": draw.pick((1, 1), (2, 1), (2, 2), (4, 1)), "dims": dims}


def draw_slack(draw: Draw, limits: Limits, longest: int, *more: int) -> int:
    """What max_seqlen says beyond the longest sequence. Less than that is an error on the CPU, on CUDA it only takes longer."""
    if limits.cuda and draw.chance(0.15):
        return -draw.pick(min(1, longest), longest // 2, longest)
    return draw.pick(0, 0, 1, 1000, *more)


def draw_options(draw: Draw, head_dim: int, longest: int) -> Parameters:
    p: Parameters = {"causal": draw.chance(0.6), "window_left": -1}
    if draw.chance(0.4):
        p["window_left"] = draw.choice(WINDOWS) if draw.chance(0.7) else draw.pick(draw.randint(0, max(1, longest)), 2**31 - 1, 2**40)
    for name, option in SOFTMAX_OPTIONS.items():
        p[name] = draw.choice(option.edges(head_dim)) if draw.chance(0.3) else option.default
    p["sharpness"] = draw.pick(0.3, 1.0, 1.0, 4.0)  # of the scores: how few keys have most of the weight
    return p


def draw_sinks(p: Parameters, data: Data) -> Tensor | None:
    """Some far below the scores, some above."""
    return data.normal(p["heads"][0], scale=3.0, dtype=DTYPES[p["dtype"]]) if p["sinks"] else None


MASK_OPTIONS = ("causal", "window_left")


def softmax_options(p: Parameters, t: dict[str, Tensor | None]) -> dict[str, object]:
    """Those of a case, for the operator and for the truth; tensors are among the call's."""
    return {name: t[name] if name in t else p[name] for name in SOFTMAX_OPTIONS}


def wrong_attention_options() -> list[tuple[str, object, str]]:
    """Beside tensors, which are changed as `arguments` says."""
    numbers = [(name, value, name) for name, option in SOFTMAX_OPTIONS.items() for value, _ in option.wrong if not callable(value)]
    return [*numbers, ("kernel", "no_such_kernel", "kernel"), ("kernel", "", "kernel")]


class Attention(Family):
    name = "attention"
    share = 2.0
    kernels = "attention"
    views = dict.fromkeys(("q", "k", "v", "sinks"), arena.ANY)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        heads, dims = draw_heads(draw), draw_head_dims(draw)
        while True:
            batch = draw.weighted({1: 4, 2: 3, 3: 1, 7: 0.5, 0: 0.1})
            shape = draw.weighted({"square": 3, "decode": 2, "any": 4})
            most = 160 if limits.small else 2100
            seqlen_k = draw.extent(most)
            seqlen_q = {"square": seqlen_k, "decode": draw.pick(1, 1, 2, 5), "any": draw.extent(most)}[shape]
            if batch * max(heads[0], 1) * seqlen_q * max(seqlen_k, 1) <= limits.scores:
                if batch * max(seqlen_q * heads[0], seqlen_k * heads[1]) * dims[0] <= limits.elements:
                    break
        p: Parameters = {
            "dtype": name_of(draw.choice(HALVES)),
            "batch": batch,
            "seqlens": (seqlen_q, seqlen_k),
            "heads": heads,
            "dims": dims,
        }
        p |= draw_options(draw, dims[0], seqlen_k)
        p["window_right"] = draw.pick(0, 1, 5, 64, 2**31 - 1) if draw.chance(0.25) else -1
        return p

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        (heads_q, heads_kv), (head_dim, head_dim_v), (seqlen_q, seqlen_k) = p["heads"], p["dims"], p["seqlens"]
        dtype, batch = DTYPES[p["dtype"]], p["batch"]
        q = data.normal(batch, seqlen_q, heads_q, head_dim, dtype=dtype, scale=p["sharpness"])
        k = data.normal(batch, seqlen_k, heads_kv, head_dim, dtype=dtype)
        v = data.normal(batch, seqlen_k, heads_kv, head_dim_v, dtype=dtype, scale=draw.pick(1.0, 1.0, 0.01, 30.0))
        for x in (k, v):  # what lies before all windows
            x[:, : first_key(seqlen_q, seqlen_k, p["window_left"])] = draw.pick(math.nan, math.inf)
        return Contents({"q": q, "k": k, "v": v, "sinks": draw_sinks(p, data)})

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        # Where some keys are NaN, none may be another's memory.
        hidden = name in ("k", "v") and first_key(*p["seqlens"], p["window_left"]) > 0
        return arena.VIEW if hidden else super().rule(p, name)

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: p[name] for name in (*MASK_OPTIONS, "window_right")} | softmax_options(p, t) | p.get("extra", {})
        out, lse = minfer.attention(t["q"], t["k"], t["v"], **options)
        return {"out": out, "lse": lse}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        q, k, v = (contents.tensors[name] for name in ("q", "k", "v"))
        lengths = [torch.tensor([x] * q.shape[0], device=q.device) for x in p["seqlens"]]
        seen = visible(*lengths, q.shape[1], k.shape[1], p["causal"], p["window_left"], p["window_right"])
        k, v = (x.double() for x in (k, v))
        for x in (k, v):
            x[:, : first_key(*p["seqlens"], p["window_left"])] = 0.0
        attended = attend(q.double(), k, v, seen, dtype=q.dtype, **softmax_options(p, contents.tensors))
        return expected_of(attended, q.dtype)

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        found = {
            "q": Argument(HALVES, ("batch", "", "", "head_dim"), ("k",)),
            "k": Argument(HALVES, ("batch", "keys", "heads_kv", "head_dim"), ("v", "q")),
            "v": Argument(HALVES, ("batch", "keys", "heads_kv", ""), ("k",)),
        }
        if p["sinks"]:
            found["sinks"] = Argument((DTYPES[p["dtype"]],), ("heads_q",), ("q",))
            found["q"].shape = ("batch", "", "heads_q", "head_dim")
            found["q"].beside = ("k", "sinks", "heads")
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return wrong_attention_options()


class AttentionVarlen(Family):
    name = "attention_varlen"
    share = 2.0
    kernels = "attention"

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        heads, dims = draw_heads(draw), draw_head_dims(draw)
        most = 60 if limits.small else 1000
        crowded = draw.chance(CROWD_SHARE)
        while True:
            batch = draw.weighted({1: 2, 2: 2, 3: 2, 5: 2, 17: 1, 40: 1, 0: 0.1})
            longest = (max(1, draw.extent(most)), max(1, draw.extent(most)))
            if crowded:
                crowd = draw_crowd(draw, limits, 8)
                batch, heads, dims = crowd["batch"], crowd["heads"], crowd["dims"]
                longest = draw.pick(1, 1, 2, 5), draw.pick(1, 3, 7)
            if batch * max(heads[0], 1) * longest[0] * longest[1] <= limits.scores:
                if batch * max(longest[0] * heads[0], longest[1] * heads[1]) * dims[0] <= limits.elements:
                    break
        p: Parameters = {"dtype": name_of(draw.choice(HALVES)), "batch": batch, "longest": longest, "heads": heads, "dims": dims}
        p |= draw_options(draw, dims[0], longest[1])
        p["window_right"] = draw.pick(0, 1, 5, 64) if draw.chance(0.2) else -1
        p["same_lengths"] = draw.chance(0.2)
        # Rows in front of the first sequence and behind the last.
        p["spare"] = tuple(draw.pick(0, 0, 1, 3, 70) for _ in range(4))
        p["slack"] = tuple(draw_slack(draw, limits, x, 2**31) for x in longest)
        p["rows"] = tuple(batch * x + sum(p["spare"][2 * i : 2 * i + 2]) for i, x in enumerate(longest))
        return p

    def _lengths(self, p: Parameters, draw: Draw, side: int) -> list[int]:
        most = p["longest"][side]
        return [draw.pick(most, most, 0, 1, draw.randint(0, most), draw.randint(0, most)) for _ in range(p["batch"])]

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        (heads_q, heads_kv), (head_dim, head_dim_v) = p["heads"], p["dims"]
        dtype = DTYPES[p["dtype"]]
        queries = self._lengths(p, draw, 0)
        keys = [min(n, p["longest"][1]) for n in queries] if p["same_lengths"] else self._lengths(p, draw, 1)
        first = p["spare"][0], p["spare"][2]
        q = data.normal(p["rows"][0], heads_q, head_dim, dtype=dtype, scale=p["sharpness"])
        k = data.normal(p["rows"][1], heads_kv, head_dim, dtype=dtype)
        v = data.normal(p["rows"][1], heads_kv, head_dim_v, dtype=dtype)
        for x, lengths, start in ((q, queries, first[0]), (k, keys, first[1]), (v, keys, first[1])):
            x[:start] = math.nan  # what no sequence has
            x[start + sum(lengths) :] = math.nan
        ends = [list(accumulate(lengths, initial=start)) for lengths, start in zip((queries, keys), first, strict=True)]
        for queries_of, keys_of, start in zip(queries, keys, accumulate(keys, initial=first[1]), strict=False):
            unseen = first_key(queries_of, keys_of, p["window_left"]) if queries_of else keys_of  # before all windows, or nobody looks
            k[start : start + unseen] = math.nan
            v[start : start + unseen] = draw.pick(math.nan, math.inf)
        tensors = {"q": q, "k": k, "v": v, "sinks": draw_sinks(p, data)}
        tensors |= {f"cu_seqlens_{x}": data.tensor(e, torch.int32) for x, e in zip("qk", ends, strict=True)}
        return Contents(tensors, {"queries": queries, "keys": keys, "starts": [e[:-1] for e in ends]})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        most = [min(x + slack, 2**40) for x, slack in zip(p["longest"], p["slack"], strict=True)]
        options = {name: p[name] for name in (*MASK_OPTIONS, "window_right")} | softmax_options(p, t) | p.get("extra", {})
        lengths = {"max_seqlen_q": most[0], "max_seqlen_k": most[1]} | {x: options.pop(x) for x in list(options) if x.startswith("max_")}
        out, lse = minfer.attention_varlen(t["q"], t["k"], t["v"], t["cu_seqlens_q"], t["cu_seqlens_k"], **lengths, **options)
        return {"out": out, "lse": lse}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, facts = contents.tensors, contents.facts
        padded = []
        for name, lengths, starts in (("q", "queries", 0), ("k", "keys", 1), ("v", "keys", 1)):
            padded.append(pad_rows(t[name], facts[lengths], facts["starts"][starts]))
        for b, (n, keys) in enumerate(zip(facts["queries"], facts["keys"], strict=True)):
            for x in padded[1:]:
                x[b, : first_key(n, keys, p["window_left"]) if n else keys] = 0.0
        queries, keys = (torch.tensor(facts[x], dtype=torch.long, device=t["q"].device) for x in ("queries", "keys"))
        seen = visible(queries, keys, padded[0].shape[1], padded[1].shape[1], p["causal"], p["window_left"], p["window_right"])
        attended = attend(*padded, seen, dtype=t["q"].dtype, **softmax_options(p, t))
        return expected_rows(attended, facts["queries"], facts["starts"][0], t["q"].shape[0], t["q"].dtype)

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        found = {
            "q": Argument(HALVES, ("", "", "head_dim"), ("k",)),
            "k": Argument(HALVES, ("keys", "heads_kv", "head_dim"), ("v", "q")),
            "v": Argument(HALVES, ("keys", "heads_kv", ""), ("k",)),
            "cu_seqlens_q": Argument((torch.int32,), ("ends",), ("cu_seqlens_k",)),
            "cu_seqlens_k": Argument((torch.int32,), ("ends",), ("cu_seqlens_q",)),
        }
        if p["sinks"]:
            found["sinks"] = Argument((DTYPES[p["dtype"]],), ("heads_q",), ("q",))
            found["q"] = Argument(HALVES, ("", "heads_q", "head_dim"), ("k", "sinks", "heads"))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [*wrong_attention_options(), ("max_seqlen_q", -1, "max_seqlen_q"), ("max_seqlen_k", -5, "max_seqlen_k")]

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        return hostile_ends(contents, draw, [("cu_seqlens_q", p["rows"][0]), ("cu_seqlens_k", p["rows"][1])])


def first_key(queries: int, keys: int, window_left: int) -> int:
    """The first key that one of a sequence's queries sees: its first query is aligned to key keys - queries."""
    return min(keys, max(0, keys - queries - window_left)) if window_left >= 0 else 0


def hostile_ends(contents: Contents, draw: Draw, names: list[tuple[str, int]]) -> Hostile | None:
    """cu_seqlens that descend or leave the rows."""
    name, rows = draw.choice(names)
    ends = contents.tensors[name]
    if ends is None or ends.shape[0] < 2:
        return None
    wild = (-1, -(2**31), 2**31 - 1, rows + 1, rows + 70, 10**6, -7)
    if draw.chance(0.3) and ends.shape[0] > 2 and int(ends[-1]) > int(ends[0]):
        ends.copy_(ends.flip(0))
        return Hostile(f"{name} descends")
    at, value = draw.randrange(ends.shape[0]), draw.choice(wild)
    ends[at] = value
    return Hostile(f"{name}[{at}] = {value}")


def pad_rows(x: Tensor, lengths: list[int], starts: list[int]) -> Tensor:
    """Sequences end to end -> [batch, longest, ..] in float64, zeros behind each."""
    longest = max(lengths, default=0)
    padded = torch.zeros(len(lengths), longest, *x.shape[1:], dtype=torch.float64, device=x.device)
    if sum(lengths):
        rows = torch.tensor([s + i for s, n in zip(starts, lengths, strict=True) for i in range(n)], device=x.device)
        place = torch.tensor([b * longest + i for b, n in enumerate(lengths) for i in range(n)], device=x.device)
        padded.flatten(0, 1)[place] = x[rows].double()
    return padded


class MergeAttentionStates(Family):
    name = "merge_attention_states"

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        batched = draw.chance(0.5)
        parts = draw.weighted({1: 1, 2: 4, 3: 2, 8: 1, 16: 1, 17: 1, 40: 0.5})
        while True:
            lead = ((draw.pick(1, 2, 3),) if batched else ()) + (draw.extent(300 if limits.small else 5000),)
            heads = draw.weighted({1: 2, 2: 2, 8: 2, 32: 1, 0: 0.1})
            head_dim = draw.extent(264, tiles=(8, 64, 128, 256))
            if parts * math.prod(lead) * heads * head_dim <= 2 * limits.elements:
                break
        dtype = draw.pick("float16", "bfloat16", "float32")
        return {"dtype": dtype, "parts": parts, "lead": lead, "heads": heads, "head_dim": head_dim, "empty": draw.pick(0.0, 0.1, 0.5)}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        lead, heads, head_dim = p["lead"], p["heads"], p["head_dim"]
        tensors: dict[str, Tensor | None] = {}
        for i in range(p["parts"]):
            lse = data.normal(*lead[:-1], heads, lead[-1], scale=3.0).add_(draw.pick(0.0, 0.0, 20.0, -50.0))
            empty = data.uniform(*lse.shape) < p["empty"]
            lse.masked_fill_(empty, -math.inf)
            out = data.normal(*lead, heads, head_dim, dtype=DTYPES[p["dtype"]])
            out[empty.transpose(-1, -2)] = draw.pick(math.nan, math.inf, 0.0)  # a part without keys may hold anything
            tensors |= {f"out{i}": out, f"lse{i}": lse}
        return Contents(tensors)

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        outs, lses = ([t[f"{name}{i}"] for i in range(p["parts"])] for name in ("out", "lse"))
        out, lse = minfer.merge_attention_states(outs, lses)
        return {"out": out, "lse": lse}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, parts, dtype = contents.tensors, range(p["parts"]), DTYPES[p["dtype"]]
        lses = torch.stack([t[f"lse{i}"].double() for i in parts])
        lse = torch.logsumexp(lses, 0)
        weights = (lses - lse.masked_fill(lse == -math.inf, 0.0)).exp().transpose(-1, -2).unsqueeze(-1)
        outs = torch.stack([t[f"out{i}"].double() for i in parts])
        terms = torch.where(weights == 0, 0.0, outs * weights)
        out, magnitude = terms.sum(0), terms.abs().sum(0)
        # A weight is the exponential of a float32 difference: relative to it, the difference's error.
        size = lambda x: x.abs().nan_to_num(posinf=0.0)  # noqa: E731
        off = 2.0**-22 * (size(lses).amax(0) + size(lse) + p["parts"] + 8)  # docs/numerics.md, 5.7
        bound = 2 * off.transpose(-1, -2).unsqueeze(-1) * magnitude * (1 + unit(dtype)) + unit(dtype) * out.abs() + smallest(dtype)
        return [
            Expected("out", dtype, out, bound),
            Expected("lse", torch.float32, lse, off),
        ]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        last = p["parts"] - 1
        modes = tuple("abcd"[: len(p["lead"])])
        shared = (*modes, "heads", "head_dim")
        lse_modes = (*modes[:-1], "heads", modes[-1])
        found = {f"lse{last}": Argument((torch.float32,), lse_modes, ("lses", "outs"))}
        if last:
            found[f"out{last}"] = Argument((DTYPES[p["dtype"]],), shared, ("outs", "lses"))
        else:
            found["out0"] = Argument((torch.float16, torch.bfloat16, torch.float32), shared, ("outs", "lses"))
        return found
