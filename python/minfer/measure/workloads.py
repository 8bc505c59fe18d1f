"""What the tuner runs for a problem: random operands, the operator over them, cuBLAS beside it, and a check of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import reference
from .._core.namespace import ops
from ..formats import weight_formats, weight_layout
from ..planning.plan import Problem, ScaledProblem, W4A8Problem, W4Problem
from ..reference import quantized_gemm as reference_w4a16, quantized_scaled_gemm as reference_w4a8, scaled_gemm as reference_scaled
from . import benchmarking

BETA = 0.5  # of dense problems with a C
Operands = dict[str, Any]
Launcher = Callable[[Operands], torch.Tensor]


def _error(out: torch.Tensor, truth: torch.Tensor, peer: torch.Tensor) -> tuple[float, float]:
    """Relative error, and the most it may be: twice that of the peer, plus one rounding."""
    most = 2 * benchmarking.relative_error(peer, truth) + benchmarking.rounding_unit(peer.dtype)
    return benchmarking.relative_error(out, truth), most


class GemmWorkload:
    """minfer::gemm and gemm_gated."""

    def __init__(self, problem: Problem, device: str = "cuda"):
        self.problem, self.device = problem, device

    def operands(self) -> Operands:
        """Random normal a, b, c in the problem's layout, and an output d."""
        problem, device = self.problem, self.device
        batch = () if problem.batch == 1 else (problem.batch,)

        def matrix(rows: int, columns: int, row_major: bool, dtype: torch.dtype = problem.dtype) -> torch.Tensor:
            if row_major:
                return torch.randn(*batch, rows, columns, device=device, dtype=dtype)
            return torch.randn(*batch, columns, rows, device=device, dtype=dtype).transpose(-1, -2)

        out_dtype = problem.out_dtype or problem.dtype
        return {
            "a": matrix(problem.m, problem.k, problem.a_major == "k"),
            "b": matrix(problem.k, problem.n, problem.b_major == "mn").div_(max(problem.k, 1) ** 0.5),
            "c": matrix(problem.m, problem.n, True, out_dtype) if problem.c else None,
            "d": torch.empty(*batch, problem.m, problem.n_out, device=device, dtype=out_dtype),
        }

    def launcher(self, kernel: str | None = None) -> Launcher:
        """The operator as a function of one set of operands."""
        if self.problem.gated:
            return lambda x: ops.gemm_gated.default(x["a"], x["b"], kernel=kernel)
        beta = BETA if self.problem.c else 0.0
        return lambda x: ops.gemm.out(x["a"], x["b"], c=x["c"], beta=beta, kernel=kernel, out=x["d"])

    def torch_contestant(self, sets: list[Operands]) -> tuple[Launcher, list[Operands]] | None:
        """cuBLAS through torch and the sets that it runs on; None where torch has no one call for it."""
        problem = self.problem
        if problem.gated or problem.out_dtype not in (None, problem.dtype):
            return None
        if problem.c:
            add = torch.addmm if problem.batch == 1 else torch.baddbmm
            return (lambda x: add(x["c"], x["a"], x["b"], beta=BETA, out=x["d"])), sets
        return (lambda x: torch.matmul(x["a"], x["b"], out=x["d"])), sets

    def check(self, kernel: str | None, x: Operands) -> tuple[float, float]:
        """Relative error of one launch into a NaN-filled output against a float32 product, and the most it may be."""
        x["d"].fill_(float("nan"))
        out = self.launcher(kernel)(x)
        if self.problem.gated:
            truth = reference.gemm_gated(x["a"].float(), x["b"].float())
            return _error(out, truth, reference.gemm_gated(x["a"], x["b"]))
        truth = reference.gemm(x["a"].float(), x["b"].float(), c=x["c"], beta=BETA if self.problem.c else 0.0)
        return _error(out, truth, truth.to(out.dtype))


