"""minfer.attention, attention_varlen and merge_attention_states without a GPU: the CPU kernels against the definition, checks, fakes."""

import math
from itertools import pairwise

import minfer
import pytest
import torch
from minfer.reference import attention as reference_attention

from tests.attention.cases import GROUPS, Truth, bad_calls, bad_varlen_calls, cu_seqlens_of, make_case, make_varlen, random_call
from tests.attention.options import OPTIONS, SOFTMAX_SCHEMA, call_options, definition
from tests.contracts.test_registration import check_op, need
from tests.gemm.cases import DTYPES, name_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DIMS = (8, 16, 24, 64)


def assert_defined(out, lse, q, k, v, options):
    """One sequence against the definition: out within one rounding, lse within float32."""
    want, want_lse = definition(q, k, v, **options)
    unit = torch.finfo(q.dtype).eps / 2
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    limit = unit * want.abs() + 2e-5 * v.double().abs().max().item() if v.numel() else unit * want.abs()
    assert bool(((out.double() - want).abs() <= limit).all()), (out.double() - want).abs().max()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-5)


def check_batched(q, k, v, options):
    out, lse = minfer.attention(q, k, v, **options)
    assert out.shape == (*q.shape[:3], v.shape[-1]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert out.is_contiguous() and lse.is_contiguous()
    for b in range(q.shape[0]):
        assert_defined(out[b], lse[b], q[b], k[b], v[b], options)
    return out, lse


def check_varlen(args, options):
    q, k, v, q_ends, k_ends = args[:5]
    out, lse = minfer.attention_varlen(*args, **options)
    assert out.shape == (*q.shape[:2], v.shape[-1]) and lse.shape == (q.shape[1], q.shape[0])
    assert out.is_contiguous() and lse.is_contiguous()
    outside = torch.ones(q.shape[0], dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        assert_defined(out[q0:q1], lse[:, q0:q1], q[q0:q1], k[k0:k1], v[k0:k1], options)
        outside[q0:q1] = False
    assert not out[outside].any() and bool((lse[:, outside] == -math.inf).all())
    return out, lse


# ---- values ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", OPTIONS)
def test_against_the_definition(name, dtype):
    """Every option, with fewer queries than keys, more, and as many."""
    for seqlens in ((7, 12), (13, 6), (9, 9)):
        q, k, v = make_case(2, seqlens, (4, 2), (16, 8), dtype)
        check_batched(q, k, v, call_options(OPTIONS[name], 4, dtype, "cpu"))
    check_varlen(make_varlen([(7, 12), (0, 3), (13, 6), (2, 0)], (4, 2), (16, 8), dtype), call_options(OPTIONS[name], 4, dtype, "cpu"))


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed):
    case, options = random_call(seed, longest=24, dims=DIMS)
    dtype = DTYPES[seed % 2]
    options = call_options(options, case["heads"][0], dtype, "cpu")
    check_varlen(make_varlen(**case, dtype=dtype, before=seed % 3, after=seed % 4, sharpness=1 + seed % 5), options)
    q, k, v = make_case(2, case["lengths"][0], case["heads"], case["head_dims"], dtype)
    check_batched(q, k, v, options)


@pytest.mark.parametrize("heads", GROUPS, ids=str)
def test_heads(heads):
    """Query head h reads KV head h // group: as if every query head had keys of its own."""
    q, k, v = make_case(2, (5, 8), heads, (24, 16), torch.float16)
    out, lse = check_batched(q, k, v, {})
    own = [x.repeat_interleave(heads[0] // heads[1], 2) for x in (k, v)]
    for have, want in zip(minfer.attention(q, *own), (out, lse), strict=True):
        torch.testing.assert_close(have, want, rtol=torch.finfo(torch.float16).eps, atol=1e-5)


def test_alignment_is_bottom_right():
    """Values that name their keys: the mean of what a query sees says which keys those are."""
    k = torch.zeros(1, 6, 1, 8).half()
    v = torch.zeros(1, 6, 1, 8).half()
    v[0, :, 0, 0] = torch.arange(6)

    def seen(seqlen_q, **options):
        out, lse = minfer.attention(torch.zeros(1, seqlen_q, 1, 8).half(), k, v, **options)
        count = lse[0, 0].exp().round().int().tolist()
        return list(zip(count, (out[0, :, 0, 0].float()).tolist(), strict=True))

    assert seen(1, causal=True) == [(6, 2.5)]
    assert seen(3, causal=True) == [(4, 1.5), (5, 2.0), (6, 2.5)]
    assert seen(7, causal=True)[:2] == [(0, 0.0), (1, 0.0)] and seen(7, causal=True)[-1] == (6, 2.5)
    assert seen(2, window_left=1) == [(3, 4.0), (2, 4.5)]
    assert seen(2, window_right=0) == seen(2, causal=True) == seen(2, causal=True, window_right=5) == [(5, 2.0), (6, 2.5)]
    assert seen(3, window_left=0, window_right=0) == [(1, 3.0), (1, 4.0), (1, 5.0)]
    assert seen(1, window_left=2, causal=True) == [(3, 4.0)]


def test_queries_that_see_nothing():
    q, k, v = make_case(1, (9, 4), (4, 2), (16, 16), torch.bfloat16)
    out, lse = minfer.attention(q, k, v, causal=True)
    assert not out[:, :5].any() and bool((lse[:, :, :5] == -math.inf).all())
    assert bool(out[:, 5:].any(-1).all()) and bool(lse[:, :, 5:].isfinite().all())
    sinks = torch.tensor([0.5, -3.0, 40.0, -math.inf]).bfloat16()
    out, lse = minfer.attention(q, k, v, causal=True, sinks=sinks)
    assert not out[:, :5].any() and torch.equal(lse[0, :, :5], sinks.float()[:, None].expand(4, 5))
    # A sink of -inf is none.
    for have, want in zip(minfer.attention(q, k, v, sinks=torch.full_like(sinks, -math.inf)), minfer.attention(q, k, v), strict=True):
        assert torch.equal(have, want)


def test_empty():
    for batch, seqlens, heads in ((0, (3, 4), (4, 2)), (2, (0, 4), (4, 2)), (2, (3, 0), (4, 2)), (2, (3, 4), (0, 2)), (2, (3, 4), (0, 0))):
        q, k, v = make_case(batch, seqlens, heads, (16, 8), torch.float16)
        out, lse = minfer.attention(q, k, v, causal=True)
        assert out.shape == (batch, seqlens[0], heads[0], 8) and lse.shape == (batch, heads[0], seqlens[0])
        assert not out.any() and bool((lse == -math.inf).all() if seqlens[1] == 0 else True)
    sinks = torch.randn(4).half()
    _, lse = minfer.attention(*make_case(2, (3, 0), (4, 2), (16, 8), torch.float16), sinks=sinks)
    assert torch.equal(lse, sinks.float()[None, :, None].expand(2, 4, 3))
    for lengths in ([], [(0, 0)], [(0, 5), (0, 0)], [(4, 0)]):
        check_varlen(make_varlen(lengths, (4, 2), (16, 8), torch.float16, before=2, after=1), {})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_varlen_is_attention_of_each_sequence(dtype):
    lengths = [(5, 9), (0, 4), (1, 1), (8, 3), (3, 0), (4, 17)]
    for name in ("causal", "gpt-oss", "all"):
        args = make_varlen(lengths, (6, 2), (24, 16), dtype, before=3, after=2)
        options = call_options(OPTIONS[name], 6, dtype, "cpu")
        out, lse = check_varlen(args, options)
        q, k, v, q_ends, k_ends = args[:5]
        for b in range(len(lengths)):
            rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
            one, one_lse = minfer.attention(q[rows][None], k[keys][None], v[keys][None], **options)
            torch.testing.assert_close(out[rows], one[0], rtol=torch.finfo(dtype).eps, atol=1e-4)
            torch.testing.assert_close(lse[:, rows], one_lse[0])


def test_neighbours_do_not_leak():
    """A NaN stays in its sequence."""
    args = make_varlen([(4, 6), (5, 7), (3, 5)], (4, 2), (16, 8), torch.float16)
    want, want_lse = minfer.attention_varlen(*args, causal=True)
    for x in args[:3]:
        x[int((args[3] if x is args[0] else args[4])[1]) : int((args[3] if x is args[0] else args[4])[2])] = math.nan
    out, lse = minfer.attention_varlen(*args, causal=True)
    assert torch.equal(out[:4], want[:4]) and torch.equal(out[9:], want[9:]) and bool(out[4:9].isnan().all())
    assert torch.equal(lse[:, :4], want_lse[:, :4]) and torch.equal(lse[:, 9:], want_lse[:, 9:])


@pytest.mark.parametrize("window", (0, 1, 7))
def test_keys_before_all_windows_may_hold_anything(window):
    q, k, v = make_case(2, (3, 20), (4, 2), (16, 8), torch.float16)
    want = minfer.attention(q, k, v, causal=True, window_left=window)
    first = 20 - 3 - window
    for x in (k, v):
        x[:, :first] = math.nan
    have = minfer.attention(q, k, v, causal=True, window_left=window)
    ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (3, 20)]
    varlen = minfer.attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *ends, 3, 20, causal=True, window_left=window)
    for x, y in zip(have, want, strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(varlen[0].view(2, 3, 4, 8), want[0])


def test_views():
    """What the operator sees of a view is its values."""
    q, k, v = make_case(2, (5, 9), (4, 2), (16, 8), torch.float16)

    def strided(x):
        wide = torch.full((x.shape[2], x.shape[0], x.shape[3] + 3, x.shape[1]), math.nan).half()
        view = wide.permute(1, 3, 0, 2)[..., 2:-1]
        view.copy_(x)
        return view

    out, lse = check_batched(strided(q), strided(k), strided(v), dict(causal=True))
    for b in range(2):
        assert_defined(out[b], lse[b], q[b], k[b], v[b], dict(causal=True))


@pytest.mark.parametrize("name", ("plain", "all"))
def test_memory_is_bounded(name, monkeypatch):
    """Queries are taken in blocks: results are those of one block, and no block has more scores than it may."""
    q, k, v = make_case(1, (61, 40), (8, 2), (16, 8), torch.bfloat16)
    options = call_options(OPTIONS[name], 8, torch.bfloat16, "cpu")
    want = minfer.attention(q, k, v, **options)
    sizes, attend = [], reference_attention._attend

    def recorded(q, k, *rest):
        sizes.append(q.shape[0] * q.shape[1] * k.shape[0])
        return attend(q, k, *rest)

    monkeypatch.setattr(reference_attention, "_attend", recorded)
    monkeypatch.setattr(reference_attention, "_SCORES", 1000)
    have = minfer.attention(q, k, v, **options)
    assert max(sizes) <= 1000 and sum(sizes) == 8 * 61 * 40 and len(sizes) > 2
    torch.testing.assert_close(have, want, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gpu_tests_rule(name):
    """The rule that CUDA kernels are judged by accepts the reference and finds a key too many, a wrong row, a wrong lse and a NaN."""
    for args in (
        make_case(2, (40, 60), (4, 2), (32, 16), torch.bfloat16),
        make_varlen([(40, 60), (7, 9)], (4, 2), (32, 16), torch.bfloat16),
    ):
        options = call_options(OPTIONS[name], 4, torch.bfloat16, "cpu")
        op = minfer.attention if len(args) == 3 else minfer.attention_varlen
        out, lse = op(*args, **options)
        truth = Truth(args, options)
        assert truth.mismatch(out, lse) is None
        for wrong in (
            op(*args, **options | dict(window_left=2)),
            (torch.where(torch.arange(16) == 3, -out, out), lse),
            (out.index_fill(-3, torch.tensor([5]), 0.0), lse),
            (out, lse + 0.05),
            (out, lse.masked_fill(lse == lse.max(), -math.inf)),
            (out.masked_fill(out == out.max(), math.nan), lse),
            (out.float(), lse),
            (out, lse.mT.contiguous().mT),
        ):
            assert truth.mismatch(*wrong) is not None


# ---- merge -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("parts", (1, 2, 3, 5))
def test_merge_of_parts_is_the_whole(parts, dtype):
    """Keys in parts, one of them empty, with the sink in one part."""
    torch.manual_seed(parts)
    q, k, v = make_case(2, (7, 23), (4, 2), (16, 8), dtype)
    sinks = torch.randn(4).to(dtype)
    cuts = [0, *sorted(torch.randint(0, 24, (parts - 1,)).tolist()), 23]
    cuts[1 if parts == 5 else 0] = 0  # a part of no keys
    for sink in (None, sinks):
        states = [minfer.attention(q, k[:, a:b], v[:, a:b], sinks=sink if i == 0 else None) for i, (a, b) in enumerate(pairwise(cuts))]
        out, lse = minfer.merge_attention_states(*zip(*states, strict=True))
        want, want_lse = minfer.attention(q, k, v, sinks=sink)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        # Parts are rounded before they are added.
        assert (out.double() - want.double()).abs().max() <= 2 * torch.finfo(dtype).eps * v.abs().max()
        assert out.dtype == dtype and out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=name_of)
def test_merge_against_the_definition(dtype, device):
    """Both layouts; lses far apart; parts and rows without a key, of which only lse counts."""
    for shape in ((2, 5, 3, 16), (9, 3, 8), (0, 3, 8), (4, 0, 3, 8)):
        lse_shape = (*shape[:-3], shape[-2], shape[-3])
        outs = [torch.randn(shape, device=device).to(dtype) for _ in range(4)]
        lses = [torch.randn(lse_shape, device=device) * 30 for _ in range(4)]
        outs[2].fill_(math.nan)
        lses[2].fill_(-math.inf)
        for lse in lses:
            lse[..., :1] = -math.inf
        out, lse = minfer.merge_attention_states(outs, lses)
        exact = torch.logsumexp(torch.stack(lses).double(), 0)
        want = torch.zeros(shape, dtype=torch.float64, device=device)
        for part in (0, 1, 3):
            weight = (lses[part].double() - exact).exp().nan_to_num(0.0)
            want += outs[part].double() * weight.mT[..., None]
        assert out.dtype == dtype and lse.dtype == torch.float32 and out.shape == shape and lse.shape == lse_shape
        torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), want, rtol=eps, atol=max(eps / 8, 2e-5))
        assert not out[..., :1, :, :].any() and bool((lse[..., :1] == -math.inf).all())


