"""minfer.w4a16_decoder_block, fp8_decoder_block and decoder_block: what lies between two attentions, of any number of rows, in one launch
and by the operators."""

from __future__ import annotations

import math

import minfer
import torch
from torch import Tensor

from tests.decoder_block.cases import WEIGHTS, Steps, Truth
from tests.decoder_block.dense_cases import DenseSteps
from tests.decoder_block.fp8_cases import Fp8Steps

from .. import arena
from ..compare import Expected, name_of
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters, WrongTensors
from ..truth import weights
from ..truth.epilogue import ACTIVATIONS
from .attention import DTYPES, HALVES
from .fused import RANKS, WRONG_EPS
from .gemm import WRONG_ACTIVATIONS, WRONG_KERNELS, draw_addend, wrong_scalars
from .quantized_gemm import fill_weight, pack
from .scaled_gemm import BLOCK, FP8, blocks_of, expanded

BIASES = ("o_bias", "down_bias", "next_bias")


class DecoderBlock(Family):
    """The residual is held to the errors of the whole chain, the result to those of what follows from the residual that was stored."""

    name = "w4a16_decoder_block"
    options = ("eps", "weight_offset", "group_size", "activation")
    spread = 1.0
    share = 1.5
    views = dict.fromkeys(("a", "mlp_norm", "next_norm", *BIASES), arena.ANY) | {"residual": arena.DENSE}
    in_place = ("residual",)

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        unit = 128 if draw.chance(0.5) else 8  # one launch takes whole groups
        most = (400 if limits.small else 5000) // unit
        while True:
            m = draw.weighted({1: 3, 2: 2, draw.extent(16): 1, draw.extent(60 if limits.small else 600): 2})
            k, h, inter = (unit * draw.extent(most, zero=0.02) for _ in range(3))
            n = 8 * draw.extent(most * unit // 8, zero=0.02)
            products = (h * k, 2 * inter * h, h * inter, n * h)
            if max(products) <= limits.elements and m * sum(products) <= limits.work and m * max(k, h, 2 * inter, n) <= limits.elements:
                break
        dtype = name_of(draw.choice(HALVES))
        p: Parameters = {"dtype": dtype, "k": k, "h": h, "inter": inter, "n": n} | self.draw_format(draw)
        p["lead"] = draw.weighted({(m,): 6, (1, m): 1, (m, 1): 0.5, (): 0.5})
        p |= {name: draw_addend(draw, dtype) if draw.chance(0.4) else None for name in BIASES}
        p |= {"activation": draw.weighted({"silu": 4} | dict.fromkeys(ACTIVATIONS, 1)), "constant": draw.chance(1 / 3)}
        p |= {"eps": draw.pick(1e-6, 1e-5, 0.1), "weight_offset": draw.pick(0.0, 0.0, 1.0, -0.3), "loud": draw.chance(0.2)}
        return p | {"by": draw.weighted({None: 2, "separate": 1, "one_launch": 2})}

    def draw_format(self, draw: Draw) -> Parameters:
        """Of the weights."""
        group_size = draw.weighted({-1: 2, 32: 1, 128: 4, 256: 2, 2**40: 0.1})
        return {"format": "int4", "zeros": "none", "group_size": group_size}

    def sizes(self, p: Parameters) -> dict[str, tuple[int, int]]:
        return {"o": (p["h"], p["k"]), "gate_up": (2 * p["inter"], p["h"]), "down": (p["h"], p["inter"]), "next": (p["n"], p["h"])}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        dtype, h = DTYPES[p["dtype"]], p["h"]
        a = data.normal(*p["lead"], p["k"])
        if p["loud"]:
            a[..., ::37] *= 100  # activations have channels that are large in every token
        tensors: dict[str, Tensor | None] = {"a": a.to(dtype), "residual": data.normal(*p["lead"], h, dtype=dtype)}
        tensors |= {name: data.normal(h, dtype=dtype) for name in ("mlp_norm", "next_norm")}
        facts = {}
        for name, (n, k) in self.sizes(p).items():
            own, facts[name] = self.fill_weight(p, data, name, n, k)
            tensors |= own
        for name in BIASES:
            size = p["n"] if name == "next_bias" else h
            tensors[name] = None if p[name] is None else data.normal(size, dtype=DTYPES[p[name]])
        return Contents(tensors, facts)

    def fill_weight(self, p: Parameters, data: Data, name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        """Its tensors, and what the truth needs beside them."""
        w = fill_weight(p, data, n, k, 1.0 / math.sqrt(max(k, 1)))
        return {f"{name}_qweight": pack(w["codes"], "int4"), f"{name}_scales": w["scales"]}, w["codes"]

    def exact(self, p: Parameters, contents: Contents, name: str) -> Tensor:
        """A weight in float64."""
        scales = contents.tensors[f"{name}_scales"]
        return weights.weight(contents.facts[name], scales, None, "int4", p["group_size"]).value.view(self.sizes(p)[name])

    def steps(self, p: Parameters) -> Steps:
        return Steps(DTYPES[p["dtype"]])

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        operator = getattr(minfer, self.name)
        options = {name: p[name] for name in self.options} | {"constant_weights": p["constant"]}
        arguments = {name: x for name, x in t.items() if name not in ("a", "residual")} | options | p.get("extra", {})
        operands = (t["a"], t["residual"])
        if p["by"] is None or "kernel" in arguments:
            return {"out": operator(*operands, **arguments), "residual": t["residual"]}
        try:
            found = operator(*operands, **arguments, kernel=p["by"])
        except RuntimeError as error:  # what one launch does not take
            if p["by"] != "one_launch" or "one launch" not in str(error).replace("_", " "):
                raise
            found = operator(*operands, **arguments)
        return {"out": found, "residual": t["residual"]}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, dtype, m = contents.tensors, DTYPES[p["dtype"]], math.prod(p["lead"])
        dense = {name: self.exact(p, contents, name) for name in WEIGHTS}
        truth = Truth(
            self.steps(p),
            t["a"].reshape(m, p["k"]),
            before["residual"].reshape(m, p["h"]),
            dense,
            {"mlp": t["mlp_norm"], "next": t["next_norm"]},
            {name: t.get(f"{name}_bias") for name in ("o", "down", "next")},
            {name: p[name] for name in ("eps", "weight_offset", "activation")},
        )
        found = truth.of_residual()
        shape, usual = (*p["lead"], p["h"]), self.spread * float(found.deviation.norm())
        peer = found.value.to(dtype).view(shape)
        residual = Expected("residual", dtype, found.value.view(shape), truth.residual_bound(found).view(shape), peer, usual=usual)
        exact, bound = truth.returned(have["residual"].reshape(m, p["h"]))
        return [residual, Expected("out", dtype, exact.view(*p["lead"], p["n"]), bound.view(*p["lead"], p["n"]))]

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        lead = tuple(f"mode {i}" for i in range(len(p["lead"])))
        scales = tuple(f"{name}_scales" for name in WEIGHTS)
        found = {"a": Argument(HALVES, (*lead, ""), ("residual", *scales, "k "), ranks=RANKS)}
        found["residual"] = Argument((dtype,), (*lead, "h"), (*scales, *(f"{name}_qweight" for name in WEIGHTS)))
        found |= {name: Argument((dtype,), ("h",)) for name in ("mlp_norm", "next_norm")}
        for name in WEIGHTS:
            found[f"{name}_qweight"] = Argument((torch.int32,), ("", "", ""), (f"{name}_scales",))
            columns = "h" if name in ("o", "down") else "n" if name == "next" and p["next_bias"] else ""
            found[f"{name}_scales"] = Argument((dtype,), ("", columns), (f"{name}_qweight", *BIASES))
        for name in BIASES:
            if p[name]:
                found[name] = Argument((dtype, torch.float32), ("n" if name == "next_bias" else "h",))
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        found: list[WrongTensors] = []
        for name in WEIGHTS:
            scales = tensors[f"{name}_scales"]
            if scales.shape[1] >= 8:
                found.append((f"{name}_scales have four columns less", {f"{name}_scales": scales[:, :-4]}, (f"{name}_", "down_")))
        residual = tensors["residual"]
        if residual.dim() > 1 and residual.numel() > residual.shape[-1] > 1:
            found.append(("the residual is padded", {"residual": torch.cat([residual, residual], -1)[..., : p["h"]]}, ("residual",)))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("weight_offset"), *WRONG_EPS, *WRONG_ACTIVATIONS, *WRONG_KERNELS]
        found += [("kernel", name, "kernel") for name in ("two_launches", "one_launch@threads=1", "dequantize")]
        return found + [("group_size", x, "group_size") for x in (0, -2, 8, 48, 2**40 + 1)]


def _fewer_columns(tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
    found: list[WrongTensors] = []
    for name in WEIGHTS:
        weight = tensors[f"{name}_weight"]
        if weight.shape[1] > 1:
            found.append((f"{name}_weight has a column less", {f"{name}_weight": weight[:, :-1]}, (f"{name}_weight",)))
    return found


class Fp8DecoderBlock(DecoderBlock):
    """Scales of each kind, all weights' of one or each of its own."""

    name = "fp8_decoder_block"
    options = ("eps", "weight_offset", "activation")
    spread = 2.0  # rows that are the same are off by the same, and that is much here

    def draw_format(self, draw: Draw) -> Parameters:
        kinds = {"one": 1, "lines": 2, "blocks": 3}
        one = draw.weighted(kinds)
        mixed = draw.chance(0.2)
        return {"kinds": {name: draw.weighted(kinds | {"exponents": 1}) if mixed else one for name in WEIGHTS}}

    def fill_weight(self, p: Parameters, data: Data, name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        kind, gated = p["kinds"][name], name == "gate_up"
        blocks = (2, blocks_of(n // 2), blocks_of(k)) if gated else (blocks_of(n), blocks_of(k))
        shape = {"one": (1,), "lines": (n,)}.get(kind, blocks)
        size = 1.0 / (16.0 * math.sqrt(max(k, 1)))
        if kind == "exponents" and math.prod(shape) > 1 and shape != (n, 1):
            middle = 127 + round(math.log2(size))
            scale = data.integers(middle - 1, middle + 2, *shape, dtype=torch.uint8)
        else:
            scale = data.uniform(*shape, low=0.5 * size, high=1.5 * size)
        codes = data.normal(n, k, dtype=torch.float32, scale=16.0).to(FP8)
        return {f"{name}_weight": codes, f"{name}_scale": scale}, torch.empty(0)

    def exact(self, p: Parameters, contents: Contents, name: str) -> Tensor:
        codes = contents.tensors[f"{name}_weight"]
        return codes.double() * expanded(contents.tensors[f"{name}_scale"], *codes.shape, BLOCK)

    def steps(self, p: Parameters) -> Steps:
        """Activations are coded by tokens where one of the weights has them so: what is off is not less in blocks."""
        blocks = all(kind in ("blocks", "exponents") for kind in p["kinds"].values())
        return Fp8Steps(DTYPES[p["dtype"]], separate=False, columns=BLOCK if blocks else None)

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        lead = tuple(f"mode {i}" for i in range(len(p["lead"])))
        codes, scales = (tuple(f"{name}_{part}" for name in WEIGHTS) for part in ("weight", "scale"))
        found = {"a": Argument(HALVES, (*lead, ""), ("residual", *codes), ranks=RANKS)}
        found["residual"] = Argument((dtype,), (*lead, "h"), (*codes, *scales))
        found |= {name: Argument((dtype,), ("h",)) for name in ("mlp_norm", "next_norm")}
        for name in WEIGHTS:
            found[f"{name}_weight"] = Argument((FP8,), ("", ""), (*codes, *scales, *BIASES))
            dtypes = (torch.float32, torch.uint8) if p["kinds"][name] in ("blocks", "exponents") else (torch.float32,)
            found[f"{name}_scale"] = Argument(dtypes, ("",) * (3 if name == "gate_up" else 2), (f"{name}_scale",), ranks=range(4))
        for name in BIASES:
            if p[name]:
                found[name] = Argument((dtype, torch.float32), ("n" if name == "next_bias" else "h",))
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        return _fewer_columns(tensors)

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("weight_offset"), *WRONG_EPS, *WRONG_ACTIVATIONS, *WRONG_KERNELS]
        return found + [("kernel", name, "kernel") for name in ("two_launches", "one_launch@threads=1", "dequantize")]


class DenseDecoderBlock(DecoderBlock):
    name = "decoder_block"
    options = ("eps", "weight_offset", "activation")

    def draw_format(self, draw: Draw) -> Parameters:
        return {}

    def fill_weight(self, p: Parameters, data: Data, name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        weight = data.normal(n, k, dtype=torch.float32, scale=1.0 / math.sqrt(max(k, 1))).to(DTYPES[p["dtype"]])
        return {f"{name}_weight": weight}, torch.empty(0)

    def exact(self, p: Parameters, contents: Contents, name: str) -> Tensor:
        return contents.tensors[f"{name}_weight"].double()

    def steps(self, p: Parameters) -> Steps:
        return DenseSteps(DTYPES[p["dtype"]])

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        dtype = DTYPES[p["dtype"]]
        lead = tuple(f"mode {i}" for i in range(len(p["lead"])))
        weights = tuple(f"{name}_weight" for name in WEIGHTS)
        found = {"a": Argument(HALVES, (*lead, ""), ("residual", *weights), ranks=RANKS)}
        found["residual"] = Argument((dtype,), (*lead, "h"), weights)
        found |= {name: Argument((dtype,), ("h",)) for name in ("mlp_norm", "next_norm")}
        found |= {name: Argument((dtype,), ("", ""), (*weights, *BIASES)) for name in weights}
        for name in BIASES:
            if p[name]:
                found[name] = Argument((dtype, torch.float32), ("n" if name == "next_bias" else "h",))
        return found

    def wrong_tensors(self, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
        return _fewer_columns(tensors)

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found = [*wrong_scalars("weight_offset"), *WRONG_EPS, *WRONG_ACTIVATIONS, *WRONG_KERNELS]
        return found + [("kernel", name, "kernel") for name in ("two_launches", "one_launch@threads=1", "dequantize")]
