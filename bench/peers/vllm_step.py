"""A decode step of a dense Llama-like model by the operators that vLLM runs, in a CUDA graph: a stand-in for vLLM on a machine without it.

Per layer: fused_add_rms_norm, the product of q, k and v (cuBLAS, Marlin of 4-bit weights, CUTLASS of FP8), rotary_embedding, keys and
values into pages, FlashAttention-3 over them, the projection, fused_add_rms_norm, gate and up, silu_and_mul, down. Around them: the
embedding, the last norm, the head in 16 bits, argmax. The scheduler, which vLLM runs between steps, is left out.

Weights are random and its own. Where vLLM's ``reshape_and_cache_flash`` is not in the libraries at hand, index_put stores keys and values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = 16  # vLLM's default


def _ops() -> Any:
    import peer_ops

    return peer_ops


def _fp8(x: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
    """Tokens get a scale each, in a kernel of its own, in front of vLLM's CUTLASS kernel. Where the library at hand has no such kernel, it
    is minfer's, which is no slower."""
    weight, weight_scale = own
    if hasattr(torch.ops._C, "dynamic_per_token_scaled_fp8_quant"):
        q, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(x.shape[0], 1, device=x.device, dtype=torch.float32)
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)
    else:
        q, scale = minfer.quantize_fp8(x)
        scale = scale.view(-1, 1)
    y = torch.empty(x.shape[0], weight.shape[0], device=x.device, dtype=x.dtype)
    torch.ops._C.cutlass_scaled_mm(y, q, weight.t(), scale, weight_scale, None)
    return y


class _Linear:
    """x -> x.W^T of a random weight [n, k]: in 16 bits, in 4 by Marlin, or in e4m3 with scales of rows beside tokens' in e4m3."""

    def __init__(self, n: int, k: int, weights: str, dtype: torch.dtype):
        weight = torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
        if weights == "bf16":
            self._call, self._own = F.linear, weight
            return
        if weights == "fp8":
            scale = (weight.float().abs().amax(1, keepdim=True) / 448).contiguous()
            self._call, self._own = _fp8, ((weight.float() / scale).to(torch.float8_e4m3fn), scale.view(1, -1))
            return
        q, s, _ = _ops().quantize(weight.t().contiguous())
        self._call, self._own = (lambda x, own: _ops().marlin(x, own)), _ops().marlin_prepare(q, s)

    def __call__(self, x: Tensor) -> Tensor:
        return self._call(x, self._own)


class VllmStep:
    """The step of ``batch`` sequences of ``context`` tokens each.

    Args:
      config: of a transformers model with Llama's layers (llama, qwen2, mistral).
      weights: "bf16", "w4a16" or "fp8".
    """

    def __init__(self, config: Any, batch: int, context: int, weights: str = "bf16", dtype: torch.dtype = torch.bfloat16):
        ops = _ops()
        ops.load("_C_stable_libtorch")
        hidden, inter = config.hidden_size, config.intermediate_size
        self.heads, self.heads_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or hidden // self.heads
        wide = (self.heads + 2 * self.heads_kv) * self.head_dim
        self.eps, self.batch, self.length = config.rms_norm_eps, batch, context + 1
        pages = -(-self.length // PAGE)
        self.layers = [
            [
                _Linear(n, k, weights, dtype)
                for n, k in ((wide, hidden), (hidden, self.heads * self.head_dim), (2 * inter, hidden), (hidden, inter))
            ]
            for _ in range(config.num_hidden_layers)
        ]
        self.norm = torch.ones(hidden, device="cuda", dtype=dtype)
        self.embedding = torch.randn(config.vocab_size, hidden, device="cuda", dtype=dtype)
        self.head = torch.randn(config.vocab_size, hidden, device="cuda", dtype=dtype) / hidden**0.5
        shape = (batch * pages, PAGE, self.heads_kv, self.head_dim)
        self.caches = [tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)) for _ in self.layers]
        self.table = torch.arange(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
        self.seq_lens = torch.full((batch,), self.length, device="cuda", dtype=torch.int32)
        self.positions = torch.full((batch,), context, device="cuda", dtype=torch.int64)
        self.slots = self.table[:, -1].long() * PAGE + context % PAGE
        self.ids = torch.randint(0, config.vocab_size, (batch,), device="cuda")
        self.cos_sin = torch.randn(context + 1, self.head_dim, device="cuda", dtype=dtype)
        self.plan = ops.fa3_decode_plan(batch, self.heads, self.heads_kv, self.head_dim, self.seq_lens, self.length, PAGE, dtype)
        self.rows = torch.arange(batch + 1, device="cuda", dtype=torch.int32)

    def step(self) -> Tensor:
        ops, q_size, kv_size = _ops(), self.heads * self.head_dim, self.heads_kv * self.head_dim
        x = F.embedding(self.ids, self.embedding)
        residual = torch.zeros_like(x)
        for (qkv, output, gate_up, down), (k_cache, v_cache) in zip(self.layers, self.caches, strict=True):
            torch.ops._C.fused_add_rms_norm(x, residual, self.norm, self.eps)
            q, k, v = qkv(x).split([q_size, kv_size, kv_size], -1)
            torch.ops._C.rotary_embedding(self.positions, q, k, self.head_dim, self.cos_sin, True)
            for cache, new in ((k_cache, k), (v_cache, v)):
                cache.view(-1, self.heads_kv, self.head_dim)[self.slots] = new.view(-1, self.heads_kv, self.head_dim)
            y = ops._fa3(
                q.view(-1, self.heads, self.head_dim), k_cache, v_cache, self.rows, None, self.seq_lens, 1, self.length, self.table, True,
                None, 0, self.plan, None, None,
            )  # fmt: skip
            x = output(y.flatten(1))
            torch.ops._C.fused_add_rms_norm(x, residual, self.norm, self.eps)
            x = down(ops.vllm_silu_mul(gate_up(x)))
        torch.ops._C.fused_add_rms_norm(x, residual, self.norm, self.eps)
        return F.linear(x, self.head).argmax(-1)

    def ms(self, steps: int = 30) -> float:
        """Milliseconds of a replay, the median."""
        return replay_ms(self.step, steps)


@torch.inference_mode()
def replay_ms(step: Callable[[], Tensor], steps: int) -> float:
    """Milliseconds of a step as a CUDA graph, the median of its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for turn in range(steps + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)
