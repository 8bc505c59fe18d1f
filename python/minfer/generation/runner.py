"""Steps of a model over a paged cache: chunks of prompts and single tokens, and what is drawn behind them.

Rows. A request has a row of the batch from its first step to its last. What the device keeps of a row: its newest token, the parameters of
its draws, for penalties how often each token came, and for int4 caches the newest keys and values (``KvCache.k_residual``).

Host and device. Positions, slots and lengths follow from what the host knows before a token is drawn, and go to the device in one copy; the
drawn token goes from one step to the next on the device. So the host launches a step while the last one runs, and sees its tokens later.

Graphs. A step in which each row adds one token is a CUDA graph, captured at the first step of as many rows (rounded up to
:data:`GRAPH_ROWS`), as many pages of the longest sequence (a power of two) and the same kinds of draws. Of a step with chunks of prompts,
up to 1024 tokens (rounded up to :data:`GRAPH_TOKENS`), the layers are a graph, captured when such a step comes again: the host takes 0.2
to 0.5 ms to launch a layer, which is longer than the device computes it. Padding tokens are of no sequence, are stored nowhere, and attend
to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core import batch_invariance
from ..formats.kv_cache import KvCache, allocate_kv_cache
from ..integrations.decoder import Attention
from ..integrations.decoder.block import AttendsToOne, OneToken
from ..integrations.decoder.layer import Pending
from ..integrations.decoder.model import DecoderModel
from ..ops.attention import attention_paged
from ..ops.kv_cache import kv_cache_append, qk_norm_rope_append
from ..ops.sampling import sample
from .params import SamplingParams

GRAPH_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
GRAPH_TOKENS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
_MOST_CHUNK_GRAPHS = 64
_GROUP_TOKENS = 32  # of int4 keys
_MANY = 16  # tokens of a chunk
_SCORED = 256  # tokens whose logits are in memory at a time


class Chunk(NamedTuple):
    """What a step computes of one row.

    Attributes:
      row: of the batch.
      tokens: the sequence's next ones; None: the one that the row drew last.
      start: place of the first of them in the sequence.
      pages: of the sequence.
      draws: whether a token is drawn behind them; offset: how many were drawn before it.
    """

    row: int
    tokens: Sequence[int] | None
    start: int
    pages: Sequence[int]
    draws: bool
    offset: int

    @property
    def count(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)


class Drawn:
    """What a step drew, in the order of its chunks that draw: on its way to the host."""

    def __init__(self, tensors: Sequence[Tensor], ready: torch.cuda.Event | None, places: Sequence[int] | None = None):
        self._tensors, self._ready, self._places = tensors, ready, places

    def wait(self) -> list[Tensor]:
        """ids, logprobs, top_ids and top_logprobs of :func:`minfer.sample`, when they are there."""
        if self._ready is not None:
            self._ready.synchronize()
        return list(self._tensors) if self._places is None else [x[self._places] for x in self._tensors]


@dataclass(frozen=True)
class _Draws:
    """What draws need beside the logits: these change what is captured."""

    random: bool
    penalties: bool
    top_logprobs: int


class _Attend(AttendsToOne):
    """The attention of one layer in a step."""

    def __init__(self, cache: KvCache, rotations: dict[str, Tensor]):
        self.cache, self.rotations = cache, rotations
        self.step: _StepTensors | None = None

    def __call__(self, attention: Attention, qkv: Tensor) -> Tensor:
        step, cache = self.step, self.cache
        if cache.k_residual is not None:
            rows = step.seq_lens.shape[0]
            cache = cache._replace(k_residual=cache.k_residual[:rows], v_residual=cache.v_residual[:rows])
        qkv = qkv.view(-1, attention.heads + 2 * attention.heads_kv, attention.head_dim)
        if attention.rotary is None:
            q, k, v = qkv.split([attention.heads, attention.heads_kv, attention.heads_kv], 1)
            kv_cache_append(k, v, cache.k, cache.v, step.slots, cu_seqlens=step.cu_seqlens, **cache.scales())
        else:
            norm = attention.q_norm
            options = {} if norm is None else {"eps": norm.eps, "weight_offset": norm.weight_offset}
            q = qk_norm_rope_append(
                qkv,
                None if norm is None else norm.weight,
                None if norm is None else attention.k_norm.weight,
                self.rotations[attention.rotary],
                step.positions,
                cache.k,
                cache.v,
                step.slots,
                rotary_dim=attention.rotary_dim,
                cu_seqlens=step.cu_seqlens,
                **options,
                **cache.scales(),
            )
        y, _ = attention_paged(
            q,
            cache.k,
            cache.v,
            step.seq_lens,
            block_table=step.table,
            cu_seqlens_q=step.cu_seqlens,
            max_seqlen_q=step.longest,
            causal=attention.causal,
            **attention.scores(),
            **cache.scales(),
        )
        return y.flatten(1)

    def one_token(self, attention: Attention) -> OneToken | None:
        """A step begins with a copy of the host's, which waits for earlier steps: what they stored is there."""
        step, cache = self.step, self.cache
        if attention.rotary is None or step.cu_seqlens is not None or cache.kv_format != "16bit":
            return None
        table = self.rotations[attention.rotary]
        return OneToken(cache.k, cache.v, step.table, step.seq_lens, step.slots, step.positions, table)


