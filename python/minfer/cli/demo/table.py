"""The demo's table, and the lines that say what its columns are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ...measure import benchmarking
from .case import Outcome

_PEER = "fastest in PyTorch"
_VALUES = ("error", "allowed", "verified")
_TIMES = ("us", "torch us", _PEER, "speed-up", "of floor")
_ERRORS = (
    "error: ||out - truth|| / ||truth|| of the worst row. The truth is float64 of the operands as given; codes are the numbers that they",
    "stand for. allowed: twice the error of PyTorch in the same types, plus one rounding; of an append, 1.05 times the error of the same",
    "quantisation by PyTorch.",
)
_PROTOCOL = (
    "us: median of interleaved CUDA-graph replays, operands rotated through three times the L2. speed-up: over the fastest expression of",
    "PyTorch; where its name says 16-bit, it reads or writes 16-bit tensors, contiguous ones in decode, in place of codes and pages.",
    "of floor: the least time that the bytes and the flops take at the device's rates, as a share of ours.",
)


def is_timed(outcomes: Sequence[Outcome]) -> bool:
    return any(o.us is not None for o in outcomes)


def table(outcomes: Sequence[Outcome], where: str) -> Table:
    """A row for each case, under the name of its family; times where there are some."""
    timed = is_timed(outcomes)
    found = Table(title=f"torch.ops.minfer on {where}", title_justify="left", header_style="bold", box=None, pad_edge=False)
    found.padding = (0, 1, 0, 0)  # so that the widest rows fit into 140 columns
    for name in ("case", "shape", *_VALUES, *(_TIMES if timed else ())):
        text = name in ("case", "shape", _PEER)
        found.add_column(name, justify="left" if text else "right", no_wrap=name != _PEER)
    family = None
    for o in outcomes:
        if o.case.family != family:
            family = o.case.family
            found.add_row(family, style="bold")
        cells = ["  " + o.case.name, o.case.shape]
        cells += [f"{o.error:.1e}", f"{o.allowed:.1e}", "yes" if o.verified else "NO"]
        if o.us is not None:
            best = o.best_peer
            peer = ["-", "-", "-"] if best is None else [f"{o.peers_us[best]:.1f}", best, f"{o.speed_up:.2f}x"]
            cells += [f"{o.us:.1f}", *peer, f"{100 * o.floor_us / o.us:.0f} %"]
        found.add_row(*cells)
    return found


def legend(outcomes: Sequence[Outcome]) -> list[str]:
    """What the columns are, and the mean of the speed-ups."""
    if not is_timed(outcomes):
        return [*_ERRORS, "No GPU that this build has kernels for: the CPU kernels ran."]
    speed_ups = [o.speed_up for o in outcomes if o.speed_up is not None]
    mean = [f"speed-up over PyTorch, geometric mean of {len(speed_ups)} cases: {benchmarking.geomean(speed_ups):.2f}x"] if speed_ups else []
    return [*_ERRORS, *_PROTOCOL, *mean]
