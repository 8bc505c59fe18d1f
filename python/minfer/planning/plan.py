"""``minfer.plan``: what an operator would run for a problem, and why; works without a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from .._core.batch_invariance import batch_invariant as in_mode, is_batch_invariant
from .._core.namespace import ops
from .._core.registry import build_info, device_index, device_properties, kernel_names, kernels
from ..checks.common import DTYPES, ValueChecker, is_integer
from ..checks.quantized_scaled_gemm import K_MULTIPLE, LEAST_GROUP, legal_group_size
from ..formats import weight_formats, weight_layout
from ..formats.gate_up import GATE_BLOCK

DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
NARROW_NAMES = {torch.float8_e4m3fn: "e4m3", torch.int8: "s8"}  # of operands that have scales
LAYOUTS = ("tn", "tt", "nn", "nt")
MAX_EXTENT = 2**31 - 512  # of m, n, k and batch: the library's kMaxExtent


def _checker_of(problem: AnyProblem | NormProblem | _AnyBlockProblem, *names: str) -> ValueChecker:
    """After what all kinds check: the sizes of these names, the dtype, and n and C where the product is gated."""
    check = ValueChecker(problem.op)
    for name in names:
        value = getattr(problem, name)
        check(is_integer(value) and value >= 0, "{} must be an integer >= 0, got {}", name, value)
        check(value <= MAX_EXTENT, "{} must be at most {}, got {}", name, MAX_EXTENT, value)
    if isinstance(problem, (ScaledProblem, W4A8Problem)):
        check(problem.dtype in NARROW_NAMES, "dtype must be float8_e4m3fn or int8, got {}", problem.dtype)
    else:
        check(problem.dtype in DTYPES, "dtype must be float16 or bfloat16, got {}", problem.dtype)
    unit = 2 * GATE_BLOCK
    check(not problem.gated or problem.n % unit == 0, "n must be a multiple of {} for a gated GEMM, got {}", unit, problem.n)
    check(not (problem.gated and problem.c), "c must be False for a gated GEMM, which has no C, got True")
    return check


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

    op: ClassVar[str] = "gemm"
    family: ClassVar[str] = "gemm"
    planner: ClassVar[str] = "gemm"
    b_format: ClassVar[str] = "dense"  # what a quantised B would say, for tables that hold both
    group_size: ClassVar[int] = 0
    zeros: ClassVar[bool] = False

    def __post_init__(self):
        check = _checker_of(self, "m", "n", "k", "batch")
        good = self.out_dtype in (None, self.dtype, torch.float32)
        check(good, "out_dtype must be {}, float32 or None, got {}", self.dtype, self.out_dtype)
        good = not self.gated or self.out_dtype in (None, self.dtype)
        check(good, "out_dtype must be {} or None for a gated GEMM, got {}", self.dtype, self.out_dtype)
        check(self.layout in LAYOUTS, "layout must be one of {}, got '{}'", ", ".join(LAYOUTS), self.layout)

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


@dataclass(frozen=True)
class W4Problem:
    """A product with a 4-bit or 8-bit weight, contiguous: D[m, n] = A[m, k] . W[n, k]^T, W in a format of
    :mod:`minfer.formats.weight_formats`.

    ``group_size``: columns of W that share a scale, -1 (all), a power of two >= 32, or what the format prescribes; one that covers k
    becomes -1. ``zeros``: whether there are zero points. ``n`` counts W's rows, so a gated D has n / 2.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    group_size: int = 128
    zeros: bool = False
    w4_format: str = "int4"
    c: bool = False
    gated: bool = False

    op: ClassVar[str] = "w4a16_gemm"
    family: ClassVar[str] = "w4a16"
    planner: ClassVar[str] = "w4a16"
    batch: ClassVar[int] = 1
    out_dtype: ClassVar[torch.dtype | None] = None
    a_major: ClassVar[str] = "k"
    b_major: ClassVar[str] = "k"

    def __post_init__(self):
        check, unit = _checker_of(self, "m", "n", "k"), weight_layout.MULTIPLE
        for name in ("n", "k"):
            check(getattr(self, name) % unit == 0, "{} must be a multiple of {}, got {}", name, unit, getattr(self, name))
        names = tuple(weight_formats.FORMATS)
        check(self.w4_format in names, "w4_format must be one of {}, got '{}'", ", ".join(names), self.w4_format)
        size, form = self.group_size, weight_formats.FORMATS[self.w4_format]
        legal = weight_formats.legal_group_size(self.w4_format, size)
        check(legal, "group_size must be {}, got {}", weight_formats.group_size_rule(self.w4_format), size)
        check(not self.zeros or form.zero is not None, "zeros must be False for {}, which has no zero points, got True", self.w4_format)
        if size >= self.k:
            object.__setattr__(self, "group_size", -1)

    @property
    def b_format(self) -> str:
        return self.w4_format

    @property
    def n_out(self) -> int:
        return self.n // 2 if self.gated else self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        groups = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
        text = f"{self.m} x {self.n} x {self.k} {DTYPE_NAMES[self.dtype]} {self.w4_format}, {groups}"
        return text + (", zero points" if self.zeros else "") + (", with C" if self.c else "") + (", gated" if self.gated else "")

    def arguments(self) -> tuple[Any, ...]:
        """The leading arguments of ``_plan_w4a16`` and ``_enumerate_w4a16``."""
        sizes = [self.m, self.n, self.k]
        return sizes, DTYPE_NAMES[self.dtype], self.w4_format, self.group_size, self.zeros, self.c, self.gated


