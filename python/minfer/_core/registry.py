"""What the compiled library says of itself: build facts, kernels, device properties."""

from __future__ import annotations

import functools
import json
import numbers
from typing import Any

import torch

from .namespace import ops

H200 = -1  # stands for a device: the H200 as measured, on any machine


@functools.cache
def build_info() -> dict[str, Any]:
    """Facts of this build.

    Returns:
      ``version``, ``cuda`` (bool), ``archs`` ("90a;80"), ``cutlass``, ``stable_abi_target``, ``kernels_total`` (all configurations),
      ``kernels_compiled`` (those this build has code for).
    """
    return json.loads(ops._build_info())


@functools.cache
def kernels(family: str = "gemm") -> tuple[dict[str, Any], ...]:
    """Every kernel configuration of a family in table order, with ``compiled`` saying whether this build has code for it.

    Args:
      family: "attention", "fused", "gemm", "moe", "moe_scaled", "moe_w4a16", "norm_gemm", "scaled_gemm", "w4a16" or "w4a8"; ""
        is all of them.

    Raises:
      ValueError: there is no such family.
    """
    found = tuple(json.loads(ops._kernels(family))) if isinstance(family, str) else ()
    if not found:
        known = sorted({kernel["family"] for kernel in json.loads(ops._kernels(""))})
        raise ValueError(f"minfer.kernels: family must be one of {', '.join(known)}, or '' for all, got {family!r}")
    return found


@functools.cache
def kernel_names(family: str = "gemm") -> frozenset[str]:
    return frozenset(kernel["name"] for kernel in kernels(family))


def device_index(device: torch.device | int | str | None) -> int:
    """CUDA index of ``device``; None is the current CUDA device, or -1, the H200 as measured, on a machine without one.

    Raises:
      ValueError: it is something else, or a device that is not there (no device is, where the build has no CUDA).
    """
    count = torch.cuda.device_count() if build_info()["cuda"] else 0
    if device is None:
        return torch.cuda.current_device() if count else H200
    must = f"device must be a CUDA device, its index, {H200} (the H200 as measured) or None, got {device!r}"
    if isinstance(device, numbers.Integral) and not isinstance(device, bool):
        index = int(device)
    else:
        if not isinstance(device, (str, torch.device)):
            raise ValueError(must)
        try:
            device = torch.device(device)
        except RuntimeError as error:  # no name of a device
            raise ValueError(must) from error
        if device.type != "cuda":
            raise ValueError(must)
        index = device.index
        if index is None:
            index = torch.cuda.current_device() if count else 0
    if not H200 <= index < count:
        raise ValueError(f"{must}; {'there are ' + str(count) if count else 'this machine or build has no'} CUDA devices")
    return index


def device_properties(device: torch.device | int | str | None = None) -> dict[str, Any]:
    """What planning knows of a device: name, compute capability, SMs, shared memory, L2, read bandwidth (bytes/us), flop/us."""
    return json.loads(ops._device_properties(device_index(device)))
