"""torch.ops.minfer.kv_cache_append on a GPU: the bits of the CPU kernel, whatever the format, the layout and the order of calls.

Caches are full of bits of no meaning before the first call, so what is written elsewhere shows, and what is not written.
"""

import math
import re

import minfer
import pytest
import torch

from tests.attention.kv_cache_cases import KV_FORMATS, append_args, bad_append_calls, group_tokens_of
from tests.attention.test_kv_cache_cpu import bits_of, fill, tensors_of
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEAD_DIMS = {
    "16bit": ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (128, 64), (72, 40), (8, 8), (248, 200)),
    "fp8_e4m3": ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (128, 16)),
    "int8": ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (128, 16)),
    "int4": ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (32, 32), (160, 96), (224, 192)),
}
CASES = [(kv_format, head_dims) for kv_format in KV_FORMATS for head_dims in HEAD_DIMS[kv_format]]


def on(device, x):
    """A copy there."""
    return x.detach().to(device, copy=True) if isinstance(x, torch.Tensor) else x


def copy_on(device, cache):
    return type(cache)(*(on(device, x) for x in cache))


def comparable(cache, name, x):
    """Bits, of one NaN only; int4's minima without the sign of zeros, of which two that are equal are the least."""
    x = x.cpu().contiguous()
    if cache.kv_format == "fp8_e4m3" and name in ("k", "v"):
        x = bits_of(x)
        return torch.where(x & 127 == 127, 127, x)
    if x.is_floating_point() and "residual" not in name and cache.kv_format != "16bit":
        x = torch.where(x.isnan(), math.nan, x) + 0
    return bits_of(x)


def differing(have, want, lengths=None) -> str | None:
    """Which tensor differs; of residuals, only the rows that hold the last tokens of sequences with ``lengths`` count."""
    for name, y in tensors_of(want).items():
        x, y = comparable(have, name, getattr(have, name)), comparable(want, name, y)
        if "residual" in name and lengths is not None:
            rows = [(i, slice(n % x.shape[1])) for i, n in enumerate(lengths)]
            x, y = (torch.cat([z[i, r] for i, r in rows]) for z in (x, y))
        if not torch.equal(x, y):
            where = (x != y).nonzero()
            return f"{name}: {len(where)} of {x.numel()} elements, the first at {where[0].tolist()}"
    return None


def append(k, v, cache, slots, ends=None):
    """On the cache's device."""
    device = cache.k.device
    slots = torch.as_tensor(slots, dtype=torch.int64).to(device)
    ends = None if ends is None else torch.as_tensor(ends, dtype=torch.int32).to(device)
    k, v = (x if x.device == device else x.to(device) for x in (k, v))
    assert minfer.kv_cache_append(k, v, cache.k, cache.v, slots, cu_seqlens=ends, **cache.scales()) is None


def make_cache(kv_format, head_dims, dtype, batch, *, heads=3, pages=12, page_size=64, group_tokens=32, group_channels=None):
    cache = minfer.allocate_kv_cache(
        pages,
        page_size,
        heads,
        head_dims[0],
        head_dim_v=head_dims[1],
        kv_format=kv_format,
        dtype=dtype,
        batch=batch,
        group_tokens=group_tokens,
        group_channels=group_channels,
    )
    fill(cache)
    if kv_format == "fp8_e4m3":
        for scale in (cache.k_scale, cache.v_scale):
            scale.copy_(torch.rand(scale.shape) / 50 + 0.001)
    return cache


def make_rows(tokens, heads, head_dim, dtype):
    """Channels of many magnitudes; tokens of zeros, of tiny and of large numbers."""
    x = torch.randn(tokens, heads, head_dim) * torch.exp(2 * torch.randn(head_dim))
    kind = torch.randint(0, 12, (tokens, heads, 1))
    x = torch.where(kind == 0, 0.0, torch.where(kind == 1, x * 1e-6, torch.where(kind == 2, x * 300, x)))
    if dtype == torch.bfloat16:  # beyond float16
        x = torch.where(kind == 3, x * 1e5, x)
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


