"""minfer.grouped_gemm_fp8, grouped_gemm_int8, their masked forms and layers: scales of every kind and in any strides, types of D, out=."""

from __future__ import annotations

import math
from typing import Any

import minfer
import torch
from torch import Tensor

from ..compare import Expected, accumulation, of_roundings, smallest, unit
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters
from ..truth.epilogue import Bounded, activate, activate_float32, affine, codes, gated, gated_float32, product, result, split_gate
from .attention import DTYPES, HALVES
from .grouped import EXPERTS, GATE_LAYOUTS, Grouped, GroupedGemmMasked, Rows, draw_epilogue, draw_group_sizes, spoil
from .moe_layer import Layer
from .scaled_gemm import BLOCK, FAST, FP8, PROMOTED, blocks_of

GROUPS = (128, 64, 32)
UNIT_GROUP = 64  # a layer's inner activations have a scale for each 32 or 64 columns
LARGEST = {FP8: 448.0, torch.int8: 127.0}


# ---- codes and scales ----------------------------------------------------------------------------------------------------------------


def draw_kinds(draw: Draw, fp8: bool) -> Parameters:
    """Of what the scales of a's rows and of the weights are; ``group``: k of one of those of blocks of rows."""
    rows = {"one": 1, "lines": 2, "lines_1": 1, "blocks": 3} | ({"exponents": 1} if fp8 else {})
    experts = {"one": 1, "expert": 1, "expert_1": 0.5, "column": 2, "column_1": 0.5} | ({"blocks": 3, "exponents": 1} if fp8 else {})
    return {"a_kind": draw.weighted(rows), "group": draw.choice(GROUPS), "b_kind": draw.weighted(experts)}


def operand(data: Data, fp8: bool, *shape: int) -> Tensor:
    return data.normal(*shape, dtype=torch.float32, scale=16.0).to(FP8) if fp8 else data.integers(-128, 128, *shape, dtype=torch.int8)


def _of_blocks(data: Data, kind: str, size: float, *shape: int) -> Tensor:
    if kind == "exponents":
        middle = 127 + round(math.log2(size))
        return data.integers(middle - 2, middle + 3, *shape, dtype=torch.uint8)
    return data.uniform(*shape, low=0.5 * size, high=1.5 * size)


