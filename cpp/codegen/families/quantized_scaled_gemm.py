"""The W4A8 family: int4 weights, activations of 8 bits. Which rows of w4a8.toml are legal, their shared memory, the struct of a shard.

The kernels' tile is [rows of the weight, most tokens, k]; the launch chooses the tokens, as in gemm.toml's kernels with a column_step.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.families.gemm import GemmKernel, _expand_sm90
from codegen.hardware import round_up
from codegen.kernel import Kernel, shape_name
from codegen.row import Row

FIELDS = {"arch", "elements", "tile", "cluster", "column_step", "note"}
GROUP = 128  # of k: sums of so many are multiplied by a scale
# Of a tile: 112 accumulators, as many sums of half the tile, and two sets of fragments are what a thread has registers for.
MAX_TOKENS = 224


@dataclass(frozen=True, kw_only=True)
class W4A8Kernel(GemmKernel):
    FAMILY = "w4a8"
    OPERANDS = ("e4m3", "s8")

    b_format: str = "int4"
    group_multiple: int = GROUP

    @property
    def name(self) -> str:
        shape = f"{shape_name(self.tile)}_{shape_name(self.cluster)}"
        return f"w4a8_sm{self.arch}_{self.element}_{self.b_format}_{shape}_columns{self.column_step}"

    @property
    def sums(self) -> str:
        return "wgmma8_groups"

    @property
    def shard_group(self) -> str:
        return f"w4a8_sm{self.arch}_{self.element}"

    @property
    def template(self) -> tuple[str, str]:
        return "quantized_gemm/w4a8_sm90.cuh", "w4a8::launch_w4a8_sm90"

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        row.one_of("arch", ("sm90",))
        row.known(FIELDS, "sm90")
        elements, tile = row.names("elements", cls.OPERANDS), row.integers("tile", 3)
        row.require(tile[0] == 128, "tile", "tile_m must be 128: two consumer warpgroups have 64 rows each")
        row.require(tile[1] <= MAX_TOKENS, "tile", f"tile_n must be at most {MAX_TOKENS}: there are no registers for more")
        # ptxas serialises the WGMMAs of a kernel with 14 loops.
        row.require(row.get("column_step") in (32, 64), "column_step", "must be 32 or 64")
        fields = _expand_sm90(row.with_fields(schedule="cooperative", swap=True), 1)
        stage = tile[0] * tile[2] // 2 + tile[1] * tile[2] + round_up(2 * tile[0], 1024)
        fields |= dict(stages=fields["ring_bytes"] // stage, schedule="cooperative", note=row.text("note"))
        return [cls(element=element, **fields) for element in elements]
