"""The block of a last layer on a GPU: nothing is multiplied behind the residual, which has the same bits as with a product behind it."""

from dataclasses import replace

import minfer
import pytest
import torch

from tests.decoder_block.cases import DTYPES, Case
from tests.decoder_block.dense_cases import DenseCase
from tests.decoder_block.fp8_cases import Fp8Case
from tests.decoder_block.launches import DEVICE, same
from tests.decoder_block.layer_cases import layer_case
from tests.fuzz.modes import poison_free_memory

pytestmark = pytest.mark.gpu

KINDS = {
    "int4": (Case, {}),
    "block128": (Fp8Case, {"mode": "block128"}),
    "channel": (Fp8Case, {"mode": "channel"}),
    "dense": (DenseCase, {}),
}
SIZE = (512, 512, 1024)


def both(form, m, dtype, **more):
    """The operands with a product behind them, and the same without."""
    kind, options = KINDS[form]
    t = kind(m, *SIZE, 272, dtype, **options, **more).make(DEVICE)
    last = kind(m, *SIZE, 0, dtype, **options, **more).make(DEVICE)
    last.a, last.before = t.a, t.before
    last.norms["mlp"], last.norms["next"] = t.norms["mlp"], torch.full_like(t.norms["next"], float("nan"))
    last.biases["o"], last.biases["down"] = t.biases["o"], t.biases["down"]
    for name in ("weights", "codes", "scales", "dense"):
        if isinstance(own := getattr(t, name, None), dict):
            getattr(last, name).update({key: value for key, value in own.items() if key != "next"})
    return t, last


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("form", KINDS)
def test_one_launch(hopper, form, m, dtype):
    t, last = both(form, m, dtype, bias=torch.float32)
    t.call(kernel="one_launch")
    for constant in (False, True, False):
        poison_free_memory(torch.device(DEVICE, torch.cuda.current_device()))
        assert last.call(kernel="one_launch", constant_weights=constant).shape == (m, 0)
        assert same(last.residual, t.residual)
    t.check(t.call(kernel="one_launch"), "one_launch")


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("m", [1, 3, 17])
def test_separate(form, m):
    for kernel in (None, "separate"):
        t, last = both(form, m, torch.bfloat16)
        t.call(kernel="separate" if m > 2 else kernel)
        assert last.call(kernel=kernel).shape == (m, 0) and same(last.residual, t.residual)


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("length", [1, 130, 1025])
def test_with_attention(hopper, form, length):
    case = layer_case(length, form, (512, 1024, 768), torch.bfloat16, heads=8, heads_kv=2)
    layer = case.make()
    have = layer.launch(True)
    residual = layer.block.residual.clone()
    layer.check(have, residual)
    last = case.change(block=replace(case.block, n=0)).make()
    for name in ("weights", "codes", "scales", "dense"):
        if isinstance(own := getattr(layer.block, name, None), dict):
            getattr(last.block, name).update({key: value for key, value in own.items() if key != "next"})
    last.block.norms, last.weights = layer.block.norms, layer.weights
    shared = dict(qkv=layer.qkv, k_caches=[layer.k_cache], v_caches=[layer.v_cache], block_table=layer.table)
    shared |= dict(slot_mapping=layer.slots, cos_sin=layer.cos_sin)
    for constant in (False, True) * 3:
        layer.block.residual.copy_(layer.block.before)
        poison_free_memory(torch.device(DEVICE, torch.cuda.current_device()))
        assert last.launch(constant, layer.block.residual, **shared).shape == (1, 0)
        assert same(layer.block.residual, residual)


def test_chain(hopper):
    """Behind a layer with a product, in a graph: the tags of one launch are not those of the next."""
    t, last = both("int4", 1, torch.bfloat16)

    def step():
        own = t.before.clone()
        t.again(residual=own, kernel="one_launch", constant_weights=True)
        last.again(residual=own, kernel="one_launch", constant_weights=True)
        return own

    want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = step()
    for _ in range(10):
        have.fill_(float("nan"))
        graph.replay()
        assert same(have, want)


def test_plans():
    for op in ("w4a16_decoder_block", "fp8_decoder_block"):
        plan = minfer.plan(op, m=1, n=0, k=4096, inter=14336)
        assert plan.one_launch and plan.workspace_bytes < minfer.plan(op, m=1, n=6144, k=4096, inter=14336).workspace_bytes
