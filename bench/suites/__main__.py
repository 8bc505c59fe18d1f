"""The evidence of the README: `python -m bench.suites gemm --suite square,llm,odd,epilogue --out bench/results/<device>/gemm.json`.

Needs the installed package and a GPU. Each cell: values first (against float64), then CUDA-graph replays of ours and the peers in turn
over rotated operands. Rows are written as they are measured, so a run that is cut short keeps them; running some suites or peers again
replaces their rows alone.
"""

from __future__ import annotations

import argparse
import importlib
import sys

FAMILIES = {
    "attention": "bench.suites.attention",
    "batch_invariance": "bench.suites.batch_invariance",
    "e2e": "bench.suites.e2e",
    "fuse": "bench.suites.fuse",
    "fused": "bench.suites.fused",
    "gemm": "bench.suites.gemm",
    "moe": "bench.suites.moe",
    "moe_scaled": "bench.suites.moe_scaled",
    "moe_w4a16": "bench.suites.moe_w4a16",
    "random": "bench.suites.random_suites",
    "regret": "bench.suites.regret",
    "scaled_gemm": "bench.suites.scaled_gemm",
    "w4a16": "bench.suites.w4a16",
    "w4a8": "bench.suites.w4a8",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    try:
        importlib.import_module("minfer")
    except ImportError as error:
        parser.exit(2, f"bench.suites measures the installed package ({error}): pip install . first\n")
    families = parser.add_subparsers(dest="family", required=True)
    modules = {}
    for family, module in FAMILIES.items():
        modules[family] = importlib.import_module(module)
        modules[family].add_arguments(families.add_parser(family))
    args = parser.parse_args()
    try:
        return modules[args.family].main(args)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