class _StepTensors(NamedTuple):
    """On the device: of tokens positions and slots (int64), of rows lengths (int32) and pages (int32 [rows, n])."""

    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    table: Tensor
    cu_seqlens: Tensor | None
    longest: int


class Runner:
    """A model, its caches, and the rows of a batch.

    Args:
      model: what is run.
      rows: of the largest batch.
      pages, page_size: of the cache.
      kv_format: as in :func:`minfer.allocate_kv_cache`.
      graphs: whether steps of single tokens, and layers of short chunks, are captured; on CUDA alone.
      batch_invariant: the mode of all steps, and so of what is captured.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        rows: int,
        pages: int,
        page_size: int,
        kv_format: str = "16bit",
        graphs: bool = True,
        batch_invariant: bool = False,
    ):
        self._mode = batch_invariance.batch_invariant(batch_invariant)
        self.model, self.rows, self.page_size, self.kv_format = model, rows, page_size, kv_format
        self.cuda = model.device.type == "cuda"
        self.graphs = graphs and self.cuda
        more = {"group_tokens": _GROUP_TOKENS} if kv_format == "int4" else {}
        options = dict(kv_format=kv_format, dtype=model.dtype, device=model.device, batch=rows, **more)
        self.attend = [
            _Attend(allocate_kv_cache(pages, page_size, a.heads_kv, a.head_dim, **options), model.rotations)
            for a in (layer.attention for layer in model.layers)
        ]
        self._captured: dict[tuple, _Graph] = {}
        self._captured_chunks: dict[tuple, _ChunkGraph | None] = {}  # None: seen once
        self._pool = None

        def per_row(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=model.device)

        self.ids = per_row(torch.int64)
        floats = ("temperatures", "top_ps", "min_ps", "repetition_penalties", "presence_penalties", "frequency_penalties")
        self.parameters = {name: per_row(torch.float32) for name in floats}
        self.parameters |= {"top_ks": per_row(torch.int32), "seeds": per_row(torch.int64)}
        self._given: list[dict[str, float]] = [{} for _ in range(rows)]  # what the parameters of each row are
        self.counts: Tensor | None = None
        self._table = torch.zeros(rows, 0, dtype=torch.int32)  # on the host
        self._noted = [0] * rows  # pages of each row that are in it

    @staticmethod
    def bytes_of_page(model: DecoderModel, page_size: int, kv_format: str) -> int:
        """What a page takes in all layers."""
        options = dict(kv_format=kv_format, dtype=model.dtype, device="meta", batch=1)
        if kv_format == "int4":
            options["group_tokens"] = _GROUP_TOKENS
        total = 0
        for layer in model.layers:
            cache = allocate_kv_cache(1, page_size, layer.attention.heads_kv, layer.attention.head_dim, **options)
            parts = [x for name, x in cache._asdict().items() if isinstance(x, Tensor) and not name.endswith("_residual")]
            total += sum(x.numel() * x.element_size() for x in parts)
        return total

    # ---- rows ------------------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, row: int, params: SamplingParams, seed: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """A request gets a row."""
        self._noted[row] = 0
        values = {
            "temperatures": params.temperature,
            "top_ps": params.top_p,
            "min_ps": params.min_p,
            "repetition_penalties": params.repetition_penalty,
            "presence_penalties": params.presence_penalty,
            "frequency_penalties": params.frequency_penalty,
            "top_ks": max(params.top_k, 0),
            "seeds": seed,
        }
        for name, value in values.items():
            if self._given[row].get(name, 0) != value:
                self.parameters[name][row : row + 1].fill_(value)
        self._given[row] = values
        if params.penalised:
            self._count(row, prompt, generated)

    def _count(self, row: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        if self.counts is None:
            self.counts = torch.zeros(self.rows, self.model.vocabulary, dtype=torch.int32, device=self.model.device)
        own = torch.zeros(self.model.vocabulary, dtype=torch.int32)
        own[torch.tensor(list(prompt))] = -1
        if generated:
            ids, times = torch.tensor(list(generated)).unique(return_counts=True)
            own[ids] = times.to(torch.int32)
        self.counts[row].copy_(self._sent(own))

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """A row's request gets another row."""
        own = [self.ids, *self.parameters.values()] + ([] if self.counts is None else [self.counts])
        for attend in self.attend:
            own += [x for x in (attend.cache.k_residual, attend.cache.v_residual) if x is not None]
        for x in own:
            x[target].copy_(x[source])
        self._given[target], self._noted[target] = dict(self._given[source]), 0

    # ---- steps -----------------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], params: Sequence[SamplingParams]) -> Drawn:
        """Launches a step, and says where its draws will be.

        Args:
          chunks: of different rows, in ascending order of them.
          params: of the chunks' requests.
        """
        own = [p for chunk, p in zip(chunks, params, strict=True) if chunk.draws]
        draws = _Draws(
            any(p.temperature > 0 for p in own),
            any(p.penalised for p in own),
            max((p.logprobs or 0 for p in own), default=0),
        )
        self._note_pages(chunks)
        with self._mode:
            if self.graphs and all(chunk.tokens is None and chunk.draws for chunk in chunks):
                return self._run_graph(chunks, draws)
            return self._run_chunks(chunks, draws)

    def _sent(self, x: Tensor) -> Tensor:
        """A host tensor on the device, without waiting. Pinned memory goes back to torch's allocator, which waits for the copy before it
        gives the memory to somebody else."""
        return x.pin_memory().to(self.model.device, non_blocking=True) if self.cuda else x

    def _slots(self, chunk: Chunk) -> list[int]:
        size, pages = self.page_size, chunk.pages
        return [pages[place // size] * size + place % size for place in range(chunk.start, chunk.start + chunk.count)]

    def _places(self, chunks: Sequence[Chunk], tokens: int) -> Tensor:
        """ids, positions and slots of all tokens, as ``_hidden_of_chunks`` takes them. Few tokens are quicker one by one, many at once."""
        longs = torch.empty(3, tokens, dtype=torch.int64)
        column, columns, few = 0, [], []
        for chunk in chunks:
            end, places = column + chunk.count, range(chunk.start, chunk.start + chunk.count)
            if chunk.count < _MANY:
                ids = [-1 - chunk.row] if chunk.tokens is None else chunk.tokens  # the row's newest token is on the device
                few += zip(ids, places, self._slots(chunk), strict=True)
                columns += range(column, end)
            else:
                own = longs[:, column:end]
                own[0] = torch.tensor(chunk.tokens)
                torch.arange(places.start, places.stop, out=own[1])
                own[2] = self._table[chunk.row, own[1] // self.page_size] * self.page_size + own[1] % self.page_size
            column = end
        if few:
            longs[:, columns] = torch.tensor(few).t()
        return longs

    def _note_pages(self, chunks: Sequence[Chunk]) -> None:
        """Brings the host's block table up to date. A request's pages only become more."""
        longest = max(len(chunk.pages) for chunk in chunks)
        if longest > self._table.shape[1]:
            more = max(longest, 2 * self._table.shape[1]) - self._table.shape[1]
            self._table = torch.nn.functional.pad(self._table, (0, 1 << (self._table.shape[1] + more - 1).bit_length()))
        for chunk in chunks:
            known, have = self._noted[chunk.row], len(chunk.pages)
            if known != have:
                self._table[chunk.row, known:have] = torch.tensor(chunk.pages[known:], dtype=torch.int32)
                self._noted[chunk.row] = have

    def _run_chunks(self, chunks: Sequence[Chunk], draws: _Draws) -> Drawn:
        rows = chunks[-1].row + 1
        last, offsets, drawing = [], [], []
        seq_lens, ends, end = [0] * rows, [0] * rows, 0
        for chunk in chunks:
            seq_lens[chunk.row], ends[chunk.row] = chunk.start + chunk.count, chunk.count
            end += chunk.count
            if chunk.draws:
                last.append(end - 1)
                drawing.append(chunk.row)
                offsets.append(chunk.offset)
        longs = self._places(chunks, end)
        of_rows = torch.tensor([[0, *seq_lens], [0, *ends]], dtype=torch.int32)
        pages, longest = max(len(chunk.pages) for chunk in chunks), max(chunk.count for chunk in chunks)
        graph = self._chunk_graph(end, rows, pages, longest)
        if graph is None:
            table = self._sent(self._table[:rows, :pages].contiguous())
            ragged = longest > 1 or len(chunks) < rows
            hidden = self._hidden_of_chunks(self._sent(longs), self._sent(of_rows), table, longest, ragged)
        else:
            hidden, last = graph.run(longs, of_rows, self._table[:rows]), drawing
        if not drawing:
            return self._to_host([torch.empty(0, dtype=d) for d in (torch.int64, torch.float32, torch.int64, torch.float32)])
        index = self._sent(torch.tensor([drawing, last, offsets], dtype=torch.int64))
        hidden = tuple(None if x is None else x[index[1]] for x in hidden)
        return self._to_host(self._draw(hidden, index[0], index[2], draws))

    @torch.inference_mode()
    def score(self, chunk: Chunk, following: Sequence[int]) -> Tensor:
        """Stores a chunk of known tokens, and returns the logprob of the token that follows each of them, float32 on the host: as draws
        have them, by the same operator, which is let draw that token alone."""
        rows, count, vocabulary = chunk.row + 1, chunk.count, self.model.vocabulary
        of_rows = torch.zeros(2, rows + 1, dtype=torch.int32)
        of_rows[:, -1] = torch.tensor([chunk.start + count, count])
        found = []
        with self._mode:
            self._note_pages([chunk])
            table = self._sent(self._table[:rows, : len(chunk.pages)].contiguous())
            hidden = self._hidden_of_chunks(self._sent(self._places([chunk], count)), self._sent(of_rows), table, count)
            tokens = self._sent(torch.tensor(following, dtype=torch.int64))
            for begin in range(0, count, _SCORED):
                own = slice(begin, min(begin + _SCORED, count))
                allowed = torch.zeros(own.stop - begin, -(-vocabulary // 32), dtype=torch.int32, device=tokens.device)
                place, bit = tokens[own, None] // 32, tokens[own, None] % 32
                allowed.scatter_(1, place, torch.where(bit == 31, -(2**31), 1 << bit).to(torch.int32))
                logits = self.model.logits(*(None if x is None else x[own] for x in hidden))
                found.append(sample(logits, temperature=0.0, allowed=allowed)[1])
        return torch.cat(found).cpu()

    def _hidden_of_chunks(self, longs: Tensor, of_rows: Tensor, table: Tensor, longest: int, ragged: bool = True) -> tuple[Tensor, Pending]:
        """``model.hidden`` of chunks.

        Args:
          longs: int64 [3, tokens]: ids, or -1 - row where it is the row's newest; positions; slots.
          of_rows: int32 [2, 1 + rows]: 0 and lengths with the chunk; 0 and tokens of the chunk.
          table: int32 [rows, pages].
          longest: at least the tokens of a chunk. ragged: False where each row has one.
        """
        cu_seqlens = of_rows[1].cumsum(0, dtype=torch.int32) if ragged else None
        step = _StepTensors(longs[1], longs[2], of_rows[0, 1:], table, cu_seqlens, longest)
        tokens = torch.where(longs[0] < 0, self.ids[(-1 - longs[0]).clamp_min(0)], longs[0])
        return self._hidden(tokens, step)

    def _hidden(self, ids: Tensor, step: _StepTensors) -> tuple[Tensor, Pending]:
        for attend in self.attend:
            attend.step = step
        return self.model.hidden(ids, step.positions, self.attend)

    def _draw(self, hidden: tuple[Tensor, Pending], rows: Tensor | None, offsets: Tensor, draws: _Draws) -> list[Tensor]:
        """Draws a token of each row, which becomes its newest one. rows: which they are; None: the first ones."""
        count = hidden[0].shape[0]

        def own(x: Tensor) -> Tensor:
            return x[:count] if rows is None else x[rows]

        options: dict = {"top_logprobs": draws.top_logprobs}
        if draws.random:
            for name in ("temperatures", "top_ps", "min_ps", "top_ks", "seeds"):
                options[name] = own(self.parameters[name])
            options["offsets"] = offsets
        else:
            options["temperature"] = 0.0
        if draws.penalties:
            if self.counts is None:
                raise AssertionError("a request with penalties has begun without counts")
            for name in ("repetition_penalties", "presence_penalties", "frequency_penalties"):
                options[name] = own(self.parameters[name])
            options["counts"] = own(self.counts)
        drawn = list(sample(self.model.logits(*hidden), **options))
        if rows is None:
            newest = self.ids[:count]
            torch.clamp(drawn[0], min=0, out=newest)  # -1: nothing could be drawn, which ends the request
        else:
            newest = drawn[0].clamp_min(0)
            self.ids.index_copy_(0, rows, newest)
        if draws.penalties:
            seen = own(self.counts).clamp_min(0).gather(1, newest[:, None]) + 1
            place = torch.arange(count, device=newest.device) if rows is None else rows
            self.counts.index_put_((place, newest), seen[:, 0])
        return drawn

    def _to_host(self, drawn: Sequence[Tensor], places: Sequence[int] | None = None) -> Drawn:
        if not self.cuda:
            return Drawn([x.clone() for x in drawn], None, places)
        host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in drawn]
        ready = torch.cuda.Event()
        ready.record()
        return Drawn(host, ready, places)

    # ---- graphs ----------------------------------------------------------------------------------------------------------------------

    def _run_graph(self, chunks: Sequence[Chunk], draws: _Draws) -> Drawn:
        used = chunks[-1].row + 1
        rows = min(next((size for size in GRAPH_ROWS if size >= used), used), self.rows)
        longest = max(len(chunk.pages) for chunk in chunks)
        width = min(1 << (longest - 1).bit_length(), self._table.shape[1])
        key = (rows, width, draws)
        graph = self._captured.get(key)
        if graph is None:
            graph = self._captured[key] = _Graph(self, rows, width, draws)
        inputs = torch.zeros(4, rows, dtype=torch.int64)  # positions, slots, offsets, lengths
        inputs[1].fill_(-1)
        places = [chunk.row for chunk in chunks]
        inputs[:3, places] = torch.tensor([[chunk.start, self._slots(chunk)[0], chunk.offset] for chunk in chunks]).t()
        _lengths_of(inputs)[places] = torch.tensor([chunk.start + 1 for chunk in chunks], dtype=torch.int32)
        graph.inputs.copy_(inputs.pin_memory(), non_blocking=True)
        table = self._table[:rows, :width]
        if graph.sent is None or not torch.equal(graph.sent, table):
            graph.sent = table.clone()
            graph.table.copy_(graph.sent.pin_memory(), non_blocking=True)
        graph.graph.replay()
        return self._to_host(graph.drawn, places)

    def _chunk_graph(self, tokens: int, rows: int, pages: int, longest: int) -> _ChunkGraph | None:
        """The graph of steps of about this size, if there is one or it pays to capture one."""
        if not self.graphs or tokens > GRAPH_TOKENS[-1] or longest == 1:
            return None
        tokens = next(size for size in GRAPH_TOKENS if size >= tokens)
        rows = min(next((size for size in GRAPH_ROWS if size >= rows), rows), self.rows)
        width = min(1 << (pages - 1).bit_length(), self._table.shape[1])
        key = (tokens, rows, width, tokens if rows == 1 else min(1 << (longest - 1).bit_length(), tokens))
        if key not in self._captured_chunks:
            if len(self._captured_chunks) < 16 * _MOST_CHUNK_GRAPHS:
                self._captured_chunks[key] = None
            return None
        graph = self._captured_chunks[key]
        if graph is None and sum(x is not None for x in self._captured_chunks.values()) < _MOST_CHUNK_GRAPHS:
            graph = self._captured_chunks[key] = _ChunkGraph(self, *key)
        return graph

    def _capture(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of what ``step`` launches, and what it returned; its memory is shared by all graphs of the runner."""
        stream = torch.cuda.Stream(self.model.device)
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is allocated or set up at first use
                step()
        torch.cuda.current_stream(self.model.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The watchdog of NCCL is another thread.
        mode = "global" if self.model.parallel is None else "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            result = step()
        self._pool = self._pool or graph.pool()
        return graph, result


class _ChunkGraph:
    """Captured layers of a step of up to ``tokens`` tokens of up to ``rows`` rows, none of which has more than ``longest`` tokens or more
    than ``width`` pages."""

    def __init__(self, runner: Runner, tokens: int, rows: int, width: int, longest: int):
        device = runner.model.device
        self._longs = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self._longs[2].fill_(-1)
        self._of_rows = torch.zeros(2, 1 + rows, dtype=torch.int32, device=device)
        self._table = torch.zeros(rows, width, dtype=torch.int32, device=device)

        def step() -> tuple[Pending, ...]:
            hidden = runner._hidden_of_chunks(self._longs, self._of_rows, self._table, longest)
            last = (self._of_rows[1].cumsum(0)[1:] - 1).clamp_min(0)
            return tuple(None if x is None else x[last] for x in hidden)

        self._graph, self._hidden = runner._capture(step)

    def run(self, longs: Tensor, of_rows: Tensor, table: Tensor) -> tuple[Tensor, Pending]:
        """The last token's of each row, until the next run; the arguments are as of ``_hidden_of_chunks``, on the host."""
        inputs = torch.zeros(3, self._longs.shape[1], dtype=torch.int64)
        inputs[2].fill_(-1)
        inputs[:, : longs.shape[1]] = longs
        rows = torch.zeros(2, self._of_rows.shape[1], dtype=torch.int32)
        rows[:, : of_rows.shape[1]] = of_rows
        pages = torch.zeros(self._table.shape, dtype=torch.int32)
        pages[: len(table)] = table[:, : pages.shape[1]]
        for own, given in ((self._longs, inputs), (self._of_rows, rows), (self._table, pages)):
            own.copy_(given.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._hidden


def _lengths_of(inputs: Tensor) -> Tensor:
    """Of a step's inputs, int64 [4, rows]: the lengths, int32 [rows], which lie where the last row begins."""
    return inputs[3].view(torch.int32)[: inputs.shape[1]]


class _Graph:
    """A captured step of ``rows`` rows, each with one token."""

    def __init__(self, runner: Runner, rows: int, width: int, draws: _Draws):
        device = runner.model.device
        self.inputs = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.inputs[1].fill_(-1)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.sent: Tensor | None = None  # what the table holds
        kept, counts = runner.ids.clone(), None if runner.counts is None else runner.counts[:rows].clone()
        self.graph, self.drawn = runner._capture(lambda: self._step(runner, draws))
        runner.ids.copy_(kept)
        if counts is not None:
            runner.counts[:rows].copy_(counts)

    def _step(self, runner: Runner, draws: _Draws) -> list[Tensor]:
        step = _StepTensors(self.inputs[0], self.inputs[1], _lengths_of(self.inputs), self.table, None, 1)
        hidden = runner._hidden(runner.ids[: self.inputs.shape[1]], step)
        return runner._draw(hidden, None, self.inputs[2], draws)
