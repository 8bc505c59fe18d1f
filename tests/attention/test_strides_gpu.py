"""Operands of attention on a GPU wherever and however they lie in memory: the bits of a call on contiguous clones.

Kernels read q, k and v by TMA, 16 bytes at a time or by a lane's part of a row: what they cannot read is copied, and only that. A
contiguous tensor may begin between two 16-byte boundaries, too. All around an operand's elements is NaN, or a page that no cache has.
"""

import dataclasses
import itertools
import math

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.attention.cases import kernels_here, make_case, make_varlen
from tests.attention.kv_cache_cases import KV_FORMATS, NOWHERE
from tests.attention.options import OPTIONS, PAGED_OPTIONS, call_options
from tests.attention.paged_cases import formats_of, make
from tests.attention.test_gpu import call, same_bits, views_of
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
KERNELS = {kernel["name"]: kernel for kernel in kernels_here()}
OFFSETS = (1, 2, 4, 8)  # elements; of 16 bits, the last one's are 16 bytes


def around(x, *shape):
    return torch.full(shape, math.nan if x.is_floating_point() else NOWHERE, device=x.device, dtype=x.dtype)


def at_offset(x, offset):
    """Contiguous, ``offset`` elements behind the beginning of an allocation."""
    part = around(x, offset + x.numel() + 9)[offset : offset + x.numel()].view(x.shape)
    assert part.is_contiguous() and part.data_ptr() % 256 == offset * x.element_size()
    return part.copy_(x)


def every_second(x):
    """No two elements beside each other."""
    return around(x, *x.shape, 2)[..., 1].copy_(x)


def layouts_of(x):
    """name -> a view of q, k or v."""
    return {f"offset {offset}": at_offset(x, offset) for offset in OFFSETS} | views_of(x)


def layouts_of_small(x):
    """name -> a view of a table or a list."""
    return {f"offset {offset}": at_offset(x, offset) for offset in (1, 3)} | {"every second": every_second(x)}


def cloned(args):
    return [x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x for x in args]


# ---- attention, attention_varlen -------------------------------------------------------------------------------------------------


def check_views(args, options):
    """q, k and v in turn, and all of them."""
    q, k, v, *rest = args
    want = call(args, options)
    assert not any(bool(x.isnan().any()) for x in want)
    views = [layouts_of(x) for x in (q, k, v)]
    for name in views[0]:
        of_q, of_k, of_v = (x[name] for x in views)
        for which, tensors in (("q", (of_q, k, v)), ("k", (q, of_k, v)), ("v", (q, k, of_v)), ("all", (of_q, of_k, of_v))):
            assert same_bits(call((*tensors, *rest), options), want), (name, which)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("head_dims", ((64, 64), (128, 128), (192, 128), (256, 256), (72, 40)), ids=str)
def test_attention(head_dims, dtype):
    for seqlens, heads, name in (((140, 150), (4, 2), "gpt-oss"), ((1, 70), (8, 1), "plain"), ((33, 9), (2, 2), "softcap")):
        check_views(make_case(2, seqlens, heads, head_dims, dtype, DEVICE), call_options(OPTIONS[name], heads[0], dtype, DEVICE))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("head_dims", ((64, 64), (128, 128), (192, 128), (256, 256), (72, 40)), ids=str)
def test_attention_varlen(head_dims, dtype):
    for lengths, heads, name in (([(40, 65), (3, 130), (130, 7)], (4, 2), "gpt-oss"), ([(1, 70), (0, 5), (1, 1)], (8, 1), "plain")):
        check_views(make_varlen(lengths, heads, head_dims, dtype, DEVICE), call_options(OPTIONS[name], heads[0], dtype, DEVICE))


