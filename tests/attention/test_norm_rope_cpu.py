"""minfer.qk_norm_rope_append without a GPU: against its definition and kv_cache_append, refusals, tracing."""

import math

import minfer
import pytest
import torch

from tests.attention import norm_rope_cases as norm_rope
from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.test_kv_cache_cpu import bits_of
from tests.contracts.test_registration import need
from tests.gemm.cases import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format, heads, lengths", norm_rope.CASES)
def test_norm_rope(kv_format, heads, lengths, dtype):
    torch.manual_seed(3)
    arguments, cache, slots, options = norm_rope.make(kv_format, heads, lengths, dtype)
    before = norm_rope.copy_of(cache)
    q = norm_rope.call(arguments, cache, slots, options)
    norm_rope.check(arguments, before, slots, options, q, cache)


def test_norm_rope_skips_tokens():
    """Tokens without a slot have queries and are stored nowhere."""
    arguments, cache, slots, options = norm_rope.make("16bit", norm_rope.HEADS[0], (3, 2), torch.float16)
    whole = norm_rope.call(arguments, norm_rope.copy_of(cache), slots, options)
    slots[1] = -1
    assert torch.equal(norm_rope.call(arguments, cache, slots, options), whole)
    assert int(cache.k.flatten(2).any(-1).sum()) == 4


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_norm_rope_compiles(backend, kv_format):
    need(backend)
    arguments, cache, slots, options = norm_rope.make(kv_format, norm_rope.HEADS[0], (5, 2, 9), torch.float16)
    want, own = norm_rope.copy_of(cache), norm_rope.copy_of(cache)
    q = norm_rope.call(arguments, want, slots, options)

    @torch.compile(fullgraph=True, backend=backend)
    def layer(k, v, scales):
        return minfer.qk_norm_rope_append(*arguments, k, v, slots, **scales, **options) * 2

    with torch.no_grad():
        assert torch.equal(layer(own.k, own.v, own.scales()), q * 2)
    for x, y in zip(own, want, strict=True):
        assert not isinstance(x, torch.Tensor) or torch.equal(bits_of(x), bits_of(y))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(qkv=torch.zeros(5, 12 * 128).half()), "qkv must be"),
        (dict(qkv=torch.zeros(5, 12, 128)), "qkv must be float16 or bfloat16"),
        (dict(qkv=torch.zeros(5, 3, 128).half()), "qkv must be .tokens, heads . 2 . heads_kv, head_dim., of a cache with heads_kv = 2"),
        (dict(q_weight=torch.zeros(64).half()), "q_weight must be .128."),
        (dict(k_weight=torch.zeros(128)), "k_weight must be float16"),
        (dict(eps=-1.0), "eps must be"),
        (dict(weight_offset=math.inf), "weight_offset must be"),
        (dict(cos_sin=torch.zeros(9, 130)), "rotary_dim must be even, 2 to head_dim = 128"),
        (dict(rotary_dim=64), "cos_sin must be .200, 64."),
        (dict(positions=torch.zeros(5)), "positions must be int64 or int32"),
        (dict(positions=torch.full((5,), 200)), "positions must be 0 to 199"),
        (dict(slot_mapping=torch.zeros(4, dtype=torch.int64)), "slot_mapping must be .5."),
        (dict(kv_format="int3"), "kv_format"),
    ],
)
def test_norm_rope_refuses(change, message):
    arguments, cache, slots, options = norm_rope.make("16bit", norm_rope.HEADS[0], (3, 2), torch.float16)
    names = ("qkv", "q_weight", "k_weight", "cos_sin", "positions")
    given = dict(zip(names, arguments, strict=True)) | dict(k_cache=cache.k, v_cache=cache.v, slot_mapping=slots) | options | change
    with pytest.raises(RuntimeError, match=f"minfer::qk_norm_rope_append: {message}"):
        minfer.qk_norm_rope_append(**given)
    assert not cache.k.any()
