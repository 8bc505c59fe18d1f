"""Bugs that the driver must find, put between the caller and an operator: what a kernel, a binding or a check could do wrong.

Each replaces ``minfer.<operator>`` while it is injected. None of them is in minfer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import minfer
import torch
from torch import Tensor

from tests.attention.options import SOFTMAX_OPTIONS

from .compare import unit

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Bug:
    """``wrap`` makes the faulty operator of the right one. ``raises``: found by what calls raise; of others, by what they return. A bug of
    a GEMM is one of numbers, and leaves ``quant`` alone, unless it is one of codes."""

    name: str
    operator: str
    wrap: Callable[[Operator], Operator]
    raises: bool = False


BUGS: list[Bug] = []


def bug(operator: str, raises: bool = False, codes: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function (right operator, *its arguments) -> what the faulty one returns."""

    def register(faulty: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(right: Operator) -> Operator:
            def run(*args: Any, **kwargs: Any) -> Any:
                other = "gemm" in operator and codes != (kwargs.get("quant") is not None)
                return right(*args, **kwargs) if other else faulty(right, *args, **kwargs)

            return run

        BUGS.append(Bug(faulty.__name__, operator, wrap, raises))
        return faulty

    return register


@contextmanager
def injected(found: Bug) -> Iterator[None]:
    right = getattr(minfer, found.operator)
    setattr(minfer, found.operator, found.wrap(right))
    try:
        yield
    finally:
        setattr(minfer, found.operator, right)


def _is_fake(x: Tensor) -> bool:
    return x.device.type == "meta" or type(x) is not Tensor


# ---- gemm ----------------------------------------------------------------------------------------------------------------------------


@bug("gemm")
def last_row_is_not_written(right, a, b, **options):
    d = right(a, b, **options)
    if d.shape[-2] > 1:
        d[..., -1, :] = math.nan
    return d


@bug("gemm")
def one_element_is_off_by_four_roundings(right, a, b, **options):
    d = right(a, b, **options)
    if d.numel() and not _is_fake(d):
        at = int(d.abs().argmax())  # not one of those that are near zero beside their terms
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), d.shape))
        d[place] *= 1 + 4 * unit(d.dtype)
    return d


@bug("gemm")
def bias_is_dropped_behind_the_last_whole_tile(right, a, b, **options):
    bias = options.get("bias")
    if bias is not None and bias.dim() == 1:
        bias = bias.clone()
        bias[bias.shape[0] // 64 * 64 :] = 0
    return right(a, b, **(options | {"bias": bias}))


@bug("gemm")
def alpha_is_dropped(right, a, b, **options):
    alpha = options.get("alpha", 1.0)
    return right(a, b, **(options | {"alpha": 1.0 if math.isfinite(alpha) and alpha != 0 and abs(alpha) < 1e30 else alpha}))


@bug("gemm")
def out_has_another_dtype(right, a, b, **options):
    d = right(a, b, **options)
    return d.float() if options.get("out") is None else d


@bug("gemm")
def guard_band_is_written(right, a, b, **options):
    d = right(a, b, **options)
    out = options.get("out")
    if out is not None and out.numel() and not _is_fake(out):
        behind = out.storage_offset() + sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True)) + 1
        out.as_strided((1,), (1,), behind).zero_()
    return d


@bug("gemm")
def an_input_is_modified(right, a, b, **options):
    d = right(a, b, **options)
    if a.numel() and not _is_fake(a):
        a.select(0, 0).neg_()
    return d


@bug("gemm")
def c_is_read_though_beta_is_zero(right, a, b, **options):
    d, c = right(a, b, **options), options.get("c")
    return d + 0 * c.to(d.dtype) if c is not None and options.get("beta", 0.0) == 0 and options.get("out") is None else d


@bug("gemm")
def gelu_is_the_other_gelu(right, a, b, **options):
    swapped = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}
    activation = options.get("activation", "none")
    return right(a, b, **(options | {"activation": swapped.get(activation, activation)}))


