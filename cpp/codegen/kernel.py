"""One kernel: what its name, its C++ struct and its registry row are derived from."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENTS = {"f16": "DataType::kF16", "bf16": "DataType::kBF16"}
MAJORS = {"k": "Major::kK", "mn": "Major::kMN"}
SCHEDULES = {
    "cooperative": "Schedule::kCooperative",
    "pingpong": "Schedule::kPingpong",
    "multistage": "Schedule::kMultistage",
    "split_kv": "Schedule::kSplitKv",
}


FORMATS = {
    "dense": "WeightFormat::kDense",
    "int4": "WeightFormat::kInt4",
    "nf4": "WeightFormat::kNf4",
    "mxfp4": "WeightFormat::kMxFp4",
    "nvfp4": "WeightFormat::kNvFp4",
    "int8": "WeightFormat::kInt8",
    "fp8_e4m3": "WeightFormat::kFp8E4M3",
    "codes": "WeightFormat::kCodes",
}
BITS = {"int4": 4, "nf4": 4, "mxfp4": 4, "nvfp4": 4, "int8": 8, "fp8_e4m3": 8}  # of a code, by format


class ConfigError(Exception):
    """A table says something illegal. The message names the file, the row, the field and the values."""


@dataclass(frozen=True)
class Kernel:
    family: str  # "gemm"
    arch: int  # lowest compute capability: 80 or 90
    element: str  # a key of ELEMENTS
    layout: str  # BLAS letters of the caller's A and B: "tn" is row-major A, column-major B
    tile: tuple[int, int, int]
    cluster: tuple[int, int, int]
    schedule: str
    swap: bool
    unaligned: bool
    stages: int
    epilogue_chunks: int  # sm90 only, 0 elsewhere
    warps: tuple[int, int]  # sm80 only, (0, 0) elsewhere
    threads: int
    smem_bytes: int
    note: str
    b_format: str = "dense"  # a key of FORMATS
    group_multiple: int = 0  # quantised B: k per scale must be a multiple of this, or all of k
    ctas_per_sm: int = 1
    variant: str = ""  # w4a16: what else tells two kernels apart, the end of the name
    scaling: str = ""  # w4a16 sm90: where scales are applied, a key of w4a16.SCALINGS
    slices: int = 1  # w4a16 sm90: warpgroups that share out each stage's k
    head_dim_v: int = 0  # attention: of the values; tile is [queries, keys, head_dim]
    own_output: bool = False  # attention sm90: output is staged in room of its own, not in that of the queries

    @property
    def name(self) -> str:
        tile = "x".join(map(str, self.tile))
        cluster = "x".join(map(str, self.cluster))
        if self.family == "attention":
            dims = f"d{self.tile[2]}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.tile[2] else "")
            cache = "" if self.b_format == "dense" else f"_{self.b_format}"
            tile = "" if self.variant == "decode" else f"_{self.tile[0]}x{self.tile[1]}"
            return f"attention_sm{self.arch}_{self.element}_{dims}{cache}{tile}_{self.variant}"
        if self.b_format != "dense":
            grouped = "moe_" if self.family.startswith("moe") else ""
            return f"{grouped}w{BITS[self.b_format]}a16_sm{self.arch}_{self.element}_{self.b_format}_{tile}_{cluster}_{self.variant}"
        suffix = ("_swap" if self.swap else "") + ("_unaligned" if self.unaligned else "")
        return f"{self.family}_sm{self.arch}_{self.element}_{self.layout}_{tile}_{cluster}_{self.schedule}{suffix}"

    @property
    def arch_exact(self) -> bool:
        """sm_90a code (WGMMA, TMA multicast) runs on compute capability 9.0 alone; sm_80 code runs on every later one."""
        return self.arch == 90

    @property
    def skips_sm90a(self) -> bool:
        """Portable attention is no part of a build for sm_90a: every problem has a better kernel there, and kernels are counted."""
        return self.family == "attention" and self.arch == 80

    @property
    def a_major(self) -> str:
        """'t': A is [m, k] row-major, so k is contiguous."""
        return "k" if self.layout[0] == "t" else "mn"

    @property
    def b_major(self) -> str:
        """'n': B is [k, n] column-major, so k is contiguous."""
        return "k" if self.layout[1] == "n" else "mn"

    @property
    def alignment(self) -> int:
        """Bytes that operands' pointers and strides must be multiples of: 16 for TMA and cp.async, one element for element-wise copies."""
        return 2 if self.unaligned else 16

    def info(self) -> dict:
        """The fields of minfer::KernelInfo (all but `launch`), in the header's order."""
        return {
            "name": self.name,
            "family": self.family,
            "arch": self.arch,
            "arch_exact": self.arch_exact,
            "ab_type": self.element,
            "a_major": self.a_major,
            "b_major": self.b_major,
            "b_format": self.b_format,
            "group_multiple": self.group_multiple,
            "swap": self.swap,
            "tile_m": self.tile[0],
            "tile_n": self.tile[1],
            "tile_k": self.tile[2],
            "head_dim_v": self.head_dim_v,
            "cluster_m": self.cluster[0],
            "cluster_n": self.cluster[1],
            "schedule": self.schedule,
            "stages": self.stages,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "ctas_per_sm": self.ctas_per_sm,
            "alignment": self.alignment,
            "note": self.note,
        }


def cpp_bool(value: bool) -> str:
    return "true" if value else "false"


def cpp_string(text: str) -> str:
    """A C++ string literal."""
    escaped = "".join({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}.get(c, c) for c in text)
    return f'"{escaped}"'
