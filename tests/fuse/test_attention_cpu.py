"""Attention with functions of scores and masks, without a GPU: against float64, against torch's flex_attention, and what is refused."""

import functools
import itertools
import warnings

import pytest
import torch
from minfer import fuse
from minfer.fuse import attention_function, intervals
from minfer.fuse.graph import BOOL
from torch.nn.attention import flex_attention as flex

from tests.fuse.attention_cases import BF16, F16, Functions, check, drawn, exact, judged, operands, paged

LENGTH = 300
FUNCTIONS = Functions(2, 4, LENGTH, "cpu")


def of_torch(q, k, v, score_mod, mask):
    """flex_attention in float64, without a kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gqa = q.shape[1] != k.shape[1]
        return flex.flex_attention(q.double(), k.double(), v.double(), score_mod, mask, enable_gqa=gqa, return_lse=True)


@pytest.mark.parametrize("pair", FUNCTIONS.pairs(), ids=lambda pair: "-".join(getattr(f, "__name__", "none") for f in pair))
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_functions_are_flex_attentions(pair, dtype):
    score_mod, mask_mod = pair
    q, k, v = operands(2, 4, 2, LENGTH, LENGTH, 64, dtype, "cpu")
    mask = None if mask_mod is None else flex.create_block_mask(mask_mod, 2, 4, LENGTH, LENGTH, device="cpu")
    want = of_torch(q, k, v, score_mod, mask)
    for given in ((score_mod, mask_mod, None), (score_mod, mask_mod, mask), (score_mod, None, mask)):
        check(*fuse.attention(q, k, v, *given, enable_gqa=True, return_lse=True), *want, "against flex_attention")
        torch.testing.assert_close(exact(q, k, v, score_mod, mask_mod), want)
    judged(q, k, v, score_mod, mask_mod, mask)
    judged(q[:, :, :5], k, v, score_mod, mask_mod)


@pytest.mark.parametrize("seed", range(16))
def test_drawn(seed):
    score_mod, mask_mod = drawn(seed, 4, LENGTH, "cpu")
    q, k, v = operands(1, 4, 4, LENGTH, LENGTH, 32, BF16, "cpu")
    mask = None if mask_mod is None else flex.create_block_mask(mask_mod, 1, 4, LENGTH, LENGTH, device="cpu")
    check(*fuse.attention(q, k, v, score_mod, mask_mod, return_lse=True), *of_torch(q, k, v, score_mod, mask), f"seed {seed}")


@pytest.mark.parametrize("name", list(FUNCTIONS.masks))
@pytest.mark.parametrize("size", [128, (256, 128)])
def test_block_masks_are_torchs(name, size):
    mask_mod = FUNCTIONS.masks[name]
    ours = fuse.create_block_mask(mask_mod, 2, 4, LENGTH, 2 * LENGTH // 3, "cpu", size)
    theirs = flex.create_block_mask(mask_mod, 2, 4, LENGTH, 2 * LENGTH // 3, "cpu", size)
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        assert torch.equal(getattr(ours, counts), getattr(theirs, counts))
        listed = torch.arange(ours.kv_indices.shape[-1]) < getattr(ours, counts).unsqueeze(-1)
        assert torch.equal(getattr(ours, indices)[listed], getattr(theirs, indices)[listed])


def test_block_masks_say_what_is_computed():
    """Blocks that are not listed are not seen, whatever mask_mod says, and full ones are not masked."""
    q, k, v = operands(1, 2, 2, 256, 256, 64, BF16, "cpu")
    nothing = torch.zeros(1, 1, 2, dtype=torch.int32)
    index = torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    first = fuse.BlockMask(nothing, index, nothing + 1, index, (128, 128), FUNCTIONS.masks["causal"])
    out = fuse.attention(q, k, v, block_mask=first)
    want = exact(q, k[:, :, :128], v[:, :, :128], None, None)
    check(out, want[1].float(), *want, "the first block alone")
    empty = fuse.BlockMask(nothing, index, None, None, (128, 128), FUNCTIONS.masks["causal"])
    out, lse = fuse.attention(q, k, v, block_mask=empty, return_lse=True)
    assert (out == 0).all() and (lse == -float("inf")).all()
    assert first.sparsity() == 50.0 and empty.to("cpu").sparsity() == 100.0


@pytest.mark.parametrize("page_size", [8, 16, 24, 128])
def test_paged(page_size):
    q, k, v = operands(3, 4, 2, 5, LENGTH, 64, BF16, "cpu")
    functions = Functions(3, 4, LENGTH, "cpu")
    lengths = [LENGTH, 0, 131]
    for score_mod, mask_mod in functions.pairs()[:4]:
        given = paged(k, v, lengths, page_size)
        judged(q, given.pop("k"), given.pop("v"), score_mod, mask_mod, **given)
    # Positions are those of the last queries of a sequence.
    given = paged(k, v, [LENGTH] * 3, page_size)
    out = fuse.attention(q, given.pop("k"), given.pop("v"), None, functions.masks["causal"], enable_gqa=True, **given)
    whole = torch.nn.functional.pad(q, (0, 0, LENGTH - 5, 0))
    want = fuse.attention(whole, k, v, None, functions.masks["causal"], enable_gqa=True)[:, :, -5:]
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-3)


def test_layouts():
    q, k, v = operands(2, 4, 4, 40, 60, 64, BF16, "cpu")
    rows = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = fuse.attention(rows, k, v)
    assert out.stride() == rows.stride() and torch.equal(out, fuse.attention(q, k, v))
    assert fuse.attention(q, k, v[..., :32]).shape == (2, 4, 40, 32)
    assert fuse.attention(q[:, :, :0], k, v).shape == (2, 4, 0, 64) and fuse.attention(q[:0], k[:0], v[:0]).shape == (0, 4, 40, 64)
    out, lse = fuse.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (out == 0).all() and (lse == -float("inf")).all()
    check(
        fuse.attention(q, k, v, scale=0.3),
        exact(q, k, v, None, None, scale=0.3)[1].float(),
        *exact(q, k, v, None, None, scale=0.3),
        "scale",
    )


def test_operator():
    q, k, v = operands(1, 4, 2, 20, 30, 64, BF16, "cpu")
    call = attention_function.traced(FUNCTIONS.scores["alibi"], FUNCTIONS.masks["causal"])
    torch.library.opcheck(attention_function.OP, (q, k, v, call.captured, [], [], None, None, call.key, 0.125))
    mask = fuse.create_block_mask(FUNCTIONS.masks["causal"], None, None, 20, 30, "cpu")
    lists = attention_function.lists_of(mask)
    torch.library.opcheck(attention_function.OP, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, call.captured, lists, [128, 128],
                                                  None, None, call.key, 0.125))  # fmt: skip
    given = paged(k, v, [30], 8)
    tensors = given["k"].nan_to_num(), given["v"].nan_to_num()
    torch.library.opcheck(
        attention_function.OP, (q, *tensors, call.captured, [], [], given["block_table"], given["seq_lens"], call.key, 0.125)
    )


def test_compiled_graphs():
    """In one graph, for any length, with torch's block masks as arguments."""
    alibi, causal = FUNCTIONS.scores["alibi"], FUNCTIONS.masks["causal"]
    compiled = torch.compile(
        lambda q, k, v: fuse.attention(q * 2, k, v, alibi, causal, enable_gqa=True) + 1, fullgraph=True, backend="aot_eager"
    )
    for length in (40, 70, 33):
        q, k, v = operands(2, 4, 2, length, LENGTH, 64, BF16, "cpu")
        assert torch.equal(compiled(q, k, v), fuse.attention(q * 2, k, v, alibi, causal, enable_gqa=True) + 1)

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def masked(q, k, v, mask):
        return fuse.attention(q, k, v, alibi, block_mask=mask, return_lse=True)

    q, k, v = operands(2, 4, 4, LENGTH, LENGTH, 64, BF16, "cpu")
    for make in (flex.create_block_mask, fuse.create_block_mask):
        out, lse = masked(q, k, v, make(causal, None, None, LENGTH, LENGTH, "cpu"))
        want = fuse.attention(q, k, v, alibi, causal, return_lse=True)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_what_functions_read_may_change():
    """Another tensor or number in a function's closure is seen at the next call; a tensor that is written is as well."""
    q, k, v = operands(1, 2, 2, 16, 16, 64, BF16, "cpu")
    bias, factor = torch.zeros(2), 1.0

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + factor * bias[h] * kv_idx

    plain = fuse.attention(q, k, v)
    assert torch.equal(fuse.attention(q, k, v, score_mod), plain)
    bias.fill_(1.0)
    written = fuse.attention(q, k, v, score_mod)
    assert not torch.equal(written, plain)
    bias = torch.full((2,), 2.0)
    doubled = fuse.attention(q, k, v, score_mod)
    assert not torch.equal(doubled, written)
    factor = 0.5
    assert torch.equal(fuse.attention(q, k, v, score_mod), written)
    number = torch.tensor(1.0)
    scaled = lambda score, b, h, q_idx, kv_idx: score * number  # noqa: E731
    assert torch.equal(fuse.attention(q, k, v, scaled), plain)
    number.fill_(3.0)
    assert not torch.equal(fuse.attention(q, k, v, scaled), plain)

    class Method:
        weight = torch.zeros(2)

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score + self.weight[h] * kv_idx

    method = Method()
    assert torch.equal(fuse.attention(q, k, v, method), plain)
    method.weight = torch.ones(2)
    assert torch.equal(fuse.attention(q, k, v, method), written)


