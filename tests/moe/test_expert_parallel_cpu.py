"""minfer.distributed over gloo: a layer divided among 2 and 3 processes against the whole one."""

import functools
import os

import minfer
import pytest
import torch
import torch.distributed as dist
from minfer.distributed import ExpertExchange
from minfer.distributed.expert_parallel import expert_parallel_layer, expert_parallel_moe, local_experts
from minfer.quantize import quantize_fp8_experts, quantize_w4_experts

from tests.moe.expert_parallel_cases import (
    EXPERTS,
    Case,
    check_cases,
    check_exchanges,
    exchange_cases,
    lost_tokens,
    make_cases,
    make_layer,
    mismatch,
    rows_needed,
    run_ranks,
    shard,
)

CASES = make_cases()


def work(rank, ranks, device):
    """Everything that a set of processes is asked for, and what each rank found."""
    return {
        "layers": check_cases(rank, ranks, device, CASES),
        "exchanges": check_exchanges(rank, ranks, device, exchange_cases(CASES), mapped=False, collectives=True),
        "disagreements": disagreements(rank, ranks, device),
        "group": within_a_group(rank, ranks, device) if ranks == 3 else None,
    }


@pytest.fixture(scope="module")
def found_by_ranks(tmp_path_factory):
    done = {}

    def found(ranks, what):
        if ranks not in done:
            try:
                done[ranks] = run_ranks(ranks, "cpu", tmp_path_factory.mktemp("ranks"), work)
            except Exception as error:
                done[ranks] = error
        if isinstance(done[ranks], Exception):
            raise done[ranks]
        return [by_rank[what] for by_rank in done[ranks]]

    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", (2, 3))
def test_layer(ranks, name, found_by_ranks):
    """Against a loop over tokens in float64 and moe_ffn over all experts; twice, for equal bits; the rows that are sent are counted."""
    found = [problems[name] for problems in found_by_ranks(ranks, "layers")]
    assert found == [None] * ranks


@pytest.mark.parametrize("name", exchange_cases(CASES))
def test_exchange_without_mapped_memory(name, found_by_ranks):
    """Goes through the collectives, with their bits."""
    assert [problems[name] for problems in found_by_ranks(2, "exchanges")] == [None, None]


def test_cases_reach_what_they_name():
    for ranks in (2, 3):
        for name, case in CASES.items():
            ids = [make_layer(case, rank, ranks, "cpu")[0][4] for rank in range(ranks)]
            lost = [len(lost_tokens(case, i, ranks)) for i in ids]
            assert ("lost" in name and "none" not in name) == any(lost), (name, lost)
            if name.startswith("top 8"):
                assert all(rows_needed(i, ranks) <= ranks * len(i) < 8 * len(i) for i in ids)
        case = CASES["less capacity than tokens, none lost"]
        assert max(case.tokens[:ranks]) > case.capacity


# ---- ranks that differ -------------------------------------------------------------------------------------------------------


def disagreements(rank, ranks, device):
    """What each rank is told when the last one's call is another."""
    told = {}
    for what, other in {
        "top_k": Case(top_k=3),
        "hidden": Case(hidden=32),
        "dtype": Case(dtype=torch.float16),
        "experts": Case(),
    }.items():
        case = other if rank == ranks - 1 else Case()
        args, kwargs = shard(case, *make_layer(case, rank, ranks, device))
        if what == "experts" and rank == ranks - 1:
            args = (args[0], args[1][1:], args[2][1:], *args[3:])
        try:
            expert_parallel_moe(*args, **kwargs)
            told[what] = "nothing"
        except RuntimeError as error:
            told[what] = str(error)
    return told


def test_ranks_must_agree(found_by_ranks):
    first, last = found_by_ranks(2, "disagreements")
    here = "hidden = 24, top_k = 2, 12 local experts, bfloat16"
    for what, there in {
        "top_k": "hidden = 24, top_k = 3, 12 local experts, bfloat16",
        "hidden": "hidden = 32, top_k = 2, 12 local experts, bfloat16",
        "dtype": "hidden = 24, top_k = 2, 12 local experts, float16",
        "experts": "hidden = 24, top_k = 2, 11 local experts, bfloat16",
    }.items():
        assert first[what] == f"minfer::expert_parallel_moe: ranks must agree, this one has {here} and rank 1 has {there}"
        assert last[what] == f"minfer::expert_parallel_moe: ranks must agree, this one has {there} and rank 0 has {here}"


