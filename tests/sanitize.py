"""compute-sanitizer over a small call of every compiled kernel: ``python -m tests.sanitize [--tool memcheck ..] [--only GLOB]``.

A kernel of the registry is called by name, twice where a launch divides its work; the others (packing, routing, caches, merges) by the
operators that launch them. Needs a GPU, and compute-sanitizer on PATH or in CUDA_HOME. Exit status 1 if a tool reports anything.

What three of the tools cannot follow is counted apart, by kernel, and is no failure; of all other kernels it is:

* racecheck follows shared memory that is handed over by barriers of a CTA, not by mbarriers that TMA and asynchronous copies arrive at.
* synccheck takes warps that wait for each other at one named barrier from several places in the code for diverged ones, and stops the
  kernel: it says nothing of the rest of it. The roles of the attention kernels' warps do that.
* initcheck counts every look at a word of the workspace that nobody has written yet. Kernels whose CTAs hand partial results to each other
  look for words that carry this call's tag, whatever was there before. It also takes what a TMA store has written for not initialised.

Torch gives every tensor memory of its own here, without its cache: in a block that tensors share, an access beyond one of them is legal to
the tools, and what another tensor has left counts as initialised.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
EXCUSED = {
    "racecheck": re.compile(r"sm90_"),  # kernels whose shared memory is handed over by mbarriers
    "synccheck": re.compile(r"\b(prefill|decode|decoder_block)_sm90_kernel"),  # kernels whose roles synchronise by named barriers
    # these look for tagged words of the workspace
    "initcheck": re.compile(
        r"\b((gemm|gemm_columns|w4a16|decoder_block)_sm90_kernel|decode_sm[89]0_kernel|router_gemm_kernel|norm_gemm_sm80_kernel)"
    ),
}
DEVICE = "cuda"


# ---- the calls ---------------------------------------------------------------------------------------------------------------------


def calls(only: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of every compiled kernel, then of every operator."""
    import minfer
    import torch
    from minfer.planning.plan import DTYPE_NAMES

    dtype_of = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    torch.manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype)

    portable = {f"{major}{x}" for major, minor in [torch.cuda.get_device_capability()] for x in range(minor + 1)}
    has_portable = bool(portable & set(minfer.build_info()["archs"].split(";")))
    for family, call in (
        ("gemm", _gemm),
        ("w4a16", _quantised),
        ("moe", _grouped),
        ("moe_w4a16", _grouped_quantised),
        ("moe_scaled", _grouped_scaled),
        ("attention", _attention),
        ("fused", _rows),
        ("norm_gemm", _norm_gemm),
        ("scaled_gemm", _scaled),
    ):
        for kernel in minfer.kernels(family):
            runs = kernel["compiled"] and (family != "attention" or kernel["arch_exact"] or has_portable)
            if runs and fnmatch(kernel["name"], only):
                for number, function in enumerate(call(kernel, dtype_of.get(kernel["ab_type"]), normal)):
                    yield f"{kernel['name']} #{number}", function
    from tests.contracts import operator_cases

    for name, functions in operator_cases.calls(DEVICE).items():
        for number, function in enumerate(functions):
            if fnmatch(name, only):
                yield f"{name} #{number}", function


