"""The operators between the GEMMs: rows that are normalised, activated, quantised; rotary embedding, embedding, dequantisation."""

from __future__ import annotations

import math
import re
from abc import abstractmethod

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Hostile, Parameters
from ..truth import rows as truth
from ..truth.epilogue import ACTIVATIONS, Bounded
from .attention import DTYPES, HALVES
from .gemm import WRONG_ACTIVATIONS, WRONG_KERNELS, wrong_scalars

FLOATS = ("float16", "bfloat16", "float32")
QUANTS = truth.QUANTS
RANKS = tuple(range(1, 9))
ROPE = arena.Rule(last=True, expand=False)
WRONG_EPS: list[tuple[str, object, str]] = [("eps", value, "eps") for value in (-1e-6, math.nan, math.inf, 1e300)]
WRONG_QUANTS: list[tuple[str, object, str]] = [("quant", value, "quant") for value in ("", "fp8", "int8_tensor", "FP8_TOKEN")]
INDICES = (torch.int64, torch.int32)


def draw_lead(draw: Draw, most: int) -> tuple[int, ...]:
    """All modes but the last, of up to ``most`` rows."""
    rows = draw.extent(most, zero=0.04, tiles=(4, 8, 32, 64))
    modes = draw.weighted({0: 0.5, 1: 5, 2: 3, 3: 1})
    if modes == 0:
        return ()
    if modes == 1:
        return (rows,)
    inner = draw.pick(1, 2, 3, 8)
    return (-(-rows // inner), inner) if modes == 2 else (draw.pick(1, 2), -(-rows // inner // 2), inner)


class Rows(Family):
    """An operator on rows [*lead, width]; results are "out", or "q" and "scales"."""

    share = 1.0
    kernels = "fused"
    operation = ""
    dtypes: tuple[str, ...] = FLOATS[:2]
    factors: tuple[str, ...] = ()  # tensors [width], any of which may be left out
    quantized = False
    residual = False
    form_out = True
    views = {
        "x": arena.ANY,
        "residual": arena.VIEW,
        "weight": arena.ANY,
        "bias": arena.ANY,
        "scale": arena.ANY,
    }

    @property
    def in_place(self) -> tuple[str, ...]:
        return ("residual",) if self.residual else ()

    def fits(self, kernel: str) -> bool:
        found = re.fullmatch(rf"fused_sm\d+_b?f\d+_{self.operation}(_quantized)?(_rows)?_x\d+", kernel)
        return found is not None and bool(found[1]) == self.quantized

    def launches(self, p: Parameters) -> tuple[str, ...]:
        some = ("@threads=64", "@threads=32,rows=4", "@threads=128,cluster=2", "@threads=64,parts=3")
        return some if p["width"] <= 2048 else ()

    # ---- what the operators have in common -----------------------------------------------------------------------------------------------

    def columns(self, p: Parameters) -> int:
        """Of x."""
        return p["width"]

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        while True:
            p: Parameters = {"dtype": draw.choice(self.dtypes), "lead": draw_lead(draw, 60 if limits.small else 3000)}
            p["width"] = draw.extent(1500 if limits.small else 20000, zero=0.02, tiles=(8, 64, 128, 512))
            p |= {name: draw.chance(0.6) for name in self.factors} | self.options(draw)
            p["size"] = draw.pick(1.0, 1.0, 0.02, 12.0)
            if self.quantized:
                p["quant"] = draw.choice(QUANTS)
                p["norm"] = self.operation == "rms_norm" and draw.chance(0.4)
            elif self.form_out:
                p["form"] = draw.weighted({"functional": 3, "out": 2})
            if math.prod(p["lead"]) * self.columns(p) <= limits.elements:
                return p

    def options(self, draw: Draw) -> Parameters:
        return {}

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return ((*p["lead"], p["width"]), DTYPES[p["dtype"]]) if p.get("form") == "out" else None

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        dtype, shape = DTYPES[p["dtype"]], (*p["lead"], self.columns(p))
        x = data.normal(*shape, scale=p["size"])
        if p["lead"] and p["lead"][0] > 1:
            x[1] = 0.0 if draw.chance(0.3) else x[1] * 2.0**-8
        tensors: dict[str, Tensor | None] = {"x": x.to(dtype)}
        if self.residual:
            tensors["residual"] = data.normal(*shape, dtype=dtype)
        for name in self.factors:
            tensors[name] = data.normal(p["width"], dtype=dtype) if p[name] else None
        if self.quantized:
            tensors["scale"] = data.uniform(1, low=0.001, high=0.1) if p["quant"] == "fp8_tensor" else None
        return Contents(tensors)

    @abstractmethod
    def exact(self, p: Parameters, t: dict[str, Tensor | None]) -> Bounded:
        """The rows' results, not rounded."""

    @abstractmethod
    def arguments_of_call(self, p: Parameters, t: dict[str, Tensor | None]) -> tuple[tuple, dict[str, object]]:
        """Positional ones and keywords, without those that all operators have."""

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        args, options = self.arguments_of_call(p, t)
        norm = None
        if self.quantized:
            options |= {"quant": p["quant"], "scale": t["scale"]}
            if p["norm"]:
                norm = torch.empty_like(t["x"], memory_format=torch.contiguous_format)
                options["norm"] = norm.fill_(math.nan) if norm.dtype.is_floating_point else norm
        elif self.out(p) is not None:
            options["out"] = t["out"]
        result = self.function()(*args, **(options | p.get("extra", {})))
        found = {"q": result[0], "scales": result[1]} if self.quantized else {"out": result}
        found |= {"norm": norm} if norm is not None else {}
        return found | ({"residual": t["residual"]} if self.residual else {})

    def function(self):
        return getattr(minfer, self.name)

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, dtype, found = contents.tensors, DTYPES[p["dtype"]], []
        if self.residual:
            total = truth.rounded(t["x"].double() + before["residual"].double(), dtype)
            found.append(Expected("residual", dtype, total, contiguous=False))
            t = t | {"x": total}
        y = self.exact(p, t)
        if not self.quantized:
            return [*found, truth.expected("out", y, dtype)]
        if p["norm"]:
            found.append(truth.expected("norm", y, dtype))
        return found + truth.expected_codes(y, p["quant"], t["scale"], have)

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        lead = tuple(f"mode {i}" for i in range(len(p["lead"])))
        others = tuple(name for name in (*self.factors, "residual", "out", "norm", "scale") if name != "norm" or p.get("norm"))
        found = {"x": Argument(tuple(DTYPES[name] for name in self.dtypes), (*lead, "width"), others, ranks=RANKS)}
        for name in self.factors:
            if p[name]:
                found[name] = Argument((dtype,), ("width",))
        if self.residual:
            found["residual"] = Argument((dtype,), (*lead, "width"))
        if self.out(p) is not None:
            found["out"] = Argument((dtype,), (*lead, "width"))
        if self.quantized and p["quant"] == "fp8_tensor":
            found["scale"] = Argument((torch.float32,), ("one",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*WRONG_KERNELS, ("kernel", "fused_sm80_f16_softmax_x9", "kernel")]
        if self.quantized:
            found += WRONG_QUANTS
            found.append(("scale", None, "scale") if p["quant"] == "fp8_tensor" else ("quant", "fp8_tensor", "scale"))
        return found


class RmsNorm(Rows):
    operation = "rms_norm"
    factors = ("weight",)

    def __init__(self, quantized: bool, residual: bool):
        self.quantized, self.residual, self.form_out = quantized, residual, not residual
        self.name = ("add_" if residual else "") + "rms_norm" + ("_quantized" if quantized else "")

    def options(self, draw: Draw) -> Parameters:
        return {"eps": draw.pick(1e-6, 1e-5, 0.1), "weight_offset": draw.pick(0.0, 0.0, 1.0, -0.3)}

    def arguments_of_call(self, p, t):
        more = (t["residual"],) if self.residual else ()
        return (t["x"], *more), {name: p[name] for name in ("eps", "weight_offset")} | {"weight": t["weight"]}

    def exact(self, p: Parameters, t: dict[str, Tensor | None]) -> Bounded:
        return truth.rms_norm(t["x"], t["weight"], p["eps"], p["weight_offset"])

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [*super().wrong_options(p), *WRONG_EPS, *wrong_scalars("weight_offset")]


class LayerNorm(Rows):
    name = operation = "layer_norm"
    factors = ("weight", "bias")

    def options(self, draw: Draw) -> Parameters:
        return {"eps": draw.pick(1e-6, 1e-5, 0.1)}

    def arguments_of_call(self, p, t):
        return (t["x"], t["weight"], t["bias"], p["eps"]) if "eps" not in p.get("extra", {}) else (t["x"],), {}

    def exact(self, p: Parameters, t: dict[str, Tensor | None]) -> Bounded:
        return truth.layer_norm(t["x"], t["weight"], t["bias"], p["eps"])

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [*super().wrong_options(p), *WRONG_EPS]


class Softmax(Rows):
    operation = "softmax"
    dtypes = FLOATS

    def __init__(self, logarithm: bool):
        self.logarithm = logarithm
        self.name = "log_softmax" if logarithm else "softmax"

    def arguments_of_call(self, p, t):
        return (t["x"],), {}

    def exact(self, p: Parameters, t: dict[str, Tensor | None]) -> Bounded:
        return truth.softmax(t["x"], self.logarithm)


class Activation(Rows):
    name = operation = "activation"
    dtypes = FLOATS
    factors = ("bias",)

    def options(self, draw: Draw) -> Parameters:
        return {"activation": draw.choice(ACTIVATIONS)}

    def arguments_of_call(self, p, t):
        return (t["x"],), {"activation": p["activation"], "bias": t["bias"]}

    def exact(self, p: Parameters, t: dict[str, Tensor | None]) -> Bounded:
        return truth.activation(t["x"], p["activation"], t["bias"])

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [*super().wrong_options(p), *WRONG_ACTIVATIONS]


class Gated(Rows):
    operation = "gated_activation"

    def __init__(self, quantized: bool):
        self.quantized = quantized
        self.name = "gated_activation" + ("_quantized" if quantized else "")

    def columns(self, p: Parameters) -> int:
        return 2 * p["width"]

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p = super().draw(draw, limits)
        if p["gate_layout"] == "blocks":
            p["width"] = p["width"] // 8 * 8
        return p

    def options(self, draw: Draw) -> Parameters:
        return {
            "activation": draw.choice((*ACTIVATIONS, "swigluoai")),
            "gate_layout": draw.pick("halves", "halves", "alternating", "blocks"),
        }

    def arguments_of_call(self, p, t):
        return (t["x"],), {name: p[name] for name in ("activation", "gate_layout")}

    def exact(self, p: Parameters, t: dict[str, Tensor | None]) -> Bounded:
        return truth.gated_activation(t["x"], p["activation"], p["gate_layout"])

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*super().wrong_options(p), *(x for x in WRONG_ACTIVATIONS if x[1] != "swigluoai")]
        return found + [("gate_layout", value, "gate_layout") for value in ("", "pairs", "Halves")]


class Quantize(Rows):
    name = operation = "quantize"
    quantized = True

    def function(self):
        return minfer.ops.quantize

    def arguments_of_call(self, p, t):
        return (t["x"],), {}

    def exact(self, p: Parameters, t: dict[str, Tensor | None]) -> Bounded:
        x = t["x"].double()
        return Bounded(x, torch.zeros_like(x))


class HadamardRows(Family):
    name = "hadamard"
    views = {"x": arena.ANY}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        while True:
            p: Parameters = {"dtype": draw.choice(FLOATS), "lead": draw_lead(draw, 60 if limits.small else 3000)}
            most = 10 if limits.small else 15
            p["block"] = draw.pick(1, 1, 12, 20, 28) << draw.randint(0, most)
            p["width"] = p["block"] * draw.pick(0, 1, 1, 2, 3, 7)
            p |= {"transpose": draw.chance(0.3), "form": draw.weighted({"functional": 3, "out": 2}), "size": draw.pick(1.0, 0.02, 12.0)}
            if p["block"] <= 32768 and math.prod(p["lead"]) * p["width"] <= limits.elements:
                return p

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return ((*p["lead"], p["width"]), DTYPES[p["dtype"]]) if p["form"] == "out" else None

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        return Contents({"x": data.normal(*p["lead"], p["width"], scale=p["size"]).to(DTYPES[p["dtype"]])})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"block": p["block"], "transpose": p["transpose"]} | p.get("extra", {})
        if p["form"] == "out":
            options["out"] = t["out"]
        return {"out": minfer.hadamard(t["x"], **options)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        return [truth.expected("out", truth.hadamard(contents.tensors["x"], p["block"], p["transpose"]), DTYPES[p["dtype"]])]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        lead = tuple(f"mode {i}" for i in range(len(p["lead"])))
        found = {"x": Argument(tuple(DTYPES[name] for name in FLOATS), (*lead, "width"), ("out", "block"), ranks=RANKS)}
        return found | ({"out": Argument((DTYPES[p["dtype"]],), (*lead, "width"))} if self.out(p) is not None else {})

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [("block", value, "block") for value in (0, -1, 3, 6, 36, 65536, 40960, p["block"] * 9)]


class DequantizeRows(Family):
    name = "dequantize"
    views = {"q": arena.ANY, "scales": arena.ANY}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"quant": draw.choice(QUANTS), "lead": draw_lead(draw, 60 if limits.small else 3000), "dtype": draw.choice(FLOATS)}
        return p | {"width": draw.extent(1500 if limits.small else 5000, zero=0.02, tiles=(8, 128))}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        shape, rows = (*p["lead"], p["width"]), math.prod(p["lead"])
        codes = data.integers(0, 256, *shape, dtype=torch.uint8)
        if p["quant"] != "int8_token":  # no NaN
            codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
        q = codes.view(torch.int8 if p["quant"] == "int8_token" else torch.float8_e4m3fn)
        of = {"fp8_tensor": (1,), "fp8_block128": (rows, -(-p["width"] // 128))}.get(p["quant"], (*p["lead"], 1))
        return Contents({"q": q, "scales": data.uniform(*of, low=1e-4, high=0.1)})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"quant": p["quant"], "dtype": DTYPES[p["dtype"]]} | p.get("extra", {})
        return {"out": minfer.dequantize(t["q"], t["scales"], **options)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        q, scales = contents.tensors["q"].float().double(), contents.tensors["scales"].double()
        if p["quant"] == "fp8_block128":
            scales = scales.repeat_interleave(128, 1)[:, : p["width"]].reshape(q.shape)
        y = q * scales
        return [truth.expected("out", Bounded(y, 2.0**-24 * y.abs()), DTYPES[p["dtype"]])]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        is_int8 = p["quant"] == "int8_token"
        lead = tuple(f"mode {i}" for i in range(len(p["lead"])))
        found = {"q": Argument((torch.int8 if is_int8 else torch.float8_e4m3fn,), (*lead, ""), ("scales",), ranks=RANKS)}
        shape = {"fp8_tensor": ("",), "fp8_block128": ("", "")}.get(p["quant"], (*lead, ""))
        return found | {"scales": Argument((torch.float32,), shape, ("q",))}

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [*WRONG_QUANTS, *(("dtype", dtype, "dtype") for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn))]


class Rope(Family):
    name = "rope"
    views = {"q": ROPE, "k": ROPE, "cos_sin": arena.ANY, "positions": arena.VIEW}

    def written(self, p: Parameters) -> tuple[str, ...]:
        return ("q", "k") if p["heads_kv"] is not None else ("q",)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"dtype": name_of(draw.choice(HALVES)), "tokens": draw.extent(60 if limits.small else 2000, zero=0.04)}
        p |= {"heads": draw.pick(1, 2, 3, 8, 32), "heads_kv": draw.pick(None, 1, 2, 8), "interleaved": draw.chance(0.4)}
        p["head_dim"] = draw.pick(64, 128, 2, 18, 96, 256, draw.randint(2, 200))
        p["rotary_dim"] = p["head_dim"] // 2 * 2 if draw.chance(0.6) else 2 * draw.randint(1, p["head_dim"] // 2)
        p |= {"length": draw.pick(1, 17, 300), "positions": draw.pick("int64", "int32"), "say": draw.chance(0.3)}
        while p["tokens"] * p["heads"] * p["head_dim"] > limits.elements:
            p["tokens"] //= 2
        return p

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        dtype, tokens = DTYPES[p["dtype"]], p["tokens"]
        q = data.normal(tokens, p["heads"], p["head_dim"], dtype=dtype)
        k = None if p["heads_kv"] is None else data.normal(tokens, p["heads_kv"], p["head_dim"], dtype=dtype)
        angles = data.uniform(p["length"], p["rotary_dim"] // 2, high=6.28)
        positions = data.integers(0, p["length"], tokens, dtype=getattr(torch, p["positions"]))
        return Contents({"q": q, "k": k, "cos_sin": torch.cat([angles.cos(), angles.sin()], -1), "positions": positions})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"interleaved": p["interleaved"]} | ({"rotary_dim": p["rotary_dim"]} if p["say"] else {}) | p.get("extra", {})
        minfer.rope(t["q"], t["k"], t["cos_sin"], t["positions"], **options)
        return {name: t[name] for name in self.written(p)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, dtype, found = contents.tensors, DTYPES[p["dtype"]], []
        places = t["positions"].long()
        known = (places >= 0) & (places < p["length"])
        for name in self.written(p):
            y = truth.rope(before[name], t["cos_sin"], torch.where(known, places, 0), p["interleaved"])
            y.value[..., : p["rotary_dim"]] *= known[:, None, None]
            want = truth.expected(name, y, dtype)
            want.contiguous = False
            want.bound[..., p["rotary_dim"] :] = 0.0
            found.append(want)
        return found

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        found = {
            "q": Argument(HALVES, ("tokens", "", "head_dim" if p["heads_kv"] is not None else ""), ("k", "positions", "rotary_dim")),
            "cos_sin": Argument((torch.float32,), ("", ""), ("rotary_dim",)),
            "positions": Argument(INDICES, ("tokens",)),
        }
        if p["heads_kv"] is not None:
            found["k"] = Argument((DTYPES[p["dtype"]],), ("tokens", "", "head_dim"))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        values = (0, -2, 3, p["head_dim"] + 2 + p["head_dim"] % 2)
        return [("rotary_dim", value, "rotary_dim") for value in values] + [
            ("rotary_dim", value, "cos_sin") for value in (p["rotary_dim"] - 2, p["rotary_dim"] + 2) if 2 <= value <= p["head_dim"]
        ]

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        positions = contents.tensors["positions"]
        if positions.numel() == 0:
            return None
        at, value = draw.randrange(positions.numel()), outside(draw, p["length"], positions.dtype)
        positions[at] = value
        what = f"positions[{at}] = {value}, the table has {p['length']}"
        return Hostile(what, lambda before, have: self.expect(p, contents, before, have))


def outside(draw: Draw, count: int, dtype: torch.dtype) -> int:
    """An index that names none of ``count`` rows."""
    wide = (2**31, 2**40, 2**63 - 1, -(2**63)) if dtype == torch.int64 else (2**31 - 1, -(2**31))
    return draw.pick(-1, count, count + 1, -count, 10**6 + count, *wide) or -1


class EmbeddingFamily(Family):
    name = "embedding"
    views = {"ids": arena.VIEW, "weight": arena.ANY}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {
            "dtype": draw.choice(FLOATS),
            "ids": draw.pick("int64", "int32"),
            "form": draw.weighted({"functional": 3, "out": 2}),
        }
        p["lead"] = draw_lead(draw, 60 if limits.small else 2000)
        p |= {"vocabulary": draw.pick(1, 2, 50, 300), "width": draw.extent(300 if limits.small else 6000, zero=0.03)}
        return p | {"scale": draw.pick(None, None, 1.0, 22.627416997969522, -0.3)}

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return ((*p["lead"], p["width"]), DTYPES[p["dtype"]]) if p["form"] == "out" else None

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        ids = data.integers(0, p["vocabulary"], *p["lead"], dtype=getattr(torch, p["ids"]))
        return Contents({"ids": ids, "weight": data.normal(p["vocabulary"], p["width"], dtype=DTYPES[p["dtype"]])})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"scale": p["scale"]} | ({"out": t["out"]} if self.out(p) is not None else {}) | p.get("extra", {})
        return {"out": minfer.embedding(t["ids"], t["weight"], **options)}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        ids, weight = contents.tensors["ids"].long(), contents.tensors["weight"]
        known = (ids >= 0) & (ids < p["vocabulary"])
        rows = weight[torch.where(known, ids, 0)].masked_fill(~known.unsqueeze(-1), 0.0)
        if p["scale"] is None:
            return [Expected("out", weight.dtype, rows)]
        y = rows.double() * torch.tensor(p["scale"]).double()
        return [truth.expected("out", Bounded(y, 2.0**-24 * y.abs()), weight.dtype)]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        lead = tuple(f"mode {i}" for i in range(len(p["lead"])))
        found = {
            "ids": Argument(INDICES, lead, ("out",), ranks=(0, *RANKS)),
            "weight": Argument(tuple(DTYPES.values()), ("", "width"), ("out", "ids")),
        }
        if self.out(p) is not None:
            found["out"] = Argument((DTYPES[p["dtype"]],), (*lead, "width"))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return wrong_scalars("scale")

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        ids = contents.tensors["ids"].view(-1)
        if ids.numel() == 0:
            return None
        at, value = draw.randrange(ids.numel()), outside(draw, p["vocabulary"], ids.dtype)
        ids[at] = value
        return Hostile(f"ids[{at}] = {value} of {p['vocabulary']}", lambda before, have: self.expect(p, contents, before, have))


FUSED_FAMILIES = (
    *(RmsNorm(quantized, residual) for quantized in (False, True) for residual in (False, True)),
    LayerNorm(),
    Softmax(False),
    Softmax(True),
    Activation(),
    Gated(False),
    Gated(True),
    Quantize(),
    HadamardRows(),
    DequantizeRows(),
    Rope(),
    EmbeddingFamily(),
)