def test_merge_of_one_part():
    out, lse = minfer.attention(*make_case(2, (9, 4), (4, 2), (16, 8), torch.float16), causal=True)
    merged = minfer.merge_attention_states([out], [lse])
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    assert merged[0].data_ptr() != out.data_ptr() and merged[1].data_ptr() != lse.data_ptr()
    strided = minfer.merge_attention_states([out.mT.contiguous().mT] * 2, [lse.mT.contiguous().mT] * 2)
    torch.testing.assert_close(strided[0], out)
    torch.testing.assert_close(strided[1], lse + math.log(2))
    assert strided[0].is_contiguous() and strided[1].is_contiguous()


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_merges_that_cannot_be_right(device):
    out, lse = torch.zeros(2, 5, 4, 8, device=device).half(), torch.zeros(2, 4, 5, device=device)
    for outs, lses, message in (
        ([], [], "outs must have at least one part"),
        ([out, out], [lse], "lses must have as many parts as outs, 2, got 1"),
        ([out[0, 0]], [lse], r"outs\[0\] must be \[batch, seqlen, heads, head_dim_v\] or \[tokens, heads, head_dim_v\], got \[4, 8\]"),
        ([out.double()], [lse], r"outs\[0\] must be float16, bfloat16 or float32, got float64"),
        ([out, out[:1]], [lse, lse], r"outs\[1\] must be \[2, 5, 4, 8\], got \[1, 5, 4, 8\]"),
        ([out, out.float()], [lse, lse], r"outs\[1\] must be float16, got float32"),
        ([out, out], [lse, lse.mT], r"lses\[1\] must be \[2, 4, 5\], got \[2, 5, 4\]"),
        ([out], [lse.half()], r"lses\[0\] must be float32, got float16"),
    ):
        with pytest.raises(RuntimeError, match="minfer::merge_attention_states: " + message):
            minfer.merge_attention_states(outs, lses)


