"""Expert parallelism: a mixture-of-experts layer whose experts are divided among the ranks of a process group.

    share = minfer.distributed.local_experts(num_experts)  # this rank's slice of the experts
    out = minfer.distributed.expert_parallel_moe(x, w13[share], w2[share], weights, ids)

One all-to-all takes tokens to the ranks that have their experts, one brings back what those made of them:

    rank of the token                                  rank of the experts
    rows of x, ids and weights     -- dispatch -->     moe_sort, grouped_gemm, grouped_gemm, moe_combine: the layer of its own experts
    moe_combine of the ranks' rows  <-- return --      a row for each row

A token goes to a rank once, however many of its experts are there, and their weighed sum comes back as one row: with top-8 routing over 2
ranks that is a quarter of the bytes of a row for each expert.

Between GPUs of one host an :class:`ExpertExchange` takes the place of both all-to-alls, and of the copies in front of and behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import grouped_gemm as checks_moe
from ..checks.common import Checker, allocation_error, is_integer
from ..ops.grouped_gemm import grouped_gemm
from ..ops.moe_routing import moe_combine, moe_sort
from .expert_exchange import ExpertExchange
from .places import place_in

_OP = "expert_parallel_moe"
_ALIGNMENT = 16  # bytes: the grouped GEMM reads x where it was received, by TMA
_MOST_PLACES = 2**31


def local_experts(num_experts: int, group: dist.ProcessGroup | None = None) -> slice:
    """The experts of this rank, ``w13[local_experts(num_experts)]``: rank r of R has r * num_experts / R to (r + 1) * num_experts / R.

    Args:
      num_experts: of the layer, a multiple of the group's ranks.
      group: None is the default group.

    Raises:
      RuntimeError: the experts cannot be divided, or there is no group.
    """
    check = Checker("local_experts")
    ranks, rank = place_in(check, group)
    good = is_integer(num_experts) and num_experts >= 1 and num_experts % ranks == 0
    check(good, "num_experts must be a positive multiple of the {} ranks, got {}", ranks, num_experts)
    share = num_experts // ranks
    return slice(rank * share, (rank + 1) * share)


def expert_parallel_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    activation: str = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate_layout: str = "halves",
    capacity: int | None = None,
    overflow: Tensor | None = None,
    exchange: ExpertExchange | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """:func:`minfer.moe_ffn` of this rank's tokens over the experts of all ranks. A collective: every rank of the group calls it.

    Without ``capacity`` just the rows that are needed move. Their numbers are exchanged on the device and then read by the host, which
    waits for them once, so that a CUDA graph cannot have it. With ``capacity`` every pair of ranks exchanges that many rows, needed or not:
    no shape depends on the routing, the host waits for nothing, and a CUDA graph follows its routing where the backend can be captured
    (NCCL: call once before, and capture with ``capture_error_mode="thread_local"``, as its watchdog is another thread). With ``exchange``
    ranks have places for ``capacity`` tokens of each rank and write them directly: only what is needed moves, nothing is waited for by the
    host, and a CUDA graph follows its routing: for GPUs of one host.

    Args:
      x: [tokens, hidden], float16 or bfloat16: this rank's tokens. Ranks may have different numbers of them, also none.
      w13: [local experts, 2 * inter, hidden], x's dtype: see :func:`local_experts`. All ranks have equally many experts.
      w2: [local experts, hidden, inter], x's dtype.
      weights, ids: float32 and int32 [tokens, top_k], of :func:`minfer.moe_router`, with ids of the whole layer, 0 to ranks * local experts
        - 1. An id outside adds nothing.
      activation, b13, b2, gate_layout: as in :func:`minfer.moe_ffn`; b13 and b2 are those of the local experts.
      capacity: rows from each rank to each, the same number on every rank. A rank with at most so many tokens loses none of them. Of more,
        a rank takes the first ``capacity`` that need it; a token behind them has NaN in all of its output, as a sum that lacks an expert
        would be a wrong number. Buffers: ranks * capacity rows each way, and for the experts' products top_k times as many.
      overflow: int32 [1] on x's device, with ``capacity``: how many of this rank's tokens were lost is added to it, on the device. One
        counter may serve many layers and replays; it is the caller's to zero and to read. Not with ``exchange``, where none are.
      exchange: an :class:`ExpertExchange` of these sizes, also for several layers in turn. ``capacity`` is then the places of this call, at
        most the exchange's (default); no rank may have more tokens. Its group counts.
      group: None is the default group; its backend must be one for x's device.

    Returns:
      [tokens, hidden], x's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was sent: the other ranks
        wait for this one until the group's timeout, or with an exchange for ten minutes, after which their kernels trap. Without
        ``capacity`` also, on the ranks that see it, where hidden, top_k, dtype or the number of local experts are another rank's; with it
        that is not checked.

    Numerics: those of moe_ffn and one rounding more. What the experts of a rank return for a token, weighed and rounded to x's dtype, is
    added up in float32 in the order of j and rounded; the ranks' sums are added up in float32 in the order of the ranks and rounded. The
    same inputs on the same number of ranks give the same bits in every run. There is no backward. ``torch.compile`` breaks its graph here.

    What travels: for each token and each rank that has experts of it, x, ids and weights there (2 * hidden + 8 * top_k bytes, rounded up
    to 16), and 2 * hidden bytes back; with ``capacity`` as much for each of its rows. With an exchange, the same rows for each token and
    rank that need them, and 8 * top_k bytes for every place.
    """
    check = Checker(_OP)
    group = _group_of(check, exchange, group)
    ranks, rank = place_in(check, group)
    checks_moe.check_moe_ffn(x, w13, w2, weights, ids, activation=activation, b13=b13, b2=b2, gate_layout=gate_layout, op=_OP)
    capacity = _check_places(check, x, ids, ranks, capacity, overflow, exchange)
    call = _Call(x, weights, ids, w13.shape[0], ranks, capacity, overflow, group)
    products = functools.partial(_products, w13=w13, w2=w2, b13=b13, b2=b2, activation=activation, gate_layout=gate_layout)

    def run() -> Tensor:
        if exchange is not None and exchange.mapped:
            made = products(*exchange.send(x, weights, ids, call.experts, capacity), None)
            return exchange.sums(made.y, made.inverse, ids, call.experts, capacity)

        def layer(rows: _Rows, pairs: int | None) -> Tensor:
            made = products(rows.x, rows.weights, rows.ids - rank * call.experts, pairs)
            return moe_combine(made.y, made.inverse)

        return _through_collectives(call, layer)

    return _without_gradients(_OP, run, (x, w13, w2, weights, b13, b2))


def expert_parallel_layer(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    layer: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_experts: int,
    *,
    capacity: int | None = None,
    overflow: Tensor | None = None,
    exchange: ExpertExchange | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """:func:`expert_parallel_moe` for experts of any format: the caller's ``layer`` computes this rank's experts.

        share = minfer.distributed.local_experts(num_experts)
        gate_up = minfer.quantize.quantize_fp8_experts(w13[share], gated=True)
        down = minfer.quantize.quantize_fp8_experts(w2[share])

        def layer(x, weights, ids):
            return gate_up.ffn(x, down, weights, ids)

        out = minfer.distributed.expert_parallel_layer(x, weights, ids, layer, num_experts, exchange=exchange)

    Args:
      x, weights, ids: as of :func:`expert_parallel_moe`.
      layer: called once, also where no token came, with x [rows, hidden], float32 weights and int32 ids [rows, top_k], ids as numbers
        among this rank's experts, or -1: of another rank or nobody, which adds nothing. A row without ids here may be any bits, NaN too. It
        returns [rows, hidden] of x's dtype, each row by itself, such as :func:`minfer.moe_ffn_fp8` or ``moe_ffn_w4a16``; a row without
        ids as zeros.
      num_experts: of the whole layer, a multiple of the ranks.
      capacity, overflow, exchange, group: as of :func:`expert_parallel_moe`.

    Returns:
      [tokens, hidden], x's dtype, contiguous.

    Raises:
      RuntimeError: as :func:`expert_parallel_moe`; or what ``layer`` returns is no such tensor, which leaves the other ranks waiting.

    Numerics: those of ``layer``, whose rows the ranks' sums are, added up in float32 in the order of the ranks and rounded. There is no
    backward.
    """
    check = Checker("expert_parallel_layer")
    group = _group_of(check, exchange, group)
    ranks, rank = place_in(check, group)
    checks_moe.check_tokens_and_routes(check, x, weights, ids)
    good = is_integer(num_experts) and num_experts >= 1 and num_experts % ranks == 0
    check(good, "num_experts must be a positive multiple of the {} ranks, got {}", ranks, num_experts)
    capacity = _check_places(check, x, ids, ranks, capacity, overflow, exchange)
    call = _Call(x, weights, ids, num_experts // ranks, ranks, capacity, overflow, group)

    def checked(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = layer(rows, weights, ids)
        good = isinstance(y, Tensor) and y.shape == rows.shape and y.dtype == rows.dtype and y.device == rows.device
        check(good, "layer must return {} {} on {}, got {}", rows.dtype, list(rows.shape), rows.device, _described(y))
        return y.contiguous()

    def run() -> Tensor:
        if exchange is not None and exchange.mapped:
            y = checked(*exchange.send(x, weights, ids, call.experts, capacity))
            return exchange.sums(y, None, ids, call.experts, capacity)

        def own(rows: _Rows, _pairs: int | None) -> Tensor:
            numbers = rows.ids - rank * call.experts
            return checked(rows.x, rows.weights, numbers.masked_fill((numbers < 0) | (numbers >= call.experts), -1))

        return _through_collectives(call, own)

    return _without_gradients("expert_parallel_layer", run, (x, weights))


def _described(y: object) -> str:
    return f"{str(y.dtype).removeprefix('torch.')} {list(y.shape)} on {y.device}" if isinstance(y, Tensor) else repr(type(y))


class _Call(NamedTuple):
    x: Tensor
    weights: Tensor
    ids: Tensor
    experts: int  # of each rank
    ranks: int
    capacity: int | None
    overflow: Tensor | None
    group: dist.ProcessGroup | None


def _group_of(check: Checker, exchange: ExpertExchange | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if exchange is None:
        return group
    check(isinstance(exchange, ExpertExchange), "exchange must be a minfer.distributed.ExpertExchange, got {}", type(exchange))
    check(group is None or group is exchange.group, "group must not be given beside an exchange, which has its own")
    return exchange.group


def _check_places(
    check: Checker,
    x: Tensor,
    ids: Tensor,
    ranks: int,
    capacity: int | None,
    overflow: Tensor | None,
    exchange: ExpertExchange | None,
) -> int | None:
    """The call's capacity."""
    if exchange is not None:
        wanted, got = (exchange.hidden, exchange.top_k), (x.shape[1], ids.shape[1])
        check(got == wanted, "the exchange is for hidden = {} and top_k = {}, got {} and {}", *wanted, *got)
        check(overflow is None, "overflow must not be given beside an exchange, which loses no token")
        capacity = exchange.capacity if capacity is None else capacity
        good = is_integer(capacity) and 1 <= capacity <= exchange.capacity
        check(good, "capacity must be 1 to the exchange's {}, got {}", exchange.capacity, capacity)
        check(x.shape[0] <= capacity, "x must have at most capacity = {} tokens with an exchange, got {}", capacity, x.shape[0])
        if exchange.mapped:
            check(x.device == exchange.device, "x must be on the exchange's device {}, got {}", exchange.device, x.device)
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    check(capacity is not None or not capturing, "capacity must be given in a CUDA graph: without it the host reads sizes")
    check(overflow is None or capacity is not None, "overflow needs capacity: without it nothing is lost")
    if capacity is not None:
        check(is_integer(capacity) and capacity >= 1, "capacity must be a positive integer, got {}", capacity)
        places = ranks * capacity * max(ids.shape[1], 1)
        check(places < _MOST_PLACES, "capacity * ranks * top_k must be below 2^31, got {} * {} * {}", capacity, ranks, ids.shape[1])
    if overflow is not None:
        check(tuple(overflow.shape) == (1,), "overflow must be [1], got {}", overflow.shape)
        check(overflow.dtype == torch.int32, "overflow must be int32, got {}", overflow.dtype)
        check(overflow.device == x.device, "overflow must be on x's device {}, got {}", x.device, overflow.device)
    return capacity


