"""A decoder layer in one launch, from its q, k and v to the next layer's, on a GPU, against float64.

Outputs, and workspaces, lie in memory that held NaN before; calls are repeated and have to give the same bits.
"""

import minfer
import pytest
import torch

from tests.decoder_block.cases import DTYPES
from tests.decoder_block.launches import same
from tests.decoder_block.layer_cases import launch, layer_case
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


def stack_of(count, length, form, dtype, last=12 * 128, **more):
    """Layers over one sequence, each with a cache of its own."""
    layers = [layer_case(length, form, (512, 1024, 12 * 128), dtype, heads=8, heads_kv=2, **more).make() for _ in range(count - 1)]
    layers.append(layer_case(length, form, (512, 1024, last), dtype, heads=8, heads_kv=2, **more).make())
    for layer in layers[1:]:
        layer.table, layer.slots, layer.cos_sin = layers[0].table, layers[0].slots, layers[0].cos_sin
        caches = [x.nan_to_num(0.5) for x in layer.before]  # other pages are the first one's
        layer.before = tuple(caches)
    return layers


def one_by_one(layers, constant):
    qkv, own = layers[0].qkv, layers[0].block.before.clone()
    for layer in layers:
        for cache, before in zip((layer.k_cache, layer.v_cache), layer.before, strict=True):
            cache.copy_(before)
        have = layer.launch(constant, own, qkv=qkv, block_table=layers[0].table, slot_mapping=layers[0].slots)
        qkv = have.view(1, -1, 128) if have.numel() else have
    return have, own, [(x.k_cache.clone(), x.v_cache.clone()) for x in layers]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count, last", [(2, 1536), (3, 0), (7, 1536), (24, 1536), (24, 0)])
def test_layers_of_one_launch(count, last, form, dtype):
    """The bits of layers in launches of their own, caches included."""
    layers = stack_of(count, 130, form, dtype, last, normed=count % 2 == 1)
    want, residual, caches = one_by_one(layers, True)
    for constant in (False, True) * 4:
        poison_free_memory(torch.device("cuda", torch.cuda.current_device()))
        for layer in layers:
            layer.k_cache.copy_(layer.before[0])
            layer.v_cache.copy_(layer.before[1])
        own = layers[0].block.before.clone()
        have = launch(layers, own, constant)
        assert same(have, want) and same(own, residual)
        for layer, (k, v) in zip(layers, caches, strict=True):
            assert same(layer.k_cache, k) and same(layer.v_cache, v)


@pytest.mark.parametrize("form", FORMS[:3])
def test_layers_of_a_model_in_one_launch(form):
    """Of Llama-3.1-8B, with biases, and a window in every second layer."""
    layers = []
    for i in range(5):
        more = dict(heads=32, heads_kv=8, page_size=64, window=(-1, 700)[i % 2], block={"bias": torch.float32})
        layers.append(layer_case(1025, form, (4096, 14336, 6144), torch.bfloat16, **more).make())
        layers[i].table, layers[i].slots, layers[i].cos_sin = layers[0].table, layers[0].slots, layers[0].cos_sin
        layers[i].before = tuple(x.nan_to_num(0.5) for x in layers[i].before)
    want, residual, _ = one_by_one(layers, True)
    for constant in (True, False, True, True):
        own = layers[0].block.before.clone()
        assert same(launch(layers, own, constant), want) and same(own, residual)


def test_replays_of_layers_in_one_launch():
    """Of a graph of two launches, on the residual as it is."""
    layers = stack_of(9, 70, "int4", torch.bfloat16)
    first, second = layers[:5], layers[5:]

    def step(own):
        qkv = launch(first, own, True).view(1, -1, 128)
        return launch(second, own, True, qkv=qkv, block_table=layers[0].table, seq_lens=layers[0].seq_lens, slot_mapping=layers[0].slots)

    own = layers[0].block.before.clone()
    wanted = [(step(own).clone(), own.clone()) for _ in range(5)]
    own.copy_(layers[0].block.before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = step(own)
    own.copy_(layers[0].block.before)
    for want, residual in wanted:
        graph.replay()
        assert same(have, want) and same(own, residual)


def test_errors_of_layers():
    layers = stack_of(3, 70, "int4", torch.bfloat16)
    own = layers[0].block.before.clone()
    other = layer_case(70, "int4", (512, 1152, 12 * 128), torch.bfloat16, heads=8, heads_kv=2).make()
    with pytest.raises(RuntimeError, match="layers must have the same sizes, got gate_ups of 2048 and 2304"):
        launch([layers[0], other], own)
    wide = layer_case(70, "int4", (512, 1024, 768), torch.bfloat16, heads=8, heads_kv=2).make()
    with pytest.raises(RuntimeError, match="next must have 1536 rows, the columns of qkv, in front of another layer, got 768"):
        launch([wide, layers[0]], own)
    with pytest.raises(RuntimeError, match="so many layers of these sizes are no launch"):
        launch([layers[0], wide], own)
    with pytest.raises(RuntimeError, match="so many layers of these sizes are no launch"):
        launch(layers[:1] * 25, own)
    assert same(own, layers[0].block.before)


def test_errors():
    """Nothing is written, and the message says what is wrong."""
    layer = layer_case(20, "int4", SMALL, torch.bfloat16, heads=8, heads_kv=2).make()
    float32 = layer.k_cache.float()
    bad = [
        (dict(qkv=layer.qkv[0]), r"qkv must be \[1, heads \+ 2 \* heads_kv, 128\], got "),
        (dict(qkv=layer.qkv[..., :64]), r"qkv must be \[1, heads \+ 2 \* heads_kv, 128\], got "),
        (dict(qkv=layer.qkv[:, :4]), "qkv must be .*, of a cache with heads_kv = 2, got "),
        (dict(k_caches=[float32], v_caches=[float32]), "k_cache must be BFloat16, as qkv, got Float"),
        (dict(k_caches=[], v_caches=[]), "k_caches must be of a layer or more, got none"),
        (dict(v_caches=[layer.v_cache] * 2), "v_caches must be of 1 layers, as k_caches, got 2"),
        (dict(o_scales=[]), "o_scales must be of 1 layers, as k_caches, got 0"),
        (dict(residual=layer.k_cache.view(-1)[:512].view(1, 512)), "residual must not overlap a cache, got "),
        (dict(block_table=layer.table[0]), r"block_table must be \[1, pages\], got "),
        (dict(seq_lens=layer.seq_lens.long()), "seq_lens must be Int"),
        (dict(slot_mapping=layer.slots.int()), "slot_mapping must be Long"),
        (dict(cos_sin=layer.cos_sin[:, :64]), r"cos_sin must be \[.*, 128\], got "),
        (dict(q_weight=[torch.ones(128, dtype=torch.bfloat16, device="cuda")]), "q_weight and k_weight must be given together"),
        (dict(group_size=32), "o_scales must be .groups, n. = .32, 512. for k = 1024 and group_size = 32, got .8, 512."),
    ]
    layer.launch()
    layer.block.residual.copy_(layer.block.before)
    for changes, message in bad:
        with pytest.raises(RuntimeError, match=message):
            layer.launch(**({"residual": layer.block.residual} | changes))
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
