"""A cache of transformers whose layers are paged, in any of minfer's formats.

    cache = minfer.integrations.transformers.paged_cache(model, kv_format="int8")
    model.generate(**inputs, past_key_values=cache)

An optimised model makes these layers by itself, in the place of a ``DynamicCache``'s that are still empty. Its attention reads the pages
where they are; a model whose attention is another's gets keys and values as tensors, dequantised.

Tokens that a padding mask hides are not stored: a sequence's keys follow each other, whatever side the padding is on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...formats.kv_cache import KV_FORMATS, KvCache, allocate_kv_cache
from ...ops.kv_cache import kv_cache_append
from ...reference.kv_cache import gather

PAGE_SIZE = 64  # tokens


class Step(NamedTuple):
    """Where the tokens of one call are, and how much each sequence has then.

    Attributes:
      slots: int64 [batch * tokens]: of each token, or -1 for padding.
      seq_lens: int32 [batch], the call's tokens among them.
      cu_seqlens: int32 [batch + 1], the rows of each sequence among the call's, padding included; None where each has one.
      order, cu_ordered: with padding in a call of several tokens: int64 [batch * tokens], the call's rows with padding last, and int32
        [batch + 1], the rows of each sequence among them. None: rows are as they should be.
    """

    slots: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor | None
    order: Tensor | None = None
    cu_ordered: Tensor | None = None


class Pages:
    """What the layers of a cache have in common: which pages each sequence has, and where a call's tokens go.

    All layers of a cache are at the same length whenever a call begins, so that one block table serves all.
    """

    def __init__(self, batch: int, device: torch.device, page_size: int = PAGE_SIZE):
        self.batch, self.device, self.page_size = batch, device, page_size
        self.table = torch.empty(batch, 0, dtype=torch.int32, device=device)  # [batch, pages of a sequence]
        self._step: tuple[Any, Step] | None = None
        self._derived: tuple[Any, Pages] | None = None

    def reserve(self, tokens: int) -> None:
        """Makes room for as many tokens of each sequence; what is there keeps its pages. Twice as much as before at least."""
        have = self.table.shape[1]
        wanted = -(-tokens // self.page_size)
        if wanted <= have:
            return
        wanted = max(wanted, 2 * have)
        more = torch.arange(self.batch * have, self.batch * wanted, dtype=torch.int32, device=self.device)
        self.table = torch.cat([self.table, more.view(self.batch, wanted - have)], 1)

    def step(self, past: int, tokens: int, mask: Tensor | None) -> Step:
        """The call behind ``past`` tokens, padding included. mask: bool [batch, past + tokens], or None: there is no padding."""
        key = (past, tokens, self.table.shape[1], None if mask is None else mask)
        if self._step is not None:
            known = self._step[0]
            if known[:3] == key[:3] and known[3] is key[3]:
                return self._step[1]
        step = self._plain(past, tokens) if mask is None else self._padded(past, tokens, mask)
        if not torch.compiler.is_compiling():
            self._step = (key, step)
        return step

    def _slots(self, positions: Tensor) -> Tensor:
        """[batch, tokens] places in their sequences -> slots."""
        page = self.table.long().gather(1, positions // self.page_size)
        return page * self.page_size + positions % self.page_size

    def _rows(self, tokens: int) -> Tensor | None:
        return None if tokens == 1 else torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * tokens

    def _plain(self, past: int, tokens: int) -> Step:
        positions = torch.arange(past, past + tokens, device=self.device).expand(self.batch, tokens)
        seq_lens = torch.full((self.batch,), past + tokens, dtype=torch.int32, device=self.device)
        return Step(self._slots(positions).reshape(-1), seq_lens, self._rows(tokens))

    def _padded(self, past: int, tokens: int, mask: Tensor) -> Step:
        counted = mask.cumsum(1)  # [batch, past + tokens]
        own = mask[:, past:]
        slots = self._slots((counted[:, past:] - 1).clamp_min(0)).where(own, -1).reshape(-1)
        seq_lens = counted[:, -1].to(torch.int32)
        if tokens == 1:
            return Step(slots, seq_lens, None)
        order = torch.argsort(own.reshape(-1).logical_not(), stable=True)
        ends = torch.nn.functional.pad(own.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        return Step(slots, seq_lens, self._rows(tokens), order, ends)

    def of_batch(self, batch: int, key: Any) -> Pages:
        """Pages of as much room for another batch; the same ones for all layers that ask with the same object."""
        if self._derived is None or self._derived[0] is not key:
            pages = Pages(batch, self.device, self.page_size)
            pages.reserve(self.table.shape[1] * self.page_size)
            self._derived = (key, pages)
        return self._derived[1]


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer.

    Args:
      kv_format: "16bit", "fp8_e4m3", "int8" or "int4", as in :func:`minfer.allocate_kv_cache`.
      is_sliding: what the model's masks are told; all tokens are kept.
      k_scale, v_scale: of fp8: float32 [1] or [heads_kv], or None: 1.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, kv_format: str = "16bit", *, is_sliding: bool = False, k_scale: Tensor | None = None, v_scale: Tensor | None = None):
        super().__init__()
        if kv_format not in KV_FORMATS:
            raise ValueError(f"PagedLayer: kv_format must be one of {', '.join(KV_FORMATS)}, got {kv_format!r}")
        self.kv_format, self.is_sliding = kv_format, is_sliding
        self._given_scales = (k_scale, v_scale)
        self.cache: KvCache | None = None
        self.pages: Pages | None = None
        self.length = 0  # tokens, padding included
        self._hidden: Tensor | None = None  # with padding: bool [batch, length], what the mask of the last call showed

    def __repr__(self) -> str:
        return f"PagedLayer(kv_format={self.kv_format!r}, length={self.length})"

    @property
    def batch_size(self) -> int:
        return 0 if self.pages is None else self.pages.batch

    # ---- storing -----------------------------------------------------------------------------------------------------------------

    def start(self, pages: Pages, heads_kv: int, head_dim: int, dtype: torch.dtype, head_dim_v: int | None = None) -> None:
        """Allocates the cache, for as much as ``pages`` has room for."""
        self.pages, self.dtype, self.device = pages, dtype, pages.device
        self._sizes = dict(heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v)
        self.cache = self._allocate(pages.table.numel())
        self.is_initialized = True

    def _allocate(self, count: int) -> KvCache:
        more = {"group_tokens": 32} if self.kv_format == "int4" else {}
        cache = allocate_kv_cache(
            count,
            self.pages.page_size,
            **self._sizes,
            kv_format=self.kv_format,
            dtype=self.dtype,
            device=self.device,
            batch=self.pages.batch,
            **more,
        )
        for name, given in zip(("k_scale", "v_scale"), self._given_scales, strict=True):
            if given is not None and self.kv_format == "fp8_e4m3":
                cache = cache._replace(**{name: given.to(self.device, torch.float32).expand(self._sizes["heads_kv"]).contiguous()})
        return cache

    def advance(self, tokens: int, mask: Tensor | None) -> Step:
        """Makes room for a call's tokens, counts them, and says where they go. mask: as in :meth:`Pages.step`."""
        past = self.length
        if mask is not None and mask.shape != (self.pages.batch, past + tokens):
            wanted = f"[batch, tokens] = {[self.pages.batch, past + tokens]} beside a cache of {past} tokens"
            raise RuntimeError(f"PagedLayer: attention_mask must be {wanted}, got {list(mask.shape)}")
        self._check_past(past, mask)
        self.pages.reserve(past + tokens)
        if self.pages.table.numel() > self.cache.k.shape[0]:
            self._grow(self.pages.table.numel())
        self.length = past + tokens
        return self.pages.step(past, tokens, mask)

    def _check_past(self, past: int, mask: Tensor | None) -> None:
        """What is stored is what masks have shown so far; a call cannot hide it, or show what was hidden."""
        if past == 0 or (mask is None and self._hidden is None):
            self._hidden = mask
            return
        before = self._hidden if self._hidden is not None else mask.new_ones(mask.shape[0], past)
        now = mask[:, :past] if mask is not None else before.new_ones(before.shape)
        if before.data_ptr() != now.data_ptr() and not torch.equal(before, now):
            raise RuntimeError(
                "PagedLayer: attention_mask must show the tokens in the cache as earlier calls did: those that were hidden are not stored"
            )
        self._hidden = mask

    def _grow(self, count: int) -> None:
        old, new = self.cache, self._allocate(count)
        for name, x in new._asdict().items():
            if isinstance(x, Tensor):
                source = getattr(old, name)
                if source.shape == x.shape:
                    x.copy_(source)
                else:
                    x[: source.shape[0]].copy_(source)
        self.cache = new

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads_kv, _, head_dim = key_states.shape
        self.start(Pages(batch, key_states.device), heads_kv, head_dim, key_states.dtype, value_states.shape[-1])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores [batch, heads_kv, tokens, head_dim], and returns all that is stored, [batch, heads_kv, length, head_dim]: for attention
        that is not minfer's."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.advance(key_states.shape[2], None)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        self.append(k, v, step)
        read = [gather(self.cache, b, 0, self.length, self.pages.table, key_states.dtype) for b in range(self.pages.batch)]
        return tuple(torch.stack(part).transpose(1, 2) for part in zip(*read, strict=True))

    def append(self, k: Tensor, v: Tensor, step: Step) -> None:
        """k, v: [batch * tokens, heads_kv, head_dim]."""
        kv_cache_append(k, v, self.cache.k, self.cache.v, step.slots, cu_seqlens=step.cu_seqlens, **self.cache.scales())

    # ---- what transformers asks for ------------------------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length, self._hidden = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens, as many as -tokens_to_remove says. int4 keeps only the newest, incomplete group of tokens in 16 bits:
        removing more than those is an error."""
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(self.length - tokens_to_remove, 0)
        if removed == 0:
            return
        if self.kv_format == "int4":
            group = self.cache.k_residual.shape[1]
            if removed > self.length % group and removed < self.length:
                can = f"of an int4 cache of {self.length} tokens only the newest {self.length % group} can be removed"
                raise RuntimeError(f"PagedLayer: {can}, got {removed}")
        self.length = max(self.length - removed, 0)
        if self._hidden is not None:
            self._hidden = self._hidden[:, : self.length]

    def activate_past_recording(self) -> None:
        """All tokens are kept anyway."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.length == 0:
            return
        rows, table = beam_idx.to(self.device), self.pages.table.long()
        source = torch.empty_like(table.reshape(-1))
        source[table.reshape(-1)] = table[rows].reshape(-1)
        self._take(source, rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            rows = indices.to(self.device)
            self._become(rows.nonzero().flatten() if rows.dtype == torch.bool else rows, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized and repeats != 1:
            self._become(torch.arange(self.pages.batch, device=self.device).repeat_interleave(repeats), repeats)

    def _become(self, rows: Tensor, key: Any) -> None:
        """The cache of another batch, ``rows`` of this one."""
        old, self.pages = self.pages.table.long(), self.pages.of_batch(len(rows), key)
        new = self.pages.table.long().reshape(-1)
        source = torch.empty_like(new)
        source[new] = old[rows].reshape(-1)
        self._take(source, rows)

    def _take(self, pages: Tensor, rows: Tensor) -> None:
        """Pages and sequences of the cache as it is, in a new order."""

        def taken(name: str, x: Tensor) -> Tensor:
            if name.endswith("_residual"):
                return x[rows]
            if name.endswith("_scale") and self.kv_format == "fp8_e4m3":
                return x
            if name in ("k", "v") and x.stride(1) < x.stride(2):  # heads before tokens, which stays so
                return x.transpose(1, 2)[pages].transpose(1, 2)
            return x[pages]

        self.cache = KvCache(self.kv_format, **{n: taken(n, x) for n, x in self.cache._asdict().items() if isinstance(x, Tensor)})
        if self._hidden is not None:
            self._hidden = self._hidden[rows]

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized and self.cache.k.device != self.device:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        if self.is_initialized:
            moved = {n: x.to(device, non_blocking=True) for n, x in self.cache._asdict().items() if isinstance(x, Tensor)}
            self.cache = KvCache(self.kv_format, **moved)


def paged_cache(model: Any, kv_format: str = "16bit") -> Cache:
    """A cache for ``past_key_values``, with a :class:`PagedLayer` for each layer of the model.

    Args:
      model: a transformers model, or its config.
      kv_format: as in :class:`PagedLayer`.
    """
    config = getattr(model, "config", model).get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return Cache(layers=[PagedLayer(kv_format, is_sliding=kind == "sliding_attention") for kind in kinds])
