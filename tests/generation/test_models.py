"""Models of published shapes with random weights, what is measured of them, and the commands."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from minfer.cli import main as cli  # noqa: E402
from minfer.cli.models import load  # noqa: E402
from minfer.generation import Engine, SamplingParams, engine_of  # noqa: E402
from minfer.integrations.decoder.scheme import WeightScheme  # noqa: E402
from minfer.integrations.transformers import optimize  # noqa: E402
from minfer.integrations.transformers.model import decoder_model  # noqa: E402
from minfer.measure import models  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from ..integrations.tiny_models import tiny_model  # noqa: E402

_SMALL = dict(num_hidden_layers=1, vocab_size=512, pad_token_id=0)


def invoke(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments), input=stdin)
    return result.exit_code, result.output


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "llama-3.1-70b"])
def test_published_shapes(name):
    """Each is run as a whole, and a step and a prompt are timed."""
    changes = (
        {}
        if name == "gpt2"
        else _SMALL | ({"num_experts": 8} if "a3b" in name else {}) | ({"num_local_experts": 4} if "oss" in name else {})
    )
    model = models.random_model(name, device="cpu", **changes)
    with torch.no_grad(), optimize(model) as handle:
        assert not handle.left, handle
        engine = engine_of(handle, max_length=128, max_rows=2, share_prefixes=False)
        models.fill_cache(engine)
        times = models.decode_times(engine, 2, 70, steps=3, bandwidth=1e6)
        assert (times.batch, times.context) == (2, 70) and times.p10 <= times.ms <= times.p90
        assert times.fraction == pytest.approx(times.floor_ms / times.ms) and times.tokens_per_second == pytest.approx(2e3 / times.ms)
        assert engine.pool.free == engine.pool.count
        assert models.prefill_ms(engine, 9, rounds=1) > 0
        served = models.serving_times(engine, requests=3, rate=1000.0, prompt=(2, 5), new=(2, 3))
        assert served.requests == 3 and served.first_ms_p99 >= served.first_ms_p50 > 0 and not math.isnan(served.next_ms_p99)


def test_bytes_of_a_step():
    """Weights but the embedding table, experts by how many are expected to be chosen, and keys and values within windows."""
    model = models.random_model("llama-3.1-8b", device="cpu", **_SMALL, hidden_size=1024, intermediate_size=3584, head_dim=128)
    numbers = 1024 * 6144 + 4096 * 1024 + 3 * 1024 * 3584  # of a layer's products: 32 heads and twice 8 of 128 columns
    with torch.no_grad(), optimize(model) as handle:
        engine = engine_of(handle, max_length=2048, max_rows=1)
        layer = 2 * (numbers + 2 * 1024)
        want = layer + 2 * 512 * 1024 + 3 * 1000 * 2 * 2 * 8 * 128
        assert models.decode_bytes(engine.model, engine, 3, 1000) == pytest.approx(want, rel=1e-6)
    with torch.no_grad(), optimize(model, weights="w4a16", restorable=False) as handle:
        engine = engine_of(handle, max_length=2048, max_rows=1, kv_cache="int8")
        codes = numbers * (0.5 + 2 / 128)
        want = codes + 2 * (2 * 1024 + 512 * 1024) + 1000 * 2 * 8 * (128 + 4)
        assert models.decode_bytes(engine.model, engine, 1, 1000) == pytest.approx(want, rel=1e-6)
    model = models.random_model("gpt-oss-20b", device="cpu", **_SMALL, num_local_experts=8, hidden_size=576, intermediate_size=576)
    with torch.no_grad(), optimize(model, weights=WeightScheme("mxfp4", parts="experts")) as handle:
        engine = engine_of(handle, max_length=2048, max_rows=64)
        one, many = (models.decode_bytes(engine.model, engine, batch, 1) for batch in (1, 64))
        expert = 3 * 576 * 576 * (0.5 + 1 / 32) + 2 * 3 * 576  # with the biases
        assert many - one == pytest.approx(4 * expert + 63 * 2 * 2 * 8 * 64, rel=1e-3)  # 4 of 8 experts, or all; a key each


def test_repeated_layers():
    """More layers, each with weights in its own place, are an engine's like others."""
    model = models.random_model("llama-3.1-8b", device="cpu", **_SMALL, hidden_size=128, intermediate_size=256, num_attention_heads=8)
    with torch.no_grad(), optimize(model, weights="int8", restorable=False) as handle:
        one = decoder_model(handle, 64)
        three = models.repeated(one, 3)
        assert len(one.layers) == 1 and len(three.layers) == 3
        places = {x.data_ptr() for layer in three.layers for x in layer.buffers()}
        assert len(places) == 3 * len(list(one.layers[0].buffers()))
        engine = Engine(three, max_length=64, max_rows=2)
        request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4, ignore_eos=True))
        engine.run()
    assert len(request.completion.tokens) == 4


