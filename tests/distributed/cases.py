"""What each rank does in the tests of tensor parallelism: a process each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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

__all__ = [
    "architectures",
    "architectures_with_sums_left",
    "invariant_requests",
    "norms_of_sums",
    "parts_of",
    "quantised",
    "run_ranks",
    "sampled",
    "sums",
    "sums_in_order",
    "wrong_norm",
]


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


@contextmanager
def _sums_left() -> Iterator[Counter]:
    """All sums in front of RMS norms are left to these, as those of few tokens are where GPUs reach each other's memory. Counts calls."""
    kept, calls = (TensorParallel.leaves_sums_to_norms, TensorParallel.all_reduce_rms_norm), Counter()

    def counted(self, x, residual, *args):
        calls["with a residual" if residual is not None else "without"] += 1
        return kept[1](self, x, residual, *args)

    TensorParallel.leaves_sums_to_norms, TensorParallel.all_reduce_rms_norm = lambda *_: True, counted
    try:
        yield calls
    finally:
        TensorParallel.leaves_sums_to_norms, TensorParallel.all_reduce_rms_norm = kept


def architectures_with_sums_left(rank: int, ranks: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    """The same where the norms make the sums. Returns tokens, and how many sums norms made, by name."""
    found = {}
    for name in names:
        with _sums_left() as calls:
            found |= architectures(rank, ranks, device, [name], {})
        found[f"{name}, sums"] = dict(calls)
    return found


def invariant_requests(rank: int, ranks: int, device: torch.device, names: list[str]) -> list[str]:
    """In the batch-invariant mode: a request's tokens and the bits of its logprobs are those that it has alone. Returns what were not."""
    wrong = []
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1)
    for name in names:
        with torch.no_grad(), optimize(tiny_model(name, device=str(device)), parallel=TensorParallel(device=device)) as handle:
            prompts = prompts_of((5, 33, 1, 70))

            def outcome(given: list[list[int]], **options) -> list[tuple]:
                completions = generate(handle, given, params, batch_invariant=True, **options)  # noqa: B023
                return [(x.tokens, [value.hex() for value in x.logprobs]) for x in completions]

            alone = [outcome([prompt])[0] for prompt in prompts]
            for label, found in (("together", outcome(prompts)), ("in small steps", outcome(prompts, max_rows=3, step_tokens=16))):
                if found != alone:
                    wrong.append(f"{name} {label}")
    return wrong


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


# ---- sums with a norm behind -----------------------------------------------------------------------------------------------------


