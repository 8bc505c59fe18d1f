"""minfer.sample on CPU: distributions against float64, ties, rows without one, mask, bias and penalties, errors, fakes, torch.compile."""

import math

import minfer
import pytest
import torch
from minfer.reference import sampling as reference

from tests.contracts.test_registration import check_op
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

# Random123's vectors: counter, key, result.
PHILOX = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((truth.WORD,) * 4, (truth.WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize("counter, key, want", PHILOX)
def test_philox(counter, key, want):
    assert truth.philox(counter, key) == want
    assert tuple(int(word) for word in truth.philox(tuple(torch.tensor([word]) for word in counter), key)) == want
    of_tensors = reference.philox(tuple(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
    assert tuple(of_tensors[0].tolist()) == want


def test_noise_is_exponential():
    """The mean and the smallest of 2^17 numbers, and that each is the one of its place."""
    e = reference.noise(1 << 17, 3, 9 << 33).double().exp2()
    assert abs(float(e.mean()) - 1) < 0.01 and 1e-7 < float(e.min()) < 1e-4
    torch.testing.assert_close(e, truth.exponentials(torch.arange(1 << 17), 3, 9 << 33), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name, logits, rules", list(distributions()), ids=[name for name, *_ in distributions()])
def test_distribution(name, logits, rules):
    counts = draws(logits, rules, 4000)
    assert chi_square(counts, truth.probabilities(logits, *rules)) > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 5, 130, 3001])
def test_rules(vocabulary, dtype):
    torch.manual_seed(vocabulary)
    rows = len(RULES)
    logits = (2 * torch.randn(rows, vocabulary)).to(dtype)
    columns = dict(zip(NAMES, zip(*RULES, strict=True), strict=True))
    seeds, offsets = torch.arange(rows) * 2**40 - 7, torch.arange(rows) + 2**35
    n = min(5, vocabulary)
    results = minfer.sample(
        logits,
        temperatures=torch.tensor(columns["temperature"]),
        top_ks=torch.tensor(columns["top_k"], dtype=torch.int32),
        top_ps=torch.tensor(columns["top_p"]),
        min_ps=torch.tensor(columns["min_p"]),
        seeds=seeds,
        offsets=offsets,
        top_logprobs=n,
    )
    judge(logits, logits.float(), RULES, seeds, offsets, results)
    judge_top(logits, results, n)
    for row, rules in enumerate(RULES):  # numbers in place of tensors, and another batch: the same
        alone = minfer.sample(logits[row : row + 1], **options_of(rules), seed=int(seeds[row]), offset=int(offsets[row]))
        assert int(alone[0]) == int(results[0][row]) and float(alone[1]) == float(results[1][row])


def test_ties_go_to_the_lower_token():
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, -0.0, 2.0]])
    assert int(minfer.sample(logits, temperature=0.0)[0]) == 1
    for offset in range(50):
        assert int(minfer.sample(logits, top_k=2, offset=offset)[0]) in (1, 3)
        assert int(minfer.sample(logits, top_k=5, offset=offset)[0]) != 2
        assert int(minfer.sample(logits, top_p=0.5, offset=offset)[0]) in (1, 3)
    zeros = torch.tensor([[-0.0, 0.0, -0.0]])
    assert int(minfer.sample(zeros, temperature=0.0)[0]) == 0
    assert minfer.sample(zeros, top_logprobs=3)[2].tolist() == [[0, 1, 2]]


def test_greedy_temperatures():
    """0 of either sign and what is below."""
    assert greedy_ids("cpu") == [[2, 2, 2, 2], [2, 2, 1, 2]]


def test_parameters_beyond_their_ranges():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert int(minfer.sample(logits, top_ps=torch.tensor([-math.inf]))[0]) == 1
    assert int(minfer.sample(logits, temperatures=torch.tensor([math.inf]), min_ps=torch.tensor([1.0]))[0]) in (0, 1, 2)


