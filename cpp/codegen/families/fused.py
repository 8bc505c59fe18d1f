"""The fused family: operators on rows, one kernel for each operation, type and number of elements that a thread has of a row, and for wide
rows one with a ring in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.formats import project_formats
from codegen.kernel import Kernel, cpp_bool
from codegen.row import Row

VECTOR = 8  # elements
MAX_VECTORS = 8  # of a thread
# Operations: as C++ names them; whether they are also of float32; whether their results may be quantised; whether their kernels take whole
# rows (True), elements (False), or there are both (None).
OPERATIONS = {
    "rms_norm": ("kRmsNorm", False, True, True),
    "layer_norm": ("kLayerNorm", False, False, True),
    "softmax": ("kSoftmax", True, False, True),
    "activation": ("kActivation", True, False, False),
    "gated_activation": ("kGatedActivation", False, True, None),
    "quantize": ("kQuantize", False, True, None),
}
FIELDS = {"operation", "elements", "quantized", "whole", "ring", "vectors", "threads", "note"}
STORAGE_BYTES = 400  # of kernels of whole rows: row_group.cuh, RowStorage
# row_params.h: of rings in shared memory, one for each warp.
RING_BYTES, TILE_VECTORS, RING_VECTORS, RING_WARPS = 14 << 10, 4, 16, 16


@dataclass(frozen=True, kw_only=True)
class FusedKernel(Kernel):
    FAMILY = "fused"
    LAUNCH_HEADER = "fused/row_params.h"
    ARGUMENTS = "fused::RowLaunchArguments"
    OPERANDS = ("f16", "bf16", "f32")

    arch: int = 80
    schedule: str = "rows"
    stages: int = 1
    of: str  # the operation
    quantized: bool
    whole: bool  # takes whole rows
    ring: bool  # holds them in shared memory

    @property
    def operation(self) -> str:
        return self.of

    @property
    def name(self) -> str:
        quantized = "_quantized" if self.quantized else ""
        rows = ("_rows" if self.whole else "") + ("_ring" if self.ring else "")
        return f"fused_sm{self.arch}_{self.element}_{self.of}{quantized}{rows}_x{self.tile[1]}"

    @property
    def shard_group(self) -> str:
        return f"fused_sm{self.arch}_{'ring' if self.ring else 'rows' if self.whole else 'elements'}"

    @property
    def template(self) -> tuple[str, str]:
        if self.ring:
            return "fused/row_ring.cuh", "launch_row_ring"
        return ("fused/row_whole.cuh", "launch_whole_rows") if self.whole else ("fused/row_elements.cuh", "launch_row_elements")

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        row.known(FIELDS, "operators on rows")
        operation = row.one_of("operation", OPERATIONS)
        _, float32, quantizable, needs_whole = OPERATIONS[operation]
        elements = row.names("elements", cls.OPERANDS if float32 else cls.OPERANDS[:2])
        quantized, whole = row.flag("quantized"), row.flag("whole")
        row.require(not quantized or quantizable, "quantized", f"results of {operation} are not quantised")
        row.require(quantized or operation != "quantize", "quantized", "quantize has codes as results")
        takes = "whole rows" if needs_whole else "elements"
        row.require(needs_whole is None or whole == needs_whole, "whole", f"{operation} takes {takes}")
        row.require(not whole or quantized or needs_whole, "whole", f"{operation} takes whole rows only for their scales")
        ring = row.flag("ring")
        row.require(not ring or (whole and not quantized), "ring", "holds whole rows whose results are numbers")
        row.require(not ring or row.get("vectors") is None, "vectors", "of a ring follow from its slots")
        vectors = [RING_VECTORS] if ring else row.get("vectors")
        good = isinstance(vectors, list) and vectors and all(type(v) is int and 1 <= v <= MAX_VECTORS for v in vectors)
        good = good and len(set(vectors)) == len(vectors)
        row.require(ring or good, "vectors", f"must be a list of different numbers of 1 to {MAX_VECTORS}")
        threads = row.optional_integer("threads") or (32 * RING_WARPS if ring else 512)
        row.require(threads % 32 == 0 and threads <= 1024, "threads", "must be whole warps, 1024 at most")
        row.require(not ring or threads == 32 * RING_WARPS, "threads", f"of a ring are {32 * RING_WARPS}")
        shared = dict(of=operation, quantized=quantized, whole=whole, ring=ring, threads=threads, note=row.text("note"))
        kernels = []
        for element in elements:
            number = project_formats().elements[element].bytes
            tiles = RING_BYTES // (32 * TILE_VECTORS * VECTOR * number) * RING_WARPS
            ring_bytes = -(-(STORAGE_BYTES + tiles * (32 * TILE_VECTORS * VECTOR * number + 8)) // 128) * 128
            smem = ring_bytes if ring else STORAGE_BYTES if whole else 0
            for v in vectors:
                elements_of_thread = VECTOR * (v * 2 // number if ring else v)
                kernels.append(cls(arch=90 if ring else 80, element=element, tile=(1, elements_of_thread, 1), smem_bytes=smem, **shared))
        return kernels

    def constants(self) -> list[str]:
        return self.type_constants() + [
            f"static constexpr RowOperation kOperation = RowOperation::{OPERATIONS[self.of][0]};",
            f"static constexpr bool kQuantized = {cpp_bool(self.quantized)};",
            *([f"static constexpr RowLocation kLocation = RowLocation::{'kRing' if self.ring else 'kRegisters'};"] if self.whole else []),
            *([] if self.whole else ["static constexpr bool kFast = true;"]),
            f"static constexpr int kVectors = {self.tile[1] // VECTOR};",
            f"static constexpr int kThreads = {self.threads}, kSmemBytes = {self.smem_bytes};",
        ]