@bug("gemm")
def batch_entries_are_mixed_up(right, a, b, **options):
    d = right(a, b, **options)
    return d.flip(0) if d.dim() == 3 and options.get("out") is None else d


@bug("gemm")
def bits_differ_from_run_to_run(right, a, b, **options):
    d = right(a, b, **options)
    if d.numel() and not _is_fake(d):
        with _lock:
            again = _last_operands[0] == (a.data_ptr(), b.data_ptr())
            _last_operands[0] = (a.data_ptr(), b.data_ptr())
        if again:
            d[tuple(0 for _ in d.shape)] *= 1 + 2 * unit(d.dtype)
    return d


_last_operands: list[tuple[int, int]] = [(0, 0)]
_lock = threading.Lock()
_shared: dict[Any, Tensor] = {}


@bug("gemm")
def threads_share_a_workspace(right, a, b, **options):
    d = right(a, b, **options)
    if options.get("out") is not None or _is_fake(d) or threading.current_thread() is threading.main_thread():
        return d
    with torch.inference_mode(False):
        buffer = _shared.setdefault((d.shape, d.dtype), d.clone())
        buffer.copy_(d)
        time.sleep(0.002)
        return buffer.clone()


@bug("gemm")
def an_infinite_alpha_is_accepted(right, a, b, **options):
    if not math.isfinite(options.get("alpha", 1.0)):
        options = options | {"alpha": 1.0}
    return right(a, b, **options)


@bug("gemm", raises=True)
def errors_do_not_name_the_operator(right, a, b, **options):
    try:
        return right(a, b, **options)
    except RuntimeError:
        raise RuntimeError("CUDA error: invalid argument") from None


@bug("gemm", codes=True)
def codes_are_rounded_twice(right, a, b, **options):
    """To 16 bits first."""
    if options.get("out") is not None or options["quant"] != "fp8_tensor" or options.get("scale") is None:
        return right(a, b, **options)
    q, scale = right(a, b, **options)
    d = right(a, b, **(options | {"quant": None, "scale": None}))
    return (d.float() / scale).clamp(-448, 448).to(q.dtype), scale


@bug("gemm", codes=True)
def codes_are_not_saturated(right, a, b, **options):
    q, scale = right(a, b, **options)
    if not _is_fake(q):
        q.view(torch.uint8)[q.float().abs() == 448.0] = 0x7F
    return q, scale


@bug("grouped_gemm", codes=True)
def scale_is_multiplied_with(right, a, b, offsets, **options):
    scale = options.get("scale")
    if scale is None or scale.dtype != torch.float32 or scale.shape != (1,):
        return right(a, b, offsets, **options)
    return right(a, b, offsets, **(options | {"scale": 1 / scale}))[0], scale


@bug("gemm_gated")
def gate_and_up_are_swapped(right, a, b, **options):
    n = b.shape[-1]
    if n % 16 == 0 and n:
        order = torch.arange(n).view(-1, 2, 8).flip(1).flatten()
        b = b.index_select(-1, order)
        bias = options.get("bias")
        if bias is not None and bias.dim() == 1 and bias.shape[0] == n:
            options = options | {"bias": bias.index_select(0, order)}
    return right(a, b, **options)


# ---- quantised weights -----------------------------------------------------------------------------------------------------------------


@bug("w4a16_gemm")
def scales_are_those_of_the_next_group(right, a, qweight, scales, zeros=None, **options):
    if scales.dim() == 2:
        raw = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales
        scales = raw.roll(-1, 0).view(scales.dtype)
    return right(a, qweight, scales, zeros, **options)


@bug("w4a16_gemm")
def zero_points_are_one_too_many(right, a, qweight, scales, zeros=None, **options):
    return right(a, qweight, scales, None if zeros is None or not zeros.dtype.is_floating_point else zeros + 1, **options)


