"""The regret of plans that choose among a few kernels: all of them compute a problem, are held against the operator's own choice, and are
timed in turn with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import harness

DIFFERENCE = 0.02  # that a kernel's output may have from the own choice's, relatively: another order of the sums changes far less


@dataclass(frozen=True)
class Choice:
    """A kernel as ``kernel=`` takes it, and what the plan says of it."""

    kernel: str
    predicted_us: float
    floor_us: float
    launch: str = ""  # options behind the @

    @property
    def override(self) -> str:
        return f"{self.kernel}@{self.launch}" if self.launch else self.kernel


@dataclass
class Contest:
    """Times of the operator's own choice and, by override, of all choices that ran; and what was wrong with the others."""

    own_us: float
    us: dict[str, float]
    failed: dict[str, str] = field(default_factory=dict)
    difference: float = 0.0  # the largest of those that were timed


def difference(out: torch.Tensor, want: torch.Tensor, chunk: int = 1 << 26) -> float:
    """||out - want|| / ||want||, inf where one of them is not finite; in float32, piece by piece."""
    apart = norm = torch.zeros((), dtype=torch.float64, device=out.device)
    for x, y in zip(out.flatten().split(chunk), want.flatten().split(chunk), strict=True):
        y = y.float()
        apart = apart + torch.linalg.vector_norm(x.float() - y).double().square()
        norm = norm + torch.linalg.vector_norm(y).double().square()
    found = (apart.sqrt() / norm.sqrt().clamp(min=1e-30)).item()
    return found if math.isfinite(found) else math.inf


def hold(
    run: Callable[[int, str | None], torch.Tensor], poison: Callable[[], None], choices: Sequence[Choice], sets: int, **options: Any
) -> Contest:
    """Values first, then times.

    Args:
      run: computes the set of this number by the kernel of this override, None: the own choice; returns the output.
      poison: fills with NaN what the next output will lie in.
      choices: that are forced.
      sets: of operands.
      options: of :func:`bench.harness.brief_times`.

    Raises:
      ArithmeticError: the own choice's output is not finite. RuntimeError: the own choice does not run.
    """
    poison()
    want = run(0, None).clone()
    if not torch.isfinite(want).all():
        raise ArithmeticError("the own choice's output is not finite")
    failed: dict[str, str] = {}
    right, largest = [], 0.0
    for choice in choices:
        try:
            poison()
            apart = difference(run(0, choice.override), want)
        except RuntimeError as error:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises again where the context is lost
            failed[choice.override] = f"{type(error).__name__}: {error}"
            continue
        if apart <= DIFFERENCE:
            right.append(choice.override)
            largest = max(largest, apart)
        else:
            failed[choice.override] = f"ArithmeticError: it differs from the own choice by {apart:.3g}"
    del want
    fns: dict[str, Callable[[int], Any]] = {"": lambda i: run(i, None)}
    fns |= {override: lambda i, override=override: run(i, override) for override in right}
    us, not_timed = harness.brief_times(fns, sets, **options)
    if "" not in us:
        raise RuntimeError(not_timed[""])
    return Contest(us.pop(""), us, failed | not_timed, largest)


def rows_of(suite: str, described: dict[str, Any], own: Choice, contest: Contest) -> list[dict[str, Any]]:
    """A row like a comparison with our own best candidate, which the pick may be: ratio = best / pick, so regret = 1 / ratio - 1. And a row
    for each kernel that did not run, or whose values were wrong."""
    best_us, best = min([(contest.own_us, own.override), *((us, override) for override, us in contest.us.items())])
    row = {
        "suite": suite, **described, "kernel": own.kernel, "launch": own.launch, "us": round(contest.own_us, 3), "peer": "ours:best",
        "peer_us": round(best_us, 3), "ratio": round(best_us / contest.own_us, 4), "regret": round(contest.own_us / best_us - 1, 4),
        "best": best, "candidates": len(contest.us), "predicted_us": round(own.predicted_us, 3), "floor_us": round(own.floor_us, 3),
        "fraction": round(own.floor_us / contest.own_us, 4), "difference": float(f"{contest.difference:.3e}"),
    }  # fmt: skip
    return [row, *({"suite": suite, **described, "peer": override, "error": why[:300]} for override, why in contest.failed.items())]


def line_of(suite: str, problem: Any, row: dict[str, Any], contest: Contest) -> str:
    """What is printed of a problem."""
    pick = f"{row['kernel']}@{row['launch']}" if row["launch"] else row["kernel"]
    text = f"{suite} {problem}: {row['us']:.2f} us, regret {row['regret']:.1%} of {row['candidates']} [{pick}]"
    text += f", best {row['peer_us']:.2f} us [{row['best']}]" if row["regret"] > 0.03 else ""
    return text + "".join(f"; FAILED {override}: {why[:100]}" for override, why in contest.failed.items())


def measurements_of(choices: Sequence[Choice], contest: Contest) -> list[list[Any]]:
    """Kernel, launch, predicted and measured us of the choices that were timed, for files of measurements."""
    timed = (choice for choice in choices if choice.override in contest.us)
    return [[c.kernel, c.launch, round(c.predicted_us, 3), round(contest.us[c.override], 3)] for c in timed]
