"""Checks an installed minfer on a machine without a GPU: check_package.py [ARCHS].

ARCHS is what the build was made for ("90a"; nothing: a build without CUDA). The registry must list every kernel of the table, all that
ARCHS can hold compiled; the library must not name a place on the machine it was built on; the operators must run on the CPU; importing
minfer may add 0.3 s to importing torch, in the fastest of five processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

SOURCE_FILE = re.compile(rb"(?<![\w.+-])/[\w.+/-]+\.(?:cpp|cu|cuh|h|hpp|inl)(?![\w.])")  # by its absolute path


def paths_of_the_build(library: Path) -> set[str]:
    """Strings in a library that name a place on the machine where it was built: sources, the environment, the user's home."""
    content = library.read_bytes()
    found = {match.group().decode() for match in SOURCE_FILE.finditer(content)}
    places = [f"{place}/" for place in (Path(__file__).resolve().parents[1], Path(sys.prefix).resolve(), Path.home())]
    return found | {place for place in [*places, "site-packages"] if place not in ("//", "/usr/") and place.encode() in content}


def seconds_of_import() -> float:
    """What importing minfer adds to importing torch: the least of five processes, since other work on the machine only adds to it."""
    program = "import time, torch; start = time.perf_counter(); import minfer; print(time.perf_counter() - start)"
    return min(float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout) for _ in range(5))


def main(archs: str) -> None:
    import minfer
    import torch

    seconds = seconds_of_import()
    info, kernels = minfer.build_info(), minfer.kernels("")  # of all families
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: minfer {info['version']} imported in {seconds * 1e3:.0f} ms")
    print(f"  archs '{info['archs']}', CUTLASS '{info['cutlass']}', {info['kernels_compiled']} of {info['kernels_total']} kernels compiled")
    if seconds > 0.3:
        sys.exit(f"check_package: importing minfer took {seconds:.2f} s, the limit is 0.3")
    if info["archs"] != archs or info["cuda"] != bool(archs):
        sys.exit(f"check_package: built for '{info['archs']}', expected '{archs}'")
    table = json.loads((Path(minfer.__path__[0]) / "kernels.json").read_text())
    every = set(archs.split(";")) if archs else set()
    having = {"sm90a": every & {"90a"}, "not_sm90a": every - {"90a"}, "portable": every}  # architectures with the code, by targets
    wanted = {row["name"] for row in table if having[row["targets"]]}
    compiled = {kernel["name"] for kernel in kernels if kernel["compiled"]}
    if compiled != wanted or info["kernels_compiled"] != len(wanted):
        sys.exit(f"check_package: compiled and expected kernels differ: {sorted(compiled ^ wanted)}")
    if [row["name"] for row in table] != [kernel["name"] for kernel in kernels]:
        sys.exit("check_package: kernels.json and the registry list different kernels")
    if paths := paths_of_the_build(Path(minfer.__path__[0]) / "_C.so"):
        sys.exit(f"check_package: the library names places on the machine it was built on: {', '.join(sorted(paths))}")
    if not (Path(minfer.__path__[0]) / "configs" / "gemm.toml").is_file():
        sys.exit("check_package: configs/gemm.toml is not in the package")

    torch.manual_seed(0)
    a, weight, bias = torch.randn(5, 33), torch.randn(17, 33), torch.randn(17)
    a, weight, bias = a.half(), weight.half(), bias.half()
    out = torch.ops.minfer.gemm(a, weight.t(), bias=bias, activation="relu")
    truth = torch.relu(a.double() @ weight.double().t() + bias.double())
    error = ((out.double() - truth).norm() / truth.norm()).item()
    print(f"  gemm on the CPU: relative error {error:.1e}")
    if not error < 5e-4:  # one rounding to fp16
        sys.exit(f"check_package: gemm is wrong, relative error {error}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
