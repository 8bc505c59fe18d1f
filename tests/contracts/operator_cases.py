"""A call of every operator on a small problem, for tests of what all of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minfer
import torch
from minfer._core.operator import OPERATORS

from tests.moe.grouped_quantized_cases import has_kernels
from tests.moe.grouped_scaled_cases import has_kernels as has_grouped_scaled_kernels
from tests.scaled_gemm.cases import has_kernels as has_scaled_kernels

DTYPE = torch.bfloat16
Call = Callable[[], tuple[torch.Tensor, ...]]


def names() -> set[str]:
    """Operators of the library, but for those that ask what it holds."""
    found = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {name.partition(".")[0] for library, _, name in found if library == "minfer" and not name.startswith("_")}


def calls(device: str) -> dict[str, list[Call]]:
    """operator -> its calls, of every kind of kernel; each can be repeated, also at the same time. Nothing is left running. An operator
    for which the build has no kernel on this device is not there."""
    generator = torch.Generator("cpu").manual_seed(7)

    def randn(*shape: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    def randint(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype).to(device)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    found: dict[str, list[Call]] = {}

    def add(name: str, *arguments: Any, **options: Any) -> None:
        def call() -> tuple[torch.Tensor, ...]:
            out = OPERATORS[name].wrapper(*arguments, **options)
            return out if isinstance(out, tuple) else (out,)

        found.setdefault(name, []).append(call)

    # ---- products
    a, w = randn(24, 512), randn(256, 512, scale=0.05)
    add("gemm", a, w.t())
    add("gemm", a, w.t(), c=randn(24, 256), beta=0.5, bias=randn(256), activation="silu")
    add("gemm", a[:, 1:], w.t()[1:])  # no TMA: copied, or element by element
    add("gemm", randn(3, 24, 512), w.t(), out_dtype=torch.float32)
    add("gemm", randn(5, 4096), randn(4096, 136, scale=0.02))  # a long k: a workspace
    add("gemm_gated", a, w.t())
    in_codes = dict(quant="fp8_tensor", scale=torch.full((1,), 0.02, device=device))
    add("gemm", a, w.t(), c=randn(24, 256), beta=0.5, **in_codes)
    add("gemm", a[:, 1:], w.t()[1:, 1:], **in_codes)
    add("gemm", randn(5, 4096), randn(4096, 136, scale=0.02), **in_codes)
    add("gemm_gated", a, w.t(), **in_codes)
    for dtype, name in ((torch.float8_e4m3fn, "gemm_fp8"), (torch.int8, "gemm_int8")) if has_scaled_kernels(device) else ():
        x, y = (randint(-100, 100, shape, torch.int32).to(dtype) for shape in ((24, 512), (256, 512)))
        by_row, by_column = (torch.rand(lines, generator=generator).to(device) / 100 for lines in (24, 256))
        add(name, x, y.t(), by_row, by_column, c=randn(24, 256), beta=0.5, bias=randn(256), activation="silu")
        add(f"{name}_gated", x, y.t(), by_row[:1], by_column)
        if dtype == torch.int8:
            add(name, x, y.t(), by_row, by_column, out_dtype=torch.int32)
            continue
        blocks = [torch.rand(shape, generator=generator).to(device) / 100 for shape in ((24, 4), (2, 4))]
        add(name, x, y.t(), *blocks)
        add(name, x[:, 3:], y[:, 3:].t(), *blocks, fast_accum=True)  # copied first
        add(name, x, y.t(), by_row, by_column, out_scale=in_codes["scale"])
    codes = randint(0, 16, (256, 512), torch.uint8)
    scales, perm = randn(4, 256, scale=0.02), torch.randperm(512, generator=generator).to(torch.int32).to(device)
    packed = minfer.w4a16_pack(codes)
    for zeros in (None, randint(0, 16, (4, 256), DTYPE)):
        add("w4a16_gemm", a, packed, scales, zeros)
    add("w4a16_gemm", a, packed, scales, perm=perm, kernel="dequantize")
    add("w4a16_gemm", a, packed, scales, **in_codes)
    add("w4a16_gemm_gated", a, packed, scales)
    add("w4a16_gemm_gated", a, packed, scales, **in_codes)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        x, by_row = randint(-100, 100, (24, 512), torch.int32).to(dtype), torch.rand(24, 1, generator=generator).to(device) / 100
        add("w4a8_gemm", x, by_row, packed, scales, c=randn(24, 256), bias=randn(256), activation="silu")
        add("w4a8_gemm", x, by_row[:1], packed, scales, **in_codes)
        add("w4a8_gemm", x[:, :256], by_row, minfer.w4a16_pack(codes[:, :256]), scales[:2], kernel="w4a16")
        add("w4a8_gemm_gated", x, by_row, packed, scales)
    add("w4a16_pack", codes)
    add("w4a16_dequantize", packed, scales, n=256, k=512)
    wide, wide_scales = minfer.w8a16_pack(randint(0, 256, (256, 512), torch.uint8)), randn(1, 256, scale=0.002)
    packed_wide, weight_scales = wide, scales
    add("w8a16_gemm", a, wide, wide_scales)
    add("w8a16_gemm_gated", a, wide, wide_scales)
    add("w8a16_gemm", a, wide, wide_scales, **in_codes)
    add("w8a16_pack", randint(0, 256, (256, 512), torch.uint8))
    add("w8a16_dequantize", wide, wide_scales, n=256, k=512)

    # ---- experts
    tokens, experts, top_k, hidden, inter = 24, 4, 2, 512, 128
    x, gate = randn(tokens, hidden), randn(experts, hidden, scale=0.05)
    add("moe_router", randn(tokens, experts), top_k)
    add("moe_router_gemm", x, gate, top_k)
    add("moe_router_gemm", randn(96, hidden), gate, top_k)  # more tokens than its own kernel takes
    weights, ids = minfer.moe_router_gemm(x, gate, top_k)
    add("moe_sort", ids, experts, weights=weights)
    token_index, offsets, inverse, scale = minfer.moe_sort(ids, experts, weights=weights)
    w13, w2 = randn(experts, 2 * inter, hidden, scale=0.05), randn(experts, hidden, inter, scale=0.05)
    add("grouped_gemm", x, w13.mT, offsets, gather=token_index, activation="silu", gated=True)
    add("grouped_gemm", randn(tokens * top_k, inter), w2.mT, offsets, row_scale=scale)
    add("grouped_gemm", x, w13.mT, offsets, gather=token_index, activation="silu", gated=True, **in_codes)
    add("grouped_gemm_masked", randn(experts, 8, hidden), w13.mT, integers(3, 8, 0, 1))
    add("grouped_gemm_masked", randn(experts, 8, hidden), w13.mT, integers(3, 8, 0, 1), **in_codes)
    add("moe_combine", randn(tokens * top_k, hidden), inverse, weights)
    add("moe_ffn", x, w13, w2, weights, ids)
    packed13 = torch.stack([minfer.w4a16_pack(randint(0, 16, (2 * inter, hidden), torch.uint8)) for _ in range(experts)])
    packed2 = torch.stack([minfer.w4a16_pack(randint(0, 16, (hidden, inter), torch.uint8)) for _ in range(experts)])
    scales13, scales2 = randn(experts, hidden // 128, 2 * inter, scale=0.02), randn(experts, inter // 128, hidden, scale=0.02)
    if has_kernels(device):
        add("grouped_w4a16_gemm", x, packed13, scales13, None, offsets, gather=token_index, activation="silu", gated=True)
        add("grouped_w4a16_gemm", x, packed13, scales13, None, offsets, gather=token_index, **in_codes)
        add("moe_ffn_w4a16", x, packed13, scales13, None, packed2, scales2, None, weights, ids)
    for dtype, name in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")) if has_grouped_scaled_kernels(device) else ():
        shapes = ((tokens, hidden), (experts, 8, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter))
        rows, slabs, up, down = (randint(-100, 100, shape, torch.int32).to(dtype) for shape in shapes)
        number = lambda *shape: torch.rand(shape, generator=generator).to(device) / 100  # noqa: E731
        one, of_up, of_down = number(1), number(experts, 2 * inter), number(experts)
        gates, bias = dict(gather=token_index, activation="silu", gated=True), randn(experts, 2 * inter)
        add(f"grouped_gemm_{name}", rows, up.mT, number(tokens), of_up, offsets, bias=bias, **gates)
        add(f"grouped_gemm_{name}", rows[:, 3:], up[..., 3:].mT, number(tokens, 8), of_up, offsets, gather=token_index)  # copied first
        add(f"grouped_gemm_{name}_masked", slabs, up.mT, number(experts, 8, hidden // 32), of_up, integers(3, 8, 0, 1))
        add(f"moe_ffn_{name}", x, up, down, of_up, of_down, weights, ids)
        add(f"moe_ffn_{name}", rows, up, down, one, one, weights, ids, x_scale=number(tokens, 4), b2=randn(experts, hidden))
        if dtype == torch.float8_e4m3fn:
            blocks = number(experts, 2, 4), number(experts, 4, 1)
            add(f"grouped_gemm_{name}", rows, up.mT, number(tokens, 4), blocks[0], offsets, out_scale=in_codes["scale"], **gates)
            add(f"grouped_gemm_{name}", rows, up.mT, one, of_up, offsets, gather=token_index, fast_accum=True)
            add(f"moe_ffn_{name}", x, up, down, *blocks, weights, ids)

    # ---- rows
    rows, factor, gated = randn(24, 520), randn(520), randn(24, 2 * 520)
    wide, odd = randn(3, 9, 16384), randn(24, 1001)[:, 1:]
    modes = [(dict(quant="fp8_tensor"), dict(scale=torch.full((1,), 0.02, device=device)))]
    modes += [(dict(quant=quant), {}) for quant in ("fp8_token", "fp8_block128", "int8_token")]
    for x in (rows, wide, odd):
        add("rms_norm", x, randn(x.shape[-1]), weight_offset=1.0)
        add("layer_norm", x, randn(x.shape[-1]), randn(x.shape[-1]))
        add("softmax", x)
        add("hadamard", x, 8)
        add("log_softmax", x.float())
        add("activation", x, "gelu", bias=randn(x.shape[-1]))
        add("gated_activation", x)
    for block in (512, 48, 14336, 32768):
        add("hadamard", randn(2, 2 * block), block)
    for quant, scale in modes:
        add("rms_norm_quantized", rows, **quant, weight=factor, **scale)
        add("gated_activation_quantized", gated, **quant, **scale)
        add("quantize", odd, **quant, **scale)
        q, scales = minfer.ops.quantize(rows, **quant, **scale)
        add("dequantize", q, scale.get("scale", scales), **quant, dtype=DTYPE)

        def add_norm(quant=quant, scale=scale) -> tuple[torch.Tensor, ...]:  # what is written is made anew
            residual, norm = rows + 1, torch.empty_like(rows)
            q, scales = minfer.add_rms_norm_quantized(rows, residual, **quant, weight=factor, norm=norm, **scale)
            return q, scales, norm, residual

        found.setdefault("add_rms_norm_quantized", []).append(add_norm)

    def add_norm_16bit() -> tuple[torch.Tensor, ...]:
        residual = rows + 1
        return minfer.add_rms_norm(rows, residual, factor), residual

    logits, penalised = randn(5, 40000), dict(counts=integers(*[1] * 5).view(5, 1).repeat(1, 40000), presence_penalty=0.5)
    for options in (dict(temperature=0.0), {}, dict(top_k=50, top_p=0.9), dict(top_p=0.99), dict(top_k=900), penalised):
        add("sample", logits, top_logprobs=3, offset=7, **options)

    turns, positions = minfer.rope_cache(10000.0, 64, 128, device=device), randint(0, 128, (24,), torch.int64)
    qkv = randn(24, 12, 64)

    def rotate(interleaved: bool) -> tuple[torch.Tensor, ...]:
        own = qkv.clone()
        minfer.rope(own[:, :8], own[:, 8:10], turns, positions, interleaved=interleaved)
        return (own,)

    def behind_norm(name: str, *weight: torch.Tensor, lines: int = 24, **options: Any) -> None:
        def call() -> tuple[torch.Tensor, ...]:
            x = rows_of_products[:lines]
            residual = x + 1
            return OPERATORS[name].wrapper(x, None, *weight, residual=residual, **options), residual

        found.setdefault(name, []).append(call)

    found["add_rms_norm"] = [add_norm_16bit]
    rows_of_products = a
    for name in ("rms_norm_gemm", "rms_norm_gemm_gated"):
        for lines in (24, 3, 13):
            behind_norm(name, w.t(), lines=lines, bias=randn(256))
        if device.startswith("cuda"):
            for lines in (1, 8, 16):
                behind_norm(name, w.t(), lines=lines, kernel="one_launch")
        behind_norm(f"{name[:9]}w4a16_{name[9:]}", packed, weight_scales)
        behind_norm(f"{name[:9]}w8a16_{name[9:]}", packed_wide, wide_scales)

    def block(op: str, weights: dict[str, torch.Tensor], lines: int, **options: Any) -> None:
        def call() -> tuple[torch.Tensor, ...]:
            residual = of_block["a"][:lines] + 1
            arguments = of_block | weights | {"a": of_block["a"][:lines], "residual": residual}
            return OPERATORS[op].wrapper(**arguments, **options), residual

        found.setdefault(op, []).append(call)

    of_block = {"a": a, "mlp_norm": randn(512), "next_norm": randn(512)}
    shapes = {"o": (512, 512), "gate_up": (2048, 512), "down": (512, 1024), "next": (768, 512)}
    in_int4, in_fp8, in_blocks, in_16_bits = {}, {}, {}, {}
    for name, (n, k) in shapes.items():
        in_int4[f"{name}_qweight"] = minfer.w4a16_pack(randint(0, 16, (n, k), torch.uint8))
        in_int4[f"{name}_scales"] = randn(k // 128, n, scale=0.02)
        in_16_bits[f"{name}_weight"] = randn(n, k, scale=k**-0.5)
        codes = {f"{name}_weight": randn(n, k).to(torch.float8_e4m3fn)}
        in_fp8 |= codes | {f"{name}_scale": number(n)}
        in_blocks |= codes | {f"{name}_scale": number(2, 8, 4) if name == "gate_up" else number(n // 128, k // 128)}
    kinds = [("w4a16_decoder_block", in_int4), ("decoder_block", in_16_bits)]
    kinds += [("fp8_decoder_block", weights) for weights in (in_fp8, in_blocks)] if has_scaled_kernels(device) else []
    for op, weights in kinds:
        for lines in (24, 2, 1):
            block(op, weights, lines, o_bias=randn(512))
            block(op, weights, lines, kernel="separate")
        if device.startswith("cuda") and torch.cuda.get_device_capability(device) == (9, 0):
            for lines in (1, 2):
                block(op, weights, lines, kernel="one_launch")
    found["rope"] = [lambda: rotate(False), lambda: rotate(True)]
    add("embedding", randint(0, 300, (24,), torch.int32), randn(300, 520), scale=520**0.5)

    # ---- attention
    heads, heads_kv, d = 8, 2, 64
    q, k, v = randn(2, 96, heads, d), randn(2, 96, heads_kv, d), randn(2, 96, heads_kv, d)
    add("attention", q, k, v, causal=True)
    add("attention_varlen", q[0], k[0], v[0], integers(0, 40, 96), integers(0, 40, 96), 56, 56, causal=True)
    pages, page = 8, 64
    lengths, table = integers(100, 37), torch.randperm(pages, generator=generator).to(torch.int32).to(device).view(2, 4)
    new_k, new_v = randn(2, heads_kv, d), randn(2, heads_kv, d)
    slots = torch.tensor([5, 200], device=device)
    packed, turns_of_keys = torch.cat([randn(2, heads, d), new_k, new_v], 1), minfer.rope_cache(10000.0, d, 100, device=device)
    places = torch.tensor([69, 36], device=device)
    for kv_format in ("16bit", "fp8_e4m3", "int8", "int4"):
        cache = minfer.allocate_kv_cache(pages, page, heads_kv, d, kv_format=kv_format, dtype=DTYPE, device=device, batch=2)
        every = torch.arange(pages * page, device=device)
        fill = dict(cu_seqlens=integers(0, 256, 512)) if kv_format == "int4" else {}
        minfer.kv_cache_append(
            randn(pages * page, heads_kv, d), randn(pages * page, heads_kv, d), cache.k, cache.v, every, **cache.scales(), **fill
        )
        for queries in (1, 64):
            add("attention_paged", randn(2, queries, heads, d), cache.k, cache.v, lengths, block_table=table, **cache.scales())

        own = type(cache)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in cache))

        def append(cache=own) -> tuple[torch.Tensor, ...]:  # again and again the same into the same slots
            minfer.kv_cache_append(new_k, new_v, cache.k, cache.v, slots, **cache.scales())
            return tuple(x for x in cache if isinstance(x, torch.Tensor))

        def append_prepared(cache=own) -> tuple[torch.Tensor, ...]:
            weights, rotation = (new_k[0, 0], new_v[0, 0]), (turns_of_keys, places)
            queries = minfer.qk_norm_rope_append(packed, *weights, *rotation, cache.k, cache.v, slots, **cache.scales())
            return queries, *(x for x in cache if isinstance(x, torch.Tensor))

        found.setdefault("kv_cache_append", []).append(append)
        found.setdefault("qk_norm_rope_append", []).append(append_prepared)
    add("attention_paged", randn(2, 1, heads, d), cache.k, cache.v, lengths, block_table=table, num_splits=4, **cache.scales())
    parts = [(randn(2, 96, heads, d), randn(2, heads, 96).float()) for _ in range(2)]
    add("merge_attention_states", *zip(*parts, strict=True))
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return found
