"""One problem's contest: every contestant is verified, then all are timed in turn, and each peer gets a row with its best variant."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from minfer.measure import benchmarking
from minfer.measure.benchmarking import Timing

from bench import harness

OURS = "ours/default"


class Inviter:
    """Brings contestants together; that a peer is left out is said once."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.peers = [peer for peer in args.peers.split(",") if peer]
        self.said: set[str] = set()

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            print(text, flush=True)

    def invite(self, own: Mapping[str, Any], names: Iterable[str], peers: Any, operands: Any, of_what: Any) -> dict[str, Any]:
        """ "ours/.." and "peer/variant" -> the variant.

        Args:
          own: those of this package.
          names: of peers, those of them in ``--peers`` are asked.
          peers: the module that has PEERS and Unavailable.
          of_what: what a peer that is left out is left out of.
        """
        found = dict(own)
        for name in names:
            if name not in self.peers:
                continue
            try:
                found |= {f"{name}/{variant.name}": variant for variant in peers.PEERS[name](operands)}
            except peers.Unavailable as why:
                self.say_once(f"{name} is left out of {of_what}: {str(why)[-300:]}")
        return found


def free() -> None:
    """Graphs and their memory pools go before the next problem's operands come."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass
class Contest:
    """What became of each contestant, by "name/variant": its time, its relative error, and why it is out."""

    timings: dict[str, Timing]
    errors: dict[str, float]
    failed: dict[str, str]

    @property
    def mine(self) -> Timing:
        return self.timings[OURS]

    def rows(self, described: dict[str, Any], *, kernel: str, floor_us: float, **beside: Any) -> list[dict[str, Any]]:
        """A row for each peer; ``described`` has suite, op, shape and dtype, ``beside`` more fields."""
        rows = []
        for name in dict.fromkeys(key.partition("/")[0] for key in (*self.timings, *self.failed)):
            if name == "ours":
                continue
            keys = [key for key in self.timings if key.partition("/")[0] == name]
            if not keys:
                why = next(text for key, text in self.failed.items() if key.partition("/")[0] == name)
                rows.append({**described, "peer": name, "error": why[:300]})
                continue
            key = min(keys, key=lambda key: self.timings[key].us)
            row = benchmarking.result_row(
                kernel=kernel, timing=self.mine, peer=name, peer_us=self.timings[key].us, floor_us=floor_us,
                rel_err=self.errors[OURS], **described,
            )  # fmt: skip
            rows.append(row | beside | {"peer_variant": key.partition("/")[2], "peer_rel_err": float(f"{self.errors[key]:.3e}")})
        return rows


def hold(
    variants: Mapping[str, Any], error_of: Callable[[Any], float], most: Callable[[str], float], sets: int, args: argparse.Namespace
) -> Contest:
    """Verifies the variants, and times those whose results are right.

    Args:
      variants: "ours/.." and "name/variant" -> what has ``fn``, which is called with the number of a set of operands.
      error_of: runs a variant once, and returns its result's relative error.
      most: a variant's key -> the largest error that is right.
      sets: of operands.
      args: rounds and graph_us.

    Raises:
      ArithmeticError: ours are wrong. RuntimeError: ours could not be timed.
    """
    fns, errors, failed = {}, {}, {}
    for key, variant in variants.items():
        try:
            errors[key] = error_of(variant)
        except Exception as error:  # noqa: BLE001  a peer's library may raise anything; a lost context raises again at once
            if key.startswith("ours/"):
                raise
            harness.forget_error()
            failed[key] = f"{type(error).__name__}: {error}"
            continue
        if errors[key] <= most(key):
            fns[key] = variant.fn
            continue
        what = f"relative error {errors[key]:.3g}, at most {most(key):.3g}"
        if key.startswith("ours"):
            raise ArithmeticError(f"{key}: {what}")
        failed[key] = what
    timings, not_captured = harness.measure(fns, sets, rounds=args.rounds, graph_us=args.graph_us)
    contest = Contest(timings, errors, failed | not_captured)
    if OURS not in timings:
        raise RuntimeError(contest.failed[OURS])
    return contest


def summary(rows: list[dict[str, Any]]) -> str:
    """The ratios of rows, and why peers are out, for a line of output."""
    parts = [f"{row['peer']} {row['ratio']:.3f}" for row in rows if "ratio" in row]
    return ", ".join(parts + [f"{row['peer']} failed: {row['error'][:80]}" for row in rows if "error" in row])
