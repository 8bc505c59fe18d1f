"""The launch of a sum over ranks, a residual and a norm, with the ranks on one GPU: buffers in ordinary memory, a stream for each rank."""

from __future__ import annotations

import os

import minfer
import pytest
import torch

pytest.importorskip("transformers")

from .cases import norms_of_sums, parts_of, run_ranks, wrong_norm  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", reason="launches wait for each other: they must run at the same time"
    ),
]

OPS = torch.ops.minfer
MOST = 1 << 17
EPS = 1e-6


class Ranks:
    """Ranks that share the current GPU. Their launches run at once: what is asked of them must be few CTAs."""

    def __init__(self, count: int, most: int = MOST):
        size = OPS._all_reduce_bytes(most, count)
        self.memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        self.addresses, self.most = [x.data_ptr() for x in self.memory], most
        self.streams = [torch.cuda.Stream() for _ in range(count)]
        torch.cuda.synchronize()

    def together(self, call) -> list:
        """call(rank) of each rank, which enqueues on its stream; nothing between may wait for the GPU."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        found = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(call(rank))
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        return found

    def warm(self, like: torch.Tensor) -> None:
        """Each stream has memory for outputs like this, filled with NaN, so that no launch waits for an allocation."""
        self.together(lambda _: [torch.full_like(like, float("nan")) for _ in range(4)])
        torch.cuda.synchronize()

    def norm(self, rank: int, x, residual, weight, offset: float = 0.0) -> torch.Tensor:
        return OPS._all_reduce_rms_norm(x, residual, weight, EPS, offset, self.addresses, rank, self.most)

    def sum(self, rank: int, x) -> None:
        OPS._all_reduce(x, self.addresses, rank, self.most)


@pytest.fixture(scope="module", params=(2, 4, 8))
def ranks(request) -> Ranks:
    return Ranks(request.param)


def inputs(ranks: Ranks, rows: int, width: int, dtype: torch.dtype, seed: int, adds: bool):
    """On the CPU, and on the GPU for each rank."""
    parts, residual, weight = parts_of(len(ranks.streams), rows, width, dtype, seed)
    residual = residual if adds else None
    on_gpu = [(x.cuda(), None if residual is None else residual.cuda(), weight.cuda()) for x in parts]
    ranks.warm(on_gpu[0][0])
    return parts, residual, weight, on_gpu


SIZES = [(1, 8), (3, 72), (5, 520), (1, 1024), (3, 4096), (1, 5120), (2, 5120), (1, 8192), (3, 8192), (1, 16384), (2, 16384)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, width", SIZES)
def test_values(ranks, rows, width, dtype):
    """The sum is exact, the norm within its bound, all ranks have the same bits, and launches of sums alone go on in the same buffers."""
    for seed, adds in enumerate((True, False, True)):
        parts, residual, weight, on_gpu = inputs(ranks, rows, width, dtype, seed, adds)
        alone = [x.clone() for x, *_ in on_gpu]
        torch.cuda.synchronize()
        offset = 1.0 if adds else 0.0
        outs = ranks.together(lambda rank: ranks.norm(rank, *on_gpu[rank], offset))  # noqa: B023
        ranks.together(lambda rank: ranks.sum(rank, alone[rank]))  # noqa: B023
        again = [torch.empty(0)] * len(outs)
        if adds:  # x has not been written
            for _, to, _ in on_gpu:
                to.copy_(residual)
            torch.cuda.synchronize()
            again = ranks.together(lambda rank: ranks.norm(rank, *on_gpu[rank], offset))  # noqa: B023
        torch.cuda.synchronize()
        totals = [x if to is None else to for x, to, _ in on_gpu]
        assert wrong_norm(parts, residual, weight, EPS, offset, totals[0], outs[0]) is None
        assert all(torch.equal(total, totals[0]) and torch.equal(y, outs[0]) for total, y in zip(totals, outs, strict=True))
        assert not adds or all(torch.equal(y, outs[0]) for y in again)
        assert wrong_norm(parts, None, weight, EPS, 0.0, alone[0], torch.zeros_like(alone[0])) != "sum"
        assert all(torch.equal(x, alone[0]) for x in alone)
        assert adds or torch.equal(totals[0], alone[0])


@pytest.mark.parametrize("rows, width", SIZES)
def test_batch_invariant_bits(ranks, rows, width):
    """Those of the norm's own kernels of the rounded sum, and of a row alone."""
    parts, residual, weight, on_gpu = inputs(ranks, rows, width, torch.bfloat16, 3, True)
    last = [(x[-1:].clone(), to[-1:].clone(), w) for x, to, w in on_gpu]
    torch.cuda.synchronize()
    with minfer.batch_invariant():
        outs = ranks.together(lambda rank: ranks.norm(rank, *on_gpu[rank]))
        of_last = ranks.together(lambda rank: ranks.norm(rank, *last[rank]))
        torch.cuda.synchronize()
        assert torch.equal(outs[0], minfer.rms_norm(on_gpu[0][1], on_gpu[0][2], EPS))
    assert all(torch.equal(y, outs[0]) for y in outs) and all(torch.equal(y, outs[0][-1:]) for y in of_last)
    assert wrong_norm(parts, residual, weight, EPS, 0.0, on_gpu[0][1], outs[0]) is None


