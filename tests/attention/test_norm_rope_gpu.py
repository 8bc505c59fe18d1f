"""torch.ops.minfer.qk_norm_rope_append on a GPU: against its definition, and the same bits for rows at any address and stride."""

import pytest
import torch

from tests.attention import norm_rope_cases as norm_rope
from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.test_kv_cache_gpu import differing
from tests.gemm.cases import DTYPES

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format, heads, lengths", norm_rope.CASES)
def test_norm_rope(kv_format, heads, lengths, dtype):
    torch.manual_seed(3)
    arguments, cache, slots, options = norm_rope.make(kv_format, heads, lengths, dtype, DEVICE)
    before, again = norm_rope.copy_of(cache), norm_rope.copy_of(cache)
    q = norm_rope.call(arguments, cache, slots, options)
    assert torch.equal(norm_rope.call(arguments, again, slots, options), q)
    assert differing(again, cache) is None
    norm_rope.check(arguments, before, slots, options, q, cache)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_norm_rope_of_views(kv_format):
    """Rows at any address and stride give the same bits; tokens without a slot and positions outside of the table read and write nothing
    else."""
    torch.manual_seed(4)
    (qkv, *rest), cache, slots, options = norm_rope.make(kv_format, norm_rope.HEADS[0], (40, 3), torch.bfloat16, DEVICE)
    odd = torch.empty(qkv.numel() + 1, dtype=qkv.dtype, device=DEVICE)[1:].view_as(qkv).copy_(qkv)
    wide = torch.cat([qkv, qkv], 1)[:, : qkv.shape[1]]
    states = [norm_rope.copy_of(cache) for _ in range(3)]
    results = [norm_rope.call((x, *rest), state, slots, options) for x, state in zip((qkv, odd, wide), states, strict=True)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert differing(states[1], states[0]) is None and differing(states[2], states[0]) is None
    rest[3] = torch.full_like(rest[3], norm_rope.TABLE)
    slots[:] = cache.k.shape[0] * cache.k.shape[1]
    untouched = norm_rope.copy_of(cache)
    q = norm_rope.call((qkv, *rest), cache, slots, options)
    assert not q.any() and differing(cache, untouched) is None
