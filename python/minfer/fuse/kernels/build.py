"""From a template and a graph to a cubin. The only module that calls the DSL's compiler."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from cutlass import cute
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_ptr

from ..artifact import Artifact

_compiler = threading.Lock()  # the DSL's state is of the process
_ENTRY = re.compile(r"\.entry\s+([A-Za-z0-9_$]+)\s*\(")


def compile_kernel(
    body: Callable[[list[Any]], None],
    types: list[Any],
    *,
    name: str,
    architecture: str,
    block: int,
    cluster: int = 1,
    shared_bytes: int = 0,
    registers: int = 0,
) -> Artifact:
    """``body`` traces the kernel, given its parameters; ``types`` are ("pointer", storage) and ("scalar", type).

    Args:
      name: how the kernel is called in profiles.
      architecture: sm_90a and so on.
      shared_bytes: dynamic shared memory.
      registers: most of a thread, or 0.
    """

    @cute.kernel
    def kernel(values: list):
        body(values)

    @cute.jit
    def host(values: list):
        kernel(values).launch(grid=(1, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1), smem=shared_bytes)

    kernel.set_name_prefix(name)
    arguments = [
        make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=dtype.width // 8) if kind == "pointer" else dtype(1)
        for kind, dtype in types
    ]
    with _compiler, tempfile.TemporaryDirectory(prefix="minfer_fuse_") as folder:  # what the DSL keeps it writes into a folder as well
        options: list[Any] = [cute.KeepCUBIN(), cute.KeepPTX(), cute.GPUArch(architecture), DumpDir(folder)]
        if registers:
            options.append(cute.PtxasOptions(f"--maxrregcount={registers}"))
        compiled = cute.compile[tuple(options)](host, arguments)
        cubin, ptx = compiled.__cubin__, compiled.__ptx__
    entries = _ENTRY.findall(ptx if isinstance(ptx, str) else ptx.decode())
    if len(entries) != 1 or not cubin:
        raise RuntimeError(f"minfer.fuse: the compiler gave {len(entries)} kernels for {name}")
    return Artifact(bytes(cubin), entries[0], shared_bytes, block, cluster)
