"""attention_paged on a GPU: how many sequences, keys and queries there are, and how many parts the keys are split into.

With a given number of splits, the bits of a sequence must not depend on its neighbours.
"""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.options import call_options
from tests.attention.paged_cases import DEVICE, judge, make
from tests.attention.test_gpu import same_bits
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_lengths(kv_format):
    """Every length up to a few rounds of slices, and more than a warp's lanes know."""

    def cases():
        for dtype, head_dim, options in ((torch.float16, 128, {}), (torch.bfloat16, 64, dict(num_splits=3))):
            yield options, make(range(300), kv_format, (4, 1), (head_dim, head_dim), dtype), options

    judge(cases())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_large_batches(kv_format):
    """31, 32, 33 sequences and 600 of them: lanes of a warp and tables; ragged, empty ones among them."""

    def cases():
        for batch in (31, 32, 33, 600):
            draw = random.Random(batch)
            lengths = [draw.choice((0, 1, draw.randrange(20), draw.randrange(300))) for _ in range(batch)]
            lengths[batch // 3] = 3000
            for options in ({}, dict(num_splits=2), dict(window_left=50)):
                if batch < 600 or not options:
                    yield (batch, options), make(lengths, kv_format, (4, 1), (128, 128), torch.bfloat16), options
        queries = [draw.choice((0, 1, 1, 2, 5)) for _ in lengths]
        yield "queries", make(lengths, kv_format, (4, 1), (64, 64), torch.float16, queries=queries), {}
        yield "none", make([0] * 40, kv_format, (4, 2), (128, 128), torch.float16), {}
        yield "one key each", make([1] * 300, kv_format, (8, 8), (64, 64), torch.bfloat16), {}

    judge(cases())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_few_output_tiles(kv_format):
    """Fewer than CTAs, of lengths that differ little and much: ranges of their own, and shared ones where these would be long."""
    draw = random.Random(11)

    def cases():
        for heads in ((8, 8), (32, 8), (4, 1), (24, 2)):
            for batch, most in itertools.product((1, 2, 5, 13, 32, 33), (40, 300, 1500, 6000)):
                lengths = [draw.randrange(most + 1) for _ in range(batch)]
                yield (heads, lengths), make(lengths, kv_format, heads, (128, 128), torch.bfloat16), {}

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_several_queries(kv_format, dtype):
    """Of one number, and ragged: none, more than there are keys; the rows of q of nobody are zeros and -inf, whatever the sinks are."""
    lengths = [300, 77, 2, 900, 0]
    sinks = torch.randn(8, device=DEVICE).to(dtype)

    def cases():
        for queries in (2, 3, 4, 9):
            for heads, options in (((8, 2), {}), ((8, 2), dict(causal=False)), ((16, 1), dict(window_left=30)), ((8, 8), {})):
                yield (queries, heads, options), make(lengths, kv_format, heads, (128, 128), dtype, queries=queries), options
        for queries in ([3, 0, 17, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 4], [0] * 5, [6, 80, 5, 1, 2]):
            for options in ({}, dict(sinks=sinks), dict(causal=False, num_splits=3), dict(window_left=8, softcap=5.0)):
                yield (queries, options), make(lengths, kv_format, (8, 2), (128, 128), dtype, queries=queries), options

    judge(cases())
    call = make(lengths, kv_format, (8, 2), (128, 128), dtype, queries=[3, 0, 2, 1, 0])
    for options in ({}, dict(sinks=sinks), dict(num_splits=2)):
        out, lse = call.run(**options)
        for outside in (slice(0, 2), slice(8, None)):
            assert not out[outside].any() and bool((lse[:, outside] == -math.inf).all()), options
        # An upper bound may be far too large.
        for have, want in zip(call.run(**options, max_seqlen_q=1000), (out, lse), strict=True):
            torch.testing.assert_close(have, want, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_layouts_of_queries(kv_format):
    """With a batch mode and end to end with one length: the same bits."""
    call = make([300, 5, 0], kv_format, (8, 2), (128, 128), torch.float16, queries=2)
    out, lse = call.run()
    flat, flat_lse = dataclasses.replace(call, q=call.q.flatten(0, 1)).run(max_seqlen_q=2)
    assert same_bits((out.flatten(0, 1), lse.transpose(0, 1).flatten(1).contiguous()), (flat, flat_lse))


# ---- splits ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_splits(kv_format, dtype):
    """Parts of few slices, of one and of none; more units than CTAs, and one."""

    def cases():
        for splits in (1, 2, 3, 4, 5, 6, 7, 256):
            for lengths, heads in (([4000], (8, 2)), ([40, 1000, 7, 0, 129] * 3, (8, 8)), ([1, 64, 33], (16, 1))):
                yield (splits, lengths, heads), make(lengths, kv_format, heads, (128, 128), dtype), dict(num_splits=splits)
        yield "queries", make([500, 30], kv_format, (8, 2), (128, 128), dtype, queries=[9, 2]), dict(num_splits=5, window_left=200)
        options = call_options(dict(sinks=True), 4, dtype, DEVICE) | dict(num_splits=6)
        yield "sinks", make([500, 0], kv_format, (4, 2), (64, 64), dtype), options

    judge(cases())


def test_numbers_of_parts():
    """As many as are merged at once, as a warp has lanes, and one more or less."""

    def cases():
        for splits in (8, 9, 15, 16, 17, 31, 32, 33, 34, 64, 65, 131):
            for heads, queries in (((4, 1), 1), ((16, 1), 1), ((8, 1), 3)):
                call = make([131 * 64 * 3 + 5], "16bit", heads, (128, 128), torch.bfloat16, queries=queries)
                yield (splits, heads, queries), call, dict(num_splits=splits)

    judge(cases())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_long_contexts(kv_format):
    def cases():
        for lengths, heads in (([70000], (32, 8)), ([3000] * 9, (32, 32)), ([20000, 1, 5000], (8, 1)), ([1500] * 40, (16, 2))):
            yield (lengths[0], heads), make(lengths, kv_format, heads, (128, 128), torch.bfloat16), {}

    judge(cases())


@pytest.mark.parametrize("page_size", (64, None), ids=("paged", "contiguous"))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bits_do_not_depend_on_the_batch(kv_format, page_size):
    """With a number of splits, a sequence has the same bits alone, in parts of the batch and in all of it."""
    draw = random.Random(3)
    for batch, heads, queries, options in (
        (5, (8, 2), 1, {}),
        (40, (8, 2), 1, dict(window_left=100)),
        (40, (16, 1), 3, dict(softcap=5.0)),
        (300, (4, 1), 1, {}),
    ):
        lengths = [draw.choice((0, 1, draw.randrange(60), draw.randrange(700))) for _ in range(batch)]
        lengths[0], lengths[-1] = 2500, 333
        call = make(lengths, kv_format, heads, (128, 128), torch.bfloat16, queries=queries, page_size=page_size)
        for splits in (1, 3, 8, 256):
            out, lse = call.run(num_splits=splits, **options)
            for chosen in ([0], [batch - 1], [batch // 2], list(range(0, batch, 2)), list(range(batch - 1, 0, -3))):
                have = call.subset(chosen).run(num_splits=splits, **options)
                assert same_bits(have, (out[chosen], lse[chosen])), (batch, heads, splits, chosen[:3])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bits_do_not_depend_on_ragged_neighbours(kv_format):
    """Queries of neighbours, of no query and of many, and other rows of q."""
    queries = [3, 0, 1, 17, 1, 2] * 7
    call = make([200, 50, 900, 77, 0, 64] * 7, kv_format, (8, 2), (128, 128), torch.float16, queries=queries)
    for splits in (2, 5):
        out, lse = call.run(num_splits=splits)
        for b in (0, 2, 3, 5, 20, 41):
            rows = slice(call.ends[b], call.ends[b + 1])
            have = call.subset([b], call.q[rows][None]).run(num_splits=splits)
            assert same_bits(have, (out[rows][None], lse[:, rows][None].contiguous())), (b, splits)
