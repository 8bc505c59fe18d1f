"""Argument checks, a file a family: the CPU kernels and the fakes share them, so that a mistake has the same message in both."""
