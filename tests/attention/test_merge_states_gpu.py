"""torch.ops.minfer.merge_attention_states on a GPU: against float64, whatever the layout, the strides and the number of parts.

Parts without a key hold NaN, and outputs are allocated where NaN was: what leaks, or is not written, shows.
"""

import math
import random

import minfer
import pytest
import torch

from tests.attention.cases import make_case
from tests.contracts.test_registration import check_op
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MERGED = (*DTYPES, torch.float32)
# A multiple of 16 bytes in every type, in 16 bits only and in none; one element; more chunks than a CTA has threads.
HEAD_DIMS = (8, 64, 80, 128, 192, 256, 2048, 4, 20, 1, 3, 129)
SHAPES = ((2, 5, 3), (1, 1, 1), (64, 1, 32), (1, 333, 4), (7, 129, 2), (9, 3), (1, 8), (1000, 5))  # without head_dim
PARTS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 40)


def merged(outs, lses):
    """The operator, with NaN in the memory that its outputs are most likely to get."""
    poison = [torch.full((x.numel() * x.element_size(),), 0xFF, device=x.device, dtype=torch.uint8) for x in (outs[0], lses[0])]
    del poison
    return minfer.merge_attention_states(outs, lses)


def make_states(shape, dtype, parts, *, spread=3.0, empty=0.25, generator=None):
    """``spread`` of lses; ``empty``: how many parts, and how many rows of the others, have no key and an out of NaN."""
    draw = generator or random.Random(0)
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    outs = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(parts)]
    lses = [torch.randn(lse_shape, device=DEVICE) * spread for _ in range(parts)]
    for out, lse in zip(outs, lses, strict=True):
        lse[torch.rand(lse_shape, device=DEVICE) < empty] = -math.inf
        if draw.random() < empty:
            lse.fill_(-math.inf)
        out[(lse == -math.inf).mT] = math.nan
    return outs, lses


def truth_of(outs, lses):
    """In float64: out, lse."""
    lse = torch.logsumexp(torch.stack(lses).double(), 0)
    base = lse.masked_fill(lse == -math.inf, 0.0)
    out = torch.zeros(outs[0].shape, dtype=torch.float64, device=DEVICE)
    for part, own in zip(outs, lses, strict=True):
        weight = (own.double() - base).exp().mT[..., None]
        out += torch.where(weight == 0, 0.0, part.double() * weight)
    return out, lse


def check_states(outs, lses, what=""):
    """Values, shapes and types, and two runs that are equal bit for bit; returns them."""
    out, lse = merged(outs, lses)
    want, want_lse = truth_of(outs, lses)
    assert out.dtype == outs[0].dtype and out.shape == outs[0].shape and out.is_contiguous(), what
    assert lse.dtype == torch.float32 and lse.shape == lses[0].shape and lse.is_contiguous(), what
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6, msg=lambda text: f"{what} lse: {text}")
    # One rounding, and float32 sums of weights that an lse of magnitude x has to x * 2^-24.
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=max(eps / 16, 1e-5), msg=lambda text: f"{what} out: {text}")
    nothing = want_lse == -math.inf
    assert bool((lse == -math.inf)[nothing].all()) and not out[nothing.mT].any(), what
    again = merged(outs, lses)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse), f"{what}: two runs differ"
    return out, lse


@pytest.mark.parametrize("dtype", MERGED, ids=name_of)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_against_float64(head_dim, dtype):
    for shape in SHAPES:
        check_states(*make_states((*shape, head_dim), dtype, 3), f"{shape}")


@pytest.mark.parametrize("dtype", MERGED, ids=name_of)
@pytest.mark.parametrize("parts", PARTS)
def test_any_number_of_parts(parts, dtype):
    """Up to 16 are one launch; a sum that goes on in a second and a third is not rounded between them."""
    for shape in ((2, 37, 4, 128), (50, 3, 64), (11, 3, 5)):
        check_states(*make_states(shape, dtype, parts), f"{shape}")
        check_states(*make_states(shape, dtype, parts, empty=0.0, spread=30.0), f"{shape}, lses far apart")


