"""The W4A16 evidence: every cell checked against float64, then ours, cuBLAS on 16-bit weights and the 4-bit peers timed in turn."""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from minfer.formats import weight_formats

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
GROUP = 128
VARIANTS = ("g32", "zeros", "act_order", "nf4", "mxfp4", "nvfp4")
FORMATS = {"nf4": ("nf4", 64), "mxfp4": ("mxfp4", 32), "nvfp4": ("nvfp4", 16)}  # of a variant: format, group size
W8_VARIANTS = ("int8", "fp8_e4m3")  # a scale for each row of the weight
BF16_M, BF16_LAYERS = (1, 16, 64, 256, 2048), ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
LIBRARIES = {"marlin": "_C_stable_libtorch", "machete": "_C_stable_libtorch", "fbgemm": "fbgemm_genai"}
SUITES = ("w4a16", "w4a16_bf16", "variants", "variants_bf16", "gated", "w8a16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}; all but *_bf16 in --dtype")
    parser.add_argument("--out", type=Path, help="results file to merge rows into, bench/results/<device>/w4a16.json")
    parser.add_argument("--peers", default="cublas,marlin,machete", help="of the w4a16 suites; also fbgemm (bf16), humming, gemlite")
    parser.add_argument("--dtype", choices=DTYPES, default="f16")
    parser.add_argument("--m", help="only these numbers of tokens, comma separated")
    parser.add_argument("--layers", help="only these layers, NxK,...")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--graph-us", type=float, default=600.0)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell is started")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--dry-run", action="store_true", help="list the cells")


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    from minfer.measure import shapes

    from bench.suites.gemm_cells import MODELS

    ms = [int(m) for m in args.m.split(",")] if args.m else None
    models = {(n, k): model for model, of_model in MODELS.items() for n, k in of_model}
    layers = [tuple(map(int, x.split("x"))) for x in args.layers.split(",")] if args.layers else (*shapes.LLAMA_8B, *shapes.LLAMA_70B)
    found = []
    for suite in args.suite.split(","):
        if suite == "w4a16":
            found += [dict(suite=suite, m=m, n=n, k=k, variant="", model=models.get((n, k))) for n, k in layers for m in ms or shapes.LLM_M]
        elif suite == "w4a16_bf16":
            some = [layer for layer in layers if layer in BF16_LAYERS]
            found += [dict(suite=suite, m=m, n=n, k=k, variant="", model=models.get((n, k))) for n, k in some for m in ms or BF16_M]
        elif suite == "w8a16":
            some = [layer for layer in layers if layer in BF16_LAYERS]
            found += [dict(suite=suite, m=m, n=n, k=k, variant=v) for n, k in some for m in ms or (1, 16, 64, 1024) for v in W8_VARIANTS]
        elif suite in ("variants", "variants_bf16"):
            found += [dict(suite=suite, m=m, n=n, k=k, variant=v) for n, k in layers[:4] for m in ms or (1, 16) for v in VARIANTS]
        elif suite == "gated":
            found += [dict(suite=suite, m=m, n=n, k=k, variant="gated") for n, k in layers[:4] for m in ms or (1, 16, 64)]
        else:
            raise ValueError(f"--suite must be of {', '.join(SUITES)}, got {suite!r}")
    return found


