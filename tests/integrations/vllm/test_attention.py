"""The attention backend, called as vLLM calls it: its metadata, its caches in both layouts, several steps of prompts, chunks and decode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm")

from minfer.integrations.vllm.attention import MinferAttentionBackend, MinferAttentionImpl, MinferAttentionMetadataBuilder  # noqa: E402
from vllm.config import AttentionConfig  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode  # noqa: E402

BLOCK, BLOCKS, HEADS, HEADS_KV, SIZE = 16, 40, 8, 2, 64
STORED = {"auto": torch.bfloat16, "fp8": torch.uint8, "int8_per_token_head": torch.int8}
BOUNDS = {"auto": 8e-3, "fp8": 6e-2, "int8_per_token_head": 2e-2}


def spec_of(kv_dtype: str) -> FullAttentionSpec:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS_KV, head_size=SIZE, dtype=STORED[kv_dtype], kv_quant_mode=get_kv_quant_mode(kv_dtype)
    )
    return MinferAttentionBackend.customize_spec(spec)


def cache_of(spec: FullAttentionSpec, layout: str) -> torch.Tensor:
    """A layer's pages as vLLM lays them out: [blocks, heads, block_size, content]. What was never stored must not matter."""
    content = spec.state_content_size_bytes // spec.dtype.itemsize
    shape = (BLOCKS, HEADS_KV, BLOCK, content) if layout == "LBHNC" else (BLOCKS, BLOCK, HEADS_KV, content)
    memory = torch.full(shape, 0x7F if spec.dtype.itemsize == 1 else float("nan"), dtype=spec.dtype)
    assert memory.numel() * memory.element_size() == BLOCKS * spec.page_size_bytes
    return memory if layout == "LBHNC" else memory.transpose(1, 2)


