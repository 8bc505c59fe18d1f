"""A decode step of a Llama-3.1-8B layer as one CUDA graph: norm, qkv, rotation and append, attention, out, norm, gate and up, down. Against
the same by torch.compile, with its own append and torch's attention over a contiguous cache of the same tokens."""

from __future__ import annotations

from typing import Any

import minfer
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.suites.fused_call import Call, deviation
from bench.suites.fused_peers import rotated

BATCHES = (1, 8, 64)
HIDDEN, INTER, HEADS, HEADS_KV, HEAD_DIM, LENGTH, PAGE = 4096, 14336, 32, 8, 128, 1024, 64
EPS = 1e-5


class Layer:
    """Weights, a cache of LENGTH tokens of each sequence, and the step by either."""

    def __init__(self, batch: int, dtype: torch.dtype, device: str, hidden: int = HIDDEN, inter: int = INTER, length: int = LENGTH):
        self.length, self.batch = length, batch

        def weight(n: int, k: int) -> Tensor:
            return (torch.randn(n, k, device=device) / k**0.5).to(dtype)

        self.qkv, self.out = weight((HEADS + 2 * HEADS_KV) * HEAD_DIM, hidden), weight(hidden, HEADS * HEAD_DIM)
        self.gate_up, self.down = weight(2 * inter, hidden), weight(hidden, inter)
        self.packed = minfer.pack_gate_up(*self.gate_up.chunk(2))
        self.norms = 1 + 0.1 * torch.randn(2, hidden, device=device).to(dtype)
        self.x, self.residual = (torch.randn(batch, hidden, device=device).to(dtype) for _ in range(2))
        self.table = minfer.rope_cache(500000.0, HEAD_DIM, length, device=device)
        self.positions = torch.full((batch,), length - 1, device=device)
        pages = -(-length // PAGE)
        self.cache = minfer.allocate_kv_cache(batch * pages, PAGE, HEADS_KV, HEAD_DIM, dtype=dtype, device=device)
        self.cache.k.normal_()
        self.cache.v.normal_()
        self.block_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        pages_of = self.block_table.long()  # the peer's cache is contiguous, [batch, length, heads_kv, head_dim]
        self.keys, self.values = (x[pages_of].flatten(1, 2)[:, :length].contiguous() for x in (self.cache.k, self.cache.v))
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.slots = self.block_table[:, -1].long() * PAGE + (length - 1) % PAGE

    def ours(self) -> Tensor:
        y = minfer.add_rms_norm(self.x, self.residual.clone(), self.norms[0], EPS)
        qkv = minfer.gemm(y, self.qkv.t()).view(self.batch, HEADS + 2 * HEADS_KV, HEAD_DIM)
        q = minfer.qk_norm_rope_append(qkv, None, None, self.table, self.positions, self.cache.k, self.cache.v, self.slots)
        o, _ = minfer.attention_paged(q[:, None], self.cache.k, self.cache.v, self.lengths, block_table=self.block_table)
        attended = minfer.gemm(o.view(self.batch, HEADS * HEAD_DIM), self.out.t())
        y = minfer.add_rms_norm(attended, self.x.clone(), self.norms[1], EPS)
        return minfer.gemm(minfer.gemm_gated(y, self.packed.t()), self.down.t())

    def torch(self) -> Tensor:
        residual = self.x + self.residual
        y = F.rms_norm(residual, (residual.shape[-1],), self.norms[0], EPS)
        q, k, v = (y @ self.qkv.t()).view(self.batch, -1, HEAD_DIM).split([HEADS, HEADS_KV, HEADS_KV], 1)
        q, k = rotated(q, self.table, self.positions), rotated(k, self.table, self.positions)
        self.keys[:, -1], self.values[:, -1] = k, v
        o = F.scaled_dot_product_attention(q[:, :, None], self.keys.transpose(1, 2), self.values.transpose(1, 2), enable_gqa=True)
        attended = o.reshape(self.batch, HEADS * HEAD_DIM) @ self.out.t()
        residual = self.x + attended
        y = F.rms_norm(residual, (residual.shape[-1],), self.norms[1], EPS)
        gate, up = (y @ self.gate_up.t()).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down.t()

    def bytes(self) -> float:
        weights = sum(x.numel() for x in (self.qkv, self.out, self.gate_up, self.down))
        return 2.0 * (weights + 2 * self.batch * self.length * HEADS_KV * HEAD_DIM)


def make(rows: int, width: int, dtype: torch.dtype, device: str, **smaller: Any) -> Call:
    """A call of `rows` sequences. One set: the weights alone are 436 MB."""
    layer = Layer(rows, dtype, device, **smaller)
    compiled = torch.compile(layer.torch)

    def error() -> float:
        return deviation(layer.ours(), layer.torch())

    peers = {"torch": lambda i: layer.torch(), "torch_compile": lambda i: compiled()}
    return Call(lambda i: layer.ours(), peers, layer.bytes(), error, "layer", 1)
