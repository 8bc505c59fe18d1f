"""The evidence of minfer.fuse: `python -m bench.suites fuse --out bench/results/<device>/fuse.json`.

rows: twenty functions of rows over 256 MB, beside torch.compile of the same Python function, a copy of as many bytes, and minfer's own
operator where there is one. gemm: GEMMs with eight kinds of epilogue, cubes and layers of LLMs, beside torch.compile of the same with
mode="max-autotune-no-cudagraphs", cuBLAS followed by torch.compile of the epilogue, and minfer's product without one. attention:
fuse_attention.py. examples: those of the guide, and how long their first calls take, fuse_examples.py. Values are checked against float64
before anything is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from minfer import fuse
from minfer._core.registry import device_properties
from torch import Tensor

from bench import harness
from bench.suites import fuse_attention, fuse_examples, fused
from bench.suites.drawn import read_rows
from bench.suites.fused_call import Call, deviation
from bench.suites.moe import chosen_of

WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PEERS = ("copy", "torch_compile", "ours:ahead_of_time", "torch_autotune", "cublas_then_compile", "ours:dense", *fuse_attention.PEERS)
SUITES = ("rows", "gemm", "attention", "examples")
E4M3 = torch.float8_e4m3fn


# ---- the functions -------------------------------------------------------------------------------------------------------------------


def silu_mul(x, y):
    return F.silu(x) * y


def gelu_bias(x, bias):
    return F.gelu(x.float() + bias, approximate="tanh").to(x.dtype)


def clamped_swiglu(x, y):
    gate, up = x.float().clamp(max=7.0), y.float().clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)


def group_rational(x, a0, a1, a2, a3, b1, b2):
    x = x.float()
    p = a0 + x * (a1 + x * (a2 + x * a3))
    q = 1 + (x * (b1 + x * b2)).abs()
    return (p / q).to(torch.bfloat16)


def relu_squared(x):
    return x.float().relu().square().to(x.dtype)


def gated_residual(x, residual, gate):
    return (residual.float() + torch.sigmoid(gate.float()) * x).to(x.dtype)


def soft_cap(x):
    return (30.0 * torch.tanh(x.float() * (1 / 30.0))).to(x.dtype)


def to_fp8(x, y):
    return (F.silu(x.float()) * y * 8.0).clamp(-448, 448).to(E4M3)


def sparsity(x):
    active = x > 0
    return torch.where(active, x.float().square(), 0.0).to(x.dtype), active


def rms_norm(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def add_rms_norm(x, residual, weight):
    h = residual.float() + x
    return h.to(x.dtype), (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def gated_residual_norm(x, stream, gate, weight):
    h = stream.float() + torch.sigmoid(gate.float()) * x
    return h.to(x.dtype), (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def layer_norm(x, weight, bias):
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), 1e-5).to(x.dtype)


def deep_norm(x, branch, weight, bias):
    return F.layer_norm(x.float() * 2.0 + branch, (x.shape[-1],), weight.float(), bias.float(), 1e-5).to(x.dtype)


def softmax(x):
    return torch.softmax(x.float(), -1).to(x.dtype)


def log_softmax(x):
    return torch.log_softmax(x.float(), -1).to(x.dtype)


def softmax_and_z(x):
    h = x.float()
    z = torch.logsumexp(h, -1, keepdim=True)
    return (h - z).exp().to(x.dtype), z


def unit_rows(x):
    h = x.float()
    return (h * torch.rsqrt(h.square().sum(-1, keepdim=True) + 1e-12)).to(x.dtype)


def fp8_rows(x):
    h = x.float()
    scale = h.abs().amax(-1, keepdim=True) * (1 / 448.0) + 1e-12
    return (h / scale).clamp(-448, 448).to(E4M3), scale


def norm_fp8_rows(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight
    scale = h.abs().amax(-1, keepdim=True) * (1 / 448.0) + 1e-12
    return (h / scale).clamp(-448, 448).to(E4M3), scale


# name: function, what its arguments are (x: rows, r: a row), whether it reduces, bytes written beside each number of x, minfer's operator
FUNCTIONS: dict[str, tuple[Callable[..., Any], str, bool, float, Callable[..., Any] | None]] = {
    "silu_mul": (silu_mul, "xx", False, 2, None),
    "gelu_bias": (gelu_bias, "xr", False, 2, lambda x, b: minfer.bias_gelu(x, b)),
    "clamped_swiglu": (clamped_swiglu, "xx", False, 2, None),
    "group_rational": (group_rational, "xrrrrrr", False, 2, None),
    "relu_squared": (relu_squared, "x", False, 2, lambda x: minfer.relu2(x)),
    "gated_residual": (gated_residual, "xxx", False, 2, None),
    "soft_cap": (soft_cap, "x", False, 2, None),
    "to_fp8": (to_fp8, "xx", False, 1, None),
    "sparsity": (sparsity, "x", False, 3, None),
    "rms_norm": (rms_norm, "xr", True, 2, lambda x, w: minfer.rms_norm(x, w, 1e-6)),
    "add_rms_norm": (add_rms_norm, "xxr", True, 4, None),
    "gated_residual_norm": (gated_residual_norm, "xxxr", True, 4, None),
    "layer_norm": (layer_norm, "xrr", True, 2, lambda x, w, b: minfer.layer_norm(x, w, b)),
    "deep_norm": (deep_norm, "xxrr", True, 2, None),
    "softmax": (softmax, "x", True, 2, lambda x: minfer.softmax(x)),
    "log_softmax": (log_softmax, "x", True, 2, lambda x: minfer.log_softmax(x)),
    "softmax_and_z": (softmax_and_z, "x", True, 2, None),
    "unit_rows": (unit_rows, "x", True, 2, None),
    "fp8_rows": (fp8_rows, "x", True, 1, lambda x: minfer.quantize_fp8(x, "token")),
    "norm_fp8_rows": (norm_fp8_rows, "xr", True, 1, lambda x, w: minfer.rms_norm(x, w, 1e-6, quant="fp8_token")),
}


# ---- GEMMs ---------------------------------------------------------------------------------------------------------------------------


def e_bias_gelu(acc, row, col, bias):
    return F.gelu(acc + bias, approximate="tanh").to(torch.bfloat16)


def e_residual(acc, row, col, stream):
    return (acc + stream).to(torch.bfloat16)


def e_swiglu(acc, row, col):
    gate, up = acc
    return (F.silu(gate) * up).to(torch.bfloat16)


def e_partial_norm(acc, row, col, stream):
    h = acc + stream
    return h.to(torch.bfloat16), h.square().sum(-1)


def e_fp8(acc, row, col, scale):
    return (acc * scale).clamp(-448, 448).to(E4M3)


def e_scatter(acc, row, col, index, out, weight):
    out.index_copy_(0, index, (acc * weight).to(torch.bfloat16))


def e_stochastic(acc, row, col, seed):
    return fuse.stochastic_round(acc, torch.bfloat16, seed, row, col)


def e_gated_residual(acc, row, col, stream, gate):
    return (stream.float() + torch.sigmoid(gate.float()) * acc).to(torch.bfloat16)


# name: epilogue, the operands' kinds (r: [n], c: [m, 1], f: [m, n], i: an index, s: a seed), its options
EPILOGUES: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "bias_gelu": (e_bias_gelu, "r", {}),
    "residual": (e_residual, "f", {}),
    "swiglu": (e_swiglu, "", {"gate": "halves"}),
    "partial_norm": (e_partial_norm, "f", {}),
    "fp8": (e_fp8, "c", {}),
    "scatter": (e_scatter, "ifc", {"mutates": ("out",), "returns": 0}),
    "stochastic": (e_stochastic, "s", {}),
    "gated_residual": (e_gated_residual, "fr", {}),
}
GEMM_SHAPES = (
    (4096, 4096, 4096), (64, 28672, 4096), (1024, 4096, 14336), (2048, 2048, 2048), (64, 4096, 14336), (8192, 8192, 8192),
    (256, 4096, 4096), (1024, 28672, 4096), (1024, 1024, 1024), (4096, 6144, 4096), (512, 512, 512), (64, 4096, 4096),
)  # fmt: skip
_fused: dict[str, fuse.GemmFunction] = {}


def _make_gemm(name: str, n: int, k: int) -> Callable[..., Call]:
    epilogue, kinds, options = EPILOGUES[name]
    if name not in _fused:
        _fused[name] = fuse.gemm_epilogue(epilogue, **options)
    function = _fused[name]

    def make(m: int, width: int, dtype: torch.dtype, device: str) -> Call:
        columns = n // 2 if options.get("gate") else n
        made = 0 if name == "scatter" else m * columns * (1 if name == "fp8" else 2)
        moved = 2.0 * (m * k + k * n) + made + 2.0 * m * n * kinds.count("f")
        sets = harness.sets_for(int(moved)) if device == "cuda" else 1
        row, col = torch.arange(m, device=device, dtype=torch.int32).view(m, 1), torch.arange(columns, device=device, dtype=torch.int32)

        def operand(kind: str) -> Tensor:
            if kind == "s":
                return torch.tensor(1234567)
            if kind == "i":
                return torch.randperm(m, device=device)
            shape = {"r": (columns,), "c": (m, 1), "f": (m, columns)}[kind]
            return torch.randn(shape, device=device).to(torch.float32 if kind == "c" else dtype)

        matrices = [
            (torch.randn(m, k, device=device).to(dtype), (torch.randn(n, k, device=device) / k**0.5).to(dtype).t()) for _ in range(sets)
        ]
        operands = [[operand(kind) for kind in kinds] for _ in range(sets)]
        on_device = [[x.to(device) for x in given] for given in operands]

        def acc_of(acc: Tensor) -> Any:
            return acc.chunk(2, 1) if options.get("gate") else acc

        def eager(a: Tensor, b: Tensor, *given: Tensor) -> Any:
            return epilogue(acc_of((a @ b).float()), row, col, *given)

        def after(acc: Tensor, *given: Tensor) -> Any:
            return epilogue(acc_of(acc.float()), row, col, *given)

        def error() -> float:
            few = min(m, 64)
            rows = [x[:few] if kind in "cf" else torch.randperm(few, device=device) if kind == "i" else x
                    for kind, x in zip(kinds, operands[0], strict=True)]  # fmt: skip
            worst = 0.0
            for count in (few, m):  # the reference of few rows; of all rows, those
                given = [x.clone() if isinstance(x, Tensor) else x for x in (rows if count == few else operands[0])]
                a, b = matrices[0][0][:count], matrices[0][1]
                have = function(a, b, *given)
                have = given[1] if name == "scatter" else _first(have)
                if count != few and name == "scatter":
                    have = have[operands[0][0][:few]]
                want = function.reference(a[:few], b, *rows, precision=torch.float64)
                want = want[rows[0]] if name == "scatter" and count != few else _first(want)
                far = (have[:few].double() - want.double()).abs() / (want.double().abs() + want.double().abs().mean())
                limit = {"fp8": 2.0**-3, "stochastic": 2.0**-6}.get(name, 2.0**-7)
                worst = max(worst, 0.0 if far.max() <= limit + 1e-6 else float(far.max()))
            return worst

        autotuned = torch.compile(eager, dynamic=False, mode="max-autotune-no-cudagraphs")
        following = torch.compile(after, dynamic=False)
        peers: dict[str, Callable[[int], Any]] = {
            "torch_autotune": lambda i: autotuned(*matrices[i], *on_device[i]),
            "cublas_then_compile": lambda i: following(matrices[i][0] @ matrices[i][1], *on_device[i]),
            "ours:dense": lambda i: minfer.gemm(*matrices[i]),
        }
        rates = device_properties()
        least = max(moved, 2.0 * m * n * k / rates["matrix_rate"] * rates["read_bandwidth"])  # bytes that take as long as the products
        return Call(lambda i: function(*matrices[i], *operands[i]), peers, least, error, "fuse_gemm", sets)

    return make


def gemm_cells(only: str) -> list[dict[str, Any]]:
    """All kinds on every shape, so ordered that each shape comes early with one kind and each kind with one shape."""
    found = []
    names = list(EPILOGUES)
    for turn in range(len(names)):
        for i, (m, n, k) in enumerate(GEMM_SHAPES):
            name = names[(i + turn) % len(names)]
            if only in name:
                found.append(dict(suite="gemm", what=f"{name} n={n} k={k}", m=m, width=n, dtype="bf16", make=_make_gemm(name, n, k)))
    return found


def precompile_gemms() -> None:
    """Of all cells, in parallel."""
    from minfer.fuse import compiler

    kernels = []
    for name, (epilogue, kinds, options) in EPILOGUES.items():
        function = _fused.setdefault(name, fuse.gemm_epilogue(epilogue, **options))
        for m, n, k in GEMM_SHAPES:
            columns = n // 2 if options.get("gate") else n
            shapes = {"r": (columns,), "c": (m, 1), "f": (m, columns), "i": (m,)}
            types = {"c": torch.float32, "i": torch.int64}
            given = [
                torch.tensor(1) if kind == "s" else torch.empty(shapes[kind], dtype=types.get(kind, torch.bfloat16), device="meta")
                for kind in kinds
            ]
            a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (n, k)))
            kernels += function.kernels_of(a, b.t(), *given)
    compiler.compile_all(kernels)


# ---- the run -------------------------------------------------------------------------------------------------------------------------


def _first(results: Any) -> Tensor:
    return results[0] if isinstance(results, list | tuple) else results


def _make(name: str, fused_function: fuse.RowFunction) -> Callable[..., Call]:
    function, kinds, _, written, own = FUNCTIONS[name]

    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        read = 2.0 * kinds.count("x")
        moved = (read + written) * rows * width
        sets = harness.sets_for(int(moved)) if device == "cuda" else 1
        shared = [torch.randn(width, device=device).to(dtype) for kind in kinds if kind == "r"]
        operands = []
        for _ in range(sets):
            left = iter(shared)
            operands.append([torch.randn(rows, width, device=device).to(dtype) if kind == "x" else next(left) for kind in kinds])

        def error() -> float:
            few = [x[:4] if kind == "x" else x for kind, x in zip(kinds, operands[0], strict=True)]
            have, want = _first(fused_function(*few)), _first(fused_function.reference(*few, precision=torch.float64))
            if have.dtype != E4M3:
                return deviation(have, want)
            # Codes may be neighbours where a number lies between them.
            far = (have.double() - want.double()).abs() / want.double().abs().clamp(min=2.0**-6)
            return 0.0 if far.max() <= 0.125 + 1e-6 else float(far.max())

        compiled = torch.compile(function, dynamic=False)
        peers: dict[str, Callable[[int], Any]] = {"torch_compile": lambda i: compiled(*operands[i])}
        if own is not None:
            peers["ours:ahead_of_time"] = lambda i: own(*operands[i])
        return Call(lambda i: fused_function(*operands[i]), peers, moved, error, "fuse_rows", sets)

    return make


def cells(only: str) -> list[dict[str, Any]]:
    found = []
    for name, (function, kinds, reduces, written, _) in FUNCTIONS.items():
        if only not in name:
            continue
        fused_function = (fuse.rowwise if reduces else fuse.pointwise)(function)
        for width in WIDTHS:
            rows = int(fused.WORKING_SET / ((2.0 * kinds.count("x") + written) * width))
            found.append(dict(suite="rows", what=name, m=rows, width=width, dtype="bf16", make=_make(name, fused_function)))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/fuse.json")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--suite", default="rows", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--only", default="", help="functions with this in their name")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="comma separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--graph-us", type=float, default=400.0)
    parser.add_argument("--compile-seconds", type=float, default=400.0, help="that torch.compile may take over the whole run")
    parser.add_argument("--autotune-seconds", type=float, default=120.0, help="that max-autotune may take over the whole run")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--resume", action="store_true", help="leave out cells that --out has rows of")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def main(args: argparse.Namespace) -> int:
    widths = [int(width) for width in args.widths.split(",")]
    suites = chosen_of(args.suite, "suite", SUITES)
    chosen = [cell for cell in cells(args.only) if cell["width"] in widths] if "rows" in suites else []
    chosen += gemm_cells(args.only) if "gemm" in suites else []
    chosen += fuse_attention.cells(args.only) if "attention" in suites else []
    chosen += fuse_examples.cells(args.only) if "examples" in suites else []
    if args.resume:
        names = ("what", "m", "width")
        done = {(row["suite"], *(row["shape"].get(name) for name in names)) for row in read_rows(args.out)}
        chosen = [cell for cell in chosen if (cell["suite"], *(cell.get(name) for name in names)) not in done]
    if args.dry_run:
        for cell in chosen:
            print({name: value for name, value in cell.items() if name != "make"})
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    peers = chosen_of(args.peers, "peers", PEERS) if args.peers else []
    results, budget = (
        fused.FusedResults(args.out, args.commit),
        harness.Budget(
            {
                "flex_attention": args.compile_seconds,
                "torch_compile": args.compile_seconds,
                "torch_autotune": args.autotune_seconds,
                "cublas_then_compile": args.compile_seconds,
            }
        ),
    )
    begin, wrong = time.monotonic(), []
    if "gemm" in suites:  # all kernels at once, by all cores
        precompile_gemms()
    if "attention" in suites:
        fuse_attention.precompile()
    for cell in chosen:
        if time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            measure = {"attention": fuse_attention.measure, "examples": fuse_examples.measure}.get(cell["suite"], fused.measure)
            print(measure(cell, args, results, peers, budget), flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            torch.cuda.synchronize()
            wrong.append(f"{cell['what']}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s; not measured for time: {budget.left_out}")
    return 1 if wrong else 0
