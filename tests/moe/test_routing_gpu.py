"""torch.ops.minfer.moe_router, moe_router_gemm, moe_sort and moe_combine on a GPU against NumPy's float64.

Outputs lie in memory that held NaN or -7 before; every call is repeated and has to give the same bits.
"""

import importlib.util
import itertools
import math

import minfer
import pytest
import torch

from tests.contracts.test_registration import check_op
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

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
OPS = ("moe_router", "moe_router_gemm", "moe_sort", "moe_combine")
ONE_LAUNCH = 64  # tokens of moe_router_gemm


def randn(*shape, dtype=torch.float32, scale=1.0):
    return torch.randn(shape, device=DEVICE).mul_(scale).to(dtype)


def poison(*outputs):
    """Leaves NaN, or -7 in integers, in the memory that torch's allocator hands out next for outputs like these."""
    filled = [torch.full_like(x, math.nan if x.is_floating_point() else -7) for _ in range(2) for x in outputs]
    del filled


def leaves(result):
    return torch.utils._pytree.tree_leaves(result)


def same_bits(a, b):
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(leaves(a), leaves(b), strict=True)
    )


def repeated(call):
    """The result of a call, in memory that was poisoned, and whether a second one has the same bits."""
    poison(*leaves(call()))
    first = call()
    return first, same_bits(first, call())


def report(failures, number):
    assert not failures, f"{len(failures)} of {number} cases:\n" + "\n".join(failures[:20])


# ---- router ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", ROUTED_DTYPES, ids=name_of)
def test_router(dtype, rules):
    failures, number = [], 0
    for experts in (*EXPERTS, 1, 5, 33, 160, 512, 1000, 1024):
        arguments = make_rules(rules, experts, DEVICE)
        for tokens, top_k in itertools.product(TOKENS, (*TOP_K, 32)):
            number += 1
            if top_k > experts or not fits(rules, experts, top_k):
                continue
            logits = randn(tokens, experts, dtype=dtype, scale=(1.0, 8.0, 0.05)[number % 3])
            routed, same = repeated(lambda: minfer.moe_router(logits, top_k, **arguments))  # noqa: B023
            problem = route_mismatch(routed, logits, top_k, **arguments)
            if problem is not None or not same:
                failures.append(f"{tokens} x {experts}, top {top_k}: {problem or 'two runs differ'}")
    report(failures, number)


@pytest.mark.parametrize("experts, top_k", [(8, 2), (60, 4), (128, 8), (256, 8)])
@pytest.mark.parametrize("dtype", ROUTED_DTYPES, ids=name_of)
def test_router_of_many_tokens(dtype, experts, top_k):
    logits = randn(4096, experts, dtype=dtype)
    for rules in RULES:
        if fits(rules, experts, top_k):
            arguments = make_rules(rules, experts, DEVICE)
            assert route_mismatch(minfer.moe_router(logits, top_k, **arguments), logits, top_k, **arguments) is None, rules


@pytest.mark.parametrize("rules", RULES)
def test_router_ties(rules):
    """Few different logits: almost every place is decided by the index. Without a bias nothing is rounded, and the ids are exact."""
    for experts, top_k in ((8, 2), (32, 4), (60, 6), (128, 8), (256, 8), (1024, 16)):
        arguments = make_rules(rules, experts, DEVICE)
        if "correction_bias" in arguments:
            arguments["correction_bias"].zero_()
        if not fits(rules, experts, top_k):
            continue
        for levels in (1, 2, 5):
            logits = torch.randint(-levels, levels, (100, experts), device=DEVICE).half()
            weights, ids = minfer.moe_router(logits, top_k, **arguments)
            assert route_mismatch((weights, ids), logits, top_k, **arguments) is None
            if rules == "groups and bias":  # sums of two scores are equal by chance, and rounded
                continue
            on_cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
            assert torch.equal(ids.cpu(), minfer.moe_router(logits.cpu(), top_k, **on_cpu)[1]), (experts, levels)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", ROUTED_DTYPES, ids=name_of)
