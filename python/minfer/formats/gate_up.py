"""Weight layouts that operators take."""

from __future__ import annotations

import torch

GATE_BLOCK = 8  # rows of gate, then rows of up: one 16-byte store of D per block and row of A


def join_gate_up(gate: torch.Tensor, up: torch.Tensor, gate_layout: str) -> torch.Tensor:
    """Rows of gate and of up, of one shape, in an order: "halves", "alternating", or "blocks" of 8 and 8."""
    if gate_layout == "halves":
        return torch.cat((gate, up))
    block = 1 if gate_layout == "alternating" else GATE_BLOCK
    blocks = (gate.shape[0] // block, block)
    return torch.stack((gate.unflatten(0, blocks), up.unflatten(0, blocks)), dim=1).flatten(0, 2)


def split_gate_up(x: torch.Tensor, gate_layout: str, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of ``x``, which has both along ``dim``; the inverse of :func:`join_gate_up`."""
    if gate_layout == "halves":
        return x.chunk(2, dim)
    dim, block = dim % x.dim(), 1 if gate_layout == "alternating" else GATE_BLOCK
    blocks = x.unflatten(dim, (x.shape[dim] // (2 * block), 2, block))
    return blocks.select(dim + 1, 0).flatten(dim, dim + 1), blocks.select(dim + 1, 1).flatten(dim, dim + 1)


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleaves the gate and up projections of a gated MLP for :func:`minfer.gemm_gated`, in blocks of 8 rows.

    The epilogue then finds a gate value and its up value in one tile, and act(gate) * up needs no second kernel.

    Args:
      gate: [n_half, k], an ``nn.Linear`` weight ([out, in]), or [n_half], its bias. Any dtype and device.
      up: the same shape, dtype and device.

    Returns:
      [2 * n_half, k] or [2 * n_half], contiguous: 8 rows of gate, 8 of up, 8 of gate, ... Pass ``.t()`` of the weight as ``b``.

    Raises:
      ValueError: shapes, dtypes or devices differ, the rank is not 1 or 2, or n_half is not a multiple of 8.
    """
    if gate.dim() not in (1, 2):
        raise ValueError(f"pack_gate_up: gate must be [n_half, k] or [n_half], got {list(gate.shape)}")
    if gate.shape != up.shape:
        raise ValueError(f"pack_gate_up: up must have gate's shape {list(gate.shape)}, got {list(up.shape)}")
    if gate.dtype != up.dtype:
        raise ValueError(f"pack_gate_up: up must have gate's dtype {gate.dtype}, got {up.dtype}")
    if gate.device != up.device:
        raise ValueError(f"pack_gate_up: up must be on gate's device {gate.device}, got {up.device}")
    if gate.shape[0] % GATE_BLOCK != 0:
        raise ValueError(f"pack_gate_up: n_half must be a multiple of {GATE_BLOCK}, got {gate.shape[0]}")
    return join_gate_up(gate, up, "blocks")


def unpack_gate_up(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`pack_gate_up`.

    Args:
      packed: [2 * n_half, k] or [2 * n_half].

    Returns:
      gate and up, each [n_half, k] or [n_half], contiguous copies.

    Raises:
      ValueError: the rank is not 1 or 2, or the first dimension is not a multiple of 16.
    """
    if packed.dim() not in (1, 2):
        raise ValueError(f"unpack_gate_up: packed must be [2 * n_half, k] or [2 * n_half], got {list(packed.shape)}")
    if packed.shape[0] % (2 * GATE_BLOCK) != 0:
        raise ValueError(f"unpack_gate_up: the first dimension must be a multiple of {2 * GATE_BLOCK}, got {packed.shape[0]}")
    gate, up = split_gate_up(packed, "blocks", 0)
    return gate.contiguous(), up.contiguous()