@dataclass(frozen=True)
class ScaledProblem:
    """A product of 8-bit operands with scales, contiguous: D[m, n] = A[m, k] . W[n, k]^T. ``n`` counts W's rows, so a gated D has n / 2.

    ``block_scaled``: whether there is a scale for each 128 of k, of A or of W.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype = torch.bfloat16
    block_scaled: bool = False
    fast_accum: bool = False
    c: bool = False
    gated: bool = False

    op: ClassVar[str] = "scaled_gemm"
    family: ClassVar[str] = "scaled_gemm"
    planner: ClassVar[str] = "scaled_gemm"
    b_format: ClassVar[str] = "dense"
    group_size: ClassVar[int] = 0
    zeros: ClassVar[bool] = False
    batch: ClassVar[int] = 1
    a_major: ClassVar[str] = "k"
    b_major: ClassVar[str] = "k"

    def __post_init__(self):
        check = _checker_of(self, "m", "n", "k")
        good = self.out_dtype in (*DTYPES, torch.float32)
        check(good, "out_dtype must be float16, bfloat16 or float32, got {}", self.out_dtype)
        e4m3 = self.dtype == torch.float8_e4m3fn
        for name in ("block_scaled", "fast_accum"):
            check(e4m3 or not getattr(self, name), "{} must be False for {}, got True", name, self.dtype)

    @property
    def n_out(self) -> int:
        return self.n // 2 if self.gated else self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        text = f"{self.m} x {self.n} x {self.k} {NARROW_NAMES[self.dtype]}, D {DTYPE_NAMES[self.out_dtype]}"
        text += (", block scales" if self.block_scaled else "") + (", fast accumulation" if self.fast_accum else "")
        return text + (", with C" if self.c else "") + (", gated" if self.gated else "")

    def arguments(self) -> tuple[Any, ...]:
        """The leading arguments of ``_plan_scaled_gemm`` and ``_enumerate_scaled_gemm``. Operands that TMA cannot read are copied by the
        operator."""
        d = _row_alignment(self.m, self.n_out, self.out_dtype.itemsize)
        sizes, alignments = [self.m, self.n, self.k], [d if self.c and d == 16 else 0, d]
        types = NARROW_NAMES[self.dtype], DTYPE_NAMES[self.out_dtype]
        return sizes, *types, alignments, self.block_scaled, self.fast_accum, self.c, self.gated


@dataclass(frozen=True)
class W4A8Problem:
    """A product of 8-bit activations with an int4 weight, contiguous: D[m, n] = A[m, k] . W[n, k]^T, D in 16 bits.

    ``group_size``: columns of W that share a scale, -1 (all) or a power of two >= 128; one that covers k becomes -1. ``n`` counts W's rows,
    so a gated D has n / 2.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.float8_e4m3fn
    group_size: int = 128
    c: bool = False
    gated: bool = False

    op: ClassVar[str] = "w4a8_gemm"
    family: ClassVar[str] = "w4a8"
    planner: ClassVar[str] = "w4a16"
    w4_format: ClassVar[str] = "int4"
    b_format: ClassVar[str] = "int4"
    zeros: ClassVar[bool] = False
    batch: ClassVar[int] = 1
    out_dtype: ClassVar[torch.dtype] = torch.bfloat16
    a_major: ClassVar[str] = "k"
    b_major: ClassVar[str] = "k"

    def __post_init__(self):
        check = _checker_of(self, "m", "n", "k")
        for name, unit in (("n", weight_layout.MULTIPLE), ("k", K_MULTIPLE)):
            check(getattr(self, name) % unit == 0, "{} must be a multiple of {}, got {}", name, unit, getattr(self, name))
        text = "group_size must be -1 or a power of two >= {}, got {}"
        check(legal_group_size(self.group_size), text, LEAST_GROUP, self.group_size)
        if self.group_size >= self.k:
            object.__setattr__(self, "group_size", -1)

    @property
    def n_out(self) -> int:
        return self.n // 2 if self.gated else self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        groups = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
        text = f"{self.m} x {self.n} x {self.k} {NARROW_NAMES[self.dtype]} int4, {groups}"
        return text + (", with C" if self.c else "") + (", gated" if self.gated else "")

    def arguments(self) -> tuple[Any, ...]:
        """The leading arguments of ``_plan_w4a16`` and ``_enumerate_w4a16``."""
        return [self.m, self.n, self.k], NARROW_NAMES[self.dtype], "int4", self.group_size, False, self.c, self.gated


