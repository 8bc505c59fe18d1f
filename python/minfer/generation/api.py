"""``minfer.generate``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from .engine import Engine, Token
from .params import Completion, SamplingParams

Prompt = str | Sequence[int]


def engine_of(
    model: Any,
    *,
    tokenizer: Any | None = None,
    kv_cache: str | None = None,
    max_length: int | None = None,
    **options: Any,
) -> Engine:
    """An :class:`Engine` over a transformers model.

    Args:
      model: as :func:`minfer.integrations.transformers.optimize` takes it, or one that it has optimised. It stays optimised.
      tokenizer: as in :class:`Engine`.
      kv_cache: None (16 bits), "fp8", "int8" or "int4".
      max_length: tokens of the longest sequence; None: what the model was made for.
      options: of :class:`Engine`.

    Raises:
      ValueError: an argument cannot be right, or the model is none that minfer runs as a whole; the message says what stands in the way.
    """
    from ..integrations.transformers import OptimizedModel, optimize
    from ..integrations.transformers.model import decoder_model
    from ..integrations.transformers.optimize import KV_CACHES

    if kv_cache not in KV_CACHES:
        raise ValueError(f"generate: kv_cache must be None, fp8, int8 or int4, got {kv_cache!r}")
    handle = model if isinstance(model, OptimizedModel) else getattr(model, "_minfer", None) or optimize(model)
    made_for = handle.model.config.get_text_config(decoder=True).max_position_embeddings
    length = made_for if max_length is None else max_length
    if length > made_for:
        raise ValueError(f"generate: max_length must be at most {made_for}, which the model was made for, got {max_length}")
    decoder = decoder_model(handle, length)
    return Engine(
        decoder,
        eos_token_ids=_eos_of(handle.model),
        tokenizer=tokenizer,
        kv_format=KV_CACHES[kv_cache],
        max_length=length,
        **options,
    )


def _eos_of(model: Any) -> tuple[int, ...]:
    """The tokens that end a sequence, by the generation config or else the model's."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Any | None = None,
    kv_cache: str | None = None,
    stream: Callable[[Token], None] | None = None,
    progress: bool = False,
    max_rows: int = 256,
    max_length: int | None = None,
    **options: Any,
) -> list[Completion]:
    """Continues prompts, all at a time as far as the cache has room for them.

    Args:
      model: a transformers model in eval mode, or the handle of :func:`minfer.integrations.transformers.optimize`. One that is not
        optimised yet is for the time of the call.
      prompts: a string or token ids, or a list of such; strings need the tokenizer, whose special tokens are added.
      params: one for all, or one for each prompt; default: :class:`SamplingParams`.
      tokenizer: a transformers tokenizer; with it completions have texts.
      kv_cache: None (16 bits), "fp8", "int8" or "int4".
      stream: called with a :class:`Token` for each, in the order in which they come.
      progress: a progress bar on stderr.
      max_rows, max_length, options: as in :class:`Engine`, ``batch_invariant`` among them. max_length: default: what the longest of these
        requests takes.

    Returns:
      A :class:`Completion` for each prompt, in order.

    Raises:
      ValueError: an argument cannot be right: an empty prompt, a token that the model does not know, a prompt that is too long; the message
        names the request. Nothing was run then.

    The same prompt, parameters and seed give the same kind of draw whatever runs beside it. Its logits do not have the same bits in every
    batch, so that two tokens of nearly the same logit may change places; with ``batch_invariant=True`` tokens and logprobs have the same
    bits in every batch.
    """
    from ..integrations.transformers import OptimizedModel, optimize

    prompts = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    listed: list[Any] = [prompts] if single else list(prompts)
    if not listed:
        return []
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
    if len(each) != len(listed):
        raise ValueError(f"generate: params must be one, or one for each of {len(listed)} prompts, got {len(each)}")
    tokens = [_tokens_of(index, prompt, tokenizer) for index, prompt in enumerate(listed)]
    longest = max(len(prompt) + p.max_new_tokens for prompt, p in zip(tokens, each, strict=True))
    optimised = isinstance(model, OptimizedModel) or getattr(model, "_minfer", None) is not None
    with contextlib.ExitStack() as stack:
        handle = model if optimised else stack.enter_context(optimize(model))
        made_for = (
            (handle.model if isinstance(handle, OptimizedModel) else handle).config.get_text_config(decoder=True).max_position_embeddings
        )
        rows = min(max_rows, len(tokens))
        own = {"max_length": min(longest, made_for) if max_length is None else max_length, "max_rows": rows}
        engine = engine_of(handle, tokenizer=tokenizer, kv_cache=kv_cache, stream=stream, **own, **options)
        requests = [engine.submit(prompt, p) for prompt, p in zip(tokens, each, strict=True)]
        with _bar(engine, sum(p.max_new_tokens for p in each)) if progress else contextlib.nullcontext():
            engine.run()
    return [request.completion for request in requests]


def _tokens_of(index: int, prompt: Any, tokenizer: Any | None) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ValueError(f"generate: request {index}: the prompt is a string: pass the tokenizer")
    return list(tokenizer(prompt)["input_ids"])


@contextlib.contextmanager
def _bar(engine: Engine, total: int) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, given = progress.add_task("tokens", total=total), engine.stream

        def advance(token: Token) -> None:
            progress.advance(task)
            if given is not None:
                given(token)

        engine.stream = advance
        try:
            yield
        finally:
            engine.stream = given
