"""minfer.gemm and gemm_gated: all layouts and views, batches, the forms of C, out=."""

from __future__ import annotations

import math

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters
from ..truth.epilogue import ACTIVATIONS, activate, activate_float32, affine, codes, gated, gated_float32, product, result
from .attention import DTYPES, HALVES


def draw_scalar(draw: Draw) -> float:
    return draw.pick(1.0, 1.0, 1.0, 0.5, -1.0, 2.0, 0.0, 1e-3, draw.uniform(-3.0, 3.0))


def draw_sizes(draw: Draw, limits: Limits, batch: int, unit_n: int = 1, unit_k: int = 1) -> tuple[int, int, int]:
    """m, n and k of a product; n and k in multiples of units."""
    while True:
        m = draw.weighted({1: 2, draw.extent(16): 2, draw.extent(300 if limits.small else 4100): 4})
        n = unit_n * draw.extent((400 if limits.small else 8200) // unit_n, zero=0.02)
        k = unit_k * draw.extent((1100 if limits.small else 16500) // unit_k, zero=0.03)
        work = max(batch, 1) * m * n * k
        if work <= limits.work and max(batch, 1) * max(m * n, n * k, m * k) <= limits.elements:
            return m, n, k


def draw_addend(draw: Draw, dtype: str) -> str:
    return draw.pick(dtype, dtype, "float32")


def wrong_scalars(*names: str) -> list[tuple[str, object, str]]:
    return [(name, value, name) for name in names for value in (math.nan, math.inf, -math.inf, 1e300)]


def draw_quant(draw: Draw) -> Parameters:
    """Whether D is stored in codes, and of about which scale."""
    return {"quant": draw.chance(0.25), "scale_size": draw.pick(0.003, 0.02, 0.02, 1.0)}


def fill_scale(p: Parameters, data: Data) -> Tensor | None:
    """Of D's codes."""
    return data.uniform(1, low=0.5 * p["scale_size"], high=1.5 * p["scale_size"]) if p["quant"] else None


def quant_options(p: Parameters, t: dict[str, Tensor | None]) -> dict[str, object]:
    return {"quant": "fp8_tensor", "scale": t["scale"]} if p["quant"] else {}


def one_result(x: Tensor | tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """D, or its codes, which come with the scale that was given."""
    return {"out": x[0] if isinstance(x, tuple) else x}


def output_type(p: Parameters, without: str | None = None) -> torch.dtype:
    return torch.float8_e4m3fn if p["quant"] else DTYPES[without or p["dtype"]]


def scale_argument(p: Parameters) -> dict[str, Argument]:
    return {"scale": Argument((torch.float32,), ("one",))} if p["quant"] else {}


def wrong_quants(p: Parameters) -> list[tuple[str, object, str]]:
    found: list[tuple[str, object, str]] = [("quant", value, "quant") for value in ("", "fp8", "fp8_token", "fp8_block128", "int8_token")]
    return [*found, ("scale", None, "scale") if p["quant"] else ("quant", "fp8_tensor", "scale")]


WRONG_ACTIVATIONS: list[tuple[str, object, str]] = [("activation", value, "activation") for value in ("swish", "SiLU", "", "swigluoai")]
WRONG_KERNELS: list[tuple[str, object, str]] = [
    ("kernel", value, "kernel") for value in ("", "no_such_kernel", "gemm_sm90@splits=0", "dequantise")
]


class Gemm(Family):
    name = "gemm"
    share = 4.0
    kernels = "gemm"
    views = dict.fromkeys(("a", "b", "c", "bias"), arena.ANY)

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return arena.VIEW if name == p.get("out_is") else super().rule(p, name)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        batched = draw.weighted({"": 5, "ab": 2, "a": 1, "b": 1})
        batch = draw.weighted({1: 1, 2: 3, 3: 2, 7: 1, 0: 0.2}) if batched else 0
        m, n, k = draw_sizes(draw, limits, batch)
        dtype = name_of(draw.choice(HALVES))
        p: Parameters = {"dtype": dtype, "m": m, "n": n, "k": k, "batched": batched, "batch": batch}
        p |= {"alpha": draw_scalar(draw), "beta": 0.0, "activation": draw.weighted({"none": 5} | dict.fromkeys(ACTIVATIONS[1:], 1))}
        p |= {"c": None, "c_type": draw_addend(draw, dtype), "bias": draw_addend(draw, dtype) if draw.chance(0.4) else None}
        shape = ((batch,) if batched else ()) + (m, n)
        if draw.chance(0.55):
            forms = {shape: 4, (m, n): 2, (n,): 1, (m, 1): 1, (1, n): 1, (): 1, (1,): 0.5, (1, 1): 0.5}
            if batched:
                forms |= {(batch, 1, n): 1, (batch, m, 1): 1, (batch, 1, 1): 1, (1, m, n): 1}
            p["c"] = draw.weighted(forms)
            p["beta"] = draw_scalar(draw)
        form = draw.weighted({"functional": 4, "out_dtype": 2, "out": 3, "c": 1.5 if p["c"] == shape else 0})
        p["form"], p["out_type"] = form, dtype
        if form == "out_dtype":
            p["out_type"] = draw.pick(dtype, "float32")
        elif form == "out":
            p |= {"out_type": draw.pick(dtype, "float32"), "say_type": draw.chance(0.3)}
        elif form == "c":
            p |= {"out_type": p["c_type"], "out_is": "c", "say_type": False}
        p |= draw_quant(draw)
        if form in ("c", "out_dtype"):
            p["quant"] = False
        return p | {"size": draw.pick(1.0, 1.0, 0.05, 8.0), "constant": (m + n + k) % 3 == 0}

    def shape(self, p: Parameters) -> tuple[int, ...]:
        return ((p["batch"],) if p["batched"] else ()) + (p["m"], p["n"])

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return (self.shape(p), output_type(p, p["out_type"])) if p["form"] in ("out", "c") else None

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        m, n, k, dtype = p["m"], p["n"], p["k"], DTYPES[p["dtype"]]
        lead = {side: (p["batch"],) if side in p["batched"] else () for side in "ab"}
        a = data.normal(*lead["a"], m, k, dtype=dtype, scale=p["size"])
        b = data.normal(*lead["b"], k, n, dtype=dtype, scale=1.0 / math.sqrt(max(k, 1)))
        if p["alpha"] == 0.0:
            a.fill_(math.nan)
            b.fill_(math.nan)
        c = None if p["c"] is None else data.normal(*p["c"], dtype=DTYPES[p["c_type"]])
        if c is not None and p["beta"] == 0.0:
            c.fill_(math.nan)
        bias = None if p["bias"] is None else data.normal(n, dtype=DTYPES[p["bias"]])
        return Contents({"a": a, "b": b, "c": c, "bias": bias, "scale": fill_scale(p, data)})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: p[name] for name in ("alpha", "beta", "activation")} | {name: t[name] for name in ("c", "bias")}
        if p["form"] == "out_dtype" or p.get("say_type"):
            options["out_dtype"] = output_type(p, p["out_type"])
        options |= quant_options(p, t) | {"constant_weights": p["constant"]}
        if self.out(p) is not None:
            options["out"] = t[p.get("out_is", "out")]
        return one_result(minfer.gemm(t["a"], t["b"], **(options | p.get("extra", {}))))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, alpha, beta = contents.tensors, p["alpha"], p["beta"]
        a, b = (torch.zeros_like(t[x]) if alpha == 0.0 else t[x] for x in ("a", "b"))
        c = None if t["c"] is None or beta == 0.0 else t["c"]
        bias, dtype = t["bias"], DTYPES[p["out_type"]]
        x, magnitude = product(a.double(), b.double())
        shape = self.shape(p)
        addends = [None if y is None else factor * y.double().expand(shape) for y, factor in ((c, beta), (bias, 1.0))]
        d = activate(affine(x, magnitude, alpha, *addends), p["activation"])
        if p["quant"]:
            return [codes("out", d, t["scale"])]
        peer = alpha * (a.float() @ b.float())
        for y, factor in ((c, beta), (bias, 1.0)):
            peer = peer if y is None else peer + factor * y.float()
        return [result("out", d, dtype, activate_float32(peer, p["activation"]).to(dtype))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        batch = lambda side: ("batch",) if side in p["batched"] else ()  # noqa: E731
        found = {
            "a": Argument(HALVES, (*batch("a"), "", "k"), ("b", "bias", "c"), ranks=(2, 3)),
            "b": Argument((dtype,), (*batch("b"), "k", "n" if p["bias"] else ""), ("a", "bias", "c"), ranks=(2, 3)),
        }
        if p["bias"]:
            found["bias"] = Argument((dtype, torch.float32), ("n",))
        if p["c"] is not None:
            found["c"] = Argument((dtype, torch.float32), (), (), ranks=(0, 1, 2, 3))
        if p["form"] == "out":
            types = (torch.float8_e4m3fn,) if p["quant"] else (dtype, torch.float32)
            found["out"] = Argument(types, (*(["batch"] if p["batched"] else []), "m", "n"), ("out_dtype",))
            found["a"].shape = (*batch("a"), "m", "k")
            found["b"].shape = (*batch("b"), "k", "n")
            for name in "ab":
                found[name].beside += ("out",)
        if p["quant"]:
            found["a"].beside += ("scale",)
        return found | scale_argument(p)

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("alpha", "beta"), *WRONG_ACTIVATIONS, *WRONG_KERNELS, *wrong_quants(p)]
        found += [
            ("out_dtype", x, "out_dtype") for x in (torch.float64, torch.int32, torch.float16, torch.bfloat16) if x != DTYPES[p["dtype"]]
        ]
        if p["c"] is None:
            found.append(("beta", 1.0, "c"))
        return found


class GemmGated(Family):
    name = "gemm_gated"
    share = 2.0
    kernels = "gemm"
    views = dict.fromkeys(("a", "b", "bias"), arena.ANY)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        batched = draw.weighted({"": 5, "ab": 2, "a": 1, "b": 1})
        batch = draw.weighted({1: 1, 2: 3, 5: 1, 0: 0.2}) if batched else 0
        m, n, k = draw_sizes(draw, limits, batch, unit_n=16)
        dtype = name_of(draw.choice(HALVES))
        p: Parameters = {"dtype": dtype, "m": m, "n": n, "k": k, "batched": batched, "batch": batch}
        p |= {"activation": draw.choice(ACTIVATIONS), "bias": draw_addend(draw, dtype) if draw.chance(0.4) else None}
        return p | draw_quant(draw) | {"constant": draw.chance(1 / 3)}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        m, n, k, dtype = p["m"], p["n"], p["k"], DTYPES[p["dtype"]]
        lead = {side: (p["batch"],) if side in p["batched"] else () for side in "ab"}
        a = data.normal(*lead["a"], m, k, dtype=dtype)
        b = data.normal(*lead["b"], k, n, dtype=dtype, scale=1.5 / math.sqrt(max(k, 1)))
        bias = None if p["bias"] is None else data.normal(n, dtype=DTYPES[p["bias"]])
        return Contents({"a": a, "b": b, "bias": bias, "scale": fill_scale(p, data)})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"activation": p["activation"], "bias": t["bias"], "constant_weights": p["constant"]}
        options |= quant_options(p, t) | p.get("extra", {})
        return one_result(minfer.gemm_gated(t["a"], t["b"], **options))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        a, b, bias = (contents.tensors[x] for x in ("a", "b", "bias"))
        x, magnitude = product(a.double(), b.double())
        x = affine(x, magnitude, 1.0, None if bias is None else bias.double())
        if p["quant"]:
            return [codes("out", gated(x, p["activation"], "blocks"), contents.tensors["scale"])]
        peer = a.float() @ b.float()
        peer = gated_float32(peer if bias is None else peer + bias.float(), p["activation"], "blocks").to(a.dtype)
        return [result("out", gated(x, p["activation"], "blocks"), a.dtype, peer)]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        batch = lambda side: ("batch",) if side in p["batched"] else ()  # noqa: E731
        found = {
            "a": Argument(HALVES, (*batch("a"), "", "k"), ("b",), ranks=(2, 3)),
            "b": Argument((dtype,), (*batch("b"), "k", "n" if p["bias"] else ""), ("a", "bias"), ranks=(2, 3)),
        }
        if p["bias"]:
            found["bias"] = Argument((dtype, torch.float32), ("n",))
        if p["quant"]:
            found["a"].beside += ("scale",)
        return found | scale_argument(p)

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [*WRONG_ACTIVATIONS, *WRONG_KERNELS, *wrong_quants(p)]