def row_scale(p: Parameters, data: Data, rows: tuple[int, ...], k: int, size: float, kind: str = "a_kind") -> Tensor:
    """Of activations, [*rows, k]."""
    shapes = {"one": (1,), "lines": rows, "lines_1": (*rows, 1)}
    return _of_blocks(data, p[kind], size, *shapes.get(p[kind], (*rows, -(-k // p["group"]))))


def expert_scale(data: Data, kind: str, experts: int, n: int, k: int, is_gated: bool, size: float) -> Tensor:
    blocks = 2 * blocks_of(n // 2) if is_gated else blocks_of(n)
    shapes = {"one": (1,), "expert": (experts,), "expert_1": (experts, 1), "column": (experts, n), "column_1": (experts, n, 1)}
    shape = shapes.get(kind, (experts, blocks, blocks_of(k)))
    if kind == "exponents" and shape == (experts, n, 1):  # which are of columns
        kind = "blocks"
    return _of_blocks(data, kind, size, *shape)


def _numbers(scale: Tensor) -> Tensor:
    return torch.exp2(scale.double() - 127.0) if scale.dtype == torch.uint8 else scale.double()


def of_rows(scale: Tensor, kind: str, group: int, k: int, index: Tensor) -> Tensor:
    """Of the elements of some rows, [rows, k] in float64; rows of all slabs are counted through."""
    if kind == "one":
        return _numbers(scale).reshape(1, 1).expand(len(index), k)
    if kind in ("lines", "lines_1"):
        return _numbers(scale).reshape(-1)[index, None].expand(len(index), k)
    return _numbers(scale.flatten(0, -2)[index]).repeat_interleave(group, 1)[:, :k]


def of_expert(scale: Tensor, kind: str, expert: int, n: int, k: int, gate: str | None) -> Tensor:
    """Of the elements of an expert's weight, [n, k] in float64."""
    if kind == "one":
        return _numbers(scale).reshape(1, 1).expand(n, k)
    own = _numbers(scale[expert])
    if kind not in ("blocks", "exponents"):
        return own.reshape(-1, 1).expand(n, k)
    by_k = own.repeat_interleave(BLOCK, 1)[:, :k]
    if gate is None:
        return by_k.repeat_interleave(BLOCK, 0)[:n]
    found = torch.empty(n, k, dtype=torch.float64, device=scale.device)
    for rows, half in zip(split_gate(n, gate, scale.device), by_k.chunk(2), strict=True):
        found[rows] = half.repeat_interleave(BLOCK, 0)[: n // 2]
    return found


def spoil_experts(scale: Tensor, kind: str, empty: Tensor) -> None:
    if kind != "one":
        spoil(scale, empty)


def by_blocks(p: Parameters) -> bool:
    return any(p[kind] in ("blocks", "exponents") for kind in ("a_kind", "b_kind"))


# ---- products ------------------------------------------------------------------------------------------------------------------------


class Scaled:
    """What the products of sorted and of masked rows have in common."""

    fp8: bool

    def draw_scaled(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"dtype": "float8_e4m3fn" if self.fp8 else "int8", "quant": False, "scale_size": 1.0}
        p |= draw_epilogue(draw, GATE_LAYOUTS) | draw_kinds(draw, self.fp8)
        unit_n = {"blocks": 16, "halves": 2, "alternating": 2}.get(p["gate"], 1)
        p["experts"], p["rows"], p["n"], p["k"] = draw_group_sizes(draw, limits, unit_n, 1)
        p["out_type"] = draw.choice(["bfloat16", "float16", *(["codes"] if self.fp8 else [])])
        narrow = draw.choice(["bfloat16", "float16"]) if p["out_type"] == "codes" else p["out_type"]
        p |= {"narrow": narrow, "bias": draw.pick(narrow, "float32") if p["bias"] else None, "fast": self.fp8 and draw.chance(0.2)}
        return p | {"say_type": draw.chance(0.7)}

    def d_type(self, p: Parameters) -> torch.dtype:
        return FP8 if p["out_type"] == "codes" else DTYPES[p["out_type"]]

    def fill_scaled(self, p: Parameters, data: Data, rows: tuple[int, ...], sizes: list[int]) -> dict[str, Tensor | None]:
        """The weights, all scales and the bias; NaN where an expert has no rows."""
        experts, n, k = p["experts"], p["n"], p["k"]
        empty = torch.tensor(sizes, device=data.device) == 0
        size = 1.0 / (16.0 if self.fp8 else 74.0)
        b = operand(data, self.fp8, experts, k, n)
        b_scale = expert_scale(data, p["b_kind"], experts, n, k, p["gate"] is not None, size / math.sqrt(max(k, 1)))
        bias = None if p["bias"] is None else data.normal(experts, n, dtype=DTYPES[p["bias"]])
        spoil(b, empty)
        spoil_experts(b_scale, p["b_kind"], empty)
        if bias is not None:
            spoil(bias, empty)
        out_scale = data.uniform(1, low=0.01, high=0.03) if p["out_type"] == "codes" else None
        a_scale = row_scale(p, data, rows, k, size)
        return {"b": b, "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "out_scale": out_scale}

    def options(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Any]:
        found = {"activation": p["activation"], "gated": p["gate"] is not None, "gate_layout": p["gate"] or "halves", "bias": t["bias"]}
        found |= {"row_scale": t["row_scale"]}
        if self.fp8:
            found |= {"out_scale": t["out_scale"], "fast_accum": p["fast"]}
        if p["form"] == "out":
            found["out"] = t["out"]
        if p["say_type"] or (p["form"] != "out" and p["out_type"] == "float16"):
            found["out_dtype"] = self.d_type(p)
        return found

    def product(self, p: Parameters, t: dict[str, Tensor | None], expert: int, index: Tensor, zeros: Tensor | None) -> Rows:
        """Of some rows of a, of which those of ``zeros`` count as zeros."""
        n, k = p["n"], p["k"]
        x = t["a"].flatten(0, -2)[index].double() * of_rows(t["a_scale"], p["a_kind"], p["group"], k, index)
        x = x if zeros is None else x.masked_fill(zeros[:, None], 0.0)
        w = t["b"][expert].double() * of_expert(t["b_scale"], p["b_kind"], expert, n, k, p["gate"]).t()
        y, magnitude = product(x, w)
        if self.fp8:
            y = Bounded(y.value, y.error + (FAST if p["fast"] and not by_blocks(p) else PROMOTED) * magnitude)
        bias = None if t["bias"] is None else t["bias"][expert]
        y = affine(y, magnitude, 1.0, None if bias is None else bias.double())
        peer = x.float() @ w.float()
        peer = peer if bias is None else peer + bias.float()
        if p["gate"] is None:
            d, peer = activate(y, p["activation"]), activate_float32(peer, p["activation"])
        else:
            d, peer = gated(y, p["activation"], p["gate"]), gated_float32(peer, p["activation"], p["gate"])
        return Rows(d, peer, d.error)

    def want(self, p: Parameters, t: dict[str, Tensor | None], found: Rows) -> Expected:
        if p["out_type"] == "codes":
            return codes("out", found.d, t["out_scale"])
        dtype = self.d_type(p)
        return result("out", found.d, dtype, found.peer.to(dtype), found.average)

    def out_types(self, p: Parameters) -> tuple[torch.dtype, ...]:
        """Of out=: both of 16 bits, where nothing says which."""
        return (self.d_type(p),) if p["say_type"] or p["out_type"] == "codes" else HALVES

    def scaled_arguments(self, p: Parameters) -> dict[str, Argument]:
        own = FP8 if self.fp8 else torch.int8
        beside = ("a_scale", "b_scale", "bias", "row_scale", "out", "offsets", "counts", "gather")
        n = "n" if p["bias"] else ""
        found = {"b": Argument((own,), ("experts", "k", n), ("a", *beside))}
        for name in ("a_scale", "b_scale"):
            found[name] = Argument((torch.float32, torch.uint8) if self.fp8 else (torch.float32,), (), ranks=tuple(range(6)))
        if p["bias"]:
            halves = HALVES if p["out_type"] == "codes" else (DTYPES[p["narrow"]],)
            found["bias"] = Argument((*halves, torch.float32), ("experts", "n"), ("b",))
        if p["out_type"] == "codes":
            found["out_scale"] = Argument((torch.float32,), ("one",), ("out_dtype",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        found = [("activation", x, "activation") for x in ("swish", "", "SiLU")] + [("gate_layout", x, "gate_layout") for x in ("rows", "")]
        found += [("kernel", x, "kernel") for x in ("", "nothing")] + [("out_dtype", x, "out_dtype") for x in (torch.float32, torch.int32)]
        if not p["gate"]:
            found += [("activation", "swigluoai", "swigluoai"), ("gate_layout", "blocks", "gate_layout")]
        return found


class GroupedScaled(Scaled, Grouped):
    share = 2.0
    kernels = "moe_scaled"
    views = Grouped.views | {"b": EXPERTS}

    def __init__(self, fp8: bool):
        self.fp8 = fp8
        self.name = f"grouped_gemm_{'fp8' if fp8 else 'int8'}"

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p = self.draw_scaled(draw, limits)
        return self.draw_rows(p, draw) | {"quant": False}

    def launches(self, p: Parameters) -> tuple[str, ...]:
        return ("@gather_first=0", "@gather_first=1") if p["gather"] else ()

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return ((p["rows"], self.columns(p)), self.d_type(p)) if p["form"] == "out" else None

    def operand(self, p: Parameters, data: Data, *shape: int) -> Tensor:
        return operand(data, self.fp8, *shape)

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        contents = self.fill_rows(p, draw, data)
        del contents.tensors["scale"]
        contents.tensors |= self.fill_scaled(p, data, (p["a_rows"],), contents.facts["sizes"])
        if p["a_kind"] != "one":
            spoil(contents.tensors["a_scale"], contents.facts["unseen"])
        return contents

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = self.options(p, t) | {"gather": t["gather"]} | p.get("extra", {})
        return {"out": getattr(minfer, self.name)(t["a"], t["b"], t["a_scale"], t["b_scale"], t["offsets"], **options)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t = contents.tensors

        def own(expert: int, rows: slice) -> Rows:
            return self.product(p, t, expert, *self.rows_of_a(p, contents, rows))

        return [self.want(p, t, self.every_row(p, contents, own))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        found = self.row_arguments(p) | self.scaled_arguments(p)
        found["a"].dtypes, found["a"].beside = (FP8 if self.fp8 else torch.int8,), (*found["a"].beside, "a_scale", "b_scale", "gather")
        found["offsets"].beside = ("b",)
        if p["form"] == "out":
            found["out"] = Argument(self.out_types(p), ("rows", "columns"), ("out_dtype", "out_scale", "bias"))
        return found


class GroupedScaledMasked(Scaled, GroupedGemmMasked):
    share = 1.5
    kernels = "moe_scaled"

    def __init__(self, fp8: bool):
        self.fp8 = fp8
        self.name = f"grouped_gemm_{'fp8' if fp8 else 'int8'}_masked"

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p = self.draw_scaled(draw, limits)
        p["max_rows"] = p.pop("rows") // p["experts"] + draw.pick(0, 1, 7)
        while p["experts"] * p["max_rows"] * max(p["n"], p["k"]) > limits.elements:
            p["max_rows"] //= 2
        return p | {"form": draw.pick("functional", "functional", "out")}

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return (self._shape(p), self.d_type(p)) if p["form"] == "out" else None

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        experts, most, k = p["experts"], p["max_rows"], p["k"]
        counts, sizes = self.draw_counts(p, draw)
        tensors = self.fill_scaled(p, data, (experts, most), sizes)
        tensors |= {"a": operand(data, self.fp8, experts, most, k), "counts": data.tensor(counts, torch.int32)}
        tensors["row_scale"] = data.normal(experts, most) if p["row_scale"] else None
        behind = torch.arange(most, device=data.device) >= torch.tensor(sizes, device=data.device)[:, None]
        spoil(tensors["a"], behind)
        if p["a_kind"] != "one":
            spoil(tensors["a_scale"], behind)
        if tensors["row_scale"] is not None:
            spoil(tensors["row_scale"], behind)
        return Contents(tensors, {"sizes": sizes})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = self.options(p, t) | p.get("extra", {})
        return {"out": getattr(minfer, self.name)(t["a"], t["b"], t["a_scale"], t["b_scale"], t["counts"], **options)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t = contents.tensors

        def own(expert: int, rows: slice) -> Rows:
            return self.product(p, t, expert, torch.arange(rows.start, rows.stop, device=t["a"].device), None)

        return [self.as_slabs(p, contents, self.want(p, t, self.all_slabs(p, contents, own)), before)]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        rows = "rows" if p["row_scale"] or p["form"] == "out" else ""
        found = self.scaled_arguments(p)
        found["a"] = Argument((FP8 if self.fp8 else torch.int8,), ("experts", rows, "k"), ("b", "a_scale", "row_scale", "out"))
        found["counts"] = Argument((torch.int32,), ("experts",), ())
        if p["row_scale"]:
            found["row_scale"] = Argument((torch.float32,), ("experts", "rows"))
        if p["form"] == "out":
            found["out"] = Argument(self.out_types(p), ("experts", "rows", "columns"), ("out_dtype", "out_scale", "bias"))
        return found


# ---- layers --------------------------------------------------------------------------------------------------------------------------


def quantized_float32(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Rows as numbers that their codes are, by torch, for its own error."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group)) if x.shape[1] else x.unsqueeze(1)
    largest = groups.abs().amax(2, keepdim=True) if groups.numel() else groups.new_zeros(*groups.shape[:2], 1)
    scale = (largest / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).smallest_normal)
    z = (groups / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    back = (z.round() if dtype == torch.int8 else z.to(dtype).float()) * scale
    return back.flatten(1)[:, : x.shape[1]]


def code_error(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """What the codes of rows may be off by: half of the distance between two of them, of scales that cover ``group`` columns."""
    if x.numel() == 0:
        return x
    size = x.abs()
    groups = torch.nn.functional.pad(size, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scale = groups.amax(2, keepdim=True).expand(groups.shape).flatten(1)[:, : x.shape[1]] / LARGEST[dtype]
    return 0.5001 * scale if dtype == torch.int8 else torch.maximum(2.0**-4 * 1.0001 * size, 2.0**-10 * scale)


class LayerScaled(Layer):
    """out[t] = sum over j of weights[t, j] * FFN of expert ids[t, j], of codes.

    Error model: x, where it is of 16 bits, and h = activation(gate) * up are off by half of the distance between two codes, independently
    of each other; the rest is that of the products and of :class:`Layer`.
    """

    share = 1.5

    def __init__(self, fp8: bool):
        self.fp8 = fp8
        self.name = f"moe_ffn_{'fp8' if fp8 else 'int8'}"

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        layout = draw.choice(GATE_LAYOUTS)
        p = self.draw_layer(draw, limits, 8 if layout == "blocks" else 1, 512) | {"gate": layout} | draw_kinds(draw, self.fp8)
        p |= {"b2_kind": draw_kinds(draw, self.fp8)["b_kind"], "x_codes": draw.chance(0.4), "fast": self.fp8 and draw.chance(0.2)}
        p |= {"b13_type": draw.pick("own", "float32"), "b2_type": draw.pick("own", "float32")}
        return p | {"say_type": draw.chance(0.3) or (p["x_codes"] and p["dtype"] == "float16")}

    def type_of_d(self, p: Parameters) -> torch.dtype:
        return DTYPES[p["dtype"]] if p["say_type"] or not p["x_codes"] else torch.bfloat16

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        tensors, sizes = self.fill_tokens(p, data)
        for name in ("b13", "b2"):
            if tensors[name] is not None:
                tensors[name] = tensors[name].to(torch.float32 if p[f"{name}_type"] == "float32" else self.type_of_d(p))
        tokens, hidden, inter, experts = p["tokens"], p["hidden"], p["inter"], p["experts"]
        size = 1.0 / (16.0 if self.fp8 else 74.0)
        empty = torch.tensor(sizes, device=data.device) == 0
        for name, kind, n, k in (("w13", "b_kind", 2 * inter, hidden), ("w2", "b2_kind", hidden, inter)):
            w = operand(data, self.fp8, experts, n, k)
            scale = expert_scale(data, p[kind], experts, n, k, name == "w13", 1.5 * size / math.sqrt(max(k, 1)))
            spoil(w, empty)
            spoil_experts(scale, p[kind], empty)
            tensors |= {name: w, f"{name}_scale": scale}
        tensors["x_scale"] = None
        if p["x_codes"]:
            nobody = tensors["x"].isnan().any(1) if hidden else torch.zeros(tokens, dtype=torch.bool, device=data.device)
            tensors["x"], tensors["x_scale"] = operand(data, self.fp8, tokens, hidden), row_scale(p, data, (tokens,), hidden, size)
            spoil(tensors["x"], nobody)
            if p["a_kind"] != "one":
                spoil(tensors["x_scale"], nobody)
        return Contents(tensors)

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"activation": p["activation"], "gate_layout": p["gate"]} | {name: t[name] for name in ("x_scale", "b13", "b2")}
        if self.fp8:
            options["fast_accum"] = p["fast"]
        if p["say_type"]:
            options["out_dtype"] = DTYPES[p["dtype"]]
        weights = (t["w13"], t["w2"], t["w13_scale"], t["w2_scale"])
        return {"out": getattr(minfer, self.name)(t["x"], *weights, t["weights"], t["ids"], **(options | p.get("extra", {})))}

    def tokens_of(self, p: Parameters, t: dict[str, Tensor | None], token: Tensor) -> tuple[Bounded, Tensor]:
        """x of some tokens as it is in float64, and as torch's codes in float32."""
        own, hidden = FP8 if self.fp8 else torch.int8, p["hidden"]
        if p["x_codes"]:
            x = t["x"][token].double() * of_rows(t["x_scale"], p["a_kind"], p["group"], hidden, token)
            return Bounded(x, torch.zeros_like(x)), x.float()
        x, of_blocks = t["x"][token].double(), p["b_kind"] in ("blocks", "exponents") and t["w13_scale"].dim() == 3
        group = BLOCK if of_blocks and hidden > BLOCK else max(hidden, 1)
        return Bounded(x, code_error(x, group, own)), quantized_float32(x.float(), group, own)

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, dtype, own = contents.tensors, self.type_of_d(p), FP8 if self.fp8 else torch.int8
        hidden, inter = p["hidden"], p["inter"]
        u, tiny, device = unit(dtype), smallest(dtype), t["x"].device
        shape = (p["tokens"], hidden)
        truth, bound, magnitude = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(3))
        peer = torch.zeros(shape, device=device)
        fast = p["fast"] and not any(kind in ("blocks", "exponents") for kind in (p["b_kind"], p["a_kind"] if p["x_codes"] else ""))
        for expert in range(p["experts"]):
            token, slot = (t["ids"] == expert).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            x, x_peer = self.tokens_of(p, t, token)
            w13 = (t["w13"][expert].double() * of_expert(t["w13_scale"], p["b_kind"], expert, 2 * inter, hidden, p["gate"])).t()
            w2 = (t["w2"][expert].double() * of_expert(t["w2_scale"], p["b2_kind"], expert, hidden, inter, None)).t()
            y, sums = self.sums(x, w13, FAST if fast else PROMOTED)
            bias = None if t["b13"] is None else t["b13"][expert]
            h = gated(affine(y, sums, 1.0, None if bias is None else bias.double()), p["activation"], p["gate"])
            h_peer = x_peer @ w13.float()
            h_peer = gated_float32(h_peer if bias is None else h_peer + bias.float(), p["activation"], p["gate"])
            h = Bounded(h.value, h.error + code_error(h.value.abs() + h.error, UNIT_GROUP, own))
            y, sums = self.sums(h, w2, PROMOTED)
            y_peer = quantized_float32(h_peer, UNIT_GROUP, own) @ w2.float()
            if t["b2"] is not None:
                y, y_peer = affine(y, sums, 1.0, t["b2"][expert].double()), y_peer + t["b2"][expert].float()
            y = y.times(t["weights"][token, slot, None].double()).rounded(dtype)
            y_peer = (y_peer * t["weights"][token, slot, None]).to(dtype).float()
            # A token has an expert once or, with ids of one's own, more often: index_add_ adds all of them.
            for whole, part in ((truth, y.value), (bound, y.error), (magnitude, y.value.abs())):
                whole.index_add_(0, token, part)
            peer.index_add_(0, token, y_peer)
        bound = bound + 2.0**-22 * magnitude
        bound = bound + u * (truth.abs() + bound) + tiny
        return [Expected("out", dtype, truth, bound, peer.to(dtype), usual=float(torch.linalg.vector_norm(bound)) / 4)]

    def sums(self, x: Bounded, w: Tensor, tensor_core: float) -> tuple[Bounded, Tensor]:
        """x.w, and the sum of magnitudes. The errors of x's elements are independent of each other."""
        magnitude = x.value.abs() @ w.abs()
        error = of_roundings(1.0, x.error @ w.abs(), x.error.square() @ w.square())
        return Bounded(x.value @ w, error + (accumulation(len(w)) + (tensor_core if self.fp8 else 0.0)) * magnitude), magnitude

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        own = FP8 if self.fp8 else torch.int8
        found = self.layer_arguments(p)
        found["x"] = Argument((own,) if p["x_codes"] else HALVES, ("tokens", "hidden"), ("w13", "ids", "weights", "x_scale", "w2"))
        found["w13"] = Argument((own,), ("experts", "n" if p["b13"] else "", "hidden"), ("w2", "b13", "w13_scale"))
        found["w2"] = Argument((own,), ("experts", "hidden", ""), ("w13", "w2_scale"))
        for name in ("x_scale", "w13_scale", "w2_scale"):
            found[name] = Argument((torch.float32, torch.uint8) if self.fp8 else (torch.float32,), (), ranks=tuple(range(6)))
        for name in ("b13", "b2"):
            if p[name]:
                found[name].dtypes = (self.type_of_d(p), torch.float32)
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        found = [("activation", x, "activation") for x in ("swish", "")] + [("gate_layout", x, "gate_layout") for x in ("rows", "")]
        return [*found, ("out_dtype", torch.float32, "out_dtype")]


GROUPED_SCALED_FAMILIES: tuple[Family, ...] = tuple(
    kind(fp8) for kind in (GroupedScaled, GroupedScaledMasked, LayerScaled) for fp8 in (True, False)
)