@pytest.mark.parametrize("seed", range(6))
def test_random_views(seed):
    """Parts with strides of their own: heads before tokens, slices, bases between 16-byte boundaries, broadcasts, strided last modes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        dtype, parts = draw.choice(MERGED), draw.choice((1, 2, 3, 5, 17, 19))
        shape = (*draw.choice(SHAPES), draw.choice(HEAD_DIMS[:6] + HEAD_DIMS[7:]))
        outs, lses = make_states(shape, dtype, parts, generator=draw)
        views = []
        for out in outs:
            size, unit = out.shape[-1], 16 // out.element_size()
            kind = draw.choice(("as it is", "heads first", "aligned slice", "slice", "strided", "flat"))
            if kind == "heads first":
                out = out.movedim(-2, 0).contiguous().movedim(0, -2)
            elif kind in ("aligned slice", "slice"):
                before = unit if kind == "aligned slice" else 1
                wide = torch.full((*shape[:-1], size + 2 * unit), math.nan, device=DEVICE, dtype=dtype)
                wide[..., before : before + size] = out
                out = wide[..., before : before + size]
            elif kind == "strided":
                out = out.movedim(-1, 0).contiguous().movedim(0, -1)
            elif kind == "flat":  # contiguous, but not from a 16-byte boundary on
                out = torch.cat([out.new_full((1,), math.nan), out.reshape(-1)])[1:].view(shape)
            views.append(out)
        lses = [lse.mT.contiguous().mT if draw.random() < 0.5 else lse for lse in lses]
        check_states(views, lses, f"{shape} {parts} {dtype}")


def test_broadcast_parts():
    out, lse = torch.randn(1, 1, 4, 64, device=DEVICE).half(), torch.randn(1, 4, 1, device=DEVICE)
    other, other_lse = torch.randn(3, 7, 4, 64, device=DEVICE).half(), torch.randn(3, 4, 7, device=DEVICE)
    check_states([out.expand(3, 7, 4, 64), other], [lse.expand(3, 4, 7), other_lse])


@pytest.mark.parametrize("dtype", MERGED, ids=name_of)
def test_empty_tensors(dtype):
    for shape in ((0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8), (0, 3, 8), (4, 0, 8)):
        for parts in (1, 20):
            check_states(*make_states(shape, dtype, parts), f"{shape}")
    outs, lses = make_states((2, 5, 3, 0), dtype, 20)
    assert merged(outs, lses)[0].shape == (2, 5, 3, 0)
    torch.testing.assert_close(merged(outs, lses)[1].double(), truth_of(outs, lses)[1], rtol=2e-6, atol=2e-6)


def test_one_part_is_itself_and_nan_shows():
    outs, lses = make_states((3, 19, 4, 128), torch.bfloat16, 1, empty=0.0)
    out, lse = merged(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])
    for parts, where in ((2, 1), (20, 3), (20, 19)):
        outs, lses = make_states((3, 19, 4, 128), torch.bfloat16, parts, empty=0.0)
        outs[where][1, 2, 3, 4] = math.nan
        lses[where][0, 1, 2] = math.nan
        out, lse = merged(outs, lses)
        assert bool(out[1, 2, 3, 4].isnan()) and bool(out[0, 2, 1].isnan().all()) and bool(lse[0, 1, 2].isnan())
        assert int(out.isnan().sum()) == 1 + 128 and int(lse.isnan().sum()) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("splits", (2, 5, 24))
def test_attention_over_split_keys(splits, dtype):
    """Parts of random lengths, some empty: the attention over all keys, to the rounding of the parts."""
    draw = random.Random(splits)
    for seqlens, heads, head_dim in (((1, 500), (8, 2), 128), ((67, 333), (4, 4), 64), ((5, 40), (6, 2), 256)):
        q, k, v = make_case(2, seqlens, heads, (head_dim, head_dim), dtype, DEVICE)
        cuts = [0, *sorted(draw.randrange(seqlens[1] + 1) for _ in range(splits - 1)), seqlens[1]]
        states = [minfer.attention(q, k[:, a:b], v[:, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        out, lse = check_states(*(list(x) for x in zip(*states, strict=True)), f"{splits} parts of {seqlens}")
        want, want_lse = minfer.attention(q, k, v)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        assert (out.double() - want.double()).abs().max() <= 2 * torch.finfo(dtype).eps * v.abs().max()


def test_offsets_past_2_31():
    """A part whose last row begins 2^31 elements behind its first."""
    rows, heads, head_dim = 5, 2, 64
    try:
        far = torch.empty(rows, 1 << 29, device=DEVICE, dtype=torch.float16)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("needs 5.4 GB of GPU memory")
    outs, lses = make_states((rows, heads, head_dim), torch.float16, 2)
    view = far[:, : heads * head_dim].view(rows, heads, head_dim)
    view.copy_(outs[1])
    check_states([outs[0], view], lses)


def test_graph_replay():
    """On a stream of its own, in a graph; replays follow the parts' values."""
    for parts in (3, 20):
        outs, lses = make_states((3, 65, 8, 128), torch.bfloat16, parts)
        merged(outs, lses)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = minfer.merge_attention_states(outs, lses)
        for seed in range(3):
            torch.manual_seed(seed)
            fresh = make_states((3, 65, 8, 128), torch.bfloat16, parts)
            for old, new in zip((*outs, *lses), (*fresh[0], *fresh[1]), strict=True):
                old.copy_(new)
            out.fill_(math.nan)
            lse.fill_(math.nan)
            graph.replay()
            want = merged(*fresh)
            assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize("parts", (2, 20))
def test_opcheck_and_compile(parts):
    outs, lses = make_states((2, 9, 4, 64), torch.float16, parts, empty=0.0)
    check_op(torch.ops.minfer.merge_attention_states.default, (outs, lses), {})
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: minfer.merge_attention_states(a, b), fullgraph=True, backend="aot_eager")
    for have, want in zip(compiled(outs, lses), merged(outs, lses), strict=True):
        assert torch.equal(have, want)


def test_merges_that_cannot_be_right():
    """As on CPU, see test_attention_cpu."""
    out, lse = torch.zeros(2, 5, 4, 8, device=DEVICE).half(), torch.zeros(2, 4, 5, device=DEVICE)
    for outs, lses, message in (
        ([out, out], [lse], "lses must have as many parts as outs, 2, got 1"),
        ([out[0, 0]], [lse], r"outs\[0\] must be \[batch, seqlen, heads, head_dim_v\] or \[tokens, heads, head_dim_v\], got \[4, 8\]"),
        ([out.double()], [lse], r"outs\[0\] must be float16, bfloat16 or float32, got"),
        ([out, out[:1]], [lse, lse], r"outs\[1\] must be \[2, 5, 4, 8\], got \[1, 5, 4, 8\]"),
        ([out, out.float()], [lse, lse], r"outs\[1\] must be Half, got Float"),
        ([out, out], [lse, lse.mT], r"lses\[1\] must be \[2, 4, 5\], got \[2, 5, 4\]"),
        ([out], [lse.half()], r"lses\[0\] must be Float, got Half"),
        ([out], [lse.cpu()], r"lses\[0\] must be on .* device cuda:0"),
    ):
        with pytest.raises(RuntimeError, match="minfer::merge_attention_states: " + message):
            minfer.merge_attention_states(outs, lses)
