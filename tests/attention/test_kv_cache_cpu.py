"""minfer.allocate_kv_cache and kv_cache_append without a GPU: the CPU kernel against per-element definitions, checks, fakes, tracing."""

import copy
import math
import random
import re

import minfer
import pytest
import torch

from tests.attention.kv_cache_cases import (
    KV_FORMATS,
    Contents,
    append_args,
    bad_append_calls,
    e4m3,
    group_tokens_of,
)
from tests.contracts.test_registration import check_op, need
from tests.gemm.cases import DTYPES, name_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TENSORS = ("k", "v", "k_scale", "v_scale", "k_residual", "v_residual")
HALF = torch.finfo(torch.float16)


def tensors_of(cache) -> dict:
    return {name: getattr(cache, name) for name in TENSORS if getattr(cache, name) is not None}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def copy_of(cache):
    return type(cache)(*map(copy.deepcopy, cache))


def same(a, b, lengths=None) -> bool:
    """Bit for bit; with the ``lengths`` of sequences, only those rows of residuals that are theirs."""
    for name, x in tensors_of(a).items():
        pairs = [(x, getattr(b, name))]
        if lengths is not None and "residual" in name:
            pairs = [(y[i, : n % y.shape[1]], z[i, : n % y.shape[1]]) for y, z in pairs for i, n in enumerate(lengths)]
        if not all(torch.equal(bits_of(y), bits_of(z)) for y, z in pairs):
            return False
    return True


def append(k, v, cache, slots, ends=None):
    slots = torch.as_tensor(slots, dtype=torch.int64)
    ends = None if ends is None else torch.as_tensor(ends, dtype=torch.int32)
    assert minfer.kv_cache_append(k, v, cache.k, cache.v, slots, cu_seqlens=ends, **cache.scales()) is None


def fill(cache) -> None:
    """Bits of no meaning, NaN among them; fp8's scales, which are the caller's, are kept."""
    for name, x in tensors_of(cache).items():
        if cache.kv_format != "fp8_e4m3" or name in ("k", "v"):
            bits_of(x).copy_(torch.randint(-128, 128, (*x.shape, x.element_size())).to(torch.int8).view(bits_of(x).dtype)[..., 0])


# ---- allocation ------------------------------------------------------------------------------------------------------------------