def test_equal_functions_are_one():
    def made(number):
        return lambda score, b, h, q_idx, kv_idx: score * number

    keys = [attention_function.traced(made(number), None).key for number in (2.0, 2.0, 3.0)]
    assert keys[0] == keys[1] != keys[2]


def test_gradients_are_refused():
    q, k, v = operands(1, 2, 2, 8, 8, 64, BF16, "cpu")
    with pytest.raises(RuntimeError, match="has no backward"):
        fuse.attention(q.requires_grad_(), k, v).sum().backward()


REFUSED = {
    "branch": (lambda s, b, h, q, k: s if q >= k else -s, r"test_attention_cpu.py:\d+: Python cannot branch"),
    "cumsum": (lambda s, b, h, q, k: s.cumsum(0), r"test_attention_cpu.py:\d+: torch.cumsum is not among"),
    "index": (lambda s, b, h, q, k: s + torch.ones(3)[s], "an index must be an integer"),
    "modes": (lambda s, b, h, q, k: s + torch.ones(3, 3)[q], "is looked up in by as many indices|modes"),
    "nothing": (lambda s, b, h, q, k: None, "it must return one number"),
    "empty": (lambda s, b, h, q, k: s + torch.ones(0)[q], "has no elements"),
    "double": (lambda s, b, h, q, k: s.double(), "do not take float64|is not among"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fused_names_the_line(case):
    function, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        fuse.attention(*operands(1, 2, 2, 8, 8, 64, BF16, "cpu"), function)


def test_wrong_calls():
    q, k, v = operands(2, 4, 2, 8, 16, 64, BF16, "cpu")
    causal = FUNCTIONS.masks["causal"]
    gqa = {"enable_gqa": True}
    of_three, of_64 = fuse.create_block_mask(causal, 3, 4, 8, 16, "cpu"), flex.create_block_mask(causal, 2, 4, 8, 16, "cpu", 64)
    for arguments, options, message in (
        ((q, k, v), {}, "pass enable_gqa=True"),
        ((q[:, :3], k, v), gqa, "q's heads must be a multiple of k's"),
        ((q.float(), k, v), gqa, "q must be float16 or bfloat16"),
        ((q[0], k, v), gqa, r"q must be \[batch"),
        ((q, k[..., :32], v), gqa, "k must have q's head_dim"),
        ((q, k, v[:, :, :3]), gqa, "v must be"),
        ((q, k[:1], v[:1]), gqa, "k must have q's batch"),
        ((q, k, v), {**gqa, "scale": -1.0}, "scale must be positive"),
        ((q, k, v), {**gqa, "seq_lens": torch.ones(2, dtype=torch.int32)}, "are given together"),
        ((q, k, v, None, None, of_three), gqa, "block_mask's kv_indices must be"),
        ((q, k, v, None, None, of_64), gqa, "multiples of 128"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fuse.attention(*arguments, **options)
    given = paged(k, v, [16, 16], 8)
    given["block_table"][1, 0] = 99
    with pytest.raises(RuntimeError, match="must name pages 0 to"):
        fuse.attention(q, given.pop("k"), given.pop("v"), enable_gqa=True, **given)


def bounds_of(graph, b, h, q, k):
    """By Python, as the kernel has them."""
    leaves = {
        "q": intervals.Bounds(q[0], q[1], 1 << 24),
        "kv": intervals.Bounds(k[0], k[1], 1 << 24),
        "b": intervals.Bounds(b, b, 1 << 24),
        "h": intervals.Bounds(h, h, 1 << 24),
    }
    return intervals.Intervals(graph, intervals.PYTHON, leaves.get, lambda number: None).of(graph.outputs[-1].node)


@pytest.mark.parametrize("name", ["causal", "window", "sliding_tiles", "odd_heads", *range(24)])
def test_bounds_hold(name):
    """A tile that bounds call empty has no key that is seen, one that they call full no other; and they find most of both."""
    mask_mod = FUNCTIONS.masks[name] if isinstance(name, str) else drawn(name, 4, LENGTH, "cpu")[1]
    if mask_mod is None:
        return
    call = attention_function.traced(None, mask_mod)
    assert call.traced.graph.nodes[call.traced.graph.outputs[-1].node].dtype == BOOL
    found = known = 0
    for h in (0, 1):
        seen = attention_function.evaluate_mask(call, 0, h, torch.arange(LENGTH), torch.arange(LENGTH))
        for q, k in itertools.product(range(0, LENGTH, 32), repeat=2):
            tile = seen[q : q + 32, k : k + 32]
            bounds = bounds_of(call.traced.graph, 0, h, (q, min(q + 31, LENGTH - 1)), (k, min(k + 31, LENGTH - 1)))
            uniform = bool(tile.all()) or not bool(tile.any())
            found += uniform
            if bounds is not None:
                assert not bounds.low or tile.all(), (h, q, k)
                assert bounds.high or not tile.any(), (h, q, k)
                known += uniform and (bool(bounds.low) or not bounds.high)
    if name in ("causal", "window"):
        assert known == found > 0


def test_bounds_of_what_is_unknown():
    documents = attention_function.traced(None, FUNCTIONS.masks["documents"]).traced.graph
    above = bounds_of(documents, 0, 0, (0, 31), (32, 63))
    assert above is not None and not above.high  # causal all the same
    below = bounds_of(documents, 0, 0, (64, 95), (0, 31))
    assert below is not None and below.high and not below.low


def test_loaded_names():
    """Names of tensors that functions look up in are those of the code."""
    call = attention_function.traced(FUNCTIONS.scores["relative"], FUNCTIONS.masks["documents"])
    assert call.traced.names == ["table", "document"]