# ---- checks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize("name", bad_calls())
def test_calls_that_cannot_be_right(name, device):
    message, q, k, v, options = bad_calls(device)[name]
    with pytest.raises(RuntimeError, match=f"minfer::attention: .*{message}"):
        minfer.attention(q, k, v, **options)


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize("name", bad_varlen_calls())
def test_varlen_calls_that_cannot_be_right(name, device):
    message, args, options = bad_varlen_calls(device)[name]
    with pytest.raises(RuntimeError, match=f"minfer::attention_varlen: .*{message}"):
        minfer.attention_varlen(*args, **options)


def test_operands_of_another_device():
    q, k, v = make_case(2, (5, 7), (4, 2), (32, 16), torch.float16)
    sinks = torch.zeros(4).half().to("meta")
    args = make_varlen([(5, 7)], (4, 2), (32, 16), torch.float16)
    for name, function in (
        ("attention: k", lambda: minfer.attention(q, k.to("meta"), v)),
        ("attention: v", lambda: minfer.attention(q, k, v.to("meta"))),
        ("attention: sinks", lambda: minfer.attention(q, k, v, sinks=sinks)),
        ("attention_varlen: cu_seqlens_q", lambda: minfer.attention_varlen(*args[:3], args[3].to("meta"), *args[4:])),
        ("attention_varlen: cu_seqlens_k", lambda: minfer.attention_varlen(*args[:4], args[4].to("meta"), *args[5:])),
    ):
        with pytest.raises(RuntimeError, match=f"minfer::{name} must be on q's device cpu, got meta"):
            function()