def _without_gradients(op: str, call: Callable[[], Tensor], tensors: tuple[Tensor | None, ...]) -> Tensor:
    differentiated = [t for t in tensors if t is not None and t.requires_grad]
    if torch.is_grad_enabled() and differentiated:
        return _InferenceOnly.apply(op, call, *differentiated)
    return call()


class _InferenceOnly(torch.autograd.Function):
    """Collectives would let gradients stop without a word."""

    @staticmethod
    def forward(ctx, op, call, *_tensors):
        ctx.op = op
        return call()

    @staticmethod
    def backward(ctx, *_grads):
        raise RuntimeError(
            f"minfer::{ctx.op}: has no backward, it is an inference operator; call it under torch.inference_mode() or no_grad()"
        )


# ---- what travels ----------------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    data: Tensor  # uint8 [rows, bytes of a row]; the others are views of it
    x: Tensor  # [rows, hidden]
    ids: Tensor  # int32 [rows, top_k], of the whole layer
    weights: Tensor  # float32 [rows, top_k]


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _empty_rows(rows: int, x: Tensor, top_k: int) -> _Rows:
    ids_begin = _round_up(x.shape[1] * x.dtype.itemsize)
    weights_begin = ids_begin + 4 * top_k
    size = max(_round_up(weights_begin + 4 * top_k), _ALIGNMENT)  # never 0: a view as wider numbers divides the stride
    try:
        data = torch.empty((rows, size), dtype=torch.uint8, device=x.device)
    except RuntimeError as error:
        what = f"{rows} rows of {size} bytes that the ranks exchange"
        raise allocation_error(f"minfer::{_OP}", rows * size, what, error) from error

    def part(begin: int, columns: int, dtype: torch.dtype) -> Tensor:
        return data[:, begin : begin + columns * dtype.itemsize].view(dtype)

    return _Rows(data, part(0, x.shape[1], x.dtype), part(ids_begin, top_k, torch.int32), part(weights_begin, top_k, torch.float32))