AnyProblem = Problem | W4Problem | ScaledProblem | W4A8Problem
Kind = type[Problem] | type[W4Problem] | type[ScaledProblem] | type[W4A8Problem]
PROBLEMS: dict[str, Kind] = {kind.op: kind for kind in (Problem, W4Problem, ScaledProblem, W4A8Problem)}


def _row_alignment(rows: int, columns: int, element_bytes: int) -> int:
    """Bytes, at most 16, that every row of a contiguous [rows, columns] starts at a multiple of."""
    if rows <= 1:
        return 16
    pitch = columns * element_bytes
    return min(16, pitch & -pitch) if pitch else 16


@dataclass(frozen=True)
class Plan:
    """What would run. ``str(plan)`` is the report that ``python -m minfer plan`` prints."""

    problem: AnyProblem
    device: str  # its name
    kernel: str
    decomposition: str  # persistent, stream_k, split_k or ranges
    splits: int
    swizzle: int
    raster: str
    columns: int  # of a tile, where launches choose them; else 0
    realign_a: bool  # whether A is copied first, into K-major, 16-byte aligned rows
    realign_b: bool
    workspace_bytes: int
    predicted_us: float  # of the analytic model; a tuned row's measurement
    floor_us: float  # max(bytes / read bandwidth, flops / matrix rate)
    source: str  # override, tuned or analytic
    reason: str
    compiled: bool  # whether this build can run it
    batch_invariant: bool = False
    default_us: float = 0.0  # batch_invariant: predicted_us of the plan outside of the mode

    @property
    def op(self) -> str:
        return self.problem.op

    @property
    def cost(self) -> float:
        """What the batch-invariant mode costs: predicted_us over that of the plan outside of it, 1.03 for 3 %; 1 outside of it."""
        return self.predicted_us / self.default_us if self.batch_invariant and self.default_us > 0 else 1.0

    @property
    def launch(self) -> str:
        """The run-time knobs as the ``kernel=`` argument takes them."""
        text = f"decomposition={self.decomposition},splits={self.splits},swizzle={self.swizzle},raster={self.raster}"
        text += f",columns={self.columns}" if self.columns else ""
        return text + "".join(f",{name}=1" for name in ("realign_a", "realign_b") if getattr(self, name))

    @property
    def override(self) -> str:
        """A ``kernel=`` argument that runs exactly this."""
        return f"{self.kernel}@{self.launch}"

    @classmethod
    def parse(cls, problem: AnyProblem, device: str, found: dict[str, Any]) -> Plan:
        found = dict(found)
        return cls(problem=problem, device=device, **found.pop("launch"), **found)

    def __str__(self) -> str:
        ratio = f", {100 * self.floor_us / self.predicted_us:.0f} % of it reached" if self.predicted_us > 0 else ""
        runnable = "" if self.compiled else "  (not in this build: not runnable)"
        mode = (f"  mode       batch-invariant: {self.cost:.2f} times the {self.default_us:.2f} us outside of it",)
        return "\n".join(
            (
                f"{self.op}  {self.problem}  on {self.device}",
                f"  kernel     {self.kernel}{runnable}",
                f"  launch     {self.launch}",
                f"  workspace  {self.workspace_bytes} bytes",
                f"  predicted  {self.predicted_us:.2f} us, floor {self.floor_us:.2f} us{ratio}",
                *(mode if self.batch_invariant else ()),
                f"  why        {self.source}: {self.reason}",
            )
        )