class W4Workload:
    """minfer::w4a16_gemm and w4a16_gemm_gated."""

    def __init__(self, problem: W4Problem, device: str = "cuda"):
        self.problem, self.device = problem, device

    def operands(self) -> Operands:
        """Random normal a and c, random codes, scales and zero points, packed; an output d. W has deviation 1 / sqrt(k)."""
        problem, device = self.problem, self.device
        groups = (weight_layout.groups(problem.k, problem.group_size), problem.n)
        codes = torch.randint(0, 16, (problem.n, problem.k), dtype=torch.uint8, device=device)
        unit = 1 / (4.6 * max(problem.k, 1) ** 0.5)  # 4.6: the deviation of a code
        scale_type = weight_formats.FORMATS[problem.w4_format].scale_type
        scales = torch.rand(groups, device=device).add_(0.5).mul_(unit).to(scale_type or problem.dtype)
        if scale_type is not None:
            scales = scales.view(torch.uint8)
        return {
            "a": torch.randn(problem.m, problem.k, device=device, dtype=problem.dtype),
            "qweight": ops.w4a16_pack(codes, w4_format=problem.w4_format),
            "scales": scales,
            "zeros": torch.randint(6, 11, groups, device=device).to(problem.dtype) if problem.zeros else None,
            "c": torch.randn(problem.m, problem.n, device=device, dtype=problem.dtype) if problem.c else None,
            "d": torch.empty(problem.m, problem.n_out, device=device, dtype=problem.dtype),
        }

    @property
    def _format(self) -> dict[str, Any]:
        return {"group_size": self.problem.group_size, "w4_format": self.problem.w4_format}

    def launcher(self, kernel: str | None = None) -> Launcher:
        """The operator as a function of one set of operands."""
        options = self._format | {"kernel": kernel}
        if self.problem.gated:
            gated = ops.w4a16_gemm_gated.default
            return lambda x: gated(x["a"], x["qweight"], x["scales"], x["zeros"], **options)
        gemm = ops.w4a16_gemm.out
        return lambda x: gemm(x["a"], x["qweight"], x["scales"], x["zeros"], c=x["c"], out=x["d"], **options)

    def _dense(self, x: Operands) -> torch.Tensor:
        options = {"n": self.problem.n, "k": self.problem.k, "out_dtype": self.problem.dtype}
        return reference_w4a16.w4a16_dequantize(x["qweight"], x["scales"], x["zeros"], **options, **self._format)

    def torch_contestant(self, sets: list[Operands]) -> tuple[Launcher, list[Operands]] | None:
        """cuBLAS through torch on 16-bit weights, and sets of its own: its weights pass three L2s in fewer of them."""
        if self.problem.gated:
            return None
        first = {name: sets[0][name] for name in ("a", "c", "d")} | {"w": self._dense(sets[0])}
        dense = benchmarking.rotation(lambda: first | {"w": first["w"].clone()})
        if self.problem.c:
            return (lambda x: torch.addmm(x["c"], x["a"], x["w"].t(), out=x["d"])), dense
        return (lambda x: torch.mm(x["a"], x["w"].t(), out=x["d"])), dense

    def check(self, kernel: str | None, x: Operands) -> tuple[float, float]:
        """Relative error of one launch into a NaN-filled output against a float32 product of the dequantised weight, and its limit."""
        x["d"].fill_(float("nan"))
        out = self.launcher(kernel)(x)
        a, w = x["a"], self._dense(x).t()
        if self.problem.gated:
            return _error(out, reference.gemm_gated(a.float(), w.float()), reference.gemm_gated(a, w))
        truth = reference.gemm(a.float(), w.float(), c=x["c"], beta=1.0 if self.problem.c else 0.0)
        return _error(out, truth, truth.to(out.dtype))


