"""Attention with functions of scores and masks on a GPU against float64: lengths, heads, dimensions, block masks, pages, graphs."""

import pytest
import torch
from minfer import fuse
from minfer.fuse import attention_function, compiler, dtypes
from torch.nn.attention import flex_attention as flex

from tests.fuse.attention_cases import BF16, F16, Functions, drawn, exact, judged, operands, paged

pytest.importorskip("cutlass.cute", reason="the CuTe DSL is not installed")
pytestmark = pytest.mark.gpu
LENGTH = 600
NAMES = [
    "-".join(getattr(f, "__name__", "none") for f in pair) for pair in Functions(1, 2, 8, "cpu").pairs()
]  # of functions, which each test makes on the device


@pytest.fixture
def portable(monkeypatch):
    """Calls take the kernel for GPUs without WGMMA, which runs on every one from sm_80 on."""
    monkeypatch.setattr(attention_function, "_plans", {})
    monkeypatch.setattr(attention_function, "HOPPER", "none")


@pytest.mark.parametrize("pair", range(len(NAMES)), ids=NAMES)
def test_functions(pair):
    dim, dtype, heads_kv = [(128, BF16, 4), (64, F16, 2), (128, F16, 1), (64, BF16, 4)][pair % 4]
    functions = Functions(2, 4, 4100, "cuda").pairs()[pair]
    for sq, sk in ((600, 600), (1, 77), (1030, 129), (40, 600), (4100, 900)):
        judged(*operands(2, 4, heads_kv, sq, sk, dim, dtype, "cuda"), *functions)


@pytest.mark.parametrize("name,dim", zip(Functions(1, 2, 8, "cpu").masks, (64, 128) * 3, strict=True))
def test_block_masks(name, dim):
    functions = Functions(2, 4, LENGTH, "cuda")
    q, k, v = operands(2, 4, 2, LENGTH, LENGTH, dim, BF16, "cuda")
    mask_mod = functions.masks[name]
    for mask in (
        flex.create_block_mask(mask_mod, 2, 4, LENGTH, LENGTH, device="cuda"),
        fuse.create_block_mask(mask_mod, 2, 4, LENGTH, LENGTH, "cuda", (256, 384)),
    ):
        judged(q, k, v, functions.scores["alibi"], mask_mod, mask)
    lists = attention_function.lists_of(mask)
    wild = fuse.BlockMask(lists[0] + 1000, lists[1] + 1000, lists[2], lists[3], mask.BLOCK_SIZE, mask_mod)  # entries that there are not
    assert torch.isfinite(fuse.attention(q, k, v, None, mask_mod, wild, enable_gqa=True)).all()


