"""Continuous batching: requests come and go while a batch is decoded.

A step computes the next token of every request that has its prompt behind it, and as many tokens of prompts as ``step_tokens`` leaves room
for, in the order of arrival: long prompts come in chunks. A request begins when there is a row and there are pages for its prompt. Where
pages run out later, the newest request gives its own up, and begins again with what it has: its tokens stay what they were.

The host is one step behind the device: it launches a step before it has seen the last one's tokens. So a request that a token ended has
one more step, whose token nobody sees.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from .._core.batch_invariance import is_batch_invariant
from ..integrations.decoder.model import DecoderModel
from .pages import OutOfPages, PagePool
from .params import Completion, SamplingParams
from .request import Request
from .runner import Chunk, Drawn, Runner
from .text import TextStream

PAGE_SIZE = 64


class Token(NamedTuple):
    """What a stream callback gets for each token.

    Attributes:
      request: the request's number, in the order of arrival.
      token: its id; text: what it adds to the text, "" while a character or a possible stop string is incomplete, None without a tokenizer.
      logprob: with ``SamplingParams.logprobs``.
      finish_reason: of the request's last one.
    """

    request: int
    token: int
    text: str | None
    logprob: float | None
    finish_reason: str | None


class Engine:
    """Requests over one model.

    Args:
      model: what is run.
      eos_token_ids: tokens that end requests which do not ignore them.
      tokenizer: for text and stop strings; anything with ``decode(ids, skip_special_tokens=)``. None: tokens alone.
      kv_format: of the cache, as in :func:`minfer.allocate_kv_cache`.
      max_length: tokens of the longest sequence. Tables of rotations must reach as far.
      max_rows: requests that run at a time.
      cache_tokens: tokens that the cache has room for, rounded up to pages; None: 90 % of the GPU's free memory, or on a CPU
        ``max_rows`` sequences of ``max_length``.
      step_tokens: tokens of a step, at most.
      share_prefixes: whether requests that begin alike share pages.
      graphs: whether steps of decoding, and layers of short chunks of prompts, are CUDA graphs.
      stream: called with a :class:`Token` for each.
      batch_invariant: whether steps are computed in the batch-invariant mode (:class:`minfer.batch_invariant`), whatever the mode around
        them is; None: as it is now. Then the tokens and logprobs of a request with a seed have the same bits whatever other requests there
        are and when they come, in whatever chunks prompts are computed, with graphs or without, and whether its pages were taken from it.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: object | None = None,
        kv_format: str = "16bit",
        max_length: int,
        max_rows: int = 256,
        cache_tokens: int | None = None,
        step_tokens: int = 8192,
        share_prefixes: bool = True,
        graphs: bool = True,
        stream: Callable[[Token], None] | None = None,
        batch_invariant: bool | None = None,
    ):
        for name, value in (("max_length", max_length), ("max_rows", max_rows), ("step_tokens", step_tokens)):
            if value < 1:
                raise ValueError(f"Engine: {name} must be 1 or more, got {value}")
        if step_tokens < max_rows:
            raise ValueError(f"Engine: step_tokens must be max_rows = {max_rows} or more, got {step_tokens}")
        self.model, self.tokenizer, self.stream = model, tokenizer, stream
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_length, self.max_rows, self.step_tokens = max_length, max_rows, step_tokens
        pages = self._pages(cache_tokens, kv_format)
        if model.parallel is not None:
            pages = model.parallel.least(pages)  # all ranks take the same steps
        self.pool = PagePool(pages, PAGE_SIZE, share_prefixes)
        self.batch_invariant = is_batch_invariant() if batch_invariant is None else batch_invariant
        options = dict(kv_format=kv_format, graphs=graphs, batch_invariant=self.batch_invariant)
        self.runner = Runner(model, rows=max_rows, pages=pages, page_size=PAGE_SIZE, **options)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they began
        self._rows: list[Request | None] = [None] * max_rows
        self._pending: tuple[list[Request], Drawn] | None = None
        self._texts: dict[int, TextStream] = {}
        self._count = 0
        self.steps = 0

    def _pages(self, cache_tokens: int | None, kv_format: str) -> int:
        of_sequence = -(-self.max_length // PAGE_SIZE)
        if cache_tokens is not None:
            return max(-(-cache_tokens // PAGE_SIZE), 1)
        if self.model.device.type != "cuda":
            return of_sequence * self.max_rows
        free, _ = torch.cuda.mem_get_info(self.model.device)
        idle = torch.cuda.memory_reserved(self.model.device) - torch.cuda.memory_allocated(self.model.device)
        pages = int(0.9 * (free + idle)) // Runner.bytes_of_page(self.model, PAGE_SIZE, kv_format)
        return max(min(pages, of_sequence * self.max_rows), 1)

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Adds a request.

        Raises:
          ValueError: the prompt is empty, has tokens that the model does not know, or is longer with what is to be generated than
            ``max_length`` or the whole cache; or a parameter cannot be right for this model. Other requests are not touched.
        """
        params, prompt = params or SamplingParams(), [int(token) for token in prompt]

        def require(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(f"generate: request {self._count}: {message}")

        require(bool(prompt), "the prompt is empty: it must have one token or more")
        vocabulary = self.model.vocabulary
        strange = next((token for token in prompt if not 0 <= token < self.model.embedding.shape[0]), None)
        require(strange is None, f"the prompt has token {strange}, and the model has tokens 0 to {vocabulary - 1}")
        strange = next((token for token in params.stop_token_ids if not 0 <= token < vocabulary), None)
        require(strange is None, f"stop_token_ids has {strange}, and the model has tokens 0 to {vocabulary - 1}")
        total = len(prompt) + params.max_new_tokens
        has = f"the prompt has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}"
        require(total <= self.max_length, f"{has}: that is more than max_length = {self.max_length}")
        room = self.pool.count * PAGE_SIZE
        require(total <= room, f"{has}: that is more than the {room} tokens that the cache has room for")
        require(not params.stop or self.tokenizer is not None, "stop strings need a tokenizer")
        require((params.logprobs or 0) <= vocabulary, f"logprobs must be at most the vocabulary, {vocabulary}, got {params.logprobs}")
        seed = random.getrandbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        completion = Completion(prompt)
        if params.logprobs is not None:
            completion.logprobs, completion.top_logprobs = [], []
        request = Request(self._count, params, completion, seed, stops)
        self._count += 1
        if self.tokenizer is not None:
            self._texts[request.index] = TextStream(self.tokenizer, params.stop)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request; what it has stays."""
        if not request.finished:
            self._finish(request, "cancelled", None)
            if request in self.waiting:
                self.waiting.remove(request)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """The logprob of each token behind those before it, by a forward pass over known tokens, of all but the first.

        In the batch-invariant mode they are the bits that requests have: ``score(c.prompt + c.tokens)[len(c.prompt) - 1:] == c.logprobs``.
        Where the cache is int4 they are not, because a token's newest keys are not quantised when it is drawn.

        Raises:
          ValueError: there are fewer than two tokens, some that the model does not know, or more than ``max_length``, or than the cache has
            room for. RuntimeError: requests are under way.
        """
        tokens = [int(token) for token in tokens]
        if self.busy:
            raise RuntimeError("Engine.score: requests are under way: let them end first")
        known = min(self.model.embedding.shape[0], self.model.vocabulary)
        strange = next((token for token in tokens if not 0 <= token < known), None)
        most = min(self.max_length, self.pool.count * PAGE_SIZE)
        if strange is not None or not 2 <= len(tokens) <= most:
            what = f"{len(tokens)} tokens" if strange is None else f"token {strange}"
            raise ValueError(f"Engine.score: tokens must be 2 to {most}, of 0 to {known - 1}, got {what}")
        params, found = SamplingParams(max_new_tokens=1), []
        self.runner.begin(0, params, 0, tokens, [])
        pages = self.pool.allocate(-(-len(tokens) // PAGE_SIZE))
        try:
            for start in range(0, len(tokens) - 1, self.step_tokens):
                end = min(start + self.step_tokens, len(tokens) - 1)
                chunk = Chunk(0, tokens[start:end], start, pages, False, 0)
                found += self.runner.score(chunk, tokens[start + 1 : end + 1]).tolist()
        finally:
            self.pool.release(pages)
        return found

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._pending)

    def run(self) -> None:
        """Steps until all requests are finished."""
        while self.busy:
            self.step()

    # ---- steps -----------------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launches the next step, and takes in the tokens of the last one."""
        before = self._pending
        chunks, requests = self._schedule()
        launched = None
        if chunks:
            drawn = self.runner.run(chunks, [request.params for request in requests])
            self.steps += 1
            for chunk, request in zip(chunks, requests, strict=True):
                request.stored = chunk.start + chunk.count
                request.launched += chunk.draws
                self._fill(request)
            launched = ([request for chunk, request in zip(chunks, requests, strict=True) if chunk.draws], drawn)
        self._take_in()
        self._pending = launched
        if not chunks and before is None and (self.waiting or self.running):  # what submit checks leaves no room for this
            state = f"{len(self.waiting)} requests wait and {len(self.running)} run beside {self.pool.free} free pages"
            raise AssertionError(f"{state}: none can go on")

    def _schedule(self) -> tuple[list[Chunk], list[Request]]:
        """What the next step computes, in the order of rows."""
        for request in list(self.running):
            if self._decodes(request):
                self._reserve(request, request.stored + 1)
        budget = self.step_tokens
        work: list[tuple[Request, Chunk]] = []
        for request in self.running:
            if self._decodes(request):
                work.append((request, Chunk(request.row, None, request.stored, request.pages, True, request.launched)))
                budget -= 1
        for request in list(self.running):
            if budget > 0 and not request.finished and not self._has_prompt(request):
                budget -= self._add_chunk(work, request, budget)
        while budget > 0 and self.waiting and self._begin():
            budget -= self._add_chunk(work, self.running[-1], budget)
        self._close_ranks(work)
        work.sort(key=lambda item: item[0].row)
        return [chunk._replace(row=request.row) for request, chunk in work], [request for request, _ in work]

    def _decodes(self, request: Request) -> bool:
        """Whether a request is to get its next token."""
        goes_on = request.row >= 0 and not request.finished and request.launched < request.params.max_new_tokens
        return goes_on and self._has_prompt(request)

    @staticmethod
    def _has_prompt(request: Request) -> bool:
        """Whether all tokens that the host knew when the request began are computed."""
        return request.stored >= request.begun

    def _add_chunk(self, work: list[tuple[Request, Chunk]], request: Request, budget: int) -> int:
        tokens = request.tokens[request.stored : min(request.begun, request.stored + budget)]
        draws = request.stored + len(tokens) == request.begun
        work.append((request, Chunk(request.row, tokens, request.stored, request.pages, draws, request.launched)))
        return len(tokens)

    def _begin(self) -> bool:
        """Gives the first of those that wait a row and pages, if there are any."""
        request = self.waiting[0]
        row = next((index for index, user in enumerate(self._rows) if user is None), None)
        if row is None:
            return False
        tokens = request.tokens
        shared = self.pool.shared(tokens)
        wanted = -(-len(tokens) // PAGE_SIZE) - len(shared)
        # Those that run need their next pages soon.
        if wanted + min(len(self.running), self.pool.count // 8) > self.pool.free and self.running:
            self.pool.release(shared)
            return False
        try:
            request.pages = shared + self.pool.allocate(wanted)
        except OutOfPages:
            self.pool.release(shared)
            if not self.running and self._pending is None:
                raise
            return False
        self.waiting.popleft()
        request.row, self._rows[row] = row, request
        request.stored = len(shared) * PAGE_SIZE
        request.filled, request.begun = len(shared), len(tokens)
        if not request.completion.preemptions:
            request.completion.cached_tokens = request.stored
        self.runner.begin(row, request.params, request.seed, request.completion.prompt, request.completion.tokens)
        self.running.append(request)
        return True

    def _reserve(self, request: Request, tokens: int) -> None:
        """Pages for as many tokens of a request; the newest ones give theirs up where there are too few."""
        while len(request.pages) * PAGE_SIZE < tokens:
            try:
                request.pages += self.pool.allocate(1)
                return
            except OutOfPages:
                self._take_in()  # all tokens of those who give up must be known; some may be finished by them
                if request.finished:
                    return
                if self.pool.free == 0:
                    self._preempt(self.running[-1])
                if request.row < 0:
                    return

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.completion.preemptions += 1
        request.launched = len(request.completion.tokens)
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.pool.release(request.pages)
        self.running.remove(request)
        self._rows[request.row] = None
        request.pages, request.row, request.stored, request.filled = [], -1, 0, 0

    def _close_ranks(self, work: list[tuple[Request, Chunk]]) -> None:
        """Moves the last rows into free ones where a step would compute many rows of nobody."""
        used = [request for request in self._rows if request is not None]
        if not used or self.waiting:
            return
        last = max(request.row for request in used)
        while last + 1 > len(used) + len(used) // 4:
            free = self._rows.index(None)
            request = self._rows[last]
            self.runner.move(last, free)
            self._rows[free], self._rows[last], request.row = request, None, free
            last = max(request.row for request in used)

    def _fill(self, request: Request) -> None:
        """Makes full pages known, as far as the host knows their tokens."""
        end = min(request.stored, len(request.completion.prompt) + len(request.completion.tokens))
        if (request.filled + 1) * PAGE_SIZE > end:
            return
        known = request.tokens
        while (request.filled + 1) * PAGE_SIZE <= end:
            begin = request.filled * PAGE_SIZE
            self.pool.fill(request.pages, request.filled, known[begin : begin + PAGE_SIZE])
            request.filled += 1

    # ---- tokens ----------------------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Waits for the tokens that are on their way."""
        if self._pending is None:
            return
        (requests, drawn), self._pending = self._pending, None
        if not requests:
            return
        ids, logprobs, top_ids, top_logprobs = (x.tolist() for x in drawn.wait())
        now = time.perf_counter()
        for index, request in enumerate(requests):
            if not request.finished:
                self._token(request, ids[index], logprobs[index], list(zip(top_ids[index], top_logprobs[index], strict=True)), now)

    def _token(self, request: Request, token: int, logprob: float, top: list[tuple[int, float]], now: float) -> None:
        completion, params = request.completion, request.params
        if token < 0:
            self._finish(request, "error", "the logits have no distribution: NaN, or all of them are -inf")
            return
        completion.tokens.append(token)
        completion.token_times.append(now - request.arrival)
        if completion.logprobs is not None:
            completion.logprobs.append(logprob)
            completion.top_logprobs.append(top[: params.logprobs])
        text = self._texts.get(request.index)
        ended = token in request.stops
        piece = None if text is None else text.add(token, special=ended)
        if ended:
            self._finish(request, "stop", token)
        elif text is not None and text.stopped is not None:
            self._finish(request, "stop", text.stopped)
        elif len(completion.tokens) >= params.max_new_tokens:
            self._finish(request, "length", None)
        if request.finished and text is not None and piece is not None:
            piece += text.rest()
        if self.stream is not None:
            self.stream(Token(request.index, token, piece, None if completion.logprobs is None else logprob, completion.finish_reason))

    def _finish(self, request: Request, reason: str, stop: int | str | None) -> None:
        request.completion.finish_reason, request.completion.stop = reason, stop
        text = self._texts.pop(request.index, None)
        if text is not None:
            request.completion.text = text.whole()
        if request.row >= 0:
            self._fill(request)
            self._leave(request)