def _gemm(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer

    m, n, k = 72, 200, 264
    a = normal(m, k, dtype=dtype) if kernel["a_major"] == "k" else normal(k, m, dtype=dtype).t()
    b = normal(n, k, dtype=dtype).t() if kernel["b_major"] == "k" else normal(k, n, dtype=dtype)
    c, bias = normal(m, n, dtype=dtype), normal(n, dtype=dtype)
    yield lambda: minfer.gemm(a, b, kernel=kernel["name"])
    divided = f"{kernel['name']}@decomposition={'stream_k' if kernel['invariant_only'] else 'split_k,splits=2'}"
    yield lambda: minfer.gemm(a, b, c=c, beta=1.0, bias=bias, activation="silu", kernel=divided)
    if (kernel["a_major"], kernel["b_major"], kernel["alignment"], kernel["tile_m"], kernel["tile_n"]) == ("k", "k", 16, 128, 128):
        copied = f"{kernel['name']}@realign_a=1,realign_b=1"  # from columns along k, and from rows that begin anywhere
        columns, rows = normal(k - 1, m - 1, dtype=dtype).t(), normal(n - 1, k - 1, dtype=dtype).t()
        yield lambda: minfer.gemm(columns, rows, kernel=copied)
        yield lambda: minfer.gemm(rows.t(), columns.t(), kernel=copied)


def _scaled(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer
    import torch

    m, n, k = 72, 200, 272
    e4m3 = kernel["ab_type"] == "e4m3"
    a, w = ((40 * normal(lines, k, dtype=torch.float32)).clamp(-120, 120) for lines in (m, n))
    a, w = (x.to(torch.float8_e4m3fn if e4m3 else torch.int8) for x in (a, w))
    call = minfer.gemm_fp8 if e4m3 else minfer.gemm_int8
    rows, columns = (torch.rand(lines, device=DEVICE) for lines in (m, n))
    for launch in ("", "@decomposition=split_k,splits=2", "@columns=16"):
        name = f"{kernel['name']}{launch}"
        yield lambda name=name: call(a, w.t(), rows, columns, bias=normal(n, dtype=torch.float32), activation="silu", kernel=name)
        if e4m3:
            blocks = torch.rand(m, 3, device=DEVICE), torch.rand(2, 3, device=DEVICE)
            yield lambda name=name, blocks=blocks: call(a, w.t(), *blocks, kernel=name)
            yield lambda name=name: call(a, w.t(), rows, columns[:1], fast_accum=True, kernel=name)


def _weight(kernel: dict, n: int, k: int, dtype):
    import minfer
    import torch

    w_format = kernel["b_format"]
    weight = torch.randn(n, k, device=DEVICE).to(dtype) / 16
    quantise = minfer.quantize.quantize_w8 if w_format in ("int8", "fp8_e4m3") else minfer.quantize.quantize_w4
    group = None if w_format in ("mxfp4", "nvfp4") else 32 if "fine" in kernel["name"] else 128
    return quantise(weight, group, format=w_format, clip=False)


def _quantised(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer

    n, k = 256, 1024
    w = _weight(kernel, n, k, dtype)
    bits = 8 if kernel["b_format"] in ("int8", "fp8_e4m3") else 4
    call = minfer.w8a16_gemm if bits == 8 else minfer.w4a16_gemm
    options = {"group_size": w.group_size, "alpha": w.alpha, f"w{bits}_format": kernel["b_format"]}
    a = normal(24, k, dtype=dtype)
    for launch in ("", "@decomposition=split_k,splits=2"):
        yield lambda launch=launch: call(a, w.qweight, w.scales, w.zeros, kernel=kernel["name"] + launch, **options)


def _grouped(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer
    import torch

    a, b = normal(50, 256, dtype=dtype), normal(3, 256, 256, dtype=dtype, scale=0.05)
    ends, gather = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((7, 7, 50), list(range(49, -1, -1))))
    yield lambda: minfer.grouped_gemm(a, b.mT, ends, kernel=kernel["name"])
    yield lambda: minfer.grouped_gemm(a, b.mT, ends, gather=gather, gated=True, activation="silu", kernel=kernel["name"])


def _grouped_quantised(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer
    import torch

    weights = [_weight(kernel, 256, 512, dtype) for _ in range(3)]
    packed, scales = (torch.stack([getattr(w, name) for w in weights]) for name in ("qweight", "scales"))
    alpha = torch.tensor([w.alpha for w in weights], device=DEVICE)
    a = normal(50, 512, dtype=dtype)
    ends, gather = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((7, 7, 50), list(range(49, -1, -1))))
    options = dict(group_size=weights[0].group_size, w4_format=kernel["b_format"], alpha=alpha, kernel=kernel["name"])
    yield lambda: minfer.grouped_w4a16_gemm(a, packed, scales, None, ends, **options)
    yield lambda: minfer.grouped_w4a16_gemm(a, packed, scales, None, ends, gather=gather, gated=True, activation="silu", **options)


def _grouped_scaled(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer
    import torch

    e4m3 = kernel["ab_type"] == "e4m3"
    a, w = ((40 * normal(*shape, dtype=torch.float32)).clamp(-120, 120) for shape in ((50, 272), (3, 192, 272)))
    a, w = (x.to(torch.float8_e4m3fn if e4m3 else torch.int8) for x in (a, w))
    call = minfer.grouped_gemm_fp8 if e4m3 else minfer.grouped_gemm_int8
    ends, gather = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((7, 7, 50), list(range(49, -1, -1))))
    number = lambda *shape: torch.rand(shape, device=DEVICE)  # noqa: E731
    gates = dict(gather=gather, gated=True, activation="silu", bias=normal(3, 192, dtype=torch.float32))
    groups = -(-272 // max(32, kernel["group_multiple"]))  # of a row, as small as the kernel takes them
    for launch in ("", "@gather_first=1"):
        name = f"{kernel['name']}{launch}"
        yield lambda name=name: call(a, w.mT, number(50), number(3, 192), ends, kernel=name, **gates)
        yield lambda name=name: call(a, w.mT, number(50, groups), number(3), ends, gather=gather, kernel=name)
        if e4m3:
            blocks, scale = (number(50, 3), number(3, 2, 3)), number(1)
            yield lambda name=name, blocks=blocks, scale=scale: call(a, w.mT, *blocks, ends, kernel=name, out_scale=scale, **gates)
            yield lambda name=name: call(a, w.mT, number(1), number(1), ends, gather=gather, kernel=name, fast_accum=True)


def _attention(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer
    import torch

    d, dv, name = kernel["tile_k"], kernel["head_dim_v"] or kernel["tile_k"], kernel["name"]
    decode = name.endswith("_decode")
    if not decode and kernel["b_format"] == "dense":
        q, k, v = normal(2, 200, 4, d, dtype=dtype), normal(2, 300, 2, d, dtype=dtype), normal(2, 300, 2, dv, dtype=dtype)
        yield lambda: minfer.attention(q, k, v, causal=True, window_left=70, kernel=name)
        yield lambda: minfer.attention(q, k, v, softcap=9.0, kernel=name)
    formats = ("16bit" if kernel["b_format"] == "dense" else kernel["b_format"],)
    if kernel["b_format"] == "codes":
        formats = ("fp8_e4m3", "int4", *(("int8",) if kernel["ab_type"] == "f16" else ()))
    table = torch.tensor([[3, 1, 2, 2**31 - 1], [0, 5, -1, -1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([150, 70], dtype=torch.int32, device=DEVICE)
    for kv_format in formats:
        cache = minfer.allocate_kv_cache(6, 64, 2, d, head_dim_v=dv, kv_format=kv_format, dtype=dtype, device=DEVICE, batch=2)
        for x in (y for y in cache if isinstance(y, torch.Tensor)):
            x.view(torch.uint8).random_(0, 60)
        q = normal(2, 2 if decode else 70, 4, d, dtype=dtype)
        for options in ({}, {"window_left": 40}, *([{"num_splits": 3}] if decode else [])):
            yield lambda q=q, cache=cache, options=options: minfer.attention_paged(
                q, cache.k, cache.v, lengths, block_table=table, kernel=name, **options, **cache.scales()
            )


def _rows(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer

    from tests.fused.cases import CASES, QUANTIZED, QUANTS, given_scale

    name, operation = kernel["name"], kernel["operation"]
    usual = {"activation": "activation_gelu_bias", "gated_activation": "gated_silu_halves"}
    quantised = "_quantized" in name
    case = (QUANTIZED if quantised else CASES)[usual.get(operation, operation)]
    for rows, width in ((3, 136), (300, 1040)):  # 300: rings are filled anew
        x, factors = case.make(rows, width, dtype, DEVICE)
        if not quantised:
            yield lambda x=x, factors=factors: case.call(x, factors, kernel=name)
            if operation == "rms_norm":
                yield lambda x=x, factors=factors: minfer.add_rms_norm(x, x.clone(), factors["weight"], kernel=name)
            continue
        for quant in QUANTS:
            if operation == "rms_norm" or ("_rows_" in name) == (quant in ("fp8_token", "int8_token")):
                options = {"quant": quant, "kernel": name} | given_scale(quant, DEVICE)
                yield lambda x=x, factors=factors, options=options: case.quantized(x, factors, **options)


def _norm_gemm(kernel: dict, dtype, normal) -> Iterator[Callable[[], Any]]:
    import minfer

    x, weight, b = normal(kernel["tile_m"], 264, dtype=dtype), normal(264, dtype=dtype), normal(208, 264, dtype=dtype)
    options = {"bias": normal(208, dtype=dtype), "kernel": kernel["name"]}
    yield lambda: minfer.rms_norm_gemm(x, weight, b.t(), residual=x.clone(), activation="gelu", **options)
    yield lambda: minfer.rms_norm_gemm_gated(x, weight, b.t(), **options)


def run(only: str) -> int:
    import torch

    count = 0
    for name, call in calls(only):
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001
            print(f"REFUSED {name}: {str(error).splitlines()[0]}", flush=True)
            continue
        count += 1
        if count % 10 == 0:
            print(f"CALLS {count}", flush=True)  # what a tool that is stopped has seen
    print(f"CALLS {count}", flush=True)
    return count


# ---- the tools -----------------------------------------------------------------------------------------------------------------------


def sanitizer() -> str:
    for place in (
        shutil.which("compute-sanitizer"),
        *(f"{home}/bin/compute-sanitizer" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda")),
    ):
        if place and Path(place).exists():
            return place
    sys.exit("compute-sanitizer is neither on PATH nor in CUDA_HOME")


@dataclass
class Report:
    """What a tool has written: how many errors it counts, how many of what was printed are of which kernel, and the first of each."""

    errors: int | None  # None: it did not come to its summary
    found: Counter[str]
    first: dict[str, str]

    @staticmethod
    def of(text: str) -> Report:
        found: Counter[str] = Counter()
        first: dict[str, str] = {}
        for block in re.split(r"^=+ *$", text, flags=re.MULTILINE):
            lines = [line for line in (re.sub(r"^=+ ?", "", line) for line in block.splitlines()) if line.strip()]
            lines = [line for line in lines if "SUMMARY" not in line and not line.startswith("COMPUTE-SANITIZER")]
            if not lines:
                continue
            kernel = re.search(r"\b(?:at|in|by|to) (?:void )?((?:[\w]+::)*\w*(?:kernel|sort|append|merge|<)[^\n(]*)", "\n".join(lines))
            name = kernel.group(1).strip() if kernel else lines[0].strip()[:160]
            found[name] += 1
            first.setdefault(name, lines[0].strip()[:160])
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        return Report(sum(map(int, summaries)) if summaries else None, found, first)

    def excused(self, tool: str) -> set[str]:
        return {name for name in self.found if tool in EXCUSED and EXCUSED[tool].search(name)}

    def passes(self, tool: str) -> bool:
        """Errors that were counted and of which nothing was printed are no less errors."""
        if self.errors is None or self.found.keys() - self.excused(tool):
            return False
        return self.errors <= sum(self.found[name] for name in self.excused(tool))


def check(tool: str, only: str, timeout: float, keep: Path | None) -> bool:
    """Runs all calls under a tool; whether it found nothing. What the tool wrote goes to the folder `keep`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sanitizer(), f"--tool={tool}", f"--log-file={log}", "--print-limit=100000", "--show-backtrace=no"]
        if tool == "racecheck":
            command.append("--racecheck-report=analysis")
        if tool == "synccheck":
            command.append("--destroy-on-device-error=kernel")  # the calls that follow are made all the same
        command += [sys.executable, "-m", "tests.sanitize", "--run", "--only", only]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        output, status = "", None
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
            print(f"{tool}: not done after {timeout:.0f} s")
        report = Report.of(log.read_text() if log.exists() else "")
        if keep and log.exists():
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, keep / f"{tool}-{re.sub(r'[^a-z0-9_]', '', only) or 'all'}.txt")
    counted = re.findall(r"CALLS (\d+)", output)
    stopped = report.excused(tool) if tool == "synccheck" else set()  # by the tool
    refused = [
        line for line in re.findall(r"REFUSED [^\n]*", output) if not any(re.search(rf"\b{line.split()[1]}\b", name) for name in stopped)
    ]
    calls = int(counted[-1]) if counted else None
    errors = "no summary" if report.errors is None else f"{report.errors} errors"
    print(f"{tool}: {'an unknown number of' if calls is None else calls} calls, {len(refused)} refused, {errors}, exit status {status}")
    for line in refused:
        print(f"  {line}")
    for name in sorted(stopped):
        print(f"  stopped by the tool: {name}")
    for name, n in report.found.most_common(40):
        print(f"  {n} x {name}: {report.first[name]}" + ("  (not followed)" if name in report.excused(tool) else ""))
    return bool(calls) and not refused and status == 0 and report.passes(tool)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, default=[], help="all of them unless given; may be repeated")
    parser.add_argument("--only", default="*", help="a glob of kernels and operators")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a tool")
    parser.add_argument("--keep", type=Path, help="a folder for what the tools write")
    parser.add_argument("--run", action="store_true", help="make the calls, without a tool")
    options = parser.parse_args()
    if options.run:
        run(options.only)
        return 0
    return 0 if all([check(tool, options.only, options.timeout, options.keep) for tool in options.tool or TOOLS]) else 1


if __name__ == "__main__":
    sys.exit(main())
