"""Operands of a product of 8-bit operands, and every contestant as functions ``fn(set)`` over them: ours and the peers.

A peer is a list of variants; the fastest one whose values are right is the peer's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from minfer.checks.scaled_gemm import BLOCK, FP8, blocks_of
from minfer.planning.plan import ScaledProblem
from minfer.reference.scaled_gemm import scaled_product

from bench import harness
from bench.peers.gemm import Unavailable, Variant


@dataclass
class Operands:
    """``sets`` sets of a problem's tensors. Scales are of A's rows and W's rows, of their blocks, or one number."""

    problem: ScaledProblem
    mode: str
    a: list[torch.Tensor]  # [m, k]
    w: list[torch.Tensor]  # [n, k]
    a_scale: torch.Tensor  # [1], [m] or [m, ceil(k / 128)], of all sets
    w_scale: torch.Tensor  # [1], [n] or [ceil(n / 128), ceil(k / 128)]
    d: list[torch.Tensor]  # [m, n], bfloat16

    @classmethod
    def draw(cls, problem: ScaledProblem, mode: str) -> Operands:
        m, n, k = problem.m, problem.n, problem.k
        sets = harness.sets_for(m * k + n * k + 2 * m * n)

        def codes(rows: int) -> torch.Tensor:
            if problem.dtype == torch.int8:
                return torch.randint(-127, 128, (rows, k), device="cuda", dtype=torch.int8)
            x = torch.empty(rows, k, device="cuda", dtype=FP8)
            for part in x.split(max(1, (1 << 27) // max(k, 1))):
                part.copy_(torch.randn(part.shape, device="cuda") * 64)
            return x

        def scale(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device="cuda") * 0.01 + 0.005

        kb = blocks_of(k)
        shapes = {"tensor": ((1,), (1,)), "row": ((m,), (n,)), "block": ((m, kb), (blocks_of(n), kb))}[mode]
        a_scale, w_scale = scale(*shapes[0]), scale(*shapes[1])
        if mode == "block":  # column by column, at multiples of 16 bytes: what the operators with ``quant`` write
            padded = torch.zeros(kb, -(-m // 4) * 4, device="cuda")
            padded[:, :m] = a_scale.t()
            a_scale = padded.t()[:m]
        d = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        return cls(problem, mode, [codes(m) for _ in range(sets)], [codes(n) for _ in range(sets)], a_scale, w_scale, d)

    @property
    def sets(self) -> int:
        return len(self.a)

    def truth(self) -> torch.Tensor:
        """The result on set 0 in float64."""
        a, w = self.a[0], self.w[0]
        if self.problem.dtype == torch.int8:  # exact: sums of int8 products are integers below 2^53
            return (a.double() @ w.double().t()) * self.a_scale.double().view(-1, 1) * self.w_scale.double()
        return scaled_product(a.double(), w.double().t(), self.a_scale.double(), self.w_scale.double())


# ---- contestants -----------------------------------------------------------------------------------------------------------------


def ours(o: Operands, kernel: str | None = None, fast: bool = False) -> Variant:
    b = [w.t() for w in o.w]
    if o.problem.dtype == torch.int8:
        gemm = torch.ops.minfer.gemm_int8.out
        return Variant("int8", lambda i: gemm(o.a[i], b[i], o.a_scale, o.w_scale, kernel=kernel, out=o.d[i]))
    gemm = torch.ops.minfer.gemm_fp8.out
    return Variant(
        "fast" if fast else "promoted",
        lambda i: gemm(o.a[i], b[i], o.a_scale, o.w_scale, fast_accum=fast, kernel=kernel, out=o.d[i]),
    )


def _fp8_alone(o: Operands, peer: str) -> None:
    if o.problem.dtype != FP8:
        raise Unavailable(f"{peer} multiplies e4m3")


def _torch_scales(o: Operands) -> list[tuple[str, Any, Any, torch.Tensor, torch.Tensor]]:
    """Recipes and scales for torch's scaled_mm. Versions differ in how they want the scales of 128 x 128 blocks to lie: each way is a
    variant, and one that raises or is wrong drops out."""
    from torch.nn.functional import ScalingType

    if o.mode == "tensor":
        return [("", ScalingType.TensorWise, ScalingType.TensorWise, o.a_scale.view(()), o.w_scale.view(()))]
    if o.mode == "row":
        return [("", ScalingType.RowWise, ScalingType.RowWise, o.a_scale.view(-1, 1), o.w_scale.view(1, -1))]
    kb, nb, m = blocks_of(o.problem.k), blocks_of(o.problem.n), o.problem.m
    a_scale = torch.empty(kb, m, device="cuda").copy_(o.a_scale.t()).t()
    padded = torch.zeros(nb, -(-kb // 4) * 4, device="cuda")
    padded[:, :kb] = o.w_scale
    recipes = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    found = [("padded", *recipes, a_scale, padded[:, :kb].t()), ("dense", *recipes, a_scale, o.w_scale.t())]
    return found + ([("whole", *recipes, a_scale, padded.t())] if kb % 4 else [])


def _scaled_mm(o: Operands, fast: bool) -> list[Variant]:
    _fp8_alone(o, "scaled_mm")
    try:
        from torch.nn.functional import scaled_mm
    except ImportError as error:
        raise Unavailable(str(error)) from error
    b = [w.t() for w in o.w]
    return [
        Variant(
            f"{'fast' if fast else 'promoted'}{name and '_' + name}",
            lambda i, s=(sa, ra, sb, rb): scaled_mm(o.a[i], b[i], *s, output_dtype=torch.bfloat16, use_fast_accum=fast),
            into_d=False,
        )
        for name, ra, rb, sa, sb in _torch_scales(o)
    ]


def cublaslt(o: Operands) -> list[Variant]:
    """torch's scaled_mm with its promoted sums: cuBLASLt, and where torch prefers it CUTLASS."""
    return _scaled_mm(o, False)


def cublaslt_fast(o: Operands) -> list[Variant]:
    """torch's scaled_mm with fast accumulation."""
    if o.mode == "block":
        raise Unavailable("blocks are always promoted")
    return _scaled_mm(o, True)


def int_mm(o: Operands) -> list[Variant]:
    """torch._int_mm, which gives the int32 sums and leaves the scales to another kernel, whose time is not counted here."""
    if o.problem.dtype != torch.int8:
        raise Unavailable("_int_mm multiplies int8")
    b = [w.t() for w in o.w]
    sums = [torch.empty(d.shape, device="cuda", dtype=torch.int32) for d in o.d]

    def multiply(i: int) -> torch.Tensor:
        torch._int_mm(o.a[i], b[i], out=sums[i])
        return sums[i]

    return [Variant("sums", multiply, into_d=False)]


def _peer(name: str):
    try:
        import peer_ops

        if name.startswith(("_", "fbgemm")):
            peer_ops.load(name)
            return peer_ops
        return __import__(name)
    except (ImportError, OSError) as error:
        raise Unavailable(f"not installed ({error})") from error


def deepgemm(o: Operands) -> list[Variant]:
    """DeepGEMM's kernel of 1 x 128 by 128 x 128 blocks. The scales lie as it wants them, so that no other kernel moves them."""
    _fp8_alone(o, "DeepGEMM")
    if o.mode != "block":
        raise Unavailable("DeepGEMM multiplies blocks")
    deep_gemm = _peer("deep_gemm")
    return [Variant("nt", lambda i: deep_gemm.fp8_gemm_nt((o.a[i], o.a_scale), (o.w[i], o.w_scale), o.d[i], disable_ue8m0_cast=True))]


def vllm(o: Operands) -> list[Variant]:
    """vLLM's CUTLASS kernels, where the library has them."""
    _peer("_C_stable_libtorch")
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        raise Unavailable("this build of vLLM's library has no cutlass_scaled_mm")
    b, run = [w.t() for w in o.w], torch.ops._C.cutlass_scaled_mm
    sa = o.a_scale if o.mode == "block" else o.a_scale.view(-1, 1)
    sb = o.w_scale.t() if o.mode == "block" else o.w_scale.view(1, -1)
    return [Variant("cutlass", lambda i: run(o.d[i], o.a[i], b[i], sa, sb, None))]


def fbgemm(o: Operands) -> list[Variant]:
    """FBGEMM's CUTLASS kernels."""
    _fp8_alone(o, "FBGEMM")
    _peer("fbgemm_genai")
    name = {"tensor": "f8f8bf16", "row": "f8f8bf16_rowwise", "block": "f8f8bf16_blockwise"}[o.mode]
    if o.mode == "tensor" or not hasattr(torch.ops.fbgemm, name):
        raise Unavailable(f"this build of FBGEMM has no {name} for these scales")
    run = getattr(torch.ops.fbgemm, name)
    if o.mode == "row":
        return [Variant("rowwise", lambda i: run(o.a[i], o.w[i], o.a_scale, o.w_scale), into_d=False)]
    return [Variant("blockwise", lambda i: run(o.a[i], o.w[i], o.a_scale, o.w_scale, 1, BLOCK, BLOCK), into_d=False)]


PEERS: dict[str, Callable[[Operands], list[Variant]]] = {
    "cublaslt": cublaslt,
    "cublaslt_fast": cublaslt_fast,
    "int_mm": int_mm,
    "deepgemm": deepgemm,
    "vllm": vllm,
    "fbgemm": fbgemm,
}
