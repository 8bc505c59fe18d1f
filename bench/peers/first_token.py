"""A process that loads a checkpoint and generates, and prints seconds: `python -m bench.peers.first_token minfer|transformers PATH`.

Seconds count from the interpreter's first line: until ``imported`` the packages, ``loaded`` the weights to the GPU, ``first`` token of a
prompt, ``more``: MORE further tokens, with whatever is captured or compiled on the way.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402

MORE = 32
PROMPT = list(range(5, 69))


def minfer_seconds(path: str) -> dict[str, float]:
    import torch
    from minfer.generation import SamplingParams, engine_of
    from minfer.integrations.transformers import load_quantized, optimize

    seconds = {"imported": time.perf_counter() - BEGIN}
    model = load_quantized(path, device="cuda")
    torch.cuda.synchronize()
    seconds["loaded"] = time.perf_counter() - BEGIN
    engine = engine_of(optimize(model, restorable=False), max_length=1024, max_rows=8)
    request = engine.submit(PROMPT, SamplingParams(max_new_tokens=1 + MORE, ignore_eos=True))
    while engine.busy:
        engine.step()
    now, times = time.perf_counter(), request.completion.token_times
    return seconds | {"first": now - BEGIN - (times[-1] - times[0]), "more": now - BEGIN}


def transformers_seconds(path: str) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    seconds = {"imported": time.perf_counter() - BEGIN}
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    torch.cuda.synchronize()
    seconds["loaded"] = time.perf_counter() - BEGIN
    ids = torch.tensor([PROMPT], device="cuda")
    for name, count in (("first", 1), ("more", 1 + MORE)):
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - BEGIN
    return seconds


if __name__ == "__main__":
    found = {"minfer": minfer_seconds, "transformers": transformers_seconds}[sys.argv[1]](sys.argv[2])
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