@bug("w8a16_gemm")
def act_order_is_ignored(right, a, qweight, scales, zeros=None, **options):
    perm = options.get("perm")
    if (
        perm is not None
        and perm.dtype == torch.int32
        and perm.dim() == 1
        and bool((perm.sort().values == torch.arange(perm.shape[0])).all())
    ):
        options = options | {"perm": None}
    return right(a, qweight, scales, zeros, **options)


@bug("w4a16_dequantize")
def small_codes_are_rounded_twice(right, qweight, scales, zeros=None, **options):
    w = right(qweight, scales, zeros, **options)
    return (w.float() * (1 + 2 * unit(w.dtype))).to(w.dtype)


@bug("w4a16_pack")
def padding_is_not_zero(right, codes, **options):
    packed = right(codes, **options)
    if codes.shape[1] % 64 and packed.numel() and not _is_fake(packed):
        packed[0, -1, -1] |= 0x70000000
    return packed


# ---- experts ---------------------------------------------------------------------------------------------------------------------------


@bug("grouped_gemm")
def an_expert_without_rows_shifts_those_behind(right, a, b, offsets, **options):
    if offsets.dim() == 1 and offsets.shape[0] == b.shape[0] and offsets.dtype == torch.int32 and not _is_fake(offsets):
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
        used = sizes[sizes > 0]
        ends = used.cumsum(0).int()
        offsets = torch.cat([ends, offsets[-1:].expand(offsets.shape[0] - ends.shape[0])])
    return right(a, b, offsets, **options)


@bug("grouped_gemm")
def row_scale_is_applied_before_the_activation(right, a, b, offsets, **options):
    scale = options.get("row_scale")
    if scale is None or options.get("gather") is not None or options.get("bias") is not None or scale.dim() != 1 or len(scale) != len(a):
        return right(a, b, offsets, **options)
    return right((a.float() * scale[:, None]).to(a.dtype), b, offsets, **(options | {"row_scale": None}))


@bug("grouped_gemm_masked")
def rows_behind_the_count_are_written_to_out(right, a, b, counts, **options):
    out = right(a, b, counts, **options)
    if options.get("out") is not None and not _is_fake(out) and counts.dim() == 1:
        for expert, count in enumerate(counts.tolist()):
            out[expert, min(max(count, 0), out.shape[1]) :] = 0
    return out


@bug("grouped_gemm_fp8")
def scales_of_rows_are_not_gathered(right, a, b, a_scale, b_scale, offsets, **options):
    gather = options.get("gather")
    if gather is not None and a_scale.numel() > 1 and a_scale.dim() in (1, 2) and a_scale.shape[0] == a.shape[0] and not _is_fake(a):
        a_scale = torch.roll(a_scale.view(torch.uint8) if a_scale.dtype == torch.uint8 else a_scale.nan_to_num(1.0), 1, 0)
    return right(a, b, a_scale, b_scale, offsets, **options)


@bug("grouped_gemm_fp8")
def blocks_of_up_have_the_scales_of_the_gate(right, a, b, a_scale, b_scale, offsets, **options):
    if options.get("gated") and b_scale.dim() == 3 and b_scale.shape[1:] != (b.shape[-1], 1) and b_scale.shape[1] % 2 == 0:
        half = b_scale.shape[1] // 2
        b_scale = torch.cat([b_scale[:, :half], b_scale[:, :half]], 1)
    return right(a, b, a_scale, b_scale, offsets, **options)


@bug("grouped_gemm_int8")
def bias_of_float32_is_rounded(right, a, b, a_scale, b_scale, offsets, **options):
    bias = options.get("bias")
    if bias is not None and bias.dtype == torch.float32 and not _is_fake(bias):
        options = options | {"bias": bias.to(torch.float8_e4m3fn).float()}
    return right(a, b, a_scale, b_scale, offsets, **options)


@bug("grouped_gemm_int8_masked")
def the_first_expert_scales_all_weights(right, a, b, a_scale, b_scale, counts, **options):
    if b_scale.dim() and b_scale.shape[0] == b.shape[0] > 1 and not _is_fake(b_scale):
        b_scale = b_scale.nan_to_num(1.0)[:1].expand(b_scale.shape)
    return right(a, b, a_scale, b_scale, counts, **options)


