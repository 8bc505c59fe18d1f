"""minfer.distributed.ExpertExchange on a GPU: ranks that share the GPUs there are, so that one is enough."""

import dataclasses

import minfer
import pytest
import torch
import torch.distributed as dist
from minfer.distributed import ExpertExchange, expert_parallel_moe

from tests.moe.expert_parallel_cases import (
    Case,
    check_exchanges,
    exchange_cases,
    found_or_error,
    make_cases,
    make_ids,
    make_layer,
    mismatch,
    of_ranks,
    run_ranks,
    shard,
)

pytestmark = pytest.mark.gpu

CASES = exchange_cases(make_cases()) | {f"larger: {name}": c for name, c in exchange_cases(make_cases(7, 256, 192)).items()}
# More tokens than a rank's blocks, and rows longer than a CTA.
CASES["many tokens"] = Case(tokens=(2500, 1031, 2048, 1), top_k=4, hidden=64, inter=32, capacity=2500)
CASES["long rows"] = Case(tokens=(33, 65, 1, 7), top_k=8, hidden=2056, inter=64, capacity=65)
CASES["more experts than are summed together"] = Case(tokens=(33, 65, 1, 7), top_k=12, hidden=128, inter=64, capacity=65, routing="twice")
TOKENS = 48
ROUTINGS = ("random", "last rank", "one", "outside", "twice", "random")


def graph_problem(rank, ranks, device) -> str | None:
    """One captured call, replayed with other tokens, weights and ids, beside eager calls of the same exchange."""
    case = Case(tokens=(TOKENS,) * ranks, top_k=4, hidden=256, inter=192)
    exchange = ExpertExchange(TOKENS, case.hidden, case.top_k, device=device)
    args, kwargs = make_layer(case, rank, ranks, device)
    own_args, own_kwargs = shard(case, args, kwargs)
    call = lambda: expert_parallel_moe(*own_args, exchange=exchange, **own_kwargs)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    problem = None
    for i, routing in enumerate(ROUTINGS):
        torch.manual_seed(1000 * i + rank)
        args[0].copy_(torch.randn(args[0].shape))
        args[3].copy_(torch.rand(args[3].shape))
        args[4].copy_(make_ids(dataclasses.replace(case, routing=routing), TOKENS, ranks))
        out.fill_(7)
        graph.replay()
        graph.replay()
        replayed, eager = out.clone(), call()
        found = mismatch(replayed, case, args, kwargs, ranks)
        if found is None and not torch.equal(eager, replayed):
            found = "a replay is not the eager call"
        if problem is None and found is not None:
            problem = f"replay {i}, {routing}: {found}"
    torch.cuda.synchronize()
    dist.barrier()
    exchange.close()
    return problem


def many_calls(rank, ranks, device) -> str | None:
    """Calls in a row of several capacities, dtypes and streams, nothing waited for: launches overlap, and the bits stay."""
    exchange = ExpertExchange(64, 512, 4, device=device)
    calls = {}
    for dtype in (torch.bfloat16, torch.float16):
        for capacity in (TOKENS, 64):
            case = Case(tokens=(TOKENS,) * ranks, top_k=4, hidden=512, inter=256, capacity=capacity, dtype=dtype)
            calls[dtype, capacity] = shard(case, *make_layer(case, rank, ranks, device))
    wanted = {key: expert_parallel_moe(*args, exchange=exchange, **kwargs).clone() for key, (args, kwargs) in calls.items()}
    outs = [(key, expert_parallel_moe(*args, exchange=exchange, **kwargs)) for _ in range(8) for key, (args, kwargs) in calls.items()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for key, (args, kwargs) in calls.items():
            late = torch.zeros_like(args[0])
            torch.cuda._sleep(20_000_000)
            late.copy_(args[0])
            outs.append((key, expert_parallel_moe(late, *args[1:], exchange=exchange, **kwargs)))
    torch.cuda.synchronize()
    different = [key for key, out in outs if not torch.equal(out, wanted[key])]
    dist.barrier()
    exchange.close()
    return f"other bits: {different}" if different else None


def invariant(rank, ranks, device) -> str | None:
    """In the batch-invariant mode a token's bits are those that it has alone."""
    case = Case(tokens=(TOKENS,) * ranks, top_k=4, hidden=512, inter=256)
    exchange = ExpertExchange(TOKENS, case.hidden, case.top_k, device=device)
    (x, w13, w2, weights, ids), kwargs = shard(case, *make_layer(case, rank, ranks, device))
    with minfer.batch_invariant():
        together = expert_parallel_moe(x, w13, w2, weights, ids, exchange=exchange, **kwargs)
        alone = [
            expert_parallel_moe(x[t : t + 1], w13, w2, weights[t : t + 1], ids[t : t + 1], exchange=exchange, **kwargs) for t in (0, 5, 47)
        ]
    different = [i for i, (t, one) in enumerate(zip((0, 5, 47), alone, strict=True)) if not torch.equal(one[0], together[t])]
    dist.barrier()
    exchange.close()
    return f"other bits: {different}" if different else None


def work(rank, ranks, device):
    return {
        "layers": check_exchanges(rank, ranks, device, CASES, mapped=True, collectives=False),
        "graph": graph_problem(rank, ranks, device),
        "many calls": many_calls(rank, ranks, device),
        "batch invariant": invariant(rank, ranks, device),
    }


@pytest.fixture(scope="module", params=(2, 3))
def found_by_ranks(request, tmp_path_factory):
    """What each rank found: one set of processes for all tests."""
    return found_or_error(request.param, "shared", tmp_path_factory.mktemp("ranks"), work)


@pytest.mark.parametrize("name", CASES)
def test_layer(found_by_ranks, name):
    """Against a loop over tokens in float64 and moe_ffn over all experts; twice, places filled with NaN and with zeros before."""
    assert {problems[name] for problems in of_ranks(found_by_ranks, "layers")} == {None}


@pytest.mark.parametrize("what", ("graph", "many calls", "batch invariant"))
def test_calls(found_by_ranks, what):
    assert set(of_ranks(found_by_ranks, what)) == {None}


def test_memory_of_a_closed_exchange_is_given_back(tmp_path):
    assert run_ranks(2, "shared", tmp_path, closes) == [True, True]


def closes(rank, ranks, device) -> bool:
    torch.empty(1, device=device)
    dist.barrier()
    before = torch.cuda.mem_get_info(device)[0]
    for _ in range(3):
        exchange = ExpertExchange(4096, 4096, 8, device=device)  # 128 MiB
        assert exchange.mapped and exchange.nbytes > 128 << 20
        exchange.close()
        assert not exchange.mapped
    dist.barrier()
    return before - torch.cuda.mem_get_info(device)[0] < 64 << 20
