"""Launches of kernels of rows: on a call's tensors, or on the partial reductions of a GEMM's tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import FULL, Graph
from .launch import Loaded
from .launch_parameters import Parameters
from .row_config import RingConfig, RowConfig, parameters, resident_clusters

Config = RowConfig | RingConfig


class RowLaunch:
    """A kernel on tensors of known strides.

    Args:
      places: which of the tensors that run() is given each input of the graph is, by its name.
      strides: of the rows of inputs, in numbers, by their names.
      sms: that the GPU has.
    """

    def __init__(
        self,
        graph: Graph,
        config: Config,
        kernel: Loaded,
        places: dict[str, int],
        strides: dict[str, int],
        rows: int,
        columns: int,
        sms: int,
    ):
        self.kernel = kernel
        self.inputs = [places[x.name] for x in graph.inputs if not x.by_value]
        tensor_of = {i: n for n, i in enumerate(i for i, x in enumerate(graph.inputs) if not x.by_value)}
        self.parameters = Parameters()
        made = 0
        for kind, i in parameters(graph):
            if kind == "address":
                self.parameters.address(tensor_of[i])
            elif kind == "number":
                self.parameters.number(graph.inputs[i].storage, places[graph.inputs[i].name])
            elif kind == "stride":
                self.parameters.stride(strides[graph.inputs[i].name])
            elif kind == "out":
                self.parameters.address(len(self.inputs) + made)
                made += 1
            elif kind == "out_stride":
                self.parameters.stride(columns if graph.outputs[i].extent == FULL else 1)
            else:
                self.parameters.size(rows if kind == "rows" else columns)
        self.grid = _grid(config, rows, columns, sms)

    def run(self, tensors: Sequence[Tensor | None], results: Sequence[Tensor]) -> None:
        self.kernel.launch([*(tensors[i] for i in self.inputs), *results], self.parameters.filled(tensors), self.grid)


def _grid(config: Config, rows: int, columns: int, sms: int) -> list[int]:
    if not rows or not columns:
        return [0, 1, 1]
    if isinstance(config, RingConfig):
        return [min(rows, resident_clusters(config.cluster, sms)) * config.cluster, 1, 1]
    groups = -(-rows // (config.vectors if config.down else config.rows))
    parts = config.cluster if config.columns else -(-columns // (config.width * config.threads))
    return [groups * parts, 1, 1]


class RowPlan:
    """A call of a function of rows. ``outputs``: the shapes and dtypes of what it returns."""

    def __init__(self, launch: RowLaunch, outputs: list[tuple[tuple[int, ...], torch.dtype]]):
        self.launch, self.outputs = launch, outputs

    def run(self, tensors: list[Any]) -> list[Tensor]:
        device = tensors[self.launch.inputs[0]].device
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.outputs]
        self.launch.run(tensors, results)
        return results