@bug("grouped_gemm_fp8_masked")
def codes_are_of_the_next_scale(right, a, b, a_scale, b_scale, counts, **options):
    scale = options.get("out_scale")
    return right(a, b, a_scale, b_scale, counts, **(options | ({} if scale is None else {"out_scale": scale * 1.1})))


@bug("moe_ffn_fp8")
def what_is_between_the_products_has_two_bits(right, x, w13, w2, *rest, **options):
    return right(x, w13, w2, *rest, **options) if _is_fake(x) or x.dim() != 2 else _coarse(right(x, w13, w2, *rest, **options))


def _coarse(y: Tensor) -> Tensor:
    """With two bits behind the first."""
    exponent = torch.exp2(y.float().abs().clamp(min=1e-30).log2().floor() - 2)
    return ((y.float() / exponent).round() * exponent).to(y.dtype)


@bug("moe_ffn_int8")
def routing_weights_count_twice(right, x, w13, w2, w13_scale, w2_scale, weights, ids, **options):
    return right(x, w13, w2, w13_scale, w2_scale, weights * weights if weights.dtype == torch.float32 else weights, ids, **options)


@bug("moe_ffn")
def ids_outside_go_to_the_first_expert(right, x, w13, w2, weights, ids, **options):
    experts = w13.shape[0]
    inside = (ids >= 0) & (ids < experts)
    return right(x, w13, w2, weights, torch.where(inside, ids, 0) if ids.dtype == torch.int32 else ids, **options)


@bug("moe_combine")
def weights_are_those_of_other_slots(right, y, inverse, weights=None):
    return right(y, inverse, None if weights is None else weights.flip(1) if weights.dim() == 2 else weights)


@bug("moe_sort")
def sort_is_not_stable(right, ids, num_experts, *, weights=None):
    token_index, offsets, inverse, sorted_weights = right(ids, num_experts, weights=weights)
    if not _is_fake(offsets):
        begin = 0
        for end in offsets.tolist():
            token_index[begin:end] = token_index[begin:end].flip(0)
            begin = end
    return token_index, offsets, inverse, sorted_weights


@bug("moe_router")
def ties_go_to_the_higher_index(right, logits, top_k, **options):
    if logits.dim() != 2 or options.get("n_group", 1) != 1 or options.get("correction_bias") is not None:
        return right(logits, top_k, **options)
    weights, ids = right(logits.flip(1), top_k, **options)
    return weights, logits.shape[1] - 1 - ids


@bug("moe_router")
def weights_are_not_scaled(right, logits, top_k, **options):
    scale = options.get("scale", 1.0)
    return right(logits, top_k, **(options | {"scale": 1.0 if math.isfinite(scale) and abs(scale) < 1e30 else scale}))


# ---- attention -------------------------------------------------------------------------------------------------------------------------


@bug("attention")
def mask_is_aligned_to_the_first_key(right, q, k, v, **options):
    if options.get("causal") and q.dim() == k.dim() == v.dim() == 4 and k.shape[1] == v.shape[1] > q.shape[1]:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    return right(q, k, v, **options)


@bug("attention")
def lse_is_in_units_of_log2(right, q, k, v, **options):
    out, lse = right(q, k, v, **options)
    return out, lse / math.log(2)


@bug("attention_varlen")
def the_key_behind_the_last_sequence_is_seen(right, q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_k, **options):
    if cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k.dim() == 1 and len(cu_seqlens_k) and not _is_fake(q):
        cu_seqlens_k = cu_seqlens_k.clone()
        cu_seqlens_k[-1] = min(int(cu_seqlens_k[-1]) + 1, k.shape[0])
        max_seqlen_k += max_seqlen_k >= 0
    return right(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k=max_seqlen_k, **options)


