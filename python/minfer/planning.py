"""``minfer.plan``: what an operator would run for a problem, and why; works without a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from .registry import build_info, device_index, device_properties

DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
LAYOUTS = ("tn", "tt", "nn", "nt")


@dataclass(frozen=True)
class Problem:
    """A dense GEMM with contiguous operands: D[m, n] = A[m, k] . B[k, n], ``batch`` of them.

    ``layout``: BLAS letters of A and B. "tn" is A row-major and B column-major (``weight.t()``); A: t row-major, n column-major;
    B: n column-major, t row-major. ``n`` counts B's columns, so a gated D has n / 2.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    layout: str = "tn"
    c: bool = False
    gated: bool = False

    def __post_init__(self):
        for name in ("m", "n", "k", "batch"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {getattr(self, name)!r}")
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {self.dtype}")
        if self.out_dtype not in (None, self.dtype, torch.float32):
            raise ValueError(f"out_dtype must be {self.dtype}, torch.float32 or None, got {self.out_dtype}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.gated and self.n % 16:
            raise ValueError(f"n must be a multiple of 16 for a gated GEMM, got {self.n}")

    @property
    def a_major(self) -> str:
        return "k" if self.layout[0] == "t" else "mn"

    @property
    def b_major(self) -> str:
        return "k" if self.layout[1] == "n" else "mn"

    @property
    def n_out(self) -> int:
        return self.n // 2 if self.gated else self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch

    def __str__(self) -> str:
        text = f"{self.m} x {self.n} x {self.k} {DTYPE_NAMES[self.dtype]} {self.layout}"
        if self.batch != 1:
            text += f", batch {self.batch}"
        if self.out_dtype not in (None, self.dtype):
            text += f", D {DTYPE_NAMES[self.out_dtype]}"
        return text + (", with C" if self.c else "") + (", gated" if self.gated else "")

    def arguments(self) -> tuple[Any, ...]:
        """The leading arguments of ``_plan_gemm`` and ``_enumerate_gemm``."""
        out_type = self.out_dtype or self.dtype
        d = _row_alignment(self.m, self.n_out, out_type.itemsize)
        a = _row_alignment(*((self.m, self.k) if self.a_major == "k" else (self.k, self.m)), 2)
        b = _row_alignment(*((self.n, self.k) if self.b_major == "k" else (self.k, self.n)), 2)
        sizes = [self.m, self.n, self.k, self.batch]
        alignments = [a, b, d if self.c and d == 16 else 0, d]
        return sizes, DTYPE_NAMES[self.dtype], DTYPE_NAMES[out_type], self.a_major, self.b_major, alignments, self.c, self.gated


def _row_alignment(rows: int, columns: int, element_bytes: int) -> int:
    """Bytes, at most 16, that every row of a contiguous [rows, columns] starts at a multiple of."""
    if rows <= 1:
        return 16
    pitch = columns * element_bytes
    return min(16, pitch & -pitch) if pitch else 16


@dataclass(frozen=True)
class Plan:
    """What would run. ``str(plan)`` is the report that ``python -m minfer plan`` prints."""

    op: str
    problem: Problem
    device: str  # its name
    kernel: str
    decomposition: str  # persistent, stream_k or split_k
    splits: int
    swizzle: int
    raster: str
    workspace_bytes: int
    predicted_us: float  # of the analytic model; a tuned row's measurement
    floor_us: float  # max(bytes / read bandwidth, flops / matrix rate)
    source: str  # override, tuned or analytic
    reason: str
    compiled: bool  # whether this build can run it

    @property
    def launch(self) -> str:
        """The run-time knobs as the ``kernel=`` argument takes them."""
        return f"decomposition={self.decomposition},splits={self.splits},swizzle={self.swizzle},raster={self.raster}"

    @property
    def override(self) -> str:
        """A ``kernel=`` argument that runs exactly this."""
        return f"{self.kernel}@{self.launch}"

    @classmethod
    def parse(cls, problem: Problem, device: str, fields: dict[str, Any], op: str = "gemm") -> Plan:
        fields = dict(fields)
        return cls(op=op, problem=problem, device=device, **fields.pop("launch"), **fields)

    def __str__(self) -> str:
        ratio = f", {100 * self.floor_us / self.predicted_us:.0f} % of it reached" if self.predicted_us > 0 else ""
        runnable = "" if self.compiled else "  (not in this build: not runnable)"
        return "\n".join(
            (
                f"{self.op}  {self.problem}  on {self.device}",
                f"  kernel     {self.kernel}{runnable}",
                f"  launch     {self.launch}",
                f"  workspace  {self.workspace_bytes} bytes",
                f"  predicted  {self.predicted_us:.2f} us, floor {self.floor_us:.2f} us{ratio}",
                f"  why        {self.source}: {self.reason}",
            )
        )


def _device(device: torch.device | int | str | None) -> tuple[int, str]:
    index = device_index(device)
    return index, device_properties(index)["name"] + (" (as measured; no GPU here)" if index < 0 else "")


def plan_problem(
    problem: Problem,
    *,
    kernel: str | None = None,
    use_tuned: bool = True,
    device: torch.device | int | str | None = None,
    only_runnable: bool | None = None,
) -> Plan:
    """:func:`plan` for a :class:`Problem`."""
    index, name = _device(device)
    if only_runnable is None:
        only_runnable = index >= 0
    return Plan.parse(problem, name, json.loads(torch.ops.minfer._plan_gemm(*problem.arguments(), kernel, use_tuned, only_runnable, index)))


def enumerate_plans(
    problem: Problem, *, limit: int = 1 << 20, device: torch.device | int | str | None = None, only_runnable: bool | None = None
) -> list[Plan]:
    """Every legal kernel and launch configuration, best predicted first."""
    index, name = _device(device)
    if only_runnable is None:
        only_runnable = index >= 0
    found = json.loads(torch.ops.minfer._enumerate_gemm(*problem.arguments(), only_runnable, index, limit))
    return [Plan.parse(problem, name, fields) for fields in found]


def plan(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    layout: str = "tn",
    batch: int = 1,
    c: bool = False,
    gated: bool = False,
    kernel: str | None = None,
    use_tuned: bool = True,
    device: torch.device | int | str | None = None,
) -> Plan:
    """What ``op`` would run for contiguous operands: the explicit kernel, else a tuned row, else the analytic model's choice.

    Args:
      op: "gemm".
      m, n, k, batch: sizes; n counts B's columns, also of a gated GEMM.
      dtype: of A and B, torch.float16 or torch.bfloat16.
      out_dtype: of D; dtype (default) or torch.float32.
      layout: "tn" (A row-major, B column-major: ``weight.t()``), "tt", "nn" or "nt".
      c: whether there is a C that is read. gated: whether it is ``gemm_gated``.
      kernel: an override, as the operator's ``kernel=``.
      use_tuned: False asks the analytic model alone.
      device: CUDA device or index. None: the current one, or the H200 as measured where there is none (or the build has no CUDA);
        the plan may then name kernels that this build did not compile (``compiled`` says so).

    Returns:
      A :class:`Plan`; ``print`` it.

    Raises:
      ValueError: an argument cannot be right. RuntimeError: the override names no legal kernel.
    """
    if op != "gemm":
        raise ValueError(f"op must be 'gemm', got {op!r}")
    problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, out_dtype=out_dtype, layout=layout, c=c, gated=gated)
    return plan_problem(problem, kernel=kernel, use_tuned=use_tuned, device=device)


def runs_here() -> bool:
    """Whether this build has CUDA kernels and there is a GPU to run them on."""
    return build_info()["kernels_compiled"] > 0 and torch.cuda.is_available()
