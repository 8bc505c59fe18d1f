"""Where an engine's model runs what lies between two attentions as one operator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from minfer.formats.kv_cache import allocate_kv_cache  # noqa: E402
from minfer.generation.runner import _Attend, _StepTensors  # noqa: E402
from minfer.integrations.decoder import (
    block as blocks,  # noqa: E402
    model as models,  # noqa: E402
)
from minfer.integrations.decoder.block import between  # noqa: E402
from minfer.integrations.decoder.scheme import WeightScheme  # noqa: E402
from minfer.integrations.transformers import optimize  # noqa: E402
from minfer.integrations.transformers.model import decoder_model  # noqa: E402

from .tiny_models import tiny_model  # noqa: E402


def hidden_of(model, tokens: int) -> torch.Tensor:
    """What the model's layers make of some tokens, with an average over all heads in place of attention."""
    torch.manual_seed(2)
    ids = torch.randint(5, 50, (tokens,))

    def attend(attention, qkv):
        heads = attention.heads
        y = qkv.view(tokens, -1, attention.head_dim)
        return (y[:, :heads] + y.mean(1, keepdim=True)).flatten(1)

    x, pending = model.hidden(ids, torch.arange(tokens), [attend] * len(model.layers))
    return x if pending is None else x + pending


@pytest.mark.parametrize("weights", ["w4a16", "fp8", None])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_layers(name, weights, monkeypatch):
    """All layers have one; few tokens' results are those of the operators, and more tokens do not take it."""
    most = {"w4a16": blocks.MOST_TOKENS_OF_INT4, "fp8": blocks.MOST_TOKENS_OF_FP8, None: blocks.MOST_TOKENS_OF_DENSE}[weights]
    with torch.no_grad(), optimize(tiny_model(name), weights=weights, restorable=False) as handle:
        model = decoder_model(handle, 64)
        found = [between(a, b) for a, b in zip(model.layers, [*model.layers[1:], None], strict=True)]
        assert all(found)
        calls = []
        own = blocks.Block.__call__
        monkeypatch.setattr(blocks.Block, "__call__", lambda block, y, x: calls.append(x.shape[0]) or own(block, y, x))
        few = hidden_of(model, most)
        assert calls == [most] * len(model.layers)
        hidden_of(model, most + 1)
        assert len(calls) == len(model.layers)
        monkeypatch.setattr("minfer.integrations.decoder.model.MOST_TOKENS", 0)
        assert torch.equal(few, hidden_of(model, most))


@pytest.mark.parametrize(
    "name, weights",
    [("llama", "int8"), ("llama", "nf4"), ("gemma2", "w4a16"), ("mixtral", "w4a16"), ("gpt2", None)],
)
def test_other_layers(name, weights):
    """Other formats, norms of blocks' outputs, experts, layer norms."""
    with torch.no_grad(), optimize(tiny_model(name), weights=weights, restorable=False) as handle:
        model = decoder_model(handle, 64)
        assert not any(between(a, b) for a, b in zip(model.layers, model.layers[1:], strict=False))
        assert torch.isfinite(hidden_of(model, 1)).all()


@pytest.mark.parametrize(
    "weights, want",
    [("w4a16", ("int4", 128)), ("fp8", ("blocks", -1)), (WeightScheme("fp8", -1), ("rows", -1)), (None, ("dense", -1))],
    ids=str,
)
def test_what_attention_in_the_launch_asks_the_plan(weights, want):
    """What the plan is asked about the weights; and that a cache of the CPU has no such launch."""
    with torch.no_grad(), optimize(wide_model("llama", "cpu"), weights=weights, restorable=False) as handle:
        layers = decoder_model(handle, 64).layers
        block = between(*layers[:2])
        assert block._weights() == want
        cache = torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16)
        few = torch.zeros(1, dtype=torch.int32)
        step = blocks.OneToken(cache, cache.clone(), few[None], few, few.long(), few.long(), torch.zeros(4, 128))
        assert not block.includes(layers[0].attention, step)


@pytest.mark.parametrize(
    "change, one_launch",
    [({}, True), ({0: 2}, False), ({5: 16}, False), ({6: 2}, False), ({7: 8192}, False), ({2: 8192, 3: 28672, 4: 10240}, True)],
)
@pytest.mark.parametrize("weights", [("int4", 128), ("blocks", -1), ("rows", -1)])
def test_plan_of_a_layer_in_one_launch(weights, change, one_launch):
    """Of the H200 as measured: models over up to 4,096 tokens; not two tokens, heads of 256 elements, groups of 16 heads of queries, or
    longer sequences."""
    sizes = [1, 4096, 4096, 14336, 6144, 32, 8, 4096]
    for i, value in change.items():
        sizes[i] = value
    assert (blocks._most_layers(tuple(sizes), torch.bfloat16, *weights, -1, False) > 0) == one_launch


def wide_model(name: str, device: str = "cuda"):
    """Four layers with heads of 128 elements: llama; qwen2, whose q, k and v have biases; qwen3, whose q and k have norms."""
    import transformers

    sizes = dict(vocab_size=160, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.05) | (
        {} if name == "qwen2" else {"head_dim": 128}
    )
    torch.manual_seed(0)
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[name]
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    if name == "qwen2":
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(projection.bias, std=0.3)
    return model.bfloat16().to(device).eval()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["w4a16", "fp8", None])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_attention_in_the_launch(name, weights, monkeypatch):
    """Tokens one after the other: what layers make of them, and what they store, is that of attention in launches of its own."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("one launch requires compute capability 9.0")
    with torch.no_grad(), optimize(wide_model(name), weights=weights, restorable=False) as handle:
        model = decoder_model(handle, 64)
        table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32, device="cuda")

        def steps():
            attends = [
                _Attend(allocate_kv_cache(4, 16, 2, 128, dtype=torch.bfloat16, device="cuda"), model.rotations) for _ in model.layers
            ]
            found = []
            for i in range(50):
                position = torch.tensor([i], device="cuda")
                slot = table[0, i // 16 : i // 16 + 1].long() * 16 + i % 16
                step = _StepTensors(position, slot, (position + 1).int(), table, None, 1)
                for attend in attends:
                    attend.step = step
                x, pending = model.hidden(torch.tensor([5 + 3 * i % 150], device="cuda"), position, attends)
                found.append((x if pending is None else x + pending).double())
            return torch.cat(found), [attend.cache for attend in attends]

        calls = []
        own = models.launch
        monkeypatch.setattr(models, "launch", lambda parts, *args, **more: calls.append(len(parts)) or own(parts, *args, **more))
        have, caches = steps()
        assert calls == [4] * 50
        # A launch for each layer has the same bits, and so has one for every two, of layers that do not continue each other.
        for most in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(blocks.Block, "most_layers", lambda block, *args, most=most: most)
                single, _ = steps()
            assert torch.equal(single, have)
        assert calls == [4] * 50 + [1] * 200 + [2] * 100
        monkeypatch.setattr(blocks.Block, "includes", lambda *_: False)
        want, others = steps()
        # Operators of e4m3 weights quantise activations, where a rounding of 16 bits may become one of 3.
        assert len(calls) == 50 + 300 and (have - want).norm() <= (0.04 if weights == "fp8" else 0.02) * want.norm()
        rows = table[0].repeat_interleave(16)[:50].long(), torch.arange(50, device="cuda") % 16
        for mine, theirs in zip(caches, others, strict=True):
            for x, y in ((mine.k, theirs.k), (mine.v, theirs.v)):
                assert (x[rows].double() - y[rows].double()).norm() <= 0.02 * y[rows].double().norm()