@bug("attention_paged")
def the_row_behind_a_sequence_is_seen(right, q, k_cache, v_cache, seq_lens, **options):
    return right(q, k_cache, v_cache, seq_lens + 1 if seq_lens.dtype == torch.int32 else seq_lens, **options)


@bug("attention_paged")
def window_is_one_too_wide(right, q, k_cache, v_cache, seq_lens, **options):
    window = options.get("window_left", -1)
    return right(q, k_cache, v_cache, seq_lens, **(options | {"window_left": window + 1 if window >= 0 else window}))


def _ignored(name: str) -> None:
    """Each number among the softmax's options; values that cannot be right are refused as ever."""
    option = SOFTMAX_OPTIONS[name]

    def faulty(right, *operands, **options):
        value = options.get(name)
        if isinstance(value, float) and not any(value is wrong for wrong, _ in option.wrong):
            options[name] = option.default
        return right(*operands, **options)

    faulty.__name__ = f"{name}_is_ignored"
    bug("attention_paged")(faulty)


for _name, _option in SOFTMAX_OPTIONS.items():
    if isinstance(_option.alone, float):
        _ignored(_name)


@bug("attention_paged")
def sinks_count_twice(right, q, k_cache, v_cache, seq_lens, **options):
    sinks = options.get("sinks")
    if sinks is not None and sinks.dtype.is_floating_point:
        options = options | {"sinks": sinks + math.log(2)}
    return right(q, k_cache, v_cache, seq_lens, **options)


@bug("attention_paged")
def a_stale_page_is_read(right, q, k_cache, v_cache, seq_lens, **options):
    table = options.get("block_table")
    if table is not None and table.dim() == 2 and table.shape[1] > 1 and table.dtype == torch.int32:
        table = table.clone()
        table[:, 1] = table[:, 0]
        options = options | {"block_table": table}
    return right(q, k_cache, v_cache, seq_lens, **options)


@bug("attention_paged")
def entries_that_nobody_needs_are_checked(right, q, k_cache, v_cache, seq_lens, **options):
    table = options.get("block_table")
    if table is not None and not _is_fake(table) and bool(((table < 0) | (table >= k_cache.shape[0])).any()):
        raise RuntimeError("minfer::attention_paged: block_table must name one of the pages")
    return right(q, k_cache, v_cache, seq_lens, **options)


@bug("attention_paged")
def scales_of_v_are_those_of_k(right, q, k_cache, v_cache, seq_lens, **options):
    k_scale, v_scale = options.get("k_scale"), options.get("v_scale")
    if k_scale is not None and v_scale is not None and k_scale.shape == v_scale.shape and k_scale.dtype == v_scale.dtype:
        options = options | {"v_scale": k_scale}
    return right(q, k_cache, v_cache, seq_lens, **options)


@bug("merge_attention_states")
def the_last_part_is_left_out(right, outs, lses):
    return right(outs[:-1], lses[:-1]) if len(outs) == len(lses) > 1 else right(outs, lses)


@bug("kv_cache_append")
def a_token_is_stored_one_row_late(right, k, v, k_cache, v_cache, slot_mapping, **options):
    if slot_mapping.dtype == torch.int64 and slot_mapping.dim() == 1 and len(slot_mapping) and k_cache.dim() == 4:
        last = k_cache.shape[0] * k_cache.shape[1] - 1
        slot_mapping = slot_mapping.clone()
        slot_mapping[-1] = torch.where(slot_mapping[-1] >= 0, (slot_mapping[-1] + 1).clamp(max=last), slot_mapping[-1])
    return right(k, v, k_cache, v_cache, slot_mapping, **options)


@bug("kv_cache_append")
def tokens_without_a_slot_go_to_the_first(right, k, v, k_cache, v_cache, slot_mapping, **options):
    right(k, v, k_cache, v_cache, slot_mapping, **options)
    if k_cache.numel() and bool((slot_mapping < 0).any()) and not _is_fake(k_cache):
        k_cache[0, 0].view(torch.uint8).zero_()


