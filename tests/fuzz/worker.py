"""The process that runs cases. It says which case it begins before it begins it, so that whoever watches knows which one was its last."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass
class Plan:
    """What to run: cases from ``first`` on (``names``: just these), until the watcher ends it."""

    seed: int
    device: str
    first: int = 0
    names: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    threads: int = 1


def _meet_fate(name: str) -> None:
    """For the tests of the supervisor: MINFER_FUZZ_FATE has die:CASE and hang:CASE."""
    fates = os.environ.get("MINFER_FUZZ_FATE", "").split()
    if f"die:{name}" in fates:
        os._exit(7)
    if f"hang:{name}" in fates:
        time.sleep(3600)


def work(plan: Plan, pipe: Connection) -> None:
    """Sends ("ready",), then ("begin", index, name), ("drawn", parameters) and ("end", index, result) of each case; ("done",) where names
    come to an end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the watcher ends it
    import torch

    warnings.filterwarnings("ignore", message="torch.searchsorted")  # of strided weights that are quantised
    torch.set_num_threads(plan.threads)
    from .runner import case_of, run_case

    device = torch.device(plan.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0 if device.index is None else device.index)
        torch.zeros(1, device=device)
    pipe.send(("ready",))
    index = plan.first
    while not plan.names or index < len(plan.names):
        name = plan.names[index] if plan.names else case_of(plan.seed, index, list(plan.families))
        pipe.send(("begin", index, name))
        _meet_fate(name)
        result = run_case(name, plan.seed, device, lambda parameters: pipe.send(("drawn", parameters)))
        pipe.send(("end", index, result.as_dict()))
        if result.fatal:
            os._exit(3)  # a lost CUDA context: an orderly end would raise again
        index += 1
    pipe.send(("done",))