class _Dispatch(NamedTuple):
    rows: _Rows  # to send, by rank
    inverse: Tensor  # int32 [tokens, ranks]: where among them, and so among what returns, a token's row for a rank is; or -1
    sent: list[int] | None = None  # rows by rank; None: equally many
    received: list[int] | None = None
    pairs: int | None = None  # of the received tokens with experts of this rank; None: unknown
    lost: Tensor | None = None  # bool [tokens]


def _fill(rows: _Rows, x: Tensor, weights: Tensor, ids: Tensor, tokens: Tensor) -> None:
    for source, target in ((x, rows.x), (ids, rows.ids), (weights, rows.weights)):
        torch.index_select(source, 0, tokens, out=target)


class _ByRank(NamedTuple):
    token_index: Tensor  # as moe_sort returns them, with ranks for experts
    offsets: Tensor
    inverse: Tensor
    hits: Tensor  # int64 [tokens, ranks]: how many of a token's experts a rank has


def _sort_by_rank(ids: Tensor, experts: int, ranks: int) -> _ByRank:
    numbers = torch.arange(ranks, dtype=torch.int32, device=ids.device)
    hits = (ids.div(experts, rounding_mode="floor").unsqueeze(-1) == numbers).sum(1)
    return _ByRank(*moe_sort(torch.where(hits > 0, numbers, -1), ranks)[:3], hits)


