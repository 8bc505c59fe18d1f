"""minfer.grouped_gemm, grouped_gemm_masked and grouped_w4a16_gemm: the products of mixture-of-experts layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Hostile, Parameters, WrongTensors
from ..truth import weights
from ..truth.epilogue import ACTIVATIONS, Bounded, activate, activate_float32, affine, codes, gated, gated_float32, product, result
from .attention import DTYPES, HALVES
from .gemm import draw_quant, fill_scale, one_result, output_type, quant_options, scale_argument, wrong_quants
from .quantized_gemm import draw_weight, fill_weight, pack, passed_scales

EXPERTS = arena.Rule(expand=False, usual=(0, 2, 1))  # [experts, k, n], as weights [experts, n, k] are passed
GATE_LAYOUTS = ("halves", "alternating", "blocks")


@dataclass
class ExpertWeight:
    """What a row of an expert is multiplied by, [k, n] in float64; ``rounding``: of a quantised one, magnitude of what is rounded."""

    value: Tensor
    peer: Tensor
    quantized: weights.Weight | None = None
    alpha: float = 1.0


@dataclass
class Rows:
    """Results of rows: value and bound, torch's in float32, and what each element is off by on average."""

    d: Bounded
    peer: Tensor
    average: Tensor


def expert_product(a: Tensor, w: ExpertWeight, bias: Tensor | None, dtype: torch.dtype, activation: str, gate: str | None) -> Rows:
    """activation(alpha a.W + bias), gated where there is a ``gate`` layout; a [rows, k] of ``dtype``."""
    bound, average = (0.0, None) if w.quantized is None else weights.error_of_sum(a.double(), w.quantized, dtype)
    x, magnitude = product(a.double(), w.value, bound)
    x = affine(x, magnitude, w.alpha, None if bias is None else bias.double())
    peer = w.alpha * (a.float() @ w.peer)
    peer = peer if bias is None else peer + bias.float()
    usual = Bounded(x.value, x.error if average is None else abs(w.alpha) * average)
    if gate is None:
        return Rows(activate(x, activation), activate_float32(peer, activation), activate(usual, activation).error)
    return Rows(gated(x, activation, gate), gated_float32(peer, activation, gate), gated(usual, activation, gate).error)


def all_rows(
    rows: int,
    columns: int,
    device: torch.device,
    ranges: Iterable[tuple[int, int]],
    product: Callable[[int, slice], Rows],
    row_scale: Tensor | None,
) -> Rows:
    """Results of experts whose rows begin and end somewhere, 0 where there is none; ``product`` is asked of those that have rows."""
    truth, error, average = (torch.zeros(rows, columns, dtype=torch.float64, device=device) for _ in range(3))
    peer = torch.zeros(rows, columns, device=device)
    for expert, (begin, end) in enumerate(ranges):
        if end <= begin:
            continue
        own = slice(begin, end)
        found = product(expert, own)
        d = found.d
        if row_scale is not None:
            scale = row_scale[own, None]
            d, found.peer, found.average = d.times(scale.double()), found.peer * scale, found.average * scale.abs()
        truth[own], error[own], peer[own], average[own] = d.value, d.error, found.peer, found.average
    return Rows(Bounded(truth, error), peer, average)


