"""Modules that hold packed weights."""

from .linear import W4Linear, W8Linear

__all__ = ["W4Linear", "W8Linear"]
