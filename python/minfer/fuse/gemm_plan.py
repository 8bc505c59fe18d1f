"""The launches of a fused GEMM: the kernel's parameters, copies of what TMA cannot address, and what puts partial reductions together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import dtypes
from .errors import FuseError
from .gemm_config import Tile, band_of, parameters, partials_of
from .gemm_interface import GemmSpace, GemmSpecialisation
from .gemm_kernels import kernel_of
from .gemm_matrices import aligned, padded
from .gemm_tracing import Traced
from .graph import COLUMN, FULL, REDUCTIONS, ROW, Graph
from .launch import loaded
from .launch_parameters import Parameters
from .row_plan import RowLaunch

if TYPE_CHECKING:
    from .gemm_function import GemmFunction


class GemmPlan:
    """A call with tensors of known shapes, strides and alignments."""

    def __init__(
        self, function: GemmFunction, arguments: dict[str, Any], space: GemmSpace, specialisation: GemmSpecialisation, traced: Traced,
        arch: str, sms: int,
    ):  # fmt: skip
        self.places = {name: i for i, name in enumerate(function.signature.tensors)}
        self.space, self.traced = space, traced
        given = self._neighbours(function.name, arguments)
        config = function.config(traced, specialisation, space, given, sms, arch)
        config = self.config = function.choose_config(traced, config, space, arch)
        self.copy_a = not aligned(given["a"], -1, -2)
        self.inner_b = -2 if config.b_major == "k" else -1
        self.copy_b = not aligned(given["b"], self.inner_b, -3 - self.inner_b)
        kernel = kernel_of(function.name, traced, config, arch)
        key, artifact = function.artifact_of(kernel)
        self.kernel = loaded(key, artifact)
        self.outputs = function.results_of(traced.graph, space)
        made = [i for i, y in enumerate(traced.graph.outputs) if y.into < 0]
        self.early = [made.index(i) for i in range(len(traced.graph.outputs)) if i in made and i not in traced.late]
        self.late = [made.index(i) for i in traced.late]
        self.reductions = [i for i, node in enumerate(traced.first.nodes) if node.op in REDUCTIONS]
        self.tiles = -(-space.columns // config.columns)
        self.partial_types = [dtypes.dtype_of(traced.first.nodes[i].dtype) for i in self.reductions]
        m_tiles = -(-space.m // (config.tile_m * config.cluster))
        self.grid = [self._ctas(m_tiles, sms), 1, 1]
        prologue_inputs = traced.prologue.inputs if traced.prologue is not None else ()
        self.inputs = [self.places[x.name] for x in (*traced.first.inputs, *prologue_inputs) if not x.by_value]
        self.parameters = self._parameters(given, m_tiles)
        self.last: RowLaunch | None = None
        if traced.last is not None and space.m:
            self.last = self._last_launch(function, traced.last, given, arch, sms)

    def _neighbours(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A row's numbers are neighbours in what the kernel reads. Vectors of the columns are short, and copied where they are strided."""
        self.copied: set[int] = set()
        given = dict(arguments)
        for graph in (self.traced.graph, self.traced.prologue):
            for x in graph.inputs if graph is not None else ():
                y = given[x.name]
                if x.extent in (FULL, ROW) and y.shape[-1] > 1 and y.stride(-1) != 1:
                    if x.extent == FULL:
                        raise FuseError(f"{name}: the numbers of a row of {x.name} must be neighbours, got strides {list(y.stride())}")
                    self.copied.add(self.places[x.name])
                    given[x.name] = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        return given

    def _ctas(self, m_tiles: int, sms: int) -> int:
        c, space = self.config, self.space
        if not space.m:
            return 0
        tiles = m_tiles * self.tiles
        if c.grouped:
            tiles = (m_tiles + space.experts + 1) * self.tiles
        return tiles if c.portable else min(tiles, sms // c.cluster) * c.cluster

    def _parameters(self, given: dict[str, Any], m_tiles: int) -> Parameters:
        space, c, graph = self.space, self.config, self.traced.first
        result = Parameters()
        tensor_of = {i: n + 2 for n, i in enumerate(i for i, x in enumerate(graph.inputs) if not x.by_value)}
        following = 2 + len(tensor_of)
        before = self.traced.prologue.inputs if self.traced.prologue is not None else ()
        tensor_of_a = {i: n + following for n, i in enumerate(i for i, x in enumerate(before) if not x.by_value)}
        following += len(tensor_of_a)
        outs = {i: following + n for n, i in enumerate(i for i, y in enumerate(graph.outputs) if y.into < 0)}
        following += len(outs)
        partials = {i: following + n for n, i in enumerate(self.reductions)}
        following += len(partials)
        tile = band_of(Tile(c.tile_m, c.tile_n, c.pingpong, c.cluster), m_tiles)
        sizes = {
            "m": space.m, "n": space.columns, "k_tiles": -(-space.k // c.tile_k), "m_tiles": m_tiles, "n_tiles": self.tiles, "band": tile,
            "experts": space.experts, "k": space.k,
        }  # fmt: skip
        for kind, i in parameters(graph, c):
            if kind in ("a", "b"):
                result.address(int(kind == "b"))
            elif kind.startswith("ld"):
                result.stride(self._leading(kind, given))
            elif kind == "a_address":
                result.address(tensor_of_a[i])
            elif kind in ("a_stride", "a_expert_stride"):
                result.stride(given[before[i].name].stride(0))
            elif kind == "a_number":
                result.number(before[i].storage, self.places[before[i].name])
            elif kind == "map":
                result.tensor_map(self._map_words(i, given))
            elif kind == "address":
                result.address(tensor_of[i])
            elif kind == "number":
                result.number(graph.inputs[i].storage, self.places[graph.inputs[i].name])
            elif kind in ("stride", "expert_stride"):
                result.stride(given[graph.inputs[i].name].stride(0))
            elif kind == "out":
                result.address(outs[i])
            elif kind == "out_stride":
                result.stride(space.columns)
            elif kind == "partial":
                result.address(partials[i])
            elif kind == "limit":
                result.size(given[graph.inputs[graph.outputs[i].into].name].shape[0])
            elif kind == "offsets":
                result.address(following)
            else:
                result.size(sizes[kind])
        return result

    def _last_launch(self, function: GemmFunction, graph: Graph, given: dict[str, Any], arch: str, sms: int) -> RowLaunch:
        """What puts a row's partial reductions together; run() gives it the partial reductions behind the call's tensors."""
        kernel, config = function.rows_kernel(self.traced, self.space.m, self.tiles, arch)
        key, artifact = function.artifact_of(kernel)
        places, strides = dict(self.places), {}
        for x, partial in zip(graph.inputs, partials_of(graph), strict=True):
            if partial is not None:
                places[x.name] = len(self.places) + self.reductions.index(partial)
            if x.extent in (FULL, COLUMN):
                strides[x.name] = self.tiles if partial is not None else given[x.name].stride(0)
        return RowLaunch(graph, config, loaded(key, artifact), places, strides, self.space.m, self.tiles, sms)

    def _leading(self, kind: str, given: dict[str, Any]) -> int:
        """The stride of A's rows, of B's columns or rows, or of an expert's matrix, in numbers."""
        words = self._map_words(0 if kind == "lda" else 1, given)
        modes = words[1]
        return words[2 + modes + (kind == "ldb_expert")]

    def _map_words(self, which: int, given: dict[str, Any]) -> list[int]:
        """The descriptor of A, 0, or B, 1."""
        c, space = self.config, self.space
        x = given["b" if which else "a"]
        unit = 16 // x.element_size()

        def stride(mode: int, inner: int, copied: bool) -> int:
            return -(-x.shape[inner] // unit) * unit if copied else x.stride(mode)

        if which == 0:
            return [0, 2, space.k, space.m, stride(-2, -1, self.copy_a), c.a_box, c.tile_m, c.a_swizzle]
        inner, outer = self.inner_b, -3 - self.inner_b
        extents = [x.shape[inner], x.shape[outer]]
        strides = [stride(outer, inner, self.copy_b)]
        box = [c.tile_k, c.tile_n // c.boxes] if c.b_major == "k" else [c.tile_n // c.boxes, c.tile_k]
        if space.experts:
            extents.append(space.experts)
            strides.append(strides[0] * x.shape[outer] if self.copy_b or space.experts == 1 else x.stride(0))
            box.append(1)
        return [1, len(extents), *extents, *strides, *box, 128]

    def run(self, tensors: list[Tensor | None]) -> list[Tensor]:
        a, b = tensors[0], tensors[1]
        results = [torch.empty(shape, dtype=dtype, device=a.device) for shape, dtype in self.outputs]
        if not self.space.m:
            return results
        if self.copied:
            tensors = [x.contiguous() if i in self.copied else x for i, x in enumerate(tensors)]
        if self.copy_a:
            a = padded(a, -1)
        if self.copy_b:
            b = padded(b, self.inner_b)
        partials = [torch.empty((self.space.m, self.tiles), dtype=dtype, device=a.device) for dtype in self.partial_types]
        operands = [a, b, *(tensors[i] for i in self.inputs), *(results[i] for i in self.early), *partials]
        if self.space.experts:
            operands.append(tensors[self.places["offsets"]])
        self.kernel.launch(operands, self.parameters.filled(tensors), self.grid)
        if self.last is not None:
            self.last.run([*tensors, *partials], [results[i] for i in self.late])
        return results
