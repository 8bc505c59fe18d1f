"""Packages an installed minfer for the Hugging Face kernels hub.

    cmake -S . -B build/hub -DMINFER_NAMESPACE=minfer_0123abc -DMINFER_CUDA=ON -DMINFER_CUDA_ARCHS="90a;80" -DMINFER_BUILD_TORCH=ON
    cmake --build build/hub --target _C
    python -m minfer.hub.package --library build/hub/_C.so --namespace minfer_0123abc --out minfer-kernel

Writes ``OUT/build/torch-stable-abi210-cu130-x86_64-linux``: one library for every torch from 2.10 on, operators in a namespace of their
own, Python with relative imports alone. ``kernels.LocalLayerRepository(OUT, layer_name="RMSNorm")`` loads it.

The hub's rules are checked, and what breaks one is an error: symbols of a glibc above 2.28 or of newer C++ libraries (build in an image of
manylinux_2_28), libraries beside torch's and CUDA's, imports of other packages, layers with more than a forward.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
PARTS = ("_core", "checks", "configs", "formats", "hub/layers.py", "measure", "nn", "ops", "planning", "quantize", "reference")
STABLE_ABI, CUDA = "210", "130"
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
LIBRARIES = re.compile(r"lib(torch\w*|c10\w*|cud\w+|cublas\w*|nv\w+|stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so[.\d]*|ld-linux-x86-64\.so\.2")
_INIT = '''"""Operators for LLM inference on NVIDIA GPUs: GEMM in 16, 8 and 4 bits, attention, mixtures of experts, norms."""

from ._core.library import check_environment, load_library

check_environment()
load_library(__path__)

# ruff: noqa: E402, F403  what follows looks the operators up in the library
from . import nn, ops, quantize, reference
from ._core.registry import build_info, kernels
from .hub import layers
from .ops import *
from .planning import tuned

tuned.load_at_first_use()
'''


def too_new(library: Path) -> list[str]:
    """Symbol versions that the library needs and the hub does not allow."""
    text = subprocess.run(["readelf", "--version-info", "--wide", str(library)], check=True, capture_output=True, text=True).stdout
    found = []
    for name, version in sorted(set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)\s", text))):
        if tuple(map(int, version.split("."))) > LIMITS[name]:
            found.append(f"{name}_{version}")
    return found


def foreign_libraries(library: Path) -> list[str]:
    """Libraries that it wants beside torch's, CUDA's and the system's."""
    text = subprocess.run(["readelf", "--dynamic", "--wide", str(library)], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
    return [name for name in needed if not LIBRARIES.fullmatch(name)]


def foreign_imports(folder: Path) -> list[str]:
    """Imports at the top of modules that are neither relative, nor Python's, nor torch's: "file: package"."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                if name.partition(".")[0] not in (*sys.stdlib_module_names, "torch"):
                    found.append(f"{path.relative_to(folder)}: {name}")
    return found


def impure_layers() -> list[str]:
    """Layers that the hub would refuse: members beside a forward and the two flags."""
    from . import layers

    allowed = {"forward", "has_backward", "can_torch_compile"}
    found = []
    for name, layer in vars(layers).items():
        if inspect.isclass(layer) and layer.__module__ == layers.__name__:
            more = {x for x in vars(layer) if not x.startswith("__") or x == "__init__"} - allowed
            found += [f"{name}.{x}" for x in sorted(more)]
    return found


def write_package(library: Path, namespace: str, out: Path, *, archs: list[str], version: int = 1, check_symbols: bool = True) -> Path:
    """Writes the package, and returns the folder of its variant.

    Args:
      library: the torch module, built with this namespace.
      archs: compute capabilities, "9.0a"; none: a build without CUDA, for trying the package on a CPU.
      version: of the kernel on the hub.
      check_symbols: False: symbols may be newer than the hub allows.

    Raises:
      ValueError: a rule of the hub is broken; the message says by what.
    """
    broken = {
        "symbols newer than the hub allows": too_new(library) if check_symbols else [],
        "libraries beside torch's and CUDA's": foreign_libraries(library),
        "members of layers": impure_layers(),
    }
    backend = f"cu{CUDA}" if archs else "cpu"
    folder = out / "build" / f"torch-stable-abi{STABLE_ABI}-{backend}-x86_64-linux"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for part in PARTS:
        source = PACKAGE / part
        if not source.exists() and part == "configs":  # an editable install has them beside the compiled library
            continue
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__", "report"))
        else:
            shutil.copy(source, folder / part)
    (folder / "hub" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(_INIT)
    place = folder / "_core" / "namespace.py"
    place.write_text(
        place.read_text()
        .replace('NAMESPACE = "minfer"', f'NAMESPACE = "{namespace}"')
        .replace("torch.ops.minfer", f"torch.ops.{namespace}")
    )
    shutil.copy(library, folder / "_C.so")
    broken["imports of other packages"] = foreign_imports(folder)
    metadata = {
        "name": "minfer",
        "id": namespace,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": archs} if archs else {"type": "cpu"},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    if said := [f"{rule}: {', '.join(places)}" for rule, places in broken.items() if places]:
        shutil.rmtree(folder)
        raise ValueError("package: the hub refuses " + "; ".join(said))
    return folder


def _arch(text: str) -> str:
    """ "90a" as the hub writes it, "9.0a"."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{digits[:-1]}.{digits[-1]}{text[len(digits) :]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", type=Path, required=True, help="_C.so, built with -DMINFER_NAMESPACE=NAMESPACE")
    parser.add_argument("--namespace", required=True, help="minfer_ and the commit")
    parser.add_argument("--out", type=Path, required=True, help="folder of the kernel's repository")
    parser.add_argument("--archs", default="", help="what the library was compiled for, 90a;80; empty: a build without CUDA")
    parser.add_argument("--version", type=int, default=1, help="of the kernel on the hub")
    parser.add_argument("--allow-newer-symbols", action="store_true", help="for this machine alone")
    args = parser.parse_args()
    if not re.fullmatch(r"minfer_\w+", args.namespace):
        parser.error(f"--namespace must be minfer_ and more, which no other copy has, got {args.namespace!r}")
    archs = [_arch(text) for text in args.archs.split(";") if text]
    try:
        folder = write_package(
            args.library, args.namespace, args.out, archs=archs, version=args.version, check_symbols=not args.allow_newer_symbols
        )
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