def ranges_of(sizes: list[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def draw_epilogue(draw: Draw, layouts: tuple[str, ...]) -> Parameters:
    gate = draw.choice(layouts) if draw.chance(0.45) else None
    kinds = dict.fromkeys(ACTIVATIONS, 1.0) | {"none": 3.0}
    if gate:
        kinds = dict.fromkeys(ACTIVATIONS, 1.0) | {"silu": 3.0, "swigluoai": 2.0}
    return {"gate": gate, "activation": draw.weighted(kinds), "bias": draw.chance(0.4), "row_scale": draw.chance(0.4)}


def draw_group_sizes(draw: Draw, limits: Limits, unit_n: int, unit_k: int) -> tuple[int, int, int, int]:
    """experts, rows, n and k."""
    while True:
        experts = draw.weighted({1: 1, 2: 1, 3: 1, 8: 3, 16: 1, 64: 1, 128: 0 if limits.small else 2, 512: 0.1})
        rows = draw.extent(150 if limits.small else 3000, zero=0.03)
        n = unit_n * draw.extent((200 if limits.small else 3000) // unit_n, zero=0.02)
        k = unit_k * draw.extent((200 if limits.small else 3000) // unit_k, zero=0.02)
        if experts * n * k <= limits.elements and rows * max(n, k) <= limits.elements and rows * n * k <= limits.work:
            return experts, rows, n, k


def draw_offsets(p: Parameters, draw: Draw) -> tuple[list[int], list[int]]:
    """Ends of the experts, as they are passed, and the rows that each has; some rows belong to nobody."""
    used = p["rows"] if draw.chance(0.6) else draw.randint(0, p["rows"])
    sizes = draw.split(used, p["experts"], empty=draw.pick(0.0, 0.2, 0.8))
    ends, at = [], 0
    for size in sizes:
        at += size
        ends.append(at)
    if draw.chance(0.1) and used == p["rows"]:  # beyond the rows there are: clamped
        extra = draw.pick(1, 100, 10**6)
        ends = [end + extra if end >= used else end for end in ends]
    return ends, sizes


def spoil(x: Tensor, where: Tensor | int | slice) -> None:
    """Makes what nobody may read NaN, if there is one; 0xff is one of exponents."""
    if x.dtype == torch.uint8:
        x[where] = 0xFF
    elif x.dtype == torch.float8_e4m3fn:
        x.view(torch.uint8)[where] = 0x7F
    elif x.dtype.is_floating_point:
        x[where] = math.nan


class Grouped(Family):
    """What products of sorted rows have in common."""

    views = {"a": arena.ANY, "out": arena.ROWS}

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return ((p["rows"], self.columns(p)), output_type(p)) if p["form"] == "out" else None

    @staticmethod
    def columns(p: Parameters) -> int:
        return p["n"] // 2 if p["gate"] else p["n"]

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return arena.VIEW if name == "a" else super().rule(p, name)  # rows of nobody are NaN: no row may be another

    def draw_rows(self, p: Parameters, draw: Draw) -> Parameters:
        p["gather"] = draw.chance(0.45)
        p["a_rows"] = max(1, draw.extent(p["rows"] + 5, zero=0.0)) + 1 if p["gather"] else p["rows"]
        p["form"] = draw.pick("functional", "functional", "out")
        return p | draw_quant(draw)

    def fill_rows(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        """a, offsets, gather and row_scale; what is nobody's is NaN."""
        rows = p["rows"]
        ends, sizes = draw_offsets(p, draw)
        used = min(ends[-1], rows) if ends else 0
        a = self.operand(p, data, p["a_rows"], p["k"])
        gather = None
        unseen = torch.ones(p["a_rows"], dtype=torch.bool, device=data.device)
        if p["gather"]:
            seen = data.integers(0, p["a_rows"] - 1, rows, dtype=torch.int32)  # the last row of a is nobody's
            unseen[seen[:used].long()] = False
            gather = seen
            gather[used:] = draw.pick(p["a_rows"] - 1, -1, p["a_rows"], 10**6, 2**31 - 1, -(2**31))  # anything
        else:
            unseen[:used] = False
        spoil(a, unseen)
        row_scale = data.normal(rows) if p["row_scale"] else None
        if row_scale is not None:
            row_scale[used:] = math.nan
        tensors = {"a": a, "offsets": data.tensor(ends, torch.int32), "gather": gather, "row_scale": row_scale}
        tensors["scale"] = fill_scale(p, data)
        return Contents(tensors, {"sizes": sizes, "used": used, "zero_rows": None, "unseen": unseen})

    def operand(self, p: Parameters, data: Data, *shape: int) -> Tensor:
        return data.normal(*shape, dtype=DTYPES[p["dtype"]])

    def rows_of_a(self, p: Parameters, contents: Contents, own: slice) -> tuple[Tensor, Tensor | None]:
        """Numbers of a's rows, and which of them do not exist and count as zeros."""
        gather, zeros = contents.tensors["gather"], contents.facts["zero_rows"]
        if gather is None:
            return torch.arange(own.start, own.stop, device=contents.tensors["a"].device), None
        return gather[own].long().clamp(0, max(p["a_rows"] - 1, 0)), None if zeros is None else zeros[own]

    def expect_rows(self, p: Parameters, contents: Contents, weight: Any, bias: Tensor | None) -> list[Expected]:
        """``weight``: of an expert, asked only of those that have rows."""
        t, dtype = contents.tensors, DTYPES[p["dtype"]]

        def product(expert: int, own: slice) -> Rows:
            index, zeros = self.rows_of_a(p, contents, own)
            a = t["a"][index] if zeros is None else t["a"][index].masked_fill(zeros[:, None], 0.0)
            return expert_product(a, weight(expert), None if bias is None else bias[expert], dtype, p["activation"], p["gate"])

        found = self.every_row(p, contents, product)
        if p["quant"]:
            return [codes("out", found.d, t["scale"])]
        return [result("out", found.d, dtype, found.peer.to(dtype), found.average)]

    def every_row(self, p: Parameters, contents: Contents, product: Callable[[int, slice], Rows]) -> Rows:
        t, ranges = contents.tensors, ranges_of(contents.facts["sizes"])
        return all_rows(p["rows"], self.columns(p), t["a"].device, ranges, product, t["row_scale"])

    def row_arguments(self, p: Parameters) -> dict[str, Argument]:
        rows = "rows" if p["form"] == "out" or p["row_scale"] else ""
        found = {
            "a": Argument(HALVES, ("" if p["gather"] else rows, "k"), ("b", "row_scale", "out", "scales", "qweight", "scale")),
            "offsets": Argument((torch.int32,), ("experts",), ()),
        }
        if p["gather"]:
            found["gather"] = Argument((torch.int32,), (rows,), ("row_scale", "out"))
        if p["row_scale"]:
            found["row_scale"] = Argument((torch.float32,), ("rows",), ())
        if p["form"] == "out":
            found["out"] = Argument((self.out(p)[1],), ("rows", "columns"), ())
        return found | scale_argument(p)

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        t, facts = contents.tensors, contents.facts
        if p["gather"] and facts["used"] and draw.chance(0.6):
            at = draw.sample(range(facts["used"]), min(facts["used"], draw.pick(1, 1, 4, facts["used"])))
            value = draw.pick(-1, p["a_rows"], p["a_rows"] + 3, 10**6, 2**31 - 1, -(2**31))
            t["gather"][torch.tensor(at, device=t["a"].device)] = value
            # Reads as a row of zeros.
            facts["zero_rows"] = torch.zeros(p["rows"], dtype=torch.bool, device=t["a"].device)
            facts["zero_rows"][torch.tensor(at, device=t["a"].device)] = True
            return Hostile(
                f"gather = {value} in {len(at)} places, first {at[0]}", lambda before, have: self.expect(p, contents, before, have)
            )
        if p["rows"] == 0:
            return None
        at = draw.randrange(p["experts"])
        value = draw.pick(-1, -(2**31), 2**31 - 1, p["rows"] + 1, 0, 10**6)
        t["offsets"][at] = value
        return Hostile(f"offsets[{at}] = {value}", cpu_raises=None)


class GroupedGemm(Grouped):
    name = "grouped_gemm"
    share = 3.0
    kernels = "moe"

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return EXPERTS if name == "b" else super().rule(p, name)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"dtype": name_of(draw.choice(HALVES))} | draw_epilogue(draw, GATE_LAYOUTS)
        unit = {"blocks": 16, "halves": 2, "alternating": 2}.get(p["gate"], 1)
        p["experts"], p["rows"], p["n"], p["k"] = draw_group_sizes(draw, limits, unit, 1)
        return self.draw_rows(p, draw)

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        contents, dtype = self.fill_rows(p, draw, data), DTYPES[p["dtype"]]
        b = data.normal(p["experts"], p["k"], p["n"], dtype=dtype, scale=1.0 / math.sqrt(max(p["k"], 1)))
        bias = data.normal(p["experts"], p["n"], dtype=dtype) if p["bias"] else None
        for expert, size in enumerate(contents.facts["sizes"]):
            if size == 0:  # nobody's weights
                b[expert] = math.nan
                if bias is not None:
                    bias[expert] = math.nan
        contents.tensors |= {"b": b, "bias": bias}
        return contents

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: t[name] for name in ("bias", "gather", "row_scale")}
        options |= {"activation": p["activation"], "gated": p["gate"] is not None, "gate_layout": p["gate"] or "halves"}
        options |= quant_options(p, t)
        if p["form"] == "out":
            options["out"] = t["out"]
        return one_result(minfer.grouped_gemm(t["a"], t["b"], t["offsets"], **(options | p.get("extra", {}))))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        b = contents.tensors["b"]
        return self.expect_rows(p, contents, lambda e: ExpertWeight(b[e].double(), b[e].float()), contents.tensors["bias"])

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        found = self.row_arguments(p)
        found["b"] = Argument((dtype,), ("experts", "k", "n" if p["bias"] else ""), ("a", "bias", "offsets"))
        found["offsets"].beside = ("b",)
        if p["bias"]:
            found["bias"] = Argument((dtype,), ("experts", "n"), ("b",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        found = [("activation", x, "activation") for x in ("swish", "", "SiLU")] + [("gate_layout", x, "gate_layout") for x in ("rows", "")]
        found += [("kernel", x, "kernel") for x in ("", "nothing")] + wrong_quants(p)
        if not p["gate"]:
            found += [("activation", "swigluoai", "swigluoai"), ("gate_layout", "blocks", "gate_layout")]
        return found


class GroupedGemmMasked(Family):
    name = "grouped_gemm_masked"
    share = 2.0
    kernels = "moe"
    views = {"out": arena.RUN, "b": EXPERTS}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"dtype": name_of(draw.choice(HALVES))} | draw_epilogue(draw, GATE_LAYOUTS)
        unit = {"blocks": 16, "halves": 2, "alternating": 2}.get(p["gate"], 1)
        while True:
            p["experts"], rows, p["n"], p["k"] = draw_group_sizes(draw, limits, unit, 1)
            p["max_rows"] = rows // p["experts"] + draw.pick(0, 1, 7) if draw.chance(0.8) else rows
            if p["experts"] * p["max_rows"] * max(p["n"], p["k"]) <= limits.elements:
                break
        return p | {"form": draw.pick("functional", "functional", "out")} | draw_quant(draw)

    def _shape(self, p: Parameters) -> tuple[int, int, int]:
        return p["experts"], p["max_rows"], Grouped.columns(p)

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return (self._shape(p), output_type(p)) if p["form"] == "out" else None

    @staticmethod
    def draw_counts(p: Parameters, draw: Draw) -> tuple[list[int], list[int]]:
        """Counts as they are passed, and clamped to 0 .. max_rows."""
        most = p["max_rows"]
        counts = [draw.pick(0, 1, most, draw.randint(0, most), draw.randint(0, most), -3, most + 5) for _ in range(p["experts"])]
        if draw.chance(0.1):
            counts[draw.randrange(p["experts"])] = draw.pick(-(2**31), 2**31 - 1)
        return counts, [min(max(count, 0), most) for count in counts]

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        dtype, most = DTYPES[p["dtype"]], p["max_rows"]
        counts, sizes = self.draw_counts(p, draw)
        a = data.normal(p["experts"], most, p["k"], dtype=dtype)
        b = data.normal(p["experts"], p["k"], p["n"], dtype=dtype, scale=1.0 / math.sqrt(max(p["k"], 1)))
        bias = data.normal(p["experts"], p["n"], dtype=dtype) if p["bias"] else None
        row_scale = data.normal(p["experts"], most) if p["row_scale"] else None
        for expert, size in enumerate(sizes):
            a[expert, size:] = math.nan
            if row_scale is not None:
                row_scale[expert, size:] = math.nan
            if size == 0:
                b[expert] = math.nan
                if bias is not None:
                    bias[expert] = math.nan
        tensors = {"a": a, "b": b, "counts": data.tensor(counts, torch.int32), "bias": bias, "row_scale": row_scale}
        return Contents(tensors | {"scale": fill_scale(p, data)}, {"sizes": sizes})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: t[name] for name in ("bias", "row_scale")}
        options |= {"activation": p["activation"], "gated": p["gate"] is not None, "gate_layout": p["gate"] or "halves"}
        options |= quant_options(p, t)
        if p["form"] == "out":
            options["out"] = t["out"]
        return one_result(minfer.grouped_gemm_masked(t["a"], t["b"], t["counts"], **(options | p.get("extra", {}))))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, dtype = contents.tensors, DTYPES[p["dtype"]]

        def product(expert: int, own: slice) -> Rows:
            bias, w = None if t["bias"] is None else t["bias"][expert], ExpertWeight(t["b"][expert].double(), t["b"][expert].float())
            return expert_product(t["a"].flatten(0, 1)[own], w, bias, dtype, p["activation"], p["gate"])

        found = self.all_slabs(p, contents, product)
        want = codes("out", found.d, t["scale"]) if p["quant"] else result("out", found.d, dtype, found.peer.to(dtype), found.average)
        return [self.as_slabs(p, contents, want, before)]

    def all_slabs(self, p: Parameters, contents: Contents, product: Callable[[int, slice], Rows]) -> Rows:
        """Results of all rows, which are counted through."""
        (experts, most, columns), row_scale = self._shape(p), contents.tensors["row_scale"]
        ranges = [(expert * most, expert * most + size) for expert, size in enumerate(contents.facts["sizes"])]
        row_scale = None if row_scale is None else row_scale.flatten()
        return all_rows(experts * most, columns, contents.tensors["a"].device, ranges, product, row_scale)

    def as_slabs(self, p: Parameters, contents: Contents, want: Expected, before: dict[str, Tensor]) -> Expected:
        shape = self._shape(p)
        want.truth = want.truth.view(shape)
        want.bound, want.peer = want.bound.view(shape), None if want.peer is None else want.peer.view(shape)
        if p["form"] == "out":  # rows behind a count are left as they are
            sizes = torch.tensor(contents.facts["sizes"], device=want.truth.device)
            ours = torch.arange(shape[1], device=want.truth.device) < sizes[:, None]
            want.truth = torch.where(ours[..., None], want.truth, before["out"].double())
        return want

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        rows = "rows" if p["row_scale"] or p["form"] == "out" else ""
        found = {
            "a": Argument(HALVES, ("experts", rows, "k"), ("b", "row_scale", "out", "scale")),
            "b": Argument((dtype,), ("experts", "k", "n" if p["bias"] else ""), ("a", "bias")),
            "counts": Argument((torch.int32,), ("experts",), ()),
        }
        if p["bias"]:
            found["bias"] = Argument((dtype,), ("experts", "n"), ("b",))
        if p["row_scale"]:
            found["row_scale"] = Argument((torch.float32,), ("experts", "rows"))
        if p["form"] == "out":
            found["out"] = Argument((output_type(p),), ("experts", "rows", "columns"))
        return found | scale_argument(p)

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        return GroupedGemm.wrong_options(self, p)


def fill_experts(p: Parameters, data: Data, experts: int, n: int, k: int, sizes: list[int]) -> tuple[dict[str, Tensor | None], Tensor]:
    """qweight, scales, zeros and alpha of quantised experts, NaN where an expert has no rows; and the codes [experts, n, k]."""
    size = 1.0 / math.sqrt(max(k, 1))
    own = [fill_weight(p, data, n, k, size) for _ in range(experts)]
    codes = torch.stack([w["codes"] for w in own])
    qweight = torch.stack([pack(x, p["format"]) for x in codes])
    found: dict[str, Tensor | None] = {"qweight": qweight, "scales": torch.stack([w["scales"] for w in own])}
    found["zeros"] = None if p["zeros"] == "none" else torch.stack([w["zeros"] for w in own])
    found["alpha"] = None
    if p["alpha"] or p["format"] == "nvfp4":
        low, high = (1e-4, 4e-4) if p["format"] == "nvfp4" else (-2.0, 2.0)
        found["alpha"] = data.uniform(experts, low=low, high=high)
    for expert, rows in enumerate(sizes):
        if rows == 0:
            for name in ("scales", "zeros", "alpha"):
                if found[name] is not None:
                    found[name][expert] = 0xFF if found[name].dtype == torch.uint8 else math.nan
    return found, codes


def expert_weight(p: Parameters, t: dict[str, Tensor | None], codes: Tensor, expert: int, names: tuple[str, str, str]) -> ExpertWeight:
    """``names``: of scales, zeros and alpha."""
    scales, zeros, alpha = (t[name] for name in names)
    w = weights.weight(codes[expert], scales[expert], None if zeros is None else zeros[expert], p["format"], p["group_size"])
    factor = 1.0 if alpha is None else float(alpha[expert])
    return ExpertWeight(w.value.t(), w.value.to(DTYPES[p["dtype"]]).float().t(), w, factor)


def draw_experts_format(draw: Draw, limits: Limits, dtype: str) -> Parameters:
    """On CUDA int4, mxfp4 and nvfp4 have kernels."""
    while True:
        p = draw_weight(draw, 4, dtype) | {"alpha": draw.chance(0.3)}
        if not limits.cuda or p["format"] != "nf4":
            return p


class GroupedW4(Grouped):
    name = "grouped_w4a16_gemm"
    share = 2.0
    kernels = "moe_w4a16"
    views = Grouped.views | dict.fromkeys(("qweight", "scales", "zeros"), arena.DENSE)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"dtype": name_of(draw.choice(HALVES))} | draw_epilogue(draw, ("blocks",))
        p |= draw_experts_format(draw, limits, p["dtype"])
        unit = 16 if p["gate"] else 8
        while True:
            p["experts"], p["rows"], p["n"], p["k"] = draw_group_sizes(draw, limits, unit, 8)
            if p["experts"] <= (16 if limits.small else 128):
                break
        return self.draw_rows(p, draw)

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        contents, dtype = self.fill_rows(p, draw, data), DTYPES[p["dtype"]]
        sizes = contents.facts["sizes"]
        tensors, contents.facts["codes"] = fill_experts(p, data, p["experts"], p["n"], p["k"], sizes)
        tensors["bias"] = data.normal(p["experts"], p["n"], dtype=dtype) if p["bias"] else None
        if tensors["bias"] is not None:
            tensors["bias"][torch.tensor(sizes, device=data.device) == 0] = math.nan
        contents.tensors |= tensors
        return contents

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: t[name] for name in ("alpha", "bias", "gather", "row_scale")}
        options |= {"group_size": p["group_size"], "w4_format": p["format"], "activation": p["activation"], "gated": p["gate"] is not None}
        options |= quant_options(p, t)
        if p["form"] == "out":
            options["out"] = t["out"]
        operands = (t["a"], t["qweight"], passed_scales(p, t["scales"]), t["zeros"], t["offsets"])
        return one_result(minfer.grouped_w4a16_gemm(*operands, **(options | p.get("extra", {}))))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, codes = contents.tensors, contents.facts["codes"]
        return self.expect_rows(p, contents, lambda e: expert_weight(p, t, codes, e, ("scales", "zeros", "alpha")), t["bias"])

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        stored = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn) if p["format"] in weights.BYTE_SCALES else (dtype,)
        found = self.row_arguments(p)
        found["a"].shape = (found["a"].shape[0], "")
        n = "n" if p["bias"] else ""
        beside = ("qweight", "zeros", "offsets", "bias", "alpha")
        found["qweight"] = Argument((torch.int32,), ("experts", "", "", ""), ("scales",))
        found["scales"] = Argument(stored, ("experts", "groups" if p["zeros"] != "none" else "", n), beside)
        found["offsets"].beside = ("scales",)
        if p["zeros"] != "none":
            found["zeros"] = Argument((dtype,), ("experts", "groups", ""), ("scales",))
        if contents_has_alpha(p):
            found["alpha"] = Argument((torch.float32,), ("experts",))
        if p["bias"]:
            found["bias"] = Argument((dtype,), ("experts", "n"))
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        found: list[WrongTensors] = []
        for name in ("qweight", "scales", "zeros"):
            x = tensors[name]
            if x is not None and x.numel() and min(x.shape[-2:]) > 1:
                found.append((f"{name} is strided", {name: x.mT.contiguous().mT}, (name,)))
        if p["format"] not in weights.ZERO:
            found.append(("zeros are given", {"zeros": torch.zeros_like(tensors["scales"])}, ("zeros",)))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        found = [("activation", x, "activation") for x in ("swish", "")] + [("w4_format", x, "w4_format") for x in ("int8", "")]
        found += [("group_size", x, "group_size") for x in (0, -2, 48)] + [("kernel", "nothing", "kernel")] + wrong_quants(p)
        if not p["gate"]:
            found.append(("activation", "swigluoai", "swigluoai"))
        return found


def contents_has_alpha(p: Parameters) -> bool:
    return p["alpha"] or p["format"] == "nvfp4"


GROUPED_FAMILIES = (GroupedGemm(), GroupedGemmMasked(), GroupedW4())