def test_lengths_that_cannot_be_right():
    """The values of cu_seqlens, which are the host's on CPU."""
    q, k, v, q_ends, k_ends, *_ = make_varlen([(3, 5), (4, 2)], (4, 2), (16, 8), torch.float16)
    ends = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    for args, message in (
        ((q_ends, k_ends, 3, 5), "max_seqlen_q must be at least the 4 rows of sequence 1, got 3"),
        ((q_ends, k_ends, 4, 4), "max_seqlen_k must be at least the 5 rows of sequence 0, got 4"),
        ((ends(0, 3, 8), k_ends, 9, 9), "cu_seqlens_q must lie in 0 to tokens_q = 7, got 0 to 8"),
        ((ends(-1, 3, 7), k_ends, 9, 9), "cu_seqlens_q must lie in 0 to tokens_q = 7, got -1 to 7"),
        ((q_ends, ends(0, 5, 8), 9, 9), "cu_seqlens_k must lie in 0 to tokens_k = 7, got 0 to 8"),
        ((ends(0, 5, 3), k_ends, 9, 9), "cu_seqlens_q must ascend, got 5 before 3"),
        ((q_ends, ends(4, 2, 7), 9, 9), "cu_seqlens_k must ascend, got 4 before 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            minfer.attention_varlen(q, k, v, *args)
    roomy = minfer.attention_varlen(q, k, v, q_ends, k_ends, 100, 2**40)
    for have, want in zip(roomy, minfer.attention_varlen(q, k, v, q_ends, k_ends, 4, 5), strict=True):
        assert torch.equal(have, want)


def test_kernel_is_checked_and_ignored():
    kernel = minfer.kernels("attention")[0]["name"]
    q, k, v = make_case(2, (3, 4), (4, 2), (16, 8), torch.float16)
    for have, want in zip(minfer.attention(q, k, v, kernel=kernel), minfer.attention(q, k, v), strict=True):
        assert torch.equal(have, want)
    args = make_varlen([(3, 4)], (4, 2), (16, 8), torch.float16)
    for have, want in zip(minfer.attention_varlen(*args, kernel=kernel), minfer.attention_varlen(*args), strict=True):
        assert torch.equal(have, want)


# ---- registration ----------------------------------------------------------------------------------------------------------------


def test_schemas():
    options = (
        f"*, bool causal=False, float? scale=None, int window_left=-1, int window_right=-1, {SOFTMAX_SCHEMA}, str? kernel=None) -> (Tensor"
    )
    ops = torch.ops.minfer
    assert str(ops.attention.default._schema).startswith(f"minfer::attention(Tensor q, Tensor k, Tensor v, {options}")
    assert str(ops.attention_varlen.default._schema).startswith(
        "minfer::attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
        f"int max_seqlen_k, {options}"
    )
    assert str(ops.merge_attention_states.default._schema).startswith(
        "minfer::merge_attention_states(Tensor[] outs, Tensor[] lses) -> (Tensor"
    )
    for op in (ops.attention, ops.attention_varlen, ops.merge_attention_states):
        assert torch.Tag.needs_fixed_stride_order in op.default.tags and len(op.default._schema.returns) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ("plain", "gemma", "gpt-oss"))
def test_opcheck(name, device):
    dtype = torch.bfloat16
    options = call_options(OPTIONS[name], 4, dtype, device)
    check_op(torch.ops.minfer.attention.default, make_case(2, (5, 9), (4, 2), (32, 16), dtype, device), options)
    args = make_varlen([(5, 9), (0, 2), (4, 4)], (4, 2), (32, 16), dtype, device, after=2)
    check_op(torch.ops.minfer.attention_varlen.default, args, options)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_merge(device):
    for shape in ((2, 5, 4, 16), (7, 4, 8)):
        outs = [torch.randn(shape, device=device).half() for _ in range(3)]
        lses = [torch.randn(*shape[:-3], shape[-2], shape[-3], device=device) for _ in range(3)]
        check_op(torch.ops.minfer.merge_attention_states.default, (outs, lses), {})


def test_meta_is_like_cpu():
    def same(fakes, reals):
        for fake, real in zip(fakes, reals, strict=True):
            assert (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")

    def on_meta(args):
        return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]

    for dtype in DTYPES:
        for batch, seqlens, heads in ((2, (3, 5), (4, 2)), (0, (3, 5), (4, 4)), (1, (0, 5), (4, 1)), (2, (1, 0), (6, 2))):
            q, k, v = make_case(batch, seqlens, heads, (24, 16), dtype)
            same(minfer.attention(*on_meta((q, k, v)), causal=True), minfer.attention(q, k, v, causal=True))
            q = q.transpose(1, 2).contiguous().transpose(1, 2)  # outputs are contiguous whatever q is
            real = minfer.attention(q, k, v)
            same(minfer.attention(*on_meta((q, k, v))), real)
            same(
                minfer.merge_attention_states([real[0].to("meta")] * 2, [real[1].to("meta")] * 2),
                minfer.merge_attention_states([real[0]] * 2, [real[1]] * 2),
            )
        args = make_varlen([(3, 4), (0, 2)], (4, 2), (24, 16), dtype, after=1)
        same(minfer.attention_varlen(*on_meta(args)), minfer.attention_varlen(*args))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend, dynamic):
    """The family in one graph, with lengths that change, and a kernel by name: its keyword is Inductor's, too."""
    need(backend)
    kernel = minfer.kernels("attention")[0]["name"]
    sinks = torch.randn(4).half()

    def layer(qkv, q_ends, scale):
        q, k, v = qkv.split((4, 2, 2), dim=1)
        out, lse = minfer.attention_varlen(q * 2, k, v, q_ends, q_ends, 16, 16, causal=True, sinks=sinks, kernel=kernel)
        whole, whole_lse = minfer.attention(q[None], k[None], v[None], scale=scale, softcap=5.0)
        named, named_lse = minfer.attention(q[None], k[None], v[None], window_left=3, kernel=kernel)
        merged, merged_lse = minfer.merge_attention_states([whole, named], [whole_lse, named_lse])
        return out + merged[0], lse + merged_lse[0]

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens, scale in ((5, 0.3), (11, 0.3), (7, 0.5)):
        qkv, ends = torch.randn(tokens, 8, 16).half(), cu_seqlens_of((3, tokens - 3))
        with torch.no_grad():
            for have, want in zip(compiled(qkv, ends, scale), layer(qkv, ends, scale), strict=True):
                torch.testing.assert_close(have, want, rtol=2e-3, atol=1e-3)


