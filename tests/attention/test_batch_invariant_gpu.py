"""The batch-invariant kernels of attention on a GPU: the bits of a query follow from itself and the keys and values that it sees.

Not from the other queries of its sequence (how a prompt is cut in chunks), not from other sequences, pages, padding, or how a launch shares
out the keys. And the results are attention: float64 is the judge. Kernels are asked for by name, as `minfer.batch_invariant` chooses them.
"""

import dataclasses
import itertools
import json
import math
import random

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.options import call_options
from tests.attention.paged_cases import DEVICE, captured, formats_of, judge, make, raw
from tests.attention.test_gpu import same_bits
from tests.gemm.cases import DTYPES, name_of

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.is_available() and not HERE, reason="the mode's kernels are of 9.0")]

PLAIN = ("16bit", "fp8_e4m3", "int8")  # what a key becomes does not depend on the keys behind it
# Options of a call; sinks are drawn for its heads.
OPTIONS = ({}, dict(window_left=333), dict(softcap=7.0), dict(sinks=True), dict(window_left=100, softcap=15.0, sinks=True))
HEADS = ((4, 4), (8, 2), (8, 1), (7, 1), (12, 2))
# Around the edges of key blocks (64, 80, 96, 128 keys), of splits (448 to 576 keys) and of tiles.
EDGES = (0, 1, 64, 79, 80, 127, 128, 191, 192, 479, 480, 511, 512, 513, 559, 560, 575, 576, 639, 640, 1023, 1024, 1025, 1119, 1120, 1499)
LENGTH = 1500


def kernels_of(kv_format, head_dim, dtype, few: bool = False) -> list[str]:
    """The kernels of the mode, which have the same bits; few: that for few rows, where there is one."""
    own = [k for k in minfer.kernels("attention") if k["operation"] == "attention_invariant" and kv_format in formats_of(k)]
    fitting = [k for k in own if k["ab_type"] == DTYPE_NAMES[dtype] and k["tile_k"] >= head_dim]
    least = [k for k in fitting if k["tile_k"] == min(k["tile_k"] for k in fitting)]
    chosen = [k for k in least if (k["tile_m"] == 8) == few] or least
    return [k["name"] for k in sorted(chosen, key=lambda k: -k["tile_m"])]


def kernel_of(kv_format, head_dim, dtype, few: bool = False) -> dict:
    """The option that names the first of them, with the largest tiles."""
    return dict(kernel=kernels_of(kv_format, head_dim, dtype, few)[0])


def run(call, few: bool | None = None, **options):
    """few: as of kernel_of(); unless given, where there are up to 8 queries to a sequence."""
    few = call.q.dim() == 4 and call.q.shape[1] <= 8 if few is None else few
    return call.run(**kernel_of(call.cache.kv_format, call.q.shape[-1], call.q.dtype, few), **options)


def rows_of(call, begin: int, end: int, **options):
    """Queries `begin` to `end` of the only sequence, with the keys up to `end`, as a chunk of a prompt has them; lse with rows first."""
    part = dataclasses.replace(
        call,
        q=call.q[:, begin:end],
        lengths=[end],
        seq_lens=torch.tensor([end], dtype=torch.int32, device=DEVICE),
    )
    out, lse = run(part, **options)
    return out[0], lse[0].T.contiguous()


def differs(have, want) -> bool:
    return not same_bits((have[0], have[1].view(torch.int16)), (want[0], want[1].contiguous().view(torch.int16)))


def cut(want, begin: int, end: int):
    return want[0][begin:end], want[1][begin:end]


def prompt(kv_format, heads, head_dim, dtype, page_size=64, length=LENGTH, **more):
    return make([length], kv_format, heads, (head_dim, head_dim), dtype, queries=length, page_size=page_size, **more)


