"""Decoder layers that are divided among ranks, in one launch each, against float64. The ranks share a GPU: each has a buffer, and a stream,
of its own, and their launches run at the same time."""

from __future__ import annotations

import pytest
import torch

from tests.contracts import numerics_cases as numerics
from tests.decoder_block.cases import DTYPES, Truth
from tests.decoder_block.launches import same
from tests.decoder_block.layer_cases import layer_case
from tests.fuzz.modes import poison_free_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

HIDDEN, INTER, COLUMNS = 512, 512, 384  # of a rank; so few units that the launches of all ranks find room on one GPU


class Divided:
    """Layers of the ranks, each with heads and columns of an MLP of its own."""

    def __init__(self, form, ranks, length, dtype, *, heads=4, heads_kv=1, columns=COLUMNS, bias=None, **more):
        block = {} if bias is None else {"bias": bias}
        size = (HIDDEN, INTER, columns)
        self.layers = [
            layer_case(length, form, size, dtype, heads=heads, heads_kv=heads_kv, block=block, **more).make() for _ in range(ranks)
        ]
        first = self.layers[0].block
        for layer in self.layers[1:]:
            own = layer.block
            own.norms = first.norms
            own.before.copy_(first.before)
            own.biases |= {"o": None, "down": None}  # one rank has them
        size = torch.ops.minfer._decoder_exchange_bytes(HIDDEN, ranks)
        self.buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        for layer in self.layers:  # what the first call of a kernel loads must not wait for a launch that waits for another rank's
            layer.launch()
        torch.cuda.synchronize()

    def launch(self, constant=False, fresh=True):
        """D of each rank."""
        addresses, found = [x.data_ptr() for x in self.buffers], []
        here = torch.cuda.current_stream()
        for rank, (layer, stream) in enumerate(zip(self.layers, self.streams, strict=True)):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                own = None if fresh else layer.block.residual
                found.append(layer.launch(constant, own, exchange=addresses, rank=rank))
        for stream in self.streams:
            here.wait_stream(stream)
        return found

    def check(self, found):
        """The residual, whose bits are the same on all ranks, and each rank's D."""
        blocks = [layer.block for layer in self.layers]
        first = blocks[0]
        assert all(same(x.residual, first.residual) for x in blocks)
        attended = [layer.attended() for layer in self.layers]
        a = torch.cat(attended, -1)
        off = torch.cat([0.58 * numerics.UNIT[first.case.dtype] * x.abs() + 1e-5 * x.abs().amax() for x in attended], -1)
        steps = first.steps("one_launch")
        parts = [x.truth(steps, first.before).weights for x in blocks]
        weights = {name: torch.cat([x[name] for x in parts], 0 if name == "gate_up" else 1) for name in ("o", "gate_up", "down")}
        for block, own, have in zip(blocks, parts, found, strict=True):
            biases = first.biases | {"next": block.biases["next"]}
            truth = Truth(steps, a, first.before, weights | {"next": own["next"]}, first.norms, biases, first.case.options(), off)
            of_residual = truth.of_residual()
            numerics.judge(block.residual, of_residual.value, truth.residual_bound(of_residual), "residual")
            if have.shape[1]:
                numerics.judge(have, *truth.returned(block.residual), "D")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["int4", "block128", "channel", "dense"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks(ranks, form, dtype):
    t = Divided(form, ranks, 131, dtype)
    found, residual = t.launch(), None
    t.check(found)
    residual = t.layers[0].block.residual.clone()
    for i in range(12):
        poison_free_memory(torch.device("cuda", torch.cuda.current_device()))
        again = t.launch(constant=i % 2 == 1)
        assert all(same(x, y) for x, y in zip(again, found, strict=True))
        assert all(same(layer.block.residual, residual) for layer in t.layers)


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
def test_biases(bias):
    """Of the output and the down projection one rank has them."""
    t = Divided("int4", 2, 40, torch.bfloat16, bias=bias)
    t.check(t.launch())


def test_last_layer():
    t = Divided("int4", 2, 40, torch.bfloat16, columns=0)
    t.check(t.launch())


def test_differing_lengths_of_launches():
    """One rank's launch begins long after the other's."""
    t = Divided("int4", 2, 300, torch.bfloat16)
    want = t.launch()
    for late in (0, 1):
        torch.cuda.synchronize()
        with torch.cuda.stream(t.streams[late]):
            torch.cuda._sleep(20_000_000)
        assert all(same(x, y) for x, y in zip(t.launch(True), want, strict=True))
    t.check(want)


def test_replays():
    """Each rank's launches in a graph of its own, replayed many times, on the residual as it was and as it is."""
    t = Divided("int4", 2, 70, torch.bfloat16)
    addresses, graphs, outs = [x.data_ptr() for x in t.buffers], [], []
    torch.cuda.synchronize()
    for rank, (layer, stream) in enumerate(zip(t.layers, t.streams, strict=True)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append([layer.launch(True, layer.block.residual, exchange=addresses, rank=rank) for _ in range(3)])
        graphs.append(graph)
    for layer in t.layers:
        layer.block.residual.copy_(layer.block.before)
    wanted = []
    for _ in range(6):
        found = t.launch(fresh=False)
        wanted.append(([x.clone() for x in found], t.layers[0].block.residual.clone()))
    for layer in t.layers:
        layer.block.residual.copy_(layer.block.before)
    for i in range(2):
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, t.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for rank, own in enumerate(outs):
            for have, (want, _) in zip(own, wanted[3 * i : 3 * i + 3], strict=True):
                assert same(have, want[rank])
            assert same(t.layers[rank].block.residual, wanted[3 * i + 2][1])


def test_errors():
    layer = layer_case(20, "int4", (HIDDEN, INTER, COLUMNS), torch.bfloat16, heads=4, heads_kv=1).make()
    layer.launch()
    layer.block.residual.copy_(layer.block.before)
    for change, message in (
        (dict(exchange=[1 << 20], rank=0), "exchange must be of 2 to 8 ranks, got 1"),
        (dict(exchange=[1 << 20] * 9, rank=0), "exchange must be of 2 to 8 ranks, got 9"),
        (dict(exchange=[1 << 20] * 2, rank=2), "rank must be that of a buffer, got 2"),
        (dict(exchange=[1 << 20] * 2, rank=-1), "rank must be that of a buffer, got -1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer.launch(residual=layer.block.residual, **change)
        assert same(layer.block.residual, layer.block.before)


def test_parts_are_a_whole():
    """Two ranks that have halves of one layer make what the layer makes undivided, within its bounds."""
    t = Divided("dense", 2, 131, torch.bfloat16)
    found = t.launch()
    first, second = (layer.block for layer in t.layers)
    whole = layer_case(131, "dense", (HIDDEN, 2 * INTER, COLUMNS), torch.bfloat16, heads=8, heads_kv=2).make()
    heads = [layer.qkv.split([4, 1, 1], 1) for layer in t.layers]
    whole.qkv = torch.cat([part for parts in zip(*heads, strict=True) for part in parts], 1).contiguous()
    whole.table = t.layers[0].table
    caches = [[layer.before[i] for layer in t.layers] for i in range(2)]
    tables = [layer.table[0].long() for layer in t.layers]
    for i, cache in enumerate((whole.k_cache, whole.v_cache)):
        cache[tables[0]] = torch.cat([caches[i][rank][tables[rank]] for rank in range(2)], 2)
    whole.before = whole.k_cache.clone(), whole.v_cache.clone()
    whole.slots, whole.cos_sin, whole.block.norms = t.layers[0].slots, t.layers[0].cos_sin, first.norms
    whole.block.before.copy_(first.before)
    whole.block.dense |= {
        name: torch.cat([first.dense[name], second.dense[name]], 0 if name == "gate_up" else 1) for name in first.dense if name != "next"
    }
    whole.block.dense["next"] = first.dense["next"]
    have = whole.launch()
    assert (found[0].double() - have.double()).norm() <= 0.01 * have.double().norm()
    assert (first.residual.double() - whole.block.residual.double()).norm() <= 0.01 * whole.block.residual.double().norm()
