"""minfer.w4a8_gemm and its gated form: activations of e4m3 and int8, scales of rows in every shape, groups, addends, out=."""

from __future__ import annotations

import math
from typing import Any

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters
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
    quant_options,
    scale_argument,
    wrong_quants,
    wrong_scalars,
)
from .quantized_gemm import alpha_of, fill_weight
from .scaled_gemm import FP8, PROMOTED

TYPES = {"float8_e4m3fn": FP8, "int8": torch.int8}
# Where no kernel of the device multiplies 8 bits by int4, activations times their scales are rounded to 16 bits first.
WIDENED = 2.0**-8


def widens(p: Parameters, device: torch.device) -> bool:
    return device.type == "cuda" and (p["widen"] or torch.cuda.get_device_capability(device) != (9, 0))


class W4A8Gemm(Family):
    share = 1.5
    kernels = "w4a8"
    views = {"a": arena.ANY, "a_scale": arena.ANY, "c": arena.ANY, "bias": arena.ANY}

    def __init__(self, is_gated: bool):
        self.is_gated = is_gated
        self.name = "w4a8_gemm" + ("_gated" if is_gated else "")

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return arena.VIEW if name == p.get("out_is") else super().rule(p, name)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        m, n, k = draw_sizes(draw, limits, 1, unit_n=16 if self.is_gated else 8, unit_k=16)
        dtype = name_of(draw.choice(HALVES))
        p: Parameters = {"type": draw.choice(list(TYPES)), "dtype": dtype, "n": n, "k": k, "format": "int4", "zeros": "none"}
        p["group_size"] = draw.weighted({-1: 3, 128: 6, 256: 1, 1024: 0.5, 2**40: 0.1})
        p["lead"] = draw.weighted({(m,): 5, (2, m): 1, (m, 1): 0.5, (1, 2, m): 0.5, (): 1})
        if math.prod(p["lead"]) * max(n, k) > limits.elements:
            p["lead"] = (m,)
        p |= {"rows": draw.weighted({"one": 1, "lead": 2, "lead_1": 3, "numbered": 1}), "alpha": alpha_of(draw, "int4")}
        p |= {
            "widen": draw.chance(0.15),
            "activation": draw.weighted({"none": 1 if self.is_gated else 5} | dict.fromkeys(ACTIVATIONS[1:], 1)),
        }
        p |= {"bias": draw_addend(draw, dtype) if draw.chance(0.4) else None, "c": None, "c_type": draw_addend(draw, dtype)}
        p |= {"form": "functional"} | draw_quant(draw)
        if self.is_gated:
            return p
        if draw.chance(0.5):
            p["c"] = draw.weighted({(*p["lead"], n): 4, (n,): 2, (): 1, (1,): 0.5})
        whole = p["c"] == (*p["lead"], n) and p["c_type"] == dtype
        p["form"] = draw.weighted({"functional": 5, "out": 3, "c": 1.5 if whole else 0})
        return p | ({"out_is": "c", "quant": False} if p["form"] == "c" else {})

    def shape(self, p: Parameters) -> tuple[int, ...]:
        return (*p["lead"], p["n"] // 2 if self.is_gated else p["n"])

    def out_type(self, p: Parameters) -> torch.dtype:
        return FP8 if p["quant"] else DTYPES[p["dtype"]]

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return (self.shape(p), self.out_type(p)) if p["form"] in ("out", "c") else None

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        n, k, m = p["n"], p["k"], math.prod(p["lead"])
        w = fill_weight(p, data, n, k, 1.0 / math.sqrt(max(k, 1)))
        if p["type"] == "int8":
            a = data.integers(-128, 128, *p["lead"], k, dtype=torch.int8)
        else:
            a = data.normal(*p["lead"], k, dtype=torch.float32, scale=16.0).to(FP8)
        size = 1.0 / (74.0 if p["type"] == "int8" else 16.0)
        shape = {"one": (1,), "lead": p["lead"], "lead_1": (*p["lead"], 1), "numbered": (m,)}[p["rows"]]
        tensors = {
            "a": a,
            "a_scale": data.uniform(*shape, low=0.5 * size, high=1.5 * size),
            "qweight": minfer.w4a16_pack(w["codes"]),
            "scales": w["scales"],
            "c": None if p["c"] is None else data.normal(*p["c"], dtype=DTYPES[p["c_type"]]),
            "bias": None if p["bias"] is None else data.normal(n, dtype=DTYPES[p["bias"]]),
            "scale": fill_scale(p, data),
        }
        return Contents(tensors, {"codes": w["codes"]})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options: dict[str, Any] = {name: p[name] for name in ("group_size", "alpha", "activation")} | {"bias": t["bias"]}
        if p["widen"]:
            options["kernel"] = "w4a16"
        if not self.is_gated:
            options["c"] = t["c"]
        options |= quant_options(p, t)
        if self.out(p) is not None:
            options["out"] = t[p.get("out_is", "out")]
        call = getattr(minfer, self.name)
        return one_result(call(t["a"], t["a_scale"], t["qweight"], t["scales"], **(options | p.get("extra", {}))))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, alpha, dtype, m = contents.tensors, p["alpha"], DTYPES[p["dtype"]], math.prod(p["lead"])
        a = t["a"].double().reshape(m, p["k"]) * (t["a_scale"].double().reshape(-1, 1) if p["rows"] != "one" else t["a_scale"].double())
        w = weights.weight(contents.facts["codes"], t["scales"], None, "int4", p["group_size"]).value
        x, magnitude = product(a, w.t())
        if widens(p, t["a"].device):
            x = Bounded(x.value, x.error + 2 * WIDENED * magnitude)
        elif p["type"] != "int8":
            x = Bounded(x.value, x.error + PROMOTED * magnitude)
        shape, n = self.shape(p), p["n"]
        wide = (*p["lead"], n)
        flat = lambda y: None if y is None else y.double().expand(wide).reshape(m, n)  # noqa: E731
        x = affine(x, magnitude, alpha, flat(t["c"]), flat(t["bias"]))
        peer = alpha * (a.float() @ w.float().t())
        for y in (t["c"], t["bias"]):
            peer = peer if y is None else peer + y.float().expand(wide).reshape(m, n)
        if self.is_gated:
            d, peer = gated(x, p["activation"], "blocks"), gated_float32(peer, p["activation"], "blocks")
        else:
            d, peer = activate(x, p["activation"]), activate_float32(peer, p["activation"])
        d = Bounded(d.value.view(shape), d.error.view(shape))
        if p["quant"]:
            return [codes("out", d, t["scale"])]
        return [result("out", d, dtype, peer.to(dtype).view(shape))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype, lead = DTYPES[p["dtype"]], ("",) * len(p["lead"])
        names = tuple(f"lead{i}" for i in range(len(lead))) if p["form"] == "out" else lead
        beside = ("qweight", "scales", "a_scale", "c", "out", "k ", "scale")
        # D has the dtype of scales, whichever of 16 bits, but where another tensor has it, too.
        fixed = p["form"] != "functional" or p["bias"] == p["dtype"] or (p["c"] is not None and p["c_type"] == p["dtype"])
        found = {
            "a": Argument(tuple(TYPES.values()), (*names, ""), beside, ranks=(1, 2, 3, 4, 5)),
            "a_scale": Argument((torch.float32,), (), ("a",), ranks=tuple(range(6))),
            "qweight": Argument((torch.int32,), ("", "", ""), ("scales",)),
            "scales": Argument(
                (dtype,) if fixed else HALVES, ("", "n" if p["bias"] else ""), ("qweight", "a", "bias", "c", "out", "scale")
            ),
        }
        if p["bias"]:
            found["bias"] = Argument((dtype, torch.float32), ("n",))
        if p["c"] is not None:
            found["c"] = Argument((dtype, torch.float32), (), (), ranks=tuple(range(len(p["lead"]) + 2)))
        if p["form"] == "out":
            found["out"] = Argument((self.out_type(p),), (*names, "n"), ())
        return found | scale_argument(p)

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("alpha"), *WRONG_ACTIVATIONS, *WRONG_KERNELS, *wrong_quants(p)]
        return found + [("group_size", x, "group_size") for x in (0, -2, 32, 64, 96, 129, 192, 2**40 + 1)]


W4A8_FAMILIES = tuple(W4A8Gemm(is_gated) for is_gated in (False, True))