# ---- chunks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("kv_format", "head_dim"), [*itertools.product(PLAIN, (64, 128)), ("16bit", 192), ("16bit", 256), ("int8", 256)])
def test_chunks(kv_format, head_dim, dtype):
    """A prompt in one piece, in chunks of each size, and token by token."""
    wrong = []
    for heads, options in itertools.product(HEADS[1:3] if head_dim > 128 else HEADS, OPTIONS):
        options = call_options(options, heads[0], dtype, DEVICE)
        call = prompt(kv_format, heads, head_dim, dtype)
        want = rows_of(call, 0, LENGTH, **options)
        assert not want[0].isnan().any()
        parts = [(at, at + 1) for at in EDGES] + [(at, at + 7) for at in EDGES if at + 7 <= LENGTH]
        for chunk in (64, 100, 512):
            parts += [(at, min(at + chunk, LENGTH)) for at in range(0, LENGTH, chunk)]
        wrong += [(heads, list(options), part) for part in parts if differs(rows_of(call, *part, **options), cut(want, *part))]
    assert not wrong, f"{len(wrong)} chunks differ: {wrong[:10]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_smaller_tiles(dtype):
    """Kernels whose tiles have other numbers of rows, whole and divided, with the same key blocks."""
    first, *others = kernels_of("16bit", 128, dtype)
    assert others
    for heads, options in itertools.product(HEADS, OPTIONS):
        options = call_options(options, heads[0], dtype, DEVICE)
        for lengths, queries in (([LENGTH], LENGTH), ([3000, 700], 300), ([9000], 130)):
            call = make(lengths, "16bit", heads, (128, 128), dtype, queries=queries)
            want = call.run(kernel=first, **options)
            for name in others:
                have = call.run(kernel=name, **options)
                assert same_bits((have[0], have[1].view(torch.int16)), (want[0], want[1].view(torch.int16))), (heads, list(options), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_token_alone(dtype):
    """Every position of a prompt, by a call of its own."""
    call = prompt("16bit", (8, 2), 128, dtype, length=1100)
    want = rows_of(call, 0, 1100)
    assert not [at for at in range(1100) if differs(rows_of(call, at, at + 1), cut(want, at, at + 1))]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_chunks_over_int4(dtype):
    """Codes are made of whole token groups, so chunks must end where groups do; a chunk's own end decides what is in the residual."""
    for group in (32, 64):
        call = make([1280], "int4", (8, 2), (128, 128), dtype, queries=1280, groups=(group, 64))
        want = rows_of(call, 0, 1280)
        for chunk in (group, 256, 640):
            for at in range(0, 1280, chunk):
                assert not differs(rows_of(call, at, at + chunk), cut(want, at, at + chunk)), (group, chunk, at)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("head_dim", (64, 80, 128, 192, 256))
def test_tensors_and_caches(head_dim, dtype):
    """attention, attention_varlen and attention_paged over the same 16 bits."""
    for heads, options in itertools.product(HEADS[:3], OPTIONS):
        options = call_options(options, heads[0], dtype, DEVICE) | kernel_of("16bit", head_dim, dtype)
        q = torch.randn(1, LENGTH, heads[0], head_dim, device=DEVICE, dtype=dtype)
        k, v = (torch.randn(1, LENGTH, heads[1], head_dim, device=DEVICE, dtype=dtype) for _ in range(2))
        out, lse = minfer.attention(q, k, v, causal=True, **options)
        want = out[0], lse[0].T.contiguous()
        other = torch.randn(700, heads[0], head_dim, device=DEVICE, dtype=dtype)
        ends = torch.tensor([0, 700, 700 + LENGTH], dtype=torch.int32, device=DEVICE)
        two = [torch.cat([torch.randn(700, *x.shape[2:], device=DEVICE, dtype=dtype), x[0]]) for x in (k, v)]
        out, lse = minfer.attention_varlen(torch.cat([other, q[0]]), *two, ends, ends, LENGTH, LENGTH, causal=True, **options)
        assert not differs((out[700:], lse[:, 700:].T.contiguous()), want), (heads, options)
        for at in (0, 1, 559, 560, 700, 1024, LENGTH - 1):
            lengths = torch.tensor([at + 1], dtype=torch.int32, device=DEVICE)
            out, lse = minfer.attention_paged(q[:, at : at + 1], k, v, lengths, **options)
            assert not differs((out[0], lse[0].T.contiguous()), cut(want, at, at + 1)), (heads, options, at)


# ---- what else is in the batch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_neighbours(kv_format, dtype):
    """Each of 34 sequences alone and among the others, with one query, some, and of each another number; pages lie in any order."""
    draw = random.Random(5)
    lengths = [draw.choice((1, 5, 64, 300, draw.randrange(1, 3000))) for _ in range(33)] + [4100]
    for heads, head_dim, options in (((8, 2), 128, {}), ((4, 4), 64, dict(window_left=500)), ((8, 1), 128, dict(softcap=9.0, sinks=True))):
        options = call_options(options, heads[0], dtype, DEVICE)
        for queries in (1, 4):
            call = make([max(length, queries) for length in lengths], kv_format, heads, (head_dim, head_dim), dtype, queries=queries)
            out, lse = run(call, **options)
            for b in range(len(lengths)):
                alone = run(call.subset([b]), **options)
                assert not differs(alone, (out[b : b + 1], lse[b : b + 1])), (heads, queries, b)
        ragged = [draw.choice((1, 1, 1, 2, 40)) for _ in lengths]
        call = make(
            [max(pair) for pair in zip(lengths, ragged, strict=True)], kv_format, heads, (head_dim, head_dim), dtype, queries=ragged
        )
        out, lse = run(call, **options)
        for b, (first, last) in enumerate(itertools.pairwise(call.ends)):
            have = run(call.subset([b], q=call.q[None, first:last]), **options)
            assert not differs((have[0][0], have[1][0].T.contiguous()), (out[first:last], lse[:, first:last].T)), (heads, b)


def plan_of(
    batch: int, length: int, kv_format="16bit", queries=1, heads=(8, 2), head_dim=128, page_size=64, dtype=torch.bfloat16, kernel=None
) -> dict:
    sizes = [batch, queries, length, *heads, head_dim, head_dim]
    return json.loads(
        torch.ops.minfer._plan_attention(sizes, DTYPE_NAMES[dtype], -1, 0, False, kernel, True, 0, kv_format, page_size, True)
    )


@pytest.mark.parametrize(("kv_format", "head_dim"), [*itertools.product(PLAIN, (64, 128)), ("16bit", 192)])
def test_whole_tiles_and_divided_ones(kv_format, head_dim):
    """Keys that one CTA folds, because there are sequences enough, and keys that many CTAs share."""
    batch, length, heads, queries = 1500, 1100, (2, 2), 8
    name = kernel_of(kv_format, head_dim, torch.bfloat16)["kernel"]
    assert plan_of(batch, 1152, kv_format, queries, heads, head_dim, kernel=name)["split_rows"] == 0
    assert plan_of(3, 1152, kv_format, queries, heads, head_dim, kernel=name)["split_rows"] > 0
    call = make([length - b % 700 for b in range(batch)], kv_format, heads, (head_dim, head_dim), torch.bfloat16, queries=queries)
    out, lse = run(call, few=False)
    for first, few in itertools.product((0, 600, batch - 3), (False, True)):
        have = run(call.subset(range(first, first + 3)), few=few)
        assert not differs(have, (out[first : first + 3], lse[first : first + 3])), (first, few)
    assert not differs(run(call, few=True), (out, lse))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages(kv_format):
    """Other pages, other sizes of them, and none, hold the same keys."""
    call = prompt(kv_format, (8, 2), 128, torch.float16, page_size=64, length=1472)
    want = rows_of(call, 1400, 1472)
    order = call.table[0, :23].long()
    gathered = {name: raw(x)[order].contiguous().view(x.dtype) for name in ("k", "v") if (x := getattr(call.cache, name)) is not None}
    for name in ("k_scale", "v_scale"):
        x = getattr(call.cache, name)
        gathered[name] = x[order].contiguous() if x is not None and x.dim() > 1 else x
    table = torch.arange(23, dtype=torch.int32, device=DEVICE)[None]
    in_order = dataclasses.replace(call, cache=call.cache._replace(**gathered), table=table)
    assert not differs(rows_of(in_order, 1400, 1472), want)
    if kv_format not in ("16bit", "fp8_e4m3"):
        return
    for size in (16, 32, 368, None):
        pages = 1 if size is None else 1472 // size
        other = {name: raw(gathered[name]).reshape(pages, size or 1472, 2, -1).view(gathered[name].dtype) for name in ("k", "v")}
        table = None if size is None else torch.arange(pages, dtype=torch.int32, device=DEVICE)[None]
        there = dataclasses.replace(in_order, cache=in_order.cache._replace(**other), table=table)
        assert not differs(rows_of(there, 1400, 1472), want), size


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_of_many_items(kv_format, dtype):
    """So many sequences that each warp has a split of its own: pages of one box, of several, and of boxes that its lanes cannot hold, and
    scales at addresses that no copy of 16 bytes reaches, which the operator copies."""
    draw = random.Random(11)
    for page_size in (64, 128) if kv_format == "int4" else (8, 16, 32, 64):
        for head_dim, heads in ((128, (8, 4)), (64, (16, 8))):
            lengths = [draw.choice((2, 31, 512, 1100, draw.randrange(2, 1100))) for _ in range(130)]
            call = make(lengths, kv_format, heads, (head_dim, head_dim), dtype, queries=2, page_size=page_size)
            want = run(call, few=False)
            assert not differs(run(call, few=True), want), (page_size, head_dim)
            scales = {name: x for name in ("k_scale", "v_scale") if (x := getattr(call.cache, name)) is not None and x.dim() > 1}
            if not scales or page_size != 64:
                continue
            apart = {name: x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x) for name, x in scales.items()}
            assert not differs(run(dataclasses.replace(call, cache=call.cache._replace(**apart)), few=True), want), head_dim


