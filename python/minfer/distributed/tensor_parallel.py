"""Tensor and expert parallelism of whole models: each rank has a part of every layer, and all ranks have all tokens.

    parallel = minfer.distributed.TensorParallel()                                       # the default process group
    handle = minfer.integrations.transformers.optimize(model, parallel=parallel, restorable=False)
    completions = minfer.generate(handle, prompts)                                       # on every rank, with the same prompts

Heads of attention, columns of an MLP and experts are divided. What the parts of a block add up to is summed over the ranks behind its last
product: two all-reduces a layer, of [tokens, hidden]; of few tokens the norms behind them are part of their launches. Rows of the head are
divided, and logits gathered. Norms, routers and embeddings are everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._core.batch_invariance import is_batch_invariant
from ..checks.common import Checker
from ..ops.fused import add_rms_norm, rms_norm
from .layer_exchange import LayerExchange, open_layer_exchange
from .peer_exchange import PeerExchange
from .peer_memory import PeerMemory
from .places import place_in


def _gather_into(out: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name from torch 2.13 on, and before
    gather(out, own, group=group)


def borders(count: int, ranks: int, unit: int = 1) -> list[int]:
    """Where the ranks' parts of ``count`` begin, and where the last one ends: multiples of ``unit``, as even as that allows."""
    units = -(-count // unit)
    return [min(rank * units // ranks * unit, count) for rank in range(ranks)] + [count]


class TensorParallel:
    """The ranks among which a model is divided.

    Args:
      group: a process group; None: the default one, which must be initialised.
      device: where this rank's part is; None: the current GPU where the group's backend is NCCL, else the CPU.
      peer_memory: whether the sums of few tokens go through memory that GPUs of one host write in each other: one launch beside which the
        next layer's weights are read, instead of a collective of NCCL. Where they cannot, NCCL has these, too. A model's steps must then be
        on one stream at a time.

    Every rank creates it at the same time.

    Attributes:
      ranks, rank: how many they are, and which one this is.

    Raises:
      RuntimeError: there is no process group, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None, *, peer_memory: bool = True):
        self.ranks, self.rank = place_in(Checker("TensorParallel"), group)
        if device is None:
            on_gpu = "nccl" in dist.get_backend(group)
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        self.group, self.device = group, torch.device(device)
        usable = peer_memory and self.device.type == "cuda" and self.ranks > 1
        self._usable = usable
        self._of_layers: list[PeerMemory] = []
        self._exchange = PeerExchange.among(group, self.device, self.rank, self.ranks) if usable else None

    def part(self, count: int, unit: int = 1) -> tuple[int, int]:
        """This rank's part of ``count``: from, to; see :func:`borders`."""
        places = borders(count, self.ranks, unit)
        return places[self.rank], places[self.rank + 1]

    def all_reduce(self, x: Tensor) -> Tensor:
        """x becomes the sum of all ranks' x, which has the same bits on all of them.

        In the batch-invariant mode it is added up in float32 in the order of the ranks and rounded once, however many rows x has; a
        collective's own order follows from the size of x.
        """
        if self._exchange is not None and self._exchange.takes(x):
            self._exchange.all_reduce(x)
        elif is_batch_invariant() and self.ranks > 1:
            if x.numel() > 0:
                x.copy_(self._sum_in_order(x))
        elif x.is_contiguous():
            dist.all_reduce(x, group=self.group)
        else:  # of which NCCL takes none, and gloo adds up other elements
            own = x.contiguous()
            dist.all_reduce(own, group=self.group)
            x.copy_(own)
        return x

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0
    ) -> Tensor:
        """The sum of all ranks' x, a residual, and the RMS norm: what stands behind a divided product in a layer.

            residual += sum of the ranks' x                 # or x becomes the sum, where residual is None
            return residual / sqrt(mean(residual^2) + eps) * (weight + weight_offset)

        Of few numbers it is one launch where the ranks' GPUs reach each other's memory (see :meth:`leaves_sums_to_norms`), else
        :meth:`all_reduce` and :func:`minfer.add_rms_norm` or :func:`minfer.rms_norm`.

        Args:
          x: [.., width], this rank's part, float16 or bfloat16. It becomes the sum where residual is None; else its values are not defined
            afterwards.
          residual: x's shape and dtype, the same on all ranks, or None; it becomes the sum of all ranks' x and itself. It shares no memory
            with x.
          weight: [width], x's dtype; eps, weight_offset: as in :func:`minfer.rms_norm`. The same on all ranks.

        Returns:
          A tensor of x's shape and dtype.

        Numerics: in one launch, and always in the batch-invariant mode, parts are added up in float32 in the order of the ranks, then the
        residual is added, and the sum is rounded once. Elsewhere a collective's sum is rounded before the residual is added. The norm is of
        the rounded sum, in float32, and rounded once. All ranks have the same bits, of the sum and of the norm.
        In the batch-invariant mode a row's bits are those that it has alone, however many rows x has.

        Raises:
          RuntimeError: an argument has another shape, dtype or device.
        """
        width = x.shape[-1] if x.dim() > 0 else 0
        if self._exchange is not None and x.is_cuda and width > 0 and self._exchange.takes_norms(x.numel() // width, width, x.dtype):
            return self._exchange.all_reduce_rms_norm(x, residual, weight, eps, weight_offset)
        if residual is not None and is_batch_invariant() and self.ranks > 1:
            if x.numel() > 0:
                residual.copy_(self._sum_in_order(x, residual))
            return rms_norm(residual, weight, eps, weight_offset=weight_offset)
        self.all_reduce(x)
        if residual is None:
            return rms_norm(x, weight, eps, weight_offset=weight_offset)
        return add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset)

    def leaves_sums_to_norms(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether sums of [rows, width] had better be made by :meth:`all_reduce_rms_norm` with what is behind them, where that is an RMS
        norm: they are one launch with it.

        In the batch-invariant mode all are, so that the residual is added at the same place to few rows and to many.
        """
        if is_batch_invariant():
            return True
        return self._exchange is not None and self._exchange.takes_norms(rows, width, dtype)

    def _sum_in_order(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The ranks' sum, and the residual, as :class:`PeerExchange` has it. Each rank adds up a part, of which every other one sends it
        its own."""
        part = -(-x.numel() // self.ranks)

        def in_parts(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x.flatten(), (0, self.ranks * part - x.numel())).contiguous()

        own = in_parts(x)
        parts = torch.empty_like(own)
        # Bytes: not every backend knows bfloat16.
        dist.all_to_all_single(parts.view(torch.uint8), own.view(torch.uint8), group=self.group)
        total = torch.zeros(part, dtype=torch.float32, device=x.device)
        for of_rank in parts.view(self.ranks, part):
            total += of_rank
        if residual is not None:
            total += in_parts(residual).view(self.ranks, part)[self.rank]
        _gather_into(own.view(torch.uint8), total.to(x.dtype).view(torch.uint8), self.group)
        return own[: x.numel()].view(x.shape)

    def layer_exchange(self, hidden: int, parts: Any) -> LayerExchange | None:
        """What decoder layers in one launch each exchange their sums through; None where they cannot. Every rank at the same time.

        Args:
          hidden: columns of the residual.
          parts: what this rank's layers look like, which has to be the same on all ranks (:func:`.layer_exchange.open_layer_exchange`).
        """
        if not self._usable:
            return None
        memory = open_layer_exchange(self.group, self.device, self.rank, self.ranks, hidden, parts)
        if memory is None:
            return None
        self._of_layers.append(memory)
        return LayerExchange(tuple(memory.addresses), self.rank)

    def close(self) -> None:
        """Gives back what sums of few tokens go through; every rank at the same time, and no step after it."""
        for memory in self._of_layers:
            memory.close()
        self._of_layers = []
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """[rows, widths[rank]] of each rank, side by side: [rows, sum(widths)]."""
        most = max(widths)
        own = x if x.shape[1] == most else torch.nn.functional.pad(x, (0, most - x.shape[1]))
        rows = x.new_empty(self.ranks * own.shape[0], most)
        _gather_into(rows, own.contiguous(), self.group)
        parts = rows.view(self.ranks, *own.shape)
        if all(width == most for width in widths):
            return parts.transpose(0, 1).flatten(1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def least(self, value: int) -> int:
        """The smallest of the ranks' numbers; the host waits for it."""
        x = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MIN, group=self.group)
        return int(x)
