"""minfer.moe_ffn and moe_ffn_w4a16: sort, two grouped products and the sum, as one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, accumulation, name_of, of_roundings, smallest, unit
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters
from ..truth import weights
from ..truth.epilogue import ACTIVATIONS
from .attention import DTYPES, HALVES
from .grouped import GATE_LAYOUTS, ExpertWeight, draw_experts_format, expert_product, expert_weight, fill_experts
from .moe_routing import ID_KINDS, draw_ids
from .quantized_gemm import passed_scales


class Layer(Family):
    """out[t] = sum over j of weights[t, j] * FFN of expert ids[t, j].

    Error model: h = activation(gate) * up of the first product is rounded to x's dtype, and so is what an expert returns, weighed; the sum
    over a token's experts is float32, its result rounded once. Errors of h's elements are independent of each other.
    """

    def draw_layer(self, draw: Draw, limits: Limits, unit: int, most_experts: int) -> Parameters:
        while True:
            experts = min(most_experts, draw.weighted({1: 1, 2: 1, 8: 4, 16: 1, 60: 1, 128: 0 if limits.small else 2}))
            tokens = draw.extent(60 if limits.small else 1000, zero=0.04)
            top_k = draw.weighted({1: 1, 2: 3, 4: 1, 8: 2, 0: 0.1})
            hidden = unit * draw.extent((150 if limits.small else 2100) // unit, zero=0.02)
            inter = unit * draw.extent((100 if limits.small else 1600) // unit, zero=0.02)
            if 2 * experts * hidden * inter <= limits.elements and 3 * tokens * top_k * hidden * inter <= limits.work:
                break
        p: Parameters = {"dtype": name_of(draw.choice(HALVES)), "tokens": tokens, "hidden": hidden, "inter": inter, "experts": experts}
        p |= {"top_k": top_k, "ids": draw.weighted(ID_KINDS), "b13": draw.chance(0.4), "b2": draw.chance(0.4)}
        p["activation"] = draw.weighted(dict.fromkeys(ACTIVATIONS, 1.0) | {"silu": 4.0, "swigluoai": 2.0})
        return p

    def fill_tokens(self, p: Parameters, data: Data) -> tuple[dict[str, Tensor | None], list[int]]:
        """x, weights, ids and biases, and how many rows each expert has. What nobody asks for is NaN."""
        dtype, experts = DTYPES[p["dtype"]], p["experts"]
        ids = draw_ids(p["ids"], p["tokens"], p["top_k"], experts, data)
        inside = (ids >= 0) & (ids < experts)
        sizes = [int((ids == e).sum()) for e in range(experts)]
        routing = data.uniform(*ids.shape)
        routing[~inside] = math.nan
        x = data.normal(p["tokens"], p["hidden"], dtype=dtype)
        x[~inside.any(1)] = math.nan  # tokens of nobody
        empty = torch.tensor(sizes, device=data.device) == 0
        tensors: dict[str, Tensor | None] = {"x": x, "weights": routing, "ids": ids}
        for name, columns in (("b13", 2 * p["inter"]), ("b2", p["hidden"])):
            tensors[name] = data.normal(experts, columns, dtype=dtype) if p[name] else None
            if p[name]:
                tensors[name][empty] = math.nan
        return tensors, sizes

    def expect_layer(self, p: Parameters, t: dict[str, Tensor | None], w13: Any, w2: Any, gate: str) -> list[Expected]:
        dtype, device = DTYPES[p["dtype"]], t["x"].device
        u, tiny = unit(dtype), smallest(dtype)
        shape = (p["tokens"], p["hidden"])
        truth, bound, variance, magnitude = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(4))
        peer = torch.zeros(shape, device=device)
        for expert in range(p["experts"]):
            token, slot = (t["ids"] == expert).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            bias = None if t["b13"] is None else t["b13"][expert]
            first = expert_product(t["x"][token], w13(expert), bias, dtype, p["activation"], gate)
            h, second = first.d.rounded(dtype), w2(expert)
            h_peer = first.peer.to(dtype)
            w = abs(second.alpha) * second.value.abs()
            # Beside h's own error: those of the second product, of h as it is in float64.
            y = h.value @ second.value * second.alpha
            sums = h.value.abs() @ w
            error = of_roundings(1.0, h.error @ w, h.error.square() @ w.square()) + accumulation(p["inter"]) * sums
            average = (0.58 * u * h.value).square() @ w.square() + (first.average.square() @ w.square())
            if second.quantized is not None:
                off, usual = weights.error_of_sum(h.value, second.quantized, dtype)
                error, average = error + abs(second.alpha) * off, average + (abs(second.alpha) * usual).square()
            y_peer = second.alpha * (h_peer.float() @ second.peer)
            if t["b2"] is not None:
                y, sums = y + t["b2"][expert].double(), sums + t["b2"][expert].double().abs()
                y_peer = y_peer + t["b2"][expert].float()
            scale = t["weights"][token, slot, None]
            y, error, y_peer = y * scale.double(), (error + 2.0**-22 * sums) * scale.double().abs(), (y_peer * scale).to(dtype).float()
            error = error + u * (y.abs() + error) + tiny
            average = average * scale.double().square() + (0.58 * u * y).square()
            # A token has an expert once or, with ids of one's own, more often: index_add_ adds all of them.
            for whole, part in ((truth, y), (bound, error), (variance, average), (magnitude, y.abs())):
                whole.index_add_(0, token, part)
            peer.index_add_(0, token, y_peer)
        bound = bound + 2.0**-22 * magnitude
        bound = bound + u * (truth.abs() + bound) + tiny
        return [Expected("out", dtype, truth, bound, peer.to(dtype), usual=float(variance.sum().sqrt()))]

    def layer_arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        found = {
            "x": Argument(HALVES, ("tokens", "hidden"), ("w13", "ids", "weights", "w13_scales")),
            "weights": Argument((torch.float32,), ("tokens", "top_k")),
            "ids": Argument((torch.int32,), ("tokens", "top_k"), ("weights",)),
        }
        if p["b13"]:
            found["b13"] = Argument((dtype,), ("experts", "n"))
        if p["b2"]:
            found["b2"] = Argument((dtype,), ("experts", "hidden"))
        return found


class MoeFfn(Layer):
    name = "moe_ffn"
    share = 2.0

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        layout = draw.choice(GATE_LAYOUTS)
        p = self.draw_layer(draw, limits, 8 if layout == "blocks" else 1, 512) | {"gate": layout}
        return p

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        tensors, sizes = self.fill_tokens(p, data)
        dtype, hidden, inter = DTYPES[p["dtype"]], p["hidden"], p["inter"]
        w13 = data.normal(p["experts"], 2 * inter, hidden, dtype=dtype, scale=1.5 / math.sqrt(max(hidden, 1)))
        w2 = data.normal(p["experts"], hidden, inter, dtype=dtype, scale=1.5 / math.sqrt(max(inter, 1)))
        empty = torch.tensor(sizes, device=data.device) == 0
        w13[empty] = math.nan
        w2[empty] = math.nan
        return Contents(tensors | {"w13": w13, "w2": w2})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"activation": p["activation"], "b13": t["b13"], "b2": t["b2"], "gate_layout": p["gate"]} | p.get("extra", {})
        return {"out": minfer.moe_ffn(t["x"], t["w13"], t["w2"], t["weights"], t["ids"], **options)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t = contents.tensors
        own = lambda name: lambda e: ExpertWeight(t[name][e].double().t(), t[name][e].float().t())  # noqa: E731
        return self.expect_layer(p, t, own("w13"), own("w2"), p["gate"])

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        found = self.layer_arguments(p)
        found["w13"] = Argument((dtype,), ("experts", "n" if p["b13"] else "", "hidden"), ("w2", "b13"))
        found["w2"] = Argument((dtype,), ("experts", "hidden", ""), ("w13",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        return [("activation", x, "activation") for x in ("swish", "")] + [("gate_layout", x, "gate_layout") for x in ("rows", "")]


class MoeFfnW4(Layer):
    name = "moe_ffn_w4a16"
    share = 1.5
    views = dict.fromkeys(("w13", "w13_scales", "w13_zeros", "w2", "w2_scales", "w2_zeros"), arena.DENSE)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p = self.draw_layer(draw, limits, 8, 16 if limits.small else 128)
        p |= draw_experts_format(draw, limits, p["dtype"])
        return p | {"typed2": draw.chance(0.5)}  # w2's byte scales need not be passed as w13's are

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        tensors, sizes = self.fill_tokens(p, data)
        facts = {}
        for name, n, k in (("w13", 2 * p["inter"], p["hidden"]), ("w2", p["hidden"], p["inter"])):
            own, facts[name] = fill_experts(p, data, p["experts"], n, k, sizes)
            tensors |= {name: own["qweight"], f"{name}_scales": own["scales"], f"{name}_zeros": own["zeros"]}
            tensors[f"alpha{name[1:]}"] = own["alpha"]
        return Contents(tensors, facts)

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"activation": p["activation"], "group_size": p["group_size"], "w4_format": p["format"]}
        options |= {name: t[name] for name in ("alpha13", "alpha2", "b13", "b2")} | p.get("extra", {})
        first = (t["w13"], passed_scales(p, t["w13_scales"]), t["w13_zeros"])
        second = (t["w2"], passed_scales(p, t["w2_scales"], "typed2"), t["w2_zeros"])
        operands = (t["x"], *first, *second, t["weights"], t["ids"])
        return {"out": minfer.moe_ffn_w4a16(*operands, **options)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, facts = contents.tensors, contents.facts

        def own(name: str) -> Callable[[int], ExpertWeight]:
            return lambda e: expert_weight(p, t, facts[name], e, (f"{name}_scales", f"{name}_zeros", f"alpha{name[1:]}"))

        return self.expect_layer(p, t, own("w13"), own("w2"), "blocks")

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        stored = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn) if p["format"] in weights.BYTE_SCALES else (dtype,)
        found = self.layer_arguments(p)
        found["x"].beside += ("k ", "w2_scales", "b2", "w2")
        for name in ("w13", "w2"):
            other = "w2_scales" if name == "w13" else "w13_scales"
            beside = (name, f"{name}_zeros", other, "w2", "b13", "b2", "alpha13", "alpha2")
            found[name] = Argument((torch.int32,), ("experts", "", "", ""), (f"{name}_scales",))
            found[f"{name}_scales"] = Argument(stored, ("experts", "", ""), beside)
            if p["zeros"] != "none":
                found[f"{name}_zeros"] = Argument((dtype,), ("experts", "", ""), (f"{name}_scales",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, Any, str]]:
        return [("activation", "swish", "activation"), ("w4_format", "int8", "w4_format"), ("group_size", 48, "group_size")]


LAYER_FAMILIES = (MoeFfn(), MoeFfnW4())
