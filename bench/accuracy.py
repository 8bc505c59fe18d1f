"""What quantisation costs on weights that were trained: perplexity and agreement, through the kernels that decode.

    python -m bench.accuracy --train 240 --out bench/results/<device>/accuracy.json      # trains a small model for 240 s first
    python -m bench.accuracy --model PATH --text FILE                                    # a local checkpoint, on any text

The small model is of Llama's architecture over bytes, trained on the text that ships with Python: the sources and documentation of its
standard library. Its weights are kept in no repository. A tenth of the files is held out, and is what is measured.

Every format reads the held-out text token by token, a batch of sequences at a time, as a server would decode it: each step appends to the
cache under test and attends to it, and multiplies the weights under test by as few rows as there are sequences. Reported are
the perplexity (of bytes, for the small model), the share of tokens for which the most probable next token is that of the 16-bit model, and
the mean Kullback-Leibler divergence of the next token's distribution from the 16-bit model's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from minfer.integrations.decoder.scheme import WeightScheme
from minfer.integrations.transformers import optimize
from minfer.measure.benchmarking import run_facts, write_results
from torch import Tensor

CONFIGS: dict[str, tuple[WeightScheme | None, str | None]] = {
    "16 bits": (None, None),
    "w4a16, groups of 128": (WeightScheme("w4a16", 128), None),
    "w4a16, groups of 32": (WeightScheme("w4a16", 32), None),
    "nf4": (WeightScheme("nf4"), None),
    "mxfp4": (WeightScheme("mxfp4"), None),
    "w8a16": (WeightScheme("w8a16"), None),
    "fp8, blocks": (WeightScheme("fp8"), None),
    "fp8, rows": (WeightScheme("fp8", -1), None),
    "int8, rows": (WeightScheme("int8"), None),
    "fp8 cache": (None, "fp8"),
    "int8 cache": (None, "int8"),
    "int4 cache": (None, "int4"),
    "w4a16 groups of 128, int4 cache": (WeightScheme("w4a16", 128), "int4"),
}
SIZES = dict(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)


# ---- text and training -----------------------------------------------------------------------------------------------------------------


def python_text() -> tuple[Tensor, Tensor]:
    """The bytes of the standard library's files, uint8: those to train on, and those held out, a tenth of the files by their names."""
    kept, held = [], []
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
            continue
        name = path.relative_to(folder).as_posix()
        (held if hashlib.sha256(name.encode()).digest()[0] < 26 else kept).append(path.read_bytes() + b"\n\0")
    return tuple(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) for parts in (kept, held))


def train(text: Tensor, seconds: float, device: str, *, batch: int = 48, length: int = 512, seed: int = 0) -> Any:
    """A model in eval mode, bfloat16, trained for so long; the learning rate falls to nothing at the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).float().train()
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    data, generator = text.to(device), torch.Generator(device=device).manual_seed(seed)
    start, step, loss = time.monotonic(), 0, torch.tensor(math.nan)
    while (spent := (time.monotonic() - start) / seconds) < 1.0:
        rate = 1.5e-3 * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * min(spent, 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        begins = torch.randint(0, len(data) - length - 1, (batch, 1), device=device, generator=generator)
        ids = data[begins + torch.arange(length + 1, device=device)].long()
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"  step {step}: loss {loss.item():.4f} nats a byte", flush=True)
    print(f"  {step} steps of {batch} x {length} bytes in {seconds:.0f} s, loss {loss.item():.4f}")
    return model.to(torch.bfloat16).eval()


# ---- measuring -------------------------------------------------------------------------------------------------------------------------


def sequences_of(ids: Tensor, count: int, length: int) -> Tensor:
    """[count, length] windows of a text, evenly spaced."""
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens, and a window has {length}")
    begins = torch.linspace(0, len(ids) - length, count).long()
    return torch.stack([ids[begin : begin + length] for begin in begins.tolist()]).long()


@torch.no_grad()
def decode_logprobs(model: Any, ids: Tensor) -> Tensor:
    """float32 [rows, length - 1, vocabulary]: the next token's distribution behind each token, one step a token."""
    cache, found = None, []
    for place in range(ids.shape[1] - 1):
        out = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[:, -1].float().log_softmax(-1))
    return torch.stack(found, 1)


def measure(model: Any, ids: Tensor, names: list[str]) -> list[dict[str, Any]]:
    """A row for each format: perplexity, and nearness to the 16-bit model."""
    target, baseline, rows = ids[:, 1:, None], None, []
    for name in dict.fromkeys(["16 bits", *names]):
        scheme, kv_cache = CONFIGS[name]
        start = time.monotonic()
        with optimize(model, weights=scheme, kv_cache=kv_cache) as handle:
            if handle.left:
                raise RuntimeError(f"{name}: something was left to transformers:\n{handle}")
            logprobs = decode_logprobs(model, ids)
        baseline = logprobs if baseline is None else baseline
        loss = -logprobs.gather(2, target).mean().item()
        agree = (logprobs.argmax(-1) == baseline.argmax(-1)).float().mean().item()
        divergence = (baseline.exp() * (baseline - logprobs)).sum(-1).mean().item()
        row = {"format": name, "perplexity": math.exp(loss), "agreement": agree, "kl": divergence}
        rows.append(row)
        print(
            f"  {name:34s} perplexity {row['perplexity']:8.4f}  agreement {agree:.4f}  KL {divergence:.2e}  "
            f"({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", type=float, default=240.0, metavar="SECONDS", help="how long the small model is trained")
    parser.add_argument("--model", help="a local checkpoint in the small model's place")
    parser.add_argument("--text", type=Path, help="with --model: what it reads")
    parser.add_argument("--formats", help="separated by semicolons; default: " + "; ".join(CONFIGS))
    parser.add_argument("--rows", type=int, default=16, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="results file, bench/results/<device>/accuracy.json")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    args = parser.parse_args()
    names = list(CONFIGS) if args.formats is None else [name.strip() for name in args.formats.split(";")]
    unknown = [name for name in names if name not in CONFIGS]
    if unknown:
        parser.error(f"--formats must be of {'; '.join(CONFIGS)} (separated by semicolons), got {unknown[0]!r}")
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text go together")
    if args.model is None:
        kept, held = python_text()
        print(f"{len(kept) / 1e6:.1f} MB to train on, {len(held) / 1e6:.1f} MB held out")
        model, ids, what = train(kept, args.train, args.device), held, f"bytes, {args.train:.0f} s"
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
        ids = torch.tensor(AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"])
        what = Path(args.model).name
    rows = measure(model, sequences_of(ids, args.rows, args.length).to(args.device), names)
    if args.out is not None:
        facts = run_facts() | ({"commit": args.commit} if args.commit else {})
        facts["protocol"] = f"{args.rows} sequences of {args.length} tokens, decoded token by token; model: {what}"
        shaped = [
            {"suite": "accuracy", "peer": row["format"], **{key: round(x, 6) if isinstance(x, float) else x for key, x in row.items()}}
            for row in rows
        ]
        write_results(args.out, shaped, facts)
        print(json.dumps({"written": str(args.out), "rows": len(rows)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
