"""minfer.moe_router, moe_router_gemm, moe_sort and moe_combine."""

from __future__ import annotations

import math

import minfer
import torch
from torch import Tensor

from .. import arena
from ..compare import Expected, accumulation, name_of, smallest, unit
from ..draw import Data, Draw, Limits
from ..family import Argument, Contents, Family, Parameters
from ..truth.routing import also_a_choice, exact_choice, scores_of
from .attention import DTYPES, HALVES
from .gemm import wrong_scalars

INT_GARBAGE = (-1, -7, -(2**31), 2**31 - 1, 10**6)


def draw_rules(draw: Draw, limits: Limits) -> Parameters:
    experts = draw.weighted({8: 2, 60: 1, 64: 2, 128: 2, 256: 2, 384: 1, 1024: 0.5, 1: 0.5, draw.randint(1, 300): 2})
    groups = [g for g in (1, 2, 4, 8, 16) if experts % g == 0]
    n_group = draw.choice(groups) if draw.chance(0.4) else 1
    topk_group = draw.randint(1, n_group)
    most = min(experts, 32, experts // n_group * topk_group)
    top_k = draw.choice([k for k in (1, 2, 4, 6, 8, 32, draw.randint(1, most)) if k <= most])
    p: Parameters = {"experts": experts, "top_k": top_k, "n_group": n_group, "topk_group": topk_group}
    p |= {"scoring": draw.pick("softmax", "sigmoid"), "renormalize": draw.chance(0.6), "bias": draw.chance(0.35)}
    p["scale"] = draw.pick(1.0, 1.0, 2.5, -0.5, 0.0)
    p["tokens"] = draw.extent(60 if limits.small else 3000, zero=0.04, tiles=(8, 16, 64))
    return p


RULES = ("scoring", "renormalize", "n_group", "topk_group", "scale")


class Router(Family):
    """``error_of``: of each logit."""

    def expect_routes(self, p: Parameters, logits: Tensor, error: Tensor, bias: Tensor | None, have: dict[str, Tensor]) -> list[Expected]:
        """``logits`` float64 [tokens, experts]; scores are float32, and so is their sum with a bias."""
        nan = logits.isnan()
        known = logits.masked_fill(nan, -math.inf)
        scores = scores_of(known, p["scoring"])
        # The exponential's argument is rounded; a score is off by its logit's error and this.
        finite = torch.where(known.isfinite(), known, 0.0)
        distance = finite.abs() if p["scoring"] == "sigmoid" else (finite.amax(1, keepdim=True) - finite).abs()
        relative = 4 * error + 2.0**-22 * (p["experts"] / 32 + 32 + distance)  # docs/numerics.md, 6.1
        choice, choice_error = known, error
        if bias is not None:
            choice = (scores + bias.double()).masked_fill(nan, -math.inf)
            choice_error = relative * scores + 2.0**-23 * (scores + bias.double().abs())
        rules = (p["n_group"], p["topk_group"], bias is not None)
        ids = exact_choice(choice, p["top_k"], *rules)
        different = (have["ids"].long() != ids).any(1).nonzero()[:, 0].tolist() if have["ids"].shape == ids.shape else []
        for token in different:
            theirs = have["ids"][token].tolist()
            own, own_error = choice[token].cpu(), choice_error[token].cpu()
            if float(own_error.max()) > 0 and also_a_choice(theirs, own, own_error, *rules):
                ids[token] = have["ids"][token].long()
        truth, spread = scores.gather(1, ids), relative.gather(1, ids).amax(1, keepdim=True)
        total = truth.sum(1, keepdim=True)
        if p["renormalize"]:
            truth = torch.where(total > 0, truth / total.clamp(min=1e-300), 0.0)
            spread = 1.5 * spread
        bound = abs(p["scale"]) * (truth * spread + 2.0**-22 * truth + 2.0**-120)
        truth = (p["scale"] * truth).masked_fill(nan.any(1, keepdim=True), math.nan)
        return [Expected("ids", torch.int32, ids), Expected("weights", torch.float32, truth, bound)]

    def rules(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, object]:
        return {name: p[name] for name in ("top_k", *RULES)} | {"correction_bias": t["correction_bias"]} | p.get("extra", {})

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        experts = p["experts"]
        found = [
            *wrong_scalars("scale"),
            ("top_k", 0, "top_k"),
            ("top_k", -1, "top_k"),
            ("top_k", 33, "top_k"),
            ("top_k", experts + 1, "top_k"),
        ]
        found += [("scoring", "Softmax", "scoring"), ("scoring", "", "scoring"), ("n_group", 0, "n_group"), ("n_group", -1, "n_group")]
        found += [("n_group", experts + 1, "n_group"), ("topk_group", 0, "topk_group"), ("topk_group", p["n_group"] + 1, "topk_group")]
        return found


class MoeRouter(Router):
    name = "moe_router"
    share = 1.5
    views = {"logits": arena.ANY, "correction_bias": arena.ANY}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"dtype": draw.pick("float16", "bfloat16", "float32")} | draw_rules(draw, limits)
        p["logits"] = draw.weighted({"normal": 5, "ties": 2, "sharp": 1, "special": 1.5})
        return p

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        shape = (p["tokens"], p["experts"])
        logits = data.normal(*shape, scale={"sharp": 10.0}.get(p["logits"], 1.5))
        if p["logits"] == "ties":
            logits = logits.mul_(2).round_()
        if p["logits"] == "special":
            kind = data.uniform(*shape)
            rows = data.uniform(shape[0], 1)
            for value, share in ((math.inf, 0.02), (-math.inf, 0.1)) if not p["bias"] else ():
                logits[(kind < share) & (rows < 0.5)] = value
            logits[(kind > 0.98) & (rows > 0.8)] = math.nan
            logits[(rows[:, 0] > 0.45) & (rows[:, 0] < 0.5)] = -math.inf if not p["bias"] else 0.0
        bias = data.normal(p["experts"], scale=0.2) if p["bias"] else None
        return Contents({"logits": logits.to(DTYPES[p["dtype"]]), "correction_bias": bias})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        weights, ids = minfer.moe_router(t["logits"], **self.rules(p, t))
        return {"weights": weights, "ids": ids}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        logits = contents.tensors["logits"].double()
        return self.expect_routes(p, logits, torch.zeros_like(logits), contents.tensors["correction_bias"], have)

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        experts = "experts" if p["bias"] else ""
        found = {"logits": Argument((*HALVES, torch.float32), ("", experts), ("correction_bias", "top_k", "n_group"))}
        if p["bias"]:
            found["correction_bias"] = Argument((torch.float32,), ("experts",))
        return found