def _needed_rows(x: Tensor, weights: Tensor, ids: Tensor, experts: int, ranks: int, group: dist.ProcessGroup | None) -> _Dispatch:
    """Rows by rank, without gaps. The host waits for their numbers."""
    by_rank = _sort_by_rank(ids, experts, ranks)
    signature = _signature(x, ids.shape[1], experts)
    sizes = [(by_rank.hits > 0).sum(0), by_rank.hits.sum(0), torch.full((ranks,), signature, device=x.device)]
    ours = torch.stack(sizes, 1)  # int64 [ranks, 3]
    theirs = torch.empty_like(ours)
    dist.all_to_all_single(theirs, ours, group=group)
    (ours, theirs) = torch.stack([ours, theirs]).tolist()
    for rank, (_, _, their_signature) in enumerate(theirs):
        text = "ranks must agree, this one has {} and rank {} has {}"
        Checker(_OP)(their_signature == signature, text, _read_signature(signature), rank, _read_signature(their_signature))
    sent, received = [size[0] for size in ours], [size[0] for size in theirs]
    rows = _empty_rows(sum(sent), x, ids.shape[1])
    _fill(rows, x, weights, ids, by_rank.token_index[: sum(sent)])
    return _Dispatch(rows, by_rank.inverse, sent, received, sum(size[1] for size in theirs))


def _signature(x: Tensor, top_k: int, experts: int) -> int:
    """What ranks must agree about, in 63 bits."""
    return ((x.shape[1] << 21 | top_k) << 10 | experts) << 1 | (x.dtype == torch.bfloat16)


