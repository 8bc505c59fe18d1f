"""Peers of the operators between the GEMMs: torch's operators, the same compiled, and other libraries where they are installed
(``peer_ops``, and FlashInfer's own module). Each is a dictionary name -> function of the number of a set of operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Calls = dict[str, Callable[[int], Any]]


def of_torch(form: Callable[[Tensor], Any], xs: list[Tensor]) -> Calls:
    compiled = torch.compile(form, dynamic=False)
    return {"torch": lambda i: form(xs[i]), "torch_compile": lambda i: compiled(xs[i])}


def _peer_ops():
    import peer_ops

    return peer_ops


def rms_norm(xs: list[Tensor], weight: Tensor, eps: float) -> Calls:
    def of(name: str) -> Callable[[int], Any]:
        return lambda i: getattr(_peer_ops(), f"{name}_rms_norm")(xs[i], weight, eps)

    own = of_torch(lambda x: F.rms_norm(x, (x.shape[-1],), weight, eps), xs)
    return own | {name: of(name) for name in ("vllm", "flashinfer", "liger", "quack")}


def add_rms_norm(xs: list[Tensor], residuals: list[Tensor], weight: Tensor, eps: float) -> Calls:
    """vLLM and FlashInfer write the norm over x: of a copy that they may spoil."""
    spoiled, sums = [x.clone() for x in xs], [x.clone() for x in residuals]

    def form(x: Tensor, residual: Tensor) -> Tensor:
        residual += x
        return F.rms_norm(residual, (x.shape[-1],), weight, eps)

    compiled = torch.compile(form, dynamic=False)

    def flashinfer(i: int) -> None:
        import flashinfer

        flashinfer.fused_add_rmsnorm(spoiled[i], sums[i], weight, eps)

    return {
        "torch": lambda i: form(xs[i], sums[i]),
        "torch_compile": lambda i: compiled(xs[i], sums[i]),
        "vllm": lambda i: _peer_ops().vllm_add_rms_norm_(spoiled[i], sums[i], weight, eps),
        "flashinfer": flashinfer,
    }


def silu_and_mul(xs: list[Tensor]) -> Calls:
    def flashinfer(i: int) -> Tensor:
        import flashinfer

        return flashinfer.silu_and_mul(xs[i])

    return {"vllm": lambda i: _peer_ops().vllm_silu_mul(xs[i]), "flashinfer": flashinfer}


def rotated(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Halves, as in Llama."""
    cos, sin = table[positions][:, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rope(qs: list[Tensor], ks: list[Tensor], table: Tensor, positions: Tensor) -> Calls:
    head_dim = qs[0].shape[-1]
    of_vllm = table.to(qs[0].dtype)  # [length, head_dim]: cosines, then sines

    def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, table, positions), rotated(k, table, positions)

    def vllm(i: int) -> None:
        _peer_ops().load("_C_stable_libtorch")
        torch.ops._C.rotary_embedding(positions, qs[i].flatten(1), ks[i].flatten(1), head_dim, of_vllm, True)

    def flashinfer(i: int) -> None:
        import flashinfer

        flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, qs[i].flatten(1), ks[i].flatten(1), head_dim, table)

    compiled = torch.compile(both, dynamic=False)
    return {
        "torch": lambda i: both(qs[i], ks[i]),
        "torch_compile": lambda i: compiled(qs[i], ks[i]),
        "vllm": vllm,
        "flashinfer": flashinfer,
    }


