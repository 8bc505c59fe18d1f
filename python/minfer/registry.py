"""What the compiled library says of itself: build facts, kernels, device properties."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch


@functools.cache
def build_info() -> dict[str, Any]:
    """Facts of this build.

    Returns:
      ``version``, ``cuda`` (bool), ``archs`` ("90a;80"), ``cutlass``, ``stable_abi_target``, ``kernels_total`` (all configurations),
      ``kernels_compiled`` (those this build has code for).
    """
    return json.loads(torch.ops.minfer._build_info())


@functools.cache
def kernels(family: str = "gemm") -> tuple[dict[str, Any], ...]:
    """Every kernel configuration of a family in table order, with ``compiled`` saying whether this build has code for it."""
    return tuple(json.loads(torch.ops.minfer._kernels(family)))


@functools.cache
def kernel_names(family: str = "gemm") -> frozenset[str]:
    return frozenset(kernel["name"] for kernel in kernels(family))


def device_index(device: torch.device | int | str | None) -> int:
    """CUDA index of ``device``; None is the current CUDA device, or -1, the H200 as measured, on a machine without one."""
    if device is None:
        return torch.cuda.current_device() if build_info()["cuda"] and torch.cuda.is_available() else -1
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, an index or None, got {device}")
    return torch.cuda.current_device() if device.index is None else device.index


def device_properties(device: torch.device | int | str | None = None) -> dict[str, Any]:
    """What planning knows of a device: name, compute capability, SMs, shared memory, L2, read bandwidth (bytes/us), flop/us."""
    return json.loads(torch.ops.minfer._device_properties(device_index(device)))
