"""Sums of few numbers over the GPUs of one host, through memory that each of them writes in the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .._core.namespace import ops
from .peer_memory import PeerMemory

_TYPES = (torch.bfloat16, torch.float16)
_MOST_WIDTH = 16384  # of rows with a norm behind their sum, kMostReduceNormWidth


def _most_numbers(ranks: int) -> int:
    """Of 16 bits: 1 MiB between two GPUs. Each GPU sends twice as many bytes to every other one; from there on NCCL's ring is faster."""
    return (1 << 20) // ranks


def _in_vectors(x: Tensor) -> Tensor:
    """x, or a copy of it: contiguous, from a multiple of 16 bytes on."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


class PeerExchange:
    """Where the ranks of a group have mapped each other's exchange buffers, ``cpp/include/minfer/all_reduce.h``.

    Every rank calls everything here at the same time. Sums are of one stream: two that run at once would meet in the same buffer.
    """

    def __init__(self, memory: PeerMemory, most: int):
        self._memory, self._most = memory, most

    @classmethod
    def among(cls, group: dist.ProcessGroup | None, device: torch.device, rank: int, ranks: int) -> PeerExchange | None:
        """None where :meth:`PeerMemory.among` finds none."""
        most = _most_numbers(ranks)
        memory = PeerMemory.among(group, device, rank, ranks, ops._all_reduce_bytes(most, ranks), "sums over the ranks")
        return None if memory is None else cls(memory, most)

    def takes(self, x: Tensor) -> bool:
        """Whether sums like x are for it: says the same on every rank."""
        return x.is_cuda and self._takes(x.numel(), x.dtype)

    def takes_norms(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """The same of sums of rows with a norm behind."""
        return self._takes(rows * width, dtype) and width % 8 == 0 and width <= _MOST_WIDTH

    def _takes(self, count: int, dtype: torch.dtype) -> bool:
        return dtype in _TYPES and 0 < count <= self._most and count % 8 == 0

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum of all ranks' x, in the order of the ranks."""
        own = _in_vectors(x)
        ops._all_reduce(own, self._memory.addresses, self._memory.rank, self._most)
        if own is not x:
            x.copy_(own)

    def all_reduce_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
        """residual, or x where there is none, becomes the sum of all ranks' x and the residual; returns its norm."""
        written = x if residual is None else residual
        own_x, own_residual = _in_vectors(x), None if residual is None else _in_vectors(residual)
        place = self._memory.addresses, self._memory.rank, self._most
        y = ops._all_reduce_rms_norm(own_x, own_residual, _in_vectors(weight), eps, weight_offset, *place)
        own = own_x if residual is None else own_residual
        if own is not written:
            written.copy_(own)
        return y

    def close(self) -> None:
        """Gives the memory back when every rank is here."""
        self._memory.close()
