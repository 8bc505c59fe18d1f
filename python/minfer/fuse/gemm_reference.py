"""Fused GEMMs by torch: what they are on a CPU, and what kernels are held against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .evaluate import evaluate
from .gemm_interface import GemmSpace
from .gemm_tracing import Traced
from .graph import COLUMN, FULL, ROW, Graph


def evaluated(
    traced: Traced, gate: str, arguments: dict[str, Any], space: GemmSpace, returned: list[tuple[tuple[int, ...], torch.dtype]],
    precision: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """What is returned, of these shapes and dtypes; what the epilogue writes is written into the arguments."""
    a, b = arguments["a"], arguments["b"]
    device = a.device
    results = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in returned]
    ends = [space.m] if not space.experts else arguments["offsets"].clamp(0, space.m).tolist()
    first = 0
    for expert, end in enumerate(ends):
        rows = slice(first, max(first, end))
        first = rows.stop
        if rows.start == rows.stop:
            continue
        matrix = (b[expert] if space.experts else b).to(precision)
        left = a[rows]
        row = torch.arange(rows.start, rows.stop, device=device).view(-1, 1)
        count = rows.stop - rows.start

        def inputs(graph: Graph, columns: int, expert: int = expert, rows: slice = rows, count: int = count) -> list[Tensor]:
            return [part(arguments[x.name].to(device), x.extent, rows, count, columns, expert) for x in graph.inputs]

        if traced.prologue is not None:
            values = {"a": left, "row": row, "col": torch.arange(space.k, device=device).view(1, -1)}
            (left,) = evaluate(
                traced.prologue, inputs(traced.prologue, space.k), rows=count, columns=space.k, values=values, precision=precision
            )
        acc = left.to(precision) @ matrix
        values = {"row": row, "col": torch.arange(space.columns, device=device).view(1, -1)}
        if not gate:
            values["acc"] = acc
        else:
            values["acc"], values["acc1"] = _gated(acc, gate)
        outputs = evaluate(
            traced.graph, inputs(traced.graph, space.columns), rows=count, columns=space.columns, values=values, precision=precision,
            indices=True,
        )  # fmt: skip
        made = iter(results)
        for y, (value, index) in zip(traced.graph.outputs, outputs, strict=True):
            if y.into < 0:
                result = next(made)
                result[rows] = value.reshape(count, *result.shape[1:])
                continue
            into = arguments[traced.graph.inputs[y.into].name]
            if index is None:
                into[rows] = value.reshape(into[rows].shape)
                continue
            index = index.reshape(-1).long()
            inside = (index >= 0) & (index < into.shape[0])
            into[index[inside]] = value[inside]
    return results


def part(x: Tensor, extent: str, rows: slice, count: int, columns: int, expert: int) -> Tensor:
    """What an expert's rows see of an operand, as evaluate() takes it."""
    if x.ndim == 3:
        x = x[expert]
    if extent == FULL:
        return x[rows] if x.shape[0] >= rows.stop else x.new_zeros(1, 1).expand(count, columns)  # only scattered into
    if extent == COLUMN:
        return x.reshape(-1, 1)[rows]
    return x.reshape(1, -1) if extent == ROW else x.reshape(1, 1)


def _gated(acc: Tensor, gate: str) -> tuple[Tensor, Tensor]:
    half = acc.shape[1] // 2
    if gate == "halves":
        return acc[:, :half], acc[:, half:]
    if gate == "alternating":
        return acc[:, 0::2], acc[:, 1::2]
    blocks = acc.view(acc.shape[0], -1, 2, 8)
    return blocks[:, :, 0].reshape(-1, half), blocks[:, :, 1].reshape(-1, half)
