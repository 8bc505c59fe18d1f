"""The W4A16 and W8A16 families: which rows of w4a16.toml are legal, the shared memory they need, the struct a shard instantiates.

The kernels' tile is [rows of the weight, tokens, k]: the operands are swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from codegen.formats import project_formats
from codegen.hardware import (
    MAX_STAGES_SM90,
    MIN_STAGES_SM90,
    SM80_SMEM_LIMIT,
    SM90_BARRIER_BYTES,
    SM90_SMEM_ALIGNMENT,
    SM90_SMEM_LIMITS,
    round_up,
)
from codegen.kernel import SCHEDULES, Kernel, cpp_bool, shape_name
from codegen.row import Row

BOOK_BYTES = 256 * 256 - 128  # of a code book in shared memory
PORTABLE_FORMATS = ("int4",)  # that sm80 kernels read; weights of the others are dequantised first

# sm90: where scales are applied -> (enumerator, in names, k that a group must be a multiple of). sm80 applies them to fragments of 32 of k.
SCALINGS = {
    "accumulators": ("Scaling::kAccumulators", "acc", 128),
    "fragments": ("Scaling::kFragments", "frag", 128),
    "fine": ("Scaling::kFine", "fine", 32),
    "fine_accumulators": ("Scaling::kFineAccumulators", "fineacc", 32),
}
BLOCK = 64  # weights are packed in blocks of 64 x 64
FINEST = 32  # k of the smallest group
TILE_K = 128  # sm90: two blocks of every 64 rows
MAX_ACCUMULATORS_SM80 = 64  # fp32 a thread
COMMON_FIELDS = {"arch", "elements", "formats", "tile", "warpgroups", "stages", "note"}


@dataclass(frozen=True, kw_only=True)
class QuantizedGemmKernel(Kernel):
    FAMILY = "w4a16"
    LAUNCH_HEADER = "gemm/launch.h"
    ARGUMENTS = "gemm::GemmLaunchArguments"
    PREFIX: ClassVar[str] = ""  # of names
    FIELDS: ClassVar[dict[str, set[str]]] = {
        "sm90": COMMON_FIELDS | {"cluster", "ctas_per_sm", "scaling", "slices", "invariant_only", "in_place_ranges", "in_order"},
        "sm80": COMMON_FIELDS,
    }

    swap: bool = True
    warpgroups: int
    scaling: str = ""  # sm90: where scales are applied, a key of SCALINGS
    slices: int = 1  # sm90: warpgroups that share out each stage's k
    in_order: bool = False  # sm90: by mma.sync, with the sums of WGMMA

    @property
    def name(self) -> str:
        bits = project_formats().formats[self.b_format].bits
        if self.arch == 90:
            sliced = f"k{self.slices}" if self.slices > 1 else ""
            variant = f"w{self.warpgroups}{sliced}x{self.ctas_per_sm}_{SCALINGS[self.scaling][1]}"
            variant += "_ranges" if self.in_place_ranges else "_sync" if self.in_order else ""
        else:
            variant = f"w{self.warpgroups}_{self.schedule}"
        shape = f"{shape_name(self.tile)}_{shape_name(self.cluster)}"
        return f"{self.PREFIX}w{bits}a16_sm{self.arch}_{self.element}_{self.b_format}_{shape}_{variant}"

    @property
    def sums(self) -> str:
        """Where fragments are scaled before WGMMA multiplies them, or mma.sync in its order, the sums are those of dense GEMM. Scales of
        accumulators, mma.sync that alternates between two sums and slices of k each have an order of their own."""
        if self.arch == 80:
            return "mma16"
        if self.in_order:
            return "wgmma16"
        order = project_formats().order(self.b_format)
        sync = _is_sync(self.tile[1], self.scaling.startswith("fine"), order)
        scaled = f"_{SCALINGS[self.scaling][1]}" if sync or "accumulators" in self.scaling else ""
        return f"{'mma' if sync else 'wgmma'}16{scaled}" + (f"_slices{self.slices}" if self.slices > 1 else "")

    @property
    def shard_group(self) -> str:
        return f"{self.FAMILY}_sm{self.arch}_{self.element}"

    @property
    def template(self) -> tuple[str, str]:
        return f"quantized_gemm/w4a16_sm{self.arch}.cuh", f"launch_w4a16_sm{self.arch}"

    @classmethod
    def fixed_bytes(cls, format_name: str, tile: tuple[int, ...], row_groups: int) -> int:
        """sm90: shared memory of the epilogue, and of what other CTAs send."""
        tile_m, tile_n, _ = tile
        general = 64 * (32 if tile_n >= 32 else 16 if tile_n >= 16 else 8) * 4
        staging = row_groups * round_up(max(tile_n * 128, general), 1024) + 4 * tile_m
        return staging + _cluster_partials(format_name, tile_n) * tile_m * tile_n * 4 + SM90_BARRIER_BYTES

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        arch = row.one_of("arch", cls.FIELDS)
        row.known(cls.FIELDS[arch], arch)
        elements, formats = row.names("elements", cls.OPERANDS), row.names("formats", project_formats().weights)
        fields_of = _expand_sm90(row, cls.fixed_bytes) if arch == "sm90" else _expand_sm80(row)
        note = row.text("note")
        only = row.flag("invariant_only")
        ranges = row.flag("in_place_ranges")
        row.require(not ranges or row.get("scaling") in ("fragments", "fine"), "in_place_ranges", "takes fragments or fine scaling")
        row.require(not ranges or only, "in_place_ranges", "is for batch-invariant plans alone")
        in_order = row.flag("in_order")
        fits = row.get("scaling") in ("fragments", "fine") and row.get("slices", 1) == 1 and row.get("tile", [0, 0])[1] in (8, 16)
        row.require(not in_order or fits, "in_order", "takes 8 or 16 tokens, fragments or fine scaling, no slices")
        shared = dict(note=note, invariant_only=only, in_place_ranges=ranges, in_order=in_order)
        return [cls(element=element, b_format=name, **shared, **fields_of(name)) for element in elements for name in formats]

    def constants(self) -> list[str]:
        lines = self.type_constants() + [
            f"static constexpr WeightFormat kFormat = {project_formats().formats[self.b_format].cpp};",
            "static constexpr bool kSwap = true;",
            "static constexpr int kColumnStep = 0;",
            "static constexpr int kTileM = {}, kTileN = {}, kTileK = {};".format(*self.tile),
            f"static constexpr int kClusterM = {self.cluster[0]}, kClusterN = {self.cluster[1]};",
            f"static constexpr Schedule kSchedule = {SCHEDULES[self.schedule]};",
            f"static constexpr int kStages = {self.stages};",
            f"static constexpr int kThreads = {self.threads};",
            f"static constexpr int kSmemBytes = {self.smem_bytes};",
            f"static constexpr int kCtasPerSm = {self.ctas_per_sm};",
        ]
        if self.arch == 90:
            lines.append("static constexpr int kEpilogueChunks = 1;")
            lines.append(f"static constexpr int kSlices = {self.slices};")
            lines.append(f"static constexpr bool kInPlaceRanges = {cpp_bool(self.in_place_ranges)};")
            lines.append(f"static constexpr bool kInOrder = {cpp_bool(self.in_order)};")
            lines.append(f"static constexpr w4a16::Scaling kScaling = w4a16::{SCALINGS[self.scaling][0]};")
        return lines


def _expand_sm90(row: Row, fixed_bytes: Callable[[str, tuple[int, ...], int], int]) -> Callable[[str], dict]:
    """A format's fields of the kernel."""
    tile = row.integers("tile", 3)
    cluster = row.integers("cluster", 3) if "cluster" in row.fields else (1, 1, 1)
    warpgroups, ctas_per_sm, slices = (
        row.one_of("warpgroups", (1, 2, 4)),
        row.one_of("ctas_per_sm", (1, 2, 3)),
        row.one_of("slices", (1, 2, 4), 1),
    )
    scaling = row.get("scaling")
    row.require(scaling in SCALINGS, "scaling", f"must be one of {', '.join(SCALINGS)}")

    tile_m, tile_n, tile_k = tile
    row.require(warpgroups % slices == 0, "slices", "must share out the warpgroups")
    row_groups = warpgroups // slices
    mma_m = tile_m // (BLOCK * row_groups)
    row.require(tile_m % (BLOCK * row_groups) == 0 and mma_m in (1, 2), "tile", "tile_m must be 64 or 128 rows a warpgroup")
    row.require(slices == 1 or mma_m == 1, "slices", "sliced-K takes 64 rows a warpgroup")
    row.require(tile_k == TILE_K * slices, "tile", f"tile_k must be {TILE_K} for each slice")
    row.require("accumulators" not in scaling or mma_m == 1, "scaling", "accumulators take 64 rows a warpgroup")
    row.require(cluster[0] in (1, 2, 4) and cluster[1:] == (1, 1), "cluster", "must be [1|2|4, 1, 1]: CTAs that share their tokens")
    row.require(tile_n % (8 * cluster[0]) == 0, "cluster", "the CTAs' shares of the tokens must be multiples of 8")

    def fields(name: str) -> dict:
        formats = project_formats()
        form, order = formats.formats[name], formats.order(name)
        fine = scaling.startswith("fine")
        group = (form.group or FINEST) if fine else SCALINGS[scaling][2]
        # E2M1's scales go to the fragments; fp16 has no room for the exponents of mxfp4.
        exact = scaling == "fine_accumulators" and form.scales == "e8m0" and row.get("elements") == ["f16"]
        good = order != "e2m1" or scaling == "fine" or exact
        row.require(good, "scaling", f"{name} must be fine; mxfp4 of f16 may be fine_accumulators")
        sync = _is_sync(tile_n, fine, order)
        row.require(slices == 1 or sync or "accumulators" in scaling, "slices", f"sliced-K of {name} takes accumulators or fewer tokens")
        scale_rows, zeros = tile_k // group, 2 if form.zero is not None else 0
        codes = tile_m * tile_k * form.bits // 8
        stage = tile_n * tile_k * 2 + codes + scale_rows * tile_m * (formats.scale_bytes(name) + zeros)
        fixed = fixed_bytes(name, tile, row_groups) + (slices - 1) * tile_m * tile_n * 4 + (BOOK_BYTES if order == "book" else 0)
        limit = SM90_SMEM_LIMITS[ctas_per_sm]
        fits = min((limit - fixed) // stage, MAX_STAGES_SM90)
        stages = row.get("stages", fits)
        good = type(stages) is int and MIN_STAGES_SM90 <= stages <= fits
        row.require(good, "stages", f"{fits} stages of {stage} bytes fit ({name}), 3 are needed")
        smem = min(round_up(stages * stage + fixed, SM90_SMEM_ALIGNMENT), limit)
        kernel = dict(arch=90, tile=tile, cluster=cluster, schedule="cooperative", stages=stages, threads=128 * (warpgroups + 1))
        kernel |= dict(smem_bytes=smem, ctas_per_sm=ctas_per_sm, group_multiple=group)
        return kernel | dict(warpgroups=warpgroups, scaling=scaling, slices=slices)

    return fields


def _is_sync(tokens: int, fine: bool, order: str) -> bool:
    """Whether an sm90 kernel that is not in_order has mma.sync in place of WGMMA (kSync of stage_sm90.cuh)."""
    return tokens == 8 or (tokens == 16 and fine and order != "book")


def _expand_sm80(row: Row) -> Callable[[str], dict]:
    tile = row.integers("tile", 3)
    tile_m, tile_n, tile_k = tile
    warpgroups, stages = row.one_of("warpgroups", (1, 2)), row.get("stages")
    row.require(tile_m in (BLOCK, 2 * BLOCK), "tile", "tile_m must be 64 or 128: every warp has 16 rows of each 64")
    row.require(tile_n in (8, 16, 32, 64, 128), "tile", "tile_n must be 8, 16, 32, 64 or 128")
    row.require(tile_k in (BLOCK, 2 * BLOCK), "tile", "tile_k must be 64 or 128")
    row.require(tile_n % (8 * warpgroups) == 0, "warpgroups", "the warpgroups' shares of the tokens must be multiples of 8")
    accumulators = tile_m * tile_n // (128 * warpgroups)
    rule = f"{accumulators} accumulators per thread leave too few registers for the fragments, the limit is {MAX_ACCUMULATORS_SM80}"
    row.require(accumulators <= MAX_ACCUMULATORS_SM80, "tile", rule)

    # Packed weights, activations, scales and zeros. The epilogue passes as many tokens of fp32 as one stage holds, 8 a warpgroup at least.
    stage = tile_m * tile_k // 2 + tile_n * tile_k * 2 + 2 * (tile_k // FINEST) * tile_m * 2
    staged = 8 * warpgroups * (tile_m + 4) * 4
    row.require(staged <= stage, "tile", f"the epilogue needs a stage of {staged} bytes, this one has {stage}")
    row.require(type(stages) is int and stages >= 2, "stages", "must be given, 2 or more")
    smem, limit = stages * stage, SM80_SMEM_LIMIT
    row.require(smem <= limit, "stages", f"{stages} stages need {smem} bytes of shared memory, the limit is {limit}")

    def fields(name: str) -> dict:
        good = name in PORTABLE_FORMATS
        row.require(good, "formats", f"must be {', '.join(PORTABLE_FORMATS)}: the other formats are dequantised first")
        kernel = dict(arch=80, tile=tile, schedule="multistage", stages=stages, threads=128 * warpgroups, smem_bytes=smem)
        return kernel | dict(group_multiple=FINEST, warpgroups=warpgroups)

    return fields


def _cluster_partials(format_name: str, tile_n: int) -> int:
    """Partials of its cluster that a kernel has room for (max_cluster_partials of cluster_split.h)."""
    return 0 if project_formats().order(format_name) == "book" else 3 if tile_n <= 16 else 1 if tile_n <= 32 else 0