@bug("kv_cache_append")
def scales_are_one_rounding_of_float16_off(right, k, v, k_cache, v_cache, slot_mapping, **options):
    right(k, v, k_cache, v_cache, slot_mapping, **options)
    scale = options.get("v_scale")
    if scale is not None and k_cache.dtype != torch.float8_e4m3fn and options.get("kv_format") != "fp8_e4m3" and not _is_fake(scale):
        scale.copy_((scale.float() * (1 + 2 * unit(torch.float16))).to(scale.dtype))


@bug("kv_cache_append")
def what_fp8_does_not_hold_becomes_nan(right, k, v, k_cache, v_cache, slot_mapping, **options):
    right(k, v, k_cache, v_cache, slot_mapping, **options)
    scale = options.get("v_scale")
    if scale is not None and scale.dim() <= 1 and not _is_fake(v_cache):
        codes = v_cache.view(torch.uint8)
        codes.copy_(torch.where((codes & 0x7F) == 0x7E, codes | 1, codes))  # 448


@bug("kv_cache_append")
def scales_are_infinite_instead_of_saturated(right, k, v, k_cache, v_cache, slot_mapping, **options):
    right(k, v, k_cache, v_cache, slot_mapping, **options)
    scale = options.get("v_scale")
    if scale is not None and scale.dtype == torch.float16 and not _is_fake(scale):
        scale.copy_(torch.where(scale.abs() == 65504, scale * 2, scale))


@bug("attention_paged")
def sequences_behind_512_have_no_keys(right, q, k_cache, v_cache, seq_lens, **options):
    if seq_lens.dim() == 1:
        behind = torch.arange(len(seq_lens), device=seq_lens.device) >= 512
        seq_lens = seq_lens.masked_fill(behind, 0)
    return right(q, k_cache, v_cache, seq_lens, **options)


# ---- rows ----------------------------------------------------------------------------------------------------------------------------


@bug("rms_norm")
def weight_offset_is_ignored(right, *args, **options):
    offset = options.get("weight_offset", 0.0)
    return right(*args, **(options | {"weight_offset": 0.0 if abs(offset) < 1e30 else offset}))


@bug("add_rms_norm")
def the_sum_is_not_stored(right, x, residual, *args, **options):
    fake = _is_fake(residual)
    before = None if fake else residual.clone()
    y = right(x, residual, *args, **options)
    if not fake:
        residual.copy_(before)
    return y


