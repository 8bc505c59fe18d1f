"""The demo: every family of operators on real tensors, verified against float64 and, on a GPU, timed against PyTorch.

* :mod:`.case`: what one row of the demo is, and the rule that its values are held to;
* :mod:`.families`: the cases, a file for each family of operators;
* :mod:`.runner`: verifies the cases, then times them;
* :mod:`.table` and :mod:`.picture`: how the outcomes are shown.

On a machine without an NVIDIA GPU the CPU kernels run with smaller shapes, and the picture shows errors instead of speed-ups.
"""

from .case import Case, Outcome, Peer, Work
from .runner import run, run_case

__all__ = ["Case", "Outcome", "Peer", "Work", "run", "run_case"]
