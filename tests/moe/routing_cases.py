"""Inputs, float64 definitions and bad arguments that the tests of the routing operators share. The definitions are NumPy's, not torch's."""

from __future__ import annotations

import numpy as np
import torch

TOKENS = (0, 1, 3, 64, 257)
EXPERTS = (8, 32, 60, 64, 128, 256)
TOP_K = (1, 2, 4, 6, 8)
ROUTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# name: (keywords, whether they have a correction_bias); groups are those of 32, 60, 64, 128, 256 and 1000 experts alike
RULES = {
    "softmax": ({}, False),
    "softmax, not renormalised": ({"renormalize": False, "scale": 1.5}, False),
    "softmax and bias": ({}, True),
    "sigmoid": ({"scoring": "sigmoid", "renormalize": False}, False),
    "sigmoid and bias": ({"scoring": "sigmoid", "scale": 2.5}, True),
    "groups": ({"renormalize": False, "n_group": 4, "topk_group": 2, "scale": 16.0}, False),
    "groups and bias": ({"scoring": "sigmoid", "n_group": 4, "topk_group": 2, "scale": 2.5}, True),
}


def make_rules(name: str, experts: int, device="cpu") -> dict:
    keywords, biased = RULES[name]
    return keywords | ({"correction_bias": torch.randn(experts, device=device) * 0.2} if biased else {})


def fits(name: str, experts: int, top_k: int) -> bool:
    """Whether the rules can choose top_k of these experts."""
    keywords, _ = RULES[name]
    n_group = keywords.get("n_group", 1)
    return experts % n_group == 0 and top_k <= experts // n_group * keywords.get("topk_group", 1)


# ---- routers -----------------------------------------------------------------------------------------------------------------


