"""The W4A16 and W8A16 families: which rows of w4a16.toml are legal, the shared memory they need, the struct a shard instantiates.

The kernels' tile is [rows of the weight, tokens, k]: the operands are swapped.
"""

from __future__ import annotations

from collections.abc import Callable

from codegen.families import gemm
from codegen.kernel import (
    BITS,
    ELEMENTS,
    FORMATS,
    SCHEDULES,
    ConfigError,
    Kernel,
)

TEMPLATES = {90: ("quantized_gemm/w4a16_sm90.cuh", "launch_w4a16_sm90"), 80: ("quantized_gemm/w4a16_sm80.cuh", "launch_w4a16_sm80")}
LAUNCH_HEADER = "gemm/launch.h"
ARGUMENTS = "gemm::GemmLaunchArguments"

SCALE_BYTES = {"mxfp4": 1, "nvfp4": 1}  # the others: 2
FIXED_GROUP = {"mxfp4": 32, "nvfp4": 16}
ZEROS = {"int4", "int8"}  # formats with zero points
BOOKS = {"nf4"}  # formats with a code book in shared memory
E2M1 = {"mxfp4", "nvfp4"}  # whose scales go to the fragments; fp16 has no room for the exponents of mxfp4
BOOK_BYTES = 256 * 256 - 128

# sm90: where scales are applied -> (enumerator, k that a group must be a multiple of). sm80 applies them to the fragments of 32 of k.
SCALINGS = {
    "accumulators": ("Scaling::kAccumulators", 128),
    "fragments": ("Scaling::kFragments", 128),
    "fine": ("Scaling::kFine", 32),
    "fine_accumulators": ("Scaling::kFineAccumulators", 32),
}
SHORT = {"accumulators": "acc", "fragments": "frag", "fine": "fine", "fine_accumulators": "fineacc"}
BLOCK = 64  # weights are packed in blocks of 64 x 64
FINEST = 32  # k of the smallest group
TILE_K = 128  # sm90: two blocks of every 64 rows
SMEM_LIMIT = {1: gemm.SM90_SMEM_LIMIT, 2: 115712}  # 113 KiB: two CTAs and the 1 KiB that the system takes for each share 228
MAX_ACCUMULATORS_SM80 = 64  # fp32 a thread
COMMON_FIELDS = {"arch", "elements", "formats", "tile", "warpgroups", "stages", "note"}
FIELDS = {"sm90": COMMON_FIELDS | {"cluster", "ctas_per_sm", "scaling", "slices"}, "sm80": COMMON_FIELDS}


