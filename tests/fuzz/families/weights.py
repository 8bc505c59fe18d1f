"""Packing, dequantising and quantising of weights: minfer.w4a16_pack, w8a16_pack, w4a16_dequantize, w8a16_dequantize, minfer.quantize."""

from __future__ import annotations

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, name_of, smallest, unit
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Hostile, Parameters, WrongTensors
from ..truth import weights
from ..truth.packing import ORDERS, pack4, pack8
from .attention import DTYPES, HALVES
from .gemm import wrong_scalars
from .quantized_gemm import FORMATS, alpha_of, draw_weight, fill_weight, pack, passed_scales


def draw_extents(draw: Draw, limits: Limits) -> tuple[int, int]:
    """n and k, multiples of 8."""
    while True:
        n, k = (8 * draw.extent(most, zero=0.04) for most in ((60, 150) if limits.small else (1000, 2000)))
        if n * k <= limits.elements:
            return n, k


class W4Pack(Family):
    name = "w4a16_pack"
    share = 0.7

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        n, k = draw_extents(draw, limits)
        return {"n": n, "k": k, "format": draw.choice(FORMATS[4])}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        return Contents({"codes": data.integers(0, 16, p["n"], p["k"], dtype=torch.uint8)})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        return {"packed": minfer.w4a16_pack(t["codes"], **({"w4_format": p["format"]} | p.get("extra", {})))}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        return [Expected("packed", torch.int32, pack4(contents.tensors["codes"], ORDERS[p["format"]]))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        return {"codes": Argument((torch.uint8,), ("", ""))}

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [("w4_format", value, "w4_format") for value in ("int3", "", "int8", "fp4")]

    def hostile(self, p: Parameters, contents: Contents, draw: Draw) -> Hostile | None:
        """The CPU refuses codes above 15, CUDA packs their low four bits."""
        codes = contents.tensors["codes"]
        if codes.numel() == 0:
            return None
        at = draw.randrange(codes.numel())
        codes.view(-1)[at] = value = draw.randint(16, 255)
        return Hostile(f"code {at} is {value}", lambda before, have: self.expect(p, contents, before, have))


class W8Pack(Family):
    name = "w8a16_pack"
    share = 0.5

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        n, k = draw_extents(draw, limits)
        return {"n": n, "k": k, "type": draw.pick("uint8", "int8", "float8_e4m3fn")}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        codes = data.integers(0, 256, p["n"], p["k"], dtype=torch.uint8)
        return Contents({"codes": codes.view(getattr(torch, p["type"]))})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        return {"packed": minfer.w8a16_pack(t["codes"])}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        codes = contents.tensors["codes"].view(torch.uint8).long()
        return [Expected("packed", torch.int32, pack8((codes + 128) % 256 if p["type"] == "int8" else codes))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        return {"codes": Argument((torch.uint8, torch.int8, torch.float8_e4m3fn), ("", ""))}


class Dequantize(Family):
    share = 0.7

    def __init__(self, bits: int):
        self.bits = bits
        self.name = f"w{bits}a16_dequantize"

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        n, k = draw_extents(draw, limits)
        p: Parameters = {"dtype": name_of(draw.choice(HALVES)), "n": n, "k": k}
        p |= draw_weight(draw, self.bits, p["dtype"])
        p["alpha"] = alpha_of(draw, p["format"])
        # Byte scales leave the result's type open; bfloat16 is what it is by default.
        p["say_type"] = p["format"] in weights.BYTE_SCALES and draw.chance(0.6)
        p["out_type"] = p["dtype"] if p["say_type"] or p["format"] not in weights.BYTE_SCALES else "bfloat16"
        return p

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        w = fill_weight(p, data, p["n"], p["k"], 1.0)
        tensors = {"qweight": pack(w["codes"], p["format"]), "scales": w["scales"], "zeros": w["zeros"]}
        return Contents(tensors, {"codes": w["codes"]})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: p[name] for name in ("group_size", "alpha", "n", "k")} | {f"w{self.bits}_format": p["format"]}
        if p["say_type"]:
            options["out_dtype"] = DTYPES[p["out_type"]]
        scales = passed_scales(p, t["scales"])
        return {"w": getattr(minfer, self.name)(t["qweight"], scales, t["zeros"], **(options | p.get("extra", {})))}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        """Computed in float32, (code - zero) * (scale * alpha), and rounded once."""
        t, dtype = contents.tensors, DTYPES[p["out_type"]]
        truth = p["alpha"] * weights.weight(contents.facts["codes"], t["scales"], t["zeros"], p["format"], p["group_size"]).value
        return [Expected("w", dtype, truth, truth.abs() * (unit(dtype) * (1 + 2.0**-10) + 2.0**-19) + smallest(dtype))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        stored = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn) if p["format"] in weights.BYTE_SCALES else HALVES
        groups = "groups" if p["zeros"] != "none" else ""
        found = {
            "qweight": Argument((torch.int32,), ("", "", ""), ("scales",)),
            "scales": Argument(stored, (groups, ""), ("qweight", "zeros", "n", "out_dtype")),
        }
        if p["zeros"] != "none":
            found["zeros"] = Argument((DTYPES[p["dtype"]],), ("groups", ""), ("scales",))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("alpha"), ("n", -8, "n"), ("k", -8, "k"), ("n", p["n"] + 8, "scales"), ("n", p["n"] + 4, "scales")]
        found += [("k", p["k"] + 4, "k"), (f"w{self.bits}_format", "int5", f"w{self.bits}_format"), ("group_size", 48, "group_size")]
        if self.bits == 4:
            found.append(("out_dtype", torch.float32, "out_dtype"))
        return found


