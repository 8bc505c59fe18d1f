"""Where an engine's model runs what lies between two attentions as one operator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from minfer.integrations.decoder import block as blocks  # noqa: E402
from minfer.integrations.decoder.block import between  # noqa: E402
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


@pytest.mark.parametrize("weights", ["w4a16", "fp8"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_quantised_layers(name, weights, monkeypatch):
    """All layers but the last have one; few tokens' results are those of the operators, and more tokens do not take it."""
    most = blocks.MOST_TOKENS_OF_INT4 if weights == "w4a16" else blocks.MOST_TOKENS_OF_FP8
    with torch.no_grad(), optimize(tiny_model(name), weights=weights, restorable=False) as handle:
        model = decoder_model(handle, 64)
        found = [between(a, b) for a, b in zip(model.layers, [*model.layers[1:], None], strict=True)]
        assert all(found[:-1]) and found[-1] is None
        calls = []
        own = blocks.Block.__call__
        monkeypatch.setattr(blocks.Block, "__call__", lambda block, y, x: calls.append(x.shape[0]) or own(block, y, x))
        few = hidden_of(model, most)
        assert calls == [most] * (len(model.layers) - 1)
        hidden_of(model, most + 1)
        assert len(calls) == len(model.layers) - 1
        monkeypatch.setattr("minfer.integrations.decoder.model.MOST_TOKENS", 0)
        assert torch.equal(few, hidden_of(model, most))


@pytest.mark.parametrize(
    "name, weights",
    [("llama", None), ("llama", "int8"), ("llama", "nf4"), ("gemma2", "w4a16"), ("mixtral", "w4a16"), ("gpt2", None)],
)
def test_other_layers(name, weights):
    """16 bits, other formats, norms of blocks' outputs, experts, layer norms."""
    with torch.no_grad(), optimize(tiny_model(name), weights=weights, restorable=False) as handle:
        model = decoder_model(handle, 64)
        assert not any(between(a, b) for a, b in zip(model.layers, model.layers[1:], strict=False))
        assert torch.isfinite(hidden_of(model, 1)).all()
