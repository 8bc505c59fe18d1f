"""The operators as ATen compositions: their CPU kernels, and in float64 the truth that tests measure against."""

from .gemm import gemm, gemm_gated

__all__ = ["gemm", "gemm_gated"]
