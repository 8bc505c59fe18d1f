"""Whole models without checkpoints: shapes of published ones with random weights, and how fast they run.

Times are those of an engine's steps as a server would launch them, the host's part included: a step's clock begins when the step before it
was launched, and the host runs one step ahead.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..generation.engine import PAGE_SIZE, Engine
from ..generation.params import SamplingParams
from ..generation.runner import Chunk
from ..integrations.decoder.model import DecoderModel


def _llama(**sizes: Any) -> dict[str, Any]:
    rope = dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return dict(
        model_type="llama",
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=False,
        **sizes,
    )


MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "llama-3.1-70b": _llama(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "qwen2.5-7b": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        tie_word_embeddings=False,
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        max_position_embeddings=131072,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=4096,
            truncate=False,
        ),
        tie_word_embeddings=False,
    ),
    "gemma-2-9b": dict(
        model_type="gemma2",
        vocab_size=256000,
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "gpt2": dict(model_type="gpt2"),
}


def config_of(name: str, **changes: Any) -> Any:
    """The transformers config of a published shape.

    Args:
      name: of :data:`MODELS`.
      changes: of the config: ``num_hidden_layers`` for a part of the model.

    Raises:
      ValueError: the name is not known.
    """
    from transformers import AutoConfig

    if name not in MODELS:
        raise ValueError(f"name must be one of {', '.join(MODELS)}, got {name!r}")
    values = {**MODELS[name], **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def random_model(name: str, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of a published shape in eval mode, its weights random.

    Args:
      name, changes: as of :func:`config_of`.
      device, dtype: of its weights, which are made there.

    Raises:
      ValueError: the name is not known.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(name, **changes)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval()


def repeated(model: DecoderModel, layers: int) -> DecoderModel:
    """The model with its layers again and again, up to so many, each a copy in memory of its own: as fast as a larger one, which there may
    be no room to make in 16 bits."""
    result, own = copy.copy(model), list(model.layers)
    shared = {id(model.parallel): model.parallel}  # no copy of a process group
    result.layers = own + [copy.deepcopy(own[i % len(own)], dict(shared)) for i in range(len(own), layers)]
    return result


# ---- floors ------------------------------------------------------------------------------------------------------------------------------


def decode_bytes(model: DecoderModel, engine: Engine, batch: int, context: int) -> float:
    """Bytes that one step of ``batch`` sequences must read: weights without the embedding table, of experts those that as many tokens are
    expected to choose of all alike, and keys and values of ``context`` tokens each."""
    total = float(model.head.weight_bytes)
    seen: set[int] = {x.untyped_storage().data_ptr() for x in model.head.buffers()}
    for layer, attend in zip(model.layers, engine.runner.attend, strict=True):
        share = 1.0
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            experts = router.weight.shape[0]
            share = 1.0 - (1.0 - router.top_k / experts) ** batch
        for owner, x in _tensors(layer):
            place = x.untyped_storage().data_ptr()
            if place not in seen and x.numel():
                seen.add(place)
                total += x.numel() * x.element_size() * (share if owner is layer.mlp and router is not None else 1.0)
        window = layer.attention.window
        keys = context if window < 0 else min(context, window + 1)
        total += batch * keys * _bytes_of_token(attend.cache)
    return total


def _tensors(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Tensor]]:
    for module in layer.modules():
        for x in (*module._buffers.values(), *module._parameters.values()):
            if x is not None:
                yield module, x


def _bytes_of_token(cache: Any) -> float:
    """Of keys and values with their scales."""
    rows = cache.k.shape[0] * cache.k.shape[1]
    parts = [x for name, x in cache._asdict().items() if isinstance(x, Tensor) and not name.endswith("_residual")]
    return sum(x.numel() * x.element_size() for x in parts if x.dim() > 1) / rows


# ---- steps -------------------------------------------------------------------------------------------------------------------------------


@dataclass
class DecodeTimes:
    """Of steps in which ``batch`` sequences of ``context`` tokens get one more each.

    Attributes:
      ms, p10, p90: milliseconds of a step: median and percentiles.
      tokens_per_second: batch / step.
      floor_ms: the bytes of :func:`decode_bytes` at the device's read bandwidth; fraction: floor_ms / ms.
      launches: kernels of a step.
      peak_bytes: the largest amount of memory that torch had allocated.
    """

    batch: int
    context: int
    ms: float
    p10: float
    p90: float
    tokens_per_second: float
    floor_ms: float
    fraction: float
    launches: int
    peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fill_cache(engine: Engine) -> None:
    """Random keys and values everywhere, as if prompts had been computed."""
    for attend in engine.runner.attend:
        for name, x in attend.cache._asdict().items():
            if not isinstance(x, Tensor):
                continue
            if name.endswith("_scale"):
                if attend.cache.kv_format != "fp8_e4m3":
                    x.fill_(0.01)
            elif x.dtype == torch.float8_e4m3fn:
                x.copy_(torch.randn(x.shape, device=x.device, dtype=torch.float16).to(x.dtype))
            elif x.is_floating_point():
                x.normal_()
            else:
                low, high = (-127, 128) if x.dtype == torch.int8 else (0, 256)
                x.copy_(torch.randint(low, high, x.shape, device=x.device, dtype=torch.int16).to(x.dtype))


@torch.inference_mode()
def decode_times(
    engine: Engine, batch: int, context: int, *, steps: int = 40, bandwidth: float | None = None, greedy: bool = True
) -> DecodeTimes:
    """Times steps of decoding; the engine must be idle.

    Args:
      engine: with ``max_rows`` of ``batch`` or more, and room for the sequences.
      batch, context: sequences, and tokens of each in front of the first step.
      steps: that are timed.
      bandwidth: bytes per microsecond; None: the device's as planning knows it.
    """
    from .._core.registry import device_properties

    runner, model, warm_up = engine.runner, engine.model, 4
    total = context + steps + warm_up + 2
    pages = [engine.pool.allocate(-(-total // PAGE_SIZE)) for _ in range(batch)]
    params = SamplingParams(max_new_tokens=total, temperature=0.0 if greedy else 0.8, top_p=1.0 if greedy else 0.95)
    for row in range(batch):
        runner.begin(row, params, row, [0], [])
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)

    def launch(step: int) -> Any:
        chunks = [Chunk(row, None, context + step, pages[row], True, step) for row in range(batch)]
        return runner.run(chunks, [params] * batch)

    times, before, last = [], None, 0.0
    try:
        for step in range(warm_up + steps):
            drawn = launch(step)
            if before is not None:
                before.wait()
            now = time.perf_counter()
            if step > warm_up:
                times.append((now - last) * 1e3)
            before, last = drawn, now
        before.wait()
        launches = launches_of(lambda: launch(warm_up + steps).wait()) if cuda else 0
    finally:
        for own in pages:
            engine.pool.release(own)
    ordered = sorted(times)
    ms = statistics.median(ordered)
    rate = bandwidth or (device_properties()["read_bandwidth"] if cuda else float("nan"))
    floor = decode_bytes(model, engine, batch, context) / rate / 1e3
    return DecodeTimes(
        batch,
        context,
        ms,
        ordered[len(ordered) // 10],
        ordered[-1 - len(ordered) // 10],
        batch / ms * 1e3,
        floor,
        floor / ms,
        launches,
        torch.cuda.max_memory_allocated(model.device) if cuda else 0,
    )


def launches_of(call: Callable[[], Any]) -> int:
    """Kernels that a call runs, those of its graphs among them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum("memcpy" not in event.name.lower() and "memset" not in event.name.lower() for event in kernels)