class MoeRouterGemm(Router):
    name = "moe_router_gemm"
    share = 1.5
    views = {"x": arena.ANY, "w_gate": arena.ANY, "correction_bias": arena.ANY}

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        while True:
            p: Parameters = {"dtype": name_of(draw.choice(HALVES))} | draw_rules(draw, limits)
            p["hidden"] = draw.extent(700 if limits.small else 8200, zero=0.02)
            if max(p["tokens"], p["experts"]) * p["hidden"] <= limits.elements:
                return p

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        dtype = DTYPES[p["dtype"]]
        x = data.normal(p["tokens"], p["hidden"], dtype=dtype)
        w = data.normal(p["experts"], p["hidden"], dtype=dtype, scale=1.5 / math.sqrt(max(p["hidden"], 1)))
        return Contents({"x": x, "w_gate": w, "correction_bias": data.normal(p["experts"], scale=0.2) if p["bias"] else None})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        weights, ids = minfer.moe_router_gemm(t["x"], t["w_gate"], **self.rules(p, t))
        return {"weights": weights, "ids": ids}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        x, w = (contents.tensors[name].double() for name in ("x", "w_gate"))
        error = accumulation(p["hidden"]) * (x.abs() @ w.abs().t())
        return self.expect_routes(p, x @ w.t(), error, contents.tensors["correction_bias"], have)

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        experts = "experts" if p["bias"] else ""
        found = {
            "x": Argument(HALVES, ("", "hidden"), ("w_gate",)),
            "w_gate": Argument((DTYPES[p["dtype"]],), (experts, "hidden"), ("x", "correction_bias", "top_k", "n_group")),
        }
        if p["bias"]:
            found["correction_bias"] = Argument((torch.float32,), ("experts",))
        return found


