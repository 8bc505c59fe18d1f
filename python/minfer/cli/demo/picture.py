"""The demo's picture: a bar for each case, speed-ups over PyTorch on a GPU, errors and what is allowed of them on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .case import Outcome


def draw(outcomes: Sequence[Outcome], path: Path) -> bool:
    """Writes the picture. Returns False where matplotlib, which is optional, is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [o for o in outcomes if o.speed_up is not None]
    shown = timed or list(outcomes)
    families = list(dict.fromkeys(o.case.family for o in shown))
    colors = {family: f"C{i % 10}" for i, family in enumerate(families)}
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.3 * len(shown)), layout="constrained")
    values = [o.speed_up for o in shown] if timed else [o.error for o in shown]
    rows = range(len(shown))
    bars = axes.barh(rows, values, 0.7, color=[colors[o.case.family] for o in shown])
    axes.set_yticks(rows, [f"{o.case.name}, {o.case.shape}" for o in shown], fontsize=8)
    axes.margins(y=0.02)
    axes.invert_yaxis()  # in the order of the table
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[family], label=family) for family in families]
    if timed:
        axes.axvline(1.0, color="black", linewidth=1)
        axes.bar_label(bars, [f"{value:.2f}x" for value in values], padding=3, fontsize=8)
        axes.margins(x=0.1)
        axes.set_xlabel("speed-up over the fastest PyTorch expression")
        axes.set_title(f"{torch.cuda.get_device_name()}: time of PyTorch / time of minfer, cold L2")
    else:
        handles += axes.plot([o.allowed for o in shown], rows, "|", color="black", markersize=11, label="allowed")
        axes.set_xscale("log")
        axes.set_xlim(left=1e-4)  # an append to a 16-bit cache has no error
        axes.set_xlabel("||out - truth|| / ||truth|| of the worst row")
        axes.set_title("CPU: error against float64")
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