@bug("add_rms_norm")
def the_norm_is_of_the_sum_before_it_is_rounded(right, x, residual, weight=None, eps=1e-6, **options):
    if _is_fake(x) or x.shape != residual.shape or x.dtype != residual.dtype or not x.dtype.is_floating_point or x.numel() == 0:
        return right(x, residual, weight, eps, **options)
    total = x.float() + residual.float()
    y = right(x, residual, weight, eps, **options)
    exact = total * (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    exact = exact if weight is None else exact * (weight.float() + options.get("weight_offset", 0.0))
    return exact.to(y.dtype)


@bug("rms_norm_gemm")
def the_residual_is_left_as_it_is(right, x, norm_weight, b, *args, residual=None, **options):
    own = residual if residual is None or _is_fake(residual) else residual.clone()
    return right(x, norm_weight, b, *args, residual=own, **options)


@bug("rms_norm_gemm_gated")
def the_norm_has_no_weight(right, x, norm_weight, *args, **options):
    known = norm_weight is None or _is_fake(x) or norm_weight.shape != x.shape[-1:] or norm_weight.dtype != x.dtype
    return right(x, norm_weight if known else torch.ones_like(norm_weight), *args, **options)


@bug("rms_norm_w4a16_gemm")
def the_norm_is_of_x_alone(right, x, *args, residual=None, **options):
    if residual is None or _is_fake(x) or residual.shape != x.shape or residual.dtype != x.dtype:
        return right(x, *args, residual=residual, **options)
    right(x, *args, residual=residual, **options)
    return right(x, *args, **options)


@bug("w4a16_decoder_block")
def the_block_stores_no_residual(right, a, residual, *args, **options):
    return right(a, residual if _is_fake(residual) else residual.clone(), *args, **options)


@bug("w4a16_decoder_block")
def the_norms_of_a_block_are_exchanged(right, *args, mlp_norm, next_norm, **options):
    return right(*args, mlp_norm=next_norm, next_norm=mlp_norm, **options)


@bug("decoder_block")
def the_block_of_16_bits_stores_no_residual(right, a, residual, *args, **options):
    return right(a, residual if _is_fake(residual) else residual.clone(), *args, **options)


@bug("decoder_block")
def the_norms_of_a_block_of_16_bits_are_exchanged(right, *args, mlp_norm, next_norm, **options):
    return right(*args, mlp_norm=next_norm, next_norm=mlp_norm, **options)


@bug("fp8_decoder_block")
def the_block_of_8_bits_stores_no_residual(right, a, residual, *args, **options):
    return right(a, residual if _is_fake(residual) else residual.clone(), *args, **options)


@bug("fp8_decoder_block")
def the_norms_of_a_block_of_8_bits_are_exchanged(right, *args, mlp_norm, next_norm, **options):
    return right(*args, mlp_norm=next_norm, next_norm=mlp_norm, **options)


@bug("layer_norm")
def the_variance_is_that_of_a_sample(right, x, *args, **options):
    y, n = right(x, *args, **options), x.shape[-1] if x.dim() else 0
    bias = args[1] if len(args) > 1 else None
    return y * math.sqrt((n - 1) / n) if n > 1 and bias is None and options.get("out") is None else y


@bug("softmax")
def a_row_does_not_add_up(right, x, **options):
    y = right(x, **options)
    return y * (1 + 4 * unit(y.dtype)) if options.get("out") is None else y


@bug("gated_activation")
def gate_and_up_are_exchanged(right, x, *args, **options):
    if x.dim() and x.shape[-1] % 2 == 0 and options.get("gate_layout", "halves") == "halves" and not _is_fake(x):
        x = x.roll(x.shape[-1] // 2, -1)
    return right(x, *args, **options)


@bug("gated_activation_quantized")
def codes_are_two_off(right, x, *args, **options):
    q, scales = right(x, *args, **options)
    if q.dtype == torch.int8 and q.numel() and not _is_fake(q):
        q = q + (q.abs() < 100).to(torch.int8) * 2
    return q, scales


@bug("rms_norm_quantized")
def scales_of_blocks_are_row_by_row(right, *args, **options):
    q, scales = right(*args, **options)
    return q, scales.t().contiguous().view(scales.shape) if options.get("quant") == "fp8_block128" else scales


@bug("rope")
def sines_have_the_other_sign(right, q, k, cos_sin, positions, **options):
    if cos_sin.dim() == 2 and cos_sin.dtype.is_floating_point:
        cos_sin = cos_sin.clone()
        cos_sin[:, cos_sin.shape[1] // 2 :].neg_()
    return right(q, k, cos_sin, positions, **options)


@bug("rope")
def k_is_not_rotated(right, q, k, cos_sin, positions, **options):
    right(q, None, cos_sin, positions, **options)
    if k is not None and not _is_fake(k):
        right(q.clone(), k.clone(), cos_sin, positions, **options)


@bug("embedding")
def ids_of_the_last_row_read_the_first(right, ids, weight, **options):
    if weight.dim() == 2 and weight.shape[0] > 1 and not ids.dtype.is_floating_point:
        ids = torch.where(ids == weight.shape[0] - 1, 0, ids)
    return right(ids, weight, **options)


@bug("dequantize")
def scales_of_blocks_begin_at_64(right, q, scales, *args, **options):
    y = right(q, scales, *args, **options)
    if options.get("quant") == "fp8_block128" and q.dim() and q.shape[-1] > 128 and not _is_fake(y):
        y = y.clone()
        y[..., 64:128] *= 2
    return y