def test_compile_keeps_strides():
    """The graph calls the operator with eager mode's strides: views of a packed qkv are not copied."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    nodes = []

    def record(graph, inputs):
        nodes.extend(n for n in graph.graph.nodes if n.target is torch.ops.minfer.attention.default)
        return graph

    qkv = torch.randn(2, 9, 8, 16).half()
    compiled = torch.compile(
        lambda x: minfer.attention(*x.split((4, 2, 2), dim=2)), fullgraph=True, backend=aot_autograd(fw_compiler=record)
    )
    compiled(qkv)
    (node,) = nodes
    assert [x.meta["val"].stride() for x in node.args] == [qkv.stride()] * 3


def test_compile_bad_input():
    torch._dynamo.reset()
    q, k, v = make_case(1, (3, 4), (3, 2), (16, 8), torch.float16)
    with pytest.raises(Exception, match="minfer::attention: q's heads must be a multiple of k's"):
        torch.compile(lambda q, k, v: minfer.attention(q, k, v), fullgraph=True, backend="aot_eager")(q, k, v)


def test_no_backward():
    """Whatever requires grad, in a list too: forward works, backward raises."""
    q, k, v = make_case(1, (3, 4), (4, 2), (16, 8), torch.float16)
    sinks = torch.randn(4).half()
    state = minfer.attention(q, k, v)
    ends = cu_seqlens_of((3,)), cu_seqlens_of((4,)), 3, 4
    for x in (q, k, v, sinks, *state):
        x.requires_grad_()
        out, lse = minfer.attention(q, k, v, sinks=sinks)
        varlen, _ = minfer.attention_varlen(q[0], k[0], v[0], *ends, sinks=sinks)
        merged, _ = minfer.merge_attention_states([state[0].detach(), state[0]], [state[1].detach(), state[1]])
        results = (merged,) if any(x is y for y in state) else (out, lse, varlen)
        for result in results:
            assert result.requires_grad
            with pytest.raises(RuntimeError, match="has no backward"):
                result.sum().backward()
        with torch.no_grad():
            assert not minfer.attention(q, k, v, sinks=sinks)[0].requires_grad
        x.requires_grad_(False)


@pytest.mark.parametrize("window", [2**31, 2**62, 2**63 - 1])
def test_windows_wider_than_any_sequence(window):
    """They limit nothing, whatever their sum with a position is."""
    q, k = torch.randn(1, 7, 2, 16).half(), torch.randn(1, 5, 2, 16).half()
    for limits in ({"window_left": window}, {"window_right": window}, {"window_left": window, "window_right": window}):
        for have, want in zip(minfer.attention(q, k, k, **limits), minfer.attention(q, k, k), strict=True):
            assert torch.equal(have, want)