def parts_of(ranks: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Each rank's x, of other magnitudes; a residual; a norm's weight."""
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(rows, width, generator=generator) * 2.0 ** (i - seed % 3)).to(dtype) for i in range(ranks)]
    residual = torch.randn(rows, width, generator=generator).mul(3).to(dtype)
    return parts, residual, torch.randn(width, generator=generator).to(dtype)


def wrong_norm(
    parts: list[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float, total: torch.Tensor,
    y: torch.Tensor, *, exact: bool = True,
) -> str | None:  # fmt: skip
    """Whether ``total`` and ``y`` are the sum of the ranks' parts and its norm: None, or what is wrong.

    The sum is that in float32 in the order of the ranks, rounded once; where not ``exact``, by a collective, it has up to two roundings of
    its own. The norm is of the sum that there is: off by a rounding, and by what sums in float32 are (docs/numerics.md, 7.1 and 7.2).
    """
    total, y, dtype = total.cpu(), y.cpu(), parts[0].dtype
    want = torch.zeros(parts[0].shape)
    for part in [*parts, *([] if residual is None else [residual])]:
        want = want + part.float()
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    if exact:
        if not torch.equal(total, want.to(dtype)):
            return "sum"
    else:
        magnitude = sum(part.abs().float() for part in parts) + (0 if residual is None else residual.abs().float())
        if not bool(((total.float() - want).abs() <= (len(parts) + 1) * unit * magnitude).all()):
            return "sum"
    truth = total.double()
    truth = truth / (truth.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    allowed = truth.abs() * (unit + 1.01 * (total.shape[-1] / 512 + 96) * 2.0**-24) + 2.0**-25
    return None if bool(((y.double() - truth).abs() <= allowed).all()) else "norm"


def norms_of_sums(rank: int, ranks: int, device: torch.device, collectives: bool = True) -> dict[str, Any]:
    """Sums with a norm behind them, of few rows and, with ``collectives``, many; in the batch-invariant mode with the bits that a row has
    alone; through peer memory also by turns with sums alone, and in CUDA graphs. Returns what was seen, and a sum of bits that all ranks
    must have."""
    parallel = TensorParallel(device=device)
    peers = parallel._exchange is not None
    found: dict[str, Any] = {"peers": peers, "one launch": 0, "wrong": [], "bits": 0}

    def check(label: str, have: tuple[torch.Tensor, torch.Tensor], problem: str | None) -> None:
        if problem is not None:
            found["wrong"].append(f"{label}: {problem}")
        found["bits"] += sum(int(x.view(torch.int16).long().sum()) for x in have)

    def call(parts, residual, weight, eps, offset) -> tuple[torch.Tensor, torch.Tensor]:
        x, to = parts[rank].to(device, copy=True), None if residual is None else residual.to(device, copy=True)
        torch.full_like(x, float("nan"))  # what a tensor is allocated in next
        y = parallel.all_reduce_rms_norm(x, to, weight.to(device), eps, offset)
        return (x if to is None else to), y

    sizes = [(rows, width) for rows in (1, 3, 16, 64) for width in (1024, 4096, 5120, 8192)]
    sizes += [(5, 8), (7, 72), (2, 520), (1, 16384), (3, 16384)]
    for dtype in (torch.bfloat16, torch.float16):
        for seed, (rows, width) in enumerate(sizes):
            one_launch = parallel.leaves_sums_to_norms(rows, width, dtype)
            found["one launch"] += one_launch
            parts, residual, weight = parts_of(ranks, rows, width, dtype, seed)
            for given in (residual, None):
                eps, offset = (1e-6, 0.0) if given is None else (1e-5, 1.0)
                have = call(parts, given, weight, eps, offset)
                label = f"{dtype} {rows} x {width}{'' if given is None else ' with a residual'}"
                check(label, have, wrong_norm(parts, given, weight, eps, offset, *have, exact=one_launch))
                if peers:
                    have = parallel.all_reduce(parts[rank].to(device))
                    check(f"{label}, alone", (have,), None if torch.equal(have.cpu(), _in_order(parts)) else "sum")

    with batch_invariant():
        for rows, width in ((300, 64), (300, 4096), (70, 8192)) if collectives else ((300, 64), (100, 4096), (60, 8192)):
            parts, residual, weight = parts_of(ranks, rows, width, torch.bfloat16, width)
            for given in (residual, None):
                have = call(parts, given, weight, 1e-6, 0.0)
                check(f"invariant {rows} x {width}", have, wrong_norm(parts, given, weight, 1e-6, 0.0, *have))
                for own in (slice(0, 1), slice(17, 18), slice(3, 20)):
                    alone = call([x[own] for x in parts], None if given is None else given[own], weight, 1e-6, 0.0)
                    same = all(torch.equal(x, y[own]) for x, y in zip(alone, have, strict=True))
                    check(f"invariant {rows} x {width}, {own}", alone, None if same else "other bits than among all")

    strided = parts_of(ranks, 6, 512, torch.bfloat16, 1)
    views = [torch.zeros(6, 2, 512, dtype=torch.bfloat16, device=device)[:, 1] for _ in range(2)]
    views[0].copy_(strided[0][rank]), views[1].copy_(strided[1])
    y = parallel.all_reduce_rms_norm(views[0], views[1], strided[2].to(device), 1e-6)
    problem = wrong_norm(*strided, 1e-6, 0.0, views[1], y, exact=parallel.leaves_sums_to_norms(6, 512, torch.bfloat16))
    check("views", (views[1].contiguous(), y), problem)
    if collectives:
        nothing = torch.zeros(0, 64, dtype=torch.bfloat16, device=device)
        assert parallel.all_reduce_rms_norm(nothing, None, nothing.new_ones(64)).shape == (0, 64)

    if peers:
        _replays(parallel, rank, ranks, device, check)
        parallel.close()
    return found


def _in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _replays(parallel: TensorParallel, rank: int, ranks: int, device: torch.device, check) -> None:
    """A graph of both kinds of sums."""
    rows, width, eps = 4, 4096, 1e-6
    x, residual = (torch.zeros(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = parts_of(ranks, rows, width, torch.bfloat16, 0)[2]
    on_device = weight.to(device)

    def step() -> list[torch.Tensor]:
        to, other = residual.clone(), x.clone()
        y = parallel.all_reduce_rms_norm(x.clone(), to, on_device, eps)
        alone = parallel.all_reduce(x.clone())
        z = parallel.all_reduce_rms_norm(other, None, on_device, eps, 1.0)
        return [to, y, alone, other, z]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        to, y, alone, other, z = step()
    for i in range(30):
        parts, added, _ = parts_of(ranks, rows, width, torch.bfloat16, 50 + i)
        x.copy_(parts[rank])
        residual.copy_(added)
        graph.replay()
        check(f"replay {i}", (to, y), wrong_norm(parts, added, weight, eps, 0.0, to, y))
        check(f"replay {i}, without a residual", (other, z), wrong_norm(parts, None, weight, eps, 1.0, other, z))
        check(f"replay {i}, alone", (alone,), None if torch.equal(alone.cpu(), _in_order(parts)) else "sum")
