"""What each rank does in the tests of tensor parallelism: a process each."""

from __future__ import annotations

from typing import Any

import torch
from minfer import batch_invariant
from minfer.distributed import TensorParallel
from minfer.generation import SamplingParams, engine_of, generate
from minfer.integrations.decoder.scheme import WeightScheme
from minfer.integrations.transformers import optimize

from ..generation.test_engine import assert_best, prompts_of
from ..integrations.tiny_models import MOE, assert_as_good, exact_model, random_tokens, tiny_model
from ..moe.expert_parallel_cases import run_ranks

__all__ = ["architectures", "quantised", "run_ranks", "sampled", "sums", "sums_in_order"]


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


def sums_in_order(rank: int, ranks: int, device: torch.device) -> list[str]:
    """In the batch-invariant mode: sums of any number of rows are fp32 sums in the order of the ranks, so that a row has the bits that it
    has alone. Returns what was not."""
    parallel, wrong = TensorParallel(device=device), []
    with batch_invariant():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for width in (7, 64, 4096):
                generator = torch.Generator().manual_seed(width)
                parts = [(torch.randn(300, width, generator=generator) * 2.0 ** (3 * i)).to(dtype) for i in range(ranks)]
                parts[0][5] = -0.0
                want = torch.zeros(300, width)
                for part in parts:
                    want = want + part.float()
                for rows in (slice(0, 300), slice(5, 6), slice(17, 18), slice(3, 20), slice(0, 0)):
                    have = parallel.all_reduce(parts[rank][rows].clone().to(device))
                    if not torch.equal(have.cpu().view(torch.uint8), want[rows].to(dtype).view(torch.uint8)):
                        wrong.append(f"{dtype} {width} {rows}")
        strided = parts[rank].to(device)[:, ::2]
        if not torch.equal(parallel.all_reduce(strided).cpu(), want.to(dtype)[:, ::2]):
            wrong.append("strided")
    return wrong


def sums(rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """Sums over the ranks: those of few numbers through peer memory, added up in the order of the ranks; the same from CUDA graphs; others
    by the collective. Returns what was seen, and a sum of bits that all ranks must have."""
    parallel, plain = TensorParallel(device=device), TensorParallel(device=device, peer_memory=False)
    most = (1 << 20) // ranks
    found: dict[str, Any] = {"peers": parallel._exchange is not None, "wrong": [], "bits": 0}

    def inputs(dtype: torch.dtype, count: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(count, generator=generator) * 2.0 ** (3 * i)).to(dtype) for i in range(ranks)]

    def check(label: str, have: torch.Tensor, parts: list[torch.Tensor]) -> None:
        want = torch.zeros(parts[0].shape)
        for part in parts:
            want = want + part.float()
        if not torch.equal(have.cpu(), want.to(have.dtype)):
            found["wrong"].append(label)
        found["bits"] += int(have.view(torch.int16).long().sum())

    counts = (8, 24, 4096, 8 * 1000, most - 8, most, 4096, 64)
    for dtype in (torch.bfloat16, torch.float16):
        for i in range(3 * len(counts)):
            count = counts[i % len(counts)]
            parts = inputs(dtype, count, i)
            check(f"{dtype} {count}", parallel.all_reduce(parts[rank].to(device)), parts)
    view = torch.zeros(3, 9, 64, dtype=torch.bfloat16, device=device)[:, 1:]
    parts = [x.view(3, 8, 64) for x in inputs(torch.bfloat16, 3 * 8 * 64, 5)]
    view.copy_(parts[rank])
    check("view", parallel.all_reduce(view), parts)
    for dtype, count in ((torch.float32, 4096), (torch.bfloat16, most + 8), (torch.bfloat16, 12), (torch.bfloat16, 0)):
        parts = inputs(dtype, count, 3)
        have = parallel.all_reduce(parts[rank].to(device))
        torch.testing.assert_close(have.cpu().float(), sum(x.float() for x in parts), rtol=1e-2, atol=1e-1)
        torch.testing.assert_close(plain.all_reduce(parts[rank].to(device)), have)

    few, many = torch.zeros(4096, dtype=torch.bfloat16, device=device), torch.zeros(most, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = [parallel.all_reduce(x.clone()) for x in (few, many, few, few)]
    for i in range(100):
        parts, wide = inputs(torch.bfloat16, 4096, 50 + i), inputs(torch.bfloat16, most, 50 + i) if i % 20 == 0 else None
        few.copy_(parts[rank])
        if wide is not None:
            many.copy_(wide[rank])
        graph.replay()
        for x in (out[0], out[2], out[3]):
            check(f"replay {i}", x, parts)
        if wide is not None:
            check(f"replay {i}, many", out[1], wide)
    parallel.close()
    have = parallel.all_reduce(few.clone())  # by the collective
    torch.testing.assert_close(have, out[0], rtol=2e-2, atol=2e-1)
    return found
