"""No value of an index tensor leads outside of the tensors that were passed, and what nobody may see does not reach a result.

Lengths, pages, rows and permutations come out of engines and checkpoints. What the lengths do not need is never looked at; what they
need and is not there counts as zeros; nothing is written outside of the results. Under compute-sanitizer these tests say more than without.
"""

import math

import minfer
import pytest
import torch

from tests.attention.kv_cache_cases import E4M3_NAN, KV_FORMATS, make_cache
from tests.gemm.cases import name_of
from tests.moe.grouped_quantized_cases import require_kernels

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GARBAGE = (2**31 - 1, 10**6, -1, -(2**31))  # pages that no cache has


def same_bits(have, want) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return all(torch.equal(a.view(integers[a.dtype.itemsize]), b.view(integers[b.dtype.itemsize])) for a, b in zip(have, want, strict=True))


def garbage(shape) -> torch.Tensor:
    return torch.tensor(GARBAGE, dtype=torch.int32, device=DEVICE)[torch.randint(0, len(GARBAGE), tuple(shape), device=DEVICE)]


def integers(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# ---- attention over caches: what the lengths do not need -----------------------------------------------------------------------


@pytest.mark.parametrize("queries", (1, 40), ids=("decode", "prefill"))
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_windows_that_begin_behind_the_codes(kv_format, head_dim, queries):
    """Of int4, the newest tokens lie in the residual, and a window may begin there: then no page is needed."""
    lengths = [queries + n for n in (110 - queries, 97, 45, 33, 70, 110, 128, 160, 191)]
    cache, seq_lens, table = make_cache(lengths, kv_format, 2, (head_dim, head_dim), torch.bfloat16, DEVICE, page_size=32)
    q = torch.randn(len(lengths), queries, 8, head_dim, device=DEVICE).bfloat16()
    for window in (0, 1, 9, 31, 40):
        options = dict(window_left=window, **cache.scales())
        want = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, **options)
        before = table.clone()
        for b, length in enumerate(lengths):
            gone = max(length - queries - window, 0) // 32
            before[b, :gone] = garbage((gone,))
        have = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=before, **options)
        torch.cuda.synchronize()
        assert same_bits(have, want), window
        assert not want[0].isnan().any(), window


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=name_of)
def test_short_sequences_beside_garbage(dtype):
    """Many sequences shorter than a group, whose tokens are all in the residual; entries of the table that name no page."""
    for seed in range(40):
        torch.manual_seed(seed)
        longest = (200, 2000)[seed % 2]
        lengths = torch.randint(1, longest + 1, (40,)).tolist()
        cache, seq_lens, table = make_cache(lengths, "int4", 2, (64, 64), dtype, DEVICE, page_size=32)
        q = torch.randn(40, 1, 8, 64, device=DEVICE).to(dtype)
        options = cache.scales() | (dict(window_left=seed * 7) if seed % 3 == 0 else dict(softcap=20.0) if seed % 3 == 1 else {})
        want = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, **options)
        unneeded = (table < 0) | (table >= cache.k.shape[0])
        have = minfer.attention_paged(
            q, cache.k, cache.v, seq_lens, block_table=torch.where(unneeded, garbage(table.shape), table), **options
        )
        torch.cuda.synchronize()
        assert same_bits(have, want), seed
        assert not want[0].isnan().any()