@pytest.mark.parametrize("few", (False, True))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_padding_of_a_graph(kv_format, few):
    """A captured batch with places for more sequences, whose lengths are 0, replayed with other lengths. The second batch is so large that
    a launch behind folds the splits of few rows; those of the first are folded by the CTAs that compute them."""
    for places, heads in ((8, (8, 2)), (40, (16, 4))):
        name = kernel_of(kv_format, 128, torch.bfloat16, few)
        call = make([900, 2000] + [0] * (places - 2), kv_format, heads, (128, 128), torch.bfloat16, most=2048)
        graph, have = captured(call, **name)
        for lengths in ([900, 2000], [899, 1], [560, 561], [0, 1700], [900, 2000]):
            if kv_format == "int4" and lengths != [900, 2000]:
                continue  # which tokens are codes follows from the length
            call.seq_lens.copy_(torch.tensor(lengths + [0] * (places - 2), dtype=torch.int32))
            graph.replay()
            torch.cuda.synchronize()
            for b, length in enumerate(lengths):
                alone = run(dataclasses.replace(call.subset([b]), lengths=[length]))
                assert not differs(alone, (have[0][b : b + 1], have[1][b : b + 1])), (lengths, b)
            assert not have[0][2:].any() and bool((have[1][2:] == -math.inf).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_who_folds(kv_format, dtype):
    """One sequence of many splits, alone on the GPU, beside one and beside so many others that they are folded by another launch."""
    lengths = [8100, 511, 0, 7000, *range(1, 7000, 500)]
    for heads, queries in (((32, 8), 1), ((8, 8), 3), ((16, 4), 2)):
        call = make([max(length, queries) for length in lengths], kv_format, heads, (128, 128), dtype, queries=queries)
        want = run(call)
        for b, among in ((0, [0]), (0, [0, 1]), (0, [2, 0]), (3, [3]), (1, [1, 3]), (1, [1])):
            have, at = run(call.subset(among)), among.index(b)
            assert not differs((have[0][at], have[1][at]), (want[0][b], want[1][b])), (heads, queries, among)


# ---- numbers ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_numbers(kv_format, dtype):
    """Against float64; what nobody sees is NaN."""

    def cases():
        wide = (((192, 128), (8, 2)), ((192, 192), (4, 2)), ((256, 256), (4, 2)))
        for head_dims, heads in (((64, 64), (4, 4)), ((128, 128), (8, 1)), ((96, 64), (7, 1)), *wide):
            for lengths, queries in (([5000, 1, 0, 561], 1), ([560, 1, 0, 90], 1), ([700, 3000], 90), ([1000, 40, 513], [3, 40, 200])):
                for options in OPTIONS[:2] if queries == 1 else OPTIONS[1:]:
                    options = call_options(options, heads[0], dtype, DEVICE)
                    call = make(lengths, kv_format, heads, head_dims, dtype, queries=queries)
                    for few in (False, True):
                        yield (head_dims, lengths, queries), call, options | kernel_of(kv_format, head_dims[0], dtype, few)

    judge(cases())


# ---- the mode --------------------------------------------------------------------------------------------------------------------


def test_the_mode_chooses_them():
    for kv_format, head_dim, dtype, queries in itertools.product(KV_FORMATS, (64, 128), DTYPES, (1, 64)):
        names = kernels_of(kv_format, head_dim, dtype, few=queries == 1)
        plans = [plan_of(*sizes, kv_format, queries, head_dim=head_dim, dtype=dtype) for sizes in ((1, 64), (300, 4096))]
        assert all(plan["kernel"] in names for plan in plans)


def test_calls_in_the_mode():
    call = make([300, 4000], "16bit", (8, 2), (128, 128), torch.bfloat16)
    want = run(call)
    with minfer.batch_invariant():
        assert not differs(call.run(), want)
        with pytest.raises(RuntimeError, match="num_splits must be None in the batch-invariant mode"):
            call.run(num_splits=4)
        with pytest.raises(RuntimeError, match="depend on what else is computed"):
            call.run(kernel="attention_sm90_bf16_d128_decode")
