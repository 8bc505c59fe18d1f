"""README tables and plots from the results files: `python -m bench.report`. Nothing in them is typed by hand.

Reads bench/results/<device>/<family>.json, replaces what README.md has between `<!-- results:<family> -->` and `<!-- /results -->`,
and draws bench/results/<device>/<family>.png; a family without a results file is left as it is. `--check` changes nothing and fails when
the README is not what the results say.
Needs matplotlib for the plots.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.report import attention as report_attention, gemm as report_gemm, moe as report_moe, w4a16 as report_w4a16

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"gemm": report_gemm, "w4a16": report_w4a16, "moe": report_moe, "attention": report_attention}
SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {family: module.section for family, module in FAMILIES.items()}
PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {family: module.plot for family, module in FAMILIES.items()}


def block(family: str, body: str) -> str:
    return f"<!-- results:{family} -->\n{body.strip()}\n<!-- /results -->"


def replaced(readme: str, family: str, body: str) -> str:
    """The README with the family's block replaced.

    Raises:
      ValueError: the README does not have the block's markers exactly once.
    """
    pattern = re.compile(rf"<!-- results:{re.escape(family)} -->.*?<!-- /results -->", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError(f"README.md needs one <!-- results:{family} --> and a <!-- /results --> after it")
    return pattern.sub(lambda _: block(family, body), readme)


def results_files(folder: Path, device: str | None, families: Iterable[str]) -> list[tuple[str, Path]]:
    """(family, file) of one device: the named one, or the only one that has results.

    Raises:
      ValueError: there is no such file, or several devices have results and none was named.
    """
    families = list(families)
    devices = [device] if device else sorted({path.parent.name for f in families for path in folder.glob(f"*/{f}.json")})
    if len(devices) != 1:
        raise ValueError(f"results of {', '.join(devices) or 'no device'} under {folder}: choose one with --device")
    found = [(f, folder / devices[0] / f"{f}.json") for f in families]
    found = [(f, path) for f, path in found if path.exists()]
    if not found:
        raise ValueError(f"{folder / devices[0]} has none of {', '.join(f'{f}.json' for f in families)}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=list(SECTIONS), help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--device", help="folder under the results folder, nvidia-h200")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="the results folder")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--stdout", action="store_true", help="print the sections, change nothing")
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the README is not what the results say")
    args = parser.parse_args(argv)
    try:
        files = results_files(args.results, args.device, args.families)
        readme = before = "" if args.stdout else args.readme.read_text()
        for family, path in files:
            results = json.loads(path.read_text())
            body = SECTIONS[family](results)
            if args.stdout:
                print(body)
                continue
            picture = path.with_suffix(".png")
            relative = picture.resolve().relative_to(args.readme.resolve().parent) if args.results.is_relative_to(ROOT) else picture
            readme = replaced(readme, family, f"{body}\n\n![{family} on {results['device']}]({relative})")
            if not args.check:
                PLOTS[family](results, picture)
    except (OSError, ValueError) as error:
        parser.exit(2, f"bench.report: {error}\n")
    if args.check and readme != before:
        print("README.md is not what the results say: run python -m bench.report")
        return 1
    if not args.check and not args.stdout:
        args.readme.write_text(readme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
