"""Operands, the definition and the calls that cannot be right, of the grouped GEMM tests."""

from __future__ import annotations

import math

import torch
from minfer.reference import grouped_gemm as reference_moe

from tests.gemm.cases import Expected, rms

LAYOUTS = ("halves", "alternating", "blocks")
# experts, rows, n, k
SHAPES = ((1, 5, 64, 64), (8, 100, 192, 200), (5, 700, 336, 512), (64, 300, 128, 1024), (3, 1000, 1040, 72), (300, 2000, 96, 128))


def counts_of(experts: int, rows: int, kind: str = "ragged") -> torch.Tensor:
    """Rows of each expert, int64, that sum up to ``rows``."""
    if kind == "one":  # everything to the last but one
        counts = torch.zeros(experts, dtype=torch.int64)
        counts[max(experts - 2, 0)] = rows
        return counts
    weight = torch.rand(experts) if kind == "even" else torch.rand(experts).pow(3) * (torch.rand(experts) > 0.2)
    counts = (weight / weight.sum().clamp(min=1e-6) * rows).long()
    counts[int(torch.randint(experts, ()))] += rows - counts.sum()
    return counts


def offsets_of(counts: torch.Tensor, device="cpu") -> torch.Tensor:
    return counts.cumsum(0).to(torch.int32).to(device)


def make_case(experts, rows, n, k, dtype, device, *, kind="ragged", gather=False, row_scale=False, bias=False, source_rows=77):
    """args and kwargs of a call; weights are views of [experts, n, k]."""
    randn = lambda *shape: torch.randn(shape, device=device).to(dtype)  # noqa: E731
    b = (torch.randn(experts, n, k, device=device) / max(k, 1) ** 0.5).to(dtype).mT
    a = randn(source_rows if gather else rows, k)
    kwargs = {}
    if gather:
        kwargs["gather"] = torch.randint(0, source_rows, (rows,), device=device, dtype=torch.int32)
    if row_scale:
        kwargs["row_scale"] = torch.rand(rows, device=device)
    if bias:
        kwargs["bias"] = randn(experts, n)
    return (a, b, offsets_of(counts_of(experts, rows, kind), device)), kwargs


def expected(args, kwargs) -> Expected:
    """Float64 truth of a call, with the same products of 16-bit operands by torch as the yardstick."""
    a, b, offsets = args
    upcast = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in kwargs.items()}
    upcast.pop("kernel", None)
    truth = reference_moe.grouped_gemm(a.double(), b.double(), offsets, **upcast)

    def peer(dtype):
        """Each expert's rows by torch in 16 bits, the epilogue in float32."""
        rows = a if kwargs.get("gather") is None else a.index_select(0, kwargs["gather"].long())
        out = torch.zeros(truth.shape, dtype=dtype, device=a.device)
        begin = 0
        for expert, end in enumerate(offsets.tolist()):
            if end > begin:
                y = (rows[begin:end].to(dtype) @ b[expert].to(dtype)).float()
                y = y if kwargs.get("alpha") is None else y * kwargs["alpha"][expert]
                y = y if kwargs.get("bias") is None else y + kwargs["bias"][expert].float()
                scale = kwargs["row_scale"][begin:end] if kwargs.get("row_scale") is not None else None
                rest = (kwargs.get("activation", "none"), kwargs.get("gated", False), kwargs.get("gate_layout", "halves"))
                out[begin:end] = reference_moe.epilogue(y, scale, *rest).to(dtype)
            begin = end
        return out

    return Expected(truth, peer, max(1.0, rms(truth)))


