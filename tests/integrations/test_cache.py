"""Paged cache layers of transformers: what a growing cache of tensors does, in pages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from minfer.integrations.transformers import PagedLayer, optimize, paged_cache  # noqa: E402
from minfer.integrations.transformers.cache import PAGE_SIZE  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.cache_utils import DynamicLayer  # noqa: E402

from .tiny_models import DEVICES, assert_as_good, errors, exact_model, random_tokens, tiny_model  # noqa: E402

_LIMITS = {"16bit": 0.0, "fp8_e4m3": 0.04, "int8": 0.02, "int4": 0.2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def tokens(batch: int, count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(batch, 2, count, 32, device=device).bfloat16() for _ in range(2))
    return k, v


def assert_near(ours, theirs, limit: float) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert own.shape == other.shape
        assert (own.float() - other.float()).norm() <= limit * other.float().norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", _LIMITS)
def test_same_as_tensors(kv_format, device):
    """Appending, growing, reordering for beams, selecting, repeating, cropping, resetting."""
    paged, plain = PagedLayer(kv_format), DynamicLayer()

    def step(batch: int, count: int) -> None:
        k, v = tokens(batch, count, device)
        assert_near(paged.update(k, v), plain.update(k, v), _LIMITS[kv_format])
        assert paged.get_seq_length() == plain.get_seq_length() and paged.get_mask_sizes(3) == plain.get_mask_sizes(3)

    step(3, 37)
    for count in (1, 1, 2 * PAGE_SIZE, 1):
        step(3, count)
    order = torch.tensor([2, 0, 0], device=device)
    paged.reorder_cache(order), plain.reorder_cache(order)
    step(3, 1)
    paged.batch_repeat_interleave(2), plain.batch_repeat_interleave(2)
    step(6, 3)
    kept = torch.tensor([5, 1], device=device)
    paged.batch_select_indices(kept), plain.batch_select_indices(kept)
    step(2, PAGE_SIZE)
    assert paged.batch_size == 2
    removed = 1 if kv_format == "int4" else PAGE_SIZE + 5
    paged.crop(-removed), plain.crop(-removed)
    step(2, 4)
    paged.offload()
    assert paged.cache.k.device.type == "cpu"
    paged.prefetch()
    step(2, 1)
    paged.reset(), plain.reset()
    step(2, 5)


def test_a_crop_beyond_what_int4_keeps_is_an_error():
    layer = PagedLayer("int4")
    layer.update(*tokens(1, 40, "cpu"))
    layer.crop(-8)
    with pytest.raises(RuntimeError, match="only the newest 0 can be removed, got 1"):
        layer.crop(-1)


def test_all_layers_follow_one_table():
    """Beams and other batches: the layers of a cache keep one set of pages."""
    model, ids = tiny_model("llama"), random_tokens(2, 30)
    with optimize(model):
        cache = model(ids, use_cache=True).past_key_values
        assert all(isinstance(layer, PagedLayer) for layer in cache.layers)
        for change in (
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.reorder_cache(torch.tensor([1, 1, 2, 0])),
            lambda: cache.batch_select_indices(torch.tensor([True, False, True, True])),
        ):
            change()
            assert len({id(layer.pages) for layer in cache.layers}) == 1
        assert cache.batch_size == 3 and cache.is_croppable and not cache.is_compileable


@pytest.mark.parametrize("kind", ["config", "bare"])
def test_a_cache_of_transformers_becomes_paged(kind):
    model, ids = tiny_model("qwen2"), random_tokens(2, 20)
    truth, theirs = exact_model(model)(ids).logits, model(ids).logits
    cache = DynamicCache(config=model.config) if kind == "config" else DynamicCache()
    with optimize(model):
        first = model(ids[:, :11], past_key_values=cache, use_cache=True).logits
        second = model(ids[:, 11:], past_key_values=cache, use_cache=True).logits
    assert all(isinstance(layer, PagedLayer) for layer in cache.layers) and cache.get_seq_length() == 20
    assert_as_good(torch.cat([first, second], 1), theirs, truth)


def test_a_cache_that_holds_something_already_is_used_as_it_is():
    model, ids = tiny_model("llama"), random_tokens(2, 20)
    truth, theirs = exact_model(model)(ids).logits, model(ids).logits
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :11], past_key_values=cache, use_cache=True).logits
    with optimize(model):
        second = model(ids[:, 11:], past_key_values=cache, use_cache=True).logits
    assert all(type(layer) is DynamicLayer for layer in cache.layers)
    assert_as_good(torch.cat([first, second], 1), theirs, truth)


@pytest.mark.parametrize("kv_format", ["16bit", "int8"])
def test_without_an_optimised_model(kv_format):
    """Attention that is not minfer's gets tensors."""
    model, ids = tiny_model("llama"), random_tokens(2, 20)
    cache = paged_cache(model, kv_format)
    parts = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in ((0, 13), (13, 14), (14, 20))]
    assert errors(torch.cat(parts, 1), exact_model(model)(ids).logits).median() < 0.06


def test_masks_must_go_on_showing_what_is_stored():
    model, ids = tiny_model("llama"), random_tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    with optimize(model):
        cache = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True).past_key_values
        with pytest.raises(RuntimeError, match="must show the tokens in the cache as earlier calls did"):
            model(ids[:, 9:], attention_mask=torch.ones_like(mask), past_key_values=cache, use_cache=True)
        model(ids[:, 9:], attention_mask=mask, past_key_values=cache, use_cache=True)


def test_errors():
    with pytest.raises(ValueError, match="kv_format must be one of 16bit, fp8_e4m3, int8, int4, got 'int3'"):
        PagedLayer("int3")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_either_name_of_the_cache(name):
    """transformers calls a layer's cache ``past_key_values``, from 5.24 on ``cache``; by another name it would be overlooked."""
    model = tiny_model(name)
    with optimize(model):
        layer = model.model.layers[0] if name == "llama" else model.transformer.h[0]
        x = torch.randn(1, 5, model.config.hidden_size).to(torch.bfloat16)
        options = {}
        if name == "llama":
            options["position_embeddings"] = model.model.rotary_emb(x, torch.arange(5)[None])
        found = []
        for key in ("past_key_values", "cache"):
            cache = DynamicCache(config=model.config)
            y = layer(x, use_cache=True, **{key: cache}, **options)
            found.append(y if isinstance(y, torch.Tensor) else y[0])
            assert cache.get_seq_length() == 5
        assert torch.equal(*found)
        with pytest.raises(RuntimeError, match="use_cache is True, but neither past_key_values nor cache was given"):
            layer(x, use_cache=True, kv=DynamicCache(config=model.config), **options)