def test_router_nan_and_infinities(dtype, rules):
    for experts, top_k in ((8, 2), (60, 6), (256, 8), (1000, 8)):
        if not fits(rules, experts, top_k):
            continue
        arguments = make_rules(rules, experts, DEVICE)
        logits = randn(200, experts, dtype=dtype)
        for value, share in ((math.nan, 0.3), (math.inf, 0.05), (-math.inf, 0.7)):
            rows = torch.rand(200, 1, device=DEVICE) < 0.4
            logits = logits.masked_fill(rows & (torch.rand(logits.shape, device=DEVICE) < share), value)
        for row, value in enumerate((math.nan, math.inf, -math.inf)):
            logits[row] = value
        weights, ids = minfer.moe_router(logits, top_k, **arguments)
        assert route_mismatch((weights, ids), logits, top_k, **arguments) is None, experts
        assert torch.equal(weights.isnan().any(1), logits.isnan().any(1)), experts


def test_router_extreme_biases():
    """A bias of NaN or -inf bars its expert, +inf prefers it; the weights are the scores."""
    bias = torch.zeros(64, device=DEVICE)
    bias[:8], bias[8:16], bias[60] = math.nan, -math.inf, math.inf
    logits = randn(50, 64)
    for groups in ({}, {"n_group": 8, "topk_group": 4}):
        rules = {"scoring": "sigmoid", "correction_bias": bias} | groups
        weights, ids = minfer.moe_router(logits, 6, **rules)
        assert (ids[:, 0] == 60).all() and (ids >= 16).all()
        assert route_mismatch((weights, ids), logits, 6, **rules) is None


def test_router_views():
    base = randn(300, 400)
    for name, logits in {
        "rows": base[1:257:2, 8:72],
        "every second column": base[:100, :128:2],
        "transposed": base[3:67, :90].t(),
        "expanded": base[4:5, :64].expand(30, 64),
    }.items():
        assert same_bits(minfer.moe_router(logits, 4), minfer.moe_router(logits.contiguous(), 4)), name
    bias = randn(128)[::2]
    assert same_bits(
        minfer.moe_router(base[:, :64], 4, correction_bias=bias), minfer.moe_router(base[:, :64], 4, correction_bias=bias.clone())
    )


# ---- router with its matrix ----------------------------------------------------------------------------------------------------

SIZES = (
    (8, 4096),
    (32, 2880),
    (60, 2048),
    (128, 2048),
    (256, 7168),
    (1024, 512),
    (8, 64),
    (5, 33),
    (64, 40),
    (33, 8),
    (200, 1000),
    (17, 0),
)


def gate(tokens, experts, hidden, dtype):
    return randn(tokens, hidden, dtype=dtype), randn(experts, hidden, dtype=dtype, scale=max(hidden, 1) ** -0.5)


def exact_logits(x, w_gate):
    return x.double() @ w_gate.double().t()


