"""The shapes of the demo: layers of published models on a GPU, the same layers scaled down on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """Extents that the families make their cases of, and where their tensors live."""

    device: str
    hidden: int  # of the dense and the quantised layers, with `intermediate` that of their MLP
    intermediate: int
    tokens: int  # of a prompt, or of a large batch
    decode_tokens: int  # of a decode step: one of each sequence
    experts: int
    top_k: int
    expert_hidden: int
    expert_inter: int
    heads_q: int
    heads_kv: int
    head_dim: int
    prompt: int  # queries and keys of attention over a whole prompt
    batch: int  # sequences of decode, and of an append
    context: int  # keys of each of them
    chunk: int  # tokens of each that an append stores, whole groups of int4
    dtype: torch.dtype = torch.bfloat16

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random normal numbers of deviation ``scale``."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype).mul_(scale)


# Dense and quantised layers and attention are those of Llama 3 8B, the experts those of Qwen3 30B-A3B.
GPU = Sizes(
    device="cuda",
    hidden=4096,
    intermediate=14336,
    tokens=512,
    decode_tokens=16,
    experts=128,
    top_k=8,
    expert_hidden=2048,
    expert_inter=768,
    heads_q=32,
    heads_kv=8,
    head_dim=128,
    prompt=4096,
    batch=16,
    context=4096,
    chunk=128,
)
CPU = Sizes(
    device="cpu",
    hidden=512,
    intermediate=1792,
    tokens=64,
    decode_tokens=4,
    experts=8,
    top_k=2,
    expert_hidden=256,
    expert_inter=128,
    heads_q=8,
    heads_kv=2,
    head_dim=64,
    prompt=200,
    batch=3,
    context=300,  # int4 keeps the last 44 in its residual
    chunk=128,
)