def quantised(op: str, quant: str, xs: list[Tensor], weight: Tensor, eps: float, scale: Tensor | None) -> Calls:
    """torch's operators, eager and compiled; vLLM's fused ones where it has them."""
    largest = 127.0 if quant == "int8_token" else 448.0
    gated = op == "silu_and_mul"

    def form(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        if gated:
            gate, up = x.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
        groups = y.unflatten(-1, (-1, 128)) if quant == "fp8_block128" else y
        scales = scale if scale is not None else groups.abs().amax(-1, keepdim=True) / largest
        codes = (groups / scales).clamp(-largest, largest).reshape(y.shape)
        return (codes.round().to(torch.int8) if quant == "int8_token" else codes.to(torch.float8_e4m3fn)), scales

    def vllm(i: int) -> Any:
        _peer_ops().load("_C_stable_libtorch")
        x = xs[i]
        out = torch.empty(x.shape, dtype=torch.int8 if quant == "int8_token" else torch.float8_e4m3fn, device=x.device)
        if quant == "fp8_tensor":
            torch.ops._C.rms_norm_static_fp8_quant(out, x, weight, scale, eps)
            return out
        scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        torch.ops._C.rms_norm_dynamic_per_token_quant(out, x, weight, scales, eps, None, None)
        return out, scales

    return of_torch(form, xs) | ({} if gated or quant == "fp8_block128" else {"vllm": vllm})


def norm_rope_append(qkvs, weights, table, positions, slots, caches, heads: int, heads_kv: int, eps: float) -> Calls:
    """Of 16-bit caches: torch.compile's kernels, and vLLM's chain of norms, rotation and append."""
    page, head_dim = caches[0].k.shape[1], qkvs[0].shape[-1]
    of_vllm = table.to(qkvs[0].dtype)

    def form(qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q, k, v = qkv.split([heads, heads_kv, heads_kv], 1)
        q = rotated(F.rms_norm(q, (head_dim,), weights[0], eps), table, positions)
        k = rotated(F.rms_norm(k, (head_dim,), weights[1], eps), table, positions)
        k_cache[slots // page, slots % page] = k
        v_cache[slots // page, slots % page] = v
        return q

    one = torch.ones(1, device=qkvs[0].device)

    def vllm(i: int) -> Tensor:
        ops = _peer_ops()
        ops.load("_C_stable_libtorch")
        q, k, v = (x.contiguous() for x in qkvs[i].split([heads, heads_kv, heads_kv], 1))
        q, k = ops.vllm_rms_norm(q, weights[0], eps), ops.vllm_rms_norm(k, weights[1], eps)
        torch.ops._C.rotary_embedding(positions, q.flatten(1), k.flatten(1), head_dim, of_vllm, True)
        torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, caches[i].k, caches[i].v, slots, "auto", one, one)
        return q

    compiled = torch.compile(form, dynamic=False)
    return {"torch_compile": lambda i: compiled(qkvs[i], caches[i].k, caches[i].v), "vllm": vllm}


def sample(kind: str, xs: list[Tensor], options: dict[str, Any]) -> Calls:
    temperature = options["temperature"]
    if kind == "argmax":
        return of_torch(lambda x: x.argmax(-1), xs)
    top_k, top_p = options.get("top_k"), options.get("top_p")

    def form(x: Tensor) -> Tensor:
        """As serving systems do without a kernel for it: a sort, and noise."""
        x = x.float() / temperature
        if top_k is not None or top_p is not None:
            values, places = x.sort(-1, descending=True)
            if top_k is not None:
                values = values.index_fill(-1, torch.arange(top_k, values.shape[-1], device=x.device), float("-inf"))
            if top_p is not None:
                p = values.softmax(-1)
                values = values.masked_fill(p.cumsum(-1) - p >= top_p, float("-inf"))
            x = torch.empty_like(x).scatter_(-1, places, values)
        return (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1)

    def flashinfer(i: int) -> Tensor:
        from flashinfer import sampling

        x = xs[i].float() / temperature
        if top_k is not None and top_p is not None:
            return sampling.top_k_top_p_sampling_from_logits(x, top_k, top_p)
        p = x.softmax(-1)
        return sampling.top_p_sampling_from_probs(p, top_p) if top_p is not None else sampling.sampling_from_probs(p)

    return of_torch(form, xs) | {"flashinfer": flashinfer}