def draw_ids(kind: str, tokens: int, top_k: int, experts: int, data: Data) -> Tensor:
    """int32 [tokens, top_k], as routers give them and expert parallelism drops them."""
    ids = data.uniform(tokens, max(experts, top_k)).argsort(1)[:, :top_k] % experts
    if kind == "one":
        ids = (torch.arange(top_k, device=data.device) * max(1, experts // max(top_k, 1)) % experts).expand(tokens, top_k)
    elif kind == "few":
        ids = ids % max(1, experts // 8) * 4 % experts
    ids = ids.to(torch.int32).contiguous()
    if kind in ("dropped", "nobody"):
        outside = torch.tensor([*INT_GARBAGE, experts, experts + 5], dtype=torch.int32, device=data.device)
        gone = data.uniform(tokens, top_k) < (0.6 if kind == "dropped" else 2.0)
        ids = torch.where(gone, outside[data.integers(0, len(outside), tokens, top_k)], ids)
    return ids


ID_KINDS = {"random": 4, "one": 1, "few": 1, "dropped": 2, "nobody": 0.5}


class MoeSort(Family):
    name = "moe_sort"
    share = 1.0

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        p: Parameters = {"tokens": draw.extent(300 if limits.small else 20000, zero=0.04, tiles=(32, 64, 256, 1024))}
        p |= {"top_k": draw.weighted({1: 1, 2: 2, 4: 1, 8: 2, 32: 0.5, 0: 0.1, 40: 0.2}), "ids": draw.weighted(ID_KINDS)}
        p["experts"] = draw.weighted({8: 2, 64: 1, 128: 2, 256: 1, 512: 1, 1024: 1, 1: 0.5, draw.randint(1, 1024): 2})
        return p | {"weights": draw.chance(0.6)}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        ids = draw_ids(p["ids"], p["tokens"], p["top_k"], p["experts"], data)
        return Contents({"ids": ids, "weights": data.normal(*ids.shape) if p["weights"] else None})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        names = ("token_index", "offsets", "inverse", "sorted_weights")
        options = {"num_experts": p["experts"]} | p.get("extra", {})
        return dict(zip(names, minfer.moe_sort(t["ids"], **options, weights=t["weights"]), strict=True))

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        ids, weights, experts = contents.tensors["ids"].flatten().long(), contents.tensors["weights"], p["experts"]
        valid = (ids >= 0) & (ids < experts)
        place = valid.nonzero()[:, 0]
        # Stable: by expert, then by the pair's own place.
        order = place[(ids[place] * ids.shape[0] + place).argsort()]
        pairs, used = ids.shape[0], order.shape[0]
        token_index = torch.zeros(pairs, dtype=torch.int32, device=ids.device)
        token_index[:used] = (order // max(p["top_k"], 1)).int()
        inverse = torch.full((pairs,), -1, dtype=torch.int32, device=ids.device)
        inverse[order] = torch.arange(used, dtype=torch.int32, device=ids.device)
        counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).index_add_(0, ids[place], torch.ones_like(place))
        sorted_weights = torch.zeros(0 if weights is None else pairs, device=ids.device)
        if weights is not None:
            sorted_weights[:used] = weights.flatten()[order]
        return [
            Expected("token_index", torch.int32, token_index),
            Expected("offsets", torch.int32, counts.cumsum(0).int()),
            Expected("inverse", torch.int32, inverse.view(p["tokens"], p["top_k"])),
            Expected("sorted_weights", torch.float32, sorted_weights),
        ]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        pairs = ("tokens", "top_k") if p["weights"] else ("", "")
        found = {"ids": Argument((torch.int32,), pairs, ("weights",))}
        if p["weights"]:
            found["weights"] = Argument((torch.float32,), pairs)
        return found

    def wrong_options(self, p: Parameters) -> list[tuple[str, object, str]]:
        return [("num_experts", value, "num_experts") for value in (0, -1, 1025, 2**31)]


class MoeCombine(Family):
    name = "moe_combine"
    share = 1.0

    def draw(self, draw: Draw, limits: Limits) -> Parameters:
        while True:
            tokens = draw.extent(100 if limits.small else 5000, zero=0.04)
            n = draw.extent(300 if limits.small else 8200, zero=0.03)
            top_k = draw.weighted({1: 1, 2: 2, 4: 1, 8: 2, 32: 0.5, 0: 0.1, 40: 0.2})
            rows = draw.pick(tokens * top_k, tokens * top_k, draw.extent(200), tokens * top_k + 7)
            if max(tokens, rows) * n <= limits.elements:
                break
        p: Parameters = {"dtype": draw.pick("float16", "bfloat16", "float32"), "tokens": tokens, "n": n, "top_k": top_k, "rows": rows}
        return p | {"weights": draw.chance(0.6), "dropped": draw.pick(0.0, 0.0, 0.2, 1.0), "repeated": draw.chance(0.2)}

    def fill(self, p: Parameters, draw: Draw, data: Data) -> Contents:
        rows, pairs, device = p["rows"], (p["tokens"], p["top_k"]), data.device
        count = p["tokens"] * p["top_k"]
        outside = torch.tensor([*INT_GARBAGE, rows, rows + 1], dtype=torch.int32, device=device)
        inverse = outside[data.integers(0, len(outside), *pairs)]
        if rows:
            places = data.integers(0, rows, count) if p["repeated"] or count > rows else data.permutation(rows)[:count]
            inverse = torch.where(data.uniform(*pairs) < p["dropped"], inverse, places.view(pairs).int())
        used = torch.zeros(rows, dtype=torch.bool, device=device)
        inside = (inverse >= 0) & (inverse < rows)
        used[inverse[inside].long()] = True
        y = data.normal(rows, p["n"], dtype=DTYPES[p["dtype"]])
        y[~used] = draw.pick(math.nan, math.inf)
        weights = data.normal(*pairs) if p["weights"] else None
        if weights is not None:
            weights[~inside] = math.nan  # what is outside adds nothing
        return Contents({"y": y, "inverse": inverse, "weights": weights})

    def call(self, p: Parameters, t: dict[str, Tensor | None]) -> dict[str, Tensor]:
        return {"out": minfer.moe_combine(t["y"], t["inverse"], t["weights"])}

    def expect(self, p: Parameters, contents: Contents, before: dict[str, Tensor], have: dict[str, Tensor]) -> list[Expected]:
        y, inverse, weights = (contents.tensors[name] for name in ("y", "inverse", "weights"))
        inside = (inverse >= 0) & (inverse < p["rows"])
        truth = torch.zeros(p["tokens"], p["n"], dtype=torch.float64, device=y.device)
        magnitude = torch.zeros_like(truth)
        for j in range(p["top_k"]):
            own = inside[:, j]
            part = y[inverse[own, j].long()].double()
            part = part if weights is None else part * weights[own, j].double()[:, None]
            truth[own] += part
            magnitude[own] += part.abs()
        return [Expected("out", y.dtype, truth, 2.0**-23 * (1 + p["top_k"]) * magnitude + unit(y.dtype) * truth.abs() + smallest(y.dtype))]

    def arguments(self, p: Parameters) -> dict[str, Argument]:
        pairs = ("tokens", "top_k") if p["weights"] else ("", "")
        found = {
            "y": Argument((*HALVES, torch.float32), ("", "")),
            "inverse": Argument((torch.int32,), pairs, ("weights",)),
        }
        if p["weights"]:
            found["weights"] = Argument((torch.float32,), pairs)
        return found


ROUTING_FAMILIES = (MoeRouter(), MoeRouterGemm(), MoeSort(), MoeCombine())