def nan_before(cache, table, b, rows) -> None:
    """The first ``rows`` rows of sequence ``b`` hold NaN."""
    page_size = cache.k.shape[1]
    for row in range(rows):
        page = int(table[b, row // page_size]) if table is not None else b
        at = row % page_size if table is not None else row
        for x in (cache.k, cache.v):
            if x.dtype == torch.float8_e4m3fn:
                x.view(torch.uint8)[page, at] = E4M3_NAN
            elif x.dtype.is_floating_point:
                x[page, at] = math.nan
        if cache.kv_format == "int8":
            cache.k_scale[page, :, at] = cache.v_scale[page, :, at] = math.nan
        if cache.kv_format == "int4" and page >= 0:
            cache.v_scale[page, :, :, at] = math.nan


@pytest.mark.parametrize("paged", (True, False), ids=("paged", "contiguous"))
@pytest.mark.parametrize("queries", (1, 3, 20, 200))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_rows_before_every_window(kv_format, queries, paged):
    """NaN in rows that no query sees: whole pages of them, which were freed and used again, and the first rows of a page that is needed."""
    for head_dim, window, page_size in ((64, 0, 32), (128, 7, 64), (128, 31, 128), (256, 64, 32), (96, 200, 32), (32, 1, 256)):
        lengths = [queries + n for n in (300, 77, 150, 513, 40)]
        cache, seq_lens, table = make_cache(
            lengths, kv_format, 2, (head_dim, head_dim), torch.bfloat16, DEVICE, page_size=page_size, paged=paged
        )
        q = torch.randn(len(lengths), queries, 8, head_dim, device=DEVICE).bfloat16()
        options = dict(window_left=window, block_table=table, **cache.scales())
        want = minfer.attention_paged(q, cache.k, cache.v, seq_lens, **options)
        for b, length in enumerate(lengths):
            codes = length // 32 * 32 if kv_format == "int4" else length
            unseen = max(length - queries - window, 0)
            nan_before(cache, table, b, min(unseen, codes))
            if kv_format == "int4" and unseen > codes:
                for residual in (cache.k_residual, cache.v_residual):
                    residual[b, : unseen - codes] = math.nan
        have = minfer.attention_paged(q, cache.k, cache.v, seq_lens, **options)
        assert not want[0].isnan().any()
        assert same_bits(have, want), (head_dim, window, page_size)


@pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
def test_rows_before_every_window_in_tensors(head_dim):
    """The same without a cache: of one length, and varlen, where they are another sequence's neighbours."""
    for seqlen_q, seqlen_k, window in ((1, 300, 10), (64, 500, 33), (200, 777, 0), (129, 400, 100), (300, 301, 5)):
        q = torch.randn(2, seqlen_q, 4, head_dim, device=DEVICE).half()
        k, v = (torch.randn(2, seqlen_k, 2, head_dim, device=DEVICE).half() for _ in range(2))
        for options in (dict(causal=True, window_left=window), dict(window_left=window, window_right=3)):
            want = minfer.attention(q, k, v, **options)
            unseen = max(seqlen_k - seqlen_q - window, 0)
            holed = [x.clone() for x in (k, v)]
            for x in holed:
                x[:, :unseen] = math.nan
            assert same_bits(minfer.attention(q, *holed, **options), want), (seqlen_q, seqlen_k, options)
            ends_q, ends_k = integers(0, seqlen_q, 2 * seqlen_q), integers(0, seqlen_k, 2 * seqlen_k)
            flat = [x.flatten(0, 1) for x in (q, *holed)]
            out, lse = minfer.attention_varlen(*flat, ends_q, ends_k, seqlen_q, seqlen_k, **options)
            assert not out.isnan().any() and not lse.isnan().any()
            assert torch.allclose(out.float(), want[0].flatten(0, 1).float(), atol=2e-2, rtol=2e-2)


# ---- attention: what is needed and not there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", (1, 100), ids=("decode", "prefill"))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_that_are_not_there_are_zeros(kv_format, queries):
    for head_dim, page_size in ((64, 32), (128, 64), (128, 128), (256, 32)):
        lengths = [queries + n for n in (96, 300, 1000, 30)]
        cache, seq_lens, table = make_cache(lengths, kv_format, 2, (head_dim, head_dim), torch.float16, DEVICE, page_size=page_size)
        zero = next(page for page in range(cache.k.shape[0]) if not bool((table == page).any()))
        for x in (cache.k, cache.v, *((cache.k_scale, cache.v_scale) if kv_format in ("int8", "int4") else ())):
            (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x)[zero] = 0
        q = torch.randn(len(lengths), queries, 8, head_dim, device=DEVICE).half()
        there = table >= 0
        there &= table < cache.k.shape[0]
        lost = there & (torch.arange(table.shape[1], device=DEVICE)[None] % 3 == 1)
        options = cache.scales()
        want = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table.masked_fill(lost, zero), **options)
        have = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=torch.where(lost, garbage(table.shape), table), **options)
        torch.cuda.synchronize()
        assert not want[0].isnan().any()
        assert same_bits(have, want), (head_dim, page_size)