def exact_scores(logits: np.ndarray, scoring: str) -> np.ndarray:
    """Of float64 logits in which NaN has become -inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        if scoring == "sigmoid":
            return np.where(logits < 0, np.exp(-np.abs(logits)), 1.0) / (1 + np.exp(-np.abs(logits)))
        largest = logits.max(1, keepdims=True)
        e = np.where(logits == largest, 1.0, np.exp(logits - largest))
        return e / e.sum(1, keepdims=True)


def exact_ids(choice: np.ndarray, top_k: int, n_group: int, topk_group: int, biased: bool) -> np.ndarray:
    """Experts by descending choice, the lower index first among equals."""
    tokens, experts = choice.shape
    choice = np.where(np.isnan(choice), -np.inf, choice)
    if topk_group < n_group and tokens > 0:
        size = experts // n_group
        ranked = np.sort(choice.reshape(tokens, n_group, size), axis=2)[:, :, ::-1]
        with np.errstate(invalid="ignore"):
            groups = ranked[:, :, : 2 if biased else 1].sum(2)
        groups = np.where(np.isnan(groups), -np.inf, groups)
        stay = np.argsort(-groups, axis=1, kind="stable")[:, :topk_group]
        keep = np.zeros((tokens, n_group), bool)
        np.put_along_axis(keep, stay, True, axis=1)
        choice = np.where(np.repeat(keep, size, axis=1), choice, np.nan)  # NaN is sorted behind -inf's negative
    return np.argsort(-choice, axis=1, kind="stable")[:, :top_k]


def route_mismatch(
    routed,
    logits: torch.Tensor,
    top_k: int,
    *,
    logit_error: float = 0.0,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> str | None:
    """Why ``routed`` is not the route of these float64-exact logits, or None.

    Ids are compared with the exact ones. Where they differ, the choices must be closer than their rounding: what was chosen is not worse
    than what was not, in descending order, and in the groups that may stay. ``logit_error``: of the operator's own logits.
    Weights are compared with the exact ones of the ids that were chosen.
    """
    weights, ids = (x.cpu().numpy() for x in routed)
    exact = logits.detach().cpu().double().numpy()
    tokens, experts = exact.shape
    if weights.shape != (tokens, top_k) or ids.shape != (tokens, top_k) or weights.dtype != np.float32 or ids.dtype != np.int32:
        return f"weights {weights.dtype} {weights.shape}, ids {ids.dtype} {ids.shape}"
    if tokens == 0:
        return None
    if ids.min() < 0 or ids.max() >= experts:
        return f"ids from {ids.min()} to {ids.max()}"
    ordered = np.sort(ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return f"token {int((ordered[:, 1:] == ordered[:, :-1]).any(1).argmax())} has an expert twice"

    nan = np.isnan(exact)
    known = np.where(nan, -np.inf, exact)
    scores = exact_scores(known, scoring)
    biased = correction_bias is not None
    choice = known if not biased else np.where(nan, -np.inf, scores + correction_bias.cpu().double().numpy())
    expected = exact_ids(choice, top_k, n_group, topk_group, biased)
    # A score's relative error is its logit's error; a sum with a bias is rounded once more.
    slack = 2 * logit_error if not biased else 2.0**-20 + 2.0**-22 * np.abs(correction_bias.cpu().numpy()).max() + 2 * logit_error
    for token in np.nonzero((ids != expected).any(1))[0]:
        problem = _not_a_choice(ids[token], choice[token], slack, n_group, topk_group, biased)
        if problem is not None:
            return f"token {token}: ids {ids[token].tolist()}, expected {expected[token].tolist()}: {problem}"

    truth = np.take_along_axis(scores, ids.astype(np.int64), 1)
    if renormalize:
        total = truth.sum(1, keepdims=True)
        truth = np.where(total > 0, truth / np.where(total > 0, total, 1), 0.0)
    truth = truth * scale
    bad_rows = nan.any(1)
    if not np.isnan(weights[bad_rows]).all():
        return "a token with a NaN has weights"
    allowed = (2.0**-17 + 4 * logit_error) * np.abs(truth) + 1e-37 * abs(scale)  # of logits of about 100, whose differences are rounded
    off = ~(np.abs(weights - truth) <= allowed)
    off[bad_rows] = False
    if off.any():
        token, j = (int(x[0]) for x in np.nonzero(off))
        return f"{off.sum()} weights off, first [{token}, {j}]: {weights[token, j]}, expected {truth[token, j]}"
    return None


def _not_a_choice(ids, choice, slack, n_group, topk_group, biased) -> str | None:
    experts = len(choice)
    size = experts // n_group
    choice = np.where(np.isnan(choice), -np.inf, choice)
    eligible = np.ones(experts, bool)
    if topk_group < n_group:
        ranked = np.sort(choice.reshape(n_group, size), axis=1)[:, ::-1]
        groups = ranked[:, : 2 if biased else 1].sum(1)
        order = np.argsort(-groups, kind="stable")
        last, next_best = groups[order[topk_group - 1]], groups[order[topk_group]]
        chosen = set((ids // size).tolist())
        if len(chosen) > topk_group:
            return f"of {len(chosen)} groups"
        if last - next_best <= 2 * slack and slack > 0:
            return None if all(groups[g] >= last - 2 * slack for g in chosen) else "of a worse group"
        eligible = np.isin(np.arange(experts) // size, order[:topk_group])
    if not eligible[ids].all():
        return "of another group"
    chosen = choice[ids]
    if slack == 0:
        return "the order is exact"
    with np.errstate(invalid="ignore"):
        if (chosen[1:] - chosen[:-1] > slack).any():
            return "not in descending order"
        others = choice[eligible & ~np.isin(np.arange(experts), ids)]
        if len(others) and others.max() - chosen.min() > slack:
            return "not the best"
    return None


# ---- sort and combine --------------------------------------------------------------------------------------------------------


def sort_mismatch(result, ids: torch.Tensor, num_experts: int, weights: torch.Tensor | None = None) -> str | None:
    """Why ``result`` is not the stable sort of these pairs, or None; everything is exact."""
    token_index, offsets, inverse, sorted_weights = (x.cpu().numpy() for x in result)
    pairs = ids.cpu().numpy().reshape(-1).astype(np.int64)
    valid = (pairs >= 0) & (pairs < num_experts)
    order = np.argsort(np.where(valid, pairs, num_experts), kind="stable")[: valid.sum()]
    over = len(pairs) - len(order)
    places = np.full(len(pairs), -1)
    places[order] = np.arange(len(order))
    expected = {
        "token_index": np.concatenate([order // max(ids.shape[1], 1), np.zeros(over)]),
        "offsets": np.cumsum(np.bincount(pairs[valid], minlength=num_experts)),
        "inverse": places.reshape(tuple(ids.shape)),
        "sorted_weights": np.zeros(0),
    }
    if weights is not None:
        expected["sorted_weights"] = np.concatenate([weights.cpu().numpy().reshape(-1)[order], np.zeros(over)])
    have = {"token_index": token_index, "offsets": offsets, "inverse": inverse, "sorted_weights": sorted_weights}
    for name, want in expected.items():
        kind = np.float32 if name == "sorted_weights" else np.int32
        if have[name].dtype != kind or have[name].shape != want.shape:
            return f"{name} is {have[name].dtype} {have[name].shape}, expected {want.shape}"
        if not np.array_equal(have[name], want.astype(kind)):
            at = np.argwhere(have[name] != want.astype(kind))[0]
            return f"{name}{at.tolist()} is {have[name][tuple(at)]}, expected {want[tuple(at)]}"
    return None


def make_ids(kind: str, tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """int32 [tokens, top_k]; distinct within a token where a router's would be."""
    if kind == "one-hot":  # every token has the same experts
        return (torch.arange(top_k) * (num_experts // max(top_k, 1)) % num_experts).int().expand(tokens, top_k).contiguous()
    ids = torch.rand(tokens, num_experts).argsort(1)[:, :top_k].int().contiguous()
    if kind == "few":  # most experts are empty
        ids = ids % max(1, num_experts // 8) * 4 % num_experts
    if kind == "dropped":  # expert parallelism: what lies outside is others'
        ids = torch.where(ids < num_experts // 4, ids, -1)
        ids[::3] = num_experts + 5
    if kind == "nobody":
        ids = torch.full_like(ids, -1)
    return ids


ID_KINDS = ("random", "one-hot", "few", "dropped", "nobody")


def combine_mismatch(out, y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None = None) -> str | None:
    """Why ``out`` is not the sum of the chosen rows, or None: each element within half a unit of the truth, plus float32's rounding."""
    if out.dtype != y.dtype or tuple(out.shape) != (inverse.shape[0], y.shape[1]) or not out.is_contiguous():
        return f"{out.dtype} {tuple(out.shape)}, strides {out.stride()}"
    truth = torch.zeros(out.shape, dtype=torch.float64, device=y.device)
    magnitude = torch.zeros_like(truth)
    for j in range(inverse.shape[1]):
        rows = inverse[:, j].long()
        valid = (rows >= 0) & (rows < y.shape[0])
        part = torch.zeros_like(truth)
        part[valid] = y[rows[valid]].double() * (1.0 if weights is None else weights[valid, j].double().unsqueeze(1))
        truth += part
        magnitude += part.abs()
    unit = torch.finfo(out.dtype).eps / 2
    tiny = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    off = ~((out.double() - truth).abs() <= unit * 1.001 * truth.abs() + 2.0**-22 * magnitude + tiny)
    if not off.any():
        return None
    at = off.nonzero()[0]
    return f"{int(off.sum())} elements off, first {at.tolist()}: {out[tuple(at)].item()}, expected {truth[tuple(at)].item()}"


# ---- bad arguments: name: (arguments, given a maker of tensors; how the message goes on) ----------------------------------------

BAD_RULES = {
    "top_k 0": (lambda t: {"top_k": 0}, "top_k must be 1 to 8 for 8 experts, got 0"),
    "top_k": (lambda t: {"top_k": 9}, "top_k must be 1 to 8 for 8 experts, got 9"),
    "scoring": (lambda t: {"scoring": "relu"}, "scoring must be softmax or sigmoid, got 'relu'"),
    "n_group": (lambda t: {"n_group": 3}, "n_group must divide the 8 experts, got 3"),
    "n_group 0": (lambda t: {"n_group": 0}, "n_group must divide the 8 experts, got 0"),
    "topk_group": (lambda t: {"n_group": 4, "topk_group": 5}, "topk_group must be 1 to n_group = 4, got 5"),
    "topk_group 0": (lambda t: {"topk_group": 0}, "topk_group must be 1 to n_group = 1, got 0"),
    "top_k of groups": (
        lambda t: {"n_group": 4, "topk_group": 1, "top_k": 3},
        "top_k must not be more than the 2 experts of 1 groups, got 3",
    ),
    "scale": (lambda t: {"scale": float("inf")}, "scale must be finite in float32, got inf"),
    "correction_bias shape": (lambda t: {"correction_bias": t(9)}, r"correction_bias must be \[experts\] = \[8\], got \[9\]"),
    "correction_bias dtype": (
        lambda t: {"correction_bias": t(8, dtype=torch.float16)},
        "correction_bias must be float32, got float16",
    ),
}
BAD_ROUTER = BAD_RULES | {
    "logits rank": (lambda t: {"logits": t(8)}, r"logits must be \[tokens, experts\], got \[8\]"),
    "logits dtype": (lambda t: {"logits": t(3, 8, dtype=torch.float64)}, "logits must be float16, bfloat16 or float32, got float64"),
    "no experts": (lambda t: {"logits": t(3, 0)}, r"logits must have 1 to 1024 experts, got \[3, 0\]"),
    "too many experts": (lambda t: {"logits": t(3, 1025)}, r"logits must have 1 to 1024 experts, got \[3, 1025\]"),
    "top_k of many": (lambda t: {"logits": t(3, 64), "top_k": 33}, "top_k must be 1 to 32 for 64 experts, got 33"),
}
BAD_ROUTER_GEMM = BAD_RULES | {
    "x rank": (lambda t: {"x": t(16, dtype=torch.float16)}, r"x must be \[tokens, hidden\], got \[16\]"),
    "x dtype": (lambda t: {"x": t(3, 16)}, "x must be float16 or bfloat16, got float32"),
    "w_gate rank": (lambda t: {"w_gate": t(16, dtype=torch.float16)}, r"w_gate must be \[experts, hidden = 16\], got \[16\]"),
    "w_gate hidden": (lambda t: {"w_gate": t(8, 24, dtype=torch.float16)}, r"w_gate must be \[experts, hidden = 16\], got \[8, 24\]"),
    "w_gate dtype": (lambda t: {"w_gate": t(8, 16)}, "w_gate must have x's dtype float16, got float32"),
    "w_gate experts": (lambda t: {"w_gate": t(1025, 16, dtype=torch.float16)}, r"w_gate must have 1 to 1024 experts, got \[1025, 16\]"),
}
BAD_SORT = {
    "ids rank": (lambda t: {"ids": t(6, dtype=torch.int32)}, r"ids must be \[tokens, top_k\], got \[6\]"),
    "ids dtype": (lambda t: {"ids": t(3, 2, dtype=torch.int64)}, "ids must be int32, got int64"),
    "num_experts 0": (lambda t: {"num_experts": 0}, "num_experts must be 1 to 1024, got 0"),
    "num_experts": (lambda t: {"num_experts": 1025}, "num_experts must be 1 to 1024, got 1025"),
    "weights shape": (lambda t: {"weights": t(2, 3)}, r"weights must be \[tokens, top_k\] = \[3, 2\], got \[2, 3\]"),
    "weights dtype": (lambda t: {"weights": t(3, 2, dtype=torch.float16)}, "weights must be float32, got float16"),
}
BAD_COMBINE = {
    "y rank": (lambda t: {"y": t(6)}, r"y must be \[rows, n\], got \[6\]"),
    "y dtype": (lambda t: {"y": t(6, 8, dtype=torch.float64)}, "y must be float16, bfloat16 or float32, got float64"),
    "inverse rank": (lambda t: {"inverse": t(6, dtype=torch.int32)}, r"inverse must be \[tokens, top_k\], got \[6\]"),
    "inverse dtype": (lambda t: {"inverse": t(3, 2, dtype=torch.int64)}, "inverse must be int32, got int64"),
    "weights shape": (lambda t: {"weights": t(2, 3)}, r"weights must be \[tokens, top_k\] = \[3, 2\], got \[2, 3\]"),
    "weights dtype": (lambda t: {"weights": t(3, 2, dtype=torch.bfloat16)}, "weights must be float32, got bfloat16"),
}
# operator: its bad arguments
BAD = {"moe_router": BAD_ROUTER, "moe_router_gemm": BAD_ROUTER_GEMM, "moe_sort": BAD_SORT, "moe_combine": BAD_COMBINE}
BAD_CASES = [(op, case) for op, cases in BAD.items() for case in cases]


def good_call(op: str, device, optional: bool = False) -> dict:
    """Keywords of a call that every bad case changes; with all tensors where ``optional``."""

    def t(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    half, bias = torch.float16, {"correction_bias": t(8)} if optional else {}
    weights = {"weights": t(3, 2)} if optional else {}
    return {
        "moe_router": {"logits": t(3, 8), "top_k": 2} | bias,
        "moe_router_gemm": {"x": t(3, 16, dtype=half), "w_gate": t(8, 16, dtype=half), "top_k": 2} | bias,
        "moe_sort": {"ids": t(3, 2, dtype=torch.int32), "num_experts": 8} | weights,
        "moe_combine": {"y": t(6, 8), "inverse": t(3, 2, dtype=torch.int32)} | weights,
    }[op]


def bad_call(op: str, case: str, device) -> tuple[dict, str]:
    """Keywords and message of a case of BAD."""

    def t(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    arguments, message = BAD[op][case]
    return good_call(op, device) | arguments(t), message
