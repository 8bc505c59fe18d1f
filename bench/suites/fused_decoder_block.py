"""What lies between two attentions, of int4, e4m3 and 16-bit weights: as planned, by the operators one after the other, and in one launch;
and one token's attention with what lies behind it, as one launch and as three, and several layers of that as one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minfer
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.suites.fused_call import Call, deviation

TOKENS = (1, 2)
GROUP, EPS = 128, 1e-5
# Columns of attention's output, of the residual, of the MLP's activations, and of the next layer's q, k and v.
MODELS = {
    "Llama-3.2-1B": (2048, 2048, 8192, 3072),
    "Llama-3.2-3B": (3072, 3072, 8192, 5120),
    "Qwen2.5-7B": (3584, 3584, 18944, 4608),
    "Llama-3.1-8B": (4096, 4096, 14336, 6144),
    "Mistral-Small-24B": (4096, 5120, 32768, 6144),
    "Llama-3.1-70B": (8192, 8192, 28672, 10240),
}
NAMES = ("o", "gate_up", "down", "next")
HEADS = {"Llama-3.2-3B": (24, 8), "Qwen2.5-7B": (28, 4), "Llama-3.1-8B": (32, 8), "Llama-3.1-70B": (64, 8)}  # of 128 elements
HEAD_DIM, PAGE = 128, 64
LENGTHS = (1024, 4096, 16384)  # of a sequence, its newest token among them
LAYERS = 8  # of a launch of several


OPERATORS = {"int4": minfer.w4a16_decoder_block, "e4m3": minfer.fp8_decoder_block, "dense": minfer.decoder_block}
BYTES = {"int4": 0.5 + 2.0 / GROUP, "e4m3": 1.0, "dense": 2.0}  # of a weight
OPTIONS: dict[str, dict[str, Any]] = {"int4": {"group_size": GROUP}, "e4m3": {}, "dense": {}}


def _int4_weight(name: str, rows: int, k: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8, device=device)
    scales = ((torch.rand(k // GROUP, rows, device=device) + 0.5) / (5 * k**0.5)).to(dtype)
    return {f"{name}_qweight": minfer.w4a16_pack(codes), f"{name}_scales": scales}


def _e4m3_weight(name: str, rows: int, k: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Scales of blocks, as whole models have them."""
    blocks = (2, -(-rows // 256), -(-k // 128)) if name == "gate_up" else (-(-rows // 128), -(-k // 128))
    scales = (torch.rand(blocks, device=device) + 0.5) / k**0.5
    return {f"{name}_weight": torch.randn(rows, k, device=device).to(torch.float8_e4m3fn), f"{name}_scale": scales}


def _dense_weight(name: str, rows: int, k: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {f"{name}_weight": (torch.randn(rows, k, device=device) / k**0.5).to(dtype)}


def _weights(sizes: tuple[int, int, int, int], form: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    attended, hidden, inter, n = sizes
    found = {name: (1 + 0.1 * torch.randn(hidden, device=device)).to(dtype) for name in ("mlp_norm", "next_norm")}
    for name, rows, k in zip(NAMES, (hidden, 2 * inter, hidden, n), (attended, hidden, inter, hidden), strict=True):
        found |= {"int4": _int4_weight, "e4m3": _e4m3_weight, "dense": _dense_weight}[form](name, rows, k, dtype, device)
    return found


def _truth(a: Tensor, residual: Tensor, w: dict[str, Tensor]) -> Tensor:
    """In float64; x and the activations of the MLP are rounded where minfer rounds them."""
    dtype = a.dtype

    def product(x: Tensor, name: str) -> Tensor:
        if f"{name}_scale" not in w and f"{name}_weight" in w:
            return x.double() @ w[f"{name}_weight"].double().t()
        if f"{name}_weight" in w:
            weight = minfer.quantize.Fp8Weight(w[f"{name}_weight"], w[f"{name}_scale"], gated=name == "gate_up").dequantize(torch.float64)
            return x.double() @ weight.t()
        scales = w[f"{name}_scales"]
        return x.double() @ minfer.w4a16_dequantize(w[f"{name}_qweight"], scales, n=scales.shape[1], k=x.shape[-1]).double().t()

    def norm(x: Tensor, name: str) -> Tensor:
        return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * w[name].double()

    x = (residual.double() + product(a, "o")).to(dtype)
    blocks = product(norm(x, "mlp_norm"), "gate_up").unflatten(-1, (-1, 2, 8))
    h = (F.silu(blocks[..., 0, :]) * blocks[..., 1, :]).flatten(-2).to(dtype)
    return product(norm((x.double() + product(h, "down")).to(dtype), "next_norm"), "next")


def block(sizes: tuple[int, int, int, int], form: str = "int4") -> Callable[..., Call]:
    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        attended, hidden, inter, n = sizes
        weights = hidden * attended + 3 * hidden * inter + n * hidden
        moved = weights * BYTES[form] + 2.0 * rows * (attended + 2 * hidden + n)
        sets = harness.sets_for(int(moved)) if device == "cuda" else 1
        data = [
            (torch.randn(rows, attended, device=device).to(dtype), torch.randn(rows, hidden, device=device).to(dtype))
            + (_weights(sizes, form, dtype, device),)
            for _ in range(sets)
        ]

        def ours(i: int, residual: Tensor | None = None, **options: Any) -> Tensor:
            a, own, w = data[i]
            return OPERATORS[form](a, own if residual is None else residual, **w, eps=EPS, constant_weights=True, **options)

        def error() -> float:
            a, residual, w = data[0]
            return deviation(ours(0, residual.clone()), _truth(a, residual, w))

        peers: dict[str, Callable[[int], Any]] = {
            "ours:separate": lambda i: ours(i, kernel="separate"),
            "ours:one_launch": lambda i: ours(i, kernel="one_launch"),
        }
        op = OPERATORS[form].__name__
        own = OPTIONS[form] | ({"block_scaled": True} if form == "e4m3" else {})
        plan = minfer.plan(op, m=rows, n=n, k=hidden, inter=inter, attention=attended, dtype=dtype, **own)
        return Call(ours, peers, moved, error, "one_launch" if plan.one_launch else "separate", sets)

    return make


def layer(sizes: tuple[int, int, int, int], heads: tuple[int, int], length: int, form: str = "int4", count: int = 1) -> Callable[..., Call]:
    """From the q, k and v of one token to those of the next layer, or of several layers further on; the cache is of 16 bits."""

    def make(rows: int, width: int, dtype: torch.dtype, device: str) -> Call:
        attended, hidden, inter, n = sizes
        weights = hidden * attended + 3 * hidden * inter + n * hidden
        moved = count * (weights * BYTES[form] + 4.0 * length * heads[1] * HEAD_DIM + 2.0 * (2 * hidden + 2 * n))
        sets = harness.sets_for(int(moved)) if device == "cuda" else 1
        pages = -(-length // PAGE)
        data = []
        for _ in range(sets):
            caches = [minfer.allocate_kv_cache(pages, PAGE, heads[1], HEAD_DIM, dtype=dtype, device=device) for _ in range(count)]
            for cache in caches:
                for x in (cache.k, cache.v):
                    x.normal_()
            qkv = torch.randn(1, heads[0] + 2 * heads[1], HEAD_DIM, device=device).to(dtype)
            of_layers = [_weights(sizes, form, dtype, device) for _ in range(count)]
            data.append((qkv, torch.randn(1, hidden, device=device).to(dtype), caches, of_layers))
        table = torch.randperm(pages, device=device).to(torch.int32)[None]
        seq_lens = torch.tensor([length], dtype=torch.int32, device=device)
        positions = torch.tensor([length - 1], device=device)
        slots = table[0, -1:].long() * PAGE + (length - 1) % PAGE
        rotations = minfer.rope_cache(500000.0, HEAD_DIM, length).to(device)
        scale = HEAD_DIM**-0.5
        ops = torch.ops.minfer
        op = {"int4": ops._w4a16_decoder_layers, "e4m3": ops._fp8_decoder_layers, "dense": ops._decoder_layers}[form]
        none: dict[str, list[Tensor]] = {name: [] for name in ("q_weight", "k_weight", "o_bias", "down_bias", "next_bias")}
        attention = dict(scale=scale, qk_eps=0.0, qk_weight_offset=0.0)
        block_options = dict(eps=EPS, weight_offset=0.0, activation="silu") | OPTIONS[form]

        def launched(i: int, residual: Tensor | None, each: int) -> Tensor:
            """Layers in launches of ``each``."""
            qkv, x, caches, of_layers = data[i]
            x = x if residual is None else residual
            for first in range(0, count, each):
                own, w = caches[first : first + each], of_layers[first : first + each]
                places = ([c.k for c in own], [c.v for c in own], table, seq_lens, slots, positions, rotations)
                lists = {name: [tensors[name] for tensors in w] for name in w[0]}
                more = dict(windows=[-1] * len(own), constant=True)
                qkv = op(qkv, x, *places, **attention, **lists, **none, **block_options, **more).view(1, -1, HEAD_DIM)
            return qkv.flatten(1)

        def attend(qkv: Tensor, cache: Any) -> Tensor:
            q = minfer.qk_norm_rope_append(qkv, None, None, rotations, positions, cache.k, cache.v, slots)
            return minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, scale=scale)[0].flatten(1)

        def separate(i: int, residual: Tensor | None = None) -> Tensor:
            qkv, x, caches, of_layers = data[i]
            x = x if residual is None else residual
            for cache, w in zip(caches, of_layers, strict=True):
                more = dict(constant_weights=True) if device == "cuda" else {}
                qkv = OPERATORS[form](attend(qkv, cache), x, **w, **block_options, **more).view(1, -1, HEAD_DIM)
            return qkv.flatten(1)

        def ours(i: int, residual: Tensor | None = None) -> Tensor:
            return launched(i, residual, count) if device == "cuda" else separate(i, residual)

        def error() -> float:
            """Of one layer against float64; of several against launches of their own, whose bits they have."""
            qkv, x, caches, of_layers = data[0]
            if count == 1:
                return deviation(ours(0, x.clone()), _truth(attend(qkv, caches[0]), x, of_layers[0]))
            return deviation(ours(0, x.clone()), launched(0, x.clone(), 1) if device == "cuda" else separate(0, x.clone()))

        peers: dict[str, Callable[[int], Any]] = {"ours:separate": separate}
        if count > 1 and device == "cuda":
            peers["ours:one_launch"] = lambda i: launched(i, None, 1)
        return Call(ours, peers, moved, error, "one_launch", sets)

    return make


def cells() -> list[tuple[str, int, int, Callable[..., Call]]]:
    """(what, rows, columns of the result, call)."""
    return [
        (f"{op.__name__}, {name}", rows, sizes[3], block(sizes, form))
        for form, op in OPERATORS.items()
        for name, sizes in MODELS.items()
        for rows in TOKENS
    ]


def layer_cells() -> list[tuple[str, int, int, Callable[..., Call]]]:
    found = [
        (f"{op.__name__.replace('block', 'layer')}, {name}, {length} keys", 1, MODELS[name][3], layer(MODELS[name], heads, length, form))
        for form, op in OPERATORS.items()
        for name, heads in HEADS.items()
        for length in LENGTHS
    ]
    return found + [
        (
            f"{op.__name__.replace('block', 'layers')}, {name}, {LAYERS} layers, {LENGTHS[0]} keys",
            1,
            MODELS[name][3],
            layer(MODELS[name], heads, LENGTHS[0], form, LAYERS),
        )
        for form, op in OPERATORS.items()
        for name, heads in HEADS.items()
    ]
