"""Layers divided among ranks: inputs, the float64 definition, the processes, and what every rank checks. The backend is the device's."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path

import minfer
import torch
import torch.distributed as dist
from minfer.distributed import ExpertExchange, expert_parallel as distributed
from minfer.distributed.expert_parallel import expert_parallel_layer, expert_parallel_moe, local_experts

from tests.moe.grouped_cases import layer_mismatch

EXPERTS = 24  # 2, 3 and 4 ranks divide them


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: tuple[int, ...] = (37, 11, 20, 5)  # of each rank
    top_k: int = 2
    routing: str = (
        "random"  # "last rank": all to its experts; "one": all to one expert; "outside": a part to nobody; "twice": an expert twice
    )
    hidden: int = 24
    inter: int = 16
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    gate_layout: str = "halves"
    biases: bool = False
    capacity: int | None = None
    view: bool = False  # operands that are not contiguous

    @property
    def options(self) -> dict:
        return dict(activation=self.activation, gate_layout=self.gate_layout)


_LAYERS = {
    "uneven": Case(),
    "top 1": Case(top_k=1, dtype=torch.float16),
    "top 8": Case(top_k=8),
    "all to the last rank": Case(routing="last rank", top_k=4),
    "all to one expert": Case(routing="one", top_k=1),
    "ids outside": Case(routing="outside", top_k=3, dtype=torch.float16),
    "an expert twice": Case(routing="twice", top_k=3),
    "a rank without tokens": Case(tokens=(13, 0, 7, 1)),
    "tokens on the last rank only": Case(tokens=(0, 9, 0, 0), top_k=8),
    "no tokens": Case(tokens=(0, 0, 0, 0)),
    "clamped swiglu with biases": Case(activation="swigluoai", gate_layout="alternating", biases=True, top_k=4),
    "gelu in blocks": Case(activation="gelu", gate_layout="blocks", biases=True, dtype=torch.float16),
    "odd sizes": Case(hidden=25, inter=9, top_k=5),
    "views": Case(view=True, top_k=3),
}


def make_cases(scale: int = 1, hidden: int = 24, inter: int = 16) -> dict[str, Case]:
    """Each layer with just the rows that are needed, with capacity for every token, and with more; then too little of it."""
    cases = {}
    for name, layer in _LAYERS.items():
        own = {} if layer.hidden % 8 else dict(hidden=hidden, inter=inter)
        layer = dataclasses.replace(layer, tokens=tuple(t * scale for t in layer.tokens), **own)
        most = max(*layer.tokens, 1)
        for what, capacity in (("needed", None), ("capacity", most), ("more capacity", most + 5)):
            cases[f"{name}, {what}"] = dataclasses.replace(layer, capacity=capacity)
    sized = dict(tokens=tuple(t * scale for t in (37, 11, 20, 5)), hidden=hidden, inter=inter)
    cases["less capacity than tokens, none lost"] = Case(**sized, top_k=1, capacity=30 * scale)
    cases["ids outside, less capacity than tokens"] = Case(**sized, top_k=3, routing="outside", capacity=32 * scale)
    for capacity in (1, 10 * scale):
        cases[f"tokens lost by a capacity of {capacity}"] = Case(**sized, top_k=2, capacity=capacity)
    cases["tokens lost by one rank"] = Case(**sized, top_k=4, routing="last rank", capacity=20 * scale)
    return cases


# ---- inputs and truth --------------------------------------------------------------------------------------------------------


def make_ids(case: Case, tokens: int, ranks: int) -> torch.Tensor:
    share = EXPERTS // ranks
    if case.routing == "last rank":
        return EXPERTS - share + torch.rand(tokens, share).argsort(1)[:, : case.top_k].int()
    ids = torch.rand(tokens, EXPERTS).argsort(1)[:, : case.top_k].int()
    if case.routing == "one":
        ids.fill_(EXPERTS // 2)
    if case.routing == "twice":
        ids[:, 1] = ids[:, 0]
    if case.routing == "outside":
        ids[::2, 0], ids[::3, -1], ids[::5] = -1, EXPERTS, -(2**31)
    return ids


def make_layer(case: Case, rank: int, ranks: int, device) -> tuple[tuple, dict]:
    """args and kwargs of moe_ffn over all experts for the tokens of one rank; the experts are the same on every rank."""
    own = lambda x: x.to(case.dtype).to(device)  # noqa: E731
    torch.manual_seed(1)
    hidden, inter = case.hidden, case.inter
    w13 = own(torch.randn(EXPERTS, 2 * inter, hidden) / hidden**0.5)
    w2 = own(torch.randn(EXPERTS, hidden, inter) / inter**0.5)
    kwargs = dict(case.options)
    if case.biases:
        kwargs |= dict(b13=own(torch.randn(EXPERTS, 2 * inter)), b2=own(torch.randn(EXPERTS, hidden)))
    torch.manual_seed(100 + rank)
    tokens = case.tokens[rank]
    x, ids = own(torch.randn(tokens, hidden) * 2), make_ids(case, tokens, ranks).to(device)
    weights = torch.rand(tokens, case.top_k).to(device)
    if case.view:
        x = torch.stack((x, x), 1)[:, 1]
        ids, weights = ids.t().contiguous().t(), weights.repeat(2, 1)[tokens:]
        w13 = torch.cat((w13, w13), 2)[:, :, :hidden]
    return (x, w13, w2, weights, ids), kwargs


def shard(case: Case, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """What this rank passes of it."""
    x, w13, w2, weights, ids = args
    share = local_experts(EXPERTS)
    own = {name: value[share] if name in ("b13", "b2") else value for name, value in kwargs.items()}
    return (x, w13[share], w2[share], weights, ids), own | dict(capacity=case.capacity)


def definition(args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer token by token in float64, and the sums of the absolute values of what its last products add."""
    x, w13, w2, weights, ids = args
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    size = torch.zeros_like(out)
    inter = w2.shape[2]
    step = torch.arange(inter, device=x.device)
    gate_at, up_at = {
        "halves": (step, inter + step),
        "alternating": (2 * step, 2 * step + 1),
        "blocks": (step // 8 * 16 + step % 8, step // 8 * 16 + 8 + step % 8),
    }[kwargs["gate_layout"]]
    for token, chosen in enumerate(ids.tolist()):
        for j, expert in enumerate(chosen):
            if not 0 <= expert < len(w13):
                continue
            h = w13[expert].double() @ x[token].double()
            h = h + kwargs["b13"][expert].double() if "b13" in kwargs else h
            gate, up = h[gate_at], h[up_at]
            if kwargs["activation"] == "swigluoai":
                gate = gate.clamp(max=7)
                h = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
            else:
                h = getattr(torch.nn.functional, kwargs["activation"])(gate) * up
            weight = float(weights[token, j])
            bias = kwargs["b2"][expert].double() if "b2" in kwargs else torch.zeros_like(out[0])
            out[token] += weight * (w2[expert].double() @ h + bias)
            size[token] += weight * (w2[expert].double().abs() @ h.abs() + bias.abs())
    return out, size


def tokens_for(case: Case, ids: torch.Tensor, rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """By the rule: of the tokens with experts of the rank, in order, the first ``capacity``, and those behind them."""
    share = EXPERTS // ranks
    needing = [t for t, chosen in enumerate(ids.tolist()) if any(rank * share <= e < (rank + 1) * share for e in chosen)]
    return needing[: case.capacity], needing[len(needing) if case.capacity is None else case.capacity :]


def lost_tokens(case: Case, ids: torch.Tensor, ranks: int) -> set[int]:
    return {token for rank in range(ranks) for token in tokens_for(case, ids, rank, ranks)[1]}


def pairs_for(case: Case, rank: int, ranks: int) -> int:
    """(token, expert) pairs of all ranks' tokens that the rank has to compute."""
    share, pairs = EXPERTS // ranks, 0
    for source in range(ranks):
        ids = make_layer(case, source, ranks, "cpu")[0][4]
        kept = ids[tokens_for(case, ids, rank, ranks)[0]]
        pairs += int(((kept >= rank * share) & (kept < (rank + 1) * share)).sum())
    return pairs


def rows_needed(ids: torch.Tensor, ranks: int) -> int:
    share = EXPERTS // ranks
    return sum(len({e // share for e in chosen if 0 <= e < EXPERTS}) for chosen in ids.tolist())


def mismatch(out: torch.Tensor, case: Case, args: tuple, kwargs: dict, ranks: int) -> str | None:
    """Why ``out`` is not this rank's part of the layer, or None."""
    x, w13, w2, weights, ids = args
    if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        return f"{out.dtype} {tuple(out.shape)}, strides {out.stride()}"
    lost = lost_tokens(case, ids, ranks)
    if lost != set(out.isnan().any(1).nonzero().flatten().tolist()) or lost != set(out.isnan().all(1).nonzero().flatten().tolist()):
        return f"{sorted(lost)} should be lost, rows with NaN are {out.isnan().any(1).nonzero().flatten().tolist()}"
    kept = [t for t in range(len(x)) if t not in lost]
    args, out = (x[kept], w13, w2, weights[kept], ids[kept]), out[kept]
    truth, size = definition(args, kwargs)
    # Half a unit each by rounding the inner activations, an expert's row, a rank's sum and the result.
    off = (out.double() - truth).abs() > 2.05 * torch.finfo(case.dtype).eps * size + 1e-6
    if off.any():
        token, column = off.nonzero()[0].tolist()
        return f"{int(off.sum())} elements off, first [{token}, {column}]: {out[token, column]}, expected {truth[token, column]}"
    problem = layer_mismatch(out, args, kwargs)
    if problem is not None:
        return f"against the 2x rule: {problem}"
    whole = minfer.moe_ffn(*args, **kwargs)
    if ((out.double() - whole.double()).abs() > 3.1 * torch.finfo(case.dtype).eps * size + 1e-6).any():
        return "not moe_ffn's over all experts"
    return None


# ---- what a rank does --------------------------------------------------------------------------------------------------------


class Watched:
    """Counts the rows that the calls within send and compute, and lets them find every byte of their new buffers as ``byte``."""

    def __init__(self, byte: int):
        self.byte = byte
        self.rows: list[int] = []  # of each exchange of rows: the first of a call is the dispatch
        self.pairs: list[int] = []  # of each product

    def __enter__(self):
        self._plain = torch.empty, dist.all_to_all_single, distributed.grouped_gemm

        def empty(*args, **kwargs):
            new = self._plain[0](*args, **kwargs)
            if new.is_contiguous():
                new.view(-1).view(torch.uint8).fill_(self.byte)
            return new

        def all_to_all_single(output, input, *args, **kwargs):  # noqa: A002
            if input.dtype == torch.uint8:
                self.rows.append(len(input))
            return self._plain[1](output, input, *args, **kwargs)

        def grouped_gemm(a, b, offsets, **kwargs):
            self.pairs.append(int(offsets[-1]))
            return self._plain[2](a, b, offsets, **kwargs)

        torch.empty, dist.all_to_all_single, distributed.grouped_gemm = empty, all_to_all_single, grouped_gemm
        return self

    def __exit__(self, *_):
        torch.empty, dist.all_to_all_single, distributed.grouped_gemm = self._plain


def check_case(case: Case, rank: int, ranks: int, device) -> str | None:
    args, kwargs = make_layer(case, rank, ranks, device)
    own_args, own_kwargs = shard(case, args, kwargs)
    counter = torch.tensor([3], dtype=torch.int32, device=device)
    if case.capacity is not None:
        own_kwargs["overflow"] = counter
    # What is not written is NaN to x and -1 to ids, then 0: a number, and an expert's.
    with Watched(255) as seen:
        out = expert_parallel_moe(*own_args, **own_kwargs)
    with Watched(0) as seen_again:
        again = expert_parallel_moe(*own_args, **own_kwargs)
    problem = mismatch(out, case, args, kwargs, ranks)
    if problem is not None:
        return problem
    if not torch.equal(again.nan_to_num(), out.nan_to_num()):
        return "two runs differ"
    lost = 2 * len(lost_tokens(case, args[4], ranks))
    if int(counter) != 3 + lost:
        return f"overflow went from 3 to {int(counter)}, expected {3 + lost}"
    wanted = rows_needed(args[4], ranks) if case.capacity is None else ranks * case.capacity
    if seen.rows[0] != wanted:
        return f"{seen.rows[0]} rows were sent, expected {wanted}"
    pairs = seen.pairs + seen_again.pairs
    wanted = pairs_for(case, rank, ranks)
    return None if pairs == 4 * [wanted] else f"{pairs} pairs were computed, expected {wanted} each time"


def exchange_cases(cases: dict[str, Case]) -> dict[str, Case]:
    """Those that an exchange takes: every token has a place."""
    fit = {name: case for name, case in cases.items() if case.hidden % 8 == 0 and case.top_k > 0}
    return {name: case for name, case in fit.items() if case.capacity is not None and max(case.tokens) <= case.capacity}


def check_exchanges(rank: int, ranks: int, device, cases: dict[str, Case], mapped: bool, collectives: bool) -> dict[str, str | None]:
    """Each case through an exchange that is larger than it, twice; mapped: what the exchange must be. collectives: whether calls without an
    exchange can be compared with."""
    found: dict[str, str | None] = {}
    sizes = sorted({(case.hidden, case.top_k) for case in cases.values()})
    for hidden, top_k in sizes:
        of_size = {name: case for name, case in cases.items() if (case.hidden, case.top_k) == (hidden, top_k)}
        most = max(case.capacity for case in of_size.values()) + 3
        exchange = ExpertExchange(most, hidden, top_k, device=device)
        for name, case in of_size.items():
            found[name] = _exchange_problem(case, rank, ranks, device, exchange, mapped, collectives)
        exchange.close()
    return found


def _exchange_problem(case: Case, rank: int, ranks: int, device, exchange: ExpertExchange, mapped: bool, collectives: bool) -> str | None:
    args, kwargs = make_layer(case, rank, ranks, device)
    own_args, own_kwargs = shard(case, args, kwargs)
    outs = []
    for byte in (255, 0):  # what is not written is NaN, then numbers
        if exchange.mapped:
            exchange._bytes[exchange._layout["ids"] :].fill_(byte)
            torch.cuda.synchronize()
        dist.barrier()
        outs.append(expert_parallel_moe(*own_args, exchange=exchange, **own_kwargs))
    # Every rank calls as often, whatever it finds.
    without = expert_parallel_moe(*own_args, **own_kwargs) if collectives else outs[0]
    layered_problem = _layer_problem(case, args, kwargs, own_args, own_kwargs, ranks, exchange)
    if exchange.mapped != mapped:
        return f"mapped is {exchange.mapped}"
    if not torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16)):
        return "two runs differ"
    if not torch.equal(outs[0].view(torch.int16), without.view(torch.int16)):
        return "not the bits of a call without an exchange"
    problem = mismatch(outs[0], case, args, kwargs, ranks)
    if problem is None and layered_problem is not None:
        return f"by layer: {layered_problem}"
    return problem


def _layer_problem(case: Case, args, kwargs, own_args, own_kwargs, ranks: int, exchange: ExpertExchange) -> str | None:
    """The same with a layer of the caller's, which is told its own experts' numbers and gives rows of others' tokens as zeros."""
    (x, w13, w2, weights, ids), options = own_args, {name: x for name, x in own_kwargs.items() if name != "capacity"}
    outside = []

    def layer(rows, row_weights, row_ids):
        outside.append(bool(((row_ids < -1) | (row_ids >= len(w13))).any()))
        return minfer.moe_ffn(rows, w13, w2, row_weights, row_ids, **options)

    out = expert_parallel_layer(x, weights, ids, layer, EXPERTS, capacity=case.capacity, exchange=exchange)
    if outside != [False]:
        return f"ids were outside in calls {outside}"
    return mismatch(out, case, args, kwargs, ranks)


def check_cases(rank: int, ranks: int, device, cases: dict[str, Case]) -> dict[str, str | None]:
    return {name: check_case(case, rank, ranks, device) for name, case in cases.items()}


def _rank_main(rank: int, ranks: int, device_type: str, folder: str, work: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    on_gpu, nccl = device_type != "cpu", device_type == "cuda"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not nccl:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
        device_id=device if nccl else None,
    )
    try:
        found = work(rank, ranks, device, *arguments)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(ranks: int, device_type: str, folder: Path, work: Callable, *arguments) -> list:
    """What ``work(rank, ranks, device, *arguments)`` returns on each rank, a process each.

    device_type: "cpu", over gloo; "cuda", a GPU each, over NCCL; "shared", over gloo on the GPUs that there are, which ranks may share: for
    what goes through mapped memory alone.
    """
    torch.multiprocessing.spawn(_rank_main, (ranks, device_type, str(folder), work, arguments), nprocs=ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def found_or_error(ranks: int, device_type: str, folder: Path, work: Callable) -> list | Exception:
    """For fixtures that run one set of processes for many tests: what each rank found, or what went wrong, for of_ranks."""
    try:
        return run_ranks(ranks, device_type, folder, work)
    except Exception as error:
        return error


def of_ranks(found: list | Exception, what: str) -> list:
    """Each rank's ``what``."""
    if isinstance(found, Exception):
        raise found
    return [by_rank[what] for by_rank in found]
