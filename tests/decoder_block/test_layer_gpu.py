"""A decoder layer in one launch, from its q, k and v to the next layer's, on a GPU, against float64.

Outputs, and workspaces, lie in memory that held NaN before; calls are repeated and have to give the same bits.
"""

import minfer
import pytest
import torch

from tests.decoder_block.cases import DTYPES
from tests.decoder_block.launches import same
from tests.decoder_block.layer_cases import layer_case
from tests.fuzz.modes import poison_free_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

FORMS = ("int4", "block128", "dense", "channel")
SMALL = (512, 1024, 768)
LENGTHS = (1, 2, 3, 9, 16, 17, 63, 128, 129, 130, 1000, 1025, 1026, 3333, 16384)


def run(case):
    layer, results = case.make(), []
    for constant in (False, True, False):
        poison_free_memory(torch.device("cuda", torch.cuda.current_device()))
        results.append((layer.launch(constant), layer.block.residual.clone()))
    have, residual = results[0]
    layer.check(have, residual)
    for other in results[1:]:
        assert same(other[0], have) and same(other[1], residual), f"{case}: other bits in another run"
    return layer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, form):
    dtype = DTYPES[(LENGTHS.index(length) + FORMS.index(form)) % 2]
    run(layer_case(length, form, SMALL, dtype, heads=8, heads_kv=2))


# Of models: Llama-3.1-8B, Qwen2.5-7B, Llama-3.1-70B, Qwen3-8B, Llama-2-7B.
@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("length", [65, 1025])
@pytest.mark.parametrize(
    "heads, heads_kv, size, more",
    [
        (32, 8, (4096, 14336, 6144), {}),
        (28, 4, (3584, 18944, 4608), {"block": {"bias": torch.float32}}),
        (64, 8, (8192, 28672, 10240), {}),
        (32, 8, (4096, 12288, 6144), {"normed": True}),
        (32, 32, (4096, 11008, 12288), {}),
    ],
)
def test_models(heads, heads_kv, size, more, length, form):
    run(layer_case(length, form, size, torch.bfloat16, heads=heads, heads_kv=heads_kv, page_size=64, **more))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, heads_kv", [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (6, 2), (15, 5), (16, 16), (32, 32)])
def test_heads(heads, heads_kv, dtype):
    run(layer_case(300, "int4", SMALL, dtype, heads=heads, heads_kv=heads_kv, normed=heads % 2 == 0))


@pytest.mark.parametrize("window", [0, 1, 7, 100, 255, 299, 300, 100000])
def test_windows(window):
    run(layer_case(300, "int4", SMALL, torch.bfloat16, heads=8, heads_kv=2, window=window))


@pytest.mark.parametrize("page_size", [1, 2, 8, 32, 256])
def test_pages(page_size):
    run(layer_case(333, "block128", SMALL, torch.float16, heads=8, heads_kv=2, page_size=page_size, normed=True))


@pytest.mark.parametrize("form", FORMS[:3])
def test_replays(form):
    """Of a graph, whose lengths, slots and positions change between them: a sequence that grows."""
    layer = layer_case(70, form, SMALL, torch.bfloat16, heads=8, heads_kv=2).make()
    layer.launch(True)
    graph, t = torch.cuda.CUDAGraph(), layer.block
    with torch.cuda.graph(graph):
        have = layer.launch(True, residual=t.residual)
    for length in (70, 71, 17, 1, 80, 79):
        case = layer.case.change(length=length)
        fresh = case.make()
        fresh.block = t
        for name in ("qkv", "seq_lens", "slots", "positions"):
            getattr(layer, name).copy_(getattr(fresh, name))
        pages = fresh.k_cache.shape[0]  # at most as many as the graph's
        layer.table.zero_()
        layer.table[0, : fresh.table.shape[1]] = fresh.table[0]
        layer.k_cache[:pages], layer.v_cache[:pages] = fresh.before
        fresh.cos_sin = layer.cos_sin
        before = t.residual.copy_(t.before).clone()
        graph.replay()
        residual = t.residual.clone()
        t.before = before
        fresh.k_cache, fresh.v_cache = layer.k_cache[:pages], layer.v_cache[:pages]
        fresh.check(have, residual)


