"""A request on its way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .params import Completion, SamplingParams


@dataclass(eq=False)
class Request:
    """The state of one request.

    Attributes:
      index: its number, in the order of arrival.
      params, completion: what it asks for and what it has.
      seed: of its draws.
      stops: tokens that end it.
      pages: of its sequence, in order; row: its row in the batch, or -1.
      stored: tokens of its sequence whose keys and values are in pages.
      launched: tokens that were drawn or are being drawn: a step whose tokens the host has not seen yet counts.
      filled: pages that are known to the pool as full.
      begun: tokens that it had when it got its row: these are computed in chunks, later ones as they are drawn.
    """

    index: int
    params: SamplingParams
    completion: Completion
    seed: int
    stops: frozenset[int]
    arrival: float = field(default_factory=time.perf_counter)
    pages: list[int] = field(default_factory=list)
    row: int = -1
    stored: int = 0
    launched: int = 0
    filled: int = 0
    begun: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens that the host knows."""
        return self.completion.prompt + self.completion.tokens

    @property
    def length(self) -> int:
        """Tokens of its sequence, those in flight included."""
        return len(self.completion.prompt) + self.launched

    @property
    def limit(self) -> int:
        """Tokens of the longest sequence that it may become."""
        return len(self.completion.prompt) + self.params.max_new_tokens

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None
