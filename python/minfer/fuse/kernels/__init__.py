"""Kernels in the CuTe DSL, one module a template. They are imported where something is compiled, and nowhere else."""