def within_a_group(rank, ranks, device):
    """Ranks 1 and 2 are a group; rank 0 is in none."""
    group = dist.new_group([1, 2])
    try:
        share = local_experts(EXPERTS, group)
    except RuntimeError as error:
        return {"problem": str(error)}
    at = dist.get_rank(group)
    case = Case(top_k=3)
    args, kwargs = make_layer(case, at, 2, device)
    x, w13, w2, weights, ids = args
    out = expert_parallel_moe(x, w13[share], w2[share], weights, ids, group=group, **kwargs)
    return {"share": [share.start, share.stop, at], "problem": mismatch(out, case, args, kwargs, 2)}


def test_group(found_by_ranks):
    outside, *members = found_by_ranks(3, "group")
    assert outside["problem"] == "minfer::local_experts: group must have this process as a rank, and it has not"
    for member in members:
        start, stop, at = member["share"]
        assert (start, stop) == (12 * at, 12 * at + 12) and member["problem"] is None


# ---- one rank, in this process -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('alone')}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_group():
    if dist.is_initialized():
        pytest.skip("a group is up")
    args, _ = make_layer(Case(), 0, 1, "cpu")
    for call in (lambda: expert_parallel_moe(*args), lambda: local_experts(8)):
        with pytest.raises(RuntimeError, match="a process group must be initialised first"):
            call()


@pytest.mark.parametrize("capacity", (None, 37, 50))
def test_one_rank(alone, capacity):
    case = Case(top_k=3, capacity=capacity)
    args, kwargs = make_layer(case, 0, 1, "cpu")
    out = minfer.distributed.expert_parallel_moe(*args, capacity=capacity, **kwargs)
    assert mismatch(out, case, args, kwargs, 1) is None


@pytest.mark.parametrize("tokens, top_k, hidden, inter", ((5, 0, 16, 8), (5, 2, 0, 8), (5, 2, 16, 0), (0, 2, 16, 8), (0, 0, 0, 0)))
def test_sizes_of_0(alone, tokens, top_k, hidden, inter):
    x, w13, w2 = torch.randn(tokens, hidden).half(), torch.randn(4, 2 * inter, hidden).half(), torch.randn(4, hidden, inter).half()
    weights, ids = torch.rand(tokens, top_k), torch.randint(0, 4, (tokens, top_k)).int()
    want = minfer.moe_ffn(x, w13, w2, weights, ids)
    for capacity in (None, 8, 5, 3):
        out = expert_parallel_moe(x, w13, w2, weights, ids, capacity=capacity)
        kept = capacity if capacity == 3 and top_k > 0 else tokens
        assert torch.equal(out[:kept], want[:kept]) and out[kept:].isnan().all()


def test_nan_stays_with_its_token(alone):
    """A NaN in a token or in its weights, and rows that are not needed, reach no other token."""
    args, kwargs = make_layer(Case(top_k=3), 0, 1, "cpu")
    x, w13, w2, weights, ids = args
    x[4], weights[9, 1] = float("nan"), float("nan")
    for capacity in (None, 37, 50, 20):
        out = expert_parallel_moe(x, w13, w2, weights, ids, capacity=capacity, **kwargs)
        bad = out.isnan().any(1).nonzero().flatten().tolist()
        assert bad == [4, 9, *range(20, 37)] if capacity == 20 else bad == [4, 9]


def test_no_backward(alone):
    (x, w13, w2, weights, ids), _ = make_layer(Case(), 0, 1, "cpu")
    w13 = torch.nn.Parameter(w13)
    with torch.no_grad():
        assert not expert_parallel_moe(x, w13, w2, weights, ids).requires_grad
    for capacity in (None, 40):
        out = expert_parallel_moe(x, w13, w2, weights, ids, capacity=capacity)
        with pytest.raises(RuntimeError, match="minfer::expert_parallel_moe: has no backward"):
            out.sum().backward()


@pytest.mark.parametrize("capacity", (None, 37, 20))
def test_compile_breaks_the_graph(alone, capacity):
    args, kwargs = make_layer(Case(top_k=3), 0, 1, "cpu")
    layer = functools.partial(expert_parallel_moe, capacity=capacity, **kwargs)
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(lambda x, *rest: layer(x * 2, *rest) + 1, backend="eager")(*args)
        assert torch.equal(out.nan_to_num(), (layer(args[0] * 2, *args[1:]) + 1).nan_to_num())