def _device(device: torch.device | int | str | None) -> tuple[int, str]:
    index = device_index(device)
    return index, device_properties(index)["name"] + (" (as measured; no GPU here)" if index < 0 else "")


def plan_problem(
    problem: AnyProblem,
    *,
    kernel: str | None = None,
    use_tuned: bool = True,
    device: torch.device | int | str | None = None,
    only_runnable: bool | None = None,
    batch_invariant: bool | None = None,
) -> Plan:
    """:func:`plan` for a problem.

    batch_invariant: among the launches that sum a row of D in an order over k which follows from n, k and the types. Rows have the same
    bits then in problems of every m; tuned rows are not asked.
    """
    if batch_invariant is None:
        batch_invariant = is_batch_invariant()
    index, name = _device(device)
    if only_runnable is None:
        only_runnable = index >= 0
    planner = getattr(ops, f"_plan_{problem.planner}")

    def found(mode: bool) -> dict[str, Any]:
        return json.loads(planner(*problem.arguments(), kernel, use_tuned, only_runnable, index, mode))

    plan = Plan.parse(problem, name, found(batch_invariant))
    return replace(plan, batch_invariant=True, default_us=found(False)["predicted_us"]) if batch_invariant else plan


def enumerate_plans(
    problem: AnyProblem,
    *,
    limit: int = 1 << 20,
    device: torch.device | int | str | None = None,
    only_runnable: bool | None = None,
    batch_invariant: bool = False,
) -> list[Plan]:
    """Every legal kernel and launch configuration, best predicted first; ``batch_invariant``: those that the mode chooses among."""
    index, name = _device(device)
    if only_runnable is None:
        only_runnable = index >= 0
    planner = getattr(ops, f"_enumerate_{problem.planner}")
    found = json.loads(planner(*problem.arguments(), only_runnable, index, limit, batch_invariant))
    return [Plan.parse(problem, name, plan) for plan in found]


