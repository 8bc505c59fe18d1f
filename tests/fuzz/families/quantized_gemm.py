"""minfer.w4a16_gemm, w8a16_gemm and their gated forms: every format, group size, zero points, act-order, addends, out=."""

from __future__ import annotations

import math
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
from .gemm import (
    WRONG_ACTIVATIONS,
    WRONG_KERNELS,
    draw_addend,
    draw_quant,
    draw_sizes,
    fill_scale,
    one_result,
    output_type,
    quant_options,
    scale_argument,
    wrong_quants,
    wrong_scalars,
)

SCALE_TYPES = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}
FORMATS = {4: ("int4", "nf4", "mxfp4", "nvfp4"), 8: ("int8", "fp8_e4m3")}


def draw_weight(draw: Draw, bits: int, dtype: str) -> Parameters:
    """Format, groups and zero points of a weight; ``typed``: whether byte scales are passed in their own type."""
    form = draw.weighted({name: 2.0 if name in weights.ZERO else 1.0 for name in FORMATS[bits]})
    group = weights.BYTE_SCALES.get(form) or draw.weighted({-1: 3, 32: 3, 64: 2, 128: 4, 256: 1, 1024: 0.5, 2**40: 0.1})
    zeros = draw.weighted({"none": 3, "integers": 2, "fractions": 1}) if form in weights.ZERO else "none"
    return {"format": form, "group_size": group, "zeros": zeros, "typed": form in weights.BYTE_SCALES and draw.chance(0.5)}


def fill_weight(p: Parameters, data: Data, n: int, k: int, size: float = 1.0) -> dict[str, Tensor | None]:
    """codes uint8 [n, k], scales and zeros of p's format; weights of about ``size``."""
    form, dtype = p["format"], DTYPES[p["dtype"]]
    groups = weights.groups_of(k, p["group_size"])
    codes = data.integers(0, 2 ** weights.BITS[form], n, k, dtype=torch.uint8)
    if form == "fp8_e4m3":
        codes = data.normal(n, k, scale=2.0).to(torch.float8_e4m3fn).view(torch.uint8)
    if form == "mxfp4":
        exponent = round(math.log2(size / 2)) if size > 0 else 0
        scales = data.integers(127 + exponent - 3, 127 + exponent + 3, groups, n, dtype=torch.uint8)
    elif form == "nvfp4":
        # Block scales are E4M3, of all sizes; subnormal ones and 0, too. What makes weights small is alpha.
        scales = data.integers(0, 0x7E, groups, n, dtype=torch.uint8)
    else:
        spread = {"int4": 5.0, "nf4": 0.6, "int8": 75.0, "fp8_e4m3": 2.0}[form]
        scales = data.uniform(groups, n, low=0.5 * size / spread, high=1.5 * size / spread, dtype=dtype)
    zeros = None
    if p["zeros"] != "none":
        middle = int(weights.ZERO[form])
        zeros = data.integers(0, 2 * middle, groups, n).to(dtype)
        if p["zeros"] == "fractions":
            zeros = (zeros.float() + data.uniform(groups, n, low=-0.5, high=0.5)).to(dtype)
    return {"codes": codes, "scales": scales, "zeros": zeros}


def pack(codes: Tensor, form: str) -> Tensor:
    return minfer.w4a16_pack(codes, w4_format=form) if weights.BITS[form] == 4 else minfer.w8a16_pack(codes)


def passed_scales(p: Parameters, scales: Tensor, typed: str = "typed") -> Tensor:
    """Scales as a caller has them: those of byte formats are bytes or, where p's ``typed`` says so, float8 numbers of the same bits."""
    if not p[typed] or p["format"] not in weights.BYTE_SCALES or scales.dtype != torch.uint8:
        return scales
    return scales.view(SCALE_TYPES[p["format"]])


def alpha_of(draw: Draw, form: str) -> float:
    return draw.pick(1e-4, 5e-4) if form == "nvfp4" else draw.pick(1.0, 1.0, 1.0, 0.37, -2.0, 0.0, 3e-5)


