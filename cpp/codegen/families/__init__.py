"""One module for each family of kernels: a dataclass whose methods say all that is particular to the family."""

from __future__ import annotations

from codegen.families.attention import AttentionKernel
from codegen.families.fused import FusedKernel
from codegen.families.gemm import GemmKernel
from codegen.families.grouped_gemm import GroupedGemmKernel
from codegen.families.grouped_quantized_gemm import GroupedQuantizedGemmKernel
from codegen.families.grouped_scaled_gemm import GroupedScaledGemmKernel
from codegen.families.norm_gemm import NormGemmKernel
from codegen.families.quantized_gemm import QuantizedGemmKernel
from codegen.families.quantized_scaled_gemm import W4A8Kernel
from codegen.families.scaled_gemm import ScaledGemmKernel

# By the name that a table gives its family.
FAMILIES = {
    family.FAMILY: family
    for family in (
        *(AttentionKernel, FusedKernel, GemmKernel, GroupedGemmKernel, GroupedQuantizedGemmKernel, NormGemmKernel, QuantizedGemmKernel),
        *(GroupedScaledGemmKernel, ScaledGemmKernel, W4A8Kernel),
    )
}
