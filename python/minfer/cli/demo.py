"""The demo: the operators on real tensors, each verified against the reference and, on a GPU, timed against PyTorch.

Ends in a table and a picture. On a machine without an NVIDIA GPU the CPU kernels run, and the picture shows errors instead of times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .. import reference
from ..formats.gate_up import pack_gate_up
from ..measure import benchmarking
from ..ops.gemm import gemm, gemm_gated
from ..planning.plan import Problem, runs_here


@dataclass(frozen=True)
class Case:
    """One use of an operator: ours, the same in PyTorch, and the float64 truth, each a function of one set of operands."""

    name: str
    problem: Problem
    make: Callable[[], dict[str, torch.Tensor]]
    ours: Callable[[dict[str, Any]], torch.Tensor]
    peer: Callable[[dict[str, Any]], torch.Tensor]
    truth: Callable[[dict[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    case: Case
    error: float  # of ours, against float64
    peer_error: float  # of PyTorch's same-dtype computation
    us: float | None = None
    eager_us: float | None = None
    compiled_us: float | None = None  # torch.compile of the PyTorch expression

    @property
    def verified(self) -> bool:
        return self.error <= 2 * self.peer_error + benchmarking.rounding_unit(self.case.problem.dtype)

    @property
    def best_torch_us(self) -> float | None:
        times = [t for t in (self.eager_us, self.compiled_us) if t is not None]
        return min(times) if times else None


def cases(device: str, hidden: int, intermediate: int, tokens: int, dtype: torch.dtype) -> list[Case]:
    """The linear layers of one transformer block of the given sizes, a decode step, and a shape that nothing divides."""

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).mul_(scale)

    def linear(m: int, n: int, k: int, **extra: tuple[int, ...]) -> Callable[[], dict[str, torch.Tensor]]:
        return lambda: {
            "x": normal(m, k),
            "w": normal(n, k, scale=k**-0.5),
            **{name: normal(*shape) for name, shape in extra.items()},
        }

    def plain(name: str, m: int, n: int, k: int) -> Case:
        return Case(
            name,
            Problem(m, n, k, dtype=dtype),
            linear(m, n, k),
            lambda s: gemm(s["x"], s["w"].t()),
            lambda s: torch.mm(s["x"], s["w"].t()),
            lambda s: reference.gemm(s["x"].double(), s["w"].t().double()),
        )

    def gated_operands() -> dict[str, torch.Tensor]:
        gate, up = (normal(intermediate, hidden, scale=hidden**-0.5) for _ in range(2))
        return {"x": normal(tokens, hidden), "packed": pack_gate_up(gate, up), "stacked": torch.cat((gate, up))}

    def swiglu(s: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
        gate, up = F.linear(s["x"].to(dtype), s["stacked"].to(dtype)).chunk(2, dim=-1)  # one GEMM, as serving engines do it
        return F.silu(gate) * up

    return [
        plain(f"linear, m = {tokens}", tokens, hidden, hidden),
        plain("linear, decode (m = 1)", 1, hidden, hidden),
        Case(
            "bias + gelu",
            Problem(tokens, intermediate, hidden, dtype=dtype),
            linear(tokens, intermediate, hidden, bias=(intermediate,)),
            lambda s: gemm(s["x"], s["w"].t(), bias=s["bias"], activation="gelu"),
            lambda s: F.gelu(F.linear(s["x"], s["w"], s["bias"])),
            lambda s: reference.gemm(s["x"].double(), s["w"].t().double(), bias=s["bias"], activation="gelu"),
        ),
        Case(
            "0.5 A.B + 2 C (residual)",
            Problem(tokens, hidden, hidden, dtype=dtype, c=True),
            linear(tokens, hidden, hidden, c=(tokens, hidden)),
            lambda s: gemm(s["x"], s["w"].t(), c=s["c"], alpha=0.5, beta=2.0),
            lambda s: torch.addmm(s["c"], s["x"], s["w"].t(), alpha=0.5, beta=2.0),
            lambda s: reference.gemm(s["x"].double(), s["w"].t().double(), c=s["c"], alpha=0.5, beta=2.0),
        ),
        Case(
            "silu(gate) * up (SwiGLU)",
            Problem(tokens, 2 * intermediate, hidden, dtype=dtype, gated=True),
            gated_operands,
            lambda s: gemm_gated(s["x"], s["packed"].t()),
            lambda s: swiglu(s, dtype),
            lambda s: swiglu(s, torch.float64),
        ),
        plain("odd shape", tokens - 1, hidden - 95, hidden // 2 + 3),
    ]


def run_case(case: Case, *, timed: bool, rounds: int = 15) -> Outcome:
    """Verifies, then times (values, then time)."""
    sets = benchmarking.rotation(case.make) if timed else [case.make()]
    truth = case.truth(sets[0])
    error = benchmarking.relative_error(case.ours(sets[0]), truth)
    peer_error = benchmarking.relative_error(case.peer(sets[0]), truth)
    del truth
    outcome = Outcome(case, error, peer_error)
    if not timed or not outcome.verified:
        return outcome
    peers = [case.peer]
    if _can_compile():
        peers.append(torch.compile(case.peer))
    ours, eager, *compiled = benchmarking.compare([case.ours, *peers], sets, rounds=rounds)
    return Outcome(case, error, peer_error, ours.us, eager.us, compiled[0].us if compiled else None)


def _can_compile() -> bool:
    """torch.compile makes its GPU kernels with Triton, which not every torch brings along."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def picture(outcomes: list[Outcome], path: Path) -> bool:
    """Bars per case: times on a GPU, errors on a CPU. Returns False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = all(o.us is not None for o in outcomes)
    if timed:
        series = [("minfer", [o.us for o in outcomes]), ("torch eager", [o.eager_us for o in outcomes])]
        if all(o.compiled_us is not None for o in outcomes):
            series.append(("torch.compile", [o.compiled_us for o in outcomes]))
        title, label = f"{torch.cuda.get_device_name()}: time per call, cold L2", "us"
    else:
        series = [("minfer", [o.error for o in outcomes]), ("torch, same dtype", [o.peer_error for o in outcomes])]
        title, label = "CPU: error against float64", "||out - ref|| / ||ref||"
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series):
        bars = axes.bar([x + (i - (len(series) - 1) / 2) * width for x in range(len(outcomes))], values, width, label=name)
        if timed:
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(outcomes)), [o.case.name.replace(" (", "\n(").replace(", ", ",\n") for o in outcomes], fontsize=8)
    axes.set_yscale("log")
    if timed:
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")  # the bars carry their values
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def run(path: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Runs all cases and writes the picture; returns the outcomes, in order.

    Args:
      say: called with a line of text when there is something to report.
    """
    on_gpu = runs_here()
    torch.manual_seed(0)
    with torch.inference_mode():
        if on_gpu:
            sizes = {"device": "cuda", "hidden": 4096, "intermediate": 14336, "tokens": 512, "dtype": torch.bfloat16}
        else:
            sizes = {"device": "cpu", "hidden": 512, "intermediate": 1792, "tokens": 64, "dtype": torch.bfloat16}
        outcomes = [run_case(case, timed=on_gpu) for case in cases(**sizes)]
    if not picture(outcomes, path):
        say("matplotlib is not installed: no picture (pip install matplotlib)")
    else:
        say(f"picture: {path}")
    return outcomes
