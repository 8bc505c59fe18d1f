"""What each rank does in the tests of tensor parallelism: a process each."""

from __future__ import annotations

from typing import Any

import torch
from minfer.distributed import TensorParallel
from minfer.generation import SamplingParams, engine_of, generate
from minfer.integrations.decoder.scheme import WeightScheme
from minfer.integrations.transformers import optimize

from ..generation.test_engine import assert_best, prompts_of
from ..integrations.tiny_models import MOE, assert_as_good, exact_model, random_tokens, tiny_model
from ..moe.expert_parallel_cases import run_ranks

__all__ = ["architectures", "quantised", "run_ranks", "sampled"]


def architectures(rank: int, ranks: int, device: torch.device, names: list[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Models of 16 bits: logits as one process's are, greedy tokens, and the way back. Returns tokens by name."""
    found = {}
    with torch.no_grad():
        for name in names:
            model, ids = tiny_model(name, device=str(device), **changes), random_tokens(2, 21).to(device)
            before = {key: x.clone() for key, x in model.state_dict().items()}
            exact = exact_model(model)
            truth, theirs = exact(ids.cpu()).logits, model(ids).logits
            with optimize(model, parallel=TensorParallel(device=device)) as handle:
                assert not handle.left, handle
                heads = [layer.attention.heads for layer in handle.layers]
                assert all(own * ranks == model.config.num_attention_heads for own in heads) or changes, heads
                assert_as_good(model(ids, use_cache=False).logits, theirs, truth)
                assert_as_good(model(ids).logits, theirs, truth)
                completions = generate(handle, prompts_of((5, 70, 1)), SamplingParams(max_new_tokens=8, ignore_eos=True))
                assert_best(exact, completions, name in MOE)
            after = model.state_dict()
            assert all(torch.equal(x, after[key]) for key, x in before.items()), name
            found[name] = [completion.tokens for completion in completions]
    return found


def quantised(rank: int, ranks: int, device: torch.device, names: list[str], schemes: dict[str, tuple], sizes: dict[str, Any]) -> dict:
    """Quantised weights. Returns of each case how far one process's logits and all ranks' are from those of the 16-bit model, relatively,
    and from each other."""
    found = {}
    with torch.no_grad():
        for name in names:
            for label, (kind, group) in schemes.items():
                ids = random_tokens(2, 21).to(device)
                scheme = WeightScheme(kind, group)
                alone = optimize(tiny_model(name, device=str(device), **sizes), weights=scheme, restorable=False)
                together = tiny_model(name, device=str(device), **sizes)
                handle = optimize(together, weights=scheme, restorable=False, parallel=TensorParallel(device=device))
                assert not handle.left and not alone.left, handle
                truth = exact_model(tiny_model(name, **sizes))(ids.cpu()).logits.to(device)
                one, all_ranks = alone.model(ids).logits.float(), together(ids).logits.float()
                found[f"{name} {label}"] = [
                    float((x - y).norm() / truth.norm()) for x, y in ((one, truth), (all_ranks, truth), (all_ranks, one))
                ]
    return found


def sampled(rank: int, ranks: int, device: torch.device) -> list[list[int]]:
    """Draws with seeds, int8 caches, few pages: every rank has the same tokens."""
    params = [SamplingParams(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=i, ignore_eos=True, logprobs=2) for i in range(4)]
    with torch.no_grad():
        handle = optimize(tiny_model("qwen3", device=str(device)), parallel=TensorParallel(device=device))
        # Ranks with other amounts of free memory agree on one number of pages.
        options = dict(kv_cache="int8", max_length=128, max_rows=3, step_tokens=32, cache_tokens=64 * (6 + rank))
        engine = engine_of(handle, **options)
        requests = [engine.submit(prompt, p) for prompt, p in zip(prompts_of((40, 3, 70, 25)), params, strict=True)]
        engine.run()
        assert engine.pool.count == 6
    return [request.completion.tokens for request in requests]
