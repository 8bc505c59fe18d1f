"""The routing operators on CPU against NumPy's float64; their errors, fakes, opcheck and torch.compile."""

import itertools
import math

import minfer
import pytest
import torch
from minfer.checks import moe_routing as checks_moe_routing
from minfer.reference import moe_routing as reference_moe_routing

from tests.contracts.test_registration import check_op, need
from tests.gemm.cases import DTYPES, name_of
from tests.moe.routing_cases import (
    BAD_CASES,
    EXPERTS,
    ID_KINDS,
    ROUTED_DTYPES,
    RULES,
    TOKENS,
    TOP_K,
    bad_call,
    combine_mismatch,
    fits,
    good_call,
    make_ids,
    make_rules,
    route_mismatch,
    sort_mismatch,
)

OPS = ("moe_router", "moe_router_gemm", "moe_sort", "moe_combine")

# ---- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", ROUTED_DTYPES, ids=name_of)
def test_router(dtype, rules):
    for experts, tokens, top_k in itertools.product((*EXPERTS, 1, 5, 1000), TOKENS, TOP_K):
        if top_k <= experts and fits(rules, experts, top_k):
            logits = (torch.randn(tokens, experts) * 3).to(dtype)
            arguments = make_rules(rules, experts)
            problem = route_mismatch(minfer.moe_router(logits, top_k, **arguments), logits, top_k, **arguments)
            assert problem is None, (experts, tokens, top_k, problem)