def bad_calls(device="cpu"):
    """name -> (what the message must say, args, kwargs) of calls that cannot be right."""
    (a, b, offsets), _ = make_case(4, 10, 32, 16, torch.float16, device)
    f32 = torch.ones(10, device=device)
    return {
        "a rank": ("a must be \\[rows, k\\]", (a[0], b, offsets), {}),
        "a type": ("a must be float16 or bfloat16", (a.float(), b, offsets), {}),
        "b rank": ("b must be \\[experts, k, n\\]", (a, b[0], offsets), {}),
        "b k": ("with k = 16", (a, b[:, :8], offsets), {}),
        "b type": ("b must be", (a, b.bfloat16(), offsets), {}),
        "offsets size": ("offsets must be \\[4\\]", (a, b, offsets[:3]), {}),
        "offsets type": ("offsets must be", (a, b, offsets.long()), {}),
        "bias size": ("bias must be \\[4, 32\\]", (a, b, offsets), {"bias": a.new_zeros(4, 31)}),
        "gather type": ("gather must be", (a, b, offsets), {"gather": torch.zeros(10, device=device, dtype=torch.int64)}),
        "row_scale size": ("row_scale must be \\[10\\]", (a, b, offsets), {"row_scale": f32[:9]}),
        "row_scale type": ("row_scale must be", (a, b, offsets), {"row_scale": f32.half()}),
        "activation": ("activation must be one of", (a, b, offsets), {"activation": "swish"}),
        "swigluoai": ("needs gated", (a, b, offsets), {"activation": "swigluoai"}),
        "gate_layout": ("gate_layout must be", (a, b, offsets), {"gated": True, "gate_layout": "thirds"}),
        "gate_layout alone": ("gate_layout alternating needs gated", (a, b, offsets), {"gate_layout": "alternating"}),
        "launch options": (
            "kernel option 'splits' is not known; expected gather_first",
            (a, b, offsets),
            {"kernel": "moe_sm80_f16_tn_64x32x64_1x1x1_multistage_swap@splits=2"},
        ),
        "odd n": ("even number of columns", (a, b[:, :, :31], offsets), {"gated": True}),
        "blocks": ("multiple of 16 columns", (a, b[:, :, :24], offsets), {"gated": True, "gate_layout": "blocks"}),
        "kernel": ("is not in the registry", (a, b, offsets), {"kernel": "moe_sm90_f16_tn_1x1x1"}),
        "out size": ("out must be \\[10, 32\\]", (a, b, offsets), {"out": a.new_empty(10, 31)}),
        "out type": ("out must be", (a, b, offsets), {"out": torch.empty(10, 32, device=device)}),
    }


def nan_filled(rows: int, columns: int, dtype, device, *, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(view [rows, columns], whole) in NaN-filled memory."""
    whole = torch.full((rows + 4, columns + padding), math.nan, dtype=dtype, device=device)
    return whole[2 : 2 + rows, :columns], whole


def make_layer(experts, tokens, top_k, hidden, inter, dtype, device, *, biases=False):
    """args and kwargs of moe_ffn; each token's experts differ."""
    randn = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    ids = torch.rand(tokens, experts, device=device).argsort(dim=-1)[:, :top_k].to(torch.int32).contiguous()
    weights = torch.rand(tokens, top_k, device=device)
    w13 = (randn(experts, 2 * inter, hidden) / max(hidden, 1) ** 0.5).to(dtype)
    w2 = (randn(experts, hidden, inter) / max(inter, 1) ** 0.5).to(dtype)
    kwargs = dict(b13=randn(experts, 2 * inter).to(dtype), b2=randn(experts, hidden).to(dtype)) if biases else {}
    return (randn(tokens, hidden).to(dtype), w13, w2, weights / weights.sum(-1, keepdim=True), ids), kwargs


def layer_mismatch(out, args, kwargs) -> str | None:
    """Why ``out`` is not moe_ffn's, or None: twice the error of the reference, which rounds once between the products, is allowed."""
    x, w13, w2, weights, ids = args
    up = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}
    truth = reference_moe.moe_ffn(x.double(), w13.double(), w2.double(), weights.double(), ids, **up)
    norm = torch.linalg.vector_norm(truth)
    error = torch.linalg.vector_norm(out.double() - truth) / norm.clamp(min=1e-30)
    peer = torch.linalg.vector_norm(reference_moe.moe_ffn(*args, **kwargs).double() - truth) / norm.clamp(min=1e-30)
    limit = 2 * peer + torch.finfo(x.dtype).eps
    if out.shape != truth.shape or not bool(error <= limit):
        return f"shape {tuple(out.shape)}, error {float(error):.3g}, allowed {float(limit):.3g}"
    return None
