"""minfer.distributed over NCCL: a layer divided among GPUs against the whole one, and in CUDA graphs that follow their routing."""

import dataclasses

import pytest
import torch
from minfer.distributed.expert_parallel import expert_parallel_moe

from tests.moe.expert_parallel_cases import (
    Case,
    check_cases,
    check_exchanges,
    exchange_cases,
    found_or_error,
    lost_tokens,
    make_cases,
    make_ids,
    make_layer,
    mismatch,
    of_ranks,
    shard,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")]
if torch.cuda.is_available() and torch.cuda.device_count() > 1:
    PEERS = torch.cuda.can_device_access_peer(0, 1)
else:
    PEERS = False

SMALL = make_cases()
CASES = SMALL | {f"larger: {name}": case for name, case in make_cases(scale=7, hidden=256, inter=192).items()}
TOKENS = 48
GRAPHS = {  # capacity of a call that is captured
    "capacity for every token": TOKENS,
    "less capacity than tokens": 3 * TOKENS // 4,
}
ROUTINGS = ("random", "last rank", "one", "outside", "twice", "random")


def make_calls(case, rank, ranks, device):
    """args and kwargs of the whole layer, and a call of the divided one on the same tensors that counts in ``counter``."""
    args, kwargs = make_layer(case, rank, ranks, device)
    own_args, own_kwargs = shard(case, args, kwargs)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    return args, kwargs, counter, lambda: expert_parallel_moe(*own_args, overflow=counter, **own_kwargs)


def graph_problem(capacity, rank, ranks, device) -> str | None:
    """One captured call, replayed with other tokens, weights and ids."""
    case = Case(tokens=(TOKENS,) * ranks, top_k=4, hidden=256, inter=192, capacity=capacity)
    args, kwargs, counter, call = make_calls(case, rank, ranks, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    problem = None
    for i, routing in enumerate(ROUTINGS):
        torch.manual_seed(1000 * i + rank)
        args[0].copy_(torch.randn(args[0].shape))
        args[3].copy_(torch.rand(args[3].shape))
        args[4].copy_(make_ids(dataclasses.replace(case, routing=routing), TOKENS, ranks))
        counter.zero_()
        out.fill_(7)
        graph.replay()
        graph.replay()
        replayed, lost = out.clone(), int(counter)
        eager = call()  # every rank, whatever it has found: the next replay waits for all
        if problem is None:
            problem = mismatch(replayed, case, args, kwargs, ranks)
        if problem is None and not torch.equal(eager.nan_to_num(), replayed.nan_to_num()):
            problem = "a replay is not the eager call"
        if problem is None and lost != 2 * len(lost_tokens(case, args[4], ranks)):
            problem = f"overflow is {lost}"
        problem = problem if problem is None or problem.startswith("replay ") else f"replay {i}, {routing}: {problem}"
    torch.cuda.synchronize()
    graph.reset()  # NCCL does not end while a graph has its launches
    return problem


def waits(rank, ranks, device) -> dict[str, str | None]:
    """Calls that torch must not let wait for the device."""
    found = {}
    for what, capacity in GRAPHS.items():
        case = Case(tokens=(TOKENS,) * ranks, capacity=capacity)
        *_, call = make_calls(case, rank, ranks, device)
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
            found[what] = None
        except RuntimeError as error:
            found[what] = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def many_calls(rank, ranks, device) -> dict[str, bool]:
    """Calls in a row, nothing waited for: launches overlap, and the bits stay; on the current and on another stream."""
    same = {}
    for what, capacity in (GRAPHS | {"needed": None}).items():
        case = Case(tokens=(TOKENS,) * ranks, top_k=4, hidden=512, inter=256, capacity=capacity)
        args, kwargs = shard(case, *make_layer(case, rank, ranks, device))
        outs = [expert_parallel_moe(*args, **kwargs) for _ in range(20)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = torch.zeros_like(args[0])
            torch.cuda._sleep(20_000_000)
            late.copy_(args[0])
            outs.append(expert_parallel_moe(late, *args[1:], **kwargs))
        torch.cuda.synchronize()
        same[what] = all(torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs)
    return same


def capture_without_capacity(rank, ranks, device) -> str:
    args, kwargs = shard(Case(), *make_layer(Case(), rank, ranks, device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            torch.zeros(1, device=device)  # a graph without a node is a warning
            expert_parallel_moe(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def work(rank, ranks, device):
    return {
        "layers": check_cases(rank, ranks, device, CASES),
        "exchanges": check_exchanges(rank, ranks, device, exchange_cases(CASES), mapped=PEERS, collectives=True),
        "graphs": {what: graph_problem(capacity, rank, ranks, device) for what, capacity in GRAPHS.items()},
        "waits": waits(rank, ranks, device),
        "many calls": many_calls(rank, ranks, device),
        "capture": capture_without_capacity(rank, ranks, device),
    }


@pytest.fixture(
    scope="module", params=(2, pytest.param(4, marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="requires four GPUs")))
)
def found_by_ranks(request, tmp_path_factory):
    """What each rank found: one set of processes for all tests."""
    return found_or_error(request.param, "cuda", tmp_path_factory.mktemp("ranks"), work)


@pytest.mark.parametrize("name", CASES)
def test_layer(found_by_ranks, name):
    """Against a loop over tokens in float64 and moe_ffn over all experts; twice, for equal bits; the rows that are sent are counted."""
    assert {problems[name] for problems in of_ranks(found_by_ranks, "layers")} == {None}


@pytest.mark.parametrize("name", exchange_cases(CASES))
def test_exchange(found_by_ranks, name):
    """Through memory that the GPUs map from each other: the bits of the collectives."""
    assert {problems[name] for problems in of_ranks(found_by_ranks, "exchanges")} == {None}


@pytest.mark.parametrize("what", GRAPHS)
def test_graphs_follow_their_routing(found_by_ranks, what):
    assert {problems[what] for problems in of_ranks(found_by_ranks, "graphs")} == {None}


@pytest.mark.parametrize("what", GRAPHS)
def test_capacity_waits_for_nothing(found_by_ranks, what):
    assert {problems[what] for problems in of_ranks(found_by_ranks, "waits")} == {None}


@pytest.mark.parametrize("what", (*GRAPHS, "needed"))
def test_many_calls(found_by_ranks, what):
    assert all(same[what] for same in of_ranks(found_by_ranks, "many calls"))


def test_capture_needs_capacity(found_by_ranks):
    for told in of_ranks(found_by_ranks, "capture"):
        assert told.startswith("minfer::expert_parallel_moe: capacity must be given in a CUDA graph")
