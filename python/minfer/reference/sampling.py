"""CPU kernel of sampling: the rules of cpp/include/minfer/sampling.h, row by row, with a sort in place of the search."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASS_BITS = 31  # probabilities relative to the largest are integers in units of 2^-31
LEAST_VARIATE = 2.0**-33
LOG2_E = 1.44269504
_WORD = 0xFFFFFFFF


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of products of unsigned 32-bit numbers, which int64 does not hold: of halves of b."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle << 16 | low & 0xFFFF) & _WORD


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> Tensor:
    """[n, 4] numbers of 32 random bits, int64, of n counters of four such numbers: Philox 4x32-10 (Salmon et al., 2011)."""
    key = [seed & _WORD, seed >> 32 & _WORD]
    c = list(counter)
    for _ in range(10):
        (high0, low0), (high1, low1) = _multiply(0xD2511F53, c[0]), _multiply(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return torch.stack(c, -1)


def noise(vocabulary: int, seed: int, offset: int) -> Tensor:
    """log2 of an exponentially distributed number for each token, float32."""
    quads = torch.arange((vocabulary + 3) // 4)
    rest = torch.zeros_like(quads)
    bits = philox((quads, rest, rest + (offset & _WORD), rest + (offset >> 32 & _WORD)), seed).view(-1)[:vocabulary]
    u, rest = ((x.float() + 0.5) * 2.0**-32 for x in (bits, _WORD - bits))
    series = u / 6 + 0.2
    for term in (0.25, 1 / 3, 0.5, 1.0):
        series = u * series + term
    variate = torch.where(u < 2.0**-4, u * series, rest.log2() * -math.log(2))
    return variate.clamp(min=LEAST_VARIATE).log2()


def processed(
    raw: Tensor,
    allowed: Tensor | None,
    allowed_bits: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """A row of float32 logits behind mask, bias and penalties."""
    v = raw
    if allowed is not None:
        v = torch.where(allowed, v, -math.inf)
    if allowed_bits is not None:
        tokens = torch.arange(len(v))
        bits = allowed_bits.long()[tokens // 32] >> tokens % 32 & 1
        v = torch.where(bits != 0, v, -math.inf)
    if bias is not None:
        v = v + bias
    if counts is not None:
        v = torch.where(counts != 0, torch.where(v > 0, v / repetition, v * repetition), v)
        v = torch.where(counts > 0, v - (counts * torch.tensor(frequency) + torch.tensor(presence)), v)
    return v


def kept_tokens(v: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Of a row: the tokens that may be drawn, largest logits first, and of equal ones the lower token."""
    top = v.max()
    order = v.sort(descending=True, stable=True).indices
    kept = v[order] > -math.inf
    if min_p > 0:
        least = (top + torch.tensor(min(min_p, 1.0)).log() * temperature).nan_to_num(nan=-math.inf)
        kept &= v[order] >= least
    order = order[kept]
    if 0 < top_k < len(v):
        order = order[:top_k]
    if top_p < 1:
        mass = (((v[order] - top) * _log2_scale(temperature)).exp2() * 2.0**MASS_BITS).round().long()
        target = max(math.ceil(max(top_p, 0.0) * float(mass.sum())), 1)
        order = order[mass.cumsum(0) - mass < target]
    return order


def logprobs_of(raw: Tensor) -> Tensor:
    return raw - raw.max() - (raw - raw.max()).exp().sum().log()


def _log2_scale(temperature: float) -> Tensor:
    """What a difference of logits is multiplied with for log2 of a probability's ratio."""
    return (torch.tensor(LOG2_E) / temperature).clamp(max=torch.finfo(torch.float32).max)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    temperatures: Tensor | None = None,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    repetition_penalties: Tensor | None = None,
    presence_penalties: Tensor | None = None,
    frequency_penalties: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    top_logprobs: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    ids = torch.full((rows,), -1, dtype=torch.int64)
    logprobs = torch.full((rows,), math.nan)
    top_ids = torch.full((rows, top_logprobs), -1, dtype=torch.int64)
    tops = torch.full((rows, top_logprobs), math.nan)
    bits = allowed if allowed is not None and allowed.dtype == torch.int32 else None
    mask = allowed if bits is None else None
    for row in range(rows):

        def of_row(value: float, values: Tensor | None, row: int = row) -> float:
            return torch.tensor(value, dtype=torch.float32).item() if values is None else values[row].item()

        def row_of(x: Tensor | None, row: int = row) -> Tensor | None:
            return None if x is None else x[0 if x.shape[0] == 1 else row]

        raw = logits[row].float()
        of_all = logprobs_of(raw) if vocabulary else raw
        if not raw.isnan().any():
            top = raw.sort(descending=True, stable=True).indices[:top_logprobs]
            top_ids[row], tops[row] = top, of_all[top]
        v = processed(
            raw,
            row_of(mask),
            row_of(bits),
            row_of(bias),
            row_of(counts),
            of_row(repetition_penalty, repetition_penalties),
            of_row(presence_penalty, presence_penalties),
            of_row(frequency_penalty, frequency_penalties),
        )
        t = of_row(temperature, temperatures)
        if vocabulary == 0 or v.isnan().any() or v.max() == -math.inf or math.isnan(t) or (t > 0 and v.max() == math.inf):
            continue
        if t <= 0:
            token = int((v == v.max()).nonzero()[0])
        else:
            k = top_k if top_ks is None else int(top_ks[row])
            kept = kept_tokens(v, t, k, of_row(top_p, top_ps), of_row(min_p, min_ps)).sort().values
            own_seed, own_offset = seed if seeds is None else int(seeds[row]), offset if offsets is None else int(offsets[row])
            variates = noise(vocabulary, own_seed, own_offset)
            token = int(kept[((v[kept] - v.max()) * _log2_scale(t) - variates[kept]).argmax()])
        ids[row], logprobs[row] = token, of_all[token]
    return ids, logprobs, top_ids, tops