@pytest.mark.parametrize("experts, hidden", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_router_gemm(dtype, experts, hidden):
    """Logits stay in float32: they are of about 1 to 4, where fp16's rounding would be 2^-12 to 2^-10. Few tokens are short sums."""
    failures, number = [], 0
    names = list(RULES)
    for number, tokens in enumerate((*TOKENS, 7, 8, 9, 16, 17, 31, 33, 63, 65, 200)):
        x, w_gate = gate(tokens, experts, hidden, dtype)
        error = 2.0**-14 if tokens <= ONE_LAUNCH else 2.0**-13
        rules, top_k = names[number % len(names)], min(TOP_K[number % len(TOP_K)], experts)
        if not fits(rules, experts, top_k):
            rules = "sigmoid and bias"
        arguments = make_rules(rules, experts, DEVICE)
        routed, same = repeated(lambda: minfer.moe_router_gemm(x, w_gate, top_k, **arguments))  # noqa: B023
        problem = route_mismatch(routed, exact_logits(x, w_gate), top_k, logit_error=error, **arguments)
        if problem is not None or not same:
            failures.append(f"{tokens} tokens, {rules}, top {top_k}: {problem or 'two runs differ'}")
    report(failures, number + 1)


@pytest.mark.parametrize("experts, hidden", SIZES)
def test_router_gemm_of_integers(experts, hidden):
    """Small integers: fp32 sums are exact, equal logits are many, and the ids are exact, too."""
    for tokens in (1, 3, 8, 9, 16, 17, 32, 33, 64, 100):
        x = torch.randint(-2, 3, (tokens, hidden), device=DEVICE).half()
        w_gate = torch.randint(-1, 2, (experts, hidden), device=DEVICE).half()
        top_k = min(8, experts)
        logits = exact_logits(x, w_gate)
        routed = minfer.moe_router_gemm(x, w_gate, top_k)
        assert route_mismatch(routed, logits, top_k) is None, tokens
        assert same_bits(routed, minfer.moe_router(logits.float(), top_k)), tokens


@pytest.mark.parametrize("experts, hidden, top_k", [(128, 2048, 8), (256, 7168, 8), (32, 2880, 4)])
def test_router_gemm_of_many_tokens(experts, hidden, top_k):
    x, w_gate = gate(4096, experts, hidden, torch.bfloat16)
    routed, same = repeated(lambda: minfer.moe_router_gemm(x, w_gate, top_k))
    assert same and route_mismatch(routed, exact_logits(x, w_gate), top_k, logit_error=2.0**-13) is None


def test_router_gemm_views():
    """Rows that are strided, misaligned or of odd length; columns that are strided."""
    base, weights = randn(300, 700, dtype=torch.float16), randn(80, 700, dtype=torch.float16, scale=0.05)
    for tokens in (3, 20, 64):
        for name, cut in {
            "strided": (slice(0, 2 * tokens, 2), slice(8, 520)),
            "misaligned": (slice(3, 3 + tokens), slice(3, 515)),
            "odd": (slice(0, tokens), slice(8, 519)),
            "every second column": (slice(0, tokens), slice(0, 512, 2)),
        }.items():
            x, w_gate = base[cut], weights[5:69, cut[1]]
            expected = exact_logits(x, w_gate)
            for a, b in ((x, w_gate), (x.contiguous(), w_gate), (x, w_gate.contiguous()), (x, w_gate.t().contiguous().t())):
                assert route_mismatch(minfer.moe_router_gemm(a, b, 4), expected, 4, logit_error=2.0**-13) is None, (tokens, name)


def test_router_gemm_nan_reaches_its_token_only():
    for tokens in (3, 20, 40, 64, 100):
        x, w_gate = gate(tokens, 60, 2048, torch.bfloat16)
        x[1, 77] = math.nan
        weights, ids = minfer.moe_router_gemm(x, w_gate, 4)
        rows = weights.isnan()
        assert rows[1].all() and int(rows.sum()) == 4
        assert ids[1].tolist() == [0, 1, 2, 3]
        x[1, 77], w_gate[5, 3] = 0, math.nan
        weights, ids = minfer.moe_router_gemm(x, w_gate, 4)
        assert weights.isnan().all() and (ids != 5).all()


def test_router_gemm_repeats():
    """Many launches in a row, warm and cold: pieces meet in every order, the sums do not change."""
    for experts, hidden, tokens in ((8, 4096, 1), (128, 2048, 4), (256, 7168, 1), (256, 7168, 64), (1024, 512, 33)):
        x, w_gate = gate(tokens, experts, hidden, torch.bfloat16)
        first = minfer.moe_router_gemm(x, w_gate, 8)
        for _ in range(200):
            assert same_bits(minfer.moe_router_gemm(x, w_gate, 8), first)
        flush = torch.empty(80 << 20, dtype=torch.uint8, device=DEVICE)
        for i in range(10):
            flush.fill_(i)
            assert same_bits(minfer.moe_router_gemm(x, w_gate, 8), first)


def test_router_gemm_on_streams():
    """Launches of several streams at once do not meet in each other's workspace, and wait for nobody but themselves."""
    cases = [gate(tokens, 256, 7168, torch.bfloat16) for tokens in (1, 8, 33, 64)]
    expected = [minfer.moe_router_gemm(*case, 8) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[] for _ in cases]
    for _ in range(50):
        for stream, case, result in zip(streams, cases, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(minfer.moe_router_gemm(*case, 8))
    torch.cuda.synchronize()
    for want, result in zip(expected, results, strict=True):
        assert all(same_bits(x, want) for x in result)


# ---- sort --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ID_KINDS)
@pytest.mark.parametrize("num_experts", (*EXPERTS, 1, 7, 1000, 1024))
def test_sort(num_experts, kind):
    failures, number = [], 0
    for number, (tokens, top_k) in enumerate(itertools.product((*TOKENS, 32, 511, 513, 1025, 4096), TOP_K)):
        if top_k > num_experts:
            continue
        ids = make_ids(kind, tokens, top_k, num_experts).to(DEVICE)
        weights = torch.rand(tokens, top_k, device=DEVICE) if number % 2 else None
        result, same = repeated(lambda: minfer.moe_sort(ids, num_experts, weights=weights))  # noqa: B023
        problem = sort_mismatch(result, ids, num_experts, weights)
        if problem is not None or not same:
            failures.append(f"{tokens} x {top_k}: {problem or 'two runs differ'}")
    report(failures, number + 1)


@pytest.mark.parametrize("kind", ID_KINDS)
@pytest.mark.parametrize(
    "tokens, top_k, num_experts",
    [(16384, 8, 256), (16384, 8, 1024), (20000, 7, 60), (65536, 8, 128), (300001, 1, 8), (1, 32, 64), (9, 1, 2)],
)
def test_sort_of_many(tokens, top_k, num_experts, kind):
    """From one tile of a cluster to several of each CTA."""
    ids = make_ids(kind, tokens, top_k, num_experts).to(DEVICE)
    for weights in (None, torch.rand(tokens, top_k, device=DEVICE)):
        result, same = repeated(lambda: minfer.moe_sort(ids, num_experts, weights=weights))  # noqa: B023
        assert same and sort_mismatch(result, ids, num_experts, weights) is None


def test_sort_of_nothing():
    for shape in ((0, 4), (4, 0), (0, 0)):
        ids = torch.empty(shape, dtype=torch.int32, device=DEVICE)
        for weights in (None, torch.empty(shape, device=DEVICE)):
            poison(torch.empty(60, dtype=torch.int32, device=DEVICE))
            assert sort_mismatch(minfer.moe_sort(ids, 60, weights=weights), ids, 60, weights) is None


def test_sort_of_any_number():
    """Whatever 32 bits may hold is in range or nobody's."""
    ids = torch.randint(-(2**31), 2**31, (500, 3), device=DEVICE).int()
    ids[::2] = torch.randint(-3, 12, (250, 3), device=DEVICE).int()
    assert sort_mismatch(minfer.moe_sort(ids, 9), ids, 9) is None


def test_sort_views():
    ids, weights = torch.randint(0, 60, (100, 8), device=DEVICE).int(), torch.rand(100, 8, device=DEVICE)
    for cut in ((slice(None), slice(0, 8, 2)), (slice(1, 90, 3), slice(None))):
        assert sort_mismatch(minfer.moe_sort(ids[cut], 60, weights=weights[cut]), ids[cut], 60, weights[cut]) is None
    assert sort_mismatch(minfer.moe_sort(ids.t(), 60, weights=weights.t()), ids.t(), 60, weights.t()) is None


# ---- combine -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (0, 1, 7, 8, 36, 128, 1000, 2048, 2880, 7168))
@pytest.mark.parametrize("dtype", ROUTED_DTYPES, ids=name_of)
def test_combine(dtype, n):
    failures, number = [], 0
    for number, (tokens, top_k) in enumerate(itertools.product(TOKENS, (0, *TOP_K, 9, 32))):
        y = randn(tokens * top_k + 3, n, dtype=dtype)
        inverse = torch.randperm(len(y), device=DEVICE)[: tokens * top_k].view(tokens, top_k).int()
        if number % 3 == 2:
            inverse[torch.rand(inverse.shape, device=DEVICE) < 0.3] = -1
        weights = None if number % 2 else torch.rand(tokens, top_k, device=DEVICE)
        out, same = repeated(lambda: minfer.moe_combine(y, inverse, weights))  # noqa: B023
        problem = combine_mismatch(out, y, inverse, weights)
        if problem is not None or not same:
            failures.append(f"{tokens} x {n}, top {top_k}: {problem or 'two runs differ'}")
    report(failures, number + 1)


@pytest.mark.parametrize("dtype", ROUTED_DTYPES, ids=name_of)
def test_combine_of_many(dtype):
    y, inverse = randn(4096 * 8, 1024, dtype=dtype), torch.randperm(4096 * 8, device=DEVICE).view(4096, 8).int()
    weights = torch.rand(4096, 8, device=DEVICE)
    assert combine_mismatch(minfer.moe_combine(y, inverse, weights), y, inverse, weights) is None


def test_combine_leaves_out():
    """Places outside of y add nothing, whatever their weights and the other rows hold; no rows at all are zeros."""
    y = randn(40, 72, dtype=torch.bfloat16)
    y[7] = math.nan
    inverse = torch.randint(8, 40, (30, 4), device=DEVICE).int()
    inverse[::2, 1], inverse[::3, 3], inverse[5] = -1, 40, 2**31 - 1
    weights = torch.rand(30, 4, device=DEVICE).masked_fill_(inverse >= 40, math.nan).masked_fill_(inverse < 0, math.inf)
    out = minfer.moe_combine(y, inverse, weights)
    assert combine_mismatch(out, y, inverse, weights) is None and (out[5] == 0).all() and not out.isnan().any()
    assert minfer.moe_combine(y[:0], inverse, weights).eq(0).all()
    inverse[3, 0] = 7
    assert minfer.moe_combine(y, inverse, weights)[3].isnan().all()


def test_combine_views():
    """Strided, misaligned and transposed rows of y; strided inverse and weights."""
    base = randn(200, 700, dtype=torch.float16)
    inverse, weights = torch.randint(0, 50, (40, 8), device=DEVICE).int(), torch.rand(40, 8, device=DEVICE)
    for y in (
        base[:100:2, 8:520],
        base[3:53, 3:515],
        base[:50, :1024:2],
        base[:600, :50].t(),
        base[4:5, :64].expand(50, 64),
        base[:50, 1:2],
    ):
        assert same_bits(minfer.moe_combine(y, inverse, weights), minfer.moe_combine(y.contiguous(), inverse, weights))
        assert combine_mismatch(minfer.moe_combine(y, inverse, weights), y, inverse, weights) is None
        half = minfer.moe_combine(y, inverse[:, ::2], weights[:, ::2])
        assert combine_mismatch(half, y, inverse[:, ::2], weights[:, ::2]) is None


# ---- together ------------------------------------------------------------------------------------------------------------------


def layer(x, w_gate, top_k, **rules):
    """A mixture whose experts scale a token by their number."""
    experts = w_gate.shape[0]
    weights, ids = minfer.moe_router_gemm(x, w_gate, top_k, **rules)
    token_index, offsets, inverse, sorted_weights = minfer.moe_sort(ids, experts, weights=weights)
    rows = torch.arange(len(token_index), device=x.device, dtype=torch.int32)
    factor = torch.searchsorted(offsets, rows, right=True).to(x.dtype) / experts
    y = x[token_index.long()] * factor[:, None]
    return weights, ids, token_index, offsets, inverse, sorted_weights, minfer.moe_combine(y, inverse, weights)


@pytest.mark.parametrize("tokens", (1, 8, 33, 64, 257, 2000))
@pytest.mark.parametrize("experts, hidden, top_k", [(8, 4096, 2), (128, 2048, 8), (256, 1024, 8)])
def test_cuda_graph(experts, hidden, top_k, tokens):
    """Capture the chain, then replay it with other inputs, twice in a row; every replay has eager mode's bits."""
    x, w_gate = gate(tokens, experts, hidden, torch.bfloat16)
    bias = randn(experts, scale=0.1)
    rules = {"scoring": "sigmoid", "correction_bias": bias, "n_group": 4, "topk_group": 2}

    def step():
        return layer(x, w_gate, top_k, **rules), minfer.moe_router(x[:, :experts], top_k, **rules)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(4):
        for tensor in (x, w_gate, bias):
            tensor.copy_(torch.randn_like(tensor) * (1 if tensor is x else 0.05))
        for out in leaves(captured):
            out.fill_(math.nan if out.is_floating_point() else -7)
        graph.replay()
        graph.replay()
        assert same_bits(captured, step())
    assert sort_mismatch(captured[0][2:6], captured[0][1], experts, captured[0][0]) is None


def test_chain_in_a_graph():
    """Launches that overlap through programmatic dependent launch, each reading what the one before it wrote."""
    w_gate = randn(64, 512, dtype=torch.float16, scale=512**-0.5)

    def chain(x):
        for _ in range(20):
            weights, ids = minfer.moe_router_gemm(x, w_gate, 8)
            _, _, inverse, _ = minfer.moe_sort(ids, 64, weights=weights)
            x = minfer.moe_combine(x, inverse % x.shape[0], weights)
        return x

    for tokens in (1, 5, 64, 700):
        x = randn(tokens, 512, dtype=torch.float16)
        wanted = chain(x)
        assert not wanted.isnan().any()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
        for _ in range(20):
            graph.replay()
        assert torch.equal(out, wanted), tokens


def test_other_stream():
    """Work is ordered on the current stream: a long kernel before it delays the inputs."""
    x, w_gate = gate(40, 64, 1024, torch.float16)
    expected = layer(x, w_gate, 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        outs = layer(late, w_gate, 4)
    stream.synchronize()
    assert same_bits(outs, expected)


def test_weights_of_a_late_predecessor():
    """The gate's matrix may be written by the launch before: what is fetched early must not be stale."""
    x, w_gate = gate(8, 128, 2048, torch.float16)
    late = torch.zeros_like(w_gate)
    expected = minfer.moe_router_gemm(x, w_gate, 8)
    for _ in range(20):
        late.zero_()
        minfer.moe_router_gemm(x, late, 8)
        torch.cuda._sleep(200_000)
        late.copy_(w_gate)
        assert same_bits(minfer.moe_router_gemm(x, late, 8), expected)


def test_inputs_are_left_alone():
    x, w_gate = gate(40, 64, 1024, torch.float16)
    bias, logits, y = randn(64), randn(40, 64), randn(160, 64)
    weights, ids = minfer.moe_router(logits, 4)
    inverse = minfer.moe_sort(ids, 64)[2]
    inputs = (x, w_gate, bias, logits, y, weights, ids, inverse)
    before = [tensor.clone() for tensor in inputs]
    minfer.moe_router_gemm(x, w_gate, 4, correction_bias=bias)
    minfer.moe_router(logits, 4, correction_bias=bias)
    minfer.moe_sort(ids, 64, weights=weights)
    minfer.moe_combine(y, inverse, weights)
    assert same_bits(inputs, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")
def test_other_device():
    x, w_gate = (tensor.to("cuda:1") for tensor in gate(40, 64, 1024, torch.float16))
    assert torch.cuda.current_device() == 0
    outs = layer(x, w_gate, 4)
    assert all(out.device == x.device for out in outs)
    assert route_mismatch(outs[:2], exact_logits(x, w_gate), 4, logit_error=2.0**-14) is None


# ---- registration and errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
def test_opcheck_routers(rules):
    arguments = make_rules(rules, 32, DEVICE)
    check_op(torch.ops.minfer.moe_router.default, (randn(5, 32), 4), arguments)
    check_op(torch.ops.minfer.moe_router.default, (randn(5, 32, dtype=torch.float16), 4), arguments)
    for tokens in (5, ONE_LAUNCH + 1):
        check_op(torch.ops.minfer.moe_router_gemm.default, (*gate(tokens, 32, 24, torch.bfloat16), 4), arguments)


def test_opcheck_sort_and_combine():
    ids, weights = make_ids("dropped", 6, 2, 8).to(DEVICE), torch.rand(6, 2, device=DEVICE)
    check_op(torch.ops.minfer.moe_sort.default, (ids, 8), {})
    check_op(torch.ops.minfer.moe_sort.default, (ids, 8), {"weights": weights})
    for dtype in ROUTED_DTYPES:
        check_op(torch.ops.minfer.moe_combine.default, (randn(12, 16, dtype=dtype), ids), {})
        check_op(torch.ops.minfer.moe_combine.default, (randn(12, 16, dtype=dtype), ids, weights), {})


@pytest.mark.parametrize("op, case", BAD_CASES)
def test_bad_arguments(op, case):
    """The compiled checks name the same argument; the rest may be in other words."""
    call, message = bad_call(op, case, DEVICE)
    with pytest.raises(RuntimeError, match=f"minfer::{op}: {message.split()[0]} "):
        getattr(minfer, op)(**call)


@pytest.mark.parametrize("op", OPS)
def test_devices_must_agree(op):
    call = good_call(op, DEVICE, optional=True)
    _, *others = (name for name, value in call.items() if isinstance(value, torch.Tensor))
    for name in others:
        with pytest.raises(RuntimeError, match=f"minfer::{op}: {name} must be"):
            getattr(minfer, op)(**(call | {name: call[name].cpu()}))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="requires Triton")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    """fullgraph, and with Inductor's CUDA graphs."""
    torch._dynamo.reset()
    w_gate = randn(16, 64, dtype=torch.float16, scale=0.1)

    def function(x):
        weights, ids = minfer.moe_router_gemm(x, w_gate, 4)
        _, offsets, inverse, _ = minfer.moe_sort(ids, 16, weights=weights)
        return minfer.moe_combine(x.repeat_interleave(4, 0) * 2, inverse, weights), offsets

    compiled = torch.compile(function, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for tokens in (1, 16, 16, 16, 200):
            x = randn(tokens, 64, dtype=torch.float16)
            assert same_bits(compiled(x), function(x))
