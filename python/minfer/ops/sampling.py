"""Drawing the next token of each row of logits.

    ids, logprobs, _, _ = minfer.sample(logits, temperature=0.7, top_k=50, top_p=0.9, seed=1, offset=step)

One launch: no sort of the vocabulary, no synchronisation with the host. A row's draw is a function of its logits, its parameters, its seed
and its offset alone: the same bits in any batch, on any device of the same kind.
"""

from __future__ import annotations

from torch import Tensor

from .._core.operator import operator
from ..checks import sampling as checks
from ..reference import sampling as reference

__all__ = ["sample"]


@operator(check=checks.check_sample, reference=reference.sample)
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
    """A token of each row, drawn from softmax(logits / temperature), of what the other arguments make and leave of it. In this order:

    1. ``allowed``: the logits of other tokens become -inf.
    2. ``bias`` is added.
    3. Penalties: where counts != 0, l becomes l / repetition_penalty if it is positive, else l * repetition_penalty. Where counts > 0, it
       loses frequency_penalty * counts + presence_penalty.
    4. ``temperature`` divides. At 0 the token with the largest logit is taken, and the rest is left out.
    5. ``min_p`` drops tokens that are less than min_p times as probable as the most probable one.
    6. ``top_k`` keeps the k largest logits.
    7. ``top_p`` keeps, of those left, the fewest most probable tokens whose probabilities reach top_p of theirs. At least one is kept.
    8. The draw.

    Of equal logits that of the lower token comes first, everywhere.

    Args:
      logits: [rows, vocabulary], float16, bfloat16 or float32, 1 to 2^24 - 1 tokens; contiguous rows are read in place.
      temperature: finite in float32, not negative.
      top_k: -1 or 0, or the vocabulary or more: all.
      top_p: 0 to 1; 1: all.
      min_p: 0 to 1; 0: all.
      repetition_penalty: a normal float32 above 0; 1: none.
      presence_penalty, frequency_penalty: finite in float32.
      seed, offset: which noise, 64 bits each: for example a request's seed and the number of its tokens so far. Two rows with the same ones
        draw with the same noise.
      temperatures, top_ps, min_ps, repetition_penalties, presence_penalties, frequency_penalties: float32 [rows], each row's own, in place
        of the number. Their values are not checked: a negative temperature is 0; with one that is NaN nothing is drawn; top_ps and min_ps
        are cut off at the ends of their ranges.
      top_ks: int32 [rows]. seeds, offsets: int64 [rows].
      counts: int32 [rows, vocabulary]: how often each token has been generated; -1 for one that is in the prompt alone, which the
        repetition penalty is for. Penalties other than none need it.
      bias: float32 [rows, vocabulary] or [1, vocabulary].
      allowed: what may be drawn: bool [rows, vocabulary] or [1, vocabulary]; or int32 [rows, ceil(vocabulary / 32)] or [1, ...], where bit
        t % 32 of word t // 32 is that of token t, as grammars give it.
      top_logprobs: how many, 0 to 128, and at most the vocabulary.

    Returns:
      (ids, logprobs, top_ids, top_logprobs): ids int64 [rows]. logprobs float32 [rows]: of the ids, by log_softmax of the logits as they
      were given. The other two, int64 and float32 [rows, top_logprobs], are the largest logits as they were given, and their logprobs.

      A row has no distribution if behind step 3 all of it is -inf, one is NaN, or, unless the temperature is 0, one is +inf: its id is -1
      and its logprob NaN. Where the logits as they were given have a NaN or +inf, all logprobs of the row are NaN, and with a NaN its
      top_ids are -1.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: logits become float32, and all is computed in that, as in docs/numerics.md. What top_p and min_p keep is decided by
    probabilities relative to the largest, as integers in units of 2^-31, so that it does not depend on an order of addition; tokens of less
    than 2^-32 count as nothing there. There is no backward.

    Source: the draw is that of the largest of logits with Gumbel noise (Gumbel, 1954; Maddison et al., 2014), with Philox 4x32-10 (Salmon
    et al., 2011); top-p: Holtzman et al., 2020; min-p: Nguyen et al., 2024.
    """
