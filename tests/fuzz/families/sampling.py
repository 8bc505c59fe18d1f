"""minfer.sample."""

from __future__ import annotations

import math

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters
from ..truth import sampling as truth
from .attention import DTYPES, HALVES

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OF_ROWS = {name: ("penalties".join(name.rsplit("penalty", 1)) if "penalty" in name else f"{name}s") for name in NUMBERS}
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
INTEGERS = {"top_k": torch.int32, "seed": torch.int64, "offset": torch.int64}


class Sample(Family):
    name = "sample"
    share = 2.0
    views = {name: arena.ANY for name in ("logits", "counts", "bias", "allowed", *OF_ROWS.values(), *(f"{name}s" for name in INTEGERS))}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"dtype": draw.pick("float16", "bfloat16", "float32"), "rows": draw.extent(4 if limits.small else 40, zero=0.04)}
        p["vocabulary"] = max(draw.extent(3000 if limits.small else 140000, tiles=(8, 32, 4096, 16384)), 1)
        while p["rows"] * p["vocabulary"] > min(limits.elements, 1 << 19):
            p["rows"] //= 2
        p["logits"] = draw.weighted({"normal": 5, "ties": 2, "sharp": 1, "flat": 1, "special": 1.5})
        p |= {"counts": draw.chance(0.3), "bias": draw.pick(None, None, "row", "rows"), "allowed": draw.pick(None, None, "bool", "bits")}
        p["one_mask"] = draw.chance(0.3)
        p["tensors"] = [name for name in (*OF_ROWS, *INTEGERS) if draw.chance(0.4)]
        if not p["counts"]:
            p["tensors"] = [name for name in p["tensors"] if name not in NEUTRAL]
        p["top_logprobs"] = min(draw.pick(0, 0, 1, 5, 128), p["vocabulary"])
        return p | {f"{name} value": self.number(name, draw, p) for name in (*OF_ROWS, *INTEGERS)}  # of all rows, without a tensor

    def number(self, name: str, draw: Draw, p: Parameters) -> float:
        if name in NEUTRAL and not p["counts"]:
            return NEUTRAL[name]
        return {
            "temperature": lambda: draw.pick(1.0, 1.0, 0.7, 0.0, -0.0, 1.5),
            "top_p": lambda: draw.pick(1.0, 1.0, 0.9, 0.5, 0.05),
            "min_p": lambda: draw.pick(0.0, 0.0, 0.0, 0.07),
            "repetition_penalty": lambda: draw.pick(1.0, 1.25, 0.8),
            "presence_penalty": lambda: draw.pick(0.0, 0.5, -0.25),
            "frequency_penalty": lambda: draw.pick(0.0, 0.5, -0.25),
            "top_k": lambda: draw.pick(0, -1, 1, 5, 50, 128, 129, 1000),
            "seed": lambda: draw.randint(-(2**63), 2**63 - 1),
            "offset": lambda: draw.randint(0, 2**63 - 1),
        }[name]()

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        rows, vocabulary = p["rows"], p["vocabulary"]
        logits = data.normal(rows, vocabulary, scale={"sharp": 15.0, "flat": 0.01}.get(p["logits"], 2.0))
        if p["logits"] == "ties":
            logits.round_()
        if p["logits"] == "special":
            kind, of_row = data.uniform(rows, vocabulary), data.uniform(rows, 1)
            logits[(kind < 0.5) & (of_row < 0.5)] = -math.inf
            logits[(kind > 0.9) & (of_row > 0.8)] = math.nan
            logits[(kind > 0.9) & (of_row > 0.6) & (of_row < 0.7)] = math.inf
        t: dict[str, Tensor | None] = {"logits": logits.to(DTYPES[p["dtype"]]), "counts": None, "bias": None, "allowed": None}
        of_mask = 1 if p["one_mask"] else rows
        if p["counts"]:
            t["counts"] = data.integers(-1, 3, rows, vocabulary, dtype=torch.int32)
        if p["bias"] is not None:
            t["bias"] = data.normal(1 if p["bias"] == "row" else rows, vocabulary)
        if p["allowed"] == "bool":
            t["allowed"] = data.uniform(of_mask, vocabulary) < 0.6
        elif p["allowed"] == "bits":
            t["allowed"] = data.integers(-(2**31), 2**31, of_mask, -(-vocabulary // 32), dtype=torch.int32)
        device = logits.device
        for name in (*OF_ROWS, *INTEGERS):
            given = [self.number(name, draw, p) for _ in range(rows)]  # other ones in each contents of the same call
            of_rows = torch.tensor(given, dtype=INTEGERS.get(name, torch.float32), device=device)
            t[OF_ROWS.get(name, f"{name}s")] = of_rows if name in p["tensors"] else None
        return Contents(t)

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        options = {name: p[f"{name} value"] for name in (*OF_ROWS, *INTEGERS) if name not in p["tensors"]}
        options |= {name: x for name, x in t.items() if name != "logits"} | {"top_logprobs": p["top_logprobs"]} | p.get("extra", {})
        return dict(zip(("ids", "logprobs", "top_ids", "top_logprobs"), minfer.sample(t["logits"], **options), strict=True))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        t, device = contents.tensors, have["ids"].device
        rows, n = p["rows"], p["top_logprobs"]
        ids = torch.full((rows,), -1, dtype=torch.int64)
        top_ids = torch.full((rows, n), -1, dtype=torch.int64)
        logits = t["logits"].cpu().float()
        exact = logits.double().log_softmax(-1)
        for row in range(rows):
            if not logits[row].isnan().any():
                top_ids[row] = logits[row].sort(descending=True, stable=True).indices[:n]
            numbers = {name: self.value(name, p, t, row) for name in (*OF_ROWS, *INTEGERS)}
            v = self.changed(p, t, logits[row], row, numbers)
            temperature = numbers["temperature"]
            if v.isnan().any() or v.max() == -math.inf or (temperature > 0 and v.max() == math.inf):
                continue
            rules = [torch.tensor(numbers[name]).item() for name in ("temperature", "top_k", "top_p", "min_p")]
            token = int(have["ids"][row]) if have["ids"].shape == (rows,) else -1
            good = truth.accepts(token, v, *rules, numbers["seed"], numbers["offset"])
            ids[row] = token if good else int(v.argmax())
        at = ids.clamp(min=0)[:, None]
        logprobs = torch.where(ids >= 0, exact.gather(1, at)[:, 0], math.nan)
        tops = torch.where(top_ids >= 0, exact.gather(1, top_ids.clamp(min=0)), math.nan)

        def bound(x: Tensor) -> Tensor:
            return (2e-5 + 1e-6 * x.abs().nan_to_num(0.0, 0.0, 0.0)).to(device)

        return [
            Expected("ids", torch.int64, ids.to(device)),
            Expected("logprobs", torch.float32, logprobs.to(device), bound(logprobs)),
            Expected("top_ids", torch.int64, top_ids.to(device)),
            Expected("top_logprobs", torch.float32, tops.to(device), bound(tops)),
        ]

    def value(self, name: str, p: Parameters, t: dict[str, Tensor | None], row: int) -> float:
        of_rows = t[OF_ROWS.get(name, f"{name}s")]  # a view may repeat one row's
        return p[f"{name} value"] if of_rows is None else of_rows[row].item()

    def changed(self, p: Parameters, t: dict[str, Tensor | None], v: Tensor, row: int, numbers: dict[str, float]) -> Tensor:
        """A row behind mask, bias and penalties, as documented, in float32."""

        def of_row(x: Tensor) -> Tensor:
            return x[0 if x.shape[0] == 1 else row].cpu()

        if p["allowed"] == "bool":
            v = torch.where(of_row(t["allowed"]), v, -math.inf)
        elif p["allowed"] == "bits":
            tokens = torch.arange(len(v))
            v = torch.where((of_row(t["allowed"]).long()[tokens // 32] >> tokens % 32 & 1) != 0, v, -math.inf)
        if t["bias"] is not None:
            v = v + of_row(t["bias"])
        if t["counts"] is not None:
            counts = of_row(t["counts"])
            repetition, presence, frequency = (torch.tensor(numbers[name]) for name in NEUTRAL)
            v = torch.where(counts != 0, torch.where(v > 0, v / repetition, v * repetition), v)
            v = torch.where(counts > 0, v - (frequency * counts + presence), v)
        return v

    # ---- calls that cannot be right ------------------------------------------------------------------------------------------------------

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        others = tuple(OF_ROWS.values()) + tuple(f"{name}s" for name in INTEGERS) + ("counts", "bias", "allowed", "top_logprobs")
        found = {"logits": Argument((*HALVES, torch.float32), ("", ""), others)}
        for name in p["tensors"]:
            dtype = INTEGERS.get(name, torch.float32)
            found[OF_ROWS.get(name, f"{name}s")] = Argument((dtype,), ("rows",))
        if p["counts"]:
            found["counts"] = Argument((torch.int32,), ("rows", "vocabulary"))
        if p["bias"] is not None:
            found["bias"] = Argument((torch.float32,), ("", "vocabulary"))
        if p["allowed"] == "bool":
            found["allowed"] = Argument((torch.bool, torch.int32), ("", ""))
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        found: list[tuple[str, object, str]] = [("top_logprobs", value, "top_logprobs") for value in (-1, 129, p["vocabulary"] + 1)]
        found += [("top_k", value, "top_k") for value in (-2, 2**31)]
        for name in ("temperature", "top_p", "min_p", *(NEUTRAL if p["counts"] else ())):
            found += [(name, value, name) for value in (math.nan, math.inf)]
        return found + [("top_p", 1.5, "top_p"), ("min_p", -0.5, "min_p"), ("temperature", -0.5, "temperature")]