@dataclass(frozen=True)
class NormProblem:
    """rms_norm_gemm or rms_norm_gemm_gated with contiguous operands and B = ``weight.t()``. ``n`` counts B's columns, so a gated D has
    n / 2; ``residual``: whether there is one; ``constant_weights``: as in :func:`minfer.rms_norm_gemm`."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    gated: bool = False
    residual: bool = False
    constant_weights: bool = False

    op: ClassVar[str] = "rms_norm_gemm"
    c: ClassVar[bool] = False

    def __post_init__(self):
        _checker_of(self, "m", "n", "k")

    @property
    def product(self) -> Problem:
        """Of the second of two launches."""
        return Problem(m=self.m, n=self.n, k=self.k, dtype=self.dtype, gated=self.gated)

    def __str__(self) -> str:
        text = f"{self.m} x {self.n} x {self.k} {DTYPE_NAMES[self.dtype]}"
        more = {", with a residual": self.residual, ", gated": self.gated, ", constant weights": self.constant_weights}
        return text + "".join(words for words, said in more.items() if said)


@dataclass(frozen=True)
class NormPlan:
    """Whether a norm and its GEMM are one launch or two. ``str(plan)`` is a report."""

    problem: NormProblem
    device: str  # its name
    launches: int
    kernel: str  # of one launch; else ""
    ctas: int  # of one launch
    smem_bytes: int  # of a CTA
    workspace_bytes: int
    source: str  # override or analytic
    reason: str
    compiled: bool  # whether this build can run it
    product: Plan | None  # of two launches

    def __str__(self) -> str:
        lines = [f"{self.problem.op}  {self.problem}  on {self.device}"]
        if self.product is None:
            runnable = "" if self.compiled else "  (not in this build: not runnable)"
            lines += [f"  1 launch   {self.kernel}{runnable}", f"  CTAs       {self.ctas} of {self.smem_bytes} bytes of shared memory"]
            lines.append(f"  workspace  {self.workspace_bytes} bytes")
        else:
            lines += ["  2 launches the norm, then", *str(self.product).splitlines()[1:]]
        return "\n".join([*lines, f"  because    {self.source}: {self.reason}"])


def plan_norm(
    problem: NormProblem,
    *,
    kernel: str | None = None,
    use_tuned: bool = True,
    device: torch.device | int | str | None = None,
    batch_invariant: bool | None = None,
) -> NormPlan:
    """:func:`plan` of a norm and the GEMM behind it."""
    if batch_invariant is not None and batch_invariant != is_batch_invariant():
        with in_mode(batch_invariant):
            return plan_norm(problem, kernel=kernel, use_tuned=use_tuned, device=device)
    index, name = _device(device)
    sizes = [problem.m, problem.n, problem.k]
    options = (DTYPE_NAMES[problem.dtype], problem.gated, problem.residual, problem.constant_weights, kernel, index >= 0, index)
    found = json.loads(ops._plan_norm_gemm(sizes, *options))
    product, compiled = None, None
    if found["launches"] == 2:
        own = kernel if kernel in kernel_names("gemm") or (kernel is not None and "@" in kernel) else None
        product = plan_problem(problem.product, kernel=own, use_tuned=use_tuned, device=device)
        compiled = product.compiled
    else:
        compiled = next(row["compiled"] for row in kernels("norm_gemm") if row["name"] == found["kernel"])
    return NormPlan(problem=problem, device=name, product=product, compiled=compiled, **found)


@dataclass(frozen=True)
class DecoderBlockProblem:
    """w4a16_decoder_block of contiguous operands: ``k`` columns of the residual, ``n`` of the result, ``attention`` of a (None: k),
    ``inter`` of the MLP's activations. ``group_size``: columns of all weights that share a scale, -1 (all) or a power of two >= 32."""

    m: int
    n: int
    k: int
    inter: int
    attention: int | None = None
    dtype: torch.dtype = torch.bfloat16
    group_size: int = 128

    op: ClassVar[str] = "w4a16_decoder_block"
    gated: ClassVar[bool] = False
    c: ClassVar[bool] = False

    def __post_init__(self):
        check = _check_block_sizes(self)
        good = self.group_size == -1 or (self.group_size >= 32 and self.group_size & (self.group_size - 1) == 0)
        check(good, "group_size must be -1 or a power of two >= 32, got {}", self.group_size)

    def __str__(self) -> str:
        return _block_sizes(self) + ("one group" if self.group_size == -1 else f"groups of {self.group_size}")

    def weights(self) -> tuple[str, int]:
        """As ``_plan_decoder_block`` takes them."""
        return "int4", self.group_size


@dataclass(frozen=True)
class Fp8DecoderBlockProblem:
    """fp8_decoder_block, otherwise as :class:`DecoderBlockProblem`. ``block_scaled``: the scales are of blocks of 128 x 128."""

    m: int
    n: int
    k: int
    inter: int
    attention: int | None = None
    dtype: torch.dtype = torch.bfloat16
    block_scaled: bool = False

    op: ClassVar[str] = "fp8_decoder_block"
    gated: ClassVar[bool] = False
    c: ClassVar[bool] = False

    def __post_init__(self):
        _check_block_sizes(self)

    def __str__(self) -> str:
        return _block_sizes(self) + ("scales of blocks" if self.block_scaled else "scales of rows")

    def weights(self) -> tuple[str, int]:
        """As ``_plan_decoder_block`` takes them."""
        return "blocks" if self.block_scaled else "rows", -1