def epilogue_bytes(name: str, tile: tuple[int, ...], row_groups: int) -> int:
    """sm90: shared memory of the epilogue, and of what other CTAs send."""
    tile_m, tile_n, _ = tile
    general = 64 * (32 if tile_n >= 32 else 16 if tile_n >= 16 else 8) * 4
    staging = row_groups * (-(-max(tile_n * 128, general) // 1024) * 1024) + 4 * tile_m
    return staging + cluster_pieces(name, tile_n) * tile_m * tile_n * 4 + gemm.SM90_BARRIER_BYTES


def expand(row: dict, where: str) -> list[Kernel]:
    """One table row -> its kernels, elements outermost. `where` is how errors name the row."""
    return expand_family(row, where, "w4a16", FIELDS, epilogue_bytes)


def expand_family(row: dict, where: str, family: str, known: dict[str, set[str]], fixed_bytes: Callable) -> list[Kernel]:
    """``known``: by architecture, its fields; ``fixed_bytes``: like :func:`epilogue_bytes`."""

    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{where}, {field} = {row.get(field)!r}: {rule}")

    def integer(field: str, allowed: tuple[int, ...]) -> int:
        require(row.get(field) in allowed and type(row[field]) is int, field, f"must be one of {', '.join(map(str, allowed))}")
        return row[field]

    def integers(field: str) -> tuple[int, ...]:
        value = row.get(field)
        ok = isinstance(value, list) and len(value) == 3 and all(type(v) is int and v > 0 for v in value)
        require(ok, field, "must be 3 positive integers")
        return tuple(value)

    def names(field: str, allowed) -> list[str]:
        value = row.get(field)
        ok = isinstance(value, list) and value and all(v in allowed for v in value) and len(set(value)) == len(value)
        require(ok, field, f"must be a list of different values from {', '.join(allowed)}")
        return value

    arch = row.get("arch")
    require(arch in known, "arch", f"must be one of {', '.join(known)}")
    for field in row:
        require(field in known[arch], field, f"no such field for {arch}; known: {', '.join(sorted(known[arch]))}")
    elements, formats = names("elements", ELEMENTS), names("formats", BITS)
    tile = integers("tile")
    note = row.get("note", "")
    require(isinstance(note, str), "note", "must be a string")
    if arch == "sm90":
        fields_of = expand_sm90(row, tile, require, integer, integers, fixed_bytes)
    else:
        fields_of = expand_sm80(row, tile, require, integer)
    shared = dict(family=family, layout="tn", tile=tile, swap=True, unaligned=False, note=note)
    return [Kernel(element=element, b_format=name, **shared, **fields_of(name)) for element in elements for name in formats]


def expand_sm90(row: dict, tile: tuple[int, ...], require, integer, integers, fixed_bytes: Callable) -> Callable[[str], dict]:
    """A format's fields of the kernel."""
    cluster = integers("cluster") if "cluster" in row else (1, 1, 1)
    warpgroups, ctas_per_sm = integer("warpgroups", (1, 2, 4)), integer("ctas_per_sm", (1, 2))
    slices = integer("slices", (1, 2, 4)) if "slices" in row else 1
    scaling = row.get("scaling")
    require(scaling in SCALINGS, "scaling", f"must be one of {', '.join(SCALINGS)}")

    tile_m, tile_n, tile_k = tile
    require(warpgroups % slices == 0, "slices", "must share out the warpgroups")
    row_groups = warpgroups // slices
    mma_m = tile_m // (BLOCK * row_groups)
    require(tile_m % (BLOCK * row_groups) == 0 and mma_m in (1, 2), "tile", "tile_m must be 64 or 128 rows a warpgroup")
    require(slices == 1 or mma_m == 1, "slices", "sliced-K takes 64 rows a warpgroup")
    require(tile_k == TILE_K * slices, "tile", f"tile_k must be {TILE_K} for each slice")
    require("accumulators" not in scaling or mma_m == 1, "scaling", "accumulators take 64 rows a warpgroup")
    require(cluster[0] in (1, 2, 4) and cluster[1:] == (1, 1), "cluster", "must be [1|2|4, 1, 1]: CTAs that share their tokens")
    require(tile_n % (8 * cluster[0]) == 0, "cluster", "the CTAs' shares of the tokens must be multiples of 8")

    def fields(name: str) -> dict:
        fine = scaling.startswith("fine")
        group = FIXED_GROUP.get(name, 32) if fine else 128
        exact = scaling == "fine_accumulators" and name == "mxfp4" and row["elements"] == ["f16"]
        require(name not in E2M1 or scaling == "fine" or exact, "scaling", f"{name} must be fine; mxfp4 of f16 may be fine_accumulators")
        sync = tile_n == 8 or (tile_n == 16 and fine and name not in BOOKS)  # by mma.sync
        require(slices == 1 or sync or "accumulators" in scaling, "slices", f"sliced-K of {name} takes accumulators or fewer tokens")
        scale_rows, zeros = tile_k // group, 2 if name in ZEROS else 0
        stage = tile_n * tile_k * 2 + tile_m * tile_k * BITS[name] // 8 + scale_rows * tile_m * (SCALE_BYTES.get(name, 2) + zeros)
        fixed = fixed_bytes(name, tile, row_groups) + (slices - 1) * tile_m * tile_n * 4 + (BOOK_BYTES if name in BOOKS else 0)
        limit = SMEM_LIMIT[ctas_per_sm]
        fits = min((limit - fixed) // stage, gemm.MAX_STAGES_SM90)
        stages = row.get("stages", fits)
        ok = type(stages) is int and gemm.MIN_STAGES_SM90 <= stages <= fits
        require(ok, "stages", f"{fits} stages of {stage} bytes fit ({name}), 3 are needed")
        smem = -(-(stages * stage + fixed) // gemm.SM90_SMEM_ALIGNMENT) * gemm.SM90_SMEM_ALIGNMENT
        sliced = f"k{slices}" if slices > 1 else ""
        shared = dict(arch=90, cluster=cluster, schedule="cooperative", stages=stages, epilogue_chunks=1, warps=(0, 0))
        shared.update(threads=128 * (warpgroups + 1), smem_bytes=min(smem, limit), ctas_per_sm=ctas_per_sm, scaling=scaling, slices=slices)
        shared.update(group_multiple=group, variant=f"w{warpgroups}{sliced}x{ctas_per_sm}_{SHORT[scaling]}")
        return shared

    return fields


def expand_sm80(row: dict, tile: tuple[int, ...], require, integer) -> Callable[[str], dict]:
    tile_m, tile_n, tile_k = tile
    warpgroups, stages = integer("warpgroups", (1, 2)), row.get("stages")
    require(tile_m in (BLOCK, 2 * BLOCK), "tile", "tile_m must be 64 or 128: every warp has 16 rows of each 64")
    require(tile_n in (8, 16, 32, 64, 128), "tile", "tile_n must be 8, 16, 32, 64 or 128")
    require(tile_k in (BLOCK, 2 * BLOCK), "tile", "tile_k must be 64 or 128")
    require(tile_n % (8 * warpgroups) == 0, "warpgroups", "the warpgroups' shares of the tokens must be multiples of 8")
    accumulators = tile_m * tile_n // (128 * warpgroups)
    rule = f"{accumulators} accumulators per thread leave too few registers for the fragments, the limit is {MAX_ACCUMULATORS_SM80}"
    require(accumulators <= MAX_ACCUMULATORS_SM80, "tile", rule)

    # Packed weights, activations, scales and zeros. The epilogue passes as many tokens of fp32 as one stage holds, 8 a warpgroup at least.
    stage = tile_m * tile_k // 2 + tile_n * tile_k * 2 + 2 * (tile_k // FINEST) * tile_m * 2
    staged = 8 * warpgroups * (tile_m + 4) * 4
    require(staged <= stage, "tile", f"the epilogue needs a stage of {staged} bytes, this one has {stage}")
    require(type(stages) is int and stages >= 2, "stages", "must be given, 2 or more")
    limit = gemm.SM80_SMEM_LIMIT
    require(stages * stage <= limit, "stages", f"{stages} stages need {stages * stage} bytes of shared memory, the limit is {limit}")

    def fields(name: str) -> dict:
        require(name == "int4", "formats", "must be int4: the other formats are dequantised first")
        shared = dict(arch=80, cluster=(1, 1, 1), schedule="multistage", stages=stages, epilogue_chunks=0, warps=(4, warpgroups))
        shared.update(threads=128 * warpgroups, smem_bytes=stages * stage, group_multiple=FINEST, variant=f"w{warpgroups}_multistage")
        return shared

    return fields


def cluster_pieces(name: str, tile_n: int) -> int:
    """Partial tiles of its cluster that a kernel has room for (max_cluster_pieces of cluster_split.h)."""
    return 0 if name in BOOKS else 3 if tile_n <= 16 else 1 if tile_n <= 32 else 0


def definition(kernel: Kernel) -> str:
    """The struct and the launch function of one kernel."""
    return gemm.struct(kernel, constants(kernel), TEMPLATES[kernel.arch][1])


def constants(kernel: Kernel) -> list[str]:
    """The members of a kernel's struct."""
    lines = [
        f"static constexpr DataType kType = {ELEMENTS[kernel.element]};",
        f"static constexpr WeightFormat kFormat = {FORMATS[kernel.b_format]};",
        "static constexpr bool kSwap = true;",
        "static constexpr int kTileM = {}, kTileN = {}, kTileK = {};".format(*kernel.tile),
        f"static constexpr int kClusterM = {kernel.cluster[0]}, kClusterN = {kernel.cluster[1]};",
        f"static constexpr Schedule kSchedule = {SCHEDULES[kernel.schedule]};",
        f"static constexpr int kStages = {kernel.stages};",
        f"static constexpr int kThreads = {kernel.threads};",
        f"static constexpr int kSmemBytes = {kernel.smem_bytes};",
        f"static constexpr int kCtasPerSm = {kernel.ctas_per_sm};",
    ]
    if kernel.arch == 90:
        lines.append(f"static constexpr int kEpilogueChunks = {kernel.epilogue_chunks};")
        lines.append(f"static constexpr int kSlices = {kernel.slices};")
        lines.append(f"static constexpr w4a16::Scaling kScaling = w4a16::{SCALINGS[kernel.scaling][0]};")
    return lines