def test_broadcasts():
    """Strides of 0: of heads, rows, sequences and head_dim."""
    q, k, v = make_case(3, (70, 90), (4, 2), (64, 64), torch.float16, DEVICE)
    all_heads, all_rows, one = (-1, -1, 2, -1), (-1, 70, -1, -1), (3, -1, -1, -1)
    cases = {
        "heads of k and v": (q, k[:, :, :1].expand(all_heads), v[:, :, 1:].expand(all_heads)),
        "heads of q": (q[:, :, 3:].expand(-1, -1, 4, -1), k, v),
        "rows of q": (q[:, 5:6].expand(all_rows), k, v),
        "rows of k": (q, k[:, 5:6].expand(-1, 90, -1, -1), v),
        "sequences": (q[1:2].expand(one), k[2:].expand(one), v[:1].expand(one)),
        "head_dim of v": (q, k, v[..., 7:8].expand(-1, -1, -1, 64)),
    }
    for name, args in cases.items():
        assert any(0 in x.stride() for x in args), name
        assert same_bits(call(args, dict(causal=True)), call(cloned(args), dict(causal=True))), name
        *args, q_ends, k_ends = *(x[0] for x in args), *(torch.tensor([0, 30, x], device=DEVICE, dtype=torch.int32) for x in (70, 90))
        rest = [q_ends, k_ends, 40, 60]
        assert same_bits(call([*args, *rest], dict(causal=True)), call([*cloned(args), *rest], dict(causal=True))), (name, "varlen")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_small_operands(dtype):
    """sinks and cu_seqlens that are slices; sinks of one value."""
    q, k, v, q_ends, k_ends, *most = make_varlen([(40, 65), (3, 130), (0, 9)], (8, 2), (64, 64), dtype, DEVICE)
    sinks = torch.randn(8, device=DEVICE).to(dtype)
    want = call((q, k, v, q_ends, k_ends, *most), dict(sinks=sinks))
    assert not any(bool(x.isnan().any()) for x in want)
    views = [layouts_of_small(x) for x in (q_ends, k_ends, sinks)]
    for name in views[0]:
        of_q, of_k, of_sinks = (x[name] for x in views)
        assert same_bits(call((q, k, v, of_q, of_k, *most), dict(sinks=of_sinks)), want), name
    batched = [x[:40].unflatten(0, (2, 20)) for x in (q, k, v)]
    for view in (*views[2].values(), sinks[2:3].expand(8)):
        assert same_bits(call(batched, dict(sinks=view)), call(batched, dict(sinks=cloned([view])[0])))


# ---- attention_paged -------------------------------------------------------------------------------------------------------------


QUERIES = (1, 3, 70, [5, 0, 90, 1])  # of each sequence; a list: of each its own, end to end


def paged_call(kv_format, queries, head_dims=(128, 128), dtype=torch.float16, **sizes):
    return make([300, 77, 100, 129], kv_format, (8, 2), head_dims, dtype, queries=queries, **sizes)


def check_same(call, want, label, options=None, **changed):
    assert same_bits(dataclasses.replace(call, **changed).run(**(options or {})), want), label


