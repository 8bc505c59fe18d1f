"""minfer.generate in the batch-invariant mode: a request's tokens and logprobs are the same bits in every company."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers")

import minfer  # noqa: E402
from minfer.generation import SamplingParams, engine_of, generate  # noqa: E402
from minfer.integrations.transformers import optimize  # noqa: E402

from ..integrations.tiny_models import DEVICES, tiny_model  # noqa: E402

MODELS = ("llama", "qwen3", "qwen3_moe")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths; greedy and random draws, some with penalties, all with logprobs."""
    rnd = random.Random(seed)
    found = []
    for index in range(count):
        prompt = [rnd.randrange(3, 160) for _ in range(rnd.choice((1, 5, 33, 64, 70, 129)))]
        own = {} if index % 3 == 0 else {"temperature": rnd.uniform(0.5, 1.2), "seed": index, "top_p": rnd.choice((1.0, 0.9))}
        own |= {"presence_penalty": 0.3} if index % 4 == 3 else {}
        found.append((prompt, SamplingParams(max_new_tokens=rnd.randrange(4, 24), ignore_eos=True, logprobs=index % 3, **own)))
    return found


def outcome(completion) -> tuple:
    """Tokens, and the bits of logprobs."""
    bits = [x.hex() for x in completion.logprobs]
    return completion.tokens, bits, [[(token, x.hex()) for token, x in top] for top in completion.top_logprobs]


def together(handle, work, **options) -> list[tuple]:
    prompts, params = zip(*work, strict=True)
    return [outcome(c) for c in generate(handle, list(prompts), list(params), batch_invariant=True, **options)]


def arriving(handle, work, seed: int, **options) -> list[tuple]:
    """Requests that come in a random order while others run."""
    rnd = random.Random(seed)
    engine = engine_of(handle, max_length=256, batch_invariant=True, **options)
    order = list(range(len(work)))
    rnd.shuffle(order)
    sent = {}
    while order or engine.busy:
        for _ in range(min(rnd.randrange(3), len(order))):
            index = order.pop()
            sent[index] = engine.submit(*work[index])
        if engine.busy:
            engine.step()
    return [outcome(sent[index].completion) for index in range(len(work))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_request_does_not_see_the_others(name, device):
    work = requests(12)
    with optimize(tiny_model(name, device=device)) as handle:
        alone = [together(handle, [one])[0] for one in work]
        assert together(handle, work) == alone
        assert together(handle, work[::-1])[::-1] == alone
        assert together(handle, work, max_rows=3, step_tokens=16) == alone
        assert together(handle, work, graphs=False, share_prefixes=False) == alone
        for seed in (1, 2):
            assert arriving(handle, work, seed, max_rows=5, step_tokens=40) == alone


@pytest.mark.parametrize("device", DEVICES)
def test_preemption(device):
    work = [(prompt, SamplingParams(max_new_tokens=90, ignore_eos=True, logprobs=1)) for prompt, _ in requests(40)][3:7]
    with optimize(tiny_model("llama", device=device)) as handle:
        alone = [together(handle, [one])[0] for one in work]
        prompts, params = zip(*work, strict=True)
        cramped = generate(handle, list(prompts), list(params), batch_invariant=True, cache_tokens=6 * 64)
        assert sum(c.preemptions for c in cramped) > 0 and [outcome(c) for c in cramped] == alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
def test_quantised_caches(kv_cache, device):
    work = requests(8, 1)
    with optimize(tiny_model("qwen3", device=device)) as handle:
        alone = [together(handle, [one], kv_cache=kv_cache)[0] for one in work]
        assert together(handle, work, kv_cache=kv_cache) == alone
        assert together(handle, work, kv_cache=kv_cache, max_rows=3, step_tokens=16) == alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, kv_cache", [("llama", None), ("qwen3_moe", None), ("qwen3", "fp8")])
def test_a_forward_pass_over_the_same_tokens(name, kv_cache, device):
    """What a trainer computes: logprobs of the tokens of a completion, all at once or in chunks."""
    work = [(prompt, params) for prompt, params in requests(9, 2) if params.presence_penalty == 0]
    prompts, params = zip(*work, strict=True)
    with optimize(tiny_model(name, device=device)) as handle:
        completions = generate(handle, list(prompts), list(params), kv_cache=kv_cache, batch_invariant=True)
        for step_tokens in (8192, 24):
            options = dict(kv_cache=kv_cache, max_length=256, max_rows=3, step_tokens=step_tokens, batch_invariant=True)
            engine = engine_of(handle, **options)
            for c in completions:
                assert engine.score(c.prompt + c.tokens)[len(c.prompt) - 1 :] == c.logprobs


def test_what_is_not_scored():
    with optimize(tiny_model("llama")) as handle:
        engine = engine_of(handle, max_length=128, max_rows=1)
        for tokens, message in (([5], "got 1 tokens"), ([5, -1], "got token -1"), ([5] * 129, "got 129 tokens")):
            with pytest.raises(ValueError, match=message):
                engine.score(tokens)
        free = engine.pool.free
        assert len(engine.score([5] * 128)) == 127 and engine.pool.free == free
        engine.submit([5, 6], SamplingParams(max_new_tokens=4))
        with pytest.raises(RuntimeError, match="under way"):
            engine.score([5, 6])


def test_the_engine_keeps_its_mode():
    work = requests(2)
    with optimize(tiny_model("llama")) as handle:
        with minfer.batch_invariant():
            engine = engine_of(handle, max_length=256)
        assert engine.batch_invariant and not engine_of(handle, max_length=256).batch_invariant
        seen = []
        inner = engine.runner._run_chunks
        engine.runner._run_chunks = lambda *args: (seen.append(minfer.is_batch_invariant()), inner(*args))[1]
        engine.submit(*work[0])
        engine.run()
        assert seen and all(seen) and not minfer.is_batch_invariant()
