"""Dense GEMM and its epilogues: the linear layers of a transformer block, a decode step, and a shape that nothing divides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import minfer

from ....measure.benchmarking import bytes_of
from ..case import Case, Operands, Peer, Work
from ..sizes import Sizes

FAMILY = "dense GEMM"


def gemm_work(operands: object, m: int, n: int, k: int, *, n_out: int | None = None) -> Work:
    """Every operand is read once and a 16-bit result written."""
    return Work(bytes_of(operands) + 2 * m * (n if n_out is None else n_out), 2.0 * m * n * k)


def _swiglu(s: Operands, dtype: torch.dtype) -> Tensor:
    gate, up = F.linear(s["x"].to(dtype), s["stacked"].to(dtype)).chunk(2, dim=-1)  # one GEMM, as serving engines do it
    return F.silu(gate) * up


def cases(sizes: Sizes) -> list[Case]:
    hidden, intermediate, tokens, normal = sizes.hidden, sizes.intermediate, sizes.tokens, sizes.normal

    def case(name: str, m: int, n: int, k: int, ours, truth, peer: Peer, extra: dict[str, tuple[int, ...]] | None = None) -> Case:
        def make() -> Operands:
            own = {"x": normal(m, k), "w": normal(n, k, scale=k**-0.5)}
            return own | {name: normal(*shape) for name, shape in (extra or {}).items()}

        return Case(FAMILY, name, f"{m} x {n} x {k}", make, ours, truth, (peer,), lambda s: gemm_work(s, m, n, k), sizes.dtype)

    def plain(name: str, m: int, n: int, k: int) -> Case:
        return case(
            name,
            m,
            n,
            k,
            lambda s: minfer.gemm(s["x"], s["w"].t()),
            lambda s: minfer.reference.gemm(s["x"].double(), s["w"].t().double()),
            Peer("torch.mm", lambda s: torch.mm(s["x"], s["w"].t())),
        )

    def gated_operands() -> Operands:
        gate, up = (normal(intermediate, hidden, scale=hidden**-0.5) for _ in range(2))
        return {"x": normal(tokens, hidden), "packed": minfer.pack_gate_up(gate, up)}

    def stacked(s: Operands) -> Operands:
        return {"x": s["x"], "stacked": torch.cat(minfer.unpack_gate_up(s["packed"]))}

    return [
        plain("linear", tokens, hidden, hidden),
        plain("linear, one token", 1, hidden, hidden),
        case(
            "bias + gelu",
            tokens,
            intermediate,
            hidden,
            lambda s: minfer.gemm(s["x"], s["w"].t(), bias=s["bias"], activation="gelu"),
            lambda s: minfer.reference.gemm(s["x"].double(), s["w"].t().double(), bias=s["bias"], activation="gelu"),
            Peer("F.gelu(F.linear)", lambda s: F.gelu(F.linear(s["x"], s["w"], s["bias"])), compiled=True),
            {"bias": (intermediate,)},
        ),
        case(
            "0.5 A.B + 2 C",
            tokens,
            hidden,
            hidden,
            lambda s: minfer.gemm(s["x"], s["w"].t(), c=s["c"], alpha=0.5, beta=2.0),
            lambda s: minfer.reference.gemm(s["x"].double(), s["w"].t().double(), c=s["c"], alpha=0.5, beta=2.0),
            Peer("torch.addmm", lambda s: torch.addmm(s["c"], s["x"], s["w"].t(), alpha=0.5, beta=2.0)),
            {"c": (tokens, hidden)},
        ),
        Case(
            FAMILY,
            "SwiGLU",
            f"{tokens} x {2 * intermediate} x {hidden}",
            gated_operands,
            lambda s: minfer.gemm_gated(s["x"], s["packed"].t()),
            lambda s: _swiglu(stacked(s), torch.float64),
            (Peer("F.silu(gate) * up", lambda s: _swiglu(s, sizes.dtype), compiled=True),),
            lambda s: gemm_work(s, tokens, 2 * intermediate, hidden, n_out=intermediate),
            sizes.dtype,
            peer_operands=stacked,
        ),
        plain("odd shape", tokens - 1, hidden - 95, hidden // 2 + 3),
    ]