def test_unknown_shapes():
    with pytest.raises(ValueError, match="name must be one of llama-3.1-8b, .*, got 'llama-9'"):
        models.random_model("llama-9", device="cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model whose tokens are bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models as kinds, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bytes")
    tiny_model("llama", vocab_size=300, hidden_size=128, intermediate_size=256).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(kinds.BPE(vocab={c: i + 3 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)
    return str(folder)


def completions_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_generate(checkpoint):
    common = ("generate", "--model", checkpoint, "--device", "cpu", "--max-new-tokens", "6", "--json")
    code, text = invoke(*common, "--prompt", "Hello", "--prompt", "b")
    assert code == 0, text
    first, second = completions_of(text)
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (5, 1) and len(first["tokens"]) == 6 and first["finish_reason"] == "length"
    code, text = invoke(*common, stdin="Hello\n\nb\n")
    assert [c["tokens"] for c in completions_of(text)] == [first["tokens"], second["tokens"]]
    code, text = invoke(*common, "--prompt", "Hi", "--chat", "--system", "Be short.")
    assert completions_of(text)[0]["prompt_tokens"] == len("system: Be short.\nuser: Hi\nassistant: ")
    for more in (
        ("--quantize", "w4a16", "--group-size", "32"),
        ("--quantize", "fp8", "--kv-cache", "int8"),
        ("--quantize", "w4a16", "--group-size", "32", "--quantize-head", "w8a16"),
        ("--temperature", "1", "--seed", "3"),
    ):
        code, text = invoke(*common, "--prompt", "Hello", *more)
        assert code == 0 and len(completions_of(text)[0]["tokens"]) == 6, text
    code, text = invoke(*common[:-1], "--prompt", "Hello")
    assert code == 0 and "\ufffd" in text or len(text.strip()) > 0


@pytest.mark.parametrize("options", [(), ("--quantize", "int8", "--temperature", "1")])
def test_generate_among_two_processes(checkpoint, options):
    command = [sys.executable, "-m", "minfer", "generate", "--model", checkpoint, "--device", "cpu", "--max-new-tokens", "6", "--json"]
    run = subprocess.run([*command, "--tensor-parallel", "2", *options], input="Hello\nb\n", capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = completions_of(run.stdout)
    assert [c["prompt_tokens"] for c in found] == [5, 1]
    # Drawn without a seed, one token in a hundred ends its sequence.
    assert all(len(c["tokens"]) == 6 or (c["finish_reason"] == "stop" and "--temperature" in options) for c in found)


def test_pipeline(checkpoint):
    """transformers' pipeline over an optimised model: a batch of prompts of different lengths gets the tokens that each gets alone."""
    from transformers import pipeline

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = dict(max_new_tokens=6, do_sample=False, return_full_text=False)
    want = [write(prompt, **options)[0]["generated_text"] for prompt in ("Hello", "b", "pages")]
    model.to(torch.bfloat16)
    with optimize(model):
        have = [found[0]["generated_text"] for found in write(["Hello", "b", "pages"], batch_size=3, **options)]
        assert [write(prompt, **options)[0]["generated_text"] for prompt in ("Hello", "b", "pages")] == have
    assert sum(x == y for x, y in zip(want, have, strict=True)) >= 2  # but for ties


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "w4a16"])
def test_loads_to_a_gpu(checkpoint, kind, tmp_path):
    """Weights go to the GPU as they are read."""
    model = load(checkpoint, kind, 32 if kind else None, "all", torch.bfloat16, "cuda")
    assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"cuda"}
    ids = torch.tensor([[5, 6, 7]], device="cuda")
    model.save_pretrained(tmp_path)
    again = load(str(tmp_path), None, None, "all", torch.bfloat16, "cuda")
    assert {x.device.type for x in (*again.parameters(), *again.buffers())} == {"cuda"}
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_bench_model(tmp_path):
    out = tmp_path / "times.json"
    arguments = (
        "--device",
        "cpu",
        "--layers",
        "1",
        "--batch",
        "1,2",
        "--context",
        "20",
        "--steps",
        "3",
        "--prefill",
        "8",
        "--out",
        str(out),
    )
    code, text = invoke("bench-model", "--random", "gpt2", *arguments, "--quantize", "int8", "--quantize-head", "w4a16")
    assert code == 0 and "1 x GPT2Block" in text and "tokens/s" in text, text
    facts = json.loads(out.read_text())
    assert [row["batch"] for row in facts["decode"]] == [1, 2] and facts["prefill"][0]["length"] == 8 and facts["weights"] == "int8"
    assert facts["head"] == "w4a16"


@pytest.mark.parametrize("arguments, message", [
    (("generate", "--model", "/nowhere", "--prompt", "x"), "error: "),
    (("bench-model", "--random", "gpt3", "--device", "cpu"), "name must be one of"),
    (("bench-model", "--random", "gpt2", "--device", "cpu", "--batch", "a"), "--batch must be comma-separated integers, got 'a'"),
    (("bench-model", "--random", "gpt2", "--device", "cpu", "--prefill", "0"), "--prefill must be of 1 or more, got '0'"),
])  # fmt: skip
def test_errors(arguments, message):
    code, text = invoke(*arguments)
    assert code == 1 and message in text and "Traceback" not in text, text


def test_no_prompt_and_bad_options(checkpoint):
    assert invoke("generate", "--model", checkpoint, stdin="\n")[1].startswith("error: no prompt")
    code, text = invoke("generate", "--model", checkpoint, "--device", "cpu", "--prompt", "x", "--quantize", "fp8", "--group-size", "64")
    assert code == 1 and "group_size must be 128 or -1 for fp8, got 64" in text
    code, text = invoke("generate", "--model", checkpoint, "--device", "cpu", "--prompt", "x" * 600)
    assert code == 1 and "more than max_length = 512" in text