class Quantize(Family):
    """minfer.quantize.quantize_w4 and quantize_w8, by what they say about the error: half a step of a scale that covers the group's range,
    and with a search no more squared error than without."""

    share = 0.4
    traced = False  # it looks at the weight
    error = ValueError
    # The largest distance of a number in the range from the next code's, in scales.
    FARTHEST = {"int4": 0.5, "nf4": 0.1520, "mxfp4": 2.0, "nvfp4": 1.0, "int8": 0.5, "fp8_e4m3": 16.0}
    LARGEST = {"int4": 7.0, "nf4": 1.0, "mxfp4": 4.0, "nvfp4": 6.0, "int8": 127.0, "fp8_e4m3": 448.0}

    def __init__(self, bits: int):
        self.bits = bits
        self.name = f"quantize_w{bits}"

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        n, k = 8 * draw.randint(1, 12), 8 * draw.randint(1, 60)
        p: Parameters = {"dtype": name_of(draw.choice(HALVES)), "n": n, "k": k} | draw_weight(draw, self.bits, "")
        p |= {"symmetric": p["zeros"] == "none", "size": draw.pick(1.0, 0.02, 30.0), "type": draw.pick("own", "float32")}
        p["zeros"] = "none" if p["symmetric"] else "integers"
        return p

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        dtype = torch.float32 if p["type"] == "float32" else DTYPES[p["dtype"]]
        w = data.normal(p["n"], p["k"], scale=p["size"])
        if not p["symmetric"]:
            w = w + 0.7 * p["size"]
        if draw.chance(0.2):
            w[draw.randrange(p["n"])] = 0.0
        return Contents({"weight": w.to(dtype)})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        found = {}
        for name, clip in (("whole", False), ("searched", True)):
            options = {name: p[name] for name in ("group_size", "symmetric", "format")} | {"clip": clip}
            if p["format"] not in weights.BYTE_SCALES:
                options["dtype"] = DTYPES[p["dtype"]]
            w = getattr(minfer.quantize, self.name)(t["weight"], **(options | p.get("extra", {})))
            # alpha apart: a small one would take float16 weights among its subnormals.
            found[name] = w.dequantize(torch.bfloat16) if p["format"] in weights.BYTE_SCALES else w.dequantize()
        return found

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        w, form = contents.tensors["weight"].double(), p["format"]
        n, k = w.shape
        dtype = torch.bfloat16 if form in weights.BYTE_SCALES else DTYPES[p["dtype"]]
        size = k if p["group_size"] == -1 else min(p["group_size"], k)
        tail = -k % size
        groups = torch.nn.functional.pad(w, (0, tail)).unflatten(1, (-1, size))
        largest = groups.abs().amax(2, keepdim=True)
        spread = groups.amax(2, keepdim=True).clamp(min=0) - groups.amin(2, keepdim=True).clamp(max=0)
        levels = 2.0**self.bits - 1
        step = largest / self.LARGEST[form] if p["symmetric"] else spread / levels
        # An integer zero point moves the range by up to half a step; a scale is rounded to what is stored, so that the ends of the range
        # move.
        farthest = self.FARTHEST[form] + (0.0 if p["symmetric"] else 0.5)
        stored = {"mxfp4": 0.0, "nvfp4": 2.0**-4}.get(form, unit(dtype))
        bound = farthest * step * (1 + stored) + 2 * stored * (largest if p["symmetric"] else spread)
        if form == "nvfp4":  # E4M3 scales of small blocks are subnormal, under the whole weight's alpha
            bound = bound + 6 * 2.0**-9 * w.abs().max() / (6 * 448)
        bound = bound + unit(dtype) * (groups.abs() + bound) + smallest(dtype) + farthest * torch.finfo(dtype).smallest_normal
        back = lambda x: x.expand_as(groups).flatten(1)[:, :k]  # noqa: E731
        off = (have["whole"].double() - w).square()
        rounding = unit(dtype) * w.abs() + smallest(dtype)
        of_group = torch.nn.functional.pad(off, (0, tail)).unflatten(1, (-1, size)).sum(2, keepdim=True).sqrt()
        searched = back(of_group) * (1 + 2.0**-8) + 2 * rounding * size**0.5
        return [Expected("whole", dtype, w, back(bound)), Expected("searched", dtype, w, searched, contiguous=False)]

    def operator_names(self) -> tuple[str, ...]:
        return (f"{self.name}:",)

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        return {"weight": Argument((*HALVES, torch.float32, torch.float64), ("", ""))}

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [("format", x, "format") for x in ("int3", "", *FORMATS[12 - self.bits])]
        found += [("group_size", x, "group_size") for x in (0, -2, 48, 31)]
        if p["format"] not in weights.ZERO:
            found.append(("symmetric", False, "symmetric"))
        if p["format"] not in weights.BYTE_SCALES:
            found.append(("dtype", torch.float32, "dtype"))
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        w = tensors["weight"]
        nan = w.clone()
        nan[-1, -1] = torch.nan
        narrow = {"a row less": w[:-1], "a column less": w[:, :-1], "no rows": w[:0], "a NaN": nan}
        return [(f"weight has {what}", {"weight": x}, ("weight",)) for what, x in narrow.items()]


