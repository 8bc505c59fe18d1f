"""minfer.rms_norm_gemm and its forms of quantised weights, gated or not: x of any modes, residuals, both numbers of launches."""

from __future__ import annotations

import math

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Hostile, Parameters, WrongTensors
from ..truth import rows as truth, weights
from ..truth.epilogue import ACTIVATIONS, Bounded, activate, activate_float32, affine, gated, gated_float32, product, result
from .attention import DTYPES, HALVES
from .fused import RANKS, WRONG_EPS
from .gemm import WRONG_ACTIVATIONS, WRONG_KERNELS, draw_addend, draw_sizes, wrong_scalars
from .quantized_gemm import FORMATS, alpha_of, draw_weight, fill_weight, pack, passed_scales


class NormGemm(Family):
    """``bits`` 0 (dense weights), 4 or 8; gated or not."""

    share = 1.5
    views = {"x": arena.ANY, "residual": arena.VIEW, "norm_weight": arena.ANY, "b": arena.ANY, "bias": arena.ANY}

    def __init__(self, bits: int, is_gated: bool):
        self.bits, self.is_gated = bits, is_gated
        kind = f"w{bits}a16_" if bits else ""
        self.name = f"rms_norm_{kind}gemm" + ("_gated" if is_gated else "")
        self.kernels = "w4a16" if bits else "norm_gemm"

    in_place = ("residual",)

    def written(self, p: Parameters) -> tuple[str, ...]:
        return self.in_place if p["residual"] else ()

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        unit_n = 16 if self.is_gated else 8 if self.bits else 1
        m, n, k = draw_sizes(draw, limits, 1, unit_n=unit_n, unit_k=8 if self.bits or draw.chance(0.7) else 1)
        if draw.chance(0.6):  # what one launch takes
            m = min(m, draw.randint(1, 17))
        dtype = name_of(draw.choice(HALVES))
        p: Parameters = {"dtype": dtype, "n": n, "k": k}
        p["lead"] = draw.weighted({(m,): 6, (2, m): 1, (m, 1): 0.5, (): 0.5})
        if math.prod(p["lead"]) * max(n, k) > limits.elements:
            p["lead"] = (m,)
        p |= {"residual": draw.chance(0.6), "norm_weight": draw.chance(0.7), "bias": draw_addend(draw, dtype) if draw.chance(0.4) else None}
        p |= {"activation": draw.weighted({"none": 1 if self.is_gated else 4} | dict.fromkeys(ACTIVATIONS[1:], 1))}
        p |= {"eps": draw.pick(1e-6, 1e-5, 0.1), "weight_offset": draw.pick(0.0, 0.0, 1.0, -0.3), "size": draw.pick(1.0, 1.0, 0.02, 12.0)}
        if self.bits:
            p |= draw_weight(draw, self.bits, dtype)
            p |= {"alpha": alpha_of(draw, p["format"]), "perm": draw.chance(0.25), "constant": draw.chance(1 / 3)}
        else:
            p |= {"by": draw.weighted({None: 2, "two_launches": 1, "one_launch": 2}), "along_k": draw.chance(0.75)}
            p |= {"constant": draw.chance(1 / 3)}
        return p

    def shape(self, p: Parameters) -> tuple[int, ...]:
        return (*p["lead"], p["n"] // 2 if self.is_gated else p["n"])

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        n, k, dtype = p["n"], p["k"], DTYPES[p["dtype"]]
        x = data.normal(*p["lead"], k, scale=p["size"])
        if p["lead"] and p["lead"][0] > 1:
            x[1] = 0.0 if draw.chance(0.2) else x[1] * 2.0**-6
        tensors: dict[str, Tensor | None] = {
            "x": x.to(dtype),
            "residual": data.normal(*p["lead"], k, dtype=dtype) if p["residual"] else None,
            "norm_weight": data.normal(k, dtype=dtype) if p["norm_weight"] else None,
            "bias": None if p["bias"] is None else data.normal(n, dtype=DTYPES[p["bias"]]),
        }
        size = 1.0 / math.sqrt(max(k, 1))
        if not self.bits:
            return Contents(tensors | {"b": data.normal(*((n, k) if p["along_k"] else (k, n)), dtype=dtype, scale=size)})
        w = fill_weight(p, data, n, k, size)
        tensors |= {"qweight": pack(w["codes"], p["format"]), "scales": w["scales"], "zeros": w["zeros"]}
        return Contents(tensors | {"perm": data.permutation(k).int() if p["perm"] else None}, {"codes": w["codes"]})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: p[name] for name in ("eps", "weight_offset", "activation")} | {name: t[name] for name in ("residual", "bias")}
        options["constant_weights"] = p["constant"]
        if self.bits:
            weight = (t["qweight"], passed_scales(p, t["scales"]), t["zeros"])
            options |= {name: p[name] for name in ("group_size", "alpha")} | {"perm": t["perm"]}
            options |= {f"w{self.bits}_format": p["format"]}
        else:
            weight = (t["b"].t() if p["along_k"] and t["b"].dim() == 2 else t["b"],)
        operator, options = getattr(minfer, self.name), options | p.get("extra", {})
        if p.get("by") and "kernel" not in options:
            try:
                found = operator(t["x"], t["norm_weight"], *weight, **options, kernel=p["by"])
            except RuntimeError as error:  # many tokens, or views that one launch does not read
                if "no kernel computes this problem in one launch" not in str(error):
                    raise
                found = operator(t["x"], t["norm_weight"], *weight, **options)
        else:
            found = operator(t["x"], t["norm_weight"], *weight, **options)
        return {"out": found} | ({"residual": t["residual"]} if p["residual"] else {})

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, dtype, found = contents.tensors, DTYPES[p["dtype"]], []
        m, n, k = math.prod(p["lead"]), p["n"], p["k"]
        x = t["x"]
        if p["residual"]:
            x = truth.rounded(x.double() + before["residual"].double(), dtype)
            found.append(Expected("residual", dtype, x, contiguous=False))
        y = truth.rms_norm(x.reshape(m, k), t["norm_weight"], p["eps"], p["weight_offset"])
        a, alpha = y.rounded(dtype), p.get("alpha", 1.0)
        a_value, a_error = a.value, a.error
        if t.get("perm") is not None:
            inside = (t["perm"] >= 0) & (t["perm"] < k)
            columns = t["perm"].long().clamp(0, max(k - 1, 0))
            a_value, a_error = (z[:, columns].masked_fill(~inside, 0.0) for z in (a_value, a_error))
        if self.bits:
            w = weights.weight(contents.facts["codes"], t["scales"], t["zeros"], p["format"], p["group_size"])
            bound, average = weights.error_of_sum(a_value, w, dtype)
            w = w.value
        else:
            w, bound, average = (
                t["b"].double() if p["along_k"] else t["b"].double().t(),
                0.0,
                torch.zeros(m, n, dtype=torch.float64, device=x.device),
            )
        # Roundings of the norm, and of the norm's own error, in the sum.
        bound = bound + 1.01 * (a_error @ w.abs().t())
        average = average + ((0.5 * a_error) ** 2 @ (w**2).t()).sqrt()
        sums, magnitude = product(a_value, w.t(), bound)
        bias = None if t["bias"] is None else t["bias"].double()
        sums = affine(sums, magnitude, alpha, bias)
        peer = alpha * (a_value.to(dtype).float() @ w.to(dtype).float().t())
        peer = peer if bias is None else peer + bias.float()
        finish, finish_peer = (
            (lambda z: gated(z, p["activation"], "blocks"), lambda z: gated_float32(z, p["activation"], "blocks"))
            if self.is_gated
            else (lambda z: activate(z, p["activation"]), lambda z: activate_float32(z, p["activation"]))
        )
        usual = finish(Bounded(sums.value, abs(alpha) * average)).error
        d = result("out", finish(sums), dtype, finish_peer(peer).to(dtype), usual)
        d.truth, d.bound, d.peer = (z.view(self.shape(p)) for z in (d.truth, d.bound, d.peer))
        return [*found, d]

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        lead = tuple(f"mode {i}" for i in range(len(p["lead"]))) if p["residual"] else ("",) * len(p["lead"])
        tied = p["residual"] or p["norm_weight"] or not self.bits or p["perm"]
        others = ("residual", "norm_weight", "b", "bias", "scales", "qweight", "perm", "k ")
        found = {"x": Argument(HALVES, (*lead, "k" if tied else ""), others, ranks=RANKS)}
        if p["residual"]:
            found["residual"] = Argument((dtype,), (*lead, "k"))
        if p["norm_weight"]:
            found["norm_weight"] = Argument((dtype,), ("k",))
        if p["bias"]:
            found["bias"] = Argument((dtype, torch.float32), ("n",))
        if not self.bits:
            modes = ("k", "n" if p["bias"] else "")
            found["b"] = Argument((dtype,), modes[::-1] if p["along_k"] else modes, ("x", "bias"))
            return found
        stored = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn) if p["format"] in weights.BYTE_SCALES else (dtype,)
        found["qweight"] = Argument((torch.int32,), ("", "", ""), ("scales",))
        groups = "groups" if p["zeros"] != "none" else ""
        found["scales"] = Argument(stored, (groups, "n" if p["bias"] else ""), ("qweight", "zeros", "x", "bias"))
        if p["zeros"] != "none":
            found["zeros"] = Argument((dtype,), ("groups", ""), ("scales",))
        if p["perm"]:
            found["perm"] = Argument((torch.int32,), ("k",), ())
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        found: list[WrongTensors] = []
        if self.bits and p["format"] not in weights.ZERO:
            found.append(("zeros are given", {"zeros": torch.zeros_like(tensors["scales"])}, ("zeros",)))
        if self.bits and p["n"] >= 8:
            found.append(("scales have four columns less", {"scales": tensors["scales"][:, :-4]}, ("scales", "qweight")))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("weight_offset"), *WRONG_EPS, *WRONG_ACTIVATIONS, *WRONG_KERNELS]
        found += [("kernel", name, "kernel") for name in ("two launches", "one_launch@threads=1", "norm_gemm_sm80_f16_8x16x32")]
        if self.bits:
            found += [*wrong_scalars("alpha"), *(("group_size", x, "group_size") for x in (0, 8, 48, 2**40 + 1))]
            found += [(f"w{self.bits}_format", x, f"w{self.bits}_format") for x in ("int3", "", *FORMATS[12 - self.bits])]
        return found

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        perm = contents.tensors.get("perm")
        if perm is None or p["k"] == 0 or math.prod(p["lead"]) == 0:
            return None
        at = draw.sample(range(p["k"]), min(p["k"], draw.pick(1, 5, p["k"])))
        value = draw.pick(-1, p["k"], p["k"] + 1, 2**31 - 1, -(2**31))
        perm[torch.tensor(at, device=perm.device)] = value
        # A column that x does not have is one of zeros.
        return Hostile(f"perm = {value} in {len(at)} places, first {at[0]}", lambda before, have: self.expect(p, contents, before, have))


NORM_GEMM_FAMILIES = [NormGemm(bits, is_gated) for bits in (0, 4, 8) for is_gated in (False, True)]
