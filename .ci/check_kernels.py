"""Checks the machine code of a build: check_kernels.py LIBRARY KERNELS.JSON ARCH...

LIBRARY is _C.so or libminfer_kernels.a, KERNELS.JSON the registry of the same build, ARCH what it was built for (90a, 80, ...).
Fails unless
* every kernel that the registry calls compiled has code for each architecture it should have,
* every sm90 kernel computes with WGMMA of its operands' type: HGMMA for 16-bit floats, QGMMA for e4m3, IGMMA for s8; some with
  quantised weights and at most 16 tokens use HMMA instead, and so does attention that splits the keys or has tiles of 8 rows; the others
  compute with HMMA, those of s8 with IMMA, those of e4m3 on 8.9 and from 10.0 on with QMMA; products of a vector and a matrix, and
  operators on rows, use none,
* no function of the library uses local memory: no stack frame (spilled registers live there too), no LDL or STL instruction.
Prints registers and shared memory per kernel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "third_party"))

from locate import locate

MMAS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA")
WGMMA = {"e4m3": "QGMMA", "s8": "IGMMA"}  # by the operands' type; of 16-bit floats HGMMA


def cuobjdump(*arguments: str, cwd: str | None = None):
    """Lines of cuobjdump's output. It calls nvdisasm, which may lie beside it (NVIDIA's wheels) or on PATH."""
    program = shutil.which("cuobjdump") or locate("nvidia/cu13/bin/cuobjdump")
    if not program:
        sys.exit("check_kernels: no cuobjdump; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    nvdisasm = locate("nvidia/cu13/bin/nvdisasm")
    folders = [os.path.dirname(program), os.environ["PATH"], os.path.dirname(nvdisasm)]
    process = subprocess.Popen(
        [program, *arguments], stdout=subprocess.PIPE, text=True, cwd=cwd, env={**os.environ, "PATH": ":".join(folders)}
    )
    yield from process.stdout
    if process.wait() != 0:
        sys.exit(f"check_kernels: {' '.join([program, *arguments])} failed")


def resource_usage(library: str) -> dict[tuple[str, str], dict[str, int]]:
    """(architecture, function) -> {"REG", "STACK", "SHARED", "LOCAL"}."""
    usage, arch, function = {}, "", ""
    for line in cuobjdump("--dump-resource-usage", library):
        line = line.strip()
        if line.startswith("arch = sm_"):
            arch = line.removeprefix("arch = sm_")
        elif line.startswith("Function "):
            function = line.removeprefix("Function ").rstrip(":")
        elif line.startswith("REG:"):
            usage[arch, function] = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", line)}
    return usage


def instructions(library: str) -> dict[tuple[str, str], Counter]:
    """(architecture, function) -> how often it has each of the MMAs, LDL and STL. Disassembling takes minutes: cores share it."""
    pattern = re.compile(rf"\b({'|'.join((*MMAS, 'LDL', 'STL'))})\b")

    def of_binary(binary: Path) -> dict[tuple[str, str], Counter]:
        counts, arch, counter = {}, "", Counter()
        for line in cuobjdump("--dump-sass", str(binary)):
            if "code for sm_" in line:
                arch = line.split("code for sm_")[1].strip()
            elif "Function : " in line:
                counter = counts.setdefault((arch, line.split("Function : ")[1].strip()), Counter())
            elif match := pattern.search(line):
                counter[match.group(1)] += 1
        return counts

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        extracted = sum("cubin" in line for line in cuobjdump("--extract-elf", "all", str(Path(library).resolve()), cwd=folder))
        binaries = sorted(Path(folder).glob("*.cubin"), key=lambda binary: -binary.stat().st_size)  # the largest ones first
        if not extracted or len(binaries) != extracted:
            sys.exit(f"check_kernels: {library} has {extracted} binaries, {len(binaries)} were extracted")
        counts = {}
        for found in pool.map(of_binary, binaries):
            for function, counter in found.items():  # which several binaries may hold
                counts.setdefault(function, Counter()).update(counter)
    return counts


def kernels_in(symbol: str, names: set[str]) -> set[str]:
    """The registry names in a mangled symbol, where each stands behind its length: ...45gemm_sm90_f16_tn_..."""
    found = set()
    for match in re.finditer(r"(\d+)(?=[a-z][a-z0-9_]*_sm\d\d_)", symbol):
        digits = match.group(1)  # those that end a namespace's name may stand in front: 9moe_w4a1650moe_w4a16_sm90_...
        found |= {symbol[match.end() : match.end() + int(digits[i:])] for i in range(len(digits))} & names
    return found


def main(library: str, registry: str, archs: list[str]) -> int:
    kernels = {row["name"]: row for row in json.loads(Path(registry).read_text()) if row["compiled"]}
    usage, counts = resource_usage(library), instructions(library)
    errors = []
    functions: dict[tuple[str, str], list[str]] = {}
    for (arch, symbol), used in usage.items():
        count = counts.get((arch, symbol), Counter())
        if used["STACK"] or used["LOCAL"] or count["LDL"] or count["STL"]:
            detail = f"stack {used['STACK']}, local {used['LOCAL']} bytes, {count['LDL']} LDL, {count['STL']} STL"
            errors.append(f"sm_{arch} {symbol}: uses local memory ({detail})")
        for name in kernels_in(symbol, set(kernels)):
            functions.setdefault((name, arch), []).append(symbol)

    print(f"{'kernel':<72} {'arch':>5} {'regs':>5} {'static':>7} {'dynamic':>8} {'WGMMA':>6} {'MMA':>5}")
    for name, row in kernels.items():
        others = [arch for arch in archs if arch != "90a" or row["targets"] == "portable"]
        for arch in ["90a"] if row["targets"] == "sm90a" else others:
            symbols = functions.get((name, arch))
            if not symbols:
                errors.append(f"sm_{arch} {name}: the registry calls it compiled, the library has no code for it")
                continue
            total = sum((counts.get((arch, symbol), Counter()) for symbol in symbols), Counter())
            wgmma_name = WGMMA.get(row["ab_type"], "HGMMA")
            wgmmas = total[wgmma_name]
            multiplies_e4m3 = row["ab_type"] == "e4m3" and (arch == "89" or int(arch.rstrip("a")) >= 100)
            mma_name = "IMMA" if row["ab_type"] == "s8" else "QMMA" if multiplies_e4m3 else "HMMA"
            registers = max(usage[arch, symbol]["REG"] for symbol in symbols)
            shared = max(usage[arch, symbol].get("SHARED", 0) for symbol in symbols)
            print(f"{name:<72} {arch:>5} {registers:>5} {shared:>7} {row['smem_bytes']:>8} {wgmmas:>6} {total[mma_name]:>5}")
            few_tokens = row["b_format"] != "dense" and row["tile_n"] <= 16 and total["HMMA"]
            vector = row["name"].endswith("_vector") or row["family"] == "fused"  # a vector and a matrix, rows: without MMAs
            few_rows = row["family"] == "attention" and (row["schedule"] == "split_kv" or row["tile_m"] == 8)
            wgmma = row["arch"] == 90 and not few_tokens and not few_rows
            mmas = {key: total[key] for key in MMAS if total[key]}
            if (not vector and not (wgmmas if wgmma else total[mma_name])) or len(mmas) > 1:
                errors.append(f"sm_{arch} {name}: computes with {mmas}, expected {wgmma_name if wgmma else mma_name}")
    if not kernels:
        errors.append(f"{registry}: no kernel is compiled")
    print(f"{len(kernels)} kernels, {len(usage)} functions of sm_{' sm_'.join(sorted({arch for arch, _ in usage}))}, {len(errors)} errors")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
