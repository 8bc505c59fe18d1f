"""Prints where a file of an installed package lies: `locate.py torch/version.py nvidia/cu13/bin/nvcc`, one line per path, empty if absent.

Nothing is imported (importing torch takes seconds). The interpreter's own packages come first, then those of the environment that is
being installed into: under build isolation pip hides the latter from sys.path, though it runs the same interpreter, and other
front ends build in a temporary environment made from it.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import site
import sys
import sysconfig
from pathlib import Path


def environment_sites() -> list[str]:
    """site-packages folders of the environments that this interpreter may be building for, nearest first."""
    sites = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(variable):
            sites += sorted(glob.glob(os.path.join(os.environ[variable], "lib", "python3*", "site-packages")))
    if sys.base_prefix != sys.prefix:
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        sites += [sysconfig.get_path("purelib", vars=base), sysconfig.get_path("platlib", vars=base)]
    sites.append(site.getusersitepackages())
    return [folder for each in sites for folder in (each, *path_files(each))]


def path_files(folder: str) -> list[str]:
    """Folders that a site-packages adds by its .pth files: how an environment made over another one borrows its packages."""
    lines = [line.strip() for file in sorted(Path(folder).glob("*.pth")) for line in file.read_text(errors="replace").splitlines()]
    return [os.path.join(folder, line) for line in lines if line and not line.startswith(("#", "import")) and Path(folder, line).is_dir()]


def locate(relative: str) -> str:
    package, _, rest = relative.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    folders = [str(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    folders += [os.path.join(folder, package) for folder in environment_sites()]
    for folder in folders:
        path = Path(folder) / rest
        if path.exists():
            return str(path.absolute())
    return ""


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(locate(argument))