def plain_route(logits, bias, top_k, n_group, topk_group):
    """A token's sigmoid route, spelled out."""
    score = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(score, bias, strict=True)]
    size = len(choice) // n_group
    groups = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    stay = sorted(range(n_group), key=lambda g: (-groups[g], g))[:topk_group]
    ids = sorted((e for e in range(len(choice)) if e // size in stay), key=lambda e: (-choice[e], e))[:top_k]
    total = sum(score[e] for e in ids)
    return [2.5 * score[e] / total for e in ids], ids


def test_deepseek_v3():
    logits, bias = torch.randn(50, 64), torch.randn(64) * 0.1
    rules = dict(scoring="sigmoid", correction_bias=bias, n_group=8, topk_group=4, scale=2.5)
    weights, ids = minfer.moe_router(logits, 6, **rules)
    for t in range(50):
        expected, expected_ids = plain_route(logits[t].double().tolist(), bias.double().tolist(), 6, 8, 4)
        assert ids[t].tolist() == expected_ids
        torch.testing.assert_close(weights[t].double(), torch.tensor(expected).double(), rtol=1e-5, atol=0)


def test_ties():
    """Among equals the lower expert, and the lower group, comes first."""
    weights, ids = minfer.moe_router(torch.zeros(2, 8), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2 and torch.equal(weights, torch.full((2, 3), 1 / 3))
    logits = torch.tensor([[1.0, 3, 3, 2, 3, 0, 2, 3]])
    assert minfer.moe_router(logits, 6)[1].tolist() == [[1, 2, 4, 7, 3, 6]]
    assert minfer.moe_router(logits, 3, n_group=4, topk_group=2)[1].tolist() == [[1, 2, 3]]
    assert minfer.moe_router(torch.tensor([[-0.0, 0.0, -0.0]]), 3)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_nan_and_infinities(scoring, bias):
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [
            [1.0, nan, 3, 2],
            [nan, nan, nan, nan],
            [-inf, -inf, -inf, -inf],
            [inf, 1, inf, 2],
            [-inf, 1, -inf, 2],
            [inf, nan, -inf, 5],
        ]
    )
    rules = {"scoring": scoring} | ({"correction_bias": torch.zeros(4)} if bias else {})
    weights, ids = minfer.moe_router(logits, 2, **rules)
    assert route_mismatch((weights, ids), logits, 2, **rules) is None
    last = [0, 2] if bias and scoring == "softmax" else [0, 3]  # beside +inf both have a score of 0
    assert ids.tolist() == [[2, 3], [0, 1], [0, 1], [0, 2], [3, 1], last]
    assert weights[[0, 1, 5]].isnan().all()
    assert weights[3].tolist() == [0.5, 0.5]
    assert weights[2].tolist() == ([0.5, 0.5] if scoring == "softmax" else [0.0, 0.0])
    everything = minfer.moe_router(logits, 4, renormalize=False, **rules)[0]
    assert everything[2].tolist() == [0.25 if scoring == "softmax" else 0.0] * 4
    # a bias that is NaN or -inf bars its expert from the choice
    barred = torch.tensor([0.0, nan, -inf, 0])
    assert minfer.moe_router(torch.tensor([[1.0, 9, 9, 0]]), 2, scoring=scoring, correction_bias=barred)[1].tolist() == [[0, 3]]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_router_gemm(dtype):
    for (experts, hidden), tokens in itertools.product(((8, 64), (60, 2048), (128, 33), (256, 8), (4, 0)), TOKENS):
        x, w_gate = torch.randn(tokens, hidden).to(dtype), (torch.randn(experts, hidden) * max(hidden, 1) ** -0.5).to(dtype)
        for rules in ("softmax", "sigmoid and bias"):
            arguments = make_rules(rules, experts)
            routed = minfer.moe_router_gemm(x, w_gate, 4, **arguments)
            logits = x.double() @ w_gate.double().t()
            assert route_mismatch(routed, logits, 4, logit_error=2.0**-18, **arguments) is None


def test_float64_reference():
    logits, bias = torch.randn(20, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    weights, ids = reference_moe_routing.moe_router(logits, 4, scoring="sigmoid", correction_bias=bias)
    assert weights.dtype == torch.float64
    score = logits.sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights, score / score.sum(1, keepdim=True), rtol=1e-14, atol=0)
    assert torch.equal(ids, (logits.sigmoid() + bias).topk(4).indices.int())


@pytest.mark.parametrize("kind", ID_KINDS)
def test_sort(kind):
    for tokens, top_k, num_experts in itertools.product((0, 1, 3, 64, 257), (1, 2, 8), (8, 60, 256)):
        ids = make_ids(kind, tokens, top_k, num_experts)
        weights = torch.rand(tokens, top_k)
        for w in (None, weights):
            assert sort_mismatch(minfer.moe_sort(ids, num_experts, weights=w), ids, num_experts, w) is None
    assert sort_mismatch(minfer.moe_sort(torch.empty(3, 0).int(), 4), torch.empty(3, 0).int(), 4) is None


def test_sort_by_hand():
    ids = torch.tensor([[2, 0], [0, -1], [2, 3]]).int()
    token_index, offsets, inverse, weights = minfer.moe_sort(ids, 4, weights=torch.arange(6).view(3, 2).float())
    assert token_index.tolist() == [0, 1, 0, 2, 2, 0] and offsets.tolist() == [2, 2, 4, 5]
    assert inverse.tolist() == [[2, 0], [1, -1], [3, 4]] and weights.tolist() == [1, 2, 0, 4, 5, 0]


@pytest.mark.parametrize("dtype", ROUTED_DTYPES, ids=name_of)
def test_combine(dtype):
    for tokens, n, top_k in itertools.product((0, 1, 5, 64), (0, 1, 7, 64), (0, 1, 2, 8)):
        y = torch.randn(tokens * top_k + 3, n).to(dtype)
        inverse = torch.randint(-1, len(y) + 2, (tokens, top_k)).int()
        for weights in (None, torch.randn(tokens, top_k)):
            assert combine_mismatch(minfer.moe_combine(y, inverse, weights), y, inverse, weights) is None
    assert minfer.moe_combine(y[:0], inverse).eq(0).all()


def test_combine_leaves_out():
    """-1 adds nothing, whatever its weight and the rows hold."""
    y = torch.tensor([[1.0, 2], [math.nan, math.inf]])
    out = minfer.moe_combine(y, torch.tensor([[0, -1]]).int(), torch.tensor([[2.0, math.nan]]))
    assert out.tolist() == [[2, 4]]


def test_layer():
    """Router, sort, experts and combine are the mixture, token by token."""
    tokens, hidden, experts, top_k = 40, 16, 8, 2
    x, w_gate = torch.randn(tokens, hidden).half(), torch.randn(experts, hidden).half() / 4
    matrices = torch.randn(experts, hidden, hidden) / 4
    weights, ids = minfer.moe_router_gemm(x, w_gate, top_k)
    token_index, offsets, inverse, sorted_weights = minfer.moe_sort(ids, experts, weights=weights)
    begin = [0, *offsets.tolist()]
    rows = x.float()[token_index.long()]
    y = torch.cat([rows[begin[e] : begin[e + 1]] @ matrices[e] for e in range(experts)])
    expected = sum(weights[:, j, None] * torch.einsum("tk,tkn->tn", x.float(), matrices[ids[:, j].long()]) for j in range(top_k))
    torch.testing.assert_close(minfer.moe_combine(y, inverse, weights), expected)
    torch.testing.assert_close(minfer.moe_combine(y * sorted_weights[:, None], inverse), expected)


# ---- errors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op, case", BAD_CASES)
def test_bad_arguments(op, case, device):
    call, message = bad_call(op, case, device)
    with pytest.raises(RuntimeError, match=f"minfer::{op}: {message}"):
        getattr(minfer, op)(**call)


@pytest.mark.parametrize("op", OPS)
def test_devices_must_agree(op):
    call = good_call(op, "cpu", optional=True)
    first, *others = (name for name, value in call.items() if isinstance(value, torch.Tensor))
    for name in others:
        with pytest.raises(RuntimeError, match=f"minfer::{op}: {name} must be on the device of {first}, cpu, got meta"):
            getattr(checks_moe_routing, f"check_{op}")(**(call | {name: call[name].to("meta")}))


# ---- registration --------------------------------------------------------------------------------------------------------------


def test_schemas():
    rules = (
        '*, str scoring="softmax", bool renormalize=True, Tensor? correction_bias=None, int n_group=1, int topk_group=1, float scale=1.'
        ") -> (Tensor weights, Tensor ids)"
    )
    schemas = {op: str(getattr(torch.ops.minfer, op).default._schema) for op in OPS}
    assert schemas["moe_router"] == f"minfer::moe_router(Tensor logits, int top_k, {rules}"
    assert schemas["moe_router_gemm"] == f"minfer::moe_router_gemm(Tensor x, Tensor w_gate, int top_k, {rules}"
    assert schemas["moe_sort"] == (
        "minfer::moe_sort(Tensor ids, int num_experts, *, Tensor? weights=None) -> "
        "(Tensor token_index, Tensor offsets, Tensor inverse, Tensor sorted_weights)"
    )
    assert schemas["moe_combine"] == "minfer::moe_combine(Tensor y, Tensor inverse, Tensor? weights=None) -> Tensor"


@pytest.mark.parametrize("rules", RULES)
def test_opcheck_routers(rules):
    arguments = make_rules(rules, 32)
    check_op(torch.ops.minfer.moe_router.default, (torch.randn(5, 32), 4), arguments)
    check_op(torch.ops.minfer.moe_router.default, (torch.randn(5, 32).half(), 4), arguments)
    check_op(torch.ops.minfer.moe_router_gemm.default, (torch.randn(5, 24).bfloat16(), torch.randn(32, 24).bfloat16(), 4), arguments)


def test_opcheck_sort_and_combine():
    ids = make_ids("dropped", 6, 2, 8)
    check_op(torch.ops.minfer.moe_sort.default, (ids, 8), {})
    check_op(torch.ops.minfer.moe_sort.default, (ids, 8), {"weights": torch.rand(6, 2)})
    for dtype in ROUTED_DTYPES:
        y = torch.randn(12, 16).to(dtype)
        check_op(torch.ops.minfer.moe_combine.default, (y, ids), {})
        check_op(torch.ops.minfer.moe_combine.default, (y, ids, torch.rand(6, 2)), {})


def test_autograd():
    """Forward works where an argument requires grad, backward raises."""
    logits, x, w_gate = torch.randn(4, 8, requires_grad=True), torch.randn(4, 16).half().requires_grad_(), torch.randn(8, 16).half()
    weights, ids = minfer.moe_router(logits, 2)
    assert torch.equal(weights, minfer.moe_router(logits.detach(), 2)[0]) and not ids.requires_grad
    outs = [weights, minfer.moe_router_gemm(x, w_gate, 2)[0], minfer.moe_sort(ids, 8, weights=weights)[3]]
    outs.append(minfer.moe_combine(torch.randn(8, 4, requires_grad=True), ids))
    for out in outs:
        with pytest.raises(RuntimeError, match="has no backward"):
            out.sum().backward()


def test_meta_is_like_cpu():
    def same(fake, real):
        fake, real = (torch.utils._pytree.tree_leaves(x) for x in (fake, real))
        assert len(fake) == len(real)
        for f, r in zip(fake, real, strict=True):
            assert (f.shape, f.dtype, f.stride(), f.device.type) == (r.shape, r.dtype, r.stride(), "meta")

    for tokens in (0, 1, 5):
        logits, x, w_gate = torch.randn(tokens, 8), torch.randn(tokens, 16).half(), torch.randn(8, 16).half()
        ids, y, weights = make_ids("random", tokens, 2, 8), torch.randn(2 * tokens, 12).bfloat16(), torch.rand(tokens, 2)
        same(minfer.moe_router(logits.to("meta"), 2), minfer.moe_router(logits, 2))
        same(minfer.moe_router_gemm(x.to("meta"), w_gate.to("meta"), 2), minfer.moe_router_gemm(x, w_gate, 2))
        same(minfer.moe_sort(ids.to("meta"), 8), minfer.moe_sort(ids, 8))
        same(minfer.moe_sort(ids.to("meta"), 8, weights=weights.to("meta")), minfer.moe_sort(ids, 8, weights=weights))
        same(minfer.moe_combine(y.to("meta"), ids.to("meta"), weights.to("meta")), minfer.moe_combine(y, ids, weights))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, dynamic):
    """The whole family in one graph, with tokens that change."""
    need(backend)
    w_gate, bias = torch.randn(16, 32).half(), torch.randn(16)

    def layer(x):
        weights, ids = minfer.moe_router_gemm(x, w_gate, 4, scoring="sigmoid", correction_bias=bias, n_group=4, topk_group=2)
        other, _ = minfer.moe_router(x[:, :16].float(), 4)
        token_index, offsets, inverse, sorted_weights = minfer.moe_sort(ids, 16, weights=weights + other)
        y = x[token_index.long()] * sorted_weights[:, None].half()
        return minfer.moe_combine(y, inverse), minfer.moe_combine(y, inverse, weights), offsets

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (3, 7, 1):
        x = torch.randn(tokens, 32).half()
        with torch.no_grad():
            for have, want in zip(compiled(x), layer(x), strict=True):
                torch.testing.assert_close(have, want, rtol=4e-3, atol=4e-3)


def test_compile_bad_input():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="minfer::moe_router: top_k must be 1 to 8"):
        torch.compile(lambda x: minfer.moe_router(x, 9), fullgraph=True, backend="aot_eager")(torch.randn(2, 8))
