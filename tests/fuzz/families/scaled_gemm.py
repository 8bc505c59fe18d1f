"""minfer.gemm_fp8, gemm_int8 and their gated forms: scales of every kind and in any strides, types of D, out=."""

from __future__ import annotations

import math

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters
from ..truth.epilogue import ACTIVATIONS, Bounded, activate, activate_float32, affine, codes, gated, gated_float32, product, result
from .attention import DTYPES, HALVES
from .gemm import WRONG_ACTIVATIONS, WRONG_KERNELS, draw_scalar, draw_sizes, wrong_scalars

BLOCK = 128
FP8 = torch.float8_e4m3fn
# Of the sums of 128 products of e4m3: each of four MMAs keeps 13 bits behind the largest term's first. Relative to the sum of magnitudes.
PROMOTED, FAST = 2.0**-11, 2.0**-9


def blocks_of(extent: int) -> int:
    return (extent + BLOCK - 1) // BLOCK


def expanded(scale: Tensor, lines: int, k: int, lines_of_block: int) -> Tensor:
    """A scale as numbers of [lines, k], float64."""
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.double() - 127.0)
    scale = scale.double()
    if scale.dim() == 3:  # of gates and of ups, whose rows come in packs of 8 of each
        halves = [half.repeat_interleave(lines_of_block, 0)[: lines // 2].repeat_interleave(BLOCK, 1)[:, :k] for half in scale]
        return torch.stack(halves).unflatten(1, (lines // 16, 8)).transpose(0, 1).reshape(lines, k)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(lines, k)
    if scale.dim() == 1 or (scale.shape[1] == 1 and scale.shape[0] == lines):
        return scale.reshape(lines, 1).expand(lines, k)
    return scale.repeat_interleave(lines_of_block, 0)[:lines].repeat_interleave(BLOCK, 1)[:, :k]


class ScaledGemm(Family):
    share = 1.5
    kernels = "scaled_gemm"
    views = dict.fromkeys(("a", "b", "a_scale", "b_scale", "c", "bias"), arena.ANY)

    def __init__(self, fp8: bool, is_gated: bool):
        self.fp8, self.is_gated = fp8, is_gated
        self.name = f"gemm_{'fp8' if fp8 else 'int8'}{'_gated' if is_gated else ''}"

    def rule(self, p: Parameters, name: str) -> arena.Rule:
        return arena.VIEW if name == p.get("out_is") else super().rule(p, name)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        m, n, k = draw_sizes(draw, limits, 0, unit_n=16 if self.is_gated else 1)
        types = ["bfloat16", "float16", "float32"]
        out_type = draw.choice([*types, "codes"] if self.fp8 else types if self.is_gated else [*types, "int32"])
        narrow = out_type if out_type in types[:2] else draw.choice(types[:2])
        lead = draw.weighted({(m,): 6, (2, m): 1, (m, 1): 0.5, (1, 3, m): 0.5})
        p: Parameters = {"lead": lead if math.prod(lead) * max(n, k) <= limits.elements else (m,)}
        m = math.prod(p["lead"])
        p |= {
            "dtype": "float8_e4m3fn" if self.fp8 else "int8",
            "m": m,
            "n": n,
            "k": k,
            "numbered": draw.chance(0.3),
            "out_type": out_type,
            "narrow": narrow,
            "fast": self.fp8 and draw.chance(0.2),
            "constant": draw.chance(1 / 3),
        }
        kinds = {"one": 1, "lines": 2, "lines_1": 1} | ({"blocks": 3, "exponents": 1} if self.fp8 else {})
        p |= {"a_kind": draw.weighted(kinds), "b_kind": draw.weighted(kinds)}
        p |= {"activation": "none", "c": None, "c_type": draw.pick(narrow, "float32"), "beta": 0.0, "bias": None, "form": "functional"}
        if out_type != "int32":
            p["activation"] = draw.choice(ACTIVATIONS) if self.is_gated else draw.weighted({"none": 5} | dict.fromkeys(ACTIVATIONS[1:], 1))
            p["bias"] = draw.pick(narrow, "float32") if draw.chance(0.4) else None
            if not self.is_gated and draw.chance(0.4):
                rows = p["lead"]
                p["c"] = draw.weighted({(*rows, n): 4, (n,): 1, (*rows, 1): 1, (rows[-1], n): 0.5, (): 1, (1,) * (len(rows) + 1): 0.5})
                p["beta"] = draw_scalar(draw)
        p["zero"] = draw.pick("one", "lines") if not self.fp8 and out_type != "int32" and draw.chance(0.3) else None
        if not self.is_gated:
            p["form"] = draw.weighted({"functional": 4, "out": 2})
        return p

    def dtype(self, p: Parameters) -> torch.dtype:
        return {"codes": FP8, "int32": torch.int32}.get(p["out_type"]) or DTYPES[p["out_type"]]

    def out(self, p: Parameters) -> tuple[tuple[int, ...], torch.dtype] | None:
        return ((*p["lead"], p["n"]), self.dtype(p)) if p["form"] == "out" else None

    def scale(self, data: Data, kind: str, lines: int, block_lines: int, k: int, size: float) -> Tensor:
        shape = {"one": (1,), "lines": (lines,), "lines_1": (lines, 1)}.get(kind, (block_lines, blocks_of(k)))
        middle = 127 + round(math.log2(size))
        if kind == "exponents" and shape not in ((lines, 1), (1, 1)):
            return data.integers(middle - 2, middle + 3, *shape, dtype=torch.uint8)
        return data.uniform(*shape, low=0.5 * size, high=1.5 * size)

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        m, n, k = p["m"], p["n"], p["k"]
        if self.fp8:
            a, b = data.normal(m, k, dtype=torch.float32, scale=16.0).to(FP8), data.normal(k, n, dtype=torch.float32, scale=16.0).to(FP8)
        else:
            a, b = (data.integers(-128, 128, *shape, dtype=torch.int8) for shape in ((m, k), (k, n)))
        size = 1.0 / (16.0 if self.fp8 else 74.0)
        a = a.reshape(*p["lead"], k)
        a_scale = self.scale(data, p["a_kind"], m, m, k, size)
        if len(p["lead"]) > 1 and not p["numbered"] and p["a_kind"] != "one":
            a_scale = a_scale.reshape(*p["lead"], *a_scale.shape[1:])
        b_size = size / math.sqrt(max(k, 1))
        if self.is_gated and p["b_kind"] in ("blocks", "exponents"):
            halves = [self.scale(data, p["b_kind"], n // 2, blocks_of(n // 2), k, b_size) for _ in range(2)]
            b_scale = torch.stack(halves)
        else:
            b_scale = self.scale(data, p["b_kind"], n, blocks_of(n), k, b_size)
        zero = sums = None
        if p["zero"] is not None:
            zero = data.integers(-128, 128, *((1,) if p["zero"] == "one" else (*p["lead"], 1)), dtype=torch.int32)
            sums = b.sum(0, dtype=torch.int32)
        c = None if p["c"] is None else data.normal(*p["c"], dtype=DTYPES[p["c_type"]])
        if c is not None and p["beta"] == 0.0:
            c.fill_(math.nan)
        bias = None if p["bias"] is None else data.normal(n, dtype=DTYPES[p["bias"]])
        out_scale = data.uniform(1, low=0.01, high=0.03) if p["out_type"] == "codes" else None
        return Contents(
            {
                "a": a,
                "b": b,
                "a_scale": a_scale,
                "b_scale": b_scale,
                "c": c,
                "bias": bias,
                "out_scale": out_scale,
                "a_zero": zero,
                "b_sums": sums,
            }
        )

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {"activation": p["activation"], "bias": t["bias"], "out_dtype": self.dtype(p), "constant_weights": p["constant"]}
        if self.fp8:
            options |= {"out_scale": t["out_scale"], "fast_accum": p["fast"]}
        else:
            options |= {"a_zero": t["a_zero"], "b_sums": t["b_sums"]}
        if not self.is_gated:
            options |= {"c": t["c"], "beta": p["beta"]}
        if self.out(p) is not None:
            options["out"] = t["out"]
        call = getattr(minfer, self.name)
        return {"out": call(t["a"], t["b"], t["a_scale"], t["b_scale"], **(options | p.get("extra", {})))}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, (m, n, k) = contents.tensors, (p["m"], p["n"], p["k"])
        a, b = t["a"].double().reshape(m, k), t["b"].double()
        wide = (*p["lead"], n)
        if p["out_type"] == "int32":
            y = (a @ b).reshape(wide)
            return [Expected("out", torch.int32, y, torch.zeros_like(y), None, usual=0.0)]
        of_rows = t["a_scale"]
        if len(p["lead"]) > 1 and not p["numbered"] and p["a_kind"] != "one":
            of_rows = of_rows.reshape(m, *of_rows.shape[len(p["lead"]) :])
        by_blocks = any(scale.dim() >= 2 and scale.shape[-1] > 1 for scale in (of_rows, t["b_scale"]))
        of_rows, of_columns = expanded(of_rows, m, k, 1), expanded(t["b_scale"], n, k, BLOCK)
        a, b = a * of_rows, b * of_columns.t()
        x, magnitude = product(a, b)
        peer = a.float() @ b.float()
        if p["zero"] is not None and k > 0:  # the sums are what the call says, whatever b holds
            of_zero = t["a_zero"].double().reshape(-1, 1) * of_rows[:, :1] * (t["b_sums"].double() * of_columns[:, 0])
            magnitude = magnitude + of_zero.abs()
            x, peer = Bounded(x.value - of_zero, x.error + 2.0**-24 * magnitude), peer - of_zero.float()
        x, magnitude = Bounded(x.value.reshape(wide), x.error.reshape(wide)), magnitude.reshape(wide)
        if self.fp8:
            x = Bounded(x.value, x.error + (FAST if p["fast"] and not by_blocks else PROMOTED) * magnitude)
        c = None if t["c"] is None or p["beta"] == 0.0 else t["c"]
        addends = [None if y is None else factor * y.double().expand(wide) for y, factor in ((c, p["beta"]), (t["bias"], 1.0))]
        x = affine(x, magnitude, 1.0, *addends)
        d = gated(x, p["activation"], "blocks") if self.is_gated else activate(x, p["activation"])
        if p["out_type"] == "codes":
            return [codes("out", d, t["out_scale"])]
        peer = peer.reshape(wide)
        for y in addends:
            peer = peer if y is None else peer + y.float()
        peer = gated_float32(peer, p["activation"], "blocks") if self.is_gated else activate_float32(peer, p["activation"])
        return [result("out", d, self.dtype(p), peer.to(self.dtype(p)))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        own = (FP8,) if self.fp8 else (torch.int8,)
        beside = ("a_scale", "b_scale", "a_zero", "b_sums", "bias", "c", "out", "out_scale")
        lead = tuple(f"lead{i}" for i in range(len(p["lead"])))
        found = {"a": Argument(own, (*lead, "k"), ("b", *beside), ranks=(2, 3, 4, 5)), "b": Argument(own, ("k", "n"), ("a", *beside))}
        for name in ("a_scale", "b_scale"):
            found[name] = Argument((torch.float32, torch.uint8) if self.fp8 else (torch.float32,), (), ranks=tuple(range(6)))
        # A D of 16 bits has the dtype of those of bias and c; else they have it from each other.
        halves = (DTYPES[p["narrow"]],) if p["out_type"] in ("float16", "bfloat16") else HALVES
        if p["zero"] is not None:
            found["a_zero"] = Argument((torch.int32,), (), ("b_sums", "a"), ranks=tuple(range(6)))
            found["b_sums"] = Argument((torch.int32,), ("n",), ("a_zero",))
        if p["bias"]:
            found["bias"] = Argument((*halves, torch.float32), ("n",), ("c",))
        if p["c"] is not None:
            found["c"] = Argument((*halves, torch.float32), (), ("bias",), ranks=tuple(range(len(lead) + 2)))
        if p["form"] == "out":
            found["out"] = Argument((self.dtype(p),), (*lead, "n"), ("out_dtype",))
        if p["out_type"] == "codes":
            found["out_scale"] = Argument((torch.float32,), ("one",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*WRONG_KERNELS, *(WRONG_ACTIVATIONS if p["out_type"] != "int32" else [])]
        found.append(("out_dtype", torch.float64, "out_dtype"))
        if not self.is_gated:
            found += wrong_scalars("beta")
            if p["c"] is None:
                found.append(("beta", 1.0, "c"))
        return found


SCALED_GEMM_FAMILIES = tuple(ScaledGemm(fp8, is_gated) for fp8 in (True, False) for is_gated in (False, True))
