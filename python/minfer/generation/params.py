"""What a request asks for."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are drawn, and when it ends; the draw is :func:`minfer.sample`'s, in its order of steps.

    Attributes:
      max_new_tokens: at most as many tokens, 1 or more.
      temperature: 0: the most probable token (greedy).
      top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: as in :func:`minfer.sample`; -1 or 0, 1, 0, 1, 0 and 0
        change nothing.
      seed: of the draws; a request's tokens are a function of its prompt, these parameters and the seed, whatever else runs. None: a
        random one.
      stop_token_ids: tokens that end the request, beside the model's own end-of-sequence tokens.
      stop: strings that end the request; the text returned ends before them. They need a tokenizer.
      ignore_eos: go on behind the model's end-of-sequence tokens.
      logprobs: None, or for each token its logprob and those of as many most probable ones, 0 to 128, by log_softmax of the logits as the
        model gives them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, wanted: str) -> None:
            if not condition:
                raise ValueError(f"SamplingParams: {name} must be {wanted}, got {getattr(self, name)!r}")

        def number(name: str) -> float:
            value = getattr(self, name)
            good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            require(good, name, "a finite number")
            return float(value)

        def whole(x: object) -> bool:
            return isinstance(x, numbers.Integral) and not isinstance(x, bool)

        require(whole(self.max_new_tokens) and self.max_new_tokens >= 1, "max_new_tokens", "an integer of 1 or more")
        require(number("temperature") >= 0, "temperature", "0 or more")
        require(whole(self.top_k) and self.top_k >= -1, "top_k", "an integer of -1 or more")
        require(0 <= number("top_p") <= 1, "top_p", "0 to 1")
        require(0 <= number("min_p") <= 1, "min_p", "0 to 1")
        require(number("repetition_penalty") > 1e-30, "repetition_penalty", "above 0")
        number("presence_penalty"), number("frequency_penalty")
        require(self.seed is None or (whole(self.seed) and -(2**63) <= self.seed < 2**63), "seed", "None or an integer of 64 bits")
        for name, kind in (("stop_token_ids", "integers"), ("stop", "strings")):
            if isinstance(getattr(self, name), str | int):
                object.__setattr__(self, name, (getattr(self, name),))
            values = getattr(self, name)
            good = isinstance(values, Sequence) and all(whole(x) if name == "stop_token_ids" else isinstance(x, str) and x for x in values)
            require(good, name, f"a sequence of {kind}" + (", none empty" if name == "stop" else ""))
        require(self.logprobs is None or (whole(self.logprobs) and 0 <= self.logprobs <= 128), "logprobs", "None or 0 to 128")

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass
class Completion:
    """What a request gave.

    Attributes:
      prompt: its tokens.
      tokens: those generated, the one that ended it included.
      text: of the tokens, less special ones and what a stop string cut off; None without a tokenizer.
      finish_reason: "stop", "length", or "error".
      stop: the token or string that ended it, where one did; of an error what it was.
      logprobs: with ``SamplingParams.logprobs``: of each token.
      top_logprobs: of each token [(token, logprob), ...], by descending logprob.
      token_times: seconds from the request's arrival to each token.
      preemptions: how often its pages were taken for others, and it was computed again.
      cached_tokens: tokens of the prompt whose keys and values were there already.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    stop: int | str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0
    cached_tokens: int = 0