@dataclass(frozen=True)
class DenseDecoderBlockProblem:
    """decoder_block, otherwise as :class:`DecoderBlockProblem`."""

    m: int
    n: int
    k: int
    inter: int
    attention: int | None = None
    dtype: torch.dtype = torch.bfloat16

    op: ClassVar[str] = "decoder_block"
    gated: ClassVar[bool] = False
    c: ClassVar[bool] = False

    def __post_init__(self):
        _check_block_sizes(self)

    def __str__(self) -> str:
        return _block_sizes(self).removesuffix(", ")

    def weights(self) -> tuple[str, int]:
        """As ``_plan_decoder_block`` takes them."""
        return "dense", -1


_AnyBlockProblem = DecoderBlockProblem | Fp8DecoderBlockProblem | DenseDecoderBlockProblem


def _check_block_sizes(problem: _AnyBlockProblem) -> ValueChecker:
    if problem.attention is None:
        object.__setattr__(problem, "attention", problem.k)
    check, unit = _checker_of(problem, "m", "n", "k", "inter", "attention"), weight_layout.MULTIPLE
    for name in ("n", "k", "inter", "attention"):
        check(getattr(problem, name) % unit == 0, "{} must be a multiple of {}, got {}", name, unit, getattr(problem, name))
    return check


def _block_sizes(problem: _AnyBlockProblem) -> str:
    return f"{problem.m} x ({problem.attention}, {problem.k}, {problem.inter}, {problem.n}) {DTYPE_NAMES[problem.dtype]}, "


@dataclass(frozen=True)
class DecoderBlockPlan:
    """Whether a decoder block is one launch. ``str(plan)`` is a report."""

    problem: _AnyBlockProblem
    device: str  # its name
    one_launch: bool
    ctas: int  # of one launch, all of which are resident together
    stages: int  # of the ring of weights in shared memory
    ahead: int  # stages that are under way at a time
    smem_bytes: int  # of a CTA
    workspace_bytes: int
    reason: str

    def __str__(self) -> str:
        lines = [f"{self.problem.op}  {self.problem}  on {self.device}"]
        if self.one_launch:
            lines += ["  1 launch", f"  CTAs       {self.ctas} of {self.smem_bytes} bytes of shared memory"]
            lines += [f"  ring       {self.stages} stages, {self.ahead} under way", f"  workspace  {self.workspace_bytes} bytes"]
        else:
            lines.append("  separate   the operators one after the other")
        return "\n".join([*lines, f"  because    {self.reason}"])


def plan_decoder_block(
    problem: _AnyBlockProblem,
    *,
    kernel: str | None = None,
    device: torch.device | int | str | None = None,
    batch_invariant: bool | None = None,
) -> DecoderBlockPlan:
    """:func:`plan` of a decoder block."""
    if batch_invariant is not None and batch_invariant != is_batch_invariant():
        with in_mode(batch_invariant):
            return plan_decoder_block(problem, kernel=kernel, device=device)
    if kernel not in (None, "one_launch", "separate"):
        raise ValueError(f"{problem.op}: kernel must be one_launch or separate, got {kernel!r}")
    index, name = _device(device)
    if kernel == "separate":
        nothing = dict.fromkeys(("ctas", "stages", "ahead", "smem_bytes", "workspace_bytes"), 0)
        return DecoderBlockPlan(problem=problem, device=name, one_launch=False, reason="asked for by name", **nothing)
    sizes = [problem.m, problem.attention, problem.k, problem.inter, problem.n]
    found = json.loads(ops._plan_decoder_block(sizes, DTYPE_NAMES[problem.dtype], *problem.weights(), kernel is not None, index))
    del found["most_layers"]  # of launches that have attention, too
    return DecoderBlockPlan(problem=problem, device=name, **found)


