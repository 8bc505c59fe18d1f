"""Command line: ``python -m minfer info | doctor | plan | tune | demo | generate | bench-model | report``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from .._core.batch_invariance import is_batch_invariant
from .._core.namespace import ops
from .._core.registry import build_info, device_properties, kernels
from ..formats import weight_formats
from ..measure import shapes
from ..planning import calibrate, plan as planning, tune as tuner, tuned
from ..planning.plan import Problem, W4Problem
from . import demo, doctor, models as model_commands
from .demo import table as demo_table

app = typer.Typer(
    help="Operators for LLM inference: what is built, what would run, what is fastest.", no_args_is_help=True, add_completion=False
)
plan_app = typer.Typer(help="What an operator would run for a problem, and why. Works without a GPU.", no_args_is_help=True)
tune_app = typer.Typer(help="Measure kernels and launch configurations on the present GPU.", no_args_is_help=True)
app.add_typer(plan_app, name="plan")
app.add_typer(tune_app, name="tune")

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


class Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    f16 = "f16"

    @property
    def torch(self) -> torch.dtype:
        return torch.bfloat16 if self is Dtype.bf16 else torch.float16


class Layout(str, Enum):
    tn = "tn"
    tt = "tt"
    nn = "nn"
    nt = "nt"


W4Format = Enum("W4Format", {name: name for name in weight_formats.names(4)}, type=str)


M = Annotated[int, typer.Option("--m", min=0, help="Rows of A and D: tokens.")]
N = Annotated[int, typer.Option("--n", min=0, help="Columns of B, or rows of a quantised weight; with --gated, gate and up together.")]
K = Annotated[int, typer.Option("--k", min=0, help="The dimension that is summed over.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Element type of A and D, and of B unless it is quantised.")]
LayoutOption = Annotated[Layout, typer.Option("--layout", help="Layouts of A and B; tn: A is row-major, B column-major, as weight.t() is.")]
BatchOption = Annotated[int, typer.Option("--batch", min=0, help="Number of products in a batched GEMM.")]
COption = Annotated[bool, typer.Option("--c", help="C is read (beta is not 0); not with --gated.")]
GatedOption = Annotated[bool, typer.Option("--gated", help="The gated form of the operator, which has no C.")]
GroupOption = Annotated[
    int | None,
    typer.Option("--group-size", help="Columns of the weight that share a scale; -1: all. Default: the format's, or 128."),
]
ZerosOption = Annotated[bool, typer.Option("--zeros", help="The weight has zero points.")]
FormatOption = Annotated[W4Format, typer.Option("--format", help="Weight format.")]
KernelOption = Annotated[
    str | None, typer.Option("--kernel", help="Kernel to plan with: NAME or NAME@decomposition=...,splits=...; for w4a16 also dequantize.")
]
AllPlansOption = Annotated[bool, typer.Option("--all", help="List all legal kernels and launch configurations, by predicted time.")]

ShapesOption = Annotated[str | None, typer.Option("--shapes", help="Comma-separated shapes MxNxK; dense GEMM also takes MxNxKxBATCH.")]
ShapesFileOption = Annotated[
    Path | None, typer.Option("--shapes-file", help="File with one shape a line; # begins a comment.", exists=True)
]
TopOption = Annotated[int, typer.Option("--top", min=1, help="Candidates to measure, by predicted time.")]
EverythingOption = Annotated[bool, typer.Option("--all", help="Measure all legal candidates.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Table that the rows are merged into. Default: the user's table.")]
InvariantOption = Annotated[bool, typer.Option("--batch-invariant", help="Plan as in the batch-invariant mode.")]
ReportOption = Annotated[bool, typer.Option("--report", help="Measure and report the regret of the analytic plan, but write no rows.")]
DumpOption = Annotated[Path | None, typer.Option("--dump", help="JSON file for all measurements.")]
SkipKnownOption = Annotated[bool, typer.Option("--skip-known", help="Skip problems that the table already has rows for.")]
MinutesOption = Annotated[float | None, typer.Option("--minutes", help="Start no further problem after this many minutes.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=3, help="Interleaved rounds in which the finalists are timed.")]
TorchOption = Annotated[bool, typer.Option("--torch", help="Also time torch (cuBLAS with 16-bit weights), interleaved with the finalists.")]


def _stop(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {message}", markup=False)
    return typer.Exit(1)


# ---- info -----------------------------------------------------------------------------------------------------------------------


def _columns(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command()
def info(list_kernels: Annotated[bool, typer.Option("--kernels", help="List every kernel configuration.")] = False) -> None:
    """What is built, and what it runs on."""
    build = build_info()
    _columns(
        f"minfer {build['version']}",
        [
            ("CUDA", "yes" if build["cuda"] else "no: CPU kernels only; plans can be read, not run"),
            ("architectures", build["archs"] or "none"),
            ("kernels", f"{build['kernels_compiled']} compiled of {build['kernels_total']}"),
            ("CUTLASS", build["cutlass"] or "not used"),
            ("stable-ABI target", f"torch {build['stable_abi_target']}"),
        ],
    )
    rows = [("torch", torch.__version__ + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU only"))]
    if planning.runs_here():
        tuned.load_user_tables()
        for i in range(torch.cuda.device_count()):
            p, path = device_properties(i), tuned.user_table(torch.cuda.get_device_name(i))
            rows.append((f"device {i}", f"{p['name']}, compute capability {p['compute_major']}.{p['compute_minor']}, {p['sm_count']} SMs"))
            rows.append(("  plan table", _plan_table(p, i, str(path) if path.exists() else f"no {path}")))
    else:
        rows.append(("device", "no GPU that this build has kernels for; plans are made for the built-in H200"))
        rows.append(("  plan table", _plan_table(device_properties(), None, f"none in {tuned.cache_folder()}")))
    console.print()
    _columns("run time", rows)
    if list_kernels:
        console.print()
        table = Table("kernel", "threads", "stages", "shared memory", "compiled", "note", box=None, pad_edge=False)
        for kernel in kernels():
            table.add_row(
                kernel["name"],
                str(kernel["threads"]),
                str(kernel["stages"]),
                str(kernel["smem_bytes"]),
                "yes" if kernel["compiled"] else "no",
                kernel["note"],
            )
        console.print(table)


def _plan_table(properties: dict[str, Any], device: int | None, where: str) -> str:
    tables = f"{properties['shipped_rows']} shipped rows, {tuned.user_rows(device)} user rows ({where})"
    return f"{properties['name']}: {tables}, then the model"


@app.command("doctor")
def run_doctor() -> None:
    """What of minfer is active in the engines that are installed, and why the rest is not. It imports them, which takes seconds."""
    for title, rows in doctor.findings():
        _columns(title, rows)
        console.print()


# ---- plan -----------------------------------------------------------------------------------------------------------------------


@plan_app.callback()
def _plan() -> None:
    pass


@plan_app.command("gemm")
def plan_gemm(
    m: M,
    n: N,
    k: K,
    dtype: DtypeOption = Dtype.bf16,
    layout: LayoutOption = Layout.tn,
    batch: BatchOption = 1,
    c: COption = False,
    gated: GatedOption = False,
    kernel: KernelOption = None,
    batch_invariant: InvariantOption = False,
    show_all: AllPlansOption = False,
) -> None:
    """Plan one dense GEMM."""
    _print_plan(lambda: Problem(m, n, k, batch, dtype.torch, None, layout.value, c, gated), kernel, batch_invariant, show_all)


@plan_app.command("w4a16")
def plan_w4a16(
    m: M,
    n: N,
    k: K,
    dtype: DtypeOption = Dtype.bf16,
    group_size: GroupOption = None,
    zeros: ZerosOption = False,
    w4_format: FormatOption = W4Format.int4,
    c: COption = False,
    gated: GatedOption = False,
    kernel: KernelOption = None,
    batch_invariant: InvariantOption = False,
    show_all: AllPlansOption = False,
) -> None:
    """Plan one GEMM with 4-bit weights."""
    _print_plan(
        lambda: W4Problem(m, n, k, dtype.torch, _group_size(group_size, w4_format), zeros, w4_format.value, c, gated),
        kernel,
        batch_invariant,
        show_all,
    )


def _group_size(group_size: int | None, w4_format: W4Format) -> int:
    return group_size if group_size is not None else weight_formats.FORMATS[w4_format.value].group_size or 128


def _print_plan(make_problem: Callable[[], Problem | W4Problem], kernel: str | None, batch_invariant: bool, show_all: bool) -> None:
    try:
        problem = make_problem()
        console.print(str(planning.plan_problem(problem, kernel=kernel, batch_invariant=batch_invariant or None)), markup=False)
        plans = planning.enumerate_plans(problem, batch_invariant=batch_invariant or is_batch_invariant()) if show_all else []
    except (ValueError, RuntimeError) as error:
        raise _stop(str(error)) from None
    for plan in plans:
        runnable = "" if plan.compiled else "  (not in this build)"
        console.print(f"{plan.predicted_us:10.2f} us  {plan.override}{runnable}", markup=False)


# ---- tune -----------------------------------------------------------------------------------------------------------------------


@tune_app.callback(invoke_without_command=True)
def tune_device(
    context: typer.Context,
    device: Annotated[bool, typer.Option("--device", help="Calibrate the plan's cost model for the present GPU.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="With --device: how long to measure.")] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="With --device: of the problems that are measured.")] = 1,
    measurements: Annotated[
        Path | None, typer.Option("--measurements", help="With --device: file for all times, a problem a line.")
    ] = None,
    from_measurements: Annotated[
        list[Path] | None,
        typer.Option("--from-measurements", help="With --device: fit to these files instead of measuring; may be repeated."),
    ] = None,
    prior: Annotated[Path | None, typer.Option("--prior", help="With --device: table to start from. Default: the device's.")] = None,
    export: Annotated[Path | None, typer.Option("--export", help="With --device: file for the table, in place of the user's own.")] = None,
) -> None:
    """Measure kernels and launch configurations on the present GPU."""
    if context.invoked_subcommand is not None:
        if device:
            raise _stop("--device takes no command after it")
        return
    if not device:
        raise _stop("give --device, or a command: gemm or w4a16")
    try:
        _calibrate(seconds, seed, measurements, from_measurements, prior, export)
    except (ValueError, RuntimeError, OSError) as error:
        raise _stop(str(error)) from None


def _calibrate(
    seconds: float, seed: int, measurements: Path | None, from_measurements: list[Path] | None, prior: Path | None, export: Path | None
) -> None:
    here = planning.runs_here()
    if not here and not from_measurements:
        raise ValueError("calibrating measures kernels, and this machine has no GPU that this build has kernels for")
    if not here and export is None:
        raise ValueError("without a GPU there is no device whose table this would be: give --export")
    index = torch.cuda.current_device() if here else -1
    if here:
        torch.cuda.init()  # loads what was calibrated before
        ops._load_model("", index)  # and the model that ships chooses the candidates, and is the prior
    if from_measurements:
        found = calibrate.read_measurements(from_measurements)
    else:
        with console.status("measuring"):  # shown on terminals only
            found = calibrate.measure_device(seconds, seed)
    if measurements is not None:
        measurements.parent.mkdir(parents=True, exist_ok=True)
        measurements.write_text("".join(measured.line() + "\n" for measured in found))
    data = calibrate.Data(found)
    before = calibrate.CostModel.parse(prior.read_text()) if prior is not None else calibrate.CostModel.of_device(index)
    console.print(f"{len(found)} problems, {len(data.us)} candidates of {len(data.names)} kernels")
    console.print(f"before: {calibrate.quality(before, data, index)}")
    model = calibrate.fit(data, before, device=index)
    console.print(f"after:  {calibrate.quality(model, data, index)}")
    text = f"# Fitted to the times of {len(data.us)} candidates of {len(found)} problems.\n{model.text()}"
    if export is not None:
        export.parent.mkdir(parents=True, exist_ok=True)
        export.write_text(text)
        console.print(f"model: {export}", markup=False)
    else:
        path = tuned.write_user_model(torch.cuda.get_device_name(index), text)
        tuned.load_user_model(index)
        console.print(f"model: {path}", markup=False)


@tune_app.command("gemm")
def tune_gemm(
    shape_list: ShapesOption = None,
    shapes_file: ShapesFileOption = None,
    suite: Annotated[list[str] | None, typer.Option("--suite", help="Suite: square, llm, epilogue or heldout; may be repeated.")] = None,
    dtype: DtypeOption = Dtype.bf16,
    layout: LayoutOption = Layout.tn,
    c: COption = False,
    gated: GatedOption = False,
    top: TopOption = 48,
    everything: EverythingOption = False,
    out: OutOption = None,
    report: ReportOption = False,
    dump: DumpOption = None,
    skip_known: SkipKnownOption = False,
    minutes: MinutesOption = None,
    rounds: RoundsOption = 15,
    with_torch: TorchOption = False,
) -> None:
    """Tune dense GEMM. --dtype, --layout, --c and --gated apply to --shapes and --shapes-file; a suite has its own."""

    def make_problems() -> list[Problem]:
        options = {"dtype": dtype.torch, "layout": layout.value, "c": c, "gated": gated}
        problems = [shapes.parse_shape(text, **options) for text in _shape_texts(shape_list, shapes_file)]
        return problems + [problem for name in suite or [] for problem in shapes.suite(name)]

    effort = tuner.Effort(top=top, everything=everything, rounds=rounds)
    _tune_problems(make_problems, effort, out, report=report, dump=dump, skip_known=skip_known, minutes=minutes, with_torch=with_torch)


@tune_app.command("w4a16")
def tune_w4a16(
    shape_list: ShapesOption = None,
    shapes_file: ShapesFileOption = None,
    suite: Annotated[list[str] | None, typer.Option("--suite", help="Suite: llm or heldout; may be repeated.")] = None,
    dtype: DtypeOption = Dtype.bf16,
    group_size: GroupOption = None,
    zeros: ZerosOption = False,
    w4_format: FormatOption = W4Format.int4,
    c: COption = False,
    gated: GatedOption = False,
    top: TopOption = 48,
    everything: EverythingOption = False,
    out: OutOption = None,
    report: ReportOption = False,
    dump: DumpOption = None,
    skip_known: SkipKnownOption = False,
    minutes: MinutesOption = None,
    rounds: RoundsOption = 15,
    with_torch: TorchOption = False,
) -> None:
    """Tune GEMM with 4-bit weights. --dtype, --group-size, --zeros, --format, --c and --gated apply to shapes and suites alike."""

    def make_problems() -> list[W4Problem]:
        options = dict(
            dtype=dtype.torch, group_size=_group_size(group_size, w4_format), zeros=zeros, w4_format=w4_format.value, c=c, gated=gated
        )
        problems = [shapes.parse_w4_shape(text, **options) for text in _shape_texts(shape_list, shapes_file)]
        return problems + [problem for name in suite or [] for problem in shapes.w4_suite(name, **options)]

    effort = tuner.Effort(top=top, everything=everything, rounds=rounds)
    _tune_problems(make_problems, effort, out, report=report, dump=dump, skip_known=skip_known, minutes=minutes, with_torch=with_torch)


def _shape_texts(shape_list: str | None, shapes_file: Path | None) -> list[str]:
    texts = [text for text in (shape_list or "").split(",") if text.strip()]
    if shapes_file is not None:
        texts += [line for line in (line.split("#")[0].strip() for line in shapes_file.read_text().splitlines()) if line]
    return texts


def _tune_problems(
    make_problems: Callable[[], list[Problem] | list[W4Problem]], effort: tuner.Effort, out: Path | None, *, report: bool, **options: Any
) -> None:
    """The body of the tune commands of all families; the options are those of :func:`minfer.planning.tune.tune`."""
    try:
        problems = make_problems()
    except ValueError as error:
        raise _stop(str(error)) from None
    if not problems:
        raise _stop("no shapes: give --shapes, --shapes-file or --suite")
    if not planning.runs_here():
        raise _stop("tuning measures kernels, and this machine has no GPU that this build has kernels for")
    if report and out is not None:
        raise _stop("--report writes no rows: leave out --out")
    table = None if report else out or tuned.user_table(torch.cuda.get_device_name())
    begin = time.monotonic()

    def say(t: tuner.Tuning) -> None:
        peer = f", torch {t.torch_us:.2f}" if t.torch_us is not None else ""
        console.print(
            f"[{time.monotonic() - begin:5.0f} s] {t.problem}: {t.best.final.us:.2f} us (floor {t.best.plan.floor_us:.2f}{peer}), "
            f"analytic {t.analytic.final.us:.2f}, regret {t.regret:.3f}  {t.best.plan.override}",
            markup=False,
        )
        for reason in t.rejected:
            console.print(f"    rejected {reason}", markup=False)

    try:
        found = tuner.tune(problems, out=table, effort=effort, say=say, **options)
    except (ValueError, RuntimeError) as error:
        raise _stop(str(error)) from None
    if not found:
        console.print("nothing to tune")
        return
    summary = tuner.regret_summary(found)
    console.print(
        f"{summary['problems']} problems; regret of the analytic plan: geomean {summary['geomean']:.3f}, "
        f"worst {summary['worst']:.3f} ({summary['worst_problem']})"
    )
    if table is not None:
        console.print(f"rows: {table}", markup=False)


# ---- demo -----------------------------------------------------------------------------------------------------------------------


@app.command("demo")
def run_demo(out: Annotated[Path, typer.Option("--out", help="File that the picture is written to.")] = Path("demo.png")) -> None:
    """Run every family of operators on random tensors, verify the values against float64, and on a GPU time them beside PyTorch."""
    notes: list[str] = []
    with console.status("demo") as status:  # shown on terminals only
        outcomes = demo.run(out, notes.append, status.update)
    console.print(demo_table.table(outcomes, torch.cuda.get_device_name() if demo_table.is_timed(outcomes) else "CPU"))
    console.print()
    for line in [*demo_table.legend(outcomes), *notes]:
        console.print(line, markup=False)
    if not all(o.verified for o in outcomes):
        raise _stop("a result is wrong: " + ", ".join(o.label for o in outcomes if not o.verified))


# ---- report ---------------------------------------------------------------------------------------------------------------------

FoldersArgument = Annotated[list[Path] | None, typer.Argument(help="Folders of results files. Default: bench/results.")]


@app.command("report")
def run_report(
    folders: FoldersArgument = None,
    out: Annotated[Path, typer.Option("--out", help="The page, one file that opens without a network.")] = Path("report.html"),
) -> None:
    """Write one page of everything that was measured: pictures, filters, and every row with its file and commit."""
    from ..measure.report import write_page

    try:
        report = write_page(folders or [Path("bench/results")], out)
    except (ValueError, ImportError) as error:
        raise _stop(str(error)) from None
    console.print(f"{out}: {len(report.rows)} rows of {len(report.files)} files, {out.stat().st_size / 1e6:.1f} MB", markup=False)


app.command("generate")(model_commands.run_generate)
app.command("bench-model")(model_commands.run_bench_model)


def main() -> None:
    app()


if __name__ == "__main__":
    sys.exit(main())
