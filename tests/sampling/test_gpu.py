"""minfer.sample on a GPU: draws and distributions against float64, every way through the kernel, the same bits in every batch."""

import math

import minfer
import pytest
import torch

from tests.contracts.test_registration import check_op
from tests.fuzz.modes import poison_free_memory
from tests.fuzz.truth import sampling as truth
from tests.sampling.cases import (
    BAD,
    DTYPES,
    NAMES,
    RULES,
    bad_call,
    chi_square,
    distributions,
    draws,
    greedy_ids,
    judge,
    judge_top,
    options_of,
)
from tests.sampling.test_cpu import changed

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCABULARIES = (1, 7, 130, 3001, 32000, 50257, 128256, 151936, 262144, 600011)
KINDS = ("normal", "flat", "equal", "rising", "sharp")


def logits_of(kind, rows, vocabulary, dtype):
    x = {
        "normal": lambda: 2 * torch.randn(rows, vocabulary, device=DEVICE),
        "flat": lambda: 0.01 * torch.randn(rows, vocabulary, device=DEVICE),
        "equal": lambda: torch.zeros(rows, vocabulary, device=DEVICE),
        "rising": lambda: torch.arange(vocabulary, device=DEVICE).expand(rows, -1) * (8 / vocabulary),
        "sharp": lambda: 20 * torch.randn(rows, vocabulary, device=DEVICE),
    }[kind]()
    return x.to(dtype)


def tensors_of(rules):
    columns = dict(zip(NAMES, zip(*rules, strict=True), strict=True))
    return dict(
        temperatures=torch.tensor(columns["temperature"], device=DEVICE),
        top_ks=torch.tensor(columns["top_k"], dtype=torch.int32, device=DEVICE),
        top_ps=torch.tensor(columns["top_p"], device=DEVICE),
        min_ps=torch.tensor(columns["min_p"], device=DEVICE),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_rules(vocabulary, dtype, kind):
    torch.manual_seed(vocabulary)
    rows, n = len(RULES), min(20, vocabulary)
    logits = logits_of(kind, rows, vocabulary, dtype)
    seeds, offsets = torch.arange(rows, device=DEVICE) * 2**40 - 7, torch.arange(rows, device=DEVICE) + 2**35
    options = dict(seeds=seeds, offsets=offsets, top_logprobs=n) | tensors_of(RULES)
    poison_free_memory(torch.device(DEVICE, torch.cuda.current_device()))
    results = minfer.sample(logits, **options)
    judge(logits, logits.float(), RULES, seeds, offsets, results, kind)
    judge_top(logits, results, n, kind)
    for again in (minfer.sample(logits, **options), minfer.sample(torch.cat([logits] * 20), **repeated(options, 20))):
        for have, want in zip(again, results, strict=True):  # in any batch, of clusters of any size, the same bits
            assert torch.equal(have, want.repeat((20, 1)[: want.dim()] if len(have) > rows else (1,) * want.dim()))


def repeated(options, times):
    return {name: x.repeat(times) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("name, logits, rules", list(distributions()), ids=[name for name, *_ in distributions()])
def test_distribution(name, logits, rules):
    counts = draws(logits, rules, 1_000_000, DEVICE)
    assert chi_square(counts, truth.probabilities(logits, *rules)) > 1e-4


def test_distribution_of_many_tokens():
    """A cluster's threads take part: 10^5 draws of 60000 tokens, of which half are dropped, in 100 classes."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(60000, generator=generator)
    rules = (1.0, 30000, 1.0, 0.0)
    counts, p = draws(logits, rules, 100_000, DEVICE, chunk=1 << 13), truth.probabilities(logits, *rules)
    assert not counts[p == 0].any()
    assert chi_square(counts.view(100, -1).sum(1), p.view(100, -1).sum(1)) > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [517, 32000, 151936, 262144])
def test_mask_bias_penalties(vocabulary, dtype):
    torch.manual_seed(1)
    rows = len(RULES)
    logits = logits_of("normal", rows, vocabulary, dtype)
    counts = torch.randint(-1, 3, (rows, vocabulary), dtype=torch.int32, device=DEVICE)
    bias, allowed = torch.randn(1, vocabulary, device=DEVICE), torch.rand(rows, vocabulary, device=DEVICE) < 0.6
    repetition, presence, frequency = torch.rand(rows, device=DEVICE) + 0.7, torch.randn(rows), torch.randn(rows)
    presence, frequency = presence.to(DEVICE), frequency.to(DEVICE)
    v = changed(logits, counts, bias, allowed, repetition, presence, frequency)
    seeds, offsets = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE) * 3
    padded = torch.nn.functional.pad(allowed, (0, -vocabulary % 32)).view(rows, -1, 32).long()
    words = (padded << torch.arange(32, device=DEVICE)).sum(-1)
    bits = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    for mask in (allowed, bits):
        results = minfer.sample(
            logits,
            counts=counts,
            bias=bias,
            allowed=mask,
            repetition_penalties=repetition,
            presence_penalties=presence,
            frequency_penalties=frequency,
            seeds=seeds,
            offsets=offsets,
            top_logprobs=20,
            **tensors_of(RULES),
        )
        judge(logits, v, RULES, seeds, offsets, results)
        judge_top(logits, results, 20)
        assert allowed.gather(1, results[0][:, None]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_on_cpu(dtype):
    """The same tokens but for roundings of scores, and rows without a distribution."""
    torch.manual_seed(2)
    logits = logits_of("normal", 64, 5003, dtype)
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        logits[row, 1234] = value
    logits[3] = -math.inf
    for rules in RULES:
        offsets = torch.arange(64, device=DEVICE)
        have = minfer.sample(logits, **options_of(rules), offsets=offsets, top_logprobs=3)
        want = minfer.sample(logits.cpu(), **options_of(rules), offsets=offsets.cpu(), top_logprobs=3)
        assert int((have[0].cpu() != want[0]).sum()) <= 1
        same = have[0].cpu() == want[0]
        for a, b in zip(have[1:], want[1:], strict=True):
            assert torch.allclose(a.cpu()[same], b[same], atol=2e-5, rtol=1e-6, equal_nan=True)


def test_greedy_temperatures():
    assert greedy_ids(DEVICE) == greedy_ids("cpu")


def test_views_and_graphs():
    base = torch.randn(9, 32003, device=DEVICE).half()
    odd, aligned = base[:, 1:32001], base[:, 1:32001].contiguous()
    for have, want in zip(minfer.sample(odd, top_k=40, top_p=0.9), minfer.sample(aligned, top_k=40, top_p=0.9), strict=True):
        assert torch.equal(have, want)
    offsets = torch.zeros(9, dtype=torch.int64, device=DEVICE)
    minfer.sample(aligned, top_k=40, offsets=offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = minfer.sample(aligned, top_k=40, offsets=offsets)[0]
        offsets += 1
    for step in range(3):
        graph.replay()
        assert torch.equal(ids, minfer.sample(aligned, top_k=40, offset=step)[0])


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    with pytest.raises(RuntimeError, match=f"minfer::sample: {BAD[name][1]}"):
        bad_call(name, DEVICE)


def test_operator():
    logits, ones = torch.randn(3, 50, device=DEVICE), torch.ones(3, device=DEVICE)
    check_op(torch.ops.minfer.sample.default, (logits,), dict(top_k=5, temperatures=ones, top_logprobs=2))
