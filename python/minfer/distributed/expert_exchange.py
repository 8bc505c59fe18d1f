"""What tokens and experts' sums go through between GPUs of one host."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor

from .._core.namespace import ops
from ..checks.common import Checker, is_integer
from .peer_memory import PeerMemory
from .places import place_in

_NAME = "ExpertExchange"
_VECTOR = 8  # numbers of 16 bits


class _Bytes:
    """Memory of a GPU for ``torch.as_tensor``, by the CUDA array interface."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (count,), "typestr": "|u1", "strides": None, "version": 3}


class ExpertExchange:
    """Memory that the GPUs of one host write in each other, for :func:`minfer.distributed.expert_parallel_moe` and
    ``expert_parallel_layer``.

        exchange = minfer.distributed.ExpertExchange(capacity=256, hidden=2048, top_k=8)  # on every rank, once for all layers
        out = minfer.distributed.expert_parallel_moe(x, w13, w2, weights, ids, exchange=exchange)

    With it a layer is five launches, captured or not, and no collective: a rank writes its tokens where their experts' rank reads them,
    and the experts' rank writes their sums where the tokens' rank adds them up. Every rank creates it at the same time, with the same
    sizes, and closes it at the same time.

    Args:
      capacity: the most tokens of a rank in a call.
      hidden: of a token, a multiple of 8.
      top_k: experts of a token.
      group: None is the default group.
      device: where this rank's tokens are; None: the current GPU where the group's backend is NCCL, else the CPU.

    Attributes:
      capacity, hidden, top_k, group, device: as above.
      mapped: whether the GPUs reach each other's memory. Where they do not (several hosts, more than 8 ranks, no peer access, the CPU, or
        ``MINFER_PEER_MEMORY=0``), calls go through the group's collectives, whose sums have the same
        order.
      nbytes: of a rank's memory: for each of ranks * capacity places 4 * hidden + 8 * top_k bytes.

    Calls are of one stream at a time: two that run at once would meet in the same memory.

    Raises:
      RuntimeError: a size cannot be right, or there is no group.
    """

    def __init__(
        self,
        capacity: int,
        hidden: int,
        top_k: int,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ):
        check = Checker(_NAME)
        ranks, rank = place_in(check, group)
        for name, value in (("capacity", capacity), ("hidden", hidden), ("top_k", top_k)):
            check(is_integer(value) and value >= 1, "{} must be a positive integer, got {}", name, value)
        check(hidden % _VECTOR == 0, "hidden must be a multiple of {}, got {}", _VECTOR, hidden)
        check(ranks * capacity * top_k < 2**31, "capacity * ranks * top_k must be below 2^31, got {} * {} * {}", capacity, ranks, top_k)
        if device is None:
            on_gpu = "nccl" in dist.get_backend(group)
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        self.capacity, self.hidden, self.top_k, self.group = capacity, hidden, top_k, group
        self._ranks, self.device = ranks, torch.device(device)
        self._layout = json.loads(ops._expert_exchange_layout(ranks, capacity, hidden, top_k))
        size = self._layout["bytes"]
        self._memory = PeerMemory.among(group, self.device, rank, ranks, size, "tokens and experts' sums")
        self.nbytes = 0 if self._memory is None else size
        self._bytes = self._places = None
        if self._memory is not None:
            own = _Bytes(self._memory.addresses[rank], size)
            self._bytes = torch.as_tensor(own, device=self._memory.device)
            self._places = torch.arange(ranks * capacity, dtype=torch.int32, device=self._memory.device)[:, None]

    @property
    def mapped(self) -> bool:
        return self._memory is not None

    def close(self) -> None:
        """Gives the memory back; every rank at the same time, and no call nor replay after it."""
        if self._memory is not None:
            self._bytes = self._places = None
            self._memory.close()
            self._memory = None

    def send(self, x: Tensor, weights: Tensor, ids: Tensor, experts: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens to the ranks that have their experts, ``experts`` each.

        Returns:
          What has come, until the next call: rows [ranks * capacity, hidden] of x's dtype, float32 weights and int32 ids [.., top_k], ids
          as numbers among this rank's experts and -1 for those of others. Rows without an id here are not written.
        """
        vectors = x.stride(1) == 1 and x.stride(0) % _VECTOR == 0 and x.data_ptr() % 16 == 0
        x = x if vectors else x.clone(memory_format=torch.contiguous_format)
        memory = self._memory
        ops._send_tokens(x, weights.contiguous(), ids.contiguous(), memory.addresses, memory.rank, self.capacity, capacity, experts)
        places = self._ranks * capacity

        def part(name: str, columns: int, dtype: torch.dtype) -> Tensor:
            begin = self._layout[name]
            return self._bytes[begin : begin + places * columns * dtype.itemsize].view(dtype).view(places, columns)

        return part("rows", self.hidden, x.dtype), part("weights", self.top_k, torch.float32), part("ids", self.top_k, torch.int32)

    def sums(self, y: Tensor, inverse: Tensor | None, ids: Tensor, experts: int, capacity: int) -> Tensor:
        """The sums of this rank's tokens, [tokens, hidden]; y: what this rank's experts have made of the pairs, inverse [ranks * capacity,
        pairs]: their rows in y; None: y has a row for each place. ids: of this rank's tokens, as they were sent."""
        memory = self._memory
        if inverse is None:
            inverse = self._places[: self._ranks * capacity]
        return ops._return_sums(y, inverse, ids.contiguous(), memory.addresses, memory.rank, self.capacity, capacity, experts)
