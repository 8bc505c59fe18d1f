"""Table of the expert-parallel results: a layer on several GPUs against the same layer on one."""

from __future__ import annotations

from typing import Any

from bench.report.tables import MODEL_NAMES, facts, grouped, table


def section(results: dict[str, Any]) -> str:
    """Markdown of the whole family."""
    rows = results["rows"]
    ranks = rows[0]["shape"]["ranks"]
    modes = {
        "exchange": "with an `ExpertExchange`, in a CUDA graph",
        "capacity": "with `capacity`, in a CUDA graph",
        "needed": "without `capacity`, eager",
    }
    models = list(grouped(rows, "model"))
    lines = []
    for mode, of_mode in grouped(rows, "mode").items():
        for m, of_m in grouped(of_mode, "m").items():
            by_model = {row["shape"]["model"]: f"{row['us']:.0f} us: {row['ratio']:.2f}" for row in of_m}
            lines.append([f"{m}, {modes.get(mode, mode)}", *(by_model.get(model, "-") for model in models)])
    text = (
        f"{facts(results)} `minfer.distributed.expert_parallel_moe` on {ranks} GPUs against `moe_ffn` with all experts on one, uniform"
        f" routing: the time of the slower rank, and how many times as fast that is as one GPU. Below 1, one GPU is faster.\n\n"
    )
    return text + table([f"tokens of all {ranks} ranks", *(MODEL_NAMES.get(model, model) for model in models)], lines)
