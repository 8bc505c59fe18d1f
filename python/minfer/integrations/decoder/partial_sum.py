"""What a rank's product or experts add to a sum over the ranks that is still to be made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...distributed.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class PartialSum:
    """A tensor of which every rank has a part: all parts, added up in the order of the ranks.

    The norm behind a sum makes it in the same launch, where that is possible. Every rank must make it, and once.

    Attributes:
      own: [tokens, width], this rank's part. Making the sum may write it.
      parallel: the ranks.
    """

    own: Tensor
    parallel: TensorParallel

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    def __getitem__(self, rows: Tensor | slice) -> PartialSum:
        """The same of some rows, which must be the same on all ranks."""
        return PartialSum(self.own[rows], self.parallel)

    def sum(self) -> Tensor:
        """Makes it, in ``own``."""
        return self.parallel.all_reduce(self.own)


def summed(x: Tensor | PartialSum) -> Tensor:
    return x.sum() if isinstance(x, PartialSum) else x