class QuantizedGemm(Family):
    """``bits`` 4 or 8; gated or not."""

    share = 2.0
    kernels = "w4a16"
    views = {"a": arena.ANY, "c": arena.ANY, "bias": arena.ANY}

    def __init__(self, bits: int, is_gated: bool):
        self.bits, self.is_gated = bits, is_gated
        self.name = f"w{bits}a16_gemm" + ("_gated" if is_gated else "")
        if is_gated:
            self.share = 1.0

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return arena.VIEW if name == p.get("out_is") else super().rule(p, name)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        m, n, k = draw_sizes(draw, limits, 1, unit_n=16 if self.is_gated else 8, unit_k=8)
        dtype = name_of(draw.choice(HALVES))
        p: Parameters = {"dtype": dtype, "n": n, "k": k} | draw_weight(draw, self.bits, dtype)
        p["lead"] = draw.weighted({(m,): 5, (2, m): 1, (m, 1): 0.5, (1, 2, m): 0.5, (): 1})
        if math.prod(p["lead"]) * max(n, k) > limits.elements:
            p["lead"] = (m,)
        p |= {"alpha": alpha_of(draw, p["format"]), "perm": draw.chance(0.25), "constant": draw.chance(1 / 3)}
        p |= {"activation": draw.weighted({"none": 1 if self.is_gated else 5} | dict.fromkeys(ACTIVATIONS[1:], 1))}
        p |= {
            "bias": draw_addend(draw, dtype) if draw.chance(0.4) else None,
            "c": None,
            "c_type": draw_addend(draw, dtype),
            "form": "functional",
        }
        p |= draw_quant(draw)
        if self.is_gated:
            return p
        shape = (*p["lead"], n)
        if draw.chance(0.5):
            forms: dict[Any, float] = {shape: 4, (n,): 2, (): 1, (1,): 0.5}
            if p["lead"]:
                forms |= {(*p["lead"], 1): 1, (*[1] * len(p["lead"]), n): 1, (p["lead"][-1], n): 1}
            p["c"] = draw.weighted(forms)
        p["form"] = draw.weighted({"functional": 5, "out": 3, "c": 1.5 if p["c"] == shape and p["c_type"] == dtype else 0})
        return p | ({"out_is": "c", "quant": False} if p["form"] == "c" else {})

    def shape(self, p: Parameters) -> tuple[int, ...]:
        return (*p["lead"], p["n"] // 2 if self.is_gated else p["n"])

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return (self.shape(p), output_type(p)) if p["form"] in ("out", "c") else None

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        n, k, dtype = p["n"], p["k"], DTYPES[p["dtype"]]
        w = fill_weight(p, data, n, k, 1.0 / math.sqrt(max(k, 1)))
        a = data.normal(*p["lead"], k, dtype=dtype)
        if draw.chance(0.1):
            a[..., ::9] *= 20  # activations have channels that are large in every token
        tensors = {
            "a": a,
            "qweight": pack(w["codes"], p["format"]),
            "scales": w["scales"],
            "zeros": w["zeros"],
            "perm": data.permutation(k).int() if p["perm"] else None,
            "c": None if p["c"] is None else data.normal(*p["c"], dtype=DTYPES[p["c_type"]]),
            "bias": None if p["bias"] is None else data.normal(n, dtype=DTYPES[p["bias"]]),
            "scale": fill_scale(p, data),
        }
        return Contents(tensors, {"codes": w["codes"]})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        scales = passed_scales(p, t["scales"])
        options: dict[str, Any] = {name: p[name] for name in ("group_size", "alpha", "activation")}
        options |= {"perm": t["perm"], "bias": t["bias"], f"w{self.bits}_format": p["format"]}
        # True promises that nothing which still runs writes the weights. Torch writes them here, whose kernels let no other begin
        # beside them, and no captured graph does; late_writer does not say it where it would be broken.
        options["constant_weights"] = p["constant"]
        if not self.is_gated:
            options["c"] = t["c"]
        options |= quant_options(p, t)
        if self.out(p) is not None:
            options["out"] = t[p.get("out_is", "out")]
        return one_result(getattr(minfer, self.name)(t["a"], t["qweight"], scales, t["zeros"], **(options | p.get("extra", {}))))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, alpha, dtype = contents.tensors, p["alpha"], DTYPES[p["dtype"]]
        a = t["a"].reshape(math.prod(p["lead"]), p["k"])
        if t["perm"] is not None:
            inside = (t["perm"] >= 0) & (t["perm"] < p["k"])
            a = a[:, t["perm"].long().clamp(0, max(p["k"] - 1, 0))].masked_fill(~inside, 0.0)
        w = weights.weight(contents.facts["codes"], t["scales"], t["zeros"], p["format"], p["group_size"])
        bound, average = weights.error_of_sum(a.double(), w, dtype)
        x, magnitude = product(a.double(), w.value.t(), bound)
        shape, n = self.shape(p), p["n"]
        wide = (*p["lead"], n)
        flat = lambda y: None if y is None else y.double().expand(wide).reshape(a.shape[0], n)  # noqa: E731
        x = affine(x, magnitude, alpha, flat(t["c"]), flat(t["bias"]))
        # torch: the weight in 16 bits by operations in 16 bits, products in float32.
        peer = alpha * (a.float() @ w.value.to(dtype).float().t())
        for y in (t["c"], t["bias"]):
            peer = peer if y is None else peer + y.float().expand(wide).reshape(a.shape[0], n)
        if self.is_gated:
            d, peer = gated(x, p["activation"], "blocks"), gated_float32(peer, p["activation"], "blocks")
            # An error of the gate counts as much as up is large, and the other way round.
            usual = gated(Bounded(x.value, abs(alpha) * average), p["activation"], "blocks").error
        else:
            d, peer = activate(x, p["activation"]), activate_float32(peer, p["activation"])
            usual = activate(Bounded(x.value, abs(alpha) * average), p["activation"]).error
        if p["quant"]:
            return [codes("out", Bounded(d.value.view(shape), d.error.view(shape)), t["scale"])]
        found = result("out", d, dtype, peer.to(dtype), usual)
        found.truth, found.bound, found.peer = (y.view(shape) for y in (found.truth, found.bound, found.peer))
        return [found]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        stored = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn) if p["format"] in weights.BYTE_SCALES else (dtype,)
        lead = ("",) * len(p["lead"])
        found = {
            "a": Argument(
                HALVES, (*lead, "k" if p["perm"] else ""), ("qweight", "scales", "perm", "c", "out", "k ", "scale"), ranks=(1, 2, 3, 4, 5)
            ),
            "qweight": Argument((torch.int32,), ("", "", ""), ("scales",)),
            "scales": Argument(
                stored, ("groups" if p["zeros"] != "none" else "", "n" if p["bias"] else ""), ("qweight", "zeros", "a", "bias")
            ),
        }
        if p["zeros"] != "none":
            found["zeros"] = Argument((dtype,), ("groups", ""), ("scales",))
        if p["perm"]:
            found["perm"] = Argument((torch.int32,), ("k",), ())
        if p["bias"]:
            found["bias"] = Argument((dtype, torch.float32), ("n",))
        if p["c"] is not None:
            found["c"] = Argument((dtype, torch.float32), (), (), ranks=tuple(range(len(p["lead"]) + 2)))
        if p["form"] == "out":
            names = tuple(f"lead{i}" for i in range(len(lead)))
            found["out"] = Argument((output_type(p),), (*names, "n"), ())
            found["a"].shape = (*names, found["a"].shape[-1])
        return found | scale_argument(p)

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        found: list[WrongTensors] = []
        scales = tensors["scales"]
        if p["format"] not in weights.ZERO:
            found.append(("zeros are given", {"zeros": torch.zeros_like(scales)}, ("zeros",)))
        if p["n"] >= 8:
            found.append(("scales have four columns less", {"scales": scales[:, :-4]}, ("scales", "qweight")))
        found.append(("a has four columns more", {"a": tensors["a"].new_zeros(*p["lead"], p["k"] + 4)}, ("k ", "perm")))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("alpha"), *WRONG_ACTIVATIONS, *WRONG_KERNELS, *wrong_quants(p)]
        found += [("group_size", x, "group_size") for x in (0, -2, 8, 31, 33, 48, 96, 2**40 + 1)]
        found += [(f"w{self.bits}_format", x, f"w{self.bits}_format") for x in ("int3", "", "INT4", *FORMATS[12 - self.bits])]
        if p["format"] in weights.BYTE_SCALES:
            found += [("group_size", x, "group_size") for x in (-1, 64, 128)]
        return found

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        perm = contents.tensors["perm"]
        if perm is None or p["k"] == 0 or math.prod(p["lead"]) == 0:
            return None
        at = draw.sample(range(p["k"]), min(p["k"], draw.pick(1, 1, 5, p["k"])))
        value = draw.pick(-1, p["k"], p["k"] + 1, 10**6, 2**31 - 1, -(2**31))
        perm[torch.tensor(at, device=perm.device)] = value
        # A column that a does not have is one of zeros.
        return Hostile(f"perm = {value} in {len(at)} places, first {at[0]}", lambda before, have: self.expect(p, contents, before, have))