class Layer:
    """One quantised weight in every contestant's form, and enough copies of each to flush three L2s."""

    def __init__(self, n: int, k: int, dtype: torch.dtype):
        self.n, self.k, self.dtype = n, k, dtype
        self.codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        self._forms: dict[str, list] = {}
        self._packed: dict[str, torch.Tensor] = {}

    def scales(self, group: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(max(group, 0))
        rows = -(-self.k // group) if group > 0 else 1
        return (torch.rand(rows, self.n, device="cuda", generator=generator) * 0.01 + 0.002).to(self.dtype)

    def format_scales(self, name: str, group: int) -> torch.Tensor:
        """Scales as the format stores them."""
        scale_type = weight_formats.FORMATS[name].scale_type
        if name == "fp8_e4m3":
            return self.scales(group) / 16
        return self.scales(group) if scale_type is None else self.scales(group).to(scale_type).view(torch.uint8)

    def dense(self, group: int, zeros: torch.Tensor | None = None, name: str = "int4") -> torch.Tensor:
        options = dict(group_size=group, n=self.n, k=self.k)
        if weight_formats.FORMATS[name].bits == 8:
            return torch.ops.minfer.w8a16_dequantize(self.packed(name), self.format_scales(name, group), None, w8_format=name, **options)
        options |= dict(w4_format=name, out_dtype=self.dtype)
        return torch.ops.minfer.w4a16_dequantize(self.packed(name), self.format_scales(name, group), zeros, **options)

    def packed(self, name: str = "int4") -> torch.Tensor:
        """The 4-bit codes in the order of a format, or 8-bit ones; fp8_e4m3's without NaN."""
        if name not in self._packed:
            if weight_formats.FORMATS[name].bits == 4:
                self._packed[name] = torch.ops.minfer.w4a16_pack(self.codes, w4_format=name)
            else:
                codes = torch.randint(0, 256, (self.n, self.k), device="cuda", dtype=torch.uint8)
                self._packed[name] = torch.ops.minfer.w8a16_pack(codes & 0xBF if name == "fp8_e4m3" else codes)
        return self._packed[name]

    def form(self, name: str, make: Callable[[], Any]) -> list:
        """Copies of what ``make`` returns: a tuple with tensors in it, or a module that has them."""
        from bench.harness import sets_for

        if name not in self._forms:
            first = make()
            parts = first if isinstance(first, tuple) else (*vars(first).values(), *first.parameters(), *first.buffers())
            size = sum(x.numel() * x.element_size() for x in parts if isinstance(x, torch.Tensor))
            self._forms[name] = [first, *(copy.deepcopy(first) for _ in range(sets_for(size) - 1))]
        return self._forms[name]


def contestants(cell: dict, layer: Layer, a: torch.Tensor, peers: list[str]) -> tuple[dict[str, Callable[[int], Any]], torch.Tensor, dict]:
    """name -> fn(set), the dense weight that is multiplied, and how ours was called."""
    gemm, gated = torch.ops.minfer.w4a16_gemm.default, torch.ops.minfer.w4a16_gemm_gated.default
    variant, k = cell["variant"], cell["k"]
    if cell["suite"] == "w8a16":
        return contestants_w8(cell, layer, a)
    w4_format, group = FORMATS.get(variant, ("int4", 32 if variant == "g32" else GROUP))
    scales = layer.format_scales(w4_format, group)
    generator = torch.Generator("cuda").manual_seed(k)  # the layer's copies are kept from one cell to the next
    zeros = torch.randint(0, 16, scales.shape, device="cuda", generator=generator).to(layer.dtype) if variant == "zeros" else None
    perm = torch.randperm(k, device="cuda", generator=generator).to(torch.int32) if variant == "act_order" else None
    ours = layer.form(f"ours/{variant}", lambda: (layer.packed(w4_format), scales, zeros))
    plain = layer.form("ours/", lambda: (layer.packed(), layer.scales(GROUP), None))
    fns: dict[str, Callable[[int], Any]] = {}

    def call(i: int):
        q, s, z = ours[i % len(ours)]
        return gemm(a, q, s, z, group_size=group, perm=perm, w4_format=w4_format)

    def call_gated(i: int):
        q, s, z = ours[i % len(ours)]
        return gated(a, q, s, z, group_size=group)

    def call_plain(i: int):
        q, s, z = plain[i % len(plain)]
        return gemm(a, q, s, z, group_size=GROUP)

    def silu_and_mul(i: int):
        y = call_plain(i).unflatten(-1, (-1, 2, 8))
        return torch.nn.functional.silu(y[..., 0, :]) * y[..., 1, :]

    weight = layer.dense(group, zeros, w4_format)
    if perm is not None:
        weight = torch.empty_like(weight).index_copy_(1, perm.long(), weight)
    if variant == "gated":
        return {"ours": call_gated, "ours:gemm+silu_and_mul": silu_and_mul}, weight, dict(group=group)
    fns["ours"] = call
    if variant:
        fns["ours:plain"] = call_plain
        return fns, weight, dict(group=group, name=w4_format)
    if "cublas" in peers:
        dense = layer.form("cublas", lambda: (weight,))
        fns["cublas"] = lambda i: torch.mm(a, dense[i % len(dense)][0].t())
    q_kn = None
    for name in peers:
        if name == "cublas":
            continue
        import peer_ops

        prepare, run = getattr(peer_ops, f"{name}_prepare"), getattr(peer_ops, {"fbgemm": "fbgemm_w4"}.get(name, name))
        q_kn = layer.codes.t().contiguous() if q_kn is None else q_kn
        weights = (weight,) if name == "humming" else (q_kn, scales)  # humming quantises itself: its error is not comparable
        forms = layer.form(name, lambda prepare=prepare, weights=weights: prepare(*weights, GROUP))
        fns[name] = lambda i, forms=forms, run=run: run(a, forms[i % len(forms)])
    return fns, weight, dict(group=group)


def contestants_w8(cell: dict, layer: Layer, a: torch.Tensor) -> tuple[dict[str, Callable[[int], Any]], torch.Tensor, dict]:
    """8-bit weights against cuBLAS on 16-bit ones."""
    name = cell["variant"]
    weight = layer.dense(-1, name=name)
    ours = layer.form(f"ours/{name}", lambda: (layer.packed(name), layer.format_scales(name, -1)))
    dense = layer.form(f"cublas/{name}", lambda: (weight,))
    gemm = torch.ops.minfer.w8a16_gemm.default
    return {
        "ours": lambda i: gemm(a, *ours[i % len(ours)], w8_format=name),
        "cublas": lambda i: torch.mm(a, dense[i % len(dense)][0].t()),
    }, weight, dict(group=-1, name=name)  # fmt: skip


def measure_cell(cell: dict, layer: Layer, args: argparse.Namespace, results, facts: dict) -> str:
    from minfer.measure.benchmarking import relative_error, result_row, rounding_unit
    from minfer.planning.plan import W4Problem, plan_problem

    from bench import harness

    m, n, k = cell["m"], cell["n"], cell["k"]
    a = torch.randn(m, k, device="cuda").to(layer.dtype)
    fns, weight, how = contestants(cell, layer, a, facts["peers"])
    gated = cell["variant"] == "gated"
    truth = a.double() @ weight.double().t() if m * n * k < 4e10 else a.float() @ weight.float().t()
    yardstick = a @ weight.t()
    if gated:
        blocks = truth.unflatten(-1, (-1, 2, 8))
        truth = (torch.nn.functional.silu(blocks[..., 0, :]) * blocks[..., 1, :]).flatten(-2)
        blocks = yardstick.unflatten(-1, (-1, 2, 8))
        yardstick = (torch.nn.functional.silu(blocks[..., 0, :]) * blocks[..., 1, :]).flatten(-2)
    limit = 2 * relative_error(yardstick, truth) + rounding_unit(layer.dtype)
    errors = {name: relative_error(fn(0).flatten(1), truth) for name, fn in fns.items()}
    if errors["ours"] > limit:
        raise ArithmeticError(f"relative error {errors['ours']:.3g}, at most {limit:.3g}")
    del truth, yardstick, weight
    sets = max(8, *(len(forms) for forms in layer._forms.values()))
    timings, failed = harness.measure(fns, sets, rounds=args.rounds, graph_us=args.graph_us)
    if "ours" not in timings:
        raise RuntimeError(failed["ours"])
    zeros = cell["variant"] == "zeros"
    plan = plan_problem(W4Problem(m, n, k, layer.dtype, how["group"], zeros, how.get("name", "int4"), gated=gated))
    shape = {"m": m, "n": n, "k": k, "group": how["group"]} | {name: cell[name] for name in ("model", "variant") if cell.get(name)}
    ours, line = timings["ours"], []
    op = "w8a16_gemm" if cell["suite"] == "w8a16" else "w4a16_gemm_gated" if gated else "w4a16_gemm"
    for name, timing in timings.items():
        if name == "ours":
            continue
        row = result_row(
            suite=cell["suite"], op=op, kernel=plan.kernel, shape=shape, dtype="bf16" if layer.dtype == torch.bfloat16 else "f16",
            timing=ours, peer=name, peer_us=timing.us, floor_us=plan.floor_us, rel_err=errors["ours"],
        )  # fmt: skip
        row |= {"launch": plan.launch, "source": plan.source, "peer_rel_err": float(f"{errors[name]:.3e}")}
        results.add(row)
        line.append(f"{name} {timing.us:.2f} ({timing.us / ours.us:.2f}x)")
    for name, why in failed.items():
        line.append(f"{name} failed: {why[:80]}")
    what = f"{plan.source} {plan.kernel} {plan.decomposition} {plan.splits}"
    head = f"{cell['suite']} {m}x{n}x{k} {cell['variant']}: {ours.us:.2f} us, {plan.floor_us / ours.us:.0%} of the floor"
    return f"{head}; {', '.join(line)}  [{what}]"


def available_peers(names: str) -> list[str]:
    """Those of the peers, comma separated, whose libraries can be loaded; says which cannot."""
    found = []
    for peer in names.split(","):
        try:
            if peer in LIBRARIES:
                import peer_ops

                peer_ops.load(LIBRARIES[peer])
            elif peer in ("humming", "gemlite"):
                importlib.import_module(peer)
            found.append(peer)
        except (ImportError, OSError) as error:
            print(f"{peer} is left out: {error}")
    return found


def warm_up(seconds: float = 0.3) -> None:
    """Streams memory: a card that has waited for the host to pack a layer runs its first cells some 10 % slow."""
    x = torch.empty(2, 256 << 20, dtype=torch.uint8, device="cuda")
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        for _ in range(20):
            x[0].copy_(x[1])
        torch.cuda.synchronize()


def main(args: argparse.Namespace) -> int:
    chosen = cells(args)
    if args.dry_run:
        for cell in chosen:
            print(cell)
        return 0
    if not torch.cuda.is_available():
        print("bench.suites measures on a GPU, and there is none; --dry-run lists the cells")
        return 2
    from bench import harness

    results = harness.Results(args.out, args.commit)
    facts: dict[str, Any] = {"peers": available_peers(args.peers)}
    begin, wrong, layer = time.monotonic(), [], None
    for cell in chosen:
        if time.monotonic() - begin > args.time_limit:
            print("time limit: the remaining cells were not started")
            break
        try:
            dtype = torch.bfloat16 if cell["suite"].endswith("bf16") else DTYPES[args.dtype]
            if layer is None or (layer.n, layer.k, layer.dtype) != (cell["n"], cell["k"], dtype):
                layer = None
                torch.cuda.empty_cache()
                layer = Layer(cell["n"], cell["k"], dtype)
                contestants(cell, layer, torch.randn(cell["m"], cell["k"], device="cuda").to(dtype), facts["peers"])  # packs for the peers
                warm_up()
            print(measure_cell(cell, layer, args, results, facts), flush=True)
        except Exception as error:  # noqa: BLE001  one cell's failure is reported and counted, the others go on
            torch.cuda.synchronize()
            wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {wrong[-1]}", flush=True)
    results.write()
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0
