"""``minfer generate`` and ``minfer bench-model``: whole models. They need transformers (``pip install minfer[transformers]``)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ..generation import Completion, SamplingParams, Token, engine_of, generate
from ..integrations.decoder.scheme import KINDS, PARTS
from ..measure import models

Quantize = Enum("Quantize", {name: name for name in KINDS}, type=str)
Parts = Enum("Parts", {name: name for name in PARTS}, type=str)


_ALL = Parts("all")


class KvFormat(str, Enum):
    fp8 = "fp8"
    int8 = "int8"
    int4 = "int4"


class Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"

    @property
    def torch(self) -> torch.dtype:
        return torch.bfloat16 if self is Dtype.bf16 else torch.float16


ModelOption = Annotated[str, typer.Option("--model", help="Folder of a checkpoint, or a name on the Hugging Face hub.")]
PromptOption = Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; several times for several. Default: lines of stdin.")]
ChatOption = Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message, put into the tokenizer's chat template.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="With --chat: the system's message.")]
QuantizeOption = Annotated[Quantize | None, typer.Option("--quantize", help="Quantise weights while they are loaded.")]
HeadOption = Annotated[Quantize | None, typer.Option("--quantize-head", help="Quantise the head, which --quantize leaves in 16 bits.")]
GroupOption = Annotated[int | None, typer.Option("--group-size", help="Columns of a scale. Default: the format's usual one.")]
PartsOption = Annotated[Parts, typer.Option("--parts", help="What is quantised.")]
KvOption = Annotated[KvFormat | None, typer.Option("--kv-cache", help="Format of the KV cache. Default: 16 bits.")]
NewOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate, at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0: the most probable token.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Of so many most probable tokens; 0: of all.")]
TopPOption = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Of the fewest tokens with that probability together.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of the draws. Default: another one in each run.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends a completion; several times for several.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Type of activations, and of weights that are not quantised.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Default: the GPU, or the CPU where there is none.")]
RanksOption = Annotated[int, typer.Option("--tensor-parallel", min=1, help="GPUs that each layer is divided among; a process for each.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print completions as JSON: tokens, text, why they ended, times.")]
LengthOption = Annotated[int | None, typer.Option("--max-length", help="Tokens of the longest sequence. Default: what the prompts take.")]
ShapeOption = Annotated[str, typer.Option("--random", help=f"A published shape with random weights: {', '.join(models.MODELS)}.")]
LayersOption = Annotated[int | None, typer.Option("--layers", min=1, help="Only so many of its layers.")]
BatchOption = Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes of decoding.")]
ContextOption = Annotated[int, typer.Option("--context", min=1, help="Tokens of each sequence in front of the steps that are timed.")]
PrefillOption = Annotated[str, typer.Option("--prefill", help="Comma-separated lengths of prompts; empty: none.")]
StepsOption = Annotated[int, typer.Option("--steps", min=3, help="Steps of decoding that are timed.")]


def _stop(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {message}", markup=False)
    return typer.Exit(1)


def _need_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise _stop("transformers is not installed: pip install 'minfer[transformers]'")


def _device_of(device: str | None) -> str:
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def run_generate(
    model: ModelOption,
    prompt: PromptOption = None,
    chat: ChatOption = False,
    system: SystemOption = None,
    quantize: QuantizeOption = None,
    quantize_head: HeadOption = None,
    group_size: GroupOption = None,
    parts: PartsOption = _ALL,
    kv_cache: KvOption = None,
    max_new_tokens: NewOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    max_length: LengthOption = None,
    dtype: DtypeOption = Dtype.bf16,
    device: DeviceOption = None,
    tensor_parallel: RanksOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts with a checkpoint, quantised ones of other tools included."""
    _need_transformers()
    from transformers import AutoTokenizer

    from ..integrations.transformers import optimize

    prompts = list(prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()])
    if not prompts:
        raise _stop("no prompt: pass --prompt, or lines on stdin")
    if tensor_parallel > 1:
        if quantize_head is not None:
            raise _stop("--quantize-head does not go with --tensor-parallel: ranks have parts of the head in 16 bits")
        if device not in (None, "cuda", "cpu"):
            raise _stop(f"--device must be cuda or cpu beside --tensor-parallel, which takes one of each rank's own, got {device}")
        if "WORLD_SIZE" not in os.environ:  # which torchrun sets
            more = [] if prompt else [x for text in prompts for x in ("--prompt", text)]
            if seed is None:  # ranks draw the same tokens
                more += ["--seed", str(int.from_bytes(os.urandom(4), "little"))]
            raise typer.Exit(_start_ranks(tensor_parallel, more, device))
        if int(os.environ["WORLD_SIZE"]) != tensor_parallel:
            raise _stop(f"--tensor-parallel must be the {os.environ['WORLD_SIZE']} ranks that torchrun started, got {tensor_parallel}")
    start = time.perf_counter()
    try:
        params = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokens = [_tokens(tokenizer, text, chat, system) for text in prompts]
        scheme = (quantize.value if quantize else None, group_size, parts.value)
        if tensor_parallel > 1:
            loaded, speaks = load_part(model, *scheme, dtype.torch, device)
        else:
            loaded, speaks = load(model, *scheme, dtype.torch, _device_of(device)), True
        if quantize_head is not None:
            loaded = optimize(loaded, head=quantize_head.value, restorable=False)
        loading = time.perf_counter() - start
        single = len(prompts) == 1 and not as_json
        completions = generate(
            loaded,
            tokens,
            params,
            tokenizer=tokenizer,
            kv_cache=kv_cache.value if kv_cache else None,
            stream=_print_piece if single and speaks else None,
            progress=not single and speaks,
            max_length=max_length,
        )
    except (ValueError, OSError) as error:
        raise _stop(str(error)) from error
    if tensor_parallel > 1:
        torch.distributed.destroy_process_group()
    if not speaks:
        return
    if as_json:
        for completion in completions:
            print(json.dumps(_facts(completion, loading)))
    elif single:
        print()
    else:
        for text, completion in zip(prompts, completions, strict=True):
            print(f"{text}\n  {completion.text}\n")