@pytest.mark.parametrize("paged", (True, False), ids=("paged", "contiguous"))
@pytest.mark.parametrize("queries", (1, 70))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_lengths_are_those_that_the_cache_has_room_for(kv_format, queries, paged):
    lengths = [256] * 3
    cache, seq_lens, table = make_cache(lengths, kv_format, 2, (128, 128), torch.float16, DEVICE, page_size=64, paged=paged)
    table = None if table is None else table[:, :4].contiguous()
    q = torch.randn(3, queries, 8, 128, device=DEVICE).half()
    want = minfer.attention_paged(q, cache.k, cache.v, integers(256, 0, 256), block_table=table, **cache.scales())
    have = minfer.attention_paged(q, cache.k, cache.v, integers(2**31 - 1, -(2**31), 257), block_table=table, **cache.scales())
    torch.cuda.synchronize()
    assert same_bits(have, want)


ENDS = {
    "behind the end": lambda n: [0, n, 10 * n, 2**31 - 1],
    "negative": lambda n: [-(2**31), -5, n // 2, n],
    "descending": lambda n: [n, n // 2, n // 3, 0],
    "back and forth": lambda n: [0, n, 0, n],
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=list(ENDS))
def test_ends_of_sequences_that_cannot_be(ends):
    """They are cut to the rows there are; results of other calls are not touched."""
    tokens, batch = 96, 3
    guards = [torch.full((1 << 20,), 3, device=DEVICE, dtype=torch.int32) for _ in range(4)]
    wrong = integers(*ends(tokens))
    q, k, v = (torch.randn(tokens, heads, 128, device=DEVICE).half() for heads in (8, 2, 2))
    cache, seq_lens, table = make_cache([100] * batch, "16bit", 2, (128, 128), torch.float16, DEVICE, page_size=64)
    good = integers(0, 30, 60, 96)
    for _ in range(3):
        minfer.attention_varlen(q, k, v, wrong, good, tokens, tokens, causal=True)
        minfer.attention_varlen(q, k, v, good, wrong, tokens, tokens, window_left=9)
        for splits in (None, 1, 7):
            options = dict(block_table=table, cu_seqlens_q=wrong, max_seqlen_q=tokens, num_splits=splits)
            minfer.attention_paged(q, cache.k, cache.v, seq_lens, **options)
    torch.cuda.synchronize()
    assert all(bool((x == 3).all()) for x in guards)
    many = torch.tensor(ends(tokens) * 20, dtype=torch.int32, device=DEVICE)  # more sequences than a warp has lanes
    lens = torch.full((len(many) - 1,), 100, dtype=torch.int32, device=DEVICE)
    tables = table[:1].expand(len(lens), -1).contiguous()
    for splits in (None, 3):
        minfer.attention_paged(q, cache.k, cache.v, lens, block_table=tables, cu_seqlens_q=many, max_seqlen_q=8, num_splits=splits)
    torch.cuda.synchronize()
    assert all(bool((x == 3).all()) for x in guards)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_sequences_that_are_longer_than_was_said(kv_format):
    """max_seqlen_q sizes a launch, and no more."""
    lengths, queries = [300, 77, 150], [90, 3, 41]
    cache, seq_lens, table = make_cache(lengths, kv_format, 2, (128, 128), torch.float16, DEVICE)
    q, ends = torch.randn(sum(queries), 8, 128, device=DEVICE).half(), integers(0, 90, 93, 134)
    options = dict(block_table=table, cu_seqlens_q=ends, **cache.scales())
    want = minfer.attention_paged(q, cache.k, cache.v, seq_lens, max_seqlen_q=90, **options)
    for said in (0, 1, 7, 40):
        for splits in (None, 3):
            have = minfer.attention_paged(q, cache.k, cache.v, seq_lens, max_seqlen_q=said, num_splits=splits, **options)
            assert torch.allclose(have[0].float(), want[0].float(), atol=1e-2, rtol=1e-2), (said, splits)
            assert torch.allclose(have[1], want[1], atol=1e-2), (said, splits)


# ---- rows of experts, columns of a permutation ---------------------------------------------------------------------------------


def rows_that_are_not_there(rows: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An index of ``rows`` rows of ``of``, every third of which there is not; which."""
    index = torch.randint(0, of, (rows,), device=DEVICE).int()
    lost = torch.arange(rows, device=DEVICE) % 3 == 1
    return torch.where(lost, garbage((rows,)), index), lost


GATHERED_ROWS = (5, 70, 900, 6000)
EXPERTS, EXPERT_N, EXPERT_K = 4, 256, 512


def gathered_rows(rows: int):
    """Tokens, ends of experts, a gather of which every third row there is not, and which; the same with a row of zeros in their place."""
    tokens = 77
    a = torch.randn(tokens, EXPERT_K, device=DEVICE).bfloat16()
    gather, lost = rows_that_are_not_there(rows, tokens)
    ends = torch.tensor([(e + 1) * rows // EXPERTS for e in range(EXPERTS)], dtype=torch.int32, device=DEVICE)
    return a, ends, gather, lost, torch.cat([a, a.new_zeros(1, EXPERT_K)]), gather.masked_fill(lost, tokens)


@pytest.mark.parametrize("rows", GATHERED_ROWS)
def test_gathered_rows_that_are_not_there_are_zeros(rows):
    """By the loader of small and of large tiles, by a launch in front, element by element."""
    a, ends, gather, lost, padded, zero = gathered_rows(rows)
    b = (torch.randn(EXPERTS, EXPERT_N, EXPERT_K, device=DEVICE) / 16).bfloat16()
    for weight, source in ((b.mT, a), (b.mT, a[:, 1:])):
        weight, full = weight[:, : source.shape[1]], padded[:, -source.shape[1] :]
        have = minfer.grouped_gemm(source, weight, ends, gather=gather)
        assert same_bits([have], [minfer.grouped_gemm(full, weight, ends, gather=zero)]), (rows, source.shape)
        assert bool((have[lost] == 0).all())


@pytest.mark.parametrize("rows", GATHERED_ROWS)
def test_gathered_rows_that_are_not_there_are_zeros_of_4_bit_weights(rows):
    require_kernels(DEVICE)
    a, ends, gather, lost, padded, zero = gathered_rows(rows)
    codes = torch.randint(0, 16, (EXPERTS * EXPERT_N, EXPERT_K), device=DEVICE, dtype=torch.uint8)
    packed = minfer.w4a16_pack(codes).view(EXPERTS, EXPERT_N // 64, EXPERT_K // 64, 512)
    scales = (torch.rand(EXPERTS, EXPERT_K // 128, EXPERT_N, device=DEVICE) / 8).bfloat16()
    have = minfer.grouped_w4a16_gemm(a, packed, scales, None, ends, gather=gather)
    assert same_bits([have], [minfer.grouped_w4a16_gemm(padded, packed, scales, None, ends, gather=zero)])
    assert bool((have[lost] == 0).all())


def test_ends_of_experts_that_cannot_be():
    guards = [torch.full((1 << 20,), 3, device=DEVICE, dtype=torch.int32) for _ in range(4)]
    a = torch.randn(300, 256, device=DEVICE).bfloat16()
    b = torch.randn(4, 128, 256, device=DEVICE).bfloat16().mT
    out = torch.full((302, 128), 5.0, device=DEVICE).bfloat16()
    for ends in ((300, 200, 100, 0), (-5, 2**31 - 1, 7, 10**6), (2**31 - 1,) * 4, (0, 300, 0, 300), (40, -(2**31), 300, -(2**31))):
        minfer.grouped_gemm(a, b, integers(*ends), out=out[1:-1])
        minfer.grouped_gemm_masked(a[:288].view(4, 72, 256), b, integers(*ends))
    torch.cuda.synchronize()
    assert all(bool((x == 3).all()) for x in guards)
    assert bool((out[0] == 5).all()) and bool((out[-1] == 5).all())


@pytest.mark.parametrize("k", (512, 9216, 32768), ids=lambda k: f"k{k}")
def test_permuted_columns_that_are_not_there_are_zeros(k):
    """Of act-order, out of a checkpoint. Rows in shared memory, behind an early start or not, and rows that do not fit there."""
    n = 128
    codes = torch.randint(0, 16, (n, k), device=DEVICE, dtype=torch.uint8)
    packed, scales = minfer.w4a16_pack(codes), (torch.rand(k // 128, n, device=DEVICE) / 64).bfloat16()
    perm, lost = rows_that_are_not_there(k, k)
    for m in (1, 16, 100):
        a = torch.randn(m, k, device=DEVICE).bfloat16()
        gathered = a[:, torch.where(lost, 0, perm).long()].masked_fill(lost, 0)
        have = minfer.w4a16_gemm(a, packed, scales, perm=perm)
        assert same_bits([have], [minfer.w4a16_gemm(gathered, packed, scales)]), m


def test_places_that_are_not_there_add_nothing():
    y, weights = torch.randn(40, 64, device=DEVICE).bfloat16(), torch.rand(20, 2, device=DEVICE)
    inverse = torch.arange(40, device=DEVICE).int().view(20, 2)
    lost = torch.arange(40, device=DEVICE).view(20, 2) % 3 == 0
    have = minfer.moe_combine(y, torch.where(lost, garbage((20, 2)), inverse), weights)
    assert same_bits([have], [minfer.moe_combine(y, inverse, weights.masked_fill(lost, 0))])
    ids = torch.where(lost, garbage((20, 2)), inverse % 4)
    token_index, offsets, places, _ = minfer.moe_sort(ids, 4, weights=weights)
    assert bool((places[lost] == -1).all()) and int(offsets[-1]) == int((~lost).sum())
    assert int(token_index.max()) < 20 and int(token_index.min()) >= 0


@pytest.mark.parametrize("slots", [(5, 63, 74), (63, 5), (0, 127, 64, 3), (64, 62, 63, 1), (30, 31, 95)])
def test_slots_that_do_not_follow_each_other_read_no_other_tokens(slots):
    """int4: rows of a group that no token of the call has. What lies before k and v is NaN here, and must not be in the residual."""
    cache = minfer.allocate_kv_cache(2, 64, 2, 128, kv_format="int4", device=DEVICE, batch=1)
    for x in (cache.k_residual, cache.v_residual, cache.k_scale, cache.v_scale):
        x.zero_()
    memory = torch.full((2, 64 + len(slots), 2, 128), math.nan, device=DEVICE).bfloat16()
    memory[:, 64:] = 1.0
    k, v = memory[0, 64:], memory[1, 64:]
    own = torch.tensor(slots, device=DEVICE)
    minfer.kv_cache_append(k, v, cache.k, cache.v, own, cu_seqlens=integers(0, len(slots)), **cache.scales())
    for x in (cache.k_residual, cache.v_residual, cache.k_scale, cache.v_scale):
        assert not bool(x.isnan().any())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_slots_that_are_not_there_are_not_written(kv_format):
    cache = minfer.allocate_kv_cache(4, 64, 2, 128, kv_format=kv_format, device=DEVICE, batch=3)
    k, v = (torch.randn(96, 2, 128, device=DEVICE).bfloat16() for _ in range(2))
    before = [x.clone() for x in cache if isinstance(x, torch.Tensor)]
    slots = torch.full((96,), 4 * 64, device=DEVICE)
    slots[::3], slots[1::5] = -(2**63), 2**62
    for ends in ((0, 32, 64, 96), (96, 0, 2**31 - 1, -7)):
        minfer.kv_cache_append(k, v, cache.k, cache.v, slots, cu_seqlens=integers(*ends), **cache.scales())
    torch.cuda.synchronize()
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip([x for x in cache if isinstance(x, torch.Tensor)], before, strict=True)
    )
