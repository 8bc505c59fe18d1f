"""What batch-invariant plans assume of kernels: those whose ``sums`` have one name give the same bits, for the same ranges of k.

Each function runs all kernels of the build that compute one problem, and returns how many numbers of each differ from those of the first.
Operands are of very different sizes along k, so that any other order of addition shows.
"""

from __future__ import annotations

import minfer
import torch
from torch import Tensor

from . import cases

FORMS = (("int4", 128), ("int4", 32), ("nvfp4", 16), ("mxfp4", 32), ("nf4", 64), ("int8", 128), ("fp8_e4m3", 128))
M, N, K = 300, 512, 4096


def _uneven(draw: cases.Draw, k: int) -> Tensor:
    return draw.integers(-6, 7, 1, k).float().exp2()


def _names(family: str, sums: str, element: str, **fields: object) -> list[str]:
    found = [x for x in minfer.kernels(family) if x["sums"] == sums and x["ab_type"] == element and x["compiled"]]
    return [x["name"] for x in found if all(x[name] == value for name, value in fields.items())]


def _compared(outputs: dict[str, Tensor]) -> dict[str, int]:
    first = next(iter(outputs.values()))
    return {name: cases.differing((d,), (first,)) for name, d in outputs.items()}


def dense(dtype: torch.dtype, splits: int) -> dict[str, int]:
    """Kernels of all tiles, swapped and not; in one range also those whose CTAs continue the sums of others, of tiles that are divided."""
    draw = cases.Draw("cuda", dtype, 5)
    a = (torch.randn(M, K, device="cuda", generator=draw.generator) * _uneven(draw, K)).to(dtype)
    b = draw.normal(N, K, scale=0.1)
    launch = "decomposition=persistent" if splits == 1 else f"decomposition=split_k,splits={splits}"
    element = "bf16" if dtype == torch.bfloat16 else "f16"
    names = _names("gemm", "wgmma16", element, a_major="k", b_major="k", invariant_only=False)
    kernels = [f"{x}@{launch}" for x in names]
    if splits == 1:
        kernels += [f"{x}@decomposition=stream_k" for x in _names("gemm", "wgmma16", element, invariant_only=True)]
    return _compared({x: minfer.gemm(a, b.t(), kernel=x, out_dtype=torch.float32) for x in kernels})


def scaled(dtype: torch.dtype, mode: str, splits: int = 1) -> dict[str, int]:
    """Operands of 8 bits, in `splits` ranges of k: of a CTA each, and in place. mode: "rows", "blocks" or "fast"."""
    draw = cases.Draw("cuda", torch.bfloat16, 6)
    a, b = cases.codes_of(draw, dtype, M, K), cases.codes_of(draw, dtype, N, K)
    shapes = ((M, K // 128), (N // 128, K // 128)) if mode == "blocks" else ((M,), (N,))
    scales = [draw.uniform(*shape, low=1e-3, high=1.0) for shape in shapes]
    op, options = (minfer.gemm_fp8, {"fast_accum": mode == "fast"}) if dtype == cases.FP8 else (minfer.gemm_int8, {})
    names = _names("scaled_gemm", "wgmma8", "e4m3" if dtype == cases.FP8 else "s8")
    launch = "@decomposition=persistent" if splits == 1 else f"@decomposition=split_k,splits={splits}"
    in_place = {x["name"] for x in minfer.kernels("scaled_gemm") if x["in_place_ranges"]}
    kernels = [x + launch for x in names] + [f"{x}@decomposition=ranges,splits={splits}" for x in names if x in in_place]
    return _compared({x: op(a, b.t(), *scales, out_dtype=torch.float32, kernel=x, **options) for x in kernels})


def fragments(form: str, group_size: int, splits: int = 1) -> dict[str, int]:
    """Weights that are dequantised and scaled before they are multiplied, in `splits` ranges of k: of a CTA each, or, by kernels that have
    them in place, of one CTA.

    The last is the dense product of the dequantised weight, where that has the very numbers that kernels multiply: a code book's entries
    are rounded before they are scaled (cpp/src/quantized_gemm/dequantize.cuh)."""
    draw = cases.Draw("cuda", torch.bfloat16, 7)
    x = (torch.randn(M, K, device="cuda", generator=draw.generator) * _uneven(draw, K)).to(draw.dtype)
    operands, options = cases.quantised_weight(draw, N, K, form, group_size)
    bits = 8 if form in ("int8", "fp8_e4m3") else 4
    op, dequantize = cases.operator_of(f"w{bits}a16_gemm"), cases.operator_of(f"w{bits}a16_dequantize")
    names = [y for y in minfer.kernels("w4a16") if group_size % max(y["group_multiple"], 1) == 0]
    names = sorted({y["name"] for y in names} & set(_names("w4a16", "wgmma16", "bf16", b_format=form)))
    launch = "decomposition=persistent" if splits == 1 else f"decomposition=split_k,splits={splits}"
    found = {y: op(x, *operands, kernel=f"{y}@{launch}", **options) for y in names}
    ranges = f"decomposition=ranges,splits={splits}"
    in_place = {y["name"] for y in minfer.kernels("w4a16") if y["in_place_ranges"]}
    found |= {f"{y} in place": op(x, *operands, kernel=f"{y}@{ranges}", **options) for y in names if y in in_place}
    if form == "nf4":
        return _compared(found)
    of_type = {"out_dtype": draw.dtype} if bits == 4 else {}  # of 8 bits: the scales' type
    weight = dequantize(*operands, n=N, k=K, **of_type, **options)
    dense_kernel = _names("gemm", "wgmma16", "bf16", a_major="k", b_major="k")[0]
    found["dense"] = minfer.gemm(x, weight.t(), kernel=f"{dense_kernel}@{launch}")
    return _compared(found)


def experts(element: str) -> dict[str, int]:
    """Grouped kernels of 16-bit weights, each over the same few experts with uneven numbers of rows."""
    draw = cases.Draw("cuda", torch.bfloat16 if element == "bf16" else torch.float16, 8)
    number, counts = 4, (1, 17, 0, 282)
    x, w = draw.normal(M, K), draw.normal(number, N, K, scale=0.1)
    offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    return _compared({y: minfer.grouped_gemm(x, w.mT, offsets, kernel=y) for y in _names("moe", "wgmma16", element)})