class ScaledWorkload:
    """minfer::gemm_fp8, gemm_int8 and their gated forms. Scales are of rows, or, where the problem says so, of blocks."""

    def __init__(self, problem: ScaledProblem, device: str = "cuda"):
        self.problem, self.device = problem, device

    def operands(self) -> Operands:
        """Random codes, normal of e4m3 and even of int8, and scales near one; c normal; an output d."""
        problem, device = self.problem, self.device
        m, n, k = problem.m, problem.n, problem.k

        def codes(rows: int) -> torch.Tensor:
            if problem.dtype == torch.int8:
                return torch.randint(-127, 128, (rows, k), device=device, dtype=torch.int8)
            return torch.randn(rows, k, device=device).mul_(16.0).to(problem.dtype)

        def scale(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=device).add_(0.5)

        blocks = -(-k // 128)
        if problem.block_scaled:  # column by column, as the operators with ``quant`` write them
            a_scale = scale(blocks, -(-m // 4) * 4).t()[:m]
            rows = -(-problem.n_out // 128)
            b_scale = scale(2, rows, blocks) if problem.gated else scale(rows, blocks)
        else:
            a_scale, b_scale = scale(m), scale(n)
        return {
            "a": codes(m),
            "b": codes(n).t(),
            "a_scale": a_scale,
            "b_scale": b_scale,
            "c": torch.randn(m, n, device=device, dtype=problem.out_dtype) if problem.c else None,
            "d": torch.empty(m, problem.n_out, device=device, dtype=problem.out_dtype),
        }

    def launcher(self, kernel: str | None = None) -> Launcher:
        """The operator as a function of one set of operands."""
        problem = self.problem
        name = f"gemm_{'int8' if problem.dtype == torch.int8 else 'fp8'}"
        options: dict[str, Any] = {"kernel": kernel}
        if problem.dtype != torch.int8:
            options["fast_accum"] = problem.fast_accum
        if problem.gated:
            gated = getattr(ops, f"{name}_gated").default
            return lambda x: gated(x["a"], x["b"], x["a_scale"], x["b_scale"], out_dtype=problem.out_dtype, **options)
        gemm = getattr(ops, name).out
        beta = BETA if problem.c else 0.0
        return lambda x: gemm(x["a"], x["b"], x["a_scale"], x["b_scale"], c=x["c"], beta=beta, out=x["d"], **options)

    def torch_contestant(self, sets: list[Operands]) -> tuple[Launcher, list[Operands]] | None:
        """None: torch's scaled_mm does not take the operands as they are."""
        return None

    def check(self, kernel: str | None, x: Operands) -> tuple[float, float]:
        """Relative error of one launch into a NaN-filled output against the reference in float64, and the most it may be."""
        x["d"].fill_(float("nan"))
        out = self.launcher(kernel)(x)
        operands = (x["a"].double(), x["b"].double(), x["a_scale"], x["b_scale"])
        if self.problem.gated:
            truth = reference_scaled.gemm_fp8_gated(*operands, out_dtype=torch.float64)
        else:
            beta = BETA if self.problem.c else 0.0
            truth = reference_scaled.gemm_fp8(*operands, c=x["c"], beta=beta, out_dtype=torch.float64)
        return _error(out, truth, truth.to(out.dtype))


class W4A8Workload:
    """minfer::w4a8_gemm and w4a8_gemm_gated, with a scale for each row of the activations."""

    def __init__(self, problem: W4A8Problem, device: str = "cuda"):
        self.problem, self.device = problem, device

    def operands(self) -> Operands:
        """Random codes, normal of e4m3 and even of int8 and int4, scales near one; c normal; an output d."""
        problem, device = self.problem, self.device
        m, n, k = problem.m, problem.n, problem.k
        a = torch.randint(-127, 128, (m, k), device=device) if problem.dtype == torch.int8 else torch.randn(m, k, device=device).mul_(16.0)
        scales = torch.rand(weight_layout.groups(k, problem.group_size), n, device=device).add_(0.5)
        return {
            "a": a.to(problem.dtype),
            "a_scale": torch.rand(m, 1, device=device).add_(0.5),
            "qweight": ops.w4a16_pack(torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)),
            "scales": scales.to(problem.out_dtype),
            "c": torch.randn(m, n, device=device, dtype=problem.out_dtype) if problem.c else None,
            "d": torch.empty(m, problem.n_out, device=device, dtype=problem.out_dtype),
        }

    def launcher(self, kernel: str | None = None) -> Launcher:
        """The operator as a function of one set of operands."""
        options: dict[str, Any] = {"group_size": self.problem.group_size, "kernel": kernel}
        if self.problem.gated:
            gated = ops.w4a8_gemm_gated.default
            return lambda x: gated(x["a"], x["a_scale"], x["qweight"], x["scales"], **options)
        gemm = ops.w4a8_gemm.out
        return lambda x: gemm(x["a"], x["a_scale"], x["qweight"], x["scales"], c=x["c"], out=x["d"], **options)

    def torch_contestant(self, sets: list[Operands]) -> tuple[Launcher, list[Operands]] | None:
        """None: torch has no such product."""
        return None

    def check(self, kernel: str | None, x: Operands) -> tuple[float, float]:
        """Relative error of one launch into a NaN-filled output against the reference in float64, and the most it may be."""
        x["d"].fill_(float("nan"))
        out = self.launcher(kernel)(x)
        operands, options = (x["a"].double(), x["a_scale"], x["qweight"], x["scales"]), {"group_size": self.problem.group_size}
        if self.problem.gated:
            truth = reference_w4a8.w4a8_gemm_gated(*operands, **options)
        else:
            truth = reference_w4a8.w4a8_gemm(*operands, c=x["c"], **options)
        return _error(out, truth, truth.to(out.dtype))


Workload = GemmWorkload | W4Workload | ScaledWorkload | W4A8Workload


def workload(problem: Problem | W4Problem | ScaledProblem | W4A8Problem, device: str = "cuda") -> Workload:
    kinds = {W4Problem: W4Workload, ScaledProblem: ScaledWorkload, W4A8Problem: W4A8Workload}
    return kinds.get(type(problem), GemmWorkload)(problem, device)