@torch.inference_mode()
def prefill_ms(engine: Engine, length: int, *, rounds: int = 5) -> float:
    """Milliseconds from a prompt of ``length`` random tokens to its first token: the median. Without prefix sharing."""
    rnd, times = random.Random(length), []
    for turn in range(rounds + 1):
        prompt = [rnd.randrange(engine.model.vocabulary) for _ in range(length)]
        start = time.perf_counter()
        engine.submit(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
        engine.run()
        if turn:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


@dataclass
class ServingTimes:
    """Of requests that arrive at random times.

    Attributes:
      requests, rate: how many, and a second (Poisson).
      tokens_per_second: generated, over the whole time.
      first_ms_p50, first_ms_p99: milliseconds from arrival to the first token.
      next_ms_p50, next_ms_p99: between tokens of a request.
    """

    requests: int
    rate: float
    tokens_per_second: float
    first_ms_p50: float
    first_ms_p99: float
    next_ms_p50: float
    next_ms_p99: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def serving_times(engine: Engine, *, requests: int, rate: float, prompt: Sequence[int], new: Sequence[int], seed: int = 0) -> ServingTimes:
    """Serves random prompts that arrive as a Poisson process.

    Args:
      requests, rate: how many, and arrivals a second.
      prompt, new: (least, most) tokens of prompts, and to be generated; uniform.
    """
    rnd, arrivals, now = random.Random(seed), [], 0.0
    for _ in range(requests):
        now += rnd.expovariate(rate)
        tokens = [rnd.randrange(engine.model.vocabulary) for _ in range(rnd.randint(*prompt))]
        arrivals.append((now, tokens, SamplingParams(max_new_tokens=rnd.randint(*new), ignore_eos=True)))
    done, start = [], time.perf_counter()
    while arrivals or engine.busy:
        now = time.perf_counter() - start
        while arrivals and arrivals[0][0] <= now:
            _, tokens, params = arrivals.pop(0)
            done.append(engine.submit(tokens, params))
        if engine.busy:
            engine.step()
        elif arrivals:
            time.sleep(min(max(arrivals[0][0] - now, 0.0), 0.01))
    whole = time.perf_counter() - start
    first = [request.completion.token_times[0] * 1e3 for request in done]
    later = [(b - a) * 1e3 for r in done for a, b in zip(r.completion.token_times, r.completion.token_times[1:], strict=False)]
    tokens = sum(len(request.completion.tokens) for request in done)

    def percentile(values: list[float], share: float) -> float:
        return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")

    return ServingTimes(
        requests, rate, tokens / whole, percentile(first, 0.5), percentile(first, 0.99), percentile(later, 0.5), percentile(later, 0.99)
    )