def test_what_is_stored_nowhere():
    """A slot that the cache does not have: the token is attended to, and not stored."""
    for slot in (-1, 10**9):
        layer = layer_case(100, "int4", SMALL, torch.bfloat16, heads=8, heads_kv=2).make()
        want = layer.launch()
        layer.slots.fill_(slot)
        assert same(layer.launch(), want)
        assert same(layer.k_cache, layer.before[0]) and same(layer.v_cache, layer.before[1])


def test_a_sequence_without_keys():
    layer = layer_case(20, "int4", SMALL, torch.bfloat16, heads=8, heads_kv=2).make()
    layer.seq_lens.zero_()
    have = layer.launch()
    t = layer.block
    t.a = torch.zeros(1, 8 * 128, dtype=torch.bfloat16, device="cuda")
    t.check(have, "one_launch")
    assert same(layer.k_cache, layer.before[0])


def test_chain():
    """Layers in dependent launches, each of what the one in front wrote: the same bits each time."""
    layers = [layer_case(200, form, (512, 1024, 12 * 128), torch.bfloat16, heads=8, heads_kv=2).make() for form in FORMS[:3] * 2]

    def chain(constant):
        qkv, own = layers[0].qkv, layers[0].block.before.clone()
        for layer in layers:
            qkv = layer.launch(constant, residual=own, qkv=qkv).view(1, -1, 128)
        return qkv, own

    first = chain(False)
    assert all(torch.isfinite(x).all() for x in first)
    for constant in (False, True) * 10:
        assert all(same(x, y) for x, y in zip(chain(constant), first, strict=True))


def test_errors():
    """Nothing is written, and the message says what is wrong."""
    layer = layer_case(20, "int4", SMALL, torch.bfloat16, heads=8, heads_kv=2).make()
    float32 = layer.k_cache.float()
    bad = [
        (dict(qkv=layer.qkv[0]), r"qkv must be \[1, heads \+ 2 \* heads_kv, 128\], got "),
        (dict(qkv=layer.qkv[..., :64]), r"qkv must be \[1, heads \+ 2 \* heads_kv, 128\], got "),
        (dict(qkv=layer.qkv[:, :4]), "qkv must be .*, of a cache with heads_kv = 2, got "),
        (dict(k_cache=float32, v_cache=float32), "k_cache must be BFloat16, as qkv, got Float"),
        (dict(block_table=layer.table[0]), r"block_table must be \[1, pages\], got "),
        (dict(seq_lens=layer.seq_lens.long()), "seq_lens must be Int"),
        (dict(slot_mapping=layer.slots.int()), "slot_mapping must be Long"),
        (dict(cos_sin=layer.cos_sin[:, :64]), r"cos_sin must be \[.*, 128\], got "),
        (dict(q_weight=torch.ones(128, dtype=torch.bfloat16, device="cuda")), "q_weight and k_weight must be given together"),
        (dict(group_size=32), "o_scales must be .groups, n. = .32, 512. for k = 1024 and group_size = 32, got .8, 512."),
    ]
    layer.launch()
    layer.block.residual.copy_(layer.block.before)
    for changes, message in bad:
        with pytest.raises(RuntimeError, match=message):
            layer.launch(residual=layer.block.residual, **changes)
        assert same(layer.block.residual, layer.block.before)


def test_plans():
    """Heads of 128 elements, at most 8 of queries to one of keys, one token; long sequences only by name."""
    plan = torch.ops.minfer._plan_decoder_block
    sizes = [1, 4096, 4096, 14336, 6144, 32, 8, 2048]
    assert '"one_launch":true' in plan(sizes, "bf16", "int4", 128, False, -1).replace(" ", "")
    for i, value in ((0, 2), (5, 16), (6, 5), (6, 2), (7, 8192)):
        other = list(sizes)
        other[i] = value
        assert '"one_launch":false' in plan(other, "bf16", "int4", 128, False, -1).replace(" ", "")
    assert minfer.plan("w4a16_decoder_block", m=1, n=6144, k=4096, inter=14336).one_launch