BAD = {
    "x dtype": (lambda a: a | dict(x=a["x"].float()), "x must be float16 or bfloat16, got float32"),
    "w13 dtype": (lambda a: a | dict(w13=a["w13"].half()), "w13 must be bfloat16, got float16"),
    "w2 experts": (lambda a: a | dict(w2=a["w2"][:5]), r"w2 must be \[24, 24, 16\], got \[5, 24, 16\]"),
    "ids dtype": (lambda a: a | dict(ids=a["ids"].long()), "ids must be int32, got int64"),
    "ids device": (lambda a: a | dict(ids=a["ids"].to("meta")), "ids must be on x's device cpu, got meta"),
    "weights shape": (lambda a: a | dict(weights=a["weights"][:, :1]), r"weights must be \[37, 2\], got \[37, 1\]"),
    "b2 shape": (lambda a: a | dict(b2=a["x"][:3]), r"b2 must be \[24, 24\], got \[3, 24\]"),
    "activation": (lambda a: a | dict(activation="swish"), "activation must be one of none, .* relu2, swigluoai, got 'swish'"),
    "gate_layout": (lambda a: a | dict(gate_layout="rows"), "gate_layout must be halves, alternating or blocks, got 'rows'"),
    "capacity 0": (lambda a: a | dict(capacity=0), "capacity must be a positive integer, got 0"),
    "capacity type": (lambda a: a | dict(capacity=1.5), "capacity must be a positive integer, got 1.5"),
    "capacity tensor": (lambda a: a | dict(capacity=torch.tensor(4)), "capacity must be a positive integer, got tensor"),
    "much capacity": (
        lambda a: a | dict(capacity=2**30),
        r"capacity \* ranks \* top_k must be below 2\^31, got 1073741824 \* 1 \* 2",
    ),
    "overflow alone": (lambda a: a | dict(overflow=torch.zeros(1)), "overflow needs capacity: without it nothing is lost"),
    "overflow shape": (lambda a: a | dict(capacity=9, overflow=torch.zeros(2).int()), r"overflow must be \[1\], got \[2\]"),
    "overflow dtype": (lambda a: a | dict(capacity=9, overflow=torch.zeros(1)), "overflow must be int32, got float32"),
    "overflow device": (
        lambda a: a | dict(capacity=9, overflow=torch.zeros(1, dtype=torch.int32, device="meta")),
        "overflow must be on x's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_calls_that_cannot_be_right(alone, name):
    change, message = BAD[name]
    args, _ = make_layer(Case(), 0, 1, "cpu")
    call = change(dict(zip(("x", "w13", "w2", "weights", "ids"), args, strict=True)))
    with pytest.raises(RuntimeError, match=f"^minfer::expert_parallel_moe: {message}"):
        expert_parallel_moe(**call)


BAD_EXCHANGES = {
    "hidden": (dict(hidden=32), {}, "the exchange is for hidden = 32 and top_k = 2, got 24 and 2"),
    "top_k": (dict(top_k=3), {}, "the exchange is for hidden = 24 and top_k = 3, got 24 and 2"),
    "capacity": ({}, dict(capacity=41), "capacity must be 1 to the exchange's 40, got 41"),
    "capacity 0": ({}, dict(capacity=0), "capacity must be 1 to the exchange's 40, got 0"),
    "tokens": ({}, dict(capacity=36), "x must have at most capacity = 36 tokens with an exchange, got 37"),
    "overflow": ({}, dict(overflow=torch.zeros(1).int()), "overflow must not be given beside an exchange, which loses no token"),
    "group": ({}, dict(group="default"), "group must not be given beside an exchange, which has its own"),
    "type": ({}, dict(exchange=3), "exchange must be a minfer.distributed.ExpertExchange, got <class 'int'>"),
}


@pytest.mark.parametrize("name", BAD_EXCHANGES)
def test_exchanges_that_cannot_be_right(alone, name):
    sizes, call, message = BAD_EXCHANGES[name]
    args, _ = make_layer(Case(), 0, 1, "cpu")
    exchange = ExpertExchange(**(dict(capacity=40, hidden=24, top_k=2) | sizes))
    with pytest.raises(RuntimeError, match=f"^minfer::expert_parallel_moe: {message}"):
        expert_parallel_moe(*args, **(dict(exchange=exchange) | call))


@pytest.mark.parametrize(
    "sizes, message",
    (
        (dict(capacity=0), "capacity must be a positive integer, got 0"),
        (dict(hidden=20), "hidden must be a multiple of 8, got 20"),
        (dict(top_k=True), "top_k must be a positive integer, got True"),
        (dict(capacity=2**30), r"capacity \* ranks \* top_k must be below 2\^31, got 1073741824 \* 1 \* 2"),
    ),
)
def test_sizes_of_an_exchange(alone, sizes, message):
    with pytest.raises(RuntimeError, match=f"^minfer::ExpertExchange: {message}"):
        ExpertExchange(**(dict(capacity=40, hidden=24, top_k=2) | sizes))


@pytest.mark.parametrize("form", ("w4a16", "fp8"))
def test_layers_of_other_formats(alone, form):
    """Those that expert_parallel_moe does not have, in each of the ways that rows travel."""
    (x, w13, w2, weights, ids), _ = make_layer(Case(hidden=128, inter=64, top_k=3), 0, 1, "cpu")
    quantise = functools.partial(quantize_w4_experts, group_size=64) if form == "w4a16" else quantize_fp8_experts
    gate_up, down = quantise(w13, gated=True), quantise(w2)
    whole = gate_up.ffn(x, down, weights, ids)

    def layer(rows, row_weights, row_ids):
        return gate_up.ffn(rows, down, row_weights, row_ids)

    exchange = ExpertExchange(capacity=40, hidden=128, top_k=3)
    for options in ({}, dict(capacity=37), dict(exchange=exchange)):
        assert torch.equal(expert_parallel_layer(x, weights, ids, layer, EXPERTS, **options), whole)


BAD_LAYERS = {
    "experts": (dict(num_experts=0), "num_experts must be a positive multiple of the 1 ranks, got 0"),
    "ids": (dict(ids=torch.zeros(37, 2)), "ids must be int32, got float32"),
    "shape": (
        dict(layer=lambda x, weights, ids: x[:, 1:]),
        r"layer must return bfloat16 \[37, 24\] .* got bfloat16 \[37, 23\] on cpu",
    ),
    "dtype": (dict(layer=lambda x, weights, ids: x.float()), r"layer must return bfloat16 .* got float32 \[37, 24\] on cpu"),
    "nothing": (dict(layer=lambda x, weights, ids: None), r"layer must return .* got <class 'NoneType'>"),
}


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_layers_that_cannot_be_right(alone, name):
    change, message = BAD_LAYERS[name]
    (x, _, _, weights, ids), _ = make_layer(Case(), 0, 1, "cpu")
    call = dict(x=x, weights=weights, ids=ids, layer=lambda x, weights, ids: x, num_experts=EXPERTS) | change
    with pytest.raises(RuntimeError, match=f"^minfer::expert_parallel_layer: {message}"):
        expert_parallel_layer(**call)


def test_exchange_of_one_rank(alone):
    args, kwargs = make_layer(Case(), 0, 1, "cpu")
    exchange = ExpertExchange(capacity=40, hidden=24, top_k=2)
    assert not exchange.mapped and exchange.nbytes == 0
    for capacity in (None, 37):
        out = expert_parallel_moe(*args, exchange=exchange, capacity=capacity, **kwargs)
        assert torch.equal(out, expert_parallel_moe(*args, capacity=37, **kwargs))
    exchange.close()


def test_experts_that_cannot_be_divided(alone):
    assert local_experts(24) == slice(0, 24)
    for bad in (0, -8, 8.0, True):
        with pytest.raises(RuntimeError, match=f"minfer::local_experts: num_experts must be a positive multiple of the 1 ranks, got {bad}"):
            local_experts(bad)


def test_more_memory_than_there_is(alone, monkeypatch):
    """Of torch's kind, so that whoever frees memory and tries again knows it, and with what it was for."""

    def empty(*_, **__):
        raise torch.OutOfMemoryError("Tried to allocate 9 GiB.")

    args, _ = make_layer(Case(), 0, 1, "cpu")
    monkeypatch.setattr(torch, "empty", empty)
    what = (
        "minfer::expert_parallel_moe: could not allocate .* GiB for 40 rows of .* bytes that the ranks exchange: Tried to allocate 9 GiB."
    )
    with pytest.raises(torch.OutOfMemoryError, match=what):
        expert_parallel_moe(*args, capacity=40)