def _read_signature(signature: int) -> str:
    hidden, top_k, experts = signature >> 32, signature >> 11 & (1 << 21) - 1, signature >> 1 & (1 << 10) - 1
    return f"hidden = {hidden}, top_k = {top_k}, {experts} local experts, {'bfloat16' if signature & 1 else 'float16'}"


def _all_rows(x: Tensor, weights: Tensor, ids: Tensor, ranks: int, capacity: int) -> _Dispatch:
    """Every token to every rank, in its own place: as many bytes as any choice of them, and nothing to sort."""
    tokens = x.shape[0]
    rows = _empty_rows(ranks * capacity, x, ids.shape[1])
    for source, target in ((x, rows.x), (ids, rows.ids), (weights, rows.weights)):
        target.unflatten(0, (ranks, capacity))[:, :tokens] = source
    if tokens < capacity:
        rows.ids.unflatten(0, (ranks, capacity))[:, tokens:] = -1
    places = torch.arange(ranks * capacity, dtype=torch.int32, device=x.device).view(ranks, capacity)
    return _Dispatch(rows, places[:, :tokens].t())


def _first_rows(x: Tensor, weights: Tensor, ids: Tensor, experts: int, ranks: int, capacity: int) -> _Dispatch:
    """Rows by rank, the first ``capacity`` of each; a rank's begin at a multiple of it."""
    token_index, offsets, inverse, _ = _sort_by_rank(ids, experts, ranks)
    begins = torch.nn.functional.pad(offsets[:-1], (1, 0))
    sorted_places = begins[:, None] + torch.arange(capacity, dtype=torch.int32, device=x.device)  # [ranks, capacity]
    rows = _empty_rows(ranks * capacity, x, ids.shape[1])
    # Rows that a rank does not need hold some token, without ids.
    _fill(rows, x, weights, ids, token_index.index_select(0, sorted_places.clamp(max=len(token_index) - 1).flatten()))
    rows.ids.masked_fill_((sorted_places >= offsets[:, None]).view(-1, 1), -1)
    behind = inverse >= begins + capacity
    to_row = torch.arange(0, ranks * capacity, capacity, dtype=torch.int32, device=x.device) - begins
    return _Dispatch(rows, (inverse + to_row).masked_fill_(behind | (inverse < 0), -1), lost=behind.any(1))


# ---- the layer -------------------------------------------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    y: Tensor  # [pairs, hidden]: of each pair, weighed
    inverse: Tensor  # int32 [rows, top_k]: where they are, or -1


def _products(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    pairs: int | None,
    *,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
    gate_layout: str,
) -> _Pairs:
    """Those of moe_ffn; where the number of pairs is known, no more rows than those are computed. ids outside are nobody's."""
    token_index, offsets, inverse, scale = moe_sort(ids, w13.shape[0], weights=weights)
    token_index, scale = token_index[:pairs], scale[:pairs]
    h = grouped_gemm(x, w13.mT, offsets, bias=b13, gather=token_index, activation=activation, gated=True, gate_layout=gate_layout)
    return _Pairs(grouped_gemm(h, w2.mT, offsets, bias=b2, row_scale=scale), inverse)


def _through_collectives(call: _Call, layer: Callable[[_Rows, int | None], Tensor]) -> Tensor:
    """layer: of the rows that came, and of how many pairs, where that is known."""
    x, weights, ids, experts, ranks, capacity, overflow, group = call
    if capacity is None:
        dispatch = _needed_rows(x, weights, ids, experts, ranks, group)
    elif x.shape[0] <= capacity:
        dispatch = _all_rows(x, weights, ids, ranks, capacity)
    else:
        dispatch = _first_rows(x, weights, ids, experts, ranks, capacity)
    _, _, sent, received, pairs, lost = dispatch
    arrived = _empty_rows(ranks * capacity if received is None else sum(received), x, ids.shape[1])
    dist.all_to_all_single(arrived.data, dispatch.rows.data, received, sent, group=group)
    y = layer(arrived, pairs)
    returned = torch.empty((dispatch.rows.data.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    # Bytes: not every backend knows bfloat16.
    dist.all_to_all_single(returned.view(torch.uint8), y.view(torch.uint8), sent, received, group=group)
    out = moe_combine(returned, dispatch.inverse)
    if lost is not None:
        out.masked_fill_(lost[:, None], float("nan"))
        if overflow is not None:
            overflow.add_(lost.sum(dtype=torch.int32))
    return out
