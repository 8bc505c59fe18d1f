"""The report of whole models, from made-up rows."""

from bench.report import accuracy, e2e, headlines

HEAD = dict(device="NVIDIA H200", driver="1.2", torch="2.11", cuda="13.0", commit="abc", date="2000-01-01", protocol="16 sequences")


def decode_row(form, batch, us, peer, peer_us):
    shape = {"model": "llama-3.1-8b", "format": form, "batch": batch, "context": 1024}
    facts = {"tokens_per_second": batch / us * 1e6, "launches": 230, "peak_gb": 17.5}
    return {
        "suite": "decode", "op": "decode_step", "kernel": "", "shape": shape, "dtype": form, "us": us, "p10": us, "p90": us, "peer": peer,
        "peer_us": peer_us, "ratio": peer_us / us, "floor_us": 0.9 * us, "fraction": 0.9, "rel_err": 1e-3, **facts,
    }  # fmt: skip


def test_tables():
    rows = [
        decode_row("bf16", 1, 4000.0, "transformers", 20000.0) | {"peer_launches": 900},
        decode_row("bf16", 1, 4000.0, "vllm_ops", 4800.0),
        decode_row("w4a16", 1, 1500.0, "ours:bf16", 4000.0),
        decode_row("w4a16", 16, 2000.0, "none", 0.0),
    ]
    shape = {"model": "llama-3.1-8b", "format": "bf16", "requests": 64, "rate": 8.0}
    times = dict(tokens_per_second=900.0, first_ms_p50=30.0, first_ms_p99=90.0, next_ms_p50=5.0, next_ms_p99=25.0)
    rows.append({"suite": "serving", "op": "serve", "shape": shape, "peer": "none", **times})
    seconds = dict(imported=3.0, loaded=6.5, first=7.0, more=7.4)
    start = {"suite": "start", "op": "start", "shape": {"model": "llama-3.1-8b", "format": "w4a16"}, "peer": "transformers", "ratio": 2.0}
    rows.append(start | {"seconds": seconds, "peer_seconds": {step: 2 * at for step, at in seconds.items()}})
    text = e2e.section(HEAD | {"rows": rows})
    assert "| Llama-3.1-8B | w4a16 | 3.0 | 6.5 | 7.0 | 7.4 | 6.0 | 13.0 | 14.0 | 14.8 |" in text
    assert "| Llama-3.1-8B | bf16 | 1 | 1024 | 4.00 | 250 | 90% | 230 (900) | 17.5 | 5.00 | 1.20 | - |" in text
    assert "| Llama-3.1-8B | w4a16 | 1 | 1024 | 1.50 | 667 | 90% | 230 | 17.5 | - | - | 2.67 |" in text
    assert "| Llama-3.1-8B | bf16 | 64 at 8/s | 900 | 30 / 90 | 5.0 / 25.0 |" in text
    line = headlines.section({"e2e": HEAD | {"rows": rows}})
    assert "| whole models in 16 bits, decode | two dense models, batch 1 to 256 | vLLM's operators | 1 | **1.20** | 0 |" in line
    assert "| whole models in 16 bits, decode | six models, batch 1 to 64 | transformers | 1 | **5.00** | 0 |" in line


def test_accuracy():
    rows = [{"suite": "accuracy", "peer": "int4 cache", "format": "int4 cache", "perplexity": 3.25, "agreement": 0.985, "kl": 0.0021}]
    assert "| int4 cache | 3.2500 | 98.50% | 2.1e-03 |" in accuracy.section(HEAD | {"rows": rows})