def test_late_operands(ranks):
    """The launches begin while the streams still write x, the residual and the weight."""
    parts, residual, weight, on_gpu = inputs(ranks, 2, 4096, torch.bfloat16, 4, True)
    wanted = ranks.together(lambda rank: ranks.norm(rank, *(x.clone() for x in on_gpu[rank])))
    late = [tuple(torch.full_like(x, float("nan")) for x in of_rank) for of_rank in on_gpu]
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()

    def call(rank: int) -> torch.Tensor:
        torch.cuda._sleep(5_000_000)
        for to, x in zip(late[rank], on_gpu[rank], strict=True):
            to.copy_(x)
        return ranks.norm(rank, *late[rank])

    outs = ranks.together(call)
    torch.cuda.synchronize()
    assert all(torch.equal(y, wanted[0]) for y in [*wanted, *outs])
    assert wrong_norm(parts, residual, weight, EPS, 0.0, late[-1][1], outs[-1]) is None


def test_many_launches():
    """By turns with sums alone, of other sizes, and nothing waited for between: no launch takes what is another's."""
    ranks = Ranks(2)
    sizes = ((1, 8192), (3, 1024), (2, 72))
    sets = [inputs(ranks, rows, width, torch.bfloat16, 10 + i, i % 2 == 0) for i, (rows, width) in enumerate(sizes)]

    def copies_of(i: int) -> list[tuple]:
        return [tuple(None if x is None else x.clone() for x in of_rank) for of_rank in sets[i % 3][3]]

    copies = [copies_of(i) for i in range(24)]
    for i in range(3):  # kernels are loaded when they are first launched, which may wait for those that run
        once = copies_of(i)
        torch.cuda.synchronize()
        ranks.together(lambda rank: ranks.norm(rank, *once[rank]))  # noqa: B023
        ranks.together(lambda rank: ranks.sum(rank, once[rank][0]))  # noqa: B023
    torch.cuda.synchronize()

    def call(rank: int) -> list:
        outs = []
        for i, of_ranks in enumerate(copies):
            if i % 5 == 4:
                ranks.sum(rank, of_ranks[rank][0])
                outs.append(None)
            else:
                outs.append(ranks.norm(rank, *of_ranks[rank]))
        return outs

    ranks.together(lambda _: [torch.empty_like(x) for of_ranks in copies for x in of_ranks[0][:1]])  # memory for the outputs
    torch.cuda.synchronize()
    outs = ranks.together(call)
    torch.cuda.synchronize()
    for i, of_ranks in enumerate(copies):
        parts, residual, weight, _ = sets[i % 3]
        for rank in range(2):
            x, to, _ = of_ranks[rank]
            if outs[rank][i] is None:
                assert wrong_norm(parts, None, weight, EPS, 0.0, x, torch.zeros_like(x)) != "sum", (i, rank)
            else:
                assert wrong_norm(parts, residual, weight, EPS, 0.0, x if to is None else to, outs[rank][i]) is None, (i, rank)


def test_graph():
    """Captured for both ranks, a branch each, and replayed with other numbers."""
    ranks = Ranks(2)
    on_gpu = inputs(ranks, 3, 4096, torch.bfloat16, 0, True)[3]
    outs = ranks.together(lambda rank: ranks.norm(rank, *on_gpu[rank]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = ranks.together(lambda rank: ranks.norm(rank, *on_gpu[rank]))
    for seed in range(1, 12):
        parts, residual, weight = parts_of(2, 3, 4096, torch.bfloat16, seed)
        for (x, to, w), part in zip(on_gpu, parts, strict=True):
            x.copy_(part), to.copy_(residual), w.copy_(weight)
        for y in outs:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert wrong_norm(parts, residual, weight, EPS, 0.0, on_gpu[0][1], outs[0]) is None, seed
        assert torch.equal(outs[0], outs[1]) and torch.equal(on_gpu[0][1], on_gpu[1][1]), seed


def test_processes(tmp_path):
    """Ranks that share a GPU through mapped memory, each in its process; the GPU gives them their turns."""
    first, second = run_ranks(2, "shared", tmp_path, norms_of_sums, False)
    assert not first["wrong"] and first == second, (first, second)
    assert first["peers"] and first["one launch"] > 0


def test_arguments_that_cannot_be_right():
    """Nothing is launched: a launch would wait for the other rank."""
    ranks = Ranks(2, 4096)
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16, device="cuda"), torch.ones(64, dtype=torch.bfloat16, device="cuda")
    wide = torch.zeros(1, 16392, dtype=torch.bfloat16, device="cuda")
    wrong = [
        ((x.float(), None, weight), "x must be float16 or bfloat16"),
        ((x[:, :60].contiguous(), None, weight[:60]), "x must have rows of a multiple of 8"),
        ((wide, None, wide[0]), "at most 16384 elements"),
        ((x.repeat(64, 1), None, weight), "at most 4096 in all"),
        ((x.t(), None, weight[:2]), "x must have rows of a multiple of 8"),
        ((x.repeat(1, 2)[:, :64], None, weight), "x must be contiguous and aligned to 16 bytes"),
        ((x, x[:1].clone(), weight), r"residual must be \[2, 64\]"),
        ((x, x.half(), weight), "residual must be BFloat16"),
        ((x, x, weight), "residual"),
        ((x, None, weight.half()), "weight must be BFloat16"),
        ((x, None, weight[:8]), r"weight must be \[64\]"),
        ((x, x.clone().repeat(1, 2)[:, :64], weight), "residual must be contiguous"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            ranks.norm(0, *arguments)
    for changes, message in (
        ({"eps": -1.0}, "eps must be"),
        ({"buffers": [1]}, "buffers must be of 2 to 8 ranks"),
        ({"rank": 2}, "rank must be"),
    ):
        given = dict(eps=EPS, weight_offset=0.0, buffers=ranks.addresses, rank=0, most=4096) | changes
        with pytest.raises(RuntimeError, match=message):
            OPS._all_reduce_rms_norm(x, None, weight, *given.values())
    empty = x[:0]
    assert ranks.norm(0, empty, None, weight).shape == (0, 64)