def _tokens(tokenizer: Any, text: str, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return list(tokenizer(text)["input_ids"])
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])


def _print_piece(token: Token) -> None:
    print(token.text or "", end="", flush=True)


def _facts(completion: Completion, loading: float) -> dict[str, Any]:
    times = completion.token_times
    return {
        "prompt_tokens": len(completion.prompt),
        "tokens": completion.tokens,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "loading_s": round(loading, 3),
        "first_token_s": round(times[0], 4) if times else None,
        "tokens_per_second": round((len(times) - 1) / (times[-1] - times[0]), 2) if len(times) > 1 and times[-1] > times[0] else None,
    }


def load(path: str, kind: str | None, group_size: int | None, parts: str, dtype: torch.dtype, device: str) -> Any:
    """A model in eval mode: quantised while it is loaded, or as it was quantised by whatever tool, or in 16 bits."""
    from transformers import AutoModelForCausalLM

    from ..integrations.transformers import MinferConfig, load_quantized

    if kind is None:
        return load_quantized(path, dtype=dtype, device=device)
    with torch.device(device):
        config = MinferConfig(kind, group_size=group_size, parts=parts)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config).to(device).eval()


def _start_ranks(ranks: int, more: Sequence[str], device: str | None) -> int:
    """This command once for each rank; ``more`` arguments are added. Returns the exit status."""
    if _device_of(device).startswith("cuda") and torch.cuda.device_count() < ranks:
        raise _stop(f"--tensor-parallel must be at most the {torch.cuda.device_count()} GPUs that there are, got {ranks}")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "minfer"]
    return subprocess.run([*run, *sys.argv[1:], *more], env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def load_part(path: str, kind: str | None, group_size: int | None, parts: str, dtype: torch.dtype, device: str | None) -> tuple[Any, bool]:
    """This rank's part of a model, read from the CPU's memory layer by layer; and whether this is the rank that prints."""
    import torch.distributed as dist

    from ..distributed import TensorParallel
    from ..integrations.decoder.scheme import WeightScheme
    from ..integrations.transformers import load_quantized, optimize

    gpu = _device_of(device).startswith("cuda")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    own = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", device_id=own if gpu else None)
    model = load_quantized(path, dtype=dtype, device="cpu")
    scheme = None if kind is None else WeightScheme(kind, group_size, parts)
    handle = optimize(model, weights=scheme, restorable=False, parallel=TensorParallel(device=own))
    return handle, dist.get_rank() == 0


def run_bench_model(
    shape: ShapeOption,
    quantize: QuantizeOption = None,
    quantize_head: HeadOption = None,
    group_size: GroupOption = None,
    parts: PartsOption = _ALL,
    kv_cache: KvOption = None,
    batch: BatchOption = "1,16,64",
    context: ContextOption = 1024,
    prefill: PrefillOption = "512,4096",
    steps: StepsOption = 40,
    layers: LayersOption = None,
    dtype: DtypeOption = Dtype.bf16,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file for the numbers.")] = None,
) -> None:
    """Time a model of a published shape with random weights: steps of decoding, and prompts."""
    _need_transformers()
    from ..integrations.decoder.scheme import WeightScheme
    from ..integrations.transformers import optimize

    try:
        batches, lengths = _numbers("--batch", batch), _numbers("--prefill", prefill)
        changes = {} if layers is None else {"num_hidden_layers": layers}
        model = models.random_model(shape, device=_device_of(device), dtype=dtype.torch, **changes)
        scheme = WeightScheme(quantize.value, group_size, parts.value) if quantize else None
        head = quantize_head.value if quantize_head else None
        handle = optimize(model, weights=scheme, head=head, restorable=False)
        longest = max([context + steps + 64, *lengths]) + 64
        options = dict(kv_cache=kv_cache.value if kv_cache else None, max_length=longest, share_prefixes=False)
        engine = engine_of(handle, max_rows=max([*batches, 1]), step_tokens=max(8192, *batches), **options)
    except ValueError as error:
        raise _stop(str(error)) from error
    with torch.inference_mode():
        models.fill_cache(engine)
        decode = [models.decode_times(engine, size, context, steps=steps) for size in batches]
        prompts = [(length, models.prefill_ms(engine, length)) for length in lengths]
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    console.print(str(handle), markup=False)
    table = Table("batch", "context", "ms a step", "p10", "p90", "tokens/s", "floor ms", "of floor", "launches", box=None, pad_edge=False)
    for own in decode:
        table.add_row(
            str(own.batch),
            str(own.context),
            f"{own.ms:.3f}",
            f"{own.p10:.3f}",
            f"{own.p90:.3f}",
            f"{own.tokens_per_second:.0f}",
            f"{own.floor_ms:.3f}",
            f"{own.fraction:.2f}",
            str(own.launches),
        )
    console.print(table)
    if prompts:
        table = Table("prompt", "ms to the first token", "tokens/s", box=None, pad_edge=False)
        for length, ms in prompts:
            table.add_row(str(length), f"{ms:.2f}", f"{length / ms * 1e3:.0f}")
        console.print(table)
    if out is not None:
        facts = {
            "model": shape,
            "weights": quantize.value if quantize else None,
            "head": head,
            "kv_cache": kv_cache.value if kv_cache else None,
        }
        rows = {"decode": [own.as_dict() for own in decode], "prefill": [{"length": n, "ms": ms} for n, ms in prompts]}
        out.write_text(json.dumps(facts | rows, indent=1) + "\n")


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option} must be comma-separated integers, got {text!r}") from None
    if any(number < 1 for number in numbers):
        raise ValueError(f"{option} must be of 1 or more, got {text!r}")
    return numbers
