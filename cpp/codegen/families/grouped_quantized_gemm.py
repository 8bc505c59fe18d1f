"""The grouped family with quantised weights: which rows of moe_w4a16.toml are legal, the shared memory they need, the struct of a shard.

Rows are those of w4a16.toml for sm90, without clusters; the kernels' tile is [rows of the weight, most tokens, k].
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.families.grouped_gemm import OUTPUT_BYTES, STAGED_TOKENS, TILES_BYTES, GroupedGemmKernel
from codegen.families.quantized_gemm import QuantizedGemmKernel
from codegen.hardware import round_up


@dataclass(frozen=True, kw_only=True)
class GroupedQuantizedGemmKernel(QuantizedGemmKernel):
    FAMILY = "moe_w4a16"
    LAUNCH_HEADER = GroupedGemmKernel.LAUNCH_HEADER
    ARGUMENTS = GroupedGemmKernel.ARGUMENTS
    PREFIX = "moe_"
    FIELDS = {"sm90": QuantizedGemmKernel.FIELDS["sm90"] - {"cluster"}}

    @property
    def template(self) -> tuple[str, str]:
        return "moe/grouped/grouped_w4a16_sm90.cuh", "moe::launch_grouped_w4a16_sm90"

    @classmethod
    def fixed_bytes(cls, format_name: str, tile: tuple[int, ...], row_groups: int) -> int:
        """Shared memory of the epilogue, the experts' tiles and the barriers."""
        tile_m, tile_n, _ = tile
        staged = round_up(min(tile_n, STAGED_TOKENS) * (tile_m // row_groups) * OUTPUT_BYTES, 1024)
        return row_groups * (staged + 20) + 4 * tile_n + TILES_BYTES