@pytest.mark.parametrize("seed", range(32))
def test_drawn(seed):
    dim, length = [(64, 300), (128, 520), (64, 1024), (128, 77)][seed % 4]
    judged(*operands(1, 4, 4, length, length, dim, (BF16, F16)[seed // 2 % 2], "cuda"), *drawn(seed, 4, length, "cuda"))


@pytest.mark.parametrize(
    "sq,page_size,dim", [(1, 16, 128), (1, 256, 64), (5, 24, 128), (5, 8, 64), (70, 128, 128), (70, 24, 64), (300, 8, 128), (300, 256, 64)]
)
def test_paged(sq, page_size, dim):
    functions = Functions(3, 8, 1500, "cuda").pairs()
    q, k, v = operands(3, 8, 2, sq, 1500, dim, BF16, "cuda")
    for lengths in ([1500, 0, 701], [sq, sq + 1, 1024]):
        given = paged(k, v, lengths, page_size)
        caches = given.pop("k"), given.pop("v")
        for pair in (functions[1], functions[7]):
            judged(q, *caches, *pair, **given)


@pytest.mark.parametrize("pair", range(len(NAMES)), ids=NAMES)
def test_portable(portable, pair):
    dim, dtype, heads_kv = [(128, BF16, 4), (64, F16, 2)][pair % 2]
    functions = Functions(2, 4, 1100, "cuda").pairs()[pair]
    for sq, sk in ((600, 600), (1, 77), (1030, 129)):
        judged(*operands(2, 4, heads_kv, sq, sk, dim, dtype, "cuda"), *functions)


@pytest.mark.parametrize("sq,page_size,dim", [(1, 16, 128), (5, 24, 64), (300, 8, 128)])
def test_portable_pages_and_block_masks(portable, sq, page_size, dim):
    functions = Functions(3, 8, 1500, "cuda")
    q, k, v = operands(3, 8, 2, sq, 1500, dim, BF16, "cuda")
    given = paged(k, v, [1500, 0, 701], page_size)
    judged(q, given.pop("k"), given.pop("v"), *functions.pairs()[1], **given)
    mask = fuse.create_block_mask(functions.masks["documents"], 3, 8, sq, 1500, "cuda", (256, 384))
    judged(q, k, v, functions.scores["relative"], functions.masks["documents"], mask)


def test_pages_that_there_are_not():
    """No entry of a table and no length leads outside."""
    q, k, v = operands(2, 4, 4, 3, 300, 64, BF16, "cuda")
    given = paged(k, v, [300, 300], 16)
    caches = given.pop("k").nan_to_num(), given.pop("v").nan_to_num()
    given["block_table"][0, ::3] = 1 << 30
    given["block_table"][1, ::2] = -7
    given["seq_lens"][1] = 1 << 30
    assert torch.isfinite(fuse.attention(q, *caches, **given)).all()
    given["seq_lens"][:] = -5
    assert (fuse.attention(q, *caches, **given) == 0).all()


def test_views_and_dimensions():
    functions = Functions(2, 4, LENGTH, "cuda")
    pair = functions.scores["alibi"], functions.masks["causal"]
    for dim, dim_v in ((96, 48), (40, 40), (128, 64), (8, 128)):
        q, k, v = (torch.randn(2, LENGTH, 4, n, device="cuda").to(BF16).transpose(1, 2) for n in (dim, dim, dim_v))
        judged(q, k, v, *pair)
    whole = torch.full((2, LENGTH, 3, 4, 72), float("nan"), device="cuda", dtype=BF16)
    whole[..., 8:72] = torch.randn(2, LENGTH, 3, 4, 64, device="cuda").to(BF16)
    judged(*(x.transpose(1, 2) for x in whole[..., 8:72].unbind(2)), *pair)
    odd = torch.randn(2, 4, LENGTH, 67, device="cuda").to(BF16)[..., 3:]  # is copied
    judged(odd, odd, odd, *pair)
    judged(*operands(2, 4, 4, 70, 0, 64, BF16, "cuda"), *pair)
    assert fuse.attention(*operands(2, 4, 4, 0, 70, 64, BF16, "cuda"), *pair).shape == (2, 4, 0, 64)
    with pytest.raises(RuntimeError, match="at most 128"):
        fuse.attention(*operands(1, 2, 2, 8, 8, 192, BF16, "cuda"))
    with pytest.raises(RuntimeError, match="must be torch.float32 of 1 modes on cuda"):
        fuse.attention(*operands(1, 2, 2, 8, 8, 64, BF16, "cuda"), Functions(1, 2, 8, "cpu").scores["alibi"])


def test_many_heads_and_keys():
    functions = Functions(3, 40, LENGTH, "cuda")
    judged(*operands(3, 40, 8, LENGTH, LENGTH, 128, BF16, "cuda"), None, functions.masks["causal"])
    q, k, v = operands(1, 2, 2, 300, 20000, 64, BF16, "cuda")
    judged(q, k, v, None, lambda b, h, q_idx, kv_idx: kv_idx >= 19000)
    judged(q, k, v, None, lambda b, h, q_idx, kv_idx: kv_idx < q_idx - 250)


@pytest.mark.parametrize("dim,dtype", [(64, BF16), (128, F16)])
def test_lines_over_keys(dim, dtype):
    """Biases that are larger than scores, up and down, of the head and of the query; products are accumulated onto them."""
    slopes = torch.tensor([0.15, -0.2, 0.1, -0.001], device="cuda")

    def of_heads(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx)

    def of_queries(score, b, h, q_idx, kv_idx):
        return (0.5 * slopes[q_idx % 4] * kv_idx + score) * 0.75

    for score_mod in (of_heads, of_queries):
        for mask_mod in (None, Functions(1, 4, 8, "cuda").masks["causal"]):
            for sq, sk, heads_kv in ((700, 3000, 4), (700, 77, 2), (40, 900, 1)):
                judged(*operands(1, 4, heads_kv, sq, sk, dim, dtype, "cuda"), score_mod, mask_mod)


@pytest.mark.parametrize("dim,dtype", [(64, BF16), (128, F16)])
@pytest.mark.parametrize("kind", ["i32", "odd offset", "strided", "short", "i64", "bool", "many"])
def test_look_ups_by_key(kind, dim, dtype):
    """Tables of every form that a key's position looks up in: with a block mask and without, few queries, and a bias in full tiles."""
    batch, length = 2, 1500
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randint(0, 4, (batch, 2 * length + 1), generator=generator).sort(-1).values.to("cuda", torch.int32)
    tables = {
        "odd offset": wide[:, 1 : length + 1], "strided": wide[:, ::2], "short": wide[:, ::5], "i64": wide[:, ::2].long(),
        "bool": wide[:, :length] % 2 == 0, "many": wide[:, :length],
    }  # fmt: skip
    table = tables.get(kind, wide[:, :length].contiguous())
    bias = torch.randn(4, table.shape[1], generator=generator).cuda()

    def mask_mod(b, h, q_idx, kv_idx):
        if kind == "bool":
            return table[b, kv_idx]
        seen = table[b, q_idx] == table[b, kv_idx]
        return seen & ((table[0, kv_idx] > 0) | (table[1, kv_idx] < 3) | (q_idx > kv_idx)) if kind == "many" else seen

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, kv_idx]

    lengths = ((1500, 1500), (700, 130), (3, 1411), (64, 900), (1500, 1))
    if kind == "short":  # 601 positions: the last tile of keys goes on behind the table's end
        lengths = ((601, 601), (3, 601), (64, 600))
    for sq, sk in lengths:
        q, k, v = operands(batch, 4, 2, sq, sk, dim, dtype, "cuda")
        for scores, masks in ((None, mask_mod), (score_mod, mask_mod), (score_mod, None)):
            judged(q, k, v, scores, masks)
        mask = fuse.create_block_mask(mask_mod, batch, None, sq, sk, "cuda", (128, 128) if dim == 64 else (256, 384))
        for scores in (None, score_mod):
            judged(q, k, v, scores, mask_mod, mask)


def test_look_ups_by_key_of_pages_and_many_tiles():
    """Numbers by key beside a ring of keys that goes round many times, of sequences with ends within a tile."""
    document = (torch.arange(5000, device="cuda") // 37 % 5).to(torch.int32)

    def documents(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    for sq, dim in ((1, 128), (70, 64), (300, 128)):
        q, k, v = operands(3, 8, 2, sq, 1500, dim, BF16, "cuda")
        given = paged(k, v, [1500, sq, 1024 + sq], 16)
        judged(q, given.pop("k"), given.pop("v"), None, documents, **given)
    for dim in (64, 128):
        q, k, v = operands(2, 40, 8, 2600, 2600, dim, BF16, "cuda")
        judged(q, k, v, None, documents)
        judged(q, k, v, None, documents, fuse.create_block_mask(documents, None, None, 2600, 2600, "cuda"))
        short = (torch.arange(2600, device="cuda") // 90).to(torch.int32)

        def few_blocks(b, h, q_idx, kv_idx, short=short):
            return short[q_idx] == short[kv_idx]

        judged(q, k, v, None, few_blocks, fuse.create_block_mask(few_blocks, None, None, 2600, 2600, "cuda"))


@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0, 30.0])
def test_soft_caps_of_large_scores(scale):
    """Within the polynomial's limit, partly and mostly beyond it."""
    functions = Functions(1, 4, 8, "cuda")
    for dim, dtype, mask in ((64, BF16, None), (128, F16, functions.masks["causal"])):
        q, k, v = operands(1, 4, 4, 700, 1500, dim, dtype, "cuda")
        judged(q * scale, k, v, functions.scores["soft_cap"], mask)


def test_counted_tiles():
    """More tiles than SMs, which CTAs take by a counter: each call's own, also in replays of a graph."""
    functions = Functions(1, 40, 2600, "cuda")
    for dim, score in ((128, None), (64, functions.scores["alibi"])):
        q, k, v = operands(1, 40, 8, 2600, 2600, dim, BF16, "cuda")
        judged(q, k, v, score, functions.masks["causal"])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fuse.attention(q, k, v, score, functions.masks["causal"], enable_gqa=True)
        for _ in range(2):
            graph.replay()
        assert torch.equal(out, fuse.attention(q, k, v, score, functions.masks["causal"], enable_gqa=True))


def test_what_is_not_seen_may_be_nan():
    """Tiles that bounds or a block mask skip are not read."""
    q, k, v = operands(1, 2, 2, 256, 1024, 64, BF16, "cuda")
    want = fuse.attention(q, k[:, :, :256], v[:, :, :256], None, lambda b, h, q, kv: q >= kv)
    k[:, :, 384:], v[:, :, 384:] = float("nan"), float("nan")
    assert torch.isfinite(fuse.attention(q, k, v, None, lambda b, h, q, kv: q >= kv)).all()
    torch.testing.assert_close(fuse.attention(q, k, v, None, lambda b, h, q, kv: q >= kv), want)


def test_operator_and_graphs():
    functions = Functions(2, 4, LENGTH, "cuda")
    alibi, causal = functions.scores["alibi"], functions.masks["causal"]
    q, k, v = operands(2, 4, 2, 100, 200, 64, BF16, "cuda")
    call = attention_function.traced(alibi, causal)
    torch.library.opcheck(attention_function.OP, (q, k, v, call.captured, [], [], None, None, call.key, 0.125))

    def function(q, k, v):
        return fuse.attention(q * 2, k, v, alibi, causal, enable_gqa=True) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for length in (100, 300, 7):
        q, k, v = operands(2, 4, 2, length, 200, 64, BF16, "cuda")
        torch.testing.assert_close(compiled(q, k, v), function(q, k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, function(q, k, v))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = function(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, other)


def test_lengths_need_no_compilation(monkeypatch):
    """After precompile() no call with such tensors compiles, whatever its lengths, batch and strides are."""
    functions = Functions(8, 4, 2000, "cuda")
    function = fuse.AttentionFunction(functions.scores["alibi"], functions.masks["causal"])
    q, k, v = operands(1, 4, 2, 8, 8, 64, BF16, "cuda")
    function.precompile((q, k, v))
    monkeypatch.setattr(compiler, "build", lambda kernel: pytest.fail("compiled"))
    for batch, sq, sk in ((1, 1, 1), (2, 7, 300), (1, 64, 64), (8, 200, 100), (1, 2000, 2000), (3, 65, 1999)):
        q, k, v = operands(batch, 4, 2, sq, sk, 64, BF16, "cuda")
        assert function(q, k, v, enable_gqa=True).shape == q.shape


def test_export(tmp_path):
    functions = Functions(2, 4, LENGTH, "cuda")
    function = fuse.AttentionFunction(functions.scores["relative"], functions.masks["causal"])
    q, k, v = operands(2, 4, 4, 300, 300, 64, BF16, "cuda")
    (table,) = attention_function.traced(function.score_mod, function.mask_mod).captured
    loaded = fuse.load(fuse.export(function, tmp_path / "relative", [(q, k, v)]))
    for sq in (1, 64, 300):
        assert torch.equal(loaded(q[:, :, :sq], k, v, table=table), function(q[:, :, :sq], k, v))


def test_merged_parts_are_in_order():
    """Few queries over many keys are cut into parts: results are the same each time, and right."""
    q, k, v = operands(1, 8, 2, 1, 30000, 128, BF16, "cuda")
    call = attention_function.traced(None, None)
    sizes = attention_function._sizes(q, k, v, None)
    assert attention_function.configure(call.traced, sizes, dtypes.storage_of(q.dtype), 0, (), 132)[1] > 1
    judged(q, k, v, None, None)
    out, lse = fuse.attention(q, k, v, enable_gqa=True, return_lse=True)
    assert torch.isfinite(lse).all() and exact(q, k, v, None, None)[0].shape == out.shape