def test_allocate():
    kinds = {"16bit": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
    for kv_format, dtype in kinds.items():
        cache = minfer.allocate_kv_cache(5, 128, 3, 128, head_dim_v=64, kv_format=kv_format, batch=2)
        width = 2 if kv_format == "int4" else 1
        assert isinstance(cache, minfer.KvCache) and cache.kv_format == kv_format and cache.k.dtype == cache.v.dtype == dtype
        assert cache.k.shape == (5, 128, 3, 128 // width) and cache.v.shape == (5, 128, 3, 64 // width)
        assert all(not bits_of(x).any() for name, x in tensors_of(cache).items() if kv_format != "fp8_e4m3" or "scale" not in name)
        assert set(cache.scales()) == {"kv_format", *tensors_of(cache)} - {"k", "v"}
        assert cache.kv_format == cache.scales()["kv_format"]

    def shapes(*args, **options):
        return [tuple(x.shape) for x in tensors_of(minfer.allocate_kv_cache(*args, **options)).values()][2:]

    assert shapes(5, 128, 3, 128) == []
    assert shapes(5, 128, 3, 128, kv_format="fp8_e4m3") == [(3,), (3,)]
    assert shapes(5, 128, 3, 128, kv_format="int8") == [(5, 3, 128)] * 2
    assert shapes(5, 128, 3, 128, kv_format="int4") == [(5, 3, 2, 2, 128), (5, 3, 4, 128), (5, 64, 3, 128), (5, 64, 3, 128)]
    small = shapes(5, 96, 3, 160, head_dim_v=96, kv_format="int4", batch=2, group_tokens=32)
    assert small == [(5, 3, 3, 2, 160), (5, 3, 6, 96), (2, 32, 3, 160), (2, 32, 3, 96)]
    assert minfer.allocate_kv_cache(1, 64, 1, 64, kv_format="int4", dtype=torch.float16).k_residual.dtype == torch.float16
    assert minfer.allocate_kv_cache(1, 13, 1, 8, device="meta", paged=False).k.shape == (1, 13, 1, 8)


BAD_ALLOCATIONS = (
    (dict(kv_format="int3"), "kv_format must be one of 16bit, fp8_e4m3, int8, int4, got 'int3'"),
    (dict(dtype=torch.float32), "dtype must be float16 or bfloat16, as the queries are, got float32"),
    (dict(dtype=torch.float32, kv_format="int4"), "dtype must be float16 or bfloat16"),
    (dict(pages=-1), "pages must be an integer, 0 or more, got -1"),
    (dict(pages=2.0), "pages must be an integer, 0 or more, got 2.0"),
    (dict(heads_kv=-2), "heads_kv must be an integer, 0 or more, got -2"),
    (dict(batch=-1, kv_format="int4"), "batch must be an integer, 0 or more, got -1"),
    (dict(page_size=-8), "page_size must be an integer, 0 or more, got -8"),
    (dict(page_size=True, paged=False), "page_size must be an integer, 0 or more, got True"),
    (dict(page_size=12), "page_size must be a positive multiple of 8 where paged is True, got 12"),
    (dict(page_size=0), "page_size must be a positive multiple of 8 where paged is True, got 0"),
    (dict(page_size=12, kv_format="fp8_e4m3", paged=False), "page_size must be a multiple of 8 for fp8_e4m3, got 12"),
    (dict(page_size=0, kv_format="int4", paged=False), "page_size must be positive for int4, got 0"),
    (dict(head_dim=0), "head_dim must be a multiple of 8 up to 256 for 16bit, got 0"),
    (dict(head_dim=12), "head_dim must be a multiple of 8 up to 256 for 16bit, got 12"),
    (dict(head_dim=264), "head_dim must be a multiple of 8 up to 256 for 16bit, got 264"),
    (dict(head_dim=-64), "head_dim must be a multiple of 8 up to 256 for 16bit, got -64"),
    (dict(head_dim=64.0), "head_dim must be a multiple of 8 up to 256 for 16bit, got 64.0"),
    (dict(head_dim=272, kv_format="int8"), "head_dim must be a multiple of 16 up to 256 for int8, got 272"),
    (dict(head_dim=80, kv_format="int4"), "head_dim must be a multiple of 32 up to 256 for int4, got 80"),
    (dict(head_dim_v=0), "head_dim_v must be a multiple of 8 up to head_dim 64 for 16bit, got 0"),
    (dict(head_dim_v=72), "head_dim_v must be a multiple of 8 up to head_dim 64 for 16bit, got 72"),
    (dict(head_dim_v=24, kv_format="int8"), "head_dim_v must be a multiple of 16 up to head_dim 64 for int8, got 24"),
    (dict(page_size=96, kv_format="int4"), "group_tokens must be 32 or 64 and divide page_size 96, got 64"),
    (dict(group_tokens=16, kv_format="int4"), "group_tokens must be 32 or 64 and divide page_size 64, got 16"),
    (dict(group_channels=0, kv_format="int4"), "group_channels must be a multiple of 32 that divides head_dim_v 64, got 0"),
    (dict(group_channels=128, kv_format="int4"), "group_channels must be a multiple of 32 that divides head_dim_v 64, got 128"),
)


@pytest.mark.parametrize("options, message", BAD_ALLOCATIONS, ids=lambda x: "" if isinstance(x, str) else ",".join(map(str, x.values())))
def test_bad_allocation(options, message):
    with pytest.raises(ValueError, match="^allocate_kv_cache: " + re.escape(message)):
        minfer.allocate_kv_cache(**dict(pages=2, page_size=64, heads_kv=1, head_dim=64, device="meta") | options)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_allocated_is_taken(kv_format, seed):
    """Of arguments at and around every limit: a ValueError, or a cache that both operators take, paged and contiguous."""
    draw = random.Random(seed)
    taken = refused = 0
    for _ in range(400):
        paged, dtype = draw.choice((True, False)), draw.choice((torch.float16, torch.bfloat16))
        sizes = [draw.choice(x) for x in ((0, 1, 3), (0, 8, 12, 32, 64, 96, 128), (0, 1, 2))]
        dims = dict(
            head_dim=draw.choice((0, 8, 16, 32, 64, 96, 192, 256, 264, 288)), head_dim_v=draw.choice((None, 0, 8, 16, 32, 64, 96, 264))
        )
        groups = dict(group_tokens=draw.choice((16, 32, 64)), group_channels=draw.choice((None, 16, 32, 64, 96)))
        options = dims | groups | dict(kv_format=kv_format, dtype=dtype, paged=paged, device="meta")
        pages, page_size, heads_kv = sizes
        try:
            cache = minfer.allocate_kv_cache(*sizes, **options, batch=pages)
        except ValueError:
            refused += 1
            continue
        taken += 1
        head_dim = dims["head_dim"]
        head_dim_v = head_dim if dims["head_dim_v"] is None else dims["head_dim_v"]
        q = torch.empty(pages, 1, 2 * heads_kv, head_dim, dtype=dtype, device="meta")
        lens, table = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((pages,), (pages, 4)))
        for block_table in (table, None) if paged else (None,):
            out, _ = minfer.attention_paged(q, cache.k, cache.v, lens, block_table=block_table, **cache.scales())
            assert out.shape == (pages, 1, 2 * heads_kv, head_dim_v)
        k, v = (torch.empty(pages, heads_kv, d, dtype=dtype, device="meta") for d in (head_dim, head_dim_v))
        minfer.kv_cache_append(k, v, cache.k, cache.v, torch.empty(pages, dtype=torch.int64, device="meta"), **cache.scales())
    assert taken > 5 and refused > 100, (taken, refused)


def test_more_memory_than_there_is():
    with pytest.raises(
        RuntimeError, match=r"allocate_kv_cache: could not allocate 8388608.0 GiB for a cache of 17179869184 x 64 tokens, 8 heads"
    ):
        minfer.allocate_kv_cache(2**34, 64, 8, 512 // 2, head_dim_v=256)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_order_in_memory(kv_format):
    """Of codes, a head's rows of a page follow each other."""
    cache = minfer.allocate_kv_cache(5, 128, 3, 128, head_dim_v=64, kv_format=kv_format, batch=2)
    for x in (cache.k, cache.v):
        assert x._base is None and not bool(x.view(torch.uint8).any())
        assert (x if kv_format == "16bit" else x.transpose(1, 2)).is_contiguous()


# ---- values: each format by its definition ---------------------------------------------------------------------------------------


def test_16bit_is_a_copy():
    k, v, slots, cache, _ = append_args("16bit", head_dims=(32, 16))
    append(k, v, cache, slots)
    for x, codes in ((k, cache.k), (v, cache.v)):
        for i, slot in enumerate(slots.tolist()):
            assert torch.equal(codes[slot // 64, slot % 64], x[i])


@pytest.mark.parametrize("scales", ("head", "one"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_fp8_is_the_nearest_code(scales, dtype):
    """Of all codes, that whose value is nearest to x / scale, of two the even one; saturated."""
    k, v, slots, cache, _ = append_args("fp8_e4m3", dtype=dtype, head_dims=(32, 16))
    k[:, 0, :4] = torch.tensor([448.0, 464.0, -1e4, 2.0**-10]).to(dtype)  # the largest, a tie with what is beyond, far beyond, half a step
    v[0], v[1, 0, 0] = 0, 0.341796875  # 25 / 16 of its scale, a tie that a product with 1 / scale would miss
    k_scale, v_scale = (torch.tensor(x) for x in (((1.0, 0.3), (0.21875, 3.0)) if scales == "head" else ((1.0,), (0.21875,))))
    cache = cache._replace(k_scale=k_scale.clone(), v_scale=v_scale.clone())
    append(k, v, cache, slots)
    assert torch.equal(k_scale, cache.k_scale) and torch.equal(v_scale, cache.v_scale)
    values = [(e4m3(bits), bits) for bits in range(256) if not math.isnan(e4m3(bits))]
    for x, codes, scale in ((k, cache.k.view(torch.uint8), k_scale), (v, cache.v.view(torch.uint8), v_scale)):
        wanted = x.float() / (scale if len(scale) > 1 else scale.expand(2))[:, None]
        for i, slot in enumerate(slots.tolist()):
            for h in range(2):
                for d, want in enumerate(wanted[i, h].tolist()):
                    nearest = min(abs(value - want) for value, _ in values)
                    bits = int(codes[slot // 64, slot % 64, h, d])
                    ties = {value for value, _ in values if abs(value - want) == nearest}
                    even = {value for value, code in values if value in ties and code % 2 == 0} if len(ties) > 1 else ties
                    assert e4m3(bits) in even and math.copysign(1, e4m3(bits)) == math.copysign(1, want), (want, e4m3(bits))


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def float16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).clamp(-HALF.max, HALF.max).half().item()


def quotient(x: float, y: float) -> float:
    """In float32."""
    return (torch.tensor(x, dtype=torch.float32) / torch.tensor(y, dtype=torch.float32)).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_int8_by_its_definition(dtype):
    k, v, slots, cache, _ = append_args("int8", dtype=dtype, head_dims=(32, 16))
    k[0, 0], v[1] = 0, v[1] * 1e-4
    k[1, 0] *= torch.finfo(dtype).max / k[1, 0].abs().max()
    append(k, v, cache, slots)
    for x, codes, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        for i, slot in enumerate(slots.tolist()):
            page, row = divmod(slot, 64)
            for h in range(2):
                elements = x[i, h].tolist()
                scale = quotient(max(map(abs, elements)), 127.0)
                assert scales[page, h, row].item() == scale
                want = [max(-127, min(127, round(quotient(e, scale)))) if scale else 0 for e in elements]
                assert codes[page, row, h].tolist() == want
                assert scale == 0 or max(map(abs, want)) == 127


def int4_by_definition(elements: list[float]) -> tuple[float, float, list[int]]:
    minimum = float16(min(elements))
    scale = float16(max(0.0, quotient(float32(max(elements) - minimum), 15.0)))
    return scale, minimum, [max(0, min(15, round(quotient(float32(e - minimum), scale or 1.0)))) for e in elements]


@pytest.mark.parametrize("group_tokens, group_channels, page_size", ((32, 32, 64), (64, 64, 64), (32, 96, 32)))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_int4_by_its_definition(dtype, group_tokens, group_channels, page_size):
    """Channels and tokens that are constant, large, tiny, beyond float16; two sequences, one of them with whole groups only."""
    head_dims, lengths = (96, 96) if group_channels == 96 else (64, 64), (group_tokens + 5, group_tokens)
    cache = minfer.allocate_kv_cache(
        4,
        page_size,
        1,
        head_dims[0],
        head_dim_v=head_dims[1],
        kv_format="int4",
        dtype=dtype,
        batch=2,
        group_tokens=group_tokens,
        group_channels=group_channels,
    )
    k, v = (torch.randn(sum(lengths), 1, d).to(dtype) for d in head_dims)
    for x in (k, v):
        x[..., 0], x[..., 1], x[..., 2] = 3.3, x[..., 1] * 1e-6, x[..., 2] * 1000
        x[3], x[4] = 0, x[4] * 1e-7
    if dtype == torch.bfloat16:
        k[..., 3], v[5] = 1e6 * k[..., 3], v[5] - 1e5
    starts = (0, 2 * page_size)
    slots = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)]
    append(k, v, cache, slots, [0, lengths[0], sum(lengths)])
    contents = Contents(cache)
    for b, (start, first) in enumerate(zip(starts, (0, lengths[0]), strict=True)):
        page, rows = start // page_size, range(group_tokens)
        for d in range(head_dims[0]):
            scale, minimum, codes = int4_by_definition(k[first : first + group_tokens, 0, d].tolist())
            assert [contents.k_scale[page][0][0][i][d] for i in range(2)] == [scale, minimum]
            assert [contents.k[page][row][0][d // 2] >> 4 * (d % 2) & 15 for row in rows] == codes
        for row in rows:
            for g in range(head_dims[1] // group_channels):
                channels = range(g * group_channels, (g + 1) * group_channels)
                scale, minimum, codes = int4_by_definition(v[first + row, 0, channels.start : channels.stop].tolist())
                assert [contents.v_scale[page][0][i * contents.groups_v + g][row] for i in range(2)] == [scale, minimum]
                assert [contents.v[page][row][0][d // 2] >> 4 * (d % 2) & 15 for d in channels] == codes
        rest = range(group_tokens, lengths[b])
        assert torch.equal(cache.k_residual[b, : len(rest)], k[first : first + lengths[b]][rest.start :])
        assert torch.equal(cache.v_residual[b, : len(rest)], v[first : first + lengths[b]][rest.start :])
    assert not cache.k[1].any() and not cache.k_scale[1].any() and not cache.v[3].any() and not cache.v_scale[3].any()


def rounding(x: torch.Tensor) -> torch.Tensor:
    """Of a float16: half a step of numbers, or half of the least step."""
    return (x.abs() * (HALF.eps / 2)).clamp(min=HALF.smallest_normal * HALF.eps / 2)


def largest_error(kv_format, cache, x, keys, scale):
    """What an element may be off by, like x [tokens, heads_kv, head_dim]: half a step, what rounded scales leave at the ends, and float32's
    own roundings."""
    x, unit = x.double(), 2.0**-24
    if kv_format == "16bit":
        return torch.zeros_like(x)
    if kv_format == "fp8_e4m3":
        scale = scale.double()[:, None]
        return torch.maximum(x.abs() / 16, scale * 2.0**-10) + 4 * unit * x.abs()  # 3 bits of mantissa, subnormal steps of 2^-9
    if kv_format == "int8":
        largest = x.abs().amax(-1, keepdim=True)
        return (largest / 127 / 2 + 4 * unit * largest).expand_as(x)
    if keys:
        groups = x.unflatten(0, (-1, group_tokens_of(cache)))
        least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    else:
        groups = x.unflatten(-1, (cache.v_scale.shape[2] // 2, -1))
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (most - least + rounding(least)) / 15
    error = (step + rounding(step)) / 2 + 15 * rounding(step) + rounding(least) + 16 * unit * torch.maximum(most.abs(), least.abs())
    return error.expand_as(groups).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_round_trip(kv_format, dtype):
    """What comes back is off by the roundings of its format, and the bound is not idle: something is off by half of it."""
    k, v, slots, cache, ends = append_args(kv_format, dtype=dtype, lengths=(128, 64), page_size=128, pages=4)
    k, v = (x * torch.exp(2 * torch.randn(x.shape[-1])).to(dtype) for x in (k, v))
    if kv_format == "fp8_e4m3":  # nothing is saturated, little is subnormal
        cache = cache._replace(**{f"{name}_scale": x.abs().amax((0, 2)).float() / 440 for name, x in (("k", k), ("v", v))})
    append(k, v, cache, slots, ends)
    contents = Contents(cache, torch.tensor([[1], [2]]))
    for b, (first, last) in enumerate(((0, 128), (128, 192))):
        for keys, have, x in zip((True, False), contents.sequence(b, last - first), (k[first:last], v[first:last]), strict=True):
            off = (have - x.double()).abs()
            allowed = largest_error(kv_format, cache, x, keys, cache.k_scale if keys else cache.v_scale)
            assert bool((off <= allowed).all()), (off - allowed).max()
            assert kv_format == "16bit" or bool((off > allowed / 2).any())


def test_kivi_keeps_keys_with_outlier_channels():
    """Channels that are large in every token, as keys have: quantised along tokens, the others keep what one scale for a token loses."""
    lengths, head_dim = (512,), 64
    k, v, slots, cache, ends = append_args("int4", lengths=lengths, page_size=512, pages=2)
    k += 30 * (torch.arange(head_dim) % 32 == 5) * torch.randn(2, head_dim).sign()
    k = k.half()
    append(k, k, cache, slots, ends)  # as values, they are quantised along channels
    along_tokens, along_channels = Contents(cache, torch.tensor([[1]])).sequence(0, 512)
    truth = k.double()
    plain = torch.arange(head_dim) % 32 != 5

    def error(x, channels):
        return torch.linalg.vector_norm((x - truth)[..., channels]) / torch.linalg.vector_norm(truth[..., channels])

    # Steps: a channel's range over 64 tokens is about 5, a token's over channels with outliers beyond 30.
    assert error(along_tokens, plain) < 0.15
    assert error(along_tokens, plain) < error(along_channels, plain) / 4
    # What scores are made of: the error of q.k.
    q = torch.randn(head_dim, dtype=torch.float64)
    off = [torch.linalg.vector_norm((x - truth) @ q) for x in (along_tokens, along_channels)]
    assert off[0] < off[1] / 4


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_attention_over_what_was_appended(kv_format):
    """Within what the errors of keys and values make of a softmax: scores off by e, probabilities by a factor of exp(2 e) at most."""
    lengths = (70, 1, 128)
    k, v, slots, cache, ends = append_args(kv_format, dtype=torch.bfloat16, lengths=lengths, page_size=128, pages=4)
    if kv_format == "fp8_e4m3":
        cache.k_scale.fill_(0.01), cache.v_scale.fill_(0.01)
    append(k, v, cache, slots, ends)
    q = torch.randn(3, 1, 4, 64).bfloat16()
    seq_lens, table = torch.tensor(lengths, dtype=torch.int32), torch.tensor([[1], [2], [3]], dtype=torch.int32)
    out, _ = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, **cache.scales())
    contents = Contents(cache, table)
    for b, length in enumerate(lengths):
        own = [x[ends[b] : ends[b + 1]] for x in (k, v)]
        want, _ = minfer.attention(q[b : b + 1], own[0][None], own[1][None], causal=True)
        have_k, have_v = contents.sequence(b, length)
        off_k, off_v = (have_k - own[0].double()), (have_v - own[1].double()).abs().max()
        per_head = torch.einsum("thd,hgd->htg", off_k, q[b, 0].double().unflatten(0, (2, 2)))
        factor = math.exp(2 * float(per_head.abs().max()) / 8) - 1
        allowed = factor * own[1].double().abs().max() + off_v + 2 * torch.finfo(torch.bfloat16).eps * own[1].double().abs().max()
        assert (out[b].double() - want[0].double()).abs().max() <= allowed
        assert kv_format != "16bit" or torch.equal(out[b], want[0])


# ---- what is written, and when -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", (True, False), ids=("paged", "contiguous"))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_other_slots_keep_their_bits(kv_format, paged):
    """Negative slots, slots that are not named, pages, residuals and scales of others."""
    k, v, _, cache, _ = append_args(kv_format, lengths=(70, 3, 4), pages=3)
    fill(cache)
    before = copy_of(cache)
    first, other = (
        (64, 0) if paged else (0, 128)
    )  # sequence 0: a whole group and 3 tokens behind it, of which the last 3 are skipped; 1: skipped; 2: 4 tokens
    slots = [*range(first, first + 67), -1, -1, -(2**40), -1, -1, -1, *range(other, other + 4)]
    append(k, v, cache, slots, [0, 70, 73, 77])
    named = torch.zeros(3 * 64, dtype=torch.bool)
    stored = [s for s in slots if s >= 0]
    if kv_format == "int4":
        stored = list(range(first, first + 64))
    named[stored] = True
    named = named.view(3, 64)
    for name, x in tensors_of(cache).items():
        changed = bits_of(x) != bits_of(getattr(before, name))
        if name in ("k", "v"):
            assert not changed[~named].any() and bool(changed.flatten(2).any(-1)[named].all())
        elif kv_format == "fp8_e4m3":
            assert not changed.any()
        elif kv_format == "int8":
            assert not changed.mT[~named].any() and bool(changed.mT[named].any(-1).all())
        elif name == "k_scale":
            groups = named[:, ::64]
            assert not changed.transpose(1, 2)[~groups].any() and bool(changed.transpose(1, 2)[groups].flatten(1).any())
        elif name == "v_scale":
            assert not changed.permute(0, 3, 1, 2)[~named].any()
        else:
            assert bool(changed[0, :3].flatten(1).any(-1).all()) and bool(changed[2, :4].flatten(1).any(-1).all())
            assert not changed[1].any() and not changed[2, 4:].any()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_nothing_to_store(kv_format):
    k, v, slots, cache, ends = append_args(kv_format)
    fill(cache)
    before = copy_of(cache)
    append(k, v, cache, torch.full_like(slots, -1), ends)
    append(k[:0], v[:0], cache, slots[:0], [0, 0, 0])
    assert same(cache, before)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_token_by_token_is_a_chunk(kv_format, seed):
    """Sequences in one call, in calls of any size, and a token of each at a time: the same bits, whatever was there before."""
    lengths, page_size = (150, 64, 5, 97), 64
    cache = minfer.allocate_kv_cache(12, page_size, 2, 64, kv_format=kv_format, dtype=torch.float16, batch=4, group_tokens=32)
    fill(cache)
    order = torch.randperm(12).tolist()
    pages = [[order.pop() for _ in range(-(-n // page_size))] for n in lengths]
    slots = [[pages[b][t // page_size] * page_size + t % page_size for t in range(n)] for b, n in enumerate(lengths)]
    k, v = ([torch.randn(n, 2, 64).half() for n in lengths] for _ in range(2))

    def call(into, begins, ends):
        ranges = list(zip(begins, ends, strict=True))
        parts = ([x[b][i:j] for b, (i, j) in enumerate(ranges)] for x in (k, v))
        cu_seqlens = [sum(j - i for i, j in ranges[:b]) for b in range(5)]
        append(*map(torch.cat, parts), into, [s for b, (i, j) in enumerate(ranges) for s in slots[b][i:j]], cu_seqlens)

    whole, pieces, single = (copy_of(cache) for _ in range(3))
    call(whole, (0,) * 4, lengths)
    at = [0] * 4
    while at != list(lengths):
        to = [min(n, i + int(torch.randint(0, 45 + 20 * seed, ()))) for n, i in zip(lengths, at, strict=True)]
        call(pieces, at, to)
        at = to
    for t in range(max(lengths)):  # as decode: without cu_seqlens; sequences that have ended have no slot
        row = [slots[b][t] if t < n else -1 for b, n in enumerate(lengths)]
        append(*(torch.stack([x[b][min(t, n - 1)] for b, n in enumerate(lengths)]) for x in (k, v)), single, row)
    assert same(whole, pieces, lengths) and same(whole, single, lengths) and not same(whole, cache, lengths)


def test_int4_tokens_outside_every_sequence():
    """Rows before and behind the sequences, as a padded batch has: not stored, whatever their slots."""
    k, v, slots, cache, _ = append_args("int4", lengths=(66,), pages=3)
    want = copy_of(cache)
    append(k[1:-1], v[1:-1], want, slots[:-2], [0, 64])
    append(k, v, cache, [191, *slots[:-2].tolist(), 190], [1, 65])
    assert same(cache, want, (64,)) and bool(cache.k[1].any())


def test_views():
    """Packed k and v; caches of a layer among others."""
    for kv_format in KV_FORMATS:
        k, v, slots, cache, ends = append_args(kv_format, lengths=(70, 3))
        want = copy_of(cache)
        append(k, v, want, slots, ends)
        qkv = torch.cat([torch.randn(73, 4, 64).half(), k, v], 1)
        layers = [torch.stack([bits_of(x), bits_of(x)], 1) for x in (cache.k, cache.v)]
        viewed = cache._replace(**{name: x[:, 1].view(cache.k.dtype) for name, x in zip(("k", "v"), layers, strict=True)})
        append(qkv[:, 4:6], qkv[:, 6:], viewed, torch.stack([slots, slots], 1)[:, 0], ends)
        assert same(viewed, want, (70, 3)) and not any(bool(x[:, 0].any()) for x in layers)


# ---- checks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_calls_that_cannot_be_right(device):
    for name, (message, args, options) in bad_append_calls(device).items():
        with pytest.raises(RuntimeError) as error:
            minfer.kv_cache_append(*args, **options)
        assert re.search(f"minfer::kv_cache_append: {message}", str(error.value)), (name, error.value)


def test_slots_are_named_once():
    k, v, slots, cache, _ = append_args("int8", lengths=(3,))
    slots = torch.as_tensor(slots).clone()
    slots[2] = slots[0]
    with pytest.raises(RuntimeError, match=f"slot_mapping must name a slot once, got {int(slots[0])} for tokens 0 and 2"):
        append(k, v, cache, slots)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_written_lies_apart(device):
    """Two tensors that are written, and what is read and written."""
    options = dict(dtype=torch.float16, device=device, batch=2)
    k, v = (torch.randn(2, 2, 64, device=device).half() for _ in range(2))
    slots = torch.arange(2, device=device) * 64
    int4 = minfer.allocate_kv_cache(2, 64, 2, 64, kv_format="int4", **options)
    int8 = minfer.allocate_kv_cache(2, 64, 2, 64, kv_format="int8", **options)
    dense = minfer.allocate_kv_cache(2, 64, 2, 64, **options)
    for cache, keys, message in (
        (int4._replace(v_residual=int4.k_residual), k, "k_residual must not overlap v_residual"),
        (int8._replace(v_scale=int8.k_scale), k, "k_scale must not overlap v_scale"),
        (dense, dense.k[0, :2], "k_cache must not overlap k"),
    ):
        before = cache.k.clone()
        with pytest.raises(RuntimeError, match=f"minfer::kv_cache_append: {message}, got"):
            minfer.kv_cache_append(keys, v, cache.k, cache.v, slots, **cache.scales())
        assert torch.equal(cache.k, before)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_operands_of_another_device(kv_format):
    k, v, slots, cache, ends = append_args(kv_format)
    args, options = (k, v, cache.k, cache.v, slots), dict(cu_seqlens=ends) | cache.scales()
    names = ("v", "k_cache", "v_cache", "slot_mapping")
    calls = {name: ((*args[:i], args[i].to("meta"), *args[i + 1 :]), options) for i, name in enumerate(names, 1)}
    calls |= {name: (args, options | {name: x.to("meta")}) for name, x in options.items() if isinstance(x, torch.Tensor)}
    assert len(calls) == {"16bit": 5, "int4": 9}.get(kv_format, 7)
    for name, (positional, keywords) in calls.items():
        with pytest.raises(RuntimeError, match=f"minfer::kv_cache_append: {name} must be on k's device cpu, got meta"):
            minfer.kv_cache_append(*positional, **keywords)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_values_that_cannot_be_right(kv_format):
    """Slots and cu_seqlens, which are the host's on CPU: refused, and nothing is stored."""
    k, v, slots, cache, ends = append_args(kv_format)
    before = copy_of(cache)
    calls = [
        ([64, 65, 256, 128, 129], ends, "slot_mapping must name one of the cache's 256 slots, got 256 for token 2"),
        (slots, [0, 3, 6], "cu_seqlens must lie in 0 to tokens = 5, got 0 to 6"),
        (slots, [-1, 3, 5], "cu_seqlens must lie in 0 to tokens = 5, got -1 to 5"),
        (slots, [4, 3, 5], "cu_seqlens must ascend, got 4 before 3"),
    ]
    if kv_format == "int4":
        follow = "slot_mapping must follow the positions of a sequence's tokens where kv_format is 'int4', got "
        calls += [
            ([64, 66, 67, 128, 129], ends, follow + "66 behind 64"),
            ([64, 65, 65, 128, 129], ends, follow + "65 behind 65"),
            ([64, -1, 66, 128, 129], ends, follow + "66 behind 64"),
            ([63, 65, 66, 128, 129], ends, follow + "65 behind 63"),
            ([65, 64, 65, 128, 129], ends, follow + "64 behind 65"),
        ]
    for slot_mapping, cu_seqlens, message in calls:
        with pytest.raises(RuntimeError, match="minfer::kv_cache_append: " + message):
            append(k, v, cache, slot_mapping, cu_seqlens)
    assert same(cache, before)
    append(k, v, cache, [62, 63, 192, -5, 128], ends)  # a group ends, and the next begins on another page


# ---- registration ----------------------------------------------------------------------------------------------------------------


def test_schema():
    op = torch.ops.minfer.kv_cache_append.default
    assert str(op._schema) == (
        "minfer::kv_cache_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, "
        "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, Tensor(e!)? k_residual=None, Tensor(f!)? v_residual=None, "
        'Tensor? cu_seqlens=None, str kv_format="auto") -> ()'
    )
    assert torch.Tag.needs_fixed_stride_order in op.tags


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_opcheck(kv_format, device):
    k, v, slots, cache, ends = append_args(kv_format, device, lengths=(66, 1, 3), pages=5)
    slots[3] = -1 if kv_format != "int4" else slots[3]
    options = cache.scales()
    if kv_format == "fp8_e4m3":  # of float8, opcheck cannot say whether it was written
        cache = cache._replace(k=cache.k.view(torch.uint8), v=cache.v.view(torch.uint8))
    op = torch.ops.minfer.kv_cache_append.default
    check_op(op, (k, v, cache.k, cache.v, slots), options | dict(cu_seqlens=ends))
    if kv_format != "int4":
        check_op(op, (k, v, cache.k, cache.v, slots), options)
    else:
        check_op(op, (k[:3], v[:3], cache.k, cache.v, slots[:3]), options)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_meta(kv_format):
    k, v, slots, cache, ends = append_args(kv_format, "meta")
    assert minfer.kv_cache_append(k, v, cache.k, cache.v, slots, cu_seqlens=ends, **cache.scales()) is None


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend, kv_format):
    """A layer: store, then attend over what was stored; token counts that change; the caches are views of one tensor."""
    need(backend)
    dynamic = kv_format != "16bit"

    def layer(qkv, both, scales, slots, ends, seq_lens, table):
        q, k, v = (qkv * 2).split((4, 2, 2), dim=1)
        k_cache, v_cache = both.unbind(1)
        minfer.kv_cache_append(k, v, k_cache, v_cache, slots, cu_seqlens=ends, **scales)
        out, _ = minfer.attention_paged(q, k_cache, v_cache, seq_lens, block_table=table, cu_seqlens_q=ends, max_seqlen_q=80, **scales)
        return out + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for lengths in ((66, 3), (5, 2), (64, 9)):
        k, v, slots, cache, ends = append_args(kv_format, lengths=lengths)
        both = torch.stack([bits_of(cache.k), bits_of(cache.v)], 1).view(cache.k.dtype)
        rest = slots, ends, torch.tensor(lengths, dtype=torch.int32), torch.tensor([[1, 2], [2, 0]], dtype=torch.int32)
        qkv = torch.cat([torch.randn(sum(lengths), 4, 64).half(), k, v], 1)
        states = [(both.clone(), {name: copy.deepcopy(x) for name, x in cache.scales().items()}) for _ in range(2)]
        with torch.no_grad():
            have, want = (f(qkv, *state, *rest) for f, state in zip((compiled, layer), states, strict=True))
        torch.testing.assert_close(have, want, rtol=2e-3, atol=1e-3)
        assert torch.equal(bits_of(states[0][0]), bits_of(states[1][0])) and bool(bits_of(states[0][0])[1].any() | (kv_format == "int4"))
        for name, x in states[0][1].items():
            assert x == states[1][1][name] if isinstance(x, str) else torch.equal(x, states[1][1][name])


def test_compile_bad_input():
    torch._dynamo.reset()
    k, v, slots, cache, _ = append_args("16bit")
    call = torch.compile(lambda k, v: minfer.kv_cache_append(k, v, cache.k, cache.v, slots), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="minfer::kv_cache_append: v must have k's modes but the last"):
        call(k, v[1:])


def test_autograd():
    """What requires grad is refused; autograd is told of what was written."""
    k, v, slots, cache, ends = append_args("int8")
    k.requires_grad_()
    refused = "minfer::kv_cache_append: cannot be differentiated, but an argument requires grad; call it under torch.no_grad"
    with pytest.raises(RuntimeError, match=refused):
        append(k, v, cache, slots, ends)
    assert not cache.k.any()
    with torch.no_grad():
        append(k, v, cache, slots, ends)
    assert bool(cache.k.any())
    for kv_format in ("16bit", "int8", "int4"):
        k, v, slots, cache, ends = append_args(kv_format, "meta")  # where nothing else counts
        versions = {name: x._version for name, x in tensors_of(cache).items()}
        append(k, v, cache, slots, ends)
        assert all(x._version > versions[name] for name, x in tensors_of(cache).items())
    here = append_args("int8")
    with torch.inference_mode():
        for k, v, slots, cache, ends in (append_args("int8"), here):
            append(k, v, cache, slots, ends)
            assert bool(cache.v_scale.any())
