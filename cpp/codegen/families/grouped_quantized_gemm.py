"""The grouped family with quantised weights: which rows of moe_w4a16.toml are legal, the shared memory they need, the struct of a shard.

Rows are those of w4a16.toml for sm90, without clusters; the kernels' tile is [rows of the weight, most tokens, k].
"""

from __future__ import annotations

from codegen.families import gemm, grouped_gemm as moe, quantized_gemm as w4a16
from codegen.kernel import Kernel

TEMPLATES = {90: ("moe/grouped/grouped_w4a16_sm90.cuh", "moe::launch_grouped_w4a16_sm90")}
LAUNCH_HEADER = moe.LAUNCH_HEADER
ARGUMENTS = moe.ARGUMENTS

FIELDS = {"sm90": w4a16.FIELDS["sm90"] - {"cluster"}}


def epilogue_bytes(name: str, tile: tuple[int, ...], row_groups: int) -> int:
    """Shared memory of the epilogue, the experts' tiles and the barriers."""
    tile_m, tile_n, _ = tile
    staged = -(-min(tile_n, 32) * (tile_m // row_groups) * 2 // 1024) * 1024
    return row_groups * (staged + 20) + 4 * tile_n + moe.TILES_BYTES


def expand(row: dict, where: str) -> list[Kernel]:
    """One table row -> its kernels, elements outermost. `where` is how errors name the row."""
    return w4a16.expand_family(row, where, "moe_w4a16", FIELDS, epilogue_bytes)


def definition(kernel: Kernel) -> str:
    """The struct and the launch function of one kernel."""
    return gemm.struct(kernel, w4a16.constants(kernel), TEMPLATES[kernel.arch][1], ARGUMENTS)