class PackGateUp(Family):
    """Blocks of 8 gate rows and 8 up rows, and back."""

    name = "pack_gate_up"
    share = 0.3
    traced = False  # no operator: tensors are rearranged by torch
    error = ValueError
    views = {"gate": arena.ANY, "up": arena.ANY}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        shape = (8 * draw.extent(40, zero=0.05),) + ((draw.extent(100),) if draw.chance(0.7) else ())
        return {"dtype": draw.pick(*DTYPES), "shape": shape}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        return Contents({name: data.normal(*p["shape"], dtype=DTYPES[p["dtype"]]) for name in ("gate", "up")})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        packed = minfer.pack_gate_up(t["gate"], t["up"])
        return {"packed": packed} | dict(zip(("gate", "up"), minfer.unpack_gate_up(packed), strict=True))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        gate, up = contents.tensors["gate"], contents.tensors["up"]
        rows = torch.arange(2 * len(gate), device=gate.device)
        own = rows // 16 * 8 + rows % 8
        packed = torch.empty(2 * len(gate), *gate.shape[1:], dtype=gate.dtype, device=gate.device)
        for x, half in ((gate, rows % 16 < 8), (up, rows % 16 >= 8)):
            packed[half] = x[own[half]]
        found = {"packed": packed, "gate": gate, "up": up}
        return [Expected(name, gate.dtype, x.double()) for name, x in found.items()]

    def operator_names(self) -> tuple[str, ...]:
        return ("pack_gate_up:",)

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        modes = ("n", "k")[: len(p["shape"])]
        return {name: Argument((DTYPES[p["dtype"]],), modes, ("gate", "up"), ranks=(1, 2)) for name in ("gate", "up")}


WEIGHT_FAMILIES = (W4Pack(), W8Pack(), Dequantize(4), Dequantize(8), Quantize(4), Quantize(8), PackGateUp())
