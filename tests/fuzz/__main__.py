"""Command line of the random tests: ``python -m tests.fuzz --seconds 60 --seed 1``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from typing import Any

from . import supervisor
from .worker import Plan

PROGRESS = 60.0  # seconds from one line about it to the next


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="Random tests of every operator against float64.")
    parser.add_argument("--seconds", type=float, help="how long; 60 unless --cases or --case says how much")
    parser.add_argument("--cases", type=int, help="how many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--family", action="append", default=[], help="only this operator; may be repeated")
    parser.add_argument(
        "--case", action="append", default=[], help="only this case, FAMILY:INDEX, with all that is known of it; may be repeated"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a case counts as hanging")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--json", metavar="FILE", help="write the table and the failures")
    parser.add_argument("--list", action="store_true", help="list the families")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if importlib.util.find_spec("minfer") is None:  # else each worker would say so at length, and start again
        print("the package minfer cannot be imported: install it first, `pip install .`", file=sys.stderr)
        return 2
    if options.list or options.family or options.case:
        from .families import FAMILIES

        if options.list:
            for name, family in FAMILIES.items():
                print(f"{name:<24} share {family.share:g}")
            return 0
        unknown = [name for name in (*options.family, *(case.partition(":")[0] for case in options.case)) if name not in FAMILIES]
        if unknown:
            print(f"no such family: {', '.join(unknown)}; there are {', '.join(FAMILIES)}", file=sys.stderr)
            return 2
    plan = Plan(options.seed, options.device, options.first, tuple(options.case), tuple(options.family), options.threads)
    seconds = options.seconds if options.seconds is not None or options.cases is not None or options.case else 60.0
    begin, failed = time.monotonic(), []
    progress = {"cases": 0, "next": begin + PROGRESS}

    def report(result: dict[str, Any]) -> None:
        progress["cases"] += 1
        if time.monotonic() >= progress["next"]:
            progress["next"] = time.monotonic() + PROGRESS
            print(f"{time.monotonic() - begin:.0f} s: {progress['cases']} cases, {len(failed)} failed", file=sys.stderr)
        if options.case:
            state = "failed" if result["failures"] else "passed"
            print(f"{result['name']} ({result['kind']}) {state}, {result['comparisons']} comparisons, {result['seconds']:.2f} s")
            print(f"  drawn: {result['parameters']}")
        if not result["failures"]:
            return
        line = f"python -m {__package__} --device {options.device} --seed {options.seed} --case {result['name']}"
        if result["fatal"]:
            # A crash may be due to what ran before it in the same process.
            first = max(0, int(result["name"].partition(":")[2]) - 20)
            line += f"   # with what ran before: --first {first} --cases 21" + "".join(f" --family {name}" for name in options.family)
        failed.append({"reproduce": line} | {key: result[key] for key in ("kind", "parameters", "failures")})
        print(f"FAILED  {line}\n  {result['kind']}; drawn: {result['parameters']}")
        for text in result["failures"]:
            print(f"  {text}")
        sys.stdout.flush()

    try:
        tallies = supervisor.run(plan, seconds=seconds, cases=options.cases, patience=options.timeout, report=report)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    table(tallies, time.monotonic() - begin, options)
    if options.json:
        rows = {name: {"cases": t.cases, "comparisons": t.comparisons, "failures": t.failures, **t.kinds} for name, t in tallies.items()}
        facts = {"device": device_name(options.device), "seed": options.seed, "seconds": time.monotonic() - begin}
        with open(options.json, "w") as file:
            json.dump(facts | {"families": rows, "failed": failed}, file, indent=1)
    return 1 if failed else 0


def device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name(device)


def table(tallies: dict[str, supervisor.Tally], seconds: float, options: argparse.Namespace) -> None:
    heads = ("family", "cases", "legal", "bad", "hostile", "comparisons", "failures")
    rows = [
        (n, t.cases, t.kinds["legal"], t.kinds["bad"], t.kinds["hostile"], t.comparisons, t.failures) for n, t in sorted(tallies.items())
    ]
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, len(heads)))))
    print(f"\nseed {options.seed} on {options.device}, {seconds:.0f} s")
    for row in (heads, *rows):
        print(f"{row[0]:<26}" + "".join(f"{x!s:>13}" for x in row[1:]))


if __name__ == "__main__":
    sys.exit(main())