def metadata_of(builder, lengths: list[int], seen: list[int], table: torch.Tensor):
    """Of a step in which each request has ``lengths`` new tokens behind those seen before."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    totals = [a + b for a, b in zip(seen, lengths, strict=True)]
    slots = [
        int(table[row, place // BLOCK]) * BLOCK + place % BLOCK
        for row, (total, length) in enumerate(zip(totals, lengths, strict=True))
        for place in range(total - length, total)
    ]
    common = CommonAttentionMetadata(
        query_start_loc=ends,
        query_start_loc_cpu=ends,
        seq_lens=torch.tensor(totals, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(totals),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )
    return builder.build(0, common)


def attend(q, k, v, scale, window, softcap, sinks) -> torch.Tensor:
    """One sequence in float64; its queries are the last tokens. [tokens, heads, size]."""
    q, k, v = q.double(), k.double().repeat_interleave(HEADS // HEADS_KV, 1), v.double().repeat_interleave(HEADS // HEADS_KV, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))[None]
    seen = (key <= place) & (key > place - window if window else torch.ones_like(key <= place))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("kv_dtype", STORED)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20, "logits_soft_cap": 30.0}, {"sinks": True}], ids=str)
def test_steps(kv_dtype, layout, options):
    torch.manual_seed(0)
    dtype, options = torch.bfloat16, dict(options)
    if "sinks" in options:
        options["sinks"] = torch.randn(HEADS).to(dtype)
    window, softcap = options.get("sliding_window"), options.get("logits_soft_cap")
    spec = spec_of(kv_dtype)
    builder = MinferAttentionMetadataBuilder(spec, ["layer"], SimpleNamespace(), torch.get_default_device())
    impl = MinferAttentionImpl(HEADS, SIZE, SIZE**-0.5, HEADS_KV, None, kv_cache_dtype=kv_dtype, **options)
    cache = cache_of(spec, layout)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.015))
    table = torch.randperm(BLOCKS).to(torch.int32)[: 3 * 8].view(3, 8).contiguous()
    history = [(torch.empty(0, HEADS_KV, SIZE), torch.empty(0, HEADS_KV, SIZE)) for _ in range(3)]
    # Prompts; a chunk, a token and drafts of speculative decoding together; decode; a request that has nothing in this step.
    for lengths in ([37, 5, 18], [30, 1, 4], [1, 1, 1], [1, 0, 1]):
        seen = [len(k) for k, _ in history]
        metadata = metadata_of(builder, lengths, seen, table)
        tokens = sum(lengths)
        q, k, v = (torch.randn(tokens + 3, heads, SIZE).to(dtype) for heads in (HEADS, HEADS_KV, HEADS_KV))  # 3: of a graph's padding
        output = torch.full((tokens + 3, HEADS * SIZE), 7.0, dtype=dtype)
        impl.do_kv_cache_update(layer, k, v, cache, metadata.slot_mapping)
        assert impl.forward(layer, q, k, v, cache, metadata, output) is output
        assert (output[tokens:] == 7).all()
        for row, (first, length) in enumerate(zip(metadata.query_start_loc.tolist(), lengths, strict=False)):
            own = slice(first, first + length)
            history[row] = tuple(torch.cat([old, new[own].float()]) for old, new in zip(history[row], (k, v), strict=True))
            if length == 0:
                continue
            want = attend(q[own], *history[row], SIZE**-0.5, window, softcap, options.get("sinks"))
            have = output[own].view(-1, HEADS, SIZE).double()
            error = (have - want).norm() / want.norm()
            assert have.isfinite().all() and error < BOUNDS[kv_dtype], (lengths, row, error)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8_per_token_head"])
def test_norm_rotation_and_storing_in_one(kv_dtype, neox):
    """vLLM's fusion of what stands in front of attention: q as its own operators give it, and the same cache."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    torch.manual_seed(1)
    dtype, tokens, spec = torch.bfloat16, 9, spec_of(kv_dtype)
    impl = MinferAttentionImpl(HEADS, SIZE, 1.0, HEADS_KV, kv_cache_dtype=kv_dtype)
    assert impl.fused_qk_norm_rope_kvcache_supported()
    rotary = RotaryEmbedding(SIZE, SIZE, 256, 1e4, neox, torch.float32)
    qkv = torch.randn(tokens + 2, (HEADS + 2 * HEADS_KV) * SIZE).to(dtype)
    weights = [(1 + 0.1 * torch.randn(SIZE)).to(dtype) for _ in range(2)]
    positions, slots = torch.arange(40, 40 + tokens + 2), torch.randperm(BLOCKS * BLOCK)[:tokens]
    q, k, v = (x.unflatten(-1, (-1, SIZE)) for x in qkv.split([HEADS * SIZE, HEADS_KV * SIZE, HEADS_KV * SIZE], -1))
    normed = [torch.nn.functional.rms_norm(x.float(), (SIZE,), w.float(), 1e-6) for x, w in zip((q, k), weights, strict=True)]
    want_q, want_k = (x.reshape(tokens + 2, -1, SIZE) for x in rotary.forward_native(positions, *(x.flatten(1) for x in normed)))
    layer, caches = SimpleNamespace(), [cache_of(spec, "LBNHC") for _ in range(2)]
    q_out, k_out = torch.empty(tokens + 2, HEADS * SIZE, dtype=dtype), torch.empty(0)
    impl.do_qk_norm_rope_kvcache_update(layer, qkv, q_out, k_out, positions, *weights, 1e-6, rotary.cos_sin_cache, neox, caches[0], slots)
    torch.testing.assert_close(q_out[:tokens].view(tokens, HEADS, SIZE).float(), want_q[:tokens], rtol=1e-2, atol=1e-2)
    impl.do_kv_cache_update(layer, want_k.to(dtype), v, caches[1], slots)
    stored = [impl._pages_of(layer, cache) for cache in caches]
    rows = [[x[slots // BLOCK, slots % BLOCK].float() for x in pages[:2]] for pages in stored]
    if kv_dtype == "int8_per_token_head":
        for pages, own in zip(stored, rows, strict=True):
            for i, scale in enumerate(pages[2:]):
                own[i] = own[i] * scale.transpose(1, 2)[slots // BLOCK, slots % BLOCK][..., None]
    for have, want in zip(*rows, strict=True):
        torch.testing.assert_close(have, want, rtol=2e-2, atol=3e-2)


def test_chosen_by_name(adapter):
    """The option's value is a member of vLLM's list, which leads to the class, and the class says what it takes."""
    adapter.register_attention()
    adapter.register_attention()
    backend = AttentionConfig(backend="MINFER").backend
    assert backend is AttentionBackendEnum["MINFER"] and backend.get_class() is MinferAttentionBackend
    assert MinferAttentionBackend.get_impl_cls() is MinferAttentionImpl

    def reasons(**changes):
        usual = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=False)
        usual |= dict(use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type="decoder")
        return MinferAttentionBackend.validate_configuration(**(usual | {"device_capability": DeviceCapability(9, 0)} | changes))

    for fine in (
        {},
        {"has_sink": True},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "fp8"},
        {"has_sliding_window": True},
        {"use_batch_invariant": True},
    ):
        assert not reasons(**fine), fine
    for not_fine in (
        {"head_size": 288},
        {"kv_cache_dtype": "int4_per_token_head"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"use_mla": True},
        {"attn_type": "encoder"},
        {"block_size": 8},
        {"device_capability": DeviceCapability(7, 5)},
    ):
        assert reasons(**not_fine), not_fine


def test_what_it_refuses():
    with pytest.raises(ValueError, match="ALiBi"):
        MinferAttentionImpl(HEADS, SIZE, 1.0, HEADS_KV, alibi_slopes=[0.1] * HEADS)
    with pytest.raises(ValueError, match="int4_per_token_head"):
        MinferAttentionImpl(HEADS, SIZE, 1.0, HEADS_KV, kv_cache_dtype="int4_per_token_head")
    transfer = SimpleNamespace(kv_transfer_config=object())
    with pytest.raises(ValueError, match="KV connector"):
        MinferAttentionMetadataBuilder(spec_of("int8_per_token_head"), ["layer"], transfer, torch.get_default_device())
    MinferAttentionMetadataBuilder(spec_of("fp8"), ["layer"], transfer, torch.get_default_device())