@pytest.mark.parametrize("queries", QUERIES, ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_queries_over_a_cache(kv_format, queries):
    for dim, dtype in ((64, torch.bfloat16), (96, torch.float16), (128, torch.float16), (256, torch.bfloat16)):
        call = paged_call(kv_format, queries, (dim, dim), dtype)
        options = call_options(PAGED_OPTIONS["sinks"], 8, dtype, DEVICE)
        want = call.run(**options)
        assert not any(bool(x.isnan().any()) for x in want)
        for name, q in layouts_of(call.q).items():
            check_same(call, want, (dim, name), options, q=q)
        for name, sinks in layouts_of_small(options["sinks"]).items():
            check_same(call, want, (dim, "sinks", name), dict(sinks=sinks))


@pytest.mark.parametrize("queries", (1, 3, 70), ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_broadcast_queries_over_a_cache(kv_format, queries):
    """Strides of 0: of heads, rows and sequences."""
    call = paged_call(kv_format, queries)
    for name, q in {
        "heads": call.q[:, :, 3:4].expand(-1, -1, 8, -1),
        "rows": call.q[:, :1].expand(-1, queries, -1, -1),
        "sequences": call.q[1:2].expand(4, -1, -1, -1),
        "all": call.q[1:2, :1, :1].expand(4, queries, 8, -1),
    }.items():
        want = dataclasses.replace(call, q=cloned([q])[0]).run()
        check_same(call, want, name, q=q)


@pytest.mark.parametrize("queries", QUERIES, ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_lengths_and_tables(kv_format, queries):
    """seq_lens, cu_seqlens_q and block_table that are slices; a table whose rows are one."""
    call = paged_call(kv_format, queries)
    want, (batch, columns) = call.run(), call.table.shape
    assert not any(bool(x.isnan().any()) for x in want)
    for name, seq_lens in layouts_of_small(call.seq_lens).items():
        check_same(call, want, name, seq_lens=seq_lens)
    if call.ends is not None:
        for name, ends in layouts_of_small(torch.tensor(call.ends, device=DEVICE, dtype=torch.int32)).items():
            check_same(call, want, name, dict(cu_seqlens_q=ends))
    tables = layouts_of_small(call.table) | {
        "columns of a wide one": around(call.table, batch, 2 * columns + 3)[:, 5 : 5 + columns].copy_(call.table),
        "last columns of a wide one": around(call.table, batch, columns + 5000)[:, 5000:].copy_(call.table),
        "rows of a tall one": around(call.table, 3 * batch, columns)[1::3].copy_(call.table),
        "transposed": call.table.t().contiguous().t(),
    }
    for name, table in tables.items():
        check_same(call, want, name, table=table)
    shared = call.table[:1].expand(batch, -1)  # the longest sequence's, whose pages all have keys
    want = dataclasses.replace(call, table=shared.contiguous()).run()
    check_same(call, want, "one row for all", table=shared)
    assert not bool(want[0].isnan().any())


def orders_of(x):
    """name -> a view of a cache that has pages, tokens and heads in each order in memory, or rows with a gap between them."""
    views = {}
    for order in itertools.permutations(range(3)):
        inner = x.permute(*order, 3).contiguous()
        views[str(order)] = inner.permute(*(order.index(i) for i in range(3)), 3)
    pages, tokens, heads, d = x.shape
    gap = 16 // x.element_size()
    filler = torch.full((pages, heads, tokens, d + gap), 85, device=x.device, dtype=torch.uint8) if x.element_size() == 1 else None
    room = around(x, pages, heads, tokens, d + gap) if filler is None else filler.view(x.dtype)
    views["gaps between rows"] = room[..., :d].transpose(1, 2).copy_(x)
    room = room.new_zeros(pages, heads, tokens + 8, d)
    views["gaps between heads"] = room[:, :, 8:].transpose(1, 2).copy_(x)
    return views


@pytest.mark.parametrize("page_size", (32, 64, None), ids=("pages of 32", "pages of 64", "contiguous"))
@pytest.mark.parametrize("head_dims", ((64, 64), (128, 128), (256, 256), (96, 64)), ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_orders_of_a_cache(kv_format, head_dims, page_size):
    """Codes of less than 128 bytes a row are loaded several rows at a time, where they follow each other in both caches."""
    for queries, dtype in ((1, torch.bfloat16), (3, torch.float16), (70, torch.bfloat16)):
        call = paged_call(kv_format, queries, head_dims, dtype, page_size=page_size, groups=(32, None))
        want = call.run()
        assert not any(bool(x.isnan().any()) for x in want)
        keys, values = orders_of(call.cache.k), orders_of(call.cache.v)
        for name in keys:
            check_same(call, want, (queries, name, "k"), cache=call.cache._replace(k=keys[name]))
            check_same(call, want, (queries, name, "both"), cache=call.cache._replace(k=keys[name], v=values[name]))


@pytest.mark.parametrize("page_size", (64, None), ids=("paged", "contiguous"))
@pytest.mark.parametrize("queries", QUERIES, ids=str)
@pytest.mark.parametrize("kv_format", [x for x in KV_FORMATS if x != "16bit"])
def test_scales(kv_format, queries, page_size):
    """Scales and residuals between 16-byte boundaries, and strided ones; the caches themselves must be aligned."""
    call = paged_call(kv_format, queries, page_size=page_size)
    want = call.run()
    assert not any(bool(x.isnan().any()) for x in want)
    names = [name for name in ("k_scale", "v_scale", "k_residual", "v_residual") if getattr(call.cache, name) is not None]
    views = {name: layouts_of_small(getattr(call.cache, name)) for name in names}
    for kind in views["k_scale"]:
        for name in names:
            check_same(call, want, (kind, name), cache=call.cache._replace(**{name: views[name][kind]}))
        check_same(call, want, (kind, "all"), cache=call.cache._replace(**{name: views[name][kind] for name in names}))


# ---- copies ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_copies(name):
    """What the kernel reads where it lies is not copied, anything else is, once: q, and k and v but those of caches."""
    kernel = KERNELS[name]
    dtype, head_dims = DTYPE_OF[kernel["ab_type"]], (kernel["tile_k"], kernel["head_dim_v"])
    decodes = kernel["schedule"] == "split_kv"
    unit = head_dims[0] // 16 if decodes else 16  # bytes
    if decodes or kernel["b_format"] != "dense":
        cached = make([300, 40], formats_of(kernel)[0], (8, 2), head_dims, dtype, queries=3)
        arguments = cached.arguments()
        operands = [cached.q]
        run = lambda q: minfer.attention_paged(q, cached.cache.k, cached.cache.v, cached.seq_lens, kernel=name, **arguments)  # noqa: E731
    else:
        operands = list(make_case(2, (33, 70), (4, 2), head_dims, dtype, DEVICE))
        run = lambda *qkv: minfer.attention(*qkv, kernel=name)  # noqa: E731

    def counted(args):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        found = run(*args)
        return found, torch.cuda.memory_stats()["allocation.all.allocated"] - before

    run(*operands)
    want, allocations = counted(operands)
    for i, x in enumerate(operands):
        for offset in OFFSETS:
            have, more = counted([*operands[:i], at_offset(x, offset), *operands[i + 1 :]])
            assert same_bits(have, want), (i, offset)
            assert more - allocations == int(offset * x.element_size() % unit != 0), (i, offset)
