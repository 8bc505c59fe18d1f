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


@pytest.mark.parametrize("heads", norm_rope.HEADS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_norm_rope_of_many(kv_format, heads):
    """So many queries that a warp has several, and a token's last warp fewer: the same bits as of few."""
    torch.manual_seed(5)
    tokens = 32 * torch.cuda.get_device_properties(DEVICE).multi_processor_count // heads[0]
    (qkv, *rest, positions), cache, slots, options = norm_rope.make(kv_format, heads, (1,) * tokens, torch.bfloat16, DEVICE)
    states = [norm_rope.copy_of(cache) for _ in range(3)]
    q = norm_rope.call((qkv, *rest, positions), cache, slots, options)
    norm_rope.check((qkv, *rest, positions), states[0], slots, options, q, cache)
    few = slice(tokens - 5, tokens)
    if kv_format == "int4":  # residuals are in the order of a call's sequences
        states[1] = states[1]._replace(k_residual=states[1].k_residual[few], v_residual=states[1].v_residual[few])
    assert torch.equal(norm_rope.call((qkv[few], *rest, positions[few]), states[1], slots[few], options), q[few])
    assert torch.equal(norm_rope.call((qkv, *rest, positions), states[2], slots, options), q) and differing(states[2], cache) is None


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
