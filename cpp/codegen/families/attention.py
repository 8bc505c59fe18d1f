"""The attention family: which rows of attention.toml are legal, the shared memory they need, the struct a shard instantiates.

The kernels' tile is [queries, keys, head_dim]; of decode kernels: rows of a unit at most, keys of a slice, head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.families import attention_sm80, attention_sm90
from codegen.formats import project_formats
from codegen.kernel import Kernel, cpp_bool
from codegen.row import Row

FIELDS = {"sm90": attention_sm90.FIELDS, "sm80": attention_sm80.FIELDS}
EXPAND = {
    ("sm90", "prefill"): attention_sm90.prefill,
    ("sm90", "decode"): attention_sm90.decode,
    ("sm80", "prefill"): attention_sm80.prefill,
    ("sm80", "decode"): attention_sm80.decode,
}


@dataclass(frozen=True, kw_only=True)
class AttentionKernel(Kernel):
    FAMILY = "attention"
    LAUNCH_HEADER = "attention/shared/launch.h"
    ARGUMENTS = "attention::AttentionLaunchArguments"

    variant: str  # prefill or decode
    invariant: bool = False  # sm90, prefill: of the batch-invariant mode
    divides: bool = False  # sm90, prefill: has that arithmetic, and keys divided among CTAs, whatever their lengths
    own_output: bool = False  # sm90, prefill: output is staged in room of its own, not in that of the queries

    @property
    def name(self) -> str:
        dims = f"d{self.tile[2]}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.tile[2] else "")
        cache = "" if self.b_format == "dense" else f"_{self.b_format}"
        tile = "" if self.variant == "decode" else f"_{self.tile[0]}x{self.tile[1]}"
        kind = "_invariant" if self.invariant else "_divided" if self.divides else ""
        return f"attention_sm{self.arch}_{self.element}_{dims}{cache}{tile}_{self.variant}{kind}"

    @property
    def operation(self) -> str:
        return "attention_invariant" if self.invariant else "attention_divided" if self.divides else self.FAMILY

    @property
    def shard_group(self) -> str:
        codes = "_codes" if self.variant == "prefill" and self.b_format != "dense" else ""
        few = "_few_rows" if self.few_rows else ""
        return f"attention_sm{self.arch}_{self.variant}{codes}{'_invariant' if self.invariant else '_divided' if self.divides else ''}{few}"

    @property
    def template(self) -> tuple[str, str]:
        kind = "few_rows" if self.few_rows else self.variant
        header = "few_rows_launch" if self.few_rows else f"{kind}_sm{self.arch}"
        return f"attention/{self.variant}/{header}.cuh", f"launch_{kind}_sm{self.arch}"

    @property
    def few_rows(self) -> bool:
        """Whether the rows of a tile are the MMA's n."""
        return self.variant == "prefill" and self.tile[0] == attention_sm90.FEW_ROWS

    @property
    def targets(self) -> str:
        """The portable kernels are no part of a build for sm_90a: every problem has a better kernel there, and kernels are counted."""
        return "sm90a" if self.arch == 90 else "not_sm90a"

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        arch, variant = row.get("arch"), row.get("variant")
        row.require(arch in FIELDS, "arch", "must be sm90 or sm80")
        row.require(variant in FIELDS[arch], "variant", f"must be one of {', '.join(FIELDS[arch])}")
        row.known(FIELDS[arch][variant], f"{variant} on {arch}")
        elements = row.names("elements", cls.OPERANDS)
        head_dim = row.get("head_dim")
        head_dim_v = row.get("head_dim_v", head_dim)
        for field, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            row.require(
                type(value) is int and 0 < value <= 256 and value % 64 == 0, field, "must be 64, 128, 192 or 256: whole 128-byte rows"
            )
        row.require(head_dim_v <= head_dim, "head_dim_v", "must be at most head_dim")
        shared = dict(arch=int(arch[2:]), variant=variant, head_dim_v=head_dim_v, note=row.text("note"))
        # Caches outermost, where a row has several.
        return [cls(element=element, **shared, **fields) for fields in EXPAND[arch, variant](row) for element in elements]

    def constants(self) -> list[str]:
        lines = self.type_constants()
        if self.variant == "decode":
            lines += [
                f"static constexpr WeightFormat kFormat = {project_formats().formats[self.b_format].cpp};",
                f"static constexpr int kRows = {self.tile[0]}, kSlice = {self.tile[1]}, kHeadDim = {self.tile[2]};",
            ]
        else:
            lines += [
                f"static constexpr int kTileM = {self.tile[0]}, kTileN = {self.tile[1]};",
                f"static constexpr int kHeadDim = {self.tile[2]}, kHeadDimV = {self.head_dim_v};",
            ]
        lines.append(f"static constexpr int kStages = {self.stages};")
        lines.append(f"static constexpr int kSmemBytes = {self.smem_bytes};")
        if self.arch == 80:
            threads = f"kThreads = {self.threads}, " if self.variant == "decode" else ""
            lines.append(f"static constexpr int {threads}kCtasPerSm = {self.ctas_per_sm};")
        elif self.variant == "prefill":
            lines += [
                f"static constexpr bool kPingpong = {cpp_bool(self.schedule == 'pingpong')};",
                f"static constexpr bool kOwnOutput = {cpp_bool(self.own_output)};",
                f"static constexpr WeightFormat kFormat = {project_formats().formats[self.b_format].cpp};",
                f"static constexpr bool kInvariant = {cpp_bool(self.invariant or self.divides)};",
                f"static constexpr bool kDivides = {cpp_bool(self.divides)};",
            ]
            lines += [f"static constexpr int kCtasPerSm = {self.ctas_per_sm};"] if self.few_rows else []
        return lines
