"""Kernels on a GPU: loading a cubin once, and launching it on torch's current stream."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._core.namespace import ops
from .artifact import Artifact

ADDRESS, INT32, INT64, TENSOR_MAP = range(4)


@functools.cache
def architecture(device: int) -> str:
    """For which code is compiled that a device runs best."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def capability_of(architecture: str) -> int:
    """The compute capability as a number: 100 of sm_100a."""
    return int(architecture[3:].rstrip("af"))


class Loaded:
    """A kernel that can be launched."""

    def __init__(self, artifact: Artifact):
        code = torch.frombuffer(bytearray(artifact.cubin), dtype=torch.uint8)
        self.handle = ops._load_kernel(code, artifact.entry, artifact.shared_bytes)
        self.threads, self.cluster = artifact.threads, artifact.cluster

    def launch(self, tensors: list[Tensor], parameters: list[int], grid: list[int]) -> None:
        ops._launch_kernel(tensors, self.handle, parameters, grid, self.threads, self.cluster)


_loaded: dict[str, Loaded] = {}


def loaded(key: str, artifact: Artifact) -> Loaded:
    """Of this process, by the artifact's key."""
    if key not in _loaded:
        _loaded[key] = Loaded(artifact)
    return _loaded[key]