def test_rows_without_a_distribution():
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[0.0, 1.0, 2.0], [nan, 1.0, 2.0], [-inf, -inf, -inf], [0.0, inf, 2.0], [-inf, 5.0, -inf]])
    ids, logprobs, top_ids, tops = minfer.sample(logits, top_logprobs=2)
    assert ids.tolist()[1:] == [-1, -1, -1, 1] and int(ids[0]) >= 0
    assert logprobs.isnan().tolist() == [False, True, True, True, False] and float(logprobs[4]) == 0.0
    assert top_ids.tolist() == [[2, 1], [-1, -1], [0, 1], [1, 2], [1, 0]]
    assert tops.isnan().any(1).tolist() == [False, True, True, True, False] and float(tops[4, 1]) == -inf
    ids, logprobs, _, _ = minfer.sample(logits, temperature=0.0)
    assert ids.tolist() == [2, -1, -1, 1, 1] and bool(logprobs[3].isnan())
    allowed = torch.tensor([[False, True, True]])
    assert int(minfer.sample(logits[1:2], allowed=allowed)[0]) in (1, 2)  # a NaN that is not allowed does not matter
    assert minfer.sample(logits[:1], allowed=~allowed.bool() & allowed)[0].tolist() == [-1]
    assert minfer.sample(logits[:1], temperatures=torch.tensor([nan]))[0].tolist() == [-1]


def changed(logits, counts, bias, allowed, repetition, presence, frequency):
    """The documentation's steps 1 to 3."""
    v = torch.where(allowed, logits.float(), -math.inf) + bias
    v = torch.where(counts != 0, torch.where(v > 0, v / repetition[:, None], v * repetition[:, None]), v)
    return torch.where(counts > 0, v - (frequency[:, None] * counts + presence[:, None]), v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_bias_penalties(dtype):
    torch.manual_seed(1)
    rows, vocabulary = 6, 517
    logits = (2 * torch.randn(rows, vocabulary)).to(dtype)
    counts = torch.randint(-1, 3, (rows, vocabulary), dtype=torch.int32)
    bias, allowed = torch.randn(1, vocabulary), torch.rand(rows, vocabulary) < 0.6
    repetition, presence, frequency = torch.rand(rows) + 0.7, torch.randn(rows), torch.randn(rows)
    v = changed(logits, counts, bias, allowed, repetition, presence, frequency)
    options = dict(counts=counts, bias=bias, repetition_penalties=repetition, presence_penalties=presence, frequency_penalties=frequency)
    seeds, offsets = torch.arange(rows), torch.arange(rows) * 3
    words = torch.zeros(rows, 17, dtype=torch.int64)
    for token in range(vocabulary):
        words[:, token // 32] |= allowed[:, token].long() << token % 32
    bits = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    for mask in (allowed, bits):
        results = minfer.sample(logits, allowed=mask, top_k=20, seeds=seeds, offsets=offsets, top_logprobs=4, **options)
        judge(logits, v, [(1.0, 20, 1.0, 0.0)] * rows, seeds, offsets, results)
        judge_top(logits, results, 4)
        assert allowed.gather(1, results[0][:, None]).all()


def test_views():
    base = torch.randn(5, 2 * 40)
    view = base[:, ::2]
    assert torch.equal(minfer.sample(view)[0], minfer.sample(view.contiguous())[0])
    row = torch.randn(1, 40).expand(5, 40)
    ids = minfer.sample(row)[0]
    assert (ids == ids[0]).all()  # one seed and offset: one draw
    assert minfer.sample(torch.zeros(0, 5))[0].shape == (0,)


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    with pytest.raises(RuntimeError, match=f"minfer::sample: {BAD[name][1]}"):
        bad_call(name)


def test_operator():
    logits, ones = torch.randn(3, 50), torch.ones(3)
    check_op(torch.ops.minfer.sample.default, (logits,), dict(top_k=5, temperatures=ones, top_logprobs=2))

    @torch.compile(fullgraph=True, dynamic=True)
    def step(logits, offset):
        return minfer.sample(logits, temperature=0.8, top_p=0.9, offset=offset)

    assert torch.equal(step(logits, 7)[0], minfer.sample(logits, temperature=0.8, top_p=0.9, offset=7)[0])


def test_fake():
    results = minfer.sample(torch.zeros(4, 9, device="meta"), top_logprobs=3)
    assert [tuple(x.shape) for x in results] == [(4,), (4,), (4, 3), (4, 3)]
    assert [x.dtype for x in results] == [torch.int64, torch.float32] * 2
