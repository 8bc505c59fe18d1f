"""Operands, truth and the error rules that the GEMM tests share."""

from __future__ import annotations

import math

import minfer
import torch
from minfer import reference

DTYPES = (torch.float16, torch.bfloat16)
LAYOUTS = ("tn", "tt", "nn", "nt")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "relu2")


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


def placed(rows, columns, row_major, dtype, device="cuda", *, offset=0, gap=0, batch=()):
    """Random [*batch, rows, columns] whose lines have `gap` NaNs between them, from `offset` on in NaN-filled memory."""
    lines, extent = (rows, columns) if row_major else (columns, rows)
    planes, pitch = math.prod(batch), extent + gap
    memory = torch.full((offset + planes * lines * pitch + 24,), math.nan, dtype=dtype, device=device)
    x = memory[offset : offset + planes * lines * pitch].view(*batch, lines, pitch)[..., :extent]
    x.copy_(torch.randn(x.shape, device=device))
    return x if row_major else x.transpose(-1, -2)


def untouched_outside(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor from ``padded`` still is NaN everywhere but in the view."""
    return int(whole.isnan().sum()) - int(view.isnan().sum()) == whole.numel() - view.numel()


class Expected:
    """The truth of one call and torch's error against it; ``mismatch`` judges results.

    Args:
      truth: float64.
      peer: gives torch's result of the same computation in a dtype.
      magnitude: the usual size of a value before the activation, times the activation's slope where that is not about 1 or less: a number,
        or one of each element.

    Attributes:
      least_unit: the least rounding unit to judge by, for kernels that may leave operands unrounded which the truth has rounded: that
        shows in a D of more digits than the operands.
    """

    def __init__(self, truth, peer, magnitude):
        self.truth, self.magnitude, self.least_unit = truth, magnitude, 0.0
        self.norm = torch.linalg.vector_norm(truth)
        self._peer, self._peer_error = peer, {}

    def peer_error(self, dtype):
        if dtype not in self._peer_error:
            self._peer_error[dtype] = torch.linalg.vector_norm(self._peer(dtype).double() - self.truth)
        return self._peer_error[dtype]

    def mismatch(self, out) -> str | None:
        """Why ``out`` is wrong, or None.

        Rule 1, over all: ||out - truth|| / ||truth|| <= 2x that of torch, plus one rounding unit.
        Rule 2, per element: within two roundings of truth plus 2^-12 of ``magnitude`` (a single wrong element among a million would
        pass rule 1).
        """
        if out.shape != self.truth.shape:
            return f"shape {tuple(out.shape)}, expected {tuple(self.truth.shape)}"
        if out.numel() == 0:
            return None
        # A float32 D still has the accumulation error of 16-bit tensor cores.
        unit = max(2.0**-13 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2, self.least_unit)
        tiny = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
        difference = (out.double() - self.truth).abs()
        error = torch.linalg.vector_norm(difference)
        allowed = 2 * self.peer_error(out.dtype) + unit * self.norm + tiny * math.sqrt(out.numel())
        slack = self.truth.abs().mul_(2 * unit).add_(2.0**-12 * self.magnitude + tiny).sub_(difference)
        error, allowed, norm, least = torch.stack((error, allowed, self.norm, slack.min())).tolist()  # one synchronisation
        if not error <= allowed:  # also where NaN
            return f"error {error / max(norm, 1e-300):.3g}, allowed {allowed / max(norm, 1e-300):.3g}, {bad_elements(difference, slack)}"
        if not least >= 0:
            return bad_elements(difference, slack)
        return None


def bad_elements(difference, slack) -> str:
    bad = (~(slack >= 0)).nonzero()
    if len(bad) == 0:
        return "no single element is far off"
    return (
        f"{len(bad)} elements off, first at {bad[0].tolist()}, last at {bad[-1].tolist()}, largest difference {difference.max().item():.3g}"
    )


def gemm_expected(a, b, *, c=None, bias=None, alpha=1.0, beta=0.0, activation="none") -> Expected:
    """What minfer::gemm should give; computed on a's device."""
    arguments = {"c": c, "bias": bias, "alpha": alpha, "beta": beta, "activation": activation}
    magnitude = abs(alpha) * math.sqrt(a.shape[-1]) * rms(a) * rms(b) if alpha != 0 else 0.0
    if c is not None and beta != 0:
        magnitude += abs(beta) * rms(c)
    if bias is not None:
        magnitude += rms(bias)
    truth = reference.gemm(a.double(), b.double(), **arguments)
    if activation == "relu2":
        magnitude = magnitude * (1 + 2 * truth.sqrt())
    return Expected(truth, lambda dtype: reference.gemm(a, b, **arguments, out_dtype=dtype), magnitude)


def gemm_mismatch(out, a, b, **epilogue) -> str | None:
    """Why ``out`` is not the minfer::gemm of these arguments, or None."""
    return gemm_expected(a, b, **epilogue).mismatch(out)


def gated_magnitude(a, b, *, bias=None, alpha=1.0, activation="silu"):
    """``Expected.magnitude`` of a gated GEMM."""
    side = abs(alpha) * math.sqrt(a.shape[-1]) * rms(a) * rms(b) + (rms(bias) if bias is not None else 0.0)
    if activation != "relu2":
        return max(side, side * side)
    gate, up = minfer.unpack_gate_up(reference.gemm(a.double(), b.double(), bias=bias, alpha=alpha).t())
    gate = gate.relu()
    return max(side, side * side) + side * (2 * gate * up.abs() + gate.square()).t()


def gated_mismatch(out, a, b, *, bias=None, activation="silu") -> str | None:
    """Why ``out`` is not the minfer::gemm_gated of these arguments, or None."""
    arguments = {"bias": bias, "activation": activation}
    truth = reference.gemm_gated(a.double(), b.double(), **arguments)
    return Expected(truth, lambda dtype: reference.gemm_gated(a, b, **arguments), gated_magnitude(a, b, **arguments)).mismatch(out)
