"""The family of GEMMs whose operands have 8 bits and scales: rows of scaled_gemm.toml are those of gemm.toml."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.families.gemm import GemmKernel
from codegen.kernel import Kernel
from codegen.row import Row


@dataclass(frozen=True, kw_only=True)
class ScaledGemmKernel(GemmKernel):
    FAMILY = "scaled_gemm"
    OPERANDS = ("e4m3", "s8")

    @classmethod
    def expand(cls, row: Row) -> list[Kernel]:
        portable = row.get("arch") == "sm80"
        row.require(not portable or row.get("elements") == ["s8"], "elements", "must be s8: mma.sync of sm80 multiplies no e4m3")
        return super().expand(row)

    @property
    def shard_group(self) -> str:
        return f"{self.FAMILY}_sm{self.arch}_{self.schedule}_{self.element}"