class Play:
    """Sequences that grow call by call, in a cache on the CPU and in one on the GPU."""

    def __init__(self, kv_format, head_dims, dtype, batch, *, most=192, page_size=64, paged=True, **options):
        columns = -(-most // page_size)
        pages, length = (batch * columns + 2, page_size) if paged else (batch, columns * page_size)
        self.want = make_cache(kv_format, head_dims, dtype, batch, pages=pages, page_size=length, **options)
        self.have = copy_on(DEVICE, self.want)
        order = torch.randperm(pages).tolist() if paged else list(range(batch))
        self.slot = lambda b, t: order[b * columns + t // page_size] * page_size + t % page_size if paged else b * length + t
        self.head_dims, self.dtype, self.lengths = head_dims, dtype, [0] * batch

    def rows(self, tokens):
        return [make_rows(tokens, self.want.k.shape[2], d, self.dtype) for d in self.head_dims]

    def call(self, counts, *, skipped=0.0, outside=(0, 0)):
        """``counts`` more tokens of each sequence, among them some without a slot, behind and before rows of no sequence."""
        slots, ends = [-7 if self.want.kv_format != "int4" else 0] * outside[0], [outside[0]]
        for b, count in enumerate(counts):
            for _ in range(count):
                while skipped and float(torch.rand(())) < skipped:
                    slots.append(-1)
                slots.append(self.slot(b, self.lengths[b]))
                self.lengths[b] += 1
            ends.append(len(slots))
        slots += [-7 if self.want.kv_format != "int4" else 1] * outside[1]
        k, v = self.rows(len(slots))
        for cache in (self.want, self.have):
            append(k, v, cache, slots, ends)

    def step(self, alive):
        """A token of each sequence that is alive, as in decode."""
        slots = [self.slot(b, self.lengths[b]) if on else -1 for b, on in enumerate(alive)]
        self.lengths = [n + on for n, on in zip(self.lengths, alive, strict=True)]
        k, v = self.rows(len(slots))
        for cache in (self.want, self.have):
            append(k, v, cache, slots)

    def check(self):
        problem = differing(self.have, self.want, self.lengths)
        assert problem is None, (problem, self.lengths)


# ---- the bits of the CPU kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", (True, False), ids=("paged", "contiguous"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format, head_dims", CASES)
def test_chunks(kv_format, head_dims, dtype, paged):
    """Calls of any size: groups that end inside a call, begin in the one before, or are several; rows taken over from the residual."""
    for group_tokens in (32, 64) if kv_format == "int4" else (32,):
        play = Play(kv_format, head_dims, dtype, 5, paged=paged, group_tokens=group_tokens)
        for counts in ((70, 64, 5, 0, 1), (1, 3, 58, 31, 0), (45, 100, 1, 66, 63), (0, 0, 0, 0, 0), (70, 1, 128, 33, 128)):
            play.call(counts)
            play.check()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_random_calls(kv_format, seed):
    """Tokens without a slot anywhere in a sequence, rows of no sequence, one to nine heads."""
    torch.manual_seed(seed)
    play = Play(kv_format, (64, 32), DTYPES[seed % 2], 7, most=256, heads=(1, 2, 5, 9)[seed], group_tokens=(32, 64)[seed // 2])
    for i in range(12):
        counts = [min(int(torch.randint(0, (6, 50, 110)[i % 3], ())), 256 - n) for n in play.lengths]
        play.call(counts, skipped=(0.0, 0.3, 0.9)[i % 3 if kv_format != "int4" else (i + seed) % 3], outside=(i % 2 * 3, i % 5))
        play.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_decode(kv_format, dtype):
    """A token of each sequence at a time, without cu_seqlens, launched to overlap; then a chunk on top."""
    play = Play(kv_format, (128, 128), dtype, 6, heads=8, group_tokens=64, most=256)
    play.call((0, 63, 10, 64, 1, 127))
    for i in range(70):
        play.step([(i + b) % 3 != 0 or b < 3 for b in range(6)])
    play.check()
    play.call((60, 3, 0, 64, 17, 1))
    play.check()


@pytest.mark.parametrize("batch, heads, group_tokens", ((64, 8, 64), (200, 8, 32), (1, 1, 64), (1100, 1, 32)))
def test_int4_groups_that_end_together(batch, heads, group_tokens):
    """All sequences' groups at once, in CTAs of one token and of many; cu_seqlens of one to three steps of the search."""
    play = Play("int4", (128, 64), torch.bfloat16, batch, most=group_tokens + 2, heads=heads, group_tokens=group_tokens)
    play.call([group_tokens - 1 - b % 2 for b in range(batch)])
    play.check()
    play.step([True] * batch)
    play.check()
    play.call([b % 4 // 2 for b in range(batch)])
    play.check()


@pytest.mark.parametrize(
    "head_dims, group_channels", [((96, 96), 96), ((128, 128), 32), ((128, 128), 128), ((256, 256), 64), ((256, 256), 256)]
)
def test_int4_groups_of_channels(head_dims, group_channels):
    play = Play("int4", head_dims, torch.float16, 2, group_channels=group_channels)
    for counts in ((33, 64), (40, 5), (64, 64)):
        play.call(counts)
        play.check()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_long_chunk(kv_format):
    """A prefill, of more CTAs than are resident; the same bits in every run."""
    play = Play(kv_format, (128, 128), torch.bfloat16, 3, most=4096, page_size=128, heads=4, group_tokens=64)
    before = copy_on(DEVICE, play.have)
    play.call((3000, 77, 4096), outside=(2, 2))
    play.check()
    slots = [play.slot(b, t) for b, n in enumerate(play.lengths) for t in range(n)]
    k, v = (x.to(DEVICE) for x in play.rows(len(slots)))
    runs = [copy_on(DEVICE, before) for _ in range(3)]
    for cache in runs:
        append(k, v, cache, slots, [0, 3000, 3077, 7173])
    assert differing(runs[1], runs[0], play.lengths) is None and differing(runs[2], runs[0], play.lengths) is None


@pytest.mark.parametrize("scales", ("one", "head", "strided"))
def test_fp8_scales(scales):
    want = make_cache("fp8_e4m3", (64, 64), torch.float16, 1)
    if scales == "one":
        want = want._replace(k_scale=want.k_scale[:1].clone(), v_scale=want.v_scale[:1].clone())
    have = copy_on(DEVICE, want)
    if scales == "strided":
        wide = [torch.stack([x, x + 1], 1).contiguous() for x in (have.k_scale, have.v_scale)]
        have = have._replace(k_scale=wide[0][:, 0], v_scale=wide[1][:, 0])
    k, v = (make_rows(300, 3, 64, torch.float16) for _ in range(2))
    slots = torch.randperm(12 * 64)[:300]
    for cache in (want, have):
        append(k, v, cache, slots)
    assert differing(have, want) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_16_bit_number(dtype):
    """fp8 and int8 of all of them, NaN and infinities among them; int4 in groups of neighbours."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    k, v = x.view(-1, 1, 64), x[torch.randperm(2**16)].view(-1, 1, 64)
    for kv_format in ("fp8_e4m3", "int8", "int4"):
        for scale in (1.0, 0.3, 37.0) if kv_format == "fp8_e4m3" else (1.0,):
            want = make_cache(kv_format, (64, 64), dtype, 1, heads=1, pages=17, group_channels=None if kv_format != "int4" else 32)
            if kv_format == "fp8_e4m3":
                want.k_scale.fill_(scale), want.v_scale.fill_(scale)
            have = copy_on(DEVICE, want)
            for cache in (want, have):
                append(k, v, cache, range(1024), [0, 1024])
            assert differing(have, want, [1024]) is None, (kv_format, scale)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_nan_and_infinities(kv_format, dtype, value):
    """They spoil what shares their scale, as on the CPU, and nothing else."""
    plain = make_cache(kv_format, (64, 64), dtype, 1)
    k, v = (make_rows(128, 3, 64, dtype) for _ in range(2))
    want, have, clean = copy_on("cpu", plain), copy_on(DEVICE, plain), copy_on(DEVICE, plain)
    append(k, v, clean, range(64, 192), [0, 128])
    for x in (k, v):
        x[70, 1, 5] = x[97, 2, 63] = value
    for cache in (want, have):
        append(k, v, cache, range(64, 192), [0, 128])
    assert differing(have, want, [128]) is None
    for name in ("k", "v"):
        changed = (bits_of(getattr(have, name)) != bits_of(getattr(clean, name))).cpu()
        assert not changed[:, :, 0].any() and not changed[1].any()  # other heads, other groups


# ---- views, limits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("packed", "odd base", "elements", "broadcast", "heads first"))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_strided_rows(kv_format, layout):
    """k and v as they are: 16 bytes at a time where they allow it, else element by element."""
    play = Play(kv_format, (96, 64), torch.bfloat16, 2, heads=2)
    tokens, slots, ends = 100, [play.slot(b, t) for b, n in enumerate((70, 30)) for t in range(n)], [0, 70, 100]
    for cache in (play.want, play.have):
        rows = []
        for d in play.head_dims:
            torch.manual_seed(d)
            wide = torch.randn(tokens, 7, 2 * d + 8).bfloat16().to(cache.k.device)
            rows.append(
                {
                    "packed": wide[:, 3:5, 8 : d + 8],
                    "odd base": wide[:, 3:5, 1 : d + 1],
                    "elements": wide[:, 1:6:4, 3 : 2 * d + 3 : 2],
                    "broadcast": wide[:, :1, :d].expand(-1, 2, -1),
                    "heads first": wide[:, :2, :d].transpose(0, 1).contiguous().transpose(0, 1),
                }[layout]
            )
        append(*rows, cache, slots, ends)
    play.lengths = [70, 30]
    play.check()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_views_of_caches(kv_format):
    """A layer among others, heads among others; slots and cu_seqlens strided."""
    play = Play(kv_format, (64, 64), torch.float16, 2, heads=2)
    slots, ends = [play.slot(b, t) for b, n in enumerate((70, 3)) for t in range(n)], [0, 70, 73]
    k, v = play.rows(73)
    append(k, v, play.want, slots, ends)
    layers = [bits_of(x)[:, None, :, None].repeat(1, 2, 1, 3, 1, 1).flatten(3, 4) for x in (play.have.k, play.have.v)]
    before = [x.clone() for x in layers]
    viewed = play.have._replace(**{name: x[:, 1, :, 2:4].view(play.have.k.dtype) for name, x in zip(("k", "v"), layers, strict=True)})
    strided = [torch.stack([x, x], 1)[:, 0] for x in (torch.tensor(slots, device=DEVICE), torch.tensor(ends, device=DEVICE).int())]
    assert strided[0].stride(0) == 2
    options = viewed.scales() | dict(cu_seqlens=strided[1])
    minfer.kv_cache_append(k.to(DEVICE), v.to(DEVICE), viewed.k, viewed.v, strided[0], **options)
    assert differing(viewed, play.want, (70, 3)) is None
    for x, y in zip(layers, before, strict=True):
        x[:, 1, :, 2:4] = y[:, 1, :, 2:4]
        assert torch.equal(x, y)


@pytest.mark.parametrize("kv_format", ("int4",))
def test_residuals_of_any_alignment(kv_format):
    play = Play(kv_format, (64, 64), torch.float16, 2)
    odd = {}
    for name in ("k_residual", "v_residual"):
        x = getattr(play.have, name)
        odd[name] = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)
    play.have = play.have._replace(**odd)
    for counts in ((20, 70), (45, 1), (64, 64)):
        play.call(counts)
        play.check()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_nothing_to_store(kv_format):
    """No tokens, none with a slot, none of a sequence: not a bit changes."""
    plain = make_cache(kv_format, (64, 64), torch.float16, 2)
    cache = copy_on(DEVICE, plain)
    k, v = (make_rows(5, 3, 64, torch.float16) for _ in range(2))
    append(k[:0], v[:0], cache, [], [0, 0, 0])
    append(k, v, cache, [-1, -(2**40), -(2**63), -64, -2], [0, 3, 5])
    if kv_format == "int4":
        append(k, v, cache, [64, 65, 66, 67, 68], [2, 2, 2])
        sequences = dict(k_residual=cache.k_residual[:0], v_residual=cache.v_residual[:0])
        append(k, v, cache._replace(**sequences), [64, 65, 66, 67, 68], [0])
    torch.cuda.synchronize()
    assert differing(cache, plain) is None


@pytest.mark.parametrize("kv_format", ("fp8_e4m3", "int8", "int4"))
def test_offsets_beyond_32_bits(kv_format):
    """More than 2^31 elements: the first page and the last ones are what they are in a small cache."""
    heads, head_dim = 8, 128 if kv_format != "int4" else 256
    pages = 2**31 // (64 * heads * 128) + 3
    large = minfer.allocate_kv_cache(
        pages, 64, heads, head_dim, kv_format=kv_format, dtype=torch.bfloat16, device=DEVICE, batch=3, group_tokens=64
    )
    small = minfer.allocate_kv_cache(3, 64, heads, head_dim, kv_format=kv_format, dtype=torch.bfloat16, batch=3, group_tokens=64)
    assert large.k.numel() > 2**31
    own = [0, pages - 2, pages - 1]
    k, v = (make_rows(3 * 64, heads, head_dim, torch.bfloat16) for _ in range(2))
    ends = [0, 64, 128, 192]
    append(k, v, small, range(192), ends)
    append(k, v, large, [page * 64 + i for page in own for i in range(64)], ends)
    taken = {
        name: (x if name.endswith("residual") or (kv_format == "fp8_e4m3" and "scale" in name) else bits_of(x)[own].view(x.dtype))
        for name, x in tensors_of(large).items()
    }
    assert differing(large._replace(**taken), small, [64] * 3) is None
    rest = bits_of(large.k)[1:-2]
    assert not any(bool(part.any()) for part in rest.split(4096))


# ---- graphs, streams -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", (True, False), ids=("decode", "chunk"))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_graph(kv_format, decode):
    """One captured call behind other kernels, replayed with other rows, slots and sequences."""
    batch, tokens = 4, 4 if decode else 90
    play = Play(kv_format, (128, 128), torch.float16, batch)
    k, v = (x.to(DEVICE) for x in play.rows(tokens))
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=DEVICE)
    ends = None if decode else torch.zeros(batch + 1, dtype=torch.int32, device=DEVICE)
    options = play.have.scales() | dict(cu_seqlens=ends)

    def call():
        minfer.kv_cache_append(k * 2, v * 2, play.have.k, play.have.v, slots + 0, **options)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    counts = [(1, 1, 1, 1)] * 70 if decode else [(90, 0, 0, 0), (31, 33, 1, 25), (2, 64, 0, 24), (0, 0, 90, 0), (1, 1, 1, 1)]
    for own in counts:
        where = [[play.slot(b, play.lengths[b] + i) for i in range(n)] for b, n in enumerate(own)]
        stored = [s for part in where for s in part]
        stored += [-1] * (tokens - len(stored))
        cu_seqlens = None if decode else [sum(own[:b]) for b in range(batch + 1)]
        new = play.rows(tokens)
        new = [(x.float() / 2).half() for x in new]
        append(new[0] * 2, new[1] * 2, play.want, stored, cu_seqlens)
        k.copy_(new[0]), v.copy_(new[1]), slots.copy_(torch.tensor(stored))
        if ends is not None:
            ends.copy_(torch.tensor(cu_seqlens))
        graph.replay()
        play.lengths = [n + m for n, m in zip(play.lengths, own, strict=True)]
        if not decode or play.lengths[0] % 16 == 0:
            play.check()
    play.check()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_other_stream(kv_format):
    """Work is ordered on the current stream: a long kernel before it delays the inputs."""
    play = Play(kv_format, (64, 64), torch.float16, 2)
    slots, ends = [play.slot(b, t) for b, n in enumerate((70, 30)) for t in range(n)], [0, 70, 100]
    k, v = play.rows(100)
    append(k, v, play.want, slots, ends)
    ready = [x.to(DEVICE) for x in (k, v, torch.tensor(slots), torch.tensor(ends, dtype=torch.int32))]
    late = [torch.zeros_like(x) for x in ready]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, ready, strict=True):
            x.copy_(y, non_blocking=True)
        minfer.kv_cache_append(late[0], late[1], play.have.k, play.have.v, late[2], cu_seqlens=late[3], **play.have.scales())
    stream.synchronize()
    play.lengths = [70, 30]
    play.check()


def test_allocates_nothing():
    """Not even for strided arguments."""
    for kv_format in KV_FORMATS:
        k, v, slots, cache, ends = append_args(kv_format, DEVICE, lengths=(70, 3))
        k, v = (x.mT.contiguous().mT for x in (k, v))
        arguments = (k, v, cache.k, cache.v, torch.stack([slots, slots], 1)[:, 0])
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        minfer.kv_cache_append(*arguments, cu_seqlens=ends, **cache.scales())
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# ---- checks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bad_append_calls())
def test_calls_that_cannot_be_right(name):
    message, args, options = bad_append_calls(DEVICE)[name]
    with pytest.raises(RuntimeError) as error:
        minfer.kv_cache_append(*args, **options)
    assert re.search(f"minfer::kv_cache_append: {message}", str(error.value)), error.value


def test_devices():
    k, v, slots, cache, ends = append_args("int4", DEVICE)
    group = group_tokens_of(cache)
    for name, change in (("v", 1), ("k_cache", 2), ("v_cache", 3), ("slot_mapping", 4)):
        args = [k, v, cache.k, cache.v, slots]
        args[change] = args[change].cpu()
        with pytest.raises(RuntimeError, match=rf"minfer::kv_cache_append: {name} must be on k's device cuda:\d, got cpu"):
            minfer.kv_cache_append(*args, cu_seqlens=ends, **cache.scales())
    for name in ("k_scale", "v_scale", "k_residual", "v_residual", "cu_seqlens"):
        options = cache.scales() | dict(cu_seqlens=ends)
        options[name] = options[name].cpu()
        with pytest.raises(RuntimeError, match=rf"minfer::kv_cache_append: {name} must be on k's device cuda:\d, got cpu"):
            minfer.kv_cache_append(k, v, cache.k, cache.v, slots, **options)
    assert group == 64 and not cache.k.any()