def plan(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    use_tuned: bool = True,
    device: torch.device | int | str | None = None,
    batch_invariant: bool | None = None,
    **options: Any,
) -> Plan | NormPlan | DecoderBlockPlan:
    """What ``op`` would run for contiguous operands: the explicit kernel, else a tuned row, else the analytic model's choice.

    Args:
      op: "gemm", "w4a16_gemm", "w4a8_gemm", "rms_norm_gemm", "decoder_block", "w4a16_decoder_block", "fp8_decoder_block", or "scaled_gemm"
        for what gemm_fp8 and gemm_int8 would run.
      m, n, k: sizes; n counts B's columns (the weight's rows), also of a gated GEMM.
      dtype: of A, D and what B stands for: torch.float16 or torch.bfloat16 (the default). Of scaled_gemm: of A and B, of w4a8_gemm: of A,
        torch.float8_e4m3fn (the default) or torch.int8.
      kernel: an override, as the operator's ``kernel=``.
      use_tuned: False asks the analytic model alone.
      device: CUDA device or its index. -1: the H200 as measured. None: the current device, or the H200 as measured where there is none
        (or the build has no CUDA). For the H200 as measured the plan may name kernels that this build did not compile (``compiled``
        says so).
      batch_invariant: whether in the batch-invariant mode (:class:`minfer.batch_invariant`); None: as calls are now. Such a plan's ``cost``
        is its predicted time over that outside of the mode.
      options: of both: ``c`` (there is a C that is read) or ``gated``, which has no C.
        Of gemm: ``batch``; ``layout``, "tn" (A row-major, B column-major: ``weight.t()``, the default), "tt", "nn" or "nt"; ``out_dtype``
        of D, dtype or, where it is not gated, torch.float32.
        Of w4a16_gemm: ``group_size`` (128; -1: all of k; "mxfp4" and "nvfp4" have one size each), ``zeros`` (there are zero points),
        ``w4_format``: "int4" (the default), "nf4", "mxfp4" or "nvfp4", and, for what w8a16_gemm would run, "int8" or "fp8_e4m3".
        Of w4a8_gemm: ``group_size`` (128; -1: all of k).
        Of rms_norm_gemm: ``gated``, ``residual`` (there is one), and ``constant_weights`` (no launch that still runs writes B).
        Of w4a16_decoder_block, without ``c`` and ``gated``: n are the columns of the result, k of the residual; ``inter`` of the MLP's
        activations; ``attention`` of a (default: k); ``group_size``. Of fp8_decoder_block likewise, with ``block_scaled`` (scales are of
        blocks of 128 x 128) in place of the group size, and of decoder_block with neither.
        Of scaled_gemm: ``out_dtype`` of D, torch.bfloat16 (the default), torch.float16 or torch.float32; ``block_scaled`` (of A or B there
        is a scale for each 128 of k) and ``fast_accum``, both of float8_e4m3fn.

    Returns:
      A :class:`Plan`, of rms_norm_gemm a :class:`NormPlan`, of decoder blocks a :class:`DecoderBlockPlan`; ``print`` it.

    Raises:
      ValueError: an argument cannot be right. RuntimeError: the override names no legal kernel, or no kernel takes so large a product.
    """
    kinds = PROBLEMS | {kind.op: kind for kind in (NormProblem, DenseDecoderBlockProblem, DecoderBlockProblem, Fp8DecoderBlockProblem)}
    if op not in kinds:
        raise ValueError(f"op must be one of {', '.join(kinds)}, got {op!r}")
    known = [field.name for field in fields(kinds[op])]
    for name in options:
        if name not in known:
            raise ValueError(f"{op} has no {name}; its options are {', '.join(known)}")
    problem = kinds[op](m=m, n=n, k=k, **({} if dtype is None else {"dtype": dtype}), **options)
    if isinstance(problem, _AnyBlockProblem):
        return plan_decoder_block(problem, kernel=kernel, device=device, batch_invariant=batch_invariant)
    if isinstance(problem, NormProblem):
        return plan_norm(problem, kernel=kernel, use_tuned=use_tuned, device=device, batch_invariant=batch_invariant)
    return plan_problem(problem, kernel=kernel, use_tuned=use_tuned, device=device, batch_invariant=batch_invariant)


def runs_here() -> bool:
    """Whether this build has CUDA kernels and there is a GPU to run them on."""
    return build_info()["kernels_compiled"] > 0 and torch.cuda.is_available()
