"""Operands of a product of 8-bit activations and int4 weights, and every contestant as functions ``fn(set)`` over them.

A peer is a list of variants; the fastest one whose values are right is the peer's time. The weight's scales are numbers that e4m3 has,
which is how vLLM and FBGEMM keep those of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import minfer
import torch
from minfer.planning.plan import W4A8Problem

from bench import harness
from bench.peers.gemm import Unavailable, Variant
from bench.peers.scaled_gemm import _peer

FP8 = torch.float8_e4m3fn
GROUP = 128


@dataclass
class Operands:
    """``sets`` sets of a problem's tensors; sets are copies of the first weight, which is only timed there."""

    problem: W4A8Problem
    a: list[torch.Tensor]  # [m, k], e4m3 or int8
    a_scale: torch.Tensor  # [m, 1], of all sets
    codes: torch.Tensor  # uint8 [n, k]
    packed: list[torch.Tensor]
    scales: list[torch.Tensor]  # bfloat16 [k / 128, n], numbers of e4m3
    d: list[torch.Tensor]  # [m, n], bfloat16

    @classmethod
    def draw(cls, problem: W4A8Problem) -> Operands:
        m, n, k = problem.m, problem.n, problem.k
        sets = harness.sets_for(m * k + n * k // 2 + 2 * m * n)

        def activations() -> torch.Tensor:
            if problem.dtype == torch.int8:
                return torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8)
            return (torch.randn(m, k, device="cuda") * 64).to(FP8)

        codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        packed = minfer.w4a16_pack(codes)
        scales = (torch.rand(-(-k // GROUP), n, device="cuda") + 0.5).to(FP8).bfloat16()
        a_scale = torch.rand(m, 1, device="cuda") * 0.01 + 0.005
        d = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        weights = [(packed.clone(), scales.clone()) for _ in range(sets)]
        return cls(problem, [activations() for _ in range(sets)], a_scale, codes, [w for w, _ in weights], [s for _, s in weights], d)

    @property
    def sets(self) -> int:
        return len(self.a)

    def weight(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[n, k]."""
        by_k = self.scales[0].to(dtype).t().repeat_interleave(GROUP, 1)[:, : self.problem.k]
        return (self.codes.to(dtype) - 8) * by_k

    def truth(self) -> torch.Tensor:
        """The result on set 0 in float64."""
        return (self.a[0].double() @ self.weight().t()) * self.a_scale.double()


# ---- contestants -----------------------------------------------------------------------------------------------------------------


def ours(o: Operands, kernel: str | None = None) -> Variant:
    gemm = torch.ops.minfer.w4a8_gemm.out
    return Variant("w4a8", lambda i: gemm(o.a[i], o.a_scale, o.packed[i], o.scales[i], kernel=kernel, out=o.d[i]))


def w4a16(o: Operands) -> list[Variant]:
    """Our own product of the same weight and activations in 16 bits."""
    a, gemm = [(x.float() * o.a_scale).bfloat16() for x in o.a], torch.ops.minfer.w4a16_gemm.out
    return [Variant("w4a16", lambda i: gemm(a[i], o.packed[i], o.scales[i], out=o.d[i]))]


def fp8(o: Operands) -> list[Variant]:
    """Our own product of e4m3 weights with a scale for each row: twice the weight's bytes."""
    if o.problem.dtype != FP8:
        raise Unavailable("gemm_fp8 multiplies e4m3")
    w, w_scale, gemm = *_dense(o), torch.ops.minfer.gemm_fp8.out
    b = [x.t() for x in w]
    return [Variant("fp8", lambda i: gemm(o.a[i], b[i], o.a_scale, w_scale, out=o.d[i]))]


def _dense(o: Operands) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The weight in e4m3, rounded, with a scale for each row."""
    w = o.weight(torch.float32)
    scale = w.abs().amax(1).clamp(min=1e-6) / 448.0
    codes = (w / scale[:, None]).to(FP8)
    return [codes.clone() for _ in range(o.sets)], scale


def cublaslt(o: Operands) -> list[Variant]:
    """torch's scaled_mm of e4m3 weights with a scale for each row, with promoted sums."""
    if o.problem.dtype != FP8:
        raise Unavailable("scaled_mm multiplies e4m3")
    try:
        from torch.nn.functional import ScalingType, scaled_mm
    except ImportError as error:
        raise Unavailable(str(error)) from error
    (w, scale), rows = _dense(o), ScalingType.RowWise
    b, w_scale = [x.t() for x in w], scale.view(1, -1)
    run = lambda i: scaled_mm(o.a[i], b[i], o.a_scale, rows, w_scale, rows, output_dtype=torch.bfloat16)  # noqa: E731
    return [Variant("row", run, into_d=False)]


def _signed(o: Operands) -> torch.Tensor:
    """Codes as numbers of 4 bits in two's complement, uint8 [n, k]."""
    return o.codes ^ 8


def _reordered(o: Operands) -> None:
    """Both CUTLASS kernels' weights go through cutlass::reorder_tensor, which writes behind the weight where k is an odd number
    of groups, as compute-sanitizer shows on 6144 x 8832."""
    if o.problem.k % 256 != 0:
        raise Unavailable("the reordering of its weights writes out of bounds where k is no multiple of 256")


def vllm(o: Operands) -> list[Variant]:
    """vLLM's CUTLASS kernel, with the schedule that it chooses."""
    if o.problem.dtype != FP8:
        raise Unavailable("vLLM's kernel multiplies e4m3")
    _peer("_C_stable_libtorch")
    _reordered(o)
    ops = torch.ops._C
    if not hasattr(ops, "cutlass_w4a8_mm"):
        raise Unavailable("this build of vLLM's library has no cutlass_w4a8_mm")
    k_words = torch.zeros(o.problem.n, o.problem.k // 8, device="cuda", dtype=torch.int32)
    signed = _signed(o).int().view(o.problem.n, -1, 8)
    for j in range(8):
        k_words |= signed[:, :, j] << 4 * j
    w = ops.cutlass_encode_and_reorder_int4b(k_words.t())  # [k / 8, n], column by column
    s = ops.cutlass_pack_scale_fp8(o.scales[0].to(FP8).contiguous())
    ones = torch.ones(o.problem.n, 1, device="cuda")
    forms = [(w.t().clone().t(), s.clone()) for _ in range(o.sets)]
    run = lambda i: ops.cutlass_w4a8_mm(o.a[i], *forms[i], GROUP, ones, o.a_scale, torch.bfloat16, None)  # noqa: E731
    return [Variant("cutlass", run, into_d=False)]


def fbgemm(o: Operands) -> list[Variant]:
    """FBGEMM's CUTLASS kernel of preshuffled weights."""
    if o.problem.dtype != FP8:
        raise Unavailable("FBGEMM's kernel multiplies e4m3")
    _peer("fbgemm_genai")
    _reordered(o)
    ops = torch.ops.fbgemm
    if not hasattr(ops, "f8i4bf16_shuffled"):
        raise Unavailable("this build of FBGEMM has no f8i4bf16_shuffled")
    signed = _signed(o)
    pairs = (signed[:, ::2] | signed[:, 1::2] << 4).view(torch.int8).contiguous()
    w, s = ops.preshuffle_i4(pairs, o.scales[0].to(FP8).contiguous())
    ones, rows = torch.ones(o.problem.n, device="cuda"), o.a_scale.view(-1)
    forms = [(w.clone(), s.clone()) for _ in range(o.sets)]
    return [Variant("shuffled", lambda i: ops.f8i4bf16_shuffled(o.a[i], forms[i][0], rows, ones, forms[i][1]), into_d=False)]


PEERS: dict[str, Callable[[Operands], list[Variant]]] = {
    "ours:w4a16": w4a16,
    "ours:fp8": fp8,
    "cublaslt": cublaslt,
    "vllm": vllm,
    "fbgemm": fbgemm,
}
# Whose operands are rounded once more: to 16 bits, to e4m3, or, by the last two, each weight times its group's scale to e4m3.
ROUNDED = ("ours:w4a16", "ours:fp8", "cublaslt", "vllm", "fbgemm")
