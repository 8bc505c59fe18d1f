"""From a template and a graph to a cubin. The only module that calls the DSL's compiler."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import cute as cute_ir, cute_nvgpu as cute_nvgpu_ir
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

from ..artifact import Artifact
from ..dtypes import register_of_storage
from ..graph import Graph
from ..launch import capability_of
from .numbers import REGISTERS, STORAGES

_compiler = threading.Lock()  # the DSL's state is of the process
_ENTRY = re.compile(r"\.entry\s+([A-Za-z0-9_$]+)\s*\(")


Type = tuple[str, Any]  # of a parameter: ("pointer", storage), ("scalar", type) or ("tensor_map", storage)


def compile_kernel(
    body: Callable[[list[Any]], None],
    types: list[Type],
    *,
    name: str,
    architecture: str,
    block: int,
    cluster: int = 1,
    shared_bytes: int = 0,
    registers: int = 0,
    alone: bool = False,
) -> Artifact:
    """``body`` traces the kernel, given its parameters; ``types`` are theirs. A tensor map is a TMA descriptor that the launch
    encodes: ``body`` is given its address, as an Int64.

    Args:
      name: how the kernel is called in profiles.
      architecture: sm_90a and so on.
      shared_bytes: dynamic shared memory.
      registers: most of a thread, or 0.
      alone: an SM holds one CTA. Its threads share out all registers, which kernels count on that move some from warpgroup to warpgroup.
    """

    @cute.kernel
    def kernel(values: list):
        body(_each_map(types, values, _address_of_map))

    @cute.jit
    def host(values: list):
        kernel(_each_map(types, values, _map_of)).launch(
            grid=(1, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1), smem=shared_bytes, min_blocks_per_mp=1 if alone else 0
        )

    kernel.set_name_prefix(name)
    arguments = [
        dtype(1)
        if kind == "scalar"
        else make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=16 if kind == "tensor_map" else dtype.width // 8)
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


def parameter_types(graph: Graph, parameters: list[tuple[str, int]]) -> list[Type]:
    """Of parameters that all templates have: ("address", input), ("number", input), ("out", output); strides have 64 bits, sizes 32."""
    return [_parameter_type(graph, kind, i) for kind, i in parameters]


def _parameter_type(graph: Graph, kind: str, i: int) -> Type:
    if kind == "address":
        return "pointer", STORAGES[graph.inputs[i].storage]
    if kind == "out":
        return "pointer", STORAGES[graph.outputs[i].storage]
    if kind == "number":
        return "scalar", REGISTERS[register_of_storage(graph.inputs[i].storage)]
    return "scalar", Int64 if kind.endswith("stride") else Int32


def overlaps(architecture: str) -> bool:
    """Whether an architecture has programmatic dependent launch."""
    return capability_of(architecture) >= 90


def _each_map(types: list[Type], values: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    return [change(x) if kind == "tensor_map" else x for (kind, _), x in zip(types, values, strict=True)]


def _map_of(pointer: cute.Pointer) -> Any:
    """A TMA descriptor, which makes its bytes a parameter of the kernel. What it describes here is of no consequence: launches encode their
    own."""
    box = cute.make_layout((8, 8), stride=(1, 8))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(pointer, box), box, (8, 8))[0]


def _address_of_map(atom: Any) -> Int64:
    pointer = cute_ir.PtrType.get(cute_nvgpu_ir.TmaDescriptorTiledType.get(), cute.AddressSpace.generic, 64)
    return cute_nvgpu_ir.get_tma_desc_addr(pointer, cute_nvgpu_ir.atom_make_exec_tma(atom._trait.value)).toint()
