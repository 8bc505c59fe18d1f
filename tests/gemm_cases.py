"""Operands, truth and the error rules that the GEMM tests share."""

from __future__ import annotations

import math

import torch
from minfer import reference

DTYPES = (torch.float16, torch.bfloat16)
LAYOUTS = ("tn", "tt", "nn", "nt")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


def name_of(value) -> str:
    """Test ids: torch.float16 -> float16."""
    return str(value).removeprefix("torch.")


def matrix(rows, columns, row_major, dtype, device="cpu", *, scale=1.0, batch=()):
    """Random normal [*batch, rows, columns], contiguous along columns or along rows."""
    shape = (*batch, rows, columns) if row_major else (*batch, columns, rows)
    x = torch.randn(shape, device=device, dtype=torch.float32).mul_(scale).to(dtype)
    return x if row_major else x.transpose(-1, -2)


def operands(m, n, k, dtype, layout, device="cpu", *, scale=1.0, batch=()):
    """A and B in a layout of LAYOUTS."""
    a = matrix(m, k, layout[0] == "t", dtype, device, scale=scale, batch=batch)
    b = matrix(k, n, layout[1] == "t", dtype, device, scale=scale, batch=batch)
    return a, b


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item() if x.numel() else 0.0


def padded(shape, dtype, device, *, margin=2, left=8, right=8):
    """A NaN-filled view of ``shape`` inside a NaN-filled larger tensor; returns (view, whole)."""
    *batch, rows, columns = shape
    whole = torch.full((*batch, rows + 2 * margin, left + columns + right), math.nan, dtype=dtype, device=device)
    return whole[..., margin : margin + rows, left : left + columns], whole


def untouched_outside(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor from ``padded`` still is NaN everywhere but in the view."""
    return int(whole.isnan().sum()) - int(view.isnan().sum()) == whole.numel() - view.numel()


def mismatch(out, truth, peer, magnitude) -> str | None:
    """Why ``out`` is wrong, or None.

    Rule 1, over all: ||out - truth|| / ||truth|| <= 2x that of ``peer``, the same computation by torch, plus one rounding unit.
    Rule 2, per element: within two roundings of truth plus 2^-12 of ``magnitude``, the usual size of a value before the activation
    (a single wrong element among a million would pass rule 1).

    Args:
      out: the result under test. truth: float64. peer: torch's result in out's dtype.
    """
    if out.shape != truth.shape:
        return f"shape {tuple(out.shape)}, expected {tuple(truth.shape)}"
    if out.numel() == 0:
        return None
    # A float32 D still has the accumulation error of 16-bit tensor cores.
    unit = 2.0**-13 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    difference = (out.double() - truth).abs()
    norm = torch.linalg.vector_norm(truth)
    tiny = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    allowed = 2 * torch.linalg.vector_norm(peer.double() - truth) + unit * norm + tiny * math.sqrt(out.numel())
    slack = 2 * unit * truth.abs() + 2.0**-12 * magnitude + tiny - difference
    values = torch.stack((torch.linalg.vector_norm(difference), allowed, norm, slack.min())).tolist()  # one synchronisation
    if not values[0] <= values[1]:  # also where NaN
        return f"error {values[0] / max(values[2], 1e-300):.3g}, allowed {values[1] / max(values[2], 1e-300):.3g}, {bad_elements(difference, slack)}"
    if not values[3] >= 0:
        return bad_elements(difference, slack)
    return None


def bad_elements(difference, slack) -> str:
    bad = (~(slack >= 0)).nonzero()
    if len(bad) == 0:
        return "no single element is far off"
    return f"{len(bad)} elements off, first at {bad[0].tolist()}, last at {bad[-1].tolist()}, largest difference {difference.max().item():.3g}"


def gemm_mismatch(out, a, b, *, c=None, bias=None, alpha=1.0, beta=0.0, activation="none", truth=None) -> str | None:
    """``mismatch`` of a minfer::gemm result; the truth is computed in float64 on out's device."""
    arguments = {"c": c, "bias": bias, "alpha": alpha, "beta": beta, "activation": activation}
    if truth is None:
        truth = reference.gemm(a.double(), b.double(), **arguments)
    peer = reference.gemm(a, b, **arguments, out_dtype=out.dtype)
    magnitude = abs(alpha) * math.sqrt(a.shape[-1]) * rms(a) * rms(b) if alpha != 0 else 0.0
    if c is not None and beta != 0:
        magnitude += abs(beta) * rms(c)
    if bias is not None:
        magnitude += rms(bias)
    return mismatch(out, truth, peer, magnitude)


def gated_mismatch(out, a, b, *, bias=None, activation="silu") -> str | None:
    """``mismatch`` of a minfer::gemm_gated result."""
    truth = reference.gemm_gated(a.double(), b.double(), bias=bias, activation=activation)
    peer = reference.gemm_gated(a, b, bias=bias, activation=activation)
    side = math.sqrt(a.shape[-1]) * rms(a) * rms(b) + (rms(bias) if bias is not None else 0.0)
    return mismatch(out, truth, peer, max(side, side * side))
