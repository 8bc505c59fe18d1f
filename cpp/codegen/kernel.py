"""One kernel: what its name, its C++ struct and its registry row are derived from. Each family adds its own fields and methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from codegen.formats import project_formats
from codegen.row import Row

MAJORS = {"k": "Major::kK", "mn": "Major::kMN"}
SCHEDULES = {
    "cooperative": "Schedule::kCooperative",
    "pingpong": "Schedule::kPingpong",
    "multistage": "Schedule::kMultistage",
    "split_kv": "Schedule::kSplitKv",
    "rows": "Schedule::kRows",
    "registers": "Schedule::kRegisters",
}
# Where a kernel is compiled: WGMMA and TMA multicast need sm_90a, portable code runs on every architecture from sm_80 on, and portable
# code that sm_90a has a better kernel for in every case is left out of that build.
TARGETS = ("sm90a", "portable", "not_sm90a")


@dataclass(frozen=True, kw_only=True)
class Kernel(ABC):
    """The fields are those of minfer::KernelInfo, beside what a family adds."""

    FAMILY: ClassVar[str]  # name of the family, its namespace, and what its tables say
    LAUNCH_HEADER: ClassVar[str]  # declares ARGUMENTS
    ARGUMENTS: ClassVar[str]  # type of the launch functions' argument
    OPERANDS: ClassVar[tuple[str, ...]] = ("f16", "bf16")  # number types that the family's mainloops multiply

    arch: int  # lowest compute capability: 80 or 90
    element: str  # number type of A and B, or of the activations: a name of formats.toml
    layout: str = "tn"  # BLAS letters of the caller's A and B: "tn" is row-major A, column-major B
    b_format: str = "dense"  # a format of formats.toml
    group_multiple: int = 0  # quantised B: k per scale must be a multiple of this, or all of k
    swap: bool = False
    column_step: int = 0  # > 0: a launch chooses the tile's columns, multiples of this up to the tile's
    tile: tuple[int, int, int]
    head_dim_v: int = 0  # attention: of the values
    cluster: tuple[int, int, int] = (1, 1, 1)
    schedule: str  # a key of SCHEDULES
    stages: int
    threads: int
    smem_bytes: int
    ctas_per_sm: int = 1
    invariant_only: bool = False  # only batch-invariant plans take it
    in_place_ranges: bool = False  # a CTA computes all ranges of k that a launch asks for
    note: str = ""

    @classmethod
    @abstractmethod
    def expand(cls, row: Row) -> list[Kernel]:
        """One table row -> its kernels, elements outermost. ConfigError where the row is illegal."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As the registry, the kernel's symbol and ``kernel=`` have it."""

    @property
    @abstractmethod
    def shard_group(self) -> str:
        """Kernels of one group may share a source file; all are of one family, architecture and template."""

    @property
    @abstractmethod
    def template(self) -> tuple[str, str]:
        """The header that a source file includes, and the function template of it that the launch function calls."""

    @abstractmethod
    def constants(self) -> list[str]:
        """The members of the kernel's struct."""

    @property
    def targets(self) -> str:
        """Where it is compiled: one of TARGETS."""
        return "sm90a" if self.arch == 90 else "portable"

    def is_built_for(self, arch: str) -> bool:
        """Whether a build for an architecture ("80", "90a", ...) holds its code."""
        return self.targets == "portable" or (self.targets == "sm90a") == (arch == "90a")

    @property
    def operation(self) -> str:
        """What it computes, where a family has kernels of several operations."""
        return self.FAMILY

    @property
    def sums(self) -> str:
        """How an output is added up over k: kernels of one text give it the same bits, for the same ranges of k. "" where a launch decides,
        or there is no such sum."""
        return ""

    @property
    def arch_exact(self) -> bool:
        """sm_90a code (WGMMA, TMA multicast) runs on compute capability 9.0 alone; sm_80 code runs on every later one."""
        return self.arch == 90

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
        """Bytes that operands' pointers and strides must be multiples of: 16 for TMA and cp.async."""
        return 16

    def type_constants(self) -> list[str]:
        """kType."""
        return [f"static constexpr DataType kType = {project_formats().elements[self.element].cpp};"]

    def definition(self) -> str:
        """The struct of constants, and the launch function, which instantiates the family's template with it."""
        body = "\n".join(f"  {line}" for line in self.constants())
        return (
            f"struct {self.name} {{\n{body}\n}};\n"
            f"Status launch_{self.name}({self.ARGUMENTS} const& arguments) {{\n"
            f"  return {self.template[1]}<{self.name}>(arguments);\n}}\n"
        )

    def info(self) -> dict:
        """The fields of minfer::KernelInfo (all but `launch`), in the header's order."""
        return {
            "name": self.name,
            "family": self.FAMILY,
            "operation": self.operation,
            "arch": self.arch,
            "arch_exact": self.arch_exact,
            "ab_type": self.element,
            "a_major": self.a_major,
            "b_major": self.b_major,
            "b_format": self.b_format,
            "group_multiple": self.group_multiple,
            "swap": self.swap,
            "column_step": self.column_step,
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
            "sums": self.sums,
            "invariant_only": self.invariant_only,
            "in_place_ranges": self.in_place_ranges,
            "note": self.note,
        }


def cpp_bool(value: bool) -> str:
    return "true" if value else "false"


def cpp_string(text: str) -> str:
    """A C++ string literal."""
    escaped = "".join({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}.get(c, c) for c in text)
    return f'"{escaped}"'


def shape_name(shape: tuple[int, ...]) -> str:
    """(128, 256, 64) -> 128x256x64."""
    return "x".join(map(str, shape))
