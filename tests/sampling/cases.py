"""What the CPU and GPU tests of minfer.sample share: parameters, the judgement of draws, the distribution's test."""

import math

import minfer
import torch

from tests.fuzz.truth import sampling as truth

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# (temperature, top_k, top_p, min_p)
RULES = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 300, 0.99, 0.0),  # more than the groups of threads bound
    (2.0, 3000, 0.95, 0.001),  # more than the lists hold
    (1.0, 128, 1.0, 0.02),
    (5.0, 0, 0.05, 0.0),  # most draws of all tokens are of one that top-p drops
    (1.0, 700, 1.0, 0.0),
)
NAMES = ("temperature", "top_k", "top_p", "min_p")


def options_of(rules) -> dict:
    return dict(zip(NAMES, rules, strict=True))


def judge(logits, v, rules, seeds, offsets, results, what=""):
    """Each row's draw. ``v``: logits behind mask, bias and penalties, float32; rules: (temperature, top_k, top_p, min_p) of each row."""
    ids, logprobs = (x.cpu() for x in results[:2])
    exact = logits.double().log_softmax(-1)
    for row, of_row in enumerate(rules):
        token = int(ids[row])
        told = f"{what}, row {row}, {of_row}: drew {token}"
        assert truth.accepts(token, v[row].double(), *of_row, int(seeds[row]), int(offsets[row])), told
        want = float(exact[row, token])
        assert abs(float(logprobs[row]) - want) <= 2e-5 + 1e-6 * abs(want), told


def judge_top(logits, results, n, what=""):
    """The largest logits as they were given."""
    want = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :n]
    assert torch.equal(results[2], want), what
    exact = logits.double().log_softmax(-1).gather(1, want)
    assert torch.allclose(results[3].double(), exact, atol=2e-5, rtol=1e-6), what


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """The probability of at least this distance, of counts from a distribution: tokens of which fewer than 10 are expected are one."""
    expected = p * counts.sum()
    rare = expected < 10
    assert not counts[p == 0].any(), "a token that is not kept was drawn"
    observed = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    if int(used.sum()) < 2:
        return 1.0
    statistic = ((observed - expected)[used].square() / expected[used]).sum()
    degrees = int(used.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), statistic / 2))


# Rows whose distributions are tested: (logits, rules).
def distributions():
    generator = torch.Generator().manual_seed(5)
    few = torch.randn(37, generator=generator)
    many = 1.5 * torch.randn(900, generator=generator)
    ties = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, -math.inf, 0.0, 0.0])
    yield "all", few, (1.0, 0, 1.0, 0.0)
    yield "hot", few, (3.0, 0, 1.0, 0.0)
    yield "cold", few, (0.4, 0, 1.0, 0.0)
    yield "flat", torch.zeros(257), (1.0, 0, 1.0, 0.0)
    yield "top-k", many, (1.0, 50, 1.0, 0.0)
    yield "top-k of ties", ties, (1.0, 4, 1.0, 0.0)
    yield "top-p", many, (0.8, 0, 0.87, 0.0)
    yield "top-k and top-p", many, (1.0, 40, 0.73, 0.0)
    yield "min-p", many, (1.0, 0, 1.0, 0.11)
    yield "all of them", many, (1.2, 60, 0.9, 0.02)


def draws(logits, rules, count, device="cpu", chunk=1 << 17):
    """How often each token is drawn, of ``count`` draws at other offsets each."""
    found = torch.zeros(len(logits), dtype=torch.int64)
    row = logits.to(device)[None]
    for first in range(0, count, chunk):
        offsets = torch.arange(first, min(first + chunk, count), device=device)
        ids = minfer.sample(row.expand(len(offsets), -1), **options_of(rules), seed=11, offsets=offsets)[0]
        found += torch.bincount(ids.cpu(), minlength=len(logits))
    return found


def greedy_ids(device):
    """Of temperatures 0, -0, -1 and a tiny negative one: rows of finite logits, and with +inf in the third."""
    temperatures = torch.tensor([0.0, -0.0, -1.0, -1e-38], device=device)
    rows = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4, 1).to(device)
    infinite = rows.clone()
    infinite[2, 1] = math.inf
    alone = int(minfer.sample(rows[:1], temperature=-0.0)[0])
    found = [minfer.sample(x, temperatures=temperatures)[0].tolist() for x in (rows, infinite)]
    assert alone == 2
    return found


BAD = {
    "logits of one mode": (dict(logits=torch.zeros(7)), "logits"),
    "logits of integers": (dict(logits=torch.zeros(2, 7, dtype=torch.int32)), "logits"),
    "float64 logits": (dict(logits=torch.zeros(2, 7, dtype=torch.float64)), "logits"),
    "no tokens": (dict(logits=torch.zeros(2, 0)), "logits"),
    "temperature -1": (dict(temperature=-1.0), "temperature"),
    "temperature nan": (dict(temperature=math.nan), "temperature"),
    "temperature inf": (dict(temperature=math.inf), "temperature"),
    "top_k -2": (dict(top_k=-2), "top_k"),
    "top_k 2^31": (dict(top_k=2**31), "top_k"),
    "top_p 1.1": (dict(top_p=1.1), "top_p"),
    "top_p nan": (dict(top_p=math.nan), "top_p"),
    "min_p -0.1": (dict(min_p=-0.1), "min_p"),
    "repetition_penalty 0": (dict(repetition_penalty=0.0), "repetition_penalty"),
    "presence_penalty inf": (dict(presence_penalty=math.inf), "presence_penalty"),
    "frequency_penalty nan": (dict(frequency_penalty=math.nan), "frequency_penalty"),
    "penalty without counts": (dict(presence_penalty=0.5), "counts"),
    "penalties without counts": (dict(repetition_penalties=torch.ones(2)), "counts"),
    "temperatures of another length": (dict(temperatures=torch.ones(3)), "temperatures"),
    "temperatures of another type": (dict(temperatures=torch.ones(2, dtype=torch.float64)), "temperatures"),
    "top_ks of another type": (dict(top_ks=torch.ones(2, dtype=torch.int64)), "top_ks"),
    "seeds of another type": (dict(seeds=torch.ones(2, dtype=torch.int32)), "seeds"),
    "offsets of two modes": (dict(offsets=torch.ones(2, 1, dtype=torch.int64)), "offsets"),
    "counts of another shape": (dict(counts=torch.ones(1, 9, dtype=torch.int32)), "counts"),
    "counts of another type": (dict(counts=torch.ones(2, 9)), "counts"),
    "bias of another shape": (dict(bias=torch.ones(2, 8)), "bias"),
    "bias of another type": (dict(bias=torch.ones(2, 9).half()), "bias"),
    "allowed of another type": (dict(allowed=torch.ones(2, 9)), "allowed"),
    "allowed of another shape": (dict(allowed=torch.ones(9, dtype=torch.bool)), "allowed"),
    "allowed bits of another shape": (dict(allowed=torch.ones(2, 9, dtype=torch.int32)), "allowed"),
    "top_logprobs -1": (dict(top_logprobs=-1), "top_logprobs"),
    "top_logprobs above the vocabulary": (dict(top_logprobs=10), "top_logprobs"),
}


def bad_call(name, device="cpu"):
    """Raises."""
    given = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in BAD[name][0].items()}
    logits = given.pop("logits", torch.zeros(2, 9, device=device))
    return minfer.sample(logits, **given)
